"""TRL's GRPO beside the same run with our terms, on SmolLM2: loss, KL, gradient norm and seconds of each update.

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
BETA, PROMPTS, GROUP, TOKENS = 0.04, 2, 4, 24
SHOWN = ("loss", "kl", "grad_norm", "reward", "completions/mean_length")


def reward(completions: list[Any], **_: Any) -> list[float]:
    """The share of digits in a completion: differs within groups from the first update."""
    texts = [completion[0]["content"] for completion in completions]
    return [sum(character.isdigit() for character in text) / max(len(text), 1) for text in texts]


def run(terms: bool, updates: int, folder: Path) -> list[dict[str, float]]:
    """Train; what TRL logged of each update, with its seconds."""
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
    kl = {"recipe": "trl/default", "beta": BETA}
    trainer = KLGRPOTrainer(**options, kl=kl) if terms else trl.GRPOTrainer(**options)
    start = time.perf_counter()
    trainer.train()
    seconds = (time.perf_counter() - start) / updates
    logged = [entry for entry in trainer.state.log_history if "reward" in entry]
    for entry in logged:
        entry["kl"] = entry.get("kl", entry.get("kl/loss", 0.0) / BETA)
    return [{**{name: entry[name] for name in SHOWN}, "seconds": seconds} for entry in logged]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=3)
    options = parser.parse_args()
    if not (MODEL / "config.json").exists() or not pins()["trl"].fetched:
        print("needs `make smollm2` and `python bench/peers/fetch.py trl`", file=sys.stderr)
        return 2
    sys.path.append(str(pins()["trl"].folder))
    warnings.filterwarnings("ignore")
    print(f"| update | run | {' | '.join(SHOWN)} | seconds an update |")
    print(f"| --- | --- |{' --- |' * (len(SHOWN) + 1)}")
    # TRL prints its records to stdout
    with tempfile.TemporaryDirectory(prefix="trl_terms_") as folder, contextlib.redirect_stdout(sys.stderr):
        runs = {name: run(name == "terms", options.updates, Path(folder)) for name in ("plain", "terms")}
    for update in range(options.updates):
        for name, entries in runs.items():
            entry = entries[update]
            cells = [f"{entry[shown]:.6g}" for shown in SHOWN]
            print(f"| {update + 1} | {name} | {' | '.join(cells)} | {entry['seconds']:.0f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
