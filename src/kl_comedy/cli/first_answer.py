"""The first answer of ``kl-comedy explain``: about twelve lines, of which the first says which row is the reader's."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kl_comedy.kl.claims import SELF_WORDS, target_words
from kl_comedy.peers.advice import (
    REGIME_OF_SAMPLES,
    Candidate,
    Situation,
    advice,
    candidate_of,
    evidence_in_words,
    measured,
    strength,
)
from kl_comedy.peers.systems import (
    SENTENCES,
    SYSTEMS,
    Reading,
    Value,
    advise,
    find_system,
    flag_key,
    format_value,
    read,
    switched_on,
)

if TYPE_CHECKING:
    from kl_comedy.kl import KLTerm
    from kl_comedy.kl.oracle.certificate_record import Certificate
    from kl_comedy.peers.freshness import FreshnessAnswer

WIDTH = 100
NARROWEST = 60
LABEL = 13
"""Columns of the first word of a line."""
POLICIES = "policies of 3 tokens, 0.02 to 0.06 nats away"
"""Of what a percentage is, in short; :data:`~kl_comedy.kl.oracle.certificate_record.BATTERY_WORDS` says more."""
OPEN = "which form to take is open"
OTHERS = "--full lists the candidates and their risks"
SAMPLES_OF_REGIME = {"on_policy": "fresh", "off_policy": "stale", "mixed": "stale"}


def first_answer(
    reading: Reading, freshness: FreshnessAnswer, remarks: Sequence[str] = (), *, assumed: str = ""
) -> list[str]:
    """The lines for the flags of another system; ``assumed`` is what is supposed of a config that was not read."""
    lines = []
    if assumed:
        # First: without it the lines below would be taken for what the file does.
        lines += [*wrapped(f"{assumed[:1].upper()}{assumed[1:]}."), ""]
    lines += wrapped(freshness.sentence)
    acting = None
    if reading.terms == ():
        acting = switched_on(reading)
    asked = acting or reading
    lines += _line("It is", what_it_is(reading, acting))
    if asked.terms is None:
        # What it is says the trap; a note may say the way out.
        return [*lines, *(_line("Note", reading.notes[0]) if reading.notes else [])]
    regimes = _regimes(freshness.regime)
    if asked.terms:
        lines += _what_it_follows(asked, regimes)
    if assumed:
        # What to set is not known where what is set is not.
        return lines
    lines += _trap(reading, asked, regimes, remarks)
    if asked.terms:
        lines += _reward_advice(asked.terms)
        for samples in dict.fromkeys(SAMPLES_OF_REGIME[regime] for regime in regimes):
            lines += _what_to_set(reading, asked, samples, is_known=len(regimes) == 1)
    return lines


def what_was_left_out(reading: Reading, freshness: FreshnessAnswer, *, is_assumed: bool) -> list[str]:
    """What can be set and is not in the first answer: the four forms on stale samples, each with its flags.

    Where the config was not read, what to set on fresh samples too.
    """
    acting = switched_on(reading) if reading.terms == () else None
    asked = acting or reading
    if not asked.terms:
        return []
    lines = []
    if is_assumed:
        lines += _what_to_set(reading, asked, "fresh", is_known=False)
    situation = _situation(asked, "stale")
    if situation is not None and (is_assumed or freshness.regime != "on_policy"):
        rows = [(candidate, _how(reading, candidate)) for candidate in advice().candidates_of(situation)]
        lines += _table_of_candidates(rows)
    return lines


def recipe_answer(terms: Sequence[KLTerm], certificates: Sequence[Certificate]) -> list[str]:
    """The lines for a recipe of this project, which does not say how old its samples are."""
    sentence = (
        "A recipe does not say how old its samples are: the on-policy row holds with one update per batch, the "
        "off-policy row with several, or with asynchronous sampling."
    )
    lines = wrapped(sentence)
    lines += _line("It is", terms_in_words(terms))
    by_regime = {certificate.regime: certificate for certificate in certificates}
    for regime in ("on_policy", "off_policy"):
        lines += _line(SAMPLES_OF_REGIME[regime].capitalize(), _follows_in_words(by_regime[regime]))
        lines += _pull(by_regime[regime])
    lines += _reward_advice(terms)
    for samples in REGIME_OF_SAMPLES:
        lines += _never(terms, samples)
        situation = advice().situation_for(terms, samples)
        if situation is not None:
            lines += _advice_in_recipes(terms, situation)
    return lines


# --- what it is -------------------------------------------------------------------------------------------------------
def what_it_is(reading: Reading, acting: Reading | None = None) -> str:
    """The reader's own words, then the name of the formula; where no KL acts, what ``acting`` would be, switched on."""
    if reading.terms is None:
        return f"no term of ours: {reading.instead}"
    if reading.terms:
        return f"{_set_by(reading)}: {terms_in_words(reading.terms)}"
    if acting is None or acting.terms is None:
        return f"no KL, by {_set_by(reading)}: nothing holds the policy to a reference"
    return f"no KL, by {_set_by(reading)}. With {_differences(reading, acting.given)}: {terms_in_words(acting.terms)}"


def _set_by(reading: Reading) -> str:
    """The flags that were given, in the reader's words."""
    if not reading.given:
        return f"{SYSTEMS[reading.system].title}'s defaults"
    return ", ".join(f"{_short(reading, name)}={format_value(value)}" for name, value in reading.given.items())


def _short(reading: Reading, name: str) -> str:
    """The end of a flag's path: as short as a reader knows it, and long enough to name no other flag.

    ``algo.kl.estimator`` is ``kl.estimator`` beside ``algo.advantage.estimator``, and ``adv_estimator.name`` is no
    ``name``.
    """
    system = SYSTEMS[reading.system]
    flags = (*system.flags, *system.freshness.options)
    (flag,) = [flag for flag in system.flags if flag.name == name]
    parts = flag.where.split(".")
    tails = [".".join(parts[start:]) for start in reversed(range(len(parts)))]
    unique = [tail for tail in tails if [other for other in flags if other.matches(flag_key(tail))] == [flag]]
    for tail in unique:
        words = re.split(r"[._]", flag_key(tail))
        if set(name.split("_")) <= set(words):
            return tail
    return unique[0] if unique else flag.where


def terms_in_words(terms: Sequence[KLTerm]) -> str:
    """As ``k3 to the initial policy, in the loss, clamped (log-ratio at 20, value at 10), beta 0.001``."""
    return " + ".join(_term_in_words(term) for term in terms)


REFERENCE_WORDS = {
    "initial": "the initial policy",
    "ema": "a moving average of the policy",
    "periodic": "a periodic copy of the policy",
    "old": "the policy before the batch",
    "sampler": "the sampler",
    "teacher": "the teacher",
}


def _term_in_words(term: KLTerm) -> str:
    place = "the loss"
    if term.placement == "reward":
        place = {"total": "the reward, whole completion", "to_go": "the reward, to go", "own": "each token's reward"}[
            str(term.credit)
        ]
    # The reference first: what a KL does is said of nothing else.
    parts = [f"{term.estimator} to {REFERENCE_WORDS[term.reference]}, in {place}"]
    if term.gradient == "k2":
        parts.append("with the gradient of k2")
    if term.correction == "none":
        parts.append("without a ratio")
    else:
        ratio = f"times the {term.correction.replace('_', ' ')} ratio"
        if term.cap is not None:
            ratio += f" up to {term.cap:g}"
        parts.append(ratio)
    clamps = []
    if term.input_clamp is not None:
        clamps.append(f"log-ratio at {term.input_clamp:g}")
    if term.output_clamp is not None:
        clamps.append(f"value at {term.output_clamp:g}")
    if clamps:
        parts.append(f"clamped ({', '.join(clamps)})")
    beta = f"{term.beta:g}" if isinstance(term.beta, int | float) else str(term.beta)
    parts.append(f"beta {beta}")
    return ", ".join(parts)


# --- what it follows --------------------------------------------------------------------------------------------------
def _regimes(regime: str | None) -> list[str]:
    """The rows of the answer: one, or both where it is not known which."""
    if regime is None:
        return ["on_policy", "off_policy"]
    return [regime]


def _what_it_follows(asked: Reading, regimes: Sequence[str]) -> list[str]:
    """The direction and the pull in each regime; a pull that is the same in both stands once."""
    lines = []
    certificates = asked.certificates(tuple(regimes))
    pulls = {regime: _pull(certificates[regime]) for regime in regimes if regime in asked.holds_in}
    is_one_pull = len(pulls) > 1 and len({tuple(pull) for pull in pulls.values()}) == 1
    for regime in regimes:
        label = "It follows" if len(regimes) == 1 else SAMPLES_OF_REGIME[regime].capitalize()
        lines += _line(label, _follows(regime, certificates, asked))
        if not is_one_pull or regime == regimes[-1]:
            lines += pulls.get(regime, [])
    return lines


def _follows(regime: str, certificates: Mapping[str, Certificate], reading: Reading) -> str:
    if regime not in reading.holds_in:
        return "no term of ours is equivalent on such samples; Notes say why"
    return _follows_in_words(certificates[regime])


def _follows_in_words(certificate: Certificate) -> str:
    """The direction of the expected gradient. Its noise is a column of the table behind ``--full``."""
    hit = hit_in_words(certificate)
    if hit:
        return hit
    text = certificate.untargeted
    # A function that has a name needs no neighbour.
    if certificate.kind is None or not certificate.kind.function:
        text += f"; {nearest_in_words(certificate)}"
    return text


def hit_in_words(certificate: Certificate) -> str:
    """The divergence whose gradient is hit, if only while no bound acts; empty where none is."""
    from kl_comedy.kl.oracle.certificate_record import pulls_to_sampler

    target = certificate.target or certificate.near_target
    if target is None:
        return ""
    if target == "zero" and pulls_to_sampler(certificate.terms) and certificate.regime == "on_policy":
        return SELF_WORDS
    text = target_words(target)
    if certificate.target is None:
        text += ", while no bound acts"
    return text


def _pull(certificate: Certificate) -> list[str]:
    """How the force grows with the distance; nothing where there is none, or a repulsion, as the line above says."""
    is_repulsion = certificate.kind is not None and certificate.kind.kind == "repulsion"
    if certificate.pull in ("", "none") or is_repulsion:
        return []
    lines = _line("Pull", certificate.pull)
    if len(lines) > 1:
        above, _, below = certificate.pull.partition(", ")
        return [*_line("Pull", above), *_line("", below)]
    return lines


def nearest_in_words(certificate: Certificate) -> str:
    """The divergence whose gradient is nearest, with the distance."""
    distances = {name: value for name, value in certificate.relative_bias.items() if name != "zero"}
    nearest = min(distances, key=lambda name: distances[name])
    # Further away than zero: it is no help to name it.
    if distances[nearest] >= 1:
        return "none is near it"
    return f"nearest is {target_words(nearest)} ({distances[nearest]:.0%} off, on {POLICIES})"


# --- the trap ---------------------------------------------------------------------------------------------------------
def _trap(reading: Reading, asked: Reading, regimes: Sequence[str], remarks: Sequence[str]) -> list[str]:
    """The one thing that these flags do against expectation; nothing where there is none."""
    if SENTENCES["both"] in reading.notes:
        return _line("Trap", f"counted twice: {SENTENCES['both']}")
    if reading.no_ops:
        return _line("Trap", f"does nothing: {reading.no_ops[0]}")
    for regime in regimes:
        if asked.terms and regime in asked.holds_in:
            never = _never(asked.terms, SAMPLES_OF_REGIME[regime])
            if never:
                return never
    notes = [*_by_weight(reading.notes, regimes), *remarks]
    return _line("Trap", notes[0]) if notes else []


def _by_weight(notes: Sequence[str], regimes: Sequence[str]) -> list[str]:
    """The notes, the heaviest first: what docs/decision.md says never to do, then what is of such samples."""
    # With one update per batch the old policy is the policy, and no ratio reaches a clip.
    of_age = {
        "fresh": [SENTENCES["forward"]],
        "stale": [SENTENCES["old_log_probs"], SENTENCES["clipped"]],
    }
    first = [SENTENCES["group_std"]]
    for samples in dict.fromkeys(SAMPLES_OF_REGIME[regime] for regime in regimes):
        first += of_age[samples]
    others = [note for note in notes if note not in (*first, *of_age["fresh"], *of_age["stale"])]
    return [note for note in first if note in notes] + others


def _never(terms: Sequence[KLTerm], samples: str) -> list[str]:
    """Why these terms are never to be used on such samples, and what runs showed; nothing where they may be."""
    rule = advice().forbidding(terms, samples)
    if rule is None:
        return []
    # The line says already on which samples.
    why = rule.why[samples].removeprefix(f"On {samples} samples ").removesuffix(".")
    showed = evidence_in_words(rule, advice(), measured(), samples)
    lines = _line("Trap", f"never on {samples} samples: {why[:1].lower()}{why[1:]}")
    return [*lines, *_line("In training", f"it {showed}")]


# --- what to set ------------------------------------------------------------------------------------------------------
def _situation(asked: Reading, samples: str) -> Situation | None:
    """The situation of a reader whose KL is ``asked``; None where its reference is not a policy before the training."""
    situation = advice().situation_for(asked.terms or (), samples)
    if situation is None or situation.reference != "initial":
        return None
    if samples == "stale":
        # Its forms are what a reader can set, whatever the flags are now.
        return advice().situations["stale_sampled"]
    return situation


def _reward_advice(terms: Sequence[KLTerm]) -> list[str]:
    """Whether each kind of reward needs a KL to a policy before the training; nothing for another reference."""
    situation = advice().situation_for(terms, "stale")
    if situation is None or situation.reference != "initial":
        return []
    return _line("Your reward", "; ".join(item.in_short for item in advice().rewards.values()))


def _what_to_set(reading: Reading, asked: Reading, samples: str, *, is_known: bool) -> list[str]:
    """The advice for samples of this age, in flags of the reader's system.

    ``asked`` are the flags with the KL switched on. What is to be set is what differs from ``reading``, which is what
    the reader has. ``is_known`` is whether the reader's samples are of this age.
    """
    situation = _situation(asked, samples)
    if situation is None:
        return _no_reference(reading, asked)
    if situation.candidates and not is_known:
        return _line("Stale samples", f"{OPEN}; {OTHERS}")
    if situation.candidates:
        return _open(reading, asked, situation)
    return _fresh(reading)


def _no_reference(reading: Reading, asked: Reading) -> list[str]:
    """Why no flag adds a KL to a reference, where all that acts pulls to the sampler; else nothing."""
    goals = {item.goal.name: item for item in advise(find_system(reading.system))}
    is_trust_region = {term.reference for term in asked.terms or ()} == {"sampler"}
    if not is_trust_region or goals["sequence"].flags is not None:
        return []
    return _line("To change", goals["sequence"].why_not)


def _fresh(reading: Reading) -> list[str]:
    """On fresh samples: the reverse KL of completions is the advice; per prefix it is a flag's work in most systems."""
    target = None
    if reading.terms and "on_policy" in reading.holds_in:
        certificate = reading.certificates(["on_policy"])["on_policy"]
        target = certificate.target or certificate.near_target
    goals = {item.goal.name: item for item in advise(find_system(reading.system))}
    if target == "sequence_reverse":
        have = "our advice on fresh samples is the reverse KL of completions"
        return [*_line("You have this", have), *_line("In training", _fresh_evidence())]
    sequence = goals["sequence"]
    change = sequence.why_not
    if sequence.flags is not None:
        settings = _differences(reading, read(sequence.flags).given)
        # A recipe with a trainer of its own may not read them.
        change = f"set {settings}" if settings else "no flag: those that set it are set, and do nothing here"
    lines = _line("To change", f"for the reverse KL of completions {change}")
    token = goals["low_noise"]
    if target != "token_reverse" and token.flags is not None:
        lines += _line("", f"for that of each visited prefix set {_differences(reading, read(token.flags).given)}")
    return [*lines, *_line("In training", _fresh_evidence())]


def _fresh_evidence() -> str:
    """Whether training showed a difference, and to what."""
    situation = advice().situations["fresh_sampled"]
    sides = [advice().names[advice().contrasts[name].b.kl] for name in situation.contrasts]
    others = " or ".join(dict.fromkeys(sides))
    counts = strength(situation, measured())
    text = f"that of completions: no difference from {others} in {counts.of} comparisons"
    if counts.supporting or counts.against:
        text = (
            f"that of completions against {others}, of {counts.of}: {counts.supporting} for, {counts.against} against"
        )
    return text


def _open(reading: Reading, asked: Reading, situation: Situation) -> list[str]:
    """That the choice is open; the candidate that the reader has or is nearest to, with its risk."""
    lines = _line("Stale samples", f"{OPEN}; {OTHERS}")
    candidate = candidate_had(reading)
    if candidate is not None:
        lines += _line("You have", f"one of them, {candidate.words}")
        return [*lines, *_line("Its risk", candidate.risk)]
    nearest = _nearest(reading, asked, situation)
    if nearest is None:
        return lines
    lines += _line("The nearest", f"{nearest.words}: {_how(reading, nearest)}")
    return [*lines, *_line("Its risk", nearest.risk)]


def _nearest(reading: Reading, asked: Reading, situation: Situation) -> Candidate | None:
    """The candidate that ``asked`` is, else the one for which the reader sets least; None where no flags set one."""
    settable = [item for item in advice().candidates_of(situation) if reading.system in item.flags]
    switched = candidate_had(asked)
    if switched in settable:
        return switched
    return min(settable, key=lambda item: len(_changed(reading, item.flags[reading.system])), default=None)


def _table_of_candidates(rows: Sequence[tuple[Candidate, str]]) -> list[str]:
    """Two lines or more per candidate, aligned by its form: how to get it, and what it is and risks in short."""
    lines = wrapped(f"Stale samples: {OPEN}.")
    for candidate, how in rows:
        lines += wrapped(how, first=f"  {candidate.words:<26}  ", indent=30)
        lines += wrapped(candidate.in_short, first=" " * 30, indent=30)
    return lines


def _how(reading: Reading, candidate: Candidate) -> str:
    if candidate_had(reading) is candidate:
        return "you have this"
    flags = candidate.flags.get(reading.system)
    if flags is None:
        return f"no flag of {SYSTEMS[reading.system].title}"
    return f"set {_differences(reading, flags)}"


def candidate_had(reading: Reading) -> Candidate | None:
    """The candidate on stale samples that a reading is; None where it is none of them."""
    return candidate_of(reading.terms or (), advice().situations["stale_sampled"])


def _changed(reading: Reading, flags: Mapping[str, Value]) -> dict[str, Value]:
    """The flags whose values are not those of the reading; a coefficient is one that is on."""
    changed = {}
    for name, value in flags.items():
        current = reading.flags[name]
        both_on = all(isinstance(item, float) and item > 0 for item in (current, value))
        synonyms = _synonyms(reading.system, name)
        if not both_on and synonyms.get(str(current), current) != synonyms.get(str(value), value):
            changed[name] = value
    return changed


def _synonyms(system: str, name: str) -> Mapping[str, str]:
    """Values of a flag that are one estimate, under two names."""
    if name in ("kl_loss_type", "kl_penalty"):
        return {"low_var_kl": "k3", "mse": "k2", "kl": "k1"}
    return {}


def _differences(reading: Reading, flags: Mapping[str, Value]) -> str:
    """What to set, in the reader's words."""
    changed = _changed(reading, flags)
    return " ".join(f"{_short(reading, name)}={format_value(value)}" for name, value in changed.items())


def _advice_in_recipes(terms: Sequence[KLTerm], situation: Situation) -> list[str]:
    """The advice for a recipe, in recipes."""
    label = f"{situation.samples.capitalize()} samples"
    if situation.candidates:
        candidate = candidate_of(terms, situation)
        lines = _line(label, f"{OPEN}; {OTHERS}")
        if candidate is None:
            return lines
        return [*lines, *_line("You have", f"one of them, {candidate.words}"), *_line("Its risk", candidate.risk)]
    if [term.label() for term in situation.terms] == [term.label() for term in terms]:
        return [
            *_line(label, "you have what we advise"),
            *_line("In training", evidence_in_words(situation, advice(), measured())),
        ]
    return _line(label, f"we advise {advice().words_of_use(situation)} ({situation.use})")


def candidates_in_recipes(terms: Sequence[KLTerm]) -> list[str]:
    """The candidates on stale samples, as recipes; nothing where the advice for such terms is not open."""
    situation = advice().situation_for(terms, "stale")
    if situation is None or not situation.candidates:
        return []
    rows = []
    for candidate in advice().candidates_of(situation):
        how = f"kl: {candidate.kl}" if isinstance(candidate.kl, str) else "baseline: before"
        if candidate_of(terms, situation) is candidate:
            how = "you have this"
        rows.append((candidate, how))
    return _table_of_candidates(rows)


def _line(label: str, text: str) -> list[str]:
    """A label and its text, wrapped and aligned."""
    return wrapped(text, first=f"{label:<{LABEL}}  ", indent=LABEL + 2)


def wrapped(text: str, first: str = "", indent: int = 0) -> list[str]:
    """A text in lines that a terminal does not break again, of :data:`NARROWEST` to :data:`WIDTH` columns."""
    columns = shutil.get_terminal_size((WIDTH, 0)).columns
    width = max(NARROWEST, min(WIDTH, columns))
    words = " ".join(text.split())
    return textwrap.wrap(words, width, initial_indent=first, subsequent_indent=" " * indent, break_on_hyphens=False)
