"""Baselines of a KL cost at equal samples, optimal token baselines among them, by enumeration of every group.

k1 in reward, to go, on-policy, binary policies with shared parameters: ``sum_t s_t (F_t - b_t)``, ``F_t`` the sum of
log-ratios from t on. An optimal token baseline is ``b_t = E[F_t W_t] / E[W_t]`` with the energy of the completion so
far, ``W_t = sum_{u <= t} (1 - 2 pi(y_u) + sum_v pi(v)^2)``, the squared norm of the scores in the logits (2602.17616;
verl 0.9.1 optimal_token_baseline). verl's means are over the group with the completion itself in it, so the expected
gradient is off; over the other completions only it is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kl_comedy.kl import KLTerm, kl_parts
from kl_comedy.kl.oracle import Instance, Loss, Rows, Tree, exact_moments_by_loss, target_gradient, terms_loss
from kl_comedy.kl.oracle.gradients import term_arguments
from research.studies.bias_variance import DISTANCE, relative_figures, shared_setting
from research.studies.open_problem import errors_at
from research.studies.pages import save_csv, write_page

if TYPE_CHECKING:
    import pandas as pd

# Every group of completions is enumerated: (2^T)^GROUP of them, which bounds both.
GROUP = 3
LENGTHS = (2, 3, 4, 5)
SAMPLES = (64, 1024)
K1 = KLTerm("k1")


def energy(rows: Rows) -> Tensor:
    """``W_t`` of each completion, ``[B, T]``."""
    assert rows.next_logp_BTV is not None
    # 1 - 2 pi(y) + sum_v pi(v)^2 = |1_y - pi|^2
    collision_BT = (2 * rows.next_logp_BTV.detach()).exp().sum(-1)
    square_BT = torch.where(rows.mask_BT, 1 - 2 * rows.logp_BT.detach().exp() + collision_BT, 0.0)
    return square_BT.cumsum(-1)


def costs(rows: Rows) -> Tensor:
    """``F_t``, ``[B, T]``."""
    return kl_parts(K1, **term_arguments(K1, rows)).cost_BT


def optimal(*, own: bool) -> Loss:
    """The optimal token baseline over the group; ``own``: with the completion itself in the means, as in verl."""

    def loss(rows: Rows, /) -> Tensor:
        cost_BT = costs(rows)
        energy_BT = energy(rows)
        # b_t = E[F_t W_t] / E[W_t]; the count of both means cancels.
        baseline_BT = _group_sum(cost_BT * energy_BT, own=own) / _group_sum(energy_BT, own=own)
        return (cost_BT - baseline_BT).detach() * rows.logp_BT

    return loss


def _group_sum(values_BT: Tensor, *, own: bool) -> Tensor:
    """The sum over the group of each completion; without ``own``, over the others."""
    values_CGT = values_BT.reshape(-1, GROUP, values_BT.shape[-1])
    sum_CGT = values_CGT.sum(1, keepdim=True).expand_as(values_CGT)
    if not own:
        sum_CGT = sum_CGT - values_CGT
    return sum_CGT.reshape_as(values_BT)


def known(setting: Instance) -> Loss:
    """The limit of :func:`optimal` for large groups: the baseline of the expectations over all completions."""
    every_completion = setting.rows(setting.tree.all)
    weight_B1 = setting.probability(setting.tree.all)[:, None]
    energy_BT = energy(every_completion)
    cost_energy_T = (weight_B1 * costs(every_completion) * energy_BT).sum(0)
    energy_T = (weight_B1 * energy_BT).sum(0)
    baseline_T = cost_energy_T / energy_T

    def loss(rows: Rows, /) -> Tensor:
        return (costs(rows) - baseline_T).detach() * rows.logp_BT

    return loss


def candidates(setting: Instance) -> dict[str, Loss]:
    """The losses that are compared, by name."""
    # The names are stored in baselines.csv; those in parentheses are a config's, or another trainer's.
    return {
        "none": terms_loss([K1]),
        "leave-one-out mean (`baseline: own`)": terms_loss([KLTerm("k1", baseline="own")]),
        "exact KL of the prefix (`baseline: exact`, vOPD)": terms_loss([KLTerm("k1", baseline="exact")]),
        "optimal, leave one out": optimal(own=False),
        "optimal, own completion included (verl)": optimal(own=True),
        "optimal, expectations known": known(setting),
        "no sampled own step (`exact`, `baseline: own`)": terms_loss([KLTerm("exact", baseline="own")]),
    }


def study(*, seeds: int = 5, done: Callable[[], None] = lambda: None) -> pd.DataFrame:
    """One row per length, seed and baseline. ``done`` is called after each seed."""
    import pandas as pd

    rows = []
    for length in LENGTHS:
        tree = Tree.build(vocabulary=2, length=length, ends=False)
        for seed in range(seeds):
            setting = shared_setting(tree, seed=seed, distance=DISTANCE)
            target_D = target_gradient(setting, "sequence_reverse")
            moments_by_name = exact_moments_by_loss(setting, candidates(setting), group_size=GROUP)
            for name, moments in moments_by_name.items():
                figures = relative_figures(moments, target_D)
                errors = errors_at(SAMPLES, figures["bias"], figures["variance"])
                rows.append({"length": length, "seed": seed, "baseline": name, **figures, **errors})
            done()
    return pd.DataFrame(rows)


def by_length(frame: pd.DataFrame, column: str) -> pd.DataFrame:
    """Medians over seeds, one row per baseline and one column per length."""
    table = frame.pivot_table(index="baseline", columns="length", values=column, aggfunc="median", sort=False)
    table.columns = [f"T={length}" for length in table.columns]
    return table.reset_index()


def write_report(frame: pd.DataFrame, out: Path, *, command: str) -> None:
    """Write CSV and README into ``out``; ``command`` is what regenerates them."""
    save_csv(frame, out / "baselines.csv")
    write_page(out, parts(frame, command=command))


def parts(frame: pd.DataFrame, *, command: str) -> list[str | pd.DataFrame]:
    """The page, from the study's figures."""
    # A bias of 1e-16 is 0, and its median over seeds would be shown as a number.
    shown = frame.assign(bias=frame.bias.where(frame.bias > 1e-9, 0.0))
    tables = {
        "Variance at equal samples, over the squared norm of the target": "variance",
        "Relative bias": "bias",
        **{f"Error at N = {n}": f"error_{n}" for n in SAMPLES},
    }
    page: list[str | pd.DataFrame] = [
        "# Baselines of a KL cost",
        "<!-- python research/scripts/stored_tables.py baselines -->",
        f"Regenerated by `{command}`. k1 in reward, to go, on-policy, groups of {GROUP}, binary policies with shared "
        f"parameters, {frame.seed.nunique()} seeds; every group is enumerated in float64, tables are medians over "
        "seeds. Variance is that of the group's mean gradient times the group's size. The target is the gradient of "
        "the sequence-level reverse KL; the error at N completions is `sqrt(bias^2 + variance / N)` over its norm "
        f"(with the bias of groups of {GROUP}).",
    ]
    for title, column in tables.items():
        page += [f"## {title}", by_length(shown, column)]
    return page
