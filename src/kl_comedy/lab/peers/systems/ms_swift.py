"""ms-swift: k3 in the loss with GRPO; k1 in the reward with RLOO and REINFORCE++."""

from __future__ import annotations

from kl_comedy.kl import REGIMES
from kl_comedy.lab.peers.flags import Flag
from kl_comedy.lab.peers.notes import CLIPPED, FORWARD, GROUP_MEAN, K3_CLAMPED, OLD_LOG_PROBS
from kl_comedy.lab.peers.reading import Given, Meaning, System, in_loss, in_reward

SCALES = {"grpo": "group", "rloo": "none", "reinforce_plus_plus": "batch"}

FLAGS = (
    Flag(name="beta", default=0.04, meaning="the coefficient, in loss and reward"),
    Flag(name="advantage_estimator", default="grpo", choices=tuple(SCALES), meaning="the advantage estimator"),
    Flag(
        name="kl_in_reward",
        default="auto",
        choices=("auto", "true", "false"),
        meaning="k1 in the reward instead of k3 in the loss; auto: false with grpo, true with the others",
    ),
    Flag(
        name="scale_rewards",
        default="auto",
        choices=("auto", "group", "batch", "none", "gdpo"),
        meaning="what divides the rewards; auto: group with grpo, none with rloo, batch with reinforce_plus_plus",
    ),
    Flag(
        name="importance_sampling_level",
        default="token",
        choices=("token", "sequence", "sequence_token"),
        meaning="the level of the policy loss's ratio",
    ),
)


def read(flags: Given) -> Meaning:
    beta, advantage = flags["beta"], flags["advantage_estimator"]
    if beta == 0:
        return Meaning(terms=(), switch_on={"beta": 0.04})
    scale = SCALES[advantage] if flags["scale_rewards"] == "auto" else flags["scale_rewards"]
    asked = advantage != "grpo" if flags["kl_in_reward"] == "auto" else flags["kl_in_reward"] == "true"
    if asked and scale != "gdpo":
        return _reward(flags, beta, scale)
    notes = (
        FORWARD,
        K3_CLAMPED,
        "no ratio to the old policy is applied; weights for the inference engine's mismatch, where "
        "on, do multiply the KL",
    )
    no_ops = ("kl_in_reward with scale_rewards=gdpo: ms-swift turns it off with a warning",) if asked else ()
    return Meaning(terms=(in_loss("k3", beta, input_clamp=20.0, output_clamp=10.0),), notes=notes, no_ops=no_ops)


def _reward(flags: Given, beta: float, scale: str) -> Meaning:
    notes = [OLD_LOG_PROBS, CLIPPED]
    if flags["advantage_estimator"] != "rloo":
        notes.append(GROUP_MEAN)
    if scale in ("group", "batch"):
        notes.append(f"the rewards are divided by the {scale}'s standard deviation, cost included, and beta with them")
    sequence = flags["importance_sampling_level"] != "token"
    if sequence:
        notes.append("the cost is weighted by a length-normalized ratio of the completion: no certificate off-policy")
    return Meaning(
        terms=(in_reward("k1", beta, credit="total", baseline="before"),),
        notes=tuple(notes),
        policy_ratio="token",
        holds_in=("on_policy",) if sequence else REGIMES,
    )


SYSTEM = System(
    name="ms-swift",
    title="ms-swift",
    version="4.6.0",
    source="swift/rlhf_trainers/grpo_trainer.py, swift/rl_core/advantage.py::compute_advantages, "
    "swift/arguments/rlhf_args.py",
    flags=FLAGS,
    read=read,
    advice={
        "sequence": {"beta": 0.04, "advantage_estimator": "rloo", "kl_in_reward": "true"},
        "off_policy": "no flag of ms-swift puts the policy's ratio on the KL",
        "low_noise": "no flag of ms-swift changes the estimate in the loss: it is k3, whose gradient "
        "is that of the forward KL",
    },
)
