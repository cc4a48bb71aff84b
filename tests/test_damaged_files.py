"""Damage to any file of a run or a sweep: whoever reads it sees the same bits as before, or says so in one line."""

import hashlib
import io
import json
import logging
import os
import pickle
import random
import shutil
import socket
import struct
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from mlflow.exceptions import MlflowException
from rich.console import Console
from safetensors.torch import load_file
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from commands import resumed_at
from kl_comedy.cli import results
from kl_comedy.cli.evaluation_runs import resolve_target
from kl_comedy.config import load_config
from kl_comedy.errors import RunFailed, UserError
from kl_comedy.io import CHECKSUMS, decode_json, encode_json, find_damage, read_json, sha256_file, write_json
from kl_comedy.models import load_model, weights_hash
from kl_comedy.rollouts.recording import ReplayOptions, ReplayRollouts
from kl_comedy.slurm.grid import read_grid
from kl_comedy.slurm.manifest import Submission, plan, read_sweep, write_sweep
from kl_comedy.slurm.status import cell_metrics, read_status
from kl_comedy.tracking import logger as logger_module
from kl_comedy.tracking import runs as run_tables
from kl_comedy.tracking import spool as spool_module
from kl_comedy.tracking import store, upload, verify
from kl_comedy.tracking.provenance import process_tags
from kl_comedy.tracking.spool import Spool
from kl_comedy.training.checkpoint import (
    INDEX,
    MANIFEST,
    STATE,
    SafeReader,
    damage,
    load_tensors,
    newest_checkpoint,
    read_checkpoint,
)
from kl_comedy.training.distributed import SINGLE_PROCESS
from kl_comedy.training.export import export_policy
from kl_comedy.training.problems import load_problem_sets, render_prompts
from kl_comedy.training.run import train
from kl_comedy.training.run_folder import RunDir, find_run, readable_summary, repair_config, saved, step_of
from saved_models import write_gguf

SETTINGS = {
    "model": {"source": "pocket", "options": {"preset": "tiny"}},
    "data": {
        "train": {"dataset": "pocket", "split": "train", "limit": 64, "options": {"digits": 1}},
        "eval": {"heldout": {"dataset": "pocket", "split": "heldout", "limit": 4, "options": {"digits": 1}}},
    },
    "rollout": {"prompts_per_batch": 2, "group_size": 2, "max_new_tokens": 8},
    "rewards": [{"name": "exact_answer"}],
    "kl": [{"estimator": "k1", "placement": "reward", "beta": 0.05}],
    "train": {"steps": 2, "checkpoint_every": 1, "keep_checkpoints": 2, "record_rollouts": "jsonl", "eval_every": 1},
}


class FakeStore:
    """An MLflow client that keeps what it is sent."""

    def __init__(self):
        self.sent, self.runs = [], {}

    def get_run(self, run_id):
        if run_id not in self.runs:
            raise MlflowException("no such run", error_code=2)  # RESOURCE_DOES_NOT_EXIST
        return self.runs[run_id]

    def get_experiment_by_name(self, name):
        return SimpleNamespace(experiment_id=name, lifecycle_stage="active")

    def search_runs(self, *args, **options):
        return []

    def create_run(self, experiment_id, *, start_time, tags, run_name):
        run_id = f"run{len(self.runs)}"
        self.sent.append((experiment_id, start_time, sorted(tags.items()), run_name))
        self.runs[run_id] = SimpleNamespace(
            info=SimpleNamespace(run_id=run_id, lifecycle_stage="active"), data=SimpleNamespace(tags={})
        )
        return self.runs[run_id]

    def log_batch(self, run_id, **kinds):
        self.sent += [repr(vars(item)) for items in kinds.values() for item in items]

    def log_artifact(self, run_id, file, folder):
        with open(file, "rb") as content:
            self.sent.append((file, folder, hashlib.sha256(content.read()).hexdigest()))

    def delete_run(self, run_id):
        self.runs.pop(run_id, None)

    def update_run(self, run_id, status):
        self.sent.append((run_id, status))

    def set_terminated(self, run_id, status, end_time):
        self.sent.append((run_id, status, end_time))


class Case:
    """A sweep of one finished run, to damage and to read; :meth:`restore` makes it whole again."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "base.yaml").write_text(json.dumps(SETTINGS))
        (folder / "grid.yaml").write_text(f"base: {folder}/base.yaml\ngrid: {{optimizer.lr: [0.001]}}\n")
        manifest = plan(read_grid(folder / "grid.yaml"), directory=folder)
        self.sweep = write_sweep(folder / "sweep", manifest, json.dumps(SETTINGS))
        cell = self.sweep.cell(0)
        overrides = [f"tracking.uri=sqlite:///{folder}/store.db", "tracking.experiment=e"]
        self.config = load_config(self.sweep.base, [*self.sweep.overrides(cell), *overrides])
        self.store = FakeStore()
        process = process_tags()
        self.sweep.record_submission(Submission(stage="train", indices=(0,), time=1.0, process=process, workers=1))
        self.sweep.record_start(0, "train", process)
        with self.patched():
            self.run = train(self.config, console=Console(file=io.StringIO()), command="kl-comedy train x.yaml").run
        self.sweep.record_end(0, process["process.pid"], 0, None)
        self.runs_in_store = dict(self.store.runs)
        self.policy = load_config(None, [f"model.source={self.run.policy}"]).model
        self.loaded = load_model(self.config.model)
        self.prompts = render_prompts(self.config, load_problem_sets(self.config), self.loaded).train
        files = [
            path for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock" and path.name != ".lock"
        ]
        self.whole = {path: path.read_bytes() for path in files}
        self.times, self.read = {}, {}
        self.files = [path for path in sorted(files) if path.is_relative_to(self.sweep.path) and path.stat().st_size]

    @contextmanager
    def patched(self):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(store, "connect", lambda uri: self.store)
            patch.setattr(os, "fsync", lambda descriptor: None)
            patch.setattr(upload, "mark_dead_runs", lambda *args: None)
            yield patch

    def restore(self):
        for path in self.folder.rglob("*"):
            if path.is_file() and path not in self.whole:
                path.unlink()
        for path, content in self.whole.items():
            if not path.is_file() or path.stat().st_mtime_ns != self.times.get(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
                self.times[path] = path.stat().st_mtime_ns
        for path in self.folder.rglob("*.damaged"):
            shutil.rmtree(path)
        self.store = FakeStore()
        self.store.runs = dict(self.runs_in_store)

    # what reads

    def resume(self, lines):
        run = find_run(self.config)
        summary = readable_summary(run)
        repair_config(run, self.config)
        checkpoint = newest_checkpoint(run.checkpoints)
        step = None if checkpoint is None else step_of(checkpoint)
        resumed = logger_module.ResumedFrom(step=step)
        logger = logger_module.RunLogger(self.config.tracking, run_dir=run.path, params={}, tags={}, resumed=resumed)
        logger.save()
        events = [event[:4] for event in Spool(run.path).read() if event.kind in ("metrics", "table")]
        config = (run.path / "config.yaml").read_text().partition("\n")[2]
        return summary, config, step, checkpoint and self.contents(checkpoint), events

    def contents(self, checkpoint):
        """Every tensor and the state of a checkpoint, as a digest; those of the same bytes are read once."""
        key = tuple(hashlib.sha256(path.read_bytes()).digest() for path in sorted(checkpoint.iterdir()))
        if key in self.read:
            return self.read[key]
        reader = SafeReader(checkpoint)
        index = reader.read_metadata().state_dict_metadata
        tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in index.items()}
        load_tensors(tensors, reader)
        self.read[key] = weights_hash(tensors), str(torch.load(checkpoint / STATE, weights_only=True))
        return self.read[key]

    def sync(self, lines):
        self.patch.setattr(results, "message", lambda text: "events uploaded" in text or lines.append(text))
        for uri in (None, f"sqlite:///{self.folder}/other.db"):
            with one_line(lines):
                results.sync([self.run.path], uri, None)
        return self.store.sent

    def status(self, lines):
        status = read_status(read_sweep(self.sweep.path))
        lines += status.notes
        return status.rows, [cell_metrics(self.sweep, row) for row in status.rows]

    def replay(self, lines):
        options = ReplayOptions(path=str(self.run.path / "rollouts"))
        backend = ReplayRollouts(self.config.rollout, options, loaded=self.loaded)
        backend.bind(self.prompts, weights={"exact_answer": 1.0}, updates=2, per_batch=1)
        return [backend.batch(number) for number in range(2)]

    def evaluate(self, lines):
        loaded = load_model(self.policy)
        ids = loaded.tokenizer("12+34=46")["input_ids"]
        return weights_hash(loaded.model), ids, loaded.model.generation_config.to_dict()

    def target(self, lines):
        with resolve_target(str(self.run.path), []) as target:
            return target

    def export(self, lines):
        out, exported = self.folder / "out", []
        for which in ("newest", "best"):
            with one_line(lines):
                export_policy(self.run, self.config, out, which=which)
                exported.append({path.name: sha256_file(path) for path in out.iterdir()})
            shutil.rmtree(out, ignore_errors=True)
        return exported

    def readers(self, path, number):
        name = str(path.relative_to(self.sweep.path if self.run.path not in path.parents else self.run.path))
        first = name.split("/")[0]
        if first == "checkpoints":
            return [self.resume, self.export] if number % 10 == 0 else [self.resume]
        by_name = {
            "config.yaml": [self.resume, self.target],
            "policy": [self.evaluate],
            "rollouts": [self.replay],
            "spool.jsonl": [self.resume, self.sync, self.status],
            "summary.json": [self.resume, self.status],
            "tracking.json": [self.resume, self.sync],
        }
        return by_name.get(first, [self.sync] if self.run.path in path.parents else [self.status])


@contextmanager
def one_line(lines):
    try:
        yield
    except (UserError, RunFailed) as error:
        lines.append(str(error))


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    return Case(tmp_path_factory.mktemp("damaged"))


class Lines(logging.Handler):
    """The warnings of the package."""

    def __init__(self, lines):
        super().__init__(logging.WARNING)
        self.lines = lines

    def emit(self, record):
        self.lines.append(record.getMessage())


def outcome(reader):
    """What a reader returns, as text, and the lines it wrote."""
    lines, result = [], None
    handler, log = Lines(lines), logging.getLogger("kl_comedy")
    log.addHandler(handler)
    try:
        with one_line(lines):
            result = reader(lines)
    finally:
        log.removeHandler(handler)
    return repr(result), lines


def spoil(content, random):
    """``content`` with bytes flipped, cut out, cut off, replaced, inserted, zeroed, or none of it left."""
    size = len(content)
    at = random.randrange(size)
    end = min(size, at + random.choice([1, 2, 8, 64, 512, size]))
    kind = random.choice(["flip"] * 3 + ["replace", "replace", "cut", "cut", "end", "insert", "zero", "other"])
    if kind == "flip":
        return content[:at] + bytes([content[at] ^ (1 << random.randrange(8))]) + content[at + 1 :]
    if kind == "replace":
        return content[:at] + random.randbytes(end - at) + content[end:]
    if kind == "other":
        return random.choice([b"", b"[]", b"5", b"{}", b"null", b"\xff\xfe\x00", b"[" * 10**5, b'{"a": 1}\n'])
    middle = {"cut": b"", "end": b"", "insert": random.randbytes(3) + content[at:end], "zero": bytes(end - at)}[kind]
    return content[:at] + middle + (b"" if kind == "end" else content[end:])


@pytest.mark.parametrize("cases", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_readers_of_damaged_files_see_the_same_bits_or_say_so_in_one_line(case, cases):
    whole, counts = {}, {}
    with case.patched() as case.patch:
        for number in range(cases):
            path = case.files[number % len(case.files)]
            case.restore()
            for reader in case.readers(path, number // len(case.files)):
                if reader.__name__ not in whole:
                    case.restore()
                    whole[reader.__name__], lines = outcome(reader)
                    assert lines == [] and whole[reader.__name__] != "None", (reader.__name__, lines)
                case.restore()
                damaged = spoil(case.whole[path], random.Random(f"{cases}/{number}"))
                path.write_bytes(damaged)
                where = f"case {number}: {reader.__name__} of {path}"
                try:
                    result, lines = outcome(reader)
                except Exception as error:
                    raise AssertionError(where) from error
                complete = damaged[: damaged.rfind(b"\n") + 1]  # a killed process leaves an incomplete last line
                torn = path.suffix == ".jsonl" and case.whole[path].startswith(complete)
                assert result == whole[reader.__name__] or lines or torn, f"{where}: silently different"
                assert not [line for line in lines if "\n" in line.strip() or len(line) > 1000], (where, lines)
                kind = "same" if result == whole[reader.__name__] else "told"
                counts[reader.__name__, kind] = counts.get((reader.__name__, kind), 0) + 1
    case.restore()
    print(counts)
    assert len({name for name, _ in counts}) == 7 and len(case.files) > 25


def test_a_run_resumes_over_damaged_files_to_the_same_bits(case, caplog):
    case.restore()
    before = weights_hash(load_file(case.run.policy / "model.safetensors"))
    newest = saved(case.run.checkpoints)[-1]
    for path in (newest / "state.pt", case.run.path / "summary.json", case.run.path / "config.yaml"):
        path.write_bytes(path.read_bytes()[:-9])
    with case.patched():
        outcome = train(case.config, console=Console(file=io.StringIO()), command="kl-comedy train x.yaml")
    assert outcome.run.path == case.run.path and not outcome.already_finished
    assert resumed_at(case.run.path)[-1] == 1
    assert outcome.run.summary()["status"] == "FINISHED"
    assert weights_hash(load_file(case.run.policy / "model.safetensors")) == before
    for text in ("summary.json.damaged", "config.yaml.damaged", "state.pt has", "resuming from the one before"):
        assert caplog.text.count(text) == 1, caplog.text
    assert load_config(case.run.path / "config.yaml") == case.config
    case.restore()


@pytest.mark.parametrize("byte", [b"\x80", b"\x00"])
def test_a_config_whose_checksum_line_is_no_text_is_written_again(case, byte):
    case.restore()
    file = case.run.path / "config.yaml"
    file.write_bytes(case.whole[file].replace(b"(remove", byte + b"remove"))
    repair_config(case.run, case.config)
    assert file.read_bytes() == case.whole[file]
    case.restore()


# --- files that were made to harm ------------------------------------------------------------------------------------


class Harm:
    """Its pickle creates a file when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def forged(case, change):
    """The newest checkpoint after ``change``, with a manifest that fits it."""
    checkpoint = saved(case.run.checkpoints)[-1]
    change(checkpoint)
    content = decode_json((checkpoint / MANIFEST).read_bytes())
    for name, entry in content["files"].items():
        file = checkpoint / name
        entry |= {"bytes": file.stat().st_size, "sha256": sha256_file(file)}
    write_json(checkpoint / MANIFEST, content)
    assert damage(checkpoint) is None
    return checkpoint


def change_index(checkpoint, change):
    with open(checkpoint / INDEX, "rb") as file:
        metadata = pickle.load(file)
    change(metadata)
    (checkpoint / INDEX).write_bytes(pickle.dumps(metadata))


def bytes_instead_of_a_tensor(checkpoint, canary):
    """What torch's reader would unpickle with everything allowed."""
    torch.save(Harm(canary), checkpoint / "__0_1.distcp")
    size = (checkpoint / "__0_1.distcp").stat().st_size

    def change(metadata):
        name = next(name for name in metadata.state_dict_metadata if name.startswith("model."))
        metadata.state_dict_metadata[name] = BytesStorageMetadata()
        info = next(iter(metadata.storage_data.values()))
        metadata.storage_data[MetadataIndex(name)] = type(info)("__0_1.distcp", 0, size)

    change_index(checkpoint, change)


def set_storage(**values):
    def change(metadata):
        for info in metadata.storage_data.values():
            for name, value in values.items():
                setattr(info, name, value)

    return lambda checkpoint, canary: change_index(checkpoint, change)


HOSTILE = {
    "a pickle as state": lambda checkpoint, canary: torch.save(Harm(canary), checkpoint / STATE),
    "no archive as state": lambda checkpoint, canary: (checkpoint / STATE).write_bytes(b"nothing"),
    "a pickle as index": lambda checkpoint, canary: (checkpoint / INDEX).write_bytes(pickle.dumps(Harm(canary))),
    "text as index": lambda checkpoint, canary: (checkpoint / INDEX).write_bytes(pickle.dumps("text")),
    "a pickle as shard": lambda checkpoint, canary: torch.save(Harm(canary), checkpoint / "__0_0.distcp"),
    "a cut shard": lambda checkpoint, canary: (checkpoint / "__0_0.distcp").write_bytes(b"\x80\x02cos\nsystem\n"),
    "bytes instead of a tensor": bytes_instead_of_a_tensor,
    "a wrong offset": set_storage(offset=10**9),
    "a wrong length": set_storage(length=3),
    "a path outside": set_storage(relative_path="../../../../../etc/passwd"),
    "an absolute path": set_storage(relative_path="/etc/passwd"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_forged_checkpoint_ends_in_one_line_and_runs_nothing(case, tmp_path, kind):
    case.restore()
    canary = tmp_path / "canary"
    checkpoint = forged(case, lambda folder: HOSTILE[kind](folder, canary))
    model = torch.nn.Module()
    model.policy, model.references = case.loaded.model, {}
    for read in (
        lambda: read_checkpoint(checkpoint, model, [], SINGLE_PROCESS),
        lambda: export_policy(case.run, case.config, tmp_path / "out", which="newest"),
    ):
        if kind.endswith("state") and read.__code__.co_names[0] == "export_policy":
            continue  # exports read no state
        with pytest.raises(RunFailed, match=r"step-00000002.ckpt cannot be read \(") as raised:
            read()
        assert "\n" not in str(raised.value) and not canary.exists() and not (tmp_path / "out").exists()
    case.restore()


def test_stray_names_are_no_checkpoints(case, caplog):
    case.restore()
    newest = saved(case.run.checkpoints)[-1]
    shutil.copytree(newest, newest.with_name("step-zz.ckpt"))
    newest.with_name("step-00000007.ckpt").mkdir()
    shutil.copytree(newest, newest.with_name("step-00000009.ckpt"))
    shutil.copytree(case.run.path, case.run.path.with_name(f"{case.run.path.name}x"))
    assert newest_checkpoint(find_run(case.config).checkpoints) == newest
    text = caplog.text
    assert "step-zz.ckpt is not a checkpoint name" in text and "its manifest.json is of update 2" in text
    for path in case.run.path.parent.glob("*x"):
        shutil.rmtree(path)
    for path in case.run.checkpoints.glob("step-*[z79].ckpt"):
        shutil.rmtree(path)
    case.restore()


def test_a_spool_names_no_file_outside_its_folder(tmp_path):
    run, secret = tmp_path / "run", tmp_path / "secret.txt"
    run.mkdir()
    secret.write_text("of mine")
    (run / "link.json").symlink_to(secret)
    (run / "inside.json").write_text("[]")
    rows = [("table", "../secret.txt"), ("artifact", str(secret)), ("table", "link.json"), ("table", "inside.json")]
    data = [{"name": "t", "path": path, "folder": "../../tables"} for _, path in rows]
    lines = [{"kind": kind, "time": 1, "step": 5, "data": each} for (kind, _), each in zip(rows, data, strict=True)]
    lines += [{"kind": "table", "time": 1, "step": 5, "data": {"path": 7}}, {"kind": "status", "step": 1, "data": {}}]
    (run / "spool.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    client = FakeStore()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "connect", lambda uri: client)
        patch.setattr(upload, "mark_dead_runs", lambda *args: None)
        result = upload.sync(run, f"sqlite:///{tmp_path}/store.db")
    assert sum("lies outside the folder of the run" in text for text in result.left_out) == 3
    assert [(sent[0], sent[1]) for sent in client.sent if len(sent) == 3] == [(str(run / "inside.json"), "tables")]
    assert spool_module.unreadable_lines(Spool(run).read()) == 2
    Spool(run).truncate_after(1)
    assert secret.read_text() == "of mine" and not (run / "inside.json").exists()


def commands(case, run):
    """What reads or writes the folder of a run, by the command."""
    config = replace(case.config, output=str(run.path.parent))
    words = {"console": Console(file=io.StringIO()), "command": "kl-comedy train x.yaml"}
    return {
        "train resume=auto": lambda: train(config, **words),
        "results sync": lambda: results.sync([run.path], f"sqlite:///{case.folder}/other.db", None),
        "evaluate": lambda: resolve_target(str(run.path), []).__enter__(),
        "evaluate of a checkpoint": lambda: resolve_target(str(saved(run.checkpoints)[-1]), []).__enter__(),
        "export": lambda: export_policy(run, run.config_reader()([]), case.folder / "out", which="newest"),
    }


@pytest.fixture
def copied_run(case, tmp_path):
    """The finished run, copied from elsewhere: unfinished, so that ``train`` has something to do."""
    case.restore()
    folder = tmp_path / "runs" / case.run.path.name
    shutil.copytree(case.run.path, folder)
    (folder / "summary.json").unlink()
    return RunDir(path=folder)


SECRET = "of mine"
IN_RUN_FOLDER = (
    *("config.yaml", "summary.json", "spool.jsonl", "tracking.json", ".lock", "tracking.lock", "plugins", "files"),
    *("checkpoints", "checkpoints/step-00000002.ckpt", "checkpoints/step-00000002.ckpt/state.pt", "policy", "adapter"),
    *("policy/model.safetensors", "tables", "tables/samples", "provenance", "provenance/packages.txt", "rollouts"),
    *("rollouts/batch-00000000.jsonl", "sampler", "csv", "wandb"),
)
"""Files and folders that a run has, or may have."""


def remove(path):
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@pytest.mark.parametrize("name", IN_RUN_FOLDER)
def test_a_link_in_a_run_folder_is_followed_by_no_command(case, copied_run, tmp_path, name):
    outside, place = tmp_path / "outside", copied_run.path / name
    outside.mkdir()
    (outside / "secret.txt").write_text(SECRET)
    if place.exists():
        shutil.move(place, outside / place.name)  # what the link leads to can be read, which makes it no better
    target = outside / place.name if (outside / place.name).exists() else outside / "secret.txt"
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(target)
    before = tree(outside)
    refused = []
    with case.patched():
        for command, call in commands(case, copied_run).items():
            try:
                call()
            except (UserError, RunFailed) as error:
                assert "\n" not in str(error) and len(str(error)) < 1000 and SECRET not in str(error)
                refused.append(command)
            assert tree(outside) == before, f"{command} wrote through the link"
        assert set(refused) >= commands(case, copied_run).keys() - {"results sync"}, "each of them says so"
        names = [str(sent[0]) for sent in case.store.sent if len(sent) == 3]
    assert not [each for each in names if Path(each).resolve().is_relative_to(outside)], "sync uploaded it"
    case.restore()


def tree(folder):
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): path.read_bytes() for path in files}, {str(path) for path in folder.rglob("*")}


@pytest.mark.parametrize("kind", ["pipe", "folder", "socket"])
def test_what_is_no_file_in_a_files_place_is_one_line_and_no_wait(case, copied_run, monkeypatch, kind):
    names = [name for name in IN_RUN_FOLDER if "." in name.strip(".") or name == ".lock"]
    for name in [name for name in names if not name.endswith(".ckpt")]:
        place = copied_run.path / name
        content = place.read_bytes() if place.is_file() else None
        remove(place)
        if kind == "pipe":
            os.mkfifo(place)
        elif kind == "folder":
            place.mkdir()
        else:
            with socket.socket(socket.AF_UNIX) as server:
                monkeypatch.chdir(place.parent)  # a socket's path has at most 107 bytes
                server.bind(place.name)
        with case.patched():
            for call in commands(case, copied_run).values():
                try:
                    call()
                except (UserError, RunFailed) as error:
                    assert "\n" not in str(error) and len(str(error)) < 1000
        if place.is_socket() or place.is_fifo() or place.is_dir():
            remove(place)
        if content is not None:
            place.write_bytes(content)
    case.restore()


def test_a_run_folder_that_is_a_link_and_links_within_it_are_fine(case, copied_run, tmp_path):
    disk = tmp_path / "disk"
    shutil.move(copied_run.path.parent, disk)
    copied_run.path.parent.symlink_to(disk)  # runs -> /disk
    (copied_run.checkpoints / "latest").symlink_to(saved(copied_run.checkpoints)[-1].name)
    newest = saved(copied_run.checkpoints)[-1] / "state.pt"
    newest.rename(copied_run.path / "state.pt")
    newest.symlink_to(Path("../../state.pt"))
    with case.patched():
        train(
            replace(case.config, output=str(copied_run.path.parent)),
            console=Console(file=io.StringIO()),
            command="kl-comedy train x.yaml",
        )
        results.sync([copied_run.path], f"sqlite:///{case.folder}/other.db", None)
    assert copied_run.summary()["status"] == "FINISHED" and saved(copied_run.checkpoints)[-1].is_dir()
    assert any(str(sent[0]).endswith(".json") for sent in case.store.sent if len(sent) == 3), "its files are uploaded"
    case.restore()


def test_a_sync_uploads_no_link_and_no_name_that_no_file_can_have(tmp_path):
    run = tmp_path / "run"
    (run / "folder").mkdir(parents=True)
    (run / "inside.json").write_text("[]")
    (run / "link.json").symlink_to("inside.json")
    (run / "folder" / "hidden.txt").symlink_to("/etc/hostname")
    (run / "linked").symlink_to("folder")
    os.mkfifo(run / "pipe")
    (tmp_path / "other").mkdir()
    spool = Spool(run)
    long = "x" * 5000
    for path in ("link.json", "folder", "linked", "linked/hidden.txt", "pipe", long, f"{long}/a", "inside.json"):
        spool.append("artifact", {"path": path, "folder": "files"})
    spool.append("artifact", {"path": "inside.json", "folder": long})
    client = FakeStore()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "connect", lambda uri: client)
        patch.setattr(upload, "mark_dead_runs", lambda *args: None)
        result = upload.sync(run, f"sqlite:///{tmp_path}/store.db")
    assert len(result.left_out) == 8 and all(len(line) < 6000 for line in result.left_out)
    assert [(sent[0], sent[1]) for sent in client.sent if len(sent) == 3] == [(str(run / "inside.json"), "files")]


@pytest.mark.parametrize("name", ["x" * 5000, "../step-00000001.ckpt/state.pt", "/etc/hostname", "a\0b", "", ".."])
def test_a_manifest_that_names_what_is_no_file_of_it_is_one_line(case, name):
    case.restore()
    checkpoint = saved(case.run.checkpoints)[-1]
    content = decode_json((checkpoint / MANIFEST).read_bytes())
    write_json(checkpoint / MANIFEST, {**content, "files": {**content["files"], name: {"bytes": 1, "sha256": "0"}}})
    fault = damage(checkpoint)
    assert fault is not None and "\n" not in fault and len(fault) < 300
    write_json(checkpoint / CHECKSUMS, {"files": {name: "0"}})
    fault = find_damage(checkpoint)
    assert fault is not None and "\n" not in fault and len(fault) < 300
    case.restore()


def test_an_index_that_names_a_file_of_thousands_of_characters_is_one_short_line(case, tmp_path):
    case.restore()
    checkpoint = forged(case, lambda folder: set_storage(relative_path="x" * 5000)(folder, None))
    with pytest.raises(RunFailed, match="cannot be read") as raised:
        export_policy(case.run, case.config, tmp_path / "out", which="newest")
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 1000 and checkpoint.is_dir()
    case.restore()


def test_a_draft_that_somebody_else_put_there_is_not_written_through(tmp_path):
    (tmp_path / "outside").write_text(SECRET)
    (tmp_path / f".x.json.{os.getpid()}").symlink_to(tmp_path / "outside")
    write_json(tmp_path / "x.json", {"a": 1})
    assert (tmp_path / "outside").read_text() == SECRET and read_json(tmp_path / "x.json", "file") == {"a": 1}


def test_lines_that_cannot_be_read_are_counted(tmp_path):
    spool = Spool(tmp_path)
    for step in range(6):
        spool.append("metrics", {"x": 1.0}, step=step)
    spool.close()
    lines = spool.path.read_bytes().splitlines(keepends=True)
    spool.path.write_bytes(b"".join([*lines[:2], lines[2][:20] + b"?" + lines[2][21:], b"garbage\n", *lines[4:]]))
    assert spool_module.unreadable_lines(spool.read()) == 2 and not spool.ended()
    spool.truncate_after(4)
    spool.append("status", {"status": "FINISHED", "reason": None})
    assert spool_module.unreadable_lines(Spool(tmp_path).read()) == 2 and spool.ended()


# --- JSON ------------------------------------------------------------------------------------------------------------


def test_json_with_a_checksum(tmp_path):
    for content in ({"a": 1}, {"a": {"b": [1.5, None, "}"]}}, {"a": ""}):
        for indent in (None, 1):
            written = encode_json(content, indent)
            assert decode_json(written) == content and json.loads(written).keys() == {"a", "crc32"}
            for at, byte in enumerate(written):
                changed = written[:at] + bytes([byte ^ 1]) + written[at + 1 :]
                with suppress(ValueError):
                    assert {key: value for key, value in decode_json(changed).items() if key == "a"} == content
    for text in ("[]", "5", "null", "{", "", "[" * 10**5, '{"a": ' * 10**5, '{"crc32": "00000000"}', "\0"):
        (tmp_path / "x.json").write_text(text)
        with pytest.raises(UserError, match=r"x.json is not a readable summary \(") as raised:
            read_json(tmp_path / "x.json", "summary")
        assert "\n" not in str(raised.value)
    (tmp_path / "x.json").write_text('{"a": "text"}')
    with pytest.raises(UserError, match="it has no int 'a'"):
        read_json(tmp_path / "x.json", "summary", {"a": int})
    with pytest.raises(UserError, match="No such file"):
        read_json(tmp_path / "y.json", "summary")


@pytest.mark.parametrize("text", ["[]", "5", "null", "{", "", '{"version": 1}', '{"version": 1, "cells": 5}', "\xff"])
def test_a_manifest_that_is_none_is_one_line(case, text):
    case.restore()
    (case.sweep.path / "manifest.json").write_text(text)
    with pytest.raises(UserError, match=r"manifest\.json") as raised:
        read_sweep(case.sweep.path)
    assert "\n" not in str(raised.value)
    checkpoint = saved(case.run.checkpoints)[-1]
    (checkpoint / MANIFEST).write_text(text)
    assert "\n" not in damage(checkpoint)
    (case.run.path / "summary.json").write_text(text)
    assert readable_summary(case.run) is None and not (case.run.path / "summary.json").exists()
    case.restore()


# --- models and tables -----------------------------------------------------------------------------------------------


def lying_header(change):
    """A safetensors file whose header says something else."""

    def lie(content):
        size = struct.unpack("<Q", content[:8])[0]
        header = json.loads(content[8 : 8 + size])
        name = next(name for name in header if name != "__metadata__")
        change(header, name)
        text = json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + content[8 + size :]

    return lie


LIES = {
    "a size beyond the file": lambda content: struct.pack("<Q", 2**62) + content[8:],
    "an offset beyond the file": lying_header(lambda header, name: header[name].update(data_offsets=[0, 2**60])),
    "an offset before another": lying_header(lambda header, name: header[name].update(data_offsets=[8, 4])),
    "another shape": lying_header(lambda header, name: header[name].update(shape=[1])),
    "another type": lying_header(lambda header, name: header[name].update(dtype="F9")),
    "another name": lying_header(lambda header, name: header.update(other=header.pop(name))),
    "no header": lambda content: content[:4],
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_safetensors_header_is_one_line(case, tmp_path, lie):
    source = tmp_path / "policy"
    shutil.copytree(case.run.policy, source)
    file = source / "model.safetensors"
    file.write_bytes(LIES[lie](file.read_bytes()))
    with pytest.raises(UserError, match=r"is damaged \(model.safetensors has changed"):
        load_model(load_config(None, [f"model.source={source}"]).model)
    (source / CHECKSUMS).unlink()
    with pytest.raises(UserError, match=r"model\.source") as raised:
        load_model(load_config(None, [f"model.source={source}"]).model)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("cases", [10, pytest.param(100, marks=pytest.mark.slow)])
def test_a_damaged_folder_of_a_model_loads_or_is_one_line(case, tmp_path, cases):
    source = tmp_path / "policy"
    shutil.copytree(case.run.policy, source)
    (source / CHECKSUMS).unlink()
    files = sorted(path for path in source.iterdir() if path.name != "README.md")
    for number in range(cases):
        path, chance = files[number % len(files)], random.Random(f"model {number}")
        whole = path.read_bytes()
        part = whole[:2000]  # of weights the header: another number is another model, and nobody could know
        path.write_bytes(spoil(part, chance) + whole[2000:])
        with one_line([]):
            load_model(load_config(None, [f"model.source={source}"]).model)
        path.write_bytes(whole)


def test_a_damaged_gguf_file_loads_or_is_one_line(tmp_path):
    write_gguf(tmp_path / "tiny.gguf", "smollm")
    whole = (tmp_path / "tiny.gguf").read_bytes()
    config = load_config(None, [f"model.source={tmp_path}", "model.gguf_file=tiny.gguf"]).model
    load_model(config)
    failures = []
    for number in range(12):
        part = spoil(whole[:1500], random.Random(f"gguf {number}"))
        (tmp_path / "tiny.gguf").write_bytes(part + whole[1500:])
        with one_line(failures):
            load_model(config)
    assert len(failures) > 5 and not any("\n" in line for line in failures), failures


@pytest.mark.parametrize("suffix", ["csv", "json", "parquet"])
def test_a_damaged_export_is_a_table_or_one_line(tmp_path, suffix):
    import pandas as pd

    rows = [{"run_id": f"r{n}", "status": "FINISHED", "metrics.x": n / 3, "params.a": "b"} for n in range(20)]
    frame, file = pd.DataFrame(rows), tmp_path / f"runs.{suffix}"
    results.write_table(results.ResultTable(frame=frame), suffix, file)
    whole = file.read_bytes()
    for number in range(60):
        file.write_bytes(spoil(whole, random.Random(f"{suffix} {number}")))
        for read in (lambda: run_tables.read_table(file), lambda: verify.verify("none", frame, file)):
            lines = []
            with one_line(lines):
                read()
            assert not any("\n" in line for line in lines)
        with one_line([]):
            run_tables.read_runs(file) if suffix != "json" else None
