"""What a stale KL cost less c times its mean does to a policy that is trained without noise: block 3's prediction.

A random softmax policy with shared parameters, whose every completion is enumerated, is trained by expected gradients.
Completions come from the policy of ``lag`` updates ago. The reward part is that of the runs of configs/centring: the
advantage is the reward less its mean, the token ratio is bounded at 8. A cost weights the score without a ratio:

    g = -E_mu[sum_t min(pi_t / mu_t, 8) (R - E_mu[R]) s_t] + beta E_mu[sum_t (F_t - c E_mu[F_t]) s_t + grad K_t]

with ``K_t`` the exact KL at the prefix of token t and ``F_t = sum_{u > t} K_u``; of k1 ``F_t = sum_{u >= t} l_u`` and
there is no ``K_t``. A centred score is ``s_t - E_mu[s_t]`` at its prefix. As ``E_mu[s_t] = -grad KL(mu_t, pi_t)``, the
mean of a cost that is never negative pushes the policy away from its samples, the more the older they are.

The step of an update means nothing in a run: it is set so that the cost without centring collapses at lag 10 in the
share of tables that is nearest to that of the stored runs (10 of 15). The runs use Adam, whose second moment is mostly
noise there, so that a larger gradient is a larger step, as with SGD; without noise Adam's steps have one length. Both
are computed; SGD is what is registered.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kl_comedy.kl.oracle import Tree
from kl_comedy.kl.oracle.enumeration import Completions

LENGTH = 9
FEATURES = 30
TABLES = 48
UPDATES = 60
# Two evaluations in a row below half of the first are a collapse, as in the runs (docs/protocol.md).
EVALUATIONS = (45, 60)
LAGS = (4, 10, 20)
BETA = 0.05
RATIO_BOUND = 8.0
STORED_COLLAPSES = 10 / 15
"""Share of S6's runs of the exact cost to go that collapsed at lag 10."""
STEPS = {
    "sgd": (12.8, 25.6, 51.2, 102.4),
    "adam": (0.1, 0.2, 0.4, 0.8),
}


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A KL term of the grid; ``c``: how many times the mean is subtracted from its cost."""

    exact: bool = True
    c: float = 0.0
    centred_score: bool = False
    beta: float = BETA


NONE = Arm(beta=0.0)
UNCENTRED = Arm()
ARMS: Mapping[str, Arm] = {
    "none": NONE,
    "exact-c0": UNCENTRED,
    "exact-c0.5": Arm(c=0.5),
    "exact-c1": Arm(c=1.0),
    "exact-c1.5": Arm(c=1.5),
    "exact-score": Arm(centred_score=True),
    "k1-c0": Arm(exact=False),
    "k1-c1": Arm(exact=False, c=1.0),
}


@dataclass(frozen=True, kw_only=True)
class Tables:
    """``W`` random policies ``softmax(features theta)`` over one tree, with a reward of 0 or 1 for each completion."""

    completions: Completions
    features_WNVD: Tensor
    initial_WD: Tensor
    reward_WB: Tensor

    @classmethod
    def random(cls, count: int, *, length: int = LENGTH, features: int = FEATURES) -> Tables:
        tree = Tree.build(vocabulary=2, length=length, ends=False)
        generator = torch.Generator().manual_seed(0)
        shape = (count, tree.prefixes, 2, features)
        features_WNVD = torch.randn(shape, generator=generator, dtype=torch.float64) / features**0.5
        initial_WD = torch.randn((count, features), generator=generator, dtype=torch.float64)
        uniform_WB = torch.rand((count, tree.completions), generator=generator, dtype=torch.float64)
        # The pocket policy starts at a reward of about 0.4.
        reward_WB = (uniform_WB < 0.4).double()
        return cls(completions=tree.all, features_WNVD=features_WNVD, initial_WD=initial_WD, reward_WB=reward_WB)

    def logp(self, theta_WD: Tensor) -> Tensor:
        """Next-token log-probs (nats) at every prefix, ``[W, N, V]``."""
        return torch.einsum("wnvd,wd->wnv", self.features_WNVD, theta_WD).log_softmax(-1)

    def taken(self, values_WNV: Tensor) -> Tensor:
        """The values of the tokens of each completion, ``[W, B, T]``."""
        return values_WNV[:, self.completions.prefix_BT, self.completions.token_BT]

    def added(self, values_WBT: Tensor) -> Tensor:
        """The sum over completions of the values of each prefix and token, ``[W, N, V]``."""
        count, prefixes, vocabulary, _ = self.features_WNVD.shape
        index_BT = self.completions.prefix_BT * vocabulary + self.completions.token_BT
        sums_WM = values_WBT.new_zeros(count, prefixes * vocabulary)
        sums_WM.index_add_(1, index_BT.flatten(), values_WBT.flatten(1))
        return sums_WM.reshape(count, prefixes, vocabulary)

    def at_prefixes(self, values_WN: Tensor) -> Tensor:
        """The values at the prefixes of each completion, ``[W, B, T]``."""
        return values_WN[:, self.completions.prefix_BT]


@dataclass(frozen=True, kw_only=True)
class Course:
    """Expected reward and sequence-level reverse KL (nats), ``[updates + 1, W]``, from before the first update."""

    reward: Tensor
    kl: Tensor

    def collapsed(self) -> Tensor:
        """``[W]``."""
        below = [self.reward[update] < 0.5 * self.reward[0] for update in EVALUATIONS]
        return torch.stack(below).all(0)

    def growth(self) -> Tensor:
        """The factor of the KL in an update, the geometric mean over the last updates, ``[W]``."""
        first, last = EVALUATIONS
        return (self.kl[last] / self.kl[first]) ** (1 / (last - first))


def loss(tables: Tables, theta_WD: Tensor, sampler_WD: Tensor, arm: Arm) -> Tensor:
    """The surrogates of all tables, added, whose gradient in each table's parameters is ``g``."""
    logp_WNV = tables.logp(theta_WD)
    sampler_logp_WNV = tables.logp(sampler_WD)
    ref_logp_WNV = tables.logp(tables.initial_WD)
    logp_WBT = tables.taken(logp_WNV.detach())
    sampler_logp_WBT = tables.taken(sampler_logp_WNV)
    share_WB1 = sampler_logp_WBT.sum(-1, keepdim=True).exp()

    ratio_WBT = (logp_WBT - sampler_logp_WBT).exp().clamp(max=RATIO_BOUND)
    reward_WB1 = tables.reward_WB[..., None]
    advantage_WB1 = reward_WB1 - (share_WB1 * reward_WB1).sum(1, keepdim=True)

    kl_WN = (logp_WNV.exp() * (logp_WNV - ref_logp_WNV)).sum(-1)
    if arm.exact:
        kl_WBT = tables.at_prefixes(kl_WN.detach())
        cost_WBT = _to_go(kl_WBT) - kl_WBT
    else:
        cost_WBT = _to_go(logp_WBT - tables.taken(ref_logp_WNV))
    mean_cost_W1T = (share_WB1 * cost_WBT).sum(1, keepdim=True)
    cost_WBT = arm.beta * (cost_WBT - arm.c * mean_cost_W1T)

    # Added over completions first: the gradient then goes through one table of log-probs.
    total = (tables.added(-share_WB1 * ratio_WBT * advantage_WB1) * logp_WNV).sum()
    cost_WNV = tables.added(share_WB1 * cost_WBT)
    if arm.centred_score:
        # sum_v cost(v) (s(v) - E_mu[s]) = sum_v (cost(v) - mu(v) sum_w cost(w)) s(v)
        cost_WNV = cost_WNV - sampler_logp_WNV.exp() * cost_WNV.sum(-1, keepdim=True)
    total = total + (cost_WNV * logp_WNV).sum()
    if arm.exact:
        reach_WN = tables.added(share_WB1.expand_as(cost_WBT)).sum(-1)
        total = total + arm.beta * (reach_WN * kl_WN).sum()
    return total


def _to_go(values_WBT: Tensor) -> Tensor:
    return values_WBT.flip(-1).cumsum(-1).flip(-1)


def train(tables: Tables, arm: Arm, *, lag: int, optimizer: str, step: float, updates: int = UPDATES) -> Course:
    """Train every table from its initial policy, which is the reference too."""
    theta_WD = tables.initial_WD.clone().requires_grad_(True)
    optimizers: dict[str, Callable[..., torch.optim.Optimizer]] = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}
    stepper = optimizers[optimizer]([theta_WD], lr=step)
    history = [tables.initial_WD]
    for update in range(updates):
        stepper.zero_grad()
        loss(tables, theta_WD, history[max(0, update - lag)], arm).backward()  # type: ignore[no-untyped-call]
        stepper.step()
        history.append(theta_WD.detach().clone())
    return _course(tables, history)


def _course(tables: Tables, history: Sequence[Tensor]) -> Course:
    ref_logp_WNV = tables.logp(tables.initial_WD)
    rewards = []
    kls = []
    for theta_WD in history:
        logp_WNV = tables.logp(theta_WD)
        logp_WB = tables.taken(logp_WNV).sum(-1)
        log_ratio_WB = logp_WB - tables.taken(ref_logp_WNV).sum(-1)
        rewards.append((logp_WB.exp() * tables.reward_WB).sum(-1))
        kls.append((logp_WB.exp() * log_ratio_WB).sum(-1))
    return Course(reward=torch.stack(rewards), kl=torch.stack(kls))


def calibrated(tables: Tables, optimizer: str) -> tuple[float, dict[float, float]]:
    """The step at which the share of collapses at lag 10 is nearest to the stored one, and the share at each step."""
    shares = {}
    for step in STEPS[optimizer]:
        course = train(tables, UNCENTRED, lag=10, optimizer=optimizer, step=step)
        shares[step] = float(course.collapsed().double().mean())
    return min(shares, key=lambda step: abs(shares[step] - STORED_COLLAPSES)), shares


def study(tables: Tables, done: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Each optimizer's step, and what each arm does at each lag. ``done`` is called after each optimizer and lag."""
    outcome: dict[str, Any] = {}
    for optimizer in STEPS:
        step, shares = calibrated(tables, optimizer)
        rows = []
        for lag in LAGS:
            for name, arm in ARMS.items():
                course = train(tables, arm, lag=lag, optimizer=optimizer, step=step)
                rows.append({"lag": lag, "arm": name, **summary(course)})
            done()
        outcome[optimizer] = {"step": step, "collapsed_by_step": shares, "rows": rows}
    return outcome


def summary(course: Course) -> dict[str, float]:
    """Share of tables that collapsed, and medians over tables."""
    return {
        "collapsed": round(float(course.collapsed().double().mean()), 3),
        "gain": round(float((course.reward[-1] - course.reward[0]).median()), 3),
        "kl": round(float(course.kl[-1].median()), 3),
        "growth": round(float(course.growth().median()), 4),
    }


def write(outcome: Mapping[str, Any], file: Path, *, command: str) -> None:
    file.write_text(json.dumps({"command": command, **outcome}, indent=1) + "\n")
