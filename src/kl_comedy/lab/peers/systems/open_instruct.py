"""open-instruct: four estimates in the loss, numbered; only the last carries a ratio."""

from __future__ import annotations

from kl_comedy.errors import UserError
from kl_comedy.lab.peers.flags import Flag
from kl_comedy.lab.peers.notes import FORWARD, NOISE
from kl_comedy.lab.peers.reading import Given, Meaning, System, in_loss

CLAMP = 40.0

FLAGS = (
    Flag(name="beta", default=0.05, meaning="the coefficient"),
    Flag(
        name="kl_estimator", default="2", choices=("0", "1", "2", "3"), meaning="0: k1, 1: k2, 2: k3, 3: ratio times k1"
    ),
    Flag(name="load_ref_policy", default=True, meaning="keep a reference"),
    Flag(name="ref_policy_update_freq", default=None, nullable=True, meaning="steps between moves of the reference"),
    Flag(name="alpha", default=0.6, meaning="how far the reference moves towards the policy"),
)


def read(flags: Given) -> Meaning:
    beta = flags["beta"]
    if not flags["load_ref_policy"] and beta > 0:
        raise UserError(
            "open-instruct: load_ref_policy=false needs beta=0.0 (open-instruct refuses it); set one of the two"
        )
    if beta == 0:
        return Meaning(terms=(), switch_on={"beta": 0.05, "load_ref_policy": True})
    kind = flags["kl_estimator"]
    notes = [f"the log-ratio is clamped at {CLAMP:g}, far out of reach"]
    every = flags["ref_policy_update_freq"]
    if every is not None:
        notes.append(
            f"every {every:g} steps the reference becomes {flags['alpha']:g} of the policy and the "
            "rest of itself; it is checkpointed"
        )
    notes += {"0": [NOISE], "2": [FORWARD]}.get(kind, [])
    if kind == "3":
        notes.append(
            "coefficient ratio (log-ratio + 1): the same mean as ratio times k3, with the noise of a score added"
        )
    else:
        notes.append("no ratio is applied: use_rho_correction weights the policy loss only")
    notes.append("averaged over the batch's tokens (loss_denominator=token), so beta depends on lengths")
    term = in_loss(
        ("k1", "k2", "k3", "k1")[int(kind)],
        beta,
        correction="token" if kind == "3" else "none",
        input_clamp=CLAMP,
        reference="initial" if every is None else "ema",
    )
    return Meaning(terms=(term,), notes=tuple(notes))


SYSTEM = System(
    name="open-instruct",
    title="open-instruct",
    version="e6c3044 (2026-08-20)",
    source="open_instruct/model_utils.py::estimate_kl, open_instruct/grpo_utils.py::compute_grpo_loss",
    flags=FLAGS,
    read=read,
    advice={
        "sequence": "no flag of open-instruct puts the KL into the reward or gives later tokens credit: per-token only",
        "off_policy": {"beta": 0.05, "kl_estimator": "3"},
        "low_noise": {"beta": 0.05, "kl_estimator": "1"},
    },
)
