"""The open problem of 2512.21852: a sequence-level reverse-KL gradient from off-policy samples, and what it costs.

Every candidate is judged by its error at equal samples, ``sqrt(bias^2 + variance / N)`` over the norm of the true
gradient. Candidates without a group are enumerated; those that couple the completions of a group (baselines,
self-normalization) are sampled, with intervals over independent batches; doubly robust forms need a value of every
next token and are enumerated from tables of their own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kl_comedy.kl import KLTerm
from kl_comedy.kl.corrections import weights_of
from kl_comedy.kl.oracle import (
    Instance,
    InstanceSettings,
    Loss,
    Rows,
    Tree,
    effective_sample_share,
    exact_moments,
    exact_moments_by_loss,
    sampled_moments,
    sequence_kl,
    target_gradient,
    terms_loss,
)
from kl_comedy.kl.oracle.gradients import ScoreTables, score_tables
from kl_comedy.results.figures import legend_below, plain_ticks
from kl_comedy.results.looks import other_look
from research.studies.bias_variance import debiased_norm, relative_figures
from research.studies.pages import (
    Looks,
    by_length_and_staleness,
    figure,
    lines_by_length,
    looks_of,
    read_frame,
    save_frame,
    write_page,
)

if TYPE_CHECKING:
    import pandas as pd


VALUE_ERROR = 0.5
"""Relative noise of the imperfect value."""


@dataclass(frozen=True, kw_only=True)
class DoublyRobust:
    """A doubly robust candidate: its value ``[N, V]`` and the caps of its two ratios; a cap of None never acts."""

    value_NV: Tensor
    prefix_cap: float | None = None
    correction_cap: float | None = None
    """0 leaves the correction out."""


def doubly_robust_moments(setting: Instance, target_D: Tensor) -> dict[str, tuple[float, float]]:
    """By candidate: relative bias and relative trace variance, enumerated.

    With a value ``Q(h, v)`` of the KL still to come after token ``v`` (nats), the future part of the gradient is
    ``grad sum_v pi(v|h) Q(h, v)`` summed over the vocabulary, plus the ratio-weighted score of the error of ``Q``:

        sum_t W_{t-1} (grad KL_t + grad sum_v pi(v|h_t) Q(h_t, v)) + sum_t W_t s_t (F_t - Q(h_t, y_t)),

    unbiased for any ``Q``. Truncating the ratio of the second sum only (as ACER does, 1611.01224) trades its variance
    for a bias that vanishes with the error of ``Q``. A language model would need ``Q`` for every next token, so these
    show what a learned value could bring; they are not estimators one can train with today.
    """
    exact_NV = _future_kl(setting)
    # A seed of its own: the error of a value is independent of the policy.
    generator = torch.Generator().manual_seed(77)
    noisy_NV = exact_NV * (1 + VALUE_ERROR * torch.randn(exact_NV.shape, generator=generator, dtype=torch.float64))
    candidates = {
        "doubly robust, exact value": DoublyRobust(value_NV=exact_NV),
        "doubly robust, value off by 50%": DoublyRobust(value_NV=noisy_NV),
        "truncated at 2 then corrected, exact value": DoublyRobust(
            value_NV=exact_NV, prefix_cap=2.0, correction_cap=2.0
        ),
        "truncated at 2 then corrected, value off by 50%": DoublyRobust(
            value_NV=noisy_NV, prefix_cap=2.0, correction_cap=2.0
        ),
        "value only, off by 50%, truncated at 2": DoublyRobust(value_NV=noisy_NV, prefix_cap=2.0, correction_cap=0.0),
    }
    probability_B = setting.probability(setting.tree.all)
    target_square = float(target_D.square().sum())
    moments = {}
    for name, candidate in candidates.items():
        gradient_BD = _doubly_robust(setting, candidate)
        mean_D = probability_B @ gradient_BD
        # E|g|^2 - |E g|^2
        variance = float(probability_B @ gradient_BD.square().sum(-1)) - float(mean_D.square().sum())
        bias = float((mean_D - target_D).norm()) / target_square**0.5
        moments[name] = (bias, variance / target_square)
    return moments


def _future_kl(setting: Instance) -> Tensor:
    """``Q[h, v]``: expected KL (nats) of the prefixes after token v, by recursion from the leaves."""
    tree = setting.tree
    p_NV = setting.policy_logp().exp()
    # The KL of a prefix itself; the recursion adds what is expected after it.
    onward_N = setting.kl_N[0].clone()
    value_NV = torch.zeros_like(p_NV)
    # Token 0 ends a completion where the tree has ends, and nothing follows it.
    continuing = slice(1, None) if tree.ends else slice(None)
    for depth in reversed(range(tree.length - 1)):
        level = slice(tree.first(depth), tree.first(depth + 1))
        next_level = slice(tree.first(depth + 1), tree.first(depth + 2))
        value_NV[level, continuing] = onward_N[next_level].reshape(-1, tree.branching)
        onward_N[level] += (p_NV[level] * value_NV[level]).sum(-1)
    return value_NV


def _doubly_robust(setting: Instance, candidate: DoublyRobust) -> Tensor:
    """The gradient of each completion ``[B, D]``, by the formula of :func:`doubly_robust_moments`."""
    tables = score_tables(setting)
    assert isinstance(tables, ScoreTables)
    rows = setting.tree.all
    prefix_BT = rows.prefix_BT
    token_BT = rows.token_BT
    mask_BT = rows.mask_BT
    log_ratio_NV = setting.policy_logp() - setting.recorded_logp_NV
    delta_BT = torch.where(mask_BT, log_ratio_NV[prefix_BT, token_BT], 0.0)

    # sum_t W_{t-1} (grad KL_t + grad sum_v pi(v|h_t) Q(h_t, v))
    before_BT = weights_of("prefix_previous", delta_BT, cap=candidate.prefix_cap) * mask_BT
    all_actions_ND = torch.einsum("nv,nvd->nd", tables.p_NV * candidate.value_NV, tables.score_NVD)
    expected_ND = tables.reverse_ND + all_actions_ND
    gradient_BD = torch.einsum("bt,btd->bd", before_BT, expected_ND[prefix_BT])
    if candidate.correction_cap == 0.0:
        return gradient_BD

    # sum_t W_t s_t (F_t - Q(h_t, y_t)); each later cost brings its own ratio, so that only Q is weighted by W_t.
    cost_BT = before_BT * setting.kl_N[0][prefix_BT] * mask_BT
    future_BT = _sum_after(cost_BT)
    up_to_BT = weights_of("prefix", delta_BT, cap=candidate.correction_cap) * mask_BT
    error_BT = (future_BT - up_to_BT * candidate.value_NV[prefix_BT, token_BT]) * mask_BT
    return gradient_BD + torch.einsum("bt,btd->bd", error_BT, tables.score_NVD[prefix_BT, token_BT])


def _sum_after(values_BT: Tensor) -> Tensor:
    """The sum over the tokens after each token."""
    from_token_BT = values_BT.flip(-1).cumsum(-1).flip(-1)
    return from_token_BT - values_BT


LENGTHS = (4, 8, 12, 16)
STALENESS = (0.0, 0.1, 0.3, 0.6, 1.0)
"""Standard deviation of the logit noise between the policy and its sampler."""
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

    # RB: Rao-Blackwellized, the exact KL of each prefix (2506.09477).
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

        # The mean ratio of the group at each token.
        _, index_B = torch.unique(rows.group_B, return_inverse=True)
        groups = int(index_B.max()) + 1
        sums_GT = weight_BT.new_zeros(groups, weight_BT.shape[1]).index_add_(0, index_B, weight_BT)
        size_G = torch.bincount(index_B, minlength=groups)
        weight_BT = weight_BT * size_G[index_B, None] / sums_GT[index_B]

        # Score function for the KL of later prefixes, derivative for that of the token's own prefix.
        future_BT = _sum_after(weight_BT * rows.reverse_kl_BT.detach())
        return torch.where(rows.mask_BT, future_BT * rows.logp_BT + weight_BT * rows.reverse_kl_BT, 0.0)

    return loss


def errors_at(samples: Sequence[int], bias: float, variance: float) -> dict[str, float]:
    """``error_N``: the error of a mean over N completions, ``sqrt(bias^2 + variance / N)``."""
    return {f"error_{n}": math.sqrt(bias**2 + variance / n) for n in samples}


def random_settings(
    lengths: Sequence[int], staleness: Sequence[float], seeds: int
) -> Iterator[tuple[Instance, dict[str, Any]]]:
    """Seeded binary settings with what describes them: length, staleness, seed, ESS share, KL in nats."""
    for length, logit_noise, seed in itertools.product(lengths, staleness, range(seeds)):
        tree = Tree.build(vocabulary=2, length=length, ends=False)
        settings = InstanceSettings(
            regime="off_policy",
            seed=seed,
            parameters=PARAMETERS,
            distance=DISTANCE,
            staleness=logit_noise,
        )
        setting = Instance.random(tree, settings)
        facts = {
            "length": length,
            "staleness": logit_noise,
            "seed": seed,
            "ess": effective_sample_share(setting),
            "kl": sequence_kl(setting),
        }
        yield setting, facts


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What was measured of one candidate in one setting, relative to the norm (square) of the true gradient.

    ``bias_low`` and ``bias_high`` bound a sampled bias; for an enumerated one they equal it.
    """

    method: str
    bias: float
    bias_low: float
    bias_high: float
    variance: float

    @classmethod
    def enumerated(cls, bias: float, variance: float) -> Figures:
        return cls(method="enumerated", bias=bias, bias_low=bias, bias_high=bias, variance=variance)


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

    ``batches`` of ``batch`` completions are drawn for each candidate that is sampled. ``done`` is called after each
    setting.
    """
    import pandas as pd

    losses = {name: terms_loss([term]) for name, term in exact_candidates().items()}
    rows: list[dict[str, Any]] = []
    for setting, facts in random_settings(lengths, staleness, seeds):
        target_D = target_gradient(setting, "sequence_reverse")
        measured: dict[str, Figures] = {}
        for name, moments in exact_moments_by_loss(setting, losses).items():
            relative = relative_figures(moments, target_D)
            measured[name] = Figures.enumerated(relative["bias"], relative["variance"])
        for name, (bias, variance) in doubly_robust_moments(setting, target_D).items():
            measured[name] = Figures.enumerated(bias, variance)
        for name, loss in grouped_candidates().items():
            # A generator per candidate with the same seed: all candidates see the same completions.
            generator = torch.Generator().manual_seed(1000 + int(facts["seed"]))
            measured[name] = _sampled_figures(setting, loss, target_D, batches, batch, generator)

        for name, figures in measured.items():
            errors = errors_at(SAMPLES, figures.bias, figures.variance)
            rows.append(
                {
                    **facts,
                    "candidate": name,
                    "method": figures.method,
                    "bias": figures.bias,
                    "bias_low": figures.bias_low,
                    "bias_high": figures.bias_high,
                    "variance": figures.variance,
                    **errors,
                }
            )
        done()
    return pd.DataFrame(rows)


def _sampled_figures(
    setting: Instance, loss: Loss, target_D: Tensor, batches: int, batch: int, generator: torch.Generator
) -> Figures:
    """Bias and variance from independent batches; enumeration would need every group of completions."""
    sampled = [
        sampled_moments(setting, loss, samples=batch, group_size=GROUP, generator=generator) for _ in range(batches)
    ]
    errors_RD = torch.stack([moments.gradient_D for moments in sampled]) - target_D
    bias, low, high = debiased_norm(errors_RD)
    variance = sum(moments.variance for moments in sampled) / batches
    scale = float(target_D.norm())
    return Figures(
        method="sampled",
        bias=bias / scale,
        bias_low=low / scale,
        bias_high=high / scale,
        variance=variance / scale**2,
    )


def lambda_study(
    *, lengths: Sequence[int] = LENGTHS, staleness: Sequence[float] = STALENESS, seeds: int = 5
) -> pd.DataFrame:
    """The variance of per-decision ``k_lambda`` at 0 (k1), 1 (k3) and at the lambda of least variance.

    Unbiased for every lambda, and the variance is a parabola in lambda, so three points give the best.
    """
    import pandas as pd

    rows = []
    for setting, facts in random_settings(lengths, staleness, seeds):
        target_square = float(target_gradient(setting, "sequence_reverse").square().sum())
        at_0 = _lambda_variance(setting, 0.0) / target_square
        at_1 = _lambda_variance(setting, 1.0) / target_square
        at_2 = _lambda_variance(setting, 2.0) / target_square
        # The vertex of the parabola through the three points.
        curvature = (at_2 - 2 * at_1 + at_0) / 2
        best = 1 - (at_2 - at_0) / (4 * curvature)
        at_best = _lambda_variance(setting, best) / target_square

        exact_loss = terms_loss([KLTerm("exact", correction="prefix_previous")])
        exact = exact_moments(setting, exact_loss).variance / target_square
        rows.append({**facts, "k1": at_0, "k3": at_1, "lambda": best, "best": at_best, "rb": exact})
    return pd.DataFrame(rows)


def _lambda_variance(setting: Instance, lam: float) -> float:
    """The trace variance of per-decision ``k_lambda``."""
    term = KLTerm("k_lambda", placement="loss", correction="prefix", options={"lam": lam})
    return exact_moments(setting, terms_loss([term])).variance


def lognormal_ratios(
    kls: Sequence[float] = (1e-4, 1e-3), lengths: Sequence[int] = (256, 1000, 4000), cap: float = 8.0
) -> pd.DataFrame:
    """Prefix ratios along a completion whose token ratios are independent and lognormal, in closed form.

    With ``k = KL(pi || mu)`` nats per token, ``log W_t`` has mean ``-k t`` and variance ``2 k t`` under ``mu``. So
    ``E[W]^2 / E[W^2] = exp(-2 k t)``, and ``E[min(W, c)] = N((log c - k t) / s) + c N(-(log c + k t) / s)`` with
    ``s^2 = 2 k t``. Columns: effective sample share after t tokens, what a cap leaves of the mean of 1 there, and on
    average over the tokens up to there.
    """
    import pandas as pd

    rows = []
    for kl, length in itertools.product(kls, lengths):
        tokens_T = torch.arange(1, length + 1)
        mean_T = _mean_capped(kl, tokens_T, cap)
        rows.append(
            {
                "KL per token": f"{kl:g}",
                "tokens": length,
                "effective sample share": math.exp(-2 * kl * length),
                f"mean up to {cap:g}": float(mean_T[-1]),
                "over the completion": float(mean_T.mean()),
            }
        )
    return pd.DataFrame(rows)


def _mean_capped(kl: float, tokens_T: Tensor, cap: float) -> Tensor:
    """``E[min(W_t, cap)]`` for each t in ``tokens_T``, by the formula of :func:`lognormal_ratios`."""
    drift_T = (kl * tokens_T).double()  # k t
    spread_T = (2 * drift_T).sqrt()  # s
    bound = math.log(cap)
    below_cap_T: Tensor = torch.special.ndtr((bound - drift_T) / spread_T)
    above_cap_T: Tensor = torch.special.ndtr(-(bound + drift_T) / spread_T)
    return below_cap_T + cap * above_cap_T


# The names of candidates are stored in open_problem.parquet, and figures and tables select by them.
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
"""Candidates of the figures and the short table; the CSV has every candidate."""

YARDSTICKS = ("doubly robust", "truncated at 2 then corrected", "value only")
"""Beginnings of the names of candidates that need a value of every next token: shown, never recommended."""


def error_table(frame: pd.DataFrame, samples: int) -> pd.DataFrame:
    """Mean error over seeds at ``samples`` completions, of :data:`HEADLINE`."""
    return by_length_and_staleness(frame, f"error_{samples}", HEADLINE, "mean")


def regret_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Per candidate and sample size: error over the least error of any trainable candidate, mean and worst instance."""
    import pandas as pd

    # Per instance, because errors differ by decades between instances and the hardest would decide a mean of errors.
    trainable = frame[~frame.candidate.str.startswith(YARDSTICKS)]
    keys = ["length", "staleness", "seed"]
    columns: dict[str, Any] = {}
    for n in SAMPLES:
        least = trainable.groupby(keys)[f"error_{n}"].transform("min")
        regret = (trainable[f"error_{n}"] / least).groupby(trainable.candidate)
        columns[f"mean, N={n}"] = regret.mean()
        columns[f"worst, N={n}"] = regret.max()
    return pd.DataFrame(columns).sort_values("mean, N=1024").reset_index()


def draw(out: Path) -> None:
    """The figures, from the data in ``out``."""

    frame = read_frame(out / "open_problem.parquet")
    looks = looks_of(HEADLINE)
    label = {"error_1024": "error of the gradient at N = 1024,\nrelative to |G*| (log axis)"}
    lines_by_length(frame, out / "error.svg", looks, label, "mean")
    plot_variance(frame, looks, out / "variance.svg")
    plot_knobs(frame, out / "knobs.svg")


def plot_variance(frame: pd.DataFrame, looks: Looks, path: Path) -> None:
    """Left: variance against length at one staleness. Right: variance against the effective sample share."""
    with figure(path, 1, 2, 2.8, sharey=True) as (drawing, ((left, right),)):
        middle = sorted(frame.staleness.unique())[-2]
        for name, style in looks.items():
            rows = frame[frame.candidate == name]
            variances = rows[rows.staleness == middle].groupby("length").variance
            ends = variances.agg(["min", "max"])
            means = variances.agg(lambda values: math.exp(values.map(math.log).mean()))
            left.plot(means.index, means, label=name, **style)
            left.fill_between(ends.index, ends["min"], ends["max"], color=style["color"], alpha=0.08, linewidth=0)
            right.plot(rows.ess, rows.variance, **style | {"linestyle": "none", "markersize": 2.5, "alpha": 0.7})
        left.set(title=f"staleness {middle:g}", xlabel="length (tokens)", yscale="log")
        left.set_ylabel("variance of one completion's gradient\n/ |G*|² (log axis)")
        right.set(title="every instance", xscale="log")
        right.set_xlabel("effective sample size / samples\n(sequence ratio, log axis)")
        plain_ticks(left.yaxis)
        plain_ticks(right.xaxis)
        legend_below(drawing, f"left: geometric mean of {frame.seed.nunique()} seeds, from the least to the greatest")


def plot_knobs(frame: pd.DataFrame, path: Path) -> None:
    """The bias-variance knobs: error against the cap, by kind of bound, at the longest length."""
    longest = frame.length.max()
    # On-policy every ratio is 1 and no bound acts.
    stale = [value for value in sorted(frame.staleness.unique()) if value > 0]
    with figure(path, 1, len(stale), 2.2, sharey=True) as (drawing, (panels,)):
        for axes, value in zip(panels, stale, strict=True):
            rows = frame[(frame.length == longest) & (frame.staleness == value)]
            # From look 2 on: the first is that of the exact KL per decision, which is drawn too.
            for number, kind in enumerate(("prefix truncated at", "each ratio truncated at", "masked above")):
                cap = rows.candidate.str.extract(rf"^RB, {kind} ([\d.]+)$", expand=False).astype(float)
                mean = rows.assign(cap=cap).groupby("cap").error_1024.mean()
                axes.plot(mean.index, mean, label=kind.rsplit(" ", 1)[0], **other_look(2 + number).of_line())
            for name, style in looks_of(("RB per decision", "RB without prefix ratio")).items():
                level = rows[rows.candidate == name].error_1024.mean()
                axes.axhline(level, color=style["color"], linestyle=style["linestyle"], linewidth=0.9, label=name)
            axes.set(title=f"staleness {value:g}", xlabel="cap of the ratio\n(log axis)", yscale="log")
            axes.set_xscale("log", base=2)
            plain_ticks(axes.xaxis)
        panels[0].set_ylabel(f"error at N = 1024, relative\nto |G*|, {longest} tokens (log axis)")
        plain_ticks(panels[0].yaxis)
        legend_below(drawing, f"mean of {frame.seed.nunique()} seeds")


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two candidates by one figure: the ratio of the first to the second."""

    words: str
    figure: str
    first: str
    second: str
    staleness: Sequence[float] | None = None
    """Only at these; None: at all."""


COMPARISONS = (
    Comparison(
        words="variance: k3 with per-decision ratios, over the exact KL (rb/per_decision)",
        figure="variance",
        first="per decision, k3 differentiated",
        second="RB per decision",
    ),
    Comparison(
        words="variance: k1 with the sequence ratio, over the exact KL",
        figure="variance",
        first="sequence IS, k1 total",
        second="RB per decision",
    ),
    Comparison(
        words="error: the exact KL with an own baseline, over without",
        figure="error_1024",
        first="RB + own baseline",
        second="RB per decision",
    ),
    Comparison(
        words="error: k1 with an own baseline, over without",
        figure="error_1024",
        first="per decision, k1 + own baseline",
        second="per decision, k1",
    ),
    Comparison(
        words="error: a cap of 8, over none",
        figure="error_1024",
        first="RB, prefix truncated at 8",
        second="RB per decision",
    ),
    Comparison(
        words="error: a cap of 2, over none",
        figure="error_1024",
        first="RB, prefix truncated at 2",
        second="RB per decision",
    ),
    Comparison(
        words="bias: ratios above 4 masked, over truncated at 4 (stale samples)",
        figure="bias",
        first="RB, masked above 4",
        second="RB, prefix truncated at 4",
        staleness=(0.6, 1.0),
    ),
    Comparison(
        words="error: each ratio truncated at 4 (V-trace), over the product at 8",
        figure="error_1024",
        first="RB, each ratio truncated at 4",
        second="RB, prefix truncated at 8",
    ),
    Comparison(
        words="error: a window of 4 ratios, over a cap of 8 (stale samples)",
        figure="error_1024",
        first="RB, window of 4",
        second="RB, prefix truncated at 8",
        staleness=(0.3, 0.6, 1.0),
    ),
    Comparison(
        words="error: self-normalized with a cap of 4, over a cap of 4 and an own baseline",
        figure="error_1024",
        first="RB, truncated at 4, self-normalized",
        second="RB, prefix truncated at 4 + own baseline",
    ),
    Comparison(
        words="error: doubly robust with exact values, over the exact KL (on-policy)",
        figure="error_1024",
        first="doubly robust, exact value",
        second="RB per decision",
        staleness=(0.0,),
    ),
    Comparison(
        words="error: doubly robust with exact values, over a cap of 8 and an own baseline (stale samples)",
        figure="error_1024",
        first="doubly robust, exact value",
        second="RB, prefix truncated at 8 + own baseline",
        staleness=(0.3, 0.6, 1.0),
    ),
)
"""What results/open_problem/details.md says in words."""


def comparison_table(frame: pd.DataFrame, shortest: int = 8) -> pd.DataFrame:
    """Each of :data:`COMPARISONS`: the median over seeds of its ratio, in the settings where it is least and greatest.

    From completions of ``shortest`` tokens on: in shorter ones there is little to tell apart.
    """
    import pandas as pd

    long_enough = frame[frame.length >= shortest]
    rows = []
    for comparison in COMPARISONS:
        figures = long_enough
        if comparison.staleness is not None:
            figures = figures[figures.staleness.isin(comparison.staleness)]
        by_candidate = figures.pivot_table(
            index=["length", "staleness", "seed"], columns="candidate", values=comparison.figure
        )
        ratio = by_candidate[comparison.first] / by_candidate[comparison.second]
        medians = ratio.groupby(["length", "staleness"]).median()
        least_length, least_staleness = medians.idxmin()
        greatest_length, greatest_staleness = medians.idxmax()
        rows.append(
            {
                "comparison": comparison.words,
                "least": medians.min(),
                "where least": f"{least_length} tokens, staleness {least_staleness:g}",
                "greatest": medians.max(),
                "where greatest": f"{greatest_length} tokens, staleness {greatest_staleness:g}",
            }
        )
    return pd.DataFrame(rows)


def write_report(frame: pd.DataFrame, lambdas: pd.DataFrame, out: Path, *, command: str) -> None:
    """Write data, figures and a README with every table into ``out``; ``command`` is what regenerates them."""

    save_frame(frame, out / "open_problem.parquet")
    save_frame(lambdas, out / "k_lambda.parquet")
    draw(out)
    # Read back: the page shows the six digits of the files, from which it can be printed again.
    stored = read_frame(out / "open_problem.parquet")
    stored_lambdas = read_frame(out / "k_lambda.parquet")
    write_page(out, parts(stored, stored_lambdas, command=command))


def parts(frame: pd.DataFrame, lambdas: pd.DataFrame, *, command: str) -> list[Any]:
    """Texts and tables of the README, from the frames as they are stored."""
    keys = ["length", "staleness"]
    instances = frame.drop_duplicates([*keys, "seed"]).groupby(keys)
    described = instances.agg(ess=("ess", "mean"), ess_low=("ess", "min"), ess_high=("ess", "max"), kl=("kl", "mean"))
    best = lambdas.groupby(keys)[["k1", "k3", "lambda", "best", "rb"]].mean().reset_index()
    errors = [f"error_{n}" for n in SAMPLES]
    longest = frame[frame.length == frame.length.max()].groupby(["staleness", "candidate"])
    numbers = longest[["bias", "variance", *errors]].mean().reset_index()
    return [
        "# The open problem: a sequence-level reverse-KL gradient from off-policy samples",
        "<!-- python research/scripts/stored_tables.py open_problem -->",
        f"Regenerated by `{command}`. Binary policies with shared parameters, {frame.seed.nunique()} seeds each; the "
        "error at N is `sqrt(bias^2 + variance / N)` over the norm of the true gradient G*. What it means: "
        "docs/open_problem.md.",
        "![error](error.svg)",
        "![variance](variance.svg)",
        "![knobs](knobs.svg)",
        "## The instances",
        described.reset_index(),
        "## Error at N = 1024, mean over seeds (columns: length, staleness)",
        error_table(frame, 1024),
        "## Error at N = 64",
        error_table(frame, 64),
        "## Prefix ratios of independent lognormal token ratios, in closed form",
        lognormal_ratios(),
        "## Regret: error over the least error of any trainable candidate",
        regret_table(frame),
        "## k_lambda per decision: variance at lambda 0 (k1), 1 (k3) and the best, beside RB",
        best,
        "## Every candidate: bias, variance, errors, means over seeds at the longest length",
        numbers,
    ]
