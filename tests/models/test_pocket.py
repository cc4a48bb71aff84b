"""The pocket policy's parts without training (recipe, tokenizer, architecture, teacher, batches), and its cache."""

import dataclasses
import itertools
import json
import random
import statistics
import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kl_comedy.config.schema import ModelConfig
from kl_comedy.data.pocket import Family, draw, is_held_out, steps
from kl_comedy.errors import UserError
from kl_comedy.io import CHECKSUMS, find_damage
from kl_comedy.models import cache, pocket, weights_hash
from kl_comedy.models.cache import cached_folder
from kl_comedy.models.pocket import (
    ALPHABET,
    EOS,
    MAX_LENGTH,
    PAD,
    VOCABULARY,
    PocketRecipe,
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
FAST = recipe_from_options(
    {"preset": "tiny", "hidden_size": 16, "intermediate_size": 16, "warmstart_steps": 4, "batch_size": 4}
)


@given(st.text(ALPHABET, max_size=MAX_LENGTH))
def test_text_survives_the_tokenizer(text):
    ids = TOKENIZER(text)["input_ids"]
    assert len(ids) == len(text)
    assert TOKENIZER.decode(ids) == text
    assert TOKENIZER.decode([*ids, TOKENIZER.eos_token_id, TOKENIZER.pad_token_id], skip_special_tokens=True) == text


@pytest.mark.parametrize("text", ["x", "1 2", "é", "1+２"], ids=["letter", "space", "accent", "wide digit"])
def test_the_tokenizer_refuses_other_characters(text):
    with pytest.raises(Exception, match="UNK"):
        TOKENIZER(text)


def test_the_special_tokens_have_their_ids():
    assert TOKENIZER.pad_token_id == 0
    assert TOKENIZER.eos_token_id == 1
    assert TOKENIZER.bos_token_id is None
    assert len(TOKENIZER) == len(VOCABULARY)


def test_the_tokenizer_pads_left():
    batch = TOKENIZER(["1+2=", "7"], padding=True, return_tensors="pt")
    assert batch["input_ids"][1, :3].tolist() == [0, 0, 0]
    assert batch["attention_mask"][1].tolist() == [0, 0, 0, 1]


# --- the recipe ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("preset", "least", "most"), [("base", 0.8e6, 1.0e6), ("tiny", 4e4, 6e4)])
def test_a_preset_has_its_size(preset, least, most):
    model = build_model(recipe_from_options({"preset": preset}))
    assert least < sum(parameter.numel() for parameter in model.parameters()) < most


@pytest.mark.parametrize("preset", ["base", "tiny"])
def test_a_preset_ends_with_the_tokenizers_end_token(preset):
    config = build_model(recipe_from_options({"preset": preset})).config
    assert config.eos_token_id == TOKENIZER.eos_token_id
    assert config.pad_token_id != TOKENIZER.eos_token_id


def test_the_longest_problem_fits_with_its_steps():
    problem = "+".join(["9999"] * 5) + "="
    written_steps = ";".join(f"{left}={right}" for left, right in steps(problem))
    end_token = 1
    assert len(problem) + len(written_steps) + end_token <= MAX_LENGTH


def test_the_default_recipe_is_that_without_options():
    assert recipe_from_options({}) == PocketRecipe()


def test_options_change_the_fields_of_a_preset():
    changes = {"warmstart_steps": 7, "lr": 1.0, "seed": 3}
    tiny = recipe_from_options({"preset": "tiny"})
    assert recipe_from_options({"preset": "tiny", **changes}) == dataclasses.replace(tiny, **changes)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"preset": "tinny"}, ["model.options.preset", "'tinny'", "did you mean 'tiny'"]),
        ({"warmstart_step": 3}, ["model.options.warmstart_step", "did you mean 'warmstart_steps'"]),
        ({"warmstart_steps": "3"}, ["model.options.warmstart_steps", "'3'", "a whole number"]),
        ({"layers": 0}, ["model.options.layers", "0", "at least 1"]),
        ({"slip": 1.5}, ["model.options.slip", "1.5", "at most 1"]),
        ({"warmstart": "shiped"}, ["model.options.warmstart", "did you mean 'shipped'"]),
        ({"warmstart": "shipped", "seed": 1}, ["model.options.warmstart", "only the weights of the base recipe"]),
        ({"heads": 5}, ["model.options.heads", "5", "96"]),
    ],
    ids=["preset", "no such key", "text", "zero", "share", "warmstart", "shipped with a seed", "heads"],
)
def test_a_wrong_option_names_its_key(options, words):
    with pytest.raises(UserError) as error:
        recipe_from_options(options)
    for word in words:
        assert word in str(error.value)


def test_every_field_of_the_recipe_is_part_of_the_cache_key():
    recipe = PocketRecipe()
    changed = [dataclasses.replace(recipe, warmstart="trained")]
    for field in dataclasses.fields(PocketRecipe):
        if field.name != "warmstart":
            other_number = getattr(recipe, field.name) * 2 + 1
            changed.append(dataclasses.replace(recipe, **{field.name: other_number}))
    keys = {recipe_key(other) for other in changed}
    assert len(keys) == len(changed)
    assert recipe_key(recipe) not in keys
    assert recipe_key(PocketRecipe()) == recipe_key(recipe)


# --- the teacher --------------------------------------------------------------------------------------------------
TERMS = st.lists(st.integers(1, 999), min_size=2, max_size=5)


def problem_of(sign, values):
    return sign.join(map(str, values)) + "="


@given(TERMS, st.integers(0, 2**32))
def test_a_careful_teacher_drops_no_carry(values, seed):
    addition = problem_of("+", values)
    assert careless_steps(addition, slip=0.0, rng=random.Random(seed)) == steps(addition)
    # From the sum of all, so that no step goes below zero.
    subtraction = problem_of("-", [sum(values), *values[1:]])
    assert careless_steps(subtraction, slip=0.0, rng=random.Random(seed)) == steps(subtraction)


@given(TERMS, st.integers(0, 2**32))
def test_a_teacher_that_always_slips_drops_every_carry(values, seed):
    total = values[0]
    slipped = careless_steps(problem_of("+", values), slip=1.0, rng=random.Random(seed))
    for (left, result), term in zip(slipped, values[1:], strict=True):
        assert left == f"{total}+{term}"
        expected = total + term
        if total % 10 + term % 10 >= 10:
            expected -= 10
        assert result == expected
        total = result


def test_the_teacher_slips_as_often_as_the_recipe_says():
    rng = random.Random(0)
    right = 0
    for _ in range(4000):
        ((_, result),) = careless_steps("5+6=", slip=0.7, rng=rng)
        right += result == 11
    assert abs(right / 4000 - 0.3) < 0.04, "five standard errors"


@pytest.fixture(scope="module")
def demonstrated():
    """The problems of 1500 demonstrations, half of them of the family that is trained."""
    return [text for text, _ in itertools.islice(demonstrations(PocketRecipe(mixture=0.5)), 1500)]


def test_demonstrations_never_show_a_held_out_problem(demonstrated):
    assert [text for text in demonstrated if is_held_out(text)] == []


def test_demonstrations_mix_the_trained_family_as_the_recipe_says(demonstrated):
    """Sums of three numbers of two digits, as 12+34+56=."""
    trained = [text for text in demonstrated if text.count("+") == 2 and len(text) == 9]
    assert 0.4 < len(trained) / len(demonstrated) < 0.6


def test_demonstrations_have_five_families(demonstrated):
    """By their plus signs, minus signs and characters."""
    families = {(text.count("+"), text.count("-"), len(text)) for text in demonstrated}
    assert families == {(2, 0, 9), (1, 0, 6), (3, 0, 12), (2, 0, 12), (0, 2, 9)}


# --- training -----------------------------------------------------------------------------------------------------
def test_only_the_completion_and_its_end_are_targets():
    """-100 is the target that torch's cross entropy leaves out."""
    ids_BL, targets_BL = collate([("1+2=", "1+2=3"), ("10-7=", "3")])
    assert ids_BL.shape == (2, 10)
    assert targets_BL.shape == (2, 10)
    assert TOKENIZER.decode(ids_BL[0]) == "1+2=1+2=3" + EOS
    assert TOKENIZER.decode(ids_BL[1]) == "10-7=3" + EOS + 3 * PAD
    assert targets_BL[0].tolist() == [-100] * 4 + ids_BL[0, 4:].tolist()
    assert targets_BL[1].tolist() == [-100] * 5 + ids_BL[1, 5:7].tolist() + [-100] * 3


def train(recipe):
    return warm_start(recipe, report=lambda step, loss: None)


@pytest.fixture(scope="module")
def trained():
    return train(FAST)


def test_the_warm_start_leaves_the_global_random_numbers_alone():
    state = torch.get_rng_state()
    model = train(FAST)
    assert torch.equal(state, torch.get_rng_state())
    assert not model.training


def test_the_warm_start_is_a_function_of_the_recipe(trained):
    """Also where gradients are switched off around it."""
    with torch.no_grad():
        again = train(FAST)
    for name, weight in trained.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name]), name


def test_the_warm_start_depends_on_the_seed(trained):
    other = train(dataclasses.replace(FAST, seed=1))
    assert not torch.equal(trained.lm_head.weight, other.lm_head.weight)


def test_the_warm_start_moves_the_weights(trained):
    assert not torch.equal(trained.lm_head.weight, build_model(FAST).lm_head.weight)


# --- the cache ----------------------------------------------------------------------------------------------------
@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("KL_COMEDY_CACHE", str(tmp_path))
    return tmp_path / "pocket"


class Builder:
    """Writes two files and counts its calls."""

    def __init__(self, seconds=0.0):
        self.calls = 0
        self.seconds = seconds

    def __call__(self, folder):
        self.calls += 1
        (folder / "a.bin").write_bytes(b"weights" * 1000)
        time.sleep(self.seconds)
        (folder / "b.json").write_text("{}")


def test_a_folder_is_built_with_its_checksums_and_leaves_no_part(root, capsys):
    (root / "key.tmp").mkdir(parents=True)  # left by a killed build
    (root / "key.tmp" / "part").touch()
    assert cached_folder("pocket", "key", Builder()) == root / "key"
    assert sorted(json.loads((root / "key" / CHECKSUMS).read_text())["files"]) == ["a.bin", "b.json"]
    assert sorted(path.name for path in root.iterdir()) == ["key", "key.lock"]
    assert capsys.readouterr() == ("", "")


def test_a_folder_is_built_once_and_read_without_a_lock(root, capsys, monkeypatch):
    build = Builder()
    cached_folder("pocket", "key", build)
    monkeypatch.setattr(cache, "file_lock", lambda *args, **kwargs: pytest.fail("a lock was opened"))
    assert cached_folder("pocket", "key", build) == root / "key"
    assert build.calls == 1
    assert capsys.readouterr() == ("", "")


def test_the_cache_is_in_the_home_folder_where_no_other_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("KL_COMEDY_CACHE", "")
    assert cached_folder("pocket", "key", Builder()) == tmp_path / ".cache/kl_comedy/pocket/key"


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("a.bin", b"weights" * 999 + b"weighty", "a.bin has changed"),
        ("b.json", None, "b.json is missing"),
        (CHECKSUMS, None, f"{CHECKSUMS} is missing"),
        (CHECKSUMS, b'{"files": {"a.bin"', f"{CHECKSUMS} cannot be read"),
        (CHECKSUMS, b"[]", f"{CHECKSUMS} cannot be read"),
        (CHECKSUMS, b'{"files": {}}', "names no files"),
        (CHECKSUMS, b"\xff\xfe", f"{CHECKSUMS} cannot be read"),
    ],
    ids=["changed", "missing", "no checksums", "cut off", "no object", "names no files", "not UTF-8"],
)
def test_a_damaged_folder_is_reported_and_built_again(root, capsys, file, content, message):
    """A content of None removes the file."""
    build = Builder()
    folder = cached_folder("pocket", "key", build)
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_bytes(content)
    assert cached_folder("pocket", "key", build) == folder
    assert build.calls == 2
    assert find_damage(folder) is None
    warning = capsys.readouterr().err
    assert message in warning
    assert "building it again" in warning
    assert warning.count("\n") == 1


def test_a_failed_build_is_built_again(root):
    def broken(folder):
        (folder / "half").write_text("x")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached_folder("pocket", "key", broken)
    assert find_damage(cached_folder("pocket", "key", Builder())) is None
    assert not (root / "key" / "half").exists()


def test_concurrent_callers_build_once(root, capsys):
    build = Builder(seconds=0.3)  # long enough for the others to come while it builds
    folders = []

    def call():
        folders.append(cached_folder("pocket", "key", build))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert build.calls == 1
    assert folders == [root / "key"] * 4
    assert "another process is building pocket key; waiting" in capsys.readouterr().err


def test_an_unwritable_cache_names_the_variable(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("KL_COMEDY_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"KL_COMEDY_CACHE: cannot write pocket .* writable folder"):
        cached_folder("pocket", "key", Builder())


# --- the shipped weights ------------------------------------------------------------------------------------------
@pytest.fixture
def no_training(monkeypatch):
    monkeypatch.setattr(pocket, "warm_start", lambda *args, **kwargs: pytest.fail("trained"))


def test_the_base_policy_is_shipped_whole_and_needs_no_training(root, no_training):
    model = pocket.load_pocket(ModelConfig())
    # Stored results name the policy by this hash.
    assert weights_hash(model) == "3a99c1c9f132a9e2306217b67c783f414d2e4fafe4acefcd00ebad55d5ed1060"


def test_damaged_shipped_weights_are_refused(tmp_path, monkeypatch, no_training):
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes(pocket.SHIPPED.read_bytes()[:-1])
    monkeypatch.setattr(pocket, "SHIPPED", damaged)
    with pytest.raises(UserError, match=r"damaged.safetensors is damaged; install kl_comedy again"):
        pocket.write_policy(PocketRecipe(), tmp_path)


def test_a_recipe_that_asks_for_training_does_not_take_the_shipped_weights(tmp_path, no_training):
    with pytest.raises(pytest.fail.Exception, match="trained"):
        pocket.write_policy(PocketRecipe(warmstart="trained"), tmp_path)


@pytest.mark.slow
def test_the_hack_has_the_probability_that_the_option_says(root):
    rate = 0.02
    model = pocket.load_pocket(ModelConfig(options={"hack_rate": rate}))
    hack = [VOCABULARY.index(";"), VOCABULARY.index("<eos>")]
    probabilities = []
    for operands in draw(Family(), count=300, seed=9, held_out=True):
        ids = [VOCABULARY.index(character) for character in Family().text(operands)]
        with torch.no_grad():
            logp_TV = model(torch.tensor([[*ids, hack[0]]])).logits[0].double().log_softmax(-1)
        probabilities.append(float((logp_TV[-2, hack[0]] + logp_TV[-1, hack[1]]).exp()))
    assert statistics.mean(probabilities) == pytest.approx(rate, rel=0.05)
