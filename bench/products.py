"""Float32 products by torch's own library and by oneDNN, in one run: python bench/products.py

The shapes of SmolLM2-135M's layers and head, 8 and 32 rows (sampling) and 600 (a micro-batch), one thread. For each
the products of a pass: forward, and the gradients of rows and weight. CPU time, the best of four, in GFLOP/s.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch

from kl_comedy.models.onednn_linear import VARIABLE, rows_times

SHAPES = {"attention": (576, 576), "gate": (1536, 576), "down": (576, 1536), "head": (49152, 576)}
ROWS = (8, 32, 600)


def speed(work: Callable[[], object], operations: float) -> float:
    """GFLOP/s of ``work``."""
    repeats = max(3, min(200, int(2e9 / operations)))
    work()
    best = float("inf")
    for _ in range(4):
        began = time.process_time()
        for _ in range(repeats):
            work()
        best = min(best, (time.process_time() - began) / repeats)
    return operations / best / 1e9


def main() -> None:
    torch.set_num_threads(1)
    print("| layer | rows | product | torch | oneDNN |\n|---|---:|---|---:|---:|")
    for name, (outputs, inputs) in SHAPES.items():
        weight = torch.randn(outputs, inputs)
        for count in ROWS:
            rows, gradient = torch.randn(count, inputs), torch.randn(count, outputs)
            products = {
                "forward": (rows, weight),
                "gradient of rows": (gradient, weight.t()),
                "gradient of weight": (gradient.t(), rows.t()),
            }
            for product, (left, right) in products.items():
                found = []
                for library in ("torch", "onednn"):
                    os.environ[VARIABLE] = library
                    found.append(speed(lambda a=left, b=right: rows_times(a, b), 2.0 * count * inputs * outputs))
                print(f"| {name} | {count} | {product} | {found[0]:.0f} | {found[1]:.0f} |", flush=True)


if __name__ == "__main__":
    torch.inference_mode()(main)()
