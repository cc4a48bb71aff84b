"""The task part of the objective: advantages, policy losses, and reductions with explicit denominators."""

from kl_comedy.objective.advantages import Advantage
from kl_comedy.objective.policy_losses import PolicyLoss
from kl_comedy.objective.reduction import REDUCTIONS, sequence_weights
from kl_comedy.objective.returns import returns_with_costs

__all__ = ["REDUCTIONS", "Advantage", "PolicyLoss", "returns_with_costs", "sequence_weights"]
