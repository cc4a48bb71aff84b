"""The KL losses of a trainer, in the place of your own module, and what each optimizes."""


def kl_loss(logp, ref_logp, mask):
    """k2: half the squared log-ratio."""
    return 0.5 * (logp - ref_logp) ** 2 * mask


def returns_over_tools(logp, ref_logp, mask):
    """A mistake: costs to go that also add up the log-ratios of what a tool wrote."""
    costs = (logp - ref_logp).detach()
    to_go = costs.flip(-1).cumsum(-1).flip(-1)
    return (to_go * logp * mask).sum()


def with_names_of_its_own(policy, batch, *, scale):
    """A loss whose parameters and results have other names; `adapt` or --arguments say what they mean."""
    log_ratio = policy - batch["sft"]
    return {"kl_term": scale * 0.5 * log_ratio**2 * batch["keep"], "kl": log_ratio.detach()}


CLAIMS = {
    "kl_loss": (kl_loss, {"claims": "token_reverse", "regimes": ("on_policy",)}),
}
