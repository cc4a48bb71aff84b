"""One training step of each system on the same completions and rewards, for :mod:`speed.equal_step`.

Shape legend: ``B`` completions, ``T`` completion tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from speed.workload import GROUP_SIZE

NOISE = 2e-3
"""Standard deviation of the noise added to every weight; it gives about 1e-2 nats per token of KL to the reference."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """One system's reference log-probs ``[B, T]`` (None if not exposed), advantages ``[B]``, loss and gradients."""

    ref_logp_BT: Any
    advantage_B: Any
    loss: float
    gradients: dict[str, Any]
    kl: float = 0.0
    """The part of ``loss`` that comes from the KL terms."""


def perturb(model: Any, seed: int) -> None:
    """Add noise to every weight; the same ``seed`` gives the same noise."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        # Sorted: the systems may register the same parameters in another order, and would draw other noise.
        for _, parameter in sorted(model.named_parameters()):
            parameter.add_(NOISE * torch.randn(parameter.shape, generator=generator))


def gradients(model: Any) -> dict[str, Any]:
    """Copies of the gradients of all parameters that have one, by name."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def sampled(data: Any) -> list[Any]:
    """Rows of the first update: sampled completions with random rewards, so that rewards differ within groups."""
    import random

    from kl_comedy.data import PromptOrder
    from kl_comedy.records import Reward, Scored
    from kl_comedy.rollouts import sampling_from

    config = data.config
    order = PromptOrder(len(data.prompts.train), config.rollout.prompts_per_batch, config.seed)
    prompts = [data.prompts.train[n] for n in order.indices(0)]
    rollouts = data.backend.generate(
        prompts, group_size=GROUP_SIZE, sampling=sampling_from(config.rollout), seed=config.seed
    )
    # Verified rewards may be equal within a group: its advantages would be 0, and nothing would be compared.
    generator = random.Random(config.seed)
    rows = []
    for rollout in rollouts:
        reward = Reward(value=generator.choice((0.0, 0.25, 1.0)), status="ok", parts={})
        rows.append(Scored(rollout=rollout, reward=reward))
    return rows


def our_step(module: Any, rows: Sequence[Any], *, advantage_B: Any = None, beta_scale: float = 1.0) -> Step:
    """kl_comedy: preparation, loss and backward of every micro-batch, as in a training step.

    ``advantage_B`` replaces the computed advantages. ``beta_scale`` multiplies the KL coefficients.
    """
    import torch

    from kl_comedy.training.loss import micro_loss, prepare
    from kl_comedy.training.packing import by_token_budget

    betas = {name: beta_scale * beta for name, beta in module.beta_values.items()}
    micros = prepare(rows, module.plan, betas=betas, references=module.references, policy_pass=module.policy_pass)
    splits = by_token_budget(rows, module.plan.packer.budget)
    width = max(len(row.rollout.completion_ids) for row in rows)
    ref_logp_BT = torch.zeros(len(rows), width)
    our_advantage_B = torch.zeros(len(rows))
    total = 0.0
    kl = 0.0
    module.policy.zero_grad()
    for split, micro in zip(splits, micros, strict=True):
        # ``split`` holds the row numbers of this micro-batch: packing changes the order of the rows.
        experience = micro.experience
        ref_logp_BT[split, : experience.ids_BT.shape[1]] = experience.ref_logp_BT * experience.mask_BT
        our_advantage_B[split] = experience.advantage_BT[:, 0]
        if advantage_B is not None:
            replacement_BT = advantage_B[split][:, None] * experience.mask_BT
            experience = dataclasses.replace(experience, advantage_BT=replacement_BT)
            micro = dataclasses.replace(micro, experience=experience)
        result = micro_loss(
            micro, module.passes(micro), terms=module.terms, betas=betas, algorithm=module.config.algorithm
        )
        result.loss.backward()
        total += float(result.loss)
        for name, part in result.parts.items():
            if name.startswith("kl_"):
                kl += float(part)
    return Step(
        ref_logp_BT=ref_logp_BT,
        advantage_B=our_advantage_B,
        loss=total,
        gradients=gradients(module.policy),
        kl=kl,
    )


def trl_step(trainer: Any, rows: Sequence[Any], *, grpo: bool) -> Step:
    """TRL: its batch preparation, loss and backward."""
    import torch

    completions = [list(row.rollout.completion_ids) for row in rows]
    rewards_B1 = torch.tensor([[row.reward.value] for row in rows])

    def given_completions(*_: Any, **__: Any) -> Any:
        if grpo:
            # TRL's GRPO trainer returns the sampler's log-probs too; None where it does not use them.
            return completions, None
        return completions

    trainer._generate_single_turn = given_completions
    trainer._calculate_rewards = lambda *_, **__: rewards_B1
    # TRL sets it in its training loop, which is not run here. The loss is divided by it.
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    inputs = [{"prompt": row.rollout.prompt.text, "answer": row.rollout.prompt.problem.answer} for row in rows]
    batch = trainer._generate_and_score_completions(inputs)
    trainer.model.zero_grad()
    loss = trainer._compute_loss(trainer.model, batch)
    loss.backward()
    # RLOO has its KL in the reward and does not keep the reference's log-probs.
    ref_logp_BT = batch.get("ref_per_token_logps")
    if ref_logp_BT is not None:
        ref_logp_BT = ref_logp_BT * batch["completion_mask"]
    return Step(
        ref_logp_BT=ref_logp_BT,
        advantage_B=batch["advantages"],
        loss=float(loss),
        gradients=gradients(trainer.model),
    )


def torchrl_step(system: Any, rows: Sequence[Any]) -> tuple[Step, float]:
    """TorchRL: the advantages of its replay buffer, its loss on all rows, backward. Returns the step and a KL scale.

    The scale is the share of completion tokens among all positions of the padded batch: TorchRL divides its KL sum by
    all positions, the other systems divide by completion tokens.
    """
    import torch

    from speed import torchrl_runner

    prompts = [row.rollout.prompt for row in rows]
    completions = [torch.tensor(row.rollout.completion_ids) for row in rows]
    logps = [torch.tensor(row.rollout.logps) for row in rows]
    rewards = [row.reward.value for row in rows]
    batch = torchrl_runner.experience(system, prompts, completions, logps, rewards)
    system.buffer.extend(batch)
    ready = system.buffer[:]
    system.policy.zero_grad()
    losses = system.loss(ready)
    loss = losses.loss_objective + losses.loss_kl_to_ref
    loss.backward()

    lengths = [len(ids) for ids in completions]
    padded_width = max(len(prompt.token_ids) + length for prompt, length in zip(prompts, lengths, strict=True))
    ref_logp_BT = torch.zeros(len(rows), max(lengths))
    for number, (row, length) in enumerate(zip(ready.unbind(0), lengths, strict=True)):
        # "full" is prompt and completion.
        ref_logp_BT[number, :length] = row["next", "ref_log_probs", "full"][-length:]
    step = Step(
        ref_logp_BT=ref_logp_BT,
        advantage_B=ready["advantage"].flatten(),
        loss=float(loss),
        gradients=gradients(system.policy),
        kl=float(losses.loss_kl_to_ref),
    )
    kl_scale = sum(lengths) / (len(rows) * padded_width)
    return step, kl_scale
