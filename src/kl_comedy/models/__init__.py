"""Policies and references: loading, chunked log-probs with exact KL and entropy, hashes."""

from kl_comedy.models.introspection import head_weights, unwrap
from kl_comedy.models.load import LoadedModel, load_model
from kl_comedy.models.logprobs import TokenPass, token_pass
from kl_comedy.models.reference import Reference, ReferencePass, build_reference
from kl_comedy.models.weights import weights_hash

__all__ = [
    "LoadedModel",
    "Reference",
    "ReferencePass",
    "TokenPass",
    "build_reference",
    "head_weights",
    "load_model",
    "token_pass",
    "unwrap",
    "weights_hash",
]
