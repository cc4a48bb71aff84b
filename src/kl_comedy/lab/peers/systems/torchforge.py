"""torchforge: k3 in the loss, one coefficient."""

from __future__ import annotations

from kl_comedy.lab.peers.flags import Flag
from kl_comedy.lab.peers.notes import FORWARD, OVERFLOWS
from kl_comedy.lab.peers.reading import Given, Meaning, System, in_loss

FLAGS = (
    Flag(name="beta", default=0.1, meaning="the coefficient"),
    Flag(name="loss", default="grpo", choices=("grpo", "reinforce"), meaning="SimpleGRPOLoss or ReinforceLoss"),
)


def read(flags: Given) -> Meaning:
    if flags["loss"] == "reinforce":
        no_ops = ("beta: ReinforceLoss takes no reference",) if flags["beta"] != FLAGS[0].default else ()
        return Meaning(terms=(), notes=("ReinforceLoss has no KL",), no_ops=no_ops, switch_on={"loss": "grpo"})
    if flags["beta"] == 0:
        return Meaning(terms=(), switch_on={"beta": 0.1})
    notes = (
        FORWARD,
        OVERFLOWS,
        "no ratio is applied, and the KL is not logged",
        "the mean over each completion's tokens, so beta depends on lengths",
    )
    return Meaning(terms=(in_loss("k3", flags["beta"]),), notes=notes)


ONLY_K3 = (
    "no flag of torchforge changes the estimate: k3 in the loss, whose gradient is that of the "
    "forward KL, without a ratio"
)

SYSTEM = System(
    name="torchforge",
    title="torchforge",
    version="6e77f0b (2025-11-15)",
    source="src/forge/losses/grpo_loss.py::SimpleGRPOLoss, src/forge/losses/reinforce_loss.py",
    flags=FLAGS,
    read=read,
    advice={"sequence": ONLY_K3, "off_policy": ONLY_K3, "low_noise": ONLY_K3},
)
