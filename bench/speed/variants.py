"""The compared variants: a system, an algorithm and a setting. Peers run at their defaults and at faster settings.

All systems use float32, AdamW with the same learning rate, clip norm, prompts, group size and completion limit.
kl_comedy and TRL have the same KL term with the same coefficient: k3 times the token ratio in the loss (GRPO), k1 of
the whole completion in the reward (RLOO). TorchRL, which has only GRPO, has k3 without ratio at the same coefficient.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

BETA = {"grpo": 0.04, "rloo": 0.05}
ALGORITHMS = ("grpo", "rloo")


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One measured setting.

    ``options`` holds config overrides (ours), trainer arguments (TRL) or options of torchrl_runner.py (TorchRL).
    """

    system: str
    algorithm: str
    setting: str
    note: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.system}-{self.algorithm}-{self.setting}"


OURS = {
    "grpo": (
        "algorithm.advantage=grpo",
        "algorithm.policy_loss=ppo_clip",
        "algorithm.reduction=token_mean",
        f"kl=[{{estimator: k3, placement: loss, correction: token, beta: {BETA['grpo']}}}]",
    ),
    "rloo": (
        "algorithm.advantage=rloo",
        "algorithm.policy_loss=reinforce",
        "algorithm.reduction=sequence_sum",
        f"kl=[{{estimator: k1, placement: reward, credit: total, baseline: before, beta: {BETA['rloo']}}}]",
    ),
}
"""Config overrides that match TRL's algorithms."""

WHOLE = {"per_device_train_batch_size": 32, "gradient_accumulation_steps": 1}
SPLIT = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4}
"""32 completions per update: in one backward pass, or in TRL's default device batch of 8."""

CACHE = {"num_blocks": 96, "max_batch_tokens": 2048, "max_requests_per_batch": 32}
"""Cache of continuous batching: 32 rows of at least two blocks of 256 tokens. Prompts are read in a few steps."""

# The notes below are printed in the stored pages.


def _our_variants(algorithm: str) -> tuple[Variant, ...]:
    return (
        Variant(
            system="ours",
            algorithm=algorithm,
            setting="default",
            note="the config's defaults: exact KL, total variation and entropy measured at every update",
        ),
        Variant(
            system="ours",
            algorithm=algorithm,
            setting="lean",
            # Its gradient is the same: checkpoints and micro-batches change memory and time only.
            note="exact KL measured at the first (warm-up) and last update only, activation checkpoints, small "
            "micro-batches",
            options={
                # kl_comedy measures it at the first and the last update, whatever the interval.
                "train.exact_kl_every": 0,
                "train.microbatch_tokens": 600,
                "model.gradient_checkpointing": "true",
            },
        ),
        Variant(
            system="ours",
            algorithm=algorithm,
            setting="quick",
            note="exact KL measured at the first (warm-up) and last update only",
            options={"train.exact_kl_every": 0},
        ),
    )


def _trl_variants(algorithm: str) -> tuple[Variant, ...]:
    return (
        Variant(
            system="trl",
            algorithm=algorithm,
            setting="default",
            note="TRL's defaults (device batch 8, gradient checkpointing), but float32",
            options=SPLIT,
        ),
        Variant(
            system="trl",
            algorithm=algorithm,
            setting="no_checkpointing",
            note="gradient checkpointing off",
            options={**SPLIT, "gradient_checkpointing": False},
        ),
        Variant(
            system="trl",
            algorithm=algorithm,
            setting="whole",
            note="gradient checkpointing off, all 32 completions in one backward",
            options={**WHOLE, "gradient_checkpointing": False},
        ),
        Variant(
            system="trl",
            algorithm=algorithm,
            setting="continuous",
            note="gradient checkpointing off, transformers' continuous batching for generation, its cache sized to the "
            "work (left to itself it takes half of the memory there is)",
            options={
                **SPLIT,
                "gradient_checkpointing": False,
                "use_transformers_continuous_batching": True,
                "transformers_continuous_batching_config": CACHE,
            },
        ),
    )


TORCHRL = (
    Variant(
        system="torchrl",
        algorithm="grpo",
        setting="default",
        note="TorchRL's GRPO script without Ray and vLLM: micro-batches of 4, padded, model in eval mode; but float32, "
        "all parameters instead of LoRA, and transformers' generation",
        options={"gradient_accumulation_steps": 8},
    ),
    Variant(
        system="torchrl",
        algorithm="grpo",
        setting="checkpointing",
        note="the same, gradient checkpointing in effect",
        options={"gradient_accumulation_steps": 8, "gradient_checkpointing": True},
    ),
    Variant(
        system="torchrl",
        algorithm="grpo",
        setting="packed",
        note="the same as default, micro-batches packed instead of padded",
        options={"gradient_accumulation_steps": 8, "packing": True},
    ),
)


def _by_name() -> dict[str, Variant]:
    """All variants in the order of the tables."""
    variants: list[Variant] = []
    for algorithm in ALGORITHMS:
        variants += _our_variants(algorithm)
        variants += _trl_variants(algorithm)
    variants += TORCHRL
    return {variant.name: variant for variant in variants}


VARIANTS = _by_name()
