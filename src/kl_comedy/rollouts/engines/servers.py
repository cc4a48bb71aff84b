"""Engines beside the trainer: servers that a run starts on loopback, or that ``rollout.options.urls`` names.

publish:  every rank walks the weights; the leader stages them (in a folder, or in memory)
load:     per server: pause, send, reset the prefix cache, label the weights, resume -> checksum, probe
generate: groups of prompts -> a server with a free slot -> token ids, log-probs and weight version of every token
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import logging
import math
import os
import secrets
import shutil
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kl_comedy.cuda import VARIABLES
from kl_comedy.errors import RunFailed, bad_value
from kl_comedy.extras import require_module
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
    capabilities=dataclasses.replace(CAPABILITIES, gives_kept=True),
    options=HFServerOptions,
)
def build_hf_server(config: RolloutConfig, *, loaded: LoadedModel, leader: bool = True) -> RolloutBackend:
    """Build the backend. Raises :class:`UserError` as :func:`build_vllm_server` does."""
    options = engine_options(HFServerOptions, config.options)
    if not options.urls:
        # Asked here: a server that cannot start says so in its own log.
        require_module("fastapi", "rollout.backend: hf_server")
        require_module("uvicorn", "rollout.backend: hf_server")
    return EngineRollouts(HFServers(config, options, loaded), config.temperature, leader)


class HFServers:
    """Our server computes one request at a time, so a request has as many groups as make a batch.

    They are sorted by length, as the ``hf`` backend sorts them: one server draws the same batches, to the last bit.
    """

    name = "transformers"
    context = None

    def __init__(self, config: RolloutConfig, options: HFServerOptions, loaded: LoadedModel) -> None:
        self.options = options
        self.loaded = loaded
        self._batch_sequences = config.batch_sequences

    def command(self, folder: Path, port: int, transport: Transport, host: str = LOOPBACK) -> list[str]:
        """The arguments that follow ``python`` to serve the checkpoint ``folder``."""
        attention = self.loaded.causal.config._attn_implementation
        # The learner's own attention is registered under a name that a server's transformers does not have.
        if attention not in ("eager", "flash_attention_2"):
            attention = "sdpa"
        dtype = head_dtype(self.loaded.model)
        settings = {
            "folder": str(folder),
            "host": host,
            "port": port,
            "threads": self.options.threads or torch.get_num_threads(),
            "batch_sequences": self._batch_sequences,
            "dtype": self.options.dtype or dtype_of(self.loaded),
            "device": self.loaded.device.type,
            "head_dtype": dtype and str(dtype).removeprefix("torch."),
            "attention": attention,
            "use_library": self.options.loop == "library",
            "deterministic": torch.are_deterministic_algorithms_enabled(),
        }
        # -P: the working folder is not on the path, where a file of the user's may hide a module.
        return ["-P", "-m", "kl_comedy.rollouts.engines.hf_server", json.dumps(settings)]

    def environment(self) -> dict[str, str]:
        """The environment of a server."""
        return {**VARIABLES, **os.environ}

    def slots(self, group_size: int) -> int:
        """Requests in progress at one server."""
        return 1

    def groups_per_request(self, group_size: int, groups_per_server: int) -> int:
        """The most groups in one request: those of one batch, but no more than leave work for every server."""
        return max(1, min(self._batch_sequences // group_size, groups_per_server))

    def request(self, prompt: Prompt, fields: dict[str, Any], group: int) -> dict[str, Any]:
        """The request for the ``group``-th group of a call, whose sampling has ``fields``."""
        # The caller's precision, so that the sampler computes as the learner does.
        device_type = self.loaded.device.type
        autocast = None
        if torch.is_autocast_enabled(device_type):
            autocast = str(torch.get_autocast_dtype(device_type)).removeprefix("torch.")
        return {
            "token_ids": prompt.token_ids,
            "sampling_params": {**fields, "first_row": group * fields["n"]},
            "autocast": autocast,
        }


class EngineRollouts:
    """The servers of a run and the weights they were last given. Built on every rank; the leader talks to servers.

    ``publish`` (all ranks) and ``load`` (leader) may be called in one thread each while ``generate`` runs in another:
    completions in progress continue with the new weights, and every token's version is the one that its server names.
    Equal seeds give equal completions for equal weights and prompts, up to rounding.
    """

    def __init__(self, kind: VLLMServers | HFServers, temperature: float, leader: bool) -> None:
        self.version = 0
        self._kind = kind
        self._temperature = temperature
        self._leader = leader
        self._options: ServerOptions = kind.options
        self._loaded = kind.loaded
        self._context = kind.context
        self._dtype = self._options.dtype or dtype_of(self._loaded)
        self._output = EngineOutput(self._loaded)

        gpus = visible_gpus(self._loaded.device.type)
        self._transport_name = self._choose_transport(gpus)
        self._transport = TRANSPORTS[self._transport_name](self._loaded.device)
        self._gpus: list[Sequence[str]] = []
        if leader and gpus and not self._options.urls:
            self._gpus = server_gpus(self._options, gpus)

        # In the labels of weights: a server that two runs update is found by it (Refused, ANOTHER_RUN).
        self._run = secrets.token_hex(4)
        if self._options.urls:
            self._key = _read_key(self._options)
        else:
            # A new one for each run: its servers replace their weights for whoever has it.
            self._key = secrets.token_urlsafe(32)

        self._folder: Path | None = None
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        # One load at a time: an update and the first generate may both ask for it.
        self._load_lock = threading.Lock()
        self._staged: StagedWeights | None = None
        self._confirmed: StagedWeights | None = None
        self._weight_folders: set[Path] = set()
        self._servers = self._make_servers()

    def _choose_transport(self, gpus: Sequence[str]) -> str:
        lora = is_peft(self._loaded.model)
        if self._leader:
            return transport_of(self._options, lora=lora, gpus=gpus)
        # The other ranks send nothing. They must walk the same weights as the leader, or its gathering would hang.
        if sends_adapter(self._options, lora):
            return "adapter"
        return "folder"

    def _make_servers(self) -> list[Server]:
        """The servers that the leader talks to; none on other ranks. All ranks call."""
        if not self._options.urls:
            if not self._leader:
                return []
            numbers = range(self._options.servers)
            return [self._server(str(number), start=partial(self._start, number)) for number in numbers]
        # On every rank, also where nobody connects: the policy may be in shards, and its forward pass is collective.
        probe = make_probe(self._loaded, temperature=self._temperature)
        if not self._leader:
            return []
        return [self._connect(url, probe) for url in self._options.urls]

    def work_in(self, folder: Path) -> None:
        """Write logs and weights under ``folder``, and remove weights that a killed run left there."""
        self._folder = folder / "sampler"
        for pattern in ("weights-*", ".weights-*"):
            for old_weights in self._folder.glob(pattern):
                shutil.rmtree(old_weights, ignore_errors=True)

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
        # Of the weights at the start of the call: load may replace them while it samples.
        oldest_version = self.version
        fields = sampling_fields(sampling, ends=self._output.ends, n=group_size, seed=seed)
        requests = [self._kind.request(prompt, fields, group) for group, prompt in enumerate(prompts)]
        # By length, as the hf backend sorts them: batches of the same rows have the same bits.
        order = sorted(range(len(prompts)), key=lambda group: len(prompts[group].token_ids))
        # An even share, so that no server gets a whole batch while another is idle.
        groups_per_server = math.ceil(len(order) / len(self._servers))
        size = self._kind.groups_per_request(group_size, groups_per_server)
        tasks = [order[start : start + size] for start in range(0, len(order), size)]

        def ask(server: Server, task: Sequence[int]) -> list[list[Completion]]:
            answers = server.client.generate([requests[group] for group in task])
            for completion in itertools.chain.from_iterable(answers):
                if any(version < oldest_version for version in completion.versions):
                    # As after a restart that this run did not make: the server has weights of its own.
                    raise ServerTrouble(f"it draws from weights older than version {oldest_version}")
            return answers

        answers_by_task = dispatch(tasks, ask, self._servers, slots=self._kind.slots(group_size))
        completions: dict[int, list[Completion]] = {}
        for task, answers in zip(tasks, answers_by_task, strict=True):
            completions.update(zip(task, answers, strict=True))

        rollouts: list[Rollout] = []
        for group, prompt in enumerate(prompts):
            rows = completions[group]
            rollouts += self._output.rollouts(prompt, group, rows, group_size=group_size, stop=sampling.stop)
        # Without the sets the learner would not renormalize, and no error would say so.
        if sampling.records_kept and any(rollout.kept is None for rollout in rollouts):
            raise RunFailed("an inference server does not say which tokens its truncation kept")
        return rollouts

    def publish(self, version: int) -> None:
        """Stage the learner's weights as ``version`` (all ranks call, in step), and start servers of ours.

        Where the leader fails to write, it still takes part in the gathering, then raises.
        """
        probe = None
        if self._options.probe:
            probe = make_probe(self._loaded, temperature=self._temperature)
        weights = self._transport.weights(self._loaded.model, getattr(torch, self._dtype))
        staged = None
        try:
            if self._leader:
                folder = self._weights_folder(version)
                # The adapter transport stages the base once: its checksums come from the first staging.
                known: Mapping[str, str] = {}
                if self._staged is not None:
                    known = self._staged.checksums
                staged = stage(self._transport, self._loaded, weights, folder, version, probe, known)
        finally:
            # Each step of a sharded policy's walk is a collective: the other ranks hang where the leader stops early.
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
            # Asked twice for the same weights, as by an update and by the first generate after it.
            if staged is self._confirmed:
                return self.version
            try:
                self._send_to_all(staged)
            except RunFailed as error:
                if self._confirmed is not None or not self._options.urls:
                    raise
                # They never took any: the user named servers that do not fit.
                allowed = f"servers of the model that is trained, which take its weights by {self._transport_name}"
                raise bad_value("rollout.options.urls", list(self._options.urls), allowed, str(error)) from None
            if self._confirmed is None:
                names = ", ".join(server.name for server in self._servers)
                log.info(f"{names}: weights of version {staged.version} confirmed")
            self._confirmed = staged
            self.version = staged.version
            self._remove_old_folders(staged)
            return self.version

    def _send_to_all(self, staged: StagedWeights) -> None:
        """Raises :class:`RunFailed` when no server took the weights; a part of them is enough to go on."""
        with ThreadPoolExecutor(len(self._servers), thread_name_prefix="update") as pool:
            loaded = list(pool.map(lambda server: server.load(staged), self._servers))
        if not any(loaded):
            reason = failures(self._servers)
            raise RunFailed(f"no inference server took the weights of version {staged.version}. {reason}")

    def _remove_old_folders(self, confirmed: StagedWeights) -> None:
        # publish may have staged newer weights during the load; a server that fails is restarted on the confirmed ones.
        needed = {confirmed.folder}
        if self._staged is not None:
            needed.add(self._staged.folder)
        for folder in self._weight_folders - needed:
            shutil.rmtree(folder, ignore_errors=True)
            self._weight_folders.discard(folder)

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
        if self._options.weights_dir is not None:
            # Its permissions are its owner's choice: servers of other users may have to read it.
            return Path(self._options.weights_dir).absolute() / f"weights-{version:08d}"
        assert self._folder is not None
        self._folder.mkdir(parents=True, exist_ok=True)
        # Weights of a run that has not finished are for this user's servers alone.
        self._folder.chmod(0o700)
        return self._folder.absolute() / f"weights-{version:08d}"

    def _server(self, name: str, **connection: Any) -> Server:
        """A :class:`Server`; ``connection`` is its ``start`` or its ``client``."""
        full_name = f"{self._kind.name} server {name}"
        return Server(full_name, self._options, self._transport, self._probe_limit(), **connection)

    def _probe_limit(self) -> ProbeLimit:
        """A new limit for each server: it takes its tolerance from the first gap that it sees."""
        return ProbeLimit(probe_dtype(self._loaded, self._dtype), self._options.probe_tolerance)

    def _start(self, number: int, folder: Path) -> tuple[ChildProcess, Client]:
        """Start a server on the checkpoint ``folder``, without waiting for it.

        It listens on loopback, wants a key (in its environment, since arguments can be seen by other users), writes its
        output to a file, and is killed with all it started, also when the run dies.
        """
        import kl_comedy

        # A new port for each start: the old one may still be held by a process that is being killed.
        port = free_port()
        # The server must import the code that runs here, not an installed version.
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
        model = ADAPTER if self._transport_name == "adapter" else None
        return Client(url, key=self._key, timeout_s=limit_s, run=self._run, model=model)

    def _connect(self, url: str, probe: Probe) -> Server:
        """A server named by address. Raises :class:`UserError` where the run cannot use it."""
        client = self._client(url)
        try:
            complaint = self._meet(client, probe)
        except ServerTrouble as trouble:
            allowed = f"a running {self._kind.name} server"
            raise bad_value("rollout.options.urls", client.url, allowed, str(trouble)) from None
        except Refused as refusal:
            allowed, reason = self._explain_refusal(refusal)
            raise bad_value("rollout.options.urls", client.url, allowed, reason) from None
        if complaint is not None:
            allowed = "a server of the model that is trained"
            reason = f"{complaint}; serve model.source, with --logprobs-mode processed_logprobs"
            raise bad_value("rollout.options.urls", client.url, allowed, reason)
        return self._server(url, client=client)

    def _meet(self, client: Client, probe: Probe) -> str | None:
        """Remember the server's context; returns what is wrong with its log-probs, None where nothing is."""
        has_our_weights, context = client.identify()
        if context is not None:
            # The smallest of all servers: any of them may get any prompt.
            self._context = min(context, self._context or context)
        if has_our_weights:
            # Weights of an update differ from those that a run starts with; the first load replaces and checks them.
            return None
        return self._probe_limit().complaint(client.probe_gap(probe))

    def _explain_refusal(self, refusal: Refused) -> tuple[str, str]:
        """What ``rollout.options.urls`` allows in place of a server that refuses a request, and the reason."""
        if refusal.status == 401:
            source = self._options.api_key_file or f"the environment variable {self._options.api_key_env}"
            # A request without a key is refused like one with a wrong key; the user must do something else.
            key = "the API key in" if self._key else "an empty API key: there is none in"
            return "a server that takes our API key", f"it refuses {key} {source}"
        if refusal.status == 400:
            return "a server of the model that is trained", f"it refuses the probe's tokens: {refusal}"
        if "/weight_info" in str(refusal) or "/inference/" in str(refusal):
            # vLLM has these routes only where it was started with both.
            reason = f"{refusal}; start it with VLLM_SERVER_DEV_MODE=1 and --enable-scale-out"
            return "a vLLM server of 0.32 or later that takes weights", reason
        return f"a {self._kind.name} server", f"this is not one: {refusal}"


def _read_key(options: ServerOptions) -> str | None:
    """The key for servers named by address: that of the file, else that of the environment variable, else none."""
    if options.api_key_file is None:
        return os.environ.get(options.api_key_env) or None
    try:
        return Path(options.api_key_file).read_text().strip() or None
    except OSError as error:
        allowed = "a file that holds the API key"
        raise bad_value("rollout.options.api_key_file", options.api_key_file, allowed, str(error.strerror)) from None
