"""The MLflow store: which addresses are allowed, how a client is made, names and values that MLflow accepts.

A new SQLite store is created under a file lock, because MLflow's migrations are not safe against several processes
that open the same empty file. Artifacts of a store that is a database lie beside it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kl_comedy.errors import UserError
from kl_comedy.io import file_lock
from kl_comedy.redaction import redact, refuse_secrets

PARAM_VALUE_LIMIT, TAG_VALUE_LIMIT, KEY_LIMIT = 6000, 8000, 250
"""Limits of MLflow 3: mlflow/utils/validation.py."""

NO_STORE = "none"
"""The address that means: track to files in the run folder only."""

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


def clean_name(name: str) -> str:
    """A metric, param or tag name with ``@`` spelled out and other characters that MLflow refuses replaced.

    >>> clean_name("eval/gsm8k/pass@4"), clean_name("a//b/../c")
    ('eval/gsm8k/pass_at_4', 'a/b/c')
    """
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
    texts = {key: value if isinstance(value, str) else json.dumps(value, default=str) for key, value in params.items()}
    return {clean_name(key): redact(text, key) for key, text in texts.items()}


def shorten(text: str, limit: int) -> str:
    """``text`` within ``limit`` characters; a cut text ends with its full length."""
    if len(text) <= limit:
        return text
    note = f" ... (cut; {len(text)} characters)"
    return text[: limit - len(note)] + note


def first_line(error: BaseException, limit: int = 200) -> str:
    """The type and first line of an error, without secrets."""
    lines = str(error).strip().split("\n")
    autoflush = lines[0].startswith("(raised as a result of Query-invoked autoflush") and len(lines) > 1
    text = redact(lines[1] if autoflush else lines[0])
    return f"{type(error).__name__}: {text[:limit]}{'...' if len(text) > limit else ''}".removesuffix(": ")


def check_uri(uri: str, key: str = "tracking.uri") -> str:
    """``uri`` with a SQLite path made absolute.

    Raises :class:`UserError` for an address that MLflow cannot use, and for one with a user or a password in it.
    """
    refuse_secrets({key: uri})
    scheme, file = uri.partition("://")[0].partition("+")[0], sqlite_file(uri)
    if scheme == "sqlite" and file is None:
        raise UserError(f"{key}: got {uri!r}; a SQLite store is written sqlite:///FILE (three slashes)")
    if uri != NO_STORE and scheme not in SCHEMES:
        raise UserError(
            f"{key}: got {uri!r}; allowed: sqlite:///FILE, http(s)://HOST:PORT, a database address, "
            f"or {NO_STORE!r} for files only (a folder or a .db file is written sqlite:///path/to/mlflow.db)"
        )
    return uri if file is None else f"sqlite:///{file}"


def sqlite_file(uri: str) -> Path | None:
    """The absolute database file of a ``sqlite:///`` address, else None."""
    match = re.fullmatch(r"sqlite(\+\w+)?:///([^?]+)(\?.*)?", uri)
    if match is None or match[2] == ":memory:":
        return None
    return Path(match[2]).expanduser().absolute()


def connect(uri: str) -> Any:
    """An ``MlflowClient`` whose store answers; a SQLite store is created first where it does not exist.

    Raises ImportError without mlflow, and whatever MLflow or the database raises when it cannot be reached.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from mlflow.tracking import MlflowClient

    # Migrations, retries and tracebacks stay off the terminal: the caller's message says what went wrong.
    levels = {"alembic": logging.WARNING, "mlflow.tracking": logging.WARNING, "urllib3.connectionpool": logging.ERROR}
    for name, level in {**levels, "mlflow.store.db.utils": logging.CRITICAL, "sqlalchemy": logging.CRITICAL}.items():
        logging.getLogger(name).setLevel(level)
    with _creation_lock(uri):  # making the client already runs the migrations
        client = MlflowClient(tracking_uri=uri, registry_uri=uri)
        client.search_experiments(max_results=1)
    return client


def open_existing(uri: str) -> Any:
    """A client on a store that already exists, for reading. Raises :class:`UserError` with one clear message."""
    uri = check_uri(uri, "--uri")
    if uri == NO_STORE:
        raise UserError(f"--uri: {NO_STORE!r} keeps no store to read; use `kl-comedy results sync RUN_DIR --uri ...`")
    file = sqlite_file(uri)
    if file is not None and not file.is_file():
        raise UserError(f"--uri: no results store at {file}; `kl-comedy train` creates one, or name another with --uri")
    try:
        return connect(uri)
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
    file, root = sqlite_file(uri), None
    if not uri.startswith(("http", "databricks")):  # a server decides where its artifacts go
        folder = file.parent if file else Path.cwd()
        root = (folder / "mlartifacts" / re.sub(r"[^\w.\-]", "_", name)).as_uri()
    with _creation_lock(uri):
        experiment = client.get_experiment_by_name(name)
        if experiment is None:
            try:
                return str(client.create_experiment(name, artifact_location=root))
            except Exception:  # another process may have created it meanwhile
                experiment = client.get_experiment_by_name(name)
                if experiment is None:
                    raise
        if experiment.lifecycle_stage == "deleted":
            client.restore_experiment(experiment.experiment_id)
        return str(experiment.experiment_id)


def _newer_schema(error: str) -> str | None:
    """What to do about a database whose schema revision, named in MLflow's ``error``, this MLflow does not know."""
    revision = re.search(r"(?:found version |revision identified by ')(\w+)", error)
    if revision is None:
        return None
    import mlflow
    import mlflow.store.db_migrations as migrations

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
