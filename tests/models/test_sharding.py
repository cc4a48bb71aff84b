"""A policy loaded in shards is the policy that one process loads: weights, values, references, streams."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from kl_comedy.config.schema import Config, ModelConfig, ReferenceConfig, RolloutConfig
from kl_comedy.models import load_model, weights_hash
from kl_comedy.models.lora import merge_adapter
from kl_comedy.models.reference import Reference, build_reference
from kl_comedy.models.sharding import decoder_layers
from kl_comedy.models.types import PassOptions
from kl_comedy.models.weights import copy_into, full_tensor, stream_weights, weight_bytes
from passes import token_pass
from ranks import spawn
from sharded_models import OPTIONS, batch, config_of, save_tied
from small_llama import batch as padded_batch
from small_llama import llama


def values(loaded):
    """Log-probs, exact KL to the initial and an EMA reference, and squared gradient norms, as plain numbers."""
    model, inputs = loaded.model, batch()
    config = Config(
        reference=ReferenceConfig(ema_decay=0.5),
        rollout=RolloutConfig(temperature=0.7),
        model=ModelConfig(head_chunk_elements=64),
    )
    reference, moved = (build_reference(kind, loaded, config) for kind in ("initial", "ema"))
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.mul_(1.1).add_(0.01)
    moved.update(model, 1)
    numbers = {}
    for name, ref in (("initial", reference), ("ema", moved)):
        passed = token_pass(model, **inputs, reference=ref.forward_pass(**inputs), kl=True, **OPTIONS)
        numbers[name] = [*passed.logp_BT.flatten().tolist(), *passed.kl_BT.flatten().tolist()]
    model.zero_grad()
    (passed.logp_BT.sum() + passed.kl_BT.sum()).backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    grads = [full_tensor(torch.zeros_like(p) if p.grad is None else p.grad) for p in trained]
    numbers["grads"] = [float(grad.double().square().sum()) for grad in grads]
    return numbers


def layers_whole_at_once(model):
    """The most decoder layers that this process holds whole when any of them runs."""
    layers = decoder_layers(model)
    sizes = [sum(p.numel() for p in layer.parameters()) for layer in layers]
    counts = []

    def elements(layer):
        return sum((p.to_local() if hasattr(p, "to_local") else p).numel() for p in layer.parameters())

    def look(*_):
        counts.append(sum(elements(layer) == size for layer, size in zip(layers, sizes, strict=True)))

    hooks = [layer.register_forward_pre_hook(look) for layer in layers]
    with torch.no_grad():
        token_pass(model, **batch(), **OPTIONS)
    for hook in hooks:
        hook.remove()
    assert len(counts) == len(layers)
    return max(counts)


def sharded_results(rank, world, folder, kind):
    from kl_comedy.models.sharding import load_sharded

    loaded = load_sharded(config_of(kind, folder), limit_bytes=0)
    local = sum((p.to_local() if hasattr(p, "to_local") else p).numel() for p in loaded.model.parameters())
    total = sum(p.numel() for p in loaded.model.parameters())
    results = {
        "start": weights_hash(loaded.model),
        "ends": loaded.causal.generation_config.eos_token_id,
        "share": local / total,
        "at once": layers_whole_at_once(loaded.model),
        "bytes": weight_bytes(loaded.model),
        "values": values(loaded),
        "end": weights_hash(loaded.model),
    }
    replica = load_model(config_of(kind, folder))
    sizes = [0]

    def counted():
        for bucket in stream_weights(loaded.model, 2**15):
            if len(bucket) > 1:
                sizes.append(sum(t.numel() * t.element_size() for _, t in bucket))
            yield bucket

    copy_into(replica.model, counted())
    return {**results, "largest bucket": max(sizes), "replica": weights_hash(replica.model)}


@pytest.mark.parametrize("kind", ["plain", "tied lora checkpointing"])
def test_a_sharded_policy_equals_that_of_one_process(tmp_path, kind):
    if "tied" in kind:
        save_tied(tmp_path)
    alone = load_model(config_of(kind, tmp_path))
    start, size = weights_hash(alone.model), weight_bytes(alone.model)
    ends, expected = alone.causal.generation_config.eos_token_id, values(alone)
    for results in spawn(sharded_results, tmp_path, kind):
        assert results["start"] == start
        assert results["ends"] == ends == ([1, 5] if "tied" in kind else 1)
        assert results["share"] < 0.6
        assert results["at once"] == 1
        assert results["bytes"] == size
        assert results["largest bucket"] <= 2**15
        assert results["replica"] == results["end"]
        for name, numbers in expected.items():
            assert results["values"][name] == pytest.approx(numbers, rel=1e-4, abs=1e-5), name


def failing(rank, world, folder):
    from kl_comedy.errors import UserError
    from kl_comedy.models.sharding import load_sharded

    try:
        load_sharded(ModelConfig(source=str(folder / "nothing"), tokenizer=str(folder / "nothing")), limit_bytes=0)
    except UserError as error:
        return str(error)


def test_a_missing_model_is_a_user_error_on_every_rank(tmp_path):
    assert all("nothing" in message for message in spawn(failing, tmp_path))


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_under_fsdp_are_those_of_the_plain_model(tmp_path, tied):
    """One process, gloo; the second pass meets parameters that were sharded again."""
    plain, (inputs, _) = llama(torch.float32, tied=tied), padded_batch()
    sharded = copy.deepcopy(plain)
    reference = Reference(llama(torch.float32, seed=3, tied=tied), PassOptions(**OPTIONS)).forward_pass(**inputs)
    options = {"reference": reference, "kl": True, **OPTIONS}
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        for unit in (*sharded.model.layers, sharded):
            fully_shard(unit)
        for _ in range(2):
            for model in (plain, sharded):
                model.zero_grad()
                result = token_pass(model, **inputs, **options)
                (result.logp_BT.sum() + result.kl_BT.sum()).backward()
        grads = {name: p.grad for name, p in plain.named_parameters()}
        for name, parameter in sharded.named_parameters():
            torch.testing.assert_close(parameter.grad.full_tensor(), grads[name], atol=1e-4, rtol=1e-4)
        assert weights_hash(sharded) == weights_hash(plain)
    finally:
        dist.destroy_process_group()


def test_merging_an_adapter_gives_the_same_policy(tmp_path):
    adapted = load_model(config_of("lora"))
    with torch.no_grad():
        for name, p in adapted.model.named_parameters():
            if ".lora_B." in name:
                p.normal_(std=0.1)
    plain = load_model(config_of("plain"))
    weights = [pair for bucket in stream_weights(adapted.model) for pair in bucket]
    copy_into(plain.model, [list(merge_adapter(weights, scaling=16.0 / 4))])
    with torch.no_grad():
        start = load_model(config_of("plain")).model
        apart, merged, before = (
            token_pass(m, **batch(), **OPTIONS).logp_BT for m in (adapted.model, plain.model, start)
        )
    torch.testing.assert_close(apart, merged, atol=1e-5, rtol=1e-5)
    assert float((before - apart).abs().max()) > 1e-3


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("factors", ["narrow", "float32"])
def test_an_adapter_is_merged_in_float32_and_rounded_once(narrow, factors):
    """In the dtype of the weight the product would be rounded first, and the sum again."""
    generator = torch.Generator().manual_seed(0)
    weight, a, b = (torch.randn(shape, generator=generator) for shape in ((24, 16), (4, 16), (24, 4)))
    weight, (a, b) = weight.to(narrow), (a.to(narrow), b.to(narrow)) if factors == "narrow" else (a, b)
    parts = {"base_layer": weight, "lora_A.default": a, "lora_B.default": b}
    for order in (parts, dict(reversed(parts.items()))):
        named = [(f"base_model.model.layer.{part}.weight", tensor) for part, tensor in order.items()]
        ((name, merged),) = merge_adapter(named, scaling=0.75)
        exact = weight.double() + 0.75 * (b.double() @ a.double())
        assert name == "layer.weight" and merged.dtype == narrow
        once = exact.to(narrow)
        assert int((merged != once).sum()) <= 1, "but for a tie of float32"
        twice = weight + (0.75 * (b.double() @ a.double())).to(narrow)
        assert int((twice != once).sum()) > 20, "rounding twice shows"


def test_copying_reports_missing_and_unknown_weights():
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="did not come: bias"):
        copy_into(model, [[("weight", model.weight)]])
    with pytest.raises(ValueError, match="no such weight"):
        copy_into(model, [[("other", model.weight)]])
