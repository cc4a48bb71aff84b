"""A certified KL term in a PyTorch loop of your own.

Needs torch and the light install of kl_comedy only: no config, no Trainer, no store. Run it:

    python examples/own_trainer.py

A small recurrent policy over six tokens is fine-tuned by REINFORCE to write one of them more often. The KL term keeps
it near the reference. First ``certify`` proves by enumeration what the term optimizes, and ``check_loss`` proves that
the loss of this file, with its mask and its sum, optimizes the same. The rest is an ordinary training loop.

Legend: B completions, T completion tokens, V vocabulary; log-probs in nats.
"""

from __future__ import annotations

import argparse
import copy

import torch
from torch import Tensor, nn

from kl_comedy import KLTerm, certify, check_loss, kl_surrogate

VOCABULARY = 6
END = 0
REWARDED_TOKEN = 5
COMPLETIONS = 64
LENGTH = 8

# Your KL, written as data. k2 in the loss has the gradient of the reverse KL at each visited prefix. With k1 in its
# place the gradient would be noise, and with k3 (GRPO's) that of the forward KL.
BETA = 0.1
TERM = KLTerm("k2", placement="loss", beta=BETA)


class Policy(nn.Module):
    """Next-token distributions of a GRU."""

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
    start_B1 = torch.full_like(ids_BT[:, :1], END)
    return torch.cat([start_B1, ids_BT[:, :-1]], 1)


def token_logp(policy: Policy, ids_BT: Tensor) -> Tensor:
    """Log-probs of the tokens of completions, ``[B, T]``."""
    logp_BTV = policy(with_start(ids_BT))
    return logp_BTV.gather(-1, ids_BT[..., None])[..., 0]


@torch.no_grad()
def sample(policy: Policy) -> tuple[Tensor, Tensor]:
    """Sampled completions ``[B, T]``, and the mask of their tokens up to and including the first end token."""
    ids_BT = torch.full((COMPLETIONS, LENGTH), END)
    for t in range(LENGTH):
        logp_BV = policy(with_start(ids_BT))[:, t]
        ids_BT[:, t] = torch.multinomial(logp_BV.exp(), 1)[:, 0]

    # The start token is an end token too, so that column 0 is left out of the count and is always in the mask.
    ended_before_BT = (with_start(ids_BT) == END)[:, 1:].cumsum(1) > 0
    mask_BT = torch.cat([torch.ones(COMPLETIONS, 1, dtype=torch.bool), ~ended_before_BT], 1)
    return ids_BT, mask_BT


def kl_loss(logp: Tensor, ref_logp: Tensor, behaviour_logp: Tensor, mask: Tensor) -> Tensor:
    """The KL term of each completion, ``[B]``: what this file adds to its loss, and what ``check_loss`` checks."""
    # kl_surrogate rejects a completion without tokens, but a trainer may mask a whole completion (one that was cut
    # off). Such a row is passed with all its tokens, and has no weight in the sum below.
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
    """Raise before any training if the term or the loss does not optimize what this file says."""
    certificate = certify(TERM)
    certificate.assert_ok()
    print(certificate)
    # One regime: the loop below samples from the policy that it updates.
    report = check_loss(kl_loss, claims={"on_policy": "token_reverse"}, regimes=["on_policy"])
    report.assert_ok()
    print(report)


def train(steps: int, seed: int) -> tuple[float, float]:
    """Fine-tune a policy. Returns the last batch's mean reward and its exact KL after the last update.

    The reward is the number of rewarded tokens in the completion, divided by ``LENGTH``.
    """
    torch.manual_seed(seed)
    policy = Policy()
    reference = copy.deepcopy(policy).requires_grad_(False)
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    reward = 0.0
    kl = 0.0
    for step in range(steps):
        ids_BT, mask_BT = sample(policy)
        rewarded_BT = (ids_BT == REWARDED_TOKEN) & mask_BT
        reward_B = rewarded_BT.sum(-1) / LENGTH
        advantage_B = reward_B - reward_B.mean()

        logp_BT = token_logp(policy, ids_BT)
        ref_logp_BT = token_logp(reference, ids_BT)
        # The policy itself sampled these tokens. With an inference engine, pass the log-probs that the engine recorded.
        behaviour_logp_BT = logp_BT.detach()

        policy_loss_B = -(advantage_B[:, None] * logp_BT * mask_BT).sum(-1)
        kl_loss_B = kl_loss(logp_BT, ref_logp_BT, behaviour_logp_BT, mask_BT)
        loss = (policy_loss_B + kl_loss_B).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        reward = float(reward_B.mean())
        kl = exact_kl(policy, reference, ids_BT, mask_BT)
        is_last = step == steps - 1
        if step % 50 == 0 or is_last:
            print(f"update {step:4}  reward {reward:.3f}  exact KL {kl:.3f} nats per completion")
    return reward, kl


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=200, help="updates")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    prove()
    train(arguments.steps, arguments.seed)


if __name__ == "__main__":
    main()
