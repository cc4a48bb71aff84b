"""Training: config -> PolicyModule, ExperienceModule, callbacks -> Trainer.fit -> checkpoints, metrics, summary.

publish    module       all ranks stage the weights of version v
load       sampling     the sampler, or every engine, takes them
generate   sampling     prompts -> rollouts -> rewards, on all ranks
take       experience   batches (drawn here, by the producer, recorded) -> one UpdateBatch per update
learn      module       prepare -> micro-batches -> loss -> backward -> optimizer: version v + 1, publish
"""

from __future__ import annotations

import importlib
from typing import Any

from kl_comedy.registry import CALLBACKS


@CALLBACKS.register("record_rollouts", source="kl_comedy.training.callbacks")
def record_rollouts(format: str = "jsonl") -> Any:
    """Write every batch to rollouts/ of the run's folder, as jsonl or parquet; `train.record_rollouts` adds it."""
    from kl_comedy.training.callbacks import RecordRollouts

    return RecordRollouts(format)


@CALLBACKS.register("audit", source="docs/audit.md")
def audit(
    every: int, terms: tuple[str, ...] = ("own",), samples: int | None = None, blocks: int = 8, sketch: int = 65536
) -> Any:
    """Gradient audit of the KL terms every so many updates; `audit.every` adds it."""
    from kl_comedy.config import AuditConfig

    settings = AuditConfig(every=every, terms=list(terms), samples=samples, blocks=blocks, sketch=sketch)
    # by name: training does not import the laboratory, which trains
    return importlib.import_module("kl_comedy.lab.audit.run").AuditCallback(settings)
