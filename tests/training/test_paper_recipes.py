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
from kl_comedy.planning.plan import Plan
from kl_comedy.planning.sizes import KNOWN, device_named, known_config
from kl_comedy.rollouts.engines.jobs import check_job_servers
from kl_comedy.slurm.grid import read_grid
from kl_comedy.slurm.manifest import Sweep, plan
from kl_comedy.slurm.profile import read_profile
from kl_comedy.slurm.scripts import scripts
from kl_comedy.training.build import check_parts
from kl_comedy.training.run import train

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "configs" / "paper").glob("*.yaml"))
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "head_dim": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
ONE_SMALL_UPDATE = [
    "rollout.prompts_per_batch=2",
    "rollout.group_size=2",
    "rollout.max_new_tokens=16",
    "rollout.backend=hf",
    "rollout.options={}",
    "train.steps=1",
    "train.eval_every=0",
    "train.threads=1",
    "train.strategy=single",
    "train.devices=1",
    "eval.at_start=false",
    "eval.max_new_tokens=4",
    "model.device=cpu",
    "tracking.uri=none",
]
TEMPLATE = "{% for turn in messages %}<turn>{{ turn['content'] }}{% endfor %}"


def small_model(folder, source):
    """Random weights in the architecture of ``source``, and a tokenizer of bytes with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: n for n, letter in enumerate(["<eos>", "<turn>", *letters])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<eos>", additional_special_tokens=["<turn>"], chat_template=TEMPLATE
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = known_config(source, **SMALL, vocab_size=len(vocabulary), eos_token_id=0, bos_token_id=None)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def math_rows(path, kind):
    """A file of four problems."""
    with path.open("w") as file:
        for n in range(1, 5):
            row = {"id": f"{kind}/{n}", "problem": f"What is ${n}+{n}$? ({kind})", "answer": str(2 * n)}
            file.write(json.dumps(row) + "\n")
    return path


def data_of(recipe, folder):
    """Overrides that put a few problems of the recipe's kind in place of its own."""
    if recipe.data.train.dataset == "reasoning_gym":
        pytest.importorskip("reasoning_gym")
        limits = [f"data.eval.{name}.limit=2" for name in recipe.data.eval]
        return ["data.train.limit=4", *limits]
    overrides = local("data.train", math_rows(folder / "train.jsonl", "train"))
    for name in recipe.data.eval:
        overrides += local(f"data.eval.{name}", math_rows(folder / f"{name}.jsonl", name))
    return overrides


def local(key, path):
    """Overrides that put a file in place of a hub dataset."""
    unset = {"name": "null", "subset": "null", "split": "null", "fields": "{}", "options": "{}", "limit": "null"}
    values = {**unset, "dataset": "jsonl", "path": path}
    return [f"{key}.{name}={value}" for name, value in values.items()]


@pytest.mark.parametrize(
    "path",
    [RECIPES[0], *(pytest.param(path, marks=pytest.mark.slow) for path in RECIPES[1:])],
    ids=lambda path: path.stem,
)
def test_one_update_on_a_small_model_of_the_same_architecture(path, tmp_path):
    recipe = load_config(path, [])
    assert recipe.model.source in KNOWN
    small_model(tmp_path / "model", recipe.model.source)
    # No random model answers a problem: the length of its answers gives the update something to learn.
    rewards = [{"name": reward.name, "options": reward.options} for reward in recipe.rewards]
    rewards.append({"name": "length", "options": {"full": 64}})
    overrides = [
        *ONE_SMALL_UPDATE,
        *data_of(recipe, tmp_path),
        f"model.source={tmp_path / 'model'}",
        f"output={tmp_path}",
        f"rewards={json.dumps(rewards)}",
    ]
    config = load_config(path, overrides)
    assert config.kl == recipe.kl
    assert config.algorithm == recipe.algorithm
    assert config.lag == recipe.lag
    done = train(config, console=Console(file=io.StringIO()), command=f"kl-comedy train {path.name}")
    metrics = done.summary["metrics"]
    assert done.summary["status"] == "FINISHED"
    assert metrics["kl/exact_reverse_token"] == 0.0
    assert metrics["grad/norm"] > 0
    config_file = json.loads((done.run.policy / "config.json").read_text())
    assert config_file["model_type"] == KNOWN[recipe.model.source]["model_type"]
    before = load_file(tmp_path / "model" / "model.safetensors")
    after = load_file(done.run.policy / "model.safetensors")
    assert before.keys() == after.keys()
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert changed, "the update changed no weight"


def test_the_recipes_cover_the_papers_models_and_architectures():
    sources = {load_config(path, []).model.source for path in RECIPES}
    assert {KNOWN[source]["model_type"] for source in sources} == {"qwen2", "llama", "qwen3"}
    assert len(RECIPES) == 4


SINGLE_GPU = sorted((ROOT / "configs").glob("qwen2.5_*_gsm8k*.yaml"))


@pytest.mark.parametrize("path", [*RECIPES, *SINGLE_GPU], ids=lambda path: path.stem)
def test_it_is_checked_planned_and_says_how_to_get_its_model_and_data(path):
    """The recipes of the paper on a node of 8 GPUs, four of them for engines; the others on one GPU of 24 GB."""
    config = load_config(path, [])
    text = path.read_text()
    check_parts(config)
    is_paper = path in RECIPES
    if is_paper:
        gpus = 8
        device = "h100-80"
    else:
        gpus = 1
        device = "rtx4090-24"
    rows = what_starts(config, gpus=gpus)
    assert ("on GPUs 4, 5, 6, 7" in rows["sampler"]) is is_paper
    assert Plan(config, device_named(device)).fits
    assert config.train.exact_kl_every == 10
    assert f"hf download {config.model.source}\n" in text
    assert "no GPU was at hand" in text
    for data in (config.data.train, *config.data.eval.values()):
        if data.dataset != "reasoning_gym":  # which makes its problems itself
            assert f"get('{data.name}'" in text
    if not is_paper:
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
    planned = plan(grid, directory=tmp_path, extra=size)
    manifest = planned.manifest
    site = read_profile(str(ROOT / "slurm" / "profiles" / f"{profile}.yaml"))
    texts = scripts(Sweep(path=tmp_path / "sweep", manifest=manifest), site, manifest.cells)
    assert "--cell" in texts["train"]
    cell = manifest.cells[0]
    check_job_servers(planned.configs[0], site.shape_for(cell).servers.gpus)
