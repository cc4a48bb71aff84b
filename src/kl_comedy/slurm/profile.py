"""A site profile: what a cluster wants to hear from sbatch, and how our command is started there."""

from __future__ import annotations

import dataclasses
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kl_comedy.config.validate import option, parse_record
from kl_comedy.errors import UserError, bad_value, nearest, unknown_key
from kl_comedy.io import read_yaml

FOLDER = Path("slurm/profiles")
TIME = re.compile(r"(\d+-)?\d{1,3}(:\d{2}){0,2}")


@dataclass(kw_only=True)
class Container:
    """An image to run in: by ``apptainer exec``, or by srun's pyxis plugin. ``mounts``: HOST or HOST:INSIDE."""

    image: str
    runtime: str = option("apptainer", choices=("apptainer", "pyxis"))
    mounts: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class Servers:
    """Inference servers in the job's own allocation: ``count`` of ``command``, each on a free port of its own.

    ``{port}``, ``{host}`` and ``{index}`` in the command are filled in. ``nodes`` are added to the trainer's; 0 puts
    the servers beside a trainer of one node. A server is up when ``ready`` answers, within ``wait_seconds``.
    ``gpus`` and ``cpus`` are those of one server.
    """

    command: str
    count: int = option(1, minimum=1)
    nodes: int = option(0, minimum=0)
    gpus: int = option(0, minimum=0)
    cpus: int = option(1, minimum=1)
    ready: str = "/health"
    wait_seconds: int = option(600, minimum=1)


@dataclass(kw_only=True)
class Shape:
    """What sbatch is asked for. A profile is a shape; its ``shapes`` differ from it for cells of other sizes.

    ``time`` limits one run of the job: a longer training is saved ``signal_seconds`` before the end, requeued and
    resumed. ``setup`` lines are shell, run before srun; ``scratch`` becomes a TMPDIR of the job's own, removed after
    it. ``nodes`` and ``tasks_per_node`` are the size of the cells it takes.
    """

    time: str
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
    signal_seconds: int = option(120, minimum=0)
    modules: list[str] = field(default_factory=list)
    setup: list[str] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=dict)
    scratch: str | None = None
    container: Container | None = None
    servers: Servers | None = None
    extra: list[str] = field(default_factory=list)

    @property
    def size(self) -> tuple[int, int]:
        """Nodes, and processes on each."""
        return self.nodes, self.tasks_per_node


@dataclass(kw_only=True)
class Profile(Shape):
    """A site. ``python`` is by default the interpreter that submits, and in a container ``python``.

    Every field but ``name`` is a key of the profile's file.
    """

    name: str
    max_parallel: int | None = option(None, minimum=1)
    max_array: int = option(1000, minimum=1)
    python: str = sys.executable
    shapes: list[Profile] = field(default_factory=list)

    @property
    def all_shapes(self) -> list[Profile]:
        """The profile itself, then its shapes: each with every key of the profile it does not change."""
        return [self, *self.shapes]


SHAPE_KEYS = tuple(item.name for item in dataclasses.fields(Shape))
PROFILE_KEYS = (*SHAPE_KEYS, "max_parallel", "max_array", "python", "shapes")


def read_profile(name_or_path: str) -> Profile:
    """The profile in a file, or of a name in slurm/profiles. Raises :class:`UserError` with the nearest name."""
    path = profile_file(name_or_path)
    raw = read_yaml(path, "profile")
    for key, item in raw.items():
        if key not in PROFILE_KEYS:
            raise unknown_key(f"{path}: {key}", item, PROFILE_KEYS)
    shapes = raw.pop("shapes", None) or []
    profile = _parse(str(path), path.stem, raw)
    if not isinstance(shapes, list) or not all(isinstance(item, dict) for item in shapes):
        raise bad_value(f"{path}: shapes", shapes, "a list of mappings, as in [{nodes: 2, tasks_per_node: 4}]")
    for number, item in enumerate(shapes):
        where = f"{path}: shapes.{number}"
        for key in item:
            if key not in SHAPE_KEYS:
                note = "it belongs to the whole profile" if key in PROFILE_KEYS else ""
                raise unknown_key(f"{where}.{key}", item[key], SHAPE_KEYS, *([note] if note else []))
        shape = _parse(where, path.stem, {**raw, **item})
        if any(shape.size == other.size for other in profile.all_shapes):
            size = f"{shape.nodes} nodes with {shape.tasks_per_node} tasks on each"
            raise bad_value(where, size, "another size than the profile and its other shapes have")
        profile.shapes.append(shape)
    return profile


def _parse(where: str, name: str, raw: Mapping[str, Any]) -> Profile:
    """A profile without its shapes, checked."""
    if "time" not in raw:
        raise UserError(f"{where}: needs time, the limit of one job, as in '04:00:00'")
    settings = {key: item for key, item in raw.items() if item is not None}
    if not isinstance(settings["time"], str) or not TIME.fullmatch(settings["time"]):
        # YAML reads 4:00:00 as a number in base 60
        raise bad_value(f"{where}: time", raw["time"], "quoted text, as in '30', '04:00:00' or '1-00:00:00'")
    for key, default in (("environment", {}), ("container", None)):
        settings.setdefault(key, default)
    if isinstance(settings["environment"], dict):
        settings["environment"] = {
            name: "" if value is None else str(value).lower() if isinstance(value, bool) else value
            for name, value in settings["environment"].items()
        }
    if settings["container"] is not None:
        settings.setdefault("python", "python")
    try:
        profile = parse_record(Profile, {**settings, "name": name})
        _check(profile)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    return profile


def _check(profile: Profile) -> None:
    """What the schema cannot say: single lines, names of variables, the servers' command."""
    for key, value in dataclasses.asdict(profile).items():
        lines = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
        for line in lines:
            if isinstance(line, str) and ("\n" in line or "\r" in line):
                raise bad_value(key, line, "one line")
    for name, value in profile.environment.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", str(name)):
            raise bad_value("environment", name, "names of variables")
        if isinstance(value, list | dict):
            raise bad_value(f"environment.{name}", value, "text")
    servers = profile.servers
    if servers is None:
        return
    try:
        words = shlex.split(servers.command)
    except ValueError as error:
        raise bad_value("servers.command", servers.command, "words as a shell reads them", str(error)) from None
    if not any("{port}" in word for word in words):
        raise bad_value("servers.command", servers.command, "a command with {port} in it, where its port goes")
    if not servers.ready.startswith("/"):
        raise bad_value("servers.ready", servers.ready, "a path, as in /health")
    if not servers.nodes and profile.nodes > 1:
        why = f"the trainer has {profile.nodes} nodes; give the servers nodes of their own"
        raise bad_value("servers.nodes", 0, "a whole number of at least 1", why)


def profile_file(name_or_path: str) -> Path:
    """The file of a name in slurm/profiles, or of a path ending in .yaml."""
    path = Path(name_or_path)
    if path.suffix in (".yaml", ".yml"):
        return path.resolve()
    file = FOLDER / f"{name_or_path}.yaml"
    if not file.is_file():
        names = [other.stem for other in sorted(FOLDER.glob("*.yaml"))]
        near = nearest(name_or_path, names)
        hint = f"; did you mean {near!r}?" if near else ""
        raise UserError(
            f"--slurm: no profile {name_or_path!r} in {FOLDER}; there are: {', '.join(names) or '(none)'}{hint} "
            "(a path ending in .yaml names a file)"
        )
    return file.resolve()
