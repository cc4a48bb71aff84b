"""Store the certificates that `kl-comedy explain` reads: `python research/scripts/store_certificates.py`.

`--check` writes nothing and fails where the stored ones belong to other sources of terms and oracle.

Stored are the terms of every system's flags, in the combinations that the page "which flag?" offers, of its advice, and
of every recipe. Other terms are enumerated when somebody asks for them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from kl_comedy.errors import UserError
from kl_comedy.kl import REGIMES, KLTerm
from kl_comedy.kl.oracle.certificate import certify
from kl_comedy.kl.oracle.stored_certificates import FILE, key_of, source_hash, to_plain
from kl_comedy.peers.systems import SYSTEMS, System, advise, read, read_flags, switched_on
from kl_comedy.registry import RECIPES

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
from register.which_flag import offered, options_of


def terms_of(system: System) -> Iterator[tuple[KLTerm, ...]]:
    """The terms of a system's flags, each list as the policy loss leaves it."""
    flags = offered(system)
    for values in itertools.product(*[options_of(flag) for flag in flags]):
        given = {flag.name: value for flag, value in zip(flags, values, strict=True)}
        try:
            reading = read_flags(system, given)
        except UserError:
            # The system refuses these flags, so there is nothing to certify.
            continue
        yield reading.certified_terms()
        acting = switched_on(reading)
        if acting is not None:
            yield acting.certified_terms()
    for item in advise(system):
        if item.flags is not None:
            yield read(item.flags).certified_terms()


def wanted() -> dict[str, tuple[KLTerm, ...]]:
    """Everything that is stored, by key."""
    by_key = {}
    for system in SYSTEMS.values():
        for terms in terms_of(system):
            by_key[key_of(terms)] = terms
    for name in RECIPES.names():
        terms = RECIPES.get(name).fn()
        by_key[key_of(terms)] = terms
    # No terms, no enumeration.
    by_key.pop(key_of(()), None)
    return by_key


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    if arguments.check:
        # The hash alone: a list of terms that is missing costs its reader a second and is no error.
        if json.loads(FILE.read_text("utf-8"))["sources"] != source_hash():
            print(f"{FILE.name} is of other sources of terms and oracle: run research/scripts/{Path(__file__).name}")
            return 1
        return 0
    certificates = {}
    for key, terms in sorted(wanted().items()):
        certificates[key] = {item.regime: to_plain(item) for item in certify("", terms, regimes=REGIMES)}
    # One line per list of terms, so that a diff shows which of them changed.
    lines = [f"{json.dumps(key)}: {json.dumps(by_regime)}" for key, by_regime in certificates.items()]
    joined_lines = ",\n".join(lines)
    FILE.write_text(f'{{"sources": "{source_hash()}", "certificates": {{\n{joined_lines}\n}}}}\n', "utf-8")
    print(f"{FILE}: {len(certificates)} lists of terms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
