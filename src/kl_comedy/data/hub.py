"""Problems from the Hugging Face hub (or a local dataset folder), through ``datasets``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kl_comedy.config.schema import DatasetConfig
from kl_comedy.data.checks import known_options, unused
from kl_comedy.data.rows import ROW_OPTIONS, read_rows
from kl_comedy.errors import UserError, bad_value
from kl_comedy.records import Problem
from kl_comedy.registry import DATASETS


class Unreachable(UserError):
    """A hub dataset that could not be had; ``what`` says which and why, without advice."""

    def __init__(self, what: str, advice: str) -> None:
        super().__init__(f"{what}. {advice}")
        self.what = what


@DATASETS.register("hub", source="datasets.load_dataset; no code from the hub is run")
def hub(config: DatasetConfig, *, key: str) -> list[Problem]:
    """A dataset by hub name: name, subset, split, and the option revision to pin it."""
    known_options(config, (*ROW_OPTIONS, "revision"), key=key)
    unused(config, "path", key=key)
    for setting, example in (("name", "openai/gsm8k"), ("split", "train")):
        if not getattr(config, setting):
            raise UserError(f"{key}.{setting}: the dataset 'hub' needs it, for example {key}.{setting}={example}")
    revision = config.options.get("revision")
    if not isinstance(revision, str | None):
        raise bad_value(f"{key}.options.revision", revision, "a commit, tag or branch as a string")
    label = f"{config.name}[{config.split}]"
    rows = _fetch(config, revision, key=key)
    return read_rows(_numbered(rows, label), config, key=key, source=label)


def _fetch(config: DatasetConfig, revision: str | None, *, key: str) -> Any:
    """The rows of the split; whatever goes wrong in between becomes one sentence that says what to do."""
    import datasets

    try:
        return datasets.load_dataset(config.name, config.subset, split=config.split, revision=revision)
    except Exception as error:
        reason = str(error).strip().split("\n")[0] or "no reason given"
        asked = ", ".join(
            f"{name}={value}"
            for name, value in (
                ("name", config.name), ("subset", config.subset), ("split", config.split), ("revision", revision),
            )
            if value
        )  # fmt: skip
        raise Unreachable(
            f"{key}: could not load the hub dataset ({asked}): {type(error).__name__}: {reason}",
            "Without network access, download it once elsewhere and use a local file: "
            f"{key}.dataset=jsonl (or parquet) {key}.path=FILE",
        ) from error


def _numbered(rows: Any, label: str) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    for number, row in enumerate(rows, start=1):
        yield f"{label} row {number}", f"{label}/{number}", row
