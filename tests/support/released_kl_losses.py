"""KL losses of released wheels (bench/peers/.wheels), and what each optimizes, for examples/conformance.

The names of this module are those of the module that the example asks a trainer for.
"""

import torch
from peers.adapters import openrlhf, skyrl, trinity, verl
from peers.adapters import trl as trl_adapter

from kl_comedy.conformance.released import released

ON_POLICY = {"claims": "token_reverse", "regimes": ("on_policy",)}


def verl_k2(logp, ref_logp, mask):
    penalty = verl.PEER.module(verl.CORE).kl_penalty(logp, ref_logp, "k2")
    return torch.where(mask, penalty, 0.0)


def openrlhf_unbiased(logp, ref_logp, behaviour_logp, mask):
    estimate = openrlhf.PEER.module(openrlhf.UTILS).compute_approx_kl
    value = estimate(logp, ref_logp, behaviour_logp, kl_estimator="k2", unbiased_gradient=True)
    return torch.where(mask, value, 0.0)


def skyrl_k3(logp, ref_logp, mask):
    estimate = skyrl.PEER.module(skyrl.UTILS).compute_approx_kl
    return estimate(logp, ref_logp, loss_mask=mask.to(logp.dtype), kl_estimator_type="k3")


def trinity_k2(logp, ref_logp, behaviour_logp, mask):
    function = getattr(trinity.PEER.module(trinity.MODULE), trinity.CLASSES["k2"])(kl_coef=1.0)
    value, _metrics = function.calculate_kl_loss(
        logprob=logp,
        ref_logprob=ref_logp,
        response_mask=mask.to(logp.dtype),
        loss_agg_mode="seq-mean-token-sum",
        old_logprob=behaviour_logp,
    )
    return torch.as_tensor(value)


def trl_k3_with_its_ratio():
    trl_adapter.PEER.module(trl_adapter.GRPO)
    _version, losses = released("trl")
    return losses[0].loss


kl_loss = verl_k2
"""The one that the workflow of the example names."""

CLAIMS = {
    "verl kl_penalty k2": (verl_k2, ON_POLICY),
    "openrlhf compute_approx_kl, unbiased_gradient": (openrlhf_unbiased, {**ON_POLICY, "near_only": True}),
    "skyrl compute_approx_kl k3": (
        skyrl_k3,
        {"claims": "token_forward", "regimes": ("on_policy",), "near_only": True},
    ),
    "trinity k2": (trinity_k2, ON_POLICY),
    "trl GRPO, use_bias_correction_kl": (
        trl_k3_with_its_ratio(),
        {"claims": dict.fromkeys(("on_policy", "off_policy"), "token_reverse"), "regimes": ("on_policy",)},
    ),
}
