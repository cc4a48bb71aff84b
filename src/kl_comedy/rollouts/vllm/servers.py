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
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kl_comedy.errors import RunFailed, UserError, bad_value
from kl_comedy.records import Prompt, Rollout
from kl_comedy.registry import ROLLOUTS
from kl_comedy.rollouts.base import Policy, RolloutBackend, Sampling
from kl_comedy.rollouts.hf import check_lengths
from kl_comedy.rollouts.vllm import probe
from kl_comedy.rollouts.vllm.batch import Batch
from kl_comedy.rollouts.vllm.client import LABEL, Client, Identity, Refused, ServerTrouble
from kl_comedy.rollouts.vllm.engine import context_of, require_vllm
from kl_comedy.rollouts.vllm.member import Member, Weights
from kl_comedy.rollouts.vllm.options import KEY, ServerOptions, server_options, with_urls_of_the_job
from kl_comedy.rollouts.vllm.process import Launch, ServerProcess
from kl_comedy.rollouts.vllm.reading import Completion, Reader, check_temperature, prompt_seed, sampling_fields
from kl_comedy.rollouts.vllm.weights import write_weights

if TYPE_CHECKING:
    from kl_comedy.config.schema import RolloutConfig

BAD_REQUEST = 400
MOST_REQUESTS = 64
"""Requests at a time to one server; each is a thread here, and more would not make it faster."""


@ROLLOUTS.register(
    "vllm_server",
    source="vLLM /inference/v1/generate; weights by /collective_rpc reload_weights",
    summary="One or many vLLM servers, started by the run or named by address; they may die or hang.",
)
def build_vllm_server(config: RolloutConfig, *, loaded: Policy) -> RolloutBackend:
    """Build the backend. Servers named by address are asked who they are, and refused here where they do not fit.

    Raises :class:`UserError` for a bad option, an address that is not a vLLM server, a wrong key, a server without
    the routes that replace weights, and one that serves another model than the trainer's.
    """
    options = server_options(with_urls_of_the_job(config.options))
    check_temperature(config.temperature)
    if not options.urls:
        require_vllm("vllm_server")
    return VLLMServerRollouts(loaded, options, temperature=config.temperature, max_num_seqs=config.batch_sequences)


class VLLMServerRollouts:
    """The servers of a run and the weights they were last given. Seeds act as in :class:`VLLMRollouts`."""

    in_flight = True

    def __init__(self, loaded: Policy, options: ServerOptions, *, temperature: float, max_num_seqs: int) -> None:
        self.version = 0
        self._loaded, self._options, self._temperature = loaded, options, temperature
        self._dtype = options.dtype or str(loaded.causal.dtype).removeprefix("torch.")
        self._max_num_seqs = max_num_seqs
        self._reader = Reader(loaded)
        self._key = _key_of(options) if options.urls else secrets.token_urlsafe(32)
        self._limit = options.max_model_len
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._folder: Path | None = None
        self._weights: Weights | None = None
        self._update_lock = threading.Lock()
        self._members = self._connected() if options.urls else self._own()

    def work_in(self, folder: Path) -> None:
        """Keep logs and weights under ``folder``, and start the servers: they load while the run goes on."""
        self._folder = folder / "sampler"
        self._publish(self.version)

    def generate(self, prompts: Sequence[Prompt], *, group_size: int, sampling: Sampling, seed: int) -> list[Rollout]:
        """See :class:`RolloutBackend`. May run while :meth:`update_weights` is called from another thread: requests
        in flight go on with the new weights, and every token's version is the server's own word.

        Raises as the ``hf`` backend does, and :class:`RunFailed` when no server is left.
        """
        if group_size < 1:
            raise bad_value("rollout.group_size", group_size, "1 or more")
        check_lengths(self._loaded, prompts, sampling, limit=self._limit)
        if not prompts:
            return []
        self._ensure_weights()

        def ask(member: Member, group: int) -> list[Completion]:
            fields = sampling_fields(sampling, ends=self._reader.ends, n=group_size, seed=prompt_seed(seed, group))
            return member.client.generate(prompts[group].token_ids, fields)

        for member in self._members:
            member.new_round()
        slots = max(1, min(MOST_REQUESTS, self._max_num_seqs // group_size))
        answers = Batch(len(prompts), ask).run(self._members, slots=slots)
        found: list[Rollout] = []
        for group, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            found += self._reader.rollouts(prompt, group, answer, group_size=group_size, stop=sampling.stop)
        return found

    def update_weights(self, version: int) -> None:
        """Write the weights, and have every server take them; one that fails is brought back with them.

        Raises :class:`RunFailed` when no server is left, and when one has other weights than the trainer afterwards.
        """
        self.version = version
        with self._update_lock:
            self._send(self._publish(version))

    def close(self) -> None:
        """Kill the servers that are ours, and remove the weights written for them."""
        for member in self._members:
            member.close()
        if self._weights is not None:
            shutil.rmtree(self._weights.folder, ignore_errors=True)
            with contextlib.suppress(OSError):
                self._weights.folder.parent.rmdir()
        if self._temporary is not None:
            self._temporary.cleanup()

    def processes(self) -> list[ServerProcess]:
        """The servers of ours that were started, in order."""
        return [member.process for member in self._members if member.process is not None]

    def _ensure_weights(self) -> None:
        """Before the first batch of a run without an update, the servers get the weights as they are."""
        with self._update_lock:
            if self._weights is None or not self._sent:
                self._send(self._weights or self._publish(self.version))

    _sent = False

    def _publish(self, version: int) -> Weights:
        """The learner's weights as a checkpoint folder, and what the probe must find; own servers are started on it."""
        folder = self._weights_root() / f"weights-{version:08d}"
        write_weights(self._loaded, folder, dtype=getattr(torch, self._dtype))
        asked = self._options.probe
        reference = probe.probe_reference(self._loaded, temperature=self._temperature) if asked else None
        older, self._weights = self._weights, Weights(
            folder=folder, version=version, reference=reference, temperature=self._temperature,
            tolerance=probe.tolerance(self._dtype, self._options.probe_tolerance),
        )  # fmt: skip
        for member in self._members:
            member.launch(folder)
        self._older = None if older is None or older.folder == folder else older.folder
        return self._weights

    def _send(self, weights: Weights) -> None:
        for member in self._members:
            member.new_round()
        with ThreadPoolExecutor(len(self._members), thread_name_prefix="vllm update") as pool:
            taken = list(pool.map(lambda member: member.take(weights), self._members))
        if not any(taken):
            reasons = "; ".join(f"{member.name}: {member.lost}" for member in self._members)
            raise RunFailed(f"no vLLM server took the weights of version {weights.version}. {reasons}")
        self._sent = True
        if self._older is not None and all(taken):
            shutil.rmtree(self._older, ignore_errors=True)
            self._older = None

    _older: Path | None = None

    def _weights_root(self) -> Path:
        if self._options.weights_dir is not None:
            return Path(self._options.weights_dir).absolute()
        if self._folder is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="kl_comedy_vllm_")
            self._folder = Path(self._temporary.name)
        return self._folder.absolute()

    def _own(self) -> list[Member]:
        options, on_gpu = self._options, self._loaded.device.type == "cuda"
        context = options.max_model_len or context_of(self._loaded)
        launch = Launch(
            options=options, dtype=self._dtype, context=context, max_num_seqs=self._max_num_seqs, on_gpu=on_gpu
        )  # fmt: skip

        def starter(number: int) -> Member:
            def start(folder: Path) -> tuple[ServerProcess, Client]:
                gpus = options.gpus[number] if options.gpus else None
                log = (self._folder or folder.parent) / f"server-{number}.log"
                process = ServerProcess(launch, folder, key=self._key or "", gpus=gpus, log=log)
                return process, Client(process.url, key=self._key, timeout_s=options.request_timeout_s)

            return self._member(f"vLLM server {number}", client=None, start=start)

        return [starter(number) for number in range(options.servers)]

    def _connected(self) -> list[Member]:
        found = []
        for url in self._options.urls:
            client = Client(url, key=self._key, timeout_s=self._options.request_timeout_s)
            identity = self._identified(client)
            if identity.context is not None:
                self._limit = min(identity.context, self._limit or identity.context)
            found.append(self._member(f"vLLM server {url}", client=client, start=None))
        return found

    def _member(self, name: str, **parts: object) -> Member:
        options = self._options
        return Member(name, start_timeout_s=options.start_timeout_s, retries=options.retries, **parts)  # type: ignore[arg-type]

    def _identified(self, client: Client) -> Identity:
        """Who answers at an address; a server that still has its own weights must have the trainer's."""
        try:
            identity = client.identify()
            if not identity.label.startswith(LABEL):
                self._check_model(client, identity)
        except ServerTrouble as trouble:
            raise bad_value(f"{KEY}.urls", client.url, "a running vLLM server", str(trouble)) from trouble
        except Refused as refusal:
            raise self._explained(client.url, refusal) from refusal
        return identity

    def _check_model(self, client: Client, identity: Identity) -> None:
        reference = probe.probe_reference(self._loaded, temperature=self._temperature)
        allowed = probe.tolerance(self._dtype, self._options.probe_tolerance)
        try:
            found = probe.gap(reference, client.probe(reference.ids, probe.fields(self._temperature)))
        except Refused as refusal:
            if refusal.status != BAD_REQUEST:
                raise
            fault = f"which does not take tokens of the trainer's vocabulary: {refusal}"
        else:
            if found <= allowed:
                return
            fault = (
                f"whose log-probs differ from the trainer's by up to {found:.3g} nats, at most {allowed:.3g} are "
                "tolerated; serve model.source, with --logprobs-mode processed_logprobs"
            )
        raise bad_value(
            f"{KEY}.urls", client.url, "a server of the model that is trained", f"it serves {identity.model!r}, {fault}"
        )

    def _explained(self, url: str, refusal: Refused) -> UserError:
        source = self._options.api_key_file or f"the environment variable {self._options.api_key_env}"
        if refusal.status == 401:
            held = "the API key in" if self._key else "an empty API key: there is none in"
            return bad_value(f"{KEY}.urls", url, "a server that takes our API key", f"it refuses {held} {source}")
        if "/weight_info" in str(refusal) or "/inference/" in str(refusal):
            return bad_value(
                f"{KEY}.urls", url, "a vLLM server of 0.32 or later that takes weights",
                f"{refusal}; start it with VLLM_SERVER_DEV_MODE=1 and --enable-scale-out",
            )  # fmt: skip
        return bad_value(f"{KEY}.urls", url, "a vLLM server", f"this is not one: {refusal}")


def _key_of(options: ServerOptions) -> str | None:
    """The key for servers that are not ours: of the file, else of the environment variable, else none."""
    if options.api_key_file is None:
        return os.environ.get(options.api_key_env) or None
    try:
        return Path(options.api_key_file).read_text().strip() or None
    except OSError as error:
        raise bad_value(
            f"{KEY}.api_key_file", options.api_key_file, "a file that holds the API key", str(error.strerror)
        ) from None
