"""Plant one bug at a time and run the tests that must find it: ``make mutation`` or ``python tests/mutation.py``.

Each mutant is one replacement in one file of a copy of src/. A mutant survives when all of its test files pass; then
the suite has a hole. The table says which test failed first. Mutants are of the kind a maintainer makes: a wrong sign,
mask, bound, index or argument, an option that is ignored, state that goes stale.

    python tests/mutation.py                    all mutants
    python tests/mutation.py k3 resume          those whose name contains one of the words
    python tests/mutation.py --markdown FILE    also write the table
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "kl_comedy"


@dataclass(frozen=True)
class Mutant:
    """``old`` occurs once in ``file`` (below src/kl_comedy) and becomes ``new``; one of ``tests`` must fail."""

    name: str
    file: str
    old: str
    new: str
    tests: str


CLAIMS = "tests/exact/test_claims.py"
OBJECTIVE = "tests/unit/test_objective.py"
POLICY = "tests/unit/test_policy_term.py tests/exact/test_policy_certificates.py tests/unit/test_objective.py"
PATHS = "tests/unit/test_loss_paths.py"
LOGPROBS = "tests/unit/test_models_logprobs.py"
MUTANTS = (
    # estimators
    Mutant("k2 without the half", "kl/estimators.py", "0.5 * log_ratio.square()", "log_ratio.square()", CLAIMS),
    Mutant(
        "k3 with the wrong sign",
        "kl/estimators.py",
        "torch.expm1(-log_ratio) + log_ratio",
        "torch.expm1(log_ratio) - log_ratio",
        CLAIMS,
    ),
    Mutant(
        "k_lambda with 1 - lam",
        "kl/estimators.py",
        "lam * torch.expm1(-log_ratio)",
        "(1 - lam) * torch.expm1(-log_ratio)",
        CLAIMS,
    ),
    Mutant("abs of nothing", "kl/estimators.py", "return log_ratio.abs()", "return log_ratio", CLAIMS),
    # placements
    Mutant(
        "to_go from the wrong end",
        "kl/surrogate.py",
        "cost_BT.flip(-1).cumsum(-1).flip(-1)",
        "cost_BT.cumsum(-1)",
        CLAIMS,
    ),
    Mutant(
        "own credit takes all",
        "kl/surrogate.py",
        "cost_BT = credit_costs(step_BT, credit) - step_BT",
        "cost_BT = credit_costs(step_BT, credit)",
        CLAIMS,
    ),
    Mutant(
        "reward cost not detached",
        "kl/surrogate.py",
        "value_BT, ratio_BT = value_BT.detach(), ratio_BT.detach()",
        "ratio_BT = ratio_BT.detach()",
        CLAIMS,
    ),
    Mutant(
        "loss without its ratio", "kl/surrogate.py", "pathwise_BT=ratio_BT * value_BT)", "pathwise_BT=value_BT)", CLAIMS
    ),
    Mutant(
        "surrogate outside the mask",
        "kl/surrogate.py",
        "return torch.where(mask_BT, surrogate_BT, torch.zeros_like(surrogate_BT))",
        "return surrogate_BT",
        PATHS + " tests/unit/test_kl_term.py",
    ),
    # corrections
    Mutant(
        "prefix shifted by one",
        "kl/corrections.py",
        "return _running_sum(_shifted(delta_BT, 1), window).exp()",
        "return _running_sum(delta_BT, window).exp()",
        CLAIMS,
    ),
    Mutant(
        "window ignored",
        "kl/corrections.py",
        "return total_BT if window is None else total_BT - _shifted(total_BT, window)",
        "return total_BT",
        "tests/unit/test_kl_term.py",
    ),
    Mutant(
        "mask keeps what exceeds the cap",
        "kl/corrections.py",
        "torch.where(ratio_BT <= cap",
        "torch.where(ratio_BT > cap",
        "tests/unit/test_kl_term.py",
    ),
    Mutant(
        "sequence ratio without one token",
        "kl/corrections.py",
        "delta_BT.sum(-1, keepdim=True).exp()",
        "delta_BT[..., 1:].sum(-1, keepdim=True).exp()",
        CLAIMS,
    ),
    # beta
    Mutant(
        "schedule one update late",
        "kl/beta.py",
        "self.value = self.spec.at(step)",
        "self.value = self.spec.at(step - 1)",
        "tests/integration/test_beta_schedule.py",
    ),
    Mutant(
        "controller goes the wrong way",
        "kl/beta.py",
        "measured_kl / self.target - 1.0",
        "1.0 - measured_kl / self.target",
        "tests/unit -k beta",
    ),
    # baselines and advantages
    Mutant(
        "leave-one-out with itself",
        "objective/advantages.py",
        "(sums_BT - returns_BT) / (size_B1 - 1)",
        "sums_BT / size_B1",
        OBJECTIVE,
    ),
    Mutant(
        "population standard deviation",
        "objective/advantages.py",
        "(squares_BT / (size_B1 - 1)).sqrt()",
        "(squares_BT / size_B1).sqrt()",
        OBJECTIVE,
    ),
    Mutant(
        "gae forgets lambda",
        "objective/advantages.py",
        "running_B = delta_BT[:, t] + gamma * lam * running_B",
        "running_B = delta_BT[:, t] + gamma * running_B",
        "tests/unit/test_gae.py",
    ),
    Mutant(
        "own baseline from its own completion",
        "kl/surrogate.py",
        "return sums_GT[index_B] - values_BT",
        "return sums_GT[index_B]",
        "tests/exact/test_own_baseline.py",
    ),
    # policy losses, clipping, corrections of the policy term
    Mutant(
        "clip bounds swapped",
        "objective/policy_losses.py",
        "bounded_BT = ratio_BT.clamp(1.0 - clip_low, 1.0 + clip_high)",
        "bounded_BT = ratio_BT.clamp(1.0 - clip_high, 1.0 + clip_low)",
        OBJECTIVE,
    ),
    Mutant(
        "maximum instead of minimum",
        "objective/policy_losses.py",
        "-torch.minimum(ratio_BT * advantage_BT",
        "-torch.maximum(ratio_BT * advantage_BT",
        POLICY,
    ),
    Mutant(
        "truncation ignored",
        "objective/policy_corrections.py",
        "torch.where(beyond_BT, torch.full_like(log_BT, cap), log_BT.exp())",
        "log_BT.exp()",
        POLICY,
    ),
    Mutant(
        "opsm masks the good ones",
        "objective/policy_corrections.py",
        "(sequence_mean(advantage_BT, mask_BT) < 0)",
        "(sequence_mean(advantage_BT, mask_BT) > 0)",
        POLICY,
    ),
    # reduction
    Mutant(
        "truncated rows stay in the denominator",
        "objective/reduction.py",
        "kept_B / (kept_B * tokens_B).sum().clamp(min=1.0)",
        "kept_B / tokens_B.sum().clamp(min=1.0)",
        OBJECTIVE,
    ),
    Mutant(
        "sequence mean over the batch's tokens",
        "objective/reduction.py",
        "kept_B / tokens_B.clamp(min=1.0) / kept_B.sum().clamp(min=1.0)",
        "kept_B / tokens_B.sum() / kept_B.sum().clamp(min=1.0)",
        OBJECTIVE,
    ),
    # preparation and loss
    Mutant(
        "beta twice",
        "training/prepare.py",
        "betas[position] * cost.cost_BT",
        "betas[position] ** 2 * cost.cost_BT",
        PATHS + " tests/exact/test_oracle_in_training.py",
    ),
    Mutant(
        "beta missing in the loss",
        "training/loss.py",
        "beta * _weighted(surrogate_BT",
        "_weighted(surrogate_BT",
        PATHS + " tests/exact/test_oracle_in_training.py",
    ),
    Mutant(
        "cost added to the reward",
        "objective/reduction.py",
        "returns_BT - cost_BT",
        "returns_BT + cost_BT",
        OBJECTIVE + " tests/exact/test_oracle_in_training.py",
    ),
    # chunked head
    Mutant(
        "temperature missing in the head's backward",
        "models/head.py",
        "return grad_nV if plan.temperature == 1 else grad_nV.div_(plan.temperature)",
        "return grad_nV",
        LOGPROBS,
    ),
    Mutant(
        "head backward skips the exact KL's mean",
        "models/head.py",
        "share_n = share_n - kl_grad_n * kl_n",
        "share_n = share_n",
        LOGPROBS,
    ),
    Mutant(
        "forward KL with the wrong sign",
        "models/head.py",
        "grad_nV -= logq_nV.exp().mul_(forward_grad_n[:, None])",
        "grad_nV += logq_nV.exp().mul_(forward_grad_n[:, None])",
        LOGPROBS,
    ),
    Mutant(
        "temperature missing in the logits",
        "models/head.py",
        "(logits_nV if temperature == 1 else logits_nV.div_(temperature)).log_softmax(-1)",
        "logits_nV.log_softmax(-1)",
        LOGPROBS,
    ),
    # grid and arrays
    Mutant(
        "array boundary off by one",
        "slurm/render.py",
        "cell.index // profile.max_array * profile.max_array",
        "(cell.index - 1) // profile.max_array * profile.max_array",
        "tests/unit/test_sweep_manifest.py tests/unit/test_sweep_arrays.py",
    ),
    Mutant(
        "exclusion by any key",
        "slurm/grid.py",
        "            return False\n    return True",
        "            continue\n    return True",
        "tests/unit/test_sweep_grid.py",
    ),
    Mutant(
        "logarithmic range made linear",
        "slurm/grid.py",
        "first ** (1 - share) * last**share",
        "first * (1 - share) + last * share",
        "tests/unit/test_sweep_grid.py",
    ),
)


def plant(mutant: Mutant, copy: Path) -> None:
    """Write the mutated file into ``copy`` of the package. Raises ValueError where ``old`` does not occur once."""
    text = (SRC / mutant.file).read_text()
    if text.count(mutant.old) != 1:
        raise ValueError(f"{mutant.name}: {mutant.old!r} occurs {text.count(mutant.old)} times in {mutant.file}")
    (copy / mutant.file).write_text(text.replace(mutant.old, mutant.new))


def first_failure(mutant: Mutant) -> str | None:
    """The first test that fails with ``mutant`` planted; None where it survives."""
    with tempfile.TemporaryDirectory(prefix="kl_comedy_mutant_") as folder:
        copy = Path(folder) / "kl_comedy"
        shutil.copytree(SRC, copy, ignore=shutil.ignore_patterns("__pycache__"))
        plant(mutant, copy)
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not slow and not gpu"]
        words = mutant.tests.split()
        environment = {**os.environ, "PYTHONPATH": folder, "OMP_NUM_THREADS": "1"}
        done = subprocess.run([*command, *words], cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode == 0:
        return None
    if done.returncode != 1:
        raise RuntimeError(f"{mutant.name}: pytest ended with {done.returncode}\n{done.stdout[-1000:]}{done.stderr}")
    match = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, flags=re.MULTILINE)
    return match[1] if match else "(a test)"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only mutants whose name contains one of these")
    parser.add_argument("--check", action="store_true", help="only check that every mutant can be planted")
    parser.add_argument("--markdown", type=Path, help="file for the table")
    options = parser.parse_args()
    chosen = [m for m in MUTANTS if not options.words or any(word in m.name for word in options.words)]
    lines = ["| mutant | file | first test that fails |", "|---|---|---|"]
    survivors = 0
    for mutant in chosen:
        if options.check:
            with tempfile.TemporaryDirectory() as folder:
                (Path(folder) / mutant.file).parent.mkdir(parents=True)
                plant(mutant, Path(folder))
            continue
        failure = first_failure(mutant)
        survivors += failure is None
        lines.append(f"| {mutant.name} | `{mutant.file}` | {f'`{failure}`' if failure else '**survived**'} |")
        print(lines[-1], flush=True)
    if options.markdown and not options.check:
        options.markdown.write_text(
            "\n".join([*lines, "", f"{len(chosen) - survivors} of {len(chosen)} found."]) + "\n"
        )
    if not options.check:
        print(f"{len(chosen) - survivors} of {len(chosen)} mutants found")
    return min(survivors, 1)


if __name__ == "__main__":
    sys.exit(main())
