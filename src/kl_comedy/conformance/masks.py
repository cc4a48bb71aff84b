"""The masks that trainers use by mistake in the place of the mask, by name.

A mask may be wrong where the values of tokens are summed, where the number of tokens is counted, or in both places. The
first is read off the tokens that have a gradient, the second off the weights of completions in a mean.

Legend: ``B`` completions, ``T`` tokens. ``mask_BT`` is true at the tokens to be trained on, ``attention_BT`` at all
tokens but the padding; a turn is a run of tokens of the mask.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def shifted(mask_BT: Tensor, by: int) -> Tensor:
    """The mask moved by one token, to the right (1) or to the left (-1)."""
    moved_BT = torch.zeros_like(mask_BT)
    if by > 0:
        moved_BT[:, 1:] = mask_BT[:, :-1]
    else:
        moved_BT[:, :-1] = mask_BT[:, 1:]
    return moved_BT


def turn_numbers(mask_BT: Tensor) -> Tensor:
    """Which turn of its completion each token of the mask is in, from 1 on; 0 outside the mask."""
    starts_BT = mask_BT & ~shifted(mask_BT, 1)
    return starts_BT.cumsum(-1) * mask_BT


def turn_lengths(mask_BT: Tensor) -> Tensor:
    """The number of tokens of the turn that each token of the mask is in; 0 outside the mask."""
    turn_BT = turn_numbers(mask_BT)
    is_same_BTT = (turn_BT[:, :, None] == turn_BT[:, None, :]) & mask_BT[:, :, None]
    return is_same_BTT.sum(-1)


def _first_turn(mask_BT: Tensor, attention_BT: Tensor) -> Tensor:
    return turn_numbers(mask_BT) == 1


def _last_turn(mask_BT: Tensor, attention_BT: Tensor) -> Tensor:
    turn_BT = turn_numbers(mask_BT)
    return mask_BT & (turn_BT == turn_BT.amax(-1, keepdim=True))


def _first_token(mask_BT: Tensor, attention_BT: Tensor) -> Tensor:
    return mask_BT & (mask_BT.cumsum(-1) == 1)


def _last_token(mask_BT: Tensor, attention_BT: Tensor) -> Tensor:
    count_BT = mask_BT.cumsum(-1)
    return mask_BT & (count_BT == count_BT[:, -1:])


def _first_of_turns(mask_BT: Tensor, attention_BT: Tensor) -> Tensor:
    return mask_BT & ~shifted(mask_BT, 1)


def _last_of_turns(mask_BT: Tensor, attention_BT: Tensor) -> Tensor:
    return mask_BT & ~shifted(mask_BT, -1)


Part = Callable[[Tensor, Tensor], Tensor]
"""From the mask and the attention mask to some tokens of a batch, as booleans ``[B, T]``."""


def _without(part: Part) -> Part:
    def rest(mask_BT: Tensor, attention_BT: Tensor) -> Tensor:
        return mask_BT & ~part(mask_BT, attention_BT)

    return rest


OF_WHOLE_BATCH: dict[str, Part] = {
    "the attention mask": lambda mask_BT, attention_BT: attention_BT,
    "the mask shifted by one token to the left": lambda mask_BT, attention_BT: shifted(mask_BT, -1),
    "the mask shifted by one token to the right": lambda mask_BT, attention_BT: shifted(mask_BT, 1),
    "the mask inverted": lambda mask_BT, attention_BT: attention_BT & ~mask_BT,
}
"""Masks that have tokens outside the mask."""
OF_THE_MASK: dict[str, Part] = {
    "the first token of every completion has no gradient: it is dropped, or the mask is shifted": _without(
        _first_token
    ),
    "the last token of every completion has no gradient: it is dropped, or the mask is shifted": _without(_last_token),
    "the first token of every turn has no gradient: it is dropped, or the mask is shifted by one token to the right": (
        _without(_first_of_turns)
    ),
    "the last token of every turn has no gradient: it is dropped, or the mask is shifted by one token to the left": (
        _without(_last_of_turns)
    ),
    "only the first turn of a completion has a gradient (the tokens before the first masked ones)": _first_turn,
    "only the last turn of a completion has a gradient (the tokens behind the last masked ones)": _last_turn,
    "the first turn of every completion has no gradient": _without(_first_turn),
    "the last turn of every completion has no gradient": _without(_last_turn),
}
"""Parts of the mask, by what a loss does that has a gradient at these tokens alone."""
COUNTED: dict[str, Part] = {
    **OF_WHOLE_BATCH,
    "the first turn": _first_turn,
    "the last turn": _last_turn,
    "all turns but the first": _without(_first_turn),
    "all turns but the last": _without(_last_turn),
    "the mask without the first token of each completion": _without(_first_token),
    "the mask without the last token of each completion": _without(_last_token),
    "the mask without the first token of each turn": _without(_first_of_turns),
    "the mask without the last token of each turn": _without(_last_of_turns),
}
"""What the tokens of a mean may be counted in by mistake."""
