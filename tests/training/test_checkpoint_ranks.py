"""A save that one of several processes cannot finish fails on all of them, and what was complete stays."""

import errno
import os
from unittest import mock

import pytest

from disks import disk_of
from kl_comedy.training.checkpoint import SaveFailed, damage, newest_checkpoint, save_checkpoint
from kl_comedy.training.distributed import Ranks
from kl_comedy.training.run_folder import saved, step_of
from ranks import spawn
from sharded_learner import Learner
from sharded_models import config_of

FSYNCS = 2
"""Of one save on a process that is not the first: its own state and its shards."""


def learner(rank, world):
    from kl_comedy.models.sharding import load_sharded

    return Learner(load_sharded(config_of("plain"), limit_bytes=0), Ranks(rank=rank, size=world, sharded=True))


def attempt(root, run, step):
    """The name of the checkpoint or the error of a save, and what is in the folder once every process is done."""
    try:
        result = save_checkpoint(root, step, run.save, keep=3, ranks=run.ranks).name
    except SaveFailed as error:
        result = f"failed: {error}"
    run.ranks.gather(None)
    return [result, [path.name for path in sorted(root.iterdir())]]


def failing_at(call, code, *, only_if):
    """The n-th fsync of this process is refused."""
    real = os.fsync
    calls = []

    def fails(descriptor):
        calls.append(descriptor)
        if only_if and len(calls) == call:
            raise OSError(code, os.strerror(code))
        real(descriptor)

    return mock.patch.object(os, "fsync", fails)


def refused_on_rank_one(rank, world, folder):
    run = learner(rank, world)
    root = folder / "checkpoints"
    run.learn(1)
    report = {"first": attempt(root, run, 1), "hash": run.hashes()[0], "refused": []}
    run.learn(1)
    for call in range(1, FSYNCS + 1):
        for code in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            with failing_at(call, code, only_if=rank == 1):
                report["refused"].append([os.strerror(code), *attempt(root, run, 2)])
    report["newest"] = step_of(newest_checkpoint(root, run.ranks))
    with failing_at(FSYNCS + 1, errno.ENOSPC, only_if=rank == 1):
        report["second"] = attempt(root, run, 2)
    run.restore(root / "step-00000001.ckpt")
    report["restored"] = run.hashes()[0]
    return report


FIRST = "step-00000001.ckpt"
SECOND = "step-00000002.ckpt"


@pytest.mark.slow
def test_what_one_process_cannot_write_fails_the_save_of_all(tmp_path):
    for report in spawn(refused_on_rank_one, tmp_path):
        assert report["first"] == [FIRST, [FIRST]]
        for reason, result, files in report["refused"]:
            assert result.startswith("failed: ")
            assert reason in result
            assert files == [FIRST]
        assert report["newest"] == 1
        assert report["restored"] == report["hash"]
        assert report["second"] == [SECOND, [FIRST, SECOND]], "there was no third write to refuse"


@pytest.fixture
def small_disk(tmp_path):
    with disk_of("2m", tmp_path / "disk") as folder:
        yield folder


def on_a_full_disk(rank, world, folder, disk):
    run = learner(rank, world)
    root = folder / disk / "checkpoints"
    filler = folder / disk / "filler"
    report = {"first": attempt(root, run, 1)}
    for name, room in (("none", 0), ("little", 100_000)):
        if run.ranks.is_rank_zero:
            free = os.statvfs(filler.parent).f_bavail * os.statvfs(filler.parent).f_frsize
            filler.write_bytes(b"\0" * (free - room))
        run.ranks.gather(None)
        report[name] = attempt(root, run, 2)
        if run.ranks.is_rank_zero:
            filler.unlink()
        run.ranks.gather(None)
    report["damage"] = damage(saved(root)[-1])
    report["second"] = attempt(root, run, 2)
    return report


@pytest.mark.slow
def test_a_disk_that_is_full_for_several_processes(tmp_path, small_disk):
    for report in spawn(on_a_full_disk, tmp_path, small_disk.name):
        assert report["first"] == [FIRST, [FIRST]]
        assert report["damage"] is None
        for room in ("none", "little"):
            result, files = report[room]
            # Which of the two depends on the file that the disk has no room for.
            assert "No space left on device" in result or "a file was cut short" in result
            assert files == [FIRST]
        assert report["second"] == [SECOND, [FIRST, SECOND]]
