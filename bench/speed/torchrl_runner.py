"""One repetition of TorchRL: its sampler, replay buffer, advantages, loss and optimizer step, as in its GRPO script.

TorchRL's script for GRPO needs GPUs, Ray and vLLM. What runs here is the same sequence in one process:
``TransformersWrapper`` samples (transformers' generation), a second one gives the reference's log-probs,
``MCAdvantage`` in a replay buffer makes groups and advantages, ``GRPOLoss`` and ``MixedPrecisionOptimizationStepper``
train on micro-batches of 4 (the script's 32 rows in 8). The script asks for gradient checkpointing and puts the model
in eval mode, in which transformers does not checkpoint. The variant ``default`` does the same; the variant
``checkpointing`` does checkpoint. This file adds the training loop, and fixes that are commented in place.

The KL term differs from that of the other systems: it is k3 without ratio, divided by every position of the padded
micro-batch, prompts included. The amount of work is the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from speed.phase_timer import PhaseTimer, time_torch_calls
from speed.recorder import UpdateRecorder
from speed.setup import add_to_path
from speed.variants import BETA, Variant
from speed.workload import GROUP_SIZE, LEARNING_RATE, PROMPTS_PER_UPDATE, REWARD, TASKS, overrides, prompts_in_order

CLIP_NORM = 1.0
"""The default of TorchRL, TRL and kl_comedy."""

ROWS = PROMPTS_PER_UPDATE * GROUP_SIZE


@dataclass(frozen=True, kw_only=True)
class System:
    """The parts of a TorchRL run. ``buffer`` holds one update; ``prompts`` are those of the whole run, in order."""

    tokenizer: Any
    policy: Any
    sampler: Any
    learner: Any
    reference: Any
    buffer: Any
    loss: Any
    stepper: Any
    prompts: list[Any]
    checkpointing: bool


def build(task: str, variant: Variant, *, model: Path, updates: int, seed: int, output: Path) -> System:
    """Build TorchRL's parts with kl_comedy's model, prompts and order. Raises if TorchRL is not installed."""
    import torch

    from kl_comedy.config import load_config

    add_to_path("torchrl")
    from tensordict import set_list_to_stack
    from torchrl.data import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement
    from torchrl.objectives.llm import GRPOLoss
    from torchrl.objectives.llm.grpo import MCAdvantage
    from torchrl.trainers.trainers import MixedPrecisionOptimizationStepper

    # TorchRL's wrappers set the same for their own methods; the loop of this file is outside of them.
    set_list_to_stack(True).set()
    torch.manual_seed(seed)
    config = load_config(None, overrides(task, variant, model=model, updates=updates, seed=seed, output=output))
    tokenizer, policy = load(model)
    _, reference = load(model)
    checkpointing = variant.options.get("gradient_checkpointing", False)
    # The script asks for it always; in eval mode it has no effect, see above.
    if checkpointing:
        policy.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    pad_model_input = not variant.options.get("packing", False)
    learner = scorer(policy, tokenizer, pad_model_input=pad_model_input)
    accumulated = variant.options["gradient_accumulation_steps"]
    return System(
        tokenizer=tokenizer,
        policy=policy,
        learner=learner,
        sampler=sampler(policy, tokenizer, TASKS[task].max_new_tokens),
        reference=scorer(reference, tokenizer, pad_model_input=pad_model_input),
        buffer=ReplayBuffer(
            storage=LazyStackStorage(ROWS),
            sampler=SamplerWithoutReplacement(),
            # Iterating over the buffer gives the micro-batches.
            batch_size=ROWS // accumulated,
            transform=MCAdvantage(grpo_size=GROUP_SIZE),
        ),
        # TorchRL's default adds an entropy bonus, which the other systems do not have.
        loss=GRPOLoss(learner, kl_to_ref_coeff=BETA[variant.algorithm], entropy_bonus=False),
        stepper=MixedPrecisionOptimizationStepper(
            torch.optim.AdamW(policy.parameters(), lr=LEARNING_RATE),
            gradient_accumulation_steps=accumulated,
            clip_norm=CLIP_NORM,
        ),
        prompts=prompts_in_order(config, tokenizer, updates),
        checkpointing=checkpointing,
    )


def load(model: Path) -> tuple[Any, Any]:
    """Tokenizer and model in float32, in eval mode as TorchRL's script has it.

    Padding by the end token would cost every completion its last token (the mask is "not the padding token"), so a
    tokenizer without a padding token of its own gets the unknown one, as in TorchRL's script.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    pads_with_end_token = tokenizer.pad_token_id == tokenizer.eos_token_id
    if pads_with_end_token:
        tokenizer.pad_token = tokenizer.unk_token
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    # The whole distribution, as in the other systems; TorchRL's wrapper refuses top_k=0 as an argument.
    policy.generation_config.top_k = 0
    return tokenizer, policy


def sampler(policy: Any, tokenizer: Any, max_new_tokens: int) -> Any:
    """TorchRL's sampling policy with a fixed log-prob of the first token."""
    import torch
    from torchrl.modules.llm import TransformersWrapper

    class Sampler(TransformersWrapper):
        """TorchRL 0.14.1 sets the first generated token's log-prob to 0, so that its ratio would be its probability."""

        @classmethod
        def _log_probs_generate(cls, tokens: Any, logits: Any, pad_val: int = -100, pad: bool = True) -> Any:
            logp_BT, logits_BTV = super()._log_probs_generate(tokens, logits, pad_val, pad)
            logp_BT[:, 0] = -torch.nn.functional.cross_entropy(logits_BTV[:, 0], tokens[:, 0], reduction="none")
            return logp_BT, logits_BTV

    return Sampler(
        policy,
        tokenizer=tokenizer,
        input_mode="tokens",
        generate=True,
        return_log_probs=True,
        pad_output=False,
        generate_kwargs={
            "max_new_tokens": max_new_tokens,
            "do_sample": True,
            "temperature": 1.0,
            "top_p": 1.0,
            "pad_token_id": tokenizer.pad_token_id,
        },
    )


def scorer(model: Any, tokenizer: Any, *, pad_model_input: bool) -> Any:
    """TorchRL's wrapper for log-probs of given completions."""
    from torchrl.modules.llm import TransformersWrapper

    return TransformersWrapper(
        model,
        tokenizer=tokenizer,
        input_mode="tokens",
        generate=False,
        return_log_probs=True,
        pad_output=False,
        pad_model_input=pad_model_input,
    )


def sample(system: System, prompts: list[Any]) -> Any:
    """One completion per prompt (repeat a prompt for a group): a lazy stack of ``tokens`` and ``log_probs``."""
    import torch
    from tensordict import TensorDict, lazy_stack

    rows = [TensorDict({"tokens": {"prompt": torch.tensor(prompt.token_ids)}}) for prompt in prompts]
    return system.sampler(lazy_stack(rows))


def experience(
    system: System, prompts: list[Any], completions: list[Any], logps: list[Any], rewards: list[float]
) -> Any:
    """Rows for the replay buffer, ``[B, 1]``: one step per trajectory, with reference log-probs.

    ``completions`` and the sampler's ``logps``: one vector per row. Prompt positions carry NaN as sampled log-probs,
    which is how TorchRL marks tokens outside the loss.
    """
    import torch
    from tensordict import TensorDict, lazy_stack

    rows = []
    for prompt, ids, logp, reward in zip(prompts, completions, logps, rewards, strict=True):
        prompt_ids = torch.tensor(prompt.token_ids)
        full = torch.cat([prompt_ids, ids])
        no_prompt_logps = torch.full((len(prompt_ids),), torch.nan)
        rows.append(
            TensorDict(
                {
                    "query": prompt.text,
                    "tokens": {"prompt": prompt_ids, "full": full},
                    "masks": {"all_attention_mask": torch.ones_like(full, dtype=torch.bool)},
                    "log_probs": {"full": torch.cat([no_prompt_logps, logp])},
                    "next": {"reward": torch.tensor([[reward]]), "done": torch.tensor([True])},
                }
            )
        )
    for row, logp in zip(rows, reference_logps(system, rows), strict=True):
        row.set(("next", "ref_log_probs", "full"), logp)
    return lazy_stack(rows).unsqueeze(1)


def reference_logps(system: System, rows: list[Any]) -> list[Any]:
    """Reference log-probs of prompt and completion, in batches of the micro-batch size."""
    import torch
    from tensordict import TensorDict, lazy_stack

    logps: list[Any] = []
    size = system.buffer.batch_size
    for begin in range(0, len(rows), size):
        # A copy, because the wrapper writes its outputs into its input.
        part = [TensorDict({"tokens": {"full": row["tokens", "full"]}}) for row in rows[begin : begin + size]]
        with torch.no_grad():
            logps += system.reference(lazy_stack(part)).get(("log_probs", "full"), as_list=True)
    return logps


def verified(system: System, prompts: list[Any], completions: list[Any]) -> list[float]:
    """Rewards of completions by the verifier that all systems share."""
    from kl_comedy.rewards import score

    texts = system.tokenizer.batch_decode(completions, skip_special_tokens=True)
    answers = [prompt.problem.answer for prompt in prompts]
    return [reward.value for reward in score(REWARD, completions=texts, answers=answers)]


def run(task: str, variant: Variant, *, model: Path, updates: int, seed: int, output: Path) -> dict[str, Any]:
    """Train ``updates`` updates (the first is the warm-up) and return the recorded measurements."""
    recorder = UpdateRecorder(PhaseTimer())
    time_torch_calls(recorder.timer)
    system = build(task, variant, model=model, updates=updates, seed=seed, output=output)
    timer = recorder.timer
    timer.wrap(system.sampler, "forward", "generate")
    timer.wrap(system.reference, "forward", "reference")
    timer.wrap(system.loss, "forward", "forward")
    recorder.start()
    for number in range(updates):
        first = number * PROMPTS_PER_UPDATE
        repeated = []
        for prompt in system.prompts[first : first + PROMPTS_PER_UPDATE]:
            # TorchRL samples one completion per row; MCAdvantage finds a group by its prompt.
            repeated += [prompt] * GROUP_SIZE
        _update(system, recorder, repeated)
        recorder.end_update()
    return recorder.result()


def _update(system: System, recorder: UpdateRecorder, prompts: list[Any]) -> None:
    """One update on 32 rows: sample, score and train."""
    sampled = sample(system, prompts)
    completions = sampled.get(("tokens", "response"), as_list=True)
    logps = sampled.get(("log_probs", "response"), as_list=True)
    prompt_ids = [list(prompt.token_ids) for prompt in prompts]
    recorder.add_completions(prompt_ids, [len(ids) for ids in completions])
    with recorder.timer.phase("score"):
        rewards = verified(system, prompts, completions)
    recorder.add_rewards(rewards)
    system.buffer.extend(experience(system, prompts, completions, logps, rewards))
    # The stepper asks a trainer for the loss, and for nothing else.
    trainer = SimpleNamespace(compute_loss=system.loss)
    # transformers checkpoints in training mode only, where it samples without a cache. These models have no dropout.
    system.policy.train(system.checkpointing)
    for micro in system.buffer:
        # Only completion tokens have a finite sampled log-prob, see experience().
        for logp in micro.get(("log_probs", "full"), as_list=True):
            recorder.add_trained_tokens(int(logp.isfinite().sum()))
        system.stepper.step(trainer, micro)
    system.policy.eval()
    # As TorchRL's GRPO trainer empties it after an update.
    system.buffer.empty(empty_write_count=False)
