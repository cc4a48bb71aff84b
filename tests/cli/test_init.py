"""``kl-comedy init``: every file it writes passes the command that reads it; ``--version``; the wheel installs."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import kl_comedy
from commands import run_here

ROOT = Path(__file__).parents[2]


@pytest.fixture
def stdout_of(tmp_path):
    """The output of a command in the test's folder, which must succeed."""

    def run(*arguments):
        code, out, err = run_here(*arguments, cwd=tmp_path)
        assert code == 0, err
        return out

    return run


@pytest.fixture
def refusal_of(tmp_path):
    """The message of a command in the test's folder, which must be refused."""

    def run(*arguments):
        code, _, err = run_here(*arguments, cwd=tmp_path)
        assert code == 2, err
        return err

    return run


@pytest.mark.parametrize("kind", ["run", "grid", "plugin", "profile", "estimator"])
def test_init_prints_the_file_that_it_writes(stdout_of, kind):
    assert stdout_of("init", kind).startswith(f"my_{kind}.")


def test_the_run_passes_check(stdout_of):
    stdout_of("init", "run")
    assert "on-policy" in stdout_of("check", "my_run.yaml", "--no-memory")


def test_the_grid_is_planned_for_the_profile(stdout_of):
    stdout_of("init", "run")
    stdout_of("init", "grid")
    stdout_of("init", "profile")
    scripts = stdout_of("sweep", "my_grid.yaml", "--slurm", "my_profile.yaml", "--dry-run")
    assert "#SBATCH --partition=gpu" in scripts


def test_the_estimator_is_certified(stdout_of):
    stdout_of("init", "estimator")
    term = "{estimator: my_k2, placement: loss}"
    assert "token_reverse" in stdout_of("certify", "--term", term, "--plugin", "my_estimator.py", "--format", "json")


def test_the_plugin_is_checked_and_listed(stdout_of):
    stdout_of("init", "run")
    stdout_of("init", "plugin")
    settings = ("rewards=[{name: ends_with_answer}]", "callbacks=[{name: print_reward}]")
    stdout_of("check", "my_run.yaml", *settings, "--no-memory", "--plugin", "my_plugin.py")
    rewards = stdout_of("list", "rewards", "--plugin", "my_plugin.py", "--format", "json")
    assert "ends_with_answer" in rewards


@pytest.mark.parametrize("name", ["quickstart", "async_pocket", "study/base/pocket"])
def test_a_copy_of_a_config_passes_check(stdout_of, name):
    stdout_of("init", "run", "--from", name)
    assert stdout_of("check", "my_run.yaml", "--no-memory") == stdout_of("check", name, "--no-memory")


def test_a_copy_keeps_the_comments_of_a_config_that_extends_another(stdout_of, tmp_path):
    stdout_of("init", "run", "--from", "async_pocket")
    copy = (tmp_path / "my_run.yaml").read_text()
    assert copy.startswith("# The quickstart's task")
    assert "extends: quickstart\n" in copy


def test_a_copy_of_a_grid_finds_its_base(stdout_of):
    stdout_of("init", "grid", "--from", "pocket_beta")
    stdout_of("init", "profile", "--from", "gpu")
    planned = stdout_of("sweep", "my_grid.yaml", "--slurm", "my_profile.yaml", "--dry-run", "--format", "json")
    original = stdout_of("sweep", "pocket_beta", "--slurm", "gpu", "--dry-run", "--format", "json")
    assert json.loads(planned)["cells"][7]["values"] == json.loads(original)["cells"][7]["values"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("run", "--from", "pocket_beta"), "pocket_beta is a grid: kl-comedy init grid --from pocket_beta"),
        (("run", "--from", "quickstrt"), "did you mean quickstart"),
        (("profile", "--from", "gpux"), "did you mean 'gpu'"),
        (("plugin", "--from", "quickstart"), "a plugin has no copies; allowed: run, grid, profile"),
    ],
)
def test_what_cannot_be_copied_is_refused(refusal_of, tmp_path, words, message):
    assert message in refusal_of("init", *words)
    assert list(tmp_path.iterdir()) == []


def test_what_comes_next_is_said(tmp_path):
    _, _, err = run_here("init", "run", "--from", "quickstart", cwd=tmp_path)
    assert err.splitlines() == ["next:", "kl-comedy check my_run.yaml", "kl-comedy train my_run.yaml"]


def test_what_comes_with_the_package_is_listed(stdout_of):
    rows = {row["name"]: row for row in json.loads(stdout_of("list", "configs", "--format", "json"))}
    assert rows["quickstart"]["kind"] == "run"
    assert rows["quickstart"]["summary"].startswith("The embedded default")
    assert rows["sweeps/pocket_beta"]["kind"] == "grid"
    assert rows["gpu_1_node"]["kind"] == "profile"
    assert "pocket_beta" in stdout_of("list", "configs")


def test_a_file_that_exists_is_not_overwritten(stdout_of, refusal_of):
    stdout_of("init", "run")
    assert "my_run.yaml exists" in refusal_of("init", "run")


def test_an_unknown_kind_is_refused(refusal_of):
    assert "did you mean 'run'" in refusal_of("init", "runs")


def test_a_plugin_is_a_python_file(refusal_of):
    assert "is a .py file" in refusal_of("init", "plugin", "a.yaml")


def test_the_version_is_printed(stdout_of):
    assert stdout_of("--version") == f"kl_comedy {kl_comedy.__version__}\n"


@pytest.mark.slow
def test_the_wheel_has_its_data_and_extras(tmp_path):
    """That it installs and runs, CI sees in new environments (research/scripts/light_install.py)."""
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    copy = tmp_path / "source"  # setuptools writes build/ beside the sources
    subprocess.run(["git", "clone", "--quiet", "--depth=1", f"file://{ROOT}", copy], check=True)
    # From the source distribution, as a registry's users without a wheel would build it.
    build = "import sys, setuptools.build_meta; setuptools.build_meta.build_sdist(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, tmp_path], cwd=copy, check=True, capture_output=True)
    (sdist,) = tmp_path.glob("kl_comedy-*.tar.gz")
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path, sdist], check=True)
    (wheel,) = tmp_path.glob("kl_comedy-*.whl")
    files = {str(file.relative_to(copy / "src")) for file in (copy / "src").rglob("*.*") if file.suffix != ".py"}
    data = {name for name in files if "egg-info" not in name}
    packed = zipfile.ZipFile(wheel).namelist()
    assert data <= set(packed)
    (metadata_name,) = [name for name in packed if name.endswith("METADATA")]
    metadata = zipfile.ZipFile(wheel).read(metadata_name).decode()
    assert "Provides-Extra: vllm\n" in metadata
    assert "Provides-Extra: dev\n" in metadata
    assert "Provides-Extra: gym\n" in metadata
    assert "Classifier: Typing :: Typed\n" in metadata
    # configs/ and slurm/profiles, without the checkout.
    sources = {str(file.relative_to(copy)) for file in (copy / "configs").rglob("*.yaml")}
    sources |= {str(file.relative_to(copy)) for file in (copy / "slurm/profiles").glob("*.yaml")}
    assert len(sources) > 50
    assert {f"kl_comedy/shipped/{name}" for name in sources} <= set(packed)
