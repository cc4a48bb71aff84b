"""Canonical answers, records to scores, and the log-probs of choices against dense float64 formulas."""

import dataclasses
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

SAME = [
    ["\\boxed{\\frac{1}{2}}", "it is \\boxed{0.5}.", "#### 1/2", "\\boxed{\\dfrac12}", "x = 0.50"],
    ["\\boxed{1{,}000}".replace("{,}", ","), "A: $1,000", "\\boxed{\\text{1000}}"],
    ["\\boxed{\\left( 3, \\frac{\\pi}{2} \\right)}", "\\boxed{(3,\\frac{\\pi}{2})}"],
    ["\\boxed{50\\%}", "\\boxed{50}", "#### 50"],
    ["\\boxed{-\\frac{3}{4}}", "\\boxed{-3/4}"],
]


def test_one_answer_written_differently_votes_together_and_different_ones_do_not():
    for texts in SAME:
        assert len({canonical(text, "math") for text in texts}) == 1
    assert canonical("\\boxed{3}", "math") != canonical("\\boxed{4}", "math")
    assert canonical("I do not know", "math") is None
    assert canonical("3+4=7;7+5=12", "number") == "12"
    assert canonical("Sure.\nParis!", "text") == "paris" and canonical("", "text") is None
    assert canonical("<answer></answer>", "answer_tag") is None
    assert canonical("\\boxed{" * 100_000, "math") is None, "endless boxes cost little"
    with pytest.raises(UserError):
        canonical("x", "maths")


@given(st.text(alphabet="\\boxed{}0123456789/.$= \n#A:<answer>-%", max_size=200))
def test_hostile_text_raises_nothing(text):
    for form in ("math", "number", "letter", "text", "answer_tag"):
        answer = canonical(text, form)
        assert answer is None or answer


def row(index, correct, answer="1", *, stop="eos", status="ok"):
    record = {"index": index, "correct": correct, "answer": answer, "stop_reason": stop, "status": status}
    return {**record, "tokens": 4, "reward": float(correct)}


def test_scores_of_completions():
    rows = [row(0, True), row(0, False, "2"), row(0, False, "2"), row(0, True)]
    rows += [row(1, False, None, stop="length", status="unparseable"), row(1, False, "3"), row(1, True), row(1, True)]
    result = score_completions("s", rows, ks=(1, 2, 4))
    scores = result.row()
    assert (result.problems, result.samples) == (2, 4)
    assert scores["accuracy"] == scores["pass@1"] == 0.5 and scores["accuracy_low"] < 0.5 < scores["accuracy_high"]
    assert scores["pass@4"] == 1.0 and scores["pass@2"] == pytest.approx(5 / 6)
    assert scores["maj@4"] == pytest.approx((0.5 + 1.0) / 2) and scores["maj@4_ties"] == 0.5
    assert scores["truncated_share"] == scores["unparseable_share"] == scores["unanswered_share"] == 1 / 8
    assert score_completions("s", rows, ks=()).metrics()["eval/s/tokens"] == 4
    with pytest.raises(UserError, match="different numbers"):
        score_completions("s", rows[1:], ks=())
    with pytest.raises(UserError, match="--k: got 8; allowed: 1 to 4"):
        check_ks([1, 8], 4)
    assert check_ks([4, 1, 4], 4) == (1, 4) and default_ks(8) == (2, 4, 8)


def test_scores_of_choices():
    rows = [{"correct": True, "correct_norm": False}, {"correct": True, "correct_norm": True}]
    scores = score_choices("s", rows).row()
    assert (scores["accuracy"], scores["accuracy_norm"]) == (1.0, 0.5) and scores["accuracy_low"] < 1
    single = score_choices("s", rows[:1])
    assert single.metrics() == {"eval/s/accuracy": 1.0, "eval/s/accuracy_norm": 0.0}, "one problem has no interval"
    assert single.line() == "accuracy 1.000 (1 problems)"


class Backend:
    """One completion per group member, with rewards by position; remembers how it was called."""

    def generate(self, prompts, **settings):
        self.settings = settings
        return [prompt for prompt in prompts for _ in range(settings["group_size"])]


class Rewards:
    def __init__(self, values):
        self.values = values

    def score(self, rollouts):
        return [
            SimpleNamespace(
                rollout=SimpleNamespace(completion_ids=[0] * (n + 1), stop_reason="length" if n == 0 else "eos"),
                reward=SimpleNamespace(value=value),
            )
            for n, value in enumerate(self.values[: len(rollouts)])
        ]


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
    assert (settings["seed"], settings["group_size"], settings["sampling"].temperature) == (7, 2, 1.0)
    graded = clustered_interval([[0.5], [0.1], [0.3]], "t")
    assert evaluated([0.5, 0.1, 0.3], 1)[0].values["reward"] == graded, "Student's interval unless all are 0 or 1"


def test_a_set_may_have_a_scorer_and_sampling_of_its_own():
    greedy = Sampling(temperature=0.0, max_new_tokens=9)
    result, settings = evaluated([0.0] * 3, 1, scorer=Rewards([1.0] * 3), sampling=greedy)
    assert result.row()["reward"] == 1.0 and settings["sampling"] is greedy


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
    values = []
    for budget in (1, 40, 10_000):
        scorer = ChoiceScorer(loaded=tiny, budget=budget, chunk_elements=10**6, ranks=SINGLE_PROCESS)
        logps = scorer.log_probs(choices)
        assert [len(row) for row in logps] == [3, 2, 2]
        values.append([logp for row in logps for logp in row])
    model = tiny.model.double()
    try:
        for position, (index, ids) in enumerate(choices.rows):
            prompt = choices.prompts[index]
            with torch.no_grad():
                dense = model(input_ids=torch.tensor([[*prompt.token_ids, *ids]])).logits[0].log_softmax(-1)
            n = len(prompt.token_ids)
            exact = sum(float(dense[n + t - 1, id]) for t, id in enumerate(ids))
            assert [each[position] for each in values] == pytest.approx([exact] * 3, abs=2e-5)
    finally:
        tiny.model.float()


def test_the_likeliest_choice_is_picked_whole_and_per_character(tiny):
    choices = choices_of(tiny)
    first, second, third = choices.records([[-4.0, -3.0, -1.5], [-2.0, -3.0], [-1.0, -1.0]], first=5)
    assert (first["index"], first["picked"], first["picked_norm"], first["correct"]) == (5, "C", "B", False)
    assert [second[key] for key in ("picked", "picked_norm", "correct", "correct_norm")] == ["A", "B", True, False]
    assert third["index"] == 7 and third["picked"] == "A", "of equals the first"
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
    alone = [logp for row in scorer.log_probs(choices, chunk=chunk) for logp in row]
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
    assert len(set(passes)) == 1 and passes[0] == math.ceil(len(choices.batches(20, chunk)) / size)
    assert sorted(row for part in parts for row in part) == list(range(len(alone)))
    assert all(alone[row] == logp for part in parts for row, logp in part.items())


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
        prompts = [Prompt(problem=problem, text="", token_ids=(0,) * before) for before, _ in part]
        rows = [(index, (0,) * size) for index, (_, after) in enumerate(part) for size in after]
        return ChoiceSet(name="", prompts=prompts, texts=[], rows=rows)

    whole, size = choice_set(sizes), chunk or len(sizes)
    batches, first = [], 0
    for start in range(0, len(sizes), size):
        part = choice_set(sizes[start : start + size])
        batches += [[first + row for row in batch] for batch in part.batches(budget)]
        first += len(part.rows)
    assert whole.batches(budget, chunk) == batches
    assert sorted(row for batch in batches for row in batch) == list(range(len(whole.rows)))
    for batch in batches:
        # As the pass pads: prompts to the longest prompt, choices to the longest choice, of whichever rows.
        prompt = max(len(whole.prompt_ids(row)) for row in batch)
        choice = max(len(whole.rows[row][1]) for row in batch)
        assert len(batch) == 1 or len(batch) * (prompt + choice) <= budget
