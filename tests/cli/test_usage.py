"""A mistake in commands, arguments and options is one line that says what is allowed, and exit code 2."""

import shlex

import pytest

MISTAKES = {
    "train": "kl-comedy train: CONFIG is missing; for example `kl-comedy train quickstart",
    "evaluate": "kl-comedy evaluate: TARGET is missing; for example `kl-comedy evaluate ",
    "results verify": "kl-comedy results verify: TABLE is missing; for example `kl-comedy results verify results`",
    "certfy": "kl-comedy: no such command 'certfy'; did you mean 'certify'? allowed: certify, ",
    "results tabel": "kl-comedy results: no such command 'tabel'; did you mean 'table'? allowed: table, ",
    "certify grpo --regim x": "no such option '--regim'; did you mean '--regime'? allowed: --",
    "train quickstart --beta 0.1": "no such option '--beta'; allowed: --fast-dev-run, --plugin (a key of ",
    "explain grpo --ful": "option: got '--ful'; did you mean '--full'?",
    "sweep quickstart --local x": "kl-comedy sweep: --local: ",
    "sweep quickstart --local": "--local",
    "doctor foo": "kl-comedy doctor: Got unexpected extra argument",
    "explain verl:kl_loss_type": "error: verl: got 'kl_loss_type'; allowed: key=value",
    "certify verl:kl_loss_type=k3": "read by `kl-comedy explain 'verl:kl_loss_type=k3'`",
    "check quickstart model.path=x": "model.path: no such key (given 'x'); did you mean 'source'?",
    "status nothing": "no sweep at nothing; `kl-comedy sweep GRID` makes one",
}


@pytest.mark.parametrize("command", MISTAKES)
def test_a_mistake_on_the_command_line_is_one_line(kl_comedy, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = kl_comedy(*shlex.split(command))
    assert code == 2
    assert out == ""
    assert MISTAKES[command] in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1


def test_a_group_without_a_command_prints_its_help(kl_comedy):
    code, out, err = kl_comedy("results")
    assert code == 2
    assert "table" in out + err
    assert "error" not in out + err
