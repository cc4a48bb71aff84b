"""No lie passes and no honest plugin fails, whatever the seed: the plugins of ``paper_plugins`` through certify."""

import pytest

from kl_comedy.errors import UserError
from kl_comedy.kl.claims import all_terms
from kl_comedy.kl.oracle.certificate import certify
from kl_comedy.kl.oracle.part_claims import check_parts
from kl_comedy.registry import CORRECTIONS, ESTIMATORS
from paper_plugins import FALSE, HONEST

SEEDS = range(2)


@pytest.fixture(autouse=True)
def registries(monkeypatch):
    """Registrations of a test end with it."""
    for registry in (ESTIMATORS, CORRECTIONS):
        registry.load()
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))


def register(plugin):
    if plugin.kind == "estimator":
        register_as_mine = ESTIMATORS.register(
            "mine", source=plugin.source, summary="from a paper", claims=plugin.claims, **plugin.facts
        )
    else:
        register_as_mine = CORRECTIONS.register("mine", source=plugin.source, summary="from a paper", **plugin.facts)
    register_as_mine(plugin.fn)


def false_parts(plugin, seed):
    """What the check of the part alone says is false."""
    estimators = {}
    corrections = []
    if plugin.kind == "estimator":
        estimators = {"mine": []}
    else:
        corrections = ["mine"]
    try:
        failures, _ = check_parts(estimators, corrections, seed=seed)
    except UserError as error:
        # A part that cannot be checked at all, for instance because it raises.
        return [str(error)]
    return failures


def false_certificates(plugin, seed):
    """Those combinations of the plugin, as the command makes them, that miss the target they claim."""
    if plugin.kind == "estimator":
        terms = all_terms(["mine"], None)
    else:
        terms = all_terms(None, ["mine"])
    missed = []
    for term in terms:
        # Another anchor changes the reference of a term, not which parts it is made of.
        if term.anchor != "current":
            continue
        for certificate in certify(term.label(), (term,), seed=seed):
            if not certificate.claim_holds:
                missed.append(f"{certificate.name}, {certificate.regime}")
    return missed


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
@pytest.mark.parametrize("name", HONEST)
def test_the_claims_of_an_honest_plugin_hold_in_every_combination(name):
    register(HONEST[name])
    assert false_certificates(HONEST[name], seed=0) == []
