"""One repetition of TRL's released trainer, with timers around its methods."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from speed.phase_timer import PhaseTimer, time_torch_calls
from speed.recorder import UpdateRecorder
from speed.setup import add_to_path
from speed.variants import BETA, Variant
from speed.workload import GROUP_SIZE, LEARNING_RATE, REWARD, TASKS, fingerprint, overrides, prompts_in_order


def import_trl() -> Any:
    """Import TRL from its folder. Raises :class:`SystemExit` if it is not installed."""
    add_to_path("trl")
    import trl

    return trl


def arguments(task: str, variant: Variant, *, updates: int, seed: int, output: Path) -> dict[str, Any]:
    """Trainer arguments: shared settings, then the variant's options. The others have TRL's defaults."""
    return {
        "output_dir": str(output),
        "max_steps": updates,
        "learning_rate": LEARNING_RATE,
        # TRL's default decays it to zero over the run, which is a few updates long.
        "lr_scheduler_type": "constant",
        "beta": BETA[variant.algorithm],
        "num_generations": GROUP_SIZE,
        "max_completion_length": TASKS[task].max_new_tokens,
        # The precision of all systems here.
        "model_init_kwargs": {"dtype": "float32"},
        # TRL's default is bfloat16.
        "bf16": False,
        "use_cpu": True,
        "seed": seed,
        # The rows are already in kl_comedy's order.
        "shuffle_dataset": False,
        # The peers run without tracking and checkpoints; kl_comedy's run has its tracking.
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        **variant.options,
    }


def build(
    task: str, variant: Variant, *, model: Path, updates: int, seed: int, output: Path, callbacks: Any = None
) -> Any:
    """A trainer with kl_comedy's prompts, their order and the reward function."""
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
        return [reward.value for reward in score(REWARD, completions=completions, answers=answer)]

    if variant.algorithm == "grpo":
        trainer_class = trl.GRPOTrainer
        config_class = trl.GRPOConfig
    else:
        trainer_class = trl.RLOOTrainer
        config_class = trl.RLOOConfig
    trainer_arguments = arguments(task, variant, updates=updates, seed=seed, output=output)
    trainer = trainer_class(
        model=str(model),
        reward_funcs=verified,
        args=config_class(**trainer_arguments),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=callbacks,
    )
    _check_prompts(trainer, prompts)
    return trainer


def _check_prompts(trainer: Any, prompts: list[Any]) -> None:
    """Raise :class:`SystemExit` if TRL tokenizes the prompts differently."""
    their_ids = trainer._tokenize_prompts([prompt.text for prompt in prompts])[0]
    our_ids = [prompt.token_ids for prompt in prompts]
    if fingerprint(their_ids) != fingerprint(our_ids):
        raise SystemExit("TRL tokenizes the prompts differently; the work would not be the same")


def run(task: str, variant: Variant, *, model: Path, updates: int, seed: int, output: Path) -> dict[str, Any]:
    """Train ``updates`` updates (the first is the warm-up) and return the recorded measurements."""
    from transformers import TrainerCallback

    recorder = UpdateRecorder(PhaseTimer())

    class UpdateCallback(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            recorder.start()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            recorder.end_update()

    time_torch_calls(recorder.timer)
    trainer = build(task, variant, model=model, updates=updates, seed=seed, output=output, callbacks=[UpdateCallback()])
    _add_timers(recorder, trainer)
    trainer.train()
    return recorder.result()


def _add_timers(recorder: UpdateRecorder, trainer: Any) -> None:
    """Time the trainer's methods on the instance."""
    import torch

    # One method of TRL makes every forward pass; what it is for shows in the model and the gradient mode.
    def kind_of_pass(model: Any, *_: Any, **__: Any) -> str:
        if torch.is_grad_enabled():
            return "forward"
        if model is trainer.ref_model:
            return "reference"
        return "policy_no_grad"

    # A group's prompts may be given once, or repeated for each completion.
    def count_generated(result: Any, prompt_ids: Any, *_: Any, **__: Any) -> None:
        completions = result
        if isinstance(result, tuple):
            # GRPO returns log-probs too, RLOO the completions alone.
            completions = result[0]
        completions_per_prompt = len(completions) // len(prompt_ids)
        prompts = []
        for ids in prompt_ids:
            prompts += [list(map(int, ids))] * completions_per_prompt
        recorder.add_completions(prompts, [len(ids) for ids in completions])

    def count_rewards(rewards_BR: Any, *_: Any) -> None:
        # One column per reward function.
        recorder.add_rewards(rewards_BR.sum(1).tolist())

    def count_trained(_: Any, model: Any, inputs: Any, *__: Any, **___: Any) -> None:
        recorder.add_trained_tokens(int(inputs["completion_mask"].sum()))

    timer = recorder.timer
    timer.wrap(trainer, "_generate_single_turn", "generate", after=count_generated)
    timer.wrap(trainer, "_calculate_rewards", "score", after=count_rewards)
    timer.wrap(trainer, "_get_per_token_logps_and_entropies", kind_of_pass)
    timer.wrap(trainer, "_compute_loss", "forward", after=count_trained)
