"""The expected gradient of every recipe is what it was at commit d94eb82, to 1e-12.

The golden file was written by the code of that commit. A rewrite that means to change nothing is held against it;
a recipe that is meant to change, or a new one, is written anew and the commit says why:

    python tests/exact/test_recipe_gradients.py
"""

import json
from pathlib import Path

import pytest
import torch

from kl_comedy.kl import REGIMES
from kl_comedy.kl.oracle import Instance, InstanceSettings, Tree, expected_gradient
from kl_comedy.kl.recipes import recipe
from kl_comedy.registry import RECIPES

GOLDEN = Path(__file__).parents[1] / "golden" / "recipe_gradients.json"


def gradients():
    """``{recipe: {regime: the gradient by the logits of 13 prefixes over 3 tokens}}``, float64."""
    tree = Tree.build(vocabulary=3, length=3)
    result = {}
    for entry in RECIPES:
        terms = recipe(entry.name)
        # Baselines of a term compare the completions of a group; without one, a group is one completion.
        group_size = 2 if {term.baseline for term in terms} & {"own", "batch"} else 1
        result[entry.name] = {
            regime: expected_gradient(
                Instance.random(tree, InstanceSettings(regime=regime, seed=7)), terms, group_size=group_size
            ).gradient_D.tolist()
            for regime in REGIMES
        }
    return result


@pytest.fixture(scope="module")
def computed():
    return gradients()


def test_every_recipe_has_a_golden_gradient(computed):
    assert set(json.loads(GOLDEN.read_text())) == set(computed)


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("name", json.loads(GOLDEN.read_text()))
def test_the_gradient_of_a_recipe_is_that_of_the_golden_file(computed, name, regime):
    golden_D = torch.tensor(json.loads(GOLDEN.read_text())[name][regime], dtype=torch.float64)
    computed_D = torch.tensor(computed[name][regime], dtype=torch.float64)
    # The norm and not each element: a processor with other instructions rounds a sum that cancels differently.
    # A gradient of zero is a sum of rounding errors, of about 1e-18.
    assert (computed_D - golden_D).norm() <= 1e-12 * golden_D.norm() + 1e-16


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(gradients()) + "\n")
