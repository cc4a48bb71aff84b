"""The page of the register: data become text, and in a real browser search, filters and the form answer."""

import json
import re
from pathlib import Path

import pytest

from browser import WIDTHS
from built_site import browser_test

ROOT = Path(__file__).parents[2]
SCRIPT = (ROOT / "docs" / "javascripts" / "register.js").read_text("utf-8")
ROWS = json.loads((ROOT / "results" / "register" / "register.json").read_text("utf-8"))


def test_the_script_never_makes_html_of_data_and_asks_nobody():
    of_html = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\("
    of_requests = r"fetch\(|XMLHttp|https?:"
    assert re.findall(f"{of_html}|{of_requests}", SCRIPT) == []


def test_the_script_has_the_words_of_the_table():
    """The page and the plain table say the same of an objective."""
    import sys

    sys.path.append(str(ROOT / "bench"))
    from register.page import SILENT, WORDS

    assert f'const SILENT = "{SILENT}";' in SCRIPT
    block = SCRIPT.partition("const WORDS = {")[2].partition("};")[0]
    words = dict(re.findall(r'^\s*(\w+): "(.*)",$', block, re.MULTILINE))
    assert words == WORDS


CARDS = "[...document.querySelectorAll('.kl-card')].map((card) => card.dataset.id)"
ANSWER = "document.querySelector('.kl-answer').textContent"


def put(tab, root, label, value):
    """Type into, or choose in, the control of a part of the page that has this label."""
    chosen = json.dumps(value)
    selector = json.dumps(f"#{root} [aria-label='{label}']")
    tab.evaluate(
        f"(() => {{ const control = document.querySelector({selector}); control.value = {chosen};"
        " control.dispatchEvent(new Event('input', {bubbles: true})); return true; })()"
    )


@browser_test
@pytest.mark.parametrize("size", WIDTHS)
def test_every_row_is_shown_and_search_and_filters_narrow_them(tab, address, size):
    tab.open(f"{address}/register/", *WIDTHS[size])
    assert tab.wait_for(CARDS) == [row["id"] for row in ROWS]
    put(tab, "kl-register", "Search the rows", "chi-square")
    shown = tab.evaluate(CARDS)
    assert {"rlinf-fsdp", "rlhf-book-kl3"} <= set(shown)
    assert len(shown) < len(ROWS)
    put(tab, "kl-register", "System", "RLinf")
    assert tab.evaluate(CARDS) == ["rlinf-fsdp"]
    put(tab, "kl-register", "Search the rows", "")
    put(tab, "kl-register", "System", "")
    put(tab, "kl-register", "Verdict", "leak")
    assert "miles-plus-plus" in tab.evaluate(CARDS)
    assert "slime-plus-plus" not in tab.evaluate(CARDS)
    put(tab, "kl-register", "Search the rows", "no such words")
    assert tab.evaluate(CARDS) == []
    assert tab.evaluate("document.querySelector('#kl-register .kl-count').textContent") == f"0 of {len(ROWS)} rows"


@browser_test
@pytest.mark.parametrize("size", WIDTHS)
def test_the_form_answers_for_a_system_and_its_flags(tab, address, size):
    tab.open(f"{address}/register/", *WIDTHS[size])
    tab.wait_for(ANSWER)
    put(tab, "kl-which-flag", "System", "rlinf")
    put(tab, "kl-which-flag", "algorithm.kl_beta", "0.01")
    assert "chi-square divergence" in tab.evaluate(ANSWER)
    put(tab, "kl-which-flag", "actor.training_backend", "megatron")
    assert "k3_reverse_token in loss" in tab.evaluate(ANSWER)
    put(tab, "kl-which-flag", "System", "trl")
    put(tab, "kl-which-flag", "Version", "an older release")
    older = tab.evaluate(ANSWER)
    assert "other versions: " in older
    assert "The answer of 1." in older


@browser_test
def test_the_page_works_from_a_folder_without_a_server(tab, site):
    tab.open(f"file://{site}/register/index.html", *WIDTHS["desktop"])
    assert tab.wait_for(CARDS) == [row["id"] for row in ROWS]
    assert tab.wait_for(ANSWER)


@browser_test
def test_an_answer_has_an_address_that_brings_it_back(tab, address):
    tab.open(f"{address}/register/", *WIDTHS["desktop"])
    tab.wait_for(ANSWER)
    put(tab, "kl-which-flag", "System", "trl")
    put(tab, "kl-which-flag", "trainer", "ppo")
    put(tab, "kl-which-flag", "kl_estimator", "k3")
    answer = tab.evaluate(ANSWER)
    shared = tab.evaluate("location.href")
    assert shared.endswith("#system=trl&kl_estimator=k3&trainer=ppo")
    assert "k3" in answer
    tab.evaluate("history.back(); true")
    assert tab.wait_for("!location.hash.includes('kl_estimator')")
    assert tab.evaluate("document.querySelector('[aria-label=kl_estimator]').value") == "k1"
    tab.open("about:blank", *WIDTHS["desktop"])
    tab.open(shared, *WIDTHS["desktop"])
    assert tab.wait_for(ANSWER) == answer
