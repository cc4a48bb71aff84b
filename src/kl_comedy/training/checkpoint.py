"""Checkpoints as folders, written beside their final name and renamed when complete; the same for every strategy.

    checkpoints/step-00000010.ckpt/  manifest.json      size and SHA-256 of every file, number of processes, reward
                                     state.pt           loop, callbacks, stream, betas, schedules (plain data)
                                     rank-0.pt ...      each process's random state
                                     .metadata  *.distcp   weights, optimizer, moving references: torch DCP, in shards

Tensors and plain data load with ``weights_only=True``, and DCP's index through an unpickler that accepts only its
record types, so reading a checkpoint runs no code from it. The number of processes that read may differ from the
number that wrote.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import StorageMeta

from kl_comedy.io import atomic_write, sha256_file
from kl_comedy.models.weights import named_weights
from kl_comedy.training.distributed import SINGLE_PROCESS, RankFailed, Ranks
from kl_comedy.training.run_folder import saved

log = logging.getLogger("kl_comedy")

FORMAT = 1
MANIFEST, STATE, INDEX, UNFINISHED, DAMAGED = "manifest.json", "state.pt", ".metadata", ".tmp", ".damaged"
_WRITE_ERRORS = (OSError, RuntimeError, RankFailed, CheckpointException)


class SaveFailed(Exception):
    """A checkpoint could not be written. Earlier checkpoints are unchanged."""


# --- content -------------------------------------------------------------------------------------------------------


def write_checkpoint(folder: Path, state: dict[str, Any], module: Any, optimizers: list[Any], ranks: Ranks) -> None:
    """Write everything but the manifest into the new ``folder``. Every process must call.

    Raises :class:`SaveFailed` on every process, or on none.
    """
    run_state = dict(state["kl_comedy"])
    moving = run_state.pop("moving")
    rank_state = {"torch_rng": run_state.pop("torch_rng")}
    run_state["moving"] = {
        name: {key: value for key, value in reference.items() if key != "weights"} for name, reference in moving.items()
    }
    param_groups = [
        [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        for optimizer in optimizers
    ]
    tensors = {**_weights(module), **_optimizer_tensors(module, optimizers), **_reference_tensors(moving)}

    def write_states() -> None:
        _save(folder / f"rank-{ranks.rank}.pt", rank_state)
        if ranks.is_rank_zero:
            _save(folder / STATE, {**state, "kl_comedy": run_state, "param_groups": param_groups})

    try:
        ranks.on_rank_zero(lambda: folder.mkdir(parents=True))
        ranks.raise_on_all_ranks(write_states)
        ranks.raise_on_all_ranks(lambda: _save_tensors(tensors, folder))
    except _WRITE_ERRORS as error:
        raise SaveFailed(_message(error)) from error


def read_checkpoint(folder: Path, module: Any, optimizers: list[Any], ranks: Ranks) -> dict[str, Any]:
    """Load weights, optimizer states and moving references in place. Returns the state that Lightning restores."""
    state: dict[str, Any] = torch.load(folder / STATE, weights_only=True, map_location="cpu")
    rank_file = folder / f"rank-{ranks.rank}.pt"
    rank_file = rank_file if rank_file.exists() else folder / "rank-0.pt"  # more processes than wrote it
    run_state = state["kl_comedy"]
    run_state |= torch.load(rank_file, weights_only=True, map_location="cpu")
    reader = SafeReader(folder)
    _allocate_optimizer_states(module, optimizers, reader.read_metadata().state_dict_metadata)
    for optimizer, groups in zip(optimizers, state.pop("param_groups"), strict=True):
        for group, settings in zip(optimizer.param_groups, groups, strict=True):
            group.update(settings)
    moving = {name: dict(module.references[name].state_dict()) for name in run_state["moving"]}
    load_tensors({**_weights(module), **_optimizer_tensors(module, optimizers), **_reference_tensors(moving)}, reader)
    for name, reference in moving.items():
        run_state["moving"][name]["weights"] = reference["weights"]
    return state


def load_tensors(tensors: Mapping[str, Tensor], reader: SafeReader) -> None:
    """Fill ``tensors`` in place by name, each process its shards. Raises where the checkpoint lacks one."""
    with _dcp_without_processes():
        dcp.load(dict(tensors), storage_reader=reader, no_dist=not dist.is_initialized())


def _weights(module: nn.Module) -> dict[str, Tensor]:
    return {f"model.{name}": tensor.detach() for name, tensor in named_weights(module)}


def _reference_tensors(moving: Mapping[str, Any]) -> dict[str, Tensor]:
    return {
        f"reference.{name}.{weight}": tensor
        for name, reference in moving.items()
        for weight, tensor in reference["weights"].items()
    }


def _optimizer_tensors(module: nn.Module, optimizers: Sequence[Any]) -> dict[str, Tensor]:
    """``optimizer.<number>.<parameter>.<key>`` to tensor, in the same order on every process."""
    return {
        f"optimizer.{number}.{name}.{key}": value
        for number, optimizer in enumerate(optimizers)
        for name, parameter in module.named_parameters()
        for key, value in sorted(optimizer.state.get(parameter, {}).items())
        if isinstance(value, Tensor)
    }


def _allocate_optimizer_states(module: nn.Module, optimizers: Sequence[Any], metadata: Mapping[str, Any]) -> None:
    """Give each parameter zeros for the state tensors that the checkpoint has for it, laid out as the parameter is."""
    for number, optimizer in enumerate(optimizers):
        optimized = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        for name, parameter in module.named_parameters():
            prefix = f"optimizer.{number}.{name}."
            keys = [key for key in metadata if key.startswith(prefix) and "." not in key.removeprefix(prefix)]
            if keys and parameter in optimized:
                optimizer.state[parameter] = {
                    key.removeprefix(prefix): _zeros(parameter, metadata[key]) for key in keys
                }


def _zeros(parameter: Tensor, metadata: Any) -> Tensor:
    """A state tensor is sharded as its parameter where it has the same shape; a step count is whole."""
    dtype = metadata.properties.dtype
    if metadata.size == parameter.shape:
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    return torch.zeros(metadata.size, dtype=dtype, device=parameter.device)


def _save_tensors(tensors: dict[str, Tensor], folder: Path) -> None:
    with _dcp_without_processes():
        try:
            dcp.save(tensors, storage_writer=dcp.FileSystemWriter(folder), no_dist=not dist.is_initialized())
        except CheckpointException as error:
            for failure in error.failures.values():
                if isinstance(failure[0], KeyboardInterrupt | SystemExit):  # DCP wraps these too
                    raise failure[0] from error
            raise


@contextlib.contextmanager
def _dcp_without_processes() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _save(path: Path, content: Any) -> None:
    with open(path, "wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())


# --- reading DCP's index without running anything -------------------------------------------------------------------

_INDEX_TYPES = {
    ("torch.distributed.checkpoint.metadata", name)
    for name in (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    )
} | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
}


class _IndexUnpickler(pickle.Unpickler):
    """Accepts the record types of DCP's index, dtypes and layouts."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _INDEX_TYPES or (module == "torch" and isinstance(getattr(torch, name), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"a checkpoint's index holds {module}.{name}")


class SafeReader(dcp.FileSystemReader):
    """DCP's reader, with an index that cannot run code."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        with open(Path(self.path) / INDEX, "rb") as file:
            metadata = _IndexUnpickler(file).load()
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


# --- the folder of checkpoints --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class CheckpointManager:
    """The checkpoints of a run in ``root``: the ``keep`` newest, and the one with the best evaluation."""

    root: Path
    keep: int
    ranks: Ranks = SINGLE_PROCESS

    def save(self, step: int, write: Callable[[Path], None], *, reward: float | None = None) -> Path:
        """Let ``write`` fill a new folder, add the manifest, and rename the folder to its final name.

        Every process must call. Raises :class:`SaveFailed` on every process where any could not write; earlier
        checkpoints are unchanged.
        """
        target = self.root / f"step-{step:08d}.ckpt"
        folder = target.with_suffix(UNFINISHED)
        try:
            self.ranks.on_rank_zero(lambda: _remove(folder))
            write(folder)
            self._write_manifest(folder, step, reward)
            self.ranks.on_rank_zero(lambda: _replace(folder, target))
        except (*_WRITE_ERRORS, SaveFailed) as error:
            if self.ranks.is_rank_zero:
                shutil.rmtree(folder, ignore_errors=True)
            raise SaveFailed(_message(error)) from error
        if self.ranks.is_rank_zero:
            for path in set(saved(self.root)[: -self.keep]) - {best(self.root)}:
                shutil.rmtree(path, ignore_errors=True)
        return target

    def _write_manifest(self, folder: Path, step: int, reward: float | None) -> None:
        """Each process hashes the files that it wrote; the first writes the manifest."""
        rank = self.ranks.rank
        written = [*folder.glob(f"__{rank}_*.distcp"), folder / f"rank-{rank}.pt"]
        written += [folder / STATE, folder / INDEX] if self.ranks.is_rank_zero else []
        entries = self.ranks.raise_on_all_ranks(
            lambda: {path.name: {"bytes": path.stat().st_size, "sha256": sha256_file(path)} for path in written}
        )
        files = {name: entry for of_rank in self.ranks.gather(entries) for name, entry in of_rank.items()}
        content = {"format": FORMAT, "step": step, "processes": self.ranks.size, "reward": reward, "files": files}
        self.ranks.on_rank_zero(lambda: atomic_write(folder / MANIFEST, json.dumps(content, indent=1)))

    def newest(self) -> Path | None:
        """The newest undamaged checkpoint, or None. Every process must call.

        Damaged ones are named in a warning and renamed to ``*.damaged``.
        """
        paths = saved(self.root)
        while paths:
            path = paths.pop()
            fault = self.ranks.raise_on_all_ranks(lambda path=path: damage(path, ranks=self.ranks))  # type: ignore[misc]
            fault = next((fault for fault in self.ranks.gather(fault) if fault), None)
            if fault is None:
                return path
            if self.ranks.is_rank_zero:
                instead = "the one before" if paths else "the beginning: there is none before"
                log.warning(f"checkpoint {path} is damaged ({fault}); going on from {instead}")
                try:
                    _remove(path.with_suffix(DAMAGED))
                    path.rename(path.with_suffix(DAMAGED))
                except OSError as error:
                    log.warning(f"{path} cannot be renamed ({error.strerror}); it stays, unused")
        return None


def best(root: Path) -> Path | None:
    """The checkpoint with the highest evaluation reward, the newest of equals; None without an evaluated one."""
    rewards = [(manifest(path).get("reward"), path) for path in saved(root)]
    return max(((reward, path) for reward, path in rewards if reward is not None), default=(None, None))[1]


def manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint, empty where it cannot be read."""
    try:
        content: dict[str, Any] = json.loads((path / MANIFEST).read_text())
    except (OSError, ValueError):
        return {}
    return content


def damage(path: Path, *, ranks: Ranks = SINGLE_PROCESS) -> str | None:
    """What is wrong with a checkpoint's files (this rank's share of them): missing, cut short, changed. Else None."""
    if not path.is_dir():
        return "it is not a folder; another version wrote it"
    content = manifest(path)
    if content.get("format") != FORMAT or not content.get("files"):
        return f"no {MANIFEST} of format {FORMAT}"
    for name in filter(None, ranks.split(sorted(content["files"]))):
        file, entry = path / name, content["files"][name]
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != entry["bytes"]:
            return f"{name} has {file.stat().st_size} bytes and should have {entry['bytes']}"
        if sha256_file(file) != entry["sha256"]:
            return f"{name} was changed"
    return None


def _message(error: BaseException) -> str:
    """Why writing failed: the operating system's message where one is among the causes.

    Torch's writer says only that its file is shorter than it should be. The system's error is among the causes, in
    DCP's one list per process, and lost where the process was another one.
    """
    causes: list[BaseException] = [error]
    for cause in causes:  # grows meanwhile
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror + (f": {cause.filename}" if cause.filename else "")
        failures = cause.failures.values() if isinstance(cause, CheckpointException) else ()
        for inner in (*(failure[0] for failure in failures), cause.__cause__, cause.__context__):
            if inner is not None and inner not in causes:
                causes.append(inner)
    text = (str(error).strip().splitlines() or [type(error).__name__])[-1]
    return f"a file was cut short; no space left? ({text})" if "unexpected pos" in text else text


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def _replace(folder: Path, target: Path) -> None:
    """Rename ``folder`` durably. An earlier checkpoint of the same update is removed after the rename."""
    old = target.with_suffix(".old")
    _remove(old)
    if target.exists():
        target.rename(old)
    folder.rename(target)
    descriptor = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    _remove(old)
