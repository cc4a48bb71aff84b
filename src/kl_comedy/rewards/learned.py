"""A learned reward: the score that a sequence classifier gives a text, a whole batch at a time in this process.

The classifier is a folder as ``AutoModelForSequenceClassification.save_pretrained`` writes it, with its tokenizer.
torch and transformers are imported when it is first used.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from kl_comedy.errors import UserError, bad_value
from kl_comedy.records import Problem, Reward
from kl_comedy.registry import REWARDS
from kl_comedy.rewards.base import failure_verdict
from kl_comedy.rewards.text import clean

FOLDER = "a folder with a sequence classifier of one label and its tokenizer"
_DEFAULT_LABELS = 2
"""The labels of a transformers config that names none."""


def check_classifier(options: Mapping[str, Any], key: str) -> None:
    """Raise :class:`UserError` where ``options["folder"]`` is not such a folder; loads no model."""
    key = f"{key}.folder"
    folder = str(options.get("folder", ""))
    file = Path(folder) / "config.json"
    if not folder or not file.is_file():
        raise bad_value(key, folder, FOLDER, "it has no config.json")
    try:
        config = json.loads(file.read_bytes())
        classes = [str(name) for name in config.get("architectures") or ()]
        labels = len(config.get("id2label") or ()) or int(config.get("num_labels", _DEFAULT_LABELS))
    except (ValueError, TypeError, AttributeError) as error:
        raise bad_value(key, folder, FOLDER, f"its config.json cannot be read: {error}") from error
    if not classes or not all(name.endswith("ForSequenceClassification") for name in classes):
        raise bad_value(key, folder, FOLDER, f"its model is {', '.join(classes) or 'of no known class'}")
    if labels != 1:
        raise bad_value(key, folder, FOLDER, f"it has {labels} labels; a reward is one number")


@REWARDS.register(
    "model",
    source="proxy reward models, 2210.10760",
    batched=True,
    check=check_classifier,
    # The score of a gold answer is not judged, so that it needs no box, which its tokenizer may not know.
    boxed=False,
)
def model(
    completions: Sequence[str],
    problems: Sequence[Problem],
    *,
    folder: str = "",
    template: str = "{problem}{completion}",
    device: Literal["auto", "cpu", "cuda"] = "auto",
    batch_size: int = 64,
) -> list[Reward]:
    """The score, in float32, of the sequence classifier in ``folder`` for ``template`` with problem and completion.

    ``device``: ``auto`` is the GPU where there is one. A text of more tokens than the tokenizer's ``model_max_length``
    loses its beginning. ``refused``: the tokenizer cannot read it. ``unparseable``: it has no token. Raises
    :class:`UserError` for a folder that is no classifier.
    """
    if batch_size < 1:
        raise bad_value("batch_size", batch_size, "1 or more")
    import torch

    classifier, tokenizer = _loaded(folder, device)
    verdicts: list[Reward] = []
    rows: list[tuple[int, list[int]]] = []
    for completion, problem in zip(completions, problems, strict=True):
        # In one pass: a completion that contains "{problem}" stays as it is.
        before, has_completion, after = template.partition("{completion}")
        text = before.replace("{problem}", problem.text)
        if has_completion:
            text += completion + after.replace("{problem}", problem.text)
        try:
            ids = tokenizer(clean(text), truncation=True)["input_ids"]
        except Exception:  # parsers in Rust raise errors of many types; one text must not end a run
            verdicts.append(failure_verdict("model"))
            continue
        if ids:
            rows.append((len(verdicts), ids))
        verdicts.append(Reward(value=0.0, status="unparseable"))

    # Rows of similar length together, so that little is padding. The order depends on the rows only.
    rows.sort(key=lambda row: len(row[1]))
    for start in range(0, len(rows), batch_size):
        batch = rows[start : start + batch_size]
        padded = tokenizer.pad({"input_ids": [ids for _, ids in batch]}, padding_side="right", return_tensors="pt")
        inputs = {name: padded[name].to(classifier.device) for name in ("input_ids", "attention_mask")}
        # The trainer may be in 16 bits; scores are not.
        with torch.inference_mode(), torch.autocast(classifier.device.type, enabled=False):
            scores_B = classifier(**inputs).logits[:, 0]
        for (place, _), score in zip(batch, scores_B.tolist(), strict=True):
            verdicts[place] = Reward(value=score)
    return verdicts


# A run has few, and loads each once for training, evaluation and the check of gold answers.
@functools.lru_cache(maxsize=4)
def _loaded(folder: str, device: str) -> tuple[Any, Any]:
    """The classifier in float32, ready for scores, and its tokenizer. Raises :class:`UserError`."""
    check_classifier({"folder": folder}, "options")
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    place = torch.device("cpu")
    if device != "cpu" and torch.cuda.is_available():
        # The process's own GPU, which Lightning has chosen.
        place = torch.device("cuda", torch.cuda.current_device())
    elif device == "cuda":
        raise bad_value("options.device", device, "auto, cpu", "torch sees no GPU here")
    local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, truncation_side="left", **local)
        loading: Any = AutoModelForSequenceClassification.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True, **local
        )
    except Exception as error:  # transformers' parsers, in Python and Rust, raise errors of many types
        first_line = str(error).strip().partition("\n")[0]
        raise bad_value("options.folder", folder, FOLDER, f"it cannot be loaded: {first_line}") from error
    classifier, report = loading
    missing = sorted(report["missing_keys"])
    if missing:
        # transformers draws them at random, and each run would have another reward.
        raise bad_value("options.folder", folder, FOLDER, f"it lacks the weights {', '.join(missing[:3])}")
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token is None:
            raise UserError(f"options.folder: the tokenizer in {folder!r} has neither a padding nor an end token")
        tokenizer.pad_token = tokenizer.eos_token
    # The classifier finds the last token of a row by this id.
    classifier.config.pad_token_id = tokenizer.pad_token_id
    return classifier.to(place).eval().requires_grad_(False), tokenizer
