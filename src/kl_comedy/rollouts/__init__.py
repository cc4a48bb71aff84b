"""Samplers: the protocol, what training may ask of one, and the built-in backends (registered on import)."""

from kl_comedy.rollouts.base import (
    Policy,
    RolloutBackend,
    Sampling,
    check_training_sampling,
    sampling_from,
)
from kl_comedy.rollouts.hf import build_hf
from kl_comedy.rollouts.replay import ReplayRollouts, build_replay
from kl_comedy.rollouts.vllm import build_vllm, build_vllm_server

__all__ = [
    "Policy",
    "ReplayRollouts",
    "RolloutBackend",
    "Sampling",
    "build_hf",
    "build_replay",
    "build_vllm",
    "build_vllm_server",
    "check_training_sampling",
    "sampling_from",
]
