"""From manifest and profile to arrays and the text of batch scripts. Nothing is written, SLURM is not asked.

SLURM gives every task of an array the same nodes and tasks, and bounds its indices. So cells of one size, and of one
block of numbers, share an array; a batch script belongs to a size.
"""

from __future__ import annotations

import shlex
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kl_comedy.errors import REQUEUE_EXIT_CODE, UserError
from kl_comedy.slurm.manifest import Cell, Sweep
from kl_comedy.slurm.profile import Profile, Servers


@dataclass(frozen=True, kw_only=True)
class Array:
    """Cells ``indices`` of one size; ``offset`` less, they are the array's own. ``share``: how many at a time."""

    shape: Profile
    suffix: str
    offset: int
    indices: tuple[int, ...]
    share: int | None

    def script(self, stage: str) -> str:
        """The name of its batch script: ``train``, or ``train-2x4`` for cells of another size than the profile's."""
        return stage + self.suffix


def arrays(cells: Iterable[Cell], profile: Profile, limit: int | None) -> list[Array]:
    """The arrays of ``cells``, at most ``limit`` tasks at a time in all (but one in each), the profile's size first.

    Raises :class:`UserError` for a cell whose size the profile has no shape for.
    """
    blocks: dict[tuple[int, int], list[Cell]] = {}
    shapes = profile.all_shapes
    for cell in cells:
        number = shapes.index(shape_for(cell, profile))
        blocks.setdefault((number, cell.index // profile.max_array * profile.max_array), []).append(cell)
    ordered = sorted(blocks)
    shares = share_out(limit, [len(blocks[key]) for key in ordered])
    return [
        Array(
            shape=shapes[number],
            suffix=suffix_of(shapes[number], profile),
            offset=offset,
            share=share,
            indices=tuple(cell.index for cell in blocks[number, offset]),
        )
        for (number, offset), share in zip(ordered, shares, strict=True)
    ]


def shape_for(cell: Cell, profile: Profile) -> Profile:
    """The shape of ``profile`` whose nodes and tasks are those of the cell's config; a :class:`UserError` without."""
    for shape in profile.all_shapes:
        if shape.size == cell.size:
            return shape
    sizes = ", ".join("{} x {}".format(*shape.size) for shape in profile.all_shapes)
    raise UserError(
        f"cell {cell.index} ({cell.name}): train.nodes x train.devices is {cell.nodes} x {cell.devices}, and profile "
        f"{profile.name} takes nodes x tasks_per_node of {sizes} only; add "
        f"shapes: [{{nodes: {cell.nodes}, tasks_per_node: {cell.devices}}}] to it, or set its own"
    )


def suffix_of(shape: Profile, profile: Profile) -> str:
    return "" if shape.size == profile.size else "-{}x{}".format(*shape.size)


def scripts(sweep: Sweep, profile: Profile, cells: Sequence[Cell]) -> dict[str, str]:
    """The batch scripts of ``cells`` by name: training and, where asked for, evaluation of each size; the report."""
    shapes = {suffix_of(shape, profile): shape for shape in (shape_for(cell, profile) for cell in cells)}
    stages = ("train",) if sweep.manifest.evaluate is None else ("train", "evaluate")
    texts = {stage + suffix: render(sweep, shapes[suffix], stage) for stage in stages for suffix in sorted(shapes)}
    return {**texts, "report": render(sweep, profile, "report")}


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
        open_ = [number for number, length in enumerate(lengths) if shares[number] < length]
        most = max(open_, key=lambda number: lengths[number] / shares[number])
        shares[most] += 1
    return list(shares)


SIGUSR1_EXIT_CODE = 128 + signal.SIGUSR1
"""srun's exit code where SIGUSR1 ended a process before it had installed its handler."""
LAST_TASKS_S = 60
"""How long the other tasks of a step may take after the first has ended: all of them save before they exit."""


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What a job asks for: nodes; tasks, CPUs of a task and GPUs on each node."""

    nodes: int
    tasks: int
    cpus: int
    gpus: int


def render(sweep: Sweep, profile: Profile, stage: str) -> str:
    """The batch script of ``stage``: an array over cells for train and evaluate, a single job for report.

    Training takes what the profile asks for; evaluation one task with one GPU where there are any; the report none.
    Servers come with whatever samples.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("kl_comedy.slurm"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters["doublequoted"] = doublequoted
    servers = None if stage == "report" else profile.servers
    worker = _worker(profile, stage)
    shape = worker if servers is None else with_servers(worker, servers)
    return environment.get_template("job.sbatch.j2").render(
        profile=profile,
        stage=stage,
        array=stage != "report",
        name=sweep.manifest.name,
        job_name=f"{sweep.manifest.name}-{stage}",
        sweep=sweep.path,
        logs=sweep.logs,
        directory=sweep.manifest.directory,
        shape=shape,
        step=worker_step(worker, servers),
        launcher=launcher(profile, gpus=shape.gpus, folders=(sweep.manifest.directory, str(sweep.path))),
        command=shlex.join(stage_command(sweep, stage)),
        servers=servers,
        servers_folder=shlex.quote(str(sweep.path / "servers")),
        server_step="" if servers is None else server_step(worker, servers),
        server_command="" if servers is None else server_command(worker, servers),
        requeue_code=REQUEUE_EXIT_CODE,
        unheard_code=SIGUSR1_EXIT_CODE,
    )


def _worker(profile: Profile, stage: str) -> Resources:
    whole = stage == "train"
    return Resources(
        nodes=profile.nodes if whole else 1,
        tasks=profile.tasks_per_node if whole else 1,
        cpus=profile.cpus_per_task,
        gpus={"train": profile.gpus_per_node, "evaluate": min(profile.gpus_per_node, 1), "report": 0}[stage],
    )


def with_servers(worker: Resources, servers: Servers) -> Resources:
    """The allocation that holds both: servers on nodes of their own, or beside the worker on its one node."""
    cpus = max(worker.cpus, servers.cpus)
    if not servers.nodes:
        gpus = worker.gpus + servers.count * servers.gpus
        return Resources(nodes=worker.nodes, tasks=worker.tasks + servers.count, cpus=cpus, gpus=gpus)
    share = -(-servers.count // servers.nodes)
    return Resources(
        nodes=worker.nodes + servers.nodes,
        tasks=max(worker.tasks, share),
        cpus=cpus,
        gpus=max(worker.gpus, share * servers.gpus),
    )


def worker_step(worker: Resources, servers: Servers | None) -> str:
    """srun's options for the worker: the whole job, or its own part of it.

    A step of one task ends with it. One of several lets the others finish saving: srun's ``--kill-on-bad-exit`` would
    kill them for the exit code that says "saved".
    """
    several = worker.nodes * worker.tasks > 1
    last = f"--kill-on-bad-exit=0 --wait={LAST_TASKS_S}" if several else "--kill-on-bad-exit=1"
    if servers is None:
        return last
    gpus = f" --gpus-per-node={worker.gpus}" if worker.gpus else ""
    place = " --relative=0" if servers.nodes else ""
    return (
        f"{last} --exact --nodes={worker.nodes}{place} --ntasks={worker.nodes * worker.tasks} "
        f"--ntasks-per-node={worker.tasks} --cpus-per-task={worker.cpus}{gpus}"
    )


def server_step(worker: Resources, servers: Servers) -> str:
    """srun's options for the servers: one task each; one that ends does not take the others with it."""
    place = f" --relative={worker.nodes}" if servers.nodes else ""
    gpus = f" --gpus-per-task={servers.gpus}" if servers.gpus else ""
    return (
        f"--kill-on-bad-exit=0 --exact --nodes={servers.nodes or 1}{place} --ntasks={servers.count} "
        f"--cpus-per-task={servers.cpus}{gpus}"
    )


def server_command(worker: Resources, servers: Servers) -> str:
    """What each server task runs. Beside the worker it binds to loopback; from another node it must be reached."""
    where = ["--reachable"] if servers.nodes else []
    words = ["-m", "kl_comedy.slurm.servers", *where, "--ready", servers.ready, "--wait", str(servers.wait_seconds)]
    return shlex.join([*words, "--", *shlex.split(servers.command)])


def stage_command(sweep: Sweep, stage: str, index: int | None = None) -> list[str]:
    """The words after ``python``; an array's index is appended by whoever runs it."""
    if stage == "report":
        return ["-m", "kl_comedy.cli", "sweep-report", str(sweep.path)]
    return [
        "-m",
        "kl_comedy.cli",
        "cell",
        *(["--evaluate"] if stage == "evaluate" else []),
        str(sweep.path),
        *([str(index)] if index is not None else []),
    ]


def launcher(profile: Profile, *, gpus: int, folders: Sequence[str]) -> str:
    """What stands between srun and our words: a container where there is one, and python."""
    container = profile.container
    if container is None:
        return shlex.quote(profile.python)
    mounts = [*dict.fromkeys(folders), *container.mounts]
    if container.runtime == "pyxis":
        words = [f"--container-image={container.image}", f"--container-workdir={folders[0]}"]
        words += ["--container-mounts=" + ",".join(m if ":" in m else f"{m}:{m}" for m in mounts)]
        return shlex.join([*words, profile.python])
    words = ["apptainer", "exec", *(["--nv"] if gpus else []), "--pwd", folders[0]]
    return shlex.join(
        [*words, *(word for mount in mounts for word in ("--bind", mount)), container.image, profile.python]
    )


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
    runs: list[list[int]] = []
    for index in sorted(set(indices)):
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in runs)


def script_path(sweep: Sweep, name: str) -> Path:
    return sweep.path / f"{name}.sbatch"
