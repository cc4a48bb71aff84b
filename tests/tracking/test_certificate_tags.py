"""A run carries the certificate of its KL configuration: as tags, and as a warning where a claim does not hold."""

import logging

from kl_comedy.config import load_config
from kl_comedy.kl import resolve_terms
from kl_comedy.registry import CORRECTIONS
from kl_comedy.training.tags import policy_tags, term_tags
from training_runs import SHORT, TINY, go

LAGGED = ("lag.mode=replayed", "lag.steps=1")


def tags(*overrides):
    config = load_config(TINY, list(overrides))
    return term_tags(config, resolve_terms(config.kl))


def test_the_whole_list_and_each_term_are_certified():
    certificate = tags("kl=comedy/k3_both")
    assert certificate["kl.target"] == "sequence_reverse"
    assert certificate["kl.relative_bias"] == "0"
    assert certificate["kl.strength"] == "1"
    assert certificate["kl.cosine"] == "1"
    assert certificate["kl.0.target"] == "none"
    assert float(certificate["kl.0.relative_bias"]) > 0.5
    assert certificate["kl.1.target"] == "token_forward"
    assert certificate["kl.1.verdict"].startswith("token_forward: optimizes")
    assert certificate["kl.regime"] == "on_policy"


def test_the_regime_is_that_of_the_run():
    reward = "kl=[{estimator: k1, placement: reward, beta: 0.05}]"
    on_policy = tags(reward)
    off_policy = tags(reward, *LAGGED)
    assert on_policy["kl.target"] == "sequence_reverse"
    assert off_policy["kl.target"] == "none"
    assert off_policy["kl.regime"] == "off_policy"
    assert float(off_policy["kl.relative_bias"]) > 0.01


def test_a_run_without_kl_has_tags_too():
    certificate = tags("kl=none")
    assert certificate["kl.target"] == "zero"
    assert certificate["kl.cosine"] == "nan"
    assert "nothing holds the policy" in certificate["kl.verdict"]
    assert not any(name.startswith("kl.0") for name in certificate)


def test_the_policy_term_is_certified_against_the_reward_in_the_runs_regime():
    def policy_certificate(*overrides):
        return policy_tags(load_config(TINY, list(overrides)))

    on_policy = policy_certificate()
    assert on_policy["policy.relative_bias"] == "0"
    corrected = policy_certificate(*LAGGED, "algorithm.correction={sequence: {}}")
    assert corrected["policy.relative_bias"] == "0"
    uncorrected = policy_certificate(*LAGGED)
    capped = policy_certificate(*LAGGED, "algorithm.correction={tis: {cap: 3.0}}")
    assert capped["policy.label"] == "reinforce x tis(cap=3)"
    assert "biased" in capped["policy.verdict"]
    assert 0.01 < float(capped["policy.relative_bias"]) < float(uncorrected["policy.relative_bias"])


def test_a_claim_that_does_not_hold_is_a_warning(monkeypatch, caplog):
    monkeypatch.setattr(CORRECTIONS, "_entries", dict(CORRECTIONS._entries))

    @CORRECTIONS.register("forgetful", source="this test", weights="cost", detached=False, scope="prefix")
    def forgetful(delta_BT, window=None):
        """The token's own ratio where the prefix's was promised."""
        return delta_BT.exp()

    logger = logging.getLogger("kl_comedy")
    monkeypatch.setattr(logger, "propagate", True)
    with caplog.at_level(logging.WARNING, logger="kl_comedy"):
        tags("kl=rb/per_decision", *LAGGED)
        tags("kl=[{estimator: exact, placement: loss, correction: forgetful, beta: 0}]", *LAGGED)
        assert not caplog.records, "a term of beta 0 is only measured"
        tags("kl=[{estimator: exact, placement: loss, correction: forgetful}]", *LAGGED)
    (record,) = caplog.records
    assert "claims sequence_reverse off-policy, and the enumeration says: optimizes the" in record.getMessage()


def test_a_run_is_stored_with_them(tmp_path):
    outcome = go(tmp_path, "kl=comedy/k1_in_loss", "model.options.warmstart_steps=5", *SHORT)
    text = (outcome.run.path / "spool.jsonl").read_text()
    for name in ("kl.verdict", "kl.target", "kl.0.relative_bias", "kl.0.strength", "policy.verdict"):
        assert f'"{name}"' in text
    assert "zero expected gradient" in text
