"""Messages to the other process, sent from a thread: whoever posts one never waits for a reader that has stopped."""

from __future__ import annotations

import threading
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from queue import SimpleQueue
from typing import Any

CLOSE_LIMIT_S = 5.0


class Outbox:
    """Sends what is posted, in order, over ``pipe``. What a dead process does not take is forgotten."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._queue: SimpleQueue[memoryview | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._send, daemon=True, name="outbox")
        self._thread.start()

    def post(self, message: Any) -> None:
        """Send ``message`` when it is its turn. It is pickled here and now, so what cannot be raises here."""
        self._queue.put(ForkingPickler.dumps(message))

    def close(self) -> None:
        """End the thread. Call when the reader is dead: only then is a send that it blocks sure to return."""
        self._queue.put(None)
        self._thread.join(CLOSE_LIMIT_S)

    def _send(self) -> None:
        while (data := self._queue.get()) is not None:
            try:
                self._pipe.send_bytes(data)
            except OSError:
                return  # it died, as the listening thread hears once it has read all that it said
