"""Optimizer, clipping, moving reference and checkpoints over shards: as one process has them."""

import pytest
import torch
from ranks import spawn
from test_models_sharding import OPTIONS, batch, config_of
from torch import nn

from kl_comedy.models import load_model, weights_hash
from kl_comedy.models.logprobs import token_pass
from kl_comedy.models.reference import MovingReference, PassOptions
from kl_comedy.training.checkpoint import read_checkpoint, write_checkpoint
from kl_comedy.training.distributed import SINGLE_PROCESS, Ranks
from kl_comedy.training.strategies import clip_gradients


class Learner(nn.Module):
    """As much of a run as a checkpoint holds."""

    def __init__(self, loaded, ranks):
        super().__init__()
        self.policy, self.ranks = loaded.model, ranks
        self.references = {"ema": MovingReference(loaded.model, PassOptions(**OPTIONS), decay=0.5)}
        self.optimizer = torch.optim.AdamW(
            [p for p in self.policy.parameters() if p.requires_grad], lr=0.01, fused=True
        )

    def learn(self, updates):
        for _ in range(updates):
            self.optimizer.zero_grad()
            token_pass(self.policy, **batch(), **OPTIONS).logp_BT.sum().backward()
            self.norm = clip_gradients([p for p in self.policy.parameters() if p.requires_grad], 1.0)
            self.optimizer.step()
            self.references["ema"].update(self.policy, 1)

    def save(self, folder):
        moving = {"ema": self.references["ema"].state_dict()}
        state = {"kl_comedy": {"moving": moving, "torch_rng": torch.get_rng_state()}}
        write_checkpoint(folder, state, self, [self.optimizer], self.ranks)

    def restore(self, folder):
        checkpoint = read_checkpoint(folder, self, [self.optimizer], self.ranks)
        self.references["ema"].load_state_dict(checkpoint["kl_comedy"]["moving"]["ema"])

    def hashes(self):
        return [weights_hash(self.policy), weights_hash(self.references["ema"].model)]


def saved_and_resumed(rank, world, folder, kind):
    from kl_comedy.models.sharding import load_sharded

    run = Learner(load_sharded(config_of(kind), limit_bytes=0), Ranks(rank=rank, size=world, sharded=True))
    run.learn(2)
    run.save(folder / "ckpt")
    report = {"saved": run.hashes(), "norm": run.norm}
    run.learn(2)
    report["went on"] = run.hashes()
    run.restore(folder / "ckpt")
    report["restored"] = run.hashes()
    run.learn(2)
    return {**report, "resumed": run.hashes()}


@pytest.mark.parametrize("kind", [pytest.param("plain", marks=pytest.mark.slow), "lora"])
def test_a_checkpoint_of_shards_is_read_by_many_and_by_one(tmp_path, kind):
    alone = Learner(load_model(config_of(kind)), SINGLE_PROCESS)
    alone.learn(2)
    for report in spawn(saved_and_resumed, tmp_path, kind):
        assert report["norm"] == pytest.approx(alone.norm, rel=1e-5)
        assert report["restored"] == report["saved"] != report["went on"] == report["resumed"]
    weights = {name: tensor.clone() for name, tensor in alone.policy.state_dict().items()}
    alone.learn(1)
    alone.restore(tmp_path / "ckpt")
    assert alone.hashes() == report["saved"]
    for name, tensor in alone.policy.state_dict().items():
        torch.testing.assert_close(tensor, weights[name], atol=1e-5, rtol=0)
    alone.learn(1)
