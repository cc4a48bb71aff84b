"""Training: config -> PolicyModule, ExperienceModule, callbacks -> Trainer.fit -> checkpoints, metrics, summary.

stream.next() -> list[Scored] -> prepare (reference, advantages, weights) -> micro-batches
    -> policy pass -> policy loss + KL terms -> backward -> optimizer -> published weights (version + 1)
"""

from __future__ import annotations

import importlib
from typing import Any

from kl_comedy.registry import CALLBACKS

# Lightning is heavy, and the audit is part of the laboratory: both are imported when a run asks for the callback.


@CALLBACKS.register("record_rollouts", source="kl_comedy.training.callbacks")
def record_rollouts(format: str = "jsonl") -> Any:
    """Write every batch to rollouts/ of the run's folder, as jsonl or parquet; `train.record_rollouts` adds it."""
    return importlib.import_module("kl_comedy.training.callbacks").RecordRollouts(format)


@CALLBACKS.register("audit", source="docs/audit.md")
def audit(
    every: int,
    terms: tuple[str, ...] = ("own",),
    samples: int | None = None,
    blocks: int = 8,
    sketch: int = 65536,
) -> Any:
    """Gradient audit of the KL terms every so many updates; `audit.every` adds it."""
    from kl_comedy.config import AuditConfig

    settings = AuditConfig(every=every, terms=list(terms), samples=samples, blocks=blocks, sketch=sketch)
    return importlib.import_module("kl_comedy.lab.audit.callback").AuditCallback(settings)
