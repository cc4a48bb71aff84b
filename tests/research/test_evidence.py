"""The claims page from a small export with known differences: every claim has the verdict that it must have."""

import pytest
from research.studies import enumerated
from research.studies.evidence import (
    METRICS,
    OTHER_FAMILIES,
    REAL_MODEL,
    REWARD,
    compare,
    measured_runs,
    page,
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
def verdicts(exported):
    """The verdict and the count of runs of each claim on the page, in its order."""
    summary = markdown_tables(page(exported, "command")[1])[0].rows
    return {row[0].partition("]")[0][1:]: (row[2], row[4]) for row in summary}


def test_the_page_has_every_claim(verdicts):
    enumerated_names = {claim.name for claim in enumerated.read_claims()}
    assert verdicts.keys() == CLAIMS.keys() | enumerated_names


@pytest.mark.parametrize(
    ("name", "verdict", "count"),
    [
        pytest.param("C6", "4 for, 0 against, of 4", "none needed", id="by enumeration"),
        pytest.param("C14", "3 for, 0 against, of 6, with a remark", "45 of 45", id="a difference as claimed"),
        pytest.param("C17", "0 for, 3 against, of 3", "30 of 30", id="a difference against the claim"),
        pytest.param(
            "L1", "preliminary: 3 for, 0 against, of 3, with a remark", "30 of 50, runs missing", id="half of it"
        ),
        pytest.param("L2", "preliminary: 0 for, 0 against, of 3", "27 of 50, runs missing", id="no difference"),
        pytest.param("P2", "runs missing, with a remark", "0 of 255, runs missing", id="no run"),
    ],
)
def test_known_differences_have_known_verdicts(verdicts, name, verdict, count):
    assert verdicts[name] == (verdict, count)
