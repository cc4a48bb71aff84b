"""oat: k1 in the reward, k3 in the loss, each with its own coefficient."""

from __future__ import annotations

from kl_comedy.kl import KLTerm
from kl_comedy.lab.peers.flags import Flag
from kl_comedy.lab.peers.notes import CLIPPED, FORWARD, GROUP_MEAN, GROUP_STD, OLD_LOG_PROBS
from kl_comedy.lab.peers.reading import Given, Meaning, System, in_loss, in_reward

FLAGS = (
    Flag(name="beta", default=0.1, meaning="the coefficient of k3 in the loss"),
    Flag(name="kl_penalty_coef", default=0.0, meaning="the coefficient of k1 in the reward"),
    Flag(name="critic_type", default="drgrpo", choices=("ppo", "grpo", "drgrpo"), meaning="the advantage estimator"),
)


def read(flags: Given) -> Meaning:
    critic = flags["critic_type"]
    terms: list[KLTerm] = []
    notes: list[str] = []
    if flags["kl_penalty_coef"] > 0:
        credit = "to_go" if critic == "ppo" else "total"
        terms.append(in_reward("k1", flags["kl_penalty_coef"], credit=credit, baseline="before"))
        notes += [OLD_LOG_PROBS, CLIPPED]
        if critic != "ppo":
            notes.append(GROUP_MEAN)
        if critic == "grpo":
            notes.append(GROUP_STD)
    if flags["beta"] > 0:
        terms.append(in_loss("k3", flags["beta"], input_clamp=40.0))
        notes += [FORWARD, "the log-ratio is clamped at 40, far out of reach; no ratio is applied"]
        if critic == "drgrpo":
            notes.append("drgrpo divides by the maximal length, so beta does not depend on the lengths")
        else:
            notes.append("the mean over each completion's tokens, so beta depends on lengths")
    switch = {} if terms else {"beta": 0.1}
    return Meaning(terms=tuple(terms), notes=tuple(notes), switch_on=switch, policy_ratio="token")


SYSTEM = System(
    name="oat",
    title="oat",
    version="c1a074c (2025-10-31)",
    source="oat/algorithms/ppo.py::learning_step, oat/args.py",
    flags=FLAGS,
    read=read,
    advice={
        "sequence": {"beta": 0.0, "kl_penalty_coef": 0.05, "critic_type": "drgrpo"},
        "off_policy": "no flag of oat puts a ratio on the KL: k3 in the loss is plain, and the cost "
        "in the reward is frozen at rollout",
        "low_noise": "no flag of oat changes the estimate in the loss: it is k3, whose gradient is "
        "that of the forward KL",
    },
)
