"""The algorithm around the terms: enumerated groups against brute force, and against the loss of training itself."""

import itertools

import pytest
import torch

import brute
from kl_comedy.config import AlgorithmConfig
from kl_comedy.errors import UserError
from kl_comedy.kl import KLTerm, kl_parts, own_baseline
from kl_comedy.kl.oracle import (
    AlgorithmContext,
    Instance,
    InstanceSettings,
    Tree,
    exact_moments,
    expected_gradient,
    kl_effect,
    target_gradient,
    terms_loss,
    training_loss,
)
from kl_comedy.kl.oracle.algorithm_context import effects, group_effect
from kl_comedy.kl.oracle.gradients import term_arguments
from kl_comedy.models.types import ReferencePass, TokenPass
from kl_comedy.objective import returns_with_costs, sequence_weights
from kl_comedy.records import Experience
from kl_comedy.registry import ADVANTAGES
from kl_comedy.training.loss import MicroBatch, micro_loss, named_terms

TREE = Tree.build(vocabulary=2, length=3)
BEFORE = KLTerm("k1", placement="reward", baseline="before", beta=0.7)
IN_LOSS = KLTerm("k3", placement="loss", correction="token", beta=0.4)
OWN = KLTerm("exact", correction="prefix_previous", baseline="own")


def setting(regime="off_policy", parameters=None, tree=TREE, staleness=0.5):
    return Instance.random(
        tree,
        InstanceSettings(regime=regime, seed=2, parameters=parameters, distance=0.8, staleness=staleness),
    )


def assert_close(actual, expected, tolerance=1e-10):
    """The norm of the difference relative to the larger of the two; a floor, since both may be zero."""
    scale = max(float(actual.norm()), float(expected.norm()), 1e-3)
    assert float((actual - expected).norm()) <= tolerance * scale


# --- groups against brute force -----------------------------------------------------------------------------------
def leave_one_out(rows):
    """-(R_i - mean of the others' R) log pi, written for one group of any size."""
    others = (rows.reward_B.sum() - rows.reward_B) / max(len(rows.reward_B) - 1, 1)
    return -(rows.reward_B - others)[:, None] * rows.logp_BT


def leave_one_out_by_group(rows):
    """The same over many groups at once."""
    sums = torch.zeros(int(rows.group_B.max()) + 1, dtype=torch.float64).index_add_(0, rows.group_B, rows.reward_B)
    size = int((rows.group_B == 0).sum())
    others = (sums[rows.group_B] - rows.reward_B) / (size - 1)
    return -(rows.reward_B - others)[:, None] * rows.logp_BT


# Groups of 3 on a smaller tree: brute force makes one autograd call per group.
SHORT_TREE = Tree.build(vocabulary=2, length=2)
GROUPS = pytest.mark.parametrize(("group_size", "tree"), [(2, TREE), (3, SHORT_TREE)], ids=["pairs", "triples"])


@pytest.mark.parametrize("parameters", [None, 4], ids=["tabular", "shared"])
@GROUPS
def test_a_leave_one_out_loss_over_enumerated_groups(group_size, tree, parameters):
    where = setting(parameters=parameters, tree=tree)
    fast = exact_moments(where, leave_one_out_by_group, group_size=group_size)
    slow = brute.moments(where, leave_one_out, group_size=group_size)
    assert_close(fast.gradient_D, slow.gradient_D)
    assert fast.variance == pytest.approx(slow.variance, rel=1e-10)


@pytest.mark.parametrize("chunk", [2, 7])
@pytest.mark.parametrize("parameters", [None, 4], ids=["tabular", "shared"])
@GROUPS
def test_moments_of_groups_do_not_depend_on_the_size_of_chunks(group_size, tree, parameters, chunk):
    where = setting(parameters=parameters, tree=tree)
    whole = exact_moments(where, leave_one_out_by_group, group_size=group_size)
    in_chunks = exact_moments(where, leave_one_out_by_group, group_size=group_size, chunk=chunk)
    assert_close(in_chunks.gradient_D, whole.gradient_D, 1e-12)
    assert in_chunks.variance == pytest.approx(whole.variance, rel=1e-12)


@pytest.mark.parametrize("group_size", [1, 2, 3])
def test_a_loss_that_ignores_its_group_has_the_moments_of_one_completion(group_size):
    """The variance of a group's mean times the group's size is that of one completion."""
    where = setting()
    loss = terms_loss([KLTerm("k3", placement="loss", correction="prefix")])
    of_completions = exact_moments(where, loss)
    of_groups = exact_moments(where, loss, group_size=group_size)
    assert_close(of_groups.gradient_D, of_completions.gradient_D)
    assert of_groups.variance == pytest.approx(of_completions.variance, rel=1e-10)


AROUND = [
    AlgorithmContext(advantage="rloo", group_size=2),
    AlgorithmContext(advantage="grpo", group_size=3),
    AlgorithmContext(advantage="dr_grpo", group_size=2, policy_loss="ppo_clip"),
    AlgorithmContext(advantage="reinforce_pp", group_size=2, reward_scale=2.0),
    AlgorithmContext(advantage="reinforce_pp_baseline", group_size=2),
    AlgorithmContext(advantage="batch_mean", group_size=2, drop_truncated=True),
    AlgorithmContext(advantage="rloo", group_size=2, reduction="token_mean"),
    AlgorithmContext(advantage="rloo", group_size=2, reduction="sequence_mean_token_mean", drop_truncated=True),
    AlgorithmContext(
        advantage="none", policy_loss="ppo_clip", policy_loss_options={"clip_low": 0.01, "clip_high": 0.3}
    ),
]


def around_id(around):
    return f"{around.advantage} {around.policy_loss} {around.reduction} {around.group_size}"


@pytest.mark.parametrize("around", AROUND, ids=around_id)
def test_the_whole_loss_over_enumerated_groups_is_that_of_each_group_alone(around):
    where = setting(tree=SHORT_TREE)
    loss = training_loss([BEFORE, IN_LOSS], around)
    fast = exact_moments(where, loss, group_size=around.group_size)
    slow = brute.moments(where, loss, group_size=around.group_size)
    assert_close(fast.gradient_D, slow.gradient_D)
    assert fast.variance == pytest.approx(slow.variance, rel=1e-9)


def test_too_many_groups_are_refused_with_a_way_out():
    with pytest.raises(UserError, match="use a smaller group"):
        exact_moments(setting(tree=Tree.build(vocabulary=3, length=4)), leave_one_out, group_size=5)


# --- against training's own code ------------------------------------------------------------------------------------
def loss_of_training(rows, terms, around):
    """Each group as one update: advantages and weights as `prepare` makes them, then `micro_loss`."""
    algorithm = AlgorithmConfig(
        policy_loss=around.policy_loss, policy_loss_options=dict(around.policy_loss_options), reduction=around.reduction
    )
    terms = named_terms(terms)
    betas = {name: float(term.beta) for name, term in terms.items()}

    def parts_of(term):
        detached = {name: tensor.detach() for name, tensor in term_arguments(term, rows).items()}
        return kl_parts(term, **detached)

    cost_BT = torch.zeros_like(rows.ref_logp_BT)
    own_baselines = {}
    for name, term in terms.items():
        if term.baseline == "before":
            cost_BT = cost_BT + betas[name] * parts_of(term).cost_BT
        if term.baseline == "own":
            own_baselines[name] = own_baseline(parts_of(term), rows.mask_BT, rows.group_B)

    returns_BT = returns_with_costs(around.reward_scale * rows.reward_B, cost_BT, rows.mask_BT.shape[1])
    complete_B = None
    if around.drop_truncated:
        complete_B = ~rows.truncated_B
    experience = Experience(
        prompt_ids_BP=torch.ones(1, 1),
        prompt_mask_BP=torch.ones(1, 1),
        ids_BT=torch.zeros(1),
        mask_BT=rows.mask_BT,
        real_BT=rows.mask_BT,
        behaviour_logp_BT=rows.behaviour_logp_BT,
        ref_logp_BT=rows.ref_logp_BT,
        advantage_BT=ADVANTAGES.get(around.advantage).fn(returns_BT, rows.mask_BT, rows.group_B),
        reward_B=rows.reward_B,
        weight_B=sequence_weights(around.reduction, rows.mask_BT, keep_B=complete_B).double(),
        policy_version_BT=torch.zeros(1),
        group_B=rows.group_B,
    )
    reference = _with_none_elsewhere(ReferencePass, logp_BT=rows.ref_logp_BT)
    token_pass = _with_none_elsewhere(
        TokenPass, logp_BT=rows.logp_BT, kl_BT=rows.reverse_kl_BT, forward_kl_BT=rows.forward_kl_BT
    )
    micro = MicroBatch(experience=experience, references={"initial": reference}, baselines=own_baselines)
    loss = micro_loss(micro, {"initial": token_pass}, terms=terms, betas=betas, algorithm=algorithm).loss
    # micro_loss is a mean over completions, the oracle's loss a sum.
    return loss * len(rows.reward_B)


def _with_none_elsewhere(record, **values):
    """A record with these fields and None in all others."""
    fields = dict.fromkeys(record.__dataclass_fields__)
    return record(**{**fields, **values})


def value_and_gradient(compute, where, members):
    """``[1 + D]``: what ``compute`` makes of the rows of a group, and its gradient."""
    theta_D = where.theta_D.clone().requires_grad_(True)
    value = compute(brute.rows_of(where, members, theta_D))
    (gradient_D,) = torch.autograd.grad(value, theta_D, materialize_grads=True)
    return torch.cat([value.detach()[None], gradient_D])


@pytest.mark.parametrize("around", AROUND, ids=around_id)
@pytest.mark.parametrize(
    "terms", [[BEFORE], [IN_LOSS], [BEFORE, IN_LOSS], [OWN]], ids=["before", "loss", "both", "own"]
)
def test_the_oracle_enumerates_the_loss_that_training_computes(around, terms):
    """The sum of the oracle's loss over a group is what `micro_loss` gives for that group, value and gradient.

    Up to 1e-6: the weights of sequences are float32 in training.
    """
    where = setting(tree=SHORT_TREE)
    oracle_loss = training_loss(terms, around)
    groups = list(itertools.product(brute.completions(where.tree), repeat=around.group_size))
    for members in groups[::2]:  # every second one, for the time it takes
        by_oracle = value_and_gradient(lambda rows: oracle_loss(rows).sum(), where, members)
        by_training = value_and_gradient(lambda rows: loss_of_training(rows, terms, around), where, members)
        assert_close(by_oracle, by_training, tolerance=1e-6)


# --- what an algorithm leaves of the KL gradient ----------------------------------------------------------------
@pytest.mark.parametrize(
    ("advantage", "group_size", "factor"),
    [("none", 1, 1.0), ("rloo", 3, 1.0), ("dr_grpo", 2, 1 / 2), ("dr_grpo", 3, 2 / 3), ("batch_mean", 2, 1 / 2)],
)
def test_a_group_mean_shrinks_a_cost_before_it_by_one_minus_one_over_the_group(advantage, group_size, factor):
    where = setting("on_policy", parameters=4)
    effect = kl_effect(where, [BEFORE], AlgorithmContext(advantage=advantage, group_size=group_size))
    assert_close(effect.gradient_D, factor * target_gradient(where, "sequence_reverse"), 1e-9)


@pytest.mark.parametrize("around", AROUND[:5], ids=around_id)
def test_a_term_in_loss_passes_every_baseline_untouched(around):
    where = setting("on_policy")
    alone_D = expected_gradient(where, [KLTerm("k3", placement="loss", correction="token")]).gradient_D
    assert_close(kl_effect(where, [IN_LOSS], around).gradient_D, alone_D, 1e-9)


def test_a_group_standard_deviation_blows_the_kl_up_where_rewards_are_equal():
    """GRPO divides by the group's spread. Where all rewards of a group are equal, the spread is that of the KL
    cost alone, so the cost weighs the same at any beta: ten times less beta, ten times the strength per beta."""
    where = setting("on_policy", parameters=4)
    target_D = target_gradient(where, "sequence_reverse")

    def strength(beta, advantage):
        term = KLTerm("k1", credit="total", baseline="before", beta=beta)
        return kl_effect(where, [term], AlgorithmContext(advantage=advantage, group_size=2)).strength(target_D)

    assert strength(1e-3, "rloo") == pytest.approx(1.0)
    assert strength(1e-2, "rloo") == pytest.approx(1.0)
    assert strength(1e-2, "grpo") > 5
    assert strength(1e-3, "grpo") / strength(1e-2, "grpo") == pytest.approx(10, rel=0.05)


def lost_to_clipping(term):
    """How far narrow bounds move the effect of a term from that of bounds that never act."""
    where = setting("off_policy", staleness=1.0)
    narrow = AlgorithmContext(policy_loss="ppo_clip", policy_loss_options={"clip_low": 0.05, "clip_high": 0.05})
    wide = AlgorithmContext(policy_loss="ppo_clip", policy_loss_options={"clip_low": 1.0, "clip_high": 1e6})
    clipped_D = kl_effect(where, [term], narrow).gradient_D
    whole_D = kl_effect(where, [term], wide).gradient_D
    return float((clipped_D - whole_D).norm())


def test_clipping_takes_a_part_of_a_cost_inside_the_advantage():
    assert lost_to_clipping(BEFORE) > 1e-3


def test_clipping_takes_nothing_of_a_term_in_loss():
    assert lost_to_clipping(IN_LOSS) < 1e-10


def test_dropping_truncated_completions_drops_their_kl():
    """Every truncated completion out: what is left is the gradient over the ended ones, each with its own weight."""
    where = setting("on_policy")

    def loss_of_ended_ones(rows):
        # An effect is given per unit of beta.
        return (~rows.truncated_B)[:, None] * terms_loss([IN_LOSS])(rows) / IN_LOSS.beta

    dropped_D = kl_effect(where, [IN_LOSS], AlgorithmContext(drop_truncated=True)).gradient_D
    assert_close(dropped_D, exact_moments(where, loss_of_ended_ones).gradient_D, 1e-7)
    whole_D = kl_effect(where, [IN_LOSS], AlgorithmContext()).gradient_D
    assert float((dropped_D - whole_D).norm()) > 0.05 * float(whole_D.norm())


def test_effects_of_a_config_are_one_row_per_regime():
    on_policy, off_policy = effects("mine", [BEFORE], AlgorithmContext(advantage="dr_grpo", group_size=2))
    assert on_policy.regime == "on_policy"
    assert off_policy.regime == "off_policy"
    assert on_policy.strength == pytest.approx(0.5, rel=1e-9), "1 - 1/G with groups of 2"
    assert on_policy.cosine == pytest.approx(1.0)
    assert off_policy.relative_bias > on_policy.relative_bias
    assert set(on_policy.row()) == {"name", "around", "regime", "strength", "relative_bias", "cosine"}


@pytest.mark.parametrize("size", [2, 3, 4, 5])
@pytest.mark.parametrize("regime", ["on_policy", "off_policy"])
@pytest.mark.parametrize("advantage", ["dr_grpo", "rloo", "batch_mean"])
def test_the_effect_in_a_group_of_any_size_is_that_of_its_enumeration(advantage, regime, size):
    """Groups above 3 are not enumerated in a certificate; here every one is, on a tree of few completions."""
    tree = Tree.build(vocabulary=2, length=2)
    where = Instance.random(tree, InstanceSettings(regime=regime, seed=0, parameters=4))
    context = AlgorithmContext(advantage=advantage, group_size=size)
    # One cost within the baseline and one beside it: only the first becomes weaker in a small group.
    moments, enumerated_size = group_effect(where, [BEFORE, IN_LOSS], context)
    assert enumerated_size == size
    assert_close(moments.gradient_D, kl_effect(where, [BEFORE, IN_LOSS], context).gradient_D, 1e-7)


@pytest.mark.parametrize(("advantage", "strength"), [("dr_grpo", 15 / 16), ("rloo", 1.0), ("batch_mean", 15 / 16)])
def test_the_effect_in_a_group_of_16(advantage, strength):
    (effect,) = effects("mine", [BEFORE], AlgorithmContext(advantage=advantage, group_size=16), regimes=("on_policy",))
    assert effect.strength == pytest.approx(strength, rel=1e-9), "1 - 1/G where the mean contains the completion"
    assert effect.around.endswith("groups of 16")


@pytest.mark.parametrize(
    "context",
    [
        AlgorithmContext(advantage="grpo", group_size=16),
        AlgorithmContext(advantage="dr_grpo", policy_loss="ppo_clip", group_size=16),
    ],
)
def test_what_is_not_linear_in_the_advantage_says_the_size_that_was_enumerated(context):
    *_, effect = effects("mine", [BEFORE], context)
    assert effect.regime == "off_policy"
    assert effect.around.endswith("groups of 3 (16 are too many to enumerate)")
