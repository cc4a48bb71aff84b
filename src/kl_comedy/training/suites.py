"""``eval.suites`` of a run: suites as evaluation sets, each with its own prompts, verifier and length.

How many samples are drawn and at which temperature is the run's (``eval.samples``, ``eval.temperature``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kl_comedy.config import Config
from kl_comedy.config.suites import SuiteConfig
from kl_comedy.data import data_hash
from kl_comedy.errors import bad_value
from kl_comedy.evaluation import EvalSet, get_suite
from kl_comedy.evaluation.drawing import GOLDS_CHECKED
from kl_comedy.evaluation.problems import suite_problems, suite_prompts
from kl_comedy.models import LoadedModel
from kl_comedy.records import Problem
from kl_comedy.rewards import RewardPool, RewardSum
from kl_comedy.rollouts import Sampling
from kl_comedy.training.divided import DividedScorer
from kl_comedy.training.world import World


@dataclass(frozen=True, kw_only=True)
class RunSuite:
    """A suite and its problems as they are asked."""

    suite: SuiteConfig
    problems: Sequence[Problem]

    def unrendered(self) -> list[Problem]:
        """The problems with their bare text, as training problems are compared with."""
        return [replace(problem, text=problem.meta.get("question", problem.text)) for problem in self.problems]


def load_suites(config: Config) -> list[RunSuite]:
    """The suites that ``config`` names, with their problems.

    Raises :class:`~kl_comedy.errors.UserError` for a suite by log-prob, for one that is called as a set of
    ``data.eval`` is, and for whatever is wrong with its data.
    """
    found = []
    root = None if config.eval.data_root is None else Path(config.eval.data_root)
    for name in config.eval.suites:
        suite = get_suite(name, key="eval.suites")
        if suite.kind != "generate":
            raise bad_value(
                "eval.suites", name, "suites that generate", "kl-comedy evaluate --suite compares log-probs"
            )
        if suite.name in config.data.eval or suite.name in [other.suite.name for other in found]:
            raise bad_value("eval.suites", name, "names that neither data.eval nor another suite has")
        found.append(RunSuite(suite=suite, problems=suite_problems(suite, root=root)))
    return found


def suite_sets(
    config: Config, suites: Sequence[RunSuite], loaded: LoadedModel, *, pool: RewardPool, world: World
) -> tuple[list[EvalSet], Mapping[str, int], Mapping[str, str]]:
    """Evaluation sets of the suites; what was kept and left out, and the data's hashes, as of a run's own sets.

    Raises :class:`~kl_comedy.errors.UserError` where a suite's verifier cannot judge its answers.
    """
    sets, counts, hashes = [], {}, {}
    for found in suites:
        suite, name = found.suite, f"eval.{found.suite.name}"
        prompts, report = suite_prompts(suite, found.problems, loaded.tokenizer)
        scorer = RewardSum([suite.reward], pool=pool)
        if world.first:
            scorer.check(found.problems[:: max(len(found.problems) // GOLDS_CHECKED, 1)])
        counts |= {
            f"{name}.kept": report.kept, f"{name}.too_long": report.too_long,
            f"{name}.control_tokens": report.control_tokens,
        }  # fmt: skip
        hashes[name] = data_hash(found.problems)
        sampling = Sampling(
            temperature=config.eval.temperature, stop=tuple(suite.stop),
            max_new_tokens=config.eval.max_new_tokens or suite.max_new_tokens,
        )  # fmt: skip
        divided = scorer if world.size == 1 else DividedScorer(scorer, world)
        sets.append(EvalSet(name=suite.name, prompts=prompts, scorer=divided, sampling=sampling))
    return sets, counts, hashes
