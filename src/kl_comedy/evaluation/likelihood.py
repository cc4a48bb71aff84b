"""Log-probs of given choices: how likely a model finds each choice of a problem after its prompt.

    prompts x choices -> tokens -> batches by length, choices of a prompt together -> one forward pass each -> nats

Shape suffixes: ``B`` rows of a batch (one choice each), ``P`` prompt tokens (left-padded), ``T`` tokens of a choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor

from kl_comedy.config import Config
from kl_comedy.config.schema import SuiteConfig
from kl_comedy.data.prompts import continuation_ids
from kl_comedy.data.rows import LETTERS
from kl_comedy.models.introspection import head_chunk, microbatch_tokens
from kl_comedy.models.logprobs import token_pass
from kl_comedy.models.types import PassOptions
from kl_comedy.records import Prompt
from kl_comedy.rollouts import Sampling
from kl_comedy.rollouts.hf import check_request

if TYPE_CHECKING:
    from kl_comedy.models import LoadedModel

T = TypeVar("T")


class Ranks(Protocol):
    """The processes of a run, which divide the forward passes."""

    def split(self, items: Sequence[T]) -> list[T | None]:
        """This process's part, padded with None to the same length on all processes."""
        ...

    def gather(self, item: T) -> list[T]:
        """The items of all processes, on every process."""
        ...


@dataclass(frozen=True, kw_only=True)
class ChoiceSet:
    """Prompts, and the choices that are compared after each.

    ``texts``: the choices of each prompt. ``rows``: one per choice, the position of its prompt and the tokens that it
    adds to the prompt.
    """

    name: str
    prompts: Sequence[Prompt]
    texts: Sequence[Sequence[str]]
    rows: Sequence[tuple[int, tuple[int, ...]]]

    def prompt_ids(self, row: int) -> tuple[int, ...]:
        prompt, _ = self.rows[row]
        return tuple(self.prompts[prompt].token_ids)

    def choice_ids(self, row: int) -> tuple[int, ...]:
        _, token_ids = self.rows[row]
        return token_ids

    def padded_length(self, batch: Sequence[int]) -> int:
        """Tokens of a forward pass over the rows ``batch``, padding included.

        Prompts and choices are padded separately: the longest prompt and the longest choice may be of different rows.
        """
        longest_prompt = max(len(self.prompt_ids(row)) for row in batch)
        longest_choice = max(len(self.choice_ids(row)) for row in batch)
        return len(batch) * (longest_prompt + longest_choice)

    def batches(self, budget: int, chunk: int | None = None) -> list[list[int]]:
        """Rows in batches of at most ``budget`` padded tokens (or one row), longest prompts first.

        Rows of different chunks of ``chunk`` prompts are never batched together: a chunk's records must not depend on
        which other chunks are evaluated in the same call.
        """
        prompts_per_chunk = chunk or len(self.prompts)
        chunks: dict[int, list[int]] = {}
        for row, (prompt, _) in enumerate(self.rows):
            chunks.setdefault(prompt // prompts_per_chunk, []).append(row)
        batches: list[list[int]] = []
        for rows in chunks.values():
            batch: list[int] = []
            # By length, so that little is padding; by row among equals, so that choices of a prompt stay together.
            for row in sorted(rows, key=lambda row: (-len(self.prompt_ids(row)), row)):
                if batch and self.padded_length([*batch, row]) > budget:
                    batches.append(batch)
                    batch = []
                batch.append(row)
            batches.append(batch)
        return batches

    def records(self, logps: Sequence[Sequence[float]], *, first: int = 0) -> list[dict[str, Any]]:
        """A record per problem, from the log-probs of its choices. ``first``: the position of the first problem.

        The likeliest choice is picked, by log-prob and by log-prob per character; of equals the first.
        """
        records = []
        for index, (prompt, texts, row) in enumerate(zip(self.prompts, self.texts, logps, strict=True), start=first):
            # Per character and not per token: the measure of published results, and the same for every tokenizer.
            per_character = [logp / len(text) for logp, text in zip(row, texts, strict=True)]
            picked = _likeliest_letter(row)
            picked_norm = _likeliest_letter(per_character)
            problem = prompt.problem
            record = {
                "index": index,
                "id": problem.id,
                "gold": problem.answer,
                "picked": picked,
                "picked_norm": picked_norm,
                "correct": picked == problem.answer,
                "correct_norm": picked_norm == problem.answer,
                "logps": list(row),
                "prompt": prompt.text,
            }
            records.append(record)
        return records


def _likeliest_letter(logps: Sequence[float]) -> str:
    """The letter of the largest log-prob; of equals the first."""
    values = list(logps)
    return LETTERS[values.index(max(values))]


def tokenize_choices(suite: SuiteConfig, prompts: Sequence[Prompt], loaded: LoadedModel, *, template: str) -> ChoiceSet:
    """The choices of each prompt, letters or texts as ``suite.score`` says, tokenized together with the prompt.

    Raises :class:`~kl_comedy.errors.UserError` for a choice without tokens of its own, and for text longer than the
    model's context.
    """
    texts = []
    rows = []
    for index, prompt in enumerate(prompts):
        choices = prompt.problem.meta["choices"]
        if suite.score == "texts":
            prompt_texts = list(choices)
        else:
            prompt_texts = list(LETTERS[: len(choices)])
        # Kept beside their ids: scores per character need the text.
        texts.append(prompt_texts)
        for text in prompt_texts:
            # A plain prompt begins with the tokenizer's special tokens, a chat template writes its own.
            special = template == "plain"
            rows.append((index, continuation_ids(prompt, suite.delimiter + text, loaded.tokenizer, special=special)))
    # All of it is checked before the first pass: a later batch must not fail after hours.
    longest = max(len(ids) for _, ids in rows)
    # The limits of a request for that many new tokens are the limits here: prompt and choice within the context.
    check_request(loaded, prompts, Sampling(temperature=0.0, max_new_tokens=longest))
    return ChoiceSet(name=suite.name, prompts=prompts, texts=texts, rows=rows)


@dataclass(frozen=True, kw_only=True)
class ChoiceScorer:
    """Computes log-probs of given choices, without sampling.

    ``budget`` bounds the padded tokens of a forward pass, ``chunk_elements`` the logits in memory at once. All
    ``ranks`` make equally many passes, because a sharded model needs all of them.
    """

    loaded: LoadedModel
    budget: int
    chunk_elements: int
    ranks: Ranks
    share_prompt: bool = True

    def log_probs(self, choices: ChoiceSet, *, chunk: int | None = None) -> list[list[float]]:
        """For each prompt the log-prob of each choice (nats, temperature 1), summed over its tokens."""
        batches = choices.batches(self.budget, chunk)
        sums: dict[int, float] = {}
        for batch in self.ranks.split(batches):
            if batch is None:
                # This rank has no batch left, and the others gather a sharded model's weights: without a pass here they
                # would wait forever. The cheapest batch will do; its result is dropped.
                self._sums(choices, min(batches, key=choices.padded_length))
            else:
                sums |= zip(batch, self._sums(choices, batch), strict=True)
        merged: dict[int, float] = {}
        for rank_sums in self.ranks.gather(sums):
            merged |= rank_sums
        # In the order of rows, whichever rank computed them.
        logps: list[list[float]] = [[] for _ in choices.prompts]
        for row, (prompt, _) in enumerate(choices.rows):
            logps[prompt].append(merged[row])
        return logps

    @torch.no_grad()
    def _sums(self, choices: ChoiceSet, batch: Sequence[int]) -> list[float]:
        """The log-probs of the rows ``batch``, summed in float64."""
        prompts = [list(choices.prompt_ids(row)) for row in batch]
        continuations = [list(choices.choice_ids(row)) for row in batch]
        prompt_width = max(len(ids) for ids in prompts)
        choice_width = max(len(ids) for ids in continuations)
        pad = int(self.loaded.tokenizer.pad_token_id)
        # Prompts are padded on the left and choices on the right, so that they meet.
        prompt_rows = []
        prompt_masks = []
        for ids in prompts:
            padding = prompt_width - len(ids)
            prompt_rows.append([pad] * padding + ids)
            prompt_masks.append([False] * padding + [True] * len(ids))
        choice_rows = []
        choice_masks = []
        for ids in continuations:
            padding = choice_width - len(ids)
            choice_rows.append(ids + [pad] * padding)
            choice_masks.append([True] * len(ids) + [False] * padding)

        def tensor(rows: Sequence[Sequence[int]]) -> Tensor:
            return torch.tensor(rows, device=self.loaded.device)

        scored = token_pass(
            self.loaded.model,
            PassOptions(temperature=1.0, chunk_elements=self.chunk_elements, share_prompt=self.share_prompt),
            prompt_ids_BP=tensor(prompt_rows),
            prompt_mask_BP=tensor(prompt_masks),
            ids_BT=tensor(choice_rows),
            mask_BT=tensor(choice_masks),
        )
        # float64: the order of a float32 sum would depend on the padding, and so would ties between choices.
        return [float(value) for value in scored.logp_BT.double().sum(-1)]


def choice_scorer(config: Config, loaded: LoadedModel, ranks: Ranks) -> ChoiceScorer:
    """The scorer within the memory limits of ``config``."""
    return ChoiceScorer(
        loaded=loaded,
        budget=microbatch_tokens(config.train.microbatch_tokens, loaded.model, loaded.device, checkpoints=False),
        chunk_elements=head_chunk(config.model.head_chunk_elements, loaded.device),
        share_prompt=config.model.share_prompt,
        ranks=ranks,
    )
