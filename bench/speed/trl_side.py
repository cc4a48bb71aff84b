"""One repetition of TRL: its trainer as released, with timers put around its methods."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from speed.clock import PhaseClock, watch_torch
from speed.ledger import Ledger
from speed.setup import add_to_path
from speed.variants import BETA, Variant
from speed.workload import GROUP_SIZE, LEARNING_RATE, REWARD, TASKS, fingerprint, overrides, prompts_in_order


def import_trl() -> Any:
    """TRL from its folder, after everything of our environment. Raises where it was not fetched."""
    add_to_path("trl")
    import trl

    return trl


def arguments(task: str, variant: Variant, *, updates: int, seed: int, output: Path) -> dict[str, Any]:
    """Trainer arguments: what both systems share, then the variant's own; all else is TRL's default."""
    return {
        "output_dir": str(output),
        "max_steps": updates,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "beta": BETA[variant.algorithm],
        "num_generations": GROUP_SIZE,
        "max_completion_length": TASKS[task].max_new_tokens,
        "model_init_kwargs": {"dtype": "float32"},
        "bf16": False,
        "use_cpu": True,
        "seed": seed,
        "shuffle_dataset": False,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        **variant.options,
    }


def build(
    task: str, variant: Variant, *, model: Path, updates: int, seed: int, output: Path, callbacks: Any = None
) -> Any:
    """A trainer on our prompts, in our order, with our reward function."""
    from datasets import Dataset
    from transformers import AutoTokenizer

    from kl_comedy.config import load_config
    from kl_comedy.rewards import score

    trl = import_trl()
    config = load_config(None, overrides(task, variant, model=model, updates=updates, seed=seed, output=output))
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = prompts_in_order(config, tokenizer, updates)
    rows = [{"prompt": prompt.text, "answer": prompt.problem.answer} for prompt in prompts]

    def verified(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        return [found.value for found in score(REWARD, completions=completions, answers=answer)]

    kind, settings = {
        "grpo": (trl.GRPOTrainer, trl.GRPOConfig),
        "rloo": (trl.RLOOTrainer, trl.RLOOConfig),
    }[variant.algorithm]
    given = arguments(task, variant, updates=updates, seed=seed, output=output)
    trainer = kind(
        model=str(model),
        reward_funcs=verified,
        args=settings(**given),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=callbacks,
    )
    _check_prompts(trainer, prompts)
    return trainer


def _check_prompts(trainer: Any, prompts: list[Any]) -> None:
    """TRL must read the prompts as the same tokens."""
    theirs = trainer._tokenize_prompts([prompt.text for prompt in prompts])[0]
    if fingerprint(theirs) != fingerprint([prompt.token_ids for prompt in prompts]):
        raise SystemExit("TRL tokenizes the prompts differently; the work would not be the same")


def run(task: str, variant: Variant, *, model: Path, updates: int, seed: int, output: Path) -> dict[str, Any]:
    """Train ``updates`` updates (the first is the warm-up); what the ledger found."""
    from transformers import TrainerCallback

    ledger = Ledger(PhaseClock())

    class Marks(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            ledger.begin()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            ledger.end_update()

    watch_torch(ledger.clock)
    trainer = build(task, variant, model=model, updates=updates, seed=seed, output=output, callbacks=[Marks()])
    _watch(ledger, trainer)
    trainer.train()
    return ledger.close()


def _watch(ledger: Ledger, trainer: Any) -> None:
    """Put the phases around the trainer's methods, on the object itself."""
    import torch

    def kind_of_pass(model: Any, *_: Any, **__: Any) -> str:
        if torch.is_grad_enabled():
            return "forward"
        return "reference" if model is trainer.ref_model else "policy_no_grad"

    def count_generated(result: Any, prompt_ids: Any, *_: Any, **__: Any) -> None:
        completions = result[0] if isinstance(result, tuple) else result
        per_prompt = len(completions) // len(prompt_ids)
        prompts = [list(map(int, ids)) for ids in prompt_ids for _ in range(per_prompt)]
        ledger.generated(prompts, [len(ids) for ids in completions])

    def count_trained(_: Any, model: Any, inputs: Any, *__: Any, **___: Any) -> None:
        ledger.trained(int(inputs["completion_mask"].sum()))

    clock = ledger.clock
    clock.wrap(trainer, "_generate_single_turn", "generate", after=count_generated)
    clock.wrap(trainer, "_calculate_rewards", "score", after=lambda found, *_: ledger.rewarded(found.sum(1).tolist()))
    clock.wrap(trainer, "_get_per_token_logps_and_entropies", kind_of_pass)
    clock.wrap(trainer, "_compute_loss", "forward", after=count_trained)
