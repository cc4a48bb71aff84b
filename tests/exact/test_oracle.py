"""The enumerating engine against brute force: one autograd call per completion (or group), written out by hand."""

import dataclasses
import itertools
import math

import pytest
import torch

import brute
from kl_comedy.errors import UserError
from kl_comedy.kl import KLTerm
from kl_comedy.kl.oracle import (
    Instance,
    InstanceSettings,
    Tree,
    effective_sample_share,
    exact_moments,
    expected_gradient,
    sampled_moments,
    target_gradient,
    terms_loss,
)

TREES = [
    Tree.build(vocabulary=3, length=3),
    Tree.build(vocabulary=2, length=4, ends=False),
    Tree.build(vocabulary=2, length=3, ends=True),
    Tree.build(vocabulary=4, length=1, ends=True),
    Tree.build(vocabulary=3, length=1, ends=False),
]
TERMS = [
    KLTerm("k1", placement="reward", credit="total"),
    KLTerm("k3", placement="reward", credit="to_go", correction="prefix"),
    KLTerm("k3", placement="loss", correction="token"),
    KLTerm("k2", level="sequence", placement="loss", correction="sequence", cap=1.2),
    KLTerm("abs", placement="loss", gradient="k2", input_clamp=0.3),
    KLTerm("exact", placement="loss", correction="prefix_previous", window=2),
    KLTerm("exact", placement="reward", correction="prefix_previous", cap=1.1, cap_mode="mask"),
    KLTerm("exact_forward", placement="loss", correction="token_detached"),
    KLTerm("exact_forward", placement="reward", credit="own"),
    KLTerm("k1", placement="reward", anchor="behaviour", correction="sequence"),
    KLTerm("k2", placement="loss", reference="sampler"),
]


def tree_id(tree):
    kind = "full"
    if tree.ends:
        kind = "ends"
    return f"V{tree.vocabulary} T{tree.length} {kind}"


def random_instance(tree=TREES[0], regime="off_policy", seed=3, **options):
    return Instance.random(tree, InstanceSettings(regime=regime, seed=seed, distance=0.8, staleness=0.5, **options))


def assert_same_moments(actual, expected, tolerance=1e-10):
    """Means to ``tolerance`` of their scale, variances likewise."""
    scale = max(float(expected.gradient_D.norm()), math.sqrt(max(expected.variance, 0.0)), 1e-3)
    assert float((actual.gradient_D - expected.gradient_D).norm()) <= tolerance * scale
    assert abs(actual.variance - expected.variance) <= tolerance * max(expected.variance, 1e-3)


def completions_of(rows):
    """The tokens of each row up to its end, as tuples."""
    completions = []
    for token_T, length in zip(rows.token_BT, rows.mask_BT.sum(-1), strict=True):
        completions.append(tuple(token_T[:length].tolist()))
    return completions


def is_truncated(tree, tokens):
    """Token 0 ends a completion in a tree whose completions end."""
    return tree.ends and 0 not in tokens


# --- the tree -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("tree", TREES, ids=tree_id)
def test_each_completion_is_there_once(tree):
    completions = completions_of(tree.all)
    assert sorted(completions) == brute.completions(tree)
    assert len(completions) == tree.completions
    assert tree.all.truncated_B.tolist() == [is_truncated(tree, tokens) for tokens in completions]


@pytest.mark.parametrize("tree", TREES, ids=tree_id)
def test_each_token_names_the_prefix_before_it(tree):
    numbers = {prefix: number for number, prefix in enumerate(brute.prefixes(tree))}
    assert tree.prefixes == len(numbers)
    for tokens, prefix_T in zip(completions_of(tree.all), tree.all.prefix_BT, strict=True):
        length = len(tokens)
        assert prefix_T[:length].tolist() == [numbers[tokens[:position]] for position in range(length)]


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("tree", TREES, ids=tree_id)
def test_chunks_are_the_completions_in_order(tree, size):
    chunks = list(tree.chunks(size))
    assert max(len(chunk.mask_BT) for chunk in chunks) <= size
    for name in ("prefix_BT", "token_BT", "mask_BT", "truncated_B"):
        joined = torch.cat([getattr(chunk, name) for chunk in chunks])
        assert torch.equal(joined, getattr(tree.all, name)), name


@pytest.mark.parametrize("tree", TREES, ids=tree_id)
def test_probabilities_of_completions_sum_to_one(tree):
    probability_B = random_instance(tree).probability(tree.all)
    assert float(probability_B.sum()) == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("tree", TREES, ids=tree_id)
def test_a_prefix_is_reached_as_often_as_by_the_completions_through_it(tree):
    instance = random_instance(tree)
    rows = tree.all
    reached_N = torch.zeros(tree.prefixes, dtype=torch.float64)
    for probability, prefix_T, mask_T in zip(instance.probability(rows), rows.prefix_BT, rows.mask_BT, strict=True):
        reached_N[prefix_T[mask_T]] += probability
    assert torch.allclose(tree.reach(instance.sampler_logp_NV), reached_N, atol=1e-12)


@pytest.mark.parametrize("tree", TREES, ids=tree_id)
def test_samples_come_as_often_as_their_probability_says(tree):
    """Every completion's count within 5 standard errors; each draw is a completion of the tree."""
    instance = random_instance(tree)
    draws = 20_000
    drawn = tree.sample(instance.sampler_logp_NV, draws, torch.Generator().manual_seed(7))
    counts: dict[tuple[int, ...], int] = {}
    for token_T, mask_T, truncated in zip(drawn.token_BT, drawn.mask_BT, drawn.truncated_B, strict=True):
        tokens = tuple(token_T[mask_T].tolist())
        assert bool(truncated) == is_truncated(tree, tokens)
        counts[tokens] = counts.get(tokens, 0) + 1
    assert set(counts) <= set(brute.completions(tree))
    for tokens in brute.completions(tree):
        probability = brute.probability(instance, tokens)
        standard_error = math.sqrt(draws * probability * (1 - probability))
        errors_away = (counts.get(tokens, 0) - draws * probability) / standard_error
        assert abs(errors_away) < 5, tokens


# --- one completion ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("tree", "regime"),
    [(TREES[0], "off_policy"), (TREES[1], "mixed"), (TREES[2], "on_policy")],
    ids=["off_policy", "mixed", "on_policy"],
)
@pytest.mark.parametrize("parameters", [None, 5], ids=["tabular", "shared"])
@pytest.mark.parametrize("term", TERMS, ids=lambda term: term.label())
def test_mean_and_variance_are_those_of_one_autograd_call_per_completion(term, parameters, tree, regime):
    instance = random_instance(tree, regime, parameters=parameters)
    assert_same_moments(expected_gradient(instance, [term]), brute.moments(instance, terms_loss([term])))


def test_the_moments_of_two_terms_are_those_of_their_sum():
    instance = random_instance(parameters=5)
    terms = [KLTerm("k3", placement="loss", beta=0.3), KLTerm("k1", beta=0.7)]
    assert_same_moments(expected_gradient(instance, terms), brute.moments(instance, terms_loss(terms)))


@pytest.mark.parametrize("chunk", [1, 4, 7])
@pytest.mark.parametrize("term", TERMS[::3], ids=lambda term: term.label())
@pytest.mark.parametrize("parameters", [None, 4], ids=["tabular", "shared"])
def test_moments_do_not_depend_on_the_size_of_chunks(parameters, term, chunk):
    instance = random_instance(parameters=parameters)
    whole = expected_gradient(instance, [term])
    assert_same_moments(expected_gradient(instance, [term], chunk=chunk), whole, tolerance=1e-12)


@pytest.mark.parametrize("parameters", [None, 4], ids=["tabular", "shared"])
@pytest.mark.parametrize("target", ["sequence_reverse", "sequence_forward", "token_reverse", "token_forward"])
def test_targets_are_the_gradients_of_sums_over_completions(target, parameters):
    instance = random_instance(parameters=parameters)
    completions = brute.completions(instance.tree)
    theta_D = instance.theta_D.clone().requires_grad_(True)
    rows = brute.rows_of(instance, completions, theta_D)
    logp_B = rows.logp_BT.sum(-1)
    ref_B = rows.ref_logp_BT.sum(-1)
    sampler_B = torch.tensor([brute.probability(instance, tokens) for tokens in completions]).double()
    divergences = {
        "sequence_reverse": (logp_B.exp() * (logp_B - ref_B)).sum(),
        "sequence_forward": (ref_B.exp() * (ref_B - logp_B)).sum(),
        "token_reverse": (sampler_B * (rows.reverse_kl_BT * rows.mask_BT).sum(-1)).sum(),
        "token_forward": (sampler_B * (rows.forward_kl_BT * rows.mask_BT).sum(-1)).sum(),
    }
    (wanted_D,) = torch.autograd.grad(divergences[target], theta_D)
    assert torch.allclose(target_gradient(instance, target), wanted_D, atol=1e-10)


def test_a_loss_without_the_policy_has_no_gradient_and_no_variance():
    constant = exact_moments(random_instance(), lambda rows: rows.reward_B)
    assert float(constant.gradient_D.norm()) == 0.0
    assert constant.variance == 0.0


@pytest.mark.parametrize("sizes", [{"vocabulary": 1, "length": 3}, {"vocabulary": 3, "length": 0}], ids=str)
def test_a_tree_without_a_choice_or_without_a_token_is_refused(sizes):
    with pytest.raises(UserError, match="at least"):
        Tree.build(**sizes)


def test_a_loss_of_a_wrong_shape_is_refused():
    with pytest.raises(UserError, match=r"must return \[B, T\] or \[B\]"):
        exact_moments(random_instance(), lambda rows: rows.logp_BT.sum())


def test_a_gradient_that_is_not_finite_is_refused():
    """The slope of a square root at zero is infinite."""
    with pytest.raises(UserError, match="not finite"):
        exact_moments(random_instance(), lambda rows: (rows.logp_BT - rows.logp_BT).sqrt())


def test_effective_sample_share_is_the_inverse_second_moment_of_the_ratio():
    instance = random_instance(parameters=4)
    completions = brute.completions(instance.tree)
    rows = brute.rows_of(instance, completions, instance.theta_D)
    second_moment = 0.0
    for tokens, logp_T in zip(completions, rows.logp_BT, strict=True):
        sampler_probability = brute.probability(instance, tokens)
        ratio = float(logp_T.sum().exp()) / sampler_probability
        second_moment += sampler_probability * ratio**2
    assert effective_sample_share(instance) == pytest.approx(1 / second_moment, rel=1e-9)


def test_the_effective_sample_share_is_one_on_policy():
    assert effective_sample_share(random_instance(regime="on_policy")) == pytest.approx(1.0, abs=1e-12)


# --- memory -----------------------------------------------------------------------------------------------------
def test_a_loss_is_called_once_for_a_chunk_of_completions():
    """65536 completions, 1024 at a time: every table made of a chunk stays that small."""
    shapes = []

    def loss(rows):
        shapes.append(tuple(rows.logp_BT.shape))
        return rows.logp_BT.square()

    tree = Tree.build(vocabulary=2, length=16, ends=False)
    instance = Instance.random(tree, InstanceSettings(regime="on_policy", seed=0, parameters=2))
    exact_moments(instance, loss, chunk=1024)
    assert shapes == [(1024, 16)] * 64


def test_a_tree_too_large_for_one_table_is_refused():
    tree = Tree.build(vocabulary=2, length=18, ends=False)
    with pytest.raises(UserError, match="walk them in chunks"):
        _ = tree.all


# --- Monte Carlo ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("parameters", [None, 4], ids=["tabular", "shared"])
@pytest.mark.parametrize("group_size", [1, 2])
def test_samples_agree_with_the_enumeration_within_their_error(parameters, group_size):
    """Each coordinate within 5 standard errors (the trace bounds each coordinate's variance), the variance
    within 10 percent."""
    instance = random_instance(parameters=parameters)
    samples = 40_000
    term = KLTerm("k1", placement="reward", correction="prefix")
    exact = expected_gradient(instance, [term], group_size=group_size)
    generator = torch.Generator().manual_seed(1)
    drawn = sampled_moments(instance, terms_loss([term]), samples=samples, group_size=group_size, generator=generator)
    standard_error = math.sqrt(exact.variance / samples)
    gap_D = drawn.gradient_D - exact.gradient_D
    assert float(gap_D.abs().max()) < 5 * standard_error
    assert float(gap_D.norm()) > 0.05 * standard_error, "samples, not the enumeration"
    assert drawn.variance == pytest.approx(exact.variance, rel=0.1)


# --- samplers ---------------------------------------------------------------------------------------------------
UNBIASED_OFF_POLICY = [
    KLTerm("exact", placement="loss", correction="prefix_previous"),
    KLTerm("k1", placement="reward", correction="prefix"),
    KLTerm("k1", placement="reward", credit="total", correction="sequence"),
]


def bias(instance, term):
    return expected_gradient(instance, [term]).relative_bias(target_gradient(instance, "sequence_reverse"))


@pytest.mark.parametrize("term", UNBIASED_OFF_POLICY, ids=lambda term: term.label())
@pytest.mark.parametrize("regime", ["on_policy", "off_policy"])
def test_temperature_is_another_sampler_as_long_as_it_records_what_it_drew_from(term, regime):
    records_what_it_drew = random_instance(regime=regime, temperature=0.7, records="drawn")
    records_temperature_one = random_instance(regime=regime, temperature=0.7, records="raw")
    assert bias(records_what_it_drew, term) < 1e-10
    assert bias(records_temperature_one, term) > 0.05


@pytest.mark.parametrize("term", UNBIASED_OFF_POLICY, ids=lambda term: term.label())
def test_no_ratio_brings_back_what_top_p_leaves_out(term):
    assert bias(random_instance(regime="on_policy", top_p=0.8), term) > 1e-3


def smallest_set_that_reaches(share, probability_V):
    """The likeliest tokens, as few as sum to ``share``."""
    chosen = []
    for token in probability_V.argsort(descending=True).tolist():
        chosen.append(token)
        if float(probability_V[chosen].sum()) >= share:
            break
    return chosen


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    with_top_p = random_instance(top_p=0.6)
    without = random_instance()
    for drawn_V, whole_V in zip(with_top_p.sampler_logp_NV.exp(), without.sampler_logp_NV.exp(), strict=True):
        allowed = [token for token in range(3) if float(drawn_V[token]) > 0]
        assert allowed == sorted(smallest_set_that_reaches(0.6, whole_V))
        assert torch.allclose(drawn_V[allowed], whole_V[allowed] / whole_V[allowed].sum(), atol=1e-12)


# --- clamps and windows -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("bound", [{"output_clamp": 10.0}, {"input_clamp": 3.0}], ids=str)
def test_a_clamp_changes_nothing_near_the_reference_and_the_gradient_far_from_it(bound):
    free = KLTerm("k3", placement="loss")
    clamped = KLTerm("k3", placement="loss", **bound)
    near = Instance.random(TREES[0], InstanceSettings(regime="on_policy", seed=0, distance=0.3))
    assert_same_moments(expected_gradient(near, [clamped]), expected_gradient(near, [free]), tolerance=1e-14)

    far = Instance.random(TREES[0], InstanceSettings(regime="on_policy", seed=0, distance=5.0))
    free_D = expected_gradient(far, [free]).gradient_D
    clamped_D = expected_gradient(far, [clamped]).gradient_D
    assert float((clamped_D - free_D).norm()) > 1e-2 * float(free_D.norm())


def test_a_clamped_estimate_has_no_gradient_beyond_its_clamp():
    """verl's default bound of 10 nats on k3 lets go of a token whose reference is 3 nats likelier."""
    far = Instance.random(Tree.build(vocabulary=2, length=1, ends=False), InstanceSettings(regime="on_policy", seed=0))
    ref = torch.tensor([[0.999999, 1e-6]], dtype=torch.float64).log()
    policy = torch.tensor([[1e-3, 0.999]], dtype=torch.float64).log()
    tables = {"ref_logp_NV": ref, "sampler_logp_NV": policy, "recorded_logp_NV": policy}
    instance = dataclasses.replace(far, theta_D=policy.flatten(), **tables)
    clamped = expected_gradient(instance, [KLTerm("k3", placement="loss", output_clamp=10.0)])
    free = expected_gradient(instance, [KLTerm("k3", placement="loss")])
    assert float(clamped.gradient_D.norm()) < 1e-12
    assert float(free.gradient_D.norm()) > 0.9


@pytest.fixture(scope="module")
def stale_instance():
    """Binary completions of 5 tokens from a sampler far enough away for the ratio of a prefix to matter."""
    tree = Tree.build(vocabulary=2, length=5, ends=False)
    return Instance.random(tree, InstanceSettings(regime="off_policy", seed=1, distance=0.8, staleness=0.8))


ESTIMATOR_AND_ITS_RATIO = [("k1", "prefix"), ("exact", "prefix_previous")]


@pytest.mark.parametrize(("estimator", "correction"), ESTIMATOR_AND_ITS_RATIO)
def test_bias_falls_as_the_window_grows(stale_instance, estimator, correction):
    biases = [bias(stale_instance, KLTerm(estimator, correction=correction, window=w)) for w in (1, 2, 3, 4, 5)]
    assert biases[0] > 1e-3
    assert biases[-1] < 1e-10
    for shorter, longer in itertools.pairwise(biases):
        assert longer < 1.05 * shorter, biases


@pytest.mark.parametrize(("estimator", "correction"), ESTIMATOR_AND_ITS_RATIO)
def test_a_window_as_long_as_the_completion_is_no_window(stale_instance, estimator, correction):
    windowed = expected_gradient(stale_instance, [KLTerm(estimator, correction=correction, window=5)])
    without = expected_gradient(stale_instance, [KLTerm(estimator, correction=correction)])
    assert_same_moments(windowed, without, tolerance=1e-12)
