"""A study's export in the place of its store, and pages of tables checked from it."""

import json
import shlex
import shutil
import sys
from collections import Counter
from pathlib import Path

import pandas as pd
import pytest

from commands import run_here
from kl_comedy.errors import UserError
from kl_comedy.results.export import thinned
from kl_comedy.results.runs import curves_file, history, nested, open_runs, runs_frame, translate
from kl_comedy.results.values import with_values
from kl_comedy.tracking.store import open_existing
from study_runs import EVAL, HOSTILE

ROOT = Path(__file__).parents[2]
K1 = "k1_reverse_token in reward total"
TABLES = [
    ("table", "--metric", f"{EVAL},train/reward"),
    ("table", "--metric", EVAL, "--of", "mean:2", "--where", "seed != 2 and tags.kl.label LIKE '0.1 %'"),
    ("compare", "--metric", EVAL, "--baseline", "no KL"),
    ("compare", "--metric", EVAL, "--baseline", K1, "--at-kl", "1,2"),
    ("aggregate", "--metric", f"{EVAL},train/reward", "--baseline", "no KL"),
]


@pytest.fixture(scope="module")
def exported_once(study, tmp_path_factory):
    file = tmp_path_factory.mktemp("exported") / "export.parquet"
    code, out, err = run_here("results", "export", "--uri", study, "--out", file)
    assert code == 0
    assert out.strip() == str(file)
    assert "189 points of 3 metrics" in err
    return file


@pytest.fixture
def exported(exported_once, tmp_path):
    """A copy of the study's export, which a test may change."""
    for file in exported_once.parent.iterdir():
        shutil.copy(file, tmp_path)
    return tmp_path / exported_once.name


@pytest.fixture
def without_mlflow(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)


def test_an_export_made_in_parts_is_the_whole_one(kl_comedy, study, exported):
    part = exported.with_name("part.parquet")
    for where in ("seed = 0", "seed != 0", "seed = 0"):  # the first part twice: its rows are not doubled
        code, _, err = kl_comedy("results", "export", "--uri", study, "--where", where, "--append", "--out", part)
        assert code == 0, err
    assert_same_rows(part, exported, keys=["run_id"])
    assert_same_rows(curves_file(part), curves_file(exported), keys=["run_id", "metric", "step"])


def assert_same_rows(file, expected_file, *, keys):
    """In whatever order rows and columns are."""
    expected = pd.read_parquet(expected_file).sort_values(keys).reset_index(drop=True)
    rows = pd.read_parquet(file).sort_values(keys).reset_index(drop=True)
    pd.testing.assert_frame_equal(rows[list(expected)], expected)


def test_only_a_parquet_file_is_appended_to(kl_comedy, study, tmp_path):
    code, _, err = kl_comedy("results", "export", "--uri", study, "--append", "--out", tmp_path / "part.csv")
    assert code == 2
    assert "--append: got 'csv'" in err


@pytest.mark.parametrize("table", TABLES, ids=["table", "filtered table", "equal beta", "equal KL", "aggregate"])
def test_a_command_answers_alike_from_a_store_and_its_export(kl_comedy, study, exported, monkeypatch, table):
    from_store = kl_comedy("results", *table, "--uri", study, "--format", "csv")
    monkeypatch.setitem(sys.modules, "mlflow", None)
    from_export = kl_comedy("results", *table, "--uri", exported, "--format", "csv")
    code, _, err = from_store
    assert code == 0, err
    assert from_export == from_store


def test_a_picture_is_drawn_from_an_export(kl_comedy, exported, tmp_path, without_mlflow):
    picture = tmp_path / "curves.svg"
    assert kl_comedy("results", "plot", "--metric", EVAL, "--uri", exported, "--out", picture)[0] == 0
    assert picture.stat().st_size > 1000


def test_a_report_is_written_from_an_export_and_is_escaped(kl_comedy, exported, tmp_path, without_mlflow):
    page = tmp_path / "study.html"
    assert kl_comedy("results", "report", "--uri", exported, "--out", page)[0] == 0
    text = page.read_text()
    assert text.count("<img") >= 2
    assert "&lt;/script&gt;" in text
    assert f"--uri {exported}" in text
    assert HOSTILE not in text


@pytest.mark.parametrize(
    "where",
    [
        "seed != 1 AND status = 'FINISHED'",
        "train/reward >= 0.5 and tags.kl.label LIKE 'no%'",
        "tags.kl.label ILIKE '%K3_reverse%'",
        "params.`seed` LIKE '_' and metrics.`train/reward` < 0.6",
        'kl.label = "no KL" and train/reward != 0.6',
        "seed IS NOT NULL and status = 'FAILED'",
    ],
)
def test_a_filter_chooses_the_runs_that_mlflow_chooses(study, exported_once, where):
    client = open_existing(study)
    mlflow_filter, _ = translate(where, runs_frame(study).columns)
    ids = [
        run.info.run_id
        for run in client.search_runs([client.get_experiment_by_name("study").experiment_id], mlflow_filter)
    ]
    assert list(runs_frame(study, where=where).get("run_id", [])) == ids
    assert list(runs_frame(str(exported_once), where=where).get("run_id", [])) == ids
    assert len(ids) < 21


def test_frames_curves_and_completions_are_the_stores(exported_once, without_mlflow):
    export = open_runs(exported_once)
    frame = runs_frame(str(exported_once))
    assert len(frame) == 21
    assert export.frame("study").equals(frame)
    points = pd.read_parquet(exported_once.with_name("export.curves.parquet"))
    assert list(points) == ["run_id", "metric", "step", "value", "recorded"]
    assert set(points["recorded"]) == {3}
    assert history(str(exported_once), frame["run_id"], EVAL)["step"].tolist() == [0, 40, 80] * 21
    assert export.completions(frame["run_id"][0])[0]["completion"] == HOSTILE


@pytest.mark.parametrize(
    ("question", "message"),
    [
        ({"experiment": "stdy"}, "--experiment: got 'stdy'"),
        ({"where": "sed = 1"}, "did you mean 'seed'"),
        ({"where": "seed == 1"}, "cannot read 'seed == 1'; "),
        ({"where": "seed > '1'"}, "cannot read .*seed > "),
        ({"where": "seed = 0 seed = 1"}, "cannot read 'seed = 0 seed = 1'; "),
        ({"where": "advantage = rloo"}, "cannot read 'advantage = rloo'; "),
    ],
    ids=["experiment", "name", "operator", "type", "no and", "no quotes"],
)
def test_a_mistaken_question_to_an_export_is_refused(exported_once, without_mlflow, question, message):
    with pytest.raises(UserError, match=message):
        open_runs(exported_once).frame(**question)


@pytest.fixture
def without_curves(exported, without_mlflow):
    """An export whose file of curves is gone."""
    exported.with_name("export.curves.parquet").unlink()
    return exported


def test_an_export_without_curves_counts_no_collapsed_runs(kl_comedy, without_curves):
    code, out, err = kl_comedy("results", "table", "--metric", EVAL, "--uri", without_curves)
    assert code == 0
    assert "collapsed" not in out
    assert "collapsed runs are not counted" in err


@pytest.mark.parametrize(
    "command", [("table", "--metric", EVAL, "--of", "first"), ("compare", "--metric", EVAL, "--at-kl", "1")]
)
def test_an_export_without_curves_refuses_what_needs_them(kl_comedy, without_curves, command):
    code, _, err = kl_comedy("results", *command, "--uri", without_curves)
    assert code == 2
    assert f"the export has no curve of {EVAL}" in err


def test_an_export_without_curves_has_a_report(kl_comedy, without_curves, tmp_path):
    code, _, err = kl_comedy("results", "report", "--uri", without_curves, "--out", tmp_path / "study.html")
    assert code == 0, err


@pytest.fixture
def long_curve():
    """1,000 points, zero but for a maximum and a minimum."""
    values = [0.0] * 1000
    values[333] = 9.0
    values[555] = -9.0
    return pd.DataFrame({"run_id": "a", "step": range(1000), "value": values})


def test_a_thinned_curve_keeps_its_ends_and_extremes(long_curve):
    thin = thinned(long_curve, 200)
    assert len(thin) <= 200
    assert set(thin["recorded"]) == {1000}
    assert {0, 333, 555} <= set(thin["step"])
    assert set(range(900, 1000)) <= set(thin["step"])
    assert thin["step"].is_monotonic_increasing


@pytest.mark.parametrize("points", [0, 1000], ids=["no limit", "as many as there are"])
def test_a_curve_that_is_short_enough_stays_whole(long_curve, points):
    assert thinned(long_curve, points)["step"].tolist() == list(range(1000))


def test_values_of_a_thinned_curve(long_curve, monkeypatch):
    """The best one is kept; a mean over more than the whole end of the curve cannot be taken."""
    thin = thinned(long_curve, 200)
    monkeypatch.setattr("kl_comedy.results.values.history", lambda *_: thin)
    frame = pd.DataFrame({"run_id": ["a"], "metrics.m": [0.0]})
    assert with_values("", frame, ["metrics.m"], "best")["metrics.m"].tolist() == [9.0]
    with pytest.raises(UserError, match="mean:100 at most"):
        with_values("", frame, ["metrics.m"], "mean:101")
    with pytest.raises(UserError, match="mean:100 at most"):
        with_values("", frame, ["metrics.m"], "area")


def test_pages_are_checked_from_the_export_beside_them(kl_comedy, exported, tmp_path, without_mlflow):
    folder = tmp_path / "results"
    folder.mkdir()
    for number, table in enumerate(TABLES):
        page = folder / f"{number}.md"
        assert kl_comedy("results", *table, "--uri", exported, "--format", "markdown", "--out", page)[0] == 0
        assert page.read_text().startswith(f"<!-- kl-comedy results {table[0]} --metric")
    # The page's command names the export as it is called from the page's folder.
    named = (
        f"kl-comedy results table --group kl.label --metric {EVAL} --rows 'no KL=none,0.3 {K1}' --uri export.parquet"
    )
    _, table, _ = kl_comedy(*shlex.split(named)[1:-2], "--uri", exported, "--format", "markdown")
    (tmp_path / "README.md").write_text(f"# Page\n\n<!-- {named} -->\n\n{table}\n\n| a |\n|---|\n| 1 |\n")
    code, out, err = kl_comedy("results", "verify", folder, "--format", "json")
    verdicts = {row["table"].rpartition("/")[2]: row for row in json.loads(out)}
    assert code == 0, out
    assert "7 tables: 6 same, 1 no command, 0 unchecked, 0 failed, 0 changed" in err, out
    assert verdicts["README.md:5"]["verdict"] == "same", verdicts
    assert "| none |" in table

    # One page changes, one names an export that is gone, one has a command that would write a file.
    page = folder / "0.md"
    page.write_text(page.read_text().replace("0.61 ", "0.62 "))
    (folder / "1.md").write_text((folder / "1.md").read_text().replace("../export", "gone"))
    (folder / "2.md").write_text((folder / "2.md").read_text().replace("--baseline", "--out x --baseline"))
    code, out, err = kl_comedy("results", "verify", folder, "--format", "json")
    verdicts = {row["table"].rpartition("/")[2].partition(":")[0]: row for row in json.loads(out)}
    assert code == 1
    assert verdicts["0.md"]["verdict"] == "changed"
    assert verdicts["1.md"]["verdict"] == "unchecked"
    assert verdicts["2.md"]["verdict"] == "failed"
    assert verdicts["3.md"]["verdict"] == "same"
    assert verdicts["4.md"]["verdict"] == "same"
    assert "'0.62 [0.5852, 0.6348]' -> '0.61 [0.5852, 0.6348]'" in verdicts["0.md"]["why"]
    assert not (folder / "x").exists()
    assert "2 tables of" in err


def test_a_page_that_does_not_exist_is_refused(kl_comedy, tmp_path):
    assert kl_comedy("results", "verify", tmp_path / "none.md")[0] == 2


SCRIPT = """import sys
print(f"| a | b | b |\\n|---|---|---|\\n| 1 | {sys.argv[1]} | 3 |\\n\\ntext\\n\\n| c |\\n|---|\\n| 4 |")
"""


def test_a_command_of_a_page_that_cannot_be_read_is_a_failed_table(kl_comedy, exported, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("<!-- kl-comedy results table --nope 3 -->\n\n| a |\n|---|\n| 1 |\n")
    exported.rename(tmp_path / "export.parquet")
    code, out, err = kl_comedy("results", "verify", page, "--format", "json")
    (row,) = json.loads(out)
    assert code == 1, err
    assert row["verdict"] == "failed", row
    assert "--nope" in row["why"]


PAGE = """<!-- python tables.py 2 -->

text

| a | b | b |
|---|---|---|
| 1 | 2 | 3 |

<!-- unchecked: measured -->

| x |
|---|
| 9 |

| c |
|---|
| 4 |
"""
SAME = ("same", "")
UNCHECKED = ("unchecked", "measured")


@pytest.fixture
def verdicts(kl_comedy, tmp_path):
    """The exit code for a page beside the script, and the verdict and reason of each of its tables."""
    page = tmp_path / "results" / "README.md"
    page.parent.mkdir()
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "tables.py").write_text(SCRIPT)

    def verdicts(text):
        page.write_text(text)
        code, out, _ = kl_comedy("results", "verify", page, "--format", "json")
        return code, [(row["verdict"], row["why"]) for row in json.loads(out)]

    return verdicts


def test_a_page_names_the_script_that_prints_its_tables(verdicts):
    assert verdicts(PAGE) == (0, [SAME, UNCHECKED, SAME])


def test_a_cell_that_the_script_prints_otherwise_is_changed(verdicts):
    code, of_tables = verdicts(PAGE.replace("| 3 |", "| 5 |"))
    assert code == 1
    assert of_tables == [("changed", "b: '5' -> '3'"), UNCHECKED, SAME]


def test_a_table_that_the_script_does_not_print_is_failed(verdicts):
    code, of_tables = verdicts(PAGE + "\n| d |\n|---|\n| 4 |\n")
    assert code == 1
    assert len(of_tables) == 4
    verdict, reason = of_tables[3]
    assert verdict == "failed"
    assert "prints 2 tables, and this is number 3" in reason


@pytest.mark.parametrize(
    ("command", "why"),
    [("tables.py", "fails: IndexError"), ("../out.py", "not a script"), ("-m none", "not a script")],
    ids=["fails", "outside the project", "a module"],
)
def test_a_table_of_a_script_that_cannot_run_is_failed(verdicts, command, why):
    code, of_tables = verdicts(PAGE.replace("tables.py 2", command))
    assert code == 1
    verdict, reason = of_tables[0]
    assert verdict == "failed"
    assert why in reason


@pytest.mark.slow
def test_the_tables_of_this_repository_are_those_of_its_exports(kl_comedy, without_mlflow):
    code, out, err = kl_comedy("results", "verify", ROOT / "results", "--format", "json")
    counts = Counter(row["verdict"] for row in json.loads(out))
    assert code == 0, err
    assert counts["same"] >= 70, err
    assert counts["changed"] == 0, err
    assert counts["failed"] == 0, err
    assert counts["no command"] == 0, err


@pytest.mark.parametrize(
    "file", ["quickstart.yaml", "async_pocket.yaml", "paper/async_math_qwen2.5_7b.yaml", "study/base/smollm2.yaml"]
)
def test_params_are_the_config_they_came_from(file):
    from kl_comedy.config import config_hash, flatten, load_config, to_plain
    from kl_comedy.tracking.store import param_texts

    config = load_config(ROOT / "configs" / file)
    plain = to_plain(config)
    assert nested(param_texts(flatten(plain))) == json.loads(json.dumps(plain))
    assert config_hash(config)
