"""Exclusive phase timers: the seconds of a phase exclude those of phases nested in it.

    timer = PhaseTimer()
    timer.wrap(Sampler, "generate", "generate")     time in Sampler.generate counts as "generate"
    ...                                             # an update
    timer.lap()                                     -> wall and CPU seconds, and seconds per phase, since the last lap

Time outside every phase is ``other``, so the phases add up to the wall time of the lap.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

PHASES = ("generate", "score", "reference", "policy_no_grad", "forward", "backward", "optimizer", "sync", "other")
"""In the order of an update. ``policy_no_grad`` is a policy forward pass without gradient (old log-probs, reward KL);
``forward`` includes loss and metrics, ``backward`` includes recomputation, ``optimizer`` clipping."""


class PhaseTimer:
    """A stack of phases. Only the innermost phase accumulates time."""

    def __init__(self, *, wall: Callable[[], float] = time.perf_counter, cpu: Callable[[], float] = time.process_time):
        self._wall, self._cpu = wall, cpu
        self._stack: list[str] = []
        self._start()

    def _start(self) -> None:
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._lap_wall, self._lap_cpu = self._wall(), self._cpu()
        self._mark = self._lap_wall

    def _charge_elapsed(self) -> None:
        """Add the time since the last change to the innermost phase."""
        now = self._wall()
        self._seconds[self._stack[-1] if self._stack else "other"] += now - self._mark
        self._mark = now

    def enter(self, phase: str) -> None:
        if phase not in PHASES:
            raise ValueError(f"unknown phase {phase!r}; expected one of {', '.join(PHASES)}")
        self._charge_elapsed()
        self._stack.append(phase)

    def leave(self) -> None:
        self._charge_elapsed()
        self._stack.pop()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.enter(name)
        try:
            yield
        finally:
            self.leave()

    def lap(self) -> dict[str, Any]:
        """Wall and CPU seconds and seconds per phase since the last lap or since construction."""
        self._charge_elapsed()
        times = {
            "wall_s": self._mark - self._lap_wall,
            "cpu_s": self._cpu() - self._lap_cpu,
            "phases": self._seconds,
        }
        self._start()
        return times

    def wrap(self, owner: Any, name: str, phase: str | Callable[..., str], *, after: Callable[..., None] | None = None):
        """Replace ``owner.name`` by a timed version. ``phase`` is a name or a function of the call's arguments.

        ``after(result, *args, **kwargs)`` is called after each call, outside the phase.
        """
        original = getattr(owner, name)

        @functools.wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.phase(phase if isinstance(phase, str) else phase(*args, **kwargs)):
                result = original(*args, **kwargs)
            if after is not None:
                after(result, *args, **kwargs)
            return result

        setattr(owner, name, timed)


def time_torch_calls(timer: PhaseTimer) -> None:
    """Time backward passes, gradient clipping and optimizer steps, whichever library calls them."""
    import torch
    from torch.optim import optimizer

    timer.wrap(torch.Tensor, "backward", "backward")
    timer.wrap(torch.nn.utils, "clip_grad_norm_", "optimizer")
    optimizer.register_optimizer_step_pre_hook(lambda *_: timer.enter("optimizer"))
    optimizer.register_optimizer_step_post_hook(lambda *_: timer.leave())
