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
    return f"V{tree.vocabulary} T{tree.length} {'ends' if tree.ends else 'full'}"


def setting(tree=TREES[0], regime="off_policy", seed=3, **options):
    return Instance.random(tree, InstanceSettings(regime=regime, seed=seed, distance=0.8, staleness=0.5, **options))


def agrees(one, other, tolerance=1e-10):
    """Means to ``tolerance`` of their scale, variances likewise."""
    scale = max(float(other.gradient_D.norm()), math.sqrt(max(other.variance, 0.0)), 1e-3)
    assert float((one.gradient_D - other.gradient_D).norm()) <= tolerance * scale
    assert abs(one.variance - other.variance) <= tolerance * max(other.variance, 1e-3)


# --- the tree -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("tree", TREES, ids=tree_id)
def test_each_completion_is_there_once_with_its_probability_and_chunks_are_in_order(tree):
    rows = tree.all
    lengths = rows.mask_BT.sum(-1)
    completions = [tuple(t[:n].tolist()) for t, n in zip(rows.token_BT, lengths, strict=True)]
    assert sorted(completions) == brute.completions(tree)
    assert len(completions) == tree.completions
    numbers = {p: n for n, p in enumerate(brute.prefixes(tree))}
    assert tree.prefixes == len(numbers)
    for tokens, prefix_T in zip(completions, rows.prefix_BT, strict=True):
        assert [numbers[tokens[:t]] for t in range(len(tokens))] == prefix_T[: len(tokens)].tolist()
    assert rows.truncated_B.tolist() == [tree.ends and 0 not in tokens for tokens in completions]
    for size in (1, 3, 1000):
        parts = list(tree.chunks(size))
        assert max(len(part.mask_BT) for part in parts) <= size
        for name in ("prefix_BT", "token_BT", "mask_BT", "truncated_B"):
            assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(rows, name))
    where = setting(tree)
    assert float(where.probability(rows).sum()) == pytest.approx(1.0, abs=1e-12)
    passing = torch.zeros(tree.prefixes, dtype=torch.float64)
    for weight, prefix_T, mask_T in zip(where.probability(rows), rows.prefix_BT, rows.mask_BT, strict=True):
        passing[prefix_T[mask_T]] += weight
    assert torch.allclose(tree.reach(where.sampler_logp_NV), passing, atol=1e-12)


@pytest.mark.parametrize("tree", TREES, ids=tree_id)
def test_samples_come_as_often_as_their_probability_says(tree):
    """Every completion's count within 5 standard errors; each draw is a completion of the tree."""
    where, count = setting(tree), 20_000
    drawn = tree.sample(where.sampler_logp_NV, count, torch.Generator().manual_seed(7))
    counts: dict[tuple[int, ...], int] = {}
    for token_T, mask_T, truncated in zip(drawn.token_BT, drawn.mask_BT, drawn.truncated_B, strict=True):
        tokens = tuple(token_T[mask_T].tolist())
        assert bool(truncated) == (tree.ends and 0 not in tokens)
        counts[tokens] = counts.get(tokens, 0) + 1
    assert set(counts) <= set(brute.completions(tree))
    for tokens in brute.completions(tree):
        p = brute.probability(where, tokens)
        z = (counts.get(tokens, 0) - count * p) / math.sqrt(count * p * (1 - p))
        assert abs(z) < 5, (tokens, z)


# --- one completion ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("parameters", [None, 5], ids=["tabular", "shared"])
@pytest.mark.parametrize("term", TERMS, ids=lambda term: term.label())
def test_mean_and_variance_are_those_of_one_autograd_call_per_completion(term, parameters):
    for tree, regime in zip(TREES[:3], ("off_policy", "mixed", "on_policy"), strict=True):
        where = setting(tree, regime, parameters=parameters)
        agrees(expected_gradient(where, [term]), brute.moments(where, terms_loss([term])))


def test_lists_of_terms_and_chunks():
    where, terms = setting(parameters=5), [KLTerm("k3", placement="loss", beta=0.3), KLTerm("k1", beta=0.7)]
    agrees(expected_gradient(where, terms), brute.moments(where, terms_loss(terms)))
    for where in (setting(), setting(parameters=4)):
        for term, chunk in itertools.product(TERMS[::3], (1, 4, 7)):
            agrees(expected_gradient(where, [term], chunk=chunk), expected_gradient(where, [term]), 1e-12)


@pytest.mark.parametrize("parameters", [None, 4], ids=["tabular", "shared"])
@pytest.mark.parametrize("target", ["sequence_reverse", "sequence_forward", "token_reverse", "token_forward"])
def test_targets_are_the_gradients_of_sums_over_completions(target, parameters):
    where = setting(parameters=parameters)
    theta_D = where.theta_D.clone().requires_grad_(True)
    rows = brute.rows_of(where, brute.completions(where.tree), theta_D)
    logp_B, ref_B = rows.logp_BT.sum(-1), rows.ref_logp_BT.sum(-1)
    mu_B = torch.tensor([brute.probability(where, tokens) for tokens in brute.completions(where.tree)]).double()
    scalar = {
        "sequence_reverse": (logp_B.exp() * (logp_B - ref_B)).sum(),
        "sequence_forward": (ref_B.exp() * (ref_B - logp_B)).sum(),
        "token_reverse": (mu_B * (rows.reverse_kl_BT * rows.mask_BT).sum(-1)).sum(),
        "token_forward": (mu_B * (rows.forward_kl_BT * rows.mask_BT).sum(-1)).sum(),
    }[target]
    (wanted_D,) = torch.autograd.grad(scalar, theta_D)
    assert torch.allclose(target_gradient(where, target), wanted_D, atol=1e-10)


def test_a_loss_of_a_wrong_shape_or_a_gradient_that_is_not_finite_is_refused():
    where = setting()
    constant = exact_moments(where, lambda rows: rows.reward_B)
    assert float(constant.gradient_D.norm()) == 0.0 and constant.variance == 0.0
    for sizes in ({"vocabulary": 1, "length": 3}, {"vocabulary": 3, "length": 0}):
        with pytest.raises(UserError, match="at least"):
            Tree.build(**sizes)
    with pytest.raises(UserError, match=r"must return \[B, T\] or \[B\]"):
        exact_moments(where, lambda rows: rows.logp_BT.sum())
    with pytest.raises(UserError, match="not finite"):
        exact_moments(where, lambda rows: (rows.logp_BT - rows.logp_BT).sqrt())


def test_effective_sample_share_is_the_inverse_second_moment_of_the_ratio():
    where = setting(parameters=4)
    square = 0.0
    rows = brute.rows_of(where, brute.completions(where.tree), where.theta_D)
    for tokens, logp_T in zip(brute.completions(where.tree), rows.logp_BT, strict=True):
        mu = brute.probability(where, tokens)
        square += mu * (float(logp_T.sum().exp()) / mu) ** 2
    assert effective_sample_share(where) == pytest.approx(1 / square, rel=1e-9)
    assert effective_sample_share(setting(regime="on_policy")) == pytest.approx(1.0, abs=1e-12)


# --- memory -----------------------------------------------------------------------------------------------------
def test_a_loss_is_called_once_for_a_chunk_of_completions():
    """65536 completions, 1024 at a time: every table made of a chunk stays that small."""
    shapes = []

    def loss(rows):
        shapes.append(tuple(rows.logp_BT.shape))
        return rows.logp_BT.square()

    tree = Tree.build(vocabulary=2, length=16, ends=False)
    exact_moments(Instance.random(tree, InstanceSettings(regime="on_policy", seed=0, parameters=2)), loss, chunk=1024)
    assert len(shapes) == 64 and set(shapes) == {(1024, 16)}
    with pytest.raises(UserError, match="walk them in chunks"):
        _ = Tree.build(vocabulary=2, length=18, ends=False).all


# --- Monte Carlo ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("parameters", [None, 4], ids=["tabular", "shared"])
@pytest.mark.parametrize("group_size", [1, 2])
def test_samples_agree_with_the_enumeration_within_their_error(parameters, group_size):
    """Each coordinate within 5 standard errors (the trace bounds each coordinate's variance), the variance
    within 10 percent."""
    where, samples = setting(parameters=parameters), 40_000
    term = KLTerm("k1", placement="reward", correction="prefix")
    exact = expected_gradient(where, [term], group_size=group_size)
    generator = torch.Generator().manual_seed(1)
    drawn = sampled_moments(where, terms_loss([term]), samples=samples, group_size=group_size, generator=generator)
    error = math.sqrt(exact.variance / samples)
    assert float((drawn.gradient_D - exact.gradient_D).abs().max()) < 5 * error
    assert float((drawn.gradient_D - exact.gradient_D).norm()) > 0.05 * error, "samples, not the enumeration"
    assert drawn.variance == pytest.approx(exact.variance, rel=0.1)


# --- samplers ---------------------------------------------------------------------------------------------------
UNBIASED_OFF_POLICY = [
    KLTerm("exact", placement="loss", correction="prefix_previous"),
    KLTerm("k1", placement="reward", correction="prefix"),
    KLTerm("k1", placement="reward", credit="total", correction="sequence"),
]


def bias(where, term):
    return expected_gradient(where, [term]).relative_bias(target_gradient(where, "sequence_reverse"))


@pytest.mark.parametrize("term", UNBIASED_OFF_POLICY, ids=lambda term: term.label())
@pytest.mark.parametrize("regime", ["on_policy", "off_policy"])
def test_temperature_is_another_sampler_as_long_as_it_records_what_it_drew_from(term, regime):
    drawn, raw = (setting(regime=regime, temperature=0.7, records=records) for records in ("drawn", "raw"))
    assert bias(drawn, term) < 1e-10
    assert bias(raw, term) > 0.05, "log-probs at temperature 1 are not those of the draw"
    assert bias(setting(regime="on_policy", top_p=0.8), term) > 1e-3, "no ratio brings back what top-p leaves out"


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    where = setting(top_p=0.6)
    full = setting()
    for drawn_V, whole_V in zip(where.sampler_logp_NV.exp(), full.sampler_logp_NV.exp(), strict=True):
        allowed = [v for v in range(3) if float(drawn_V[v]) > 0]
        ranked = sorted(range(3), key=lambda v: -float(whole_V[v]))
        mass = [float(whole_V[ranked[:n]].sum()) for n in range(1, 4)]
        assert sorted(allowed) == sorted(ranked[: 1 + next(n for n, m in enumerate(mass) if m >= 0.6)])
        assert torch.allclose(drawn_V[allowed], whole_V[allowed] / whole_V[allowed].sum(), atol=1e-12)


# --- clamps and windows -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("bound", [{"output_clamp": 10.0}, {"input_clamp": 3.0}], ids=str)
def test_a_clamp_changes_nothing_near_the_reference_and_the_gradient_far_from_it(bound):
    free, clamped = KLTerm("k3", placement="loss"), KLTerm("k3", placement="loss", **bound)
    near = Instance.random(TREES[0], InstanceSettings(regime="on_policy", seed=0, distance=0.3))
    far = Instance.random(TREES[0], InstanceSettings(regime="on_policy", seed=0, distance=5.0))
    agrees(expected_gradient(near, [clamped]), expected_gradient(near, [free]), 1e-14)
    moved = expected_gradient(far, [clamped]).gradient_D - expected_gradient(far, [free]).gradient_D
    assert float(moved.norm()) > 1e-2 * float(expected_gradient(far, [free]).gradient_D.norm())


def test_a_clamped_estimate_has_no_gradient_beyond_its_clamp():
    """verl's default bound of 10 nats on k3 lets go of a token whose reference is 3 nats likelier."""
    far = Instance.random(Tree.build(vocabulary=2, length=1, ends=False), InstanceSettings(regime="on_policy", seed=0))
    ref = torch.tensor([[0.999999, 1e-6]], dtype=torch.float64).log()
    policy = torch.tensor([[1e-3, 0.999]], dtype=torch.float64).log()
    tables = {"ref_logp_NV": ref, "sampler_logp_NV": policy, "recorded_logp_NV": policy}
    where = dataclasses.replace(far, theta_D=policy.flatten(), **tables)
    clamped = expected_gradient(where, [KLTerm("k3", placement="loss", output_clamp=10.0)])
    free = expected_gradient(where, [KLTerm("k3", placement="loss")])
    assert float(clamped.gradient_D.norm()) < 1e-12 < 0.9 < float(free.gradient_D.norm())


@pytest.mark.parametrize("correction", ["prefix", "prefix_previous"])
def test_a_window_as_long_as_the_completion_is_no_window_and_bias_falls_as_it_grows(correction):
    tree = Tree.build(vocabulary=2, length=5, ends=False)
    where = Instance.random(tree, InstanceSettings(regime="off_policy", seed=1, distance=0.8, staleness=0.8))
    estimator = "exact" if correction == "prefix_previous" else "k1"
    biases = [bias(where, KLTerm(estimator, correction=correction, window=window)) for window in range(1, 6)]
    assert biases[-1] < 1e-10 < 1e-3 < biases[0]
    assert all(later < 1.05 * earlier for earlier, later in itertools.pairwise(biases)), biases
    whole, none = (expected_gradient(where, [KLTerm(estimator, correction=correction, window=w)]) for w in (5, None))
    agrees(whole, none, 1e-12)
