"""How weights travel from rank 0 to the engines. A run has one :class:`Transport`, by ``options.transport_of``.

    weights (all ranks walk them) -> stage (rank 0, once) -> send (to each server) -> checksums (of what it has)

Weights are sent to each server separately: one that is lost in the middle of a transfer does not stop the others.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import hmac
import itertools
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
from kl_comedy.models.weights import BUCKET_BYTES, Bucket, Checksums, adapter_weights, full_weights, in_buckets
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
"""The module that vLLM's workers import. It is never imported here, where vLLM may be absent."""
SOCKET_BACKEND = "kl_gloo"
"""Name of :class:`SocketTransport` among vLLM's weight-transfer engines. Commands that people start servers with have
it, so that it cannot change."""
POLL_S = 0.05
STALL_LIMIT_S = 120.0
"""Seconds for one tensor after which a transfer is given up and its server restarted."""
SECRET_BYTES = 32
GREETING_S = 10.0
"""How long a connection may take to prove that it is a worker."""
DISCARD_PORT = 9
"""Any port would do: a UDP socket that is connected and not written to sends nothing."""
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM allows as ``--max-lora-rank``."""


class Peer(Protocol):
    """What a transport needs of a server: :class:`~kl_comedy.rollouts.engines.client.Client` has it."""

    host: str
    timeout_s: float

    def call(self, path: str, **body: Any) -> Any: ...
    def get(self, path: str) -> Any: ...


class Transport(Protocol):
    """How weights travel: staged once, then sent to each server. By default they are staged in host memory."""

    environment: Mapping[str, str] = {}
    """Variables that a vLLM server needs to take them."""

    def weights(self, model: nn.Module, dtype: torch.dtype) -> Weights:
        """What is staged. Every rank must walk it to its end, in step, because gathering shards is collective."""
        return full_weights(model, dtype)

    def stage(self, loaded: LoadedModel, weights: Weights, folder: Path) -> Mapping[str, Tensor]:
        """Write ``folder``, on which a server can be started; returns the weights that travel from memory.

        ``weights`` are copies in host memory; tied ones are one tensor under several names. Raises OSError.
        """
        write_config(loaded, folder)
        return dict(weights)

    def vllm_settings(self, folder: Path) -> dict[str, Any]:
        """Arguments of a vLLM server's command line, by name, in addition to those of every server."""
        return {}

    def send(self, weights: StagedWeights, server: Peer) -> None:
        """Replace the weights of a paused server. Raises what its calls raise, :class:`RuntimeError` and OSError."""
        ...

    def checksums(self, server: Peer) -> dict[str, str]:
        """SHA-256 of the weights that the server computes with, by name."""
        checksums: dict[str, str] = server.call("/weight_checker", action="checksum")["checksums"]
        return checksums


class FolderTransport(Transport):
    """On disk: servers read a checkpoint folder."""

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
        # On every rank: whether weights() still has to walk the base.
        self._base_was_walked = False
        # On rank 0: the newest checkpoint, whose base the next one links to.
        self._newest: Path | None = None
        self._first_adapter: Path | None = None
        # Of the adapter, for the command line.
        self._rank = 0
        self._targets: list[str] = []

    def weights(self, model: nn.Module, dtype: torch.dtype) -> Weights:
        if not self._base_was_walked:
            self._base_was_walked = True
            yield from full_weights(model, dtype, adapter=False)
        yield from adapter_weights(model, dtype)

    def stage(self, loaded: LoadedModel, weights: Weights, folder: Path) -> Mapping[str, Tensor]:
        factors: dict[str, Tensor] = {}

        # A generator, so that the base is written shard by shard and never whole in host memory.
        def base_weights() -> Weights:
            for name, tensor in weights:
                if is_lora_factor(name):
                    factors[_peft_name(name)] = tensor
                else:
                    yield name, tensor

        if self._newest is None:
            write_weights(loaded, base_weights(), folder)
        else:
            link_checkpoint(self._newest, folder)
            assert not list(base_weights()), "the base comes once"
        self._newest = folder
        self._write_adapter(loaded.model, factors, folder / ADAPTER)
        return {}

    def expect(self, model: nn.Module, folder: Path) -> None:
        """Let a server start before there is anything to send, on an adapter in ``folder`` that changes nothing.

        ``model`` has an adapter; its weights are not read, and may be on the meta device.
        """
        zeros = {_peft_name(name): torch.zeros(tensor.shape) for name, tensor in adapter_weights(model)}
        self._first_adapter = folder
        self._write_adapter(model, zeros, folder)

    def _write_adapter(self, model: Any, factors: dict[str, Tensor], folder: Path) -> None:
        from safetensors.torch import save_file

        # A copy: the trainer still computes with its own alpha.
        settings = copy.copy(model.peft_config["default"])
        self._rank = settings.r
        self._targets = sorted(settings.target_modules)
        # adapter_weights has multiplied B by alpha / r: vLLM must multiply by 1.
        settings.lora_alpha = settings.r
        settings.save_pretrained(folder)
        save_file(factors, folder / "adapter_model.safetensors", metadata={"format": "pt"})

    def vllm_settings(self, folder: Path) -> dict[str, Any]:
        first_adapter = self._first_adapter or folder / ADAPTER
        return {
            "enable_lora": True,
            "max_loras": 1,
            "max_lora_rank": vllm_rank(self._rank),
            # By default vLLM wraps the head too; on a CPU, log-probs of a prompt (the probe) then fail.
            "lora_target_modules": self._targets,
            "lora_modules": json.dumps({"name": ADAPTER, "path": str(first_adapter)}),
            "worker_extension_cls": f"{WORKER}.PolicyWorker",
        }

    def send(self, weights: StagedWeights, server: Peer) -> None:
        server.call("/collective_rpc", method="load_policy_adapter", kwargs={"path": str(weights.folder / ADAPTER)})

    def checksums(self, server: Peer) -> dict[str, str]:
        checksums: dict[str, str] = {}
        for worker_checksums in server.call("/collective_rpc", method="policy_checksums")["results"]:
            checksums.update(worker_checksums)
        return checksums


def _peft_name(name: str) -> str:
    """The name of a LoRA factor in an adapter's file, as PEFT writes it."""
    return f"base_model.model.{name}.weight"


class SocketTransport(Transport):
    """From memory, over a TCP connection with each worker of one server that lasts for one transfer.

    Its name in a config is ``gloo``, the library that earlier versions used. A gloo group, and the store where its
    members meet, accept whoever connects first. Here a connection gets nothing before it has proved that it knows the
    secret of the transfer, which the server received over HTTP, where every request needs the key.
    """

    def vllm_settings(self, folder: Path) -> dict[str, Any]:
        return {**_from_memory(SOCKET_BACKEND), "worker_extension_cls": f"{WORKER}.PolicyWorker"}

    def send(self, weights: StagedWeights, server: Peer) -> None:
        """A thread sends while the request waits for the answer that all weights have arrived."""
        limit_s = min(server.timeout_s, STALL_LIMIT_S)
        # Each tied weight travels once.
        tensors, aliases = untied(weights.tensors)
        host = own_address(server.host)
        transfer = _SocketTransfer(
            tensors=list(tensors.values()),
            # Asked for each transfer, since a server may have been restarted with other workers.
            ranks=range(1, 1 + worker_count(server)),
            secret=secrets.token_hex(SECRET_BYTES),
            limit_s=limit_s,
        )
        # A free port of the interface that the server can reach; it is open for one transfer only.
        with socket.create_server((host, 0)) as listener:
            port = listener.getsockname()[1]
            address = {"host": host, "port": port, "secret": transfer.secret, "timeout_s": limit_s}
            server.call("/init_weight_transfer_engine", init_info=address)
            start_update(server.call)
            threading.Thread(target=transfer.run, args=(listener,), daemon=True, name="weights").start()
            try:
                server.call("/update_weights", update_info={**described(tensors), "aliases": aliases})
            finally:
                # Also where the call failed: the thread would wait for ever for workers that never come.
                transfer.server_answered.set()
            error = transfer.result.get()
            if error is not None:
                raise error
        server.call("/finish_weight_update")


@dataclass(kw_only=True)
class _SocketTransfer:
    """The thread of :class:`SocketTransport` that sends to all workers of one server."""

    tensors: Sequence[Tensor]
    ranks: Collection[int]
    """The ranks of the workers in the transfer's group, from 1; rank 0 is the trainer."""
    secret: str = field(repr=False)
    limit_s: float
    server_answered: threading.Event = field(default_factory=threading.Event)
    result: queue.SimpleQueue[Exception | None] = field(default_factory=queue.SimpleQueue)
    """Gets one item: what the thread raised, or None where it has sent everything."""

    def run(self, listener: socket.socket) -> None:
        connections: dict[int, socket.socket] = {}
        try:
            accept_workers(listener, self.secret, self.ranks, connections, self.server_answered)
            for connection in connections.values():
                connection.settimeout(self.limit_s)
            # Tensor by tensor to all workers, because each worker takes them in this order and holds one at a time.
            for tensor in self.tensors:
                for connection in connections.values():
                    connection.sendall(memory_of(tensor))
            self.result.put(None)
        except Exception as error:
            self.result.put(error)
        finally:
            for connection in connections.values():
                connection.close()


class NCCLTransport(Transport):
    """Between GPUs, by vLLM's own trainer and worker engines; a tensor is on rank 0's GPU while it is sent."""

    packed = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Two communicators in use at once can block each other.
        self._one_at_a_time = threading.Lock()
        # vLLM's trainer side by server. Weak: a server that was restarted has a new Peer, and needs a new group.
        self._engines: weakref.WeakKeyDictionary[Peer, Any] = weakref.WeakKeyDictionary()

    def vllm_settings(self, folder: Path) -> dict[str, Any]:
        return _from_memory("nccl")

    def send(self, weights: StagedWeights, server: Peer) -> None:
        """A thread sends, and its group is aborted where a call fails or the transfer takes too long.

        NCCL itself waits without a limit: where a worker dies, the sending thread would never return.
        """
        result: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        calls = _VLLMCalls(server, report=result.put)
        tensors, _ = untied(weights.tensors)
        source = _Source(tensors, self._device)
        # A list, because the thread fills it and abort reads it. The engine is put back only after a whole transfer.
        engines: list[Any] = []
        if server in self._engines:
            engines.append(self._engines.pop(server))

        def transfer() -> None:
            try:
                with torch.cuda.device(self._device):
                    if not engines:
                        engines.append(self._connect(server, calls, source))
                    engine = engines[0]
                    engine.client = calls
                    engine.source = source
                    engine.send_weights()
                result.put(None)
            except Exception as error:
                result.put(error)
                # The group may have been made after send gave up and called abort.
                if calls.given_up:
                    abort()

        def abort() -> None:
            for engine in engines:
                engine.shutdown()

        # Held until the transfer has ended or was aborted, not only while the thread starts.
        with self._one_at_a_time:
            threading.Thread(target=transfer, daemon=True, name="nccl transfer").start()
            try:
                error = result.get(timeout=server.timeout_s)
            except queue.Empty:
                error = RuntimeError(f"nccl did not end within {server.timeout_s:g} s")
            if error is not None:
                calls.given_up = True
                abort()
                raise error
            self._engines[server] = engines[0]

    def _connect(self, server: Peer, calls: _VLLMCalls, source: _Source) -> Any:
        """vLLM's trainer side, in a new group with the server's workers.

        The group's id, without which nobody can join, is sent over HTTP, where every request needs the key. vLLM itself
        uses a store without a key, where the first process that connects could take a worker's place.
        """
        from vllm.distributed.weight_transfer import nccl_common as common
        from vllm.distributed.weight_transfer import nccl_engine as vllm

        unique_id = new_nccl_id()
        # Rank 0 of the group is this process, which sends; the workers have the ranks behind it.
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
        # Both sides wait for each other while they join, so that the request must not be waited for first.
        with ThreadPoolExecutor(1, thread_name_prefix="nccl init") as pool:
            joined = pool.submit(calls.init_weight_transfer_engine, common.worker_init_payload(info))
            device = torch.cuda.current_device()
            engine.model_update_group = common.uid_init_process_group(unique_id, 0, size, device)
            joined.result()
        return engine


def new_nccl_id() -> bytes:
    """The id of a new NCCL group in which this process is rank 0. NCCL checks its random part when others join."""
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

    return bytes(NCCLLibrary().ncclGetUniqueId().internal)


class IPCTransport(Transport):
    """On one GPU: vLLM's worker opens the memory of rank 0, which has a second copy of the weights meanwhile.

    vLLM's trainer side is not used: it gathers over all ranks, and here rank 0 alone sends.
    """

    # The handles are pickled. vLLM then unpickles what a request holds; every request needs the run's key.
    environment: Mapping[str, str] = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def vllm_settings(self, folder: Path) -> dict[str, Any]:
        return _from_memory("ipc")

    def send(self, weights: StagedWeights, server: Peer) -> None:
        from torch.multiprocessing import reductions

        cuda: Any = torch.cuda
        reduce_tensor: Any = reductions.reduce_tensor
        calls = _VLLMCalls(server)
        tensors, _ = untied(weights.tensors)
        with torch.cuda.device(self._device):
            with shareable_memory():
                shared = {name: tensor.to(self._device) for name, tensor in tensors.items()}
            # The other process does not wait for this one's stream.
            torch.cuda.synchronize()
            gpu = str(torch.cuda.get_device_properties(self._device).uuid)
            handles = [{gpu: reduce_tensor(tensor)[1]} for tensor in shared.values()]
            pickled = base64.b64encode(pickle.dumps(handles)).decode()
            calls.init_weight_transfer_engine({"packed": False})
            calls.start_weight_update()
            calls.update_weights({**described(shared), "ipc_handles_pickled": pickled})
            calls.finish_weight_update()
            # Only after the worker has copied them, or it would read freed memory.
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
    """Stage ``weights`` of the policy for engines, and hash each on the way (fused ones as one, as vLLM does).

    ``known``: checksums of weights that were staged before and are not among these. Raises as
    :meth:`Transport.stage`.
    """
    checksums = Checksums(fused=True)
    tensors = transport.stage(loaded, hashed(_host_copies(weights), checksums), folder)
    digests = {**known, **checksums.hexdigests()}
    return StagedWeights(folder, version, tensors, digests, vocabulary_of(loaded), probe)


def _host_copies(weights: Weights) -> Weights:
    """Copies in host memory. Tied weights, which follow each other, get one copy."""
    # No bucket has a name here: it would be kept on the GPU until the next one is gathered.
    return itertools.chain.from_iterable(map(_copied_together, in_buckets(weights, BUCKET_BYTES)))


def _copied_together(bucket: Bucket) -> Bucket:
    """Copies of a bucket's tensors in host memory, by one copy, for which the host waits once.

    Copies on a CPU too: the learner changes its weights in place while these are sent.
    """
    distinct, aliases = untied(dict(bucket))
    flat_tensors = [tensor.reshape(-1) for tensor in distinct.values()]
    if len(flat_tensors) == 1:
        # Not joined: that would be a second copy of an embedding on the GPU, of a GiB or more.
        flat = flat_tensors[0].to("cpu", copy=True)
    else:
        flat = torch.cat(flat_tensors).cpu()
    sizes = [tensor.numel() for tensor in flat_tensors]
    copies = {}
    for (name, tensor), flat_copy in zip(distinct.items(), flat.split_with_sizes(sizes), strict=True):
        copies[name] = flat_copy.view(tensor.shape)
    return [(name, copies[aliases.get(name, name)]) for name, _ in bucket]


def untied(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Every tensor once, under its first name; and the first name by each further name of a tensor.

    >>> tensor = torch.zeros(1)
    >>> untied({"embed": tensor, "head": tensor})
    ({'embed': tensor([0.])}, {'head': 'embed'})
    """
    # By identity: equal values alone do not make two weights one.
    first_names: dict[int, str] = {}
    distinct: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    for name, tensor in tensors.items():
        first_name = first_names.setdefault(id(tensor), name)
        if first_name == name:
            distinct[name] = tensor
        else:
            aliases[name] = first_name
    return distinct, aliases


def described(tensors: Mapping[str, Tensor]) -> dict[str, list[Any]]:
    """Names, dtypes and shapes in order, in the form that vLLM's engines take."""
    return {
        "names": list(tensors),
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
    }


def worker_count(server: Peer) -> int:
    """The number of processes of a server that each take the weights."""
    return int(server.get("/get_world_size")["world_size"])


def start_update(call: Callable[[str], Any]) -> None:
    """Begin an update of a server's weights. Raises what ``call`` raises."""
    try:
        call("/start_weight_update")
    except Exception as error:
        # vLLM refuses a second update while it waits for the end of one whose trainer was lost: end that, try again.
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
        probe.connect((host, DISCARD_PORT))
        return str(probe.getsockname()[0])


@dataclass(kw_only=True)
class TrainerAddress:
    """Where a worker connects to rank 0."""

    host: str
    port: int
    secret: str = field(repr=False)
    """Both sides prove that they know it."""
    timeout_s: float
    """How long the worker waits for a part of a tensor."""


def accept_workers(
    listener: socket.socket,
    secret: str,
    ranks: Collection[int],
    connections: dict[int, socket.socket],
    answered: threading.Event,
) -> None:
    """Fill ``connections`` with those of ``ranks`` that prove that they know ``secret``; close every other one.

    Each is asked in a thread of its own, so that one that is silent does not delay the others. Raises
    :class:`RuntimeError` where the server has ``answered`` before all its workers were connected.
    """
    # Two connections may claim the same rank at once; the first gets it.
    claim = threading.Lock()
    # The listener has a short limit, because accept would not see that the server has answered.
    listener.settimeout(POLL_S)

    def greet(connection: socket.socket) -> None:
        rank = None
        # OSError: the other side closed the connection, or was silent.
        with contextlib.suppress(OSError):
            connection.settimeout(GREETING_S)
            rank = prove_to_worker(connection, secret)
        with claim:
            is_unwanted = rank not in ranks or rank in connections
            if rank is None or is_unwanted:
                connection.close()
            else:
                connections[rank] = connection

    while len(connections) < len(ranks):
        if answered.is_set():
            raise RuntimeError("the server answered without taking the weights")
        with contextlib.suppress(TimeoutError):
            connection, _ = listener.accept()
            threading.Thread(target=greet, args=(connection,), daemon=True, name="greeting").start()


def prove_to_worker(connection: socket.socket, secret: str) -> int | None:
    """Rank 0's side of a greeting: the rank of the worker, None for one that does not know ``secret``.

    Both sides prove it by an HMAC over the random challenges of both; neither sends the secret. Rank 0 sends its own
    proof only after a valid one, so that a stranger gets nothing to guess the secret from.
    """
    challenge = secrets.token_bytes(SECRET_BYTES)
    connection.sendall(challenge)
    rank_bytes = received(connection, 4)
    worker_challenge = received(connection, SECRET_BYTES)
    # The rank is part of what is proved, so that nobody can replay a proof with another rank.
    expected = proof(secret, b"worker", rank_bytes, challenge, worker_challenge)
    if not hmac.compare_digest(received(connection, len(expected)), expected):
        return None
    connection.sendall(proof(secret, b"trainer", rank_bytes, challenge, worker_challenge))
    return int.from_bytes(rank_bytes, "big")


def connect_to_trainer(address: TrainerAddress, rank: int) -> socket.socket:
    """A worker's side of a greeting: the connection. Raises :class:`RuntimeError` where rank 0's proof is wrong."""
    connection = socket.create_connection((address.host, address.port), timeout=address.timeout_s)
    try:
        challenge = received(connection, SECRET_BYTES)
        worker_challenge = secrets.token_bytes(SECRET_BYTES)
        rank_bytes = rank.to_bytes(4, "big")
        worker_proof = proof(address.secret, b"worker", rank_bytes, challenge, worker_challenge)
        connection.sendall(rank_bytes + worker_challenge + worker_proof)
        expected = proof(address.secret, b"trainer", rank_bytes, challenge, worker_challenge)
        if not hmac.compare_digest(received(connection, len(expected)), expected):
            raise RuntimeError("the process that listens as the trainer does not know the secret of the transfer")
    except BaseException:
        connection.close()
        raise
    return connection


def proof(secret: str, side: bytes, rank: bytes, *challenges: bytes) -> bytes:
    """The HMAC by which ``side`` proves that it knows ``secret``.

    ``side`` is part of the message, so that a proof cannot be sent back to the side that made it. All parts but
    ``side``, which comes first, have a fixed length, so that no two messages are the same bytes.
    """
    message = side + b"|" + rank + b"".join(challenges)
    return hmac.digest(bytes.fromhex(secret), message, "sha256")


def received(connection: socket.socket, size: int) -> bytes:
    """The next ``size`` bytes. Raises OSError where the other side closes, or sends nothing in time."""
    data = bytearray(size)
    receive_into(connection, memoryview(data))
    return bytes(data)


def receive_into(connection: socket.socket, memory: memoryview) -> None:
    """Fill ``memory``. Raises as :func:`received`."""
    while memory:
        count = connection.recv_into(memory)
        if count == 0:
            raise ConnectionError("the other side closed the connection")
        # recv may return fewer bytes than were asked for.
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
            for tied_name in names_of[name]:
                yield tied_name, tensor


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory, without a copy."""
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def link_checkpoint(source: Path, folder: Path) -> None:
    """Give ``folder`` the files of ``source`` without its adapter: as hard links, or as copies on another disk."""

    def link(old: str, new: str) -> None:
        try:
            os.link(old, new)
        except OSError:
            shutil.copy2(old, new)

    # Written beside and renamed: a server that is being started must see all files or none.
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.copytree(source, temporary, copy_function=link, ignore=shutil.ignore_patterns(ADAPTER))
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)


def vllm_rank(rank: int) -> int:
    """The smallest of :data:`VLLM_RANKS` that is at least ``rank``; the last for a rank that vLLM will refuse.

    >>> vllm_rank(4), vllm_rank(1000)
    (8, 512)
    """
    for allowed_rank in VLLM_RANKS:
        if allowed_rank >= rank:
            return allowed_rank
    return VLLM_RANKS[-1]


def _from_memory(backend: str) -> dict[str, Any]:
    """Settings of a vLLM server that starts without weights and takes them by ``backend``."""
    # dummy: weights that are replaced before the first request need not be read from disk.
    return {"load_format": "dummy", "weight_transfer_config": json.dumps({"backend": backend})}


class _VLLMCalls:
    """The four calls that vLLM's trainer side makes of a server; the names of the methods are vLLM's.

    ``report`` gets what a call raises, before it is raised. After ``given_up`` is set every call fails.
    """

    def __init__(self, server: Peer, report: Callable[[Exception], None] | None = None) -> None:
        self._server = server
        self._report = report
        self.given_up = False

    def _run(self, call: Callable[[], Any]) -> None:
        if self.given_up:
            raise RuntimeError("the transfer was given up")
        try:
            call()
        except Exception as error:
            # Not only raised: vLLM makes the call in a thread, and waits in NCCL before it looks at the result.
            if self._report is not None:
                self._report(error)
            raise

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._run(lambda: self._server.call("/init_weight_transfer_engine", init_info=init_info))

    def start_weight_update(self) -> None:
        self._run(lambda: start_update(self._server.call))

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._run(lambda: self._server.call("/update_weights", update_info=update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._run(lambda: self._server.call("/finish_weight_update"))


@dataclass(frozen=True)
class _Metadata:
    """What vLLM's trainer side reads of a weight before it is sent."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class _Source:
    """Staged weights in the form that vLLM's trainer side walks; each is on the GPU only while it is sent."""

    def __init__(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        self._tensors = tensors
        self._device = device

    def metadata(self) -> Sequence[_Metadata]:
        return [_Metadata(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self._tensors.items()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._tensors.items():
            yield name, tensor.to(self._device)
