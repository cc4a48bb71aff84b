"""Enumerable autoregressive policies: a tree of completions; policy, reference and sampler over it; inputs of a loss.

Legend: ``N`` prefixes of the tree, ``V`` tokens, ``B`` completions, ``T`` longest completion, ``K`` tokens that do not
end a completion (``V - 1`` where token 0 ends it, else ``V``). Log-probs in nats. Prefixes are numbered by depth, then
by their digits in base ``K``: the children of prefix ``i`` at depth ``d`` are ``first(d + 1) + K * (i - first(d)) +
digit``. Completions are walked in chunks, so that memory stays bounded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from kl_comedy.errors import UserError, bad_value
from kl_comedy.kl.estimators import TopTokens, certainty, jensen_shannon


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Completions with everything a training loss may read; floats are float64, zero outside the mask.

    The policy's ``logp_BT`` and the exact ``KL(pi || ref)`` and ``KL(ref || pi)`` of the next token at each prefix
    carry gradient, and so do the next-token log-probs ``next_logp_BTV``. ``behaviour_logp_BT`` is what the sampler
    recorded. Equal numbers of ``group_B`` are adjacent; ``truncated_B`` marks completions cut at the length limit.
    ``proximal_logp_BT``: None at a batch's first update. The last three are for terms that
    read other tokens than the sampled one.
    """

    logp_BT: Tensor
    ref_logp_BT: Tensor
    behaviour_logp_BT: Tensor
    mask_BT: Tensor
    reverse_kl_BT: Tensor
    forward_kl_BT: Tensor
    reward_B: Tensor
    group_B: Tensor
    truncated_B: Tensor
    proximal_logp_BT: Tensor | None = None
    next_logp_BTV: Tensor | None = None
    ref_next_logp_BTV: Tensor | None = None
    token_BT: Tensor | None = None

    def top(self, k: int, tokens: str) -> TopTokens:
        """The ``k`` likeliest tokens of ``policy`` or ``reference``, at most half the vocabulary, rounded down.

        So there is a tail in every tree, as in a language model. Raises :class:`UserError` for rows without next-token
        log-probs.
        """
        next_logp_BTV, ref_next_logp_BTV, token_BT = self._next()
        chosen_BTV = next_logp_BTV.detach() if tokens == "policy" else ref_next_logp_BTV
        ids_BTK = chosen_BTV.topk(min(k, max(1, chosen_BTV.shape[-1] // 2)), -1).indices
        inside_BT = (ids_BTK == token_BT[..., None]).any(-1)
        return TopTokens(next_logp_BTV.gather(-1, ids_BTK), ref_next_logp_BTV.gather(-1, ids_BTK), inside_BT)

    def mixture(self, share: float) -> Tensor:
        """The exact Jensen-Shannon divergence of the next token at each prefix, ``[B, T]``; raises as :meth:`top`."""
        next_logp_BTV, ref_next_logp_BTV, _ = self._next()
        return jensen_shannon(next_logp_BTV, ref_next_logp_BTV, share)

    def certainty(self, of: str) -> Tensor:
        """The certainty ``[B, T]`` of ``policy`` or ``reference`` at each prefix; raises as :meth:`top`."""
        next_logp_BTV, ref_next_logp_BTV, _ = self._next()
        return certainty((next_logp_BTV if of == "policy" else ref_next_logp_BTV).detach())

    def _next(self) -> tuple[Tensor, Tensor, Tensor]:
        if self.next_logp_BTV is None or self.ref_next_logp_BTV is None or self.token_BT is None:
            raise UserError("these rows carry no next-token log-probs, which this term needs")
        return self.next_logp_BTV, self.ref_next_logp_BTV, self.token_BT


class Loss(Protocol):
    """A function from rows to a loss that is to be minimized."""

    def __call__(self, rows: Rows, /) -> Tensor:
        """Return ``[B, T]`` (zero outside the mask) or ``[B]``: what each completion adds, unreduced; the mean over a
        group is its loss. An entry may depend on the other rows of its group (a baseline), never on other groups."""
        ...


@dataclass(frozen=True, kw_only=True)
class Completions:
    """Some completions of a tree, as indices: ``prefix_BT`` before each token, ``token_BT``, ``mask_BT``.

    The mask is true on tokens of the completion, the end token included; outside it both indices are 0.
    """

    prefix_BT: Tensor
    token_BT: Tensor
    mask_BT: Tensor
    truncated_B: Tensor

    @classmethod
    def stack(cls, steps: Sequence[tuple[Tensor, Tensor, Tensor]], truncated_B: Tensor) -> Completions:
        """From prefix, token and mask of each step."""
        prefix_BT, token_BT, mask_BT = (torch.stack(column, 1) for column in zip(*steps, strict=True))
        return cls(prefix_BT=prefix_BT, token_BT=token_BT, mask_BT=mask_BT, truncated_B=truncated_B)

    def select(self, index: Tensor) -> Completions:
        """The completions at ``index`` (numbers, or a mask)."""
        return Completions(**{name: tensor[index] for name, tensor in vars(self).items()})


@dataclass(frozen=True, kw_only=True)
class Tree:
    """Every completion over ``vocabulary`` tokens of at most ``length`` tokens.

    Where ``ends`` is set, token 0 ends a completion; one that has not ended at ``length`` is truncated.
    """

    vocabulary: int
    length: int
    ends: bool

    @classmethod
    def build(cls, *, vocabulary: int, length: int, ends: bool = True) -> Tree:
        """Check the sizes. Raises :class:`UserError` for a tree without choices."""
        if vocabulary < 2:
            raise bad_value("vocabulary", vocabulary, "at least 2 tokens")
        if length < 1:
            raise bad_value("length", length, "at least 1 token")
        return cls(vocabulary=vocabulary, length=length, ends=ends)

    @property
    def branching(self) -> int:
        """``K``: how many tokens lead to a further prefix."""
        return self.vocabulary - 1 if self.ends else self.vocabulary

    def width(self, depth: int) -> int:
        """How many prefixes have ``depth`` tokens."""
        return int(self.branching**depth)

    def first(self, depth: int) -> int:
        """The number of the first prefix of ``depth`` tokens."""
        return sum(self.width(d) for d in range(depth))

    @property
    def prefixes(self) -> int:
        return self.first(self.length)

    @property
    def completions(self) -> int:
        """How many there are: ended ones of each length, then truncated ones (all of them, without an end token)."""
        return (self.prefixes if self.ends else 0) + self.width(self.length)

    @cached_property
    def depth_N(self) -> Tensor:
        """The number of tokens of each prefix."""
        return torch.cat([torch.full((self.width(d),), d) for d in range(self.length)])

    def take(self, number_B: Tensor) -> Completions:
        """The completions with these numbers: an ended one has its last prefix's, truncated ones follow."""
        ended = self.prefixes if self.ends else 0
        truncated_B = number_B >= ended
        safe_B = torch.where(truncated_B, 0, number_B)
        depth_B = torch.where(truncated_B, self.length, self.depth_N[safe_B] if ended else self.length)
        firsts = torch.tensor([self.first(d) for d in range(self.length + 1)])
        digits_B = torch.where(truncated_B, number_B - ended, safe_B - firsts[depth_B])
        steps = []
        for t in range(self.length):  # digits, most significant first; a completion that ends has token 0 after them
            before_B = torch.div(digits_B, self.branching ** (depth_B - t).clamp(min=0), rounding_mode="floor")
            digit_B = torch.div(digits_B, self.branching ** (depth_B - t - 1).clamp(min=0), rounding_mode="floor")
            digit_B = digit_B % self.branching + (1 if self.ends else 0)
            inside_B, ends_B = depth_B >= t, depth_B == t
            prefix_B = torch.where(inside_B, firsts[t] + before_B, 0)
            steps.append((prefix_B, torch.where(inside_B & ~ends_B, digit_B, 0), inside_B))
        return Completions.stack(steps, truncated_B if self.ends else torch.zeros_like(truncated_B))

    def chunks(self, size: int) -> Iterator[Completions]:
        """Every completion once, ``size`` at a time."""
        for start in range(0, self.completions, size):
            yield self.take(torch.arange(start, min(start + size, self.completions)))

    @cached_property
    def all(self) -> Completions:
        """Every completion at once, for small trees."""
        if self.completions > 2**17:
            raise UserError(f"{self.completions} completions at once are too many; walk them in chunks")
        return self.take(torch.arange(self.completions))

    def sample(self, logp_NV: Tensor, count: int, generator: torch.Generator) -> Completions:
        """``count`` completions drawn from next-token log-probs, independent."""
        prefix_B = torch.zeros(count, dtype=torch.long)
        alive_B = torch.ones(count, dtype=torch.bool)
        steps = []
        for t in range(self.length):
            uniform_B1 = torch.rand(count, 1, generator=generator, dtype=torch.float64)
            token_B = (uniform_B1 > logp_NV[prefix_B].exp().cumsum(-1)).sum(-1).clamp(max=self.vocabulary - 1)
            steps.append((torch.where(alive_B, prefix_B, 0), torch.where(alive_B, token_B, 0), alive_B))
            ended_B = token_B == 0 if self.ends else torch.zeros_like(alive_B)
            alive_B = alive_B & ~ended_B
            if t + 1 < self.length:
                digit_B = token_B - 1 if self.ends else token_B
                child_B = self.first(t + 1) + self.branching * (prefix_B - self.first(t)) + digit_B
                prefix_B = torch.where(alive_B, child_B, 0)
        return Completions.stack(steps, alive_B if self.ends else torch.zeros_like(alive_B))

    def reach(self, logp_NV: Tensor) -> Tensor:
        """The probability ``[N]`` of visiting each prefix under next-token log-probs; differentiable."""
        levels = [logp_NV.new_ones(1)]
        for depth in range(self.length - 1):
            level = slice(self.first(depth), self.first(depth + 1))
            continuing_NK = logp_NV[level, 1:] if self.ends else logp_NV[level]
            levels.append((levels[-1][:, None] * continuing_NK.exp()).reshape(-1))
        return torch.cat(levels)


def prefix_log_probs(logits_NV: Tensor) -> Tensor:
    """Next-token log-probs (nats) at every prefix, ``[N, V]``."""
    return logits_NV.log_softmax(-1)


def log_probs(tree: Tree | Completions, logp_NV: Tensor) -> Tensor:
    """Per-token log-probs (nats) of completions (all of a small tree's), ``[B, T]``, zero outside the mask."""
    rows = tree.all if isinstance(tree, Tree) else tree
    logp_BT = logp_NV[rows.prefix_BT, rows.token_BT]
    return torch.where(rows.mask_BT, logp_BT, torch.zeros_like(logp_BT))


REGIMES = ("on_policy", "off_policy", "mixed")
IMPOSSIBLE_UNDER = ("no token", "reference", "all")
IMPOSSIBLE = -1e4
"""Log-prob (nats) that stands for probability zero, so that rows that are never drawn stay finite."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Instance:
    """Float64 tables over the prefixes of a tree, in nats.

    The policy's logits are ``features_NVD @ theta_D``; ``features_NVD=None`` is tabular, one logit per prefix and token
    (``D = N V``). ``sampler_logp_NV`` draws each token, ``recorded_logp_NV`` is what the sampler records for it.
    ``reward_N2``: of a completion by its last prefix, ended or truncated there. ``proximal_logp_NV``: the policy at the
    batch's first use, None where that is the policy itself.
    """

    tree: Tree
    features_NVD: Tensor | None
    theta_D: Tensor
    ref_logp_NV: Tensor
    sampler_logp_NV: Tensor
    recorded_logp_NV: Tensor
    reward_N2: Tensor
    proximal_logp_NV: Tensor | None = None

    @classmethod
    def random(
        cls,
        tree: Tree,
        *,
        regime: str,
        seed: int,
        distance: float = 0.5,
        staleness: float = 0.3,
        parameters: int | None = None,
        temperature: float = 1.0,
        top_p: float = 1.0,
        records: str = "drawn",
        sharpness: float = 1.0,
        impossible: str = "no token",
    ) -> Instance:
        """A seeded random instance with ``parameters`` shared parameters (None is tabular).

        ``regime``: ``on_policy`` (sampler = policy), ``off_policy`` (a stale version) or ``mixed`` (the version changes
        within the completion). ``distance``, ``staleness``: standard deviations of the logit noise between policy and
        reference, and policy and sampler, whose ``temperature`` and ``top_p`` apply to its distribution. ``records``:
        ``drawn``, the log-probs of that distribution, or ``raw``, those at temperature 1 and top-p 1. ``sharpness``:
        standard deviation of the policy's logits in tables. ``impossible``: one token of each prefix has probability
        zero under the ``reference``, or under ``all`` three.
        """
        if regime not in REGIMES:
            raise bad_value("regime", regime, REGIMES)
        if records not in ("drawn", "raw"):
            raise bad_value("records", records, ("drawn", "raw"))
        if impossible not in IMPOSSIBLE_UNDER:
            raise bad_value("impossible", impossible, IMPOSSIBLE_UNDER)
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        n, v = tree.prefixes, tree.vocabulary
        features_NVD = None if parameters is None else normal(n, v, parameters)
        theta_D = sharpness * normal(n * v if parameters is None else parameters)
        never_NV = torch.zeros(n, v, dtype=torch.float64)
        if impossible != "no token":
            never_NV[torch.arange(n), torch.randint(v, (n,), generator=generator)] = IMPOSSIBLE
        if impossible == "all":
            features_NVD, theta_D = _with_offset(features_NVD, theta_D, never_NV)
        logits_NV = _logits(features_NVD, theta_D, n, v)
        ref_logp_NV = prefix_log_probs(logits_NV + distance * normal(n, v) + never_NV)
        stale = [logits_NV + staleness * normal(n, v) for _ in range(2)]
        late_N1 = (tree.depth_N >= (tree.length + 1) // 2)[:, None]
        mixed_NV = torch.where(late_N1, stale[1], stale[0])
        sampler_NV = {"on_policy": logits_NV, "off_policy": stale[0], "mixed": mixed_NV}[regime]
        drawn_NV = nucleus(prefix_log_probs(sampler_NV / temperature), top_p)
        return cls(
            tree=tree,
            features_NVD=features_NVD,
            theta_D=theta_D,
            ref_logp_NV=ref_logp_NV,
            sampler_logp_NV=drawn_NV,
            recorded_logp_NV=drawn_NV if records == "drawn" else prefix_log_probs(sampler_NV),
            reward_N2=torch.rand(n, 2, generator=generator, dtype=torch.float64).round(),
        )

    def policy_logp(self, theta_D: Tensor | None = None) -> Tensor:
        """The policy's next-token log-probs ``[N, V]``, at other parameters where given; differentiable."""
        theta = self.theta_D if theta_D is None else theta_D
        return prefix_log_probs(_logits(self.features_NVD, theta, self.tree.prefixes, self.tree.vocabulary))

    def at_a_later_update(self, share: float) -> Instance:
        """The same batch, some updates on; at its first use the policy was ``share`` of the way from the sampler."""
        between_NV = (1 - share) * self.recorded_logp_NV + share * self.policy_logp().detach()
        return dataclasses.replace(self, proximal_logp_NV=prefix_log_probs(between_NV))

    @property
    def behaviour_logp_BT(self) -> Tensor:
        """What the sampler recorded for every completion of a small tree, ``[B, T]``."""
        return log_probs(self.tree, self.recorded_logp_NV)

    @cached_property
    def kl_N(self) -> tuple[Tensor, Tensor]:
        """Exact ``KL(pi || ref)`` and ``KL(ref || pi)`` of the next token at each prefix (nats)."""
        logp_NV = self.policy_logp()
        ratio_NV = logp_NV - self.ref_logp_NV
        return (logp_NV.exp() * ratio_NV).sum(-1), -(self.ref_logp_NV.exp() * ratio_NV).sum(-1)

    def rows(self, completions: Completions, group_size: int = 1) -> Rows:
        """What a loss reads of these completions; log-probs and exact KLs are leaves that ask for gradient."""
        mask_BT, prefix_BT = completions.mask_BT, completions.prefix_BT
        reverse_N, forward_N = self.kl_N
        proximal_NV = self.proximal_logp_NV
        last_prefix_B = prefix_BT.gather(1, mask_BT.sum(-1, keepdim=True) - 1)[:, 0]
        return Rows(
            logp_BT=log_probs(completions, self.policy_logp()).requires_grad_(True),
            ref_logp_BT=log_probs(completions, self.ref_logp_NV),
            behaviour_logp_BT=log_probs(completions, self.recorded_logp_NV),
            mask_BT=mask_BT,
            reverse_kl_BT=torch.where(mask_BT, reverse_N[prefix_BT], 0.0).requires_grad_(True),
            forward_kl_BT=torch.where(mask_BT, forward_N[prefix_BT], 0.0).requires_grad_(True),
            reward_B=self.reward_N2[last_prefix_B, completions.truncated_B.long()],
            group_B=torch.arange(len(mask_BT)) // group_size,
            truncated_B=completions.truncated_B,
            proximal_logp_BT=None if proximal_NV is None else log_probs(completions, proximal_NV),
            next_logp_BTV=self.policy_logp()[prefix_BT].requires_grad_(True),
            ref_next_logp_BTV=self.ref_logp_NV[prefix_BT],
            token_BT=completions.token_BT,
        )

    def probability(self, completions: Completions) -> Tensor:
        """The probability ``[B]`` with which the sampler really draws each completion."""
        return log_probs(completions, self.sampler_logp_NV).sum(-1).exp()


def nucleus(logp_NV: Tensor, top_p: float) -> Tensor:
    """Keep the likeliest tokens whose mass reaches ``top_p``, renormalized; the others get :data:`IMPOSSIBLE`."""
    if not 0 < top_p <= 1:
        raise bad_value("top_p", top_p, "a number above 0 and at most 1")
    if top_p == 1:
        return logp_NV
    sorted_NV, order_NV = logp_NV.sort(-1, descending=True)
    before_NV = sorted_NV.exp().cumsum(-1) - sorted_NV.exp()
    keep_NV = torch.zeros_like(logp_NV, dtype=torch.bool).scatter(-1, order_NV, before_NV < top_p)
    inside_NV = torch.where(keep_NV, logp_NV, -torch.inf).log_softmax(-1)
    return torch.where(keep_NV, inside_NV, IMPOSSIBLE)


def _logits(features_NVD: Tensor | None, theta_D: Tensor, n: int, v: int) -> Tensor:
    return theta_D.reshape(n, v) if features_NVD is None else features_NVD @ theta_D


def _with_offset(features_NVD: Tensor | None, theta_D: Tensor, offset_NV: Tensor) -> tuple[Tensor | None, Tensor]:
    """Features and parameters whose logits have ``offset_NV`` added."""
    if features_NVD is None:
        return None, theta_D + offset_NV.flatten()
    return torch.cat([features_NVD, offset_NV[..., None]], -1), torch.cat([theta_D, theta_D.new_ones(1)])
