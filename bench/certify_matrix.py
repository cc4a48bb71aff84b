"""Time and peak memory of two certifications: every term at V=4, T=6, and `kl-comedy certify --matrix`.

    python bench/certify_matrix.py

Each part runs in its own process. The first enumerates every built-in term on one instance per regime and kind of
policy and compares its gradient with every target. The second runs the command.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time

BUDGET_S = 60.0
"""Seconds that each part may take on two cores; printed, and not enforced."""
VOCABULARY = 4
LENGTH = 6
PARAMETERS = 6
"""Shared parameters of a policy; the other kind has a parameter of its own per prefix and token."""
REGIMES = ("on_policy", "off_policy")


def enumerate_matrix() -> str:
    """Enumerate every term, on- and off-policy, with tabular and shared parameters. Exits if a claim is false."""
    from kl_comedy.kl import TARGETS, claimed_target
    from kl_comedy.kl.claims import all_terms
    from kl_comedy.kl.oracle import Instance, InstanceSettings, Tree, expected_gradient, target_gradient

    tree = Tree.build(vocabulary=VOCABULARY, length=LENGTH)
    terms = all_terms()
    for regime in REGIMES:
        for parameters in (None, PARAMETERS):
            setting = Instance.random(tree, InstanceSettings(regime=regime, seed=0, parameters=parameters))
            targets = {name: target_gradient(setting, name) for name in TARGETS}
            for term in terms:
                moments = expected_gradient(setting, [term])
                # Gradients are sums over all completions in float64: only rounding separates equal ones.
                targets_hit = [name for name, target_D in targets.items() if moments.relative_bias(target_D) < 1e-9]
                claimed = claimed_target(term, regime)
                expected = [] if claimed is None else [claimed]
                # Both ways: a claim that does not hold, and a target that nobody claims.
                if targets_hit != expected:
                    raise SystemExit(f"{term.label()} {regime}: claims {claimed} and hits {targets_hit}")
    count = len(terms) * len(REGIMES) * 2
    return f"matrix V={VOCABULARY} T={LENGTH}, {tree.completions} completions, {len(terms)} cells, {count} expectations"


def run_command() -> str:
    """Run `kl-comedy certify --matrix`: every term, three regimes, eight instances each."""
    import contextlib
    import io

    from kl_comedy.cli.main import app

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        app(["certify", "--matrix", "--format", "csv"], standalone_mode=False)
    certificates = len(printed.getvalue().splitlines()) - 1  # the first line has the names of the columns
    return f"certify --matrix, {certificates} certificates"


PARTS = {"matrix": enumerate_matrix, "command": run_command}


def run_part(part: str) -> None:
    """Run one part in this process and print its seconds, peak MiB and description, separated by tabs."""
    start = time.perf_counter()
    description = PARTS[part]()
    seconds = time.perf_counter() - start
    # ru_maxrss is in KiB on Linux, and the largest of the whole process: a part needs a process of its own.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{seconds:.1f}\t{peak:.0f}\t{description}")


def main() -> None:
    if len(sys.argv) == 2:
        run_part(sys.argv[1])
        return
    print(f"{'seconds':>8} {'peak MiB':>9}  what")
    slowest = 0.0
    for part in PARTS:
        completed = subprocess.run([sys.executable, __file__, part], capture_output=True, text=True)
        if completed.returncode != 0:
            raise SystemExit(f"{part} failed:\n{completed.stderr}")
        seconds, peak, description = completed.stdout.strip().splitlines()[-1].split("\t")
        slowest = max(slowest, float(seconds))
        print(f"{seconds:>8} {peak:>9}  {description}")
    print(f"the slower of the two took {slowest:.1f} s; the budget is {BUDGET_S:.0f} s on two cores")


if __name__ == "__main__":
    main()
