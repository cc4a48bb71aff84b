"""The claims page from a small export with known differences: every claim has the verdict that it must have."""

import re
from pathlib import Path

import pytest
from research.studies import enumerated, evidence_page
from research.studies.evidence import (
    METRICS,
    OTHER_FAMILIES,
    REAL_MODEL,
    REWARD,
    compare,
    measured_runs,
    planned_runs,
    read_claims,
)

from kl_comedy.results.pages import markdown_tables
from kl_comedy.results.runs import FAMILY

CLAIMS = {claim.name: claim for claim in read_claims()}
MADE = ("core", "core_betas", "fix", "smollm2")
NATS = {"none": 2.0, "k1-loss": 3.0}


def outcome(run, name):
    """What a run of the export measured: a step by form, and noise that is the seed's and the form's."""
    noise = 0.001 * ((7 * int(run["seed"]) + 3 * len(run["form"])) % 5 - 2)
    if name == "kl":
        return NATS.get(run["form"], 1.0) + noise
    if name == "entropy":
        return 0.05 + 0.02 * (run["form"] == "k1-reward") + noise
    if name == "outside":
        return 0.3 + 0.2 * (run["form"] == "k1-reward") + noise
    if run["form"] == "none" and run["rate"] == "0.0008":  # the only form and rate that collapse
        return noise
    return 0.5 + noise


def exported_row(number, run):
    """The row of one run, with the columns of an export."""
    row = {
        "run_id": f"{number:04}",
        "run_name": f"{number:04}",
        "experiment": "evidence",
        "status": "FINISHED",
        "start_time": number,
        "duration_s": 36.0,
        "stale": "",
        "params.name": run["name"],
        "params.seed": run["seed"],
        "params.optimizer.lr": run["rate"],
        "params.kl.recipe": run["form"],
        "params.kl.beta": run["beta"],
        FAMILY: run["form"],
        "params.lag.steps": run["lag"],
        "tags.sweep": f"evidence_{run['block']}",
        "tags.git.commit": "0" * 40,
        "tags.git.dirty": "false",
    }
    for name, metric in METRICS.items():
        row[f"metrics.{metric}"] = outcome(run, name)
    for name in OTHER_FAMILIES:
        row[f"metrics.eval/{name}/reward"] = outcome(run, "outside")
    return row


def exported_curves(number, run):
    """The curves of one run: three evaluations, of which the last two are equal, and 30 updates."""
    run_id = f"{number:04}"
    end = outcome(run, "end")
    points = [(run_id, REWARD, 0, 0.4, 3), (run_id, REWARD, 30, end, 3), (run_id, REWARD, 60, end, 3)]
    for name in ("train/length", "train/reward"):
        points += [(run_id, name, step, float(step % 2), 30) for step in range(30)]
    return points


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """All runs of the blocks MADE but seed 4 of core's k2 in loss."""
    import pandas as pd

    plan = planned_runs()
    rows = []
    points = []
    for number, run in enumerate(plan[plan["block"].isin(MADE)].to_dict("records")):
        if (run["block"], run["form"], run["seed"]) == ("core", "k2-loss", "4"):
            continue
        rows.append(exported_row(number, run))
        points += exported_curves(number, run)
    file = tmp_path_factory.mktemp("evidence") / "export.parquet"
    pd.DataFrame(rows).to_parquet(file)
    columns = ["run_id", "metric", "step", "value", "recorded"]
    pd.DataFrame(points, columns=columns).to_parquet(file.with_suffix(".curves.parquet"))
    return str(file)


@pytest.fixture(scope="module")
def runs(exported, plan):
    return measured_runs(exported, plan)


@pytest.fixture(scope="module")
def plan():
    return planned_runs()


@pytest.fixture(scope="module")
def nothing(plan):
    """The table of measured runs before there are any."""
    columns = ("kl", "start", *METRICS, "outside", "collapsed", FAMILY)
    return plan.assign(**dict.fromkeys(columns))[:0]


@pytest.mark.parametrize("name", CLAIMS)
def test_every_contrast_of_every_claim_is_planned(plan, nothing, name):
    contrasts = [contrast for contrasts in CLAIMS[name].parts.values() for contrast in contrasts]
    for contrast in contrasts:
        least_seeds = 5
        if set(contrast.blocks) & set(REAL_MODEL):  # runs of a real model are expensive
            least_seeds = 3
        for outcome_name in contrast.signs:
            rows = compare(contrast, outcome_name, nothing, plan)
            assert rows, contrast
            for row in rows:
                assert row["planned"] >= least_seeds, contrast
                assert row["pairs"] == 0, contrast


@pytest.fixture(scope="module")
def evidence(exported):
    return evidence_page.read_evidence(exported)


@pytest.fixture(scope="module")
def written(evidence):
    return evidence_page.page(evidence)


@pytest.fixture(scope="module")
def verdicts(written):
    """The counts of each claim on the page, as often as it stands there."""
    rows = []
    for table in markdown_tables(written):
        if table.header[0] == "claim":
            rows += [(row[0].rpartition("</a>")[2], row[2]) for row in table.rows]
    return rows


def test_the_page_has_every_claim_once(verdicts):
    enumerated_names = [claim.name for claim in enumerated.read_claims()]
    assert sorted(name for name, _ in verdicts) == sorted([*CLAIMS, *enumerated_names])


@pytest.mark.parametrize(
    ("name", "verdict"),
    [
        pytest.param("C6", "4 / 0 / 4", id="by enumeration"),
        pytest.param("C14", "3 / 0 / 6", id="a difference as claimed"),
        pytest.param("C17", "0 / 3 / 3", id="a difference against the claim"),
        pytest.param("L1", "preliminary: 3 / 0 / 3", id="half of it"),
        pytest.param("L2", "preliminary: 0 / 0 / 3", id="no difference"),
        pytest.param("P2", "runs missing", id="no run"),
    ],
)
def test_known_differences_have_known_verdicts(verdicts, name, verdict):
    assert dict(verdicts)[name] == verdict


def test_levels_are_means_with_the_collapsed_runs(written):
    """Of the made runs only those without KL at the highest rate collapse; all others end at one half."""
    levels = markdown_tables(written)[0]
    assert levels.header[0] == "KL"
    assert [cell.partition(" ")[0] for cell in levels.header[1:]] == ["1e-4", "3e-4", "8e-4"]
    without, *others = levels.rows
    assert without[1:] == ["0.50", "0.50", "0.00 (5 of 5 collapsed)"]
    assert others and all(row[1:] == ["0.50"] * 3 for row in others)


def test_every_contrast_is_a_row_of_the_file(evidence):
    """What a claim counts on the page is what its rows in contrasts.csv say."""
    table = evidence_page.contrasts(evidence)
    rows = table[(table["claim"] == "C14")]
    assert list(rows["says"]).count("for") == 3
    first = rows.iloc[0]
    assert float(first["mean_a"]) - float(first["mean_b"]) == pytest.approx(float(first["difference"]), abs=2e-3)
    assert set(table["claim"]) == set(CLAIMS)


STORED = Path(__file__).parents[2] / "results" / "evidence"


@pytest.mark.slow
def test_the_stored_files_are_those_of_the_export():
    """The page's sentences have numbers too, which `results verify` does not compare."""
    evidence = evidence_page.read_evidence(str(STORED / "export.parquet"))
    for name, text in evidence_page.texts(evidence).items():
        assert (STORED / name).read_text(encoding="utf-8") == text, name


def test_links_to_a_claim_lead_to_its_row():
    anchors = set(re.findall(r'<a id="([^"]+)"', (STORED / "README.md").read_text(encoding="utf-8")))
    linked = set()
    for folder in (STORED.parents[1] / "results", STORED.parents[1] / "docs"):
        for page in folder.rglob("*.md"):
            linked |= set(re.findall(r"evidence/README\.md#([\w-]+)", page.read_text(encoding="utf-8")))
    assert linked
    assert linked <= anchors
