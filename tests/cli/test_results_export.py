"""A study's export in the place of its store, and pages of tables checked from it."""

import json
import shutil
import sys
from collections import Counter
from pathlib import Path

import pandas as pd
import pytest

from commands import run_here
from kl_comedy.errors import UserError
from kl_comedy.tracking.export import thinned
from kl_comedy.tracking.runs import curves_file, history, nested, open_runs, runs_frame
from kl_comedy.tracking.values import with_values
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
    assert (code, out.strip()) == (0, str(file)) and "189 points of 3 metrics" in err
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
    for where in ("seed = 0", "seed != 0", "seed = 0"):
        words = ("results", "export", "--uri", study, "--where", where, "--append", "--out", part)
        assert kl_comedy(*words)[0] == 0
    for whole, parts in ((exported, part), (curves_file(exported), curves_file(part))):
        rows = [pd.read_parquet(file) for file in (whole, parts)]
        keys = ["run_id", *({"metric", "step"} & {*rows[0]})]
        first, second = (each.sort_values(keys).reset_index(drop=True)[[*rows[0]]] for each in rows)
        pd.testing.assert_frame_equal(first, second)
    code, _, err = kl_comedy("results", "export", "--uri", study, "--append", "--out", part.with_suffix(".csv"))
    assert code == 2 and "--append: got 'csv'" in err


def test_commands_answer_alike_from_a_store_and_its_export(kl_comedy, study, exported, tmp_path, monkeypatch):
    from_store = [kl_comedy("results", *words, "--uri", study, "--format", "csv") for words in TABLES]
    monkeypatch.setitem(sys.modules, "mlflow", None)
    from_export = [kl_comedy("results", *words, "--uri", exported, "--format", "csv") for words in TABLES]
    assert from_export == from_store and all(code == 0 for code, _, _ in from_store)
    picture, page = tmp_path / "curves.svg", tmp_path / "study.html"
    assert kl_comedy("results", "plot", "--metric", EVAL, "--uri", exported, "--out", picture)[0] == 0
    assert kl_comedy("results", "report", "--uri", exported, "--out", page)[0] == 0
    text = page.read_text()
    assert picture.stat().st_size > 1000 and text.count("<img") >= 2 and "&lt;/script&gt;" in text
    assert f"--uri {exported}" in text and HOSTILE not in text


def test_filters_choose_the_same_runs(study, exported):
    for where in (
        "seed != 1 AND status = 'FINISHED'",
        "train/reward >= 0.5 and tags.kl.label LIKE 'no%'",
        "tags.kl.label ILIKE '%K3_reverse%'",
        "params.`seed` LIKE '_' and metrics.`train/reward` < 0.6",
        'kl.label = "no KL" and train/reward != 0.6',
        "seed IS NOT NULL and status = 'FAILED'",
    ):
        ids = [list(runs_frame(str(uri), where=where).get("run_id", [])) for uri in (study, exported)]
        assert ids[0] == ids[1] and len(ids[0]) < 21, where


def test_frames_curves_and_completions_are_the_stores(study, exported, without_mlflow):
    export, frame = open_runs(exported), runs_frame(str(exported))
    assert len(frame) == 21 and export.frame("study").equals(frame)
    points = pd.read_parquet(exported.with_name("export.curves.parquet"))
    assert list(points) == ["run_id", "metric", "step", "value", "recorded"] and set(points["recorded"]) == {3}
    assert history(str(exported), frame["run_id"], EVAL)["step"].tolist() == [0, 40, 80] * 21
    assert export.completions(frame["run_id"][0])[0]["completion"] == HOSTILE
    for words, message in (
        ({"experiment": "stdy"}, "--experiment: got 'stdy'"),
        ({"where": "sed = 1"}, "did you mean 'seed'"),
        ({"where": "seed == 1"}, "cannot read"),
        ({"where": "seed > '1'"}, "cannot read"),
        ({"where": "seed = 0 seed = 1"}, "cannot read"),
    ):
        with pytest.raises(UserError, match=message):
            export.frame(**words)


def test_an_export_without_curves_answers_what_needs_none(kl_comedy, study, exported, without_mlflow):
    exported.with_name("export.curves.parquet").unlink()
    code, out, err = kl_comedy("results", "table", "--metric", EVAL, "--uri", exported)
    assert code == 0 and "collapsed" not in out and "collapsed runs are not counted" in err
    for words in (("table", "--metric", EVAL, "--of", "first"), ("compare", "--metric", EVAL, "--at-kl", "1")):
        code, _, err = kl_comedy("results", *words, "--uri", exported)
        assert code == 2 and f"the export has no curve of {EVAL}" in err
    assert kl_comedy("results", "report", "--uri", exported, "--out", exported.with_name("s.html"))[0] == 0


def test_a_thinned_curve_keeps_its_ends_and_extremes(monkeypatch):
    values = [0.0] * 1000
    values[333], values[555] = 9.0, -9.0
    curve = pd.DataFrame({"run_id": "a", "step": range(1000), "value": values})
    thin = thinned(curve, 200)
    assert len(thin) <= 200 and set(thin["recorded"]) == {1000}
    assert {0, 333, 555, *range(900, 1000)} <= set(thin["step"]) and thin["step"].is_monotonic_increasing
    assert thinned(curve, 0)["step"].tolist() == thinned(curve, 1000)["step"].tolist() == list(range(1000))
    monkeypatch.setattr("kl_comedy.tracking.values.history", lambda *_: thin)
    frame = pd.DataFrame({"run_id": ["a"], "metrics.m": [0.0]})
    assert with_values("", frame, ["metrics.m"], "best")["metrics.m"].tolist() == [9.0]
    for of in ("mean:101", "area"):
        with pytest.raises(UserError, match="mean:100 at most"):
            with_values("", frame, ["metrics.m"], of)


def test_pages_are_checked_from_the_export_beside_them(kl_comedy, study, exported, tmp_path, without_mlflow):
    folder = tmp_path / "results"
    folder.mkdir()
    for number, words in enumerate(TABLES):
        page = folder / f"{number}.md"
        assert kl_comedy("results", *words, "--uri", exported, "--format", "markdown", "--out", page)[0] == 0
        assert page.read_text().startswith(f"<!-- kl-comedy results {words[0]} --metric")
    named = (
        f"kl-comedy results table --group kl.label --metric {EVAL} --rows 'no KL=none,0.3 {K1}' --uri export.parquet"
    )
    made = kl_comedy(
        *named.split(" --rows")[0].split()[1:],
        "--uri",
        exported,
        "--rows",
        f"no KL=none,0.3 {K1}",
        "--format",
        "markdown",
    )
    table = made[1]
    (tmp_path / "README.md").write_text(f"# Page\n\n<!-- {named} -->\n\n{table}\n\n| a |\n|---|\n| 1 |\n")
    code, out, err = kl_comedy("results", "verify", folder, "--format", "json")
    verdicts = {row["table"].rpartition("/")[2]: row for row in json.loads(out)}
    assert code == 0 and "7 tables: 6 same, 1 no command, 0 unchecked, 0 failed, 0 changed" in err, out
    assert verdicts["README.md:5"]["verdict"] == "same" and "| none |" in table, verdicts
    page = folder / "0.md"
    page.write_text(page.read_text().replace("0.61 ", "0.62 "))
    (folder / "1.md").write_text((folder / "1.md").read_text().replace("../export", "gone"))
    (folder / "2.md").write_text((folder / "2.md").read_text().replace("--baseline", "--out x --baseline"))
    code, out, err = kl_comedy("results", "verify", folder, "--format", "json")
    verdicts = {row["table"].rpartition("/")[2].partition(":")[0]: row for row in json.loads(out)}
    assert (
        code == 1
        and [verdicts[f"{n}.md"]["verdict"] for n in range(5)] == ["changed", "unchecked", "failed"] + ["same"] * 2
    )
    assert "'0.62 [0.5852, 0.6348]' -> '0.61 [0.5852, 0.6348]'" in verdicts["0.md"]["why"]
    assert not (folder / "x").exists() and "2 tables of" in err
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
    assert (code, row["verdict"]) == (1, "failed") and "--nope" in row["why"], (row, err)


def test_a_page_names_the_script_that_prints_its_tables(kl_comedy, tmp_path):
    def verdicts(text):
        page.write_text(text)
        code, out, _ = kl_comedy("results", "verify", page, "--format", "json")
        return code, [(row["verdict"], row["why"]) for row in json.loads(out)]

    page = tmp_path / "results" / "README.md"
    page.parent.mkdir()
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "tables.py").write_text(SCRIPT)
    text = "<!-- python tables.py 2 -->\n\ntext\n\n| a | b | b |\n|---|---|---|\n| 1 | 2 | 3 |\n\n"
    text += "<!-- unchecked: measured -->\n\n| x |\n|---|\n| 9 |\n\n| c |\n|---|\n| 4 |\n"
    same, tagged = ("same", ""), ("unchecked", "measured")
    assert verdicts(text) == (0, [same, tagged, same])
    assert verdicts(text.replace("| 3 |", "| 5 |")) == (1, [("changed", "b: '5' -> '3'"), tagged, same])
    (code, (_, _, _, extra)) = verdicts(text + "\n| d |\n|---|\n| 4 |\n")
    assert code == 1 and extra[0] == "failed" and "prints 2 tables, and this is number 3" in extra[1]
    for command, why in (
        ("tables.py", "fails: IndexError"),
        ("../out.py", "not a script"),
        ("-m none", "not a script"),
    ):
        code, ((verdict, reason), *_) = verdicts(text.replace("tables.py 2", command))
        assert code == 1 and verdict == "failed" and why in reason


@pytest.mark.slow
def test_the_tables_of_this_repository_are_those_of_its_exports(kl_comedy, without_mlflow):
    code, out, err = kl_comedy("results", "verify", ROOT / "results", "--format", "json")
    counts = Counter(row["verdict"] for row in json.loads(out))
    assert code == 0 and counts["same"] >= 70 and counts["changed"] == counts["failed"] == counts["no command"] == 0, (
        err
    )


def test_params_are_the_config_they_came_from():
    from kl_comedy.config import config_hash, flatten, load_config, to_plain
    from kl_comedy.tracking.store import param_texts

    for file in ("quickstart.yaml", "async_pocket.yaml", "paper/async_math_qwen2.5_7b.yaml", "study/base/smollm2.yaml"):
        config = load_config(ROOT / "configs" / file)
        assert nested(param_texts(flatten(to_plain(config)))) == json.loads(json.dumps(to_plain(config)))
        assert config_hash(config)
