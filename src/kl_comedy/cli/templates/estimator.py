"""A KL estimator: one pure function of the log-ratio ``l = log pi - log ref`` of a token, in nats.

    kl-comedy certify --plugin FILE      # what it optimizes, in reward and in loss, on- and off-policy
    kl-comedy train CONFIG --plugin FILE 'kl=[{estimator: my_k2, placement: loss, beta: 0.05}]'

How estimators are declared and tested: CONTRIBUTING.md.
"""

from torch import Tensor

from kl_comedy.registry import ESTIMATORS


@ESTIMATORS.register(
    "my_k2",
    source="Schulman 2020, k2",  # the paper and equation it comes from
    claims=("pathwise:token_reverse", "nonnegative"),  # `certify` exits 1 where one is false
    needs="log_ratio",
)
def my_k2(log_ratio: Tensor) -> Tensor:
    """``l^2 / 2``. Keyword parameters with defaults become options of the KL term."""
    return 0.5 * log_ratio.square()
