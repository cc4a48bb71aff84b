"""One repetition of ours: the whole of ``kl-comedy train``, tracking included, with timers put around its parts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from speed.clock import PhaseClock, watch_torch
from speed.ledger import Ledger
from speed.variants import Variant
from speed.workload import overrides


def run(task: str, variant: Variant, *, model: Path, updates: int, seed: int, output: Path) -> dict[str, Any]:
    """Train ``updates`` updates (the first is the warm-up); what the ledger found."""
    from rich.console import Console

    from kl_comedy.config import load_config
    from kl_comedy.training.run import train

    ledger = Ledger(PhaseClock())
    _watch(ledger)
    config = load_config(None, overrides(task, variant, model=model, updates=updates, seed=seed, output=output))
    train(config, console=Console(file=sys.stderr), command="bench/speed")
    return ledger.close()


def _watch(ledger: Ledger) -> None:
    """Put the phases around the methods that are them."""
    import torch

    from kl_comedy.models.reference import FrozenReference
    from kl_comedy.rewards import RewardSum
    from kl_comedy.rollouts.hf import HFRollouts
    from kl_comedy.training.experience import ExperienceStream
    from kl_comedy.training.module import PolicyModule

    def count_rollouts(rollouts: Any, *_: Any, **__: Any) -> None:
        ledger.generated([list(r.prompt.token_ids) for r in rollouts], [len(r.completion_ids) for r in rollouts])

    def count_trained(_: Any, module: Any, micro: Any, *__: Any, **___: Any) -> None:
        ledger.trained(int(micro.experience.mask_BT.sum()))

    clock = ledger.clock
    watch_torch(clock)
    clock.wrap(HFRollouts, "generate", "generate", after=count_rollouts)
    clock.wrap(RewardSum, "score", "score", after=lambda rows, *_: ledger.rewarded([row.reward.value for row in rows]))
    clock.wrap(FrozenReference, "forward_pass", "reference")
    clock.wrap(PolicyModule, "policy_pass", lambda *_, **__: "forward" if torch.is_grad_enabled() else "policy_no_grad")
    clock.wrap(PolicyModule, "_accumulate", "forward", after=count_trained)
    clock.wrap(PolicyModule, "_publish", "sync")
    _mark_updates(ledger, PolicyModule, ExperienceStream)


def _mark_updates(ledger: Ledger, module: Any, stream: Any) -> None:
    """An update lasts from the moment its batch is asked for until the next one is, callbacks included."""
    draw, begun = stream.__next__, []

    def next_batch(self: Any) -> Any:
        if begun:
            ledger.end_update()
        else:
            ledger.begin()
        begun.append(True)
        return draw(self)

    stream.__next__ = next_batch
    module.on_train_end = lambda self: ledger.end_update()
