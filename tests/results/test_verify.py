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

from kl_comedy.errors import UserError
from kl_comedy.results.runs import runs_frame
from kl_comedy.results.verify import compare_metrics, find_run
from kl_comedy.tracking.store import connect
from study_runs import EVAL

TINY = Path(__file__).parents[1] / "support" / "tiny.yaml"


@pytest.fixture
def exported(kl_comedy, study_copy, tmp_path):
    """A file of the study: its runs, or a table with the ids of each row's runs."""

    def write(suffix, *table_options):
        file = tmp_path / f"table.{suffix}"
        command = ["export"]
        if table_options:
            command = ["table", "--run-ids", *table_options]
        code, _, err = kl_comedy("results", *command, "--uri", study_copy, "--format", suffix, "--out", file)
        assert code == 0, err
        return file

    return write


GROUPED = ("--group", "kl.label", "--metric", f"{EVAL},train/reward")


@pytest.mark.parametrize(
    ("suffix", "table_options", "n_rows"),
    [
        ("csv", (), 21),
        ("parquet", (), 21),
        ("json", GROUPED, 14),
        ("csv", (*GROUPED, "--of", "mean:2"), 14),
    ],
    ids=["runs", "runs in parquet", "groups", "mean of 2"],
)
def test_a_fresh_table_is_the_same(kl_comedy, exported, study_copy, suffix, table_options, n_rows):
    code, out, err = kl_comedy("results", "verify", exported(suffix, *table_options), "--uri", study_copy)
    assert code == 0
    assert out == ""
    assert f"{n_rows} of {n_rows} rows are the same" in err
    n_cells = int(re.search(r"\((\d+) cells\)", err)[1])
    assert n_cells >= 2 * n_rows


def test_a_text_that_may_begin_a_formula_is_the_same_in_csv(kl_comedy, exported, study_copy):
    client = connect(study_copy)
    run_id = pd.read_csv(exported("csv"), dtype=str)["run_id"][0]
    client.set_tag(run_id, "note", "-c, or =1+1")
    file = exported("csv")
    assert "'-c, or =1+1" in file.read_text()
    code, _, err = kl_comedy("results", "verify", file, "--uri", study_copy)
    assert code == 0, err


def test_a_changed_cell_is_named(kl_comedy, exported, study_copy):
    file = exported("csv")
    frame = pd.read_csv(file, dtype=str, keep_default_na=False)
    frame.loc[3, f"metrics.{EVAL}"] = str(float(frame.loc[3, f"metrics.{EVAL}"]) + 1e-9)
    frame.to_csv(file, index=False)
    code, out, err = kl_comedy("results", "verify", file, "--uri", study_copy, "--format", "json")
    assert code == 1
    assert "1 rows of" in err
    (wrong,) = [row for row in json.loads(out) if row["verdict"] != "same"]
    assert wrong["row"] == frame.loc[3, "run_id"]
    assert wrong["why"].startswith(f"{EVAL}: ")


def test_a_new_value_and_a_deleted_run_are_named(kl_comedy, exported, study_copy):
    runs = exported("csv")
    groups = exported("json", *GROUPED)
    frame = pd.read_csv(runs, dtype=str, keep_default_na=False)
    client = connect(study_copy)
    client.log_metric(frame.loc[5, "run_id"], "train/reward", 0.123, step=80)
    client.delete_run(frame.loc[7, "run_id"])
    code, out, _ = kl_comedy("results", "verify", runs, "--uri", study_copy, "--format", "json")
    verdicts = {row["row"]: row["verdict"] for row in json.loads(out)}
    assert code == 1
    assert verdicts.pop(frame.loc[5, "run_id"]) == "changed"
    assert verdicts.pop(frame.loc[7, "run_id"]) == "missing"
    assert set(verdicts.values()) == {"same"}
    code, out, _ = kl_comedy("results", "verify", groups, "--uri", study_copy, "--format", "json")
    counts = Counter(row["verdict"] for row in json.loads(out))
    assert code == 1
    assert counts == {"changed": 1, "missing": 2, "same": 11}


def test_a_run_is_found_by_its_folder_where_names_repeat(study):
    with pytest.raises(UserError, match="'study s0', which matches 7 runs of the store; name one by its id or folder"):
        find_run(study, "study s0")
    row = find_run(study, "k3-0.1-0")
    assert (row["params.kl"], row["params.seed"]) == ("0.1 k3_reverse_token in loss", "0")
    assert find_run(study, row["run_id"][:10])["run_id"] == row["run_id"]


def test_columns_that_the_store_lacks_are_named(kl_comedy, exported, study_copy):
    frame = pd.read_csv(exported("csv"), dtype=str, keep_default_na=False)
    renamed = exported("csv").with_name("renamed.csv")
    frame[["run_id", "params.seed"]].assign(heldout_reward="0.9").to_csv(renamed, index=False)
    code, _, err = kl_comedy("results", "verify", renamed, "--uri", study_copy)
    assert code == 0
    assert "21 of 21 rows are the same (21 cells)" in err
    assert "not checked, as the store has no such column: heldout_reward" in err
    frame[["run_id"]].assign(heldout_reward="0.9").to_csv(renamed, index=False)
    code, out, err = kl_comedy("results", "verify", renamed, "--uri", study_copy, "--format", "json")
    assert code == 1
    assert {row["verdict"] for row in json.loads(out)} == {"unchecked"}
    assert "0 of 21 rows" in err


def test_bounds_and_keys_of_a_group_are_checked(kl_comedy, exported, study_copy):
    file = exported("json", *GROUPED)
    rows = json.loads(file.read_text())
    rows[0]["low"] = 0.0
    rows[1]["high"] = 9.0
    rows[2]["kl.label"] = "0.1 of another kind"
    file.write_text(json.dumps(rows))
    code, out, _ = kl_comedy("results", "verify", file, "--uri", study_copy)
    assert code == 1
    assert out.count("changed") == 3
    assert "low: " in out
    assert "high: " in out
    assert "kl.label: " in out


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "name,mean\nx,1\n", "names no runs"),
        ("a.json", "[]", "holds no rows"),
        ("a.json", "{", "cannot be read"),
        ("a.txt", "x", "allowed: a table"),
    ],
)
def test_what_is_no_table_of_runs_says_so(kl_comedy, study, tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    code, out, err = kl_comedy("results", "verify", tmp_path / name, "--uri", study)
    assert code == 2
    assert out == ""
    assert message in err
    assert len(err.strip().splitlines()) == 1


def test_a_table_that_does_not_exist_is_refused(kl_comedy, study, tmp_path):
    assert kl_comedy("results", "verify", tmp_path / "absent.csv", "--uri", study)[0] == 2


def test_run_ids_need_a_format_for_programs(kl_comedy, study):
    assert kl_comedy("results", "table", "--uri", study, "--run-ids")[0] == 2


NAN = float("nan")
INF = float("inf")


def verdicts(before, after):
    return {row["metric"]: row["verdict"] for row in compare_metrics(before, after)}


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        (1.0, 1.0, "equal"),
        (NAN, NAN, "equal"),
        (INF, INF, "equal"),
        (1.0, 1.0005, "near"),
        (1.0, 1.1, "different"),
        (NAN, 1.0, "different"),
    ],
)
def test_a_metric_is_equal_near_or_different(before, after, verdict):
    assert verdicts({"a": before}, {"a": after}) == {"a": verdict}


def test_a_metric_is_absent_or_new_and_times_are_left_out():
    before = {"gone": 0.0, "time/x": 1.0}
    after = {"new": 0.0, "time/x": 9.0}
    assert verdicts(before, after) == {"gone": "absent", "new": "new"}


def test_a_run_reproduces_to_the_bit_and_a_forged_one_does_not(kl_comedy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    settings = ["model.options.warmstart_steps=5", "train.steps=2", "train.eval_every=0", "rollout.max_new_tokens=6"]
    code, _, err = kl_comedy("train", TINY, *settings, f"tracking.uri={uri}")
    assert code == 0, err
    (row,) = runs_frame(uri).to_dict("records")
    files = {item.path for item in connect(uri).list_artifacts(row["run_id"], "provenance")}
    assert "provenance/packages.txt" in files
    assert ("provenance/code.diff" in files) == (row["tags.git.dirty"] == "true")
    code, out, err = kl_comedy("reproduce", row["run_id"][:8], "--uri", uri, "--format", "json")
    rows = json.loads(out)
    assert code == 0
    assert {item["verdict"] for item in rows} == {"equal"}
    assert len(rows) > 40
    assert "code, packages and machine are what they were" in err
    assert len(runs_frame(uri)) == 1

    # From an export: another reference is named; only the metrics of --tolerance are compared.
    export = tmp_path / "export.parquet"
    options = ["--uri", uri, "--without", "run.*,output,tracking.*", "--out", export]
    assert kl_comedy("results", "export", *options)[0] == 0
    pd.read_parquet(export).assign(**{"tags.reference.hash": "ab", "metrics.train/loss": 9.0}).to_parquet(export)
    options = ["--uri", export, "--tolerance", "train/r*=0.5,grad/norm=1", "--format", "json"]
    code, out, err = kl_comedy("reproduce", row["run_name"], *options)
    assert code == 0, err
    assert {item["verdict"] for item in json.loads(out)} == {"equal"}, err
    assert {item["metric"].partition("/")[2][:4] for item in json.loads(out)} == {"norm", "rewa"}
    config = f"runs/reproduced/{row['tags.run_folder']}-{row['run_id'][:8]}.inputs/config.yaml"
    assert f"runs now: kl-comedy train {config} output=runs/reproduced resume=never tracking.uri=none\n" in err
    assert f"git checkout {row['tags.git.commit']}\n" in err
    assert "what a config means" not in err
    assert "training started from other weights" in err
    assert "and then ab; expect other numbers" in err

    # A forged value.
    connect(uri).log_metric(row["run_id"], "train/reward", 7.0, step=50)
    code, out, err = kl_comedy("reproduce", row["run_name"], "--uri", uri)
    assert code == 1
    assert "does not reproduce here" in err
    assert "1 different" in err
    assert "train/reward" in out
    assert kl_comedy("reproduce", "nothing", "--uri", uri)[0] == 2
    assert kl_comedy("reproduce", row["run_name"], "--uri", uri, "--tolerance", "reward=x")[0] == 2


@pytest.mark.slow
def test_a_run_reproduces_within_the_tolerance_under_other_kernels(kl_comedy, tmp_path, monkeypatch):
    """Kernels for another processor round differently: what a run on another machine does."""
    monkeypatch.chdir(tmp_path)
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    export = tmp_path / "export.parquet"
    settings = ["model.options.warmstart_steps=5", "train.steps=2", "train.eval_every=2", "rollout.max_new_tokens=6"]
    assert kl_comedy("train", TINY, *settings, f"tracking.uri={uri}")[0] == 0
    assert kl_comedy("results", "export", "--uri", uri, "--out", export)[0] == 0
    (name,) = pd.read_parquet(export)["run_name"]
    command = [sys.executable, "-m", "kl_comedy.cli", "reproduce", name, "--uri", export, "--format", "json"]
    env = {**os.environ, "ATEN_CPU_CAPABILITY": "default", "DNNL_MAX_CPU_ISA": "SSE41"}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    verdicts = {row["verdict"] for row in json.loads(done.stdout)}
    assert done.returncode == 0, done.stderr
    assert verdicts == {"equal", "near"}, done.stderr
