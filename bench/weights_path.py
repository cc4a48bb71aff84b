"""What it costs to send an update's weights to an engine: bytes and seconds by transport, side by side.

    .venv-vllm/bin/python bench/weights_path.py [--model DIR] [--engine vllm_server|hf_server] [--dtype bfloat16]
        [--rounds N] [--out FOLDER]

There is one server per transport, and all are started before the first round. A round updates each once, in rotating
order, with other weights than before. Measured seconds of an update:

- stage: the trainer gathers, casts, hashes and stages the weights (`publish`);
- send: the server takes them (its routes between `/pause` and `/resume`);
- confirm: checksums and probe.

`bytes` is what leaves the trainer for one server: the files of the folder that change with a version, or the tensors.
`adapter` (vLLM only) is a LoRA adapter of rank 16 without its base, which is sent before the first round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

PARTS = ("stage", "send", "confirm")


def build(kind: str, options: argparse.Namespace, folder: Path) -> Any:
    """The policy and the server of one transport; the server has its first weights."""
    from kl_comedy.config.schema import LoraConfig, ModelConfig, RolloutConfig
    from kl_comedy.models import load_model
    from kl_comedy.rollouts import build_hf_server, build_vllm_server

    lora = LoraConfig(rank=16, alpha=32) if kind == "adapter" else None
    loaded = load_model(ModelConfig(source=str(options.model), device="cpu", lora=lora))
    config = RolloutConfig(backend=options.engine, batch_sequences=8)
    config.options = {"transport": kind, "dtype": options.dtype}
    backend: Any
    if options.engine == "vllm_server":
        # Nothing but a probe is generated, and three servers share the machine's memory.
        config.options |= {"max_model_len": 256, "kv_cache_gib": 0.25}
        backend = build_vllm_server(config, loaded=loaded)
    else:
        backend = build_hf_server(config, loaded=loaded)
    backend.work_in(folder / kind)
    backend.update_weights(0)
    return backend


def update(backend: Any, version: int) -> dict[str, float]:
    """Seconds of the parts of one update, with other weights than the last one."""
    import torch

    # As after an optimizer step: equal weights would have equal checksums.
    with torch.no_grad():
        for weight in backend._loaded.model.parameters():
            if weight.requires_grad:
                weight.mul_(1.001).add_(1e-4)
    (server,) = backend._servers
    take_weights = server.client.take_weights
    seconds = {}

    def timed_send(weights: Any, transport: Any) -> None:
        begin = time.perf_counter()
        take_weights(weights, transport)
        seconds["send"] = time.perf_counter() - begin

    server.client.take_weights = timed_send
    begin = time.perf_counter()
    backend.publish(version)
    staged = time.perf_counter()
    backend.load()
    loaded = time.perf_counter()
    server.client.take_weights = take_weights
    return {"stage": staged - begin, "send": seconds["send"], "confirm": loaded - staged - seconds["send"]}


def sent_bytes(backend: Any, kind: str) -> int:
    """Bytes of the newest version that leave the trainer."""
    from kl_comedy.rollouts.engines.transports import untied

    staged = backend._staged
    if staged.tensors:
        # A tied tensor is sent once, whatever the number of its names.
        tensors, _ = untied(staged.tensors)
        return sum(tensor.nbytes for tensor in tensors.values())
    folder = staged.folder
    if kind == "adapter":
        # The folder has the base too, which was sent before.
        folder = folder / "adapter"
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def table(report: dict[str, Any]) -> str:
    """Medians over the rounds, and their sum against the folder's of the same round."""
    lines = ["| transport | MB | stage s | send s | confirm s | all s | all / folder, median (each round) |"]
    lines.append("| --- | ---: | ---: | ---: | ---: | ---: | --- |")
    folder_totals = [sum(row.values()) for row in report["transports"]["folder"]["rounds"]]
    for kind, result in report["transports"].items():
        totals = [sum(row.values()) for row in result["rounds"]]
        medians = [statistics.median(row[part] for row in result["rounds"]) for part in PARTS]
        medians.append(statistics.median(totals))
        # Round by round: other load on the machine changes both.
        ratios = [total / folder_total for total, folder_total in zip(totals, folder_totals, strict=True)]
        megabytes = f"{result['bytes'] / 1e6:.1f}"
        seconds = " | ".join(f"{median:.2f}" for median in medians)
        ratio_texts = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        lines.append(f"| `{kind}` | {megabytes} | {seconds} | {statistics.median(ratios):.2f} ({ratio_texts}) |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("models/SmolLM2-135M-Instruct"))
    parser.add_argument("--engine", choices=["vllm_server", "hf_server"], default="vllm_server")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    kinds = ["folder", "gloo"]
    if options.engine == "vllm_server":
        kinds.append("adapter")
    backends: dict[str, Any] = {}
    report: dict[str, Any] = {"engine": options.engine, "dtype": options.dtype, "model": options.model.name}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for kind in kinds:
                backends[kind] = build(kind, options, Path(folder))
            rounds: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
            for number in range(options.rounds):
                # Another transport is the first of each round.
                first = number % len(kinds)
                for kind in kinds[first:] + kinds[:first]:
                    rounds[kind].append(update(backends[kind], number + 1))
            report["transports"] = {
                kind: {"bytes": sent_bytes(backends[kind], kind), "rounds": rounds[kind]} for kind in kinds
            }
        finally:
            # A server outlives its parent if nobody closes it.
            for backend in backends.values():
                backend.close()
    print(table(report))
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / f"{options.engine}.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
