"""The commands a user types, one after the other: train, table, plot, export, evaluate."""

import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from commands import WAITS, Command, assert_resumed, run_here, waits
from kl_comedy.registry import ESTIMATORS

TINY = Path(__file__).parents[1] / "support" / "tiny.yaml"
SHORT = ("train.steps=2", "train.eval_every=0", "tracking.uri=sqlite:///mlflow.db")


def kl_comedy(*words, cwd, code=0):
    """Its stdout and stderr."""
    exit_code, out, err = run_here(*words, cwd=cwd)
    assert exit_code == code, err
    return out, err


def rows_of(*words, cwd):
    return json.loads(kl_comedy(*words, "--format", "json", cwd=cwd)[0])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with two seeds of the tiny config, tracked in a real store, and the messages of the first."""
    folder = tmp_path_factory.mktemp("work")
    _, messages = kl_comedy("train", TINY, "seed=0", *SHORT, cwd=folder)
    kl_comedy("train", TINY, "seed=1", *SHORT, "tracking.loggers=[{name: csv}]", cwd=folder)
    return folder, messages


def test_a_run_ends_with_its_result_its_place_and_the_command_that_follows(trained):
    folder, messages = trained
    last_update, result, place, command = messages.splitlines()[-4:]
    assert last_update.startswith("update 2/2")
    assert re.fullmatch(r"tiny seed 0: finished in \d+ s; heldout reward \S+ -> \S+ \(\S+\)", result)
    assert re.fullmatch(r"run [0-9a-f]{32} in runs/tiny-\S+", place)
    # The command is on a line of its own, to be copied.
    assert command.startswith("kl-comedy results table ")
    kl_comedy(*shlex.split(command)[1:], cwd=folder)


def test_another_logger_has_the_metrics_too(trained):
    folder, _ = trained
    (file,) = (folder / "runs").glob("tiny-*/csv/metrics.csv")
    header, *rows = file.read_text().splitlines()
    assert {"train/reward", "eval/heldout/reward", "step"} <= set(header.split(","))
    assert len(rows) >= 2


@pytest.mark.parametrize(
    ("loggers", "message"),
    [
        ("[{name: csvv}]", "tracking.loggers.0.name: got 'csvv'; did you mean 'csv'"),
        ("[{name: csv, options: {x: 1}}]", "tracking.loggers.0.options: got {'x': 1}"),
    ],
)
def test_a_logger_that_does_not_exist_is_refused(tmp_path, loggers, message):
    _, error = kl_comedy("train", TINY, *SHORT, f"tracking.loggers={loggers}", cwd=tmp_path, code=2)
    assert message in error


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("kl.0.estimator=k33", "kl.0.estimator: got 'k33'"),
        ("kl.0.correction=prefx", "kl.0.correction: got 'prefx'"),
        ("model.device=cuda", "model.device: got 'cuda'"),
        ("rollout.backend=hff", "rollout.backend: got 'hff'"),
        ("rollout.options={lop: own}", "rollout.options.lop: no such key"),
        ("rewards.0.options={x: 1}", "rewards.0.options.x: no such key"),
        ("tracking.uri=foo://x", "tracking.uri: got 'foo://x'"),
        ("model.source=nowhere", "model.source: got 'nowhere'"),
    ],
)
def test_a_mistake_that_shows_without_the_model_is_raised_before_anything_is_loaded(
    tmp_path, monkeypatch, override, message
):
    monkeypatch.setattr("kl_comedy.training.run.train", lambda *_, **__: pytest.fail("training began"))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    _, error = kl_comedy("train", TINY, override, cwd=tmp_path, code=2)
    assert message in error
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_mistakes_are_found_before_the_imports_that_take_seconds(tmp_path):
    mistakes = (
        "optimizer.lr=fast",
        "kl.0.estimator=k9",
        "model.source=/nowhere",
        "rewards.0.name=exact",
        "trainer={x: 3}",
        "data.train.path=/none",
        "eval.suites=[gsm9k]",
        "tracking.uri=ftp://x",
        "callbacks=[{name: x}]",
    )
    code = (
        "import sys\n"
        "from kl_comedy.cli import main\n"
        f"for mistake in {mistakes!r}:\n"
        f"    sys.argv = ['kl-comedy', 'train', {str(TINY)!r}, mistake]\n"
        "    try:\n"
        "        main.run()\n"
        "    except SystemExit as end:\n"
        "        print(end.code, sorted({'lightning', 'transformers', 'mlflow', 'datasets'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["2 []"] * len(mistakes), done.stdout + done.stderr
    for line, mistake in zip(done.stderr.splitlines(), mistakes, strict=True):
        assert line.startswith(f"error: {mistake.partition('=')[0]}")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_tensorboard_and_wandb_have_the_metrics_of_a_resumed_run(tmp_path, name):
    pytest.importorskip(name)
    logger = "{name: wandb, options: {offline: true}}" if name == "wandb" else "{name: tensorboard}"
    command = ("train", TINY, *SHORT, "resume=auto", f"tracking.loggers=[{logger}]", *WAITS)
    stopped = Command(*command, cwd=tmp_path, env=waits(at=1))
    stopped.wait_for(tmp_path, "runs/tiny-*/checkpoints/step-00000001.ckpt")
    stopped.send_signal(signal.SIGTERM)
    assert stopped.wait() == 1, stopped.output
    Command(*command, cwd=tmp_path).finish()
    assert_resumed(tmp_path / "runs", at=1)
    (folder,) = (tmp_path / "runs").glob(f"tiny-*/{name}")
    if name == "tensorboard":
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(folder)).Reload()
        assert [event.step for event in events.Scalars("train/reward")] == [1, 2]
        assert (folder / "hparams.yaml").read_text().count("kl.0.estimator")
        (text,) = {event.tensor_proto.string_val[0].decode() for event in events.Tensors("run/text_summary")}
        assert text.startswith("KL terms: `0.")
        assert "\n| kl.regime | on_policy |" in text
    else:
        ids = {run.name.rpartition("-")[2] for run in folder.glob("offline-run-*")}
        files = list(folder.glob("offline-run-*/run-*.wandb"))
        assert len(ids) == 1, "the resumed run is the same one"
        assert len(files) == 2, "one of each process"
        for file in files:
            assert b"train/reward" in file.read_bytes(), file
            assert b"tiny s0" in file.read_bytes(), "its name"
            assert b"KL terms: `0." in file.read_bytes(), "its notes"
        assert not list(tmp_path.glob("wandb"))


def test_an_exception_in_a_plugin_names_its_line(tmp_path, monkeypatch):
    ESTIMATORS.load()
    monkeypatch.setattr(ESTIMATORS, "_entries", dict(ESTIMATORS._entries))
    (tmp_path / "broken.py").write_text(
        "from kl_comedy.registry import ESTIMATORS\n\n"
        "@ESTIMATORS.register('broken', source='test', needs='log_ratio')\n"
        "def broken(log_ratio):\n    'Fails.'\n    return log_ratio / {}['missing']\n"
    )
    term = "{estimator: broken, placement: loss}"
    _, error = kl_comedy("certify", "--plugin", "broken.py", "--term", term, cwd=tmp_path, code=2)
    assert "KeyError: 'missing'" in error
    assert error.count(f"{tmp_path / 'broken.py'}, line 6, in broken)") == 1


def test_the_table_has_one_row_for_both_seeds(trained):
    folder, _ = trained
    rows = rows_of("results", "table", cwd=folder)
    assert len(rows) > 0
    assert {row["n"] for row in rows} == {2}
    text, _ = kl_comedy("results", "table", "--format", "markdown", cwd=folder)
    assert "0.05 k1_reverse_token in reward to_go" in text


def test_an_exported_row_has_the_tags_of_the_run(trained):
    folder, _ = trained
    first, second = rows_of("results", "export", cwd=folder)
    for row in (first, second):
        assert row["tags.kl.0.verdict"].startswith("sequence_reverse")
        assert row["tags.config.hash"]
        assert row["tags.reference.hash"]
        assert row["tags.data.hash.train"]
        assert row["tags.run.command"]
    assert first["tags.config.hash_without_seed"] == second["tags.config.hash_without_seed"]
    assert first["tags.config.hash"] != second["tags.config.hash"]


def test_the_plot_is_written(trained):
    folder, _ = trained
    kl_comedy("results", "plot", "--metric", "train/reward", "--out", "reward.svg", cwd=folder)
    assert (folder / "reward.svg").read_text().lstrip().startswith("<?xml")


def test_the_trained_policy_evaluates_to_what_the_run_measured(trained):
    folder, _ = trained
    run = next((folder / "runs").glob("tiny-1"))
    summary = json.loads((run / "summary.json").read_text())
    command = shlex.split(summary["evaluate_command"])[1:]
    _, error = kl_comedy(*command, "model.options={preset: tiny}", cwd=folder, code=2)
    assert "model.options" in error
    (row,) = rows_of(*command, cwd=folder)
    assert row["reward"] == pytest.approx(summary["evaluations"]["heldout"]["2"])
    logged = {}
    for line in (run / "spool.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event.get("kind") != "metrics" or event["step"] != 2:
            continue
        for key, value in event["data"].items():
            if key.startswith(("eval/heldout/kl/", "eval/heldout/kl_error/", "eval/heldout/policy/")):
                logged[key.removeprefix("eval/heldout/")] = value
    # Exact values, estimates, the largest log-ratio, the estimates' errors, two entropies.
    assert len(logged) == 6 + 6 + 1 + 12 + 2
    assert logged["kl/exact_reverse_token"] > 0
    assert {name: row[name] for name in logged} == pytest.approx(logged, rel=1e-3, abs=1e-7)


def test_the_help_shows_at_most_twenty_commands_in_four_panels(kl_comedy):
    code, out, _ = kl_comedy("--help")
    assert code == 0
    panels = re.findall(r"╭─ (\w+) ─", out)
    assert panels == ["Options", "Ask", "Train", "Sweep", "Results"]
    shown = re.findall(r"^│ ([a-z-]+) ", out[out.index("Ask") :], flags=re.MULTILINE)
    assert {"certify", "train", "sweep", "results"} <= set(shown)
    assert len(shown) <= 20
    assert not {"cell", "sweep-report"} & set(shown), "jobs run these; nobody types them"


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [(["--help"], 0, "Usage: python -m kl_comedy"), (["chek"], 2, "check"), (["list", "recipes"], 0, "grpo")],
)
def test_python_m_is_the_command(words, code, text):
    """Its help names it as it was typed, and its exit codes are those of `kl-comedy`."""
    done = subprocess.run(
        [sys.executable, "-m", "kl_comedy", *words], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == code, done.stderr
    assert text in done.stdout + done.stderr


HOSTILE = "a\x1b[31m\nerror: b\u2028\x85c"
"""The name of a file or folder that ends a line, colours the terminal and looks like a message."""


@pytest.mark.parametrize(
    "words",
    [
        ("explain", "NAME.sh"),
        ("explain", "NAME.yaml"),
        ("explain", "MISSING.sh"),
        ("explain", "NAME.sh", "--as-config"),
        ("certify", "NAME.yaml"),
        ("check", "NAME.yaml"),
        ("check", "NAME.yaml", "--resolved"),
        ("check", "MISSING.yaml"),
        ("check", "NAME.yaml", "model.source=MISSING"),
        ("plan", "NAME.yaml", "--gpus", "0"),
        ("train", "MISSING.yaml"),
        ("conformance", "MISSING.py:f"),
        ("evaluate", "MISSING"),
        ("export", "MISSING", "out"),
        ("status", "MISSING"),
        ("sweep", "MISSING.yaml"),
        ("results", "table", "--uri", "MISSING.parquet"),
        ("results", "verify", "MISSING.md"),
        ("results", "sync", "MISSING"),
        ("reproduce", "MISSING", "--uri", "MISSING.parquet"),
        ("init", "run", "NAME.yaml"),
        ("list", "recipes", "--plugin", "MISSING.py"),
    ],
    ids=" ".join,
)
def test_a_hostile_name_is_printed_as_one_line_without_escapes(tmp_path, words):
    (tmp_path / f"{HOSTILE}.sh").write_text("python t.py --beta 0.04 trl grpo\n")
    shutil.copy(TINY, tmp_path / f"{HOSTILE}.yaml")
    named = [word.replace("NAME", HOSTILE).replace("MISSING", f"{HOSTILE}2") for word in words]
    _, out, err = run_here(*named, cwd=tmp_path)
    printed = out + err
    assert printed
    assert not set(printed) & set("\x1b\x85\u2028")
    assert not [line for line in printed.splitlines() if line.startswith("error: b")]
