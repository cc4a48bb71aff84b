"""What the calls of rows.yaml may use beside the released code: our own formulas, and arguments that trainers build.

Legend: ``B`` completions, ``T`` tokens, ``K`` likeliest tokens, ``V`` vocabulary; log-probs in nats.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

TOP = 1
"""Likeliest tokens of a top-k KL: the enumerated vocabulary has three, so that a tail of two is left."""


# --- the formulas of the re-implementations --------------------------------------------------------------------------
def k1(logp: Tensor, ref_logp: Tensor) -> Tensor:
    return logp - ref_logp


def k2(logp: Tensor, ref_logp: Tensor) -> Tensor:
    return (logp - ref_logp) ** 2 / 2


def k3(logp: Tensor, ref_logp: Tensor) -> Tensor:
    return (ref_logp - logp).exp() - 1 - (ref_logp - logp)


def clamped_k3(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """k3 with its log-ratio clamped at 20 and its value at 10."""
    back = (ref_logp - logp).clamp(-20, 20)
    return (back.exp() - 1 - back).clamp(-10, 10)


def ratio(logp: Tensor, old_logp: Tensor) -> Tensor:
    return (logp - old_logp).exp()


def score(logp: Tensor) -> Tensor:
    """1 in value; its gradient is that of the log-prob."""
    return (logp - logp.detach()).exp()


def in_reward(cost: Tensor, logp: Tensor, old_logp: Tensor, mask: Tensor) -> Tensor:
    """A cost per token in the reward: each token is weighted by the costs from it on, held fixed."""
    cost = torch.where(mask, cost.detach(), 0.0)
    to_go = cost.flip(-1).cumsum(-1).flip(-1)
    return ratio(logp, old_logp) * to_go


def with_returns(returns: Tensor, logp: Tensor, old_logp: Tensor) -> Tensor:
    """The policy loss of returns: minus the ratio times the return of each token."""
    return -ratio(logp, old_logp) * returns.detach()


# --- arguments as the trainers build them ----------------------------------------------------------------------------
def plus_plus_returns(code: Any, cost: Tensor, mask: Tensor) -> Tensor:
    """REINFORCE++ returns of slime and miles for a KL coefficient of 1 and rewards of 0, on one device."""
    _stand_in("megatron", core=_stand_in("megatron.core", mpu=SimpleNamespace(get_context_parallel_world_size=_one)))
    code.give(get_parallel_state=lambda: SimpleNamespace(cp=SimpleNamespace(size=1)))
    count, length = mask.shape
    lengths = [length] * count
    returns = code.get_reinforce_plus_plus_returns(
        rewards=torch.zeros(count, dtype=torch.float64),
        kl=list(cost.detach().double()),
        loss_masks=list(mask.double()),
        response_lengths=lengths,
        total_lengths=lengths,
        kl_coef=1.0,
        gamma=1.0,
    )
    return torch.stack(list(returns))


def _one() -> int:
    return 1


def _stand_in(name: str, **attributes: Any) -> ModuleType:
    """A module that released code imports within a function, for what it asks of it on one device."""
    module = ModuleType(name)
    module.__dict__.update(attributes)
    sys.modules[name] = module
    return module


def top_k_parts(
    code: Any, kind: str, *, logp: Tensor, ref_logp: Tensor, logp_full: Tensor, ref_logp_full: Tensor, tokens: Tensor
) -> Tensor:
    """EMA-PG's head plus tail for its ``kl_type``, with the likeliest tokens that it chooses."""
    chooser = logp_full
    if kind == "full_forward":
        chooser = ref_logp_full
    top_BTK = _likeliest(chooser)
    # The logits are the log-probs, whose logsumexp is 0. The sampled token's log-prob comes from the same logits.
    zero_BT = torch.zeros_like(ref_logp)
    head_BT, tail_BT = code.compute_memory_efficient_kl(
        actor_logits_k=logp_full.gather(-1, top_BTK),
        actor_logsumexp=zero_BT,
        ref_logits_k=ref_logp_full.gather(-1, top_BTK),
        ref_logsumexp=zero_BT,
        kl_type=kind,
        use_tail_sampling=True,
        actor_topk_indices=top_BTK,
        ref_topk_indices=top_BTK,
        sampled_indices=tokens,
        log_prob=logp,
        ref_log_prob=ref_logp,
    )
    return head_BT + tail_BT


def _likeliest(chooser_BTV: Tensor) -> Tensor:
    """The ids ``[B, T, K]`` of the likeliest tokens."""
    return chooser_BTV.detach().topk(TOP, -1).indices


def _in_tail(top_BTK: Tensor, token_BT: Tensor) -> Tensor:
    """Whether a sampled token is none of the likeliest, ``[B, T]``."""
    return (top_BTK != token_BT[..., None]).all(-1)


def tail_score(logp: Tensor, chooser: Tensor, tokens: Tensor) -> Tensor:
    """0 in value, with the gradient of the log-prob on tokens outside the likeliest of ``chooser`` ``[B, T, V]``."""
    return torch.where(_in_tail(_likeliest(chooser), tokens), logp - logp.detach(), 0.0)


def our_top_k_parts(
    *, logp: Tensor, ref_logp: Tensor, logp_full: Tensor, ref_logp_full: Tensor, tokens: Tensor
) -> Tensor:
    """The same reverse KL: an exact head, and a sampled tail that lacks the gradient of its value."""
    top_BTK = _likeliest(logp_full)
    head_logp_BTK = logp_full.gather(-1, top_BTK)
    head_ref_logp_BTK = ref_logp_full.gather(-1, top_BTK)
    head_BT = (head_logp_BTK.exp() * (head_logp_BTK - head_ref_logp_BTK)).sum(-1)
    # The value is a constant here: its gradient, + logp - logp.detach(), is what the released code lacks.
    tail_BT = (logp - ref_logp).detach() * score(logp)
    return head_BT + torch.where(_in_tail(top_BTK, tokens), tail_BT, 0.0)


def loss_module(build: Callable[..., Any], logp: Tensor, ref_logp: Tensor, mask: Tensor) -> Tensor:
    """torchforge's loss, called per completion: the KL part, its mean over the tokens kept."""
    losses = []
    for row in range(len(mask)):
        part = slice(row, row + 1)
        advantages = torch.zeros(1, 1, dtype=torch.float64)
        arguments = (logp[part], ref_logp[part], advantages, mask[part])
        # The difference is the KL part alone, whatever else the loss has.
        losses.append(build(beta=1.0)(*arguments) - build(beta=0.0)(*arguments))
    return torch.stack(losses)


def unsloth_kl(
    code: Any, *, logp: Tensor, ref_logp: Tensor, old_logp: Tensor, mask: Tensor, tokens: Tensor, **options: Any
) -> Tensor:
    """Unsloth's GRPO loss at advantages of 0, per completion, with and without the KL."""
    losses = []
    for row in range(len(mask)):
        part = slice(row, row + 1)

        def loss_at(beta: float, part: slice = part) -> Tensor:
            advantages = torch.zeros(1, dtype=torch.float64)
            # Its masked mean runs in inference mode, which takes no part in the gradient.
            value: Tensor = code.grpo_compute_loss(
                ref_logp[part], logp[part], old_logp[part], None, tokens[part], mask[part], beta, advantages, **options
            )[0]
            return value

        losses.append(loss_at(1.0) - loss_at(0.0))
    return torch.stack(losses)


def prime_loss(code: Any, function: str, *, logp: Tensor, ref_logp: Tensor, old_logp: Tensor, mask: Tensor) -> Tensor:
    """prime-rl's loss of one completion after another, at advantages of 0 and a coefficient of 1."""
    # With masks this wide no token is dropped, and a tau of 0 leaves nothing of the policy loss.
    config = SimpleNamespace(dppo_mask_high=1e9, dppo_mask_low=1e9, adv_tau=0.0, kl_tau=1.0)
    losses = []
    for row in range(len(mask)):
        inputs = SimpleNamespace(
            trainer_logprobs=logp[row],
            inference_logprobs=old_logp[row],
            ref_logprobs=ref_logp[row],
            advantages=torch.zeros_like(ref_logp[row]),
            loss_mask=mask[row],
            loss_weights=None,
        )
        loss_fn = getattr(code, function)
        if function == "default_loss_fn":
            outputs = loss_fn(inputs, config)
        else:
            outputs = loss_fn(inputs)
        losses.append(outputs.loss)
    return torch.stack(losses)


def nemo_weight(logp: Tensor) -> Tensor:
    """The weight of NeMo-RL's KL by default: exp(x - x.detach()), on-policy or not."""
    return score(logp)


HELPERS: dict[str, Any] = {
    function.__name__: function
    for function in (
        k1,
        k2,
        k3,
        clamped_k3,
        ratio,
        score,
        in_reward,
        with_returns,
        plus_plus_returns,
        top_k_parts,
        our_top_k_parts,
        tail_score,
        loss_module,
        unsloth_kl,
        prime_loss,
        nemo_weight,
    )
}
"""By name, what a call of rows.yaml may use."""
