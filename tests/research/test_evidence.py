"""The claims page from a small export with known differences: verdicts, Holm's adjustment, missing runs."""

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
from kl_comedy.statistics import Point, holm, reward_at_kl
from kl_comedy.tracking.pages import markdown_tables
from kl_comedy.tracking.runs import FAMILY

CLAIMS = {claim.name: claim for claim in read_claims()}
MADE = ("core", "core_betas", "fix", "smollm2")
NATS = {"none": 2.0, "k1-loss": 3.0}


def outcome(run, name):
    """What a run of the export measured: a step by form, and noise that is the seed's and the form's."""
    seed, form = int(run["seed"]), run["form"]
    noise = 0.001 * ((7 * seed + 3 * len(form)) % 5 - 2)
    if name == "kl":
        return NATS.get(form, 1.0) + noise
    if name == "entropy":
        return 0.05 + 0.02 * (form == "k1-reward") + noise
    if name == "outside":
        return 0.3 + 0.2 * (form == "k1-reward") + noise
    return (0.0 if (form, run["rate"]) == ("none", "0.0008") else 0.5) + noise


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """All runs of the blocks MADE but seed 4 of core's k2 in loss, and curves of five evaluations and 60 updates."""
    import pandas as pd

    plan = planned_runs()
    rows, points = [], []
    for at, run in enumerate(plan[plan["block"].isin(MADE)].to_dict("records")):
        if (run["block"], run["form"], run["seed"]) == ("core", "k2-loss", "4"):
            continue
        run_id = f"{at:04}"
        row = {"run_id": run_id, "run_name": run_id, "experiment": "evidence", "status": "FINISHED"}
        row |= {"start_time": at, "duration_s": 36.0, "stale": ""}
        row |= {"params.name": run["name"], "params.seed": run["seed"], "params.optimizer.lr": run["rate"]}
        row |= {"params.kl.recipe": run["form"], "params.kl.beta": run["beta"]}
        row |= {FAMILY: run["form"], "params.lag.steps": run["lag"]}
        row |= {"tags.sweep": f"evidence_{run['block']}", "tags.git.commit": "0" * 40, "tags.git.dirty": "false"}
        row |= {f"metrics.{METRICS[name]}": outcome(run, name) for name in METRICS}
        rows.append(row | {f"metrics.eval/{name}/reward": outcome(run, "outside") for name in OTHER_FAMILIES})
        end = outcome(run, "end")
        points += [(run_id, REWARD, step, value, 3) for step, value in ((0, 0.4), (30, end), (60, end))]
        for name in ("train/length", "train/reward"):
            points += [(run_id, name, step, float(step % 2), 30) for step in range(30)]
    file = tmp_path_factory.mktemp("evidence") / "export.parquet"
    pd.DataFrame(rows).to_parquet(file)
    columns = ["run_id", "metric", "step", "value", "recorded"]
    pd.DataFrame(points, columns=columns).to_parquet(file.with_suffix(".curves.parquet"))
    return str(file)


@pytest.fixture(scope="module")
def runs(exported):
    return measured_runs(exported, planned_runs())


def test_every_contrast_of_every_claim_is_planned():
    plan = planned_runs()
    nothing = plan.assign(**dict.fromkeys(("kl", "start", *METRICS, "outside", "collapsed", FAMILY)))[:0]
    assert len(plan) == 1624
    for claim in CLAIMS.values():
        for contrast in (each for contrasts in claim.parts.values() for each in contrasts):
            for name in contrast.signs:
                rows = compare(contrast, name, nothing, plan)
                seeds = 3 if {*contrast.blocks} & {*REAL_MODEL} else 5
                assert rows and all(row["planned"] >= seeds and row["pairs"] == 0 for row in rows), contrast
    assert {row["planned"] for row in compare(CLAIMS["P1"].parts[""][0], "end", nothing, plan)} == {10}


def test_known_differences_have_known_verdicts(exported, runs):
    summary = markdown_tables(page(exported, "command")[1])[0].rows
    verdicts = {row[0].partition("]")[0][1:]: (row[2], row[4]) for row in summary}
    assert [*verdicts][-1] == "S9" and {*verdicts} == {*CLAIMS, *(claim.name for claim in enumerated.read_claims())}
    assert verdicts["C6"] == ("confirmed", "none needed") and [*verdicts].index("C10") == [*verdicts].index("C9") + 1
    assert verdicts["C14"] == ("confirmed, with a remark", "45 of 45")
    assert verdicts["C17"] == ("contradicted", "30 of 30")
    assert verdicts["C11"][0] == "confirmed"  # 5 of 5 against 0 of 5, at one learning rate of three
    assert verdicts["L1"] == ("preliminary: confirmed, with a remark", "30 of 50, runs missing")
    assert verdicts["C16"][0].startswith("preliminary: the same: confirmed; ahead: ")
    assert verdicts["L2"] == ("preliminary: not resolved", "27 of 50, runs missing")
    assert verdicts["P2"] == ("runs missing, with a remark", "0 of 255, runs missing")
    assert runs["collapsed"].sum() == 5


def test_a_claim_that_enumeration_does_not_bear_out_is_contradicted(tmp_path, monkeypatch):
    rows = [["comedy/k1_in_loss", "on_policy", "sequence_reverse"], ["liu/k2_loss", "on_policy", "token_reverse"]]
    for optimizes, expected in ((rows, "mixed"), (rows[:1], "contradicted"), (rows[1:], "confirmed")):
        claim = enumerated.EnumeratedClaim(name="C1", hypothesis="k1", optimizes=optimizes)
        row, section = enumerated.section(claim)
        assert row[2] == expected and f"**Verdict: {expected}.** No training." in section
    (tmp_path / "study.csv").write_text("form,beta,bias\nk1,0.1,1\nk1,0.1,3\nk2,0.1,5\n")
    monkeypatch.setattr(enumerated, "RESULTS", tmp_path)
    number = ["k1's", "study.csv", {"form": "k1", "beta": 0.1}, "bias", "mean"]
    claim = enumerated.EnumeratedClaim(name="C8", hypothesis="k1", verdict="so", numbers=[number], command="make")
    assert enumerated.section(claim)[0][2:] == ["so", "k1's: 2", "none needed"]


def test_all_contrasts_of_a_claim_are_one_family(runs):
    rows = [row for part in evaluate(CLAIMS["C9"], runs, planned_runs()).values() for row in part]
    assert len(rows) == 9 and [row["p_holm"] for row in rows] == holm([row["p"] for row in rows])


def test_an_outcome_without_a_direction_is_shown_and_not_tested(runs):
    parts = evaluate(CLAIMS["P4"], runs, planned_runs())
    rows = [row for part in parts.values() for row in part]
    shown = [row for row in rows if row["outcome"] == "kl"]
    assert len(needed(CLAIMS["P4"], runs)) == 42 and {row["pairs"] for row in shown} == {3}
    assert {(row["p_holm"], row["decision"]) for row in shown} == {(None, "")}
    tested = [row for row in rows if row["outcome"] != "kl"]
    assert [row["p_holm"] for row in tested] == holm([row["p"] for row in tested])
    assert {row["p_same"] for row in rows} == {None}  # three seeds
    assert {row["key"][0] for row in parts["prefix ratio"]} == {"4"}


def test_at_equal_kl_a_frontier_runs_from_the_start_to_no_kl(runs):
    (contrast, *_) = [each for each in CLAIMS["T1"].parts[""] if (each.a, each.b) == ("k1-reward", "k1-loss")]
    row = next(row for row in compare(contrast, "end", runs, planned_runs()) if row["key"] == ("0.0001",))
    here = runs[(runs["rate"] == "0.0001") & runs["form"].isin(("none", "k1-reward")) & (runs["block"] == "core")]
    by_seed = [
        reward_at_kl(
            [Point(0.0, 0.4), *(Point(kl, end) for kl, end in zip(group["kl"], group["end"], strict=True))], 0.5
        )
        for _, group in here.groupby("seed")
    ]
    assert row["at"].endswith("0.5 nats") and row["a"] == pytest.approx(sum(by_seed) / 5) and row["pairs"] == 5


def test_collapsed_runs_are_not_compared_where_the_two_sides_share_runs():
    fields = {"a": "k1-reward", "b": "k1-loss", "blocks": ["core"], "signs": {"collapsed": 1}}
    assert Contrast(**fields).at_kl == []
    with pytest.raises(UserError, match=r"signs: got 'collapsed'; .*points of both frontiers"):
        Contrast(**fields, at_kl=[0.5])


@pytest.mark.parametrize(("difference", "deviation", "level"), [(0.04, 0.04, 0.05), (-0.3, 0.4, 0.005)])
def test_the_seeds_that_would_resolve_a_difference_have_the_power_in_a_simulation(difference, deviation, level):
    import numpy as np
    from scipy.stats import ttest_1samp

    n = pairs_needed(difference, deviation, level)
    draws = np.random.default_rng(0).normal(difference, deviation, (20_000, n))
    enough, fewer = (float((ttest_1samp(each, 0, axis=1).pvalue < level).mean()) for each in (draws, draws[:, :-1]))
    assert fewer < 0.81 and enough > 0.79, (fewer, enough)


def test_only_what_is_whole_and_not_resolved_has_a_cost(runs):
    half = 2.776 * 0.04 / 5**0.5  # of the interval of five pairs with a standard deviation of 0.04
    row = {"contrast": "a - b", "at": "beta 1", "outcome": "end", "sign": 1, "pairs": 5, "a": 0.5, "b": 0.46}
    row |= {"difference": 0.04, "low": 0.04 - half, "high": 0.04 + half, "p": 0.09, "p_holm": 0.09, "decision": ""}
    claim, hours = CLAIMS["C14"], needed(CLAIMS["C14"], runs)["hours"].mean()
    plan = planned_runs()
    ((*_, seeds, more),) = unresolved(claim, {"": [row]}, runs, plan)
    assert (seeds, more) == ("10", f"{10 * hours:.1f}")
    assert unresolved(claim, {"": [row | {"decision": "for"}]}, runs, plan) == []
    assert unresolved(claim, {"": [row]}, runs[runs["seed"] != "4"], plan) == []


def test_an_export_without_runs_of_the_protocol_is_an_error(exported, tmp_path):
    import pandas as pd

    other = tmp_path / "export.parquet"
    pd.read_parquet(exported).assign(**{"tags.sweep": "study_core"}).to_parquet(other)
    with pytest.raises(UserError, match="no finished run"):
        page(str(other), "command")


def test_the_protocol_has_the_rule_and_the_claims():
    from pathlib import Path

    protocol = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()
    assert COLLAPSE in protocol and all(f"| {name} |" in protocol for name in CLAIMS)
    assert all(f"| {block} |" in protocol for block in BLOCKS) and KL.endswith("exact_reverse_sequence")
