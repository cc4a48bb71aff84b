"""The site in a real browser: text can be read, code can be copied, search finds."""

import importlib.util
from pathlib import Path

import pytest

from browser import WIDTHS
from built_site import IN_A_BROWSER, SEARCH

pytestmark = IN_A_BROWSER
PAGES = ["", "configuration/", "register/", "api/kl/"]
"""The start, tables, forms of our own, docstrings."""
IN_THE_DARK = ["", "register/"]
"""Prose and pictures, forms: what has colours of its own."""


def axe():
    """The source of axe-core, from the package that ships it."""
    spec = importlib.util.find_spec("axe_core_python")
    assert spec is not None, "the extra dev has axe-core-python"
    return (Path(spec.origin).parent / "axe.min.js").read_text(encoding="utf-8")


CONTRASTS = """
axe.run(document, {runOnly: ['color-contrast'], resultTypes: ['violations']}).then((result) =>
  result.violations.flatMap((rule) => rule.nodes.map((node) => [node.html.slice(0, 120), node.any[0].message])))
"""


UNFOLDED_AND_STILL = """
document.querySelectorAll('details').forEach((details) => { details.open = true });
document.head.insertAdjacentHTML(
  'beforeend', '<style>*, *::before, *::after {transition: none !important; animation: none !important}</style>'); true
"""


@pytest.mark.parametrize(
    ("page", "scheme"), [*((page, "light") for page in PAGES), *((page, "dark") for page in IN_THE_DARK)]
)
def test_text_has_a_contrast_of_4_5(tab, address, page, scheme):
    tab.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    tab.open(f"{address}/{page}", *WIDTHS["desktop"])
    expected = {"light": "default", "dark": "slate"}[scheme]
    assert tab.evaluate("document.body.getAttribute('data-md-color-scheme')") == expected
    # What is folded has no place on the page, and axe takes its background from elsewhere. The theme fades colours in
    # and out; in the middle of that they have another contrast.
    tab.evaluate(UNFOLDED_AND_STILL)
    tab.evaluate(f"{axe()}; true")
    assert tab.evaluate(CONTRASTS) == []


@pytest.mark.parametrize("page", ["", "api/kl/"])
def test_code_is_highlighted_and_can_be_copied(tab, address, page):
    tab.open(f"{address}/{page}", *WIDTHS["desktop"])
    blocks = tab.evaluate("[...document.querySelectorAll('article pre > code')].length")
    assert blocks > 1
    highlighted = "[...document.querySelectorAll('article [class*=language-] pre > code')].length"
    assert tab.evaluate(highlighted) == blocks
    assert tab.evaluate("document.querySelectorAll('article [class*=language-] pre > code span[class]').length") > 0
    # The script of the theme adds the buttons after the page is loaded.
    button = "document.querySelectorAll('article .md-clipboard, article [data-md-type=copy]').length"
    assert tab.wait_for(button) >= blocks


@pytest.fixture
def searching(tab):
    """The browser, where pages load what their search reads."""
    tab.block()
    yield tab
    tab.block(SEARCH)


def test_search_finds_a_field_of_a_kl_term(searching, address):
    searching.open(f"{address}/?q=weight_power", *WIDTHS["desktop"])
    links = searching.wait_for("[...document.querySelectorAll('.md-search-result__link')].map((link) => link.href)")
    assert any("api/kl/" in link or "configuration/" in link for link in links), links


def test_no_page_asks_another_host(searching, address):
    searching.requests.clear()
    searching.open(f"{address}/evidence/", *WIDTHS["desktop"])
    assert [request for request in searching.requests if not request.startswith((address, "data:"))] == []


@pytest.mark.parametrize("size", WIDTHS)
def test_the_start_page_opens_with_install_command_and_output(tab, address, size):
    """Above the fold, and on a desktop without a scroll bar."""
    tab.open(f"{address}/", *WIDTHS[size])
    blocks = tab.evaluate(
        "[...document.querySelectorAll('article pre')].slice(0, 3).map((block) => [block.textContent.trim(),"
        " block.getBoundingClientRect().bottom, block.scrollWidth - block.clientWidth])"
    )
    install, command, output = blocks
    assert install[0].startswith("pip install")
    assert command[0].startswith("kl-comedy ")
    assert len(output[0].splitlines()) >= 5
    assert output[1] < WIDTHS[size][1]
    if size == "desktop":
        assert max(extra for *_, extra in blocks) <= 0
