"""Config: defaults, overrides, errors that name the key, and what makes another run."""

import contextlib
import dataclasses
import importlib
import re
import sys
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commands import cpu_limit
from kl_comedy import plugins
from kl_comedy.config import config_hash, flatten, load_config, stored_text, to_yaml
from kl_comedy.config.load import differing_keys
from kl_comedy.config.schema import CallbackConfig, DatasetConfig, EnvironmentConfig, LoggerConfig, RewardConfig
from kl_comedy.config.validate import option, parse_record
from kl_comedy.errors import UserError
from kl_comedy.registry import KINDS
from kl_comedy.results.runs import open_runs
from kl_comedy.slurm.grid import read_grid
from kl_comedy.slurm.manifest import plan
from kl_comedy.training.build import check_training
from kl_comedy.training.run_plugins import plugins_of


def write(tmp_path, text):
    file = tmp_path / "a.yaml"
    file.write_text(text)
    return file


def test_a_sparse_file_takes_overrides_that_reach_into_lists(tmp_path):
    file = write(tmp_path, "seed: 3\nkl: [{estimator: k1, beta: 0.1}]\nrewards: [{name: math_verify}]\n")
    config = load_config(file, ["kl.0.beta=0.2", "rewards.0.weight=2", "optimizer.lr=3e-4"])
    assert config.seed == 3
    assert config.rollout.temperature == 1.0, "the default"
    assert config.optimizer.lr == 3e-4
    assert config.kl == [{"estimator": "k1", "beta": 0.2}]
    assert config.rewards[0].weight == 2.0


def test_an_override_reaches_into_a_recipe(tmp_path):
    file = write(tmp_path, "kl: grpo\n")
    assert load_config(file, ["kl.beta=0.5"]).kl == {"recipe": "grpo", "beta": 0.5}


def test_an_override_replaces_a_free_form_mapping_and_merges_one_with_a_schema(tmp_path):
    file = write(tmp_path, "model: {source: x, options: {preset: tiny}}\ndata: {eval: {a: {limit: 3}}}\n")
    config = load_config(file, ["model.options={}", "data.eval={b: {limit: 4}}", "data.eval.a={seed: 2}"])
    assert config.model.options == {}
    assert config.model.source == "x"
    assert config.data.eval["a"].limit == 3
    assert config.data.eval["a"].seed == 2
    assert config.data.eval["b"].limit == 4


@pytest.fixture
def extended(tmp_path):
    """Three files, of which each extends the next one: the config, ``middle`` and ``base``."""
    folder = tmp_path / "base"
    folder.mkdir()
    base = folder / "a.yaml"
    middle = folder / "b.yaml"
    base.write_text("optimizer: {lr: 0.1}\n")
    middle.write_text("extends: a.yaml\n")
    return write(tmp_path, "extends: base/b.yaml\noptimizer: {lr: 0.3}\n"), middle, base


def test_a_file_extends_another(tmp_path, extended):
    file, middle, base = extended
    base.write_text("optimizer: {lr: 0.1, clip_norm: 0.5}\nkl: grpo\ndata: {eval: {a: {limit: 3}, b: {limit: 4}}}\n")
    middle.write_text("extends: a.yaml\noptimizer: {lr: 0.2}\nrollout: {options: {loop: library}}\n")
    file.write_text("extends: base/b.yaml\nkl: []\ndata: {eval: {a: {seed: 1}, b: null}}\nrollout: {options: {}}\n")
    config = load_config(file)
    assert config.optimizer.lr == 0.2, "of the middle file"
    assert config.optimizer.clip_norm == 0.5, "of the base"
    assert config.kl == []
    assert config.rollout.options == {}, "a free-form mapping is replaced"
    assert list(config.data.eval) == ["a"], "null removes a set"
    assert config.data.eval["a"].limit == 3
    assert config.data.eval["a"].seed == 1


def test_an_error_names_the_file_that_set_the_key(extended):
    file, middle, _ = extended
    middle.write_text("extends: a.yaml\noptimizer: {lrr: 0.2}\n")
    with pytest.raises(UserError, match=rf"^{middle}: optimizer.lrr: no such key"):
        load_config(file)


def test_an_error_in_a_value_names_the_file_or_the_override_that_set_it(extended):
    file, _, base = extended
    base.write_text("optimizer: {lr: 0.1, clip_norm: -1}\n")
    with pytest.raises(UserError, match=rf"^{base}: optimizer.clip_norm: got -1"):
        load_config(file)
    with pytest.raises(UserError, match=r"^optimizer.clip_norm: got -2"):
        load_config(file, ["optimizer.clip_norm=-2"])


def test_files_that_extend_each_other_are_refused(extended):
    file, _, base = extended
    base.write_text("extends: ../a.yaml\n")
    with pytest.raises(UserError, match=r"a.yaml: extends: .*a.yaml <- .*b.yaml <- .*a.yaml: a config cannot extend"):
        load_config(file)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x.yaml", "no such config file.*x.yaml"),
        ("[a.yaml]", "a.yaml <- .*a.yaml: a config cannot extend itself"),
        ("[3]", "got 3; allowed: the path of a config"),
        ("null", "got None; allowed: the path of a config"),
    ],
)
def test_what_cannot_be_extended_is_refused(extended, text, message):
    file, _, base = extended
    base.write_text(f"extends: {text}\n")
    with pytest.raises(UserError, match=rf"^{base}: extends: .*{message}"):
        load_config(file)


def test_of_several_extended_files_the_later_wins(tmp_path):
    (tmp_path / "one.yaml").write_text("optimizer: {lr: 0.1, clip_norm: 0.5}\nkl: grpo\n")
    (tmp_path / "two.yaml").write_text("optimizer: {lr: 0.2}\nseed: 2\n")
    file = write(tmp_path, "extends: [one.yaml, two.yaml]\nseed: 3\n")
    config = load_config(file)
    assert (config.optimizer.lr, config.optimizer.clip_norm, config.kl, config.seed) == (0.2, 0.5, "grpo", 3)
    whole = load_config(write(tmp_path, "optimizer: {lr: 0.2, clip_norm: 0.5}\nkl: grpo\nseed: 3\n"))
    assert config_hash(config) == config_hash(whole)


def test_a_base_of_two_extended_files_does_not_undo_the_first(tmp_path):
    (tmp_path / "base.yaml").write_text("optimizer: {lr: 0.1}\nseed: 1\n")
    (tmp_path / "one.yaml").write_text("extends: base.yaml\noptimizer: {lr: 0.2}\n")
    (tmp_path / "two.yaml").write_text("extends: base.yaml\nkl: grpo\n")
    config = load_config(write(tmp_path, "extends: [one.yaml, two.yaml]\n"))
    assert (config.optimizer.lr, config.seed, config.kl) == (0.2, 1, "grpo")


def test_an_error_in_one_of_several_files_names_it(tmp_path):
    (tmp_path / "one.yaml").write_text("optimizer: {lr: -1}\n")
    (tmp_path / "two.yaml").write_text("seed: 2\n")
    file = write(tmp_path, "extends: [one.yaml, two.yaml]\n")
    with pytest.raises(UserError, match=r"one.yaml: optimizer.lr: got -1"):
        load_config(file)
    file = write(tmp_path, "extends: [one.yaml, three.yaml]\n")
    with pytest.raises(UserError, match=rf"^{file}: extends: no such config file: .*three.yaml"):
        load_config(file)


def test_an_error_in_a_whole_list_names_the_file_that_replaced_it(tmp_path):
    (tmp_path / "one.yaml").write_text("kl: [{estimator: k1, placement: loss, beta: 0.1}]\n")
    (tmp_path / "two.yaml").write_text("kl: grpoo\n")
    with pytest.raises(UserError, match=r"two.yaml: kl: got 'grpoo'"):
        load_config(write(tmp_path, "extends: [one.yaml, two.yaml]\n"))


def test_a_missing_file_is_not_suggested_to_be_the_one_that_names_it(tmp_path):
    file = tmp_path / "ext.yaml"
    file.write_text("extends: nope.yaml\n")
    with pytest.raises(UserError, match=r"no such config file: .*nope.yaml$"):
        load_config(file)
    (tmp_path / "nop.yaml").write_text("seed: 1\n")
    with pytest.raises(UserError, match=r"nope.yaml; did you mean .*nop.yaml\?"):
        load_config(file)


def test_a_chain_of_files_has_a_limit(tmp_path):
    for number in range(1200):
        (tmp_path / f"{number}.yaml").write_text(f"extends: {number + 1}.yaml\nseed: 1\n")
    with pytest.raises(UserError, match=r"leads to more than 100 files"):
        load_config(tmp_path / "0.yaml")


@pytest.mark.parametrize("text", ["on", "yes", "no", "off", "true"])
def test_words_that_yaml_reads_as_booleans_are_text_for_keys_of_text(text):
    assert load_config(None, [f"name={text}"]).name == text
    assert load_config(None, [f"tracking.tags.kind={text}"]).tracking.tags == {"kind": text}


def test_an_unquoted_boolean_for_text_in_a_file_says_what_yaml_made_of_it(tmp_path):
    with pytest.raises(UserError, match=r"name: got True; allowed: text \(YAML reads yes, no, on and off"):
        load_config(write(tmp_path, "name: on\n"))


@pytest.mark.parametrize("value", ["yes", "nver", "runs"])
def test_resume_takes_two_words_and_paths(value):
    with pytest.raises(UserError, match=rf"resume: got '{value}'; .*allowed: never, auto, the folder"):
        load_config(None, [f"resume={value}"])
    assert load_config(None, ["resume=runs/R"]).resume == "runs/R"


def test_keys_in_which_two_configs_are_different_runs():
    config = load_config(None, ["kl=grpo", "seed=1"])
    other = load_config(None, ["kl=grpo", "train.steps=7", "lag={mode: async, max_steps: 2}", "lag.in_flight=true"])
    assert differing_keys(config, config) == []
    keys = set(differing_keys(config, other))
    assert keys == {"seed", "train.steps", "lag.mode", "lag.max_steps", "lag.in_flight"}
    same_run = load_config(None, ["kl=grpo", "seed=1", "output=elsewhere", "train.devices=2", "train.strategy=ddp"])
    assert differing_keys(config, same_run) == []


def test_asynchronous_sampling_that_waits_for_every_update_is_warned_of(caplog):
    check_training(load_config(None, ["lag={mode: async}", "lag.max_steps=1"]))
    assert "lag.max_steps is 0" not in caplog.text
    check_training(load_config(None, ["lag={mode: async}", "lag.max_steps=0"]))
    assert "lag.max_steps is 0" in caplog.text


def test_replayed_samples_that_are_fresh_are_warned_of(caplog):
    check_training(load_config(None, ["lag={mode: replayed, steps: 1}"]))
    check_training(load_config(None, ["lag={mode: on_policy}"]))
    assert "lag.steps is 0" not in caplog.text
    check_training(load_config(None, ["lag={mode: replayed}"]))
    assert "lag.steps is 0" in caplog.text
    # The number that the warning names is one that the config takes.
    check_training(load_config(None, ["lag={mode: replayed}", "algorithm.updates_per_batch=4"]))
    assert caplog.text.strip().endswith("a multiple of the 4 made from one batch, as lag.steps=4")
    load_config(None, ["lag={mode: replayed, steps: 4}", "algorithm.updates_per_batch=4"])


def test_a_learning_rate_of_all_weights_is_warned_of_with_an_adapter(caplog):
    check_training(load_config(None, ["optimizer.lr=1e-6"]))
    check_training(load_config(None, ["model.lora={rank: 8}", "optimizer.lr=3e-5"]))
    assert "LoRA" not in caplog.text
    check_training(load_config(None, ["model.lora={rank: 8}", "optimizer.lr=1e-6"]))
    assert (
        "optimizer.lr is 1e-06: low for a LoRA adapter (model.lora), which usually takes 1e-05 to 0.001" in caplog.text
    )


WRONG_FILES = {
    "": ["is empty", "model, data, rewards, kl, optimizer.lr, train.steps", "init run"],
    "optimizer: {lrr: 1}": ["optimizer.lrr", "'lr'"],
    "optimzer: {lr: 1}": ["optimzer", "'optimizer'"],
    "kl: [{estimator: k33}]": ["kl.0.estimator", "'k3'"],
    "kl: [{estimator: k1, cap: 0, correction: token}]": ["kl.0.cap", "above 0"],
    "kl: [{estimator: k1, placement: loss, credit: own}]": ["kl.0: impossible KL term", "credit"],
    "kl: grppo": ["kl", "'grpo'"],
    "callbacks: [{name: nothing}]": ["callbacks.0.name", "'nothing'"],
    "trainer: 3": ["trainer", "a mapping"],
    "rollout: {stop: end}": ["rollout.stop", "a list"],
    "data: {eval: {a: {limit: 0}}}": ["data.eval.a.limit", "at least 1"],
    "algorithm: {value: {lam: 1.5}}": ["algorithm.value.lam", "at most 1"],
    "seed: abc": ["seed", "'abc'", "whole number"],
    "seed: 1.5": ["seed", "1.5", "whole number"],
    "seed: null": ["seed", "whole number"],
    "optimizer: {lr: fast}": ["optimizer.lr", "'fast'", "a number"],
    "optimizer: {lr: -1}": ["optimizer.lr", "above 0"],
    "optimizer: {lr: .nan}": ["optimizer.lr", "finite"],
    "optimizer: 3": ["optimizer", "a mapping with the keys", "lr"],
    "rewards: {name: x}": ["rewards", "a list"],
    "rewards: []": ["rewards", "at least one"],
    "algorithm: {advantage: rlo}": ["algorithm.advantage", "'rlo'", "'rloo'"],
    "model: {dtype: fp32}": ["model.dtype", "'fp32'", "float32"],
    "{rollout: {prompts_per_batch: 5}, algorithm: {updates_per_batch: 2}}": ["divisor", "(5)"],
    "lag: {steps: 2}": ["lag.steps", "replayed"],
    "{lag: {mode: replayed, steps: 3}, algorithm: {updates_per_batch: 2}}": ["lag.steps", "multiple"],
    "rollout: {group_size: 1}": ["rollout.group_size", "at least 2"],
    "name: ../../etc": ["name", "folder"],
    "a: [": ["not valid YAML"],
    "- 1": ["mapping of keys"],
    "seed: ${nowhere}": ["seed", "nowhere"],
    "optimizer: {betas: [0.9]}": ["optimizer.betas", "two numbers"],
    "optimizer: {betas: [0.9, 1.0]}": ["optimizer.betas", "[0, 1)"],
    "optimizer: {betas: [1.0, 0.9]}": ["optimizer.betas", "[0, 1)"],
    "optimizer: {betas: [-0.1, 0.9]}": ["optimizer.betas", "[0, 1)"],
    "train: {eval_every: 5}": ["eval_every", "data.eval"],
}
WRONG_OVERRIDES = {
    "rollout.grup_size=3": ["rollout.grup_size", "'group_size'"],
    "kl.0.beta=1": ["kl.0.beta", "0 item(s)"],
    "seed": ["key=value"],
    "=3": ["key=value"],
}


@pytest.mark.parametrize("text", WRONG_FILES)
def test_a_mistake_is_one_clear_error(tmp_path, text):
    with pytest.raises(UserError) as error:
        load_config(write(tmp_path, text))
    message = str(error.value)
    assert "\n" not in message
    for phrase in WRONG_FILES[text]:
        assert phrase in message


@pytest.mark.parametrize("override", WRONG_OVERRIDES)
def test_a_mistake_in_an_override_is_one_clear_error(override):
    with pytest.raises(UserError) as error:
        load_config(None, [override])
    message = str(error.value)
    assert "\n" not in message
    for phrase in WRONG_OVERRIDES[override]:
        assert phrase in message


@pytest.mark.parametrize("updates", [1, 2, 4])
def test_drop_needs_a_lag_of_a_batch_s_updates_and_no_more(updates):
    settings = ["lag.mode=async", "lag.policy=drop", f"algorithm.updates_per_batch={updates}"]
    assert load_config(None, [*settings, f"lag.max_steps={updates}"]).lag.max_steps == updates
    with pytest.raises(UserError, match=rf"lag\.max_steps.*at least {updates}"):
        load_config(None, [*settings, f"lag.max_steps={updates - 1}"])


@pytest.mark.parametrize("opening", ["[", "{a: ", "- ", '{"a": '])
def test_a_file_nested_too_deeply_is_one_line(tmp_path, opening):
    """The parser in C would end the process."""
    with pytest.raises(UserError, match=r"not valid YAML: .*nested more than 100 levels deep"):
        load_config(write(tmp_path, opening * 10**5))


def test_a_missing_file_names_the_nearest(tmp_path):
    write(tmp_path, "")
    with pytest.raises(UserError, match=r"no such config file.*a\.yaml"):
        load_config(tmp_path / "b.yaml")


@pytest.mark.parametrize(
    "kl",
    [
        "[{estimator: k3, placement: loss, beta: 0.1}]",
        "grpo",
        "{recipe: grpo, beta: 0.1}",
        "[{recipe: grpo}]",
        "none",
        "[]",
    ],
)
def test_the_resolved_config_reads_back(tmp_path, kl):
    config = load_config(write(tmp_path, f"kl: {kl}\nseed: 5\n"))
    assert load_config(None, [f"kl={kl}", "seed=5"]) == config
    assert load_config(write(tmp_path, to_yaml(config))) == config


def test_a_stored_config_begins_with_the_number_of_its_layout(tmp_path):
    text = stored_text(load_config(None))
    assert text.startswith("schema: 1\n")
    assert load_config(write(tmp_path, text)) == load_config(None)
    for number in ("2", "0", "'1'", "true", "null"):
        file = write(tmp_path, text.replace("schema: 1", f"schema: {number}"))
        with pytest.raises(UserError, match=rf"^{file}: schema: got .*; allowed: 1 \(it was written by another "):
            load_config(file)
    (tmp_path / "later").mkdir()
    write(tmp_path / "later", "schema: 2\nkl: grpo\n")
    with pytest.raises(UserError, match=r"a\.yaml: schema: got 2"):
        load_config(write(tmp_path, f"extends: {tmp_path}/later/a.yaml\n"))


@pytest.mark.parametrize(
    ("change", "keys"),
    [
        ("seed=1", ["seed"]),
        ("trainer={max_time: 1}", ["trainer.max_time"]),
        ("kl=grpo", ["kl"]),
        ("kl=[{estimator: k3, beta: 0.1}]", ["kl.0.beta", "kl.0.estimator"]),
        ("rollout.group_size=4", ["rollout.group_size"]),
        ("optimizer.weight_decay=0.5", ["optimizer.weight_decay"]),
        ("eval.suites=[gsm8k]", ["eval.suites.0"]),
    ],
)
def test_what_a_run_computes_makes_another_run(change, keys):
    plain = load_config(None)
    changed = load_config(None, [change])
    assert sorted(differing_keys(plain, changed)) == keys
    assert sorted(differing_keys(changed, plain)) == keys
    assert config_hash(plain) != config_hash(changed)


@pytest.mark.parametrize(
    "change",
    [
        "output=elsewhere",
        "resume=auto",
        "audit.every=3",
        "tracking={uri: none, tags: {a: b}}",
        "train={replica_gib: 4, bucket_mib: 64}",
        "train={strategy: fsdp, devices: 2, nodes: 2, shards: node}",
    ],
)
def test_where_and_on_what_a_run_is_made_does_not_make_another_run(change):
    changed = load_config(None, [change])
    assert changed != load_config(None)
    assert differing_keys(load_config(None), changed) == []
    assert config_hash(changed) == config_hash(load_config(None))


def test_a_key_that_a_stored_config_lacks_is_at_its_default(tmp_path):
    whole = load_config(None, ["seed=3"])
    text = to_yaml(whole)
    assert "  weight_decay: " in text
    older = load_config(write(tmp_path, re.sub(r"\n  weight_decay: .*", "", text)))
    assert differing_keys(older, whole) == []
    assert differing_keys(older, load_config(None, ["seed=3", "optimizer.weight_decay=0.5"])) == [
        "optimizer.weight_decay"
    ]


def test_the_hash_without_the_seed():
    other_seed = load_config(None, ["seed=1"])
    assert config_hash(other_seed, without=("seed",)) == config_hash(load_config(None), without=("seed",))


@pytest.mark.parametrize("key", ["rollout.top_p", "rollout.top_k", "rollout.min_p", "model.lora.dropout"])
def test_a_key_of_other_trainers_that_cannot_be_is_refused_with_its_reason(key):
    with pytest.raises(UserError, match=rf"^{key}: no such key \(given 0.5\): (it is rollout.truncation|with dropout)"):
        load_config(None, [f"{key}=0.5"])


@settings(deadline=None, max_examples=50)
@given(st.text(max_size=30))
def test_no_override_text_raises_another_error(text):
    with contextlib.suppress(UserError):
        load_config(None, [text])


@dataclasses.dataclass
class Part:
    size: int = option(1, "Size.", minimum=1)
    ratio: float | None = option(None, "Ratio.", above=0)


@dataclasses.dataclass
class Whole:
    name: str = option(..., "Required.")
    parts: list[Part] = option(list, "Parts.")
    labels: tuple[str, ...] = option((), "Labels.")


def test_any_schema_is_parsed_with_types_defaults_and_full_keys():
    whole = parse_record(Whole, {"name": 3, "parts": [{"size": 2.0, "ratio": "1e-2"}, {}], "labels": ["a", 1]})
    assert whole == Whole(name="3", parts=[Part(2, 0.01), Part()], labels=("a", "1"))


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({}, "config: needs name"),
        ({"name": "a", "parts": [{"size": 0}]}, "parts.0.size: got 0; allowed: at least 1"),
        ({"name": "a", "parts": [{"siz": 1}]}, "parts.0.siz: no such key (given 1)"),
        ({"name": "a", "parts": {}}, "parts: got {}; allowed: a list"),
        ({"name": True}, "name: got True; allowed: text"),
        ([], "config: got []; allowed: a mapping with the keys name, parts, labels"),
    ],
    ids=["missing", "value", "key", "no list", "no text", "no mapping"],
)
def test_what_a_schema_does_not_allow_is_refused_by_its_full_key(raw, message):
    with pytest.raises(UserError) as error:
        parse_record(Whole, raw, origin="box.yaml")
    assert str(error.value).startswith(f"box.yaml: {message}")


def test_flatten_keeps_empty_containers_as_leaves():
    assert flatten({"a": {}, "b": [], "c": {"d": None}}) == {"a": {}, "b": [], "c.d": None}


@pytest.mark.parametrize("lost", ["kl.0.beta=0.5", "kl.0={estimator: k2, placement: loss, beta: 0.5}"])
def test_an_override_that_a_later_one_replaces_is_an_error_and_one_that_stays_is_none(tmp_path, lost):
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: {source: pocket}\ndata: {train: {dataset: pocket}}\nkl: [{estimator: k1, placement: loss}]\n"
    )
    whole = "kl=[{estimator: k3, placement: loss, beta: 0.1}]"
    with pytest.raises(UserError, match=r"kl\.0.*got.*0\.5.*the later kl=.*replaces it"):
        load_config(path, [lost, whole])
    assert load_config(path, [whole, "kl.0.beta=0.5"]).kl[0]["beta"] == 0.5
    assert load_config(path, ["kl.0.beta=0.1", whole]).kl[0]["beta"] == 0.1, "the same value is not lost"
    lag = load_config(path, ["lag.in_flight=true", "lag={mode: async, max_steps: 2}"]).lag
    assert lag.in_flight, "a mapping with a schema is merged"
    assert lag.max_steps == 2, "a mapping with a schema is merged"


def chain(first, link):
    """``tracking.tags`` in which each of 40 names the one before, and ``a0`` is ``first``.

    ``link`` is the text of each of the others, with X for the one before.
    """
    lines = ["tracking:", "  tags:", f"    a0: {first}"]
    for n in range(1, 40):
        one_before = f"${{tracking.tags.a{n - 1}}}"
        lines.append(f"    a{n}: {link.replace('X', one_before)}")
    return "\n".join(lines) + "\n"


def merges():
    """Ten mappings of which each merges the one before nine times: 9 to the power of 9 keys."""
    lines = ["a0: &a0 {x: 1}"]
    for n in range(1, 10):
        aliases = ", ".join([f"*a{n - 1}"] * 9)
        lines.append(f"a{n}: &a{n}\n  <<: [{aliases}]")
    return "\n".join(lines) + "\n"


LARGE = [  # each of these took more than twenty seconds, gigabytes, or a traceback
    (merges(), "with aliases and merge keys written out"),
    ("kl: [" + "1, " * 300_000 + "]", "more than 10,000 keys and values"),
    ("name: '" + "${seed}" * 100_000 + "'", "more than 10,000 keys and values"),
    ("seed: 1" + ":1" * 100_000, "a number of more than 100 characters .line 1"),
    ("seed: 1" + ":1" * 100_000 + ".5", "a number of more than 100 characters"),
    ("seed: 0x" + "f" * 900_000, "a number of more than 100 characters"),
    ("seed: !!int '0x" + "f" * 5000 + "'", "not valid YAML"),
    ("seed: " + "x" * 900_000, r"seed: got 'x+\.\.\. \(900,002 characters\); allowed: a whole number"),
    ("x" * 900_000 + "y", "holds no key"),
    (chain("x" * 8, "X X"), "interpolations stand for more than 2,000 values and 1,000,000 characters"),
    (chain("''", "X X"), "interpolations stand for more"),
    (chain("[x]", "['X', 'X']"), "interpolations stand for more"),
    (chain("x", "X"), "interpolations lead through more than 20 keys"),
    ("name: ${output}\noutput: ${name}\n", "interpolations lead through more than 20 keys, or back to it"),
    ("name: '" + "${" * 500 + "'", "not valid YAML"),
    ("name: " + "x" * 5000, r"name: got 'x+.*allowed: at most 220 characters"),
]


@pytest.mark.parametrize(("text", "message"), LARGE, ids=range(len(LARGE)))
def test_a_config_over_a_limit_is_refused_in_one_line(tmp_path, text, message):
    """Within two seconds on an idle core; ten are allowed here."""
    with cpu_limit(10), pytest.raises(UserError, match=message) as error:
        load_config(write(tmp_path, text))
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tracking.tags." + "a." * 99 + "b=1", "no such key; a key has at most 30 parts"),
        ("kl=" + "[" * 50_000, "kl: cannot read the value .*nested more than 100"),
        ("seed=0x" + "f" * 60_000, "seed: cannot read the value .*a number of more than 100 characters"),
        ("seed=1" + ":1" * 60_000, "seed: cannot read the value .*a number of more than 100 characters"),
        ("x" * 100_000, r"override 'x+\.\.\. \(100,002 characters\): write key=value"),
        ("seed=" + "x" * 100_000, "seed: got 'x+"),
    ],
)
def test_an_override_over_a_limit_is_refused_in_one_line(text, message):
    with cpu_limit(10), pytest.raises(UserError, match=message) as error:
        load_config(None, [text])
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500


def test_many_interpolations_within_the_limits_are_written_out(tmp_path):
    tags = "".join(f"  t{n}: '${{name}}-${{seed}} ${{.base}}'\n" for n in range(300))
    config = load_config(write(tmp_path, f"seed: 3\nname: a\ntracking:\n tags:\n  base: b\n{tags}"))
    assert config.tracking.tags["t299"] == "a-3 b"


def test_an_interpolation_leads_upwards(tmp_path):
    config = load_config(write(tmp_path, "seed: 3\nname: a\ntracking: {tags: {base: '${...name}'}}\n"))
    assert config.tracking.tags["base"] == "a"


def test_an_interpolation_leads_into_a_list(tmp_path):
    text = "kl: [{estimator: k1, beta: 0.25}]\ntracking: {tags: {a: '${kl[0].beta}', b: '${kl.0.beta}'}}\n"
    assert set(load_config(write(tmp_path, text)).tracking.tags.values()) == {"0.25"}


@pytest.mark.parametrize(
    "content",
    [
        "root:x:0:0:NEEDLE:/root:/bin/sh\nnobody:x:1:1:NEEDLE\n",
        "NEEDLE",
        "NEEDLE: 1\n",
        "NEEDLE:\n  token: NEEDLE\n",
        "- NEEDLE\n",
        "X=NEEDLE\nY=${NEEDLE\n",
        '{"type": "account", "id": "NEEDLE"}',
        "-----BEGIN x-----\nNEEDLE\n-----END x-----\n",
        "a: [NEEDLE\n",
        "a: !NEEDLE\n  b: '${NEEDLE'\n",
        "@NEEDLE: `NEEDLE`\n",
        "a: NEEDLE: NEEDLE\n",
        "\tNEEDLE\n",
        "a: 1\nNEEDLE: 1\nNEEDLE: 2\n",
        "a: *NEEDLE\n",
        "a: '${NEEDLE NEEDLE'\n",
        "!!python/name:os.NEEDLE\n",
    ],
)
def test_the_content_of_a_file_that_is_no_config_is_not_shown(tmp_path, content):
    """A config or a grid from elsewhere may name any file that its user can read."""
    secret = tmp_path / "secret"
    secret.write_text(content)
    config = write(tmp_path, f"extends: {secret}\nkl: grpo\n")
    with pytest.raises(UserError) as config_error:
        load_config(config)
    grid = tmp_path / "grid.yaml"
    grid.write_text(f"base: {secret}\nseeds: 1\n")
    with pytest.raises(UserError) as grid_error:
        plan(read_grid(grid), directory=tmp_path)
    for error in (config_error, grid_error):
        assert "NEEDLE" not in str(error.value)
        assert "\n" not in str(error.value)
        assert str(secret) in str(error.value)


EVERY_KIND = '''
from kl_comedy.kl import KLTerm
from kl_comedy.config.schema import RewardConfig, SuiteConfig
from kl_comedy.registry import KINDS

def part(*_, **__):
    """From a package."""

for kind, table in KINDS.items():
    if kind not in ("recipes", "suites"):
        table.register(f"of_package_{kind}", source="a test", needs="log_ratio", ratio="token", scope="token")(part)

def recipe():
    """A recipe with a part of its own."""
    return (KLTerm("of_package_estimators", beta=0.1),)

def suite():
    """A suite with a reward of its own."""
    return SuiteConfig(name="of_package_suites", reward=RewardConfig(name="of_package_rewards"))

KINDS["recipes"].register("of_package_recipes", source="a test")(recipe)
KINDS["suites"].register("of_package_suites", source="a test", kind_of_suite="generate")(suite)
'''
"""A package that registers a part of every kind, each with the name of its kind."""


def config_with(kind):
    """The sections of a config that uses the package's part of one kind, and its others only through that one."""
    name = f"of_package_{kind}"
    config = load_config(None)
    algorithm = config.algorithm
    sections = {
        "estimators": {"kl": [{"estimator": name, "beta": 0.1}]},
        "corrections": {"kl": [{"estimator": "k1", "beta": 0.1, "correction": name}]},
        "recipes": {"kl": ["grpo", {"recipe": name}]},
        "advantages": {"algorithm": dataclasses.replace(algorithm, advantage=name)},
        "policy_losses": {"algorithm": dataclasses.replace(algorithm, policy_loss=name)},
        "policy_corrections": {"algorithm": dataclasses.replace(algorithm, correction={name: {}})},
        "rewards": {"rewards": [RewardConfig(name="math_verify"), RewardConfig(name=name)]},
        "environments": {"environment": EnvironmentConfig(name=name)},
        "rollouts": {"rollout": dataclasses.replace(config.rollout, backend=name)},
        "datasets": {"data": dataclasses.replace(config.data, eval={"a": DatasetConfig(dataset=name)})},
        "callbacks": {"callbacks": [CallbackConfig(name=name)]},
        "loggers": {"tracking": dataclasses.replace(config.tracking, loggers=[LoggerConfig(name=name)])},
        "suites": {"eval": dataclasses.replace(config.eval, suites=["gsm8k", name])},
    }
    return sections[kind]


@pytest.fixture
def package_of_every_kind(tmp_path, monkeypatch):
    for table in KINDS.values():
        table.load()
        monkeypatch.setattr(table, "_entries", dict(table._entries))
    (tmp_path / "every_kind.py").write_text(EVERY_KIND)
    monkeypatch.syspath_prepend(str(tmp_path))
    # Emptied in place: a module that a test is the first to import would keep a replaced dict for the whole process.
    with mock.patch.dict(plugins.PACKAGES, clear=True):
        importlib.import_module("every_kind")
        yield tmp_path
    del sys.modules["every_kind"]


def packages_of(config):
    return [package.name for package in plugins_of(config).packages]


def test_a_package_that_the_config_does_not_use_does_not_count(package_of_every_kind):
    config = load_config(None)
    assert packages_of(config) == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_package_counts_where_the_config_uses_a_part_of_it(package_of_every_kind, kind):
    config = dataclasses.replace(load_config(None), **config_with(kind))
    assert packages_of(config) == ["every_kind"]


def test_a_package_counts_where_the_file_of_a_suite_uses_a_part_of_it(package_of_every_kind):
    suite = package_of_every_kind / "own.yaml"
    suite.write_text("data: {dataset: of_package_datasets}\nreward: {name: math_verify}\n")
    base = load_config(None)
    with_suite = dataclasses.replace(base.eval, suites=[str(suite)])
    without = dataclasses.replace(base.eval, suites=[])
    assert packages_of(dataclasses.replace(base, eval=with_suite)) == ["every_kind"]
    assert packages_of(dataclasses.replace(base, eval=without)) == []


def test_a_package_counts_where_an_audit_uses_a_part_of_it(package_of_every_kind):
    """An audit that is never made uses nothing."""
    base = load_config(None)
    made = dataclasses.replace(base.audit, every=1, terms=["own", "of_package_recipes"])
    never_made = dataclasses.replace(made, every=0)
    assert packages_of(dataclasses.replace(base, audit=made)) == ["every_kind"]
    assert packages_of(dataclasses.replace(base, audit=never_made)) == []


@pytest.mark.parametrize(
    "file", sorted((Path(__file__).parents[2] / "results").rglob("export.parquet")), ids=lambda file: file.parent.name
)
def test_the_configs_of_exported_runs_are_read(file, tmp_path):
    """About three runs of each export of this repository: the first, and those at equal distances."""
    runs = open_runs(file)
    frame = runs.frame()
    every = max(len(frame) // 3, 1)
    for row in frame.iloc[::every].to_dict("records"):
        config = load_config(runs.config(row["run_id"], tmp_path))
        assert str(config.seed) == row["params.seed"]
        assert config.train.steps == int(row["params.train.steps"])


QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("beta=0.1", "'kl.0.beta'"),
        ("lr=1e-5", "'optimizer.lr'"),
        ("learning_rate=1e-5", "'optimizer.lr'"),
        ("optimizer.learning_rate=1e-5", "'lr'"),
        ("kl=[{estimator: k3, coef: 0.1}]", "'beta'"),
        ("kl=k3", "'kl=[{estimator: k3, placement: loss}]'"),
        ("kl.estimator=k3", "kl.0.estimator"),
        ("kl.7.beta=1", "kl.0.beta"),
        ("lag.mode=off_policy", "'replayed'"),
        ("batch_size=4", "'rollout.prompts_per_batch'"),
        ("model_name=x", "'model.source'"),
        ("num_iterations=2", "'algorithm.updates_per_batch'"),
    ],
)
def test_a_name_of_another_framework_is_answered_with_ours(override, meant):
    from kl_comedy.kl import resolve_terms

    with pytest.raises(UserError) as caught:
        resolve_terms(load_config(QUICKSTART, [override]).kl)
    before_the_list, _, _ = str(caught.value).partition("allowed:")
    assert f"did you mean {meant}" in before_the_list


def test_every_alias_leads_to_a_key_that_exists():
    """Of the config's keys; a name without dots is one of some section, or a value."""
    from kl_comedy.config import flatten, to_plain
    from kl_comedy.errors import ALIASES

    keys = set(flatten(to_plain(load_config(QUICKSTART))))
    for names in ALIASES.values():
        for name in names:
            assert "." not in name or name in keys, name
