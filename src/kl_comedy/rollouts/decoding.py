"""Sampling loops over a transformers model: our own (:func:`decode`), and transformers' :func:`generate`.

    prompts -> one pass -> first token of every row -> one pass per token over the rows still running

Ours computes each prompt once per group and drops ended rows. The caches are layouts of our attention
(:mod:`kl_comedy.models.attention`): a token attends to its prompt's keys (one copy per group, read by all of its rows
in one matrix product) and to the keys of its own completion (written in place). The uniform number behind every token
is drawn beforehand, so a row does not depend on the others.

Shape legend: ``F`` prompts, ``P`` longest prompt, ``B`` rows being drawn, ``M`` most rows of one prompt, ``T`` tokens
drawn, ``V`` vocabulary; ``K``, ``R``, ``D``, ``S`` as in :mod:`kl_comedy.models.attention`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kl_comedy.cuda import running_probability
from kl_comedy.models.attention import additive_mask, attend_rows, causal_mask, forward_with_layout, padded_rows
from kl_comedy.models.head import head_product
from kl_comedy.models.introspection import head_dtype, head_weights
from kl_comedy.records import Prompt
from kl_comedy.rollouts.base import Sampling

INITIAL_CAPACITY = 16
"""Tokens of a completion that the cache first has space for; the capacity doubles when it is full."""
COMPACT_BELOW = 0.8
"""Ended rows are dropped when at most this share of the rows still runs: moving the cache has its price too."""


class PromptCache:
    """The layout of the first pass, over prompts in a line; stores their keys and values ``[F, K, P, D]`` by layer."""

    def __init__(self, lengths: Sequence[int], *, device: torch.device) -> None:
        starts = [sum(lengths[:n]) for n in range(len(lengths))]
        lines = [range(start, start + length) for start, length in zip(starts, lengths, strict=True)]
        self._rows = padded_rows(lines, device=device)
        self._mask_FQP: Tensor | None = None
        self.last_F = torch.tensor([line[-1] for line in lines], device=device)
        self.real_FP = self._rows.real_BT
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def attend(self, layer: int, query_SKRD: Tensor, key_SKD: Tensor, value_SKD: Tensor, scale: float) -> Tensor:
        """See :class:`kl_comedy.models.attention.Layout`."""
        if self._mask_FQP is None:
            self._mask_FQP = additive_mask(causal_mask(self.real_FP), query_SKRD.dtype, query_SKRD.shape[2])
        key, value = self._rows.gather(key_SKD), self._rows.gather(value_SKD)
        self.keys[layer] = key.transpose(1, 2).contiguous()
        self.values[layer] = value.transpose(1, 2).contiguous()
        return attend_rows(self._rows.gather(query_SKRD), key, value, self._mask_FQP, scale)[self.real_FP]

    def select(self, prompts_F: Tensor) -> None:
        """Drop all but the chosen prompts."""
        self.real_FP = self.real_FP[prompts_F]
        for tensors in (self.keys, self.values):
            for layer, tensor in tensors.items():
                tensors[layer] = tensor[prompts_F]


class GroupCache:
    """The layout of one token per row: prompts shared, completions ``[B, K, T, D]`` by layer.

    ``prompt_of_B`` is the prompt of each row. ``length`` counts the completion tokens in the cache: every layer of a
    pass writes its token at that place, then the caller adds 1.
    """

    def __init__(self, prompts: PromptCache, prompt_of_B: Tensor) -> None:
        self._prompts = prompts
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self.length = 0
        self._arrange(prompt_of_B)

    def _arrange(self, prompt_of_B: Tensor) -> None:
        """Number each row among the rows of its prompt; slots are ``[F, M]`` flattened."""
        self._prompt_of_B = prompt_of_B
        counts: Counter[int] = Counter()
        numbers = []
        for prompt in prompt_of_B.tolist():
            numbers.append(counts[prompt])
            counts[prompt] += 1
        self._most = max(counts.values())
        self._slot_B = prompt_of_B * self._most + torch.tensor(numbers, device=prompt_of_B.device)
        self._mask_FP: Tensor | None = None

    def attend(self, layer: int, query_SKRD: Tensor, key_SKD: Tensor, value_SKD: Tensor, scale: float) -> Tensor:
        """See :class:`kl_comedy.models.attention.Layout`; the line is one token of every row."""
        keys, values = self._write(self._keys, layer, key_SKD), self._write(self._values, layer, value_SKD)
        query = query_SKRD * scale
        if self._mask_FP is None or self._mask_FP.dtype != query.dtype:
            self._mask_FP = additive_mask(self._prompts.real_FP, query.dtype)
        prompt_key, prompt_value = self._prompts.keys[layer], self._prompts.values[layer]
        shared_FKQP = self._by_prompt(query) @ prompt_key.transpose(-1, -2) + self._mask_FP[:, None, None]
        shared = self._by_row(shared_FKQP)
        scores = torch.cat([shared, query @ keys.transpose(-1, -2)], -1)
        weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(scores.dtype)
        split = shared.shape[-1]
        return weights[..., split:] @ values + self._by_row(self._by_prompt(weights[..., :split]) @ prompt_value)

    def _by_prompt(self, rows_BKRX: Tensor) -> Tensor:
        """Rows below those of the same prompt, ``[F, K, M * R, X]``; slots without a row are zero."""
        _, k, r, x = rows_BKRX.shape
        prompts = len(self._prompts.real_FP)
        padded = rows_BKRX.new_zeros(prompts * self._most, k, r, x)
        padded.index_copy_(0, self._slot_B, rows_BKRX.contiguous())
        return padded.view(prompts, self._most, k, r, x).transpose(1, 2).reshape(prompts, k, self._most * r, x)

    def _by_row(self, shared_FKQX: Tensor) -> Tensor:
        """The inverse of :meth:`_by_prompt`."""
        prompts, k, rows, x = shared_FKQX.shape
        apart = shared_FKQX.view(prompts, k, self._most, rows // self._most, x).transpose(1, 2)
        return apart.reshape(prompts * self._most, k, rows // self._most, x).index_select(0, self._slot_B)

    def _write(self, tensors: dict[int, Tensor], layer: int, new_BKD: Tensor) -> Tensor:
        """Add a token's keys or values; those of the completions so far, this token included."""
        capacity = tensors[layer].shape[2] if layer in tensors else 0
        if capacity <= self.length:
            rows, heads, width = new_BKD.shape
            larger = new_BKD.new_empty(rows, heads, max(INITIAL_CAPACITY, 2 * capacity), width)
            if capacity:
                larger[:, :, :capacity] = tensors[layer]
            tensors[layer] = larger
        tensors[layer][:, :, self.length] = new_BKD
        return tensors[layer][:, :, : self.length + 1]

    def select(self, rows_B: Tensor) -> None:
        """Drop all but the chosen rows, and prompts without a row."""
        for tensors in (self._keys, self._values):
            for layer, tensor in tensors.items():
                tensors[layer] = tensor[rows_B]
        prompts, renumbered_B = self._prompt_of_B[rows_B].unique(return_inverse=True)
        if len(prompts) < len(self._prompts.real_FP):
            self._prompts.select(prompts)
        self._arrange(renumbered_B)


class StopStrings:
    """The ``stop`` strings, searched for in the text of a completion alone; special tokens take part as their text.

    A string of n bytes spans at most n tokens, so the last tokens are searched first; then the whole text confirms.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._window = max((len(text.encode()) for text in stop), default=0) + 4

    def completed_by(self, ids: Sequence[int]) -> bool:
        """Whether the text of ``ids`` contains a stop string. Asked after every token, so the last one completed it."""
        return self.in_text_of(ids[-self._window :]) and self.in_text_of(ids)

    def in_text_of(self, ids: Sequence[int]) -> bool:
        """Whether the text of ``ids`` contains a stop string."""
        if not self._stop:
            return False
        text = self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return any(stop in text for stop in self._stop)


def ending(ids: Sequence[int], ends: Sequence[int], stop_length: int) -> tuple[int, str]:
    """Number of tokens of a completion up to its end, and why it ended. ``stop_length`` 0: without a stop string.

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

    temperature = float(sampling.temperature)
    choices = (
        (temperature != 1, transformers.TemperatureLogitsWarper, temperature),
        (sampling.top_k > 0, transformers.TopKLogitsWarper, sampling.top_k),
        (sampling.top_p < 1, transformers.TopPLogitsWarper, sampling.top_p),
        (sampling.min_p > 0, transformers.MinPLogitsWarper, sampling.min_p),
    )
    return [warper(value) for is_on, warper, value in choices if is_on and temperature > 0]


@dataclass(kw_only=True)
class Completion:
    """One completion as it grows: ids, their log-probs (nats) and policy versions, and why it ended."""

    ids: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    stop_reason: str = "length"


class Draws:
    """The completions of some rows, token by token: row ``n`` draws its token ``t`` with ``uniform_BT[n, t]``."""

    def __init__(self, *, sampling: Sampling, uniform_BT: Tensor, ends: Sequence[int], stops: StopStrings) -> None:
        self.completions = [Completion() for _ in range(len(uniform_BT))]
        self.ended = [False] * len(uniform_BT)
        self._greedy, self._warpers = sampling.temperature == 0, warpers(sampling)
        self._uniform_BT, self._ends, self._stops = uniform_BT, ends, stops
        self._step = 0

    def draw(self, scores_BV: Tensor, rows: Sequence[int], version: int) -> Tensor:
        """The next token ``[B]`` of each of ``rows``, stamped with ``version``. Rows that have ended add nothing."""
        scores_BV = scores_BV.to(torch.promote_types(scores_BV.dtype, torch.float32))
        for warp in self._warpers:
            scores_BV = warp(None, scores_BV)
        logp_BV = scores_BV.log_softmax(-1)
        chosen_B = pick(logp_BV, self._uniform_BT[rows, self._step], greedy=self._greedy)
        self._step += 1
        logps = logp_BV.gather(1, chosen_B[:, None])[:, 0].tolist()
        for row, token, logp in zip(rows, chosen_B.tolist(), logps, strict=True):
            if self.ended[row]:
                continue
            completion = self.completions[row]
            completion.ids.append(token)
            completion.logps.append(logp)
            completion.versions.append(version)
            if token in self._ends:  # an end token counts before a stop string
                completion.stop_reason = "eos"
            elif self._stops.completed_by(completion.ids):
                completion.stop_reason = "stop"
            self.ended[row] = completion.stop_reason != "length"
        return chosen_B


def decode(
    model: Any,
    prompts: Sequence[Prompt],
    prompt_of: Sequence[int],
    *,
    sampling: Sampling,
    uniform_BT: Tensor,
    ends: Sequence[int],
    stops: StopStrings,
    version: Callable[[], int],
) -> list[Completion]:
    """Draw row ``n`` from ``prompts[prompt_of[n]]``, for every ``n``. The model must have our attention.

    ``version`` is called before each pass and stamps the tokens that come of it: weights may change inside.
    ``uniform_BT`` are numbers in [0, 1), one for each token that may be drawn. Call without gradient.
    """
    device = uniform_BT.device
    draws = Draws(sampling=sampling, uniform_BT=uniform_BT, ends=ends, stops=stops)
    prompt_of_B = torch.tensor(prompt_of, device=device)
    stamp = version()
    prompt_lengths = [len(prompt.token_ids) for prompt in prompts]
    ids_S = torch.tensor([token for prompt in prompts for token in prompt.token_ids], device=device)
    position_S = torch.tensor([position for length in prompt_lengths for position in range(length)], device=device)
    prompt_cache = PromptCache(prompt_lengths, device=device)
    hidden_SH = forward_with_layout(model, prompt_cache, ids_S, position_S)
    hidden_BH = hidden_SH[prompt_cache.last_F][prompt_of_B]
    lengths_B = torch.tensor(prompt_lengths, device=device)[prompt_of_B]
    cache = GroupCache(prompt_cache, prompt_of_B)
    rows = list(range(len(prompt_of)))
    for step in range(sampling.max_new_tokens):
        chosen_B = draws.draw(_scores(model, hidden_BH), rows, stamp)
        running = [position for position, row in enumerate(rows) if not draws.ended[row]]
        if not running or step + 1 == sampling.max_new_tokens:
            break
        if len(running) <= COMPACT_BELOW * len(rows):
            rows = [rows[position] for position in running]
            index_B = torch.tensor(running, device=device)
            chosen_B, lengths_B = chosen_B[index_B], lengths_B[index_B]
            cache.select(index_B)
        stamp = version()
        hidden_BH = forward_with_layout(model, cache, chosen_B, lengths_B + step)
        cache.length += 1
    return draws.completions


def _scores(model: Any, hidden_BH: Tensor) -> Tensor:
    """The output of the head ``[B, V]``, computed in the head's own type, as the learner computes it."""
    weight_VH, bias_V = head_weights(model)
    with torch.autocast(hidden_BH.device.type, enabled=False):
        return head_product(hidden_BH, weight_VH, bias_V, head_dtype(model))


def generate(
    causal: Any,
    prompts: Sequence[Prompt],
    *,
    sampling: Sampling,
    uniform_BT: Tensor,
    ends: Sequence[int],
    stops: StopStrings,
    pad_id: int,
    version: int,
) -> list[Completion]:
    """One completion of each prompt by transformers' ``generate``: its passes and cache, our head and :class:`Draws`.

    A logits processor draws the token and leaves only its score finite.
    """
    from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

    device = uniform_BT.device
    ids = [torch.tensor(prompt.token_ids, device=device) for prompt in prompts]
    padding: Any = {"batch_first": True, "padding_side": "left"}
    draws = Draws(sampling=sampling, uniform_BT=uniform_BT, ends=ends, stops=stops)
    rows = list(range(len(prompts)))

    def draw(ids_BL: Tensor, scores_BV: Tensor) -> Tensor:
        chosen_B = draws.draw(scores_BV, rows, version)
        return torch.full_like(scores_BV, float("-inf")).scatter(1, chosen_B[:, None], 0.0)

    def ended(ids_BL: Tensor, scores: Any, **unused: Any) -> Tensor:
        return torch.tensor(draws.ended, device=device)

    head = causal.get_output_embeddings()
    head.forward = lambda hidden_BSH: _scores(causal, hidden_BSH.flatten(0, 1)).unflatten(0, hidden_BSH.shape[:2])
    try:
        causal.generate(
            input_ids=pad_sequence(ids, padding_value=pad_id, **padding),
            attention_mask=pad_sequence([torch.ones_like(row) for row in ids], **padding),
            generation_config=GenerationConfig(
                do_sample=False,
                max_new_tokens=sampling.max_new_tokens,
                eos_token_id=list(ends) or None,
                pad_token_id=pad_id,
                use_cache=True,
            ),
            logits_processor=LogitsProcessorList([draw]),
            stopping_criteria=StoppingCriteriaList([ended]),
        )
    finally:
        del head.forward
    return draws.completions


def pick(logp_BV: Tensor, uniform_B: Tensor, *, greedy: bool = False) -> Tensor:
    """The token of each row ``[B]``: the likeliest, or the first whose cumulative probability exceeds the number.

    A token of probability zero is never taken.

    >>> logp_BV = torch.tensor([[0.5, 0.0, 0.5]]).log().expand(3, 3)
    >>> pick(logp_BV, torch.tensor([0.0, 0.49, 0.5])).tolist()
    [0, 0, 2]
    """
    if greedy:
        return logp_BV.argmax(-1)
    cumulative_BV = running_probability(logp_BV.exp())
    goal_B1 = (uniform_B.double() * cumulative_BV[:, -1])[:, None]
    return torch.searchsorted(cumulative_BV, goal_B1, right=True)[:, 0].clamp_(max=logp_BV.shape[1] - 1)
