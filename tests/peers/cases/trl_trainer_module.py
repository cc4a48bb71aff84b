"""Trainer class, imported by another file; starts nothing."""

import torch
from transformers import Trainer
from trl import GRPOConfig


class MyGRPOTrainer(Trainer):
    def __init__(self, model, args: GRPOConfig, ref_model):
        super().__init__(model=model, args=args)
        self.beta, self.ref_model = args.beta, ref_model

    def compute_loss(self, model, inputs, return_outputs=False):
        new, ref = self.logps(model, inputs), self.logps(self.ref_model, inputs)
        kl = torch.exp(ref - new) - (ref - new) - 1
        ratio = torch.exp(new - new.detach())
        return -(ratio * inputs["advantages"] - self.beta * kl).mean()
