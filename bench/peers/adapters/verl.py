"""verl: ``kl_penalty``, the actor's ``ppo_loss``, and ``apply_kl_penalty`` with its advantage estimators."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kl_comedy.kl import KLTerm
from kl_comedy.kl.oracle import AlgorithmContext, Loss, Rows
from peers.case import FLOAT32, FLOAT64, Adapter, Case, Skipped, batch_by_batch, in_the_sequence, kl_part, spread
from peers.loading import Peer

PEER = Peer(
    "verl",
    packages=("verl",),
    stubs=("ray", "orjson"),
    extras=(
        ("tensordict", ("tensordict",)),
        ("pyvers", ("pyvers",)),
        ("codetiming", ("codetiming",)),
        ("torchdata", ("torchdata",)),
    ),
)
CORE = "verl.trainer.ppo.core_algos"
LOSSES = "verl.workers.utils.losses"
TRAINER = "verl.trainer.ppo.ray_trainer"

K1 = KLTerm("k1", placement="loss")
ABS = KLTerm("abs", placement="loss")
K2 = KLTerm("k2", placement="loss")
# Only k3 is clamped: its log-ratio and its value.
K3 = KLTerm("k3", placement="loss", input_clamp=20.0, output_clamp=10.0)
PENALTIES: dict[str, KLTerm] = {
    "kl": K1,
    "k1": K1,
    "abs": ABS,
    "mse": K2,
    "k2": K2,
    "low_var_kl": K3,
    "k3": K3,
    # With "+" the value is the estimator's and the gradient k2's, whatever the estimator.
    "kl+": K2,
    "k1+": K2,
    "abs+": K2,
    "mse+": K2,
    "k2+": K2,
    "low_var_kl+": K2,
    "k3+": K2,
}
GROUP = 2
NO_CLIP = 1e9
"""A clip range that no ratio leaves."""


def build() -> Adapter:
    """Its estimators alone, in the actor's loss, and in the reward of each advantage estimator."""
    functions = [_function(name, term) for name, term in PENALTIES.items()]
    # Raises NotImplementedError in verl, and is then a row of what was not run.
    functions.append(_function("full", None))
    actor = [_actor(name, PENALTIES[name]) for name in ("low_var_kl", "k3+", "k1", "k2")]
    actor.append(_actor("low_var_kl", PENALTIES["low_var_kl"], mode="token-mean", suffix="/token-mean"))
    reward = [_reward(path) for path in REWARD_PATHS]
    skipped = Skipped(
        system="verl",
        version=PEER.version,
        what="use_kl_in_reward with a critic (GAE)",
        reason="needs a value function; with values of 0 and lambda 1 it is reinforce_plus_plus before whitening",
    )
    return Adapter(
        system="verl", version=PEER.version, cases=(*functions, *actor, *reward), skipped=(skipped,), needs=PEER.pins
    )


def _case(**fields: Any) -> Case:
    module = fields["module"]
    return Case(system="verl", version=PEER.version, loaded=lambda: PEER.loaded(module), **fields)


def _function(name: str, term: KLTerm | None) -> Case:
    def loss(rows: Rows, /) -> Tensor:
        value_BT = PEER.module(CORE).kl_penalty(rows.logp_BT, rows.ref_logp_BT, name)
        return torch.where(rows.mask_BT, value_BT, 0.0)

    return _case(
        name=f"verl:{name}",
        flags=f"kl_loss_type={name}",
        kind="kl function",
        placement="loss",
        loss=loss,
        module=CORE,
        function="kl_penalty",
        ours=None if term is None else (term,),
    )


def _actor(name: str, term: KLTerm, *, mode: str = "seq-mean-token-sum", suffix: str = "") -> Case:
    def loss_at(rows: Rows, beta: float) -> Tensor:
        return _ppo_loss(rows, beta, name, mode)

    loss: Loss = kl_part(loss_at)
    # Without a mean over tokens every row stands for itself.
    context = None
    group_size = 1
    reduction = "mean over completions (theirs divided out)"
    tolerance = FLOAT64
    if mode == "token-mean":
        # The denominator is the batch's, so that a batch is one group, which the oracle enumerates as a whole.
        loss = batch_by_batch(loss, GROUP)
        context = AlgorithmContext(reduction="token_mean", group_size=GROUP)
        group_size = GROUP
        reduction = "token mean over the batch"
        tolerance = FLOAT32
    return _case(
        name=f"verl:actor/{name}{suffix}",
        flags=f"use_kl_loss=True kl_loss_type={name} loss_agg_mode={mode}",
        kind="loss path",
        placement="loss",
        loss=loss,
        module=LOSSES,
        function="ppo_loss",
        ours=(term,),
        context=context,
        group_size=group_size,
        reduction=reduction,
        tolerance=tolerance,
    )


@dataclass(frozen=True, kw_only=True)
class RewardPath:
    """The settings of one case with the KL in the reward."""

    estimator: str
    """verl's ``adv_estimator``."""
    penalty: str
    """verl's ``kl_penalty``."""
    credit: str
    """How kl_comedy's term says which costs weight a token."""
    advantage: str | None
    """kl_comedy's advantage of the same kind; None if it has none."""
    clip: float = NO_CLIP
    beta: float = 1.0
    norm: bool = True
    """verl's ``norm_adv_by_std_in_grpo``."""
    batch: bool = False
    """Whether verl normalizes over its batch, so that a batch must be one group."""
    note: str = ""

    @property
    def name(self) -> str:
        name = f"verl:reward/{self.estimator}/{self.penalty}"
        if not self.norm:
            name += "/no_std"
        if self.clip != NO_CLIP:
            name += "/clipped"
        return name

    @property
    def flags(self) -> str:
        """As verl's command line has them."""
        flags = f"use_kl_in_reward=True kl_penalty={self.penalty} adv_estimator={self.estimator}"
        if not self.norm:
            flags += " norm_adv_by_std_in_grpo=False"
        clip = "off" if self.clip == NO_CLIP else str(self.clip)
        return f"{flags} clip_ratio={clip}"


REWARD_PATHS = (
    RewardPath(estimator="remax", penalty="kl", credit="to_go", advantage="none", note="baseline given as 0"),
    RewardPath(estimator="remax", penalty="low_var_kl", credit="to_go", advantage="none", note="baseline given as 0"),
    RewardPath(
        estimator="remax",
        penalty="k3+",
        credit="to_go",
        advantage="none",
        note="baseline 0; '+' acts on gradients only",
    ),
    RewardPath(estimator="rloo", penalty="kl", credit="total", advantage="rloo"),
    RewardPath(estimator="rloo", penalty="kl", credit="total", advantage="rloo", clip=0.2),
    RewardPath(
        estimator="grpo",
        penalty="kl",
        credit="total",
        advantage="grpo",
        beta=0.05,
        note="divided by the group's std; beta .05",
    ),
    RewardPath(
        estimator="grpo",
        penalty="kl",
        credit="total",
        advantage="dr_grpo",
        norm=False,
        note="norm_adv_by_std_in_grpo=False",
    ),
    RewardPath(
        estimator="reinforce_plus_plus",
        penalty="kl",
        credit="to_go",
        advantage=None,
        beta=0.05,
        batch=True,
        note="whitened over the batch, here one group, with the sample variance (ours: the population's); beta 0.05",
    ),
    RewardPath(
        estimator="reinforce_plus_plus_baseline",
        penalty="kl",
        credit="total",
        advantage=None,
        beta=0.05,
        batch=True,
        note="whitened over the batch, here one group; beta 0.05",
    ),
    RewardPath(
        estimator="gdpo",
        penalty="kl",
        credit="total",
        advantage=None,
        batch=True,
        note="rewards are rebuilt from their components, so the penalty is lost",
    ),
)


class _Config(SimpleNamespace):
    """A config whose fields are read as attributes and by ``get``."""

    def get(self, key: str, default: Any = None) -> Any:
        return getattr(self, key, default)


def _actor_config(clip: float, mode: str, **fields: Any) -> _Config:
    """The actor's config: the plain clipped loss without entropy bonus."""
    return _Config(
        global_batch_info={},
        loss_scale_factor=None,
        loss_agg_mode=mode,
        policy_loss=_Config(loss_mode="vanilla"),
        clip_ratio=clip,
        clip_ratio_low=clip,
        clip_ratio_high=clip,
        # The second bound of dual clipping, for negative advantages.
        clip_ratio_c=NO_CLIP,
        entropy_coeff=0.0,
        **fields,
    )


def _ppo_loss(rows: Rows, beta: float, name: str, mode: str) -> Tensor:
    """The actor's loss on a batch of one prompt token each, summed over completions."""
    count, _ = rows.mask_BT.shape
    losses = PEER.module(LOSSES)
    # At beta 0 the KL is switched off, as a user would; kl_part subtracts that loss.
    config = _actor_config(0.2, mode, use_kl_loss=beta != 0, kl_loss_type=name, kl_loss_coef=beta)
    ones_B1 = torch.ones(count, 1, dtype=torch.long)
    data = losses.tu.get_tensordict(
        {
            "prompts": ones_B1,
            "responses": rows.mask_BT.long(),
            "attention_mask": torch.cat([ones_B1, rows.mask_BT.long()], 1),
            "response_mask": rows.mask_BT,
            "old_log_probs": rows.behaviour_logp_BT,
            "ref_log_prob": rows.ref_logp_BT,
            "advantages": rows.reward_B[:, None].expand_as(rows.ref_logp_BT).contiguous(),
        },
        {"dp_size": 1, "batch_num_tokens": None, "global_batch_size": None},
    )
    # Flat log-probs have one entry per input token, for the next token; the last entry of each row is unused.
    flat_logps = []
    for logp_T, mask_T in zip(rows.logp_BT, rows.mask_BT, strict=True):
        flat_logps += [logp_T[mask_T], logp_T.new_zeros(1)]
    value, _ = losses.ppo_loss(config, {"log_probs": torch.cat(flat_logps)}, data)
    return spread(value * count, rows)


def _reward(path: RewardPath) -> Case:
    # In a reward only the value counts, which "+" does not change.
    form = PENALTIES[path.penalty.rstrip("+")]
    term = KLTerm(
        form.estimator,
        placement="reward",
        credit=path.credit,
        baseline="before",
        anchor="behaviour",
        input_clamp=form.input_clamp,
        output_clamp=form.output_clamp,
    )
    ours = None
    context = None
    if path.advantage is not None:
        ours = (term,)
        context = AlgorithmContext(
            advantage=path.advantage,
            policy_loss="ppo_clip",
            group_size=GROUP,
            policy_loss_options={"clip_low": path.clip, "clip_high": path.clip},
        )

    def loss_at(rows: Rows, coefficient: float) -> Tensor:
        return _in_reward(rows, coefficient, path)

    def kl_loss(rows: Rows, /) -> Tensor:
        return kl_part(loss_at, path.beta)(rows)

    return _case(
        name=path.name,
        flags=path.flags,
        kind="loss path",
        placement="reward",
        loss=batch_by_batch(kl_loss, GROUP) if path.batch else kl_loss,
        module=TRAINER,
        function="apply_kl_penalty + compute_advantage + compute_policy_loss_vanilla",
        ours=ours,
        context=context,
        group_size=GROUP,
        beta=path.beta,
        note=path.note,
        reduction="mean over completions (theirs divided out)",
    )


def _in_reward(rows: Rows, beta: float, path: RewardPath) -> Tensor:
    """Rewards, the penalty, advantages, and the clipped loss of the old log-probs' policy, summed."""
    trainer = PEER.module(TRAINER)
    core = PEER.module(CORE)
    count, _ = rows.mask_BT.shape
    mask_BT = rows.mask_BT.to(torch.float64)
    # The reward of a completion stands at its last token.
    inside_BT = in_the_sequence(rows.mask_BT)
    last_B1 = inside_BT.sum(-1, keepdim=True) - 1
    scores_BT = torch.zeros_like(rows.ref_logp_BT).scatter(1, last_B1, rows.reward_B[:, None])
    ones_B1 = torch.ones(count, 1, dtype=torch.long)
    data = trainer.DataProto.from_dict(
        tensors={
            "response_mask": mask_BT,
            "token_level_scores": scores_BT,
            "old_log_probs": rows.behaviour_logp_BT,
            "ref_log_prob": rows.ref_logp_BT,
            "reward_baselines": torch.zeros(count, dtype=torch.float64),
            "prompts": ones_B1,
            "attention_mask": torch.cat([ones_B1, inside_BT.long()], 1),
        },
        # verl finds a group by the uid of its rows.
        non_tensors={"uid": rows.group_B.numpy().astype(object), "task": rows.reward_B.numpy().astype(object)},
    )
    # In verl's order: first the penalty, then the advantages of the rewards with the penalty inside.
    data, _ = trainer.apply_kl_penalty(data, core.FixedKLController(beta), kl_penalty=path.penalty)
    config = _Config(gamma=1.0, gdpo_reward_keys=["task"], gdpo_reward_weights=None)
    advantage_estimator = core.AdvantageEstimator(path.estimator)
    data = trainer.compute_advantage(
        data, advantage_estimator, norm_adv_by_std_in_grpo=path.norm, num_repeat=GROUP, config=config
    )
    value, _ = core.compute_policy_loss_vanilla(
        old_log_prob=rows.behaviour_logp_BT,
        log_prob=rows.logp_BT,
        advantages=data.batch["advantages"],
        response_mask=mask_BT,
        loss_agg_mode="seq-mean-token-sum",
        config=_actor_config(path.clip, "seq-mean-token-sum"),
    )
    assert isinstance(data.non_tensor_batch["uid"], np.ndarray)
    return spread(value * count, rows)
