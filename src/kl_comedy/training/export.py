"""A checkpoint of a run, whatever number of processes wrote it, as a Hugging Face folder."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from kl_comedy.config import Config
from kl_comedy.errors import UserError, bad_value
from kl_comedy.models import LoadedModel
from kl_comedy.models.load import load_base, load_tokenizer, prepare_tokenizer
from kl_comedy.models.sharding import skeleton
from kl_comedy.models.weights import Bucket, merged_weights
from kl_comedy.training.checkpoints import PlainReader, best, damage, load_tensors
from kl_comedy.training.policy_files import lora_scaling, save_adapter, write_model, written_beside
from kl_comedy.training.rundir import RunDir, saved, step_of

log = logging.getLogger("kl_comedy")

POLICY = "model.policy."
"""What the weights of the policy are called in a checkpoint."""


def export_policy(run: RunDir, config: Config, out: Path, *, which: str) -> Path:
    """Write the policy of checkpoint ``which`` (``newest``, ``best`` or an update's number) to ``out``.

    A LoRA policy is merged, and its adapter kept in ``out/adapter``. Holds one weight at a time beside the file being
    written. Raises :class:`UserError` where there is no such whole checkpoint, or ``out`` holds something. Returns the
    checkpoint.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists and is not an empty folder; name a new one")
    checkpoint = choose(run, which)
    model: Any = skeleton(config.model) if config.model.gguf_file is None else load_base(config.model)
    tokenizer = load_tokenizer(config.model)
    prepare_tokenizer(tokenizer)
    loaded = LoadedModel(model=model, tokenizer=tokenizer, device=torch.device("cpu"), source=config.model.source)
    try:
        with written_beside(out) as folder:
            if config.model.lora is None:
                write_model(folder, loaded, (pair for bucket in _weights(checkpoint) for pair in bucket))
            else:
                write_model(folder, loaded, merged_weights(_weights(checkpoint), lora_scaling(config)))
                factors = {name: t for bucket in _weights(checkpoint) for name, t in bucket if ".lora_" in name}
                (folder / "adapter").mkdir()
                save_adapter(folder / "adapter", config, factors)
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error.strerror or error}") from error
    return checkpoint


def choose(run: RunDir, which: str) -> Path:
    """The checkpoint that ``which`` names; with ``newest`` a damaged one is passed over, with a warning."""
    there = saved(run.checkpoints)
    if not there:
        raise UserError(f"{run.path} holds no checkpoint; a finished run's policy is in {run.policy}")
    if which == "newest":
        for path in reversed(there):
            found = damage(path)
            if found is None:
                return path
            log.warning(f"checkpoint {path} is damaged ({found}); taking the one before")
        raise UserError(f"{run.checkpoints} holds no whole checkpoint")
    if which == "best":
        chosen = best(run.checkpoints)
        if chosen is None:
            raise bad_value("--checkpoint", which, "newest or a number", "no checkpoint of this run was evaluated")
    else:
        steps = {str(step_of(path)): path for path in there}
        if which not in steps:
            raise bad_value("--checkpoint", which, ["newest", "best", *steps])
        chosen = steps[which]
    found = damage(chosen)
    if found is not None:
        raise UserError(f"checkpoint {chosen} is damaged: {found}")
    return chosen


def _weights(checkpoint: Path) -> Iterator[Bucket]:
    """The policy's weights one by one, an adapter's factors after what they adapt."""
    known = PlainReader(checkpoint).read_metadata().state_dict_metadata
    for name in sorted(name for name in known if name.startswith(POLICY)):
        tensor = torch.empty(known[name].size, dtype=known[name].properties.dtype)
        load_tensors({name: tensor}, PlainReader(checkpoint))
        yield [(name.removeprefix(POLICY), tensor)]
