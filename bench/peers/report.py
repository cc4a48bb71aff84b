"""Write the results as JSON and Markdown."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]

# The keys of a row of the stored JSON file.
COLUMNS = (
    "system",
    "version",
    "name",
    "flags",
    "kind",
    "placement",
    "regime",
    "target",
    "near_target",
    "bias_sequence_reverse",
    "cosine_sequence_reverse",
    "bias_token_reverse",
    "cosine_token_reverse",
    "variance",
    "strength",
    "dead_share_far",
    "silent_no_op",
    "equal_to_ours",
    "difference",
    "reduction",
    "beta",
    "group_size",
    "note",
    "function",
    "module",
    "module_sha256",
    "wheel",
    "wheel_sha256",
    "stand_ins",
    "command",
)

LEGEND = """\
Each row is the unmodified code of a released wheel, with the KL part taken alone at a coefficient of 1.
*Optimizes*: the target whose gradient equals its exact expected gradient on every instance; in brackets, only on the
instances near the reference (where no clamp acts). *Bias* and *cos*: against the gradient of the
sequence-level reverse KL (seq) and of the reverse KL of each visited prefix (tok). *Variance*: of one completion's
gradient, over the squared norm of the sequence-level gradient. *Dead*: the share of tokens without any KL
gradient on an instance far from the reference. *Ours*: the term of this package with the same derivatives on
random rows. Off-policy, `old_log_probs` are the stale sampler's."""


def write(folder: Path, rows: Sequence[Row], skipped: Sequence[Row]) -> None:
    """Write ``peers.json`` and ``peers.md``; the same wheels give identical files."""
    folder.mkdir(parents=True, exist_ok=True)
    # Rounded before anything is written: the page is made of the stored numbers, and can be made again from them.
    plain = [{name: _round(row.get(name)) for name in COLUMNS} for row in rows]
    data = {"rows": plain, "skipped": list(skipped)}
    (folder / "peers.json").write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    (folder / "peers.md").write_text(markdown(plain, skipped), encoding="utf-8")


def markdown(rows: Sequence[Row], skipped: Sequence[Row]) -> str:
    """The table, the measured wheels, and the code that was not run."""
    head = ("row", "regime", "optimizes", "bias seq", "cos seq", "bias tok", "variance", "dead", "ours", "note")
    lines = [
        "# Other systems' KL code under the exact oracle",
        "",
        "<!-- python research/scripts/stored_tables.py peers -->",
        "",
        LEGEND,
        "",
        _line(head),
        _line(["---"] * len(head)),
    ]
    lines += [_line(_cells(row)) for row in rows]
    lines += ["", "A row is reproduced by `python bench/peers/run.py --only ROW`.", "", "## The code measured", ""]
    lines += [_line(("function", "wheel", "sha256 of the module file", "stubbed packages")), _line(["---"] * 4)]
    # Several rows measure the same function.
    functions = {}
    for row in rows:
        stubbed = ", ".join(row["stand_ins"] or []) or "none"
        functions[row["function"]] = (f"`{row['function']}`", row["wheel"], f"`{row['module_sha256'][:16]}`", stubbed)
    lines += [_line(cells) for cells in functions.values()]
    lines += ["", "## Not run", "", _line(("system", "what", "reason")), _line(["---"] * 3)]
    lines += [_line((f"{row['system']} {row['version']}", row["what"], row["reason"])) for row in skipped]
    return "\n".join(lines) + "\n"


def _cells(row: Row) -> list[str]:
    """The cells of one row of the main table."""
    if row["silent_no_op"]:
        target = "**nothing: a silent no-op**"
    elif row["target"]:
        target = row["target"]
    elif row["near_target"]:
        # Clamps act on the instances that are far from the reference.
        target = f"({row['near_target']})"
    else:
        target = "none"
    remarks = [row["note"], _reduction(row["reduction"])]
    note = "; ".join(remark for remark in remarks if remark)
    return [
        f"`{row['name']}`",
        row["regime"].replace("_", "-"),
        target,
        _number(row["bias_sequence_reverse"]),
        _number(row["cosine_sequence_reverse"]),
        _number(row["bias_token_reverse"]),
        _number(row["variance"]),
        f"{row['dead_share_far']:.0%}",
        row["equal_to_ours"] or "",
        note,
    ]


def _reduction(text: str) -> str:
    """How tokens are averaged, if the figures depend on it."""
    does_not_matter = text == "token sum" or "divided out" in text
    return "" if does_not_matter else text


def _line(cells: Sequence[str]) -> str:
    """One line of a Markdown table."""
    return "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def _number(value: float | None) -> str:
    if value is None:
        return ""
    if abs(value) < 5e-5:
        return "0"
    return f"{value:.3g}"


def _round(value: Any) -> Any:
    """Six digits and 0 for rounding noise, so that results are equal on different machines."""
    if not isinstance(value, float):
        return value
    if abs(value) < 1e-7:
        return 0.0
    return float(f"{value:.6g}")
