"""Stored certificates are those that enumeration gives, and are not used where they might differ."""

import json
import math
import random
import subprocess
import sys

import pytest

from kl_comedy.kl import REGIMES, KLTerm, resolve_terms
from kl_comedy.kl.oracle import certificate, stored_certificates
from kl_comedy.kl.oracle.certificate import certify
from kl_comedy.kl.oracle.stored_certificates import FILE, certificates, key_of, source_hash, to_plain
from kl_comedy.peers.systems import SYSTEMS, advise, read, read_flags, switched_on
from kl_comedy.registry import ESTIMATORS

STORED = json.loads(FILE.read_text())


@pytest.fixture
def enumerated(monkeypatch):
    """The names that were enumerated, in order; the stored certificates are read anew."""
    names = []

    def certify_and_count(name, terms, **options):
        names.append(name)
        return certify(name, terms, **options)

    monkeypatch.setattr(certificate, "certify", certify_and_count)
    stored_certificates._load.cache_clear()
    yield names
    stored_certificates._load.cache_clear()


def assert_same(stored, fresh):
    assert stored.keys() == fresh.keys()
    for name, value in stored.items():
        if isinstance(value, dict):
            assert_same(value, {str(key): item for key, item in fresh[name].items()})
        elif isinstance(value, float):
            # Two processors round differently; what is 0 is a sum of rounding errors.
            assert math.isclose(value, fresh[name], rel_tol=1e-6, abs_tol=1e-9), name
        else:
            assert value == fresh[name], name


def compare_with_enumeration(keys):
    for key in keys:
        terms = resolve_terms(json.loads(key))
        for fresh in certify("", terms, regimes=REGIMES):
            assert_same(STORED["certificates"][key][fresh.regime], to_plain(fresh))


def test_a_sample_equals_what_enumeration_gives():
    compare_with_enumeration(random.Random(0).sample(sorted(STORED["certificates"]), 8))


@pytest.mark.slow
def test_all_equal_what_enumeration_gives():
    compare_with_enumeration(STORED["certificates"])


def test_a_stored_certificate_reads_as_the_enumerated_one(enumerated):
    terms = read("verl:use_kl_loss=true").certified_terms()
    for stored, fresh in zip(certificates("verl", terms), certify("verl", terms), strict=True):
        assert_same(to_plain(stored), to_plain(fresh))
        assert stored.verdict == fresh.verdict
        assert stored.terms == terms
        assert stored.row().keys() == fresh.row().keys()
    assert enumerated == []


def test_the_strength_of_the_terms_does_not_matter():
    assert key_of([KLTerm("k3", placement="loss", beta=0.037)]) == key_of([KLTerm("k3", placement="loss", beta=1.0)])
    twice = [KLTerm("k3", placement="loss", beta=0.2), KLTerm("k1", placement="reward", beta=0.1)]
    thrice = [KLTerm("k3", placement="loss", beta=0.3), KLTerm("k1", placement="reward", beta=0.1)]
    assert key_of(twice) != key_of(thrice)


def test_terms_that_are_not_stored_are_enumerated(enumerated):
    (result,) = certificates("unusual", [KLTerm("k_lambda", placement="loss", options={"lam": 0.123})], ["on_policy"])
    assert enumerated == ["unusual"]
    assert result.regime == "on_policy"


def test_with_other_sources_nothing_stored_is_used(enumerated, tmp_path, monkeypatch):
    altered = tmp_path / "stored.json"
    altered.write_text(json.dumps({**STORED, "sources": "0" * 64}))
    monkeypatch.setattr(stored_certificates, "FILE", altered)
    certificates("altered", [KLTerm("k3", placement="loss")], ["on_policy"])
    assert enumerated == ["altered"]


def test_the_hash_covers_every_source_of_terms_and_oracle(tmp_path, monkeypatch):
    before = source_hash()
    package = tmp_path / "kl_comedy"
    for pattern in stored_certificates.SOURCES:
        for path in stored_certificates.PACKAGE.glob(pattern):
            copy = package / path.relative_to(stored_certificates.PACKAGE)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    monkeypatch.setattr(stored_certificates, "PACKAGE", package)
    # Without its cache: the copy has the same sources, until one of them changes.
    assert source_hash.__wrapped__() == before
    for changed in ("kl/surrogate.py", "kl/oracle/enumeration.py", "objective/groups.py", "cuda.py"):
        original = (package / changed).read_bytes()
        (package / changed).write_bytes(original + b"# changed\n")
        assert source_hash.__wrapped__() != before, changed
        (package / changed).write_bytes(original)


def test_an_estimator_of_a_plugin_is_enumerated(enumerated, monkeypatch):
    key = key_of([KLTerm("k3", placement="loss")])
    assert key in STORED["certificates"]
    entry = ESTIMATORS.get("k3")
    object.__setattr__(entry, "modules", ("a_plugin",))
    try:
        certificates("plugin", [KLTerm("k3", placement="loss")], ["on_policy"])
    finally:
        object.__setattr__(entry, "modules", ())
    assert enumerated == ["plugin"]


@pytest.mark.parametrize("name", SYSTEMS)
def test_what_a_system_does_by_default_is_stored(name):
    defaults = read_flags(SYSTEMS[name], {})
    readings = [defaults]
    acting = switched_on(defaults)
    if acting is not None:
        readings.append(acting)
    readings += [read(item.flags) for item in advise(SYSTEMS[name]) if item.flags is not None]
    for reading in readings:
        terms = reading.certified_terms()
        if terms:
            assert key_of(terms) in STORED["certificates"], reading.text


def test_explain_of_a_file_imports_no_torch(tmp_path):
    file = tmp_path / "run.sh"
    file.write_text("python3 -m verl.trainer.main_ppo actor_rollout_ref.actor.use_kl_loss=True\n")
    code = (
        "import sys\n"
        "from kl_comedy.cli.explain import explain\n"
        f"explain([{str(file)!r}])\n"
        "assert 'torch' not in sys.modules\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-300:]
    assert "k3 in the loss" in result.stdout
