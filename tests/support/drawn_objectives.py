"""KL terms and algorithms of any kind, as hypothesis draws them."""

from hypothesis import assume
from hypothesis import strategies as st

from kl_comedy.config import AlgorithmConfig
from kl_comedy.config.schema import DpoConfig, ValueConfig
from kl_comedy.errors import UserError
from kl_comedy.kl import KLTerm
from kl_comedy.kl.term import BASELINES, CREDITS
from kl_comedy.objective import PolicyTerm
from kl_comedy.objective.policy_term import check_policy_term
from kl_comedy.objective.reduction import REDUCTIONS
from kl_comedy.registry import ADVANTAGES, CORRECTIONS, ESTIMATORS, POLICY_CORRECTIONS, POLICY_LOSSES

K = 3
"""Top tokens of ``top_k``."""
OPTIONS = {"top_k": [{"k": K}], "exact_jsd": [{}, {"share": 0.2}]}


@st.composite
def terms(draw):
    """A KL term of any estimator, placement, credit, correction, baseline, level and weight that is possible.

    What the rules of terms exclude is not drawn, or most draws would be thrown away.
    """
    estimator = draw(st.sampled_from(ESTIMATORS.names()))
    is_sampled = ESTIMATORS.get(estimator).facts["needs"] == "log_ratio"
    placement = draw(st.sampled_from(["reward", "loss"]))
    level = draw(st.sampled_from(["token", "token", "sequence"])) if is_sampled else "token"
    fields = {"placement": placement, "level": level, "options": draw(st.sampled_from(OPTIONS.get(estimator, [{}])))}
    corrections = ["none", "sequence"] if level == "sequence" else list(CORRECTIONS.names())
    fields["correction"] = draw(st.sampled_from(corrections))
    if fields["correction"] != "none":
        fields["cap"] = draw(st.sampled_from([None, 1.1]))
    if CORRECTIONS.get(fields["correction"]).facts["scope"] == "prefix":
        fields["window"] = draw(st.sampled_from([None, 1, 2]))
    if placement == "reward" and level == "token":
        fields["credit"] = draw(st.sampled_from(CREDITS))
        fields["baseline"] = draw(st.sampled_from(BASELINES))
        if fields["credit"] == "to_go":
            fields["discount"] = draw(st.sampled_from([1.0, 0.5]))
    if level == "token":
        fields["weight"] = draw(st.sampled_from(["none", "policy"]))
    try:
        return KLTerm(estimator, **fields)
    except UserError:
        assume(False)


@st.composite
def algorithms(draw):
    """Any advantage, policy loss, correction and reduction that fit together; or DPO."""
    advantage = draw(st.sampled_from(ADVANTAGES.names()))
    correction = draw(st.sampled_from(POLICY_CORRECTIONS.names()))
    policy_loss = draw(st.sampled_from(POLICY_LOSSES.names()))
    algorithm = AlgorithmConfig(
        advantage=advantage,
        policy_loss=policy_loss,
        correction={} if correction == "none" else {correction: {}},
        # A ratio beside that of the loss is refused otherwise.
        proximal="recomputed" if correction != "none" else draw(st.sampled_from(["behaviour", "recomputed"])),
        reduction=draw(st.sampled_from(REDUCTIONS)),
        mask_truncated=draw(st.booleans()),
        value=ValueConfig(gamma=0.9, lam=0.8, normalize=draw(st.booleans())),
        dpo=draw(st.sampled_from([None, None, None, DpoConfig(beta=0.3)])),
    )
    try:
        check_policy_term(PolicyTerm.of(algorithm))
    except UserError:
        assume(False)
    return algorithm


def is_columnwise(term, algorithm):
    """Whether a baseline compares completions column by column: it is unbiased, and depends on where tokens stand."""
    if term is None or term.placement != "reward":
        return False
    return term.baseline == "own" or (term.baseline == "before" and algorithm.advantage not in ("none", "gae"))
