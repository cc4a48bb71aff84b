"""SkyRL: k3 in the loss by default, or in the token reward, never both."""

from __future__ import annotations

from kl_comedy.errors import UserError
from kl_comedy.lab.peers.flags import Flag
from kl_comedy.lab.peers.notes import (
    CLIPPED,
    FORWARD,
    GROUP_MEAN,
    GROUP_STD,
    K3_CLAMPED,
    NOISE,
    OLD_LOG_PROBS,
    WHITENED,
)
from kl_comedy.lab.peers.reading import Given, Meaning, System, in_loss, in_reward

CLAMPS = {"input_clamp": 20.0, "output_clamp": 10.0}
PATH = "trainer.algorithm"

FLAGS = (
    Flag(name="use_kl_loss", path=f"{PATH}.use_kl_loss", default=True, meaning="a KL term in the loss"),
    Flag(name="use_kl_in_reward", path=f"{PATH}.use_kl_in_reward", default=False, meaning="a KL cost in the reward"),
    Flag(
        name="kl_estimator_type",
        path=f"{PATH}.kl_estimator_type",
        default="k3",
        choices=("k1", "k2", "k3", "abs"),
        meaning="the estimate",
    ),
    Flag(
        name="kl_loss_coef", path=f"{PATH}.kl_loss_coef", default=0.001, meaning="the coefficient, in loss and reward"
    ),
    Flag(
        name="kl_ctrl_type",
        path=f"{PATH}.kl_ctrl.type",
        default="fixed",
        choices=("fixed", "adaptive"),
        meaning="whether the coefficient in the reward is controlled",
    ),
    Flag(
        name="advantage_estimator",
        path=f"{PATH}.advantage_estimator",
        default="grpo",
        choices=("grpo", "gae", "rloo", "reinforce++", "maxrl"),
        meaning="the advantage estimator",
    ),
    Flag(
        name="grpo_norm_by_std",
        path=f"{PATH}.grpo_norm_by_std",
        default=True,
        meaning="divide by the group's standard deviation",
    ),
)


def read(flags: Given) -> Meaning:
    if flags["use_kl_loss"] and flags["use_kl_in_reward"]:
        raise UserError(
            "skyrl: use_kl_loss and use_kl_in_reward cannot both be true (SkyRL asserts it, and "
            "use_kl_loss is on by "
            "default); add use_kl_loss=false"
        )
    beta, kind = flags["kl_loss_coef"], flags["kl_estimator_type"]
    if beta == 0 and (flags["use_kl_loss"] or flags["use_kl_in_reward"]):
        return Meaning(
            terms=(), no_ops=("kl_loss_coef is 0: the KL is only logged",), switch_on={"kl_loss_coef": 0.001}
        )
    clamps = CLAMPS if kind == "k3" else {}
    notes = [K3_CLAMPED] if clamps else []
    if flags["use_kl_in_reward"]:
        return _reward(flags, beta, kind, notes)
    if not flags["use_kl_loss"]:
        return Meaning(terms=(), switch_on={"use_kl_loss": True})
    notes += {"k1": [NOISE], "k3": [FORWARD]}.get(kind, [])
    notes.append("the mean over each completion's tokens, then over completions, whatever loss_reduction says")
    notes.append("no ratio is applied: off-policy correction weights the policy loss only")
    return Meaning(terms=(in_loss(kind, beta, **clamps),), notes=tuple(notes))


def _reward(flags: Given, beta: float, kind: str, notes: list[str]) -> Meaning:
    advantage = flags["advantage_estimator"]
    credit = "to_go" if advantage in ("gae", "reinforce++") else "total"
    term = in_reward(kind, beta, credit=credit, baseline="before", **(CLAMPS if kind == "k3" else {}))
    notes += [OLD_LOG_PROBS, CLIPPED]
    if advantage == "grpo":
        notes.append(GROUP_MEAN)
    if advantage == "grpo" and flags["grpo_norm_by_std"]:
        notes.append(GROUP_STD)
    if advantage in ("gae", "reinforce++"):
        notes.append(WHITENED)
    if advantage == "maxrl":
        notes.append("maxrl divides by the group's mean reward, and beta with it")
    if flags["kl_ctrl_type"] == "adaptive":
        notes.append(f"adaptive: the coefficient starts at {beta:g} (kl_loss_coef)")
    return Meaning(terms=(term,), notes=tuple(notes), policy_ratio="token")


SYSTEM = System(
    name="skyrl",
    title="SkyRL",
    version="0.3.0",
    source="skyrl/backends/skyrl_train/utils/ppo_utils.py::compute_approx_kl, "
    "skyrl/train/trainer.py::apply_reward_kl_penalty",
    flags=FLAGS,
    read=read,
    advice={
        "sequence": {
            "use_kl_loss": False,
            "use_kl_in_reward": True,
            "kl_estimator_type": "k1",
            "advantage_estimator": "rloo",
        },
        "off_policy": "no flag of SkyRL puts a ratio on the KL: neither the loss nor the reward is "
        "corrected on stale batches",
        "low_noise": {"use_kl_loss": True, "kl_estimator_type": "k2"},
    },
)
