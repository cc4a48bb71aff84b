"""The work of all systems: model, prompts and their order, reward."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speed.variants import OURS, Variant

ROOT = Path(__file__).resolve().parents[2]
SMOLLM2 = ROOT / "models" / "SmolLM2-135M-Instruct"
PROMPTS_PER_UPDATE = 4
GROUP_SIZE = 8
LEARNING_RATE = 1e-6
REWARD = "exact_answer"
"""The reward of all systems: the number in the completion, compared exactly."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """Prompts and a completion limit. ``data``: config overrides. ``pocket``: use the built-in pocket model."""

    summary: str
    max_new_tokens: int
    data: tuple[str, ...]
    pocket: bool = False


TASKS = {
    "gsm8k": Task(
        summary="GSM8K train, chat template, 4 prompts x 8 completions of at most 64 tokens",
        max_new_tokens=64,
        data=(
            "data.train.dataset=jsonl",
            "data.train.limit=512",
            "data.train.seed=0",
            "data.prompt.template=chat",
            'data.prompt.suffix="\\nThink briefly, then give the final number in \\\\boxed{}."',
            "data.prompt.max_tokens=256",
        ),
    ),
    "chain_sum": Task(
        summary="one-digit sums of two terms (reasoning-gym), 4 prompts x 8 completions of at most 10 tokens",
        max_new_tokens=10,
        data=(
            "data.train.dataset=reasoning_gym",
            "data.train.name=chain_sum",
            "data.train.limit=512",
            "data.train.seed=1",
            "data.prompt.template=chat",
            'data.prompt.system=""',
            'data.prompt.prefill="{text}"',
            'data.train.options={min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1, text_after: "problem: "}',
        ),
    ),
    "pocket": Task(
        summary="the project's pocket model on its own sums, 4 prompts x 8 completions of at most 24 characters",
        max_new_tokens=24,
        data=("data.train.dataset=pocket", "data.train.split=train", "data.train.limit=512"),
        pocket=True,
    ),
}


def data_folder() -> Path:
    """The folder of gsm8k_train.jsonl: ``KL_COMEDY_DATA``, or shared/data next to the checkout."""
    configured = os.environ.get("KL_COMEDY_DATA")
    if configured:
        return Path(configured)
    return ROOT.parent / "shared" / "data"


def missing(task: str) -> str | None:
    """A message if the model or data of this task is missing, else None."""
    needs_smollm2 = not TASKS[task].pocket
    if needs_smollm2 and not (SMOLLM2 / "config.json").exists():
        return "models/SmolLM2-135M-Instruct is missing; run `make smollm2`"
    if task == "gsm8k" and not (data_folder() / "gsm8k_train.jsonl").exists():
        return "gsm8k_train.jsonl is missing; set KL_COMEDY_DATA to its folder"
    return None


def overrides(task: str, variant: Variant, *, model: Path, updates: int, seed: int, output: Path) -> list[str]:
    """The config as ``key=value`` overrides. ``updates`` includes the warm-up."""
    path_override = []
    if task == "gsm8k":
        path_override.append(f"data.train.path={data_folder() / 'gsm8k_train.jsonl'}")
    # The peers' runs build this config too, for its prompts; their options are not kl_comedy's.
    variant_overrides = []
    if variant.system == "ours":
        variant_overrides = [f"{key}={value}" for key, value in variant.options.items()]
    return [
        f"model.source={model}",
        *TASKS[task].data,
        *path_override,
        # Over the defaults of the task: advantage, policy loss, reduction and KL.
        *OURS[variant.algorithm],
        f"rollout.prompts_per_batch={PROMPTS_PER_UPDATE}",
        f"rollout.group_size={GROUP_SIZE}",
        f"rollout.max_new_tokens={TASKS[task].max_new_tokens}",
        f"rewards=[{{name: {REWARD}}}]",
        f"optimizer.lr={LEARNING_RATE}",
        f"train.steps={updates}",
        # Updates alone are measured: no checkpoint and no evaluation.
        "train.checkpoint_every=0",
        "eval.at_start=false",
        "eval.at_end=false",
        f"seed={seed}",
        f"name=speed-{variant.name}",
        f"output={output}",
        f"tracking.uri=sqlite:///{output / 'mlflow.db'}",
        # Last: they replace what stands above.
        *variant_overrides,
    ]


def prompts_in_order(config: Any, tokenizer: Any, updates: int) -> list[Any]:
    """The prompts of every update, in the order in which kl_comedy uses them."""
    from kl_comedy.data import PromptOrder, load_problems, render

    problems = load_problems(config.data.train, key="data.train", training=True, allow_test_split=False)
    prompts, _ = render(problems, config.data.prompt, tokenizer)
    # kl_comedy draws its order from the seed; the others get the prompts in that order and do not shuffle.
    order = PromptOrder(len(prompts), config.rollout.prompts_per_batch, config.seed)
    ordered = []
    for update in range(updates):
        for index in order.indices(update):
            ordered.append(prompts[index])
    return ordered


def fingerprint(prompts: Sequence[Sequence[int]]) -> str:
    """One hash for the token ids of prompts, in order: equal hashes show that two systems had equal prompts."""
    # The libraries give ids as Python ints or as tensors' elements, whose reprs differ.
    rows = [tuple(map(int, ids)) for ids in prompts]
    return hashlib.sha256(repr(rows).encode()).hexdigest()[:16]


def save_pocket(folder: Path) -> None:
    """Save the pocket model as a transformers model folder."""
    from kl_comedy.config import ModelConfig
    from kl_comedy.models import load_model

    # All systems load it from here by transformers' own means.
    loaded = load_model(ModelConfig(device="cpu"))
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
