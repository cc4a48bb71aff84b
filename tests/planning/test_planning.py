"""The plan of memory and time: sizes of known models, what changes what, what makes a run fit, and real peaks."""

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from kl_comedy.cli.main import app
from kl_comedy.config import load_config
from kl_comedy.errors import RunFailed, UserError
from kl_comedy.models.introspection import activation_values
from kl_comedy.planning.plan import AUTOCAST_SHARE, Assumed, Lengths, Plan, changed, splits
from kl_comedy.planning.sizes import GPUS, KNOWN, _built_shape, device_named, known_config, shape_of
from passes import token_pass

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "research" / "scripts"))
from doc_tables.plans import PUBLISHED  # noqa: E402

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
    "Qwen/Qwen2.5-0.5B-Instruct": 0.494,
    "Qwen/Qwen2.5-1.5B": 1.544,
    "Qwen/Qwen2.5-1.5B-Instruct": 1.544,
    "Qwen/Qwen2.5-7B": 7.616,
    "Qwen/Qwen2.5-7B-Instruct": 7.616,
    "Qwen/Qwen3-4B-Instruct-2507": 4.022,
    "meta-llama/Llama-3.1-8B": 8.030,
    "meta-llama/Llama-3.1-8B-Instruct": 8.030,
}
H100 = GPUS["h100-80"]


def config_of(*overrides, source="Qwen/Qwen2.5-0.5B"):
    return load_config(None, [f"model.source={source}", "rollout.max_new_tokens=512", *overrides])


def module_of(path):
    """A benchmark, imported from its file. Its import changes sys.path, which other tests must not see."""
    path_before = list(sys.path)
    spec = importlib.util.spec_from_file_location(f"bench_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path[:] = path_before
    return module


def bytes_of(plan, name):
    """What a plan counts under the name; 0 where it has no such part."""
    return sum(item.bytes for item in plan.components if item.name == name)


QWEN = shape_of(config_of().model)


# --- sizes of models ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("source", KNOWN)
def test_a_known_model_has_the_parameters_its_makers_say(source):
    shape = shape_of(config_of(source=source).model)
    assert shape.parameters / 1e9 == pytest.approx(PUBLISHED_BILLIONS[source], abs=5e-4)


@pytest.mark.parametrize("source", KNOWN)
def test_the_parts_of_a_known_model_add_up(source):
    shape = shape_of(config_of(source=source).model)
    assert shape.parameters == shape.body + shape.embedding + shape.head
    assert shape.trainable == shape.parameters
    # What FSDP keeps in no block: embedding, head and the final norm, which has one weight per hidden unit.
    assert shape.root == shape.embedding + shape.head + shape.hidden


@pytest.mark.parametrize("lora", ["null", "{rank: 4}", "{rank: 2, target_modules: [k_proj, down_proj, up_proj]}"])
@pytest.mark.parametrize(
    "source", ["pocket", "Qwen/Qwen2.5-0.5B", "Qwen/Qwen3-4B-Instruct-2507", "meta-llama/Llama-3.1-8B"]
)
def test_what_is_counted_is_what_is_built(source, lora):
    model = config_of(f"model.lora={lora}", source=source).model
    counted = dataclasses.replace(shape_of(model), config=None)
    built = dataclasses.replace(_built_shape(model), config=None)
    assert counted == built


@pytest.fixture(scope="module")
def local_model(tmp_path_factory):
    """A folder with the config of a small model, and no weights."""
    folder = tmp_path_factory.mktemp("model")
    known_config("Qwen/Qwen3-4B-Instruct-2507", **SMALL).save_pretrained(folder)
    return str(folder)


def test_a_local_model_is_read_from_its_config_alone(local_model):
    shape = shape_of(config_of(source=local_model).model)
    model = AutoModelForCausalLM.from_config(known_config("Qwen/Qwen3-4B-Instruct-2507", **SMALL))
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert shape.layers == 3
    assert shape.kv_width == 16, "two key-value heads of 8"
    assert shape.head == 0, "tied to the embeddings"


def test_of_a_model_with_an_adapter_only_the_adapter_is_trained(local_model):
    base = shape_of(config_of(source=local_model).model)
    with_adapter = shape_of(config_of("model.lora={rank: 4}", source=local_model).model)
    assert with_adapter.trainable > 0
    assert with_adapter.trainable == with_adapter.parameters - base.parameters


def test_prompts_are_no_longer_than_the_model_lets_them():
    plan = Plan(load_config(None, ["rollout.max_new_tokens=40"]), H100)
    assert (plan.load.prompt, plan.load.completion) == (128 - 40, 40)


# --- what cannot be planned ---------------------------------------------------------------------------------------
def test_a_model_that_is_nowhere_cannot_be_planned():
    with pytest.raises(UserError, match=r"model\.source"):
        shape_of(config_of(source="./nowhere").model)


def test_a_gguf_file_cannot_be_planned():
    with pytest.raises(UserError, match=r"config\.json"):
        shape_of(config_of("model.gguf_file=x.gguf").model)


def test_an_unknown_device_is_refused_with_the_nearest():
    with pytest.raises(UserError, match="did you mean 'h100-80'"):
        device_named("h100-81")


def test_completions_longer_than_the_config_lets_them_are_refused():
    with pytest.raises(UserError, match="--completion-tokens: got 513; allowed: 1 to 512"):
        Plan(config_of(), H100, Lengths(completion=513))


# --- memory -------------------------------------------------------------------------------------------------------
WHOLE_COPY = 4 * QWEN.parameters
"""Bytes of the weights in float32."""


def test_weights_gradients_and_optimizer_are_counted_to_the_byte():
    plan = Plan(config_of(), H100)
    assert bytes_of(plan, "parameters") == WHOLE_COPY
    assert bytes_of(plan, "gradients") == WHOLE_COPY
    assert bytes_of(plan, "reference") == WHOLE_COPY
    assert bytes_of(plan, "optimizer") == 2 * WHOLE_COPY, "two moments of AdamW"


def test_shards_are_counted_to_the_byte():
    plan = Plan(config_of("train.strategy=fsdp", "train.devices=4"), H100)
    assert bytes_of(plan, "parameters") == WHOLE_COPY / 4
    assert bytes_of(plan, "reference") == WHOLE_COPY / 4
    assert bytes_of(plan, "sampling replica") == WHOLE_COPY


def test_an_adapter_needs_no_reference_copy():
    """The base without its adapter is the reference."""
    plan = Plan(config_of("model.lora={rank: 8}"), H100)
    assert bytes_of(plan, "reference") == 0
    assert bytes_of(plan, "optimizer") == 8 * plan.shape.trainable, "two moments in float32"


def test_an_ema_needs_its_weights_and_a_float32_average():
    plan = Plan(config_of("kl=[{estimator: k3, placement: loss, beta: 0.1, reference: ema}]"), H100)
    assert bytes_of(plan, "ema reference") == 2 * WHOLE_COPY


SAVINGS = {
    "smaller micro-batches": ("train.microbatch_tokens=8192", "train.microbatch_tokens=2048"),
    "checkpoints of activations": ("train.microbatch_tokens=8192", "model.gradient_checkpointing=true"),
    "fewer sequences at a time": ("rollout.batch_sequences=64", "rollout.batch_sequences=8"),
    "smaller chunks of logits": ("model.head_chunk_elements=100000000", "model.head_chunk_elements=1000000"),
    "weights in 16 bits": ("model.dtype=float32", "model.dtype=bfloat16"),
}


def plan_of_devices(devices, override):
    return Plan(
        config_of(
            "train.strategy=ddp",
            f"train.devices={devices}",
            "rollout.prompts_per_batch=32",
            "rollout.backend=hf",
            "train.microbatch_tokens=8192",
            override,
        ),
        H100,
        shape=QWEN,
    )


@pytest.mark.parametrize("devices", [2, 4, 8, 16])
@pytest.mark.parametrize(("wide", "lean"), SAVINGS.values(), ids=SAVINGS)
def test_what_saves_memory_never_costs_any(wide, lean, devices):
    assert plan_of_devices(devices, lean).peak_bytes <= plan_of_devices(devices, wide).peak_bytes


@pytest.mark.parametrize("devices", [2, 4, 8, 16])
def test_shards_save_memory_but_for_the_copy_that_hf_samples_from(devices):
    whole = plan_of_devices(devices, "train.strategy=ddp")
    shards = plan_of_devices(devices, "train.strategy=fsdp")
    assert shards.peak_bytes - bytes_of(shards, "sampling replica") < whole.peak_bytes


# --- time ---------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def one_device():
    return Plan(config_of(), H100).timing


def test_longer_completions_take_longer(one_device):
    longer = Plan(config_of("rollout.max_new_tokens=1024"), H100).timing
    assert longer.generate_s > one_device.generate_s
    assert longer.learn_s > one_device.learn_s


def test_two_devices_learn_faster_at_most_twice(one_device):
    two = Plan(config_of("train.strategy=ddp", "train.devices=2"), H100).timing
    assert one_device.learn_s / 2 <= two.learn_s < one_device.learn_s
    assert two.device_hours == 2 * two.run_hours


def test_a_higher_rate_shortens_learning(one_device):
    better = Plan(config_of(), H100, assumed=Assumed(fp32_flops=0.9)).timing
    assert better.learn_s < one_device.learn_s


def test_autocast_shortens_the_body_and_not_the_head(one_device):
    fast = Plan(config_of("train.precision=bf16"), H100).timing
    assert fast.parts["body"] < one_device.parts["body"] / 5
    assert fast.parts["head"] == one_device.parts["head"], "it stays in float32"


def test_the_parts_of_an_update_add_up(one_device):
    assert sum(one_device.parts.values()) == pytest.approx(one_device.update_s)


def test_shorter_completions_on_average_save_draws_and_no_step(one_device):
    mean = Plan(config_of(), H100, Lengths(completion=100)).timing
    assert mean.parts["read weights"] == one_device.parts["read weights"], "a batch ends with its longest completion"
    assert mean.parts["draw"] == pytest.approx(one_device.parts["draw"] * 100 / 512)


def test_a_shorter_longest_completion_saves_steps(one_device):
    mean = Plan(config_of(), H100, Lengths(completion=100)).timing
    short = Plan(config_of(), H100, Lengths(longest=100)).timing
    assert short.parts["read weights"] < one_device.parts["read weights"]
    assert short.parts["draw"] == mean.parts["draw"]


FP32_FLOPS = 67e12 * 0.75
BF16_FLOPS = 989e12 * 0.4
"""Rates of an H100 for products of matrices: the published rate times the share that the plan assumes."""
LINK_BYTES = 450e9 * 0.7
"""Bytes per second between the GPUs of a node, in the same way."""
NETWORK_BYTES = 50e9 * 0.7
"""Bytes per second of one port of a node."""

HEAD_OVERRIDES = ["train.precision=bf16", "kl=[{estimator: k1, placement: reward, baseline: before, beta: 0.1}]"]


@pytest.fixture(scope="module")
def head_plan():
    return Plan(config_of(*HEAD_OVERRIDES), H100)


def head_seconds(passes, flops):
    """The time of so many passes of the head over all tokens of an update, at a rate."""
    tokens = 8 * 8 * 512
    flops_per_token = 2 * QWEN.vocabulary * QWEN.hidden
    return tokens * flops_per_token * passes / flops


def test_the_head_is_priced_at_the_rate_of_its_dtype(head_plan):
    # The reference, the pass ahead, the forward, again in the backward, two gradients; and for the exact KL the
    # reference again in both.
    assert head_plan.timing.parts["head"] == pytest.approx(head_seconds(8, FP32_FLOPS))


def test_a_head_in_16_bits_is_faster_and_needs_two_copies(head_plan):
    narrow = Plan(config_of(*HEAD_OVERRIDES, "model.head_dtype=bfloat16"), H100)
    assert narrow.timing.parts["head"] == pytest.approx(head_seconds(8, BF16_FLOPS))
    assert narrow.timing.parts["draw"] < head_plan.timing.parts["draw"], "the hf sampler's head is the learner's"
    # The policy's and the reference's, two bytes per weight.
    assert bytes_of(narrow, "bf16 heads") == 2 * 2 * QWEN.vocabulary * QWEN.hidden


def test_an_adapter_saves_the_gradient_of_the_head():
    lora = Plan(config_of(*HEAD_OVERRIDES, "model.dtype=bfloat16", "model.lora={rank: 4}"), H100)
    assert lora.timing.parts["head"] == pytest.approx(head_seconds(7, BF16_FLOPS))


def test_the_exact_kl_needs_its_memory_even_where_it_is_measured_at_the_ends_only(head_plan):
    ends = Plan(config_of(*HEAD_OVERRIDES, "train.exact_kl_every=0"), H100)
    assert bytes_of(ends, "head chunk") == bytes_of(head_plan, "head chunk"), "the first and the last update measure it"


def test_an_exact_kl_of_every_tenth_update_costs_a_tenth():
    seldom = Plan(config_of(*HEAD_OVERRIDES, "train.exact_kl_every=10"), H100)
    # Six passes without it, and two for every tenth update.
    assert seldom.timing.parts["head"] == pytest.approx(head_seconds(6 + 2 / 10, FP32_FLOPS))


# --- exchange between ranks ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("overrides", "copies"),
    [
        # Forward and backward of the policy, its gradient, the reference, the pass ahead.
        pytest.param([], 5, id="float32"),
        pytest.param(["algorithm.proximal=recomputed"], 6, id="one more pass"),
        # The body is gathered in 16 bits in four of them; the embedding and the gradient are in float32.
        pytest.param(["train.precision=bf16"], 1 + 4 * (1 - QWEN.body / QWEN.parameters / 2), id="bf16"),
    ],
)
def test_fsdp_gathers_weights_for_every_pass(overrides, copies):
    term = "kl=[{estimator: k1, placement: reward, baseline: before, beta: 0.1}]"
    plan = Plan(config_of("train.strategy=fsdp", "train.devices=4", *overrides, term), H100)
    # A rank has a quarter of the weights and gets the other three.
    seconds_of_a_copy = WHOLE_COPY * 3 / 4 / LINK_BYTES
    assert plan.timing.exchange_s / seconds_of_a_copy / plan.load.update_micro == pytest.approx(copies)


def plan_of_two_nodes(shards):
    """Two nodes of four GPUs."""
    words = ["train.strategy=fsdp", "train.devices=4", "train.nodes=2", "rollout.backend=hf_server"]
    return Plan(config_of(*words, f"train.shards={shards}"), H100)


def test_shards_of_a_node_need_twice_the_memory_of_shards_of_two():
    whole = plan_of_two_nodes("all")
    halves = plan_of_two_nodes("node")
    assert bytes_of(halves, "optimizer") == 2 * bytes_of(whole, "optimizer")


def test_shards_over_nodes_are_gathered_over_the_network():
    plan = plan_of_two_nodes("all")
    # The reference, the forward, the backward and the gradient; the four ports of a node work together.
    seconds = 4 * WHOLE_COPY * 7 / 8 / (4 * NETWORK_BYTES)
    assert plan.timing.exchange_s == pytest.approx(plan.load.update_micro * seconds)


def test_shards_of_a_node_are_gathered_within_it():
    plan = plan_of_two_nodes("node")
    within = 4 * WHOLE_COPY * 3 / 4 / LINK_BYTES
    # A quarter of the gradient goes to the other node and back, half of it each way.
    between = WHOLE_COPY / 4 / NETWORK_BYTES
    assert plan.timing.exchange_s == pytest.approx(plan.load.update_micro * (within + between))


def update_tokens(*overrides):
    """The tokens of an update that one rank computes."""
    plan = Plan(config_of("train.strategy=ddp", "rollout.prompts_per_batch=6", *overrides), H100)
    return plan.load.update_tokens


MICRO_BATCHES_OF_TWO_PROMPTS = "train.microbatch_tokens=9216"


@pytest.mark.parametrize(("devices", "share"), [(1, 1), (2, 2 / 3), (3, 1 / 3), (6, 1 / 3)])
def test_ranks_take_whole_micro_batches(devices, share):
    """Three micro-batches: of two ranks one has two of them, and of six ranks three have none."""
    tokens = update_tokens(MICRO_BATCHES_OF_TWO_PROMPTS, f"train.devices={devices}")
    whole = update_tokens(MICRO_BATCHES_OF_TWO_PROMPTS, "train.devices=1")
    assert tokens / whole == pytest.approx(share, abs=1e-4)


def test_a_group_may_be_in_two_micro_batches():
    whole = update_tokens(MICRO_BATCHES_OF_TWO_PROMPTS, "train.devices=1")
    # Each group of 8 completions is a micro-batch of 6 rows and one of 2.
    assert update_tokens("train.microbatch_tokens=3600", "train.devices=2") == whole / 2


FSDP_OF_TWO = config_of("train.strategy=fsdp", "train.devices=2")


def test_a_cpu_hides_no_exchange_behind_its_computing():
    timing = Plan(FSDP_OF_TWO, dataclasses.replace(H100, kind="cpu")).timing
    assert timing.exchange_s > 0
    assert timing.parts["exchange"] == timing.exchange_s


def test_a_gpu_hides_the_exchange_behind_its_computing():
    timing = Plan(FSDP_OF_TWO, H100).timing
    assert timing.exchange_s > 0
    assert timing.parts["exchange"] == 0


# --- ranks and engines --------------------------------------------------------------------------------------------
SERVERS = ["rollout.backend=vllm_server", "train.precision=bf16"]
ASYNC = ["lag.mode=async", "lag.max_steps=1"]
SHARED_GPU = 'rollout.options={dtype: bfloat16, gpus: ["0"]}'


def with_engines(count, *overrides):
    """A config with so many vLLM servers, each with a GPU of its own."""
    return config_of(*SERVERS, f"rollout.options={{servers: {count}, dtype: bfloat16}}", *overrides)


def seconds_of_rank_and_engine(timing):
    """What a rank does in an update, and what an engine does."""
    return timing.learn_s + timing.publish_s, timing.generate_s + timing.load_s


def test_ranks_and_engines_work_in_turns():
    timing = Plan(with_engines(2), H100).timing
    assert timing.devices == 3
    assert timing.update_s == pytest.approx(timing.generate_s + timing.load_s + timing.learn_s + timing.publish_s)
    assert timing.trainer_idle + timing.engine_idle == pytest.approx(1)


def test_ranks_and_engines_work_at_the_same_time_where_samples_may_be_stale():
    timing = Plan(with_engines(2, *ASYNC), H100).timing
    assert timing.update_s == max(seconds_of_rank_and_engine(timing))
    assert min(timing.trainer_idle, timing.engine_idle) == 0, "the slower one never waits"
    assert timing.bottleneck in timing.parts


def test_async_without_a_lag_works_in_turns():
    timing = Plan(with_engines(2, *ASYNC), H100).timing
    without_lag = Plan(with_engines(2, "lag.mode=async"), H100).timing
    assert without_lag.update_s == pytest.approx(sum(seconds_of_rank_and_engine(timing)))


def test_a_lag_of_half_a_batch_hides_half_of_the_learning():
    timing = Plan(with_engines(2, *ASYNC, "algorithm.updates_per_batch=2"), H100).timing
    rank, engine = seconds_of_rank_and_engine(timing)
    assert timing.update_s == pytest.approx(max(rank, engine, rank / 2 + engine))


def test_more_engines_generate_faster_and_learn_as_before():
    two = Plan(with_engines(2), H100).timing
    four = Plan(with_engines(4), H100).timing
    assert two.generate_s / 2 < four.generate_s < two.generate_s
    assert four.learn_s == two.learn_s


def plan_with(*overrides):
    return Plan(config_of("train.precision=bf16", *overrides), H100)


@pytest.fixture(scope="module")
def vllm_plan():
    return plan_with("rollout.backend=vllm_server")


def test_transfer_depends_on_the_transport(vllm_plan):
    seconds = vllm_plan.timing.transfer_s
    assert seconds["ipc"] < seconds["nccl"] < seconds["gloo"] < seconds["folder"]
    assert "adapter" not in seconds, "there is none"


@pytest.mark.parametrize(("servers", "transport"), [(1, "nccl"), (2, "gloo"), (4, "gloo")])
def test_a_run_takes_the_fastest_transport_to_engines_with_gpus_of_their_own(servers, transport):
    plan = plan_with("rollout.backend=vllm_server", f"rollout.options.servers={servers}")
    assert plan.transport == transport
    # Not ipc, which reaches rank 0's GPU alone.
    possible = {name: seconds for name, seconds in plan.timing.transfer_s.items() if name != "ipc"}
    assert set(possible) == {"folder", "gloo", "nccl"}
    assert possible[transport] == min(possible.values())


@pytest.mark.parametrize(
    ("overrides", "transport"),
    [
        pytest.param(["rollout.backend=vllm_server", 'rollout.options={gpus: ["0"]}'], "ipc", id="the rank's GPU"),
        pytest.param(["rollout.backend=hf_server"], "gloo", id="a server of hf"),
        # One server is on rank 0's GPU and one beside it. A run chooses gloo, which reaches both.
        pytest.param(
            ["rollout.backend=vllm_server", 'rollout.options={servers: 2, gpus: ["0", "1"]}'], "gloo", id="mixed"
        ),
        pytest.param(
            ["rollout.backend=vllm_server", "rollout.options={urls: [http://a:1]}"], "folder", id="another's servers"
        ),
        pytest.param(["rollout.backend=vllm_server", "model.lora={rank: 8}"], "adapter", id="an adapter"),
    ],
)
def test_the_transport_is_the_one_that_a_run_chooses(overrides, transport):
    assert plan_with(*overrides).transport == transport


def test_an_adapter_is_loaded_ten_times_faster(vllm_plan):
    adapter = plan_with("rollout.backend=vllm_server", "model.lora={rank: 8}")
    assert adapter.timing.load_s < vllm_plan.timing.load_s / 10


@pytest.mark.parametrize("name", ["pigeon", "ipc"], ids=["no transport", "between GPUs of two processes"])
def test_a_transport_that_a_run_would_refuse_is_refused(name):
    plan = plan_with("rollout.backend=vllm_server", f"rollout.options={{transport: {name}}}")
    with pytest.raises(UserError, match=rf"rollout\.options\.transport: got '{name}'"):
        _ = plan.timing


def test_engines_with_their_own_devices_take_no_memory_of_a_rank():
    plan = Plan(with_engines(1), H100)
    assert bytes_of(plan, "engine") == 0
    assert plan.timing.devices == 2


def test_an_engine_on_the_ranks_gpu_takes_its_memory():
    plan = Plan(config_of(*SERVERS, SHARED_GPU), H100)
    # The share that vLLM takes by default.
    assert bytes_of(plan, "engine") == pytest.approx(0.9 * H100.memory_bytes)
    assert plan.timing.devices == 1


def test_a_gpu_that_rank_and_engine_share_computes_for_one_at_a_time():
    timing = Plan(config_of(*SERVERS, SHARED_GPU, *ASYNC), H100).timing
    assert timing.trainer_idle + timing.engine_idle == pytest.approx(1)


@pytest.mark.parametrize(
    ("overrides", "phase"),
    [([], "sampling"), (["rollout.options={sleep: false}"], "always")],
    ids=["it sleeps", "it stays awake"],
)
def test_an_engine_that_sleeps_takes_memory_only_while_it_samples(overrides, phase):
    plan = Plan(config_of("rollout.backend=vllm", *overrides), H100)
    assert {item.phase for item in plan.components if item.name == "engine"} == {phase}


@pytest.mark.parametrize(
    ("options", "fits"),
    [("{dtype: bfloat16}", False), ("{dtype: bfloat16, tensor_parallel_size: 2}", True)],
    ids=["on one GPU", "on two GPUs"],
)
def test_an_engine_of_16_gb_fits_on_two_gpus_of_16_gib(options, fits):
    narrow = dataclasses.replace(H100, memory_bytes=16 * 2**30)
    config = config_of(*SERVERS, f"rollout.options={options}", source="meta-llama/Llama-3.1-8B")
    assert Plan(config, narrow).engine_fits == fits


# --- a number of devices, divided between ranks and engines -------------------------------------------------------
TO_DIVIDE = ["train.precision=bf16", "rollout.prompts_per_batch=8"]


@pytest.fixture(scope="module")
def splits_of_four():
    return splits(config_of(*TO_DIVIDE), H100, 4)


def test_devices_are_divided_where_the_prompts_can_be(splits_of_four):
    divided = sorted((split.ranks, split.engines) for split in splits_of_four)
    assert divided == [(1, 3), (2, 2), (4, 0)], "three ranks do not divide eight prompts"


def test_the_fastest_split_comes_first(splits_of_four):
    seconds = [split.update_s for split in splits_of_four]
    assert seconds == sorted(seconds)


def test_a_split_of_devices_is_the_plan_of_its_overrides(splits_of_four):
    for split in splits_of_four:
        plan = Plan(config_of(*TO_DIVIDE, *split.overrides), H100)
        assert plan.timing.update_s == pytest.approx(split.update_s)
        assert plan.peak_bytes == split.peak_bytes
        assert plan.timing.devices == 4


def test_one_device_cannot_be_divided_for_async():
    with pytest.raises(UserError, match="--split"):
        splits(config_of(*ASYNC), H100, 1)


# --- beside what others published and what was measured -----------------------------------------------------------
OUR_KIND = [item for item in PUBLISHED if not item.other]


@pytest.mark.parametrize("item", OUR_KIND, ids=lambda item: f"{item.run} {item.unit}")
def test_the_formulas_agree_with_published_times(item):
    """Sources: NeMo-RL's performance summaries, prime-rl's benchmark files (docs/planning.md)."""
    assert 0.65 < item.ratio < 1.35


every_paper_recipe = pytest.mark.parametrize("path", PAPER, ids=lambda path: path.stem)


@every_paper_recipe
def test_every_paper_recipe_has_hours_and_memory_on_eight_gpus(path):
    divided = splits(load_config(path, []), H100, 8)
    fastest = divided[0]
    assert fastest.fits
    assert 1 < fastest.run_hours < 500
    assert fastest.peak_bytes < H100.memory_bytes
    assert {split.engines for split in divided} >= {0, 4}


@every_paper_recipe
def test_a_run_takes_the_config_of_a_paper_recipe_on_eight_gpus(path):
    shared = next(split for split in splits(load_config(path, []), H100, 8) if split.engines == 0)
    plan = Plan(load_config(path, shared.overrides), H100)
    assert not plan.apart
    assert plan.timing.update_s == pytest.approx(shared.update_s)


@every_paper_recipe
def test_no_paper_recipe_fits_on_one_device(path):
    alone = ["train.strategy=single", "train.devices=1", "rollout.backend=hf", "rollout.options={}"]
    plan = Plan(load_config(path, alone), H100)
    assert not plan.fits, "seven billion parameters with AdamW in float32 are too much for one device"
    overrides = [override for remedy in plan.remedies for override in remedy.overrides]
    assert any("train.strategy=fsdp" in override for override in overrides)


@pytest.fixture(scope="module")
def scaling():
    """The benchmark over ranks and engines, and its stored result."""
    result = json.loads((ROOT / "results" / "scaling" / "scaling.json").read_text())
    return module_of(ROOT / "bench" / "scaling.py"), result


def test_times_over_ranks_and_engines_were_measured(scaling):
    bench, result = scaling
    cells = [row["cell"] for row in result["rows"]]
    assert "2x1" in cells
    assert cells == [cell for cell in bench.CELLS if cell in cells], "in the benchmark's order, none twice"


def test_the_page_of_measured_times_has_the_plan_of_today(scaling):
    """After a change to the plan: ``python bench/scaling.py --page``, and read what became of the ratios."""
    bench, result = scaling
    assert (bench.OUT / "README.md").read_text() == bench.page(result)


# --- what does not fit --------------------------------------------------------------------------------------------
LLAMA = "meta-llama/Llama-3.1-8B"


@pytest.fixture(scope="module")
def too_big():
    return Plan(config_of("train.precision=bf16", source=LLAMA), H100)


def test_what_does_not_fit_is_reported(too_big):
    assert not too_big.fits
    assert "does not fit" in too_big.warnings[0]


@pytest.mark.parametrize("override", ["train.strategy=fsdp train.devices=", "model.lora={rank: 16}"])
def test_what_would_fit_is_named(too_big, override):
    texts = [" ".join(remedy.overrides) for remedy in too_big.remedies]
    assert any(override in text for text in texts), texts


def test_every_remedy_makes_it_fit(too_big):
    for remedy in too_big.remedies:
        config = config_of("train.precision=bf16", "rollout.prompts_per_batch=8", *remedy.overrides, source=LLAMA)
        assert Plan(config, H100).fits, remedy


def test_what_fits_needs_no_remedy():
    plan = Plan(config_of("train.precision=bf16"), H100)
    assert plan.fits
    assert plan.remedies == ()
    assert plan.warnings == ()


def test_this_machine_is_measured():
    machine = device_named("cpu")
    assert machine.kind == "cpu"
    assert machine.fp32_flops > 1e8
    assert machine.bandwidth > 1e7
    assert machine.memory_bytes > 2**28


# --- the command --------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def config_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "run.yaml"
    path.write_text("model: {source: Qwen/Qwen2.5-7B}\n")
    return str(path)


def plan_command(*words):
    return CliRunner().invoke(app, ["plan", *words])


def planned(config_file, *words):
    """The plan on a small GPU, as JSON."""
    return json.loads(plan_command(config_file, "--gpu", "a100-40", "--format", "json", *words).stdout)


def test_the_command_can_fail_where_the_run_does_not_fit(config_file):
    result = plan_command(config_file, "--gpu", "a100-40", "--format", "json", "--fail-if-too-big")
    assert result.exit_code == 1
    assert isinstance(result.exception, RunFailed)
    assert "on a100-40" in str(result.exception)


def test_the_command_prints_the_plan_as_json(config_file):
    plan = planned(config_file)
    assert not plan["memory"]["fits"]
    assert plan["remedies"]
    assert plan["time"]["device_hours"] > 0
    assert plan["splits"] == [], "none was asked for"


def test_the_peak_is_that_of_the_larger_phase(config_file):
    memory = planned(config_file)["memory"]
    phases = {"always": 0.0, "learning": 0.0, "sampling": 0.0}
    for item in memory["components"]:
        phases[item["phase"]] += item["bytes"]
    expected = phases["always"] + max(phases["learning"], phases["sampling"])
    assert memory["peak_bytes"] == pytest.approx(expected)


def test_the_command_prints_tables(config_file):
    result = plan_command(config_file, "--gpu", "h100-80", "--gpus", "8", "train.strategy=fsdp")
    assert result.exit_code == 0
    assert "sampling replica" in result.stdout
    assert "device hours" in result.stdout


def test_the_command_divides_devices(config_file):
    divided = planned(config_file, "--split", "4")["splits"]
    assert {split["ranks"] for split in divided} == {1, 2, 4}


def test_devices_without_a_strategy_are_refused(config_file):
    result = plan_command(config_file, "--gpu", "a100-40", "--format", "json", "--gpus", "8")
    assert "train.devices: got 8" in str(result.exception)


# --- what the formulas assume -------------------------------------------------------------------------------------
def test_changes_are_those_that_overrides_make():
    changes = [("train.strategy", "fsdp"), ("train.devices", 2), ("model.gradient_checkpointing", True)]
    words = ["train.strategy=fsdp", "train.devices=2", "model.gradient_checkpointing=true"]
    assert dataclasses.asdict(changed(config_of(), changes)) == dataclasses.asdict(config_of(*words))


@pytest.fixture(scope="module")
def small_decoder():
    config = known_config("Qwen/Qwen2.5-7B", **{**SMALL, "hidden_size": 96, "intermediate_size": 256})
    return config, AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


ROWS = 8
PROMPT = 20
COMPLETION = 60


def saved_bytes(model, *, autocast):
    """Bytes that autograd saves of a pass, each storage once, without weights, their copies and the mask."""
    weight_shapes = set()
    for parameter in model.parameters():
        weight_shapes.add(tuple(parameter.shape))
        weight_shapes.add(tuple(parameter.shape[::-1]))  # transposed
    saved_by_address = {}

    def pack(tensor):
        is_weight = tuple(tensor.shape) in weight_shapes
        is_mask = tensor.ndim == 4 and tensor.shape[1] == 1
        if not is_weight and not is_mask:
            # The tensor itself is kept: or its memory would be freed and its address used for another.
            saved_by_address[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    ids = torch.randint(0, SMALL["vocab_size"], (ROWS, COMPLETION))
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
    ):
        token_pass(
            model,
            prompt_ids_BP=ids[:1, :PROMPT].expand(ROWS, -1),
            prompt_mask_BP=torch.ones(ROWS, PROMPT),
            ids_BT=ids,
            mask_BT=torch.ones(ROWS, COMPLETION, dtype=torch.bool),
            temperature=1.0,
            chunk_elements=2**16,
        )
    return sum(tensor.untyped_storage().nbytes() for tensor in saved_by_address.values())


def test_activations_are_about_what_the_formula_says(small_decoder):
    config, model = small_decoder
    # The prompt is computed once for all rows, and the last token of a completion predicts nothing.
    tokens = PROMPT + ROWS * (COMPLETION - 1)
    expected = 4 * activation_values(config, checkpoints=False) * tokens
    assert 0.67 < expected / saved_bytes(model, autocast=False) < 1.5


def test_autocast_keeps_the_share_that_is_assumed(small_decoder):
    _, model = small_decoder
    share = saved_bytes(model, autocast=True) / saved_bytes(model, autocast=False)
    assert share == pytest.approx(AUTOCAST_SHARE, abs=0.1)


# --- planned memory, added up by hand ---------------------------------------------------------------------------------
ASYNC_SERVER = ["lag.mode=async", "rollout.backend=hf_server"]
MEMORY_SETTINGS = {
    "sync": [],
    "sync, adapter": ["model.lora={rank: 8}"],
    "sync, ema": ["kl=[{estimator: k3, placement: loss, beta: 0.1, reference: ema}]"],
    "sync, ranks": ["train.strategy=ddp", "train.devices=4"],
    "shards": ["train.strategy=fsdp", "train.devices=4"],
    "shards, ema": [
        "train.strategy=fsdp",
        "train.devices=4",
        "kl=[{estimator: k3, placement: loss, beta: 0.1, reference: ema}]",
    ],
    "async": ["lag.mode=async"],
    "async, server": ASYNC_SERVER,
    "async, adapter": [*ASYNC_SERVER, "model.lora={rank: 8}"],
    "colocated vllm": ["rollout.backend=vllm"],
    "colocated vllm, awake": ["rollout.backend=vllm", "rollout.options={sleep: false}"],
}


@pytest.mark.parametrize("name", MEMORY_SETTINGS)
@pytest.mark.parametrize("device", [H100, device_named("cpu")], ids=["gpu", "cpu"])
def test_the_peak_is_what_is_there_at_the_same_time(name, device):
    """One phase after the other reuses memory; an asynchronous run samples while it learns, and needs both."""
    plan = Plan(config_of(*MEMORY_SETTINGS[name]), device)
    phases = {"always": 0.0, "learning": 0.0, "sampling": 0.0}
    for component in plan.components:
        assert component.bytes > 0
        phases[component.phase] += component.bytes
    if name == "async" and device.kind == "cpu":
        # Its engine shares the machine, or there would be nothing to add.
        assert phases["sampling"] > 0
    if name.startswith("async"):
        expected = phases["always"] + phases["learning"] + phases["sampling"]
    else:
        expected = phases["always"] + max(phases["learning"], phases["sampling"])
    assert plan.peak_bytes == pytest.approx(expected, rel=1e-12)

    # What is always there, from the numbers of parameters alone.
    whole = QWEN.parameters * 4
    adapter = 0
    if "adapter" in name:
        adapter = shape_of(plan.config.model).trainable
        whole += adapter * 4
    trained = adapter * 4 or whole
    shards = 4 if name.startswith("shards") else 1
    assert bytes_of(plan, "parameters") == pytest.approx(whole / shards)
    assert bytes_of(plan, "gradients") == pytest.approx(trained / shards)
    assert bytes_of(plan, "optimizer") == pytest.approx(2 * trained / shards)
    assert bytes_of(plan, "reference") == pytest.approx(0 if adapter else whole / shards)
    if "ema" in name:
        assert bytes_of(plan, "ema reference") == pytest.approx(2 * trained / shards), "the average and its weights"


def test_processes_of_one_machine_share_its_memory_and_gpus_do_not():
    """A rank may take what its device has: a GPU of its own, or an equal part of the machine's memory."""
    config = config_of("train.strategy=ddp", "train.devices=4")
    cpu = device_named("cpu")
    assert Plan(config, cpu).limit_bytes == cpu.memory_bytes / 4
    assert Plan(config, H100).limit_bytes == H100.memory_bytes
    just_enough = Plan(config, cpu).peak_bytes
    for memory, fits in ((4.01 * just_enough, True), (3.99 * just_enough, False)):
        assert Plan(config, dataclasses.replace(cpu, memory_bytes=memory)).fits == fits


def test_a_teacher_takes_the_bytes_of_its_own_dtype():
    teacher = "reference.teacher={source: Qwen/Qwen2.5-1.5B, dtype: bfloat16}"
    config = config_of("kl=[{estimator: k3, placement: loss, beta: 0.1, reference: teacher}]", teacher)
    parameters = shape_of(config_of(source="Qwen/Qwen2.5-1.5B").model).parameters
    assert bytes_of(Plan(config, H100), "teacher") == 2 * parameters


# Qwen2.5-0.5B as its makers publish it; what a part takes is added up from these numbers.
LAYERS, HIDDEN, INNER, HEADS, KV_WIDTH, VOCABULARY = 24, 896, 4864, 14, 128, 151_936
LAYER = 2 * HIDDEN * HIDDEN + HIDDEN + 2 * (HIDDEN * KV_WIDTH + KV_WIDTH) + 3 * HIDDEN * INNER + 2 * HIDDEN
TABLE = VOCABULARY * HIDDEN
ROOT_UNIT = TABLE + HIDDEN
"""The embedding, which is the head too, and the last norm."""
HF = ["rollout.backend=hf", "rollout.prompts_per_batch=8", "rollout.group_size=4", "rollout.batch_sequences=16"]


def test_what_sampling_takes_is_a_cache_and_the_scores_of_a_token():
    plan = Plan(config_of(*HF), H100)
    prompt = plan.load.prompt
    # 16 completions at a time are those of 4 prompts; a cache of 512 tokens each, and of the prompt once for a group.
    cached_tokens = 4 * prompt + 16 * 512
    keys_and_values = 2 * LAYERS * KV_WIDTH
    assert bytes_of(plan, "KV cache") == cached_tokens * keys_and_values * 4
    # Scores, log-probs in float32 and in the sampler's dtype, probabilities in both: five of four bytes.
    assert bytes_of(plan, "logits of a token") == 16 * VOCABULARY * 5 * 4


def test_a_cache_that_a_completion_does_not_fill_has_its_next_capacity():
    """It doubles: 513 tokens need room for 1024."""
    plan = Plan(config_of(*HF, "rollout.max_new_tokens=513"), H100)
    cached_tokens = 4 * plan.load.prompt + 16 * 1024
    assert bytes_of(plan, "KV cache") == cached_tokens * 2 * LAYERS * KV_WIDTH * 4


def test_the_head_of_a_tied_table_has_two_gradients_and_of_an_adapter_none():
    """That of the head and that of the embedding are there before they are added."""
    assert bytes_of(Plan(config_of(), H100), "head's gradient") == 2 * TABLE * 4
    assert bytes_of(Plan(config_of("model.lora={rank: 8}"), H100), "head's gradient") == 0


def test_what_ranks_exchange_is_two_buckets_or_two_layers():
    ddp = Plan(config_of("train.strategy=ddp", "train.devices=4"), H100)
    assert bytes_of(ddp, "gradient buckets") == 2 * 64 * 2**20
    assert bytes_of(ddp, "gathered layers") == 0
    assert bytes_of(Plan(config_of(), H100), "gradient buckets") == 0

    shards = Plan(config_of("train.strategy=fsdp", "train.devices=4"), H100)
    # This layer and the next with their weights, embedding and head; and the gradients of a layer and of the table.
    expected = 2 * LAYER * 4 + ROOT_UNIT * 4 + (LAYER + ROOT_UNIT) * 4
    assert bytes_of(shards, "gathered layers") == expected
    assert bytes_of(shards, "gradient buckets") == 0


def test_autocast_copies_the_weights_of_the_layers():
    """FSDP gathers narrow weights, so that nothing is copied there."""
    assert bytes_of(Plan(config_of("train.precision=bf16"), H100), "bf16 weights") == 2 * LAYERS * LAYER
    assert bytes_of(Plan(config_of(), H100), "bf16 weights") == 0
    shards = Plan(config_of("train.precision=bf16", "train.strategy=fsdp", "train.devices=4"), H100)
    assert bytes_of(shards, "bf16 weights") == 0


def test_passes_that_are_kept_have_the_references_hidden_states():
    plan = Plan(config_of(*HF), H100)
    # 32 completions of 512 tokens are an update: hidden states in float32, and 60 bytes of ids, masks and log-probs.
    assert bytes_of(plan, "kept passes") == 32 * 512 * (HIDDEN * 4 + 60)


@pytest.mark.parametrize("overrides", [[], HF, ["lag.mode=async"]], ids=["default", "hf", "async"])
def test_each_phase_has_a_twentieth_for_the_allocator(overrides):
    plan = Plan(config_of(*overrides), H100)
    for phase in ("learning", "sampling"):
        parts = [item.bytes for item in plan.components if item.phase == phase and item.name != "fragments"]
        (spare,) = [item.bytes for item in plan.components if item.phase == phase and item.name == "fragments"] or [0]
        assert spare == pytest.approx(sum(parts) / 20)


def test_kept_sets_of_truncated_sampling_take_eight_bytes_an_id():
    plan = Plan(config_of(*HF, "rollout.truncation={top_k: 20}", "model.head_chunk_elements=1000000"), H100)
    # 32 completions of 512 tokens: 20 ids and their number; and a byte for each token of 6 rows in the head's mask.
    assert bytes_of(plan, "kept sets") == 32 * 512 * 21 * 8 + 6 * VOCABULARY
    assert not plan.warnings or "kept set" not in " ".join(plan.warnings)
    assert bytes_of(Plan(config_of(*HF), H100), "kept sets") == 0


def test_kept_sets_that_nothing_bounds_are_warned_of():
    plan = Plan(config_of(*HF, "rollout.truncation={top_p: 0.9}"), H100)
    (warning,) = [text for text in plan.warnings if "kept set" in text]
    assert f"{32 * 512 * 8 / 2**30:.3g} GiB for each token of a kept set" in warning


DIALOGUE = "environment={name: calculator, turns: 4}"


def test_each_turn_of_a_dialogue_has_a_prefix_of_its_own():
    plain = Plan(config_of(*HF), H100)
    plan = Plan(config_of(*HF, DIALOGUE), H100)
    # The last turn of 128 tokens, of 16 dialogues at a time: each has its prompt and three turns before it.
    cached_tokens = 16 * (plan.load.prompt + 3 * 128) + 16 * 128
    assert bytes_of(plan, "KV cache") == cached_tokens * 2 * LAYERS * KV_WIDTH * 4
    # A group's prompt is read once. Then each dialogue reads its prompt and one, two and three turns.
    read_again = 32 * (3 * plan.load.prompt + 128 + 256 + 384)
    read = plain.timing.parts["read prompts"] * (8 * plan.load.prompt + read_again) / (8 * plan.load.prompt)
    assert plan.timing.parts["read prompts"] == pytest.approx(read)
