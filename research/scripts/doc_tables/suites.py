"""The generated part of docs/evaluation.md: the suites."""

from __future__ import annotations

from doc_tables.common import built_in, code_span, table

from kl_comedy.config.schema import SuiteConfig
from kl_comedy.evaluation import get_suite
from kl_comedy.registry import SUITES

GROUPS = ("in_domain", "out_of_domain", "procedural")
"""Groups of suites, in the order of the table."""


def suites() -> str:
    """A row per set of problems; a suite and its ``_likelihood`` form share one."""
    rows: dict[ProblemCells, SuiteForms] = {}
    for suite in _sorted_suites():
        names, scorings = rows.setdefault(_problem_cells(suite), ([], []))
        names.append(code_span(suite.name))
        scorings.append(_scoring(suite))

    cells = []
    for problems, (names, scorings) in rows.items():
        # The first of `problems`, the name that both forms share, is only the key of the row.
        cells.append((", ".join(names), ", ".join(scorings), *problems[1:]))
    head = ("suite", "judged by", "problems", "hub name or generator", "file in `--data-root`", "licence")
    return table(head, cells)


ProblemCells = tuple[str, str, str, str, str]
"""Name without ``_likelihood``, number of problems, published name, local file, licence."""
SuiteForms = tuple[list[str], list[str]]
"""Names of the suites of one row, and how each is scored."""


def _sorted_suites() -> list[SuiteConfig]:
    suites = [get_suite(entry.name) for entry in built_in(SUITES)]
    return sorted(suites, key=lambda suite: (GROUPS.index(suite.group), suite.name))


def _problem_cells(suite: SuiteConfig) -> ProblemCells:
    assert suite.data is not None  # every built-in suite brings its problems
    if suite.data.name:
        published = code_span(suite.data.name)
    else:
        published = f"{code_span(suite.data.dataset)}, {suite.data.split}"
    if suite.data.subset:
        published += f", {code_span(suite.data.subset)}"

    file = ""
    if suite.file is not None:
        file = code_span(suite.file.path)
        if suite.file.sha256:
            file += " (checked)"
    return suite.name.removesuffix("_likelihood"), str(suite.items), published, file, suite.licence


def _scoring(suite: SuiteConfig) -> str:
    # A suite without generation compares the log-probs of given answers.
    if suite.kind == "generate":
        return code_span(suite.reward.name)
    return f"log-prob of {suite.score}"


PARTS = {"suites": suites}
