"""A trained policy as a Hugging Face folder: at the end of a run, or from any of its checkpoints.

A LoRA run gives the merged model, which needs no PEFT to load, and beside it the adapter. Folders are written under
another name and renamed when complete.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kl_comedy.config import Config
from kl_comedy.errors import UserError, bad_value
from kl_comedy.models import LoadedModel
from kl_comedy.models.introspection import unwrap
from kl_comedy.models.load import load_base, load_tokenizer
from kl_comedy.models.lora import lora_scaling, merge_adapter, save_adapter
from kl_comedy.models.sharding import skeleton
from kl_comedy.models.weights import stream_weights
from kl_comedy.training.checkpoint import SafeReader, best, damage, load_tensors
from kl_comedy.training.module import PolicyModule
from kl_comedy.training.run_folder import RunDir, saved, step_of

log = logging.getLogger("kl_comedy")

_CHECKPOINT_PREFIX = "model.policy."


def save_policy(run: RunDir, module: PolicyModule) -> None:
    """Write RUN/policy, and RUN/adapter of a LoRA run, from the weights in memory. Every process must call.

    A sharded policy is gathered into the host memory of the first process.
    """
    loaded, config, ranks = module.loaded, module.config, module.ranks
    weights: dict[str, Tensor] = {}
    for bucket in stream_weights(loaded.model, config.rollout.bucket_mib * 2**20):
        if ranks.is_rank_zero:
            weights |= {name: tensor.cpu() for name, tensor in bucket}
    if not ranks.is_rank_zero:
        return
    with atomic_folder(run.policy) as folder:
        write_policy(folder, loaded, config, weights)
    if config.model.lora is not None:
        with atomic_folder(run.adapter) as folder:
            save_adapter(folder, config.model, weights)


def export_policy(run: RunDir, config: Config, out: Path, *, which: str) -> Path:
    """Write the policy of checkpoint ``which`` (``newest``, ``best`` or an update's number) to ``out``.

    The adapter of a LoRA policy goes to ``out/adapter``. Holds the whole policy in memory. Returns the checkpoint.
    Raises :class:`UserError` where there is no such undamaged checkpoint, or ``out`` is not a new or empty folder.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists and is not an empty folder; name a new one")
    checkpoint = _find_checkpoint(run, which)
    model: Any = skeleton(config.model) if config.model.gguf_file is None else load_base(config.model)
    tokenizer = load_tokenizer(config.model)
    loaded = LoadedModel(model=model, tokenizer=tokenizer, device=torch.device("cpu"), source=config.model.source)
    weights = _read_weights(checkpoint)
    try:
        with atomic_folder(out) as folder:
            write_policy(folder, loaded, config, weights)
            if config.model.lora is not None:
                save_adapter(folder / "adapter", config.model, weights)
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error.strerror or error}") from error
    return checkpoint


def write_policy(folder: Path, loaded: LoadedModel, config: Config, weights: Mapping[str, Tensor]) -> None:
    """Config, tokenizer and ``weights`` (whole tensors by their names in the model), a LoRA adapter merged."""
    if config.model.lora is not None:
        weights = dict(merge_adapter(weights.items(), lora_scaling(config.model.lora)))
    unwrap(loaded.model).save_pretrained(folder, state_dict=dict(weights))
    loaded.tokenizer.save_pretrained(folder)


@contextlib.contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """A new folder to write into, renamed to ``target`` in place of an older one where no exception was raised."""
    folder = target.with_name(f".{target.name}.writing")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield folder
        if target.exists():
            shutil.rmtree(target)
        folder.rename(target)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _find_checkpoint(run: RunDir, which: str) -> Path:
    """The checkpoint that ``which`` names; for ``newest``, damaged ones are skipped with a warning."""
    paths = saved(run.checkpoints)
    if not paths:
        raise UserError(f"{run.path} holds no checkpoint; a finished run's policy is in {run.policy}")
    if which == "newest":
        for path in reversed(paths):
            fault = damage(path)
            if fault is None:
                return path
            log.warning(f"checkpoint {path} is damaged ({fault}); taking the one before")
        raise UserError(f"{run.checkpoints} holds no whole checkpoint")
    steps = {str(step_of(path)): path for path in paths}
    chosen = best(run.checkpoints) if which == "best" else steps.get(which)
    if chosen is None and which == "best":
        raise bad_value("--checkpoint", which, "newest or a number", "no checkpoint of this run was evaluated")
    if chosen is None:
        raise bad_value("--checkpoint", which, ["newest", "best", *steps])
    fault = damage(chosen)
    if fault is not None:
        raise UserError(f"checkpoint {chosen} is damaged: {fault}")
    return chosen


def _read_weights(checkpoint: Path) -> dict[str, Tensor]:
    """The policy's weights by their names in the model."""
    reader = SafeReader(checkpoint)
    tensors = {
        name: torch.empty(metadata.size, dtype=metadata.properties.dtype)
        for name, metadata in reader.read_metadata().state_dict_metadata.items()
        if name.startswith(_CHECKPOINT_PREFIX)
    }
    load_tensors(tensors, reader)
    return {name.removeprefix(_CHECKPOINT_PREFIX): tensor for name, tensor in tensors.items()}
