"""Shared fixtures: quiet libraries, one cache for the tiny pocket policy, a tiny training config."""

import os
import sys

import hypothesis
import pytest
from tests import skips

pytest_plugins = ["study_fixtures"]
pytest.register_assert_rewrite("rank_runs", "training_runs")

# A busy machine is no failure, and a commit that passes once passes again; --hypothesis-profile=random draws afresh.
hypothesis.settings.register_profile("random", deadline=None)
hypothesis.settings.register_profile("fixed", deadline=None, derandomize=True)
hypothesis.settings.load_profile("fixed")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("DO_NOT_TRACK", "true")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")
# xdist gives its workers a width of 80, as if they had a terminal: tables would be fitted to it.
os.environ.pop("COLUMNS", None)
if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers share the cores: threads that spin for each other would hold up both.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_runtest_logreport(report):
    skips.note(report)


def pytest_collectreport(report):
    skips.note(report)


ON_THE_CLUSTER = tuple(
    f"tests/slurm/test_{name}.py" for name in ("engine_cells", "real_slurm", "slurm_faults", "two_nodes")
)
TAKE_MINUTES = (
    *ON_THE_CLUSTER,
    "tests/cli/test_results_export.py",
    "tests/docs/test_commands_as_typed.py",
    "tests/training/test_distributed.py",
    "tests/config/test_matrix.py",
    "tests/rollouts/test_engine_ranks.py",
    "tests/slurm/test_local.py",
    "tests/training/test_faults.py",
    "tests/training/test_asynchronous.py",
    "tests/training/test_run.py",
    "tests/cli/test_certify.py",
)


def pytest_collection_modifyitems(items):
    """Files that take minutes begin first: a file stays with one worker, and the others would wait for the last one."""

    def place(item):
        for number, beginning in enumerate(TAKE_MINUTES):
            if item.nodeid.startswith(beginning):
                return number
        return len(TAKE_MINUTES)

    items.sort(key=place)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """A file stays with one worker, for the sake of what its tests share; there is one throw-away cluster for all.

    Not by xdist's groups: with pytest 9.2 the names they are written into no longer reach its scheduler.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.split("::")[0]
            if file in ON_THE_CLUSTER:
                return "the cluster"
            if file == "tests/twin/test_twin.py":
                # Its tests share nothing and are the last: they fill every worker to the end.
                return nodeid
            return file

    return ByFile(config, log)


@pytest.fixture(scope="session", autouse=True)
def pocket_cache(request, tmp_path_factory):
    """Warm-start the tiny policy once per checkout, in pytest's cache and not the user's."""
    cache = getattr(request.config, "cache", None)  # none under -p no:cacheprovider
    if cache is None:
        folder = tmp_path_factory.mktemp("cache")
    else:
        folder = cache.mkdir("kl_comedy")
    before = os.environ.get("KL_COMEDY_CACHE")
    os.environ["KL_COMEDY_CACHE"] = str(folder)
    yield folder
    if before is None:
        del os.environ["KL_COMEDY_CACHE"]
    else:
        os.environ["KL_COMEDY_CACHE"] = before


@pytest.fixture(scope="module", autouse=True)
def plugins_of_other_files(request):
    """Plugins that a test loads are part of every run, and their parts of every list, in its file only."""
    before = {(kind, name) for kind, name, _ in _parts_from_outside()}
    yield
    for kind, name, entry in _parts_from_outside():
        if (kind, name) in before:
            continue  # registered when pytest collected the files: by a test file, or by a module that it imports
        del sys.modules["kl_comedy.registry"].KINDS[kind]._entries[name]
        # A module that stays imported would not register its parts again for the next file that loads it.
        for module in entry.modules:
            if module != request.module.__name__:
                sys.modules.pop(module, None)
    plugins = sys.modules.get("kl_comedy.plugins")
    if plugins is not None:
        plugins.PLUGIN_FILES.clear()


def _parts_from_outside():
    """Kind, name and entry of every registered part that is not the package's own; nothing is loaded for it."""
    # Many files of tests never import the registry, and this is not to do so for them.
    registry = sys.modules.get("kl_comedy.registry")
    if registry is None:
        return []
    parts = []
    for kind, table in registry.KINDS.items():
        parts += [(kind, name, entry) for name, entry in table._entries.items() if entry.modules]
    return parts
