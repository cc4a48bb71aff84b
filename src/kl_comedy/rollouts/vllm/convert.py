"""Conversion for both vLLM backends: :class:`Sampling` to vLLM's parameters, engine output to :class:`Rollout`.

A rollout means what one of the ``hf`` backend means: its end token or the token that completes a stop string is its
last, and ids, log-probs, versions and text are all of exactly these tokens.
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kl_comedy.errors import RunFailed, bad_value
from kl_comedy.records import Prompt, Rollout
from kl_comedy.rollouts.base import Policy, Sampling
from kl_comedy.rollouts.decoding import StopStrings, ending
from kl_comedy.rollouts.hf import end_tokens

MAX_TEMPERATURE = 2.0
SEED_BITS = 62
"""vLLM adds the number of the sibling to a seed and keeps it in a signed 64-bit integer."""


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One completion as an engine gave it: ids, log-probs (nats) and weight version of each token."""

    token_ids: tuple[int, ...]
    logps: tuple[float, ...]
    versions: tuple[int, ...]


def prompt_seed(seed: int, position: int) -> int:
    """The seed of one prompt's group, from the seed of the call and the place of the prompt in it.

    >>> prompt_seed(1, 0) == prompt_seed(1, 0), prompt_seed(1, 0) == prompt_seed(1, 1)
    (True, False)
    """
    digest = hashlib.sha256(f"{seed}/{position}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> (64 - SEED_BITS)


def sampling_fields(sampling: Sampling, *, ends: Sequence[int], n: int, seed: int) -> dict[str, Any]:
    """The fields of vLLM's ``SamplingParams``. Greedy asks for one completion: the group would be copies of it."""
    check_temperature(sampling.temperature)
    fields: dict[str, Any] = {
        "n": n if sampling.temperature > 0 else 1,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "max_tokens": sampling.max_new_tokens,
        "seed": seed,
        "logprobs": 0,
        "stop_token_ids": list(ends),
        "ignore_eos": True,
        "detokenize": bool(sampling.stop),
    }
    if sampling.stop:
        fields |= {"stop": list(sampling.stop), "include_stop_str_in_output": True, "skip_special_tokens": False}
    return fields


def check_temperature(temperature: float) -> None:
    """Raise :class:`UserError` for a temperature that vLLM does not take."""
    if temperature > MAX_TEMPERATURE:
        raise bad_value("temperature", temperature, f"up to {MAX_TEMPERATURE:g}", "vLLM takes no higher one")


class Converter:
    """Engine output to :class:`Rollout`, with the tokenizer and end tokens of the policy."""

    def __init__(self, loaded: Policy) -> None:
        self._tokenizer = loaded.tokenizer
        self.ends = end_tokens(loaded.causal, loaded.tokenizer)

    def rollouts(
        self, prompt: Prompt, group: int, completions: Sequence[Completion], *, group_size: int, stop: Sequence[str]
    ) -> list[Rollout]:
        """The group of one prompt. A single greedy completion stands for every member of its group.

        Raises :class:`RunFailed` when a sampled token has no finite log-prob, or completions are missing.
        """
        if len(completions) not in (1, group_size):
            raise RunFailed(f"the engine gave {len(completions)} completions of a prompt where {group_size} were asked")
        group_completions = completions if len(completions) == group_size else list(completions) * group_size
        return [self._rollout(prompt, group, completion, stop) for completion in group_completions]

    def _rollout(self, prompt: Prompt, group: int, completion: Completion, stop: Sequence[str]) -> Rollout:
        ids = list(completion.token_ids)
        length, reason = ending(ids, self.ends, self.stop_length(ids, stop))
        logps = completion.logps[:length]
        if len(logps) != length or not all(float("-inf") < value < float("inf") for value in logps):
            raise RunFailed(f"a sampled token of group {group} has no finite log-prob; the weights are not finite")
        text = self._tokenizer.decode(ids[:length], skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return Rollout(
            prompt=prompt,
            group_id=group,
            completion_ids=tuple(ids[:length]),
            logps=tuple(logps),
            versions=completion.versions[:length],
            stop_reason=reason,
            text=text,
        )

    def stop_length(self, ids: Sequence[int], stop: Sequence[str]) -> int:
        """Tokens up to and including the one that completes a stop string; 0 where there is none."""
        stops = StopStrings(self._tokenizer, stop)
        if not stops.in_text_of(ids):
            return 0
        return bisect.bisect_left(range(len(ids)), True, lo=1, key=lambda length: stops.in_text_of(ids[:length]))
