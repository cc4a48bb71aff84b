"""Parts from outside the package: by the commands of CONTRIBUTING, and from a package that changes."""

import importlib
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from commands import run_here
from kl_comedy import plugins
from kl_comedy.registry import ESTIMATORS, REWARDS
from kl_comedy.results.verify import final_tags

ROOT = Path(__file__).parents[1]
TINY = Path(__file__).parent / "support" / "tiny.yaml"
SMALL = [
    "train.steps=2",
    "train.eval_every=0",
    "data.eval={}",
    "model.options.warmstart_steps=5",
    "rollout.max_new_tokens=4",
    "tracking.uri=sqlite:///mlflow.db",
]


COMMANDS = """
import json, os, sys
import kl_comedy.kl.oracle.certificate, kl_comedy.training.run
from kl_comedy.cli.main import run
for number, words in enumerate(json.loads(sys.argv[1])):
    pid = os.fork()
    if pid == 0:
        output = os.open(f"{number}.out", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        sys.argv = ["kl-comedy", *words]
        run()
    _, status = os.waitpid(pid, 0)
    assert status == 0, words
"""
"""Each command in a fork of one process, since importing torch takes longer than most of them."""


def kl_comedy(*commands, cwd, path=None):
    """What each command prints; ``path`` is one more folder of packages."""
    environment = {**os.environ, "COLUMNS": "200"}
    if path is not None:
        environment["PYTHONPATH"] = f"{path}:{ROOT / 'src'}"
    words = json.dumps([[str(word) for word in words] for words in commands])
    process = subprocess.run(
        [sys.executable, "-c", COMMANDS, words], capture_output=True, text=True, cwd=cwd, env=environment, timeout=300
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return [(cwd / f"{number}.out").read_text() for number in range(len(commands))]


def guide():
    """The first Python block of "Add an estimator", and its commands."""
    text = (ROOT / "CONTRIBUTING.md").read_text().split("## Add an estimator")[1].split("\n## ")[0]
    code = re.search(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    assert code is not None
    lines = re.findall(r"^    (kl-comedy .*)$", text, re.MULTILINE)
    return code.group(1), [shlex.split(line)[1:] for line in lines]


def made_small(words):
    """A command of the guide with a small config, and with an answer that a test can read."""
    words = [str(TINY) if word == "configs/quickstart.yaml" else word for word in words]
    if words[0] == "train":
        return [*words, *SMALL]
    return [*words, "--format", "json"]


@pytest.fixture(scope="module")
def walk_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("walk")


@pytest.fixture(scope="module")
def walked(walk_folder):
    """Every command of the guide in its order, in one folder: its words and what it printed."""
    code, commands = guide()
    (walk_folder / "my_parts.py").write_text(code)
    commands = [made_small(words) for words in commands]
    return list(zip(commands, kl_comedy(*commands, cwd=walk_folder), strict=True))


@pytest.mark.slow  # tests/docs/test_snippets.py runs the guides' code
def test_the_guide_lists_certifies_trains_and_shows(walked):
    assert [words[0] for words, _ in walked] == ["list", "certify", "certify", "train", "results"]


@pytest.mark.slow
def test_it_is_listed(walked):
    _, printed = walked[0]
    (row,) = [row for row in json.loads(printed) if row["name"] == "log_cosh"]
    assert row["claims"] == ["nonnegative"]
    assert row["origin"].startswith("kl_comedy_plugin_")


@pytest.mark.slow
def test_every_cell_is_certified(walked):
    _, printed = walked[1]
    rows = json.loads(printed)
    assert len(rows) > 60
    for row in rows:
        assert row["kept"], row
        assert {term["estimator"] for term in row["terms"]} == {"log_cosh"}


@pytest.mark.slow
def test_its_value_with_the_gradient_of_k2_optimizes_the_reverse_kl_of_each_prefix(walked):
    _, printed = walked[1]
    with_gradient_of_k2 = [row for row in json.loads(printed) if row["terms"][0].get("gradient") == "k2"]
    assert "token_reverse" in [row["target"] for row in with_gradient_of_k2]


@pytest.mark.slow
def test_a_single_term_is_certified(walked):
    _, printed = walked[2]
    rows = json.loads(printed)
    assert [row["regime"] for row in rows] == ["on_policy", "off_policy", "mixed"]
    assert rows[0]["terms"][0]["options"] == {"width": 0.5}
    assert rows[0]["target"] is None


@pytest.mark.slow
def test_it_trains(walked, walk_folder):
    (summary,) = walk_folder.glob("runs/*/summary.json")
    assert json.loads(summary.read_text())["status"] == "FINISHED"


@pytest.mark.slow
def test_it_is_a_row_of_the_results(walked):
    _, printed = walked[-1]
    labels = {(row["kl.label"], row["kl.target"], row["runs"]) for row in json.loads(printed)}
    assert labels == {("0.02 log_cosh_reverse_token in loss", "none", 1)}


@pytest.mark.slow
def test_an_installed_package_joins_by_its_entry_point(tmp_path):
    """No --plugin: a distribution on the path whose entry point names the module."""
    code, _ = guide()
    (tmp_path / "site" / "my_package").mkdir(parents=True)
    (tmp_path / "site" / "my_package" / "__init__.py").write_text("")
    (tmp_path / "site" / "my_package" / "my_parts.py").write_text(code)
    info = tmp_path / "site" / "my_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[kl_comedy.estimators]\nmy_parts = my_package.my_parts\n")
    listed, _ = kl_comedy(
        ["list", "estimators", "--format", "json"],
        ["train", TINY, "kl=[{estimator: log_cosh, placement: loss, beta: 0.02}]", *SMALL[:-1]],
        cwd=tmp_path,
        path=tmp_path / "site",
    )
    origins = [row["origin"] for row in json.loads(listed) if row["name"] == "log_cosh"]
    assert origins == ["my_package.my_parts"]
    (summary,) = tmp_path.glob("runs/*/summary.json")
    assert json.loads(summary.read_text())["kl"] == "0.02 log_cosh_reverse_token in loss"


# --- a package that changes, and a run's own commands ----------------------------------------------------------------

ESTIMATOR = """
from kl_comedy.registry import ESTIMATORS
from my_parts.factors import FACTOR

@ESTIMATORS.register("scaled", source="a test", needs="log_ratio")
def scaled(log_ratio):
    'A multiple of the log-ratio.'
    return FACTOR * log_ratio
"""
REWARD = """
from kl_comedy.registry import REWARDS
from my_letters import LETTER

@REWARDS.register("has_letter", source="a test", summary="1 for a letter")
def has_letter(completion, answer, meta):
    return float(LETTER in completion)
"""
SHORT = [
    "train.steps=1",
    "train.eval_every=0",
    "rollout.max_new_tokens=4",
    "rollout.prompts_per_batch=2",
    "train.samples_every=0",
    "model.options.warmstart_steps=5",
    "eval.at_start=false",
    "eval.at_end=false",
    "data.eval.heldout.limit=4",
]
SCALED = "kl=[{estimator: scaled, placement: reward, beta: 0.1}]"


class Site:
    """A folder with an installed package ``my_parts`` whose entry point imports the module that registers."""

    def __init__(self, folder):
        self.folder = folder / "site"
        self._path = [*sys.path]
        self._seconds = itertools.count(int(time.time()))
        info = self.folder / "my_parts-0.1.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-parts\nVersion: 0.1\n")
        (info / "entry_points.txt").write_text("[kl_comedy.estimators]\nscaled = my_parts\n")
        (self.folder / "my_parts").mkdir()
        self.write("__init__", "from my_parts import estimators\n")
        self.write("estimators", ESTIMATOR)
        self.write("factors", "FACTOR = 1.0\n")
        self.new_process()

    def write(self, module, text):
        """Each time a second later: Python takes a source of the same size and second for the one that it compiled."""
        file = self.folder / "my_parts" / f"{module}.py"
        file.write_text(text)
        second = next(self._seconds)
        os.utime(file, (second, second))

    def new_process(self, *, installed=True):
        """Forget what was imported, as a new process has imported nothing."""
        sys.path[:] = self._path
        if installed:
            sys.path.insert(0, str(self.folder))
        for name in list(sys.modules):
            package = name.split(".")[0]
            if package in ("my_parts", "my_letters", "letters") or package.startswith("kl_comedy_plugin_"):
                del sys.modules[name]
        importlib.invalidate_caches()
        plugins.PLUGIN_FILES.clear()
        plugins.PACKAGES.clear()
        for table in (ESTIMATORS, REWARDS):
            for entry in list(table._entries.values()):
                if entry.modules:  # it came from a plugin
                    del table._entries[entry.name]
            table._loaded = False

    def close(self):
        self.new_process(installed=False)


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(TINY.read_text())
    site = Site(tmp_path)
    yield site
    site.close()


def command(*words, code=0):
    """What the command printed on stdout, and on stderr in one line."""
    exit_code, output, error = run_here(*words)
    assert exit_code == code, error
    return output, " ".join(error.split())


def runs_in(folder):
    return set((folder / "runs").iterdir())


def test_a_changed_package_is_another_run(site, tmp_path):
    def train():
        site.new_process()
        return command("train", "tiny.yaml", *SHORT, SCALED, "resume=auto")[1]

    train()
    assert "is already finished" in train()
    (first,) = runs_in(tmp_path)
    stored = {file.name for file in (first / "plugins/my_parts").iterdir()}
    assert stored == {"__init__.py", "estimators.py", "factors.py"}
    first_tags = final_tags(first)
    assert re.fullmatch("my_parts [0-9a-f]{12}", first_tags["plugins"])
    assert first_tags["version.my_parts"] == "0.1"

    site.write("factors", "FACTOR = -1000.0\n")
    assert f"a new run: runs/{first.name} differs in plugins.my_parts/factors.py" in train()
    (second,) = runs_in(tmp_path) - {first}
    second_tags = final_tags(second)
    assert second_tags["plugins"] != first_tags["plugins"]
    assert second_tags["config.hash"] == first_tags["config.hash"]
    assert second_tags["kl.verdict"] != first_tags["kl.verdict"], "the verdict on the code that ran"
    assert (second / "plugins/my_parts/factors.py").read_text() == "FACTOR = -1000.0\n"

    site.write("factors", "FACTOR = 1.0\n")
    assert f"runs/{first.name} is already finished" in train(), "the older code is the older run"


@pytest.fixture
def swept(site, tmp_path, monkeypatch):
    """The words of a sweep that was planned, and none of whose cells was run."""
    (tmp_path / "grid.yaml").write_text("name: grid\nbase: tiny.yaml\nseeds: [0, 1]\n")
    monkeypatch.setattr("kl_comedy.slurm.local.run_local", lambda *_: None)
    words = ("sweep", "grid.yaml", SCALED, "--local", "1")
    command(*words, code=1)
    return words


def test_a_sweep_stores_the_package_of_its_parts(swept, tmp_path):
    record = json.loads((tmp_path / "sweeps/grid/plugins.json").read_text())
    assert list(record["packages"]) == ["my_parts"]
    assert (tmp_path / "sweeps/grid/plugins/my_parts/factors.py").read_text() == "FACTOR = 1.0\n"


def test_a_sweep_whose_package_changed_says_so(site, swept):
    site.new_process()
    assert "changed" not in command(*swept)[1]
    site.write("factors", "FACTOR = 1000.0\n")
    # The code of resubmit is 0, because no cell is missing.
    for words, code in ((swept, 2), (("resubmit", "grid"), 0), (("cell", "grid", "0"), 2)):
        site.new_process()
        assert "my_parts/factors.py changed since" in command(*words, code=code)[1], words


# --- the commands of a run ------------------------------------------------------------------------------------------
WITH_REWARD = ("train", "tiny.yaml", *SHORT, SCALED, "rewards=[{name: has_letter}]", "--plugin", "my_rewards.py")


@pytest.fixture
def trained(site, tmp_path):
    """A run with a plugin file, a module beside it, and a part of the package; its folder and what it printed."""
    (tmp_path / "my_rewards.py").write_text(REWARD)
    (tmp_path / "my_letters.py").write_text("LETTER = '1'\n")
    _, _, printed = run_here(*WITH_REWARD)
    (run,) = (tmp_path / "runs").glob("tiny-*")
    # Since then the file has gone and the module beside it has changed.
    (tmp_path / "my_rewards.py").rename(tmp_path / "gone.py")
    (tmp_path / "my_letters.py").write_text("LETTER = 'another'\n")
    site.new_process()
    return run.relative_to(tmp_path), printed


COMMANDS_OF_A_RUN = {
    "evaluate": "evaluate {run}",
    "checkpoint": "evaluate {run}/checkpoints/step-00000001.ckpt",
    "reference": "evaluate tiny.yaml eval.reference={run}/config.yaml",
    "audit": "audit {run} --samples 24 --blocks 3 --terms own",
    "certify": "certify {run}/config.yaml --regime on_policy",
    "plan": "plan {run}/config.yaml",
}


def check_stored_code_runs(site, run, line):
    """The command works and runs the stored code."""
    site.new_process()
    code, _, error = run_here(*shlex.split(line))
    allowed_codes = [0]
    if line.startswith("audit"):
        allowed_codes.append(1)  # it may find a term without effect
    assert code in allowed_codes, (line, error)
    assert f"plugins of {run}: my_rewards.py" in error, line
    assert sys.modules["my_letters"].LETTER == "1", "as it was"


def test_a_run_records_its_plugins(trained):
    run, _ = trained
    record = json.loads((run / "plugins.json").read_text())
    assert record["files"] == ["my_rewards.py"]
    assert set(record["packages"]) == {"my_parts"}


def test_the_printed_commands_of_a_run_work(site, trained):
    run, printed = trained
    (line,) = [line for line in printed.splitlines() if line.startswith("kl-comedy evaluate")]
    check_stored_code_runs(site, run, line.removeprefix("kl-comedy "))
    check_stored_code_runs(site, run, f"export {run} exported")


def test_every_command_of_a_run_loads_its_plugins(site, trained):
    # One run for all of them: training it takes longer than they do.
    run, _ = trained
    for line in COMMANDS_OF_A_RUN.values():
        check_stored_code_runs(site, run, line.format(run=run))


def check(run, *words, code=0):
    """What ``kl-comedy check`` says of a run's config."""
    return command("check", run / "config.yaml", "--no-memory", *words, code=code)[1]


def test_a_package_is_used_as_it_is_installed_else_as_it_was(site, trained):
    run, _ = trained
    site.write("factors", "FACTOR = 5.0\n")
    message = f"my_parts/factors.py changed since {run}: the package my_parts is used as it is installed"
    assert message in check(run)
    assert sys.modules["my_parts.factors"].FACTOR == 5.0

    site.new_process(installed=False)
    assert f"my_parts is not installed: its source in {run}/plugins is used" in check(run)
    assert sys.modules["my_parts.factors"].FACTOR == 1.0


def test_a_plugin_that_is_given_takes_the_place_of_the_stored_one(trained, tmp_path):
    run, _ = trained
    (tmp_path / "renamed.py").write_text(REWARD.replace("from my_letters import LETTER", "LETTER = '2'"))
    assert "plugins of" not in check(run, "--plugin", "renamed.py")
    assert list(plugins.PLUGIN_FILES) == ["renamed.py"]


def test_a_damaged_record_of_plugins_is_one_line_with_the_option(trained):
    run, _ = trained
    (run / "plugins.json").write_text("{")
    error = check(run, code=2)
    assert "plugins.json is not a readable record" in error
    assert "--plugin" in error


@pytest.mark.parametrize(
    "wrong", [{"files": 1}, {"packages": {"my_parts": {"modules": 1}}}, {"packages": 1}, {"later": 1}], ids=str
)
def test_a_record_of_plugins_with_a_wrong_value_is_one_line(trained, wrong):
    run, _ = trained
    record = json.loads((run / "plugins.json").read_text())
    (run / "plugins.json").write_text(json.dumps(record | wrong))
    assert str(run / "plugins.json") in check(run, code=2)


def test_a_run_whose_plugins_helper_changed_is_not_resumed(site, trained, tmp_path):
    """One line, exit code 2 where it is named, and nothing of it is overwritten."""
    run, _ = trained
    (tmp_path / "gone.py").rename(tmp_path / "my_rewards.py")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    code, _, error = run_here(*WITH_REWARD, f"resume={run}")
    assert code == 2
    assert error == (
        f"error: resume: {run} was trained with another plugins.my_letters.py; of what makes a run, only train.steps "
        "may grow\n"
    )
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    site.new_process()
    (tmp_path / "my_letters.py").write_text("LETTER = '1'\n")
    assert "is already finished" in command(*WITH_REWARD, f"resume={run}")[1]


def test_a_plugin_file_that_imports_an_installed_package(site, tmp_path):
    """The store has the package beside the file; a changed package is one line, and its source stays the package's."""
    text = "from my_parts.factors import FACTOR\n" + REWARD.replace("from my_letters import LETTER", "LETTER = '1'")
    (tmp_path / "my_rewards.py").write_text(text)
    command(*WITH_REWARD)
    (path,) = runs_in(tmp_path)
    run = path.relative_to(tmp_path)

    site.new_process()
    error = command("train", f"{run}/config.yaml", "resume=auto")[1]
    assert len(runs_in(tmp_path)) == 1, f"the stored plugins make the same run: {error}"

    site.new_process()
    site.write("factors", "FACTOR = 5.0\n")
    error = command("train", f"{run}/config.yaml", "resume=auto")[1]
    assert f"my_parts/factors.py changed since {run}: the package my_parts is used as it is installed" in error
    assert len(runs_in(tmp_path)) == 2


SUITE = """
name: mine
data: {dataset: pocket, split: heldout, limit: 2, options: {digits: 1}}
reward: {name: of_plugin}
max_new_tokens: 4
"""


@pytest.mark.slow
def test_a_changed_verifier_is_another_evaluation(site, tmp_path):
    (tmp_path / "mine.yaml").write_text(SUITE)
    verifier = REWARD.replace("has_letter", "of_plugin").replace("from my_letters import LETTER", "LETTER = '1'")

    def evaluations_after(text):
        """How many evaluations there are after one more with this verifier."""
        (tmp_path / "verifier.py").write_text(text)
        command("evaluate", "pocket", "model.options={preset: tiny}", "--suite", "mine.yaml", "--plugin", "verifier.py")
        site.new_process()
        return len({file.name for file in (tmp_path / "evaluations").glob("*/mine-*")})

    assert evaluations_after(verifier) == 1
    assert evaluations_after(verifier) == 1, "the same verifier resumes"
    assert evaluations_after(verifier.replace("float(", "1000 * float(")) == 2, "a changed one does not"


@pytest.mark.slow
@pytest.mark.parametrize("from_export", [False, True], ids=["from the store", "from an export"])
def test_a_run_with_a_package_is_reproduced_without_it(from_export, site, tmp_path):
    """The plugin imports a package in its folder, which has gone since."""
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters/__init__.py").write_text("from letters.one import LETTER\n")
    (tmp_path / "letters/one.py").write_text("LETTER = '1'\n")
    (tmp_path / "my_rewards.py").write_text(REWARD.replace("my_letters", "letters"))
    source = f"sqlite:///{tmp_path}/mlflow.db"
    command(*WITH_REWARD, f"tracking.uri={source}")
    (run,) = runs_in(tmp_path)
    shutil.rmtree(tmp_path / "letters")
    if from_export:
        command("results", "export", "--uri", source, "--out", "export.parquet")
        source = "export.parquet"
    site.new_process(installed=False)
    output, error = command("reproduce", run.name, "--uri", source, "--format", "json")
    assert {row["verdict"] for row in json.loads(output)} == {"equal"}
    assert "my_parts is not installed" in error
    assert "version.my_parts: 0.1 -> -" in error
    assert "plugins: " not in error, "its source is what it was"
