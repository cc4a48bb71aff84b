"""How a run ends: its summary, the batch that it failed on, and the commands that repeat and evaluate it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kl_comedy.config import Config, config_hash
from kl_comedy.io import atomic_write
from kl_comedy.records import Scored
from kl_comedy.redaction import redact
from kl_comedy.training.callbacks import sample_rows
from kl_comedy.training.extension import extension_of
from kl_comedy.training.run_folder import RunDir


def resume_command(command: str) -> str:
    """The command that resumes the run that ``command`` started."""
    # A sweep's cell has one run, and its command resumes it.
    if command.startswith("kl-comedy cell "):
        return command
    # A command that is resumed twice need not have it twice, and resume=runs/RUN finds the run that it began.
    values = [word.removeprefix("resume=") for word in command.split() if word.startswith("resume=")]
    if values and values[-1] != "never":
        return command
    return f"{command} resume=auto"


def evaluate_command(run: RunDir, config: Config) -> str:
    """The command that evaluates the policy of a finished run."""
    arguments = ["kl-comedy", "evaluate", str(run.path / "config.yaml"), f"model.source={run.policy}"]
    arguments += config.model.overrides_for_exported()
    if config.model.lora is not None:
        arguments.append("model.lora=null")  # RUN/policy is merged
    if config.eval.kl:
        arguments.append(f"eval.reference={run.path / 'config.yaml'}")
    return shlex.join(arguments)


def run_summary(
    run: RunDir,
    config: Config,
    *,
    status: str,
    reason: str | None,
    command: str,
    kl_label: str,
    run_id: str | None,
) -> dict[str, Any]:
    """The content of summary.json but for the results. Tables and commands read stored summaries by these keys."""
    summary: dict[str, Any] = {
        "status": status,
        "reason": None if reason is None else redact(reason),
        "name": config.name,
        "seed": config.seed,
        "steps": config.train.steps,
        "config_hash": config_hash(config),
        "kl": kl_label,
        "command": command,
        "resume_command": resume_command(command),
        "evaluate_command": evaluate_command(run, config),
        "mlflow_uri": config.tracking.uri,
        "run_id": run_id,
    }
    extension = extension_of(run)
    if extension is not None:
        summary["extends"] = asdict(extension)
    return summary


def write_failed_batch(run: RunDir, reason: str, rows: Sequence[Scored]) -> Path:
    """Write the rows on which an update failed to RUN/failed_batch.json, with the sampler's log-probs."""
    file = run.path / "failed_batch.json"
    entries = []
    for row in rows:
        # With the sampler's log-probs, without which the update cannot be repeated.
        entry = dict(sample_rows((row,))[0])
        entry["completion_ids"] = row.rollout.completion_ids
        entry["behaviour_logps"] = row.rollout.logps
        entry["trained"] = row.rollout.trained_mask
        entry["restarts"] = row.rollout.restarts
        entries.append(entry)
    atomic_write(file, json.dumps({"reason": redact(reason), "rows": entries}, indent=1))
    return file
