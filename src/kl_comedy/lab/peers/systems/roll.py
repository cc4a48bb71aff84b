"""ROLL: a token-level cost that is off by default, and k3 (hard-coded) in the loss."""

from __future__ import annotations

from kl_comedy.kl import KLTerm
from kl_comedy.lab.peers.flags import Flag
from kl_comedy.lab.peers.notes import CLIPPED, FORWARD, OLD_LOG_PROBS
from kl_comedy.lab.peers.reading import Given, Meaning, System, in_loss, in_reward

ESTIMATORS = {"kl": "k1", "abs": "abs", "mse": "k2"}

FLAGS = (
    Flag(name="use_kl_loss", default=False, meaning="k3 in the loss"),
    Flag(name="kl_loss_coef", default=0.0, meaning="its coefficient"),
    Flag(name="add_token_level_kl", default=False, meaning="a KL cost in the token reward"),
    Flag(name="init_kl_coef", default=0.2, meaning="its coefficient"),
    Flag(name="kl_penalty", default="kl", choices=(*ESTIMATORS, "full"), meaning="its estimate"),
    Flag(name="target_kl", default=None, nullable=True, meaning="adapt the coefficient in the reward to this KL"),
    Flag(
        name="adv_estimator",
        default="gae",
        choices=("gae", "reinforce", "grpo", "gigpo", "step_reinforce"),
        meaning="the advantage estimator",
    ),
    Flag(name="lambd", default=0.95, meaning="lambda of gae"),
)


def read(flags: Given) -> Meaning:
    terms: list[KLTerm] = []
    notes: list[str] = []
    no_ops: list[str] = []
    if flags["add_token_level_kl"] and flags["init_kl_coef"] > 0:
        if flags["kl_penalty"] == "full":
            return Meaning(
                terms=None,
                instead=(
                    "kl_penalty=full sums a divergence over the last axis of what it is given, and "
                    "it is given the log-probs of "
                    "sampled tokens: the last axis is time. Every token gets one and the same "
                    "number, sum_u (ref/policy-weighted "
                    "differences), which is no KL per token"
                ),
            )
        _reward(flags, terms, notes)
    else:
        no_ops.append("init_kl_coef: add_token_level_kl is off, so the KL is measured and added nowhere")
    if flags["use_kl_loss"] and flags["kl_loss_coef"] > 0:
        terms.append(in_loss("k3", flags["kl_loss_coef"], output_clamp=10.0))
        notes += [
            FORWARD,
            "the loss is k3 whatever kl_penalty says; its value is clamped at 10, without gradient beyond",
        ]
        notes.append("no ratio is applied to the KL in the loss")
    elif flags["use_kl_loss"]:
        no_ops.append("use_kl_loss: kl_loss_coef is 0 by default")
    coefficient = {} if flags["init_kl_coef"] > 0 else {"init_kl_coef": 0.2}
    switch = {} if terms else {"add_token_level_kl": True, **coefficient}
    return Meaning(terms=tuple(terms), notes=tuple(notes), no_ops=tuple(no_ops), switch_on=switch, policy_ratio="token")


def _reward(flags: Given, terms: list[KLTerm], notes: list[str]) -> None:
    gae = flags["adv_estimator"] == "gae"
    baseline = "before" if gae else "after"
    terms.append(in_reward(ESTIMATORS[flags["kl_penalty"]], flags["init_kl_coef"], credit="to_go", baseline=baseline))
    notes += [OLD_LOG_PROBS, CLIPPED]
    if gae and flags["lambd"] != 1:
        notes.append(f"lambd={flags['lambd']:g}: later costs are discounted, and the critic stands in for the rest")
    if not gae:
        notes.append(
            "added after the group's normalization of the task reward, so it has no baseline and beta is not divided"
        )
    if flags["target_kl"] is not None:
        notes.append(
            f"adaptive: the coefficient starts at {flags['init_kl_coef']:g} and holds "
            f"{flags['target_kl']:g} nats a token"
        )


NO_RATIO = "no flag of ROLL puts a ratio on the KL, and the loss is k3 without choice"

SYSTEM = System(
    name="roll",
    title="ROLL",
    version="8eb27cc (2026-08-19)",
    source="roll/utils/functionals.py::compute_approx_kl, compute_token_reward, roll/pipeline/base_worker.py",
    flags=FLAGS,
    read=read,
    advice={
        "sequence": {"add_token_level_kl": True, "init_kl_coef": 0.2, "kl_penalty": "kl", "adv_estimator": "reinforce"},
        "off_policy": NO_RATIO,
        "low_noise": NO_RATIO + ": its gradient is that of the forward KL",
    },
)
