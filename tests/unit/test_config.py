"""Config: defaults, overrides, errors that name the key, and the hash."""

import contextlib
import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kl_comedy.config import config_hash, flatten, load_config, to_yaml
from kl_comedy.config.validate import option, parse_record
from kl_comedy.errors import UserError


def write(tmp_path, text):
    file = tmp_path / "a.yaml"
    file.write_text(text)
    return file


def message(tmp_path, text, *overrides):
    with pytest.raises(UserError) as error:
        load_config(write(tmp_path, text), overrides)
    return str(error.value)


def test_sparse_yaml_keeps_the_defaults(tmp_path):
    config = load_config(write(tmp_path, "seed: 3\nrollout: {group_size: 4}\n"))
    assert (config.seed, config.rollout.group_size, config.rollout.temperature) == (3, 4, 1.0)


def test_overrides_win_and_reach_into_lists(tmp_path):
    file = write(tmp_path, "kl: [{estimator: k1, beta: 0.1}]\nrewards: [{name: math_verify}]\n")
    config = load_config(file, ["kl.0.beta=0.2", "rewards.0.weight=2", "optimizer.lr=3e-4"])
    assert config.kl == [{"estimator": "k1", "beta": 0.2}]
    assert config.rewards[0].weight == 2.0 and config.optimizer.lr == 3e-4


def test_an_override_replaces_a_free_form_mapping_and_merges_one_with_a_schema(tmp_path):
    file = write(tmp_path, "model: {source: x, options: {preset: tiny}}\ndata: {eval: {a: {limit: 3}}}\n")
    config = load_config(file, ["model.options={}", "data.eval={b: {limit: 4}}", "data.eval.a={seed: 2}"])
    assert config.model.options == {} and config.model.source == "x"
    assert config.data.eval["a"].limit == 3 and config.data.eval["a"].seed == 2 and config.data.eval["b"].limit == 4


def test_a_recipe_takes_a_beta(tmp_path):
    assert load_config(write(tmp_path, "kl: grpo\n"), ["kl.beta=0.5"]).kl == {"recipe": "grpo", "beta": 0.5}


@pytest.mark.parametrize(
    ("text", "overrides", "says"),
    [
        ("optimizer: {lrr: 1}\n", [], ["optimizer.lrr", "'lr'"]),
        ("optimzer: {lr: 1}\n", [], ["optimzer", "'optimizer'"]),
        ("", ["rollout.grup_size=3"], ["rollout.grup_size", "'group_size'"]),
        ("kl: [{estimator: k33}]\n", [], ["kl.0.estimator", "'k3'"]),
        ("kl: [{estimator: k1, cap: 0, correction: token}]\n", [], ["kl.0.cap", "above 0"]),
        ("kl: [{estimator: k1, placement: loss, credit: own}]\n", [], ["kl.0: impossible KL term", "credit"]),
        ("kl: grppo\n", [], ["kl", "'grpo'"]),
        ("", ["kl.0.beta=1"], ["kl.0.beta", "0 item(s)"]),
        ("callbacks: [{name: nothing}]\n", [], ["callbacks.0.name", "'nothing'"]),
        ("trainer: 3\n", [], ["trainer", "a mapping"]),
        ("rollout: {stop: end}\n", [], ["rollout.stop", "a list"]),
        ("data: {eval: {a: {limit: 0}}}\n", [], ["data.eval.a.limit", "at least 1"]),
        ("algorithm: {value: {lam: 1.5}}\n", [], ["algorithm.value.lam", "at most 1"]),
        ("seed: abc\n", [], ["seed", "'abc'", "whole number"]),
        ("seed: 1.5\n", [], ["seed", "1.5", "whole number"]),
        ("seed: null\n", [], ["seed", "whole number"]),
        ("optimizer: {lr: fast}\n", [], ["optimizer.lr", "'fast'", "a number"]),
        ("optimizer: {lr: -1}\n", [], ["optimizer.lr", "above 0"]),
        ("optimizer: {lr: .nan}\n", [], ["optimizer.lr", "finite"]),
        ("optimizer: 3\n", [], ["optimizer", "a mapping with the keys", "lr"]),
        ("rewards: {name: x}\n", [], ["rewards", "a list"]),
        ("rewards: []\n", [], ["rewards", "at least one"]),
        ("algorithm: {advantage: rlo}\n", [], ["algorithm.advantage", "'rlo'", "'rloo'"]),
        ("model: {dtype: fp32}\n", [], ["model.dtype", "'fp32'", "float32"]),
        ("rollout: {prompts_per_batch: 5}\nalgorithm: {updates_per_batch: 2}\n", [], ["divisor", "(5)"]),
        ("lag: {steps: 2}\n", [], ["lag.steps", "replayed"]),
        ("lag: {mode: replayed, steps: 3}\nalgorithm: {updates_per_batch: 2}\n", [], ["lag.steps", "multiple"]),
        ("rollout: {group_size: 1}\n", [], ["rollout.group_size", "at least 2"]),
        ("name: ../../etc\n", [], ["name", "folder"]),
        ("", ["seed"], ["key=value"]),
        ("", ["=3"], ["key=value"]),
        ("kl: []\n", ["kl.0.beta=1"], ["kl.0.beta", "0 item(s)"]),
        ("a: [\n", [], ["not valid YAML"]),
        ("- 1\n", [], ["mapping of keys"]),
        ("seed: ${nowhere}\n", [], ["seed", "nowhere"]),
        ("optimizer: {betas: [0.9]}\n", [], ["optimizer.betas", "two numbers"]),
        ("train: {eval_every: 5}\n", [], ["eval_every", "data.eval"]),
    ],
)
def test_one_clear_error(tmp_path, text, overrides, says):
    got = message(tmp_path, text, *overrides)
    assert "\n" not in got
    for word in says:
        assert word in got, got


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
    again = load_config(write(tmp_path, to_yaml(config)))
    assert again == config


def test_the_hash_ignores_where_a_run_is_stored_and_nothing_else(tmp_path):
    base = load_config(None)
    for change in ("seed=1", "trainer={max_time: 1}", "kl=grpo", "rollout.group_size=4"):
        assert config_hash(load_config(None, [change])) != config_hash(base), change
    for same in ("output=elsewhere", "resume=auto", "rollout.replica_gib=4", "rollout.bucket_mib=64", "callbacks=[]"):
        assert config_hash(load_config(None, [same])) == config_hash(base), same
    assert config_hash(load_config(None, ["seed=1"]), without=("seed",)) == config_hash(base, without=("seed",))


@settings(deadline=None)
@given(st.text(max_size=30))
def test_no_override_text_escapes_as_another_error(text):
    with contextlib.suppress(UserError):
        load_config(None, [text])


def test_a_renamed_value_is_read_with_a_warning(tmp_path, caplog):
    config = load_config(write(tmp_path, "train: {strategy: fsdp1}\n"))
    assert config.train.strategy == "fsdp"
    assert [record.getMessage() for record in caplog.records] == ["train.strategy: fsdp1 is now called fsdp"]


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
    for raw, message in (
        ({}, "box.yaml: config: needs name"),
        ({"name": "a", "parts": [{"size": 0}]}, "box.yaml: parts.0.size: got 0; allowed: at least 1"),
        ({"name": "a", "parts": [{"siz": 1}]}, "box.yaml: parts.0.siz: no such key (given 1)"),
        ({"name": "a", "parts": {}}, "box.yaml: parts: got {}; allowed: a list"),
        ({"name": True}, "box.yaml: name: got True; allowed: text"),
        ([], "box.yaml: config: got []; allowed: a mapping with the keys name, parts, labels"),
    ):
        with pytest.raises(UserError) as error:
            parse_record(Whole, raw, origin="box.yaml")
        assert str(error.value).startswith(message)


def test_flatten_keeps_empty_containers_as_leaves():
    assert flatten({"a": {}, "b": [], "c": {"d": None}}) == {"a": {}, "b": [], "c.d": None}
