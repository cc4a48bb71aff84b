"""What an update of an engine costs on its way: bytes and seconds, by transport, side by side.

    .venv-vllm/bin/python bench/weights_path.py [--model DIR] [--engine vllm_server|hf_server] [--dtype bfloat16]
        [--rounds N] [--out FOLDER]

One server for each transport, all started before the first round; a round updates each once, in turns, with other
weights than before. Measured for an update:

- stage: the trainer gathers, casts, hashes and stages the weights (`publish`);
- send: the server takes them (its routes between `/pause` and `/resume`);
- confirm: checksums and probe.

`bytes` is what leaves the trainer for one server: the files of the folder that change with a version, or the tensors.
`adapter` (vLLM only) is a LoRA adapter of rank 16 alone, its base sent before the first round.
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
    """Policy and server of one transport; the server has its first weights."""
    from kl_comedy.config.schema import LoraConfig, ModelConfig, RolloutConfig
    from kl_comedy.models import load_model
    from kl_comedy.rollouts import build_hf_server, build_vllm_server

    lora = LoraConfig(rank=16, alpha=32) if kind == "adapter" else None
    loaded = load_model(ModelConfig(source=str(options.model), device="cpu", lora=lora))
    config = RolloutConfig(backend=options.engine, batch_sequences=8)
    config.options = {"transport": kind, "dtype": options.dtype}
    if options.engine == "vllm_server":
        config.options |= {"max_model_len": 256, "kv_cache_gib": 0.25}
    backend: Any = (build_vllm_server if options.engine == "vllm_server" else build_hf_server)(config, loaded=loaded)
    backend.work_in(folder / kind)
    backend.update_weights(0)
    return backend


def update(backend: Any, version: int) -> dict[str, float]:
    """Seconds of the parts of one update, with other weights than the last one."""
    import torch

    with torch.no_grad():
        for weight in backend._loaded.model.parameters():
            if weight.requires_grad:
                weight.mul_(1.001).add_(1e-4)
    (server,) = backend._servers
    seconds = {}

    def timed_send(weights: Any, transport: Any) -> None:
        begin = time.perf_counter()
        take_weights(weights, transport)
        seconds["send"] = time.perf_counter() - begin

    take_weights, server.client.take_weights = server.client.take_weights, timed_send
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
        return sum(tensor.nbytes for tensor in untied(staged.tensors)[0].values())
    folder = staged.folder / "adapter" if kind == "adapter" else staged.folder
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def table(report: dict[str, Any]) -> str:
    """Medians over the rounds, and their sum against the folder's of the same round."""
    lines = ["| transport | MB | stage s | send s | confirm s | all s | all / folder, median (each round) |"]
    lines.append("| --- | ---: | ---: | ---: | ---: | ---: | --- |")
    for kind, result in report["transports"].items():
        medians = [statistics.median(row[part] for row in result["rounds"]) for part in PARTS]
        totals = [sum(row.values()) for row in result["rounds"]]
        folder = [sum(row.values()) for row in report["transports"]["folder"]["rounds"]]
        ratios = [total / other for total, other in zip(totals, folder, strict=True)]
        each = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        numbers = " | ".join(f"{value:.2f}" for value in (*medians, statistics.median(totals)))
        lines.append(
            f"| `{kind}` | {result['bytes'] / 1e6:.1f} | {numbers} | {statistics.median(ratios):.2f} ({each}) |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("models/SmolLM2-135M-Instruct"))
    parser.add_argument("--engine", choices=["vllm_server", "hf_server"], default="vllm_server")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    kinds = ["folder", "gloo", *(["adapter"] if options.engine == "vllm_server" else [])]
    backends: dict[str, Any] = {}
    report: dict[str, Any] = {"engine": options.engine, "dtype": options.dtype, "model": options.model.name}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for kind in kinds:
                backends[kind] = build(kind, options, Path(folder))
            rounds: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
            for number in range(options.rounds):
                for kind in kinds[number % len(kinds) :] + kinds[: number % len(kinds)]:
                    rounds[kind].append(update(backends[kind], number + 1))
            report["transports"] = {
                kind: {"bytes": sent_bytes(backends[kind], kind), "rounds": rounds[kind]} for kind in kinds
            }
        finally:
            for backend in backends.values():
                backend.close()
    print(table(report))
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / f"{options.engine}.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
