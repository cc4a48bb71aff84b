"""The ``hf`` backend: it samples from the module that is trained, in the trainer's process.

    prompts x group -> sorted by length -> batches of at most ``batch_sequences`` -> rollouts in order

Our own loop draws where the model takes our attention; transformers' ``generate`` draws where the model does not, or
where the config asks for it. Both are in :mod:`kl_comedy.rollouts.decoding` and use the same random numbers. Defaults
that come with a checkpoint (``top_k``, penalties, suppressed tokens, ...) would make the sampler another policy than
the learner's; a neutral generation config replaces them during the call.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kl_comedy.config.validate import option, parse_record
from kl_comedy.errors import RunFailed, UserError, bad_value
from kl_comedy.models import LoadedModel
from kl_comedy.models.attention import use_layout_attention
from kl_comedy.phases import phase
from kl_comedy.records import Capabilities, KeptSets, Prompt, Rollout
from kl_comedy.registry import ROLLOUTS
from kl_comedy.rollouts.base import RolloutBackend, Sampling
from kl_comedy.rollouts.decoding import Completion, Draws, StopStrings, decode, generate, generation_config

if TYPE_CHECKING:
    from kl_comedy.config.schema import RolloutConfig

LOOP_DOC = "ours wherever the model takes it, or transformers' `generate` for every model"
"""The meaning of the option ``loop``, here and in an ``hf_server``."""


@dataclass(frozen=True, kw_only=True)
class HFOptions:
    """``rollout.options`` of the backend."""

    loop: str = option("auto", LOOP_DOC, choices=("auto", "library"))


@ROLLOUTS.register(
    "hf",
    source="transformers models, own loop",
    summary="In-process sampling from the policy itself.",
    capabilities=Capabilities(
        draws_parts=True, updates_between_tokens=True, gives_top_logps=True, gives_kept=True, draws_with_policy=True
    ),
    options=HFOptions,
)
def build_hf(config: RolloutConfig, *, loaded: LoadedModel) -> RolloutBackend:
    """Build the in-process backend. Raises :class:`UserError` for an unknown option."""
    options = parse_record(HFOptions, config.options, key="rollout.options")
    use_library = options.loop == "library"
    return HFRollouts(loaded, batch_sequences=config.batch_sequences, use_library=use_library)


class HFRollouts:
    """Samples from the learner's own weights, so ``update_weights`` only has to take the new version.

    The random numbers of a completion depend on ``seed``, on its position among all completions of the call, and on
    their number; not on ``batch_sequences``. A LoRA adapter is active while sampling. Each token carries the version
    at the time of the pass that gave it.
    """

    def __init__(self, loaded: LoadedModel, *, batch_sequences: int, use_library: bool = False) -> None:
        self.version = 0
        self._loaded = loaded
        self._batch_sequences = batch_sequences
        self._use_library = use_library
        self._before_pass: Callable[[], None] | None = None

    def call_before_each_pass(self, hook: Callable[[], None]) -> None:
        """Call ``hook`` before every forward pass; it may change the weights and then call ``update_weights``.

        Raises :class:`UserError` where transformers' ``generate`` draws, which has no such hook.
        """
        if not self.own_loop():
            reason = "where transformers' generate draws, it takes new weights between batches only"
            raise bad_value("lag.in_flight", True, "false with rollout.backend hf", reason)
        self._before_pass = hook

    def own_loop(self) -> bool:
        """Whether our loop draws, and not transformers' ``generate``."""
        return not self._use_library and use_layout_attention(self._loaded.model)

    def update_weights(self, version: int) -> None:
        """Stamp what is sampled from now on with ``version``; the weights are the learner's own."""
        self.version = version

    def close(self) -> None:
        """Does nothing: memory and processes are the trainer's."""

    def generate(self, prompts: Sequence[Prompt], *, group_size: int, sampling: Sampling, seed: int) -> list[Rollout]:
        """See :class:`RolloutBackend`.

        A completion has every token up to and including the end token (``eos``) or the token that completes a stop
        string (``stop``). Ids, log-probs and text are all of exactly these tokens, so that a text may end with the
        stop string and the rest of its last token.

        Raises :class:`UserError` when a prompt does not fit the model's context with ``max_new_tokens`` more;
        :class:`RunFailed` when the model's log-probs are not finite.
        """
        # One process draws the part that is the whole, so that the two cannot differ.
        return self.generate_part(prompts, (0, len(prompts)), group_size=group_size, sampling=sampling, seed=seed)

    def generate_part(
        self, prompts: Sequence[Prompt], part: tuple[int, int], *, group_size: int, sampling: Sampling, seed: int
    ) -> list[Rollout]:
        """What :meth:`generate` returns for ``prompts[part[0]:part[1]]``: same random numbers, same group ids."""
        # Of all prompts, not of the part: every rank must raise, or the others wait for its part.
        check_request(self._loaded, prompts, sampling, group_size)
        first_prompt, end_prompt = part
        first = first_prompt * group_size
        end = end_prompt * group_size
        # Rows are numbered through the whole call: row n of any rank has the n-th random numbers.
        groups = [row // group_size for row in range(first, end)]
        # The numbers of the whole call, of which this part takes its own: so a part draws what the whole would.
        uniform_BT = uniform_numbers(seed, len(prompts) * group_size, sampling.max_new_tokens)
        completions = self.draw(prompts, groups, sampling=sampling, uniform_BT=uniform_BT[first:end])
        to_rollout = Converter(self._loaded.tokenizer)
        return [
            to_rollout(prompts[group], group, completion) for group, completion in zip(groups, completions, strict=True)
        ]

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
        tokenizer = self._loaded.tokenizer
        # By length, so that a batch has little padding. The sort is stable: rows of one prompt stay together.
        order = sorted(range(len(groups)), key=lambda row: len(prompts[groups[row]].token_ids))
        completion_of_row: dict[int, Completion] = {}
        with torch.no_grad(), _ready_to_sample(self._loaded) as causal:
            if ends is None:
                ends = end_tokens(causal, tokenizer)
            stops = StopStrings(tokenizer, sampling.stop)
            for start in range(0, len(order), self._batch_sequences):
                rows = order[start : start + self._batch_sequences]
                groups_B = [groups[row] for row in rows]
                numbers_BT = uniform_BT[rows].to(self._loaded.device)
                draws = Draws(sampling=sampling, uniform_BT=numbers_BT, ends=ends, stops=stops)
                if self.own_loop():
                    # Each prompt is computed once for all of its rows in the batch.
                    # The distinct prompts in their order; rows of one prompt are beside each other after the sort.
                    groups_F = list(dict.fromkeys(groups_B))
                    prompts_F = [prompts[group] for group in groups_F]
                    prompt_of = [groups_F.index(group) for group in groups_B]
                    model = self._loaded.model
                    before_pass = partial(self._before_next_pass, draws, len(completion_of_row), len(order))
                    completions = decode(model, prompts_F, prompt_of, draws, version=before_pass)
                else:
                    # transformers' generate has no place to report from before it is done.
                    phase("sampling", len(completion_of_row), len(order))
                    prompts_B = [prompts[group] for group in groups_B]
                    pad_id = tokenizer.pad_token_id
                    completions = generate(causal, prompts_B, draws, pad_id=pad_id, version=self.version)
                completion_of_row.update(zip(rows, completions, strict=True))
        # Back in the order of the call, whatever the order of the batches was.
        return [completion_of_row[row] for row in range(len(groups))]

    def _before_next_pass(self, draws: Draws, earlier: int, total: int) -> int:
        """The version of the weights of the next pass. ``earlier`` completions are of the batches before."""
        phase("sampling", earlier + sum(draws.ended), total)
        # The hook comes first: it may load new weights, which the pass then uses.
        if self._before_pass is not None:
            self._before_pass()
        return self.version


class Converter:
    """Makes a :class:`Rollout` of a completion.

    Raises :class:`RunFailed` where a log-prob is missing or not finite, and where a kept set lacks its token.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __call__(self, prompt: Prompt, group: int, completion: Completion) -> Rollout:
        ids = completion.ids
        logps = completion.logps
        all_finite = all(math.isfinite(logp) for logp in logps)
        if len(logps) != len(ids) or not all_finite:
            raise RunFailed(f"a sampled token of group {group} has no finite log-prob; the weights are not finite")
        sampler_top = None
        if completion.top:
            ids_TK, logp_TK = (torch.stack(rows_TK) for rows_TK in zip(*completion.top, strict=True))
            sampler_top = (ids_TK, logp_TK)
        kept = None
        if completion.kept:
            sizes_N = torch.tensor([len(ids_K) for ids_K in completion.kept], dtype=torch.int32)
            kept = KeptSets(sizes_N, torch.cat(completion.kept))
        try:
            return Rollout(
                prompt=prompt,
                group_id=group,
                completion_ids=tuple(ids),
                logps=tuple(logps),
                versions=tuple(completion.versions),
                stop_reason=completion.stop_reason,
                text=self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False),
                sampler_top=sampler_top,
                kept=kept,
            )
        except ValueError as error:
            # A server may answer with kept sets that lack their token.
            raise RunFailed(f"the sampler's group {group} is not usable; {error}") from None


def uniform_numbers(seed: int, rows: int, tokens: int) -> Tensor:
    """The numbers in [0, 1) from which a call draws its tokens, ``[rows, tokens]``, on the CPU.

    The global random state is left alone. Stored results depend on the order of the draws: by row, then by token.
    """
    # On the CPU, whatever the device: generators of GPUs give other numbers.
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(rows, tokens, dtype=torch.float64, generator=generator)


def end_tokens(causal: Any, tokenizer: Any) -> list[int]:
    """Every id that ends a completion, sorted: those of the model's generation config and the tokenizer's."""
    # A model may end with several tokens, as chat models do with one for a turn and one for a text.
    configured = causal.generation_config.eos_token_id
    tokens = [configured]
    if isinstance(configured, list):
        tokens = list(configured)
    tokens.append(tokenizer.eos_token_id)
    return sorted({int(token) for token in tokens if token is not None})


def check_request(
    loaded: LoadedModel, prompts: Sequence[Prompt], sampling: Sampling, group_size: int = 1, *, limit: int | None = None
) -> None:
    """Raise :class:`UserError` for an empty group or prompt, and for a prompt that is too long.

    A prompt and ``max_new_tokens`` more must fit the model's context, and ``limit`` tokens where that is given.
    """
    if group_size < 1:
        raise bad_value("rollout.group_size", group_size, "1 or more")
    # The first token would have no hidden state to be drawn from.
    if any(not prompt.token_ids for prompt in prompts):
        raise UserError("a prompt is empty: it has no tokens to continue (see data.prompt)")
    # None where positions are not bounded, as in some state-space models.
    context = getattr(loaded.model.config, "max_position_embeddings", None)
    if context is None:
        context = limit
    elif limit is not None:
        context = min(context, limit)
    longest = max((len(prompt.token_ids) for prompt in prompts), default=0)
    if context is not None and longest + sampling.max_new_tokens > context:
        reason = f"the longest prompt has {longest} tokens and the model's context is {context}"
        raise bad_value("max_new_tokens", sampling.max_new_tokens, f"up to {context - longest}", reason)


@contextlib.contextmanager
def _ready_to_sample(loaded: LoadedModel) -> Iterator[Any]:
    """Yield the model without the wrappers of LoRA, in eval mode and with neutral generation settings.

    Neutral, because a ``top_p`` that a model ships with would sample from another distribution than the one that is
    trained. Mode and settings are restored at the end.
    """
    model = loaded.model
    causal = loaded.causal
    # By module: a caller may have a part of the model in another mode than the rest.
    modes = [(module, module.training) for module in model.modules()]
    shipped = causal.generation_config
    # The end tokens stay: `end_tokens` reads them, and they do not change the distribution of a token.
    causal.generation_config = generation_config(eos_token_id=shipped.eos_token_id)
    model.eval()
    try:
        yield causal
    finally:
        causal.generation_config = shipped
        for module, training in modes:
            module.training = training
