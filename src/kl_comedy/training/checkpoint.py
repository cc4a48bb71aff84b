"""An optimizer's state as named tensors, whatever way its parameters lie over the processes.

Checkpoints as folders: written beside, checked by hashes, renamed when whole; the same for every strategy.

    checkpoints/step-00000010.ckpt/  manifest.json      every file with its size and SHA-256, who wrote it, the reward
                                     state.pt           loop, callbacks, stream, betas, schedules (plain data)
                                     rank-0.pt ...      each process's own random state
                                     .metadata  *.distcp   weights, optimizer, moving references: torch DCP, in shards

Nothing in it is a pickle of code: tensors and plain data load with ``weights_only=True``, and DCP's index through an
unpickler that knows its own record types only. Any number of processes can read what any other number wrote.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from kl_comedy.io import sha256_file
from kl_comedy.models.weights import named_weights
from kl_comedy.training.distributed import ALONE, RankFailed, World
from kl_comedy.training.run_folder import saved

States = list[dict[Any, dict[str, Any]]]
"""For each optimizer, by parameter, the state's tensors as they are held."""


def kept_states(module: nn.Module, optimizers: Sequence[Any]) -> States:
    """What the optimizers keep now."""
    found: States = []
    for optimizer in optimizers:
        own = {
            name: {key: value for key, value in optimizer.state[parameter].items() if isinstance(value, Tensor)}
            for name, parameter in module.named_parameters()
            if parameter in optimizer.state
        }
        parameters = dict(module.named_parameters())
        found.append({parameters[name]: dict(state) for name, state in own.items()})
    return found


def blank_states(module: nn.Module, optimizers: Sequence[Any], known: Mapping[str, Any]) -> States:
    """For each parameter the tensors that a checkpoint has for it, zero, laid out as the parameter is.

    ``known``: what the checkpoint says of each of its tensors, by name.
    """
    found: States = []
    for number, optimizer in enumerate(optimizers):
        mine = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        states: dict[Any, dict[str, Any]] = {}
        for name, parameter in module.named_parameters():
            if parameter in mine:
                start = f"optimizer.{number}.{name}."
                keys = [key for key in known if key.startswith(start) and "." not in key.removeprefix(start)]
                tensors = {key.removeprefix(start): _blank(parameter, known[key]) for key in keys}
                if tensors:
                    states[parameter] = tensors
        found.append(states)
    return found


def _blank(parameter: Tensor, facts: Any) -> Any:
    if facts.size == parameter.shape:
        return torch.zeros_like(parameter, dtype=facts.properties.dtype, requires_grad=False)
    return torch.zeros(facts.size, dtype=facts.properties.dtype)


def flat(states: States, module: nn.Module) -> dict[str, Any]:
    """``optimizer.<number>.<parameter>.<key>`` to tensor, in the order of the parameters, alike on all processes."""
    return {
        f"optimizer.{number}.{name}.{key}": value
        for number, state in enumerate(states)
        for name, parameter in module.named_parameters()
        if parameter in state
        for key, value in sorted(state[parameter].items())
    }


def give_back(optimizer: Any, state: Mapping[Any, Mapping[str, Any]]) -> None:
    """Let ``optimizer`` go on with ``state``."""
    for parameter, tensors in state.items():
        optimizer.state[parameter] = dict(tensors)


log = logging.getLogger("kl_comedy")

_WRITE_ERRORS = (OSError, RuntimeError, RankFailed, CheckpointException)

FORMAT = 1
MANIFEST, STATE, WRITING, DAMAGED = "manifest.json", "state.pt", ".tmp", ".damaged"
HASHED_AT_A_TIME = 1 << 24


class SaveFailed(Exception):
    """A checkpoint could not be written; what was there before still is."""


# --- what a checkpoint holds ---------------------------------------------------------------------------------------


def write_checkpoint(folder: Path, state: dict[str, Any], module: Any, optimizers: list[Any], world: World) -> None:
    """Write everything but the manifest into ``folder``. Raises :class:`SaveFailed` on every process, or on none."""
    state = dict(state)
    tensors = {**_weight_tensors(module), **flat(kept_states(module, optimizers), module)}
    own = dict(state.get("kl_comedy", {}))
    moving = own.pop("moving", {})
    own["moving"] = {name: {key: v for key, v in held.items() if key != "weights"} for name, held in moving.items()}
    tensors |= _reference_tensors(moving)
    ranked = {"torch_rng": own.pop("torch_rng", None)}
    state["kl_comedy"] = own
    state["param_groups"] = [
        [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        for optimizer in optimizers
    ]

    def write() -> None:
        _save(folder / f"rank-{world.rank}.pt", ranked)
        if world.first:
            _save(folder / STATE, state)

    try:
        world.together(lambda: folder.mkdir(parents=True) if world.first else None)
        world.together(write)
        world.together(lambda: _save_tensors(tensors, folder))
    except _WRITE_ERRORS as error:
        raise SaveFailed(reason(error)) from error


def read_checkpoint(folder: Path, module: Any, optimizers: list[Any], world: World) -> dict[str, Any]:
    """Load weights, optimizer and moving references in place; the rest is returned as Lightning wants it."""
    state: dict[str, Any] = torch.load(folder / STATE, weights_only=True, map_location="cpu")
    own_file = folder / f"rank-{world.rank}.pt"
    ranked = torch.load(own_file if own_file.exists() else folder / "rank-0.pt", weights_only=True, map_location="cpu")
    own = state["kl_comedy"]
    own["torch_rng"] = ranked["torch_rng"]
    reader = SafeReader(folder)
    known = reader.read_metadata().state_dict_metadata
    moving = {name: dict(module.references[name].state_dict()) for name in own["moving"]}
    states = blank_states(module, optimizers, known)
    wanted = {**_weight_tensors(module), **flat(states, module), **_reference_tensors(moving)}
    load_tensors(wanted, reader)
    for optimizer, groups, found in zip(optimizers, state.pop("param_groups"), states, strict=True):
        for group, kept in zip(optimizer.param_groups, groups, strict=True):
            group.update(kept)
        give_back(optimizer, found)
    own["moving"] = {name: {**own["moving"][name], "weights": held["weights"]} for name, held in moving.items()}
    return state


def load_tensors(wanted: Mapping[str, Any], reader: SafeReader) -> None:
    """Fill ``wanted`` in place, each process its shards."""
    read = dict(wanted)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(read, storage_reader=reader, no_dist=not dist.is_initialized())


def _weight_tensors(module: nn.Module) -> dict[str, Any]:
    return {f"model.{name}": tensor.detach() for name, tensor in named_weights(module)}


def _reference_tensors(moving: Mapping[str, Any]) -> dict[str, Any]:
    return {
        f"reference.{name}.{weight}": tensor
        for name, held in moving.items()
        for weight, tensor in held["weights"].items()
    }


def _save_tensors(tensors: Mapping[str, Any], folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            dcp.save(dict(tensors), storage_writer=dcp.FileSystemWriter(folder), no_dist=not dist.is_initialized())
        except CheckpointException as error:
            for failure in error.failures.values():
                if isinstance(failure[0], KeyboardInterrupt | SystemExit):  # DCP wraps these too
                    raise failure[0] from error
            raise


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
    """Knows the record types of DCP's index, dtypes and layouts; anything else is refused."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _INDEX_TYPES or (module == "torch" and isinstance(getattr(torch, name), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"a checkpoint's index holds {module}.{name}")


class SafeReader(dcp.FileSystemReader):
    """DCP's reader, but for the index, which is read without the power to call anything."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        with open(Path(self.path) / ".metadata", "rb") as file:
            metadata = _IndexUnpickler(file).load()
        if getattr(metadata, "storage_meta", None) is None:
            from torch.distributed.checkpoint.metadata import StorageMeta

            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


# --- the folder of checkpoints --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class CheckpointManager:
    """The checkpoints of a run: ``keep`` newest ones stay, and the one with the best evaluation."""

    root: Path
    keep: int
    world: World = ALONE

    def save(self, step: int, write: Callable[[Path], None], *, reward: float | None = None) -> Path:
        """Let ``write`` fill a folder, seal it with a manifest, and let it take its place.

        Raises :class:`SaveFailed` on every process where any could not write; earlier checkpoints are untouched.
        """
        target = self.root / f"step-{step:08d}.ckpt"
        folder = target.with_suffix(WRITING)
        try:
            self.world.together(lambda: _remove(folder) if self.world.first else None)
            write(folder)
            self._seal(folder, step, reward)
            self.world.together(lambda: _replace(folder, target) if self.world.first else None)
        except (*_WRITE_ERRORS, SaveFailed) as error:
            if self.world.first:
                shutil.rmtree(folder, ignore_errors=True)
            raise SaveFailed(reason(error)) from error
        if self.world.first:
            self._prune()
        return target

    def _seal(self, folder: Path, step: int, reward: float | None) -> None:
        """Each process hashes what it wrote itself; the first writes the manifest."""
        mine = self.world.together(lambda: {path.name: _entry(path) for path in self._written_here(folder)})
        files = {name: entry for found in self.world.gather(mine) for name, entry in found.items()}
        content = {"format": FORMAT, "step": step, "processes": self.world.size, "reward": reward, "files": files}

        def write() -> None:
            if self.world.first:
                with open(folder / MANIFEST, "w") as file:
                    json.dump(content, file, indent=1)
                    file.flush()
                    os.fsync(file.fileno())

        self.world.together(write)

    def _written_here(self, folder: Path) -> list[Path]:
        rank = self.world.rank
        shards = [*folder.glob(f"__{rank}_*.distcp"), folder / f"rank-{rank}.pt"]
        return [*shards, folder / STATE, folder / ".metadata"] if self.world.first else shards

    def newest(self) -> Path | None:
        """The newest whole checkpoint. Damaged ones are named in a warning and set aside, never used."""
        there = saved(self.root)
        for place, path in reversed(list(enumerate(there))):
            damage = self.world.together(lambda path=path: self._damage(path))  # type: ignore[misc]
            found = next((said for said in self.world.gather(damage) if said), None)
            if found is None:
                return path
            if self.world.first:
                on = "the one before" if place else "the beginning: there is none before"
                log.warning(f"checkpoint {path} is damaged ({found}); going on from {on}")
                _set_aside(path)
        return None

    def _damage(self, path: Path) -> str | None:
        """What is wrong with this rank's share of the files; None if nothing is."""
        return damage(path, share=self.world)

    def _prune(self) -> None:
        """Remove what is neither among the newest nor the best; failing to is not worth stopping for."""
        found = saved(self.root)
        stay = {*found[-self.keep :], best(self.root)}
        for path in found:
            if path not in stay:
                shutil.rmtree(path, ignore_errors=True)


def best(root: Path) -> Path | None:
    """The checkpoint with the highest evaluation reward, the newest of equals; None without an evaluated one."""
    rewards = {path: manifest(path).get("reward") for path in saved(root) if (path / MANIFEST).is_file()}
    evaluated = [(reward, path) for path, reward in rewards.items() if reward is not None]
    return max(evaluated)[1] if evaluated else None


def manifest(path: Path) -> dict[str, Any]:
    """The manifest, or an empty one where it cannot be read."""
    try:
        found: dict[str, Any] = json.loads((path / MANIFEST).read_text())
    except (OSError, ValueError):
        return {}
    return found


def damage(path: Path, *, share: World = ALONE) -> str | None:
    """What is wrong with a checkpoint's files (this rank's share of them): missing, cut short, changed."""
    if not path.is_dir():
        return "it is not a folder; another version wrote it"
    found = manifest(path)
    if found.get("format") != FORMAT or not found.get("files"):
        return f"no {MANIFEST} of format {FORMAT}"
    for name in filter(None, share.share(sorted(found["files"]))):
        file, entry = path / name, found["files"][name]
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != entry["bytes"]:
            return f"{name} has {file.stat().st_size} bytes and should have {entry['bytes']}"
        if sha256_file(file) != entry["sha256"]:
            return f"{name} was changed"
    return None


def reason(error: BaseException) -> str:
    """Why writing failed, in the words of the system where it spoke.

    Torch's writer says only that its file is shorter than it should be; the system's word is in the chain of causes,
    in DCP's one chain per process, and lost where that process was another one.
    """
    inside = [failure[0] for failure in error.failures.values()] if isinstance(error, CheckpointException) else []
    for inner in _chain(error, *inside):
        if isinstance(inner, OSError) and inner.strerror:
            return inner.strerror + (f": {inner.filename}" if inner.filename else "")
    text = (str(error).strip().splitlines() or [type(error).__name__])[-1]
    return f"a file was cut short; no space left? ({text})" if "unexpected pos" in text else text


def _chain(*errors: BaseException | None) -> Iterator[BaseException]:
    """Errors with what they came from, each once."""
    seen: set[int] = set()
    waiting = list(errors)
    while waiting:
        error = waiting.pop(0)
        if error is not None and id(error) not in seen:
            seen.add(id(error))
            yield error
            waiting += [error.__cause__, error.__context__]


def _entry(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": sha256_file(path)}


def _feed(digest: Any, file: IO[bytes]) -> None:
    while piece := file.read(HASHED_AT_A_TIME):
        digest.update(piece)


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def _replace(folder: Path, target: Path) -> None:
    """Rename, and make the rename last. A whole checkpoint of the same update goes only once the new one is there."""
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


def _set_aside(path: Path) -> None:
    other = path.with_suffix(DAMAGED)
    try:
        _remove(other)
        path.rename(other)
    except OSError as error:
        log.warning(f"{path} cannot be renamed ({error.strerror}); it stays, unused")
