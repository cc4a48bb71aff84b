"""The registry: unchanged functions, unique names, helpful misses, outsiders by entry point and plugin."""

import json
import os
import subprocess
import sys

import pytest

from kl_comedy.errors import UserError
from kl_comedy.registry import KINDS, Registry, load_plugin_file

PLUGIN = '''
from kl_comedy.registry import ESTIMATORS

@ESTIMATORS.register("outside", source="a test", claims=("nonnegative",), needs="log_ratio")
def outside(log_ratio):
    """Registered from outside the project."""
    return log_ratio.square()
'''


def test_registering_returns_the_function_unchanged():
    table = Registry("things")

    def fn(x):
        """Adds one."""
        return x + 1

    assert table.register("plus", source="here", claims=("sane",), colour="red")(fn) is fn
    entry = table.get("plus")
    assert (entry.fn, entry.summary, entry.claims) == (fn, "Adds one.", ("sane",))
    assert entry.row()["colour"] == "red"


def test_a_taken_name_raises_and_names_the_owner():
    table = Registry("things")
    table.register("a", source="x", summary="first")(len)
    with pytest.raises(UserError, match="'a' is already registered by builtins"):
        table.register("a", source="x", summary="second")(len)
    assert table.get("a").summary == "first"


def test_an_entry_must_say_what_it_is():
    with pytest.raises(UserError, match="docstring"):
        Registry("things").register("a", source="x")(lambda x: x)


def test_a_miss_names_the_alternatives_and_the_nearest():
    table = Registry("things")
    for name in ("alpha", "beta"):
        table.register(name, source="x", summary=name)(len)
    with pytest.raises(UserError, match=r"config\.key: got 'alhpa'; allowed: alpha, beta; did you mean 'alpha'\?"):
        table.get("alhpa", key="config.key")


def test_the_kinds_are_those_of_the_command_line():
    assert {"estimators", "corrections", "advantages", "policy_losses", "rewards", "rollouts", "datasets"} <= set(KINDS)


@pytest.mark.parametrize(("text", "says"), [("1 +", "failed on import: SyntaxError"), ("x = 1/0", "ZeroDivisionError")])
def test_a_broken_plugin_is_one_clear_error(tmp_path, text, says):
    file = tmp_path / "broken.py"
    file.write_text(text)
    with pytest.raises(UserError, match=says):
        load_plugin_file(file)
    with pytest.raises(UserError, match="no such file"):
        load_plugin_file(tmp_path / "missing.py")


def listed(*arguments, **environment):
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from kl_comedy.cli.main import run; run()",
            "list",
            "estimators",
            "--format",
            "json",
            *arguments,
        ],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return {row["name"]: row for row in json.loads(done.stdout)}


def test_a_script_joins_by_plugin(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(PLUGIN)
    rows = listed("--plugin", str(file))
    assert rows["outside"]["claims"] == ["nonnegative"] and "k3" in rows


def test_an_installed_package_joins_by_entry_point(tmp_path):
    (tmp_path / "their_package.py").write_text(PLUGIN)
    info = tmp_path / "their_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[kl_comedy.estimators]\noutside = their_package\n")
    assert "outside" in listed(PYTHONPATH=str(tmp_path))
