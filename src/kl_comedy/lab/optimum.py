"""Small games whose best policy is known in closed form, several at once, with tabular policies.

The objective is ``J(pi) = E_pi[R] - beta KL(pi || ref)`` over completions; its optimum is
``pi* = ref exp(R / beta) / Z`` with ``J* = beta log Z`` (nats). With the forward KL instead,
``E_pi[R] - beta KL(ref || pi)``, it is ``beta ref / (lambda - R)`` with ``lambda > max R`` such that it
sums to one (2510.20817).

Legend: ``S`` games side by side, ``N`` prefixes, ``V`` tokens, ``B`` completions, ``T`` tokens.

Gradient descent on a game under a list of KL terms, with expected gradients or with sampled ones.

A step follows ``grad E_mu[sum_t beta * surrogate_t] - grad E_pi[R]``. The part of the reward is always the
true policy gradient, so that what is reached or missed is the KL term's doing. With samples, the
probabilities of completions are replaced by the frequencies of a batch, and rewards are centred by the
mean of the others (RLOO).

The closed-form optimum, reached or missed by descending each configuration to its end.

Does a KL term bring back a mode of the reference that the policy has lost, and give up one it has invented?

Two completions, A and B, earn the same reward, everything else earns nothing. *Lost*: the reference gives A
and B the same probability, and the policy starts with next to none on B. *Invented*: the reference gives B
next to none, and the policy starts with as much on B as on A. As rewards are equal, the optimum keeps the
ratio of A to B that the reference has, whatever beta is. They part at the first token.

Legend: ``S`` games side by side, ``N`` prefixes, ``V`` tokens, ``B`` completions.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kl_comedy.errors import bad_value
from kl_comedy.kl import KLTerm
from kl_comedy.kl.oracle import Rows, Tree, prefix_log_probs, terms_loss
from kl_comedy.lab.bias_variance import DESCENDED, RECOVERING, Terms

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, kw_only=True)
class Games:
    """Games over one tree: a reference, where the policy starts (logits), a reward per completion, a beta."""

    tree: Tree
    ref_logp_SNV: Tensor
    start_SNV: Tensor
    reward_SB: Tensor
    beta_S: Tensor

    @property
    def count(self) -> int:
        return len(self.beta_S)

    def of_completions(self, logp_SNV: Tensor) -> Tensor:
        """Log-probs of whole completions, ``[S, B]``; differentiable."""
        return self.of_tokens(logp_SNV).sum(-1)

    def of_tokens(self, logp_SNV: Tensor) -> Tensor:
        """Log-probs of the tokens of every completion, ``[S, B, T]``, zero outside the mask."""
        rows = self.tree.all
        return torch.where(rows.mask_BT, logp_SNV[:, rows.prefix_BT, rows.token_BT], 0.0)

    def optimum(self) -> Tensor:
        """``log pi*`` of every completion for the reverse KL, ``[S, B]``."""
        return (self.of_completions(self.ref_logp_SNV) + self.reward_SB / self.beta_S[:, None]).log_softmax(-1)

    def forward_optimum(self, steps: int = 200) -> Tensor:
        """``log`` of ``beta ref / (lambda - R)``, ``[S, B]``; lambda by bisection between its two bounds."""
        ref_SB = self.of_completions(self.ref_logp_SNV).exp()
        beta_S1 = self.beta_S[:, None]
        low_S1 = (self.reward_SB + beta_S1 * ref_SB).amax(1, keepdim=True)
        high_S1 = self.reward_SB.amax(1, keepdim=True) + beta_S1
        for _ in range(steps):
            middle_S1 = (low_S1 + high_S1) / 2
            too_much = (beta_S1 * ref_SB / (middle_S1 - self.reward_SB)).sum(1, keepdim=True) > 1
            low_S1, high_S1 = torch.where(too_much, middle_S1, low_S1), torch.where(too_much, high_S1, middle_S1)
        return (beta_S1 * ref_SB / (high_S1 - self.reward_SB)).log()

    def rows(self, logp_SNV: Tensor, sampler_logp_SNV: Tensor) -> Rows:
        """Every completion of every game, ``[S * B, T]``, with log-probs and exact KLs that carry gradient."""
        tree = self.tree.all
        flat = (self.count * self.tree.completions, self.tree.length)
        ratio_SNV = logp_SNV - self.ref_logp_SNV
        reverse_SN = (logp_SNV.exp() * ratio_SNV).sum(-1)
        forward_SN = -(self.ref_logp_SNV.exp() * ratio_SNV).sum(-1)
        mask_SBT = tree.mask_BT.expand(self.count, *tree.mask_BT.shape)

        def at_prefixes(values_SN: Tensor) -> Tensor:
            return torch.where(mask_SBT, values_SN[:, tree.prefix_BT], 0.0).reshape(flat)

        return Rows(
            logp_BT=self.of_tokens(logp_SNV).reshape(flat),
            ref_logp_BT=self.of_tokens(self.ref_logp_SNV).reshape(flat),
            behaviour_logp_BT=self.of_tokens(sampler_logp_SNV).reshape(flat),
            mask_BT=mask_SBT.reshape(flat),
            reverse_kl_BT=at_prefixes(reverse_SN),
            forward_kl_BT=at_prefixes(forward_SN),
            reward_B=self.reward_SB.flatten(),
            group_B=torch.arange(flat[0]),
            truncated_B=tree.truncated_B.repeat(self.count),
        )


@dataclass(frozen=True, kw_only=True)
class Standing:
    """Where policies stand, one number per game: nats, rewards, probabilities.

    ``to_optimum_S`` is ``KL(pi || pi*)``, which is also ``(J* - J) / beta``; ``to_forward_optimum_S`` the
    KL to the optimum of the forward KL.
    """

    to_optimum_S: Tensor
    to_forward_optimum_S: Tensor
    gap_S: Tensor
    to_ref_S: Tensor
    entropy_S: Tensor
    reward_S: Tensor


def standing(games: Games, logits_SNV: Tensor) -> Standing:
    """Exact figures of policies given by their logits."""
    logp_SB = games.of_completions(prefix_log_probs(logits_SNV))
    p_SB = logp_SB.exp()

    def mean(values_SB: Tensor) -> Tensor:
        return torch.where(p_SB > 0, p_SB * values_SB, 0.0).sum(-1)

    to_optimum_S = mean(logp_SB - games.optimum())
    return Standing(
        to_optimum_S=to_optimum_S,
        to_forward_optimum_S=mean(logp_SB - games.forward_optimum()),
        gap_S=games.beta_S * to_optimum_S,
        to_ref_S=mean(logp_SB - games.of_completions(games.ref_logp_SNV)),
        entropy_S=-mean(logp_SB),
        reward_S=mean(games.reward_SB),
    )


def random_games(tree: Tree, *, seeds: int, betas: tuple[float, ...]) -> Games:
    """``seeds`` games at each beta (beta varies slowest): normal reference logits, uniform rewards in 0..1.

    The policy starts at the reference.
    """
    refs, rewards = [], []
    for seed in range(seeds):
        generator = torch.Generator().manual_seed(seed)
        logits_NV = torch.randn(tree.prefixes, tree.vocabulary, generator=generator, dtype=torch.float64)
        refs.append(prefix_log_probs(logits_NV))
        rewards.append(torch.rand(tree.completions, generator=generator, dtype=torch.float64))
    ref_SNV = torch.stack(refs).repeat(len(betas), 1, 1)
    return Games(
        tree=tree,
        ref_logp_SNV=ref_SNV,
        start_SNV=ref_SNV.clone(),
        reward_SB=torch.stack(rewards).repeat(len(betas), 1),
        beta_S=torch.tensor(betas, dtype=torch.float64).repeat_interleave(seeds),
    )


def logits_of(tree: Tree, logp_B: Tensor) -> Tensor:
    """Next-token log-probs ``[N, V]`` of the autoregressive policy that gives completions these log-probs."""
    mass_N = logp_B.new_zeros(tree.prefixes)
    mass_NV = logp_B.new_zeros(tree.prefixes, tree.vocabulary)
    rows = tree.all
    for t in range(tree.length):
        inside = rows.mask_BT[:, t]
        at, token, weight = rows.prefix_BT[inside, t], rows.token_BT[inside, t], logp_B[inside].exp()
        mass_N.index_add_(0, at, weight)
        mass_NV.index_put_((at, token), weight, accumulate=True)
    return (mass_NV / mass_N[:, None]).log()


SAMPLERS = ("policy", "reference", "lagging")
RULES = ("adam", "gd")


@dataclass(frozen=True, kw_only=True)
class Descent:
    """How to descend.

    Args:
        steps: updates.
        rate: learning rate; for ``adam`` it falls to zero along a cosine where ``decays`` is set.
        rule: ``adam`` or plain gradient descent, ``gd``.
        sampler: who draws completions: the ``policy`` itself, the policy ``lag`` steps ago (``lagging``), or
            the ``reference`` throughout.
        batch: completions per step, or None for expected gradients.
        seed: of the batches.
    """

    steps: int
    rate: float
    rule: str = "adam"
    decays: bool = True
    sampler: str = "policy"
    lag: int = 0
    batch: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.sampler not in SAMPLERS:
            raise bad_value("sampler", self.sampler, SAMPLERS)
        if self.rule not in RULES:
            raise bad_value("rule", self.rule, RULES)
        if self.batch is not None and (self.batch < 2 or self.sampler != "policy"):
            raise bad_value("batch", self.batch, "at least 2 completions, drawn by the policy")


@dataclass(frozen=True, kw_only=True)
class Path:
    """Where descent ended: logits, the norm of the last expected gradient per game, whether numbers stayed finite."""

    logits_SNV: Tensor
    gradient_S: Tensor
    finite_S: Tensor


def descend(
    games: Games,
    terms: Sequence[KLTerm],
    how: Descent,
    watch: Callable[[int, Tensor], None] = lambda step, logits: None,
) -> Path:
    """Descend from the games' start. ``watch`` sees the step and the logits ``[S, N, V]`` before each update."""
    theta_SNV = games.start_SNV.clone().requires_grad_(True)
    optimizer, schedule = _optimizer(theta_SNV, how)
    generator = torch.Generator().manual_seed(how.seed)
    past: deque[Tensor] = deque(maxlen=how.lag + 1)
    finite_S = torch.ones(games.count, dtype=torch.bool)
    for step in range(how.steps):
        logits_SNV = theta_SNV.detach().clone()
        watch(step, logits_SNV)
        past.append(prefix_log_probs(logits_SNV))
        sampler_SNV = games.ref_logp_SNV if how.sampler == "reference" else past[0]
        gradient_SNV = _gradient(games, terms, theta_SNV, sampler_SNV, how.batch, generator)
        finite_S &= torch.isfinite(gradient_SNV).all(-1).all(-1)
        theta_SNV.grad = torch.where(finite_S[:, None, None], gradient_SNV, 0.0)
        optimizer.step()
        schedule.step()
    final_SNV = theta_SNV.detach()
    watch(how.steps, final_SNV)
    sampler_SNV = games.ref_logp_SNV if how.sampler == "reference" else prefix_log_probs(final_SNV)
    last_SNV = _gradient(games, terms, theta_SNV, sampler_SNV, None, generator)
    return Path(logits_SNV=final_SNV, gradient_S=last_SNV.flatten(1).norm(dim=1), finite_S=finite_S)


def _optimizer(theta_SNV: Tensor, how: Descent) -> tuple[torch.optim.Optimizer, Any]:
    optimizer: torch.optim.Optimizer
    if how.rule == "adam":
        optimizer = torch.optim.Adam([theta_SNV], lr=how.rate)
    else:
        optimizer = torch.optim.SGD([theta_SNV], lr=how.rate)
    if how.rule == "adam" and how.decays:
        return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, how.steps)
    return optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)


def _gradient(
    games: Games,
    terms: Sequence[KLTerm],
    theta_SNV: Tensor,
    sampler_SNV: Tensor,
    batch: int | None,
    generator: torch.Generator,
) -> Tensor:
    """The gradient ``[S, N, V]`` of what is minimized: expected, or over a batch where one is asked for."""
    logp_SNV = prefix_log_probs(theta_SNV)
    logp_SB = games.of_completions(logp_SNV)
    if batch is None:
        weight_SB = games.of_completions(sampler_SNV).exp()
        reward_S = (logp_SB.exp() * games.reward_SB).sum(-1)
    else:
        p_SB = logp_SB.detach().exp()
        drawn_SN = torch.multinomial(p_SB, batch, replacement=True, generator=generator)
        weight_SB = torch.zeros_like(p_SB).scatter_add_(1, drawn_SN, p_SB.new_full(drawn_SN.shape, 1 / batch))
        total_S1 = batch * (weight_SB * games.reward_SB).sum(-1, keepdim=True)
        advantage_SB = games.reward_SB - (total_S1 - games.reward_SB) / (batch - 1)
        reward_S = (weight_SB * advantage_SB * logp_SB).sum(-1)
    surrogate_SB = terms_loss(terms)(games.rows(logp_SNV, sampler_SNV)).sum(-1).reshape(logp_SB.shape)
    penalty_S = games.beta_S * (weight_SB * surrogate_SB).sum(-1)
    (gradient_SNV,) = torch.autograd.grad((penalty_S - reward_S).sum(), theta_SNV)
    return gradient_SNV


TREE = Tree.build(vocabulary=3, length=4)
BETAS = (0.2, 0.5)
STEPS, RATE = 3000, 0.05
LAG = 20
BATCH, BATCH_STEPS, BATCH_RATE = 64, 1500, 0.02
REACHED = 1e-6
"""KL to the optimum (nats) at which it counts as reached."""
STATIONARY = 1e-5
"""Norm of the expected gradient below which descent has come to rest (rewards are in 0..1)."""
WATCHED = 60
"""Points kept of each path, evenly spread over the logarithm of the step."""

SETTINGS: dict[str, Descent] = {
    "on-policy": Descent(steps=STEPS, rate=RATE),
    "sampler 20 steps old": Descent(steps=STEPS, rate=RATE, sampler="lagging", lag=LAG),
    "sampler is the reference": Descent(steps=STEPS, rate=RATE, sampler="reference"),
    "batches of 64, on-policy": Descent(steps=BATCH_STEPS, rate=BATCH_RATE, batch=BATCH),
}


def optimum_study(
    *,
    seeds: int = 5,
    betas: tuple[float, ...] = BETAS,
    settings: Mapping[str, Descent] = SETTINGS,
    configurations: Mapping[str, Terms] = DESCENDED,
    done: Callable[[], None] = lambda: None,
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Ends (one row per setting, configuration, beta and seed) and paths (KL to the optimum along the way).

    ``done`` is called after each configuration of each setting.
    """
    import pandas as pd

    ends: list[dict[str, Any]] = []
    paths: list[dict[str, Any]] = []
    games = random_games(TREE, seeds=seeds, betas=betas)
    for setting, how in settings.items():
        for name, terms in configurations.items():
            end, path = _descended(games, terms, how, seeds)
            ends += [{"setting": setting, "configuration": name, **row} for row in end]
            paths += [{"setting": setting, "configuration": name, **row} for row in path]
            done()
    return pd.DataFrame(ends), pd.DataFrame(paths)


def _descended(
    games: Games, terms: Terms, how: Descent, seeds: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    watched = set(_spread(how.steps))
    path: list[dict[str, Any]] = []

    def watch(step: int, logits_SNV: Tensor) -> None:
        if step in watched:
            now = standing(games, logits_SNV)
            path.extend(
                {**_game(games, s, seeds), "step": step, "to_optimum": float(now.to_optimum_S[s])}
                for s in range(games.count)
            )

    found = descend(games, terms, how, watch)
    last = standing(games, found.logits_SNV)
    halved = standing(dataclasses.replace(games, beta_S=games.beta_S / 2), found.logits_SNV)
    ends = []
    for s in range(games.count):
        row = {
            **_game(games, s, seeds),
            "to_optimum": float(last.to_optimum_S[s]),
            "gap": float(last.gap_S[s]),
            "to_forward_optimum": float(last.to_forward_optimum_S[s]),
            "to_half_beta_optimum": float(halved.to_optimum_S[s]),
            "to_ref": float(last.to_ref_S[s]),
            "entropy": float(last.entropy_S[s]),
            "reward": float(last.reward_S[s]),
            "gradient": float(found.gradient_S[s]),
            "finite": bool(found.finite_S[s]),
        }
        ends.append({**row, "verdict": "noisy" if how.batch is not None else verdict(row)})
    return ends, path


def verdict(row: Mapping[str, Any]) -> str:
    """``reached`` the optimum, came to rest elsewhere (``missed``), still moves (``drifts``), or ``diverged``."""
    if not (row["finite"] and math.isfinite(row["to_optimum"]) and math.isfinite(row["gradient"])):
        return "diverged"
    if row["to_optimum"] < REACHED:
        return "reached"
    return "missed" if row["gradient"] < STATIONARY else "drifts"


def _game(games: Games, s: int, seeds: int) -> dict[str, Any]:
    return {"beta": float(games.beta_S[s]), "seed": s % seeds}


def _spread(steps: int) -> Sequence[int]:
    exponents = torch.linspace(0, math.log(steps + 1), WATCHED, dtype=torch.float64)
    return sorted({0, steps, *(round(float(e.exp())) - 1 for e in exponents)})


TREE_modes = Tree.build(vocabulary=3, length=3, ends=False)
RARE = (1e-1, 1e-2, 1e-3, 1e-6)
"""Probabilities of the first token of the mode that is rare."""
BETA = 0.3
KINDS = ("lost", "invented")
BATCH_modes = 256
SHARE = 0.5
"""A lost mode is back once B has this share of its optimal probability; an invented one is given up once
what B has beyond its optimal probability is down to this share of what it began with."""

SETTINGS_modes: dict[str, Descent] = {
    "expected gradients, gradient descent": Descent(steps=3000, rate=1.0, rule="gd"),
    "expected gradients, Adam": Descent(steps=2000, rate=0.02, decays=False),
    "batches of 256, gradient descent": Descent(steps=2000, rate=1.0, rule="gd", batch=BATCH_modes),
    "batches of 256, Adam": Descent(steps=2000, rate=0.02, decays=False, batch=BATCH_modes),
}


def mode_games(kind: str, *, rare: tuple[float, ...] = RARE, beta: float = BETA, copies: int = 1) -> Games:
    """``copies`` games per probability in ``rare``. A is 000, B is 111, and the third branch earns nothing.

    Raises :class:`UserError` for an unknown kind.
    """
    if kind not in KINDS:
        raise bad_value("kind", kind, KINDS)
    start, reference = [], []
    for p in rare * copies:
        even_NV, scarce_NV = _modes(0.45), _modes(p)
        start.append(scarce_NV if kind == "lost" else even_NV)
        reference.append(even_NV if kind == "lost" else scarce_NV)
    reward_B = torch.zeros(TREE_modes.completions, dtype=torch.float64)
    reward_B[[_number(0), _number(1)]] = 1.0
    return Games(
        tree=TREE_modes,
        ref_logp_SNV=torch.stack(reference),
        start_SNV=torch.stack(start),
        reward_SB=reward_B.repeat(len(start), 1),
        beta_S=torch.full((len(start),), beta, dtype=torch.float64),
    )


def _modes(first_B: float) -> Tensor:
    """Log-probs ``[N, V]``: first ``first_B`` on B, 0.1 on the third branch, the rest on A; then 0.8 on the same."""
    logp_NV = torch.full((TREE_modes.prefixes, TREE_modes.vocabulary), 1 / 3, dtype=torch.float64)
    logp_NV[0] = torch.tensor([0.9 - first_B, first_B, 0.1], dtype=torch.float64)
    for token in range(TREE_modes.vocabulary):
        along = torch.full((TREE_modes.vocabulary,), 0.1, dtype=torch.float64)
        along[token] = 0.8
        logp_NV[TREE_modes.first(1) + token] = along
        logp_NV[TREE_modes.first(2) + TREE_modes.vocabulary * token + token] = along
    return logp_NV.log()


def _number(token: int) -> int:
    """The number of the completion that repeats one token."""
    return sum(token * TREE_modes.vocabulary**t for t in range(TREE_modes.length))


def mode_study(
    *,
    seeds: int = 5,
    settings: Mapping[str, Descent] = SETTINGS_modes,
    configurations: Mapping[str, Terms] = RECOVERING,
    rare: tuple[float, ...] = RARE,
    done: Callable[[], None] = lambda: None,
) -> pd.DataFrame:
    """One row per setting, kind, configuration, rare probability and seed (one seed where nothing is drawn).

    ``step`` is the first one at which the mode was back (or given up), NaN if never; ``mode`` and ``other``
    are the probabilities of B and A at the end, ``optimal_mode`` that of B at the optimum.
    """
    import pandas as pd

    rows: list[dict[str, Any]] = []
    for setting, how in settings.items():
        for kind in KINDS:
            games = mode_games(kind, rare=rare, copies=1 if how.batch is None else seeds)
            for name, terms in configurations.items():
                about = {"setting": setting, "kind": kind, "configuration": name}
                rows += [{**about, **row} for row in _followed(games, terms, how, kind, rare)]
                done()
    return pd.DataFrame(rows)


def _followed(games: Games, terms: Terms, how: Descent, kind: str, rare: tuple[float, ...]) -> list[dict[str, Any]]:
    best_S = games.optimum()[:, _number(1)].exp()
    began_S = _probability(games, games.start_SNV, 1)
    first_S = torch.full((games.count,), float("nan"), dtype=torch.float64)

    def watch(step: int, logits_SNV: Tensor) -> None:
        mode_S = _probability(games, logits_SNV, 1)
        there_S = mode_S >= SHARE * best_S if kind == "lost" else mode_S - best_S <= SHARE * (began_S - best_S)
        first_S[there_S & first_S.isnan()] = step

    path = descend(games, terms, how, watch)
    mode_S, other_S = (_probability(games, path.logits_SNV, token) for token in (1, 0))
    return [
        {
            "rare": rare[s % len(rare)],
            "seed": s // len(rare),
            "step": float(first_S[s]),
            "steps": how.steps,
            "mode": float(mode_S[s]),
            "other": float(other_S[s]),
            "optimal_mode": float(best_S[s]),
            "finite": bool(path.finite_S[s]),
        }
        for s in range(games.count)
    ]


def _probability(games: Games, logits_SNV: Tensor, token: int) -> Tensor:
    """The probability of the completion that repeats ``token``, ``[S]``."""
    return games.of_completions(prefix_log_probs(logits_SNV))[:, _number(token)].exp()
