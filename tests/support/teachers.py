"""A teacher model in a folder, and terms that need it."""

from pathlib import Path

import torch

from kl_comedy.config import load_config
from kl_comedy.models import load_model, weights_hash

TINY = Path(__file__).with_name("tiny.yaml")
OTHER = "{preset: tiny, hidden_size: 32, slip: 0.0, warmstart_steps: 30}"
SERVED_TERMS = [
    "kl=[{estimator: top_k, reference: teacher, placement: loss, options: {k: 4, tokens: reference}}]",
    "algorithm.reward_weight=0",
]
TEACHER = [f"reference.teacher={{source: pocket, options: {OTHER}}}", "algorithm.reward_weight=0"]


def save_teacher(folder, factor=1.0):
    """The teacher of these tests in a folder, the logits times ``factor``; its hash."""
    teacher = load_model(load_config(TINY, [f"model.options={OTHER}"]).model)
    with torch.no_grad():
        teacher.model.lm_head.weight.mul_(factor)
    teacher.model.save_pretrained(folder)
    teacher.tokenizer.save_pretrained(folder)
    return weights_hash(teacher.model)
