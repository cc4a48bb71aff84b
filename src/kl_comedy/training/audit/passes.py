"""The passes of a block's rows, each made once: every channel of an audit prepares the same rows.

Preparing an update passes every reference over it, and the policy where a term must be known ahead of the update. An
audit prepares a block once without terms and once for each channel that sees the update; the passes are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from kl_comedy.kl import KLTerm

if TYPE_CHECKING:
    from kl_comedy.models.logprobs import TokenPass
    from kl_comedy.models.reference import Reference, ReferencePass


class ReferenceOnce:
    """A reference that passes equal inputs once. For as long as it does not move."""

    def __init__(self, reference: Reference) -> None:
        self._reference = reference
        self._found: dict[Any, ReferencePass] = {}
        self.moving = reference.moving

    @property
    def hash(self) -> str:
        return self._reference.hash

    def forward_pass(self, **inputs: Tensor) -> ReferencePass:
        key = _key(inputs)
        if key not in self._found:
            self._found[key] = self._reference.forward_pass(**inputs)
        return self._found[key]


class PolicyOnce:
    """The policy's pass over equal inputs and one reference, once, with whatever any of its ``terms`` needs."""

    def __init__(self, policy_pass: Callable[..., TokenPass], terms: Sequence[KLTerm]) -> None:
        self._policy_pass, self._terms = policy_pass, list(terms)
        # The reference's pass is kept beside the policy's, so that its id stays its own.
        self._found: dict[Any, tuple[TokenPass, ReferencePass]] = {}

    def __call__(self, inputs: Mapping[str, Tensor], reference: ReferencePass, terms: Sequence[KLTerm]) -> TokenPass:
        names = frozenset(term.reference for term in terms)
        key = (_key(inputs), id(reference), names)
        if key not in self._found:
            alike = [term for term in self._terms if term.reference in names]
            self._found[key] = self._policy_pass(inputs, reference, alike), reference
        return self._found[key][0]


def _key(inputs: Mapping[str, Tensor]) -> tuple[Any, ...]:
    return tuple((name, inputs[name].shape, inputs[name].cpu().numpy().tobytes()) for name in sorted(inputs))
