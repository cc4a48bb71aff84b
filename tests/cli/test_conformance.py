"""kl-comedy conformance: functions by name, options, exit codes, and mistakes in one line."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from kl_comedy.cli.main import app
from kl_comedy.errors import RunFailed, UserError

LOSSES = """
def k2(logp, ref_logp, mask):
    return 0.5 * (logp - ref_logp) ** 2 * mask

def scaled(policy, batch, *, scale):
    return {"term": scale * k2(policy, batch["sft"], batch["keep"])}

class Losses:
    k2 = staticmethod(k2)

number = 3

def ends(logp):
    raise SystemExit(0)
"""
WITH_NEIGHBOURS = """
from __future__ import annotations
from dataclasses import dataclass
from neighbour_of_a_test import square

@dataclass
class Scale:
    beta: float = 0.1

def k2(logp, ref_logp, mask):
    return Scale().beta * 0.5 * square(logp - ref_logp) * mask
"""
ON = ("--regime", "on_policy")


@pytest.fixture
def losses(tmp_path, monkeypatch):
    (tmp_path / "own_losses_of_a_test.py").write_text(LOSSES)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "with_neighbours_of_a_test.py").write_text(WITH_NEIGHBOURS)
    (folder / "neighbour_of_a_test.py").write_text("def square(x):\n    return x**2\n")
    (tmp_path / "ends_at_import_of_a_test.py").write_text("raise SystemExit(0)\n")
    (tmp_path / "broken_losses_of_a_test.py").write_text("import no_such_package\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "with_neighbours_of_a_test", raising=False)


def run(*arguments):
    result = CliRunner().invoke(app, ["conformance", *arguments], catch_exceptions=True)
    if isinstance(result.exception, UserError | RunFailed):
        raise result.exception
    assert result.exception is None, result.exception
    return result.output


@pytest.mark.parametrize(
    "target", ["own_losses_of_a_test:k2", "own_losses_of_a_test.py:k2", "own_losses_of_a_test:Losses.k2"]
)
def test_a_function_is_found_in_a_module_and_in_a_file(losses, target):
    output = run(target, "--claims", "token_reverse", *ON)
    assert output.startswith("ok     on_policy: token_reverse, times 1")


def test_a_file_is_read_as_python_runs_it(losses):
    """With the modules beside it, and with dataclasses, whose module must be known by name."""
    output = run("folder/with_neighbours_of_a_test.py:k2", "--claims", "token_reverse", "--beta", "0.1", *ON)
    assert output.startswith("ok     on_policy: token_reverse, times 0.1")


def test_without_claims_it_says_what_the_loss_optimizes(losses):
    output = run("own_losses_of_a_test:k2")
    assert "on_policy: token_reverse" in output
    assert "off_policy: none" in output
    assert "[claimed" not in output
    # Nothing was claimed, so nothing is right or wrong.
    assert "ok " not in output
    assert output.count("[nothing claimed]") == 3


def test_a_claim_that_fails_and_a_wrong_beta_end_with_an_error(losses):
    with pytest.raises(RunFailed, match="not what it should be: own_losses_of_a_test:k2"):
        run("own_losses_of_a_test:k2", "--claims", "token_forward", *ON)
    with pytest.raises(RunFailed):
        run("own_losses_of_a_test:k2", "--claims", "token_reverse", "--beta", "0.1", *ON)
    with pytest.raises(RunFailed):
        run("own_losses_of_a_test:k2", "--claims", "{off_policy: token_reverse}", "--regime", "off_policy")


def test_options_arguments_and_result_are_named(losses):
    output = run(
        "own_losses_of_a_test:scaled",
        *("--options", "{scale: 0.1}"),
        *("--arguments", "{policy: logp, batch: {sft: ref_logp, keep: mask}}"),
        *("--result", "term", "--claims", "token_reverse", "--beta", "0.1"),
        *ON,
    )
    assert "token_reverse, times 0.1" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nope",), "TARGET: got 'nope'; allowed: trl, verl, module:function"),
        (("trl", "--result", "loss"), "--arguments, --options, --result: not for trl"),
        (("no_such_module:k2",), "TARGET: no_such_module cannot be imported: ModuleNotFoundError"),
        (("broken_losses_of_a_test:k2",), "TARGET: broken_losses_of_a_test cannot be imported: .*no_such_package"),
        (("nope.py:k2",), "TARGET: no such file: nope.py"),
        (("./own_losses_of_a_test:k2",), "TARGET: got './own_.*'; allowed: module:function, path/file.py:function"),
        ((":k2",), "TARGET: got ':k2'; allowed: module:function"),
        (("own_losses_of_a_test:ends", "--claims", "zero"), "loss_fn: it raised SystemExit: 0"),
        (("ends_at_import_of_a_test:k2",), "TARGET: ends_at_import_of_a_test cannot be imported: SystemExit: 0"),
        (("own_losses_of_a_test:Losses",), "loss_fn: Losses is a class; give an instance"),
        (("own_losses_of_a_test:k3",), "TARGET: got 'k3'; did you mean 'k2'"),
        (("own_losses_of_a_test:number",), "TARGET: got 'number'; allowed: a function"),
        (("own_losses_of_a_test:k2", "--claims", "token_revers"), "claims: got 'token_revers'; .*'token_reverse'"),
        (("own_losses_of_a_test:k2", "--claims", "[a]"), r"claims: got '\[a\]'; allowed: sequence_reverse"),
        (
            ("own_losses_of_a_test:k2", "--regime", "offline"),
            "regimes: got 'offline'; did you mean 'off_policy'",
        ),
        (("own_losses_of_a_test:k2", "--options", "k3"), "--options: got 'k3'; allowed: a mapping"),
        (("own_losses_of_a_test:k2", "--result", "kl"), "--result: name the parameters too"),
    ],
)
def test_a_mistake_is_one_line(losses, arguments, message):
    with pytest.raises(UserError, match=message) as error:
        run(*arguments)
    assert "\n" not in str(error.value)


# --- losses that do not let the command end -----------------------------------------------------------------------
ENDINGS = {
    "exits": "os._exit(0)",
    "is killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "raises SystemExit": "sys.exit(0)",
    "closes stdout": "sys.stdout.close()",
    "closes the file of stdout": "os.close(1)",
    "points stdout elsewhere": "os.dup2(os.open(os.devnull, os.O_WRONLY), 1)",
    "leaves a copy of itself to report": "os.fork() and os._exit(0)",
}


LOSS_THAT_ENDS = """
import os, signal, sys

calls = []

def k2(logp, ref_logp, mask):
    calls.append(1)
    # In a later call it would fail for its own reason, as to close what is closed.
    if len(calls) == 1:
        %s
    return 0.5 * (logp - ref_logp) ** 2 * mask
"""


def console_script(folder):
    script = "from kl_comedy.cli.main import run; run()"
    words = [sys.executable, "-c", script, "conformance", "loss.py:k2", *ON]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("ending", ENDINGS)
def test_no_ending_of_a_loss_is_taken_for_a_pass(tmp_path, ending):
    """Exit code 0 comes with the whole report only."""
    (tmp_path / "loss.py").write_text(LOSS_THAT_ENDS % ENDINGS[ending])
    done = console_script(tmp_path)
    assert done.returncode in (1, 2)
    assert done.stderr


@pytest.mark.slow
def test_a_loss_that_ends_nothing_passes(tmp_path):
    (tmp_path / "loss.py").write_text(LOSS_THAT_ENDS % "pass")
    done = console_script(tmp_path)
    assert done.returncode == 0
    assert "token_reverse" in done.stdout
