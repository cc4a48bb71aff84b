"""Draw docs/taxonomy.svg, where four KL terms lead on stale samples: `python research/scripts/taxonomy_figure.py`.

Policies of completions of eight tokens, each drawn alike from three, so that a policy is a point of a triangle. From
points of a grid it descends the expected gradient of the term alone, enumerated, while sampler and reference stay. A
step's length is the same everywhere: paths show the direction and not the force.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kl_comedy.kl import KLTerm
from kl_comedy.kl.claims import KIND_WORDS, kind_in
from kl_comedy.kl.oracle import Instance, InstanceSettings, Tree, expected_gradient
from kl_comedy.results.figures import look, new_figure, paper_style, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OUT = Path(__file__).resolve().parents[2] / "docs" / "taxonomy.svg"
REFERENCE = (0.55, 0.25, 0.20)
SAMPLER = (0.20, 0.55, 0.25)
CORNERS_32 = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.5, 0.866]], dtype=torch.float64)
STEP = 0.01
"""Length of a step in the triangle, whose sides have length 1."""
STEPS = 70
EDGE = 0.004
"""A path ends where a token is rarer than this."""
TERMS = {
    "k3 in the loss": KLTerm("k3", placement="loss"),
    "k1 in the loss": KLTerm("k1", placement="loss"),
    "k1 frozen at the sampler × completion ratio": KLTerm(
        "k1", placement="reward", credit="total", correction="sequence", anchor="behaviour"
    ),
    "exact KL in the reward, no baseline": KLTerm("exact", placement="reward", credit="to_go"),
}


def starts() -> list[Tensor]:
    """Points of a grid inside the triangle, as probabilities ``[3]``."""
    parts = 7
    return [
        torch.tensor([a, b, parts - a - b], dtype=torch.float64) / parts
        for a in range(1, parts - 1)
        for b in range(1, parts - a)
    ]


def eight_tokens_alike() -> Instance:
    """Eight tokens of three, each drawn from :data:`SAMPLER`; the policy has one logit for each of the three."""
    tree = Tree.build(vocabulary=3, length=8, ends=False)
    instance = Instance.random(tree, InstanceSettings(regime="off_policy", seed=0, parameters=3))
    sampler_logp_NV = torch.tensor(SAMPLER, dtype=torch.float64).log().repeat(tree.prefixes, 1)
    return dataclasses.replace(
        instance,
        features_NVD=torch.eye(3, dtype=torch.float64).repeat(tree.prefixes, 1, 1),
        ref_logp_NV=torch.tensor(REFERENCE, dtype=torch.float64).log().repeat(tree.prefixes, 1),
        sampler_logp_NV=sampler_logp_NV,
        recorded_logp_NV=sampler_logp_NV,
    )


def path(term: KLTerm, p_3: Tensor) -> Tensor:
    """The places in the triangle of a policy that starts at ``p_3`` and descends the term alone, ``[steps, 2]``."""
    instance = eight_tokens_alike()
    places = [p_3 @ CORNERS_32]
    for _ in range(STEPS):
        at_p = dataclasses.replace(instance, theta_D=p_3.log())
        gradient_3 = expected_gradient(at_p, [term]).gradient_D
        # The logits descend; the probabilities follow by the softmax's derivative.
        move_3 = -p_3 * (gradient_3 - p_3 @ gradient_3)
        length = float((move_3 @ CORNERS_32).norm())
        if length < 1e-9:
            break
        before_3 = p_3
        p_3 = p_3 + STEP / length * move_3
        places.append(p_3 @ CORNERS_32)
        # At a minimum steps of one length go to and fro.
        returns = len(places) > 2 and float((places[-1] - places[-3]).norm()) < STEP / 2
        if returns or float(p_3.min()) < EDGE or float(before_3.min()) < EDGE:
            break
    return torch.stack(places)


def draw_panel(axes: Axes, name: str, term: KLTerm) -> None:
    kind = kind_in(term, "off_policy")
    if kind is None:
        raise ValueError(f"{name} has no kind on stale samples")
    outline_42 = torch.cat([CORNERS_32, CORNERS_32[:1]])
    axes.plot(outline_42[:, 0], outline_42[:, 1], color="0.6", linewidth=0.8)
    for start in starts():
        places = path(term, start)
        axes.plot(places[:, 0], places[:, 1], color=look(0)["color"], linewidth=0.8)
        if len(places) > 2:
            axes.annotate(
                "",
                xy=tuple(places[-1].tolist()),
                xytext=tuple(places[-3].tolist()),
                arrowprops={"arrowstyle": "->", "color": look(0)["color"], "linewidth": 0.8},
            )
    for point, marker, label in ((REFERENCE, "o", "reference"), (SAMPLER, "s", "sampler")):
        place = torch.tensor(point, dtype=torch.float64) @ CORNERS_32
        axes.plot([place[0]], [place[1]], marker, color="black", markersize=5, label=label, linestyle="none")
    axes.set_title(f"{name}:\n{KIND_WORDS[kind.kind]}")
    axes.set_aspect("equal")
    axes.set_axis_off()


def draw(out: Path) -> None:
    """Write the figure."""
    with paper_style():
        figure = new_figure(7.0, 6.4)
        panels = figure.subplots(2, 2).flat
        for axes, (name, term) in zip(panels, TERMS.items(), strict=True):
            draw_panel(axes, name, term)
            axes.legend(loc="upper left")
        save_figure(figure, out)


if __name__ == "__main__":
    draw(OUT)
    print(f"wrote {OUT}")
