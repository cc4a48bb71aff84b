"""Which process a run belongs to, and whether it still lives."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Any

HOST, PID, START, NAMESPACE = "process.host", "process.pid", "process.start", "process.namespace"
START_TOLERANCE_S = 5.0
"""How far two readings of one process's start may differ; a pid is not reused this fast."""


def process_tags() -> dict[str, str]:
    """The tags that identify this process: host, pid, start (Unix seconds) and pid namespace (containers)."""
    start = _start_of(os.getpid())
    return {
        HOST: socket.gethostname(),
        PID: str(os.getpid()),
        START: f"{start:.2f}" if start is not None else "",
        NAMESPACE: _namespace(),
    }


def is_dead(tags: Mapping[str, str]) -> bool | None:
    """Whether the process that ``tags`` names is gone; None where this host cannot tell (another host or container)."""
    if tags.get(HOST) != socket.gethostname() or tags.get(NAMESPACE, "") != _namespace():
        return None
    try:
        pid = int(tags[PID])
    except (KeyError, ValueError):
        return None
    if not _exists(pid):
        return True
    try:
        then, now = float(tags[START]), _start_of(pid)
    except (KeyError, ValueError):
        return False
    return now is not None and abs(now - then) > START_TOLERANCE_S


def mark_dead_runs(client: Any, experiment: str | None = None) -> list[str]:
    """Mark RUNNING runs of this host whose process is gone as FAILED, with the tag ``failure.reason``.

    ``client`` is an ``MlflowClient``; ``experiment`` a name, or None for every experiment of the store. Runs of
    other hosts are left alone. Returns the ids marked.
    """
    ids = _experiment_ids(client, experiment)
    if not ids:
        return []
    host = socket.gethostname().replace("'", "")
    where = f"attributes.status = 'RUNNING' AND tags.`{HOST}` = '{host}'"
    marked = []
    for run in search_all(client, ids, where):
        if is_dead(run.data.tags):
            client.set_tag(run.info.run_id, "failure.reason", f"process died (pid {run.data.tags[PID]})")
            client.set_terminated(run.info.run_id, status="FAILED")
            marked.append(run.info.run_id)
    return marked


def search_all(client: Any, experiment_ids: list[str], where: str = "") -> list[Any]:
    """All runs that match, through every page, newest first."""
    found: list[Any] = []
    token = None
    while True:
        page = client.search_runs(experiment_ids, where, max_results=1000, page_token=token)
        found.extend(page)
        token = page.token
        if not token:
            return found


def _experiment_ids(client: Any, experiment: str | None) -> list[str]:
    if experiment is None:
        return [found.experiment_id for found in client.search_experiments()]
    found = client.get_experiment_by_name(experiment)
    return [] if found is None else [found.experiment_id]


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return not _is_zombie(pid)


def _is_zombie(pid: int) -> bool:
    try:
        import psutil
    except ImportError:
        return False
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _start_of(pid: int) -> float | None:
    """When the process started (Unix seconds), or None where psutil is missing or may not look."""
    try:
        import psutil
    except ImportError:
        return None
    try:
        return float(psutil.Process(pid).create_time())
    except psutil.Error:
        return None


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
