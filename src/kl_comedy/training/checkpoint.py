"""Checkpoints as folders, written beside their final name and renamed when complete; the same for every strategy.

    checkpoints/step-00000010.ckpt/  manifest.json      size and SHA-256 of every file, number of processes, reward
                                     state.pt           loop, callbacks, stream, betas, schedules (plain data)
                                     rank-0.pt ...      each process's random state
                                     .metadata  *.distcp   weights, optimizer, moving references: torch DCP, in shards

Tensors and plain data load with ``weights_only=True``, and DCP's index through an unpickler that accepts only its
record types, so reading a checkpoint runs no code from it. The number of processes that read may differ from the
number that wrote.

Runs that are stored must stay readable: names of files, keys of the states and names of tensors do not change without
a new :data:`FORMAT`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

from kl_comedy.config.validate import Field, is_count, read_fields
from kl_comedy.errors import RunFailed, UserError
from kl_comedy.io import fsync_path, is_file_name, sha256_file, write_json
from kl_comedy.models.weights import named_weights
from kl_comedy.training.distributed import SINGLE_PROCESS, RankFailed, Ranks
from kl_comedy.training.run_folder import saved, step_of

log = logging.getLogger("kl_comedy")

FORMAT = 1
MAX_ERROR_CHARACTERS = 500
"""An index may name a file of thousands of characters."""

MANIFEST = "manifest.json"
STATE = "state.pt"
INDEX = ".metadata"
UNFINISHED = ".tmp"
DAMAGED = ".damaged"

Write = Callable[[Path], None]
_WRITE_ERRORS = (OSError, RuntimeError, RankFailed, CheckpointException)


class SaveFailed(Exception):
    """A checkpoint could not be written. Earlier checkpoints are unchanged."""


# --- content -------------------------------------------------------------------------------------------------------


def write_checkpoint(folder: Path, state: dict[str, Any], module: Any, optimizers: list[Any], ranks: Ranks) -> None:
    """Write everything but the manifest into the new ``folder``. Every process must call, and all raise."""
    run_state = dict(state["kl_comedy"])
    # Random numbers differ from rank to rank; tensors go into DCP's shards. The rest is the same on every rank.
    rank_state = {"torch_rng": run_state.pop("torch_rng")}
    moving = run_state["moving"]
    run_state["moving"] = {name: _without("weights", reference) for name, reference in moving.items()}
    param_groups = [[_without("params", group) for group in optimizer.param_groups] for optimizer in optimizers]
    tensors = _tensors(module, optimizers, moving)

    def write_states() -> None:
        _save(folder / f"rank-{ranks.rank}.pt", rank_state)
        if ranks.is_rank_zero:
            _save(folder / STATE, {**state, "kl_comedy": run_state, "param_groups": param_groups})

    ranks.on_rank_zero(lambda: folder.mkdir(parents=True))
    ranks.raise_on_all_ranks(write_states)
    ranks.raise_on_all_ranks(lambda: _save_tensors(tensors, folder))


def read_checkpoint(folder: Path, module: Any, optimizers: list[Any], ranks: Ranks) -> dict[str, Any]:
    """Load weights, optimizer states and moving references in place. Returns the state that Lightning restores."""
    with unreadable(folder):
        return _read(folder, module, optimizers, ranks)


@contextlib.contextmanager
def unreadable(folder: Path) -> Iterator[None]:
    """Raise :class:`RunFailed` for whatever is raised inside over the content of a checkpoint.

    Its hashes were checked before: its files are as they were written, so it was not written by us, or by another
    version. Errors of memory and interrupts are raised unchanged.
    """
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except (Exception, CheckpointException) as error:
        # CheckpointException is no Exception, and may contain the interrupt of a user.
        if isinstance(error, CheckpointException):
            _raise_interrupt(error)
        raise RunFailed(
            f"checkpoint {folder} cannot be read ({_message(error)}); move it elsewhere to resume from the one before"
        ) from error


def _read(folder: Path, module: Any, optimizers: list[Any], ranks: Ranks) -> dict[str, Any]:
    def load_states() -> dict[str, Any]:
        state: dict[str, Any] = torch.load(folder / STATE, weights_only=True, map_location="cpu")
        rank_file = folder / f"rank-{ranks.rank}.pt"
        if not rank_file.exists():
            # More processes read the checkpoint than wrote it.
            rank_file = folder / "rank-0.pt"
        state["kl_comedy"] |= torch.load(rank_file, weights_only=True, map_location="cpu")
        return state

    state = ranks.raise_on_all_ranks(load_states)
    run_state = state["kl_comedy"]
    reader = SafeReader(folder)
    _allocate_optimizer_states(module, optimizers, reader.read_metadata().state_dict_metadata)
    for optimizer, groups in zip(optimizers, state.pop("param_groups"), strict=True):
        for group, settings in zip(optimizer.param_groups, groups, strict=True):
            group.update(settings)
    moving = {name: dict(module.references[name].state_dict()) for name in run_state["moving"]}
    load_tensors(_tensors(module, optimizers, moving), reader)
    for name, reference in moving.items():
        run_state["moving"][name]["weights"] = reference["weights"]
    return state


def _without(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key != name}


def _tensors(module: nn.Module, optimizers: Sequence[Any], moving: Mapping[str, Any]) -> dict[str, Tensor]:
    """Every tensor of a checkpoint by its name in the file, in the same order on every process."""
    tensors = {f"model.{name}": tensor.detach() for name, tensor in named_weights(module)}
    for number, optimizer in enumerate(optimizers):
        for name, parameter in module.named_parameters():
            for key, value in sorted(optimizer.state.get(parameter, {}).items()):
                if isinstance(value, Tensor):
                    tensors[f"optimizer.{number}.{name}.{key}"] = value
    for name, reference in moving.items():
        for weight_name, tensor in reference["weights"].items():
            tensors[f"reference.{name}.{weight_name}"] = tensor
    return tensors


def _allocate_optimizer_states(module: nn.Module, optimizers: Sequence[Any], metadata: Mapping[str, Any]) -> None:
    """Give each parameter zeros for the state tensors that the checkpoint has for it.

    DCP loads in place, and a new optimizer has no state before its first step. A state tensor is sharded as its
    parameter where it has the same shape; a step count is whole.
    """
    for number, optimizer in enumerate(optimizers):
        optimized = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        for name, parameter in module.named_parameters():
            prefix = f"optimizer.{number}.{name}."
            states: dict[str, Tensor] = {}
            for stored_name, stored in metadata.items():
                key = stored_name.removeprefix(prefix)
                if key == stored_name or "." in key:
                    continue  # of another parameter, perhaps one whose name begins with this one's
                dtype = stored.properties.dtype
                if stored.size == parameter.shape:
                    states[key] = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
                else:
                    states[key] = torch.zeros(stored.size, dtype=dtype, device=parameter.device)
            if states and parameter in optimized:
                optimizer.state[parameter] = states


def load_tensors(tensors: Mapping[str, Tensor], reader: SafeReader) -> None:
    """Fill ``tensors`` in place by name, each process its shards. Raises where the checkpoint lacks one."""
    # DCP warns that it works without processes, which is what no_dist asks for.
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        load_distributed(dict(tensors), storage_reader=reader, no_dist=not dist.is_initialized())


def _save_tensors(tensors: dict[str, Tensor], folder: Path) -> None:
    try:
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            save_distributed(tensors, storage_writer=FileSystemWriter(folder), no_dist=not dist.is_initialized())
    except CheckpointException as error:
        _raise_interrupt(error)
        raise


def _raise_interrupt(error: CheckpointException) -> None:
    """Raise a KeyboardInterrupt or SystemExit that DCP wrapped."""
    for failure, _ in error.failures.values():
        if isinstance(failure, KeyboardInterrupt | SystemExit):
            raise failure from error


def _save(path: Path, content: Any) -> None:
    with open(path, "wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())


# --- reading DCP's index without running anything -------------------------------------------------------------------

_INDEX_TYPES = {
    ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "Metadata"),
    ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
    ("torch.distributed.checkpoint.metadata", "StorageMeta"),
    ("torch.distributed.checkpoint.metadata", "TensorProperties"),
    ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
}
"""What an index of tensors consists of. BytesStorageMetadata is not here: DCP unpickles what it describes, and that
runs code."""


class _IndexUnpickler(pickle.Unpickler):
    """Accepts the record types of DCP's index of tensors, dtypes and layouts."""

    def find_class(self, module: str, name: str) -> Any:
        is_record = (module, name) in _INDEX_TYPES
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_record or is_dtype:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"a checkpoint's index holds {module}.{name}")


class SafeReader(FileSystemReader):
    """DCP's reader, with an index that cannot run code or read files outside the checkpoint."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        """The index. Raises :class:`pickle.UnpicklingError` for one that names anything else than tensors inside."""
        with open(Path(self.path) / INDEX, "rb") as file:
            metadata = _IndexUnpickler(file).load()
        for entry in metadata.state_dict_metadata.values():
            if type(entry) is not TensorStorageMetadata:
                raise pickle.UnpicklingError("a checkpoint's index holds something else than tensors")
        root = Path(self.path).resolve()
        for storage in metadata.storage_data.values():
            if not (root / storage.relative_path).resolve().is_relative_to(root):
                raise pickle.UnpicklingError(f"a checkpoint's index names {storage.relative_path}, outside its folder")
        # As in DCP's own reader, which this method replaces.
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


# --- the folder of checkpoints --------------------------------------------------------------------------------------


def save_checkpoint(
    root: Path, step: int, write: Write, *, keep: int, reward: float | None = None, ranks: Ranks = SINGLE_PROCESS
) -> Path:
    """Let ``write`` fill a new folder in ``root``, add the manifest, and rename the folder to its final name.

    The ``keep`` newest checkpoints stay, and the one with the best evaluation. Every process must call. Raises
    :class:`SaveFailed` on every process where any could not write; earlier checkpoints are unchanged.
    """
    target = root / f"step-{step:08d}.ckpt"
    write_whole(target, step, write, reward=reward, ranks=ranks)
    # Old ones go once the new one is whole; one that cannot be removed does no harm.
    if ranks.is_rank_zero:
        for path in set(saved(root)[:-keep]) - {best(root)}:
            shutil.rmtree(path, ignore_errors=True)
    return target


def write_whole(
    target: Path, step: int, write: Write, *, reward: float | None = None, ranks: Ranks = SINGLE_PROCESS
) -> None:
    """Write a checkpoint, with its manifest, beside ``target``, and rename it; an earlier ``target`` is replaced.

    Every process must call. Raises :class:`SaveFailed` on every process where any could not write.
    """
    folder = target.with_suffix(UNFINISHED)

    def remove_unfinished() -> None:
        if folder.exists():
            shutil.rmtree(folder)

    try:
        ranks.on_rank_zero(remove_unfinished)
        write(folder)
        # Each process hashes the files that it wrote: together they read the checkpoint once.
        entries_of_ranks = ranks.gather(ranks.raise_on_all_ranks(lambda: _written_files(folder, ranks)))
        files: dict[str, Any] = {}
        for entries in entries_of_ranks:
            files |= entries
        content = {"format": FORMAT, "step": step, "processes": ranks.size, "reward": reward, "files": files}
        ranks.on_rank_zero(lambda: write_json(folder / MANIFEST, content))
        ranks.on_rank_zero(lambda: _replace(folder, target))
    except _WRITE_ERRORS as error:
        if ranks.is_rank_zero:
            shutil.rmtree(folder, ignore_errors=True)
        raise SaveFailed(_message(error)) from error


def _written_files(folder: Path, ranks: Ranks) -> dict[str, Any]:
    """The manifest's entries of the files that this process wrote.

    With a SHA-256, because torch reads a file of DCP or of ``torch.save`` with a flipped bit as other numbers.
    """
    paths = list(folder.glob(f"__{ranks.rank}_*.distcp"))
    paths.append(folder / f"rank-{ranks.rank}.pt")
    if ranks.is_rank_zero:
        paths += [folder / STATE, folder / INDEX]
    return {path.name: {"bytes": path.stat().st_size, "sha256": sha256_file(path)} for path in paths}


def newest_checkpoint(root: Path, ranks: Ranks = SINGLE_PROCESS, *, rename: bool = True) -> Path | None:
    """The newest undamaged checkpoint in ``root``, or None. Every process must call.

    Damaged ones are named in a warning and renamed to ``*.damaged``, if ``rename``.
    """
    paths = saved(root)
    if ranks.is_rank_zero:
        for path in sorted(set(root.glob("*.ckpt")).difference(paths)):
            log.warning(f"{path} is not a checkpoint name (step-NUMBER.ckpt) and is ignored")
    while paths:
        path = paths.pop()
        # Each rank checks its share of the files, and all must come to the same answer.
        faults = ranks.gather(ranks.raise_on_all_ranks(partial(damage, path, ranks=ranks)))
        faults = [fault for fault in faults if fault is not None]
        if not faults:
            return path
        if ranks.is_rank_zero:
            instead = "the one before" if paths else "the beginning: there is none before"
            log.warning(f"checkpoint {path} is damaged ({faults[0]}); resuming from {instead}")
            if rename:
                _rename_damaged(path)
    return None


def _rename_damaged(path: Path) -> None:
    """Put a damaged checkpoint aside for a person to look at; the name of its update is then free."""
    damaged = path.with_suffix(DAMAGED)
    try:
        shutil.rmtree(damaged, ignore_errors=True)
        path.rename(damaged)
    except OSError as error:
        log.warning(f"{path} cannot be renamed ({error.strerror}); it stays, unused")


def best(root: Path) -> Path | None:
    """The checkpoint with the highest evaluation reward, the newest of equals; None without an evaluated one."""
    best_reward = float("-inf")
    best_path = None
    for path in saved(root):  # oldest first, so that the newest of equals is the last
        try:
            reward = manifest(path).get("reward")
        except UserError as error:
            log.warning(f"{error}; this checkpoint cannot be the best one")
            continue
        if isinstance(reward, int | float) and reward >= best_reward:
            best_reward = reward
            best_path = path
    return best_path


# --- whether a checkpoint is whole ----------------------------------------------------------------------------------


def _is_mappings_by_name(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(item, dict) for item in value.values())


_MANIFEST_FIELDS = {
    "files": Field("a mapping for each file", _is_mappings_by_name),
    "step": Field("a count", is_count),
}


def manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint. Raises :class:`UserError` where it cannot be read."""
    return read_fields(path / MANIFEST, "manifest of a checkpoint", _MANIFEST_FIELDS)


def damage(path: Path, *, ranks: Ranks = SINGLE_PROCESS) -> str | None:
    """What is wrong with a checkpoint's files (this rank's share of them): missing, cut short, changed. Else None."""
    if not path.is_dir():
        return "it is not a folder; another version wrote it"
    try:
        content = manifest(path)
    except UserError:
        return f"no {MANIFEST} that can be read"
    fault = _manifest_fault(path, content)
    if fault is not None:
        return fault
    for name in ranks.split(sorted(content["files"])):
        if name is None:
            continue  # the split is padded to the same length on every rank
        fault = _file_fault(path / name, content["files"][name])
        if fault is not None:
            return fault
    return None


def _manifest_fault(path: Path, content: Mapping[str, Any]) -> str | None:
    if content.get("format") != FORMAT or not content["files"]:
        return f"no {MANIFEST} of format {FORMAT}"
    # Lightning's ModelCheckpoint names its folders in other ways.
    has_our_name = path in saved(path.parent)
    if has_our_name and content["step"] != step_of(path):
        return f"its {MANIFEST} is of update {content['step']}"
    for name in content["files"]:
        # A name with a separator would lead out of the folder.
        if not is_file_name(name):
            return f"its {MANIFEST} names what is not a file of it: {name[:100]!r}"
    return None


def _file_fault(file: Path, entry: Mapping[str, Any]) -> str | None:
    if not file.is_file():
        return f"{file.name} is missing"
    size = file.stat().st_size
    if size != entry.get("bytes"):
        return f"{file.name} has {size} bytes and should have {entry.get('bytes')}"
    if sha256_file(file) != entry.get("sha256"):
        return f"{file.name} was changed"
    return None


def _message(error: BaseException) -> str:
    """Why writing failed: the operating system's message where one is among the causes (DCP has one per process)."""
    system_error = _system_error(error)
    if system_error is not None:
        text = str(system_error.strerror)
        if system_error.filename:
            text += f": {system_error.filename}"
        return text[:MAX_ERROR_CHARACTERS]
    lines = str(error).strip().splitlines()
    text = lines[-1] if lines else type(error).__name__
    text = text[:MAX_ERROR_CHARACTERS]
    if "unexpected pos" in text:
        # torch's writer says so of a short file, where the system's error is lost with another process.
        return f"a file was cut short; no space left? ({text})"
    return text


def _system_error(error: BaseException) -> OSError | None:
    """The first error of the operating system among ``error`` and its causes, breadth first."""
    causes: list[BaseException] = [error]
    for cause in causes:  # grows meanwhile
        if isinstance(cause, OSError) and cause.strerror:
            return cause
        inner: list[BaseException | None] = []
        if isinstance(cause, CheckpointException):
            inner += [failure for failure, _ in cause.failures.values()]
        inner += [cause.__cause__, cause.__context__]
        for other in inner:
            if other is not None and other not in causes:
                causes.append(other)
    return None


def _replace(folder: Path, target: Path) -> None:
    """Rename ``folder`` durably; an earlier checkpoint of the same update is removed after that."""
    old = target.with_suffix(".old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    folder.rename(target)
    # Until the parent's entry is on disk, a power failure could leave neither of the two names.
    fsync_path(target.parent)
    shutil.rmtree(old, ignore_errors=True)
