"""``kl-comedy evaluate --suite``: suites on one model, chunk by chunk, from where an earlier call was stopped."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from kl_comedy.cli.targets import Target
from kl_comedy.config.suites import SuiteConfig
from kl_comedy.errors import RunFailed, bad_value
from kl_comedy.evaluation.drawing import Drawer, generating, likelihood_drawer, run_chunks
from kl_comedy.evaluation.likelihood import choice_passes
from kl_comedy.evaluation.plan import CHUNK, Plan, Shard
from kl_comedy.evaluation.problems import OwnData, chosen_template, suite_problems, suite_prompts
from kl_comedy.evaluation.records import Records
from kl_comedy.evaluation.scores import SuiteScore, check_ks, default_ks, score_compared, score_generated
from kl_comedy.evaluation.suites import get_suite
from kl_comedy.evaluation.tracking import track
from kl_comedy.models import LoadedModel, load_model, weights_hash
from kl_comedy.registry import ROLLOUTS
from kl_comedy.rollouts import RolloutBackend, Sampling, WorksInFolder
from kl_comedy.tracking.naming import clean_path
from kl_comedy.training.seeds import derive_seed

if TYPE_CHECKING:
    from kl_comedy.config import Config

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
                rows.append(_row(records, target, weights, asked))
    return rows


def _check(config: Config, suites: Sequence[SuiteConfig], asked: Asked) -> None:
    for name in asked.own:
        if name not in [suite.name for suite in suites]:
            raise bad_value("--data", name, [suite.name for suite in suites], "suites of this call")
    check_ks(asked.ks or (), config.eval.samples)
    if config.eval.samples > 1 and config.eval.temperature == 0 and any(s.kind == "generate" for s in suites):
        raise bad_value(
            "eval.samples", config.eval.samples, "1 with eval.temperature 0",
            "greedy samples are all the same; set eval.temperature, as 0.7",
        )  # fmt: skip


def _own_gpu() -> None:
    """Of several ranks on a node each takes the GPU of its local number."""
    import torch

    if torch.cuda.is_available() and os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID")):
        local = int(os.environ.get("LOCAL_RANK") or os.environ["SLURM_LOCALID"])
        torch.cuda.set_device(local % torch.cuda.device_count())


def _plan(
    config: Config, suite: SuiteConfig, problems: Sequence[Any], loaded: LoadedModel, weights: str, asked: Asked
) -> Plan:  # fmt: skip
    template = chosen_template(suite, loaded.tokenizer, asked.template)
    prompts, report = suite_prompts(suite, problems, loaded.tokenizer, template=template)
    rollout, evaluation, model = config.rollout, config.eval, config.model
    return Plan(
        suite=suite, prompts=prompts, template=template, samples=evaluation.samples, seed=config.seed,
        seeds=functools.partial(derive_seed, config.seed), chunk=asked.chunk,
        sampling=Sampling(
            temperature=evaluation.temperature, max_new_tokens=evaluation.max_new_tokens or suite.max_new_tokens,
            top_p=rollout.top_p, top_k=rollout.top_k, min_p=rollout.min_p, stop=tuple(suite.stop),
        ),
        model={
            "weights": weights, "dtype": model.dtype, "attention": model.attention, "share_prompt": model.share_prompt,
            "device": loaded.device.type, "backend": rollout.backend, "options": dict(rollout.options),
            "batch_sequences": rollout.batch_sequences,
        },
        left_out={"too_long": report.too_long, "control_tokens": report.control_tokens},
    )  # fmt: skip


@contextlib.contextmanager
def _backend(config: Config, loaded: LoadedModel, folder: Path) -> Iterator[RolloutBackend]:
    """The sampler, made when a suite first needs it."""
    backend: RolloutBackend = ROLLOUTS.get(config.rollout.backend, key="rollout.backend").fn(
        config.rollout, loaded=loaded
    )
    try:
        if isinstance(backend, WorksInFolder):
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
                "of other shards are missing; the call that finishes them reports", soft_wrap=True, highlight=False,
            )  # fmt: skip
            return False
        if missing != before:
            waited, before = time.monotonic(), missing
        if time.monotonic() - waited > STALLED_AFTER_S:
            raise RunFailed(f"{records.path}: {missing} chunks of other ranks did not come; the same command goes on")
        time.sleep(0.2)
    return True


def _row(records: Records, target: Target, weights: str, asked: Asked) -> dict[str, Any]:
    """Score, write beside the records, track once."""
    plan, samples = records.plan, records.plan.samples
    score = _score(plan, records.rows(), default_ks(samples) if asked.ks is None else asked.ks, asked.interval)
    row = {
        "suite": score.suite, "kind": plan.suite.kind, "problems": score.problems, "samples": score.samples,
        "temperature": plan.sampling.temperature if plan.suite.kind == "generate" else None, "template": plan.template,
        "interval": asked.interval, **score.values, **{f"left_out_{why}": n for why, n in plan.left_out.items()},
        "model": target.tags()["evaluated.model"], "weights": weights, "records": str(records.path),
    }  # fmt: skip
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
