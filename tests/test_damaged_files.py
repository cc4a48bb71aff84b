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
from contextlib import contextmanager
from dataclasses import dataclass, replace
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
from kl_comedy.config.validate import Field, is_count, read_fields
from kl_comedy.errors import RunFailed, UserError
from kl_comedy.io import CHECKSUMS, decode_json, find_damage, read_json, sha256_file, write_json
from kl_comedy.models import load_model, weights_hash
from kl_comedy.results import runs as run_tables
from kl_comedy.results import verify
from kl_comedy.rollouts.recording import ReplayOptions, ReplayRollouts
from kl_comedy.slurm.grid import read_grid
from kl_comedy.slurm.manifest import Submission, plan, read_sweep, write_sweep
from kl_comedy.slurm.status import cell_metrics, read_status
from kl_comedy.tracking import logger as logger_module
from kl_comedy.tracking import spool as spool_module
from kl_comedy.tracking import store, upload
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
from kl_comedy.training.open_run import open_run
from kl_comedy.training.problems import load_problem_sets, render_prompts
from kl_comedy.training.run import train
from kl_comedy.training.run_folder import RunDir, readable_summary, saved, step_of
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
        self.sent = []
        self.runs = {}

    def files_sent(self):
        """The path, folder and digest of each file that was uploaded."""
        return [entry for entry in self.sent if isinstance(entry, SentFile)]

    def get_run(self, run_id):
        if run_id not in self.runs:
            raise MlflowException("no such run", error_code=2)  # RESOURCE_DOES_NOT_EXIST
        return self.runs[run_id]

    def get_experiment_by_name(self, name):
        return SimpleNamespace(experiment_id=name, lifecycle_stage="active", tags={"mlflow.experimentKind": ""})

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
        for items in kinds.values():
            self.sent += [repr(vars(item)) for item in items]

    def log_inputs(self, run_id, inputs):
        self.sent += [repr(item.to_dictionary()) for item in inputs]

    def log_artifact(self, run_id, file, folder):
        self.sent.append(SentFile(file, folder, sha256_file(Path(file))))

    def delete_run(self, run_id):
        self.runs.pop(run_id, None)

    def update_run(self, run_id, status):
        self.sent.append((run_id, status))

    def set_terminated(self, run_id, status, end_time):
        self.sent.append((run_id, status, end_time))


@dataclass(frozen=True)
class SentFile:
    """A file that was uploaded to the store."""

    path: str
    folder: str
    digest: str


def is_lock(path):
    return path.suffix == ".lock" or path.name == ".lock"


class Case:
    """A sweep of one finished run, to damage and to read; :meth:`restore` makes it whole again."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "base.yaml").write_text(json.dumps(SETTINGS))
        (folder / "grid.yaml").write_text(f"base: {folder}/base.yaml\ngrid: {{optimizer.lr: [0.001]}}\n")
        self.sweep = write_sweep(folder / "sweep", plan(read_grid(folder / "grid.yaml"), directory=folder))
        overrides = [f"tracking.uri=sqlite:///{folder}/store.db", "tracking.experiment=e"]
        self.config = load_config(self.sweep.config(0), overrides)

        self.store = FakeStore()
        self.run = self._train_the_cell()
        self.runs_in_store = dict(self.store.runs)

        self.policy = load_config(None, [f"model.source={self.run.policy}"]).model
        self.loaded = load_model(self.config.model)
        self.prompts = render_prompts(self.config, load_problem_sets(self.config), self.loaded).train

        files = [path for path in folder.rglob("*") if path.is_file() and not is_lock(path)]
        self.whole = {path: path.read_bytes() for path in files}
        """What each file holds."""
        self.times = {}
        """When each file was last made whole: one that was not touched since is not written again."""
        in_sweep = [path for path in sorted(files) if path.is_relative_to(self.sweep.path)]
        self.files = [path for path in in_sweep if path.stat().st_size]
        """The files to damage."""
        self.read = {}
        """Digests of checkpoints that were read, by those of their files."""

    def train(self):
        """Train the cell, or resume it."""
        console = Console(file=io.StringIO())
        return train(self.config, console=console, command="kl-comedy train x.yaml", folder=self.sweep.run(0))

    def _train_the_cell(self):
        """Train the only cell, with what a sweep's manager writes before and after it."""
        process = process_tags()
        self.sweep.record_submission(Submission(stage="train", indices=(0,), time=1.0, process=process, workers=1))
        self.sweep.record_start(0, "train", process)
        with self.patched():
            result = self.train()
        self.sweep.record_end(0, process["process.pid"], 0, None)
        return result.run

    @contextmanager
    def patched(self):
        """The store in place of MLflow, and no waiting for the disk."""
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
            if path.is_file() and path.stat().st_mtime_ns == self.times.get(path):
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            self.times[path] = path.stat().st_mtime_ns
        for path in self.folder.rglob("*.damaged"):
            shutil.rmtree(path)
        self.store = FakeStore()
        self.store.runs = dict(self.runs_in_store)

    # --- what reads: each method returns all that it saw, and appends what it told the user to ``lines`` -------------
    def resume(self, lines):
        try:
            run = RunDir(path=open_run(self.config, self.run.path).folder)
        except UserError as error:
            # A run whose config is damaged is not resumed.
            lines.append(str(error))
            return None
        summary = run.summary()
        checkpoint = newest_checkpoint(run.checkpoints)
        step = None
        contents = None
        if checkpoint is not None:
            step = step_of(checkpoint)
        resumed = logger_module.ResumedFrom(step=step)
        logger = logger_module.RunLogger(self.config.tracking, run_dir=run.path, params={}, tags={}, resumed=resumed)
        logger.save()
        # The fifth field is the place in the file, which may move.
        events = [event[:4] for event in Spool(run.path).read() if event.kind in ("metrics", "table")]
        if checkpoint is not None:
            contents = self.contents(checkpoint)
        return summary, step, contents, events

    def contents(self, checkpoint):
        """Every tensor and the state of a checkpoint, as a digest; those of the same bytes are read once."""
        key = tuple(hashlib.sha256(path.read_bytes()).digest() for path in sorted(checkpoint.iterdir()))
        if key not in self.read:
            reader = SafeReader(checkpoint)
            index = reader.read_metadata().state_dict_metadata
            tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in index.items()}
            load_tensors(tensors, reader)
            state = torch.load(checkpoint / STATE, weights_only=True)
            self.read[key] = weights_hash(tensors), str(state)
        return self.read[key]

    def sync(self, lines):
        def show(text):
            if "events uploaded" not in text:
                lines.append(text)

        self.patch.setattr(results, "message", show)
        for uri in (None, f"sqlite:///{self.folder}/other.db"):
            with one_line(lines):
                results.sync([self.run.path], uri, None)
        return self.store.sent

    def cell(self, lines):
        with one_line(lines):
            return self.sweep.read_config(0)

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
        out = self.folder / "out"
        exported = []
        for which in ("newest", "best"):
            with one_line(lines):
                export_policy(self.run, self.config, out, which=which)
                exported.append({path.name: sha256_file(path) for path in out.iterdir()})
            shutil.rmtree(out, ignore_errors=True)
        return exported

    def readers(self, path, round_number):
        """What reads the file. An export takes long, so that it reads a checkpoint in every tenth round only."""
        if path == self.sweep.config(0):
            return [self.cell]
        if self.run.path not in path.parents:
            return [self.status]
        first_part = path.relative_to(self.run.path).parts[0]
        if first_part == "checkpoints":
            if round_number % 10 == 0:
                return [self.resume, self.export]
            return [self.resume]
        readers_by_name = {
            "config.yaml": [self.target],
            "policy": [self.evaluate],
            "rollouts": [self.replay],
            "spool.jsonl": [self.resume, self.sync, self.status],
            "summary.json": [self.resume, self.status],
            "tracking.json": [self.resume, self.sync],
        }
        return readers_by_name.get(first_part, [self.sync])


@contextmanager
def one_line(lines):
    """An error that is meant for the user is a line; any other is raised."""
    try:
        yield
    except (UserError, RunFailed) as error:
        lines.append(str(error))


def check_one_line(text, limit=1000):
    assert "\n" not in text
    assert len(text) < limit


@pytest.fixture(scope="module")
def built_case(tmp_path_factory):
    return Case(tmp_path_factory.mktemp("damaged"))


@pytest.fixture
def case(built_case):
    """The sweep, whole before the test and after it."""
    built_case.restore()
    yield built_case
    built_case.restore()


class Warnings(logging.Handler):
    """The warnings of the package, as lines."""

    def __init__(self, lines):
        super().__init__(logging.WARNING)
        self.lines = lines

    def emit(self, record):
        self.lines.append(record.getMessage())


def outcome(reader):
    """What a reader returns, as text, and the lines it wrote."""
    lines = []
    result = None
    handler = Warnings(lines)
    package_log = logging.getLogger("kl_comedy")
    package_log.addHandler(handler)
    try:
        with one_line(lines):
            result = reader(lines)
    finally:
        package_log.removeHandler(handler)
    return repr(result), lines


# --- random damage ------------------------------------------------------------------------------------------------
# What can happen to a file of text: a killed process, a full disk or a power cut leaves a part of it, zeros, or
# another file in its place. To one of tensors, which a disk may also read wrongly, anything.
# A part of a YAML file may be whole YAML, so that they are written under another name and renamed.
TEXT_KINDS = {".json": ["end", "end", "zero", "other"], ".yaml": ["zero", "other"]}
TEXT_KINDS[".jsonl"] = TEXT_KINDS[".json"]
# The more often a kind is named, the more often it is drawn.
KINDS = ["flip"] * 3 + ["replace", "replace", "cut", "cut", "end", "insert", "zero", "other"]
OTHER_CONTENTS = [b"", b"[]", b"5", b"{}", b"null", b"\xff\xfe\x00", b"[" * 10**5, b'{"a": 1}\n']


def spoil(content, random, kinds=KINDS):
    """``content`` with bytes flipped, cut out, cut off, replaced, inserted, zeroed, or none of it left."""
    size = len(content)
    start = random.randrange(size)
    end = min(size, start + random.choice([1, 2, 8, 64, 512, size]))
    before = content[:start]
    damaged = content[start:end]
    after = content[end:]
    kind = random.choice(kinds)
    if kind == "flip":
        flipped = content[start] ^ (1 << random.randrange(8))
        return before + bytes([flipped]) + content[start + 1 :]
    if kind == "replace":
        return before + random.randbytes(len(damaged)) + after
    if kind == "cut":
        return before + after
    if kind == "end":
        return before
    if kind == "insert":
        return before + random.randbytes(3) + damaged + after
    if kind == "zero":
        return before + bytes(len(damaged)) + after
    return random.choice(OTHER_CONTENTS)


def is_torn(path, whole, damaged):
    """Whether only the last line of a file of lines is incomplete, as a killed process leaves it."""
    complete_lines = damaged[: damaged.rfind(b"\n") + 1]
    return path.suffix == ".jsonl" and whole.startswith(complete_lines)


def outcome_where_whole(case, reader):
    """What the reader returns where nothing is damaged."""
    case.restore()
    result, lines = outcome(reader)
    assert lines == [], reader.__name__
    assert result != "None", reader.__name__
    return result


@pytest.mark.parametrize("cases", [60])
def test_readers_of_damaged_files_see_the_same_bits_or_say_so_in_one_line(case, cases):
    whole_results = {}
    with case.patched() as case.patch:
        for number in range(cases):
            path = case.files[number % len(case.files)]
            case.restore()
            for reader in case.readers(path, number // len(case.files)):
                name = reader.__name__
                if name not in whole_results:
                    whole_results[name] = outcome_where_whole(case, reader)
                case.restore()
                kinds = TEXT_KINDS.get(path.suffix, KINDS)
                damaged = spoil(case.whole[path], random.Random(f"{cases}/{number}"), kinds)
                path.write_bytes(damaged)
                where = f"case {number}: {name} of {path}"
                try:
                    result, lines = outcome(reader)
                except Exception as error:
                    raise AssertionError(where) from error
                is_same = result == whole_results[name]
                assert is_same or lines or is_torn(path, case.whole[path], damaged), f"{where}: silently different"
                for line in lines:
                    assert "\n" not in line.strip(), where
                    assert len(line) <= 1000, where
    assert len(whole_results) == 8, "every reader was tried"
    assert len(case.files) > 25


def test_a_run_resumes_over_damaged_files_to_the_same_bits(case, caplog):
    weights_before = weights_hash(load_file(case.run.policy / "model.safetensors"))
    newest = saved(case.run.checkpoints)[-1]
    for path in (newest / "state.pt", case.run.path / "summary.json"):
        path.write_bytes(path.read_bytes()[:-9])
    with case.patched():
        result = case.train()
    assert result.run.path == case.run.path
    assert not result.already_finished
    assert resumed_at(case.run.path)[-1] == 1, "the checkpoint before the damaged one"
    assert result.run.summary()["status"] == "FINISHED"
    assert weights_hash(load_file(case.run.policy / "model.safetensors")) == weights_before
    for text in ("summary.json.damaged", "state.pt has", "resuming from the one before"):
        assert caplog.text.count(text) == 1, text


@pytest.mark.parametrize(
    "damage_of",
    [
        lambda text: text.replace(b"optimizer", b"\x80ptimizer"),
        lambda text: text.replace(b"optimizer", b"\x00ptimizer"),
        lambda text: text.replace(b"0.001", b"0.002"),
        lambda text: text[: text.index(b"tracking:")],
        lambda text: b"",
        None,
    ],
    ids=["no text", "a zero byte", "another rate", "cut short", "empty", "gone"],
)
def test_a_run_whose_config_is_damaged_is_refused_and_left_as_it_is(case, damage_of):
    """Its config says which run it is: with another one its checkpoints are another run's."""
    file = case.run.path / "config.yaml"
    if damage_of is None:
        file.unlink()
    else:
        file.write_bytes(damage_of(case.whole[file]))
    before = {path: path.read_bytes() for path in case.run.path.rglob("*") if path.is_file()}
    with case.patched(), pytest.raises(UserError, match=rf"^{case.run.path}") as error:
        case.train()
    assert "\n" not in str(error.value)
    assert {path: path.read_bytes() for path in case.run.path.rglob("*") if path.is_file()} == before


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
    shard = checkpoint / "__0_1.distcp"
    torch.save(Harm(canary), shard)

    def change(metadata):
        name = next(name for name in metadata.state_dict_metadata if name.startswith("model."))
        metadata.state_dict_metadata[name] = BytesStorageMetadata()
        storage_info = type(next(iter(metadata.storage_data.values())))
        metadata.storage_data[MetadataIndex(name)] = storage_info(shard.name, 0, shard.stat().st_size)

    change_index(checkpoint, change)


def set_storage(**values):
    """A change of the index that gives every tensor these values, e.g. another offset."""

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
    canary = tmp_path / "canary"
    checkpoint = forged(case, lambda folder: HOSTILE[kind](folder, canary))
    model = torch.nn.Module()
    model.policy = case.loaded.model
    model.references = {}
    with pytest.raises(RunFailed, match=r"step-00000002.ckpt cannot be read \(") as error:
        read_checkpoint(checkpoint, model, [], SINGLE_PROCESS)
    assert "\n" not in str(error.value)
    assert not canary.exists()


# An export reads no state.
@pytest.mark.parametrize("kind", [kind for kind in HOSTILE if not kind.endswith("state")])
def test_a_forged_checkpoint_is_not_exported_and_runs_nothing(case, tmp_path, kind):
    canary = tmp_path / "canary"
    forged(case, lambda folder: HOSTILE[kind](folder, canary))
    with pytest.raises(RunFailed, match=r"step-00000002.ckpt cannot be read \(") as error:
        export_policy(case.run, case.config, tmp_path / "out", which="newest")
    assert "\n" not in str(error.value)
    assert not canary.exists()
    assert not (tmp_path / "out").exists()


def test_stray_names_are_no_checkpoints(case, caplog):
    newest = saved(case.run.checkpoints)[-1]
    no_number = newest.with_name("step-zz.ckpt")
    empty = newest.with_name("step-00000007.ckpt")
    of_another_update = newest.with_name("step-00000009.ckpt")
    another_run = case.run.path.with_name(f"{case.run.path.name}x")
    shutil.copytree(newest, no_number)
    empty.mkdir()
    shutil.copytree(newest, of_another_update)
    shutil.copytree(case.run.path, another_run)
    try:
        assert newest_checkpoint(case.run.checkpoints) == newest
        assert "step-zz.ckpt is not a checkpoint name" in caplog.text
        assert "its manifest.json is of update 2" in caplog.text
    finally:
        for path in (no_number, empty, of_another_update, another_run):
            if path.exists():
                shutil.rmtree(path)


@contextmanager
def uploads_to(client):
    """Uploads go to the client."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "connect", lambda uri: client)
        patch.setattr(upload, "mark_dead_runs", lambda *args: None)
        yield


SECRET = "of mine"


def test_a_spool_names_no_file_outside_its_folder(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    secret = tmp_path / "secret.txt"
    secret.write_text(SECRET)
    inside = run / "inside.json"
    inside.write_text("[]")
    (run / "link.json").symlink_to(secret)

    lines = []
    for kind, path in (
        ("table", "../secret.txt"),
        ("artifact", str(secret)),
        ("table", "link.json"),
        ("table", "inside.json"),
    ):
        data = {"name": "t", "path": path, "folder": "../../tables"}
        lines.append({"kind": kind, "time": 1, "step": 5, "data": data})
    lines.append({"kind": "table", "time": 1, "step": 5, "data": {"path": 7}})
    lines.append({"kind": "status", "step": 1, "data": {}})
    (run / "spool.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    client = FakeStore()
    with uploads_to(client):
        result = upload.sync(run, f"sqlite:///{tmp_path}/store.db")
    outside = [text for text in result.left_out if "lies outside the folder of the run" in text]
    assert len(outside) == 3
    assert [(sent.path, sent.folder) for sent in client.files_sent()] == [(str(inside), "tables")]
    assert spool_module.unreadable_lines(Spool(run).read()) == 2, "a path that is a number, a status without a time"

    # What came after the first update is cut off, and its files with it: those of the run only.
    Spool(run).truncate_after(1)
    assert secret.read_text() == SECRET
    assert not inside.exists()


# --- links, pipes and folders in a file's place ---------------------------------------------------------------------
def commands(case, run):
    """What reads or writes the folder of a run, by the command."""
    config = replace(case.config, output=str(run.path.parent))
    console = Console(file=io.StringIO())
    return {
        "train resume=auto": lambda: train(config, console=console, command="kl-comedy train x.yaml"),
        "results sync": lambda: results.sync([run.path], f"sqlite:///{case.folder}/other.db", None),
        "evaluate": lambda: resolve_target(str(run.path), []).__enter__(),
        "evaluate of a checkpoint": lambda: resolve_target(str(saved(run.checkpoints)[-1]), []).__enter__(),
        "export": lambda: export_policy(run, run.config_reader()([]), case.folder / "out", which="newest"),
    }


@pytest.fixture
def copied_run(case, tmp_path):
    """The finished run, copied from elsewhere: unfinished, so that ``train`` has something to do."""
    folder = tmp_path / "runs" / f"{case.config.name}-1"
    shutil.copytree(case.run.path, folder)
    (folder / "summary.json").unlink()
    return RunDir(path=folder)


FILES_OF_A_RUN = (
    "config.yaml",
    "summary.json",
    "spool.jsonl",
    "tracking.json",
    ".lock",
    "tracking.lock",
    "checkpoints/step-00000002.ckpt/state.pt",
    "policy/model.safetensors",
    "provenance/packages.txt",
    "rollouts/batch-00000000.jsonl",
)
FOLDERS_OF_A_RUN = (
    "plugins",
    "files",
    "checkpoints",
    "checkpoints/step-00000002.ckpt",
    "policy",
    "adapter",
    "tables",
    "tables/samples",
    "provenance",
    "rollouts",
    "sampler",
    "csv",
    "wandb",
)
"""What a run has, or may have."""


def remove(path):
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def replace_by_a_link(place, outside):
    """A link to what was in the place, moved outside; to a secret where there was nothing.

    What the link leads to can be read then, which makes it no better.
    """
    target = outside / "secret.txt"
    if place.exists():
        shutil.move(place, outside / place.name)
        target = outside / place.name
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(target)


@pytest.mark.parametrize("name", [*FILES_OF_A_RUN, *FOLDERS_OF_A_RUN])
def test_a_link_in_a_run_folder_is_followed_by_no_command(case, copied_run, tmp_path, name):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret.txt").write_text(SECRET)
    replace_by_a_link(copied_run.path / name, outside)
    contents_before = tree(outside)
    refused = set()
    with case.patched():
        for command, call in commands(case, copied_run).items():
            try:
                call()
            except (UserError, RunFailed) as error:
                check_one_line(str(error))
                assert SECRET not in str(error)
                refused.add(command)
            assert tree(outside) == contents_before, f"{command} wrote through the link"
        # A sync may leave out the file and upload the rest.
        assert refused >= commands(case, copied_run).keys() - {"results sync"}, "each of them says so"
    for sent in case.store.files_sent():
        assert not Path(sent.path).resolve().is_relative_to(outside), "sync uploaded it"


def tree(folder):
    """Every path below the folder, and what the files hold."""
    paths = {str(path) for path in folder.rglob("*")}
    contents = {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return contents, paths


def put_instead(kind, place, monkeypatch):
    """A pipe, a folder or a socket in the place of a file."""
    remove(place)
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "folder":
        place.mkdir()
    else:
        with socket.socket(socket.AF_UNIX) as server:
            monkeypatch.chdir(place.parent)  # a socket's path has at most 107 bytes
            server.bind(place.name)


@pytest.mark.parametrize("kind", ["pipe", "folder", "socket"])
def test_what_is_no_file_in_a_files_place_is_one_line_and_no_wait(case, copied_run, monkeypatch, kind):
    for name in FILES_OF_A_RUN:
        place = copied_run.path / name
        content = None
        if place.is_file():
            content = place.read_bytes()
        put_instead(kind, place, monkeypatch)
        with case.patched():
            for call in commands(case, copied_run).values():
                lines = []
                with one_line(lines):
                    call()
                for line in lines:
                    check_one_line(line)
        if not place.is_file():  # no command has replaced it
            remove(place)
        if content is not None:
            place.write_bytes(content)


def test_a_run_folder_that_is_a_link_and_links_within_it_are_fine(case, copied_run, tmp_path):
    runs = copied_run.path.parent
    disk = tmp_path / "disk"
    shutil.move(runs, disk)
    runs.symlink_to(disk)
    newest = saved(copied_run.checkpoints)[-1]
    (copied_run.checkpoints / "latest").symlink_to(newest.name)
    (newest / "state.pt").rename(copied_run.path / "state.pt")
    (newest / "state.pt").symlink_to(Path("../../state.pt"))
    with case.patched():
        train(
            replace(case.config, output=str(runs)),
            console=Console(file=io.StringIO()),
            command="kl-comedy train x.yaml",
        )
        results.sync([copied_run.path], f"sqlite:///{case.folder}/other.db", None)
    assert copied_run.summary()["status"] == "FINISHED"
    assert saved(copied_run.checkpoints)[-1].is_dir()
    assert any(sent.path.endswith(".json") for sent in case.store.files_sent()), "its files are uploaded"


LONG_NAME = "x" * 5000


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
    not_uploaded = ("link.json", "folder", "linked", "linked/hidden.txt", "pipe", LONG_NAME, f"{LONG_NAME}/a")
    for path in (*not_uploaded, "inside.json"):
        spool.append("artifact", {"path": path, "folder": "files"})
    spool.append("artifact", {"path": "inside.json", "folder": LONG_NAME})

    client = FakeStore()
    with uploads_to(client):
        result = upload.sync(run, f"sqlite:///{tmp_path}/store.db")
    assert len(result.left_out) == len(not_uploaded) + 1, "those, and the file whose folder has a long name"
    for line in result.left_out:
        assert len(line) < 6000
    assert [(sent.path, sent.folder) for sent in client.files_sent()] == [(str(run / "inside.json"), "files")]


NO_FILES_OF_A_CHECKPOINT = {
    "too long": LONG_NAME,
    "of another checkpoint": "../step-00000001.ckpt/state.pt",
    "absolute": "/etc/hostname",
    "with a null": "a\0b",
    "empty": "",
    "the folder above": "..",
}
no_file_of_a_checkpoint = pytest.mark.parametrize(
    "name", NO_FILES_OF_A_CHECKPOINT.values(), ids=NO_FILES_OF_A_CHECKPOINT
)


@no_file_of_a_checkpoint
def test_a_manifest_that_names_what_is_no_file_of_it_is_one_line(case, name):
    checkpoint = saved(case.run.checkpoints)[-1]
    content = decode_json((checkpoint / MANIFEST).read_bytes())
    content["files"][name] = {"bytes": 1, "sha256": "0"}
    write_json(checkpoint / MANIFEST, content)
    fault = damage(checkpoint)
    assert fault is not None
    check_one_line(fault, limit=300)


@no_file_of_a_checkpoint
def test_checksums_that_name_what_is_no_file_beside_them_are_one_line(case, name):
    checkpoint = saved(case.run.checkpoints)[-1]
    write_json(checkpoint / CHECKSUMS, {"files": {name: "0"}})
    fault = find_damage(checkpoint)
    assert fault is not None
    check_one_line(fault, limit=300)


def test_an_index_that_names_a_file_of_thousands_of_characters_is_one_short_line(case, tmp_path):
    checkpoint = forged(case, lambda folder: set_storage(relative_path=LONG_NAME)(folder, None))
    with pytest.raises(RunFailed, match="cannot be read") as error:
        export_policy(case.run, case.config, tmp_path / "out", which="newest")
    check_one_line(str(error.value))
    assert checkpoint.is_dir()


def test_a_draft_that_somebody_else_put_there_is_not_written_through(tmp_path):
    outside = tmp_path / "outside"
    outside.write_text(SECRET)
    # The name under which a file is written before it is renamed to x.json.
    (tmp_path / f".x.json.{os.getpid()}").symlink_to(outside)
    write_json(tmp_path / "x.json", {"a": 1})
    assert outside.read_text() == SECRET
    assert read_json(tmp_path / "x.json", "file") == {"a": 1}


def test_lines_that_cannot_be_read_are_counted(tmp_path):
    spool = Spool(tmp_path)
    for step in range(6):
        spool.append("metrics", {"x": 1.0}, step=step)
    spool.close()
    lines = spool.path.read_bytes().splitlines(keepends=True)
    lines[2] = lines[2][:20] + b"?" + lines[2][21:]
    lines[3] = b"garbage\n"
    spool.path.write_bytes(b"".join(lines))
    assert spool_module.unreadable_lines(spool.read()) == 2
    assert not spool.ended()

    spool.truncate_after(4)
    spool.append("status", {"status": "FINISHED", "reason": None})
    assert spool_module.unreadable_lines(Spool(tmp_path).read()) == 2, "they are kept: nobody knows what they were"
    assert spool.ended()


# --- JSON ------------------------------------------------------------------------------------------------------------


NO_SUMMARIES = {
    "a list": "[]",
    "a number": "5",
    "null": "null",
    "a torn file": "{",
    "an empty file": "",
    "lists nested too deeply": "[" * 10**5,
    "mappings nested too deeply": '{"a": ' * 10**5,
    "a null byte": "\0",
}


@pytest.mark.parametrize("text", NO_SUMMARIES.values(), ids=NO_SUMMARIES)
def test_json_that_cannot_be_read_is_one_line(tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(UserError, match=r"x.json is not a readable summary \(") as error:
        read_json(tmp_path / "x.json", "summary")
    assert "\n" not in str(error.value)


def test_json_with_a_value_of_another_type_is_refused(tmp_path):
    (tmp_path / "x.json").write_text('{"a": "text"}')
    with pytest.raises(UserError, match=r"x.json is not a readable summary \(a is not a count: text"):
        read_fields(tmp_path / "x.json", "summary", {"a": Field("a count", is_count)})


def test_json_that_is_missing_is_reported(tmp_path):
    with pytest.raises(UserError, match="No such file"):
        read_json(tmp_path / "y.json", "summary")


no_manifest = pytest.mark.parametrize(
    "text", ["[]", "5", "null", "{", "", '{"version": 1}', '{"version": 1, "cells": 5}', "\xff"]
)


@no_manifest
def test_a_manifest_that_is_none_is_one_line(case, text):
    (case.sweep.path / "manifest.json").write_text(text)
    with pytest.raises(UserError, match=r"manifest\.json") as error:
        read_sweep(case.sweep.path)
    assert "\n" not in str(error.value)


@no_manifest
def test_a_manifest_of_a_checkpoint_that_is_none_is_one_line(case, text):
    checkpoint = saved(case.run.checkpoints)[-1]
    (checkpoint / MANIFEST).write_text(text)
    assert "\n" not in damage(checkpoint)


@no_manifest
def test_a_summary_that_is_none_is_set_aside(case, text):
    (case.run.path / "summary.json").write_text(text)
    assert readable_summary(case.run) is None
    assert not (case.run.path / "summary.json").exists()


# --- models and tables -----------------------------------------------------------------------------------------------


def lying_header(change):
    """A safetensors file whose header says something else."""

    def lie(content):
        header_size = struct.unpack("<Q", content[:8])[0]
        header = json.loads(content[8 : 8 + header_size])
        first_tensor = next(name for name in header if name != "__metadata__")
        change(header, first_tensor)
        text = json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + content[8 + header_size :]

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


@pytest.fixture
def policy_folder(case, tmp_path):
    """A copy of the run's policy."""
    folder = tmp_path / "policy"
    shutil.copytree(case.run.policy, folder)
    return folder


def load_from(folder):
    return load_model(load_config(None, [f"model.source={folder}"]).model)


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_safetensors_header_is_one_line(policy_folder, lie):
    file = policy_folder / "model.safetensors"
    file.write_bytes(LIES[lie](file.read_bytes()))
    with pytest.raises(UserError, match=r"is damaged \(model.safetensors has changed"):
        load_from(policy_folder)

    # Of a model from elsewhere there are no checksums.
    (policy_folder / CHECKSUMS).unlink()
    with pytest.raises(UserError, match=r"model\.source") as error:
        load_from(policy_folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("cases", [10])
def test_a_damaged_folder_of_a_model_loads_or_is_one_line(policy_folder, cases):
    (policy_folder / CHECKSUMS).unlink()
    files = sorted(path for path in policy_folder.iterdir() if path.name != "README.md")
    for number in range(cases):
        path = files[number % len(files)]
        whole = path.read_bytes()
        # Only the header of the weights: another number is another model, and nobody could know.
        start, rest = whole[:2000], whole[2000:]
        path.write_bytes(spoil(start, random.Random(f"model {number}")) + rest)
        with one_line([]):
            load_from(policy_folder)
        path.write_bytes(whole)


def test_a_damaged_gguf_file_loads_or_is_one_line(tmp_path):
    file = tmp_path / "tiny.gguf"
    write_gguf(file, "smollm")
    config = load_config(None, [f"model.source={tmp_path}", "model.gguf_file=tiny.gguf"]).model
    load_model(config)
    whole = file.read_bytes()
    header, rest = whole[:1500], whole[1500:]
    failures = []
    for number in range(12):
        file.write_bytes(spoil(header, random.Random(f"gguf {number}")) + rest)
        with one_line(failures):
            load_model(config)
    assert len(failures) > 5, "the damage is found, and not only survived"
    for line in failures:
        assert "\n" not in line


@pytest.mark.parametrize("suffix", ["csv", "json", "parquet"])
def test_a_damaged_export_is_a_table_or_one_line(tmp_path, suffix):
    import pandas as pd

    rows = [{"run_id": f"r{n}", "status": "FINISHED", "metrics.x": n / 3, "params.a": "b"} for n in range(20)]
    frame = pd.DataFrame(rows)
    file = tmp_path / f"runs.{suffix}"
    results.write_table(results.ResultTable(frame=frame), suffix, file)
    whole = file.read_bytes()
    readers = [lambda: run_tables.read_table(file), lambda: verify.verify("none", frame, file)]
    for number in range(60):
        file.write_bytes(spoil(whole, random.Random(f"{suffix} {number}")))
        lines = []
        for read in readers:
            with one_line(lines):
                read()
        for line in lines:
            assert "\n" not in line
        if suffix != "json":  # runs are read from tables
            with one_line([]):
                run_tables.read_runs(file)
