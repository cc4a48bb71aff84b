"""Every config and grid in configs/ can be read, and has the settings it promises."""

import dataclasses
from pathlib import Path

import pytest

from kl_comedy.config import load_config
from kl_comedy.slurm.grid import expand, read_grid
from kl_comedy.slurm.manifest import plan
from kl_comedy.training.build import check_training

CONFIGS = Path(__file__).parents[2] / "configs"
STUDY = sorted((CONFIGS / "study").glob("*.yaml"))
FILES = sorted(CONFIGS.rglob("*.yaml"))
GRIDS = [path for path in FILES if "\nbase: " in f"\n{path.read_text()}"]
RUNS = [path for path in FILES if path not in GRIDS]


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_a_config_is_whole(path):
    check_training(load_config(path, []))


@pytest.mark.parametrize("path", GRIDS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_cell_of_a_grid_is_a_run(path, tmp_path):
    grid = read_grid(path)
    exclude = tuple(rule for rule in grid.exclude if "seed" not in rule)
    seeds = grid.seeds[:1] if grid.seeds else None  # seeds differ in the seed alone
    one_seed = dataclasses.replace(grid, seeds=seeds, exclude=exclude)
    assert plan(one_seed, directory=tmp_path).configs


@pytest.mark.parametrize("name", ["async_math_qwen2.5_7b", "async_countdown_qwen3_4b"])
def test_the_papers_settings_are_the_papers(name):
    config = load_config(CONFIGS / "paper" / f"{name}.yaml", [])
    assert config.rollout.prompts_per_batch * config.rollout.group_size == 512
    assert config.rollout.group_size == 16
    assert config.algorithm.advantage == "dr_grpo"
    assert config.algorithm.reduction == "sequence_sum"
    assert config.lag.steps == 10
    assert [term.beta for term in check_training(config)] == [0.005]


@pytest.mark.parametrize(
    "files",
    [["async_math_qwen2.5_7b"], ["async_math_qwen2.5_7b", "async_countdown_qwen3_4b"]],
    ids=["math", "math and countdown"],
)
def test_the_papers_settings_are_marked(files):
    """The second file extends the first and repeats only what differs."""
    marked = []
    for name in files:
        text = (CONFIGS / "paper" / f"{name}.yaml").read_text()
        marked += [line for line in text.splitlines() if "[paper]" in line]
    assert len(marked) >= 8


def test_the_lag_study_crosses_lags_and_kl_configurations(tmp_path):
    cells = plan(read_grid(CONFIGS / "sweeps" / "lags.yaml"), directory=tmp_path).manifest.cells
    assert len(cells) == 4 * 8 * 5
    assert {cell.steps for cell in cells} == {60}
    assert {cell.values["lag"] for cell in cells} == {"lag-0", "lag-1", "lag-4", "lag-10"}


def test_the_study_has_the_papers_blocks_with_five_seeds_and_a_real_model_with_three():
    grids = {path.stem: read_grid(path) for path in STUDY}
    points = {name: expand(grid) for name, grid in grids.items()}
    counts = {name: len(cells) for name, cells in points.items()}
    assert counts == {"core": 170, "fix": 40, "level": 84, "liu": 39, "updates": 150, "smollm2": 21}
    assert {point.seed for point in points["smollm2"]} == {0, 1, 2}
    assert load_config(grids["smollm2"].base, []).data.eval.keys() == {"heldout", "two_digits"}
    for name in ("core", "fix", "level", "liu", "updates"):
        assert {point.seed for point in points[name]} == {0, 1, 2, 3, 4}, name
    for name in ("core", "fix", "level"):
        assert {point.settings["optimizer.lr"] for point in points[name]} == {1e-4, 4e-4}, name
    assert {point.settings.get("kl.beta") for point in points["core"]} == {0.05, 0.1, 0.3, 1.0, None}
    assert {point.settings["algorithm.updates_per_batch"] for point in points["updates"]} == {1, 2, 4, 8}
