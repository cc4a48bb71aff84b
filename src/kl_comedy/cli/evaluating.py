"""``kl-comedy evaluate``: the model of a config on its evaluation sets."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from kl_comedy.config import Config
from kl_comedy.errors import UserError
from kl_comedy.evaluation import EvalResult, evaluate
from kl_comedy.models import load_model
from kl_comedy.registry import ROLLOUTS
from kl_comedy.rewards import RewardSum
from kl_comedy.training.build import eval_sampling, load_raw, render_all
from kl_comedy.training.held_out import completion_measure, load_eval_reference
from kl_comedy.training.seeds import derive_seed


def evaluate_config(config: Config, console: Console, *, as_json: bool) -> None:
    """Evaluate and print one row per set. Raises :class:`UserError` where there is no set."""
    results = _evaluated(config, console)
    if as_json:
        print(json.dumps([_row(result, config) for result in results], indent=1))
        return
    Console().print(_table(results))


def evaluate_sets(config: Config, console: Console) -> list[dict[str, Any]]:
    """Evaluate; one row per set, as ``--format json`` prints them."""
    return [_row(result, config) for result in _evaluated(config, console)]


def _evaluated(config: Config, console: Console) -> list[EvalResult]:
    if not config.data.eval:
        raise UserError("data.eval: names no set to evaluate on")
    raw = load_raw(config, train=False)
    loaded = load_model(config.model)
    measure = completion_measure(config, loaded=loaded, reference=load_eval_reference(config, loaded))
    problems = render_all(config, raw, loaded)
    backend = ROLLOUTS.get(config.rollout.backend).fn(config.rollout, loaded=loaded)
    results = []
    with RewardSum(config.rewards) as scorer:
        for held_out in problems.evals:
            with console.status(f"evaluating {held_out.name} ({len(held_out.prompts)} problems)"):
                result = evaluate(
                    backend, scorer, held_out, samples=config.eval.samples, sampling=eval_sampling(config),
                    seed=derive_seed(config.seed, f"eval/{held_out.name}", 0), measure=measure,
                )  # fmt: skip
            results.append(result)
    backend.close()
    return results


def _row(result: EvalResult, config: Config) -> dict[str, Any]:
    return {
        "set": result.name, "problems": result.problems, "samples": result.samples,
        "reward": result.reward, "half_width_95": result.half_width, "length": result.length,
        "truncated_share": result.truncated, "model": config.model.source, "reference": config.eval.reference,
        **result.measured,
    }  # fmt: skip


MEASURED = {
    "kl/exact_reverse_sequence": "KL, nats/completion",
    "kl/total_variation_token": "total variation/token",
    "policy/entropy": "entropy, nats/token",
}
"""What the table shows of what was measured; ``--format json`` has everything."""


def _table(results: Sequence[EvalResult]) -> Table:
    shown = [name for name in MEASURED if any(name in result.measured for result in results)]
    table = Table("set", "problems", "samples", "reward (95%)", "length", "truncated", *(MEASURED[n] for n in shown))
    for result in results:
        table.add_row(
            result.name, str(result.problems), str(result.samples), f"{result.reward:.3f} ± {result.half_width:.3f}",
            f"{result.length:.1f}", f"{result.truncated:.1%}", *(f"{result.measured[name]:.4f}" for name in shown),
        )  # fmt: skip
    return table
