"""``kl-comedy plan``: memory, time and device hours of a run before it begins."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kl_comedy.errors import RunFailed, bad_value

if TYPE_CHECKING:
    from kl_comedy.config import Config
    from kl_comedy.lab.planning import Plan


FORMATS = ("table", "json")
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
    format: Annotated[str, typer.Option(help="table or json")] = "table",
    plugin: Annotated[list[Path] | None, typer.Option("--plugin", help="A Python file that registers parts")] = None,
) -> None:
    """Estimate memory per device by component, tokens per second, time per update and device hours of a run.

    From the architecture alone: no weights are loaded. Says what does not fit, and which settings would make it fit.

    Example: `kl-comedy plan configs/paper/on_policy_math_qwen.yaml --gpu h100-80 --gpus 8 train.strategy=fsdp`
    """
    if format not in FORMATS:
        raise bad_value("--format", format, FORMATS)
    from kl_comedy.config import load_config
    from kl_comedy.lab.planning import Lengths, device_named, plan_run
    from kl_comedy.registry import load_plugin_file

    for file in plugin or []:
        load_plugin_file(file)
    places = [("train.devices", gpus), ("train.nodes", nodes)]
    words = [*(overrides or []), *(f"{key}={count}" for key, count in places if count is not None)]
    loaded = load_config(config, words)
    found = plan_run(loaded, device_named(gpu), lengths=Lengths(prompt=prompt_tokens, completion=completion_tokens))
    if format == "json":
        print(json.dumps(as_json(found), indent=1))
    else:
        _show(found, loaded)
    for line in found.warnings:
        print(f"warning: {line}", file=sys.stderr)
    for remedy in found.remedies:
        print(f"fits, with {remedy.peak_bytes / GIB:.1f} GiB: {' '.join(remedy.overrides)}", file=sys.stderr)
    if not found.fits and not found.remedies:
        print("no setting was found that makes it fit", file=sys.stderr)
    if fail_if_too_big and not found.fits:
        raise RunFailed(
            f"{found.peak_bytes / GIB:.1f} GiB in one process, {found.limit_bytes / GIB:.1f} GiB on {found.device.name}"
        )


def as_json(found: Plan) -> dict[str, Any]:
    """A plan as plain data; bytes, seconds, counts."""
    from dataclasses import asdict

    shape = {name: value for name, value in vars(found.shape).items() if name != "config"}
    return {
        "model": shape,
        "device": asdict(found.device),
        "load": asdict(found.load),
        "memory": {
            "components": [asdict(item) for item in found.components],
            "peak_bytes": found.peak_bytes,
            "limit_bytes": found.limit_bytes,
            "fits": found.fits,
        },
        "time": asdict(found.timing),
        "assumed": asdict(found.assumed),
        "warnings": list(found.warnings),
        "remedies": [{"overrides": list(one.overrides), "peak_bytes": one.peak_bytes} for one in found.remedies],
    }


def _show(found: Plan, config: Config) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(markup=False, highlight=False)
    if not console.is_terminal:
        console = Console(width=120, markup=False, highlight=False)
    load, device = found.load, found.device
    strategy = f"{config.train.strategy}, {load.processes} x {device.name}"
    console.print(
        f"{found.shape.source}: {_million(found.shape.parameters)} parameters, {_million(found.shape.trainable)} "
        f"trained; {strategy}; {config.model.dtype} weights, {config.train.precision}"
    )
    table = Table("memory of one process", "GiB", "when", "what")
    table.columns[1].justify = "right"
    for item in found.components:
        table.add_row(item.name, f"{item.bytes / GIB:.2f}", item.phase, item.what)
    verdict = "fits" if found.fits else "does not fit"
    table.add_section()
    table.add_row("peak", f"{found.peak_bytes / GIB:.2f}", verdict, f"{found.limit_bytes / GIB:.1f} GiB a process")
    console.print(table)
    console.print(_times(found, config))


def _million(count: int) -> str:
    """A count as people write it.

    >>> _million(7_615_616_512), _million(891_840)
    ('7.62 B', '0.892 M')
    """
    return f"{count / 1e9:.3g} B" if count >= 1e8 else f"{count / 1e6:.3g} M"


def _times(found: Plan, config: Config) -> Any:
    from rich.table import Table

    times, assumed = found.timing, found.assumed
    table = Table("time", "", "of")
    table.columns[1].justify = "right"
    table.add_row("generate", f"{times.generate_s:.3g} s", f"an update; {found.load.drawn_rows} completions a process")
    table.add_row("learn", f"{times.learn_s:.3g} s", f"an update; {found.load.update_micro} micro-batches a process")
    table.add_row("update", f"{times.update_s:.3g} s", "without verification, evaluation and checkpoints")
    table.add_row("generated", f"{times.generated_tokens_per_s:,.0f} tokens/s", "all processes, while generating")
    table.add_row("trained", f"{times.trained_tokens_per_s:,.0f} tokens/s", "all processes, while learning")
    table.add_row("run", f"{times.run_hours:.3g} h", f"{config.train.steps} updates")
    table.add_row("device hours", f"{times.device_hours:.3g}", f"{found.load.processes} devices")
    table.caption = (
        f"prompts of {found.load.prompt} and completions of {found.load.completion} tokens; assumed: "
        f"{assumed.flops:.0%} of peak products, {assumed.bandwidth:.0%} of bandwidth; {found.device.source}"
    )
    return table
