"""The pocket policy's parts without training: recipe, tokenizer, architecture, teacher, batches."""

import dataclasses
import itertools
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kl_comedy.data.pocket import SPLITS, is_held_out, steps
from kl_comedy.errors import UserError
from kl_comedy.models.pocket import (
    ALPHABET,
    EOS,
    MAX_LENGTH,
    PAD,
    PRESETS,
    VOCABULARY,
    PocketRecipe,
    ProgressLine,
    build_model,
    build_tokenizer,
    careless_steps,
    collate,
    demonstrations,
    recipe_from_options,
    recipe_key,
    warm_start,
)

TOKENIZER = build_tokenizer()
FAST = dataclasses.replace(PRESETS["tiny"], hidden_size=16, intermediate_size=16, warmstart_steps=4, batch_size=4)


def silent(step, total, loss):
    pass


@given(st.text(ALPHABET, max_size=MAX_LENGTH))
def test_text_survives_the_tokenizer(text):
    ids = TOKENIZER(text)["input_ids"]
    assert len(ids) == len(text)
    assert TOKENIZER.decode(ids) == text
    assert TOKENIZER.decode([*ids, TOKENIZER.eos_token_id, TOKENIZER.pad_token_id], skip_special_tokens=True) == text


@given(st.text(min_size=1).filter(lambda text: not set(text) <= set(ALPHABET) and not {PAD, EOS} & {text}))
def test_a_strange_character_is_not_swallowed(text):
    with pytest.raises(Exception, match="UNK"):
        TOKENIZER(text)


def test_special_tokens_are_distinct_and_no_beginning_is_added():
    assert (TOKENIZER.pad_token_id, TOKENIZER.eos_token_id, TOKENIZER.bos_token_id) == (0, 1, None)
    assert len(TOKENIZER) == len(VOCABULARY)
    batch = TOKENIZER(["1+2=", "7"], padding=True, return_tensors="pt")
    assert batch["input_ids"][1, :3].tolist() == [0, 0, 0] and batch["attention_mask"][1].tolist() == [0, 0, 0, 1]


@pytest.mark.parametrize(("preset", "low", "high"), [("base", 0.8e6, 1.0e6), ("tiny", 4e4, 6e4)])
def test_presets_have_the_size_they_say(preset, low, high):
    model = build_model(PRESETS[preset])
    assert low < sum(p.numel() for p in model.parameters()) < high
    assert model.config.eos_token_id == TOKENIZER.eos_token_id != model.config.pad_token_id == TOKENIZER.pad_token_id


def test_every_problem_fits_the_positions():
    longest = "+".join(["9999"] * 5) + "="
    written = ";".join(f"{left}={right}" for left, right in steps(longest))
    assert len(longest) + len(written) + 1 <= MAX_LENGTH


def test_building_leaves_the_global_rng_alone():
    state = torch.get_rng_state()
    build_model(FAST)
    warm_start(FAST, report=silent)
    assert torch.equal(state, torch.get_rng_state())


def test_options_override_the_preset():
    recipe = recipe_from_options({"preset": "tiny", "warmstart_steps": 7, "lr": 1, "seed": 3})
    assert recipe == dataclasses.replace(PRESETS["tiny"], warmstart_steps=7, lr=1.0, seed=3)
    assert recipe_from_options({}) == PRESETS["base"] == PocketRecipe()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"preset": "tinny"}, ["model.options.preset", "'tinny'", "did you mean 'tiny'"]),
        ({"warmstart_step": 3}, ["model.options", "'warmstart_step'", "did you mean 'warmstart_steps'"]),
        ({"warmstart_steps": "3"}, ["model.options.warmstart_steps", "'3'", "a whole number from 0"]),
        ({"warmstart_steps": 2.5}, ["model.options.warmstart_steps", "2.5", "whole"]),
        ({"layers": True}, ["model.options.layers", "True"]),
        ({"slip": 1.5}, ["model.options.slip", "1.5", "from 0 to 1"]),
        ({"lr": float("nan")}, ["model.options.lr", "nan"]),
        ({"heads": 5}, ["model.options.heads", "5", "96"]),
    ],
)
def test_a_mistake_is_named(options, words):
    with pytest.raises(UserError) as caught:
        recipe_from_options(options)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(PocketRecipe)])
def test_every_field_of_the_recipe_is_part_of_the_cache_key(name):
    recipe = PocketRecipe()
    other = dataclasses.replace(recipe, **{name: getattr(recipe, name) * 2 + 1})
    assert recipe_key(recipe) == recipe_key(PocketRecipe()) != recipe_key(other)


@given(st.lists(st.integers(1, 999), min_size=2, max_size=5), st.integers(0, 2**32))
def test_a_teacher_without_slips_is_right(values, seed):
    for sign in "+-":
        text = sign.join(map(str, values if sign == "+" else [sum(values), *values[1:]])) + "="
        assert careless_steps(text, slip=0.0, rng=random.Random(seed)) == steps(text)


@given(st.lists(st.integers(1, 999), min_size=2, max_size=5))
def test_a_teacher_who_always_slips_drops_exactly_the_carries(values):
    rng = random.Random(0)
    total = values[0]
    for (left, result), term in zip(
        careless_steps("+".join(map(str, values)) + "=", slip=1.0, rng=rng), values[1:], strict=True
    ):
        assert left == f"{total}+{term}"
        carry = total % 10 + term % 10 >= 10
        assert result == total + term - 10 * carry
        total = result


def test_the_teacher_slips_as_often_as_told():
    rng = random.Random(0)
    right = sum(careless_steps("5+6=", slip=0.7, rng=rng)[0][1] == 11 for _ in range(4000))
    assert abs(right / 4000 - 0.3) < 0.04  # five standard errors


def test_demonstrations_never_show_a_held_out_problem_and_mix_the_families():
    shown = [text for text, _ in itertools.islice(demonstrations(PocketRecipe(mixture=0.5)), 1500)]
    assert not any(map(is_held_out, shown))
    plain = [text for text in shown if text.count("+") == 2 and len(text) == 9]
    assert 0.4 < len(plain) / len(shown) < 0.6
    assert {(text.count("+"), text.count("-"), len(text)) for text in shown} == {
        (2, 0, 9),
        (1, 0, 6),
        (3, 0, 12),
        (2, 0, 12),
        (0, 2, 9),
    }
    assert len(SPLITS) == 6


def test_only_the_completion_and_its_end_are_targets():
    ids_BL, targets_BL = collate([("1+2=", "1+2=3"), ("10-7=", "3")])
    assert ids_BL.shape == targets_BL.shape == (2, 10)
    assert TOKENIZER.decode(ids_BL[0]) == "1+2=1+2=3" + EOS
    assert TOKENIZER.decode(ids_BL[1]) == "10-7=3" + EOS + 3 * PAD
    assert (targets_BL[0] == -100).tolist() == [True] * 4 + [False] * 6
    assert targets_BL[1].tolist() == [-100] * 5 + ids_BL[1, 5:7].tolist() + [-100] * 3


def test_the_warm_start_repeats_itself_and_follows_its_seed():
    first, again = warm_start(FAST, report=silent), warm_start(FAST, report=silent)
    other = warm_start(dataclasses.replace(FAST, seed=1), report=silent)
    for name, weight in first.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name]), name
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)
    assert not first.training


def test_the_warm_start_works_under_no_grad():
    with torch.no_grad():
        assert not torch.equal(warm_start(FAST, report=silent).lm_head.weight, build_model(FAST).lm_head.weight)


def test_progress_without_a_terminal_is_plain_lines_on_stderr(capsys):
    with ProgressLine("pocket") as progress:
        for step in range(1, 11):
            progress(step, 10, 0.5)
    out, err = capsys.readouterr()
    assert out == "" and "\x1b" not in err
    assert [line.split(",")[0] for line in err.splitlines()] == [f"pocket: {n}/10 updates" for n in (2, 4, 6, 8, 10)]
