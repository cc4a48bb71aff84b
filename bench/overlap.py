"""Overlap of sampling with learning: synchronous and asynchronous updates of one configuration, alternating.

    OMP_NUM_THREADS=1 python bench/overlap.py [--updates N] [--rounds N] [--out FILE] [key=value ...]

Each round trains the config twice from scratch: on-policy (sampling and learning alternate in one process), then with
`lag.mode: async` (two processes), one thread each. Only the steady state is timed: the first and last updates of a
round, evaluation and checkpoints are excluded. Measured per update:

- parts: wall seconds of sampling with scoring, and of learning;
- step: wall seconds from the start of one update's batch to the start of the next;
- CPU seconds of the learner process and of the sampler process.

Reported ratios:

- `overlap`: asynchronous step / larger part of the synchronous updates of the same round. 1 is perfect, 1.2 the target.
- `own_overlap`: asynchronous step / larger part of the asynchronous updates. Above 1, a process waited needlessly.
- `speed_up`: synchronous step / asynchronous step.
- `best_speed_up`: sum of the synchronous parts / larger part.
- `sampler_cpu_share`, `learner_cpu_share`: CPU / wall seconds of the part; below 1, other work slowed it down.
- `cpu_overlap`: CPU seconds of the busier process / CPU seconds of the larger synchronous part.

The base config is the quickstart's with larger batches and without metrics that need a forward pass of their own, so
that both parts have similar size and take a second or more.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

SKIPPED = 3
"""Untimed updates at the start of a round, while pipelines fill and allocators warm up."""
CONFIG = Path(__file__).parents[1] / "configs" / "quickstart.yaml"
BASE = (
    "data.eval={}",
    "train.eval_every=0",
    "train.checkpoint_every=0",
    "train.samples_every=0",
    "train.threads=1",
    "rollout.prompts_per_batch=96",
    "train.exact_kl_every=0",
    "train.microbatch_tokens=32768",
)
"""Overrides of the quickstart, see above."""
MEDIANS = ("overlap", "own_overlap", "speed_up", "best_speed_up", "cpu_overlap", "cpu_speed_up")
MODES = {
    "synchronous": ("lag.mode=on_policy",),
    "asynchronous": ("lag.mode=async", "lag.max_steps=2"),
}


def measure(mode: str, updates: int, overrides: list[str]) -> dict[str, Any]:
    """Train ``updates`` updates and return their steady-state means."""
    import torch
    from lightning.pytorch.callbacks import Callback

    from kl_comedy.config import load_config
    from kl_comedy.training.experience_module import ExperienceModule
    from kl_comedy.training.fit import make_trainer
    from kl_comedy.training.module import PolicyModule

    rows: list[dict[str, float]] = []

    # perf_counter for steps, process_time for the learner alone: the sampler reports its own CPU seconds.
    class UpdateTimes(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            rows.append({"at": time.perf_counter(), "cpu": time.process_time(), **pl_module.last_metrics})

    # The overrides of the command line come after BASE and before the mode, which they cannot change.
    config = load_config(CONFIG, [*BASE, *overrides, f"train.steps={updates}", *MODES[mode]])
    torch.set_num_threads(1)
    module = PolicyModule(config)
    data = ExperienceModule(config)
    try:
        make_trainer(config, [UpdateTimes()]).fit(module, datamodule=data)
    finally:
        # The sampler's process would compute beside the next round.
        data.close()
    return per_update(rows)


def per_update(rows: list[dict[str, float]]) -> dict[str, Any]:
    """Means over the timed updates. ``rows`` has one row per update.

    The last updates are excluded, because the asynchronous sampler is idle then.
    """
    timed = rows[SKIPPED : len(rows) - SKIPPED]
    count = len(timed)
    # A row is written when its update ends, so that the update before the timed ones is their start.
    before_first = rows[SKIPPED - 1]
    steps = [row["at"] - before["at"] for before, row in itertools.pairwise([before_first, *timed])]
    sampling = [row["time/generate"] + row["time/score"] for row in timed]
    return {
        "updates": count,
        "step": sum(steps) / count,
        "step_median": statistics.median(steps),
        "sampling": sum(sampling) / count,
        "learning": sum(row["time/learn"] for row in timed) / count,
        "waiting": sum(row["time/wait"] for row in timed) / count,
        "learner_cpu": (timed[-1]["cpu"] - before_first["cpu"]) / count,
        # Only an asynchronous run has a sampler with a process of its own.
        "sampler_cpu": sum(row.get("time/sampler_cpu", 0.0) for row in timed) / count,
        "tokens": sum(row["train/length"] for row in timed) / count,
        "staleness": sum(row["policy/staleness"] for row in timed) / count,
        "sampler_idle_share": statistics.mean([row.get("time/sampler_idle_share", 0.0) for row in timed]),
    }


def ratios_of_round(synchronous: dict[str, Any], asynchronous: dict[str, Any]) -> dict[str, float]:
    """The ratios of one round; the module's docstring says what they mean."""
    parts = [synchronous["sampling"], synchronous["learning"]]
    larger = max(parts)
    total = sum(parts)
    # A synchronous run has one process: its CPU seconds are divided between the parts as their wall seconds are.
    cpu_of_larger = synchronous["learner_cpu"] * larger / total
    busier = max(asynchronous["learner_cpu"], asynchronous["sampler_cpu"])
    return {
        "overlap": asynchronous["step"] / larger,
        "own_overlap": asynchronous["step"] / max(asynchronous["sampling"], asynchronous["learning"]),
        "speed_up": synchronous["step"] / asynchronous["step"],
        "best_speed_up": total / larger,
        "slow_down_of_sampling": asynchronous["sampling"] / synchronous["sampling"],
        "slow_down_of_learning": asynchronous["learning"] / synchronous["learning"],
        "cpu_overlap": busier / cpu_of_larger,
        "cpu_speed_up": synchronous["learner_cpu"] / busier,
        "sampler_cpu_share": asynchronous["sampler_cpu"] / asynchronous["sampling"],
        "learner_cpu_share": asynchronous["learner_cpu"] / asynchronous["step"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    if options.updates <= 2 * SKIPPED:
        parser.error(f"--updates: at least {2 * SKIPPED + 1}")
    from kl_comedy.tracking import provenance_tags

    rounds: list[dict[str, Any]] = []
    for number in range(options.rounds):
        # What else runs on the machine, before this round adds to it.
        load = os.getloadavg()[0]
        measurements = {mode: measure(mode, options.updates, options.overrides) for mode in MODES}
        ratios = ratios_of_round(measurements["synchronous"], measurements["asynchronous"])
        rounds.append({**measurements, **ratios, "load_before": load})
        shown = {**ratios, "load_before": load}
        print(f"round {number + 1}: " + ", ".join(f"{name} {value:.3f}" for name, value in shown.items()), flush=True)

    medians = {f"median_{name}": statistics.median(round_[name] for round_ in rounds) for name in MEDIANS}
    result = {
        "command": " ".join(["python", "bench/overlap.py", *sys.argv[1:]]),
        "config": str(CONFIG.relative_to(CONFIG.parents[1])),
        "base": [*BASE, *options.overrides],
        "modes": MODES,
        **medians,
        "rounds": rounds,
        "provenance": provenance_tags(),
    }
    print("medians: " + ", ".join(f"{name} {medians[f'median_{name}']:.3f}" for name in MEDIANS))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
