"""The policy term on stale samples: bias and variance of every correction against staleness and length, by enumeration.

Binary policies with shared parameters and a random reward of 0 or 1. The target is the gradient of ``-E_pi[R]``; the
advantage is the reward less the sampler's expected reward. The error at N completions is ``sqrt(bias^2 + variance/N)``
over the target's norm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kl_comedy.kl.oracle import exact_moments_by_loss
from kl_comedy.kl.oracle.gradients import silent_shares
from kl_comedy.kl.oracle.policy_certificate import DECOUPLED, reward_gradient, reward_loss
from kl_comedy.objective import PolicyTerm
from kl_comedy.results.looks import other_look
from research.studies.bias_variance import relative_figures
from research.studies.open_problem import PARAMETERS, STALENESS, errors_at, random_settings
from research.studies.pages import by_length_and_staleness, lines_by_length, read_frame, save_frame, write_page

if TYPE_CHECKING:
    import pandas as pd


LENGTHS = (4, 8, 12)
SAMPLES = (64, 1024, 16384)

# The names are stored in policy_corrections.parquet; docs/decision.md shows some of them (doc_tables/policy_terms.py).
CANDIDATES: dict[str, PolicyTerm] = {
    "reinforce (no ratio)": PolicyTerm(),
    "token": PolicyTerm(corrections={"token": {}}),
    "tis 2": PolicyTerm(corrections={"tis": {"cap": 2.0}}),
    "icepop 0.5..5": PolicyTerm(corrections={"icepop": {}}),
    "ppo_clip 0.2": PolicyTerm(loss="ppo_clip"),
    "gspo 3e-4": PolicyTerm(loss="gspo"),
    "gspo 0.2": PolicyTerm(loss="gspo", options={"clip_low": 0.2, "clip_high": 0.2}),
    "cispo 5": PolicyTerm(loss="cispo"),
    "decoupled ppo": DECOUPLED,
    "geometric_tis 2": PolicyTerm(corrections={"geometric_tis": {}}),
    "tis 2 + geometric_mask 0.9..1.1": PolicyTerm(corrections={"tis": {}, "geometric_mask": {"low": 0.9, "high": 1.1}}),
    "opsm 0.1": PolicyTerm(corrections={"opsm": {"threshold": 0.1}}),
    "tis 2 + opsm 0.1": PolicyTerm(corrections={"tis": {}, "opsm": {"threshold": 0.1}}),
    "tis 20 + dppo_tv 0.15": PolicyTerm(corrections={"tis": {"cap": 20.0}, "dppo_tv": {}}),
    "tis 20 + dppo_kl 0.05": PolicyTerm(corrections={"tis": {"cap": 20.0}, "dppo_kl": {}}),
    "tis 20 + cppo 0.15": PolicyTerm(corrections={"tis": {"cap": 20.0}, "cppo": {}}),
    "tis 2 + trm 0.05": PolicyTerm(corrections={"tis": {}, "trm": {}}),
    "tis 2 + prefix_budget 0.05": PolicyTerm(corrections={"tis": {}, "prefix_budget": {"budget": 0.05}}),
    "sequence": PolicyTerm(corrections={"sequence": {}}),
    "sequence_tis 2": PolicyTerm(corrections={"sequence_tis": {"cap": 2.0}}),
    "sequence_tis 8": PolicyTerm(corrections={"sequence_tis": {"cap": 8.0}}),
    "sequence_mis 2": PolicyTerm(corrections={"sequence_mis": {"high": 2.0}}),
    "sequence_tis 2 + trm 0.05": PolicyTerm(corrections={"sequence_tis": {}, "trm": {}}),
}
SHOWN = (
    "reinforce (no ratio)",
    "tis 2",
    "ppo_clip 0.2",
    "gspo 0.2",
    "geometric_tis 2",
    "tis 20 + dppo_tv 0.15",
    "sequence",
    "sequence_tis 2",
    "sequence_tis 8",
)
"""The candidates of the figure."""


def study(
    *,
    lengths: Sequence[int] = LENGTHS,
    staleness: Sequence[float] = STALENESS,
    seeds: int = 5,
    done: Callable[[], None] = lambda: None,
) -> pd.DataFrame:
    """One row per length, staleness, seed and candidate; ``done`` is called after each seed."""
    import pandas as pd

    rows: list[dict[str, Any]] = []
    for setting, facts in random_settings(lengths, staleness, seeds):
        target_D = reward_gradient(setting)
        losses = {name: reward_loss(term, setting) for name, term in CANDIDATES.items()}
        # Clips and masks leave tokens without a gradient: part of the bias is what they drop.
        dropped = silent_shares(setting, losses)
        for name, moments in exact_moments_by_loss(setting, losses).items():
            figures = relative_figures(moments, target_D)
            rows.append(
                {
                    **facts,
                    "candidate": name,
                    **figures,
                    "strength": float(moments.gradient_D @ target_D) / float(target_D.square().sum()),
                    "dropped": dropped[name],
                    **errors_at(SAMPLES, figures["bias"], figures["variance"]),
                }
            )
        done()
    # The columns of the stored file; the KL of a setting, which the facts also have, is of no policy term.
    columns = ["length", "staleness", "seed", "ess", "candidate", "bias", "cosine", "strength", "variance", "dropped"]
    columns += [f"error_{n}" for n in SAMPLES]
    return pd.DataFrame(rows, columns=columns)


def winners(frame: pd.DataFrame) -> pd.DataFrame:
    """Per length, staleness and N: the candidate with the least median error, and that error; with the ESS."""
    import pandas as pd

    rows = []
    for (length, staleness), group in frame.groupby(["length", "staleness"]):
        row: dict[str, Any] = {"length": length, "staleness": staleness, "ess": group.ess.median()}
        for n in SAMPLES:
            # In the order of CANDIDATES, of which the first wins a tie.
            error = group.groupby("candidate")[f"error_{n}"].median().reindex(list(CANDIDATES))
            if staleness == 0:
                # Every ratio is 1.
                row[f"least at N={n}"] = "all alike"
            else:
                row[f"least at N={n}"] = f"{error.idxmin()} ({error.min():.2g})"
        rows.append(row)
    return pd.DataFrame(rows)


def draw(out: Path) -> None:
    """The figure, from the data in ``out``."""

    frame = read_frame(out / "policy_corrections.parquet")
    labels = {
        "bias": "relative bias\n(0 shown as 0.001, log axis)",
        "error_1024": "error at N = 1024,\nrelative to |G| (log axis)",
    }
    # A correction of the policy term must not look like a KL family.
    looks = {name: other_look(number).of_line() for number, name in enumerate(SHOWN)}
    lines_by_length(frame, out / "policy_corrections.svg", looks, labels, "median")


def write_report(frame: pd.DataFrame, out: Path, *, command: str) -> None:
    """Write data, figure and README into ``out``; ``command`` is what regenerates them."""

    save_frame(frame, out / "policy_corrections.parquet")
    draw(out)
    # Read back: the page shows the six digits of the file, from which it can be printed again.
    stored = read_frame(out / "policy_corrections.parquet")
    write_page(out, parts(stored, command=command))


def parts(frame: pd.DataFrame, *, command: str) -> list[Any]:
    """Texts and tables of the README, from the frame as it is stored."""
    tables = {
        "Relative bias (columns: length, staleness)": "bias",
        "Cosine with the reward gradient": "cosine",
        "Variance of one completion's gradient over the squared norm of the target": "variance",
        "Share of the sampler's tokens without gradient": "dropped",
        "Error at N = 1024": "error_1024",
        "Error at N = 16384": "error_16384",
    }
    texts: list[Any] = [
        "# The policy term on stale samples",
        "<!-- python research/scripts/stored_tables.py policy_corrections -->",
        f"Regenerated by `{command}`. Binary policies with {PARAMETERS} shared parameters, a random reward of 0 or 1, "
        f"{frame.seed.nunique()} seeds; every completion is enumerated in float64, tables are medians over seeds. "
        "Staleness is the standard deviation of the logit noise between policy and sampler; the target is the gradient "
        "of the expected reward at the current policy; the advantage is the reward less the sampler's expected reward; "
        "the error at N completions is `sqrt(bias^2 + variance / N)` over the target's norm. What to take: "
        "docs/decision.md.",
        "![bias and error](policy_corrections.svg)",
        "## Least error",
        winners(frame),
    ]
    for title, column in tables.items():
        texts += [f"## {title}", by_length_and_staleness(frame, column, list(CANDIDATES), "median")]
    return texts
