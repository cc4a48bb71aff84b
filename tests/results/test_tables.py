"""Means over groups of runs; tables against golden files (KL_COMEDY_UPDATE_GOLDEN=1 writes them anew)."""

import csv
import io
import json
import math
import os
from pathlib import Path

import pandas as pd
import pytest

from kl_comedy.errors import UserError
from kl_comedy.results.compare import EqualKL, band, compare_families, summarize
from kl_comedy.results.runs import resolve
from kl_comedy.results.selection import without_second_name
from kl_comedy.results.tables import FORMATS, Estimate, fitted, markdown, readable, render
from kl_comedy.results.values import drop_repeats, mixed_code, separating_keys
from kl_comedy.statistics import interval

GOLDEN = Path(__file__).parents[1] / "golden"
SUFFIX = {"text": "txt", "markdown": "md", "csv": "csv", "json": "json", "latex": "tex"}
GROUP = ["params.name", "tags.kl.label"]
METRICS = ["metrics.eval/pocket/reward", "metrics.train/reward"]


@pytest.fixture(scope="module")
def summary():
    rows = [
        ("grpo", "k3 loss token β=0.05", "FINISHED", 0.50, 0.61),
        ("grpo", "k3 loss token β=0.05", "FINISHED", 0.54, 0.66),
        ("grpo", "k3 loss token β=0.05", "FINISHED", 0.58, math.nan),
        ("comedy", "k1 | reward [to_go] $&%", "FINISHED", 0.71, 0.8),
        ("comedy", "k1 | reward [to_go] $&%", "FAILED", 0.1, 0.1),
        ("none", "", "RUNNING", 0.2, 0.2),
    ]
    frame = pd.DataFrame(rows, columns=[*GROUP, "status", *METRICS])
    return summarize(frame, GROUP, METRICS)


@pytest.mark.parametrize("start", [None, "start"])
def test_a_run_counts_once_on_a_frontier_whatever_points_it_has(start):
    """Two families of three seeds and two betas, a run without KL a seed; two runs of the first family collapsed."""
    kl_of = {"k1": {"0.1": 4.0, "0.2": 2.0}, "k3": {"0.1": 5.0, "0.2": 3.0}, "no KL": {"0": 9.0}}
    rows = []
    for family, betas in kl_of.items():
        for beta, nats in betas.items():
            for seed in range(3):
                run = {"tags.kl.family": family, "tags.kl.beta": beta, "params.seed": seed, "kl": nats + 0.1 * seed}
                rows.append(run)
    frame = pd.DataFrame(rows).assign(reward=0.5, start=0.4)
    frame["collapsed"] = (frame["tags.kl.family"] == "k1") & (frame["kl"] > 4.05)
    at_kl = EqualKL(column="kl", nats=[2.5, 3.5], start=start)
    table = compare_families(frame, [], "reward", "k3", "t", at_kl=at_kl)
    counted = table.set_index(["kl.family", "at"])[["runs", "collapsed"]]
    for at in ("KL 2.5", "KL 3.5"):
        assert counted.loc[("k1", at)].tolist() == [9, 2], "six of its own, three without KL"
        assert counted.loc[("k3", at)].tolist() == [9, 0]
        assert counted.loc[("no KL", at)].tolist() == [3, 0]


@pytest.mark.parametrize("missing", METRICS)
def test_the_column_n_counts_the_runs_of_the_most_complete_metric(missing):
    rows = [("grpo", "k3", "FINISHED", 0.50, 0.61), ("grpo", "k3", "FINISHED", 0.54, 0.66)]
    frame = pd.DataFrame(rows, columns=[*GROUP, "status", *METRICS])
    frame.loc[0, missing] = math.nan
    (row,) = readable(summarize(frame, GROUP, METRICS), GROUP).to_dict("records")
    assert row["n"] == 2
    noted = [name for name, cell in row.items() if "(n=1)" in str(cell)]
    assert noted == [missing.removeprefix("metrics.")]


@pytest.mark.parametrize("format", SUFFIX)
def test_golden(summary, format):
    shown = summary if format in ("csv", "json") else readable(summary, GROUP)
    text = render(shown, format) + "\n"
    file = GOLDEN / f"tracking_table.{SUFFIX[format]}"
    if os.environ.get("KL_COMEDY_UPDATE_GOLDEN"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8")


def test_csv_and_json_keep_full_precision(summary):
    of_csv = list(csv.DictReader(io.StringIO(render(summary, "csv"))))
    of_json = json.loads(render(summary, "json"))
    assert len(of_csv) == 6
    assert len(of_json) == 6
    assert float(of_csv[0]["mean"]) == summary["mean"][0]
    assert of_json[0]["mean"] == summary["mean"][0]
    # A single run has no interval.
    assert of_csv[2]["low"] == ""
    assert of_json[2]["low"] is None


HOSTILE_NAME = "[red]x[/red]\n| evil | \\input{/etc/passwd} ${a}$"


@pytest.fixture
def hostile():
    return pd.DataFrame({"name": [HOSTILE_NAME], "n": [1]})


def test_a_hostile_name_is_whole_in_json_and_csv(hostile):
    assert json.loads(render(hostile, "json"))[0]["name"] == HOSTILE_NAME
    assert next(csv.DictReader(io.StringIO(render(hostile, "csv"))))["name"] == HOSTILE_NAME


def test_a_hostile_name_is_no_command_of_latex(hostile):
    text = render(hostile, "latex")
    assert r"\input" not in text
    assert r"\textbackslash{}input\{" in text


def test_a_hostile_name_is_one_cell_of_markdown(hostile):
    text = render(hostile, "markdown")
    assert len(text.splitlines()) == 3
    assert r"\| evil \| \\input" in text
    assert markdown(["a\nb"], [["x | y"]]) == "| a b |\n|---|\n| x \\| y |"


@pytest.mark.parametrize("format", ["text", "table"])
def test_a_hostile_name_is_one_line_of_text_without_markup(hostile, format):
    text = render(hostile, format)
    assert "[red]x[/red] | evil" in text
    assert len(text.splitlines()) == 3


def test_text_and_table_are_the_same(hostile):
    assert render(hostile, "text") == render(hostile, "table")


ESCAPES = pd.DataFrame({"a\x1b[31m<img src=x>": ["\x1b]0;t\x07<b>x</b>\x9b2J p < 0.05\u202e"], "n": [-1.5]})
"""Sequences that a terminal obeys, a mark that turns the text around, and HTML."""


@pytest.mark.parametrize("format", [format for format in FORMATS if format != "json"])
def test_no_format_for_reading_has_control_characters(format):
    text = render(ESCAPES, format, notes=["<i>\x1b[2J"])
    assert not set("\x1b\x07\x9b\u202e") & set(text)


def test_json_with_control_characters_is_rendered():
    assert render(ESCAPES, "json", notes=["<i>\x1b[2J"])


def test_markdown_has_no_html():
    text = render(ESCAPES, "markdown", notes=["<i>\x1b[2J"])
    assert "&lt;b>x&lt;/b> p < 0.05" in text
    assert "a&lt;img src" in text
    assert "\n&lt;i>" in text


def test_texts_of_csv_that_a_spreadsheet_would_compute_are_quoted():
    frame = pd.DataFrame({"@x": ["=HYPERLINK(1)", "+1", "@a", "-", "k1"], "n": [-1.0, 2.0, math.nan, 0.0, 1e-7]})
    lines = render(frame, "csv").splitlines()
    assert lines == ["'@x,n", "'=HYPERLINK(1),-1.0", "'+1,2.0", "'@a,", "-,0.0", "k1,1e-07"]


# The last six begin with signs of other scripts, which spreadsheets take for =, +, - and @.
@pytest.mark.parametrize(
    "formula",
    [
        "-1+1",
        "-HYPERLINK(1)",
        "-a",
        "--1",
        "\uff1d1",
        "\uff0b1",
        "\uff0d1",
        "\uff201",
        "\u22121+1",
        "\ufe66x",
    ],
)
def test_a_formula_of_csv_is_quoted_whatever_stands_before_it(formula):
    for before in ("", " ", "\u00a0", "\ufeff", "\u200b", "\n", "\t"):
        _, cell = render(pd.DataFrame({"x": [f"{before}{formula}"]}), "csv").split("\n", 1)
        assert cell.lstrip('"').startswith("'"), repr(before)


@pytest.mark.parametrize("number", ["-1", "-0.5", "-1e-07", "-.5", "-1.", "-", "1", "1e-4"])
def test_a_number_of_csv_is_not_quoted(number):
    assert render(pd.DataFrame({"x": [number]}), "csv") == f"x\n{number}"


def test_a_wide_table_is_not_cut():
    wide = pd.DataFrame({f"column {n}": ["x" * 60] for n in range(20)})
    assert render(wide, "text").count("x" * 60) == 20


@pytest.mark.parametrize("format", FORMATS)
def test_a_table_without_rows(format):
    text = render(pd.DataFrame(columns=["name", "n"]), format)
    if format != "json":
        assert "name" in text


def test_an_unknown_format_is_refused():
    with pytest.raises(UserError, match="did you mean 'markdown'"):
        render(pd.DataFrame(), "markdwn")


def runs(*rows):
    """A frame of runs, which are finished unless a row says otherwise."""
    base = {"status": "FINISHED", "start_time": 0}
    return pd.DataFrame([{**base, "run_id": str(number), **row} for number, row in enumerate(rows)])


def test_summarize_counts_finished_runs_and_shows_the_lost():
    frame = runs(
        {"params.name": "b", "metrics.x": 1.0},
        {"params.name": "a", "metrics.x": 5.0},
        {"params.name": "b", "metrics.x": 3.0},
        {"params.name": "b", "metrics.x": 100.0, "status": "FAILED"},
        {"params.name": "b", "metrics.x": math.nan},
        {"params.name": "b", "metrics.x": 100.0, "status": "RUNNING"},
    )
    of_b, of_a = summarize(frame, ["params.name"], ["metrics.x"], run_ids=True).to_dict("records")
    assert of_b["params.name"] == "b"
    assert of_b["n"] == 2
    assert of_b["mean"] == 2.0
    assert of_b["runs"] == 5
    assert of_b["failed"] == 1
    assert of_b["low"] == pytest.approx(2 - 12.7062047), "Student's t of two runs, one from the mean"
    assert of_b["run_ids"] == "0 2"
    assert of_a["n"] == 1
    assert of_a["mean"] == 5.0
    assert math.isnan(of_a["low"])
    everything = summarize(frame, [], ["metrics.x"], statuses=("FINISHED", "RUNNING", "FAILED"))
    assert everything["n"].tolist() == [5]
    assert summarize(frame, ["params.name"], ["metrics.x"], statuses=("KILLED",))["n"].tolist() == [0, 0]
    lacking = runs({"params.a": "1", "metrics.x": 1.0}, {"metrics.x": 2.0})
    assert summarize(lacking, ["params.a"], ["metrics.x"])["params.a"].tolist() == ["1", ""]


def test_a_band_is_the_t_interval_of_each_step_without_what_is_not_finite():
    values = {1: [1.0, 3.0, 4.5], 2: [math.nan, 2.0], 3: [math.inf], 7: [0.5, 0.25]}
    points = []
    for step, values_of_step in values.items():
        points += [(step, value) for value in values_of_step]
    first, second, last = band(pd.DataFrame(points, columns=["step", "value"])).to_dict("records")

    assert (first["step"], first["n"]) == (1, 3)
    expected = interval([1.0, 3.0, 4.5])
    assert first["mean"] == expected.mean
    assert first["low"] == expected.low
    assert first["high"] == expected.high

    assert (second["step"], second["n"]) == (2, 1)
    assert second["mean"] == 2.0
    assert interval([2.0]).low is None
    assert math.isnan(second["low"])

    assert (last["step"], last["n"]) == (7, 2)
    expected = interval([0.5, 0.25])
    assert last["mean"] == expected.mean
    assert last["low"] == expected.low
    assert last["high"] == expected.high


def test_the_band_of_no_points_is_empty():
    assert band(pd.DataFrame(columns=["step", "value"])).empty


def test_a_repeat_of_config_and_seed_counts_once():
    frame = runs(
        {"params.seed": "0", "params.lr": "1", "params.output": "a", "start_time": 1},
        {"params.seed": "0", "params.lr": "1", "params.output": "b", "start_time": 2},
        {"params.seed": "0", "params.lr": "1", "params.output": "c", "start_time": 3, "status": "FAILED"},
        {"params.seed": "1", "params.lr": "1", "params.output": "b", "start_time": 2},
    )
    assert drop_repeats(frame)["run_id"].tolist() == ["1", "3"]
    named = frame.assign(**{"params.name": ["x", "y", "z", "x"], "tags.sweep": ["s", "t", "t", "t"]})
    assert drop_repeats(named)["run_id"].tolist() == ["1", "3"], "a name makes no other configuration"
    assert drop_repeats(named, groups=["tags.sweep"])["run_id"].tolist() == ["0", "1", "3"]
    nodes = frame.assign(**{"params.train.nodes": ["1", "2", "4", "1"]})
    assert drop_repeats(nodes)["run_id"].tolist() == ["1", "3"], "nor does where it ran"


def test_runs_of_other_settings_are_kept_apart_by_as_few_keys_as_it_takes():
    frame = runs(
        {"params.name": "a", "params.seed": "0", "params.lr": "1", "params.b": "x"},
        {"params.name": "a", "params.seed": "1", "params.lr": "2", "params.b": "x"},
        {"params.name": "b", "params.seed": "0", "params.lr": "1", "params.b": "y"},
    )
    assert separating_keys(frame, ["params.name"]) == ["params.lr"]
    assert separating_keys(frame, ["params.name"], ["params.lr"]) == []
    assert separating_keys(frame, ["params.name", "params.lr"]) == []
    assert separating_keys(frame, []) == ["params.lr", "params.b"]
    assert separating_keys(frame.assign(**{"params.c": frame["params.lr"]}), []) == ["params.lr", "params.b"]
    older = frame.assign(**{"params.train.exact_kl_every": [None, "1", "1"], "params.lr": "1"})
    assert separating_keys(older, ["params.name"]) == [], "a key that a run lacks is at its default"
    follows = frame.assign(**{"params.lr": "1", "params.b": "1", "params.model.options.seed": ["7", "8", "7"]})
    assert separating_keys(follows, []) == [], "a seed that follows the seed"
    other = follows.assign(**{"params.model.options.seed": ["7", "8", "9"]})
    assert separating_keys(other, []) == ["params.model.options.seed"]
    plugins = older.assign(**{"tags.plugins": [None, "a.py 12", "a.py 12"]})
    assert separating_keys(plugins, ["params.name"]) == ["tags.plugins"]


@pytest.mark.parametrize(
    ("change", "mixed"),
    [
        ({"tags.code": "b"}, []),
        ({"tags.code.package": "q"}, ["tags.code"]),
        ({"tags.git.diff": "d"}, ["tags.code"]),
        ({"tags.code": "b", "tags.code.package": None}, ["tags.code"]),
    ],
    ids=["a commit that did not change the package", "package", "diff", "commit, package not recorded"],
)
def test_the_same_code_is_the_same_package_and_the_same_diff(change, mixed):
    base = {"params.seed": "0", "tags.code": "a", "tags.code.package": "p", "tags.git.diff": ""}
    assert mixed_code(runs(base, {**base, **change}), []) == mixed


def test_the_same_commit_is_the_same_code_where_no_package_is_recorded():
    assert mixed_code(runs({"tags.code": "a"}, {"tags.code": "a"}), []) == []


def test_keys_resolve_to_columns_and_misses_name_the_nearest():
    frame = runs({"params.algorithm.advantage": "rloo", "tags.kl.label": "k3", "metrics.train/reward": 1.0})
    assert resolve(frame, "algorithm.advantage", "--group") == "params.algorithm.advantage"
    assert resolve(frame, "kl", "--group") == "tags.kl.label"
    assert resolve(frame, "kl.label", "--group") == "tags.kl.label"
    assert resolve(frame, "status", "--group") == "status"
    with pytest.raises(UserError, match=r"did you mean 'algorithm\.advantage'"):
        resolve(frame, "algorithm.advantag", "--group")
    with pytest.raises(UserError, match="train/reward"):
        resolve(frame, "loss", "--metric")
    with pytest.raises(UserError, match=r"group of keys: algorithm\.advantage"):
        resolve(frame, "algorithm", "--group")


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ([("k1-beta0.03", "0.03 k1"), ("k1-beta0.03", "0.03 k1"), ("none", "no KL")], ["tags.kl.label", "params.lr"]),
        ([("quickstart", "0.03 k1"), ("quickstart", "0.03 k1")], [*GROUP, "params.lr"]),
        ([("slow", "0.03 k1"), ("fast", "0.03 k1")], [*GROUP, "params.lr"]),
        ([("study", "0.03 k1"), ("study", "no KL")], [*GROUP, "params.lr"]),
        ([("other program", None), ("another", None)], [*GROUP, "params.lr"]),
    ],
    ids=["name says the label", "one configuration", "two names of a label", "two labels of a name", "no labels"],
)
def test_a_name_that_says_what_the_label_says_is_left_out(pairs, expected):
    frame = pd.DataFrame(pairs, columns=GROUP).assign(**{"params.lr": "0.1"})
    assert without_second_name(frame, [*GROUP, "params.lr"]) == expected


def test_groups_without_a_name_or_a_label_stay():
    frame = pd.DataFrame({"params.name": ["a", "b"], "params.lr": ["1", "2"]})
    assert without_second_name(frame, ["params.name", "params.lr"]) == ["params.name", "params.lr"]
    assert without_second_name(frame, ["params.lr"]) == ["params.lr"]


SETS = ("heldout", "two_digits", "ood")


@pytest.mark.parametrize(
    ("key", "score", "meant"),
    [
        ("acc", "accuracy", "eval/*/accuracy"),
        ("acc", "reward", "eval/*/reward"),
        ("eval/heldout/acuracy", "accuracy", "eval/heldout/accuracy"),
        ("metrics.train/rewrd", "reward", "train/reward"),
    ],
)
def test_a_metric_that_no_run_has_is_answered_by_what_is_meant_and_a_short_list(key, score, meant):
    names = ["train/reward", *[f"kl/estimator_{number}" for number in range(50)]]
    for eval_set in SETS:
        names += [f"eval/{eval_set}/{score}", f"eval/{eval_set}/kl/exact_reverse_sequence"]
    frame = pd.DataFrame({f"metrics.{name}": [0.5] for name in names})
    with pytest.raises(UserError) as error:
        resolve(frame, key, "--metric")
    message = str(error.value)
    assert message.startswith(f"--metric: got {key!r}; no such key in these runs; did you mean {meant!r}? allowed: ")
    # 50 estimators, the training reward, and two metrics of the evaluation sets.
    assert message.endswith(" and 45 more")
    assert len(message) < 300


def estimates(metric, *cells):
    return [Estimate(metric=metric, mean=mean, low=low, high=high, remark=remark) for mean, low, high, remark in cells]


KL_NAME = "eval/heldout/kl/exact_reverse_sequence"
WIDE = pd.DataFrame(
    {
        "kl.label": ["0.05 k1_reverse_token in reward to_go", "no KL"],
        "optimizer.lr": ["0.0002", "0.001"],
        "n": [5, 5],
        "eval/heldout/reward": estimates("reward", (0.5, -1.618, 2.618, ""), (0.44712, 0.40106, 0.49321, "")),
        KL_NAME: estimates(KL_NAME, (0.012341, 0.01, 0.0146, ""), (12.3, -10.1, 34.7, "")),
        "train/reward": estimates("reward", (0.4, 0.3, 0.5, ""), (0.6, 0.5, 0.7, " (n=4)")),
        "policy/correction/tis/masked_share": estimates("share", (0.01, 0.0, 0.02, ""), (0.0, 0.0, 0.0, "")),
        "runs": [5, 5],
        "failed": [0, 0],
        "collapsed": [0, 1],
    }
)
"""What `results table` makes of a small study, 230 characters wide."""
WIDE_CELLS = {
    "eval/heldout/reward": ["0.5 [-1.6, 2.6]", "0.447 [0.401, 0.493]"],
    KL_NAME: ["0.0123 [0.0100, 0.0146]", "12 [0, 35]"],
    "train/reward": ["0.40 [0.30, 0.50]", "0.60 [0.50, 0.70] (n=4)"],
    "policy/correction/tis/masked_share": ["0.010 [0, 0.020]", "0 [0, 0]"],
}
"""The estimates of WIDE with two digits of their half widths, rounded by hand; a KL is not below 0."""


def words_of(text):
    return "".join(text.split())


@pytest.mark.parametrize("width", [30, 60, 80, 100, 120, 160])
def test_a_table_is_no_wider_than_the_terminal_and_nothing_of_it_is_cut(width):
    lines = fitted(WIDE, width).splitlines()
    assert max(map(len, lines)) <= width
    text = words_of(" ".join(lines))
    assert "…" not in text
    assert "..." not in text
    if width < 80:  # a block per row: each cell is in one piece
        for column in WIDE.columns.drop("failed"):
            for value in WIDE_CELLS.get(column, WIDE[column]):
                assert words_of(str(value)) in text, column
    if width > 30:  # where an estimate fits at all, it is on one line
        for value in [value for values in WIDE_CELLS.values() for value in values]:
            assert any(value in line for line in lines), value
    assert "heldoutKL/completion=eval/heldout/kl/exact_reverse_sequence" in text
    assert "failed" not in text, "all of its counts are 0"
    assert "collapsed" in text


def test_a_table_that_goes_into_a_pipe_has_four_digits():
    assert fitted(WIDE, 0) == render(WIDE, "text")
    assert "12.3 [-10.1, 34.7]" in fitted(WIDE, 0)


def test_a_table_that_fits_has_its_whole_heads_and_two_digits():
    head, _, first, second = fitted(WIDE, 400).splitlines()
    assert head.split() == list(WIDE)
    for values in WIDE_CELLS.values():
        assert values[0] in first
        assert values[1] in second


@pytest.mark.parametrize("format", ["text", "markdown", "latex"])
def test_a_table_that_is_stored_has_four_digits_and_the_interval_as_computed(format):
    assert "12.3 [-10.1, 34.7]" in render(WIDE, format)


@pytest.mark.parametrize(("width", "lines"), [(23, 4), (20, 7)])
def test_only_rows_of_several_lines_have_an_empty_line_between_them(width, lines):
    frame = pd.DataFrame({"name": ["seventeen letters", "as many as before"], "runs": [10, 20]})
    # tabulate's columns of numbers are wider than their heads: 25 characters for what fits into 23.
    assert max(map(len, render(frame, "text").splitlines())) == 25
    assert len(fitted(frame, width).splitlines()) == lines


def test_two_columns_do_not_get_one_head():
    frame = pd.DataFrame({"kl_term/0/capped_share": ["x" * 30], "kl_term/1/capped_share": ["y" * 30], "a/b": ["z"]})
    text = fitted(frame, 62)
    assert max(map(len, text.splitlines())) <= 62
    assert "kl_term/0/capped_share" in words_of(text)
    assert "b = a/b" in text


def test_an_empty_table_and_a_long_word_fit():
    assert fitted(pd.DataFrame({"a": [], "b" * 50: []}), 20)
    text = fitted(pd.DataFrame({"name": ["w" * 300], "n": [3]}), 40)
    assert max(map(len, text.splitlines())) <= 40
    assert text.count("w") == 300
