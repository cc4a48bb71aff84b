"""The tracker of processes that do not track: the first of a run does."""

from __future__ import annotations

from typing import Any

from kl_comedy.tracking import Tracker


class Untracked(Tracker):
    """Takes what a tracker takes and keeps nothing."""

    def __init__(self) -> None:
        """Nothing is opened."""

    @classmethod
    def start(cls, *args: Any, **options: Any) -> Tracker:
        return cls()

    @property
    def run_id(self) -> str | None:
        return None

    def log(self, *args: Any, **options: Any) -> None: ...

    def table(self, *args: Any, **options: Any) -> None: ...

    def artifact(self, *args: Any, **options: Any) -> None: ...

    def tags(self, *args: Any, **options: Any) -> None: ...

    def commit(self, *args: Any, **options: Any) -> None: ...

    def finish(self, *args: Any, **options: Any) -> None: ...
