"""The pages under docs/ say what the code is: generated parts are current, names exist, links lead somewhere."""

import ast
import dataclasses
import re
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch

from kl_comedy.config import schema as schema_module
from kl_comedy.evaluation import EvalResult
from kl_comedy.evaluation.scores import score_choices, score_completions
from kl_comedy.models.types import TokenPass
from kl_comedy.records import Experience, Problem, Prompt, Reward, Rollout, Scored
from kl_comedy.statistics import Interval
from kl_comedy.training.metrics import MetricAccumulator, accumulate_behaviour, accumulate_divergence, row_metrics

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "research" / "scripts"))
import generate_docs  # noqa: E402
from doc_tables import kl_terms  # noqa: E402

PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
METRICS = (ROOT / "docs" / "metrics.md").read_text()
DOCUMENTED = re.findall(r"^\| `([^`]+)` \|", METRICS, flags=re.MULTILINE)


def test_generated_parts_are_current():
    pages = set(generate_docs.PAGES) - set(generate_docs.ENUMERATED)
    assert generate_docs.stale_pages(sorted(pages)) == [], "run python research/scripts/generate_docs.py"


@pytest.mark.slow
def test_pages_with_every_term_are_current():
    """test_claims checks the same claims in the fast suite."""
    assert generate_docs.stale_pages(generate_docs.ENUMERATED) == [], "run python research/scripts/generate_docs.py"


def test_there_is_a_page_for_each_estimator_and_no_other():
    pages = {f"estimators/{file.name}" for file in (ROOT / "docs" / "estimators").iterdir()}
    assert pages == set(kl_terms.WHOLE)


def test_the_pages_name_tests_that_exist():
    """Rows of the decision page are rows of the master table, in the regime the page says."""
    text = (ROOT / "tests/exact/test_claims.py").read_text()
    for _, name, regime, row in kl_terms.SITUATIONS:
        assert f'"{row}": (' in text, name
        assert (row in text[text.index("OFF_POLICY = {") :]) == (regime == "off_policy")
    named = [test for page in PAGES for test in re.findall(r"(tests/[\w/]+\.py)::(\w+)", page.read_text())]
    assert len(named) > 3
    assert [(file, test) for file, test in named if f"def {test}(" not in (ROOT / file).read_text()] == []


@pytest.mark.slow
def test_every_planted_bug_fits_the_code_and_is_in_the_table():
    """Not in the default suite: a change of code that a rule no longer fits is no fault of the change."""
    from tests.mutation import MUTANTS, SRC, place_of

    table = (ROOT / "results" / "mutation" / "README.md").read_text()
    places = {bug.name: place_of(bug).file.relative_to(SRC) for bug in MUTANTS}
    assert [name for name, file in places.items() if f"| {name} | `{file}` | `tests/" not in table] == []


def test_every_key_of_every_schema_is_documented():
    schemas = [schema for schema in vars(schema_module).values() if dataclasses.is_dataclass(schema)]
    fields = [(schema.__name__, item) for schema in schemas for item in dataclasses.fields(schema)]
    sections = {item.name for item in dataclasses.fields(schema_module.Config)}
    missing = [(name, item.name) for name, item in fields if not item.metadata.get("doc")]
    assert [(name, key) for name, key in missing if name != "Config" or key not in sections] == []


def test_links_lead_somewhere():
    broken = []
    for page in PAGES:
        text = page.read_text()
        titles = {
            re.sub(r"[^\w\- ]", "", t).strip().lower().replace(" ", "-") for t in re.findall(r"^#+ (.*)$", text, re.M)
        }
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            file, _, anchor = target.partition("#")
            if (file and "://" not in target and not (page.parent / file).exists()) or (
                not file and anchor not in titles
            ):
                broken.append(f"{page.name}: {target}")
    assert broken == []


def test_files_named_in_prose_exist():
    package = ROOT / "src" / "kl_comedy"
    missing = []
    for page in PAGES:
        text = re.sub(r"https?://\S+", "", page.read_text())  # files of other repositories
        names = re.findall(r"(?<![\w/<])((?:[\w.]+/)*[\w.]*\w\.(?:py|yaml|toml))\b(?![\w/])", text)
        places = (ROOT, package, *package.iterdir(), page.parent)
        absent = [name for name in names if not any((place / name).exists() for place in places)]
        missing += [f"{page.name}: {name}" for name in absent if name not in OF_A_RUN]
    assert missing == []


OF_A_RUN = {"base.yaml", "grid.yaml", "config.yaml", "mine.yaml", "my_parts.py", "my_estimator.py"}
"""Files of a run folder or of the reader, not of the repository."""


# --- metrics ------------------------------------------------------------------------------------------------
ROOTS = "train|stream|kl|kl_error|kl_term|policy|grad|value|beta|time|eval|audit|dpo|teacher|reference"


def logged_patterns() -> set[str]:
    """Every string in training, evaluation and lab/audit that is a metric's name, ``*`` where a value is filled in."""
    patterns = set()
    for file in [
        *(generate_docs.SOURCE / "training").rglob("*.py"),
        *(generate_docs.SOURCE / "evaluation").glob("*.py"),
        *(generate_docs.SOURCE / "lab" / "audit").glob("*.py"),
    ]:
        tree = ast.parse(file.read_text())
        inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                text = "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
                text = node.value
            else:
                continue
            if re.fullmatch(rf"({ROOTS})/[\w*/]+", text):
                patterns.add(text)
    return patterns - {"eval/*", "reference/initial"}  # of a samples table, of a seed, of an audit's pass; no metric


def test_every_metric_in_the_code_is_documented_and_the_reverse():
    levels = [name.replace("<level>", level) for name in DOCUMENTED for level in ("token", "sequence")]
    patterns, documented = logged_patterns(), [re.sub(r"<\w+>", "x", name) for name in levels]
    assert len(patterns) > 25
    patterns = {re.sub(r"^train/verifier_\w+$", "train/verifier_x", p) for p in patterns}  # one row for every status
    assert [p for p in patterns if not any(fnmatch(name, p) for name in documented)] == []
    assert [name for name in documented if not any(fnmatch(name, p) for p in patterns)] == []
    assert len(DOCUMENTED) == len(set(DOCUMENTED))


def documented_as(name: str) -> str:
    """The name of a metric's row: metrics that differ in estimator, level, quantile or verifier status share one."""
    name = re.sub(r"^kl_error/k\d_", "kl_error/<k>_", name)
    name = re.sub(r"(exact_\w+|reverse|total_variation)_(token|sequence)(?=$|_rms$)", r"\1_<level>", name)
    name = re.sub(r"^train/verifier_\w+", "train/verifier_<status>", name)
    return re.sub(r"_p\d\d$", "_p<q>", name).replace("exact_answer", "<part>")


def scored(value, *, group, stop="eos"):
    prompt = Prompt(problem=Problem(id="a", text="a", answer="1"), text="a", token_ids=(1,))
    shared = {"completion_ids": (1, 2), "logps": (-1.0, -1.0), "versions": (0, 0), "text": "1"}
    rollout = Rollout(prompt=prompt, group_id=group, stop_reason=stop, **shared)
    return Scored(rollout=rollout, reward=Reward(value=value, parts={"exact_answer": value}))


LEVELS = {"token": 3, "sequence": 2}


def small_update():
    """Two completions of one and two tokens, with numbers that can be checked by hand."""
    mask_BT = torch.tensor([[True, False], [True, True]])
    zeros_BT = torch.zeros(2, 2)
    experience = Experience(
        prompt_ids_BP=torch.ones(2, 1),
        prompt_mask_BP=torch.ones(2, 1),
        ids_BT=zeros_BT,
        mask_BT=mask_BT,
        behaviour_logp_BT=torch.tensor([[-1.0, 0.0], [-1.0, -1.0]]),
        ref_logp_BT=zeros_BT - 2.0,
        advantage_BT=zeros_BT,
        reward_B=torch.zeros(2),
        weight_B=torch.ones(2),
        policy_version_BT=torch.tensor([[2, 0], [1, 1]]),
        group_B=torch.zeros(2),
    )
    token_pass = TokenPass(
        logp_BT=torch.tensor([[-1.0, 0.0], [-1.0, -1.5]]),
        kl_BT=mask_BT * 0.6,
        forward_kl_BT=mask_BT * 0.9,
        entropy_BT=mask_BT * 0.3,
        total_variation_BT=mask_BT * 0.2,
        hidden_NH=None,
    )
    metrics = MetricAccumulator()
    accumulate_divergence(
        metrics, mask_BT, token_pass, torch.where(mask_BT, token_pass.logp_BT - experience.ref_logp_BT, 0.0)
    )
    accumulate_behaviour(metrics, experience, token_pass.logp_BT, version=3)
    return metrics.values()


def test_what_an_update_measures_is_documented_and_means_what_the_page_says():
    got = small_update()
    assert {documented_as(name) for name in got} <= set(DOCUMENTED)
    shift = torch.e**-0.5  # the log-ratios to the reference are 1 | 1, 0.5
    totals = {
        "kl/k1_reverse": 2.5,
        "kl/k2_reverse": 1.125,
        "kl/k3_reverse": 2 * torch.e**-1 + shift - 0.5,
        "kl/exact_reverse": 1.8,
        "kl/exact_forward": 2.7,
        "kl/total_variation": 0.6,
    }
    levels = {f"{name}_{level}": total / n for name, total in totals.items() for level, n in LEVELS.items()}
    assert {name: value for name, value in got.items() if not name.startswith("kl_error/")} == pytest.approx(
        {
            **levels,
            "kl/log_ratio_max": 1.0,
            "kl/k1_behaviour_token": 0.5 / 3,
            "policy/entropy": 0.3,
            "policy/entropy_sequence": 0.45,
            "policy/staleness": 5 / 3,
            "policy/behaviour_gap_max": 0.5,
            "policy/equal_weights_share": 0.0,
            "kl/k3_behaviour_token": (shift - 0.5) / 3,
            "kl/k1_policy_behaviour_token": -0.5 * shift / 3,
            "kl/k3_policy_behaviour_token": (1 - 1.5 * shift) / 3,
            "policy/ratio_p01": shift,
            "policy/ratio_p10": shift,
            "policy/ratio_p50": 1.0,
            "policy/ratio_p90": 1.0,
            "policy/ratio_p99": 1.0,
            "policy/ess": (1 + shift) ** 2 / (2 * (1 + shift**2)),
        },
        rel=1e-5,
    )


def test_row_metrics_are_documented_and_mean_what_the_page_says():
    got = row_metrics([scored(1.0, group=0), scored(0.0, group=0), scored(1.0, group=1, stop="length")])
    assert {documented_as(name) for name in got} <= set(DOCUMENTED)
    assert got["train/reward"] == pytest.approx(2 / 3)
    assert got["train/reward_std"] == pytest.approx((2 / 9) ** 0.5)
    assert got["train/groups_without_signal"] == 0.5
    assert got["train/truncated_share"] == pytest.approx(1 / 3)


def test_evaluation_metrics_are_documented():
    measured = {name: 0.0 for name in small_update() if name.split("/")[0] in ("kl", "kl_error")}
    values = {
        "reward": Interval(n=2, mean=0.0, low=0.0, high=0.0),
        **dict.fromkeys(("length", "truncated_share", "policy/entropy", "policy/entropy_sequence"), 0.0),
        **measured,
    }
    result = EvalResult(name="gsm8k", problems=1, samples=1, values=values)
    names = {name.replace("gsm8k", "<set>") for name in result.metrics()}
    names = {re.sub(r"(/kl|/kl_error)/\w+$", r"\1/<name>", name) for name in names}
    assert names == {name for name in DOCUMENTED if name.startswith("eval/<set>/")}


def test_the_metrics_of_suites_are_documented():
    row = {"index": 0, "correct": True, "reward": 1.0, "status": "ok", "answer": "1", "tokens": 2, "stop_reason": "eos"}
    rows = [{**row, "index": n // 2, "correct_norm": True} for n in range(4)]
    choices = score_choices("s", rows)
    names = {name.replace("/s/", "/<choices>/") for name in choices.metrics()}
    assert names == {name for name in DOCUMENTED if name.startswith("eval/<choices>/")}
    names = {**score_completions("s", rows, ks=(2,)).row(), **choices.row()}
    shown = {f"eval/<suite>/{name}" for name in (re.sub(r"@\d+", "_at_<k>", name) for name in names)}
    bare = {re.sub(r"_(low|high|ties)$", "", name) for name in shown}
    as_a_set_s = {f"eval/<suite>/{name}" for name in ("reward", "truncated_share")}
    beside = {f"eval/<suite>/{status}_share" for status in ("timeout", "refused", "failed")}
    assert bare - as_a_set_s - beside == {name for name in DOCUMENTED if name.startswith("eval/<suite>/")}
