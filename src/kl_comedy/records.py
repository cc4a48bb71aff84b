"""One frozen record per stage of the data flow.

    Problem -> Prompt -> Rollout -> Scored -> Experience -> loss terms -> optimizer -> weights (version + 1)

Shape legend: ``B`` sequences, ``R`` rows that a model reads, ``P`` prompt tokens (left-padded), ``T`` completion tokens
(right-padded). Log-probabilities are in nats, in float32 or better. Nothing is mutated and nothing is optional "until
later": the sampler's log-probs and the policy version ride along from the moment a token exists.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

# Stop reasons and statuses are stored with sampled completions, and names of metrics contain the statuses.
STOP_REASONS = ("eos", "stop", "length", "failed")
"""Why a completion ended: the end token, a stop string, a limit on tokens or turns (truncated), or an environment that
failed (the completion is then left out of the loss)."""

FOREIGN_VERSION = -1
"""Version of a token that no weights of this run drew: of another run's recorded rollouts, or an environment's."""

STATUSES = ("ok", "unparseable", "timeout", "refused")
"""What the verifier says about its own verdict; ``timeout`` and ``refused`` mean that there is none."""

GOLD = "gold"
"""The part of a reward that is the gold verdict, where the reward itself is a proxy of it."""

RUN_SCORES = {"evaluations": "reward", "proxies": "proxy", "accuracies": "accuracy"}
"""The main scores of a run's own evaluations, by their key in its summary. ``evaluations`` are gold verdicts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """What a rollout backend can do. Each backend declares one record when it registers (``capabilities=``).

    :func:`kl_comedy.rollouts.sampler.conflicts` allows or refuses settings from it, and the protocols of
    :mod:`kl_comedy.rollouts.base` say which methods each field promises.
    ``in_trainer_ranks``: samples inside the trainer's processes, not in engines beside them.
    ``draws_parts``: has ``generate_part``, which draws some prompts of a batch as it draws them among all of them,
    so several processes can share a batch. ``updates_between_tokens``: new weights can take effect within a
    completion; in the trainer's ranks through ``call_before_each_pass``, beside them by ``load`` from another
    thread. ``needs_folder``: has ``work_in(folder)``, called once before the first ``generate``, and keeps
    logs or weights there. ``recorded``: training batches are read from a file, not sampled. ``gives_top_logps``: gives
    the log-probs of its likeliest tokens beside each drawn one, where ``Sampling.top_logps`` asks for them.
    ``gives_kept``: says which tokens a truncation kept at each drawn one, where ``Sampling.records_kept`` asks for it.
    ``draws_with_policy``: draws with the learner's own module, so that a pass of the weights of a version has the
    distributions from which that version drew.
    """

    in_trainer_ranks: bool = True
    draws_parts: bool = False
    updates_between_tokens: bool = False
    needs_folder: bool = False
    recorded: bool = False
    gives_top_logps: bool = False
    gives_kept: bool = False
    draws_with_policy: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """A question and its verifiable answer. ``meta`` carries what a scorer may need."""

    id: str
    text: str
    answer: str
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """A problem rendered through the chat template, as token ids (no padding)."""

    problem: Problem
    text: str
    token_ids: tuple[int, ...]


class KeptSets(NamedTuple):
    """The tokens that truncated sampling kept, at each of ``N`` tokens that the policy drew.

    The sets follow each other in ``ids_M``, of ``sizes_N`` ids each. A set is a few ids mostly, so that it is far
    smaller than a bit for each token of the vocabulary.
    """

    sizes_N: Tensor
    ids_M: Tensor

    def fault(self, drawn_ids: Sequence[int]) -> str:
        """Why these are not the sets from which ``drawn_ids`` were drawn; empty where they may be."""
        sizes_N, ids_M = self
        if len(sizes_N) != len(drawn_ids):
            return f"{len(sizes_N)} kept sets for {len(drawn_ids)} tokens that the policy drew"
        if int(sizes_N.sum()) != len(ids_M) or bool((sizes_N < 0).any()):
            return f"the sizes of the kept sets add up to {int(sizes_N.sum())}, and there are {len(ids_M)} ids"
        is_drawn_M = ids_M == sizes_N.new_tensor(drawn_ids).repeat_interleave(sizes_N)
        # How often a set has its drawn token: the running count at its end less that at its start.
        running = [0, *is_drawn_M.cumsum(0).tolist()]
        ends = sizes_N.cumsum(0).tolist()
        starts = [0, *ends[:-1]]
        for position, (start, end) in enumerate(zip(starts, ends, strict=True)):
            if running[end] == running[start]:
                return f"the kept set of token {position} has {end - start} ids, and not {drawn_ids[position]}, its own"
        return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A part of a rollout that the model reads at once: tokens ``start`` to ``end`` of it, behind ``context``.

    Compaction, a sub-agent, and a chat template that renders earlier turns anew begin a row: what the policy draws then
    does not follow the tokens before it.
    """

    start: int
    end: int
    context: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """One sampled completion.

    ``logps[t]`` is the sampler's own log-probability (nats) of ``completion_ids[t]`` at the sampling
    temperature; ``versions[t]`` the version of the weights that sampled it. The end token, where
    sampled, is part of the completion. ``text`` is decoded from the policy's tokens, without special tokens.

    ``trained[t]`` is False at a token that an environment wrote (a tool's reply): the policy attends to it, and nothing
    else reads it. Its log-prob is 0 and its version :data:`FOREIGN_VERSION`. Empty: the policy drew every token.
    ``turn_ends``: how many of the rollout's tokens stand up to the end of each of the policy's turns; empty: one turn.
    ``turn_parts``: what the environment paid for each turn, by the name of the part of the reward.

    ``restarts`` are the rows after the first, ``(start, context)`` of each in order: from token ``start`` on the policy
    read ``context`` in the place of the prompt and the tokens before. Reward, weight, group, age and every sum over
    tokens belong to the rollout and not to a row; :attr:`rows` is for those who pass a model over it.
    ``kept`` are the sets of tokens from which truncated sampling drew, of the policy's tokens alone; ``logps`` are then
    of the distributions that are renormalized over them. None where it drew from the whole vocabulary.

    Raises :class:`ValueError` where ``trained`` has another length, the policy drew no token at all, a row is empty, a
    turn does not end with a token of the policy, or a kept set does not have its token.
    """

    prompt: Prompt
    group_id: int
    completion_ids: tuple[int, ...]
    # One number per token, not per rollout: with a lag, weights may change within a completion.
    logps: tuple[float, ...]
    versions: tuple[int, ...]
    stop_reason: str
    text: str
    trained: tuple[bool, ...] = ()
    restarts: tuple[tuple[int, tuple[int, ...]], ...] = ()
    turn_ends: tuple[int, ...] = ()
    turn_parts: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    # Ids and log-probs [T, K] of the sampler's likeliest tokens before each token, in order; None unless a term reads
    # them (KLTerm.score_centring). Left out of ==, which has no answer for tensors.
    sampler_top: tuple[Tensor, Tensor] | None = field(default=None, compare=False)
    kept: KeptSets | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        self._check_rows()
        if self.kept is not None:
            fault = self.kept.fault(self.drawn_ids)
            if fault:
                raise ValueError(f"truncated sampling: {fault}")

    def _check_rows(self) -> None:
        tokens = len(self.completion_ids)
        starts = [0, *(start for start, _ in self.restarts), tokens]
        if self.restarts and any(end <= start for start, end in pairwise(starts)):
            raise ValueError(f"a rollout of {tokens} tokens has rows that begin at {starts[:-1]}: one has no token")
        if not all(context for _, context in self.restarts):
            raise ValueError("a rollout has a row without context: nothing says what its first token follows")
        if self.trained and len(self.trained) != tokens:
            raise ValueError(f"a rollout has {len(self.trained)} entries of trained for its {tokens} tokens")
        if self.trained and not any(self.trained):
            raise ValueError(f"a rollout has {tokens} tokens, all of the environment: the policy drew none of them")
        fault = turns_fault(self.turn_ends, self.turn_parts, self.trained_mask)
        if fault:
            raise ValueError(f"a rollout has {fault}")

    @property
    def parts(self) -> dict[str, float]:
        """The parts of the reward that the environment gave, summed over the turns."""
        return {name: sum(values) for name, values in self.turn_parts.items()}

    @property
    def rows(self) -> tuple[Row, ...]:
        """What the model reads, in the order of the tokens; one row unless it restarted."""
        contexts = [self.prompt.token_ids, *(context for _, context in self.restarts)]
        starts = [0, *(start for start, _ in self.restarts)]
        ends = [*starts[1:], len(self.completion_ids)]
        return tuple(
            Row(start=start, end=end, context=context)
            for start, end, context in zip(starts, ends, contexts, strict=True)
        )

    @property
    def trained_mask(self) -> tuple[bool, ...]:
        """True at the tokens that the policy drew, one for each token."""
        return self.trained or (True,) * len(self.completion_ids)

    @property
    def drawn_ids(self) -> tuple[int, ...]:
        """The ids of the tokens that the policy drew."""
        return tuple(compress(self.completion_ids, self.trained_mask))

    @property
    def drawn_versions(self) -> tuple[int, ...]:
        """The version of the weights, for each token that the policy drew."""
        return tuple(compress(self.versions, self.trained_mask))


def turns_fault(ends: Sequence[int], parts: Mapping[str, Sequence[float]], trained_mask: Sequence[bool]) -> str:
    """What is wrong with the turns of a rollout; empty where nothing is."""
    if any(len(values) != len(ends) for values in parts.values()):
        return f"parts of the reward that are not one for each of its {len(ends)} turns"
    if not ends:
        return ""
    # A reward stands at the last token of its turn, which the environment's tokens are not.
    last_trained = max(position for position, is_drawn in enumerate(trained_mask, 1) if is_drawn)
    is_ascending = all(before < end for before, end in pairwise([0, *ends]))
    if not is_ascending or ends[-1] != last_trained or not all(trained_mask[end - 1] for end in ends):
        return f"turns that end at {list(ends)}: not each with a token of the policy, the last with its last token"
    return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """What an environment answers to one turn of the policy.

    ``observation``: the text that the policy reads before its next turn. ``done``: the dialogue ends with the policy's
    turn, and no observation is added. ``state``: what the environment gets back at the next turn, as JSON holds it.
    ``parts``: what the turn earned, by the names that the environment declares.
    """

    observation: str = ""
    done: bool = False
    state: Any = None
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reward:
    """A verdict: ``value`` (weighted sum), the unweighted ``parts`` by reward name, and ``status``."""

    value: float
    status: str = "ok"
    parts: Mapping[str, float] = field(default_factory=dict)

    @property
    def gold(self) -> float | None:
        """The gold verdict on the same completion; None where the value is no proxy."""
        return self.parts.get(GOLD)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """A rollout and its reward."""

    rollout: Rollout
    reward: Reward


def groups_without_signal(rows: Sequence[Scored]) -> set[int]:
    """The numbers of the groups whose rewards are all equal: a baseline over the group leaves nothing of them."""
    rewards: dict[int, set[float]] = defaultdict(set)
    for row in rows:
        rewards[row.rollout.group_id].add(row.reward.value)
    return {group for group, values in rewards.items() if len(values) == 1}


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelRows:
    """What a model reads of rollouts with several rows: those of a rollout follow each other, in its order.

    So the tokens of ``mask_RT`` are, in reading order, those of the rollouts' ``mask_BT``: hidden states need no index
    to come from one to the other.
    """

    prompt_ids_RP: Tensor
    prompt_mask_RP: Tensor
    ids_RT: Tensor
    real_RT: Tensor
    mask_RT: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Experience:
    """What the learner sees: tensors over completion tokens, plus the padded prompts.

    ``prompt_ids_BP``/``prompt_mask_BP`` are left-padded, ``ids_BT``/``real_BT`` right-padded. The policy attends to
    the tokens of ``real_BT``, and ``mask_BT`` has those of them that it drew, which alone are trained.
    ``behaviour_logp_BT`` is the sampler's, ``ref_logp_BT`` the reference's at the same temperature;
    both zero outside the mask. ``reward_B`` is the verified reward, ``advantage_BT`` what weights the
    score of token t, ``weight_B`` the sequence's share of the loss: the loss of any set of sequences
    is ``sum_b weight_B[b] * sum_t mask * loss_BT``, so micro-batches add up to the full batch. ``sampler_top``: ids and
    log-probs ``[B, T, K]`` of the sampler's likeliest tokens, where a term reads them. ``kept``: the sets that
    truncated sampling kept, of the tokens of ``mask_BT`` in reading order. ``rows``: what the model reads where a
    rollout has several rows; None where each is its prompt and its tokens.
    """

    prompt_ids_BP: Tensor
    prompt_mask_BP: Tensor
    ids_BT: Tensor
    real_BT: Tensor
    mask_BT: Tensor
    behaviour_logp_BT: Tensor
    ref_logp_BT: Tensor
    advantage_BT: Tensor
    reward_B: Tensor
    weight_B: Tensor
    policy_version_BT: Tensor
    group_B: Tensor
    sampler_top: tuple[Tensor, Tensor] | None = None
    kept: KeptSets | None = None
    rows: ModelRows | None = None
