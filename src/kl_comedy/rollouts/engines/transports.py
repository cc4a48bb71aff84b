"""How weights travel from rank 0 to the engines. A run has one :class:`Transport`; ``options.transport_of`` picks it.

    weights (all ranks walk them) -> stage (rank 0, once) -> send (to each server) -> checksums (of what it has)

Each server is sent to by itself: one that is lost in the middle of a transfer costs the others nothing.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import hmac
import json
import os
import pickle
import queue
import secrets
import shutil
import socket
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from kl_comedy.cuda import shareable_memory
from kl_comedy.models import LoadedModel
from kl_comedy.models.lora import is_lora_factor
from kl_comedy.models.weights import Checksums, adapter_weights, full_weights
from kl_comedy.rollouts.engines.weights import (
    Probe,
    StagedWeights,
    Weights,
    hashed,
    vocabulary_of,
    write_config,
    write_weights,
)

ADAPTER = "adapter"
"""Name under which a vLLM server has the adapter, and its folder in a checkpoint."""
WORKER = "kl_comedy.rollouts.engines.vllm_worker"
"""The module that vLLM's workers import (by its name only: here vLLM may be absent)."""
SOCKET_BACKEND = "kl_gloo"
"""Name of :class:`SocketTransport` among vLLM's weight-transfer engines; frozen by commands that start servers."""
POLL_S = 0.05
STALL_LIMIT_S = 120.0
"""Seconds for one tensor, after which a transfer is given up, and its server restarted."""
SECRET_BYTES = 32
GREETING_S = 10.0
"""How long a connection may take to prove that it is a worker."""


class Peer(Protocol):
    """A server, as a transport needs it: :class:`~kl_comedy.rollouts.engines.client.Client`."""

    host: str
    timeout_s: float

    def call(self, path: str, **body: Any) -> Any: ...
    def get(self, path: str) -> Any: ...


class Transport(Protocol):
    """How weights travel: staged once, then sent to each server. By default they wait in host memory."""

    environment: Mapping[str, str] = {}
    """Variables that a vLLM server needs to take them."""

    def weights(self, model: nn.Module, dtype: torch.dtype) -> Weights:
        """What is staged. Of a sharded policy every rank must walk it to its end, in step."""
        return full_weights(model, dtype)

    def stage(self, loaded: LoadedModel, weights: Weights, folder: Path) -> Mapping[str, Tensor]:
        """Make ``folder`` one that a server can be started on; what travels from memory.

        ``weights`` are copies in host memory; tied ones are one tensor under several names.
        """
        write_config(loaded, folder)
        return dict(weights)

    def vllm_settings(self, folder: Path) -> dict[str, Any]:
        """Command line of a vLLM server, by name, beside what every one has."""
        return {}

    def send(self, weights: StagedWeights, server: Peer) -> None:
        """Replace the weights of a paused server. Raises what its calls raise, and :class:`RuntimeError`."""
        ...

    def checksums(self, server: Peer) -> dict[str, str]:
        """SHA-256 of the weights that the server computes with, by name."""
        checksums: dict[str, str] = server.call("/weight_checker", action="checksum")["checksums"]
        return checksums


class FolderTransport(Transport):
    """On disk: the servers read a checkpoint folder."""

    def stage(self, loaded: LoadedModel, weights: Weights, folder: Path) -> Mapping[str, Tensor]:
        write_weights(loaded, weights, folder)
        return {}

    def send(self, weights: StagedWeights, server: Peer) -> None:
        server.call("/collective_rpc", method="reload_weights", kwargs={"weights_path": str(weights.folder)})


class AdapterTransport(Transport):
    """A LoRA adapter alone, on disk, to vLLM. The base is written once, into the checkpoint that servers start on.

    The folder of a version is a whole checkpoint: links to the files of the base, and the folder ``adapter``.
    """

    def __init__(self) -> None:
        self._walked_base = False
        self._newest: Path | None = None
        self._first_adapter: Path | None = None
        self._rank, self._targets = 0, list[str]()

    def weights(self, model: nn.Module, dtype: torch.dtype) -> Weights:
        if not self._walked_base:
            self._walked_base = True
            yield from full_weights(model, dtype, adapter=False)
        yield from adapter_weights(model, dtype)

    def stage(self, loaded: LoadedModel, weights: Weights, folder: Path) -> Mapping[str, Tensor]:
        factors: dict[str, Tensor] = {}

        def base() -> Weights:
            for name, tensor in weights:
                if is_lora_factor(name):
                    factors[f"base_model.model.{name}.weight"] = tensor
                else:
                    yield name, tensor

        if self._newest is None:
            write_weights(loaded, base(), folder)
        else:
            link_checkpoint(self._newest, folder)
            assert not list(base()), "the base comes once"
        self._newest = folder
        self._write_adapter(loaded.model, factors, folder / ADAPTER)
        return {}

    def expect(self, model: nn.Module, folder: Path) -> None:
        """Let a server start before there is anything to send: on an adapter in ``folder`` that changes nothing.

        ``model`` has an adapter; its weights are not read, and may be on the meta device.
        """
        zeros = {name: torch.zeros(tensor.shape) for name, tensor in adapter_weights(model)}
        self._first_adapter = folder
        self._write_adapter(model, {f"base_model.model.{name}.weight": each for name, each in zeros.items()}, folder)

    def _write_adapter(self, model: Any, factors: dict[str, Tensor], folder: Path) -> None:
        from safetensors.torch import save_file

        settings = copy.copy(model.peft_config["default"])
        self._rank, self._targets = settings.r, sorted(settings.target_modules)
        settings.lora_alpha = settings.r  # the scaling is part of B
        settings.save_pretrained(folder)
        save_file(factors, folder / "adapter_model.safetensors", metadata={"format": "pt"})

    def vllm_settings(self, folder: Path) -> dict[str, Any]:
        return {
            "enable_lora": True,
            "max_loras": 1,
            "max_lora_rank": vllm_rank(self._rank),
            "lora_target_modules": self._targets,  # by default vLLM wraps the head too, and a probe then breaks a CPU
            "lora_modules": json.dumps({"name": ADAPTER, "path": str(self._first_adapter or folder / ADAPTER)}),
            "worker_extension_cls": f"{WORKER}.PolicyWorker",
        }

    def send(self, weights: StagedWeights, server: Peer) -> None:
        server.call("/collective_rpc", method="load_policy_adapter", kwargs={"path": str(weights.folder / ADAPTER)})

    def checksums(self, server: Peer) -> dict[str, str]:
        workers = server.call("/collective_rpc", method="policy_checksums")["results"]
        return {name: digest for worker in workers for name, digest in worker.items()}


class SocketTransport(Transport):
    """From memory, over a TCP connection with each worker of one server that lasts for one transfer.

    Its name in a config is ``gloo``, which carried the weights first. A gloo group, and the store where its members
    meet, take whoever connects first; here a connection gets nothing before it has proved to know the secret of the
    transfer, which the server learned over HTTP, where the key is wanted.
    """

    def vllm_settings(self, folder: Path) -> dict[str, Any]:
        return {**_from_memory(SOCKET_BACKEND), "worker_extension_cls": f"{WORKER}.PolicyWorker"}

    def send(self, weights: StagedWeights, server: Peer) -> None:
        """A thread sends while the request waits for the answer that all weights have arrived."""
        limit_s = min(server.timeout_s, STALL_LIMIT_S)
        tensors, aliases = untied(weights.tensors)
        workers = worker_count(server)
        host = own_address(server.host)
        secret = secrets.token_hex(SECRET_BYTES)
        answered = threading.Event()
        ended: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

        def transfer(listener: socket.socket) -> None:
            connections: dict[int, socket.socket] = {}
            try:
                accept_workers(listener, secret, range(1, 1 + workers), connections, answered)
                for connection in connections.values():
                    connection.settimeout(limit_s)
                for tensor in tensors.values():
                    for connection in connections.values():
                        connection.sendall(memory_of(tensor))
                ended.put(None)
            except Exception as error:
                ended.put(error)
            finally:
                for connection in connections.values():
                    connection.close()

        with socket.create_server((host, 0)) as listener:
            address = {"host": host, "port": listener.getsockname()[1], "secret": secret, "timeout_s": limit_s}
            server.call("/init_weight_transfer_engine", init_info=address)
            start_update(server.call)
            threading.Thread(target=transfer, args=(listener,), daemon=True, name="weights").start()
            try:
                server.call("/update_weights", update_info={**described(tensors), "aliases": aliases})
            finally:
                answered.set()
            if (error := ended.get()) is not None:
                raise error
        server.call("/finish_weight_update")


class NCCLTransport(Transport):
    """Between GPUs, by vLLM's own trainer and worker engines; a tensor is on rank 0's GPU while it is sent."""

    packed = True

    def __init__(self, device: torch.device) -> None:
        self._device, self._one_at_a_time = device, threading.Lock()  # two communicators at once can block each other
        self._engines: Any = weakref.WeakKeyDictionary()

    def vllm_settings(self, folder: Path) -> dict[str, Any]:
        return _from_memory("nccl")

    def send(self, weights: StagedWeights, server: Peer) -> None:
        """NCCL waits without a limit: a thread sends, and its group is aborted where a call fails or it is late."""
        ended: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        calls = _VLLMCalls(server, report=ended.put)
        source = _Source(untied(weights.tensors)[0], self._device)
        engines = [self._engines.pop(server)] if server in self._engines else []

        def transfer() -> None:
            try:
                with torch.cuda.device(self._device):
                    if not engines:
                        engines.append(self._connect(server, calls, source))
                    engines[0].client, engines[0].source = calls, source
                    engines[0].send_weights()
                ended.put(None)
            except Exception as error:
                ended.put(error)
                if calls.given_up:
                    abort()

        def abort() -> None:
            for engine in engines:
                engine.shutdown()

        with self._one_at_a_time:
            threading.Thread(target=transfer, daemon=True, name="nccl transfer").start()
            try:
                error = ended.get(timeout=server.timeout_s)
            except queue.Empty:
                error = RuntimeError(f"nccl did not end within {server.timeout_s:g} s")
            if error is not None:
                calls.given_up = True
                abort()
                raise error
            self._engines[server] = engines[0]

    def _connect(self, server: Peer, calls: _VLLMCalls, source: _Source) -> Any:
        """vLLM's trainer side, in a group with the server's workers.

        The group's id, which NCCL wants of whoever joins, goes over HTTP, where the key is wanted. vLLM's own way is a
        store without a key, where the first process that connects could take a worker's place.
        """
        from vllm.distributed.weight_transfer import nccl_common as common
        from vllm.distributed.weight_transfer import nccl_engine as vllm

        unique_id = new_nccl_id()
        size = 1 + worker_count(server)
        engine = vllm.NCCLTrainerWeightTransferEngine(client=calls, source=source, packed=self.packed)
        info = vllm.NCCLWeightTransferInitInfo(
            nccl_unique_id_b64=base64.b64encode(unique_id).decode(),
            rank_offset=1,
            world_size=size,
            packed=engine.packed,
            packed_buffer_size_bytes=engine.packed_buffer_size_bytes,
            packed_num_buffers=engine.packed_num_buffers,
        )
        with ThreadPoolExecutor(1, thread_name_prefix="nccl init") as pool:  # both sides wait for each other in it
            joined = pool.submit(calls.init_weight_transfer_engine, common.worker_init_payload(info))
            device = torch.cuda.current_device()
            engine.model_update_group = common.uid_init_process_group(unique_id, 0, size, device)
            joined.result()
        return engine


def new_nccl_id() -> bytes:
    """The id of a new NCCL group of which this process is rank 0. It has a random part that NCCL checks."""
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

    return bytes(NCCLLibrary().ncclGetUniqueId().internal)


class IPCTransport(Transport):
    """On one GPU: vLLM's worker opens the memory of rank 0, which holds a second copy of the weights meanwhile.

    vLLM's trainer side is not used: it gathers over all ranks, and here rank 0 alone sends.
    """

    environment: Mapping[str, str] = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}  # pickled handles; routes want the key

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def vllm_settings(self, folder: Path) -> dict[str, Any]:
        return _from_memory("ipc")

    def send(self, weights: StagedWeights, server: Peer) -> None:
        from torch.multiprocessing import reductions

        cuda: Any = torch.cuda
        reduce_tensor: Any = reductions.reduce_tensor
        calls = _VLLMCalls(server)
        with torch.cuda.device(self._device):
            with shareable_memory():
                shared = {name: tensor.to(self._device) for name, tensor in untied(weights.tensors)[0].items()}
            torch.cuda.synchronize()
            gpu = str(torch.cuda.get_device_properties(self._device).uuid)
            handles = [{gpu: reduce_tensor(tensor)[1]} for tensor in shared.values()]
            pickled = base64.b64encode(pickle.dumps(handles)).decode()
            calls.init_weight_transfer_engine({"packed": False})
            calls.start_weight_update()
            calls.update_weights({**described(shared), "ipc_handles_pickled": pickled})
            calls.finish_weight_update()
            del shared
            cuda.ipc_collect()


TRANSPORTS: Mapping[str, Callable[[torch.device], Transport]] = {
    "folder": lambda device: FolderTransport(),
    "adapter": lambda device: AdapterTransport(),
    "gloo": lambda device: SocketTransport(),
    "nccl": NCCLTransport,
    "ipc": IPCTransport,
}


def stage(
    transport: Transport,
    loaded: LoadedModel,
    weights: Weights,
    folder: Path,
    version: int,
    probe: Probe | None,
    known: Mapping[str, str],
) -> StagedWeights:
    """Stage ``weights`` of the policy for engines, hashing each as it passes (fused ones as one, as vLLM does).

    ``known``: checksums of weights that were staged before and are not among these.
    """
    checksums = Checksums(fused=True)
    tensors = transport.stage(loaded, hashed(_host_copies(weights), checksums), folder)
    digests = {**known, **checksums.hexdigests()}
    return StagedWeights(folder, version, tensors, digests, vocabulary_of(loaded), probe)


def _host_copies(weights: Weights) -> Weights:
    """Copies in host memory; of tied weights, which follow each other, one."""
    last, host = None, None
    for name, tensor in weights:
        if host is None or tensor is not last:
            last, host = tensor, tensor.to("cpu", copy=True).contiguous()
        yield name, host


def untied(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Every tensor once under its first name, and that name by each further one.

    >>> tensor = torch.zeros(1)
    >>> untied({"embed": tensor, "head": tensor})
    ({'embed': tensor([0.])}, {'head': 'embed'})
    """
    first: dict[int, str] = {}
    for name, tensor in tensors.items():
        first.setdefault(id(tensor), name)
    names = {name: first[id(tensor)] for name, tensor in tensors.items()}
    aliases = {name: original for name, original in names.items() if name != original}
    return {name: tensor for name, tensor in tensors.items() if name not in aliases}, aliases


def described(tensors: Mapping[str, Tensor]) -> dict[str, list[Any]]:
    """Names, dtypes and shapes in their order, as vLLM's engines want them."""
    return {
        "names": list(tensors),
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
    }


def worker_count(server: Peer) -> int:
    """Processes of a server that each take the weights."""
    return int(server.get("/get_world_size")["world_size"])


def start_update(call: Callable[[str], Any]) -> None:
    """Begin an update; end one before whose trainer was lost, which vLLM would wait for."""
    try:
        call("/start_weight_update")
    except Exception as error:
        try:
            call("/finish_weight_update")
        except Exception:
            raise error from None
        call("/start_weight_update")


def own_address(host: str) -> str:
    """The address of this machine on the way to ``host``.

    >>> own_address("127.0.0.1")
    '127.0.0.1'
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing
        return str(probe.getsockname()[0])


@dataclass(kw_only=True)
class TrainerAddress:
    """Where a worker meets rank 0, what both must know, and how long the worker waits for a tensor."""

    host: str
    port: int
    secret: str = field(repr=False)
    timeout_s: float


def accept_workers(
    listener: socket.socket,
    secret: str,
    ranks: Collection[int],
    connections: dict[int, socket.socket],
    answered: threading.Event,
) -> None:
    """Fill ``connections`` with those of ``ranks`` that prove to know ``secret``; close every other one.

    Each is asked in a thread of its own: one that says nothing keeps no other waiting. Raises :class:`RuntimeError`
    where the server has ``answered`` before all its workers were there.
    """
    complete = threading.Lock()
    listener.settimeout(POLL_S)

    def greet(connection: socket.socket) -> None:
        rank = None
        with contextlib.suppress(OSError):  # it left, or was silent
            connection.settimeout(GREETING_S)
            rank = prove_to_worker(connection, secret)
        with complete:
            if rank is not None and rank in ranks and rank not in connections:
                connections[rank] = connection
            else:
                connection.close()

    while len(connections) < len(ranks):
        if answered.is_set():
            raise RuntimeError("the server answered without taking the weights")
        with contextlib.suppress(TimeoutError):
            connection, _ = listener.accept()
            threading.Thread(target=greet, args=(connection,), daemon=True, name="greeting").start()


def prove_to_worker(connection: socket.socket, secret: str) -> int | None:
    """Rank 0's side of a greeting: the rank of the worker, None for one that does not know ``secret``.

    Both sides prove it by an HMAC over both challenges; neither sends it. Rank 0 answers proofs only.
    """
    challenge = secrets.token_bytes(SECRET_BYTES)
    connection.sendall(challenge)
    rank_bytes = received(connection, 4)
    worker_challenge = received(connection, SECRET_BYTES)
    expected = proof(secret, b"worker", rank_bytes, challenge, worker_challenge)
    if not hmac.compare_digest(received(connection, len(expected)), expected):
        return None
    connection.sendall(proof(secret, b"trainer", rank_bytes, challenge, worker_challenge))
    return int.from_bytes(rank_bytes, "big")


def connect_to_trainer(address: TrainerAddress, rank: int) -> socket.socket:
    """A worker's side of a greeting. Raises :class:`RuntimeError` where the other side does not know the secret."""
    connection = socket.create_connection((address.host, address.port), timeout=address.timeout_s)
    try:
        challenge = received(connection, SECRET_BYTES)
        worker_challenge = secrets.token_bytes(SECRET_BYTES)
        rank_bytes = rank.to_bytes(4, "big")
        worker_proof = proof(address.secret, b"worker", rank_bytes, challenge, worker_challenge)
        connection.sendall(rank_bytes + worker_challenge + worker_proof)
        expected = proof(address.secret, b"trainer", rank_bytes, challenge, worker_challenge)
        if not hmac.compare_digest(received(connection, len(expected)), expected):
            raise RuntimeError("what listens in the trainer's place does not know the secret of the transfer")
    except BaseException:
        connection.close()
        raise
    return connection


def proof(secret: str, side: bytes, rank: bytes, *challenges: bytes) -> bytes:
    """All parts but ``side``, which comes first, have a fixed length, so that no two messages are the same bytes."""
    return hmac.digest(bytes.fromhex(secret), b"|".join((side, rank + b"".join(challenges))), "sha256")


def received(connection: socket.socket, size: int) -> bytes:
    """The next ``size`` bytes. Raises OSError where the other side leaves, or says nothing in time."""
    data = bytearray(size)
    receive_into(connection, memoryview(data))
    return bytes(data)


def receive_into(connection: socket.socket, memory: memoryview) -> None:
    """Fill ``memory``. Raises as :func:`received`."""
    while memory:
        count = connection.recv_into(memory)
        if count == 0:
            raise ConnectionError("the other side closed the connection")
        memory = memory[count:]


def receive(address: TrainerAddress, rank: int, info: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The receiving side of :class:`SocketTransport`: every weight under each of its names, in the order of ``info``.

    ``rank`` counts the server's workers from 1.
    """
    names_of: dict[str, list[str]] = {name: [name] for name in info["names"]}
    for alias, name in info["aliases"].items():
        names_of[name].append(alias)
    with connect_to_trainer(address, rank) as connection:
        for name, dtype, shape in zip(info["names"], info["dtype_names"], info["shapes"], strict=True):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device="cpu")
            receive_into(connection, memory_of(tensor))
            yield from ((each, tensor) for each in names_of[name])


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory, not copied."""
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def link_checkpoint(source: Path, folder: Path) -> None:
    """Make ``folder`` have the files of ``source`` without its adapter: links, or copies where there can be none."""

    def link(old: str, new: str) -> None:
        try:
            os.link(old, new)
        except OSError:
            shutil.copy2(old, new)

    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.copytree(source, temporary, copy_function=link, ignore=shutil.ignore_patterns(ADAPTER))
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)


VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


def vllm_rank(rank: int) -> int:
    """The smallest ``--max-lora-rank`` that vLLM knows and that is enough; it refuses ranks above the last.

    >>> vllm_rank(4), vllm_rank(1000)
    (8, 512)
    """
    return next((each for each in VLLM_RANKS if each >= rank), VLLM_RANKS[-1])


def _from_memory(backend: str) -> dict[str, Any]:
    """Settings of a vLLM server that starts without weights and takes them by ``backend``."""
    return {"load_format": "dummy", "weight_transfer_config": json.dumps({"backend": backend})}


class _VLLMCalls:
    """The four calls that vLLM's trainer side makes of a server. ``report`` gets what one raises, before it does."""

    def __init__(self, server: Peer, report: Callable[[Exception], None] = lambda error: None) -> None:
        self._server, self._report, self.given_up = server, report, False

    def _call(self, call: Callable[..., Any], *path: Any, **body: Any) -> None:
        if self.given_up:
            raise RuntimeError("the transfer was given up")
        try:
            call(*path, **body)
        except Exception as error:
            self._report(error)
            raise

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._call(self._server.call, "/init_weight_transfer_engine", init_info=init_info)

    def start_weight_update(self) -> None:
        self._call(start_update, self._server.call)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._call(self._server.call, "/update_weights", update_info=update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._call(self._server.call, "/finish_weight_update")


@dataclass(frozen=True)
class _Meta:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class _Source:
    """Staged weights as vLLM's trainer side walks them, each on the GPU while it is sent."""

    def __init__(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        self._tensors, self._device = tensors, device

    def metadata(self) -> Sequence[_Meta]:
        return [_Meta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self._tensors.items()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, tensor.to(self._device)) for name, tensor in self._tensors.items())
