"""`kl-comedy evaluate --suite` as a user calls it: interrupted and resumed, tracked, with every mistake."""

import csv
import io
import json
from pathlib import Path

import pandas as pd
import pytest
import yaml

from choice_suite import write_suite
from kl_comedy.cli.evaluate import show_suites
from kl_comedy.errors import RunFailed
from kl_comedy.evaluation import records as records_module

TINY = Path(__file__).parents[1] / "support" / "tiny.yaml"
SUMS = {
    "name": "sums",
    "data": {"dataset": "pocket", "split": "heldout", "limit": 12, "options": {"digits": 1}},
    "template": "plain",
    "reward": {"name": "exact_answer"},
    "answer": "number",
    "max_new_tokens": 24,
}
MODEL = ("pocket", "model.options={preset: tiny}", "eval.temperature=1.0", "tracking.uri=none")


@pytest.fixture
def sums(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KL_COMEDY_DATA", raising=False)
    (tmp_path / "sums.yaml").write_text(yaml.safe_dump(SUMS))
    return "sums.yaml"


def records(folder):
    """The folder of the suite's one evaluation below ``folder``."""
    (path,) = Path(folder).glob("*/sums-*")
    return path


def read_lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_scores_records_and_the_same_again_without_sampling(kl_comedy, sums):
    command = ("evaluate", *MODEL, "--suite", sums, "eval.samples=4")
    code, out, err = kl_comedy(*command, "--format", "json")
    assert code == 0, err
    (row,) = json.loads(out)
    items_file = records("evaluations") / "items.jsonl"
    items = read_lines(items_file)
    n_items = 12 * 4  # problems, samples of each
    assert row["problems"] == 12
    assert len(items) == n_items
    assert row["accuracy"] == sum(item["correct"] for item in items) / n_items
    assert row["accuracy"] > 0
    assert row["accuracy_low"] < row["accuracy"] < row["accuracy_high"]
    assert row["pass@4"] >= row["accuracy"]
    assert row["truncated_share"] == sum(item["stop_reason"] == "length" for item in items) / n_items

    table = pd.read_parquet(records("evaluations") / "items.parquet")
    assert table.to_dict("records")[5]["completion"] == items[5]["completion"]

    written_at = items_file.stat().st_mtime_ns
    code, out, err = kl_comedy(*command, "--format", "json", "--k", "3")
    assert code == 0
    (row_of_k,) = json.loads(out)
    assert row_of_k["accuracy"] == row["accuracy"]
    assert "pass@3" in row_of_k
    assert items_file.stat().st_mtime_ns == written_at, "nothing is sampled again"
    assert "problems" not in err

    assert "sums,generate,12" in kl_comedy(*command, "--format", "csv")[1]
    assert "| sums | 12 x 4 |" in kl_comedy(*command, "--format", "markdown")[1]
    assert "accuracy" in kl_comedy(*command, "--format", "table")[1]


@pytest.mark.parametrize("format", ["csv", "table", "markdown"])
def test_a_suite_with_a_hostile_name_is_no_formula_and_no_escape(capsys, format):
    name = '=HYPERLINK("http://x")\x1b[31m[red]<script>'
    scores = {"accuracy": -0.5, "accuracy_low": -1.0, "accuracy_high": 0.0}
    show_suites([{"suite": name, "problems": 1, "samples": 1, "interval": "bootstrap", **scores}], format)
    output = capsys.readouterr().out
    assert "\x1b" not in output
    if format == "csv":
        (row,) = csv.DictReader(io.StringIO(output))
        assert row["suite"] == '\'=HYPERLINK("http://x")[red]<script>'
        assert row["accuracy"] == "-0.5", "a number is no formula"
    else:
        assert "[red]" in output
    if format == "markdown":
        assert "<script" not in output


def test_an_interrupted_and_resumed_evaluation_ends_in_the_same_bytes(kl_comedy, sums, monkeypatch):
    command = ("evaluate", *MODEL, "--suite", sums, "eval.samples=2", "--chunk", "1", "--limit", "6")
    assert kl_comedy(*command, "--out", "whole")[0] == 0

    def chunks():
        return sorted((records("parts") / "chunks").glob("?????.jsonl"))

    def evaluate_until(count):
        """Fail when so many chunks are written."""
        write = records_module.atomic_write

        def limited(path, content):
            if path.suffix == ".jsonl" and len(chunks()) == count:
                raise RunFailed("the node is gone")
            write(path, content)

        with monkeypatch.context() as patch:
            patch.setattr(records_module, "atomic_write", limited)
            assert kl_comedy(*command, "--out", "parts")[0] == 1

    evaluate_until(3)
    first, second, third = chunks()
    assert [first.stem, second.stem, third.stem] == ["00000", "00001", "00002"]
    assert not (records("parts") / "items.jsonl").exists()
    second.write_bytes(second.read_bytes()[:40])  # what a failing disk may leave
    written_at = first.stat().st_mtime_ns
    evaluate_until(5)
    assert first.stat().st_mtime_ns == written_at, "a whole chunk is not evaluated again"
    assert kl_comedy(*command, "--out", "parts")[0] == 0
    assert (records("parts") / "items.jsonl").read_bytes() == (records("whole") / "items.jsonl").read_bytes()
    assert records("parts").name == records("whole").name
    assert not (records("parts") / "chunks").exists()


def test_shards_are_refused(kl_comedy, sums):
    code, _, err = kl_comedy("evaluate", *MODEL, "--suite", sums, "--shard", "0/4")
    assert code == 2
    assert "--shard: there are no shards any more" in " ".join(err.split())
    assert not Path("evaluations").exists()


@pytest.mark.parametrize("variable", ["WORLD_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_one_process_evaluates(kl_comedy, sums, monkeypatch, variable):
    monkeypatch.setenv(variable, "2")
    code, _, err = kl_comedy("evaluate", *MODEL, "--suite", sums)
    assert code == 2
    assert "one process evaluates" in " ".join(err.split())
    assert not Path("evaluations").exists()


def test_a_run_and_its_checkpoints_are_evaluated_and_tracked(kl_comedy, sums):
    from mlflow import MlflowClient

    settings = ("train.steps=2", "eval.at_start=false", "eval.temperature=0", f"eval.suites=[{sums}]", "eval.kl=false")
    code, _, err = kl_comedy("train", TINY, *settings, "tracking.uri=sqlite:///mlflow.db")
    assert code == 0, err
    assert "eval sums at update 2" in err
    (run,) = Path("runs").glob("tiny-*")
    measured = json.loads((run / "summary.json").read_text())["evaluations"]["sums"]["2"]

    def evaluated(target):
        code, out, err = kl_comedy("evaluate", target, "--suite", sums, "--format", "json")
        assert code == 0, err
        (row,) = json.loads(out)
        return row

    of_run = evaluated(run)
    assert of_run["model"] == f"{run.name}-2"
    assert of_run["accuracy"] == pytest.approx(measured), "greedy: in the run as after it"
    (checkpoint,) = run.glob("checkpoints/step-*1.ckpt")
    of_checkpoint = evaluated(checkpoint)
    assert of_checkpoint["model"] == f"{run.name}-1"

    client = MlflowClient("sqlite:///mlflow.db")
    experiment = client.get_experiment_by_name("kl_comedy-evaluations")
    evaluations = client.search_runs([experiment.experiment_id])
    assert {evaluation.data.tags["evaluated.step"] for evaluation in evaluations} == {"1", "2"}
    for evaluation in evaluations:
        assert evaluation.data.tags["evaluated.run"] == run.name
        assert "eval/sums/accuracy" in evaluation.data.metrics
        assert evaluation.data.metrics["eval/sums/accuracy"] >= 0
        assert evaluation.data.params["sampling.temperature"] == "0.0"
        files = {Path(file.path).name for file in client.list_artifacts(evaluation.info.run_id, "records")}
        assert files == {"items.jsonl", "items.parquet", "summary.json"}


CHOICES = [
    {"id": str(n), "problem": f"{n}+2=", "choices": [str(n + 2), str(n + 5), "0"], "answer": "A"} for n in range(8)
]


def test_choices_by_log_prob(kl_comedy, sums, tmp_path):
    write_suite(tmp_path, CHOICES)
    code, out, err = kl_comedy("evaluate", *MODEL, "--suite", f"pick.yaml,{sums}", "--format", "json", "--limit", "6")
    assert code == 0, err
    row, _ = json.loads(out)
    (file,) = Path("evaluations").glob("*/pick-*/items.jsonl")
    items = read_lines(file)
    assert len(items) == 6
    assert row["accuracy"] == sum(item["picked"] == "A" for item in items) / 6
    for item in items:
        likeliest = max(range(3), key=item["logps"].__getitem__)
        assert item["picked"] == "ABC"[likeliest]
        assert max(item["logps"]) < 0


def test_choices_that_the_tokenizer_cannot_spell_are_refused(kl_comedy, sums, tmp_path):
    """The pocket tokenizer has no space."""
    write_suite(tmp_path, CHOICES, delimiter=" ")
    code, _, err = kl_comedy("evaluate", *MODEL, "--suite", "pick.yaml", "--limit", "6")
    assert code == 2
    assert "cannot encode" in err


@pytest.mark.parametrize(("name", "message"), [("gsm9k", "did you mean 'gsm8k'"), ("sums.yaml", "nor another suite")])
def test_a_mistaken_suite_of_a_run_is_reported_before_it_begins(kl_comedy, sums, name, message):
    code, _, err = kl_comedy("train", TINY, f"eval.suites=[{name},{sums}]")
    assert code == 2, err
    assert message in " ".join(err.split())
    assert not Path("runs").exists()


MISTAKES = [
    (("--suite", "gsm8"), "did you mean 'gsm8k'"),
    (("--suite", "gsm8k", "--data-root", "."), "allowed: an existing file for the suite gsm8k"),
    (("--suite", "gsm8k", "--data", "gsm8k=short.jsonl#" + "0" * 64), "another file than the suite gsm8k names"),
    (("--suite", "gsm8k", "--data", "math500=short.jsonl"), "suites of this call"),
    (("--suite", "gsm8k", "--data", "gsm8k=nogold.jsonl"), "nogold.jsonl:1"),
    (("--suite", "badgold.yaml"), "cannot judge the answers of 1 of 1"),
    (("--suite", "sums.yaml", "--k", "8", "eval.samples=4"), "--k: got 8; allowed: 1 to 4"),
    (("--suite", "sums.yaml", "--k", "x"), "whole numbers with commas"),
    (("--suite", "sums.yaml", "eval.samples=4", "eval.temperature=0"), "greedy samples are all the same"),
    (("--suite", "sums.yaml", "--interval", "wilsn"), "did you mean 'wilson'"),
    (("--suite", "sums.yaml", "--template", "chat"), "no chat template"),
    (("--suite", "sums.yaml", "rollout.backend=replay"), "rollout"),
    ((), "kl-comedy list suites"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES, ids=[message for _, message in MISTAKES])
def test_a_mistake_is_one_sentence_and_exit_2(kl_comedy, sums, tmp_path, arguments, message):
    (tmp_path / "short.jsonl").write_text('{"problem": "1+1", "answer": "2"}\n')
    (tmp_path / "nogold.jsonl").write_text('{"problem": "1+1"}\n')
    (tmp_path / "badgold.jsonl").write_text('{"problem": "1+1", "answer": "?"}\n')
    (tmp_path / "badgold.yaml").write_text(yaml.safe_dump({**SUMS, "data": None, "file": {"path": "badgold.jsonl"}}))
    code, out, err = kl_comedy("evaluate", *MODEL, *arguments)
    assert code == 2, err
    assert out == ""
    assert message in " ".join(err.split())
    assert "Traceback" not in err
    assert not list(Path("evaluations").glob("*/*/items.jsonl"))


# --- targets that are not there ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["runs/NOPE", "./NOPE", "/nowhere/NOPE", "a/b/NOPE", "RUN/checkpoints/step-1.ckpt"])
def test_a_run_that_is_not_there_is_not_taken_for_a_model_of_the_hub(kl_comedy, tmp_path, monkeypatch, target):
    monkeypatch.chdir(tmp_path)
    code, _, error = kl_comedy("evaluate", target)
    assert code == 2
    assert error.strip() == f"error: no such run, checkpoint or model: {target}"


def test_the_nearest_run_is_suggested(kl_comedy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trained/tiny-1").mkdir(parents=True)
    (tmp_path / "trained/tiny-1/config.yaml").write_text("name: tiny\n")
    _, _, error = kl_comedy("evaluate", "trained/tiny-2")
    assert error.strip().endswith("no such run, checkpoint or model: trained/tiny-2; did you mean trained/tiny-1?")


def test_an_id_of_the_hub_still_is_one(kl_comedy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, _, error = kl_comedy("evaluate", "nobody/nothing")
    assert "data.eval: names no set to evaluate on" in error


def test_a_config_of_the_package_is_evaluated_by_its_name(kl_comedy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, error = kl_comedy(
        "evaluate",
        "quickstart",
        "model.options={preset: tiny}",
        "data.eval={heldout: {dataset: pocket, split: heldout, limit: 2, options: {digits: 1}}}",
        "eval.samples=1",
        "--format",
        "json",
    )
    assert code == 0, error
    assert [row["set"] for row in json.loads(out)] == ["heldout"]
