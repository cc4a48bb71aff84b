"""Plant one bug at a time and run the tests that must find it: ``make mutation`` or ``python tests/mutation.py``.

Each mutant is one replacement in one file of a copy of src/. A mutant survives when all of its test files pass; then
the suite has a hole. The table says which test failed first. Mutants are of the kind a maintainer makes: a wrong sign,
mask, bound, index or argument, an option that is ignored, state that goes stale.

    python tests/mutation.py                    all mutants
    python tests/mutation.py k3 resume          those whose name contains one of the words
    python tests/mutation.py --markdown FILE    also write the table; rows of mutants that are not run stay as they are
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "kl_comedy"
SURVIVED = "**survived**"


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
WEIGHTS = "tests/exact/test_weights_and_centring.py"
TRUST_REGIONS = "tests/integration/test_trust_regions.py"
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
        "running_sum(cost_BT.flip(-1)).flip(-1)",
        "running_sum(cost_BT)",
        CLAIMS,
    ),
    Mutant(
        "own credit takes all",
        "kl/surrogate.py",
        "cost_BT = cost_BT - step_BT",
        "pass",
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
        "return torch.where(batch.mask_BT, surrogate_BT, 0.0)",
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
    # exact divergences, top-k, weights of tokens, the batch as baseline
    Mutant(
        "Jensen-Shannon with the shares swapped",
        "kl/estimators.py",
        "(share * ref_V + (1 - share) * logp_V.exp() * from_mixture_V)",
        "((1 - share) * ref_V + share * logp_V.exp() * from_mixture_V)",
        LOGPROBS,
    ),
    Mutant(
        "gradient of Jensen-Shannon with the shares swapped",
        "models/head.py",
        ".mul_((1 - share) * mixture_grad_n[:, None])",
        ".mul_(share * mixture_grad_n[:, None])",
        LOGPROBS,
    ),
    Mutant(
        "sampled tail without its weight",
        "kl/estimators.py",
        "torch.where(inside_BT, 0.0, logp_BT - drawn_logp_BT)",
        "torch.where(inside_BT, 0.0, logp_BT)",
        "tests/exact/test_top_k.py",
    ),
    Mutant(
        "certainty in nats",
        "kl/estimators.py",
        "(logp_V.exp() * logp_V).sum(-1) / math.log(logp_V.shape[-1])",
        "(logp_V.exp() * logp_V).sum(-1)",
        WEIGHTS,
    ),
    Mutant(
        "certainty is differentiated",
        "kl/surrogate.py",
        "_wide(self.certainty_BT).detach()",
        "_wide(self.certainty_BT)",
        WEIGHTS,
    ),
    Mutant(
        "the batch's mean leaves out its own completion",
        "kl/surrogate.py",
        "return (sums_G2[:, :1] / sums_G2[:, 1:])[index_B].expand_as",
        "others_B2 = sums_G2[index_B] - sums_B2\n    return (others_B2[:, :1] / others_B2[:, 1:]).expand_as",
        WEIGHTS,
    ),
    # references
    Mutant(
        "a term reads the initial policy for the teacher",
        "training/loss.py",
        'self.references["initial" if term.reference == "sampler" else term.reference]',
        'self.references["initial"]',
        PATHS + " -k own_reference",
    ),
    Mutant(
        "a baseline reads the initial policy for the teacher",
        "training/loss.py",
        'reference_passes["initial" if name == "sampler" else name]',
        'reference_passes["initial"]',
        PATHS + " -k own_reference",
    ),
    Mutant(
        "the reference is never replaced by its KL",
        "models/reference.py",
        "(self._period is None or step % self._period) and not measured_kl > self._max_kl:",
        "self._period is None or step % self._period:",
        "tests/unit/test_models_reference.py",
    ),
    # beta
    Mutant(
        "a target of the KL to the initial policy",
        "training/module.py",
        'measured_kl(measured, term.reference, "sequence")',
        'measured_kl(measured, "initial", "sequence")',
        TRUST_REGIONS + " -k beta_aims",
    ),
    Mutant(
        "a cost with a beta below 0 is lost",
        "training/loss.py",
        "term.needs_update and betas[n] != 0",
        "term.needs_update and betas[n] > 0",
        PATHS + " -k enters_once",
    ),
    Mutant(
        "schedule one update late",
        "kl/beta.py",
        "self.value = self.spec.at(step)",
        "self.value = self.spec.at(step - 1)",
        "tests/integration/test_training.py -k beta_of_its_step",
    ),
    Mutant(
        "beta advances one update late",
        "training/module.py",
        "state.advance(step + 1, ",
        "state.advance(step, ",
        "tests/integration/test_training.py -k beta_of_its_step",
    ),
    Mutant(
        "controller goes the wrong way",
        "kl/beta.py",
        "measured_kl / self.target - 1.0",
        "1.0 - measured_kl / self.target",
        "tests/unit/test_kl_term.py",
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
    Mutant(
        "trust regions mask what comes back",
        "objective/policy_corrections.py",
        "return advantage_BT * delta_BT > 0",
        "return advantage_BT * delta_BT < 0",
        POLICY,
    ),
    Mutant(
        "prefix_budget counts what follows",
        "objective/policy_corrections.py",
        "_dropped(_before(_token_kl(delta_BT)) > budget",
        "_dropped(_before(_token_kl(delta_BT).flip(-1)).flip(-1) > budget",
        POLICY,
    ),
    # reduction
    Mutant(
        "truncated rows stay in the denominator",
        "objective/reduction.py",
        "counts_B / (counts_B * tokens_B).sum().clamp(min=1.0)",
        "counts_B / tokens_B.sum().clamp(min=1.0)",
        OBJECTIVE,
    ),
    Mutant(
        "sequence mean over the batch's tokens",
        "objective/reduction.py",
        "counts_B / tokens_B.clamp(min=1.0) / counts_B.sum().clamp(min=1.0)",
        "counts_B / tokens_B.sum() / counts_B.sum().clamp(min=1.0)",
        OBJECTIVE,
    ),
    # optimizer
    Mutant(
        "a step divided by the effective sample size",
        "training/module.py",
        '"sqrt": math.sqrt(share)}',
        '"sqrt": 1 / math.sqrt(share)}',
        TRUST_REGIONS + " -k effective_sample_size",
    ),
    Mutant(
        "learning rate one update late",
        "training/module.py",
        "lambda step: lr_factor(settings, step, steps)",
        "lambda step: lr_factor(settings, max(step - 1, 0), steps)",
        "tests/integration/test_training.py -k beta_of_its_step",
    ),
    Mutant(
        "clip_norm ignored",
        "training/module.py",
        'bound = self.config.optimizer.clip_norm or float("inf")',
        'bound = float("inf")',
        "tests/integration/test_training.py -k clipped_gradient",
    ),
    # preparation and loss
    Mutant(
        "beta twice",
        "training/loss.py",
        "betas[n] * parts[n].cost_BT",
        "betas[n] ** 2 * parts[n].cost_BT",
        PATHS + " tests/exact/test_oracle_in_training.py",
    ),
    Mutant(
        "beta missing in the loss",
        "training/loss.py",
        "beta * weighted_sum(surrogate_BT",
        "weighted_sum(surrogate_BT",
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
    # branches for a GPU
    Mutant(
        "the running sum of a GPU is a step short",
        "cuda.py",
        "while step < values.shape[-1]:",
        "while 2 * step < values.shape[-1]:",
        "tests/unit/test_cuda.py",
    ),
    Mutant(
        "completions forget their prompt's keys",
        "models/attention.py",
        "prompts.index_BT[prompt_of_C], own_index_CT], 1)",
        "prompts.index_BT[prompt_of_C] * 0, own_index_CT], 1)",
        "tests/unit/test_models_shared_prefix.py",
    ),
    # statistics
    Mutant(
        "paired by order",
        "statistics.py",
        "[left[key] - right[key] for key in left if key in right]",
        "[x - y for x, y in zip(left.values(), right.values())]",
        "tests/unit/test_statistics.py",
    ),
    # grid and arrays
    Mutant(
        "array boundary off by one",
        "slurm/scripts.py",
        "cell.index // profile.max_array * profile.max_array",
        "(cell.index - 1) // profile.max_array * profile.max_array",
        "tests/unit/test_sweep_status.py",
    ),
    # rewards and configs
    Mutant(
        "the first answer counts",
        "rewards/text.py",
        'text.rpartition("<answer>")',
        'text.partition("<answer>")',
        "tests/unit/test_rewards_battery.py tests/unit/test_rewards_text.py",
    ),
    Mutant(
        "a minimum is not allowed",
        "config/validate.py",
        'value < rules["minimum"]',
        'value <= rules["minimum"]',
        "tests/unit/test_config.py",
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
    # sweeps over several machines
    Mutant(
        "--finished-in takes any run for the cell's",
        "cli/sweep.py",
        "if cell.config_hash in hashes",
        "if hashes",
        "tests/integration/test_sweep_local.py -k finished_in",
    ),
    Mutant(
        "--append drops the rows of other runs",
        "tracking/export.py",
        'each[~each["run_id"].isin(ids)]',
        'each[each["run_id"].isin(ids)]',
        "tests/integration/test_results_export.py -k in_parts",
    ),
    # asynchronous sampling and several processes
    Mutant(
        "a group too old by one update is taken",
        "training/asynchronous.py",
        "version - group.oldest <= self.limits.max_steps:",
        "version - group.oldest <= self.limits.max_steps + 1:",
        "tests/unit/test_async_buffer.py",
    ),
    Mutant(
        "a batch is drawn one update too early",
        "training/asynchronous.py",
        "self._next_number * limits.updates - limits.max_steps",
        "self._next_number * limits.updates - limits.max_steps - 1",
        "tests/unit/test_async_buffer.py",
    ),
    Mutant(
        "engines never load newer weights",
        "training/sampling.py",
        "self.loaded = self.engines.load()",
        "self.loaded = self.version if self.loaded >= 0 else self.engines.load()",
        "tests/integration/test_asynchronous.py -k to_the_bit",
    ),
    Mutant(
        "the value head's gradient of one rank",
        "training/module.py",
        "sum_gradients(self.value_head.parameters(), self.ranks, divisor=self._loss_factor)",
        "pass",
        "tests/integration/test_matrix.py",
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


def update_table(file: Path, name: str, row: str) -> None:
    """Write the table in ``file`` with the new ``row`` of one mutant; rows of mutants that are gone are dropped."""
    lines = file.read_text().splitlines() if file.is_file() else []
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in lines} | {name: row}
    table = [rows[mutant.name] for mutant in MUTANTS if mutant.name in rows]
    killed = sum(SURVIVED not in line for line in table)
    count = f"{killed} of {len(table)} found, each in its last run."
    head = f"`python tests/mutation.py --markdown results/mutation/README.md`: {count}"
    title = ["# Planted bugs and the tests that find them", "", head, "", "<!-- unchecked: rerun -->", ""]
    file.write_text("\n".join([*title, "| bug | file | first test that fails |", "|---|---|---|", *table]) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only mutants whose name contains one of these")
    parser.add_argument("--check", action="store_true", help="only check that every mutant can be planted")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="mutants at a time")
    parser.add_argument("--markdown", type=Path, help="file for the table")
    options = parser.parse_args()
    chosen = [m for m in MUTANTS if not options.words or any(word in m.name for word in options.words)]
    if options.check:
        for mutant in chosen:
            with tempfile.TemporaryDirectory() as folder:
                (Path(folder) / mutant.file).parent.mkdir(parents=True, exist_ok=True)
                plant(mutant, Path(folder))
        return 0
    survivors = 0
    for mutant, failure in zip(chosen, ThreadPoolExecutor(options.jobs).map(first_failure, chosen), strict=True):
        survivors += failure is None
        row = f"| {mutant.name} | `{mutant.file}` | {f'`{failure}`' if failure else SURVIVED} |"
        print(row, flush=True)
        if options.markdown:
            update_table(options.markdown, mutant.name, row)
    print(f"{len(chosen) - survivors} of {len(chosen)} mutants found")
    return min(survivors, 1)


if __name__ == "__main__":
    sys.exit(main())
