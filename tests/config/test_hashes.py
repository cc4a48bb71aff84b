"""Config hashes of today's recipes and config files equal the stored ones.

A run resumes, and a sweep finds its cells, by this hash: a change of it strands every stored run. Where a change is
meant, it needs an entry in the lists at the top of ``config/load.py`` rather than a new golden file.
"""

import json
from pathlib import Path

import pytest

from kl_comedy.config import config_hash, load_config

ROOT = Path(__file__).parents[2]
GOLDEN: dict[str, str] = json.loads((ROOT / "tests/golden/config_hashes.json").read_text())


@pytest.mark.parametrize("case", GOLDEN)
def test_config_hash_equals_the_stored_one(case: str) -> None:
    file, *overrides = case.split(" ")
    assert config_hash(load_config(ROOT / file, overrides)) == GOLDEN[case]


def test_enough_configs_are_covered() -> None:
    recipes = [case for case in GOLDEN if " kl=" in case]
    assert len(recipes) >= 30
    assert len(GOLDEN) - len(recipes) >= 15
