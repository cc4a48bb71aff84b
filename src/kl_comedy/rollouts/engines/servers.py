"""Engines beside the trainer: servers that a run starts on loopback, or that ``rollout.options.urls`` names.

publish:  every rank walks the weights; the leader stages them (in a folder, or in memory)
load:     per server: pause, send, reset the prefix cache, label the weights, resume -> checksum, probe
generate: groups of prompts -> a server with a free slot -> token ids, log-probs and weight version of every token
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import shutil
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kl_comedy.cuda import VARIABLES
from kl_comedy.errors import RunFailed, bad_value
from kl_comedy.models import LoadedModel
from kl_comedy.models.introspection import head_dtype, is_peft
from kl_comedy.processes import LOOPBACK, ChildProcess, free_port
from kl_comedy.records import Capabilities, Prompt, Rollout
from kl_comedy.registry import ROLLOUTS
from kl_comedy.rollouts.base import RolloutBackend, Sampling
from kl_comedy.rollouts.decoding import Completion
from kl_comedy.rollouts.engines.client import Client, EngineOutput, Refused, ServerTrouble, sampling_fields
from kl_comedy.rollouts.engines.options import (
    KEY_VARIABLE,
    HFServerOptions,
    ServerOptions,
    VLLMServerOptions,
    engine_options,
    require_vllm,
    sends_adapter,
    server_gpus,
    transport_of,
    visible_gpus,
)
from kl_comedy.rollouts.engines.pool import Server, dispatch, failures
from kl_comedy.rollouts.engines.transports import ADAPTER, TRANSPORTS, Transport, stage
from kl_comedy.rollouts.engines.vllm import VLLMServers, check_temperature
from kl_comedy.rollouts.engines.weights import Probe, ProbeLimit, StagedWeights, dtype_of, make_probe, probe_dtype
from kl_comedy.rollouts.hf import check_request

if TYPE_CHECKING:
    from kl_comedy.config.schema import RolloutConfig

log = logging.getLogger("kl_comedy")

CAPABILITIES = Capabilities(in_trainer_ranks=False, updates_between_tokens=True, needs_folder=True)


@ROLLOUTS.register(
    "vllm_server",
    source="vLLM /inference/v1/generate; weights by reload_weights or its weight-transfer engines",
    summary="One or many vLLM servers, started by the run or named by address; they may die or hang.",
    capabilities=CAPABILITIES,
    options=VLLMServerOptions,
)
def build_vllm_server(config: RolloutConfig, *, loaded: LoadedModel, leader: bool = True) -> RolloutBackend:
    """Build the backend. Servers named by address are asked who they are, and refused here where they do not fit.

    Raises :class:`UserError` for a bad option, an address that is not a vLLM server, a wrong key, a server without
    the routes that replace weights, and one that serves another model than the trainer's.
    """
    options = engine_options(VLLMServerOptions, config.options)
    check_temperature(config.temperature, "rollout.temperature")
    if not options.urls:
        require_vllm("vllm_server")
    return EngineRollouts(VLLMServers(config, options, loaded), config.temperature, leader)


@ROLLOUTS.register(
    "hf_server",
    source="transformers models, own loop, one process for each server",
    summary="One or many servers of ours over transformers, as vLLM's; for machines without vLLM.",
    capabilities=CAPABILITIES,
    options=HFServerOptions,
)
def build_hf_server(config: RolloutConfig, *, loaded: LoadedModel, leader: bool = True) -> RolloutBackend:
    """Build the backend. Raises :class:`UserError` as :func:`build_vllm_server` does."""
    options = engine_options(HFServerOptions, config.options)
    return EngineRollouts(HFServers(config, options, loaded), config.temperature, leader)


class HFServers:
    """Our server computes one request at a time, so a request has as many groups as make a batch.

    They are sorted by length, as the ``hf`` backend sorts them: one server draws the same batches, to the last bit.
    """

    name, context = "transformers", None

    def __init__(self, config: RolloutConfig, options: HFServerOptions, loaded: LoadedModel) -> None:
        self.options, self.loaded, self._batch_sequences = options, loaded, config.batch_sequences

    def command(self, folder: Path, port: int, transport: Transport, host: str = LOOPBACK) -> list[str]:
        """The words that follow ``python`` to serve the checkpoint ``folder``."""
        attention, dtype = self.loaded.causal.config._attn_implementation, head_dtype(self.loaded.model)
        settings = {
            "folder": str(folder),
            "host": host,
            "port": port,
            "threads": self.options.threads or torch.get_num_threads(),
            "batch_sequences": self._batch_sequences,
            "dtype": self.options.dtype or dtype_of(self.loaded),
            "device": self.loaded.device.type,
            "head_dtype": dtype and str(dtype).removeprefix("torch."),
            "attention": attention if attention in ("eager", "flash_attention_2") else "sdpa",
            "use_library": self.options.loop == "library",
            "deterministic": torch.are_deterministic_algorithms_enabled(),
        }
        return ["-P", "-m", "kl_comedy.rollouts.engines.hf_server", json.dumps(settings)]

    def environment(self) -> dict[str, str]:
        return {**VARIABLES, **os.environ}

    def slots(self, group_size: int) -> int:
        return 1

    def groups_per_request(self, group_size: int, share: int) -> int:
        return max(1, min(self._batch_sequences // group_size, share))

    def request(self, prompt: Prompt, fields: dict[str, Any], group: int) -> dict[str, Any]:
        kind = self.loaded.device.type  # the caller's precision: the sampler computes as the learner does
        autocast = str(torch.get_autocast_dtype(kind)).removeprefix("torch.")
        return {
            "token_ids": prompt.token_ids,
            "sampling_params": {**fields, "first_row": group * fields["n"]},
            "autocast": autocast if torch.is_autocast_enabled(kind) else None,
        }


class EngineRollouts:
    """The servers of a run and the weights they were last given. Built on every rank; the leader talks to servers.

    ``publish`` (all ranks) and ``load`` (leader) may be called in one thread each while ``generate`` runs in another:
    completions in progress continue with the new weights, and every token's version is the one that its server names.
    Equal seeds give equal completions for equal weights and prompts, up to rounding.
    """

    def __init__(self, kind: VLLMServers | HFServers, temperature: float, leader: bool) -> None:
        self.version = 0
        self._kind, self._temperature, self._leader = kind, temperature, leader
        self._options: ServerOptions = kind.options
        self._loaded, self._context = kind.loaded, kind.context
        self._dtype = self._options.dtype or dtype_of(self._loaded)
        self._output = EngineOutput(self._loaded)
        lora = is_peft(self._loaded.model)
        gpus = visible_gpus(self._loaded.device.type)
        name = "adapter" if sends_adapter(self._options, lora) else "folder"  # ranks that send nothing walk the same
        if leader:
            name = transport_of(self._options, lora=lora, gpus=gpus)
        self._transport_name, self._transport = name, TRANSPORTS[name](self._loaded.device)
        self._model = ADAPTER if name == "adapter" else None
        self._gpus = server_gpus(self._options, gpus) if leader and gpus and not self._options.urls else []
        self._run = secrets.token_hex(4)
        self._key = _read_key(self._options) if self._options.urls else secrets.token_urlsafe(32)
        self._folder: Path | None = None
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._load_lock = threading.Lock()
        self._staged: StagedWeights | None = None
        self._confirmed: StagedWeights | None = None
        self._weight_folders: set[Path] = set()
        self._servers: list[Server] = []
        if self._options.urls:
            probe = make_probe(self._loaded, temperature=temperature)  # on every rank: the policy may be in shards
            self._servers = [self._connect(url, probe) for url in self._options.urls] if leader else []
        elif leader:
            numbers = range(self._options.servers)
            self._servers = [self._server(str(number), start=partial(self._start, number)) for number in numbers]

    def work_in(self, folder: Path) -> None:
        """Write logs and weights under ``folder``, and remove weights that a killed run left there."""
        self._folder = folder / "sampler"
        for left in (*self._folder.glob("weights-*"), *self._folder.glob(".weights-*")):
            shutil.rmtree(left, ignore_errors=True)

    def generate(self, prompts: Sequence[Prompt], *, group_size: int, sampling: Sampling, seed: int) -> list[Rollout]:
        """See :class:`RolloutBackend`; the leader calls, in the precision (autocast) that the servers should use.

        Raises as the ``hf`` backend does, and :class:`RunFailed` when no server is left.
        """
        check_request(self._loaded, prompts, sampling, group_size, limit=self._context)
        if not prompts:
            return []
        if self._staged is None:
            self.publish(self.version)
        if self._confirmed is None:
            self.load()
        oldest, kind = self.version, self._kind
        fields = sampling_fields(sampling, ends=self._output.ends, n=group_size, seed=seed)
        requests = [kind.request(prompt, fields, group) for group, prompt in enumerate(prompts)]
        order = sorted(range(len(prompts)), key=lambda group: len(prompts[group].token_ids))
        size = kind.groups_per_request(group_size, -(-len(order) // len(self._servers)))
        tasks = [order[start : start + size] for start in range(0, len(order), size)]

        def ask(server: Server, task: Sequence[int]) -> list[list[Completion]]:
            answers = server.client.generate([requests[group] for group in task])
            if any(version < oldest for answer in answers for row in answer for version in row.versions):
                raise ServerTrouble(f"it draws from weights older than version {oldest}")
            return answers

        answered = dispatch(tasks, ask, self._servers, slots=kind.slots(group_size))
        rows = dict(zip(order, (rows for answers in answered for rows in answers), strict=True))
        convert = partial(self._output.rollouts, group_size=group_size, stop=sampling.stop)
        return [rollout for group, prompt in enumerate(prompts) for rollout in convert(prompt, group, rows[group])]

    def publish(self, version: int) -> None:
        """Stage the learner's weights as ``version`` (all ranks call, in step), and start servers of ours.

        Where the leader fails to write, it still takes part in the gathering, then raises.
        """
        probe = make_probe(self._loaded, temperature=self._temperature) if self._options.probe else None
        weights = self._transport.weights(self._loaded.model, getattr(torch, self._dtype))
        staged = None
        try:
            if self._leader:
                folder, known = self._weights_folder(version), self._staged.checksums if self._staged else {}
                staged = stage(self._transport, self._loaded, weights, folder, version, probe, known)
        finally:
            for _ in weights:
                pass
        if staged is None:
            self.version = version
            return
        self._staged = staged
        self._weight_folders.add(staged.folder)
        for server in self._servers:
            server.launch(staged.folder)

    def load(self) -> int:
        """Have every server take the newest staged weights, and return their version; the leader calls.

        A server that fails is restarted with them. Raises :class:`RunFailed` when no server is left, and when one has
        other weights than the trainer afterwards; :class:`UserError` where servers named by address never had them.
        """
        with self._load_lock:
            staged = self._staged
            if staged is None:
                raise RuntimeError("no weights were published")
            if staged is not self._confirmed:
                try:
                    with ThreadPoolExecutor(len(self._servers), thread_name_prefix="update") as pool:
                        loaded = list(pool.map(lambda server: server.load(staged), self._servers))
                    if not any(loaded):
                        why = failures(self._servers)
                        raise RunFailed(f"no inference server took the weights of version {staged.version}. {why}")
                except RunFailed as error:
                    if self._confirmed is not None or not self._options.urls:
                        raise
                    allowed = f"servers of the model that is trained, which take its weights by {self._transport_name}"
                    raise bad_value("rollout.options.urls", list(self._options.urls), allowed, str(error)) from None
                if self._confirmed is None:
                    names = ", ".join(server.name for server in self._servers)
                    log.info(f"{names}: weights of version {staged.version} confirmed")
                self._confirmed, self.version = staged, staged.version
                for folder in self._weight_folders - {staged.folder, (self._staged or staged).folder}:
                    shutil.rmtree(folder, ignore_errors=True)
                    self._weight_folders.discard(folder)
            return self.version

    def update_weights(self, version: int) -> None:
        """:meth:`publish`, then :meth:`load`; all ranks call. Errors of the leader are raised there alone."""
        self.publish(version)
        if self._leader:
            self.load()

    def close(self) -> None:
        """Kill the servers that are ours, and remove the weights written for them."""
        for server in self._servers:
            server.close()
        for folder in self._weight_folders:
            shutil.rmtree(folder, ignore_errors=True)
            with contextlib.suppress(OSError):
                folder.parent.rmdir()
        if self._temporary is not None:
            self._temporary.cleanup()

    def processes(self) -> list[ChildProcess]:
        """The servers of ours that were started, in order."""
        return [server.process for server in self._servers if server.process is not None]

    @property
    def restarts(self) -> int:
        """How often a server was restarted."""
        return sum(server.restarts for server in self._servers)

    def cpu_seconds(self) -> float:
        """CPU seconds of the servers that run now and were started here."""
        return sum(process.cpu_seconds() for process in self.processes())

    def _weights_folder(self, version: int) -> Path:
        if self._folder is None and self._options.weights_dir is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="kl_comedy_engines_")
            self._folder = Path(self._temporary.name)
        if self._options.weights_dir is not None:  # whoever named it decides who may read it: servers of other users
            return Path(self._options.weights_dir).absolute() / f"weights-{version:08d}"
        assert self._folder is not None
        self._folder.mkdir(parents=True, exist_ok=True)
        self._folder.chmod(0o700)  # unfinished weights are for this user's servers alone
        return self._folder.absolute() / f"weights-{version:08d}"

    def _server(self, name: str, **who: Any) -> Server:
        limit = ProbeLimit(probe_dtype(self._loaded, self._dtype), self._options.probe_tolerance)
        return Server(f"{self._kind.name} server {name}", self._options, self._transport, limit, **who)

    def _start(self, number: int, folder: Path) -> tuple[ChildProcess, Client]:
        """Start a server on the checkpoint ``folder``, without waiting for it.

        It listens on loopback, wants a key (in its environment, since arguments can be seen by other users), writes its
        output to a file, and is killed with all it started, also when the run dies.
        """
        import kl_comedy

        port = free_port()
        roots = [str(Path(kl_comedy.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        variables = {**self._kind.environment(), **self._transport.environment}
        variables |= {"PYTHONPATH": os.pathsep.join(filter(None, roots)), KEY_VARIABLE: self._key or ""}
        if self._gpus:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(self._gpus[number])
        server_log = (self._folder or folder.parent) / f"server-{number}.log"
        command = [sys.executable, *self._kind.command(folder, port, self._transport)]
        process = ChildProcess(command, log=server_log, ends_with_parent=True, env=variables)
        return process, self._client(f"http://{LOOPBACK}:{port}")

    def _client(self, url: str) -> Client:
        limit_s = self._options.request_timeout_s
        return Client(url, key=self._key, timeout_s=limit_s, run=self._run, model=self._model)

    def _connect(self, url: str, probe: Probe) -> Server:
        """A server named by address; one that still has its own weights must have the trainer's."""
        client = self._client(url)
        try:
            has_our_weights, context = client.identify()
            if context is not None:
                self._context = min(context, self._context or context)
            complaint = None
            if not has_our_weights:
                limit = ProbeLimit(probe_dtype(self._loaded, self._dtype), self._options.probe_tolerance)
                complaint = limit.complaint(client.probe_gap(probe))
            if complaint is None:
                return self._server(url, client=client)
            allowed = "a server of the model that is trained"
            why = f"{complaint}; serve model.source, with --logprobs-mode processed_logprobs"
        except ServerTrouble as trouble:
            allowed, why = f"a running {self._kind.name} server", str(trouble)
        except Refused as refusal:
            allowed, why = f"a {self._kind.name} server", f"this is not one: {refusal}"
            if refusal.status == 401:
                source = self._options.api_key_file or f"the environment variable {self._options.api_key_env}"
                key = "the API key in" if self._key else "an empty API key: there is none in"
                allowed, why = "a server that takes our API key", f"it refuses {key} {source}"
            elif refusal.status == 400:
                allowed, why = "a server of the model that is trained", f"it refuses the probe's tokens: {refusal}"
            elif "/weight_info" in str(refusal) or "/inference/" in str(refusal):
                allowed = "a vLLM server of 0.32 or later that takes weights"
                why = f"{refusal}; start it with VLLM_SERVER_DEV_MODE=1 and --enable-scale-out"
        raise bad_value("rollout.options.urls", client.url, allowed, why)


def _read_key(options: ServerOptions) -> str | None:
    """The key for servers that are not ours: of the file, else of the environment variable, else none."""
    if options.api_key_file is None:
        return os.environ.get(options.api_key_env) or None
    try:
        return Path(options.api_key_file).read_text().strip() or None
    except OSError as error:
        allowed = "a file that holds the API key"
        raise bad_value("rollout.options.api_key_file", options.api_key_file, allowed, str(error.strerror)) from None
