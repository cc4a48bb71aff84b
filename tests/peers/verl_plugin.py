"""Run verl's released ``ppo_loss`` and ``apply_kl_penalty`` with and without the plugin; prints one JSON object.

A process of its own: packages that these functions do not use (Ray) are stubbed.
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))
import torch
from peers.adapters.verl import CORE, LOSSES, PEER, TRAINER

from kl_comedy.errors import UserError
from kl_comedy.kl import KLTerm, kl_parts, kl_surrogate, resolve_terms

BETA = 0.3


class Config(SimpleNamespace):
    def get(self, key, default=None):
        return getattr(self, key, default)


def tensors():
    generator = torch.Generator().manual_seed(0)
    batch = {name: -torch.rand(2, 4, generator=generator) for name in ("logp", "old", "ref")}
    return batch, torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]).bool()


def actor(losses, mode, **kl):
    """The actor's loss and its gradient by the policy's log-probs."""
    batch, mask_BT = tensors()
    logp_BT = batch["logp"].clone().requires_grad_()
    ones_B1 = torch.ones(2, 1, dtype=torch.long)
    data = losses.tu.get_tensordict(
        {
            "prompts": ones_B1,
            "responses": mask_BT.long(),
            "attention_mask": torch.cat([ones_B1, mask_BT.long()], 1),
            "response_mask": mask_BT,
            "old_log_probs": batch["old"],
            "ref_log_prob": batch["ref"],
            "advantages": torch.tensor([[1.0], [-0.5]]).expand(2, 4).contiguous(),
        },
        {"dp_size": 1, "batch_num_tokens": None, "global_batch_size": None},
    )
    config = Config(
        global_batch_info={},
        loss_scale_factor=None,
        loss_agg_mode=mode,
        policy_loss=Config(loss_mode="vanilla"),
        clip_ratio=0.2,
        clip_ratio_low=0.2,
        clip_ratio_high=0.2,
        clip_ratio_c=3.0,
        entropy_coeff=0.0,
        **kl,
    )
    flat = [torch.cat([row[mask], row.new_zeros(1)]) for row, mask in zip(logp_BT, mask_BT, strict=True)]
    loss, metrics = losses.ppo_loss(config, {"log_probs": torch.cat(flat)}, data)
    (gradient,) = torch.autograd.grad(loss, logp_BT)
    assert config.use_kl_loss == kl["use_kl_loss"], "the caller's config must stay as it is"
    return loss.item(), gradient, metrics


def penalized(trainer):
    batch, mask_BT = tensors()
    scores_BT = torch.zeros(2, 4)
    scores_BT[0, 3], scores_BT[1, 1] = 1.0, 0.5
    fields = {"response_mask": mask_BT, "token_level_scores": scores_BT, "old_log_probs": batch["old"]}
    data = SimpleNamespace(batch={**fields, "ref_log_prob": batch["ref"]})
    return trainer.apply_kl_penalty(data, None)[0].batch["token_level_rewards"]


def distance(a, b):
    return float((a - b).abs().max())


def main():
    losses, trainer, core = PEER.module(LOSSES), PEER.module(TRAINER), PEER.module(CORE)
    PEER.module("verl.trainer.ppo.utils")
    from kl_comedy.integrations import verl as plugin

    result = {"version": PEER.version}
    own = {mode: actor(losses, mode, use_kl_loss=True, kl_loss_type="low_var_kl", kl_loss_coef=BETA) for mode in MODES}
    without = {mode: actor(losses, mode, use_kl_loss=False) for mode in MODES}
    os.environ[plugin.VARIABLE] = json.dumps({"recipe": "verl/low_var_kl", "beta": BETA})
    plugin.install()
    on = {"use_kl_loss": True, "kl_loss_type": "k1", "kl_loss_coef": 100.0}  # none of verl's own KL may be left
    for mode in MODES:
        loss, gradient, metrics = actor(losses, mode, **on)
        assert "actor/kl_comedy_loss" in metrics
        result[f"own {mode}"] = [abs(loss - own[mode][0]), distance(gradient, own[mode][1])]

    terms = [{"estimator": "k1", "beta": BETA}, {"estimator": "k3", "placement": "loss", "beta": BETA}]
    os.environ[plugin.VARIABLE] = json.dumps(terms)
    batch, mask_BT = tensors()
    logp_BT = batch["logp"].clone().requires_grad_()
    logps = {"logp_BT": logp_BT, "ref_logp_BT": batch["ref"], "behaviour_logp_BT": batch["old"], "mask_BT": mask_BT}
    kl_BT = BETA * sum(kl_surrogate(term, **logps) for term in resolve_terms(terms))
    (expected,) = torch.autograd.grad(core.agg_loss(kl_BT, mask_BT, "seq-mean-token-mean"), logp_BT)
    _, gradient, _ = actor(losses, "seq-mean-token-mean", **on)
    result["terms"] = distance(gradient - without["seq-mean-token-mean"][1], expected)

    before = KLTerm("k1", placement="reward", credit="total", baseline="before", beta=BETA)
    os.environ[plugin.VARIABLE] = json.dumps([before.to_mapping()])
    cost_B = kl_parts(before, **{**logps, "logp_BT": batch["old"]}).cost_BT[:, 0]
    result["reward"] = distance(penalized(trainer).sum(-1), torch.tensor([1.0, 0.5]) - BETA * cost_B)
    config = Config(algorithm={}, actor_rollout_ref=Config(actor=Config(use_kl_loss=False)))
    refused = []
    for text in (os.environ[plugin.VARIABLE], '"grpo"'):
        os.environ[plugin.VARIABLE] = text
        try:
            trainer.need_reference_policy(config)
        except UserError as error:
            refused.append(str(error))
    print(json.dumps({**result, "refused": refused}))


MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")

if __name__ == "__main__":
    main()
