"""What a loss sees, and what a loss is: the one door through which our terms and other people's code pass.

Legend: ``B`` completions, ``T`` tokens of the longest one. Log-probs in nats.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Completions with everything a training loss may read; floats are float64, zero outside the mask.

    ``logp_BT``, ``reverse_kl_BT`` and ``forward_kl_BT`` carry gradient: the policy's log-probs of the
    tokens, and the exact ``KL(pi || ref)`` and ``KL(ref || pi)`` of the next-token distributions at each
    prefix. ``ref_logp_BT`` is the reference's, ``behaviour_logp_BT`` what the sampler recorded.
    ``reward_B`` is the task's, ``group_B`` numbers the prompt's groups (equal numbers are adjacent),
    ``truncated_B`` marks completions cut at the length limit. ``proximal_logp_BT`` is the policy's at the batch's
    first use; None where this is the first update, so that it is the policy itself.
    """

    logp_BT: Tensor
    ref_logp_BT: Tensor
    behaviour_logp_BT: Tensor
    mask_BT: Tensor
    reverse_kl_BT: Tensor
    forward_kl_BT: Tensor
    reward_B: Tensor
    group_B: Tensor
    truncated_B: Tensor
    proximal_logp_BT: Tensor | None = None


class Loss(Protocol):
    """A function from rows to a loss that is to be minimized."""

    def __call__(self, rows: Rows, /) -> Tensor:
        """Return ``[B, T]`` (zero outside the mask) or ``[B]``: what each completion adds, unreduced.

        The loss of a group is the mean over its completions of their sums over tokens. A completion's
        entry may depend on the other rows of its group (a baseline), never on other groups.
        """
        ...
