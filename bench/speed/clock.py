"""Exclusive phase timers: the seconds of a phase are its own, without those of phases inside it.

    clock = PhaseClock()
    clock.wrap(Sampler, "generate", "generate")     from now on, time in Sampler.generate counts as "generate"
    ...                                             an update
    clock.lap()                                     -> wall and CPU seconds, and seconds per phase, since the last lap

What no phase claims is ``other``, so phases always add up to the wall time of the lap.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

PHASES = ("generate", "score", "reference", "policy_no_grad", "forward", "backward", "optimizer", "sync", "other")
"""In the order of an update. ``policy_no_grad`` is a pass of the policy without gradient (old log-probs, KL in reward);
``forward`` includes loss and metrics, ``backward`` what is recomputed in it, ``optimizer`` clipping and the step."""


class PhaseClock:
    """A stack of running phases; only the innermost one's time runs."""

    def __init__(self, *, wall: Callable[[], float] = time.perf_counter, cpu: Callable[[], float] = time.process_time):
        self._wall, self._cpu = wall, cpu
        self._stack: list[str] = []
        self._start()

    def _start(self) -> None:
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._lap_wall, self._lap_cpu = self._wall(), self._cpu()
        self._mark = self._lap_wall

    def _settle(self) -> None:
        """Give the time since the last change to the phase that ran."""
        now = self._wall()
        self._seconds[self._stack[-1] if self._stack else "other"] += now - self._mark
        self._mark = now

    def enter(self, phase: str) -> None:
        if phase not in PHASES:
            raise ValueError(f"no phase {phase!r}; there are {', '.join(PHASES)}")
        self._settle()
        self._stack.append(phase)

    def leave(self) -> None:
        self._settle()
        self._stack.pop()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.enter(name)
        try:
            yield
        finally:
            self.leave()

    def lap(self) -> dict[str, Any]:
        """Wall and CPU seconds and seconds per phase since the last lap (or since the beginning)."""
        self._settle()
        found = {
            "wall_s": self._mark - self._lap_wall,
            "cpu_s": self._cpu() - self._lap_cpu,
            "phases": self._seconds,
        }
        self._start()
        return found

    def wrap(self, owner: Any, name: str, phase: str | Callable[..., str], *, after: Callable[..., None] | None = None):
        """Replace ``owner.name`` by itself under a phase; ``phase`` may be decided from the call's arguments.

        ``after(result, *args, **kwargs)`` sees every call that returned; its time is not the phase's.
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


def watch_torch(clock: PhaseClock) -> None:
    """Backward passes, gradient clipping and optimizer steps, whichever library asks for them."""
    import torch
    from torch.optim import optimizer

    clock.wrap(torch.Tensor, "backward", "backward")
    clock.wrap(torch.nn.utils, "clip_grad_norm_", "optimizer")
    optimizer.register_optimizer_step_pre_hook(lambda *_: clock.enter("optimizer"))
    optimizer.register_optimizer_step_post_hook(lambda *_: clock.leave())
