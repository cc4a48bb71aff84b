"""KL terms in prime-rl: a loss by import path.

    [trainer.loss]
    type = "custom"
    import_path = "kl_comedy.integrations.prime_rl.loss"

    [trainer.loss.kwargs]
    kl = [{estimator = "k3", placement = "loss", reference = "sampler", beta = 0.001}]

Written against src/prime_rl/trainer/rl/loss.py of prime-rl 559b447 (2026-08-21): no release is on the package index.
A term with ``reference: initial`` needs ``ref_logprobs``, which prime-rl sends for algorithms with a reference model;
with ``grpo`` they are None, and the loss raises :class:`UserError`.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from kl_comedy.integrations.terms import HostTerms


def loss(
    inputs: Any,
    *,
    kl: Any,
    base: str = "prime_rl.trainer.rl.loss.default_loss_fn",
    base_config: str = "prime_rl.configs.trainer.DefaultLossConfig",
    base_options: Mapping[str, Any] | None = None,
) -> Any:
    """The loss of one sample: prime-rl's own, plus beta times the surrogate of each term, summed over the loss mask.

    ``base`` is called as ``base(inputs, base_config(**base_options))``; its own KL to the sampler is ``kl_tau`` (1e-3)
    and is left as it is unless ``base_options`` says otherwise. prime-rl divides the sum by the tokens of the batch.
    Terms are weighted by ``inputs.loss_weights`` where it is set. Adds the metric ``kl_comedy/kl_loss`` (nats per
    token, times beta).
    """
    config = _imported(base_config)(**(base_options or {}))
    result = _imported(base)(inputs, config)
    ref_logp_BT = None
    if inputs.ref_logprobs is not None:
        ref_logp_BT = inputs.ref_logprobs[None]
    # A list cannot be a cache key; its JSON can.
    terms = _terms(json.dumps(kl))
    # One sample is a batch of one.
    kl_BT = terms.loss_BT(
        logp_BT=inputs.trainer_logprobs[None],
        ref_logp_BT=ref_logp_BT,
        behaviour_logp_BT=inputs.inference_logprobs[None],
        mask_BT=inputs.loss_mask[None],
    )
    kl_T = kl_BT[0]
    if inputs.loss_weights is not None:
        kl_T = kl_T * inputs.loss_weights
    tokens = inputs.loss_mask.sum().clamp(min=1)
    metrics = {**result.metrics, "kl_comedy/kl_loss": kl_T.detach().sum() / tokens}
    return dataclasses.replace(result, loss=result.loss + kl_T.sum(), metrics=metrics)


@lru_cache(maxsize=8)
def _terms(text: str) -> HostTerms:
    """The terms, parsed once per run and not once per sample."""
    return HostTerms.parse(json.loads(text), host="prime-rl", in_reward=False)


def _imported(path: str) -> Any:
    """The object at an import path. prime-rl is imported only when the loss is computed."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)
