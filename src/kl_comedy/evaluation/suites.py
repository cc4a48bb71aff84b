"""Suites as data: YAML files of the package by name, a user's own by path.

    YAML -> (extends: another, merged over it) -> SuiteConfig -> registry ``suites``

A suite is read when it is asked for; registering reads the files' heads only once, on import.

The problems of a suite, as they are asked: found, checked, chosen, rendered.

--data FILE | --data-root FOLDER | the suite's own dataset -> rows -> where -> items? -> text -> prompts
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kl_comedy.data  # noqa: F401  (a suite may name any of its datasets)
from kl_comedy.config.schema import TEMPLATES, DatasetConfig, SuiteConfig, SuiteFile
from kl_comedy.config.validate import parse_record
from kl_comedy.data import RenderReport, load_problems, render
from kl_comedy.data.load import subset
from kl_comedy.data.rows import LETTERS, read_choices
from kl_comedy.data.sources import Unreachable
from kl_comedy.errors import UserError, bad_value
from kl_comedy.io import read_yaml, sha256_file
from kl_comedy.records import Problem, Prompt
from kl_comedy.registry import SUITES
from kl_comedy.rewards import check_options

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


DEFINITIONS = Path(__file__).with_name("definitions")
SUFFIXES = (".yaml", ".yml")


def register_suite(path: str | Path) -> str:
    """File the suite of a YAML file under its name, for scripts and plugins. Returns the name."""
    file = Path(path)
    raw = _with_base(read_yaml(file), file)
    suite = _built(raw, file)
    facts = {"kind_of_suite": suite.kind, "group": suite.group, "items": suite.items, "licence": suite.licence}
    SUITES.register(suite.name, source=suite.source, summary=suite.summary, raw=lambda: raw, file=str(file), **facts)(
        lambda: _built(raw, file)
    )
    return suite.name


def get_suite(name: str, *, key: str = "--suite") -> SuiteConfig:
    """The suite called ``name``, or that of a YAML file by path. Raises :class:`UserError` for a miss or a mistake."""
    if name.endswith(SUFFIXES):
        file = Path(name)
        if not file.is_file():
            raise bad_value(key, name, "an existing YAML file, or a name", f"known: {', '.join(SUITES.names())}")
        return _built(_with_base(read_yaml(file), file), file)
    suite: SuiteConfig = SUITES.get(name, key=key).fn()
    return suite


def _with_base(raw: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """``raw`` merged over the suite it ``extends`` (mappings key by key; ``null`` takes a key away)."""
    own = dict(raw)
    named = own.pop("extends", None)
    if named is None:
        return own
    if not isinstance(named, str):
        raise bad_value(f"{file}: extends", named, "the name of a suite")
    if named not in SUITES and (DEFINITIONS / f"{named}.yaml").is_file() and file.parent == DEFINITIONS:
        base = _with_base(read_yaml(DEFINITIONS / f"{named}.yaml"), file)  # not registered yet
    else:
        base = copy.deepcopy(SUITES.get(named, key=f"{file}: extends").facts["raw"]())
    return _merged(base, own)


def _merged(base: dict[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in own.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, Mapping) and isinstance(result.get(key), Mapping):
            result[key] = _merged(dict(result[key]), value)
        else:
            result[key] = value
    return result


def _built(raw: Mapping[str, Any], file: Path) -> SuiteConfig:
    """The suite of checked data; what a suite cannot be is refused here."""
    suite = parse_record(SuiteConfig, raw, origin=f"suite {file}")
    suite.name = suite.name or file.stem
    if not suite.name.replace("_", "").replace("-", "").replace(".", "").isalnum():
        raise bad_value(f"suite {file}: name", suite.name, "letters, digits, '.', '_' and '-', since it names a folder")
    suite.summary = suite.summary or f"the suite of {file.name}"
    suite.source = suite.source or str(file)
    if suite.data is None and (suite.file is None or not suite.file.path):
        raise UserError(f"suite {file}: it names no problems; give data (a dataset) or file.path")
    if suite.file is not None and (beside := file.parent / suite.file.path).is_file():
        suite.file.path = str(beside.resolve())
    if suite.kind == "generate":
        check_options(suite.reward.name, suite.reward.options, key=f"suite {file}: reward")
    return suite


for _file in sorted(DEFINITIONS.glob("*.yaml")):
    register_suite(_file)


_NAME = re.compile(r"\{(\w+)(:words)?\}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnData:
    """A file given for a suite by hand; ``sha256`` is checked where it is given."""

    path: str
    sha256: str | None = None


def parse_own_data(words: Sequence[str]) -> dict[str, OwnData]:
    """``SUITE=FILE`` or ``SUITE=FILE#SHA256``, by suite.

    >>> parse_own_data(["gsm8k=data/test.jsonl"])
    {'gsm8k': OwnData(path='data/test.jsonl', sha256=None)}
    """
    found = {}
    for word in words:
        suite, equals, path = word.partition("=")
        if not (suite and equals and path):
            raise bad_value("--data", word, "SUITE=FILE or SUITE=FILE#SHA256")
        path, hashed, digest = path.partition("#")
        if hashed and not _SHA256.fullmatch(digest):
            raise bad_value(f"--data {suite}", digest, "a SHA-256 of 64 hexadecimal digits after #")
        found[suite] = OwnData(path=path, sha256=digest or None)
    return found


def suite_problems(
    suite: SuiteConfig, *, root: Path | None = None, own: OwnData | None = None, limit: int | None = None
) -> list[Problem]:
    """The suite's problems, their text as it is asked (without prompt), the first ``limit`` of them.

    Raises :class:`UserError` for a file that is missing or another one than the suite's, for rows without text or gold,
    for another number of problems than the suite has (data given by hand excepted), and where choices are to be
    compared and a problem has none, more than there are letters, or a gold that is none of theirs.
    """
    config = _source(suite, root, own)
    key = f"suite {suite.name}"
    try:
        problems = load_problems(config, key=key, training=False, allow_test_split=True)
    except Unreachable as error:
        file = f"--data-root FOLDER (with {suite.file.path}) or " if suite.file else ""
        raise UserError(f"{error.what}. Take a local file: {file}--data {suite.name}=FILE") from error
    problems = [problem for problem in problems if _wanted(problem, suite, key)]
    if not problems:
        raise UserError(f"{key}: no problem has {_described(suite.where)}")
    if suite.items is not None and own is None and len(problems) != suite.items:
        raise UserError(
            f"{key}: it has {suite.items} problems, and {config.path or config.name or config.dataset} gave "
            f"{len(problems)}; another version? --data {suite.name}=FILE takes a file as it is"
        )
    if suite.kind == "likelihood":
        for problem in problems:
            _check_choices(problem, key)
    chosen = problems if limit is None else subset(problems, limit, 0)
    return [dataclasses.replace(problem, text=question(problem, suite)) for problem in chosen]


def _check_choices(problem: Problem, key: str) -> None:
    place, choices = f"{key}: the problem {problem.id!r}", problem.meta.get("choices")
    if not choices:
        raise UserError(f"{place} has no choices to compare")
    letters = LETTERS[: len(read_choices(choices, field="choices", place=place))]
    if problem.answer not in tuple(letters):
        raise bad_value(f"{place}: answer", problem.answer, list(letters))


def question(problem: Problem, suite: SuiteConfig) -> str:
    """The suite's ``text`` with this problem's values, each put in literally and once."""
    choices = problem.meta.get("choices") or ()
    lines = [
        suite.choice_line.replace("{letter}", letter, 1).replace("{choice}", choice, 1)
        for letter, choice in zip(LETTERS, choices, strict=False)
    ]
    values = {**problem.meta, "text": problem.text, "options": "\n".join(lines)}

    def value(match: re.Match[str]) -> str:
        name, words = match.groups()
        if name not in values or (name == "options" and not choices):
            raise bad_value(
                f"suite {suite.name}: text",
                match.group(),
                [f"{{{known}}}" for known in values],
                f"the problem {problem.id!r} has no such value",
            )
        text = str(values[name])
        return text.replace("_", " ") if words else text

    return _NAME.sub(value, suite.text)


def suite_prompts(
    suite: SuiteConfig, problems: Sequence[Problem], tokenizer: PreTrainedTokenizerBase, *, template: str = "auto"
) -> tuple[list[Prompt], RenderReport]:
    """Prompts of the problems (:func:`kl_comedy.data.render`); ``template`` other than auto overrides the suite's."""
    return render(
        problems,
        dataclasses.replace(suite.prompt, template=chosen_template(suite, tokenizer, template)),
        tokenizer,
        key=f"suite {suite.name}: prompt",
    )


def chosen_template(suite: SuiteConfig, tokenizer: Any, template: str = "auto") -> str:
    """``plain`` or ``chat``: what is asked for, else the suite's own, else chat where the tokenizer can."""
    if template not in TEMPLATES:
        raise bad_value("--template", template, TEMPLATES)
    named = suite.template if template == "auto" else template
    if named != "auto":
        return named
    return "chat" if getattr(tokenizer, "chat_template", None) else "plain"


def _source(suite: SuiteConfig, root: Path | None, own: OwnData | None) -> DatasetConfig:
    """Where the rows come from: the file given by hand, the suite's file, or where it is published."""
    if own is not None:
        given = dataclasses.replace(suite.file or SuiteFile(), path=own.path, sha256=own.sha256)
        return _file(suite, given, Path(own.path).expanduser(), f"--data {suite.name}")
    if suite.file is not None and suite.file.path:
        path = Path(suite.file.path).expanduser()
        if path.is_absolute() or root is not None or suite.data is None:
            return _file(suite, suite.file, path if root is None else root.expanduser() / path, "--data-root")
    assert suite.data is not None
    return dataclasses.replace(suite.data, options=_options(suite.data.dataset, suite.data.options))


def _file(suite: SuiteConfig, file: SuiteFile, path: Path, option: str) -> DatasetConfig:
    dataset = "parquet" if path.suffix == ".parquet" else "jsonl"
    if not path.is_file():
        folder = path.parent
        there = sorted(one.name for one in folder.glob("*") if one.is_file())[:20]
        where = f"{folder} holds {', '.join(there) or 'no file'}" if folder.is_dir() else f"there is no folder {folder}"
        published = f"; published as {suite.data.name} (leave {option} out to load it)" if suite.data else ""
        raise bad_value(option, str(path), f"an existing file for the suite {suite.name}", where + published)
    if file.sha256 is not None:
        found = sha256_file(path)
        if found != file.sha256:
            raise UserError(
                f"{option}: {path} is another file than the suite {suite.name} names: SHA-256 {found}, expected "
                f"{file.sha256}; --data {suite.name}={path} takes it as it is"
            )
    return DatasetConfig(
        dataset=dataset, path=str(path), fields=dict(file.fields), options=_options(dataset, file.options)
    )


def _options(dataset: str, options: dict[str, Any]) -> dict[str, Any]:
    """Choices are written by the suite, not by the reader of rows."""
    return {"render_choices": False, **options} if dataset in ("jsonl", "parquet", "hub") else dict(options)


def _wanted(problem: Problem, suite: SuiteConfig, key: str) -> bool:
    for name, allowed in suite.where.items():
        if name not in problem.meta:
            raise bad_value(f"{key}: where", name, sorted(problem.meta), f"fields of the problem {problem.id!r}")
        if str(problem.meta[name]) not in allowed:
            return False
    return True


def _described(where: dict[str, list[str]]) -> str:
    return " and ".join(f"{name} in {', '.join(allowed)}" for name, allowed in where.items())
