"""``kl-comedy plan``: memory, time and device hours of a run before it begins."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kl_comedy.cli.common import Plugins, TableOrJson, check_choice, load
from kl_comedy.errors import RunFailed

if TYPE_CHECKING:
    from kl_comedy.config import Config
    from kl_comedy.lab.planning import Plan


GIB = 2**30


def mount(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command()(plan)


def plan(
    config: Annotated[Path, typer.Argument(help="A YAML config, as configs/paper/on_policy_math_qwen.yaml")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, as train.strategy=fsdp")] = None,
    gpu: Annotated[str, typer.Option(help="a100-40, a100-80, l40s-48, h100-80, h200-141, b200-180, ... or cpu")] = (
        "h100-80"
    ),
    gpus: Annotated[int | None, typer.Option(min=1, help="Devices of each node; sets train.devices")] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Nodes; sets train.nodes")] = None,
    prompt_tokens: Annotated[int | None, typer.Option(help="Of a prompt; default: data.prompt.max_tokens")] = None,
    completion_tokens: Annotated[int | None, typer.Option(help="Default: rollout.max_new_tokens")] = None,
    fail_if_too_big: Annotated[bool, typer.Option("--fail-if-too-big", help="Exit code 1 where it does not fit")] = (
        False
    ),
    format: TableOrJson = "table",
    plugin: Plugins = None,
) -> None:
    """Estimate memory per device by component, tokens per second, time per update and device hours of a run.

    From the architecture alone: no weights are loaded. Says what does not fit, and which settings would make it fit.

    Example: `kl-comedy plan configs/paper/on_policy_math_qwen.yaml --gpu h100-80 --gpus 8 train.strategy=fsdp`
    """
    check_choice("--format", format)
    from kl_comedy.lab.planning import Lengths, device_named, plan_run

    counts = {"train.devices": gpus, "train.nodes": nodes}
    given = [f"{key}={count}" for key, count in counts.items() if count is not None]
    loaded = load(config, [*(overrides or []), *given], plugin)
    planned = plan_run(loaded, device_named(gpu), lengths=Lengths(prompt=prompt_tokens, completion=completion_tokens))
    if format == "json":
        print(json.dumps(_as_json(planned), indent=1))
    else:
        _show(planned, loaded)
    for line in planned.warnings:
        print(f"warning: {line}", file=sys.stderr)
    for remedy in planned.remedies:
        print(f"fits, with {remedy.peak_bytes / GIB:.1f} GiB: {' '.join(remedy.overrides)}", file=sys.stderr)
    if not planned.fits and not planned.remedies:
        print("no setting was found that makes it fit", file=sys.stderr)
    if fail_if_too_big and not planned.fits:
        peak, limit = f"{planned.peak_bytes / GIB:.1f} GiB", f"{planned.limit_bytes / GIB:.1f} GiB"
        raise RunFailed(f"{peak} in one process, {limit} on {planned.device.name}")


def _as_json(planned: Plan) -> dict[str, Any]:
    """A plan as plain data; bytes, seconds, counts."""
    from dataclasses import asdict

    shape = {name: value for name, value in vars(planned.shape).items() if name != "config"}
    return {
        "model": shape,
        "device": asdict(planned.device),
        "load": asdict(planned.load),
        "memory": {
            "components": [asdict(item) for item in planned.components],
            "peak_bytes": planned.peak_bytes,
            "limit_bytes": planned.limit_bytes,
            "fits": planned.fits,
        },
        "time": asdict(planned.timing),
        "assumed": asdict(planned.assumed),
        "warnings": list(planned.warnings),
        "remedies": [
            {"overrides": list(remedy.overrides), "peak_bytes": remedy.peak_bytes} for remedy in planned.remedies
        ],
    }


def _show(planned: Plan, config: Config) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(markup=False, highlight=False)
    if not console.is_terminal:
        console = Console(width=120, markup=False, highlight=False)
    load, device = planned.load, planned.device
    strategy = f"{config.train.strategy}, {load.processes} x {device.name}"
    console.print(
        f"{planned.shape.source}: {_million(planned.shape.parameters)} parameters, {_million(planned.shape.trainable)} "
        f"trained; {strategy}; {config.model.dtype} weights, {config.train.precision}"
    )
    table = Table("memory of one process", "GiB", "when", "what")
    table.columns[1].justify = "right"
    for item in planned.components:
        table.add_row(item.name, f"{item.bytes / GIB:.2f}", item.phase, item.what)
    verdict = "fits" if planned.fits else "does not fit"
    table.add_section()
    table.add_row("peak", f"{planned.peak_bytes / GIB:.2f}", verdict, f"{planned.limit_bytes / GIB:.1f} GiB a process")
    console.print(table)
    console.print(_times(planned, config))


def _million(count: int) -> str:
    """A count as people write it.

    >>> _million(7_615_616_512), _million(891_840)
    ('7.62 B', '0.892 M')
    """
    return f"{count / 1e9:.3g} B" if count >= 1e8 else f"{count / 1e6:.3g} M"


def _times(planned: Plan, config: Config) -> Any:
    from rich.table import Table

    times, assumed = planned.timing, planned.assumed
    table = Table("time", "", "of")
    table.columns[1].justify = "right"
    table.add_row(
        "generate", f"{times.generate_s:.3g} s", f"an update; {planned.load.drawn_rows} completions a process"
    )
    table.add_row("learn", f"{times.learn_s:.3g} s", f"an update; {planned.load.update_micro} micro-batches a process")
    table.add_row("update", f"{times.update_s:.3g} s", "without verification, evaluation and checkpoints")
    table.add_row("generated", f"{times.generated_tokens_per_s:,.0f} tokens/s", "all processes, while generating")
    table.add_row("trained", f"{times.trained_tokens_per_s:,.0f} tokens/s", "all processes, while learning")
    table.add_row("run", f"{times.run_hours:.3g} h", f"{config.train.steps} updates")
    table.add_row("device hours", f"{times.device_hours:.3g}", f"{planned.load.processes} devices")
    table.caption = (
        f"prompts of {planned.load.prompt} and completions of {planned.load.completion} tokens; assumed: "
        f"{assumed.flops:.0%} of peak products, {assumed.bandwidth:.0%} of bandwidth; {planned.device.source}"
    )
    return table
