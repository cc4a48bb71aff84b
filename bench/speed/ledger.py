"""What a repetition writes down: tokens per update, laps of the clock, memory."""

from __future__ import annotations

from typing import Any

from speed import memory
from speed.clock import PhaseClock
from speed.workload import fingerprint


class Ledger:
    """Counts of the update at hand, closed into a row when it ends. Update 0 is the warm-up."""

    def __init__(self, clock: PhaseClock) -> None:
        self.clock = clock
        self.updates: list[dict[str, Any]] = []
        self._prompts: list[list[int]] = []
        self._rss_loaded = 0
        self._clear()

    def _clear(self) -> None:
        self._generated = self._trained = self._prompt_tokens = 0
        self._rewards: list[float] = []

    def begin(self) -> None:
        """Model, reference and data are loaded; the first update begins."""
        memory.reset_peak()
        self._rss_loaded = memory.resident()
        self.clock.lap()
        self._clear()

    def generated(self, prompts: list[list[int]], completions: list[int]) -> None:
        """Prompts (token ids, one a completion) and tokens of each completion, the end token included."""
        self._prompts += prompts
        self._prompt_tokens += sum(map(len, prompts))
        self._generated += sum(completions)

    def trained(self, tokens: int) -> None:
        """Completion tokens that entered a loss."""
        self._trained += tokens

    def rewarded(self, values: list[float]) -> None:
        self._rewards += values

    def end_update(self) -> None:
        self.updates.append(
            {
                **self.clock.lap(),
                "generated_tokens": self._generated,
                "trained_tokens": self._trained,
                "prompt_tokens": self._prompt_tokens,
                "reward_mean": sum(self._rewards) / max(len(self._rewards), 1),
            }
        )
        self._clear()

    def close(self) -> dict[str, Any]:
        """Everything, once the last update has ended."""
        return {
            "updates": self.updates,
            "prompts": fingerprint(self._prompts),
            "rss_loaded": self._rss_loaded,
            "rss_peak": memory.peak(),
        }
