"""The task part of the objective: advantages, policy losses, reductions."""

from kl_comedy.objective.advantages import Advantage, value_loss
from kl_comedy.objective.policy_corrections import PolicyCorrection
from kl_comedy.objective.policy_losses import PolicyLoss
from kl_comedy.objective.policy_term import PolicyTerm, check_policy_term, policy_term
from kl_comedy.objective.reduction import REDUCTIONS, returns_with_costs, sequence_weights

__all__ = [
    "REDUCTIONS",
    "Advantage",
    "PolicyCorrection",
    "PolicyLoss",
    "PolicyTerm",
    "check_policy_term",
    "policy_term",
    "returns_with_costs",
    "sequence_weights",
    "value_loss",
]
