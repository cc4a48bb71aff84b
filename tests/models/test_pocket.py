"""The pocket policy's parts without training (recipe, tokenizer, architecture, teacher, batches), and its cache."""

import dataclasses
import itertools
import json
import random
import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kl_comedy.config.schema import ModelConfig
from kl_comedy.data.pocket import is_held_out, steps
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


def test_the_tokenizer_refuses_other_characters_and_pads_left():
    for text in ("x", "1 2", "é", "1+２"):
        with pytest.raises(Exception, match="UNK"):
            TOKENIZER(text)
    assert (TOKENIZER.pad_token_id, TOKENIZER.eos_token_id, TOKENIZER.bos_token_id) == (0, 1, None)
    assert len(TOKENIZER) == len(VOCABULARY)
    batch = TOKENIZER(["1+2=", "7"], padding=True, return_tensors="pt")
    assert batch["input_ids"][1, :3].tolist() == [0, 0, 0] and batch["attention_mask"][1].tolist() == [0, 0, 0, 1]


def test_presets_have_their_sizes_and_every_problem_fits():
    for preset, low, high in (("base", 0.8e6, 1.0e6), ("tiny", 4e4, 6e4)):
        model = build_model(recipe_from_options({"preset": preset}))
        assert low < sum(p.numel() for p in model.parameters()) < high
        assert model.config.eos_token_id == TOKENIZER.eos_token_id != model.config.pad_token_id
    longest = "+".join(["9999"] * 5) + "="
    written = ";".join(f"{left}={right}" for left, right in steps(longest))
    assert len(longest) + len(written) + 1 <= MAX_LENGTH
    assert recipe_from_options({}) == PocketRecipe()
    changed = {"warmstart_steps": 7, "lr": 1.0, "seed": 3}
    tiny = recipe_from_options({"preset": "tiny"})
    assert recipe_from_options({"preset": "tiny", **changed}) == dataclasses.replace(tiny, **changed)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"preset": "tinny"}, ["model.options.preset", "'tinny'", "did you mean 'tiny'"]),
        ({"warmstart_step": 3}, ["model.options.warmstart_step", "did you mean 'warmstart_steps'"]),
        ({"warmstart_steps": "3"}, ["model.options.warmstart_steps", "'3'", "a whole number"]),
        ({"layers": 0}, ["model.options.layers", "0", "at least 1"]),
        ({"slip": 1.5}, ["model.options.slip", "1.5", "at most 1"]),
        ({"warmstart": "shiped"}, ["model.options.warmstart", "did you mean 'shipped'"]),
        ({"warmstart": "shipped", "seed": 1}, ["model.options.warmstart", "only the base recipe"]),
        ({"heads": 5}, ["model.options.heads", "5", "96"]),
    ],
)
def test_a_wrong_option_names_its_key(options, words):
    with pytest.raises(UserError) as caught:
        recipe_from_options(options)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_every_field_of_the_recipe_is_part_of_the_cache_key():
    recipe, names = PocketRecipe(), [field.name for field in dataclasses.fields(PocketRecipe)]
    numbers = [name for name in names if name != "warmstart"]
    changed = [dataclasses.replace(recipe, **{name: getattr(recipe, name) * 2 + 1}) for name in numbers]
    changed.append(dataclasses.replace(recipe, warmstart="trained"))
    keys = {recipe_key(other) for other in (recipe, *changed)}
    assert len(keys) == 1 + len(changed) and recipe_key(PocketRecipe()) in keys


@given(st.lists(st.integers(1, 999), min_size=2, max_size=5), st.integers(0, 2**32))
def test_the_teacher_drops_no_carry_or_every_carry(values, seed):
    for sign in "+-":
        text = sign.join(map(str, values if sign == "+" else [sum(values), *values[1:]])) + "="
        assert careless_steps(text, slip=0.0, rng=random.Random(seed)) == steps(text)
    total = values[0]
    slipped = careless_steps("+".join(map(str, values)) + "=", slip=1.0, rng=random.Random(seed))
    for (left, result), term in zip(slipped, values[1:], strict=True):
        assert left == f"{total}+{term}"
        assert result == total + term - 10 * (total % 10 + term % 10 >= 10)
        total = result


def test_demonstrations_slip_mix_the_families_and_never_show_a_held_out_problem():
    rng = random.Random(0)
    right = sum(careless_steps("5+6=", slip=0.7, rng=rng)[0][1] == 11 for _ in range(4000))
    assert abs(right / 4000 - 0.3) < 0.04  # five standard errors
    texts = [text for text, _ in itertools.islice(demonstrations(PocketRecipe(mixture=0.5)), 1500)]
    assert not any(map(is_held_out, texts))
    trained = [text for text in texts if text.count("+") == 2 and len(text) == 9]
    assert 0.4 < len(trained) / len(texts) < 0.6
    families = {(text.count("+"), text.count("-"), len(text)) for text in texts}
    assert families == {(2, 0, 9), (1, 0, 6), (3, 0, 12), (2, 0, 12), (0, 2, 9)}


def test_only_the_completion_and_its_end_are_targets():
    ids_BL, targets_BL = collate([("1+2=", "1+2=3"), ("10-7=", "3")])
    assert ids_BL.shape == targets_BL.shape == (2, 10)
    assert TOKENIZER.decode(ids_BL[0]) == "1+2=1+2=3" + EOS
    assert TOKENIZER.decode(ids_BL[1]) == "10-7=3" + EOS + 3 * PAD
    assert targets_BL[0].tolist() == [-100] * 4 + ids_BL[0, 4:].tolist()
    assert targets_BL[1].tolist() == [-100] * 5 + ids_BL[1, 5:7].tolist() + [-100] * 3


def test_the_warm_start_is_a_function_of_the_recipe():
    def train(recipe):
        return warm_start(recipe, report=lambda step, loss: None)

    state = torch.get_rng_state()
    first = train(FAST)
    with torch.no_grad():
        again = train(FAST)
    assert torch.equal(state, torch.get_rng_state()), "the global RNG is left alone"
    assert all(torch.equal(weight, again.state_dict()[name]) for name, weight in first.state_dict().items())
    assert not first.training
    for other in (train(dataclasses.replace(FAST, seed=1)), build_model(FAST)):
        assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("KL_COMEDY_CACHE", str(tmp_path))
    return tmp_path / "pocket"


class Builder:
    """Writes two files and counts its calls."""

    def __init__(self, seconds=0.0):
        self.calls, self.seconds = 0, seconds

    def __call__(self, folder):
        self.calls += 1
        (folder / "a.bin").write_bytes(b"weights" * 1000)
        time.sleep(self.seconds)
        (folder / "b.json").write_text("{}")


def test_a_folder_is_built_once_and_read_without_a_lock(root, capsys, monkeypatch):
    (root / "key.tmp").mkdir(parents=True)  # left by a killed build
    (root / "key.tmp" / "part").touch()
    build = Builder()
    assert cached_folder("pocket", "key", build) == root / "key"
    with monkeypatch.context() as patch:
        patch.setattr(cache, "file_lock", lambda *args, **kwargs: pytest.fail("a lock was opened"))
        assert cached_folder("pocket", "key", build) == root / "key" and build.calls == 1
    assert sorted(json.loads((root / "key" / CHECKSUMS).read_text())["files"]) == ["a.bin", "b.json"]
    assert sorted(path.name for path in root.iterdir()) == ["key", "key.lock"]
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("HOME", str(root / "home"))
    monkeypatch.setenv("KL_COMEDY_CACHE", "")
    assert cached_folder("pocket", "key", build) == root / "home/.cache/kl_comedy/pocket/key"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: (f / "a.bin").write_bytes(b"weights" * 999 + b"weighty"), "a.bin has changed"),
        (lambda f: (f / "b.json").unlink(), "b.json is missing"),
        (lambda f: (f / CHECKSUMS).unlink(), f"{CHECKSUMS} is missing"),
        (lambda f: (f / CHECKSUMS).write_text('{"files": {"a.bin"'), f"{CHECKSUMS} cannot be read"),
        (lambda f: (f / CHECKSUMS).write_text("[]"), f"{CHECKSUMS} cannot be read"),
        (lambda f: (f / CHECKSUMS).write_text('{"files": {}}'), "names no files"),
        (lambda f: (f / CHECKSUMS).write_bytes(b"\xff\xfe"), f"{CHECKSUMS} cannot be read"),
    ],
)
def test_a_damaged_folder_is_reported_and_built_again(root, capsys, spoil, message):
    build = Builder()
    folder = cached_folder("pocket", "key", build)
    spoil(folder)
    assert cached_folder("pocket", "key", build) == folder
    assert build.calls == 2 and find_damage(folder) is None
    err = capsys.readouterr().err
    assert message in err and "building it again" in err and err.count("\n") == 1


def test_a_failed_build_is_built_again(root):
    def broken(folder):
        (folder / "half").write_text("x")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached_folder("pocket", "key", broken)
    assert find_damage(cached_folder("pocket", "key", Builder())) is None
    assert not (root / "key" / "half").exists()


def test_concurrent_callers_build_once(root, capsys):
    build, folders = Builder(seconds=0.3), []
    threads = [threading.Thread(target=lambda: folders.append(cached_folder("pocket", "key", build))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert build.calls == 1 and folders == [root / "key"] * 4
    assert "another process is building pocket key; waiting" in capsys.readouterr().err


def test_an_unwritable_cache_names_the_variable(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("KL_COMEDY_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"KL_COMEDY_CACHE: cannot write pocket .* writable folder"):
        cached_folder("pocket", "key", Builder())


def test_the_base_policy_is_shipped_whole_and_needs_no_training(tmp_path, monkeypatch):
    monkeypatch.setenv("KL_COMEDY_CACHE", str(tmp_path))
    monkeypatch.setattr(pocket, "warm_start", lambda *args, **kwargs: pytest.fail("trained"))
    model = pocket.load_pocket(ModelConfig())
    assert weights_hash(model) == "3a99c1c9f132a9e2306217b67c783f414d2e4fafe4acefcd00ebad55d5ed1060"
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes(pocket.SHIPPED.read_bytes()[:-1])
    monkeypatch.setattr(pocket, "SHIPPED", damaged)
    with pytest.raises(UserError, match=r"damaged.safetensors is damaged; install kl_comedy again"):
        pocket.write_policy(PocketRecipe(), tmp_path)
    with pytest.raises(pytest.fail.Exception, match="trained"):
        pocket.write_policy(PocketRecipe(warmstart="trained"), tmp_path)
