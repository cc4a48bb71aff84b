"""One step with the same completions and rewards in ours and in a peer: losses and gradients must agree.

python bench/speed/equal_step.py [--task chain_sum|gsm8k|pocket] [--algorithms grpo rloo] [--peers trl torchrl]

The policy is the model plus a little noise, the same in both, so that the KL to the reference is not zero. Each
system computes reference log-probs, advantages, loss and gradient by its own code; the peer's sampler and reward
function are replaced by the completions and rewards given. For GRPO the step is taken twice: with each side's own
advantages (TRL adds 1e-4 to the standard deviation, ours 1e-6) and, to compare the losses alone, with TRL's in
both. RLOO's losses differ in value by construction, at the same gradient: TRL's is the advantage times a ratio
that is one on-policy, ours the advantage times the log-prob. TorchRL has GRPO alone; ours takes its KL term (k3 without
ratio) with the coefficient that its denominator amounts to.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path = [str(HERE.parent), *(p for p in sys.path if Path(p or ".").resolve() != HERE)]
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from speed.setup import PEERS, absent  # noqa: E402
from speed.steps import Step, our_step, perturb, sampled, torchrl_step, trl_step  # noqa: E402
from speed.variants import BETA, VARIANTS, Variant  # noqa: E402
from speed.workload import SMOLLM2, TASKS, missing, overrides, save_pocket  # noqa: E402

REFERENCE, ADVANTAGE, LOSS, NORM, GRADIENT = (
    "reference log-prob, nats",
    "advantage",
    "loss",
    "gradient norm",
    "gradient",
)
TOLERANCE = {REFERENCE: 1e-4, ADVANTAGE: 1e-5, LOSS: 1e-6, NORM: 1e-4, GRADIENT: 1e-4}
"""Absolute for the first three, relative for the norm and for the norm of the difference of the gradients."""

CLAMPED = {**TOLERANCE, ADVANTAGE: 1e-4}
"""Where one side adds 1e-6 to the standard deviation and the other keeps it from falling below: TorchRL."""

LOOSE = {**TOLERANCE, ADVANTAGE: 2e-3, LOSS: 1e-4, NORM: 2e-3, GRADIENT: 2e-3}
"""Where the two constants added to a standard deviation are part of the comparison."""


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


def against_trl(task: str, algorithm: str, model: Path, folder: Path) -> bool:
    """Both sides of one algorithm; whether they agree."""
    from speed import trl_side

    other = VARIANTS[f"trl-{algorithm}-whole"]
    module, data = built(task, VARIANTS[f"ours-{algorithm}-default"], model, folder)
    trainer = trl_side.build(task, other, model=model, updates=1, seed=0, output=folder)
    for policy in (module.policy, trainer.model):
        perturb(policy, seed=1)
    rows = sampled(data)
    theirs = trl_step(trainer, rows, grpo=algorithm == "grpo")
    ours = our_step(module, rows)
    if algorithm == "rloo":
        data.close()
        return show("TRL, rloo", ours, theirs, {name: bound for name, bound in TOLERANCE.items() if name != LOSS})
    own = show("TRL, grpo, own advantages", ours, theirs, LOOSE)
    given = dataclasses.replace(our_step(module, rows, advantage_B=theirs.advantage_B), advantage_B=theirs.advantage_B)
    data.close()
    return show("TRL, grpo, TRL's advantages", given, theirs, TOLERANCE) and own


def against_torchrl(task: str, model: Path, folder: Path) -> bool:
    """GRPO with TorchRL's KL term in ours: k3 without ratio, our coefficient scaled to its denominator."""
    from speed import torchrl_side

    k3 = f"[{{estimator: k3, placement: loss, correction: none, beta: {BETA['grpo']}}}]"
    mine = dataclasses.replace(VARIANTS["ours-grpo-default"], options={"kl": k3})
    module, data = built(task, mine, model, folder)
    system = torchrl_side.build(task, VARIANTS["torchrl-grpo-default"], model=model, updates=1, seed=0, output=folder)
    for policy in (module.policy, system.policy):
        perturb(policy, seed=1)
    rows = sampled(data)
    theirs, scale = torchrl_step(system, rows)
    ours = our_step(module, rows, beta_scale=scale)
    data.close()
    print(f"TorchRL's KL term is divided by padded positions: {scale:.3f} of the coefficient over completion tokens")
    return show("TorchRL, grpo", ours, theirs, CLAMPED)


def built(task: str, variant: Variant, model: Path, folder: Path) -> Any:
    """Our module (model, reference) and data (prompts, sampler)."""
    from kl_comedy.config import load_config
    from kl_comedy.training.experience_module import build_in_process

    return build_in_process(load_config(None, overrides(task, variant, model=model, updates=1, seed=0, output=folder)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=TASKS, default="chain_sum")
    parser.add_argument("--algorithms", nargs="+", choices=("grpo", "rloo"), default=["grpo", "rloo"])
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    given = parser.parse_args()
    why = [line for line in (missing(given.task),) if line]
    why += [f"{peer} is not there; python bench/speed/setup.py fetches it" for peer in given.peers if absent(peer)]
    if why:
        print("\n".join(why), file=sys.stderr)
        return 2
    warnings.filterwarnings("ignore")
    with tempfile.TemporaryDirectory(prefix="equal_step_") as folder:
        model = SMOLLM2
        if TASKS[given.task].pocket:
            model = Path(folder) / "pocket"
            save_pocket(model)
        agreed = []
        if "trl" in given.peers:
            agreed += [against_trl(given.task, algorithm, model, Path(folder)) for algorithm in given.algorithms]
        if "torchrl" in given.peers and "grpo" in given.algorithms:
            agreed.append(against_torchrl(given.task, model, Path(folder)))
    print("equal" if all(agreed) else "NOT EQUAL")
    return 0 if all(agreed) else 1


if __name__ == "__main__":
    sys.exit(main())
