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


def gradient(term, logp_BT, mu_BT, proximal_BT=None):
    """The gradient of the summed loss by the log-probs, and the parts of the term."""
    parts = policy_term(
        term,
        logp_BT=logp_BT,
        behaviour_logp_BT=mu_BT,
        mask_BT=MASK_BT,
        proximal_logp_BT=proximal_BT,
        advantage_BT=advantages(),
    )
    (gradient_BT,) = torch.autograd.grad(parts.loss_BT.sum(), logp_BT)
    return gradient_BT, parts


def binary_kl(p, q):
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


# Other values than the defaults, of every option of every correction.
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


def defaults_of(name):
    """The options of a correction with their defaults."""
    defaults = {}
    for parameter in inspect.signature(POLICY_CORRECTIONS.get(name).fn).parameters.values():
        if parameter.default is not inspect.Parameter.empty:
            defaults[parameter.name] = parameter.default
    return defaults


class ByHand:
    """The weights of one completion, token by token, each correction in plain Python.

    ``deltas`` are its log-ratios ``log pi - log mu``, ``mu`` the sampler's probabilities, ``advantage`` is that of the
    whole completion.
    """

    def __init__(self, deltas, advantage, mu):
        self.size = len(deltas)
        self.deltas = deltas
        self.advantage = advantage
        self.ratios = [math.exp(delta) for delta in deltas]
        self.whole_ratio = math.exp(sum(deltas))
        self.mean_ratio = math.exp(sum(deltas) / self.size)
        self.k3 = [math.exp(delta) - 1 - delta for delta in deltas]
        # How far the probability of each token has moved from the sampler's, and its binary KL.
        self.shifts = []
        self.kls = []
        for old, ratio in zip(mu, self.ratios, strict=True):
            shift = old * ratio - old
            self.shifts.append(shift)
            self.kls.append(binary_kl(old, old + shift))

    def weights(self, name, **options):
        formula = getattr(self, name)
        return [float(formula(position, **options)) for position in range(self.size)]

    def moves_away(self, position):
        """Whether another step by this advantage would move the token further from the sampler."""
        return self.advantage * self.shifts[position] > 0

    # --- ratios
    def none(self, position):
        return 1.0

    def token(self, position):
        return self.ratios[position]

    def tis(self, position, cap):
        return min(self.ratios[position], cap)

    def icepop(self, position, low, high):
        if low <= self.ratios[position] <= high:
            return self.ratios[position]
        return 0.0

    def sequence(self, position):
        return self.whole_ratio

    def sequence_tis(self, position, cap):
        return min(self.whole_ratio, cap)

    def sequence_mis(self, position, low, high):
        if low <= self.whole_ratio <= high:
            return self.whole_ratio
        return 0.0

    def geometric_tis(self, position, cap):
        return min(self.mean_ratio, cap)

    # --- masks: True keeps the token
    def geometric_mask(self, position, low, high):
        return low <= self.mean_ratio <= high

    def opsm(self, position, threshold):
        mean_fall = -sum(self.deltas) / self.size
        dropped = self.advantage < 0 and mean_fall > threshold
        return not dropped

    def dppo_tv(self, position, threshold):
        dropped = self.moves_away(position) and abs(self.shifts[position]) > threshold
        return not dropped

    def dppo_kl(self, position, threshold):
        dropped = self.moves_away(position) and self.kls[position] > threshold
        return not dropped

    def cppo(self, position, threshold, budget, floor):
        """Beyond the threshold, or beyond what the prefix has left of the budget; early tokens weigh more."""
        last = max(self.size - 1, 1)
        weights = [1 - (1 - floor) * earlier / last for earlier in range(self.size)]
        saved = 0.0
        for earlier in range(position):
            saved += weights[earlier] * (budget - abs(self.shifts[earlier]))
        limit = min(threshold, threshold + saved)
        dropped = self.moves_away(position) and weights[position] * abs(self.shifts[position]) > limit
        return not dropped

    def trm(self, position, threshold):
        return max(self.k3) <= threshold

    def prefix_budget(self, position, budget):
        return sum(self.k3[:position]) <= budget


BUILT_IN = [entry.name for entry in POLICY_CORRECTIONS if entry.origin.startswith("kl_comedy.")]
WITH_OPTIONS = [name for name in BUILT_IN if defaults_of(name)]


def test_every_correction_with_options_has_others_here():
    assert set(OPTIONS) == set(WITH_OPTIONS)


@pytest.mark.parametrize("name", WITH_OPTIONS)
def test_every_option_of_a_correction_has_another_value_here(name):
    defaults = defaults_of(name)
    assert set(OPTIONS[name]) == set(defaults)
    for option, value in OPTIONS[name].items():
        assert value != defaults[option], option


@pytest.mark.parametrize(
    ("name", "options"),
    [*[(name, {}) for name in BUILT_IN], *OPTIONS.items()],
    ids=[*BUILT_IN, *[f"{name} {options}" for name, options in OPTIONS.items()]],
)
@settings(max_examples=40, deadline=None)
@given(deltas=DELTAS)
def test_a_correction_weights_the_score_by_its_formula(name, options, deltas):
    logp_BT, mu_BT = log_probs(deltas)
    gradient_BT, _ = gradient(PolicyTerm(corrections={name: options}), logp_BT, mu_BT)
    delta_BT = (logp_BT - mu_BT).detach()
    for row, (size, advantage) in enumerate(zip(SIZES.tolist(), advantages()[:, 0].tolist(), strict=True)):
        by_hand = ByHand(delta_BT[row, :size].tolist(), advantage, mu_BT.exp()[row, :size].tolist())
        weights = by_hand.weights(name, **(defaults_of(name) | options))
        expected = [-advantage * weight for weight in weights]
        assert gradient_BT[row, :size].tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)
        assert not gradient_BT[row, size:].any(), "a token outside the mask has a gradient"


# CPPO without weights of positions and without a budget, which is DPPO.
FLAT_CPPO = {"threshold": 0.1, "budget": math.inf, "floor": 1.0}


@pytest.mark.parametrize(
    ("special", "general"),
    [
        ({"loss": "aipo", "options": {"cap": 3.0}}, {"corrections": {"tis": {"cap": 3.0}}}),
        (
            {"loss": "cispo", "options": {"clip_low": 1.0, "clip_high": 2.0}},
            {"corrections": {"tis": {"cap": 3.0}}},
        ),
        ({"loss": "ppo_clip", "options": {"clip_low": 1e9, "clip_high": 1e9}}, {"corrections": {"token": {}}}),
        ({"corrections": {"tis": {"cap": math.inf}}}, {"corrections": {"token": {}}}),
        ({"corrections": {"icepop": {"low": 0.0, "high": math.inf}}}, {"corrections": {"token": {}}}),
        ({"corrections": {"sequence_mis": {"high": math.inf}}}, {"corrections": {"sequence": {}}}),
    ],
    ids=[
        "aipo = tis",
        "cispo = tis",
        "ppo_clip without bounds = token",
        "tis without a cap = token",
        "icepop without bounds = token",
        "sequence_mis without a bound = sequence",
    ],
)
@settings(max_examples=40, deadline=None)
@given(deltas=DELTAS)
def test_special_cases_are_the_general_ones(special, general, deltas):
    logp_BT, mu_BT = log_probs(deltas)
    special_BT, _ = gradient(PolicyTerm(**special), logp_BT, mu_BT)
    general_BT, _ = gradient(PolicyTerm(**general), logp_BT, mu_BT)
    assert torch.allclose(special_BT, general_BT)


@pytest.mark.parametrize(
    ("special", "general"),
    [
        ({"none": {}}, {}),
        (
            {"tis": {"cap": 20.0}, "cppo": FLAT_CPPO},
            {"tis": {"cap": 20.0}, "dppo_tv": {"threshold": 0.1}},
        ),
    ],
    ids=["none = no correction", "flat cppo = dppo_tv"],
)
@settings(max_examples=40, deadline=None)
@given(deltas=DELTAS)
def test_special_cases_that_are_equal_to_the_bit(special, general, deltas):
    logp_BT, mu_BT = log_probs(deltas)
    special_BT, _ = gradient(PolicyTerm(corrections=special), logp_BT, mu_BT)
    general_BT, _ = gradient(PolicyTerm(corrections=general), logp_BT, mu_BT)
    assert torch.equal(special_BT, general_BT)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("dppo_tv", [[1, 0, 1], [0, 0, 0]]),
        ("dppo_kl", [[1, 0, 1], [0, 0, 0]]),
        ("cppo", [[1, 0, 1], [0, 0, 0]]),
        ("trm", [[0, 0, 0], [0, 0, 0]]),
        ("prefix_budget", [[1, 1, 0], [1, 0, 0]]),
    ],
)
def test_masks_hold_at_the_edges_of_float32(name, expected):
    """A probability of one, a token that has become impossible, and one that the sampler nearly never draws."""
    delta_BT = torch.tensor([[0.0, -1e4, 0.0], [3.0, 1e4, 0.5]])
    mu_BT = torch.tensor([[0.0, 0.0, -1.0], [-3, -1e4, -1]])
    advantage_BT = torch.tensor([[-1.0], [1.0]]).expand(2, 3)
    entry = POLICY_CORRECTIONS.get(name)
    arguments = {}
    if entry.facts.get("probabilities"):
        arguments["behaviour_logp_BT"] = mu_BT
    weights = entry.fn(delta_BT, advantage_BT, torch.ones(2, 3, dtype=torch.bool), **arguments)
    assert weights.weight_BT.tolist() == expected
    assert torch.equal(weights.masked_BT, weights.weight_BT == 0)
    assert not weights.truncated_BT.any()


@settings(max_examples=40, deadline=None)
@given(deltas=DELTAS)
def test_gspo_is_the_clipped_objective_of_length_normalized_ratios(deltas):
    """Against the objective of 2507.18071, per completion; the reduction by 1/length is the caller's."""
    logp_BT, mu_BT = log_probs(deltas)
    options = {"clip_low": 0.2, "clip_high": 0.3}
    gradient_BT, parts = gradient(PolicyTerm(loss="gspo", options=options), logp_BT, mu_BT)
    leaf_BT = logp_BT.detach().clone().requires_grad_(True)
    mean_B = torch.where(MASK_BT, leaf_BT - mu_BT, 0.0).sum(-1) / SIZES
    ratio_B = mean_B.exp()
    advantage_B = advantages()[:, 0]
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
    weight_BT = (proximal_BT - mu_BT).exp().clamp(max=5.0)
    ratio_BT = (leaf_BT - proximal_BT).exp()
    clipped_BT = torch.minimum(ratio_BT * advantages(), ratio_BT.clamp(0.8, 1.2) * advantages())
    (expected_BT,) = torch.autograd.grad((-weight_BT * clipped_BT)[MASK_BT].sum(), leaf_BT)
    assert torch.allclose(gradient_BT, expected_BT, atol=1e-12)


@settings(max_examples=40, deadline=None)
@given(deltas=DELTAS)
def test_decoupled_ppo_with_the_sampler_as_proximal_policy_is_ppo(deltas):
    logp_BT, mu_BT = log_probs(deltas)
    decoupled = PolicyTerm(loss="ppo_clip", corrections={"tis": {"cap": 5.0}}, proximal="recomputed")
    decoupled_BT, _ = gradient(decoupled, logp_BT, mu_BT, proximal_BT=mu_BT)
    ppo_BT, _ = gradient(PolicyTerm(loss="ppo_clip"), logp_BT, mu_BT)
    assert torch.allclose(ppo_BT, decoupled_BT)


# --- metrics ------------------------------------------------------------------------------------------------------
def policy_metrics(term):
    """Metrics of a batch of 10 tokens: in row 0 one ratio is large and one small, in row 1 both are large."""
    logp_BT, mu_BT = log_probs([3.0, 0.0, -3.0, 0.0, *[9.0] * 4, *[0.0] * 8])
    _, parts = gradient(term, logp_BT, mu_BT)
    metrics = MetricAccumulator()
    accumulate_policy(metrics, parts, MASK_BT)
    return metrics.values()


def test_masked_tokens_are_counted():
    values = policy_metrics(PolicyTerm(loss="reinforce", corrections={"icepop": {}, "opsm": {}}))
    assert values["policy/correction/icepop/masked_share"] == pytest.approx(4 / 10)
    assert values["policy/correction/icepop/truncated_share"] == 0.0
    assert values["policy/correction/icepop/weight_mean"] == pytest.approx(6 / 10)
    assert values["policy/correction/opsm/masked_share"] == 0.0


def test_truncated_tokens_are_counted():
    values = policy_metrics(PolicyTerm(corrections={"sequence_tis": {}}))
    assert values["policy/correction/sequence_tis/truncated_share"] == pytest.approx(2 / 10)
    assert values["policy/correction/sequence_tis/weight_max"] == pytest.approx(2.0)


def test_clipped_tokens_are_counted():
    """One: row 1 has a negative advantage, so that its large ratios are not clipped."""
    assert policy_metrics(PolicyTerm(loss="ppo_clip")) == {"policy/clip_fraction": pytest.approx(1 / 10)}


# --- what is refused ----------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    "fields",
    [
        {"correction": {"tis": {}, "opsm": {}, "geometric_mask": None}},
        {"policy_loss": "ppo_clip", "proximal": "recomputed"},
        {"policy_loss": "ppo_clip", "correction": {"opsm": {}}},
        {"correction": {"tis": {"cap": 20.0}, "dppo_tv": {}, "trm": {}}},
        {"proximal": "recomputed", "correction": {"icepop": {"high": math.inf}}},
    ],
    ids=["ratio and masks", "decoupled", "PPO and a mask", "DPPO", "icepop of a recomputed policy"],
)
def test_a_combination_with_a_meaning_is_taken(fields):
    check_policy_term(PolicyTerm.of(AlgorithmConfig(**fields)))


def test_a_recomputed_policy_that_is_missing_is_an_error():
    logp_BT, mu_BT = log_probs([0.0] * 16)
    with pytest.raises(UserError, match="first use"):
        gradient(PolicyTerm(loss="ppo_clip", proximal="recomputed"), logp_BT, mu_BT)
