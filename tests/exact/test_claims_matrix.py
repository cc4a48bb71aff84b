"""Every cell of the KL matrix, on- and off-policy: the enumerated gradient against what is claimed.

Generated from the registry, so a new estimator or correction is covered the day it registers. Fails in
both directions: a claim that does not hold, and a target that is hit and not claimed.
"""

import pytest

from kl_comedy.kl import REGIMES, TARGETS, claimed_target
from kl_comedy.kl.claims import cells
from kl_comedy.kl.oracle import Setting, Tree, expected_gradient, target_gradient
from kl_comedy.registry import CORRECTIONS, ESTIMATORS

TREE = Tree.build(vocabulary=3, length=4, ends=True)
BUILT_IN = [e.name for e in ESTIMATORS if e.origin.startswith("kl_comedy.")]
RATIOS = [e.name for e in CORRECTIONS if e.origin.startswith("kl_comedy.")]


CELLS = cells(BUILT_IN, RATIOS)


@pytest.fixture(scope="module", params=[(r, p) for r in REGIMES for p in (None, 5)], ids=str)
def instance(request):
    regime, parameters = request.param
    setting = Setting.random(TREE, regime=regime, seed=11, parameters=parameters)
    return regime, setting, {target: target_gradient(setting, target) for target in TARGETS}


def test_the_matrix_is_large_enough():
    assert len(CELLS) > 150


@pytest.mark.parametrize("term", CELLS, ids=lambda term: term.label())
def test_cell_hits_exactly_the_target_it_claims(term, instance):
    regime, setting, targets = instance
    expectation = expected_gradient(setting, [term])
    hit = [name for name, gradient in targets.items() if expectation.relative_bias(gradient) < 1e-10]
    claimed = claimed_target(term, regime)
    assert hit == ([claimed] if claimed else []), {n: expectation.relative_bias(g) for n, g in targets.items()}
