"""The recipes of configs/paper on small random models of their own architectures: one whole update each."""

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from kl_comedy.cli.check import what_starts
from kl_comedy.config import load_config
from kl_comedy.lab.planning.plan import Plan
from kl_comedy.lab.planning.sizes import KNOWN, device_named, known_config
from kl_comedy.rollouts.engines.jobs import check_job_servers
from kl_comedy.slurm.grid import read_grid
from kl_comedy.slurm.manifest import Sweep, plan
from kl_comedy.slurm.profile import read_profile
from kl_comedy.slurm.scripts import scripts
from kl_comedy.training.build import check_parts
from kl_comedy.training.run import train

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "configs" / "paper").glob("*.yaml"))
SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024}
SIZES = ["rollout.prompts_per_batch=2", "rollout.group_size=2", "rollout.max_new_tokens=16", "train.steps=1"]
SIZES += ["train.eval_every=0", "eval.at_start=false", "eval.max_new_tokens=4"]
SIZES += ["model.device=cpu", "tracking.uri=none", "train.threads=1"]
SIZES += ["train.strategy=single", "train.devices=1", "rollout.backend=hf", "rollout.options={}"]
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
    if recipe.data.train.dataset == "reasoning_gym":
        pytest.importorskip("reasoning_gym")
        return ["data.train.limit=4", *(f"data.eval.{name}.limit=2" for name in recipe.data.eval)]
    keys = {"data.train": "train", **{f"data.eval.{name}": name for name in recipe.data.eval}}
    return [word for key, name in keys.items() for word in local(key, math_rows(folder / f"{name}.jsonl", name))]


def local(key, path):
    """Overrides that put a file in place of a hub dataset."""
    unset = {"name": "null", "subset": "null", "split": "null", "fields": "{}", "options": "{}", "limit": "null"}
    return [f"{key}.{name}={value}" for name, value in {**unset, "dataset": "jsonl", "path": path}.items()]


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


SINGLE_GPU = sorted((ROOT / "configs").glob("qwen2.5_*_gsm8k*.yaml"))


@pytest.mark.parametrize("path", [*RECIPES, *SINGLE_GPU], ids=lambda path: path.stem)
def test_it_is_checked_planned_and_says_how_to_get_its_model_and_data(path):
    """The recipes of the paper on a node of 8 GPUs, four of them for engines; the others on one GPU of 24 GB."""
    config, text = load_config(path, []), path.read_text()
    check_parts(config)
    paper = path in RECIPES
    rows = what_starts(config, gpus=8 if paper else 1)
    assert ("on GPUs 4, 5, 6, 7" in rows["sampler"]) is paper
    planned = Plan(config, device_named("h100-80" if paper else "rtx4090-24"))
    assert planned.fits and config.train.exact_kl_every == 10
    assert f"hf download {config.model.source}\n" in text and "no GPU was at hand" in text
    for data in (config.data.train, *config.data.eval.values()):
        assert data.dataset == "reasoning_gym" or f"get('{data.name}'" in text
    if not paper:
        assert "verl, docs/algo/baseline.md" in text


@pytest.mark.parametrize("name", ["on_policy_math_llama", "on_policy_math_qwen", "async_math", "async_countdown"])
@pytest.mark.parametrize(
    ("profile", "size"),
    [
        ("gpu_1_node", []),
        ("gpu_2_plus_1_nodes", ["train.nodes=2", "train.devices=8"]),
        ("gpu_4_plus_2_nodes", ["train.nodes=4", "train.devices=8"]),
    ],
)
def test_its_grid_fits_the_profiles(name, profile, size, tmp_path):
    """Every cell has the profile's size and an engine that the profile can start."""
    grid = read_grid(ROOT / "configs" / "sweeps" / f"paper_{name}.yaml")
    manifest = plan(grid, directory=tmp_path, extra=size)
    site = read_profile(str(ROOT / "slurm" / "profiles" / f"{profile}.yaml"))
    texts = scripts(Sweep(path=tmp_path / "sweep", manifest=manifest), site, manifest.cells)
    assert "--cell" in texts["train"]
    cell = manifest.cells[0]
    check_job_servers(load_config(grid.base, cell.overrides), site.shape_for(cell).servers.gpus)
