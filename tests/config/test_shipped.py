"""Configs, grids and SLURM profiles that come with the package are found by name, from any folder."""

from pathlib import Path

import pytest

from kl_comedy.config import load_config, shipped
from kl_comedy.config.shipped import find_config, shipped_files, shipped_names, shipped_profiles
from kl_comedy.errors import UserError
from kl_comedy.slurm.grid import read_grid
from kl_comedy.slurm.profile import profile_file, read_profile

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """A folder that is no checkout."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("quickstart", "quickstart.yaml"),
        ("qwen2.5_0.5b_gsm8k", "qwen2.5_0.5b_gsm8k.yaml"),
        ("sweeps/pocket_beta", "sweeps/pocket_beta.yaml"),
        ("pocket_beta", "sweeps/pocket_beta.yaml"),
    ],
)
def test_a_name_is_found_from_another_folder(name, file):
    assert find_config(name) == ROOT / "configs" / file


def test_a_file_here_is_taken_where_it_is_given_as_a_path(elsewhere):
    own = elsewhere / "quickstart.yaml"
    own.write_text("seed: 3\n")
    (elsewhere / "quickstart").write_text("seed: 4\n")
    assert find_config("quickstart") == ROOT / "configs/quickstart.yaml"
    assert find_config("quickstart.yaml").resolve() == own
    assert find_config("./quickstart").resolve() == elsewhere / "quickstart"
    assert find_config(str(own)) == own
    (elsewhere / "sweeps").mkdir()
    (elsewhere / "sweeps/pocket_beta").write_text("base: quickstart\n")
    assert find_config("sweeps/pocket_beta") == Path("sweeps/pocket_beta")


def test_a_file_without_a_suffix_is_taken_where_no_config_has_its_name(elsewhere):
    (elsewhere / "mine").write_text("seed: 4\n")
    assert find_config("mine") == Path("mine")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("quickstrt", "no config is named 'quickstrt'; did you mean quickstart"),
        ("smollm2_gsm", "did you mean smollm2_gsm8k or smollm2_math or smollm2"),
        ("pocket", "several configs are named 'pocket'; name one of them: distillation/pocket, offpolicy/pocket"),
        ("configs/quickstart.yaml", "no such config file: configs/quickstart.yaml; .* is named quickstart$"),
    ],
)
def test_a_wrong_name_gets_the_nearest_right_ones(name, message):
    with pytest.raises(UserError, match=message):
        find_config(name)


def test_a_config_and_a_grid_may_name_one_that_comes_with_the_package(elsewhere):
    (elsewhere / "mine.yaml").write_text("extends: quickstart\nseed: 5\n")
    config = load_config("mine.yaml")
    assert (config.seed, config.rollout.prompts_per_batch) == (5, 48)
    (elsewhere / "grid.yaml").write_text("base: quickstart\nseeds: 2\n")
    assert read_grid(Path("grid.yaml")).base == str(ROOT / "configs/quickstart.yaml")


def test_a_file_beside_a_config_wins_over_a_name(elsewhere):
    (elsewhere / "quickstart").write_text("optimizer: {lr: 0.5}\n")
    (elsewhere / "mine.yaml").write_text("extends: quickstart\n")
    assert load_config("mine.yaml").optimizer.lr == 0.5


def test_a_profile_of_the_folder_wins_over_one_of_the_package(elsewhere):
    assert profile_file("gpu") == ROOT / "slurm/profiles/gpu.yaml"
    folder = elsewhere / "slurm/profiles"
    folder.mkdir(parents=True)
    (folder / "gpu.yaml").write_text("partition: ours\ntime: '10'\n")
    assert read_profile("gpu").partition == "ours"


def test_every_file_says_what_it_is():
    files = shipped_files()
    assert {file.kind for file in files} == {"run", "grid", "profile"}
    assert len(files) == len(shipped_names()) + len(shipped_profiles())
    for file in files:
        assert 10 < len(file.row()["summary"]) < 300, file.name


def test_a_sentence_does_not_end_at_an_abbreviation(elsewhere):
    (elsewhere / "a.yaml").write_text("# Dr. GRPO of Liu et al. on\n# sums. Second sentence.\nseed: 1\n")
    assert shipped.summary_of(elsewhere / "a.yaml") == "Dr. GRPO of Liu et al. on sums"


def test_a_summary_ends_with_the_comment_at_the_top(elsewhere):
    (elsewhere / "a.yaml").write_text("# A config without a full stop\nseed: 1\n# of the seed\n")
    assert shipped.summary_of(elsewhere / "a.yaml") == "A config without a full stop"


def test_a_file_is_a_grid_where_it_names_the_config_of_its_cells():
    kinds = {file.name: file.kind for file in shipped_files()}
    assert kinds["quickstart"] == "run"
    assert kinds["sweeps/pocket_beta"] == "grid"


def test_a_missing_file_of_either_suffix_is_reported_where_it_is_read():
    for name in ("mine.yaml", "mine.yml"):
        assert find_config(name) == Path(name)


def test_an_installed_package_reads_its_own_copy(elsewhere, monkeypatch):
    installed = elsewhere / "site-packages/kl_comedy"
    (installed / "shipped/configs").mkdir(parents=True)
    (installed / "shipped/configs/only.yaml").write_text("seed: 1\n")
    monkeypatch.setattr(shipped, "PACKAGE", installed)
    assert list(shipped_names()) == ["only"]
    assert find_config("only") == installed / "shipped/configs/only.yaml"
