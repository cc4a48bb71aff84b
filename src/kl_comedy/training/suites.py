"""``eval.suites`` of a run: suites as evaluation sets, each with its own prompts, verifier and length.

How many samples are drawn and at which temperature is the run's (``eval.samples``, ``eval.temperature``). A suite by
log-prob draws none: its choices are spelled here, once.
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
from kl_comedy.evaluation.comparing import ChoiceSet, ask
from kl_comedy.evaluation.drawing import GOLDS_CHECKED
from kl_comedy.evaluation.problems import chosen_template, suite_problems, suite_prompts
from kl_comedy.models import LoadedModel
from kl_comedy.records import Problem, Prompt
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

    Raises :class:`~kl_comedy.errors.UserError` for a suite that is called as a set of ``data.eval`` is, and for
    whatever is wrong with its data.
    """
    found = []
    root = None if config.eval.data_root is None else Path(config.eval.data_root)
    for name in config.eval.suites:
        suite = get_suite(name, key="eval.suites")
        if suite.name in config.data.eval or suite.name in [other.suite.name for other in found]:
            raise bad_value("eval.suites", name, "names that neither data.eval nor another suite has")
        found.append(RunSuite(suite=suite, problems=suite_problems(suite, root=root)))
    return found


@dataclass(frozen=True, kw_only=True)
class SuiteSets:
    """Suites as a run evaluates them; what was kept and left out, and the data's hashes, as of its own sets."""

    drawn: Sequence[EvalSet]
    compared: Sequence[ChoiceSet]
    counts: Mapping[str, int]
    hashes: Mapping[str, str]


def suite_sets(
    config: Config, suites: Sequence[RunSuite], loaded: LoadedModel, *, pool: RewardPool, world: World
) -> SuiteSets:
    """The suites with their prompts, in the order of ``suites`` among those that generate and those that compare.

    Raises :class:`~kl_comedy.errors.UserError` where a suite's verifier cannot judge its answers, and where the
    tokenizer cannot spell its choices.
    """
    drawn, compared, counts = [], [], {}
    for found in suites:
        suite, name = found.suite, f"eval.{found.suite.name}"
        prompts, report = suite_prompts(suite, found.problems, loaded.tokenizer)
        counts |= {
            f"{name}.kept": report.kept, f"{name}.too_long": report.too_long,
            f"{name}.control_tokens": report.control_tokens,
        }  # fmt: skip
        if suite.kind == "likelihood":
            compared.append(ask(suite, prompts, loaded, template=chosen_template(suite, loaded.tokenizer)))
        else:
            drawn.append(_drawn(config, found, prompts, pool=pool, world=world))
    hashes = {f"eval.{found.suite.name}": data_hash(found.problems) for found in suites}
    return SuiteSets(drawn=drawn, compared=compared, counts=counts, hashes=hashes)


def _drawn(
    config: Config, found: RunSuite, prompts: Sequence[Prompt], *, pool: RewardPool, world: World
) -> EvalSet:  # fmt: skip
    """The set of a suite that generates, with its own verifier, its answers tried."""
    suite = found.suite
    scorer = RewardSum([suite.reward], pool=pool)
    if world.first:
        scorer.check(found.problems[:: max(len(found.problems) // GOLDS_CHECKED, 1)])
    sampling = Sampling(
        temperature=config.eval.temperature, stop=tuple(suite.stop),
        max_new_tokens=config.eval.max_new_tokens or suite.max_new_tokens,
    )  # fmt: skip
    divided = scorer if world.size == 1 else DividedScorer(scorer, world)
    return EvalSet(name=suite.name, prompts=prompts, scorer=divided, sampling=sampling)
