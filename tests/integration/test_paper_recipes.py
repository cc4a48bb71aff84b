"""The recipes of configs/paper on small random models of their own architectures: one whole update each."""

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from kl_comedy.config import load_config
from kl_comedy.lab.planning import KNOWN, known_config
from kl_comedy.training.run import train

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "configs" / "paper").glob("*.yaml"))
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 1024,
}
SIZES = [
    "rollout.prompts_per_batch=2",
    "rollout.group_size=2",
    "rollout.max_new_tokens=16",
    "train.steps=1",
    "train.eval_every=0",
    "eval.at_start=false",
    "eval.max_new_tokens=4",
    "model.device=cpu",
    "tracking.uri=none",
    "train.threads=1",
]
TEMPLATE = "{% for turn in messages %}<turn>{{ turn['content'] }}{% endfor %}"


def small_model(folder, source):
    """Random weights in the architecture of ``source``, and a tokenizer of bytes with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: n for n, letter in enumerate(["<eos>", "<turn>", *letters])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<eos>", additional_special_tokens=["<turn>"], chat_template=TEMPLATE
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = known_config(source, **SMALL, vocab_size=len(vocabulary), eos_token_id=0, bos_token_id=None)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def math_rows(path, kind):
    rows = [{"id": f"{kind}/{n}", "problem": f"What is ${n}+{n}$? ({kind})", "answer": str(2 * n)} for n in range(1, 5)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def data_of(recipe, folder):
    """Overrides that put a few problems of the recipe's kind in place of its own."""
    if recipe.data.train.dataset != "jsonl":
        pytest.importorskip("reasoning_gym")
        return ["data.train.limit=4", *(f"data.eval.{name}.limit=2" for name in recipe.data.eval)]
    evals = [f"data.eval.{name}.path={math_rows(folder / f'{name}.jsonl', name)}" for name in recipe.data.eval]
    return [f"data.train.path={math_rows(folder / 'train.jsonl', 'train')}", *evals]


@pytest.mark.parametrize(
    "path",
    [RECIPES[0], *(pytest.param(path, marks=pytest.mark.slow) for path in RECIPES[1:])],
    ids=lambda path: path.stem,
)
def test_one_update_on_a_small_model_of_the_same_architecture(path, tmp_path):
    recipe = load_config(path, [])
    assert recipe.model.source in KNOWN
    small_model(tmp_path / "model", recipe.model.source)
    overrides = [*SIZES, *data_of(recipe, tmp_path), f"model.source={tmp_path / 'model'}", f"output={tmp_path}"]
    # No random model answers a problem: the length of its answers gives the update something to learn.
    rewards = [{"name": reward.name, "options": reward.options} for reward in recipe.rewards]
    overrides.append(f"rewards={json.dumps([*rewards, {'name': 'length', 'options': {'full': 64}}])}")
    config = load_config(path, overrides)
    assert (config.kl, config.algorithm, config.lag) == (recipe.kl, recipe.algorithm, recipe.lag)
    done = train(config, console=Console(file=io.StringIO()), command=f"kl-comedy train {path.name}")
    metrics = done.summary["metrics"]
    assert done.summary["status"] == "FINISHED" and metrics["kl/exact_reverse_token"] == 0.0
    assert metrics["grad/norm"] > 0
    config_file = json.loads((done.run.policy / "config.json").read_text())
    assert config_file["model_type"] == KNOWN[recipe.model.source]["model_type"]
    before, after = (load_file(folder / "model.safetensors") for folder in (tmp_path / "model", done.run.policy))
    assert before.keys() == after.keys() and any(not torch.equal(before[name], after[name]) for name in before)


def test_the_recipes_cover_the_papers_models_and_architectures():
    sources = {load_config(path, []).model.source for path in RECIPES}
    assert {KNOWN[source]["model_type"] for source in sources} == {"qwen2", "llama", "qwen3"}
    assert len(RECIPES) == 4
