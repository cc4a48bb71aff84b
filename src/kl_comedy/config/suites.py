"""The schema of an evaluation suite: which problems, how they are asked, how an answer is judged.

Suites are YAML files (those of the package, or a user's own); :mod:`kl_comedy.evaluation.suites` reads them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kl_comedy.config.schema import DatasetConfig, PromptConfig, RewardConfig, _above, _at_least, _one_of

GROUPS = ("in_domain", "out_of_domain", "procedural", "own")
KINDS = ("generate", "likelihood")
FORMS = ("math", "number", "letter", "text", "answer_tag")
TEMPLATES = ("auto", "plain", "chat")


@dataclass
class SuiteFile:
    """The suite's problems in a local file (JSONL or Parquet); ``sha256`` of the file, where it must be that one."""

    path: str = ""
    sha256: str | None = None
    fields: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class SuiteConfig:
    """An evaluation suite.

    ``data`` is where the problems are published (or the task that makes them), ``file`` the same in a local file.
    ``where`` keeps the problems whose meta field is one of the values. ``items``: how many there must be.

    ``text`` is the question: ``{text}`` the problem, ``{options}`` its choices (each as ``choice_line``), any other
    name a field of the problem's meta (``{subject:words}``: underscores as spaces). ``prompt`` goes around it;
    ``template`` auto: the chat template where the tokenizer has one.

    ``generate``: completions are judged by ``reward`` (right from ``solved_at`` on); ``answer`` is how the answer that
    votes in maj@k is read. ``likelihood``: the choice with the highest log-prob as a continuation: ``delimiter``, then
    its letter or its text (``score``).
    """

    name: str = ""
    summary: str = ""
    source: str = ""
    licence: str = ""
    group: str = _one_of("own", *GROUPS)
    kind: str = _one_of("generate", *KINDS)
    data: DatasetConfig | None = None
    file: SuiteFile | None = None
    where: dict[str, list[str]] = field(default_factory=dict)
    items: int | None = _at_least(None, 1)
    text: str = "{text}"
    choice_line: str = "({letter}) {choice}"
    score: str = _one_of("letters", "letters", "texts")
    delimiter: str = " "
    template: str = _one_of("auto", *TEMPLATES)
    prompt: PromptConfig = field(default_factory=lambda: PromptConfig(max_tokens=4096))
    reward: RewardConfig = field(default_factory=RewardConfig)
    solved_at: float = _above(1.0, 0)
    answer: str = _one_of("math", *FORMS)
    max_new_tokens: int = _at_least(1024, 1)
    stop: list[str] = field(default_factory=list)
