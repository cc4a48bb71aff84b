"""The MLflow store: which addresses are allowed, how a client is made, names and values that MLflow accepts.

A new SQLite store is made under another name, in MLflow's sixty migrations, and appears under its own name whole: a
process killed while it migrates would leave a file that MLflow can neither use nor migrate. That happens under a file
lock, because the migrations are not safe against several processes that open the same empty file. Artifacts of a store
that is a database lie beside it.
"""

from __future__ import annotations

import contextlib
import glob
import json
import logging
import os
import re
import sqlite3
import time
import urllib.parse
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kl_comedy.errors import UserError
from kl_comedy.io import file_lock, fsync_path
from kl_comedy.redaction import redact, refuse_secrets

log = logging.getLogger("kl_comedy.tracking")

PARAM_VALUE_LIMIT = 6000
TAG_VALUE_LIMIT = 8000
KEY_LIMIT = 250
"""Limits of MLflow 3: mlflow/utils/validation.py."""

NO_STORE = "none"
"""The address that means: track to files in the run folder only."""

QUIET_S = 5.0
"""A half-made store that nobody has written to for this long was left by a process that was killed: a running migration
writes several times per second."""

EXPERIMENT_KIND = "mlflow.experimentKind"
MACHINE_LEARNING = "custom_model_development"
"""MLflow's pages show an experiment of this kind as runs with params and metrics. Without the tag they ask for a kind,
or show traces of agents first."""

SCHEMES = ("sqlite", "http", "https", "postgresql", "mysql", "mssql", "databricks")

ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}
"""Set where the user has not: a dead server costs seconds, nothing is sent to third parties, and no progress bars."""


LOG_LEVELS = {
    "alembic": logging.WARNING,
    "mlflow.tracking": logging.WARNING,
    "urllib3.connectionpool": logging.ERROR,
    "mlflow.store.db.utils": logging.CRITICAL,
    "sqlalchemy": logging.CRITICAL,
}
"""From which level on loggers of other packages write, while a store is opened and afterwards."""


def clean_name(name: str) -> str:
    """A metric, param or tag name with ``@`` spelled out and other characters that MLflow refuses replaced.

    >>> clean_name("eval/gsm8k/pass@4"), clean_name("a//b/../c")
    ('eval/gsm8k/pass_at_4', 'a/b/c')
    """
    # pass@4 stays readable, where _ would also do.
    text = re.sub(r"[^\w.\- :/]", "_", str(name).replace("@", "_at_"))
    parts = [part for part in text.split("/") if part.strip(". ")]
    return ("/".join(parts) or "_")[:KEY_LIMIT]


def clean_path(name: str) -> str:
    """A table's name as a relative folder that stays inside its root.

    >>> clean_path("../eval/my suite")
    'eval/my_suite'
    """
    parts = [re.sub(r"[^\w.\-]", "_", part) for part in str(name).split("/") if part.strip(". ")]
    return "/".join(parts) or "_"


def param_texts(params: Mapping[str, Any]) -> dict[str, str]:
    """Flattened config as texts by clean name: strings as they are, everything else as JSON; secrets hidden.

    >>> param_texts({"a": None, "lr": 1e-6, "name": "k3", "hf_token": "abc"})
    {'a': 'null', 'lr': '1e-06', 'name': 'k3', 'hf_token': '***'}
    """
    texts = {}
    for key, value in params.items():
        text = value
        if not isinstance(value, str):
            text = json.dumps(value, default=str)
        texts[clean_name(key)] = redact(text, key)
    return texts


def shorten(text: str, limit: int) -> str:
    """``text`` within ``limit`` characters; a cut text ends with its full length."""
    if len(text) <= limit:
        return text
    # The length tells two long values apart that begin alike.
    note = f" ... (cut; {len(text)} characters)"
    return text[: limit - len(note)] + note


def first_line(error: BaseException, limit: int = 200) -> str:
    """The type and first line of an error, without secrets."""
    lines = str(error).strip().split("\n")
    line = lines[0]
    # SQLAlchemy's first line is then about itself, and the database's own message is the second.
    if line.startswith("(raised as a result of Query-invoked autoflush") and len(lines) > 1:
        line = lines[1]
    text = redact(line)
    if len(text) > limit:
        text = text[:limit] + "..."
    if not text:
        return type(error).__name__
    return f"{type(error).__name__}: {text}"


def check_uri(uri: str, key: str = "tracking.uri") -> str:
    """``uri`` with a SQLite path made absolute.

    Raises :class:`UserError` for an address that MLflow cannot use, and for one with a user or a password in it.
    """
    # The address is printed, stored in tracking.json and uploaded.
    refuse_secrets({key: uri})
    # postgresql+psycopg2 is a postgresql.
    scheme = uri.partition("://")[0].partition("+")[0]
    file = sqlite_file(uri)
    if scheme == "sqlite" and file is None:
        raise UserError(f"{key}: got {uri!r}; a SQLite store is written sqlite:///FILE (three slashes)")
    if uri != NO_STORE and scheme not in SCHEMES:
        raise UserError(
            f"{key}: got {uri!r}; allowed: sqlite:///FILE, http(s)://HOST:PORT, a database address, "
            f"or {NO_STORE!r} for files only (a folder or a .db file is written sqlite:///path/to/mlflow.db)"
        )
    if file is None:
        return uri
    # Absolute: the run's folder stores the address, and a later command may start in another folder.
    return f"sqlite:///{file}"


def sqlite_file(uri: str) -> Path | None:
    """The absolute database file of a ``sqlite:///`` address, else None."""
    # A query after the path (?timeout=5) is SQLAlchemy's.
    match = re.fullmatch(r"sqlite(\+\w+)?:///([^?]+)(\?.*)?", uri)
    if match is None or match[2] == ":memory:":
        return None
    return Path(match[2]).expanduser().absolute()


def connect(uri: str) -> Any:
    """An ``MlflowClient`` whose store answers; a SQLite store is created first where it does not exist.

    A half-made store of an earlier version that holds nothing is renamed, with a warning, and made anew. Raises
    :class:`UserError` for one that holds something, ImportError without mlflow, and whatever MLflow or the database
    raises when it cannot be reached.
    """
    # Before MLflow is imported: it reads these once.
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from mlflow.tracking import MlflowClient

    # Migrations, retries and tracebacks stay off the terminal: the caller's message says what went wrong.
    for name, level in LOG_LEVELS.items():
        logging.getLogger(name).setLevel(level)
    file = sqlite_file(uri)
    with _creation_lock(uri):  # making the client already runs the migrations
        if file is not None:
            _set_half_made_aside(file)
            if not file.exists():
                _create(file)
        client = MlflowClient(tracking_uri=uri, registry_uri=uri)
        client.search_experiments(max_results=1)
    return client


def _create(file: Path) -> None:
    """Make an empty store at ``file``, which appears whole; one that another process puts there meanwhile stays."""
    from mlflow.tracking import MlflowClient

    file.parent.mkdir(parents=True, exist_ok=True)
    for path in file.parent.glob(f".{glob.escape(file.name)}.*.new*"):
        path.unlink()  # of a process that was killed; a live one would have the lock
    # a name of its own each time: MLflow keeps the databases open that this process has used
    draft = file.with_name(f".{file.name}.{uuid.uuid4().hex[:8]}.new")
    uri = f"sqlite:///{draft}"
    MlflowClient(tracking_uri=uri, registry_uri=uri).search_experiments(max_results=1)
    fsync_path(draft)
    try:
        os.link(draft, file)  # a rename would replace a store that appeared meanwhile
    except FileExistsError:
        log.info("%s was created by another process meanwhile", file)
    except OSError:  # no hard links in this file system; the lock is all there is then
        draft.rename(file)
    draft.unlink(missing_ok=True)
    fsync_path(file.parent)


def _set_half_made_aside(file: Path) -> None:
    """Rename a store whose creation was killed, where it holds nothing. Raises :class:`UserError` where it does."""
    problem = half_made(file)
    while problem is not None and time.time() - file.stat().st_mtime < QUIET_S:
        time.sleep(0.5)  # perhaps another program is making it now
        problem = half_made(file)
    if problem is None:
        return
    _refuse_rows(file, problem)
    number = 1
    while file.with_name(f"{file.name}.half-made-{number}").exists():
        number += 1
    aside = f"{file.name}.half-made-{number}"
    for suffix in ("", "-journal", "-wal", "-shm"):  # SQLite keeps journals beside a database
        with contextlib.suppress(FileNotFoundError):
            file.with_name(file.name + suffix).rename(file.with_name(aside + suffix))
    log.warning("%s was left half made (%s) and holds no runs; it is now %s", file, problem, aside)


def half_made(file: Path) -> str | None:
    """What shows that the creation of the SQLite store ``file`` was killed; None for any other file, or none."""
    if not file.is_file():
        return None
    if file.stat().st_size == 0:
        return "an empty file"
    try:
        with contextlib.closing(_open_database(file)) as database:
            # A migration copies a table under this name and renames the copy at its end.
            tables = _tables(database)
            temporary = [name for name in tables if name.startswith("_alembic_tmp_")]
            if temporary:
                return f"table {temporary[0]} of a migration"
            if tables == ["alembic_version"]:
                return "no tables but alembic_version"
            if "experiments" not in tables:
                return None  # a database of something else: MLflow adds its tables, or says why not
            if "alembic_version" not in tables:
                return "no table alembic_version"
            for table in ("alembic_version", "experiments"):  # a new store is given an experiment last
                if database.execute(f"SELECT 1 FROM {table}").fetchone() is None:
                    return f"table {table} is empty"
    except sqlite3.Error:  # no database, a damaged or a locked one: MLflow says so
        return None
    return None


def _refuse_rows(file: Path, problem: str) -> None:
    """Raise :class:`UserError` where any table of the half-made store holds what a new one does not."""
    rows_of = {}
    with contextlib.closing(_open_database(file)) as database:
        for table in _tables(database):
            where = ""
            # A new store has the experiment Default, and a migration its copy.
            if table in ("experiments", "_alembic_tmp_experiments"):
                where = "WHERE name != 'Default'"
            rows = database.execute(f'SELECT COUNT(*) FROM "{table}" {where}').fetchone()[0]
            if rows and table not in ("alembic_version", "workspaces"):
                rows_of[table] = rows
    if rows_of:
        names = ", ".join(f"{rows} rows of {table}" for table, rows in sorted(rows_of.items())[:3])
        raise UserError(
            f"{file} was left by a migration that was killed ({problem}), and holds {names}; put a copy in its place, "
            "or rename it and upload the runs again with `kl-comedy results sync RUN_DIR`; nothing was changed"
        )


def _open_database(file: Path) -> sqlite3.Connection:
    """An existing database. SQLite rolls its last transaction back where a killed process left it open."""
    return sqlite3.connect(f"file:{urllib.parse.quote(str(file))}?mode=rw", uri=True, timeout=QUIET_S)


def _tables(database: sqlite3.Connection) -> list[str]:
    query = "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
    return [name for (name,) in database.execute(query)]


def open_existing(uri: str) -> Any:
    """A client on a store that already exists, for reading. Raises :class:`UserError` with one clear message."""
    uri = check_uri(uri, "--uri")
    if uri == NO_STORE:
        raise UserError(f"--uri: {NO_STORE!r} keeps no store to read; use `kl-comedy results sync RUN_DIR --uri ...`")
    file = sqlite_file(uri)
    if file is not None and not file.is_file():
        raise UserError(f"--uri: no results store at {file}; `kl-comedy train` creates one, or name another with --uri")
    try:
        problem = None
        if file is not None:
            problem = half_made(file)
        if problem is not None:
            state = f"is half made ({problem}): its creation was killed, or is still running"
            raise UserError(f"--uri: {uri} {state}; the next `kl-comedy train` makes it anew")
        return connect(uri)
    except UserError:
        raise
    except ImportError as error:
        raise UserError(f"reading results needs mlflow: {error}") from error
    except Exception as error:
        raise cannot_be_read(uri, error) from error


def cannot_be_read(uri: str, error: Exception) -> UserError:
    """The error for a store that fails while it is read, as a damaged database does."""
    problem = _newer_schema(str(error)) or f"cannot be read: {first_line(error)}"
    return UserError(f"--uri: {uri} {problem}")


def ensure_experiment(client: Any, uri: str, name: str) -> str:
    """The id of experiment ``name``, created (or restored from deleted) where needed."""
    file = sqlite_file(uri)
    root = None
    # A server decides itself where its artifacts go.
    if not uri.startswith(("http", "databricks")):
        folder = Path.cwd()
        if file is not None:
            folder = file.parent
        root = (folder / "mlartifacts" / re.sub(r"[^\w.\-]", "_", name)).as_uri()
    with _creation_lock(uri):
        experiment = client.get_experiment_by_name(name)
        if experiment is None:
            try:
                tags = {EXPERIMENT_KIND: MACHINE_LEARNING}
                return str(client.create_experiment(name, artifact_location=root, tags=tags))
            except Exception:  # another process may have created it meanwhile
                experiment = client.get_experiment_by_name(name)
                if experiment is None:
                    raise
        if experiment.lifecycle_stage == "deleted":
            client.restore_experiment(experiment.experiment_id)
        if EXPERIMENT_KIND not in experiment.tags:
            # An experiment of an earlier version. A user's choice stays.
            client.set_experiment_tag(experiment.experiment_id, EXPERIMENT_KIND, MACHINE_LEARNING)
        return str(experiment.experiment_id)


def _newer_schema(error: str) -> str | None:
    """What to do about a database whose schema revision, named in MLflow's ``error``, this MLflow does not know."""
    revision = re.search(r"(?:found version |revision identified by ')(\w+)", error)
    if revision is None:
        return None
    import mlflow
    import mlflow.store.db_migrations as migrations

    # A revision that this MLflow knows is not the problem.
    if list((Path(str(migrations.__file__)).parent / "versions").glob(f"{revision[1]}*.py")):
        return None
    return (
        f"was written by a newer MLflow than {mlflow.__version__}, which is installed (its schema {revision[1]} is "
        "unknown here); upgrade mlflow, or export there with `kl-comedy results export`; nothing was changed"
    )


@contextlib.contextmanager
def _creation_lock(uri: str) -> Iterator[None]:
    """Exclude other processes while a SQLite store may be created; a store that is only readable needs no lock."""
    file = sqlite_file(uri)
    with contextlib.ExitStack() as stack:
        if file is not None:
            try:
                stack.enter_context(file_lock(file.with_name(f"{file.name}.lock")))
            except OSError:
                if not file.is_file():
                    raise
        yield
