"""What ``kl-comedy evaluate`` is pointed at: a config, a run, one of its checkpoints, a model by folder or name.

``kl-comedy evaluate``: the model of a config on its evaluation sets.

``kl-comedy evaluate --suite``: suites on one model, chunk by chunk, from where an earlier call was stopped.

What the evaluation job of a sweep's cell does: the sets of ``data.eval``, and the suites of ``eval.suites``.

``kl-comedy evaluate``: a policy on a run's own sets, or on suites.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shlex
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from kl_comedy.config import Config
from kl_comedy.config.combinations import capabilities_of
from kl_comedy.config.schema import SuiteConfig
from kl_comedy.errors import RunFailed, UserError, bad_value
from kl_comedy.evaluation import EvalResult
from kl_comedy.evaluation import evaluate as evaluate_policy
from kl_comedy.evaluation.evaluate import (
    CHUNK,
    Drawer,
    Plan,
    Records,
    Shard,
    generating,
    likelihood_drawer,
    run_chunks,
    track,
)
from kl_comedy.evaluation.likelihood import choice_passes
from kl_comedy.evaluation.scores import SuiteScore, check_ks, default_ks, score_compared, score_generated
from kl_comedy.evaluation.suites import OwnData, chosen_template, get_suite, suite_problems, suite_prompts
from kl_comedy.models import LoadedModel, load_model, weights_hash
from kl_comedy.registry import ROLLOUTS
from kl_comedy.rewards import RewardSum
from kl_comedy.rollouts import RolloutBackend, Sampling
from kl_comedy.tracking.store import clean_path
from kl_comedy.training.build import eval_sampling, load_problem_sets, render_prompts
from kl_comedy.training.eval_metrics import completion_metrics, load_eval_reference
from kl_comedy.training.experience import derive_seed

if TYPE_CHECKING:
    from rich.console import Console

    from kl_comedy.config import Config
    from kl_comedy.training.run_folder import RunDir


@dataclass(frozen=True, kw_only=True)
class Target:
    """The config whose ``model`` is evaluated, what to call it, and of which run and update its weights are."""

    config: Config
    label: str
    run: str | None = None
    step: int = 0

    def tags(self) -> dict[str, str]:
        """What an evaluation says about its subject."""
        tags = {"evaluated.model": self.config.model.source if self.run is None else self.label}
        return tags if self.run is None else {**tags, "evaluated.run": self.run, "evaluated.step": str(self.step)}


@contextlib.contextmanager
def resolved(target: str, overrides: Sequence[str]) -> Iterator[Target]:
    """The target, its weights on disk as long as the context lasts (a checkpoint's are written out for it).

    Raises :class:`~kl_comedy.errors.UserError` for a target that is none of these, and for mistaken overrides.
    """
    from kl_comedy.config import load_config
    from kl_comedy.training.run_folder import RunDir

    path = Path(target)
    if path.suffix in (".yaml", ".yml"):
        config = load_config(path, overrides)
        yield Target(config=config, label=config.name)
    elif (path / "config.yaml").is_file():
        with _of_run(RunDir(path=path), None, overrides) as found:
            yield found
    elif path.suffix == ".ckpt" and (path.parent.parent / "config.yaml").is_file():
        with _of_run(RunDir(path=path.parent.parent), path, overrides) as found:
            yield found
    else:
        config = load_config(None, [f"model.source={target}", *overrides])
        yield Target(config=config, label=path.name or target)


@contextlib.contextmanager
def _of_run(run: RunDir, checkpoint: Path | None, overrides: Sequence[str]) -> Iterator[Target]:
    """RUN/policy of a finished run; else a checkpoint (the newest whole one, where none is named), written out."""
    from kl_comedy.config import load_config
    from kl_comedy.training.export import export_policy
    from kl_comedy.training.run_folder import step_of

    own = load_config(run.path / "config.yaml")
    trained = ["model.options={}", "model.lora=null", "model.gguf_file=null", "model.revision=null"]
    if own.rollout.backend == "replay":
        trained += ["rollout.backend=hf", "rollout.options={}"]
    with tempfile.TemporaryDirectory(prefix="kl_comedy_policy_") as folder:
        source, step = run.policy, own.train.steps
        if checkpoint is not None or not run.policy.is_dir():
            source = Path(folder) / "policy"
            step = step_of(
                export_policy(run, own, source, which="newest" if checkpoint is None else str(step_of(checkpoint)))
            )
        config = load_config(run.path / "config.yaml", [f"model.source={source}", *trained, *overrides])
        yield Target(config=config, label=f"{run.path.name}-{step}", run=run.path.name, step=step)


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
    raw = load_problem_sets(config, train=False)
    loaded = load_model(config.model)
    measure = completion_metrics(config, loaded=loaded, reference=load_eval_reference(config, loaded))
    problems = render_prompts(config, raw, loaded)
    backend = ROLLOUTS.get(config.rollout.backend).fn(config.rollout, loaded=loaded)
    results = []
    with RewardSum(config.rewards) as scorer:
        for held_out in problems.evals:
            with console.status(f"evaluating {held_out.name} ({len(held_out.prompts)} problems)"):
                result = evaluate_policy(
                    backend,
                    scorer,
                    held_out,
                    samples=config.eval.samples,
                    sampling=eval_sampling(config),
                    seed=derive_seed(config.seed, f"eval/{held_out.name}", 0),
                    measure=measure,
                )
            results.append(result)
    backend.close()
    return results


def _row(result: EvalResult, config: Config) -> dict[str, Any]:
    return {
        "set": result.name,
        "problems": result.problems,
        "samples": result.samples,
        "reward": result.reward,
        "half_width_95": result.half_width,
        "length": result.length,
        "truncated_share": result.truncated,
        "model": config.model.source,
        "reference": config.eval.reference,
        **result.measured,
    }


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
            result.name,
            str(result.problems),
            str(result.samples),
            f"{result.reward:.3f} ± {result.half_width:.3f}",
            f"{result.length:.1f}",
            f"{result.truncated:.1%}",
            *(f"{result.measured[name]:.4f}" for name in shown),
        )
    return table


PLAIN_EVERY_S = 5.0
STALLED_AFTER_S = 3600.0
"""How long the first of several ranks waits for a next chunk of the others before it gives up on them."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the command line asks for besides the config."""

    suites: Sequence[str]
    out: Path
    shard: Shard
    launched: bool = False
    ks: Sequence[int] | None = None
    limit: int | None = None
    root: Path | None = None
    own: Mapping[str, OwnData] = field(default_factory=dict)
    template: str = "auto"
    interval: str = "wilson"
    chunk: int = CHUNK


def evaluate_suites(target: Target, asked: Asked, console: Console) -> list[dict[str, Any]]:
    """Evaluate the suites in turn; one row for each that is whole now (other shards may still be missing).

    Every mistake in names, files, checksums, ``k`` and prompts surfaces before anything is drawn.
    """
    config = target.config
    suites = [get_suite(name) for name in asked.suites]
    _check(config, suites, asked)
    problems = {
        suite.name: suite_problems(suite, root=asked.root, own=asked.own.get(suite.name), limit=asked.limit)
        for suite in suites
    }
    _own_gpu()
    loaded = load_model(config.model)
    weights = weights_hash(loaded.model)
    plans = [_plan(config, suite, problems[suite.name], loaded, weights, asked) for suite in suites]
    rows = []
    with contextlib.ExitStack() as stack:
        backend = functools.cache(lambda: stack.enter_context(_backend(config, loaded, asked.out)))
        for plan in plans:
            records = Records(path=asked.out / clean_path(target.label) / plan.folder_name, plan=plan)
            records.open()
            if records.missing():
                with _drawer(plan, config, loaded, backend) as drawer, _progress(console, records) as advance:
                    run_chunks(records, drawer, asked.shard, advance)
            if _whole(records, asked, console):
                rows.append(_row_suite_evaluation(records, target, weights, asked))
    return rows


def _check(config: Config, suites: Sequence[SuiteConfig], asked: Asked) -> None:
    for name in asked.own:
        if name not in [suite.name for suite in suites]:
            raise bad_value("--data", name, [suite.name for suite in suites], "suites of this call")
    check_ks(asked.ks or (), config.eval.samples)
    if config.eval.samples > 1 and config.eval.temperature == 0 and any(s.kind == "generate" for s in suites):
        raise bad_value(
            "eval.samples",
            config.eval.samples,
            "1 with eval.temperature 0",
            "greedy samples are all the same; set eval.temperature, as 0.7",
        )


def _own_gpu() -> None:
    """Of several ranks on a node each takes the GPU of its local number."""
    import torch

    if torch.cuda.is_available() and os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID")):
        local = int(os.environ.get("LOCAL_RANK") or os.environ["SLURM_LOCALID"])
        torch.cuda.set_device(local % torch.cuda.device_count())


def _plan(
    config: Config, suite: SuiteConfig, problems: Sequence[Any], loaded: LoadedModel, weights: str, asked: Asked
) -> Plan:
    template = chosen_template(suite, loaded.tokenizer, asked.template)
    prompts, report = suite_prompts(suite, problems, loaded.tokenizer, template=template)
    rollout, evaluation, model = config.rollout, config.eval, config.model
    return Plan(
        suite=suite,
        prompts=prompts,
        template=template,
        samples=evaluation.samples,
        seed=config.seed,
        seeds=functools.partial(derive_seed, config.seed),
        chunk=asked.chunk,
        sampling=Sampling(
            temperature=evaluation.temperature,
            max_new_tokens=evaluation.max_new_tokens or suite.max_new_tokens,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            min_p=rollout.min_p,
            stop=tuple(suite.stop),
        ),
        model={
            "weights": weights,
            "dtype": model.dtype,
            "attention": model.attention,
            "share_prompt": model.share_prompt,
            "device": loaded.device.type,
            "backend": rollout.backend,
            "options": dict(rollout.options),
            "batch_sequences": rollout.batch_sequences,
        },
        left_out={"too_long": report.too_long, "control_tokens": report.control_tokens},
    )


@contextlib.contextmanager
def _backend(config: Config, loaded: LoadedModel, folder: Path) -> Iterator[RolloutBackend]:
    """The sampler, made when a suite first needs it."""
    backend: RolloutBackend = ROLLOUTS.get(config.rollout.backend, key="rollout.backend").fn(
        config.rollout, loaded=loaded
    )
    try:
        if capabilities_of(config.rollout.backend).needs_folder:
            backend.work_in(folder)
        yield backend
    finally:
        backend.close()


@contextlib.contextmanager
def _drawer(plan: Plan, config: Config, loaded: LoadedModel, backend: Any) -> Iterator[Drawer]:
    if plan.suite.kind == "generate":
        with generating(plan, backend()) as drawer:
            yield drawer
        return
    yield likelihood_drawer(plan, choice_passes(config, loaded))


@contextlib.contextmanager
def _progress(console: Console, records: Records) -> Iterator[Any]:
    """A bar on a terminal, a line every few seconds elsewhere; problems of earlier calls and other shards count."""
    plan = records.plan
    total = len(plan.prompts)
    done = total - sum(len(plan.part(chunk)) for chunk in records.missing())
    if console.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn())
        with Progress(*columns, TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), console=console) as bar:
            task = bar.add_task(plan.suite.name, total=total, completed=done)
            yield lambda problems: bar.advance(task, problems)
        return
    spoken = time.monotonic()

    def advance(problems: int) -> None:
        nonlocal done, spoken
        done += problems
        if time.monotonic() - spoken >= PLAIN_EVERY_S or done == total:
            spoken = time.monotonic()
            console.print(f"{plan.suite.name} {done}/{total} problems", soft_wrap=True, highlight=False)

    yield advance


def _whole(records: Records, asked: Asked, console: Console) -> bool:
    """Whether this process reports: everything is there. Of launched ranks the first waits for the others and does."""
    if asked.launched and asked.shard.index:
        return False
    waited, before = time.monotonic(), len(records.missing())
    while not records.merge():
        missing = len(records.missing())
        if not asked.launched:
            console.print(
                f"{records.plan.suite.name}: shard {asked.shard.index}/{asked.shard.count} is done; {missing} chunks "
                "of other shards are missing; the call that finishes them reports",
                soft_wrap=True,
                highlight=False,
            )
            return False
        if missing != before:
            waited, before = time.monotonic(), missing
        if time.monotonic() - waited > STALLED_AFTER_S:
            raise RunFailed(f"{records.path}: {missing} chunks of other ranks did not come; the same command goes on")
        time.sleep(0.2)
    return True


def _row_suite_evaluation(records: Records, target: Target, weights: str, asked: Asked) -> dict[str, Any]:
    """Score, write beside the records, track once."""
    plan, samples = records.plan, records.plan.samples
    score = _score(plan, records.rows(), default_ks(samples) if asked.ks is None else asked.ks, asked.interval)
    row = {
        "suite": score.suite,
        "kind": plan.suite.kind,
        "problems": score.problems,
        "samples": score.samples,
        "temperature": plan.sampling.temperature if plan.suite.kind == "generate" else None,
        "template": plan.template,
        "interval": asked.interval,
        **score.values,
        **{f"left_out_{why}": n for why, n in plan.left_out.items()},
        "model": target.tags()["evaluated.model"],
        "weights": weights,
        "records": str(records.path),
    }
    records.write_table()
    records.write_summary(row)
    marker = records.path / "tracked"
    if not marker.exists():
        tags = {**target.tags(), "evaluated.weights": weights}
        run_id = track(records, score, target.config.tracking, tags=tags, step=target.step)
        marker.write_text(f"{run_id}\n")
    return row


def _score(plan: Plan, rows: Sequence[Mapping[str, Any]], ks: Sequence[int], method: str) -> SuiteScore:
    if plan.suite.kind == "likelihood":
        return score_compared(plan.suite.name, rows, method=method)
    return score_generated(plan.suite.name, rows, ks=ks, method=method)


def evaluate_run(
    run: Path, summary: Mapping[str, Any], overrides: Sequence[str], records: Path, console: Console
) -> list[dict[str, Any]]:
    """Evaluate a finished run by the command its ``summary`` names, with ``overrides``; a row for each set and suite.

    What suites draw is kept below ``records``; a call that was stopped goes on there.
    """
    from kl_comedy.config import load_config
    from kl_comedy.evaluation.evaluate import Shard

    words = shlex.split(summary["evaluate_command"])[2:]
    config = load_config(words[0], [*words[1:], *overrides])
    if not config.data.eval and not config.eval.suites:
        raise UserError("evaluate: names nothing to evaluate on; data.eval and eval.suites are empty")
    rows = evaluate_sets(config, console) if config.data.eval else []
    if config.eval.suites:
        step = config.train.steps
        target = Target(config=config, label=f"{run.name}-{step}", run=run.name, step=step)
        asked = Asked(suites=config.eval.suites, out=records, shard=Shard(), root=_root(config))
        rows += evaluate_suites(target, asked, console)
    return rows


def _root(config: Config) -> Path | None:
    return None if config.eval.data_root is None else Path(config.eval.data_root)
