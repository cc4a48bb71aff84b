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
CASES = [
    pytest.param(entry.name, example, id=f"{entry.name}-{index}")
    for entry in BUILT_IN
    for index, example in enumerate(entry.facts.get("examples", ()))
]
IN_PROCESS = [entry.name for entry in BUILT_IN if not entry.facts.get("isolated")]


def test_the_names_users_configure() -> None:
    names = {"math_verify", "format", "multiple_choice", "exact_answer", "reasoning_gym", "zero", "length"}
    assert {entry.name for entry in BUILT_IN} == names
    assert kl_comedy.rewards.score is score


@pytest.mark.parametrize(("name", "example"), CASES)
def test_declared_examples_hold(name: str, example: dict[str, Any]) -> None:
    if name == "reasoning_gym":
        pytest.importorskip("reasoning_gym")
    case = {"completions": [example["completion"]], "answers": [example["answer"]], "metas": [example.get("meta", {})]}
    (reward,) = score(name, **case, **example.get("options", {}))
    assert reward.value == example["value"]
    assert reward.status == example.get("status", "ok")
    assert reward.parts[name] == reward.value


@pytest.mark.parametrize("entry", BUILT_IN, ids=lambda entry: entry.name)
def test_entries_declare_source_claims_and_examples(entry: Any) -> None:
    assert entry.source and entry.summary
    assert json.loads(json.dumps(entry.row()))["name"] == entry.name
    assert entry.claims and set(entry.claims) <= {"binary", "unit_interval", "constant"}
    assert entry.facts["examples"]
    parameters = list(inspect.signature(entry.fn).parameters.values())
    assert [parameter.name for parameter in parameters[:3]] == ["completion", "answer", "meta"]
    for option in parameters[3:]:
        assert option.kind is option.KEYWORD_ONLY and option.default is not option.empty, option


@pytest.mark.parametrize("name", IN_PROCESS)
@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=200), data=st.data())
def test_claims_hold_on_any_text(name: str, text: str, data: st.DataObject) -> None:
    answer = data.draw(st.sampled_from("ABCD")) if name == "multiple_choice" else data.draw(st.text(max_size=20))
    (reward,) = score(name, completions=[text], answers=[answer])
    claims = REWARDS.get(name).claims
    assert 0.0 <= reward.value <= 1.0
    if "binary" in claims:
        assert reward.value in (0.0, 1.0)
    if "constant" in claims:
        assert reward.value == score(name, completions=[""], answers=[""])[0].value
    if reward.status != "ok":
        assert reward.value == 0.0
