"""Servers that a cluster job starts beside the trainer, by the command with which a run starts its own.

server's task   config -> job_server -> process -> /health -> expect_weights -> its address is published
trainer's task  addresses -> EngineRollouts, which sends its weights before it samples
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kl_comedy.errors import bad_value
from kl_comedy.models import LoadedModel
from kl_comedy.models.load import load_tokenizer, whole_model
from kl_comedy.models.lora import add_lora
from kl_comedy.models.sharding import skeleton
from kl_comedy.rollouts.engines.client import LABEL, Client
from kl_comedy.rollouts.engines.options import gpus_per_server
from kl_comedy.rollouts.engines.servers import HFServers
from kl_comedy.rollouts.engines.transports import TRANSPORTS, AdapterTransport
from kl_comedy.rollouts.engines.vllm import VLLMServers
from kl_comedy.rollouts.engines.weights import write_config
from kl_comedy.rollouts.sampler import Sampler, sampler_name

if TYPE_CHECKING:
    from kl_comedy.config import Config
    from kl_comedy.config.schema import ModelConfig

ENGINES: Mapping[str, type[VLLMServers] | type[HFServers]] = {"vllm_server": VLLMServers, "hf_server": HFServers}
"""How a server is started, by backend."""

JOB_TRANSPORTS = {"auto": "folder", "folder": "folder", "gloo": "gloo", "nccl": "nccl"}
"""The transport of servers of a job, by ``rollout.options.transport``. ``ipc`` needs the memory of the trainer's GPU,
which is in another task."""


def job_transports(config: Config) -> Mapping[str, str]:
    """:data:`JOB_TRANSPORTS` for the run of ``config``.

    vLLM takes a LoRA adapter alone: merged into the base and rounded, the first updates would hardly change what it
    samples from.
    """
    if config.model.lora is None or sampler_name(config) != "vllm_server":
        return JOB_TRANSPORTS
    return {**JOB_TRANSPORTS, "auto": "adapter", "adapter": "adapter"}


def check_job_servers(config: Config, gpus: int) -> None:
    """Raise :class:`UserError` where the run of ``config`` cannot use servers of a job.

    ``gpus``: the GPUs of each server by the profile; 0 where that is not known or there are none.
    """
    if sampler_name(config) not in ENGINES:
        reason = "the profile has servers beside the trainer, and this sampler would not use them"
        raise bad_value("rollout.backend", config.rollout.backend, sorted(ENGINES), reason)
    # As the config says: with the environment of a job, the servers' own addresses would be among the options.
    options = Sampler.of(config).options
    beside = "the job starts servers beside the trainer"
    if options.urls:
        raise bad_value("rollout.options.urls", list(options.urls), "not given", beside)
    size = gpus_per_server(options)
    # srun gives each server the profile's GPUs: with fewer vLLM does not start, and more would be idle.
    if gpus and size != gpus:
        reason = "the profile's servers.gpus: one server computes on all of them"
        raise bad_value("rollout.options.tensor_parallel_size", size, str(gpus), reason)
    allowed = job_transports(config)
    if options.transport not in allowed:
        raise bad_value("rollout.options.transport", options.transport, list(allowed), beside)
    # A server gets model.source by name, and would load other weights than the trainer.
    if config.model.gguf_file is not None:
        raise bad_value("model.gguf_file", config.model.gguf_file, "null", "the job's servers serve model.source")


def job_server(config: Config, folder: Path, *, host: str, port: int) -> tuple[list[str], dict[str, str]]:
    """What follows ``python`` to start a server for the run of ``config``, and its environment.

    vLLM serves ``model.source``; for a LoRA policy also an adapter that changes nothing, which is written to
    ``folder``. Our server takes architecture and tokenizer from ``folder``, and has no weights until the trainer sends
    some. No weights are read here; vLLM reads them with ``transport: folder`` or ``adapter`` only. Raises
    :class:`UserError` as :func:`check_job_servers` does.
    """
    check_job_servers(config, 0)
    torch.use_deterministic_algorithms(config.train.deterministic)
    if config.train.threads is not None:
        torch.set_num_threads(config.train.threads)
    model = whole_model(config.model)
    # Not by pick_device, which would take memory of the server's GPU.
    device = torch.device("cpu")
    if model.device != "cpu" and torch.cuda.is_available():
        device = torch.device("cuda")
    loaded = LoadedModel(model=skeleton(model), tokenizer=load_tokenizer(model), device=device, source=model.source)

    sampler = Sampler.of(config)
    servers = ENGINES[sampler.name](config.rollout, sampler.options, loaded)
    transport = TRANSPORTS[job_transports(config)[sampler.options.transport]](device)
    if isinstance(transport, AdapterTransport):
        assert model.lora is not None
        transport.expect(add_lora(loaded.model, model.lora), folder)
    if isinstance(servers, HFServers):
        write_config(loaded, folder)
        return servers.command(folder, port, transport, host), servers.environment()
    command = servers.command(Path(_vllm_source(model)), port, transport, host)
    return [*command, *_model_arguments(model)], servers.environment()


def _vllm_source(model: ModelConfig) -> str:
    """What vLLM loads: a folder or a name on the hub."""
    if model.source != "pocket":
        return model.source
    from kl_comedy.models.pocket import pocket_folder, recipe_from_options

    return str(pocket_folder(recipe_from_options(model.options)))


def _model_arguments(model: ModelConfig) -> list[str]:
    """Arguments of a vLLM server by which it loads the same model as the trainer."""
    arguments: list[str] = []
    # The trainer's revision: the hub's newest may be another.
    if model.revision is not None:
        arguments += ["--revision", model.revision]
    if model.tokenizer is not None:
        arguments += ["--tokenizer", model.tokenizer]
    if model.trust_remote_code:
        arguments.append("--trust-remote-code")
    return arguments


def expect_weights(url: str, key: str | None) -> None:
    """Label the weights of a server that has just started as older than a run's first, so that a run sends its own."""
    client = Client(url, key=key, timeout_s=60.0)
    try:
        client.call("/update_weight_version", new_version=f"{LABEL}-1")
    finally:
        client.close()
