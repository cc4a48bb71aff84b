"""What a run folder remembers about its copy in MLflow: ``RUN_DIR/tracking.json``."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from kl_comedy.errors import UserError
from kl_comedy.tracking.spool import write_atomic

STATE_NAME = "tracking.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class MirrorState:
    """Where the run is mirrored and how far.

    ``uri`` is the store without credentials; ``run_id`` the MLflow run, None before it exists; ``mirrored_step``
    the highest step that may already be in MLflow (written before the upload, so never too low);
    ``offset`` the byte of the spool before which everything has been uploaded; ``replaced`` the ids of runs
    that were given up because MLflow cannot forget metric points.
    """

    uri: str
    experiment: str
    run_name: str
    run_id: str | None = None
    mirrored_step: int | None = None
    offset: int = 0
    replaced: tuple[str, ...] = ()

    @staticmethod
    def load(run_dir: Path) -> MirrorState | None:
        """The stored state, or None where the folder has none. Raises :class:`UserError` for a damaged file."""
        path = run_dir / STATE_NAME
        if not path.is_file():
            return None
        try:
            row = json.loads(path.read_text(encoding="utf-8"))
            known = {field.name for field in fields(MirrorState)}
            row["replaced"] = tuple(row.get("replaced", ()))
            return MirrorState(**{key: value for key, value in row.items() if key in known})
        except (ValueError, TypeError, AttributeError) as error:
            raise UserError(f"{path} is damaged ({error}); remove it to mirror the run anew from its spool") from error

    def save(self, run_dir: Path) -> None:
        write_atomic(run_dir / STATE_NAME, json.dumps(asdict(self), indent=2).encode() + b"\n")
