"""Questions to a store with a study in it: values, collapse, comparisons, pictures, exports, mistakes."""

import json
import re
import sqlite3
import subprocess
import sys

import pandas as pd
import pytest

from kl_comedy.tracking.runs import history, runs_frame
from kl_comedy.tracking.store import sqlite_file
from kl_comedy.tracking.values import tidy, with_values
from study_runs import COMMIT, EVAL, track

K1, K3 = "k1_reverse_token in reward total", "k3_reverse_token in loss"


@pytest.fixture
def ask(kl_comedy, study):
    """A command on the study: exit code, the rows of its JSON (or stdout), stderr."""

    def ask(*words, command="table", uri=study):
        code, out, err = kl_comedy("results", command, "--uri", uri, "--format", "json", *words)
        return code, json.loads(out) if code == 0 else out, err

    return ask


def test_runs_curves_and_values(study):
    for where, runs in (("", 21), ("seed = 1", 7), ("train/reward > 0.5 and tags.kl.label LIKE 'no%'", 3)):
        assert len(runs_frame(study, where=where)) == runs
    frame = runs_frame(study)
    curves = history(study, frame["run_id"], EVAL)
    assert len(curves) == 63 and curves["step"].tolist() == [0, 40, 80] * 21
    run = frame[(frame["params.kl"] == f"0.05 {K1}") & (frame["params.seed"] == "0")]
    for of, value in (("last", 0.7), ("first", 0.4), ("best", 0.7), ("lowest", 0.4), ("mean:2", 0.625), ("area", 0.55)):
        values = with_values(study, run, [f"metrics.{EVAL}"], of)[f"metrics.{EVAL}"]
        assert values.tolist() == [pytest.approx(value)], of
    long = tidy(study, frame, ["kl.family", "kl.betas"], [EVAL, "train/reward"])
    assert len(long) == 42 and list(long) == ["run_id", "status", "seed", "kl.family", "kl.betas", "metric", "value"]
    cell = long[(long["kl.family"] == K1) & (long["kl.betas"] == "0.3") & (long["metric"] == EVAL)]
    assert sorted(cell["value"]) == pytest.approx([0.5, 0.51, 0.52])


def test_table_defaults_formats_and_notes(kl_comedy, study):
    def table(*words):
        return kl_comedy("results", "table", "--uri", study, *words)

    code, out, err = table("--where", "tags.kl.label LIKE '0.1 %'")
    header, _, *rows = out.splitlines()
    assert code == 0 and err == "" and len(rows) == 2
    assert " ".join(header.split()) == "name kl.label n eval/heldout/reward train/reward runs failed collapsed"
    assert "0.61 [0.5852, 0.6348]" in out, "Student's t: 4.303 * 0.01 / sqrt(3)"
    for format, mark in (("markdown", "|---"), ("latex", r"\toprule"), ("csv", "name,kl.label,metric,n,mean")):
        assert mark in table("--format", format)[1]
    assert "0.51" in table("--where", "tags.kl.label LIKE '0.1 k3%'", "--interval", "bootstrap")[1]
    code, out, err = table("--group", "name", "--metric", EVAL, "--format", "json")
    assert code == 0 and "runs differ in kl and are separate rows" in err and len(json.loads(out)) == 7
    _, out, err = table("--status", "running")
    assert "--status all" in err and " - " in out
    assert "Example: kl-comedy results table" in " ".join(table("--help")[1].split())


def test_collapsed_runs_are_counted_and_stay_in_the_mean(ask):
    code, rows, err = ask("--group", "kl.family,kl.betas", "--metric", EVAL)
    assert code == 0 and "1 of 21 runs collapsed (eval/heldout/reward < 0.5 start)" in err
    lost = {(row["kl.family"], row["kl.betas"]): row["collapsed"] for row in rows}
    assert lost.pop((K3, "0.05")) == 1 and set(lost.values()) == {0}
    (row,) = [row for row in rows if row["collapsed"]]
    assert (row["n"], row["mean"]) == (3, pytest.approx((0.5 + 0.51) / 3))
    _, rows, err = ask("--group", "kl.family", "--metric", EVAL, "--collapse", "eval/heldout/reward <= 0.415")
    assert sum(row["collapsed"] for row in rows) == 3 and "--collapse" not in err
    for count, expected in ((1, 9), (2, 2), (3, 0), (4, 0)):  # the first value is 0.4, and there are three
        rule = f"eval/heldout/reward > 0.55 last {count}"
        _, rows, _ = ask("--group", "kl.family", "--metric", EVAL, "--collapse", rule)
        assert sum(row["collapsed"] for row in rows) == expected, count


def test_equal_beta_is_paired_over_seeds(ask):
    code, rows, _ = ask("--metric", EVAL, "--baseline", K3, command="compare")
    by_cell = {(row["kl.family"], row["at"]): row for row in rows}
    tenth = by_cell[K1, "beta 0.1"]
    assert code == 0 and tenth["minus_baseline"] == pytest.approx(0.1) and tenth["pairs"] == 3
    assert tenth["difference_low"] == pytest.approx(0.1, abs=1e-9), "the seeds' differences cancel"
    assert by_cell[K1, "beta 0.05"]["difference_low"] < 0 and by_cell["no KL", "beta 0"]["minus_baseline"] is None
    _, rows, _ = ask("--metric", EVAL, "--baseline", "no KL", command="compare")
    assert {row["minus_baseline"] is None for row in rows if row["kl.family"] != "no KL"} == {False}


def test_contrasts_are_adjusted_and_equivalence_has_a_margin(ask):
    _, rows, _ = ask("--metric", EVAL, "--baseline", K3, "--margin", "0.15", command="compare")
    tested = [row for row in rows if row["p"] is not None]
    assert tested and all(row["p_holm"] >= row["p"] for row in tested)
    (tenth,) = [row for row in rows if (row["kl.family"], row["at"]) == (K1, "beta 0.1")]
    assert tenth["p_equivalent"] < 0.05, "0.1 in every seed"
    assert "p_equivalent" not in ask("--metric", EVAL, "--baseline", K3, command="compare")[1][0]


def test_equal_kl_is_interpolated_and_never_left(ask):
    words = ("--metric", EVAL, "--at-kl", "2.5,4,20", "--baseline", K3)
    code, rows, err = ask(*words, command="compare")
    by_cell = {(row["kl.family"], row["at"]): row for row in rows}
    assert code == 0 and "eval/heldout/kl/exact_reverse_sequence (nats" in err
    k1, k3 = by_cell[K1, "KL 2.5"], by_cell[K3, "KL 2.5"]
    assert (k1["n"], k1["mean"], k1["collapsed"]) == (3, pytest.approx(0.66), 0)
    assert (k3["n"], k3["gap"], k3["collapsed"]) == (3, 0, 1)
    assert k3["mean"] == pytest.approx((0.5 + 0.51 + (5 * 0.52 + 0.62) / 6) / 3)
    assert k1["minus_baseline"] == pytest.approx(k1["mean"] - k3["mean"]) and k1["pairs"] == 3
    assert by_cell[K1, "KL 4"]["mean"] == pytest.approx((0.7 + 0.6) / 2 + 0.01), "no KL is beta 0 of every family"
    low = ("--metric", EVAL, "--at-kl", "0", "--from-start")
    means = [row["mean"] for row in ask(*low, command="compare")[1]]
    assert means == pytest.approx([0.4] * len(means)), "every frontier begins at the start"
    k1, k3 = by_cell[K1, "KL 20"], by_cell[K3, "KL 20"]
    assert (k1["n"], k1["outside"], k1["pairs"], k1["minus_baseline"]) == (0, 3, 0, None)
    assert (k3["n"], k3["outside"], k3["gap"]) == (0, 2, 1)


def test_several_tasks_as_one_number(ask):
    words = ("--metric", f"{EVAL},train/reward", "--group", "kl.family", "--pool", "kl", "--baseline", "no KL")
    code, rows, _ = ask(*words, command="aggregate")
    by_family = {row["kl.family"]: row for row in rows}
    assert code == 0 and by_family[K1]["tasks"] == 2 and by_family[K1]["scores"] == 6
    assert by_family["no KL"]["iqm"] == pytest.approx(0.61) and by_family["no KL"]["p_better"] is None
    k1 = by_family[K1]
    assert by_family[K3]["p_better"] == 0.0 and k1["p_low"] < k1["p_better"] < k1["p_high"]


def test_pictures(kl_comedy, study, tmp_path):
    def plot(name, *words):
        options = ["--uri", study, "--metric", EVAL, "--out", tmp_path / name]
        code, out, err = kl_comedy("results", "plot", *options, *words)
        assert code == 0 and out.strip() == str(tmp_path / name), err
        return (tmp_path / name).read_bytes()

    for words, expected, absent in (
        (["curves"], ["no KL", "95% interval of 3 seeds", "held-out reward"], "geometric"),
        (["curves", "--log", EVAL], ["geometric mean"], "smooth"),
        (["frontier"], ["beta 0.05", "some runs collapsed", "held-out exact KL(π‖ref)", "nats"], "relative bias"),
        (["plane"], ["relative bias", "some runs collapsed"], "n=9"),
        (["heatmap"], ["1 of 3", "mean of 3 seeds", "k3 in loss", "beta"], "n=9"),
    ):
        svg = plot("a.svg", "--group", "kl.family", "--kind", *words).decode()
        drawn = " ".join(re.findall(r"<!-- (.*?) -->", svg, re.DOTALL))
        assert all(text in drawn for text in expected) and absent not in drawn, words
        assert not re.search(r"\w_\w|\w/\w*_|heldout", drawn), "no raw keys"
    assert plot("deep/a.png", "--kind", "heatmap").startswith(b"\x89PNG")
    assert plot("a.pdf").startswith(b"%PDF")


def test_the_kl_is_that_of_the_held_out_set_before_other_sets_and_training():
    from kl_comedy.cli.results import kl_column

    names = [f"metrics.{prefix}kl/exact_reverse_sequence" for prefix in ("", "eval/four_terms/", "eval/heldout/")]
    for order, expected in ((names, names[2]), (names[:2], names[1]), (names[:1], names[0])):
        assert kl_column(pd.DataFrame([{"stale": ""} | dict.fromkeys(order, 0.5)]), None) == expected


def test_tables_and_exports_go_to_files_in_every_format(kl_comedy, study, tmp_path):
    for format, read in (("parquet", pd.read_parquet), ("csv", pd.read_csv), ("json", pd.read_json)):
        table, runs = tmp_path / f"a.{format}", tmp_path / f"b.{format}"
        words = ["--metric", EVAL, "--group", "kl.family", "--pool", "kl", "--format", format, "--out", table]
        assert kl_comedy("results", "table", "--uri", study, *words)[:2] == (0, f"{table}\n")
        assert sorted(read(table)["runs"]) == [3, 9, 9] and set(read(table)["n"]) == {3}
        code, _, err = kl_comedy("results", "export", "--uri", study, "--without", "tags.*", "--out", runs)
        rows = read(runs)
        assert code == 0 and "21 runs" in err and len(rows) == 21 and set(map(int, rows["params.seed"])) == {0, 1, 2}
        assert rows["metrics.train/reward"].sum() == pytest.approx(11.09) and "tags.kl.label" not in rows


def test_mistakes_are_one_line(kl_comedy, study, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    metric = ["--metric", EVAL]
    for command, words, code, message in (
        ("table", ["--group", "kl.bet"], 2, "did you mean 'kl.betas'"),
        ("table", ["--pool", "kl.bet"], 2, "--pool: got 'kl.bet'"),
        ("table", ["--metric", "eval/heldout/rewards"], 2, "did you mean 'eval/heldout/reward'"),
        ("table", ["--where", "sed = 0"], 2, "did you mean 'seed'"),
        ("table", ["--where", "seed > 'a'"], 2, "--where"),
        *(("table", ["--where", where], 2, "--where") for where in ("seed = 0; drop table", "seed = 'open", "= &")),
        ("table", ["--where", "seed = 77"], 1, "no runs"),
        ("table", ["--experiment", "studdy"], 2, "did you mean 'study'"),
        ("table", ["--format", "jsn"], 2, "did you mean 'json'"),
        ("table", ["--format", "parquet"], 2, "name a file"),
        ("table", ["--status", "done"], 2, "--status"),
        ("table", ["--uri", "file:///nowhere"], 2, "sqlite:///FILE"),
        ("table", ["--uri", "sqlite:///absent.db"], 2, "no results store"),
        ("table", ["--of", "bst"], 2, "did you mean 'best'"),
        ("table", ["--of", "mean:0"], 2, "--of"),
        ("table", ["--collapse", "r << 1"], 2, "--collapse"),
        ("table", ["--collapse", "eval/heldout/rewrd < 1"], 2, "did you mean 'eval/heldout/reward'"),
        ("compare", [*metric, "--baseline", "no kl"], 2, "did you mean 'no KL'"),
        ("compare", [*metric, "--at-kl", "one"], 2, "--at-kl"),
        ("compare", ["--metric", "*"], 2, "name one"),
        ("compare", [*metric, "--at-kl", "1", "--kl", "kl/exct"], 2, "--kl: got 'kl/exct'"),
        ("compare", [*metric, "--status", "running"], 1, "no run with status running"),
        ("plot", [*metric, "--out", "a.bmp"], 2, "--out"),
        ("plot", ["--metric", "nope", "--out", "a.png"], 2, "--metric"),
        ("plot", [*metric, "--kind", "plan", "--out", "a.png"], 2, "did you mean 'plane'"),
        ("plot", [*metric, "--kind", "plane", "--smooth", "3", "--out", "a.png"], 2, "--of mean:K"),
        ("plot", [*metric, "--kind", "plane", "--log", EVAL, "--out", "a.png"], 2, "only curves"),
        ("plot", [*metric, "--log", "eval/heldout/rewrd", "--out", "a.png"], 2, "did you mean 'eval/heldout/reward'"),
        ("plot", [*metric, "--panels", "kl.beta", "--out", "a.png"], 2, "--panels: got 'kl.beta'"),
        ("export", ["--out", "a.xls"], 2, "--out"),
        ("report", ["--out", "a.pdf"], 2, ".html"),
        ("report", [*metric, "--kl", "nope", "--out", "a.html"], 2, "--kl"),
        ("report", [*metric, "--parts", "kl.famly", "--out", "a.html"], 2, "--parts: got 'kl.famly'"),
    ):
        exit_code, out, err = kl_comedy("results", command, "--uri", study, *words)
        assert (exit_code, out) == (code, "") and message in err, (words, err)
        assert len([line for line in err.splitlines() if "error:" in line or "failed:" in line]) == 1
    assert not list(tmp_path.iterdir())


def test_mixed_code_in_one_group_is_a_warning_and_can_be_parted(ask, study_copy, tmp_path):
    group = ("--group", "kl.family", "--pool", "kl", "--metric", EVAL)
    assert "different code" not in ask(*group)[2]
    tags = {"git.commit": "b" * 40, "git.dirty": "true", "git.diff": "f00"}
    track(tmp_path, study_copy, K1, 0.3, 7, 0.5, 1.0, **tags)
    _, rows, err = ask(*group, uri=study_copy)
    assert len(rows) == 3 and err.count("warning:") == 1 and "(code)" in err
    code, rows, err = ask(*group, "--split-versions", uri=study_copy)
    assert code == 0 and "warning:" not in err
    assert {row["code"] for row in rows} == {COMMIT[:12], "bbbbbbbbbbbb+f00"} and len(rows) == 4


def test_a_store_of_a_newer_mlflow_is_named_and_left_alone(kl_comedy, study_copy):
    file = sqlite_file(study_copy)
    with sqlite3.connect(file) as db:
        db.execute("UPDATE alembic_version SET version_num = 'fedcba987654'")
    before = file.read_bytes()
    code, out, err = kl_comedy("results", "table", "--uri", study_copy)
    assert (code, out) == (2, "") and "newer MLflow" in err and "schema fedcba987654 is unknown" in err
    assert len(err.strip().splitlines()) == 1 and file.read_bytes() == before


@pytest.mark.slow
def test_queries_do_not_load_torch(study):
    script = (
        "import sys\nfrom kl_comedy.cli.results import app\ntry: app()\nexcept SystemExit: pass\n"
        "print([name for name in ('torch', 'mlflow', 'pandas', 'matplotlib') if name in sys.modules])"
    )
    words = [sys.executable, "-c", script, "table", "--uri", study]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "['mlflow', 'pandas']", done.stderr
