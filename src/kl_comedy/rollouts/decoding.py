"""Sampling by our own loop over a transformers model: prompts computed once per group, rows leaving as they end.

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

from kl_comedy.models.anatomy import head_weights
from kl_comedy.models.attention import run_with
from kl_comedy.models.products import rows_times
from kl_comedy.records import Prompt
from kl_comedy.rollouts.base import Sampling
from kl_comedy.rollouts.caches import GroupCache, PromptCache
from kl_comedy.rollouts.steps import StopStrings, warpers

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
    model: Any, prompts: Sequence[Prompt], family: Sequence[int], *, sampling: Sampling, uniform_BT: Tensor,
    ends: Sequence[int], stops: StopStrings, version: Callable[[], int],
) -> list[Drawn]:  # fmt: skip
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
