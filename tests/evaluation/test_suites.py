"""Suites as data: those of the package are whole, a user's own are checked, their problems are the ones they name."""

import hashlib
import json
from types import SimpleNamespace

import pytest
import yaml

from kl_comedy.config.schema import SuiteConfig, SuiteFile
from kl_comedy.errors import UserError
from kl_comedy.evaluation import get_suite
from kl_comedy.evaluation.suites import (
    DEFINITIONS,
    parse_data_files,
    question,
    resolve_template,
    suite_problems,
    suite_prompts,
)
from kl_comedy.records import Problem
from kl_comedy.registry import SUITES

NAMES = sorted(path.stem for path in DEFINITIONS.glob("*.yaml"))


def test_the_package_has_these_suites():
    expected = {
        "gsm8k",
        "math500",
        "math2",
        "aime24",
        "aime25",
        "amc23",
        "mmlu_stem",
        "mmlu_college_physics",
        "mmlu_college_biology",
        "arc_challenge",
        "arc_challenge_likelihood",
        "countdown",
        "pocket_sums",
    }
    assert expected <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_suite_of_the_package_is_complete(name):
    suite = get_suite(name)
    assert suite.name == name
    assert suite.summary.endswith(".")
    assert suite.source
    assert suite.licence
    assert suite.group != "own"
    assert suite.items
    assert suite.data is not None
    assert SUITES.get(name).row()["items"] == suite.items
    if suite.kind == "likelihood":
        assert not suite.prompt.suffix
        assert suite.template == "plain"
    elif suite.answer == "letter":
        assert "{options}" in suite.text
        assert suite.reward.name == "multiple_choice"


def write(folder, rows, name="own.jsonl"):
    path = folder / name
    lines = [json.dumps(row) + "\n" for row in rows]
    path.write_text("".join(lines))
    return path


def own_suite(folder, **keys):
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(keys))
    return str(path)


SUMS = [{"id": f"s{n}", "problem": f"{n}+1=?", "answer": str(n + 1)} for n in range(5)]


def test_a_suite_of_ones_own_lies_beside_its_file(tmp_path):
    write(tmp_path, SUMS)
    suite = get_suite(own_suite(tmp_path, file={"path": "own.jsonl"}, items=5, text="Compute {text}"))
    assert suite.name == "mine"
    assert suite.group == "own"
    problems = suite_problems(suite, limit=2)
    assert [problem.text for problem in problems] == ["Compute 0+1=?", "Compute 1+1=?"]


def test_extending_takes_everything_else_over(tmp_path):
    suite = get_suite(own_suite(tmp_path, extends="gsm8k", items=None, max_new_tokens=7, prompt={"suffix": "!"}))
    base = get_suite("gsm8k")
    assert suite.max_new_tokens == 7
    assert suite.prompt.suffix == "!"
    assert suite.items is None
    assert suite.data == base.data
    assert suite.reward == base.reward
    assert base.max_new_tokens == 1024


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"kind": "generated"}, "did you mean 'generate'"),
        ({"promt": {}}, "did you mean 'prompt'"),
        ({}, "names no problems"),
        ({"extends": "gsm8"}, "did you mean 'gsm8k'"),
        ({"file": {"path": "x.jsonl"}, "reward": {"name": "math_verfy"}}, "did you mean 'math_verify'"),
        ({"file": {"path": "x.jsonl"}, "name": "../x"}, "names a folder"),
    ],
    ids=["kind", "key", "nothing", "base", "reward", "name"],
)
def test_a_mistake_in_a_suites_file_names_the_file(tmp_path, keys, message):
    with pytest.raises(UserError, match=message) as refused:
        get_suite(own_suite(tmp_path, **keys))
    assert "mine.yaml" in str(refused.value)


@pytest.mark.parametrize(
    ("name", "message"), [("gsm8", "did you mean 'gsm8k'"), ("nowhere.yaml", "existing YAML file")]
)
def test_a_suite_that_does_not_exist_is_refused(name, message):
    with pytest.raises(UserError, match=message):
        get_suite(name)


def hashed(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_checksum_is_that_of_the_suite_s_file(tmp_path):
    path = write(tmp_path, SUMS)
    good = get_suite(own_suite(tmp_path, file={"path": "own.jsonl", "sha256": hashed(path)}))
    assert len(suite_problems(good)) == 5
    write(tmp_path, SUMS[:4])
    with pytest.raises(UserError, match=r"another file than the suite mine names.*--data mine="):
        suite_problems(good)


def test_data_given_by_hand_is_taken_as_it_is_but_for_its_own_checksum(tmp_path):
    path = write(tmp_path, SUMS)
    gsm8k = get_suite("gsm8k")
    assert len(suite_problems(gsm8k, file=SuiteFile(path=str(path)))) == 5
    given = parse_data_files([f"gsm8k={path}#{hashed(path)}"])["gsm8k"]
    assert len(suite_problems(gsm8k, file=given)) == 5
    with pytest.raises(UserError, match="SHA-256"):
        suite_problems(gsm8k, file=SuiteFile(path=str(path), sha256="0" * 64))


@pytest.mark.parametrize("text", ["gsm8k", "=x", "gsm8k=x#abc"], ids=["no file", "no suite", "a short checksum"])
def test_a_mistaken_data_option_is_refused(text):
    with pytest.raises(UserError, match="--data"):
        parse_data_files([text])


def test_a_missing_file_says_what_is_there_and_where_it_is_published(tmp_path):
    write(tmp_path, SUMS, "gsm8k_test.json")
    with pytest.raises(UserError, match=r"gsm8k_test\.jsonl.*did you mean .*gsm8k_test\.json'.*openai/gsm8k"):
        suite_problems(get_suite("gsm8k"), root=tmp_path)


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(UserError, match="there is no folder"):
        suite_problems(get_suite("gsm8k"), root=tmp_path / "none")


def test_another_number_of_problems_is_refused(tmp_path):
    write(tmp_path, SUMS)
    with pytest.raises(UserError, match=r"it has 6 problems, and .* gave 5"):
        suite_problems(get_suite(own_suite(tmp_path, file={"path": "own.jsonl"}, items=6)))


@pytest.mark.parametrize(
    "row",
    [{"problem": "1+1", "answer": None}, {"problem": "1+1", "answer": ""}, {"problem": "1+1"}],
    ids=["null", "empty", "no key"],
)
def test_a_problem_without_an_answer_is_refused_by_its_line(tmp_path, row):
    write(tmp_path, [*SUMS, row])
    with pytest.raises(UserError, match=r"own\.jsonl:6.*answer"):
        suite_problems(get_suite(own_suite(tmp_path, file={"path": "own.jsonl"})))


CHOICES = [
    {"id": "a", "problem": "Which {text}?", "choices": ["x {letter}", "y"], "answer": "B", "subject": "one_two"},
    {"id": "b", "problem": "Who?", "choices": ["p", "q"], "answer": "A", "subject": "three"},
]


def test_questions_and_choices_are_put_in_literally(tmp_path):
    write(tmp_path, CHOICES)
    path = own_suite(
        tmp_path,
        file={"path": "own.jsonl", "fields": {"subject": "subject"}},
        kind="likelihood",
        text="On {subject:words}: {text}\n{options}",
        choice_line="{letter}. {choice}",
        where={"subject": ["one_two"]},
    )
    (problem,) = suite_problems(get_suite(path))
    assert problem.text == "On one two: Which {text}?\nA. x {letter}\nB. y"


@pytest.mark.parametrize("text", ["{options}", "{subject}"])
def test_a_text_that_needs_what_a_problem_lacks_is_refused(text):
    problem = Problem(id="p", text="t", answer="1")
    with pytest.raises(UserError, match="no such value"):
        question(problem, SuiteConfig(name="s", text=text))


@pytest.mark.parametrize(
    ("rows", "keys", "message"),
    [
        (CHOICES, {"where": {"subject": ["four"]}}, "no problem has subject in four"),
        (CHOICES, {"where": {"subjects": ["one"]}}, r"where.*'subjects'.*did you mean 'subject'"),
        ([{**SUMS[0], "subject": "x"}], {"kind": "likelihood"}, "the problem 's0': has no choices to compare"),
    ],
    ids=["a value", "a field", "choices"],
)
def test_a_suite_that_needs_what_its_problems_lack_is_refused(tmp_path, rows, keys, message):
    write(tmp_path, rows)
    file = {"path": "own.jsonl", "fields": {"subject": "subject"}}
    with pytest.raises(UserError, match=message):
        suite_problems(get_suite(own_suite(tmp_path, file=file, **keys)))


def test_answers_by_the_source_s_own_labels(tmp_path):
    """ARC: some rows are labelled A to D, others 1 to 4."""
    by_letter = {
        "id": "1",
        "question": "?",
        "choices": {"text": ["u", "v", "w"], "label": ["A", "B", "C"]},
        "answerKey": "B",
    }
    by_number = {"id": "2", "question": "?", "choices": {"text": ["u", "v"], "label": ["1", "2"]}, "answerKey": "1"}
    path = write(tmp_path, [by_letter, by_number])
    arc = get_suite("arc_challenge_likelihood")
    problems = suite_problems(arc, file=SuiteFile(path=str(path)))
    assert [problem.answer for problem in problems] == ["B", "A"]
    assert problems[1].meta["choices"] == ("u", "v")
    assert problems[0].text == "Question: ?\nAnswer:"
    write(tmp_path, [{**by_letter, "answerKey": "E"}])
    with pytest.raises(UserError, match="none of the labels A, B, C"):
        suite_problems(arc, file=SuiteFile(path=str(path)))


def test_chat_is_chosen_where_the_tokenizer_can():
    with_chat = SimpleNamespace(chat_template="x")
    without = SimpleNamespace(chat_template=None)
    suite = get_suite("gsm8k")
    assert resolve_template(suite, with_chat) == "chat"
    assert resolve_template(suite, without) == "plain"
    assert resolve_template(suite, with_chat, "plain") == "plain"
    assert resolve_template(get_suite("mmlu_stem_likelihood"), with_chat) == "plain"
    with pytest.raises(UserError, match="--template"):
        resolve_template(suite, with_chat, "chatml")


def test_procedural_suites_make_the_problems_they_promise():
    suite = get_suite("pocket_subtraction")
    assert len(suite_problems(suite)) == suite.items


def test_a_prompt_that_does_not_fit_is_counted(tmp_path):
    from kl_comedy.config import ModelConfig
    from kl_comedy.models import load_model

    tokenizer = load_model(ModelConfig(source="pocket", options={"preset": "tiny", "warmstart_steps": 5})).tokenizer
    suite = get_suite("pocket_sums")
    suite.prompt.max_tokens = 8
    problems = [Problem(id="a", text="1+1=", answer="2"), Problem(id="b", text="11+11+11=", answer="33")]
    prompts, report = suite_prompts(suite, problems, tokenizer)
    assert [prompt.problem.id for prompt in prompts] == ["a"]
    assert report.too_long == 1


PUBLISHED = {
    "gsm8k": {"question": "1+1?", "answer": "It is <<1+1=2>>2.\n#### 1,002"},
    "math500": {"problem": "1+1?", "solution": "so", "answer": "1002", "subject": "Algebra", "unique_id": "test/a/1"},
    "aime24": {"id": 60, "problem": "1+1?", "solution": "so", "answer": "1002", "year": "2024"},
    "aime25": {"id": "0", "problem": "1+1?", "answer": "1002"},
    "amc23": {"id": 0, "question": "1+1?", "answer": "1002", "url": "x"},
    "mmlu_college_physics": {"question": "1+1?", "subject": "college_physics", "choices": ["1", "2", "3"], "answer": 1},
    "arc_challenge": {
        "id": "M_1",
        "question": "1+1?",
        "choices": {"text": ["1", "2", "3"], "label": ["1", "2", "3"]},
        "answerKey": "2",
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_rows_as_they_are_published_are_read(monkeypatch, name):
    """Where there is no hub, the layouts that their data cards show stand in for it."""
    downloaded = []

    def download(config, *_, **__):
        downloaded.append(config)
        return [PUBLISHED[name]]

    monkeypatch.setattr("kl_comedy.data.sources._download", download)
    suite = get_suite(name)
    suite.items = 1
    (problem,) = suite_problems(suite)
    if suite.answer == "letter":
        assert problem.answer == "B"
    else:
        assert problem.answer == "1002"
    assert problem.text.startswith("1+1?")
    assert downloaded[0].name == suite.data.name
    assert downloaded[0].split in ("test", "train")


def test_without_a_hub_the_message_says_what_to_do(monkeypatch):
    import datasets

    def offline(*_, **__):
        raise ConnectionError("offline")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(UserError, match=r"suite gsm8k: could not load .*openai/gsm8k.*--data gsm8k=FILE$"):
        suite_problems(get_suite("gsm8k"))
