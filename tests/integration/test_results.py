"""Questions to a store with a study in it: values, collapse, comparisons, pictures, mistakes."""

import json
import re
import sqlite3

import pandas as pd
import pytest
from study_runs import COMMIT, EVAL, track

from kl_comedy.tracking.runs import history, runs_frame, tidy, with_values
from kl_comedy.tracking.store import sqlite_file

K1, K3 = "k1_reverse_token in reward total", "k3_reverse_token in loss"


@pytest.fixture
def table(kl_comedy, study):
    def ask(*words, command="table", uri=study):
        code, out, err = kl_comedy("results", command, "--uri", uri, "--format", "json", *words)
        return code, json.loads(out) if code == 0 else out, err

    return ask


@pytest.mark.parametrize(
    ("where", "runs"), [("", 21), ("seed = 1", 7), ("train/reward > 0.5 and tags.kl.label LIKE 'no%'", 3)]
)
def test_a_filter_selects_runs(study, where, runs):
    assert len(runs_frame(study, where=where)) == runs


def test_curves_have_a_row_per_run_and_step(study):
    curves = history(study, runs_frame(study)["run_id"], EVAL)
    assert len(curves) == 63 and curves["step"].tolist() == [0, 40, 80] * 21


@pytest.mark.parametrize(
    ("of", "value"), [("last", 0.7), ("first", 0.4), ("best", 0.7), ("lowest", 0.4), ("mean:2", (0.55 + 0.7) / 2)]
)
def test_the_value_of_a_run_follows_the_rule(study, of, value):
    frame = runs_frame(study, where=f"kl = '0.05 {K1}' and seed = 0")
    assert with_values(study, frame, [f"metrics.{EVAL}"], of)[f"metrics.{EVAL}"].tolist() == [pytest.approx(value)]


def test_tidy_is_one_row_a_run_and_metric(study):
    frame = tidy(study, runs_frame(study), ["kl.family", "kl.betas"], [EVAL, "train/reward"])
    assert len(frame) == 42 and list(frame) == ["run_id", "status", "seed", "kl.family", "kl.betas", "metric", "value"]
    cell = frame[(frame["kl.family"] == K1) & (frame["kl.betas"] == "0.3") & (frame["metric"] == EVAL)]
    assert sorted(cell["value"]) == pytest.approx([0.5, 0.51, 0.52])


def test_collapsed_runs_are_counted_and_stay_in_the_mean(table):
    code, rows, err = table("--group", "kl.family,kl.betas", "--metric", EVAL)
    assert code == 0 and "1 of 21 runs collapsed (eval/heldout/reward < 0.5 start)" in err
    lost = {(row["kl.family"], row["kl.betas"]): row["collapsed"] for row in rows}
    assert lost.pop((K3, "0.05")) == 1 and set(lost.values()) == {0}
    (row,) = [row for row in rows if row["collapsed"]]
    assert (row["n"], row["mean"]) == (3, pytest.approx((0.5 + 0.51) / 3))
    _, rows, err = table("--group", "kl.family", "--metric", EVAL, "--collapse", "eval/heldout/reward <= 0.415")
    assert sum(row["collapsed"] for row in rows) == 3 and "--collapse" not in err


def test_equal_beta_is_paired_over_seeds(table):
    code, rows, _ = table("--metric", EVAL, "--baseline", K3, command="compare")
    found = {(row["kl.family"], row["at"]): row for row in rows}
    tenth = found[K1, "beta 0.1"]
    assert code == 0 and tenth["minus_baseline"] == pytest.approx(0.1) and tenth["pairs"] == 3
    assert tenth["difference_low"] == pytest.approx(0.1, abs=1e-9)  # the seeds' own differences cancel
    assert found[K1, "beta 0.05"]["difference_low"] < 0 and found["no KL", "beta 0"]["minus_baseline"] is None
    _, rows, _ = table("--metric", EVAL, "--baseline", "no KL", command="compare")
    assert {row["minus_baseline"] is None for row in rows if row["kl.family"] != "no KL"} == {False}


def test_equal_kl_is_interpolated_and_never_left(table):
    words = ("--metric", EVAL, "--at-kl", "2.5,4,20", "--baseline", K3)
    code, rows, err = table(*words, command="compare")
    found = {(row["kl.family"], row["at"]): row for row in rows}
    assert code == 0 and "eval/heldout/kl/exact_reverse_sequence (nats" in err
    k1, k3 = found[K1, "KL 2.5"], found[K3, "KL 2.5"]
    assert (k1["n"], k1["mean"], k1["collapsed"]) == (3, pytest.approx(0.66), 0)
    assert (k3["n"], k3["mean"], k3["gap"], k3["collapsed"]) == (
        3,
        pytest.approx((0.5 + 0.51 + (5 * 0.52 + 0.62) / 6) / 3),
        0,
        1,
    )
    assert found[K1, "KL 4"]["mean"] == pytest.approx((0.7 + 0.6) / 2 + 0.01)  # none is beta 0 of every family
    assert (found[K1, "KL 20"]["n"], found[K1, "KL 20"]["outside"]) == (0, 3)
    assert (found[K3, "KL 20"]["n"], found[K3, "KL 20"]["outside"], found[K3, "KL 20"]["gap"]) == (0, 2, 1)
    assert k1["pairs"] == 3 and found[K1, "KL 20"]["pairs"] == 0 and found[K1, "KL 20"]["minus_baseline"] is None


def test_several_tasks_as_one_number(table):
    words = ("--metric", f"{EVAL},train/reward", "--group", "kl.family", "--baseline", "no KL")
    code, rows, _ = table(*words, command="aggregate")
    found = {row["kl.family"]: row for row in rows}
    assert code == 0 and found[K1]["tasks"] == 2 and found[K1]["scores"] == 18
    assert found["no KL"]["iqm"] == pytest.approx(0.61) and found["no KL"]["p_better"] is None
    assert found[K3]["p_better"] == 0.0 and found[K1]["p_low"] < found[K1]["p_better"] < found[K1]["p_high"]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("curves", ["no KL", "n=3"]),
        ("frontier", ["0.05 (1/3)", "exact_reverse_sequence (nats)"]),
        ("plane", ["relative bias", "0.05 (1/3)"]),
        ("heatmap", ["1 collapsed", "n=3", "k3_reverse_token", "beta 0.05"]),
    ],
)
def test_pictures(kl_comedy, study, tmp_path, kind, said):
    words = ["--metric", EVAL, "--group", "kl.family", "--kind", kind, "--out", tmp_path / "a.svg"]
    code, out, _ = kl_comedy("results", "plot", "--uri", study, *words)
    texts = " ".join(re.findall(r"<!-- (.*?) -->", (tmp_path / "a.svg").read_text(), re.DOTALL))
    assert code == 0 and out.strip() == str(tmp_path / "a.svg")
    for text in said:
        assert text in texts


def test_panels_are_chosen(kl_comedy, study, tmp_path):
    words = ["--uri", study, "--metric", EVAL, "--kind", "heatmap", "--out", tmp_path / "a.svg", "--panels"]
    assert kl_comedy("results", "plot", *words, "none")[0] == 0
    assert "n=9" in (tmp_path / "a.svg").read_text() and "beta 0.05" not in (tmp_path / "a.svg").read_text()
    said = kl_comedy("results", "plot", *words, "kl.beta")[2]
    assert "--panels: got 'kl.beta'" in said and "did you mean 'kl.betas'" in said


def test_curves_may_have_a_logarithmic_axis(kl_comedy, study, tmp_path):
    words = ["--uri", study, "--metric", f"{EVAL},train/reward", "--out", tmp_path / "a.svg"]
    assert kl_comedy("results", "plot", *words, "--log", "train/reward")[0] == 0
    logarithmic = (tmp_path / "a.svg").read_text()
    assert kl_comedy("results", "plot", *words)[0] == 0
    assert "10^" in logarithmic and "10^" not in (tmp_path / "a.svg").read_text()
    code, _, err = kl_comedy("results", "plot", *words, "--log", "train/rewrd")
    assert code == 2 and "did you mean 'train/reward'" in err
    assert "only curves" in kl_comedy("results", "plot", *words, "--kind", "heatmap", "--log", "train/reward")[2]


def test_tables_go_to_files_in_every_format(kl_comedy, study, tmp_path):
    for format, read in (("parquet", pd.read_parquet), ("csv", pd.read_csv), ("json", pd.read_json)):
        file = tmp_path / f"a.{format}"
        words = ["--metric", EVAL, "--group", "kl.family", "--format", format, "--out", file]
        assert kl_comedy("results", "table", "--uri", study, *words)[:2] == (0, f"{file}\n")
        assert sorted(read(file)["n"]) == [3, 9, 9]


@pytest.mark.parametrize(
    ("command", "words", "code", "said"),
    [
        ("table", ["--metric", "eval/heldout/rewards"], 2, "did you mean 'eval/heldout/reward'"),
        ("table", ["--of", "bst"], 2, "did you mean 'best'"),
        ("table", ["--of", "mean:0"], 2, "--of"),
        ("table", ["--collapse", "r << 1"], 2, "--collapse"),
        ("table", ["--collapse", "eval/heldout/rewrd < 1"], 2, "did you mean 'eval/heldout/reward'"),
        ("table", ["--format", "parquet"], 2, "name a file"),
        ("table", ["--where", "seed = 77"], 1, "no runs"),
        ("compare", ["--metric", EVAL, "--baseline", "no kl"], 2, "did you mean 'no KL'"),
        ("compare", ["--metric", EVAL, "--at-kl", "one"], 2, "--at-kl"),
        ("compare", ["--metric", "*"], 2, "name one"),
        ("compare", ["--metric", EVAL, "--at-kl", "1", "--kl", "kl/exct"], 2, "no such key"),
        ("plot", ["--metric", EVAL, "--kind", "plan", "--out", "a.png"], 2, "did you mean 'plane'"),
        ("plot", ["--metric", EVAL, "--kind", "plane", "--smooth", "3", "--out", "a.png"], 2, "--of mean:K"),
    ],
)
def test_mistakes_are_one_line(kl_comedy, study, command, words, code, said):
    found, out, err = kl_comedy("results", command, "--uri", study, *words)
    assert (found, out) == (code, "") and said in err
    assert len([line for line in err.splitlines() if "error:" in line or "failed:" in line]) == 1


def test_mixed_code_in_one_group_is_a_warning_and_can_be_parted(table, study_copy, study_folder, tmp_path):
    group = ("--group", "kl.family", "--metric", EVAL)
    assert "different code" not in table(*group)[2]
    tags = {"git.commit": "b" * 40, "git.dirty": "true", "git.diff": "f00"}
    track(tmp_path, study_copy, K1, 0.3, 7, 0.5, 1.0, **tags)
    _, rows, err = table(*group, uri=study_copy)
    assert len(rows) == 3 and err.count("warning:") == 1 and "(code)" in err
    code, rows, err = table(*group, "--split-versions", uri=study_copy)
    assert code == 0 and "warning:" not in err
    assert {row["code"] for row in rows} == {COMMIT[:12], "bbbbbbbbbbbb+f00"} and len(rows) == 4


def test_a_store_of_a_newer_mlflow_says_so_and_is_left_alone(kl_comedy, study_copy):
    file = sqlite_file(study_copy)
    with sqlite3.connect(file) as db:
        db.execute("UPDATE alembic_version SET version_num = 'fedcba987654'")
    before = file.read_bytes()
    code, out, err = kl_comedy("results", "table", "--uri", study_copy)
    assert (code, out) == (2, "") and "newer MLflow" in err and "schema fedcba987654 is unknown" in err
    assert len(err.strip().splitlines()) == 1 and file.read_bytes() == before
