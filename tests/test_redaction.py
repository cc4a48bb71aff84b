"""Two dozen kinds of secret in every place where a user can put one: refused, or in nothing that is left behind."""

import json
import os
import re
import stat
import unicodedata
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from commands import Command, cpu_limit
from kl_comedy.cli.common import load_plugins
from kl_comedy.config import load_config
from kl_comedy.errors import UserError
from kl_comedy.redaction import is_secret_key, one_line, printable, redact, redact_command, redact_source
from kl_comedy.slurm.grid import read_grid
from kl_comedy.slurm.profile import read_profile

# Each has a text and what of it must not be seen. They are in two halves, so that scanners of source code pass by.
SECRETS = {
    "address": ("http://alice:S3cr3tPw1@host:5000", "S3cr3tPw1"),
    "address, odd password": ("http://alice:p@S3cr/tPw2@host:5000", "S3cr/tPw2"),
    "address, user alone": ("https://t0kenAl0ne3@host/x", "t0kenAl0ne3"),
    "database": ("postgresql+psycopg2://alice:dbPw4dbPw4@host/db", "dbPw4dbPw4"),
    "query": ("https://host/x?user=1&password=quPw5quPw5", "quPw5quPw5"),
    "query, key": ("https://host/x?api_key=quKey6quKey6", "quKey6quKey6"),
    "pair": ("password=hunter7hunter7", "hunter7hunter7"),
    "pair in prose": ("note: my token: hunter8hunter8", "hunter8hunter8"),
    "flag": ("serve --api-key hunter9hunter9", "hunter9hunter9"),
    "basic": ("Authorization: Basic abc28DEFabc28DEF==", "abc28DEFabc28DEF"),
    "bearer": ("Authorization: Bearer abc10DEFabc10DEF", "abc10DEFabc10DEF"),
    "hugging face": ("hf" + "_abcdefghijklmnopqrstuvwx11", "abcdefghijklmnopqrstuvwx11"),
    "openai": ("sk" + "-proj-abcdefgh12345678abcd12", "abcdefgh12345678abcd12"),
    "github": ("gh" + "p_abcdefghijklmnopqrst13", "abcdefghijklmnopqrst13"),
    "github, fine": ("github" + "_pat_abcdefghijk_lmnopq14", "abcdefghijk_lmnopq14"),
    "gitlab": ("gl" + "pat-abcdefghijklmnopq15", "abcdefghijklmnopq15"),
    "github, app": ("gh" + "s_abcdefghijklmnopqrst26", "abcdefghijklmnopqrst26"),
    "slack": ("xo" + "xb-123456789-abcdef16", "123456789-abcdef16"),
    "slack, hook": ("https://hooks.slack.com/" + "services/T00/B00/abcdefgh27", "T00/B00/abcdefgh27"),
    "databricks": ("da" + "pi0123456789abcdef0123456717", "0123456789abcdef0123456717"),
    "slack, app": ("xa" + "pp-1-A0123456-abcdef21", "A0123456-abcdef21"),
    "npm": ("np" + "m_abcdefghijklmnopqrstuvwxyz012345622", "abcdefghijklmnopqrstuvwxyz012345622"),
    "pypi": ("py" + "pi-AgEIcHlwaS5vcmcabcdef23", "AgEIcHlwaS5vcmcabcdef23"),
    "nvidia": ("nv" + "api-abcdefghijklmnopqrst24", "abcdefghijklmnopqrst24"),
    "aws": ("AK" + "IAABCDEFGHIJKLMN18", "ABCDEFGHIJKLMN18"),
    "aws, temporary": ("AS" + "IAABCDEFGHIJKLMN25", "ABCDEFGHIJKLMN25"),
    "google": ("AI" + "zaabcdefghijklmnopqrstuvwxyz0123419", "abcdefghijklmnopqrstuvwxyz0123419"),
    "json web token": ("ey" + "Jhbgci0iJIUz.eyJzdWIiOiIx.c2lnbmF0dXJl20", "c2lnbmF0dXJl20"),
    "private key": (
        "-----BEGIN " + "RSA PRIVATE KEY-----\nMIIabc21MIIabc21\n-----END RSA PRIVATE KEY-----",
        "MIIabc21",
    ),
}
NEEDLES = {kind: needle for kind, (_, needle) in SECRETS.items()}
PLACES = [
    "tracking.uri",
    "tracking.experiment",
    "tracking.tags.note",
    "name",
    "output",
    "model.source",
    "model.options.x",
    "data.train.dataset",
    "data.train.options.x",
    "rewards.0.options.x",
    "rollout.options.urls",
    "eval.reference",
    "callbacks.0.options.x",
    "trainer.x",
    "kl",
    "no.such.key",
]


@pytest.fixture(scope="module")
def tiny():
    return Path(__file__).parent / "support" / "tiny.yaml"


def nested(key, value):
    """The mapping that a config file has for a dotted key; a 0 in it is a list of one."""
    for name in reversed(key.split(".")):
        if name == "0":
            value = [value]
        else:
            value = {name: value}
    return value


def check_refused(needle, read, *arguments):
    """The reader refuses what it is given, and does not say what it read."""
    with pytest.raises(UserError) as error:
        read(*arguments)
    assert needle not in str(error.value), arguments
    assert "like a secret" in str(error.value), arguments


every_secret = pytest.mark.parametrize(("text", "needle"), SECRETS.values(), ids=SECRETS)


@every_secret
def test_a_secret_in_a_config_a_grid_a_profile_or_a_plugins_name_is_refused(text, needle, tmp_path, tiny):
    file = tmp_path / "file.yaml"
    for key in PLACES:
        file.write_text(yaml.safe_dump(nested(key, text)))
        check_refused(needle, load_config, file)
        check_refused(needle, load_config, None, [f"{key}={text}"])
    for settings_of_cells in (
        {"overrides": {"tracking.tags.x": text}},
        {"grid": {"tracking.tags.x": [text]}},
        {"rows": {"row": {"tracking.tags.x": text}}},
        {"evaluate": {"tracking.tags.x": text}},
    ):
        file.write_text(yaml.safe_dump({"base": str(tiny), **settings_of_cells}))
        check_refused(needle, read_grid, file)
    for profile in (
        {"environment": {"X": text}},
        {"setup": [f"run '{text}'"]},
        {"extra": [text]},
        {"servers": {"command": f"serve {{port}} {text}"}},
    ):
        file.write_text(yaml.safe_dump({"time": "1", **profile}))
        check_refused(needle, read_profile, str(file))
    check_refused(needle, load_plugins, [f"{text}/plugin.py"])


@every_secret
def test_a_secret_that_one_key_takes_from_another_is_refused(text, needle):
    overrides = ["tracking.tags.first=${tracking.tags.second}", f"tracking.tags.second={text}"]
    check_refused(needle, load_config, None, overrides)


@every_secret
def test_a_secret_is_hidden_in_text_and_in_source(text, needle):
    assert needle not in redact(text)
    assert needle not in redact_source(f"x = '''\n{text}'''\n# {text}\n")


@pytest.mark.parametrize(
    "key", ["tracking.tags.password", "model.options.hf_token", "rewards.0.options.api_key", "tracking.token"]
)
def test_a_value_under_the_name_of_a_secret_is_refused_and_what_points_to_one_is_not(key):
    with pytest.raises(UserError, match=f"^{key}: holds what looks like a secret") as error:
        load_config(None, [f"{key}=plainword"])
    assert "plainword" not in str(error.value)


def test_the_name_of_a_variable_or_a_file_with_a_secret_is_no_secret():
    options = {"api_key_env": "MY_KEY", "api_key_file": "key.txt"}
    load_config(None, ["rollout.backend=vllm_server", f"rollout.options={json.dumps(options)}"])


def test_prose_with_the_name_of_a_secret_is_no_secret():
    load_config(None, ["data.prompt.suffix=' Write token: x, password: y'", "tracking.tags.note='k1, per token: 0.1'"])


def test_a_profile_may_take_a_secret_from_the_environment(tmp_path):
    file = tmp_path / "site.yaml"
    file.write_text("time: '10'\nenvironment: {HF_TOKEN: $HF_TOKEN}\nsetup: [export WANDB_API_KEY=$(cat ~/.key)]\n")
    read_profile(str(file))


@pytest.mark.parametrize("value", ["${oc.env:HOME}", "a ${oc.env:HOME,x} b", "${oc.decode:'1'}", "${oc.${seed}:x}"])
def test_nothing_in_a_config_is_evaluated(value):
    with pytest.raises(UserError, match=r"^tracking\.tags\.x: got .*resolvers such as oc.env are off") as error:
        load_config(None, [f"tracking.tags.x={json.dumps(value)}"])
    assert os.environ["HOME"] not in str(error.value)


def test_a_config_may_name_its_own_keys():
    config = load_config(None, ["seed=3", "tracking.tags.x='s-${seed}: ${name}'"])
    assert config.tracking.tags["x"] == "s-3: run"


# --- plain patterns -----------------------------------------------------------------------------------------------
REFERENCE_TOKEN = re.compile(
    r"(?<![A-Za-z0-9])("
    r"hf_[A-Za-z0-9]{16,}|sk-(?=[\w-]*\d)[\w-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|"
    r"xox[a-z]-[\w-]{10,}|xapp-[\w-]{10,}|dapi[0-9a-f]{16,}|(AKIA|ASIA)[A-Z0-9]{12,}|AIza[\w-]{30,}|"
    r"npm_[A-Za-z0-9]{30,}|pypi-[\w-]{16,}|nvapi-[\w-]{16,}|eyJ[\w-]{8,}\.[\w-]{8,}(\.[\w-]*)?"
    r")|hooks\.slack\.com/services/\S+|(?i:\b(bearer|basic) +)(?=\S*\d)[\w.~+/-]{12,}=*|"
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----(.|\n)*?(-----END [A-Z ]*PRIVATE KEY-----|\Z)"
)
REFERENCE_USERINFO = re.compile(
    r"(?P<scheme>\b[a-zA-Z][\w+.-]*://)([^\s/:@'\"]*:[^\s'\"]*|[^\s/@'\"]+)@",
)
REFERENCE_PAIR = re.compile(
    r"(?P<key>[\w.\-]*(?i:pass(?:word|wd|phrase)|pwd|secret|credential|key|token)[\w.\-]*)"
    r"(?P<sep>[\"']?\s*[=:]\s*)(?P<value>\"[^\"\n]*\"|'[^'\n]*'|[^\s'\",;&}\])]+)"
)


def hide_pair(match):
    """A value under the name of a secret; but no variable, and no number of tokens."""
    is_variable = match["value"].startswith("$")
    is_number = re.fullmatch(r"[-+]?[\d.]+(e[-+]?\d+)?", match["value"]) and "=" not in match["sep"]
    if is_secret_key(match["key"]) and not is_variable and not is_number:
        return f"{match['key']}{match['sep']}***"
    return match[0]


def reference_redact(text):
    """What is hidden, as plain patterns say it: cubic in the length of a word, so for short texts only."""
    text = REFERENCE_USERINFO.sub(r"\g<scheme>***@", text)
    text = REFERENCE_TOKEN.sub("***", text)
    return REFERENCE_PAIR.sub(hide_pair, text)


PLAIN_NEEDLE = "NEEDLE7needle7needle7"
PIECES = [
    *[text for text, _ in SECRETS.values()],
    PLAIN_NEEDLE,
    "key",
    "token",
    "api_key",
    "password",
    "hf" + "_",
    "sk" + "-",
    "ey" + "J",
    "Bearer ",
    "=",
    ":",
    '"',
    "'",
    " ",
    "\n",
    "://",
    "@",
    "/",
    ".",
    "-",
    "_",
    "a",
    "7",
    "$",
    "x://",
    "--token ",
    ", ",
]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(PIECES), min_size=1, max_size=8).map("".join))
def test_what_plain_patterns_hide_is_hidden(text):
    reference = reference_redact(text)
    redacted = redact(text)
    for needle in (PLAIN_NEEDLE, *NEEDLES.values()):
        assert redacted.count(needle) <= reference.count(needle), (text, redacted)


# What the patterns repeat, and what they look for at its end.
ODD_UNITS = [
    "key",
    "token.",
    "pwd_",
    "0f",
    ".",
    "a.",
    "a-",
    "token=",
    "token:",
    "key='",
    'key="a',
    "token=$",
    "key = ",
    "\t ",
    "sk" + "-",
    "ey" + "J-",
    "ey" + "Jaaaaaaaa.",
    "x://",
    "x://a:",
    "x://a@",
    "a@",
    "bearer ",
    "basic    ",
    "hf" + "_",
    "gl" + "pat-",
    "github" + "_pat_",
    "xo" + "xb-",
    "--token ",
    "\t--token",
    " -key",
    "-",
    "-----BEGIN ",
    "PRIVATE KEY",
    "-----BEGIN " + "PRIVATE KEY-----",
    "-----END ",
    "\x1b[",
    "\x1b]",
    "\x9b0",
    "hooks.slack.com/",
]


def redact_one_word(text):
    return redact_command([text])


@pytest.mark.parametrize("hide", [redact, redact_source, printable, redact_one_word])
def test_no_text_takes_more_than_time_in_proportion_to_its_length(hide):
    """A quadratic pattern would take minutes for one of these; together they take less than a second."""
    with cpu_limit(30):
        for unit in ODD_UNITS:
            for head in ("", 'token="', "x://"):
                hide(head + unit * (10_000 // len(unit)))
        hide("X = 0x" + "f" * 200_000)


# --- what a run leaves behind -------------------------------------------------------------------------------------
PLUGIN = '''"""A reward that knows secrets, and says them."""
import logging
import os

from kl_comedy.registry import REWARDS

%s
SAID, CALLS = [%s], []


@REWARDS.register("talkative", source="the tests")
def talkative(completion, answer, meta):
    """Logs the secrets, or dies with them."""
    for text in (SAID + [os.environ["MY_SECRET"]]) if not CALLS else ():
        logging.getLogger("my_plugin").warning("%%s", text)
    CALLS.extend([1] * (answer not in completion))  # a run first judges the right answers
    if len(CALLS) >= 40:  # within a batch, which is warned of, and in the whole of the next, which ends the run
        raise RuntimeError("; ".join(SAID))
    return 0.0
'''


PRIVATE_FILES = ("config.yaml", "summary.json", "tracking.json", "spool.jsonl", "manifest.json", "base.yaml")
"""Files that only their owner may read."""


@pytest.fixture(scope="module")
def left_behind(tmp_path_factory, tiny):
    """The folder of a run that died, a sweep and a report.

    Secrets are in the plugin's source, in what it logs and raises, and in the environment.
    """
    inputs = tmp_path_factory.mktemp("inputs")
    work = tmp_path_factory.mktemp("work")
    plugin = inputs / "talkative.py"
    grid = inputs / "grid.yaml"
    profile = inputs / "site.yaml"

    texts = [text for text, _ in SECRETS.values()]
    lines = [line for text in texts for line in text.split("\n")]
    comments = "\n".join(f"# {line}" for line in lines)
    plugin.write_text(PLUGIN % (comments, ", ".join(map(repr, texts))))
    grid.write_text(yaml.safe_dump({"base": str(tiny), "overrides": {"rewards": [{"name": "talkative"}]}, "seeds": 1}))
    profile.write_text("time: '10'\n")
    # A SLURM that takes every job and knows of none.
    for name, script in {"sbatch": "#!/bin/sh\necho 7\n", "squeue": "#!/bin/sh\n"}.items():
        (inputs / name).write_text(script)
        (inputs / name).chmod(0o755)
    environment = {"MY_SECRET": texts[0], "MLFLOW_TRACKING_PASSWORD": NEEDLES["pair"]}
    with_slurm = {**environment, "PATH": f"{inputs}:{os.environ['PATH']}"}

    store = f"sqlite:///{work}/mlflow.db"
    overrides = [f"tracking.uri={store}", "train.steps=4", "rewards=[{name: talkative}]"]
    run = Command("train", tiny, *overrides, "--plugin", plugin, cwd=work, env=environment)
    sweep = Command("sweep", grid, "--slurm", profile, "--plugin", plugin, cwd=work, env=with_slurm)
    assert run.wait() == 1
    assert sweep.wait() == 0, sweep.output
    report = ["results", "report", "--uri", store, "--status", "all", "--out", "report.html"]
    Command(*report, cwd=work, env=environment).finish()
    return work


def files_below(folder):
    return [file for file in folder.rglob("*") if file.is_file()]


@pytest.mark.slow
def test_nothing_that_runs_sweeps_and_reports_leave_behind_holds_a_secret(left_behind):
    for file in files_below(left_behind):
        content = file.read_bytes()
        for kind, needle in NEEDLES.items():
            assert needle.encode() not in content, f"{kind} is in {file.relative_to(left_behind)}"


@pytest.mark.slow
def test_runs_sweeps_and_reports_did_leave_their_files_behind(left_behind):
    """Or the test above would look at nothing."""
    files = files_below(left_behind)
    names = {file.name for file in files}
    assert {"mlflow.db", "report.html", "talkative.py", "manifest.json", "train.sbatch", "summary.json"} <= names
    outputs = [file.read_text() for file in files if file.name.startswith(".output")]
    assert any("***" in text for text in outputs), "the plugin said its secrets"


@pytest.mark.slow
def test_files_that_may_hold_what_a_user_wrote_are_for_their_owner_only(left_behind):
    for file in files_below(left_behind):
        if file.name not in PRIVATE_FILES:
            continue
        # Copies that MLflow or torch writes.
        if "mlartifacts" in file.parts or "checkpoints" in str(file):
            continue
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file


@settings(max_examples=300, deadline=None)
@given(st.text(st.characters(codec=None) | st.sampled_from("\n\x85\u2028\x1b[m\u202e "), max_size=40))
def test_one_line_is_one_line_for_every_reader(text):
    line = one_line(text)
    assert line.splitlines() in ([], [line])
    assert not any(unicodedata.category(letter) in ("Cc", "Cs", "Zl", "Zp") for letter in line)
    assert one_line(line) == line


def test_a_web_token_is_hidden_wherever_it_begins_in_a_word():
    token = "ey" + "J" + "a1" * 2500 + "." + "b2" * 9
    for text in (token, f"x-{token}", f"eyJ-{token}", f"a.{token}.sig", f"k=_{token}"):
        assert "a1a1" not in redact(text)
        assert "b2b2" not in redact(text)
