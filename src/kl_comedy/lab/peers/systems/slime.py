"""slime: k1 by default in the loss; the coefficient in the reward reaches only three advantage estimators."""

from __future__ import annotations

from kl_comedy.errors import UserError
from kl_comedy.lab.peers.flags import Flag
from kl_comedy.lab.peers.notes import CLIPPED, FORWARD, NOISE, OLD_LOG_PROBS, OWN_COST
from kl_comedy.lab.peers.reading import Given, Meaning, System, in_loss, in_reward

GROUP = ("grpo", "gspo", "cispo")

FLAGS = (
    Flag(name="use_kl_loss", default=False, meaning="a KL term in the loss"),
    Flag(
        name="kl_loss_type",
        default="k1",
        choices=("k1", "k2", "k3", "low_var_kl"),
        meaning="the estimate, in loss and reward",
    ),
    Flag(name="kl_loss_coef", default=0.0, meaning="the coefficient in the loss"),
    Flag(
        name="use_unbiased_kl",
        default=False,
        meaning="in the loss: times the ratio to the old log-probs, differentiated",
    ),
    Flag(name="kl_coef", default=0.0, meaning="the coefficient in the reward"),
    Flag(
        name="advantage_estimator",
        default="grpo",
        meaning="the advantage estimator",
        choices=(*GROUP, "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo"),
    ),
    Flag(
        name="ref_update_interval",
        default=None,
        nullable=True,
        meaning="rollouts between copies of the policy to the reference",
    ),
)


def read(flags: Given) -> Meaning:
    if flags["kl_coef"] > 0 and flags["kl_loss_coef"] > 0:
        raise UserError("slime: kl_coef and kl_loss_coef cannot both be above 0 (slime asserts it); choose one")
    every = flags["ref_update_interval"]
    reference = "initial" if every is None else "periodic"
    moves = (
        ()
        if every is None
        else (f"every {every:g} rollouts the reference becomes the policy, and is not kept in checkpoints",)
    )
    no_ops = []
    if flags["use_kl_loss"] and flags["kl_loss_coef"] == 0:
        no_ops.append("use_kl_loss: kl_loss_coef is 0 by default, so the KL is only logged")
    if flags["kl_loss_coef"] > 0 and not flags["use_kl_loss"]:
        no_ops.append("kl_loss_coef: use_kl_loss is off")
    if flags["use_unbiased_kl"] and not flags["use_kl_loss"]:
        no_ops.append("use_unbiased_kl: use_kl_loss is off, and the reward takes no ratio")
    if flags["use_kl_loss"] and flags["kl_loss_coef"] > 0:
        return _loss(flags, reference, moves, no_ops)
    if flags["kl_coef"] > 0 and flags["advantage_estimator"] in GROUP:
        estimator = flags["advantage_estimator"]
        no_ops.append(f"kl_coef with advantage_estimator={estimator}: the returns use the KL for its shape only")
    elif flags["kl_coef"] > 0:
        return _reward(flags, reference, moves, no_ops)
    return Meaning(terms=(), notes=moves, no_ops=tuple(no_ops), switch_on=_switch(flags))


def _switch(flags: Given) -> Given:
    off = {"kl_coef": 0.0} if flags["kl_coef"] > 0 else {}
    return {**off, "use_kl_loss": True, "kl_loss_coef": flags["kl_loss_coef"] or 0.001}


def _loss(flags: Given, reference: str, moves: tuple[str, ...], no_ops: list[str]) -> Meaning:
    kind, ratio = flags["kl_loss_type"], flags["use_unbiased_kl"]
    estimator = "k3" if kind == "low_var_kl" else kind
    notes = list(moves)
    clamp = None
    if kind == "low_var_kl" and ratio:
        notes.append(
            "clamped at 10 after the ratio: beyond, slime gives no gradient; the equivalent term has "
            "no clamp and is exact within"
        )
    elif kind == "low_var_kl":
        clamp = 10.0
        notes.append("the value is clamped at 10 and has no gradient beyond (log-ratios below about -2.6 nats)")
    if not ratio:
        notes += {"k1": [NOISE], "k3": [FORWARD]}.get(estimator, [])
    elif estimator == "k2":
        notes.append(
            "the ratio turns k2, whose own gradient is right on-policy, into the gradient of "
            "E[(log-ratio)^2 / 2]: no KL"
        )
    term = in_loss(
        estimator,
        flags["kl_loss_coef"],
        correction="token" if ratio else "none",
        reference=reference,
        output_clamp=clamp,
    )
    return Meaning(terms=(term,), notes=tuple(notes), no_ops=tuple(no_ops))


def _reward(flags: Given, reference: str, moves: tuple[str, ...], no_ops: list[str]) -> Meaning:
    kind, advantage = flags["kl_loss_type"], flags["advantage_estimator"]
    clamps = {"output_clamp": 10.0} if kind == "low_var_kl" else {}
    own = advantage == "reinforce_plus_plus_baseline"
    term = in_reward(
        "k3" if kind == "low_var_kl" else kind,
        flags["kl_coef"],
        credit="own" if own else "to_go",
        baseline="after" if own else "before",
        reference=reference,
        **clamps,
    )
    notes = [*moves, OLD_LOG_PROBS, CLIPPED]
    if own:
        notes.append(OWN_COST)
    if advantage == "ppo":
        notes.append("to go with lambd=1 (the default); below, the critic stands in for the later costs")
    else:
        notes.append("slime asserts normalize_advantages here: beta is divided by the batch's standard deviation")
    return Meaning(terms=(term,), notes=tuple(notes), no_ops=tuple(no_ops), policy_ratio="token")


SYSTEM = System(
    name="slime",
    title="slime",
    version="624b824 (2026-08-21)",
    source="slime/utils/ppo_utils.py::compute_approx_kl, get_grpo_returns, backends/megatron_utils/loss.py",
    flags=FLAGS,
    read=read,
    advice={
        "sequence": {"kl_coef": 0.01, "kl_loss_type": "k1", "advantage_estimator": "reinforce_plus_plus"},
        "off_policy": {"use_kl_loss": True, "kl_loss_coef": 0.01, "kl_loss_type": "k3", "use_unbiased_kl": True},
        "low_noise": {"use_kl_loss": True, "kl_loss_coef": 0.01, "kl_loss_type": "k2"},
    },
)
