"""The output that the README shows is what its commands print."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

TEXT = (ROOT / "README.md").read_text()
CONSOLE = re.findall(r"^```console\n\$ kl-comedy (.*?)\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)


<<<<<<< HEAD
=======
def test_it_is_read_in_a_minute():
    assert len(TEXT.split()) < 900


def test_the_pages_written_by_hand_have_at_most_26000_words():
    """What goes beyond belongs in a docstring or results/, or is said twice (`count_words.py` lists the pages)."""
    words = count_words.words_by_page()
    assert {"README.md", "CONTRIBUTING.md", "docs/index.md"} <= set(words)
    assert sum(words.values()) <= 26_000


def test_a_symptom_page_is_one_screen():
    """They are counted apart: a page is read by itself, by somebody with that symptom."""
    words = count_words.words_of_symptoms()
    assert set(words) & set(count_words.words_by_page()) == set()
    assert words.pop("docs/symptoms/threads.md") <= 900
    assert len(words) > 5
    assert {page: count for page, count in words.items() if count > 330} == {}


>>>>>>> wt-site
def test_it_shows_what_explain_and_certify_print():
    assert [command.split()[0] for command, _ in CONSOLE] == ["explain", "certify"]


@pytest.mark.parametrize(("command", "shown"), CONSOLE, ids=["explain", "certify"])
def test_the_output_shown_is_printed(kl_comedy, monkeypatch, command, shown):
    """In this order; `...` stands for lines that are left out."""
    monkeypatch.setenv("COLUMNS", "100")
    words = [word.strip('"') for word in command.split()]
    code, out, err = kl_comedy(*words)
    assert code == 0, err
    printed = [line.rstrip() for line in out.splitlines()]
    position = 0
    for line in shown.splitlines():
        if line != "...":
            assert line in printed[position:], line
            position = printed.index(line, position) + 1


def test_the_figure_and_every_page_that_it_links_to_are_there():
    for target in re.findall(r"\]\(([^)#:]+)\)", TEXT):
        assert (ROOT / target).exists(), target
