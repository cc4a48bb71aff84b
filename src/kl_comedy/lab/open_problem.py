"""The open problem of 2512.21852: a sequence-level reverse-KL gradient from off-policy samples, and what it costs.

Every candidate is judged by its error at equal samples, ``sqrt(bias^2 + variance / N)`` over the norm of the true
gradient. Candidates without a group are enumerated; those that couple the completions of a group (baselines,
self-normalization) are sampled, with intervals over independent batches; doubly robust forms need a value of every
next token and are enumerated from tables of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kl_comedy.kl import KLTerm
from kl_comedy.kl.corrections import weights_of
from kl_comedy.kl.oracle import (
    Instance,
    Loss,
    Rows,
    Tree,
    effective_sample_share,
    exact_moments,
    sampled_moments,
    sequence_kl,
    target_gradient,
    terms_loss,
)
from kl_comedy.lab.batched_gradients import Tables, enumerated
from kl_comedy.lab.bias_variance import debiased_norm
from kl_comedy.lab.pages import figure, legend_below, markdown, save_csv, tab10

if TYPE_CHECKING:
    import pandas as pd


VALUE_ERROR = 0.5
"""Relative noise of the imperfect value."""


def doubly_robust_moments(tables: Tables, target_D: Tensor) -> dict[str, tuple[float, float]]:
    """By candidate: relative bias and relative trace variance, enumerated.

    With a value ``Q(h, v)`` of the KL still to come after token ``v`` (nats), the future part of the gradient is
    ``grad sum_v pi(v|h) Q(h, v)`` summed over the vocabulary, plus the ratio-weighted score of the error of ``Q``:

        sum_t W_{t-1} (grad KL_t + grad sum_v pi(v|h_t) Q(h_t, v)) + sum_t W_t s_t (F_t - Q(h_t, y_t)),

    unbiased for any ``Q``. Truncating the ratio of the second sum only (as ACER does, 1611.01224) trades its variance
    for a bias that vanishes with the error of ``Q``. A language model would need ``Q`` for every next token, so these
    show what a learned value could bring; they are not estimators one can train with today.
    """
    exact_NV = _future_kl(tables)
    generator = torch.Generator().manual_seed(77)
    noisy_NV = exact_NV * (1 + VALUE_ERROR * torch.randn(exact_NV.shape, generator=generator, dtype=torch.float64))
    gradients = {
        "doubly robust, exact value": _doubly_robust(tables, exact_NV, outer=None, inner=None),
        "doubly robust, value off by 50%": _doubly_robust(tables, noisy_NV, outer=None, inner=None),
        "truncated at 2 then corrected, exact value": _doubly_robust(tables, exact_NV, outer=2.0, inner=2.0),
        "truncated at 2 then corrected, value off by 50%": _doubly_robust(tables, noisy_NV, outer=2.0, inner=2.0),
        "value only, off by 50%, truncated at 2": _doubly_robust(tables, noisy_NV, outer=2.0, inner=0.0),
    }
    probability_B = tables.setting.probability(tables.setting.tree.all)
    size = float(target_D.square().sum())
    moments = {}
    for name, gradient_BD in gradients.items():
        mean_D = probability_B @ gradient_BD
        variance = float(probability_B @ gradient_BD.square().sum(-1)) - float(mean_D.square().sum())
        moments[name] = float((mean_D - target_D).norm()) / size**0.5, variance / size
    return moments


def _future_kl(tables: Tables) -> Tensor:
    """``Q[h, v]``: expected KL (nats) of the prefixes after token v, by recursion from the leaves."""
    tree = tables.setting.tree
    value_NV = torch.zeros_like(tables.p_NV)
    onward = slice(1, None) if tree.ends else slice(None)
    after_N = tables.reverse_N.clone()
    for depth in reversed(range(tree.length - 1)):
        here = slice(tree.first(depth), tree.first(depth + 1))
        below = slice(tree.first(depth + 1), tree.first(depth + 2))
        value_NV[here, onward] = after_N[below].reshape(-1, tree.branching)
        after_N[here] = tables.reverse_N[here] + (tables.p_NV[here] * value_NV[here]).sum(-1)
    return value_NV


def _doubly_robust(tables: Tables, value_NV: Tensor, *, outer: float | None, inner: float | None) -> Tensor:
    """The gradient of each completion ``[B, D]``; ``outer`` caps the prefix ratio, ``inner`` the correction's."""
    rows = tables.setting.tree.all
    at, token, mask_BT = rows.prefix_BT, rows.token_BT, rows.mask_BT
    delta_NV = tables.logp_NV - tables.setting.recorded_logp_NV
    delta_BT = torch.where(mask_BT, delta_NV[at, token], 0.0)
    before_BT = weights_of("prefix_previous", delta_BT, cap=outer) * mask_BT
    all_actions_ND = torch.einsum("nv,nvd->nd", tables.p_NV * value_NV, tables.score_NVD)
    gradient_BD = torch.einsum("bt,btd->bd", before_BT, (tables.reverse_ND + all_actions_ND)[at])
    if inner == 0.0:
        return gradient_BD
    cost_BT = before_BT * tables.reverse_N[at] * mask_BT
    future_BT = cost_BT.flip(-1).cumsum(-1).flip(-1) - cost_BT
    up_to_BT = weights_of("prefix", delta_BT, cap=inner) * mask_BT
    missed_BT = future_BT - up_to_BT * value_NV[at, token]
    return gradient_BD + torch.einsum("bt,btd->bd", missed_BT * mask_BT, tables.score_NVD[at, token])


LENGTHS = (4, 8, 12, 16)
STALENESS = (0.0, 0.1, 0.3, 0.6, 1.0)
SAMPLES = (64, 256, 1024, 4096)
CAPS = (1.0, 1.5, 2.0, 4.0, 8.0)
WINDOWS = (1, 2, 4)
PARAMETERS = 8
DISTANCE = 0.5
GROUP = 8
BATCHES = 12
BATCH = 8192


def exact_candidates() -> dict[str, KLTerm]:
    """Terms without a group, by the name they have in the tables."""

    def rb(**fields: Any) -> KLTerm:
        return KLTerm("exact", credit="to_go", correction="prefix_previous", **fields)

    candidates = {
        "sequence IS, k1 total": KLTerm("k1", credit="total", correction="sequence"),
        "sequence IS, k3 differentiated": KLTerm("k3", placement="loss", correction="sequence"),
        "per decision, k1": KLTerm("k1", credit="to_go", correction="prefix"),
        "per decision, k3 differentiated": KLTerm("k3", placement="loss", correction="prefix"),
        "RB per decision": rb(),
        "RB without prefix ratio": KLTerm("exact", credit="to_go"),
        "token ratio x k3": KLTerm("k3", placement="loss", correction="token"),
        "bare k3 in loss": KLTerm("k3", placement="loss"),
        "bare k1 in reward": KLTerm("k1", credit="to_go"),
    }
    for cap in CAPS:
        candidates[f"RB, prefix truncated at {cap:g}"] = rb(cap=cap)
        candidates[f"RB, each ratio truncated at {cap:g}"] = rb(cap=cap, cap_mode="each")
        candidates[f"RB, masked above {cap:g}"] = rb(cap=cap, cap_mode="mask")
    for window in WINDOWS:
        candidates[f"RB, window of {window}"] = rb(window=window)
    return candidates


def grouped_candidates() -> dict[str, Loss]:
    """Losses that couple the completions of a group."""

    def rb(**fields: Any) -> Loss:
        term = KLTerm("exact", credit="to_go", correction="prefix_previous", baseline="own", **fields)
        return terms_loss([term])

    return {
        "RB + own baseline": rb(),
        "RB, prefix truncated at 2 + own baseline": rb(cap=2.0),
        "RB, prefix truncated at 4 + own baseline": rb(cap=4.0),
        "RB, prefix truncated at 8 + own baseline": rb(cap=8.0),
        "RB, each ratio truncated at 4 + own baseline": rb(cap=4.0, cap_mode="each"),
        "RB without prefix ratio + own baseline": terms_loss([KLTerm("exact", credit="to_go", baseline="own")]),
        "per decision, k1 + own baseline": terms_loss([KLTerm("k1", correction="prefix", baseline="own")]),
        "RB, self-normalized over the group": self_normalized(None),
        "RB, truncated at 4, self-normalized": self_normalized(4.0),
    }


def self_normalized(cap: float | None) -> Loss:
    """RB per decision with each prefix ratio over its mean in the group (weighted importance sampling)."""

    def loss(rows: Rows, /) -> Tensor:
        delta_BT = torch.where(rows.mask_BT, rows.logp_BT.detach() - rows.behaviour_logp_BT, 0.0)
        weight_BT = weights_of("prefix_previous", delta_BT, cap=cap)
        _, index_B = torch.unique(rows.group_B, return_inverse=True)
        groups = int(index_B.max()) + 1
        sums_GT = weight_BT.new_zeros(groups, weight_BT.shape[1]).index_add_(0, index_B, weight_BT)
        size_G = torch.bincount(index_B, minlength=groups)
        weight_BT = weight_BT * size_G[index_B, None] / sums_GT[index_B]
        cost_BT = weight_BT * rows.reverse_kl_BT.detach()
        future_BT = cost_BT.flip(-1).cumsum(-1).flip(-1) - cost_BT
        return torch.where(rows.mask_BT, future_BT * rows.logp_BT + weight_BT * rows.reverse_kl_BT, 0.0)

    return loss


def random_settings(
    lengths: Sequence[int], staleness: Sequence[float], seeds: int
) -> Iterator[tuple[Instance, dict[str, Any]]]:
    """Seeded binary settings with what describes them: length, staleness, seed, ESS share, KL in nats."""
    for length in lengths:
        for stale in staleness:
            for seed in range(seeds):
                setting = Instance.random(
                    Tree.build(vocabulary=2, length=length, ends=False),
                    regime="off_policy",
                    seed=seed,
                    parameters=PARAMETERS,
                    distance=DISTANCE,
                    staleness=stale,
                )
                facts = {
                    "length": length,
                    "staleness": stale,
                    "seed": seed,
                    "ess": effective_sample_share(setting),
                    "kl": sequence_kl(setting),
                }
                yield setting, facts


def study(
    *,
    lengths: Sequence[int] = LENGTHS,
    staleness: Sequence[float] = STALENESS,
    seeds: int = 5,
    batches: int = BATCHES,
    batch: int = BATCH,
    done: Callable[[], None] = lambda: None,
) -> pd.DataFrame:
    """One row per candidate and random setting: relative bias, variance, error at each of :data:`SAMPLES`.

    ``bias_low`` and ``bias_high`` bound a sampled bias; for an enumerated one they equal it.
    """
    import pandas as pd

    losses = {name: terms_loss([term]) for name, term in exact_candidates().items()}
    rows: list[dict[str, Any]] = []
    for setting, facts in random_settings(lengths, staleness, seeds):
        tables, target_D = Tables(setting), target_gradient(setting, "sequence_reverse")
        size = float(target_D.square().sum())
        moments = {
            name: (m.relative_bias(target_D), m.variance / size) for name, m in enumerated(tables, losses).items()
        }
        for name, (bias, variance) in {**moments, **doubly_robust_moments(tables, target_D)}.items():
            numbers = _row(bias, bias, bias, variance)
            rows.append({**facts, "candidate": name, "method": "enumerated", **numbers})
        for name, loss in grouped_candidates().items():
            sampled = _sampled(setting, loss, target_D, batches=batches, batch=batch, seed=int(facts["seed"]))
            rows.append({**facts, "candidate": name, "method": "sampled", **_row(*sampled)})
        done()
    return pd.DataFrame(rows)


def _row(bias: float, low: float, high: float, variance: float) -> dict[str, float]:
    errors = {f"error_{n}": math.sqrt(bias**2 + variance / n) for n in SAMPLES}
    return {"bias": bias, "bias_low": low, "bias_high": high, "variance": variance, **errors}


def _sampled(
    setting: Instance, loss: Loss, target_D: Tensor, *, batches: int, batch: int, seed: int
) -> tuple[float, float, float, float]:
    """Relative bias with its bounds, and relative variance, from independent batches of groups."""
    generator = torch.Generator().manual_seed(1000 + seed)
    sampled = [
        sampled_moments(setting, loss, samples=batch, group_size=GROUP, generator=generator) for _ in range(batches)
    ]
    scale = float(target_D.norm())
    bias, low, high = debiased_norm(torch.stack([m.gradient_D for m in sampled]) - target_D)
    variance = sum(m.variance for m in sampled) / batches / scale**2
    return bias / scale, low / scale, high / scale, variance


def lambda_study(
    *, lengths: Sequence[int] = LENGTHS, staleness: Sequence[float] = STALENESS, seeds: int = 5
) -> pd.DataFrame:
    """The variance of per-decision ``k_lambda`` at 0 (k1), 1 (k3) and at the lambda of least variance.

    Unbiased for every lambda, and the variance is a parabola in lambda, so three points give the best.
    """
    import pandas as pd

    rows = []
    for setting, facts in random_settings(lengths, staleness, seeds):
        size = float(target_gradient(setting, "sequence_reverse").square().sum())

        def variance(lam: float, setting: Instance = setting, size: float = size) -> float:
            term = KLTerm("k_lambda", placement="loss", correction="prefix", options={"lam": lam})
            return exact_moments(setting, terms_loss([term])).variance / size

        at_0, at_1, at_2 = variance(0.0), variance(1.0), variance(2.0)
        curvature = (at_2 - 2 * at_1 + at_0) / 2
        best = 1 - (at_2 - at_0) / (4 * curvature)
        rb = exact_moments(setting, terms_loss([KLTerm("exact", correction="prefix_previous")])).variance / size
        rows.append({**facts, "k1": at_0, "k3": at_1, "lambda": best, "best": variance(best), "rb": rb})
    return pd.DataFrame(rows)


HEADLINE = (
    "sequence IS, k1 total",
    "per decision, k1",
    "per decision, k3 differentiated",
    "RB per decision",
    "RB + own baseline",
    "RB, prefix truncated at 8 + own baseline",
    "RB, self-normalized over the group",
    "RB without prefix ratio",
    "token ratio x k3",
    "bare k3 in loss",
)
"""What the figures and the short table show; the CSV has every candidate."""

YARDSTICKS = ("doubly robust", "truncated at 2 then corrected", "value only")
"""Prefixes of candidates that need a value of every next token: shown, never recommended."""


def error_table(frame: pd.DataFrame, samples: int, candidates: Sequence[str] = HEADLINE) -> pd.DataFrame:
    """Mean error over seeds at ``samples`` completions: one row per candidate, one column per length and staleness."""
    chosen = frame[frame.candidate.isin(candidates)]
    table = chosen.pivot_table(
        index="candidate", columns=["length", "staleness"], values=f"error_{samples}", aggfunc="mean"
    )
    table.columns = [f"T={length}, {staleness:g}" for length, staleness in table.columns]
    return table.reindex(list(candidates)).reset_index()


def regret_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Per candidate and sample size: error over the least error of any trainable candidate, mean and worst instance."""
    import pandas as pd

    trainable = frame[~frame.candidate.str.startswith(YARDSTICKS)]
    keys = ["length", "staleness", "seed"]
    columns: dict[str, Any] = {}
    for n in SAMPLES:
        least = trainable.groupby(keys)[f"error_{n}"].transform("min")
        regret = (trainable[f"error_{n}"] / least).groupby(trainable.candidate)
        columns[f"mean, N={n}"] = regret.mean()
        columns[f"worst, N={n}"] = regret.max()
    table = pd.DataFrame(columns)
    return table.sort_values("mean, N=1024").reset_index()


def setting_table(frame: pd.DataFrame) -> pd.DataFrame:
    """What the instances are: effective sample share and KL (nats), means and ranges over seeds."""
    once = frame.drop_duplicates(["length", "staleness", "seed"])
    grouped = once.groupby(["length", "staleness"]).agg(
        ess=("ess", "mean"), ess_low=("ess", "min"), ess_high=("ess", "max"), kl=("kl", "mean")
    )
    return grouped.reset_index()


def plot_errors(frame: pd.DataFrame, path: Path, *, samples: int = 1024) -> None:
    """Error at equal samples against staleness, one panel per length; means over seeds."""
    lengths = sorted(frame.length.unique())
    with figure(path, 1, len(lengths), (4.2 * len(lengths), 5.2), dpi=120, sharey=True) as (drawing, panels):
        for axes, length in zip(panels[0], lengths, strict=True):
            for color, name in zip(tab10(), HEADLINE, strict=False):
                rows = frame[(frame.length == length) & (frame.candidate == name)]
                mean = rows.groupby("staleness")[f"error_{samples}"].mean()
                axes.plot(mean.index, mean, marker=".", color=color, label=name)
            axes.set_yscale("log")
            axes.set_title(f"{length} tokens")
            axes.set_xlabel("staleness (logit noise)")
            axes.grid(alpha=0.3)
        panels[0][0].set_ylabel(f"error of the gradient at N = {samples}, relative to |G*|")
        legend_below(drawing, panels[0][0], 4)


def plot_variance(frame: pd.DataFrame, path: Path) -> None:
    """Left: variance against length at one staleness. Right: variance against the effective sample share."""
    with figure(path, 1, 2, (13, 5.4), dpi=120) as (drawing, panels):
        left, right = panels[0]
        middle = sorted(frame.staleness.unique())[-2]
        for color, name in zip(tab10(), HEADLINE, strict=False):
            rows = frame[frame.candidate == name]
            grouped = rows[rows.staleness == middle].groupby("length").variance
            left.plot(grouped.mean().index, grouped.mean(), marker="o", color=color, label=name)
            left.fill_between(grouped.min().index, grouped.min(), grouped.max(), color=color, alpha=0.10)
            right.scatter(rows.ess, rows.variance, color=color, s=14, label=name)
        left.set_title(f"Against length, staleness {middle:g}")
        left.set_xlabel("length (tokens)")
        right.set_title("Against the effective sample share, every instance")
        right.set_xlabel("effective sample size / samples (sequence ratio)")
        right.set_xscale("log")
        for axes in (left, right):
            axes.set_yscale("log")
            axes.set_ylabel("trace variance of one completion / |G*|²")
            axes.grid(alpha=0.3)
        legend_below(drawing, left, 4)


def plot_knobs(frame: pd.DataFrame, path: Path, *, samples: int = 1024) -> None:
    """The bias-variance knobs: error against the cap, by kind of bound, at the longest length."""
    longest = frame.length.max()
    stale = [value for value in sorted(frame.staleness.unique()) if value > 0]
    kinds = {
        "prefix truncated": "RB, prefix truncated at ",
        "each ratio truncated": "RB, each ratio truncated at ",
        "masked": "RB, masked above ",
    }
    with figure(path, 1, len(stale), (4.0 * len(stale), 4.8), dpi=120, sharey=True) as (drawing, panels):
        for axes, value in zip(panels[0], stale, strict=True):
            here = frame[(frame.length == longest) & (frame.staleness == value)]
            for kind, prefix in kinds.items():
                mask = here.candidate.str.startswith(prefix) & ~here.candidate.str.contains("baseline")
                caps = here[mask].assign(cap=here[mask].candidate.str.removeprefix(prefix).astype(float))
                mean = caps.groupby("cap")[f"error_{samples}"].mean()
                axes.plot(mean.index, mean, marker="o", label=kind)
            for name, style in (("RB per decision", "--"), ("RB without prefix ratio", ":")):
                level = here[here.candidate == name][f"error_{samples}"].mean()
                axes.axhline(level, color="black", linestyle=style, label=name)
            axes.set_title(f"staleness {value:g}, {longest} tokens")
            axes.set_xlabel("cap")
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.grid(alpha=0.3)
        panels[0][0].set_ylabel(f"error at N = {samples}, relative to |G*|")
        legend_below(drawing, panels[0][0], 5)


def write_report(frame: pd.DataFrame, lambdas: pd.DataFrame, out: Path, *, command: str) -> None:
    """Data, figures and a README with every table into ``out``; ``command`` is what regenerates them."""
    save_csv(frame, out / "open_problem.csv")
    save_csv(lambdas, out / "k_lambda.csv")
    plot_errors(frame, out / "error.png")
    plot_variance(frame, out / "variance.png")
    plot_knobs(frame, out / "knobs.png")
    best = lambdas.groupby(["length", "staleness"])[["k1", "k3", "lambda", "best", "rb"]].mean().reset_index()
    longest = frame[frame.length == frame.length.max()].groupby(["staleness", "candidate"])
    numbers = longest[["bias", "variance", *(f"error_{n}" for n in SAMPLES)]].mean().reset_index()
    parts = [
        "# The open problem: a sequence-level reverse-KL gradient from off-policy samples",
        f"Regenerated by `{command}`. Binary policies with shared parameters, {frame.seed.nunique()} seeds each; the "
        "error at N is `sqrt(bias^2 + variance / N)` over the norm of the true gradient G*. What it means: "
        "docs/open_problem.md.",
        "![error](error.png)",
        "![variance](variance.png)",
        "![knobs](knobs.png)",
        "## The instances",
        markdown(setting_table(frame)),
        "## Error at N = 1024, mean over seeds (columns: length, staleness)",
        markdown(error_table(frame, 1024)),
        "## Error at N = 64",
        markdown(error_table(frame, 64)),
        "## Regret: error over the least error of any trainable candidate",
        markdown(regret_table(frame)),
        "## k_lambda per decision: variance at lambda 0 (k1), 1 (k3) and the best, beside RB",
        markdown(best),
        "## Every candidate: bias, variance, errors, means over seeds at the longest length",
        markdown(numbers),
    ]
    (out / "README.md").write_text("\n\n".join(parts) + "\n")
