"""The register as files: rows, the answers of the form, the page of tables, and one text per issue."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kl_comedy.kl.claims import KIND_WORDS, NO_TARGET

Row = Mapping[str, Any]
WORDS = {
    "sequence_reverse": "reverse KL of completions",
    "sequence_forward": "forward KL of completions",
    "token_reverse": "reverse KL of each token",
    "token_forward": "forward KL of each token",
    "token_chi_square": "chi-square of each token",
    "token_reference_chi_square": "chi-square of reference against policy",
    "token_total_variation": "total variation of each token",
    "token_jensen_shannon": "Jensen-Shannon divergence of each token",
    "token_policy_square": "half the mean square log-ratio, under the policy",
    "token_reference_square": "half the mean square log-ratio, under the reference",
    "sequence_k2_cost": "mean of k2 less the reverse KL of each token",
    "sequence_k3_cost": "reverse KL of completions less the forward KL of each token",
    "zero": "nothing: noise of zero mean",
    "none": NO_TARGET,
}
"""Of a table's cell, by the name of the objective."""
LARGEST_ROUNDING = 1e-3
"""Difference of a coefficient from 1 that the page does not show: some released code computes in float32."""
SILENT = "nothing: no completion has a gradient"
REASONS = {
    "token_forward": (
        "k3 is differentiated with its samples held fixed: a token adds (1 - ref/policy) times the gradient of its "
        "log-prob. The mean of that under the policy is the gradient of the forward KL, though the mean of k3 itself "
        "is the reverse KL."
    ),
    "sequence_k3_cost": (
        "A cost has the gradient of its mean less that of the estimate differentiated. The mean of k3 is the reverse "
        "KL, and its gradient the forward KL's: the two are equal near the reference, where nothing is left."
    ),
    "token_chi_square": (
        "The estimate is differentiated with its samples held fixed: a token adds (policy/ref - 1) times the gradient "
        "of its log-prob. The mean of that under the policy is the gradient of half the chi-square."
    ),
    "token_policy_square": (
        "The weight has the gradient of the log-prob, so that the sampling is differentiated too. What is optimized is "
        "the mean of the estimate, half the squared log-ratio. Without that weight, half the squared log-ratio has the "
        "gradient of the reverse KL."
    ),
    "token_total_variation": (
        "The estimate is differentiated with its samples held fixed: a token adds the sign of its log-ratio times the "
        "gradient of its log-prob. The mean of that under the policy is the gradient of twice the total variation."
    ),
    "zero": (
        "The estimate is differentiated with its samples held fixed: a token adds the gradient of its log-prob, whose "
        "mean under the policy is 0."
    ),
}
"""Why a loss with samples of the policy itself optimizes what it does, for rows that do not say it themselves."""
NOT_NAMED = "the gradient of no divergence tested (KL, chi-square, total variation, Jensen-Shannon and others)"
"""Of an issue, whose reader does not know the table."""
SIZE = (
    "How far the two gradients are apart depends on the distance: for log-ratios that are normal it is about the "
    "square root of the KL in nats per token, 3 % at 0.001 and about 20 % at 0.05 (`tests/register/test_size.py`). A "
    "run near its reference sees little of it."
)
"""Of forward against reverse KL. The table's figures are those of three policies of 3 tokens far from the reference."""
OPEN = (
    "Which form trains better on samples of an older policy is open, in our own advice too: with a verified reward and "
    "a learning rate of 2e-4, k3 as it stands ended above k3 times the ratio in our runs (`docs/decision.md`)."
)
"""Said wherever a form of the loss is asked for."""
OWN_NAMES = (
    "plus_plus_returns",
    "with_returns",
    "in_reward",
    "top_k_parts",
    "loss_module",
    "unsloth_kl",
    "nemo_weight",
    "ratio",
)
"""Names in a call that are this repository's."""
BEGIN = "<!-- python research/scripts/stored_tables.py register -->"
END = "<!-- end of the rows -->"
"""Between them stands the generated part of the page; `kl-comedy results verify` makes its tables again."""


def write(out: Path, rows: Sequence[Row]) -> None:
    """Write which_flag.json and by_hand.json, which take seconds, then :func:`write_rows`."""
    from register.by_hand import checks
    from register.which_flag import answers

    out.mkdir(parents=True, exist_ok=True)
    (out / "which_flag.json").write_text(json.dumps(answers(), separators=(",", ":")) + "\n", encoding="utf-8")
    (out / "by_hand.json").write_text(json.dumps(checks(), indent=1) + "\n", encoding="utf-8")
    write_rows(out, rows)


def write_rows(out: Path, rows: Sequence[Row]) -> None:
    """Write register.json, the generated part of README.md and the texts of issues."""
    (out / "register.json").write_text(json.dumps(list(rows), indent=1) + "\n", encoding="utf-8")
    _write_issues(out / "issues", rows)
    page = out / "README.md"
    text = f"# The register of KL code\n\n{BEGIN}\n{END}\n"
    if page.is_file():
        text = page.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    by_hand = json.loads((out / "by_hand.json").read_text(encoding="utf-8"))
    page.write_text(f"{before}{BEGIN}\n\n{generated(rows, by_hand)}\n{END}{after}", encoding="utf-8")


def generated(rows: Sequence[Row], by_hand: Sequence[Mapping[str, Any]]) -> str:
    """The counts, the table and the checks by hand."""
    systems = list(dict.fromkeys(row["system"] for row in rows))
    by_maker: dict[str, int] = {}
    for row in rows:
        by_maker[row["made_by"]] = by_maker.get(row["made_by"], 0) + 1
    counts = ", ".join(f"{count} by {maker}" for maker, count in by_maker.items())
    not_rebuilt = sum(bool(row["not_rebuilt"]) for row in rows)
    if not_rebuilt:
        counts += f"; {not_rebuilt} not rebuilt in the last run"
    texts = sum(bool(row["issue"]) for row in rows)
    counts += f". {texts} have the text of an issue"
    lines = [f"{len(rows)} rows of {len(systems)} systems and papers: {counts}.", "", *table(rows), ""]
    lines += ["### Checked by hand", ""]
    lines += ["| row | independent enumeration | register |", "| --- | --- | --- |"]
    rows_by_id = {row["id"]: row for row in rows}
    for check in by_hand:
        row = rows_by_id[check["id"]]
        lines.append(f"| `{check['id']}` | {check['says']} | {objective(row.get('fresh'))}; {holes_text(row)} |")
    return "\n".join(lines) + "\n"


def table(rows: Sequence[Row]) -> list[str]:
    """The lines of the table."""
    head = ["system", "version", "function", "setting", "fresh", "stale", "with holes", "error", "fix", "made by"]
    lines = [f"| {' | '.join(head)} |", f"| {' | '.join(['---'] * len(head))} |"]
    for row in rows:
        cells = [
            row["system"],
            row["version"],
            f"`{_plain(row.get('function', ''))}`",
            f"`{_plain(row['flags'])}`",
            objective(row.get("fresh")),
            objective(row.get("stale")),
            holes_text(row),
            error_text(row),
            _plain(row["fix"]),
            _plain(made_by_text(row)),
        ]
        if row["issue"]:
            # Not the fix itself as the link's text: its brackets would end it.
            cells[-2] += f" ([issue](issues/{row['id']}.md))"
        if row["withdrawn"]:
            cells[-2] += f" (nothing to send: {row['withdrawn']}{_thread_links(row)})"
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _thread_links(row: Row) -> str:
    """Links to the threads of a row."""
    links = [f"[#{thread['url'].rpartition('/')[2]}]({thread['url']})" for thread in row["threads"] or []]
    if not links:
        return ""
    return f": {', '.join(links)}"


def _plain(text: str) -> str:
    """A text inside a cell, which a bar would end."""
    return text.replace("|", "\\|")


def objective(figures: Mapping[str, Any] | None) -> str:
    """What is optimized, with its coefficient, in words."""
    if not figures:
        return "not rebuilt"
    if figures.get("silent"):
        return SILENT
    if figures.get("kind"):
        return KIND_WORDS[figures["kind"]]
    words = WORDS[figures["target"]]
    coefficient = figures["coefficient"]
    if coefficient is not None and abs(coefficient - 1) > LARGEST_ROUNDING:
        words = f"{coefficient:.3g} times the {words}"
    if figures["near"]:
        words += ", while no clamp acts"
    return words


def made_by_text(row: Row) -> str:
    """What made the row, and why it is an older result where its source was not run the last time."""
    if not row["not_rebuilt"]:
        return str(row["made_by"])
    if not row["rebuilt"]:
        return f"not rebuilt: {row['not_rebuilt']}"
    return f"{row['made_by']}, not rebuilt since {row['rebuilt']}: {row['not_rebuilt']}"


def error_text(row: Row) -> str:
    """The relative errors with fresh and stale samples."""
    if not row.get("fresh"):
        return "not rebuilt"
    return f"{percent(row['fresh']['error'])} / {percent(row['stale']['error'])}"


def percent(share: float | None) -> str:
    """A relative error as a percentage.

    >>> percent(0.0), percent(0.2301), percent(0.0003468)
    ('0 %', '23 %', '0.035 %')
    """
    if share is None:
        return "not finite"
    # With two digits 0.995 would be "1e+02 %".
    if share < 0.995:
        return f"{100 * share:.2g} %"
    return f"{100 * share:.0f} %"


def holes_text(row: Row) -> str:
    """What a masked token inside a completion does."""
    figures = row.get("holes")
    if figures is None:
        return "not tried"
    parts = []
    if figures["change"]:
        parts.append(f"leak: {percent(figures['change'])} of the gradient")
    if figures["reached"]:
        parts.append("the masked token gets a gradient")
    return ", ".join(parts) or "no leak"


# --- texts of issues -----------------------------------------------------------------------------------------------
def _write_issues(folder: Path, rows: Sequence[Row]) -> None:
    texts = {f"{row['id']}.md": issue(row) for row in rows if row["issue"] and row.get("fresh")}
    folder.mkdir(exist_ok=True)
    # A row that has no issue any more leaves no text behind.
    for old in folder.glob("*.md"):
        if old.name not in texts:
            old.unlink()
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")


def issue(row: Row) -> str:
    """The text of one issue, ready to send."""
    paragraphs = [
        f"# {row['issue']}",
        f"To: {row['system']}. Version: {row['version']}.",
        f"**Setting.** `{row['flags']}`",
        _code(row),
        *_results(row),
        *_why(row),
        *_call(row),
    ]
    if row["note"]:
        paragraphs.append(row["note"])
    paragraphs += _fix(row)
    if row["intended"] == "token_reverse" and not row["fresh"]["silent"]:
        paragraphs.append(OPEN)
    if row.get("form"):
        paragraphs += ["**To see it.** The exact expectation over one token, with torch alone:", "\n".join(script(row))]
    if row["hand"]:
        paragraphs.append("The same by sums over few tokens in plain Python: `bench/register/by_hand.py`.")
    if row["threads"]:
        threads = [f"- <{thread['url']}>, {thread['shows']}" for thread in row["threads"]]
        paragraphs += ["**Said before.**", "\n".join(threads)]
    paragraphs.append("If this is intended, a sentence in the documentation of the setting would help its users.")
    paragraphs.append(f"**Rebuild.** In a checkout of kl_comedy, with clones and wheels fetched: `{row['command']}`")
    return "\n\n".join(paragraphs) + "\n"


def _code(row: Row) -> str:
    """Where the code is, and where the trainer calls it."""
    if not row["source"]:
        return f"**Code.** Our re-implementation of the formula: `{row['function']}`."
    text = f"**Code.** `{row['function']}` of `{row['source']}` (sha256 `{row['sha256'][:16]}`)"
    if row.get("called_at"):
        text += f", called at `{row['called_at']}`"
    return f"{text}."


def _results(row: Row) -> list[str]:
    """What the loss optimizes. No share is given: it would be that of the three policies of the table."""
    results = [
        f"- with samples of the policy itself: {objective(row['fresh'])}",
        f"- with samples of an earlier policy: {objective(row['stale'])}",
    ]
    if row.get("holes"):
        results.append(f"- with a masked token inside each completion, as a tool's reply: {holes_text(row)}")
    how = "**What it optimizes.** By its expected gradient alone, enumerated in float64."
    if "loss_module(" not in row["call"]:
        how += " The losses of tokens are summed: how they are averaged over tokens and completions is left out."
    paragraphs = [how, "\n".join(results).replace(WORDS["none"], NOT_NAMED)]
    if row["fresh"]["target"] == "token_forward":
        paragraphs.append(SIZE)
    return paragraphs


def _why(row: Row) -> list[str]:
    """The reason, where one is known."""
    reason = row["because"]
    if not reason and not row["fresh"]["silent"]:
        reason = REASONS.get(row["fresh"]["target"], "")
    return [f"**Why.** {reason}"] if reason else []


def _call(row: Row) -> list[str]:
    """What is computed; nothing for a wheel, whose case calls the trainer's own method."""
    if not row["call"]:
        return []
    paragraphs = ["What is computed, with log-probs of the sampled tokens:", f"    {row['call']}"]
    helpers = [name for name in OWN_NAMES if f"{name}(" in row["call"]]
    if helpers:
        names = ", ".join(helpers)
        paragraphs.append(f"({names}: arguments as the trainer builds them, `bench/register/calls.py`.)")
    return paragraphs


def _fix(row: Row) -> list[str]:
    """The fix, and what it was measured to optimize."""
    paragraphs = [f"**If the {WORDS[row['intended']]} is meant:** `{row['fix']}`"]
    if not row.get("fixed_fresh"):
        return paragraphs
    effect = f"With it, samples of the policy itself: {objective(row['fixed_fresh'])}"
    effect += f"; samples of an earlier policy: {objective(row['fixed_stale'])}"
    if row.get("fixed_holes"):
        effect += f"; a masked token: {holes_text({'holes': row['fixed_holes']})}"
    return [*paragraphs, f"{effect}.".replace(WORDS["none"], NOT_NAMED)]


def script(row: Row) -> list[str]:
    """A program that shows the mistake with nothing but torch; it prints the error of the form and of the fix."""
    lines = [
        "import torch",
        "",
        "torch.manual_seed(0)",
        "logits, ref_logits = torch.randn(2, 5, dtype=torch.float64)",
        "logp = logits.requires_grad_().log_softmax(-1)",
        "ref = ref_logits.log_softmax(-1)",
        "kl = torch.autograd.grad((logp.exp() * (logp - ref)).sum(), logits, retain_graph=True)[0]",
        f"for loss in ({row['form']}, {row['form_fixed']}):",
        "    mean = torch.autograd.grad((logp.exp().detach() * loss).sum(), logits, retain_graph=True)[0]",
        "    print(float((mean - kl).norm() / kl.norm()))  # the released form, then the fix: 0",
    ]
    return ["```python", *lines, "```"]
