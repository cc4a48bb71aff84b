"""The head where a sampler truncated: the policy is renormalized over the tokens that were kept.

Compared with a slow computation in float64, position by position, whose gradients are autograd's.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kl_comedy.models.reference import Reference
from kl_comedy.models.types import PassOptions
from kl_comedy.records import KeptSets, Problem, Prompt, Rollout
from passes import head_columns, token_pass
from small_llama import V, batch, llama, naive_logits

REQUESTED = ("kl", "entropy", "total_variation", "log_kept", "reference_log_kept")
WITH_GRADIENT = ("logp", "kl")


def slow_columns(logits_NV, reference_NV, ids_N, kept_sets):
    """By position, and by a sum over the kept tokens alone."""
    columns = {name: [] for name in ("logp", *REQUESTED)}
    for logits_V, reference_V, token, kept in zip(logits_NV, reference_NV, ids_N.tolist(), kept_sets, strict=True):
        kept_V = torch.stack([logits_V[v] for v in kept])
        p_log = {v: logits_V[v] - kept_V.logsumexp(0) for v in kept}
        q_log_V = reference_V - reference_V.logsumexp(0)
        columns["logp"].append(p_log[token])
        columns["kl"].append(sum(p_log[v].exp() * (p_log[v] - q_log_V[v]) for v in kept))
        columns["entropy"].append(-sum(p_log[v].exp() * p_log[v] for v in kept))
        p = {v: p_log[v].exp() for v in kept}
        columns["total_variation"].append(
            0.5 * sum((p.get(v, 0.0) - q_log_V[v].exp()).abs() for v in range(len(q_log_V)))
        )
        columns["log_kept"].append(kept_V.logsumexp(0) - logits_V.logsumexp(0))
        columns["reference_log_kept"].append(torch.stack([q_log_V[v] for v in kept]).logsumexp(0))
    return {name: torch.stack(values) for name, values in columns.items()}


@st.composite
def cases(draw):
    """Hidden states, two heads, tokens, and a kept set around each token: from that token alone to the vocabulary."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    n = draw(st.integers(1, 7))
    v = draw(st.integers(2, 9))
    width = draw(st.integers(1, 4))
    scale = draw(st.sampled_from([0.1, 1.0, 8.0]))

    def normal(*shape):
        return scale * torch.randn(*shape, generator=generator, dtype=torch.float64)

    ids_N = torch.tensor([draw(st.integers(0, v - 1)) for _ in range(n)])
    kept_sets = []
    for token in ids_N.tolist():
        others = draw(st.sets(st.integers(0, v - 1)))
        # In any order: a server may send them so.
        kept_sets.append(draw(st.permutations(sorted(others | {token}))))
    return {
        "hidden_NH": normal(n, width),
        "head": (normal(v, width), normal(v)),
        "reference": (normal(n, width), (normal(v, width), normal(v))),
        "ids_N": ids_N,
        "kept_sets": kept_sets,
        "temperature": draw(st.sampled_from([1.0, 0.6])),
        "chunk_elements": draw(st.sampled_from([1, 2 * v, 10**6])),
    }


def as_kept(kept_sets):
    sizes_N = torch.tensor([len(kept) for kept in kept_sets])
    return KeptSets(sizes_N, torch.tensor([token for kept in kept_sets for token in kept]))


@settings(max_examples=150, deadline=None)
@given(cases(), st.integers(0, 2**31))
def test_columns_and_gradients_are_those_of_the_renormalized_policy(case, seed):
    leaves = [case["hidden_NH"], *case["head"]]
    for leaf in leaves:
        leaf.requires_grad_(True)
    hidden_NH, weight_VH, bias_V = leaves
    temperature = case["temperature"]
    columns = head_columns(
        hidden_NH,
        (weight_VH, bias_V),
        case["ids_N"],
        requested=REQUESTED,
        reference=case["reference"],
        kept=as_kept(case["kept_sets"]),
        temperature=temperature,
        chunk_elements=case["chunk_elements"],
    )
    reference_NH, (reference_VH, reference_bias_V) = case["reference"]
    slow = slow_columns(
        (hidden_NH @ weight_VH.T + bias_V) / temperature,
        (reference_NH @ reference_VH.T + reference_bias_V) / temperature,
        case["ids_N"],
        case["kept_sets"],
    )
    for name, expected_N in slow.items():
        torch.testing.assert_close(columns[name], expected_N, atol=1e-9, rtol=1e-9, msg=name)
    factors = torch.randn(len(WITH_GRADIENT), len(hidden_NH), generator=torch.Generator().manual_seed(seed)).double()
    totals = [
        sum((factor_N * by_name[name]).sum() for factor_N, name in zip(factors, WITH_GRADIENT, strict=True))
        for by_name in (columns, slow)
    ]
    gradients, expected = (torch.autograd.grad(total, leaves, allow_unused=True) for total in totals)
    for gradient, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, other, atol=1e-8, rtol=1e-8)


def test_tokens_that_no_policy_draws_are_left_out_of_a_kept_set_too():
    """A padded vocabulary has a bias of -inf, and a set that names such a token has no mass on it."""
    weight_VH = torch.randn(4, 2, dtype=torch.float64)
    bias_V = torch.tensor([0.0, 0.5, -torch.inf, 0.0], dtype=torch.float64)
    hidden_NH = torch.randn(1, 2, dtype=torch.float64, requires_grad=True)
    columns = head_columns(
        hidden_NH,
        (weight_VH, bias_V),
        torch.tensor([1]),
        requested=("kl", "entropy"),
        reference=(hidden_NH.detach(), (weight_VH, bias_V)),
        kept=as_kept([[0, 1, 2]]),
        temperature=1.0,
        chunk_elements=100,
    )
    (gradient_NH,) = torch.autograd.grad(columns["kl"].sum(), [hidden_NH])
    assert bool(torch.isfinite(gradient_NH).all())
    logp_V = (hidden_NH.detach() @ weight_VH.T + bias_V).log_softmax(-1)[0]
    kept_mass = logp_V[[0, 1]].exp().sum()
    # Policy and reference are one, so that the KL is what the truncation takes from the reference.
    torch.testing.assert_close(columns["kl"].detach(), -kept_mass.log()[None])


@pytest.mark.parametrize("share_prompt", [True, False])
def test_a_pass_over_a_padded_batch_finds_the_set_of_each_token(share_prompt):
    """Rows of several prompts, in reading order, whether or not a prompt is computed once for its rows."""
    model = llama()
    inputs, rows = batch()
    generator = torch.Generator().manual_seed(1)
    tokens = [int(token) for _, completion in rows for token in completion]
    kept_sets = []
    for token in tokens:
        others = torch.randperm(V, generator=generator)[: int(torch.randint(1, V, (1,), generator=generator))]
        kept_sets.append(sorted({token, *others.tolist()}))
    options = PassOptions(temperature=0.7, chunk_elements=7 * V, share_prompt=share_prompt)
    reference = Reference(llama(seed=3), options).forward_pass(**inputs)
    columns = token_pass(
        model,
        **inputs,
        temperature=0.7,
        chunk_elements=7 * V,
        share_prompt=share_prompt,
        kl=True,
        reference=reference,
        kept=as_kept(kept_sets),
    )
    logits_NV = torch.cat(naive_logits(model, rows, 0.7)).detach()
    reference_NV = torch.cat(naive_logits(llama(seed=3), rows, 0.7)).detach()
    slow = slow_columns(logits_NV, reference_NV, torch.tensor(tokens), kept_sets)
    mask_BT = inputs["mask_BT"].bool()
    torch.testing.assert_close(columns.logp_BT[mask_BT].detach(), slow["logp"], atol=1e-10, rtol=0)
    torch.testing.assert_close(columns.kl_BT[mask_BT].detach(), slow["kl"], atol=1e-10, rtol=0)


def test_sets_of_another_number_of_positions_are_refused():
    inputs, _ = batch()
    kept = as_kept([[0]])
    with pytest.raises(ValueError, match=r"1 kept sets for \d+ positions"):
        token_pass(llama(), **inputs, temperature=1.0, chunk_elements=V, kept=kept)


def rollout(ids, kept_sets, trained=()):
    prompt = Prompt(problem=Problem(id="p", text="", answer=""), text="", token_ids=(1,))
    return Rollout(
        prompt=prompt,
        group_id=0,
        completion_ids=tuple(ids),
        logps=(0.0,) * len(ids),
        versions=(0,) * len(ids),
        stop_reason="eos",
        text="",
        trained=trained,
        kept=as_kept(kept_sets),
    )


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_only_sets_that_have_their_token_are_accepted(data):
    ids = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=6))
    # Duplicates too, as a faulty server may send: another set's token must not count for this one.
    kept_sets = [data.draw(st.lists(st.integers(0, 5), max_size=5)) for _ in ids]
    missing = [n for n, (token, kept) in enumerate(zip(ids, kept_sets, strict=True)) if token not in kept]
    if not missing:
        assert rollout(ids, kept_sets).kept is not None
        return
    with pytest.raises(ValueError, match=f"truncated sampling: the kept set of token {missing[0]} "):
        rollout(ids, kept_sets)


def test_sets_are_of_the_policys_tokens_alone():
    assert rollout([4, 9, 5], [[4], [5, 6]], trained=(True, False, True)).kept is not None
    with pytest.raises(ValueError, match="3 kept sets for 2 tokens"):
        rollout([4, 9, 5], [[4], [9], [5, 6]], trained=(True, False, True))
    with pytest.raises(ValueError, match="sizes of the kept sets add up to 3, and there are 2 ids"):
        kept = KeptSets(torch.tensor([1, 2]), torch.tensor([4, 5]))
        Rollout(**{**{f: getattr(rollout([4, 5], [[4], [5]]), f) for f in Rollout.__slots__}, "kept": kept})
