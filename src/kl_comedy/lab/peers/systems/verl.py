"""verl: KL in the token reward (old log-probs), in the loss, or both."""

from __future__ import annotations

from kl_comedy.kl import REGIMES, KLTerm
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

ESTIMATORS = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
TYPES = (*ESTIMATORS, *(f"{name}+" for name in ESTIMATORS), "full")
TO_GO = ("gae", "reinforce_plus_plus", "remax", "optimal_token_baseline", "tir_optimal_token_baseline")
TOTAL = (
    "grpo",
    "grpo_vectorized",
    "grpo_passk",
    "rloo",
    "rloo_vectorized",
    "reinforce_plus_plus_baseline",
    "opo",
    "gpg",
)
TOKEN_RATIO = ("vanilla", "clip_cov", "kl_cov", "cispo", "dppo_tv", "dppo_kl")
OWN_RATIO = ("gspo", "sapo", "gpg")
"""Policy losses that weight the score by the token ratio; by another weight, which is one on-policy."""
OTHER_CREDIT = ("geo_mean", "dro", "bypass_mode")
CLAMPS = {"input_clamp": 20.0, "output_clamp": 10.0}

FLAGS = (
    Flag(
        name="use_kl_loss", path="actor_rollout_ref.actor.use_kl_loss", default=False, meaning="a KL term in the loss"
    ),
    Flag(
        name="kl_loss_type",
        path="actor_rollout_ref.actor.kl_loss_type",
        default="low_var_kl",
        choices=TYPES,
        meaning="its estimate; with a + the gradient is that of k2",
    ),
    Flag(name="kl_loss_coef", path="actor_rollout_ref.actor.kl_loss_coef", default=0.001, meaning="its coefficient"),
    Flag(
        name="loss_agg_mode",
        path="actor_rollout_ref.actor.loss_agg_mode",
        default="token-mean",
        choices=("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"),
        meaning="how per-token losses, the KL included, are averaged",
    ),
    Flag(
        name="loss_mode",
        path="actor_rollout_ref.actor.policy_loss.loss_mode",
        default="vanilla",
        choices=(*TOKEN_RATIO, *OWN_RATIO, *OTHER_CREDIT),
        meaning="the policy loss",
    ),
    Flag(name="use_kl_in_reward", path="algorithm.use_kl_in_reward", default=False, meaning="a KL cost in the reward"),
    Flag(name="kl_penalty", path="algorithm.kl_penalty", default="kl", choices=TYPES, meaning="its estimate"),
    Flag(name="kl_coef", path="algorithm.kl_ctrl.kl_coef", default=0.001, meaning="its coefficient"),
    Flag(
        name="kl_ctrl_type",
        path="algorithm.kl_ctrl.type",
        default="fixed",
        choices=("fixed", "adaptive"),
        meaning="whether the coefficient in the reward is controlled",
    ),
    Flag(name="target_kl", path="algorithm.kl_ctrl.target_kl", default=0.1, meaning="the target of the control"),
    Flag(
        name="adv_estimator",
        path="algorithm.adv_estimator",
        default="gae",
        choices=(*TO_GO, *TOTAL, "gdpo"),
        meaning="the advantage estimator",
    ),
    Flag(
        name="norm_adv_by_std_in_grpo",
        path="algorithm.norm_adv_by_std_in_grpo",
        default=True,
        meaning="divide group advantages by their standard deviation",
    ),
)


def read(flags: Given) -> Meaning:
    terms: list[KLTerm] = []
    notes: list[str] = []
    no_ops: list[str] = []
    for name, on in (("kl_loss_type", "use_kl_loss"), ("kl_penalty", "use_kl_in_reward")):
        if flags[name] == "full" and flags[on]:
            return Meaning(
                terms=None, instead=f"{name}=full raises NotImplementedError: verl has no full-vocabulary KL"
            )
    if flags["use_kl_in_reward"]:
        _reward(flags, terms, notes, no_ops)
    if flags["use_kl_loss"] and flags["kl_loss_coef"] > 0:
        _loss(flags, terms, notes)
    elif flags["use_kl_loss"]:
        no_ops.append("use_kl_loss with kl_loss_coef=0 only logs")
    coefficient = {} if flags["kl_loss_coef"] > 0 else {"kl_loss_coef": 0.001}
    switch = {} if terms else {"use_kl_loss": True, **coefficient}
    return Meaning(
        terms=tuple(terms),
        notes=tuple(notes),
        no_ops=tuple(no_ops),
        switch_on=switch,
        policy_ratio="token",
        holds_in=_holds_in(flags, terms, notes),
    )


def _holds_in(flags: Given, terms: list[KLTerm], notes: list[str]) -> tuple[str, ...]:
    """The policy loss weights a cost in the reward: where it is not by the token ratio, certificates stop."""
    mode = flags["loss_mode"]
    if mode in TOKEN_RATIO or not any(term.placement == "reward" for term in terms):
        return REGIMES
    notes.append(f"loss_mode={mode} weights the cost in the reward in its own way, which no term of ours does")
    return ("on_policy",) if mode in OWN_RATIO else ()


def _loss(flags: Given, terms: list[KLTerm], notes: list[str]) -> None:
    kind = flags["kl_loss_type"]
    estimator = ESTIMATORS[kind.rstrip("+")]
    straight = kind.endswith("+") or estimator == "k2"
    clamps = CLAMPS if estimator == "k3" and not straight else {}
    gradient = "k2" if straight and estimator != "k2" else "natural"
    terms.append(in_loss(estimator, flags["kl_loss_coef"], gradient=gradient, **clamps))
    if straight and estimator != "k2":
        notes.append("the + keeps the value of the estimate and takes the gradient of k2, which no clamp touches")
    if clamps:
        notes += [FORWARD, K3_CLAMPED]
    if estimator == "k1" and not straight:
        notes.append(NOISE)
    notes.append("no ratio is applied to the KL in the loss: rollout weights multiply the policy loss only")
    notes.append(f"averaged as the policy loss is (loss_agg_mode={flags['loss_agg_mode']}), so beta depends on lengths")


def _reward(flags: Given, terms: list[KLTerm], notes: list[str], no_ops: list[str]) -> None:
    advantage, kind = flags["adv_estimator"], flags["kl_penalty"]
    if flags["kl_coef"] == 0:
        no_ops.append("use_kl_in_reward with kl_coef=0 only logs")
        return
    if advantage == "gdpo":
        no_ops.append(
            "use_kl_in_reward with adv_estimator=gdpo: the rewards are rebuilt from their components, without it"
        )
        return
    if kind.endswith("+"):
        no_ops.append(f"the + of kl_penalty={kind}: it changes gradients, and a reward has none")
    estimator = ESTIMATORS[kind.rstrip("+")]
    credit = "to_go" if advantage in TO_GO else "total"
    clamps = CLAMPS if estimator == "k3" else {}
    terms.append(in_reward(estimator, flags["kl_coef"], credit=credit, baseline="before", **clamps))
    notes += [OLD_LOG_PROBS, CLIPPED]
    if advantage in ("grpo", "grpo_vectorized"):
        notes.append(GROUP_MEAN)
    if advantage.startswith("grpo") and flags["norm_adv_by_std_in_grpo"]:
        notes.append(GROUP_STD)
    if advantage.startswith("reinforce_plus_plus"):
        notes.append(WHITENED)
    if flags["kl_ctrl_type"] == "adaptive":
        notes.append(
            f"adaptive: the coefficient starts at {flags['kl_coef']:g} and holds a mean of "
            f"{flags['target_kl']:g} nats a token"
        )


SYSTEM = System(
    name="verl",
    title="verl",
    version="0.9.1",
    source="trainer/ppo/core_algos.py::kl_penalty, trainer/ppo/ray_trainer.py::apply_kl_penalty, "
    "workers/utils/losses.py::ppo_loss",
    flags=FLAGS,
    read=read,
    advice={
        "sequence": {"use_kl_in_reward": True, "kl_penalty": "kl", "adv_estimator": "rloo"},
        "off_policy": "no flag of verl puts a ratio on the KL: neither the loss nor the reward is "
        "corrected on stale batches",
        "low_noise": {"use_kl_loss": True, "kl_loss_type": "k3+"},
    },
)
