"""Run a function of a test in several processes that talk over gloo: ``spawn(function, folder, world=2)``."""

import json
import time
import traceback
from pathlib import Path

from commands import DEADLINE_S, FORKS


def spawn(function, folder, *arguments, world=2, timeout=DEADLINE_S):
    """Call ``function(rank, world, folder, *arguments)`` on every rank; what each returned (JSON), rank by rank.

    Fails where a process fails, and where they do not end in time: then something hung.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    ranks = [FORKS.Process(target=_main, args=(function, rank, world, folder, *arguments)) for rank in range(world)]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + timeout
    for process in ranks:
        process.join(max(0.0, deadline - time.monotonic()))
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
        process.join()
    errors = [path.read_text() for path in folder.glob("error-*.txt")]
    assert codes == [0] * world, "\n".join(errors)
    return [json.loads((folder / f"returned-{rank}.json").read_text()) for rank in range(world)]


def _main(function, rank, world, folder, *arguments):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder.absolute()}/store", rank=rank, world_size=world)
    try:
        result = function(rank, world, folder, *arguments)
        (folder / f"returned-{rank}.json").write_text(json.dumps(result))
        # No rank leaves before all have answered: its end would be an error for those that still talk to it.
        dist.barrier()
    except BaseException:
        (folder / f"error-{rank}.txt").write_text(traceback.format_exc())
        raise
    finally:
        dist.destroy_process_group()
