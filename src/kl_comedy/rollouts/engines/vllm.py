"""vLLM: the engine in the trainer's process (``vllm``), and the commands and requests of a ``vllm_server``.

build: config and tokenizer to a folder -> engine with dummy weights -> update_weights(0)
update_weights: every weight, one tensor at a time, through the engine's reload_weights -> reset the prefix cache ->
                probe
on a GPU the engine sleeps, without weights, while the trainer learns, and takes them when it wakes up:
                memory of the weights -> reload_weights -> memory of the cache -> probe -> generate -> sleep
"""

from __future__ import annotations

import contextlib
import hmac
import os
import random
import tempfile
from collections.abc import Awaitable, Callable, Iterator, MutableMapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kl_comedy.errors import RunFailed, UserError, bad_value
from kl_comedy.models import LoadedModel
from kl_comedy.models.sources import first_line
from kl_comedy.models.weights import Checksums, full_weights
from kl_comedy.processes import LOOPBACK
from kl_comedy.records import Capabilities, Prompt, Rollout
from kl_comedy.registry import ROLLOUTS
from kl_comedy.rollouts.base import RolloutBackend, Sampling
from kl_comedy.rollouts.decoding import Completion
from kl_comedy.rollouts.engines.client import EngineOutput, check_key, prompt_seed, sampling_fields
from kl_comedy.rollouts.engines.options import (
    GPU_SHARE,
    KEY_VARIABLE,
    SERVER_GPU_SHARE,
    InProcessOptions,
    VLLMOptions,
    VLLMServerOptions,
    engine_options,
    require_vllm,
)
from kl_comedy.rollouts.engines.transports import Transport
from kl_comedy.rollouts.engines.weights import (
    ProbeLimit,
    checksum_complaint,
    dtype_of,
    hashed,
    make_probe,
    vocabulary_of,
    write_config,
)
from kl_comedy.rollouts.hf import check_request

if TYPE_CHECKING:
    from kl_comedy.config.schema import RolloutConfig

MAX_REQUESTS = 64
"""Requests in progress at one server. Each is a thread of the trainer, and more would not make the server faster."""
MAX_TEMPERATURE = 2.0
"""vLLM refuses a higher one."""
CPU_KV_CACHE_GIB = 1.0
"""On a CPU, where ``rollout.options.kv_cache_gib`` is null. The default of vLLM is several times as large."""


@ROLLOUTS.register(
    "vllm",
    source="vLLM LLM.generate; weights by GPUModelRunner.reload_weights",
    summary="vLLM's engine in this process; weights replaced in place after every update.",
    capabilities=Capabilities(),
    options=InProcessOptions,
)
def build_vllm(config: RolloutConfig, *, loaded: LoadedModel) -> RolloutBackend:
    """Build the in-process engine. Raises :class:`UserError` for a bad option, and where vLLM cannot be used."""
    options = engine_options(InProcessOptions, config.options)
    check_temperature(config.temperature, "rollout.temperature")
    require_vllm("vllm")
    return VLLMRollouts(loaded, options, temperature=config.temperature, max_num_seqs=config.batch_sequences)


def check_temperature(temperature: float, key: str = "temperature") -> None:
    """Raise :class:`UserError` for a temperature above :data:`MAX_TEMPERATURE`."""
    if temperature > MAX_TEMPERATURE:
        raise bad_value(key, temperature, f"up to {MAX_TEMPERATURE:g}", "vLLM takes no higher one")


class VLLMRollouts:
    """The engine in the trainer's process.

    Equal seeds give equal completions for equal weights and prompts, up to rounding: which prompts are computed
    together can change the last digit of a log-prob.
    """

    def __init__(
        self, loaded: LoadedModel, options: InProcessOptions, *, temperature: float, max_num_seqs: int
    ) -> None:
        self.version = 0
        self._loaded = loaded
        self._options = options
        self._temperature = temperature
        self._on_gpu = loaded.device.type == "cuda"
        self._sleeps = self._on_gpu and options.sleep is not False
        self._dtype = options.dtype or dtype_of(loaded)
        self._limit = ProbeLimit(self._dtype, options.probe_tolerance)
        self._output = EngineOutput(loaded)
        self._folder = tempfile.TemporaryDirectory(prefix="kl_comedy_vllm_")
        # vLLM makes a process group where there is none; only that one may be destroyed at the end.
        self._owns_group = not torch.distributed.is_initialized()
        write_config(loaded, Path(self._folder.name))
        self._engine: Any = None
        try:
            with _preserved_global_state():
                self._engine = self._start(max_num_seqs)
            if self._sleeps:
                # Level 2 drops the weights too: the learner has them.
                self._engine.sleep(level=2)
            self.update_weights(0)
        except BaseException:
            # Nobody else could: the object is not built, and the engine holds most of the GPU.
            self.close()
            raise

    def generate(self, prompts: Sequence[Prompt], *, group_size: int, sampling: Sampling, seed: int) -> list[Rollout]:
        """See :class:`RolloutBackend`. Raises as the ``hf`` backend does."""
        check_temperature(sampling.temperature)
        check_request(self._loaded, prompts, sampling, group_size, limit=self._options.max_model_len)
        if not prompts:
            return []
        fields = []
        for position in range(len(prompts)):
            group_seed = prompt_seed(seed, position)
            fields.append(sampling_fields(sampling, ends=self._output.ends, n=group_size, seed=group_seed))
        with self._awake():
            answers = self._ask([prompt.token_ids for prompt in prompts], fields)
        rollouts: list[Rollout] = []
        for group, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            rows = []
            for output in sorted(answer.outputs, key=lambda output: output.index):
                ids = list(output.token_ids)
                versions = [self.version] * len(ids)
                rows.append(Completion(ids=ids, logps=_logps_of(ids, output.logprobs), versions=versions))
            rollouts += self._output.rollouts(prompt, group, rows, group_size=group_size, stop=sampling.stop)
        return rollouts

    def update_weights(self, version: int) -> None:
        """Send every weight, drop what was cached under the old ones, and probe.

        An engine that sleeps takes the weights when it wakes up (:meth:`generate`). Raises :class:`RunFailed` where the
        engine does not have the trainer's weights afterwards.
        """
        self.version = version
        if not self._sleeps:
            checksums = self._send_weights()
            self._check_weights(checksums)

    def _send_weights(self) -> Checksums:
        """Replace the engine's weights; the checksums of what was sent."""
        checksums = Checksums(fused=True)
        weights = hashed(full_weights(self._loaded.model, getattr(torch, self._dtype)), checksums)
        try:
            self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        # Whatever the engine raises means that it does not have these weights.
        except Exception as error:
            raise RunFailed(f"vLLM did not take the weights of version {self.version}: {first_line(error)}") from error
        return checksums

    def _check_weights(self, checksums: Checksums) -> None:
        """Drop what was cached under the old weights, and compare the new ones with the trainer's."""
        if not self._engine.reset_prefix_cache():
            raise RunFailed(f"vLLM did not drop its prefix cache when it got the weights of version {self.version}")
        # One answer: the engine in process has one worker.
        (engine_checksums,) = self._engine.collective_rpc("compute_weight_checksums")
        vocabulary = vocabulary_of(self._loaded)
        complaint = checksum_complaint(engine_checksums, checksums.hexdigests(), vocabulary)
        if complaint is None and self._options.probe:
            complaint = self._limit.complaint(self._probe_gap())
        if complaint is not None:
            failure = f"does not have the trainer's weights after the update to version {self.version}"
            raise RunFailed(f"vLLM {failure}: {complaint}")

    def close(self) -> None:
        """End the engine and remove its folder."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.llm_engine.engine_core.shutdown()
            if self._owns_group:
                from vllm.distributed import cleanup_dist_env_and_memory

                with _preserved_global_state():
                    del engine
                    cleanup_dist_env_and_memory()
        self._folder.cleanup()

    def _start(self, max_num_seqs: int) -> Any:
        _prepare_environment(on_gpu=self._on_gpu)
        try:
            from vllm import LLM
        except ImportError as error:
            reason = f"vllm is installed and cannot be imported: {first_line(error)}"
            raise UserError(f"rollout.backend: {reason}") from error
        try:
            settings = engine_settings(self._options, self._loaded, max_num_seqs, gpu_share=GPU_SHARE)
            settings |= {"load_format": "dummy", "enable_sleep_mode": self._sleeps, "disable_log_stats": True}
            return LLM(self._folder.name, **settings)
        # vLLM checks its settings and the model in many places, with exceptions of many classes.
        except Exception as error:
            raise UserError(f"rollout.backend: vLLM cannot serve this model here: {first_line(error)}") from error

    def _ask(self, token_ids: Sequence[Sequence[int]], fields: Sequence[dict[str, Any]]) -> Any:
        from vllm import SamplingParams

        requests = [{"prompt_token_ids": list(ids)} for ids in token_ids]
        settings = [SamplingParams(**request_fields) for request_fields in fields]
        try:
            with _preserved_global_state():
                return self._engine.generate(requests, settings, use_tqdm=False)
        except (RuntimeError, ValueError) as error:
            raise RunFailed(f"vLLM failed while sampling: {first_line(error)}") from error

    def _probe_gap(self) -> float:
        probe = make_probe(self._loaded, temperature=self._temperature)
        (answer,) = self._ask([probe.ids], [probe.sampling_fields()])
        prompt_logps = _logps_of(probe.ids[1:], answer.prompt_logprobs[1:])
        drawn = [(output.token_ids[0], _logps_of(output.token_ids, output.logprobs)[0]) for output in answer.outputs]
        return probe.gap(prompt_logps, drawn)

    @contextlib.contextmanager
    def _awake(self) -> Iterator[None]:
        """With ``sleep`` the engine has no memory outside of this context, and takes the trainer's weights in it."""
        if not self._sleeps:
            yield
            return
        self._engine.wake_up(tags=["weights"])
        checksums = self._send_weights()
        # After the weights, so that the memory of their gathered copies is free again.
        self._engine.wake_up(tags=["kv_cache"])
        self._check_weights(checksums)
        try:
            yield
        finally:
            self._engine.sleep(level=2)


def _logps_of(ids: Sequence[int], logprobs: Sequence[Any]) -> list[float]:
    return [float(entry[token].logprob) for token, entry in zip(ids, logprobs, strict=True)]


def engine_settings(
    options: VLLMOptions, loaded: LoadedModel, max_num_seqs: int, *, gpu_share: float
) -> dict[str, Any]:
    """The settings that an engine in process and a server share, by vLLM's names; None leaves the choice to vLLM."""
    on_gpu = loaded.device.type == "cuda"
    context = getattr(loaded.model.config, "max_position_embeddings", None)
    cache_gib = options.kv_cache_gib
    if cache_gib is None and not on_gpu:
        cache_gib = CPU_KV_CACHE_GIB
    cache_bytes = None
    if cache_gib is not None:
        cache_bytes = int(cache_gib * 2**30)
    enforce_eager = options.enforce_eager
    if enforce_eager is None:
        enforce_eager = not on_gpu
    return {
        "dtype": options.dtype or dtype_of(loaded),
        "seed": 0,
        "max_num_seqs": max_num_seqs,
        "max_model_len": options.max_model_len or context,
        "enforce_eager": enforce_eager,
        "gpu_memory_utilization": options.gpu_memory_utilization or gpu_share,
        "kv_cache_memory_bytes": cache_bytes,
        "enable_prefix_caching": options.prefix_caching,
        # Log-probs of the distribution that is sampled from: after temperature and truncation.
        "logprobs_mode": "processed_logprobs",
        # And not the checkpoint's, whose defaults (top_k, penalties, ...) would make it another policy.
        "generation_config": "vllm",
    }


def _prepare_environment(*, on_gpu: bool) -> None:
    """Set what vLLM reads from the environment, before it is imported."""
    # Engine and scheduler in this process: reload_weights gets an iterator over the trainer's own tensors.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if not on_gpu:
        # vLLM would bind the trainer's own threads to cores.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


@contextlib.contextmanager
def _preserved_global_state() -> Iterator[None]:
    """Restore the trainer's random states, thread count, determinism and ``torch.set_num_threads`` at the end.

    The engine seeds every global generator, and on a CPU replaces ``torch.set_num_threads`` by a warning.
    """
    import numpy

    set_threads = torch.set_num_threads
    threads = torch.get_num_threads()
    python_state = random.getstate()
    numpy_state = numpy.random.get_state()
    devices = []
    if torch.cuda.is_available():
        devices.append(torch.cuda.current_device())
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    # vLLM may call operations that have no deterministic form, which would raise.
    torch.use_deterministic_algorithms(False)
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        random.setstate(python_state)
        numpy.random.set_state(numpy_state)
        torch.set_num_threads = set_threads
        if torch.get_num_threads() != threads:
            set_threads(threads)


class VLLMServers:
    """Commands and requests of vLLM servers: one group per request, as many requests as a server's batch can hold."""

    name = "vLLM"

    def __init__(self, config: RolloutConfig, options: VLLMServerOptions, loaded: LoadedModel) -> None:
        self.options = options
        self.loaded = loaded
        self.context = options.max_model_len
        self._max_num_seqs = config.batch_sequences

    def command(self, folder: Path, port: int, transport: Transport, host: str = LOOPBACK) -> list[str]:
        """The arguments that follow ``python`` to serve the checkpoint ``folder``."""
        settings = {
            "model": folder,
            "served_model_name": "policy",
            "host": host,
            "port": port,
            "tensor_parallel_size": self.options.tensor_parallel_size,
            "middleware": f"{__name__}.{RequireKey.__name__}",
            "uvicorn_log_level": "warning",
            **engine_settings(self.options, self.loaded, self._max_num_seqs, gpu_share=SERVER_GPU_SHARE),
            **transport.vllm_settings(folder),
        }
        arguments = ["-m", "vllm.entrypoints.openai.api_server", "--enable-scale-out"]
        for name, value in settings.items():
            option = name.replace("_", "-")
            if value is True:
                arguments.append(f"--{option}")
            elif value is False:
                arguments.append(f"--no-{option}")
            elif isinstance(value, list):
                arguments += [f"--{option}", *value]
            elif value is not None:
                arguments += [f"--{option}", str(value)]
        return arguments

    def environment(self) -> dict[str, str]:
        """The environment of a server."""
        variables: dict[str, str] = {}
        if self.loaded.device.type != "cuda":
            # Only defaults: a user may set others.
            variables |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCH_COMPILE_DISABLE": "1"}
        variables |= os.environ
        # The routes that replace weights exist in vLLM's development mode only.
        variables |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
        # The first is for an engine in this process. The second is the key of other servers: vLLM would require it, in
        # place of the run's.
        for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_API_KEY"):
            variables.pop(name, None)
        return variables

    def slots(self, group_size: int) -> int:
        """Requests in progress at one server."""
        return max(1, min(MAX_REQUESTS, self._max_num_seqs // group_size))

    def groups_per_request(self, group_size: int, groups_per_server: int) -> int:
        """The most groups in one request. vLLM's route takes one; it makes batches of what is in progress."""
        return 1

    def request(self, prompt: Prompt, fields: dict[str, Any], group: int) -> dict[str, Any]:
        """The request for the ``group``-th group of a call, whose sampling has ``fields``."""
        check_temperature(fields["temperature"])
        seeded = {**fields, "seed": prompt_seed(fields["seed"], group)}
        return {"token_ids": prompt.token_ids, "sampling_params": seeded}


Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class RequireKey:
    """ASGI middleware: 401 to every HTTP request or websocket without ``Authorization: Bearer <key>``.

    vLLM's own check leaves the routes that replace weights open. Without ``key`` it is that of the environment.
    """

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]], key: str | None = None) -> None:
        self._app = app
        if key is None:
            key = os.environ.get(KEY_VARIABLE, "")
        self._expected = f"Bearer {check_key(key)}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = b""
        for name, value in scope.get("headers", []):
            if name == b"authorization":
                given += value
        # "lifespan" is the server's own start and end, without headers.
        if scope["type"] == "lifespan" or hmac.compare_digest(given, self._expected):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            # "close": the server would otherwise read the body of a client without the key, and throw it away.
            headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": b'{"error": "Unauthorized"}'})
        else:
            await send({"type": "websocket.close", "code": 1008})
