"""The logger of a run: a Lightning Logger that writes ``RUN_DIR/spool.jsonl`` and uploads it to MLflow.

    log_metrics -> spool.jsonl -> (up to the last checkpoint) -> MLflow

Metric points reach MLflow when a checkpoint has made them final (:meth:`RunLogger.commit`) or when the run ends;
with ``live`` every ``flush_every`` steps. So a resumed run continues its MLflow run with exactly one point per step
(see :mod:`kl_comedy.tracking.mlflow_sync`). A store or a disk that fails is one warning, never an error in training.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import math
import os
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.loggers import Logger

from kl_comedy.io import atomic_write
from kl_comedy.tracking import mlflow_sync, store
from kl_comedy.tracking.mlflow_sync import SyncState
from kl_comedy.tracking.provenance import mark_dead_runs, process_tags
from kl_comedy.tracking.spool import Spool, json_safe

if TYPE_CHECKING:
    from kl_comedy.config.schema import TrackingConfig

log = logging.getLogger("kl_comedy.tracking")

STATUSES = ("FINISHED", "FAILED", "KILLED")
FIRST_RETRY_S, MAX_RETRY_S = 60.0, 900.0
"""After a failure the store is left alone for a minute, then twice as long each time, up to a quarter of an hour."""


class RunLogger(Logger):
    """Logs one run. Create it with :meth:`start` in the first process; the others take a :class:`NullLogger`."""

    def __init__(self, config: TrackingConfig, spool: Spool, state: SyncState, *, uri: str, live: bool) -> None:
        super().__init__()
        self._config, self._spool, self._state, self._uri, self._live = config, spool, state, uri, live
        self._client: Any = None
        self._committed = -math.inf
        self._steps_since_flush: set[int] = set()
        self._params: dict[str, str] = {}
        self._resume_step: int | None = None
        self._logged_at_resume_step: set[str] = set()
        self._retry_at, self._retry_s = 0.0, FIRST_RETRY_S
        self._warned: set[str] = set()
        self._finished = False

    @classmethod
    def start(
        cls,
        config: TrackingConfig,
        *,
        run_dir: Path | str,
        run_name: str,
        params: Mapping[str, Any],
        tags: Mapping[str, str],
        resume: bool = False,
        resume_step: int | None = None,
        live: bool = False,
    ) -> RunLogger:
        """Start logging the run in ``run_dir``, or with ``resume`` continue it.

        ``params`` is the flattened config. On resume everything logged beyond ``resume_step`` (None: everything)
        is dropped, because it will be computed again. Without ``resume`` an earlier spool in the folder is renamed.
        ``live``: upload before checkpoints make points final; for runs without checkpoints.
        Raises :class:`~kl_comedy.errors.UserError` for a ``tracking.uri`` that MLflow cannot use.
        """
        uri = store.check_uri(config.uri)
        spool = Spool(run_dir)
        state = SyncState(uri=store.redact(uri), experiment=config.experiment, run_name=run_name)
        resume = resume and spool.path.exists()
        if resume:
            state = _truncate(spool, state, resume_step)
        else:
            _rename_earlier_spool(spool)
        logger = cls(config, spool, state, uri=uri, live=live)
        state.save(spool.run_dir)
        start_tags: dict[str, str | None] = {**config.tags, **tags}
        if resume:
            start_tags |= logger._continue_from(resume_step, store.param_texts(params))
        else:
            start_tags[mlflow_sync.SPOOL_ID] = uuid.uuid4().hex
        logger.log_hyperparams(params)
        logger.set_tags({**start_tags, **process_tags()})
        logger._append("status", {"status": "RUNNING", "reason": None})
        if uri == store.NO_STORE:
            log.info("tracking to files only: %s", spool.path)
        logger._push()
        return logger

    @property
    def name(self) -> str:
        """The experiment."""
        return self._config.experiment

    @property
    def version(self) -> str:
        """The name of the run."""
        return self._state.run_name

    @property
    def save_dir(self) -> str:
        """The run's folder."""
        return str(self._spool.run_dir)

    @property
    def run_id(self) -> str | None:
        """The MLflow run, or None as long as MLflow has not been reached."""
        return self._state.run_id

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Record metric values of optimizer update ``step``. NaN and infinities are kept as such."""
        step = step or 0
        values = {store.clean_name(name): float(value) for name, value in metrics.items()}
        if step == self._resume_step:
            values = {name: value for name, value in values.items() if name not in self._logged_at_resume_step}
        if values:
            self._append("metrics", values, step=step)
        self._steps_since_flush.add(step)
        if len(self._steps_since_flush) >= self._config.flush_every:
            self._flush()

    def log_hyperparams(self, params: Mapping[str, Any] | argparse.Namespace, *args: Any, **kwargs: Any) -> None:
        """Record params as texts; one that has a value already keeps it, because MLflow allows no other."""
        texts = store.param_texts(vars(params) if isinstance(params, argparse.Namespace) else params)
        self._append("params", {key: text for key, text in texts.items() if key not in self._params})
        self._params = {**texts, **self._params}
        if any(len(text) > store.PARAM_VALUE_LIMIT for text in texts.values()):
            atomic_write(self._spool.run_dir / "params.json", json.dumps(texts, indent=1) + "\n")
            self.log_artifact(self._spool.run_dir / "params.json")

    def log_table(self, name: str, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Record rows (sampled completions, ...) as the JSON artifact ``tables/<name>/<step>.json``."""
        folder = f"tables/{store.clean_path(name)}"
        path = f"{folder}/{step}.json"
        content = json.dumps(json_safe(list(rows)), allow_nan=False, indent=1) + "\n"
        with self._warn_on_disk_failure():
            atomic_write(self._spool.run_dir / path, content)
            self._spool.append("table", {"name": name, "path": path, "folder": folder}, step=step)

    def log_artifact(self, path: Path | str, folder: str = "") -> None:
        """Record a file or directory of the run; it is read when it is uploaded, so leave it in place."""
        file, root = Path(path).absolute(), self._spool.run_dir.absolute()
        inside = file.is_relative_to(root)
        self._append("artifact", {"path": str(file.relative_to(root) if inside else file), "folder": folder})

    def set_tags(self, tags: Mapping[str, str | None]) -> None:
        """Set tags (None: delete); uploaded with the next flush."""
        texts = {key: None if value is None else store.redact(str(value)) for key, value in tags.items()}
        self._append("tags", {store.clean_name(key): text for key, text in texts.items()})

    def commit(self, step: int) -> None:
        """Declare that a checkpoint holds everything up to ``step``: those points are final and go to MLflow."""
        self._committed = max(step, self._committed)
        self._flush()

    def save(self) -> None:
        """Make what was logged survive a power cut."""
        with self._warn_on_disk_failure():
            self._spool.flush()

    def finalize(self, status: str) -> None:
        """Lightning's hook at the end of ``fit``. The run ends later, with :meth:`finish`, which has the reason."""
        self.save()

    def finish(self, status: str = "FINISHED", reason: str | None = None) -> None:
        """End the run: ``FINISHED``, ``FAILED`` or ``KILLED``, with the reason as tag ``failure.reason``. Sends all."""
        if self._finished:
            return
        if status not in STATUSES:
            raise ValueError(f"status {status!r}; allowed: {', '.join(STATUSES)}")
        self._finished = True
        if reason:
            self.set_tags({"failure.reason": reason})
        self._append("status", {"status": status, "reason": reason})
        self._committed = math.inf
        self._push()
        with self._warn_on_disk_failure():
            self._spool.close()

    def _continue_from(self, step: int | None, params: Mapping[str, str]) -> dict[str, str | None]:
        """Take over what the spool holds up to ``step``. Returns the tags of a resume."""
        events = self._spool.events()
        self._params = {key: text for event in events if event.kind == "params" for key, text in event.data.items()}
        resumes = sum(event.kind == "tags" and "resume.count" in event.data for event in events)
        tags = {"resume.count": str(resumes + 1), "resume.step": str(step), "failure.reason": None}
        before = {key: self._params.get(key, text) for key, text in params.items()}
        if changed := [f"{key}: {before[key]} -> {text}" for key, text in params.items() if before[key] != text]:
            tags["resume.params_changed"] = "; ".join(changed)
        if step is not None:
            self._committed, self._resume_step = step, step
            points = [event for event in events if event.kind == "metrics" and event.step == step]
            self._logged_at_resume_step = {name for event in points for name in event.data}
        return tags

    def _append(self, kind: str, data: Mapping[str, Any], *, step: int | None = None) -> None:
        with self._warn_on_disk_failure():
            self._spool.append(kind, data, step=step)

    def _flush(self) -> None:
        self.save()
        if self._live and self._steps_since_flush:
            self._committed = max(*self._steps_since_flush, self._committed)
        self._steps_since_flush.clear()
        if time.monotonic() >= self._retry_at:
            self._push()

    def _push(self) -> None:
        """Upload up to the committed step. Where the store fails, warn once and leave it alone for a while."""
        if self._uri == store.NO_STORE:
            return
        try:
            first_time = self._client is None
            if first_time:
                self._client = store.connect(self._uri)
            result = mlflow_sync.push(self._client, self._spool, self._state, self._uri, up_to=self._committed)
            self._state = result.state
            if first_time:
                mark_dead_runs(self._client, self._config.experiment)
        except Exception as error:
            self._retry_at = time.monotonic() + self._retry_s
            self._retry_s = min(2 * self._retry_s, MAX_RETRY_S)
            missing = isinstance(error, ImportError)
            problem = "mlflow is not installed" if missing else f"MLflow at {store.redact(self._uri)} fails"
            self._warn(
                "mlflow",
                f"{problem} ({store.first_line(error)}); the run continues and is recorded in {self._spool.path}; "
                f"upload it with: kl-comedy results sync {os.path.relpath(self._spool.run_dir)}",
            )
            return
        if result.missing:
            self._warn("missing", f"files gone before their upload: {', '.join(result.missing)}")
        if "mlflow" in self._warned:
            self._warned.discard("mlflow")
            self._retry_s = FIRST_RETRY_S
            log.warning("MLflow at %s answers again; what was spooled has been uploaded", store.redact(self._uri))

    @contextlib.contextmanager
    def _warn_on_disk_failure(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            message = f"cannot write in {self._spool.run_dir}: {store.first_line(error)}; training continues untracked"
            self._warn("disk", message)

    def _warn(self, topic: str, message: str) -> None:
        if topic not in self._warned:
            self._warned.add(topic)
            log.warning(message)


def _truncate(spool: Spool, new: SyncState, resume_step: int | None) -> SyncState:
    """Drop what comes after ``resume_step`` from the spool. Returns the state with which the upload continues.

    Where points beyond ``resume_step`` may already be in MLflow, that is a new MLflow run in place of the old one.
    """
    last_step = -math.inf if resume_step is None else resume_step
    unchanged = spool.truncate_after(last_step)
    state = SyncState.load(spool.run_dir)
    if state is None or (state.uri, state.experiment) != (new.uri, new.experiment):
        return new
    if state.run_id is not None and state.mirrored_step is not None and state.mirrored_step > last_step:
        message = "MLflow run %s holds points beyond step %s; a new run takes its place, filled from the spool"
        log.warning(message, state.run_id, resume_step or 0)
        return replace(new, replaced=(*state.replaced, state.run_id))
    return replace(state, run_name=new.run_name, offset=min(state.offset, unchanged))


def _rename_earlier_spool(spool: Spool) -> None:
    """Keep an earlier run's spool and state in this folder under another name."""
    if not spool.path.exists():
        return
    number = 1 + len(list(spool.run_dir.glob("spool.*.jsonl")))
    for path in (spool.path, spool.run_dir / "tracking.json"):
        if path.exists():
            path.rename(path.with_name(f"{path.stem}.{number}{path.suffix}"))
    log.warning("%s held an earlier run; its spool is now spool.%s.jsonl", spool.run_dir, number)


class NullLogger(Logger):
    """The logger of processes other than the first: accepts every call of :class:`RunLogger` and does nothing."""

    name = version = run_id = None

    def _ignore(self, *args: Any, **kwargs: Any) -> None: ...

    log_metrics = log_hyperparams = log_table = log_artifact = set_tags = commit = finish = _ignore
