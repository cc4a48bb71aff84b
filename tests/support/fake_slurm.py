"""A stand-in for SLURM's commands, and a planned sweep."""

from kl_comedy.errors import RunFailed
from kl_comedy.slurm import submit
from kl_comedy.slurm.grid import read_grid
from kl_comedy.slurm.manifest import plan, write_sweep

BASE = "model: {options: {preset: tiny}}\n"


class FakeSlurm:
    """Answers for sbatch, squeue, sacct and scancel, and remembers what was asked."""

    def __init__(self, monkeypatch):
        self.calls = []
        self.queue = ""
        self.jobs = 0
        monkeypatch.setattr(submit, "_call", self)

    def __call__(self, words):
        self.calls.append(words)
        command = words[0]
        if command == "sbatch":
            self.jobs += 1
            return f"{self.jobs};cluster\n"
        if command == "squeue":
            return self.queue
        if command == "sacct":
            # As on a cluster without slurmdbd: the queue is all that is known.
            raise RunFailed("sacct: Slurm accounting storage is disabled")
        return ""


def plan_sweep(folder, grid):
    (folder / "base.yaml").write_text(BASE)
    (folder / "grid.yaml").write_text(f"base: base.yaml\n{grid}")
    return write_sweep(folder / "sweeps" / "grid", plan(read_grid(folder / "grid.yaml"), directory=folder))
