"""Checks what a top-k estimator declares: on random distributions, the sampled token summed over.

Legend: ``P`` distributions, ``V`` tokens, ``K`` top tokens. A value ``[P, V]`` has a column for each token that may be
sampled, so that its mean is a sum and not a sample.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kl_comedy.kl.estimators import TopK, TopTokens
from kl_comedy.kl.oracle.estimator_calls import (
    NEEDS_BY,
    EstimatorCheck,
    EstimatorCoverage,
    allowed,
    call_estimator,
    claims_apply,
    claims_never_checked,
    declaration_hint,
    differs,
    name_with,
    option_sets,
    slope_of,
    values_tried,
    with_options,
)
from kl_comedy.kl.term import estimator_defaults
from kl_comedy.registry import Entry

VOCABULARY = 40
POINTS = 12
"""Tokens and distributions with which a top-k estimator is checked; the spread of their logits is 0.1 to 32 nats."""
POINTS32 = 6
"""How many of these are compared in float32, those of less than 2 nats: beside a sure token, masses are differences of
ones."""
TOLERANCE32 = 1e-3
SMALLER_BATCH = slice(2, 5)
"""The distributions that are evaluated by themselves too, which must not change their values."""


@dataclass(frozen=True, kw_only=True)
class _Distributions:
    """Next-token log-probs (nats) at some prefixes, ``[P, V]``, and the policy's logits, of which they are made."""

    logits_PV: Tensor
    ref_PV: Tensor
    stale_PV: Tensor

    @property
    def policy_PV(self) -> Tensor:
        return self.logits_PV.log_softmax(-1)

    def select(self, rows: slice) -> _Distributions:
        return _Distributions(logits_PV=self.logits_PV[rows], ref_PV=self.ref_PV[rows], stale_PV=self.stale_PV[rows])

    def to(self, dtype: torch.dtype) -> _Distributions:
        return _Distributions(
            logits_PV=self.logits_PV.to(dtype), ref_PV=self.ref_PV.to(dtype), stale_PV=self.stale_PV.to(dtype)
        )

    def with_leaf_logits(self) -> _Distributions:
        """The same with logits that ask for gradient, and have no history."""
        logits_PV = self.logits_PV.detach().clone().requires_grad_(True)
        return dataclasses.replace(self, logits_PV=logits_PV)


@dataclass(frozen=True, kw_only=True)
class _Case:
    """An estimator with one set of options, in one regime."""

    entry: Entry[Any]
    options: Mapping[str, Any]
    regime: str

    @property
    def name(self) -> str:
        return name_with(self.entry, self.options)

    @property
    def where(self) -> str:
        """As ``on-policy``."""
        return self.regime.replace("_", "-")

    def sampler(self, distributions: _Distributions) -> Tensor:
        """The sampler's log-probs ``[P, V]``: the policy's, or those of another one."""
        # With another sampler, a claim that holds on-policy only shows.
        if self.regime == "off_policy":
            return distributions.stale_PV
        return distributions.policy_PV.detach()

    def value(self, distributions: _Distributions) -> Tensor:
        """The values ``[P, V]`` at each prefix, for each token that may be sampled there."""
        options = {**estimator_defaults(self.entry), **self.options}
        policy_PV = distributions.policy_PV
        ref_PV = distributions.ref_PV
        sampler_PV = self.sampler(distributions)
        chosen_by_PV = policy_PV.detach()
        if options["tokens"] == "reference":
            chosen_by_PV = ref_PV
        # At most the vocabulary: k may be larger, as in a run with a small model.
        ids_PK = chosen_by_PV.topk(min(int(options["k"]), VOCABULARY)).indices
        inside_PV = torch.zeros_like(policy_PV, dtype=torch.bool).scatter(1, ids_PK, True)
        # The top tokens are the same whichever token is sampled.
        ids_PVK = ids_PK[:, None].expand(-1, VOCABULARY, -1)
        logp_PVK = policy_PV[:, None].expand(-1, VOCABULARY, -1).gather(2, ids_PVK)
        ref_PVK = ref_PV[:, None].expand(-1, VOCABULARY, -1).gather(2, ids_PVK)
        argument = TopK(
            top=TopTokens(logp_PVK, ref_PVK, inside_PV),
            logp_BT=policy_PV,
            ref_logp_BT=ref_PV,
            behaviour_logp_BT=sampler_PV,
        )
        tensors = (logp_PVK, ref_PVK, inside_PV, policy_PV, ref_PV, sampler_PV)
        return call_estimator(self.entry, argument, tensors, self.options)


def check_top_k(entry: Entry[Any], options: Iterable[Mapping[str, Any]], generator: torch.Generator) -> EstimatorCheck:
    """Check a top-k estimator on random distributions, with its option sets and ``options``.

    The policy's log-probs reach down to about -100 nats; the sampler is the policy, or another one.
    """
    sets = [*option_sets(entry, generator), *options]
    # From nearly uniform distributions to nearly deterministic ones, each with a policy, a reference and a sampler.
    spread_P11 = torch.logspace(-1, 1.5, POINTS, dtype=torch.float64)[:, None, None]
    noise_P3V = torch.randn(POINTS, 3, VOCABULARY, generator=generator, dtype=torch.float64)
    logits_PV, ref_PV, stale_PV = (spread_P11 * noise_P3V).unbind(1)
    distributions = _Distributions(
        logits_PV=logits_PV, ref_PV=ref_PV.log_softmax(-1), stale_PV=stale_PV.log_softmax(-1)
    )
    sets += _sets_with_a_tail(entry, sets, generator)
    failures: dict[str, str] = {}
    unchecked = claims_never_checked(entry, sets)
    if unchecked is not None:
        failures["claims_need"] = unchecked
    for chosen in sets:
        for regime in NEEDS_BY:
            case = _Case(entry=entry, options=chosen, regime=regime)
            for subject, sentence in _failures_of(case, distributions).items():
                # One sentence per subject: with other options it would be false for the same reason.
                failures.setdefault(subject, f"{sentence}{declaration_hint(entry, chosen)}")
    covered = EstimatorCoverage(options=values_tried(sets), distributions=POINTS, vocabulary=VOCABULARY)
    return EstimatorCheck(failures=list(failures.values()), covered=covered)


def _sets_with_a_tail(
    entry: Entry[Any], sets: Sequence[Mapping[str, Any]], generator: torch.Generator
) -> list[dict[str, Any]]:
    """Each set of options again with a k that leaves tokens outside S, drawn anew, as far as it is allowed."""
    rules = entry.facts.get("options", {}).get("k", {})
    with_a_tail = []
    for options in sets:
        # Drawn even where it is not used, so that the sets that follow do not depend on the rules.
        k = float(torch.randint(1, VOCABULARY, (1,), generator=generator))
        if allowed(k, rules):
            with_a_tail.append({**options, "k": k})
    return with_a_tail


def _failures_of(case: _Case, distributions: _Distributions) -> dict[str, str]:
    """What is false in one case, by claim or subject."""
    distributions = distributions.with_leaf_logits()
    value_PV = case.value(distributions)
    if not bool(torch.isfinite(value_PV).all()):
        return {"finite": f"{case.name} has a value {case.where} that is not finite"}
    failures = {}
    if claims_apply(case.entry, case.options, case.regime):
        failures = _broken_claims(case, distributions, value_PV)

    value_PV = value_PV.detach()
    alone_PV = case.value(distributions.select(SMALLER_BATCH)).detach()
    with torch.no_grad():
        without_gradients_PV = case.value(distributions)
    # An estimator may not look at the other prefixes of its batch.
    among_others_PV = value_PV[SMALLER_BATCH]
    if bool(differs(alone_PV, among_others_PV, among_others_PV).any()):
        failures["batch"] = f"{case.name} has other values {case.where} when prefixes stand in a smaller batch"
    elif bool(differs(without_gradients_PV, value_PV, value_PV).any()):
        failures["calls"] = f"{case.name} has another value {case.where} in a second call, without gradients recorded"
    return failures | _failures_in_float32(case, distributions)


def _broken_claims(case: _Case, distributions: _Distributions, value_PV: Tensor) -> dict[str, str]:
    """The claims that do not hold in a case, by name."""
    logp_PV = distributions.policy_PV
    ref_PV = distributions.ref_PV
    # The expectation over the sampled token, which is a column.
    mean_P = (case.sampler(distributions).exp() * value_PV).sum(1)
    exact = {
        "reverse": (logp_PV.exp() * (logp_PV - ref_PV)).sum(1),
        "forward": (ref_PV.exp() * (ref_PV - logp_PV)).sum(1),
    }
    failures = {}
    for claim in case.entry.claims:
        kind, _, target = claim.partition(":")
        if kind == "nonnegative":
            wrong_P = value_PV.amin(1) < -1e-12
            reason = "is negative"
        elif kind == "value":
            wrong_P = differs(mean_P, exact[target], exact[target])
            reason = f"its mean is not the {target} KL"
        else:
            wrong_P = _wrong_gradient(target, mean_P, exact, distributions.logits_PV)
            reason = f"the mean of its gradient is not that of {target}"
        # NaN counts as wrong in differs, and so here.
        if bool(wrong_P.any()):
            about = f"estimator {case.entry.name!r} claims {claim}{with_options(case.options)}"
            failures[claim] = f"{about}, and {case.where} {reason}"
    return failures


def _wrong_gradient(target: str, mean_P: Tensor, exact: Mapping[str, Tensor], logits_PV: Tensor) -> Tensor:
    """Where the gradient of the mean, the sampler held fixed, is not that of a target, ``[P]``."""
    # Connected to the logits, or autograd would refuse to differentiate a constant.
    target_P = 0.0 * mean_P
    if target != "zero":
        target_P = exact[target.removeprefix("token_")]
    (slope_PV,) = torch.autograd.grad(mean_P.sum(), logits_PV, retain_graph=True)
    (expected_PV,) = torch.autograd.grad(target_P.sum(), logits_PV, retain_graph=True)
    # Relative to the KL and not to the gradient, each of whose elements is a difference of numbers of that size.
    return differs(slope_PV, expected_PV, exact["reverse"][:, None]).any(1)


def _failures_in_float32(case: _Case, distributions: _Distributions) -> dict[str, str]:
    """That value or gradient in float32 are not those of float64, where no token is nearly sure."""
    # Both are given numbers that float32 has, so that rounding of the argument is not counted.
    narrow = distributions.select(slice(0, POINTS32)).to(torch.float32)
    value_by_dtype = {}
    slope_by_dtype = {}
    for dtype in (torch.float64, torch.float32):
        same = narrow.to(dtype).with_leaf_logits()
        value_PV = case.value(same)
        value_by_dtype[dtype] = value_PV.detach().double()
        slope_by_dtype[dtype] = slope_of(case.entry, value_PV, same.logits_PV, case.options).double()
    for figure, by_dtype in (("value", value_by_dtype), ("gradient", slope_by_dtype)):
        wide = by_dtype[torch.float64]
        off = (by_dtype[torch.float32] - wide).abs()
        if not bool((off <= TOLERANCE32 * (1 + wide.abs())).all()):
            return {"float32": f"{case.name} has another {figure} {case.where} in float32 than in float64"}
    return {}
