"""Policies and references: loading, chunked log-probs with exact KL and entropy, hashes."""

from kl_comedy.models.introspection import head_weights, unwrap
from kl_comedy.models.load import load_model
from kl_comedy.models.logprobs import token_pass
from kl_comedy.models.reference import Reference, build_reference
from kl_comedy.models.types import LoadedModel, PassOptions, ReferencePass, TokenPass, Wanted
from kl_comedy.models.weights import weights_hash

__all__ = [
    "LoadedModel",
    "PassOptions",
    "Reference",
    "ReferencePass",
    "TokenPass",
    "Wanted",
    "build_reference",
    "head_weights",
    "load_model",
    "token_pass",
    "unwrap",
    "weights_hash",
]
