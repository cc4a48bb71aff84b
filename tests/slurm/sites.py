"""A folder to work in and the environment of a cluster: what a user of a site has."""

import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console


class Site:
    """A folder to work in and the environment of a cluster."""

    def __init__(self, folder, environment):
        self.folder, self.environment = folder, environment
        self.held = {}

    def run(self, *words, code=0):
        done = subprocess.run(
            [str(word) for word in words], capture_output=True, text=True, cwd=self.folder, env=self.environment
        )
        assert done.returncode == code, (words, done.stdout, done.stderr)
        return done

    def kl_comedy(self, *words, code=0):
        done = self.run(sys.executable, "-m", "kl_comedy.cli", *words, code=code)
        assert "Traceback" not in done.stderr
        return done

    def status(self, sweep):
        return json.loads(self.kl_comedy("status", sweep, "--format", "json").stdout)

    def wait(self, what, seconds=400, every=0.2):
        deadline = time.monotonic() + seconds
        while not (found := what()):
            assert time.monotonic() < deadline, self.run("squeue", "--states=all", "--array").stdout
            time.sleep(every)
        return found

    def idle(self):
        """Whether the queue is empty; a requeued job is let go after five seconds, where SLURM would wait two minutes.

        Not at once: a late word of the first leg's end would be taken for the second's.
        """
        lines = self.run("squeue", "--noheader", "--array", "--format=%i|%T|%r").stdout.split("\n")
        for line in filter(None, lines):
            job, state, reason = line.split("|")
            if state != "PENDING" or reason != "BeginTime":
                self.held.pop(job, None)
            elif time.monotonic() - self.held.setdefault(job, time.monotonic()) > 5:
                self.run("scontrol", "update", f"JobId={job}", "StartTime=now")
        return not any(lines)


def undisturbed(sweep, folder):
    """What the cells of a sweep end in when nobody disturbs them, one after another, without a scheduler.

    Cells of one process are trained in this one; those of several nodes in as many processes of this machine.
    """
    from kl_comedy.config import load_config
    from kl_comedy.slurm.manifest import read_sweep
    from kl_comedy.training.run import train

    found, ends = read_sweep(sweep), {}
    with contextlib.chdir(found.manifest.directory):
        for cell in found.manifest.cells:
            overrides = [*found.overrides(cell), f"output={folder / str(cell.index)}", "tracking.uri=none"]
            if cell.nodes == 1:
                done = train(load_config(found.base, overrides), console=Console(quiet=True), command="alone")
                ends[cell.index] = done.run.path
                continue
            here = ["train.nodes=1", f"train.devices={cell.nodes * cell.devices}"]
            subprocess.run(
                [sys.executable, "-m", "kl_comedy.cli", "train", found.base, *overrides, *here],
                check=True,
                capture_output=True,
            )
            (ends[cell.index],) = (folder / str(cell.index)).glob("*-1")
    return ends


def weights(run):
    from safetensors.torch import load_file

    from kl_comedy.models import weights_hash

    return weights_hash(load_file(Path(run) / "policy" / "model.safetensors"))
