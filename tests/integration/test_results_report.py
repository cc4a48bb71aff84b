"""The report: self-contained, escaped, and in a real browser sortable, filterable, readable on a phone, accessible."""

import itertools
import os
import re

import browser
import pytest
from study_runs import EVAL, HOSTILE, KL

from kl_comedy.tracking.report import Cell, Page, Table, render_page


@pytest.fixture(scope="module")
def page(study, tmp_path_factory):
    """The file of a report on the whole study."""
    from typer.testing import CliRunner

    from kl_comedy.cli.main import app

    out = tmp_path_factory.mktemp("report") / "study.html"
    words = ["results", "report", "--uri", study, "--group", "kl.family,kl.betas", "--metric", f"{EVAL},{KL}"]
    done = CliRunner().invoke(app, [*words, "--title", "Study <1> & more", "--out", str(out)])
    assert done.exit_code == 0, done.output
    return out


def test_the_page_holds_everything_and_asks_for_nothing(page):
    text = page.read_text()
    assert not re.findall(r"""(?:src|href)=["'](?!data:|#)""", text) and "@import" not in text and "url(" not in text
    assert "default-src &#39;none&#39;" not in text and "default-src 'none'" in text
    for said in ("1 of 21 runs collapsed", "kl-comedy reproduce", "config.hash", "a" * 12, "none: &lt;b&gt;bold"):
        assert said in text, said
    assert text.count("<summary>kl.family: ") == 7 and text.count('scope="row"') == 7 + 21
    assert "Study &lt;1&gt; &amp; more" in text


def test_hostile_completions_are_text(page):
    text = page.read_text()
    assert HOSTILE not in text and "<img src=x" not in text
    assert text.count("&lt;/script&gt;&lt;script&gt;window.hacked=1") == 7
    assert text.count("<script>") == 1


def test_every_text_of_a_page_is_escaped():
    bad = "<script>x</script>'\"&"
    cell = Cell(text=bad, details=((bad, bad),))
    table = Table(names=(bad, bad), rows=((cell, cell), (Cell(text=bad), Cell(text=bad, code=True))))
    item = {"label": bad, "certificate": [(bad, bad)], "samples": [{"text": bad, "facts": [(bad, bad)]}]}
    found = render_page(
        Page(title=bad, summary=bad, command=bad, results=table, runs=table, pictures=({"alt": bad, "data": ""},),
             configurations=(item,), rules=(bad,), warnings=(bad,))
    )  # fmt: skip
    assert "<script>x" not in found and found.count("<script>") == 1 and "'\"&<" not in found


def test_a_report_needs_an_html_file_and_a_known_metric(kl_comedy, study, tmp_path):
    code, _, err = kl_comedy("results", "report", "--uri", study, "--out", tmp_path / "a.pdf")
    assert code == 2 and ".html" in err
    words = ["--uri", study, "--out", tmp_path / "a.html", "--metric", EVAL, "--kl", "nope"]
    assert kl_comedy("results", "report", *words)[0] == 2 and not list(tmp_path.iterdir())


needs_browser = pytest.mark.skipif(
    browser.program() is None and not os.environ.get("KL_COMEDY_NEED_BROWSER"), reason="no Chromium here"
)


@pytest.fixture(scope="module")
def tab(page):
    found = browser.Browser()
    yield found
    found.close()


@needs_browser
def test_in_a_browser_nothing_is_asked_for_and_nothing_hostile_runs(tab, page):
    tab.requests.clear()
    tab.open(page.as_uri(), 1280, 900)
    assert [url for url in tab.requests if not url.startswith("data:")] == [page.as_uri()]
    assert tab.evaluate("window.hacked") is None and tab.errors == []
    assert tab.evaluate("[...document.images].every((image) => image.complete && image.naturalWidth > 100)")
    assert tab.evaluate("document.images.length") == 3


@needs_browser
def test_tables_sort_and_filter(tab, page):
    tab.open(page.as_uri(), 1280, 900)
    column = "[...document.querySelectorAll('#results-table tbody tr')].map((row) => row.cells[2].dataset.value)"
    button = "document.querySelectorAll('#results-table thead button')[2]"
    for order, sign in (("ascending", 1), ("descending", -1)):
        tab.evaluate(f"{button}.click()")
        assert tab.evaluate(f"{button}.closest('th').getAttribute('aria-sort')") == order
        values = [float(value) for value in tab.evaluate(column)]
        assert len(values) == 7 and values == sorted(values, key=lambda value: sign * value)
    field = "document.getElementById('runs-table-filter')"
    tab.evaluate(f"{field}.value = 'k3-0.05 collapsed'; {field}.dispatchEvent(new Event('input'))")
    assert tab.evaluate("document.querySelectorAll('#runs-table tbody tr:not([hidden])').length") == 1
    assert tab.evaluate("document.getElementById('runs-table-count').textContent") == "1 of 21 rows"


CONTRAST = """(() => {
  const lum = (c) => c.map((v) => v / 255).map((v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, at) => sum + v * [0.2126, 0.7152, 0.0722][at], 0);
  const rgba = (text) => text.match(/[\\d.]+/g).map(Number);
  const paper = (node) => { for (; node; node = node.parentElement) {
    const found = rgba(getComputedStyle(node).backgroundColor); if (found.length < 4 || found[3] > 0) return found; }
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
    assert tab.evaluate("document.documentElement.lang") == "en" and tab.evaluate("document.title")
    assert tab.evaluate("document.querySelectorAll('h1').length") == 1
    levels = tab.evaluate("[...document.querySelectorAll('h1,h2,h3,h4')].map((head) => Number(head.tagName[1]))")
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    assert tab.evaluate("[...document.querySelectorAll('th')].every((cell) => cell.scope)")
    assert tab.evaluate("[...document.querySelectorAll('input')].every((field) => field.labels.length === 1)")
    assert tab.evaluate("[...document.images].every((image) => image.alt)")
    assert tab.evaluate("['header', 'nav', 'main', 'footer'].every((name) => document.querySelector(name))")
    names = tab.evaluate("[...document.querySelectorAll('[id]')].map((node) => node.id)")
    assert len(names) == len(set(names))
    assert tab.evaluate(CONTRAST) >= 4.5


@needs_browser
def test_a_phone_shows_it_without_sideways_scrolling(tab, page):
    tab.open(page.as_uri(), 375, 740)
    tab.evaluate("document.querySelectorAll('details').forEach((node) => { node.open = true; })")
    assert tab.evaluate("document.documentElement.scrollWidth") <= 375
    assert tab.evaluate("parseFloat(getComputedStyle(document.querySelector('td')).fontSize)") >= 14
    assert tab.picture().startswith(b"\x89PNG")
