"""The pages under docs/ say what the code is: generated parts are current, names exist, links lead somewhere."""

import ast
import dataclasses
import re
import sys
import typing
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch

from kl_comedy.config import schema as schema_module
from kl_comedy.evaluation import EvalResult
from kl_comedy.evaluation.scores import score_choices, score_completions
from kl_comedy.models.types import TokenPass
from kl_comedy.peers.advice import advice
from kl_comedy.records import Experience, Problem, Prompt, Reward, Rollout, Scored
from kl_comedy.statistics import Interval
from kl_comedy.training.metrics import MetricAccumulator, accumulate_behaviour, accumulate_divergence, row_metrics

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "research" / "scripts"))
import generate_docs  # noqa: E402
from doc_tables import advice as advice_tables  # noqa: E402
from doc_tables import kl_terms  # noqa: E402

OTHER_PAGES = ("CONTRIBUTING.md", "CHANGELOG.md")
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), *(ROOT / page for page in OTHER_PAGES)]
METRICS = (ROOT / "docs" / "metrics.md").read_text()
DOCUMENTED = re.findall(r"^\| `([^`]+)` \|", METRICS, flags=re.MULTILINE)


def test_generated_parts_are_current():
    pages = set(generate_docs.PAGES) - set(generate_docs.ENUMERATED)
    assert generate_docs.stale_pages(sorted(pages)) == [], "run python research/scripts/generate_docs.py"


@pytest.mark.slow
def test_pages_with_certificates_are_current():
    """Two of the pages of estimators, which one function makes; what they say of a term, tests/exact enumerates."""
    pages = [page for page in generate_docs.ENUMERATED if page not in kl_terms.WHOLE]
    pages += ["estimators/README.md", "estimators/k1.md", "estimators/exact_forward.md"]
    assert generate_docs.stale_pages(pages) == [], "run python research/scripts/generate_docs.py"


def test_there_is_a_page_for_each_estimator_and_no_other():
    pages = {f"estimators/{file.name}" for file in (ROOT / "docs" / "estimators").iterdir()}
    assert pages == set(kl_terms.WHOLE)


CLAIMS = (ROOT / "tests/exact/test_claims.py").read_text()
OFF_POLICY_CLAIMS = CLAIMS[CLAIMS.index("OFF_POLICY = {") :]


PROVED = [situation for situation in advice().situations.values() if situation.master_row]


@pytest.mark.parametrize("situation", PROVED, ids=lambda situation: situation.name)
def test_rows_of_the_decision_page_are_rows_of_the_master_table(situation):
    """In the regime of the samples that the page says."""
    row = situation.master_row
    assert f'"{row}": (' in CLAIMS
    assert (f'"{row}": (' in OFF_POLICY_CLAIMS) == (situation.samples == "stale")


DECISION = (ROOT / "docs" / "decision.md").read_text()


@pytest.mark.parametrize("part", advice_tables.DECISION)
def test_the_advice_on_the_decision_page_is_current(part):
    """The slow test of the whole page needs a certificate of every term."""
    generated = f"<!-- generated: {part} -->\n{advice_tables.DECISION[part]()}\n<!-- end: {part} -->"
    assert generated in DECISION, "run python research/scripts/generate_docs.py --advice"


SETTINGS_BY_HAND = {"1e-4", "2e-4", "4e-4", "5e-5", "40", "0"}
"""Numbers of the decision page outside its generated parts: learning rates, the most tokens, and the zero of an
interval. All others are results, which come from the exports."""


POLICIES = """random policies of 3 tokens, 0.02 to 0.06 nats
of KL per prefix from the reference; `kl-comedy certify --range` gives their range over policies of 4 and 8 tokens."""


def numbers_by_hand(page):
    """The numbers outside the generated parts of a page, without those of names such as k3 and of HTML attributes."""
    by_hand = re.sub(r"<!-- generated: .*?<!-- end: [^>]*-->", "", page, flags=re.DOTALL)
    assert len(by_hand) > 1000
    # Of which policies the percentages are; test_a_page_with_errors_of_certificates_says_of_which_policies_they_are.
    by_hand = by_hand.replace(POLICIES, "")
    text = re.sub(r"<[a-z][^>]*>|\]\([^)]*\)", "", by_hand)
    return re.findall(r"(?<![\w.])\d[\d.,]*(?:e-?\d+)?(?<![.,])", text)


def test_no_result_on_the_decision_page_is_written_by_hand():
    """Rewards, percentages and counts of runs come from the exports, by generation."""
    assert set(numbers_by_hand(DECISION)) <= SETTINGS_BY_HAND


@pytest.mark.parametrize(
    "result",
    ["It gains 0.53.", "It gains 12%.", "It wins 12 percent more.", "It collapsed in 90 runs.", "In 7 of 9 runs."],
)
def test_a_result_that_is_written_by_hand_is_found(result):
    planted = DECISION.replace("<details", f"{result}\n\n<details", 1)
    assert not set(numbers_by_hand(planted)) <= SETTINGS_BY_HAND


NUMBER = re.compile(r"\d\.\d+|\b\d+ of \d+\b")
PARTS_WITH_NUMBERS = [part for part, make in advice_tables.DECISION.items() if NUMBER.search(make())]


@pytest.fixture
def planted_page(tmp_path, monkeypatch):
    """Write the decision page with another text where `generate_docs.py --check` reads it."""
    (tmp_path / "docs").mkdir()
    monkeypatch.setattr(generate_docs, "ROOT", tmp_path)
    # Without the certificates, which take half a minute.
    monkeypatch.setitem(generate_docs.PAGES, "decision.md", advice_tables.DECISION)
    return (tmp_path / "docs" / "decision.md").write_text


@pytest.mark.parametrize("part", PARTS_WITH_NUMBERS)
def test_a_wrong_number_on_the_decision_page_is_found(part, planted_page):
    begin = DECISION.index(f"<!-- generated: {part} -->")
    number = NUMBER.search(DECISION, begin)
    digit = "1" if number[0][0] != "1" else "2"
    planted_page(DECISION[: number.start()] + digit + DECISION[number.start() + 1 :])
    assert generate_docs.stale_pages(["decision.md"]) == ["decision.md"]


def test_the_decision_page_as_it_is_has_no_wrong_number(planted_page):
    planted_page(DECISION)
    assert generate_docs.stale_pages(["decision.md"]) == []


def test_a_wrong_number_in_the_stored_measurements_is_found(tmp_path, monkeypatch):
    """The pages would agree with it: it is compared with the exports, which tests/research/test_advice.py reads."""
    planted = tmp_path / "advice_measured.yaml"
    stored = generate_docs.MEASURED.read_text()
    planted.write_text(re.sub(r"a_collapsed: (\d+)", r"a_collapsed: 1\1", stored, count=1))
    monkeypatch.setattr(generate_docs, "MEASURED", planted)
    monkeypatch.setattr(generate_docs, "measured_text", lambda: stored)
    monkeypatch.setattr(sys, "argv", ["generate_docs.py", "--check", "--advice"])
    with pytest.raises(SystemExit, match=r"stale: advice_measured\.yaml"):
        generate_docs.main()


@pytest.mark.parametrize("page", ["docs/decision.md", "docs/open_problem.md", "docs/loss_or_reward.md", "README.md"])
def test_prose_recommends_nothing_else(page):
    """A sentence as "use `is/k3_per_decision`" contradicted the list of what never to use."""
    advised = {situation.use for situation in advice().situations.values()}
    named = re.findall(r"\b[Uu]se `(\w+/\w+)`", (ROOT / page).read_text())
    assert [name for name in named if name not in advised] == []


def test_the_pages_name_tests_that_exist():
    named = []
    for page in PAGES:
        named += re.findall(r"(tests/[\w/]+\.py)::(\w+)", page.read_text())
    assert len(named) > 3
    for file, test in named:
        assert f"def {test}(" in (ROOT / file).read_text(), f"{file}::{test}"


def test_every_key_of_every_schema_is_documented():
    undocumented = []
    for schema in vars(schema_module).values():
        if not dataclasses.is_dataclass(schema):
            continue
        types = typing.get_type_hints(schema)
        for field in dataclasses.fields(schema):
            # A section is documented by its own keys.
            may_be = typing.get_args(types[field.name]) or (types[field.name],)
            is_section = any(dataclasses.is_dataclass(kind) for kind in may_be)
            if not field.metadata.get("doc") and not is_section:
                undocumented.append((schema.__name__, field.name))
    assert undocumented == []


def anchors_of(text):
    """The anchors of a page's headings, as GitHub makes them."""
    anchors = set()
    for title in re.findall(r"^#+ (.*)$", text, re.M):
        words = re.sub(r"[^\w\- ]", "", title)
        anchors.add(words.strip().lower().replace(" ", "-"))
    return anchors


def is_broken(target, page, anchors):
    file, _, anchor = target.partition("#")
    if not file:
        return anchor not in anchors
    if "://" in target:
        return False
    return not (page.parent / file).exists()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    text = page.read_text()
    anchors = anchors_of(text)
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    assert [target for target in targets if is_broken(target, page, anchors)] == []


OF_A_RUN = {"base.yaml", "grid.yaml", "config.yaml", "mine.yaml", "my_parts.py", "my_estimator.py", "my_reward.py"}
"""Files of a run folder or of the reader, not of the repository."""
PACKAGE = ROOT / "src" / "kl_comedy"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_named_in_prose_exist(page):
    text = re.sub(r"https?://\S+", "", page.read_text())  # files of other repositories
    names = re.findall(r"(?<![\w/<])((?:[\w.]+/)*[\w.]*\w\.(?:py|yaml|toml))\b(?![\w/])", text)
    folders = [ROOT, PACKAGE, *PACKAGE.iterdir(), page.parent]
    missing = []
    for name in names:
        exists = any((folder / name).exists() for folder in folders)
        if not exists and name not in OF_A_RUN:
            missing.append(name)
    assert missing == []


# --- metrics ------------------------------------------------------------------------------------------------
ROOTS = "train|stream|kl|kl_error|kl_term|policy|grad|value|beta|time|eval|audit|dpo|teacher|reference"


NO_METRICS = {"eval/*", "reference/initial"}
"""A samples table, a seed, an audit's pass: texts that look like a metric."""


def files_that_log():
    yield from (generate_docs.SOURCE / "training").rglob("*.py")
    yield from (generate_docs.SOURCE / "evaluation").glob("*.py")
    yield from (generate_docs.SOURCE / "audit").glob("*.py")


def texts_of(file):
    """Every string of a module; in an f-string ``*`` for each value."""
    tree = ast.parse(file.read_text())
    f_strings = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    parts = {id(part) for node in f_strings for part in node.values}
    for node in f_strings:
        yield "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in node.values)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            yield node.value


def logged_patterns() -> set[str]:
    """Every string in training, evaluation and audit that is a metric's name, ``*`` where a value is filled in."""
    patterns = set()
    for file in files_that_log():
        for text in texts_of(file):
            if re.fullmatch(rf"({ROOTS})/[\w*/]+", text):
                # One row of the page is for every status.
                patterns.add(re.sub(r"^train/verifier_\w+$", "train/verifier_x", text))
    return patterns - NO_METRICS


def documented_names() -> list[str]:
    """The metrics of the page, once per level, with ``x`` for what else is in angle brackets."""
    names = []
    for name in DOCUMENTED:
        for level in ("token", "sequence"):
            names.append(re.sub(r"<\w+>", "x", name.replace("<level>", level)))
    return names


def test_the_code_has_metrics():
    """Or the tests below would look at nothing."""
    assert len(logged_patterns()) > 25


def test_every_metric_in_the_code_is_documented():
    documented = documented_names()
    undocumented = [pattern for pattern in logged_patterns() if not any(fnmatch(name, pattern) for name in documented)]
    assert undocumented == []


def test_every_documented_metric_is_in_the_code():
    patterns = logged_patterns()
    unknown = [name for name in documented_names() if not any(fnmatch(name, pattern) for pattern in patterns)]
    assert unknown == []


def test_no_metric_is_documented_twice():
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


def small_update():
    """Two completions of one and two tokens, with numbers that can be checked by hand."""
    mask_BT = torch.tensor([[True, False], [True, True]])
    zeros_BT = torch.zeros(2, 2)
    experience = Experience(
        prompt_ids_BP=torch.ones(2, 1),
        prompt_mask_BP=torch.ones(2, 1),
        ids_BT=zeros_BT,
        mask_BT=mask_BT,
        real_BT=mask_BT,
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
    log_ratio_BT = torch.where(mask_BT, token_pass.logp_BT - experience.ref_logp_BT, 0.0)
    metrics = MetricAccumulator()
    accumulate_divergence(metrics, mask_BT, token_pass, log_ratio_BT)
    accumulate_behaviour(metrics, experience, token_pass.logp_BT, version=3)
    return metrics.values()


def expected_update():
    """What those two completions measure, by hand.

    The log-ratios to the reference are 1 | 1, 0.5, those to the sampler 0 | 0, -0.5.
    """
    shift = torch.e**-0.5
    totals = {
        "kl/k1_reverse": 2.5,
        "kl/k2_reverse": 1.125,
        "kl/k3_reverse": 2 * torch.e**-1 + shift - 0.5,
        "kl/exact_reverse": 1.8,
        "kl/exact_forward": 2.7,
        "kl/total_variation": 0.6,
    }
    expected = {}
    for name, total in totals.items():
        expected[f"{name}_token"] = total / 3
        expected[f"{name}_sequence"] = total / 2
    return {
        **expected,
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
    }


def test_what_an_update_measures_is_documented():
    assert {documented_as(name) for name in small_update()} <= set(DOCUMENTED)


def test_what_an_update_measures_means_what_the_page_says():
    measured = {name: value for name, value in small_update().items() if not name.startswith("kl_error/")}
    assert measured == pytest.approx(expected_update(), rel=1e-5)


def test_row_metrics_are_documented_and_mean_what_the_page_says():
    metrics = row_metrics([scored(1.0, group=0), scored(0.0, group=0), scored(1.0, group=1, stop="length")])
    assert {documented_as(name) for name in metrics} <= set(DOCUMENTED)
    assert metrics["train/reward"] == pytest.approx(2 / 3)
    assert metrics["train/reward_std"] == pytest.approx((2 / 9) ** 0.5)
    assert metrics["train/groups_without_signal"] == 0.5
    assert metrics["train/truncated_share"] == pytest.approx(1 / 3)


def documented_under(prefix):
    return {name for name in DOCUMENTED if name.startswith(prefix)}


def test_evaluation_metrics_are_documented():
    measured = {name: 0.0 for name in small_update() if name.split("/")[0] in ("kl", "kl_error")}
    values = {
        "reward": Interval(n=2, mean=0.0, low=0.0, high=0.0),
        "proxy": Interval(n=2, mean=0.0, low=0.0, high=0.0),
        **dict.fromkeys(("length", "truncated_share", "policy/entropy", "policy/entropy_sequence"), 0.0),
        **measured,
    }
    result = EvalResult(name="gsm8k", problems=1, samples=1, values=values)
    names = {name.replace("gsm8k", "<set>") for name in result.metrics()}
    names = {re.sub(r"(/kl|/kl_error)/\w+$", r"\1/<name>", name) for name in names}
    assert names == documented_under("eval/<set>/")


@pytest.fixture(scope="module")
def suite_rows():
    """Two problems with two samples each, all right."""
    row = {"correct": True, "correct_norm": True, "reward": 1.0, "status": "ok", "answer": "1"}
    row |= {"tokens": 2, "stop_reason": "eos"}
    return [{**row, "index": index} for index in (0, 0, 1, 1)]


def test_the_metrics_of_suites_by_likelihood_are_documented(suite_rows):
    metrics = score_choices("s", suite_rows).metrics()
    assert {name.replace("/s/", "/<choices>/") for name in metrics} == documented_under("eval/<choices>/")


def test_the_metrics_of_suites_are_documented(suite_rows):
    columns = {**score_completions("s", suite_rows, ks=(2,)).row(), **score_choices("s", suite_rows).row()}
    names = set()
    for column in columns:
        # A bound or a tie is documented with its value, and every k in one row.
        name = re.sub(r"_(low|high|ties)$", "", re.sub(r"@\d+", "_at_<k>", column))
        names.add(f"eval/<suite>/{name}")
    as_of_a_set = {"eval/<suite>/reward", "eval/<suite>/truncated_share"}
    shares_of_statuses = {f"eval/<suite>/{status}_share" for status in ("timeout", "refused", "failed")}
    assert names - as_of_a_set - shares_of_statuses == documented_under("eval/<suite>/")


PAGES_WITH_ERRORS = [
    page.relative_to(ROOT).as_posix()
    for page in sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
    if re.search(r"\d% off", page.read_text())
]


@pytest.mark.parametrize("page", PAGES_WITH_ERRORS)
def test_a_page_with_errors_of_certificates_says_of_which_policies_they_are(page):
    """Vocabulary and distance: on other policies the percentages are others."""
    assert re.search(r"\b3\s+tokens\b.{1,40}0\.02\s+to\s+0\.06\s+nats", (ROOT / page).read_text(), re.DOTALL), page
