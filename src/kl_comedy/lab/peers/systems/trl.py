"""TRL: GRPO (k3 in the loss, times the token ratio) and RLOO (k1 in the reward)."""

from __future__ import annotations

from kl_comedy.lab.peers.flags import Flag
from kl_comedy.lab.peers.notes import CLIPPED, FORWARD, OLD_LOG_PROBS, OVERFLOWS
from kl_comedy.lab.peers.reading import Given, Meaning, System, in_loss, in_reward

RLOO_BETA = 0.05

FLAGS = (
    Flag(name="trainer", default="grpo", choices=("grpo", "rloo"), meaning="GRPOTrainer or RLOOTrainer"),
    Flag(
        name="beta",
        default=None,
        nullable=True,
        meaning="the coefficient; none is the trainer's default: grpo 0, rloo 0.05",
    ),
    Flag(name="use_bias_correction_kl", default=True, meaning="grpo: multiply the KL by the importance ratio"),
    Flag(
        name="importance_sampling_level",
        default="token",
        choices=("token", "sequence"),
        meaning="grpo: the level of that ratio",
    ),
    Flag(
        name="loss_type",
        default="dapo",
        meaning="grpo: the loss, and with it the average over tokens",
        choices=("grpo", "dapo", "bnpo", "dr_grpo", "cispo", "sapo", "vespo", "luspo"),
    ),
    Flag(name="sync_ref_model", default=False, meaning="move the reference towards the policy"),
    Flag(name="ref_model_sync_steps", default=512.0, meaning="how often it moves"),
    Flag(name="ref_model_mixup_alpha", default=0.6, meaning="how far it moves"),
    Flag(
        name="normalize_advantages", default=False, meaning="rloo: divide advantages by the batch's standard deviation"
    ),
)


def read(flags: Given) -> Meaning:
    rloo = flags["trainer"] == "rloo"
    beta = flags["beta"] if flags["beta"] is not None else RLOO_BETA if rloo else 0.0
    notes = []
    reference = "ema" if flags["sync_ref_model"] else "initial"
    if flags["sync_ref_model"]:
        notes.append(
            f"every {flags['ref_model_sync_steps']:g} steps the reference becomes "
            f"{flags['ref_model_mixup_alpha']:g} of the "
            "policy and the rest of itself, and is not kept in checkpoints"
        )
    if beta == 0:
        return Meaning(terms=(), notes=("beta is 0: no reference model is loaded",), switch_on={"beta": 0.04})
    if rloo:
        return _rloo(flags, beta, reference, notes)
    if flags["use_bias_correction_kl"] and flags["importance_sampling_level"] == "sequence":
        return Meaning(
            terms=None,
            notes=tuple(notes),
            instead=(
                "the length-normalized ratio w of the completion multiplies the k3 of each token and "
                "is differentiated: the "
                "coefficient of token t is w (1 - r_t) + w mean_u k3_u. The second part is no "
                "gradient of a KL, and the first "
                "is that of the forward one; the flag is unbiased with importance_sampling_level=token only"
            ),
        )
    correction = "token" if flags["use_bias_correction_kl"] else "none"
    notes.append(OVERFLOWS)
    notes.append(
        "the ratio is to the trainer's old log-probs; the weights for the inference engine's "
        "mismatch do not reach the KL"
    )
    if correction == "none":
        notes.append(FORWARD)
    if flags["loss_type"] == "dr_grpo":
        notes.append("dr_grpo divides by the maximal length, so beta does not depend on the lengths")
    else:
        notes.append(f"averaged over tokens as loss_type={flags['loss_type']} does, so beta depends on lengths")
    return Meaning(terms=(in_loss("k3", beta, correction=correction, reference=reference),), notes=tuple(notes))


def _rloo(flags: Given, beta: float, reference: str, notes: list[str]) -> Meaning:
    term = in_reward("k1", beta, credit="total", baseline="before", reference=reference)
    notes += [OLD_LOG_PROBS, CLIPPED, "the policy loss weights the completion by its whole ratio"]
    if flags["normalize_advantages"]:
        notes.append("normalize_advantages divides beta by the batch's standard deviation")
    unread = [
        name
        for name in ("use_bias_correction_kl", "importance_sampling_level", "loss_type")
        if flags[name] != DEFAULTS[name]
    ]
    return Meaning(
        terms=(term,),
        notes=tuple(notes),
        policy_ratio="sequence",
        no_ops=tuple(f"{name}: a flag of the GRPO trainer, RLOO has none" for name in unread),
    )


DEFAULTS = {flag.name: flag.default for flag in FLAGS}

SYSTEM = System(
    name="trl",
    title="TRL",
    version="1.16.0",
    source="trl/trainer/grpo_trainer.py::_compute_loss, trl/trainer/rloo_trainer.py::_generate_and_score_completions",
    flags=FLAGS,
    read=read,
    advice={
        "sequence": {"trainer": "rloo", "beta": 0.05},
        "off_policy": {"beta": 0.04, "use_bias_correction_kl": True, "importance_sampling_level": "token"},
        "low_noise": {"beta": 0.04, "use_bias_correction_kl": True, "importance_sampling_level": "token"},
    },
)
