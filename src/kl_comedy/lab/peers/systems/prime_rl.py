"""prime-rl: a squared log-ratio to the sampler, no reference; a reference only in on-policy distillation."""

from __future__ import annotations

from kl_comedy.kl import KLTerm
from kl_comedy.lab.peers.flags import Flag
from kl_comedy.lab.peers.reading import Given, Meaning, System, in_loss

DISTILL = ("opd", "opsd")
DISTILL_TAU = 1e-3

FLAGS = (
    Flag(
        name="kl_tau",
        path="trainer.loss.kl_tau",
        default=1e-3,
        meaning="the coefficient of the squared log-ratio to the sampler",
    ),
    Flag(
        name="loss_type",
        path="trainer.loss.type",
        default="default",
        choices=("default", "ipo"),
        meaning="the policy loss",
    ),
    Flag(
        name="algo",
        path="orchestrator.algo.type",
        default="grpo",
        meaning="the algorithm",
        choices=("grpo", "max_rl", "rae", "hierarchical_grpo", *DISTILL),
    ),
)


def read(flags: Given) -> Meaning:
    no_reference = "there is no KL to a reference: this pulls the policy to the one that sampled, and is zero on-policy"
    squared = "(log-ratio)^2 is twice k2, so beta is twice kl_tau"
    if flags["algo"] in DISTILL:
        return Meaning(
            terms=(
                KLTerm("k1", placement="reward", credit="own", correction="token"),
                in_loss("k2", 2 * DISTILL_TAU, reference="sampler"),
            ),
            notes=(
                "the reference is a teacher, and this KL is the whole signal: no reward is read",
                "each token carries its own cost only, not the later ones",
                "tokens whose probability fell by more than 0.2 since sampling are left out "
                "(certificates leave the mask out)",
                squared + f", fixed at {DISTILL_TAU:g}",
            ),
            no_ops=("kl_tau: distillation has its own, fixed",) if flags["kl_tau"] != DISTILL_TAU else (),
        )
    if flags["kl_tau"] == 0:
        return Meaning(terms=(), notes=("no KL at all",), switch_on={"kl_tau": 1e-3})
    return Meaning(terms=(in_loss("k2", 2 * flags["kl_tau"], reference="sampler"),), notes=(no_reference, squared))


NO_REFERENCE = (
    "no flag of prime-rl adds a KL to a reference beside a reward: distillation (algo opd, opsd) has the KL alone, and "
    "otherwise it takes a loss of your own (loss.type=custom)"
)

SYSTEM = System(
    name="prime-rl",
    title="prime-rl",
    version="559b447 (2026-08-21)",
    source="src/prime_rl/trainer/rl/loss.py::default_loss_fn, ipo_loss_fn, ref_kl_loss_fn",
    flags=FLAGS,
    read=read,
    advice={"sequence": NO_REFERENCE, "off_policy": NO_REFERENCE, "low_noise": NO_REFERENCE},
)
