"""polgrad: KL losses and the surrogate of the reverse KL gradient. A library of formulas, not a trainer."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kl_comedy.kl import KLTerm
from kl_comedy.kl.oracle import Rows
from peers.case import Adapter, Case, spread
from peers.loading import Peer

PEER = Peer("polgrad", packages=("polgrad",))
MODULE = "polgrad.kl"
FORMS = {name: KLTerm(name, placement="loss") for name in ("k1", "k2", "k3", "abs")}


def build() -> Adapter:
    """Its loss of each estimator, and its surrogate."""
    cases = [_case(name, "kl_loss", term, name) for name, term in FORMS.items()]
    cases.append(_case("reverse_kl_grad_surrogate", "reverse_kl_grad_surrogate", KLTerm("k2", placement="loss"), None))
    return Adapter(system="polgrad", version=PEER.version, cases=tuple(cases), needs=PEER.pins)


def _case(name: str, function: str, term: KLTerm, kind: str | None) -> Case:
    flags = function if kind is None else f"{function} {kind}"

    def loss(rows: Rows, /) -> Tensor:
        module = PEER.module(MODULE)
        aggregation = module.Aggregation.SEQ_MEAN_TOKEN_SUM
        positional: list[Any] = [rows.logp_BT, rows.ref_logp_BT]
        # The surrogate is of one estimator and takes none.
        if kind is not None:
            positional.append(module.KLEstimator(kind))
        value = getattr(module, function)(*positional, aggregation, response_mask=rows.mask_BT)
        # Its aggregation is a mean over completions; the oracle wants the sum.
        return spread(value * len(rows.group_B), rows)

    return Case(
        system="polgrad",
        version=PEER.version,
        name=f"polgrad:{name}",
        flags=flags,
        kind="kl function",
        placement="loss",
        loss=loss,
        module=MODULE,
        function=function,
        loaded=lambda: PEER.loaded(MODULE),
        ours=(term,),
        reduction="mean over completions (theirs divided out)",
    )
