"""Suites by log-prob: the choices of each problem, which of them the model finds likeliest, and how often it is right.

problems with choices -> letters or texts -> tokens -> log-probs in nats -> picks -> accuracy with an interval
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kl_comedy.config.suites import SuiteConfig
from kl_comedy.data.choices import LETTERS
from kl_comedy.evaluation.evaluate import mean_and_half_width
from kl_comedy.evaluation.likelihood import ChoicePasses, Spelled, spell
from kl_comedy.evaluation.plan import CHUNK
from kl_comedy.evaluation.records import Row
from kl_comedy.records import Problem, Prompt

if TYPE_CHECKING:
    from kl_comedy.models import LoadedModel


@dataclass(frozen=True, kw_only=True)
class ChoiceSet:
    """Problems of a suite, asked: ``texts`` are what is compared after each prompt, ``spelled`` their tokens."""

    name: str
    prompts: Sequence[Prompt]
    texts: Sequence[Sequence[str]]
    spelled: Spelled


def ask(suite: SuiteConfig, prompts: Sequence[Prompt], loaded: LoadedModel, *, template: str) -> ChoiceSet:
    """The choices of each prompt as ``suite`` spells them. ``template``: ``plain`` or ``chat``, as the prompts are.

    Raises :class:`~kl_comedy.errors.UserError` as :func:`~kl_comedy.evaluation.likelihood.spell` does.
    """
    texts = [_continuations(suite, prompt.problem.meta["choices"]) for prompt in prompts]
    spelled = spell(
        loaded, prompts, [[suite.delimiter + text for text in row] for row in texts], special=template == "plain"
    )
    return ChoiceSet(name=suite.name, prompts=prompts, texts=texts, spelled=spelled)


def _continuations(suite: SuiteConfig, choices: Sequence[str]) -> list[str]:
    return list(choices) if suite.score == "texts" else list(LETTERS[: len(choices)])


def compared(asked: ChoiceSet, logps: Sequence[Sequence[float]], *, first: int = 0) -> list[Row]:
    """A record for each problem, from the log-probs of its choices; ``first``: the position of the first problem."""
    return [
        _record(first + place, prompt.problem, texts, row, prompt.text)
        for place, (prompt, texts, row) in enumerate(zip(asked.prompts, asked.texts, logps, strict=True))
    ]


def _record(index: int, problem: Problem, texts: Sequence[str], logps: Sequence[float], prompt: str) -> Row:
    """The likeliest choice, by log-prob and by log-prob per character; the first of equals."""
    per_character = [logp / len(text) for logp, text in zip(logps, texts, strict=True)]
    picked, picked_norm = (LETTERS[max(range(len(row)), key=row.__getitem__)] for row in (logps, per_character))
    return {
        "index": index, "id": problem.id, "gold": problem.answer, "picked": picked, "picked_norm": picked_norm,
        "correct": picked == problem.answer, "correct_norm": picked_norm == problem.answer, "logps": list(logps),
        "prompt": prompt,
    }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ChoiceResult:
    """Share of problems whose right choice is the likeliest, by log-prob and per character, with 95% normal intervals.

    There are no completions, so neither reward nor length. ``rows``: a record for each problem.
    """

    name: str
    accuracy: float
    half_width: float
    accuracy_norm: float
    half_width_norm: float
    rows: tuple[Row, ...]

    def metrics(self) -> dict[str, float]:
        """Under ``eval/<suite>/...``."""
        return {
            f"eval/{self.name}/accuracy": self.accuracy,
            f"eval/{self.name}/accuracy_half_width": self.half_width,
            f"eval/{self.name}/accuracy_norm": self.accuracy_norm,
            f"eval/{self.name}/accuracy_norm_half_width": self.half_width_norm,
        }

    def line(self) -> str:
        """The few numbers worth watching."""
        return f"accuracy {self.accuracy:.3f} ± {self.half_width:.3f} ({len(self.rows)} problems, by log-prob)"


def compare(passes: ChoicePasses, asked: ChoiceSet) -> ChoiceResult:
    """Evaluate ``asked``, batched as ``kl-comedy evaluate`` does in its chunks: the same weights, the same bits."""
    rows = compared(asked, passes(asked.spelled, chunk=CHUNK))
    accuracy, half_width = _share(rows, "correct")
    accuracy_norm, half_width_norm = _share(rows, "correct_norm")
    return ChoiceResult(
        name=asked.name, accuracy=accuracy, half_width=half_width, accuracy_norm=accuracy_norm,
        half_width_norm=half_width_norm, rows=tuple(rows),
    )  # fmt: skip


def _share(rows: Sequence[Row], field: str) -> tuple[float, float]:
    return mean_and_half_width([float(row[field]) for row in rows])
