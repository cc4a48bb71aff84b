"""Key-value caches that hold a prompt once for its group, as layouts of our attention.

While sampling, a token attends to its prompt's keys (one copy per group, read by all of its rows in one matrix
product) and to the keys of its own completion (written in place). Nothing is concatenated or repeated from
token to token.

Legend: ``F`` prompts, ``P`` longest prompt, ``B`` rows being drawn, ``M`` most rows of one prompt, ``T`` tokens
drawn; ``K``, ``R``, ``D``, ``S`` as in :mod:`kl_comedy.models.attention`.

What happens at every token, whoever runs the loop: stop strings, truncations, and the log-probs of ``generate``.

Shape legend: ``B`` sequences, ``L`` tokens so far (prompt and completion), ``V`` vocabulary. Processors and criteria
follow the call conventions of transformers and keep no more than ``[B]`` per step.

Sampling by our own loop over a transformers model: prompts computed once per group, rows leaving as they end.

    prompts -> one pass -> first token of every row -> one pass per token over the rows still being drawn

The uniform number behind every token is drawn beforehand, so what a row gets does not depend on which other
rows have left. A token is the first whose cumulative probability (float64) exceeds it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kl_comedy.models.attention import additive, attend_rows, causal, for_heads, rows_of, run_with
from kl_comedy.models.introspection import head_weights
from kl_comedy.models.onednn_linear import rows_times
from kl_comedy.records import Prompt
from kl_comedy.rollouts.base import Sampling

FIRST_ROOM = 16
"""Tokens of a completion that are first made room for; the room doubles when it is full."""


class PromptCache:
    """The layout of the first pass, over prompts in a line; keeps their keys and values ``[F, K, P, D]`` by layer."""

    def __init__(self, lengths: Sequence[int], *, device: torch.device) -> None:
        starts = [sum(lengths[:n]) for n in range(len(lengths))]
        lines = [range(start, start + length) for start, length in zip(starts, lengths, strict=True)]
        self._rows = rows_of(lines, device=device)
        self._mask_FQP: Tensor | None = None
        self.last_F = torch.tensor([line[-1] for line in lines], device=device)
        self.real_FP = self._rows.real_BT
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def attend(self, layer: int, query_SKRD: Tensor, key_SKD: Tensor, value_SKD: Tensor, scale: float) -> Tensor:
        """See :class:`kl_comedy.models.attention.Layout`."""
        if self._mask_FQP is None:
            self._mask_FQP = for_heads(additive(causal(self.real_FP), query_SKRD.dtype), query_SKRD.shape[2])
        key, value = self._rows.of(key_SKD), self._rows.of(value_SKD)
        self.keys[layer] = key.transpose(1, 2).contiguous()
        self.values[layer] = value.transpose(1, 2).contiguous()
        done = attend_rows(self._rows.of(query_SKRD), key, value, self._mask_FQP, scale)
        return done[self.real_FP]

    def keep(self, prompts_F: Tensor) -> None:
        """Forget all but the chosen prompts."""
        self.real_FP = self.real_FP[prompts_F]
        for kept in (self.keys, self.values):
            for layer, tensor in kept.items():
                kept[layer] = tensor[prompts_F]


class GroupCache:
    """The layout of one token per row: prompts shared, completions ``[B, K, T, D]`` by layer."""

    def __init__(self, prompts: PromptCache, family_B: Tensor) -> None:
        self._prompts = prompts
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self.length = 0
        """Completion tokens that are in the cache; the next pass writes behind them, then call :meth:`grew`."""
        self._place(family_B)

    def _place(self, family_B: Tensor) -> None:
        """Where each row stands among the rows of its prompt."""
        self._family_B = family_B
        counts: dict[int, int] = {}
        numbers = []
        for family in family_B.tolist():
            numbers.append(counts.get(family, 0))
            counts[family] = numbers[-1] + 1
        self._most = max(counts.values())
        self._slot_B = family_B * self._most + torch.tensor(numbers, device=family_B.device)
        self._mask_FP: Tensor | None = None

    def attend(self, layer: int, query_SKRD: Tensor, key_SKD: Tensor, value_SKD: Tensor, scale: float) -> Tensor:
        """See :class:`kl_comedy.models.attention.Layout`; the line is one token of every row."""
        keys, values = self._write(layer, key_SKD, value_SKD)
        query = query_SKRD * scale
        prompt_key, prompt_value = self._prompts.keys[layer], self._prompts.values[layer]
        shared_FKQP = self._by_prompt(query) @ prompt_key.transpose(-1, -2) + self._mask(query.dtype)[:, None, None]
        shared = self._by_row(shared_FKQP)
        scores = torch.cat([shared, query @ keys.transpose(-1, -2)], -1)
        weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(scores.dtype)
        split = shared.shape[-1]
        return weights[..., split:] @ values + self._by_row(self._by_prompt(weights[..., :split]) @ prompt_value)

    def _by_prompt(self, rows_BKRX: Tensor) -> Tensor:
        """Rows below those of the same prompt, ``[F, K, M * R, X]``; places without a row are zero."""
        _, k, r, x = rows_BKRX.shape
        families = len(self._prompts.real_FP)
        padded = rows_BKRX.new_zeros(families * self._most, k, r, x)
        padded.index_copy_(0, self._slot_B, rows_BKRX.contiguous())
        return padded.view(families, self._most, k, r, x).transpose(1, 2).reshape(families, k, self._most * r, x)

    def _by_row(self, shared_FKQX: Tensor) -> Tensor:
        """The inverse of :meth:`_by_prompt`."""
        families, k, rows, x = shared_FKQX.shape
        apart = shared_FKQX.view(families, k, self._most, rows // self._most, x).transpose(1, 2)
        return apart.reshape(families * self._most, k, rows // self._most, x).index_select(0, self._slot_B)

    def _mask(self, dtype: torch.dtype) -> Tensor:
        if self._mask_FP is None or self._mask_FP.dtype != dtype:
            self._mask_FP = additive(self._prompts.real_FP, dtype)
        return self._mask_FP

    def _write(self, layer: int, key_BKD: Tensor, value_BKD: Tensor) -> tuple[Tensor, Tensor]:
        """Add a token; keys and values of the completions so far, this token included."""
        found = []
        for kept, fresh in ((self._keys, key_BKD), (self._values, value_BKD)):
            room = kept[layer].shape[2] if layer in kept else 0
            if room <= self.length:
                wider = fresh.new_empty(len(fresh), fresh.shape[1], max(FIRST_ROOM, 2 * room), fresh.shape[2])
                if room:
                    wider[:, :, :room] = kept[layer]
                kept[layer] = wider
            kept[layer][:, :, self.length] = fresh
            found.append(kept[layer][:, :, : self.length + 1])
        return found[0], found[1]

    def grew(self) -> None:
        """Every layer has written its token."""
        self.length += 1

    def keep(self, rows_B: Tensor) -> None:
        """Forget all but the chosen rows, and prompts without a row."""
        for kept in (self._keys, self._values):
            for layer, tensor in kept.items():
                kept[layer] = tensor[rows_B]
        families, renumbered_B = self._family_B[rows_B].unique(return_inverse=True)
        if len(families) < len(self._prompts.real_FP):
            self._prompts.keep(families)
        self._place(renumbered_B)


class LogpRecorder:
    """The last logits processor: sees the scores that are sampled from, changes nothing.

    The token drawn from the scores of one step is known at the next, as the last column of the ids; so one
    ``[B, V]`` is held from step to step and ``[B]`` is kept of it.
    """

    supports_continuous_batching = False

    def __init__(self) -> None:
        self._kept: list[Tensor] = []
        self._pending_BV: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Take the log-probs of the token that ended ``input_ids [B, L]``; remember ``scores [B, V]``."""
        self._settle(input_ids[:, -1])
        self._pending_BV = scores
        return scores

    def finish(self, ids_BT: Tensor) -> Tensor:
        """Log-probs ``[B, T]`` (nats, float32) of the completions, whose last column is still pending."""
        if self._pending_BV is not None and len(self._kept) < ids_BT.shape[1]:
            self._settle(ids_BT[:, -1])
        self._pending_BV = None
        return torch.stack(self._kept[: ids_BT.shape[1]], dim=1)

    def _settle(self, chosen_B: Tensor) -> None:
        if self._pending_BV is None:
            return
        logp_BV = self._pending_BV.float().log_softmax(-1)
        self._kept.append(logp_BV.gather(1, chosen_B[:, None])[:, 0])


class StopStrings:
    """Finds the token that completes one of the ``stop`` strings, in the text of a completion alone.

    Special tokens take part as their text. A string of n bytes spans at most n tokens, so the last tokens are
    looked at first, and then the whole text confirms.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._window = max((len(text.encode()) for text in stop), default=0) + 4

    def __bool__(self) -> bool:
        return bool(self._stop)

    def completed_by(self, ids: Sequence[int]) -> bool:
        """Whether the text of ``ids`` holds a stop string. Asked after every token, so the last one completed it."""
        return bool(self._stop) and self._holds(ids[-self._window :]) and self._holds(ids)

    def _holds(self, ids: Sequence[int]) -> bool:
        text = self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return any(stop in text for stop in self._stop)


class StopOnText:
    """Stopping criterion of transformers' ``generate``: a sequence ends with the token that completes a stop string.

    Only the completion is searched, never the prompt. ``length_B`` holds the number of completion tokens up to
    and including that token, 0 where none was met.
    """

    def __init__(self, stops: StopStrings, *, prompt_length: int, rows: int) -> None:
        self._stops, self._start = stops, prompt_length
        self.length_B = [0] * rows

    def __call__(self, input_ids: Tensor, scores: Any, **unused: Any) -> Tensor:
        """Whether each sequence of ``input_ids [B, L]`` has ended, ``[B]`` bool."""
        if self._stops:
            completions = input_ids[:, self._start :].tolist()
            for row, ids in enumerate(completions):
                if not self.length_B[row] and self._stops.completed_by(ids):
                    self.length_B[row] = len(ids)
        return torch.tensor([length > 0 for length in self.length_B], device=input_ids.device)


def ending(ids: Sequence[int], ends: Sequence[int], stop_length: int) -> tuple[int, str]:
    """Number of tokens a completion keeps, and why it ended. ``stop_length`` 0: no stop string was met.

    What follows the end is padding, which may be an end token itself: only the first end counts.

    >>> ending([5, 2, 2, 2], [2], 0), ending([5, 6, 2, 2], [2], 2), ending([5, 6, 7, 8], [2], 0)
    ((2, 'eos'), (2, 'stop'), (4, 'length'))
    """
    eos_length = next((n + 1 for n, token in enumerate(ids) if token in ends), 0)
    if eos_length and (not stop_length or eos_length <= stop_length):
        return eos_length, "eos"
    return (stop_length, "stop") if stop_length else (len(ids), "length")


def warpers(sampling: Sampling) -> list[Any]:
    """Temperature and truncations as the library's processors ``(ids, scores [B, V]) -> scores``, in its order."""
    import transformers

    if sampling.temperature == 0:
        return []
    chosen: list[Any] = []
    if sampling.temperature != 1:
        chosen.append(transformers.TemperatureLogitsWarper(float(sampling.temperature)))
    if sampling.top_k:
        chosen.append(transformers.TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        chosen.append(transformers.TopPLogitsWarper(sampling.top_p))
    if sampling.min_p > 0:
        chosen.append(transformers.MinPLogitsWarper(sampling.min_p))
    return chosen


WORTH_LEAVING = 0.8
"""Ended rows leave when the rows that go on are at most this share: moving the cache has its price too."""


@dataclass(kw_only=True)
class Drawn:
    """One completion as it grows: ids, their log-probs (nats) and policy versions, and why it ended."""

    ids: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    stop_reason: str = "length"


def decode(
    model: Any,
    prompts: Sequence[Prompt],
    family: Sequence[int],
    *,
    sampling: Sampling,
    uniform_BT: Tensor,
    ends: Sequence[int],
    stops: StopStrings,
    version: Callable[[], int],
) -> list[Drawn]:
    """Draw row ``n`` from ``prompts[family[n]]``, for every ``n``. The model must have our attention.

    ``version`` is called before each pass and stamps the tokens that come of it: weights may change inside.
    ``uniform_BT`` are numbers in [0, 1), one for each token that may be drawn. Call without gradient.
    """
    device = uniform_BT.device
    family_B = torch.tensor(family, device=device)
    stamp = version()
    first_FH, caches = _first_pass(model, prompts, device)
    lengths_B = torch.tensor([len(prompt.token_ids) for prompt in prompts], device=device)[family_B]
    cache = GroupCache(caches, family_B)
    drawn = [Drawn() for _ in family]
    alive, over = list(range(len(family))), [False] * len(family)
    hidden_BH = first_FH[family_B]
    process = warpers(sampling)
    for step in range(sampling.max_new_tokens):
        logp_BV = _log_probs(model, hidden_BH, process)
        chosen_B = pick(logp_BV, uniform_BT[alive, step], greedy=sampling.temperature == 0)
        logps = logp_BV.gather(1, chosen_B[:, None])[:, 0].tolist()
        for row, token, logp in zip(alive, chosen_B.tolist(), logps, strict=True):
            if not over[row]:
                _take(drawn[row], token, logp, stamp)
                over[row] = _ended(drawn[row], ends, stops)
        if all(over[row] for row in alive) or step + 1 == sampling.max_new_tokens:
            break
        going = [place for place, row in enumerate(alive) if not over[row]]
        if len(going) <= WORTH_LEAVING * len(alive):
            alive = [alive[place] for place in going]
            index_B = torch.tensor(going, device=device)
            chosen_B, lengths_B = chosen_B[index_B], lengths_B[index_B]
            cache.keep(index_B)
        stamp = version()
        hidden_BH = run_with(model, cache, chosen_B, lengths_B + step)
        cache.grew()
    return drawn


def _first_pass(model: Any, prompts: Sequence[Prompt], device: torch.device) -> tuple[Tensor, PromptCache]:
    """Hidden states ``[F, H]`` after each prompt, and the cache of all of them."""
    ids = [token for prompt in prompts for token in prompt.token_ids]
    positions = [position for prompt in prompts for position in range(len(prompt.token_ids))]
    cache = PromptCache([len(prompt.token_ids) for prompt in prompts], device=device)
    hidden_SH = run_with(model, cache, torch.tensor(ids, device=device), torch.tensor(positions, device=device))
    return hidden_SH[cache.last_F], cache


def _log_probs(model: Any, hidden_BH: Tensor, process: Sequence[Any]) -> Tensor:
    """Log-probs ``[B, V]`` of what is sampled from, in float32 or wider."""
    weight_VH, bias_V = head_weights(model)
    scores_BV = rows_times(hidden_BH.to(weight_VH.dtype), weight_VH, bias_V)
    scores_BV = scores_BV.to(torch.promote_types(scores_BV.dtype, torch.float32))
    for change in process:
        scores_BV = change(None, scores_BV)
    return scores_BV.log_softmax(-1)


def pick(logp_BV: Tensor, uniform_B: Tensor, *, greedy: bool = False) -> Tensor:
    """The token of each row ``[B]``: the likeliest, or by the inverse of the cumulative distribution.

    A token of probability zero is never taken.

    >>> logp_BV = torch.tensor([[0.5, 0.0, 0.5]]).log().expand(3, 3)
    >>> pick(logp_BV, torch.tensor([0.0, 0.49, 0.5])).tolist()
    [0, 0, 2]
    """
    if greedy:
        return logp_BV.argmax(-1)
    upto_BV = logp_BV.exp().double().cumsum_(-1)
    goal_B1 = (uniform_B.double() * upto_BV[:, -1])[:, None]
    return torch.searchsorted(upto_BV, goal_B1, right=True)[:, 0].clamp_(max=logp_BV.shape[1] - 1)


def _take(row: Drawn, token: int, logp: float, stamp: int) -> None:
    row.ids.append(token)
    row.logps.append(logp)
    row.versions.append(stamp)


def _ended(row: Drawn, ends: Sequence[int], stops: StopStrings) -> bool:
    """Whether the last token ended the row; an end token counts before a stop string."""
    if row.ids[-1] in ends:
        row.stop_reason = "eos"
    elif stops.completed_by(row.ids):
        row.stop_reason = "stop"
    return row.stop_reason != "length"
