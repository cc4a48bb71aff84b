"""What merging a LoRA adapter into bfloat16 weights changes: log-probs of SmolLM2, in nats, against float32.

    python bench/merged_adapter.py [--model DIR] [--out FOLDER]

The base is the checkpoint's own bfloat16 weights. The adapter (rank 16, alpha 32) has factors as after N AdamW steps
of 1e-5 in one direction: every entry of B is +-1e-5 N, A is its initial value. The comparison is with the policy in
float32 (base weights and factors exact), token by token, on the answers of GSM8K problems (tests/fixtures):

- update: mean |log-prob with the adapter - without|, in float32: what there is to send;
- merged, alone: mean |engine - float32| if the engine has merged bfloat16 weights, or base and factors each in
  bfloat16; computed in float32, so that only what is stored differs, and in bfloat16, as an engine computes;
- reaches the engine: the slope of (engine with - engine without the update) on the same difference in float32. At 1
  the whole update reaches the engine; 0.5, computed in float32, means that half of it is lost to rounding.
"""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

STEPS = (1, 10, 100, 1000)
LEARNING_RATE = 1e-5

FIXTURE = Path(__file__).parents[1] / "tests" / "fixtures" / "gsm8k_32.jsonl"


def texts(count: int) -> list[str]:
    """The first ``count`` problems with their solutions."""
    rows = [json.loads(line) for line in FIXTURE.read_text().splitlines()[:count]]
    return [f"{row['problem']}\n{row['solution']}" for row in rows]


@torch.no_grad()
def log_probs(model: Any, ids_BS: list[Tensor]) -> Tensor:
    """Log-probs (nats) of every token but the first of each text, in one vector. ``ids_BS``: one vector per text."""
    rows = []
    for ids_S in ids_BS:
        logits_SV = model(input_ids=ids_S[None], use_cache=False).logits[0, :-1].double()
        rows.append(logits_SV.log_softmax(-1).gather(1, ids_S[1:, None])[:, 0])
    return torch.cat(rows)


def cast(model: Any, dtype: torch.dtype) -> Any:
    """A copy with its weights in ``dtype``; buffers (rotary frequencies) stay as they are, as in an engine."""
    # .to(dtype) would convert the buffers too.
    model = copy.deepcopy(model)
    for weight in model.parameters():
        weight.data = weight.data.to(dtype)
    return model


def set_factors(model: Any, value: float) -> None:
    """Every entry of B becomes plus or minus ``value``, the same signs at every call."""
    # Made here, so that the direction is the same for every size of the update.
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                signs = torch.randint(0, 2, weight.shape, generator=generator) * 2 - 1
                weight.copy_(value * signs)


def compare(loaded: Any, ids: list[Tensor]) -> list[dict[str, float]]:
    """One row for each size of the adapter."""
    from transformers import AutoModelForCausalLM

    from kl_comedy.models.weights import full_weights

    policy = loaded.model
    # A model without adapter, as an engine has it, for merged weights.
    plain = AutoModelForCausalLM.from_config(loaded.causal.config).float().eval()
    set_factors(policy, 0.0)
    without = log_probs(policy, ids)
    without_bf16 = log_probs(cast(policy, torch.bfloat16), ids)
    rows = []
    for steps in STEPS:
        set_factors(policy, LEARNING_RATE * steps)
        exact = log_probs(policy, ids)
        alone = cast(policy, torch.bfloat16)
        alone_bf16 = log_probs(alone, ids)
        # Rounded to bfloat16 and back: what is stored differs, and the products are exact.
        alone_f32 = log_probs(cast(alone, torch.float32), ids)

        merged = dict(full_weights(policy, torch.bfloat16))
        plain.load_state_dict(merged)
        merged_f32 = log_probs(plain, ids)
        merged_bf16 = log_probs(cast(plain, torch.bfloat16), ids)

        row = {
            "steps": steps,
            "update": float((exact - without).abs().mean()),
            "changed_weights": changed_share(policy, merged),
        }
        # An engine's own rounding without the update is not an effect of it: like is subtracted from like.
        for name, engine, engine_without in (
            ("merged_f32", merged_f32, without),
            ("alone_f32", alone_f32, without),
            ("merged_bf16", merged_bf16, without_bf16),
            ("alone_bf16", alone_bf16, without_bf16),
        ):
            row[name] = float((engine - exact).abs().mean())
            row[f"{name}_slope"] = slope(engine - engine_without, exact - without)
        rows.append(row)
        print(table([row]).splitlines()[-1], flush=True)
    return rows


def slope(effect: Tensor, wanted: Tensor) -> float:
    """The least-squares slope, through the origin, of an engine's change on the change that was wanted."""
    return float((effect * wanted).sum() / (wanted * wanted).sum())


def changed_share(policy: Any, merged: dict[str, Tensor]) -> float:
    """The share of the adapted weights that merging changes in bfloat16; the others lose their update to rounding."""
    from kl_comedy.models.weights import full_weights

    base = dict(full_weights(policy, torch.bfloat16, adapter=False))
    modules = tuple(adapted(policy))
    changed = 0
    total = 0
    for name, weight in merged.items():
        if name.startswith(modules):
            changed += int((weight != base[name]).sum())
            total += weight.numel()
    return changed / total


def adapted(policy: Any) -> list[str]:
    """Names of the modules that have factors."""
    from kl_comedy.models.weights import adapter_weights

    names = []
    for name, _ in adapter_weights(policy):
        if name.endswith(".lora_A"):
            # With the point, so that layers.1 is not taken for layers.10.
            names.append(name.removesuffix(".lora_A") + ".")
    return names


def table(rows: list[dict[str, float]]) -> str:
    """The Markdown table."""
    lines = [
        "| AdamW steps of 1e-5 | update, nats | weights that merging changes | merged: nats off (float32 products) "
        "| alone | merged: nats off (bfloat16 products) | alone | reaches the engine, merged (float32; bfloat16) "
        "| alone |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- | --- |",
    ]
    for row in rows:
        nats = [row[name] for name in ("merged_f32", "alone_f32", "merged_bf16", "alone_bf16")]
        numbers = " | ".join(f"{value:.2g}" for value in nats)
        merged = f"{row['merged_f32_slope']:.2f}; {row['merged_bf16_slope']:.2f}"
        alone = f"{row['alone_f32_slope']:.2f}; {row['alone_bf16_slope']:.2f}"
        share = f"{row['changed_weights']:.1%}"
        lines.append(f"| {row['steps']} | {row['update']:.2g} | {share} | {numbers} | {merged} | {alone} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("models/SmolLM2-135M-Instruct"))
    parser.add_argument("--problems", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=160, help="most tokens of a problem with its solution")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    from kl_comedy.config.schema import LoraConfig, ModelConfig
    from kl_comedy.models import load_model

    loaded = load_model(ModelConfig(source=str(options.model), device="cpu", lora=LoraConfig(rank=16, alpha=32)))
    with torch.no_grad():
        # What a bfloat16 checkpoint holds, in float32.
        for weight in loaded.model.parameters():
            weight.copy_(weight.to(torch.bfloat16))
    ids = []
    for text in texts(options.problems):
        token_ids = loaded.tokenizer(text)["input_ids"]
        ids.append(torch.tensor(token_ids[: options.tokens]))
    report = compare(loaded, ids)
    print(table(report))
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "merged_adapter.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
