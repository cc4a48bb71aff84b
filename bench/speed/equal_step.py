"""Check that one training step of kl_comedy and of a peer agree on the same completions: loss, gradients, advantages.

python bench/speed/equal_step.py [--task chain_sum|gsm8k|pocket] [--algorithms grpo rloo] [--peers trl torchrl]

Both policies are the model plus the same noise, so that the KL to the reference is not zero. Each system computes
reference log-probs, advantages, loss and gradient by its own code; the peer's sampler and reward function are replaced
by fixed completions and rewards. GRPO is compared twice: with each system's own advantages (TRL adds 1e-4 to the
standard deviation, kl_comedy 1e-6), and with TRL's advantages in both to compare the losses alone. RLOO losses differ
in value but have the same gradient: TRL multiplies the advantage by a ratio that is 1 on-policy, kl_comedy by the
log-prob. TorchRL has GRPO only; kl_comedy then uses TorchRL's KL term (k3 without ratio) and KL denominator.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# Not this folder itself, which Python puts there: its `setup` and `memory` would hide modules of other packages.
sys.path = [str(HERE.parent), *(p for p in sys.path if Path(p or ".").resolve() != HERE)]
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from speed.setup import PEERS, absent  # noqa: E402
from speed.steps import Step, our_step, perturb, sampled, torchrl_step, trl_step  # noqa: E402
from speed.variants import BETA, VARIANTS, Variant  # noqa: E402
from speed.workload import SMOLLM2, TASKS, missing, overrides, save_pocket  # noqa: E402

REFERENCE = "reference log-prob, nats"
ADVANTAGE = "advantage"
LOSS = "loss"
NORM = "gradient norm"
GRADIENT = "gradient"

TOLERANCE = {REFERENCE: 1e-4, ADVANTAGE: 1e-5, LOSS: 1e-6, NORM: 1e-4, GRADIENT: 1e-4}
"""Absolute for the first three; relative for the gradient norm and for the norm of the gradient difference."""

CLAMPED = {**TOLERANCE, ADVANTAGE: 1e-4}
"""For TorchRL, which clamps the standard deviation at 1e-6, while kl_comedy adds 1e-6."""

LOOSE = {**TOLERANCE, ADVANTAGE: 2e-3, LOSS: 1e-4, NORM: 2e-3, GRADIENT: 2e-3}
"""For each side's own advantages, whose standard deviations have different constants added."""


def difference(ours: Step, theirs: Step) -> dict[str, float]:
    """The differences between two steps, keyed as in :data:`TOLERANCE`."""
    import torch

    in_one_only = ours.gradients.keys() ^ theirs.gradients.keys()
    if in_one_only:
        raise SystemExit(f"different parameters have gradients: {sorted(in_one_only)}")
    # One order of names for both: the systems may list the same parameters in different orders.
    names = list(ours.gradients)
    our_gradient = torch.cat([ours.gradients[name].flatten() for name in names])
    their_gradient = torch.cat([theirs.gradients[name].flatten() for name in names])
    their_norm = float(their_gradient.norm())
    differences = {
        ADVANTAGE: float((ours.advantage_B - theirs.advantage_B).abs().max()),
        LOSS: abs(ours.loss - theirs.loss),
        NORM: abs(float(our_gradient.norm()) - their_norm) / their_norm,
        GRADIENT: float((our_gradient - their_gradient).norm()) / their_norm,
    }
    if theirs.ref_logp_BT is not None:
        differences[REFERENCE] = float((ours.ref_logp_BT - theirs.ref_logp_BT).abs().max())
    return differences


def gradient_norm(step: Step) -> float:
    """The 2-norm of all gradients together."""
    squares = [float(gradient.norm()) ** 2 for gradient in step.gradients.values()]
    return math.sqrt(sum(squares))


def show(title: str, ours: Step, theirs: Step, tolerance: Mapping[str, float]) -> bool:
    """Print one comparison. Returns whether every difference is within its tolerance."""
    print(
        f"{title}: loss {ours.loss:.8f} and {theirs.loss:.8f}, "
        f"gradient norm {gradient_norm(ours):.6g} and {gradient_norm(theirs):.6g}"
    )
    if ours.kl:
        # A KL smaller than the tolerance could be wrong or missing, and the losses would still agree.
        multiple = abs(ours.kl) / TOLERANCE[LOSS]
        print(f"  {'KL in the loss':26} {ours.kl:.3e}, {multiple:.0f} times the loss's tolerance")
    all_within = True
    for name, value in difference(ours, theirs).items():
        if name not in tolerance:
            continue
        if value <= tolerance[name]:
            verdict = "equal"
        else:
            verdict = "NOT EQUAL"
            all_within = False
        print(f"  {name:26} differs by {value:.2e} (tolerance {tolerance[name]:.0e}): {verdict}")
    return all_within


def against_trl(task: str, algorithm: str, model: Path, folder: Path) -> bool:
    """Compare one algorithm with TRL. Returns whether they agree."""
    from speed import trl_runner

    # All completions in one backward pass and no checkpointing: the batch is compared as a whole.
    trl_variant = VARIANTS[f"trl-{algorithm}-whole"]
    module, data = build_ours(task, VARIANTS[f"ours-{algorithm}-default"], model, folder)
    trainer = trl_runner.build(task, trl_variant, model=model, updates=1, seed=0, output=folder)
    # The policies only, not the references: the KL between them is then not zero.
    for policy in (module.policy, trainer.model):
        perturb(policy, seed=1)
    rows = sampled(data)
    theirs = trl_step(trainer, rows, grpo=algorithm == "grpo")
    ours = our_step(module, rows)
    if algorithm == "rloo":
        data.close()
        without_loss = {name: bound for name, bound in TOLERANCE.items() if name != LOSS}
        return show("TRL, rloo", ours, theirs, without_loss)

    own_advantages_agree = show("TRL, grpo, own advantages", ours, theirs, LOOSE)
    with_their_advantages = our_step(module, rows, advantage_B=theirs.advantage_B)
    # The step reports the advantages that it computed; the ones it used were TRL's.
    with_their_advantages = dataclasses.replace(with_their_advantages, advantage_B=theirs.advantage_B)
    data.close()
    same_advantages_agree = show("TRL, grpo, TRL's advantages", with_their_advantages, theirs, TOLERANCE)
    return own_advantages_agree and same_advantages_agree


def against_torchrl(task: str, model: Path, folder: Path) -> bool:
    """Compare GRPO with TorchRL, using k3 without ratio and a coefficient scaled to TorchRL's denominator."""
    from speed import torchrl_runner

    k3 = f"[{{estimator: k3, placement: loss, correction: none, beta: {BETA['grpo']}}}]"
    our_variant = dataclasses.replace(VARIANTS["ours-grpo-default"], options={"kl": k3})
    module, data = build_ours(task, our_variant, model, folder)
    system = torchrl_runner.build(task, VARIANTS["torchrl-grpo-default"], model=model, updates=1, seed=0, output=folder)
    for policy in (module.policy, system.policy):
        perturb(policy, seed=1)
    rows = sampled(data)
    theirs, scale = torchrl_step(system, rows)
    ours = our_step(module, rows, beta_scale=scale)
    data.close()
    print(f"TorchRL's KL term is divided by padded positions: {scale:.3f} of the coefficient over completion tokens")
    return show("TorchRL, grpo", ours, theirs, CLAMPED)


def build_ours(task: str, variant: Variant, model: Path, folder: Path) -> Any:
    """kl_comedy's module (model, reference) and data (prompts, sampler)."""
    from kl_comedy.config import load_config
    from kl_comedy.training.experience_module import build_in_process

    config = load_config(None, overrides(task, variant, model=model, updates=1, seed=0, output=folder))
    return build_in_process(config)


def reasons_not_to_run(task: str, peers: Sequence[str]) -> list[str]:
    """What is missing on this machine, one message each."""
    reasons = []
    missing_files = missing(task)
    if missing_files is not None:
        reasons.append(missing_files)
    for peer in peers:
        if absent(peer):
            reasons.append(f"{peer} is not installed; run python bench/speed/setup.py")
    return reasons


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=TASKS, default="chain_sum")
    parser.add_argument("--algorithms", nargs="+", choices=("grpo", "rloo"), default=["grpo", "rloo"])
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    options = parser.parse_args()
    reasons = reasons_not_to_run(options.task, options.peers)
    if reasons:
        print("\n".join(reasons), file=sys.stderr)
        return 2
    warnings.filterwarnings("ignore")
    with tempfile.TemporaryDirectory(prefix="equal_step_") as folder:
        model = SMOLLM2
        if TASKS[options.task].pocket:
            model = Path(folder) / "pocket"
            save_pocket(model)
        verdicts = []
        if "trl" in options.peers:
            for algorithm in options.algorithms:
                verdicts.append(against_trl(options.task, algorithm, model, Path(folder)))
        if "torchrl" in options.peers and "grpo" in options.algorithms:
            verdicts.append(against_torchrl(options.task, model, Path(folder)))
    if not all(verdicts):
        print("NOT EQUAL")
        return 1
    print("equal")
    return 0


if __name__ == "__main__":
    sys.exit(main())
