"""The claims page from a small export with known differences: verdicts, Holm's adjustment, missing runs."""

from pathlib import Path

import pytest
from research.studies import enumerated
from research.studies.evidence import (
    BLOCKS,
    COLLAPSE,
    KL,
    METRICS,
    OTHER_FAMILIES,
    REAL_MODEL,
    REWARD,
    Contrast,
    compare,
    evaluate,
    measured_runs,
    needed,
    page,
    pairs_needed,
    planned_runs,
    read_claims,
    unresolved,
)

from kl_comedy.errors import UserError
from kl_comedy.results.pages import markdown_tables
from kl_comedy.results.runs import FAMILY
from kl_comedy.statistics import Point, holm, reward_at_kl

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


def test_the_plan_has_all_runs(plan):
    assert len(plan) == 1624


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


def test_the_main_contrast_is_planned_with_ten_seeds(plan, nothing):
    rows = compare(CLAIMS["P1"].parts[""][0], "end", nothing, plan)
    assert {row["planned"] for row in rows} == {10}


@pytest.fixture(scope="module")
def verdicts(exported):
    """The verdict and the count of runs of each claim on the page, in its order."""
    summary = markdown_tables(page(exported, "command")[1])[0].rows
    return {row[0].partition("]")[0][1:]: (row[2], row[4]) for row in summary}


def test_the_page_has_every_claim(verdicts):
    enumerated_names = {claim.name for claim in enumerated.read_claims()}
    assert verdicts.keys() == CLAIMS.keys() | enumerated_names


def test_the_claims_of_the_page_are_in_their_order(verdicts):
    names = list(verdicts)
    assert names[-1] == "S9"
    assert names.index("C10") == names.index("C9") + 1, "as numbers, not as text"


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


def test_more_collapses_are_found(verdicts, runs):
    # 5 of 5 against 0 of 5, at one learning rate of three, for both forms.
    assert verdicts["C11"][0] == "2 for, 0 against, of 6"
    assert runs["collapsed"].sum() == 5


def test_a_claim_of_two_parts_has_a_verdict_for_each(verdicts):
    assert verdicts["C16"][0].startswith("preliminary: the same: 1 for, 0 against, of 1; ahead: ")


NOT_BORNE_OUT = ["comedy/k1_in_loss", "on_policy", "sequence_reverse"]
BORNE_OUT = ["liu/k2_loss", "on_policy", "token_reverse"]


@pytest.mark.parametrize(
    ("optimizes", "verdict"),
    [
        ([NOT_BORNE_OUT, BORNE_OUT], "1 for, 1 against, of 2"),
        ([NOT_BORNE_OUT], "0 for, 1 against, of 1"),
        ([BORNE_OUT], "1 for, 0 against, of 1"),
    ],
    ids=["one of two", "none", "all"],
)
def test_certificates_are_counted_for_and_against_a_claim(optimizes, verdict):
    claim = enumerated.EnumeratedClaim(name="C1", hypothesis="k1", optimizes=optimizes)
    row, section = enumerated.section(claim)
    assert row[2] == verdict
    assert f"**Verdict: {verdict}.** No training." in section


def test_a_claim_of_a_study_shows_its_number(tmp_path, monkeypatch):
    (tmp_path / "study.csv").write_text("form,beta,bias\nk1,0.1,1\nk1,0.1,3\nk2,0.1,5\n")
    monkeypatch.setattr(enumerated, "RESULTS", tmp_path)
    number = ["k1's", "study.csv", {"form": "k1", "beta": 0.1}, "bias", "mean"]
    claim = enumerated.EnumeratedClaim(name="C8", hypothesis="k1", verdict="so", numbers=[number], command="make")
    row, _ = enumerated.section(claim)
    assert row[2:] == ["so", "k1's: 2", "none needed"]


# --- contrasts ----------------------------------------------------------------------------------------------------
def test_all_contrasts_of_a_claim_are_one_family(runs, plan):
    parts = evaluate(CLAIMS["C9"], runs, plan)
    rows = [row for part in parts.values() for row in part]
    assert len(rows) == 9
    assert [row["p_holm"] for row in rows] == holm([row["p"] for row in rows])


@pytest.fixture(scope="module")
def parts_of_p4(runs, plan):
    """A claim about a real model, with three seeds."""
    return evaluate(CLAIMS["P4"], runs, plan)


@pytest.fixture(scope="module")
def rows_of_p4(parts_of_p4):
    return [row for part in parts_of_p4.values() for row in part]


def test_a_claim_needs_the_runs_of_its_contrasts(runs):
    assert len(needed(CLAIMS["P4"], runs)) == 42


def test_an_outcome_without_a_direction_is_shown_and_not_tested(rows_of_p4):
    for row in rows_of_p4:
        if row["outcome"] == "kl":
            assert row["pairs"] == 3
            assert row["p_holm"] is None
            assert row["decision"] == ""


def test_an_outcome_with_a_direction_is_tested_in_one_family(rows_of_p4):
    tested = [row for row in rows_of_p4 if row["outcome"] != "kl"]
    assert [row["p_holm"] for row in tested] == holm([row["p"] for row in tested])
    assert len(tested) < len(rows_of_p4)


def test_three_seeds_are_too_few_for_a_test_of_equality(rows_of_p4):
    assert {row["p_same"] for row in rows_of_p4} == {None}


def test_the_contrasts_of_a_part_are_at_its_lag(parts_of_p4):
    assert {row["key"][0] for row in parts_of_p4["prefix ratio"]} == {"4"}


def test_at_equal_kl_a_frontier_runs_from_the_start_to_no_kl(runs, plan):
    (contrast, *_) = [part for part in CLAIMS["T1"].parts[""] if (part.a, part.b) == ("k1-reward", "k1-loss")]
    # The first of several KLs.
    row, *_ = [row for row in compare(contrast, "end", runs, plan) if row["key"] == ("0.0001",)]
    of_the_frontier = runs[
        (runs["rate"] == "0.0001") & runs["form"].isin(("none", "k1-reward")) & (runs["block"] == "core")
    ]
    rewards = []
    for _, runs_of_seed in of_the_frontier.groupby("seed"):
        points = [Point(0.0, 0.4)]  # the reward of the start, where the KL is 0
        for kl, end in zip(runs_of_seed["kl"], runs_of_seed["end"], strict=True):
            points.append(Point(kl, end))
        rewards.append(reward_at_kl(points, 0.5))
    assert row["at"].endswith("0.5 nats")
    assert row["a"] == pytest.approx(sum(rewards) / 5)
    assert row["pairs"] == 5


COLLAPSES = {"a": "k1-reward", "b": "k1-loss", "blocks": ["core"], "signs": {"collapsed": 1}}


def test_collapsed_runs_are_compared_at_equal_settings():
    assert Contrast(**COLLAPSES).at_kl == []


def test_collapsed_runs_are_not_compared_where_the_two_sides_share_runs():
    with pytest.raises(UserError, match=r"signs: got 'collapsed'; .*points of both frontiers"):
        Contrast(**COLLAPSES, at_kl=[0.5])


@pytest.mark.parametrize(("difference", "deviation", "level"), [(0.04, 0.04, 0.05), (-0.3, 0.4, 0.005)])
def test_the_seeds_that_would_resolve_a_difference_have_the_power_in_a_simulation(difference, deviation, level):
    import numpy as np
    from scipy.stats import ttest_1samp

    def power(draws):
        """The share of experiments, in rows, in which the difference is found."""
        return float((ttest_1samp(draws, 0, axis=1).pvalue < level).mean())

    pairs = pairs_needed(difference, deviation, level)
    draws = np.random.default_rng(0).normal(difference, deviation, (20_000, pairs))
    # The power that is asked for is 80 %; 1 % is three standard errors of the simulation.
    assert power(draws) > 0.79
    assert power(draws[:, :-1]) < 0.81, "one pair fewer is not enough"


# --- what more seeds would cost -----------------------------------------------------------------------------------
HALF_WIDTH = 2.776 * 0.04 / 5**0.5
"""Of the 95 % interval of five pairs whose differences have a standard deviation of 0.04."""
UNRESOLVED = {
    "contrast": "a - b",
    "at": "beta 1",
    "outcome": "end",
    "sign": 1,
    "pairs": 5,
    "a": 0.5,
    "b": 0.46,
    "difference": 0.04,
    "low": 0.04 - HALF_WIDTH,
    "high": 0.04 + HALF_WIDTH,
    "p": 0.09,
    "p_holm": 0.09,
    "decision": "",
}


def test_what_is_not_resolved_has_a_cost(runs, plan):
    claim = CLAIMS["C14"]
    hours_per_run = needed(claim, runs)["hours"].mean()
    ((*_, seeds, more_hours),) = unresolved(claim, {"": [UNRESOLVED]}, runs, plan)
    assert seeds == "10"
    assert more_hours == f"{10 * hours_per_run:.1f}", "five more seeds of two forms"


def test_what_is_resolved_has_no_cost(runs, plan):
    resolved = {**UNRESOLVED, "decision": "for"}
    assert unresolved(CLAIMS["C14"], {"": [resolved]}, runs, plan) == []


def test_what_is_not_whole_has_no_cost(runs, plan):
    assert unresolved(CLAIMS["C14"], {"": [UNRESOLVED]}, runs[runs["seed"] != "4"], plan) == []


def test_an_export_without_runs_of_the_protocol_is_an_error(exported, tmp_path):
    import pandas as pd

    file = tmp_path / "export.parquet"
    pd.read_parquet(exported).assign(**{"tags.sweep": "study_core"}).to_parquet(file)
    with pytest.raises(UserError, match="no finished run"):
        page(str(file), "command")


# --- the protocol -------------------------------------------------------------------------------------------------
PROTOCOL = (Path(__file__).parents[2] / "results" / "evidence" / "protocol.md").read_text()


def test_the_protocol_has_the_rule_of_collapse():
    assert COLLAPSE in PROTOCOL


@pytest.mark.parametrize("name", [*CLAIMS, *BLOCKS])
def test_the_protocol_has_every_claim_and_every_block(name):
    assert f"| {name} |" in PROTOCOL


def test_the_kl_of_the_protocol_is_exact_and_of_whole_completions():
    assert KL.endswith("exact_reverse_sequence")
