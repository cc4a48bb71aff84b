"""tinker-cookbook: ``incorporate_kl_penalty``, with the reference's log-probs instead of its sampling client.

It adds the penalty to advantages. The policy loss runs on a remote server, so its documented importance-sampling form
``-rho A`` is used instead.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kl_comedy.kl.oracle import Rows
from peers.case import FLOAT32, Adapter, Case, batch_by_batch, in_the_sequence, kl_part
from peers.loading import Peer

PEER = Peer(
    "tinker-cookbook",
    packages=("tinker_cookbook",),
    stubs=("chz", "orjson"),
    extras=tuple((name, (name,)) for name in ("tinker", "httpx", "httpcore", "h11", "sniffio", "distro")),
)
MODULE = "tinker_cookbook.rl.metrics"
GROUP = 2


def build() -> Adapter:
    """Its penalty without and with discounted sums of later costs."""
    cases = (
        _case(0.0, "own token's cost, less the batch's token mean: here one group's"),
        _case(1.0, "costs to go, each less the batch's token mean: here one group's"),
    )
    return Adapter(system="tinker", version=PEER.version, cases=cases, needs=PEER.pins)


def _case(discount: float, note: str) -> Case:
    def loss_at(rows: Rows, beta: float) -> Tensor:
        advantage_BT = _advantages(rows, beta, discount)
        # The documented loss of the server: the ratio to the sampler times the advantage, per token.
        return -(rows.logp_BT - rows.behaviour_logp_BT).exp() * advantage_BT * rows.mask_BT

    return Case(
        system="tinker",
        version=PEER.version,
        name=f"tinker:discount_{discount:g}",
        flags=f"kl_penalty_coef>0 kl_discount_factor={discount:g}",
        kind="loss path",
        placement="reward",
        loss=batch_by_batch(kl_part(loss_at), GROUP),
        module=MODULE,
        function="incorporate_kl_penalty",
        loaded=lambda: PEER.loaded(MODULE),
        ours=None,
        group_size=GROUP,
        tolerance=FLOAT32,
        note=f"{note}; its policy loss is remote, -rho A in its place",
    )


class _Tokens:
    """The tokens of one row, with the methods that the scoring call uses."""

    def __init__(self, row: int, length: int) -> None:
        self.row = row
        self.length = length

    # The function appends the last target token, to score the whole completion.
    def append_int(self, token: int) -> _Tokens:
        return _Tokens(self.row, self.length + 1)


class _Reference:
    """A sampling client that scores a row with the reference's log-probs."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def sample(self, prompt: _Tokens, **kwargs: Any) -> Any:
        # Its client answers asynchronously; the reference's log-probs are at hand.
        async def answer() -> Any:
            inside_T = in_the_sequence(self.rows.mask_BT)[prompt.row]
            logps = self.rows.ref_logp_BT[prompt.row][inside_T].tolist()
            # The first token has no log-prob: nothing stands before it.
            return SimpleNamespace(prompt_logprobs=[None, *logps], sequences=[], prompt_cache_hit_tokens=0)

        return SimpleNamespace(coroutine=answer)


def _advantages(rows: Rows, beta: float, discount: float) -> Tensor:
    """The rewards as advantages with the penalty added, ``[B, T]``."""
    module = PEER.module(MODULE)
    pack = module.tinker.TensorData.from_torch
    data = []
    for row, inside_T in enumerate(in_the_sequence(rows.mask_BT)):
        count = int(inside_T.sum())
        mask_T = rows.mask_BT[row][inside_T].float()
        fields = {
            "target_tokens": torch.ones(count, dtype=torch.long),
            "logprobs": rows.behaviour_logp_BT[row][inside_T].float(),
            "advantages": rows.reward_B[row].float() * mask_T,
            "mask": mask_T,
        }
        inputs = {name: pack(tensor) for name, tensor in fields.items()}
        data.append(SimpleNamespace(model_input=_Tokens(row, count), loss_fn_inputs=inputs))
    # It adds the penalty to the advantages in place.
    asyncio.run(module.incorporate_kl_penalty(data, _Reference(rows), beta, discount))
    advantage_BT = torch.zeros_like(rows.ref_logp_BT)
    for row, datum in enumerate(data):
        advantage_T = datum.loss_fn_inputs["advantages"].to_torch().double()
        advantage_BT[row, : len(advantage_T)] = advantage_T
    return advantage_BT
