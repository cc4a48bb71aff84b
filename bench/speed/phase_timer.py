"""Exclusive phase timers: the seconds of a phase exclude those of phases nested in it.

    timer = PhaseTimer()
    timer.wrap(Sampler, "generate", "generate")     # the time in Sampler.generate counts as "generate"
    ...                                             # an update
    timer.lap()                                     # wall and CPU seconds, and seconds per phase, since the last lap

Time outside every phase is ``other``, so the phases add up to the wall time of the lap.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

PHASES = ("generate", "score", "reference", "policy_no_grad", "forward", "backward", "optimizer", "sync", "other")
"""In the order of an update. ``policy_no_grad`` is a policy forward pass without gradient (old log-probs, reward KL).
``forward`` includes loss and metrics, ``backward`` recomputation, ``optimizer`` the clipping of gradients."""


class PhaseTimer:
    """A stack of phases. Only the innermost phase accumulates time."""

    def __init__(
        self, *, wall: Callable[[], float] = time.perf_counter, cpu: Callable[[], float] = time.process_time
    ) -> None:
        self._wall = wall
        self._cpu = cpu
        self._stack: list[str] = []
        self._start_lap()

    def _start_lap(self) -> None:
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._lap_wall = self._wall()
        self._lap_cpu = self._cpu()
        # From here on, time is not yet charged to a phase.
        self._uncharged_since = self._lap_wall

    def _charge_elapsed(self) -> None:
        """Add the time since the last change of phase to the innermost phase."""
        now = self._wall()
        phase = "other"
        if self._stack:
            phase = self._stack[-1]
        self._seconds[phase] += now - self._uncharged_since
        self._uncharged_since = now

    def enter(self, phase: str) -> None:
        """Begin a phase inside the current one. Raises :class:`ValueError` if the name is not in :data:`PHASES`."""
        if phase not in PHASES:
            raise ValueError(f"unknown phase {phase!r}; expected one of {', '.join(PHASES)}")
        self._charge_elapsed()
        self._stack.append(phase)

    def leave(self) -> None:
        """End the innermost phase."""
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
            "wall_s": self._uncharged_since - self._lap_wall,
            "cpu_s": self._cpu() - self._lap_cpu,
            "phases": self._seconds,
        }
        self._start_lap()
        return times

    def wrap(
        self, owner: Any, name: str, phase: str | Callable[..., str], *, after: Callable[..., None] | None = None
    ) -> None:
        """Replace ``owner.name`` by a timed version. ``phase`` is a name or a function of the call's arguments.

        ``after(result, *args, **kwargs)`` is called after each call, outside the phase.
        """
        original = getattr(owner, name)

        @functools.wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            phase_name = phase if isinstance(phase, str) else phase(*args, **kwargs)
            with self.phase(phase_name):
                result = original(*args, **kwargs)
            # Outside the phase: the bookkeeping of the benchmark is not work of the measured library.
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
    # Hooks and not wrap: each optimizer class has a step of its own, and the hooks are called by all of them.
    optimizer.register_optimizer_step_pre_hook(lambda *_: timer.enter("optimizer"))
    optimizer.register_optimizer_step_post_hook(lambda *_: timer.leave())
