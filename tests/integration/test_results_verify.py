"""Tables against their store, and a run against itself."""

import json
import re
from pathlib import Path

import pandas as pd
import pytest
from study_runs import EVAL

from kl_comedy.tracking.runs import runs_frame
from kl_comedy.tracking.store import connect
from kl_comedy.tracking.verify import compare_metrics

TINY = Path(__file__).parent / "tiny.yaml"


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
    client.log_metric(frame.loc[5, "run_id"], "train/reward", 0.123, step=100)
    client.delete_run(frame.loc[7, "run_id"])
    code, out, _ = kl_comedy("results", "verify", runs, "--uri", study_copy, "--format", "json")
    verdicts = {row["row"]: row["verdict"] for row in json.loads(out)}
    assert code == 1 and verdicts.pop(frame.loc[5, "run_id"]) == "changed"
    assert verdicts.pop(frame.loc[7, "run_id"]) == "missing" and set(verdicts.values()) == {"same"}
    code, out, _ = kl_comedy("results", "verify", groups, "--uri", study_copy, "--format", "json")
    found = [row["verdict"] for row in json.loads(out)]
    assert code == 1 and found.count("changed") == 1 and found.count("missing") == 2 and found.count("same") == 11


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
    found = {item.metric: item.verdict for item in compare_metrics(was, now)}
    assert found == {
        "a": "equal",
        "b": "near",
        "c": "different",
        "d": "equal",
        "e": "equal",
        "f": "different",
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
    found = json.loads(out)
    assert code == 0 and {item["verdict"] for item in found} == {"equal"} and len(found) > 40
    assert "code, packages and machine are what they were" in err and len(runs_frame(uri)) == 1
    connect(uri).log_metric(row["run_id"], "train/reward", 7.0, step=50)
    code, out, err = kl_comedy("reproduce", row["run_name"], "--uri", uri)
    assert code == 1 and "does not reproduce here" in err and "1 different" in err and "train/reward" in out
    assert kl_comedy("reproduce", "nothing", "--uri", uri)[0] == 2
