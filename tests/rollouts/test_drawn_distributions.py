"""What every sampler draws, for every way of truncating, against probabilities of pairs of tokens computed by hand.

A count of a token with probability p in n draws is binomial. Each count must lie within its exact tails of
``FALSE_ALARM / (2 x outcomes)``, so that a right sampler fails once in a billion settings; seeds are fixed besides.
"""

import itertools
import math
from collections import Counter

import pytest
import torch
from scipy.stats import binom

from engine_policies import PROMPT, llama
from faulty_servers import draw
from kl_comedy.config.schema import RolloutConfig
from kl_comedy.rollouts import build_hf

DRAWS = 2000
FALSE_ALARM = 1e-9
TEMPERATURE = 0.8
SAMPLERS = ("hf", "library", "hf_server", "vllm_server")
CASES = {
    "whole": {},
    "hot": {"temperature": 2.0},
    "top_k": {"top_k": 4},
    "top_p": {"top_p": 0.6},
    "min_p": {"min_p": 0.3},
    "top_k, then top_p of what is left": {"top_k": 5, "top_p": 0.7},
    "top_p, then min_p": {"top_p": 0.9, "min_p": 0.25},
    "top_k and min_p": {"top_k": 3, "min_p": 0.5},
}

pytestmark = pytest.mark.usefixtures("short_polls")


def truncated(logits, *, temperature=TEMPERATURE, top_k=0, top_p=1.0, min_p=0.0):
    """The probability of each token: temperature, then top_k, top_p and min_p, each of what the one before left."""
    weights = {token: math.exp(logit / temperature) for token, logit in enumerate(logits)}
    if top_k:
        likeliest = sorted(weights, key=weights.get, reverse=True)[:top_k]
        weights = {token: weights[token] for token in likeliest}
    if top_p < 1:
        # The fewest likeliest tokens that have the share top_p together.
        total = sum(weights.values())
        kept = {}
        for token in sorted(weights, key=weights.get, reverse=True):
            if sum(kept.values()) >= top_p * total:
                break
            kept[token] = weights[token]
        weights = kept
    if min_p:
        most = max(weights.values())
        weights = {token: weight for token, weight in weights.items() if weight >= min_p * most}
    total = sum(weights.values())
    return {token: weight / total for token, weight in weights.items()}


def logits_after(model, ids):
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).logits[0, -1].tolist()


@pytest.fixture
def uneven(policy):
    """A policy whose tokens are not about equally likely; it is the one that servers and clients of a test have."""
    model = llama(tied=False)
    with torch.no_grad():
        model.lm_head.weight.mul_(8)
    object.__setattr__(policy, "model", model)  # LoadedModel is frozen
    return policy


@pytest.fixture(params=SAMPLERS)
def sampler(request, uneven, serve, connect):
    if request.param in ("hf", "library"):
        options = {"loop": "library"} if request.param == "library" else {}
        return build_hf(RolloutConfig(batch_sequences=DRAWS, options=options), loaded=uneven)
    server = serve(batch_sequences=DRAWS)
    return connect(server, backend=request.param, batch_sequences=DRAWS, request_timeout_s=60)


def pairs_of(model, settings):
    """The exact probability of every pair of a first and a second token; an end token has no second."""
    pairs = {}
    for first, p_first in truncated(logits_after(model, PROMPT.token_ids), **settings).items():
        if first == model.config.eos_token_id:
            pairs[first,] = p_first
            continue
        for second, p_second in truncated(logits_after(model, [*PROMPT.token_ids, first]), **settings).items():
            pairs[first, second] = p_first * p_second
    return pairs


# Another client asks the same server, and the library's loop has the same truncations: two cases each.
FEW = ("top_k, then top_p of what is left", "top_p, then min_p")
PAIRS = [(sampler, name) for sampler in SAMPLERS for name in (CASES if sampler.startswith("hf") else FEW)]


@pytest.mark.parametrize(("sampler", "name"), PAIRS, indirect=["sampler"])
def test_pairs_of_tokens_are_drawn_as_often_as_the_truncated_policy_says(sampler, uneven, name):
    settings = {"temperature": TEMPERATURE} | CASES[name]
    expected = pairs_of(uneven.model, settings)
    rows = draw(sampler, [PROMPT], group_size=DRAWS, max_new_tokens=2, seed=11, **settings)
    counts = Counter(row.completion_ids for row in rows)
    assert set(counts) <= set(expected), "a token that is cut off was drawn"
    tail = FALSE_ALARM / (2 * len(expected))
    for pair, probability in expected.items():
        assert binom.cdf(counts[pair], DRAWS, probability) > tail, (pair, counts[pair], DRAWS * probability)
        assert binom.sf(counts[pair] - 1, DRAWS, probability) > tail, (pair, counts[pair], DRAWS * probability)
    for row in rows[:50]:
        assert sum(row.logps) == pytest.approx(math.log(expected[row.completion_ids]), abs=1e-4)


CUTS = [name for name, settings in CASES.items() if settings.keys() - {"temperature"}]
RECORDERS = ("hf", "library", "hf_server")


@pytest.mark.parametrize(("sampler", "name"), itertools.product(RECORDERS, CUTS), indirect=["sampler"])
def test_the_sets_from_which_tokens_were_drawn_come_with_them(sampler, uneven, name):
    """At each token the set that a truncation by hand keeps, and the log-prob of the token among these."""
    settings = {"temperature": TEMPERATURE} | CASES[name]
    rows = draw(sampler, [PROMPT] * 2, group_size=12, max_new_tokens=5, seed=3, records_kept=True, **settings)
    assert len({len(row.completion_ids) for row in rows}) > 1, "completions that leave a batch early"
    for row in rows:
        kept_sets = row.kept.ids_M.split(row.kept.sizes_N.tolist())
        for position, (token, logp) in enumerate(zip(row.completion_ids, row.logps, strict=True)):
            before = [*PROMPT.token_ids, *row.completion_ids[:position]]
            expected = truncated(logits_after(uneven.model, before), **settings)
            assert sorted(kept_sets[position].tolist()) == sorted(expected)
            assert logp == pytest.approx(math.log(expected[token]), abs=1e-4)


@pytest.mark.parametrize("sampler", RECORDERS, indirect=True)
def test_no_set_is_recorded_where_none_is_asked_for(sampler):
    assert all(row.kept is None for row in draw(sampler, [PROMPT], group_size=3, max_new_tokens=2, top_k=3))


def test_the_cases_tell_the_orders_of_truncation_apart(uneven):
    """top_p of the whole distribution keeps other tokens than top_p of what top_k left; and each cut cuts something."""
    logits = logits_after(uneven.model, PROMPT.token_ids)
    whole = truncated(logits)
    cut_in_order = truncated(logits, top_k=5, top_p=0.7)
    nucleus = truncated(logits, top_p=0.7)
    assert set(cut_in_order) != set(sorted(nucleus, key=nucleus.get, reverse=True)[:5])
    for name, settings in CASES.items():
        kept = truncated(logits, **{"temperature": TEMPERATURE} | settings)
        assert 1 < len(kept) < len(whole) or name in ("whole", "hot"), name


@pytest.mark.parametrize("seed", [0, 1])
def test_rows_prompts_and_seeds_are_independent(sampler, seed):
    """No two rows, groups of one prompt, positions or seeds share their random numbers."""
    rows = draw(sampler, [PROMPT, PROMPT], group_size=200, max_new_tokens=6, seed=seed, temperature=2.0)
    other = draw(sampler, [PROMPT, PROMPT], group_size=200, max_new_tokens=6, seed=seed + 7, temperature=2.0)
    assert rows == draw(sampler, [PROMPT, PROMPT], group_size=200, max_new_tokens=6, seed=seed, temperature=2.0)
    first, second = rows[:200], rows[200:]
    for left, right in ((first, second), (first, other[:200]), (second, other[200:]), (first, first[1:] + first[:1])):
        equal = sum(a.completion_ids[:1] == b.completion_ids[:1] for a, b in zip(left, right, strict=True))
        # Independent rows agree in the first token with probability sum p^2, which is below 0.5 here.
        assert binom.sf(equal - 1, 200, 0.5) > FALSE_ALARM
        assert equal > 0, "nor do they avoid each other"


@pytest.mark.parametrize("stop", [("8",), ("1", "+2"), ("=3", "9")])
def test_a_completion_ends_at_its_first_stop_string_and_nowhere_else(sampler, uneven, stop):
    rows = draw(sampler, [PROMPT], group_size=300, max_new_tokens=8, stop=stop, temperature=1.5)
    reasons = Counter()
    tokenizer = uneven.tokenizer
    for row in rows:
        ends = []
        for length in range(1, len(row.completion_ids) + 1):
            ids = list(row.completion_ids[:length])
            has_stop = any(text in tokenizer.decode(ids, skip_special_tokens=False) for text in stop)
            if ids[-1] == tokenizer.eos_token_id:
                ends.append((length, "eos"))
            elif has_stop:
                ends.append((length, "stop"))
        expected = ends[0] if ends else (8, "length")
        assert (len(row.completion_ids), row.stop_reason) == expected
        assert len(row.logps) == len(row.versions) == expected[0]
        reasons[row.stop_reason] += 1
    assert reasons["stop"] > 10
    assert reasons["length"] > 10
