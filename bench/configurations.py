"""Cost of KL configurations and its growth with the number of terms: python bench/configurations.py [CONFIG]

The rows of one update are sampled once. Then each configuration in turn runs forward and backward on them, on one
thread. It reports medians of CPU seconds, and their share of an update without KL, sampling included. Writes
results/speed/configurations.md.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch


def many_terms(count: int) -> str:
    """A config of ``count`` terms in the loss with different coefficients."""
    kinds = ("k1", "k2", "k3", "abs")
    terms = []
    for number in range(count):
        beta = 0.01 * (1 + number)
        terms.append(f"{{estimator: {kinds[number % len(kinds)]}, placement: loss, beta: {beta}}}")
    return "[" + ", ".join(terms) + "]"


SETTINGS = {
    "no KL": "[]",
    "k1 in reward": "[{estimator: k1, placement: reward, beta: 0.05}]",
    "k3 in loss": "[{estimator: k3, placement: loss, beta: 0.05}]",
    "k2 in loss": "[{estimator: k2, placement: loss, beta: 0.05}]",
    "k1 in reward, k3 in loss": (
        "[{estimator: k1, placement: reward, beta: 0.05}, {estimator: k3, placement: loss, beta: 0.05}]"
    ),
    "exact in loss": "[{estimator: exact, placement: loss, beta: 0.05}]",
    "2 terms in loss": many_terms(2),
    "4 terms in loss": many_terms(4),
    "8 terms in loss": many_terms(8),
    "16 terms in loss": many_terms(16),
}
REPEATS = 7
OUT = Path(__file__).parents[1] / "results" / "speed" / "configurations.md"


def learn(module: Any, rows: Any, *, measure: bool) -> float:
    """CPU seconds of an update without sampling, scoring and the optimizer step."""
    from kl_comedy.training.loss import micro_loss, prepare

    start = time.process_time()
    # The same calls as in a training step.
    betas = module.beta_values
    micros = prepare(rows, module.plan, betas=betas, references=module.references, policy_pass=module.policy_pass)
    for micro in micros:
        passes = module.passes(micro, measure=measure)
        loss = micro_loss(micro, passes, terms=module.terms, betas=betas, algorithm=module.config.algorithm).loss
        loss.backward()
    # No optimizer step: every configuration must learn from the same weights.
    module.policy.zero_grad()
    return time.process_time() - start


def main(path: str) -> None:
    """Measure every configuration on the config at ``path``; print the page and write it."""
    from kl_comedy.config import load_config
    from kl_comedy.training.experience_module import build_in_process

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        modules: dict[str, Any] = {}
        for name, terms in SETTINGS.items():
            config = load_config(path, [f"kl={terms}", f"output={folder}", "tracking.uri=none"])
            modules[name], data = build_in_process(config)
            # The policy's weights are those of every configuration, and so are its samples.
            if name == "no KL":
                start = time.process_time()
                rows = next(data.stream).rows
                sampling = time.process_time() - start  # CPU seconds, scoring included
        seconds: dict[str, list[float]] = {name: [] for name in modules}
        for repeat in range(REPEATS + 1):
            # In turns, so that a slow minute of the machine is in every configuration.
            for name, module in modules.items():
                cpu_seconds = learn(module, rows, measure=False)
                is_warm_up = repeat == 0
                if not is_warm_up:
                    seconds[name].append(cpu_seconds)
    plain = statistics.median(seconds["no KL"])
    lines = [
        "# What a KL configuration costs",
        "",
        f"`python bench/configurations.py {path}`: {len(rows)} completions, one thread; without KL, sampling and "
        f"scoring {sampling:.2f} CPU s, learning {plain:.2f} CPU s. Medians of {REPEATS} (smallest to largest).",
        "",
        "<!-- unchecked: measured -->",
        "",
        "| KL | learning, CPU s | of the update without KL |",
        "|---|---:|---:|",
    ]
    for name, values in seconds.items():
        median = statistics.median(values)
        share = (median - plain) / (plain + sampling)
        spread = f"{median:.3f} ({min(values):.3f} to {max(values):.3f})"
        lines.append(f"| {name} | {spread} | {share:+.1%} |")
    print("\n".join(lines))
    OUT.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "configs/quickstart.yaml")
