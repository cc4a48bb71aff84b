"""Draw docs/pull.svg, the force of every estimator by a token's log-ratio: `python research/scripts/pull_figure.py`.

In the mean of fresh samples it is that of a token that is rare under policy and reference, from the oracle: the
expected gradient of a policy of two outcomes, enumerated. Per sample it is read from the surrogate of one drawn token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kl_comedy.kl import KLTerm
from kl_comedy.kl.oracle import Instance, InstanceSettings, Tree, expected_gradient
from kl_comedy.kl.pull import force
from kl_comedy.registry import ESTIMATORS
from kl_comedy.results.figures import Look, look, new_figure, paper_style, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OUT = Path(__file__).resolve().parents[2] / "docs" / "pull.svg"
RARE = 1e-9
"""The reference's probability of the token: so small that no token but this one changes."""
LOW, HIGH = -6.0, 13.0
"""Nats of the axis: beyond the place where verl's clamp of k3 ends its force."""
STEP = 0.125
SAME = 1e-5
"""Two curves whose largest difference, over their size, is below this are one line."""
VERL = {"input_clamp": 20.0, "output_clamp": 10.0}

Curves = dict[str, Tensor]


def terms_of(placement: str) -> dict[str, KLTerm]:
    """Every built-in estimator in the loss or in the reward; in the loss also k3 times the ratio, and with clamps."""
    of_tokens = {}
    of_distributions = {}
    for entry in ESTIMATORS:
        if not entry.origin.startswith("kl_comedy."):
            continue
        term = KLTerm(entry.name, placement=placement)
        name = entry.name
        if "lam" in term.estimator_options:
            name += f" with lam {term.estimator_options['lam']:g}"
        if term.needs == "log_ratio":
            of_tokens[name] = term
        else:
            of_distributions[name] = term
    if placement == "loss":
        of_tokens["k3 clamped as in verl"] = KLTerm("k3", placement="loss", **VERL)
        of_tokens["k3 × token ratio"] = KLTerm("k3", placement="loss", correction="token")
    return of_tokens | of_distributions


def looks() -> dict[str, Look]:
    """The look of each name, the same in all panels."""
    return {name: look(number) for number, name in enumerate(terms_of("loss"))}


def distances() -> Tensor:
    """The log-ratios of the axis (nats), ``[N]``."""
    return torch.arange(LOW, HIGH + STEP / 2, STEP, dtype=torch.float64)


def in_the_mean(term: KLTerm, distance_N: Tensor) -> Tensor:
    """The force on a rare token, ``[N]`` in beta, per draw of a token that is not below the reference."""
    forces = []
    for distance in distance_N.tolist():
        reference = torch.tensor([RARE, 1 - RARE], dtype=torch.float64)
        p = RARE * torch.tensor(distance, dtype=torch.float64).exp()
        policy = torch.stack([p, 1 - p])
        instance = _two_outcomes(policy.log(), reference.log())
        gradient_D = expected_gradient(instance, [term]).gradient_D
        # By the log-odds: half the difference of the two logits' derivatives.
        by_odds = (gradient_D[0] - gradient_D[1]) / 2
        forces.append(by_odds / torch.maximum(p, reference[0]))
    return torch.stack(forces)


def _two_outcomes(logp_V: Tensor, ref_logp_V: Tensor) -> Instance:
    """One token of two outcomes, sampled from the policy."""
    tree = Tree.build(vocabulary=2, length=1, ends=False)
    instance = Instance.random(tree, InstanceSettings(regime="on_policy", seed=0))
    return dataclasses.replace(
        instance,
        theta_D=logp_V,
        ref_logp_NV=ref_logp_V[None],
        sampler_logp_NV=logp_V[None],
        recorded_logp_NV=logp_V[None],
    )


def mean_curves(placement: str) -> Curves:
    """In the mean of fresh samples, by name."""
    return {name: in_the_mean(term, distances()) for name, term in terms_of(placement).items()}


def sample_curves(placement: str) -> Curves:
    """Of one drawn token, by name: estimators of the token's log-ratio have such a force."""
    terms = {name: term for name, term in terms_of(placement).items() if term.needs == "log_ratio"}
    return {name: force(term, distances()) for name, term in terms.items()}


def grouped(curves: Mapping[str, Tensor]) -> Curves:
    """The curves with those that coincide under one name."""
    groups: list[tuple[list[str], Tensor]] = []
    for name, curve_N in curves.items():
        for names, other_N in groups:
            if float((curve_N - other_N).abs().max()) <= SAME * float(other_N.abs().max().clamp(min=1.0)):
                names.append(name)
                break
        else:
            groups.append(([name], curve_N))
    return {", ".join(names): curve_N for names, curve_N in groups}


def draw_panel(axes: Axes, title: str, curves: Curves) -> None:
    """Draw the curves; the grey corners are forces away from the reference."""
    axes.fill_between([LOW, 0], 0, 1e4, color="black", alpha=0.06, linewidth=0)
    axes.fill_between([0, HIGH], -1e4, 0, color="black", alpha=0.06, linewidth=0)
    for name, curve_N in grouped(curves).items():
        style = looks()[name.partition(", ")[0]]
        axes.plot(distances(), curve_N, color=style["color"], linestyle=style["linestyle"], label=name)
    axes.set_yscale("symlog", linthresh=1.0)
    axes.set_yticks([-100, -10, -1, 0, 1, 10, 100], ["-100", "-10", "-1", "0", "1", "10", "100"])
    axes.minorticks_off()
    axes.set_xticks([-5, 0, 5, 10])
    axes.set_ylim(-600, 600)
    axes.set_xlim(LOW, HIGH)
    axes.set_title(title)
    # In the corner where no curve is.
    axes.legend(loc="lower right")


def draw(out: Path) -> None:
    """Write the figure."""
    with paper_style():
        figure = new_figure(7.0, 5.6)
        rows = figure.subplots(2, 2, sharex=True, sharey=True)
        for axes_of_row, placement in zip(rows, ("loss", "reward"), strict=True):
            draw_panel(axes_of_row[0], f"in the {placement}, mean of fresh samples", mean_curves(placement))
            draw_panel(axes_of_row[1], f"in the {placement}, one sample", sample_curves(placement))
            axes_of_row[0].set_ylabel("force down, in beta")
        for axes in rows[-1]:
            axes.set_xlabel("log-ratio of the token to the reference (nats)")
        save_figure(figure, out)


if __name__ == "__main__":
    draw(OUT)
    print(f"wrote {OUT}")
