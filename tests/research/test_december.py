"""Claims of the protocol of December 2026, from runs whose means are planted."""

import re

import numpy as np
import pandas as pd
import pytest
from research.studies import december
from research.studies.december import Block
from scipy import stats

CENTRING = (
    "none",
    "exact-c0",
    "exact-c0.5",
    "exact-c1",
    "exact-c1.5",
    "exact-score",
    "exact-score-top4",
    "k1-c0",
    "k1-c1",
)


def runs(means, *, draw=0, starts=5, seeds=(70, 71, 72), noise=0.01, collapsed=()):
    """``means``: (form, lag) to the mean; noise is of the run, and a warm start moves all of its runs alike."""
    rng = np.random.default_rng(draw)
    rows = []
    for (form, lag), mean in means.items():
        for start in range(1, starts + 1):
            for seed in seeds:
                gold = mean + 0.1 * start + noise * rng.standard_normal()
                row = {"form": form, "lag": lag, "start": start, "seed": seed, "rate": 2e-4, "gold": gold}
                rows.append(row | {"collapsed": (form, lag) in collapsed, "proxy": gold, "kl": 1.0})
    return Block(pd.DataFrame(rows))


def verdicts(contrasts):
    return {item.contrast.what: (item.verdict, item.speaks) for item in december.decide(list(contrasts))}


@pytest.fixture(scope="module")
def centring():
    means = {(form, lag): 0.5 for form in CENTRING for lag in (4, 10, 20)}
    means["exact-c0", 20] = 0.2
    means["exact-c0.5", 20] = 0.3
    means["k1-c0", 20] = 0.48
    means["exact-score-top4", 10] = 0.45
    return runs(means, noise=0.002, collapsed={("exact-c0", 20), ("exact-c1.5", 20)})


def test_block_3_is_decided_as_its_runs_were_made(centring):
    claims = verdicts(december.block_3(centring))
    assert claims["exact-c1 - exact-c0, lag 20"] == ("above", "for")
    assert claims["exact-c1 - exact-c0, lag 4"] == ("the same", "against")
    assert claims["exact-c0.5 - exact-c0, lag 20"] == ("above", "for")
    assert claims["exact-c0.5 - exact-c1, lag 20"] == ("below", "for")
    # k1 gains 0.02 from centring, the exact cost 0.3.
    assert claims["(k1-c1 - k1-c0) - (exact-c1 - exact-c0), lag 20"] == ("below", "for")
    assert claims["exact-score-top4 - exact-score, lag 4"] == ("the same", "for")
    assert claims["exact-score-top4 - exact-score, lag 10"] == ("below", "against")


def test_a_contrast_without_power_is_not_resolved():
    means = {(form, lag): 0.5 for form in CENTRING for lag in (4, 10, 20)}
    claims = verdicts(december.block_3(runs(means, draw=1, noise=0.2)))
    assert set(claims.values()) == {("not resolved", "")}


def test_collapses_are_counted_by_arm(centring):
    rows = {row.what: row.speaks for row in december.collapse_claims(centring)}
    assert rows == {
        "exact-c0 15 of 15 (lag 20) - exact-c1 0 of 15 (lag 20)": "for",
        "exact-c0.5 0 of 15 (lag 20) - exact-c1 0 of 15 (lag 20)": "",
        "exact-c0.5 0 of 15 (lag 20) - exact-c0.5 0 of 15 (lag 4)": "",
        "exact-c1: 0 of 15, lag 20": "for",
        "exact-c1.5: 15 of 15, lag 20": "against",
        "exact-score: 0 of 15, lag 20": "for",
        "exact-score-top4: 0 of 15, lag 20": "for",
    }


def test_each_side_of_block_2_is_at_its_own_best_rate():
    frames = []
    for rate, with_kl, without in ((2.5e-5, 0.5, 0.3), (5e-5, 0.4, 0.52), (1e-4, 0.1, 0.2)):
        means = {}
        for lag in (4, 10):
            for form in ("k1-to-go", "k3-clamped", "exact-loss", "exact-prefix"):
                means[form, lag] = with_kl
            means["none", lag] = without
        frames.append(runs(means, seeds=(60, 61), noise=0.001).runs.assign(rate=rate))
    claims = verdicts(december.block_2(Block(pd.concat(frames))))
    assert claims["k3-clamped at 2.5e-05 - none at 5e-05, lag 10"] == ("below", "for")
    assert len(claims) == 8


def test_block_1_has_the_contrasts_of_the_protocol():
    means = {(form, lag): 0.5 for form in december.FORMS for lag in (0, 10)}
    means["k3", 10] = 0.1
    judged = runs(means, seeds=(50, 51, 52, 53), noise=0.002)
    contrasts = [*december.block_1(judged), *december.equal_kl(judged)]
    counts = {claim: [item.claim for item in contrasts].count(claim) for claim in ("H1", "H2", "H3")}
    assert counts == {"H1": 8, "H2": 14, "H3": 2}
    claims = verdicts(contrasts)
    assert claims["k3 - exact-loss, lag 10"] == ("below", "for")
    assert claims["k3 - none, lag 10"] == ("below", "against")
    assert claims["k2 - none, lag 0"] == ("the same", "against")


def test_the_form_of_a_run_is_read_from_its_grid():
    tuned = december.forms_of("hack/tune.yaml")
    assert tuned["lag-10-k3-clamped-beta0.3-lr0.0001"] == "k3-clamped"
    assert tuned["none-lag-0-5e-5"] == "none"
    assert set(tuned.values()) == set(december.FORMS)
    assert set(december.forms_of("centring/centring.yaml").values()) == set(CENTRING)


def test_runs_that_cannot_show_the_margin_do_not_show_that_two_arms_are_the_same():
    means = {(form, lag): 0.5 for form in CENTRING for lag in (4, 10, 20)}
    decided = december.decide(list(december.block_3(runs(means, noise=0.014))))
    alike = [item for item in decided if 6 * item.paired.p_equivalent < 0.05 and item.power < 0.8]
    assert alike
    assert {item.verdict for item in alike} == {"not resolved"}
    # Power is of one of the three contrasts of Z1: a p below 0.05 / 3 in 15 pairs.
    first = decided[0]
    freedom = stats.nct(14, 0.015 / first.paired.deviation * 15**0.5)
    assert first.power == pytest.approx(freedom.sf(stats.t.isf(0.05 / 6, 14)), abs=1e-3)


def test_a_block_that_is_still_running_shows_no_outcome(monkeypatch):
    centring = runs({(form, lag): 0.5 for form in CENTRING for lag in (4, 10, 20)}).runs.assign(block="centring")
    monkeypatch.setattr(december, "read", lambda export: centring)
    assert "| Z1 |" in december.page(None)

    monkeypatch.setattr(december, "read", lambda export: centring.iloc[:-1])
    page = december.page(None)
    assert "| Block 3: centring | 404 | 405 |" in page
    assert "Z1" not in page
    assert "gold" not in page


def test_the_figure_of_block_3_is_drawn(centring, tmp_path):
    december.draw_centring(centring, tmp_path / "centring.svg")
    assert "samples 20 updates old" in (tmp_path / "centring.svg").read_text()


def test_every_claim_of_the_protocol_is_on_the_page_in_its_words():
    protocol = (december.ROOT / "results/evidence/protocol_2026_12.md").read_text()
    assert set(december.CLAIMS) == set(re.findall(r"^\| ([HRZ]\d)(?: \(.*\))?: ", protocol, re.M)) | {"R1"}
    assert set(december.WORDS) == set(december.GRIDS)
