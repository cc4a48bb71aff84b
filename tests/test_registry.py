"""The registry: unchanged functions, unique names, helpful misses, outsiders by entry point and plugin."""

import importlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from unittest import mock

import pytest

from commands import run_here
from kl_comedy import plugins
from kl_comedy.errors import UserError
from kl_comedy.plugins import plugin_hashes, plugin_sources
from kl_comedy.registry import ESTIMATORS, KINDS, Registry, load_plugin_file
from kl_comedy.training.run_plugins import differing_plugins, stored_sources, write_plugins

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
    assert entry.fn is fn
    assert entry.summary == "Adds one."
    assert entry.claims == ("sane",)
    assert entry.row()["colour"] == "red"


def test_a_taken_name_raises_and_names_the_owner():
    table = Registry("things")
    table.register("a", source="x", summary="first")(len)
    with pytest.raises(UserError, match="'a' is already registered by builtins"):
        table.register("a", source="x", summary="second")(len)
    assert table.get("a").summary == "first"


def test_an_entry_must_say_what_it_is():
    with pytest.raises(UserError, match=r"'a' needs a docstring or a summary \(.*test_registry.py:[0-9]+\)"):
        Registry("things").register("a", source="x")(lambda x: x)


def test_a_miss_names_the_alternatives_and_the_nearest():
    table = Registry("things")
    for name in ("alpha", "beta"):
        table.register(name, source="x", summary=name)(len)
    with pytest.raises(UserError, match=r"config\.key: got 'alhpa'; did you mean 'alpha'\? allowed: alpha, beta"):
        table.get("alhpa", key="config.key")


def test_the_kinds_are_those_of_the_command_line():
    assert {"estimators", "corrections", "advantages", "policy_losses", "rewards", "rollouts", "datasets"} <= set(KINDS)


@pytest.mark.parametrize(
    ("text", "message"),
    [("1 +", "failed on import: SyntaxError"), ("x = 1/0", "ZeroDivisionError")],
    ids=["no Python", "an exception"],
)
def test_a_broken_plugin_is_one_clear_error(tmp_path, text, message):
    file = tmp_path / "broken.py"
    file.write_text(text)
    with pytest.raises(UserError, match=message):
        load_plugin_file(file)


def test_a_plugin_that_does_not_exist_is_one_clear_error(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        load_plugin_file(tmp_path / "missing.py")


def run_python(*words, cwd, path):
    """What a Python process prints, with one more folder on its path."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(path), os.environ.get("PYTHONPATH", "")])}
    process = subprocess.run([sys.executable, *words], capture_output=True, text=True, cwd=cwd, env=environment)
    assert process.returncode == 0, process.stderr
    return process.stdout


def make_distribution(folder, name, version, **files):
    """The folder with which an installer records a distribution; ``entry_points`` is its entry_points.txt."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    if "entry_points" in files:
        (info / "entry_points.txt").write_text(files["entry_points"])
    if "record" in files:
        (info / "RECORD").write_text(files["record"])


def test_outsiders_join_by_plugin_and_by_entry_point(tmp_path):
    (tmp_path / "mine.py").write_text(PLUGIN.replace("outside", "mine"))
    (tmp_path / "their_package.py").write_text(PLUGIN)
    make_distribution(
        tmp_path, "their_package", "1.0", entry_points="[kl_comedy.estimators]\noutside = their_package\n"
    )
    words = ["-m", "kl_comedy.cli", "list", "estimators", "--format", "json", "--plugin", str(tmp_path / "mine.py")]
    rows = {row["name"]: row for row in json.loads(run_python(*words, cwd=None, path=tmp_path))}
    assert rows["mine"]["claims"] == ["nonnegative"]
    assert {"outside", "k3"} <= set(rows)


SOURCES = {
    "plugin.py": "import os, json\nimport beside\n\ndef late():\n    from package.deep import x\n",
    "beside.py": "import beside_too\n",
    "beside_too.py": "import plugin\n",
    "other.py": "",
    "package/__init__.py": "from . import deep\n",
    "package/deep/x.py": "",
}


@pytest.fixture
def plugin_file(tmp_path):
    """A plugin that imports some of the modules beside it."""
    for name, text in SOURCES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path / "plugin.py"


def test_the_source_of_a_plugin_holds_the_modules_beside_it(plugin_file):
    imported = [name for name in SOURCES if name != "other.py"]
    assert list(plugin_sources(plugin_file)) == sorted(imported)


def test_a_changed_module_beside_a_plugin_has_another_hash(plugin_file):
    before = plugin_hashes(plugin_sources(plugin_file))
    (plugin_file.parent / "package/deep/x.py").write_text("1")
    after = plugin_hashes(plugin_sources(plugin_file))
    assert [name for name in before if before[name] != after[name]] == ["package/deep/x.py"]


# --- packages from outside -------------------------------------------------------------------------------------------

PART = '''
from kl_comedy.registry import ESTIMATORS

@ESTIMATORS.register("{name}", source="a test", needs="log_ratio")
def part(log_ratio):
    """From a package."""
    return log_ratio
'''


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder on the path. What is imported from it, and what that registers, ends with the test."""
    ESTIMATORS.load()
    monkeypatch.setattr(ESTIMATORS, "_entries", dict(ESTIMATORS._entries))
    before = set(sys.modules)
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    # Emptied in place: a module that a test is the first to import would keep a replaced dict for the whole process.
    with mock.patch.dict(plugins.PACKAGES, clear=True), mock.patch.dict(plugins.PLUGIN_FILES, clear=True):
        yield folder
    for name in set(sys.modules) - before:
        if str(folder) in str(getattr(sys.modules[name], "__spec__", "")) or name.startswith("kl_comedy_plugin_"):
            del sys.modules[name]


def write(folder, files):
    """Python files by their path."""
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def registering(name):
    """A module that registers an estimator of this name."""
    return PART.format(name=name)


def used(name):
    """The plugins of a config that uses one estimator."""
    return plugins.plugins_with(ESTIMATORS.get(name).modules)


def names_of(name):
    return list(used(name).hashes)


@pytest.fixture
def deep_package(site):
    """A package that is imported, whose deepest module registers a part."""
    write(
        site,
        {
            "pack/__init__.py": "",
            "pack/parts.py": "from pack.deep import helper\n",
            "pack/other.py": "X = 1\n",
            "pack/deep/helper.py": registering("deep_part"),
            "unused.py": registering("unused_part"),
        },
    )
    importlib.import_module("pack.parts")
    importlib.import_module("unused")
    return site / "pack"


def test_every_file_of_the_package_that_registered_a_part_counts(deep_package):
    assert ESTIMATORS.get("deep_part").modules == ("pack.deep.helper",)
    assert names_of("deep_part") == ["pack/__init__.py", "pack/deep/helper.py", "pack/other.py", "pack/parts.py"]


def test_a_built_in_part_has_no_plugin():
    assert not ESTIMATORS.get("k3").modules
    assert names_of("k3") == []


def test_the_code_that_runs_is_the_code_as_it_was_imported(deep_package):
    (deep_package / "other.py").write_text("X = 2\n")
    changed = plugins.PluginPackage.read("pack")
    assert used("deep_part").hashes["pack/other.py"] != changed.hashes["pack/other.py"]
    assert used("deep_part").archive["pack/other.py"] == "X = 1\n"


def test_a_module_without_a_package_counts_alone(site):
    """Beside it are the modules of every other installed distribution."""
    write(site, {"single.py": "import beside\n" + registering("single_part"), "beside.py": ""})
    importlib.import_module("single")
    assert names_of("single_part") == ["single.py"]


def test_all_folders_of_a_namespace_package_count(site, tmp_path, monkeypatch):
    write(site, {"spaced/parts.py": registering("spaced_part")})
    write(tmp_path / "second", {"spaced/more.py": ""})
    monkeypatch.syspath_prepend(str(tmp_path / "second"))
    importlib.import_module("spaced.parts")
    assert names_of("spaced_part") == ["spaced/more.py", "spaced/parts.py"]


def test_without_source_the_version_is_known_and_said(site, tmp_path, caplog):
    with zipfile.ZipFile(tmp_path / "zipped.zip", "w") as archive:
        archive.writestr("zipped/__init__.py", "__version__ = '1.5'\n" + registering("zipped_part"))
    sys.path.insert(0, str(tmp_path / "zipped.zip"))
    try:
        importlib.import_module("zipped")
    finally:
        sys.path.remove(str(tmp_path / "zipped.zip"))
        sys.modules.pop("zipped", None)
    zipped = used("zipped_part")
    assert zipped.hashes == {"zipped (no source)": "version 1.5"}
    assert zipped.tags() == {"version.zipped": "1.5", "plugins": "zipped (no source) version 1.5"}
    assert zipped.archive == {}
    assert "only its version, 1.5, is recorded" in caplog.text


def test_a_huge_package_is_known_by_its_version_and_not_copied(site, monkeypatch, caplog):
    monkeypatch.setattr(plugins, "MOST_ARCHIVED_FILES", 1)
    write(site, {"huge/parts.py": registering("huge_part"), "huge/more.py": ""})
    importlib.import_module("huge.parts")
    assert len(names_of("huge_part")) == 2
    assert used("huge_part").archive == {}
    assert "huge has more than 1 files" in caplog.text


VERSIONS = {
    "another version": ("1.6", "a" * 40),
    "another commit": ("1.5", "b" * 40),
    "no distribution": (None, None),
}


@pytest.mark.parametrize(("version", "commit"), VERSIONS.values(), ids=VERSIONS)
def test_a_package_without_a_copy_is_known_by_version_and_commit(site, tmp_path, monkeypatch, version, commit):
    monkeypatch.setattr(plugins, "MOST_ARCHIVED_FILES", 1)
    write(site, {"huge/parts.py": registering("huge_part"), "huge/more.py": ""})
    entry_points = "[kl_comedy.estimators]\nhuge_part = huge.parts\n"

    def installed(version, commit):
        """The package as it is installed from a commit of its repository."""
        for info in site.glob("*.dist-info"):
            shutil.rmtree(info)
        if version is not None:
            make_distribution(site, "huge", version, entry_points=entry_points)
            origin = {"url": "https://x", "vcs_info": {"vcs": "git", "commit_id": commit}}
            (site / f"huge-{version}.dist-info/direct_url.json").write_text(json.dumps(origin))
        return plugins.PluginSet(packages=(plugins.PluginPackage.read("huge"),))

    folder = tmp_path / "run"
    write_plugins(folder, installed("1.5", "a" * 40))
    assert not (folder / "plugins").exists()
    assert differing_plugins(folder, installed("1.5", "a" * 40)) == []
    assert differing_plugins(folder, installed(version, commit)) == ["huge"]
    assert differing_plugins(folder, plugins.PluginSet()) == ["huge"]


def test_plugins_are_compared_byte_for_byte_with_their_copy(site, tmp_path):
    write(site, {"pack/parts.py": registering("packed"), "pack/other.py": "X = 1\n"})
    text = "import mine_helper\nSECRET = 'sk-0123456789abcdefghij'\n"
    write(tmp_path, {"mine.py": text, "mine_helper.py": "Y = 1\n"})

    def now():
        return plugins.PluginSet(
            files=plugins.plugin_sources(tmp_path / "mine.py"), packages=(plugins.PluginPackage.read("pack"),)
        )

    folder = tmp_path / "run"
    write_plugins(folder, now())
    assert set(stored_sources(folder)) == {"mine.py", "mine_helper.py", "pack/other.py", "pack/parts.py"}
    assert "sk-0123456789abcdefghij" not in stored_sources(folder)["mine.py"]
    assert json.loads((folder / "plugins.json").read_text())["hidden"] == ["mine.py"]
    assert differing_plugins(folder, now()) == [], "a credential that is hidden is no change"
    write(folder / "plugins", {"__pycache__/mine.cpython-311.pyc": "of an import from there"})
    assert differing_plugins(folder, now()) == []
    for file in (tmp_path / "mine_helper.py", site / "pack/other.py"):
        text = file.read_text()
        file.write_text(text + "\n")
        assert differing_plugins(folder, now()) == [file.name if file.parent == tmp_path else f"pack/{file.name}"]
        file.write_text(text)
    (site / "pack/new.py").write_text("")
    (tmp_path / "mine.py").write_text("")
    assert differing_plugins(folder, now()) == ["mine.py", "mine_helper.py", "pack/new.py"]


DEFINING = """
def f(log_ratio):
    'From elsewhere.'
    return log_ratio
"""
REGISTERING_OTHERS = """
from kl_comedy.registry import ESTIMATORS
import torch
from defining import f
ESTIMATORS.register("defined", source="test", needs="log_ratio")(f)
ESTIMATORS.register("of_torch", source="test", summary="x", needs="log_ratio")(torch.nn.functional.gelu)
"""


def test_the_module_that_defines_a_part_counts_too(site):
    write(site, {"defining.py": DEFINING, "registering.py": REGISTERING_OTHERS})
    importlib.import_module("registering")
    assert ESTIMATORS.get("defined").modules == ("registering", "defining")
    assert names_of("defined") == ["defining.py", "registering.py"]
    assert ESTIMATORS.get("of_torch").modules == ("registering",), "the version of torch is a tag already"


def test_what_a_plugin_file_imports_from_its_folder_is_of_the_file(site, tmp_path):
    write(tmp_path, {"mine.py": "import mine_helper\n", "mine_helper.py": registering("helped")})
    load_plugin_file(tmp_path / "mine.py")
    assert used("helped").packages == ()
    assert list(plugins.PLUGIN_FILES) == ["mine.py", "mine_helper.py"]
    sys.modules.pop("mine_helper")


def test_a_package_that_is_imported_again_is_read_again(site):
    write(site, {"again.py": registering("again")})
    importlib.import_module("again")
    before = used("again").hashes
    del sys.modules["again"], ESTIMATORS._entries["again"]
    write(site, {"again.py": registering("again") + "# a longer file\n"})
    importlib.invalidate_caches()
    importlib.import_module("again")
    assert used("again").hashes != before


def test_a_file_and_a_package_of_one_name_are_refused(site, tmp_path):
    write(site, {"same.py": registering("of_package")})
    importlib.import_module("same")
    write(tmp_path, {"same.py": registering("of_file")})
    load_plugin_file(tmp_path / "same.py")
    with pytest.raises(UserError, match=r"same\.py: the package same brings another; rename your file"):
        _ = used("of_package").archive


NO_DOCSTRING = """
from kl_comedy.registry import ESTIMATORS
@ESTIMATORS.register('boom', source='x', needs='log_ratio')
def boom(x):
    return x
"""
TAKEN_NAME = """
from kl_comedy.registry import ESTIMATORS
@ESTIMATORS.register('k3', source='x', needs='log_ratio')
def boom(x):
    'Taken.'
    return x
"""
ENDS = {
    "exit": "import sys\nsys.exit(0)\n",
    "exit_by_name": "raise SystemExit\n",
    "not_an_exception": "class Stop(BaseException):\n    pass\nraise Stop('here')\n",
    "no_docstring": NO_DOCSTRING,
    "taken": TAKEN_NAME,
    "error": "1/0\n",
}
every_end = pytest.mark.parametrize("text", ENDS.values(), ids=ENDS)


@every_end
def test_a_plugin_that_ends_on_import_is_an_error_with_its_name(text, site, tmp_path):
    file = tmp_path / "ends.py"
    file.write_text(text)
    code, output, error = run_here("list", "estimators", "--plugin", "ends.py", cwd=tmp_path)
    assert code == 2
    assert output == ""
    assert error.startswith("error: --plugin: ends.py")
    assert str(file) in error, "with the line"

    file.write_text(registering("mended"))
    load_plugin_file(file)
    assert ESTIMATORS.get("mended").modules == ("kl_comedy_plugin_ends",), "it can be loaded once it is mended"


@every_end
def test_a_package_that_ends_on_import_is_an_error_with_its_name(text, site, monkeypatch):
    write(site, {"ending.py": registering("half") + text})
    make_distribution(site, "ending", "1.0", entry_points="[kl_comedy.estimators]\nends = ending\n")
    monkeypatch.setattr(ESTIMATORS, "_loaded", False)
    for _ in range(2):  # the second lookup does not go on without the parts
        with pytest.raises(UserError, match=r"entry point 'ends' of group kl_comedy.estimators \(ending\)"):
            ESTIMATORS.names()

    write(site, {"ending.py": registering("half")})
    importlib.invalidate_caches()
    assert "half" in ESTIMATORS


# --- unknown names --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", KINDS)
def test_an_unknown_name_of_any_kind_mentions_the_option(kind):
    with pytest.raises(UserError, match=r"key: got 'nope'; .*allowed: .*\(a part of your own: --plugin FILE\)$"):
        KINDS[kind].get("nope", key="key")


@pytest.mark.parametrize(
    "words",
    [
        ("check", "run.yaml", "kl.0.estimator=nope"),
        ("check", "run.yaml", "rewards=[{weight: 1.0}]", "callbacks=[{name: nope}]"),
        ("check", "run.yaml", "kl=[{beta: 1}]"),
        ("check", "run.yaml", "algorithm.correction={nope: {}}"),
        ("certify", "nope"),
        ("certify", "--estimator", "nope"),
        ("certify", "--policy", "nope"),
        ("certify", "--term", "{estimator: nope}"),
        ("explain", "nope"),
        ("audit", "run.yaml", "--terms", "nope"),
        ("evaluate", "pocket", "--suite", "nope"),
        ("evaluate", "pocket", "--suite", "nope.yaml"),
    ],
    ids=" ".join,
)
def test_unknown_names_on_the_command_line_mention_the_option(words, tmp_path):
    (tmp_path / "run.yaml").write_text("model: {source: pocket}\nkl: [{estimator: k3}]\n")
    code, _, error = run_here(*words, cwd=tmp_path)
    assert code == 2, error
    assert "--plugin FILE" in error


# --- scripts --------------------------------------------------------------------------------------------------------
SCRIPT = """
import json
import beside
from kl_comedy.plugins import plugins_with
from kl_comedy.registry import REWARDS

@REWARDS.register("here", source="a test", summary="of a script")
def here(completion, answer, meta):
    return 1.0

plugins = plugins_with(REWARDS._entries["here"].modules)
print(json.dumps([plugins.hashes, plugins.tags(), plugins.record()["packages"]]))
"""


@pytest.fixture
def script_folder(tmp_path):
    """The script alone and in a package, beside modules of which it imports one."""
    write(
        tmp_path,
        {
            "script.py": SCRIPT,
            "beside.py": "",
            "other.py": "",
            "inside/script.py": SCRIPT,
            "inside/more.py": "",
        },
    )
    return tmp_path


def test_a_script_that_registers_parts_counts_with_what_it_imports_beside_it(script_folder):
    hashes, tags, packages = json.loads(run_python("script.py", cwd=script_folder, path=script_folder))
    assert list(hashes) == ["beside.py", "script.py"]
    assert tags["plugins"].startswith("script.py ")
    assert packages == {}, "to import it again would be to run it"


def test_a_script_in_a_package_counts_with_the_package(script_folder):
    hashes, tags, packages = json.loads(run_python("-m", "inside.script", cwd=script_folder, path=script_folder))
    assert list(hashes) == ["inside/more.py", "inside/script.py"]
    assert tags["plugins"].startswith("inside ")
    assert list(packages) == ["inside"]


def test_built_in_parts_have_one_order_whichever_package_is_imported_first(tmp_path):
    """`audit` is of the second package of callbacks, which a study imports before any lookup."""
    program = "import kl_comedy.audit; from kl_comedy.registry import CALLBACKS; print(CALLBACKS.names())"
    names = run_python("-c", program, cwd=tmp_path, path=tmp_path)
    assert names.strip() == "['record_rollouts', 'audit']"
