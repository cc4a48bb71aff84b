"""The page "Your own data, model and reward": its files and commands, from top to bottom, with tiny models."""

import contextlib
import re
import shlex
from pathlib import Path

import pytest

from commands import Command
from kl_comedy.config.schema import DatasetConfig
from kl_comedy.data import load_problems
from saved_models import llama, save

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "your_own.md").read_text()
BLOCKS = re.findall(r"^```bash\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
STEP = re.compile(
    r"^cat > (?P<file>\S+) <<'END'\n(?P<text>.*?)^END\n"
    r"|^python - <<'END'\n(?P<script>.*?)^END\n"
    r"|^(?P<command>kl-comedy [^\n]*)\n",
    re.MULTILINE | re.DOTALL,
)
"""A file that a block writes, a script that it runs, or a command."""


def steps():
    """The steps of the page in order. Fails for a line of a block that is none of them."""
    for block in BLOCKS:
        assert STEP.sub("", block).strip() == "", block
        yield from STEP.finditer(block)


def write_models(folder):
    """The two folders that the page names: a model with a sliding window, and an adapter beside its base."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import MistralConfig, MistralForCausalLM

    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    torch.manual_seed(0)
    config = MistralConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, head_dim=4, sliding_window=5)
    save(folder / "my_mistral", MistralForCausalLM(config).eval())
    base = llama()
    save(folder / "base", base)
    base.name_or_path = str(folder / "base")
    get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")).save_pretrained(
        folder / "my_adapter"
    )


def test_the_page_has_the_steps_that_it_is_for():
    text = "\n".join(BLOCKS)
    for needed in ("dataset: csv", "jsonl", "parquet", "saved", "my_mistral", "my_adapter", "model.lora", "--plugin"):
        assert needed in text, needed
    assert len([step for step in steps() if step["command"]]) >= 12


def test_the_data_of_the_page_are_the_same_from_every_source(tmp_path):
    (csv,) = [step["text"] for step in steps() if step["file"] == "sums.csv"]
    (tmp_path / "sums.csv").write_text(csv)
    (script,) = [step["script"] for step in steps() if step["script"]]
    with contextlib.chdir(tmp_path):
        exec(script, {})
    sources = {"csv": "sums.csv", "jsonl": "sums.jsonl", "parquet": "sums.parquet", "saved": "sums_saved"}
    problems = {}
    for dataset, name in sources.items():
        split = "train" if dataset == "saved" else None
        config = DatasetConfig(dataset=dataset, path=str(tmp_path / name), split=split)
        loaded = load_problems(config, key="data.train", training=True, allow_test_split=False)
        problems[dataset] = [(problem.text, problem.answer) for problem in loaded]
    assert len(problems["csv"]) == 4
    assert all(loaded == problems["csv"] for loaded in problems.values()), problems


@pytest.mark.slow
def test_every_command_of_the_page_runs(tmp_path):
    write_models(tmp_path / "models")
    environment = {"KL_COMEDY_CACHE": str(tmp_path / "cache"), "COLUMNS": "100"}
    for step in steps():
        if step["file"]:
            (tmp_path / step["file"]).write_text(step["text"])
        elif step["script"]:
            (tmp_path / "script.py").write_text(step["script"])
            Command("script.py", cwd=tmp_path, env=environment).finish()
        else:
            words = shlex.split(step["command"])[1:]
            output = Command(*words, cwd=tmp_path, env=environment).finish()
            assert "Traceback" not in output, (words, output)
    finished = len(list(tmp_path.glob("runs/mine-*/summary.json")))
    assert finished == len([step for step in steps() if (step["command"] or "").startswith("kl-comedy train")])
