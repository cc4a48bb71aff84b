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


def reproduced_verdicts(kl_comedy, run):
    """Of training the finished run again: all equal, where this processor rounds as the one that stored it."""
    _, out, err = kl_comedy("reproduce", run.name, "--uri", "export.parquet", "--format", "json")
    assert out, err
    return {line["verdict"] for line in json.loads(out)}


def test_runs_are_resumed_evaluated_compared_and_verified(kl_comedy, stored):
    finished, killed = run_of(stored, "beta0.05"), run_of(stored, "beta0.2")
    summary = json.loads((finished / "summary.json").read_text())
    words = [f"model.source={finished / 'policy'}", "model.options={}", f"eval.reference={finished / 'config.yaml'}"]
    code, out, err = kl_comedy("evaluate", finished / "config.yaml", *words)
    assert code == 0, err
    assert f"{summary['evaluations']['heldout']['40']:.3f}" in out

    code, out, err = kl_comedy("results", "table", "--uri", "export.parquet", "--format", "json")
    assert code == 0, err
    means = {line["metric"]: line["mean"] for line in json.loads(out)}
    assert means["train/reward"] == pytest.approx(summary["metrics"]["train/reward"])
    assert means["eval/heldout/reward"] == pytest.approx(summary["evaluations"]["heldout"]["40"])

    code, _, err = kl_comedy("train", killed / "config.yaml", f"output={killed.parent}", "resume=auto")
    assert code == 0, err
    assert run_of(stored, "beta0.2") == killed, "no second folder: the config has the hash that it had"
    assert "update 4" in err, "it resumes from the checkpoint"
    resumed = json.loads((killed / "summary.json").read_text())
    whole = json.loads((stored / "expected.json").read_text())
    assert resumed["config_hash"] == whole["config_hash"]
    assert resumed["evaluations"]["heldout"].keys() == whole["evaluations"]["heldout"].keys()
    names = [name for name in whole["metrics"] if not name.startswith("time/")]
    assert len(names) > 50 and set(names) <= set(resumed["metrics"]), "metrics keep their names"

    if reproduced_verdicts(kl_comedy, finished) <= {"equal", "new"}:
        assert resumed["evaluations"] == whole["evaluations"]
        assert [resumed["metrics"][name] for name in names] == [whole["metrics"][name] for name in names]


def test_a_sweep_runs_what_is_missing(kl_comedy, stored):
    rows = {row.name: row.state for row in read_status(read_sweep(stored / "sweeps/grid")).rows}
    assert rows["beta0.05"] == "FINISHED" and rows["beta0.2"] != "FINISHED"
    code, _, err = kl_comedy("resubmit", "grid")
    assert code == 0, err
    rows = {row.name: row for row in read_status(read_sweep(stored / "sweeps/grid")).rows}
    assert {row.state for row in rows.values()} == {"FINISHED"}
    assert (rows["beta0.05"].attempts, rows["beta0.2"].attempts) == (1, 2)
    assert len(list(stored.glob("sweeps/grid/runs/*"))) == 2
