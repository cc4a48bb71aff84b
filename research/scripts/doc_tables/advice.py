"""The tables that come from kl_comedy/peers/advice.yaml.

They stand in docs/decision.md, docs/open_problem.md, README.md and results/advice/README.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from doc_tables.common import code_span, table

from kl_comedy.kl import KLTerm, claimed_target
from kl_comedy.kl.claims import TARGET_WORDS, words_without_target
from kl_comedy.kl.recipes import resolve_terms
from kl_comedy.peers.advice import (
    REGIME_OF_SAMPLES,
    UNTRAINED,
    AdviceTable,
    Candidate,
    Cell,
    Measured,
    Range,
    Rule,
    Situation,
    advice,
    candidate_of,
    evidence_in_words,
    measured,
    strength,
    with_interval,
)
from kl_comedy.peers.systems import SYSTEMS, advise, render

TARGETS_IN_WORDS = {
    **TARGET_WORDS,
    "token_forward": "the **forward** KL of each visited prefix",
}

AGES = ("k3_over_none_hack_tuned", "k3_over_none_rates", "centred_over_none", "k3_over_none_hack")
"""The contrasts of a form and no KL whose settings are ordered by the effective sample size."""

SHOWN_SYSTEMS = ("trl", "verl", "openrlhf", "nemo-rl", "prime-rl", "slime")
"""The systems whose flags stand on docs/decision.md; docs/peers.md has the others."""

ORDINALS = {6: "six", 9: "nine"}
"""Numbers of configurations as words at the beginning of a phrase; others stay digits."""


def _often(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


# --- docs/decision.md -------------------------------------------------------------------------------------------------
def headline() -> str:
    """The first paragraph: what the learning rate decides, and what the KL."""
    ranges = measured().spreads
    stale = ranges["stale_tuned"]
    stale_high = ranges["stale_high"]
    fresh = ranges["fresh_tuned"]
    fresh_high = ranges["fresh_high"]
    no_kl = ranges["no_kl_stale_high"]
    sentences = (
        "**Tune the learning rate first.** In our runs it mattered more than the form of the KL.",
        f"On samples 10 updates old, {_configurations(stale)}, training without a KL among them, end between "
        f"{_between(stale)} of held-out reward at 5e-5, and {_runs(stale)} collapse.",
        f"At 2e-4 they end between {_between(stale_high)}, and without a KL {_runs(no_kl)} collapse.",
        f"On fresh samples {_configurations(fresh)} end between {_between(fresh)} at 1e-4; at 8e-4, "
        f"{_runs(fresh_high)} collapse.",
    )
    return " ".join(sentences)


def _runs(spread: Range) -> str:
    """How many runs collapsed, as a phrase before "collapse"."""
    collapsed = str(spread.collapsed) if spread.collapsed else "none"
    return f"{collapsed} of {spread.runs} runs"


def _configurations(spread: Range) -> str:
    return f"{ORDINALS.get(spread.forms, str(spread.forms))} configurations"


def _between(spread: Range) -> str:
    return f"{spread.lowest:.2f} and {spread.highest:.2f}"


def rewards() -> str:
    """One paragraph per kind of reward: whether it needs a KL, and how often runs with a KL ended above none."""
    paragraphs = []
    for item in advice().rewards.values():
        counts = strength(item, measured())
        above, below = counts.supporting, counts.against
        compared = f"In {counts.of} comparisons a KL ended above no KL {_often(above)}, below it {_often(below)}."
        paragraphs.append(f"**{_capital(item.words)}.** {item.advice} {compared}")
    return "\n\n".join(paragraphs)


def ages() -> str:
    """Settings by the effective sample size of the runs without a KL: how many of them collapsed, and what a KL did."""
    rows = []
    for name in AGES:
        contrast = advice().contrasts[name]
        for cell in measured().contrasts[name]:
            rows.append((cell.none_ess, cell.setting, advice().words_of(contrast.a), cell))
    texts = []
    for size, setting, form, cell in sorted(rows, key=lambda row: row[0], reverse=True):
        texts.append(
            (f"{size:.2f}", setting, f"{cell.none_collapsed} of {cell.none_runs}", f"{form}: {with_interval(cell)}")
        )
    head = ("effective sample size", "setting", "no KL: collapsed", "held-out reward of a KL less no KL [95% interval]")
    return table(head, texts)


def flags() -> str:
    """The flags that set each choice in six systems; a coefficient is an example."""
    candidates = advice().candidates.values()
    head = ("system", "fresh samples: k1 in the reward, to go", *(f"stale: {item.words}" for item in candidates))
    rows = []
    for name in SHOWN_SYSTEMS:
        system = SYSTEMS[name]
        goals = {item.goal.name: item for item in advise(system)}
        cells = [_setting(goals["sequence"].flags)]
        for item in candidates:
            given = item.flags.get(name)
            cells.append(_setting(None if given is None else render(system, given)))
        rows.append((system.title, *cells))
    return table(head, rows)


def _setting(text: str | None) -> str:
    """Flags of a system without its name, one a line; ``no flag`` where none does it."""
    if text is None:
        return "no flag"
    _, _, settings = text.partition(":")
    return "<br>".join(code_span(setting.strip()) for setting in settings.split(","))


def first_screen() -> str:
    """The table of the five situations, the candidates of those that are open, and what never to use."""
    situations, rules = advice().on_page("first_screen")
    parts = [situation_table(situations)]
    for situation in situations:
        if situation.candidates:
            parts.append(f"**Open:** {_lower(situation.samples)} samples, {situation.has}. {_reason(situation)}")
            parts.append(candidate_lines(situation))
    parts += ["Never:", never_lines(rules)]
    return "\n\n".join(parts)


def _reason(situation: Situation) -> str:
    """Why a situation is open, without the word."""
    return situation.why.removeprefix("Open. ")


def candidate_lines(situation: Situation) -> str:
    """One line per candidate: what speaks for it, what it risks, and what training showed."""
    lines = []
    for item in advice().candidates_of(situation):
        line = f"- **{_capital(item.words)}** ({code_span(_written(item.kl))}): {item.gain}. Its risk: {item.risk}."
        if item.contrasts:
            counts = strength(item, measured())
            line += f" Trained: {evidence_in_words(item, advice(), measured())}; for / against / of: {counts}."
        lines.append(line)
    return "\n".join(lines)


def _written(kl: Any) -> str:
    """A KL as one writes it in a config: a recipe, or a list of terms."""
    if isinstance(kl, str):
        return kl
    return "[" + ", ".join(_flow(mapping) for mapping in kl) + "]"


def _capital(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


def situation_table(situations: Sequence[Situation]) -> str:
    """One row per situation: what to use, what it optimizes, and what training showed."""
    rows = []
    for situation in situations:
        rows.append(
            (
                situation.samples,
                situation.has,
                _use(situation),
                _target(situation),
                _showed(situation),
                _strength(situation),
            )
        )
    head = (
        "your samples",
        "you have",
        "use",
        "its gradient is that of",
        "held-out reward, difference [95% interval]",
        "for / against / of",
    )
    return table(head, rows)


def _target(situation: Situation) -> str:
    # A policy loss regularizes without the gradient of a KL: there is nothing to hit.
    if not situation.terms:
        return "by the form" if situation.candidates else "-"
    if situation.target is not None:
        return TARGETS_IN_WORDS[situation.target]
    (term,) = situation.terms
    return words_without_target(term, REGIME_OF_SAMPLES[situation.samples])


def _use(situation: Situation) -> str:
    """In words, then what to write."""
    if situation.candidates:
        return "open: " + ", ".join(item.words for item in advice().candidates_of(situation))
    return f"{advice().words_of_use(situation)}: {code_span(situation.use)}"


def other_situations() -> str:
    """The situations that are not on the first screen."""
    return situation_table([item for item in advice().situations.values() if "first_screen" not in item.pages])


def other_rules() -> str:
    """The rules that are not on the first screen."""
    return never_lines([rule for rule in advice().never.values() if "first_screen" not in rule.pages])


def never_lines(rules: Sequence[Rule]) -> str:
    """One line per rule: what, why, and how many runs collapsed."""
    return "\n".join(f"- **{rule.words}.** {rule.reasons} It {_showed(rule)}." for rule in rules)


def _showed(item: Situation | Rule) -> str:
    if isinstance(item, Situation) and item.candidates:
        return "by the form, below"
    return evidence_in_words(item, advice(), measured())


def _strength(item: Situation | Rule) -> str:
    if not item.contrasts:
        return "-"
    return str(strength(item, measured()))


def _title(situation: Situation) -> str:
    return f"{situation.samples.capitalize()} samples, {situation.has}: {advice().words_of_use(situation)}"


# --- docs/open_problem.md ---------------------------------------------------------------------------------------------
def open_problem() -> str:
    """What to use off-policy, from the same situations."""
    situations, _ = advice().on_page("open_problem")
    return situation_table(situations)


# --- README.md --------------------------------------------------------------------------------------------------------
def forms() -> str:
    """The configurations that people ask about: what each optimizes on fresh and on stale samples, and the advice."""
    rows = []
    for name, kl in advice().forms.items():
        terms = resolve_terms(kl, f"forms.{name}")
        (term,) = terms
        targets = [_followed(term, regime) for regime in REGIME_OF_SAMPLES.values()]
        rows.append((name, code_span(_flow(kl[0])), *targets, advice_on(terms)))
    head = ("configuration", "`kl:` in a config", "on fresh samples it follows", "on stale samples", "advice")
    return table(head, rows)


def _followed(term: KLTerm, regime: str) -> str:
    """The divergence that a term follows, else what its gradient is on stale samples."""
    target = claimed_target(term, regime)
    if target is not None:
        return TARGETS_IN_WORDS[target]
    return _target_or_kind(term, regime)


def _flow(mapping: Mapping[str, Any]) -> str:
    """A mapping as YAML writes it in one line."""
    return "{" + ", ".join(f"{name}: {value}" for name, value in mapping.items()) + "}"


def advice_on(terms: Sequence[KLTerm]) -> str:
    """As ``use on fresh samples, with full logits of both models``, ``never``, or nothing."""
    labels = [term.label() for term in terms]
    never = []
    use = []
    is_open = []
    for samples in REGIME_OF_SAMPLES:
        if advice().forbidding(terms, samples) is not None:
            never.append(samples)
        for situation in advice().on_page("first_screen")[0]:
            is_this = situation.samples == samples and [term.label() for term in situation.terms] == labels
            if is_this:
                use.append(f"{samples} samples, with {situation.has}")
            candidate = candidate_of(terms, situation)
            if situation.samples == samples and candidate is not None:
                is_open.append(f"{samples}: open, {candidate.in_short}")
    if len(never) == len(REGIME_OF_SAMPLES):
        return "never"
    parts = [f"use on {samples}" for samples in use]
    parts += [f"never on {samples} samples" for samples in never]
    parts += is_open
    return "; ".join(parts)


# --- results/advice ---------------------------------------------------------------------------------------------------
def evidence(table_of_advice: AdviceTable | None = None, cells: Measured | None = None) -> str:
    """Every contrast of every situation and rule, cell by cell, under a heading for each."""
    source = table_of_advice or advice()
    values = cells or measured()
    parts = []
    for situation in source.situations.values():
        if situation.candidates:
            parts.append(f"### {_title(situation)}\n\n{situation.why}")
            for item in source.candidates_of(situation):
                text = f"{_capital(item.gain)}. Its risk: {item.risk}. {_evidence_of(item, source, values)}"
                parts.append(f"#### Candidate: {item.words}\n\n{text}")
            continue
        parts.append(f"### {_title(situation)}\n\n{situation.why} {_evidence_of(situation, source, values)}")
    for rule in source.never.values():
        parts.append(f"### Never: {_lower(rule.words)}\n\n{rule.reasons} {_evidence_of(rule, source, values)}")
    return "\n\n".join(parts)


def _evidence_of(item: Situation | Candidate | Rule, source: AdviceTable, values: Measured) -> str:
    claims = _claims(item)
    if not item.contrasts:
        return f"{claims}{UNTRAINED[:1].upper()}{UNTRAINED[1:]}."
    rows = []
    for name in item.contrasts:
        contrast = source.contrasts[name]
        for cell in values.contrasts[name]:
            rows.append((source.words_of(contrast.a), source.words_of(contrast.b), *_cell_texts(cell)))
    head = (
        "a",
        "b",
        "setting",
        "a: reward",
        "b: reward",
        "a - b [95% interval]",
        "seeds: a ahead / behind / of",
        "a: collapsed",
        "b: collapsed",
        "no KL: collapsed",
    )
    counts = strength(item, values)
    sentence = f"{claims}For {counts.supporting}, against {counts.against}, of {counts.of} cells."
    return f"{sentence}\n\n{table(head, rows)}"


def _claims(item: Situation | Candidate | Rule) -> str:
    """What the terms claim to optimize on the samples in question; tests/exact enumerate whether it is so."""
    if isinstance(item, Situation):
        terms = item.terms
        ages = [item.samples]
    elif isinstance(item, Candidate):
        terms = item.terms
        ages = ["stale"]
    else:
        terms = resolve_terms(item.recipe)
        ages = list(item.why)
    sentences = []
    for samples in ages:
        targets = [_target_or_kind(term, REGIME_OF_SAMPLES[samples]) for term in terms]
        if targets:
            sentences.append(f"Target on {samples} samples: {code_span(' + '.join(targets))}. ")
    return "".join(sentences)


def _target_or_kind(term: KLTerm, regime: str) -> str:
    """The claimed target, else what a gradient without one is."""
    target = claimed_target(term, regime)
    if target is not None:
        return target
    return words_without_target(term, regime)


def _cell_texts(cell: Cell) -> tuple[str, ...]:
    return (
        cell.setting,
        f"{cell.a_mean:.3f}",
        f"{cell.b_mean:.3f}",
        with_interval(cell),
        f"{cell.ahead} / {cell.behind} / {cell.pairs}",
        f"{cell.a_collapsed} of {cell.a_runs}",
        f"{cell.b_collapsed} of {cell.b_runs}",
        "-" if cell.none_runs is None else f"{cell.none_collapsed} of {cell.none_runs}",
    )


def ranges(cells: Measured | None = None) -> str:
    """The ranges of the first paragraph of docs/decision.md."""
    rows = []
    for name, spread in (cells or measured()).spreads.items():
        where = ", ".join(f"{_short(key)} {value}" for key, value in advice().spreads[name].where.items())
        counts = (str(spread.forms), str(spread.seeds), f"{spread.collapsed} of {spread.runs}")
        rows.append((where, f"{spread.lowest:.3f}", f"{spread.highest:.3f}", *counts))
    return table(("runs", "lowest mean reward", "highest", "configurations", "seeds", "collapsed"), rows)


def _short(column: str) -> str:
    """The column of an export as people say it."""
    words = {
        "tags.sweep": "block",
        "params.lag.steps": "age of the samples",
        "params.optimizer.lr": "learning rate",
        "tags.kl.family": "KL",
    }
    return words.get(column, column)


def _lower(sentence: str) -> str:
    return sentence[:1].lower() + sentence[1:]


DECISION: dict[str, Callable[[], str]] = {
    "headline": headline,
    "rewards": rewards,
    "ages": ages,
    "first screen": first_screen,
    "flags": flags,
    "other situations": other_situations,
    "other rules": other_rules,
}
"""Generated parts of docs/decision.md that need no certificate."""

OPEN_PROBLEM: dict[str, Callable[[], str]] = {"what to use": open_problem}
README: dict[str, Callable[[], str]] = {"forms": forms}
RESULTS: dict[str, Callable[[], str]] = {"ranges": ranges, "evidence": evidence}
