"""What accelerators can do, as data: memory, matrix products, bandwidths. Peaks of the makers' data sheets.

Rates are dense (no structured sparsity), in FLOP/s and bytes/s of one device; ``fp32_flops`` without TF32, which torch
leaves off. ``memory_bytes`` is what torch reports as total, a little under the name's. ``link`` is one direction, to a
device of the same node: half of what data sheets call NVLink's bandwidth, or PCIe's.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from kl_comedy.errors import bad_value

GIB = 2**30
NETWORK = 50e9
"""Bytes/s to a device of another node: one 400 Gbit/s port for each, as in DGX H100 systems."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator, or this machine's cores as one. ``kind`` is torch's device type."""

    name: str
    kind: str
    memory_bytes: int
    bf16_flops: float
    fp32_flops: float
    bandwidth: float
    link: float
    source: str

    def flops(self, precision: str) -> float:
        """Peak matrix products under ``train.precision``."""
        return self.bf16_flops if precision == "bf16" else self.fp32_flops


def _gpu(name: str, gib: float, bf16: float, fp32: float, bandwidth: float, link: float, source: str) -> Device:
    """Units of data sheets: GiB, TFLOP/s twice, GB/s twice."""
    return Device(
        name=name, kind="cuda", memory_bytes=int(gib * GIB), bf16_flops=bf16 * 1e12, fp32_flops=fp32 * 1e12,
        bandwidth=bandwidth * 1e9, link=link * 1e9, source=source,
    )  # fmt: skip


GPUS = {
    device.name: device
    for device in (
        _gpu("a100-40", 39.4, 312, 19.5, 1555, 300, "NVIDIA A100 data sheet (SXM4 40 GB)"),
        _gpu("a100-80", 79.1, 312, 19.5, 2039, 300, "NVIDIA A100 data sheet (SXM4 80 GB)"),
        _gpu("l40s-48", 44.4, 362, 91.6, 864, 32, "NVIDIA L40S data sheet; PCIe 4.0 x16"),
        _gpu("h100-80", 79.1, 989, 67, 3350, 450, "NVIDIA H100 data sheet (SXM5)"),
        _gpu("h200-141", 139.8, 989, 67, 4800, 450, "NVIDIA H200 data sheet (SXM)"),
        _gpu("b200-180", 178.0, 2250, 75, 8000, 900, "NVIDIA DGX B200 data sheet, per GPU"),
        _gpu("rtx4090-24", 23.5, 165, 82.6, 1008, 32, "NVIDIA Ada architecture paper; PCIe 4.0 x16"),
    )
}


def device_named(name: str) -> Device:
    """The device that ``--gpu`` names; ``cpu`` is this machine, measured now. Raises :class:`UserError`."""
    if name == "cpu":
        return this_machine()
    if name not in GPUS:
        raise bad_value("--gpu", name, [*GPUS, "cpu"])
    return GPUS[name]


def this_machine(*, seconds: float = 0.3) -> Device:
    """The cores of this machine as one device: a matrix product and a copy, timed for about ``seconds`` each."""
    import psutil
    import torch

    def rate(work: float, dtype: torch.dtype) -> float:
        left, right = (torch.ones(1024, 1024, dtype=dtype) for _ in range(2))
        return _per_second(lambda: left @ right, work, seconds)

    block = torch.ones(64 * 2**20 // 4)
    return Device(
        name="cpu", kind="cpu", memory_bytes=int(psutil.virtual_memory().total),
        bf16_flops=rate(2 * 1024**3, torch.bfloat16), fp32_flops=rate(2 * 1024**3, torch.float32),
        bandwidth=_per_second(block.clone, 2 * 64 * 2**20, seconds), link=5e9,
        source=f"measured now with {torch.get_num_threads()} threads of {os.cpu_count()} cores",
    )  # fmt: skip


def _per_second(action: object, work: float, seconds: float) -> float:
    """``work`` of each call per second, the best of the calls that fit ``seconds``."""
    assert callable(action)
    action()
    best, end = float("inf"), time.perf_counter() + seconds
    while True:
        start = time.perf_counter()
        action()
        now = time.perf_counter()
        best = min(best, now - start)
        if now > end:
            return work / best
