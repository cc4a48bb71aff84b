"""AReaL: k1 in the token reward; without a reference, silently an entropy bonus."""

from __future__ import annotations

from kl_comedy.lab.peers.flags import Flag
from kl_comedy.lab.peers.notes import CLIPPED, OLD_LOG_PROBS
from kl_comedy.lab.peers.reading import Given, Meaning, System, in_reward

CLAMP = 10.0

FLAGS = (
    Flag(name="kl_ctl", path="actor.kl_ctl", default=0.1, meaning="the coefficient"),
    Flag(
        name="kl_estimator", path="actor.kl_estimator", default="k1", choices=("k1", "k2", "k3"), meaning="the estimate"
    ),
    Flag(
        name="ref",
        default="none",
        choices=("none", "set"),
        meaning="whether the config has a ref section (none by default)",
    ),
)


def read(flags: Given) -> Meaning:
    if flags["kl_ctl"] == 0:
        return Meaning(terms=(), switch_on={"kl_ctl": 0.1, "ref": "set"})
    if flags["ref"] == "none":
        return Meaning(
            terms=None,
            instead=(
                "there is no reference (the config has no ref section), and its log-probs are taken "
                "as 0: the cost is "
                f"{flags['kl_ctl']:g} times the estimate of log policy against 0, with k1 a reward "
                "of minus log policy for "
                "each token. That is an entropy bonus, not a KL, and nothing warns"
            ),
            notes=("set ref=set here for a config with a ref section, or kl_ctl=0 to have no such bonus",),
        )
    notes = [
        OLD_LOG_PROBS,
        CLIPPED,
        f"the cost of a token is clamped at {CLAMP:g} nats, and each token carries the costs from itself on",
    ]
    notes.append("added after reward_norm, so the group's statistics do not see it; adv_norm, where set, divides beta")
    notes.append("to go with gae_lambda=1 (the default); below, the critic stands in for the later costs")
    term = in_reward(flags["kl_estimator"], flags["kl_ctl"], credit="to_go", baseline="after", output_clamp=CLAMP)
    return Meaning(terms=(term,), notes=tuple(notes))


IN_REWARD_ONLY = (
    "no flag of AReaL does: the KL is in the reward only, from the log-probs at rollout, without a gradient of its own"
)

SYSTEM = System(
    name="areal",
    title="AReaL",
    version="1.0.4",
    source="areal/trainer/ppo/actor.py::_compute_advantages, areal/utils/data.py::KLEstimator",
    flags=FLAGS,
    read=read,
    advice={
        "sequence": {"kl_ctl": 0.1, "kl_estimator": "k1", "ref": "set"},
        "off_policy": IN_REWARD_ONLY,
        "low_noise": IN_REWARD_ONLY,
    },
)
