"""The arrays and the batch scripts of a sweep. Nothing is written here, SLURM is not asked.

SLURM gives every task of an array the same nodes and tasks, and bounds its indices. So cells of one size, and of one
block of numbers, share an array; a batch script belongs to a size. The text of a script is templates/job.sbatch.j2.
"""

from __future__ import annotations

import math
import re
import shlex
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kl_comedy.errors import REQUEUE_EXIT_CODE, bad_value
from kl_comedy.slurm.manifest import Cell, Sweep
from kl_comedy.slurm.profile import SBATCH_TEXTS, Container, JobShape, Profile, Servers, sbatch_word, time_limit_s

SIGUSR1_EXIT_CODE = 128 + signal.SIGUSR1
"""srun's exit code where SIGUSR1 ended a process before it had installed its handler."""
LAST_TASKS_S = 60
"""How long the other tasks of a step may take after the first has ended: all of them save before they exit."""
REPORT_TIME = "01:00:00"
REPORT_MEMORY = "16G"
"""The most that the job of the report asks for: it reads files and a store for seconds to minutes."""
MEMORY = re.compile(r"(\d+)([KMGTkmgt]?)")
MIB_PER_UNIT = {"K": 1 / 1024, "": 1, "M": 1, "G": 1024, "T": 1024**2}

STAGE_WORDS = {"train": ("cell",), "evaluate": ("cell", "--evaluate"), "report": ("sweep-report",)}
"""The subcommand of kl-comedy that each stage runs."""


@dataclass(frozen=True, kw_only=True)
class Array:
    """Cells of one size that are submitted together."""

    suffix: str
    """The end of the name of its script; see :meth:`Profile.suffix`."""
    offset: int
    """The array's own index of a cell is the cell's index minus this."""
    indices: tuple[int, ...]
    """The cells."""


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What a step or a job asks for: ``nodes``, ``tasks`` and ``gpus`` on each of them, ``cpus`` for each task."""

    nodes: int
    tasks: int
    cpus: int
    gpus: int


def arrays(cells: Iterable[Cell], profile: Profile) -> list[Array]:
    """The arrays of ``cells``, the profile's size first.

    Raises :class:`UserError` for a cell whose size the profile has no shape for.
    """
    shapes = profile.all_shapes
    blocks: dict[tuple[int, int], list[int]] = {}
    for cell in cells:
        shape_number = shapes.index(profile.shape_for(cell))
        # A site bounds the indices of an array (MaxArraySize), and not the number of its tasks alone.
        offset = cell.index // profile.max_array * profile.max_array
        blocks.setdefault((shape_number, offset), []).append(cell.index)

    # Sorted by shape, so that the profile's own size is submitted first; its number is 0.
    result = []
    for (shape_number, offset), indices in sorted(blocks.items()):
        suffix = profile.suffix(shapes[shape_number])
        result.append(Array(suffix=suffix, offset=offset, indices=tuple(indices)))
    return result


def share_out(limit: int | None, lengths: Sequence[int]) -> list[int | None]:
    """``limit`` tasks at a time over arrays of so many cells: one each, then where most cells wait for a place.

    >>> share_out(4, [8, 1, 2])
    [2, 1, 1]
    >>> share_out(9, [2, 1])
    [2, 1]
    """
    # SLURM limits the tasks of one array and not those of several, so that the limit is divided among them.
    if limit is None or len(lengths) == 1:
        return [limit] * len(lengths)
    shares = [1] * len(lengths)
    while sum(shares) < min(limit, sum(lengths)):
        unfilled = [number for number, length in enumerate(lengths) if shares[number] < length]
        fullest = max(unfilled, key=lambda number: lengths[number] / shares[number])
        shares[fullest] += 1
    return list(shares)


def scripts(sweep: Sweep, profile: Profile, cells: Sequence[Cell]) -> dict[str, str]:
    """The batch scripts of ``cells`` by name: training and, where asked for, evaluation of each size; the report."""
    shapes = {}
    for cell in cells:
        shape = profile.shape_for(cell)
        shapes[profile.suffix(shape)] = shape
    stages = ["train"]
    if sweep.manifest.evaluate is not None:
        stages.append("evaluate")
    texts = {}
    for stage in stages:
        for suffix in sorted(shapes):
            texts[stage + suffix] = render(sweep, shapes[suffix], stage)
    # The report is the profile's own job, whatever the sizes of the cells: it reads files, on one node.
    texts["report"] = render(sweep, profile, "report")
    return texts


def render(sweep: Sweep, shape: JobShape, stage: str) -> str:
    """The batch script of ``stage``: an array over cells for train and evaluate, a single job for report.

    Training takes what the shape asks for; evaluation takes one task, with one GPU where there are any; the report
    takes no GPU. Training and evaluation sample, so that both have the shape's servers: on nodes of their own, or
    beside the worker on its one node. Raises :class:`UserError` for a path that a script cannot hold.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("kl_comedy.slurm"),
        # A misspelt name in the template is an error here, and not an empty word in a script of a queued job.
        undefined=StrictUndefined,
        # Escaping is for HTML; words of the shell are quoted by the filters below.
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["doublequoted"] = doublequoted
    environment.filters["quoted"] = _quoted

    # sbatch fills in %j and its like; a % of the folder's own name must be written twice.
    logs = str(sweep.logs).replace("%", "%%")
    number = "%A_%a"
    servers = shape.servers
    if stage == "report":
        # A job by itself and not a task of an array; it samples nothing, so that it needs no servers.
        number = "%j"
        servers = None
    time = shape.time
    memory = shape.memory
    if stage == "report":
        time, memory = report_limits(shape)
    worker = worker_resources(shape, stage)
    job = worker
    servers_per_node = 0
    server_words = ""
    if servers is not None:
        servers_per_node = _servers_per_node(servers)
        job = job_resources(worker, servers)
        server_words = _server_words(sweep, servers)
    return environment.get_template("job.sbatch.j2").render(
        profile=shape,
        sbatch_texts=SBATCH_TEXTS,
        stage=stage,
        sweep=sweep,
        time=time,
        memory=memory,
        log=sbatch_word("--output", f"{logs}/{stage}-{number}.out"),
        directory=sbatch_word("the working folder", sweep.manifest.directory),
        worker=worker,
        job=job,
        launcher=launcher(shape, gpus=job.gpus, folders=(sweep.manifest.directory, str(sweep.path))),
        command=shlex.join(stage_command(sweep, stage)),
        servers=servers,
        servers_per_node=servers_per_node,
        server_words=server_words,
        last_tasks_s=LAST_TASKS_S,
        requeue_code=REQUEUE_EXIT_CODE,
        early_signal_code=SIGUSR1_EXIT_CODE,
    )


def report_limits(shape: JobShape) -> tuple[str, str | None]:
    """The time limit and the memory of the report: those of the profile, or :data:`REPORT_TIME`, :data:`REPORT_MEMORY`.

    The smaller ones: a job of hours with all memory of a node waits in the queue as long as a training does.
    """
    time = REPORT_TIME
    limit_s = time_limit_s(shape.time)
    most_s = time_limit_s(REPORT_TIME)
    if limit_s is not None and most_s is not None and limit_s <= most_s:
        time = shape.time
    # None: the site's default, which is no mistake for a small job.
    memory = shape.memory
    if memory is not None and _mebibytes(memory) > _mebibytes(REPORT_MEMORY):
        memory = REPORT_MEMORY
    return time, memory


def _mebibytes(memory: str) -> float:
    """An amount of memory as sbatch reads it, in MiB; 0 for one that only sbatch can judge.

    >>> [_mebibytes(text) for text in ("64G", "512", "2T", "0", "much")]
    [65536.0, 512.0, 2097152.0, inf, 0.0]
    """
    amount = MEMORY.fullmatch(memory)
    if amount is None:
        return 0.0
    number, unit = amount.groups()
    # sbatch reads 0 as all memory of the node.
    if int(number) == 0:
        return math.inf
    return float(int(number) * MIB_PER_UNIT[unit.upper()])


def worker_resources(shape: JobShape, stage: str) -> Resources:
    """What the process that trains, evaluates or reports asks for."""
    if stage == "train":
        return Resources(
            nodes=shape.nodes,
            tasks=shape.tasks_per_node,
            cpus=shape.cpus_per_task,
            gpus=shape.gpus_per_node,
        )
    # A model that is evaluated is on one GPU, however many trained it.
    gpus = 0
    if stage == "evaluate":
        gpus = min(shape.gpus_per_node, 1)
    return Resources(nodes=1, tasks=1, cpus=shape.cpus_per_task, gpus=gpus)


def job_resources(worker: Resources, servers: Servers) -> Resources:
    """What a job of a worker and servers asks for. Every node of a job has the same tasks, CPUs and GPUs."""
    servers_per_node = _servers_per_node(servers)
    server_gpus = servers_per_node * servers.gpus
    # --cpus-per-task is one number for all tasks of a job, so that the larger need counts for both steps.
    cpus = max(worker.cpus, servers.cpus)
    if servers.nodes:
        return Resources(
            nodes=worker.nodes + servers.nodes,
            tasks=max(worker.tasks, servers_per_node),
            cpus=cpus,
            gpus=max(worker.gpus, server_gpus),
        )
    return Resources(
        nodes=worker.nodes,
        # Both steps are on the worker's nodes at the same time.
        tasks=worker.tasks + servers_per_node,
        cpus=cpus,
        gpus=worker.gpus + server_gpus,
    )


def _servers_per_node(servers: Servers) -> int:
    """Rounded up: the last node may have fewer."""
    return math.ceil(servers.count / (servers.nodes or 1))


def _server_words(sweep: Sweep, servers: Servers) -> str:
    """Which server a task starts: that of a cell's config (the script has its number in ``index``), or a command."""
    if servers.command is None:
        return f'--cell {shlex.quote(str(sweep.path))} "$index"'
    return f"-- {shlex.join(shlex.split(servers.command))}"


def stage_command(sweep: Sweep, stage: str, index: int | None = None) -> list[str]:
    """The words after ``python``. Without ``index`` the caller, as the batch script, appends the cell's."""
    words = ["-m", "kl_comedy.cli", *STAGE_WORDS[stage], str(sweep.path)]
    if index is not None:
        words.append(str(index))
    return words


def launcher(shape: JobShape, *, gpus: int, folders: Sequence[str]) -> str:
    """The words between srun and the arguments of python: how the container starts, where there is one, and python."""
    container = shape.container
    if container is None:
        return shlex.quote(shape.python)
    # Neither runtime has a way to escape them.
    for folder in folders:
        if set(folder) & set(",:"):
            raise bad_value("the folder", folder, "a name without : and ,", "both separate the mounts of a container")
    # The sweep is often inside the working folder or that folder itself, which needs one mount.
    mounts = [*dict.fromkeys(folders), *container.mounts]
    if container.runtime == "pyxis":
        words = _pyxis_options(container, folders[0], mounts)
    else:
        words = _apptainer_command(container, folders[0], mounts, gpus)
    return shlex.join([*words, shape.python])


def _pyxis_options(container: Container, folder: str, mounts: Sequence[str]) -> list[str]:
    """Options of srun. A mount of one path stands for the same path on both sides."""
    pairs = [mount if ":" in mount else f"{mount}:{mount}" for mount in mounts]
    return [
        f"--container-image={container.image}",
        f"--container-workdir={folder}",
        f"--container-mounts={','.join(pairs)}",
    ]


def _apptainer_command(container: Container, folder: str, mounts: Sequence[str], gpus: int) -> list[str]:
    words = ["apptainer", "exec"]
    # --nv warns where there is no GPU.
    if gpus:
        words.append("--nv")
    words += ["--pwd", folder]
    for mount in mounts:
        words += ["--bind", mount]
    words.append(container.image)
    return words


def _quoted(item: object) -> str:
    """A value as one word of the shell."""
    return shlex.quote(str(item))


def doublequoted(text: str) -> str:
    """Text in double quotes: variables are expanded, nothing is executed.

    >>> print(doublequoted("/scratch/$USER"))
    "/scratch/$USER"
    """
    # The backslash first, or those that the other replacements add would be doubled.
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("`", "\\`").replace("$(", "\\$(")
    return f'"{escaped}"'


def array_ranges(indices: Iterable[int]) -> str:
    """Indices as sbatch's --array takes them.

    >>> array_ranges([7, 0, 1, 2, 9, 10])
    '0-2,7,9-10'
    """
    ranges: list[list[int]] = []
    for index in sorted(set(indices)):
        if ranges and index == ranges[-1][-1] + 1:
            ranges[-1].append(index)
        else:
            ranges.append([index])
    texts = []
    for members in ranges:
        if len(members) == 1:
            texts.append(str(members[0]))
        else:
            texts.append(f"{members[0]}-{members[-1]}")
    return ",".join(texts)
