"""What we advise is nothing that a text of an issue, a symptom page or a row's fix tells its readers to undo."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from kl_comedy.kl import claimed_target
from kl_comedy.peers.advice import FILE, advice, read_advice

ROOT = Path(__file__).resolve().parents[2]
STORED = ROOT / "results" / "register"
RATIO_FLAGS = re.compile(r"use-unbiased-kl|unbiased_gradient|use_bias_correction_kl(?!=false)")
DISCLOSURE = "is open, in our own advice too"


def undone(rows):
    """Objectives on fresh samples that the fix of a row replaces by a reverse KL."""
    reverse = ("token_reverse", "sequence_reverse")
    replaced = [row for row in rows if row["fixed_fresh"] and row["intended"] in reverse]
    return {row["fresh"]["target"] for row in replaced} - set(reverse)


def opposed(table, rows):
    """Situations whose advised term optimizes on fresh samples what a row's fix replaces."""
    targets = undone(rows)
    return [
        f"{name}: {claimed_target(term, 'on_policy')}"
        for name, situation in table.situations.items()
        for term in situation.terms
        if claimed_target(term, "on_policy") in targets
    ]


@pytest.fixture(scope="module")
def rows():
    return json.loads((STORED / "register.json").read_text())


def test_no_advised_term_is_one_that_a_row_replaces(rows):
    assert opposed(advice(), rows) == []


@pytest.mark.parametrize("recipe", ["comedy/k3_in_loss", "comedy/k1_in_loss"])
def test_a_planted_contradiction_is_noticed(tmp_path, rows, recipe):
    raw = yaml.safe_load(FILE.read_text())
    situation = raw["situations"]["stale_sampled"]
    del situation["candidates"]
    situation["kl"] = recipe
    file = tmp_path / "advice.yaml"
    file.write_text(yaml.safe_dump(raw))
    (line,) = opposed(read_advice(file), rows)
    assert line.startswith("stale_sampled: ")


def test_a_text_that_asks_for_a_form_of_the_loss_says_that_ours_is_open(rows):
    assert advice().situations["stale_sampled"].candidates
    asking = [row for row in rows if row["issue"] and row["intended"] == "token_reverse"]
    assert asking
    for row in asking:
        assert DISCLOSURE in (STORED / "issues" / f"{row['id']}.md").read_text(), row["id"]


def test_a_symptom_page_that_sets_the_ratio_says_that_the_form_is_open():
    pages = [page for page in (ROOT / "docs" / "symptoms").glob("*.md") if page.name not in ("threads.md", "index.md")]
    setting = [page for page in pages if RATIO_FLAGS.search(page.read_text())]
    assert len(setting) >= 2
    for page in setting:
        assert "[open](../decision.md)" in page.read_text(), page.name
