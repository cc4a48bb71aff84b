"""Config: what a user gets wrong, and what they are told."""

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kl_comedy.kl
import kl_comedy.objective  # noqa: F401  (register the names the schema checks)
from kl_comedy.config import config_hash, flatten, load_config, to_yaml
from kl_comedy.errors import UserError


@pytest.fixture(autouse=True)
def stand_in_names(monkeypatch):
    """The heavy rooms are not imported here; their registries answer for the default names."""
    from kl_comedy.registry import DATASETS, REWARDS, ROLLOUTS

    for table, name in ((DATASETS, "pocket"), (REWARDS, "math_verify"), (ROLLOUTS, "hf")):
        if name not in table:
            monkeypatch.setitem(table._entries, name, object())


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


def test_the_hash_ignores_where_a_run_is_kept_and_nothing_else(tmp_path):
    base = load_config(None)
    assert config_hash(load_config(None, ["output=elsewhere", "resume=auto"])) == config_hash(base)
    assert config_hash(load_config(None, ["seed=1"])) != config_hash(base)
    assert config_hash(load_config(None, ["seed=1"]), without=("seed",)) == config_hash(base, without=("seed",))


@settings(deadline=None)
@given(st.text(max_size=30))
def test_no_override_text_escapes_as_another_error(text):
    with contextlib.suppress(UserError):
        load_config(None, [text])


def test_flatten_keeps_empty_containers_as_leaves():
    assert flatten({"a": {}, "b": [], "c": {"d": None}}) == {"a": {}, "b": [], "c.d": None}
