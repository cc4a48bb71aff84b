"""A policy loaded in shards is the policy that one process loads: weights, values, references, streams."""

import copy
import hashlib

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from kl_comedy.config.schema import Config, ModelConfig, ReferenceConfig, RolloutConfig
from kl_comedy.models import load_model, weights_hash
from kl_comedy.models import weights as model_weights
from kl_comedy.models.lora import base_name, merge_adapter
from kl_comedy.models.reference import Reference, build_reference
from kl_comedy.models.sharding import decoder_layers
from kl_comedy.models.types import PassOptions
from kl_comedy.models.weights import copy_into, full_tensor, full_weights, gathered, stream_weights, weight_bytes
from passes import token_pass
from ranks import spawn
from sharded_models import OPTIONS, batch, config_of, save_tied
from small_llama import batch as padded_batch
from small_llama import llama


def own_part(parameter):
    """What this process holds of a parameter, sharded or not."""
    if hasattr(parameter, "to_local"):
        return parameter.to_local()
    return parameter


def values(loaded):
    """Log-probs, exact KL to the initial and an EMA reference, and squared gradient norms, as plain numbers."""
    model = loaded.model
    inputs = batch()
    config = Config(
        reference=ReferenceConfig(ema_decay=0.5),
        rollout=RolloutConfig(temperature=0.7),
        model=ModelConfig(head_chunk_elements=64),
    )
    references = {kind: build_reference(kind, loaded, config) for kind in ("initial", "ema")}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with torch.no_grad():
        for parameter in trained:
            parameter.mul_(1.1).add_(0.01)
    references["ema"].update(model, 1)
    numbers = {}
    for kind, reference in references.items():
        columns = token_pass(model, **inputs, reference=reference.forward_pass(**inputs), kl=True, **OPTIONS)
        numbers[kind] = [*columns.logp_BT.flatten().tolist(), *columns.kl_BT.flatten().tolist()]

    # Gradients of the last pass, that with the moving reference.
    model.zero_grad()
    (columns.logp_BT.sum() + columns.kl_BT.sum()).backward()
    numbers["grads"] = []
    for parameter in trained:
        gradient = parameter.grad
        if gradient is None:
            gradient = torch.zeros_like(parameter)
        # Every rank takes part in the gathering, also for a gradient of zeros.
        numbers["grads"].append(float(full_tensor(gradient).double().square().sum()))
    return numbers


def layers_whole_at_once(model):
    """The most decoder layers that this process holds whole when any of them runs."""
    layers = decoder_layers(model)
    counts = []

    def is_whole(layer):
        return all(own_part(parameter).numel() == parameter.numel() for parameter in layer.parameters())

    def count_whole_layers(*_):
        counts.append(sum(is_whole(layer) for layer in layers))

    hooks = [layer.register_forward_pre_hook(count_whole_layers) for layer in layers]
    with torch.no_grad():
        token_pass(model, **batch(), **OPTIONS)
    for hook in hooks:
        hook.remove()
    assert len(counts) == len(layers)
    return max(counts)


BUCKET_BYTES = 2**15


def sent(model):
    """SHA-256 of every weight that a publication gathers, by name, and the number of its collectives."""
    gathers = []

    def gather(*arguments, original=DTensor.full_tensor, **settings):
        gathers.append(arguments)
        return original(*arguments, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_weights, "BUCKET_BYTES", BUCKET_BYTES)
        patch.setattr(DTensor, "full_tensor", gather)
        hashes = {name: bfloat16_hash(tensor) for name, tensor in full_weights(model, torch.bfloat16)}
    return hashes, len(gathers)


def bfloat16_hash(tensor):
    rounded = tensor.detach().to(torch.bfloat16).contiguous()
    return hashlib.sha256(rounded.view(torch.int16).numpy().tobytes()).hexdigest()


def rows_that_two_ranks_cannot_share_equally():
    """Whether tensors of five rows and of one, of which the second rank has none, are gathered as they were."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 1))
    expected = copy.deepcopy(module).state_dict()
    fully_shard(module)
    whole = dict(gathered(list(module.state_dict().items())))
    return all(torch.equal(tensor, expected[name]) for name, tensor in whole.items())


def sharded_results(rank, world, folder, kind):
    """What each rank measures of a policy that is loaded in shards."""
    from kl_comedy.models.sharding import load_sharded

    loaded = load_sharded(config_of(kind, folder), limit_bytes=0)
    own_elements = sum(own_part(parameter).numel() for parameter in loaded.model.parameters())
    all_elements = sum(parameter.numel() for parameter in loaded.model.parameters())
    results = {
        "start": weights_hash(loaded.model),
        "ends": loaded.causal.generation_config.eos_token_id,
        "share": own_elements / all_elements,
        "at once": layers_whole_at_once(loaded.model),
        "bytes": weight_bytes(loaded.model),
        "sent": sent(loaded.model),
        "uneven": rows_that_two_ranks_cannot_share_equally(),
        "values": values(loaded),
        "end": weights_hash(loaded.model),
    }
    replica = load_model(config_of(kind, folder))
    bucket_bytes = []

    def measured_buckets():
        for bucket in stream_weights(loaded.model, BUCKET_BYTES):
            # A weight that is larger than a bucket travels alone.
            if len(bucket) > 1:
                bucket_bytes.append(sum(tensor.numel() * tensor.element_size() for _, tensor in bucket))
            yield bucket

    copy_into(replica.model, measured_buckets())
    results["largest bucket"] = max(bucket_bytes, default=0)
    results["replica"] = weights_hash(replica.model)
    return results


@pytest.mark.parametrize(("kind", "end_ids"), [("plain", 1), ("tied lora checkpointing", [1, 5])])
def test_a_sharded_policy_equals_that_of_one_process(tmp_path, kind, end_ids):
    if "tied" in kind:
        save_tied(tmp_path)
    alone = load_model(config_of(kind, tmp_path))
    start = weights_hash(alone.model)
    size = weight_bytes(alone.model)
    assert alone.causal.generation_config.eos_token_id == end_ids
    state = alone.causal.state_dict()
    sent_hashes = {base_name(name): bfloat16_hash(weight) for name, weight in state.items() if "lora_" not in name}
    expected = values(alone)
    for results in spawn(sharded_results, tmp_path, kind):
        assert results["start"] == start
        assert results["ends"] == end_ids
        assert results["share"] < 0.6, "each of two ranks holds half of the weights"
        assert results["at once"] == 1
        assert results["bytes"] == size
        hashes, gathers = results["sent"]
        # A fresh adapter changes nothing.
        assert hashes == sent_hashes
        # Of two buckets in a row one would not have had room for the other.
        assert gathers <= 1 + 2 * size // BUCKET_BYTES, "one for each bucket"
        assert results["uneven"]
        assert results["largest bucket"] <= BUCKET_BYTES
        assert results["replica"] == results["end"], "the streamed weights are those of the policy"
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
    for message in spawn(failing, tmp_path):
        assert "nothing" in message


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_under_fsdp_are_those_of_the_plain_model(tmp_path, tied):
    """One process, gloo; the second pass meets parameters that were sharded again."""
    plain = llama(torch.float32, tied=tied)
    inputs, _ = padded_batch()
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
        # A fresh adapter is the identity: its B is zero.
        for name, parameter in adapted.model.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=0.1)
    merged = load_model(config_of("plain"))
    weights = []
    for bucket in stream_weights(adapted.model):
        weights.extend(bucket)
    alpha_over_rank = 16.0 / 4
    copy_into(merged.model, [list(merge_adapter(weights, scaling=alpha_over_rank))])
    base = load_model(config_of("plain"))
    with torch.no_grad():
        adapted_BT = token_pass(adapted.model, **batch(), **OPTIONS).logp_BT
        merged_BT = token_pass(merged.model, **batch(), **OPTIONS).logp_BT
        base_BT = token_pass(base.model, **batch(), **OPTIONS).logp_BT
    torch.testing.assert_close(adapted_BT, merged_BT, atol=1e-5, rtol=1e-5)
    assert float((base_BT - adapted_BT).abs().max()) > 1e-3


@pytest.mark.parametrize("order", ["base first", "base last"])
@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("factors", ["narrow", "float32"])
def test_an_adapter_is_merged_in_float32_and_rounded_once(narrow, factors, order):
    """In the dtype of the weight the product would be rounded first, and the sum again."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn((24, 16), generator=generator).to(narrow)
    lora_a = torch.randn((4, 16), generator=generator)
    lora_b = torch.randn((24, 4), generator=generator)
    if factors == "narrow":
        lora_a = lora_a.to(narrow)
        lora_b = lora_b.to(narrow)
    named = [
        ("base_model.model.layer.base_layer.weight", weight),
        ("base_model.model.layer.lora_A.default.weight", lora_a),
        ("base_model.model.layer.lora_B.default.weight", lora_b),
    ]
    if order == "base last":
        named.reverse()
    ((name, merged),) = merge_adapter(named, scaling=0.75)
    assert name == "layer.weight"
    assert merged.dtype == narrow

    update = 0.75 * (lora_b.double() @ lora_a.double())
    rounded_once = (weight.double() + update).to(narrow)
    rounded_twice = weight + update.to(narrow)
    assert int((merged != rounded_once).sum()) <= 1, "but for a tie of float32"
    assert int((rounded_twice != rounded_once).sum()) > 20, "rounding twice shows"


@pytest.mark.parametrize(
    ("name", "message"), [("weight", "did not come: bias"), ("other", "no such weight")], ids=["missing", "unknown"]
)
def test_copying_reports_missing_and_unknown_weights(name, message):
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match=message):
        copy_into(model, [[(name, model.weight)]])
