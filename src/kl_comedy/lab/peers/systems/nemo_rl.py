"""NeMo-RL: the KL in the loss always carries a score term; in the reward, only two advantage estimators read it."""

from __future__ import annotations

from kl_comedy.kl import KLTerm
from kl_comedy.lab.peers.flags import Flag
from kl_comedy.lab.peers.notes import CLIPPED, OLD_LOG_PROBS, OWN_COST
from kl_comedy.lab.peers.reading import Given, Meaning, System, in_loss, in_reward

FLAGS = (
    Flag(
        name="reference_policy_kl_penalty",
        path="loss_fn.reference_policy_kl_penalty",
        default=0.01,
        meaning="the coefficient",
    ),
    Flag(
        name="reference_policy_kl_type",
        path="loss_fn.reference_policy_kl_type",
        default="k3",
        choices=("k1", "k2", "k3"),
        meaning="the estimate",
    ),
    Flag(
        name="kl_input_clamp_value",
        path="loss_fn.kl_input_clamp_value",
        default=20.0,
        nullable=True,
        meaning="clamp of the log-ratio",
    ),
    Flag(
        name="kl_output_clamp_value",
        path="loss_fn.kl_output_clamp_value",
        default=10.0,
        nullable=True,
        meaning="clamp of the weighted estimate",
    ),
    Flag(
        name="use_on_policy_kl_approximation",
        path="loss_fn.use_on_policy_kl_approximation",
        default=False,
        meaning="weight by the ratio to the generation log-probs",
    ),
    Flag(
        name="use_kl_in_reward",
        path="loss_fn.use_kl_in_reward",
        default=False,
        meaning="in the reward instead of the loss",
    ),
    Flag(
        name="adv_estimator",
        path="grpo.adv_estimator.name",
        aliases=("ppo.adv_estimator.name",),
        default="grpo",
        choices=("grpo", "gdpo", "reinforce_plus_plus", "gae"),
        meaning="the advantage estimator (gae: the PPO algorithm)",
    ),
)


def read(flags: Given) -> Meaning:
    beta, kind = flags["reference_policy_kl_penalty"], flags["reference_policy_kl_type"]
    if beta == 0:
        return Meaning(
            terms=(),
            notes=("the coefficient is 0: no reference is kept",),
            switch_on={"reference_policy_kl_penalty": 0.01},
        )
    if flags["use_kl_in_reward"]:
        return _reward(flags, beta, kind)
    notes = _clamps(flags)
    notes.insert(
        0, "the estimate is multiplied by a weight whose gradient is the score, so the sampling is differentiated too"
    )
    if kind == "k2":
        notes.append(
            "that turns k2, whose own gradient is right, into the gradient of E[(log-ratio)^2 / 2], which is no KL"
        )
    notes.append("averaged over the batch's tokens by default, so beta depends on lengths")
    if flags["use_on_policy_kl_approximation"]:
        return Meaning(terms=(in_loss(kind, beta, correction="token"),), notes=tuple(notes))
    return Meaning(
        terms=_self_weighted(kind, beta), notes=(*notes, "the weight is one: stale samples are not corrected")
    )


def _self_weighted(kind: str, beta: float) -> tuple[KLTerm, ...]:
    """The gradient of ``exp(x - stop(x)) k``: that of k, and k times the score."""
    if kind == "k3":
        return (in_loss("k3", beta, gradient="k2"),)
    own = KLTerm(kind, placement="reward", credit="own", beta=beta)
    if kind == "k1":
        return (in_loss("k1", beta), own)
    return (in_loss("k2", beta), own)


def _clamps(flags: Given) -> list[str]:
    bounds = [(name, flags[f"kl_{name}_clamp_value"]) for name in ("input", "output")]
    words = " and ".join(f"{name} at {bound:g}" for name, bound in bounds if bound is not None)
    if not words:
        return []
    return [
        f"clamped ({words}) after weighting: beyond, NeMo-RL gives no gradient at all; the "
        "equivalent term, which has no such "
        "clamp, is exact within (with k3 and 10: log-ratios above about -2.6 nats)"
    ]


def _reward(flags: Given, beta: float, kind: str) -> Meaning:
    advantage = flags["adv_estimator"]
    if advantage in ("grpo", "gdpo"):
        return Meaning(
            terms=(),
            notes=("the KL in the loss is switched off by use_kl_in_reward",),
            no_ops=(
                f"use_kl_in_reward with adv_estimator={advantage}: that estimator does not read it, so no KL is left",
            ),
        )
    clamps = {"input_clamp": 20.0, "output_clamp": 10.0}
    notes = [OLD_LOG_PROBS, CLIPPED, "clamped at 20 (log-ratio) and 10 (value), whatever the clamp flags say"]
    if advantage == "gae":
        return Meaning(
            terms=(in_reward(kind, beta, credit="to_go", baseline="before", **clamps),),
            policy_ratio="token",
            notes=(*notes, "to go with gae_lambda=1; below, the critic stands in for the later costs"),
        )
    notes.append(OWN_COST)
    notes.append("the advantages are then divided by the batch's standard deviation, and beta with them")
    return Meaning(terms=(in_reward(kind, beta, credit="own", baseline="after", **clamps),), notes=tuple(notes))


SYSTEM = System(
    name="nemo-rl",
    title="NeMo-RL",
    version="7ea279a (2026-08-22)",
    source="nemo_rl/algorithms/utils.py::calculate_kl, loss/loss_functions.py::ClippedPGLossFn, advantage_estimator.py",
    flags=FLAGS,
    read=read,
    advice={
        "sequence": {"use_kl_in_reward": True, "reference_policy_kl_type": "k1", "adv_estimator": "gae"},
        "off_policy": {"reference_policy_kl_type": "k3", "use_on_policy_kl_approximation": True},
        "low_noise": {"reference_policy_kl_type": "k3"},
    },
)
