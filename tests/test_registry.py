"""The registry: unchanged functions, unique names, helpful misses, outsiders by entry point and plugin."""

import importlib
import json
import os
import subprocess
import sys
import zipfile

import pytest

from commands import run_here
from kl_comedy import registry
from kl_comedy.errors import UserError
from kl_comedy.registry import ESTIMATORS, KINDS, Registry, load_plugin_file, plugin_hashes, plugin_sources

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
    monkeypatch.setattr(registry, "PACKAGES", {})
    monkeypatch.setattr(registry, "PLUGIN_FILES", {})
    before = set(sys.modules)
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    for name in set(sys.modules) - before:
        if str(folder) in str(getattr(sys.modules[name], "__spec__", "")) or name.startswith("kl_comedy_plugin_"):
            del sys.modules[name]


def write(folder, **files):
    """Python files by their path with __ for a slash."""
    for name, text in files.items():
        file = folder / f"{name.replace('__', '/')}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def used(name):
    """The plugins of a config that uses one estimator."""
    return registry.plugins_with(ESTIMATORS.get(name).modules)


def names_of(name):
    return list(used(name).hashes)


def test_every_file_of_the_package_that_registered_a_part_counts(site):
    write(site, pack__init="", pack__parts="from pack.deep import helper\n", pack__other="X = 1\n")
    (site / "pack/init.py").rename(site / "pack/__init__.py")
    write(site, pack__deep__helper=PART.format(name="deep_part"), unused=PART.format(name="unused_part"))
    importlib.import_module("pack.parts")
    importlib.import_module("unused")
    assert ESTIMATORS.get("deep_part").modules == ("pack.deep.helper",)
    assert names_of("deep_part") == ["pack/__init__.py", "pack/deep/helper.py", "pack/other.py", "pack/parts.py"]
    assert names_of("k3") == [] and not ESTIMATORS.get("k3").modules, "a built-in part has no plugin"
    (site / "pack/other.py").write_text("X = 2\n")
    assert used("deep_part").hashes["pack/other.py"] != registry.PluginPackage.read("pack").hashes["pack/other.py"]
    assert used("deep_part").archive["pack/other.py"] == b"X = 1\n", "the code that runs is the code as it was imported"


def test_a_module_without_a_package_counts_with_what_it_imports_beside_it(site):
    write(site, single="import json\nimport beside\n" + PART.format(name="single_part"), beside="import beside_too\n")
    write(site, beside_too="", nothing="")
    importlib.import_module("single")
    assert names_of("single_part") == ["beside.py", "beside_too.py", "single.py"]


def test_a_module_of_another_distribution_beside_it_does_not_count(site):
    write(site, single="import other\n" + PART.format(name="single_part"), other="")
    info = site / "other-2.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 2.0\n")
    (info / "RECORD").write_text("other.py,,\nother-2.0.dist-info/METADATA,,\n")
    registry._distributions.cache_clear()
    importlib.import_module("single")
    assert names_of("single_part") == ["single.py"]
    registry._distributions.cache_clear()


def test_all_folders_of_a_namespace_package_count(site, tmp_path, monkeypatch):
    write(site, spaced__parts=PART.format(name="spaced_part"))
    write(tmp_path / "second", spaced__more="")
    monkeypatch.syspath_prepend(str(tmp_path / "second"))
    importlib.import_module("spaced.parts")
    assert names_of("spaced_part") == ["spaced/more.py", "spaced/parts.py"]


def test_without_source_the_version_is_known_and_said(site, tmp_path, caplog):
    with zipfile.ZipFile(tmp_path / "zipped.zip", "w") as archive:
        archive.writestr("zipped/__init__.py", "__version__ = '1.5'\n" + PART.format(name="zipped_part"))
    sys.path.insert(0, str(tmp_path / "zipped.zip"))
    try:
        importlib.import_module("zipped")
    finally:
        sys.path.remove(str(tmp_path / "zipped.zip"))
        sys.modules.pop("zipped", None)
    assert used("zipped_part").hashes == {"zipped (no source)": "version 1.5"}
    assert used("zipped_part").tags() == {"version.zipped": "1.5", "plugins": "zipped (no source) version 1.5"}
    assert used("zipped_part").archive == {} and "only its version, 1.5, is recorded" in caplog.text


def test_a_huge_package_is_hashed_whole_and_not_copied(site, monkeypatch, caplog):
    monkeypatch.setattr(registry, "MOST_ARCHIVED_FILES", 1)
    write(site, huge__parts=PART.format(name="huge_part"), huge__more="")
    importlib.import_module("huge.parts")
    assert len(names_of("huge_part")) == 2 and used("huge_part").archive == {}
    assert "huge has more than 1 files" in caplog.text


def test_the_module_that_defines_a_part_counts_too(site):
    write(site, defining="def f(log_ratio):\n    'From elsewhere.'\n    return log_ratio\n")
    text = "from kl_comedy.registry import ESTIMATORS\nimport torch\nfrom defining import f\n"
    text += "ESTIMATORS.register('defined', source='test', needs='log_ratio')(f)\n"
    text += "ESTIMATORS.register('of_torch', source='test', summary='x', needs='log_ratio')(torch.nn.functional.gelu)\n"
    write(site, registering=text)
    importlib.import_module("registering")
    assert ESTIMATORS.get("defined").modules == ("registering", "defining")
    assert names_of("defined") == ["defining.py", "registering.py"]
    assert ESTIMATORS.get("of_torch").modules == ("registering",), "the version of torch is a tag already"


def test_what_a_plugin_file_imports_from_its_folder_is_of_the_file(site, tmp_path):
    write(tmp_path, mine="import mine_helper\n", mine_helper=PART.format(name="helped"))
    load_plugin_file(tmp_path / "mine.py")
    assert used("helped").packages == ()
    assert list(registry.PLUGIN_FILES) == ["mine.py", "mine_helper.py"]
    sys.modules.pop("mine_helper")


def test_a_package_that_is_imported_again_is_read_again(site):
    write(site, again=PART.format(name="again"))
    importlib.import_module("again")
    before = used("again").hashes
    del sys.modules["again"], ESTIMATORS._entries["again"]
    write(site, again=PART.format(name="again") + "# a longer file\n")
    importlib.invalidate_caches()
    importlib.import_module("again")
    assert used("again").hashes != before


def test_a_file_and_a_package_of_one_name_are_refused(site, tmp_path):
    write(site, same=PART.format(name="of_package"))
    importlib.import_module("same")
    write(tmp_path, same=PART.format(name="of_file"))
    load_plugin_file(tmp_path / "same.py")
    with pytest.raises(UserError, match=r"same\.py: the package same brings another; rename your file"):
        _ = used("of_package").hashes


ENDS = {
    "exit": "import sys\nsys.exit(0)\n",
    "exit_by_name": "raise SystemExit\n",
    "not_an_exception": "class Stop(BaseException):\n    pass\nraise Stop('here')\n",
    "no_docstring": "from kl_comedy.registry import ESTIMATORS\n"
    "@ESTIMATORS.register('boom', source='x', needs='log_ratio')\ndef boom(x):\n    return x\n",
    "taken": "from kl_comedy.registry import ESTIMATORS\n"
    "@ESTIMATORS.register('k3', source='x', needs='log_ratio')\ndef boom(x):\n    'Taken.'\n    return x\n",
    "error": "1/0\n",
}


@pytest.mark.parametrize("kind", ENDS)
def test_a_plugin_that_ends_on_import_is_an_error_with_its_name(kind, site, tmp_path):
    file = tmp_path / "ends.py"
    file.write_text(ENDS[kind])
    code, out, error = run_here("list", "estimators", "--plugin", "ends.py", cwd=tmp_path)
    assert code == 2 and out == "" and error.startswith("error: --plugin: ends.py"), error
    assert str(file) in error, "with the line"
    file.write_text(PART.format(name="mended"))
    load_plugin_file(file)
    assert ESTIMATORS.get("mended").modules == ("kl_comedy_plugin_ends",), "it can be loaded once it is mended"


@pytest.mark.parametrize("kind", ENDS)
def test_a_package_that_ends_on_import_is_an_error_with_its_name(kind, site, monkeypatch):
    write(site, ending=PART.format(name="half") + ENDS[kind])
    info = site / "ending-1.0.dist-info"
    info.mkdir()
    (info / "entry_points.txt").write_text("[kl_comedy.estimators]\nends = ending\n")
    monkeypatch.setattr(ESTIMATORS, "_loaded", False)
    for _ in range(2):  # the second lookup does not go on without the parts
        with pytest.raises(UserError, match=r"entry point 'ends' of group kl_comedy.estimators \(ending\)"):
            ESTIMATORS.names()
    write(site, ending=PART.format(name="half"))
    importlib.invalidate_caches()
    assert "half" in ESTIMATORS


@pytest.mark.parametrize("kind", KINDS)
def test_an_unknown_name_of_any_kind_mentions_the_option(kind):
    with pytest.raises(UserError, match=r"key: got 'nope'; allowed: .*\(a part of your own: --plugin FILE\)$"):
        KINDS[kind].get("nope", key="key")


def test_unknown_names_on_the_command_line_mention_the_option(tmp_path):
    (tmp_path / "run.yaml").write_text("model: {source: pocket}\nkl: [{estimator: k3}]\n")
    for words in (
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
    ):
        code, _, error = run_here(*words, cwd=tmp_path)
        assert code == 2 and "--plugin FILE" in error, (words, error)


SCRIPT = """
import json
import beside
from kl_comedy.registry import REWARDS, plugins_with

@REWARDS.register("here", source="a test", summary="of a script")
def here(completion, answer, meta):
    return 1.0

plugins = plugins_with(REWARDS._entries["here"].modules)
print(json.dumps([plugins.hashes, plugins.tags(), plugins.record()["packages"]]))
"""


@pytest.mark.parametrize("words", [["script.py"], ["-m", "inside.script"]])
def test_a_script_that_registers_parts_counts_with_what_it_imports_beside_it(words, tmp_path):
    write(tmp_path, script=SCRIPT, beside="", other="", inside__script=SCRIPT, inside__more="")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    hashes, tags, packages = json.loads(done.stdout)
    if words == ["script.py"]:
        assert list(hashes) == ["beside.py", "script.py"] and tags["plugins"].startswith("script.py ")
        assert packages == {}, "to import it again would be to run it"
    else:
        assert list(hashes) == ["beside.py", "inside/more.py", "inside/script.py"]
        assert list(packages) == ["inside"] and tags["plugins"].startswith("inside ")
