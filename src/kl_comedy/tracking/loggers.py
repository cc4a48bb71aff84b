"""Lightning loggers beside the run's own (``tracking.loggers``): a registered kind.

A builder takes ``(folder, name, **options)``, the run's folder and name, and returns a Lightning Logger. It gets the
config and every metric at its update; a resumed run repeats the updates since its checkpoint. A logger with a method
``describe(note, tags)`` also gets the run's description in Markdown and its tags.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kl_comedy.errors import UserError, bad_value
from kl_comedy.registry import LOGGERS

if TYPE_CHECKING:
    from lightning.pytorch.loggers import Logger

    from kl_comedy.config.schema import LoggerConfig

SOURCE = "lightning.pytorch.loggers"

TENSORBOARD_TAGS = ("kl.label", "kl.regime", "kl.target", "kl.verdict")
"""Tags of a run that are columns of TensorBoard's table of runs, beside the config; the text has all of them."""

WANDB_TAGS = ("kl.regime", "kl.target")
"""Tags of a run that W&B shows beside its name; all of them are in its config."""
WANDB_TAG_LENGTH = 64
"""The longest tag that W&B takes."""


@LOGGERS.register("csv", source=SOURCE)
def csv(folder: Path, name: str, flush_logs_every_n_steps: int = 10) -> Logger:
    """RUN/csv/metrics.csv, by Lightning's CSVLogger."""
    from lightning.pytorch.loggers import CSVLogger

    # Without a version, Lightning would number folders: version_0, version_1 after a resume.
    return CSVLogger(folder, name="csv", version="", flush_logs_every_n_steps=flush_logs_every_n_steps)


@LOGGERS.register("tensorboard", source=SOURCE, needs=("tensorboard", "tensorboardX"))
def tensorboard(folder: Path, name: str) -> Logger:
    """RUN/tensorboard, for `tensorboard --logdir runs`."""
    from lightning.pytorch.loggers import TensorBoardLogger

    class Describing(TensorBoardLogger):
        """Shows the description among its texts: TensorBoard names a run by its folder alone."""

        def describe(self, note: str, tags: Mapping[str, str]) -> None:
            """Write the description and the tags as a text, and the config and the short tags as hyperparameters."""
            rows = [f"| {key} | {text.replace('|', ' ')} |" for key, text in sorted(tags.items())]
            self.experiment.add_text("run", "\n".join([note, "", "| tag | value |", "| --- | --- |", *rows]), 0)
            params = {key: _number_or_text(text) for key, text in self.hparams.items()}
            params |= {f"tags.{key}": tags[key] for key in TENSORBOARD_TAGS if key in tags}
            self._write_hparams(params)

        def _write_hparams(self, params: dict[str, float | str]) -> None:
            """Write what TensorBoard's page HPARAMS shows of the run.

            Lightning writes it only together with metrics of update 0, which would be points that nobody measured.
            """
            # The package that Lightning writes with: torch's writer needs tensorboard, tensorboardX has its own.
            writing_package = "torch.utils.tensorboard"
            if importlib.util.find_spec("tensorboard") is None:
                writing_package = "tensorboardX"
            summaries = importlib.import_module(f"{writing_package}.summary")
            # Without the first of the three, which lists the columns of one run, the page shows those of all runs.
            _, start, end = summaries.hparams(params, {})
            writer = self.experiment._get_file_writer()
            writer.add_summary(start, 0)
            writer.add_summary(end, 0)

    return Describing(folder, name="tensorboard", version="", default_hp_metric=False)


@LOGGERS.register("wandb", source=SOURCE, needs=("wandb",))
def wandb(
    folder: Path,
    name: str,
    project: str = "kl_comedy",
    entity: str | None = None,
    group: str | None = None,
    offline: bool = False,
) -> Logger:
    """Weights & Biases, files in RUN/wandb; its key comes from `wandb login` or WANDB_API_KEY, never from a config."""
    from lightning.pytorch.loggers import WandbLogger

    class Closing(WandbLogger):
        """Closes the W&B run with the fit: otherwise only the end of the process writes it out."""

        def log_hyperparams(self, params: Any) -> None:
            """The config with its numbers as numbers, by which W&B sorts and draws."""
            super().log_hyperparams({key: _value(text) for key, text in dict(params).items()})

        def describe(self, note: str, tags: Mapping[str, str]) -> None:
            """Set the notes and the short tags of the W&B run; the config has all tags, as ``tags.NAME``."""
            run = self.experiment
            run.notes = note
            short = [tags[key][:WANDB_TAG_LENGTH] for key in WANDB_TAGS if tags.get(key)]
            run.tags = tuple(dict.fromkeys([*(run.tags or ()), *short]))
            super().log_hyperparams({f"tags.{key}": text for key, text in tags.items()})

        def finalize(self, status: str) -> None:
            super().finalize(status)
            exit_code = 0 if status == "success" else 1  # W&B shows another run as failed
            self.experiment.finish(exit_code=exit_code)

    options: dict[str, Any] = {"project": project, "entity": entity, "group": group, "offline": offline}
    earlier_folders = sorted(folder.glob("wandb/*run-*-*"))
    if earlier_folders:
        # A resumed run continues its W&B run, whose id ends the name of its folder.
        options |= {"id": earlier_folders[-1].name.rpartition("-")[2], "resume": "allow"}
    return Closing(save_dir=folder, name=name, **options)


def _value(text: Any) -> Any:
    """What a param's text stands for; a text that JSON does not have stands for itself.

    >>> _value("0.1"), _value("null"), _value("k3"), _value(2)
    (0.1, None, 'k3', 2)
    """
    if not isinstance(text, str):
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _number_or_text(text: Any) -> float | str:
    """A param for TensorBoard, which takes numbers and texts.

    >>> _number_or_text("0.1"), _number_or_text("[0.9, 0.999]"), _number_or_text("true")
    (0.1, '[0.9, 0.999]', 'true')
    """
    value = _value(text)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return value
    return str(text)


def check_loggers(configs: Sequence[LoggerConfig]) -> None:
    """Raise :class:`UserError` for an option that a logger does not take, and for a package that is not installed."""
    for position, config in enumerate(configs):
        key = f"tracking.loggers.{position}"
        entry = LOGGERS.get(config.name, key=f"{key}.name")
        try:
            # Before training: a wrong option would otherwise be found when the model is loaded.
            inspect.signature(entry.fn).bind(Path(), "", **config.options)
        except TypeError as error:
            raise bad_value(f"{key}.options", config.options, f"the options of {config.name}", str(error)) from None
        # Any one of the packages is enough: Lightning takes tensorboard or tensorboardX.
        packages = entry.facts.get("needs", ())
        is_installed = [importlib.util.find_spec(package) is not None for package in packages]
        if packages and not any(is_installed):
            missing = f"{config.name} needs a package that is not installed: pip install {packages[0]}"
            raise UserError(f"{key}.name: {missing}")


def build_loggers(configs: Sequence[LoggerConfig], folder: Path, name: str) -> list[Logger]:
    """The loggers of ``configs``, for the run ``name`` in ``folder``."""
    return [LOGGERS.get(config.name).fn(folder, name, **config.options) for config in configs]
