"""The output that the README shows is what its commands print."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

TEXT = (ROOT / "README.md").read_text()
CONSOLE = re.findall(r"^```console\n\$ kl-comedy (.*?)\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)


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
