"""The policy term: each correction against its formula, special cases as identities, impossible combinations."""

import inspect
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kl_comedy.config.schema import AlgorithmConfig
from kl_comedy.errors import UserError
from kl_comedy.objective import PolicyTerm, check_policy_term, policy_term
from kl_comedy.registry import POLICY_CORRECTIONS
from kl_comedy.training.metrics import MetricAccumulator, accumulate_policy

SIZES = torch.tensor([4, 2, 3, 1])
MASK_BT = torch.arange(4)[None] < SIZES[:, None]
DELTAS = st.lists(st.floats(-3, 3), min_size=16, max_size=16)


def log_probs(deltas):
    """Current and behaviour log-probs: differences as given (the sampler's at most -0.05), noise outside the mask."""
    delta_BT = torch.tensor(deltas, dtype=torch.float64).reshape(4, 4)
    logp_BT = torch.linspace(-3, -0.1, 16, dtype=torch.float64).reshape(4, 4)
    return logp_BT.clone().requires_grad_(True), (logp_BT - delta_BT).clamp(max=-0.05)


def advantages():
    return torch.tensor([[1.0], [-0.5], [0.25], [-2.0]], dtype=torch.float64).expand(4, 4)


def gradient(term, logp_BT, mu_BT, advantage_BT=None, proximal_BT=None):
    parts = policy_term(
        term,
        logp_BT=logp_BT,
        behaviour_logp_BT=mu_BT,
        mask_BT=MASK_BT,
        proximal_logp_BT=proximal_BT,
        advantage_BT=advantages() if advantage_BT is None else advantage_BT,
    )
    return torch.autograd.grad(parts.loss_BT.sum(), logp_BT)[0], parts


def binary_kl(p, q):
    return sum(a * math.log(a / b) for a, b in ((p, q), (1 - p, 1 - q)))


OPTIONS = {
    "tis": {"cap": 1.4},
    "icepop": {"low": 0.7, "high": 1.6},
    "sequence_tis": {"cap": 1.4},
    "sequence_mis": {"low": 0.3, "high": 3.0},
    "geometric_tis": {"cap": 1.2},
    "geometric_mask": {"low": 0.6, "high": 1.5},
    "opsm": {"threshold": 0.2},
    "dppo_tv": {"threshold": 0.05},
    "dppo_kl": {"threshold": 0.2},
    "cppo": {"threshold": 0.2, "budget": 0.05, "floor": 0.3},
    "trm": {"threshold": 0.6},
    "prefix_budget": {"budget": 0.3},
}
"""Other values than the defaults, of every option of every correction."""


def defaults_of(name):
    parameters = inspect.signature(POLICY_CORRECTIONS.get(name).fn).parameters.values()
    return {each.name: each.default for each in parameters if each.default is not inspect.Parameter.empty}


def by_hand(name, row, advantage, mu, *, cap=None, low=None, high=None, threshold=None, budget=None, floor=None):
    """Weights of one completion, token by token, from its log-ratios and the sampler's probabilities."""
    whole, mean = math.exp(sum(row)), math.exp(sum(row) / len(row))
    each = [math.exp(x) for x in row]
    k3 = [math.exp(x) - 1 - x for x in row]
    shift = [m * math.exp(x) - m for m, x in zip(mu, row, strict=True)]
    away = [advantage * d > 0 for d in shift]
    kl = [binary_kl(m, m + d) for m, d in zip(mu, shift, strict=True)]
    last = max(len(row) - 1, 1)

    def beyond_budget(t):
        """CPPO: whether the token's shift is beyond the threshold, or what its prefix has left of the budget."""
        weights = [1 - (1 - floor) * u / last for u in range(len(row))]
        saved = sum(w * (budget - abs(d)) for w, d in zip(weights[:t], shift[:t], strict=True))
        return weights[t] * abs(shift[t]) > min(threshold, threshold + saved)

    formulas = {
        "dppo_tv": lambda t: float(not (away[t] and abs(shift[t]) > threshold)),
        "dppo_kl": lambda t: float(not (away[t] and kl[t] > threshold)),
        "cppo": lambda t: float(not (away[t] and beyond_budget(t))),
        "trm": lambda t: float(max(k3) <= threshold),
        "prefix_budget": lambda t: float(sum(k3[:t]) <= budget),
        "none": lambda t: 1.0,
        "token": lambda t: each[t],
        "tis": lambda t: min(each[t], cap),
        "icepop": lambda t: each[t] if low <= each[t] <= high else 0.0,
        "sequence": lambda t: whole,
        "sequence_tis": lambda t: min(whole, cap),
        "sequence_mis": lambda t: whole if low <= whole <= high else 0.0,
        "geometric_tis": lambda t: min(mean, cap),
        "geometric_mask": lambda t: float(low <= mean <= high),
        "opsm": lambda t: float(not (advantage < 0 and -sum(row) / len(row) > threshold)),
    }
    return [formulas[name](t) for t in range(len(row))]


BUILT_IN = [entry.name for entry in POLICY_CORRECTIONS if entry.origin.startswith("kl_comedy.")]


def test_every_option_of_every_correction_has_another_value_here():
    assert {name: set(defaults_of(name)) for name in BUILT_IN if defaults_of(name)} == {
        name: set(options) for name, options in OPTIONS.items()
    }
    assert not any(defaults_of(name).get(key) == value for name in OPTIONS for key, value in OPTIONS[name].items())


@pytest.mark.parametrize(
    ("name", "options"), [*((name, {}) for name in BUILT_IN), *OPTIONS.items()], ids=lambda value: str(value)[:20]
)
@settings(max_examples=40, deadline=None)
@given(deltas=DELTAS)
def test_a_correction_weights_the_score_by_its_formula(name, options, deltas):
    logp_BT, mu_BT = log_probs(deltas)
    gradient_BT, _ = gradient(PolicyTerm(corrections={name: options}), logp_BT, mu_BT)
    delta_BT = (logp_BT - mu_BT).detach()
    for row, (size, advantage) in enumerate(zip(SIZES.tolist(), advantages()[:, 0].tolist(), strict=True)):
        bounds = defaults_of(name) | options
        weights = by_hand(name, delta_BT[row, :size].tolist(), advantage, mu_BT.exp()[row, :size].tolist(), **bounds)
        assert gradient_BT[row, :size].tolist() == pytest.approx([-advantage * w for w in weights], rel=1e-9, abs=1e-12)
        assert not gradient_BT[row, size:].any(), "a token outside the mask has a gradient"


@settings(max_examples=40, deadline=None)
@given(deltas=DELTAS)
def test_special_cases_are_the_general_ones(deltas):
    logp_BT, mu_BT = log_probs(deltas)

    def of(**fields):
        return gradient(PolicyTerm(**fields), logp_BT, mu_BT)[0]

    tis_BT = of(corrections={"tis": {"cap": 3.0}})
    assert torch.allclose(of(loss="aipo", options={"cap": 3.0}), tis_BT)
    assert torch.allclose(of(loss="cispo", options={"clip_low": 1.0, "clip_high": 2.0}), tis_BT)
    token_BT = of(corrections={"token": {}})
    assert torch.allclose(of(loss="ppo_clip", options={"clip_low": 1e9, "clip_high": 1e9}), token_BT)
    assert torch.allclose(of(corrections={"tis": {"cap": math.inf}}), token_BT)
    assert torch.allclose(of(corrections={"icepop": {"low": 0.0, "high": math.inf}}), token_BT)
    whole_BT = of(corrections={"sequence": {}})
    assert torch.allclose(of(corrections={"sequence_mis": {"high": math.inf}}), whole_BT)
    assert torch.equal(of(corrections={"none": {}}), of())
    dppo = {"tis": {"cap": 20.0}, "dppo_tv": {"threshold": 0.1}}
    assert torch.equal(of(corrections={"tis": {"cap": 20.0}, "cppo": FLAT}), of(corrections=dppo))


FLAT = {"threshold": 0.1, "budget": math.inf, "floor": 1.0}
"""CPPO without weights of positions and without a budget, which is DPPO."""


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl", "cppo", "trm", "prefix_budget"])
def test_masks_hold_at_the_edges_of_float32(name):
    """A probability of one, a token that has become impossible, and one that the sampler nearly never draws."""
    delta_BT, mu_BT = (
        torch.tensor([[0.0, -1e4, 0.0], [3.0, 1e4, 0.5]]),
        torch.tensor([[0.0, 0.0, -1.0], [-3, -1e4, -1]]),
    )
    entry, advantage_BT = POLICY_CORRECTIONS.get(name), torch.tensor([[-1.0], [1.0]]).expand(2, 3)
    more = {"behaviour_logp_BT": mu_BT} if entry.facts.get("probabilities") else {}
    weights = entry.fn(delta_BT, advantage_BT, torch.ones(2, 3, dtype=torch.bool), **more)
    expected = {
        "dppo_tv": [[1, 0, 1], [0, 0, 0]],
        "dppo_kl": [[1, 0, 1], [0, 0, 0]],
        "cppo": [[1, 0, 1], [0, 0, 0]],
        "trm": [[0, 0, 0], [0, 0, 0]],
        "prefix_budget": [[1, 1, 0], [1, 0, 0]],
    }[name]
    assert weights.weight_BT.tolist() == expected
    assert torch.equal(weights.masked_BT, weights.weight_BT == 0) and not weights.truncated_BT.any()


@settings(max_examples=40, deadline=None)
@given(deltas=DELTAS)
def test_gspo_is_the_clipped_objective_of_length_normalized_ratios(deltas):
    """Against the objective of 2507.18071, per completion; the reduction by 1/length is the caller's."""
    logp_BT, mu_BT = log_probs(deltas)
    options = {"clip_low": 0.2, "clip_high": 0.3}
    gradient_BT, parts = gradient(PolicyTerm(loss="gspo", options=options), logp_BT, mu_BT)
    leaf_BT = logp_BT.detach().clone().requires_grad_(True)
    mean_B = torch.where(MASK_BT, leaf_BT - mu_BT, 0.0).sum(-1) / SIZES
    ratio_B, advantage_B = mean_B.exp(), advantages()[:, 0]
    objective_B = torch.minimum(ratio_B * advantage_B, ratio_B.clamp(0.8, 1.3) * advantage_B)
    (expected_BT,) = torch.autograd.grad(-(objective_B * SIZES).sum(), leaf_BT)
    assert torch.allclose(gradient_BT, expected_BT, atol=1e-12)
    assert torch.equal(parts.clipped_BT, MASK_BT & (expected_BT == 0))


@settings(max_examples=40, deadline=None)
@given(deltas=DELTAS, steps=DELTAS)
def test_decoupled_ppo_clips_against_the_proximal_policy_and_weights_against_the_sampler(deltas, steps):
    """AReaL, 2505.24298: ``min(w, cap) min(u A, clip(u) A)`` with ``w = prox/mu``, ``u = pi/prox``."""
    logp_BT, mu_BT = log_probs(deltas)
    proximal_BT = logp_BT.detach() - torch.tensor(steps, dtype=torch.float64).reshape(4, 4)
    term = PolicyTerm(loss="ppo_clip", corrections={"tis": {"cap": 5.0}}, proximal="recomputed")
    gradient_BT, _ = gradient(term, logp_BT, mu_BT, proximal_BT=proximal_BT)
    leaf_BT = logp_BT.detach().clone().requires_grad_(True)
    weight_BT, ratio_BT = (proximal_BT - mu_BT).exp().clamp(max=5.0), (leaf_BT - proximal_BT).exp()
    clipped_BT = torch.minimum(ratio_BT * advantages(), ratio_BT.clamp(0.8, 1.2) * advantages())
    (expected_BT,) = torch.autograd.grad((-weight_BT * clipped_BT)[MASK_BT].sum(), leaf_BT)
    assert torch.allclose(gradient_BT, expected_BT, atol=1e-12)
    plain_BT, _ = gradient(PolicyTerm(loss="ppo_clip"), logp_BT, mu_BT)
    fresh_BT, _ = gradient(term, logp_BT, mu_BT, proximal_BT=mu_BT)
    assert torch.allclose(plain_BT, fresh_BT), "with the sampler as proximal policy it is PPO"


def test_what_bounds_do_is_counted_in_tokens():
    logp_BT, mu_BT = log_probs([3.0, 0.0, -3.0, 0.0, *[9.0] * 4, *[0.0] * 8])
    term = PolicyTerm(loss="reinforce", corrections={"icepop": {}, "opsm": {}})
    _, parts = gradient(term, logp_BT, mu_BT)
    metrics = MetricAccumulator()
    accumulate_policy(metrics, parts, MASK_BT)
    values = metrics.values()
    assert values["policy/correction/icepop/masked_share"] == pytest.approx(4 / 10)
    assert values["policy/correction/icepop/truncated_share"] == 0.0
    assert values["policy/correction/icepop/weight_mean"] == pytest.approx(6 / 10)
    assert values["policy/correction/opsm/masked_share"] == 0.0
    _, parts = gradient(PolicyTerm(corrections={"sequence_tis": {}}), logp_BT, mu_BT)
    accumulate_policy(metrics := MetricAccumulator(), parts, MASK_BT)
    assert metrics.values()["policy/correction/sequence_tis/truncated_share"] == pytest.approx(2 / 10)
    assert metrics.values()["policy/correction/sequence_tis/weight_max"] == pytest.approx(2.0)
    _, parts = gradient(PolicyTerm(loss="ppo_clip"), logp_BT, mu_BT)
    accumulate_policy(metrics := MetricAccumulator(), parts, MASK_BT)
    assert metrics.values() == {"policy/clip_fraction": pytest.approx(1 / 10)}  # row 1 has A < 0 and ratios above


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"policy_loss": "ppo_klip"}, "algorithm.policy_loss: got 'ppo_klip'.*did you mean 'ppo_clip'"),
        ({"correction": {"icepopp": {}}}, "algorithm.correction: got 'icepopp'.*did you mean 'icepop'"),
        ({"correction": {"tis": {"capp": 2.0}}}, r"algorithm.correction.tis.capp: no such key.*did you mean 'cap'"),
        ({"correction": {"tis": 2.0}}, r"algorithm.correction.tis: got 2.0; allowed: a mapping"),
        ({"correction": {"tis": {"cap": "2"}}}, "algorithm.correction.tis.cap: got '2'; allowed: a number"),
        ({"correction": {"tis": {"cap": 0}}}, "algorithm.correction.tis.cap: got 0; allowed: a number above 0"),
        ({"correction": {"icepop": {"low": 3.0, "high": 2.0}}}, "icepop.low: got 3.0; allowed: at most"),
        ({"correction": {"tis": {}, "sequence": {}}}, "tis and sequence are both importance ratios"),
        ({"policy_loss": "ppo_clip", "correction": {"tis": {}}}, "algorithm.proximal=recomputed"),
        ({"proximal": "recomputed"}, "algorithm.proximal: recomputed changes nothing here"),
        ({"policy_loss": "gspo", "policy_loss_options": {"mask_BT": 1.0}}, "gspo takes no such option"),
        ({"correction": {"dppo_kl": {"behaviour_logp_BT": 0.1}}}, "dppo_kl takes no such option"),
    ],
)
def test_what_cannot_work_is_refused_by_its_key(fields, words):
    with pytest.raises(UserError, match=words):
        check_policy_term(PolicyTerm.of(AlgorithmConfig(**fields)))


def test_what_can_work_is_let_through():
    for fields in (
        {"correction": {"tis": {}, "opsm": {}, "geometric_mask": None}},
        {"policy_loss": "ppo_clip", "proximal": "recomputed"},
        {"policy_loss": "ppo_clip", "correction": {"opsm": {}}},
        {"correction": {"tis": {"cap": 20.0}, "dppo_tv": {}, "trm": {}}},
        {"proximal": "recomputed", "correction": {"icepop": {"high": math.inf}}},
    ):
        check_policy_term(PolicyTerm.of(AlgorithmConfig(**fields)))


def test_a_recomputed_policy_that_is_missing_is_an_error():
    logp_BT, mu_BT = log_probs([0.0] * 16)
    with pytest.raises(UserError, match="first use"):
        gradient(PolicyTerm(loss="ppo_clip", proximal="recomputed"), logp_BT, mu_BT)
