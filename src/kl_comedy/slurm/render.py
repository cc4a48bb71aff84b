"""From manifest and profile to the text of a batch script. Pure: nothing is written, nothing is asked of SLURM."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from kl_comedy.errors import REQUEUE_EXIT_CODE
from kl_comedy.slurm.manifest import Sweep
from kl_comedy.slurm.profile import Profile

STAGES = ("train", "evaluate", "report")


def render(sweep: Sweep, profile: Profile, stage: str) -> str:
    """The batch script of ``stage``: an array over cells for train and evaluate, a single job for report.

    Training takes what the profile asks for; evaluation one task with one GPU where there are any; the report none.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("kl_comedy.slurm"), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True, autoescape=False,
    )  # fmt: skip
    environment.filters["doublequoted"] = doublequoted
    whole = stage == "train"
    gpus = {"train": profile.gpus_per_node, "evaluate": min(profile.gpus_per_node, 1), "report": 0}[stage]
    return environment.get_template("job.sbatch.j2").render(
        profile=profile,
        stage=stage,
        array=stage != "report",
        name=sweep.manifest.name,
        job_name=f"{sweep.manifest.name}-{stage}",
        sweep=sweep.path,
        logs=sweep.logs,
        directory=sweep.manifest.directory,
        nodes=profile.nodes if whole else 1,
        tasks=profile.tasks_per_node if whole else 1,
        gpus=gpus,
        launcher=launcher(profile, gpus=gpus, folders=(sweep.manifest.directory, str(sweep.path))),
        command=shlex.join(stage_command(sweep, stage)),
        requeue_code=REQUEUE_EXIT_CODE,
    )


def stage_command(sweep: Sweep, stage: str, index: int | None = None) -> list[str]:
    """The words after ``python``; an array's index is appended by whoever runs it."""
    if stage == "report":
        return ["-m", "kl_comedy.cli", "sweep-report", str(sweep.path)]
    return ["-m", "kl_comedy.cli", "cell", *(["--evaluate"] if stage == "evaluate" else []), str(sweep.path),
            *([str(index)] if index is not None else [])]  # fmt: skip


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
    return shlex.join([*words, *(word for mount in mounts for word in ("--bind", mount)), container.image,
                       profile.python])  # fmt: skip


def doublequoted(text: str) -> str:
    """Text in double quotes: variables are expanded, nothing is executed.

    >>> print(doublequoted("/scratch/$USER"))
    "/scratch/$USER"
    """
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("`", "\\`").replace("$(", "\\$(")
    return f'"{escaped}"'


def array_ranges(indices: Iterable[int]) -> str:
    """Indices as sbatch writes them.

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


def script_path(sweep: Sweep, stage: str) -> Path:
    return sweep.path / f"{stage}.sbatch"
