"""A KL to the policy of D updates ago beside one to a moving average: `python research/scripts/sampler_average.py`.

Prints the table of docs/off_policy_terms.md and draws docs/sampler_average.svg. To first order the gradient of
``KL(pi, pi')`` is the Fisher matrix times the difference of the parameters. The difference to the policy of D updates
ago is the sum of the last D steps; that to an average with decay d weights the step of j updates ago by d^j, which
sums to d / (1 - d). So the decay D / (D + 1) has the same size where the steps are alike.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from torch import Tensor

from kl_comedy.kl.oracle import Instance, target_gradient
from kl_comedy.kl.oracle.ranges import drawn_starts
from kl_comedy.kl.oracle.trajectory import moving_average, train_on_reward
from kl_comedy.results.figures import look, new_figure, paper_style, save_figure

OUT = Path(__file__).resolve().parents[2] / "docs" / "sampler_average.svg"
AGES = (1, 2, 4, 10, 20)
POLICIES = 20
UPDATES = 60
NOISE: dict[str, int | None] = {"exact gradient": None, "16 completions an update": 16}


def trained(samples: int | None) -> list[tuple[Instance, Tensor]]:
    """Drawn policies of 4 and 8 tokens, each with the parameters after every update on its reward."""
    trajectories = []
    for number, (start, rate) in enumerate(drawn_starts(POLICIES, seed=0)):
        theta_UD = train_on_reward(start, updates=UPDATES, lr=rate, samples=samples, seed=number)
        trajectories.append((start, theta_UD))
    return trajectories


def kl_gradient(instance: Instance, theta_D: Tensor, reference_D: Tensor) -> Tensor:
    """The exact gradient of the sequence-level ``KL(pi, ref)`` between two versions of a policy."""
    at_the_end = dataclasses.replace(instance, theta_D=theta_D, ref_logp_NV=instance.policy_logp(reference_D))
    return target_gradient(at_the_end, "sequence_reverse")


def compare(trajectories: Sequence[tuple[Instance, Tensor]], age: int) -> tuple[list[float], list[float]]:
    """Of each policy, cosine and size of the average's gradient against that of the policy ``age`` updates ago."""
    cosines = []
    sizes = []
    for instance, theta_UD in trajectories:
        to_old_D = kl_gradient(instance, theta_UD[-1], theta_UD[-1 - age])
        to_average_D = kl_gradient(instance, theta_UD[-1], moving_average(theta_UD, age / (age + 1)))
        product = float(to_old_D @ to_average_D)
        cosines.append(product / float(to_old_D.norm() * to_average_D.norm()))
        sizes.append(product / float(to_old_D.square().sum()))
    return cosines, sizes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT, help="the figure")
    arguments = parser.parse_args()
    by_noise = {name: trained(samples) for name, samples in NOISE.items()}
    print("| updates ago | decay | steps by | cosine | size |")
    print("| --- | --- | --- | --- | --- |")
    for age in AGES:
        for name, trajectories in by_noise.items():
            cosines, sizes = compare(trajectories, age)
            cells = [
                f"{median(cosines):.3f} [{min(cosines):.2f}, {max(cosines):.2f}]",
                f"{median(sizes):.2f} [{min(sizes):.2f}, {max(sizes):.2f}]",
            ]
            print(f"| {age} | {age / (age + 1):.3g} | {name} | {' | '.join(cells)} |")
    draw(by_noise, arguments.out)


def draw(by_noise: dict[str, list[tuple[Instance, Tensor]]], out: Path) -> None:
    """Cosine and size by age: a line through the medians, a dot for each policy."""
    with paper_style():
        figure = new_figure(7.0, 2.8)
        panels = figure.subplots(1, 2)
        for number, (name, trajectories) in enumerate(by_noise.items()):
            style = look(number)
            by_age = [compare(trajectories, age) for age in AGES]
            for panel, axes in enumerate(panels):
                medians = [median(figures[panel]) for figures in by_age]
                axes.plot(AGES, medians, color=style["color"], linestyle=style["linestyle"], label=name)
                for age, figures in zip(AGES, by_age, strict=True):
                    axes.plot([age] * POLICIES, figures[panel], ".", color=style["color"], markersize=3)
        for axes, title in zip(
            panels, ("cosine of the two gradients", "size, over that to the old policy"), strict=True
        ):
            axes.set_title(title)
            axes.set_xscale("log")
            axes.set_xticks(AGES, [str(age) for age in AGES])
            axes.minorticks_off()
            axes.set_xlabel("updates ago")
        panels[0].legend(loc="lower left")
        save_figure(figure, out)


if __name__ == "__main__":
    main()
