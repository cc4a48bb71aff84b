"""Samplers: the protocol, what training may ask of one, the built-in backends."""

from kl_comedy.rollouts.base import (
    RolloutBackend,
    Sampling,
    sampling_from,
)
from kl_comedy.rollouts.engines import EngineRollouts, build_hf_server, build_vllm, build_vllm_server
from kl_comedy.rollouts.hf import build_hf
from kl_comedy.rollouts.recording import ReplayRollouts, build_replay
from kl_comedy.rollouts.sampler import Sampler

__all__ = [
    "EngineRollouts",
    "ReplayRollouts",
    "RolloutBackend",
    "Sampler",
    "Sampling",
    "build_hf",
    "build_hf_server",
    "build_replay",
    "build_vllm",
    "build_vllm_server",
    "sampling_from",
]
