"""KL terms optimized until they stop, in small games whose best policy is known in closed form.

The objective is ``J(pi) = E_pi[R] - beta KL(pi || ref)`` over completions; its optimum is
``pi* = ref exp(R / beta) / Z`` with ``J* = beta log Z`` (nats). With the forward KL instead,
``E_pi[R] - beta KL(ref || pi)``, it is ``beta ref / (lambda - R)`` with ``lambda > max R`` such that it sums to one
(2510.20817). Policies are tabular, and several games are optimized at once.

``optimum_study``: does each configuration reach the optimum? ``mode_study``: does a KL term bring back a mode of the
reference that the policy has lost (*lost*), and remove one that the reference lacks (*invented*)? There two
completions, A and B, earn the same reward, and everything else nothing, so the optimum keeps the ratio of A to B that
the reference has, whatever beta is. *Lost*: the reference gives A and B the same probability, and the policy starts
with next to none on B. *Invented*: the other way round. A and B differ from the first token on.

Legend: ``S`` games, ``N`` prefixes, ``V`` tokens, ``B`` completions, ``T`` tokens.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from kl_comedy.kl import KLTerm
from kl_comedy.kl.oracle import Rows, Tree, prefix_log_probs, terms_loss
from research.studies.bias_variance import OPTIMIZED, RECOVERING, Terms

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
        # At the lower bound the largest summand is 1; at the upper one each is at most its ref, and the sum at most 1.
        low_S1 = (self.reward_SB + beta_S1 * ref_SB).amax(1, keepdim=True)
        high_S1 = self.reward_SB.amax(1, keepdim=True) + beta_S1
        for _ in range(steps):
            middle_S1 = (low_S1 + high_S1) / 2
            # The sum falls with lambda, so that lambda is too small where it is above 1.
            too_small_S1 = (beta_S1 * ref_SB / (middle_S1 - self.reward_SB)).sum(1, keepdim=True) > 1
            low_S1 = torch.where(too_small_S1, middle_S1, low_S1)
            high_S1 = torch.where(too_small_S1, high_S1, middle_S1)
        return (beta_S1 * ref_SB / (high_S1 - self.reward_SB)).log()

    def rows(self, logp_SNV: Tensor, sampler_logp_SNV: Tensor) -> Rows:
        """Every completion of every game, ``[S * B, T]``, with log-probs and exact KLs that carry gradient."""
        tree = self.tree.all
        flat = (self.count * self.tree.completions, self.tree.length)  # the games one after the other
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


def policy_figures(games: Games, logits_SNV: Tensor) -> dict[str, Tensor]:
    """Exact figures of policies given by their logits, one number per game ``[S]``: nats, rewards.

    ``to_optimum`` is ``KL(pi || pi*)``, which is also ``(J* - J) / beta``; ``gap`` is ``J* - J``;
    ``to_forward_optimum`` the KL to the optimum of the forward KL, ``to_half_beta_optimum`` to that of half of beta.
    """
    logp_SB = games.of_completions(prefix_log_probs(logits_SNV))
    p_SB = logp_SB.exp()

    def mean(values_SB: Tensor) -> Tensor:
        # A probability that underflows to 0 has a log-prob of -inf, and 0 times that is NaN.
        return torch.where(p_SB > 0, p_SB * values_SB, 0.0).sum(-1)

    half_beta_games = dataclasses.replace(games, beta_S=games.beta_S / 2)
    to_optimum_S = mean(logp_SB - games.optimum())
    return {
        "to_optimum": to_optimum_S,
        "gap": games.beta_S * to_optimum_S,
        "to_forward_optimum": mean(logp_SB - games.forward_optimum()),
        "to_half_beta_optimum": mean(logp_SB - half_beta_games.optimum()),
        "to_ref": mean(logp_SB - games.of_completions(games.ref_logp_SNV)),
        "entropy": -mean(logp_SB),
        "reward": mean(games.reward_SB),
    }


def random_games(tree: Tree, *, seeds: int, betas: tuple[float, ...]) -> Games:
    """``seeds`` games at each beta (beta varies slowest): normal reference logits, uniform rewards in 0..1.

    The policy starts at the reference.
    """
    references = []
    rewards = []
    for seed in range(seeds):
        generator = torch.Generator().manual_seed(seed)
        logits_NV = torch.randn(tree.prefixes, tree.vocabulary, generator=generator, dtype=torch.float64)
        references.append(prefix_log_probs(logits_NV))
        rewards.append(torch.rand(tree.completions, generator=generator, dtype=torch.float64))
    ref_SNV = torch.stack(references).repeat(len(betas), 1, 1)
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
    # Each completion adds its probability to every prefix that it passes.
    for t in range(tree.length):
        inside_B = rows.mask_BT[:, t]
        prefix_b = rows.prefix_BT[inside_B, t]
        token_b = rows.token_BT[inside_B, t]
        p_b = logp_B[inside_B].exp()
        mass_N.index_add_(0, prefix_b, p_b)
        mass_NV.index_put_((prefix_b, token_b), p_b, accumulate=True)
    return (mass_NV / mass_N[:, None]).log()


@dataclass(frozen=True, kw_only=True)
class Optimization:
    """``steps`` updates by ``rule`` at learning rate ``rate`` (of Adam, along a cosine to zero where it ``decays``).

    ``sampler``: who draws completions: the ``policy``, the policy ``lag`` steps ago (``lagging``), or the
    ``reference``. ``batch``: completions per step, drawn by the policy; None for expected gradients.
    """

    steps: int
    rate: float
    rule: Literal["adam", "gd"] = "adam"
    decays: bool = True
    sampler: Literal["policy", "reference", "lagging"] = "policy"
    lag: int = 0
    batch: int | None = None


@dataclass(frozen=True, kw_only=True)
class Optimized:
    """The end of an optimization, by game.

    Its logits, the norm of the expected gradient there, and whether all gradients were finite.
    """

    logits_SNV: Tensor
    gradient_S: Tensor
    finite_S: Tensor


def optimize(
    games: Games,
    terms: Sequence[KLTerm],
    optimization: Optimization,
    watch: Callable[[int, Tensor], None] = lambda step, logits: None,
) -> Optimized:
    """Minimize ``beta * surrogate - reward`` from the games' start.

    The reward's part is always the true policy gradient, so that only the KL terms decide what is reached. With
    samples, the probabilities of completions are replaced by the frequencies of a batch, and rewards are centred by the
    mean of the others (RLOO). ``watch`` gets the step and the logits ``[S, N, V]`` before each update and at the end.
    """
    theta_SNV = games.start_SNV.clone().requires_grad_(True)
    optimizer: torch.optim.Optimizer
    schedule = None
    if optimization.rule == "gd":
        optimizer = torch.optim.SGD([theta_SNV], lr=optimization.rate)
    else:
        optimizer = torch.optim.Adam([theta_SNV], lr=optimization.rate)
        if optimization.decays:
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, optimization.steps)

    generator = torch.Generator().manual_seed(0)
    # The oldest one is `lag` steps old, or the start's while there are fewer.
    past_policies: deque[Tensor] = deque(maxlen=optimization.lag + 1)
    finite_S = torch.ones(games.count, dtype=torch.bool)
    for step in range(optimization.steps):
        logits_SNV = theta_SNV.detach().clone()
        watch(step, logits_SNV)
        past_policies.append(prefix_log_probs(logits_SNV))
        if optimization.sampler == "reference":
            sampler_SNV = games.ref_logp_SNV
        else:
            sampler_SNV = past_policies[0]
        gradient_SNV = _gradient(games, terms, theta_SNV, sampler_SNV, optimization.batch, generator)
        # A game that diverged stops; the others, which share no parameter with it, continue.
        finite_S &= torch.isfinite(gradient_SNV).all(-1).all(-1)
        theta_SNV.grad = torch.where(finite_S[:, None, None], gradient_SNV, 0.0)
        optimizer.step()
        if schedule is not None:
            schedule.step()

    final_SNV = theta_SNV.detach()
    watch(optimization.steps, final_SNV)
    # Stationary is a property of the expected gradient, with completions of the policy itself and not of an older one.
    if optimization.sampler == "reference":
        sampler_SNV = games.ref_logp_SNV
    else:
        sampler_SNV = prefix_log_probs(final_SNV)
    last_SNV = _gradient(games, terms, theta_SNV, sampler_SNV, None, generator)
    return Optimized(logits_SNV=final_SNV, gradient_S=last_SNV.flatten(1).norm(dim=1), finite_S=finite_S)


def _gradient(
    games: Games,
    terms: Sequence[KLTerm],
    theta_SNV: Tensor,
    sampler_SNV: Tensor,
    batch: int | None,
    generator: torch.Generator,
) -> Tensor:
    """The gradient ``[S, N, V]`` of the loss: expected, or over a batch of so many completions."""
    logp_SNV = prefix_log_probs(theta_SNV)
    logp_SB = games.of_completions(logp_SNV)
    if batch is None:
        weight_SB = games.of_completions(sampler_SNV).exp()
        reward_S = (logp_SB.exp() * games.reward_SB).sum(-1)
    else:
        # The frequency of each completion in a batch of the policy's.
        p_SB = logp_SB.detach().exp()
        drawn_SN = torch.multinomial(p_SB, batch, replacement=True, generator=generator)
        share_SN = p_SB.new_full(drawn_SN.shape, 1 / batch)
        weight_SB = torch.zeros_like(p_SB).scatter_add_(1, drawn_SN, share_SN)
        # RLOO: the reward less the mean of the other completions' rewards.
        total_S1 = batch * (weight_SB * games.reward_SB).sum(-1, keepdim=True)
        advantage_SB = games.reward_SB - (total_S1 - games.reward_SB) / (batch - 1)
        reward_S = (weight_SB * advantage_SB * logp_SB).sum(-1)
    # Per completion; the weights make it an expectation, or the mean of a batch.
    surrogate_SB = terms_loss(terms)(games.rows(logp_SNV, sampler_SNV)).sum(-1).reshape(logp_SB.shape)
    penalty_S = games.beta_S * (weight_SB * surrogate_SB).sum(-1)
    (gradient_SNV,) = torch.autograd.grad((penalty_S - reward_S).sum(), theta_SNV)
    return gradient_SNV


# Small enough to optimize every configuration until it stops, several games at once.
TREE = Tree.build(vocabulary=3, length=4)
BETAS = (0.2, 0.5)
REACHED = 1e-6
"""KL to the optimum (nats) at which it counts as reached."""
STATIONARY = 1e-5
"""Norm of the expected gradient below which a policy counts as stationary (rewards are in 0..1)."""
PATH_POINTS = 60
"""Points stored of each path, evenly spread over the logarithm of the step."""

# The names are stored in optimum.parquet.
SETTINGS: dict[str, Optimization] = {
    "on-policy": Optimization(steps=3000, rate=0.05),
    "sampler 20 steps old": Optimization(steps=3000, rate=0.05, sampler="lagging", lag=20),
    "sampler is the reference": Optimization(steps=3000, rate=0.05, sampler="reference"),
    "batches of 64, on-policy": Optimization(steps=1500, rate=0.02, batch=64),
}


def optimum_study(
    *,
    seeds: int = 5,
    betas: tuple[float, ...] = BETAS,
    settings: Mapping[str, Optimization] = SETTINGS,
    configurations: Mapping[str, Terms] = OPTIMIZED,
    done: Callable[[], None] = lambda: None,
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Ends (one row per setting, configuration, beta and seed) and paths (KL to the optimum along the way).

    ``done`` is called after each configuration of each setting.
    """
    import pandas as pd

    ends: list[pd.DataFrame] = []
    paths: list[pd.DataFrame] = []
    games = random_games(TREE, seeds=seeds, betas=betas)
    # Beta varies slowest (`random_games`).
    facts = {"beta": games.beta_S.numpy(), "seed": torch.arange(games.count).numpy() % seeds}
    for setting, optimization in settings.items():
        stored_steps = _stored_steps(optimization.steps)
        for name, terms in configurations.items():
            labels = {"setting": setting, "configuration": name, **facts}

            # The defaults bind this iteration's values, where a closure would see the last ones.
            def watch(step: int, logits_SNV: Tensor, stored: set[int] = stored_steps, labels: Any = labels) -> None:
                if step in stored:
                    to_optimum_S = policy_figures(games, logits_SNV)["to_optimum"].numpy()
                    paths.append(pd.DataFrame({**labels, "step": step, "to_optimum": to_optimum_S}))

            end = optimize(games, terms, optimization, watch)
            columns = {**policy_figures(games, end.logits_SNV), "gradient": end.gradient_S, "finite": end.finite_S}
            frame = pd.DataFrame({**labels, **{column: values_S.numpy() for column, values_S in columns.items()}})
            if optimization.batch is None:
                frame["verdict"] = frame.apply(verdict, axis=1)
            else:
                # Samples keep a policy moving around wherever it would stay.
                frame["verdict"] = "noisy"
            ends.append(frame)
            done()
    return pd.concat(ends, ignore_index=True), pd.concat(paths, ignore_index=True)


def _stored_steps(steps: int) -> set[int]:
    """The first and the last step, and :data:`PATH_POINTS` that are evenly spread over the logarithm."""
    exponents = torch.linspace(0, math.log(steps + 1), PATH_POINTS, dtype=torch.float64)
    stored = {0, steps}
    for exponent in exponents:
        stored.add(round(float(exponent.exp())) - 1)
    return stored


def verdict(row: Any) -> str:
    """``reached`` the optimum, is stationary elsewhere (``missed``), still moves (``drifts``), or ``diverged``."""
    all_finite = row["finite"] and math.isfinite(row["to_optimum"]) and math.isfinite(row["gradient"])
    if not all_finite:
        return "diverged"
    if row["to_optimum"] < REACHED:
        return "reached"
    if row["gradient"] < STATIONARY:
        return "missed"
    return "drifts"


MODE_TREE = Tree.build(vocabulary=3, length=3, ends=False)
RARE = (1e-1, 1e-2, 1e-3, 1e-6)
"""Probabilities of the first token of the mode that is rare."""
BETA = 0.3
KINDS = ("lost", "invented")
SHARE = 0.5
"""A lost mode is back once B has this share of its optimal probability; an invented one is given up once
what B has beyond its optimal probability is down to this share of what it began with."""

MODE_SETTINGS: dict[str, Optimization] = {
    "expected gradients, gradient descent": Optimization(steps=3000, rate=1.0, rule="gd"),
    "expected gradients, Adam": Optimization(steps=2000, rate=0.02, decays=False),
    "batches of 256, gradient descent": Optimization(steps=2000, rate=1.0, rule="gd", batch=256),
    "batches of 256, Adam": Optimization(steps=2000, rate=0.02, decays=False, batch=256),
}


def mode_games(kind: str, *, rare: tuple[float, ...] = RARE, beta: float = BETA, copies: int = 1) -> Games:
    """``copies`` games per probability in ``rare``. A is 000, B is 111, and the third branch earns nothing."""
    scarce_SNV = torch.stack([_modes(p) for p in rare * copies])
    even_SNV = _modes(0.45).expand_as(scarce_SNV)
    if kind == "lost":
        ref_SNV = even_SNV
        start_SNV = scarce_SNV
    else:
        ref_SNV = scarce_SNV
        start_SNV = even_SNV
    reward_B = torch.zeros(MODE_TREE.completions, dtype=torch.float64)
    reward_B[[_number(0), _number(1)]] = 1.0
    return Games(
        tree=MODE_TREE,
        ref_logp_SNV=ref_SNV,
        start_SNV=start_SNV,
        reward_SB=reward_B.repeat(len(scarce_SNV), 1),
        beta_S=torch.full((len(scarce_SNV),), beta, dtype=torch.float64),
    )


def _modes(first_B: float) -> Tensor:
    """Log-probs ``[N, V]``: first ``first_B`` on B, 0.1 on the third branch, the rest on A; then 0.8 on the same."""
    logp_NV = torch.full((MODE_TREE.prefixes, MODE_TREE.vocabulary), 1 / 3, dtype=torch.float64)
    logp_NV[0] = torch.tensor([0.9 - first_B, first_B, 0.1], dtype=torch.float64)
    # Prefixes off these paths stay uniform: no completion through them earns anything.
    for token in range(MODE_TREE.vocabulary):
        along = torch.full((MODE_TREE.vocabulary,), 0.1, dtype=torch.float64)
        along[token] = 0.8
        logp_NV[MODE_TREE.first(1) + token] = along
        logp_NV[MODE_TREE.first(2) + MODE_TREE.vocabulary * token + token] = along
    return logp_NV.log()


def _number(token: int) -> int:
    """The number of the completion that repeats one token."""
    return sum(token * MODE_TREE.vocabulary**t for t in range(MODE_TREE.length))


def mode_study(
    *,
    seeds: int = 5,
    settings: Mapping[str, Optimization] = MODE_SETTINGS,
    configurations: Mapping[str, Terms] = RECOVERING,
    rare: tuple[float, ...] = RARE,
    done: Callable[[], None] = lambda: None,
) -> pd.DataFrame:
    """One row per setting, kind, configuration, rare probability and seed (one seed where nothing is drawn).

    ``step`` is the first one at which the mode was back (or given up), NaN if never; ``mode`` and ``other``
    are the probabilities of B and A at the end, ``optimal_mode`` that of B at the optimum.
    """
    import pandas as pd

    frames: list[pd.DataFrame] = []
    for (setting, optimization), kind in itertools.product(settings.items(), KINDS):
        # Expected gradients give every copy the same path.
        copies = 1 if optimization.batch is None else seeds
        games = mode_games(kind, rare=rare, copies=copies)
        game_S = torch.arange(games.count)
        rare_S = torch.tensor(rare, dtype=torch.float64)[game_S % len(rare)]
        seed_S = game_S // len(rare)
        for name, terms in configurations.items():
            columns_S = {"rare": rare_S, "seed": seed_S, **_optimize_modes(games, terms, optimization, kind)}
            columns = {column: values_S.numpy() for column, values_S in columns_S.items()}
            frames.append(pd.DataFrame({"setting": setting, "kind": kind, "configuration": name, **columns}))
            done()
    return pd.concat(frames, ignore_index=True)


def _optimize_modes(games: Games, terms: Terms, optimization: Optimization, kind: str) -> dict[str, Tensor]:
    """The columns of :func:`mode_study` that are measured, one number per game."""
    optimal_S = games.optimum()[:, _number(1)].exp()
    start_S = _probability(games, games.start_SNV, 1)
    first_S = torch.full((games.count,), float("nan"), dtype=torch.float64)

    def watch(step: int, logits_SNV: Tensor) -> None:
        mode_S = _probability(games, logits_SNV, 1)
        if kind == "lost":
            changed_S = mode_S >= SHARE * optimal_S
        else:
            changed_S = mode_S - optimal_S <= SHARE * (start_S - optimal_S)
        # Only the first time: with samples a mode can be lost again.
        first_S[changed_S & first_S.isnan()] = step

    end = optimize(games, terms, optimization, watch)
    return {
        "step": first_S,
        "steps": torch.full((games.count,), optimization.steps),
        "mode": _probability(games, end.logits_SNV, 1),
        "other": _probability(games, end.logits_SNV, 0),
        "optimal_mode": optimal_S,
        "finite": end.finite_S,
    }


def _probability(games: Games, logits_SNV: Tensor, token: int) -> Tensor:
    """The probability of the completion that repeats ``token``, ``[S]``."""
    return games.of_completions(prefix_log_probs(logits_SNV))[:, _number(token)].exp()
