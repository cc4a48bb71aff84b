"""Training: config -> PolicyModule, ExperienceModule, callbacks -> Trainer.fit -> checkpoints, metrics, summary.

publish    module       all ranks stage the weights of version v
load       sampling     the sampler, or every engine, takes them
generate   sampling     prompts -> rollouts -> rewards, on all ranks
take       experience   batches (drawn here, by the producer, recorded) -> one UpdateBatch per update
learn      module       prepare -> micro-batches -> loss -> backward -> optimizer: version v + 1, publish
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kl_comedy.registry import CALLBACKS

if TYPE_CHECKING:
    from kl_comedy.training.callbacks import RecordRollouts


@CALLBACKS.register("record_rollouts", source="kl_comedy.training.callbacks")
def record_rollouts(format: str = "jsonl") -> RecordRollouts:
    """Write every batch to rollouts/ of the run's folder, as jsonl or parquet; `train.record_rollouts` adds it."""
    # Imported here, because a lookup in the registry must not import Lightning.
    from kl_comedy.training.callbacks import RecordRollouts

    return RecordRollouts(format)
