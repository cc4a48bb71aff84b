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
    """Log-probs of two completions, of four and of two tokens, and their mask."""
    generator = torch.Generator().manual_seed(0)
    batch = {name: -torch.rand(2, 4, generator=generator) for name in ("logp", "old", "ref")}
    return batch, torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]).bool()


def actor(losses, mode, **kl):
    """The actor's loss, its gradient by the policy's log-probs, and its metrics."""
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
    # verl's models return log-probs without padding; the last of a prompt and its completion predicts nothing.
    flat = []
    for row, mask in zip(logp_BT, mask_BT, strict=True):
        flat += [row[mask], row.new_zeros(1)]
    loss, metrics = losses.ppo_loss(config, {"log_probs": torch.cat(flat)}, data)
    (gradient,) = torch.autograd.grad(loss, logp_BT)
    assert config.use_kl_loss == kl["use_kl_loss"], "the caller's config must stay as it is"
    return loss.item(), gradient, metrics


def penalized(trainer):
    """The rewards [B, T] that verl makes of the scores 1 and 0.5."""
    batch, mask_BT = tensors()
    scores_BT = torch.zeros(2, 4)
    scores_BT[0, 3] = 1.0
    scores_BT[1, 1] = 0.5
    fields = {
        "response_mask": mask_BT,
        "token_level_scores": scores_BT,
        "old_log_probs": batch["old"],
        "ref_log_prob": batch["ref"],
    }
    data, _ = trainer.apply_kl_penalty(SimpleNamespace(batch=fields), None)
    return data.batch["token_level_rewards"]


def distance(a, b):
    return float((a - b).abs().max())


MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")
TERMS = [{"estimator": "k1", "beta": BETA}, {"estimator": "k3", "placement": "loss", "beta": BETA}]
BEFORE = KLTerm("k1", placement="reward", credit="total", baseline="before", beta=BETA)
# With the plugin none of verl's own KL may be left: a large coefficient of another estimator would show.
WITH_PLUGIN = {"use_kl_loss": True, "kl_loss_type": "k1", "kl_loss_coef": 100.0}


def set_terms(content):
    from kl_comedy.integrations import verl as plugin

    os.environ[plugin.VARIABLE] = json.dumps(content)


def differences_from_verls_own(losses, own):
    """The recipe of verl's own KL instead of it: the difference of loss and gradient in each mode."""
    set_terms({"recipe": "verl/low_var_kl", "beta": BETA})
    result = {}
    for mode in MODES:
        loss, gradient, metrics = actor(losses, mode, **WITH_PLUGIN)
        assert "actor/kl_comedy_loss" in metrics
        own_loss, own_gradient, _ = own[mode]
        result[f"own {mode}"] = [abs(loss - own_loss), distance(gradient, own_gradient)]
    return result


def difference_of_terms(losses, core, without):
    """Terms in reward and loss: what they add to the gradient, less what our surrogates have."""
    mode = "seq-mean-token-mean"
    set_terms(TERMS)
    batch, mask_BT = tensors()
    logp_BT = batch["logp"].clone().requires_grad_()
    kl_BT = 0.0
    for term in resolve_terms(TERMS):
        kl_BT = kl_BT + BETA * kl_surrogate(term, logp_BT=logp_BT, **columns_of(batch, mask_BT))
    (expected,) = torch.autograd.grad(core.agg_loss(kl_BT, mask_BT, mode), logp_BT)
    _, gradient, _ = actor(losses, mode, **WITH_PLUGIN)
    _, gradient_without, _ = without[mode]
    return distance(gradient - gradient_without, expected)


def difference_of_rewards(trainer):
    """A cost before the baseline: the rewards of verl's penalty less those with our cost."""
    set_terms([BEFORE.to_mapping()])
    batch, mask_BT = tensors()
    cost_B = kl_parts(BEFORE, logp_BT=batch["old"], **columns_of(batch, mask_BT)).cost_BT[:, 0]
    return distance(penalized(trainer).sum(-1), torch.tensor([1.0, 0.5]) - BETA * cost_B)


def columns_of(batch, mask_BT):
    return {"ref_logp_BT": batch["ref"], "behaviour_logp_BT": batch["old"], "mask_BT": mask_BT}


def refusals(trainer):
    """What is said of terms where verl's config would not have them computed: in the reward, in the loss."""
    config = Config(algorithm={}, actor_rollout_ref=Config(actor=Config(use_kl_loss=False)))
    messages = []
    for content in ([BEFORE.to_mapping()], "grpo"):
        set_terms(content)
        try:
            trainer.need_reference_policy(config)
        except UserError as error:
            messages.append(str(error))
    return messages


def main():
    losses = PEER.module(LOSSES)
    trainer = PEER.module(TRAINER)
    core = PEER.module(CORE)
    PEER.module("verl.trainer.ppo.utils")
    from kl_comedy.integrations import verl as plugin

    # Before the plugin changes verl's functions.
    own = {mode: actor(losses, mode, use_kl_loss=True, kl_loss_type="low_var_kl", kl_loss_coef=BETA) for mode in MODES}
    without = {mode: actor(losses, mode, use_kl_loss=False) for mode in MODES}
    set_terms({"recipe": "verl/low_var_kl", "beta": BETA})
    plugin.install()

    result = {
        "version": PEER.version,
        **differences_from_verls_own(losses, own),
        "terms": difference_of_terms(losses, core, without),
        "reward": difference_of_rewards(trainer),
        "refused": refusals(trainer),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
