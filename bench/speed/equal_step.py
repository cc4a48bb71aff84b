"""One step with the same completions and rewards in ours and in TRL: losses and gradients must agree.

python bench/speed/equal_step.py [--task chain_sum|gsm8k|pocket] [--algorithms grpo rloo]

The policy is the model plus a little noise, the same in both, so that the KL to the reference is not zero. Each
system computes reference log-probs, advantages, loss and gradient by its own code; TRL's sampler and reward
function are replaced by the completions and rewards given. For GRPO the step is taken twice: with each side's own
advantages (TRL adds 1e-4 to the standard deviation, ours 1e-6) and, to compare the losses alone, with TRL's in
both. RLOO's losses differ in value by construction, at the same gradient: TRL's is the advantage times a ratio
that is one on-policy, ours the advantage times the log-prob.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path = [str(HERE.parent), *(p for p in sys.path if Path(p or ".").resolve() != HERE)]
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from speed.variants import VARIANTS  # noqa: E402
from speed.workload import GROUP_SIZE, SMOLLM2, TASKS, missing, overrides, save_pocket  # noqa: E402

NOISE = 2e-3
"""Standard deviation of what is added to every weight: some 1e-2 nats a token from the reference."""

REFERENCE, ADVANTAGE, LOSS, NORM, GRADIENT = (
    "reference log-prob, nats", "advantage", "loss", "gradient norm", "gradient"
)  # fmt: skip
TOLERANCE = {REFERENCE: 1e-4, ADVANTAGE: 1e-5, LOSS: 1e-6, NORM: 1e-4, GRADIENT: 1e-4}
"""Absolute for the first three, relative for the norm and for the norm of the difference of the gradients."""

LOOSE = {**TOLERANCE, ADVANTAGE: 2e-3, LOSS: 1e-4, NORM: 2e-3, GRADIENT: 2e-3}
"""Where the two constants added to a standard deviation are part of the comparison."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """What one side computed: ``[B, T]`` reference log-probs (None: not shown), ``[B]`` advantages, loss, gradients."""

    ref_logp_BT: Any
    advantage_B: Any
    loss: float
    gradients: dict[str, Any]
    kl: float = 0.0
    """The KL terms' part of ``loss``."""


def perturb(model: Any, seed: int) -> None:
    """Add the same noise to equal models."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            parameter.add_(NOISE * torch.randn(parameter.shape, generator=generator))


def gradients(model: Any) -> dict[str, Any]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def sampled(parts: Any) -> list[Any]:
    """Rows of the first update: completions of our sampler, rewards drawn at random so that no group is all equal."""
    import random

    from kl_comedy.data import PromptOrder
    from kl_comedy.records import Reward, Scored
    from kl_comedy.rollouts import sampling_from

    config = parts.config
    order = PromptOrder(len(parts.problems.train), config.rollout.prompts_per_batch, config.seed)
    prompts = [parts.problems.train[n] for n in order.indices(0)]
    rollouts = parts.backend.generate(
        prompts, group_size=GROUP_SIZE, sampling=sampling_from(config.rollout), seed=config.seed
    )
    draw = random.Random(config.seed)
    return [
        Scored(rollout=rollout, reward=Reward(value=draw.choice((0.0, 0.25, 1.0)), status="ok", parts={}))
        for rollout in rollouts
    ]


def our_step(parts: Any, rows: Sequence[Any], folder: Path, *, advantage_B: Any = None) -> Step:
    """Ours: prepare, loss and backward of every micro-batch, as a training step does."""
    import torch

    from kl_comedy.training.losses import micro_loss
    from kl_comedy.training.module import PolicyModule
    from kl_comedy.training.packing import by_token_budget
    from kl_comedy.training.prepare import prepare
    from kl_comedy.training.run import trainer_for
    from kl_comedy.training.sources import stream_for

    stream = stream_for(parts, trainer_for(parts, [], folder).precision_plugin.forward_context)
    module = PolicyModule(
        parts.config, loaded=parts.loaded, references=parts.references, terms=parts.terms, stream=stream,
        backend=parts.backend,
    )  # fmt: skip
    betas = [beta.value for beta in module.betas]
    micros = prepare(rows, module.plan, betas=betas, references=module.references, policy_pass=module.policy_pass)
    splits = by_token_budget(rows, module.plan.microbatch_tokens)
    width = max(len(row.rollout.completion_ids) for row in rows)
    ref_BT, own_B = torch.zeros(len(rows), width), torch.zeros(len(rows))
    total = kl = 0.0
    parts.loaded.model.zero_grad()
    for split, micro in zip(splits, micros, strict=True):
        experience = micro.experience
        ref_BT[split, : experience.ids_BT.shape[1]] = experience.ref_logp_BT * experience.mask_BT
        own_B[split] = experience.advantage_BT[:, 0]
        if advantage_B is not None:
            given_BT = advantage_B[split][:, None] * experience.mask_BT
            micro = dataclasses.replace(micro, experience=dataclasses.replace(experience, advantage_BT=given_BT))
        loss, shares = micro_loss(
            micro, module.passes(micro), terms=module.terms, betas=betas, algorithm=parts.config.algorithm
        )  # fmt: skip
        loss.backward()
        total += float(loss)
        kl += sum(float(share) for name, share in shares.items() if name.startswith("kl_"))
    return Step(ref_logp_BT=ref_BT, advantage_B=own_B, loss=total, gradients=gradients(parts.loaded.model), kl=kl)


def their_step(trainer: Any, rows: Sequence[Any], *, grpo: bool) -> Step:
    """TRL: its own preparation of the batch, its loss, backward."""
    import torch

    completions = [list(row.rollout.completion_ids) for row in rows]
    rewards = torch.tensor([[row.reward.value] for row in rows])
    trainer._generate_single_turn = lambda *_, **__: (completions, None) if grpo else completions
    trainer._calculate_rewards = lambda *_, **__: rewards
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    inputs = [{"prompt": row.rollout.prompt.text, "answer": row.rollout.prompt.problem.answer} for row in rows]
    batch = trainer._generate_and_score_completions(inputs)
    trainer.model.zero_grad()
    loss = trainer._compute_loss(trainer.model, batch)
    loss.backward()
    found = batch.get("ref_per_token_logps")
    ref_BT = None if found is None else found * batch["completion_mask"]
    return Step(
        ref_logp_BT=ref_BT, advantage_B=batch["advantages"], loss=float(loss), gradients=gradients(trainer.model)
    )


def difference(ours: Step, theirs: Step) -> dict[str, float]:
    """By the names of :data:`TOLERANCE`, how far the two are apart."""
    import torch

    if ours.gradients.keys() != theirs.gradients.keys():
        raise SystemExit(f"other parameters have gradients: {sorted(ours.gradients.keys() ^ theirs.gradients.keys())}")
    first, second = (
        torch.cat([g[name].flatten() for name in ours.gradients]) for g in (ours.gradients, theirs.gradients)
    )
    norm = float(second.norm())
    found = {
        ADVANTAGE: float((ours.advantage_B - theirs.advantage_B).abs().max()),
        LOSS: abs(ours.loss - theirs.loss),
        NORM: abs(float(first.norm()) - norm) / norm,
        GRADIENT: float((first - second).norm()) / norm,
    }
    if theirs.ref_logp_BT is not None:
        found[REFERENCE] = float((ours.ref_logp_BT - theirs.ref_logp_BT).abs().max())
    return found


def show(title: str, ours: Step, theirs: Step, tolerance: Mapping[str, float]) -> bool:
    """Print one comparison, of what has a tolerance; whether all of it is within."""
    norms = [sum(float(g.norm()) ** 2 for g in step.gradients.values()) ** 0.5 for step in (ours, theirs)]
    print(f"{title}: loss {ours.loss:.8f} and {theirs.loss:.8f}, gradient norm {norms[0]:.6g} and {norms[1]:.6g}")
    if ours.kl:
        print(f"  {'KL in the loss':26} {ours.kl:.3e}, {abs(ours.kl) / TOLERANCE[LOSS]:.0f} times the loss's tolerance")
    good = True
    for name, value in difference(ours, theirs).items():
        if name in tolerance:
            within = value <= tolerance[name]
            good &= within
            verdict = "equal" if within else "NOT EQUAL"
            print(f"  {name:26} differs by {value:.2e} (tolerance {tolerance[name]:.0e}): {verdict}")
    return good


def compare(task: str, algorithm: str, model: Path, folder: Path) -> bool:
    """Both sides of one algorithm; whether they agree."""
    from kl_comedy.config import load_config
    from kl_comedy.training import rooms  # noqa: F401  registers every name a config may use
    from kl_comedy.training.build import build
    from speed import trl_side

    mine, other = VARIANTS[f"ours-{algorithm}-default"], VARIANTS[f"trl-{algorithm}-whole"]
    settings = {"model": model, "updates": 1, "seed": 0, "output": folder}
    parts = build(load_config(None, overrides(task, mine, **settings)))
    trainer = trl_side.build(task, other, **settings)
    for policy in (parts.loaded.model, trainer.model):
        perturb(policy, seed=1)
    rows = sampled(parts)
    theirs = their_step(trainer, rows, grpo=algorithm == "grpo")
    ours = our_step(parts, rows, folder)
    if algorithm == "rloo":
        parts.close()
        return show("rloo", ours, theirs, {name: bound for name, bound in TOLERANCE.items() if name != LOSS})
    own = show("grpo, own advantages", ours, theirs, LOOSE)
    given = dataclasses.replace(
        our_step(parts, rows, folder, advantage_B=theirs.advantage_B), advantage_B=theirs.advantage_B
    )
    parts.close()
    return show("grpo, TRL's advantages", given, theirs, TOLERANCE) and own


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=TASKS, default="chain_sum")
    parser.add_argument("--algorithms", nargs="+", choices=("grpo", "rloo"), default=["grpo", "rloo"])
    given = parser.parse_args()
    why = missing(given.task)
    if why:
        print(why, file=sys.stderr)
        return 2
    warnings.filterwarnings("ignore")
    with tempfile.TemporaryDirectory(prefix="equal_step_") as folder:
        model = SMOLLM2
        if TASKS[given.task].pocket:
            model = Path(folder) / "pocket"
            save_pocket(model)
        agreed = [compare(given.task, algorithm, model, Path(folder)) for algorithm in given.algorithms]
    print("equal" if all(agreed) else "NOT EQUAL")
    return 0 if all(agreed) else 1


if __name__ == "__main__":
    sys.exit(main())
