"""Compare `kl-comedy evaluate` with lm-eval on the same items, prompts and model, item by item.

    pip install lm-eval        # in the environment of kl_comedy; not a dependency
    python bench/harness_agreement.py --data-root DATA --out results/harness

DATA holds gsm8k_test.jsonl, mmlu_stem_test.jsonl and verify_gsm8k_openai.jsonl (docs/evaluation.md). Compares:

- gsm8k, generated greedily with the chat template: prompts, completions and verdicts (kl_comedy: math-verify; lm-eval:
  the filter `flexible-extract` and `exact_match` of its gsm8k task);
- the two verdicts on recorded answers of other models, which are more often correct;
- MMLU scored by the log-prob of the letter or of the option's text: log-probs, picks and accuracies.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

GSM8K_REGEX = r"(-?[$0-9.,]{2,})|(-?[0-9]+)"
IGNORED = [",", r"\$", "(?s).*#### ", r"\.$"]
MATCH = {"metric": "exact_match", "regexes_to_ignore": IGNORED, "ignore_case": True, "ignore_punctuation": False}
FLEXIBLE = [{"function": "regex", "group_select": -1, "regex_pattern": GSM8K_REGEX}, {"function": "take_first"}]
LETTERS = "ABCDEFGHIJ"
PARTS = {"verdicts": "recorded", "gsm8k": "gsm8k", "mmlu_letters": "letters", "mmlu_texts": "texts"}
"""Parts of the comparison, and the option that limits the items of each."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, required=True)
    parser.add_argument("--model", default="models/SmolLM2-135M-Instruct")
    parser.add_argument("--out", type=Path, default=Path("results/harness"))
    parser.add_argument("--gsm8k", type=int, default=48, help="problems")
    parser.add_argument("--tokens", type=int, default=96, help="new tokens of a completion")
    parser.add_argument("--letters", type=int, default=102, help="problems scored by their letters")
    parser.add_argument("--texts", type=int, default=60, help="problems scored by their options' texts")
    parser.add_argument("--recorded", type=int, default=600, help="recorded answers judged by both")
    parser.add_argument("--parts", default=",".join(PARTS), help="parts to run; other parts in --out are kept")
    args = parser.parse_args()
    if not set(args.parts.split(",")) <= set(PARTS):
        parser.error(f"--parts: got {args.parts!r}; allowed: {', '.join(PARTS)}")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    results = previous_results(args)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_suites(folder, args)
        for part in (part for part in PARTS if part in args.parts.split(",")):
            results[part] = compare_verdicts(args) if part == "verdicts" else compare(part, args, folder)
            write(results, args)  # after each part, because one may take long
    print((args.out / "README.md").read_text())


# --- run both ----------------------------------------------------------------------------------------------------
def write_suites(folder: Path, args: argparse.Namespace) -> None:
    """Write kl_comedy suites as YAML files with the options of this comparison."""
    suites: dict[str, dict[str, Any]] = {
        "gsm8k": {"extends": "gsm8k", "max_new_tokens": args.tokens},
        "mmlu_letters": {"extends": "mmlu_college_physics_likelihood"},
        "mmlu_texts": {
            "extends": "mmlu_college_biology_likelihood",
            "text": "Question: {text}\nAnswer:",
            "score": "texts",
        },
    }
    for name, keys in suites.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(keys))


def ours(suite: str, args: argparse.Namespace, folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Scores and records of `kl-comedy evaluate`."""
    command = [
        sys.executable,
        "-m",
        "kl_comedy.cli",
        "evaluate",
        args.model,
        "--suite",
        str(folder / f"{suite}.yaml"),
        "--data-root",
        str(args.data_root.resolve()),
        "--limit",
        str(getattr(args, PARTS[suite])),
        "--out",
        str(folder / "ours"),
        "--format",
        "json",
        "tracking.uri=none",
    ]
    completed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    (row,) = json.loads(completed.stdout)
    lines = (Path(row["records"]) / "items.jsonl").read_text().splitlines()
    return row, [json.loads(line) for line in lines]


def theirs(suite: str, rows: Sequence[Mapping[str, Any]], args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run lm-eval on the same items with a custom task that reads a local file."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    data = folder / f"{suite}.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in documents(suite, rows, args)))
    task = {"task": f"custom_{suite}", "dataset_path": "json", "test_split": "test", "num_fewshot": 0}
    task["dataset_kwargs"] = {"data_files": {"test": str(data)}}
    task |= generative(args) if suite == "gsm8k" else multiple_choice(suite)
    return lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": args.model, "dtype": "float32"},
        tasks=[task],
        batch_size=8,
        device="cpu",
        bootstrap_iters=0,
        log_samples=True,
        apply_chat_template=suite == "gsm8k",
        task_manager=TaskManager(include_defaults=False),
    )


def documents(suite: str, rows: Sequence[Mapping[str, Any]], args: argparse.Namespace) -> list[dict[str, Any]]:
    """The data file's entries of the evaluated items, in the same order."""
    name = "gsm8k_test.jsonl" if suite == "gsm8k" else "mmlu_stem_test.jsonl"
    lines = (args.data_root / name).read_text(encoding="utf-8").split("\n")
    by_id = {item["id"]: item for item in map(json.loads, filter(None, lines))}
    keep = ("id", "problem", "answer", "choices", "subject")
    return [{key: by_id[row["id"]][key] for key in keep if key in by_id[row["id"]]} for row in rows]


def generative(args: argparse.Namespace) -> dict[str, Any]:
    ask = "Please reason step by step, and put your final answer within \\boxed{}."
    return {
        "output_type": "generate_until",
        "doc_to_text": "{{problem}}\n\n" + ask,
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["<|im_end|>"], "do_sample": False, "max_gen_toks": args.tokens},
        "filter_list": [{"name": "flexible-extract", "filter": FLEXIBLE}],
        "metric_list": [{**MATCH, "aggregation": "mean", "higher_is_better": True}],
    }


def multiple_choice(suite: str) -> dict[str, Any]:
    metrics = [{"metric": m, "aggregation": "mean", "higher_is_better": True} for m in ("acc", "acc_norm")]
    task = {"output_type": "multiple_choice", "doc_to_target": f"{{{{'{LETTERS}'.index(answer)}}}}"}
    if suite == "mmlu_texts":
        return {
            **task,
            "doc_to_text": "Question: {{problem}}\nAnswer:",
            "doc_to_choice": "{{choices}}",
            "metric_list": metrics,
        }
    lines = "".join(f"\n{letter}. {{{{choices[{n}]}}}}" for n, letter in enumerate("ABCD"))
    head = "The following are multiple choice questions (with answers) about {{subject.replace('_', ' ')}}.\n\n"
    return {
        **task,
        "doc_to_text": head + "{{problem}}" + lines + "\nAnswer:",
        "doc_to_choice": ["A", "B", "C", "D"],
        "metric_list": metrics,
    }


# --- compare -----------------------------------------------------------------------------------------------------
def compare(suite: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    row, rows = ours(suite, args, folder)
    result = theirs(suite, rows, args, folder)
    samples = sorted(result["samples"][f"custom_{suite}"], key=lambda sample: sample["doc_id"])
    assert [sample["doc"]["id"] for sample in samples] == [item["id"] for item in rows]
    prompts = sum(sample["arguments"][0][0] == item["prompt"] for sample, item in zip(samples, rows, strict=True))
    pairs = list(zip(rows, samples, strict=True))
    results = _completions_agreement(pairs) if suite == "gsm8k" else _choices_agreement(pairs)
    interval = [row["accuracy_low"], row["accuracy_high"]]
    return {
        "asked": getattr(args, PARTS[suite]),
        "items": len(rows),
        "prompts_equal": prompts,
        "ours": {"accuracy": row["accuracy"], "interval_95": interval},
        **results,
    }


def _completions_agreement(pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> dict[str, Any]:
    items = [
        {
            "id": item["id"],
            "completion_equal": sample["resps"][0][0] == item["completion"],
            "ours": bool(item["correct"]),
            "theirs": bool(sample["exact_match"]),
        }
        for item, sample in pairs
    ]
    return {
        "theirs": {"accuracy": sum(item["theirs"] for item in items) / len(items)},
        "completions_equal": sum(item["completion_equal"] for item in items),
        "verdicts_equal": sum(item["ours"] == item["theirs"] for item in items),
        "per_item": items,
    }


def _choices_agreement(pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> dict[str, Any]:
    items = []
    for item, sample in pairs:
        logps = [float(response[0][0]) for response in sample["resps"]]
        items.append(
            {
                "id": item["id"],
                "ours": item["picked"],
                "theirs": LETTERS[max(range(len(logps)), key=logps.__getitem__)],
                "correct": [bool(item["correct"]), bool(sample["acc"])],
                "correct_norm": [bool(item["correct_norm"]), bool(sample["acc_norm"])],
                "logp_gap": max(abs(a - b) for a, b in zip(item["logps"], logps, strict=True)),
            }
        )
    total = len(items)
    return {
        "theirs": {"accuracy": sum(item["correct"][1] for item in items) / total},
        "accuracy_norm": [sum(item["correct_norm"][side] for item in items) / total for side in (0, 1)],
        "picks_equal": sum(item["ours"] == item["theirs"] for item in items),
        "verdicts_equal": sum(item["correct"][0] == item["correct"][1] for item in items),
        "verdicts_norm_equal": sum(item["correct_norm"][0] == item["correct_norm"][1] for item in items),
        "largest_logp_gap_nats": max(item["logp_gap"] for item in items),
        "per_item": items,
    }


def compare_verdicts(args: argparse.Namespace) -> dict[str, Any]:
    """Both verdicts on recorded answers to GSM8K problems, and the label of each answer."""
    from lm_eval.api.metrics import exact_match_hf_evaluate
    from lm_eval.filters.extraction import RegexFilter

    from kl_comedy.rewards import score

    lines = (args.data_root / "verify_gsm8k_openai.jsonl").read_text(encoding="utf-8").split("\n")
    rows = [json.loads(line) for line in lines if line]
    rows = rows[:: max(len(rows) // args.recorded, 1)]
    rewards = score("math_verify", completions=[r["answer"] for r in rows], answers=[r["gold"] for r in rows])
    regex_filter = RegexFilter(regex_pattern=GSM8K_REGEX, group_select=-1)
    options = {key: value for key, value in MATCH.items() if key != "metric"}
    items = []
    for row, reward in zip(rows, rewards, strict=True):
        ((prediction,),) = regex_filter.apply([[row["answer"]]], [{}])
        results = exact_match_hf_evaluate(predictions=[prediction], references=[row["gold"]], **options)
        theirs = bool(results["exact_match"])
        items.append({"id": row["id"], "ours": reward.value == 1.0, "theirs": theirs, "label": row["expected"]})
    return {
        "asked": args.recorded,
        "items": len(items),
        "label_right": sum(item["label"] for item in items),
        "ours_equal_label": sum(item["ours"] == item["label"] for item in items),
        "theirs_equal_label": sum(item["theirs"] == item["label"] for item in items),
        "verdicts_equal": sum(item["ours"] == item["theirs"] for item in items),
        "differ": [item for item in items if item["ours"] != item["theirs"]],
    }


# --- output ------------------------------------------------------------------------------------------------------
def identity(args: argparse.Namespace) -> dict[str, Any]:
    """Versions and settings that all parts of one page must share."""
    from importlib.metadata import version

    versions = {name: version(name) for name in ("lm-eval", "transformers", "torch", "math-verify")}
    return {"versions": versions, "model": Path(args.model).name, "tokens": args.tokens}


def previous_results(args: argparse.Namespace) -> dict[str, Any]:
    """The parts already in ``--out``. Exits if their model, packages or completion length differ."""
    file = args.out / "agreement.json"
    if not file.exists():
        return {}
    previous, now = json.loads(file.read_text()), identity(args)
    if {key: previous.get(key) for key in now} != now:
        sys.exit(f"{file} has another model, other packages or another --tokens; choose another --out")
    return dict(previous["suites"])


def write(results: Mapping[str, Any], args: argparse.Namespace) -> None:
    now = identity(args)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "agreement.json").write_text(json.dumps(now | {"suites": results}, indent=1) + "\n")
    (args.out / "README.md").write_text(page(results, now["versions"], args))


def page(results: Mapping[str, Any], versions: Mapping[str, str], args: argparse.Namespace) -> str:
    names = ", ".join(f"{name} {number}" for name, number in versions.items())
    counts = " ".join(f"--{option} {results[part]['asked']}" for part, option in PARTS.items() if part in results)
    lines = [
        "# Agreement with lm-eval",
        "",
        "<!-- python research/scripts/stored_tables.py harness -->",
        "",
        f"`python bench/harness_agreement.py --data-root DATA --tokens {args.tokens} {counts}`, "
        f"{Path(args.model).name}, float32, CPU; {names}.",
        "",
        "The same items, prompts (as text, and so as tokens of the one tokenizer) and weights through both; greedy. "
        "Item by item in [agreement.json](agreement.json).",
        "",
        "| suite | items | prompts equal | ours [95%] | lm-eval | verdicts equal | further |",
        "|---|---:|---:|---|---:|---:|---|",
    ]
    lines += [_line(name, results[name]) for name in PARTS if name in results and name != "verdicts"]
    lines += _verdict_lines(results["verdicts"]) if "verdicts" in results else []
    return "\n".join([*lines, "", *REMARKS]) + "\n"


def _verdict_lines(row: Mapping[str, Any]) -> list[str]:
    return [
        "",
        f"Verdicts alone, on {row['items']} recorded answers of other models to GSM8K problems "
        f"({row['label_right']} labelled right): math-verify and lm-eval's `flexible-extract` agree on "
        f"{row['verdicts_equal']}; math-verify agrees with the label on {row['ours_equal_label']}, lm-eval on "
        f"{row['theirs_equal_label']}.",
    ]


REMARKS = [
    "- `gsm8k`: ours judges by math-verify, lm-eval by its own task's regular expression; completions are cut early, "
    "so few are right, and agreement of verdicts says little there: hence the recorded answers.",
    "- `mmlu_letters` (college physics) picks the likeliest letter, `mmlu_texts` (college biology) the likeliest text; "
    "`norm`: per character. ARC-Challenge is asked as `mmlu_texts` is.",
]


def _line(name: str, row: Mapping[str, Any]) -> str:
    low, high = row["ours"]["interval_95"]
    if "completions_equal" in row:
        further = f"completions equal: {row['completions_equal']}"
    else:
        further = (
            f"picks equal: {row['picks_equal']}; norm: {row['accuracy_norm'][0]:.3f}, {row['accuracy_norm'][1]:.3f}; "
            f"largest gap of a log-prob: {row['largest_logp_gap_nats']:.1e} nats"
        )
    assert math.isfinite(low) and math.isfinite(high)
    return (
        f"| {name} | {row['items']} | {row['prompts_equal']} | {row['ours']['accuracy']:.3f} [{low:.3f}, {high:.3f}] | "
        f"{row['theirs']['accuracy']:.3f} | {row['verdicts_equal']} | {further} |"
    )


if __name__ == "__main__":
    main()
