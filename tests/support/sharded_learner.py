"""A learner over several processes."""

import torch
from torch import nn

from kl_comedy.models import weights_hash
from kl_comedy.models.reference import MovingReference
from kl_comedy.models.types import PassOptions
from kl_comedy.training.checkpoint import read_checkpoint, write_checkpoint
from kl_comedy.training.strategies import clip_gradients
from passes import token_pass
from sharded_models import OPTIONS, batch


class Learner(nn.Module):
    """As much of a run as a checkpoint holds."""

    def __init__(self, loaded, ranks):
        super().__init__()
        self.policy = loaded.model
        self.ranks = ranks
        self.references = {"ema": MovingReference(loaded.model, PassOptions(**OPTIONS), decay=0.5)}
        self.optimizer = torch.optim.AdamW(self.trained(), lr=0.01, fused=True)

    def trained(self):
        return [parameter for parameter in self.policy.parameters() if parameter.requires_grad]

    def learn(self, updates):
        for _ in range(updates):
            self.optimizer.zero_grad()
            token_pass(self.policy, **batch(), **OPTIONS).logp_BT.sum().backward()
            self.norm = clip_gradients(self.trained(), 1.0)
            self.optimizer.step()
            self.references["ema"].update(self.policy, 1)

    def save(self, folder):
        moving = {"ema": self.references["ema"].state_dict()}
        state = {"kl_comedy": {"moving": moving, "torch_rng": torch.get_rng_state()}}
        write_checkpoint(folder, state, self, [self.optimizer], self.ranks)

    def restore(self, folder):
        checkpoint = read_checkpoint(folder, self, [self.optimizer], self.ranks)
        self.references["ema"].load_state_dict(checkpoint["kl_comedy"]["moving"]["ema"])
        torch.set_rng_state(checkpoint["kl_comedy"]["torch_rng"])

    def hashes(self):
        return [weights_hash(self.policy), weights_hash(self.references["ema"].model)]
