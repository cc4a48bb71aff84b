"""Trinity-RFT: a registry of KL functions, one for the reward and one for the loss."""

from __future__ import annotations

from kl_comedy.kl import KLTerm
from kl_comedy.lab.peers.flags import Flag
from kl_comedy.lab.peers.notes import (
    CLIPPED,
    FORWARD,
    GROUP_MEAN,
    GROUP_STD,
    K3_CLAMPED,
    NOISE,
    OLD_LOG_PROBS,
    OVERFLOWS,
    WHITENED,
)
from kl_comedy.lab.peers.reading import Given, Meaning, System, in_loss, in_reward

FUNCTIONS = ("none", "k1", "k2", "k3", "low_var_kl", "abs", "corrected_k3")
CLAMPS = {"input_clamp": 20.0, "output_clamp": 10.0}
RATIO_CAP = 2.0
IN_TRAINER = {"ppo": "to_go", "reinforceplusplus": "to_go", "rloo": "total", "grpo_verl": "total"}
"""The algorithms whose advantages are computed in the trainer, where the reward's KL is applied, with its credit."""

FLAGS = (
    Flag(
        name="algorithm_type",
        path="algorithm.algorithm_type",
        default="ppo",
        choices=(*IN_TRAINER, "grpo", "gspo", "cispo"),
        meaning="the algorithm",
    ),
    Flag(
        name="kl_loss_fn",
        path="algorithm.kl_loss_fn",
        default="k2",
        choices=FUNCTIONS,
        meaning="the estimate in the loss",
    ),
    Flag(name="kl_loss_coef", path="algorithm.kl_loss_fn_args.kl_coef", default=0.001, meaning="its coefficient"),
    Flag(
        name="kl_penalty_fn",
        path="algorithm.kl_penalty_fn",
        default="none",
        choices=FUNCTIONS,
        meaning="the estimate in the reward",
    ),
    Flag(name="kl_penalty_coef", path="algorithm.kl_penalty_fn_args.kl_coef", default=0.001, meaning="its coefficient"),
)


def read(flags: Given) -> Meaning:
    terms: list[KLTerm] = []
    notes: list[str] = []
    no_ops: list[str] = []
    if flags["kl_penalty_fn"] != "none" and flags["kl_penalty_coef"] > 0:
        _reward(flags, terms, notes, no_ops)
    if flags["kl_loss_fn"] != "none" and flags["kl_loss_coef"] > 0:
        terms.append(_loss(flags["kl_loss_fn"], flags["kl_loss_coef"], notes))
    switch = {} if terms else {"kl_loss_fn": "k2", "kl_loss_coef": 0.001}
    return Meaning(terms=tuple(terms), notes=tuple(notes), no_ops=tuple(no_ops), switch_on=switch, policy_ratio="token")


def _loss(kind: str, beta: float, notes: list[str]) -> KLTerm:
    if kind == "corrected_k3":
        notes.append(
            f"the ratio is clamped at {RATIO_CAP:g} and differentiated: beyond, its gradient is "
            "gone, and the gradient of a plain k3 is left"
        )
        return in_loss("k3", beta, correction="token", cap=RATIO_CAP)
    notes += {"k1": [NOISE], "k3": [FORWARD], "low_var_kl": [FORWARD]}.get(kind, [])
    if kind == "low_var_kl":
        notes.append(K3_CLAMPED)
        return in_loss("k3", beta, **CLAMPS)
    if kind == "k3":
        notes.append(OVERFLOWS)
    return in_loss(kind, beta)


def _reward(flags: Given, terms: list[KLTerm], notes: list[str], no_ops: list[str]) -> None:
    algorithm, kind = flags["algorithm_type"], flags["kl_penalty_fn"]
    credit = IN_TRAINER.get(algorithm)
    if credit is None:
        no_ops.append(
            f"kl_penalty_fn with algorithm_type={algorithm}: its advantages are made outside the "
            "trainer, before the penalty"
        )
        return
    if kind == "corrected_k3":
        no_ops.append(
            "the ratio of kl_penalty_fn=corrected_k3: the reward passes no old log-probs, so it is a plain k3"
        )
    clamps = CLAMPS if kind == "low_var_kl" else {}
    estimator = "k3" if kind in ("low_var_kl", "corrected_k3") else kind
    terms.append(in_reward(estimator, flags["kl_penalty_coef"], credit=credit, baseline="before", **clamps))
    notes += [OLD_LOG_PROBS, CLIPPED]
    if algorithm == "grpo_verl":
        notes += [GROUP_MEAN, GROUP_STD]
    if algorithm == "reinforceplusplus":
        notes.append(WHITENED)


SYSTEM = System(
    name="trinity",
    title="Trinity-RFT",
    version="0.6.0",
    source="trinity/algorithm/kl_fn/kl_fn.py, trinity/trainer/verl/losses.py, trinity/trainer/verl/trainer.py",
    flags=FLAGS,
    read=read,
    advice={
        "sequence": {"algorithm_type": "rloo", "kl_penalty_fn": "k1", "kl_loss_fn": "none"},
        "off_policy": (
            "no flag of Trinity-RFT quite does: kl_loss_fn=corrected_k3 is right until the ratio of a token exceeds 2, "
            "and there it is plain k3"
        ),
        "low_noise": {"kl_loss_fn": "k2"},
    },
)
