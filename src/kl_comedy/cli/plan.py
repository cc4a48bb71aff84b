"""``kl-comedy plan``: estimate memory, time and device hours of a run, and find out how to divide devices."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kl_comedy.cli.common import Plugins, TableOrJson, load, message, options_in_a_record, plural, print_rows
from kl_comedy.errors import RunFailed
from kl_comedy.redaction import one_line

if TYPE_CHECKING:
    from kl_comedy.planning.plan import Plan, Split

GIB = 2**30
MIB = 2**20
GPU_NAMES = "a100-40, a100-80, l40s-48, h100-80, h200-141, b200-180, ... or cpu"
Overrides = Annotated[list[str] | None, typer.Argument(help="key=value, e.g. train.strategy=fsdp")]


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options of ``kl-comedy plan``."""

    config: Annotated[Path, typer.Argument(help="A YAML config, e.g. configs/paper/on_policy_math_qwen.yaml")]
    overrides: Overrides = None
    gpu: Annotated[str, typer.Option(help=GPU_NAMES)] = "h100-80"
    gpus: Annotated[int | None, typer.Option(min=1, help="Devices per node; sets train.devices")] = None
    nodes: Annotated[int | None, typer.Option(min=1, help="Nodes; sets train.nodes")] = None
    prompt_tokens: Annotated[int | None, typer.Option(help="Prompt length; default: data.prompt.max_tokens")] = None
    completion_tokens: Annotated[int | None, typer.Option(help="Mean completion length; default: --longest-tokens")] = (
        None
    )
    longest_tokens: Annotated[
        int | None, typer.Option(help="Longest completion of a batch; default: rollout.max_new_tokens")
    ] = None
    split: Annotated[int | None, typer.Option(min=1, help="Devices to divide between ranks and engines")] = None
    fail_if_too_big: Annotated[bool, typer.Option("--fail-if-too-big", help="Exit 1 if it does not fit")] = False
    format: TableOrJson = "table"
    plugin: Plugins = None


@options_in_a_record
def plan(wanted: PlanOptions) -> None:
    """Estimate memory per device by component, time of each part of an update, idle time and device hours of a run.

    From the architecture alone: no weights are loaded. Says what does not fit, which settings would make it fit, what
    an update waits for, and with --split which number of trainer ranks and engines is the fastest.

    Example: `kl-comedy plan configs/paper/on_policy_math_qwen.yaml --gpu h100-80 --split 8`
    """
    from kl_comedy.planning.plan import Lengths, Plan, splits
    from kl_comedy.planning.sizes import device_named

    # The options come last, so that they win over an override of the same key.
    changes = list(wanted.overrides or [])
    if wanted.gpus is not None:
        changes.append(f"train.devices={wanted.gpus}")
    if wanted.nodes is not None:
        changes.append(f"train.nodes={wanted.nodes}")
    loaded = load(wanted.config, changes, wanted.plugin)
    device = device_named(wanted.gpu)
    lengths = Lengths(prompt=wanted.prompt_tokens, completion=wanted.completion_tokens, longest=wanted.longest_tokens)
    # Before the splits: a mistake in the tokens is one of the plan, and should be reported as such.
    planned = Plan(loaded, device, lengths)
    divided: Sequence[Split] = ()
    if wanted.split is not None:
        divided = splits(loaded, device, wanted.split, lengths)

    if wanted.format == "json":
        print(json.dumps(_as_json(planned, divided), indent=1))
    else:
        _show(planned)
        if divided:
            _show_splits(divided)
    # Splits are sorted: those that fit first, and of these the fastest.
    if divided and divided[0].fits:
        message(f"fastest of {wanted.split}: {shlex.join(divided[0].overrides)}")
    _advise(planned)
    # Last, so that a script which stops at the exit code has the whole plan in its log.
    if wanted.fail_if_too_big and not planned.fits:
        peak = f"{planned.peak_bytes / GIB:.1f} GiB"
        limit = f"{planned.limit_bytes / GIB:.1f} GiB"
        raise RunFailed(f"{peak} in one process, {limit} on {planned.device.name}")


def _advise(planned: Plan) -> None:
    """Print warnings, and the settings that would make the run fit."""
    for warning in planned.warnings:
        message(f"warning: {warning}")
    # On stderr, as all advice is: stdout has the plan, perhaps as JSON.
    for remedy in planned.remedies:
        message(f"fits, with {remedy.peak_bytes / GIB:.1f} GiB: {' '.join(remedy.overrides)}")
    if not planned.fits and not planned.remedies:
        message("no setting was found that makes it fit")


def _as_json(plan: Plan, divided: Sequence[Split]) -> dict[str, Any]:
    """A plan as plain data; bytes, seconds, counts."""
    return {
        # Without the model's own config, which has dozens of keys and is no result of the plan.
        "model": {name: value for name, value in vars(plan.shape).items() if name != "config"},
        "device": asdict(plan.device),
        "load": asdict(plan.load),
        "memory": {
            "components": [asdict(item) for item in plan.components],
            "peak_bytes": plan.peak_bytes,
            "limit_bytes": plan.limit_bytes,
            "fits": plan.fits,
        },
        "time": asdict(plan.timing),
        "assumed": asdict(plan.assumed),
        "warnings": list(plan.warnings),
        "remedies": [asdict(remedy) for remedy in plan.remedies],
        "splits": [asdict(split) for split in divided],
    }


def _show(plan: Plan) -> None:
    """Print the model, the table of memory, the table of time, and what was assumed."""
    shape = plan.shape
    train = plan.config.train
    counts = f"{_million(shape.parameters)} parameters, {_million(shape.trainable)} trained"
    dtypes = f"{plan.config.model.dtype} weights, {train.precision}"
    count = plan.load.processes
    processes = f"{count} {plural(count, 'process')} on {plan.device.name}"
    if train.strategy != "single":
        processes += f", strategy {train.strategy}"
    print(f"{one_line(shape.source)}: {counts}; {processes}; {dtypes}\n")

    _print_columns(("memory of one process", "size", "when", "what"), _memory_rows(plan))
    print()
    _print_columns(("time", "", "of"), _time_rows(plan))
    print()

    load = plan.load
    assumed = plan.assumed
    print(
        f"prompts of {load.prompt} and completions of {load.completion} tokens, the longest {plan.longest}; assumed: "
        f"{assumed.flops:.0%} of peak bf16 products, {assumed.fp32_flops:.0%} of float32 products, "
        f"{assumed.bandwidth:.0%} of bandwidth, {assumed.link:.0%} of the link; {plan.device.source}"
    )


def _print_columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    print_rows([dict(zip(head, row, strict=True)) for row in rows], "table")


def _memory_rows(plan: Plan) -> list[tuple[str, str, str, str]]:
    rows = [(item.name, _size(item.bytes), item.phase, item.what) for item in plan.components]
    # In the column of the phase: the peak belongs to none of them.
    fits = "fits" if plan.fits else "does not fit"
    rows.append(("peak", _size(plan.peak_bytes), fits, f"{plan.limit_bytes / GIB:.1f} GiB per process"))
    return rows


def _time_rows(plan: Plan) -> list[tuple[str, str, str]]:
    times = plan.timing
    sampler = "the ranks"
    # Where engines run beside the trainer they sample; else the ranks do, in turn with learning.
    if plan.beside:
        sampler = f"{plan.engines} {plural(plan.engines, 'engine')}"
    by_transport = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in times.transfer_s.items())
    bottleneck_s = times.parts[times.bottleneck]
    return [
        ("generate", f"{times.generate_s:.3g} s", f"per update, by {sampler}"),
        ("transfer", f"{times.publish_s + times.load_s:.3g} s", by_transport or "of the weights to the sampler"),
        ("learn", f"{times.learn_s:.3g} s", f"per update; {plan.load.update_micro} micro-batches per rank"),
        ("update", f"{times.update_s:.3g} s", "without verification, evaluation and checkpoints"),
        ("idle", f"{times.trainer_idle:.0%}, {times.engine_idle:.0%}", "trainer, engines: waiting for the other"),
        ("bottleneck", times.bottleneck, f"{bottleneck_s:.3g} s of an update"),
        ("generated", f"{times.generated_tokens_per_s:,.0f} tokens/s", "all processes, while generating"),
        ("trained", f"{times.trained_tokens_per_s:,.0f} tokens/s", "all processes, while learning"),
        ("run", f"{times.run_hours:.3g} h", f"{plan.config.train.steps} updates"),
        ("device hours", f"{times.device_hours:.3g}", f"{times.devices} devices"),
    ]


def _show_splits(divided: Sequence[Split]) -> None:
    """Print the ways to divide the devices between trainer ranks and engines."""
    print("\nways to divide the devices: those that fit, the fastest first; engines 0: every device trains and draws\n")
    rows = []
    for split in divided:
        memory = f"{split.peak_bytes / GIB:.1f}"
        if not split.fits:
            # Shown all the same: a reader should see how far a faster division is from fitting.
            memory += ", does not fit"
        rows.append(
            {
                "ranks": split.ranks,
                "engines": split.engines,
                "generate, s": f"{split.generate_s:.3g}",
                "transfer, s": f"{split.transfer_s:.3g}",
                "learn, s": f"{split.learn_s:.3g}",
                "update, s": f"{split.update_s:.3g}",
                "idle": f"{split.trainer_idle:.0%}, {split.engine_idle:.0%}",
                "run, h": f"{split.run_hours:.3g}",
                "GiB per rank": memory,
            }
        )
    print_rows(rows, "table")


def _size(count: float) -> str:
    """A number of bytes in GiB, below 0.01 GiB in MiB.

    >>> _size(3.5 * GIB), _size(3.4 * 2**20)
    ('3.50 GiB', '3.4 MiB')
    """
    if count < 0.01 * GIB:
        return f"{count / MIB:.1f} MiB"
    return f"{count / GIB:.2f} GiB"


def _million(count: int) -> str:
    """A number of parameters in millions, from 100 million on in billions.

    >>> _million(7_615_616_512), _million(891_840)
    ('7.62 B', '0.892 M')
    """
    if count >= 1e8:
        return f"{count / 1e9:.3g} B"
    return f"{count / 1e6:.3g} M"
