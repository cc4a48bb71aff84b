"""The generated part of docs/evaluation.md: the suites."""

from __future__ import annotations

from doc_tables.common import built_in, table

from kl_comedy.config.schema import SuiteConfig
from kl_comedy.evaluation import get_suite
from kl_comedy.registry import SUITES

GROUPS = {"in_domain": "mathematics", "out_of_domain": "out of domain", "procedural": "made on the spot"}


def _suites() -> list[SuiteConfig]:
    suites = [get_suite(entry.name) for entry in built_in(SUITES)]
    return sorted(suites, key=lambda suite: (list(GROUPS).index(suite.group), suite.name))


def suites() -> str:
    """A row per set of problems; a suite and its ``_likelihood`` form share one."""
    rows: dict[tuple[str, ...], list[tuple[str, str]]] = {}
    for suite in _suites():
        assert suite.data is not None
        published = f"`{suite.data.name}`" if suite.data.name else f"`{suite.data.dataset}`, {suite.data.split}"
        published += f", `{suite.data.subset}`" if suite.data.subset else ""
        file = "" if suite.file is None else f"`{suite.file.path}`" + (" (checked)" if suite.file.sha256 else "")
        scoring = f"`{suite.reward.name}`" if suite.kind == "generate" else f"log-prob of {suite.score}"
        problems = (suite.name.removesuffix("_likelihood"), str(suite.items), published, file, suite.licence)
        rows.setdefault(problems, []).append((f"`{suite.name}`", scoring))
    head = ("suite", "judged by", "problems", "hub name or generator", "file in `--data-root`", "licence")
    return table(head, [(*map(", ".join, zip(*forms, strict=True)), *problems[1:]) for problems, forms in rows.items()])


PARTS = {"suites": suites}
