"""Parts from outside the package: by the commands of CONTRIBUTING, and from a package that changes."""

import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from commands import run_here
from kl_comedy import registry
from kl_comedy.registry import ESTIMATORS, REWARDS
from kl_comedy.tracking.verify import final_tags

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
    if (pid := os.fork()) == 0:
        os.dup2(os.open(f"{number}.out", os.O_WRONLY | os.O_CREAT), 1)
        sys.argv = ["kl-comedy", *words]
        run()
    assert os.waitpid(pid, 0)[1] == 0, words
"""
"""Each command in a fork of one process, since importing torch takes longer than most of them."""


def kl_comedy(*commands, cwd, path=None):
    """What each command prints."""
    command = [sys.executable, "-c", COMMANDS, json.dumps([[str(word) for word in words] for words in commands])]
    environment = {**os.environ, **({} if path is None else {"PYTHONPATH": f"{path}:{ROOT / 'src'}"}), "COLUMNS": "200"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return [(cwd / f"{number}.out").read_text() for number in range(len(commands))]


def guide():
    """The first Python block of "Add an estimator", and its commands."""
    text = (ROOT / "CONTRIBUTING.md").read_text().split("## Add an estimator")[1].split("\n## ")[0]
    code = re.search(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    assert code is not None
    return code.group(1), [shlex.split(line)[1:] for line in re.findall(r"^    (kl-comedy .*)$", text, re.MULTILINE)]


@pytest.fixture(scope="module")
def walked(tmp_path_factory):
    """Every command of the guide in its order, in one folder: its words and what it printed."""
    folder = tmp_path_factory.mktemp("walk")
    code, commands = guide()
    (folder / "my_parts.py").write_text(code)
    small = {"configs/quickstart.yaml": str(TINY)}
    lines = [
        [*(small.get(word, word) for word in words), *(SMALL if words[0] == "train" else ["--format", "json"])]
        for words in commands
    ]
    return folder, list(zip(lines, kl_comedy(*lines, cwd=folder), strict=True))


@pytest.mark.slow  # tests/docs/test_snippets.py runs the guides' code
def test_the_guide_lists_certifies_trains_and_shows(walked):
    _, printed = walked
    assert [words[0] for words, _ in printed] == ["list", "certify", "certify", "train", "results"]


@pytest.mark.slow
def test_it_is_listed(walked):
    (row,) = [row for row in json.loads(walked[1][0][1]) if row["name"] == "log_cosh"]
    assert row["claims"] == ["nonnegative"] and row["origin"].startswith("kl_comedy_plugin_")


@pytest.mark.slow
def test_every_cell_is_certified_and_a_single_term(walked):
    rows, single = (json.loads(printed) for _, printed in walked[1][1:3])
    assert len(rows) > 60 and all(row["kept"] for row in rows)
    assert {term["estimator"] for row in rows for term in row["terms"]} == {"log_cosh"}
    straight = [row for row in rows if row["terms"][0].get("gradient") == "k2" and row["target"] == "token_reverse"]
    assert straight, "its value with the gradient of k2 optimizes the reverse KL of each prefix"
    assert [row["regime"] for row in single] == ["on_policy", "off_policy", "mixed"]
    assert single[0]["terms"][0]["options"] == {"width": 0.5} and single[0]["target"] is None


@pytest.mark.slow
def test_it_trains_and_is_a_row_of_the_results(walked):
    folder, printed = walked
    rows = json.loads(printed[-1][1])
    labels = {(row["kl.label"], row["kl.target"], row["runs"]) for row in rows}
    assert labels == {("0.02 log_cosh_reverse_token in loss", "none", 1)}
    (summary,) = folder.glob("runs/*/summary.json")
    assert json.loads(summary.read_text())["status"] == "FINISHED"


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
    *("train.steps=1", "train.eval_every=0", "rollout.max_new_tokens=4", "rollout.prompts_per_batch=2"),
    *("train.samples_every=0", "model.options.warmstart_steps=5", "eval.at_start=false", "eval.at_end=false"),
    "data.eval.heldout.limit=4",
]
SCALED = "kl=[{estimator: scaled, placement: reward, beta: 0.1}]"


class Site:
    """A folder with an installed package ``my_parts`` whose entry point imports the module that registers."""

    def __init__(self, folder):
        self.folder = folder / "site"
        self._path = [*sys.path]
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
        (self.folder / "my_parts" / f"{module}.py").write_text(text)

    def new_process(self, *, installed=True):
        """Forget what was imported, as a new process has not."""
        sys.path[:] = [*([str(self.folder)] if installed else []), *self._path]
        for name in [*sys.modules]:
            if name.split(".")[0] in ("my_parts", "my_letters", "letters") or name.startswith("kl_comedy_plugin_"):
                del sys.modules[name]
        importlib.invalidate_caches()
        registry.PLUGIN_FILES.clear()
        registry.PACKAGES.clear()
        for table in (ESTIMATORS, REWARDS):
            for entry in [entry for entry in table._entries.values() if entry.modules]:
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
    got, out, error = run_here(*words)
    assert got == code, error
    return out, " ".join(error.split())


def test_a_changed_package_is_another_run(site, tmp_path):
    def train():
        site.new_process()
        return command("train", "tiny.yaml", *SHORT, SCALED, "resume=auto")[1]

    train()
    assert "is already finished" in train()
    (first,) = (tmp_path / "runs").iterdir()
    assert {file.name for file in (first / "plugins/my_parts").iterdir()} == {
        "__init__.py",
        "estimators.py",
        "factors.py",
    }
    tags = final_tags(first)
    assert re.fullmatch("my_parts [0-9a-f]{12}", tags["plugins"]) and tags["version.my_parts"] == "0.1"
    site.write("factors", "FACTOR = -1000.0\n")
    assert f"my_parts/factors.py changed since runs/{first.name}: this is another run" in train()
    (second,) = set((tmp_path / "runs").iterdir()) - {first}
    again = final_tags(second)
    assert again["plugins"] != tags["plugins"] and again["config.hash"] != tags["config.hash"]
    assert again["kl.verdict"] != tags["kl.verdict"], "of the code that ran"
    assert (second / "plugins/my_parts/factors.py").read_text() == "FACTOR = -1000.0\n"
    site.write("factors", "FACTOR = 1.0\n")
    assert f"{first} is already finished".replace(f"{tmp_path}/", "") in train(), "the older code is the older run"


def test_a_sweep_whose_package_changed_says_so(site, tmp_path, monkeypatch):
    (tmp_path / "grid.yaml").write_text("name: grid\nbase: tiny.yaml\nseeds: [0, 1]\n")
    words = ("sweep", "grid.yaml", SCALED, "--local", "1")
    monkeypatch.setattr("kl_comedy.slurm.local.run_local", lambda *_: None)
    command(*words, code=1)  # the cells were not run
    manifest = json.loads((tmp_path / "sweeps/grid/manifest.json").read_text())
    assert manifest["packages"] == ["my_parts"] and "my_parts/factors.py" in manifest["plugin_hashes"]
    assert (tmp_path / "sweeps/grid/plugins/my_parts/factors.py").read_text() == "FACTOR = 1.0\n"
    site.new_process()
    assert "changed" not in command(*words)[1]
    site.write("factors", "FACTOR = 1000.0\n")
    for again, code in ((words, 2), (("resubmit", "grid"), 0), (("cell", "grid", "0"), 2)):  # resubmit: none is missing
        site.new_process()
        assert "my_parts/factors.py changed since" in command(*again, code=code)[1], again


@pytest.fixture
def trained(site, tmp_path):
    """A run with a plugin file, a module beside it, and a part of the package; its folder and what it printed."""
    (tmp_path / "my_rewards.py").write_text(REWARD)
    (tmp_path / "my_letters.py").write_text("LETTER = '1'\n")
    words = ("train", "tiny.yaml", *SHORT, SCALED, "rewards=[{name: has_letter}]", "--plugin", "my_rewards.py")
    _, printed = run_here(*words)[1:]
    (run,) = (tmp_path / "runs").glob("tiny-*")
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


def load_the_plugins(site, run, lines):
    """Each command works and runs the stored code; a gradient audit may find a term without effect (exit code 1)."""
    for line in lines:
        site.new_process()
        code, _, error = run_here(*shlex.split(line))
        assert code == 0 or (code == 1 and line.startswith("audit")), (line, error)
        assert f"plugins of {run}: my_rewards.py" in error, (line, error)
        assert sys.modules["my_letters"].LETTER == "1", "as it was"


def test_the_printed_commands_of_a_run_work(site, trained):
    run, printed = trained
    record = json.loads((run / "plugins.json").read_text())
    assert record["files"] == ["my_rewards.py"] and set(record["packages"]) == {"my_parts"}
    (line,) = [line for line in printed.splitlines() if line.startswith("kl-comedy evaluate")]
    load_the_plugins(site, run, [line.removeprefix("kl-comedy "), f"export {run} exported"])


def test_every_command_of_a_run_loads_its_plugins(site, trained):
    run, _ = trained
    load_the_plugins(site, run, [line.format(run=run) for line in COMMANDS_OF_A_RUN.values()])


def test_a_package_is_used_as_it_is_installed_else_as_it_was(site, trained):
    run, _ = trained
    site.write("factors", "FACTOR = 5.0\n")
    error = command("check", run / "config.yaml", "--no-memory")[1]
    assert f"my_parts/factors.py changed since {run}: the package my_parts is used as it is installed" in error
    assert sys.modules["my_parts.factors"].FACTOR == 5.0
    site.new_process(installed=False)
    error = command("check", run / "config.yaml", "--no-memory")[1]
    assert f"my_parts is not installed: its source in {run}/plugins is used" in error
    assert sys.modules["my_parts.factors"].FACTOR == 1.0


def test_a_plugin_that_is_given_takes_the_place_of_the_stored_one(site, trained, tmp_path):
    run, _ = trained
    (tmp_path / "renamed.py").write_text(REWARD.replace("from my_letters import LETTER", "LETTER = '2'"))
    error = command("check", run / "config.yaml", "--no-memory", "--plugin", "renamed.py")[1]
    assert "plugins of" not in error and list(registry.PLUGIN_FILES) == ["renamed.py"]
    site.new_process()
    (run / "plugins.json").write_text("{")
    error = command("check", run / "config.yaml", "--no-memory", code=2)[1]
    assert "plugins.json is not a readable record" in error and "--plugin" in error


def test_a_run_that_did_not_record_which_files_were_given(site, trained):
    run, _ = trained
    record = json.loads((run / "plugins.json").read_text())
    older = {key: record[key] for key in ("config_hash", "sources")}
    (run / "plugins.json").write_text(json.dumps(older))
    assert f"plugins of {run}: my_rewards.py" in command("check", run / "config.yaml", "--no-memory")[1]
    for key, value in {"files": 1, "packages": {"my_parts": {"modules": 1}}}.items():
        site.new_process()
        (run / "plugins.json").write_text(json.dumps({**older, key: value}))
        assert f"{run}/plugins.json: {key}" in command("check", run / "config.yaml", "--no-memory", code=2)[1]


def test_a_plugin_file_that_imports_an_installed_package(site, tmp_path):
    """The store has the package beside the file; a changed package is one line, and its source stays the package's."""
    text = "from my_parts.factors import FACTOR\n" + REWARD.replace("from my_letters import LETTER", "LETTER = '1'")
    (tmp_path / "my_rewards.py").write_text(text)
    words = ("train", "tiny.yaml", *SHORT, SCALED, "rewards=[{name: has_letter}]", "--plugin", "my_rewards.py")
    command(*words)
    (run,) = (path.relative_to(tmp_path) for path in (tmp_path / "runs").iterdir())
    site.new_process()
    command("train", f"{run}/config.yaml", "resume=auto")
    assert len(list((tmp_path / "runs").iterdir())) == 1, "the stored plugins make the same run"
    site.new_process()
    site.write("factors", "FACTOR = 5.0\n")
    error = command("train", f"{run}/config.yaml", "resume=auto")[1]
    assert f"my_parts/factors.py changed since {run}: the package my_parts is used as it is installed" in error
    assert len(list((tmp_path / "runs").iterdir())) == 2


@pytest.mark.slow
def test_a_changed_verifier_is_another_evaluation(site, tmp_path):
    suite = "name: mine\ndata: {dataset: pocket, split: heldout, limit: 2, options: {digits: 1}}\n"
    suite += "reward: {name: of_plugin}\nmax_new_tokens: 4\n"
    (tmp_path / "mine.yaml").write_text(suite)
    plugin = REWARD.replace("has_letter", "of_plugin").replace("from my_letters import LETTER", "LETTER = '1'")

    def records():
        site.new_process()
        return {file.name for file in (tmp_path / "evaluations").glob("*/mine-*")}

    names = set()
    for text in (plugin, plugin, plugin.replace("float(", "1000 * float(")):
        (tmp_path / "verifier.py").write_text(text)
        command("evaluate", "pocket", "model.options={preset: tiny}", "--suite", "mine.yaml", "--plugin", "verifier.py")
        names.add(frozenset(records()))
    assert sorted(map(len, names)) == [1, 2], "the same verifier resumes, a changed one does not"


@pytest.mark.slow
@pytest.mark.parametrize("export", [False, True])
def test_a_run_with_a_package_is_reproduced_without_it(export, site, tmp_path):
    """From the store and from an export; the plugin imports a package in its folder."""
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters/__init__.py").write_text("from letters.one import LETTER\n")
    (tmp_path / "letters/one.py").write_text("LETTER = '1'\n")
    (tmp_path / "my_rewards.py").write_text(REWARD.replace("my_letters", "letters"))
    uri = f"tracking.uri=sqlite:///{tmp_path}/mlflow.db"
    words = ("train", "tiny.yaml", *SHORT, SCALED, uri, "rewards=[{name: has_letter}]", "--plugin", "my_rewards.py")
    command(*words)
    (run,) = (tmp_path / "runs").iterdir()
    shutil.rmtree(tmp_path / "letters")
    source = f"sqlite:///{tmp_path}/mlflow.db"
    if export:
        command("results", "export", "--uri", source, "--out", "export.parquet")
        source = "export.parquet"
    site.new_process(installed=False)
    out, error = command("reproduce", run.name, "--uri", source, "--format", "json")
    assert {row["verdict"] for row in json.loads(out)} == {"equal"}
    assert "my_parts is not installed" in error and "version.my_parts: 0.1 -> -" in error
    assert "plugins: " not in error, "its source is what it was"
