"""KL losses with a drawn mask mistake, reduction and estimator, whose faults are known by construction.

The masks are written here with loops over tokens, and share nothing with the package.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

import torch

# What a report may say, by the fault that it then names.
NAMED = {
    "attention": "the attention mask stands|no mask is applied|the mask is not applied",
    "shifted left": "mask is shifted by one token to the left|or the mask is shifted \\[",
    "shifted right": "mask is shifted by one token to the right",
    "inverted": "the mask is inverted",
    "first turn": "only the first turn of a completion has",
    "last turn": "only the last turn of a completion has",
    "no first turn": "the first turn of every completion has no gradient",
    "no last turn": "the last turn of every completion has no gradient",
    "first of turns": "the first token of every turn has no gradient",
    "last of turns": "the last token of every turn has no gradient",
    "first token": "the first token of every completion has no gradient",
    "last token": "the last token of every completion has no gradient",
    "counted": "reduction: the mean divides by the tokens of|a mean over neither completions, turns nor tokens",
    "counted attention": "reduction: the mean divides by the tokens of the attention mask",
    "per completion": "each completion is divided by its number of tokens, so",
    "per completion attention": "each completion is divided by its number of tokens in the attention mask",
    "per turn": "each turn is divided by its number of tokens",
    "direction": "wrong direction",
    "padding": "depends on the padding",
    "mixed": "completions are mixed|changes with the others",
    "overflow": "finite: in float32",
    "other": "exchanged|a ratio is missing|ratio is (detached|applied|upside|clipped)|stands where each"
    "|detach is missing|wrong sign|the tail|probabilities|reference does not enter|clamped|zero expected gradient"
    "|no gradient reaches|gradient is not finite(?!,| where)|dtype:|logits:|beta is",
}
MASKS = (
    "right",
    "attention",
    "all",
    "inverted",
    "shifted left",
    "shifted right",
    "first turn",
    "last turn",
    "no first turn",
    "no last turn",
    "first of turns",
    "with padding",
)
REDUCTIONS = ("tokens", "completions", "sum", "mean", "constant", "token mean", "mean of means", "means")
ESTIMATORS = {"k2": "token_reverse", "k3": "token_forward", "score": "token_reverse", "exact": "token_reverse"}


def wrong_mask(name, mask_BT, attention_BT):
    """A mask by its name, row by row."""
    rows = []
    for mask_T, attention_T in zip(mask_BT.tolist(), attention_BT.tolist(), strict=True):
        turns: list[list[int]] = []
        for place, inside in enumerate(mask_T):
            if inside and (place == 0 or not mask_T[place - 1]):
                turns.append([])
            if inside:
                turns[-1].append(place)
        every = [place for turn in turns for place in turn]
        length = len(mask_T)
        places = {
            "right": every,
            "attention": [place for place in range(length) if attention_T[place]],
            "all": range(length),
            "inverted": [place for place in range(length) if attention_T[place] and not mask_T[place]],
            "shifted left": [place - 1 for place in every if place > 0],
            "shifted right": [place + 1 for place in every if place + 1 < length],
            "first turn": turns[0] if turns else [],
            "last turn": turns[-1] if turns else [],
            "no first turn": [place for turn in turns[1:] for place in turn],
            "no last turn": [place for turn in turns[:-1] for place in turn],
            "first of turns": [place for turn in turns for place in turn[1:]],
            "with padding": [place for place in range(length) if mask_T[place] or not attention_T[place]],
        }[name]
        rows.append([place in set(places) for place in range(length)])
    return torch.tensor(rows)


@dataclass(frozen=True)
class Drawn:
    """One drawn loss. ``numerator`` and ``denominator`` are names of masks; the latter matters in means of tokens."""

    numerator: str
    denominator: str
    reduction: str
    estimator: str
    claim: str
    guard: str

    @property
    def divides(self):
        return self.reduction in ("token mean", "mean of means", "means")

    @property
    def faults(self):
        """What is wrong with it, by construction."""
        faults = set()
        # Log-probs of tokens are 0 in the padding, those of the vocabulary are not.
        harmless = {"right"} if self.estimator == "exact" else {"right", "with padding"}
        if self.numerator not in harmless:
            faults.add(f"numerator {self.numerator}")
        if self.divides and self.denominator != "right":
            faults.add(f"denominator {self.denominator}")
        if self.reduction in ("mean of means", "means"):
            faults.add("per completion")
        if ESTIMATORS[self.estimator] != self.claim:
            faults.add("direction")
        return faults

    @property
    def allowed(self):
        """The names of :data:`NAMED` that a report may use for it."""
        names = set()
        also = {
            "all": {"attention", "padding"},
            "with padding": {"padding"},
            "shifted left": {"last of turns", "last token", "shifted left"},
            "shifted right": {"first of turns", "first token", "shifted right", "padding"},
            # Dropping the first token of each turn is what a shift to the right does to the tokens of the mask.
            "first of turns": {"first of turns", "shifted right"},
        }
        for fault in self.faults:
            where, _, mask = fault.partition(" ")
            if where == "numerator":
                names |= also.get(mask, {mask})
            elif where == "denominator":
                names |= {"counted", "padding"}
                if self.guard == "epsilon":
                    # A completion of which nothing is counted is divided by 1e-8.
                    names.add("overflow")
                if mask in ("attention", "all"):
                    names |= {"counted attention", "per completion attention"}
            elif fault == "per completion":
                names |= {"per completion", "per completion attention"}
                if self.denominator == "right":
                    names.discard("per completion attention")
                elif self.denominator != "right":
                    names.discard("per completion")
            else:
                names.add("direction")
        return names

    def loss(self, logp, ref_logp, logp_full, ref_logp_full, mask, attention_mask):
        kept = wrong_mask(self.numerator, mask, attention_mask)
        counted = wrong_mask(self.denominator, mask, attention_mask).to(logp.dtype)
        log_ratio = logp - ref_logp
        value = {
            "k2": lambda: 0.5 * log_ratio**2,
            "k3": lambda: (-log_ratio).exp() - 1 + log_ratio,
            "score": lambda: log_ratio.detach() * logp,
            "exact": lambda: (logp_full.exp() * (logp_full - ref_logp_full)).sum(-1),
        }[self.estimator]()
        value = value * kept

        def over(total, count):
            if self.guard == "clamp":
                return total / count.clamp(min=1)
            return total / (count + 1e-8)

        return {
            "tokens": lambda: value,
            "completions": lambda: value.sum(-1),
            "sum": lambda: value.sum(),
            "mean": lambda: value.sum(-1).mean(),
            "constant": lambda: value.sum() / (len(mask) * 512),
            "token mean": lambda: over(value.sum(), counted.sum()),
            "mean of means": lambda: over(value.sum(-1), counted.sum(-1)).mean(),
            "means": lambda: over(value.sum(-1), counted.sum(-1)),
        }[self.reduction]()


def drawn(seed):
    """One loss; half of them have no mask mistake, and a quarter no other one either."""
    generator = random.Random(seed)
    numerator = denominator = "right"
    if generator.random() < 0.7:
        place = generator.choice(("numerator", "denominator", "both"))
        mask = generator.choice(MASKS[1:])
        if place in ("numerator", "both"):
            numerator = mask
        if place in ("denominator", "both"):
            denominator = mask
    estimator = generator.choice(tuple(ESTIMATORS))
    claim = ESTIMATORS[estimator]
    if estimator == "k3" and generator.random() < 0.5:
        claim = "token_reverse"
    reduction = generator.choice(REDUCTIONS)
    return Drawn(numerator, denominator, reduction, estimator, claim, generator.choice(("clamp", "epsilon")))


def names_in(text):
    """The faults that a report or an error names."""
    return {name for name, pattern in NAMED.items() if re.search(pattern, text)}
