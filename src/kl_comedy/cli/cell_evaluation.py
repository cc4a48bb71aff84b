"""What the evaluation job of a sweep's cell does: the sets of ``data.eval``, and the suites of ``eval.suites``."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kl_comedy.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from kl_comedy.config import Config
    from kl_comedy.slurm.manifest import Manifest


def evaluate_run(
    run: Path, summary: Mapping[str, Any], overrides: Sequence[str], records: Path, console: Console
) -> list[dict[str, Any]]:
    """Evaluate a finished run by the command its ``summary`` names, with ``overrides``; a row for each set and suite.

    What suites draw is kept below ``records``; a call that was stopped goes on there.
    """
    from kl_comedy.cli.evaluating import evaluate_sets
    from kl_comedy.cli.suite_evaluation import Asked, evaluate_suites
    from kl_comedy.cli.targets import Target
    from kl_comedy.config import load_config
    from kl_comedy.evaluation.plan import Shard

    words = shlex.split(summary["evaluate_command"])[2:]
    config = load_config(words[0], [*words[1:], *overrides])
    if not config.data.eval and not config.eval.suites:
        raise UserError("evaluate: names nothing to evaluate on; data.eval and eval.suites are empty")
    rows = evaluate_sets(config, console) if config.data.eval else []
    if config.eval.suites:
        step = config.train.steps
        target = Target(config=config, label=f"{run.name}-{step}", run=run.name, step=step)
        asked = Asked(suites=config.eval.suites, out=records, shard=Shard(), root=_root(config))
        rows += evaluate_suites(target, asked, console)
    return rows


def check_suites(manifest: Manifest, base: Path) -> None:
    """Raise :class:`UserError` for suites of the evaluation that do not exist, or whose local files are not theirs.

    Suites without a local file are checked by name only: nothing is downloaded to submit a sweep.
    """
    if manifest.evaluate is None:
        return
    from kl_comedy.config import load_config
    from kl_comedy.evaluation.problems import suite_problems
    from kl_comedy.evaluation.suites import get_suite

    config = load_config(base, [*manifest.cells[0].overrides, *manifest.evaluate])
    for name in config.eval.suites:
        suite = get_suite(name, key="evaluate: eval.suites")
        if suite.file is not None and (config.eval.data_root is not None or Path(suite.file.path).is_file()):
            suite_problems(suite, root=_root(config))


def _root(config: Config) -> Path | None:
    return None if config.eval.data_root is None else Path(config.eval.data_root)
