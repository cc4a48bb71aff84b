"""Servers that a cluster job starts beside the trainer, by the command with which a run starts its own.

server's task   config -> job_server -> process -> /health -> expect_weights -> its address is published
trainer's task  addresses -> EngineRollouts, which sends its weights before it samples
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kl_comedy.config.combinations import sampler_of
from kl_comedy.config.validate import parse_record
from kl_comedy.errors import bad_value
from kl_comedy.models import LoadedModel
from kl_comedy.models.load import load_tokenizer, whole_model
from kl_comedy.models.lora import add_lora
from kl_comedy.models.sharding import skeleton
from kl_comedy.rollouts.engines.client import LABEL, Client
from kl_comedy.rollouts.engines.options import HFServerOptions, ServerOptions, VLLMServerOptions
from kl_comedy.rollouts.engines.servers import HFServers
from kl_comedy.rollouts.engines.transports import TRANSPORTS, AdapterTransport
from kl_comedy.rollouts.engines.vllm import VLLMServers
from kl_comedy.rollouts.engines.weights import write_config

if TYPE_CHECKING:
    from kl_comedy.config import Config

ENGINES: Mapping[str, tuple[Any, type[ServerOptions]]] = {
    "vllm_server": (VLLMServers, VLLMServerOptions),
    "hf_server": (HFServers, HFServerOptions),
}

TRANSPORT_OF = {"auto": "folder", "folder": "folder", "gloo": "gloo", "nccl": "nccl"}
"""What servers of a job get, by ``rollout.options.transport``."""


def transports_of(config: Config) -> Mapping[str, str]:
    """:data:`TRANSPORT_OF` for the run of ``config``.

    vLLM takes a LoRA adapter alone: merged into the base and rounded, the first updates would hardly change what it
    samples from.
    """
    if config.model.lora is None or sampler_of(config) != "vllm_server":
        return TRANSPORT_OF
    return {**TRANSPORT_OF, "auto": "adapter", "adapter": "adapter"}


def check_job_servers(config: Config, gpus: int) -> None:
    """Raise :class:`UserError` where the run of ``config`` cannot use servers of a job, with ``gpus`` GPUs for each."""
    backend = sampler_of(config)
    if backend not in ENGINES:
        why = "the profile has servers beside the trainer, and this sampler would not use them"
        raise bad_value("rollout.backend", config.rollout.backend, sorted(ENGINES), why)
    if urls := config.rollout.options.get("urls"):
        raise bad_value("rollout.options.urls", urls, "not given", "the job starts servers beside the trainer")
    size = config.rollout.options.get("tensor_parallel_size", 1)
    if gpus and size != gpus:
        key = "rollout.options.tensor_parallel_size"
        raise bad_value(key, size, str(gpus), "the profile's servers.gpus: one server computes on all of them")
    transport = config.rollout.options.get("transport", "auto")
    allowed = transports_of(config)
    if transport not in allowed:
        raise bad_value("rollout.options.transport", transport, allowed, "the job starts servers beside the trainer")
    if config.model.gguf_file is not None:
        raise bad_value("model.gguf_file", config.model.gguf_file, "null", "the job's servers serve model.source")


def job_server(config: Config, folder: Path, *, host: str, port: int) -> tuple[list[str], dict[str, str]]:
    """What follows ``python`` to start a server for the run of ``config``, and its environment.

    vLLM serves ``model.source``, of a LoRA policy with an adapter in ``folder``, written here, that changes nothing;
    ours takes architecture and tokenizer from ``folder``, and has no weights until the trainer sends some. No weights
    are read, except by vLLM with ``transport: folder`` or ``adapter``. Raises
    :class:`UserError` as :func:`check_job_servers` does.
    """
    check_job_servers(config, 0)
    torch.use_deterministic_algorithms(config.train.deterministic)
    if config.train.threads is not None:
        torch.set_num_threads(config.train.threads)
    model, (kind, schema) = whole_model(config.model), ENGINES[sampler_of(config)]
    on_gpu = model.device != "cpu" and torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")  # pick_device would take memory of the server's GPU
    loaded = LoadedModel(model=skeleton(model), tokenizer=load_tokenizer(model), device=device, source=model.source)
    options = parse_record(schema, config.rollout.options, key="rollout.options")
    servers: VLLMServers | HFServers = kind(config.rollout, options, loaded)
    transport = TRANSPORTS[transports_of(config)[options.transport]](device)
    if isinstance(transport, AdapterTransport):
        assert model.lora is not None
        transport.expect(add_lora(loaded.model, model.lora), folder)
    if isinstance(servers, HFServers):
        write_config(loaded, folder)
        return servers.command(folder, port, transport, host), servers.environment()
    source, words = model.source, list[str]()
    if source == "pocket":
        from kl_comedy.models.pocket import pocket_folder, recipe_from_options

        source = str(pocket_folder(recipe_from_options(model.options)))
    for word, value in (("--revision", model.revision), ("--tokenizer", model.tokenizer)):
        words += [] if value is None else [word, value]
    words += ["--trust-remote-code"] if model.trust_remote_code else []
    return [*servers.command(Path(source), port, transport, host), *words], servers.environment()


def expect_weights(url: str, key: str | None) -> None:
    """Name the weights of a server that has just started as those before a run's first, so that a run sends its own."""
    client = Client(url, key=key, timeout_s=60.0)
    try:
        client.call("/update_weight_version", new_version=f"{LABEL}-1")
    finally:
        client.close()
