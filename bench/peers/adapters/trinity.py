"""Trinity-RFT: every KL function of its registry except the neutral one, called through ``calculate_kl_loss``."""

from __future__ import annotations

import torch
from torch import Tensor

from kl_comedy.kl import KLTerm
from kl_comedy.kl.oracle import Rows
from peers.case import Adapter, Case, Skipped, spread
from peers.loading import Peer

PEER = Peer("trinity-rft", packages=("trinity",), stubs=("ray",))
MODULE = "trinity.algorithm.kl_fn.kl_fn"

CLASSES = {
    "k1": "K1Fn",
    "k2": "K2Fn",
    "k3": "K3Fn",
    "low_var_kl": "LowVarKLFn",
    "abs": "AbsFn",
    "corrected_k3": "CorrectedK3Fn",
}
"""Trinity's class of each name in its registry."""
TERMS = {
    "k1": KLTerm("k1", placement="loss"),
    "k2": KLTerm("k2", placement="loss"),
    "k3": KLTerm("k3", placement="loss"),
    # verl's: k3 with a clamped log-ratio and a clamped value.
    "low_var_kl": KLTerm("k3", placement="loss", input_clamp=20.0, output_clamp=10.0),
    "abs": KLTerm("abs", placement="loss"),
    "corrected_k3": KLTerm("k3", placement="loss", correction="token", cap=2.0),
}


def build() -> Adapter:
    """Each KL function of its registry."""
    cases = tuple(_case(name) for name in CLASSES)
    skipped = Skipped(
        system="trinity",
        version=PEER.version,
        what="kl in reward (apply_kl_penalty_to_reward)",
        reason="a method over another library's batch class with the same estimators; that class's own path is a "
        "verl row",
    )
    return Adapter(system="trinity", version=PEER.version, cases=cases, needs=PEER.pins, skipped=(skipped,))


def _case(name: str) -> Case:
    class_name = CLASSES[name]
    note = ""
    spreads = Case.spreads
    if name == "corrected_k3":
        note = "the ratio is truncated at 2 and differentiated: beyond, its score term is lost"
        # The gradient of rho k3 cancels at large log-ratios, to rounding noise.
        spreads = (0.3, 3.0)

    def loss(rows: Rows, /) -> Tensor:
        function = getattr(PEER.module(MODULE), class_name)(kl_coef=1.0)
        value, _ = function.calculate_kl_loss(
            logprob=rows.logp_BT,
            ref_logprob=rows.ref_logp_BT,
            response_mask=rows.mask_BT.double(),
            loss_agg_mode="seq-mean-token-sum",
            old_logprob=rows.behaviour_logp_BT,
        )
        # Its aggregation is a mean over completions; the oracle wants the sum.
        return spread(torch.as_tensor(value) * len(rows.group_B), rows)

    return Case(
        system="trinity",
        version=PEER.version,
        name=f"trinity:{name}",
        flags=f"kl_loss_fn={name}",
        kind="loss path",
        placement="loss",
        loss=loss,
        module=MODULE,
        function=f"{class_name}.calculate_kl_loss",
        loaded=lambda: PEER.loaded(MODULE),
        ours=(TERMS[name],),
        note=note,
        reduction="mean over completions (theirs divided out)",
        spreads=spreads,
    )
