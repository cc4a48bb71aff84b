"""No lie passes and no honest plugin fails, whatever the seed: the plugins of ``paper_plugins`` through certify."""

import pytest

from kl_comedy.errors import UserError
from kl_comedy.kl.claims import all_terms
from kl_comedy.kl.oracle.certificate import certify
from kl_comedy.kl.oracle.part_claims import check_parts
from kl_comedy.registry import CORRECTIONS, ESTIMATORS
from paper_plugins import FALSE, HONEST

SEEDS = range(3)
MANY_SEEDS = range(20)


@pytest.fixture(autouse=True)
def registries(monkeypatch):
    """Registrations of a test end with it."""
    for registry in (ESTIMATORS, CORRECTIONS):
        registry.load()
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))


def register(plugin):
    registry = ESTIMATORS if plugin.kind == "estimator" else CORRECTIONS
    facts = {"claims": plugin.claims} if plugin.kind == "estimator" else {}
    registry.register("mine", source=plugin.source, summary="from a paper", **facts, **plugin.facts)(plugin.fn)


def false_parts(plugin, seed):
    """What the check of the part alone says is false."""
    estimators, corrections = ({"mine": []}, []) if plugin.kind == "estimator" else ({}, ["mine"])
    try:
        return check_parts(estimators, corrections, seed=seed)[0]
    except UserError as error:
        return [str(error)]


def false_certificates(plugin, seed):
    """Of every combination of the plugin, as the command makes them: those whose claimed target is missed."""
    names = (["mine"], None) if plugin.kind == "estimator" else (None, ["mine"])
    terms = [term for term in all_terms(*names) if term.anchor == "current"]
    rows = [row for term in terms for row in certify(term.label(), (term,), seed=seed)]
    return [f"{row.name}, {row.regime}" for row in rows if not row.claim_holds]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", HONEST)
def test_an_honest_plugin_passes(name, seed):
    register(HONEST[name])
    assert false_parts(HONEST[name], seed) == []


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", FALSE)
def test_a_false_plugin_is_found(name, seed):
    register(FALSE[name])
    assert false_parts(FALSE[name], seed) != []


@pytest.mark.slow
@pytest.mark.parametrize("name", [*HONEST, *FALSE])
def test_the_verdict_is_the_same_at_every_seed(name):
    plugin = HONEST.get(name) or FALSE[name]
    register(plugin)
    verdicts = [bool(false_parts(plugin, seed)) for seed in MANY_SEEDS]
    assert verdicts == [name in FALSE] * len(MANY_SEEDS)


@pytest.mark.slow
@pytest.mark.parametrize("name", HONEST)
def test_the_claims_of_an_honest_plugin_hold_in_every_combination(name):
    register(HONEST[name])
    assert [row for seed in SEEDS for row in false_certificates(HONEST[name], seed)] == []
