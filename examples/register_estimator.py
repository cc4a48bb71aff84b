"""A new KL estimator in one function, and the exact proof of what it optimizes.

As a plugin it is used like a built-in one:

    kl-comedy train configs/quickstart.yaml --plugin examples/register_estimator.py \
        'kl=[{estimator: k2_shift, placement: loss, beta: 0.03, options: {shift: 0.05}}]'

Run as a script, this file enumerates every completion of a small policy in float64. It prints what the
estimator optimizes in reward and in loss, on- and off-policy, and what its claims say:

    python examples/register_estimator.py
"""

from __future__ import annotations

from torch import Tensor

from kl_comedy.kl import KLTerm, claimed_target
from kl_comedy.kl.claims import TARGETS
from kl_comedy.kl.oracle import Instance, InstanceSettings, Tree, expected_gradient, target_gradient
from kl_comedy.registry import ESTIMATORS


@ESTIMATORS.register(
    "k2_shift",
    source="k2 (Schulman 2020) with a constant baseline for its score, Williams 1992",
    claims=("pathwise:token_reverse", "nonnegative"),
    needs="log_ratio",
)
def k2_shift(log_ratio: Tensor, shift: float = 0.0) -> Tensor:
    """``(l - shift)^2 / 2``: k2 with a constant baseline ``shift`` (nats), which changes only the gradient's variance.

    Its gradient is ``(l - shift) * grad log pi``. The score ``grad log pi`` has mean zero at every prefix, so a
    constant ``shift`` does not change the expected on-policy gradient. Its value is not a KL. ``shift`` 0 is k2.

    >>> k2_shift(Tensor([2.0]), shift=1.0)
    tensor([0.5000])
    """
    return 0.5 * (log_ratio - shift).square()


TERMS = (
    KLTerm("k2_shift", placement="reward", credit="own", options={"shift": 0.3}),
    KLTerm("k2_shift", placement="reward", credit="to_go", options={"shift": 0.3}),
    KLTerm("k2_shift", placement="loss", options={"shift": 0.3}),
    KLTerm("k2_shift", placement="loss", correction="token_detached", options={"shift": 0.3}),
)


def setting(regime: str) -> Instance:
    """A policy over 3 tokens and up to 4 steps; its logits and the reference's differ by unit normal noise."""
    return Instance.random(Tree.build(vocabulary=3, length=4), InstanceSettings(regime=regime, seed=0, distance=1.0))


def enumerated_target(term: KLTerm, regime: str) -> str | None:
    """The target whose gradient the term's exact expected gradient equals, or None."""
    instance = setting(regime)
    gradient = expected_gradient(instance, [term])
    for name in TARGETS:
        # Both gradients are sums over all completions in float64, so that only rounding separates equal ones.
        if gradient.relative_bias(target_gradient(instance, name)) < 1e-10:
            return name
    return None


def gradient_variance(term: KLTerm) -> float:
    """Trace of the covariance of the gradient of one on-policy completion, computed by enumeration."""
    return expected_gradient(setting("on_policy"), [term]).variance


def least_noisy_shift() -> tuple[float, float, float]:
    """The variance at shift 0, the shift of least variance, and the variance at that shift."""
    variances = {}
    for shift in (-1, 0, 1):
        term = KLTerm("k2_shift", placement="loss", options={"shift": shift})
        variances[shift] = gradient_variance(term)

    # The gradient is linear in the shift, so its variance is a parabola: three points determine it.
    curvature = (variances[-1] + variances[1] - 2 * variances[0]) / 2
    slope = (variances[1] - variances[-1]) / 2
    best_shift = -slope / (2 * curvature)
    least_variance = variances[0] - slope**2 / (4 * curvature)
    return variances[0], best_shift, least_variance


def main() -> None:
    print(f"{'term':<66} {'regime':<11} {'claimed':<14} enumerated")
    for term in TERMS:
        for regime in ("on_policy", "off_policy"):
            claimed = claimed_target(term, regime)
            enumerated = enumerated_target(term, regime)
            print(f"{term.label():<66} {regime:<11} {claimed or 'none':<14} {enumerated or 'none'}")
            if claimed != enumerated:
                raise SystemExit(f"the claim of {term.label()} does not hold {regime}")
    at_0, best, least = least_noisy_shift()
    print(f"\nvariance of the gradient in loss, on-policy: {at_0:.4f} at shift 0 (k2), {least:.4f} at shift {best:.3f}")


if __name__ == "__main__":
    main()
