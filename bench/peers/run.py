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
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peers.case import Case

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parents[1]))
OUT = HERE.parents[2] / "results" / "peers"
COMMAND = "python bench/peers/run.py --only {}"


def run_system(system: str, *, name: str | None, measured: bool) -> dict[str, Any]:
    """The rows of one system, in this process: of all its cases, or of the one called ``name``.

    Without ``measured`` there is one row per case, which says only whether kl_comedy's terms are equal.
    """
    from peers.adapters import adapter
    from peers.case import Skipped
    from peers.equivalence import bound, difference
    from peers.measure import REGIMES, measure

    # Of the peers' libraries, about their own versions.
    warnings.filterwarnings("ignore")
    system_adapter = adapter(system)
    cases = [case for case in system_adapter.cases if name is None or case.name == name]
    if name is not None and not cases:
        names = ", ".join(case.name for case in system_adapter.cases)
        raise SystemExit(f"--only: unknown case {name!r}; expected one of {names}")
    rows = []
    skipped: list[Skipped] = []
    if name is None:
        skipped += system_adapter.skipped
    for case in cases:
        figures: dict[str, dict[str, Any]] = {"": {}}
        try:
            gap = difference(case)
            if measured:
                figures = {regime: measure(case, regime) for regime in REGIMES}
        except Exception as error:
            # A peer's code may fail in ways of its own; the other cases are still measured.
            skipped.append(Skipped(system=system, version=case.version, what=case.name, reason=_first_line(error)))
            continue
        for regime, figures_of_regime in figures.items():
            rows.append(_row(case, regime, figures_of_regime, gap, bound(case)))
    return {"rows": rows, "skipped": [dict(item.__dict__) for item in skipped]}


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    message = lines[0] if lines else "no message"
    return f"{type(error).__name__}: {message}"


def _row(case: Case, regime: str, figures: dict[str, Any], gap: float | None, allowed: float) -> dict[str, Any]:
    """One row of the results; the keys are those of the stored files."""
    equal = gap is not None and gap <= allowed
    return {
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
        "difference_allowed": allowed,
        "function": f"{case.module}.{case.function}",
        **case.loaded(),
        "command": COMMAND.format(case.name),
    }


def _label(case: Case, regime: str) -> str | None:
    """The label of our equivalent terms, or None without terms or in a regime that was not compared."""
    if case.ours is None:
        return None
    if regime and regime not in case.equal_in:
        return None
    labels = " + ".join(term.label() for term in case.ours)
    if case.context is None:
        return labels
    settings = [case.context.advantage, case.context.policy_loss, case.context.reduction]
    not_neutral = [setting for setting in settings if setting not in ("none", "sequence_sum")]
    return f"{labels}, within {', '.join(not_neutral)}"


def run_in_subprocess(system: str, *, measured: bool = True) -> dict[str, Any]:
    """Call :func:`run_system` in a child process. If it fails, the system is skipped with its last error line."""
    option = "--only" if measured else "--equal"
    command = [sys.executable, str(HERE), option, system, "--json"]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    # Peers print on import.
    json_lines = [line for line in completed.stdout.splitlines() if line.startswith('{"rows"')]
    if completed.returncode == 0 and json_lines:
        outcome: dict[str, Any] = json.loads(json_lines[-1])
        return outcome
    error_lines = completed.stderr.strip().splitlines()
    reason = error_lines[-1] if error_lines else "no output"
    return {"rows": [], "skipped": [{"system": system, "version": "", "what": "all of it", "reason": reason}]}


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
        system, _, case_name = selection.partition(":")
        if system not in SYSTEMS:
            print(f"unknown system {system!r}; expected one of {', '.join(SYSTEMS)}", file=sys.stderr)
            return 2
        name = selection if case_name else None
        outcome = run_system(system, name=name, measured=options.equal is None)
        print(json.dumps(outcome, indent=None if options.json else 2))
        return 0
    rows: list[dict[str, Any]] = []
    skipped: list[dict[str, Any]] = []
    for system in SYSTEMS:
        outcome = run_in_subprocess(system)
        print(f"{system}: {len(outcome['rows'])} rows, {len(outcome['skipped'])} not run", file=sys.stderr, flush=True)
        rows += outcome["rows"]
        skipped += outcome["skipped"]
    write(OUT, rows, skipped + [dict(item.__dict__) for item in unavailable()])
    # A system that cannot be run is listed with its reason; no row at all means that no wheel was fetched.
    return 0 if rows else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
