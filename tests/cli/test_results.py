"""Questions to a store with a study in it: values, collapse, comparisons, pictures, exports, mistakes."""

import json
import re
import sqlite3
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from kl_comedy.results.runs import history, runs_frame
from kl_comedy.results.values import tidy, with_values
from kl_comedy.tracking.store import sqlite_file
from study_runs import COMMIT, EVAL, track
from svg_texts import texts_of, tree_of

K1 = "k1_reverse_token in reward total"
K3 = "k3_reverse_token in loss"


SEEDS = 3
RUNS = 7 * SEEDS
"""Of the study: no KL, and two families with three betas each."""

EVIDENCE = Path(__file__).parents[2] / "results" / "evidence" / "export.parquet"


@pytest.fixture
def ask(kl_comedy, study):
    """The rows of a command on the study, which must succeed, and its stderr."""

    def ask(*arguments, command="table", uri=study):
        code, out, err = kl_comedy("results", command, "--uri", uri, "--format", "json", *arguments)
        assert code == 0, err
        return json.loads(out), err

    return ask


@pytest.fixture
def table(kl_comedy, study):
    """``results table`` on the study: its exit code, stdout and stderr."""

    def table(*arguments):
        return kl_comedy("results", "table", "--uri", study, *arguments)

    return table


@pytest.mark.parametrize(
    ("where", "n_runs"),
    [
        ("", RUNS),
        ("seed = 1", 7),
        ("kl.family = 'no KL' and seed = 1", 1),
        ("train/reward > 0.5 and tags.kl.label LIKE 'no%'", 3),
    ],
)
def test_a_filter_chooses_runs(study, where, n_runs):
    assert len(runs_frame(study, where=where)) == n_runs


def test_a_curve_has_the_points_of_every_run(study):
    curves = history(study, runs_frame(study)["run_id"], EVAL)
    assert len(curves) == 3 * RUNS
    assert curves["step"].tolist() == [0, 40, 80] * RUNS


@pytest.mark.parametrize(
    ("of", "value"),
    [("last", 0.7), ("first", 0.4), ("best", 0.7), ("lowest", 0.4), ("mean:2", 0.625), ("area", 0.55)],
)
def test_the_value_of_a_curve(study, of, value):
    """The curve is 0.4, 0.55, 0.7."""
    frame = runs_frame(study)
    run = frame[(frame["params.kl"] == f"0.05 {K1}") & (frame["params.seed"] == "0")]
    values = with_values(study, run, [f"metrics.{EVAL}"], of)[f"metrics.{EVAL}"]
    assert values.tolist() == [pytest.approx(value)]


def test_tidy_has_a_row_per_run_and_metric(study):
    rows = tidy(study, runs_frame(study), ["kl.family", "kl.betas"], [EVAL, "train/reward"])
    assert len(rows) == 2 * RUNS
    assert list(rows) == ["run_id", "status", "seed", "kl.family", "kl.betas", "metric", "value"]
    cell = rows[(rows["kl.family"] == K1) & (rows["kl.betas"] == "0.3") & (rows["metric"] == EVAL)]
    assert sorted(cell["value"]) == pytest.approx([0.5, 0.51, 0.52])


def test_a_table_has_every_metric_with_its_interval(table):
    code, out, err = table("--where", "tags.kl.label LIKE '0.1 %'")
    header, _, *rows = out.splitlines()
    assert code == 0
    assert err == ""
    assert len(rows) == 2
    assert " ".join(header.split()) == "name kl.label n eval/heldout/reward train/reward runs failed collapsed"
    assert "0.61 [0.5852, 0.6348]" in out, "Student's t: 4.303 * 0.01 / sqrt(3)"


@pytest.mark.parametrize(
    ("format", "mark"), [("markdown", "|---"), ("latex", r"\toprule"), ("csv", "name,kl.label,metric,n,mean")]
)
def test_a_table_in_another_format(table, format, mark):
    assert mark in table("--format", format)[1]


def test_a_table_with_bootstrap_intervals(table):
    assert "0.51" in table("--where", "tags.kl.label LIKE '0.1 k3%'", "--interval", "bootstrap")[1]


def test_runs_that_differ_beside_the_group_are_separate_rows(ask):
    rows, err = ask("--group", "name", "--metric", EVAL)
    assert "runs differ in kl and are separate rows" in err
    assert len(rows) == 7


def test_a_table_without_runs_of_its_status_says_so(table):
    _, out, err = table("--status", "running")
    assert "--status all" in err
    assert " - " in out


def test_the_help_of_a_table_has_an_example(table):
    assert "Example: kl-comedy results table" in " ".join(table("--help")[1].split())


def test_collapsed_runs_are_counted_and_stay_in_the_mean(ask):
    rows, err = ask("--group", "kl.family,kl.betas", "--metric", EVAL)
    assert "1 of 21 runs collapsed (eval/heldout/reward < 0.5 start)" in err
    collapsed = {(row["kl.family"], row["kl.betas"]): row["collapsed"] for row in rows}
    assert collapsed.pop((K3, "0.05")) == 1
    assert set(collapsed.values()) == {0}
    (row,) = [row for row in rows if row["collapsed"]]
    assert row["n"] == 3
    assert row["mean"] == pytest.approx((0.5 + 0.51 + 0.0) / 3)


def test_the_rule_of_collapse_can_be_given(ask):
    rows, err = ask("--group", "kl.family", "--metric", EVAL, "--collapse", "eval/heldout/reward <= 0.415")
    assert sum(row["collapsed"] for row in rows) == 3
    assert "--collapse" not in err


# A curve has three values, the first of which is 0.4.
@pytest.mark.parametrize(("last", "n_collapsed"), [(1, 9), (2, 2), (3, 0), (4, 0)])
def test_a_rule_of_collapse_for_several_last_values(ask, last, n_collapsed):
    rule = f"eval/heldout/reward > 0.55 last {last}"
    rows, _ = ask("--group", "kl.family", "--metric", EVAL, "--collapse", rule)
    assert sum(row["collapsed"] for row in rows) == n_collapsed


def by_cell(rows):
    return {(row["kl.family"], row["at"]): row for row in rows}


def test_equal_beta_is_paired_over_seeds(ask):
    rows, _ = ask("--metric", EVAL, "--baseline", K3, command="compare")
    cells = by_cell(rows)
    tenth = cells[K1, "beta 0.1"]
    assert tenth["minus_baseline"] == pytest.approx(0.1)
    assert tenth["pairs"] == 3
    assert tenth["difference_low"] == pytest.approx(0.1, abs=1e-9), "the seeds' differences cancel"
    assert cells[K1, "beta 0.05"]["difference_low"] < 0
    assert cells["no KL", "beta 0"]["minus_baseline"] is None


def test_no_kl_is_the_baseline_of_every_beta(ask):
    rows, _ = ask("--metric", EVAL, "--baseline", "no KL", command="compare")
    others = [row for row in rows if row["kl.family"] != "no KL"]
    assert others
    for row in others:
        assert row["minus_baseline"] is not None, row


def test_contrasts_are_adjusted_and_equivalence_has_a_margin(ask):
    rows, _ = ask("--metric", EVAL, "--baseline", K3, "--margin", "0.15", command="compare")
    tested = [row for row in rows if row["p"] is not None]
    assert tested
    for row in tested:
        assert row["p_holm"] >= row["p"], row
    assert by_cell(rows)[K1, "beta 0.1"]["p_equivalent"] < 0.05, "0.1 in every seed"


def test_only_rewards_have_a_margin_by_default(ask):
    rows, _ = ask("--metric", EVAL, "--baseline", K3, command="compare")
    assert {"p_equivalent", "power"} <= set(rows[0])
    rows, _ = ask("--metric", "eval/heldout/kl/exact_reverse_sequence", "--baseline", K3, command="compare")
    assert not {"p_equivalent", "power"} & set(rows[0])


def test_each_contrast_has_a_verdict(ask):
    """0.1 above in each of three seeds, without any noise; at the lower beta the seeds differ more than the sides."""
    rows, _ = ask("--metric", EVAL, "--baseline", K3, command="compare")
    cells = by_cell(rows)
    assert cells[K1, "beta 0.1"]["verdict"] == "above"
    assert cells[K1, "beta 0.05"]["verdict"] == "not resolved"
    assert cells[K1, "beta 0.05"]["power"] < 0.8
    assert cells["no KL", "beta 0"]["verdict"] is None
    rows, _ = ask("--metric", EVAL, "--baseline", K3, "--margin", "0.15", command="compare")
    assert by_cell(rows)[K1, "beta 0.1"]["verdict"] == "above", "resolved comes before the margin"


def test_power_of_a_plan_and_of_stored_runs(ask):
    """Of a plan: a table value (Cohen 1988). Of runs: the deviation of their differences is that of compare."""
    (row,), _ = ask("--sd", "0.04", "--margin", "0.02", "--seeds", "34", command="power")
    assert row["seeds_needed"] == 34
    assert 0.8 <= row["power"] < 0.82
    compared, _ = ask("--metric", EVAL, "--baseline", K3, command="compare")
    rows, _ = ask("--metric", EVAL, "--baseline", K3, command="power")
    deviations = {(row["kl.family"], row["at"]): (row["sd"], row["pairs"], row["power"]) for row in rows}
    expected = {
        (row["kl.family"], row["at"]): (row["sd"], row["pairs"], row["power"])
        for row in compared
        if row["sd"] is not None
    }
    assert deviations == expected
    (first, *_), _ = ask("--metric", EVAL, "--baseline", K3, "--tests", "50", command="power")
    assert first["tests"] == 50
    assert first["seeds_needed"] >= rows[0]["seeds_needed"]


def test_by_default_a_reader_sees_the_label_once_and_data_has_the_name_too(kl_comedy):
    """In the evidence of one learning rate each of six forms has a name and a label."""
    where = "tags.sweep = 'evidence_core' and optimizer.lr = 0.0003"
    words = ("results", "table", "--uri", EVIDENCE, "--where", where, "--metric", EVAL)
    heads = {}
    for options in ((), ("--format", "csv"), ("--group", "name,kl.label")):
        code, out, err = kl_comedy(*words, *options)
        assert code == 0, err
        heads[options] = out.splitlines()[0].replace(",", " ").split()[:2]
    assert list(heads.values()) == [["kl.label", "n"], ["name", "kl.label"], ["name", "kl.label"]]


@pytest.fixture
def at_equal_kl(ask):
    """The cells of a comparison at three KLs, and its stderr."""
    rows, err = ask("--metric", EVAL, "--at-kl", "2.5,4,20", "--baseline", K3, command="compare")
    return by_cell(rows), err


def test_equal_kl_is_interpolated(at_equal_kl):
    cells, err = at_equal_kl
    assert "eval/heldout/kl/exact_reverse_sequence (nats" in err
    k1 = cells[K1, "KL 2.5"]
    k3 = cells[K3, "KL 2.5"]
    assert k1["n"] == 3
    assert k1["mean"] == pytest.approx(0.66)
    assert k1["collapsed"] == 0
    assert k3["n"] == 3
    assert k3["gap"] == 0
    assert k3["collapsed"] == 1
    assert k3["mean"] == pytest.approx((0.5 + 0.51 + (5 * 0.52 + 0.62) / 6) / 3)
    assert k1["minus_baseline"] == pytest.approx(k1["mean"] - k3["mean"])
    assert k1["pairs"] == 3
    assert cells[K1, "KL 4"]["mean"] == pytest.approx((0.7 + 0.6) / 2 + 0.01), "no KL is beta 0 of every family"


def test_a_kl_that_no_run_reached_has_no_value(at_equal_kl):
    cells, _ = at_equal_kl
    k1 = cells[K1, "KL 20"]
    k3 = cells[K3, "KL 20"]
    assert k1["n"] == 0
    assert k1["outside"] == 3
    assert k1["pairs"] == 0
    assert k1["minus_baseline"] is None
    assert k3["n"] == 0
    assert k3["outside"] == 2
    assert k3["gap"] == 1


def test_with_from_start_every_frontier_begins_at_the_start(ask):
    rows, _ = ask("--metric", EVAL, "--at-kl", "0", "--from-start", command="compare")
    means = [row["mean"] for row in rows]
    assert means == pytest.approx([0.4] * len(means))


def test_several_tasks_as_one_number(ask):
    metrics = ("--metric", f"{EVAL},train/reward")
    rows, _ = ask(*metrics, "--group", "kl.family", "--pool", "kl", "--baseline", "no KL", command="aggregate")
    by_family = {row["kl.family"]: row for row in rows}
    k1 = by_family[K1]
    assert k1["tasks"] == 2
    assert k1["scores"] == 6
    assert k1["p_low"] < k1["p_better"] < k1["p_high"]
    assert by_family[K3]["p_better"] == 0.0
    assert by_family["no KL"]["iqm"] == pytest.approx(0.61)
    assert by_family["no KL"]["p_better"] is None


@pytest.fixture
def plot(kl_comedy, study, tmp_path):
    """The bytes of a picture of the study."""

    def plot(name, *arguments):
        options = ["--uri", study, "--metric", EVAL, "--out", tmp_path / name]
        code, out, err = kl_comedy("results", "plot", *options, *arguments)
        assert code == 0, err
        assert out.strip() == str(tmp_path / name), err
        return (tmp_path / name).read_bytes()

    return plot


@pytest.mark.parametrize(
    ("kind", "drawn", "absent"),
    [
        (["curves"], ["no KL", "mean of 3 seeds, single runs", "held-out reward"], "geometric"),
        (["curves", "--log", EVAL], ["geometric mean", "log axis"], "smooth"),
        (["path"], ["no KL", "single seeds thin", "square-root axis", "held-out exact KL(π‖ref)"], "beta"),
        (["frontier"], ["beta 0.05", "some runs collapsed", "held-out exact KL(π‖ref)", "nats"], "relative bias"),
        (["plane"], ["relative bias", "some runs collapsed"], "n=9"),
        (["heatmap"], ["1 of 3", "mean of 3 seeds", "k3 in loss", "beta"], "n=9"),
    ],
    ids=["curves", "curves on a log axis", "path", "frontier", "plane", "heatmap"],
)
def test_a_picture_is_labelled_in_words(plot, kind, drawn, absent):
    svg = plot("a.svg", "--group", "kl.family", "--kind", *kind).decode()
    text = " ".join(texts_of(tree_of(svg)))
    for phrase in drawn:
        assert phrase in text
    assert absent not in text
    assert not re.search(r"\w_\w|\w/\w*_|heldout", text), "no raw keys"


def test_pictures_in_other_formats(plot):
    assert plot("deep/a.png", "--kind", "heatmap").startswith(b"\x89PNG")
    assert plot("a.pdf").startswith(b"%PDF")


@pytest.mark.parametrize(
    ("sets", "preferred"),
    [
        (["", "eval/four_terms/", "eval/heldout/"], "eval/heldout/"),
        (["", "eval/four_terms/"], "eval/four_terms/"),
        ([""], ""),
    ],
    ids=["held out", "another set", "training"],
)
def test_the_kl_is_that_of_the_held_out_set_before_other_sets_and_training(sets, preferred):
    from kl_comedy.cli.results import kl_column

    values = {f"metrics.{prefix}kl/exact_reverse_sequence": 0.5 for prefix in sets}
    frame = pd.DataFrame([{"stale": "", **values}])
    assert kl_column(frame, None) == f"metrics.{preferred}kl/exact_reverse_sequence"


READERS = {"parquet": pd.read_parquet, "csv": pd.read_csv, "json": pd.read_json}


@pytest.mark.parametrize("format", READERS)
def test_a_table_goes_to_a_file(table, tmp_path, format):
    file = tmp_path / f"table.{format}"
    code, out, _ = table("--metric", EVAL, "--group", "kl.family", "--pool", "kl", "--format", format, "--out", file)
    assert code == 0
    assert out == f"{file}\n"
    rows = READERS[format](file)
    assert sorted(rows["runs"]) == [3, 9, 9]
    assert set(rows["n"]) == {3}


@pytest.mark.parametrize("format", READERS)
def test_an_export_goes_to_a_file(kl_comedy, study, tmp_path, format):
    file = tmp_path / f"runs.{format}"
    code, _, err = kl_comedy("results", "export", "--uri", study, "--without", "tags.*", "--out", file)
    rows = READERS[format](file)
    assert code == 0
    assert "21 runs" in err
    assert len(rows) == RUNS
    assert set(map(int, rows["params.seed"])) == {0, 1, 2}
    assert rows["metrics.train/reward"].sum() == pytest.approx(11.09)
    assert "tags.kl.label" not in rows


METRIC = ["--metric", EVAL]
REFUSED = [
    ("table", ["--group", "kl.bet"], "did you mean 'kl.betas'"),
    ("table", ["--pool", "kl.bet"], "--pool: got 'kl.bet'"),
    ("table", ["--metric", "eval/heldout/rewards"], "did you mean 'eval/heldout/reward'"),
    ("table", ["--where", "sed = 0"], "did you mean 'seed'"),
    ("table", ["--where", "seed > 'a'"], "--where"),
    ("table", ["--where", "seed = 0; drop table"], "--where"),
    ("table", ["--where", "seed = 'open"], "--where"),
    ("table", ["--where", "= &"], "--where"),
    ("link", ["--where", "kl.family = 'no KL'"], "MLflow's pages do not have kl.family; filter by kl.label"),
    ("table", ["--experiment", "studdy"], "did you mean 'study'"),
    ("table", ["--format", "jsn"], "did you mean 'json'"),
    ("table", ["--format", "parquet"], "name a file"),
    ("table", ["--status", "done"], "--status"),
    ("table", ["--uri", "file:///nowhere"], "sqlite:///FILE"),
    ("table", ["--uri", "sqlite:///absent.db"], "no results store"),
    ("table", ["--of", "bst"], "did you mean 'best'"),
    ("table", ["--of", "mean:0"], "--of"),
    ("table", ["--collapse", "r << 1"], "--collapse"),
    ("table", ["--collapse", "eval/heldout/rewrd < 1"], "did you mean 'eval/heldout/reward'"),
    ("compare", [*METRIC, "--baseline", "no kl"], "did you mean 'no KL'"),
    ("compare", [*METRIC, "--at-kl", "one"], "--at-kl"),
    ("compare", ["--metric", "*"], "name one"),
    ("power", [], "--sd: name a standard deviation, or runs by --metric and --baseline"),
    ("power", ["--sd", "nan"], "--sd: got nan; allowed: a number above 0"),
    ("power", ["--sd", "0.1", "--power", "1"], "--power: got 1.0"),
    ("power", ["--sd", "0.1", "--margin", "0"], "--margin: got 0.0"),
    ("power", ["--sd", "0.1", "--baseline", "no KL"], "--sd: got 0.1; allowed: nothing with --metric or --baseline"),
    ("power", ["--sd", "0.1", "--where", "seed = 0"], "--sd: got 0.1; allowed: nothing with --where"),
    ("power", ["--sd", "0.1", "--experiment", "x"], "--sd: got 0.1; allowed: nothing with --experiment"),
    ("power", ["--sd", "0.1", "--group", "kl.beta"], "--sd: got 0.1; allowed: nothing with --group"),
    ("power", ["--sd", "0.1", "--split-versions"], "--sd: got 0.1; allowed: nothing with --split-versions"),
    ("power", [*METRIC, "--baseline", "no KL", "--seeds", "5"], "--seeds: got 5"),
    ("power", ["--metric", "eval/heldout/kl/exact_reverse_sequence", "--baseline", "no KL"], "--margin: name one"),
    ("power", [*METRIC, "--baseline", "no kl"], "did you mean 'no KL'"),
    ("compare", [*METRIC, "--at-kl", "1", "--kl", "kl/exct"], "--kl: got 'kl/exct'"),
    ("plot", [*METRIC, "--out", "a.bmp"], "--out"),
    ("plot", ["--metric", "nope", "--out", "a.png"], "--metric"),
    ("plot", [*METRIC, "--kind", "plan", "--out", "a.png"], "did you mean 'plane'"),
    ("plot", [*METRIC, "--kind", "plane", "--smooth", "3", "--out", "a.png"], "--of mean:K"),
    ("plot", [*METRIC, "--kind", "plane", "--log", EVAL, "--out", "a.png"], "only curves"),
    ("plot", [*METRIC, "--log", "eval/heldout/rewrd", "--out", "a.png"], "did you mean 'eval/heldout/reward'"),
    ("plot", [*METRIC, "--panels", "kl.beta", "--out", "a.png"], "--panels: got 'kl.beta'"),
    ("export", ["--out", "a.xls"], "--out"),
    ("report", ["--out", "a.pdf"], ".html"),
    ("report", [*METRIC, "--kl", "nope", "--out", "a.html"], "--kl"),
    ("report", [*METRIC, "--parts", "kl.famly", "--out", "a.html"], "--parts: got 'kl.famly'"),
]


@pytest.fixture
def line_of(kl_comedy, study, tmp_path, monkeypatch):
    """The one line that a command on the study fails with; it writes nothing."""
    monkeypatch.chdir(tmp_path)

    def line_of(command, *arguments, code):
        exit_code, out, err = kl_comedy("results", command, "--uri", study, *arguments)
        assert exit_code == code, err
        assert out == ""
        (line,) = [line for line in err.splitlines() if "error:" in line or "failed:" in line]
        assert not list(tmp_path.iterdir())
        return line

    return line_of


@pytest.mark.parametrize(("command", "arguments", "message"), REFUSED)
def test_a_mistake_is_one_line_and_exit_2(line_of, command, arguments, message):
    assert message in line_of(command, *arguments, code=2)


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        ("table", ["--where", "seed = 77"], "no runs"),
        ("compare", [*METRIC, "--status", "running"], "no run with status running"),
    ],
)
def test_a_question_about_no_run_is_one_line_and_exit_1(line_of, command, arguments, message):
    assert message in line_of(command, *arguments, code=1)


def test_mixed_code_in_one_group_is_a_warning_and_can_be_parted(ask, study_copy, tmp_path):
    group = ("--group", "kl.family", "--pool", "kl", "--metric", EVAL)
    _, err = ask(*group)
    assert "different code" not in err
    tags = {"git.commit": "b" * 40, "git.dirty": "true", "git.diff": "f00"}
    track(tmp_path, study_copy, K1, 0.3, 7, 0.5, 1.0, **tags)
    rows, err = ask(*group, uri=study_copy)
    assert len(rows) == 3
    assert err.count("warning:") == 1
    assert "(code)" in err
    rows, err = ask(*group, "--split-versions", uri=study_copy)
    assert "warning:" not in err
    assert {row["code"] for row in rows} == {COMMIT[:12], "bbbbbbbbbbbb+f00"}
    assert len(rows) == 4


def test_a_store_of_a_newer_mlflow_is_named_and_left_alone(kl_comedy, study_copy):
    file = sqlite_file(study_copy)
    with sqlite3.connect(file) as db:
        db.execute("UPDATE alembic_version SET version_num = 'fedcba987654'")
    before = file.read_bytes()
    code, out, err = kl_comedy("results", "table", "--uri", study_copy)
    assert code == 2
    assert out == ""
    assert "newer MLflow" in err
    assert "schema fedcba987654 is unknown" in err
    assert len(err.strip().splitlines()) == 1
    assert file.read_bytes() == before


@pytest.mark.slow
def test_queries_do_not_load_torch(study):
    script = (
        "import sys\nfrom kl_comedy.cli.results import app\ntry: app()\nexcept SystemExit: pass\n"
        "print([name for name in ('torch', 'mlflow', 'pandas', 'matplotlib') if name in sys.modules])"
    )
    command = [sys.executable, "-c", script, "table", "--uri", study]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "['mlflow', 'pandas']", done.stderr


@pytest.mark.parametrize(
    "address",
    [
        "javascript:alert(1)",
        "java\nscript:alert(1)",
        "data:text/html,x",
        "file:///etc/passwd",
        "//host",
        "host:5000",
        "http://",
        "http://[",
        "http://user:pass@host",
        "http://:pass@host",
        "http://host\x1b[31m",
        "https://host?key=1",
    ],
)
def test_a_link_begins_with_a_plain_address(kl_comedy, study, address):
    code, out, err = kl_comedy("results", "link", "--uri", study, "--server", address)
    assert code == 2
    assert out == ""
    assert "--server: got" in err
    assert "pass@" not in err


@pytest.mark.parametrize(
    ("command", "name"), [("report", "page.html"), ("plot", "plot.pdf"), ("table", "t.md"), ("export", "e.parquet")]
)
def test_a_link_is_no_place_to_write_to(kl_comedy, study, tmp_path, command, name):
    target = tmp_path / "target"
    target.write_text("precious")
    (tmp_path / name).symlink_to(target)
    code, _, err = kl_comedy("results", command, "--uri", study, "--out", tmp_path / name)
    assert code == 2
    assert "this is a link; name the file itself" in err
    assert target.read_text() == "precious"
    assert (tmp_path / name).is_symlink()


def test_the_curves_beside_an_export_are_not_written_through_a_link(kl_comedy, study, tmp_path):
    target = tmp_path / "target"
    target.write_text("precious")
    (tmp_path / "e.curves.parquet").symlink_to(target)
    code, _, _ = kl_comedy("results", "export", "--uri", study, "--out", tmp_path / "e.parquet")
    assert code == 2
    assert target.read_text() == "precious"
