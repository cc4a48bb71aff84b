"""The report: self-contained, escaped, and in a real browser sortable, filterable, readable on a phone, accessible."""

import importlib.util
import itertools
import math
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
from matplotlib.colors import to_hex

import browser
from kl_comedy.results import report
from kl_comedy.results.looks import family_look
from kl_comedy.results.report import Bar, Cell, Study, Table, _BarAxis, render_page
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


def test_a_picture_then_one_table_then_what_is_folded(page):
    text = page.read_text()
    picture = text.index("<figure>")
    table = text.index('<table class="sortable results"')
    folded = text.index("<details")
    assert picture < table < folded
    assert text.count('<table class="sortable results"') == 1
    assert text.count("<figure>") == 3
    assert text.index("2 more pictures") > table
    assert "<details open" not in text


def test_the_heads_of_columns_are_words(page):
    heads = re.findall(r'<th scope="col"[^>]*><button type="button">(.*?)</button>', page.read_text())
    assert heads[:4] == ["KL family", "beta", "held-out reward", "held-out exact KL(π‖ref) per completion (nats)"]
    assert not [head for head in heads if "_" in head or "." in head or "<wbr>" in head]


def test_a_row_has_its_familys_colour_and_three_seeds_as_single_runs(page):
    text = page.read_text()
    rows = re.findall(r'<th scope="row"[^>]*><a href="#configuration-\d+">(.*?)</a>.*?</tr>', text, re.DOTALL)
    assert {"no KL", "k3 in loss", "k1 in reward total"} <= set(rows)
    for family, colour in (("k3 in loss", family_look("k3_reverse_token in loss").colour), ("no KL", "0.45")):
        row = re.search(rf'<a href="#configuration-\d+">{family}</a>.*?</tr>', text, re.DOTALL)[0]
        bar = re.search(r'<svg class="bar".*?</svg>', row, re.DOTALL)[0]
        assert f'color="{to_hex(colour)}"' in bar.lower()
        assert bar.count('class="seed"') == 3
        assert "<path" not in bar, "no interval below five seeds"
        assert re.search(r"runs: [\d.]+, [\d.]+, [\d.]+<", row)


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


def test_of_several_overlapping_intervals_the_nearest_is_named():
    highest, lowest = headline(MEANS.assign(n=5, low=0.0, high=1.0))
    assert "3 of 3 other intervals overlap this one, nearest 0.5 [0, 1] (n=5), name=b." in highest
    assert "3 of 3 other intervals overlap this one, nearest 0.4 [0, 1] (n=5), name=c." in lowest


def test_the_axis_of_bars_leaves_a_margin_and_ends_there():
    axis = _BarAxis.of([1.0, math.nan, 3.0])
    bar = axis.bar({"n": 5, "mean": 2.0, "low": 1.0, "high": 3.0}, [], "")
    assert (bar.mean, bar.low, bar.high) == (pytest.approx(50), pytest.approx(100 / 12), pytest.approx(1100 / 12))
    beyond = axis.bar({"n": 5, "mean": 2.0, "low": -9.0, "high": 99.0}, [], "")
    assert (beyond.low, beyond.high) == (0.0, 100.0)
    assert _BarAxis.of([2.0, 2.0]).bar({"n": 5, "mean": 2.0, "low": 1.0, "high": 3.0}, [], "") is None


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


def test_what_all_runs_share_is_in_no_row():
    study = one_failed()
    shared = {"git.commit": "c" * 12}
    rows = study.runs_table({("a",): "configuration-1"}, shared).rows
    assert [dict(row[-1].details) for row in rows] == [
        {"run id": "x", "config.hash": "h0"},
        {"run id": "y", "config.hash": "h1"},
        {"run id": "z", "config.hash": "h2"},
    ]


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


CONTRAST = """(() => {
  const lum = (c) => c.map((v) => v / 255).map((v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, at) => sum + v * [0.2126, 0.7152, 0.0722][at], 0);
  const rgba = (text) => text.match(/[\\d.]+/g).map(Number);
  const paper = (node) => { for (; node; node = node.parentElement) {
    const fill = rgba(getComputedStyle(node).backgroundColor); if (fill.length < 4 || fill[3] > 0) return fill; }
    return [255, 255, 255]; };
  const worst = []; document.querySelectorAll('details').forEach((node) => { node.open = true; });
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) { const node = walk.currentNode.parentElement;
    if (!walk.currentNode.textContent.trim() || node.tagName === 'SCRIPT') continue;
    const pair = [rgba(getComputedStyle(node).color), paper(node)].map((c) => lum(c.slice(0, 3)) + 0.05);
    worst.push(Math.max(...pair) / Math.min(...pair)); }
  return Math.min(...worst); })()"""


@needs_browser
def test_the_basics_of_accessibility(tab, page):
    tab.open(page.as_uri(), 1280, 900)
    assert tab.evaluate("document.documentElement.lang") == "en"
    assert tab.evaluate("document.title")
    assert tab.evaluate("document.querySelectorAll('h1').length") == 1
    levels = tab.evaluate("[...document.querySelectorAll('h1,h2,h3,h4')].map((head) => Number(head.tagName[1]))")
    for level, next_level in itertools.pairwise(levels):
        assert next_level <= level + 1, "a level of headings is left out"
    assert tab.evaluate("[...document.querySelectorAll('th')].every((cell) => cell.scope)")
    assert tab.evaluate("[...document.querySelectorAll('input')].every((field) => field.labels.length === 1)")
    assert tab.evaluate("[...document.images].every((image) => image.alt)")
    assert tab.evaluate("['header', 'nav', 'main', 'footer'].every((name) => document.querySelector(name))")
    names = tab.evaluate("[...document.querySelectorAll('[id]')].map((node) => node.id)")
    assert len(names) == len(set(names))
    assert tab.evaluate(CONTRAST) >= 4.5


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_readable_by_day_and_by_night(tab, page, scheme):
    tab.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    try:
        tab.open(page.as_uri(), 1280, 900)
        paper = tab.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (paper == "rgb(255, 255, 255)") == (scheme == "light")
        assert tab.evaluate(CONTRAST) >= 4.5
    finally:
        tab.ask("Emulation.setEmulatedMedia", features=[])


@needs_browser
@pytest.mark.parametrize("width", [390, 1280])
def test_pictures_fill_their_column(tab, page, width):
    tab.open(page.as_uri(), width, 900)
    tab.evaluate("document.querySelectorAll('details').forEach((node) => { node.open = true; })")
    shares = "[...document.images].map((image) => image.clientWidth / image.closest('figure').clientWidth)"
    assert min(tab.evaluate(shares)) > 0.99
    # Text of a picture, 8 points in the file, is about as large as the page's.
    scales = tab.evaluate("[...document.images].map((image) => image.clientWidth / image.naturalWidth)")
    assert min(scales) > 0.9
    assert max(scales) < 1.6


@needs_browser
@pytest.mark.parametrize("phone", [375, 390])
def test_a_phone_shows_it_without_sideways_scrolling(tab, page, phone):
    tab.open(page.as_uri(), phone, 740)
    tab.evaluate("document.querySelectorAll('details').forEach((node) => { node.open = true; })")
    assert tab.evaluate("document.documentElement.scrollWidth") <= phone
    inner = "[...document.querySelectorAll('main *')].filter((node) => node.scrollWidth > node.clientWidth + 1 && "
    inner += "['auto', 'scroll'].includes(getComputedStyle(node).overflowX)).length"
    assert tab.evaluate(inner) == 0, "nor does a part of it"
    assert tab.evaluate("parseFloat(getComputedStyle(document.querySelector('td')).fontSize)") >= 14
    assert tab.picture().startswith(b"\x89PNG")


def axe():
    """The source of axe-core, from the package that ships it; None where it is not installed."""
    spec = importlib.util.find_spec("axe_core_python")
    if spec is None:
        return None
    return (Path(spec.origin).parent / "axe.min.js").read_text(encoding="utf-8")


@needs_browser
@pytest.mark.skipif(axe() is None, reason="axe-core-python is not installed")
@pytest.mark.parametrize("width", [1280, 375])
def test_an_accessibility_checker_finds_nothing(tab, page, width):
    tab.open(page.as_uri(), width, 900)
    tab.evaluate("document.querySelectorAll('details').forEach((node) => { node.open = true; })")
    tab.evaluate(f"{axe()}; true")
    ran = "axe.run(document, {resultTypes: ['violations']})"
    violations = tab.evaluate(
        f"{ran}.then((r) => r.violations.map((v) => [v.impact, v.id, v.help, v.nodes.length, v.nodes[0].html]))"
    )
    assert violations == []


@needs_browser
def test_a_name_leads_to_the_certificate_and_the_command(tab, page):
    tab.open(page.as_uri(), 1280, 900)
    link = "document.querySelector('#results-1 tbody tr:last-child a')"
    tab.evaluate(f"{link}.click()")
    tab.evaluate("new Promise((done) => setTimeout(done, 200))")
    opened = "document.querySelector(decodeURIComponent(location.hash))"
    assert tab.evaluate(f"{opened}.open")
    assert tab.evaluate("document.querySelectorAll('details[open]').length") >= 1
    text = tab.evaluate(f"{opened}.textContent")
    assert text.count("kl-comedy reproduce ") == 3
    assert "relative bias" in text
    assert "seed 2, finished" in text


@needs_browser
def test_a_phone_sorts_by_a_choice(tab, page):
    tab.open(page.as_uri(), 375, 740)
    choose = "document.getElementById('results-1-sort')"
    assert tab.evaluate(f"{choose}.offsetParent !== null")
    read = "[...document.querySelectorAll('#results-1 tbody tr')].map((row) => Number(row.cells[2].dataset.value))"
    listed = tab.evaluate(read)
    for order in ("ascending", "descending"):
        tab.evaluate(f"{choose}.value = '2 {order}'; {choose}.dispatchEvent(new Event('change'))")
        assert tab.evaluate(read) == sorted(listed, reverse=order == "descending")
    tab.evaluate(f"{choose}.value = ''; {choose}.dispatchEvent(new Event('change'))")
    assert tab.evaluate(read) == listed
    tab.open(page.as_uri(), 1280, 740)
    assert tab.evaluate(f"{choose}.offsetParent === null")
