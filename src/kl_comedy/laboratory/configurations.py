"""The configurations the studies draw, by the name they have in figures and tables; every beta is 1.

Terms that couple a group, or have another reference, are judged elsewhere.
"""

from __future__ import annotations

from kl_comedy.kl import KLTerm

Terms = tuple[KLTerm, ...]

NO_KL: Terms = ()
K1_REWARD: Terms = (KLTerm("k1", credit="total"),)
K3_REWARD: Terms = (KLTerm("k3", credit="total"),)
K1_LOSS: Terms = (KLTerm("k1", placement="loss"),)
K2_LOSS: Terms = (KLTerm("k2", placement="loss"),)
K3_LOSS: Terms = (KLTerm("k3", placement="loss"),)
RB_TOKEN: Terms = (KLTerm("exact", placement="loss"),)
RB_FULL: Terms = (KLTerm("exact", credit="to_go"),)
RB_PER_DECISION: Terms = (KLTerm("exact", placement="loss", correction="prefix_previous"),)
RATIO_K3: Terms = (KLTerm("k3", placement="loss", correction="token"),)

ON_POLICY: dict[str, Terms] = {
    "k1 in reward, total": K1_REWARD,
    "k1 in reward, to go": (KLTerm("k1", credit="to_go"),),
    "k1 in loss": K1_LOSS,
    "k2 in loss": K2_LOSS,
    "k3 in reward": K3_REWARD,
    "k3 in loss": K3_LOSS,
    "k1 in both": K1_REWARD + K1_LOSS,
    "k3 in both": K3_REWARD + K3_LOSS,
    "exact KL in loss (rb/token)": RB_TOKEN,
    "exact KL to go (rb/full)": RB_FULL,
}
"""On-policy: what the papers compare, and the exact forms."""

OFF_POLICY: dict[str, Terms] = {
    "k1 in reward, bare": K1_REWARD,
    "k3 in reward, bare": K3_REWARD,
    "k1 in loss, bare": K1_LOSS,
    "k2 in loss, bare": K2_LOSS,
    "k3 in loss, bare": K3_LOSS,
    "k1 in reward x token ratio": (KLTerm("k1", credit="total", correction="token"),),
    "k3 in loss x token ratio": RATIO_K3,
    "exact KL in loss (rb/token)": RB_TOKEN,
    "k1 x sequence ratio": (KLTerm("k1", credit="total", correction="sequence"),),
    "k1 x prefix ratio (per decision)": (KLTerm("k1", correction="prefix"),),
    "exact KL x prefix ratio (rb/per_decision)": RB_PER_DECISION,
}
"""Off-policy: bare forms, token ratios, and the unbiased ones."""

CLAMPED: dict[str, Terms] = {
    "k3 in loss, clamped as in verl": (KLTerm("k3", placement="loss", input_clamp=20.0, output_clamp=10.0),),
    "k2 in loss, clamped as in OpenRLHF": (KLTerm("k2", placement="loss", output_clamp=10.0),),
    "k3 in loss, clamped at 1": (KLTerm("k3", placement="loss", output_clamp=1.0),),
}
"""Estimates cut off at a bound, beyond which they have no gradient."""

HALF_OF_BOTH: Terms = (KLTerm("k3", credit="total", beta=0.5), KLTerm("k3", placement="loss", beta=0.5))

DESCENDED: dict[str, Terms] = {
    "no KL": NO_KL,
    **ON_POLICY,
    "k1 in reward, own token": (KLTerm("k1", credit="own"),),
    "k3 in both, half of beta each": HALF_OF_BOTH,
    "k3 in loss x token ratio": RATIO_K3,
    "k3 of the completion in loss": (KLTerm("k3", level="sequence", placement="loss"),),
    "k1 x sequence ratio": (KLTerm("k1", credit="total", correction="sequence"),),
    "k1 frozen at rollout x sequence ratio": (KLTerm("k1", credit="total", correction="sequence", anchor="behaviour"),),
    "exact KL x prefix ratio (rb/per_decision)": RB_PER_DECISION,
}
"""What is descended to its end."""

RECOVERING: dict[str, Terms] = {
    "no KL": NO_KL,
    "k1 in reward": K1_REWARD,
    "k1 in loss": K1_LOSS,
    "k2 in loss": K2_LOSS,
    "k3 in reward": K3_REWARD,
    "k3 in loss": K3_LOSS,
    "k3 in both": K3_REWARD + K3_LOSS,
    "exact KL to go (rb/full)": RB_FULL,
    "exact forward KL in loss": (KLTerm("exact_forward", placement="loss"),),
}
"""What is asked to bring a lost mode back."""
