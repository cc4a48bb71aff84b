"""OpenRLHF: k1 to go in the reward, after the group baseline; or in the loss, with an unbiased gradient if asked."""

from __future__ import annotations

from kl_comedy.lab.peers.flags import Flag
from kl_comedy.lab.peers.notes import CLIPPED, FORWARD, NOISE, OLD_LOG_PROBS
from kl_comedy.lab.peers.reading import Given, Meaning, System, in_loss, in_reward

CLAMP = 10.0
RATIO_CAP = 10.0

FLAGS = (
    Flag(
        name="init_coef",
        path="algo.kl.init_coef",
        default=0.01,
        aliases=("init_kl_coef", "kl_coef"),
        meaning="the coefficient",
    ),
    Flag(
        name="kl_estimator", path="algo.kl.estimator", default="k1", choices=("k1", "k2", "k3"), meaning="the estimate"
    ),
    Flag(
        name="use_loss",
        path="algo.kl.use_loss",
        default=False,
        aliases=("use_kl_loss",),
        meaning="in the loss instead of the reward",
    ),
    Flag(
        name="unbiased_gradient",
        path="algo.kl.unbiased_gradient",
        default=False,
        meaning="in the loss: the gradient of the ratio (detached, at most 10) times k2, whatever the estimate",
    ),
    Flag(
        name="kl_target", path="algo.kl.target", default=None, nullable=True, meaning="adapt the coefficient to this KL"
    ),
    Flag(
        name="advantage_estimator",
        path="algo.advantage.estimator",
        default="gae",
        meaning="the advantage estimator",
        choices=("gae", "reinforce", "rloo", "reinforce_baseline", "group_norm", "dr_grpo", "flash_reinforce"),
    ),
    Flag(
        name="no_std_norm",
        path="algo.advantage.no_std_norm",
        default=False,
        meaning="do not divide advantages by the batch's standard deviation",
    ),
    Flag(
        name="policy_loss_type",
        path="actor.policy_loss_type",
        default="ppo",
        choices=("ppo", "gspo"),
        meaning="the policy loss",
    ),
)


def read(flags: Given) -> Meaning:
    if flags["init_coef"] == 0:
        return Meaning(terms=(), notes=("init_coef is 0: no reference model is loaded",), switch_on={"init_coef": 0.01})
    notes = []
    if flags["kl_target"] is not None:
        notes.append(
            f"adaptive: the coefficient starts at {flags['init_coef']:g} and holds {flags['kl_target']:g} nats a token"
        )
    return _loss(flags, notes) if flags["use_loss"] else _reward(flags, notes)


def _loss(flags: Given, notes: list[str]) -> Meaning:
    estimator, beta = flags["kl_estimator"], flags["init_coef"]
    if flags["unbiased_gradient"]:
        gradient = "natural" if estimator == "k2" else "k2"
        term = in_loss(estimator, beta, gradient=gradient, correction="token_detached", cap=RATIO_CAP)
        notes.append("the ratio is truncated at 10; the value logged is clamped at 10, the gradient is not")
        return Meaning(terms=(term,), notes=tuple(notes))
    notes.append(f"the value is clamped at {CLAMP:g} and has no gradient beyond; no ratio is applied")
    notes += {"k1": [NOISE], "k3": [FORWARD]}.get(estimator, [])
    return Meaning(terms=(in_loss(estimator, beta, output_clamp=CLAMP),), notes=tuple(notes))


def _reward(flags: Given, notes: list[str]) -> Meaning:
    if flags["policy_loss_type"] == "gspo":
        return Meaning(
            terms=None,
            notes=(*notes, "use_loss is not affected"),
            instead=(
                "gspo gives all tokens one ratio, whose gradient is the mean of their scores, and "
                "multiplies it by the costs "
                "to go of each token: summed, the cost of token u counts u times. The completion's "
                "score is weighted by "
                "sum_u (u/length) cost_u, which no KL weights so: late tokens count fully, early ones hardly"
            ),
        )
    advantage = flags["advantage_estimator"]
    baseline = "before" if advantage == "gae" else "after"
    term = in_reward(flags["kl_estimator"], flags["init_coef"], credit="to_go", baseline=baseline, output_clamp=CLAMP)
    notes.append(f"the cost of a token is clamped at {CLAMP:g} nats, and each token carries the costs from itself on")
    notes += [OLD_LOG_PROBS, CLIPPED]
    if baseline == "after":
        notes.append(
            "the group baseline and its standard deviation see the task reward only: the KL has no baseline of its own"
        )
    if advantage in ("gae", "reinforce", "reinforce_baseline") and not flags["no_std_norm"]:
        notes.append("advantages are then divided by the batch's standard deviation, and beta with them")
    if flags["kl_estimator"] != "k1":
        notes.append("OpenRLHF itself recommends k1 here: as a cost, the other estimates are not the KL's gradient")
    no_ops = (
        ["unbiased_gradient: it acts on the KL in the loss, and use_loss is off"] if flags["unbiased_gradient"] else []
    )
    return Meaning(terms=(term,), notes=tuple(notes), no_ops=tuple(no_ops), policy_ratio="token")


SYSTEM = System(
    name="openrlhf",
    title="OpenRLHF",
    version="0.11.2",
    source="models/utils.py::compute_approx_kl, trainer/ppo_utils/experience_maker.py::compute_advantages_and_returns, "
    "trainer/ray/ppo_actor.py",
    flags=FLAGS,
    read=read,
    advice={
        "sequence": {"init_coef": 0.01, "kl_estimator": "k1", "advantage_estimator": "rloo"},
        "off_policy": {"init_coef": 0.01, "use_loss": True, "kl_estimator": "k3", "unbiased_gradient": True},
        "low_noise": {"init_coef": 0.01, "use_loss": True, "kl_estimator": "k3", "unbiased_gradient": True},
    },
)
