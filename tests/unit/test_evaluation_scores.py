"""Canonical answers, records to scores, and the log-probs of choices against dense float64 formulas."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kl_comedy.config import ModelConfig
from kl_comedy.data.prompts import continuation_ids
from kl_comedy.errors import UserError
from kl_comedy.evaluation import likelihood
from kl_comedy.evaluation.evaluate import Shard, parse_shard
from kl_comedy.evaluation.likelihood import ChoicePasses, Spelled, spell
from kl_comedy.evaluation.scores import canonical, check_ks, default_ks, score_compared, score_generated
from kl_comedy.models import load_model
from kl_comedy.models.logprobs import token_pass
from kl_comedy.records import Problem, Prompt
from kl_comedy.training.distributed import Ranks


@pytest.mark.parametrize(
    "same",
    [
        ["\\boxed{\\frac{1}{2}}", "it is \\boxed{0.5}.", "#### 1/2", "\\boxed{\\dfrac12}", "x = 0.50"],
        ["\\boxed{1{,}000}".replace("{,}", ","), "A: $1,000", "\\boxed{\\text{1000}}"],
        ["\\boxed{\\left( 3, \\frac{\\pi}{2} \\right)}", "\\boxed{(3,\\frac{\\pi}{2})}"],
        ["\\boxed{50\\%}", "\\boxed{50}", "#### 50"],
        ["\\boxed{-\\frac{3}{4}}", "\\boxed{-3/4}"],
    ],
)
def test_one_answer_written_differently_votes_together(same):
    assert len({canonical(text, "math") for text in same}) == 1


def test_different_answers_stay_apart_and_no_answer_is_none():
    assert canonical("\\boxed{3}", "math") != canonical("\\boxed{4}", "math")
    assert canonical("I do not know", "math") is None
    assert canonical("3+4=7;7+5=12", "number") == "12"
    assert canonical("Sure.\nParis!", "text") == "paris" and canonical("", "text") is None
    assert canonical("<answer></answer>", "answer_tag") is None
    with pytest.raises(UserError):
        canonical("x", "maths")


@given(st.text(alphabet="\\boxed{}0123456789/.$= \n#A:<answer>-%", max_size=200))
def test_hostile_text_is_read_without_fail(text):
    for form in ("math", "number", "letter", "text", "answer_tag"):
        found = canonical(text, form)
        assert found is None or found


def test_endless_boxes_cost_little():
    assert canonical("\\boxed{" * 100_000, "math") is None


def row(index, correct, answer="1", *, stop="eos", status="ok"):
    return {
        "index": index,
        "correct": correct,
        "answer": answer,
        "stop_reason": stop,
        "status": status,
        "tokens": 4,
        "reward": float(correct),
    }


def test_scores_of_completions():
    rows = [
        row(0, True),
        row(0, False, "2"),
        row(0, False, "2"),
        row(0, True),
        row(1, False, None, stop="length", status="unparseable"),
        row(1, False, "3"),
        row(1, True),
        row(1, True),
    ]
    found = score_generated("s", rows, ks=(1, 2, 4)).values
    assert found["accuracy"] == found["pass@1"] == 0.5 and found["accuracy_low"] < 0.5 < found["accuracy_high"]
    assert found["pass@4"] == 1.0 and found["pass@2"] == pytest.approx(5 / 6)
    assert found["maj@4"] == pytest.approx((0.5 + 1.0) / 2) and found["maj@4_ties"] == 0.5
    assert found["truncated_share"] == found["unparseable_share"] == found["unanswered_share"] == 1 / 8
    assert score_generated("s", rows, ks=()).metrics()["eval/s/tokens"] == 4


def test_more_than_was_drawn_is_refused():
    with pytest.raises(UserError, match="--k: got 8; allowed: 1 to 4"):
        check_ks([1, 8], 4)
    assert check_ks([4, 1, 4], 4) == (1, 4) and default_ks(8) == (2, 4, 8)
    with pytest.raises(UserError, match="different numbers"):
        score_generated("s", [row(0, True), row(0, True), row(1, True)], ks=())


def test_scores_of_choices():
    rows = [{"correct": True, "correct_norm": False}, {"correct": True, "correct_norm": True}]
    found = score_compared("s", rows).values
    assert (found["accuracy"], found["accuracy_norm"]) == (1.0, 0.5)


def test_shards_part_the_chunks(monkeypatch):
    parts = [[chunk for chunk in range(7) if parse_shard(f"{n}/3").takes(chunk)] for n in range(3)]
    assert sorted(chunk for part in parts for chunk in part) == list(range(7))
    for text in ("3/3", "1", "a/b", "-1/2"):
        with pytest.raises(UserError, match="--shard"):
            parse_shard(text)
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    assert parse_shard(None) == Shard()
    monkeypatch.setenv("SLURM_PROCID", "1")
    monkeypatch.setenv("SLURM_NTASKS", "4")
    assert parse_shard(None) == Shard(index=1, count=4)


@pytest.fixture(scope="module")
def tiny():
    return load_model(ModelConfig(source="pocket", options={"preset": "tiny"}))


def prompt_of(loaded, text):
    ids = tuple(loaded.tokenizer(text)["input_ids"])
    return Prompt(problem=Problem(id=text, text=text, answer="A"), text=text, token_ids=ids)


def asked_of(loaded):
    prompts = [prompt_of(loaded, text) for text in ("12+34=", "1+2+3=", "7-7=")]
    return prompts, [["46", "47;", "1"], ["6", "123"], ["0", "14"]]


@pytest.mark.parametrize("budget", [1, 40, 10_000])
def test_choices_have_the_model_s_own_log_probs(tiny, budget):
    prompts, choices = asked_of(tiny)
    spelled = spell(tiny, prompts, choices, special=True)
    found = ChoicePasses(loaded=tiny, budget=budget, chunk_elements=10**6)(spelled)
    model = tiny.model.double()
    try:
        for prompt, texts, values in zip(prompts, choices, found, strict=True):
            for text, value in zip(texts, values, strict=True):
                ids = continuation_ids(prompt, text, tiny.tokenizer, special=True)
                whole = torch.tensor([[*prompt.token_ids, *ids]])
                with torch.no_grad():
                    logp = model(input_ids=whole).logits[0].log_softmax(-1)
                n = len(prompt.token_ids)
                dense = sum(float(logp[n + t - 1, token]) for t, token in enumerate(ids))
                assert value == pytest.approx(dense, abs=2e-5)
    finally:
        tiny.model.float()


class Told(Exception):
    """What a process would have told the others."""


class Part:
    """One of several processes that does its part and then stops."""

    def __init__(self, ranks):
        self.split = ranks.split

    def gather(self, item):
        raise Told(item)


@pytest.mark.parametrize("size", [2, 3, 11])
@pytest.mark.parametrize("chunk", [None, 1, 2])
def test_processes_part_the_passes_and_make_equally_many(tiny, monkeypatch, size, chunk):
    spelled = spell(tiny, *asked_of(tiny), special=True)
    passes = ChoicePasses(loaded=tiny, budget=20, chunk_elements=10**6)
    alone = [logp for row in passes(spelled, chunk=chunk) for logp in row]
    counts = []

    def counted(*args, **kwargs):
        counts[-1] += 1
        return token_pass(*args, **kwargs)

    monkeypatch.setattr(likelihood, "token_pass", counted)
    told = []
    for rank in range(size):
        counts.append(0)
        with pytest.raises(Told) as stopped:
            dataclasses.replace(passes, ranks=Part(Ranks(rank=rank, size=size)))(spelled, chunk=chunk)
        told.append(stopped.value.args[0])
    assert len(set(counts)) == 1 and counts[0] == math.ceil(len(spelled.batches(20, chunk)) / size)
    assert sorted(position for part in told for position in part) == list(range(len(alone)))
    assert all(alone[position] == logp for part in told for position, logp in part.items())


@given(
    sizes=st.lists(
        st.tuples(st.integers(1, 9), st.lists(st.integers(1, 5), min_size=1, max_size=4)), min_size=1, max_size=9
    ),
    budget=st.integers(1, 60),
    chunk=st.one_of(st.none(), st.integers(1, 5)),
)
def test_a_chunk_is_batched_as_if_it_were_alone(sizes, budget, chunk):
    def spelled(part):
        problem = Problem(id="p", text="", answer="A")
        prompts = [Prompt(problem=problem, text="", token_ids=(0,) * before) for before, _ in part]
        rows = [(index, (0,) * size) for index, (_, after) in enumerate(part) for size in after]
        return Spelled(prompts=prompts, rows=rows)

    whole, size = spelled(sizes), chunk or len(sizes)
    batches, first = [], 0
    for start in range(0, len(sizes), size):
        part = spelled(sizes[start : start + size])
        batches += [[first + position for position in batch] for batch in part.batches(budget)]
        first += len(part.rows)
    assert whole.batches(budget, chunk) == batches
    assert sorted(position for batch in batches for position in batch) == list(range(len(whole.rows)))
    assert all(len(batch) == 1 or whole.padded(batch) <= budget for batch in batches)


def test_a_choice_without_tokens_of_its_own_is_refused(tiny):
    with pytest.raises(UserError, match="no tokens for"):
        continuation_ids(prompt_of(tiny, "1+1="), "", tiny.tokenizer, special=True)
