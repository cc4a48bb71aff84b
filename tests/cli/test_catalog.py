"""``list`` and ``doctor`` on a terminal, where nothing is cut, and in a pipe, where a line is a part."""

import io
import sys

import pytest
from rich.text import Text

from kl_comedy.cli.common import PIPE_WIDTH, print_columns, stdout_console
from kl_comedy.registry import KINDS

COLUMNS = ["name", "summary"]
ROWS = [["exact_reverse_token", "[red]a\tlong sentence of many words" + " more" * 40], ["k1", "\x1b[2Jb"]]


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("kind", ["estimators", "recipes", "rewards"])
def test_in_a_pipe_each_part_is_one_whole_line(kl_comedy, kind):
    code, out, _ = kl_comedy("list", kind)
    assert code == 0
    head, *lines = out.splitlines()
    assert head.split("\t") == ["name", "summary", "claims", "source"]
    assert [line.split("\t")[0] for line in lines] == [entry.name for entry in KINDS[kind]]
    assert {line.count("\t") for line in lines} == {3}
    assert "…" not in out


def test_without_a_kind_the_kinds_are_listed(kl_comedy):
    code, out, err = kl_comedy("list")
    assert code == 0
    assert "kl-comedy list KIND" in err
    rows = dict(line.split("\t") for line in out.splitlines())
    assert rows.keys() == {"kind", *KINDS, "peers", "configs"}
    assert rows["rewards"].split(", ") == [entry.name for entry in KINDS["rewards"]]
    assert kl_comedy("list", "--format", "json")[1].count('"kind"') == len(rows) - 1


def test_the_flags_of_peers_are_lines_too(kl_comedy):
    lines = kl_comedy("list", "peers")[1].splitlines()
    assert len(lines) > 20
    assert {line.count("\t") for line in lines} == {4}


def test_what_the_doctor_says_can_be_searched(kl_comedy):
    lines = kl_comedy("doctor")[1].splitlines()
    (torch,) = [line for line in lines if line.startswith("torch\t")]
    assert torch.endswith("\teverything")


@pytest.mark.parametrize("width", [30, 80])
def test_a_narrow_terminal_folds_and_cuts_nothing(monkeypatch, width):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    print_columns(COLUMNS, ROWS, title="parts")
    text = Text.from_ansi(terminal.getvalue()).plain
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    assert text.count("more") == 40
    # The first column ends where the first run of dashes does.
    (rule,) = [line for line in text.splitlines() if set(line.strip()) == {"-", " "}]
    first = len(rule.split(" ")[0])
    folded = "".join(line[:first].strip() for line in text.splitlines())
    assert "exact_reverse_token" in folded
    assert not set(text) & set("│┃━─┏└"), "one style: no boxes"
    assert "[red]" in text, "no markup"
    assert "\x1b[2J" not in terminal.getvalue()


def test_in_a_pipe_a_cell_has_neither_tabs_nor_escapes(capsys):
    print_columns(COLUMNS, ROWS)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("exact_reverse_token\t[red]a long sentence")
    assert lines[2] == "k1\tb"


def test_rich_tables_in_a_pipe_are_as_wide_as_they_are(capsys):
    stdout_console().print("x" * 5000 + " y")
    assert capsys.readouterr().out == "x" * 5000 + " y\n"
    assert PIPE_WIDTH > 5000
