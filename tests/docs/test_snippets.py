"""The snippets of CONTRIBUTING and README run, and what they register trains."""

import json
import re
from pathlib import Path

from commands import Command

ROOT = Path(__file__).parents[2]
TINY = ROOT / "tests" / "support" / "tiny.yaml"


def sections(page: str) -> dict[str, list[str]]:
    """The Python blocks under each heading of a page."""
    blocks_of = {}
    for part in re.split(r"^## ", (ROOT / page).read_text(), flags=re.MULTILINE)[1:]:
        blocks = re.findall(r"^```python\n(.*?)^```$", part, flags=re.MULTILINE | re.DOTALL)
        if blocks:
            blocks_of[part.split("\n")[0]] = blocks
    return blocks_of


GUIDES = sections("CONTRIBUTING.md")
SCRIPTS = ["\n".join(blocks) for blocks in [*GUIDES.values(), *sections("README.md").values()]]


def test_there_are_four_guides():
    assert list(GUIDES) == ["Add an estimator", "Add a reward", "Add a rollout backend", "Add a Lightning callback"]
    for title, blocks in GUIDES.items():
        assert len(blocks) == 2, title


def test_snippets_run(tmp_path):
    """Each heading's snippets as one script, all in one process: they register different names."""
    names = []
    for number, script in enumerate(SCRIPTS):
        names.append(f"{number}.py")
        (tmp_path / names[-1]).write_text(script)
    (tmp_path / "all.py").write_text(f"import runpy\nfor name in {names}: runpy.run_path(name)")
    Command("all.py", cwd=tmp_path).finish()


NAMES_OF_A_READER = """
from types import SimpleNamespace

import torch

weight = torch.nn.Parameter(torch.zeros(4, 7))
batches = [
    SimpleNamespace(
        ids=None,
        ref_logp=torch.full((4, 7), -1.5),
        sampler_logp=torch.full((4, 7), -2.0),
        mask=torch.ones(4, 7, dtype=torch.bool),
    )
] * 2
policy = SimpleNamespace(token_logp=lambda ids: weight - 2.0)
optimizer = torch.optim.Adam([weight], lr=0.1)


def policy_loss(logp, batch):
    return torch.zeros_like(logp)


"""
"""What the page on one's own trainer takes as given."""


def test_the_page_on_ones_own_trainer_runs_from_top_to_bottom(tmp_path):
    page = (ROOT / "docs" / "in_your_own_trainer.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 5
    moved = 'assert (weight > 0).all(), "the KL pulls the policy toward the reference"\n'
    (tmp_path / "page.py").write_text(NAMES_OF_A_READER + "\n".join(blocks) + moved)
    Command("page.py", cwd=tmp_path).finish()


def test_a_run_trains_with_all_that_the_guides_and_the_example_register(tmp_path):
    (tmp_path / "my_parts.py").write_text("\n".join(blocks[0] for blocks in GUIDES.values()))
    terms = "[{estimator: log_cosh, placement: loss, beta: 0.01}, {estimator: k2_shift, placement: loss, beta: 0.01}]"
    overrides = f"""
        kl={terms}
        rollout.backend=plain
        callbacks=[{{name: stop_at_kl, options: {{nats: 5.0}}}}]
        rewards=[{{name: last_number, options: {{max_chars: 200}}}}]
        model.options.warmstart_steps=5
        train.steps=2
        train.eval_every=0
        data.eval={{}}
        rollout.max_new_tokens=4
        output=runs"""
    plugins = ("--plugin", "my_parts.py", "--plugin", ROOT / "examples" / "register_estimator.py")
    words = [line.strip() for line in overrides.strip().splitlines()]
    Command("train", TINY, *words, *plugins, cwd=tmp_path).finish()
    (summary,) = tmp_path.glob("runs/tiny-*/summary.json")
    result = json.loads(summary.read_text())
    assert result["status"] == "FINISHED"
    assert result["kl"] == "0.01 log_cosh_reverse_token in loss + 0.01 k2_shift_reverse_token in loss"
    assert "train/reward/last_number" in result["metrics"]
    assert result["metrics"]["policy/behaviour_gap_max"] < 1e-4
