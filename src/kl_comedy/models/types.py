"""Records that the modules of this package hand to each other, and to training.

Legend: ``B`` sequences, ``T`` completion tokens, ``N`` completion tokens inside the mask, ``H`` hidden width, ``V``
vocabulary, ``K`` top tokens. Log-probs and KLs in nats.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kl_comedy.kl.estimators import TopRequest, TopTokens
from kl_comedy.models.introspection import Head, unwrap


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A policy on its device (a causal LM of transformers, or the PEFT model around it) and its tokenizer.

    Dropout is off. The tokenizer pads on the left; its padding token may be the end token, so padding is always
    given by masks.
    """

    model: Any
    tokenizer: Any
    device: torch.device
    source: str

    @property
    def causal(self) -> Any:
        """The causal LM under its wrappers, adapters included."""
        return unwrap(self.model)


@dataclass(frozen=True, kw_only=True)
class PassOptions:
    """Settings of a pass. Those of a policy and its reference must be equal, or KL compares different things.

    ``temperature`` divides the logits. ``chunk_elements`` bounds the logits in memory at a time (at least one row).
    ``share_prompt`` lets rows with the same prompt share its computation.
    """

    temperature: float
    chunk_elements: int
    share_prompt: bool = True


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a pass computes beside the log-prob of each token; see :class:`TokenPass` for each.

    Each costs a sum over the vocabulary, and the first that needs the reference costs its head's product as well, so
    a training step asks for nothing that no term and no metric reads.
    """

    kl: bool = False
    forward_kl: bool = False
    entropy: bool = False
    total_variation: bool = False
    certainty: bool = False
    reference_certainty: bool = False
    log_kept: bool = False
    reference_log_kept: bool = False
    mixtures: tuple[float, ...] = ()
    """Shares of the reference in the mixture, one Jensen-Shannon divergence each."""
    top: tuple[TopRequest, ...] = ()
    hidden: bool = False
    """Keep the hidden states, for a value head or for a reference."""
    hidden_gradient: bool = False
    """Let gradients flow from the hidden states into the model."""

    @property
    def quantities(self) -> list[str]:
        """The names of the requested quantities, in the order of their columns."""
        # The order of the head's columns: forward, backward and their names all go by it.
        names = (
            "kl",
            "forward_kl",
            "entropy",
            "total_variation",
            "certainty",
            "reference_certainty",
            "log_kept",
            "reference_log_kept",
        )
        return [name for name in names if getattr(self, name)]

    @property
    def compares_vocabularies(self) -> bool:
        """Whether something needs the reference's probability of every token."""
        return (
            self.kl
            or self.forward_kl
            or self.total_variation
            or self.reference_certainty
            or self.reference_log_kept
            or bool(self.mixtures)
        )

    @property
    def compares_top(self) -> bool:
        """Whether a list of top tokens needs the reference."""
        return any(request.whose != "sampler" for request in self.top)


@dataclass(frozen=True, kw_only=True)
class ReferencePass:
    """A reference over one batch: log-probs, and what exact KL needs to rebuild its distributions; no gradient.

    ``head`` (weight ``[V, H]``, bias) is not copied: it is valid until the reference moves. A teacher behind a server
    has neither head nor hidden states, but ``top``: ids and log-probs ``[N, K]`` of its likeliest tokens, in order.
    """

    logp_BT: Tensor
    temperature: float
    hidden_NH: Tensor | None = None
    head: Head | None = None
    top: tuple[Tensor, Tensor] | None = None


@dataclass(frozen=True, kw_only=True)
class TokenPass:
    """Result of one pass of a policy over completions; a quantity that was not requested is None.

    ``logp_BT`` log-prob of each completion token; differentiable.
    ``kl_BT`` exact ``KL(pi || ref)`` of the next-token distributions at the prefix of each token;
    ``forward_kl_BT`` exact ``KL(ref || pi)``; both differentiable in the policy only.
    ``mixture`` by the reference's share: exact Jensen-Shannon divergences, differentiable in the policy only.
    ``entropy_BT`` entropy of the next-token distribution; detached: it is a metric here.
    ``total_variation_BT`` total variation ``sum |pi - ref| / 2`` of the next-token distributions, in [0, 1]; detached.
    ``certainty_BT``, ``reference_certainty_BT``: ``1 - H / log V`` of the next-token distribution; detached.
    ``log_kept_BT``, ``reference_log_kept_BT``: the log of the mass (nats) that the whole next-token distribution has on
    the tokens that truncated sampling kept; detached. Every other quantity is then of the policy renormalized over
    these, against the whole reference: ``KL(pi || ref)`` is at least ``-reference_log_kept``, ``KL(ref || pi)``
    infinite.
    ``hidden_NH`` hidden state before each masked token, row by row; detached unless its gradient was asked for.
    ``top`` by request (``k``, and whose likeliest tokens): the :class:`TopTokens` of each prefix.
    """

    logp_BT: Tensor
    kl_BT: Tensor | None
    forward_kl_BT: Tensor | None
    entropy_BT: Tensor | None
    total_variation_BT: Tensor | None
    hidden_NH: Tensor | None
    certainty_BT: Tensor | None = None
    reference_certainty_BT: Tensor | None = None
    log_kept_BT: Tensor | None = None
    reference_log_kept_BT: Tensor | None = None
    mixture: Mapping[float, Tensor] = field(default_factory=dict)
    top: Mapping[TopRequest, TopTokens] = field(default_factory=dict)
