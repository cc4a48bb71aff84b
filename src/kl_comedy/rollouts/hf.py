"""The ``hf`` backend: sampling from the very module that is trained, in the trainer's process.

    prompts x group -> sorted by length -> batches of at most ``batch_sequences`` -> rollouts in order

Our own loop draws where the model takes our attention, transformers' ``generate`` where it does not, or where asked;
both are in :mod:`kl_comedy.rollouts.decoding` and use the same random numbers. Defaults that a checkpoint ships
(``top_k``, penalties, suppressed tokens, ...) would make the sampler another policy than the learner's; a neutral
generation config replaces them during the call.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kl_comedy.config.validate import option, parse_record
from kl_comedy.errors import RunFailed, UserError, bad_value
from kl_comedy.models import LoadedModel
from kl_comedy.models.attention import use_layout_attention
from kl_comedy.records import Capabilities, Prompt, Rollout
from kl_comedy.registry import ROLLOUTS
from kl_comedy.rollouts.base import RolloutBackend, Sampling
from kl_comedy.rollouts.decoding import Completion, StopStrings, decode, generate

if TYPE_CHECKING:
    from kl_comedy.config.schema import RolloutConfig

LOOP_DOC = "ours wherever the model takes it, or transformers' `generate` for every model"


@dataclass(frozen=True, kw_only=True)
class HFOptions:
    loop: str = option("auto", LOOP_DOC, choices=("auto", "library"))


@ROLLOUTS.register(
    "hf",
    source="transformers models, own loop",
    summary="In-process sampling from the policy itself.",
    capabilities=Capabilities(draws_parts=True, updates_between_tokens=True),
    options=HFOptions,
)
def build_hf(config: RolloutConfig, *, loaded: LoadedModel) -> RolloutBackend:
    """Build the in-process backend. Raises :class:`UserError` for an unknown option."""
    options = parse_record(HFOptions, config.options, key="rollout.options")
    return HFRollouts(loaded, batch_sequences=config.batch_sequences, use_library=options.loop == "library")


class HFRollouts:
    """Samples from the learner's own weights, so ``update_weights`` only has to take the new version.

    The random numbers of a completion depend on ``seed``, its place among all completions asked for, and their
    number; not on ``batch_sequences``. A LoRA adapter is on while sampling. Each token carries the version at the
    time of the pass it came from.
    """

    def __init__(self, loaded: LoadedModel, *, batch_sequences: int, use_library: bool = False) -> None:
        self.version = 0
        self._before_pass: Callable[[], None] | None = None
        self._loaded, self._batch, self._use_library = loaded, batch_sequences, use_library

    def call_before_each_pass(self, hook: Callable[[], None]) -> None:
        """Call ``hook`` before every forward pass; it may change the weights and say so by ``update_weights``.

        Raises :class:`UserError` where transformers' ``generate`` draws, which has no such hook.
        """
        if not self.own_loop():
            why = "it takes new weights between batches only where transformers' generate draws"
            raise bad_value("lag.in_flight", True, "false with rollout.backend hf", why)
        self._before_pass = hook

    def own_loop(self) -> bool:
        """Whether our loop draws, and not transformers' ``generate``."""
        return not self._use_library and use_layout_attention(self._loaded.model)

    def update_weights(self, version: int) -> None:
        """Stamp what is sampled from now on with ``version``; the weights are the learner's own."""
        self.version = version

    def close(self) -> None:
        """Nothing to free."""

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

        So several processes can draw parts of one batch.
        """
        check_request(self._loaded, prompts, sampling, group_size)
        first, end = (prompt * group_size for prompt in part)
        groups = [n // group_size for n in range(first, end)]
        uniform_BT = uniform_numbers(seed, len(prompts) * group_size, sampling.max_new_tokens)
        completions = self.draw(prompts, groups, sampling=sampling, uniform_BT=uniform_BT[first:end])
        to_rollout = Converter(self._loaded.tokenizer)
        return [to_rollout(prompts[group], group, row) for group, row in zip(groups, completions, strict=True)]

    def draw(
        self,
        prompts: Sequence[Prompt],
        groups: Sequence[int],
        *,
        sampling: Sampling,
        uniform_BT: Tensor,
        ends: Sequence[int] | None = None,
    ) -> list[Completion]:
        """One completion of ``prompts[group]`` for each of ``groups``, from the numbers ``uniform_BT``, in batches.

        ``ends`` None: the end tokens of model and tokenizer.
        """
        tokenizer, model = self._loaded.tokenizer, self._loaded.model
        order = sorted(range(len(groups)), key=lambda row: len(prompts[groups[row]].token_ids))
        drawn: dict[int, Completion] = {}
        with torch.no_grad(), _ready_to_sample(self._loaded) as causal:
            settings: dict[str, Any] = {
                "sampling": sampling,
                "ends": end_tokens(causal, tokenizer) if ends is None else ends,
                "stops": StopStrings(tokenizer, sampling.stop),
            }
            for start in range(0, len(order), self._batch):
                batch = order[start : start + self._batch]
                settings["uniform_BT"] = uniform_BT[batch].to(self._loaded.device)
                if self.own_loop():
                    distinct = list(dict.fromkeys(groups[row] for row in batch))
                    prompt_of = [distinct.index(groups[row]) for row in batch]
                    prompts_F = [prompts[group] for group in distinct]
                    completions = decode(model, prompts_F, prompt_of, version=self._stamp, **settings)
                else:
                    prompts_B = [prompts[groups[row]] for row in batch]
                    pad_id = tokenizer.pad_token_id
                    completions = generate(causal, prompts_B, version=self.version, pad_id=pad_id, **settings)
                drawn |= zip(batch, completions, strict=True)
        return [drawn[row] for row in range(len(groups))]

    def _stamp(self) -> int:
        if self._before_pass is not None:
            self._before_pass()
        return self.version


class Converter:
    """A completion to a :class:`Rollout`. Raises :class:`RunFailed` where a log-prob is missing or not finite."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __call__(self, prompt: Prompt, group: int, completion: Completion) -> Rollout:
        ids, logps = completion.ids, completion.logps
        if len(logps) != len(ids) or not all(map(math.isfinite, logps)):
            raise RunFailed(f"a sampled token of group {group} has no finite log-prob; the weights are not finite")
        return Rollout(
            prompt=prompt,
            group_id=group,
            completion_ids=tuple(ids),
            logps=tuple(logps),
            versions=tuple(completion.versions),
            stop_reason=completion.stop_reason,
            text=self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False),
        )


def uniform_numbers(seed: int, rows: int, tokens: int) -> Tensor:
    """The numbers in [0, 1) behind the tokens of a call, ``[rows, tokens]``; the global random state is left alone."""
    return torch.rand(rows, tokens, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def end_tokens(causal: Any, tokenizer: Any) -> list[int]:
    """Every id that ends a completion: those of the model's generation config and the tokenizer's."""
    configured = causal.generation_config.eos_token_id
    tokens = [*(configured if isinstance(configured, list) else [configured]), tokenizer.eos_token_id]
    return sorted({int(token) for token in tokens if token is not None})


def check_request(
    loaded: LoadedModel, prompts: Sequence[Prompt], sampling: Sampling, group_size: int = 1, *, limit: int | None = None
) -> None:
    """Raise :class:`UserError` for an empty group or prompt, or one that does not fit the context (or ``limit``)."""
    if group_size < 1:
        raise bad_value("rollout.group_size", group_size, "1 or more")
    if any(not prompt.token_ids for prompt in prompts):
        raise UserError("a prompt is empty: it has no tokens to continue (see data.prompt)")
    context = getattr(loaded.model.config, "max_position_embeddings", None)
    context = min((length for length in (context, limit) if length is not None), default=None)
    longest = max((len(prompt.token_ids) for prompt in prompts), default=0)
    if context is not None and longest + sampling.max_new_tokens > context:
        why = f"the longest prompt has {longest} tokens and the model's context is {context}"
        raise bad_value("max_new_tokens", sampling.max_new_tokens, f"up to {context - longest}", why)


@contextlib.contextmanager
def _ready_to_sample(loaded: LoadedModel) -> Iterator[Any]:
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
