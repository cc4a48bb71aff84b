"""One batch over many servers: every prompt's group is answered once, whichever servers fail on the way.

pending groups -> a worker per free slot of a server -> answered
               <- given back when the server failed, and asked elsewhere or again

One server of a run: its client, its process where it is ours, and how it is brought back when it fails.

vLLM as servers: started by the run on loopback, or named by ``rollout.options.urls``.

update_weights: checkpoint folder on a shared file system (written beside, renamed) -> per server: pause, reload,
                reset the prefix cache, label the weights, resume -> probe
generate:       one request a prompt's group -> token ids, log-probs and weight version of every token
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kl_comedy.errors import RunFailed, UserError, bad_value
from kl_comedy.records import Capabilities, Prompt, Rollout
from kl_comedy.registry import ROLLOUTS
from kl_comedy.rollouts.base import Policy, RolloutBackend, Sampling
from kl_comedy.rollouts.hf import check_lengths
from kl_comedy.rollouts.vllm import weights as probe
from kl_comedy.rollouts.vllm.client import LABEL, Client, Identity, Refused, ServerTrouble
from kl_comedy.rollouts.vllm.engine import context_of, require_vllm
from kl_comedy.rollouts.vllm.options import KEY, ServerOptions, server_options, with_urls_of_the_job
from kl_comedy.rollouts.vllm.process import Launch, ServerProcess
from kl_comedy.rollouts.vllm.protocol import Completion, Reader, check_temperature, prompt_seed, sampling_fields
from kl_comedy.rollouts.vllm.weights import write_weights

if TYPE_CHECKING:
    from kl_comedy.config.schema import RolloutConfig


Ask = Callable[["Member", int], list[Completion]]


class Batch:
    """The groups of one call, numbered from 0; see :meth:`run`."""

    def __init__(self, groups: int, ask: Ask) -> None:
        self._ask = ask
        self._pending = deque(range(groups))
        self._answers: dict[int, list[Completion]] = {}
        self._groups = groups
        self._workers = 0
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def run(self, members: Sequence[Member], *, slots: int) -> list[list[Completion]]:
        """Answers in order. Returns as soon as all are there, though a failed server may still be coming back.

        Raises :class:`RunFailed` when the last server is given up, and what the first worker that met it raised.
        """
        threads = [
            threading.Thread(target=self._work, args=(member,), daemon=True, name=f"{member.name} {slot}")
            for slot in range(min(slots, self._groups))
            for member in members
        ]
        self._workers = len(threads)
        for thread in threads:
            thread.start()
        with self._changed:
            self._changed.wait_for(lambda: self._over() or self._workers == 0)
        if self._error is not None:
            raise self._error
        if len(self._answers) < self._groups:
            reasons = "; ".join(f"{member.name}: {member.lost}" for member in members)
            raise RunFailed(f"no vLLM server is left to sample from. {reasons}")
        return [self._answers[group] for group in range(self._groups)]

    def _over(self) -> bool:
        return self._error is not None or len(self._answers) == self._groups

    def _take(self) -> int | None:
        """A group to ask for; waits while others are being asked for, since they may be given back."""
        with self._changed:
            self._changed.wait_for(lambda: self._over() or self._pending)
            return None if self._over() else self._pending.popleft()

    def _work(self, member: Member) -> None:
        try:
            while (group := self._take()) is not None:
                epoch = member.epoch
                try:
                    self._settle(group, self._ask(member, group))
                except ServerTrouble as trouble:
                    self._give_back(group)
                    if not member.recover(epoch, trouble):
                        return
                except Refused as refusal:
                    raise RunFailed(f"{member.name} refuses to sample: {refusal}") from refusal
        except BaseException as error:  # handed to the thread that waits in run()
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()
        finally:
            with self._changed:
                self._workers -= 1
                self._changed.notify_all()

    def _settle(self, group: int, answer: list[Completion]) -> None:
        with self._changed:
            self._answers[group] = answer
            self._changed.notify_all()

    def _give_back(self, group: int) -> None:
        with self._changed:
            self._pending.appendleft(group)
            self._changed.notify_all()


log = logging.getLogger("kl_comedy")

FIRST_WAIT_S = 0.2
LONGEST_WAIT_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Published weights: the checkpoint folder, its version, and what the probe must find (None: no probe)."""

    folder: Path
    version: int
    reference: probe.ProbeReference | None
    temperature: float
    tolerance: float


class Member:
    """A server and its state. ``epoch`` counts how often it was brought back: who failed in an older epoch only has to
    ask again. ``start`` starts a process on a folder and returns it with its client; None for a server not ours."""

    def __init__(
        self,
        name: str,
        *,
        client: Client | None,
        start: Callable[[Path], tuple[ServerProcess, Client]] | None,
        start_timeout_s: float,
        retries: int,
    ) -> None:
        self.name = name
        self.process: ServerProcess | None = None
        self.epoch = 0
        self.lost: str | None = None
        self._client, self._start = client, start
        self._timeout, self._retries = start_timeout_s, retries
        self._lock = threading.RLock()
        self._weights: Weights | None = None
        self._failures = 0
        self._closed = False

    @property
    def client(self) -> Client:
        if self._client is None:
            raise ServerTrouble("it is not running")
        return self._client

    def launch(self, folder: Path) -> None:
        """Start the process, where it is ours and does not run, without waiting for it."""
        with self._lock:
            if self._start is not None and self.process is None and not self._closed:
                self.process, self._client = self._start(folder)

    def new_round(self) -> None:
        """A batch or an update begins: it may fail ``retries`` times again, and a lost one is given a chance."""
        self._failures, self.lost = 0, None

    def take(self, weights: Weights) -> bool:
        """Have the server sample from ``weights``, bringing it back where needed; False when it was given up."""
        with self._lock:
            self._weights = weights
            epoch = self.epoch
            try:
                self.launch(weights.folder)
                self._settle(weights)
                return True
            except ServerTrouble as trouble:
                return self.recover(epoch, trouble)

    def recover(self, epoch: int, trouble: ServerTrouble) -> bool:
        """After a failure seen in ``epoch``: once per failure, however many requests met it. False: given up.

        A process of ours is killed and replaced; a server that is not ours is waited for. Both get the current
        weights. Raises :class:`RunFailed` where the server is there and has, or takes, other weights.
        """
        with self._lock:
            while epoch == self.epoch and self.lost is None and not self._closed:
                self._failures += 1
                if self._failures > self._retries:
                    self.lost = f"{trouble} (after {self._retries} attempts to bring it back)"
                    log.warning(f"{self.name} is given up: {self.lost}")
                    break
                log.warning(f"{self.name}: {trouble}; bringing it back")
                try:
                    self._bring_back()
                    self.epoch += 1
                except ServerTrouble as again:
                    trouble = again
            return self.lost is None and not self._closed

    def close(self) -> None:
        """Kill the process where it is ours."""
        self._closed = True
        process, client = self.process, self._client
        if process is not None:
            process.kill()
        if client is not None:
            client.close()

    def _bring_back(self) -> None:
        assert self._weights is not None
        if self._start is not None:
            if self.process is not None:
                self.process.kill()
                self.process = None
            self.launch(self._weights.folder)
        self._settle(self._weights)

    def _settle(self, weights: Weights) -> None:
        """Wait until the server answers, send the weights, probe."""
        self._wait_until_ready()
        try:
            self.client.take_weights(weights.folder, weights.version)
            if weights.reference is None:
                return
            answer = self.client.probe(weights.reference.ids, probe.fields(weights.temperature))
        except Refused as refusal:
            raise RunFailed(
                f"{self.name} did not take the weights of version {weights.version}: {refusal}"
            ) from refusal
        found = probe.gap(weights.reference, answer)
        if not found <= weights.tolerance:
            raise RunFailed(probe.message(self.name, weights.version, found, weights.tolerance))

    def _wait_until_ready(self) -> None:
        deadline, wait = time.monotonic() + self._timeout, FIRST_WAIT_S
        while not self.client.ready():
            if self._closed:
                raise ServerTrouble("it was closed")
            if self.process is not None and not self.process.alive:
                raise ServerTrouble(f"it ended: {self.process.last_words()} (log: {self.process.log})")
            if time.monotonic() > deadline:
                raise ServerTrouble(f"it does not answer within {self._timeout:g} s")
            time.sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT_S)


BAD_REQUEST = 400
MOST_REQUESTS = 64
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
    options = server_options(with_urls_of_the_job(config.options))
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
        older, self._weights = (
            self._weights,
            Weights(
                folder=folder,
                version=version,
                reference=reference,
                temperature=self._temperature,
                tolerance=probe.tolerance(self._dtype, self._options.probe_tolerance),
            ),
        )
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
        )

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
                f"{KEY}.urls",
                url,
                "a vLLM server of 0.32 or later that takes weights",
                f"{refusal}; start it with VLLM_SERVER_DEV_MODE=1 and --enable-scale-out",
            )
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
