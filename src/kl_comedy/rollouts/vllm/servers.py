"""vLLM as servers: started by the run on loopback, or named by ``rollout.options.urls``.

update_weights: checkpoint folder on a shared file system (written beside, renamed) -> per server: pause, reload,
                reset the prefix cache, label the weights, resume -> probe
generate:       one request a prompt's group -> token ids, log-probs and weight version of every token
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kl_comedy.errors import RunFailed, UserError, bad_value
from kl_comedy.processes import ChildProcess
from kl_comedy.records import Capabilities, Prompt, Rollout
from kl_comedy.registry import ROLLOUTS
from kl_comedy.rollouts.base import Policy, RolloutBackend, Sampling
from kl_comedy.rollouts.hf import check_lengths
from kl_comedy.rollouts.vllm.client import LABEL, Client, Identity, Refused, ServerTrouble
from kl_comedy.rollouts.vllm.convert import Completion, Converter, check_temperature, prompt_seed, sampling_fields
from kl_comedy.rollouts.vllm.dispatch import Dispatch
from kl_comedy.rollouts.vllm.engine import context_of, require_vllm
from kl_comedy.rollouts.vllm.options import KEY, ServerOptions, server_options
from kl_comedy.rollouts.vllm.probe import Probe, make_probe
from kl_comedy.rollouts.vllm.server import Launch, Server, Weights
from kl_comedy.rollouts.vllm.weights import write_weights

if TYPE_CHECKING:
    from kl_comedy.config.schema import RolloutConfig

MAX_REQUESTS = 64
"""Requests at a time to one server; each is a thread here, and more would not make it faster."""


@ROLLOUTS.register(
    "vllm_server",
    source="vLLM /inference/v1/generate; weights by /collective_rpc reload_weights",
    summary="One or many vLLM servers, started by the run or named by address; they may die or hang.",
    capabilities=Capabilities(in_trainer_ranks=False, updates_between_tokens=True, needs_folder=True),
)
def build_vllm_server(config: RolloutConfig, *, loaded: Policy) -> RolloutBackend:
    """Build the backend. Servers named by address are asked who they are, and refused here where they do not fit.

    Raises :class:`UserError` for a bad option, an address that is not a vLLM server, a wrong key, a server without
    the routes that replace weights, and one that serves another model than the trainer's.
    """
    options = server_options(config.options)
    check_temperature(config.temperature)
    if not options.urls:
        require_vllm("vllm_server")
    return VLLMServerRollouts(loaded, options, temperature=config.temperature, max_num_seqs=config.batch_sequences)


class VLLMServerRollouts:
    """The servers of a run and the weights they were last given. Seeds act as in :class:`VLLMRollouts`."""

    def __init__(self, loaded: Policy, options: ServerOptions, *, temperature: float, max_num_seqs: int) -> None:
        self.version = 0
        self._loaded, self._options, self._temperature = loaded, options, temperature
        self._dtype = options.dtype or str(loaded.causal.dtype).removeprefix("torch.")
        self._max_num_seqs = max_num_seqs
        self._converter = Converter(loaded)
        self._key = _read_key(options) if options.urls else secrets.token_urlsafe(32)
        self._limit = options.max_model_len
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._folder: Path | None = None
        self._weights: Weights | None = None
        self._sent = False
        self._obsolete: Path | None = None
        self._update_lock = threading.Lock()
        self._servers = self._connect() if options.urls else self._configure()

    def work_in(self, folder: Path) -> None:
        """Keep logs and weights under ``folder``, and start the servers: they load while the run continues."""
        self._folder = folder / "sampler"
        self._write(self.version)

    def generate(self, prompts: Sequence[Prompt], *, group_size: int, sampling: Sampling, seed: int) -> list[Rollout]:
        """See :class:`RolloutBackend`. May run while :meth:`update_weights` is called from another thread: requests
        in progress continue with the new weights, and every token's version is the one that the server names.

        Raises as the ``hf`` backend does, and :class:`RunFailed` when no server is left.
        """
        if group_size < 1:
            raise bad_value("rollout.group_size", group_size, "1 or more")
        check_lengths(self._loaded, prompts, sampling, limit=self._limit)
        if not prompts:
            return []
        with self._update_lock:
            if self._weights is None or not self._sent:  # before the first batch of a run without an update
                self._send(self._weights or self._write(self.version))

        def ask(server: Server, group: int) -> list[Completion]:
            fields = sampling_fields(sampling, ends=self._converter.ends, n=group_size, seed=prompt_seed(seed, group))
            return server.client.generate(prompts[group].token_ids, fields)

        for server in self._servers:
            server.allow_restarts()
        slots = max(1, min(MAX_REQUESTS, self._max_num_seqs // group_size))
        answers = Dispatch(len(prompts), ask).run(self._servers, slots=slots)
        return [
            rollout
            for group, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
            for rollout in self._converter.rollouts(prompt, group, answer, group_size=group_size, stop=sampling.stop)
        ]

    def update_weights(self, version: int) -> None:
        """Write the weights, and have every server take them; one that fails is restarted with them.

        Raises :class:`RunFailed` when no server is left, and when one has other weights than the trainer afterwards.
        """
        self.version = version
        with self._update_lock:
            self._send(self._write(version))

    def close(self) -> None:
        """Kill the servers that are ours, and remove the weights written for them."""
        for server in self._servers:
            server.close()
        if self._weights is not None:
            shutil.rmtree(self._weights.folder, ignore_errors=True)
            with contextlib.suppress(OSError):
                self._weights.folder.parent.rmdir()
        if self._temporary is not None:
            self._temporary.cleanup()

    def processes(self) -> list[ChildProcess]:
        """The servers of ours that were started, in order."""
        return [server.process for server in self._servers if server.process is not None]

    def _write(self, version: int) -> Weights:
        """The learner's weights as a checkpoint folder, and their probe; servers of ours are started on it."""
        if self._options.weights_dir is not None:
            root = Path(self._options.weights_dir)
        else:
            if self._folder is None:
                self._temporary = tempfile.TemporaryDirectory(prefix="kl_comedy_vllm_")
                self._folder = Path(self._temporary.name)
            root = self._folder
        folder = root.absolute() / f"weights-{version:08d}"
        write_weights(self._loaded, folder, dtype=getattr(torch, self._dtype))
        previous = self._weights
        self._weights = Weights(folder=folder, version=version, probe=self._probe() if self._options.probe else None)
        for server in self._servers:
            server.launch(folder)
        self._obsolete = None if previous is None or previous.folder == folder else previous.folder
        return self._weights

    def _send(self, weights: Weights) -> None:
        for server in self._servers:
            server.allow_restarts()
        with ThreadPoolExecutor(len(self._servers), thread_name_prefix="vllm update") as pool:
            loaded = list(pool.map(lambda server: server.load(weights), self._servers))
        if not any(loaded):
            reasons = "; ".join(f"{server.name}: {server.failure}" for server in self._servers)
            raise RunFailed(f"no vLLM server took the weights of version {weights.version}. {reasons}")
        self._sent = True
        if self._obsolete is not None and all(loaded):
            shutil.rmtree(self._obsolete, ignore_errors=True)
            self._obsolete = None

    def _probe(self) -> Probe:
        return make_probe(
            self._loaded, temperature=self._temperature, dtype=self._dtype, tolerance=self._options.probe_tolerance
        )

    def _configure(self) -> list[Server]:
        """The servers that the run starts once there are weights."""
        options = self._options
        launch = Launch(
            options=options,
            dtype=self._dtype,
            context=options.max_model_len or context_of(self._loaded),
            max_num_seqs=self._max_num_seqs,
            on_gpu=self._loaded.device.type == "cuda",
        )

        def start(number: int, folder: Path) -> tuple[ChildProcess, Client]:
            gpus = options.gpus[number] if options.gpus else None
            log = (self._folder or folder.parent) / f"server-{number}.log"
            return launch.start(folder, key=self._key or "", gpus=gpus, log=log)

        return [
            Server(
                f"vLLM server {number}",
                start=partial(start, number),
                start_timeout_s=options.start_timeout_s,
                retries=options.retries,
            )
            for number in range(options.servers)
        ]

    def _connect(self) -> list[Server]:
        """The servers named by address; one that still has its own weights must have the trainer's."""
        options, servers = self._options, []
        for url in options.urls:
            client = Client(url, key=self._key, timeout_s=options.request_timeout_s)
            try:
                identity = client.identify()
                if not identity.label.startswith(LABEL):
                    self._check_model(client, identity)
            except ServerTrouble as trouble:
                raise bad_value(f"{KEY}.urls", client.url, "a running vLLM server", str(trouble)) from trouble
            except Refused as refusal:
                raise self._explain(client.url, refusal) from refusal
            if identity.context is not None:
                self._limit = min(identity.context, self._limit or identity.context)
            name, timeout_s = f"vLLM server {url}", options.start_timeout_s
            servers.append(Server(name, client=client, start_timeout_s=timeout_s, retries=options.retries))
        return servers

    def _check_model(self, client: Client, identity: Identity) -> None:
        probe = self._probe()
        try:
            gap = probe.gap(client.answer(probe))
        except Refused as refusal:
            if refusal.status != 400:
                raise
            fault = f"which does not take tokens of the trainer's vocabulary: {refusal}"
        else:
            if gap <= probe.tolerance:
                return
            fault = (
                f"whose log-probs differ from the trainer's by up to {gap:.3g} nats, at most {probe.tolerance:.3g} are "
                "tolerated; serve model.source, with --logprobs-mode processed_logprobs"
            )
        raise bad_value(
            f"{KEY}.urls", client.url, "a server of the model that is trained", f"it serves {identity.model!r}, {fault}"
        )

    def _explain(self, url: str, refusal: Refused) -> UserError:
        allowed, why = "a vLLM server", f"this is not one: {refusal}"
        if refusal.status == 401:
            source = self._options.api_key_file or f"the environment variable {self._options.api_key_env}"
            key = "the API key in" if self._key else "an empty API key: there is none in"
            allowed, why = "a server that takes our API key", f"it refuses {key} {source}"
        elif "/weight_info" in str(refusal) or "/inference/" in str(refusal):
            allowed = "a vLLM server of 0.32 or later that takes weights"
            why = f"{refusal}; start it with VLLM_SERVER_DEV_MODE=1 and --enable-scale-out"
        return bad_value(f"{KEY}.urls", url, allowed, why)


def _read_key(options: ServerOptions) -> str | None:
    """The key for servers that are not ours: of the file, else of the environment variable, else none."""
    if options.api_key_file is None:
        return os.environ.get(options.api_key_env) or None
    try:
        return Path(options.api_key_file).read_text().strip() or None
    except OSError as error:
        raise bad_value(
            f"{KEY}.api_key_file", options.api_key_file, "a file that holds the API key", str(error.strerror)
        ) from None
