"""The tracker of a run: spool first, MLflow second, training never disturbed.

    log -> RUN_DIR/spool.jsonl -> (up to the last checkpoint) -> MLflow

Metric points reach MLflow when a checkpoint has made them final (:meth:`Tracker.commit`) or when the run ends;
with ``live`` every ``flush_every`` steps. That is what lets a resumed run continue the same MLflow run with
exactly one point a step (see :mod:`kl_comedy.tracking.mlflow_sync`). One process of a run tracks; the others do not.

The tracker of processes that do not track: the first of a run does.
"""

from __future__ import annotations

import json
import logging
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kl_comedy.io import atomic_write
from kl_comedy.tracking import mlflow_sync as mirror
from kl_comedy.tracking import store
from kl_comedy.tracking import store as naming
from kl_comedy.tracking.provenance import mark_dead_runs, process_tags
from kl_comedy.tracking.spool import MirrorState, Spool, plain
from kl_comedy.tracking.store import redact

if TYPE_CHECKING:
    from kl_comedy.config.schema import TrackingConfig


log = logging.getLogger("kl_comedy.tracking")

STATUSES = ("FINISHED", "FAILED", "KILLED")
RETRY_FIRST_S, RETRY_MOST_S = 60.0, 900.0
"""After a failure the store is left alone for a minute, then twice as long each time, up to a quarter of an hour."""


class Tracker:
    """Use :meth:`start`. A store or a disk that fails is said once, in one line, and never raised into training."""

    def __init__(self, *, config: TrackingConfig, uri: str, spool: Spool, state: MirrorState, live: bool) -> None:
        self._config, self._uri, self._spool, self._state, self._live = config, uri, spool, state, live
        self._client: Any = None
        self._committed: int | None = None
        self._steps_since_flush: set[int] = set()
        self._already: tuple[int | None, set[str]] = (None, set())
        self._retry_at, self._retry_s = 0.0, RETRY_FIRST_S
        self._warned: set[str] = set()
        self._done = False

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
    ) -> Tracker:
        """Begin (or with ``resume`` go on with) the tracking of the run in ``run_dir``.

        ``params`` is the flattened config. On resume everything logged beyond ``resume_step`` (None: everything)
        is dropped, because it will be computed again. Without ``resume`` an earlier spool in the folder is set
        aside, not overwritten. ``live``: mirror before checkpoints make points final; for runs without checkpoints.
        Raises :class:`~kl_comedy.errors.UserError` for a ``tracking.uri`` that no MLflow understands.
        """
        uri = store.check_uri(config.uri)
        spool = Spool(run_dir)
        fresh = MirrorState(uri=redact(uri), experiment=config.experiment, run_name=run_name)
        resume = resume and spool.path.exists()
        state = _rewind(spool, fresh, resume_step) if resume else fresh
        if not resume:
            _set_aside(spool)
        tracker = cls(config=config, uri=uri, spool=spool, state=state, live=live)
        tracker._committed = resume_step if resume else None
        if resume and resume_step is not None:
            tracker._already = (resume_step, spool.metric_names_at(resume_step))
        state.save(spool.run_dir)
        tracker._open(params, {**config.tags, **tags}, resume=resume, resume_step=resume_step)
        if uri == store.NO_STORE:
            log.info("tracking to files only: %s", spool.path)
        elif tracker._push(force=True):
            tracker._guard(lambda: mark_dead_runs(tracker._client, config.experiment))
        return tracker

    @property
    def run_id(self) -> str | None:
        """The MLflow run, or None as long as MLflow has not been reached."""
        return self._state.run_id

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record metric values of optimizer update ``step``. NaN and infinities are kept as such."""
        at, names = self._already
        values = {naming.clean_name(name): float(value) for name, value in metrics.items()}
        if step == at:
            values = {name: value for name, value in values.items() if name not in names}
        if values:
            self._append("metrics", values, step=step)
        self._steps_since_flush.add(step)
        if len(self._steps_since_flush) >= self._config.flush_every:
            self._flush()

    def table(self, name: str, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Record rows (sampled completions, ...) as the JSON artifact ``tables/<name>/<step>.json``."""
        folder = f"tables/{naming.clean_path(name)}"
        path = f"{folder}/{step}.json"
        content = json.dumps(plain(list(rows)), allow_nan=False, indent=1).encode("ascii")
        try:
            atomic_write(self._spool.run_dir / path, content + b"\n")
        except OSError as error:
            self._warn("disk", f"cannot write {self._spool.run_dir / path}: {store.brief(error)}; training goes on")
            return
        self._append("table", {"name": name, "path": path, "folder": folder}, step=step)

    def artifact(self, path: Path | str, folder: str = "") -> None:
        """Record a file or directory of the run; it is read when it is uploaded, so leave it in place."""
        file, root = Path(path).absolute(), self._spool.run_dir.absolute()
        inside = file.is_relative_to(root)
        self._append("artifact", {"path": str(file.relative_to(root) if inside else file), "folder": folder})

    def tags(self, tags: Mapping[str, str]) -> None:
        """Set tags; sent with the next flush."""
        self._append("tags", {naming.clean_name(key): redact(str(value)) for key, value in tags.items()})

    def commit(self, step: int) -> None:
        """Say that a checkpoint holds everything up to ``step``: those points are final and go to MLflow."""
        self._committed = step if self._committed is None else max(step, self._committed)
        self._flush()

    def finish(self, status: str = "FINISHED", reason: str | None = None) -> None:
        """End the run: ``FINISHED``, ``FAILED`` or ``KILLED``, with the reason as tag ``failure.reason``. Sends all."""
        if self._done:
            return
        if status not in STATUSES:
            raise ValueError(f"status {status!r}; allowed: {', '.join(STATUSES)}")
        self._done = True
        if reason:
            self.tags({"failure.reason": reason})
        self._append("status", {"status": status, "reason": reason})
        self._push(force=True, everything=True)
        try:
            self._spool.close()
        except OSError as error:
            self._warn("disk", f"cannot close {self._spool.path}: {store.brief(error)}")

    def _open(
        self, params: Mapping[str, Any], tags: Mapping[str, str], *, resume: bool, resume_step: int | None
    ) -> None:
        """Write what a run begins with: params, tags, the process, status RUNNING."""
        texts = naming.param_texts(params)
        before = [event for event in self._spool.events() if event.kind in ("params", "tags")]
        known = {key: text for event in before if event.kind == "params" for key, text in event.data.items()}
        begin: dict[str, Any] = {naming.clean_name(key): redact(str(value)) for key, value in tags.items()}
        begin |= process_tags()
        if resume:
            resumes = sum("resume.count" in event.data for event in before)
            begin |= {"resume.count": str(resumes + 1), "resume.step": str(resume_step), "failure.reason": None}
            changed = [f"{key}: {known[key]} -> {text}" for key, text in texts.items() if known.get(key, text) != text]
            if changed:
                begin["resume.params_changed"] = "; ".join(changed)
        else:
            begin[mirror.SPOOL_ID] = uuid.uuid4().hex
        self._append("params", {key: text for key, text in texts.items() if key not in known})
        self._append("tags", begin)
        if any(len(text) > naming.PARAM_VALUE_LIMIT for text in texts.values()):
            atomic_write(self._spool.run_dir / "params.json", json.dumps(texts, indent=1).encode() + b"\n")
            self.artifact(self._spool.run_dir / "params.json")
        self._append("status", {"status": "RUNNING", "reason": None})

    def _append(self, kind: str, data: Mapping[str, Any], *, step: int | None = None) -> None:
        try:
            self._spool.append(kind, data, step=step)
        except OSError as error:
            self._warn("disk", f"cannot write {self._spool.path}: {store.brief(error)}; training goes on untracked")

    def _flush(self) -> None:
        try:
            self._spool.flush()
        except OSError as error:
            self._warn("disk", f"cannot write {self._spool.path}: {store.brief(error)}")
        if self._live and self._steps_since_flush:
            self._committed = max(*self._steps_since_flush, self._committed or 0)
        self._steps_since_flush.clear()
        self._push()

    def _push(self, *, force: bool = False, everything: bool = False) -> bool:
        """Mirror up to the committed step unless the store is being left alone. True when it worked."""
        if self._uri == store.NO_STORE or (not force and time.monotonic() < self._retry_at):
            return False
        return self._guard(lambda: self._push_now(everything))

    def _push_now(self, everything: bool) -> None:
        if self._client is None:
            self._client = store.connect(self._uri)
        done = mirror.push(
            self._client, self._spool, self._state, self._uri, up_to=self._committed, everything=everything
        )
        self._state = done.state
        if done.missing:
            self._warn("missing", f"files gone before their upload: {', '.join(done.missing)}")
        if "mlflow" in self._warned:
            self._warned.discard("mlflow")
            self._retry_s = RETRY_FIRST_S
            log.warning("MLflow at %s answers again; what was spooled has been uploaded", redact(self._uri))

    def _guard(self, action: Any) -> bool:
        """Run ``action``; a failure of the store is said once and leaves the store alone for a while."""
        try:
            action()
        except Exception as error:
            self._retry_at = time.monotonic() + self._retry_s
            self._retry_s = min(2 * self._retry_s, RETRY_MOST_S)
            what = (
                "mlflow is not installed" if isinstance(error, ImportError) else f"MLflow at {redact(self._uri)} fails"
            )
            folder = os.path.relpath(self._spool.run_dir)
            self._warn(
                "mlflow",
                f"{what} ({store.brief(error)}); the run goes on and is kept in {self._spool.path}; "
                f"upload it with: kl-comedy results sync {folder}",
            )
            return False
        return True

    def _warn(self, topic: str, message: str) -> None:
        if topic not in self._warned:
            self._warned.add(topic)
            log.warning(message)


def _rewind(spool: Spool, fresh: MirrorState, resume_step: int | None) -> MirrorState:
    """Drop what comes after ``resume_step`` from the spool; the state says whether its MLflow run can go on.

    It cannot where points beyond ``resume_step`` may already be in it: then it is replaced by a new one.
    """
    cut = spool.truncate_after(resume_step)
    state = MirrorState.load(spool.run_dir)
    if state is None or (state.uri, state.experiment) != (fresh.uri, fresh.experiment):
        return fresh
    ahead = state.mirrored_step is not None and (resume_step is None or state.mirrored_step > resume_step)
    if ahead and state.run_id is not None:
        log.warning(
            "MLflow run %s holds points beyond step %s; a new run takes its place, filled from the spool",
            state.run_id,
            "0" if resume_step is None else resume_step,
        )
        return replace(fresh, replaced=(*state.replaced, state.run_id))
    return replace(state, run_name=fresh.run_name, offset=min(state.offset, cut.unchanged))


def _set_aside(spool: Spool) -> None:
    """Rename an earlier run's spool and state in this folder, so that a new run does not write into them."""
    if not spool.path.exists():
        return
    mark = time.strftime("%Y%m%d-%H%M%S", time.localtime(spool.path.stat().st_mtime))
    for path in (spool.path, spool.run_dir / "tracking.json"):
        target = path.with_name(f"{path.stem}.{mark}{path.suffix}")
        number = 1
        while target.exists():
            number += 1
            target = path.with_name(f"{path.stem}.{mark}-{number}{path.suffix}")
        if path.exists():
            path.rename(target)
    log.warning("%s held an earlier run; its spool is kept as spool.%s.jsonl", spool.run_dir, mark)


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
