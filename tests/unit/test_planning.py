"""The plan of memory and time: sizes of known models, what changes what, what makes a run fit, and real peaks."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from kl_comedy.config import load_config
from kl_comedy.errors import UserError
from kl_comedy.lab.planning import GPUS, KNOWN, Assumed, Lengths, device_named, known_config, plan_run, shape_of
from kl_comedy.lab.planning.memory import AUTOCAST_SHARE
from kl_comedy.lab.planning.plan import changed
from kl_comedy.models.introspection import activation_values
from kl_comedy.models.logprobs import token_pass

ROOT = Path(__file__).parents[2]
PAPER = sorted((ROOT / "configs" / "paper").glob("*.yaml"))
SMALL = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "head_dim": 8,
}
PUBLISHED_BILLIONS = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": 0.1345,
    "Qwen/Qwen2.5-0.5B": 0.494,
    "Qwen/Qwen2.5-1.5B": 1.544,
    "Qwen/Qwen2.5-7B": 7.616,
    "Qwen/Qwen2.5-7B-Instruct": 7.616,
    "Qwen/Qwen3-4B-Instruct-2507": 4.022,
    "meta-llama/Llama-3.1-8B": 8.030,
    "meta-llama/Llama-3.1-8B-Instruct": 8.030,
}
H100 = GPUS["h100-80"]


def config_of(*overrides, source="Qwen/Qwen2.5-0.5B"):
    return load_config(None, [f"model.source={source}", "rollout.max_new_tokens=512", *overrides])


def bytes_of(plan, name):
    return sum(item.bytes for item in plan.components if item.name == name)


@pytest.mark.parametrize("source", KNOWN)
def test_a_known_model_has_the_parameters_its_makers_say(source):
    shape = shape_of(config_of(source=source).model)
    assert shape.parameters / 1e9 == pytest.approx(PUBLISHED_BILLIONS[source], abs=5e-4)
    assert shape.trainable == shape.parameters == shape.body + shape.embedding + shape.head
    assert shape.root == shape.embedding + shape.head + shape.hidden


def test_a_local_model_is_read_from_its_config_alone(tmp_path):
    known_config("Qwen/Qwen3-4B-Instruct-2507", **SMALL).save_pretrained(tmp_path)
    shape = shape_of(config_of(source=str(tmp_path)).model)
    model = AutoModelForCausalLM.from_config(known_config("Qwen/Qwen3-4B-Instruct-2507", **SMALL))
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert (shape.layers, shape.kv_width, shape.head) == (3, 16, 0)
    with_adapter = shape_of(config_of("model.lora={rank: 4}", source=str(tmp_path)).model)
    assert 0 < with_adapter.trainable == with_adapter.parameters - shape.parameters


def test_prompts_are_no_longer_than_the_model_lets_them():
    plan = plan_run(load_config(None, ["rollout.max_new_tokens=40"]), H100)
    assert (plan.load.prompt, plan.load.completion) == (128 - 40, 40)


def test_what_cannot_be_planned_is_told():
    with pytest.raises(UserError, match=r"model\.source"):
        shape_of(config_of(source="./nowhere").model)
    with pytest.raises(UserError, match=r"config\.json"):
        shape_of(config_of("model.gguf_file=x.gguf").model)
    with pytest.raises(UserError, match="did you mean 'h100-80'"):
        device_named("h100-81")
    with pytest.raises(UserError, match="--completion-tokens: got 513; allowed: 1 to 512"):
        plan_run(config_of(), H100, lengths=Lengths(completion=513))


def test_weights_gradients_and_optimizer_are_counted_to_the_byte():
    plan = plan_run(config_of(), H100)
    whole = 4 * plan.shape.parameters
    assert bytes_of(plan, "parameters") == bytes_of(plan, "gradients") == bytes_of(plan, "reference") == whole
    assert bytes_of(plan, "optimizer") == 2 * whole
    sharded = plan_run(config_of("train.strategy=fsdp", "train.devices=4"), H100)
    assert bytes_of(sharded, "parameters") == bytes_of(sharded, "reference") == whole / 4
    assert bytes_of(sharded, "sampling replica") == whole
    adapter = plan_run(config_of("model.lora={rank: 8}"), H100)
    assert bytes_of(adapter, "reference") == 0 and bytes_of(adapter, "optimizer") == 8 * adapter.shape.trainable
    ema = plan_run(config_of("kl=[{estimator: k3, placement: loss, beta: 0.1, reference: ema}]"), H100)
    assert bytes_of(ema, "ema reference") == 2 * whole


@settings(deadline=None, max_examples=24)
@given(
    st.sampled_from(
        [
            ("train.microbatch_tokens=8192", "train.microbatch_tokens=2048"),
            ("train.microbatch_tokens=8192", "model.gradient_checkpointing=true"),
            ("train.strategy=ddp", "train.strategy=fsdp"),
            ("rollout.batch_sequences=64", "rollout.batch_sequences=8"),
            ("model.head_chunk_elements=100000000", "model.head_chunk_elements=1000000"),
            ("model.dtype=float32", "model.dtype=bfloat16"),
        ]
    ),
    st.integers(1, 4),
)
def test_what_saves_memory_never_costs_any(change, doublings):
    common = [
        "train.strategy=ddp",
        f"train.devices={2**doublings}",
        "rollout.prompts_per_batch=32",
        "rollout.backend=hf",
        "train.microbatch_tokens=8192",
    ]
    wide, lean = (plan_run(config_of(*common, text), H100, shape=QWEN) for text in change)
    if "strategy" in change[1]:  # shards, but for the whole copy that hf samples from
        assert lean.peak_bytes - bytes_of(lean, "sampling replica") < wide.peak_bytes
        return
    assert lean.peak_bytes <= wide.peak_bytes


QWEN = shape_of(config_of().model)


def test_time_follows_work_and_devices():
    base = plan_run(config_of(), H100).timing
    longer = plan_run(config_of("rollout.max_new_tokens=1024"), H100).timing
    assert longer.generate_s > base.generate_s and longer.learn_s > base.learn_s
    two = plan_run(config_of("train.strategy=ddp", "train.devices=2"), H100).timing
    assert base.learn_s / 2 <= two.learn_s < base.learn_s
    assert two.device_hours == 2 * two.run_hours
    better = plan_run(config_of(), H100, assumed=Assumed(flops=0.8)).timing
    assert better.learn_s < base.learn_s
    fast = plan_run(config_of("train.precision=bf16"), H100).timing
    assert fast.learn_s < base.learn_s / 5
    overlapped = plan_run(config_of("lag.mode=async", "lag.max_steps=2"), H100).timing
    assert overlapped.update_s == max(overlapped.generate_s, overlapped.learn_s)


def test_what_does_not_fit_is_told_with_what_would():
    plan = plan_run(config_of("train.precision=bf16", source="meta-llama/Llama-3.1-8B"), H100)
    assert not plan.fits and "does not fit" in plan.warnings[0]
    texts = [" ".join(remedy.overrides) for remedy in plan.remedies]
    assert any("train.strategy=fsdp train.devices=" in text for text in texts)
    assert any("model.lora={rank: 16}" in text for text in texts)
    for remedy in plan.remedies:
        words = ["train.precision=bf16", "rollout.prompts_per_batch=8", *remedy.overrides]
        again = config_of(*words, source="meta-llama/Llama-3.1-8B")
        assert plan_run(again, H100).fits, remedy
    small = plan_run(config_of("train.precision=bf16"), H100)
    assert small.fits and small.remedies == () and small.warnings == ()


def test_this_machine_is_measured():
    here = device_named("cpu")
    assert here.kind == "cpu" and here.fp32_flops > 1e8 and here.bandwidth > 1e7 and here.memory_bytes > 2**28


def test_the_command_prints_tables_and_json_and_can_fail(tmp_path):
    from kl_comedy.cli.main import app
    from kl_comedy.errors import RunFailed

    file = tmp_path / "run.yaml"
    file.write_text("model: {source: Qwen/Qwen2.5-7B}\n")
    words = ["plan", str(file), "--gpu", "a100-40", "--format", "json"]
    done = CliRunner().invoke(app, [*words, "--fail-if-too-big"])
    assert done.exit_code == 1 and isinstance(done.exception, RunFailed) and "on a100-40" in str(done.exception)
    found = json.loads(CliRunner().invoke(app, words).stdout)
    assert not found["memory"]["fits"] and found["remedies"] and found["time"]["device_hours"] > 0
    phases = {"always": 0.0, "learning": 0.0, "sampling": 0.0}
    for item in found["memory"]["components"]:
        phases[item["phase"]] += item["bytes"]
    expected = phases["always"] + max(phases["learning"], phases["sampling"])
    assert found["memory"]["peak_bytes"] == pytest.approx(expected)
    told = CliRunner().invoke(app, [*words[:2], "--gpu", "h100-80", "--gpus", "8", "train.strategy=fsdp"])
    assert told.exit_code == 0 and "sampling replica" in told.stdout and "device hours" in told.stdout
    assert "train.devices: got 8" in str(CliRunner().invoke(app, [*words, "--gpus", "8"]).exception)


@pytest.mark.parametrize("path", PAPER, ids=lambda path: path.stem)
def test_every_paper_recipe_can_be_planned(path):
    config = load_config(path, [])
    plan = plan_run(config, H100)
    assert not plan.fits, "seven billion parameters with AdamW in float32 are too much for one device"
    assert any("train.strategy=fsdp" in text for remedy in plan.remedies for text in remedy.overrides)


def test_changes_are_those_that_overrides_make():
    changes = [("train.strategy", "fsdp"), ("train.devices", 2), ("model.gradient_checkpointing", True)]
    words = ["train.strategy=fsdp", "train.devices=2", "model.gradient_checkpointing=true"]
    assert dataclasses.asdict(changed(config_of(), changes)) == dataclasses.asdict(config_of(*words))


def test_autocast_keeps_the_share_that_is_assumed():
    """Bytes that autograd saves of a real pass, each storage once, without weights, their copies and the mask."""
    config = known_config("Qwen/Qwen2.5-7B", **{**SMALL, "hidden_size": 96, "intermediate_size": 256})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    weights = {tuple(shape) for p in model.parameters() for shape in (p.shape, p.shape[::-1])}
    rows, prompt, length = 8, 20, 60
    ids = torch.randint(0, 64, (rows, length))

    def saved(autocast):
        kept = {}

        def pack(tensor):
            if tuple(tensor.shape) not in weights and not (tensor.ndim == 4 and tensor.shape[1] == 1):
                kept[tensor.untyped_storage().data_ptr()] = tensor  # held, so that no address is used twice
            return tensor

        with (
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
            torch.autocast("cpu", torch.bfloat16, enabled=autocast),
        ):
            token_pass(
                model,
                prompt_ids_BP=ids[:1, :prompt].expand(rows, -1),
                prompt_mask_BP=torch.ones(rows, prompt),
                ids_BT=ids,
                mask_BT=torch.ones(rows, length, dtype=torch.bool),
                temperature=1.0,
                chunk_elements=2**16,
            )
        return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())

    whole, narrow = saved(False), saved(True)
    expected = 4 * activation_values(config, checkpoints=False) * (prompt + rows * (length - 1))
    assert 0.67 < expected / whole < 1.5
    assert narrow / whole == pytest.approx(AUTOCAST_SHARE, abs=0.1)
