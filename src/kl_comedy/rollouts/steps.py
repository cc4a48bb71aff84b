"""What happens at every token, whoever runs the loop: stop strings, truncations, and the log-probs of ``generate``.

Shape legend: ``B`` sequences, ``L`` tokens so far (prompt and completion), ``V`` vocabulary. Processors and criteria
follow the call conventions of transformers and keep no more than ``[B]`` per step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kl_comedy.rollouts.base import Sampling


class LogpRecorder:
    """The last logits processor: sees the scores that are sampled from, changes nothing.

    The token drawn from the scores of one step is known at the next, as the last column of the ids; so one
    ``[B, V]`` is held from step to step and ``[B]`` is kept of it.
    """

    supports_continuous_batching = False

    def __init__(self) -> None:
        self._kept: list[Tensor] = []
        self._pending_BV: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Take the log-probs of the token that ended ``input_ids [B, L]``; remember ``scores [B, V]``."""
        self._settle(input_ids[:, -1])
        self._pending_BV = scores
        return scores

    def finish(self, ids_BT: Tensor) -> Tensor:
        """Log-probs ``[B, T]`` (nats, float32) of the completions, whose last column is still pending."""
        if self._pending_BV is not None and len(self._kept) < ids_BT.shape[1]:
            self._settle(ids_BT[:, -1])
        self._pending_BV = None
        return torch.stack(self._kept[: ids_BT.shape[1]], dim=1)

    def _settle(self, chosen_B: Tensor) -> None:
        if self._pending_BV is None:
            return
        logp_BV = self._pending_BV.float().log_softmax(-1)
        self._kept.append(logp_BV.gather(1, chosen_B[:, None])[:, 0])


class StopStrings:
    """Finds the token that completes one of the ``stop`` strings, in the text of a completion alone.

    Special tokens take part as their text. A string of n bytes spans at most n tokens, so the last tokens are
    looked at first, and then the whole text confirms.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._window = max((len(text.encode()) for text in stop), default=0) + 4

    def __bool__(self) -> bool:
        return bool(self._stop)

    def completed_by(self, ids: Sequence[int]) -> bool:
        """Whether the text of ``ids`` holds a stop string. Asked after every token, so the last one completed it."""
        return bool(self._stop) and self._holds(ids[-self._window :]) and self._holds(ids)

    def _holds(self, ids: Sequence[int]) -> bool:
        text = self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return any(stop in text for stop in self._stop)


class StopOnText:
    """Stopping criterion of transformers' ``generate``: a sequence ends with the token that completes a stop string.

    Only the completion is searched, never the prompt. ``length_B`` holds the number of completion tokens up to
    and including that token, 0 where none was met.
    """

    def __init__(self, stops: StopStrings, *, prompt_length: int, rows: int) -> None:
        self._stops, self._start = stops, prompt_length
        self.length_B = [0] * rows

    def __call__(self, input_ids: Tensor, scores: Any, **unused: Any) -> Tensor:
        """Whether each sequence of ``input_ids [B, L]`` has ended, ``[B]`` bool."""
        if self._stops:
            completions = input_ids[:, self._start :].tolist()
            for row, ids in enumerate(completions):
                if not self.length_B[row] and self._stops.completed_by(ids):
                    self.length_B[row] = len(ids)
        return torch.tensor([length > 0 for length in self.length_B], device=input_ids.device)


def ending(ids: Sequence[int], ends: Sequence[int], stop_length: int) -> tuple[int, str]:
    """Number of tokens a completion keeps, and why it ended. ``stop_length`` 0: no stop string was met.

    What follows the end is padding, which may be an end token itself: only the first end counts.

    >>> ending([5, 2, 2, 2], [2], 0), ending([5, 6, 2, 2], [2], 2), ending([5, 6, 7, 8], [2], 0)
    ((2, 'eos'), (2, 'stop'), (4, 'length'))
    """
    eos_length = next((n + 1 for n, token in enumerate(ids) if token in ends), 0)
    if eos_length and (not stop_length or eos_length <= stop_length):
        return eos_length, "eos"
    return (stop_length, "stop") if stop_length else (len(ids), "length")


def warpers(sampling: Sampling) -> list[Any]:
    """Temperature and truncations as the library's processors ``(ids, scores [B, V]) -> scores``, in its order."""
    import transformers

    if sampling.temperature == 0:
        return []
    chosen: list[Any] = []
    if sampling.temperature != 1:
        chosen.append(transformers.TemperatureLogitsWarper(float(sampling.temperature)))
    if sampling.top_k:
        chosen.append(transformers.TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        chosen.append(transformers.TopPLogitsWarper(sampling.top_p))
    if sampling.min_p > 0:
        chosen.append(transformers.MinPLogitsWarper(sampling.min_p))
    return chosen
