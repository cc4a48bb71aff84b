"""Sampling with transformers' own ``generate``: batched, left-padded, in the trainer's process and weights.

    prompts x group -> sorted by length -> batches of at most ``batch_sequences`` -> generate -> rollouts in order

A prompt is computed once for its group: its key-value cache is filled for the distinct prompts of a batch and
repeated. ``generate`` is called in stages of growing length, and rows that have ended leave between stages.

Defaults that a checkpoint ships (``top_k``, penalties, suppressed tokens, ...) would make the sampler another
policy than the learner's; a neutral generation config stands in for them during the call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kl_comedy.errors import RunFailed, UserError, bad_value, unknown_key
from kl_comedy.records import Prompt, Rollout
from kl_comedy.registry import ROLLOUTS
from kl_comedy.rollouts.base import Policy, RolloutBackend, Sampling
from kl_comedy.rollouts.steps import LogpRecorder, StopOnText

if TYPE_CHECKING:
    from kl_comedy.config.schema import RolloutConfig


FIRST_STAGE = 8
"""Tokens of the first stage of a generation; each stage doubles what there is."""

WORTH_LEAVING = 0.8
"""Ended rows leave when the rows that go on are at most this share: moving the cache has its price too."""

OPTIONS = {"share_prompt": True, "leave_early": True}
"""Options of the backend and their defaults. Both only save work: switch one off to measure what it saves."""


@ROLLOUTS.register("hf", source="transformers GenerationMixin.generate", summary="In-process transformers generate.")
def build_hf(config: RolloutConfig, *, loaded: Policy) -> RolloutBackend:
    """Build the in-process backend. Raises :class:`UserError` for an unknown option."""
    for name, value in config.options.items():
        if name not in OPTIONS:
            raise unknown_key(f"rollout.options.{name}", value, OPTIONS, "the hf backend has no such option")
        if not isinstance(value, bool):
            raise bad_value(f"rollout.options.{name}", value, "true or false")
    return HFRollouts(loaded, batch_sequences=config.batch_sequences, **{**OPTIONS, **config.options})


class HFRollouts:
    """Samples from the very module that is trained, so ``update_weights`` only has to take the new version.

    Which random numbers a sequence gets depends on its place in its batch: equal seeds give equal results
    for equal prompts, group size and ``batch_sequences``. A LoRA adapter is on while sampling.
    """

    def __init__(
        self, loaded: Policy, *, batch_sequences: int, share_prompt: bool = True, leave_early: bool = True
    ) -> None:
        self.version = 0
        self._loaded = loaded
        self._batch = batch_sequences
        self._share_prompt = share_prompt
        self._leave_early = leave_early

    def update_weights(self, version: int) -> None:
        """Stamp what is sampled from now on with ``version``; the weights are the learner's own."""
        self.version = version

    def close(self) -> None:
        """Nothing is held."""

    def generate(self, prompts: Sequence[Prompt], *, group_size: int, sampling: Sampling, seed: int) -> list[Rollout]:
        """See :class:`RolloutBackend`.

        A completion keeps every token up to and including the end token (``eos``) or the token that completes
        a stop string (``stop``); ids, log-probs and text are all of exactly these tokens, so that a text may
        end with the stop string and what else its last token spells.

        Raises :class:`UserError` when a prompt does not fit the model's context with ``max_new_tokens`` more;
        :class:`RunFailed` when the model's log-probs are not finite.
        """
        if group_size < 1:
            raise bad_value("rollout.group_size", group_size, "1 or more")
        check_lengths(self._loaded, prompts, sampling)
        places = sorted(range(len(prompts) * group_size), key=lambda n: len(prompts[n // group_size].token_ids))
        found: dict[int, Rollout] = {}
        with torch.no_grad(), _seeded(self._loaded.device, seed), _ready_to_sample(self._loaded) as causal:
            for start in range(0, len(places), self._batch):
                batch = places[start : start + self._batch]
                groups = [place // group_size for place in batch]
                drawn = self._generate_batch(causal, [prompts[g] for g in groups], groups, sampling)
                found.update(zip(batch, drawn, strict=True))
        return [found[place] for place in range(len(places))]

    def _generate_batch(
        self, causal: Any, prompts: Sequence[Prompt], groups: Sequence[int], sampling: Sampling
    ) -> list[Rollout]:
        tokenizer = self._loaded.tokenizer
        ends = end_tokens(causal, tokenizer)
        ids_BP, mask_BP = left_pad(prompts, pad_id=tokenizer.pad_token_id, device=self._loaded.device)
        cache = _prefilled(causal, ids_BP, mask_BP, groups) if self._share_prompt else None
        stages = _stages(sampling.max_new_tokens) if self._leave_early else [sampling.max_new_tokens]
        drawn = _Drawn(prompt_length=ids_BP.shape[1], rows=len(prompts))
        ids_bS, mask_bS, alive = ids_BP, mask_BP, list(range(len(prompts)))
        for stage in stages:
            recorder = LogpRecorder()
            stopper = StopOnText(tokenizer, sampling.stop, prompt_length=ids_BP.shape[1], rows=len(alive))
            ids_bS, cache = _call_generate(
                causal, ids_bS, mask_bS, sampling, cache=cache, new_tokens=stage, ends=ends,
                pad_id=tokenizer.pad_token_id, recorder=recorder, stopper=stopper,
            )  # fmt: skip
            ended = drawn.take(alive, ids_bS, recorder, stopper, ends)
            going = [row for row, over in enumerate(ended) if not over]
            if not going:
                break
            if len(going) > WORTH_LEAVING * len(alive):
                going = list(range(len(alive)))
            alive = [alive[row] for row in going]
            index = torch.tensor(going, device=ids_bS.device)
            ids_bS = ids_bS[index]
            mask_bS = torch.cat([mask_BP[torch.tensor(alive)], torch.ones_like(ids_bS[:, ids_BP.shape[1] :])], 1)
            cache.batch_select_indices(index)
        return [self._rollout(prompts[row], groups[row], *drawn.completion(row, ends)) for row in range(len(prompts))]

    def _rollout(self, prompt: Prompt, group: int, ids: list[int], logps: list[float], reason: str) -> Rollout:
        if not all(value > float("-inf") for value in logps):
            raise RunFailed(f"a sampled token of group {group} has no finite log-prob; the weights are not finite")
        text = self._loaded.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return Rollout(
            prompt=prompt,
            group_id=group,
            completion_ids=tuple(ids),
            logps=tuple(logps),
            versions=(self.version,) * len(ids),
            stop_reason=reason,
            text=text,
        )


class _Drawn:
    """What was drawn so far, per row of the batch: ids, log-probs and where a stop string ended it."""

    def __init__(self, *, prompt_length: int, rows: int) -> None:
        self._start = prompt_length
        self._ids: list[list[int]] = [[] for _ in range(rows)]
        self._logps: list[list[float]] = [[] for _ in range(rows)]
        self._stop_length = [0] * rows
        self._over = [False] * rows

    def take(
        self, alive: Sequence[int], ids_bS: Tensor, recorder: LogpRecorder, stopper: StopOnText, ends: Sequence[int]
    ) -> list[bool]:
        """Add a stage; which of the ``alive`` rows have ended. Rows that had ended before add nothing."""
        new = ids_bS[:, self._start :].tolist()
        logps = recorder.finish(ids_bS[:, self._start + self._seen(alive) :]).tolist()
        ended = []
        for place, row in enumerate(alive):
            if not self._over[row]:
                fresh = new[place][len(self._ids[row]) :]
                self._ids[row] = new[place]
                self._logps[row] += logps[place][: len(fresh)]
                self._stop_length[row] = stopper.length_B[place]
                self._over[row] = bool(self._stop_length[row]) or any(token in ends for token in fresh)
            ended.append(self._over[row])
        return ended

    def _seen(self, alive: Sequence[int]) -> int:
        """Tokens that the rows still being drawn had before this stage."""
        return max((len(self._ids[row]) for row in alive if not self._over[row]), default=0)

    def completion(self, row: int, ends: Sequence[int]) -> tuple[list[int], list[float], str]:
        """Ids and log-probs of the tokens kept, and why it ended."""
        length, reason = ending(self._ids[row], ends, self._stop_length[row])
        return self._ids[row][:length], self._logps[row][:length], reason


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


def end_tokens(causal: Any, tokenizer: Any) -> list[int]:
    """Every id that ends a completion: those of the model's generation config and the tokenizer's own."""
    configured = causal.generation_config.eos_token_id
    found = configured if isinstance(configured, list) else [configured]
    return sorted({int(token) for token in [*found, tokenizer.eos_token_id] if token is not None})


def left_pad(prompts: Sequence[Prompt], *, pad_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids and mask ``[B, P]`` (int64), padded on the left to the longest prompt."""
    width = max(len(prompt.token_ids) for prompt in prompts)
    ids_BP = torch.full((len(prompts), width), pad_id, dtype=torch.long)
    mask_BP = torch.zeros_like(ids_BP)
    for row, prompt in enumerate(prompts):
        size = len(prompt.token_ids)
        ids_BP[row, width - size :] = torch.tensor(prompt.token_ids)
        mask_BP[row, width - size :] = 1
    return ids_BP.to(device), mask_BP.to(device)


def check_lengths(loaded: Policy, prompts: Sequence[Prompt], sampling: Sampling, *, limit: int | None = None) -> None:
    """Raise :class:`UserError` where a prompt is empty or does not fit the context (or a smaller ``limit``)."""
    if any(not prompt.token_ids for prompt in prompts):
        raise UserError("a prompt is empty: it has no tokens to continue (see data.prompt)")
    context = getattr(loaded.model.config, "max_position_embeddings", None)
    if limit is not None:
        context = limit if context is None else min(limit, context)
    longest = max((len(prompt.token_ids) for prompt in prompts), default=0)
    if context is not None and longest + sampling.max_new_tokens > context:
        raise bad_value(
            "max_new_tokens", sampling.max_new_tokens, f"up to {context - longest}",
            why=f"the longest prompt has {longest} tokens and the model's context is {context}",
        )  # fmt: skip


def _stages(total: int) -> list[int]:
    """How many tokens each stage draws: the first :data:`FIRST_STAGE`, then as many as there are.

    >>> _stages(20), _stages(5)
    ([8, 8, 4], [5])
    """
    found: list[int] = []
    while sum(found) < total:
        found.append(min(max(FIRST_STAGE, sum(found)), total - sum(found)))
    return found


def _prefilled(causal: Any, ids_BP: Tensor, mask_BP: Tensor, groups: Sequence[int]) -> Any:
    """The cache of every prompt but its last token, once per group, repeated; None for one-token prompts."""
    if ids_BP.shape[1] < 2:
        return None
    firsts: dict[int, int] = {}
    for row, group in enumerate(groups):
        firsts.setdefault(group, row)
    order = list(firsts)
    one_of_each = torch.tensor([firsts[group] for group in order], device=ids_BP.device)
    mask_GP = mask_BP[one_of_each]
    position_GP = (mask_GP.long().cumsum(1) - 1).clamp(min=0)
    body = getattr(causal, "base_model", causal)
    filled = body(
        input_ids=ids_BP[one_of_each, :-1],
        attention_mask=mask_GP[:, :-1],
        position_ids=position_GP[:, :-1],
        use_cache=True,
    ).past_key_values
    filled.batch_select_indices(torch.tensor([order.index(group) for group in groups], device=ids_BP.device))
    return filled


def _call_generate(
    causal: Any, ids_BS: Tensor, mask_BS: Tensor, sampling: Sampling, *, cache: Any, new_tokens: int, ends: list[int],
    pad_id: int, recorder: LogpRecorder, stopper: StopOnText,
) -> tuple[Tensor, Any]:  # fmt: skip
    """``generate`` with every setting ours; ids ``[B, S + new]`` and the cache of all but the last token.

    Called under :func:`_ready_to_sample`. ``cache`` holds all but the last token of ``ids_BS``, or is None.
    """
    from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

    neutral = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    settings = GenerationConfig(
        **(neutral if sampling.temperature > 0 else {"do_sample": False}),
        max_new_tokens=new_tokens,
        eos_token_id=ends or None,
        pad_token_id=pad_id,
        use_cache=True,
        return_dict_in_generate=True,
    )
    try:
        found = causal.generate(
            input_ids=ids_BS,
            attention_mask=mask_BS,
            past_key_values=cache,
            generation_config=settings,
            logits_processor=LogitsProcessorList([*_warpers(sampling), recorder]),
            stopping_criteria=StoppingCriteriaList([stopper] if sampling.stop else []),
        )
    except RuntimeError as error:
        if "probability tensor" in str(error):
            raise RunFailed("the policy's next-token distribution is not finite; nothing can be sampled") from error
        raise
    return found.sequences, found.past_key_values


def _warpers(sampling: Sampling) -> list[Any]:
    """Temperature and truncations as processors of ours, so that the recorder after them sees the outcome."""
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


@contextlib.contextmanager
def _seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Random numbers from ``seed`` alone; the states outside are as before afterwards."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(seed)
        for cuda in devices:
            torch.cuda.default_generators[cuda.index or 0].manual_seed(seed)
        yield


@contextlib.contextmanager
def _ready_to_sample(loaded: Policy) -> Iterator[Any]:
    """The causal LM under its wrappers, in eval mode and with neutral generation defaults; all restored after."""
    from transformers import GenerationConfig

    model, causal = loaded.model, loaded.causal
    modes = [(module, module.training) for module in model.modules()]
    own = causal.generation_config
    causal.generation_config = GenerationConfig(eos_token_id=own.eos_token_id)
    model.eval()
    try:
        yield causal
    finally:
        causal.generation_config = own
        for module, training in modes:
            module.training = training
