"""``kl-comedy evaluate``: the model of a config on its evaluation sets."""

from __future__ import annotations

import json

from rich.console import Console
from rich.table import Table

from kl_comedy.config import Config
from kl_comedy.errors import UserError
from kl_comedy.evaluation import evaluate
from kl_comedy.models import load_model
from kl_comedy.registry import ROLLOUTS
from kl_comedy.rewards import RewardSum
from kl_comedy.training.build import eval_sampling, load_raw, render_all
from kl_comedy.training.seeds import derive_seed


def evaluate_config(config: Config, console: Console, *, as_json: bool) -> None:
    """Evaluate and print one row per set. Raises :class:`UserError` where there is no set."""
    if not config.data.eval:
        raise UserError("data.eval: names no set to evaluate on")
    raw = load_raw(config, train=False)
    loaded = load_model(config.model)
    problems = render_all(config, raw, loaded)
    backend = ROLLOUTS.get(config.rollout.backend).fn(config.rollout, loaded=loaded)
    rows = []
    with RewardSum(config.rewards) as scorer:
        for held_out in problems.evals:
            with console.status(f"evaluating {held_out.name} ({len(held_out.prompts)} problems)"):
                result = evaluate(
                    backend, scorer, held_out, samples=config.eval.samples, sampling=eval_sampling(config),
                    seed=derive_seed(config.seed, f"eval/{held_out.name}", 0),
                )  # fmt: skip
            rows.append(
                {
                    "set": result.name, "problems": result.problems, "samples": result.samples,
                    "reward": result.reward, "half_width_95": result.half_width, "length": result.length,
                    "truncated_share": result.truncated, "model": config.model.source,
                }
            )  # fmt: skip
    backend.close()
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    table = Table("set", "problems", "samples", "reward (95%)", "length", "truncated")
    for row in rows:
        table.add_row(
            row["set"], str(row["problems"]), str(row["samples"]), f"{row['reward']:.3f} ± {row['half_width_95']:.3f}",
            f"{row['length']:.1f}", f"{row['truncated_share']:.1%}",
        )  # fmt: skip
    Console().print(table)
