"""The snippets of CONTRIBUTING and README run, and what they register trains."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TINY = ROOT / "tests" / "integration" / "tiny.yaml"


def sections(page: str) -> dict[str, list[str]]:
    """The Python blocks under each heading of a page."""
    found = {}
    for part in re.split(r"^## ", (ROOT / page).read_text(), flags=re.MULTILINE)[1:]:
        blocks = re.findall(r"^```python\n(.*?)^```$", part, flags=re.MULTILINE | re.DOTALL)
        if blocks:
            found[part.split("\n")[0]] = blocks
    return found


GUIDES = sections("CONTRIBUTING.md")
ALL = {**GUIDES, **{f"README: {title}": blocks for title, blocks in sections("README.md").items()}}


def python(*arguments, cwd):
    done = subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True, cwd=cwd, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_there_are_four_guides():
    assert list(GUIDES) == ["Add an estimator", "Add a reward", "Add a rollout backend", "Add a Lightning callback"]
    assert all(len(blocks) == 2 for blocks in GUIDES.values())


@pytest.mark.parametrize("title", ALL)
def test_snippets_run(title, tmp_path):
    (tmp_path / "snippet.py").write_text("\n".join(ALL[title]))
    python("snippet.py", cwd=tmp_path)


def test_a_run_trains_with_all_that_the_guides_and_the_example_register(tmp_path):
    (tmp_path / "my_parts.py").write_text("\n".join(blocks[0] for blocks in GUIDES.values()))
    terms = "[{estimator: log_cosh, placement: loss, beta: 0.01}, {estimator: k2_shift, placement: loss, beta: 0.01}]"
    python(
        "-c",
        "from kl_comedy.cli.main import run; run()",
        "train",
        TINY,
        f"kl={terms}",
        "rollout.backend=plain",
        "callbacks=[{name: stop_at_kl, options: {nats: 5.0}}]",
        "rewards=[{name: last_number, options: {max_chars: 200}}]",
        "model.options.warmstart_steps=5",
        "train.steps=2",
        "train.eval_every=0",
        "data.eval={}",
        "rollout.max_new_tokens=4",
        "output=runs",
        "--plugin",
        "my_parts.py",
        "--plugin",
        ROOT / "examples" / "register_estimator.py",
        cwd=tmp_path,
    )
    (summary,) = tmp_path.glob("runs/tiny-*/summary.json")
    found = json.loads(summary.read_text())
    assert found["status"] == "FINISHED"
    assert found["kl"] == "0.01 log_cosh_reverse_token in loss + 0.01 k2_shift_reverse_token in loss"
    assert "train/reward/last_number" in found["metrics"]
    assert found["metrics"]["policy/behaviour_gap_max"] < 1e-4
