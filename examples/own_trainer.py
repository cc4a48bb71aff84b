"""A certified KL term in a PyTorch loop of your own.

Needs torch and the light install of kl_comedy only: no config, no Trainer, no store. Run it:

    python examples/own_trainer.py

A small recurrent policy over six tokens is fine-tuned by REINFORCE to write one of them more often. The KL term holds
it near the reference. First ``certify`` proves by enumeration what the term optimizes, and ``check_loss`` proves that
the loss of this file, with its mask and its sum, optimizes that too. The rest is a loop as you have one.

Legend: B completions, T completion tokens, V vocabulary; log-probs in nats.
"""

from __future__ import annotations

import argparse
import copy

import torch
from torch import Tensor, nn

from kl_comedy import KLTerm, certify, check_loss, kl_surrogate

VOCABULARY, END, WANTED = 6, 0, 5
COMPLETIONS, LENGTH = 64, 8

# Your KL, written as data. k2, differentiated, has the gradient of the reverse KL at each visited prefix; with
# estimator k1 the same line would be noise, and with k3 (GRPO's) the forward KL.
BETA = 0.1
TERM = KLTerm("k2", placement="loss", beta=BETA)


class Policy(nn.Module):
    """Next-token logits of a GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.gru = nn.GRU(32, 32, batch_first=True)
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Log-probs of the next token after each prefix, ``[B, T, V]``."""
        hidden_BTH, _ = self.gru(self.embedding(ids_BT))
        return torch.log_softmax(self.head(hidden_BTH), -1)


def with_start(ids_BT: Tensor) -> Tensor:
    """The inputs that predict ``ids_BT``: a start token, then all tokens but the last."""
    return torch.cat([torch.full_like(ids_BT[:, :1], END), ids_BT[:, :-1]], 1)


def token_logp(policy: Policy, ids_BT: Tensor) -> Tensor:
    """Log-probs of the tokens of completions, ``[B, T]``."""
    return policy(with_start(ids_BT)).gather(-1, ids_BT[..., None])[..., 0]


@torch.no_grad()
def sample(policy: Policy) -> tuple[Tensor, Tensor]:
    """Completions ``[B, T]``, and the mask of their tokens up to the end token, that one included."""
    ids_BT = torch.full((COMPLETIONS, LENGTH), END)
    for t in range(LENGTH):
        logp_BV = policy(with_start(ids_BT))[:, t]
        ids_BT[:, t] = torch.multinomial(logp_BV.exp(), 1)[:, 0]
    ended_before_BT = (with_start(ids_BT) == END)[:, 1:].cumsum(1) > 0
    mask_BT = torch.cat([torch.ones(COMPLETIONS, 1, dtype=torch.bool), ~ended_before_BT], 1)
    return ids_BT, mask_BT


def kl_loss(logp: Tensor, ref_logp: Tensor, behaviour_logp: Tensor, mask: Tensor) -> Tensor:
    """The KL term of each completion, ``[B]``: what this file adds to its loss, and what ``check_loss`` checks."""
    # kl_surrogate refuses a completion without a token, and a trainer may mask a whole completion (one that was cut
    # off). Such a row is passed with all its tokens, and weighs nothing in the sum.
    nonempty_mask = mask | ~mask.any(-1, keepdim=True)
    surrogate_BT = kl_surrogate(
        TERM, logp_BT=logp, ref_logp_BT=ref_logp, behaviour_logp_BT=behaviour_logp, mask_BT=nonempty_mask
    )
    return BETA * torch.where(mask, surrogate_BT, 0.0).sum(-1)


def exact_kl(policy: Policy, reference: Policy, ids_BT: Tensor, mask_BT: Tensor) -> float:
    """KL(policy || reference) summed over the prefixes of each completion, in nats per completion."""
    with torch.no_grad():
        logp_BTV = policy(with_start(ids_BT))
        ref_logp_BTV = reference(with_start(ids_BT))
    kl_BT = (logp_BTV.exp() * (logp_BTV - ref_logp_BTV)).sum(-1)
    return float((kl_BT * mask_BT).sum(-1).mean())


def prove() -> None:
    """Stop here, before any training, if the term or the loss is not what this file says."""
    certified = certify(TERM).assert_ok()
    print(certified)
    report = check_loss(kl_loss, claims={"on_policy": "token_reverse"}, regimes=["on_policy"])
    report.assert_ok()
    print(report)


def train(steps: int, seed: int) -> tuple[float, float]:
    """Fine-tune a policy; its mean reward (the share of wanted tokens) and exact KL after the last update."""
    torch.manual_seed(seed)
    policy = Policy()
    reference = copy.deepcopy(policy).requires_grad_(False)
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    reward, kl = 0.0, 0.0
    for step in range(steps):
        ids_BT, mask_BT = sample(policy)
        reward_B = ((ids_BT == WANTED) & mask_BT).sum(-1) / LENGTH
        advantage_B = reward_B - reward_B.mean()

        logp_BT = token_logp(policy, ids_BT)
        ref_logp_BT = token_logp(reference, ids_BT)
        behaviour_logp_BT = logp_BT.detach()  # the policy itself drew them; from an engine, take what it recorded

        policy_loss_B = -(advantage_B[:, None] * logp_BT * mask_BT).sum(-1)
        loss = (policy_loss_B + kl_loss(logp_BT, ref_logp_BT, behaviour_logp_BT, mask_BT)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        reward = float(reward_B.mean())
        kl = exact_kl(policy, reference, ids_BT, mask_BT)
        if step % 50 == 0 or step == steps - 1:
            print(f"update {step:4}  reward {reward:.3f}  exact KL {kl:.3f} nats per completion")
    return reward, kl


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--steps", type=int, default=200, help="updates")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    prove()
    train(arguments.steps, arguments.seed)


if __name__ == "__main__":
    main()
