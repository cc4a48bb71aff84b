"""A row beside longer ones is what it is alone: every part of the objective, on rows of unequal length, in float64.

What lies outside the mask is noise here, so a part that reads it, or counts it, differs.
"""

import math

import pytest
import torch

from kl_comedy.kl import KLTerm, TermParts, batch_baseline, kl_diagnostics, kl_parts, kl_surrogate, own_baseline
from kl_comedy.kl.claims import all_terms
from kl_comedy.kl.estimators import TopTokens
from kl_comedy.objective import PolicyTerm, policy_term
from kl_comedy.objective.advantages import whiten
from kl_comedy.registry import ADVANTAGES, POLICY_CORRECTIONS, POLICY_LOSSES

T = 7
SIZES = torch.tensor([7, 2, 5, 1, 3, 7, 4, 6] * 4)
MASK_BT = torch.arange(T)[None] < SIZES[:, None]
GROUP_B = torch.arange(len(SIZES)) // 4
NOISE = 50.0


def draw(seed, low=-1.0, high=1.0):
    """Uniform numbers of every token, noise outside the mask."""
    generator = torch.Generator().manual_seed(seed)
    drawn_BT = low + (high - low) * torch.rand(MASK_BT.shape, generator=generator, dtype=torch.float64)
    return torch.where(MASK_BT, drawn_BT, NOISE * drawn_BT)


def log_probs():
    """Of the policy, its reference and the sampler: apart by up to 0.6 nats, so that bounds act on some tokens only."""
    logp_BT = draw(0, -3.0, -0.7)
    return {
        "logp_BT": logp_BT,
        "ref_logp_BT": logp_BT + 0.6 * draw(1),
        "behaviour_logp_BT": logp_BT + 0.6 * draw(2),
    }


def alone(tensors, row):
    """The tensors of one row without its padding."""
    return {name: tensor[row : row + 1, : int(SIZES[row])] for name, tensor in tensors.items()}


def assert_rows_are_as_alone(computed):
    """``computed(rows)`` gives tensors by name, each ``[B, T]`` or ``[B]``, of the inputs that ``rows`` selects.

    Returns what is computed of the whole batch.
    """
    whole = computed(lambda tensors: tensors)
    for row, size in enumerate(SIZES.tolist()):
        of_row = computed(lambda tensors, row=row: alone(tensors, row))
        for name, value in of_row.items():
            beside = whole[name][row]
            if beside.dim() > 0:
                beside = beside[:size]
            torch.testing.assert_close(beside, value[0], rtol=1e-12, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
    return whole


def built_in(registry):
    """Names that the package itself registers: a plugin of another test is not meant."""
    return [entry.name for entry in registry if entry.origin.startswith("kl_comedy.")]


CORRECTION_OPTIONS = {
    "geometric_mask": {"low": 0.9, "high": 1.1},
    "opsm": {"threshold": 0.05},
    "cppo": {"floor": 0.2},
    "prefix_budget": {"budget": 0.1},
}
"""Where the default bound acts on all of these rows or on none."""


@pytest.mark.parametrize("name", built_in(POLICY_CORRECTIONS))
def test_a_correction_of_the_policy_term(name):
    term = PolicyTerm(corrections={name: CORRECTION_OPTIONS.get(name, {})})

    def computed(rows):
        tensors = rows({**log_probs(), "advantage_BT": draw(3), "mask_BT": MASK_BT})
        del tensors["ref_logp_BT"]
        parts = policy_term(term, **tensors)
        weights = parts.weights[name]
        inside_BT = tensors["mask_BT"]
        return {
            "loss": parts.loss_BT,
            "weight": weights.weight_BT * inside_BT,
            "masked": (weights.masked_BT & inside_BT).double(),
            "truncated": (weights.truncated_BT & inside_BT).double(),
        }

    whole = assert_rows_are_as_alone(computed)
    if POLICY_CORRECTIONS.get(name).facts["role"] == "mask":
        assert 0 < whole["masked"].sum() < MASK_BT.sum(), "it drops some tokens and keeps others"


@pytest.mark.parametrize("name", built_in(POLICY_LOSSES))
def test_a_policy_loss(name):
    def computed(rows):
        tensors = rows({**log_probs(), "advantage_BT": draw(3), "mask_BT": MASK_BT})
        del tensors["ref_logp_BT"]
        logp_BT = tensors.pop("logp_BT").clone().requires_grad_(True)
        parts = policy_term(PolicyTerm(loss=name), logp_BT=logp_BT, **tensors)
        (gradient_BT,) = torch.autograd.grad(parts.loss_BT.sum(), logp_BT)
        columns = {"loss": parts.loss_BT.detach(), "gradient": gradient_BT}
        if parts.clipped_BT is not None:
            columns["clipped"] = parts.clipped_BT.double()
        return columns

    assert_rows_are_as_alone(computed)


BOUNDED = [
    KLTerm("k3", correction="prefix", cap=1.3),
    KLTerm("k3", correction="prefix", cap=1.3, cap_mode="mask", window=2),
    KLTerm("k1", correction="prefix_previous", cap=1.1, cap_mode="each", credit="total"),
    KLTerm("k1", correction="sequence", cap=1.3, credit="own"),
    KLTerm("k1", correction="token", cap=1.2, cap_mode="clip", credit="own"),
    KLTerm("k1", discount=0.7),
    KLTerm("k2", placement="loss", level="sequence", output_clamp=0.1),
    KLTerm("k3", placement="loss", input_clamp=0.2),
    KLTerm("exact", weight="policy", weight_power=2.0),
]
TERMS = all_terms(["k1", "k3", "exact", "exact_jsd", "top_k"]) + BOUNDED


@pytest.mark.parametrize("part", ["reward", "loss"])
def test_every_kl_term(part):
    """Its costs, weights and surrogate; a row takes the same whatever stands beside it."""

    def of_term(term):
        def computed(rows):
            tensors = rows({**log_probs(), "mask_BT": MASK_BT, "exact": draw(4, 0.0, 1.0), "certainty": draw(5, 0, 1)})
            exact_BT = tensors.pop("exact")
            certainty_BT = tensors.pop("certainty")
            if term.needs == "top_k":
                logs_BTK = torch.stack([tensors["logp_BT"] - 1, tensors["logp_BT"] - 2], -1)
                refs_BTK = torch.stack([tensors["ref_logp_BT"] - 1.5, tensors["ref_logp_BT"] - 1], -1)
                tensors["top"] = TopTokens(logs_BTK, refs_BTK, exact_BT > 0.5)
            elif term.needs != "log_ratio":
                tensors["exact_kl_BT"] = exact_BT
            if term.weight != "none":
                tensors["certainty_BT"] = certainty_BT
            parts = kl_parts(term, **tensors)
            inside_BT = tensors["mask_BT"]
            names = ("cost_BT", "weight_BT", "baseline_weight_BT", "pathwise_BT")
            values = {name: torch.where(inside_BT, getattr(parts, name), 0.0) for name in names}
            values["surrogate"] = kl_surrogate(term, **tensors)
            values["after"] = parts.cost_after_B
            return values

        return computed

    chosen = [term for term in TERMS if term.placement == part]
    assert len(chosen) > 20
    for term in chosen:
        try:
            assert_rows_are_as_alone(of_term(term))
        except AssertionError as error:
            raise AssertionError(term.label()) from error


@pytest.mark.parametrize("term", [term for term in BOUNDED if term.needs == "log_ratio"], ids=KLTerm.label)
def test_what_bounds_did_is_counted_in_tokens_of_the_mask(term):
    """By hand: the share over all rows is the mean of the rows' shares, weighted by their tokens (or completions)."""
    tensors = {**log_probs(), "mask_BT": MASK_BT}
    whole = kl_diagnostics(term, **tensors)
    rows = [kl_diagnostics(term, **alone(tensors, row)) for row in range(len(SIZES))]
    for name, value in whole.items():
        if name == "ratio_max":
            assert value == pytest.approx(max(row[name] for row in rows))
            continue
        if name == "clamped_share" and term.level == "sequence":
            weights = [1.0] * len(SIZES)  # a sequence is clamped as a whole
        else:
            weights = [float(size) for size in SIZES]
        weighted = sum(row[name] * weight for row, weight in zip(rows, weights, strict=True))
        assert value == pytest.approx(weighted / sum(weights)), name


# --- what is taken over a group or a batch ---------------------------------------------------------------------------


def parts_of_noise():
    """Positive weights; noise outside the mask."""
    zeros_BT = torch.zeros_like(MASK_BT, dtype=torch.float64)
    return TermParts(
        cost_BT=draw(6),
        weight_BT=draw(7, 0.5, 2.0).abs(),
        baseline_weight_BT=draw(8, 0.5, 2.0).abs(),
        pathwise_BT=zeros_BT,
        cost_after_B=zeros_BT[:, 0],
    )


def test_the_own_baseline_is_the_weighted_mean_over_the_others_that_reach_the_token():
    parts = parts_of_noise()
    baseline_BT = own_baseline(parts, MASK_BT, GROUP_B)
    for row in range(len(SIZES)):
        others_of_group = [other for other in range(len(SIZES)) if GROUP_B[other] == GROUP_B[row] and other != row]
        for t in range(T):
            others = [other for other in others_of_group if t < SIZES[other]]
            expected = 0.0
            if others and t < SIZES[row]:
                costs = math.fsum(float(parts.weight_BT[other, t] * parts.cost_BT[other, t]) for other in others)
                weights = math.fsum(float(parts.baseline_weight_BT[other, t]) for other in others)
                expected = costs / weights
            assert float(baseline_BT[row, t]) == pytest.approx(expected, abs=1e-12), (row, t)


@pytest.mark.parametrize("group", [None, GROUP_B], ids=["batch", "groups"])
def test_the_batchs_baseline_is_the_mean_over_the_tokens_of_the_mask(group):
    parts = parts_of_noise()
    baseline_BT = batch_baseline(parts, MASK_BT, group)
    for row in range(len(SIZES)):
        members = range(len(SIZES))
        if group is not None:
            members = [member for member in members if group[member] == group[row]]
        costs = []
        for member in members:
            for t in range(int(SIZES[member])):
                costs.append(float(parts.weight_BT[member, t] * parts.cost_BT[member, t]))
        mean = math.fsum(costs) / len(costs)
        assert baseline_BT[row].tolist() == pytest.approx([mean] * T, abs=1e-12)


def widened(tensor_BT, fill):
    """With three more columns."""
    return torch.nn.functional.pad(tensor_BT.double(), (0, 3), value=fill).to(tensor_BT.dtype)


@pytest.mark.parametrize("name", built_in(ADVANTAGES))
def test_an_advantage_does_not_depend_on_the_width_of_the_batch(name):
    """Returns are defined beyond the end of a completion; values there are noise."""
    estimator = ADVANTAGES.get(name)
    returns_BT = torch.where(MASK_BT, draw(9), 0.3)
    values_BT = draw(10)

    def advantages(returns_BT, values_BT, mask_BT):
        options = {}
        if estimator.facts.get("critic"):
            options = {"values_BT": values_BT, "last_value_B": draw(11)[:, 0], "gamma": 0.9, "lam": 0.8}
        advantage_BT = estimator.fn(returns_BT, mask_BT, GROUP_B, **options)
        return torch.where(mask_BT, advantage_BT, 0.0)[:, :T]

    narrow = advantages(returns_BT, values_BT, MASK_BT)
    wide = advantages(widened(returns_BT, 0.3), widened(values_BT, NOISE), widened(MASK_BT, 0.0))
    torch.testing.assert_close(narrow, wide, rtol=1e-12, atol=1e-12)


def test_whitening_is_over_the_tokens_of_the_mask():
    values_BT = draw(12)
    inside = whiten(values_BT, MASK_BT)[MASK_BT]
    assert float(inside.mean()) == pytest.approx(0.0, abs=1e-12)
    assert float(inside.square().mean()) == pytest.approx(1.0, abs=1e-5)
