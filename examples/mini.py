"""The whole of kl_comedy in one file: problems, rollouts, verified rewards, KL terms, training, a table.

The readable twin of the package: it uses the package's names, needs only torch, and has no option that
these experiments do not use. A tiny GRU learns sums of two numbers from a few demonstrations, and is then
fine-tuned by RL under KL terms written as data. Run it:

    python examples/mini.py

For each KL configuration it prints the verified reward before and after, and the exact KL to the reference.
Legend: B completions, L prompt and completion tokens, T completion tokens, V vocabulary, P prompts,
G completions per prompt. Log-probs and KLs are in nats.
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
PAD = VOCABULARY.index("<pad>")
END = VOCABULARY.index("<end>")
TOKEN_IDS = {token: token_id for token_id, token in enumerate(VOCABULARY)}


# --- registry ---------------------------------------------------------------------------------------
ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {}


def register(name: str) -> Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor], Tensor]]:
    """A decorator that adds a function to the registry and returns it unchanged. Duplicate names raise ValueError."""

    def add(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        # A silent overwrite would change what an existing KLTerm means.
        if name in ESTIMATORS:
            raise ValueError(f"estimator {name!r} is already registered")
        ESTIMATORS[name] = fn
        return fn

    return add


# --- kl: estimators, the term, the surrogate -----------------------------------------------------------
@register("k1")
def k1(log_ratio: Tensor) -> Tensor:
    """``l``: its value is unbiased; its gradient is noise with mean zero."""
    return log_ratio


@register("k2")
def k2(log_ratio: Tensor) -> Tensor:
    """``l^2 / 2``: its gradient is that of the reverse KL at each visited prefix."""
    return 0.5 * log_ratio.square()


@register("k3")
def k3(log_ratio: Tensor) -> Tensor:
    """``exp(-l) - 1 + l``: its gradient is that of the forward KL at each visited prefix."""
    # expm1 keeps its digits where l is near 0, which is where every run starts.
    return torch.expm1(-log_ratio) + log_ratio


@dataclass(frozen=True)
class KLTerm:
    """One KL penalty as data. ``credit`` (for placement reward) selects the costs that weight the score of token t."""

    estimator: str
    placement: str = "reward"
    credit: str = "to_go"
    beta: float = 1.0

    def label(self) -> str:
        text = f"{self.beta:g} {self.estimator} in {self.placement}"
        if self.placement == "reward":
            text += f" {self.credit}"
        return text


def kl_surrogate(term: KLTerm, *, logp_BT: Tensor, ref_logp_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Per-token loss ``[B, T]``; its expected on-policy gradient is that of what the term optimizes, at beta = 1."""
    # Masked positions may hold -inf or NaN. torch.where removes them; a product with the mask would keep NaN.
    log_ratio_BT = torch.where(mask_BT, logp_BT - ref_logp_BT.detach(), torch.zeros_like(logp_BT))
    value_BT = ESTIMATORS[term.estimator](log_ratio_BT)
    if term.placement == "loss":
        return value_BT * mask_BT
    # In the reward the value is a cost like any other: only the score, the gradient of logp, is differentiated.
    cost_BT = value_BT.detach()
    if term.credit == "total":
        cost_BT = cost_BT.sum(-1, keepdim=True).expand_as(cost_BT)
    elif term.credit == "to_go":
        # A token cannot change the costs before it, so leaving them out keeps the mean and lowers the variance.
        cost_BT = cost_BT.flip(-1).cumsum(-1).flip(-1)
    return cost_BT * logp_BT * mask_BT


# --- records and data -----------------------------------------------------------------------------------
@dataclass(frozen=True)
class Problem:
    text: str
    answer: str


@dataclass(frozen=True)
class Experience:
    """What the learner sees: padded ids, the mask of the sampled tokens, and the reward."""

    ids_BL: Tensor
    mask_BT: Tensor
    reward_B: Tensor


def problems(count: int, seed: int, *, held_out: bool) -> list[Problem]:
    """Sums of two numbers below 30. One pair in ten is held out and never trained on."""
    generator = random.Random(seed)
    problems: list[Problem] = []
    while len(problems) < count:
        a = generator.randrange(30)
        b = generator.randrange(30)
        # Seeded by the pair, not by ``seed``: the split must be the same in every call.
        pair_is_held_out = random.Random(a * 100 + b).random() < 0.1
        if pair_is_held_out == held_out:
            problems.append(Problem(f"{a:02d}+{b:02d}=", str(a + b)))
    return problems


def encode(text: str) -> list[int]:
    return [TOKEN_IDS[character] for character in text]


PROMPT = len("00+00=")
NEW_TOKENS = 4


# --- policy -----------------------------------------------------------------------------------------------
class Policy(nn.Module):
    """Next-token distributions of a GRU over characters."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(VOCABULARY), width)
        self.body = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, len(VOCABULARY))

    def forward(self, ids_BL: Tensor) -> Tensor:
        """Log-probs of the next token after each position of ids ``[B, L]``: ``[B, L, V]``."""
        hidden_BLH, _ = self.body(self.embed(ids_BL))
        return self.head(hidden_BLH).log_softmax(-1)


def completion_logps(policy: Policy, ids_BL: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs of the completion's tokens ``[B, T]``, and the whole distributions ``[B, T, V]``."""
    # The output at position t predicts the token at t + 1.
    logp_BTV = policy(ids_BL)[:, PROMPT - 1 : -1]
    logp_BT = logp_BTV.gather(-1, ids_BL[:, PROMPT:, None]).squeeze(-1)
    return logp_BT, logp_BTV


# --- rollouts and rewards -----------------------------------------------------------------------------------
@torch.no_grad()
def generate(policy: Policy, prompts: list[Problem], group_size: int, generator: torch.Generator) -> Experience:
    """Sample ``group_size`` completions per prompt, and verify them."""
    prompt_ids_PL = torch.tensor([encode(prompt.text) for prompt in prompts])
    ids_BL = prompt_ids_PL.repeat_interleave(group_size, 0)
    alive_B = torch.ones(len(ids_BL), dtype=torch.bool)
    masks = []
    for _ in range(NEW_TOKENS):
        logp_BV = policy(ids_BL)[:, -1]
        token_B = torch.multinomial(logp_BV.exp(), 1, generator=generator)[:, 0]
        token_B = torch.where(alive_B, token_B, torch.full_like(token_B, PAD))
        # The mask is taken before the end token is looked for: the policy chose that token too.
        masks.append(alive_B)
        ids_BL = torch.cat([ids_BL, token_B[:, None]], 1)
        alive_B = alive_B & (token_B != END)
    rewards = []
    for row, ids_T in enumerate(ids_BL[:, PROMPT:]):
        rewards.append(score(ids_T, prompts[row // group_size].answer))
    return Experience(ids_BL=ids_BL, mask_BT=torch.stack(masks, 1), reward_B=torch.tensor(rewards))


def score(ids_T: Tensor, answer: str) -> float:
    """1 if the completion is the answer followed by the end token, else 0."""
    expected = [*encode(answer), END]
    return float(ids_T[: len(expected)].tolist() == expected)


# --- objective ------------------------------------------------------------------------------------------------
def rloo(reward_B: Tensor, group_size: int) -> Tensor:
    """Advantages ``[B]``: each reward minus the mean reward of the other completions of its group."""
    reward_PG = reward_B.view(-1, group_size)
    # A baseline that leaves out the completion's own reward keeps the gradient unbiased.
    sum_of_others_PG = reward_PG.sum(1, keepdim=True) - reward_PG
    return (reward_PG - sum_of_others_PG / (group_size - 1)).flatten()


def update(
    policy: Policy,
    reference: Policy,
    experience: Experience,
    terms: list[KLTerm],
    optimizer: torch.optim.Optimizer,
    group_size: int,
) -> float:
    """One optimizer step on the policy loss plus the KL terms. Returns the exact KL before it, nats per completion."""
    # Within one update the experience is on-policy: the sampler's log-probs are those computed here.
    mask_BT = experience.mask_BT
    logp_BT, logp_BTV = completion_logps(policy, experience.ids_BL)
    with torch.no_grad():
        ref_logp_BT, ref_logp_BTV = completion_logps(reference, experience.ids_BL)

    advantage_B = rloo(experience.reward_B, group_size)
    loss_BT = -advantage_B[:, None] * logp_BT * mask_BT
    for term in terms:
        penalty_BT = kl_surrogate(term, logp_BT=logp_BT, ref_logp_BT=ref_logp_BT, mask_BT=mask_BT)
        loss_BT = loss_BT + term.beta * penalty_BT

    optimizer.zero_grad()
    (loss_BT.sum() / mask_BT.sum()).backward()
    nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    exact_kl_BT = (logp_BTV.exp() * (logp_BTV - ref_logp_BTV)).sum(-1).detach() * mask_BT
    return float(exact_kl_BT.sum() / len(mask_BT))


# --- training ---------------------------------------------------------------------------------------------------
def warm_start(seed: int, steps: int) -> Policy:
    """Imitate demonstrations for a few steps. The result is both the initial policy and the reference.

    RL needs a policy that is sometimes right: with no reward in any group, every advantage is 0.
    """
    torch.manual_seed(seed)
    policy = Policy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
    for step in range(steps):
        rows = []
        for problem in problems(64, seed * 100_003 + step, held_out=False):
            row = [*encode(problem.text + problem.answer), END]
            rows.append(row + [PAD] * (PROMPT + NEW_TOKENS - len(row)))
        ids_BL = torch.tensor(rows)
        logp_BT, _ = completion_logps(policy, ids_BL)
        mask_BT = ids_BL[:, PROMPT:] != PAD
        loss = -(logp_BT * mask_BT).sum() / mask_BT.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return policy


def train(start: Policy, terms: list[KLTerm], *, steps: int, seed: int, group_size: int = 8) -> dict[str, float]:
    """RL from the warm start under a list of KL terms: reward before and after, and the first and last exact KL."""
    policy = copy.deepcopy(start)
    reference = copy.deepcopy(start)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(seed)
    held_out = problems(128, 7, held_out=True)

    def held_out_reward() -> float:
        # A generator of its own: evaluation must not change which completions the training samples.
        evaluation = generate(policy, held_out, 4, torch.Generator().manual_seed(1))
        return float(evaluation.reward_B.mean())

    reward_before = held_out_reward()
    kl_first = kl = float("nan")
    for step in range(steps):
        batch = problems(24, 1_000_003 * (seed + 1) + step, held_out=False)
        experience = generate(policy, batch, group_size, generator)
        kl = update(policy, reference, experience, terms, optimizer, group_size)
        if step == 0:
            kl_first = kl
    return {"reward_before": reward_before, "reward_after": held_out_reward(), "kl_first": kl_first, "kl_last": kl}


CONFIGURATIONS: dict[str, list[KLTerm]] = {
    "no KL": [],
    "k1 in reward": [KLTerm("k1", placement="reward")],
    "k2 in loss": [KLTerm("k2", placement="loss")],
    "k3 in loss": [KLTerm("k3", placement="loss")],
    "k3 in both": [KLTerm("k3", placement="reward"), KLTerm("k3", placement="loss")],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=150, help="RL updates")
    parser.add_argument("--warm", type=int, default=1000, help="supervised steps before RL")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    start = warm_start(arguments.seed, arguments.warm)
    print(f"{'configuration':<14} {'reward before':>13} {'after':>6} {'exact KL (nats per completion)':>30}")
    for name, terms in CONFIGURATIONS.items():
        row = train(start, terms, steps=arguments.steps, seed=arguments.seed)
        print(f"{name:<14} {row['reward_before']:>13.3f} {row['reward_after']:>6.3f} {row['kl_last']:>30.3f}")


if __name__ == "__main__":
    main()
