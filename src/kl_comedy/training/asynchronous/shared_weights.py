"""The published weights in memory that two processes share: one copy, written and read tensor by tensor.

The writer replaces the copy in place, so memory is bounded by one model whatever the lag. A file lock, which the kernel
releases when its process dies, keeps a reader from seeing parts of two versions. The memory has no name: it is freed
with the processes, however they end.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import mmap
import os
import struct
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from kl_comedy.errors import RunFailed
from kl_comedy.models.weights import Bucket, named_weights, stream_weights

_HEADER = struct.Struct("=q32s")
_BEATS = struct.Struct("=q")
_BEATS_AT = 128
_ALIGN = 64
_START = 256
BEAT_S = 0.5
"""Seconds between heartbeats of the sampler."""
LOCK_LIMIT_S = 300.0
"""Seconds to wait for the other process to finish a copy."""


class WeightsLocked(RunFailed):
    """The other process has locked the weights for longer than the limit."""


class SharedWeights:
    """Shared memory for the weights of one model; both sides build it from a model of the same names and shapes."""

    def __init__(self, model: Any, fd: int | None = None) -> None:
        self._layout: dict[str, tuple[int, torch.Size, torch.dtype]] = {}
        digest, end = hashlib.sha256(), _START
        for name, tensor in named_weights(model):
            digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
            self._layout[name] = (end, tensor.shape, tensor.dtype)
            end += -(-tensor.numel() * tensor.element_size() // _ALIGN) * _ALIGN
        self._digest = digest.digest()
        self._trained = {name for name, tensor in model.named_parameters() if tensor.requires_grad}
        self.fd = _anonymous(end) if fd is None else fd
        self._map = mmap.mmap(self.fd, end)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    def publish(self, model: Any, version: int, *, limit_s: float = LOCK_LIMIT_S) -> None:
        """Copy the weights in and store their version. Frozen weights are copied the first time only.

        Raises :class:`WeightsLocked`, having changed nothing, where the reader does not unlock within ``limit_s``.
        """
        first = self._header()[1] != self._digest
        with self._locked(limit_s):
            for bucket in stream_weights(model):
                for name, tensor in bucket:
                    if first or name in self._trained:
                        self._view(name).copy_(tensor)
            _HEADER.pack_into(self._map, 0, version, self._digest)

    def version(self) -> int:
        """Of the published weights."""
        return self._header()[0]

    def beats(self) -> int:
        """Heartbeats of the reader so far; needs no lock."""
        return int(_BEATS.unpack_from(self._map, _BEATS_AT)[0])

    def buckets(self, *, everything: bool) -> Iterator[Bucket]:
        """The weights as views of the shared memory, valid within :meth:`reading` only."""
        for name in self._layout:
            if everything or name in self._trained:
                yield [(name, self._view(name))]

    @contextlib.contextmanager
    def reading(self) -> Iterator[int]:
        """Lock the weights; yields their version. Raises :class:`RunFailed` where they are another model's."""
        with self._locked():
            version, digest = self._header()
            if digest != self._digest:
                raise RunFailed("the sampler's model has other weights (names or shapes) than the learner's")
            yield version

    def close(self) -> None:
        """Free this process's mapping of the memory."""
        del self._bytes
        with contextlib.suppress(BufferError):
            self._map.close()
        os.close(self.fd)

    def _header(self) -> tuple[int, bytes]:
        version, digest = _HEADER.unpack_from(self._map, 0)
        return version, digest

    def _view(self, name: str) -> Tensor:
        start, shape, dtype = self._layout[name]
        count = shape.numel() * dtype.itemsize
        return self._bytes[start : start + count].view(dtype).view(shape)

    @contextlib.contextmanager
    def _locked(self, limit_s: float = LOCK_LIMIT_S) -> Iterator[None]:
        deadline = time.monotonic() + limit_s
        while True:
            try:
                fcntl.lockf(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    raise WeightsLocked(f"the shared weights were held by another process for {limit_s:g} s") from error
                time.sleep(0.001)
        try:
            yield
        finally:
            fcntl.lockf(self.fd, fcntl.LOCK_UN)


def start_heartbeat(fd: int) -> None:
    """Increase the heartbeat count of the shared memory every :data:`BEAT_S`, from a thread that ends with the process.

    Works before the model is loaded.
    """
    memory = mmap.mmap(fd, _START)

    def beat() -> None:
        while True:
            (count,) = _BEATS.unpack_from(memory, _BEATS_AT)
            _BEATS.pack_into(memory, _BEATS_AT, count + 1)
            time.sleep(BEAT_S)

    threading.Thread(target=beat, daemon=True, name="heartbeat").start()


@torch.no_grad()
def load_from(shared: SharedWeights, model: Any, *, everything: bool) -> int:
    """Copy the published weights into ``model``, one tensor at a time; their version."""
    weights = dict(named_weights(model))
    with shared.reading() as version:
        for bucket in shared.buckets(everything=everything):
            for name, tensor in bucket:
                weights[name].copy_(tensor)
    return version


def _anonymous(size: int) -> int:
    """A file descriptor of memory without a name. Raises :class:`RunFailed` where there is not enough."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("kl_comedy_weights")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    try:
        os.posix_fallocate(fd, 0, size) if hasattr(os, "posix_fallocate") else os.ftruncate(fd, size)
    except OSError as error:
        os.close(fd)
        raise RunFailed(
            f"no room for the {size / 2**20:.0f} MiB of weights that the sampler shares: {error.strerror}"
        ) from error
    return fd
