"""Certificates that were enumerated before: `kl-comedy explain` answers from them without torch.

    terms -> key -> stored_certificates.json -> Certificate
                 -> not there, or the sources differ -> certify (torch)

Enumeration is exact and has no random part, so that a stored certificate is the one that enumeration gives. It depends
on the sources of the terms and the oracle: :func:`source_hash` covers them, and with other sources nothing that is
stored is used. ``python research/scripts/store_certificates.py`` writes the file.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kl_comedy.kl.claims import REGIMES
from kl_comedy.kl.oracle.certificate_record import Certificate, finite_or_none, relative_terms
from kl_comedy.kl.term import KLTerm
from kl_comedy.registry import CORRECTIONS, ESTIMATORS

FILE = Path(__file__).with_name("stored_certificates.json")
PACKAGE = Path(__file__).parents[2]
SOURCES = ("kl/*.py", "kl/oracle/*.py", "objective/*.py", "cuda.py")
"""Files of the package on which a certificate depends."""
FIGURES = (
    "target",
    "near_target",
    "claimed",
    "relative_bias",
    "cosine",
    "variance",
    "variance_ratio",
    "strength",
    "pull",
    "batch_bias",
)
"""The fields of a certificate that are stored: those that differ from the defaults without drawn settings."""


def certificates(name: str, terms: Sequence[KLTerm], regimes: Sequence[str] = REGIMES) -> list[Certificate]:
    """One certificate per regime, the stored ones where they are all there, otherwise enumerated.

    The same as :func:`~kl_comedy.kl.oracle.certificate.certify` without drawn settings.
    """
    stored = _stored(terms)
    if stored is not None:
        return [_from_plain(name, tuple(terms), regime, stored[regime]) for regime in regimes]
    from kl_comedy.kl.oracle.certificate import certify

    return certify(name, terms, regimes=regimes)


def key_of(terms: Sequence[KLTerm]) -> str:
    """By what the certificates of terms are stored: the terms as data, with betas relative to the largest."""
    return json.dumps([term.to_mapping() for term in relative_terms(terms)], sort_keys=True)


def to_plain(certificate: Certificate) -> dict[str, Any]:
    """The stored figures of a certificate; a cosine with a zero gradient is None."""
    plain = {name: getattr(certificate, name) for name in FIGURES}
    # JSON has no nan.
    plain["cosine"] = {target: finite_or_none(cosine) for target, cosine in certificate.cosine.items()}
    return plain


@functools.cache
def source_hash() -> str:
    """SHA-256 of the sources of terms and oracle, this file included."""
    digest = hashlib.sha256()
    for pattern in SOURCES:
        for path in sorted(PACKAGE.glob(pattern)):
            digest.update(f"{path.relative_to(PACKAGE).as_posix()}\n".encode())
            # A checkout on Windows may have other ends of lines.
            digest.update(path.read_bytes().replace(b"\r\n", b"\n"))
    return digest.hexdigest()


def _stored(terms: Sequence[KLTerm]) -> Mapping[str, Any] | None:
    """The stored figures by regime; None where there are none for these terms and these sources."""
    # A part of a plugin is in no source that the hash covers.
    for term in terms:
        if ESTIMATORS.get(term.estimator).modules or CORRECTIONS.get(term.correction).modules:
            return None
    by_regime: Mapping[str, Any] | None = _load().get(key_of(terms))
    return by_regime


@functools.cache
def _load() -> Mapping[str, Any]:
    """The stored certificates by key; none where the file is missing or was written with other sources."""
    if not FILE.is_file():
        return {}
    stored = json.loads(FILE.read_text("utf-8"))
    if stored["sources"] != source_hash():
        return {}
    certificates_by_key: Mapping[str, Any] = stored["certificates"]
    return certificates_by_key


def _from_plain(name: str, terms: tuple[KLTerm, ...], regime: str, plain: Mapping[str, Any]) -> Certificate:
    figures = dict(plain)
    figures["cosine"] = {}
    for target, cosine in plain["cosine"].items():
        figures["cosine"][target] = math.nan if cosine is None else cosine
    # The keys of a JSON object are texts; these are numbers of completions.
    figures["batch_bias"] = {int(completions): bias for completions, bias in plain["batch_bias"].items()}
    return Certificate(name=name, terms=terms, regime=regime, **figures)
