"""ms-swift: ``GRPOTrainer._compute_loss_and_metrics`` on a trainer created without its constructor.

The rows' log-probs replace the model's forward pass.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace

import torch
from torch import Tensor

from kl_comedy.kl import KLTerm
from kl_comedy.kl.oracle import AlgorithmContext, Rows
from peers.case import FLOAT32, FLOAT64, Adapter, Case, Skipped, batch_by_batch, kl_part, spread
from peers.loading import Peer

PEER = Peer(
    "ms-swift",
    packages=("swift",),
    stubs=(
        "modelscope",
        "json_repair",
        "swift.dataset",
        "einops",
        "dacite",
        "msgspec",
        "trl.experimental.ppo",
    ),
    extras=(("trl", ("trl",)),),
)
MODULE = "swift.rlhf_trainers.grpo_trainer"
# ms-swift clamps the log-ratio to [-20, 20] and the value to [-10, 10].
K3 = KLTerm("k3", placement="loss", input_clamp=20.0, output_clamp=10.0)
GROUP = 2


def build() -> Adapter:
    """Each of its losses; they differ in how they average over tokens."""
    cases = [_case(name) for name in ("dapo", "bnpo", "dr_grpo", "cispo")]
    cases += [_case("dapo", level="sequence", note="GSPO's ratio does not touch the KL")]
    cases += [_case(name, mean=True) for name in ("grpo", "sapo")]
    cases += [_case("real", batch=True)]
    skipped = Skipped(
        system="swift",
        version=PEER.version,
        what="kl_in_reward",
        reason="the penalty is written inside the method that scores rollouts, with a running engine around it",
    )
    return Adapter(system="swift", version=PEER.version, cases=tuple(cases), needs=PEER.pins, skipped=(skipped,))


def _case(loss_type: str, *, level: str = "token", mean: bool = False, batch: bool = False, note: str = "") -> Case:
    def loss_at(rows: Rows, beta: float) -> Tensor:
        return _loss(rows, beta, loss_type, level)

    loss = kl_part(loss_at)
    context = None
    reduction = "token sum (theirs divided out)"
    if mean:
        context = AlgorithmContext(reduction="sequence_mean_token_mean")
        reduction = "mean over the completion's tokens"
    if batch:
        # The denominator is the batch's, so that a batch is one group, which the oracle enumerates as a whole.
        loss = batch_by_batch(loss, GROUP)
        context = AlgorithmContext(reduction="token_mean", group_size=GROUP)
        reduction = "token mean over the batch, here one group"
    name = f"swift:{loss_type}"
    if level == "sequence":
        name += "/sequence_ratio"
    return Case(
        system="swift",
        version=PEER.version,
        name=name,
        flags=f"loss_type={loss_type} importance_sampling_level={level}",
        kind="loss path",
        placement="loss",
        loss=loss,
        module=MODULE,
        function="GRPOTrainer._compute_loss_and_metrics",
        loaded=lambda: PEER.loaded(MODULE),
        ours=(K3,),
        context=context,
        reduction=reduction,
        note=note,
        group_size=GROUP if batch else 1,
        tolerance=FLOAT32 if mean or batch else FLOAT64,
    )


def _loss(rows: Rows, beta: float, loss_type: str, level: str) -> Tensor:
    """The batch's loss, multiplied by the denominator of its mean if that is a constant."""
    count, length = rows.mask_BT.shape
    trainer = object.__new__(PEER.module(MODULE).GRPOTrainer)
    accelerator = SimpleNamespace(num_processes=1, gather_for_metrics=lambda x: x)
    attributes = {
        "model": SimpleNamespace(training=True),
        "beta": beta,
        "loss_type": loss_type,
        "accelerator": accelerator,
        "importance_sampling_level": level,
        "kl_in_reward": False,
        "compute_entropy": False,
        "overlong_filter": False,
        "rollout_importance_sampling_mode": None,
        "log_rollout_offpolicy_metrics": False,
        "disable_rollout_importance_sampling": True,
        "_has_teacher": False,
        # Clipping acts on the policy loss, which kl_part subtracts.
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "args": SimpleNamespace(delta=None, gradient_accumulation_steps=1),
        "off_policy_sequence_mask_delta": None,
        "tau_pos": 1.0,
        "tau_neg": 1.05,
        "real_tau": 0.5,
        "num_generations": GROUP,
        "max_completion_length": length,
        "model_accepts_loss_kwargs": False,
        "compute_loss_func": None,
        "sdar_loss_coef": 0.0,
        "chord_sft_iterator": None,
        "current_gradient_accumulation_steps": 1,
        "_metrics": defaultdict(lambda: defaultdict(list)),
        "_get_per_token_logps_and_entropies": lambda *args, **kwargs: (rows.logp_BT, None),
    }
    # Past the trainer's own __setattr__, which would register a model's modules.
    for name, value in attributes.items():
        object.__setattr__(trainer, name, value)
    batch = SimpleNamespace(
        completion_mask=rows.mask_BT,
        truncated_mask=rows.truncated_B,
        ref_per_token_logps=rows.ref_logp_BT,
        old_per_token_logps=rows.behaviour_logp_BT,
        rollout_per_token_logps=None,
        teacher_per_token_logps=None,
        advantages=rows.reward_B[:, None].expand_as(rows.ref_logp_BT),
        # As many tokens as it is told; with 1 its mean over tokens is the sum.
        num_items_in_batch=torch.ones(()),
    )
    value, _ = trainer._compute_loss_and_metrics(trainer.model, {}, batch)
    # The others divide by num_items_in_batch, which is 1 here.
    denominators = {"grpo": count, "sapo": count, "bnpo": rows.mask_BT.sum(), "dr_grpo": count * length, "real": count}
    return spread(value * denominators.get(loss_type, 1), rows)
