"""KLTerm and kl_surrogate: input checks and their messages, bounds and windows; schedules and the controller."""

import contextlib
import dataclasses
import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kl_comedy.config.validate import parse_record
from kl_comedy.errors import UserError
from kl_comedy.kl import (
    BetaSchedule,
    BetaState,
    BetaTarget,
    KLTerm,
    kl_diagnostics,
    kl_parts,
    kl_surrogate,
    recipe,
    resolve_terms,
)
from kl_comedy.kl.corrections import weights_of
from kl_comedy.kl.term import CAP_MODES, CREDITS
from kl_comedy.kl.term_rules import RULES
from kl_comedy.registry import CORRECTIONS, RECIPES

GOOD = {
    "logp_BT": torch.full((2, 3), -1.0),
    "ref_logp_BT": torch.full((2, 3), -1.5),
    "behaviour_logp_BT": torch.full((2, 3), -1.0),
    "mask_BT": torch.tensor([[True, True, False], [True, False, False]]),
}


def refused(term, **changes):
    with pytest.raises(UserError) as error:
        kl_surrogate(term, **{**GOOD, **changes})
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_log_prob_that_is_not_finite_is_named_with_its_place():
    for name, value in (("logp_BT", "nan"), ("ref_logp_BT", "inf"), ("behaviour_logp_BT", "-inf")):
        broken = GOOD[name].clone()
        broken[0, 1] = float(value)
        assert f"{name} is not finite at [0, 1]" in refused(KLTerm("k3"), **{name: broken})


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("placement", ["reward", "loss"])
def test_what_lies_outside_the_mask_never_matters(value, placement):
    logp_BT = GOOD["logp_BT"].clone()
    logp_BT[0, 2] = value
    logp_BT.requires_grad_(True)
    got = kl_surrogate(KLTerm("k3", placement=placement, correction="prefix"), **{**GOOD, "logp_BT": logp_BT})
    assert got[0, 2] == 0 and bool(torch.isfinite(got).all())
    got.sum().backward()
    assert bool(torch.isfinite(logp_BT.grad[GOOD["mask_BT"]]).all())


def test_shapes_and_masks_are_checked():
    assert "ref_logp_BT has shape (2, 2)" in refused(KLTerm("k1"), ref_logp_BT=torch.zeros(2, 2))
    assert "[B, T]" in refused(KLTerm("k1"), logp_BT=torch.zeros(3))
    assert "exact_kl_BT" in refused(KLTerm("exact"))


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("placement", ["loss", "reward"])
def test_a_row_without_tokens_adds_nothing_and_changes_nothing(placement, level):
    term = KLTerm("k3", placement=placement, level=level)
    logp_BT = GOOD["logp_BT"].clone().requires_grad_()
    mask_BT = torch.tensor([[True, True, True], [False, False, False]])
    surrogate_BT = kl_surrogate(term, **{**GOOD, "logp_BT": logp_BT, "mask_BT": mask_BT})
    (gradient_BT,) = torch.autograd.grad(surrogate_BT.sum(), logp_BT)
    assert bool((surrogate_BT[1] == 0).all()) and bool((gradient_BT[1] == 0).all())
    alone_BT = kl_surrogate(term, **{name: tensor[:1] for name, tensor in {**GOOD, "mask_BT": mask_BT}.items()})
    assert torch.equal(surrogate_BT[:1], alone_BT)


def test_low_precision_is_promoted():
    low = {name: tensor.bfloat16() if tensor.dtype == torch.float32 else tensor for name, tensor in GOOD.items()}
    assert kl_surrogate(KLTerm("k3", placement="loss"), **low).dtype == torch.float32


SAMPLER = {"reference": "sampler"}
BREAKS = {
    "cap_without_ratio": {"cap": 2.0},
    "clip_of_more_than_a_token": {"correction": "token", "cap": 1.2, "cap_mode": "clip"},
    "clip_outside_its_range": {"credit": "own", "correction": "token", "cap": 2.5, "cap_mode": "clip"},
    "input_clamp_without_log_ratio": {"estimator": "exact", "input_clamp": 1.0},
    "window_without_prefix": {"window": 2},
    "tail_weighted_twice": {"estimator": "top_k", "correction": "prefix"},
    "whole_vocabulary_of_a_sequence": {"estimator": "exact", "level": "sequence"},
    "discount_without_later_costs": {"credit": "own", "discount": 0.5},
    "exact_baseline_of_an_exact_cost": {"estimator": "exact", "baseline": "exact"},
    "exact_baseline_without_distribution": {"baseline": "exact", **SAMPLER},
    "batch_baseline_of_another_cost": {"baseline": "batch"},
    "weight_power_without_weight": {"weight_power": 2.0},
    "weight_of_a_sequence": {"level": "sequence", "weight": "policy"},
    "weight_without_distribution": {"weight": "policy", **SAMPLER},
    "recorded_whole_vocabulary": {"estimator": "exact", "anchor": "behaviour"},
    "samplers_whole_vocabulary": {"estimator": "exact", **SAMPLER},
    "k2_gradient_of_an_exact_value": {"estimator": "exact", "placement": "loss", "gradient": "k2"},
    "correction_by_token_of_a_sequence": {"level": "sequence", "correction": "prefix"},
    "sampler_to_itself": {"anchor": "behaviour", **SAMPLER},
    "credit_in_loss": {"placement": "loss", "credit": "own"},
    "baseline_in_loss": {"placement": "loss", "baseline": "after"},
    "recorded_in_loss": {"placement": "loss", "anchor": "behaviour"},
    "token_ratio_of_a_sequence_in_loss": {"placement": "loss", "level": "sequence", "correction": "token"},
    "gradient_in_reward": {"gradient": "k2"},
    "partial_credit_of_a_sequence": {"level": "sequence", "credit": "to_go"},
    "corrected_twice": {"baseline": "before", "correction": "token"},
}
"""By the name of each rule, the fields of a term (of k1 where they name no estimator) that breaks it first."""


def test_every_rule_has_a_term_that_breaks_it():
    assert list(BREAKS) == [rule.name for rule in RULES]


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_rule_is_an_error_with_its_message(name):
    fields = {"estimator": "k1", **BREAKS[name]}
    (rule,) = [rule for rule in RULES if rule.name == name]
    with pytest.raises(UserError, match="impossible KL term") as error:
        parse_record(KLTerm, fields, key="kl.0")
    message = str(error.value)
    assert message.startswith("kl.0")
    fixed_words = rule.message.split("{")[0] or rule.message.split("}")[-1]
    assert fixed_words in message


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ([{"estimator": "k33"}], ["kl.0.estimator", "'k3'"]),
        ([{"estimator": "k1", "betta": 1}], ["kl.0.betta", "'beta'"]),
        ([{"estimator": "k1", "beta": "big"}], ["kl.0.beta", "'big'"]),
        ([{"estimator": "k1", "beta": float("nan")}], ["kl.0.beta", "finite"]),
        ([{"estimator": "k1", "beta": -0.1}], ["kl.0.beta: got -0.1", "at least 0", "pays for leaving the reference"]),
        ([{"estimator": "k1", "beta": {"target": -1}}], ["kl.0.beta.target", "above 0"]),
        ([{"estimator": "k1", "beta": {"target": 1, "init": -0.1}}], ["kl.0.beta.init", "above 0"]),
        ([{"estimator": "k1", "beta": {"start": 1, "end": -1, "steps": 2}}], ["kl.0.beta.end", "at least 0"]),
        ({"recipe": "grpo", "beta": -0.1}, ["kl.beta", "at least 0"]),
        ([{"estimator": "k1", "input_clamp": -1.0}], ["kl.0.input_clamp", "above 0"]),
        ([{"estimator": "k1", "window": 0, "correction": "prefix"}], ["kl.0.window", "at least 1"]),
        ([{"estimator": "k1", "beta": {"start": 1}}], ["kl.0.beta", "needs end"]),
        ([{"estimator": "k_lambda", "options": {"lambda": 1}}], ["kl.0.options.lambda", "allowed: lam"]),
        ([{"beta": 1}], ["kl.0", "needs estimator"]),
        ("grppo", ["kl", "'grpo'"]),
        (3, ["kl", "recipe"]),
        ({"estimator": "k1"}, ["kl", "a list of terms"]),
        ({"recipe": "grpo", "bta": 1}, ["kl.bta", "'beta'"]),
        (["x"], ["kl.0", "allowed"]),
    ],
)
def test_bad_terms_name_the_key_and_the_nearest(value, says):
    with pytest.raises(UserError) as error:
        resolve_terms(value)
    for word in says:
        assert word in str(error.value), str(error.value)


def test_terms_read_back_from_what_they_write():
    for entry in RECIPES:
        for term in entry.fn():
            assert parse_record(KLTerm, term.to_mapping()) == term
    scheduled = KLTerm("k3", placement="loss", beta=BetaSchedule(start=1.0, end=0.0, steps=10))
    assert parse_record(KLTerm, scheduled.to_mapping()) == scheduled


@given(st.floats(0.01, 10.0), st.floats(0.0, 50.0))
def test_the_controller_moves_toward_the_target(target, measured):
    spec = BetaTarget(target=target)
    moved = spec.next(1.0, measured)
    assert (moved > 1.0) == (measured > target) or measured == pytest.approx(target)
    assert 0.97 < moved < 1.03
    state = BetaState(BetaTarget(target=1.0))
    state.advance(1, float("nan"))
    assert state.value == 0.1, "it does not move when nothing was measured"


@given(st.floats(1e-7, 2e3), st.floats(0.0, 50.0), st.floats(0.0, 5.0), st.floats(0.0, 1.0), st.floats(0.0, 3.0))
def test_the_controller_moves_by_its_formula_within_its_bounds(beta, measured, gain, minimum, width):
    maximum = minimum + width + 1e-3
    spec = BetaTarget(target=2.0, gain=gain, minimum=minimum, maximum=maximum)
    error = (measured - 2.0) / 2.0
    moved = beta * (1.0 + gain * max(-0.2, min(0.2, error)))
    expected = minimum if moved < minimum else maximum if moved > maximum else moved
    assert spec.next(beta, measured) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("measured", "bound"), [(100.0, 0.101), (0.0, 0.0995)])
def test_the_controller_stops_at_its_bounds_and_leaves_them_again(measured, bound):
    state = BetaState(BetaTarget(target=1.0, init=0.1, minimum=0.0995, maximum=0.101))
    for step in range(3):
        state.advance(step, measured)
    assert state.value == bound
    state.advance(3, 1.0 if measured else 1.1)
    state.advance(4, 0.0 if measured else 100.0)
    assert 0.0995 <= state.value <= 0.101 and state.value != bound


@pytest.mark.parametrize("shape", ["linear", "cosine"])
@pytest.mark.parametrize(("start", "end"), [(0.4, 0.1), (0.0, 0.3)])
def test_a_schedule_goes_from_its_start_to_its_end_and_stays(shape, start, end):
    state = BetaState(BetaSchedule(start=start, end=end, steps=8, shape=shape))
    values = [state.value]
    for step in range(1, 12):
        state.advance(step, float("nan"))
        values.append(state.value)
    shares = [min(step, 8) / 8 for step in range(12)]
    if shape == "cosine":
        shares = [(1 - math.cos(math.pi * share)) / 2 for share in shares]
    assert values == pytest.approx([start + (end - start) * share for share in shares])


@pytest.mark.parametrize("name", RECIPES.names())
def test_a_beta_given_with_a_recipe_is_that_of_each_of_its_terms(name):
    """Or it is refused, where the terms have betas of their own."""
    terms = recipe(name)
    if len({term.beta for term in terms}) > 1:
        with pytest.raises(UserError, match="its terms have betas of their own"):
            recipe(name, beta=0.3)
        return
    for changed in (recipe(name, beta=0.3), resolve_terms({"recipe": name, "beta": 0.3})):
        assert [term.beta for term in changed] == [0.3] * len(terms)
        assert [dataclasses.replace(term, beta=0.0) for term in changed] == [
            dataclasses.replace(term, beta=0.0) for term in terms
        ]
    beside = resolve_terms([{"estimator": "k1", "beta": 0.7}, {"recipe": name, "beta": 0.3}])
    assert [term.beta for term in beside] == [0.7] + [0.3] * len(terms)


def diagnosed(term, logp, behaviour=(0.0, 0.0)):
    tensors = {"logp_BT": logp, "ref_logp_BT": (0.0, 0.0), "behaviour_logp_BT": behaviour}
    mask_BT = torch.tensor([[True, True]])
    return kl_diagnostics(term, mask_BT=mask_BT, **{name: torch.tensor([row]) for name, row in tensors.items()})


def test_caps_and_clamps_are_counted():
    diagnostics = diagnosed(KLTerm("k1", correction="token", cap=1.5), (0.0, 0.0), behaviour=(-1.0, 0.0))
    assert diagnostics == {"capped_share": 0.5, "ratio_max": pytest.approx(2.71828, rel=1e-4)}
    assert diagnosed(KLTerm("k1"), (0.0, 0.0)) == {}
    assert diagnosed(KLTerm("k2", placement="loss", output_clamp=10.0), (5.0, 1.0))["clamped_share"] == 0.5
    assert diagnosed(KLTerm("k3", placement="loss", input_clamp=20.0), (-21.0, 25.0))["clamped_share"] == 1.0
    term = KLTerm("k2", level="sequence", placement="loss", output_clamp=10.0)
    assert diagnosed(term, (3.0, 3.0))["clamped_share"] == 1.0


def test_a_window_keeps_the_last_ratios():
    delta_BT = torch.tensor([[1.0, 2.0, 4.0]])
    assert weights_of("prefix", delta_BT, window=2).log()[0].tolist() == pytest.approx([1.0, 3.0, 6.0])
    assert weights_of("prefix_previous", delta_BT, window=1).log()[0].tolist() == pytest.approx([0.0, 1.0, 2.0])
    assert torch.equal(weights_of("prefix", delta_BT, window=9), weights_of("prefix", delta_BT))


def test_a_cap_truncates_or_masks_ratios_beyond_it_or_bounds_each_of_a_product():
    delta_BT = torch.tensor([[0.5, 2.0, 3.0]], dtype=torch.float64).log()
    for cap_mode, expected in (("truncate", [0.5, 2.0, 2.0]), ("mask", [0.5, 2.0, 0.0])):
        assert weights_of("token", delta_BT, cap=2.0 + 1e-9, cap_mode=cap_mode)[0].tolist() == pytest.approx(expected)
    delta_BT = torch.tensor([[1.0, -1.0, 2.0]])
    capped = weights_of("prefix", delta_BT, cap=1.0, cap_mode="each")
    assert capped.log()[0].tolist() == pytest.approx([0.0, -1.0, -1.0])


def ratios_by_hand(term, deltas):
    """The ratio at each token of a completion, and that of the tokens up to it, bounded as the term says."""
    if term.cap_mode == "each" and term.cap is not None:
        deltas = [min(delta, math.log(term.cap)) for delta in deltas]

    def product(first, end):
        ratio = math.exp(sum(deltas[max(first, 0) : end]))
        if term.cap is None or term.cap_mode in ("each", "clip") or ratio <= term.cap:
            return ratio
        return term.cap if term.cap_mode == "truncate" else 0.0

    def prefix(t, own):
        """The product of the last ``window`` ratios, with or without that of token t itself."""
        end = t + 1 if own else t
        return product(0 if term.window is None else end - term.window, end)

    size = len(deltas)
    ratios = {
        "none": lambda t: 1.0,
        "token": lambda t: product(t, t + 1),
        "token_detached": lambda t: product(t, t + 1),
        "prefix": lambda t: prefix(t, True),
        "prefix_previous": lambda t: prefix(t, False),
        "sequence": lambda t: product(0, size),
    }
    return [ratios[term.correction](t) for t in range(size)], [prefix(t, True) for t in range(size)]


def parts_by_hand(term, deltas, values):
    """Cost, weight and weight of a baseline at each token of a completion; ``values`` are the estimates."""
    ratios, prefixes = ratios_by_hand(term, deltas)
    per_decision = CORRECTIONS.get(term.correction).facts["weights"] == "cost"
    steps = [ratio * value if per_decision else value for ratio, value in zip(ratios, values, strict=True)]
    costs = []
    for t in range(len(steps)):
        to_go = sum(term.discount ** (u - t) * steps[u] for u in range(t, len(steps)))
        cost = {"total": sum(steps), "to_go": to_go, "own": steps[t]}[term.credit]
        costs.append(cost - (steps[t] if term.needs != "log_ratio" else 0.0))
    if term.cap_mode == "clip":
        low, high = 2 - term.cap, term.cap
        outside = [r < low if value > 0 else r > high for r, value in zip(ratios, values, strict=True)]
        ratios = [0.0 if out else ratio for ratio, out in zip(ratios, outside, strict=True)]
    ones = [1.0] * len(ratios)
    return costs, (ones if per_decision else ratios), (prefixes if per_decision else ratios)


def every_bound():
    """Every correction with every bound of its ratio, window, credit and discount that is possible."""
    caps = [{}, *({"cap": 1.3, "cap_mode": mode} for mode in CAP_MODES)]
    fields = itertools.product(("k1", "exact"), CORRECTIONS.names(), caps, (None, 1, 2), CREDITS, (1.0, 0.6))
    for estimator, correction, cap, window, credit, discount in fields:
        with contextlib.suppress(UserError):
            yield KLTerm(estimator, correction=correction, **cap, window=window, credit=credit, discount=discount)


def test_costs_and_their_weights_are_those_of_the_formula_under_every_bound():
    generator = torch.Generator().manual_seed(0)
    sizes = (6, 1, 4, 2, 6)
    mask_BT = torch.arange(6)[None] < torch.tensor(sizes)[:, None]
    logp_BT, ref_logp_BT, behaviour_logp_BT, exact_BT = torch.rand(4, 5, 6, generator=generator, dtype=torch.float64)
    tensors = {"logp_BT": logp_BT, "ref_logp_BT": ref_logp_BT, "behaviour_logp_BT": behaviour_logp_BT}
    terms, acted = list(every_bound()), set()
    for term in terms:
        exact = {"exact_kl_BT": exact_BT} if term.estimator == "exact" else {}
        parts = kl_parts(term, **tensors, **exact, mask_BT=mask_BT)
        values_BT = exact_BT if exact else logp_BT - ref_logp_BT
        for row, size in enumerate(sizes):
            deltas = (logp_BT - behaviour_logp_BT)[row, :size].tolist()
            expected = parts_by_hand(term, deltas, values_BT[row, :size].tolist())
            for name, values in zip(("cost_BT", "weight_BT", "baseline_weight_BT"), expected, strict=True):
                assert getattr(parts, name)[row, :size].tolist() == pytest.approx(values, rel=1e-10, abs=1e-12), (
                    term.label(),
                    name,
                    row,
                )
            free = dataclasses.replace(term, cap=None, cap_mode="truncate")
            if parts_by_hand(free, deltas, values_BT[row, :size].tolist()) != expected:
                acted.add((term.correction, term.cap_mode))
    bounded = {(term.correction, term.cap_mode) for term in terms if term.cap is not None}
    assert acted == bounded and len(bounded) > 12, "every bound acted somewhere"


@given(st.lists(st.integers(-1000, 1000).map(lambda thousandths: thousandths / 1000), min_size=6, max_size=6))
def test_a_clipped_cost_has_the_gradient_of_ppos_formula(values):
    """Against autograd of ``max(r c, clip(r, 0.8, 1.2) c)`` with ``c = logp - ref_logp`` held fixed."""
    logp_BT = torch.tensor([values[:3]], dtype=torch.float64, requires_grad=True)
    ref_logp_BT, behaviour_logp_BT = torch.tensor([values[3:]], dtype=torch.float64), torch.zeros(1, 3).double()
    term, mask_BT = RECIPES.get("liu/clipped").fn()[0], torch.ones(1, 3, dtype=torch.bool)
    tensors = {"ref_logp_BT": ref_logp_BT, "behaviour_logp_BT": behaviour_logp_BT, "mask_BT": mask_BT}
    (ours,) = torch.autograd.grad(kl_surrogate(term, logp_BT=logp_BT, **tensors).sum(), logp_BT)
    ratio_BT, cost_BT = (logp_BT - behaviour_logp_BT).exp(), (logp_BT - ref_logp_BT).detach()
    formula = torch.maximum(ratio_BT * cost_BT, ratio_BT.clamp(0.8, 1.2) * cost_BT)
    (expected,) = torch.autograd.grad(formula.sum(), logp_BT)
    assert torch.allclose(ours, expected)
    dropped = kl_diagnostics(term, logp_BT=logp_BT, **tensors)["capped_share"]
    assert dropped == pytest.approx(((expected == 0) & (cost_BT != 0)).double().mean().item())


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.long])
@pytest.mark.parametrize(
    "options",
    [
        {"correction": "token", "cap": 2.0},
        {"correction": "prefix", "cap": 2.0, "cap_mode": "each"},
        {"input_clamp": 1.0},
    ],
)
def test_the_diagnostics_of_a_batch_without_a_token_are_empty(options, mask_dtype):
    """Every completion was cut and masked: there is no largest ratio."""
    zeros_BT = torch.zeros(2, 3)
    tensors = dict.fromkeys(("logp_BT", "ref_logp_BT", "behaviour_logp_BT"), zeros_BT)
    term = KLTerm("k3", placement="loss", **options)
    assert kl_diagnostics(term, **tensors, mask_BT=torch.zeros(2, 3, dtype=mask_dtype)) == {}
    assert kl_diagnostics(term, **tensors, mask_BT=torch.ones(2, 3, dtype=mask_dtype)) != {}
