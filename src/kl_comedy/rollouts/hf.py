"""Sampling by transformers' own ``generate``: for architectures our loop does not take, and to compare with.

Sampling from the very module that is trained, in the trainer's process.

    prompts x group -> sorted by length -> batches of at most ``batch_sequences`` -> rollouts in order

Our own loop (:mod:`kl_comedy.rollouts.decoding`) draws where the model takes our attention, transformers'
``generate`` (:mod:`kl_comedy.rollouts.hf`) where it does not, or where asked.

Defaults that a checkpoint ships (``top_k``, penalties, suppressed tokens, ...) would make the sampler another
policy than the learner's; a neutral generation config stands in for them during the call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kl_comedy.errors import RunFailed, UserError, bad_value, unknown_key
from kl_comedy.models.attention import adopt
from kl_comedy.records import Capabilities, Prompt, Rollout
from kl_comedy.registry import ROLLOUTS
from kl_comedy.rollouts.base import Policy, RolloutBackend, Sampling
from kl_comedy.rollouts.decoding import Drawn, LogpRecorder, StopOnText, StopStrings, decode, ending, warpers

if TYPE_CHECKING:
    from kl_comedy.config.schema import RolloutConfig


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
) -> list[Drawn]:
    """Draw one completion per prompt, left-padded, every setting ours. Random numbers are torch's global ones.

    Raises :class:`RunFailed` where the distribution is not finite.
    """
    from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

    ids_BP, mask_BP = left_pad(prompts, pad_id=pad_id, device=device)
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
    new = ids_BS[:, width:].tolist()
    logps = recorder.finish(ids_BS[:, width:]).tolist()
    drawn = []
    for row, ids in enumerate(new):
        length, reason = ending(ids, ends, stopper.length_B[row])
        drawn.append(
            Drawn(ids=ids[:length], logps=logps[row][:length], versions=[version] * length, stop_reason=reason)
        )
    return drawn


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


LOOPS = ("auto", "library")
"""Option ``loop``: ours wherever the model takes it, or transformers' ``generate`` whatever the model."""


@ROLLOUTS.register(
    "hf",
    source="transformers models, own loop",
    summary="In-process sampling from the policy itself.",
    capabilities=Capabilities(draws_parts=True, updates_between_tokens=True),
)
def build_hf(config: RolloutConfig, *, loaded: Policy) -> RolloutBackend:
    """Build the in-process backend. Raises :class:`UserError` for an unknown option."""
    for name, value in config.options.items():
        if name != "loop":
            raise unknown_key(f"rollout.options.{name}", value, ["loop"], "the hf backend has no such option")
        if value not in LOOPS:
            raise bad_value("rollout.options.loop", value, LOOPS)
    loop = config.options.get("loop", "auto")
    return HFRollouts(loaded, batch_sequences=config.batch_sequences, use_library=loop == "library")


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
        return not self._use_library and adopt(self._loaded.model)

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
        places = sorted(range(first, end), key=lambda n: len(prompts[n // group_size].token_ids))
        found: dict[int, Rollout] = {}
        with torch.no_grad(), _seeded(self._loaded.device, seed), _ready_to_sample(self._loaded) as causal:
            uniform_BT = torch.rand(len(prompts) * group_size, sampling.max_new_tokens, dtype=torch.float64)
            if first:
                _go_on_from(self._loaded.device, seed, first)
            for start in range(0, len(places), self._batch):
                batch = places[start : start + self._batch]
                groups = [place // group_size for place in batch]
                drawn = self._draw(causal, prompts, groups, sampling, uniform_BT[batch].to(self._loaded.device))
                for place, group, row in zip(batch, groups, drawn, strict=True):
                    found[place] = self._rollout(prompts[group], group, row)
        return [found[place] for place in range(first, end)]

    def _draw(
        self,
        causal: Any,
        prompts: Sequence[Prompt],
        groups: Sequence[int],
        sampling: Sampling,
        uniform_BT: torch.Tensor,
    ) -> list[Drawn]:
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

    def _rollout(self, prompt: Prompt, group: int, drawn: Drawn) -> Rollout:
        if not all(value > float("-inf") for value in drawn.logps):
            raise RunFailed(f"a sampled token of group {group} has no finite log-prob; the weights are not finite")
        text = self._loaded.tokenizer.decode(drawn.ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return Rollout(
            prompt=prompt,
            group_id=group,
            completion_ids=tuple(drawn.ids),
            logps=tuple(drawn.logps),
            versions=tuple(drawn.versions),
            stop_reason=drawn.stop_reason,
            text=text,
        )


def end_tokens(causal: Any, tokenizer: Any) -> list[int]:
    """Every id that ends a completion: those of the model's generation config and the tokenizer's own."""
    configured = causal.generation_config.eos_token_id
    found = configured if isinstance(configured, list) else [configured]
    return sorted({int(token) for token in [*found, tokenizer.eos_token_id] if token is not None})


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


def _go_on_from(device: torch.device, seed: int, place: int) -> None:
    """Random numbers of their own for a loop that draws from the global generators, within :func:`_seeded`."""
    torch.default_generator.manual_seed(seed + place)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed + place)


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
