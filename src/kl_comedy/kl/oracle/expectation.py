"""The exact expected gradient of a list of terms, and of each target, by summing over every completion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kl_comedy.errors import bad_value
from kl_comedy.kl.claims import TARGETS
from kl_comedy.kl.oracle.policies import Tree, log_probs, prefix_log_probs
from kl_comedy.kl.surrogate import kl_surrogate
from kl_comedy.kl.term import KLTerm


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A policy, a reference and a behaviour policy over one tree, float64.

    ``features_NVD`` makes the policy's logits linear in ``theta_D``, so that prefixes share parameters;
    ``behaviour_logp_BT`` are the per-token log-probs of the policy (or of the several versions, one per
    position) that sampled.
    """

    tree: Tree
    features_NVD: Tensor
    theta_D: Tensor
    ref_logp_NV: Tensor
    behaviour_logp_BT: Tensor

    @classmethod
    def random(
        cls, tree: Tree, *, regime: str, seed: int, distance: float = 0.5, staleness: float = 0.3,
        parameters: int | None = None,
    ) -> Setting:  # fmt: skip
        """A seeded random instance. ``parameters=None`` is tabular: one logit per prefix and token.

        ``regime``: ``on_policy`` (behaviour = policy), ``off_policy`` (a stale version) or ``mixed``
        (the version changes within the completion, as in-flight weight updates do).
        """
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        n, v = tree.prefixes, tree.vocabulary
        if parameters is None:
            features_NVD = torch.eye(n * v, dtype=torch.float64).reshape(n, v, n * v)
        else:
            features_NVD = normal(n, v, parameters)
        theta_D = normal(features_NVD.shape[-1])
        logits_NV = features_NVD @ theta_D
        ref_logp_NV = prefix_log_probs(logits_NV + distance * normal(n, v))
        versions = [log_probs(tree, prefix_log_probs(logits_NV + staleness * normal(n, v))) for _ in range(2)]
        current_BT = log_probs(tree, prefix_log_probs(logits_NV))
        if regime == "on_policy":
            behaviour_BT = current_BT
        elif regime == "off_policy":
            behaviour_BT = versions[0]
        elif regime == "mixed":
            late = torch.arange(tree.length) >= (tree.length + 1) // 2
            behaviour_BT = torch.where(late, versions[1], versions[0])
        else:
            raise bad_value("regime", regime, ("on_policy", "off_policy", "mixed"))
        return cls(
            tree=tree,
            features_NVD=features_NVD,
            theta_D=theta_D,
            ref_logp_NV=ref_logp_NV,
            behaviour_logp_BT=behaviour_BT,
        )


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """An exact expected gradient ``[D]`` and what it is compared with."""

    gradient_D: Tensor

    def relative_bias(self, target_D: Tensor) -> float:
        """``|g - target| / |target|``; for a zero target, ``|g|``."""
        size = float(target_D.norm())
        return float((self.gradient_D - target_D).norm()) / (size if size > 0 else 1.0)

    def cosine(self, target_D: Tensor) -> float:
        """The cosine with a target; NaN where either is zero."""
        sizes = float(self.gradient_D.norm()) * float(target_D.norm())
        return float(self.gradient_D @ target_D) / sizes if sizes > 0 else float("nan")


class _Tables:
    """What the sums run over, differentiable in ``theta``."""

    def __init__(self, setting: Setting) -> None:
        tree = setting.tree
        self.theta_D = setting.theta_D.clone().requires_grad_(True)
        self.logp_NV = prefix_log_probs(setting.features_NVD @ self.theta_D)
        self.logp_BT = log_probs(tree, self.logp_NV)
        self.ref_BT = log_probs(tree, setting.ref_logp_NV)
        log_ratio_NV = self.logp_NV - setting.ref_logp_NV
        self.reverse_BT = (self.logp_NV.exp() * log_ratio_NV).sum(-1)[tree.prefix_BT] * tree.mask_BT
        self.forward_BT = (-setting.ref_logp_NV.exp() * log_ratio_NV).sum(-1)[tree.prefix_BT] * tree.mask_BT
        self.behaviour_B = setting.behaviour_logp_BT.sum(-1).exp()

    def gradient(self, scalar: Tensor) -> Tensor:
        if not scalar.requires_grad:
            return torch.zeros_like(self.theta_D)
        (gradient_D,) = torch.autograd.grad(scalar, self.theta_D, allow_unused=True)
        return torch.zeros_like(self.theta_D) if gradient_D is None else gradient_D


def expected_gradient(setting: Setting, terms: Sequence[KLTerm]) -> Expectation:
    """The exact expectation over behaviour completions of the gradient of ``sum_k beta_k surrogate_k``.

    Coefficients must be plain numbers.
    """
    tables = _Tables(setting)
    total = tables.theta_D.new_zeros(())
    for term in terms:
        if not isinstance(term.beta, float):
            raise bad_value("beta", term.beta, "a number, where an exact gradient is asked for")
        surrogate_BT = kl_surrogate(
            term,
            logp_BT=tables.logp_BT,
            ref_logp_BT=tables.ref_BT,
            behaviour_logp_BT=setting.behaviour_logp_BT,
            mask_BT=setting.tree.mask_BT,
            exact_kl_BT=tables.forward_BT if term.needs == "exact_forward" else tables.reverse_BT,
        )
        total = total + term.beta * (tables.behaviour_B * surrogate_BT.sum(-1)).sum()
    return Expectation(gradient_D=tables.gradient(total))


def target_gradient(setting: Setting, target: str) -> Tensor:
    """The gradient ``[D]`` of a target (see :mod:`kl_comedy.kl.claims`) at the setting's policy."""
    tables = _Tables(setting)
    if target == "zero":
        return torch.zeros_like(tables.theta_D)
    if target == "sequence_reverse":
        policy_B = tables.logp_BT.sum(-1).exp()
        return tables.gradient((policy_B * (tables.logp_BT - tables.ref_BT).sum(-1)).sum())
    if target == "sequence_forward":
        return tables.gradient((tables.ref_BT.sum(-1).exp() * (tables.ref_BT - tables.logp_BT).sum(-1)).sum())
    if target == "token_reverse":
        return tables.gradient((tables.behaviour_B * tables.reverse_BT.sum(-1)).sum())
    if target == "token_forward":
        return tables.gradient((tables.behaviour_B * tables.forward_BT.sum(-1)).sum())
    raise bad_value("target", target, TARGETS)
