"""Sampling loops over a transformers model: our own (:func:`decode`), and transformers' :func:`generate`.

    prompts -> one pass -> first token of every row -> one pass per token over the rows that have not ended

Our loop computes each prompt once per group and drops rows that have ended. The caches are layouts of our attention
(:mod:`kl_comedy.models.attention`): a token attends to its prompt's keys (one copy per group, read by all of its rows
in one matrix product) and to the keys of its own completion (written in place). The uniform number of every token is
drawn beforehand, so that a row does not depend on the others.

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
"""Tokens of a completion for which the cache first has space; the capacity doubles when it is full."""
COMPACT_BELOW = 0.8
"""Ended rows are dropped when at most this share of the rows is unfinished, since dropping copies the whole cache."""
WINDOW_MARGIN = 4
"""Tokens that are searched beyond the bytes of the longest stop string. The first tokens of a window can decode to
another text than within the whole, as where it begins in the middle of a UTF-8 character (of up to 4 bytes)."""


class PromptCache:
    """The layout of the first pass, over the concatenated prompts; stores keys and values ``[F, K, P, D]`` by layer.

    ``lengths``: tokens of each prompt, in order. ``last_F`` is the position of each prompt's last token in the
    concatenation, ``real_FP`` is False on padding.
    """

    def __init__(self, lengths: Sequence[int], *, device: torch.device) -> None:
        positions = []
        start = 0
        for length in lengths:
            positions.append(range(start, start + length))
            start += length
        self._rows = padded_rows(positions, device=device)
        # Built in the first layer, because its dtype and width are those of the queries.
        self._mask_FQP: Tensor | None = None
        self.last_F = torch.tensor([prompt[-1] for prompt in positions], device=device)
        self.real_FP = self._rows.real_BT
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def attend(self, layer: int, query_SKRD: Tensor, key_SKD: Tensor, value_SKD: Tensor, scale: float) -> Tensor:
        """See :class:`kl_comedy.models.attention.Layout`."""
        if self._mask_FQP is None:
            self._mask_FQP = additive_mask(causal_mask(self.real_FP), query_SKRD.dtype, query_SKRD.shape[2])
        key_FPKD = self._rows.gather(key_SKD)
        value_FPKD = self._rows.gather(value_SKD)
        # Contiguous by head: each later token reads them in a matrix product per head.
        self.keys[layer] = key_FPKD.transpose(1, 2).contiguous()
        self.values[layer] = value_FPKD.transpose(1, 2).contiguous()
        query_FPKRD = self._rows.gather(query_SKRD)
        return attend_rows(query_FPKRD, key_FPKD, value_FPKD, self._mask_FQP, scale)[self.real_FP]

    def select(self, prompts_F: Tensor) -> None:
        """Drop all but the chosen prompts."""
        self.real_FP = self.real_FP[prompts_F]
        for tensors in (self.keys, self.values):
            for layer, tensor in tensors.items():
                tensors[layer] = tensor[prompts_F]


class GroupCache:
    """The layout of one token per row: prompts shared, completions ``[B, K, T, D]`` by layer.

    ``prompt_of_B`` is the prompt of each row. ``length`` counts the completion tokens in the cache: every layer of a
    pass writes its token at that position, then the caller adds 1.
    """

    def __init__(self, prompts: PromptCache, prompt_of_B: Tensor) -> None:
        self._prompts = prompts
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self.length = 0
        self._arrange(prompt_of_B)

    def _arrange(self, prompt_of_B: Tensor) -> None:
        """Give each row a slot among the rows of its prompt; slots are ``[F, M]`` flattened."""
        self._prompt_of_B = prompt_of_B
        row_counts: Counter[int] = Counter()
        ranks = []
        for prompt in prompt_of_B.tolist():
            ranks.append(row_counts[prompt])
            row_counts[prompt] += 1
        self._most = max(row_counts.values())
        self._slot_B = prompt_of_B * self._most + torch.tensor(ranks, device=prompt_of_B.device)
        # Built again for the prompts that select leaves.
        self._mask_FP: Tensor | None = None

    def attend(self, layer: int, query_SKRD: Tensor, key_SKD: Tensor, value_SKD: Tensor, scale: float) -> Tensor:
        """See :class:`kl_comedy.models.attention.Layout`; the sequence ``S`` is one token of every row."""
        keys_BKTD = self._write(self._keys, layer, key_SKD)
        values_BKTD = self._write(self._values, layer, value_SKD)
        query_BKRD = query_SKRD * scale
        if self._mask_FP is None or self._mask_FP.dtype != query_BKRD.dtype:
            self._mask_FP = additive_mask(self._prompts.real_FP, query_BKRD.dtype)
        prompt_keys_FKPD = self._prompts.keys[layer]
        prompt_values_FKPD = self._prompts.values[layer]

        # One softmax over prompt and completion: the scores of both parts stand side by side.
        prompt_scores_FKQP = self._by_prompt(query_BKRD) @ prompt_keys_FKPD.transpose(-1, -2)
        prompt_scores_BKRP = self._by_row(prompt_scores_FKQP + self._mask_FP[:, None, None])
        own_scores_BKRT = query_BKRD @ keys_BKTD.transpose(-1, -2)
        scores = torch.cat([prompt_scores_BKRP, own_scores_BKRT], -1)
        # At least float32, as the learner's attention: in 16 bits the log-probs of the two would drift apart.
        softmax_dtype = torch.promote_types(scores.dtype, torch.float32)
        weights = scores.softmax(-1, dtype=softmax_dtype).to(scores.dtype)

        prompt_length = prompt_scores_BKRP.shape[-1]
        from_prompt = self._by_row(self._by_prompt(weights[..., :prompt_length]) @ prompt_values_FKPD)
        return weights[..., prompt_length:] @ values_BKTD + from_prompt

    def _by_prompt(self, rows_BKRX: Tensor) -> Tensor:
        """The rows of each prompt stacked, ``[F, K, M * R, X]``; slots without a row are zero."""
        _, k, r, x = rows_BKRX.shape
        prompts = len(self._prompts.real_FP)
        slots = rows_BKRX.new_zeros(prompts * self._most, k, r, x)
        slots.index_copy_(0, self._slot_B, rows_BKRX.contiguous())
        slots_FKMRX = slots.view(prompts, self._most, k, r, x).transpose(1, 2)
        return slots_FKMRX.reshape(prompts, k, self._most * r, x)

    def _by_row(self, shared_FKQX: Tensor) -> Tensor:
        """The inverse of :meth:`_by_prompt`."""
        prompts, k, stacked, x = shared_FKQX.shape
        r = stacked // self._most
        slots_FMKRX = shared_FKQX.view(prompts, k, self._most, r, x).transpose(1, 2)
        return slots_FMKRX.reshape(prompts * self._most, k, r, x).index_select(0, self._slot_B)

    def _write(self, tensors: dict[int, Tensor], layer: int, new_BKD: Tensor) -> Tensor:
        """Add a token's keys or values; returns those of the completions so far, this token included, as a view."""
        capacity = tensors[layer].shape[2] if layer in tensors else 0
        if capacity <= self.length:
            # Doubling copies each token a constant number of times on average; a concatenation per token would not.
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
        prompt_of_B: Any = self._prompt_of_B[rows_B]
        prompts, renumbered_B = prompt_of_B.unique(return_inverse=True)
        if len(prompts) < len(self._prompts.real_FP):
            self._prompts.select(prompts)
        self._arrange(renumbered_B)


class StopStrings:
    """The ``stop`` strings, searched for in the text of a completion without its prompt.

    Special tokens take part as their text.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        # A string of n bytes spans at most n tokens, each of at least one byte.
        longest_bytes = max((len(text.encode()) for text in stop), default=0)
        self._window = longest_bytes + WINDOW_MARGIN

    def completed_by(self, ids: Sequence[int]) -> bool:
        """Whether the text of ``ids`` contains a stop string. Asked after every token, so the last one completed it."""
        # Decoding all tokens after each of them would cost time quadratic in the length; the window costs a constant.
        if not self.in_text_of(ids[-self._window :]):
            return False
        # The window may begin in the middle of a character or word, and decode to another text than the whole.
        return self.in_text_of(ids)

    def in_text_of(self, ids: Sequence[int]) -> bool:
        """Whether the text of ``ids`` contains a stop string."""
        if not self._stop:
            return False
        text = self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return any(stop in text for stop in self._stop)


def ending(ids: Sequence[int], ends: Sequence[int], stop_length: int) -> tuple[int, str]:
    """Number of tokens of a completion up to its end, and why it ended.

    ``stop_length`` is the number of tokens that complete a stop string, 0 without one. An end token wins a tie.

    >>> ending([5, 2, 2, 2], [2], 0), ending([5, 6, 2, 2], [2], 2), ending([5, 6, 7, 8], [2], 0)
    ((2, 'eos'), (2, 'stop'), (4, 'length'))
    """
    for position, token in enumerate(ids):
        if stop_length and position >= stop_length:
            break
        if token in ends:
            return position + 1, "eos"
    if stop_length:
        return stop_length, "stop"
    return len(ids), "length"


def warpers(sampling: Sampling) -> list[Any]:
    """Temperature and truncations as transformers' processors ``(ids, scores [B, V]) -> scores``; none if greedy.

    In the order of transformers' ``generate``: each truncation renormalizes, so that another order is another policy.
    """
    import transformers

    temperature = float(sampling.temperature)
    processors: list[Any] = []
    if temperature == 0:
        return processors
    if temperature != 1:
        processors.append(transformers.TemperatureLogitsWarper(temperature))
    if sampling.top_k > 0:
        processors.append(transformers.TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        processors.append(transformers.TopPLogitsWarper(sampling.top_p))
    if sampling.min_p > 0:
        processors.append(transformers.MinPLogitsWarper(sampling.min_p))
    return processors


@dataclass(kw_only=True)
class Completion:
    """One completion as it grows: ids, their log-probs (nats) and policy versions, and why it ended."""

    ids: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    stop_reason: str = "length"
    top: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Ids and log-probs ``[K]`` of the likeliest tokens before each token, where the sampling asks for them."""
    kept: list[Tensor] = field(default_factory=list)
    """Ids of the tokens that the truncation kept at each token, where the sampling records them."""


class Draws:
    """The completions of some rows, token by token: row ``n`` draws its token ``t`` with ``uniform_BT[n, t]``.

    ``uniform_BT`` are numbers in [0, 1), one for each token that may be drawn; ``ends`` the end tokens; ``stops`` the
    strings that end a completion.
    """

    def __init__(self, *, sampling: Sampling, uniform_BT: Tensor, ends: Sequence[int], stops: StopStrings) -> None:
        self.completions = [Completion() for _ in range(len(uniform_BT))]
        self.ended = [False] * len(uniform_BT)
        self.ends = ends
        self.most_tokens = sampling.max_new_tokens
        self.device = uniform_BT.device
        self._greedy = sampling.temperature == 0
        self._top_logps = sampling.top_logps
        self._records_kept = sampling.records_kept
        self._warpers = warpers(sampling)
        self._uniform_BT = uniform_BT
        self._stops = stops
        self._step = 0

    def draw(self, scores_BV: Tensor, rows: Sequence[int], version: int) -> Tensor:
        """Draw the next token ``[B]`` of each of ``rows`` from logits ``scores_BV``, and stamp it with ``version``.

        A row that has ended gets a token too, which the caller computes and nobody keeps.
        """
        scores_BV = scores_BV.to(torch.promote_types(scores_BV.dtype, torch.float32))
        for warp in self._warpers:
            scores_BV = warp(None, scores_BV)
        logp_BV = scores_BV.log_softmax(-1)
        # By row and step, not in the order of drawing: a row draws the same whichever other rows have ended.
        chosen_B = pick(logp_BV, self._uniform_BT[rows, self._step], greedy=self._greedy)
        self._step += 1
        logps = logp_BV.gather(1, chosen_B[:, None])[:, 0].tolist()
        if self._top_logps:
            top = logp_BV.topk(min(self._top_logps, logp_BV.shape[1]), dim=1)
            top_logp_BK = top.values.cpu()
            top_ids_BK = top.indices.int().cpu()
        kept = None
        if self._records_kept:
            kept = _kept(scores_BV)
        for position, (row, token, logp) in enumerate(zip(rows, chosen_B.tolist(), logps, strict=True)):
            if self.ended[row]:
                continue
            completion = self.completions[row]
            if self._top_logps:
                completion.top.append((top_ids_BK[position], top_logp_BK[position]))
            if kept is not None:
                completion.kept.append(kept[position])
            completion.ids.append(token)
            completion.logps.append(logp)
            completion.versions.append(version)
            # As in `ending`: a token that is both an end token and completes a stop string counts as an end token.
            if token in self.ends:
                completion.stop_reason = "eos"
            elif self._stops.completed_by(completion.ids):
                completion.stop_reason = "stop"
            self.ended[row] = completion.stop_reason != "length"
        return chosen_B


def _kept(scores_BV: Tensor) -> tuple[Tensor, ...]:
    """The ids that each row may draw: those that no truncation gave the score -inf."""
    kept_BV = ~torch.isneginf(scores_BV)
    ids_M = kept_BV.nonzero()[:, 1].int().cpu()
    return torch.split(ids_M, kept_BV.sum(-1).tolist())


def decode(
    model: Any,
    prompts: Sequence[Prompt],
    prompt_of: Sequence[int],
    draws: Draws,
    *,
    version: Callable[[], int],
) -> list[Completion]:
    """Draw row ``n`` from ``prompts[prompt_of[n]]``, for every ``n``. The model must have our attention.

    ``version`` is called before each pass and stamps the tokens that the pass gives; it may change the weights.
    ``draws`` must not have drawn yet. Call without gradient.
    """
    device = draws.device
    prompt_of_B = torch.tensor(prompt_of, device=device)
    pass_version = version()

    # The first pass: all prompts, concatenated, each of them once.
    token_ids: list[int] = []
    positions: list[int] = []
    for prompt in prompts:
        token_ids += prompt.token_ids
        positions += range(len(prompt.token_ids))
    prompt_lengths = [len(prompt.token_ids) for prompt in prompts]
    prompt_cache = PromptCache(prompt_lengths, device=device)
    ids_S = torch.tensor(token_ids, device=device)
    positions_S = torch.tensor(positions, device=device)
    hidden_SH = forward_with_layout(model, prompt_cache, ids_S, positions_S)
    hidden_BH = hidden_SH[prompt_cache.last_F][prompt_of_B]
    lengths_B = torch.tensor(prompt_lengths, device=device)[prompt_of_B]

    cache = GroupCache(prompt_cache, prompt_of_B)
    rows = list(range(len(prompt_of)))
    for step in range(draws.most_tokens):
        chosen_B = draws.draw(_scores(model, hidden_BH), rows, pass_version)
        unfinished = [position for position, row in enumerate(rows) if not draws.ended[row]]
        # The last token needs no pass of its own: nothing is drawn after it.
        if not unfinished or step + 1 == draws.most_tokens:
            break
        # Ended rows that stay draw tokens that nobody keeps.
        if len(unfinished) <= COMPACT_BELOW * len(rows):
            rows = [rows[position] for position in unfinished]
            index_B = torch.tensor(unfinished, device=device)
            chosen_B = chosen_B[index_B]
            lengths_B = lengths_B[index_B]
            cache.select(index_B)
        pass_version = version()
        hidden_BH = forward_with_layout(model, cache, chosen_B, lengths_B + step)
        cache.length += 1
    return draws.completions


def _scores(model: Any, hidden_BH: Tensor) -> Tensor:
    """The logits ``[B, V]``, computed in the head's own dtype, as the learner computes them."""
    weight_VH, bias_V = head_weights(model)
    # Autocast would compute the head in 16 bits: the log-probs of sampler and learner would differ by its rounding.
    with torch.autocast(hidden_BH.device.type, enabled=False):
        return head_product(hidden_BH, weight_VH, bias_V, head_dtype(model))


def generate(
    causal: Any,
    prompts: Sequence[Prompt],
    draws: Draws,
    *,
    pad_id: int,
    version: int,
) -> list[Completion]:
    """One completion of each prompt by transformers' ``generate``: its passes and cache, our head and :class:`Draws`.

    A logits processor draws the token and leaves only its score finite, so that greedy search must take it.
    ``draws`` must not have drawn yet.
    """
    from transformers import LogitsProcessorList, StoppingCriteriaList

    device = draws.device
    ids = [torch.tensor(prompt.token_ids, device=device) for prompt in prompts]
    # Left, so that the last position of every row is the end of its prompt.
    padding: Any = {"batch_first": True, "padding_side": "left"}
    rows = list(range(len(prompts)))

    def draw(ids_BL: Tensor, scores_BV: Tensor) -> Tensor:
        chosen_B = draws.draw(scores_BV, rows, version)
        return torch.full_like(scores_BV, float("-inf")).scatter(1, chosen_B[:, None], 0.0)

    def ended(ids_BL: Tensor, scores: Any, **unused: Any) -> Tensor:
        return torch.tensor(draws.ended, device=device)

    def head_forward(hidden_BSH: Tensor) -> Tensor:
        b, s, _ = hidden_BSH.shape
        return _scores(causal, hidden_BSH.flatten(0, 1)).view(b, s, -1)

    head = causal.get_output_embeddings()
    # Set on the instance, where it hides the method of the class until it is deleted.
    head.forward = head_forward
    try:
        causal.generate(
            input_ids=pad_sequence(ids, padding_value=pad_id, **padding),
            attention_mask=pad_sequence([torch.ones_like(row) for row in ids], **padding),
            generation_config=generation_config(
                do_sample=False,
                max_new_tokens=draws.most_tokens,
                eos_token_id=list(draws.ends) or None,
                pad_token_id=pad_id,
                use_cache=True,
            ),
            logits_processor=LogitsProcessorList([draw]),
            stopping_criteria=StoppingCriteriaList([ended]),
        )
    finally:
        del head.forward
    return draws.completions


def generation_config(**settings: Any) -> Any:
    """A transformers ``GenerationConfig``, whose constructor has no types."""
    import transformers

    make: Any = transformers.GenerationConfig
    return make(**settings)


def pick(logp_BV: Tensor, uniform_B: Tensor, *, greedy: bool = False) -> Tensor:
    """The token of each row ``[B]``: the likeliest, or the first whose cumulative probability exceeds the number.

    ``logp_BV`` in nats, ``uniform_B`` in [0, 1). A token of probability zero is never taken.

    >>> logp_BV = torch.tensor([[0.5, 0.0, 0.5]]).log().expand(3, 3)
    >>> pick(logp_BV, torch.tensor([0.0, 0.49, 0.5])).tolist()
    [0, 0, 2]
    """
    if greedy:
        return logp_BV.argmax(-1)
    cumulative_BV = running_probability(logp_BV.exp())
    # Scaled by the last sum, which rounding leaves a little below or above 1.
    goal_B1 = (uniform_B.double() * cumulative_BV[:, -1])[:, None]
    # right=True: the first sum above the goal, not equal to it, which is what excludes tokens of probability zero.
    chosen_B = torch.searchsorted(cumulative_BV, goal_B1, right=True)[:, 0]
    return chosen_B.clamp_(max=logp_BV.shape[1] - 1)
