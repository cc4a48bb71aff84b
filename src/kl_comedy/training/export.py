"""A trained policy as a Hugging Face folder: at the end of a run, or from any of its checkpoints.

A LoRA run gives the merged model, which needs no PEFT to load, and beside it the adapter.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import kl_comedy
from kl_comedy.config import Config, config_hash
from kl_comedy.errors import RunFailed, UserError, bad_value
from kl_comedy.io import write_checksums
from kl_comedy.kl import resolve_terms
from kl_comedy.models import LoadedModel
from kl_comedy.models.introspection import unwrap
from kl_comedy.models.load import load_base, load_tokenizer, whole_model
from kl_comedy.models.lora import lora_scaling, merge_adapter, save_adapter
from kl_comedy.models.sharding import skeleton
from kl_comedy.models.sources import first_line, hub_address, hub_answers
from kl_comedy.models.weights import stream_weights
from kl_comedy.records import RUN_SCORES
from kl_comedy.training.checkpoint import (
    MANIFEST,
    SafeReader,
    best,
    damage,
    load_tensors,
    manifest,
    newest_checkpoint,
    unreadable,
)
from kl_comedy.training.run_folder import RunDir, saved, step_of
from kl_comedy.training.tags import term_tags

if TYPE_CHECKING:
    from kl_comedy.training.module import PolicyModule  # imports Lightning, which takes seconds

_CHECKPOINT_PREFIX = "model.policy."


def save_policy(run: RunDir, module: PolicyModule) -> None:
    """Write RUN/policy, and RUN/adapter of a LoRA run, from the weights in memory. Every process must call.

    A sharded policy is gathered into the host memory of the first process.
    """
    loaded, config, ranks = module.loaded, module.config, module.ranks
    weights: dict[str, Tensor] = {}
    for bucket in stream_weights(loaded.model, config.train.bucket_mib * 2**20):
        if ranks.is_rank_zero:
            # Bucket by bucket to the host: a gathered policy need not fit on a GPU.
            weights |= {name: tensor.cpu() for name, tensor in bucket}
    if not ranks.is_rank_zero:  # these have taken part in gathering the shards
        return
    with _atomic_folder(run.policy) as folder:
        _write_policy(folder, loaded, config, weights)
    if config.model.lora is not None:
        with _atomic_folder(run.adapter) as folder:
            save_adapter(folder, whole_model(config.model), weights)


def export_policy(run: RunDir, config: Config, out: Path, *, which: str) -> Path:
    """Write the policy of checkpoint ``which`` (``newest``, ``best``, an update's number or a folder) to ``out``.

    The adapter of a LoRA policy goes to ``out/adapter``. Holds the whole policy in memory. Returns the checkpoint.
    Raises :class:`UserError` where there is no such undamaged checkpoint, or ``out`` is not a new or empty folder.
    """
    # An older export in the same folder might leave files that the new one does not overwrite.
    is_new_or_empty = not out.exists() or (out.is_dir() and not any(out.iterdir()))
    if not is_new_or_empty:
        raise UserError(f"{out} exists and is not an empty folder; name a new one")
    checkpoint = _find_checkpoint(run, which)
    model: Any
    if config.model.gguf_file is None:
        model = skeleton(config.model)  # without weights: the checkpoint has all of them
    else:
        # A GGUF file has no config.json of which a skeleton could be built.
        model = load_base(config.model)
    tokenizer = load_tokenizer(config.model)
    loaded = LoadedModel(model=model, tokenizer=tokenizer, device=torch.device("cpu"), source=config.model.source)
    weights = _checkpoint_weights(checkpoint)
    try:
        with _atomic_folder(out) as folder:
            _write_policy(folder, loaded, config, weights)
            certificate = term_tags(config, resolve_terms(config.kl))
            write_card(folder, config, run.summary() or {}, certificate, manifest(checkpoint)["step"])
            if config.model.lora is not None:
                save_adapter(folder / "adapter", whole_model(config.model), weights)
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error.strerror or error}") from error
    return checkpoint


def check_hub(option: str, name: str) -> None:
    """Raise :class:`UserError` where a model called ``name`` cannot be uploaded: no hub, no token, no such name."""
    from huggingface_hub import get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise bad_value(option, name, "NAME or OWNER/NAME", first_line(error)) from None
    if not hub_answers():
        raise UserError(f"{option}: {hub_address()} does not answer, or HF_HUB_OFFLINE is set; export without it")
    if get_token() is None:
        raise UserError(f"{option}: there is no token for {hub_address()}: run `hf auth login`, or set HF_TOKEN")


def upload_to_hub(folder: Path, name: str, *, public: bool) -> str:
    """Upload an exported policy with its card as a model of the hub, and return its address.

    A new model is private unless ``public``; one that is there keeps its visibility. Raises :class:`RunFailed` where
    the hub refuses it; the folder stays.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        model = api.create_repo(name, private=not public, exist_ok=True)
        api.upload_folder(repo_id=model.repo_id, folder_path=folder, commit_message="Upload by kl-comedy export")
    except Exception as error:  # the hub's client raises errors of many types
        raise RunFailed(f"{folder} is written, but could not be uploaded as {name}: {first_line(error)}") from error
    return str(model)


def _checkpoint_weights(checkpoint: Path) -> dict[str, Tensor]:
    """The policy's weights in a checkpoint, whole, by their names in the model."""
    reader = SafeReader(checkpoint)
    tensors: dict[str, Tensor] = {}
    with unreadable(checkpoint):
        for name, metadata in reader.read_metadata().state_dict_metadata.items():
            # A checkpoint has the optimizer's moments too, which are twice the policy.
            if name.startswith(_CHECKPOINT_PREFIX):
                tensors[name] = torch.empty(metadata.size, dtype=metadata.properties.dtype)
        load_tensors(tensors, reader)
    return {name.removeprefix(_CHECKPOINT_PREFIX): tensor for name, tensor in tensors.items()}


def _write_policy(folder: Path, loaded: LoadedModel, config: Config, weights: Mapping[str, Tensor]) -> None:
    """Config, tokenizer and ``weights`` (whole tensors by their names in the model), a LoRA adapter merged."""
    if config.model.lora is not None:
        weights = dict(merge_adapter(weights.items(), lora_scaling(config.model.lora)))
    unwrap(loaded.model).save_pretrained(folder, state_dict=dict(weights))
    loaded.tokenizer.save_pretrained(folder)


def write_card(
    folder: Path, config: Config, summary: Mapping[str, Any], certificate: Mapping[str, str], update: int | None = None
) -> None:
    """Write README.md, a model card: the certificate of the KL terms and the results of the run up to ``update``."""
    # A callback of the user's may have stopped the run before its last update.
    last_update = summary.get("steps", config.train.steps)
    update = update or last_update
    header = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    source = config.model.source
    is_on_the_hub = source != "pocket" and not Path(source).is_dir()
    if is_on_the_hub:
        header["base_model"] = source
    facts = {
        "base model": source,
        "update": update,
        "config hash, seed": f"{config_hash(config)}, {config.seed}",
        "KL terms": certificate["kl.label"],
        "they optimize (exact enumeration)": certificate["kl.verdict"],
        "regime": certificate["kl.regime"].replace("_", "-"),
        "relative bias, cosine to the sequence-level reverse KL": (
            f"{certificate['kl.relative_bias']}, {certificate['kl.cosine']}"
        ),
    }
    facts |= _scores_until(update, summary)
    if update == last_update:
        # The summary's metrics are those of the last update.
        measured = summary.get("metrics", {})
        names = {
            "train/reward": "training reward",
            "train/gold": "gold verdict in training",
            "kl/exact_reverse_sequence": "exact KL, nats per completion",
        }
        facts |= {text: f"{measured[name]:.4g}" for name, text in names.items() if name in measured}
    (folder / "README.md").write_text(_card_text(config.name, header, facts), encoding="utf-8")


def _scores_until(update: int, summary: Mapping[str, Any]) -> dict[str, str]:
    """A line per evaluation set: its scores at each update that was evaluated, up to ``update``."""
    lines = {}
    for kind, score in RUN_SCORES.items():
        for name, history in summary.get(kind, {}).items():
            scores = sorted((int(at), value) for at, value in history.items() if int(at) <= update)
            lines[f"{name}, {score}"] = ", ".join(f"{value:.3f} at update {at}" for at, value in scores)
    return lines


def _card_text(name: str, header: Mapping[str, str], facts: Mapping[str, Any]) -> str:
    lines = ["---"]
    lines += [f"{key}: {value}" for key, value in header.items()]
    lines += ["tags: [reinforcement-learning, kl_comedy]", "---"]
    lines += [f"# {name}", "", f"A policy trained with kl_comedy {kl_comedy.__version__}.", ""]
    lines += ["| | |", "|---|---|"]
    for fact, value in facts.items():
        # A bar would end the cell of the table.
        cell = str(value).replace("|", "&#124;")
        lines.append(f"| {fact} | {cell} |")
    lines += [
        "",
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        "policy = AutoModelForCausalLM.from_pretrained(FOLDER)",
        "tokenizer = AutoTokenizer.from_pretrained(FOLDER)",
        "```",
        "",
    ]
    return "\n".join(lines)


@contextlib.contextmanager
def _atomic_folder(target: Path) -> Iterator[Path]:
    """A new folder to write into, renamed to ``target`` in place of an older one where no exception was raised."""
    # Beside the target, because a rename is atomic within one file system only.
    folder = target.with_name(f".{target.name}.writing")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield folder
        # Before the rename: a folder under its final name is whole and can be checked.
        write_checksums(folder)
        if target.exists():
            shutil.rmtree(target)
        folder.rename(target)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _find_checkpoint(run: RunDir, which: str) -> Path:
    """The checkpoint that ``which`` names; for ``newest``, damaged ones are skipped with a warning."""
    steps = {str(step_of(path)): path for path in saved(run.checkpoints)}
    is_folder = which not in ("newest", "best", *steps) and (Path(which) / MANIFEST).is_file()
    if not steps and not is_folder:
        raise UserError(f"{run.path} holds no checkpoint; a finished run's policy is in {run.policy}")
    if which == "newest":
        newest = newest_checkpoint(run.checkpoints, rename=False)
        if newest is None:
            raise UserError(f"{run.checkpoints} holds no whole checkpoint")
        return newest
    chosen: Path | None
    if is_folder:
        chosen = Path(which)  # of Lightning's ModelCheckpoint
    elif which == "best":
        chosen = best(run.checkpoints)
    else:
        chosen = steps.get(which)
    if chosen is None:
        allowed = ["newest"]
        reason = ""
        if which != "best":
            allowed.append("best")
        else:
            reason = "no checkpoint of this run was evaluated"
        raise bad_value("--checkpoint", which, [*allowed, *steps], reason)
    fault = damage(chosen)
    if fault is not None:
        raise UserError(f"checkpoint {chosen} is damaged: {fault}")
    return chosen
