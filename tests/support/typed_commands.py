"""The commands that a reader finds on the pages and in ``--help``, as a shell would take them."""

import functools
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import typer.main

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
RESULT_PAGES = sorted((ROOT / "results").rglob("*.md"))

# In a block (indented, or fenced), at the start of a line. What follows two blanks is the page's remark.
IN_A_BLOCK = re.compile(r"^(?: {4,6})?(?:\$ )?(kl-comedy .+)$")
INLINE = re.compile(r"`(kl-comedy [^`]+)`")
REMARK = re.compile(r"\s{2,}\S.*$|\s+#\s.*$")
SYNOPSIS_PART = re.compile(r"\s\[[^\[\]]*\]")
EXAMPLE_OF_HELP = re.compile(r"`(kl-comedy [^`]+)`")


@dataclass(frozen=True)
class Typed:
    """A command of a page or of a help text."""

    place: str
    """The page's path from the root, or ``--help of COMMAND``."""
    text: str
    """What is typed, with the optional parts of a synopsis left out."""

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text)


def without_remark(line: str) -> str:
    return REMARK.sub("", line.rstrip())


def without_optional_parts(command: str) -> str:
    """``kl-comedy audit CONFIG [key=value ...]`` without what is in brackets.

    A YAML list in quotes, or one that is glued to its key, has no blank before its bracket.
    """
    if "'" in command or '"' in command:
        return command
    return SYNOPSIS_PART.sub("", command)


def examples_of(page: Path) -> list[Typed]:
    """The commands that stand in the page's blocks, in the order of the page."""
    place = str(page.relative_to(ROOT))
    text = page.read_text().replace("\\\n", " ")
    commands = []
    for line in text.splitlines():
        match = IN_A_BLOCK.match(line)
        if match:
            command = re.sub(r"\s+", " ", without_remark(match.group(1).strip()))
            commands.append(Typed(place, without_optional_parts(command)))
    return commands


def mentions_of(page: Path) -> list[Typed]:
    """The commands that stand in the page's sentences: often a command's name with one option, not a whole call.

    Not those of a line that says at which commit they were run: they are commands of that commit.
    """
    place = str(page.relative_to(ROOT))
    lines = [line for line in page.read_text().splitlines() if "at commit" not in line]
    return [Typed(place, re.sub(r"\s+", " ", text)) for text in INLINE.findall("\n".join(lines))]


@functools.cache
def click_commands() -> dict[str, typer.core.TyperCommand]:
    """Every command by its words, as ``results table``."""
    from kl_comedy.cli.main import app

    commands = {}

    def walk(command, words):
        if hasattr(command, "commands"):
            for name, child in command.commands.items():
                walk(child, [*words, name])
        else:
            commands[" ".join(words)] = command

    walk(typer.main.get_command(app), [])
    return commands


def examples_of_help() -> list[Typed]:
    """The examples of every ``--help``."""
    examples = []
    for name, command in click_commands().items():
        for paragraph in (command.help or "").split("\n\n"):
            if not paragraph.startswith("Example"):
                continue
            for text in EXAMPLE_OF_HELP.findall(paragraph):
                examples.append(Typed(f"--help of {name}", re.sub(r"\s+", " ", text)))
    return examples


def command_of(words: list[str]) -> str | None:
    """Which of :func:`click_commands` the words (after ``kl-comedy``) call; None if none."""
    commands = click_commands()
    # The longer name first: the second word of ``train CONFIG`` is no part of its name, that of ``results table`` is.
    for length in (2, 1):
        name = " ".join(words[:length])
        if name in commands:
            return name
    return None


def options_of(words: list[str]) -> set[str]:
    """The options among the words, without their values."""
    return {word.partition("=")[0] for word in words if word.startswith("--") and len(word) > 2}
