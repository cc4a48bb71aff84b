"""Run the peers' released KL code through the exact oracle.

python bench/peers/run.py                          every system, into results/peers/
python bench/peers/run.py --only verl:low_var_kl   one row (or one system), to the screen
python bench/peers/run.py --equal trl              our terms against theirs, as JSON lines

Each system runs in a process of its own, so that stand-ins of one are never seen by another.
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


def one_system(system: str, *, name: str | None, measured: bool) -> dict[str, Any]:
    """The rows of one system, in this process."""
    from peers.adapters import adapter
    from peers.case import Skipped
    from peers.equivalence import bound, difference
    from peers.measure import REGIMES, measure

    warnings.filterwarnings("ignore")
    found = adapter(system)
    cases = [case for case in found.cases if name is None or case.name == name]
    if name is not None and not cases:
        raise SystemExit(f"--only: no case {name!r}; there are {', '.join(case.name for case in found.cases)}")
    rows, skipped = [], [] if name else list(found.skipped)
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
    """Our name for it, in a regime where it was compared."""
    if regime and regime not in case.equal_in:
        return None
    words = " + ".join(term.label() for term in case.ours)
    if case.around is None:
        return words
    around = case.around
    inside = [around.advantage, around.policy_loss, around.reduction]
    return f"{words}, within {', '.join(word for word in inside if word not in ('none', 'sequence_sum'))}"


def in_a_process(system: str, *, measured: bool = True) -> dict[str, Any]:
    """The same in a process of its own; one that dies is a skipped system with its last line."""
    how = "--only" if measured else "--equal"
    done = subprocess.run(
        [sys.executable, str(HERE), how, system, "--json"], capture_output=True, text=True, check=False
    )
    marked = [line for line in done.stdout.splitlines() if line.startswith('{"rows"')]
    if done.returncode == 0 and marked:
        return json.loads(marked[-1])
    lines = done.stderr.strip().splitlines() or ["it gave no output"]
    return {"rows": [], "skipped": [{"system": system, "version": "", "what": "all of it", "reason": lines[-1]}]}


def main(arguments: list[str]) -> int:
    from peers.adapters import SYSTEMS
    from peers.report import write
    from peers.unavailable import unavailable

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="SYSTEM or SYSTEM:CASE", help="one system or one row")
    parser.add_argument("--equal", metavar="SYSTEM", help="only compare our terms with theirs")
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of readable rows")
    given = parser.parse_args(arguments)
    wanted = given.only or given.equal
    if wanted:
        system, _, rest = wanted.partition(":")
        if system not in SYSTEMS:
            print(f"no system {system!r}; there are {', '.join(SYSTEMS)}", file=sys.stderr)
            return 2
        found = one_system(system, name=wanted if rest else None, measured=given.equal is None)
        print(json.dumps(found) if given.json else json.dumps(found, indent=2))
        return 0
    rows: list[dict[str, Any]] = []
    skipped: list[dict[str, Any]] = []
    for system in SYSTEMS:
        found = in_a_process(system)
        print(f"{system}: {len(found['rows'])} rows, {len(found['skipped'])} not run", file=sys.stderr, flush=True)
        rows += found["rows"]
        skipped += found["skipped"]
    write(OUT, rows, skipped + [dict(item.__dict__) for item in unavailable()])
    return 0 if rows else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
