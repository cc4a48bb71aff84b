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


def message_of(term, **changes):
    """What is said of these tensors, which are refused in one line."""
    with pytest.raises(UserError) as error:
        kl_surrogate(term, **{**GOOD, **changes})
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [("logp_BT", math.nan), ("ref_logp_BT", math.inf), ("behaviour_logp_BT", -math.inf)],
)
def test_a_log_prob_that_is_not_finite_is_named_with_its_place(name, value):
    broken_BT = GOOD[name].clone()
    broken_BT[0, 1] = value
    assert f"{name} is not finite at [0, 1]" in message_of(KLTerm("k3"), **{name: broken_BT})


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("placement", ["reward", "loss"])
def test_what_lies_outside_the_mask_never_matters(value, placement):
    logp_BT = GOOD["logp_BT"].clone()
    logp_BT[0, 2] = value
    logp_BT.requires_grad_(True)
    term = KLTerm("k3", placement=placement, correction="prefix")
    surrogate_BT = kl_surrogate(term, **{**GOOD, "logp_BT": logp_BT})
    assert surrogate_BT[0, 2] == 0
    assert bool(torch.isfinite(surrogate_BT).all())
    surrogate_BT.sum().backward()
    assert bool(torch.isfinite(logp_BT.grad[GOOD["mask_BT"]]).all())


def test_a_tensor_of_another_shape_is_named():
    assert "ref_logp_BT has shape (2, 2)" in message_of(KLTerm("k1"), ref_logp_BT=torch.zeros(2, 2))


def test_a_tensor_without_a_batch_is_refused():
    assert "[B, T]" in message_of(KLTerm("k1"), logp_BT=torch.zeros(3))


def test_a_missing_exact_kl_is_named():
    assert "exact_kl_BT" in message_of(KLTerm("exact"))


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("placement", ["loss", "reward"])
def test_a_row_without_tokens_adds_nothing_and_changes_nothing(placement, level):
    term = KLTerm("k3", placement=placement, level=level)
    logp_BT = GOOD["logp_BT"].clone().requires_grad_()
    mask_BT = torch.tensor([[True, True, True], [False, False, False]])
    surrogate_BT = kl_surrogate(term, **{**GOOD, "logp_BT": logp_BT, "mask_BT": mask_BT})
    (gradient_BT,) = torch.autograd.grad(surrogate_BT.sum(), logp_BT)
    assert bool((surrogate_BT[1] == 0).all())
    assert bool((gradient_BT[1] == 0).all())
    first_row = {name: tensor[:1] for name, tensor in {**GOOD, "mask_BT": mask_BT}.items()}
    assert torch.equal(surrogate_BT[:1], kl_surrogate(term, **first_row))


def test_low_precision_is_promoted():
    low = dict(GOOD)
    for name in ("logp_BT", "ref_logp_BT", "behaviour_logp_BT"):
        low[name] = GOOD[name].bfloat16()
    assert kl_surrogate(KLTerm("k3", placement="loss"), **low).dtype == torch.float32


# --- impossible terms ---------------------------------------------------------------------------------------------


SAMPLER = {"reference": "sampler"}
CENTRED = {"score_centring": "exact"}
# By the name of each rule, the fields of a term (of k1 where they name no estimator) that breaks it first.
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
    "batch_baseline_of_another_cost": {"baseline": "batch"},
    "centred_score_in_loss": {"placement": "loss", **CENTRED},
    "centred_score_of_the_policy_loss": {"baseline": "before", **CENTRED},
    "centred_score_with_ratio": {"correction": "prefix", **CENTRED},
    "centred_score_without_cost": {"estimator": "exact", "credit": "own", **CENTRED},
    "weight_power_without_weight": {"weight_power": 2.0},
    "weight_of_a_sequence": {"level": "sequence", "weight": "policy"},
    "recorded_whole_vocabulary": {"estimator": "exact", "anchor": "behaviour"},
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


def test_every_rule_has_a_term_that_breaks_it():
    assert list(BREAKS) == [rule.__name__ for rule in RULES]


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_rule_is_an_error_with_its_reason(name, monkeypatch):
    fields = {"estimator": "k1", **BREAKS[name]}
    with pytest.raises(UserError, match="impossible KL term") as error:
        parse_record(KLTerm, fields, key="kl.0")
    # Without its rules the term can be built, and each of them asked.
    monkeypatch.setattr("kl_comedy.kl.term.RULES", ())
    term = KLTerm(**fields)
    reasons = {rule.__name__: rule(term) for rule in RULES}
    broken = [rule for rule, reason in reasons.items() if reason is not None]
    assert broken[:1] == [name]
    assert str(error.value) == f"kl.0: impossible KL term {term.label()}: {reasons[name]}"


@pytest.mark.parametrize(
    ("value", "words"),
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
        ([{"estimator": "k1", "score_centring": "topk"}], ["kl.0.score_centring: got 'topk'", "exact, a number"]),
        ([{"estimator": "k1", "score_centring": 0}], ["kl.0.score_centring: got 0", "at least 1"]),
        ([{"estimator": "k1", "score_centring": 1.5}], ["kl.0.score_centring: got 1.5", "whole number"]),
        ([{"estimator": "k1", "score_centring": True}], ["kl.0.score_centring: got True", "whole number"]),
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
def test_bad_terms_name_the_key_and_the_nearest(value, words):
    with pytest.raises(UserError) as error:
        resolve_terms(value)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("entry", RECIPES, ids=lambda entry: entry.name)
def test_terms_read_back_from_what_they_write(entry):
    for term in entry.fn():
        assert parse_record(KLTerm, term.to_mapping()) == term


@pytest.mark.parametrize(("value", "words"), [("exact", "score centred"), (16, "score centred top 16")])
def test_score_centring_is_written_and_in_the_label(value, words):
    term = KLTerm("exact", score_centring=value)
    assert parse_record(KLTerm, term.to_mapping()) == term
    assert term.label() == f"exact_reverse_token in reward to_go {words}"
    assert "score_centring" not in KLTerm("exact").to_mapping()


def test_a_schedule_reads_back_from_what_it_writes():
    scheduled = KLTerm("k3", placement="loss", beta=BetaSchedule(start=1.0, end=0.0, steps=10))
    assert parse_record(KLTerm, scheduled.to_mapping()) == scheduled


# --- beta ---------------------------------------------------------------------------------------------------------
@given(st.floats(0.01, 10.0), st.floats(0.0, 50.0))
def test_the_controller_moves_toward_the_target(target, measured):
    """By at most 3 percent; where the target is hit, rounding decides which way."""
    moved = BetaTarget(target=target).next(1.0, measured)
    assert 0.97 < moved < 1.03
    if measured != pytest.approx(target):
        assert (moved > 1.0) == (measured > target)


def test_the_controller_does_not_move_when_nothing_was_measured():
    state = BetaState(BetaTarget(target=1.0))
    state.advance(1, math.nan)
    assert state.value == 0.1, "the default of init"


@given(st.floats(1e-7, 2e3), st.floats(0.0, 50.0), st.floats(0.0, 5.0), st.floats(0.0, 1.0), st.floats(0.0, 3.0))
def test_the_controller_moves_by_its_formula_within_its_bounds(beta, measured, gain, minimum, width):
    maximum = minimum + width + 1e-3
    spec = BetaTarget(target=2.0, gain=gain, minimum=minimum, maximum=maximum)
    relative_error = (measured - 2.0) / 2.0
    expected = beta * (1.0 + gain * max(-0.2, min(0.2, relative_error)))
    if expected < minimum:
        expected = minimum
    elif expected > maximum:
        expected = maximum
    assert spec.next(beta, measured) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("measured", "bound", "measured_later"),
    [(100.0, 0.101, (1.0, 0.0)), (0.0, 0.0995, (1.1, 100.0))],
    ids=["upper", "lower"],
)
def test_the_controller_stops_at_its_bounds_and_leaves_them_again(measured, bound, measured_later):
    state = BetaState(BetaTarget(target=1.0, init=0.1, minimum=0.0995, maximum=0.101))
    for step in range(3):
        state.advance(step, measured)
    assert state.value == bound
    for step, later in enumerate(measured_later, start=3):
        state.advance(step, later)
    assert 0.0995 <= state.value <= 0.101
    assert state.value != bound


@pytest.mark.parametrize("shape", ["linear", "cosine"])
@pytest.mark.parametrize(("start", "end"), [(0.4, 0.1), (0.0, 0.3)])
def test_a_schedule_goes_from_its_start_to_its_end_and_stays(shape, start, end):
    state = BetaState(BetaSchedule(start=start, end=end, steps=8, shape=shape))
    values = [state.value]
    for step in range(1, 12):
        state.advance(step, math.nan)
        values.append(state.value)
    # How much of the way is done at each step.
    shares = [min(step, 8) / 8 for step in range(12)]
    if shape == "cosine":
        shares = [(1 - math.cos(math.pi * share)) / 2 for share in shares]
    assert values == pytest.approx([start + (end - start) * share for share in shares])


WITH_BETAS_OF_THEIR_OWN = [name for name in RECIPES.names() if len({term.beta for term in recipe(name)}) > 1]
WITH_ONE_BETA = [name for name in RECIPES.names() if name not in WITH_BETAS_OF_THEIR_OWN]


@pytest.mark.parametrize("name", WITH_BETAS_OF_THEIR_OWN)
def test_a_beta_given_with_a_recipe_of_several_betas_is_refused(name):
    with pytest.raises(UserError, match="its terms have betas of their own"):
        recipe(name, beta=0.3)


@pytest.mark.parametrize("by_config", [False, True], ids=["by function", "by config"])
@pytest.mark.parametrize("name", WITH_ONE_BETA)
def test_a_beta_given_with_a_recipe_is_that_of_each_of_its_terms(name, by_config):
    if by_config:
        changed = resolve_terms({"recipe": name, "beta": 0.3})
    else:
        changed = recipe(name, beta=0.3)
    expected = [dataclasses.replace(term, beta=0.3) for term in recipe(name)]
    assert list(changed) == expected


@pytest.mark.parametrize("name", WITH_ONE_BETA)
def test_a_recipe_with_a_beta_may_stand_beside_other_terms(name):
    terms = resolve_terms([{"estimator": "k1", "beta": 0.7}, {"recipe": name, "beta": 0.3}])
    assert [term.beta for term in terms] == [0.7] + [0.3] * len(recipe(name))


# --- diagnostics --------------------------------------------------------------------------------------------------
def diagnostics_of(term, logp, behaviour_logp=(0.0, 0.0)):
    """Of one completion of two tokens, whose reference log-probs are zero."""
    return kl_diagnostics(
        term,
        logp_BT=torch.tensor([logp]),
        ref_logp_BT=torch.tensor([(0.0, 0.0)]),
        behaviour_logp_BT=torch.tensor([behaviour_logp]),
        mask_BT=torch.tensor([[True, True]]),
    )


def test_capped_ratios_are_counted():
    """exp(0 - (-1)) = 2.71828 is above the cap, exp(0) is not."""
    term = KLTerm("k1", correction="token", cap=1.5)
    diagnostics = diagnostics_of(term, (0.0, 0.0), behaviour_logp=(-1.0, 0.0))
    assert diagnostics == {"capped_share": 0.5, "ratio_max": pytest.approx(2.71828, rel=1e-4)}


def test_a_term_without_bounds_has_no_diagnostics():
    assert diagnostics_of(KLTerm("k1"), (0.0, 0.0)) == {}


@pytest.mark.parametrize(
    ("term", "logp", "share"),
    [
        (KLTerm("k2", placement="loss", output_clamp=10.0), (5.0, 1.0), 0.5),
        (KLTerm("k3", placement="loss", input_clamp=20.0), (-21.0, 25.0), 1.0),
        (KLTerm("k2", level="sequence", placement="loss", output_clamp=10.0), (3.0, 3.0), 1.0),
    ],
    ids=["output: 12.5 nats and 0.5", "input: both ways", "output of a completion: 18 nats"],
)
def test_clamped_tokens_are_counted(term, logp, share):
    assert diagnostics_of(term, logp)["clamped_share"] == share


# --- ratios, costs and their bounds -------------------------------------------------------------------------------
DELTA_BT = torch.tensor([[1.0, 2.0, 4.0]])


@pytest.mark.parametrize(
    ("correction", "window", "expected"),
    [("prefix", 2, [1.0, 3.0, 6.0]), ("prefix_previous", 1, [0.0, 1.0, 2.0])],
)
def test_a_window_keeps_the_last_ratios(correction, window, expected):
    log_weights_BT = weights_of(correction, DELTA_BT, window=window).log()
    assert log_weights_BT[0].tolist() == pytest.approx(expected)


def test_a_window_longer_than_the_completion_changes_nothing():
    assert torch.equal(weights_of("prefix", DELTA_BT, window=9), weights_of("prefix", DELTA_BT))


@pytest.mark.parametrize(("cap_mode", "expected"), [("truncate", [0.5, 2.0, 2.0]), ("mask", [0.5, 2.0, 0.0])])
def test_a_cap_truncates_or_masks_ratios_beyond_it(cap_mode, expected):
    delta_BT = torch.tensor([[0.5, 2.0, 3.0]], dtype=torch.float64).log()
    # A little above 2, so that rounding of exp(log(2)) does not decide.
    weights_BT = weights_of("token", delta_BT, cap=2.0 + 1e-9, cap_mode=cap_mode)
    assert weights_BT[0].tolist() == pytest.approx(expected)


def test_a_cap_of_each_bounds_every_ratio_of_a_product():
    delta_BT = torch.tensor([[1.0, -1.0, 2.0]])
    weights_BT = weights_of("prefix", delta_BT, cap=1.0, cap_mode="each")
    assert weights_BT.log()[0].tolist() == pytest.approx([0.0, -1.0, -1.0])


class RatiosByHand:
    """The ratios of one completion in plain Python, bounded as a term says; ``deltas`` are its log-ratios."""

    def __init__(self, term, deltas):
        self.term = term
        self.size = len(deltas)
        self.deltas = deltas
        if term.cap is not None and term.cap_mode == "each":
            self.deltas = [min(delta, math.log(term.cap)) for delta in deltas]

    def product(self, first, end):
        """Of the tokens from ``first`` to before ``end``."""
        ratio = math.exp(sum(self.deltas[max(first, 0) : end]))
        if self.term.cap is None or ratio <= self.term.cap:
            return ratio
        if self.term.cap_mode == "truncate":
            return self.term.cap
        if self.term.cap_mode == "mask":
            return 0.0
        return ratio  # "each" has bounded the factors; "clip" looks at the cost too

    def of_prefix(self, end):
        """The product of the last ``window`` ratios before ``end``."""
        if self.term.window is None:
            return self.product(0, end)
        return self.product(end - self.term.window, end)

    def of_token(self, token):
        """The ratio that the term's correction gives a token."""
        correction = self.term.correction
        if correction in ("token", "token_detached"):
            return self.product(token, token + 1)
        if correction == "prefix":
            return self.of_prefix(token + 1)
        if correction == "prefix_previous":
            return self.of_prefix(token)
        if correction == "sequence":
            return self.product(0, self.size)
        assert correction == "none"
        return 1.0


def credited_by_hand(term, steps):
    """The cost that each token pays, from the costs of all."""
    costs = []
    for token in range(len(steps)):
        if term.credit == "total":
            cost = sum(steps)
        elif term.credit == "to_go":
            cost = sum(term.discount**distance * step for distance, step in enumerate(steps[token:]))
        else:
            cost = steps[token]
        if term.needs != "log_ratio":
            # The own step of an exact KL is differentiated, and no cost.
            cost -= steps[token]
        costs.append(cost)
    return costs


def clipped_by_hand(term, ratios, values):
    """PPO's clip: a ratio that a positive cost has pushed low enough, or a negative one high enough, is dropped."""
    clipped = []
    for ratio, value in zip(ratios, values, strict=True):
        if value > 0:
            dropped = ratio < 2 - term.cap
        else:
            dropped = ratio > term.cap
        clipped.append(0.0 if dropped else ratio)
    return clipped


def parts_by_hand(term, deltas, values):
    """Cost, weight and weight of a baseline at each token of a completion; ``values`` are the estimates."""
    by_hand = RatiosByHand(term, deltas)
    ratios = [by_hand.of_token(token) for token in range(by_hand.size)]
    if CORRECTIONS.get(term.correction).facts["weights"] == "cost":
        # Per decision: each cost has its ratio, and the score has none.
        steps = [ratio * value for ratio, value in zip(ratios, values, strict=True)]
        weights = [1.0] * by_hand.size
        baseline_weights = [by_hand.of_prefix(token + 1) for token in range(by_hand.size)]
    else:
        steps = values
        weights = ratios
        if term.cap_mode == "clip":
            weights = clipped_by_hand(term, ratios, values)
        baseline_weights = weights
    return {
        "cost_BT": credited_by_hand(term, steps),
        "weight_BT": weights,
        "baseline_weight_BT": baseline_weights,
    }


CAPS = [{}, *[{"cap": 1.3, "cap_mode": mode} for mode in CAP_MODES]]


def terms_with(estimator, correction):
    """A correction with every bound of its ratio, window, credit and discount that is possible."""
    terms = []
    for cap, window, credit, discount in itertools.product(CAPS, (None, 1, 2), CREDITS, (1.0, 0.6)):
        with contextlib.suppress(UserError):
            terms.append(
                KLTerm(estimator, correction=correction, **cap, window=window, credit=credit, discount=discount)
            )
    return terms


class Batch:
    """Five completions with random log-probs and exact KLs."""

    sizes = (6, 1, 4, 2, 6)
    mask_BT = torch.arange(6)[None] < torch.tensor(sizes)[:, None]
    logp_BT, ref_logp_BT, behaviour_logp_BT, exact_BT = torch.rand(
        4, 5, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )

    @classmethod
    def parts(cls, term):
        tensors = {"logp_BT": cls.logp_BT, "ref_logp_BT": cls.ref_logp_BT, "behaviour_logp_BT": cls.behaviour_logp_BT}
        if term.estimator == "exact":
            tensors["exact_kl_BT"] = cls.exact_BT
        return kl_parts(term, **tensors, mask_BT=cls.mask_BT)

    @classmethod
    def rows_by_hand(cls, term):
        """The parts of each completion by their formulas."""
        values_BT = cls.logp_BT - cls.ref_logp_BT
        if term.estimator == "exact":
            values_BT = cls.exact_BT
        rows = []
        for row, size in enumerate(cls.sizes):
            deltas = (cls.logp_BT - cls.behaviour_logp_BT)[row, :size].tolist()
            rows.append(parts_by_hand(term, deltas, values_BT[row, :size].tolist()))
        return rows


@pytest.mark.parametrize("correction", CORRECTIONS.names())
@pytest.mark.parametrize("estimator", ["k1", "exact"])
def test_costs_and_their_weights_are_those_of_the_formula_under_every_bound(estimator, correction):
    for term in terms_with(estimator, correction):
        parts = Batch.parts(term)
        for row, by_hand in enumerate(Batch.rows_by_hand(term)):
            for name, expected in by_hand.items():
                actual = getattr(parts, name)[row, : Batch.sizes[row]].tolist()
                assert actual == pytest.approx(expected, rel=1e-10, abs=1e-12), (term.label(), name, row)


def test_every_bound_acts_somewhere_in_the_batch():
    """So that the test above would see one that does not."""
    bounded = set()
    acted = set()
    for estimator, correction in itertools.product(("k1", "exact"), CORRECTIONS.names()):
        for term in terms_with(estimator, correction):
            if term.cap is None:
                continue
            bounded.add((correction, term.cap_mode))
            free = dataclasses.replace(term, cap=None, cap_mode="truncate")
            if Batch.rows_by_hand(free) != Batch.rows_by_hand(term):
                acted.add((correction, term.cap_mode))
    assert len(bounded) > 12
    assert acted == bounded


THOUSANDTHS = st.integers(-1000, 1000).map(lambda thousandths: thousandths / 1000)


@given(st.lists(THOUSANDTHS, min_size=3, max_size=3), st.lists(THOUSANDTHS, min_size=3, max_size=3))
def test_a_clipped_cost_has_the_gradient_of_ppos_formula(logp, ref_logp):
    """Against autograd of ``max(r c, clip(r, 0.8, 1.2) c)`` with ``c = logp - ref_logp`` held fixed."""
    logp_BT = torch.tensor([logp], dtype=torch.float64, requires_grad=True)
    ref_logp_BT = torch.tensor([ref_logp], dtype=torch.float64)
    behaviour_logp_BT = torch.zeros(1, 3).double()
    mask_BT = torch.ones(1, 3, dtype=torch.bool)
    tensors = {"ref_logp_BT": ref_logp_BT, "behaviour_logp_BT": behaviour_logp_BT, "mask_BT": mask_BT}
    (term,) = RECIPES.get("liu/clipped").fn()
    (gradient_BT,) = torch.autograd.grad(kl_surrogate(term, logp_BT=logp_BT, **tensors).sum(), logp_BT)

    ratio_BT = (logp_BT - behaviour_logp_BT).exp()
    cost_BT = (logp_BT - ref_logp_BT).detach()
    formula_BT = torch.maximum(ratio_BT * cost_BT, ratio_BT.clamp(0.8, 1.2) * cost_BT)
    (expected_BT,) = torch.autograd.grad(formula_BT.sum(), logp_BT)
    assert torch.allclose(gradient_BT, expected_BT)

    dropped_BT = (expected_BT == 0) & (cost_BT != 0)
    capped_share = kl_diagnostics(term, logp_BT=logp_BT, **tensors)["capped_share"]
    assert capped_share == pytest.approx(dropped_BT.double().mean().item())


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.long])
@pytest.mark.parametrize(
    "options",
    [
        {"correction": "token", "cap": 2.0},
        {"correction": "prefix", "cap": 2.0, "cap_mode": "each"},
        {"input_clamp": 1.0},
    ],
    ids=["cap", "cap of each", "clamp"],
)
def test_the_diagnostics_of_a_batch_without_a_token_are_empty(options, mask_dtype):
    """Every completion was cut and masked: there is no largest ratio."""
    zeros_BT = torch.zeros(2, 3)
    tensors = dict.fromkeys(("logp_BT", "ref_logp_BT", "behaviour_logp_BT"), zeros_BT)
    term = KLTerm("k3", placement="loss", **options)
    assert kl_diagnostics(term, **tensors, mask_BT=torch.zeros(2, 3, dtype=mask_dtype)) == {}
    assert kl_diagnostics(term, **tensors, mask_BT=torch.ones(2, 3, dtype=mask_dtype)) != {}


# --- overflow -------------------------------------------------------------------------------------------------------
FAR = {"float32": -100.0, "float64": -800.0}
"""Log-ratios (nats) beyond what ``exp`` of the dtype holds: 88.7 and 709.8."""


def far_batch(dtype, place=(0, 1)):
    """The good batch with one token that the reference holds far likelier than the policy."""
    batch = {
        name: value if value.dtype == torch.bool else value.to(getattr(torch, dtype)) for name, value in GOOD.items()
    }
    logp_BT = batch["ref_logp_BT"].clone()
    logp_BT[place] += FAR[dtype]
    return {**batch, "logp_BT": logp_BT.requires_grad_(True), "behaviour_logp_BT": logp_BT.detach()}


@pytest.mark.parametrize("dtype", FAR)
@pytest.mark.parametrize("placement", ["loss", "reward"])
def test_an_estimate_that_overflows_names_its_token_and_its_log_ratio(dtype, placement):
    message = message_of(KLTerm("k3", placement=placement), **far_batch(dtype))
    assert f"k3 overflows at [0, 1], where the log-ratio to the reference is {FAR[dtype]:g} nats" in message
    with pytest.raises(UserError, match=r"overflows at \[0, 1\]"):
        kl_parts(KLTerm("k3", placement=placement), **far_batch(dtype))


def test_a_ratio_that_overflows_names_its_token():
    far = far_batch("float32")
    far["behaviour_logp_BT"] = far["ref_logp_BT"] - 200
    message = message_of(KLTerm("k1", placement="loss", correction="token"), **far)
    assert "the log-ratio to the sampler is 200 nats at" in message


@pytest.mark.parametrize("clamp", ["input_clamp", "output_clamp"])
def test_a_clamp_bounds_what_would_overflow(clamp):
    """Its token has no gradient, and the others have the one that they have alone."""
    far = far_batch("float32")
    kl_surrogate(KLTerm("k3", placement="loss", **{clamp: 10.0}), **far).sum().backward()
    gradient_BT = far["logp_BT"].grad
    assert float(gradient_BT[0, 1]) == 0
    assert float(gradient_BT[0, 0]) == 0, "1 - exp(0): the token is as likely under both"
    assert bool(torch.isfinite(gradient_BT).all())


def test_an_overflow_outside_the_mask_does_not_count():
    far = far_batch("float32", place=(0, 2))
    kl_surrogate(KLTerm("k3", placement="loss"), **far).sum().backward()
    assert bool(torch.isfinite(far["logp_BT"].grad).all())


def test_the_largest_log_ratio_below_the_overflow_has_its_gradient():
    far = far_batch("float32")
    with torch.no_grad():
        far["logp_BT"][0, 1] = far["ref_logp_BT"][0, 1] - 88.5
    kl_surrogate(KLTerm("k3", placement="loss"), **far).sum().backward()
    assert float(far["logp_BT"].grad[0, 1]) == pytest.approx(1 - math.exp(88.5), rel=1e-4)
