"""Numbers that cannot mislead: which runs a row pools, values of another update, plugins that change."""

import csv
import io
import json
import sys
from types import SimpleNamespace

import pytest
from rich.console import Console
from rich.text import Text

from kl_comedy import registry
from kl_comedy.config import load_config
from kl_comedy.tracking.logger import RunLogger
from kl_comedy.tracking.runs import runs_frame
from kl_comedy.training.callbacks import ConsoleProgress
from kl_comedy.training.run import train
from kl_comedy.training.run_folder import changed_plugins, create_run, find_run
from study_runs import EVAL, KL
from training_runs import TINY, metrics_of

LABEL = "0.1 k1_reverse_token in loss"


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Two learning rates of three seeds; one seed twice; the KL of each run was measured before its last update."""
    folder = tmp_path_factory.mktemp("numbers")
    uri = f"sqlite:///{folder}/mlflow.db"
    runs = [(rate, seed, 0.1 * seed + rate * 100) for rate in (0.001, 0.003) for seed in range(3)]
    for number, (rate, seed, reward) in enumerate([*runs, (0.003, 2, 0.9)]):
        logger = RunLogger(
            SimpleNamespace(uri=uri, experiment="numbers", flush_every=50, tags={"sweep": "rates"}),
            run_dir=folder / str(number),
            params={"name": f"run{number}", "seed": seed, "optimizer.lr": rate, "train.devices": number},
            tags={"kl.label": LABEL, "git.commit": "a" * 40, "code.package": "b" * 12, "plugins": "my_parts.py abc"},
        )
        for step in (1, 2, 3):
            logger.log_metrics({EVAL: reward, "train/reward": reward, **({KL: 0.0} if step == 1 else {})}, step)
        logger.finish()
    return uri


@pytest.fixture
def table(kl_comedy, store):
    def table(*words, command="table", format="json"):
        words = ["--uri", store, "--group", "kl.label", "--format", format, *words]
        code, out, err = kl_comedy("results", command, *words)
        assert code == 0, err
        return (json.loads(out) if format == "json" else out), err

    return table


def test_rows_pool_seeds_and_nothing_else_unless_asked(table):
    rows, err = table("--metric", EVAL)
    assert [(row["optimizer.lr"], row["n"], row["runs"]) for row in rows] == [("0.001", 3, 3), ("0.003", 3, 3)]
    assert rows[1]["mean"] == pytest.approx((0.3 + 0.4 + 0.9) / 3), "of two runs of one seed the newest counts"
    assert "1 runs are older runs of the same configuration and seed" in err
    assert "runs differ in optimizer.lr and are separate rows; --pool optimizer.lr pools them" in err
    ((row,), err) = table("--metric", EVAL, "--pool", "optimizer.lr")
    assert (row["n"], row["runs"]) == (3, 6), "n counts seeds, each the mean of its runs"
    assert row["mean"] == pytest.approx((0.2 + 0.3 + (0.3 + 0.9) / 2) / 3)
    assert "pool runs that differ in optimizer.lr (--pool); n counts their seeds" in err
    rows, _ = table("--metric", EVAL, "--keep-repeats")
    assert (rows[1]["n"], rows[1]["runs"]) == (3, 4) and rows[1]["mean"] == pytest.approx((0.3 + 0.4 + 0.7) / 3)
    for command, count in (("compare", 2), ("aggregate", 2)):
        rows, _ = table("--metric", EVAL, command=command)
        assert len({row["optimizer.lr"] for row in rows}) == count


def test_a_value_of_an_earlier_update_is_no_number(table, kl_comedy, store, tmp_path):
    rows, err = table("--metric", f"{EVAL},{KL}")
    assert [(row["n"], row["mean"]) for row in rows if row["metric"] == KL] == [(0, None)] * 2
    note = f"{KL}: these runs measured it last at update 1, before their last update"
    assert note in err and all(note in row["notes"] for row in rows)
    rows, _ = table("--metric", KL, "--of", "recorded")
    assert [(row["n"], row["mean"]) for row in rows] == [(3, 0.0)] * 2 and "stale" not in rows[0]
    assert " - " in table("--metric", f"{EVAL},{KL}", format="text")[0]
    rows, err = table("--metric", EVAL, "--at-kl", "0", command="compare")
    assert {row["n"] for row in rows} == {0} and note in err
    words = ["--uri", store, "--group", "kl.family"]
    plot = ["--metric", EVAL, "--kind", "frontier", "--out", tmp_path / "a.png"]
    code, _, err = kl_comedy("results", "plot", *words, *plot)
    assert code == 2 and "no run has a finite" in err and note in err
    page = tmp_path / "a.html"
    assert kl_comedy("results", "report", *words, "--metric", f"{EVAL},{KL}", "--out", page)[0] == 0
    assert note in page.read_text() and "not resolved: 1 of 1 other intervals overlap this one" in page.read_text()
    assert json.loads(runs_frame(store)["stale"][0]) == {KL: 1}


def test_notes_stay_with_the_table_in_every_format(table, tmp_path):
    _, err = table("--metric", EVAL)
    notes = [line for line in err.splitlines() if line.startswith("note: ")]
    assert len(notes) == 2
    (_, *rows) = csv.reader(io.StringIO(table("--metric", EVAL, format="csv")[0]))
    assert {row[-1] for row in rows} == {"; ".join(notes)}
    latex = table("--metric", EVAL, format="latex")[0]
    assert (
        latex.index(r"\end{tabular}") < latex.index("note: runs differ in optimizer.lr") and "{\\footnotesize" in latex
    )
    assert all(f"\n\n{note}" in table("--metric", EVAL, format="markdown")[0] for note in notes)
    assert "note" not in table("--metric", EVAL, format="text")[0]
    file = tmp_path / "a.txt"
    table("--metric", EVAL, "--out", file, format="text")
    assert all(note in file.read_text() for note in notes)


def test_bare_tags_are_filtered_and_derived_ones_refused(kl_comedy, store):
    def runs(where):
        code, out, err = kl_comedy("results", "export", "--uri", store, "--format", "json", "--where", where)
        return len(json.loads(out)) if code == 0 else err

    assert runs("sweep='rates'") == 7 and runs("sweep = 'rates' and seed = 2 and optimizer.lr = 0.003") == 2
    assert "no runs in" in runs("sweep = 'other'")
    assert "did you mean 'tags.sweep'" in runs("params.sweep = 'rates'")
    assert "filter by kl.label, as in kl.label LIKE" in runs("kl.family = 'x'")


def test_plugins_are_named_by_verify_and_report(kl_comedy, store, tmp_path):
    file = tmp_path / "a.csv"
    words = ["--uri", store, "--metric", EVAL, "--group", "kl.label", "--run-ids", "--format", "csv", "--out", file]
    assert kl_comedy("results", "table", *words)[0] == 0
    code, _, err = kl_comedy("results", "verify", file, "--uri", store)
    assert code == 0 and "2 of 2 rows are the same" in err and "6 runs used plugins: my_parts.py abc" in err
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
    assert lines and all(" exact KL " in line or " sampled k1 KL " in line for line in lines)


def test_a_terminal_of_80_columns_shows_the_whole_bar_and_the_numbers_beneath():
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    values = {"train/reward": 0.5, "kl/exact_reverse_sequence": 0.1, "policy/entropy": 0.087, "train/length": 123.4}
    module = SimpleNamespace(version=0, last_metrics={**values, "time/tokens_per_second": 12345.0})
    progress = ConsoleProgress(console, 1000)
    progress.on_train_start(None, module)
    module.version = 250
    progress.on_train_batch_end(None, module)
    progress.on_train_end(None, module)
    bar, numbers = Text.from_ansi(console.file.getvalue()).plain.splitlines()[-2:]
    assert "250/1000" in bar and "left" in bar and numbers.endswith("12345 tok/s")


def test_a_changed_plugin_is_another_run(tmp_path, monkeypatch):
    config = load_config(TINY, [f"output={tmp_path}", "resume=auto"])
    plain = create_run(config)
    assert changed_plugins(config) is None and not (plain.path / "plugins").exists()
    monkeypatch.setitem(registry.PLUGIN_FILES, "my_parts.py", b"x = 1\n")
    assert find_run(config) is None and "did not record its plugins (my_parts.py)" in changed_plugins(config)
    first = create_run(config)
    assert find_run(config).path == first.path and (first.path / "plugins/my_parts.py").read_text() == "x = 1\n"
    monkeypatch.setitem(registry.PLUGIN_FILES, "my_parts.py", b"x = 2; api_key = 'of mine'\n")
    line = changed_plugins(config)
    assert find_run(config) is None and "\n" not in line
    assert f"my_parts.py changed since {first.path}: this is another run, which starts at update 0" in line
    assert "of mine" not in (create_run(config).path / "plugins/my_parts.py").read_text()
    monkeypatch.setitem(registry.PLUGIN_FILES, "my_parts.py", b"x = 3\n")
    for damaged in tmp_path.glob("*/plugins.json"):
        damaged.write_text("{")
    assert f"{plain.path} did not record its plugins" in changed_plugins(config)


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
        registry.PLUGIN_FILES.clear()
        registry.ESTIMATORS._entries.pop("scaled", None)
        for name in ("kl_comedy_plugin_scaled", "factors_of_scaled"):
            sys.modules.pop(name, None)

    yield forget
    forget()


@pytest.mark.slow
def test_runs_of_two_versions_of_a_plugin_are_two_rows_and_reproducible(kl_comedy, new_process, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scaled.py").write_text(PLUGIN)
    term, uri = "kl=[{estimator: scaled, placement: loss, beta: 0.1}]", "sqlite:///mlflow.db"

    def train(factor):
        new_process()
        (tmp_path / "factors_of_scaled.py").write_text(f"FACTOR = {factor}\n")
        words = [*SMALL, "train.steps=2", term, f"tracking.uri={uri}", "resume=auto", "--plugin", "scaled.py"]
        code, _, err = kl_comedy("train", TINY, *words)
        assert code == 0, err
        return " ".join(err.split())

    train(1.0)
    assert "is already finished" in train(1.0)
    (run,) = (tmp_path / "runs").iterdir()
    assert f"factors_of_scaled.py changed since runs/{run.name}: this is another run" in train(3.0)
    frame = runs_frame(uri)
    assert frame["tags.config.hash"].nunique() == frame["tags.plugins"].nunique() == len(frame) == 2
    code, out, err = kl_comedy("results", "table", "--uri", uri, "--metric", "train/loss", "--format", "json")
    assert code == 0 and [row["n"] for row in json.loads(out)] == [1, 1] and "runs differ in plugins" in err
    new_process()
    code, out, err = kl_comedy("reproduce", run.name, "--uri", uri, "--format", "json")
    assert code == 0 and {row["verdict"] for row in json.loads(out)} == {"equal"}, "with the stored source"
    assert "code, packages and machine are what they were" in err
