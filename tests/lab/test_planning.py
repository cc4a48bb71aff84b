"""The plan of memory and time: sizes of known models, what changes what, what makes a run fit, and real peaks."""

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from kl_comedy.config import load_config
from kl_comedy.errors import UserError
from kl_comedy.lab.planning.plan import AUTOCAST_SHARE, Assumed, Plan, changed, splits
from kl_comedy.lab.planning.sizes import GPUS, KNOWN, _built_shape, device_named, known_config, shape_of
from kl_comedy.models.introspection import activation_values
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
    """A benchmark, imported from its file."""
    before = list(sys.path)
    spec = importlib.util.spec_from_file_location(f"bench_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module


def bytes_of(plan, name):
    return sum(item.bytes for item in plan.components if item.name == name)


@pytest.mark.parametrize("source", KNOWN)
def test_a_known_model_has_the_parameters_its_makers_say(source):
    shape = shape_of(config_of(source=source).model)
    assert shape.parameters / 1e9 == pytest.approx(PUBLISHED_BILLIONS[source], abs=5e-4)
    assert shape.trainable == shape.parameters == shape.body + shape.embedding + shape.head
    assert shape.root == shape.embedding + shape.head + shape.hidden


@pytest.mark.parametrize("lora", ["null", "{rank: 4}", "{rank: 2, target_modules: [k_proj, down_proj, up_proj]}"])
@pytest.mark.parametrize(
    "source", ["pocket", "Qwen/Qwen2.5-0.5B", "Qwen/Qwen3-4B-Instruct-2507", "meta-llama/Llama-3.1-8B"]
)
def test_what_is_counted_is_what_is_built(source, lora):
    model = config_of(f"model.lora={lora}", source=source).model
    counted, built = (dataclasses.replace(shape, config=None) for shape in (shape_of(model), _built_shape(model)))
    assert counted == built


def test_a_local_model_is_read_from_its_config_alone(tmp_path):
    known_config("Qwen/Qwen3-4B-Instruct-2507", **SMALL).save_pretrained(tmp_path)
    shape = shape_of(config_of(source=str(tmp_path)).model)
    model = AutoModelForCausalLM.from_config(known_config("Qwen/Qwen3-4B-Instruct-2507", **SMALL))
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert (shape.layers, shape.kv_width, shape.head) == (3, 16, 0)
    with_adapter = shape_of(config_of("model.lora={rank: 4}", source=str(tmp_path)).model)
    assert 0 < with_adapter.trainable == with_adapter.parameters - shape.parameters


def test_prompts_are_no_longer_than_the_model_lets_them():
    plan = Plan(load_config(None, ["rollout.max_new_tokens=40"]), H100)
    assert (plan.load.prompt, plan.load.completion) == (128 - 40, 40)


def test_what_cannot_be_planned_is_refused():
    with pytest.raises(UserError, match=r"model\.source"):
        shape_of(config_of(source="./nowhere").model)
    with pytest.raises(UserError, match=r"config\.json"):
        shape_of(config_of("model.gguf_file=x.gguf").model)
    with pytest.raises(UserError, match="did you mean 'h100-80'"):
        device_named("h100-81")
    with pytest.raises(UserError, match="--completion-tokens: got 513; allowed: 1 to 512"):
        Plan(config_of(), H100, completion=513)


def test_weights_gradients_and_optimizer_are_counted_to_the_byte():
    plan = Plan(config_of(), H100)
    whole = 4 * plan.shape.parameters
    assert bytes_of(plan, "parameters") == bytes_of(plan, "gradients") == bytes_of(plan, "reference") == whole
    assert bytes_of(plan, "optimizer") == 2 * whole
    sharded = Plan(config_of("train.strategy=fsdp", "train.devices=4"), H100)
    assert bytes_of(sharded, "parameters") == bytes_of(sharded, "reference") == whole / 4
    assert bytes_of(sharded, "sampling replica") == whole
    adapter = Plan(config_of("model.lora={rank: 8}"), H100)
    assert bytes_of(adapter, "reference") == 0
    assert bytes_of(adapter, "optimizer") == 8 * adapter.shape.trainable
    ema = Plan(config_of("kl=[{estimator: k3, placement: loss, beta: 0.1, reference: ema}]"), H100)
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
    wide, lean = (Plan(config_of(*common, text), H100, shape=QWEN) for text in change)
    if "strategy" in change[1]:  # shards, but for the whole copy that hf samples from
        assert lean.peak_bytes - bytes_of(lean, "sampling replica") < wide.peak_bytes
        return
    assert lean.peak_bytes <= wide.peak_bytes


QWEN = shape_of(config_of().model)


def test_time_follows_work_and_devices():
    base = Plan(config_of(), H100).timing
    longer = Plan(config_of("rollout.max_new_tokens=1024"), H100).timing
    assert longer.generate_s > base.generate_s
    assert longer.learn_s > base.learn_s
    two = Plan(config_of("train.strategy=ddp", "train.devices=2"), H100).timing
    assert base.learn_s / 2 <= two.learn_s < base.learn_s
    assert two.device_hours == 2 * two.run_hours
    better = Plan(config_of(), H100, assumed=Assumed(fp32_flops=0.9)).timing
    assert better.learn_s < base.learn_s
    fast = Plan(config_of("train.precision=bf16"), H100).timing
    assert fast.parts["body"] < base.parts["body"] / 5
    assert fast.parts["head"] == base.parts["head"]
    assert sum(base.parts.values()) == pytest.approx(base.update_s)
    mean = Plan(config_of(), H100, completion=100).timing
    assert mean.parts["read weights"] == base.parts["read weights"], "a batch ends with its longest completion"
    assert mean.parts["draw"] == pytest.approx(base.parts["draw"] * 100 / 512)
    short = Plan(config_of(), H100, longest=100).timing
    assert short.parts["read weights"] < base.parts["read weights"]
    assert short.parts["draw"] == mean.parts["draw"]


def test_the_head_is_priced_at_the_rate_of_its_dtype():
    words = ["train.precision=bf16", "kl=[{estimator: k1, placement: reward, baseline: before, beta: 0.1}]"]
    plan = Plan(config_of(*words), H100)
    tokens, head = 8 * 8 * 512, 2 * plan.shape.vocabulary * plan.shape.hidden
    # reference, pass ahead, forward, again in the backward, two gradients; the reference again in both, for exact KL
    assert plan.timing.parts["head"] == pytest.approx(tokens * head * 8 / (67e12 * 0.75))
    narrow = Plan(config_of(*words, "model.head_dtype=bfloat16"), H100)
    assert narrow.timing.parts["head"] == pytest.approx(tokens * head * 8 / (989e12 * 0.4))
    assert narrow.timing.parts["draw"] < plan.timing.parts["draw"], "the hf sampler's head is the learner's"
    assert bytes_of(narrow, "bf16 heads") == 2 * 2 * plan.shape.vocabulary * plan.shape.hidden
    lora = Plan(config_of(*words, "model.dtype=bfloat16", "model.lora={rank: 4}"), H100)
    assert lora.timing.parts["head"] == pytest.approx(tokens * head * 7 / (989e12 * 0.4))
    ends = Plan(config_of(*words, "train.exact_kl_every=0"), H100)
    assert bytes_of(ends, "head chunk") == bytes_of(plan, "head chunk"), "the first and the last update measure it"
    seldom = Plan(config_of(*words, "train.exact_kl_every=10"), H100)
    assert seldom.timing.parts["head"] == pytest.approx(tokens * head * 6.2 / (67e12 * 0.75))


def test_fsdp_gathers_weights_for_every_pass():
    def exchange(*words):
        term = "kl=[{estimator: k1, placement: reward, baseline: before, beta: 0.1}]"
        plan = Plan(config_of("train.strategy=fsdp", "train.devices=4", *words, term), H100)
        one = 4 * plan.shape.parameters * 3 / 4 / (450e9 * 0.7)
        return plan.timing.exchange_s / one / plan.load.update_micro

    # forward and backward of the policy, its gradient, the reference, the pass ahead
    assert exchange() == pytest.approx(5)
    assert exchange("algorithm.proximal=recomputed") == pytest.approx(6)
    body = QWEN.body / QWEN.parameters  # gathered in 16 bits; embedding and gradient are float32
    assert exchange("train.precision=bf16") == pytest.approx(1 + 4 * (1 - body / 2))


def test_shards_of_a_node_are_gathered_within_it():
    words = ["train.strategy=fsdp", "train.devices=4", "train.nodes=2", "rollout.backend=hf_server"]
    whole, halves = (Plan(config_of(*words, f"train.shards={over}"), H100) for over in ("all", "node"))
    assert bytes_of(halves, "optimizer") == 2 * bytes_of(whole, "optimizer")
    weights = 4 * QWEN.parameters
    updates = whole.load.update_micro
    # reference, forward, backward and the gradient: over the network, four ports of a node together
    assert whole.timing.exchange_s == pytest.approx(updates * 4 * weights * 7 / 8 / (4 * 50e9 * 0.7))
    within = 4 * weights * 3 / 4 / (450e9 * 0.7)
    between = weights / 4 / (50e9 * 0.7)  # a quarter of the gradient, out and back, half of it each way
    assert halves.timing.exchange_s == pytest.approx(updates * (within + between))


def test_ranks_take_whole_micro_batches():
    words = ["train.strategy=ddp", "rollout.prompts_per_batch=6", "train.microbatch_tokens=9216"]  # of 2 prompts
    tokens = [Plan(config_of(*words, f"train.devices={n}"), H100).load.update_tokens for n in (1, 2, 3, 6)]
    assert [count / tokens[0] for count in tokens] == pytest.approx([1, 2 / 3, 1 / 3, 1 / 3], abs=1e-4)
    groups_in_two = Plan(
        config_of(*words[:2], "train.microbatch_tokens=3600", "train.devices=2"), H100
    )  # 6 rows, 2 rows
    assert groups_in_two.load.update_tokens == tokens[0] / 2


def test_a_cpu_hides_no_exchange_behind_its_computing():
    cpu = dataclasses.replace(H100, kind="cpu")
    config = config_of("train.strategy=fsdp", "train.devices=2")
    here, there = (Plan(config, device).timing for device in (cpu, H100))
    assert here.parts["exchange"] == here.exchange_s > 0
    assert there.exchange_s > there.parts["exchange"] == 0


SERVERS = ["rollout.backend=vllm_server", "train.precision=bf16"]


def with_engines(count, *words):
    return config_of(*SERVERS, f"rollout.options={{servers: {count}, dtype: bfloat16}}", *words)


def test_ranks_and_engines_work_in_turns_or_at_the_same_time():
    turns = Plan(with_engines(2), H100).timing
    assert turns.devices == 3
    assert turns.update_s == pytest.approx(turns.generate_s + turns.load_s + turns.learn_s + turns.publish_s)
    assert turns.trainer_idle + turns.engine_idle == pytest.approx(1)
    lagged = Plan(with_engines(2, "lag.mode=async", "lag.max_steps=1"), H100).timing
    rank, engine = lagged.learn_s + lagged.publish_s, lagged.generate_s + lagged.load_s
    assert lagged.update_s == max(rank, engine)
    assert min(lagged.trainer_idle, lagged.engine_idle) == 0
    assert lagged.bottleneck in lagged.parts
    assert Plan(with_engines(2, "lag.mode=async"), H100).timing.update_s == pytest.approx(rank + engine)
    two = ["lag.mode=async", "lag.max_steps=1", "algorithm.updates_per_batch=2"]
    halved = Plan(with_engines(2, *two), H100).timing
    rank, engine = halved.learn_s + halved.publish_s, halved.generate_s + halved.load_s
    assert halved.update_s == pytest.approx(max(rank, engine, rank / 2 + engine))
    four = Plan(with_engines(4), H100).timing
    assert turns.generate_s / 2 < four.generate_s < turns.generate_s
    assert four.learn_s == turns.learn_s


def test_transfer_depends_on_the_transport():
    def plan_with(*words, source="Qwen/Qwen2.5-0.5B"):
        return Plan(config_of("train.precision=bf16", *words, source=source), H100)

    vllm = plan_with("rollout.backend=vllm_server")
    seconds = vllm.timing.transfer_s
    assert seconds["ipc"] < seconds["nccl"] < seconds["gloo"] < seconds["folder"]
    assert "adapter" not in seconds
    assert vllm.timing.publish_s + vllm.timing.load_s == seconds["nccl"], "GPUs of their own"
    gpus = plan_with("rollout.backend=vllm_server", 'rollout.options={gpus: ["0"]}')
    assert (gpus.transport, plan_with("rollout.backend=hf_server").transport) == ("ipc", "gloo")
    mixed = plan_with("rollout.backend=vllm_server", 'rollout.options={servers: 2, gpus: ["0", "1"]}')
    assert mixed.transport == "gloo", "one server on rank 0's GPU, one beside it: as a run chooses"
    assert plan_with("rollout.backend=vllm_server", "rollout.options={urls: [http://a:1]}").transport == "folder"
    adapter = plan_with("rollout.backend=vllm_server", "model.lora={rank: 8}")
    assert adapter.transport == "adapter"
    assert adapter.timing.load_s < vllm.timing.load_s / 10
    for name in ("pigeon", "ipc"):  # no transport; not between a rank's GPU and another
        with pytest.raises(UserError, match=rf"rollout\.options\.transport: got '{name}'"):
            _ = plan_with("rollout.backend=vllm_server", f"rollout.options={{transport: {name}}}").timing


def test_engines_with_their_own_devices_take_no_memory_of_a_rank():
    one = 'rollout.options={dtype: bfloat16, gpus: ["0"]}'
    apart, shared = Plan(with_engines(1), H100), Plan(config_of(*SERVERS, one), H100)
    assert bytes_of(apart, "engine") == 0
    assert bytes_of(shared, "engine") == pytest.approx(0.9 * H100.memory_bytes)
    assert (apart.timing.devices, shared.timing.devices) == (2, 1)
    lagged = Plan(config_of(*SERVERS, one, "lag.mode=async", "lag.max_steps=1"), H100).timing
    assert lagged.trainer_idle + lagged.engine_idle == pytest.approx(1), "one GPU computes for one at a time"
    sleeps, stays = (
        {item.name: item.phase for item in Plan(config_of("rollout.backend=vllm", *words), H100).components}["engine"]
        for words in ([], ["rollout.options={sleep: false}"])
    )
    assert (sleeps, stays) == ("sampling", "always")
    narrow = dataclasses.replace(H100, memory_bytes=16 * 2**30)
    large = "meta-llama/Llama-3.1-8B"
    assert not Plan(config_of(*SERVERS, "rollout.options={dtype: bfloat16}", source=large), narrow).engine_fits
    halves = "rollout.options={dtype: bfloat16, tensor_parallel_size: 2}"
    assert Plan(config_of(*SERVERS, halves, source=large), narrow).engine_fits


def test_a_split_of_devices_is_the_plan_of_its_overrides():
    config = config_of("train.precision=bf16", "rollout.prompts_per_batch=8")
    divided = splits(config, H100, 4)
    assert [(split.ranks, split.engines) for split in sorted(divided, key=lambda each: each.ranks)] == [
        (1, 3),
        (2, 2),
        (4, 0),
    ], "three ranks do not divide eight prompts"
    assert [split.update_s for split in divided] == sorted(split.update_s for split in divided)
    for split in divided:
        plan = Plan(config_of("train.precision=bf16", "rollout.prompts_per_batch=8", *split.overrides), H100)
        assert plan.timing.update_s == pytest.approx(split.update_s)
        assert plan.peak_bytes == split.peak_bytes
        assert plan.timing.devices == 4
    with pytest.raises(UserError, match="--split"):
        splits(config_of("lag.mode=async", "lag.max_steps=1"), H100, 1)


@pytest.mark.parametrize(
    "item", [item for item in PUBLISHED if not item.other], ids=lambda item: f"{item.what} {item.unit}"
)
def test_the_formulas_agree_with_published_times(item):
    """Sources: NeMo-RL's performance summaries, prime-rl's benchmark files (docs/planning.md)."""
    assert 0.65 < item.ratio < 1.35, item.ratio


@pytest.mark.parametrize("path", PAPER, ids=lambda path: path.stem)
def test_every_paper_recipe_has_hours_and_memory_on_eight_gpus(path):
    divided = splits(load_config(path, []), H100, 8)
    assert divided[0].fits
    assert 1 < divided[0].run_hours < 500
    assert {split.engines for split in divided} >= {0, 4}
    assert divided[0].peak_bytes < H100.memory_bytes
    shared = next(split for split in divided if not split.engines)
    again = Plan(load_config(path, shared.overrides), H100)  # a config that a run takes
    assert not again.apart
    assert again.timing.update_s == pytest.approx(shared.update_s)


def test_times_over_ranks_and_engines_were_measured():
    """After a change to the plan: ``python bench/scaling.py --page``, and read what became of the ratios."""
    result = json.loads((ROOT / "results" / "scaling" / "scaling.json").read_text())
    bench = module_of(ROOT / "bench" / "scaling.py")
    cells = [row["cell"] for row in result["rows"]]
    assert "2x1" in cells
    assert cells == [cell for cell in bench.CELLS if cell in cells]
    assert (bench.OUT / "README.md").read_text() == bench.page(result)


def test_what_does_not_fit_is_reported_with_what_would():
    plan = Plan(config_of("train.precision=bf16", source="meta-llama/Llama-3.1-8B"), H100)
    assert not plan.fits
    assert "does not fit" in plan.warnings[0]
    texts = [" ".join(remedy.overrides) for remedy in plan.remedies]
    assert any("train.strategy=fsdp train.devices=" in text for text in texts)
    assert any("model.lora={rank: 16}" in text for text in texts)
    for remedy in plan.remedies:
        words = ["train.precision=bf16", "rollout.prompts_per_batch=8", *remedy.overrides]
        again = config_of(*words, source="meta-llama/Llama-3.1-8B")
        assert Plan(again, H100).fits, remedy
    small = Plan(config_of("train.precision=bf16"), H100)
    assert small.fits
    assert small.remedies == ()
    assert small.warnings == ()


def test_this_machine_is_measured():
    here = device_named("cpu")
    assert here.kind == "cpu"
    assert here.fp32_flops > 1e8
    assert here.bandwidth > 1e7
    assert here.memory_bytes > 2**28


def test_the_command_prints_tables_and_json_and_can_fail(tmp_path):
    from kl_comedy.cli.main import app
    from kl_comedy.errors import RunFailed

    file = tmp_path / "run.yaml"
    file.write_text("model: {source: Qwen/Qwen2.5-7B}\n")
    words = ["plan", str(file), "--gpu", "a100-40", "--format", "json"]
    done = CliRunner().invoke(app, [*words, "--fail-if-too-big"])
    assert done.exit_code == 1
    assert isinstance(done.exception, RunFailed)
    assert "on a100-40" in str(done.exception)
    plan = json.loads(CliRunner().invoke(app, words).stdout)
    assert not plan["memory"]["fits"]
    assert plan["remedies"]
    assert plan["time"]["device_hours"] > 0
    phases = {"always": 0.0, "learning": 0.0, "sampling": 0.0}
    for item in plan["memory"]["components"]:
        phases[item["phase"]] += item["bytes"]
    expected = phases["always"] + max(phases["learning"], phases["sampling"])
    assert plan["memory"]["peak_bytes"] == pytest.approx(expected)
    shown = CliRunner().invoke(app, [*words[:2], "--gpu", "h100-80", "--gpus", "8", "train.strategy=fsdp"])
    assert shown.exit_code == 0
    assert "sampling replica" in shown.stdout
    assert "device hours" in shown.stdout
    divided = json.loads(CliRunner().invoke(app, [*words, "--split", "4"]).stdout)["splits"]
    assert {split["ranks"] for split in divided} == {1, 2, 4}
    assert plan["splits"] == []
    assert "train.devices: got 8" in str(CliRunner().invoke(app, [*words, "--gpus", "8"]).exception)


@pytest.mark.parametrize("path", PAPER, ids=lambda path: path.stem)
def test_every_paper_recipe_can_be_planned(path):
    alone = ["train.strategy=single", "train.devices=1", "rollout.backend=hf", "rollout.options={}"]
    plan = Plan(load_config(path, alone), H100)
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
        saved_by_address = {}

        def pack(tensor):
            if tuple(tensor.shape) not in weights and not (tensor.ndim == 4 and tensor.shape[1] == 1):
                saved_by_address[tensor.untyped_storage().data_ptr()] = tensor  # no address is used twice
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
        return sum(tensor.untyped_storage().nbytes() for tensor in saved_by_address.values())

    whole, narrow = saved(False), saved(True)
    expected = 4 * activation_values(config, checkpoints=False) * (prompt + rows * (length - 1))
    assert 0.67 < expected / whole < 1.5
    assert narrow / whole == pytest.approx(AUTOCAST_SHARE, abs=0.1)
