"""KL estimators: one pure function from the per-token log-ratio ``l = logp - ref_logp`` to nats.

Claims an entry may declare, each checked by exact enumeration in tests/exact:

- ``value:reverse``: ``E_pi[k(l)] = KL(pi || ref)`` at every prefix (likewise ``value:forward``);
- ``pathwise:T``: ``E_pi[grad k(l)]`` at a prefix is the gradient of target ``T`` there, with ``T`` one of
  ``zero``, ``token_reverse``, ``token_forward``;
- ``nonnegative``: the estimate is never below zero.

What a whole term descends follows from these by composition: :mod:`kl_comedy.kl.claims`.
"""

from kl_comedy.kl.estimators import exact, log_ratio
from kl_comedy.kl.estimators.base import Estimator

__all__ = ["Estimator", "exact", "log_ratio"]
