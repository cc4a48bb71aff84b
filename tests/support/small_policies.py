"""Small policies that vLLM's CPU build can serve (its attention wants heads of 32 at least), and their prompts."""

import torch

from kl_comedy.config.schema import LoraConfig, ModelConfig
from kl_comedy.models import load_model
from kl_comedy.models.pocket import VOCABULARY
from kl_comedy.models.types import LoadedModel
from kl_comedy.records import Problem, Prompt
from passes import token_pass

POCKET = {"preset": "tiny", "heads": 2}


def pocket(lora=False, **changes):
    """The tiny pocket policy, warm-started; or a random one of its shape where ``changes`` are given to its config."""
    lora_config = LoraConfig(rank=4) if lora else None
    loaded = load_model(ModelConfig(source="pocket", options=POCKET, lora=lora_config))
    if not changes:
        return loaded
    from transformers import LlamaForCausalLM

    config_class = type(loaded.causal.config)
    config = config_class.from_dict(loaded.causal.config.to_dict() | changes)
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    return LoadedModel(model=model, tokenizer=loaded.tokenizer, device=loaded.device, source="test")


def prompt(text):
    ids = tuple(VOCABULARY.index(letter) for letter in text)
    return Prompt(problem=Problem(id=text, text=text, answer=""), text=text, token_ids=ids)


PROMPTS = [prompt(text) for text in ("1+2+3=", "9-", "7+7+7=", "1+2+3=")]


def perturb(model, size=0.05, seed=0):
    """Move every weight, as an update would, only further."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=generator, dtype=torch.float32)
            # A weight of one element has no deviation, one that begins as zeros a deviation of 0.
            scale = weight.float().std().nan_to_num(0.1).clamp(min=0.01)
            weight.add_((size * scale * noise).to(weight.dtype))


def versions_of(rollouts):
    """The versions of the weights by which any of their tokens was drawn."""
    versions = set()
    for rollout in rollouts:
        versions.update(rollout.versions)
    return versions


def largest_gap(loaded, rollouts, temperature=1.0, start=0):
    """Largest difference (nats) between the rollouts' log-probs, from token ``start`` on, and the learner's."""
    worst = 0.0
    for rollout in rollouts:
        ids = torch.tensor([rollout.completion_ids])
        prompt_BP = torch.tensor([rollout.prompt.token_ids])
        with torch.no_grad():
            scored = token_pass(
                loaded.model,
                prompt_ids_BP=prompt_BP,
                prompt_mask_BP=torch.ones_like(prompt_BP),
                ids_BT=ids,
                mask_BT=torch.ones_like(ids, dtype=torch.bool),
                temperature=temperature,
                chunk_elements=10**7,
            )
        gap_T = scored.logp_BT[0] - torch.tensor(rollout.logps)
        worst = max(worst, float(gap_T[start:].abs().max()))
    return worst
