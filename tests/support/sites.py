"""A folder to work in and the environment of a cluster: what a user of a site has."""

import contextlib
import json
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from rich.console import Console

from commands import Command, run_here
from kl_comedy.plugins import PLUGIN_FILES


class Site:
    def __init__(self, folder, environment):
        self.folder = folder
        self.environment = environment

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
        assert exit_code == code, (words, out, err)
        assert "Traceback" not in err, (words, out, err)
        return SimpleNamespace(stdout=out, stderr=err)

    def status(self, sweep):
        return json.loads(self.kl_comedy("status", sweep, "--format", "json").stdout)

    def wait(self, what, seconds=900, every=0.2):
        """Call ``what`` until its result is true, and return that; fails after ``seconds``, with the queue."""
        deadline = time.monotonic() + seconds
        result = what()
        while not result:
            assert time.monotonic() < deadline, self.run("squeue", "--states=all", "--array").stdout
            time.sleep(every)
            result = what()
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

    sweep = read_sweep(sweep)
    cells = sweep.manifest.cells
    if only is not None:
        cells = [cell for cell in cells if cell.index in only]
    run_folders = {}
    with contextlib.chdir(sweep.manifest.directory):
        for cell in cells:
            output = folder / str(cell.index)
            file = sweep.config(cell.index)
            overrides = [f"output={output}", "tracking.uri=none"]
            if cell.nodes == 1:
                done = train(load_config(file, overrides), console=Console(quiet=True), command="alone")
                run_folders[cell.index] = done.run.path
            else:
                on_this_machine = ["train.nodes=1", f"train.devices={cell.nodes * cell.devices}"]
                words = ["train", file, *overrides, *on_this_machine]
                Command(*words, cwd=".", env=environment).finish()
                (run_folders[cell.index],) = output.glob("*-1")
    return run_folders


def weights(run):
    from safetensors.torch import load_file

    from kl_comedy.models import weights_hash

    return weights_hash(load_file(Path(run) / "policy" / "model.safetensors"))
