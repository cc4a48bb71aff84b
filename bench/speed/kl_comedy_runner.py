"""One repetition of ``kl-comedy train``, tracking included, with timers around its parts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from speed.phase_timer import PhaseTimer, time_torch_calls
from speed.recorder import UpdateRecorder
from speed.variants import Variant
from speed.workload import overrides


def run(task: str, variant: Variant, *, model: Path, updates: int, seed: int, output: Path) -> dict[str, Any]:
    """Train ``updates`` updates (the first is the warm-up) and return the recorded measurements."""
    from rich.console import Console

    from kl_comedy.config import load_config
    from kl_comedy.training.run import train

    recorder = UpdateRecorder(PhaseTimer())
    _add_timers(recorder)
    config = load_config(None, overrides(task, variant, model=model, updates=updates, seed=seed, output=output))
    train(config, console=Console(file=sys.stderr), command="bench/speed")
    return recorder.result()


def _add_timers(recorder: UpdateRecorder) -> None:
    """Time the methods that make up the phases."""
    import torch

    from kl_comedy.models.reference import Reference
    from kl_comedy.rewards import RewardSum
    from kl_comedy.rollouts.hf import HFRollouts
    from kl_comedy.training.experience import ExperienceStream
    from kl_comedy.training.module import PolicyModule

    def count_rollouts(rollouts: Any, *_: Any, **__: Any) -> None:
        recorder.add_completions(
            [list(r.prompt.token_ids) for r in rollouts], [len(r.completion_ids) for r in rollouts]
        )

    def count_trained(_: Any, module: Any, micro: Any, *__: Any, **___: Any) -> None:
        recorder.add_trained_tokens(int(micro.experience.mask_BT.sum()))

    timer = recorder.timer
    time_torch_calls(timer)
    timer.wrap(HFRollouts, "generate", "generate", after=count_rollouts)
    timer.wrap(
        RewardSum, "score", "score", after=lambda rows, *_: recorder.add_rewards([row.reward.value for row in rows])
    )
    timer.wrap(Reference, "forward_pass", "reference")
    timer.wrap(PolicyModule, "policy_pass", lambda *_, **__: "forward" if torch.is_grad_enabled() else "policy_no_grad")
    timer.wrap(PolicyModule, "_accumulate", "forward", after=count_trained)
    timer.wrap(PolicyModule, "_publish", "sync")
    _record_updates(recorder, PolicyModule, ExperienceStream)


def _record_updates(recorder: UpdateRecorder, module: Any, stream: Any) -> None:
    """An update lasts from one request for a batch to the next, callbacks included."""
    draw, started = stream.__next__, []

    def next_batch(self: Any) -> Any:
        if started:
            recorder.end_update()
        else:
            recorder.start()
        started.append(True)
        return draw(self)

    stream.__next__ = next_batch
    module.on_train_end = lambda self: recorder.end_update()
