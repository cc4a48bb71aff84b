"""A KL to the policy of D updates ago beside one to a moving average: `python research/scripts/sampler_average.py`.

Prints the table of docs/references.md and draws docs/sampler_average.svg. To first order the gradient of
``KL(pi, pi')`` is the Fisher matrix times the difference of the parameters. The difference to the policy of D updates
ago is the sum of the last D steps; that to an average with decay d counts the step of j updates ago d^j times, which
sums to the average's centre of mass d / (1 - d). So the decay D / (D + 1) has the same size where the steps are alike.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from kl_comedy.kl.oracle import Instance, target_gradient
from kl_comedy.kl.oracle.ranges import drawn_starts
from kl_comedy.kl.oracle.trajectory import moving_average, train_on_reward
from kl_comedy.results.figures import look, new_figure, paper_style, save_figure

OUT = Path(__file__).resolve().parents[2] / "docs" / "sampler_average.svg"
AGES = (1, 4, 10, 20)
CENTRES = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0)
"""Centres of mass of the averages, in ages of the old policy."""
RATIO_TICKS = (0.25, 0.5, 1.0, 2.0, 4.0)
POLICIES = 20
UPDATES = 60
SGD_RATE = 3.0
"""Rates of SGD over those of Adam. At larger ones most policies are nearly deterministic after 60 updates, and their
last steps are zero."""
LARGEST = 99.0
"""Norm ratios beyond it are printed as this: where the last D steps were zero, they are of rounding errors."""
OPTIMIZERS = {"Adam": (torch.optim.Adam, 1.0), "SGD": (torch.optim.SGD, SGD_RATE)}
NOISE: dict[str, int | None] = {"exact gradient": None, "16 completions an update": 16}

Paths = list[tuple[Instance, Tensor]]


def trained(optimizer: str, samples: int | None) -> Paths:
    """Drawn policies of 4 and 8 tokens, each with the parameters after every update on its reward."""
    optimizer_class, factor = OPTIMIZERS[optimizer]
    paths = []
    for number, (start, rate) in enumerate(drawn_starts(POLICIES, seed=0)):
        theta_UD = train_on_reward(
            start,
            updates=UPDATES,
            lr=factor * rate,
            samples=samples,
            seed=number,
            optimizer_class=optimizer_class,
        )
        paths.append((start, theta_UD))
    return paths


def kl_gradient(instance: Instance, theta_D: Tensor, reference_D: Tensor) -> Tensor:
    """The exact gradient of the sequence-level ``KL(pi, ref)`` between two versions of a policy."""
    at_the_end = dataclasses.replace(instance, theta_D=theta_D, ref_logp_NV=instance.policy_logp(reference_D))
    return target_gradient(at_the_end, "sequence_reverse")


def compare(paths: Paths, age: int, centre: float) -> tuple[list[float], list[float]]:
    """Of each policy, the cosine of the two gradients, and the norm of the average's over that of the old policy's.

    ``centre``: the average's centre of mass, in updates.
    """
    decay = centre / (1 + centre)
    cosines = []
    ratios = []
    for instance, theta_UD in paths:
        to_old_D = kl_gradient(instance, theta_UD[-1], theta_UD[-1 - age])
        to_average_D = kl_gradient(instance, theta_UD[-1], moving_average(theta_UD, decay))
        old_norm = float(to_old_D.norm())
        average_norm = float(to_average_D.norm())
        cosines.append(float(to_old_D @ to_average_D) / (old_norm * average_norm))
        ratios.append(average_norm / old_norm)
    return cosines, ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT, help="the figure")
    arguments = parser.parse_args()
    by_kind = {(optimizer, noise): trained(optimizer, NOISE[noise]) for optimizer in OPTIMIZERS for noise in NOISE}
    print("| updates ago | decay | optimizer | steps by | cosine | norm ratio |")
    print("| --- | --- | --- | --- | --- | --- |")
    for age in AGES:
        for (optimizer, noise), paths in by_kind.items():
            cosines, ratios = compare(paths, age, centre=age)
            shown = [min(ratio, LARGEST) for ratio in ratios]
            cells = [
                f"{median(cosines):.3f} [{min(cosines):.2f}, {max(cosines):.2f}]",
                f"{median(shown):.2f} [{min(shown):.2f}, {max(shown):.2f}]",
            ]
            print(f"| {age} | {age / (age + 1):.3g} | {optimizer} | {noise} | {' | '.join(cells)} |")
    noisy = {optimizer: by_kind[optimizer, "16 completions an update"] for optimizer in OPTIMIZERS}
    draw(noisy, arguments.out)


def draw(by_optimizer: dict[str, Paths], out: Path) -> None:
    """Median cosine and norm ratio over the average's centre of mass, a line for each age of the old policy."""
    with paper_style():
        figure = new_figure(7.0, 4.6)
        panels = figure.subplots(2, 2, sharex=True)
        for row, (optimizer, paths) in enumerate(by_optimizer.items()):
            for number, age in enumerate(AGES):
                style = look(number)
                cosines = []
                ratios = []
                for centre in CENTRES:
                    by_policy = compare(paths, age, centre * age)
                    cosines.append(median(by_policy[0]))
                    ratios.append(median(by_policy[1]))
                for axes, values in zip(panels[row], (cosines, ratios), strict=True):
                    label = f"D = {age}"
                    axes.plot(CENTRES, values, color=style["color"], linestyle=style["linestyle"], label=label)
            panels[row][0].set_title(f"{optimizer}: cosine of the gradients")
            panels[row][1].set_title(f"{optimizer}: norm, over that to the old policy")
            panels[row][1].axhline(1.0, color="0.6", linewidth=0.8)
            for axes in panels[row]:
                axes.axvline(1.0, color="0.6", linewidth=0.8)
                axes.set_xscale("log")
                axes.set_xticks(CENTRES, [f"{centre:g}" for centre in CENTRES])
                axes.minorticks_off()
            panels[row][1].set_yscale("log")
            panels[row][1].set_yticks(RATIO_TICKS, [f"{ratio:g}" for ratio in RATIO_TICKS])
            panels[row][1].minorticks_off()
        for axes in panels[1]:
            axes.set_xlabel("centre of mass d / (1 - d), over D")
        panels[0][0].legend(loc="lower left")
        save_figure(figure, out)


if __name__ == "__main__":
    main()
