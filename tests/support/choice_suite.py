"""A suite by log-prob over what the pocket policy can spell."""

import json

import yaml


def problem(n, **changes):
    """A sum of one term and the choices of its answer; the first is right."""
    right = str(n + n % 7)
    choices = [right, right[::-1] + "1", "0"]
    return {"id": str(n), "problem": f"{n}+{n % 7}=", "choices": choices, "answer": "A"} | changes


def write_suite(folder, rows, name="pick", **changes):
    """The suite's file, which lies beside its rows; ``changes`` are keys of the suite."""
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    suite = {
        "kind": "likelihood",
        "file": {"path": f"{name}.jsonl"},
        "score": "texts",
        "template": "plain",
        "delimiter": "",
    }
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(suite | changes))
    return folder / f"{name}.yaml"
