"""Two dozen kinds of secret in every place where a user can put one: refused, or in nothing that is left behind."""

import json
import os
import re
import stat
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from commands import Command, cpu_limit
from kl_comedy.cli.common import load_plugins
from kl_comedy.config import load_config
from kl_comedy.errors import UserError
from kl_comedy.redaction import is_secret_key, printable, redact, redact_command, redact_source
from kl_comedy.slurm.grid import read_grid
from kl_comedy.slurm.profile import read_profile

SECRETS = {  # name: (text, what must not be seen); in two halves, so that scanners of source code pass it by
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
PLACES = [
    *("tracking.uri", "tracking.experiment", "tracking.tags.note", "name", "output", "model.source", "model.options.x"),
    *("data.train.dataset", "data.train.options.x", "rewards.0.options.x", "rollout.options.urls", "eval.reference"),
    *("callbacks.0.options.x", "trainer.x", "kl", "no.such.key"),
]


@pytest.fixture(scope="module")
def tiny():
    return Path(__file__).parent / "support" / "tiny.yaml"


def nested(key, value):
    for name in reversed(key.split(".")):
        value = [value] if name == "0" else {name: value}
    return value


@pytest.mark.parametrize("kind", SECRETS)
def test_a_secret_in_a_config_a_grid_a_profile_or_a_plugins_name_is_refused(kind, tmp_path, tiny):
    text, needle = SECRETS[kind]
    file = tmp_path / "file.yaml"

    def refused(read, *arguments):
        with pytest.raises(UserError) as caught:
            read(*arguments)
        assert needle not in str(caught.value) and "like a secret" in str(caught.value), (arguments, caught.value)

    for key in PLACES:
        file.write_text(yaml.safe_dump(nested(key, text)))
        refused(load_config, file)
        refused(load_config, None, [f"{key}={text}"])
    refused(load_config, None, ["tracking.tags.first=${tracking.tags.second}", f"tracking.tags.second={text}"])
    for where in ("overrides", "grid", "rows", "evaluate"):
        inner = {"tracking.tags.x": [text] if where == "grid" else text}
        file.write_text(yaml.safe_dump({"base": str(tiny), where: {"row": inner} if where == "rows" else inner}))
        refused(read_grid, file)
    for profile in (
        {"environment": {"X": text}},
        {"setup": [f"run '{text}'"]},
        {"extra": [text]},
        {"servers": {"command": f"serve {{port}} {text}"}},
    ):
        file.write_text(yaml.safe_dump({"time": "1", **profile}))
        refused(read_profile, str(file))
    refused(load_plugins, [f"{text}/plugin.py"])
    assert needle not in redact(text) and needle not in redact_source(f"x = '''\n{text}'''\n# {text}\n")


def test_a_value_under_the_name_of_a_secret_is_refused_and_what_points_to_one_is_not(tmp_path):
    for key in ("tracking.tags.password", "model.options.hf_token", "rewards.0.options.api_key", "tracking.token"):
        with pytest.raises(UserError, match=f"^{key}: holds what looks like a secret") as caught:
            load_config(None, [f"{key}=plainword"])
        assert "plainword" not in str(caught.value)
    options = {"api_key_env": "MY_KEY", "api_key_file": "key.txt"}
    load_config(None, ["rollout.backend=vllm_server", f"rollout.options={json.dumps(options)}"])
    load_config(None, ["data.prompt.suffix=' Write token: x, password: y'", "tracking.tags.note='k1, per token: 0.1'"])
    file = tmp_path / "site.yaml"
    file.write_text("time: '10'\nenvironment: {HF_TOKEN: $HF_TOKEN}\nsetup: [export WANDB_API_KEY=$(cat ~/.key)]\n")
    read_profile(str(file))


@pytest.mark.parametrize("value", ["${oc.env:HOME}", "a ${oc.env:HOME,x} b", "${oc.decode:'1'}", "${oc.${seed}:x}"])
def test_nothing_in_a_config_is_evaluated(value, monkeypatch):
    with pytest.raises(UserError, match=r"^tracking\.tags\.x: got .*resolvers such as oc.env are off") as caught:
        load_config(None, [f"tracking.tags.x={json.dumps(value)}"])
    assert os.environ["HOME"] not in str(caught.value)
    assert load_config(None, ["seed=3", "tracking.tags.x='s-${seed}: ${name}'"]).tracking.tags["x"] == "s-3: run"


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


def reference_redact(text):
    """What is hidden, as plain patterns say it: cubic in the length of a word, so for short texts only."""

    def pair(match):
        number = re.fullmatch(r"[-+]?[\d.]+(e[-+]?\d+)?", match["value"]) and "=" not in match["sep"]
        hidden = is_secret_key(match["key"]) and not match["value"].startswith("$") and not number
        return f"{match['key']}{match['sep']}***" if hidden else match[0]

    text = REFERENCE_TOKEN.sub("***", REFERENCE_USERINFO.sub(r"\g<scheme>***@", text))
    return REFERENCE_PAIR.sub(pair, text)


PIECES = [text for text, _ in SECRETS.values()] + [
    *("NEEDLE7needle7needle7", "key", "token", "api_key", "password", "hf" + "_", "sk" + "-", "ey" + "J", "Bearer "),
    *("=", ":", '"', "'", " ", "\n", "://", "@", "/", ".", "-", "_", "a", "7", "$", "x://", "--token ", ", "),
]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(PIECES), min_size=1, max_size=8).map("".join))
def test_what_plain_patterns_hide_is_hidden(text):
    reference, redacted = reference_redact(text), redact(text)
    for needle in ("NEEDLE7needle7needle7", *(needle for _, needle in SECRETS.values())):
        assert redacted.count(needle) <= reference.count(needle), (text, redacted)


ODD_UNITS = [  # what the patterns repeat, and what they look for at its end
    *(
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
    ),
    *("sk" + "-", "ey" + "J-", "ey" + "Jaaaaaaaa.", "x://", "x://a:", "x://a@", "a@", "bearer ", "basic    "),
    *("hf" + "_", "gl" + "pat-", "github" + "_pat_", "xo" + "xb-", "--token ", "\t--token", " -key", "-"),
    *("-----BEGIN ", "PRIVATE KEY", "-----BEGIN " + "PRIVATE KEY-----", "-----END "),
    *("\x1b[", "\x1b]", "\x9b0", "hooks.slack.com/"),
]


@pytest.mark.parametrize("hide", [redact, redact_source, printable, lambda text: redact_command([text])])
def test_no_text_takes_more_than_time_in_proportion_to_its_length(hide):
    """A quadratic pattern would take minutes for one of these; together they take less than a second."""
    with cpu_limit(30):
        for unit in ODD_UNITS:
            for head in ("", 'token="', "x://"):
                hide(head + unit * (10_000 // len(unit)))
        hide("X = 0x" + "f" * 200_000)


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


@pytest.mark.slow
def test_nothing_that_runs_sweeps_and_reports_leave_behind_holds_a_secret(tmp_path, tiny):
    """Secrets in the plugin's source, in what it logs and raises, and in the environment."""
    texts = [text for text, _ in SECRETS.values()]
    inputs, work = tmp_path / "inputs", tmp_path / "work"
    inputs.mkdir()
    work.mkdir()
    plugin, grid, site = inputs / "talkative.py", inputs / "grid.yaml", inputs / "site.yaml"
    comments = "\n".join(f"# {line}" for text in texts for line in text.split("\n"))
    plugin.write_text(PLUGIN % (comments, ", ".join(map(repr, texts))))
    grid.write_text(yaml.safe_dump({"base": str(tiny), "overrides": {"rewards": [{"name": "talkative"}]}, "seeds": 1}))
    site.write_text("time: '10'\n")
    store = f"sqlite:///{work}/mlflow.db"
    words = [f"tracking.uri={store}", "train.steps=4", "rewards=[{name: talkative}]", "--plugin", plugin]
    secret = {"MY_SECRET": texts[0], "MLFLOW_TRACKING_PASSWORD": SECRETS["pair"][1]}
    for name in ("sbatch", "squeue"):
        (inputs / name).write_text("#!/bin/sh\necho 7\n" if name == "sbatch" else "#!/bin/sh\n")
        (inputs / name).chmod(0o755)
    slurm = {**secret, "PATH": f"{inputs}:{os.environ['PATH']}"}

    run = Command("train", tiny, *words, cwd=work, env=secret)
    sweep = Command("sweep", grid, "--slurm", site, "--plugin", plugin, cwd=work, env=slurm)
    assert run.wait() == 1 and sweep.wait() == 0, sweep.output
    report = ["results", "report", "--uri", store, "--status", "all", "--out", "report.html"]
    Command(*report, cwd=work, env=secret).finish()

    files = [file for file in work.rglob("*") if file.is_file()]
    names = {file.name for file in files}
    assert {"mlflow.db", "report.html", "talkative.py", "manifest.json", "train.sbatch", "summary.json"} <= names
    assert any("***" in file.read_text() for file in files if file.name.startswith(".output"))
    for file in files:
        content = file.read_bytes()
        for kind, (_, needle) in SECRETS.items():
            assert needle.encode() not in content, f"{kind} is in {file.relative_to(work)}"
    for file in files:
        if file.name in ("config.yaml", "summary.json", "tracking.json", "spool.jsonl", "manifest.json", "base.yaml"):
            in_store = "mlartifacts" in file.parts or "checkpoints" in str(file)
            assert in_store or stat.S_IMODE(file.stat().st_mode) == 0o600, file
