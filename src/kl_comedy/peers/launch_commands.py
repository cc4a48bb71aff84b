"""What the commands of a launch script set: ``key=value`` and ``--key value`` of the words that each command gets."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from kl_comedy.errors import UserError
from kl_comedy.peers.launch_settings import Parsed, Setting, Unread
from kl_comedy.peers.launch_shell import Interpreter, Word

MAX_NESTED_COMMANDS = 3
"""Commands in words of commands: ``srun bash -c "python ..."``."""
MAX_DOCUMENTS = 100
"""Here-documents that get the variables of the script: each gets a copy of all."""
PROGRAMS = ("--module", "--entrypoint", "--entry-point", "--process_main")
"""Options whose value is the program that runs."""
MODULE_KEY = re.compile(r".*(path|spec|module|function|func|fn|class|cls)")
MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
"""A value of such an option names code, by whose package the system is told."""
CONFIGS = (
    "--config",
    "--config-file",
    "--config_file",
    "--config-path",
    "--config_path",
    "--config-name",
    "--config_name",
)
"""Options whose value may be a file with more settings."""
CONFIG_NAMES = ("--config-name", "--config_name")
"""Those of them whose value is a config even without a suffix: Hydra adds it."""
CONFIG_SUFFIXES = (".yaml", ".yml", ".json", ".toml")
TAKES_CONFIG = re.compile(r"@|.*\.(py|sh)|train|rlhf|grpo|rl|axolotl\.cli\.train")
"""Words after which a config follows: ``rl @ run.toml``, ``axolotl train run.yaml``, ``train.py run.yaml``."""
STARTED = re.compile(r"[^\s;|&=()\"']+\.(py|sh|bash|slurm|sbatch)")
"""Words of a command, or their last parts, that are a program."""
PROGRAM = re.compile(
    r"(?m)(^|&& )[ \t]*([A-Z_]+=\S+ )*(python3?|torchrun|accelerate|deepspeed|ray|srun|bash|uv|swift|trl) "
)
"""The start of a command in a list of them."""
OVERRIDE = re.compile(r"[+~]*[\w./@-]+")


def shell(text: str, parsed: Parsed, depth: int = 0) -> None:
    """``key=value`` and ``--key value`` of every command; comments, quotes, variables and branches as a shell takes
    them."""

    def command(words: list[Word]) -> None:
        command_words(words, parsed, depth)

    def document(words: list[Word], content: Word) -> None:
        """A file that the script writes, or the program that it starts with it."""
        suffix = ""
        for word in words:
            suffix = Path(word.text).suffix or suffix
            parsed.written_files.append(word.text)
        if words and words[0].text.startswith("python"):
            suffix = ".py"
        parsed.documents += 1
        names = parsed.environment
        if parsed.documents <= MAX_DOCUMENTS:
            parsed.environment = names | interpreter.texts()
        try:
            with parsed.within(content.origin):
                parsed.read(content.text, suffix)
        except (UserError, ValueError, SyntaxError):
            # A template of another language; the script itself can still be read.
            parsed.unread.append(Unread("a here-document"))
        parsed.environment = names

    interpreter = Interpreter(command, document, parsed.count_written, parsed.environment)
    interpreter.script(text)
    settings = parsed.settings
    # Arrays and texts of flags that no command here gets: a script that sources this one does. They come first, so that
    # what a command gets counts.
    parsed.settings = []
    for variable in interpreter.unused():
        words = [Word(part, word.origin) for word in variable.words for part in word.text.split()]
        if any(word.text.startswith("--") or re.match(r"[+~]*\w+(\.\w+)+=", word.text) for word in words):
            command_words([Word(":"), *words], parsed, depth)
    parsed.settings += settings


def recipes_as_shell(text: str) -> str:
    """A makefile as a script: its variables are assigned, and the lines of all its recipes follow in order.

    A shell has ``${NAME}`` for ``$(NAME)`` of make and ``{{name}}`` of just, and ``$NAME`` for make's ``$$NAME``.
    """
    lines = []
    for line in re.sub(r"\\\r?\n", " ", text).splitlines():
        assignment = re.fullmatch(r"(?:export\s+)?(\w+)\s*(?:[:?]?=|:::?=)\s*(.*)", line)
        if assignment:
            value = assignment[2].strip("\"'")
            lines.append(f'{assignment[1]}="{value}"')
        elif line.startswith(("\t", " ")):
            lines.append(line.strip().lstrip("@-+"))
    script = re.sub(r"\$\((\w+)\)|\{\{\s*(\w+)\s*\}\}", r"${\1\2}", "\n".join(lines))
    return script.replace("$$", "$")


def command_words(words: Sequence[Word], parsed: Parsed, depth: int = 0) -> None:
    """The settings among the words of one command; the others are by what its system is told."""
    before = ""
    waiting = list(reversed(words))
    while waiting:
        word = waiting.pop()
        if _is_nested_command(word.text) and depth < MAX_NESTED_COMMANDS:
            _take_nested_command(word, parsed, depth)
        elif word.text.startswith("--") and len(word.text) > 2:
            _take_option(word, waiting, parsed, depth)
        elif _is_override(word.text):
            _take_override(word, parsed)
        else:
            _take_plain_word(word, before, parsed)
            before = word.text.rsplit("/", 1)[-1]


def _take_nested_command(word: Word, parsed: Parsed, depth: int) -> None:
    with parsed.within(word.origin):
        shell(word.text, parsed, depth + 1)


def _take_option(word: Word, waiting: list[Word], parsed: Parsed, depth: int) -> None:
    """``--key=value``, or ``--key`` with the next of the ``waiting`` words, which is then taken from them."""
    key, equals, text = word.text.partition("=")
    value = Word(text, word.origin)
    # Two options in a row: the first is a switch.
    takes_next = not equals and bool(waiting) and not waiting[-1].text.startswith("--")
    if takes_next:
        value = waiting.pop()
        if _is_nested_command(value.text) and depth < MAX_NESTED_COMMANDS:
            _take_nested_command(value, parsed, depth)
    if value.text == "@" and waiting:
        # `--trainer @ train.toml` of prime-rl
        value = waiting.pop()
        parsed.configs.append(value)
    _take_named_files(key, value, parsed)
    is_lone = not equals and not takes_next
    origin = value.origin.within(word.origin)
    text_of_value = None if is_lone else value.text
    parsed.add(Setting(key, text_of_value, _is_known(value.text), origin, is_next_word=takes_next))


def _is_override(text: str) -> bool:
    """Whether a word is ``key=value``, also Hydra's ``+key=value``."""
    key, equals, value = text.partition("=")
    # `trl==0.17.0` is a requirement of pip.
    return bool(equals) and not value.startswith("=") and OVERRIDE.fullmatch(key) is not None


def _take_override(word: Word, parsed: Parsed) -> None:
    key, _, value = word.text.partition("=")
    if key == "config" and Path(value).suffix in (".yaml", ".yml"):
        parsed.configs.append(Word(value, word.origin))
    parsed.add(Setting(key, value, _is_known(value), word.origin))


def _take_plain_word(word: Word, before: str, parsed: Parsed) -> None:
    """A word that sets nothing, and with the word ``before`` it a pair, as ``swift sft``."""
    text = word.text
    parsed.words.append(text)
    # JSON without an option is data more often than a config.
    is_config = text.endswith(CONFIG_SUFFIXES) and not text.endswith(".json")
    if is_config and (text.startswith("@") or TAKES_CONFIG.fullmatch(before)):
        parsed.configs.append(replace(word, text=text.lstrip("@")))
    if before:
        parsed.words.append(f"{before} {text}")
    if before == "-m":
        parsed.started.append(text)
    else:
        _add_started(text, parsed)


def _take_named_files(key: str, value: Word, parsed: Parsed) -> None:
    """Keep what the value of an option names: a program, code of a system, or a config."""
    if key in PROGRAMS:
        parsed.words.append(value.text)
        parsed.started.append(value.text)
    elif MODULE_KEY.fullmatch(key) and MODULE.fullmatch(value.text):
        parsed.words.append(value.text)
    is_config = key in CONFIG_NAMES or (key in CONFIGS and Path(value.text).suffix in CONFIG_SUFFIXES)
    # `accelerate launch --config_file` names the launcher's own.
    is_of_launcher = key in ("--config_file", "--config-file") and "accelerate launch" in parsed.words
    if is_config and value.text and not is_of_launcher:
        parsed.configs.append(value)


def _add_started(text: str, parsed: Parsed) -> None:
    """Keep a word that is a script: its path, or its name where the folder is computed."""
    if STARTED.fullmatch(text):
        parsed.started.append(text)
    elif STARTED.fullmatch(text.rsplit("/", 1)[-1]):
        parsed.started.append(text.rsplit("/", 1)[-1])


def _is_nested_command(text: str) -> bool:
    """Whether one word is a command of its own: ``bash -c "python ... --flag value"``."""
    return " " in text.strip() and re.search(r"(^|\s)(--\w|[+~]*\w+(\.\w+)+=|python)", text) is not None


def _is_known(value: str) -> bool:
    """Whether a word of a shell command is its own value: no variable that is not assigned here, no command."""
    return "$" not in value and "`" not in value and "{{" not in value
