"""The ``hf`` backend: sampling from the very module that is trained, in the trainer's process.

    prompts x group -> sorted by length -> batches of at most ``batch_sequences`` -> rollouts in order

Our own loop (:mod:`kl_comedy.rollouts.decoding`) draws where the model takes our attention, transformers'
``generate`` where it does not, or where asked. Defaults that a checkpoint ships (``top_k``, penalties, suppressed
tokens, ...) would make the sampler another policy than the learner's; a neutral generation config replaces them during
the call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kl_comedy.config.validate import option, parse_record
from kl_comedy.errors import RunFailed, UserError, bad_value
from kl_comedy.models.attention import use_layout_attention
from kl_comedy.records import Capabilities, Prompt, Rollout
from kl_comedy.registry import ROLLOUTS
from kl_comedy.rollouts.base import Policy, RolloutBackend, Sampling
from kl_comedy.rollouts.decoding import Completion, StopStrings, decode, ending, warpers

if TYPE_CHECKING:
    from kl_comedy.config.schema import RolloutConfig


class LogpRecorder:
    """The last logits processor: sees the scores that are sampled from, changes nothing.

    The token drawn from the scores of one step is known at the next, as the last column of the ids; so one
    ``[B, V]`` is stored from step to step, and of each step ``[B]``.
    """

    supports_continuous_batching = False

    def __init__(self) -> None:
        self._logps_TB: list[Tensor] = []
        self._pending_BV: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Take the log-probs of the token that ended ``input_ids [B, L]``; remember ``scores [B, V]``."""
        self._record(input_ids[:, -1])
        self._pending_BV = scores
        return scores

    def finish(self, ids_BT: Tensor) -> Tensor:
        """Log-probs ``[B, T]`` (nats, float32) of the completions, whose last column is still pending."""
        if len(self._logps_TB) < ids_BT.shape[1]:
            self._record(ids_BT[:, -1])
        self._pending_BV = None
        return torch.stack(self._logps_TB[: ids_BT.shape[1]], dim=1)

    def _record(self, chosen_B: Tensor) -> None:
        if self._pending_BV is not None:
            logp_BV = self._pending_BV.float().log_softmax(-1)
            self._logps_TB.append(logp_BV.gather(1, chosen_B[:, None])[:, 0])


class StopOnText:
    """Stopping criterion of transformers' ``generate``: a sequence ends with the token that completes a stop string.

    Only the completion is searched, never the prompt. ``length_B`` is the number of completion tokens up to
    and including that token, 0 without one.
    """

    def __init__(self, stops: StopStrings, *, prompt_length: int, rows: int) -> None:
        self._stops, self._start = stops, prompt_length
        self.length_B = [0] * rows

    def __call__(self, input_ids: Tensor, scores: Any, **unused: Any) -> Tensor:
        """Whether each sequence of ``input_ids [B, L]`` has ended, ``[B]`` bool."""
        for row, ids in enumerate(input_ids[:, self._start :].tolist()):
            if not self.length_B[row] and self._stops.completed_by(ids):
                self.length_B[row] = len(ids)
        return torch.tensor([length > 0 for length in self.length_B], device=input_ids.device)


def generate(
    causal: Any,
    prompts: Sequence[Prompt],
    *,
    sampling: Sampling,
    ends: Sequence[int],
    stops: StopStrings,
    pad_id: int,
    device: torch.device,
    version: int,
) -> list[Completion]:
    """Draw one completion per prompt, left-padded, every setting ours. Random numbers are torch's global ones.

    Raises :class:`RunFailed` where the distribution is not finite.
    """
    from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

    ids = [torch.tensor(prompt.token_ids) for prompt in prompts]
    ids_BP = pad_sequence(ids, batch_first=True, padding_value=pad_id, padding_side="left").to(device)
    mask_BP = pad_sequence([torch.ones_like(row) for row in ids], batch_first=True, padding_side="left").to(device)
    width = ids_BP.shape[1]
    neutral = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    settings = GenerationConfig(
        **(neutral if sampling.temperature > 0 else {"do_sample": False}),
        max_new_tokens=sampling.max_new_tokens,
        eos_token_id=list(ends) or None,
        pad_token_id=pad_id,
        use_cache=True,
    )
    recorder = LogpRecorder()
    stopper = StopOnText(stops, prompt_length=width, rows=len(prompts))
    try:
        ids_BS = causal.generate(
            input_ids=ids_BP,
            attention_mask=mask_BP,
            generation_config=settings,
            logits_processor=LogitsProcessorList([*warpers(sampling), recorder]),
            stopping_criteria=StoppingCriteriaList([stopper] if stops else []),
        )
    except RuntimeError as error:
        if "probability tensor" in str(error):
            raise RunFailed("the policy's next-token distribution is not finite; nothing can be sampled") from error
        raise
    ids_BT = ids_BS[:, width:]
    completions = []
    for tokens, logps, stop_length in zip(
        ids_BT.tolist(), recorder.finish(ids_BT).tolist(), stopper.length_B, strict=True
    ):
        length, reason = ending(tokens, ends, stop_length)
        completions.append(
            Completion(ids=tokens[:length], logps=logps[:length], versions=[version] * length, stop_reason=reason)
        )
    return completions


@dataclass(frozen=True, kw_only=True)
class HFOptions:
    loop: str = option(
        "auto",
        "ours wherever the model takes it, or transformers' `generate` for every model",
        choices=("auto", "library"),
    )


@ROLLOUTS.register(
    "hf",
    source="transformers models, own loop",
    summary="In-process sampling from the policy itself.",
    capabilities=Capabilities(draws_parts=True, updates_between_tokens=True),
)
def build_hf(config: RolloutConfig, *, loaded: Policy) -> RolloutBackend:
    """Build the in-process backend. Raises :class:`UserError` for an unknown option."""
    options = parse_record(HFOptions, config.options, key="rollout.options")
    return HFRollouts(loaded, batch_sequences=config.batch_sequences, use_library=options.loop == "library")


class HFRollouts:
    """Samples from the learner's own weights, so ``update_weights`` only has to take the new version.

    The random numbers of a completion depend on ``seed``, its place among all completions asked for, and their
    number; not on ``batch_sequences`` (with transformers' ``generate``: on that too). A LoRA adapter is on while
    sampling. Each token carries the version at the time of the pass it came from.
    """

    def __init__(self, loaded: Policy, *, batch_sequences: int, use_library: bool = False) -> None:
        self.version = 0
        self._before_pass: Callable[[], None] | None = None
        self._loaded = loaded
        self._batch = batch_sequences
        self._use_library = use_library

    def call_before_each_pass(self, hook: Callable[[], None]) -> None:
        """Call ``hook`` before every forward pass; it may change the weights and say so by ``update_weights``.

        Raises :class:`UserError` where transformers' ``generate`` draws, which has no such hook.
        """
        if not self._own_loop():
            raise bad_value(
                "lag.in_flight",
                True,
                "false with rollout.backend hf",
                "it takes new weights between batches only where transformers' generate draws",
            )
        self._before_pass = hook

    def _own_loop(self) -> bool:
        return not self._use_library and use_layout_attention(self._loaded.model)

    def update_weights(self, version: int) -> None:
        """Stamp what is sampled from now on with ``version``; the weights are the learner's own."""
        self.version = version

    def close(self) -> None:
        """Nothing is held."""

    def generate(self, prompts: Sequence[Prompt], *, group_size: int, sampling: Sampling, seed: int) -> list[Rollout]:
        """See :class:`RolloutBackend`.

        A completion has every token up to and including the end token (``eos``) or the token that completes
        a stop string (``stop``); ids, log-probs and text are all of exactly these tokens, so that a text may
        end with the stop string and what else its last token spells.

        Raises :class:`UserError` when a prompt does not fit the model's context with ``max_new_tokens`` more;
        :class:`RunFailed` when the model's log-probs are not finite.
        """
        return self.generate_part(prompts, (0, len(prompts)), group_size=group_size, sampling=sampling, seed=seed)

    def generate_part(
        self, prompts: Sequence[Prompt], part: tuple[int, int], *, group_size: int, sampling: Sampling, seed: int
    ) -> list[Rollout]:
        """What :meth:`generate` returns for ``prompts[part[0]:part[1]]``: same random numbers, same group ids.

        So several processes can draw parts of one batch. (transformers' ``generate`` draws others, part by part.)
        """
        if group_size < 1:
            raise bad_value("rollout.group_size", group_size, "1 or more")
        check_lengths(self._loaded, prompts, sampling)
        first, end = (prompt * group_size for prompt in part)
        order = sorted(range(first, end), key=lambda n: len(prompts[n // group_size].token_ids))
        rollouts: dict[int, Rollout] = {}
        device = self._loaded.device
        with torch.no_grad(), _local_random_state(device), _ready_to_sample(self._loaded) as causal:
            _seed(device, seed)
            uniform_BT = torch.rand(len(prompts) * group_size, sampling.max_new_tokens, dtype=torch.float64)
            if first:
                _seed(device, seed + first)  # what transformers' generate draws differs from part to part
            for start in range(0, len(order), self._batch):
                batch = order[start : start + self._batch]
                groups = [n // group_size for n in batch]
                completions = self._draw(causal, prompts, groups, sampling, uniform_BT[batch].to(device))
                for n, group, completion in zip(batch, groups, completions, strict=True):
                    rollouts[n] = self._rollout(prompts[group], group, completion)
        return [rollouts[n] for n in range(first, end)]

    def _draw(
        self,
        causal: Any,
        prompts: Sequence[Prompt],
        groups: Sequence[int],
        sampling: Sampling,
        uniform_BT: torch.Tensor,
    ) -> list[Completion]:
        tokenizer = self._loaded.tokenizer
        ends = end_tokens(causal, tokenizer)
        stops = StopStrings(tokenizer, sampling.stop)
        if not self._own_loop():
            return generate(
                causal,
                [prompts[group] for group in groups],
                sampling=sampling,
                ends=ends,
                stops=stops,
                pad_id=tokenizer.pad_token_id,
                device=self._loaded.device,
                version=self.version,
            )
        distinct = sorted(set(groups), key=groups.index)
        return decode(
            self._loaded.model,
            [prompts[group] for group in distinct],
            [distinct.index(group) for group in groups],
            sampling=sampling,
            uniform_BT=uniform_BT,
            ends=ends,
            stops=stops,
            version=self._stamp,
        )

    def _stamp(self) -> int:
        if self._before_pass is not None:
            self._before_pass()
        return self.version

    def _rollout(self, prompt: Prompt, group: int, completion: Completion) -> Rollout:
        if not all(value > float("-inf") for value in completion.logps):
            raise RunFailed(f"a sampled token of group {group} has no finite log-prob; the weights are not finite")
        tokenizer = self._loaded.tokenizer
        return Rollout(
            prompt=prompt,
            group_id=group,
            completion_ids=tuple(completion.ids),
            logps=tuple(completion.logps),
            versions=tuple(completion.versions),
            stop_reason=completion.stop_reason,
            text=tokenizer.decode(completion.ids, skip_special_tokens=True, clean_up_tokenization_spaces=False),
        )


def end_tokens(causal: Any, tokenizer: Any) -> list[int]:
    """Every id that ends a completion: those of the model's generation config and the tokenizer's."""
    configured = causal.generation_config.eos_token_id
    tokens = [*(configured if isinstance(configured, list) else [configured]), tokenizer.eos_token_id]
    return sorted({int(token) for token in tokens if token is not None})


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
            "max_new_tokens",
            sampling.max_new_tokens,
            f"up to {context - longest}",
            why=f"the longest prompt has {longest} tokens and the model's context is {context}",
        )


def _seed(device: torch.device, seed: int) -> None:
    """Seed the global generators, within :func:`_local_random_state`."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)


def _local_random_state(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """The states of the global generators are afterwards as before."""
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])


@contextlib.contextmanager
def _ready_to_sample(loaded: Policy) -> Iterator[Any]:
    """The causal LM under its wrappers, in eval mode and with neutral generation defaults; both restored after."""
    from transformers import GenerationConfig

    model, causal = loaded.model, loaded.causal
    modes = [(module, module.training) for module in model.modules()]
    shipped = causal.generation_config
    causal.generation_config = GenerationConfig(eos_token_id=shipped.eos_token_id)
    model.eval()
    try:
        yield causal
    finally:
        causal.generation_config = shipped
        for module, training in modes:
            module.training = training
