"""The logger of a run: a Lightning Logger that writes ``RUN_DIR/spool.jsonl`` and uploads it to MLflow.

    log_metrics -> spool.jsonl -> (up to the last checkpoint) -> MLflow

Metric points reach MLflow when a checkpoint has made them final (:meth:`RunLogger.commit`) or when the run ends;
with ``live`` every ``flush_every`` steps. So a resumed run continues its MLflow run with exactly one point per step
(see :mod:`kl_comedy.tracking.mlflow_sync`). A store or a disk that fails is one warning, never an error in training.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
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
        self._logged_before_resume: tuple[int | None, set[str]] = (None, set())
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
        if resume and resume_step is not None:
            points = [event for event in spool.events() if event.kind == "metrics" and event.step == resume_step]
            logger._committed = resume_step
            logger._logged_before_resume = (resume_step, {name for event in points for name in event.data})
        state.save(spool.run_dir)
        logger._log_start(params, {**config.tags, **tags}, resume=resume, resume_step=resume_step)
        if uri == store.NO_STORE:
            log.info("tracking to files only: %s", spool.path)
        elif logger._push(force=True):
            logger._warn_on_store_failure(lambda: mark_dead_runs(logger._client, config.experiment))
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
        resumed_at, logged = self._logged_before_resume
        values = {store.clean_name(name): float(value) for name, value in metrics.items()}
        if step == resumed_at:
            values = {name: value for name, value in values.items() if name not in logged}
        if values:
            self._append("metrics", values, step=step)
        self._steps_since_flush.add(step)
        if len(self._steps_since_flush) >= self._config.flush_every:
            self._flush()

    def log_hyperparams(self, params: Mapping[str, Any] | argparse.Namespace, *args: Any, **kwargs: Any) -> None:
        """Record params as texts; one that has a value already keeps it, because MLflow allows no other."""
        texts = store.param_texts(vars(params) if isinstance(params, argparse.Namespace) else params)
        known = self._known_params()
        self._append("params", {key: text for key, text in texts.items() if key not in known})
        if any(len(text) > store.PARAM_VALUE_LIMIT for text in texts.values()):
            atomic_write(self._spool.run_dir / "params.json", json.dumps(texts, indent=1) + "\n")
            self.log_artifact(self._spool.run_dir / "params.json")

    def log_table(self, name: str, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Record rows (sampled completions, ...) as the JSON artifact ``tables/<name>/<step>.json``."""
        folder = f"tables/{store.clean_path(name)}"
        path = f"{folder}/{step}.json"
        try:
            atomic_write(
                self._spool.run_dir / path, json.dumps(json_safe(list(rows)), allow_nan=False, indent=1) + "\n"
            )
        except OSError as error:
            self._warn(
                "disk", f"cannot write {self._spool.run_dir / path}: {store.first_line(error)}; training goes on"
            )
            return
        self._append("table", {"name": name, "path": path, "folder": folder}, step=step)

    def log_artifact(self, path: Path | str, folder: str = "") -> None:
        """Record a file or directory of the run; it is read when it is uploaded, so leave it in place."""
        file, root = Path(path).absolute(), self._spool.run_dir.absolute()
        inside = file.is_relative_to(root)
        self._append("artifact", {"path": str(file.relative_to(root) if inside else file), "folder": folder})

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Set tags; uploaded with the next flush."""
        self._append("tags", {store.clean_name(key): store.redact(str(value)) for key, value in tags.items()})

    def commit(self, step: int) -> None:
        """Declare that a checkpoint holds everything up to ``step``: those points are final and go to MLflow."""
        self._committed = max(step, self._committed)
        self._flush()

    def save(self) -> None:
        """Make what was logged survive a power cut."""
        try:
            self._spool.flush()
        except OSError as error:
            self._warn("disk", f"cannot write {self._spool.path}: {store.first_line(error)}")

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
        self._push(force=True)
        try:
            self._spool.close()
        except OSError as error:
            self._warn("disk", f"cannot close {self._spool.path}: {store.first_line(error)}")

    def _known_params(self) -> dict[str, str]:
        return {
            key: text for event in self._spool.events() if event.kind == "params" for key, text in event.data.items()
        }

    def _log_start(
        self, params: Mapping[str, Any], tags: Mapping[str, str], *, resume: bool, resume_step: int | None
    ) -> None:
        """Write params, tags, the process and status RUNNING."""
        start_tags: dict[str, Any] = {store.clean_name(key): store.redact(str(text)) for key, text in tags.items()}
        start_tags |= process_tags()
        if resume:
            known = self._known_params()
            texts = store.param_texts(params)
            changed = [f"{key}: {known[key]} -> {text}" for key, text in texts.items() if known.get(key, text) != text]
            if changed:
                start_tags["resume.params_changed"] = "; ".join(changed)
            resumes = sum(event.kind == "tags" and "resume.count" in event.data for event in self._spool.events())
            start_tags |= {"resume.count": str(resumes + 1), "resume.step": str(resume_step), "failure.reason": None}
        else:
            start_tags[mlflow_sync.SPOOL_ID] = uuid.uuid4().hex
        self.log_hyperparams(params)
        self._append("tags", start_tags)
        self._append("status", {"status": "RUNNING", "reason": None})

    def _append(self, kind: str, data: Mapping[str, Any], *, step: int | None = None) -> None:
        try:
            self._spool.append(kind, data, step=step)
        except OSError as error:
            message = f"cannot write {self._spool.path}: {store.first_line(error)}; training continues untracked"
            self._warn("disk", message)

    def _flush(self) -> None:
        self.save()
        if self._live and self._steps_since_flush:
            self._committed = max(*self._steps_since_flush, self._committed)
        self._steps_since_flush.clear()
        self._push()

    def _push(self, *, force: bool = False) -> bool:
        """Upload up to the committed step unless the store failed a moment ago. True when it worked."""
        if self._uri == store.NO_STORE or (not force and time.monotonic() < self._retry_at):
            return False
        return self._warn_on_store_failure(self._push_now)

    def _push_now(self) -> None:
        if self._client is None:
            self._client = store.connect(self._uri)
        result = mlflow_sync.push(self._client, self._spool, self._state, self._uri, up_to=self._committed)
        self._state = result.state
        if result.missing:
            self._warn("missing", f"files gone before their upload: {', '.join(result.missing)}")
        if "mlflow" in self._warned:
            self._warned.discard("mlflow")
            self._retry_s = FIRST_RETRY_S
            log.warning("MLflow at %s answers again; what was spooled has been uploaded", store.redact(self._uri))

    def _warn_on_store_failure(self, action: Callable[[], Any]) -> bool:
        """Run ``action``. Where the store fails, warn once, leave the store alone for a while and return False."""
        try:
            action()
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
            return False
        return True

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
    suffix = time.strftime("%Y%m%d-%H%M%S", time.localtime(spool.path.stat().st_mtime))
    for path in (spool.path, spool.run_dir / "tracking.json"):
        target, number = path.with_name(f"{path.stem}.{suffix}{path.suffix}"), 1
        while target.exists():
            number += 1
            target = path.with_name(f"{path.stem}.{suffix}-{number}{path.suffix}")
        if path.exists():
            path.rename(target)
    log.warning("%s held an earlier run; its spool is now spool.%s.jsonl", spool.run_dir, suffix)


class NullLogger(Logger):
    """The logger of processes other than the first: accepts every call of :class:`RunLogger` and does nothing."""

    name = version = run_id = None

    def _ignore(self, *args: Any, **kwargs: Any) -> None: ...

    log_metrics = log_hyperparams = log_table = log_artifact = set_tags = commit = finish = _ignore
