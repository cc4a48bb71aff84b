"""Site profiles: what the jobs of a sweep ask a cluster for, read from YAML and checked.

A profile is a :class:`JobShape`, for cells of one size, and a list of further shapes for cells of other sizes: SLURM
gives every task of an array the same nodes and tasks. The scripts that are made of a profile are in scripts.py.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kl_comedy.config.load import flatten
from kl_comedy.config.shipped import shipped_profiles
from kl_comedy.config.validate import option, parse_record
from kl_comedy.errors import UserError, bad_value, error_prefix, nearest
from kl_comedy.io import read_yaml
from kl_comedy.redaction import refuse_secrets
from kl_comedy.slurm.manifest import Cell

FOLDER = Path("slurm/profiles")
SBATCH_TEXTS = ("partition", "account", "qos", "constraint", "reservation")
"""Keys of a profile that are options of sbatch under the same name."""
TIME = re.compile(r"(\d+-)?\d{1,3}(:\d{2}){0,2}")
GUARD = "kl_comedy.rollouts.engines.vllm.RequireKey"
"""The middleware that makes every route of a vLLM server require the key."""
LONGEST_SIGNAL_S = 65535
"""sbatch refuses more in ``--signal``."""


@dataclass(kw_only=True)
class Container:
    """An image to run in: by ``apptainer exec``, or by srun's pyxis plugin. ``mounts``: HOST or HOST:INSIDE."""

    image: str
    runtime: str = option("apptainer", choices=("apptainer", "pyxis"))
    mounts: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class Servers:
    """Inference servers in the job's own allocation: ``count``, each on a free port of its own.

    Without ``command`` the config of a cell says how they are started, as where its run starts them itself. In a
    ``command`` ``{port}``, ``{host}`` and ``{index}`` are filled in. ``nodes`` are added to the trainer's; 0 puts
    the servers beside a trainer of one node. A server is up when ``ready`` answers, within ``wait_seconds``.
    ``gpus`` and ``cpus`` are those of one server.
    """

    command: str | None = None
    count: int = option(1, minimum=1)
    nodes: int = option(0, minimum=0)
    gpus: int = option(0, minimum=0)
    cpus: int = option(1, minimum=1)
    ready: str = "/health"
    wait_seconds: int = option(600, minimum=1)

    def __post_init__(self) -> None:
        if self.command is not None:
            _check_server_command(self.command)
        # It is appended to http://HOST:PORT, where health without a slash would be part of the port.
        if not self.ready.startswith("/"):
            raise bad_value("ready", self.ready, "a path, as in /health")


def _check_server_command(command: str) -> None:
    """Raises :class:`UserError` for a command that has no place for its port, or that endangers the servers' key."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise bad_value("command", command, "words as a shell reads them", str(error)) from None
    if not any("{port}" in word for word in words):
        raise bad_value("command", command, "a command with {port} in it, where its port goes")
    starts_vllm = any("vllm" in word for word in words)
    has_guard = any(GUARD in word for word in words)
    if starts_vllm and not has_guard:
        why = "every route must require the key, also those that replace weights, which vLLM's own check leaves open"
        raise bad_value("command", command, f"a vLLM server started with --middleware {GUARD}", why)
    # vLLM takes the key by this option too, and by the variable that the script sets.
    if any(word.startswith(("--api-key", "--api_key")) for word in words):
        why = "everyone on the node can list a process's arguments"
        raise bad_value("command", command, "a server that reads its key from the variable VLLM_API_KEY", why)


def _time(value: Any, key: str) -> str:
    # YAML reads 4:00:00 without quotes as a number in base 60.
    is_quoted_time = isinstance(value, str) and TIME.fullmatch(value) is not None
    if not is_quoted_time:
        raise bad_value(key, value, "quoted text, as in '30', '04:00:00' or '1-00:00:00'")
    return str(value)


def time_limit_s(time: str) -> int | None:
    """Seconds of a time limit as sbatch reads it; None for 0, which means unlimited.

    >>> [time_limit_s(text) for text in ("30", "30:15", "04:00:00", "1-12", "1-12:30", "0")]
    [1800, 1815, 14400, 129600, 131400, None]
    """
    days, dash, clock = time.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    if dash:  # days-hours[:minutes[:seconds]]
        # sbatch reads a number after the days as hours, and one without days as minutes.
        hours, minutes, seconds = [*parts, 0, 0][:3]
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    else:  # minutes[:seconds]
        minutes, seconds = [*parts, 0][:2]
        hours = 0
    total_s = ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
    if total_s == 0:  # sbatch reads 0 as no limit
        return None
    return total_s


def _environment(value: Any, key: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise bad_value(key, value, "a mapping of names of variables to text")
    texts = {}
    for name, item in value.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", str(name)):
            raise bad_value(key, name, "names of variables")
        if isinstance(item, list | dict):
            raise bad_value(f"{key}.{name}", item, "text")
        texts[name] = _variable_text(item)
    return texts


def _variable_text(item: Any) -> str:
    """A plain YAML value as the text of a variable: ``true`` and ``false`` as YAML writes them, null as empty."""
    # YAML reads an unquoted yes or null as another type, and str() would export True and None.
    if item is None:
        return ""
    if isinstance(item, bool):
        return str(item).lower()
    return str(item)


@dataclass(kw_only=True)
class JobShape:
    """What sbatch is asked for. A profile is a shape; its ``shapes`` differ from it for cells of other sizes.

    ``time`` limits one run of the job: a longer training is saved ``signal_seconds`` before the end, requeued and
    resumed. ``setup`` lines are shell, run before srun; ``scratch`` becomes a TMPDIR of the job's own, removed after
    it. ``nodes`` and ``tasks_per_node`` are the size of the cells it takes. ``python`` is by default the interpreter
    that submits, and in a container ``python``.
    """

    time: str = option(..., parse=_time)
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    nodes: int = option(1, minimum=1)
    tasks_per_node: int = option(1, minimum=1)
    cpus_per_task: int = option(1, minimum=1)
    gpus_per_node: int = option(0, minimum=0)
    gpu_type: str | None = None
    memory: str | None = None
    signal_seconds: int = option(120, minimum=0, maximum=LONGEST_SIGNAL_S)
    modules: list[str] = field(default_factory=list)
    setup: list[str] = field(default_factory=list)
    environment: dict[str, str] = option(dict, parse=_environment)
    scratch: str | None = None
    container: Container | None = None
    servers: Servers | None = None
    extra: list[str] = field(default_factory=list)
    python: str = ""

    def __post_init__(self) -> None:
        if not self.python:
            self.python = sys.executable
            if self.container is not None:
                # The path of this interpreter means nothing inside an image.
                self.python = "python"
        self._check_texts()
        limit_s = time_limit_s(self.time)
        if limit_s is not None and self.signal_seconds >= limit_s:
            why = f"time is {self.time}, {limit_s} s: SLURM would signal each start at once, and requeue without end"
            raise bad_value("signal_seconds", self.signal_seconds, f"0, or less than {limit_s}", why)
        # NCCL refuses two ranks on one GPU.
        if 0 < self.gpus_per_node < self.tasks_per_node:
            why = f"each of the {self.tasks_per_node} tasks on a node computes on a GPU of its own; 0: on none"
            raise bad_value("gpus_per_node", self.gpus_per_node, f"0, or at least {self.tasks_per_node}", why)
        if self.servers is not None and not self.servers.nodes and self.nodes > 1:
            why = f"the trainer has {self.nodes} nodes; give the servers nodes of their own"
            raise bad_value("servers.nodes", 0, "a whole number of at least 1", why)

    def _check_texts(self) -> None:
        """A line break in a value would be a line of the script: an option of sbatch, or a command."""
        for key, value in flatten(dataclasses.asdict(self)).items():
            if isinstance(value, str) and not value.isprintable():
                raise bad_value(key, value, "one line without control characters")
        for key in (*SBATCH_TEXTS, "memory", "gpu_type"):
            text = getattr(self, key)
            if text is not None and sbatch_word(key, text) != text:
                raise bad_value(key, text, "text without spaces and #")

    @property
    def size(self) -> tuple[int, int]:
        """Nodes, and processes on each."""
        return self.nodes, self.tasks_per_node


@dataclass(kw_only=True)
class Profile(JobShape):
    """A site. Every field is a key of the profile's file; ``name`` is by default the name of that file."""

    name: str
    max_parallel: int | None = option(None, "cells that train or are evaluated at a time", minimum=1)
    max_array: int = option(1000, minimum=1)
    shapes: list[JobShape] = field(default_factory=list)

    @property
    def all_shapes(self) -> list[JobShape]:
        """The profile itself, then its shapes, each with the keys of the profile that it does not change."""
        # The profile first: arrays and scripts are in this order, and its own scripts have no suffix.
        return [self, *self.shapes]

    def shape_for(self, cell: Cell) -> JobShape:
        """The shape whose nodes and tasks are those of the cell's config. Raises :class:`UserError` without one."""
        for shape in self.all_shapes:
            if shape.size == cell.size:
                return shape
        sizes = ", ".join(f"{shape.nodes} x {shape.tasks_per_node}" for shape in self.all_shapes)
        raise UserError(
            f"cell {cell.index} ({cell.name}): train.nodes x train.devices is {cell.nodes} x {cell.devices}, and "
            f"profile {self.name} takes nodes x tasks_per_node of {sizes} only; add "
            f"shapes: [{{nodes: {cell.nodes}, tasks_per_node: {cell.devices}}}] to it, or change the cell"
        )

    def suffix(self, shape: JobShape) -> str:
        """The end of the names of a shape's scripts: empty, or ``-2x4`` for another size than the profile's."""
        if shape.size == self.size:
            return ""
        return f"-{shape.nodes}x{shape.tasks_per_node}"


SHAPE_KEYS = {item.name for item in dataclasses.fields(JobShape)}
"""The keys that shapes take over from their profile. The others belong to the whole site."""


def read_profile(name_or_path: str) -> Profile:
    """The profile in a file, or of a name in slurm/profiles. Raises :class:`UserError` with the nearest name."""
    path = profile_file(name_or_path)
    raw = read_yaml(path, "profile")
    # Its values are copied into scripts.
    with error_prefix(str(path)):
        refuse_secrets(raw)
    # Taken out: a shape is not a record of its own, it inherits the keys that it does not have.
    raw_shapes = raw.pop("shapes", None) or []
    settings = {key: item for key, item in raw.items() if item is not None}
    profile = parse_record(Profile, {"name": path.stem, **settings}, origin=str(path))

    if not isinstance(raw_shapes, list) or not all(isinstance(item, dict) for item in raw_shapes):
        raise bad_value(f"{path}: shapes", raw_shapes, "a list of mappings, as in [{nodes: 2, tasks_per_node: 4}]")
    common = {key: item for key, item in settings.items() if key in SHAPE_KEYS}
    for number, raw_shape in enumerate(raw_shapes):
        # null stands for the key's default, not for the profile's value: container: null means no container.
        shape_settings = {key: item for key, item in {**common, **raw_shape}.items() if item is not None}
        shape = parse_record(JobShape, shape_settings, key=f"shapes.{number}", origin=str(path))
        if shape.size in [other.size for other in profile.all_shapes]:
            size = f"{shape.nodes} nodes with {shape.tasks_per_node} tasks on each"
            raise bad_value(f"{path}: shapes.{number}", size, "another size than the profile and its other shapes have")
        profile.shapes.append(shape)
    return profile


def profile_file(name_or_path: str) -> Path:
    """The file of a path ending in .yaml, or of a name: in slurm/profiles, else of those that come with the package."""
    if Path(name_or_path).suffix in (".yaml", ".yml"):
        return Path(name_or_path).resolve()
    file = FOLDER / f"{name_or_path}.yaml"
    if file.is_file():
        # Absolute: resubmit reads it again, perhaps from another folder.
        return file.resolve()
    shipped = shipped_profiles()
    if name_or_path in shipped:
        return shipped[name_or_path].resolve()
    names = sorted({*(other.stem for other in FOLDER.glob("*.yaml")), *shipped})
    near = nearest(name_or_path, names)
    hint = ""
    if near:
        hint = f"; did you mean {near!r}?"
    raise UserError(
        f"--slurm: no profile {name_or_path!r} in {FOLDER}; there are: {', '.join(names) or '(none)'}"
        f"{hint} (a path ending in .yaml names a file)"
    )


def sbatch_word(key: str, text: str) -> str:
    """``text`` as sbatch reads it in a line ``#SBATCH --option=``: in double quotes where it has spaces or ``#``.

    Raises :class:`UserError` for what sbatch and the shell would read in different ways.

    >>> sbatch_word("--output", "/data/my sweep")
    '"/data/my sweep"'
    """
    if not text.isprintable() or set(text) & set("\"'\\`$"):
        raise bad_value(key, text, "a name without quotes, backslashes, $ and control characters")
    needs_quotes = " " in text or "#" in text
    if needs_quotes:
        return f'"{text}"'
    return text
