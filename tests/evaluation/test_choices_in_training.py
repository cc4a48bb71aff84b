"""Suites by log-prob in `eval.suites` of a run: the numbers of `kl-comedy evaluate`, whoever computes them."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from choice_suite import problem, write_suite
from commands import assert_resumed
from kl_comedy.config import load_config
from kl_comedy.evaluation.evaluate import CHUNK
from kl_comedy.io import decode_json
from kl_comedy.slurm.manifest import Sweep
from kl_comedy.slurm.status import cell_metrics
from kl_comedy.training import callbacks
from kl_comedy.training.checkpoint import best, manifest
from kl_comedy.training.problems import load_problem_sets
from training_runs import TINY, go, metrics_of, weights_of

PROBLEMS = CHUNK + 8
ROWS = [problem(n) for n in range(1, PROBLEMS + 1)]
NAMES = ("accuracy", "accuracy_half_width", "accuracy_norm", "accuracy_norm_half_width")
SETTINGS = ("train.steps=2", "train.eval_every=1", "eval.kl=false", "data.eval.heldout.limit=4", "train.threads=1")


@pytest.fixture
def pick(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KL_COMEDY_DATA", raising=False)
    return write_suite(tmp_path, ROWS)


def table(run, step, name="pick"):
    return json.loads((run / f"tables/choices/{name}/{step}.json").read_text())


def test_a_run_logs_what_evaluate_measures_item_by_item(kl_comedy, pick, monkeypatch):
    monkeypatch.setattr(callbacks, "SAMPLE_ROWS", PROBLEMS)
    code, out, err = kl_comedy("train", TINY, *SETTINGS, "eval.suites=[pick.yaml]", "train.microbatch_tokens=64")
    assert code == 0, err
    printed = " ".join((out + err).split())
    (run,) = Path("runs").glob("tiny-*")
    logged = {0: {}, 1: {}, 2: {}}
    for line in (run / "spool.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event.get("kind") == "metrics":
            logged[event["step"]].update(event["data"])
    summary = json.loads((run / "summary.json").read_text())
    for step in (0, 1, 2):
        assert {name for name in logged[step] if "pick" in name} == {f"eval/pick/{name}" for name in NAMES}
        accuracy = logged[step]["eval/pick/accuracy"]
        assert summary["accuracies"]["pick"][str(step)] == accuracy
        assert f"eval pick at update {step}: accuracy {accuracy:.3f} [" in printed
    assert set(summary["evaluations"]) == {"heldout"}
    assert "pick accuracy" in printed
    (first_checkpoint,) = run.glob("checkpoints/step-*1.ckpt")
    for target, step in ((run, 2), (first_checkpoint, 1)):
        code, out, err = kl_comedy("evaluate", target, "--suite", "pick.yaml", "--format", "json")
        assert code == 0, err
        (row,) = json.loads(out)
        items = [decode_json(line) for line in (Path(row["records"]) / "items.jsonl").read_bytes().splitlines()]
        assert len(items) == PROBLEMS
        assert items == table(run, step)
        for name in ("accuracy", "accuracy_norm"):
            half_width = (row[f"{name}_high"] - row[f"{name}_low"]) / 2
            assert row[name] == pytest.approx(logged[step][f"eval/pick/{name}"])
            assert logged[step][f"eval/pick/{name}_half_width"] == pytest.approx(half_width)
    tables = {json.dumps(table(run, step)) for step in (0, 1, 2)}
    assert len(tables) == 3, "training moves the log-probs"


def test_it_changes_nothing_in_the_run_and_a_resumed_run_has_its_accuracies(tmp_path, pick):
    """No random number is drawn, and no evaluation by log-prob chooses the best checkpoint."""
    settings = (*SETTINGS, f"eval.suites=[{pick}]", "train.keep_checkpoints=2")
    first = go(tmp_path / "with", *settings)
    with_suite = first.run
    without = go(tmp_path / "without", *SETTINGS, "train.keep_checkpoints=2").run
    others = {key: value for key, value in metrics_of(with_suite).items() if "/pick/" not in key[1]}
    assert others == metrics_of(without)
    assert weights_of(with_suite) == weights_of(without)
    best_with_suite = best(with_suite.checkpoints)
    best_without = best(without.checkpoints)
    assert best_with_suite.name == best_without.name
    assert manifest(best_with_suite)["reward"] == manifest(best_without)["reward"]

    (with_suite.path / "summary.json").unlink()
    newest = next(with_suite.checkpoints.glob("step-*2.ckpt"))
    (newest / "state.pt").unlink()  # damaged: the run resumes from update 1
    again = go(tmp_path / "with", *settings, "resume=auto")
    assert again.run.path == with_suite.path
    assert_resumed(tmp_path / "with", at=1)
    assert again.summary["accuracies"] == first.summary["accuracies"]
    assert set(again.summary["accuracies"]["pick"]) == {0, 1, 2}


MISTAKES = {
    "no choices": ({"rows": [{"problem": "1+1=", "answer": "2"}]}, "has no choices to compare"),
    "too many choices": ({"rows": [problem(1, choices=list(map(str, range(27))))]}, "2 to 26 choices"),
    "a gold that is none": ({"rows": [problem(1, answer="D")]}, "must be a letter"),
    "a space in front": ({"delimiter": " "}, "cannot encode"),
    "another file": ({"file": {"path": "pick.jsonl", "sha256": "0" * 64}}, "another file than the suite pick names"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_sentence_before_the_run_begins(kl_comedy, pick, tmp_path, mistake):
    keys, message = MISTAKES[mistake]
    write_suite(tmp_path, **{"rows": ROWS, **keys})
    code, _, err = kl_comedy("train", TINY, "eval.suites=[pick.yaml]")
    assert code == 2, err
    assert message in " ".join(err.split())
    assert "Traceback" not in err
    assert not Path("runs").exists()


def test_a_suite_whose_file_is_missing_is_refused_before_the_run_begins(kl_comedy, pick, tmp_path):
    code, _, err = kl_comedy("train", TINY, "eval.suites=[mmlu_stem_likelihood]", f"eval.data_root={tmp_path}")
    assert code == 2
    assert "an existing file for the suite mmlu_stem_likelihood" in " ".join(err.split())
    assert not Path("runs").exists()


def test_problems_of_a_suite_are_removed_from_training(tmp_path, pick):
    rows = [problem(n, problem=f"{1 + n // 9}+{1 + n % 9}+1=") for n in range(81)]
    suite = write_suite(tmp_path, rows, name="asked")
    problems = load_problem_sets(load_config(TINY, [f"eval.suites=[{suite}]"]))
    assert problems.counts["decontaminated.asked"] > 0
    trained = {problem.text for problem in problems.train}
    assert not trained & {row["problem"] for row in rows}


def test_a_sweep_s_report_has_the_accuracy(tmp_path):
    summary = {
        "status": "FINISHED",
        "evaluations": {"heldout": {"0": 0.5, "10": 0.7}},
        "accuracies": {"pick": {"0": 0.2, "10": 0.3}},
    }
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    row = SimpleNamespace(run=str(tmp_path), state="FINISHED", evaluated=False, cell=0, steps=10)
    sweep = Sweep(path=tmp_path, manifest=None)
    assert cell_metrics(sweep, row) == {"eval/heldout/reward": 0.7, "eval/pick/accuracy": 0.3}
