"""Rebuild the register of KL code, or say what changed since.

python bench/register/run.py --sources DIR    run every row; writes results/register/
python bench/register/run.py --changes        run every row; says what differs from the stored rows, writes nothing
python bench/register/run.py --newest --changes --sources DIR
                                              the same with the newest commit of every clone in place of the pinned one
python bench/register/run.py --only rlinf     the rows whose id begins so, to stdout; with --store, into the register

DIR holds clones (DIR/OWNER/NAME). Wheels are those of bench/peers/fetch.py. A row whose source is not there keeps its
stored result, and says 'not rebuilt' and since when. A new row without its source is made by our re-implementation, and
marked so.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import math
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parents[1]))
ROWS = HERE.parent / "rows.yaml"
OUT = HERE.parents[2] / "results" / "register"
COMMAND = "python bench/register/run.py --sources DIR"
RELEASED = "released code"
OURS = "re-implementation"
NOT_REBUILT = "not rebuilt"
TEXTS = ("fix", "issue", "because", "threads", "withdrawn", "note", "called_at", "form", "form_fixed", "hand")
"""Fields of a row on which no figure depends."""
DIGITS = 4
"""Of stored figures: more would differ between machines."""
LARGEST_ROUNDING = 1e-6
"""Figures below are rounding errors, and stored as 0."""


def rows_of(path: Path = ROWS) -> list[dict[str, Any]]:
    """The rows as they are written."""
    import yaml

    rows: list[dict[str, Any]] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return rows


def wheel_of(row: Mapping[str, Any]) -> str:
    """The system of bench/peers whose case the row is; empty for a row of another source."""
    return str(row.get("case", "")).partition(":")[0]


def built(row: Mapping[str, Any], sources: Path | None) -> dict[str, Any]:
    """One row with its figures, in this process.

    A row whose source is missing is made by our re-implementation; one that has none either has no figures.
    """
    from register.sources import SourceMissing

    entry = _entry(row)
    try:
        if "case" in row:
            return entry | _from_wheel(row)
        if "repository" in row:
            return entry | _from_source(row, sources)
        return entry | _from_formula(row, "no release with this form in torch")
    except (SourceMissing, FileNotFoundError) as error:
        entry["version"] = _version(row)
        entry["not_rebuilt"] = str(error)
        if not row.get("ours"):
            return entry | {"made_by": NOT_REBUILT, "rebuilt": ""}
        return _from_formula(row, str(error)) | entry


def _entry(row: Mapping[str, Any]) -> dict[str, Any]:
    """What a stored row has of its entry in rows.yaml. ``not_rebuilt``: why the source was not run this time."""
    entry = {"id": row["id"], "system": row["system"], "flags": row["flags"], "intended": row["intended"]}
    entry |= {name: row.get(name, "") for name in ("call", "ours", "fixed", *TEXTS)}
    return entry | {"rebuilt": datetime.date.today().isoformat(), "not_rebuilt": ""}


def _from_wheel(row: Mapping[str, Any]) -> dict[str, Any]:
    from peers.adapters import adapter

    system = adapter(wheel_of(row))
    case = next(case for case in system.cases if case.name == row["case"])
    figures = _figures(case.loss, row, group_size=case.group_size)
    provenance = case.loaded()
    return {
        "version": case.version,
        "made_by": RELEASED,
        "kind": "wheel",
        "function": f"{case.module}.{case.function}",
        "source": provenance["wheel"],
        "sha256": provenance["wheel_sha256"],
        "command": f"python bench/peers/run.py --only {case.name}",
        **figures,
        **_fixed(row, None),
    }


def _from_source(row: Mapping[str, Any], sources: Path | None) -> dict[str, Any]:
    from register.sources import Code, Source, SourceMissing, sha256_text

    source = Source(
        repository=row["repository"],
        commit=row["commit"],
        path=row["path"],
        objects=tuple(row.get("objects", ())),
        within=row.get("within", ""),
        statements=tuple(row.get("statements", ())),
    )
    if sources is None:
        raise SourceMissing("no --sources given")
    text = source.text(sources)
    code = Code(text, source)
    names = ", ".join(source.objects or source.statements)
    function = names
    if source.within:
        function = f"{source.within}: {names}"
    return {
        "version": _commit_of(row),
        "made_by": RELEASED,
        "kind": "source",
        "function": function,
        "source": f"{source.repository}@{source.commit}:{source.path}",
        "sha256": sha256_text(text),
        "command": f"{COMMAND} --only {row['id']}",
        **_figures(_loss(row["call"], code), row),
        **_fixed(row, code),
    }


def _from_formula(row: Mapping[str, Any], why: str) -> dict[str, Any]:
    return {
        "version": str(row.get("version", "")),
        "made_by": OURS,
        "kind": "formula",
        "function": row["ours"],
        "source": "",
        "sha256": "",
        "command": f"{COMMAND} --only {row['id']}",
        "why": why,
        **_figures(_loss(row["ours"], None), row),
        **_fixed(row, None),
    }


def _version(row: Mapping[str, Any]) -> str:
    """The version of a row that is not run: that of its wheel's pin, its commit, or what it says."""
    if "case" in row:
        from peers.adapters import adapter

        return adapter(wheel_of(row)).version
    return _commit_of(row) or str(row.get("version", ""))


def _commit_of(row: Mapping[str, Any]) -> str:
    if "commit" not in row:
        return ""
    return f"{row['commit'][:7]} ({row['dated']})"


def _loss(expression: str, code: Any) -> Any:
    """The loss over rows that an expression of rows.yaml writes."""
    from register.calls import HELPERS
    from register.measure import loss_of

    compiled = compile(expression, "<rows.yaml>", "eval")

    def call(given: dict[str, Any]) -> Any:
        names = {**HELPERS, **given, "options": SimpleNamespace, "code": code}
        if code is not None:
            names |= {"run": code.run, **code.names, **given}
        # The expressions are this repository's own.
        return eval(compiled, names)

    return loss_of(call)


def _fixed(row: Mapping[str, Any], code: Any) -> dict[str, Any]:
    """What the row's fix optimizes; nothing for a row without a fix that can be run."""
    from register.measure import FRESH, STALE, holes, verdict

    # A fix that calls the released functions cannot be run without them.
    lacks_code = code is None and "repository" in row
    if not row.get("fixed") or lacks_code:
        return {"fixed_fresh": None, "fixed_stale": None, "fixed_holes": None}
    loss = _loss(row["fixed"], code)
    fresh = verdict(loss, FRESH, intended=row["intended"])
    stale = verdict(loss, STALE, intended=row["intended"])
    fixed_stale = _rounded(dataclasses.asdict(stale))
    with_holes = holes(loss, intended=row["intended"])
    return {
        "fixed_fresh": _rounded(dataclasses.asdict(fresh)),
        "fixed_stale": fixed_stale | _kind(loss, fixed_stale),
        "fixed_holes": _rounded(dataclasses.asdict(with_holes)),
    }


def _figures(loss: Any, row: Mapping[str, Any], *, group_size: int = 1) -> dict[str, Any]:
    """What a loss optimizes with fresh and with stale samples, and what holes do to it.

    A row with ``holes: false`` is not tried: its trainer gets completions without masked tokens.
    """
    from register.measure import FRESH, STALE, holes, verdict

    figures: dict[str, Any] = {}
    for name, regime in (("fresh", FRESH), ("stale", STALE)):
        outcome = verdict(loss, regime, intended=row["intended"], group_size=group_size)
        figures[name] = _rounded(dataclasses.asdict(outcome))
    figures["stale"] |= _kind(loss, figures["stale"], group_size)
    figures["holes"] = None
    if row.get("holes", True):
        with_holes = holes(loss, intended=row["intended"], group_size=group_size)
        figures["holes"] = _rounded(dataclasses.asdict(with_holes))
    return figures


def _kind(loss: Any, figures: Mapping[str, Any], group_size: int = 1) -> dict[str, str]:
    """The kind of a loss that hits no objective on stale samples; empty where it hits one, or is not decided."""
    from register.kind import kind
    from register.measure import NONE

    if figures["target"] != NONE:
        return {}
    name = kind(loss, group_size=group_size)
    if name is None:
        return {}
    return {"kind": name}


def _rounded(figures: dict[str, Any]) -> dict[str, Any]:
    """Figures as they are stored: with :data:`DIGITS` digits, and None for a number that is not finite."""
    rounded = {}
    for name, value in figures.items():
        if isinstance(value, float):
            value = _rounded_number(value)
        rounded[name] = value
    return rounded


def _rounded_number(value: float) -> float | None:
    # JSON has no NaN.
    if not math.isfinite(value):
        return None
    if abs(value) < LARGEST_ROUNDING:
        return 0.0
    return float(f"{value:.{DIGITS}g}")


def at_newest(row: Mapping[str, Any], sources: Path | None) -> Mapping[str, Any]:
    """A row of a repository with the newest commit of its clone; others, and those without a clone, as they are."""
    from register.sources import SourceMissing, newest

    if sources is None or "repository" not in row:
        return row
    try:
        commit, date = newest(sources, row["repository"])
    except SourceMissing:
        return row
    return {**row, "commit": commit, "dated": date}


def run_rows(rows: Sequence[Mapping[str, Any]], sources: Path | None) -> list[dict[str, Any]]:
    """The rows, in this process; a row whose code fails says why."""
    warnings.filterwarnings("ignore")
    outcome = []
    for row in rows:
        try:
            outcome.append(built(row, sources))
        except Exception as error:
            first_line = str(error).partition("\n")[0]
            outcome.append(failed(row, f"{type(error).__name__}: {first_line or 'no message'}"))
    return outcome


def failed(row: Mapping[str, Any], why: str) -> dict[str, Any]:
    """A row whose code could not be run."""
    # Not _version, which imports the adapter that may have failed.
    version = _commit_of(row) or str(row.get("version", ""))
    return {**_entry(row), "version": version, "made_by": NOT_REBUILT, "rebuilt": "", "not_rebuilt": why}


def run_all(sources: Path | None, *, use_newest: bool = False) -> list[dict[str, Any]]:
    """Every row in the order of rows.yaml; the rows of one wheel in a process of their own."""
    rows = rows_of()
    groups: dict[str, list[str]] = {}
    for row in rows:
        groups.setdefault(wheel_of(row), []).append(row["id"])
    rebuilt: dict[str, dict[str, Any]] = {}
    for system, ids in groups.items():
        command = [sys.executable, str(HERE), "--json", "--only", *ids]
        if sources is not None:
            command += ["--sources", str(sources)]
        if use_newest:
            command.append("--newest")
        # The stand-ins of one wheel would hide packages that another one needs.
        completed = subprocess.run(command, capture_output=True, text=True, check=False)
        json_lines = [line for line in completed.stdout.splitlines() if line.startswith("[{")]
        if json_lines:
            outcome = json.loads(json_lines[-1])
        else:
            # The other systems' rows are not lost with those of one that ends its process.
            messages = completed.stderr.strip().splitlines() or [f"exit status {completed.returncode}"]
            outcome = [failed(row, messages[-1]) for row in rows if row["id"] in ids]
        for row in outcome:
            rebuilt[row["id"]] = row
        not_rebuilt = sum(bool(row["not_rebuilt"]) for row in outcome)
        print(f"{system or 'sources'}: {len(ids)} rows, {not_rebuilt} not rebuilt", file=sys.stderr, flush=True)
    return [rebuilt[row["id"]] for row in rows]


def stored_rows(out: Path) -> list[dict[str, Any]]:
    """The rows of a register that has been written before; none where there is no register."""
    file = out / "register.json"
    if not file.is_file():
        return []
    rows: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
    return rows


def keep_results(stored: Sequence[Mapping[str, Any]], rebuilt: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rebuilt rows, where those that were not rebuilt keep the stored result, its version and its date.

    A result of the released code is worth more than our formula run today. It is replaced by another run of the
    released code alone.
    """
    before = {row["id"]: row for row in stored}
    rows = []
    for row in rebuilt:
        old = before.get(row["id"], {})
        is_better = old.get("made_by") == RELEASED or not row.get("fresh")
        if old and row["not_rebuilt"] and is_better:
            texts = {name: row.get(name, "") for name in TEXTS}
            rows.append({**old, **texts, "not_rebuilt": row["not_rebuilt"]})
        else:
            rows.append(dict(row))
    return rows


def store_rows(out: Path, rebuilt: Sequence[Mapping[str, Any]]) -> None:
    """Put some rows into a register that has been written before; the order and the texts are those of rows.yaml."""
    from register.page import write_rows

    stored = stored_rows(out)
    by_id = {row["id"]: row for row in (*stored, *keep_results(stored, rebuilt))}
    rows = []
    for row in rows_of():
        if row["id"] in by_id:
            texts = {name: row.get(name, "") for name in TEXTS}
            rows.append({**by_id[row["id"]], **texts})
    write_rows(out, rows)


def changes(stored: Sequence[Mapping[str, Any]], rebuilt: Sequence[Mapping[str, Any]]) -> list[str]:
    """What differs between two registers, one sentence each; a row that was not rebuilt from its source says so."""
    before = {row["id"]: row for row in stored}
    after = {row["id"]: row for row in rebuilt}
    lines = [f"{row_id}: new row" for row_id in after if row_id not in before]
    lines += [f"{row_id}: row is gone" for row_id in before if row_id not in after]
    for row_id, row in after.items():
        old = before.get(row_id)
        if old is None:
            continue
        if row["not_rebuilt"]:
            lines.append(f"{row_id}: not rebuilt since {old['rebuilt'] or 'it was written'} ({row['not_rebuilt']})")
            continue
        if row["made_by"] != old["made_by"]:
            lines.append(f"{row_id}: {row['made_by']}, was {old['made_by']}")
            continue
        for key in ("version", "sha256", "flags", "fix"):
            if row.get(key) != old.get(key):
                lines.append(f"{row_id}: {key} is {row.get(key)!r}, was {old.get(key)!r}")
        for regime in ("fresh", "stale", "holes"):
            lines += _changed_figures(row_id, regime, old.get(regime) or {}, row.get(regime) or {})
    return lines


def _changed_figures(row_id: str, regime: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    lines = []
    for name in sorted({*old, *new}):
        before = old.get(name)
        after = new.get(name)
        both_numbers = isinstance(before, float) and isinstance(after, float)
        # Another processor rounds otherwise in the last digits.
        if both_numbers and math.isclose(before, after, rel_tol=1e-3, abs_tol=1e-5):
            continue
        if before != after:
            lines.append(f"{row_id}, {regime}: {name} is {after}, was {before}")
    return lines


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sources", type=Path, metavar="DIR", help="folder of clones")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the register")
    parser.add_argument("--changes", action="store_true", help="compare with the stored rows, write nothing")
    parser.add_argument("--newest", action="store_true", help="run the newest commit of each clone")
    parser.add_argument("--only", nargs="+", metavar="ID", help="rows by id, or by its beginning")
    parser.add_argument("--store", action="store_true", help="with --only: replace these rows of the register")
    parser.add_argument("--json", action="store_true", help="print JSON on one line")
    options = parser.parse_args(arguments)
    if options.sources is not None and not options.sources.is_dir():
        return _refused(f"--sources: got {str(options.sources)!r}; no such folder")
    if options.only:
        return _run_some(options)
    if options.newest and not options.changes:
        return _refused("--newest: is for --changes and --only; rows are stored at pinned commits")
    if options.changes:
        return _print_changes(options)
    from register.page import write

    stored = stored_rows(options.out)
    write(options.out, keep_results(stored, run_all(options.sources)))
    return 0


def _refused(message: str) -> int:
    """Print why the options make no sense. Returns the exit code."""
    print(message, file=sys.stderr)
    return 2


def _run_some(options: argparse.Namespace) -> int:
    """Run the rows of --only in this process, and print or store them."""
    rows = rows_of()
    chosen = [row for row in rows if row["id"] in options.only]
    if not chosen:
        chosen = [row for row in rows if row["id"].startswith(tuple(options.only))]
    if not chosen:
        ids = ", ".join(row["id"] for row in rows)
        return _refused(f"--only: got {' '.join(options.only)!r}; allowed: {ids}")
    if options.newest:
        chosen = [dict(at_newest(row, options.sources)) for row in chosen]
    rebuilt = run_rows(chosen, options.sources)
    if options.store:
        store_rows(options.out, rebuilt)
        return 0
    indent = 2
    if options.json:
        # On one line, which run_all looks for among what the released code prints.
        indent = None
    print(json.dumps(rebuilt, indent=indent))
    return 0


def _print_changes(options: argparse.Namespace) -> int:
    """Run every row, and print what differs from the stored ones."""
    stored = stored_rows(options.out)
    if not stored:
        return _refused(f"--out: got {str(options.out)!r}; there is no register.json to compare with")
    lines = changes(stored, run_all(options.sources, use_newest=options.newest))
    print("\n".join(lines) or "nothing changed")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
