"""The measured kind of a loss on stale samples, against known functions, and against what our terms declare."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))

from register.kind import kind
from register.run import _loss

from kl_comedy.kl import KLTerm
from kl_comedy.kl.claims import off_policy_kind
from kl_comedy.kl.oracle import terms_loss

KNOWN = {
    # E_mu[log pi]: minus KL(mu, pi) up to a constant.
    "k1(logp, ref_logp)": "repulsion",
    # Means under mu of what is at least 0, and 0 at the reference alone.
    "k2(logp, ref_logp)": "proper_loss",
    "k3(ref_logp, logp)": "proper_loss",
    # The gradient of the mean of k2: k3 + k3' = l.
    "score(logp) * k3(logp, ref_logp)": "proper_loss",
    # The same, and beyond the clamp of its value a constant of 10 times the score: tokens that fell are pushed down.
    "score(logp) * clamped_k3(logp, ref_logp)": "difference",
    # KL(pi, ref) - KL(pi, mu), and an expected cost that is never negative: the mean of the scores is 0 with a ratio.
    "in_reward(k1(old_logp, ref_logp), logp, old_logp, mask)": "difference",
    "in_reward(k3(old_logp, ref_logp), logp, old_logp, mask)": "difference",
    # Minus a proper loss has its maximum at the reference.
    "-k2(logp, ref_logp)": "difference",
    # Costs of later tokens times the score of the first: its derivative by the later log-probs has no partner.
    "score(logp) * k1(logp, ref_logp).detach().flip(-1).cumsum(-1).flip(-1)": "no_function",
}


@pytest.mark.parametrize("expression", KNOWN)
def test_a_form_is_of_the_kind_of_its_function(expression):
    assert kind(_loss(expression, None)) == KNOWN[expression]


TERMS = [
    KLTerm("k1", placement="loss"),
    KLTerm("abs", placement="loss"),
    KLTerm("k3", placement="reward"),
    KLTerm("k1", placement="reward", credit="total"),
    KLTerm("k1", placement="reward", correction="token", credit="own", anchor="behaviour"),
]


@pytest.mark.parametrize("term", TERMS, ids=[term.label() for term in TERMS])
def test_our_terms_are_of_the_kind_that_is_derived_for_them(term):
    assert kind(terms_loss((term,))) == off_policy_kind(term).kind
