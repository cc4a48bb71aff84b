"""Names and values as MLflow accepts them. Applied on the way into the spool, so that both hold the same names.

Keep secrets out of what is tracked: credentials in addresses, values of keys that name a secret.

The door to MLflow: which addresses are allowed, how a client is made, how an experiment comes to be.

A new SQLite store is created under a file lock: MLflow's migrations are not safe against several processes
that find the same empty file. Artifacts of a store that is a database lie beside it, not below whatever
folder the first run was started in.
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

from kl_comedy.errors import UserError, nearest
from kl_comedy.io import file_lock

PARAM_VALUE_LIMIT = 6000
TAG_VALUE_LIMIT = 8000
KEY_LIMIT = 250
PARAMS_PER_BATCH = 100
METRICS_PER_BATCH = 1000
"""Limits of MLflow 3: mlflow/utils/validation.py."""

_FOREIGN = re.compile(r"[^\w.\- :/]")
_FOREIGN_IN_PATH = re.compile(r"[^\w.\-]")


def clean_name(name: str) -> str:
    """A metric, param or tag name with ``@`` spelled out and other foreign characters replaced.

    >>> clean_name("eval/gsm8k/pass@4"), clean_name("a//b/../c")
    ('eval/gsm8k/pass_at_4', 'a/b/c')
    """
    text = _FOREIGN.sub("_", str(name).replace("@", "_at_"))
    parts = [part for part in text.split("/") if part.strip(". ")]
    return ("/".join(parts) or "_")[:KEY_LIMIT]


def clean_path(name: str) -> str:
    """A table's name as a relative folder that stays inside its root.

    >>> clean_path("../eval/my suite")
    'eval/my_suite'
    """
    parts = [_FOREIGN_IN_PATH.sub("_", part) for part in str(name).split("/") if part.strip(". ")]
    return "/".join(parts) or "_"


def param_text(value: Any) -> str:
    """A config value as text: strings as they are, everything else as JSON (``null``, ``true``, ``1e-06``).

    >>> param_text(None), param_text(True), param_text(1e-6), param_text("k3"), param_text([1, "a"])
    ('null', 'true', '1e-06', 'k3', '[1, "a"]')
    """
    return value if isinstance(value, str) else json.dumps(value, default=str)


def param_texts(params: Mapping[str, Any]) -> dict[str, str]:
    """Flattened config -> texts by clean name, secrets hidden, uncut (see :func:`shorten`)."""
    return {clean_name(key): redact_pair(key, param_text(value)) for key, value in params.items()}


def shorten(text: str, limit: int) -> str:
    """``text`` within ``limit`` characters; a cut says how long the whole was."""
    if len(text) <= limit:
        return text
    note = f" ... (cut; {len(text)} characters)"
    return text[: limit - len(note)] + note


SECRET_KEY = re.compile(
    r"(?i)(password|passwd|secret|credential|api_?key|access_?key|auth_?token|hf_?token)|(^|[._-])token$"
)
SECRET_VALUE = re.compile(r"\b(hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|AKIA[A-Z0-9]{12,})")
CREDENTIALS = re.compile(r"(?P<scheme>[a-zA-Z][\w+.-]*://)[^/@\s]+@")
HIDDEN = "***"
_PAIR = re.compile(r"(?P<key>[\w.\-]+)=(?P<value>[^\s'\"]+)")


def redact(text: str) -> str:
    """``text`` without credentials in addresses, tokens of well-known shapes and ``secret_key=value`` pairs.

    >>> redact("https://me:pw@host/x train model.options.token=abc seed=1")
    'https://***@host/x train model.options.token=*** seed=1'
    """
    text = SECRET_VALUE.sub(HIDDEN, CREDENTIALS.sub(rf"\g<scheme>{HIDDEN}@", text))
    return _PAIR.sub(lambda pair: f"{pair['key']}={HIDDEN}" if SECRET_KEY.search(pair["key"]) else pair[0], text)


def redact_pair(key: str, text: str) -> str:
    """The value of ``key``, hidden where the key names a secret.

    >>> redact_pair("model.options.hf_token", "abc"), redact_pair("max_tokens", "512")
    ('***', '512')
    """
    return HIDDEN if text and SECRET_KEY.search(key) else redact(text)


def redact_argument(argument: str) -> str:
    """A command-line word: ``key=value`` is judged by its key.

    >>> redact_argument("model.options.token=abc")
    'model.options.token=***'
    """
    key, equals, value = argument.partition("=")
    return f"{key}={redact_pair(key, value)}" if equals else redact(argument)


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


def check_uri(uri: str, key: str = "tracking.uri") -> str:
    """``uri`` with a SQLite path made absolute. Raises :class:`UserError` for an address MLflow cannot use."""
    if uri == NO_STORE:
        return uri
    scheme = uri.partition("://")[0].partition("+")[0] if "://" in uri else uri
    if scheme not in SCHEMES:
        hint = " (a folder or a .db file is written sqlite:///path/to/mlflow.db)"
        raise UserError(
            f"{key}: got {redact(uri)!r}; allowed: sqlite:///FILE, http(s)://HOST:PORT, a database address, "
            f"or {NO_STORE!r} for files only{hint}"
        )
    file = sqlite_file(uri)
    if scheme == "sqlite" and file is None:
        raise UserError(f"{key}: got {uri!r}; a SQLite store is written sqlite:///FILE (three slashes)")
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

    _quiet()
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
        if schema := _unknown_schema(str(error)):
            raise UserError(_newer(uri, schema)) from error
        raise UserError(f"--uri: cannot read {redact(uri)}: {brief(error)}") from error


def _unknown_schema(message: str) -> str | None:
    """The revision in MLflow's complaint about a database, where this MLflow has no migration that leads to it."""
    found = re.search(r"(?:found version |revision identified by ')(\w+)", message)
    if found is None:
        return None
    import mlflow.store.db_migrations as migrations

    files = (Path(str(migrations.__file__)).parent / "versions").glob("*.py")
    return None if any(file.name.startswith(found[1]) for file in files) else found[1]


def _newer(uri: str, schema: str) -> str:
    import mlflow

    return (
        f"--uri: {redact(uri)} was written by a newer MLflow than {mlflow.__version__}, which is installed (its "
        f"schema {schema} is unknown here); upgrade mlflow, or export there with `kl-comedy results export`; "
        "nothing was changed"
    )


def ensure_experiment(client: Any, uri: str, name: str) -> str:
    """The id of experiment ``name``, created (or brought back from deleted) where needed."""
    with _creation_lock(uri):
        found = client.get_experiment_by_name(name)
        if found is None:
            try:
                return str(client.create_experiment(name, artifact_location=_artifact_root(uri, name)))
            except Exception:
                found = client.get_experiment_by_name(name)
                if found is None:
                    raise
        if found.lifecycle_stage == "deleted":
            client.restore_experiment(found.experiment_id)
        return str(found.experiment_id)


def experiment_ids(client: Any, experiment: str | None) -> list[str]:
    """The id of ``experiment``, or of all for None. Raises :class:`UserError` naming the nearest for a miss."""
    found = {item.name: item.experiment_id for item in client.search_experiments()}
    if experiment is None:
        return list(found.values())
    if experiment not in found:
        near = nearest(experiment, found)
        names = ", ".join(sorted(found)) or "(none)"
        raise UserError(
            f"--experiment: got {experiment!r}; the store has: {names}" + (f"; did you mean {near!r}?" if near else "")
        )
    return [found[experiment]]


def brief(error: BaseException, limit: int = 200) -> str:
    """The first line of an error with its type, without secrets."""
    text = redact(str(error).strip().split("\n")[0])
    text = text if len(text) <= limit else text[:limit] + "..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _artifact_root(uri: str, experiment: str) -> str | None:
    """Where a database store puts artifacts; None leaves it to the server."""
    if uri.startswith(("http", "databricks")):
        return None
    file = sqlite_file(uri)
    root = (file.parent if file else Path.cwd()) / "mlartifacts" / re.sub(r"[^\w.\-]", "_", experiment)
    return root.as_uri()


@contextlib.contextmanager
def _creation_lock(uri: str) -> Iterator[None]:
    """Keep other processes out while a SQLite store may be created; a store one may only read needs no lock."""
    file = sqlite_file(uri)
    with contextlib.ExitStack() as stack:
        if file is not None:
            try:
                stack.enter_context(file_lock(file.with_name(f"{file.name}.lock")))
            except OSError:
                if not file.is_file():
                    raise
        yield


def _quiet() -> None:
    """Keep migrations and retries off the terminal; our own one line says what went wrong."""
    for name in ("alembic", "mlflow.store.db.utils", "mlflow.tracking"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)
