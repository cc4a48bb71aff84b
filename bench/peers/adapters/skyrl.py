"""SkyRL: ``compute_approx_kl`` as its worker calls it, and ``apply_reward_kl_penalty`` with its advantage
estimators.

The worker reduces the KL loss (a mean over each completion's tokens) inside a distributed training step that cannot
be called alone; only its estimator is measured.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kl_comedy.kl import KLTerm
from kl_comedy.kl.oracle import AlgorithmContext, Rows
from peers.case import FLOAT32, Adapter, Case, Skipped, in_the_sequence, kl_part, spread
from peers.loading import Peer

PEER = Peer(
    "skyrl",
    packages=("skyrl",),
    stubs=("ray", "skyrl_gym", "skyrl.tinker", "skyrl.backends.backend", "httpx"),
    extras=(("jaxtyping", ("jaxtyping",)), ("loguru", ("loguru",)), ("torchdata", ("torchdata",))),
)
UTILS = "skyrl.backends.skyrl_train.utils.ppo_utils"
TRAINER = "skyrl.train.trainer"
FORMS = {
    "k1": KLTerm("k1", placement="loss"),
    "abs": KLTerm("abs", placement="loss"),
    "k2": KLTerm("k2", placement="loss"),
    # Only k3 is clamped: its log-ratio and its value.
    "k3": KLTerm("k3", placement="loss", input_clamp=20.0, output_clamp=10.0),
}
GROUP = 2
NO_CLIP = 1e9
"""A clip range that no ratio leaves."""


def build() -> Adapter:
    """Its estimators alone, and its reward path."""
    cases = [_function(name, term) for name, term in FORMS.items()]
    cases += [_reward("k1", NO_CLIP), _reward("k1", 0.2), _reward("k3", NO_CLIP)]
    skipped = Skipped(
        system="skyrl",
        version=PEER.version,
        what="use_kl_loss inside PolicyWorker's training step",
        reason="the KL loss is written inside a distributed worker's step; its estimator is run instead",
    )
    return Adapter(system="skyrl", version=PEER.version, cases=tuple(cases), needs=PEER.pins, skipped=(skipped,))


def _function(name: str, term: KLTerm) -> Case:
    def loss(rows: Rows, /) -> Tensor:
        value_BT: Tensor = PEER.module(UTILS).compute_approx_kl(
            rows.logp_BT, rows.ref_logp_BT, loss_mask=rows.mask_BT.double(), kl_estimator_type=name
        )
        return value_BT

    return Case(
        system="skyrl",
        version=PEER.version,
        name=f"skyrl:{name}",
        flags=f"kl_estimator_type={name}",
        kind="kl function",
        placement="loss",
        loss=loss,
        module=UTILS,
        function="compute_approx_kl",
        loaded=lambda: PEER.loaded(UTILS),
        ours=(term,),
    )


def _reward(name: str, clip: float) -> Case:
    form = FORMS[name]
    term = KLTerm(
        form.estimator,
        placement="reward",
        credit="total",
        baseline="before",
        anchor="behaviour",
        input_clamp=form.input_clamp,
        output_clamp=form.output_clamp,
    )
    context = AlgorithmContext(
        advantage="rloo",
        policy_loss="ppo_clip",
        group_size=GROUP,
        policy_loss_options={"clip_low": clip, "clip_high": clip},
    )

    def loss_at(rows: Rows, beta: float) -> Tensor:
        return _in_reward(rows, beta, name, clip)

    case_name = f"skyrl:reward/rloo/{name}"
    flags = f"use_kl_in_reward=True kl_estimator_type={name} advantage_estimator=rloo"
    if clip == NO_CLIP:
        flags += " eps_clip=off"
    else:
        case_name += "/clipped"
        flags += f" eps_clip={clip}"
    return Case(
        system="skyrl",
        version=PEER.version,
        name=case_name,
        flags=flags,
        kind="loss path",
        placement="reward",
        loss=kl_part(loss_at),
        module=TRAINER,
        function="RayPPOTrainer.apply_reward_kl_penalty + compute_rloo_outcome_advantage + ppo_policy_loss",
        loaded=lambda: PEER.loaded(TRAINER),
        ours=(term,),
        context=context,
        group_size=GROUP,
        tolerance=FLOAT32,
    )


class _Batch(dict[str, Tensor]):
    """Tensors by name, with the attribute of SkyRL's own batches that the method writes."""

    def __init__(self, **tensors: Tensor) -> None:
        super().__init__(tensors)
        self.metadata: dict[str, Any] = {}


def _in_reward(rows: Rows, beta: float, name: str, clip: float) -> Tensor:
    """SkyRL's reward with the KL, its RLOO advantages and its clipped loss, summed over tokens."""
    module = PEER.module(TRAINER)
    utils = PEER.module(UTILS)
    mask_BT = rows.mask_BT.double()
    # The reward of a completion stands at its last token.
    last_B1 = in_the_sequence(rows.mask_BT).sum(-1, keepdim=True) - 1
    rewards_BT = torch.zeros_like(rows.ref_logp_BT).scatter(1, last_B1, rows.reward_B[:, None])
    # Without its constructor, which starts workers: these are the attributes that the method reads.
    trainer = object.__new__(module.RayPPOTrainer)
    algorithm = SimpleNamespace(kl_estimator_type=name, kl_loss_coef=beta)
    trainer.__dict__.update(
        cfg=SimpleNamespace(trainer=SimpleNamespace(algorithm=algorithm)), reward_kl_controller=None, all_metrics={}
    )
    batch = _Batch(
        loss_mask=mask_BT,
        base_action_log_probs=rows.ref_logp_BT,
        action_log_probs=rows.behaviour_logp_BT,
        rewards=rewards_BT,
    )
    # RLOO sees the reward with the KL inside, so that its baseline is subtracted from the KL too.
    batch = trainer.apply_reward_kl_penalty(batch)
    advantages_BT, _ = utils.compute_rloo_outcome_advantage(batch["rewards"], mask_BT, rows.group_B.numpy())
    # None turns off the corrections for samples of another policy: the clipped loss has its own ratio.
    config = SimpleNamespace(
        policy_loss_type="regular",
        eps_clip_low=clip,
        eps_clip_high=clip,
        off_policy_correction=SimpleNamespace(
            tis_ratio_type=None,
            sequence_mask_metric=None,
            outlier_token_is_threshold_low=None,
            outlier_token_is_threshold_high=None,
            token_mask_is_threshold_low=None,
            token_mask_is_threshold_high=None,
        ),
    )
    value, _ = utils.ppo_policy_loss(rows.logp_BT, rows.behaviour_logp_BT, advantages_BT, config, loss_mask=mask_BT)
    return spread(value, rows)
