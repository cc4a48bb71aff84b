"""Keys of version 0.1 are still read, under their new names, and a run keeps its config hash."""

from pathlib import Path

import pytest

from kl_comedy.config import config_hash, load_config, to_plain
from kl_comedy.config.old_names import FIXED, MOVED, REMOVED, default_params
from kl_comedy.errors import UserError

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "configs/quickstart.yaml"

VALUE = ["algorithm.advantage=gae", "algorithm.value.lam=0.9", "algorithm.value.trunk=true", "algorithm.value.lr=1e-3"]
ADAMW = ["optimizer.betas=[0.9,0.95]", "optimizer.eps=1e-6", "optimizer.weight_decay=0.1"]
MODEL = ["model.source=a", "model.revision=main", "model.trust_remote_code=true", "model.options={subfolder: x}"]
TEACHER = ["reference.teacher={source: a, revision: main, gguf_file: b.gguf, trust_remote_code: true, dtype: bfloat16}"]
SERVED = ["reference.teacher={source: a, url: 'http://127.0.0.1:8000', server_model: m, api_key_env: OTHER}"]
SHARDS = ["train.strategy=fsdp", "train.devices=2", "train.nodes=2", "train.shards=node", "rollout.replica_gib=4"]

# The hashes are those that version 0.1 gave these overrides.
HASHES = {
    "value head": (VALUE, "911f00af2ae7"),
    "AdamW": (ADAMW, "9b9a8936ca28"),
    "model": (MODEL, "3ebe6df8775b"),
    "teacher": (TEACHER, "31faa50ed85b"),
    "teacher behind a server": (SERVED, "07ff3d5a777a"),
    "teacher's adapter": (["reference.teacher={source: a, adapter: b, options: {subfolder: c}}"], "0209383b502f"),
    "moving reference": (
        ["reference.ema_decay=0.9", "reference.period=null", "reference.max_kl=0.05"],
        "89cd5285b0ed",
    ),
    "asynchronous sampling": (
        ["lag.mode=async", "lag.max_steps=2", "lag.policy=drop", "lag.in_flight=true"],
        "56f47140fe13",
    ),
    "shards": (SHARDS, "377bc25c679d"),
}


@pytest.mark.parametrize(("overrides", "stored_hash"), HASHES.values(), ids=HASHES)
def test_a_setting_has_the_hash_of_stored_runs(overrides, stored_hash):
    assert config_hash(load_config(QUICKSTART, overrides)) == stored_hash


def test_an_old_key_is_read_as_the_new_one(caplog):
    config = load_config(QUICKSTART, SHARDS)
    assert "rollout.replica_gib is now called train.replica_gib" in caplog.text
    assert to_plain(config) == to_plain(load_config(QUICKSTART, [*SHARDS[:-1], "train.replica_gib=4"]))


@pytest.mark.parametrize("key", FIXED)
def test_a_key_that_could_have_one_value_is_refused_with_its_reason(key):
    only_value, reason = FIXED[key]
    section = ["model.lora={}"] if key.startswith("model.lora") else []
    assert config_hash(load_config(QUICKSTART, [*section, f"{key}={only_value}"])) == config_hash(
        load_config(QUICKSTART, section)
    )
    with pytest.raises(UserError) as error:
        load_config(QUICKSTART, [*section, f"{key}=7"])
    assert str(error.value).startswith(f"{key}: got 7; allowed: {only_value}")
    assert reason in str(error.value)


@pytest.mark.parametrize("key", REMOVED)
def test_a_key_without_effect_is_reported_where_it_is_set_and_only_there(key, caplog):
    default, advice = REMOVED[key]
    stored = config_hash(load_config(QUICKSTART))
    assert config_hash(load_config(QUICKSTART, [f"{key}={default}"])) == stored
    assert not caplog.text
    assert config_hash(load_config(QUICKSTART, [f"{key}=7"])) == stored
    assert f"{key} is not used any more; {advice}" in caplog.text


def test_old_and_new_name_with_two_values_are_refused():
    both = ["rollout.replica_gib=4", "train.replica_gib=8"]
    with pytest.raises(UserError, match=r"^rollout\.replica_gib: got .*train\.replica_gib says"):
        load_config(QUICKSTART, both)


def test_a_stored_config_with_every_old_key_at_its_default_is_read_in_silence(caplog):
    overrides = []
    for key, value in default_params().items():
        needs_section = key.startswith(("model.lora", "reference.teacher"))
        if not needs_section and value is not None:
            overrides.append(f"{key}={value}")
    assert len(overrides) >= 5
    assert to_plain(load_config(QUICKSTART, overrides)) == to_plain(load_config(QUICKSTART))
    assert not caplog.text


def test_each_moved_key_has_a_default_where_runs_were_stored_without_it():
    defaults = default_params()
    for moved in MOVED:
        for name in moved.names:
            assert f"{moved.section}.{name}" in defaults
    assert defaults["rollout.bucket_mib"] == 256
