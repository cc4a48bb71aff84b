"""In which order problems are asked: shuffled epochs that need no state, so that a resumed run goes on as one."""

from __future__ import annotations

import random

from kl_comedy.errors import UserError


class PromptOrder:
    """Batches of item indices over endless shuffled epochs.

    ``indices(i)`` depends on ``(n_items, batch, seed)`` and ``i`` only. The batches laid end to end are whole
    epochs, each a permutation of all items; a batch may straddle two epochs and then still holds no item
    twice, provided ``n_items >= batch`` (a smaller set must repeat within a batch).

    An epoch is a seeded shuffle in which the items that the straddling batch already holds are swapped out of
    the epoch's first places, each with the next free item behind them. With ``n_items >= 2 * batch`` there are enough
    of those before the last ``batch`` places, which the next epoch looks at: its plain shuffle tells them, and any
    epoch is found at once. Below, epochs are walked from the last known one.
    """

    def __init__(self, n_items: int, batch: int, seed: int) -> None:
        if n_items < 1 or batch < 1:
            raise UserError(f"PromptOrder: needs at least one item and one prompt a batch, got {n_items} and {batch}")
        self.n_items = n_items
        self.batch = batch
        self.seed = seed
        self._epochs: dict[int, list[int]] = {}

    def indices(self, i: int) -> list[int]:
        """The item indices of batch ``i`` (counted from 0), ``batch`` of them."""
        if i < 0:
            raise ValueError(f"batches are counted from 0, got {i}")
        place = i * self.batch
        found: list[int] = []
        while len(found) < self.batch:
            epoch, offset = divmod(place + len(found), self.n_items)
            found += self._epoch(epoch)[offset : offset + self.batch - len(found)]
        return found

    def _epoch(self, epoch: int) -> list[int]:
        """The permutation of ``epoch``; the last two are remembered."""
        if epoch not in self._epochs:
            known = [e for e in self._epochs if e < epoch]
            start = epoch if self.n_items >= 2 * self.batch else max(known, default=-1) + 1
            for e in range(start, epoch + 1):
                order = self._join(e)
                self._epochs = {k: v for k, v in self._epochs.items() if k == e - 1} | {e: order}
        return self._epochs[epoch]

    def _shuffled(self, epoch: int) -> list[int]:
        order = list(range(self.n_items))
        random.Random(f"order:{self.seed}:{epoch}").shuffle(order)
        return order

    def _join(self, epoch: int) -> list[int]:
        """``epoch``'s shuffle with the straddling batch's items swapped out of its first places."""
        order = self._shuffled(epoch)
        shared = epoch * self.n_items % self.batch
        if shared == 0 or self.n_items < self.batch:
            return order
        wide = self.n_items >= 2 * self.batch
        before = self._shuffled(epoch - 1) if wide else self._epochs[epoch - 1]
        held = set(before[self.n_items - shared :])
        head = self.batch - shared
        free = (place for place in range(head, self.n_items) if order[place] not in held)
        for place in range(head):
            if order[place] in held:
                other = next(free)
                order[place], order[other] = order[other], order[place]
        return order
