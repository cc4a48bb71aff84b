"""Without the extra ``train`` the base commands and the API work, and every other command names the extra in a line."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from kl_comedy import extras
from kl_comedy.extras import EXTRA_OF, NEEDED_BY, TRAIN, MissingExtra, named_extras

ROOT = Path(__file__).parents[1]
BLOCKED = """
import contextlib, io, json, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

blocked = set()
sys.meta_path.insert(0, Blocked())
"""
"""The beginning of a script in which the modules in ``blocked`` are not installed."""

RUN_COMMANDS = """
from kl_comedy.cli.main import run

for blocked, words in json.loads(sys.argv[1]):
    blocked, out, err = set(blocked), io.StringIO(), io.StringIO()
    sys.argv = ["kl-comedy", *words]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            run()
        except SystemExit as end:
            code = end.code
    print(json.dumps([code or 0, out.getvalue(), err.getvalue()]))
loaded = {name.partition(".")[0] for name in sys.modules}
print(json.dumps(sorted(loaded)))
"""


def run_commands(calls, folder):
    """Exit code, stdout and stderr of each call (blocked modules, words), all in one process; the modules it loaded."""
    command = [sys.executable, "-c", BLOCKED + RUN_COMMANDS, json.dumps(calls)]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    *answers, loaded = map(json.loads, result.stdout.splitlines())
    return answers, loaded


BRINGS = "which the extra train brings: pip install -e '.[train]'"


ARGUMENTS = {
    "audit": [ROOT / "configs/quickstart.yaml"],
    "cell": ["sweeps/s", "0"],
    "evaluate": ["runs/r", "--suite", "pocket_sums"],
    "export": ["runs/r", "exported"],
    "reproduce": ["k3-loss-94e1"],
    "results": ["table"],
    "sweep": [ROOT / "configs/sweeps/pocket_beta.yaml", "--local", "2"],
    "sweep-report": ["sweeps/s"],
    "train": [ROOT / "configs/quickstart.yaml"],
}


def calls_without_an_extra():
    """Each command that needs the extra, first without all of it, then without each module that it needs."""
    calls = []
    for name in NEEDED_BY:
        calls.append((TRAIN, [name, *map(str, ARGUMENTS[name])]))
    for name, modules in NEEDED_BY.items():
        for module in modules:
            calls.append(([module], [name, *map(str, ARGUMENTS[name])]))
    return calls


def test_a_command_without_its_extra_says_which_in_one_line(tmp_path):
    # In one process: each start takes seconds.
    calls = calls_without_an_extra()
    answers, _ = run_commands(calls, tmp_path)
    for (blocked, words), (code, output, errors) in zip(calls, answers, strict=True):
        assert code == 2, words
        assert output == "", words
        one_of_them = "|".join(blocked)
        assert re.fullmatch(rf"error: {words[0]} needs ({one_of_them}), {re.escape(BRINGS)}\n", errors), errors
    assert list(tmp_path.iterdir()) == [], "nothing was written"


COMMANDS_WITHOUT_EXTRA = [
    ["--version"],
    ["certify", "grpo"],
    ["certify", str(ROOT / "configs/quickstart.yaml"), "--regime", "on_policy"],
    ["certify", "--policy", "tis", "--regime", "on_policy", "--format", "json"],
    ["certify", "--plugin", str(ROOT / "examples/register_estimator.py"), "--regime", "on_policy"],
    ["explain", "grpo"],
    ["explain", "verl:use_kl_loss=true,kl_loss_type=low_var_kl"],
    ["list", "callbacks"],
    ["list", "rewards"],
    ["doctor"],
    ["init", "run", "r.yaml"],
    ["train", "--help"],
    ["results", "table", "--help"],
]


@pytest.fixture(scope="module")
def answers_without_extra(tmp_path_factory):
    """What those commands answer where no module of the extra is installed, and the modules that they loaded."""
    calls = [(TRAIN, words) for words in COMMANDS_WITHOUT_EXTRA]
    return run_commands(calls, tmp_path_factory.mktemp("base"))


@pytest.mark.parametrize("number", range(len(COMMANDS_WITHOUT_EXTRA)), ids=map(" ".join, COMMANDS_WITHOUT_EXTRA))
def test_commands_that_need_no_extra_work_without_one(answers_without_extra, number):
    answers, _ = answers_without_extra
    code, output, errors = answers[number]
    assert code == 0, errors
    assert output
    if COMMANDS_WITHOUT_EXTRA[number][0] != "init":  # it says what it has written
        assert errors == ""


def test_commands_that_need_no_extra_load_none_of_it(answers_without_extra):
    _, loaded = answers_without_extra
    assert set(loaded) & set(TRAIN) == set()


def test_an_option_that_needs_a_package_names_the_extra(tmp_path):
    words = ["certify", "grpo", "--regime", "on_policy", "--plot", "plane.svg"]
    ((code, output, errors),), _ = run_commands([(["matplotlib"], words)], tmp_path)
    assert code == 2
    assert output == "", "it is said before the enumeration, whose table would be there else"
    assert errors == f"error: --plot needs matplotlib, {BRINGS}\n"


def test_the_api_works_without_the_extra_or_names_it(tmp_path):
    script = f"""{BLOCKED}
blocked = set({TRAIN!r})
from kl_comedy import KLTerm, certify, check_loss, explain, kl_surrogate, register_estimator, results_table, train

assert certify(KLTerm("k2", placement="loss"), regimes=["on_policy"]).ok
assert explain("grpo").certificates["on_policy"].target == "token_forward"
check_loss(lambda logp, ref_logp, mask: (logp - ref_logp) ** 2 * mask, claims="token_reverse").assert_ok()
for call in (lambda: train("r.yaml"), lambda: results_table("export.csv")):
    try:
        call()
    except ValueError as error:
        print(error)
"""
    result = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == [f"train needs lightning, {BRINGS}", f"results needs pyarrow, {BRINGS}"]


def test_a_missing_module_that_no_extra_brings_keeps_its_error():
    with pytest.raises(ModuleNotFoundError, match="nowhere"), named_extras():
        raise ModuleNotFoundError("No module named 'nowhere'", name="nowhere")


def test_a_missing_module_is_named_with_its_extra():
    with pytest.raises(MissingExtra, match=r"reasoning_gym, which the extra gym brings"), named_extras():
        raise ModuleNotFoundError("No module named 'reasoning_gym'", name="reasoning_gym")


# --- pyproject ----------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def modules_of(requirements):
    """The names under which required packages are imported."""
    return {re.match(r"[\w-]+", line)[0].replace("-", "_") for line in requirements}


def test_the_base_requires_few_packages(project):
    base = {"torch", "omegaconf", "pyyaml", "typer", "rich", "numpy", "pandas", "tabulate", "psutil"}
    assert modules_of(project["dependencies"]) == base


def test_the_extra_names_the_packages_of_pyproject(project):
    come_with_others = {"huggingface_hub", "tokenizers", "pyarrow", "sympy"}
    assert modules_of(project["optional-dependencies"]["train"]) == set(TRAIN) - come_with_others


@pytest.mark.parametrize("extra", ["vllm", "vllm-cpu", "slurm", "gym", "trl", "verl", "dev"])
def test_other_extras_bring_the_extra_train(project, extra):
    assert "kl_comedy[train]" in project["optional-dependencies"][extra]


@pytest.mark.parametrize("command", NEEDED_BY)
def test_what_a_command_needs_has_an_extra(command):
    assert set(NEEDED_BY[command]) <= set(EXTRA_OF)


def test_the_advice_fits_how_the_package_is_installed(tmp_path, monkeypatch):
    assert extras.install_command("vllm") == "pip install -e '.[vllm]'"
    # A wheel has no folder to install from.
    monkeypatch.setattr(extras, "CHECKOUT", tmp_path)
    assert re.fullmatch(r"pip install 'kl_comedy-[\d.]+-py3-none-any\.whl\[vllm\]'", extras.install_command("vllm"))
