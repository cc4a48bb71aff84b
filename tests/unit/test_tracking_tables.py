"""Tables against golden files. KL_COMEDY_UPDATE_GOLDEN=1 writes the golden files anew."""

import csv
import io
import json
import math
import os
from pathlib import Path

import pandas as pd
import pytest

from kl_comedy.errors import UserError
from kl_comedy.tracking.compare import band, summarize
from kl_comedy.tracking.plots import draw
from kl_comedy.tracking.tables import FORMATS, MACHINE_FORMATS, readable, render

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


@pytest.mark.parametrize("format", SUFFIX)
def test_golden(summary, format):
    shown = summary if format in MACHINE_FORMATS else readable(summary, GROUP)
    text = render(shown, format) + "\n"
    file = GOLDEN / f"tracking_table.{SUFFIX[format]}"
    if os.environ.get("KL_COMEDY_UPDATE_GOLDEN"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8")


def test_csv_and_json_keep_full_precision(summary):
    rows = list(csv.DictReader(io.StringIO(render(summary, "csv"))))
    same = json.loads(render(summary, "json"))
    assert float(rows[0]["mean"]) == same[0]["mean"] == summary["mean"][0]
    assert same[2]["low"] is None and rows[2]["low"] == ""
    assert len(rows) == len(same) == 6


@pytest.mark.parametrize("format", FORMATS)
def test_hostile_names_stay_data(format):
    name = "[red]x[/red]\n| evil | \\input{/etc/passwd} ${a}$"
    text = render(pd.DataFrame({"name": [name], "n": [1]}), format)
    if format == "json":
        assert json.loads(text)[0]["name"] == name
    elif format == "csv":
        assert next(csv.DictReader(io.StringIO(text)))["name"] == name
    elif format == "latex":
        assert r"\input" not in text and r"\textbackslash{}input\{" in text
    elif format == "markdown":
        assert len(text.splitlines()) == 3 and r"\| evil \|" in text
    else:
        assert "[red]x[/red] | evil" in text and len(text.splitlines()) == 3


def test_wide_tables_are_not_cut():
    frame = pd.DataFrame({f"column {at}": ["x" * 60] for at in range(20)})
    assert render(frame, "text").count("x" * 60) == 20


def test_unknown_format_names_the_nearest():
    with pytest.raises(UserError, match="did you mean 'markdown'"):
        render(pd.DataFrame(), "markdwn")


def test_figure_has_a_line_and_a_band_a_group():
    both = band(pd.DataFrame({"step": [1, 1, 2, 2], "value": [0.0, 1.0, 1.0, 2.0]}))
    one = band(pd.DataFrame({"step": [1, 2], "value": [0.0, 1.0]}))
    figure = draw({"train/reward": {"k3 $x": both, "_k1": one}})
    (axes,) = figure.axes
    assert [line.get_ydata().tolist() for line in axes.lines] == [[0.5, 1.5], [0.0, 1.0]]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [r"k3 \$x (n=2)", " _k1 (n=1)"]
    assert axes.get_xlabel() == "step (optimizer updates)" and axes.get_ylabel() == "train/reward"
    filled, empty = axes.collections
    low, high = both["low"].min(), both["high"].max()
    bounds = filled.get_datalim(axes.transData)
    assert (bounds.y0, bounds.y1) == pytest.approx((low, high))
    assert len(empty.get_paths()) == 0 or math.isnan(empty.get_paths()[0].vertices).all()
