"""A folder to work in and the environment of a cluster: what a user of a site has."""

import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from rich.console import Console

from commands import run_here
from kl_comedy.registry import PLUGIN_FILES


class Site:
    def __init__(self, folder, environment):
        self.folder, self.environment = folder, environment

    def run(self, *words, code=0):
        done = subprocess.run(
            [str(word) for word in words], capture_output=True, text=True, cwd=self.folder, env=self.environment
        )
        assert done.returncode == code, (words, done.stdout, done.stderr)
        return done

    def kl_comedy(self, *words, code=0):
        """The command line in this process, which has imported everything."""
        with mock.patch.dict(PLUGIN_FILES, clear=True):
            exit_code, out, err = run_here(*words, cwd=self.folder, env=self.environment)
        assert exit_code == code and "Traceback" not in err, (words, out, err)
        return SimpleNamespace(stdout=out, stderr=err)

    def status(self, sweep):
        return json.loads(self.kl_comedy("status", sweep, "--format", "json").stdout)

    def wait(self, what, seconds=400, every=0.2):
        deadline = time.monotonic() + seconds
        while not (result := what()):
            assert time.monotonic() < deadline, self.run("squeue", "--states=all", "--array").stdout
            time.sleep(every)
        return result

    def idle(self):
        """Whether the queue is empty."""
        return not self.run("squeue", "--noheader").stdout.strip()


def undisturbed(sweep, folder, *, only=None, environment=None):
    """What cells of a sweep (default: all) end in when nobody disturbs them, one after another, without a scheduler.

    Cells of one process are trained in this one; those of several nodes in as many processes of this machine.
    """
    from kl_comedy.config import load_config
    from kl_comedy.slurm.manifest import read_sweep
    from kl_comedy.training.run import train

    sweep, ends = read_sweep(sweep), {}
    with contextlib.chdir(sweep.manifest.directory):
        for cell in sweep.manifest.cells:
            if only is not None and cell.index not in only:
                continue
            overrides = [*sweep.overrides(cell), f"output={folder / str(cell.index)}", "tracking.uri=none"]
            if cell.nodes == 1:
                done = train(load_config(sweep.base, overrides), console=Console(quiet=True), command="alone")
                ends[cell.index] = done.run.path
                continue
            here = ["train.nodes=1", f"train.devices={cell.nodes * cell.devices}"]
            subprocess.run(
                [sys.executable, "-m", "kl_comedy.cli", "train", sweep.base, *overrides, *here],
                check=True,
                capture_output=True,
                env=environment,
            )
            (ends[cell.index],) = (folder / str(cell.index)).glob("*-1")
    return ends


def weights(run):
    from safetensors.torch import load_file

    from kl_comedy.models import weights_hash

    return weights_hash(load_file(Path(run) / "policy" / "model.safetensors"))
