"""How old the samples are that a system learns from, by its options: which row of a certificate is the user's.

    options of a file or of flags -> Sampling -> freshness_of (the cases of the system's file) -> one sentence

Samples are fresh where the policy that sampled is the one that is updated. They are stale after the first of several
updates of one batch, and where sampling goes on beside the training.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kl_comedy.errors import UserError
from kl_comedy.peers.systems import (
    SYSTEMS,
    Flag,
    Reading,
    Sampling,
    System,
    Value,
    VersionChange,
    conditions_hold,
    flag_of_key,
    format_value,
)

if TYPE_CHECKING:
    from kl_comedy.peers.launch_releases import Release
    from kl_comedy.peers.launch_settings import Setting


@dataclass(frozen=True, kw_only=True)
class FreshnessAnswer:
    """The row of a reading.

    - ``updates``: optimizer updates per batch of samples; None where that depends on something unknown.
    - ``lag``: how many versions older samples may be; 0 where sampling waits for the update, None without a bound.
    - ``regime``: ``on_policy``, ``off_policy`` or ``mixed``; None where it is not known.
    - ``sentence``: says all this, from which options, and which of them are defaults.
    """

    updates: int | None
    lag: float | None
    regime: str | None
    sentence: str


ROWS = {
    "on_policy": "the on-policy row holds",
    "off_policy": "the off-policy row holds",
    "mixed": "the mixed row holds",
}


def freshness_of(reading: Reading) -> FreshnessAnswer:
    """The row of a reading, with the system's defaults for what is not given."""
    return _Computation(SYSTEMS[reading.system], reading.sampling, reading.flags).answer()


class _Computation:
    def __init__(self, system: System, sampling: Sampling, flags: Mapping[str, Value]) -> None:
        self.system = system
        self.sampling = sampling
        self.options = {option.name: option for option in system.freshness.options}
        self.values = {name: option.default for name, option in self.options.items()}
        self.values.update(sampling.given)
        self.flags = {**flags, **self.values}
        # Options with a default of their own in the file's release: a case may ask for them as for given ones.
        self.defaults_before: dict[str, Value] = {}
        self.change = self._change()
        if self.change is not None and self.change.key in sampling.without:
            self.defaults_before = dict(self.change.before)
            self.values.update(self.defaults_before)
            self.flags.update(self.defaults_before)

    def _change(self) -> VersionChange | None:
        """The change between releases on which the answer depends: what it is about is left to a default."""
        for change in self.system.freshness.versions:
            is_left_open = not any(self._is_given(name) for name in (change.flag, *change.before))
            if is_left_open and conditions_hold(change.when, self.flags):
                return change
        return None

    def answer(self) -> FreshnessAnswer:
        batch = self._case(self.system.freshness.updates)
        updates, updates_in_words = self._updates(batch)
        lag_case = self._case(self.system.freshness.lag)
        lag, lag_in_words = self._lag(lag_case)
        regime: str | None
        if lag != 0:
            regime = "mixed" if lag_case.get("mixed") else "off_policy"
        elif updates is None:
            regime = None
        else:
            regime = "on_policy" if updates == 1 else "off_policy"
        if lag_in_words and updates in (None, 1):
            facts = lag_in_words
        else:
            facts = " and ".join(part for part in (updates_in_words, lag_in_words) if part)
        row = "the on-policy row holds where it is 1, else the off-policy row"
        if regime is not None:
            row = ROWS[regime]
        used = self._used(batch, lag_case)
        if regime is not None and not any(self._is_given(name) for name in used):
            facts = f"not set here; the default of {self._release()} is {facts}"
        sentence = _sentence(f"{facts}: {row}")
        return FreshnessAnswer(updates=updates, lag=lag, regime=regime, sentence=f"{sentence}{self._other_release()}")

    def _release(self) -> str:
        """Whose defaults were taken."""
        if self.change is not None and self.defaults_before:
            return f"{self.system.title} before {self.change.since}"
        return f"{self.system.title} {self.system.version}"

    def _other_release(self) -> str:
        """Why an earlier release was taken, or what earlier ones do; empty where nothing changed."""
        change = self.change
        if change is None or change.key in self.sampling.having:
            return ""
        if self.defaults_before:
            return f" The file is for such a release: {self.sampling.without[change.key]}."
        if change.only_if_told:
            return ""
        return f" {_sentence(change.says)}"

    def _case(self, cases: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """The first case that holds; empty where none does."""
        for case in cases:
            is_given = all(self._is_given(name) or name in self.defaults_before for name in case.get("given", ()))
            if is_given and conditions_hold(case.get("when", {}), self.flags):
                return case
        return {}

    def _is_given(self, name: str) -> bool:
        return name in self.sampling.given or name in self.sampling.unknown

    def _used(self, batch: Mapping[str, Any], lag_case: Mapping[str, Any]) -> list[str]:
        """The options on which the answer rests."""
        names = [*batch.get("times", ()), *batch.get("over", ()), *batch.get("given", ()), *lag_case.get("given", ())]
        for case in (batch, lag_case):
            names += [name for name in case.get("when", {}) if name in self.options]
        if lag_case.get("versions") in self.options:
            names.append(lag_case["versions"])
        return names

    # --- updates of one batch
    def _updates(self, case: Mapping[str, Any]) -> tuple[int | None, str]:
        times = [*case.get("times", ()), *case.get("times_unknown", ())]
        over = [*case.get("over", ()), *case.get("over_unknown", ())]
        values = [self._number(name) for name in (*times, *over)]
        unit = case.get("unit", "per batch")
        equation = self._equation(times, over)
        unknown = [name for name, value in zip((*times, *over), values, strict=True) if value is None]
        is_nothing_given = not any(
            name in self.sampling.given or name in self.sampling.unknown for name in self.options
        )
        if unknown and is_nothing_given:
            return None, f"the number of updates {unit} is {equation}, not given here"
        if unknown:
            return None, f"the number of updates {unit} depends on {' and '.join(unknown)} ({equation})"
        numbers = [value for value in values if value is not None]
        above = math.prod(numbers[: len(times)])
        below = math.prod(numbers[len(times) :])
        # A batch that is smaller than what one update takes waits for the next.
        count = max(1, math.ceil(above / below - 1e-9)) if below else 1
        counted = "1 update" if count == 1 else f"{count} updates"
        if equation:
            return count, f"{counted} {unit} ({equation})"
        return count, f"{counted} {unit}"

    def _number(self, name: str) -> float | None:
        """The value of an option; None where it is not known."""
        if name in self.sampling.unknown:
            return None
        value = self.values.get(name)
        if isinstance(value, int | float):
            return float(value)
        return None

    def _equation(self, times: Sequence[str], over: Sequence[str]) -> str:
        above = self._product(times)
        below = self._product(over)
        if not below:
            return above
        if " x " in below:
            below = f"({below})"
        return f"{above or '1'} / {below}"

    def _product(self, names: Sequence[str]) -> str:
        factors = []
        for name in names:
            # A default of 1 changes nothing; where it is all there is, it is what a user would set.
            if len(names) > 1 and self.values.get(name) == 1 and not self._is_given(name):
                continue
            factors.append(self._in_words(name))
        return " x ".join(factors)

    def _in_words(self, name: str) -> str:
        """As ``train_batch_size 1024``; what is not known as ``train_batch_size $N``."""
        if name not in self.options:
            return name
        if name in self.sampling.unknown:
            return f"{name} {self.sampling.unknown[name]}"
        value = self.values[name]
        if value is None:
            return name
        text = f"{name} {format_value(value)}"
        if self.sampling.given and not self._is_given(name):
            text += " by default"
        return text

    # --- asynchronous sampling
    def _lag(self, case: Mapping[str, Any]) -> tuple[float | None, str]:
        if not case:
            return 0.0, ""
        versions = case["versions"]
        switch = case.get("by")
        by = ""
        # A switch is told by the word "asynchronous".
        if switch is not None and not isinstance(self.values[switch], bool):
            by = f" ({self._in_words(switch)})"
        lag = versions
        if isinstance(versions, str):
            lag = self._number(versions)
            by = f" ({self._in_words(versions)})" if self.values[versions] is not None else by
        if lag == 0:
            return 0.0, ""
        unit = case.get("unit", "versions")
        age = "of any age"
        if lag is not None:
            count = f"{lag:g} {unit}"
            if lag == 1:
                count = "1 batch" if unit == "batches" else f"1 {unit.removesuffix('s')}"
            age = f"up to {count} old"
        words = f"asynchronous sampling, samples {age}{by}"
        if case.get("mixed"):
            words += ", several versions in one completion"
        return lag, words


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


# --- options of files -------------------------------------------------------------------------------------------------
def sampling_of(system: System, settings: Sequence[Setting], release: Release, told: Sequence[str] = ()) -> Sampling:
    """What the settings of a file give of the system's options; ``told`` are switches that it gives otherwise."""
    given: dict[str, Value] = dict.fromkeys(told, True)
    unknown: dict[str, str] = {}
    for option, setting in _of_samples(system, settings):
        value = _value(option, setting)
        if value is None:
            unknown[option.name] = str(setting.text)[:60]
            given.pop(option.name, None)
        else:
            given[option.name] = value
            unknown.pop(option.name, None)
    without: dict[str, str] = {}
    having = []
    for change in system.freshness.versions:
        # An option that some later release dropped is told by no number: it is old enough where the change says so.
        is_old = change.before_if_old and release.first is None
        if release.last is not None and (release.is_before(change) or is_old):
            without[change.key] = release.last.text
        elif release.has(change):
            having.append(change.key)
    return Sampling(given=given, unknown=unknown, without=without, having=tuple(having))


def _of_samples(system: System, settings: Sequence[Setting]) -> Iterator[tuple[Flag, Setting]]:
    for setting in settings:
        option = flag_of_key(system.freshness.options, setting.key)
        is_none = setting.text is not None and setting.text.lower() in ("none", "null", "")
        # `steps_per_generation: null` gives nothing.
        if option is not None and setting.origin.kind != "skipped" and not is_none:
            yield option, setting


def _value(option: Flag, setting: Setting) -> Value:
    """The value of an option; None where the file does not say."""
    if not setting.literal:
        return None
    with contextlib.suppress(UserError):
        return option.parse(setting.text, setting.key)
    return None
