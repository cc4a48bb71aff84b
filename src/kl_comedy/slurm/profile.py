"""A site profile: what a cluster wants to hear from sbatch, and how our command is started there."""

from __future__ import annotations

import dataclasses
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kl_comedy.errors import UserError, bad_value, nearest, unknown_key
from kl_comedy.io import read_yaml

FOLDER = Path("slurm/profiles")
RUNTIMES = ("apptainer", "pyxis")
_TIME = re.compile(r"(\d+-)?\d{1,3}(:\d{2}){0,2}")


@dataclass(frozen=True, kw_only=True)
class Container:
    """An image to run in: by ``apptainer exec``, or by srun's pyxis plugin."""

    image: str
    runtime: str = "apptainer"
    mounts: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Servers:
    """Inference servers in the job's own allocation: ``count`` of ``command``, each on a free port of its own.

    ``{port}``, ``{host}`` and ``{index}`` in the command are filled in. ``nodes`` are added to the trainer's; 0 puts
    the servers beside a trainer of one node. A server is there when ``ready`` answers, within ``wait_seconds``.
    ``gpus`` and ``cpus`` are those of one server.
    """

    command: str
    count: int = 1
    nodes: int = 0
    gpus: int = 0
    cpus: int = 1
    ready: str = "/health"
    wait_seconds: int = 600


@dataclass(frozen=True, kw_only=True)
class Profile:
    """One leg of one cell on one site. Every field but ``name`` is a key of the profile's file.

    ``time`` is for a leg: a run that is longer is saved ``signal_seconds`` before the end, requeued and goes on.
    ``python`` is by default the one that submits, and in a container its own. ``setup`` lines are shell, run before
    srun; ``scratch`` becomes a TMPDIR of the job's own, removed after it. ``nodes`` and ``tasks_per_node`` are the
    size of the cells it takes; ``shapes`` are profiles for cells of other sizes.
    """

    name: str
    time: str
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    nodes: int = 1
    tasks_per_node: int = 1
    cpus_per_task: int = 1
    gpus_per_node: int = 0
    gpu_type: str | None = None
    memory: str | None = None
    signal_seconds: int = 120
    max_parallel: int | None = None
    max_array: int = 1000
    modules: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    scratch: str | None = None
    container: Container | None = None
    servers: Servers | None = None
    python: str = sys.executable
    extra: tuple[str, ...] = ()
    shapes: tuple[Profile, ...] = ()

    @property
    def size(self) -> tuple[int, int]:
        """Nodes, and processes on each."""
        return self.nodes, self.tasks_per_node


_LEAST = {
    "nodes": 1,
    "tasks_per_node": 1,
    "cpus_per_task": 1,
    "gpus_per_node": 0,
    "signal_seconds": 0,
    "max_parallel": 1,
    "max_array": 1,
}
_LISTS = ("modules", "setup", "extra")
_ONCE = ("max_parallel", "max_array", "python", "shapes")
"""Keys of the whole profile, not of one shape."""


def read_profile(given: str) -> Profile:
    """The profile in a file, or of a name in slurm/profiles. Raises :class:`UserError` with the nearest name."""
    path = profile_file(given)
    raw = read_yaml(path, "profile")
    known = [item.name for item in dataclasses.fields(Profile) if item.name != "name"]
    profile = _profile(str(path), path.stem, raw, known)
    return dataclasses.replace(profile, shapes=_shapes(f"{path}: shapes", profile, raw, known))


def _profile(where: str, name: str, raw: Mapping[str, Any], known: Sequence[str]) -> Profile:
    """A profile without its shapes."""
    for key, item in raw.items():
        if key not in known:
            raise unknown_key(f"{where}: {key}", item, known)
    if "time" not in raw:
        raise UserError(f"{where}: needs time, the limit of one leg, as in '04:00:00'")
    checked = {
        key: _checked(f"{where}: {key}", key, item) for key, item in raw.items() if item is not None and key != "shapes"
    }
    if "container" in checked:
        checked.setdefault("python", "python")
    profile = Profile(name=name, **checked)
    if profile.servers is not None and not profile.servers.nodes and profile.nodes > 1:
        why = f"the trainer has {profile.nodes} nodes; give the servers nodes of their own"
        raise bad_value(f"{where}: servers.nodes", 0, "a whole number of at least 1", why)
    return profile


def _shapes(where: str, profile: Profile, raw: Mapping[str, Any], known: Sequence[str]) -> tuple[Profile, ...]:
    """Each shape is the profile with other values for some of its keys, nodes or tasks_per_node among them."""
    given = raw.get("shapes") or []
    if not isinstance(given, list) or not all(isinstance(item, dict) for item in given):
        raise bad_value(where, given, "a list of mappings, as in [{nodes: 2, tasks_per_node: 4}]")
    found: dict[tuple[int, int], Profile] = {profile.size: profile}
    for number, item in enumerate(given):
        for key in item:
            if key in _ONCE:
                own = [name for name in known if name not in _ONCE]
                raise unknown_key(f"{where}.{number}.{key}", item[key], own, "it is the whole profile's")
        shape = _profile(f"{where}.{number}", profile.name, {**raw, **item}, known)
        if shape.size in found:
            size = f"{shape.nodes} nodes with {shape.tasks_per_node} tasks on each"
            raise bad_value(f"{where}.{number}", size, "another size than the profile and its other shapes have")
        found[shape.size] = shape
    return tuple(found.values())[1:]


def profile_file(given: str) -> Path:
    """The file that a name in slurm/profiles, or a path ending in .yaml, stands for."""
    path = Path(given)
    if path.suffix in (".yaml", ".yml"):
        return path.resolve()
    found = FOLDER / f"{given}.yaml"
    if not found.is_file():
        names = [file.stem for file in sorted(FOLDER.glob("*.yaml"))]
        near = nearest(given, names)
        hint = f"; did you mean {near!r}?" if near else ""
        raise UserError(
            f"--slurm: no profile {given!r} in {FOLDER}; there are: {', '.join(names) or '(none)'}{hint} "
            "(a path ending in .yaml names a file)"
        )
    return found.resolve()


def _checked(where: str, key: str, item: Any) -> Any:
    if key in _LEAST:
        if isinstance(item, bool) or not isinstance(item, int) or item < _LEAST[key]:
            raise bad_value(where, item, f"a whole number of at least {_LEAST[key]}")
        return item
    if key in _LISTS:
        if not isinstance(item, list) or not all(isinstance(line, str) for line in item):
            raise bad_value(where, item, "a list of lines")
        return tuple(_line(where, line) for line in item)
    if key == "environment":
        return _environment(where, item)
    if key == "container":
        return _container(where, item)
    if key == "servers":
        return _servers(where, item)
    if key == "time":
        return _time(where, item)
    if not isinstance(item, str | int) or isinstance(item, bool) or str(item) == "":
        raise bad_value(where, item, "text")
    return _line(where, str(item))


def _line(where: str, text: str) -> str:
    if "\n" in text or "\r" in text:
        raise bad_value(where, text, "one line")
    return text


def _time(where: str, item: Any) -> str:
    """YAML reads 4:00:00 as a number in base 60; say so instead of asking for 14400 minutes."""
    if not isinstance(item, str) or not _TIME.fullmatch(item):
        raise bad_value(where, item, "quoted text, as in '30', '04:00:00' or '1-00:00:00'")
    return item


def _environment(where: str, item: Any) -> dict[str, str]:
    if not isinstance(item, dict):
        raise bad_value(where, item, "a mapping of variables to values")
    for name, value in item.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", str(name)):
            raise bad_value(where, name, "names of variables")
        if isinstance(value, list | dict):
            raise bad_value(f"{where}.{name}", value, "text")
    return {str(name): _line(f"{where}.{name}", _text(value)) for name, value in item.items()}


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else "" if value is None else str(value)


def _container(where: str, item: Any) -> Container:
    known = [part.name for part in dataclasses.fields(Container)]
    if not isinstance(item, dict) or "image" not in item:
        raise bad_value(where, item, "a mapping with image, and runtime and mounts where needed")
    for key, value in item.items():
        if key not in known:
            raise unknown_key(f"{where}.{key}", value, known)
    runtime, mounts = item.get("runtime", "apptainer"), item.get("mounts") or []
    if runtime not in RUNTIMES:
        raise bad_value(f"{where}.runtime", runtime, RUNTIMES)
    if not isinstance(mounts, list):
        raise bad_value(f"{where}.mounts", mounts, "a list of HOST or HOST:INSIDE")
    return Container(image=str(item["image"]), runtime=runtime, mounts=tuple(str(mount) for mount in mounts))


_LEAST_OF_SERVERS = {"count": 1, "nodes": 0, "gpus": 0, "cpus": 1, "wait_seconds": 1}


def _servers(where: str, item: Any) -> Servers:
    known = [part.name for part in dataclasses.fields(Servers)]
    if not isinstance(item, dict) or "command" not in item:
        raise bad_value(where, item, "a mapping with command, as in {command: vllm serve M --port {port}}")
    for key, value in item.items():
        if key not in known:
            raise unknown_key(f"{where}.{key}", value, known)
        least = _LEAST_OF_SERVERS.get(key)
        if least is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise bad_value(f"{where}.{key}", value, f"a whole number of at least {least}")
        if least is None and not isinstance(value, str):
            raise bad_value(f"{where}.{key}", value, "text")
    try:
        words = shlex.split(_line(f"{where}.command", item["command"]))
    except ValueError as error:
        raise bad_value(f"{where}.command", item["command"], "words as a shell reads them", str(error)) from None
    if not any("{port}" in word for word in words):
        raise bad_value(f"{where}.command", item["command"], "a command with {port} in it, where its port goes")
    if not str(item.get("ready", "/")).startswith("/"):
        raise bad_value(f"{where}.ready", item["ready"], "a path, as in /health")
    return Servers(**item)
