"""Tables against their store, and a run against itself."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pandas as pd
import pytest

from kl_comedy.tracking.runs import runs_frame
from kl_comedy.tracking.store import connect
from kl_comedy.tracking.verify import compare_metrics
from study_runs import EVAL

TINY = Path(__file__).parents[1] / "support" / "tiny.yaml"


@pytest.fixture
def exported(kl_comedy, study_copy, tmp_path):
    def write(suffix, *words):
        file = tmp_path / f"table.{suffix}"
        command = ["table", "--run-ids", *words] if words else ["export"]
        code, _, err = kl_comedy("results", *command, "--uri", study_copy, "--format", suffix, "--out", file)
        assert code == 0, err
        return file

    return write


GROUPED = ("--group", "kl.label", "--metric", f"{EVAL},train/reward")


@pytest.mark.parametrize(
    ("suffix", "words"),
    [("csv", ()), ("parquet", ()), ("json", GROUPED), ("csv", (*GROUPED, "--of", "mean:2"))],
    ids=["runs", "runs in parquet", "groups", "mean of 2"],
)
def test_a_fresh_table_is_the_same(kl_comedy, exported, study_copy, suffix, words):
    code, out, err = kl_comedy("results", "verify", exported(suffix, *words), "--uri", study_copy)
    rows = 14 if words else 21
    assert (code, out) == (0, "") and f"{rows} of {rows} rows are the same" in err
    assert int(re.search(r"\((\d+) cells\)", err)[1]) >= 2 * rows


def test_a_changed_cell_a_new_value_and_a_deleted_run_are_named(kl_comedy, exported, study_copy):
    runs, groups = exported("csv"), exported("json", *GROUPED)
    edited = runs.with_name("edited.csv")
    frame = pd.read_csv(runs, dtype=str, keep_default_na=False)
    frame.loc[3, f"metrics.{EVAL}"] = str(float(frame.loc[3, f"metrics.{EVAL}"]) + 1e-9)
    frame.to_csv(edited, index=False)
    code, out, err = kl_comedy("results", "verify", edited, "--uri", study_copy, "--format", "json")
    wrong = [row for row in json.loads(out) if row["verdict"] != "same"]
    assert code == 1 and "1 rows of" in err
    assert [row["row"] for row in wrong] == [frame.loc[3, "run_id"]] and wrong[0]["why"].startswith(f"{EVAL}: ")
    client = connect(study_copy)
    client.log_metric(frame.loc[5, "run_id"], "train/reward", 0.123, step=80)
    client.delete_run(frame.loc[7, "run_id"])
    code, out, _ = kl_comedy("results", "verify", runs, "--uri", study_copy, "--format", "json")
    verdicts = {row["row"]: row["verdict"] for row in json.loads(out)}
    assert code == 1 and verdicts.pop(frame.loc[5, "run_id"]) == "changed"
    assert verdicts.pop(frame.loc[7, "run_id"]) == "missing" and set(verdicts.values()) == {"same"}
    code, out, _ = kl_comedy("results", "verify", groups, "--uri", study_copy, "--format", "json")
    counts = Counter(row["verdict"] for row in json.loads(out))
    assert code == 1 and counts == {"changed": 1, "missing": 2, "same": 11}


def test_columns_that_the_store_lacks_are_named(kl_comedy, exported, study_copy):
    frame = pd.read_csv(exported("csv"), dtype=str, keep_default_na=False)
    renamed = exported("csv").with_name("renamed.csv")
    frame[["run_id", "params.seed"]].assign(heldout_reward="0.9").to_csv(renamed, index=False)
    code, _, err = kl_comedy("results", "verify", renamed, "--uri", study_copy)
    assert code == 0 and "21 of 21 rows are the same (21 cells)" in err
    assert "not checked, as the store has no such column: heldout_reward" in err
    frame[["run_id"]].assign(heldout_reward="0.9").to_csv(renamed, index=False)
    code, out, err = kl_comedy("results", "verify", renamed, "--uri", study_copy, "--format", "json")
    assert code == 1 and {row["verdict"] for row in json.loads(out)} == {"unchecked"} and "0 of 21 rows" in err


def test_bounds_and_keys_of_a_group_are_checked(kl_comedy, exported, study_copy):
    file = exported("json", *GROUPED)
    rows = json.loads(file.read_text())
    rows[0]["low"], rows[1]["high"], rows[2]["kl.label"] = 0.0, 9.0, "0.1 of another kind"
    file.write_text(json.dumps(rows))
    code, out, _ = kl_comedy("results", "verify", file, "--uri", study_copy)
    assert code == 1 and out.count("changed") == 3 and all(f"{name}: " in out for name in ("low", "high", "kl.label"))


def test_what_is_no_table_of_runs_says_so(kl_comedy, study, tmp_path):
    for name, content, message in (
        ("a.csv", "name,mean\nx,1\n", "names no runs"),
        ("a.json", "[]", "holds no rows"),
        ("a.json", "{", "cannot be read"),
        ("a.txt", "x", "allowed: a table"),
    ):
        (tmp_path / name).write_text(content)
        code, out, err = kl_comedy("results", "verify", tmp_path / name, "--uri", study)
        assert (code, out) == (2, "") and message in err and len(err.strip().splitlines()) == 1
    assert kl_comedy("results", "verify", tmp_path / "absent.csv", "--uri", study)[0] == 2
    assert kl_comedy("results", "table", "--uri", study, "--run-ids")[0] == 2


def test_metrics_are_equal_near_different_or_absent():
    nan, inf = float("nan"), float("inf")
    was = {"a": 1.0, "b": 1.0, "c": 1.0, "d": nan, "e": inf, "f": nan, "time/x": 1.0, "gone": 0.0}
    now = {"a": 1.0, "b": 1.0005, "c": 1.1, "d": nan, "e": inf, "f": 1.0, "time/x": 9.0, "new": 0.0}
    verdicts = {row["metric"]: row["verdict"] for row in compare_metrics(was, now)}
    expected = {"equal": "ade", "near": "b", "different": "cf"}
    assert verdicts == {name: verdict for verdict, names in expected.items() for name in names} | {
        "gone": "absent",
        "new": "new",
    }


def test_a_run_reproduces_to_the_bit_and_a_forged_one_does_not(kl_comedy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    words = ["model.options.warmstart_steps=5", "train.steps=2", "train.eval_every=0", "rollout.max_new_tokens=6"]
    code, _, err = kl_comedy("train", TINY, *words, f"tracking.uri={uri}")
    assert code == 0, err
    (row,) = runs_frame(uri).to_dict("records")
    files = {item.path for item in connect(uri).list_artifacts(row["run_id"], "provenance")}
    assert "provenance/packages.txt" in files
    assert ("provenance/code.diff" in files) == (row["tags.git.dirty"] == "true")
    code, out, err = kl_comedy("reproduce", row["run_id"][:8], "--uri", uri, "--format", "json")
    rows = json.loads(out)
    assert code == 0 and {item["verdict"] for item in rows} == {"equal"} and len(rows) > 40
    assert "code, packages and machine are what they were" in err and len(runs_frame(uri)) == 1
    export = tmp_path / "export.parquet"
    words = ["--uri", uri, "--without", "run.*,output,tracking.*", "--out", export]
    assert kl_comedy("results", "export", *words)[0] == 0
    pd.read_parquet(export).assign(**{"tags.reference.hash": "ab", "metrics.train/loss": 9.0}).to_parquet(export)
    words = ["--uri", export, "--tolerance", "train/r*=0.5,grad/norm=1", "--format", "json"]
    code, out, err = kl_comedy("reproduce", row["run_name"], *words)
    assert code == 0 and {item["verdict"] for item in json.loads(out)} == {"equal"}, err
    assert {item["metric"].partition("/")[2][:4] for item in json.loads(out)} == {"norm", "rewa"}
    file = f"runs/reproduced/{row['run_name']}.inputs/config.yaml"
    assert f"runs now: kl-comedy train {file} output=runs/reproduced resume=never tracking.uri=none\n" in err
    assert f"git checkout {row['tags.git.commit']}\n" in err and "what a config means" not in err
    assert "training started from other weights" in err and "and then ab; expect other numbers" in err
    connect(uri).log_metric(row["run_id"], "train/reward", 7.0, step=50)
    code, out, err = kl_comedy("reproduce", row["run_name"], "--uri", uri)
    assert code == 1 and "does not reproduce here" in err and "1 different" in err and "train/reward" in out
    assert kl_comedy("reproduce", "nothing", "--uri", uri)[0] == 2
    assert kl_comedy("reproduce", row["run_name"], "--uri", uri, "--tolerance", "reward=x")[0] == 2


@pytest.mark.slow
def test_a_run_reproduces_within_the_tolerance_under_other_kernels(kl_comedy, tmp_path, monkeypatch):
    """Kernels for another processor round differently: what a run on another machine does."""
    monkeypatch.chdir(tmp_path)
    uri, export = f"sqlite:///{tmp_path}/mlflow.db", tmp_path / "export.parquet"
    words = ["model.options.warmstart_steps=5", "train.steps=2", "train.eval_every=2", "rollout.max_new_tokens=6"]
    assert kl_comedy("train", TINY, *words, f"tracking.uri={uri}")[0] == 0
    assert kl_comedy("results", "export", "--uri", uri, "--out", export)[0] == 0
    (name,) = pd.read_parquet(export)["run_name"]
    command = [sys.executable, "-m", "kl_comedy.cli", "reproduce", name, "--uri", export, "--format", "json"]
    env = {**os.environ, "ATEN_CPU_CAPABILITY": "default", "DNNL_MAX_CPU_ISA": "SSE41"}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    verdicts = {row["verdict"] for row in json.loads(done.stdout)}
    assert done.returncode == 0 and verdicts == {"equal", "near"}, done.stderr
