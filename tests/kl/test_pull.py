"""How the force of a term grows with the distance, against closed forms that are derived here."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kl_comedy.kl import KLTerm
from kl_comedy.kl.claims import all_terms, off_policy_kind
from kl_comedy.kl.oracle import Instance, InstanceSettings, Tree, expected_gradient
from kl_comedy.kl.pull import force, is_idle, pull_in_words, pulls
from kl_comedy.registry import ESTIMATORS

REFERENCE = 0.2
"""The reference's probability of the first of two outcomes."""


def loss(estimator, **fields):
    return KLTerm(estimator, placement="loss", **fields)


# d/dt of the term, where the policy's log-odds are the reference's + t: by the mean over the policy's own outcomes of
# the derivative of the estimate, times d log p / dt = 1 - p of the first outcome and -p of the other.
def in_mean(slope):
    def derivative(p, weight):
        above = math.log(p / REFERENCE)
        below = math.log((1 - p) / (1 - REFERENCE))
        return weight * slope(above) * (1 - p) - (1 - weight) * slope(below) * p

    return derivative


SLOPES = {
    "k1": (loss("k1"), lambda x: 1.0),
    "k2": (loss("k2"), lambda x: x),
    "k3": (loss("k3"), lambda x: 1 - math.exp(-x)),
    "abs": (loss("abs"), lambda x: math.copysign(1.0, x)),
    "k2 clamped": (loss("k2", input_clamp=0.7), lambda x: x if abs(x) <= 0.7 else 0.0),
    "k1 as a cost": (KLTerm("k1"), lambda x: x),
    "k3 as a cost": (KLTerm("k3"), lambda x: math.exp(-x) - 1 + x),
}


@pytest.mark.parametrize("stale", [False, True], ids=["fresh", "stale"])
@pytest.mark.parametrize("moved", [-3.0, -0.5, 0.5, 3.0])
@pytest.mark.parametrize("name", SLOPES)
def test_the_force_gives_the_expected_derivative_of_two_outcomes(name, moved, stale):
    """Of the oracle; on stale samples the sampler is the reference."""
    term, slope = SLOPES[name]
    odds = math.log(REFERENCE / (1 - REFERENCE)) + moved
    p = 1 / (1 + math.exp(-odds))
    weight = REFERENCE if stale else p
    expected = in_mean(slope)(p, weight)
    distances = torch.tensor([math.log(p / REFERENCE), math.log((1 - p) / (1 - REFERENCE))], dtype=torch.float64)
    first, other = force(term, distances).tolist()
    assert weight * first * (1 - p) - (1 - weight) * other * p == pytest.approx(expected, abs=1e-12)

    instance = two_outcomes(odds, weight)
    gradient_D = expected_gradient(instance, [term]).gradient_D
    assert float(gradient_D[0] - gradient_D[1]) / 2 == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("moved", [-3.0, 0.5, 3.0])
def test_the_ratio_of_the_token_makes_the_mean_of_stale_samples_that_of_fresh_ones(moved):
    """``d/dt KL(pi || ref) = p (1 - p) t``, whoever sampled; without the ratio it is not."""
    odds = math.log(REFERENCE / (1 - REFERENCE)) + moved
    p = 1 / (1 + math.exp(-odds))
    instance = two_outcomes(odds, 0.6)
    gradients = {}
    for correction in ("token", "none"):
        gradient_D = expected_gradient(instance, [loss("k3", correction=correction)]).gradient_D
        gradients[correction] = float(gradient_D[0] - gradient_D[1]) / 2
    distances = torch.tensor([math.log(p / REFERENCE), math.log((1 - p) / (1 - REFERENCE))], dtype=torch.float64)
    first, other = force(loss("k3", correction="token"), distances).tolist()
    assert p * first * (1 - p) - (1 - p) * other * p == pytest.approx(p * (1 - p) * moved, abs=1e-12)
    assert gradients["token"] == pytest.approx(p * (1 - p) * moved, abs=1e-12)
    assert gradients["none"] != pytest.approx(gradients["token"], rel=0.01)


def two_outcomes(odds, sampled):
    tree = Tree.build(vocabulary=2, length=1, ends=False)
    instance = Instance.random(tree, InstanceSettings(regime="on_policy", seed=0))
    sampler = torch.tensor([[sampled, 1 - sampled]], dtype=torch.float64).log()
    # By logits of plus and minus half the log-odds; the derivative by the odds is half the difference of theirs.
    tables = {
        "theta_D": torch.tensor([odds / 2, -odds / 2], dtype=torch.float64),
        "ref_logp_NV": torch.tensor([[REFERENCE, 1 - REFERENCE]], dtype=torch.float64).log(),
        "sampler_logp_NV": sampler,
        "recorded_logp_NV": sampler,
    }
    return Instance(**{**vars(instance), **tables})


RARE = 1e-9
IN_LOG_RATIOS = [entry.name for entry in ESTIMATORS if entry.facts.get("needs", "log_ratio") == "log_ratio"]


def of_a_rare_token(term, distance):
    """Per draw of a token that is not below the reference, from the enumerated gradient by the log-odds."""
    p = RARE * math.exp(distance)
    instance = two_outcomes(math.log(p / (1 - p)), p)
    reference = torch.tensor([[RARE, 1 - RARE]], dtype=torch.float64).log()
    gradient_D = expected_gradient(replace(instance, ref_logp_NV=reference), [term]).gradient_D
    return float(gradient_D[0] - gradient_D[1]) / 2 / max(p, RARE)


@pytest.mark.parametrize("placement", ["loss", "reward"])
@pytest.mark.parametrize("name", IN_LOG_RATIOS)
def test_the_expected_force_is_that_of_a_rare_token_by_enumeration(name, placement):
    """What a token gains others lose: abs has its step there too, and pulls with 2 beta, as twice a total variation."""
    term = KLTerm(name, placement=placement)
    distances = [-6.0, -1.0, -0.1, 0.1, 1.0, 6.0]
    forces = force(term, torch.tensor(distances, dtype=torch.float64), expected=True).tolist()
    # Up to the token's own share, which is not 0.
    assert forces == [pytest.approx(of_a_rare_token(term, item), rel=1e-5, abs=1e-6) for item in distances]


def test_the_closed_forms_are_the_derivatives_of_divergences():
    """Fresh: k3 in the loss has that of KL(ref || pi), ``p - q``; k2 that of KL(pi || ref), ``p (1 - p) t``."""
    for moved in (-3.0, 0.5, 3.0):
        p = 1 / (1 + math.exp(-(math.log(REFERENCE / (1 - REFERENCE)) + moved)))
        assert in_mean(SLOPES["k3"][1])(p, p) == pytest.approx(p - REFERENCE, abs=1e-12)
        assert in_mean(SLOPES["k2"][1])(p, p) == pytest.approx(p * (1 - p) * moved, abs=1e-12)
        assert in_mean(SLOPES["k1"][1])(p, p) == pytest.approx(0.0, abs=1e-12)


GROWTHS = {
    # above; below in the mean of fresh samples; below per sample
    "k2": (loss("k2"), "linear", "fades", "linear"),
    "k3": (loss("k3"), "bounded", "bounded", "exponential"),
    "abs": (loss("abs"), "bounded", "fades", "bounded"),
    "k3 x token ratio": (loss("k3", correction="token"), "linear", "fades", "linear"),
    # l + 1 per sample, of which the 1 has mean zero: k1's reverse KL, as k3 x token ratio.
    "k1 x token ratio": (loss("k1", correction="token"), "linear", "fades", "linear"),
    "k3 with the gradient of k2": (loss("k3", gradient="k2"), "linear", "fades", "linear"),
    "k1 as a cost": (KLTerm("k1"), "linear", "fades", "linear"),
    "k2 as a cost": (KLTerm("k2"), "quadratic", "fades", "quadratic"),
    "k3 as a cost": (KLTerm("k3"), "linear", "bounded", "exponential"),
}


@pytest.mark.parametrize("name", GROWTHS)
def test_a_growth_is_classified(name):
    term, above, below_in_mean, below_per_sample = GROWTHS[name]
    assert [pull.growth for pull in pulls(term, expected=True)] == [above, below_in_mean]
    assert [pull.growth for pull in pulls(term, expected=False)] == [above, below_per_sample]


def test_a_clamp_cuts_the_pull_where_it_acts():
    verl = loss("k3", input_clamp=20.0, output_clamp=10.0)
    above, below = pulls(verl, expected=False)
    # x - 1 + exp(-x) = 10, and exp(x) - 1 - x = 10.
    assert above.cut - 1 + math.exp(-above.cut) == pytest.approx(10.0, abs=1e-6)
    assert math.exp(below.cut) - 1 - below.cut == pytest.approx(10.0, abs=1e-6)
    assert (above.growth, above.limit) == ("bounded", pytest.approx(1.0))
    assert below.growth == "exponential"
    assert pulls(loss("k2", input_clamp=5.0), expected=True)[0].cut == pytest.approx(5.0)
    # A clamped cost is still a cost.
    assert pulls(KLTerm("k1", input_clamp=5.0), expected=True)[0].cut is None


def test_a_force_away_from_the_reference_says_so():
    above, below = pulls(loss("k1"), expected=False)
    assert (above.away, below.away) == (False, True)
    assert [pull.growth for pull in pulls(loss("k1"), expected=True)] == ["none", "none"]
    assert pulls(KLTerm("k3"), expected=False)[1].away
    assert not pulls(loss("k3"), expected=False)[1].away
    assert pulls(loss("k1", correction="token"), expected=True) == pulls(loss("k2"), expected=True)


# --- what leads back to the reference ------------------------------------------------------------------------------
STEP = 1e-4
"""A displacement of the logits (nats) from the reference, small beside 1 and large beside rounding errors."""


def second_derivative(term, regime, direction):
    """The rise of the term's expected gradient along ``direction`` of the logits, from the reference, per nat."""
    where = Instance.random(Tree.build(vocabulary=3, length=2), InstanceSettings(regime="off_policy", seed=3))
    rises = []
    for step in (0.0, STEP):
        logits_NV = where.ref_logp_NV + step * direction.reshape(where.ref_logp_NV.shape)
        sampler_NV = where.sampler_logp_NV
        if regime == "on_policy":
            sampler_NV = logits_NV.log_softmax(-1)
        at_step = replace(where, theta_D=logits_NV.reshape(-1), sampler_logp_NV=sampler_NV, recorded_logp_NV=sampler_NV)
        rises.append(float(expected_gradient(at_step, [term]).gradient_D @ direction))
    return (rises[1] - rises[0]) / STEP


def leads_back(term, regime):
    """Whether a small step from the reference, either way, is answered by a gradient that leads back."""
    direction = torch.randn(9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return min(second_derivative(term, regime, direction), second_derivative(term, regime, -direction)) > 0.01


def every_term(correction):
    """Terms without a mixture of k1 and k3 in the loss, which pushes and pulls; to_go and total pull alike."""
    built_in = [entry.name for entry in ESTIMATORS if entry.origin.startswith("kl_comedy.")]
    for term in all_terms(built_in, [correction]):
        is_mixed = term.estimator == "k_lambda" and term.placement == "loss"
        if not is_mixed and term.anchor == "current" and term.credit != "total":
            yield term


@pytest.mark.parametrize("regime", ["on_policy", "off_policy"])
@pytest.mark.parametrize("correction", ["none", "token_detached", "prefix_previous"])
def test_an_idle_term_does_not_lead_back_to_the_reference_and_any_other_does(regime, correction):
    wrong = []
    answers = set()
    for term in every_term(correction):
        says = is_idle(term)
        answers.add(says)
        if says == leads_back(term, regime):
            wrong.append(f"{term.label()}: is_idle is {says}")
    assert not wrong, "\n".join(wrong)
    assert answers == {True, False}


@pytest.mark.parametrize("regime", ["on_policy", "off_policy"])
@pytest.mark.parametrize("correction", ["none", "prefix_previous"])
@pytest.mark.parametrize("mix", [0.0, 1.0])
def test_a_mixture_at_its_ends_is_idle_where_k1_and_k3_are(regime, correction, mix):
    for placement in ("loss", "reward"):
        fields = {"placement": placement, "correction": correction}
        term = KLTerm("k_lambda", options={"lam": mix}, **fields)
        assert is_idle(term) != leads_back(term, regime), term.label()


def test_a_repulsion_is_idle_on_stale_samples_and_a_proper_loss_is_not():
    kinds = {term: off_policy_kind(term) for term in all_terms()}
    idle = {kind.kind: set() for kind in kinds.values() if kind is not None}
    for term, kind in kinds.items():
        if kind is not None:
            idle[kind.kind].add(is_idle(term))
    assert idle["repulsion"] == {True}
    assert idle["proper_loss"] == {False}


SENTENCES = {
    "k3": (loss("k3"), "at most beta", "at most beta", "exponential"),
    "k2": (loss("k2"), "linear", "fades", "linear"),
    # A ratio that has the token's own makes a stale sample like a fresh one.
    "k3 x token ratio": (loss("k3", correction="token"), "linear", "fades", "fades"),
    "k1 x prefix ratio as a cost": (KLTerm("k1", correction="prefix"), "linear", "fades", "fades"),
    "k2 x ratio before": (loss("k2", correction="prefix_previous"), "linear", "fades", "linear"),
}


@pytest.mark.parametrize("name", SENTENCES)
def test_the_words_are_of_the_samples_of_a_regime(name):
    term, above, below_fresh, below_stale = SENTENCES[name]
    assert pull_in_words(term, "on_policy") == f"above the reference {above}, below it {below_fresh}"
    for regime in ("off_policy", "mixed"):
        assert pull_in_words(term, regime) == f"above the reference {above}, below it {below_stale}"


def test_the_words_of_terms_with_a_bound_and_without_a_pull():
    half = loss("k3", input_clamp=20.0, output_clamp=10.0)
    assert pull_in_words(half, "off_policy") == (
        "above the reference at most beta (0 from 11 nats), below it exponential (0 from 2.61 nats)"
    )
    assert pull_in_words(loss("k1"), "on_policy") == "none"
    assert pull_in_words(loss("k1"), "mixed") == "above the reference at most beta, below it at most beta away"
    assert pull_in_words(loss("exact"), "on_policy") == ""
    squared = loss("k2", reference="sampler")
    assert pull_in_words(squared, "off_policy") == "above the sampler linear, below it linear"
    assert pull_in_words(squared, "on_policy") == "none"
    masked = loss("k3", reference="sampler", correction="token", cap=2.0, cap_mode="mask")
    assert pull_in_words(masked, "off_policy") == "above the sampler linear (0 from 0.693 nats), below it fades"


VERL = loss("k3", input_clamp=20.0, output_clamp=10.0)
ROWS = {
    **{f"{name} in the loss": loss(name) for name in ("k1", "k2", "k3", "abs")},
    "k3 × token ratio": loss("k3", correction="token"),
    **{f"{name} in the reward": KLTerm(name) for name in ("k1", "k2", "k3")},
    "k3 clamped as in verl": VERL,
}


def test_the_page_has_the_pull_of_each_term():
    page = (Path(__file__).parents[2] / "docs/off_policy_terms.md").read_text()
    table = page.partition("<!-- pulls -->\n")[2].partition("\n\n")[0].splitlines()[2:]
    written = {cells[0]: cells[1:] for cells in ([cell.strip() for cell in row.strip("|").split("|")] for row in table)}
    assert written == {
        name: [pull.words for expected in (True, False) for pull in pulls(term, expected=expected)]
        for name, term in ROWS.items()
    }


@pytest.mark.parametrize("power", [0.5, 2.0])
def test_a_certainty_of_any_power_leaves_a_term_as_idle_as_it_is(power):
    for weight in ("policy", "reference"):
        for estimator in ("k1", "k2"):
            term = loss(estimator, weight=weight, weight_power=power)
            assert is_idle(term) == (estimator == "k1")


@pytest.fixture
def behind_a_clamp(monkeypatch):
    """k1 with a clamp of its own, which the package does not see: no gradient beyond 20 nats."""
    ESTIMATORS.load()
    monkeypatch.setattr(ESTIMATORS, "_entries", dict(ESTIMATORS._entries))
    register = ESTIMATORS.register("clamped", source="this test", summary="planted", claims=(), needs="log_ratio")
    register(lambda log_ratio: log_ratio.clamp(-20, 20))
    return "clamped"


def test_a_force_that_begins_far_away_has_a_pull(behind_a_clamp):
    # Fresh samples: each token within 20 nats is pushed by 1, which has mean zero; one beyond is not, and falls behind.
    above, _below = pulls(loss(behind_a_clamp), expected=True)
    assert (above.growth, above.limit, above.away) == ("bounded", pytest.approx(1.0), True)
