"""tinker-cookbook: k1 in the advantage, centred over the batch, per token or with discounted later costs."""

from __future__ import annotations

from kl_comedy.lab.peers.flags import Flag
from kl_comedy.lab.peers.notes import OLD_LOG_PROBS, OWN_COST
from kl_comedy.lab.peers.reading import Given, Meaning, System, in_reward

FLAGS = (
    Flag(name="kl_penalty_coef", default=0.0, meaning="the coefficient"),
    Flag(
        name="kl_discount_factor", default=0.0, meaning="0: each token its own cost; above: discounted later costs too"
    ),
)


def read(flags: Given) -> Meaning:
    beta, discount = flags["kl_penalty_coef"], flags["kl_discount_factor"]
    if beta == 0:
        no_ops = ("kl_discount_factor: kl_penalty_coef is 0",) if discount > 0 else ()
        return Meaning(terms=(), no_ops=no_ops, switch_on={"kl_penalty_coef": 0.01})
    if discount > 0:
        return Meaning(
            terms=None,
            notes=(OLD_LOG_PROBS,),
            instead=(
                f"each token gets the discounted ({discount:g}) sum of (batch mean - own k1) from "
                "itself on. The k1 part is a "
                "cost to go; the batch mean, summed over the tokens that remain, is a bonus for "
                "every further token: where the "
                "mean KL is positive, longer completions are rewarded. Exact only where all have the "
                "same length and the factor is 1"
            ),
        )
    notes = (
        OLD_LOG_PROBS,
        OWN_COST,
        "centred by the batch's mean: a constant for each score, so nothing is added in the mean",
        "the sampler's log-probs must be at temperature 1 to be comparable with the reference's",
    )
    return Meaning(terms=(in_reward("k1", beta, credit="own", baseline="after"),), notes=notes)


SYSTEM = System(
    name="tinker",
    title="tinker-cookbook",
    version="0.6.1",
    source="tinker_cookbook/rl/metrics.py::incorporate_kl_penalty",
    flags=FLAGS,
    read=read,
    advice={
        "sequence": "no flag of tinker-cookbook does: with kl_discount_factor=1 the batch's mean "
        "becomes a bonus for length",
        "off_policy": "no flag of tinker-cookbook does: the cost is the sampler's, frozen; on-policy "
        "kl_discount_factor=0 is per token",
        "low_noise": {"kl_penalty_coef": 0.01, "kl_discount_factor": 0.0},
    },
)
