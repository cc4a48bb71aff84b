"""The report: self-contained, escaped, and in a real browser sortable, filterable, readable on a phone, accessible."""

import math
import os
import re
from types import SimpleNamespace

import pandas as pd
import pytest

import browser
from kl_comedy.results import report
from kl_comedy.results.report import Bar, Cell, Study, Table, render_page
from kl_comedy.results.token_view import Viewer
from study_runs import EVAL, HOSTILE, KL


@pytest.fixture(scope="module")
def page(study, tmp_path_factory):
    """The file of a report on the whole study."""
    from typer.testing import CliRunner

    from kl_comedy.cli.main import app

    out = tmp_path_factory.mktemp("report") / "study.html"
    command = ["results", "report", "--uri", study, "--group", "kl.family,kl.betas", "--metric", f"{EVAL},{KL}"]
    done = CliRunner().invoke(app, [*command, "--title", "Study <1> & more", "--out", str(out)])
    assert done.exit_code == 0, done.output
    return out


def test_the_page_asks_for_nothing(page):
    text = page.read_text()
    assert not re.findall(r"""(?:src|href)=["'](?!data:|#)""", text)
    assert "@import" not in text
    assert "url(" not in text
    assert "default-src &#39;none&#39;" not in text
    assert "default-src 'none'" in text


def test_the_page_holds_everything(page):
    text = page.read_text()
    commit = "a" * 12
    assert "1 of 21 runs collapsed" in text
    assert "kl-comedy reproduce" in text
    assert "config.hash" in text
    assert commit in text
    assert "none: &lt;b&gt;bold" in text
    assert text.count('<details id="configuration-') == 7
    assert text.count('scope="row"') == 7 + 21, "configurations and runs"
    assert "Study &lt;1&gt; &amp; more" in text


def test_hostile_completions_are_text(page):
    text = page.read_text()
    assert HOSTILE not in text
    assert "<img src=x" not in text
    assert text.count("&lt;/script&gt;&lt;script&gt;window.hacked=1") == 7
    assert text.count("<script>") == 1


def test_every_text_of_a_page_is_escaped():
    bad = "<script>x</script>'\"&"
    rich = Cell(text=bad, details=((bad, bad),), commands=(bad,))
    soft = Cell(text=bad, soft=bad, link="a", bad=True, bar=Bar(1.0, 0.0, 2.0, seeds=[0.5], colour=bad))
    table = Table(names=(bad, bad), rows=((rich, rich), (soft, soft)))
    samples = [{"text": bad, "facts": [(bad, bad)]}]
    item = {"id": "a", "label": bad, "certificate": [(bad, bad)], "runs": [(bad, bad)], "samples": samples}
    picture = {"alt": bad, "data": "", "narrow": "x", "is_wide": True}
    part = {"title": bad, "headline": [picture], "results": table, "pictures": [picture]}
    html = render_page(
        title=bad,
        summary=bad,
        command=bad,
        headline=[bad],
        rules=[bad],
        warnings=[bad],
        seeds_of_an_interval=5,
        parts=[part, part],
        runs=table,
        configurations=[item],
        common=[(bad, bad)],
        tokens=Viewer("[]", 1, [bad]),
        token_uses={"t": bad},
    )
    assert "<script>x" not in html
    assert html.count("<script>") == 1
    assert "'\"&<" not in html


def test_parts_have_tables_and_pictures_of_their_own(kl_comedy, study, tmp_path):
    two_labels = "tags.kl.label LIKE '0.1 %'"
    options = ["--uri", study, "--where", two_labels, "--group", "kl.label", "--metric", EVAL, "--parts", "kl.family"]
    assert kl_comedy("results", "report", *options, "--out", tmp_path / "a.html")[0] == 0
    text = (tmp_path / "a.html").read_text()
    assert len(re.findall(r'<h3 id="part-\d">', text)) == 2
    assert text.count('class="sortable results"') == 2
    assert text.index('id="part-1">k1') < text.index('id="part-2">k3')
    assert text.count("<figure>") == 4


def test_the_headline_names_extremes_and_counts_what_collapsed(page):
    text = page.read_text()
    lines = re.search(r'<ul class="headline">(.*?)</ul>', text, re.DOTALL)[1]
    assert "Highest mean held-out reward among 7 configurations: 0.71 " in lines
    assert "k1 in reward total" in lines
    assert "Collapsed: 1 of 21 runs, in 1 of 7 configurations." in lines


def test_an_interval_is_cut_at_the_range_of_its_metric():
    summary = pd.DataFrame([{"name": "a", "metric": EVAL, "mean": 0.2, "n": 5, "low": -0.3, "high": 0.7, "runs": 5}])
    frame = pd.DataFrame({"name": "a", EVAL: [0.0, 0.0, 0.0, 0.0, 1.0], "seed": range(5)})
    study = Study("", frame, summary, ["name"], [EVAL])
    table = study.results_table(frame, {("a",): "configuration-1"})
    assert table.rows[0][1].soft == "[0, 0.7]"
    assert study._describe(summary.iloc[0].to_dict()) == "0.2 [0, 0.7] (n=5), name=a"


MEANS = pd.DataFrame(
    [
        {"name": "a", "metric": "m", "mean": 0.9, "n": 1},
        {"name": "b", "metric": "m", "mean": 0.5, "n": 5},
        {"name": "c", "metric": "m", "mean": 0.4, "n": 5},
        {"name": "d", "metric": "m", "mean": 0.1, "n": 2},
    ]
)
"""The extremes are of few seeds."""


def headline(summary):
    """The lines about the highest and the lowest mean."""
    highest, lowest = Study("", pd.DataFrame(), summary, ["name"], ["m"]).headline()
    return highest, lowest


def test_a_mean_of_few_seeds_is_no_extreme():
    highest, lowest = headline(MEANS.assign(low=float("nan"), high=float("nan")))
    assert highest.split(";")[0].endswith(", name=b")
    assert lowest.split(";")[0].endswith(", name=c")
    assert "among 2" in highest
    assert highest.endswith("; not resolved: a single seed has no interval.")
    assert lowest.endswith("; not resolved: a single seed has no interval.")


def test_an_extreme_whose_interval_overlaps_another_is_not_resolved():
    highest, _ = headline(MEANS.assign(low=0.0, high=1.0))
    assert "; not resolved: 1 of 1 other intervals overlap this one, nearest 0.4 [0, 1] (n=5), name=c." in highest


def test_rows_with_the_seeds_of_the_median_row_compete():
    highest, _ = headline(MEANS.assign(n=[1, 3, 3, 5], low=0.0, high=1.0))
    assert "among 3 configurations" in highest
    assert highest.split(";")[0].endswith(", name=b")


def one_failed():
    """A configuration of three runs, whose mean is over the two that finished."""
    row = {"name": "a", "metric": EVAL, "mean": 0.2, "n": 2, "low": math.nan, "high": math.nan, "runs": 3}
    frame = pd.DataFrame(
        {
            "name": "a",
            "run_id": ["x", "y", "z"],
            "run_name": "a",
            EVAL: [0.9, 0.1, 0.3],
            "params.seed": ["0", "1", "2"],
            "status": ["FAILED", "FINISHED", "FINISHED"],
            "tags.git.commit": "c" * 12,
            "tags.config.hash": ["h0", "h1", "h2"],
        }
    )
    frame["seed"] = frame["params.seed"]
    return Study("", frame, pd.DataFrame([row]), ["name"], [EVAL])


def test_single_runs_are_shown_only_where_the_mean_is_over_all_of_them():
    study = one_failed()
    (row,) = study.results_table(study.frame, {("a",): "configuration-1"}).rows
    assert row[1].text == "0.2"
    assert "runs:" not in row[1].soft
    assert "2 of 3" in [cell.text for cell in row], "seeds of the mean, of all runs"


def test_completions_are_those_of_a_run_that_finished(monkeypatch):
    asked = []

    def completions(run_id):
        asked.append(run_id)
        return []

    monkeypatch.setattr(report, "open_runs", lambda uri: SimpleNamespace(completions=completions))
    study = one_failed()
    study.configuration(study.frame)
    assert asked == ["y"]


@pytest.mark.parametrize(("steps", "pictures"), [(2, 0), (3, 1)])
def test_a_metric_of_two_points_is_in_the_table_and_no_picture(steps, pictures):
    study = one_failed()
    points = [(run_id, step, 0.1 * step) for run_id in "xyz" for step in range(steps)]
    curves = {EVAL: pd.DataFrame(points, columns=["run_id", "step", "value"])}
    assert len(list(study.pictures(study.frame, curves, None, []))) == pictures


def test_an_extreme_whose_interval_overlaps_no_other_is_resolved():
    highest, lowest = headline(MEANS.assign(low=MEANS["mean"] - 0.01, high=MEANS["mean"] + 0.01))
    assert highest.endswith("; resolved: no other interval overlaps this one.")
    assert lowest.endswith("; resolved: no other interval overlaps this one.")


def needs_browser(test):
    absent = browser.program() is None and not os.environ.get("KL_COMEDY_NEED_BROWSER")
    return pytest.mark.slow(pytest.mark.skipif(absent, reason="no Chromium here")(test))


@pytest.fixture(scope="module")
def tab(page):
    opened = browser.Browser()
    yield opened
    opened.close()


@needs_browser
def test_in_a_browser_nothing_is_asked_for_and_nothing_hostile_runs(tab, page):
    tab.requests.clear()
    tab.open(page.as_uri(), 1280, 900)
    assert [url for url in tab.requests if not url.startswith("data:")] == [page.as_uri()]
    assert tab.evaluate("window.hacked") is None
    assert tab.errors == []
    assert tab.evaluate("[...document.images].every((image) => image.complete && image.naturalWidth > 100)")
    assert tab.evaluate("document.images.length") == 3


@needs_browser
def test_tables_sort_and_filter(tab, page):
    tab.open(page.as_uri(), 1280, 900)
    column = "[...document.querySelectorAll('#results-1 tbody tr')].map((row) => row.cells[2].dataset.value)"
    button = "document.querySelectorAll('#results-1 thead button')[2]"
    for order in ("ascending", "descending"):
        tab.evaluate(f"{button}.click()")
        assert tab.evaluate(f"{button}.closest('th').getAttribute('aria-sort')") == order
        values = [float(value) for value in tab.evaluate(column)]
        assert len(values) == 7
        assert values == sorted(values, reverse=order == "descending")
    field = "document.getElementById('runs-filter')"
    tab.evaluate(f"{field}.value = 'k3 0.05 collapsed'; {field}.dispatchEvent(new Event('input'))")
    assert tab.evaluate("document.querySelectorAll('#runs-table tbody tr:not([hidden])').length") == 1
    assert tab.evaluate("document.getElementById('runs-filter-count').textContent") == "1 of 21 rows"
