"""The record of one repetition: tokens and seconds per update, and memory."""

from __future__ import annotations

from typing import Any

from speed import memory
from speed.phase_timer import PhaseTimer
from speed.workload import fingerprint


class UpdateRecorder:
    """Counts tokens and rewards of the current update and adds one row per update. Update 0 is the warm-up."""

    def __init__(self, timer: PhaseTimer) -> None:
        self.timer = timer
        self.updates: list[dict[str, Any]] = []
        # Of all updates, for the hash that shows that systems had the same prompts.
        self._prompts: list[list[int]] = []
        self._rss_loaded = 0
        self._clear()

    def _clear(self) -> None:
        self._generated = 0
        self._trained = 0
        self._prompt_tokens = 0
        self._rewards: list[float] = []

    def start(self) -> None:
        """Call when model, reference and data are loaded, just before the first update."""
        # What loading needed for a moment is not compared.
        memory.reset_peak()
        self._rss_loaded = memory.resident()
        # Discards the time and the counts of everything before.
        self.timer.lap()
        self._clear()

    def add_completions(self, prompts: list[list[int]], completions: list[int]) -> None:
        """``prompts``: token ids, one per completion. ``completions``: token counts, end token included."""
        self._prompts += prompts
        self._prompt_tokens += sum(map(len, prompts))
        self._generated += sum(completions)

    def add_trained_tokens(self, tokens: int) -> None:
        """``tokens``: completion tokens in a loss."""
        self._trained += tokens

    def add_rewards(self, values: list[float]) -> None:
        """``values``: one reward per completion."""
        self._rewards += values

    def end_update(self) -> None:
        """Add the row of this update and start the next."""
        self.updates.append(
            {
                **self.timer.lap(),
                "generated_tokens": self._generated,
                "trained_tokens": self._trained,
                "prompt_tokens": self._prompt_tokens,
                "reward_mean": sum(self._rewards) / max(len(self._rewards), 1),
            }
        )
        self._clear()

    def result(self) -> dict[str, Any]:
        """All rows, a hash of the prompts and memory in bytes. Call after the last update."""
        return {
            "updates": self.updates,
            "prompts": fingerprint(self._prompts),
            "rss_loaded": self._rss_loaded,
            "rss_peak": memory.peak(),
        }
