"""The code that runs inside vLLM's workers: a weight-transfer engine over TCP, and a LoRA adapter replaced in place.

vLLM finds it as a plugin (the entry point ``vllm.general_plugins``) or as the worker extension of a server that a run
starts. Only vLLM imports this module.
"""

from __future__ import annotations

import contextlib
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.lora.request import LoRARequest
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from kl_comedy.models.weights import Checksums
from kl_comedy.rollouts.engines.transports import ADAPTER, SOCKET_BACKEND, TrainerAddress, receive


@dataclass(kw_only=True)
class SocketUpdateInfo:
    """The weights that follow, in order. ``aliases``: further names of tied weights, each with its first name."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    aliases: dict[str, str] = field(default_factory=dict)


class SocketWeightTransferEngine(WeightTransferEngine):  # type: ignore[misc]
    """Takes checkpoint weights from the trainer's host memory, by vLLM's layerwise reloading."""

    init_info_cls = TrainerAddress
    update_info_cls = SocketUpdateInfo

    def init_transfer_engine(self, init_info: TrainerAddress) -> None:
        self._address = init_info

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive and load the weights. vLLM's own method waits for an accelerator, which a CPU does not have."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: SocketUpdateInfo) -> None:
        parallel = self.parallel_config
        # Counted from 1: rank 0 is the trainer.
        rank = 1 + parallel.data_parallel_index * parallel.world_size + parallel.rank
        try:
            self.model.load_weights(receive(self._address, rank, asdict(update_info)))
        except BaseException:
            # Layers that wait for the rest of their weights would take them from the next transfer.
            self.finish_weight_update()
            raise

    def shutdown(self) -> None:
        """Does nothing: each transfer has closed its connection."""


class PolicyWorker:
    """Methods that ``/collective_rpc`` finds on every worker; mixed into vLLM's class."""

    def load_policy_adapter(self, path: str) -> None:
        """Replace the adapter by that of the folder ``path``, also for completions in progress.

        Not by vLLM's ``/v1/load_lora_adapter``, after which every request reads the folder of its adapter again.
        """
        worker: Any = self
        worker.add_lora(LoRARequest(ADAPTER, 1, path, load_inplace=True))

    def policy_checksums(self) -> dict[str, str]:
        """SHA-256 of the base's weights and of the adapter's factors, by name."""
        worker: Any = self
        if not hasattr(worker, "_base_checksums"):
            # Once: the base never changes.
            worker._base_checksums = worker.compute_weight_checksums()
        checksums = Checksums()
        for adapter in worker.model_runner.lora_manager._adapter_manager.list_adapters().values():
            for name, lora in adapter.loras.items():
                _add_factors(checksums, f"{name}.lora_A", lora.lora_a)
                _add_factors(checksums, f"{name}.lora_B", lora.lora_b)
        return {**worker._base_checksums, **checksums.hexdigests()}


def _add_factors(checksums: Checksums, name: str, factors: Any) -> None:
    """Add one factor, or those of a fused layer (a list, None for a part without an adapter) as one."""
    if not isinstance(factors, list):
        factors = [factors]
    for factor in factors:
        if factor is not None:
            checksums.add(name, factor)


def register() -> None:
    """Make the engine known to vLLM, once per process."""
    # ValueError: it is registered already.
    with contextlib.suppress(ValueError):
        WeightTransferEngineFactory.register_engine(SOCKET_BACKEND, SocketWeightTransferEngine)


register()
