"""Rewards against KL over training: what a line goes through, read from a stored export."""

import re

import pandas as pd
import pytest

from kl_comedy.results.runs import with_derived

GOLD = "eval/heldout/reward"
PROXY = "eval/heldout/proxy"
KL = "eval/heldout/kl/exact_reverse_sequence"

RUNS = {
    # run: seed, label, and (update, KL, gold, proxy) of each evaluation
    "a0": (0, "no KL", [(0, 0.0, 0.4, 0.4), (5, 1.0, 0.6, 1.0), (10, 4.0, 0.0, 2.0)]),
    "a1": (1, "no KL", [(0, 0.0, 0.2, 0.2), (5, 3.0, 0.4, 1.4)]),
    "b0": (0, "0.1 k1_reverse_token in reward total", [(0, 0.0, 0.4, 0.4), (5, 0.5, 0.5, 0.6), (10, 0.8, 0.7, 0.8)]),
}


@pytest.fixture
def export(tmp_path):
    """A stored export of three runs with a gold verdict, one of which ended early."""
    rows = []
    points = []
    for run, (seed, label, updates) in RUNS.items():
        _, kl, gold, proxy = updates[-1]
        values = {f"metrics.{KL}": kl, f"metrics.{GOLD}": gold, f"metrics.{PROXY}": proxy}
        names = {"params.seed": str(seed), "params.name": label, "tags.kl.label": label}
        rows.append({"run_id": run, "status": "FINISHED", "experiment": "hack", "start_time": 1, **names, **values})
        for step, *at_step in updates:
            for metric, value in zip((KL, GOLD, PROXY), at_step, strict=True):
                points.append({"run_id": run, "metric": metric, "step": step, "value": value, "recorded": 3})
    file = tmp_path / "export.parquet"
    with_derived(pd.DataFrame(rows)).to_parquet(file)
    pd.DataFrame(points).to_parquet(tmp_path / "export.curves.parquet")
    return file


def test_gold_and_proxy_of_an_export_are_drawn_against_its_kl(export, kl_comedy, monkeypatch, tmp_path):
    figures = []
    monkeypatch.setattr("kl_comedy.results.figures.save_figure", lambda figure, out: figures.append(figure))
    options = ["--uri", export, "--kind", "path", "--metric", f"{GOLD},{PROXY}", "--out", tmp_path / "path.svg"]
    code, _, err = kl_comedy("results", "plot", *options)
    assert code == 0, err
    (figure,) = figures
    gold, proxy = figure.axes
    means = {}
    for axes in (gold, proxy):
        for line in axes.lines:
            kind, _, _, family = line.get_gid().split(".", 3)
            if kind == "mean":
                means[axes is gold, family[:2]] = line.get_xydata().ravel().tolist()
    # KL and value of each update in turn. Of the runs without KL one ended at update 5, and the mean stops there.
    assert means[True, "no"] == pytest.approx([0.0, 0.3, 2.0, 0.5])
    assert means[False, "no"] == pytest.approx([0.0, 0.3, 2.0, 1.2])
    assert means[True, "k1"] == pytest.approx([0.0, 0.4, 0.5, 0.5, 0.8, 0.7])
    assert means[False, "k1"] == pytest.approx([0.0, 0.4, 0.5, 0.6, 0.8, 0.8])
    assert sum(line.get_gid().startswith("run") for line in gold.lines) == 2, "the single seeds of the mean of two"
    # The root of the axis: KL 1 is half way to KL 4.
    places = gold.xaxis.get_transform().transform([0.0, 1.0, 4.0])
    assert list(places) == pytest.approx([0.0, 1.0, 2.0])


@pytest.mark.parametrize("metric", [PROXY, "eval/*/proxy", "train/gold"])
def test_runs_without_a_gold_verdict_say_so_in_a_line(kl_comedy, export, tmp_path, metric):
    pd.read_parquet(export).drop(columns=f"metrics.{PROXY}").to_parquet(export)
    options = ["--uri", export, "--kind", "path", "--metric", metric, "--out", tmp_path / "a.svg"]
    code, out, err = kl_comedy("results", "plot", *options)
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert re.search(r"--metric: got .*\(config key `gold`\)", line)
