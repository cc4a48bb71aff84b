"""A sweep, its runs and an export that commit d94eb82 wrote (tests/fixtures/stored) are used by this code."""

import json
import tarfile
from pathlib import Path

import pytest

from kl_comedy.config.validate import parse_record
from kl_comedy.slurm.manifest import Manifest, read_sweep
from kl_comedy.slurm.status import read_status

STORED = Path(__file__).parent / "fixtures/stored/d94eb82.tar.xz"


@pytest.fixture
def stored(tmp_path, monkeypatch):
    """The folder, at another place than where it was written, as the working directory."""
    with tarfile.open(STORED) as archive:
        archive.extractall(tmp_path, filter="data")
    manifest_file = tmp_path / "sweeps/grid/manifest.json"
    manifest = json.loads(manifest_file.read_text())
    # A sweep is bound to its place; only the test moves it, and signs it anew.
    manifest["base"] = str(tmp_path / "base.yaml")
    manifest["directory"] = str(tmp_path)
    version = manifest.pop("version")
    manifest.pop("digest")
    digest = parse_record(Manifest, manifest, origin="the stored manifest").digest
    manifest_file.write_text(json.dumps({"version": version, "digest": digest, **manifest}))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_of(folder, cell):
    (path,) = folder.glob(f"sweeps/grid/runs/{cell}-*")
    return path


def rounds_as_stored(kl_comedy, run):
    """Whether this processor rounds as the one that stored the run: training it again gives the same numbers."""
    _, output, errors = kl_comedy("reproduce", run.name, "--uri", "export.parquet", "--format", "json")
    assert output, errors
    verdicts = {line["verdict"] for line in json.loads(output)}
    return verdicts <= {"equal", "new"}


OTHER_REFERENCE = "the initial reference is not the one this run began with"
"""The tiny pocket is trained on each machine: a processor that rounds otherwise has other weights, and a resume with
another reference must be refused."""


def finished_summary(stored):
    return json.loads((run_of(stored, "beta0.05") / "summary.json").read_text())


def test_a_stored_policy_is_evaluated(kl_comedy, stored):
    run = run_of(stored, "beta0.05")
    overrides = [f"model.source={run / 'policy'}", "model.options={}", f"eval.reference={run / 'config.yaml'}"]
    code, output, errors = kl_comedy("evaluate", run / "config.yaml", *overrides)
    assert code == 0, errors
    reward = finished_summary(stored)["evaluations"]["heldout"]["40"]
    assert f"{reward:.3f}" in output


def test_a_stored_export_is_compared(kl_comedy, stored):
    code, output, errors = kl_comedy("results", "table", "--uri", "export.parquet", "--format", "json")
    assert code == 0, errors
    means = {line["metric"]: line["mean"] for line in json.loads(output)}
    summary = finished_summary(stored)
    assert means["train/reward"] == pytest.approx(summary["metrics"]["train/reward"])
    assert means["eval/heldout/reward"] == pytest.approx(summary["evaluations"]["heldout"]["40"])


def test_a_stored_checkpoint_is_resumed_to_what_the_whole_run_was(kl_comedy, stored):
    killed = run_of(stored, "beta0.2")
    code, _, errors = kl_comedy("train", killed / "config.yaml", f"output={killed.parent}", "resume=auto")
    if OTHER_REFERENCE in errors:
        assert code == 1
        assert not rounds_as_stored(kl_comedy, run_of(stored, "beta0.05"))
        return
    assert code == 0, errors
    assert run_of(stored, "beta0.2") == killed, "no second folder: the config has the hash that it had"
    assert "update 4" in errors, "it resumes from the checkpoint"

    resumed = json.loads((killed / "summary.json").read_text())
    whole = json.loads((stored / "expected.json").read_text())
    assert resumed["config_hash"] == whole["config_hash"]
    assert resumed["evaluations"]["heldout"].keys() == whole["evaluations"]["heldout"].keys()
    names = [name for name in whole["metrics"] if not name.startswith("time/")]
    assert len(names) > 50
    assert set(names) <= set(resumed["metrics"]), "metrics keep their names"

    if rounds_as_stored(kl_comedy, run_of(stored, "beta0.05")):
        assert resumed["evaluations"] == whole["evaluations"]
        for name in names:
            assert resumed["metrics"][name] == whole["metrics"][name], name


def rows_of_sweep(stored):
    return {row.name: row for row in read_status(read_sweep(stored / "sweeps/grid")).rows}


@pytest.mark.slow
def test_a_stored_sweep_runs_what_is_missing(kl_comedy, stored):
    rows = rows_of_sweep(stored)
    assert rows["beta0.05"].state == "FINISHED"
    assert rows["beta0.2"].state != "FINISHED"

    code, _, errors = kl_comedy("resubmit", "grid")
    if OTHER_REFERENCE in errors:
        assert code == 1
        assert rows_of_sweep(stored)["beta0.2"].state == "FAILED"
        assert not rounds_as_stored(kl_comedy, run_of(stored, "beta0.05"))
        return
    assert code == 0, errors
    rows = rows_of_sweep(stored)
    assert {row.state for row in rows.values()} == {"FINISHED"}
    assert rows["beta0.05"].attempts == 1
    assert rows["beta0.2"].attempts == 2
    assert len(list(stored.glob("sweeps/grid/runs/*"))) == 2
