"""Run a function of a test in several processes that talk over gloo: ``spawn(function, folder, world=2)``."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

TIMEOUT_S = 500


def spawn(function, folder, *arguments, world=2, timeout=TIMEOUT_S):
    """Call ``function(rank, world, folder, *arguments)`` on every rank; what each returned (JSON), rank by rank.

    Fails where a process fails, and where they do not end in time: then something hung.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    module = function.__module__
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(sys.modules[module].__file__).parent), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    words = [str(world), str(folder), module, function.__name__, json.dumps(list(arguments))]
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), *words],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        said = [process.communicate(timeout=timeout)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for rank, (process, text) in enumerate(zip(processes, said, strict=True)):
        assert process.returncode == 0, f"rank {rank} of {world} failed:\n{text}"
    return [json.loads((folder / f"returned-{rank}.json").read_text()) for rank in range(world)]


def _main():
    import torch.distributed as dist

    rank, world, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    function = getattr(importlib.import_module(sys.argv[4]), sys.argv[5])
    dist.init_process_group("gloo", init_method=f"file://{folder.absolute()}/store", rank=rank, world_size=world)
    try:
        found = function(rank, world, folder, *json.loads(sys.argv[6]))
        (folder / f"returned-{rank}.json").write_text(json.dumps(found))
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    _main()
