"""Measure the released KL code of other systems with the exact oracle.

python bench/peers/run.py                          every system; writes results/peers/
python bench/peers/run.py --only verl:low_var_kl   one row (or one system), to stdout
python bench/peers/run.py --equal trl              equivalence of our terms only, as JSON

Each system runs in its own process, so that stubs are not shared.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parents[1]))
OUT = HERE.parents[2] / "results" / "peers"
COMMAND = "python bench/peers/run.py --only {}"


def run_system(system: str, *, name: str | None, measured: bool) -> dict[str, Any]:
    """The rows of one system, in this process."""
    from peers.adapters import adapter
    from peers.case import Skipped
    from peers.equivalence import bound, difference
    from peers.measure import REGIMES, measure

    warnings.filterwarnings("ignore")
    system_adapter = adapter(system)
    cases = [case for case in system_adapter.cases if name is None or case.name == name]
    if name is not None and not cases:
        raise SystemExit(
            f"--only: unknown case {name!r}; expected one of {', '.join(case.name for case in system_adapter.cases)}"
        )
    rows, skipped = [], [] if name else list(system_adapter.skipped)
    for case in cases:
        try:
            gap = difference(case)
            regimes = [(regime, measure(case, regime)) for regime in REGIMES] if measured else [("", {})]
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
            skipped.append(Skipped(system=system, version=case.version, what=case.name, reason=reason))
            continue
        equal = gap is not None and gap <= bound(case)
        rows += [
            {
                "system": case.system,
                "version": case.version,
                "name": case.name,
                "flags": case.flags,
                "kind": case.kind,
                "placement": case.placement,
                "regime": regime,
                **figures,
                "reduction": case.reduction,
                "beta": case.beta,
                "group_size": case.group_size,
                "note": case.note,
                "equal_to_ours": _label(case, regime) if equal else None,
                "difference": gap,
                "difference_allowed": bound(case),
                "function": f"{case.module}.{case.function}",
                **case.loaded(),
                "command": COMMAND.format(case.name),
            }
            for regime, figures in regimes
        ]
    return {"rows": rows, "skipped": [dict(item.__dict__) for item in skipped]}


def _label(case: Any, regime: str) -> str | None:
    """The label of our equivalent term, or None in a regime that was not compared."""
    if regime and regime not in case.equal_in:
        return None
    labels = " + ".join(term.label() for term in case.ours)
    if case.context is None:
        return labels
    context = case.context
    parts = [context.advantage, context.policy_loss, context.reduction]
    return f"{labels}, within {', '.join(part for part in parts if part not in ('none', 'sequence_sum'))}"


def run_in_subprocess(system: str, *, measured: bool = True) -> dict[str, Any]:
    """Call :func:`run_system` in a child process. If it fails, the system is skipped with its last error line."""
    option = "--only" if measured else "--equal"
    completed = subprocess.run(
        [sys.executable, str(HERE), option, system, "--json"], capture_output=True, text=True, check=False
    )
    json_lines = [line for line in completed.stdout.splitlines() if line.startswith('{"rows"')]
    if completed.returncode == 0 and json_lines:
        return json.loads(json_lines[-1])
    error_lines = completed.stderr.strip().splitlines() or ["no output"]
    return {"rows": [], "skipped": [{"system": system, "version": "", "what": "all of it", "reason": error_lines[-1]}]}


def main(arguments: list[str]) -> int:
    from peers.adapters import SYSTEMS
    from peers.report import write
    from peers.unavailable import unavailable

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="SYSTEM or SYSTEM:CASE", help="one system or one row")
    parser.add_argument("--equal", metavar="SYSTEM", help="compare derivatives with our terms only")
    parser.add_argument("--json", action="store_true", help="print JSON on one line")
    options = parser.parse_args(arguments)
    selection = options.only or options.equal
    if selection:
        system, _, rest = selection.partition(":")
        if system not in SYSTEMS:
            print(f"unknown system {system!r}; expected one of {', '.join(SYSTEMS)}", file=sys.stderr)
            return 2
        outcome = run_system(system, name=selection if rest else None, measured=options.equal is None)
        print(json.dumps(outcome) if options.json else json.dumps(outcome, indent=2))
        return 0
    rows: list[dict[str, Any]] = []
    skipped: list[dict[str, Any]] = []
    for system in SYSTEMS:
        outcome = run_in_subprocess(system)
        print(f"{system}: {len(outcome['rows'])} rows, {len(outcome['skipped'])} not run", file=sys.stderr, flush=True)
        rows += outcome["rows"]
        skipped += outcome["skipped"]
    write(OUT, rows, skipped + [dict(item.__dict__) for item in unavailable()])
    return 0 if rows else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
