"""The logger of a run: a Lightning Logger that writes ``RUN_DIR/spool.jsonl`` and uploads it to MLflow.

    log_metrics -> spool.jsonl -> (up to the last checkpoint) -> MLflow

Metric points reach MLflow when a checkpoint has made them final (:meth:`RunLogger.commit`) or when the run has
finished; with ``live`` every ``flush_every`` steps. Of a run that ends early what came after its last checkpoint stays
in the spool, since a resumed run computes it again. So a resumed run continues its MLflow run with exactly one point
per step (see :mod:`kl_comedy.tracking.spool`). A store or a disk that fails is one warning, never an error in training.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import math
import os
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.loggers import Logger

from kl_comedy.io import atomic_write, sha256_file
from kl_comedy.redaction import redact
from kl_comedy.tracking import spool, store
from kl_comedy.tracking.provenance import mark_dead_runs, process_tags
from kl_comedy.tracking.spool import Spool, SyncState

if TYPE_CHECKING:
    from kl_comedy.config.schema import TrackingConfig

log = logging.getLogger("kl_comedy.tracking")

STATUSES = ("FINISHED", "FAILED", "KILLED")
FIRST_RETRY_S, MAX_RETRY_S = 60.0, 900.0
"""After a failure the store is left alone for a minute, then twice as long each time, up to a quarter of an hour."""


class RunLogger(Logger):
    """Logs the run in ``run_dir``, or with ``resume`` continues it. Only the first process has one; the others take a
    :class:`NullLogger`.

    ``params`` is the flattened config. On resume everything logged beyond ``resume_step`` (None: everything) is
    dropped, because it will be computed again. Without ``resume`` an earlier spool in the folder is renamed. ``live``:
    upload before checkpoints make points final; for runs without checkpoints. Raises
    :class:`~kl_comedy.errors.UserError` for a ``tracking.uri`` that MLflow cannot use.
    """

    def __init__(
        self,
        config: TrackingConfig,
        *,
        run_dir: Path | str,
        run_name: str,
        params: Mapping[str, Any],
        tags: Mapping[str, str],
        resume: bool = False,
        resume_step: int | None = None,
        live: bool = False,
    ) -> None:
        super().__init__()
        self._config, self._live, self._uri = config, live, store.check_uri(config.uri)
        self._spool = Spool(run_dir)
        self._state = SyncState(uri=self._uri, experiment=config.experiment, run_name=run_name)
        self._client: Any = None
        self._committed = -math.inf
        self._steps_since_flush: set[int] = set()
        self._params: dict[str, str] = {}
        self._logged_already: set[tuple[int | None, str]] = set()
        self._retry_at, self._retry_s = 0.0, FIRST_RETRY_S
        self._warned: set[str] = set()
        self._finished = False
        if resume and self._spool.path.exists():
            start_tags = self._resume(resume_step, store.param_texts(params))
        else:
            start_tags = {spool.SPOOL_ID: uuid.uuid4().hex}
            self._rename_earlier_spool()
        self._state.save(self._spool.run_dir)
        self.log_hyperparams(params)
        self.set_tags({**config.tags, **tags, **start_tags, **process_tags()})
        self._append("status", {"status": "RUNNING", "reason": None})
        if self._uri == store.NO_STORE:
            log.info("tracking to files only: %s", self._spool.path)
        self._push()

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
        """The MLflow run; None before it exists, and where the store was a file that is gone."""
        file = store.sqlite_file(self._state.uri)
        return self._state.run_id if file is None or file.exists() else None

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Record metric values of optimizer update ``step``. NaN and infinities are recorded as such."""
        step = step or 0
        values = {store.clean_name(name): float(value) for name, value in metrics.items()}
        values = {name: value for name, value in values.items() if (step, name) not in self._logged_already}
        if values:
            self._append("metrics", values, step)
        self._steps_since_flush.add(step)
        if len(self._steps_since_flush) >= self._config.flush_every:
            self._flush()

    def log_hyperparams(self, params: Mapping[str, Any] | argparse.Namespace, *args: Any, **kwargs: Any) -> None:
        """Record params as texts; of one that has a value already the first stays: MLflow allows no other."""
        texts = store.param_texts(vars(params) if isinstance(params, argparse.Namespace) else params)
        self._append("params", {key: text for key, text in texts.items() if key not in self._params})
        self._params = {**texts, **self._params}
        if any(len(text) > store.PARAM_VALUE_LIMIT for text in texts.values()):
            atomic_write(self._spool.run_dir / "params.json", json.dumps(texts, indent=1) + "\n")
            self.log_artifact(self._spool.run_dir / "params.json")

    def log_table(self, name: str, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Record rows (sampled completions, ...) as the JSON artifact ``tables/<name>/<step>.json``."""
        folder = f"tables/{store.clean_path(name)}"
        path, content = f"{folder}/{step}.json", json.dumps(spool.json_safe(list(rows)), allow_nan=False, indent=1)
        with self._warn_on_disk_failure():
            file = self._spool.run_dir / path
            atomic_write(file, content + "\n")
            self._spool.append(
                "table", {"name": name, "path": path, "folder": folder, "sha256": sha256_file(file)}, step
            )

    def log_artifact(self, path: Path | str, folder: str = "") -> None:
        """Record a file or directory of the run; it is read when it is uploaded, so leave it in place.

        One outside the run's folder is copied into its folder ``files``.
        """
        file, root = Path(path).absolute(), self._spool.run_dir.absolute()
        with self._warn_on_disk_failure():
            if not file.is_relative_to(root):
                copy = root / "files" / store.clean_path(file.name)
                copy.parent.mkdir(parents=True, exist_ok=True)
                if file.is_dir():
                    shutil.copytree(file, copy, dirs_exist_ok=True)
                elif file.exists():
                    shutil.copy(file, copy)
                file = copy
            digest = {"sha256": sha256_file(file)} if file.is_file() else {}
            self._spool.append("artifact", {"path": str(file.relative_to(root)), "folder": folder, **digest})

    def set_tags(self, tags: Mapping[str, str | None]) -> None:
        """Set tags (None: delete); uploaded with the next flush."""
        texts = {key: None if value is None else redact(str(value), key) for key, value in tags.items()}
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
        """End the run: ``FINISHED``, ``FAILED`` or ``KILLED``, with the reason as tag ``failure.reason``.

        Sends everything, but of a run that may be resumed from a checkpoint what that holds.
        """
        if status not in STATUSES:
            raise ValueError(f"status {status!r}; allowed: {', '.join(STATUSES)}")
        if self._finished:
            return
        self._finished = True
        reason = None if reason is None else redact(reason)
        if reason:
            self.set_tags({"failure.reason": reason})
        self._append("status", {"status": status, "reason": reason})
        resumable = status != "FINISHED" and not self._live and self._committed > -math.inf
        if resumable:
            self._say_what_stays()
        else:
            self._committed = math.inf
        self._push()
        with self._warn_on_disk_failure():
            self._spool.close()

    def _say_what_stays(self) -> None:
        """MLflow cannot delete a point: a resumed run that had sent these would need a new MLflow run."""
        steps = sorted({event.step or 0 for event in self._spool.read() if event.is_after(self._committed)})
        if steps and self._uri != store.NO_STORE:
            log.warning(
                "points after the checkpoint of update %.0f (to update %s) are in %s alone; a resumed run computes "
                "them again, and kl-comedy results sync %s uploads them",
                *(self._committed, steps[-1], self._spool.path, os.path.relpath(self._spool.run_dir)),
            )

    def _resume(self, step: int | None, params: Mapping[str, str]) -> dict[str, str | None]:
        """Drop what comes after ``step`` from the spool and take over the rest. Returns the tags of a resume.

        Where points beyond ``step`` may already be in MLflow, a new MLflow run takes the place of the old one.
        """
        last_step = -math.inf if step is None else step
        unchanged = self._spool.truncate_after(last_step)
        self._warn_of_damage(step)
        state = SyncState.load(self._spool.run_dir)
        replaced: dict[str, str | None] = {}
        if state is not None and state.same_place(self._state):
            if state.run_id is not None and state.mirrored_step is not None and state.mirrored_step > last_step:
                message = "MLflow run %s holds points beyond step %s; a new run takes its place, filled from the spool"
                log.warning(message, state.run_id, step or 0)
                self._state = replace(self._state, replaced=(*state.replaced, state.run_id))
                replaced = {"resume.replaces": state.run_id}
            else:
                self._state = replace(state, run_name=self.version, offset=min(state.offset, unchanged))
        events = self._spool.read()
        self._params = spool.merged(events, "params")
        resumes = sum(event.kind == "tags" and "resume.count" in event.data for event in events)
        tags = {"resume.count": str(resumes + 1), "resume.step": str(step), "failure.reason": None, **replaced}
        before = {**params, **self._params}
        if changed := [f"{key}: {before[key]} -> {text}" for key, text in params.items() if before[key] != text]:
            tags["resume.params_changed"] = "; ".join(changed)
        if step is not None:
            self._committed = step
            points = [event for event in events if event.kind == "metrics" and event.step == step]
            self._logged_already = {(step, name) for event in points for name in event.data}
        return tags

    def _warn_of_damage(self, step: int | None) -> None:
        """Say what of the record up to ``step`` cannot be read any more."""
        events = self._spool.read()
        if lost := spool.lost_lines(events):
            log.warning("%s is damaged: %s lines cannot be read and are left out", self._spool.path, lost)
        last = max((event.step or 0 for event in events if event.kind == "metrics"), default=0)
        if last < (step or 0):
            log.warning("%s ends at update %s: the points up to update %s are lost", self._spool.path, last, step)

    def _rename_earlier_spool(self) -> None:
        """An earlier run's spool and state in this folder get another name."""
        folder, path = self._spool.run_dir, self._spool.path
        if path.exists():
            number = 1 + len(list(folder.glob("spool.*.jsonl")))
            for file in filter(Path.exists, (path, folder / "tracking.json")):
                file.rename(file.with_name(f"{file.stem}.{number}{file.suffix}"))
            log.warning("%s contains an earlier run; its spool is now spool.%s.jsonl", folder, number)

    def _append(self, kind: str, data: Mapping[str, Any], step: int | None = None) -> None:
        with self._warn_on_disk_failure():
            self._spool.append(kind, data, step)

    def _flush(self) -> None:
        self.save()
        if self._live:
            self._committed = max(self._steps_since_flush | {self._committed})
        self._steps_since_flush.clear()
        if time.monotonic() >= self._retry_at:
            self._push()

    def _push(self) -> None:
        """Upload up to the committed step. Where the store fails, warn once and leave it alone for a while."""
        if self._uri == store.NO_STORE:
            return
        try:
            first_time = self._client is None
            self._client = self._client or store.connect(self._uri)
            result = spool.push(self._client, self._spool, self._state, self._uri, up_to=self._committed)
            self._state = result.state
            if first_time:
                mark_dead_runs(self._client, self._config.experiment)
        except Exception as error:
            self._retry_at = time.monotonic() + self._retry_s
            self._retry_s = min(2 * self._retry_s, MAX_RETRY_S)
            no_mlflow = isinstance(error, ImportError)
            problem = "mlflow is not installed" if no_mlflow else f"MLflow at {self._state.uri} fails"
            self._warn(
                "mlflow",
                f"{problem} ({store.first_line(error)}); the run continues and is recorded in {self._spool.path}; "
                f"upload it with: kl-comedy results sync {os.path.relpath(self._spool.run_dir)}",
            )
            return
        if result.left_out:
            self._warn("files", f"not uploaded: {', '.join(result.left_out)}")
        if "mlflow" in self._warned:
            self._warned.discard("mlflow")
            self._retry_s = FIRST_RETRY_S
            log.warning("MLflow at %s answers again; what was spooled has been uploaded", self._state.uri)

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


class NullLogger(Logger):
    """The logger of processes other than the first: accepts every call of :class:`RunLogger` and does nothing."""

    name = version = run_id = None

    def _ignore(self, *args: Any, **kwargs: Any) -> None: ...

    log_metrics = log_hyperparams = log_table = log_artifact = set_tags = commit = finish = _ignore
