"""TRL's GRPO next to the same run with kl_comedy's terms, on SmolLM2: loss, KL, gradient norm, seconds of each update.

python bench/trl_terms.py [--updates 3]

Both runs have the same seed, prompts, sampler and learning rate. ``plain`` is TRL with ``beta=0.04``, ``terms`` is
KLGRPOTrainer with the recipe trl/default at that beta. They must stay equal up to rounding, which sampling amplifies
as soon as a token differs. Needs ``make smollm2`` and ``python bench/peers/fetch.py trl``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "bench"))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from peers.wheels import pins  # noqa: E402

MODEL = ROOT / "models" / "SmolLM2-135M-Instruct"
BETA = 0.04
PROMPTS = 2
GROUP = 4
TOKENS = 24
SHOWN = ("loss", "kl", "grad_norm", "reward", "completions/mean_length")


def reward(completions: list[Any], **_: Any) -> list[float]:
    """The share of digits in a completion: it differs within groups from the first update on."""
    rewards = []
    for completion in completions:
        text = completion[0]["content"]
        digits = sum(character.isdigit() for character in text)
        rewards.append(digits / max(len(text), 1))
    return rewards


def run(terms: bool, updates: int, folder: Path) -> list[dict[str, float]]:
    """Train with kl_comedy's terms or TRL's own KL. Returns what TRL logged of each update, and its mean seconds."""
    import trl
    from datasets import Dataset

    from kl_comedy.integrations.trl import KLGRPOTrainer

    rows = [{"prompt": [{"role": "user", "content": f"What is {n} + {n + 3}?"}]} for n in range(PROMPTS * updates)]
    args = trl.GRPOConfig(
        output_dir=str(folder),
        beta=BETA,
        learning_rate=1e-5,
        max_steps=updates,
        num_generations=GROUP,
        per_device_train_batch_size=PROMPTS * GROUP,
        max_completion_length=TOKENS,
        model_init_kwargs={"dtype": "float32"},
        bf16=False,
        use_cpu=True,
        seed=0,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    options = {"model": str(MODEL), "reward_funcs": reward, "args": args, "train_dataset": Dataset.from_list(rows)}
    if terms:
        trainer = KLGRPOTrainer(**options, kl={"recipe": "trl/default", "beta": BETA})
    else:
        trainer = trl.GRPOTrainer(**options)
    # TRL's own KL is the recipe trl/default: k3 times the token ratio in the loss.
    start = time.perf_counter()
    trainer.train()
    seconds = (time.perf_counter() - start) / updates

    results = []
    for entry in trainer.state.log_history:
        # The last entry is a summary of the run.
        if "reward" not in entry:
            continue
        # KLGRPOTrainer logs beta times the KL, TRL the KL.
        if "kl" not in entry:
            entry["kl"] = entry.get("kl/loss", 0.0) / BETA
        result = {name: entry[name] for name in SHOWN}
        result["seconds"] = seconds
        results.append(result)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=3)
    options = parser.parse_args()
    has_model = (MODEL / "config.json").exists()
    has_trl = pins()["trl"].fetched
    if not has_model or not has_trl:
        print("needs `make smollm2` and `python bench/peers/fetch.py trl`", file=sys.stderr)
        return 2
    sys.path.append(str(pins()["trl"].folder))
    warnings.filterwarnings("ignore")
    print(f"| update | run | {' | '.join(SHOWN)} | seconds an update |")
    print(f"| --- | --- |{' --- |' * (len(SHOWN) + 1)}")
    # TRL prints its records to stdout, where the table goes.
    with tempfile.TemporaryDirectory(prefix="trl_terms_") as folder, contextlib.redirect_stdout(sys.stderr):
        runs = {
            "plain": run(False, options.updates, Path(folder)),
            "terms": run(True, options.updates, Path(folder)),
        }
    for update in range(options.updates):
        for name, entries in runs.items():
            entry = entries[update]
            cells = [f"{entry[shown]:.6g}" for shown in SHOWN]
            print(f"| {update + 1} | {name} | {' | '.join(cells)} | {entry['seconds']:.0f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
