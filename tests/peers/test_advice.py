"""The advice does not contradict itself, each piece has its proof and says what was trained, and `explain` uses it."""

import pytest
import yaml

from kl_comedy.cli.first_answer import candidate_had
from kl_comedy.errors import UserError
from kl_comedy.kl import claimed_target
from kl_comedy.kl.recipes import resolve_terms
from kl_comedy.peers.advice import (
    FILE,
    REGIME_OF_SAMPLES,
    UNTRAINED,
    Cell,
    Contrast,
    Measured,
    Side,
    Strength,
    advice,
    advised,
    contradictions,
    evidence_in_words,
    measured,
    read_advice,
    strength,
    what_to_use,
)
from kl_comedy.peers.systems import GOALS, SYSTEMS, advise, find_system, read, read_flags


@pytest.fixture
def changed(tmp_path):
    """Read a copy of the advice after ``change`` has altered its plain data."""

    def read_changed(change):
        raw = yaml.safe_load(FILE.read_text())
        change(raw)
        file = tmp_path / "advice.yaml"
        file.write_text(yaml.safe_dump(raw))
        return read_advice(file)

    return read_changed


# --- contradictions -------------------------------------------------------------------------------------------------
def test_nothing_is_both_recommended_and_forbidden():
    assert contradictions(advice()) == []


@pytest.mark.parametrize(
    ("situation", "recipe", "rule"),
    [
        # What the pages once said: each of these was recommended in one place and forbidden in another.
        ("stale_sampled", "is/k3_per_decision", "ratio_on_sampled_cost"),
        ("stale_full", "rb/full", "exact_cost_without_baseline"),
        ("fresh_sampled", "comedy/k1_in_loss", "k1_in_loss"),
        ("fresh_sampled", "comedy/k3_in_reward", "k3_in_reward"),
        ("stale_sampled", "trl/rloo", "total_cost"),
    ],
)
def test_a_planted_contradiction_is_found(changed, situation, recipe, rule):
    def plant(raw):
        raw["situations"][situation]["kl"] = recipe
        raw["situations"][situation].pop("candidates", None)
        raw["situations"][situation].pop("words", None)
        raw["names"][recipe] = recipe

    assert f"{situation} advises {recipe}, which {rule} forbids" in contradictions(changed(plant))


def test_a_planted_rule_that_forbids_an_advice_is_found(changed):
    def plant(raw):
        raw["never"]["exact_in_loss"] = {
            "words": "exact KL in the loss",
            "terms": {"estimator": "exact", "placement": "loss"},
            "why": {"stale": "planted"},
            "recipe": "rb/token",
            "contrasts": [],
        }

    assert contradictions(changed(plant)) == ["stale_full advises rb/token, which exact_in_loss forbids"]


def test_a_rule_must_forbid_its_own_example(changed):
    table = changed(lambda raw: raw["never"]["k1_in_loss"].update(recipe="grpo"))
    assert contradictions(table) == [
        "k1_in_loss names grpo, which it does not forbid on fresh samples",
        "k1_in_loss names grpo, which it does not forbid on stale samples",
    ]


def test_evidence_about_another_term_is_found(changed):
    def plant(raw):
        raw["situations"]["stale_full"]["contrasts"] = ["robust_over_none"]
        raw["never"]["k1_in_loss"]["contrasts"] = ["total_behind_k3"]

    assert contradictions(changed(plant)) == [
        "stale_full quotes robust_over_none, which is about rb/robust",
        "k1_in_loss quotes total_behind_k3, which is about comedy/k1_in_reward",
    ]


def test_an_advice_is_a_kl_or_a_config(changed):
    table = changed(lambda raw: raw["situations"]["sampler"].pop("config"))
    assert contradictions(table) == ["sampler needs either kl, config or candidates"]


def test_k3_in_the_reward_is_allowed_beside_k3_in_the_loss():
    rule = advice().never["k3_in_reward"]
    assert rule.forbids(resolve_terms("comedy/k3_in_reward"), "fresh")
    assert not rule.forbids(resolve_terms("comedy/k3_both"), "fresh")


def test_a_rule_does_not_forbid_a_pull_towards_the_sampler():
    terms = resolve_terms([{"estimator": "k1", "placement": "loss", "reference": "sampler"}])
    assert advice().forbidding(terms, "fresh") is None


@pytest.mark.parametrize("system", SYSTEMS)
def test_no_flags_that_a_system_is_advised_are_forbidden(system):
    """On the samples of the goal that they are advised for."""
    samples_of_regime = {regime: samples for samples, regime in REGIME_OF_SAMPLES.items()}
    forbidden = []
    for item in advise(find_system(system)):
        samples = samples_of_regime[item.goal.regime]
        if item.flags and advice().forbidding(read(item.flags).terms, samples) is not None:
            forbidden.append((item.flags, samples))
    assert forbidden == []


# --- proof and evidence ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("situation", advice().situations.values(), ids=lambda situation: situation.name)
def test_the_proof_of_an_advice_is_the_claim_of_its_term(situation):
    """The exact tests enumerate whether claims hold."""
    targets = {claimed_target(term, REGIME_OF_SAMPLES[situation.samples]) for term in situation.terms}
    assert targets <= {situation.target}


@pytest.mark.parametrize("item", [*advice().situations.values(), *advice().never.values()], ids=lambda item: item.name)
def test_each_advice_names_what_was_trained_or_says_that_nothing_was(item):
    text = evidence_in_words(item, advice(), measured())
    if item.contrasts:
        assert "seeds" in text or "runs" in text
        assert strength(item, measured()).of >= len(item.contrasts)
    else:
        assert text == UNTRAINED
        assert strength(item, measured()).of == 0


def test_every_contrast_is_evidence_for_something_and_is_measured():
    named = set()
    table = advice()
    for judged in (table.rewards, table.situations, table.candidates, table.never):
        for item in judged.values():
            named |= set(item.contrasts)
    assert named == set(advice().contrasts) == set(measured().contrasts)
    assert set(advice().spreads) == set(measured().spreads)


def cell(low, high):
    means = {"a_mean": 0.5, "b_mean": 0.5, "difference": (low + high) / 2, "low": low, "high": high}
    counts = {"pairs": 5, "ahead": 3, "behind": 2, "a_collapsed": 0, "a_runs": 5, "b_collapsed": 0, "b_runs": 5}
    return Cell(setting="somewhere", **means, **counts)


def test_strength_counts_intervals_on_either_side_of_zero(changed):
    def one_contrast_each(raw):
        raw["situations"]["stale_full"]["contrasts"] = ["token_over_k3"]
        raw["never"]["k1_in_loss"]["contrasts"] = ["k1_loss_behind_async"]

    table = changed(one_contrast_each)
    cells = (cell(0.01, 0.02), cell(0.01, 0.03), cell(-0.02, -0.01), cell(-0.01, 0.01))
    result = Measured(contrasts={"token_over_k3": cells, "k1_loss_behind_async": cells}, spreads={})
    assert strength(table.situations["stale_full"], result) == Strength(2, 1, 4)
    # A rule is supported where its side is behind.
    assert strength(table.never["k1_in_loss"], result) == Strength(1, 2, 4)


def made_up(name):
    """One contrast with a cell whose numbers all differ."""
    numbers = {"a_mean": 0.6, "b_mean": 0.5, "difference": 0.1234, "low": 0.0111, "high": 0.2555}
    counts = {"pairs": 7, "ahead": 5, "behind": 2, "a_collapsed": 3, "a_runs": 8, "b_collapsed": 1, "b_runs": 9}
    counts |= {"none_collapsed": 6, "none_runs": 7}
    cells = (Cell(setting="somewhere", **numbers, **counts), cell(0.4, 0.6))
    return Measured(contrasts={name: cells}, spreads={})


def test_the_evidence_of_an_advice_is_the_difference_in_its_first_setting(changed):
    table = changed(lambda raw: raw["situations"]["stale_full"].update(contrasts=["token_over_k3"]))
    text = evidence_in_words(table.situations["stale_full"], table, made_up("token_over_k3"))
    other = table.words_of(table.contrasts["token_over_k3"].b)
    assert text == f"+0.123 [0.011, 0.256] against {other}; somewhere, 7 seeds"


def test_the_evidence_of_a_rule_is_how_many_runs_collapsed_on_each_side(changed):
    table = changed(lambda raw: raw["never"]["k1_in_loss"].update(contrasts=["k1_loss_behind_async"]))
    text = evidence_in_words(table.never["k1_in_loss"], table, made_up("k1_loss_behind_async"))
    other = table.words_of(table.contrasts["k1_loss_behind_async"].b)
    assert text == f"collapsed in 3 of 8 runs (somewhere), {other} in 1 of 9, no KL in 6 of 7"


def test_a_side_is_called_by_its_name_or_by_its_kl_and_beta():
    words = advice().words_of
    assert words(Side(kl="rb/full", beta=0.05)) == f"{advice().names['rb/full']} (beta 0.05)"
    assert words(Side(kl="rb/full")) == advice().names["rb/full"]
    assert words(Side(kl="rb/full", beta=0.05, name="the same, clamped")) == "the same, clamped"


@pytest.mark.parametrize(
    ("where", "cells", "samples"),
    [
        ({}, {"params.optimizer.lr": [1e-4]}, "fresh"),
        ({"params.lag.steps": 10}, {}, "stale"),
        ({}, {"params.lag.steps": [1, 10]}, "stale"),
        ({"params.algorithm.updates_per_batch": 4}, {}, "stale"),
    ],
)
def test_a_contrast_is_of_stale_samples_where_its_runs_have_an_age_or_use_a_batch_again(where, cells, samples):
    side = Side(kl="grpo")
    assert Contrast(name="a", export="b", a=side, b=side, cells=cells, where=where).samples == samples


def test_terms_of_which_one_pulls_to_a_teacher_are_of_distillation():
    terms = [*resolve_terms("opd/reverse"), *resolve_terms("grpo")]
    assert advice().situation_for(terms, "fresh").reference == "teacher"


# --- faults of the file ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: raw.update(sitations={}), "sitations: no such key"),
        (lambda raw: raw["situations"]["sampler"].update(samples="old"), "situations.sampler.samples: got 'old'"),
        (lambda raw: raw["situations"]["sampler"].update(contrasts=["mask_over_cat"]), "did you mean 'mask_over_cap'"),
        (lambda raw: raw["situations"]["sampler"].update(pages=["first"]), "sampler.pages: got 'first'"),
        (lambda raw: raw["situations"]["sampler"].pop("words"), "or give words"),
        (lambda raw: raw["contrasts"]["mask_over_cap"].update(export="trust"), "contrasts.mask_over_cap.export"),
        (lambda raw: raw["never"]["k1_in_loss"]["terms"].update(placment="loss"), "did you mean 'placement'"),
        (lambda raw: raw["never"]["k1_in_loss"]["why"].update(old="no"), "never.k1_in_loss.why: got 'old'"),
    ],
)
def test_a_fault_of_the_file_is_named(changed, change, message):
    with pytest.raises(UserError, match=message):
        changed(change)


# --- what `explain` says --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("kl", "fresh", "stale"),
    [
        ("comedy/k1_in_loss", "never.", "never."),
        ("rb/full", "this is what we advise.", "never."),
        ("is/k3_per_decision", "we advise", "never."),
        ("grpo", "we advise", "open, and this is one candidate"),
        ("verl/low_var_kl", "we advise", "open, and this is one candidate"),
        ("rb/token", "we advise exact KL in the reward, to go (rb/full;", "this is what we advise."),
        ("liu/k2_loss", "we advise k1 in the reward", "open, and this is one candidate"),
    ],
)
def test_what_to_use_on_fresh_and_on_stale_samples(kl, fresh, stale):
    first, second = what_to_use(resolve_terms(kl))
    assert first.startswith(f"fresh samples: {fresh}")
    assert second.startswith(f"stale samples: {stale}")


def test_a_refusal_says_what_to_use_instead_and_what_was_trained():
    _, stale = what_to_use(resolve_terms("rb/full"))
    assert "collapsed in 10 of 15 runs" in stale
    assert stale.endswith("Use instead: exact KL in the loss (rb/token; needs full logits of both models).")


def test_the_evidence_of_a_refusal_has_the_age_of_the_samples():
    fresh, stale = what_to_use(resolve_terms("comedy/k1_in_loss"))
    assert "old" not in fresh
    assert "samples 10 updates old" in stale


def test_a_teacher_and_the_sampler_have_advice_of_their_own():
    (line,) = what_to_use(resolve_terms("opd/sampled"))
    assert "opd/reverse" in line
    (line,) = what_to_use(resolve_terms([{"estimator": "k2", "placement": "loss", "reference": "sampler"}]))
    assert line.startswith("stale samples: we advise a mask of the token's probability")


def test_nothing_is_said_without_terms_or_where_the_terms_do_not_hold():
    assert what_to_use(()) == []
    assert len(what_to_use(resolve_terms("grpo"), ["on_policy"])) == 1


def test_the_goals_of_other_systems_have_the_advised_recipes():
    assert [goal.recipe for goal in GOALS.values()] == ["rb/full", "rb/token", "rb/token"]
    with pytest.raises(UserError, match="is not a recipe"):
        advised("stale_sampled")
    with pytest.raises(UserError, match="is not a recipe"):
        advised("sampler")
    with pytest.raises(UserError, match="did you mean 'stale_full'"):
        advised("stale_ful")


# --- one voice ------------------------------------------------------------------------------------------------------
CANDIDATES = {
    (candidate.name, system): flags
    for candidate in advice().candidates.values()
    for system, flags in candidate.flags.items()
}


@pytest.mark.parametrize(("name", "system"), CANDIDATES)
def test_the_flags_of_a_candidate_are_that_form_in_the_system(name, system):
    """Read by the system's rules; a ratio or a clamp may be bounded."""
    (term,) = read_flags(SYSTEMS[system], CANDIDATES[name, system]).terms
    form = (term.estimator, term.placement, term.correction, term.gradient)
    if name == "k3_loss":
        assert form == ("k3", "loss", "none", "natural")
    elif name == "k3_ratio":
        # OpenRLHF: the ratio, detached, times k2's gradient; open-instruct: the ratio times k1. The mean is the same.
        same = [("k3", "loss", "token_detached", "k2"), ("k1", "loss", "token", "natural")]
        assert form in [("k3", "loss", "token", "natural"), *same]
    elif name == "k2_loss":
        assert form in (("k2", "loss", "none", "natural"), ("k3", "loss", "none", "k2"))
    else:
        assert (term.estimator, term.placement, term.credit, term.baseline) == ("k1", "reward", "to_go", "before")


@pytest.mark.parametrize(("name", "system"), CANDIDATES)
def test_no_answer_tells_the_owner_of_a_candidate_to_undo_it(name, system):
    """Who follows an answer is told on stale samples that he has a candidate, and never that it is forbidden."""
    reading = read_flags(SYSTEMS[system], CANDIDATES[name, system])
    assert candidate_had(reading) is advice().candidates[name]
    assert advice().forbidding(reading.terms, "stale") is None


FIXES = [
    "verl:use_kl_loss=true,kl_loss_type=k3+",
    "slime:use_kl_loss=true,kl_loss_coef=0.01,kl_loss_type=k3,use_unbiased_kl=true",
    "slime:use_kl_loss=true,kl_loss_coef=0.01,kl_loss_type=k2",
    "openrlhf:use_loss=true,kl_estimator=k3,unbiased_gradient=true",
    "tunix:beta=0.04,kl_loss_mode=mse_kl",
    "trl:beta=0.04,use_bias_correction_kl=true",
]
"""What symptom pages and rows of the register tell their readers to set."""


@pytest.mark.parametrize("flags", FIXES)
def test_what_the_pages_tell_to_set_is_a_candidate_or_the_advice(flags):
    reading = read(flags)
    answers = what_to_use(reading.terms)
    assert not any("never" in answer for answer in answers)
    assert candidate_had(reading) is not None
