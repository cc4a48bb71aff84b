"""The cache: built once, whole or not at all, checked on every read, safe for two at a time."""

import json
import os
import threading
import time

import pytest

from kl_comedy.errors import UserError
from kl_comedy.models.pocket import MANIFEST, cache_root, cached_folder, damage


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("KL_COMEDY_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


class Builder:
    """Writes two files and counts how often it was asked to."""

    def __init__(self, seconds=0.0):
        self.calls = 0
        self.seconds = seconds

    def __call__(self, folder):
        self.calls += 1
        (folder / "a.bin").write_bytes(b"weights" * 1000)
        time.sleep(self.seconds)
        (folder / "b.json").write_text("{}")


def only_entries(root):
    return sorted(path.name for path in (root / "kind").iterdir())


def test_the_root_is_the_variable_or_the_home_folder(root, monkeypatch):
    assert cache_root() == root
    for value in ("", None):
        monkeypatch.setenv("KL_COMEDY_CACHE", value) if value is not None else monkeypatch.delenv("KL_COMEDY_CACHE")
        monkeypatch.setenv("HOME", "/somewhere")
        assert str(cache_root()) == "/somewhere/.cache/kl_comedy"


def test_it_is_built_once(root, capsys):
    build = Builder()
    folders = {cached_folder("kind", "key", build) for _ in range(3)}
    assert folders == {root / "kind" / "key"} and build.calls == 1
    assert sorted(json.loads((root / "kind/key" / MANIFEST).read_text())["files"]) == ["a.bin", "b.json"]
    assert only_entries(root) == ["key", "key.lock"]
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda f: (f / "a.bin").write_bytes(b"weights" * 999 + b"weighty"), "a.bin has changed"),
        (lambda f: (f / "a.bin").write_bytes(b""), "a.bin has changed"),
        (lambda f: (f / "b.json").unlink(), "b.json is missing"),
        (lambda f: (f / MANIFEST).unlink(), f"{MANIFEST} is missing"),
        (lambda f: (f / MANIFEST).write_text('{"files": {"a.bin"'), f"{MANIFEST} cannot be read"),
        (lambda f: (f / MANIFEST).write_text("[]"), f"{MANIFEST} cannot be read"),
        (lambda f: (f / MANIFEST).write_text('{"files": {}}'), "names no files"),
        (lambda f: (f / MANIFEST).write_bytes(b"\xff\xfe"), f"{MANIFEST} cannot be read"),
    ],
)
def test_damage_is_said_and_mended(root, capsys, spoil, words):
    build = Builder()
    folder = cached_folder("kind", "key", build)
    spoil(folder)
    assert cached_folder("kind", "key", build) == folder
    assert build.calls == 2 and damage(folder) is None
    err = capsys.readouterr().err
    assert words in err and "building it again" in err and err.count("\n") == 1


def test_a_build_that_fails_leaves_nothing_and_the_next_one_works(root):
    def broken(folder):
        (folder / "half").write_text("x")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached_folder("kind", "key", broken)
    assert only_entries(root) == ["key.lock"]
    assert damage(cached_folder("kind", "key", Builder())) is None


def test_leftovers_of_a_killed_build_are_removed(root):
    (root / "kind" / "key.123.tmp").mkdir(parents=True)
    (root / "kind" / "other.123.tmp").mkdir()
    cached_folder("kind", "key", Builder())
    assert only_entries(root) == ["key", "key.lock", "other.123.tmp"]


def test_of_several_at_once_one_builds_and_the_others_wait(root, capsys):
    build = Builder(seconds=0.3)
    found = []
    threads = [threading.Thread(target=lambda: found.append(cached_folder("kind", "key", build))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert build.calls == 1 and found == [root / "kind" / "key"] * 4
    assert "another process is building kind key; waiting" in capsys.readouterr().err


def test_a_cache_that_cannot_be_written_is_the_users_to_mend(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("KL_COMEDY_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"KL_COMEDY_CACHE: cannot write the kind policy .* writable folder"):
        cached_folder("kind", "key", Builder())


def test_a_sound_copy_is_read_from_a_cache_that_cannot_be_written(root, monkeypatch):
    cached_folder("kind", "key", Builder())
    monkeypatch.setattr(os, "open", lambda *args, **kwargs: pytest.fail("a lock was asked for"))
    assert damage(cached_folder("kind", "key", Builder())) is None
