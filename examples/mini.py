"""The whole of kl_comedy in one file: problems, rollouts, verified rewards, KL terms, training, a table.

The readable twin of the package: the same names for the same things, only torch, no options that the
story does not need. A tiny GRU learns sums of two numbers from a few demonstrations, and is then
fine-tuned by RL under KL terms written as data. Run it:

    python examples/mini.py

It prints, for each KL configuration, the verified reward and the exact KL to the reference before and
after. Legend: B completions, T completion tokens, V vocabulary, G completions per prompt; nats.
"""

from __future__ import annotations

import argparse
import copy
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

VOCABULARY = ["<pad>", "<end>", *"0123456789+="]
PAD, END = 0, 1
ENCODE = {token: n for n, token in enumerate(VOCABULARY)}


# --- registry ---------------------------------------------------------------------------------------
ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {}


def register(name: str) -> Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor], Tensor]]:
    """File a function under a name and return it unchanged; a name taken twice raises."""

    def file(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        if name in ESTIMATORS:
            raise ValueError(f"estimator {name!r} is already registered")
        ESTIMATORS[name] = fn
        return fn

    return file


# --- kl: estimators, the term, the surrogate -----------------------------------------------------------
@register("k1")
def k1(log_ratio: Tensor) -> Tensor:
    """``l``: unbiased value; differentiated, pure noise."""
    return log_ratio


@register("k2")
def k2(log_ratio: Tensor) -> Tensor:
    """``l^2 / 2``: differentiated, the reverse KL of each visited prefix."""
    return 0.5 * log_ratio.square()


@register("k3")
def k3(log_ratio: Tensor) -> Tensor:
    """``exp(-l) - 1 + l``: differentiated, the forward KL of each visited prefix."""
    return torch.expm1(-log_ratio) + log_ratio


@dataclass(frozen=True)
class KLTerm:
    """One KL penalty as data. ``credit`` (for reward): which costs weight the score of token t."""

    estimator: str
    placement: str = "reward"
    credit: str = "to_go"
    beta: float = 1.0

    def label(self) -> str:
        return f"{self.beta:g} {self.estimator} in {self.placement}" + (
            f" {self.credit}" if self.placement == "reward" else ""
        )


def kl_surrogate(term: KLTerm, *, logp_BT: Tensor, ref_logp_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Per-token loss whose expected gradient is what the term descends, at beta = 1 (on-policy)."""
    log_ratio_BT = torch.where(mask_BT, logp_BT - ref_logp_BT.detach(), torch.zeros_like(logp_BT))
    value_BT = ESTIMATORS[term.estimator](log_ratio_BT)
    if term.placement == "loss":
        return value_BT * mask_BT
    cost_BT = value_BT.detach()
    if term.credit == "total":
        cost_BT = cost_BT.sum(-1, keepdim=True).expand_as(cost_BT)
    elif term.credit == "to_go":
        cost_BT = cost_BT.flip(-1).cumsum(-1).flip(-1)
    return cost_BT * logp_BT * mask_BT


# --- records and data -----------------------------------------------------------------------------------
@dataclass(frozen=True)
class Problem:
    text: str
    answer: str


@dataclass(frozen=True)
class Experience:
    """What the learner sees: padded ids, the mask of sampled tokens, sampler's log-probs, reward, group."""

    ids_BL: Tensor
    mask_BT: Tensor
    behaviour_logp_BT: Tensor
    reward_B: Tensor
    group_B: Tensor


def problems(count: int, seed: int, *, held_out: bool) -> list[Problem]:
    """Sums of two numbers below 30; one pair in ten, drawn once, is held out and never trained on."""
    draw = random.Random(seed)
    problems: list[Problem] = []
    while len(problems) < count:
        a, b = draw.randrange(30), draw.randrange(30)
        if (random.Random(a * 100 + b).random() < 0.1) == held_out:
            problems.append(Problem(f"{a:02d}+{b:02d}=", str(a + b)))
    return problems


def encode(text: str) -> list[int]:
    return [ENCODE[c] for c in text]


PROMPT = len("00+00=")
NEW_TOKENS = 4


# --- policy -----------------------------------------------------------------------------------------------
class Policy(nn.Module):
    """Next-token logits from a GRU over characters."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(VOCABULARY), width)
        self.body = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, len(VOCABULARY))

    def forward(self, ids_BL: Tensor) -> Tensor:
        """``[B, L]`` ids to next-token log-probs ``[B, L, V]``."""
        return self.head(self.body(self.embed(ids_BL))[0]).log_softmax(-1)


def completion_logps(policy: Policy, ids_BL: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs of the completion's tokens ``[B, T]``, and the whole distributions ``[B, T, V]``."""
    logp_BTV = policy(ids_BL)[:, PROMPT - 1 : -1]
    return logp_BTV.gather(-1, ids_BL[:, PROMPT:, None]).squeeze(-1), logp_BTV


# --- rollouts and rewards -----------------------------------------------------------------------------------
@torch.no_grad()
def generate(policy: Policy, prompts: list[Problem], group_size: int, generator: torch.Generator) -> Experience:
    """Sample ``group_size`` completions a prompt, and verify them."""
    ids_BL = torch.tensor([encode(p.text) for p in prompts]).repeat_interleave(group_size, 0)
    alive_B = torch.ones(len(ids_BL), dtype=torch.bool)
    masks, logps = [], []
    for _ in range(NEW_TOKENS):
        logp_BV = policy(ids_BL)[:, -1]
        token_B = torch.multinomial(logp_BV.exp(), 1, generator=generator)[:, 0]
        token_B = torch.where(alive_B, token_B, torch.full_like(token_B, PAD))
        masks.append(alive_B)
        logps.append(logp_BV.gather(-1, token_B[:, None])[:, 0])
        ids_BL = torch.cat([ids_BL, token_B[:, None]], 1)
        alive_B = alive_B & (token_B != END)
    mask_BT = torch.stack(masks, 1)
    answers = [p.answer for p in prompts for _ in range(group_size)]
    return Experience(
        ids_BL=ids_BL,
        mask_BT=mask_BT,
        behaviour_logp_BT=torch.stack(logps, 1) * mask_BT,
        reward_B=torch.tensor([score(row, a) for row, a in zip(ids_BL[:, PROMPT:], answers, strict=True)]),
        group_B=torch.arange(len(prompts)).repeat_interleave(group_size),
    )


def score(ids_T: Tensor, answer: str) -> float:
    """1 where the completion is the answer and then ends."""
    return float([int(n) for n in ids_T[: len(answer) + 1]] == [*encode(answer), END])


# --- objective ------------------------------------------------------------------------------------------------
def rloo(reward_B: Tensor, group_size: int) -> Tensor:
    """``R_i`` less the mean of the others of its group."""
    reward_PG = reward_B.view(-1, group_size)
    return (reward_PG - (reward_PG.sum(1, keepdim=True) - reward_PG) / (group_size - 1)).flatten()


def update(
    policy: Policy,
    reference: Policy,
    experience: Experience,
    terms: list[KLTerm],
    optimizer: torch.optim.Optimizer,
    group_size: int,
) -> float:
    """One optimizer step: policy loss plus every KL term, averaged over tokens. Returns the exact KL."""
    mask_BT = experience.mask_BT
    logp_BT, logp_BTV = completion_logps(policy, experience.ids_BL)
    with torch.no_grad():
        ref_logp_BT, ref_logp_BTV = completion_logps(reference, experience.ids_BL)
    advantage_B = rloo(experience.reward_B, group_size)
    loss_BT = -advantage_B[:, None] * logp_BT * mask_BT
    for term in terms:
        loss_BT = loss_BT + term.beta * kl_surrogate(term, logp_BT=logp_BT, ref_logp_BT=ref_logp_BT, mask_BT=mask_BT)
    optimizer.zero_grad()
    (loss_BT.sum() / mask_BT.sum()).backward()
    nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    exact_BT = (logp_BTV.exp() * (logp_BTV - ref_logp_BTV)).sum(-1).detach() * mask_BT
    return float(exact_BT.sum() / len(mask_BT))


# --- training ---------------------------------------------------------------------------------------------------
def warm_start(seed: int, steps: int) -> Policy:
    """Imitate demonstrations until the policy is right now and then: the start, and the reference."""
    torch.manual_seed(seed)
    policy = Policy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
    for step in range(steps):
        batch = problems(64, seed * 100_003 + step, held_out=False)
        rows = [[*encode(p.text + p.answer), END] for p in batch]
        ids_BL = torch.tensor([row + [PAD] * (PROMPT + NEW_TOKENS - len(row)) for row in rows])
        logp_BT, _ = completion_logps(policy, ids_BL)
        mask_BT = ids_BL[:, PROMPT:] != PAD
        optimizer.zero_grad()
        (-(logp_BT * mask_BT).sum() / mask_BT.sum()).backward()
        optimizer.step()
    return policy


def train(start: Policy, terms: list[KLTerm], *, steps: int, seed: int, group_size: int = 8) -> dict[str, float]:
    """Reinforcement learning from the warm start under a list of KL terms."""
    policy, reference = copy.deepcopy(start), copy.deepcopy(start)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(seed)
    held_out = problems(128, 7, held_out=True)

    def reward() -> float:
        return float(generate(policy, held_out, 4, torch.Generator().manual_seed(1)).reward_B.mean())

    first, kl_first, kl = reward(), float("nan"), float("nan")
    for step in range(steps):
        batch = problems(24, 1_000_003 * (seed + 1) + step, held_out=False)
        experience = generate(policy, batch, group_size, generator)
        kl = update(policy, reference, experience, terms, optimizer, group_size)
        kl_first = kl if step == 0 else kl_first
    return {"reward_before": first, "reward_after": reward(), "kl_first": kl_first, "kl_last": kl}


CONFIGURATIONS: dict[str, list[KLTerm]] = {
    "no KL": [],
    "k1 in reward": [KLTerm("k1", placement="reward", beta=0.05)],
    "k2 in loss": [KLTerm("k2", placement="loss", beta=0.05)],
    "k3 in loss": [KLTerm("k3", placement="loss", beta=0.05)],
    "k3 in both": [KLTerm("k3", placement="reward", beta=0.05), KLTerm("k3", placement="loss", beta=0.05)],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=150, help="RL updates")
    parser.add_argument("--warm", type=int, default=1000, help="supervised steps before")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    start = warm_start(arguments.seed, arguments.warm)
    print(f"{'configuration':<14} {'reward before':>13} {'after':>6} {'exact KL (nats a completion)':>29}")
    for name, terms in CONFIGURATIONS.items():
        got = train(start, terms, steps=arguments.steps, seed=arguments.seed)
        print(f"{name:<14} {got['reward_before']:>13.3f} {got['reward_after']:>6.3f} {got['kl_last']:>29.3f}")


if __name__ == "__main__":
    main()
