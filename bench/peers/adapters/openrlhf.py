"""OpenRLHF: ``compute_approx_kl``, the actor's ``training_step``, and the experience maker's reward path.

Its KL code computes in float32. In ``training_step`` the rows' log-probs replace the actor's
forward pass, and the loss is recorded where it is passed to backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kl_comedy.kl import KLTerm
from kl_comedy.kl.oracle import AlgorithmContext, Rows
from peers.case import FLOAT32, Adapter, Case, batch_by_batch, kl_part, spread
from peers.loading import Peer

PEER = Peer(
    "openrlhf",
    packages=("openrlhf",),
    stubs=("deepspeed", "flash_attn", "ray", "vllm", "pylatexenc"),
    extras=(("torchdata", ("torchdata",)),),
)
UTILS = "openrlhf.models.utils"
ACTOR = "openrlhf.trainer.ray.ppo_actor"
MAKER = "openrlhf.trainer.ppo_utils.experience_maker"
LOSS = "openrlhf.models.loss"

# Its estimates are clamped to [-10, 10].
FORMS = {name: KLTerm(name, placement="loss", output_clamp=10.0) for name in ("k1", "k2", "k3")}
UNBIASED = KLTerm("k2", placement="loss", correction="token_detached", cap=10.0)
"""With unbiased_gradient the value is the estimator's and the gradient this term's, whatever the estimator."""
GROUP = 2
NO_CLIP = 1e9
"""A clip range that no ratio leaves."""


@dataclass(frozen=True, kw_only=True)
class RewardPath:
    """The settings of one case with the KL in the reward."""

    estimator: str
    """OpenRLHF's ``advantage.estimator``."""
    kl: str
    """OpenRLHF's ``kl.estimator``."""
    clip: float = NO_CLIP
    beta: float = 1.0
    batch: bool = False
    """Whether OpenRLHF normalizes over its batch, so that a batch must be one group."""
    std: bool = True
    """Whether that divides by the standard deviation; False is ``no_std_norm``."""
    note: str = ""

    @property
    def name(self) -> str:
        name = f"openrlhf:reward/{self.estimator}/{self.kl}"
        if self.clip != NO_CLIP:
            name += "/clipped"
        if not self.std:
            name += "/no_std_norm"
        return name

    @property
    def flags(self) -> str:
        """As OpenRLHF's command line has them."""
        clip = "off" if self.clip == NO_CLIP else str(self.clip)
        flags = f"kl.estimator={self.kl} advantage.estimator={self.estimator} eps_clip={clip}"
        if not self.std:
            flags += " no_std_norm=True"
        return flags


REWARD_PATHS = (
    RewardPath(estimator="rloo", kl="k1"),
    RewardPath(estimator="rloo", kl="k1", clip=0.2),
    RewardPath(estimator="rloo", kl="k2"),
    RewardPath(estimator="rloo", kl="k3"),
    RewardPath(estimator="group_norm", kl="k1", note="the KL enters after the group's std: not divided by it"),
    RewardPath(estimator="dr_grpo", kl="k1"),
    RewardPath(
        estimator="reinforce",
        kl="k1",
        batch=True,
        beta=0.05,
        note="normalized over the batch with the KL inside, here one group; beta 0.05",
    ),
    RewardPath(
        estimator="reinforce_baseline",
        kl="k1",
        batch=True,
        beta=0.05,
        note="normalized over the batch with the KL inside, here one group; beta 0.05",
    ),
    RewardPath(
        estimator="reinforce_baseline",
        kl="k1",
        batch=True,
        std=False,
        note="no_std_norm: less the batch's token mean, here one group's",
    ),
)


def build() -> Adapter:
    """Its estimators alone, in the actor's loss, and in the reward of each advantage estimator."""
    cases = [_function(name, unbiased=False) for name in FORMS]
    cases += [_function(name, unbiased=True) for name in FORMS]
    cases += [_actor(name, unbiased=False) for name in FORMS]
    cases += [_actor(name, unbiased=True) for name in FORMS]
    cases += [_reward(path) for path in REWARD_PATHS]
    return Adapter(system="openrlhf", version=PEER.version, cases=tuple(cases), needs=PEER.pins)


def _case(**fields: Any) -> Case:
    module = fields["module"]
    return Case(
        system="openrlhf", version=PEER.version, tolerance=FLOAT32, loaded=lambda: PEER.loaded(module), **fields
    )


def _form(name: str, unbiased: bool) -> KLTerm:
    """The term with the same gradient."""
    return UNBIASED if unbiased else FORMS[name]


def _function(name: str, *, unbiased: bool) -> Case:
    def loss(rows: Rows, /) -> Tensor:
        value_BT = PEER.module(UTILS).compute_approx_kl(
            rows.logp_BT, rows.ref_logp_BT, rows.behaviour_logp_BT, kl_estimator=name, unbiased_gradient=unbiased
        )
        return torch.where(rows.mask_BT, value_BT.double(), 0.0)

    suffix = "/unbiased_gradient" if unbiased else ""
    return _case(
        name=f"openrlhf:{name}{suffix}",
        flags=f"kl.estimator={name} kl.unbiased_gradient={unbiased}",
        kind="kl function",
        placement="loss",
        loss=loss,
        module=UTILS,
        function="compute_approx_kl",
        ours=(_form(name, unbiased),),
    )


def _actor(name: str, *, unbiased: bool) -> Case:
    def loss_at(rows: Rows, beta: float) -> Tensor:
        return _training_step(rows, beta, name, unbiased)

    suffix = "/unbiased_gradient" if unbiased else ""
    return _case(
        name=f"openrlhf:actor/{name}{suffix}",
        flags=f"kl.use_loss=True kl.estimator={name} kl.unbiased_gradient={unbiased}",
        kind="loss path",
        placement="loss",
        loss=kl_part(loss_at),
        module=ACTOR,
        function="ActorPPOTrainer.training_step",
        ours=(_form(name, unbiased),),
        reduction="token mean (theirs divided out)",
    )


def _training_step(rows: Rows, beta: float, name: str, unbiased: bool) -> Tensor:
    """The loss that ``training_step`` passes to backward, with ``rows`` in place of a model's forward pass."""
    module = PEER.module(ACTOR)
    losses = PEER.module(LOSS)
    losses_backpropagated: list[Tensor] = []
    # Of OpenRLHF's arguments, those that training_step reads.
    kl = SimpleNamespace(use_loss=True, init_coef=1.0, estimator=name, unbiased_gradient=unbiased)
    args = SimpleNamespace(
        algo=SimpleNamespace(kl=kl),
        actor=SimpleNamespace(entropy_coef=None),
        train=SimpleNamespace(dynamic_batch_enable=False),
    )

    class _Actor:
        is_vlm = False

        def train(self) -> None: ...

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return rows.logp_BT, SimpleNamespace(aux_loss=None)

    strategy = SimpleNamespace(
        ring_attn_group=None,
        backward=lambda loss, *_: losses_backpropagated.append(loss),
        optimizer_step=lambda *_, **__: None,
    )
    # Without its constructor, which sets up distributed training.
    trainer = object.__new__(module.ActorPPOTrainer)
    trainer.__dict__.update(
        actor=_Actor(),
        strategy=strategy,
        args=args,
        actor_loss_fn=losses.PolicyLoss(),
        aux_loss=False,
        actor_optim=None,
        actor_scheduler=None,
        replay_buffer=None,
        ema_model=None,
    )
    experience = SimpleNamespace(
        sequences=rows.mask_BT.long(),
        action_mask=rows.mask_BT,
        attention_mask=rows.mask_BT,
        action_log_probs=rows.behaviour_logp_BT,
        base_action_log_probs=rows.ref_logp_BT,
        rollout_log_probs=None,
        advantages=rows.reward_B[:, None].expand_as(rows.ref_logp_BT),
        info={},
    )
    # OpenRLHF divides the sum over tokens by these numbers: 1 gives the sum.
    denominators = {"dp_size": 1, "batch_num_tokens": 1.0, "global_batch_size": 1.0}
    try:
        trainer.training_step(experience, beta, 0, denominators)
    except Exception:
        # What follows the backward pass only logs, and reads attributes that this trainer has not.
        if not losses_backpropagated:
            raise
    return spread(losses_backpropagated[0].double(), rows)


def _reward(path: RewardPath) -> Case:
    term = KLTerm(path.kl, placement="reward", credit="to_go", baseline="before", anchor="behaviour", output_clamp=10.0)
    # kl_comedy has no advantage with OpenRLHF's baseline, and is compared without a clip only.
    ours: tuple[KLTerm, ...] | None = (term,)
    if path.estimator == "reinforce_baseline" or path.clip != NO_CLIP:
        ours = None
    context = AlgorithmContext(
        # The others add the KL after the group's baseline and scale, so that it has neither.
        advantage="reinforce_pp" if path.estimator == "reinforce" else "none",
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
        module=MAKER,
        function="RemoteExperienceMaker.compute_advantages_and_returns + PolicyLoss",
        ours=ours,
        context=context,
        group_size=GROUP,
        beta=path.beta,
        note=path.note,
        reduction="token mean (theirs divided out)",
    )


def _in_reward(rows: Rows, beta: float, path: RewardPath) -> Tensor:
    """The experience maker's advantages with the KL inside, and the clipped loss, summed over tokens."""
    module = PEER.module(MAKER)
    utils = PEER.module(UTILS)
    losses = PEER.module(LOSS)
    count = len(rows.group_B)
    args = SimpleNamespace(
        algo=SimpleNamespace(
            advantage=SimpleNamespace(estimator=path.estimator, gamma=1.0, lambd=1.0, no_std_norm=not path.std),
            kl=SimpleNamespace(use_loss=False, estimator=path.kl),
        ),
        rollout=SimpleNamespace(n_samples_per_prompt=GROUP),
        reward=SimpleNamespace(clip_range=None, overlong_buffer_len=None, stop_properly_penalty_coef=None),
    )
    # Without its constructor, which wants remote workers.
    maker = object.__new__(module.RemoteExperienceMaker)
    maker.__dict__.update(
        strategy=SimpleNamespace(args=args),
        args=args,
        advantage_estimator=path.estimator,
        kl_ctl=SimpleNamespace(value=beta),
    )
    experience = module.Experience(
        action_mask=rows.mask_BT,
        rewards=rows.reward_B.clone(),
        index=list(range(count)),
        # At the sampler's log-probs, as in the experience maker: a cost, and no function of the policy.
        kl=utils.compute_approx_kl(rows.behaviour_logp_BT, rows.ref_logp_BT, kl_estimator=path.kl),
    )
    (experience,) = maker.compute_advantages_and_returns([experience])
    policy = losses.PolicyLoss(clip_eps_low=path.clip, clip_eps_high=path.clip)
    value, *_ = policy(
        rows.logp_BT, rows.behaviour_logp_BT, experience.advantages, action_mask=rows.mask_BT, batch_num_tokens=1.0
    )
    return spread(value.double(), rows)
