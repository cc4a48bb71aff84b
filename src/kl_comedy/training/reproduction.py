"""Train a stored run again, from its config and plugins, and compare the final metrics.

    find_original -> fetch_plugins -> load_plugins -> plan_reproduction -> train_again -> compare

The steps are separate because a caller prints what each of them has to say before the next one starts, which may take
hours. ``kl-comedy reproduce`` is such a caller.
"""

from __future__ import annotations

import itertools
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from kl_comedy.config import Config, load_config
from kl_comedy.errors import UserError
from kl_comedy.models.onednn_linear import linear_library
from kl_comedy.results import verify
from kl_comedy.results.runs import open_runs
from kl_comedy.tracking import provenance_tags
from kl_comedy.tracking.provenance import FOLDER
from kl_comedy.tracking.store import clean_path
from kl_comedy.training.run_folder import Outcome
from kl_comedy.training.run_plugins import PLUGIN_FOLDER, PluginRecord, load_stored_plugins, plugins_of, stored_record

SUMMARY_ORDER = ("equal", "near", "different", "absent", "new")
"""Verdicts of :func:`kl_comedy.results.verify.compare_metrics`, in the order of the summary."""


@dataclass(frozen=True, kw_only=True)
class OriginalRun:
    """A finished run of the store or export at ``uri``; its tags and its final metrics, without their prefixes."""

    uri: str
    run_id: str
    name: str
    tags: Mapping[str, str]
    metrics: Mapping[str, float]

    @property
    def plugin_options(self) -> list[str]:
        """The files after ``--plugin`` in the command that made the run."""
        words = shlex.split(self.tags.get("run.command", ""))
        return [value for option, value in itertools.pairwise(words) if option == "--plugin"]

    @property
    def plugin_names(self) -> list[str]:
        """The names of the plugin files in the run's command, else of the plugins in its tag ``plugins``."""
        files = self.plugin_options
        if files:
            return [Path(file).name for file in files]
        # The tag is a list as "rewards.py 1a2b3c, terms.py 4d5e6f".
        items = self.tags.get("plugins", "").split(", ")
        return [item.split()[0] for item in items if item]


def find_original(uri: str, run: str) -> OriginalRun:
    """The run with this name, or the only one whose id begins with ``run``.

    Raises :class:`UserError` where there is no such run, or where it did not finish.
    """
    # By name or id, as every command names runs.
    row = verify.find_run(uri, run)
    run_id = str(row["run_id"])
    status = str(row["status"]).lower()
    # A run that was killed has the metrics of whichever update came last.
    if status != "finished":
        raise UserError(f"run {run_id} is {status}; only finished runs have final metrics")

    tags: dict[str, str] = {}
    metrics: dict[str, float] = {}
    for column, value in row.items():
        group, _, key = str(column).partition(".")
        if group == "tags":
            tags[key] = str(value)
        elif group == "metrics":
            metrics[key] = float(value)
    name = str(row.get("run_name", run_id))
    return OriginalRun(uri=uri, run_id=run_id, name=name, tags=tags, metrics=metrics)


def make_inputs_folder(original: OriginalRun, output: Path) -> Path:
    """Create the folder below ``output`` that the run's config and plugins are fetched to."""
    # With the id: runs of other folders have folders of the same names.
    name = original.tags.get(FOLDER, original.name)
    folder = output / f"{clean_path(name)}-{original.run_id[:8]}.inputs"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@dataclass(frozen=True, kw_only=True)
class StoredPlugins:
    """The plugins of a run, as the store or export kept them, in the subfolder ``plugins`` of ``folder``."""

    folder: Path
    record: PluginRecord
    has_source: bool
    """Whether any source was kept."""

    @property
    def files(self) -> list[Path]:
        """The stored files that ``--plugin`` takes."""
        return [self.folder / PLUGIN_FOLDER / name for name in self.record.files]


def fetch_plugins(original: OriginalRun, folder: Path, *, given: Sequence[Path]) -> StoredPlugins:
    """Write the source of the run's plugins to ``folder``.

    ``given``: the files that the user names with ``--plugin``. Raises :class:`UserError` where the run needs plugin
    files that neither the store nor the user has.
    """
    written = open_runs(original.uri).plugins(original.run_id, folder)
    record = stored_record(folder)
    if record is None:
        # Earlier versions kept no record: their plugins were single files, which the run's command names.
        names = original.plugin_names
        stored_names = tuple(name for name in names if folder / PLUGIN_FOLDER / name in written)
        record = PluginRecord(files=stored_names)
        if names and not given and not stored_names:
            needed = original.plugin_options or names
            raise UserError(f"--plugin: the run needs parts of {', '.join(needed)}; name the file")
    return StoredPlugins(folder=folder, record=record, has_source=bool(written))


def load_plugins(stored: StoredPlugins, *, given: Sequence[Path]) -> list[str]:
    """Import the stored plugins, and return what was done, in lines to print.

    The files ``given`` with ``--plugin`` take the place of the stored files; load those before.
    """
    # The user's own files are registered already, or the run had no plugins.
    if not stored.has_source:
        return []
    return load_stored_plugins(stored.folder, stored.record, files=not given)


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    """What trains now, and what the user should know before it does."""

    config: Config
    command: str
    """The ``kl-comedy train`` command that trains the same, without a comparison."""
    notes: list[str]
    """What differs in code, packages and machine; the commands of then and now."""


def plan_reproduction(original: OriginalRun, folder: Path, output: Path, plugins: Sequence[Path]) -> Reproduction:
    """Write the run's config to ``folder``, load it, and compare code, packages and machine with the run's.

    ``plugins``: the files that the run's parts come from, loaded already. ``output``: where the new run's folder goes.
    """
    file = open_runs(original.uri).config(original.run_id, folder)
    # In the store the new run would count as a repeat of the old one, so it is tracked in its folder only.
    overrides = [f"output={output}", "resume=never", "tracking.uri=none"]
    config = load_config(file, overrides)

    # Made of the same parts as the config, so that the printed command is what runs.
    words = ["kl-comedy", "train", str(file), *overrides]
    for path in plugins:
        words += ["--plugin", str(path)]
    command = shlex.join(words)

    notes = _differences(original, config)
    if original.tags.get("git.diff"):
        notes.append("the run's code was changed after its commit; the change is its artifact provenance/code.diff")
    steps = [f"git checkout {original.tags.get('git.commit', 'unknown')}"]
    if original.tags.get("run.command"):
        steps.append(original.tags["run.command"])
    notes.append(f"the run was made by: {' && '.join(steps)}")
    notes.append(f"runs now: {command}")
    return Reproduction(config=config, command=command, notes=notes)


def _differences(original: OriginalRun, config: Config) -> list[str]:
    """What differs in code, packages, plugins and machine."""
    tags_now = {**provenance_tags(plugins=plugins_of(config)), "host.products": linear_library()}
    notes = verify.environment_differences(original.tags, tags_now)
    if not notes:
        notes = ["code, packages and machine are what they were"]
    return notes


def train_again(original: OriginalRun, planned: Reproduction, console: Console) -> Outcome:
    """Train the planned run. Raises what :func:`kl_comedy.training.run.train` raises."""
    from kl_comedy.training.run import train  # imports Lightning, which takes seconds

    command = shlex.join(["kl-comedy", "reproduce", original.run_id, "--uri", original.uri])
    return train(planned.config, console=console, command=command)


def changed_start(original: OriginalRun, run_folder: Path) -> str | None:
    """A sentence where training started from other weights than the original's; None where it did not."""
    hash_then = original.tags.get("reference.hash")
    hash_now = verify.final_tags(run_folder).get("reference.hash")
    # Runs of earlier versions recorded no hash: then there is nothing to compare.
    if hash_then is None or hash_then == hash_now:
        return None
    return f"training started from other weights: {hash_now}, and then {hash_then}; expect other numbers"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The rows of :func:`kl_comedy.results.verify.compare_metrics`, one per metric."""

    rows: list[dict[str, Any]]

    @property
    def reproduces(self) -> bool:
        """Whether every metric is there and near enough. A comparison without any metric shows nothing."""
        verdicts = {row["verdict"] for row in self.rows}
        return bool(verdicts) and not verdicts & {"different", "absent"}

    @property
    def unequal(self) -> list[dict[str, Any]]:
        """The rows of metrics that are not equal to the bit."""
        return [row for row in self.rows if row["verdict"] != "equal"]

    @property
    def summary(self) -> str:
        """The number of metrics per verdict, as ``12 equal, 0 near, ...``."""
        # Zeros are printed too: a reader sees at once that nothing is absent.
        counts = Counter(row["verdict"] for row in self.rows)
        return ", ".join(f"{counts[verdict]} {verdict}" for verdict in SUMMARY_ORDER)


def compare(original: OriginalRun, run_folder: Path, tolerance: float | Mapping[str, float]) -> Comparison:
    """Compare the final metrics of the original with those of the run in ``run_folder``."""
    # From the folder: the new run is in no store.
    metrics_now = verify.final_metrics(run_folder)
    return Comparison(rows=verify.compare_metrics(original.metrics, metrics_now, tolerance))
