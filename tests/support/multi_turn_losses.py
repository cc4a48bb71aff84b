"""Twenty KL losses of multi-turn training, as released trainers or their issues have them: ten right, ten wrong.

Each is written from the formula that its comment cites (file and line of the release named, or the issue), with the
KL term alone and a coefficient of 1. A completion has several turns: ``mask`` is true at the model's tokens,
``attention_mask`` also at a tool's reply between them. Labels were given before the losses were checked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kl_comedy.conformance import adapt


@dataclass(frozen=True, kw_only=True)
class Labelled:
    """A loss, what it is meant to optimize, and ``cause``: what the report must say where it does not (else empty)."""

    name: str
    loss: Callable[..., Tensor]
    claims: Mapping[str, str]
    cause: str = ""
    near_only: bool = False

    @property
    def options(self) -> dict[str, Any]:
        return {"claims": dict(self.claims), "regimes": tuple(self.claims), "near_only": self.near_only}


ON_REVERSE = {"on_policy": "token_reverse"}
ON_FORWARD = {"on_policy": "token_forward"}
REVERSE = {"on_policy": "token_reverse", "off_policy": "token_reverse"}


def k2(logp: Tensor, ref_logp: Tensor) -> Tensor:
    return 0.5 * (logp - ref_logp).square()


def k3(logp: Tensor, ref_logp: Tensor) -> Tensor:
    log_ratio = ref_logp - logp
    return log_ratio.exp() - log_ratio - 1


# --- right ------------------------------------------------------------------------------------------------------------
def trl_bnpo(logp, ref_logp, behaviour_logp, attention_mask, mask):
    """TRL 1.16.0, trainer/grpo_trainer.py:3027, 3100-3106, 3159: loss_type=bnpo, use_bias_correction_kl=True."""
    kept = attention_mask.int() * mask.int()
    per_token_kl = k3(logp, ref_logp) * torch.exp(logp - behaviour_logp)
    return (per_token_kl * kept).sum() / kept.sum().clamp(min=1.0)


def trl_dr_grpo(logp, ref_logp, attention_mask, mask):
    """TRL 1.16.0, trainer/grpo_trainer.py:3164: loss_type=dr_grpo divides by completions times a fixed length."""
    kept = attention_mask.int() * mask.int()
    per_token_kl = k3(logp, ref_logp)
    return (per_token_kl * kept).sum() / (per_token_kl.size(0) * 1024)


def verl_token_mean(log_prob, ref_log_prob, response_mask):
    """verl 0.9.1, workers/utils/losses.py:135 with core_algos.py:1170-1175: kl_loss_type=k2, token-mean."""
    loss_mask = response_mask.to(log_prob.dtype)
    total = (k2(log_prob, ref_log_prob) * loss_mask).sum()
    return total / loss_mask.sum()


def verl_seq_mean_token_sum(log_prob, ref_log_prob, response_mask):
    """verl 0.9.1, core_algos.py:2203-2213 (k3+: value of k3, gradient of k2) and 1182-1188: seq-mean-token-sum."""
    loss_mask = response_mask.to(log_prob.dtype)
    backward = k2(log_prob, ref_log_prob)
    kld = backward - backward.detach() + k3(log_prob, ref_log_prob).detach()
    seq_losses = (kld * loss_mask).sum(-1)
    has_tokens = (loss_mask.sum(-1) > 0).to(log_prob.dtype)
    return (seq_losses * has_tokens).sum() / has_tokens.sum()


def nemo_rl_token_level(curr_logprobs, reference_policy_logprobs, old_logprobs, token_mask):
    """NeMo-RL 7ea279a, algorithms/loss/loss_functions.py:480-511: k3 times a differentiated ratio, token level."""
    kl = torch.exp(curr_logprobs - old_logprobs) * k3(curr_logprobs, reference_policy_logprobs)
    mask = token_mask.to(kl.dtype)
    return (kl * mask).sum() / (mask.sum() + 1e-8)


def slime_reinforce_plus_plus(log_probs, ref_log_probs, loss_masks):
    """slime 624b824, utils/ppo_utils.py:414-440: masked costs, returns to go, a loss summed over tokens."""
    full_mask = loss_masks.to(log_probs.dtype)
    masked_kl = (log_probs - ref_log_probs).detach() * full_mask
    returns = -masked_kl.flip(-1).cumsum(-1).flip(-1)
    return -(returns * log_probs * full_mask).sum()


def areal_distillation(logprobs, teacher_logp, old_logp, loss_mask):
    """AReaL 4aef98d, trainer/ppo/actor.py:494-503: reverse KL to a teacher by a ratio on detached costs."""
    reward = teacher_logp.detach() - logprobs.detach()
    weighted = torch.exp(logprobs - old_logp) * reward * loss_mask
    return -1 * weighted.sum() / loss_mask.sum().clamp(min=1)


def swift_token_mean(per_token_logps, ref_per_token_logps, completion_mask):
    """ms-swift 4.6.0, rlhf_trainers/grpo_trainer.py:975-976, 1064 and 1124: k3, clamped, loss_type=bnpo."""
    safe_ratio = torch.clamp(ref_per_token_logps - per_token_logps, min=-20, max=20)
    per_token_kl = torch.clamp(torch.exp(safe_ratio) - safe_ratio - 1, min=-10, max=10)
    return (per_token_kl * completion_mask).sum() / completion_mask.sum().clamp(min=1.0)


def open_instruct_denominator(new_logprobs, ref_logprobs, old_logprobs, response_mask):
    """open-instruct e6c3044, model_utils.py:793-817 (estimator 3: ratio times log-ratio), grpo_fast.py:718-719.

    The denominator is a number that is given: the tokens of the whole batch.
    """
    difference = (new_logprobs - ref_logprobs).clamp(-40.0, 40.0)
    kl = torch.exp(new_logprobs - old_logprobs) * difference
    return (kl * response_mask).sum() / 4096.0


def oat_dr_grpo(new_logps, ref_logps, response_mask):
    """oat c1a074c, algorithms/ppo.py:220-224, 574-583: k3, a sum over tokens by a fixed length, mean of completions."""
    log_ratio = ref_logps - new_logps
    kl3 = torch.expm1(log_ratio) - log_ratio
    reg_loss = (kl3 * response_mask).sum(1) / 512
    return reg_loss.mean()


# --- wrong ------------------------------------------------------------------------------------------------------------
def unsloth_5673(per_token_logps, ref_per_token_logps, attention_mask):
    """unsloth #5673: the patched GRPO loss knows the completion mask alone; the environment's tokens are trained on."""
    kept = attention_mask.to(per_token_logps.dtype)
    return (k3(per_token_logps, ref_per_token_logps) * kept).sum() / kept.sum().clamp(min=1.0)


def trl_4975(per_token_logps, ref_per_token_logps, attention_mask):
    """TRL #4975: the Liger path got the completion mask in the place of completion mask times tool mask."""
    return k3(per_token_logps, ref_per_token_logps) * attention_mask


def trl_6369(per_token_logps, ref_per_token_logps, attention_mask, mask):
    """TRL #6369: the numerator leaves tokens out that the denominator counts."""
    return (k2(per_token_logps, ref_per_token_logps) * mask).sum() / attention_mask.sum().clamp(min=1)


def miles_1383(log_probs, ref_log_probs, loss_masks):
    """miles #1383, utils/ppo_utils.py: REINFORCE++ returns to go without the loss mask on the costs."""
    costs = (log_probs - ref_log_probs).detach()
    returns = -costs.flip(-1).cumsum(-1).flip(-1)
    return -(returns * log_probs * loss_masks).sum()


def rllm_512(log_prob, ref_log_prob, response_mask):
    """rLLM #512: each turn is a row of its own, and a mean of the rows' token means weights turns, not tokens."""
    mask = response_mask.to(log_prob.dtype)
    starts = mask.clone()
    starts[:, 1:] = mask[:, 1:] * (1 - mask[:, :-1])
    turn = starts.cumsum(-1) * mask
    in_turn = (turn[:, None] == torch.arange(1, mask.shape[1] + 1)[:, None]).to(mask.dtype)
    tokens = in_turn.sum(-1)
    means = (k2(log_prob, ref_log_prob)[:, None] * in_turn).sum(-1) / tokens.clamp(min=1)
    return means.sum() / (tokens > 0).sum()


def prime_rl_1525(logprobs, ref_logprobs, loss_mask):
    """prime-rl #1525: log-probs of the next token beside a loss mask of this one, so that they are one apart."""
    next_logprobs = torch.nn.functional.pad(logprobs[:, 1:], (0, 1))
    next_ref_logprobs = torch.nn.functional.pad(ref_logprobs[:, 1:], (0, 1))
    return (k2(next_logprobs, next_ref_logprobs) * loss_mask).sum()


def verl_3287(log_prob, ref_log_prob, loss_mask):
    """verl #3287: the mask of the input tokens on the log-probs of their successors drops each turn's first token."""
    before = torch.nn.functional.pad(loss_mask[:, :-1], (1, 0))
    return (k2(log_prob, ref_log_prob) * (loss_mask & before)).sum(-1)


def swift_7838(logps, ref_logps, completion_mask):
    """ms-swift #7838: without a loss mask of its own, a dialogue is trained on in its last turn alone."""
    column = torch.arange(completion_mask.shape[1])
    last = (completion_mask * column).amax(-1, keepdim=True)
    holes_before = (~completion_mask & (column < last)).cumsum(-1)
    is_last = completion_mask & (holes_before == holes_before[:, -1:])
    return (k2(logps, ref_logps) * is_last).sum() / is_last.sum()


def open_instruct_535(new_logprobs, ref_logprobs):
    """open-instruct #535: a masked mean of the policy loss, and of the KL a mean over all that is in the batch."""
    return k2(new_logprobs, ref_logprobs).mean()


def openrlhf_1252(action_log_probs, base_action_log_probs, action_mask):
    """OpenRLHF #1252: a response's length is the span from its first to its last action token, tools included."""
    mask = action_mask.to(action_log_probs.dtype)
    length = (mask * torch.arange(1, mask.shape[1] + 1)).amax(-1).clamp(min=1)
    return ((k2(action_log_probs, base_action_log_probs) * mask).sum(-1) / length).mean()


TEACHER = {"logprobs": "logp", "teacher_logp": "ref_logp", "old_logp": "behaviour_logp", "loss_mask": "mask"}
"""The teacher stands where the reference does."""

RIGHT = (
    Labelled(name="TRL bnpo, bias correction", loss=trl_bnpo, claims=REVERSE),
    Labelled(name="TRL dr_grpo, k3", loss=trl_dr_grpo, claims=ON_FORWARD),
    Labelled(name="verl token-mean, k2", loss=verl_token_mean, claims=ON_REVERSE),
    Labelled(name="verl seq-mean-token-sum, k3+", loss=verl_seq_mean_token_sum, claims=ON_REVERSE),
    Labelled(name="NeMo-RL token level, k3 with its ratio", loss=nemo_rl_token_level, claims=REVERSE),
    Labelled(
        name="slime REINFORCE++, masked costs",
        loss=slime_reinforce_plus_plus,
        claims={"on_policy": "sequence_reverse"},
    ),
    Labelled(name="AReaL distillation", loss=adapt(areal_distillation, TEACHER), claims=REVERSE),
    Labelled(name="ms-swift bnpo, clamped k3", loss=swift_token_mean, claims=ON_FORWARD, near_only=True),
    Labelled(
        name="open-instruct, ratio times log-ratio", loss=open_instruct_denominator, claims=REVERSE, near_only=True
    ),
    Labelled(name="oat dr_grpo, k3", loss=oat_dr_grpo, claims=ON_FORWARD),
)
WRONG = (
    Labelled(
        name="unsloth #5673",
        loss=unsloth_5673,
        claims=ON_REVERSE,
        cause="attention mask.*wrong direction|wrong direction.*attention mask",
    ),
    Labelled(name="TRL #4975", loss=trl_4975, claims=ON_FORWARD, cause="attention mask"),
    Labelled(name="TRL #6369", loss=trl_6369, claims=ON_REVERSE, cause="divides by the tokens of the attention mask"),
    Labelled(
        name="miles #1383",
        loss=miles_1383,
        claims={"on_policy": "sequence_reverse"},
        cause="mask: tokens .* change the loss, and the gradient of",
    ),
    Labelled(name="rLLM #512", loss=rllm_512, claims=ON_REVERSE, cause="each turn is divided by its number of tokens"),
    Labelled(name="prime-rl #1525", loss=prime_rl_1525, claims=ON_REVERSE, cause="the mask is shifted by one token"),
    Labelled(
        name="verl #3287", loss=verl_3287, claims=ON_REVERSE, cause="the first token of every turn has no gradient"
    ),
    Labelled(name="ms-swift #7838", loss=swift_7838, claims=ON_REVERSE, cause="only the last turn"),
    Labelled(
        name="open-instruct #535", loss=open_instruct_535, claims=ON_REVERSE, cause="depends on the padding|no mask"
    ),
    Labelled(
        name="OpenRLHF #1252",
        loss=openrlhf_1252,
        claims=ON_REVERSE,
        cause="each completion is divided by its number of tokens up to the last one of the mask",
    ),
)
