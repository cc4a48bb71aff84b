"""Our terms are the peers' own code: the same derivative by every log-prob, on their released wheels.

The wheels are fetched by ``python bench/peers/fetch.py`` and never lie in the repository; without them
these tests are skipped. Each system is compared in a process of its own.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path.append(str(BENCH))

from peers import case as peers_case  # noqa: E402
from peers import equivalence, run  # noqa: E402
from peers.adapters import SYSTEMS, adapter  # noqa: E402

# Readings of flags are checked against measured rows in tests/exact/test_peers_readings.py, which is fast.
pytestmark = pytest.mark.slow

COMPARED = [case for system in SYSTEMS for case in adapter(system).cases if case.ours is not None]


@cache
def compared(system: str) -> dict[str, Any]:
    """Every comparison of a system, by the name of its case; skips the test without its wheel."""
    missing = [f"{pin.dist}=={pin.version}" for pin in adapter(system).needs if not pin.fetched]
    if missing:
        pytest.skip(f"not fetched: {', '.join(missing)} (python bench/peers/fetch.py)")
    comparison = run.run_in_subprocess(system, measured=False)
    return {"rows": {row["name"]: row for row in comparison["rows"]}, "skipped": comparison["skipped"]}


@pytest.mark.parametrize("case", COMPARED, ids=lambda case: case.name)
def test_their_code_and_our_term_have_the_same_derivatives(case: peers_case.Case) -> None:
    comparison = compared(case.system)
    skipped = [skip for skip in comparison["skipped"] if skip["what"] in (case.name, "all of it")]
    assert case.name in comparison["rows"], skipped
    row = comparison["rows"][case.name]
    assert row["difference"] <= row["difference_allowed"] <= 1e-3
    assert row["difference_allowed"] == equivalence.bound(case)
    assert row["stand_ins"] is not None, "what of their code was replaced is recorded"
    assert len(row["module_sha256"]) == 64
    assert len(row["wheel_sha256"]) == 64
