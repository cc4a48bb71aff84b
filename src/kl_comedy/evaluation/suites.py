"""Evaluation suites as data: built-in YAML files by name, a user's by path; their problems and prompts.

YAML -> (extends: merged over another) -> SuiteConfig -> rows (--data FILE, --data-root FOLDER, or the hub)
     -> where -> number of items -> limit -> text -> prompts
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kl_comedy.config.schema import TEMPLATES, DatasetConfig, SuiteConfig, SuiteFile
from kl_comedy.config.validate import parse_record
from kl_comedy.data import RenderReport, load_problems, render
from kl_comedy.data.load import subset
from kl_comedy.data.rows import LETTERS, read_choices
from kl_comedy.data.sources import DatasetUnavailable
from kl_comedy.errors import UserError, bad_value, error_prefix
from kl_comedy.io import existing_file, read_yaml, sha256_file
from kl_comedy.records import Problem, Prompt
from kl_comedy.registry import OWN_PART, SUITES
from kl_comedy.rewards import check_options

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DEFINITIONS = Path(__file__).with_name("definitions")


def register_suite(path: str | Path) -> str:
    """Register the suite of a YAML file, for scripts and plugins. Returns its name."""
    # The built-in suites have their names first, so that a user's of the same name is refused and not theirs.
    SUITES.load()
    file = Path(path)
    raw = _with_base(read_yaml(file), file)
    suite = _parse_suite(raw, file)
    register = SUITES.register(
        suite.name,
        source=suite.source,
        summary=suite.summary,
        kind_of_suite=suite.kind,
        group=suite.group,
        items=suite.items,
        licence=suite.licence,
        # Unparsed, for suites that extend this one: they merge what was written, without its defaults.
        raw=lambda: raw,
        file=str(file),
    )
    # Parsed anew at each lookup: a SuiteConfig is mutable, and a caller may change its own.
    register(lambda: _parse_suite(raw, file))
    return suite.name


def get_suite(name: str, *, key: str = "--suite") -> SuiteConfig:
    """The suite with this name, or that of a YAML file by path. Raises :class:`UserError` where there is none."""
    if name.endswith((".yaml", ".yml")):
        advice = f"; known names: {', '.join(SUITES.names())} ({OWN_PART})"
        file = existing_file(Path(name), key, "an existing YAML file, or a name", advice)
        return _parse_suite(_with_base(read_yaml(file), file), file)
    suite: SuiteConfig = SUITES.get(name, key=key).fn()
    return suite


def _with_base(raw: dict[str, Any], file: Path) -> dict[str, Any]:
    """``raw`` merged over the suite that it ``extends``; as it is where it extends none."""
    base_name = raw.pop("extends", None)
    if base_name is None:
        return raw
    if not isinstance(base_name, str):
        raise bad_value(f"{file}: extends", base_name, "the name of a suite")
    definition = DEFINITIONS / f"{base_name}.yaml"
    if file.parent == DEFINITIONS and definition.is_file():
        # A built-in suite is read from its file: it may not be registered yet.
        base = _with_base(read_yaml(definition), definition)
    else:
        base = copy.deepcopy(SUITES.get(base_name, key=f"{file}: extends").facts["raw"]())
    return _merged(base, raw)


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """``changes`` over ``base``: mappings key by key, ``null`` removes a key."""
    result = dict(base)
    for key, value in changes.items():
        # null in a file removes the base's key: the schema's default then counts.
        if value is None:
            result.pop(key, None)
        elif isinstance(value, Mapping) and isinstance(result.get(key), Mapping):
            result[key] = _merged(result[key], value)
        else:
            result[key] = value
    return result


def _parse_suite(raw: Mapping[str, Any], file: Path) -> SuiteConfig:
    """The suite of a file's content. Raises :class:`UserError` for one that cannot be evaluated."""
    suite = parse_record(SuiteConfig, raw, origin=f"suite {file}")
    # Defaults that need the file's name, which a schema does not know.
    suite.name = suite.name or file.stem
    if not re.fullmatch(r"[\w.-]+", suite.name):
        raise bad_value(f"suite {file}: name", suite.name, "letters, digits, '.', '_' and '-', since it names a folder")
    suite.summary = suite.summary or f"the suite of {file.name}"
    suite.source = suite.source or str(file)
    has_file = suite.file is not None and suite.file.path != ""
    if suite.data is None and not has_file:
        raise UserError(f"suite {file}: it names no problems; give data (a dataset) or file.path")
    if suite.file is not None:
        # A user's suite may lie beside its data, and be named from another folder.
        beside = file.parent / suite.file.path
        if beside.is_file():
            suite.file.path = str(beside.resolve())
    # A mistake in the reward's options is found when the suite is named, not after its data are loaded.
    if suite.kind == "generate":
        check_options(suite.reward.name, suite.reward.options, key=f"suite {file}: reward")
    return suite


def parse_data_files(words: Sequence[str]) -> dict[str, SuiteFile]:
    """``SUITE=FILE`` or ``SUITE=FILE#SHA256``, by suite.

    >>> parse_data_files(["gsm8k=data/test.jsonl"])["gsm8k"].path
    'data/test.jsonl'
    """
    files = {}
    for word in words:
        suite, _, path = word.partition("=")
        if not suite or not path:
            raise bad_value("--data", word, "SUITE=FILE or SUITE=FILE#SHA256")
        path, hashed, digest = path.partition("#")
        if hashed and not re.fullmatch(r"[0-9a-f]{64}", digest):
            raise bad_value(f"--data {suite}", digest, "a SHA-256 of 64 hexadecimal digits after #")
        files[suite] = SuiteFile(path=path, sha256=digest or None)
    return files


def suite_problems(
    suite: SuiteConfig, *, root: Path | None = None, file: SuiteFile | None = None, limit: int | None = None
) -> list[Problem]:
    """:func:`published_problems`, with the text that :func:`question` writes."""
    problems = published_problems(suite, root=root, file=file, limit=limit)
    return [asked(problem, suite) for problem in problems]


def asked(problem: Problem, suite: SuiteConfig) -> Problem:
    """The problem with the text that :func:`question` writes."""
    return dataclasses.replace(problem, text=question(problem, suite))


def published_problems(
    suite: SuiteConfig, *, root: Path | None = None, file: SuiteFile | None = None, limit: int | None = None
) -> list[Problem]:
    """The first ``limit`` problems of the suite, with the text that their source has.

    ``root``: the folder of the suites' files. ``file``: one given with ``--data``; only its path and hash are used, and
    its number of problems is not checked. Raises :class:`UserError` for a missing file or a wrong hash, for rows
    without text or answer, for another number of problems than ``suite.items``, and, where choices are compared, for a
    problem without choices or with an answer that is none of them.
    """
    config = _dataset(suite, root, file)
    key = f"suite {suite.name}"
    try:
        problems = load_problems(config, key=key, training=False, allow_test_split=True)
    except DatasetUnavailable as error:
        folder = ""
        if suite.file:
            folder = f"--data-root FOLDER (with {suite.file.path}) or "
        raise UserError(f"{error.what}. Take a local file: {folder}--data {suite.name}=FILE") from error
    problems = _selected(problems, suite, key)
    # Scores of another version of a set must not stand beside published ones unnoticed.
    count_matters = suite.items is not None and file is None
    if count_matters and len(problems) != suite.items:
        raise UserError(
            f"{key}: it has {suite.items} problems, and {config.path or config.name or config.dataset} gave "
            f"{len(problems)}; another version? --data {suite.name}=FILE takes a file as it is"
        )
    if suite.kind == "likelihood":
        for problem in problems:
            with error_prefix(f"{key}: the problem {problem.id!r}"):
                _check_choices(problem)
    if limit is not None:
        # Last, so that everything above was checked for the whole set.
        problems = subset(problems, limit, 0)
    return problems


def _selected(problems: list[Problem], suite: SuiteConfig, key: str) -> list[Problem]:
    """The problems that ``suite.where`` allows. Raises :class:`UserError` for an unknown field, and for none left."""
    for name, allowed in suite.where.items():
        remaining = []
        for problem in problems:
            if name not in problem.meta:
                raise bad_value(f"{key}: where", name, sorted(problem.meta), f"fields of the problem {problem.id!r}")
            # The allowed values are text; the data's may be numbers.
            if str(problem.meta[name]) in allowed:
                remaining.append(problem)
        problems = remaining
    if not problems:
        conditions = " and ".join(f"{name} in {', '.join(allowed)}" for name, allowed in suite.where.items())
        raise UserError(f"{key}: no problem has {conditions}")
    return problems


def _check_choices(problem: Problem) -> None:
    """Raise :class:`UserError` for a problem without choices, or whose answer is none of them."""
    choices = problem.meta.get("choices")
    if not choices:
        raise UserError("has no choices to compare")
    letters = list(LETTERS[: len(read_choices(choices, field="choices"))])
    if problem.answer not in letters:
        raise bad_value("answer", problem.answer, letters)


def question(problem: Problem, suite: SuiteConfig) -> str:
    """``suite.text`` with this problem's values, each inserted literally and once."""
    choices = problem.meta.get("choices") or ()
    lines = []
    for letter, choice in zip(LETTERS, choices, strict=False):
        lines.append(suite.choice_line.replace("{letter}", letter, 1).replace("{choice}", choice, 1))
    values = {**problem.meta, "text": problem.text, "options": "\n".join(lines)}

    def value(match: re.Match[str]) -> str:
        name, as_words = match.groups()
        has_no_options = name == "options" and not choices
        if name not in values or has_no_options:
            known = [f"{{{name}}}" for name in values]
            why = f"the problem {problem.id!r} has no such value"
            raise bad_value(f"suite {suite.name}: text", match.group(), known, why)
        text = str(values[name])
        if as_words:
            # {subject:words}: MMLU's abstract_algebra is written "abstract algebra" in its prompts.
            text = text.replace("_", " ")
        return text

    # One pass: braces within a problem's text are not replaced again.
    return re.sub(r"\{(\w+)(:words)?\}", value, suite.text)


def suite_prompts(
    suite: SuiteConfig, problems: Sequence[Problem], tokenizer: PreTrainedTokenizerBase, *, template: str = "auto"
) -> tuple[list[Prompt], RenderReport]:
    """Prompts of the problems (:func:`kl_comedy.data.render`); ``template``: see :func:`resolve_template`."""
    prompt = dataclasses.replace(suite.prompt, template=resolve_template(suite, tokenizer, template))
    return render(problems, prompt, tokenizer, key=f"suite {suite.name}: prompt")


def resolve_template(suite: SuiteConfig, tokenizer: Any, template: str = "auto") -> str:
    """``plain`` or ``chat``: from ``template``, then the suite, then chat where the tokenizer has a chat template."""
    if template not in TEMPLATES:
        raise bad_value("--template", template, TEMPLATES)
    # The command counts more than the suite, and the suite more than the tokenizer.
    if template != "auto":
        return template
    if suite.template != "auto":
        return suite.template
    if getattr(tokenizer, "chat_template", None):
        return "chat"
    return "plain"


def _dataset(suite: SuiteConfig, root: Path | None, given: SuiteFile | None) -> DatasetConfig:
    """Where the rows come from: the file of ``--data``, the suite's file, or where it is published."""
    if given is not None:
        # Fields and options are the suite's: the file has its format.
        file = dataclasses.replace(suite.file or SuiteFile(), path=given.path, sha256=given.sha256)
        config = _file_dataset(suite, file, Path(file.path).expanduser(), option=f"--data {suite.name}")
    elif suite.file is not None and (path := _local_path(suite, root)) is not None:
        config = _file_dataset(suite, suite.file, path, option="--data-root")
    else:
        assert suite.data is not None
        config = suite.data
    if config.dataset not in ("jsonl", "parquet", "hub"):
        return config
    # The suite writes the choices, so the reader of rows does not.
    return dataclasses.replace(config, options={"render_choices": False, **config.options})


def _local_path(suite: SuiteConfig, root: Path | None) -> Path | None:
    """The suite's own file, below ``root`` where that is given; None where its published data are to be loaded."""
    if suite.file is None or not suite.file.path:
        return None
    path = Path(suite.file.path).expanduser()
    if root:
        return root.expanduser() / path
    # Without a root a relative path is only a name below --data-root, unless there is nothing else.
    if path.is_absolute() or suite.data is None:
        return path
    return None


def _file_dataset(suite: SuiteConfig, file: SuiteFile, path: Path, *, option: str) -> DatasetConfig:
    """The dataset of a local file. Raises :class:`UserError` where it is missing, or another than the hash says."""
    published = ""
    if suite.data:
        published = f"; published as {suite.data.name} (leave {option} out to load it)"
    existing_file(path, option, f"an existing file for the suite {suite.name}", published)
    if file.sha256 is not None:
        digest = sha256_file(path)
        if digest != file.sha256:
            raise UserError(
                f"{option}: {path} is another file than the suite {suite.name} names: SHA-256 {digest}, expected "
                f"{file.sha256}; --data {suite.name}={path} takes it as it is"
            )
    dataset = "parquet" if path.suffix == ".parquet" else "jsonl"
    return DatasetConfig(dataset=dataset, path=str(path), fields=dict(file.fields), options=dict(file.options))
