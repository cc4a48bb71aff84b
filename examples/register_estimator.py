"""A new KL estimator in one function, and the exact proof of what it descends.

As a plugin it is there like a built-in one:

    kl-comedy train configs/quickstart.yaml --plugin examples/register_estimator.py \
        'kl=[{estimator: k2_shift, placement: loss, beta: 0.03, options: {shift: 0.05}}]'

As a script it enumerates every completion of a small policy in float64 and says what the estimator
descends in reward and in loss, on- and off-policy, beside what its claims promise:

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
    """``(l - shift)^2 / 2``: the expected gradient of k2, with a constant baseline ``shift`` (nats) for its noise.

    Differentiated, it is ``(l - shift) * grad log pi``, and the score has mean zero at every prefix, so no
    constant ``shift`` moves the expected gradient on-policy. Its value is not a KL. ``shift`` 0 is k2.

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


def target_hit(term: KLTerm, regime: str) -> str | None:
    """The target whose gradient the term's exact expected gradient equals, or None."""
    where = setting(regime)
    gradient = expected_gradient(where, [term])
    hit = [name for name in TARGETS if gradient.relative_bias(target_gradient(where, name)) < 1e-10]
    return hit[0] if hit else None


def gradient_variance(term: KLTerm) -> float:
    """Trace of the covariance of one on-policy completion's gradient, summed over all completions."""
    return expected_gradient(setting("on_policy"), [term]).variance


def least_noisy_shift() -> tuple[float, float, float]:
    """Variance at shift 0, the shift of least variance, and that variance: it is a parabola in ``shift``."""
    below, at_0, above = (
        gradient_variance(KLTerm("k2_shift", placement="loss", options={"shift": shift})) for shift in (-1, 0, 1)
    )
    curvature, slope = (below + above - 2 * at_0) / 2, (above - below) / 2
    return at_0, -slope / (2 * curvature), at_0 - slope**2 / (4 * curvature)


def main() -> None:
    print(f"{'term':<66} {'regime':<11} {'claimed':<14} enumerated")
    for term in TERMS:
        for regime in ("on_policy", "off_policy"):
            claimed, hit = claimed_target(term, regime), target_hit(term, regime)
            print(f"{term.label():<66} {regime:<11} {claimed or 'none':<14} {hit or 'none'}")
            if claimed != hit:
                raise SystemExit(f"the claim of {term.label()} does not hold {regime}")
    at_0, best, least = least_noisy_shift()
    print(f"\nvariance of the gradient in loss, on-policy: {at_0:.4f} at shift 0 (k2), {least:.4f} at shift {best:.3f}")


if __name__ == "__main__":
    main()
