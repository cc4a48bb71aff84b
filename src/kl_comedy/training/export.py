"""A trained policy as a Hugging Face folder: at the end of a run, or from any of its checkpoints.

Written beside and renamed. A LoRA run leaves the merged model, which anything can load, and its adapter apart.

A checkpoint of a run, whatever number of processes wrote it, as a Hugging Face folder.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kl_comedy.config import Config
from kl_comedy.errors import UserError, bad_value
from kl_comedy.models import LoadedModel
from kl_comedy.models.introspection import is_peft, unwrap
from kl_comedy.models.load import adapter_settings, load_base, load_tokenizer, prepare_tokenizer
from kl_comedy.models.sharding import skeleton
from kl_comedy.models.weights import Bucket, merged_weights, stream_weights
from kl_comedy.training.build import Parts
from kl_comedy.training.checkpoint import SafeReader, best, damage, load_tensors
from kl_comedy.training.run_folder import RunDir, saved, step_of

FILE_BYTES = 4 * 2**30
"""Weights in one safetensors file: transformers' own size, about."""


def save_policy(run: RunDir, parts: Parts) -> None:
    """Write RUN/policy (and RUN/adapter) from the weights as they are. Sharded: every process must call."""
    loaded, config = parts.loaded, parts.config
    adapted = is_peft(loaded.model)
    if not parts.world.sharded and not adapted:
        if parts.world.first:
            with atomic_folder(run.policy) as folder:
                loaded.model.save_pretrained(folder)
                loaded.tokenizer.save_pretrained(folder)
        return
    buckets = stream_weights(loaded.model, config.rollout.bucket_mib * 2**20)
    if not parts.world.first:
        for _ in buckets:
            pass
        return
    factors: dict[str, Tensor] = {}
    with atomic_folder(run.policy) as folder:
        try:
            weights = merged_weights(_noting(buckets, factors), lora_scaling(config)) if adapted else _each(buckets)
            write_model(folder, loaded, weights)
        finally:
            for _ in buckets:  # a full disk here must not leave the others in the middle of a gather
                pass
    if adapted:
        with atomic_folder(run.adapter) as folder:
            save_adapter(folder, config, factors)


def write_model(folder: Path, loaded: LoadedModel, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Config, tokenizer and the weights, at most :data:`FILE_BYTES` of them held at once."""
    causal = unwrap(loaded.model)
    causal.config.architectures = [_architecture_name(causal)]
    causal.config.save_pretrained(folder)
    causal.generation_config.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    write_weights(folder, weights)


def _architecture_name(causal: Any) -> str:
    """The class of transformers: FSDP2 puts its own in front of it."""
    return next(kind.__name__ for kind in type(causal).__mro__ if kind.__module__.startswith("transformers"))


def write_weights(folder: Path, weights: Iterable[tuple[str, Tensor]], *, file_bytes: int = FILE_BYTES) -> None:
    """Safetensors files and, where there are several, their index."""
    files: list[list[str]] = []
    total = held = 0
    group: dict[str, Tensor] = {}

    def flush() -> None:
        nonlocal group, held
        if group:
            files.append(list(group))
            save_one(folder / f"part-{len(files)}.safetensors", group)
        group, held = {}, 0

    for name, tensor in weights:
        size = tensor.numel() * tensor.element_size()
        if held + size > file_bytes:
            flush()
        group[name] = tensor.detach().cpu().contiguous().clone()
        held += size
        total += size
    flush()
    _name_files(folder, files, total)


def save_one(path: Path, tensors: dict[str, Tensor]) -> None:
    from safetensors.torch import save_file

    save_file(tensors, path, metadata={"format": "pt"})


def _name_files(folder: Path, files: list[list[str]], total: int) -> None:
    if len(files) == 1:
        (folder / "part-1.safetensors").rename(folder / "model.safetensors")
        return
    weight_map = {}
    for number, names in enumerate(files, start=1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        (folder / f"part-{number}.safetensors").rename(folder / name)
        weight_map |= dict.fromkeys(names, name)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def save_adapter(folder: Path, config: Config, factors: dict[str, Tensor]) -> None:
    """The adapter alone, as PEFT reads it, on the base model ``model.source``."""
    assert config.model.lora is not None
    settings = adapter_settings(config.model.lora)
    settings.base_model_name_or_path = config.model.source
    settings.inference_mode = True
    settings.save_pretrained(folder)
    plain = {name.replace(".default.", "."): tensor for name, tensor in factors.items()}
    save_one(folder / "adapter_model.safetensors", plain)


def lora_scaling(config: Config) -> float:
    """What PEFT multiplies ``B A`` with."""
    assert config.model.lora is not None
    return config.model.lora.alpha / config.model.lora.rank


def _each(buckets: Iterable[Bucket]) -> Iterator[tuple[str, Tensor]]:
    for bucket in buckets:
        yield from bucket


def _noting(buckets: Iterable[Bucket], factors: dict[str, Tensor]) -> Iterator[Bucket]:
    """The same stream; the adapter's factors are kept on the way."""
    for bucket in buckets:
        factors.update({name: tensor.cpu().contiguous().clone() for name, tensor in bucket if ".lora_" in name})
        yield bucket


class atomic_folder:
    """A folder to write into that takes its name only when it is whole; what was there before goes then."""

    def __init__(self, target: Path) -> None:
        self._target = target
        self._folder = target.with_name(f".{target.name}.writing")

    def __enter__(self) -> Path:
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        return self._folder

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            return
        if self._target.exists():
            shutil.rmtree(self._target)
        self._folder.rename(self._target)


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
        with atomic_folder(out) as folder:
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
    known = SafeReader(checkpoint).read_metadata().state_dict_metadata
    for name in sorted(name for name in known if name.startswith(POLICY)):
        tensor = torch.empty(known[name].size, dtype=known[name].properties.dtype)
        load_tensors({name: tensor}, SafeReader(checkpoint))
        yield [(name.removeprefix(POLICY), tensor)]
