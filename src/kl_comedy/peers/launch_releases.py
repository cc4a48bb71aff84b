"""The release of a system that a launch file is for, as far as the file says.

A default that changed between releases decides what a file means. Three things of a file tell its release: options that
later releases do not have, options that earlier ones do not have, and a version that the file pins
(``pip install trl==0.17.0``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from kl_comedy.peers.systems import System, VersionChange

Numbers = tuple[int, ...]

ANY = 9999
"""The number of the last patch of a release: ``0.17`` ends with all releases of 0.17."""
REQUIREMENT = re.compile(
    r"(?<![\w-])(?P<package>[A-Za-z][\w-]{0,60})(\[[\w,-]{0,60}\])?(?P<versions> ?(==|<=|>=|~=|<|>) ?v?\d[^;\s]*)"
)
"""A package with versions, as ``trl[vllm]>=0.14,<0.16``. Its parts are bounded: a long word is looked through once."""
BOUND = re.compile(r"(==|<=|>=|~=|<|>)\s*v?(\d[\d.]*)")


@dataclass(frozen=True)
class Evidence:
    """A bound on the release: the ``numbers`` of the first or the last that fits, and ``text``, which says why."""

    numbers: Numbers
    text: str


@dataclass(frozen=True)
class Release:
    """The releases for which a file can be; None where it does not say."""

    first: Evidence | None = None
    last: Evidence | None = None

    def is_before(self, change: VersionChange) -> bool:
        """Whether the file is for a release that does not have the change."""
        return self.last is not None and bool(change.since) and self.last.numbers < numbers_of(change.since)

    def has(self, change: VersionChange) -> bool:
        """Whether the file is for a release that has the change."""
        return self.first is not None and bool(change.since) and self.first.numbers >= numbers_of(change.since)


def numbers_of(release: str, *, filled_with: int = 0) -> Numbers:
    """The numbers of a release, for comparison.

    >>> numbers_of("0.19"), numbers_of("0.18.2")
    ((0, 19, 0), (0, 18, 2))
    """
    numbers = [int(number) for number in re.findall(r"\d+", release)[:3]]
    while len(numbers) < 3:
        numbers.append(filled_with)
    return tuple(numbers)


def release_of(system: System, keys: Sequence[str], words: Sequence[str]) -> Release:
    """The release of ``system`` that fits the ``keys`` and the ``words`` of a file."""
    first = list(_pinned(system, words, ("==", ">=", "~=", ">")))
    last = list(_pinned(system, words, ("==", "<=", "~=", "<")))
    if not first and not last:
        # An author's own option may have the name of one that a release dropped or added; a pin has no such doubt.
        first = list(_told_by_keys(system.releases.since, keys, "is new in", filled_with=0))
        last = list(_told_by_keys(system.releases.until, keys, "is an option up to", filled_with=ANY))
    newest_first = max(first, key=lambda evidence: evidence.numbers, default=None)
    oldest_last = min(last, key=lambda evidence: evidence.numbers, default=None)
    if newest_first and oldest_last and newest_first.numbers > oldest_last.numbers:
        # One of the two is an option of the author's own.
        return Release()
    return Release(newest_first, oldest_last)


def _told_by_keys(
    releases: Iterable[tuple[str, Sequence[str]]], keys: Sequence[str], says: str, *, filled_with: int
) -> Iterator[Evidence]:
    for release, patterns in releases:
        for pattern in patterns:
            for key in keys:
                if re.fullmatch(pattern, key):
                    yield Evidence(numbers_of(release, filled_with=filled_with), f"{key[:80]} {says} {release}")
                    break


def _pinned(system: System, words: Sequence[str], operators: Sequence[str]) -> Iterator[Evidence]:
    """The bounds of these operators on the version of the system's package."""
    for word in words:
        requirement = REQUIREMENT.search(word)
        if requirement is None or requirement["package"].lower().replace("_", "-") != system.releases.package:
            continue
        for operator, version in BOUND.findall(requirement["versions"]):
            if operator not in operators:
                continue
            is_open_end = operator in ("~=", "<=") and "<=" in operators
            numbers = numbers_of(version, filled_with=ANY if is_open_end else 0)
            if operator == "~=" and is_open_end:
                # ~=0.19.0 is any 0.19.
                numbers = (*numbers[:2], ANY)
            if operator == "<":
                numbers = _just_below(numbers)
            yield Evidence(numbers, f"the file asks for {requirement[0][:60]}")


def _just_below(numbers: Numbers) -> Numbers:
    major, minor, patch = numbers
    if patch:
        return (major, minor, patch - 1)
    if minor:
        return (major, minor - 1, ANY)
    return (major - 1, ANY, ANY)
