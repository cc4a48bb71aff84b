"""Metrics of an update: exact values, estimates, the policy against its sampler, staleness; micro-batches add up."""

import dataclasses
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kl_comedy.models.types import TokenPass
from kl_comedy.records import FOREIGN_VERSION, Problem, Prompt, Reward, Rollout, Scored
from kl_comedy.training.metrics import (
    MetricAccumulator,
    accumulate_behaviour,
    accumulate_divergence,
    row_metrics,
    staleness_metrics,
    token_numbers,
)

B = 5
T = 4
V = 7


def dense(seed):
    """Log-probs of a policy and a reference at every prefix, sampled tokens, and a right-padded mask. All float64."""
    g = torch.Generator().manual_seed(seed)
    logp_BTV, logq_BTV = torch.randn(2, B, T, V, generator=g, dtype=torch.float64).log_softmax(-1)
    ids_BT = torch.multinomial(logp_BTV.exp().view(-1, V), 1, generator=g).view(B, T)
    length_B = torch.randint(1, T + 1, (B,), generator=g)
    return logp_BTV, logq_BTV, ids_BT, torch.arange(T)[None] < length_B[:, None]


def pass_of(logp_BTV, logq_BTV, ids_BT, mask_BT):
    """The pass and log-ratios of the training loop, from the dense formulas."""
    p = logp_BTV.exp()
    q = logq_BTV.exp()
    ratio_BTV = logp_BTV - logq_BTV

    def inside(values):
        return torch.where(mask_BT, values, 0.0)

    def picked(values):
        return inside(values.gather(2, ids_BT[..., None])[..., 0])

    policy = TokenPass(
        logp_BT=picked(logp_BTV),
        kl_BT=inside((p * ratio_BTV).sum(-1)),
        forward_kl_BT=inside(-(q * ratio_BTV).sum(-1)),
        entropy_BT=inside(-(p * logp_BTV).sum(-1)),
        total_variation_BT=inside((p - q).abs().sum(-1) / 2),
        hidden_NH=None,
    )
    return policy, picked(ratio_BTV)


def divergence_metrics(pieces):
    metrics = MetricAccumulator()
    for dense_piece in pieces:
        policy, log_ratio_BT = pass_of(*dense_piece)
        accumulate_divergence(metrics, dense_piece[3], policy, log_ratio_BT)
    return metrics.values()


def divergence_names():
    names = {"policy/entropy", "policy/entropy_sequence", "kl/log_ratio_max"}
    for level in ("token", "sequence"):
        for quantity in ("exact_reverse", "exact_forward", "total_variation"):
            names.add(f"kl/{quantity}_{level}")
        for estimator in ("k1", "k2", "k3"):
            names.add(f"kl/{estimator}_reverse_{level}")
            names.add(f"kl_error/{estimator}_reverse_{level}")
            names.add(f"kl_error/{estimator}_reverse_{level}_rms")
    return names


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(1, 10**6), cut=st.sets(st.integers(1, B - 1)))
def test_micro_batches_add_up_to_the_batch(seed, cut):
    """Means, root mean squares and maxima alike, however the rows are split."""
    whole = dense(seed)
    edges = [0, *sorted(cut), B]
    pieces = []
    for first, end in pairwise(edges):
        pieces.append(tuple(tensor[first:end] for tensor in whole))
    once = divergence_metrics([whole])
    assert set(once) == divergence_names()
    assert divergence_metrics(pieces) == pytest.approx(once, rel=1e-12, abs=1e-14)


def test_mean_errors_are_the_biases_of_the_estimators():
    """Averaged over every next token with its probability, k1 and k3 are unbiased and k2 is not."""
    logp_V, logq_V = torch.randn(2, V, generator=torch.Generator().manual_seed(0), dtype=torch.float64).log_softmax(-1)
    bias = dict.fromkeys(("k1", "k2", "k3"), 0.0)
    for token in range(V):
        sample = (logp_V.expand(1, 1, V), logq_V.expand(1, 1, V), torch.tensor([[token]]), torch.tensor([[True]]))
        metrics = divergence_metrics([sample])
        probability = float(logp_V[token].exp())
        for name in bias:
            bias[name] += probability * metrics[f"kl_error/{name}_reverse_token"]
    assert abs(bias["k1"]) < 1e-12
    assert abs(bias["k3"]) < 1e-12
    assert abs(bias["k2"]) > 1e-3


def test_without_exact_values_there_are_no_errors():
    whole = dense(5)
    metrics = MetricAccumulator()
    policy, log_ratio_BT = pass_of(*whole)
    accumulate_divergence(metrics, whole[3], dataclasses.replace(policy, kl_BT=None), log_ratio_BT)
    assert not [name for name in metrics.values() if name.startswith("kl_error/")]


def behaviour_metrics(logp, behaviour, versions, mask, version):
    metrics = MetricAccumulator()
    experience = SimpleNamespace(
        mask_BT=torch.tensor(mask),
        behaviour_logp_BT=torch.tensor(behaviour),
        policy_version_BT=torch.tensor(versions),
    )
    accumulate_behaviour(metrics, experience, torch.tensor(logp), version)
    return metrics.values()


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10**6))
def test_behaviour_estimates_have_the_divergences_as_expectation(seed):
    """Weighted by mu over a vocabulary of 6, the two estimates of each direction are that KL."""
    g = torch.Generator().manual_seed(seed)
    logp_V, logm_V = torch.randn(2, 6, generator=g, dtype=torch.float64).log_softmax(-1)
    forward = float((logm_V.exp() * (logm_V - logp_V)).sum())
    reverse = float((logp_V.exp() * (logp_V - logm_V)).sum())
    divergences = {
        "k1_behaviour": forward,
        "k3_behaviour": forward,
        "k1_policy_behaviour": reverse,
        "k3_policy_behaviour": reverse,
    }
    expectations = dict.fromkeys(divergences, 0.0)
    for token in range(6):
        metrics = behaviour_metrics([[float(logp_V[token])]], [[float(logm_V[token])]], [[0]], [[True]], 0)
        probability = float(logm_V[token].exp())
        for name in divergences:
            expectations[name] += probability * metrics[f"kl/{name}_token"]
    for name, divergence in divergences.items():
        assert expectations[name] == pytest.approx(divergence, abs=1e-5), name


def test_mismatch_counts_tokens_whose_whole_prefix_has_the_current_version():
    """Row 0 is current; row 1 got new weights in mid-completion, so its cache is older; row 2 is stale."""
    metrics = behaviour_metrics(
        logp=[[-1.0, -1.0], [-1.0, -1.0], [-1.0, -1.0]],
        behaviour=[[-1.25, -1.0], [-1.0, -3.0], [-9.0, -9.0]],
        versions=[[7, 7], [6, 7], [5, 5]],
        mask=[[True, True], [True, True], [True, False]],
        version=7,
    )
    # The gaps of row 0 are 0.25 and 0; it has two of the five tokens.
    assert metrics["policy/mismatch"] == pytest.approx(0.125)
    assert metrics["policy/mismatch_max"] == pytest.approx(0.25)
    assert metrics["policy/equal_weights_share"] == pytest.approx(2 / 5)
    # The gap between -1 and -9 of the stale row.
    assert metrics["policy/behaviour_gap_max"] == pytest.approx(8.0)


def test_a_tools_reply_ends_no_fresh_tokens_and_has_no_age():
    """The policy's first and last token are current and 0.5 nats off; what stands at the tool's is of no version."""
    metrics = behaviour_metrics(
        logp=[[-1.0, 0.0, -2.0]],
        behaviour=[[-1.5, -7.0, -2.5]],
        versions=[[7, FOREIGN_VERSION, 7]],
        mask=[[True, False, True]],
        version=7,
    )
    assert metrics["policy/equal_weights_share"] == 1.0
    assert metrics["policy/mismatch"] == pytest.approx(0.5)
    assert metrics["policy/behaviour_gap_max"] == pytest.approx(0.5)
    assert metrics["policy/staleness"] == 0.0


def test_a_stored_row_marks_what_the_environment_wrote():
    """A completion of four tokens, the second and third a tool's, beside a shorter one."""
    real_BT = torch.tensor([[True] * 4, [True, True, False, False]])
    mask_BT = torch.tensor([[True, False, False, True], [True, True, False, False]])
    zeros_BT = torch.zeros(2, 4)
    experience = SimpleNamespace(
        ids_BT=torch.ones(2, 4, dtype=torch.long),
        real_BT=real_BT,
        mask_BT=mask_BT,
        ref_logp_BT=zeros_BT,
        behaviour_logp_BT=zeros_BT,
        advantage_BT=mask_BT.float(),
        weight_B=torch.ones(2),
    )
    micro = SimpleNamespace(experience=experience, positions=[0, 1])
    policy = SimpleNamespace(logp_BT=zeros_BT, kl_BT=None)
    numbers = token_numbers(micro, policy, SimpleNamespace(policy=SimpleNamespace(clipped_BT=None, weights={})))
    assert [numbers[row].use for row in (0, 1)] == ["teet", "tt"]


def test_the_length_is_that_of_what_the_policy_drew():
    """It is multiplied by a mean over its tokens where a KL per completion is wanted."""
    rollout = Rollout(
        prompt=Prompt(problem=Problem(id="a", text="", answer=""), text="", token_ids=(1,)),
        group_id=0,
        completion_ids=(5, 6, 7, 8),
        logps=(-1.0, 0.0, 0.0, -1.0),
        versions=(0, FOREIGN_VERSION, FOREIGN_VERSION, 0),
        stop_reason="eos",
        text="",
        trained=(True, False, False, True),
    )
    assert row_metrics([Scored(rollout=rollout, reward=Reward(value=0.0))])["train/length"] == 2.0


def test_stale_tokens_have_no_mismatch():
    metrics = behaviour_metrics([[-1.0]], [[-2.0]], versions=[[3]], mask=[[True]], version=4)
    assert "policy/mismatch" not in metrics
    assert metrics["policy/equal_weights_share"] == 0.0


def test_tokens_of_another_run_have_no_age():
    both = behaviour_metrics(
        [[-1.0, -1.0]], [[-1.0, -1.0]], versions=[[FOREIGN_VERSION, 2]], mask=[[True, True]], version=5
    )
    assert both["policy/staleness"] == 3.0
    foreign = behaviour_metrics([[-1.0]], [[-1.0]], versions=[[FOREIGN_VERSION]], mask=[[True]], version=5)
    assert "policy/staleness" not in foreign


@settings(deadline=None)
@given(st.lists(st.floats(-5, 5, width=32), min_size=1, max_size=60), st.integers(1, 5))
def test_quantiles_do_not_depend_on_how_a_batch_is_cut(values, parts):
    whole = MetricAccumulator()
    cut = MetricAccumulator()
    whole.sample("x_p*", torch.tensor(values))
    for n in range(parts):
        cut.sample("x_p*", torch.tensor(values[n::parts]))
    quantiles = whole.values()
    assert cut.values() == quantiles
    rising = [quantiles[f"x_p{percent}"] for percent in ("01", "10", "50", "90", "99")]
    assert rising == sorted(rising)
    assert rising[-1] <= max(values)
    n_up_to_median = sum(value <= quantiles["x_p50"] for value in values)
    assert n_up_to_median >= len(values) / 2


def row(versions):
    return SimpleNamespace(rollout=SimpleNamespace(versions=versions))


def test_staleness_in_updates_and_seconds():
    # Version n was replaced at 100 + 10 n seconds, and now is 130: its tokens are 30 - 10 n seconds old.
    replaced_at = {0: 100.0, 1: 110.0, 2: 120.0}
    now = 130.0
    metrics = staleness_metrics([row([0, 1, 1, 2, 3, 3, 3, 3, 3, 3])], 3, replaced_at, now)
    assert metrics["policy/staleness_p50"] == 0
    assert metrics["policy/staleness_p90"] == 2
    assert metrics["policy/staleness_max"] == 3
    assert metrics["time/staleness_p50"] == 0
    assert metrics["time/staleness_p90"] == 20
    assert metrics["time/staleness_max"] == 30
    assert metrics["time/staleness"] == pytest.approx((30 + 20 + 20 + 10) / 10)
    assert staleness_metrics([row([FOREIGN_VERSION])], 3, replaced_at, now) == {}
    assert "time/staleness" not in staleness_metrics([row([1])], 3, {}, now), "not known when it was replaced"


def test_the_effective_sample_share_is_that_of_all_micro_batches():
    weight_B = torch.tensor([1.0, 3.0, 2.0, 2.0])

    def effective_share(parts):
        metrics = MetricAccumulator()
        for part_B in parts:
            sums = (part_B.sum(), part_B.square().sum(), len(part_B))
            metrics.add("policy/ess", *sums, reduction="effective_sample_share")
        return metrics.values()

    whole = effective_share([weight_B])
    cut = effective_share([weight_B[:1], weight_B[1:]])
    # (1 + 3 + 2 + 2)^2 over 4 times (1 + 9 + 4 + 4).
    assert whole == {"policy/ess": pytest.approx(64 / (4 * 18))}
    assert cut == whole


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=8))
def test_gold_and_trained_reward_are_means_of_the_same_completions(verdicts):
    prompt = Prompt(problem=Problem(id="p", text="3+4=", answer="7"), text="3+4=", token_ids=(1,))
    rows = []
    for right, hacked in verdicts:
        rollout = Rollout(
            prompt=prompt, group_id=0, completion_ids=(2,), logps=(-1.0,), versions=(0,), stop_reason="eos", text=""
        )
        parts = {"fixed_text": float(hacked), "gold": float(right)}
        rows.append(Scored(rollout=rollout, reward=Reward(value=2.0 * hacked, parts=parts)))
    metrics = row_metrics(rows)
    count = len(verdicts)
    assert metrics["train/gold"] == pytest.approx(sum(right for right, _ in verdicts) / count)
    assert metrics["train/reward"] == pytest.approx(2 * sum(hacked for _, hacked in verdicts) / count)
    assert metrics["train/reward/fixed_text"] == pytest.approx(sum(hacked for _, hacked in verdicts) / count)
    assert "train/reward/gold" not in metrics


def test_a_term_counts_as_it_was_when_it_was_added():
    """Terms are read later, all at once: what changes in between, and the graph that made them, must not be in them."""
    weight = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    total = torch.tensor(2.0, dtype=torch.float64)
    metrics = MetricAccumulator()
    metrics.add("mean", total, 4)
    metrics.maximum("largest", total)
    metrics.add("loss", 2 * weight, torch.tensor(1))
    total += 5
    assert metrics.values() == {"mean": 0.5, "loss": 6.0, "largest": 2.0}
    metrics.add("mean", total, 4)
    assert metrics.values()["mean"] == (2 + 7) / 8


def test_sums_are_added_in_the_order_of_their_terms():
    terms = [1e16, 1.0, -1e16, torch.tensor(0.1)]
    metrics = MetricAccumulator()
    for term in terms:
        metrics.add("sum", term, 0.25)
    assert metrics.values()["sum"] == 0.0 + 1e16 + 1.0 - 1e16 + float(torch.tensor(0.1))
