"""Fit a small reward model on gold verdicts of samples of a policy, as a proxy reward that can be over-optimized.

    python examples/fit_reward_model.py hack_pocket --samples 500 --out proxy
    kl-comedy train hack_pocket 'rewards=[{name: model, options: {folder: proxy}}]' kl=none

The labels are the verdicts of the config's ``gold`` (its reward where it has none). The model is the policy's body with
a scalar head in place of the vocabulary, as in 2210.10760; its score is the logit of a right answer. A fifth of the
samples is held out, and says how good the proxy is where the policy is now, not where training will take it. Minutes on
one core for the pocket policy.
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path

import torch
from torch.nn.functional import binary_cross_entropy_with_logits
from transformers import AutoModelForSequenceClassification

from kl_comedy.config import load_config
from kl_comedy.config.shipped import find_config
from kl_comedy.rollouts import Sampling
from kl_comedy.training.experience_module import build_in_process


def labelled_samples(config, count, seed):
    """``count`` texts of problem and completion with their gold verdicts, and the policy with its tokenizer."""
    module, data = build_in_process(config)
    try:
        prompts = data.prompts.train[:count]
        sampling = Sampling(temperature=config.rollout.temperature, max_new_tokens=config.rollout.max_new_tokens)
        rollouts = data.backend.generate(prompts, group_size=1, sampling=sampling, seed=seed)
        scored = data.scorer.score(rollouts)
    finally:
        data.close()
    texts = [row.rollout.prompt.problem.text + row.rollout.text for row in scored]
    golds = [row.reward.value if row.reward.gold is None else row.reward.gold for row in scored]
    return texts, torch.tensor(golds), module.loaded


def classifier_of(causal):
    """A classifier with one label: the body of ``causal``, and a new head."""
    config = copy.deepcopy(causal.config)
    config.num_labels = 1
    classifier = AutoModelForSequenceClassification.from_config(config)
    classifier.base_model.load_state_dict(causal.base_model.state_dict())
    return classifier


def fit(classifier, tokenizer, texts, golds_B, *, epochs, batch_size, lr):
    """Minimize the cross-entropy of the verdicts."""
    optimizer = torch.optim.AdamW(classifier.parameters(), lr=lr)
    for _ in range(epochs):
        for rows in torch.randperm(len(texts)).split(batch_size):
            scores_B = scores(classifier, tokenizer, [texts[row] for row in rows])
            loss = binary_cross_entropy_with_logits(scores_B, golds_B[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def scores(classifier, tokenizer, texts):
    padded = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
    return classifier(input_ids=padded["input_ids"], attention_mask=padded["attention_mask"]).logits[:, 0]


def ranking(classifier, tokenizer, texts, golds_B):
    """The share of pairs of a right and a wrong text of which the right one has the higher score: 0.5 is chance."""
    with torch.no_grad():
        scores_B = scores(classifier, tokenizer, texts)
    is_right_B = golds_B > 0.5
    differences = scores_B[is_right_B, None] - scores_B[None, ~is_right_B]
    return float((differences > 0).float().mean())


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("config", nargs="?", default="hack_pocket")
    parser.add_argument("overrides", nargs="*", help="keys of the config, as key=value")
    parser.add_argument("--samples", type=int, default=500)
    parser.add_argument("--out", type=Path, default=Path("proxy"))
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=50)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)

    config = load_config(find_config(arguments.config), arguments.overrides)
    texts, golds_B, loaded = labelled_samples(config, arguments.samples, arguments.seed)
    classifier = classifier_of(loaded.causal).float().cpu()
    held_out = len(texts) // 5
    settings = {"epochs": arguments.epochs, "batch_size": arguments.batch_size, "lr": arguments.lr}
    fit(classifier.train(), loaded.tokenizer, texts[held_out:], golds_B[held_out:], **settings)

    classifier.eval()
    for name, part in (("trained on", slice(held_out, None)), ("held out", slice(held_out))):
        share = ranking(classifier, loaded.tokenizer, texts[part], golds_B[part])
        print(
            f"{name}: {len(texts[part])} samples, {float(golds_B[part].mean()):.3f} right, pairs in order {share:.3f}"
        )
    classifier.save_pretrained(arguments.out)
    loaded.tokenizer.save_pretrained(arguments.out)
    print(arguments.out)


if __name__ == "__main__":
    main()
