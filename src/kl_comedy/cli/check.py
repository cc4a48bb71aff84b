"""``kl-comedy check``: what a config would start, or why it cannot. No model is loaded, and nothing is started."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from kl_comedy.cli.common import ConfigArgument, Overrides, Plugins, TableOrJson, load, options_in_a_record, plural
from kl_comedy.config import flatten, to_plain, to_yaml
from kl_comedy.config.combinations import is_off_policy, updates_from_a_batch
from kl_comedy.config.load import value_origins
from kl_comedy.config.shipped import find_config
from kl_comedy.redaction import one_line

if TYPE_CHECKING:
    from kl_comedy.config import Config
    from kl_comedy.rollouts.sampler import Sampler

GIB = 2**30
COMMENT_COLUMN = 60
"""Where the comments of ``--resolved`` begin at the latest; longer lines have theirs right behind them."""
Gpu = Annotated[
    str | None,
    typer.Option(help="Target GPU (see kl-comedy plan); default: h100-80, or the CPU if there is no GPU here"),
]


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """Options of ``kl-comedy check``."""

    config: ConfigArgument
    overrides: Overrides = None
    gpu: Gpu = None
    gpus: Annotated[int | None, typer.Option(min=0, help="GPUs per node; default: those of this machine")] = None
    memory: Annotated[bool, typer.Option(help="Estimate the memory of one process (takes longest)")] = True
    resolved: Annotated[bool, typer.Option("--resolved", help="Print every value, and where it comes from")] = False
    format: TableOrJson = "table"
    plugin: Plugins = None


@options_in_a_record
def check(wanted: CheckOptions) -> None:
    """Say what CONFIG would start: processes, engines, how weights reach the engines, memory.

    Exit code 2 and the reason where it cannot run: on this machine, or with `--gpu` or `--gpus` on another. With
    `--resolved` the whole config as YAML instead, which `train` reads; a comment behind each value names its file, the
    command line or the default.

    Example: `kl-comedy check configs/paper/on_policy_math_qwen.yaml --gpus 8`

    Example: `kl-comedy check quickstart kl.0.beta=0.1 --resolved`
    """
    loaded = load(wanted.config, wanted.overrides, wanted.plugin)
    if wanted.resolved:
        # Before the checks below: where they refuse the config, its values are what the user wants to see.
        _print_resolved(loaded, value_origins(find_config(wanted.config), wanted.overrides or []), wanted.format)
    from kl_comedy.training.build import check_run, warn_about

    # As a run is checked before it loads a model. --gpu and --gpus describe another machine than this one.
    here = wanted.gpu is None and wanted.gpus is None
    warn_about(check_run(loaded, here=here))
    if wanted.resolved:
        return
    rows = what_starts(loaded, wanted.gpus)
    if wanted.format == "table":
        # Flushed, because the line about memory takes seconds to follow.
        for name, value in rows.items():
            print(f"{name:10} {one_line(value)}", flush=True)
    if wanted.memory:
        rows["memory"] = _memory(loaded, wanted.gpu, wanted.gpus)
        if wanted.format == "table":
            print(f"{'memory':10} {rows['memory']}")
    if wanted.format == "json":
        print(json.dumps(rows, indent=1))


def _print_resolved(config: Config, origin: Callable[[str], str], format: str) -> None:
    """Print every value with its origin: as YAML with comments, or as JSON rows."""
    if format == "json":
        rows = []
        for key, value in flatten(to_plain(config)).items():
            rows.append({"key": key, "value": value, "origin": origin(key)})
        print(json.dumps(rows, indent=1))
        return
    text = to_yaml(config)
    # With their ends: a text of the config may hold one that is no newline, and is another text with a newline there.
    lines = text.splitlines(keepends=True)
    # Long values, as a system prompt, would push the comments of all lines out of sight.
    width = max(min(len(line.rstrip()), COMMENT_COLUMN) for line in lines)
    for number, key in _last_lines(text).items():
        line = lines[number].rstrip("\n")
        lines[number] = f"{line:{width}}  # {one_line(origin(key))}\n"
    print("".join(lines), end="")


def _last_lines(text: str) -> dict[int, str]:
    """The line in which each value of a YAML mapping ends, with its dotted key."""
    import yaml

    keys: dict[int, str] = {}

    def add(node: yaml.Node, key: str) -> None:
        if isinstance(node, yaml.MappingNode) and node.value:
            for name, item in node.value:
                add(item, f"{key}.{name.value}" if key else name.value)
        elif isinstance(node, yaml.SequenceNode) and node.value:
            for position, item in enumerate(node.value):
                add(item, f"{key}.{position}")
        else:
            keys[node.end_mark.line] = key

    document = yaml.compose(text)
    assert document is not None, "a config has keys"
    add(document, "")
    return keys


def what_starts(config: Config, gpus: int | None = None) -> dict[str, str]:
    """In words, by name: processes, the sampler, how weights reach it, the age of samples, updates, the folder.

    ``gpus``: of each node; None: of this machine. Where there are any, each process and each server needs its own.
    """
    from kl_comedy.rollouts.sampler import Sampler

    train = config.train
    sampler = Sampler.of(config)
    # The GPUs decide where servers go and by which transport weights travel.
    gpu_names = _gpu_names(config, gpus)
    server_gpus: list[str] = []
    if gpu_names:
        # Asked for samplers in the trainer too: it refuses a process without a GPU of its own.
        server_gpus = sampler.server_gpus(gpu_names)
    device = config.model.device
    if device == "auto":
        device = "the GPU where there is one"
    return {
        "model": f"{config.model.source} on {device}, {config.model.dtype} weights, {train.precision}",
        "processes": _processes(config),
        **_sampler_and_weights(config, sampler, gpu_names, server_gpus),
        "samples": _samples(config),
        **_kl_terms(config),
        "learning": _learning(config),
        "updates": f"{train.steps}, a checkpoint every {train.checkpoint_every or 'never'}",
        "output": f"{config.output}/{config.name}-...",
    }


def _processes(config: Config) -> str:
    """How many processes train, on how many nodes, and by which strategy where they are several."""
    train = config.train
    count = train.devices * train.nodes
    text = f"{count} {plural(count, 'process')}"
    if train.nodes > 1:
        text += f" on {train.nodes} nodes"
    if train.strategy != "single":
        text += f", strategy {train.strategy}"
    return text


def _gpu_names(config: Config, gpus: int | None) -> Sequence[str]:
    """The names of a node's GPUs; none where the model is on the CPU."""
    from kl_comedy.models.load import pick_device
    from kl_comedy.rollouts.engines.options import visible_gpus

    # Whatever the machine has: the config says that its GPUs are not used.
    if config.model.device == "cpu":
        return []
    if gpus is None:
        return visible_gpus(pick_device(config.model.device).type)
    return [str(number) for number in range(gpus)]


def _sampler_and_weights(
    config: Config, drawn_by: Sampler, gpu_names: Sequence[str], server_gpus: Sequence[str]
) -> dict[str, str]:
    """Who samples, and how the sampler gets the trainer's weights."""
    name = drawn_by.name
    if drawn_by.beside:
        return _engines(config, drawn_by, gpu_names, server_gpus)

    weights = "those of the trainer, not copied"
    if drawn_by.capabilities.recorded:
        path = config.rollout.options.get("path")
        sampler = f"{name}: batches of {path}, read by rank 0; evaluation samples in the trainer"
        weights += ", for evaluation"
    elif config.train.devices * config.train.nodes > 1:
        sampler = f"{name} in the trainer's processes, each its own prompts"
    else:
        sampler = f"{name} in the trainer's process"
    if config.train.strategy == "fsdp":
        # A shard cannot sample: each rank needs the whole policy for as long as it does.
        weights = f"gathered into a whole copy on every rank, at most {config.train.replica_gib:g} GiB"
    return {"sampler": sampler, "weights": weights}


def _engines(config: Config, sampler: Sampler, gpu_names: Sequence[str], server_gpus: Sequence[str]) -> dict[str, str]:
    """Servers beside the trainer: how many, where, and by which transport they get the weights."""
    options = config.rollout.options
    urls = options.get("urls") or ()
    if urls:
        servers = f"{len(urls)} at {', '.join(urls)}"
    else:
        servers = f"{options.get('servers', 1)}, started by the run"
    if server_gpus:
        servers += f", on {plural(len(server_gpus), 'GPU')} {', '.join(server_gpus)}"

    # None: an engine of a plugin, which has a way of its own.
    transport = sampler.transport_on(gpu_names) or "of its own"
    merged = ""
    if config.model.lora and transport != "adapter":
        merged = ", the adapter merged"
    return {
        "sampler": f"{sampler.name} beside the trainer: {servers}; rank 0 asks, all ranks receive",
        "weights": f"transport {transport}, staged by rank 0{merged}; every engine confirms them",
    }


def _samples(config: Config) -> str:
    """The size of a batch, the updates from it, and how old its samples are."""

    lag = config.lag
    updates = updates_from_a_batch(config)
    if not is_off_policy(config):
        age = "on-policy"
    elif config.rollout.backend == "replay":
        age = "off-policy: recorded"
    elif lag.mode == "on_policy":
        age = "off-policy after the first update of each batch"
    elif lag.mode == "replayed":
        age = f"exactly {lag.steps} updates old"
    else:
        age = f"at most {lag.max_steps} updates old, {lag.policy}"
        if lag.in_flight:
            age += ", weights in flight"
    per_batch = f"{config.rollout.prompts_per_batch} prompts x {config.rollout.group_size} completions per batch"
    if config.environment is not None:
        turns = config.environment.turns
        per_batch += f", dialogues of at most {turns} {plural(turns, 'turn')} with {config.environment.name}"
    return f"{per_batch}, {updates} {plural(updates, 'update')} per batch; {age}"


def _kl_terms(config: Config) -> dict[str, str]:
    """What each KL term optimizes with samples as old as this config's, by its key in the config."""
    from kl_comedy.kl import resolve_terms, verdict
    from kl_comedy.kl.claims import TRUNCATED_WORDS

    regime = "off_policy" if is_off_policy(config) else "on_policy"
    truncated = config.rollout.truncation.is_on
    rows = {}
    for position, term in enumerate(resolve_terms(config.kl)):
        meaning = f"{regime.replace('_', '-')} {verdict(term, regime, truncated=truncated)}"
        if term.beta == 0:
            meaning = "does not act, is measured only"
        rows[f"kl.{position}"] = f"{term.label()}, beta {term.beta:g}: {meaning}"
    if rows and truncated:
        rows["truncation"] = TRUNCATED_WORDS
    return rows or {"kl": "none"}


def _learning(config: Config) -> str:
    """The learning rate, and which weights it moves."""
    lora = config.model.lora
    weights = "all weights" if lora is None else f"a LoRA adapter of rank {lora.rank}"
    return f"rate {config.optimizer.lr:g}, {config.optimizer.schedule}, of {weights}"


def _memory(config: Config, gpu: str | None, gpus: int | None) -> str:
    """The largest memory of one process, and whether it fits the device."""
    from kl_comedy.models.load import pick_device
    from kl_comedy.planning.plan import Plan
    from kl_comedy.planning.sizes import device_named

    if gpu is None:
        # --gpus describes another machine; without it this one counts.
        on_cpu = not gpus and pick_device(config.model.device).type == "cpu"
        gpu = "cpu" if on_cpu else "h100-80"
    # Not measured: the speed of this machine does not change its memory.
    device = device_named(gpu, measured=False)
    planned = Plan(config, device)
    verdict = "fits" if planned.fits else "does not fit: kl-comedy plan says what would"
    peak = planned.peak_bytes / GIB
    limit = planned.limit_bytes / GIB
    return f"{peak:.2f} GiB at most in one process, of {limit:.1f} GiB on {device.name}: {verdict}"
