"""What runs inside the loop of ``generate``: the sampled tokens' log-probs and the stop strings.

Shape legend: ``B`` sequences, ``L`` tokens so far (prompt and completion), ``V`` vocabulary. Both classes follow
the call conventions of transformers' processors and criteria; neither keeps more than ``[B]`` per step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


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


class StopOnText:
    """Stopping criterion: a sequence ends with the token that completes one of the ``stop`` strings.

    Only the completion is searched, never the prompt. Special tokens take part as their text. ``length_B``
    holds the number of completion tokens up to and including that token, 0 where none was met.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str], *, prompt_length: int, rows: int) -> None:
        self._tokenizer, self._stop, self._start = tokenizer, tuple(stop), prompt_length
        self._window = max((len(text.encode()) for text in stop), default=0) + 4
        self.length_B = [0] * rows

    def __call__(self, input_ids: Tensor, scores: Any, **unused: Any) -> Tensor:
        """Whether each sequence of ``input_ids [B, L]`` has ended, ``[B]`` bool."""
        if self._stop:
            completions = input_ids[:, self._start :].tolist()
            for row, ids in enumerate(completions):
                if not self.length_B[row] and self._ends(ids):
                    self.length_B[row] = len(ids)
        return torch.tensor([length > 0 for length in self.length_B], device=input_ids.device)

    def _ends(self, ids: list[int]) -> bool:
        """Look at the last tokens only (a string of n bytes spans at most n), then confirm on the whole text."""
        return self._holds(ids[-self._window :]) and self._holds(ids)

    def _holds(self, ids: list[int]) -> bool:
        text = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return any(stop in text for stop in self._stop)
