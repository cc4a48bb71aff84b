"""What every registered reward must satisfy, generated from the facts it declares."""

from __future__ import annotations

import inspect
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kl_comedy.rewards
from kl_comedy.registry import REWARDS
from kl_comedy.rewards import score

BUILT_IN = [entry for entry in REWARDS if entry.origin.startswith("kl_comedy.rewards.")]
IN_PROCESS = [entry.name for entry in BUILT_IN if entry.claims and not entry.facts.get("isolated")]


def declared_examples() -> list[Any]:
    """Every example that a reward declares, as a case."""
    cases = []
    for entry in BUILT_IN:
        for index, example in enumerate(entry.facts.get("examples", ())):
            cases.append(pytest.param(entry.name, example, id=f"{entry.name}-{index}"))
    return cases


def test_the_names_users_configure() -> None:
    names = {
        "math_verify",
        "format",
        "multiple_choice",
        "exact_answer",
        "reasoning_gym",
        "zero",
        "length",
        "fixed_text",
        "any_number",
        "model",
    }
    assert {entry.name for entry in BUILT_IN} == names


def test_score_is_a_function_of_the_package() -> None:
    """And not the module of that name."""
    assert kl_comedy.rewards.score is score


@pytest.mark.parametrize(("name", "example"), declared_examples())
def test_declared_examples_hold(name: str, example: dict[str, Any]) -> None:
    if name == "reasoning_gym":
        pytest.importorskip("reasoning_gym")
    (reward,) = score(
        name,
        completions=[example["completion"]],
        answers=[example["answer"]],
        metas=[example.get("meta", {})],
        **example.get("options", {}),
    )
    assert reward.value == example["value"]
    assert reward.status == example.get("status", "ok")
    assert reward.parts[name] == reward.value


every_entry = pytest.mark.parametrize("entry", BUILT_IN, ids=lambda entry: entry.name)


@every_entry
def test_entries_declare_source_claims_and_examples(entry: Any) -> None:
    assert entry.source
    assert entry.summary
    if entry.facts.get("batched"):
        # A score of weights that are not here: no value of it is known, and nothing can be said of all.
        return
    assert entry.claims
    assert set(entry.claims) <= {"binary", "unit_interval", "constant"}
    assert entry.facts["examples"]


@every_entry
def test_an_entry_can_be_written_as_json(entry: Any) -> None:
    assert json.loads(json.dumps(entry.row()))["name"] == entry.name


@every_entry
def test_a_reward_takes_a_completion_an_answer_and_options_with_defaults(entry: Any) -> None:
    parameters = list(inspect.signature(entry.fn).parameters.values())
    expected = ["completion", "answer", "meta"]
    if entry.facts.get("batched"):
        expected = ["completions", "problems"]
    assert [parameter.name for parameter in parameters[: len(expected)]] == expected
    for option in parameters[len(expected) :]:
        assert option.kind is option.KEYWORD_ONLY, option
        assert option.default is not option.empty, option


@pytest.mark.parametrize("name", IN_PROCESS)
@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=200), data=st.data())
def test_claims_hold_on_any_text(name: str, text: str, data: st.DataObject) -> None:
    answers = st.text(max_size=20)
    if name == "multiple_choice":
        answers = st.sampled_from("ABCD")
    (reward,) = score(name, completions=[text], answers=[data.draw(answers)])
    claims = REWARDS.get(name).claims
    assert 0.0 <= reward.value <= 1.0
    if "binary" in claims:
        assert reward.value in (0.0, 1.0)
    if "constant" in claims:
        assert reward.value == score(name, completions=[""], answers=[""])[0].value
    if reward.status != "ok":
        assert reward.value == 0.0
