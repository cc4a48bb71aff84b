"""Numbers that cannot mislead: which runs a row pools, values of another update, plugins that change."""

import csv
import io
import json
import sys
from types import SimpleNamespace

import pytest
from rich.console import Console

from kl_comedy import plugins, registry
from kl_comedy.config import load_config
from kl_comedy.results.runs import runs_frame
from kl_comedy.tracking.logger import RunLogger
from kl_comedy.training.run import train
from study_runs import EVAL, KL
from training_runs import TINY, metrics_of

LABEL = "0.1 k1_reverse_token in loss"


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Two learning rates of three seeds; one seed twice; the KL of each run was measured before its last update."""
    folder = tmp_path_factory.mktemp("numbers")
    uri = f"sqlite:///{folder}/mlflow.db"
    runs = []
    for rate in (0.001, 0.003):
        for seed in range(3):
            runs.append((rate, seed, 0.1 * seed + rate * 100))
    runs.append((0.003, 2, 0.9))  # a seed for the second time
    for number, (rate, seed, reward) in enumerate(runs):
        logger = RunLogger(
            SimpleNamespace(uri=uri, experiment="numbers", tags={"sweep": "rates"}),
            run_dir=folder / str(number),
            params={"name": f"run{number}", "seed": seed, "optimizer.lr": rate, "train.devices": number},
            tags={"kl.label": LABEL, "git.commit": "a" * 40, "code.package": "b" * 12, "plugins": "my_parts.py abc"},
        )
        logger.log_metrics({EVAL: reward, "train/reward": reward, KL: 0.0}, 1)
        logger.log_metrics({EVAL: reward, "train/reward": reward}, 2)
        logger.log_metrics({EVAL: reward, "train/reward": reward}, 3)
        logger.finish()
    return uri


@pytest.fixture
def table(kl_comedy, store):
    """A table of the store in a format: its text and its stderr."""

    def table(*arguments, command="table", format):
        options = ["--uri", store, "--group", "kl.label", "--format", format]
        code, out, err = kl_comedy("results", command, *options, *arguments)
        assert code == 0, err
        return out, err

    return table


@pytest.fixture
def rows_of(table):
    """The rows of a table of the store, and its stderr."""

    def rows_of(*arguments, command="table"):
        out, err = table(*arguments, command=command, format="json")
        return json.loads(out), err

    return rows_of


def test_rows_pool_seeds_and_nothing_else(rows_of):
    rows, err = rows_of("--metric", EVAL)
    assert [(row["optimizer.lr"], row["n"], row["runs"]) for row in rows] == [("0.001", 3, 3), ("0.003", 3, 3)]
    assert rows[1]["mean"] == pytest.approx((0.3 + 0.4 + 0.9) / 3), "of two runs of one seed the newest counts"
    assert "1 runs are older runs of the same configuration and seed" in err
    assert "runs differ in optimizer.lr and are separate rows; --pool optimizer.lr pools them" in err


def test_what_is_pooled_on_request_counts_seeds(rows_of):
    (row,), err = rows_of("--metric", EVAL, "--pool", "optimizer.lr")
    assert row["n"] == 3, "seeds, each the mean of its runs"
    assert row["runs"] == 6
    assert row["mean"] == pytest.approx((0.2 + 0.3 + (0.3 + 0.9) / 2) / 3)
    assert "pool runs that differ in optimizer.lr (--pool); n counts their seeds" in err


def test_repeated_seeds_are_kept_on_request(rows_of):
    rows, _ = rows_of("--metric", EVAL, "--keep-repeats")
    assert rows[1]["n"] == 3
    assert rows[1]["runs"] == 4
    # The repeated seed is the mean of 0.5 and 0.9.
    assert rows[1]["mean"] == pytest.approx((0.3 + 0.4 + 0.7) / 3)


@pytest.mark.parametrize("command", ["compare", "aggregate"])
def test_other_tables_pool_no_rates_either(rows_of, command):
    rows, _ = rows_of("--metric", EVAL, command=command)
    assert len({row["optimizer.lr"] for row in rows}) == 2


STALE_NOTE = f"{KL}: these runs measured it last at update 1, before their last update"


def test_a_value_of_an_earlier_update_is_no_number(rows_of, table, store):
    rows, err = rows_of("--metric", f"{EVAL},{KL}")
    of_kl = [row for row in rows if row["metric"] == KL]
    assert len(of_kl) == 2
    for row in of_kl:
        assert row["n"] == 0
        assert row["mean"] is None
    assert STALE_NOTE in err
    for row in rows:
        assert STALE_NOTE in row["notes"]
    text, _ = table("--metric", f"{EVAL},{KL}", format="text")
    assert " - " in text
    assert json.loads(runs_frame(store)["stale"][0]) == {KL: 1}


def test_a_value_of_an_earlier_update_is_shown_on_request(rows_of):
    rows, _ = rows_of("--metric", KL, "--of", "recorded")
    assert [(row["n"], row["mean"]) for row in rows] == [(3, 0.0), (3, 0.0)]
    assert "stale" not in rows[0]


def test_no_run_is_compared_at_a_kl_of_an_earlier_update(rows_of):
    rows, err = rows_of("--metric", EVAL, "--at-kl", "0", command="compare")
    assert {row["n"] for row in rows} == {0}
    assert STALE_NOTE in err


def test_a_frontier_of_values_of_an_earlier_update_is_refused(kl_comedy, store, tmp_path):
    options = ["--uri", store, "--group", "kl.family", "--out", tmp_path / "a.png"]
    code, _, err = kl_comedy("results", "plot", *options, "--metric", EVAL, "--kind", "frontier")
    assert code == 2
    assert "no run has a finite" in err
    assert STALE_NOTE in err


def test_a_report_notes_values_of_an_earlier_update(kl_comedy, store, tmp_path):
    page = tmp_path / "a.html"
    options = ["--uri", store, "--group", "kl.family", "--out", page]
    assert kl_comedy("results", "report", *options, "--metric", f"{EVAL},{KL}")[0] == 0
    assert STALE_NOTE in page.read_text()
    assert "not resolved: 1 of 1 other intervals overlap this one" in page.read_text()


def test_notes_stay_with_the_table_in_every_format(table, tmp_path):
    text, err = table("--metric", EVAL, format="text")
    notes = [line for line in err.splitlines() if line.startswith("note: ")]
    assert len(notes) == 2
    assert "note" not in text, "they are on stderr"

    out, _ = table("--metric", EVAL, format="csv")
    _, *rows = csv.reader(io.StringIO(out))
    assert {row[-1] for row in rows} == {"; ".join(notes)}

    latex, _ = table("--metric", EVAL, format="latex")
    assert latex.index(r"\end{tabular}") < latex.index("note: runs differ in optimizer.lr")
    assert "{\\footnotesize" in latex

    markdown, _ = table("--metric", EVAL, format="markdown")
    file = tmp_path / "a.txt"
    table("--metric", EVAL, "--out", file, format="text")
    for note in notes:
        assert f"\n\n{note}" in markdown
        assert note in file.read_text()


@pytest.mark.parametrize(
    ("where", "n_runs"),
    [("sweep='rates'", 7), ("sweep = 'rates' and seed = 2 and optimizer.lr = 0.003", 2)],
)
def test_bare_tags_are_filtered(kl_comedy, store, where, n_runs):
    code, out, err = kl_comedy("results", "export", "--uri", store, "--format", "json", "--where", where)
    assert code == 0, err
    assert len(json.loads(out)) == n_runs


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("sweep = 'other'", "no runs in"),
        ("params.sweep = 'rates'", "did you mean 'tags.sweep'"),
        ("kl.family = 'x'", "no runs in"),
    ],
    ids=["no run", "a tag among the params", "a derived tag"],
)
def test_a_filter_that_finds_nothing_says_why(kl_comedy, store, where, message):
    code, _, err = kl_comedy("results", "export", "--uri", store, "--format", "json", "--where", where)
    assert code != 0
    assert message in err


def test_plugins_are_named_by_verify_and_report(kl_comedy, store, tmp_path):
    file = tmp_path / "a.csv"
    options = ["--uri", store, "--metric", EVAL, "--group", "kl.label", "--run-ids", "--format", "csv", "--out", file]
    assert kl_comedy("results", "table", *options)[0] == 0
    code, _, err = kl_comedy("results", "verify", file, "--uri", store)
    assert code == 0
    assert "2 of 2 rows are the same" in err
    assert "6 runs used plugins: my_parts.py abc" in err
    assert kl_comedy("results", "report", "--uri", store, "--out", tmp_path / "a.html")[0] == 0
    assert "<dt>plugins</dt><dd>my_parts.py abc</dd>" in (tmp_path / "a.html").read_text()


SMALL = ["train.eval_every=0", "data.eval={}", "rollout.max_new_tokens=4", "model.options.warmstart_steps=5"]


def test_exact_kl_is_measured_at_the_last_update_and_the_progress_line_names_its_kl(tmp_path):
    console = Console(file=io.StringIO(), width=200)
    config = load_config(TINY, [f"output={tmp_path}", *SMALL, "train.steps=3", "train.exact_kl_every=0"])
    metrics = metrics_of(train(config, console=console, command="kl-comedy train tiny.yaml").run)
    for name in ("kl/exact_reverse_sequence", "kl/exact_forward_token", "policy/entropy"):
        assert {step for step, measured in metrics if measured == name} == {1, 3}, name
    lines = [line for line in console.file.getvalue().splitlines() if line.startswith("update ")]
    assert lines
    for line in lines:
        assert " exact KL " in line or " sampled k1 KL " in line, line


PLUGIN = """
from kl_comedy.registry import ESTIMATORS

@ESTIMATORS.register("scaled", source="test", needs="log_ratio")
def scaled(log_ratio):
    'A multiple of the log-ratio.'
    from factors_of_scaled import FACTOR
    return FACTOR * log_ratio
"""


@pytest.fixture
def new_process():
    """Forgets the plugins that were loaded."""
    before = [*sys.path]

    def forget():
        sys.path[:] = before
        plugins.PLUGIN_FILES.clear()
        registry.ESTIMATORS._entries.pop("scaled", None)
        for name in ("kl_comedy_plugin_scaled", "factors_of_scaled"):
            sys.modules.pop(name, None)

    yield forget
    forget()


@pytest.mark.slow
def test_runs_of_two_versions_of_a_plugin_are_two_rows_and_reproducible(kl_comedy, new_process, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scaled.py").write_text(PLUGIN)
    term = "kl=[{estimator: scaled, placement: loss, beta: 0.1}]"
    uri = "sqlite:///mlflow.db"

    def train(factor):
        new_process()
        (tmp_path / "factors_of_scaled.py").write_text(f"FACTOR = {factor}\n")
        settings = [*SMALL, "train.steps=2", term, f"tracking.uri={uri}", "resume=auto", "--plugin", "scaled.py"]
        code, _, err = kl_comedy("train", TINY, *settings)
        assert code == 0, err
        return " ".join(err.split())

    train(1.0)
    assert "is already finished" in train(1.0)
    (run,) = (tmp_path / "runs").iterdir()
    assert f"a new run: runs/{run.name} differs in plugins.factors_of_scaled.py" in train(3.0)
    frame = runs_frame(uri)
    assert len(frame) == 2
    assert frame["tags.plugins"].nunique() == 2
    code, out, err = kl_comedy("results", "table", "--uri", uri, "--metric", "train/loss", "--format", "json")
    assert code == 0
    assert [row["n"] for row in json.loads(out)] == [1, 1]
    assert "runs differ in plugins" in err
    new_process()
    code, out, err = kl_comedy("reproduce", run.name, "--uri", uri, "--format", "json")
    assert code == 0, "with the stored source"
    assert {row["verdict"] for row in json.loads(out)} == {"equal"}, "with the stored source"
    assert "code, packages and machine are what they were" in err
