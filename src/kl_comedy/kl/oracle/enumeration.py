"""Enumerable autoregressive policies: a tree of completions; policy, reference and sampler over it; inputs of a loss.

Legend: ``N`` prefixes of the tree, ``V`` tokens, ``B`` completions, ``T`` longest completion, ``K`` tokens that do not
end a completion (``V - 1`` where token 0 ends it, else ``V``). Log-probs in nats. Prefixes are numbered by depth, then
by their digits in base ``K``: the children of prefix ``i`` at depth ``d`` are ``first(d + 1) + K * (i - first(d)) +
digit``. Completions are walked in chunks, so that memory stays bounded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from kl_comedy.errors import UserError, bad_value
from kl_comedy.kl.estimators import TopTokens, certainty, jensen_shannon
from kl_comedy.kl.term import ALL_TOKENS


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Completions with everything a training loss may read; floats are float64, zero beyond the end of a completion.

    At the tokens of an environment, which the mask leaves out, they are what policy, reference and sampler say of these
    tokens, as a trainer that scores a whole dialogue has it: a loss that reads them there has another gradient.

    ``logp_BT``, the two exact KLs and ``next_logp_BTV`` ask for gradient; everything else is constant. Those
    of next tokens are for terms that read other tokens than the sampled one.
    """

    logp_BT: Tensor
    """The policy's log-probs of the tokens (nats)."""
    ref_logp_BT: Tensor
    behaviour_logp_BT: Tensor
    """What the sampler recorded (nats)."""
    mask_BT: Tensor
    reverse_kl_BT: Tensor
    """``KL(pi || ref)`` of the next token at each prefix (nats)."""
    forward_kl_BT: Tensor
    """``KL(ref || pi)`` of the next token at each prefix (nats)."""
    reward_B: Tensor
    """The whole reward of a completion."""
    group_B: Tensor
    """Whose prompt a completion answers; equal numbers are adjacent."""
    truncated_B: Tensor
    """Whether a completion was cut at the length limit."""
    proximal_logp_BT: Tensor | None = None
    """The policy at the batch's first update (nats); None at that update."""
    next_logp_BTV: Tensor | None = None
    ref_next_logp_BTV: Tensor | None = None
    token_BT: Tensor | None = None
    sampler_next_logp_BTV: Tensor | None = None
    paid_BT: Tensor | None = None
    """What of the reward an environment paid for a turn, at the turn's last token; None where there is none."""

    def against_the_sampler(self) -> Rows:
        """The same rows with the sampler as the reference; raises as :meth:`top`."""
        next_logp_BTV, _, _ = self._next()
        assert self.sampler_next_logp_BTV is not None
        log_ratio_BTV = next_logp_BTV - self.sampler_next_logp_BTV
        inside_BT = self.mask_BT
        # Of the next-token log-probs, which ask for gradient: so these KLs do.
        return dataclasses.replace(
            self,
            ref_logp_BT=self.behaviour_logp_BT,
            ref_next_logp_BTV=self.sampler_next_logp_BTV,
            reverse_kl_BT=torch.where(inside_BT, (next_logp_BTV.exp() * log_ratio_BTV).sum(-1), 0.0),
            forward_kl_BT=torch.where(inside_BT, -(self.sampler_next_logp_BTV.exp() * log_ratio_BTV).sum(-1), 0.0),
        )

    def sampler_top(self, k: int) -> TopTokens:
        """The sampler's ``k`` likeliest tokens: all for :data:`ALL_TOKENS`, else bounded as in :meth:`top`."""
        next_logp_BTV, _, token_BT = self._next()
        assert self.sampler_next_logp_BTV is not None
        vocabulary = self.sampler_next_logp_BTV.shape[-1]
        if k == ALL_TOKENS:
            k = vocabulary
        else:
            k = min(k, max(1, vocabulary // 2))
        sampler_BTK, ids_BTK = self.sampler_next_logp_BTV.topk(k, -1)
        return TopTokens(next_logp_BTV.gather(-1, ids_BTK), sampler_BTK, (ids_BTK == token_BT[..., None]).any(-1))

    def top(self, k: int, tokens: str) -> TopTokens:
        """The ``k`` likeliest tokens of ``policy`` or ``reference``, at most half the vocabulary, rounded down.

        So there is a tail in every tree, as in a language model. Raises :class:`UserError` for rows without next-token
        log-probs.
        """
        next_logp_BTV, ref_next_logp_BTV, token_BT = self._next()
        chosen_by_BTV = ref_next_logp_BTV
        if tokens == "policy":
            # Which tokens are likeliest has no gradient; their log-probs have.
            chosen_by_BTV = next_logp_BTV.detach()
        largest_k = max(1, chosen_by_BTV.shape[-1] // 2)
        ids_BTK = chosen_by_BTV.topk(min(k, largest_k), -1).indices
        inside_BT = (ids_BTK == token_BT[..., None]).any(-1)
        return TopTokens(next_logp_BTV.gather(-1, ids_BTK), ref_next_logp_BTV.gather(-1, ids_BTK), inside_BT)

    def mixture(self, share: float) -> Tensor:
        """The exact Jensen-Shannon divergence of the next token at each prefix, ``[B, T]``; raises as :meth:`top`."""
        next_logp_BTV, ref_next_logp_BTV, _ = self._next()
        return jensen_shannon(next_logp_BTV, ref_next_logp_BTV, share)

    def certainty(self, of: str) -> Tensor:
        """The certainty ``[B, T]`` of ``policy`` or ``reference`` at each prefix; raises as :meth:`top`."""
        next_logp_BTV, ref_next_logp_BTV, _ = self._next()
        if of == "policy":
            return certainty(next_logp_BTV.detach())
        return certainty(ref_next_logp_BTV.detach())

    def _next(self) -> tuple[Tensor, Tensor, Tensor]:
        """The next-token log-probs of policy and reference, and the sampled tokens."""
        if self.next_logp_BTV is None or self.ref_next_logp_BTV is None or self.token_BT is None:
            raise UserError("these rows carry no next-token log-probs, which this term needs")
        return self.next_logp_BTV, self.ref_next_logp_BTV, self.token_BT


class Loss(Protocol):
    """A function from rows to a loss that is to be minimized."""

    def __call__(self, rows: Rows, /) -> Tensor:
        """Return ``[B, T]`` (zero outside the mask) or ``[B]``: what each completion adds, unreduced.

        The mean over a group is the group's loss. An element may depend on the other rows of its group, as a baseline
        does, but on no other group: groups are enumerated one by one.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Completions:
    """Some completions of a tree, as indices: the prefix before each token, and the token.

    The mask is true on the tokens of a completion, its end token included; outside it both indices are 0.
    """

    prefix_BT: Tensor
    token_BT: Tensor
    mask_BT: Tensor
    truncated_B: Tensor

    @classmethod
    def stack(cls, steps: Sequence[tuple[Tensor, Tensor, Tensor]], truncated_B: Tensor) -> Completions:
        """From prefix, token and mask ``[B]`` of each step."""
        prefixes, tokens, masks = zip(*steps, strict=True)
        return cls(
            prefix_BT=torch.stack(prefixes, 1),
            token_BT=torch.stack(tokens, 1),
            mask_BT=torch.stack(masks, 1),
            truncated_B=truncated_B,
        )

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
        if self.ends:
            return self.vocabulary - 1
        return self.vocabulary

    @property
    def ended_completions(self) -> int:
        """How many completions end with an end token: one for each prefix, or none."""
        if self.ends:
            return self.prefixes
        return 0

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
        """How many there are: ended ones of each length, then truncated ones."""
        return self.ended_completions + self.width(self.length)

    @cached_property
    def depth_N(self) -> Tensor:
        """The number of tokens of each prefix."""
        return torch.cat([torch.full((self.width(d),), d) for d in range(self.length)])

    def take(self, number_B: Tensor) -> Completions:
        """The completions with these numbers ``[B]``.

        An ended completion has the number of its last prefix. The completions of full length follow, in the order of
        their tokens.
        """
        # This order is frozen: sums of floats depend on it in their last bit, and so do the stored certificates.
        full_B = number_B >= self.ended_completions
        # The number of a completion of full length is no prefix; 0 is looked up instead and not used.
        last_prefix_B = torch.where(full_B, 0, number_B)
        depth_B = torch.full_like(number_B, self.length)
        if self.ends:
            depth_B = torch.where(full_B, depth_B, self.depth_N[last_prefix_B])
        firsts = torch.tensor([self.first(depth) for depth in range(self.length + 1)])
        # The tokens of a completion before its end are the digits of this number in base `branching`; it is also the
        # completion's position among the prefixes of its depth.
        digits_B = torch.where(full_B, number_B - self.ended_completions, last_prefix_B - firsts[depth_B])
        # Digits count the tokens that lead on: from 1 where token 0 is the end token, else from 0.
        lowest_token = self.vocabulary - self.branching

        steps = []
        for t in range(self.length):
            # Digits come most significant first: the number without its last (depth - t) digits is the tokens before
            # step t. A completion that ends has token 0 after its digits, at step depth_B. Beyond its end the powers
            # are clamped, and what comes of them is not used.
            power_before_B = self.branching ** (depth_B - t).clamp(min=0)
            power_up_to_B = self.branching ** (depth_B - t - 1).clamp(min=0)
            digits_before_B = torch.div(digits_B, power_before_B, rounding_mode="floor")
            digits_up_to_B = torch.div(digits_B, power_up_to_B, rounding_mode="floor")
            token_B = digits_up_to_B % self.branching + lowest_token
            inside_B = depth_B >= t
            ends_here_B = depth_B == t
            prefix_B = torch.where(inside_B, firsts[t] + digits_before_B, 0)
            steps.append((prefix_B, torch.where(inside_B & ~ends_here_B, token_B, 0), inside_B))
        # Without an end token a completion of full length is complete.
        truncated_B = full_B & self.ends
        return Completions.stack(steps, truncated_B)

    def chunks(self, size: int) -> Iterator[Completions]:
        """Every completion once, ``size`` at a time."""
        for start in range(0, self.completions, size):
            yield self.take(torch.arange(start, min(start + size, self.completions)))

    @cached_property
    def all(self) -> Completions:
        """Every completion at once, for small trees."""
        # As many indices, log-probs and gradients fit in memory at once; a mistyped length would not.
        if self.completions > 2**17:
            raise UserError(f"{self.completions} completions at once are too many; walk them in chunks")
        return self.take(torch.arange(self.completions))

    def sample(self, logp_NV: Tensor, count: int, generator: torch.Generator) -> Completions:
        """``count`` independent completions drawn from next-token log-probs (nats)."""
        prefix_B = torch.zeros(count, dtype=torch.long)
        alive_B = torch.ones(count, dtype=torch.bool)
        lowest_token = self.vocabulary - self.branching
        steps = []
        for t in range(self.length):
            # Inverse of the cumulative distribution; the clamp is for a sum that rounds to less than 1.
            uniform_B1 = torch.rand(count, 1, generator=generator, dtype=torch.float64)
            cumulative_BV = logp_NV[prefix_B].exp().cumsum(-1)
            token_B = (uniform_B1 > cumulative_BV).sum(-1).clamp(max=self.vocabulary - 1)
            steps.append((torch.where(alive_B, prefix_B, 0), torch.where(alive_B, token_B, 0), alive_B))
            if self.ends:
                alive_B = alive_B & (token_B != 0)
            if t + 1 < self.length:
                child_B = self.first(t + 1) + self.branching * (prefix_B - self.first(t)) + token_B - lowest_token
                prefix_B = torch.where(alive_B, child_B, 0)
        truncated_B = alive_B
        if not self.ends:
            truncated_B = torch.zeros_like(alive_B)
        return Completions.stack(steps, truncated_B)

    def reach(self, logp_NV: Tensor) -> Tensor:
        """The probability ``[N]`` of visiting each prefix under next-token log-probs; differentiable."""
        reach_by_depth = [logp_NV.new_ones(1)]
        lowest_token = self.vocabulary - self.branching
        for depth in range(self.length - 1):
            at_depth = slice(self.first(depth), self.first(depth + 1))
            continuing_NK = logp_NV[at_depth, lowest_token:]
            # The children of a prefix are adjacent, so a row per prefix, flattened, is in the order of the numbers.
            reach_by_depth.append((reach_by_depth[-1][:, None] * continuing_NK.exp()).reshape(-1))
        return torch.cat(reach_by_depth)


def prefix_log_probs(logits_NV: Tensor) -> Tensor:
    """Next-token log-probs (nats) at every prefix, ``[N, V]``."""
    return logits_NV.log_softmax(-1)


def log_probs(tree: Tree | Completions, logp_NV: Tensor) -> Tensor:
    """Per-token log-probs (nats) of completions (all of a small tree's), ``[B, T]``, zero outside the mask."""
    completions = tree
    if isinstance(completions, Tree):
        completions = completions.all
    # Outside the mask both indices are 0, which is a prefix and a token, so that nothing is out of range.
    logp_BT = logp_NV[completions.prefix_BT, completions.token_BT]
    return torch.where(completions.mask_BT, logp_BT, torch.zeros_like(logp_BT))


@dataclass(frozen=True, kw_only=True, eq=False)
class Environment:
    """Who writes in a dialogue. At the prefixes of ``writes_N`` (bool) the next token is drawn from ``logp_NV`` (nats),
    whatever the policy is; it is in no mask. Where it begins to write it has paid ``paid_N`` for the turn before."""

    writes_N: Tensor
    logp_NV: Tensor
    paid_N: Tensor

    @classmethod
    def random(cls, tree: Tree, seed: int) -> Environment:
        """A tool that is called by token 1, and replies with one token, or with more as long as it draws the last one.

        Its log-probs depend on the whole dialogue. It does not end a completion, and may be cut in its reply.
        """
        writes_N = torch.zeros(tree.prefixes, dtype=torch.bool)
        begins_N = torch.zeros(tree.prefixes, dtype=torch.bool)
        lowest_token = tree.vocabulary - tree.branching
        for depth in range(1, tree.length):
            position = torch.arange(tree.width(depth))
            last_token = position % tree.branching + lowest_token
            tool_wrote_it = writes_N[tree.first(depth - 1) + position // tree.branching]
            replies = torch.where(tool_wrote_it, last_token == tree.vocabulary - 1, last_token == 1)
            writes_N[tree.first(depth) : tree.first(depth + 1)] = replies
            begins_N[tree.first(depth) : tree.first(depth + 1)] = replies & ~tool_wrote_it
        generator = torch.Generator().manual_seed(seed)
        logits_NV = 1.5 * torch.randn(tree.prefixes, tree.vocabulary, generator=generator, dtype=torch.float64)
        if tree.ends:
            logits_NV[:, 0] = IMPOSSIBLE
        paid_N = torch.rand(tree.prefixes, generator=generator, dtype=torch.float64).round()
        return cls(writes_N=writes_N, logp_NV=prefix_log_probs(logits_NV), paid_N=torch.where(begins_N, paid_N, 0.0))


REGIMES = ("on_policy", "off_policy", "mixed")
RECORDS = ("drawn", "raw")
IMPOSSIBLE_UNDER = ("no token", "reference", "all")
IMPOSSIBLE = -1e4
"""Log-prob (nats) that stands for probability zero, so that rows that are never drawn stay finite."""


@dataclass(frozen=True, kw_only=True)
class InstanceSettings:
    """How :meth:`Instance.random` draws policy, reference and sampler. Raises :class:`UserError` for unknown names."""

    regime: str
    """``on_policy`` (the sampler is the policy), ``off_policy`` (a stale version) or ``mixed`` (the version changes
    within
    the completion)."""
    seed: int
    parameters: int | None = None
    """Shared parameters of the policy; None is tabular, one logit per prefix and token."""
    sharpness: float = 1.0
    """Standard deviation of the policy's logits (nats) in tables."""
    distance: float = 0.5
    """Standard deviation of the logit noise (nats) between policy and reference."""
    staleness: float = 0.3
    """Standard deviation of the logit noise (nats) between policy and sampler."""
    temperature: float = 1.0
    top_p: float = 1.0
    """Temperature and nucleus of the sampler's distribution; policy and reference have neither."""
    renormalized: bool = False
    """Whether the policy is renormalized over the tokens that the sampler's nucleus kept, as a learner does that knows
    them. The reference is whole."""
    records: str = "drawn"
    """The log-probs that the sampler records: ``drawn``, of the distribution it draws from, or ``raw``, of the one
    before
    temperature and nucleus."""
    impossible: str = "no token"
    """One token of each prefix has probability zero under the ``reference``, or under ``all`` three."""

    def __post_init__(self) -> None:
        if self.regime not in REGIMES:
            raise bad_value("regime", self.regime, REGIMES)
        if self.records not in RECORDS:
            raise bad_value("records", self.records, RECORDS)
        if self.impossible not in IMPOSSIBLE_UNDER:
            raise bad_value("impossible", self.impossible, IMPOSSIBLE_UNDER)


@dataclass(frozen=True, kw_only=True, eq=False)
class Instance:
    """Float64 tables over the prefixes of a tree, in nats.

    The policy's logits are ``features_NVD @ theta_D``. Equality is identity, because score tables are cached by
    instance.
    """

    tree: Tree
    features_NVD: Tensor | None
    """None is tabular: one logit per prefix and token (``D = N V``)."""
    theta_D: Tensor
    ref_logp_NV: Tensor
    sampler_logp_NV: Tensor
    """What each token is drawn from."""
    recorded_logp_NV: Tensor
    """What the sampler records for it."""
    reward_N2: Tensor
    """The reward of a completion by its last prefix: ended there, or truncated there. What an environment pays for its
    turns is in addition."""
    proximal_logp_NV: Tensor | None = None
    """The policy at the batch's first use; None where that is the policy itself."""
    environment: Environment | None = None
    """Who writes a part of the tokens; None where the policy writes all."""
    kept_NV: Tensor | None = None
    """The tokens over which the policy is renormalized, constant in its parameters; None for all."""

    @classmethod
    def random(cls, tree: Tree, settings: InstanceSettings) -> Instance:
        """A seeded random instance on ``tree``. Raises :class:`UserError` for a ``top_p`` outside (0, 1]."""
        # Seeds are written in stored results: what is drawn, and in which order, must not change.
        generator = torch.Generator().manual_seed(settings.seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        n = tree.prefixes
        v = tree.vocabulary
        if settings.parameters is None:
            features_NVD = None
            theta_D = settings.sharpness * normal(n * v)
        else:
            features_NVD = normal(n, v, settings.parameters)
            theta_D = settings.sharpness * normal(settings.parameters)
        never_NV = torch.zeros(n, v, dtype=torch.float64)
        if settings.impossible != "no token":
            never_NV[torch.arange(n), torch.randint(v, (n,), generator=generator)] = IMPOSSIBLE
        if settings.impossible == "all":
            features_NVD, theta_D = _with_offset(features_NVD, theta_D, never_NV)

        logits_NV = _logits(features_NVD, theta_D, n, v)
        ref_logp_NV = prefix_log_probs(logits_NV + settings.distance * normal(n, v) + never_NV)
        # Both stale versions are drawn in every regime, so that a seed has the same rewards in all of them.
        stale_NV = logits_NV + settings.staleness * normal(n, v)
        later_NV = logits_NV + settings.staleness * normal(n, v)
        if settings.regime == "on_policy":
            sampler_NV = logits_NV
        elif settings.regime == "off_policy":
            sampler_NV = stale_NV
        else:
            is_late_N1 = (tree.depth_N >= (tree.length + 1) // 2)[:, None]
            sampler_NV = torch.where(is_late_N1, later_NV, stale_NV)
        drawn_NV = nucleus(prefix_log_probs(sampler_NV / settings.temperature), settings.top_p)
        kept_NV = None
        if settings.renormalized:
            kept_NV = drawn_NV > IMPOSSIBLE / 2
        recorded_NV = drawn_NV
        if settings.records == "raw":
            recorded_NV = prefix_log_probs(sampler_NV)
        return cls(
            tree=tree,
            features_NVD=features_NVD,
            theta_D=theta_D,
            ref_logp_NV=ref_logp_NV,
            sampler_logp_NV=drawn_NV,
            recorded_logp_NV=recorded_NV,
            reward_N2=torch.rand(n, 2, generator=generator, dtype=torch.float64).round(),
            kept_NV=kept_NV,
        )

    def policy_logp(self, theta_D: Tensor | None = None) -> Tensor:
        """The policy's next-token log-probs ``[N, V]``, at other parameters where given; differentiable."""
        if theta_D is None:
            theta_D = self.theta_D
        logits_NV = _logits(self.features_NVD, theta_D, self.tree.prefixes, self.tree.vocabulary)
        if self.kept_NV is not None:
            logits_NV = torch.where(self.kept_NV, logits_NV, IMPOSSIBLE)
        return prefix_log_probs(logits_NV)

    @property
    def ref_kept_NV(self) -> Tensor:
        """The reference's probabilities, 0 at tokens that the policy never draws: what a forward KL sums over."""
        ref_NV = self.ref_logp_NV.exp()
        if self.kept_NV is None:
            return ref_NV
        return torch.where(self.kept_NV, ref_NV, 0.0)

    def at_a_later_update(self, share: float) -> Instance:
        """The same batch some updates later; at its first use the policy was ``share`` of the way from the sampler."""
        # A mixture of the logs, renormalized: between the two policies at every token.
        between_NV = (1 - share) * self.recorded_logp_NV + share * self.policy_logp().detach()
        return dataclasses.replace(self, proximal_logp_NV=prefix_log_probs(between_NV))

    def truncated(self, truncate: Callable[[Tensor], Tensor]) -> Instance:
        """The same with a sampler that truncates, and a policy that is renormalized over what it kept.

        ``truncate`` gives log-probs ``[N, V]`` with -inf at the tokens that are left out.
        """
        kept_NV = ~torch.isneginf(truncate(self.sampler_logp_NV))
        drawn_NV = torch.where(kept_NV, self.sampler_logp_NV, -torch.inf).log_softmax(-1)
        drawn_NV = torch.where(kept_NV, drawn_NV, IMPOSSIBLE)
        return dataclasses.replace(self, sampler_logp_NV=drawn_NV, recorded_logp_NV=drawn_NV, kept_NV=kept_NV)

    def kept_masses(self) -> tuple[float, float]:
        """Means over the tokens that the sampler draws: the whole policy's mass on the kept tokens, which is the ratio
        of a learner that does not renormalize, and minus the log (nats) of the reference's, a part of the KL to it."""
        if self.kept_NV is None:
            return 1.0, 0.0
        whole_NV = dataclasses.replace(self, kept_NV=None).policy_logp().exp()
        visits_N = self.reach(self.sampler_logp_NV)
        visits_N = visits_N / visits_N.sum()
        policy_N = torch.where(self.kept_NV, whole_NV, 0.0).sum(-1)
        reference_N = self.ref_kept_NV.sum(-1)
        return float(visits_N @ policy_N), -float(visits_N @ reference_N.log())

    def in_dialogue(self, logp_NV: Tensor) -> Tensor:
        """What the next token is drawn from where these log-probs are the policy's: the environment's in its turns."""
        if self.environment is None:
            return logp_NV
        return torch.where(self.environment.writes_N[:, None], self.environment.logp_NV, logp_NV)

    def reach(self, logp_NV: Tensor) -> Tensor:
        """The probability ``[N]`` of each prefix as one of a token of the policy; differentiable.

        At prefixes where an environment writes it is zero: no divergence of policies is measured there.
        """
        reach_N = self.tree.reach(self.in_dialogue(logp_NV))
        if self.environment is None:
            return reach_N
        return torch.where(self.environment.writes_N, 0.0, reach_N)

    @property
    def behaviour_logp_BT(self) -> Tensor:
        """What the sampler recorded for every completion of a small tree, ``[B, T]``."""
        return log_probs(self.tree, self.recorded_logp_NV)

    # Cached: every loss on every chunk reads them, and the instance is frozen.
    @cached_property
    def kl_N(self) -> tuple[Tensor, Tensor]:
        """Exact ``KL(pi || ref)`` and ``KL(ref || pi)`` of the next token at each prefix (nats).

        The latter over the kept tokens alone, where there are any: of all it is infinite.
        """
        logp_NV = self.policy_logp()
        log_ratio_NV = logp_NV - self.ref_logp_NV
        reverse_N = (logp_NV.exp() * log_ratio_NV).sum(-1)
        forward_N = -(self.ref_kept_NV * log_ratio_NV).sum(-1)
        return reverse_N, forward_N

    def rows(self, completions: Completions, group_size: int = 1) -> Rows:
        """What a loss reads of these completions; log-probs and exact KLs are leaves that ask for gradient."""
        inside_BT = completions.mask_BT
        prefix_BT = completions.prefix_BT
        mask_BT = inside_BT
        if self.environment is not None:
            mask_BT = inside_BT & ~self.environment.writes_N[prefix_BT]
        reverse_N, forward_N = self.kl_N
        proximal_logp_BT = None
        if self.proximal_logp_NV is not None:
            proximal_logp_BT = log_probs(completions, self.proximal_logp_NV)
        # A reward depends on the last prefix and on how the completion ended there.
        last_prefix_B = prefix_BT.gather(1, inside_BT.sum(-1, keepdim=True) - 1)[:, 0]
        reward_B = self.reward_N2[last_prefix_B, completions.truncated_B.long()]
        paid_BT = None
        if self.environment is not None:
            # At the token before the prefix at which the environment begins to write.
            paid_there_BT = torch.where(inside_BT, self.environment.paid_N[prefix_BT], 0.0)
            paid_BT = torch.nn.functional.pad(paid_there_BT[:, 1:], (0, 1))
            reward_B = reward_B + paid_BT.sum(-1)
        return Rows(
            logp_BT=log_probs(completions, self.policy_logp()).requires_grad_(True),
            ref_logp_BT=log_probs(completions, self.ref_logp_NV),
            behaviour_logp_BT=log_probs(completions, self.recorded_logp_NV),
            mask_BT=mask_BT,
            reverse_kl_BT=torch.where(inside_BT, reverse_N[prefix_BT], 0.0).requires_grad_(True),
            forward_kl_BT=torch.where(inside_BT, forward_N[prefix_BT], 0.0).requires_grad_(True),
            reward_B=reward_B,
            group_B=torch.arange(len(mask_BT)) // group_size,
            truncated_B=completions.truncated_B,
            proximal_logp_BT=proximal_logp_BT,
            next_logp_BTV=self.policy_logp()[prefix_BT].requires_grad_(True),
            ref_next_logp_BTV=self.ref_logp_NV[prefix_BT],
            token_BT=completions.token_BT,
            sampler_next_logp_BTV=self.recorded_logp_NV[prefix_BT],
            paid_BT=paid_BT,
        )

    def probability(self, completions: Completions) -> Tensor:
        """The probability ``[B]`` with which the sampler really draws each completion."""
        return log_probs(completions, self.in_dialogue(self.sampler_logp_NV)).sum(-1).exp()


def nucleus(logp_NV: Tensor, top_p: float) -> Tensor:
    """Keep the likeliest tokens whose mass reaches ``top_p``, renormalized; the others get :data:`IMPOSSIBLE`."""
    if not 0 < top_p <= 1:
        raise bad_value("top_p", top_p, "a number above 0 and at most 1")
    if top_p == 1:
        return logp_NV
    # A token stays if the likelier ones together do not reach top_p yet; so the likeliest always stays.
    sorted_NV, order_NV = logp_NV.sort(-1, descending=True)
    mass_before_NV = sorted_NV.exp().cumsum(-1) - sorted_NV.exp()
    stays_NV = torch.zeros_like(logp_NV, dtype=torch.bool).scatter(-1, order_NV, mass_before_NV < top_p)
    renormalized_NV = torch.where(stays_NV, logp_NV, -torch.inf).log_softmax(-1)
    return torch.where(stays_NV, renormalized_NV, IMPOSSIBLE)


def _logits(features_NVD: Tensor | None, theta_D: Tensor, n: int, v: int) -> Tensor:
    """The policy's logits ``[N, V]``."""
    if features_NVD is None:
        return theta_D.reshape(n, v)
    return features_NVD @ theta_D


def _with_offset(features_NVD: Tensor | None, theta_D: Tensor, offset_NV: Tensor) -> tuple[Tensor | None, Tensor]:
    """Features and parameters whose logits have ``offset_NV`` added."""
    if features_NVD is None:
        return None, theta_D + offset_NV.flatten()
    # The offset is one more feature, whose parameter is 1.
    features_NVD = torch.cat([features_NVD, offset_NV[..., None]], -1)
    theta_D = torch.cat([theta_D, theta_D.new_ones(1)])
    return features_NVD, theta_D
