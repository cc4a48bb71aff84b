"""The logger of a run: a Lightning Logger that writes ``RUN_DIR/spool.jsonl``, which is uploaded to MLflow.

    log_metrics -> Spool (spool.jsonl) -> Uploader (up to the last checkpoint) -> MLflow

Metric points reach MLflow when a checkpoint has made them final (:meth:`RunLogger.commit`) or when the run has
finished; with ``live`` every :data:`FLUSH_EVERY` steps. When a run ends early, what came after its last checkpoint
stays in the spool, because a resumed run computes it again. So a resumed run continues its MLflow run with exactly one
point per step (see :mod:`kl_comedy.tracking.upload`). A store or a disk that fails is one warning, never an error in
training.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import math
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.loggers import Logger

from kl_comedy.io import atomic_write, read_file
from kl_comedy.redaction import redact
from kl_comedy.tracking import store
from kl_comedy.tracking.provenance import FOLDER, NOTE, page_tags, process_tags
from kl_comedy.tracking.spool import Event, Spool, merged, unreadable_lines
from kl_comedy.tracking.upload import SPOOL_ID, SyncState, Uploader, run_name

if TYPE_CHECKING:
    from kl_comedy.config.schema import TrackingConfig

log = logging.getLogger("kl_comedy.tracking")

STATUSES = ("FINISHED", "FAILED", "KILLED")
"""MLflow's words for how a run ended; it refuses others."""

FLUSH_EVERY = 10
"""Steps between writes to disk and store: a power failure loses the points since the last one."""


@dataclass(frozen=True, kw_only=True)
class ResumedFrom:
    """The checkpoint from which a run continues."""

    step: int | None
    """Its optimizer update; None where the run starts again because it has no checkpoint."""


class RunLogger(Logger):
    """Logs the run in ``run_dir``, or with ``resumed`` continues it. Only the run's first process has one; the others
    take a :class:`NullLogger`.

    In the store the run has the name of its config, with the seed. ``params`` is the flattened config. Tags for
    MLflow's pages, as the description, yield to the user's (``tracking.tags``). On resume everything logged after the
    checkpoint is dropped, because it will be computed again. Without ``resumed`` an earlier spool in the folder is
    renamed. ``live`` uploads before checkpoints make points final; it is for runs without checkpoints. Raises
    :class:`~kl_comedy.errors.UserError` for a ``tracking.uri`` that MLflow cannot use.
    """

    def __init__(
        self,
        config: TrackingConfig,
        *,
        run_dir: Path | str,
        params: Mapping[str, Any],
        tags: Mapping[str, str],
        resumed: ResumedFrom | None = None,
        live: bool = False,
    ) -> None:
        super().__init__()
        self._config = config
        self._live = live
        uri = store.check_uri(config.uri)
        self._spool = Spool(run_dir)
        name = run_name(params, self._spool.run_dir.name)
        self._uploader = Uploader(self._spool, SyncState(uri=uri, experiment=config.experiment, run_name=name))
        self._steps_since_flush: set[int] = set()
        self._params: dict[str, str] = {}
        self._logged_before_resume: set[tuple[int, str]] = set()
        self._is_described = False
        self._disk_failed = False
        self._finished = False
        # A run that was stopped before its first event has no spool to continue.
        if resumed is not None and self._spool.path.exists():
            start_tags = self._resume(resumed.step, store.param_texts(params))
        else:
            start_tags = self._start()
        self._uploader.state.save(self._spool.run_dir)
        self.log_hyperparams(params)
        self.set_tags({**config.tags, **self._tags(tags), **start_tags, **process_tags()})
        self._append("status", {"status": "RUNNING", "reason": None})
        if self._uploader.to_files_only:
            log.info("tracking to files only: %s", self._spool.path)
        # The MLflow run exists from the start, so that a run that is still in its first updates can be found.
        self._uploader.push()

    @property
    def name(self) -> str:
        """The experiment."""
        return self._config.experiment

    @property
    def version(self) -> str:
        """The name of the run's folder."""
        return self._spool.run_dir.name

    @property
    def save_dir(self) -> str:
        """The run's folder."""
        return str(self._spool.run_dir)

    @property
    def run_id(self) -> str | None:
        """The MLflow run; None before it exists, and when the store was a file that is gone."""
        state = self._uploader.state
        file = store.sqlite_file(state.uri)
        if file is not None and not file.exists():
            return None
        return state.run_id

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Record metric values of optimizer update ``step``. NaN and infinities are recorded as such."""
        step = step or 0
        values = {}
        for name, value in metrics.items():
            clean_name = store.clean_name(name)
            # A resumed run may evaluate the checkpoint's own step again; MLflow would show both points.
            if (step, clean_name) not in self._logged_before_resume:
                values[clean_name] = float(value)
        if values:
            self._append("metrics", values, step)
        self._steps_since_flush.add(step)
        if len(self._steps_since_flush) >= FLUSH_EVERY:
            self._flush()

    def log_hyperparams(self, params: Mapping[str, Any] | argparse.Namespace, *args: Any, **kwargs: Any) -> None:
        """Record params as texts. A param that has a value already keeps it, because MLflow allows no other."""
        if isinstance(params, argparse.Namespace):
            params = vars(params)
        texts = store.param_texts(params)
        self._append("params", {key: text for key, text in texts.items() if key not in self._params})
        self._params = {**texts, **self._params}
        longest = max((len(text) for text in texts.values()), default=0)
        if longest > store.PARAM_VALUE_LIMIT:
            # MLflow gets these texts shortened, so the whole ones go along as a file.
            file = self._spool.run_dir / "params.json"
            atomic_write(file, json.dumps(texts, indent=1) + "\n")
            self.log_artifact(file)

    def log_table(self, name: str, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Record rows (sampled completions, ...) as the JSON artifact ``tables/<name>/<step>.json``."""
        with self._warn_on_disk_failure():
            self._spool.add_table(name, rows, step)

    def log_artifact(self, path: Path | str, folder: str = "") -> None:
        """Record a file or directory of the run; it is read when it is uploaded, so leave it in place.

        One outside the run's folder is copied into its folder ``files``.
        """
        with self._warn_on_disk_failure():
            self._spool.add_artifact(path, folder)

    def set_tags(self, tags: Mapping[str, str | None]) -> None:
        """Set tags (None: delete); uploaded with the next flush."""
        texts: dict[str, str | None] = {}
        for key, value in tags.items():
            text = None
            if value is not None:
                # In the spool already, because it is uploaded and may be given to others.
                text = redact(str(value), key)
            texts[store.clean_name(key)] = text
        self._append("tags", texts)

    def commit(self, step: int) -> None:
        """Declare that a checkpoint holds everything up to ``step``: those points are final and go to MLflow."""
        # A second commit of an earlier step takes nothing back: its points may be in MLflow.
        self._uploader.committed_step = max(step, self._uploader.committed_step)
        self._flush()

    def save(self) -> None:
        """Make what was logged survive a power failure."""
        with self._warn_on_disk_failure():
            self._spool.flush()

    def finalize(self, status: str) -> None:
        """Lightning's hook at the end of ``fit``. The run ends later, with :meth:`finish`, which has the reason."""
        self.save()

    def finish(self, status: str = "FINISHED", reason: str | None = None) -> None:
        """End the run as ``FINISHED``, ``FAILED`` or ``KILLED``, with the reason as tag ``failure.reason``.

        That of a finished run, which a callback stopped, is the tag ``stop.reason``.

        Everything is uploaded, except after the last checkpoint of a run that may be resumed. Raises ValueError for
        another status.
        """
        if status not in STATUSES:
            raise ValueError(f"status {status!r}; allowed: {', '.join(STATUSES)}")
        # A run ends once; the first call has the reason.
        if self._finished:
            return
        self._finished = True
        if reason is not None:
            # A reason quotes an error, whose text may hold anything.
            reason = redact(reason)
        if reason:
            tag = "stop.reason" if status == "FINISHED" else "failure.reason"
            self.set_tags({tag: reason})
        self._append("status", {"status": status, "reason": reason})
        if self._is_resumable(status):
            self._warn_of_points_not_uploaded()
        else:
            self._uploader.committed_step = math.inf
        self._uploader.push()
        with self._warn_on_disk_failure():
            self._spool.close()

    def _tags(self, tags: Mapping[str, str]) -> dict[str, str]:
        """``tags``, the folder's name, and what MLflow's pages show, without what is the user's to say."""
        all_tags = {FOLDER: self._spool.run_dir.name, **page_tags(), **tags}
        for key in self._config.tags:
            if key.startswith("mlflow."):
                all_tags.pop(key, None)
        if self._is_described:
            # Since the first start somebody may have written another description in MLflow's pages.
            all_tags.pop(NOTE, None)
        return all_tags

    def _start(self) -> dict[str, str | None]:
        """Begin an empty spool. Returns the tags of a new run."""
        renamed_spool = self._spool.rename_earlier()
        if renamed_spool is not None:
            folder = self._spool.run_dir
            log.warning("%s contains an earlier run; its spool is now %s", folder, renamed_spool.name)
        return {SPOOL_ID: uuid.uuid4().hex}

    def _warn_of_points_not_uploaded(self) -> None:
        # MLflow cannot delete a point: a resumed run whose MLflow run had these points would need a new MLflow run.
        committed_step = self._uploader.committed_step
        steps = [event.step or 0 for event in self._spool.read() if event.is_after(committed_step)]
        if not steps or self._uploader.to_files_only:
            return
        log.warning(
            "points after the checkpoint of update %.0f (to update %s) are in %s alone; a resumed run computes them "
            "again, and kl-comedy results sync %s uploads them",
            committed_step,
            max(steps),
            self._spool.path,
            os.path.relpath(self._spool.run_dir),
        )

    def _is_resumable(self, status: str) -> bool:
        """Whether a later process may continue the run, and compute its last points again."""
        has_checkpoint = self._uploader.committed_step > -math.inf
        return status != "FINISHED" and has_checkpoint and not self._live

    def _resume(self, step: int | None, params: Mapping[str, str]) -> dict[str, str | None]:
        """Drop what comes after ``step`` from the spool and take over the rest. Returns the tags of a resume."""
        last_step = -math.inf
        if step is not None:
            last_step = step
        unchanged_bytes = self._spool.truncate_after(last_step)
        events = self._spool.read()
        self._warn_of_damage(events, step)
        replaced_run = self._take_over_state(last_step, unchanged_bytes)
        self._params = merged(events, "params")
        self._is_described = NOTE in merged(events, "tags")
        if step is not None:
            self._uploader.committed_step = step
            self._logged_before_resume = {(step, name) for name in _metrics_at(events, step)}

        # Counted from the spool: MLflow may have been down at an earlier resume.
        tags_of_events = [event.data for event in events if event.kind == "tags"]
        earlier_resumes = sum("resume.count" in tags for tags in tags_of_events)
        tags: dict[str, str | None] = {
            "resume.count": str(earlier_resumes + 1),
            "resume.step": str(step),
            # The run is alive again; the reason of its first end stays in the spool.
            "failure.reason": None,
        }
        if replaced_run is not None:
            tags["resume.replaces"] = replaced_run
        # MLflow keeps a param's first value for ever, so a tag says which ones changed.
        changed_params = []
        for key, text in params.items():
            first_text = self._params.get(key, text)
            if first_text != text:
                changed_params.append(f"{key}: {first_text} -> {text}")
        if changed_params:
            tags["resume.params_changed"] = "; ".join(changed_params)
        return tags

    def _take_over_state(self, last_step: float, unchanged_bytes: int) -> str | None:
        """Continue the stored upload. Returns the MLflow run that a new one replaces, None where it is continued.

        An MLflow run that may hold points beyond ``last_step`` is replaced, because MLflow cannot delete points.
        """
        new_state = self._uploader.state
        saved = SyncState.load(self._spool.run_dir)
        if saved is None or not saved.same_place(new_state):
            return None
        if saved.run_id is not None and saved.is_ahead_of(last_step):
            log.warning(
                "MLflow run %s holds points beyond step %.0f; a new run takes its place, filled from the spool",
                saved.run_id,
                max(last_step, 0),
            )
            self._uploader.state = replace(new_state, replaced=(*saved.replaced, saved.run_id))
            return saved.run_id
        # What truncation removed may have been uploaded: beyond the unchanged bytes the offset has no meaning.
        offset = min(saved.offset, unchanged_bytes)
        self._uploader.state = replace(saved, run_name=new_state.run_name, offset=offset)
        return None

    def _warn_of_damage(self, events: Sequence[Event], step: int | None) -> None:
        """Say what of the record up to ``step`` cannot be read any more."""
        unreadable = unreadable_lines(events)
        if unreadable:
            log.warning("%s is damaged: %s lines cannot be read and are left out", self._spool.path, unreadable)
        last_step = max((event.step or 0 for event in events if event.kind == "metrics"), default=0)
        if last_step < (step or 0):
            log.warning("%s ends at update %s: the points up to update %s are lost", self._spool.path, last_step, step)

    def _append(self, kind: str, data: Mapping[str, Any], step: int | None = None) -> None:
        with self._warn_on_disk_failure():
            self._spool.append(kind, data, step)

    def _flush(self) -> None:
        # First to the disk: MLflow must not hold a point that a power failure can take from the spool.
        self.save()
        if self._live:
            self._uploader.committed_step = max(self._steps_since_flush | {self._uploader.committed_step})
        self._steps_since_flush.clear()
        self._uploader.push_when_due()

    @contextlib.contextmanager
    def _warn_on_disk_failure(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self._disk_failed:
                self._disk_failed = True
                problem = f"cannot write in {self._spool.run_dir}: {store.first_line(error)}"
                log.warning("%s; training continues untracked", problem)


def copy_record(source: Path, target: Path, *, up_to: int) -> None:
    """Begin the spool of the run in ``target`` with the metrics and tables of the run in ``source`` up to a step.

    Params and tags are not copied: they are those of another run.
    """
    earlier = Spool(source)
    content = read_file(earlier.path, root=source) if earlier.path.exists() else b""
    lines = []
    for event in earlier.read():
        is_point = event.kind in ("metrics", "table")
        if not is_point or event.is_after(up_to):
            continue
        if event.kind == "table":
            if earlier.reason_to_refuse(event) is not None:
                continue
            copy = target / event.data["path"]
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / event.data["path"], copy)
        # The bytes as they were written, which have the times of the points.
        lines.append(content[event.start : event.end])
    spool = Spool(target)
    spool.path.unlink(missing_ok=True)
    spool.append("tags", {SPOOL_ID: uuid.uuid4().hex})
    spool.close()
    atomic_write(spool.path, read_file(spool.path, root=target) + b"".join(lines), private=True)


def _metrics_at(events: Sequence[Event], step: int) -> set[str]:
    """The names of the metrics that were logged at ``step``."""
    names: set[str] = set()
    for event in events:
        if event.kind == "metrics" and event.step == step:
            names.update(event.data)
    return names


class NullLogger(Logger):
    """The logger of processes other than the first: accepts every call of :class:`RunLogger` and does nothing."""

    name = None
    version = None
    run_id = None

    def _ignore(self, *args: Any, **kwargs: Any) -> None: ...

    log_metrics = log_hyperparams = log_table = log_artifact = set_tags = commit = finish = _ignore
