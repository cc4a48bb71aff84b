"""One batch over many servers: every prompt's group is answered once, whichever servers fail on the way.

pending groups -> a worker per free slot of a server -> answered
               <- given back when the server failed, and asked elsewhere or again
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

from kl_comedy.errors import RunFailed
from kl_comedy.rollouts.vllm.client import Refused, ServerTrouble
from kl_comedy.rollouts.vllm.member import Member
from kl_comedy.rollouts.vllm.reading import Completion

Ask = Callable[[Member, int], list[Completion]]


class Batch:
    """The groups of one call, numbered from 0; see :meth:`run`."""

    def __init__(self, groups: int, ask: Ask) -> None:
        self._ask = ask
        self._pending = deque(range(groups))
        self._answers: dict[int, list[Completion]] = {}
        self._groups = groups
        self._workers = 0
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def run(self, members: Sequence[Member], *, slots: int) -> list[list[Completion]]:
        """Answers in order. Returns as soon as all are there, though a failed server may still be coming back.

        Raises :class:`RunFailed` when the last server is given up, and what the first worker that met it raised.
        """
        threads = [
            threading.Thread(target=self._work, args=(member,), daemon=True, name=f"{member.name} {slot}")
            for slot in range(min(slots, self._groups))
            for member in members
        ]
        self._workers = len(threads)
        for thread in threads:
            thread.start()
        with self._changed:
            self._changed.wait_for(lambda: self._over() or self._workers == 0)
        if self._error is not None:
            raise self._error
        if len(self._answers) < self._groups:
            reasons = "; ".join(f"{member.name}: {member.lost}" for member in members)
            raise RunFailed(f"no vLLM server is left to sample from. {reasons}")
        return [self._answers[group] for group in range(self._groups)]

    def _over(self) -> bool:
        return self._error is not None or len(self._answers) == self._groups

    def _take(self) -> int | None:
        """A group to ask for; waits while others are being asked for, since they may be given back."""
        with self._changed:
            self._changed.wait_for(lambda: self._over() or self._pending)
            return None if self._over() else self._pending.popleft()

    def _work(self, member: Member) -> None:
        try:
            while (group := self._take()) is not None:
                epoch = member.epoch
                try:
                    self._settle(group, self._ask(member, group))
                except ServerTrouble as trouble:
                    self._give_back(group)
                    if not member.recover(epoch, trouble):
                        return
                except Refused as refusal:
                    raise RunFailed(f"{member.name} refuses to sample: {refusal}") from refusal
        except BaseException as error:  # handed to the thread that waits in run()
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()
        finally:
            with self._changed:
                self._workers -= 1
                self._changed.notify_all()

    def _settle(self, group: int, answer: list[Completion]) -> None:
        with self._changed:
            self._answers[group] = answer
            self._changed.notify_all()

    def _give_back(self, group: int) -> None:
        with self._changed:
            self._pending.appendleft(group)
            self._changed.notify_all()
