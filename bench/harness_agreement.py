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

# From lm-eval's own gsm8k task: the regular expression of its filter, and what its metric ignores.
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
        # In the order of PARTS, whatever the order on the command line: the page has that order.
        for part in PARTS:
            if part not in args.parts.split(","):
                continue
            if part == "verdicts":
                results[part] = compare_verdicts(args)
            else:
                results[part] = compare(part, args, folder)
            # After each part, because one may take hours and the next may fail.
            write(results, args)
    print((args.out / "README.md").read_text())


# --- run both ----------------------------------------------------------------------------------------------------
def write_suites(folder: Path, args: argparse.Namespace) -> None:
    """Write kl_comedy suites as YAML files with the options of this comparison."""
    # Shipped suites with the fewest changes that make both packages ask the same.
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
    limit = getattr(args, PARTS[suite])
    command = [sys.executable, "-m", "kl_comedy.cli", "evaluate", args.model]
    command += ["--suite", str(folder / f"{suite}.yaml")]
    command += ["--data-root", str(args.data_root.resolve())]
    command += ["--limit", str(limit)]
    command += ["--out", str(folder / "ours")]
    command += ["--format", "json", "tracking.uri=none"]
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
    task: dict[str, Any] = {
        "task": f"custom_{suite}",
        "dataset_path": "json",
        "test_split": "test",
        "num_fewshot": 0,
        "dataset_kwargs": {"data_files": {"test": str(data)}},
    }
    if suite == "gsm8k":
        task |= generative(args)
    else:
        task |= multiple_choice(suite)
    results: dict[str, Any] = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": args.model, "dtype": "float32"},
        tasks=[task],
        batch_size=8,
        device="cpu",
        # No resampling for intervals: the page has those of kl_comedy.
        bootstrap_iters=0,
        log_samples=True,
        apply_chat_template=suite == "gsm8k",
        # None of its own tasks is used, and listing them takes long.
        task_manager=TaskManager(include_defaults=False),
    )
    return results


def documents(suite: str, rows: Sequence[Mapping[str, Any]], args: argparse.Namespace) -> list[dict[str, Any]]:
    """The data file's entries of the evaluated items, in the same order."""
    name = "gsm8k_test.jsonl" if suite == "gsm8k" else "mmlu_stem_test.jsonl"
    items_by_id = {item["id"]: item for item in json_lines(args.data_root / name)}
    # What the tasks below read.
    columns = ("id", "problem", "answer", "choices", "subject")
    entries = []
    for row in rows:
        item = items_by_id[row["id"]]
        entries.append({column: item[column] for column in columns if column in item})
    return entries


def json_lines(file: Path) -> list[dict[str, Any]]:
    """The objects of a JSON Lines file.

    Split at newlines only: ``splitlines`` would also split at separators that JSON allows inside a string.
    """
    lines = file.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines if line]


def generative(args: argparse.Namespace) -> dict[str, Any]:
    """The part of lm-eval's task that asks for a completion and judges it as its gsm8k task does."""
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
    """The part of lm-eval's task that scores letters or texts of options. ``{{ }}`` is Jinja."""
    metrics = [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")]
    task = {"output_type": "multiple_choice", "doc_to_target": f"{{{{'{LETTERS}'.index(answer)}}}}"}
    if suite == "mmlu_texts":
        return {
            **task,
            "doc_to_text": "Question: {{problem}}\nAnswer:",
            "doc_to_choice": "{{choices}}",
            "metric_list": metrics,
        }
    # The prompt of kl_comedy's suite, word for word.
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
    """Evaluate one suite with both, and compare them item by item."""
    row, items = ours(suite, args, folder)
    result = theirs(suite, items, args, folder)
    # lm-eval's samples are not in the order of the file.
    samples = sorted(result["samples"][f"custom_{suite}"], key=lambda sample: sample["doc_id"])
    assert [sample["doc"]["id"] for sample in samples] == [item["id"] for item in items]

    pairs = list(zip(items, samples, strict=True))
    prompts_equal = sum(sample["arguments"][0][0] == item["prompt"] for item, sample in pairs)
    if suite == "gsm8k":
        agreement = _completions_agreement(pairs)
    else:
        agreement = _choices_agreement(pairs)
    interval = [row["accuracy_low"], row["accuracy_high"]]
    return {
        "asked": getattr(args, PARTS[suite]),
        "items": len(items),
        "prompts_equal": prompts_equal,
        "ours": {"accuracy": row["accuracy"], "interval_95": interval},
        **agreement,
    }


def _completions_agreement(pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> dict[str, Any]:
    """Counts over pairs of kl_comedy's record and lm-eval's sample of the same item."""
    items = []
    for item, sample in pairs:
        items.append(
            {
                "id": item["id"],
                "completion_equal": sample["resps"][0][0] == item["completion"],
                "ours": bool(item["correct"]),
                "theirs": bool(sample["exact_match"]),
            }
        )
    return {
        "theirs": {"accuracy": sum(item["theirs"] for item in items) / len(items)},
        "completions_equal": sum(item["completion_equal"] for item in items),
        "verdicts_equal": sum(item["ours"] == item["theirs"] for item in items),
        "per_item": items,
    }


def _choices_agreement(pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> dict[str, Any]:
    """Counts over pairs of kl_comedy's record and lm-eval's sample of the same item; log-probs in nats."""
    items = []
    for item, sample in pairs:
        logps = [float(response[0][0]) for response in sample["resps"]]
        # The first of equal ones.
        likeliest = logps.index(max(logps))
        items.append(
            {
                "id": item["id"],
                "ours": item["picked"],
                "theirs": LETTERS[likeliest],
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

    all_rows = json_lines(args.data_root / "verify_gsm8k_openai.jsonl")
    # Spread over the file, which is in the order of the problems.
    rows = all_rows[:: max(len(all_rows) // args.recorded, 1)]
    answers = [row["answer"] for row in rows]
    rewards = score("math_verify", completions=answers, answers=[row["gold"] for row in rows])
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
    previous = json.loads(file.read_text())
    now = identity(args)
    same_identity = all(previous.get(key) == value for key, value in now.items())
    if not same_identity:
        sys.exit(f"{file} has another model, other packages or another --tokens; choose another --out")
    return dict(previous["suites"])


def write(results: Mapping[str, Any], args: argparse.Namespace) -> None:
    """Write the JSON file and the page."""
    now = identity(args)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "agreement.json").write_text(json.dumps(now | {"suites": results}, indent=1) + "\n")
    (args.out / "README.md").write_text(page(results, now["versions"], args))


def page(results: Mapping[str, Any], versions: Mapping[str, str], args: argparse.Namespace) -> str:
    """The content of results/harness/README.md."""
    names = ", ".join(f"{name} {number}" for name, number in versions.items())
    counts = []
    for part, option in PARTS.items():
        if part in results:
            counts.append(f"--{option} {results[part]['asked']}")
    lines = [
        "# Agreement with lm-eval",
        "",
        "<!-- python research/scripts/stored_tables.py harness -->",
        "",
        f"`python bench/harness_agreement.py --data-root DATA --tokens {args.tokens} {' '.join(counts)}`, "
        f"{Path(args.model).name}, float32, CPU; {names}.",
        "",
        "The same items, prompts (as text, and so as tokens of the one tokenizer) and weights through both; greedy. "
        "Item by item in [agreement.json](agreement.json).",
        "",
        "| suite | items | prompts equal | ours [95%] | lm-eval | verdicts equal | further |",
        "|---|---:|---:|---|---:|---:|---|",
    ]
    for name in PARTS:
        if name in results and name != "verdicts":
            lines.append(_line(name, results[name]))
    if "verdicts" in results:
        lines += _verdict_lines(results["verdicts"])
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
    # A suite without items has no interval, and its row would say nothing.
    assert math.isfinite(low) and math.isfinite(high)
    if "completions_equal" in row:
        further = f"completions equal: {row['completions_equal']}"
    else:
        further = (
            f"picks equal: {row['picks_equal']}; norm: {row['accuracy_norm'][0]:.3f}, {row['accuracy_norm'][1]:.3f}; "
            f"largest gap of a log-prob: {row['largest_logp_gap_nats']:.1e} nats"
        )
    return (
        f"| {name} | {row['items']} | {row['prompts_equal']} | {row['ours']['accuracy']:.3f} [{low:.3f}, {high:.3f}] | "
        f"{row['theirs']['accuracy']:.3f} | {row['verdicts_equal']} | {further} |"
    )


if __name__ == "__main__":
    main()
