"""kl-comedy conformance: functions by name, options, exit codes, and mistakes in one line."""

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
"""
ON = ("--regime", "on_policy")


@pytest.fixture
def losses(tmp_path, monkeypatch):
    (tmp_path / "own_losses_of_a_test.py").write_text(LOSSES)
    (tmp_path / "broken_losses_of_a_test.py").write_text("import no_such_package\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


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


def test_without_claims_it_says_what_the_loss_optimizes(losses):
    output = run("own_losses_of_a_test:k2")
    assert "on_policy: token_reverse" in output
    assert "off_policy: none" in output
    assert "claimed" not in output


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
        (("own_losses_of_a_test:k3",), "TARGET: got 'k3'; allowed: .* did you mean 'k2'"),
        (("own_losses_of_a_test:number",), "TARGET: got 'number'; allowed: a function"),
        (("own_losses_of_a_test:k2", "--claims", "token_revers"), "claims: got 'token_revers'; .*'token_reverse'"),
        (("own_losses_of_a_test:k2", "--claims", "[a]"), r"claims: got '\[a\]'; allowed: sequence_reverse"),
        (("own_losses_of_a_test:k2", "--regime", "offline"), "regimes: got 'offline'; allowed: on_policy"),
        (("own_losses_of_a_test:k2", "--options", "k3"), "--options: got 'k3'; allowed: a mapping"),
        (("own_losses_of_a_test:k2", "--result", "kl"), "--result: name the parameters too"),
    ],
)
def test_a_mistake_is_one_line(losses, arguments, message):
    with pytest.raises(UserError, match=message) as error:
        run(*arguments)
    assert "\n" not in str(error.value)
