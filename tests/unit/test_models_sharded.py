"""The chunked head under FSDP2: gathered where it is needed, gradients where they belong (one process, gloo)."""

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from test_models_logprobs import V, batch, llama

from kl_comedy.models import token_pass
from kl_comedy.models.reference import FrozenReference, PassOptions
from kl_comedy.models.weights import weights_hash

OPTIONS = {"temperature": 0.7, "chunk_elements": 4 * V}


@contextlib.contextmanager
def one_process(folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")
@pytest.mark.parametrize("tied", [False, True])
def test_a_sharded_model_gives_the_same_values_gradients_and_hash(tmp_path, tied):
    from torch.distributed.fsdp import fully_shard

    plain, (inputs, _) = llama(torch.float32, tied=tied), batch()
    sharded = copy.deepcopy(plain)
    reference = FrozenReference(llama(torch.float32, seed=3, tied=tied), PassOptions(**OPTIONS)).forward_pass(**inputs)
    wanted = {"reference": reference, "kl": True, **OPTIONS}
    with one_process(tmp_path):
        for layer in sharded.model.layers:
            fully_shard(layer)
        fully_shard(sharded)
        for _ in range(2):  # the second pass meets parameters that were sharded again
            for model in (plain, sharded):
                model.zero_grad()
                seen = token_pass(model, **inputs, **wanted)
                (seen.logp_BT.sum() + seen.kl_BT.sum()).backward()
        grads = {name: p.grad for name, p in plain.named_parameters()}
        for name, parameter in sharded.named_parameters():
            torch.testing.assert_close(parameter.grad.full_tensor(), grads[name], atol=1e-4, rtol=1e-4)
        assert weights_hash(sharded) == weights_hash(plain)
        with torch.no_grad():
            values = [token_pass(model, **inputs, **wanted).logp_BT for model in (plain, sharded)]
        torch.testing.assert_close(*values, atol=1e-6, rtol=0)
