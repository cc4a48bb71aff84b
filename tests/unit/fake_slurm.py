"""A stand-in for SLURM's commands."""

from kl_comedy.errors import RunFailed
from kl_comedy.slurm import scheduler


class FakeSlurm:
    """Answers for sbatch, squeue, sacct and scancel, and remembers what was asked."""

    def __init__(self, monkeypatch, queue=""):
        self.calls, self.queue, self.jobs = [], queue, 0
        monkeypatch.setattr(scheduler, "_call", self)

    def __call__(self, words):
        self.calls.append(words)
        if words[0] == "sbatch":
            self.jobs += 1
            return f"{self.jobs};cluster\n"
        if words[0] == "sacct":
            raise RunFailed("sacct: Slurm accounting storage is disabled")
        return self.queue if words[0] == "squeue" else ""
