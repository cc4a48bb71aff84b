"""A config trained by two processes, and its twin."""

import tempfile
from pathlib import Path

import torch
import yaml
from safetensors.torch import load_file
from tests.twin.compare import difference_of
from tests.twin.engine import PARTS

from commands import Command, ranks_environment
from kl_comedy.config import load_config
from kl_comedy.processes import free_port
from kl_comedy.registry import load_plugin_file

RANKS = 2
OF_ONE_RANK = ("logp", "advantage", "weight", "value_target")
"""What a process records of the rows that it passed."""


def run_once(path, files, kill_at):
    """Two processes from start (or their checkpoint) to the end, or to update ``kill_at``."""
    port = free_port()
    words = ["train", path, "resume=auto", "--plugin", PARTS]
    ranks = []
    for rank in range(RANKS):
        environment = ranks_environment(rank, RANKS, port) | {"KL_TEST_TWIN_FILE": str(files[rank])}
        if kill_at is not None:
            environment["KL_TEST_TWIN_KILL_AT"] = str(kill_at)
        ranks.append(Command(*words, cwd=path.parent, env=environment, modules=["tests.twin.recording_rank"]))
    try:
        codes = [rank.wait() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    ended_as_planned = all(code == 0 for code in codes) if kill_at is None else all(code != 0 for code in codes)
    assert ended_as_planned, [rank.output[-2000:] for rank in ranks]


def recorded(files):
    """The updates of both processes as one, by their numbers."""
    of_ranks = [torch.load(file, weights_only=False) for file in files]
    updates = of_ranks[0]["updates"]
    for other in of_ranks[1:]:
        for version, update in other["updates"].items():
            for key in OF_ONE_RANK:
                updates[version][key] |= update[key]
    return updates, of_ranks[0]["start"]


def compare_two_ranks(mapping, *, kill_at=None):
    """The first difference between two processes and the twin; None without any."""
    load_plugin_file(PARTS)
    with tempfile.TemporaryDirectory(prefix="twin-ranks-") as name:
        folder = Path(name)
        mapping = mapping | {"output": str(folder / "runs")}
        path = folder / "config.yaml"
        path.write_text(yaml.safe_dump(mapping))
        updates = {}
        start = None
        for number, ends_at in enumerate([kill_at, None] if kill_at is not None else [None]):
            files = [folder / f"rank{rank}-{number}.pt" for rank in range(RANKS)]
            run_once(path, files, ends_at)
            more, first_weights = recorded(files)
            updates |= more
            start = start or first_weights
        (run,) = (folder / "runs").glob("twin-*")
        trained = {"updates": [updates[version] for version in sorted(updates)], "start": start}
        return difference_of(load_config(path), trained, load_file(run / "policy" / "model.safetensors"))
