"""Canonical answers, records to scores, and the log-probs of choices against dense float64 formulas."""

import dataclasses
import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kl_comedy.config import ModelConfig
from kl_comedy.config.schema import SuiteConfig
from kl_comedy.errors import UserError
from kl_comedy.evaluation import EvalSet, EvalSettings, evaluate, likelihood
from kl_comedy.evaluation.likelihood import ChoiceScorer, ChoiceSet, tokenize_choices
from kl_comedy.evaluation.scores import canonical, check_ks, default_ks, score_choices, score_completions
from kl_comedy.models import load_model, token_pass
from kl_comedy.records import Problem, Prompt
from kl_comedy.rollouts import Sampling
from kl_comedy.statistics import clustered_interval
from kl_comedy.training.distributed import SINGLE_PROCESS, Ranks


@pytest.mark.parametrize(
    "texts",
    [
        ["\\boxed{\\frac{1}{2}}", "it is \\boxed{0.5}.", "#### 1/2", "\\boxed{\\dfrac12}", "x = 0.50"],
        ["\\boxed{1,000}", "A: $1,000", "\\boxed{\\text{1000}}"],
        ["\\boxed{\\left( 3, \\frac{\\pi}{2} \\right)}", "\\boxed{(3,\\frac{\\pi}{2})}"],
        ["\\boxed{50\\%}", "\\boxed{50}", "#### 50"],
        ["\\boxed{-\\frac{3}{4}}", "\\boxed{-3/4}"],
    ],
    ids=["a half", "a thousand", "a pair", "percent", "negative"],
)
def test_one_answer_written_differently_votes_together(texts):
    assert len({canonical(text, "math") for text in texts}) == 1


def test_different_answers_do_not_vote_together():
    assert canonical("\\boxed{3}", "math") != canonical("\\boxed{4}", "math")


@pytest.mark.parametrize(
    ("text", "form", "answer"),
    [
        ("I do not know", "math", None),
        ("3+4=7;7+5=12", "number", "12"),
        ("Sure.\nParis!", "text", "paris"),
        ("", "text", None),
        ("<answer></answer>", "answer_tag", None),
    ],
)
def test_the_answer_in_a_text(text, form, answer):
    assert canonical(text, form) == answer


def test_endless_boxes_cost_little():
    assert canonical("\\boxed{" * 100_000, "math") is None


def test_an_unknown_form_of_answers_is_refused():
    with pytest.raises(UserError):
        canonical("x", "maths")


@given(st.text(alphabet="\\boxed{}0123456789/.$= \n#A:<answer>-%", max_size=200))
def test_hostile_text_raises_nothing(text):
    for form in ("math", "number", "letter", "text", "answer_tag"):
        assert canonical(text, form) != "", form


def row(index, correct, answer="1", *, stop="eos", status="ok"):
    record = {"index": index, "correct": correct, "answer": answer, "stop_reason": stop, "status": status}
    return {**record, "tokens": 4, "reward": float(correct)}


COMPLETIONS = [
    row(0, True),
    row(0, False, "2"),
    row(0, False, "2"),
    row(0, True),
    row(1, False, None, stop="length", status="unparseable"),
    row(1, False, "3"),
    row(1, True),
    row(1, True),
]
"""Two problems, four samples of each, half of them correct."""


def test_scores_of_completions():
    result = score_completions("s", COMPLETIONS, ks=(1, 2, 4))
    assert result.problems == 2
    assert result.samples == 4
    scores = result.row()
    assert scores["accuracy"] == 0.5
    assert scores["pass@1"] == 0.5
    assert scores["accuracy_low"] < 0.5 < scores["accuracy_high"]
    assert scores["pass@4"] == 1.0
    # Of the six pairs of a problem's samples, one has no correct one.
    assert scores["pass@2"] == pytest.approx(5 / 6)
    # The votes of the first problem are a tie of a correct and a wrong answer.
    assert scores["maj@4"] == pytest.approx((0.5 + 1.0) / 2)
    assert scores["maj@4_ties"] == 0.5
    assert scores["truncated_share"] == 1 / 8
    assert scores["unparseable_share"] == 1 / 8
    assert scores["unanswered_share"] == 1 / 8


def test_the_length_of_completions_is_a_metric():
    assert score_completions("s", COMPLETIONS, ks=()).metrics()["eval/s/tokens"] == 4


def test_every_problem_must_have_as_many_samples():
    with pytest.raises(UserError, match="different numbers"):
        score_completions("s", COMPLETIONS[1:], ks=())


def test_the_ks_of_pass_at_k():
    assert check_ks([4, 1, 4], 4) == (1, 4)
    assert default_ks(8) == (2, 4, 8)


def test_a_k_above_the_number_of_samples_is_refused():
    with pytest.raises(UserError, match="--k: got 8; allowed: 1 to 4"):
        check_ks([1, 8], 4)


def test_scores_of_choices():
    rows = [{"correct": True, "correct_norm": False}, {"correct": True, "correct_norm": True}]
    scores = score_choices("s", rows).row()
    assert scores["accuracy"] == 1.0
    assert scores["accuracy_norm"] == 0.5
    assert scores["accuracy_low"] < 1


def test_scores_of_a_single_choice():
    single = score_choices("s", [{"correct": True, "correct_norm": False}])
    assert single.metrics() == {"eval/s/accuracy": 1.0, "eval/s/accuracy_norm": 0.0}, "one problem has no interval"
    assert single.line() == "accuracy 1.000 (1 problems)"


class Backend:
    """One completion per group member, with rewards by position; remembers how it was called."""

    def generate(self, prompts, **settings):
        self.settings = settings
        rollouts = []
        for prompt in prompts:
            rollouts += [prompt] * settings["group_size"]
        return rollouts


class Rewards:
    """Completions of one token, two, three and so on with these rewards; the first is truncated."""

    def __init__(self, values):
        self.values = values

    def score(self, rollouts):
        rows = []
        for n, value in enumerate(self.values[: len(rollouts)]):
            stop_reason = "length" if n == 0 else "eos"
            rollout = SimpleNamespace(drawn_ids=[0] * (n + 1), stop_reason=stop_reason)
            rows.append(SimpleNamespace(rollout=rollout, reward=SimpleNamespace(value=value, gold=None)))
        return rows


def evaluated(values, samples, **settings):
    prompts = [Prompt(problem=Problem(id=str(n), text="", answer=""), text="", token_ids=(1,)) for n in range(3)]
    backend = Backend()
    result = evaluate(
        backend,
        Rewards(values),
        EvalSet(name="s", prompts=prompts, **settings),
        EvalSettings(
            samples=samples,
            sampling=Sampling(temperature=1.0, max_new_tokens=4),
            measure=lambda rows: {"kl/x": float(len(rows))},
        ),
        seed=7,
    )
    return result, backend.settings


def test_a_set_has_the_clustered_interval_of_its_rewards():
    values = [1.0, 1.0, 0.0, 1.0, 0.0, 0.0]
    result, settings = evaluated(values, 2)
    interval = clustered_interval([values[:2], values[2:4], values[4:]], "wilson")
    assert result.metrics() == {
        "eval/s/reward": 0.5,
        "eval/s/reward_half_width": (interval.high - interval.low) / 2,
        "eval/s/length": 3.5,
        "eval/s/truncated_share": pytest.approx(1 / 6),
        "eval/s/kl/x": 6.0,
    }
    assert result.line() == f"reward 0.500 [{interval.low:.3f}, {interval.high:.3f}] (3 problems, length 3.5)"
    assert settings["seed"] == 7
    assert settings["group_size"] == 2
    assert settings["sampling"].temperature == 1.0


def test_rewards_that_are_not_all_0_or_1_have_students_interval():
    result, _ = evaluated([0.5, 0.1, 0.3], 1)
    assert result.values["reward"] == clustered_interval([[0.5], [0.1], [0.3]], "t")


def test_a_set_may_have_a_scorer_and_sampling_of_its_own():
    greedy = Sampling(temperature=0.0, max_new_tokens=9)
    result, settings = evaluated([0.0] * 3, 1, scorer=Rewards([1.0] * 3), sampling=greedy)
    assert result.row()["reward"] == 1.0
    assert settings["sampling"] is greedy


# --- log-probs of choices ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny():
    return load_model(ModelConfig(source="pocket", options={"preset": "tiny", "warmstart_steps": 5}))


def prompt_of(loaded, text, choices=()):
    ids = tuple(loaded.tokenizer(text)["input_ids"])
    return Prompt(problem=Problem(id=text, text=text, answer="A", meta={"choices": choices}), text=text, token_ids=ids)


TEXTS = SuiteConfig(name="s", kind="likelihood", score="texts", delimiter="")


def choices_of(loaded):
    problems = {"12+34=": ["46", "47;", "1"], "1+2+3=": ["6", "123"], "7-7=": ["0", "14"]}
    prompts = [prompt_of(loaded, text, choices) for text, choices in problems.items()]
    return tokenize_choices(TEXTS, prompts, loaded, template="plain")


def test_log_probs_are_those_of_the_dense_float64_model(tiny):
    choices = choices_of(tiny)
    expected = dense_log_probs(tiny, choices)
    for budget in (1, 40, 10_000):
        scorer = ChoiceScorer(loaded=tiny, budget=budget, chunk_elements=10**6, ranks=SINGLE_PROCESS)
        logps = scorer.log_probs(choices)
        assert [len(row) for row in logps] == [3, 2, 2]
        assert flat(logps) == pytest.approx(expected, abs=2e-5), budget


def flat(rows):
    return list(itertools.chain.from_iterable(rows))


def dense_log_probs(loaded, choices):
    """The log-prob of each choice by itself, in float64; the model is in float32 again afterwards."""
    model = loaded.model.double()
    logps = []
    try:
        for index, ids in choices.rows:
            prompt_ids = choices.prompts[index].token_ids
            with torch.no_grad():
                logp_TV = model(input_ids=torch.tensor([[*prompt_ids, *ids]])).logits[0].log_softmax(-1)
            # The distribution of a token is at the position before it.
            first = len(prompt_ids) - 1
            logps.append(sum(float(logp_TV[first + t, token]) for t, token in enumerate(ids)))
    finally:
        loaded.model.float()
    return logps


def test_the_likeliest_choice_is_picked_whole_and_per_character(tiny):
    choices = choices_of(tiny)
    first, second, third = choices.records([[-4.0, -3.0, -1.5], [-2.0, -3.0], [-1.0, -1.0]], first=5)
    assert first["index"] == 5
    assert first["picked"] == "C"
    assert first["picked_norm"] == "B"
    assert first["correct"] is False
    assert second["picked"] == "A"
    assert second["picked_norm"] == "B"
    assert second["correct"] is True
    assert second["correct_norm"] is False
    assert third["index"] == 7
    assert third["picked"] == "A", "of equals the first"


def test_choices_that_cannot_be_compared_are_refused(tiny):
    choices = choices_of(tiny)
    letters = dataclasses.replace(TEXTS, score="letters")
    with pytest.raises(UserError, match="cannot encode"):  # the pocket tokenizer has no letters
        tokenize_choices(letters, choices.prompts, tiny, template="plain")
    with pytest.raises(UserError, match="no separate tokens for"):
        tokenize_choices(TEXTS, [prompt_of(tiny, "1+1=", ["", "2"])], tiny, template="plain")


class Gathered(Exception):
    """Raised with what a process would send to the others."""


class OneOfSeveral:
    """A process of several that computes its part and then stops."""

    def __init__(self, ranks):
        self.split = ranks.split

    def gather(self, item):
        raise Gathered(item)


@pytest.mark.parametrize(("size", "chunk"), [(2, None), (3, 1), (11, 2)])
def test_processes_divide_the_passes_and_make_equally_many(tiny, monkeypatch, size, chunk):
    choices = choices_of(tiny)
    scorer = ChoiceScorer(loaded=tiny, budget=20, chunk_elements=10**6, ranks=SINGLE_PROCESS)
    alone = flat(scorer.log_probs(choices, chunk=chunk))
    passes = []

    def counted(*args, **kwargs):
        passes[-1] += 1
        return token_pass(*args, **kwargs)

    monkeypatch.setattr(likelihood, "token_pass", counted)
    parts = []
    for rank in range(size):
        passes.append(0)
        with pytest.raises(Gathered) as stopped:
            part = OneOfSeveral(Ranks(rank=rank, size=size))
            dataclasses.replace(scorer, ranks=part).log_probs(choices, chunk=chunk)
        parts.append(stopped.value.args[0])
    assert len(set(passes)) == 1
    assert passes[0] == math.ceil(len(choices.batches(20, chunk)) / size)
    assert sorted(flat(parts)) == list(range(len(alone)))
    for part in parts:
        for row, logp in part.items():
            assert logp == alone[row]


@given(
    sizes=st.lists(
        st.tuples(st.integers(1, 9), st.lists(st.integers(1, 5), min_size=1, max_size=4)), min_size=1, max_size=9
    ),
    budget=st.integers(1, 60),
    chunk=st.one_of(st.none(), st.integers(1, 5)),
)
def test_a_chunk_is_batched_as_if_it_were_alone(sizes, budget, chunk):
    def choice_set(part):
        problem = Problem(id="p", text="", answer="A")
        prompts = []
        rows = []
        for index, (prompt_length, choice_lengths) in enumerate(part):
            prompts.append(Prompt(problem=problem, text="", token_ids=(0,) * prompt_length))
            rows += [(index, (0,) * length) for length in choice_lengths]
        return ChoiceSet(name="", prompts=prompts, texts=[], rows=rows)

    whole = choice_set(sizes)
    problems_per_chunk = len(sizes) if chunk is None else chunk
    batches = []
    first_row = 0
    for start in range(0, len(sizes), problems_per_chunk):
        part = choice_set(sizes[start : start + problems_per_chunk])
        for batch in part.batches(budget):
            batches.append([first_row + row for row in batch])
        first_row += len(part.rows)
    assert whole.batches(budget, chunk) == batches
    assert sorted(flat(batches)) == list(range(len(whole.rows)))
    for batch in batches:
        # As the pass pads: prompts to the longest prompt, choices to the longest choice, of whichever rows.
        prompt = max(len(whole.prompt_ids(row)) for row in batch)
        choice = max(len(whole.rows[row][1]) for row in batch)
        if len(batch) > 1:
            assert len(batch) * (prompt + choice) <= budget
