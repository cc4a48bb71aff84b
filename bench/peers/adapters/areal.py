"""AReaL: ``KLEstimator``, and ``PPOActor._compute_advantages`` with its PPO loss.

Batches contain one prompt token and the completion. As in AReaL's engines, log-probs of the sampler are at the index
of their token, those of the reference one index earlier.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from kl_comedy.kl import KLTerm
from kl_comedy.kl.oracle import AlgorithmContext, Rows
from peers.case import FLOAT32, Adapter, Case, in_the_sequence, kl_part, spread
from peers.loading import Peer

PEER = Peer(
    "areal",
    packages=("areal",),
    stubs=(
        "aiofiles",
        "einops",
        "httpx",
        "hydra",
        "lark",
        "numba",
        "openai",
        "orjson",
        "pybase64",
        "ray",
        "swanlab",
        "tenacity",
        "tensorboardX",
        "trackio",
        "uvloop",
        "wandb",
    ),
    extras=(("colorlog", ("colorlog",)), ("torchdata", ("torchdata",))),
)
DATA = "areal.utils.data"
ACTOR = "areal.trainer.ppo.actor"
LOSS = "areal.utils.functional.functional"
# AReaL clamps estimates to [-10, 10].
FORMS = {name: KLTerm(name, placement="loss", output_clamp=10.0) for name in ("k1", "k2", "k3")}
NO_CLIP = 1e9
"""A clip range that no ratio leaves."""


def build() -> Adapter:
    """Its estimators alone, and its reward path."""
    cases = [_function(name, term) for name, term in FORMS.items()]
    cases += [_reward(name, NO_CLIP) for name in FORMS]
    # With AReaL's own clip range, and as it runs without a reference model.
    cases += [_reward("k1", 0.2), _reward("k1", NO_CLIP, reference=False)]
    return Adapter(system="areal", version=PEER.version, cases=tuple(cases), needs=PEER.pins)


def _function(name: str, term: KLTerm) -> Case:
    def loss(rows: Rows, /) -> Tensor:
        value_BT = PEER.module(DATA).KLEstimator(name)(rows.logp_BT, rows.ref_logp_BT)
        return torch.where(rows.mask_BT, value_BT.double(), 0.0)

    return Case(
        system="areal",
        version=PEER.version,
        name=f"areal:{name}",
        flags=f"kl_estimator={name}",
        kind="kl function",
        placement="loss",
        loss=loss,
        module=DATA,
        function="KLEstimator",
        loaded=lambda: PEER.loaded(DATA),
        ours=(term,),
        tolerance=FLOAT32,
        note="AReaL itself uses it in rewards only",
        spreads=(0.3, 3.0),
    )


def _reward(name: str, clip: float, *, reference: bool = True) -> Case:
    term = KLTerm(name, placement="reward", credit="to_go", baseline="before", anchor="behaviour", output_clamp=10.0)
    context = AlgorithmContext(policy_loss="ppo_clip", policy_loss_options={"clip_low": clip, "clip_high": clip})

    def loss_at(rows: Rows, beta: float) -> Tensor:
        return _in_reward(rows, beta, name, clip, reference)

    case_name = f"areal:reward/{name}"
    flags = f"kl_ctl>0 kl_estimator={name}"
    if clip == NO_CLIP:
        flags += " eps_clip=off"
    else:
        case_name += "/clipped"
        flags += f" eps_clip={clip}"
    note = ""
    if not reference:
        case_name += "/no_reference"
        flags += " ref=None"
        note = "without a reference its log-probs count as 0: the penalty is an entropy bonus"
    return Case(
        system="areal",
        version=PEER.version,
        name=case_name,
        flags=flags,
        kind="loss path",
        placement="reward",
        loss=kl_part(loss_at),
        module=ACTOR,
        function="PPOActor._compute_advantages + ppo_actor_loss_fn",
        loaded=lambda: PEER.loaded(ACTOR),
        ours=(term,) if reference else None,
        context=context,
        tolerance=FLOAT32,
        note=note,
        reduction="token mean (theirs divided out)",
    )


def _in_reward(rows: Rows, beta: float, name: str, clip: float, reference: bool) -> Tensor:
    """AReaL's advantages with the KL inside, and its clipped loss, summed over tokens. S is T and one prompt token."""
    module = PEER.module(ACTOR)
    losses = PEER.module(LOSS)
    # The prompt token's column: outside the loss, and one place for the shift between the two kinds of log-probs.
    count, _ = rows.mask_BT.shape
    column_B1 = torch.zeros(count, 1, dtype=torch.float64)
    mask_BS = torch.cat([column_B1, rows.mask_BT.double()], 1)
    inside_BT = in_the_sequence(rows.mask_BT).long()
    attention_BS = torch.cat([torch.ones(count, 1, dtype=torch.long), inside_BT], 1)
    data = {
        "input_ids": attention_BS.clone(),
        "attention_mask": attention_BS,
        "rewards": rows.reward_B.clone(),
        "loss_mask": mask_BS,
        "logprobs": torch.cat([column_B1, rows.behaviour_logp_BT], 1),
    }
    if reference:
        data["ref_logp"] = torch.cat([rows.ref_logp_BT, column_B1], 1)
    # Without its constructor, which starts engines: these are the attributes that the method reads.
    actor = object.__new__(module.PPOActor)
    actor.__dict__.update(
        config=SimpleNamespace(overlong_reward_penalty=False, use_decoupled_loss=False, recompute_logprob=False),
        reward_bias=0.0,
        reward_scaling=1.0,
        reward_clip=1e9,
        reward_norm=None,
        adv_norm=None,
        kl_ctl=beta,
        kl_estimator=PEER.module(DATA).KLEstimator(name),
        discount=1.0,
        gae_lambda=1.0,
        mask_no_eos_with_zero=False,
    )
    data = actor._compute_advantages(data)
    # AReaL shifts it, with the log-probs, to the position that predicts a token.
    mask_BS = data["loss_mask"].bool()
    value, _ = losses.ppo_actor_loss_fn(
        logprobs=torch.cat([rows.logp_BT, column_B1], 1),
        proximal_logprobs=data["prox_logp"],
        old_logprobs=data["logprobs"],
        advantages=data["advantages"],
        eps_clip=clip,
        loss_mask=mask_BS,
    )
    # Its loss is the mean over tokens.
    return spread(value.double() * mask_BS.sum(), rows)
