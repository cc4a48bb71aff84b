"""The data sets of a run as MLflow's dataset inputs, from the run's params and tags.

Both are in every spool, so that a run of an earlier version gets its inputs when it is uploaded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from kl_comedy.tracking.store import shorten

HASH = "data.hash."
"""The beginning of the tags that hold a set's hash: ``data.hash.train``, ``data.hash.eval.heldout``."""

DIGEST_LENGTH = 12
"""MLflow takes 36 characters of a digest and shows it beside the name; the whole hash is in the profile."""

CONTEXT = "mlflow.data.context"
"""MLflow's tag of an input: what the run used the set for."""

NAMES = ("name", "subset", "path", "split")
"""Params of a set that say which one it is, in the order in which they are shown."""

NAME_LIMIT = 500
SOURCE_LIMIT = 65535
"""MLflow's limits: mlflow/utils/validation.py."""


def dataset_inputs(params: Mapping[str, str], tags: Mapping[str, str | None]) -> list[Any]:
    """An MLflow ``DatasetInput`` for each hash among ``tags``.

    >>> params = {"data.train.dataset": "pocket", "data.train.split": "train", "data.train.limit": "null"}
    >>> (made,) = dataset_inputs(params, {"data.hash.train": "0123456789abcdef", "data.count.train.kept": "64"})
    >>> made.dataset.name, made.dataset.digest, made.dataset.source
    ('train: pocket train', '0123456789ab', '{"dataset": "pocket", "split": "train"}')
    """
    from mlflow.entities import Dataset, DatasetInput, InputTag

    inputs = []
    for tag, value in tags.items():
        if not tag.startswith(HASH) or not value:
            continue
        key = tag.removeprefix(HASH)
        source = _source(params, key)
        profile: dict[str, Any] = {"sha256": value}
        kept = tags.get(f"data.count.{key}.kept") or ""
        if kept.isdigit():
            # MLflow's page of a set shows this number of rows.
            profile["num_rows"] = int(kept)
        dataset = Dataset(
            name=shorten(_name(key, source), NAME_LIMIT),
            digest=value[:DIGEST_LENGTH],
            source_type=source.get("dataset", "suite"),
            source=shorten(json.dumps(source), SOURCE_LIMIT),
            profile=json.dumps(profile),
        )
        purpose = "evaluation"
        if key == "train":
            purpose = "training"
        inputs.append(DatasetInput(dataset, [InputTag(CONTEXT, purpose)]))
    return inputs


def _source(params: Mapping[str, str], key: str) -> dict[str, str]:
    """The params of the set ``key`` that have a value; empty for a suite, which is not among ``data``."""
    beginning = f"data.{key}."
    source = {}
    for param, text in params.items():
        if param.startswith(beginning) and text not in ("null", "{}", "[]"):
            source[param.removeprefix(beginning)] = text
    return source


def _name(key: str, source: Mapping[str, str]) -> str:
    """The set's name in the config, its loader, and which set of the loader it is."""
    name = key.removeprefix("eval.")
    if not source:
        return name
    words = [source.get("dataset", "")]
    for field in NAMES:
        if field in source:
            # A path is of one machine, and would make two sets of one.
            words.append(PurePath(source[field]).name if field == "path" else source[field])
    return f"{name}: {' '.join(word for word in words if word)}"
