"""One batch over many servers: every prompt's group is answered once, whichever servers fail on the way.

pending groups -> a thread per free slot of a server -> answered
               <- returned when the server failed, and asked elsewhere or again
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

from kl_comedy.errors import RunFailed
from kl_comedy.rollouts.vllm.client import Refused, ServerTrouble
from kl_comedy.rollouts.vllm.convert import Completion
from kl_comedy.rollouts.vllm.server import Server

Ask = Callable[[Server, int], list[Completion]]
"""Completions of one group, by its number, from one server."""


class Dispatch:
    """The groups of one call, numbered from 0; see :meth:`run`."""

    def __init__(self, groups: int, ask: Ask) -> None:
        self._groups, self._ask = groups, ask
        self._pending = deque(range(groups))
        self._answers: dict[int, list[Completion]] = {}
        self._threads = 0
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def run(self, servers: Sequence[Server], *, slots: int) -> list[list[Completion]]:
        """Answers in order, as soon as all are there, though a failed server may still be restarting.

        Raises :class:`RunFailed` when the last server is given up, else what the first thread that failed raised.
        """
        threads = [
            threading.Thread(target=self._work, args=(server,), daemon=True, name=f"{server.name} {slot}")
            for slot in range(min(slots, self._groups))
            for server in servers
        ]
        self._threads = len(threads)
        for thread in threads:
            thread.start()
        with self._changed:
            self._changed.wait_for(lambda: self._done() or self._threads == 0)
        if self._error is not None:
            raise self._error
        if len(self._answers) < self._groups:
            reasons = "; ".join(f"{server.name}: {server.failure}" for server in servers)
            raise RunFailed(f"no vLLM server is left to sample from. {reasons}")
        return [self._answers[group] for group in range(self._groups)]

    def _done(self) -> bool:
        return self._error is not None or len(self._answers) == self._groups

    def _next_group(self) -> int | None:
        """A group to ask for; waits while others are being asked for, since they may be returned."""
        with self._changed:
            self._changed.wait_for(lambda: self._done() or self._pending)
            return None if self._done() else self._pending.popleft()

    def _work(self, server: Server) -> None:
        try:
            while (group := self._next_group()) is not None:
                generation = server.generation
                try:
                    answer = self._ask(server, group)
                    with self._changed:
                        self._answers[group] = answer
                        self._changed.notify_all()
                except ServerTrouble as trouble:
                    with self._changed:
                        self._pending.appendleft(group)
                        self._changed.notify_all()
                    if not server.recover(generation, trouble):
                        return
                except Refused as refusal:
                    raise RunFailed(f"{server.name} refuses to sample: {refusal}") from refusal
        except BaseException as error:  # raised again by the thread that waits in run()
            with self._changed:
                self._error = self._error or error
        finally:
            with self._changed:
                self._threads -= 1
                self._changed.notify_all()
