"""``kl-comedy check``: what a config would start, or why it cannot; no model is loaded and nothing is started."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from kl_comedy.cli.common import ConfigArgument, Overrides, Plugins, TableOrJson, load

if TYPE_CHECKING:
    from kl_comedy.config import Config

Gpu = Annotated[str | None, typer.Option(help="As in kl-comedy plan; default: h100-80, without any here the CPU")]


def check(
    config: ConfigArgument,
    overrides: Overrides = None,
    gpu: Gpu = None,
    gpus: Annotated[int | None, typer.Option(min=0, help="GPUs of a node; default: those of this machine")] = None,
    memory: Annotated[bool, typer.Option(help="Estimate the memory of one process (takes longest)")] = True,
    format: TableOrJson = "table",
    plugin: Plugins = None,
) -> None:
    """Say what CONFIG would start: processes, engines, the way of the weights, memory. Exit code 2 and the reason where
    it cannot run.

    Example: `kl-comedy check configs/paper/on_policy_math_qwen.yaml --gpus 8`
    """
    loaded = load(config, overrides, plugin)
    from kl_comedy.training.build import check_parts, check_training

    check_training(loaded)
    check_parts(loaded)
    rows = what_starts(loaded, gpus)
    if format == "table":
        for name, value in rows.items():
            print(f"{name:10} {value}", flush=True)
    if memory:
        rows["memory"] = _memory(loaded, gpu, gpus)
        if format == "table":
            print(f"{'memory':10} {rows['memory']}")
    if format == "json":
        print(json.dumps(rows, indent=1))


def what_starts(config: Config, gpus: int | None = None) -> dict[str, str]:
    """In words, by name: processes, the sampler, how weights reach it, the age of samples, updates, the folder.

    ``gpus``: of each node; None: of this machine. Where there are any, each process and each server needs its own.
    """
    from kl_comedy.config.combinations import updates_from_a_batch
    from kl_comedy.models.load import pick_device
    from kl_comedy.rollouts.engines.options import visible_gpus
    from kl_comedy.rollouts.sampler import Sampler

    train, rollout, lag = config.train, config.rollout, config.lag
    drawn_by = Sampler.of(config)
    names = visible_gpus(pick_device(config.model.device).type) if gpus is None else list(map(str, range(gpus)))
    names = [] if config.model.device == "cpu" else names
    world, name = train.devices * train.nodes, drawn_by.name
    can, options = drawn_by.capabilities, rollout.options
    of_engines = drawn_by.server_gpus(names) if names else []
    processes = f"{train.strategy}, {world} on {train.nodes} node{'s' if train.nodes > 1 else ''}"
    device = "the GPU where there is one" if config.model.device == "auto" else config.model.device
    if not can.in_trainer_ranks:
        urls = options.get("urls") or ()
        servers = f"{len(urls)} at {', '.join(urls)}" if urls else f"{options.get('servers', 1)}, started by the run"
        servers += f", on GPU{'s' if len(of_engines) > 1 else ''} {', '.join(of_engines)}" if of_engines else ""
        sampler = f"{name} beside the trainer: {servers}; rank 0 asks, all ranks receive"
        transport = drawn_by.transport_on(names) or "of its own"
        merged = ", the adapter merged" if config.model.lora and transport != "adapter" else ""
        weights = f"transport {transport}, staged by rank 0{merged}; every engine confirms them"
    elif can.recorded:
        sampler = f"{name}: batches of {options.get('path')}, read by rank 0; evaluation samples in the trainer"
        weights = "the trainer's own, for evaluation"
    else:
        sampler = f"{name} in the trainer's process" + ("es, each its own prompts" if world > 1 else "")
        weights = "the trainer's own"
    if can.in_trainer_ranks and train.strategy == "fsdp":
        weights = f"gathered into a whole copy on every rank, at most {rollout.replica_gib:g} GiB"
    ages = {
        "on_policy": "on-policy",
        "replayed": f"exactly {lag.steps} updates old",
        "async": f"at most {lag.max_steps} updates old, {lag.policy}{', weights in flight' if lag.in_flight else ''}",
    }
    batch = f"{rollout.prompts_per_batch} prompts x {rollout.group_size} completions"
    return {
        "model": f"{config.model.source} on {device}, {config.model.dtype} weights, {train.precision}",
        "processes": processes,
        "sampler": sampler,
        "weights": weights,
        "samples": f"{batch} a batch, {updates_from_a_batch(config)} updates from each; {ages[lag.mode]}",
        "updates": f"{train.steps}, a checkpoint every {train.checkpoint_every or 'never'}",
        "output": f"{config.output}/{config.name}-...",
    }


def _memory(config: Config, gpu: str | None, gpus: int | None) -> str:
    from kl_comedy.lab.planning.plan import Plan
    from kl_comedy.lab.planning.sizes import device_named
    from kl_comedy.models.load import pick_device

    on_cpu = not gpus and pick_device(config.model.device).type == "cpu"
    device = device_named(gpu or ("cpu" if on_cpu else "h100-80"), measured=False)
    planned = Plan(config, device)
    verdict = "fits" if planned.fits else "does not fit: kl-comedy plan says what would"
    peak, limit = planned.peak_bytes / 2**30, planned.limit_bytes / 2**30
    return f"{peak:.2f} GiB at most in one process, of {limit:.1f} GiB on {device.name}: {verdict}"
