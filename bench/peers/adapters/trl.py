"""TRL: ``GRPOTrainer._compute_loss`` and ``RLOOTrainer._generate_and_score_completions``.

The trainers are created without their constructors, with the attributes that these methods read. The rows'
log-probs replace the model's forward pass; the batch is one prompt token and the rows' completions.
"""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kl_comedy.kl import KLTerm
from kl_comedy.kl.oracle import AlgorithmContext, Rows
from peers.case import FLOAT32, Adapter, Case, batch_by_batch, kl_part, spread
from peers.loading import Peer

PEER = Peer("trl", packages=("trl",))
GRPO = "trl.trainer.grpo_trainer"
RLOO = "trl.trainer.rloo_trainer"
# TRL clamps neither log-ratio nor value.
K3 = KLTerm("k3", placement="loss")
RHO_K3 = KLTerm("k3", placement="loss", correction="token")
NO_CLIP = 1e9
"""A clip range that no ratio leaves."""
GROUP = 2
MODERATE = (0.3, 3.0)
"""Spreads of log-ratios (nats) small enough for ``rho k3``, whose gradient cancels at large log-ratios."""


def build() -> Adapter:
    """GRPO with each of its losses, and RLOO."""
    cases = [
        _grpo("grpo", loss_type="dapo", note="the default"),
        _grpo("grpo/no_bias_correction", loss_type="dapo", bias_correction=False),
        _grpo(
            "grpo/sequence_ratio",
            loss_type="dapo",
            level="sequence",
            note="the length-normalized ratio of the completion times the KL of each token (GSPO)",
        ),
        _grpo("grpo/sequence_ratio_no_bias_correction", loss_type="dapo", level="sequence", bias_correction=False),
        _grpo("grpo/bnpo", loss_type="bnpo"),
        _grpo("grpo/dr_grpo", loss_type="dr_grpo"),
        _grpo("grpo/cispo", loss_type="cispo"),
        _grpo("grpo/luspo", loss_type="luspo"),
        _grpo("grpo/vespo", loss_type="vespo"),
        _grpo("grpo/grpo", loss_type="grpo"),
        _grpo("grpo/sapo", loss_type="sapo"),
        _rloo("rloo", epsilon=NO_CLIP, note="clipping off"),
        _rloo("rloo/clipped", epsilon=0.2, note="the default clip of the completion's ratio at 0.2"),
        _rloo(
            "rloo/normalize_advantages",
            epsilon=NO_CLIP,
            normalize=True,
            beta=0.05,
            note="normalize_advantages: over the batch, here one group; beta 0.05",
        ),
    ]
    return Adapter(system="trl", version=PEER.version, cases=tuple(cases), needs=PEER.pins)


def _grpo(name: str, *, loss_type: str, bias_correction: bool = True, level: str = "token", note: str = "") -> Case:
    # With use_bias_correction_kl TRL multiplies k3 by the ratio, which may be the token's or the completion's.
    ours: tuple[KLTerm, ...] | None
    if not bias_correction:
        ours = (K3,)
    elif level == "token":
        ours = (RHO_K3,)
    else:
        ours = None

    reduction = "token sum (theirs divided out)"
    context = None
    if loss_type in ("grpo", "sapo"):
        reduction = "mean over the completion's tokens"
        context = AlgorithmContext(reduction="sequence_mean_token_mean")

    def loss_at(rows: Rows, beta: float) -> Tensor:
        return _grpo_loss(rows, beta, loss_type, bias_correction, level)

    flags = f"GRPO loss_type={loss_type} use_bias_correction_kl={bias_correction} importance_sampling_level={level}"
    return Case(
        system="trl",
        version=PEER.version,
        name=f"trl:{name}",
        flags=flags,
        kind="loss path",
        placement="loss",
        loss=kl_part(loss_at),
        module=GRPO,
        function="GRPOTrainer._compute_loss",
        loaded=lambda: PEER.loaded(GRPO),
        ours=ours,
        context=context,
        reduction=reduction,
        note=note,
        spreads=MODERATE if bias_correction else Case.spreads,
    )


@lru_cache(maxsize=2)
def _trainer_class(kind: str) -> Any:
    if kind == "grpo":
        return PEER.module(GRPO).GRPOTrainer
    return PEER.module(RLOO).RLOOTrainer


def _accelerator() -> SimpleNamespace:
    """What the methods ask of accelerate, in one process."""
    return SimpleNamespace(
        device=torch.device("cpu"),
        num_processes=1,
        process_index=0,
        sync_gradients=True,
        gather=lambda x: x,
        gather_for_metrics=lambda x: x,
        reduce=lambda x, reduction="sum": x,
    )


def _plain(kind: str, rows: Rows, **attributes: Any) -> Any:
    """A trainer without a model: the attributes its methods read, with the rows in place of a forward pass."""
    trainer = object.__new__(_trainer_class(kind))
    zeros_BT = torch.zeros_like(rows.ref_logp_BT)
    shared = {
        "aux_loss_enabled": False,
        "accelerator": _accelerator(),
        "model": SimpleNamespace(training=True),
        "_metrics": {"train": defaultdict(list), "eval": defaultdict(list)},
        "_get_per_token_logps_and_entropies": lambda *args, **kwargs: (rows.logp_BT, zeros_BT, None),
    }
    # Past the trainer's own __setattr__, which would register a model's modules.
    for name, value in {**shared, **attributes}.items():
        object.__setattr__(trainer, name, value)
    return trainer


def _inputs(rows: Rows) -> dict[str, Tensor]:
    """A batch as TRL's trainer prepares it: one prompt token, and the rows' completions."""
    ones_B1 = torch.ones(len(rows.group_B), 1, dtype=torch.long)
    return {
        "prompt_ids": ones_B1,
        "prompt_mask": ones_B1,
        "completion_ids": rows.mask_BT.long(),
        "completion_mask": rows.mask_BT.long(),
        "advantages": rows.reward_B,
        "old_per_token_logps": rows.behaviour_logp_BT,
        "ref_per_token_logps": rows.ref_logp_BT,
    }


def _grpo_loss(rows: Rows, beta: float, loss_type: str, bias_correction: bool, level: str) -> Tensor:
    """The batch's loss multiplied by the denominator of its mean: a sum over completions."""
    count, length = rows.mask_BT.shape
    tokens = rows.mask_BT.sum()
    args = SimpleNamespace(
        use_bias_correction_kl=bias_correction,
        delta=None,
        steps_per_generation=1,
        sapo_temperature_pos=1.0,
        sapo_temperature_neg=1.05,
        vespo_k_pos=2.0,
        vespo_lambda_pos=3.0,
        vespo_k_neg=3.0,
        vespo_lambda_neg=2.0,
    )
    trainer = _plain(
        "grpo",
        rows,
        args=args,
        beta=beta,
        loss_type=loss_type,
        importance_sampling_level=level,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        # Clipping acts on the policy loss, which kl_part subtracts.
        epsilon_low=0.2,
        epsilon_high=0.2,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        current_gradient_accumulation_steps=1,
        max_completion_length=length,
        _entropy_bonus_enabled=False,
    )
    # With 1 item the mean over the items of a batch is a sum.
    inputs = {**_inputs(rows), "num_items_in_batch": torch.ones((), dtype=torch.float64)}
    value = trainer._compute_loss(trainer.model, inputs)
    # The others divide by num_items_in_batch, which is 1 here.
    denominators = {"grpo": count, "sapo": count, "luspo": count, "bnpo": tokens, "dr_grpo": count * length}
    return spread(value * denominators.get(loss_type, 1), rows)


def _rloo(name: str, *, epsilon: float, normalize: bool = False, beta: float = 1.0, note: str = "") -> Case:
    def loss_at(rows: Rows, coefficient: float) -> Tensor:
        def rloo_loss(batch: Rows, /) -> Tensor:
            return _rloo_loss(batch, coefficient, epsilon, normalize)

        if normalize:
            # Advantages are divided by the batch's standard deviation, so that a batch is one group.
            return batch_by_batch(rloo_loss, GROUP)(rows)
        return rloo_loss(rows)

    term = KLTerm("k1", placement="reward", credit="total", baseline="before")
    context = AlgorithmContext(advantage="rloo", policy_loss="reinforce", group_size=GROUP)
    epsilon_text = "off" if epsilon == NO_CLIP else str(epsilon)
    return Case(
        system="trl",
        version=PEER.version,
        name=f"trl:{name}",
        flags=f"RLOO normalize_advantages={normalize} epsilon={epsilon_text}",
        kind="loss path",
        placement="reward",
        loss=kl_part(loss_at, beta),
        module=RLOO,
        function="RLOOTrainer._generate_and_score_completions + _compute_loss",
        loaded=lambda: PEER.loaded(RLOO),
        ours=None if normalize else (term,),
        context=context,
        # Off-policy, TRL multiplies the advantage by a ratio of the completion, which kl_comedy's reinforce has not.
        equal_in=("on_policy",),
        group_size=GROUP,
        beta=beta,
        note=note,
        tolerance=FLOAT32,
        reduction="mean over completions (theirs divided out)",
    )


def _rloo_loss(rows: Rows, beta: float, epsilon: float, normalize: bool) -> Tensor:
    """Advantages with the KL inside and the clipped loss, summed over completions.

    The same method of the trainer gives the log-probs of three passes. In the first step these are the sampler's policy
    and the reference; in the second, the policy that is trained.
    """
    count = len(rows.group_B)
    # Told apart by identity from the policy in recorded_logps.
    reference = object()
    lengths = rows.mask_BT.sum(-1).tolist()
    trainer = _plain(
        "rloo",
        rows,
        beta=beta,
        ref_model=reference,
        pad_to_multiple_of=None,
        mask_truncated_completions=False,
        args=SimpleNamespace(per_device_train_batch_size=count, gradient_checkpointing_kwargs=None, report_to=[]),
        _tokenizer=SimpleNamespace(pad_token_id=0),
        eos_token_ids=[2],
        num_generations=GROUP,
        reward_weights=torch.ones(1, dtype=torch.float64),
        reward_clip_range=None,
        normalize_advantages=normalize,
        reward_func_names=["task"],
        epsilon_low=epsilon,
        epsilon_high=epsilon,
        log_completions=False,
        _generate=lambda prompts: ([[1]] * count, [[1] * n for n in lengths], [""] * count),
        _pending_extra_logs={},
        _pending_metrics={},
        _calculate_rewards=lambda *args: rows.reward_B[:, None].clone(),
        _logs=defaultdict(lambda: defaultdict(list), {"prompt": [], "completion": [], "advantages": []}),
        processing_class=SimpleNamespace(batch_decode=lambda ids, **kwargs: [""] * len(ids)),
        tools=None,
    )
    # TRL pads to the longest completion of the batch.
    width = max(lengths)
    logps = {id(trainer.model): rows.behaviour_logp_BT[:, :width], id(reference): rows.ref_logp_BT[:, :width]}

    def recorded_logps(model: Any, *args: Any, **kwargs: Any) -> Any:
        return logps[id(model)], None, None

    object.__setattr__(trainer, "_get_per_token_logps_and_entropies", recorded_logps)
    trainer.model.is_gradient_checkpointing = False
    scored = trainer._generate_and_score_completions([{"prompt": "x"}] * count)

    current_BT = rows.logp_BT[:, :width]

    def current_logps(*args: Any, **kwargs: Any) -> Any:
        return current_BT, torch.zeros_like(current_BT), None

    object.__setattr__(trainer, "_get_per_token_logps_and_entropies", current_logps)
    # Its loss is a mean over completions.
    return spread(trainer._compute_loss(trainer.model, scored) * count, rows)
