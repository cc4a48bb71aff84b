"""Which problems a run trains on: against the truth of drawn copies and near-copies; and how evaluation samples."""

import json
import random
from pathlib import Path

import pytest
import yaml

from kl_comedy.config import load_config
from kl_comedy.data import decontaminate
from kl_comedy.evaluation.suites import get_suite
from kl_comedy.records import Problem
from kl_comedy.training.problems import eval_sampling, load_problem_sets

TINY = Path(__file__).parents[1] / "support" / "tiny.yaml"
SUITES = {
    "bare": {"text": "{text}"},
    "instructions": {"text": "Solve this with care.\n\n{text}\n\nShow each step."},
    "choices": {"text": "{text}\n{options}\nAnswer:", "choices": True},
    "choices, bare": {"text": "{text}", "choices": True},
    "likelihood": {"text": "Question: {text}\nAnswer:", "choices": True, "kind": "likelihood"},
}
"""Suites that ask the same questions in other words."""


def question(number):
    """A question that no other number has."""
    return f"Ann has {number} boxes of {number + 3} eggs. How many eggs?"


def decorated(text, draw):
    """A copy of ``text`` as other files write it."""
    changes = [str.upper, lambda t: f"  {t}\n", lambda t: t.replace(" ", "\n"), lambda t: t.rstrip("?"), str.title]
    changes += [lambda t: t.replace("boxes", "**boxes**"), lambda t: t.replace(".", " .")]
    for change in draw.sample(changes, 2):
        text = change(text)
    return text


def near(number, draw):
    """Another problem, whose text differs by little."""
    options = [question(number).replace("eggs?", "boxes?"), question(number).replace("Ann", "Anna")]
    options += [question(number).replace(f"{number} boxes", f"{number}.5 boxes")]
    options += [question(number) + " And why?", question(number).replace("of", "with")]
    return draw.choice(options)


def write(folder, name, rows):
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / name


@pytest.mark.parametrize("name", SUITES)
@pytest.mark.parametrize("training_has_choices", [False, True])
def test_training_loses_the_questions_of_a_suite_however_either_writes_them(tmp_path, name, training_has_choices):
    draw = random.Random(len(name))
    rows = []
    remaining = []
    for number in range(10, 60):
        kind = draw.choice(["copy", "decorated", "near", "other"])
        text = {
            "copy": question(number),
            "decorated": decorated(question(number), draw),
            "near": near(number, draw),
            "other": question(number + 1000),
        }[kind]
        row = {"id": f"{kind} {number}", "question": text, "answer": "7"}
        if training_has_choices:
            row |= {"choices": ["8", "7"], "answer": "B"}
        rows.append(row)
        if kind in ("near", "other"):
            remaining.append(row["id"])
    training = write(tmp_path, "train.jsonl", rows)

    asked = []
    for number in range(10, 60):
        row = {"id": str(number), "problem": question(number), "answer": "7"}
        if "choices" in SUITES[name]:
            row |= {"choices": ["7", "8", "9"], "answer": "A"}
        asked.append(row)
    write(tmp_path, "asked.jsonl", asked)
    suite = {"file": {"path": "asked.jsonl"}, "template": "plain", "kind": "generate"} | SUITES[name]
    suite.pop("choices", None)
    (tmp_path / "asked.yaml").write_text(yaml.safe_dump(suite))

    data = {"dataset": "jsonl", "path": str(training), "split": None, "fields": {"text": "question"}}
    config = {"model": {"options": {"preset": "tiny"}}, "data": {"train": data}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    problems = load_problem_sets(load_config(tmp_path / "run.yaml", [f"eval.suites=[{tmp_path}/asked.yaml]"]))
    assert [problem.id for problem in problems.train] == remaining
    assert problems.counts == {"decontaminated.asked": len(rows) - len(remaining)}
    ((_, written),) = problems.suites
    # What is asked is the suite's text, of every question.
    before, _, after = SUITES[name]["text"].partition("{text}")
    for problem, row in zip(written, asked, strict=True):
        assert problem.text.startswith(before + row["problem"])
        assert "(C) 9" in problem.text or "{options}" not in after


def test_drawn_sets_are_compared_by_a_loop_over_all_pairs():
    """Every set counts what it has in common with training, a problem in two sets for both."""
    for seed in range(30):
        draw = random.Random(seed)
        truth = {f"t{n}": draw.randrange(12) for n in range(10)}
        train = [Problem(id=i, text=decorated(question(key), draw), answer="1") for i, key in truth.items()]
        sets = {name: [draw.randrange(20) for _ in range(4)] for name in ("a", "b", "c")}
        evals = {}
        for name, keys in sets.items():
            evals[name] = [
                Problem(id=str(n), text=decorated(question(k), draw), answer="1") for n, k in enumerate(keys)
            ]
        counts = {name: sum(key in keys for key in truth.values()) for name, keys in sets.items()}
        clean = [i for i, key in truth.items() if all(key not in keys for keys in sets.values())]
        if not clean:
            continue
        left, removed = decontaminate(train, evals)
        assert [problem.id for problem in left] == clean
        assert removed == counts


def test_a_suite_ends_completions_by_its_own_stop_strings_and_length():
    suite = get_suite("gsm8k")
    stops = ["eval.temperature=0.6", "eval.sampling={top_p: 0.9, top_k: 3, min_p: 0.1}", "rollout.stop=['x']"]
    config = load_config(TINY, stops)
    own = eval_sampling(config)
    of_suite = eval_sampling(config, suite)
    assert (own.stop, own.max_new_tokens) == (("x",), config.rollout.max_new_tokens)
    assert (of_suite.stop, of_suite.max_new_tokens) == (tuple(suite.stop), suite.max_new_tokens)
    for sampling in (own, of_suite):
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.6, 0.9, 3, 0.1)
    shorter = load_config(TINY, ["eval.max_new_tokens=5"])
    assert eval_sampling(shorter).max_new_tokens == eval_sampling(shorter, suite).max_new_tokens == 5
