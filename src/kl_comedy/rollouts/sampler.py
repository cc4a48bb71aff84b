"""The sampler of a run: which backend draws, what it can do, and where it computes.

    config -> Sampler: backend, options, capabilities
              on the GPUs of a node -> GPUs of each server -> transport of the weights

``rollout.backend`` alone does not say which backend draws: with ``lag.mode: async`` an engine beside the trainer does.
Whoever asks about the sampler builds this record once and reads its fields.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kl_comedy.config.validate import parse_record
from kl_comedy.errors import UserError, bad_value, first_refusal
from kl_comedy.records import Capabilities
from kl_comedy.registry import ROLLOUTS
from kl_comedy.rollouts.engines.options import (
    GPU_SHARE,
    InProcessOptions,
    ServerOptions,
    VLLMServerOptions,
    gpus_per_server,
    require_vllm,
    transport_of,
    with_job_servers,
)

if TYPE_CHECKING:
    from kl_comedy.config.schema import Config, RolloutConfig

ENGINE_BESIDE = {"hf": "hf_server", "vllm": "vllm_server"}
"""With ``lag.mode: async``, the engine beside the trainer that draws in place of a backend in its ranks."""


def sampler_name(config: Config) -> str:
    """The backend that draws: ``rollout.backend``, or the engine of its kind beside the trainer."""
    backend = config.rollout.backend
    # A backend in the ranks cannot draw while they learn. One without an engine of its kind keeps its name, and
    # check_sampler() refuses it.
    if config.lag.mode == "async":
        return ENGINE_BESIDE.get(backend, backend)
    return backend


def capabilities_of(backend: str) -> Capabilities:
    """What the registered ``backend`` declared that it can do. Raises :class:`UserError` for an unknown name."""
    facts = ROLLOUTS.get(backend, key="rollout.backend").facts
    # A backend that declares nothing draws whole batches in one process, which is what the defaults say.
    capabilities: Capabilities = facts.get("capabilities", Capabilities())
    return capabilities


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """What draws for a run. Build it with :meth:`of`."""

    name: str
    """The backend that draws."""
    options: Any
    """``rollout.options`` as the backend's own record; None where the backend declares none."""
    capabilities: Capabilities
    rollout: RolloutConfig
    ranks_per_node: int
    """Processes of the trainer on each node; each has a GPU where there are any."""
    lora: bool
    """Whether the policy trains a LoRA adapter."""

    @classmethod
    def of(cls, config: Config) -> Sampler:
        """The sampler of a run. Raises :class:`UserError` for an option that the backend does not take."""
        name = sampler_name(config)
        options = None
        schema = ROLLOUTS.get(name).facts.get("options")
        if schema is not None:
            options = parse_record(schema, config.rollout.options, key="rollout.options")
        return cls(
            name=name,
            options=options,
            capabilities=capabilities_of(name),
            rollout=config.rollout,
            ranks_per_node=config.train.devices,
            lora=config.model.lora is not None,
        )

    @property
    def beside(self) -> bool:
        """Whether engines beside the trainer draw, and not its ranks."""
        return not self.capabilities.in_trainer_ranks

    @property
    def builder(self) -> Callable[..., Any]:
        """The registered builder, ``(rollout, *, loaded)``; beside the trainer also ``leader``."""
        build: Callable[..., Any] = ROLLOUTS.get(self.name).fn
        return build

    @property
    def server_options(self) -> ServerOptions | None:
        """The options of the servers, with those of a cluster job where the config names none; None without servers.

        An engine of a plugin is beside the trainer too, and need not be a server of this package.
        """
        if not isinstance(self.options, ServerOptions):
            return None
        return with_job_servers(self.options)

    def check_installed(self) -> None:
        """Raise :class:`UserError` where this machine would have to start vLLM and does not have it."""
        starts_vllm = isinstance(self.options, InProcessOptions)
        if isinstance(self.options, VLLMServerOptions):
            server_options = self.server_options
            starts_vllm = server_options is not None and not server_options.urls
        if starts_vllm:
            require_vllm(self.name)

    def server_gpus(self, gpus: Sequence[str]) -> list[str]:
        """CUDA_VISIBLE_DEVICES of each server that the run starts on a node with ``gpus``.

        These are the GPUs that the config names, else those after the ranks' own. Empty where the run starts no server,
        and where one server shares the only GPU. Raises :class:`UserError` for a rank or a server without a GPU, and
        for a GPU that is named twice.
        """
        count = len(gpus)
        if self.ranks_per_node > count:
            reason = f"each process has a GPU, and a node has {count}"
            raise bad_value("train.devices", self.ranks_per_node, f"at most {count}", reason)
        options = self.server_options
        if options is None:
            return []
        # Named GPUs may be shared with ranks, which is the user's choice; those that are assigned here are not.
        if options.gpus:
            _check_named_gpus(options, count)
            return list(options.gpus)
        if options.urls:
            return []
        per_server = gpus_per_server(options)
        shares_the_only_gpu = count == 1 and options.servers == 1 and per_server == 1
        if shares_the_only_gpu:
            return []
        # The ranks have the first GPUs, the servers those behind them.
        end = self.ranks_per_node + options.servers * per_server
        if end > count:
            raise _too_few_gpus(self.ranks_per_node, options.servers, per_server, count)
        return [",".join(gpus[first : first + per_server]) for first in range(self.ranks_per_node, end, per_server)]

    def rollout_on(self, gpus: Sequence[str]) -> RolloutConfig:
        """What the builder gets on a node with ``gpus`` (none where the policy is on a CPU).

        That is the config's ``rollout`` with :meth:`server_gpus` among its options. A vLLM server on a rank's GPU takes
        as much of its memory as the engine in process does, unless the config says how much. Raises as
        :meth:`server_gpus`.
        """
        # A copy: the config's own options are part of its hash, and are written beside the run.
        options = dict(self.rollout.options)
        if not gpus:
            return replace(self.rollout, options=options)
        server_gpus = self.server_gpus(gpus)
        if server_gpus:
            options["gpus"] = server_gpus
        if self._starts_vllm_beside_a_rank(gpus, server_gpus) and not options.get("gpu_memory_utilization"):
            options["gpu_memory_utilization"] = GPU_SHARE
        return replace(self.rollout, options=options)

    def _starts_vllm_beside_a_rank(self, gpus: Sequence[str], server_gpus: Sequence[str]) -> bool:
        """Whether the run starts a vLLM server on a GPU where a rank computes."""
        options = self.server_options
        if not isinstance(options, VLLMServerOptions) or options.urls:
            return False
        if not server_gpus:
            return True  # It shares the node's only GPU.
        rank_gpus = set(gpus[: self.ranks_per_node])
        return not rank_gpus.isdisjoint(",".join(server_gpus).split(","))

    def transport_on(self, gpus: Sequence[str]) -> str | None:
        """How weights reach the servers of a run on a node with ``gpus``, by its name in :mod:`.engines.transports`.

        None for a run without servers, and for a plugin's, whose transport is not known here. Raises
        :class:`UserError` for a transport that cannot work there, and where :meth:`server_gpus` does.
        """
        options = self.server_options
        if options is None:
            return None
        if gpus:
            server_gpus = self.server_gpus(gpus)
            # None are named where the servers are elsewhere, or share the node's only GPU.
            if server_gpus:
                # As the servers will see them, because the transport depends on which server shares rank 0's GPU.
                options = replace(options, gpus=tuple(server_gpus))
        return transport_of(options, lora=self.lora, gpus=gpus)


def _check_named_gpus(options: ServerOptions, count: int) -> None:
    """Raise :class:`UserError` unless ``rollout.options.gpus`` names enough of the ``count`` GPUs, each once."""
    names: list[str] = []
    for entry in options.gpus:
        names += [name.strip() for name in entry.split(",")]
    # A name that is not a number is the UUID of a GPU, which only the driver can check.
    out_of_range = [name for name in names if name.isdigit() and int(name) >= count]
    has_duplicates = len(set(names)) < len(names)
    if out_of_range or has_duplicates:
        raise bad_value("rollout.options.gpus", list(options.gpus), f"GPUs 0 to {count - 1}, each once")
    per_server = gpus_per_server(options)
    if len(names) != options.servers * per_server:
        reason = "rollout.options.tensor_parallel_size"
        raise bad_value("rollout.options.gpus", list(options.gpus), f"{per_server} for each server", reason)


def _too_few_gpus(ranks: int, servers: int, per_server: int, count: int) -> UserError:
    """The error that names the one setting which, lowered alone, lets the run fit."""
    reason = (
        f"a node has {count} GPUs, {ranks} of them for train.devices, and a server computes on {per_server}; "
        "rollout.options.gpus may name GPUs that are shared"
    )
    # Checked first: while this does not fit, neither of the other two settings can help.
    if 1 < per_server >= count:
        # Not one server fits beside a rank.
        return bad_value("rollout.options.tensor_parallel_size", per_server, f"at most {max(1, count - 1)}", reason)
    servers_that_fit = (count - ranks) // per_server
    if servers_that_fit == 0 and count > 1:
        return bad_value("train.devices", ranks, f"at most {count - per_server}", reason)
    most = max(1, servers_that_fit)  # One server may share a node's only GPU.
    return bad_value("rollout.options.servers", servers, f"at most {most}", reason)


@ROLLOUTS.checked_by
def check_sampler(config: Config, key: str = "rollout") -> None:
    """Raise :class:`UserError` for the first setting of strategy and lag that the sampler cannot serve.

    :func:`kl_comedy.config.combinations.check_combinations` asks for every config. Options are not parsed here: the
    other commands that read a config must work where the sampler's options are wrong.
    """
    error = first_refusal(RULES, config)
    if error is not None:
        raise error


def lag_of_recorded_rollouts(config: Config) -> UserError | None:
    mode = config.lag.mode
    if mode == "on_policy" or not _capabilities(config).recorded:
        return None
    reason = "`lag` has no effect on recorded rollouts; their age is fixed"
    return bad_value("lag.mode", mode, f"on_policy with rollout.backend {config.rollout.backend}", reason)


def refill_of_recorded_rollouts(config: Config) -> UserError | None:
    choice = config.algorithm.groups_without_signal
    if choice != "refill" or not _capabilities(config).recorded:
        return None
    allowed = f"keep or shrink with rollout.backend {config.rollout.backend}"
    return bad_value("algorithm.groups_without_signal", choice, allowed, "nothing can be drawn in their place")


def async_in_the_ranks(config: Config) -> UserError | None:
    if config.lag.mode != "async" or _is_beside(_capabilities(config)):
        return None
    reason = "the trainer's processes learn meanwhile; an engine beside them has to draw"
    return bad_value("rollout.backend", config.rollout.backend, _backends(_is_beside), reason)


def in_flight_between_batches(config: Config) -> UserError | None:
    if not config.lag.in_flight:
        return None
    reason = "it takes new weights between batches only"
    # transformers' generate runs to the end of its batch, without a place where weights could be loaded.
    draws_by_library = config.rollout.options.get("loop") == "library"
    if _capabilities(config).updates_between_tokens:
        if not draws_by_library:
            return None
        reason = f"{reason}, with loop: library"
    return bad_value("lag.in_flight", True, f"false with rollout.backend {config.rollout.backend}", reason)


def whole_batches_for_several_ranks(config: Config) -> UserError | None:
    if config.train.strategy == "single" or _serves_several_ranks(_capabilities(config)):
        return None
    reason = "with several processes each draws a part of a batch, and this backend draws it whole"
    return bad_value("rollout.backend", config.rollout.backend, _backends(_serves_several_ranks), reason)


RULES: tuple[Callable[[Config], UserError | None], ...] = (
    lag_of_recorded_rollouts,
    refill_of_recorded_rollouts,
    async_in_the_ranks,
    in_flight_between_batches,
    whole_batches_for_several_ranks,
)
"""In the order in which they are asked (:func:`kl_comedy.errors.first_refusal`)."""


def _capabilities(config: Config) -> Capabilities:
    return capabilities_of(sampler_name(config))


def _is_beside(capabilities: Capabilities) -> bool:
    return not capabilities.in_trainer_ranks


def _serves_several_ranks(capabilities: Capabilities) -> bool:
    return _is_beside(capabilities) or capabilities.draws_parts


def _backends(are_able: Callable[[Capabilities], bool]) -> list[str]:
    return [entry.name for entry in ROLLOUTS if are_able(capabilities_of(entry.name))]
