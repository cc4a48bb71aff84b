"""The generated parts of docs/evaluation.md: the suites and their prompts."""

from __future__ import annotations

from doc_tables.common import built_in, table

from kl_comedy.config.schema import SuiteConfig
from kl_comedy.evaluation import get_suite
from kl_comedy.registry import SUITES

GROUPS = {"in_domain": "mathematics", "out_of_domain": "out of domain", "procedural": "made on the spot"}


def _suites() -> list[SuiteConfig]:
    found = [get_suite(entry.name) for entry in built_in(SUITES)]
    return sorted(found, key=lambda suite: (list(GROUPS).index(suite.group), suite.name))


def suites() -> str:
    rows = []
    for suite in _suites():
        assert suite.data is not None
        published = f"`{suite.data.name}`" if suite.data.name else f"`{suite.data.dataset}`, {suite.data.split}"
        published += f", `{suite.data.subset}`" if suite.data.subset else ""
        file = "" if suite.file is None else f"`{suite.file.path}`" + (" (checked)" if suite.file.sha256 else "")
        judged = f"`{suite.reward.name}`" if suite.kind == "generate" else f"log-prob of {suite.score}"
        rows.append((f"`{suite.name}`", str(suite.items), judged, published, file, suite.licence))
    head = ("suite", "problems", "judged by", "hub name or generator", "file in `--data-root`", "licence")
    return table(head, rows)


def prompts() -> str:
    """One block per prompt, with the suites that use it."""
    asked: dict[tuple[str, ...], list[str]] = {}
    for suite in _suites():
        question = suite.prompt.prefix + suite.text + suite.prompt.suffix + suite.prompt.prefill
        options = suite.choice_line if "{options}" in suite.text else ""
        asked.setdefault((question, options, suite.template), []).append(f"`{suite.name}`")
    blocks = []
    for (question, options, template), names in asked.items():
        how = {"auto": "chat if the tokenizer has a template", "plain": "plain", "chat": "chat"}[template]
        each = f"; options as `{options}`" if options else ""
        blocks.append(f"{', '.join(names)} ({how}{each}):\n\n```text\n{question}\n```")
    return "\n\n".join(blocks)


PARTS = {"suites": suites, "suite prompts": prompts}
