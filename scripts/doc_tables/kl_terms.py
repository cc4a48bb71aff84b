"""Tables of docs/decision.md and the pages of docs/estimators/, made from certificates."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path

from doc_tables.common import ROOT, built_in, table

from kl_comedy.kl import KLTerm, recipe
from kl_comedy.kl.claims import all_terms
from kl_comedy.kl.oracle import AlgorithmContext
from kl_comedy.kl.oracle.algorithm_context import effects
from kl_comedy.kl.oracle.certificate import Certificate, certify
from kl_comedy.registry import CORRECTIONS, ESTIMATORS, Entry

MATRIX_TEST = "tests/exact/test_claims.py::test_every_term_hits_exactly_the_target_it_claims"
REGIMES = ("on_policy", "off_policy")
ESTIMATOR_NAMES = tuple(entry.name for entry in built_in(ESTIMATORS))
CORRECTION_NAMES = tuple(entry.name for entry in built_in(CORRECTIONS))


@cache
def certificates(label: str, terms: tuple[KLTerm, ...]) -> dict[str, Certificate]:
    """By regime. Mixed policy versions obey the off-policy claims, and claims hold; else the page is not written."""
    by_regime = {c.regime: c for c in certify(label, terms)}
    assert by_regime["mixed"].target == by_regime["off_policy"].target, label
    assert all(c.claim_holds for c in by_regime.values()), label
    return by_regime


@lru_cache(maxsize=1)
def matrix() -> tuple[KLTerm, ...]:
    """Every built-in term whose log-ratio is taken at the current weights."""
    return tuple(c for c in all_terms(ESTIMATOR_NAMES, CORRECTION_NAMES) if c.anchor == "current")


def of(term: KLTerm) -> dict[str, Certificate]:
    return certificates(term.label(), (term,))


def outcome(found: Certificate) -> str:
    """The target, or how far off the sequence-level reverse KL and in which direction."""
    if found.target is not None:
        return f"`{found.target}`"
    off, along = found.relative_bias["sequence_reverse"], found.cosine["sequence_reverse"]
    near = f"`{found.near_target}` near the reference; " if found.near_target else ""
    return f"{near}{percent(off)} off, cosine {along:.2f}"


def percent(share: float) -> str:
    return f"{100 * share:.0f}%" if share < 10 else f"{share:.0f}x"


def noise(found: Certificate) -> str:
    """The variance over that of the least noisy term for the same target."""
    if found.target == "zero":
        return "nothing else"
    return "-" if found.variance_ratio is None else f"{found.variance_ratio:.2g}x"


# --- the decision page ----------------------------------------------------------------------------------------
SITUATIONS: tuple[tuple[str, str, str, str], ...] = (
    ("on-policy, exact KL affordable", "rb/full", "on_policy", "exact in reward, to go = G"),
    ("on-policy, log-probs of sampled tokens only", "openrlhf/default", "on_policy", "K1 in reward, reward-to-go = G"),
    ("on-policy, cost inside the reward", "comedy/k1_in_reward", "on_policy", "K1 in reward, full return = G"),
    (
        "stale or asynchronous, exact KL affordable",
        "rb/per_decision",
        "off_policy",
        "autodiff of sum_u W_{u-1} KL_u = G",
    ),
    (
        "stale or asynchronous, sampled tokens only",
        "is/k3_per_decision",
        "off_policy",
        "autodiff of sum_u W_u k3_u = G",
    ),
    (
        "a per-token penalty is enough, any staleness, exact",
        "rb/token",
        "off_policy",
        "exact in loss = PARTIAL on the sampler's prefixes",
    ),
    (
        "a per-token penalty is enough, any staleness, sampled",
        "trl/default",
        "off_policy",
        "rho k3 = PARTIAL on the sampler's prefixes",
    ),
)
"""What one is in, the recipe, the regime it is for, and its row of the master table in tests/exact/test_claims.py."""

NEVER: tuple[tuple[str, str, str], ...] = (
    ("comedy/k1_in_loss", "on_policy", "expected gradient zero; the most noise of all"),
    ("comedy/k1_in_loss", "off_policy", "pushes away from the sampled tokens, whatever the reference"),
    ("comedy/k3_in_reward", "on_policy", "its gradient vanishes to first order near the reference"),
    ("grpo", "off_policy", "no KL on stale batches; use `trl/default`"),
    ("comedy/k1_in_reward", "off_policy", "no ratio: the bias grows with staleness"),
    ("comedy/k3_both", "off_policy", "exact on-policy only; use `is/k3_per_decision`"),
)


def decision() -> str:
    rows = []
    for situation, name, regime, test in SITUATIONS:
        found = certificates(name, recipe(name))[regime]
        assert found.target is not None, name
        terms = " + ".join(f"`{term.label()}`" for term in recipe(name))
        rows.append((situation, f"`{name}`", terms, f"`{found.target}`", noise(found), f"`{test}`"))
    return table(("you are", "recipe", "term", "optimizes", "noise", "test"), rows)


def never() -> str:
    rows = []
    for name, regime, why in NEVER:
        found = certificates(name, recipe(name))[regime]
        assert found.target in (None, "zero"), (name, regime)
        rows.append((f"`{name}`", regime.replace("_", "-"), outcome(found), why))
    return table(("recipe", "regime", "enumerated", "why"), rows)


def placements() -> str:
    """use_kl_in_reward and use_kl_loss, one, the other and both, at the same beta."""
    reward = KLTerm("k1", placement="reward", credit="total", baseline="before")
    loss, k3_reward = KLTerm("k3", placement="loss"), KLTerm("k3", placement="reward", credit="total")
    straight = KLTerm("k3", placement="loss", gradient="k2")
    rows = []
    for words, terms in (
        ("`use_kl_in_reward` (`kl`)", (reward,)),
        ("`use_kl_loss` (`low_var_kl`)", (loss,)),
        ("`use_kl_loss` (`k3+`)", (straight,)),
        ("both (`kl` and `low_var_kl`)", (reward, loss)),
        ("both, k3 in each", (k3_reward, loss)),
    ):
        found = certificates(words, terms)
        both = [outcome(found[regime]) for regime in REGIMES]
        rows.append((words, " + ".join(f"`{t.label()}`" for t in terms), *both, f"{found['on_policy'].strength:.2f}"))
    return table(("flags", "terms", "on-policy", "off-policy", "strength"), rows)


def inside_advantages() -> str:
    """What group normalization leaves of a KL cost, on-policy, groups of 3."""
    rows = []
    shapes: dict[str, Callable[[float], KLTerm]] = {
        "in reward, `baseline: before`": lambda beta: KLTerm("k1", credit="total", baseline="before", beta=beta),
        "in reward, `baseline: after`": lambda beta: KLTerm("k1", credit="total", beta=beta),
        "k2 in loss": lambda beta: KLTerm("k2", placement="loss", beta=beta),
    }
    for words, shape in shapes.items():
        cells_of_row = []
        for advantage, beta in (("rloo", 0.01), ("dr_grpo", 0.01), ("grpo", 0.1), ("grpo", 0.01)):
            around = AlgorithmContext(advantage=advantage, group_size=3)
            (effect,) = effects(words, [shape(beta)], around, regimes=("on_policy",))
            cells_of_row.append(f"{effect.strength:.2g} (cosine {effect.cosine:.2f})")
        rows.append((words, *cells_of_row))
    head = ("the KL term is", "`rloo`", "`dr_grpo`", "`grpo`, beta 0.1", "`grpo`, beta 0.01")
    return table(head, rows)


def terms_by_target() -> str:
    """Per regime, the terms that optimize each target, least noise first; one row for those with equal corrections."""
    parts = []
    for regime in REGIMES:
        rows = []
        for target in ("sequence_reverse", "token_reverse", "token_forward", "sequence_forward", "zero"):
            hits = [(of(term)[regime], term) for term in matrix() if of(term)[regime].target == target]
            corrections: dict[str, dict[str, list[str]]] = {}
            for certificate, term in sorted(hits, key=lambda hit: (round(hit[0].variance, 6), hit[1].label())):
                base = replace(term, correction="none").label()
                corrections.setdefault(base, {}).setdefault(noise(certificate), []).append(term.correction)
            bases: dict[str, list[str]] = {}
            for base, by_noise in corrections.items():
                words = "; ".join(f"{', '.join(names)}: {level}" for level, names in by_noise.items())
                bases.setdefault(words, []).append(f"`{base}`")
            rows += [(f"`{target}`", ", ".join(names), words) for words, names in bases.items()]
        title = regime.replace("_", "-").capitalize()
        parts.append(f"### {title}\n\n{table(('optimizes', 'term', 'corrections: noise'), rows)}")
    return "\n\n".join(parts)


# --- a page per estimator -------------------------------------------------------------------------------------
MEANINGS = {
    "value:reverse": "its mean at a prefix is `KL(pi || ref)` there",
    "value:forward": "its mean at a prefix is `KL(ref || pi)` there",
    "pathwise:zero": "its own gradient has mean zero",
    "pathwise:token_reverse": "its own gradient has the mean of the gradient of the reverse KL at the prefix",
    "pathwise:token_forward": "its own gradient has the mean of the gradient of the forward KL at the prefix",
    "nonnegative": "it is never negative",
}


def estimator_page(name: str) -> str:
    entry = ESTIMATORS.get(name)
    file = Path(inspect.getsourcefile(entry.fn) or "").relative_to(ROOT)
    claims = "\n".join(f"- `{claim}`: {MEANINGS[claim]}." for claim in entry.claims) or "- none"
    bare = [term for term in matrix() if term.estimator == name and term.correction == "none"]
    corrected = [term for term in matrix() if term.estimator == name and term.correction != "none"]
    return f"""# {name}

<!-- This page is made by scripts/generate_docs.py. -->

{_prose(entry)}

Source: {entry.source}. Code: [{file}](../../{file}).{_options(entry)}

## Claims

{claims}

Checked near the reference and far from it by
`tests/exact/test_certificates.py::test_built_in_estimators_keep_their_claims`.

## Without a correction

{_certified(bare)}

## With a correction

{_certified(corrected)}

A target is named where the enumerated gradient equals it; otherwise the distance from the sequence-level reverse KL
and the cosine with it. Noise is the variance over that of the least noisy term for the same target (for
`sequence_reverse` where none is hit). The test is
`{MATRIX_TEST}`. [All estimators](README.md) · [which one to use](../decision.md)
"""


def _prose(entry: Entry[Callable[..., object]]) -> str:
    """The docstring: its examples as a block of code."""
    text = inspect.getdoc(entry.fn) or ""
    words, _, example = text.partition(">>>")
    code = f"\n\n```python\n>>>{example.rstrip()}\n```" if example else ""
    return words.strip().replace("``", "`") + code


def _options(entry: Entry[Callable[..., object]]) -> str:
    named = [p for p in inspect.signature(entry.fn).parameters.values() if p.default is not inspect.Parameter.empty]
    return "".join(f" Option `{p.name}`, default {p.default}." for p in named)


def _certified(terms: Sequence[KLTerm]) -> str:
    rows = []
    for term in terms:
        found = of(term)
        words = [f"{outcome(found[regime])} ({noise(found[regime])})" for regime in REGIMES]
        rows.append((f"`{term.label()}`", *words))
    return table(("term", "on-policy (noise)", "off-policy (noise)"), rows)


def estimator_index() -> str:
    rows = []
    for name in ESTIMATOR_NAMES:
        entry = ESTIMATORS.get(name)
        shown = [outcome(of(KLTerm(name, placement=placement))["on_policy"]) for placement in ("reward", "loss")]
        rows.append((f"[{name}]({name}.md)", entry.summary.replace("``", "`"), *shown))
    head = ("estimator", "what it is", "in reward, to go, on-policy", "in loss, on-policy")
    words = """
    Every estimator of the per-token log-ratio `l = log pi - log ref` to nats, with what it optimizes in each placement.
    An unbiased estimate can have a biased gradient: compare the two columns. The figures are for small random policies,
    enumerated in float64: trust the order, not the size.
    """
    comment = "<!-- This page is made by scripts/generate_docs.py. -->"
    return f"# Estimators\n\n{comment}\n{textwrap.dedent(words)}\n{table(head, rows)}\n"


WHOLE: dict[str, Callable[[], str]] = {
    "estimators/README.md": estimator_index,
    **{f"estimators/{name}.md": (lambda name=name: estimator_page(name)) for name in ESTIMATOR_NAMES},
}
"""Pages without a line written by hand."""

PARTS: dict[str, Callable[[], str]] = {
    "decision": decision,
    "never": never,
    "placements": placements,
    "inside advantages": inside_advantages,
    "terms": terms_by_target,
}
"""The generated parts of decision.md."""
