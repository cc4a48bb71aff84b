"""The sampler and the old policy as references: exact KLs to the weights that drew a token, against slow loops."""

import copy
import itertools
import math

import pytest
import torch

from kl_comedy.config import load_config
from kl_comedy.config.combinations import versions_of_samples
from kl_comedy.config.schema import LoraConfig
from kl_comedy.errors import UserError
from kl_comedy.models.lora import add_lora
from kl_comedy.models.reference import PastPolicies
from kl_comedy.models.types import PassOptions
from kl_comedy.planning.plan import Plan
from kl_comedy.planning.sizes import GPUS
from kl_comedy.training.build import check_training
from kl_comedy.training.module import PolicyModule
from passes import token_pass
from small_llama import llama
from training_runs import SHORT, TINY, go, metrics_of, weights_of

BOTH_WAYS = (
    "kl=[{estimator: exact, placement: loss, reference: sampler, beta: 0.1}, "
    "{estimator: exact_forward, placement: loss, reference: sampler, beta: 0}]"
)
LAG_2 = ["lag.mode=replayed", "lag.steps=2", "train.steps=4"]
H100 = GPUS["h100-80"]
ADAPTER = ["model.lora={rank: 2}", "optimizer.lr=3.0e-2"]


# --- in a run ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def updates(monkeypatch):
    """Of every update of the runs to come: the policy before it (a copy), and its rows."""
    updates = []
    inner = PolicyModule.training_step

    def training_step(self, batch, batch_idx):
        updates.append((copy.deepcopy(self.policy), batch.rows))
        return inner(self, batch, batch_idx)

    monkeypatch.setattr(PolicyModule, "training_step", training_step)
    return updates


@torch.no_grad()
def next_token_logps(policy, rollout):
    """The log-probs before each token of a completion, ``[T, V]``, from the logits of one unpadded row."""
    ids = torch.tensor([[*rollout.prompt.token_ids, *rollout.completion_ids]])
    start = len(rollout.prompt.token_ids) - 1
    return policy(input_ids=ids).logits[0, start:-1].double().log_softmax(-1)


def kl(p_V, q_V):
    """``sum_v p (log p - log q)`` over the tokens that p may draw."""
    return sum(math.exp(p) * (p - q) for p, q in zip(p_V.tolist(), q_V.tolist(), strict=True) if p > -math.inf)


def slow_kls(policy, sampler, rows):
    """The means over tokens of KL(pi, mu) and KL(mu, pi)."""
    reverse = []
    forward = []
    for row in rows:
        policy_TV = next_token_logps(policy, row.rollout)
        sampler_TV = next_token_logps(sampler, row.rollout)
        for p_V, q_V in zip(policy_TV, sampler_TV, strict=True):
            reverse.append(kl(p_V, q_V))
            forward.append(kl(q_V, p_V))
    return sum(reverse) / len(reverse), sum(forward) / len(forward)


@pytest.mark.parametrize("overrides", [[], ADAPTER], ids=["all weights", "adapter"])
def test_the_exact_kls_to_the_sampler_are_those_to_the_weights_that_drew_the_tokens(tmp_path, updates, overrides):
    """Two updates old from the third update on: all weights are copied beside the run, and compared by loops."""
    logged = metrics_of(go(tmp_path, *SHORT, *LAG_2, BOTH_WAYS, *overrides).run)
    for step, age in ((1, 0), (2, 1), (3, 2), (4, 2)):
        assert logged[step, "policy/staleness"] == age
        policy, rows = updates[step - 1]
        sampler, _ = updates[step - 1 - age]
        reverse, forward = slow_kls(policy, sampler, rows)
        assert logged[step, "reference/sampler/exact_reverse_token"] == pytest.approx(reverse, rel=1e-4, abs=1e-9)
        assert logged[step, "reference/sampler/exact_forward_token"] == pytest.approx(forward, rel=1e-4, abs=1e-9)
        # The term reads what the metric says.
        assert logged[step, "kl_term/0/value_token"] == logged[step, "reference/sampler/exact_reverse_token"]
        # The weights are those that drew: what differs from the recorded log-probs is rounding.
        assert logged[step, "reference/sampler/mismatch_max"] < 1e-4
    assert logged[4, "reference/sampler/exact_reverse_token"] > 1e-5


def test_the_old_policy_is_a_copy_before_the_first_update_of_each_batch(tmp_path):
    """So it is the periodic copy whose period is the updates that a batch makes."""
    settings = [*SHORT, "train.steps=4", "algorithm.updates_per_batch=2"]
    term = "kl=[{{estimator: exact, placement: loss, reference: {}, beta: 0.1}}]"
    old = go(tmp_path / "old", *settings, term.format("old")).run
    periodic = go(tmp_path / "periodic", *settings, term.format("periodic"), "reference.period=2").run
    logged = metrics_of(old)
    exact = [logged[step, "reference/old/exact_reverse_token"] for step in (1, 2, 3, 4)]
    assert [exact[0], exact[2]] == [0, 0]
    assert min(exact[1], exact[3]) > 1e-6
    assert weights_of(old) == weights_of(periodic)


# --- over all completions ---------------------------------------------------------------------------------------------

V = 5
OPTIONS = {"temperature": 0.8, "chunk_elements": 4 * V}


def moved(model, seed):
    """Move what is trained, as an optimizer would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.2 * torch.randn(parameter.shape, dtype=parameter.dtype, generator=generator)


def every_completion(length):
    """A prompt of two tokens with every completion of ``length`` tokens, one a row."""
    ids_BT = torch.tensor(list(itertools.product(range(V), repeat=length)))
    return {
        "prompt_ids_BP": torch.tensor([[1, 2]]).expand(len(ids_BT), -1),
        "prompt_mask_BP": torch.ones(len(ids_BT), 2, dtype=torch.long),
        "ids_BT": ids_BT,
        "mask_BT": torch.ones_like(ids_BT, dtype=torch.bool),
    }


@pytest.mark.parametrize("adapter", [False, True], ids=["all weights", "adapter"])
def test_the_mean_of_k1_over_all_completions_is_the_exact_kl_to_the_sampler(adapter):
    """``E_pi[sum_t log pi - log mu] = E_pi[sum_t KL_t]``, mu three updates old; the same over those that mu draws."""
    model = llama(vocab=V)
    if adapter:
        model = add_lora(model, LoraConfig(rank=2))
    inputs = every_completion(3)
    past = PastPolicies(model, PassOptions(**OPTIONS), versions=4)
    recorded = {}
    for version in range(5):
        if version > 0:
            moved(model, seed=version)
            past.update(model, version)
        recorded[version] = token_pass(model, **inputs, **OPTIONS).logp_BT.detach()
    sampler_BT = recorded[2]
    version_BT = torch.full_like(inputs["ids_BT"], 2)
    reference = past.forward_pass(**inputs, policy_version_BT=version_BT)
    with torch.no_grad():
        policy = token_pass(model, **inputs, **OPTIONS, reference=reference, kl=True)

    probability_B = policy.logp_BT.sum(-1).exp()
    assert float(probability_B.sum()) == pytest.approx(1)
    k1_BT = policy.logp_BT - sampler_BT
    exact = float((probability_B * policy.kl_BT.sum(-1)).sum())
    assert exact > 0.01
    assert float((probability_B * k1_BT.sum(-1)).sum()) == pytest.approx(exact, rel=1e-10)
    # As a batch of the sampler estimates it: each cost with the ratio of its prefix.
    ratio_BT = k1_BT.cumsum(-1).exp()
    drawn_B = sampler_BT.sum(-1).exp()
    assert float((drawn_B * (ratio_BT * k1_BT).sum(-1)).sum()) == pytest.approx(exact, rel=1e-10)


# --- what is not kept -------------------------------------------------------------------------------------------------


def past_of(versions, updates):
    model = llama(vocab=V)
    past = PastPolicies(model, PassOptions(**OPTIONS), versions=versions)
    for version in range(1, updates + 1):
        moved(model, seed=version)
        past.update(model, version)
    return past


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ([1, 1], "version 1 of the weights, and the past policies are those of the versions 2 to 3"),
        ([4, 4], "version 4 of the weights"),
        ([-1, -1], "version -1 of the weights"),
        ([2, 3], r"the versions \[2, 3\]"),
    ],
    ids=["too old", "not there yet", "of another run", "two of them"],
)
def test_a_version_that_is_not_there_is_named(named, message):
    inputs = every_completion(2)
    version_BT = torch.tensor([named]).expand_as(inputs["ids_BT"])
    with pytest.raises(UserError, match=message):
        past_of(2, updates=3).forward_pass(**inputs, policy_version_BT=version_BT)


def test_a_checkpoint_has_the_versions_and_their_numbers():
    saved = past_of(2, updates=3)
    resumed = past_of(2, updates=0)
    resumed.load_state_dict(copy.deepcopy(saved.state_dict()))
    inputs = every_completion(2)
    logps = {}
    for version in (2, 3):
        version_BT = torch.full_like(inputs["ids_BT"], version)
        logps[version] = resumed.forward_pass(**inputs, policy_version_BT=version_BT).logp_BT
        assert torch.equal(logps[version], saved.forward_pass(**inputs, policy_version_BT=version_BT).logp_BT)
    assert not torch.equal(logps[2], logps[3])


@pytest.mark.parametrize(
    ("overrides", "versions"),
    [
        ([], 1),
        (["lag.mode=replayed", "lag.steps=3"], 4),
        (["lag.mode=replayed", "lag.steps=4", "algorithm.updates_per_batch=2"], 6),
        (["algorithm.updates_per_batch=2", "algorithm.epochs_per_batch=2"], 4),
    ],
)
def test_as_many_versions_as_samples_may_be_of(overrides, versions):
    """With two updates a batch and a lag of 4 the second update of a batch is 5 updates after its weights."""
    assert versions_of_samples(load_config(TINY, overrides)) == versions


REFUSED = {
    "a server": (["rollout.backend=hf_server"], "hf_server does not draw with the learner's module"),
    "an engine beside the trainer": (["lag.mode=async", "lag.max_steps=1"], "hf_server does not draw with"),
    "a recording": (["rollout.backend=replay", "rollout.options={path: x.jsonl}"], "replay does not draw with"),
    "truncation": (["rollout.truncation={top_p: 0.9}"], "renormalized over the tokens that it kept"),
    "shards": (["train.strategy=fsdp", "train.devices=2"], "past policies are not kept in shards"),
}


@pytest.mark.parametrize(("overrides", "reason"), REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize(
    "term",
    ["estimator: exact", "estimator: top_k", "estimator: k1, weight: reference", "estimator: k1, baseline: exact"],
)
def test_where_the_distribution_is_not_known_a_term_that_reads_it_is_refused(overrides, reason, term):
    placement = "reward" if "baseline" in term else "loss"
    kl = f"kl=[{{{term}, placement: {placement}, reference: sampler}}]"
    with pytest.raises(UserError, match=rf"^kl\.0\.reference: got 'sampler'.*{reason}"):
        check_training(load_config(TINY, [*overrides, kl]))


def test_a_sampled_term_to_the_sampler_of_any_engine_trains():
    for overrides, _ in REFUSED.values():
        check_training(load_config(TINY, [*overrides, "kl=[{estimator: k3, placement: loss, reference: sampler}]"]))


def test_an_old_policy_that_is_the_policy_is_refused():
    with pytest.raises(UserError, match="the old policy is the policy itself"):
        check_training(load_config(TINY, ["kl=[{estimator: k3, placement: loss, reference: old}]"]))


# --- memory -----------------------------------------------------------------------------------------------------------


def test_the_plan_counts_every_version_to_the_byte():
    plan = Plan(load_config(TINY, [*LAG_2, BOTH_WAYS]), H100)
    sizes = {component.name: component.bytes for component in plan.components}
    assert sizes["past policies"] == 3 * sizes["gradients"]
    adapter = Plan(load_config(TINY, [*LAG_2, BOTH_WAYS, *ADAPTER]), H100)
    sizes_of_adapter = {component.name: component.bytes for component in adapter.components}
    assert sizes_of_adapter["past policies"] == 3 * sizes_of_adapter["gradients"] < 0.2 * sizes["past policies"]


def test_more_memory_than_the_limit_is_refused_by_plan_and_run(tmp_path):
    small = [*SHORT, *LAG_2, BOTH_WAYS, "reference.past_gib=1.0e-6"]
    message = r"^reference\.past_gib: got 1e-06; allowed: at least .*up to 3 versions"
    with pytest.raises(UserError, match=message):
        Plan(load_config(TINY, small), H100)
    with pytest.raises(UserError, match=message):
        go(tmp_path, *small)
