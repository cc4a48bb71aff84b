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
    # On the classes, because train() builds the objects.
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
        prompts = [list(rollout.prompt.token_ids) for rollout in rollouts]
        lengths = [len(rollout.completion_ids) for rollout in rollouts]
        recorder.add_completions(prompts, lengths)

    def count_rewards(rows: Any, *_: Any) -> None:
        recorder.add_rewards([row.reward.value for row in rows])

    def count_trained(_: Any, module: Any, micro: Any, *__: Any, **___: Any) -> None:
        recorder.add_trained_tokens(int(micro.experience.mask_BT.sum()))

    # The policy's pass without gradient is the one for rewards that need its log-probs.
    def kind_of_pass(*_: Any, **__: Any) -> str:
        if torch.is_grad_enabled():
            return "forward"
        return "policy_no_grad"

    timer = recorder.timer
    time_torch_calls(timer)
    timer.wrap(HFRollouts, "generate", "generate", after=count_rollouts)
    timer.wrap(RewardSum, "score", "score", after=count_rewards)
    timer.wrap(Reference, "forward_pass", "reference")
    timer.wrap(PolicyModule, "policy_pass", kind_of_pass)
    timer.wrap(PolicyModule, "_accumulate", "forward", after=count_trained)
    timer.wrap(PolicyModule, "_publish", "sync")
    _record_updates(recorder, PolicyModule, ExperienceStream)


def _record_updates(recorder: UpdateRecorder, module: Any, stream: Any) -> None:
    """Record updates. An update lasts from one request for a batch to the next, so that callbacks are included."""
    original_next = stream.__next__
    started = False

    def next_batch(self: Any) -> Any:
        nonlocal started
        if started:
            recorder.end_update()
        else:
            recorder.start()
        started = True
        return original_next(self)

    def on_train_end(self: Any) -> None:
        # No further batch is requested after the last update.
        recorder.end_update()

    stream.__next__ = next_batch
    module.on_train_end = on_train_end
