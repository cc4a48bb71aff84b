"""What the KL losses of a trainer optimize: copy this file into your tests, and list your own losses.

`kl_conformance` is a fixture of kl_comedy's pytest plugin, which pytest finds by itself.
"""

import kl_losses  # your module
import pytest

CLAIMS = kl_losses.CLAIMS
"""By name: a loss, and the options of kl_comedy.conformance.check, such as {"claims": "token_reverse"}."""


@pytest.mark.parametrize("name", CLAIMS)
def test_a_kl_loss_optimizes_what_it_claims(name, kl_conformance):
    loss, options = CLAIMS[name]
    kl_conformance(loss, **options)
