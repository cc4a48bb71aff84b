"""Score ``kl-comedy explain FILE`` on the drawn public launch files that a person labelled.

python research/scripts/score_launch_files.py --sources DIR

reads every labelled file (tests/peers/drawn_launch_files*.jsonl), and writes results/launch_files/score.json and the
tables of the README beside it. DIR holds the drawn files: clones of their repositories, bare or with a work tree, at
any depth, or the files themselves under any name. A file is the drawn one if the sha256 of its bytes is the label's.
Each is read alone, in an empty folder under its own name, as a user reads a file that someone sent: no base config lies
beside it. The reader is the installed ``kl_comedy``; another version of it is scored with PYTHONPATH.

The rules, written before any file was read:

1. An answer for a file of ``kind: rl`` is compared with the label field by field.
   - system: the label's text must name it. "own config (unsloth and trl)" names two, and both are right.
   - placement: the places of all terms with a coefficient that is not 0. A pull to the sampler or the old policy is
     another place than a KL to the reference. A KL to a teacher is not compared. A reward term at the current
     log-probs is differentiated, and counts as the loss. A label's advantage counts as the reward.
   - estimator and beta: those of the label's terms. beta (log-ratio)^2 is k2 with twice the beta.
   - ratio: a term in the loss has one if it carries the ratio of the policies, or the gradient of another estimator,
     exactly where the label has a ``correction``. (In the reward the ratio is that of the policy loss, which the label
     does not count.)
2. A field that differs is still right if a remark or a note says so, in one of two ways.
   - The label says that the value stands elsewhere (``from`` a base config or a called script, or an ``unknown`` that
     names it, or one that leaves the options to the command line), and a remark says that something is not read, not
     in the file, or left to the command line. "No flag is set in the file, the answer is the defaults" does not say
     that. The number of a beta that stands in the file must be in a remark.
   - A remark says that another version of the system does what the label has: it names the place, the estimator, the
     number (or the answer has the number as a flag) or the ratio, and a version word such as before, since, older.
   Both are counted apart, as "right in a remark".
3. An answer in words ("in a form that no term of ours has") is right if its text names the label's estimators and
   betas, wrong if the label has no KL, and a refusal otherwise. Rule 2 holds for it too: where the label leaves all
   to another file and a remark says that this is not read, it is right in a remark.
4. An error that names another kind of run than the label's is wrong, and so is a traceback. An error that says which
   part is not read or does not stand in the file is right where the label's ``unknown`` leaves everything to it. Any
   other error is a refusal; it is right only if the label names no system that ``explain`` knows.
5. Files of other kinds are right if the error names the kind (a distillation is also right if the answer has a term
   to a teacher) and the system, where ``explain`` knows that. An error of rule 4 that does not name the kind is a
   refusal, with the same two exceptions. Any other answer is wrong.
6. Where the label says that the KL does not stand in the file (``kl: unknown``), no field is compared: an answer is
   right in a remark if a remark says what was not read, and wrong otherwise.
7. Files that are no training were passed over in the draw and are counted apart: an answer for one is wrong. The first
   draws counted programs of the systems among them that train with a config of their caller, which later draws label
   by rule 6: an answer that opens with what it assumes of that config is right in a remark.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from table_comments import with_unchecked_comments

ROOT = Path(__file__).resolve().parents[2]
LABELS = ROOT / "tests" / "peers"
RESULTS = ROOT / "results" / "launch_files"
SCORE = RESULTS / "score.json"
DRAWS = {
    "drawn_launch_files.jsonl": "first draw",
    "drawn_launch_files_2.jsonl": "second draw",
    "drawn_launch_files_3.jsonl": "third draw, its first 60 files",
    "drawn_launch_files_4.jsonl": "third draw, the other files",
    "drawn_launch_files_5.jsonl": "other users' repositories",
    "drawn_launch_files_6.jsonl": "fourth draw",
    "drawn_launch_files_7.jsonl": "fifth draw, its first half",
    "drawn_launch_files_8.jsonl": "fifth draw, its second half",
}
"""What the page calls the labelled files, by the file of their labels."""

MARK_START = "<!-- generated: scores -->"
MARK_END = "<!-- end: scores -->"

OUTCOMES = ("right", "right in a remark", "refused", "wrong")
UNANSWERED = "right, as the file cannot tell"
"""Those of the right rl files of which the reader says that the KL does not stand in them."""
FIELDS = ("placement", "estimator", "beta", "ratio")
"""What an answer and a label are compared by (rule 1), beside the system."""
ELSEWHERE = ("base config", "called script")
NOT_A_TRAINING = "not a training"

KIND_WORDS = {
    "sft": r"supervised|\bSFT\b",
    "dpo": r"preference|\bDPO\b",
    "reward model": r"reward model",
    "distillation": r"distillation",
    "KTO": r"preference|\bKTO\b",
    "ORPO": r"preference|\bORPO\b",
    "fine-tuning of a classifier": r"supervised|classifi",
    "pretraining": r"pre-?training",
}
"""Which words of an error name a kind, by the label's kind, or by its note where the kind is ``other``."""

NAMES_A_KIND = re.compile(r"it is (.*?)\. --system|none of the KL flags")
NOT_HERE = re.compile(
    r"\bnot read\b|\bnot in (the|this) file\b|\b(of|on|to) the command line\b|\bno(t a)? literal\b|"
    r"\bstands? in\b|\bstands? elsewhere\b|\bregistered elsewhere\b|\bleft to\b|\ban option of the file\b"
)
"""What a remark or an error says of a value that the file leaves to others."""
ASSUMES = "the KL does not stand in this file: "
"""How an answer begins that rests on a config or a script which was not read."""
VERSION_WORDS = re.compile(r"\b(since|before|up to|new in|older|earlier|later|until|by default in)\b")
"""What a remark on another version of a system says (rule 2)."""
ALL_ELSEWHERE = re.compile(r"\bstands? in\b|\bholds all\b|\bown (code|runner)\b|\bbase config\b|\bbecomes\b")
"""What a label's ``unknown`` says of values that stand in another file."""
CALLER = re.compile(r"\bcommand line\b|\bof the caller\b")
"""What a label's ``unknown`` says where any option may come from the command line."""
FIELD_WORDS = {
    "estimator": r"\bestimator\b",
    "beta": r"\b(beta|kl_coeff?)\b",
    "placement": r"\b(use_kl_loss|anchor|reference)\b",
}
"""Which words of a label's ``unknown`` name a field."""


@dataclass(frozen=True)
class Answer:
    """What explain says of one file. ``error`` is empty where it gives an answer."""

    system: str = ""
    terms: tuple[Mapping[str, Any], ...] = ()
    instead: str = ""
    given: Mapping[str, Any] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    error: str = ""
    is_traceback: bool = False


@dataclass(frozen=True)
class Verdict:
    """Whether an answer is right: one of :data:`OUTCOMES`."""

    outcome: str
    faults: tuple[str, ...] = ()
    """What is wrong, or what only a remark says, in one line each."""


# --- the files ----------------------------------------------------------------------------------------------------
def find_sources(folder: Path, labels: Sequence[Mapping[str, Any]]) -> dict[str, bytes]:
    """The bytes of the drawn files below ``folder``, by their sha256."""
    labelled = {label["sha256"] for label in labels}
    sources: dict[str, bytes] = {}
    clones: list[Path] = []
    # Sorted, so that a clone comes before the files in it.
    for path in sorted(folder.rglob("*")):
        if _is_git_folder(path):
            clones.append(path)
        elif path.is_file() and not any(clone in path.parents for clone in clones):
            content = path.read_bytes()
            digest = hashlib.sha256(content).hexdigest()
            if digest in labelled:
                sources[digest] = content
    for label in labels:
        for clone in clones:
            if label["sha256"] in sources:
                break
            content = _from_clone(clone, label)
            if hashlib.sha256(content).hexdigest() == label["sha256"]:
                sources[label["sha256"]] = content
    return sources


def _is_git_folder(path: Path) -> bool:
    """Whether a path is the .git of a work tree, which may be a file, or a bare clone."""
    if path.name == ".git":
        return True
    return (path / "HEAD").is_file() and (path / "objects").is_dir()


def _from_clone(clone: Path, label: Mapping[str, Any]) -> bytes:
    """The labelled file out of a clone; empty where it has no such commit or path."""
    command = ["git", "--git-dir", str(clone), "show", f"{label['commit']}:{label['path']}"]
    return subprocess.run(command, capture_output=True, check=False).stdout


def explain_alone(name: str, content: bytes) -> Answer:
    """What the installed reader says of a file that lies in a folder of its own."""
    from kl_comedy.errors import UserError
    from kl_comedy.peers.launch_files import read_launch_file

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(content)
        try:
            launch = read_launch_file(path)
            reading = launch.reading()
        except UserError as error:
            message = str(error).replace(str(path), name)
            # The list of all systems would be most of every row.
            return Answer(error=re.sub(r"no system of .*? recognised", "no system recognised", message))
        except Exception as error:
            # A fault of the reader, which is what the score is about.
            return Answer(error=f"{type(error).__name__}: {error}", is_traceback=True)
    return Answer(
        system=launch.system.name,
        terms=tuple(_term_row(term) for term in reading.terms or ()),
        instead=reading.instead,
        given=dict(launch.given),
        remarks=(*launch.remarks, *reading.notes, *reading.no_ops),
    )


def _term_row(term: Any) -> dict[str, Any]:
    """The fields of a term that a label has too."""
    # A reward term at the current log-probs is differentiated, and counts as the loss (rule 1).
    is_differentiated = term.placement == "loss" or term.anchor != "behaviour"
    place = "reward"
    if is_differentiated and term.reference != "teacher":
        place = "loss"
    ratio = "some"
    if term.correction == "none" and term.gradient == "natural":
        ratio = "none"
    return {
        "place": place,
        "estimator": term.estimator,
        "beta": term.beta,
        "reference": term.reference,
        "ratio": ratio,
    }


# --- verdicts -----------------------------------------------------------------------------------------------------
def verdict(label: Mapping[str, Any], answer: Answer, systems: Mapping[str, str]) -> Verdict:
    """The verdict on one answer. ``systems`` are the titles of the systems that explain knows, by name."""
    if label["kind"] == NOT_A_TRAINING:
        if answer.error and not answer.is_traceback:
            return Verdict("right")
        if any(remark.startswith(ASSUMES) for remark in answer.remarks):
            return Verdict("right in a remark", ("all settings are its caller's, as the first line says",))
        return Verdict("wrong", (f"read as a run of {answer.system or answer.error}",))
    if answer.is_traceback:
        return Verdict("wrong", (f"a traceback: {answer.error[:100]}",))
    expected = names_in(label["system"], systems)
    if answer.error:
        return _verdict_on_error(label, answer, expected, systems)
    if label["kind"] != "rl":
        return _verdict_on_another_kind(label, answer)
    if answer.system not in expected:
        return Verdict("wrong", (f"system {answer.system}, not {label['system']}",))
    if label["kl"] == "unknown":
        return _verdict_on_an_open_label(answer)
    if answer.instead:
        return _verdict_on_words(label, answer)
    return _verdict_on_terms(label, answer)


def names_in(text: str, systems: Mapping[str, str]) -> set[str]:
    """The systems that a label's text names: "own (verl)" names verl, "tinker-cookbook" tinker."""
    words = re.split(r"[\s()]+", text.removesuffix("-cookbook"))
    return {word for word in words if word in systems}


def _verdict_on_error(
    label: Mapping[str, Any], answer: Answer, expected: set[str], systems: Mapping[str, str]
) -> Verdict:
    """Rules 4 and 5. ``expected`` are the systems that the label names, of those that explain knows."""
    # Without the file's name, which a message begins with.
    error = answer.error.partition(": ")[2] or answer.error
    if NAMES_A_KIND.search(error):
        if label["kind"] == "rl":
            return _verdict_on_rl_taken_for_another_kind(label, error)
        return _verdict_on_named_kind(label, error, expected, systems)
    if not expected:
        return Verdict("right")
    if NOT_HERE.search(error) and _is_all_open(label):
        return Verdict("right")
    return Verdict("refused", (error[:160],))


def _verdict_on_rl_taken_for_another_kind(label: Mapping[str, Any], error: str) -> Verdict:
    if "it is PPO" in error and label["algorithm"].startswith("ppo"):
        return Verdict("refused", (error[:160],))
    return Verdict("wrong", (f"taken for another kind of run: {error[:160]}",))


def _verdict_on_named_kind(
    label: Mapping[str, Any], error: str, expected: set[str], systems: Mapping[str, str]
) -> Verdict:
    """Of a file of another kind than rl, where the error names a kind."""
    kind = label["kind"]
    if kind == "other":
        kind = label["note"]
    if not re.search(KIND_WORDS[kind], error):
        return Verdict("wrong", (f"taken for another kind of run than {kind}: {error[:160]}",))
    named_system = system_of_error(error, systems)
    if expected and named_system not in expected:
        return Verdict("wrong", (f"system {named_system}, not {label['system']}",))
    return Verdict("right")


def _verdict_on_another_kind(label: Mapping[str, Any], answer: Answer) -> Verdict:
    """Rule 5, where there is an answer to a file of another kind than rl."""
    to_a_teacher = any(term["reference"] == "teacher" for term in answer.terms)
    if label["kind"] == "distillation" and to_a_teacher:
        return Verdict("right")
    return Verdict("wrong", (f"{label['kind']} read as a run of {answer.system} with a KL",))


def _verdict_on_an_open_label(answer: Answer) -> Verdict:
    """Rule 6."""
    if any(NOT_HERE.search(remark) for remark in answer.remarks):
        return Verdict("right in a remark", ("the KL does not stand in the file, as a remark says",))
    return Verdict("wrong", ("the KL does not stand in the file, and no remark says so",))


def _verdict_on_words(label: Mapping[str, Any], answer: Answer) -> Verdict:
    """Rule 3."""
    if label["kl"] == "none":
        says_so = any(NOT_HERE.search(remark) for remark in answer.remarks)
        if says_so and _is_all_open(label):
            return Verdict("right in a remark", ("the KL does not stand in the file, as a remark says",))
        return Verdict("wrong", (f"placement: no KL expected, but: {answer.instead[:100]}",))
    text = " ".join((answer.instead, *answer.remarks))
    names_estimators = all(_names_estimator(text, item["name"]) for item in label["estimators"])
    has_betas = all(_has_number(text, item["value"]) for item in label["betas"])
    if names_estimators and has_betas:
        return Verdict("right")
    return Verdict("refused", (answer.instead[:160],))


def _verdict_on_terms(label: Mapping[str, Any], answer: Answer) -> Verdict:
    """Rules 1 and 2."""
    terms = [term for term in answer.terms if term["reference"] != "teacher" and term["beta"] != 0]
    differences = dict(_differences(label, terms))
    wrong = []
    right_in_a_remark = []
    open_fields = fields_left_open(label)
    for name, difference in differences.items():
        fault = f"{name}: {difference}"
        if _is_said(label, answer, name, name in open_fields):
            right_in_a_remark.append(fault)
        else:
            wrong.append(fault)
    if wrong:
        return Verdict("wrong", tuple(wrong))
    if right_in_a_remark:
        return Verdict("right in a remark", tuple(right_in_a_remark))
    return Verdict("right")


def _differences(label: Mapping[str, Any], terms: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """The fields of the terms that are not the label's, each with both values."""
    expected_places = label_places(label)
    places = {_place_of_term(term) for term in terms}
    if places != expected_places:
        yield "placement", f"{_joined(places)}, not {_joined(expected_places)}"
    if label["kl"] == "none":
        return
    estimators = {term["estimator"] for term in terms}
    expected_estimators = {_our_estimator(item["name"]) for item in label["estimators"]}
    if estimators != expected_estimators:
        yield "estimator", f"{_joined(estimators)}, not {_joined(expected_estimators)}"
    betas = sorted(float(term["beta"]) for term in terms)
    expected_betas = sorted(_our_betas(label))
    if not _are_close(betas, expected_betas):
        yield "beta", f"{_joined(map(str, betas))}, not {_joined(map(str, expected_betas))}"
    terms_in_the_loss = [term for term in terms if term["place"] == "loss"]
    has_ratio = any(term["ratio"] != "none" for term in terms_in_the_loss)
    correction = label.get("correction")
    if terms_in_the_loss and has_ratio != (correction is not None):
        ratio = "one" if has_ratio else "none"
        yield "ratio", f"{ratio}, not {correction or 'none'}"


def label_places(label: Mapping[str, Any]) -> set[str]:
    """Where the label has the KL, in the words of :func:`_place_of_term`."""
    places = {label["kl"]}
    if label["kl"] == "none":
        places = set()
    elif label["kl"] == "both":
        places = {"loss", "reward"}
    elif label["kl"] == "advantage":
        places = {"reward"}
    if label.get("anchor") in ("sampler", "old policy"):
        return {f"sampler, in the {place}" for place in places}
    return places


def _place_of_term(term: Mapping[str, Any]) -> str:
    if term["reference"] == "sampler":
        return f"sampler, in the {term['place']}"
    return str(term["place"])


SQUARE = "squared log-ratio"
"""A label's name of (log-ratio)^2 without the half of k2."""


def _our_estimator(name: str) -> str:
    if name == SQUARE:
        return "k2"
    return name


def _our_betas(label: Mapping[str, Any]) -> list[float]:
    """The label's betas, twice as large for a square that lacks the half of k2."""
    is_square = any(item["name"] == SQUARE for item in label["estimators"])
    factor = 2 if is_square else 1
    return [factor * item["value"] for item in label["betas"]]


def _are_close(betas: Sequence[float], expected: Sequence[float]) -> bool:
    if not betas or not expected:
        return len(betas) == len(expected)
    # NeMo-RL's one KL is two terms of ours, with the same beta.
    different = sorted(set(betas))
    expected_different = sorted(set(expected))
    if len(different) != len(expected_different):
        return False
    for beta, expected_beta in zip(different, expected_different, strict=True):
        if abs(beta - expected_beta) > 1e-6 * abs(expected_beta):
            return False
    return True


# --- what the file leaves to others -------------------------------------------------------------------------------
def fields_left_open(label: Mapping[str, Any]) -> set[str]:
    """The fields of which the label says that their value does not stand in the file."""
    open_fields: set[str] = set()
    for text in label.get("unknown", ()):
        if CALLER.search(text):
            return set(FIELDS)
        if ALL_ELSEWHERE.search(text):
            named = {name for name, words in FIELD_WORDS.items() if re.search(words, text)}
            # A text that names no field says it of all.
            open_fields |= named or set(FIELDS)
    if _stands_elsewhere(label.get("estimators", ())):
        open_fields.add("estimator")
    if _stands_elsewhere(label.get("betas", ())):
        open_fields.add("beta")
    # A beta of 0 elsewhere would be no KL; an estimator elsewhere comes with its ratio.
    if "beta" in open_fields:
        open_fields.add("placement")
    if "estimator" in open_fields:
        open_fields.add("ratio")
    return open_fields


def _stands_elsewhere(items: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the label has any of these values from another file."""
    return any(item["from"] in ELSEWHERE for item in items)


def _is_all_open(label: Mapping[str, Any]) -> bool:
    """Whether the label leaves everything that explain would say to another file (rule 4)."""
    if label["kind"] == "rl":
        return fields_left_open(label) >= {"placement", "beta"}
    return any(ALL_ELSEWHERE.search(text) for text in label.get("unknown", ()))


def _is_said(label: Mapping[str, Any], answer: Answer, name: str, is_open: bool) -> bool:
    """Whether a remark says what the label has where a field of the answer differs from it."""
    if is_open and any(NOT_HERE.search(remark) for remark in answer.remarks):
        return True
    if name == "beta":
        betas_in_the_file = [item["value"] for item in label["betas"] if item["from"] == "file"]
        remarks = " ".join(answer.remarks)
        if betas_in_the_file and all(_has_number(remarks, beta) for beta in betas_in_the_file):
            return True
    remarks_on_versions = [remark for remark in answer.remarks if VERSION_WORDS.search(remark)]
    return any(_says(label, answer, name, remark) for remark in remarks_on_versions)


def _says(label: Mapping[str, Any], answer: Answer, name: str, remark: str) -> bool:
    """Whether a remark on versions names the label's value of a field."""
    if name == "placement":
        if label["kl"] == "none":
            return re.search(r"\bno KL\b", remark) is not None
        return all(re.search(rf"\b{place}\b", remark) for place in label_places(label))
    if name == "estimator":
        return all(_names_estimator(remark, item["name"]) for item in label["estimators"])
    if name == "beta":
        numbers_of_the_answer = [value for value in answer.given.values() if isinstance(value, float)]
        for item in label["betas"]:
            if not _has_number(remark, item["value"]) and item["value"] not in numbers_of_the_answer:
                return False
        return True
    return re.search(r"\b(ratio|score)\b", remark) is not None


def _names_estimator(text: str, name: str) -> bool:
    words = rf"\b{re.escape(name)}\b"
    if name == SQUARE:
        words = r"\(log-ratio\)\^2|squared"
    return re.search(words, text) is not None


def _has_number(text: str, value: float) -> bool:
    return any(float(number) == value for number in re.findall(r"\d+\.?\d*(?:e-?\d+)?", text))


def _joined(values: Any) -> str:
    return " and ".join(sorted(values)) or "none"


# --- tables -------------------------------------------------------------------------------------------------------
def system_of_error(error: str, systems: Mapping[str, str]) -> str:
    """The system of which an error says that a file is none of its runs; empty where it names none."""
    for name, title in systems.items():
        if f"flags of {title} that" in error:
            return name
    return ""


def row_of(label: Mapping[str, Any], answer: Answer, systems: Mapping[str, str]) -> dict[str, Any]:
    """The facts of one file that are stored: what was drawn, the verdict and the system that was recognised."""
    result = verdict(label, answer, systems)
    system = answer.system or system_of_error(answer.error, systems) or "none"
    if system == "none" and " or " in answer.error and "could be" in answer.error:
        system = "several"
    expected = []
    # A file that is no training has no system.
    if "system" in label:
        expected = sorted(names_in(label["system"], systems))
    return {
        "repo": label["repo"],
        "path": label["path"],
        "sha256": label["sha256"],
        "kind": label["kind"],
        "labelled": " or ".join(expected) or "none",
        "recognised": system,
        "is_answered": not answer.error,
        "outcome": result.outcome,
        "faults": list(result.faults),
    }


def score(sources: Mapping[str, bytes], labels: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows of all labelled files. Raises :class:`SystemExit` for one that is not among the sources."""
    from kl_comedy.peers.systems import SYSTEMS

    systems = {name: system.title for name, system in SYSTEMS.items()}
    rows = []
    for label in labels:
        content = sources.get(label["sha256"])
        if content is None:
            raise SystemExit(f"not among the sources: {label['repo']} {label['commit']} {label['path']}")
        answer = explain_alone(Path(label["path"]).name, content)
        rows.append(row_of(label, answer, systems))
    return rows


def counts(rows: Sequence[Mapping[str, Any]]) -> dict[str, Counter[str]]:
    """The outcomes of rl files, of files of other kinds, and of those that are no training; :data:`UNANSWERED` too."""
    groups: dict[str, Counter[str]] = {"rl": Counter(), "other kinds": Counter(), NOT_A_TRAINING: Counter()}
    for row in rows:
        group = groups.get(row["kind"], groups["other kinds"])
        group[row["outcome"]] += 1
        if row["kind"] == "rl" and row["outcome"] == "right" and not row["is_answered"]:
            group[UNANSWERED] += 1
    return groups


def tables(rows_of_draws: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """The counts of each draw, and every file of it that is not right; by what the page calls the draw."""
    lines = [
        "| draw | files | right | of these without an answer | right in a remark | refused | wrong | of |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for draw, rows in rows_of_draws.items():
        for group, outcomes in counts(rows).items():
            total = sum(outcomes[outcome] for outcome in OUTCOMES)
            if total == 0:
                continue
            cells = [f"{outcomes[outcome]} ({outcomes[outcome] / total:.0%})" for outcome in OUTCOMES]
            cells.insert(1, str(outcomes[UNANSWERED]))
            lines.append(f"| {draw} | {group} | {' | '.join(cells)} | {total} |")
    for draw, rows in rows_of_draws.items():
        lines += ["", f"## {draw.capitalize()}", "", *_confusion(rows)]
        for outcome in ("wrong", "refused", "right in a remark"):
            lines += ["", f"### {draw.capitalize()}: {outcome}", "", *_listed(rows, outcome)]
    return "\n".join(lines)


def with_tables(text: str, generated: str) -> str:
    """The text of a page with what stands between the marks replaced."""
    start = text.index(MARK_START) + len(MARK_START)
    end = text.index(MARK_END)
    return f"{text[:start]}\n{generated}\n{text[end:]}"


def _confusion(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The systems that were not recognised as labelled. The first system of a label that names two stands for it."""
    pairs: Counter[tuple[str, str]] = Counter()
    right: Counter[str] = Counter()
    for row in rows:
        if row["kind"] == NOT_A_TRAINING:
            continue
        if row["recognised"] in row["labelled"].split(" or "):
            right[row["labelled"]] += 1
        else:
            pairs[(row["labelled"], row["recognised"])] += 1
    others: dict[str, list[str]] = {name: [] for name in right}
    for (labelled, recognised), count in sorted(pairs.items()):
        others.setdefault(labelled, []).append(f"{recognised} {count}")
    lines = ["| labelled | recognised as labelled | recognised as another |", "|---|---|---|"]
    for name in sorted(others):
        lines.append(f"| {name} | {right[name]} | {', '.join(others[name])} |")
    return lines


def _listed(rows: Sequence[Mapping[str, Any]], outcome: str) -> list[str]:
    """A line for each file with this outcome, and what is wrong with its answer."""
    lines = []
    for row in rows:
        if row["outcome"] == outcome and row["kind"] != NOT_A_TRAINING:
            faults = "; ".join(row["faults"]).replace("\n", " ")
            lines.append(f"- {row['repo']} `{row['path']}` ({row['kind']}, {row['labelled']}): {faults}")
    return lines or ["None."]


def read_labels() -> dict[str, list[dict[str, Any]]]:
    """The labels of all draws, by what the page calls the draw."""
    labels = {}
    for name, draw in DRAWS.items():
        labels[draw] = [json.loads(line) for line in (LABELS / name).read_text().splitlines()]
    return labels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sources", type=Path, required=True, help="the folder of the drawn files or their clones")
    options = parser.parse_args()
    labels = read_labels()
    sources = find_sources(options.sources, [label for draw in labels.values() for label in draw])
    rows = {draw: score(sources, labels_of_draw) for draw, labels_of_draw in labels.items()}
    SCORE.write_text(json.dumps(rows, indent=1) + "\n")
    readme = RESULTS / "README.md"
    readme.write_text(with_tables(readme.read_text(), with_unchecked_comments(tables(rows))))


if __name__ == "__main__":
    main()
