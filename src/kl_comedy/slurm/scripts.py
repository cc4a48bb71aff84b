"""Site profiles, and the batch scripts they render to. Nothing is written here, SLURM is not asked.

SLURM gives every task of an array the same nodes and tasks, and bounds its indices. So cells of one size, and of one
block of numbers, share an array; a batch script belongs to a size.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import shlex
import signal
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kl_comedy.config.load import flatten
from kl_comedy.config.validate import option, parse_record
from kl_comedy.errors import REQUEUE_EXIT_CODE, UserError, bad_value, error_prefix, nearest
from kl_comedy.io import read_yaml
from kl_comedy.redaction import refuse_secrets
from kl_comedy.slurm.manifest import Cell, Sweep

FOLDER = Path("slurm/profiles")
SBATCH_TEXTS = ("partition", "account", "qos", "constraint", "reservation")
TIME = re.compile(r"(\d+-)?\d{1,3}(:\d{2}){0,2}")
GUARD = "kl_comedy.rollouts.engines.vllm.RequireKey"
"""What makes every route of a vLLM server want the key."""
SIGUSR1_EXIT_CODE = 128 + signal.SIGUSR1
"""srun's exit code where SIGUSR1 ended a process before it had installed its handler."""
LONGEST_SIGNAL_S = 65535
"""sbatch refuses more in ``--signal``."""
LAST_TASKS_S = 60
"""How long the other tasks of a step may take after the first has ended: all of them save before they exit."""


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
        try:
            words = shlex.split("{port}" if self.command is None else self.command)
        except ValueError as error:
            raise bad_value("command", self.command, "words as a shell reads them", str(error)) from None
        if not any("{port}" in word for word in words):
            raise bad_value("command", self.command, "a command with {port} in it, where its port goes")
        if any("vllm" in word for word in words) and not any(GUARD in word for word in words):
            why = "every route must want the key, those that replace weights too, which vLLM's own check leaves open"
            raise bad_value("command", self.command, f"a vLLM server started with --middleware {GUARD}", why)
        if any(word.startswith(("--api-key", "--api_key")) for word in words):
            why = "everyone on the node can list a process's arguments"
            raise bad_value("command", self.command, "a server that reads its key from the variable VLLM_API_KEY", why)
        if not self.ready.startswith("/"):
            raise bad_value("ready", self.ready, "a path, as in /health")


def _time(value: Any, key: str) -> str:
    if not isinstance(value, str) or not TIME.fullmatch(value):  # YAML reads 4:00:00 as a number in base 60
        raise bad_value(key, value, "quoted text, as in '30', '04:00:00' or '1-00:00:00'")
    return value


def time_limit_s(time: str) -> int | None:
    """Seconds of a time limit as sbatch reads it; None for 0, which is no limit.

    >>> [time_limit_s(text) for text in ("30", "30:15", "04:00:00", "1-12", "1-12:30", "0")]
    [1800, 1815, 14400, 129600, 131400, None]
    """
    days, dash, clock = time.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    if dash:  # days-hours[:minutes[:seconds]]
        hours, minutes, seconds = [*parts, 0, 0][:3]
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    else:  # minutes[:seconds]
        minutes, seconds = [*parts, 0][:2]
        hours = 0
    total_s = ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
    return None if total_s == 0 else total_s


def _environment(value: Any, key: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise bad_value(key, value, "a mapping of names of variables to text")
    texts = {}
    for name, item in value.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", str(name)):
            raise bad_value(key, name, "names of variables")
        if isinstance(item, list | dict):
            raise bad_value(f"{key}.{name}", item, "text")
        texts[name] = "" if item is None else str(item).lower() if isinstance(item, bool) else str(item)
    return texts


@dataclass(kw_only=True)
class Shape:
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
        self.python = self.python or ("python" if self.container else sys.executable)
        for key, value in flatten(dataclasses.asdict(self)).items():
            if isinstance(value, str) and not value.isprintable():
                raise bad_value(key, value, "one line without control characters")
        for key in (*SBATCH_TEXTS, "memory", "gpu_type"):
            if (value := getattr(self, key)) is not None and sbatch_word(key, value) != value:
                raise bad_value(key, value, "text without spaces and #")
        limit_s = time_limit_s(self.time)
        if limit_s is not None and self.signal_seconds >= limit_s:
            why = f"time is {self.time}, {limit_s} s: SLURM would signal each start at once, and requeue without end"
            raise bad_value("signal_seconds", self.signal_seconds, f"0, or less than {limit_s}", why)
        if 0 < self.gpus_per_node < self.tasks_per_node:
            why = f"each of the {self.tasks_per_node} tasks on a node computes on a GPU of its own; 0: on none"
            raise bad_value("gpus_per_node", self.gpus_per_node, f"0, or at least {self.tasks_per_node}", why)
        if self.servers is not None and not self.servers.nodes and self.nodes > 1:
            why = f"the trainer has {self.nodes} nodes; give the servers nodes of their own"
            raise bad_value("servers.nodes", 0, "a whole number of at least 1", why)

    @property
    def size(self) -> tuple[int, int]:
        """Nodes, and processes on each."""
        return self.nodes, self.tasks_per_node


@dataclass(kw_only=True)
class Profile(Shape):
    """A site. Every field is a key of the profile's file; ``name`` is by default the file's."""

    name: str
    max_parallel: int | None = option(None, minimum=1)
    max_array: int = option(1000, minimum=1)
    shapes: list[Shape] = field(default_factory=list)

    @property
    def all_shapes(self) -> list[Shape]:
        """The profile itself, then its shapes: each with every key of the profile it does not change."""
        return [self, *self.shapes]

    def shape_for(self, cell: Cell) -> Shape:
        """The shape whose nodes and tasks are those of the cell's config; a :class:`UserError` without."""
        for shape in self.all_shapes:
            if shape.size == cell.size:
                return shape
        sizes = ", ".join("{} x {}".format(*shape.size) for shape in self.all_shapes)
        raise UserError(
            f"cell {cell.index} ({cell.name}): train.nodes x train.devices is {cell.nodes} x {cell.devices}, and "
            f"profile {self.name} takes nodes x tasks_per_node of {sizes} only; add "
            f"shapes: [{{nodes: {cell.nodes}, tasks_per_node: {cell.devices}}}] to it, or change the cell"
        )

    def suffix(self, shape: Shape) -> str:
        """Of the names of a shape's scripts: ``train``, or ``train-2x4`` for another size than the profile's."""
        return "" if shape.size == self.size else "-{}x{}".format(*shape.size)


SHAPE_KEYS = {item.name for item in dataclasses.fields(Shape)}


def read_profile(name_or_path: str) -> Profile:
    """The profile in a file, or of a name in slurm/profiles. Raises :class:`UserError` with the nearest name."""
    path = profile_file(name_or_path)
    raw = read_yaml(path, "profile")
    with error_prefix(str(path)):
        refuse_secrets(raw)
    shapes = raw.pop("shapes", None) or []
    settings = {key: item for key, item in raw.items() if item is not None}
    profile = parse_record(Profile, {"name": path.stem, **settings}, origin=str(path))
    if not isinstance(shapes, list) or not all(isinstance(item, dict) for item in shapes):
        raise bad_value(f"{path}: shapes", shapes, "a list of mappings, as in [{nodes: 2, tasks_per_node: 4}]")
    common = {key: item for key, item in settings.items() if key in SHAPE_KEYS}
    for number, item in enumerate(shapes):
        changed = {key: value for key, value in {**common, **item}.items() if value is not None}
        shape = parse_record(Shape, changed, key=f"shapes.{number}", origin=str(path))
        if shape.size in [other.size for other in profile.all_shapes]:
            size = f"{shape.nodes} nodes with {shape.tasks_per_node} tasks on each"
            raise bad_value(f"{path}: shapes.{number}", size, "another size than the profile and its other shapes have")
        profile.shapes.append(shape)
    return profile


def profile_file(name_or_path: str) -> Path:
    """The file of a name in slurm/profiles, or of a path ending in .yaml."""
    if Path(name_or_path).suffix in (".yaml", ".yml"):
        return Path(name_or_path).resolve()
    file = FOLDER / f"{name_or_path}.yaml"
    if file.is_file():
        return file.resolve()
    names = [other.stem for other in sorted(FOLDER.glob("*.yaml"))]
    near = nearest(name_or_path, names)
    raise UserError(
        f"--slurm: no profile {name_or_path!r} in {FOLDER}; there are: {', '.join(names) or '(none)'}"
        f"{f'; did you mean {near!r}?' if near else ''} (a path ending in .yaml names a file)"
    )


# --- arrays and scripts ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Array:
    """Cells ``indices`` of one size; ``offset`` less, they are the array's own. ``share``: how many at a time."""

    suffix: str
    offset: int
    indices: tuple[int, ...]
    share: int | None


def arrays(cells: Iterable[Cell], profile: Profile, limit: int | None) -> list[Array]:
    """The arrays of ``cells``, at most ``limit`` tasks at a time in all (but one in each), the profile's size first.

    Raises :class:`UserError` for a cell whose size the profile has no shape for.
    """
    blocks: dict[tuple[int, int], list[int]] = {}
    shapes = profile.all_shapes
    for cell in cells:
        number = shapes.index(profile.shape_for(cell))
        blocks.setdefault((number, cell.index // profile.max_array * profile.max_array), []).append(cell.index)
    ordered = sorted(blocks.items())
    shares = share_out(limit, [len(indices) for _, indices in ordered])
    return [
        Array(suffix=profile.suffix(shapes[number]), offset=offset, indices=tuple(indices), share=share)
        for ((number, offset), indices), share in zip(ordered, shares, strict=True)
    ]


def share_out(limit: int | None, lengths: Sequence[int]) -> list[int | None]:
    """``limit`` tasks at a time over arrays of so many cells: one each, then where most cells wait for a place.

    >>> share_out(4, [8, 1, 2])
    [2, 1, 1]
    >>> share_out(9, [2, 1])
    [2, 1]
    """
    if limit is None or len(lengths) == 1:
        return [limit] * len(lengths)
    shares = [1] * len(lengths)
    while sum(shares) < min(limit, sum(lengths)):
        waiting = [number for number, length in enumerate(lengths) if shares[number] < length]
        shares[max(waiting, key=lambda number: lengths[number] / shares[number])] += 1
    return list(shares)


def scripts(sweep: Sweep, profile: Profile, cells: Sequence[Cell]) -> dict[str, str]:
    """The batch scripts of ``cells`` by name: training and, where asked for, evaluation of each size; the report."""
    shapes = {profile.suffix(shape): shape for shape in map(profile.shape_for, cells)}
    stages = ("train",) if sweep.manifest.evaluate is None else ("train", "evaluate")
    texts = {stage + suffix: render(sweep, shapes[suffix], stage) for stage in stages for suffix in sorted(shapes)}
    return {**texts, "report": render(sweep, profile, "report")}


def render(sweep: Sweep, shape: Shape, stage: str) -> str:
    """The batch script of ``stage``: an array over cells for train and evaluate, a single job for report.

    Training takes what the shape asks for; evaluation one task with one GPU where there are any; the report none.
    Servers come with whatever samples, on nodes of their own or beside the worker on its one node. Raises
    :class:`UserError` for a path that a script cannot hold.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    layout: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True, "keep_trailing_newline": True}
    environment = Environment(
        loader=PackageLoader("kl_comedy.slurm"), undefined=StrictUndefined, autoescape=False, **layout
    )
    environment.filters |= {"doublequoted": doublequoted, "quoted": lambda item: shlex.quote(str(item))}
    number = "%j" if stage == "report" else "%A_%a"
    logs = str(sweep.logs).replace("%", "%%")  # sbatch fills in what follows a single one
    servers = None if stage == "report" else shape.servers
    gpus = {"train": shape.gpus_per_node, "evaluate": min(shape.gpus_per_node, 1), "report": 0}[stage]
    worker = {"nodes": 1, "tasks": 1, "cpus": shape.cpus_per_task, "gpus": gpus}
    if stage == "train":
        worker |= {"nodes": shape.nodes, "tasks": shape.tasks_per_node}
    job = dict(worker)
    share = 0
    if servers is not None:
        job["cpus"] = max(worker["cpus"], servers.cpus)
        share = -(-servers.count // (servers.nodes or 1))
        if servers.nodes:
            job["nodes"] += servers.nodes
            job |= {"tasks": max(worker["tasks"], share), "gpus": max(gpus, share * servers.gpus)}
        else:
            job |= {"tasks": worker["tasks"] + share, "gpus": gpus + share * servers.gpus}
    return environment.get_template("job.sbatch.j2").render(
        profile=shape,
        sbatch_texts=SBATCH_TEXTS,
        stage=stage,
        sweep=sweep,
        log=sbatch_word("--output", f"{logs}/{stage}-{number}.out"),
        directory=sbatch_word("the working folder", sweep.manifest.directory),
        worker=worker,
        job=job,
        launcher=launcher(shape, gpus=job["gpus"], folders=(sweep.manifest.directory, str(sweep.path))),
        command=shlex.join(stage_command(sweep, stage)),
        servers=servers,
        servers_per_node=share,
        server_words="" if servers is None else _server_words(sweep, servers),
        last_tasks_s=LAST_TASKS_S,
        requeue_code=REQUEUE_EXIT_CODE,
        early_signal_code=SIGUSR1_EXIT_CODE,
    )


def _server_words(sweep: Sweep, servers: Servers) -> str:
    """Which server a task starts: that of a cell's config (the script has its number in ``index``), or a command."""
    if servers.command is None:
        return f'--cell {shlex.quote(str(sweep.path))} "$index"'
    return f"-- {shlex.join(shlex.split(servers.command))}"


def stage_command(sweep: Sweep, stage: str, index: int | None = None) -> list[str]:
    """The words after ``python``; an array's index is appended by whoever runs it."""
    words = {"train": ["cell"], "evaluate": ["cell", "--evaluate"], "report": ["sweep-report"]}[stage]
    return ["-m", "kl_comedy.cli", *words, str(sweep.path), *([] if index is None else [str(index)])]


def launcher(shape: Shape, *, gpus: int, folders: Sequence[str]) -> str:
    """What stands between srun and our words: a container where there is one, and python."""
    container = shape.container
    if container is None:
        return shlex.quote(shape.python)
    for folder in folders:
        if set(folder) & set(",:"):
            raise bad_value("the folder", folder, "a name without : and ,", "both separate the mounts of a container")
    mounts = [*dict.fromkeys(folders), *container.mounts]
    if container.runtime == "pyxis":
        binds = ",".join(mount if ":" in mount else f"{mount}:{mount}" for mount in mounts)
        flags = {"image": container.image, "workdir": folders[0], "mounts": binds}
        words = [f"--container-{name}={value}" for name, value in flags.items()]
    else:
        words = ["apptainer", "exec", *(["--nv"] if gpus else []), "--pwd", folders[0]]
        words += [*(word for mount in mounts for word in ("--bind", mount)), container.image]
    return shlex.join([*words, shape.python])


def sbatch_word(key: str, text: str) -> str:
    """``text`` as sbatch reads it in a line ``#SBATCH --option=``: in double quotes where it has spaces or ``#``.

    Raises :class:`UserError` for what sbatch and the shell would read in different ways.

    >>> sbatch_word("--output", "/data/my sweep")
    '"/data/my sweep"'
    """
    if not text.isprintable() or set(text) & set("\"'\\`$"):
        raise bad_value(key, text, "a name without quotes, backslashes, $ and control characters")
    return f'"{text}"' if " " in text or "#" in text else text


def doublequoted(text: str) -> str:
    """Text in double quotes: variables are expanded, nothing is executed.

    >>> print(doublequoted("/scratch/$USER"))
    "/scratch/$USER"
    """
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("`", "\\`").replace("$(", "\\$(")
    return f'"{escaped}"'


def array_ranges(indices: Iterable[int]) -> str:
    """Indices as sbatch's --array takes them.

    >>> array_ranges([7, 0, 1, 2, 9, 10])
    '0-2,7,9-10'
    """
    runs = itertools.groupby(enumerate(sorted(set(indices))), key=lambda item: item[1] - item[0])
    ends = [(run[0][1], run[-1][1]) for _, group in runs for run in [list(group)]]
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in ends)
