"""A plugin that registers Lightning's own callbacks, as CONTRIBUTING.md says, and one of a stranger's."""

import json

from lightning.pytorch import callbacks

from kl_comedy.registry import CALLBACKS
from kl_comedy.training import stop_signals

CLASSES = {
    "early_stopping": callbacks.EarlyStopping,
    "model_checkpoint": callbacks.ModelCheckpoint,
    "lr_monitor": callbacks.LearningRateMonitor,
    "timer": callbacks.Timer,
    "device_stats": callbacks.DeviceStatsMonitor,
    "on_exception": callbacks.OnExceptionCheckpoint,
    "progress_bar": callbacks.TQDMProgressBar,
    "batch_size_finder": callbacks.BatchSizeFinder,
    "lr_finder": callbacks.LearningRateFinder,
    "accumulation": callbacks.GradientAccumulationScheduler,
    "swa": callbacks.StochasticWeightAveraging,
    "ema": callbacks.EMAWeightAveraging,
    "finetuning": callbacks.BackboneFinetuning,
    "pruning": callbacks.ModelPruning,
    "prediction_writer": callbacks.BasePredictionWriter,
}
for name, callback in CLASSES.items():
    CALLBACKS.register(name, source="lightning.pytorch.callbacks", summary="Of Lightning's.")(callback)


@CALLBACKS.register("stranger", source="test")
class Stranger(callbacks.Callback):
    """Appends what it sees at the end of each validation to a file; sends the run a signal after an update."""

    def __init__(self, path, signal_at=0):
        self.path = path
        self.signal_at = signal_at

    def on_validation_end(self, trainer, pl_module):
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        row = {"rank": trainer.global_rank, "sanity": trainer.sanity_checking, "version": pl_module.version}
        with open(self.path, "a") as file:
            file.write(json.dumps({**row, "metrics": metrics}) + "\n")

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        assert float(outputs["loss"]) == float(trainer.callback_metrics["train/loss"])
        if pl_module.version == self.signal_at:
            stop_signals._listening.record(10, None)


@CALLBACKS.register("throughput", source="test")
def throughput():
    """Lightning's ThroughputMonitor, which needs a function."""
    return callbacks.ThroughputMonitor(
        batch_size_fn=lambda batch: len(getattr(batch, "rows", ())) or len(batch.prompts)
    )
