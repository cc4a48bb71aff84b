"""The registry: unchanged functions, unique names, helpful misses, outsiders by entry point and plugin."""

import json
import os
import subprocess
import sys

import pytest

from kl_comedy.errors import UserError
from kl_comedy.registry import KINDS, Registry, load_plugin_file, plugin_hashes, plugin_sources

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


@pytest.mark.parametrize(
    ("text", "expected"), [("1 +", "failed on import: SyntaxError"), ("x = 1/0", "ZeroDivisionError")]
)
def test_a_broken_plugin_is_one_clear_error(tmp_path, text, expected):
    file = tmp_path / "broken.py"
    file.write_text(text)
    with pytest.raises(UserError, match=expected):
        load_plugin_file(file)
    with pytest.raises(UserError, match="no such file"):
        load_plugin_file(tmp_path / "missing.py")


def test_outsiders_join_by_plugin_and_by_entry_point(tmp_path):
    (tmp_path / "mine.py").write_text(PLUGIN.replace("outside", "mine"))
    (tmp_path / "their_package.py").write_text(PLUGIN)
    info = tmp_path / "their_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[kl_comedy.estimators]\noutside = their_package\n")
    words = ["-m", "kl_comedy.cli", "list", "estimators", "--format", "json", "--plugin", str(tmp_path / "mine.py")]
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert rows["mine"]["claims"] == ["nonnegative"] and {"outside", "k3"} <= set(rows)


def test_the_source_of_a_plugin_holds_the_modules_beside_it(tmp_path):
    (tmp_path / "package" / "deep").mkdir(parents=True)
    for name, text in {
        "plugin.py": "import os, json\nimport beside\n\ndef late():\n    from package.deep import x\n",
        "beside.py": "import beside_too\n",
        "beside_too.py": "import plugin\n",
        "other.py": "",
        "package/__init__.py": "from . import deep\n",
        "package/deep/x.py": "",
    }.items():
        (tmp_path / name).write_text(text)
    names = ["beside.py", "beside_too.py", "package/__init__.py", "package/deep/x.py", "plugin.py"]
    before = plugin_sources(tmp_path / "plugin.py")
    assert list(before) == names
    (tmp_path / "package/deep/x.py").write_text("1")
    after = plugin_hashes(plugin_sources(tmp_path / "plugin.py"))
    assert [name for name in names if plugin_hashes(before)[name] != after[name]] == ["package/deep/x.py"]
