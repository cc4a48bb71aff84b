"""Launch scripts and configs of other systems: the system of a file, and its flags that bear on the KL.

    file -> launch_syntax.parse -> recognise the system by its marks -> its flags -> peers.read_flags

Only settings that a flag of the system names are used. Everything that the answer rests on without being in the file
for certain (a branch, a base config, a default that changed between versions) is a remark.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from kl_comedy.errors import UserError, bad_value, error_prefix, shown
from kl_comedy.peers.freshness import sampling_of
from kl_comedy.peers.launch_releases import Release, numbers_of, release_of
from kl_comedy.peers.launch_settings import Parsed, Setting, Unread
from kl_comedy.peers.launch_syntax import parse, parse_text
from kl_comedy.peers.systems import (
    SWITCH,
    SYSTEMS,
    Flag,
    Marks,
    Reading,
    Sampling,
    System,
    Value,
    VersionChange,
    conditions_hold,
    find_system,
    flag_key,
    flag_of_key,
    format_value,
    read_flags,
)

__all__ = ["LaunchFile", "Parsed", "parse", "read_launch_file", "read_launch_text", "recognise"]

ENOUGH_HINTS = 2
"""Marks that several systems share, each on its own a coincidence."""
ENOUGH_PASTED_HINTS = 1
"""A pasted text is what its reader took for the KL's settings, and has no imports by which a system could be told."""
CLEARLY_MORE = 2
"""How many times the marks of any other a system must have to be chosen: a path may name a second system."""
KL_KEY = re.compile(
    r"(.*_)?(kl|jsd|opsd|sdpo)(_.*)?|(.*_)?reg(ularizer|_coef|_weight|_loss_scale)|(?!(ema|adam\w*)_)(.*_)?beta|"
    r"(.*_)?distill(ation)?_(coef|weight|beta|alpha|loss\w*)",
    re.IGNORECASE,
)
"""The last part of keys that an author gives to a KL, or to another divergence of a loss of his own."""
SWEEP = re.compile(r"(choice\()?\s*(?P<first>[\d.eE+-]+)\s*(,\s*[\d.eE+-]+\s*)+\)?")
VARIABLE = re.compile(r"\$[A-Za-z_]\w*|\$\{[A-Za-z_]\w*\}")
SHELL_SUFFIXES = (".sh", ".bash", ".slurm", ".sbatch")
OTHER_PROGRAMS = (
    ("supervised fine-tuning (SFT)", re.compile(r"(.*_)?(sft|supervised)(_.*)?")),
    ("preference training (DPO and the like)", re.compile(r"(.*_)?(dpo|kto|orpo|simpo)(_.*)?")),
    ("a reward model", re.compile(r"(.*_)?(train_rm|train_reward(_model)?|reward_modeling)(_.*)?")),
)
"""Names of scripts, in any system, that train without the KL flags; authors rename and copy those of the systems."""
RL_PROGRAM = re.compile(r"(.*_)?(rl|rlhf|rlvr|grpo|ppo|rloo|dapo|gspo|reinforce)(_.*)?")
"""Names of scripts that train by RL, perhaps after SFT."""
TRAINER = re.compile(r"(.*_)?(main|train|trainer|ppo|grpo|rloo|rl|dapo)(_.*)?")
"""Names of programs that train: scripts that prepare data or convert checkpoints have others."""
MAX_FLAGS_NAMED = 4
"""Flags that an assumption names."""
MAX_NAMED = 3
"""Keys and programs that one message names."""
OWN_LOSS = re.compile(
    r"use_(?!kl_|value_|vf_|critic_|entropy_|token_|decoupled_|aux_|moe_|router_|liger_|fused_)(\w+)_loss"
)
"""Switches of a loss of the author's own, and not of a part or a kernel of the system's."""
CUSTOM = "custom"
"""The value of a flag with ``custom`` in its choices that names something registered elsewhere."""


@dataclass(frozen=True, kw_only=True)
class LaunchFile:
    """The KL flags that a file sets. ``remarks`` name what the file does not say for certain.

    ``defaults_before``: the release before which a default was taken; empty where all are those of the version read.
    ``assumed``: where the KL stands in another file that was not read, what the answer supposes of it; else empty.
    """

    system: System
    given: Mapping[str, Value]
    remarks: tuple[str, ...]
    defaults_before: str = ""
    assumed: str = ""
    sampling: Sampling = field(default_factory=Sampling)

    def reading(self) -> Reading:
        return read_flags(self.system, self.given, self.sampling)


def read_launch_file(path: Path, *, system: str | None = None, overrides: Sequence[str] = ()) -> LaunchFile:
    """Parse ``path`` and find the KL flags of its system, or of ``system``; ``overrides`` (``key=value``) come last.

    Raises :class:`UserError` for a file that is too large or cannot be parsed, a system that is not recognised, a run
    of another kind, and a value that a flag cannot have.
    """
    with error_prefix(str(path)):
        return launch_of(parse(path), system=system, overrides=overrides)


def read_launch_text(text: str, *, system: str | None = None, overrides: Sequence[str] = ()) -> LaunchFile:
    """As :func:`read_launch_file`, of a command line, Python, YAML or TOML that is pasted in place of a file's name."""
    return launch_of(parse_text(text), system=system, overrides=overrides)


def launch_of(parsed: Parsed, *, system: str | None, overrides: Sequence[str]) -> LaunchFile:
    """The KL flags of what was parsed."""
    # Named systems first: a file of a fork may have the marks of the original.
    chosen = find_system(system) if system else recognise(parsed)
    for override in overrides:
        _add_override(override, chosen, parsed)
    values = _Values(chosen, parsed)
    values.read()
    # Who names the system wants its defaults.
    if system is None:
        _refuse_code_elsewhere(values)
    assumed = _assumption(values)
    remarks = [assumed] if assumed else []
    if parsed.is_pasted and system is None:
        remarks += _guess_remarks(chosen, parsed)
    remarks += values.remarks()
    if not values.given and not remarks:
        remarks.append(f"no flag of the KL is set in the file: the answer is the defaults of {chosen.title}")
    remarks += _unread_remarks(chosen, parsed, assumed)
    if values.given:
        remarks += _own_trainer_remarks(chosen, parsed)
    else:
        remarks += _started_remarks(chosen, parsed, assumed)
    remarks += _foreign_key_remarks(chosen, parsed)
    remarks += _kind_remarks(chosen, parsed)
    # Last: what the remarks above say of a file that sets no flag is not about values of an earlier release.
    remarks += values.take_release()
    told = [name for name, marks in chosen.freshness.told_by.items() if any(True for _ in _found(marks, parsed))]
    return LaunchFile(
        system=chosen,
        given=values.given,
        remarks=tuple(dict.fromkeys(remarks)),
        defaults_before=values.defaults_before,
        assumed=assumed,
        sampling=sampling_of(chosen, _in_scope(chosen, parsed.settings), values.release(), told),
    )


def _add_override(override: str, system: System, parsed: Parsed) -> None:
    """Take ``key=value`` of the command line. Raises :class:`UserError` for an unknown key."""
    key, equals, text = override.partition("=")
    flags = (*system.flags, *system.freshness.options)
    if not equals or flag_of_key(flags, flag_key(key)) is None:
        raise bad_value("override", override, [f"{flag.where}=VALUE" for flag in flags])
    parsed.add(Setting(key, text))


def _refuse_code_elsewhere(values: _Values) -> None:
    """Raises :class:`UserError` where code that is not in the file decides: a loss, or the program that starts it."""
    system = values.system
    parsed = values.parsed
    for setting in _in_scope(system, parsed.settings):
        if _is_own_loss(system, setting):
            raise UserError(
                f"cannot tell from this file: {_written(setting)} is no flag of {system.title}: it puts a loss of the "
                f"author's own beside or in place of the policy loss, which is not read (--system {system.name} reads "
                "the flags all the same)"
            )
    # A module may well set another flag, and take those of the KL from an argument.
    if parsed.is_imported and not values.gives_the_kl():
        raise UserError(
            "cannot tell from this file: it defines classes and functions and starts nothing; its settings come from "
            f"the program that imports it, which is not read; explain that program (--system {system.name} gives the "
            "defaults)"
        )
    if parsed.idle_trainer and not parsed.is_imported:
        raise UserError(
            f"cannot tell from this file: it makes {parsed.idle_trainer} and never starts it, so that nothing is "
            f"trained here (--system {system.name} reads its settings all the same)"
        )


def _assumption(values: _Values) -> str:
    """What the answer supposes where a config, or a script that starts the training, is not read and may hold the KL.

    Empty where the file sets a flag of the KL, or is run with a config of the system itself, which has its defaults.
    """
    elsewhere = _settings_elsewhere(values)
    if not elsewhere:
        return ""
    flags = [flag.where for flag in values.system.flags if flag.is_of_kl]
    return (
        f"the KL does not stand in this file: {elsewhere} may set it and is not read. The answer is what "
        f"{values.system.title} does where none of {', '.join(flags[:MAX_FLAGS_NAMED])} is set there"
    )


def _settings_elsewhere(values: _Values) -> str:
    """What may hold all settings of the KL and is not read: the config of a program, a script, a base config."""
    parsed = values.parsed
    takes_a_config = "hydra.main" in parsed.calls or any(_found(values.system.needs_config, parsed))
    if takes_a_config and not values.firm:
        return "the config or command line of the program's caller"
    if values.named:
        return ""
    scripts = [program for program in parsed.started if program.endswith(SHELL_SUFFIXES)]
    if scripts and len(scripts) == len(parsed.started):
        return f"{scripts[-1][:100]}, which it starts,"
    for unread in parsed.unread:
        is_own = any(re.search(rf"(^|[/ ]){config}(\.yaml)?$", unread.what) for config in values.system.own_configs)
        if is_own or not _bears_on(unread, _classes_of(values.system)):
            continue
        if unread.may_hold_all:
            return unread.what
        # Groups of Hydra, as `defaults: trainer: ddp`, are parts.
        if re.fullmatch(r"defaults: [^:]+", unread.what):
            return f"its base ({unread.what})"
    return ""


def _is_own_loss(system: System, setting: Setting) -> bool:
    """Whether a setting switches a loss on that is none of the system's: ``use_rgsd_loss=true``."""
    last_part = setting.key.rpartition(".")[2]
    is_on = setting.text is None or SWITCH.get(setting.text.strip("\"'").lower()) is True
    return is_on and OWN_LOSS.fullmatch(last_part) is not None and _flag_of(system, setting.key) is None


# --- the values of the flags --------------------------------------------------------------------------------------
@dataclass
class _Values:
    """The flags of one file. ``notes`` are remarks by the flag that they are about: a later value may replace them."""

    system: System
    parsed: Parsed
    given: dict[str, Value] = field(default_factory=dict)
    notes: dict[str, list[str]] = field(default_factory=dict)
    skipped: dict[str, Setting] = field(default_factory=dict)
    firm: set[str] = field(default_factory=set)
    """Flags of the KL that are given outside of branches."""
    named: set[str] = field(default_factory=set)
    """Flags of the KL that the file sets, also where their value is not known."""
    others: list[str] = field(default_factory=list)
    defaults_before: str = ""
    """The earliest release whose change was undone, because the file is for one before it."""

    def read(self) -> None:
        self._told_by_marks()
        for setting in _in_scope(self.system, self.parsed.settings):
            flag = _flag_of(self.system, setting.key)
            if flag is not None:
                self._take(flag, setting)

    def gives_the_kl(self) -> bool:
        """Whether the file gives a flag of the KL a value."""
        return any(flag.is_of_kl and flag.name in self.given for flag in self.system.flags)

    def _told_by_marks(self) -> None:
        """Flags that are given by a class, a command or a section, and not by a value."""
        for name, values in self.system.told_by.items():
            default = next(flag.default for flag in self.system.flags if flag.name == name)
            told = next((value for value, marks in values.items() if list(_found(marks, self.parsed))), None)
            if told is None and default in values:
                # Among the notes, so that a value that is given later replaces it.
                self.notes[name] = [f"{name}: nothing in the file names it; {default} is assumed (or give {name}=...)"]
            # The default stays unwritten in the text that `explain` prints.
            if told is not None and told != default:
                self.given[name] = told

    def _take(self, flag: Flag, setting: Setting) -> None:
        if setting.origin.kind == "skipped":
            self.skipped[flag.name] = setting
            return
        is_none = setting.text is not None and setting.text.lower() in ("none", "null", "")
        if is_none and not flag.nullable and CUSTOM not in flag.choices and "none" not in flag.choices:
            # `beta: null` in a config, `kl_coef: str | None = None` in a launcher: nothing is given.
            return
        if flag.is_of_kl:
            self.named.add(flag.name)
        if not _is_readable(setting, flag):
            taken = "the earlier value" if flag.name in self.given else "its default"
            why = "is not a literal"
            if VARIABLE.fullmatch(str(setting.text).strip("\"'")):
                why = "is no literal: the file never sets this variable, which decides"
            self.notes[flag.name] = [
                f"{setting.key}: {shown(setting.text)} {why}; {taken} is taken (give {flag.name}=...)"
            ]
            return
        try:
            value = self._value(flag, setting)
        except UserError as error:
            # What the KL is, is not guessed. Of any other choice, a fork or a registered function may have more.
            if flag.is_of_kl or not flag.choices:
                raise
            acting = format_value(self.given.get(flag.name, flag.default))
            self.notes[flag.name] = [f"{error}: code that is not in this file may read it; {acting} is taken"]
            return
        notes = []
        if setting.text is not None and setting.text != _first_of_sweep(setting.text, flag):
            swept = f"{_written(setting)}: the values of a sweep, and which of them runs is not in this file"
            notes.append(f"{swept}; the first is taken")
        if self.given.get(flag.name, value) != value:
            self.others.append(f"{setting.key}: given more than once; the last value is taken")
        if value == CUSTOM and setting.text != CUSTOM:
            notes.append(
                f"{setting.key}: {shown(setting.text)} is registered elsewhere; what it does is not in the file"
            )
        notes += _origin_notes(setting)
        # A later literal replaces what could not be read.
        self.notes[flag.name] = notes
        self.given[flag.name] = value
        if flag.is_of_kl and setting.origin.kind != "branch":
            self.firm.add(flag.name)

    def _value(self, flag: Flag, setting: Setting) -> Value:
        text = _first_of_sweep(_text_of_flag(setting, flag), flag)
        is_name = CUSTOM in flag.choices and text is not None and re.fullmatch(r"[A-Za-z]\w*", text.strip("\"'"))
        if (
            is_name
            and text is not None
            and text.strip("\"'").lower() not in {choice.lower() for choice in flag.choices}
        ):
            return CUSTOM
        return flag.parse(text, setting.key)

    def remarks(self) -> Iterator[str]:
        for notes in self.notes.values():
            yield from notes
        yield from self.others
        for name, setting in self.skipped.items():
            flag = next(flag for flag in self.system.flags if flag.name == name)
            written = _written(setting)
            acting = format_value(self.given.get(name, flag.default))
            yield (
                f"{written}: set in a branch that the file's own values do not take ({setting.origin.why}); "
                f"{acting} is taken (or give {name}=...)"
            )

    def release(self) -> Release:
        """The release for which the file is, as far as it says."""
        keys = []
        for setting in _in_scope(self.system, self.parsed.settings):
            keys.append(f"+{setting.key}" if setting.is_added else setting.key)
        # Classes that a release dropped tell it as well as options do.
        keys += self.parsed.imports
        return release_of(self.system, keys, self.parsed.words)

    def take_release(self) -> list[str]:
        """Give the flags that a file leaves to a default the values of the release for which it is; the remarks."""
        release = self.release()
        remarks = []
        # In order: a later change may be about a flag that an earlier one gives.
        for change in self.system.versions:
            if self._matters(change) and not release.has(change):
                remarks += self._take_change(change, release)
        return remarks

    def _matters(self, change: VersionChange) -> bool:
        """Whether the file leaves to a default what the change is about."""
        # Of a flag that the file sets to a variable, no default acts.
        if (
            change.flag in self.given
            or change.flag in self.named
            or not all(name in self.given for name in change.given)
        ):
            return False
        flags = {flag.name: flag.default for flag in self.system.flags}
        flags.update(self.given)
        return conditions_hold(change.when, flags)

    def _take_change(self, change: VersionChange, release: Release) -> list[str]:
        if release.is_before(change) and release.last is not None:
            self._undo(change)
            return [f"{release.last.text}, so the file is for a release before {change.since}. {change.says}"]
        if change.only_if_told:
            return []
        is_old = change.before_if_old and release.last is not None
        if (change.usually_before or is_old) and release.first is None:
            self._undo(change)
            return [f"taken as a file for a release before {change.since}, as most that leave this open. {change.says}"]
        return [change.says]

    def _undo(self, change: VersionChange) -> None:
        """Give the flags the defaults of the releases before the change."""
        self.given.update(change.before)
        earliest = self.defaults_before or change.since
        self.defaults_before = min(earliest, change.since, key=numbers_of)


def _origin_notes(setting: Setting) -> list[str]:
    """What is said of a value that does not hold in every case."""
    why = setting.origin.why
    if setting.origin.kind == "branch":
        return [f"{_written(setting)}: set in a branch ({why}), which is taken as far as the file says"]
    if setting.origin.kind == "loop":
        return [f"{_written(setting)}: {why}, the values of a loop; the first is taken"]
    if setting.origin.kind == "default" and why:
        return [f"{_written(setting)}: {why}"]
    return []


def _written(setting: Setting) -> str:
    if setting.text is None:
        return f"--{setting.key}"
    return f"{setting.key}={setting.text[:60]}"


def _is_readable(setting: Setting, flag: Flag) -> bool:
    """Whether the value of a flag can be known from the file."""
    # A switch that is followed by a variable stands alone: `--use_kl_loss ${EXTRA_ARGS}`. One that is set to a variable
    # does not: `use_kl_loss=${USE_KL}` may be either.
    is_lone_switch = flag.is_switch and setting.is_next_word and str(setting.text).startswith("$")
    return setting.literal or is_lone_switch


def _text_of_flag(setting: Setting, flag: Flag) -> str | None:
    """The text of a flag's value; None for a switch whose next word is an argument and not its value."""
    if not flag.is_switch or setting.text is None:
        return setting.text
    if setting.text.strip("\"'").lower() in SWITCH:
        return setting.text
    return None


def _first_of_sweep(text: str | None, flag: Flag) -> str | None:
    """The first of several numbers, as Hydra sweeps over them: ``0.001,0.01`` or ``choice(0.001, 0.01)``."""
    if text is None or flag.is_switch or flag.choices:
        return text
    numbers = SWEEP.fullmatch(text.strip("\"'"))
    return numbers["first"] if numbers else text


def _in_scope(system: System, settings: Sequence[Setting]) -> list[Setting]:
    """The settings of the system's own classes, where the file makes any; else all.

    A script that makes a TRL config also calls models and data sets, whose arguments have names such as ``beta``.
    """
    classes = _classes_of(system)
    scopes = {setting.scope for setting in settings if setting.scope}
    of_the_system = {scope for scope in scopes if any(pattern.fullmatch(scope) for pattern in classes)}
    if not of_the_system:
        return list(settings)
    return [setting for setting in settings if not setting.scope or setting.scope in of_the_system]


def _classes_of(system: System) -> list[re.Pattern[str]]:
    return [re.compile(pattern) for pattern in system.classes]


def _unread_remarks(system: System, parsed: Parsed, assumed: str) -> Iterator[str]:
    """Base configs, ``**options`` and here-documents: what they set is missing in the answer."""
    for unread in parsed.unread:
        if unread.what not in assumed and _bears_on(unread, _classes_of(system)):
            yield f"{unread.what} is not read: what it sets is missing here, and defaults of {system.title} stand in"


def _started_remarks(system: System, parsed: Parsed, assumed: str) -> Iterator[str]:
    """Scripts and modules of the author's own that a file starts: they may set what the file does not."""
    of_the_system = [re.compile(pattern) for pattern in system.marks.words]
    for program in dict.fromkeys(parsed.started):
        parts = re.split(r"[/.]", program)
        is_example = any(part in ("examples", "experimental", "recipe", "recipes") for part in parts)
        names = (program, program.rsplit("/", 1)[-1])
        # An entry point of the system itself has the defaults that stand in; an example has settings of its own.
        is_entry_point = any(pattern.fullmatch(name) for pattern in of_the_system for name in names)
        if (is_example or not is_entry_point) and program[:100] not in assumed:
            yield (
                f"{program[:100]}, which the file starts, is not read: where it sets flags of the KL, they act and "
                f"not the defaults of {system.title}"
            )


def _own_trainer_remarks(system: System, parsed: Parsed) -> Iterator[str]:
    """Programs that get the system's flags and are none of its trainers: a recipe with a ``fit`` of its own."""
    if not system.trainers:
        return
    trainers = [re.compile(pattern) for pattern in system.trainers]
    programs = []
    for program in dict.fromkeys(parsed.started):
        if any(trainer.fullmatch(program) for trainer in trainers):
            # The flags are those of this one; the others prepare data or convert checkpoints.
            return
        if TRAINER.fullmatch(_name_of(program)) and not program.endswith(SHELL_SUFFIXES):
            programs.append(program)
    for program in programs:
        yield (
            f"{program[:100]} has a trainer of its own, which was not read: the answer is what the trainer of "
            f"{system.title} does with these flags"
        )


def _foreign_key_remarks(system: System, parsed: Parsed) -> Iterator[str]:
    """Keys that look like those of a KL and are none of the system's flags: code of the author's own reads them."""
    foreign = []
    for setting in _in_scope(system, parsed.settings):
        # A variable of a job does nothing by itself.
        is_variable = parsed.environment.get(setting.key.rpartition(".")[2]) == setting.text
        if _flag_of(system, setting.key) is None and not is_variable:
            foreign.append(setting)
    for text in _kl_keys(foreign):
        yield (
            f"{text} is not a flag of {system.title} that explain knows: what code of the file's own does with it is "
            "not in this answer"
        )


def _kl_keys(settings: Iterable[Setting]) -> list[str]:
    """The first settings whose keys look like those of a KL, as ``key=value``."""
    written = []
    for setting in settings:
        last_part = setting.key.rpartition(".")[2]
        if setting.literal and setting.origin.kind != "skipped" and KL_KEY.fullmatch(last_part):
            written.append(_written(setting))
    return list(dict.fromkeys(written))[:MAX_NAMED]


def _kind_remarks(system: System, parsed: Parsed) -> Iterator[str]:
    """A key that says which kind of run it is, and is set to a variable that the file never sets."""
    for setting in _unknown_kinds(system, parsed):
        by = next(_found(system.rl_runs, parsed), "--system")
        yield (
            f"{setting.key}: {shown(setting.text)} is no literal: the file never sets this variable, which says which "
            f"kind of run it is; RL is taken, by {by}"
        )


def _unknown_kinds(system: System, parsed: Parsed) -> list[Setting]:
    """The settings of keys that say which kind of run it is (``rlhf_type`` of ms-swift), with unknown values."""
    return [
        setting
        for setting in parsed.settings
        if setting.key.rpartition(".")[2] in system.rl_runs.values and not setting.literal
    ]


def _bears_on(unread: Unread, classes: Sequence[re.Pattern[str]]) -> bool:
    if not unread.scope:
        return True
    return any(pattern.fullmatch(unread.scope) for pattern in classes)


# --- the system ---------------------------------------------------------------------------------------------------
def _found(marks: Marks, parsed: Parsed) -> Iterator[str]:
    """What of a file is one of the marks."""
    kinds = (
        (marks.words, _word_parts(parsed)),
        (marks.keys, [setting.key for setting in parsed.settings]),
        (marks.config_keys, [setting.key for setting in parsed.settings if not setting.scope]),
        (marks.sections, parsed.sections),
        (marks.calls, parsed.calls),
        (marks.imports, parsed.imports),
    )
    for patterns, texts in kinds:
        for pattern in patterns:
            for text in texts:
                if re.fullmatch(pattern, text):
                    yield text
                    break
    for key, values in marks.values.items():
        for setting in parsed.settings:
            if setting.key.rpartition(".")[2] != key:
                continue
            value = str(setting.text).strip("\"'").lower()
            if any(re.fullmatch(pattern, value) for pattern in values):
                yield f"{setting.key}={setting.text}"
                break


def _word_parts(parsed: Parsed) -> list[str]:
    """The words of commands; and the parts of paths and modules: ``main_ppo`` of ``verl.trainer.main_ppo``."""
    parts = dict.fromkeys(parsed.words)
    for word in parsed.words:
        if len(word) < 200:
            parts.update(dict.fromkeys(re.split(r"[/.:@=\s]", word)))
            parts[word.rsplit("/", 1)[-1]] = None
            # A module that arguments in a variable follow without a space: `-m verl.trainer.main_ppo$ARGUMENTS`.
            parts[word.partition("$")[0]] = None
    return list(parts)


def recognise(parsed: Parsed) -> System:
    """The system whose marks a file has.

    Raises :class:`UserError` for none, for several, and for a run of another kind: SFT, DPO, a reward model.
    """
    marks = {name: list(_found(system.marks, parsed)) for name, system in SYSTEMS.items()}
    named = [name for name in SYSTEMS if marks[name]]
    if not named:
        # No mark that is one system's own: several that it shares with few.
        named = _hinted(parsed)
    # A fork's file has the marks of the original too.
    originals = {original for name in named for original in SYSTEMS[name].over}
    candidates = [name for name in named if name not in originals]
    if len(candidates) > 1:
        counts = {name: len(marks[name]) for name in candidates}
        candidates = _clearest(counts, parsed)
    if len(candidates) != 1:
        problem = f"no system recognised{_where_the_kl_stands(parsed)}"
        names = list(SYSTEMS)
        if candidates:
            problem = f"could be {' or '.join(candidates)}"
            names = candidates
        raise UserError(
            f"{problem}; name it with --system, one of {', '.join(names)} (for a kl_comedy config: kl-comedy certify "
            "FILE)"
        )
    system = SYSTEMS[candidates[0]]
    _refuse_other_runs(system, parsed)
    return system


def _hinted(parsed: Parsed) -> list[str]:
    """The systems with the most hints in the file; none where each hint may be a coincidence."""
    hints = {name: len(_hints(system, parsed)) for name, system in SYSTEMS.items()}
    most = max(hints.values())
    enough = ENOUGH_PASTED_HINTS if parsed.is_pasted else ENOUGH_HINTS
    if most < enough:
        return []
    return [name for name, count in hints.items() if count == most]


def _clearest(counts: Mapping[str, int], parsed: Parsed) -> list[str]:
    """The system that a file is of, among those with ``counts`` marks in it; all of them where that is not clear.

    A tie is not decided by order: the flags of two systems mean different things.
    """
    # The keys of a config say more than a word of a path.
    settled = [name for name in counts if _has_own_keys(SYSTEMS[name], parsed)]
    candidates = settled or list(counts)
    most = max(counts[name] for name in candidates)
    with_most = [name for name in candidates if counts[name] == most]
    rest = [counts[name] for name in candidates if counts[name] < most]
    if len(with_most) == 1 and most >= CLEARLY_MORE * max(rest, default=0):
        return with_most
    return candidates


def _guess_remarks(system: System, parsed: Parsed) -> Iterator[str]:
    """By what a pasted text is taken for a system's, where another system may have the same flags."""
    if not any(True for _ in _found(system.marks, parsed)):
        hints = ", ".join(_hints(system, parsed)[:MAX_FLAGS_NAMED])
        yield f"taken for {system.title} by {hints}; if it is another system's, name that with --system"


def _hints(system: System, parsed: Parsed) -> list[str]:
    """What of a file is a hint of the system's."""
    classes = _classes_of(system)
    settings = []
    for setting in parsed.settings:
        # In Python, what a class of the author's own has is no option of a system.
        if not setting.scope or any(pattern.fullmatch(setting.scope) for pattern in classes):
            settings.append(setting)
    hints = list(_found(system.hints, replace(parsed, settings=settings)))
    if parsed.is_config:
        hints += _found(system.config_hints, parsed)
    return hints


def _where_the_kl_stands(parsed: Parsed) -> str:
    """What else an unrecognised file says of its KL: the programs that it starts, or keys of a config of its own."""
    if parsed.started:
        programs = ", ".join(list(dict.fromkeys(parsed.started))[:MAX_NAMED])
        return f": cannot tell from this file, as it starts {programs[:200]}, which is not read"
    if parsed.own_modules:
        modules = ", ".join(list(dict.fromkeys(parsed.own_modules))[:MAX_NAMED])
        return f": cannot tell from this file, as it takes its training from {modules[:200]}, which is not read"
    if parsed.unread:
        return f": cannot tell from this file, as {parsed.unread[0].what} is not read"
    keys = _kl_keys(parsed.settings)
    if keys:
        return f": cannot tell from this file, as what {', '.join(keys)} does stands in the code that reads the file"
    if parsed.is_config and parsed.settings:
        return ": no key of a KL is in the file, so what KL there is stands in the code that reads the file"
    return ""


def _has_own_keys(system: System, parsed: Parsed) -> bool:
    keys = Marks(keys=system.marks.keys, sections=system.marks.sections)
    return any(True for _ in _found(keys, parsed))


def _refuse_other_runs(system: System, parsed: Parsed) -> None:
    """Raises :class:`UserError` for SFT, DPO and the like: their flags of the same names are another thing."""
    if list(_found(system.rl_runs, parsed)):
        return
    for setting in _unknown_kinds(system, parsed):
        raise UserError(
            f"cannot tell from this file: {setting.key} is {shown(setting.text)}, a variable that the file never sets, "
            f"and it says which kind of run this is (--system {system.name} reads the file as RL)"
        )
    for run in system.other_runs:
        found = list(_found(run.marks, parsed))
        if found and "backward" in parsed.calls and found[0] in parsed.calls:
            raise UserError(
                f"cannot tell from this file: it computes its loss and calls backward itself, so that the KL stands in "
                f"its own code, which is not read as flags (--system {system.name} reads its flags all the same)"
            )
        if found:
            raise UserError(
                f"{found[0]} has none of the KL flags of {system.title} that explain knows: it is {run.name}. "
                f"--system {system.name} reads the file all the same"
            )
    # What the name of a program says, or hides, counts only where the file sets no flag of the KL.
    if any(_flag_of(system, setting.key) for setting in parsed.settings):
        return
    unknown = [program for program in parsed.started if re.search(r"(^|\.)\$\{?\w+\}?$", program)]
    if unknown:
        raise UserError(
            f"cannot tell from this file: {unknown[0][:100]}, which it starts, is named by a variable that the file "
            f"never sets, and no flag of the KL is there (--system {system.name} gives the defaults)"
        )
    # A renamed script is none of the names above.
    named = _run_by_name(parsed.started)
    if named is not None:
        program, run_name = named
        raise UserError(
            f"{program[:100]} has none of the KL flags of {system.title} that explain knows: by its name it is "
            f"{run_name}. --system {system.name} reads the file all the same"
        )


def _run_by_name(started: Sequence[str]) -> tuple[str, str] | None:
    """The first program whose name is of SFT, DPO or the like, and what it trains; None where one is of RL."""
    names = {program: _name_of(program) for program in started}
    if any(RL_PROGRAM.fullmatch(name) for name in names.values()):
        return None
    for program, name in names.items():
        for run_name, pattern in OTHER_PROGRAMS:
            if pattern.fullmatch(name):
                return program, run_name
    return None


def _name_of(program: str) -> str:
    """``train_sft``, of the file ``openrlhf/cli/train-sft.py`` and of the module ``openrlhf.cli.train_sft``."""
    file_name = program.rpartition("/")[2]
    for suffix in (".py", *SHELL_SUFFIXES):
        file_name = file_name.removesuffix(suffix)
    last_part = file_name.rpartition(".")[2]
    return last_part.replace("-", "_").lower()


# --- flags by their keys ------------------------------------------------------------------------------------------
def _flag_of(system: System, key: str) -> Flag | None:
    """The flag that a key of a file means: its name, its path (perhaps under a root), or a tail of two components."""
    last_part = key.rpartition(".")[2]
    if last_part not in _last_parts(system.name):  # quick: most keys of a file are not those of a flag
        return None
    return flag_of_key(system.flags, key)


@functools.cache
def _last_parts(system: str) -> frozenset[str]:
    """What the key of one of the system's flags may end in."""
    last_parts = set()
    for flag in SYSTEMS[system].flags:
        for name in (flag.name, flag.where, *flag.aliases):
            last_parts.add(name.rsplit(".", 1)[-1])
            last_parts.add(flag_key(name).rsplit(".", 1)[-1])
    return frozenset(last_parts)
