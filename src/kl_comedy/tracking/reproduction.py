"""Is it the same run again? What differs between a stored run and here, and between its final metrics and new ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kl_comedy.errors import UserError
from kl_comedy.tracking import store
from kl_comedy.tracking.spool import Spool

NEAR = 1e-3
"""Relative difference up to which two values count as near."""

WALL_CLOCK = ("time/",)
"""Metrics that measure the machine, not the run."""

PLACE = ("git.", "version.", "host.")


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A final metric: was, now, and ``equal`` (to the bit), ``near``, ``different``,
    ``absent`` (the new run lacks it) or ``new`` (the old run lacked it: newer code measures more)."""

    metric: str
    was: float | None
    now: float | None
    verdict: str


def find_run(uri: str, run: str) -> Any:
    """The run with this id, or the only one whose id or name begins so. Raises :class:`UserError`."""
    from kl_comedy.tracking.queries import runs_frame

    client = store.open_existing(uri)
    frame = runs_frame(uri)
    if frame.empty:
        raise UserError(f"no runs in {uri}")
    hits = frame[frame["run_id"].str.startswith(run) | (frame["run_name"] == run)]["run_id"]
    if len(hits) != 1:
        raise UserError(f"RUN: got {run!r}, which {len(hits)} runs of the store answer to; `kl-comedy results export`")
    return client.get_run(hits.iloc[0])


def stored_config(uri: str, run: Any, folder: Path) -> Path:
    """The run's resolved config, fetched into ``folder``. Raises :class:`UserError` where the run kept none."""
    client = store.open_existing(uri)
    try:
        return Path(client.download_artifacts(run.info.run_id, "config/config.yaml", str(folder)))
    except Exception as error:
        raise UserError(
            f"run {run.info.run_id} has no config that can be fetched ({store.brief(error)}); "
            "runs keep it when they end"
        ) from error


def place_differences(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Commit, change, packages and machine, where they are not what they were: ``name: then -> now``."""
    names = sorted({name for name in (*then, *now) if name.startswith(PLACE) and not name.startswith("host.gpus.")})
    return [
        f"{name}: {then.get(name, '-')} -> {now.get(name, '-')}" for name in names if then.get(name) != now.get(name)
    ]


def final_metrics(run_dir: Path) -> dict[str, float]:
    """The last value of each metric in a run folder's spool."""
    last: dict[str, tuple[int, float]] = {}
    for event in Spool(run_dir).events():
        if event.kind == "metrics" and event.step is not None:
            for name, value in event.data.items():
                if name not in last or event.step >= last[name][0]:
                    last[name] = (event.step, float(value))
    return {name: value for name, (_, value) in last.items()}


def compare_metrics(was: Mapping[str, float], now: Mapping[str, float], near: float = NEAR) -> list[Compared]:
    """Every metric of either side but the wall clock's, the worst first.

    >>> [item.verdict for item in compare_metrics({"a": 1.0, "b": 1.0, "c": 1.0}, {"a": 1.0, "b": 1.0001})]
    ['absent', 'near', 'equal']
    """
    found = []
    for name in sorted({*was, *now}):
        if not name.startswith(WALL_CLOCK):
            found.append(
                Compared(metric=name, was=was.get(name), now=now.get(name), verdict=_judge(was, now, name, near))
            )
    return sorted(found, key=lambda item: ("absent", "different", "near", "new", "equal").index(item.verdict))


def _judge(was: Mapping[str, float], now: Mapping[str, float], name: str, near: float) -> str:
    if name not in was:
        return "new"
    if name not in now:
        return "absent"
    old, new = was[name], now[name]
    if old == new or (math.isnan(old) and math.isnan(new)):
        return "equal"
    return "near" if math.isclose(old, new, rel_tol=near, abs_tol=near * 1e-3) else "different"
