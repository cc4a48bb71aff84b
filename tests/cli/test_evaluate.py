"""`kl-comedy evaluate --suite` as a user calls it: interrupted and resumed, tracked, with every mistake."""

import json
from pathlib import Path

import pytest
import yaml

from choice_suite import write_suite
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
    (path,) = Path(folder).glob("*/sums-*")
    return path


def test_scores_records_and_the_same_again_without_sampling(kl_comedy, sums):
    words = ("evaluate", *MODEL, "--suite", sums, "eval.samples=4", "--format", "json")
    code, out, err = kl_comedy(*words)
    assert code == 0, err
    (row,) = json.loads(out)
    items = [json.loads(line) for line in (records("evaluations") / "items.jsonl").read_text().splitlines()]
    assert row["problems"] == 12 and len(items) == 48
    assert row["accuracy"] == sum(item["correct"] for item in items) / 48 > 0
    assert row["accuracy_low"] < row["accuracy"] < row["accuracy_high"] and row["pass@4"] >= row["accuracy"]
    assert row["truncated_share"] == sum(item["stop_reason"] == "length" for item in items) / 48
    import pandas as pd

    table = pd.read_parquet(records("evaluations") / "items.parquet")
    assert table.to_dict("records")[5]["completion"] == items[5]["completion"]
    before = (records("evaluations") / "items.jsonl").stat().st_mtime_ns
    code, again, err = kl_comedy(*words, "--k", "3")
    assert code == 0 and json.loads(again)[0]["accuracy"] == row["accuracy"] and "pass@3" in json.loads(again)[0]
    assert (records("evaluations") / "items.jsonl").stat().st_mtime_ns == before and "problems" not in err
    for format, line in (("csv", "sums,generate,12"), ("markdown", "| sums | 12 x 4 |"), ("table", "accuracy")):
        assert line in kl_comedy(*words[:-1], format)[1]


def test_an_interrupted_and_resumed_evaluation_ends_in_the_same_bytes(kl_comedy, sums, monkeypatch):
    words = (*MODEL, "--suite", sums, "eval.samples=2", "--chunk", "1", "--limit", "6")
    assert kl_comedy("evaluate", *words, "--out", "whole")[0] == 0

    def evaluate_until(count):
        write = records_module.atomic_write

        def limited(path, content):
            written = len(list((records("parts") / "chunks").glob("?????.jsonl"))) if path.suffix == ".jsonl" else 0
            if written == count:
                raise RunFailed("the node is gone")
            write(path, content)

        with monkeypatch.context() as patch:
            patch.setattr(records_module, "atomic_write", limited)
            assert kl_comedy("evaluate", *words, "--out", "parts")[0] == 1

    evaluate_until(3)
    done = sorted((records("parts") / "chunks").glob("?????.jsonl"))
    assert [file.stem for file in done] == ["00000", "00001", "00002"]
    assert not (records("parts") / "items.jsonl").exists()
    done[1].write_bytes(done[1].read_bytes()[:40])  # what a failing disk may leave
    untouched = done[0].stat().st_mtime_ns
    evaluate_until(5)
    assert done[0].stat().st_mtime_ns == untouched
    assert kl_comedy("evaluate", *words, "--out", "parts")[0] == 0
    assert (records("parts") / "items.jsonl").read_bytes() == (records("whole") / "items.jsonl").read_bytes()
    assert records("parts").name == records("whole").name and not (records("parts") / "chunks").exists()


def test_one_process_evaluates(kl_comedy, sums, monkeypatch):
    words = ("evaluate", *MODEL, "--suite", sums)
    code, _, err = kl_comedy(*words, "--shard", "0/4")
    assert code == 2 and "--shard: there are no shards any more" in " ".join(err.split())
    for name in ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "2")
            code, _, err = kl_comedy(*words)
        assert code == 2 and "one process evaluates" in " ".join(err.split())
    assert not Path("evaluations").exists()


def test_a_run_and_its_checkpoints_are_evaluated_and_tracked(kl_comedy, sums):
    words = ("train.steps=2", "eval.at_start=false", "eval.temperature=0", f"eval.suites=[{sums}]", "eval.kl=false")
    code, _, err = kl_comedy("train", TINY, *words, "tracking.uri=sqlite:///mlflow.db")
    assert code == 0 and "eval sums at update 2" in err, err
    (run,) = Path("runs").glob("tiny-*")
    measured = json.loads((run / "summary.json").read_text())["evaluations"]["sums"]["2"]
    for target, step in ((run, 2), (run / "checkpoints" / "step-00000001.ckpt", 1)):
        target = target if target.exists() else next(run.glob(f"checkpoints/step-*{step}.ckpt"))
        code, out, err = kl_comedy("evaluate", target, "--suite", sums, "--format", "json")
        assert code == 0, err
        (row,) = json.loads(out)
        assert row["model"] == f"{run.name}-{step}"
        assert step != 2 or row["accuracy"] == pytest.approx(measured)  # greedy: in the run as after it
    from mlflow import MlflowClient

    client = MlflowClient("sqlite:///mlflow.db")
    experiment = client.get_experiment_by_name("kl_comedy-evaluations")
    tracked = client.search_runs([experiment.experiment_id])
    assert {each.data.tags["evaluated.step"] for each in tracked} == {"1", "2"}
    for each in tracked:
        assert each.data.tags["evaluated.run"] == run.name and "eval/sums/accuracy" in each.data.metrics
        assert each.data.metrics["eval/sums/accuracy"] >= 0 and each.data.params["sampling.temperature"] == "0.0"
        files = {Path(file.path).name for file in client.list_artifacts(each.info.run_id, "records")}
        assert files == {"items.jsonl", "items.parquet", "summary.json"}


def test_choices_by_log_prob(kl_comedy, sums, tmp_path):
    rows = [
        {"id": str(n), "problem": f"{n}+2=", "choices": [str(n + 2), str(n + 5), "0"], "answer": "A"} for n in range(8)
    ]
    write_suite(tmp_path, rows)
    words = ("evaluate", *MODEL, "--suite", "pick.yaml,sums.yaml", "--format", "json", "--limit", "6")
    code, out, err = kl_comedy(*words)
    assert code == 0, err
    row, _ = json.loads(out)
    (file,) = Path("evaluations").glob("*/pick-*/items.jsonl")
    items = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(items) == 6 and row["accuracy"] == sum(item["picked"] == "A" for item in items) / 6
    for item in items:
        assert item["picked"] == "ABC"[max(range(3), key=item["logps"].__getitem__)] and max(item["logps"]) < 0
    write_suite(tmp_path, rows, delimiter=" ")
    code, _, err = kl_comedy(*words)
    assert code == 2 and "cannot encode" in err  # the pocket tokenizer has no space


def test_a_mistaken_suite_of_a_run_is_reported_before_it_begins(kl_comedy, sums):
    for name, message in (("gsm9k", "did you mean 'gsm8k'"), (sums, "nor another suite")):
        code, _, err = kl_comedy("train", TINY, f"eval.suites=[{name},{sums}]")
        assert code == 2 and message in " ".join(err.split()), err
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


def test_a_mistake_is_one_sentence_and_exit_2(kl_comedy, sums, tmp_path):
    (tmp_path / "short.jsonl").write_text('{"problem": "1+1", "answer": "2"}\n')
    (tmp_path / "nogold.jsonl").write_text('{"problem": "1+1"}\n')
    (tmp_path / "badgold.jsonl").write_text('{"problem": "1+1", "answer": "?"}\n')
    (tmp_path / "badgold.yaml").write_text(yaml.safe_dump({**SUMS, "data": None, "file": {"path": "badgold.jsonl"}}))
    for words, message in MISTAKES:
        code, out, err = kl_comedy("evaluate", *MODEL, *words)
        assert code == 2 and out == "", (words, err)
        assert message in " ".join(err.split()) and "Traceback" not in err, (words, err)
    assert not list(Path("evaluations").glob("*/*/items.jsonl"))
