"""Checkpoints are written whole, checked when read, and survive a failure of the next one."""

import errno
import os
import pickle
import resource
import signal
import subprocess
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from disks import disk_of
from kl_comedy.training import checkpoint as checkpoints
from kl_comedy.training.checkpoint import (
    MANIFEST,
    SafeReader,
    SaveFailed,
    best,
    damage,
    manifest,
    newest_checkpoint,
    read_checkpoint,
    save_checkpoint,
    write_checkpoint,
)
from kl_comedy.training.distributed import SINGLE_PROCESS
from kl_comedy.training.run_folder import saved, step_of

FSYNCS = 6
"""Of one save: the process's state, the loop's, the weights, their index, the manifest, the folder."""


def learner(seed=0):
    """A module with an optimizer that has a state, and one moving reference."""
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    ema_state = {"step": 3, "weights": {"w": torch.zeros(5)}}
    module.references = {"ema": SimpleNamespace(state_dict=lambda: ema_state)}
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    for _ in range(3):
        module(torch.randn(2, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return module, optimizer


def state_of(step):
    moving = {"ema": {"step": step, "weights": {"w": torch.arange(5.0)}}}
    return {"kl_comedy": {"version": step, "moving": moving, "torch_rng": torch.get_rng_state()}, "loops": {"n": step}}


def writer(step=1, seed=0):
    module, optimizer = learner(seed)
    return lambda folder: write_checkpoint(folder, state_of(step), module, [optimizer], SINGLE_PROCESS)


def save(root, step=1, *, keep=1, **options):
    return save_checkpoint(root, step, writer(step), keep=keep, **options)


def steps(root):
    return [step_of(path) for path in saved(root)]


def newest_step(root):
    return step_of(newest_checkpoint(root))


def test_what_is_read_is_what_was_written(tmp_path):
    module, optimizer = learner()

    def write(folder):
        write_checkpoint(folder, state_of(3), module, [optimizer], SINGLE_PROCESS)

    path = save_checkpoint(tmp_path, 3, write, keep=1, reward=0.25)
    assert path == newest_checkpoint(tmp_path)
    assert set(manifest(path)["files"]) == {file.name for file in path.iterdir()} - {MANIFEST}
    assert manifest(path)["reward"] == 0.25
    other, fresh = learner(seed=9)
    fresh.state.clear()
    fresh.param_groups[0]["lr"] = 0.5
    state = read_checkpoint(path, other, [fresh], SINGLE_PROCESS)
    assert state["loops"] == {"n": 3}
    assert state["kl_comedy"]["version"] == 3
    torch.testing.assert_close(state["kl_comedy"]["moving"]["ema"]["weights"]["w"], torch.arange(5.0))
    assert state["kl_comedy"]["moving"]["ema"]["step"] == 3
    assert state["kl_comedy"]["torch_rng"].dtype == torch.uint8
    for read, written in zip(other.parameters(), module.parameters(), strict=True):
        assert torch.equal(read, written)
        for key, value in optimizer.state[written].items():
            assert torch.equal(fresh.state[read][key], value), key
    assert fresh.param_groups[0]["lr"] == 0.1


def test_tensor_names_and_parameters_without_optimizer_state(tmp_path):
    """The names are the file format: checkpoints of earlier versions have the same."""
    module, optimizer = learner()
    del optimizer.state[module[1].bias]
    write_checkpoint(tmp_path / "one", state_of(1), module, [optimizer], SINGLE_PROCESS)
    parameters = ["0.weight", "0.bias", "1.weight", "1.bias"]
    names = {"reference.ema.w"}
    names.update(f"model.{name}" for name in parameters)
    for name in parameters[:3]:  # the last one has no optimizer state
        names.update(f"optimizer.0.{name}.{key}" for key in ("exp_avg", "exp_avg_sq", "step"))
    assert set(SafeReader(tmp_path / "one").read_metadata().state_dict_metadata) == names
    other, fresh = learner(seed=9)
    fresh.state.clear()
    read_checkpoint(tmp_path / "one", other, [fresh], SINGLE_PROCESS)
    assert set(fresh.state) == {other[0].weight, other[0].bias, other[1].weight}


def test_the_newest_and_the_best_stay(tmp_path):
    for step, reward in [(1, 0.1), (2, 0.9), (3, None), (4, 0.3), (5, None), (6, 0.2)]:
        save(tmp_path, step, keep=2, reward=reward)
    assert steps(tmp_path) == [2, 5, 6]
    assert step_of(best(tmp_path)) == 2
    save(tmp_path, 7, keep=2, reward=0.9)
    assert steps(tmp_path) == [6, 7], "of equals the newest is the best"


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from([MANIFEST, "state.pt", "rank-0.pt", ".metadata", "__0_0.distcp"]),
    kind=st.sampled_from(["cut", "byte", "gone"]),
    place=st.floats(0, 1, exclude_max=True),
)
def test_damage_to_any_file_is_detected_and_the_checkpoint_before_is_used(tmp_path_factory, name, kind, place):
    tmp_path = tmp_path_factory.mktemp("checkpoints")
    save(tmp_path, 1)
    newest = save(tmp_path, 2, keep=5)
    file = newest / name
    whole = file.read_bytes()
    place = int(place * len(whole))
    if kind == "gone":
        file.unlink()
    elif kind == "cut":
        file.write_bytes(whole[:place])
    else:
        flipped = bytes([whole[place] ^ 255])
        file.write_bytes(whole[:place] + flipped + whole[place + 1 :])
    manifest_changed = name == MANIFEST and kind != "gone"
    if manifest_changed and damage(newest) is None:
        return  # white space, or what is not checked (reward): the files are as they were
    assert newest_step(tmp_path) == 1
    assert newest.with_suffix(".damaged").exists()
    assert steps(tmp_path) == [1]


def test_without_an_undamaged_checkpoint_newest_is_none(tmp_path, caplog):
    (save(tmp_path) / "state.pt").unlink()
    (tmp_path / "step-00000009.ckpt").write_bytes(b"of an earlier format")
    assert newest_checkpoint(tmp_path) is None
    assert "damaged (state.pt is missing); resuming from the beginning" in caplog.text
    assert "not a folder" in caplog.text


def failing_fsync(monkeypatch, *, call, code):
    """From now on, the given call of ``os.fsync`` fails with ``code``; the calls, as a list that grows."""
    real = os.fsync
    calls = []

    def fsync(descriptor):
        calls.append(descriptor)
        if len(calls) == call:
            raise OSError(code, os.strerror(code))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    return calls


@pytest.mark.parametrize(
    "code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO], ids=lambda code: errno.errorcode[code]
)
@pytest.mark.parametrize("call", range(1, FSYNCS + 1))
def test_an_error_at_any_write_leaves_what_was_complete(tmp_path, monkeypatch, call, code):
    """The n-th fsync of a save fails, as on full disks, quotas, read-only and dying disks: data, manifest or folder."""
    save(tmp_path, 1)
    failing_fsync(monkeypatch, call=call, code=code)
    with pytest.raises(SaveFailed, match=os.strerror(code)):
        save(tmp_path, 2)
    assert not list(tmp_path.glob("*.tmp"))
    monkeypatch.undo()
    assert damage(newest_checkpoint(tmp_path)) is None
    save(tmp_path, 3)
    assert newest_step(tmp_path) == 3


def test_a_save_makes_as_many_fsyncs_as_were_made_to_fail(tmp_path, monkeypatch):
    calls = failing_fsync(monkeypatch, call=FSYNCS + 1, code=errno.EIO)
    save(tmp_path, 2)
    assert len(calls) == FSYNCS
    monkeypatch.undo()
    assert damage(newest_checkpoint(tmp_path)) is None


def test_a_limit_on_file_size_is_an_error_not_a_loss(tmp_path):
    """The kernel itself refuses: RLIMIT_FSIZE, as a quota does."""
    save(tmp_path, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1500, before[1]))
    try:
        with pytest.raises(SaveFailed, match="File too large"):
            save(tmp_path, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert newest_step(tmp_path) == 1


def test_a_full_disk_keeps_the_last_whole_checkpoint(tmp_path):
    with disk_of("1m", tmp_path / "disk") as disk:
        save(disk, 1, keep=3)
        filler = disk / "filler"
        # 12 KiB are left: the first files of a checkpoint fit, the last ones do not.
        filler.write_bytes(b"x" * (os.statvfs(disk).f_bavail * 4096 - 12 * 1024))
        with pytest.raises(SaveFailed, match="No space left"):
            save(disk, 2, keep=3)
        assert newest_step(disk) == 1
        filler.unlink()
        save(disk, 3, keep=3)
        assert steps(disk) == [1, 3]


def test_a_read_only_disk_keeps_the_last_whole_checkpoint(tmp_path):
    """As the kernel makes a file system that it no longer trusts."""
    with disk_of("1m", tmp_path / "disk") as disk:
        save(disk, 1, keep=3)
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        with pytest.raises(SaveFailed, match="Read-only file system"):
            save(disk, 2, keep=3)
        assert newest_step(disk) == 1
        subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
        save(disk, 3, keep=3)
        assert steps(disk) == [1, 3]


def test_ctrl_c_in_a_save_is_not_a_failed_save(tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoints.FileSystemWriter, "write_data", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path)


class Evil:
    def __reduce__(self):
        return (os.system, ("touch evil",))


def test_an_index_that_would_run_code_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(pickle.UnpicklingError, match="system"):
        SafeReader(tmp_path).read_metadata()
    assert not (tmp_path / "evil").exists()
