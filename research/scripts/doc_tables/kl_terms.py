"""Tables of docs/decision.md and the pages of docs/estimators/, generated from certificates."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
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
    """Certificates by regime. Asserts that claims hold, also off-policy claims for mixed policy versions."""
    by_regime = {c.regime: c for c in certify(label, terms)}
    assert by_regime["mixed"].target == by_regime["off_policy"].target, label
    assert all(c.claim_holds for c in by_regime.values()), label
    return by_regime


@lru_cache(maxsize=1)
def matrix() -> tuple[KLTerm, ...]:
    """Every built-in term whose log-ratio uses the current weights."""
    return tuple(c for c in all_terms(ESTIMATOR_NAMES, CORRECTION_NAMES) if c.anchor == "current")


def certificates_of(term: KLTerm) -> dict[str, Certificate]:
    return certificates(term.label(), (term,))


def outcome(certificate: Certificate) -> str:
    """The target, or the relative bias and cosine against the sequence-level reverse KL."""
    if certificate.target is not None:
        return f"`{certificate.target}`"
    off, along = certificate.relative_bias["sequence_reverse"], certificate.cosine["sequence_reverse"]
    near = f"`{certificate.near_target}` near the reference; " if certificate.near_target else ""
    return f"{near}{percent(off)} off, cosine {along:.2f}"


def percent(share: float) -> str:
    return f"{100 * share:.0f}%" if share < 10 else f"{share:.0f}x"


def noise(certificate: Certificate) -> str:
    """The variance relative to the least noisy term for the same target."""
    if certificate.target == "zero":
        return "nothing else"
    return "-" if certificate.variance_ratio is None else f"{certificate.variance_ratio:.2g}x"


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
"""Situation, recipe, regime, and the row of the master table in tests/exact/test_claims.py."""

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
    for situation, name, regime, _ in SITUATIONS:
        certificate = certificates(name, recipe(name))[regime]
        assert certificate.target is not None, name
        terms = " + ".join(f"`{term.label()}`" for term in recipe(name))
        rows.append((situation, f"`{name}`", terms, f"`{certificate.target}`", noise(certificate)))
    return table(("you are", "recipe", "term", "optimizes", "noise"), rows)


def never() -> str:
    rows = []
    for name, regime, why in NEVER:
        certificate = certificates(name, recipe(name))[regime]
        assert certificate.target in (None, "zero"), (name, regime)
        rows.append((f"`{name}`", regime.replace("_", "-"), outcome(certificate), why))
    return table(("recipe", "regime", "enumerated", "why"), rows)


def placements() -> str:
    """use_kl_in_reward, use_kl_loss and both, at the same beta."""
    reward = KLTerm("k1", placement="reward", credit="total", baseline="before")
    loss, k3_reward = KLTerm("k3", placement="loss"), KLTerm("k3", placement="reward", credit="total")
    k3_with_k2_gradient = KLTerm("k3", placement="loss", gradient="k2")
    rows = []
    for setting, terms in (
        ("`use_kl_in_reward` (`kl`)", (reward,)),
        ("`use_kl_loss` (`low_var_kl`)", (loss,)),
        ("`use_kl_loss` (`k3+`)", (k3_with_k2_gradient,)),
        ("both (`kl` and `low_var_kl`)", (reward, loss)),
        ("both, k3 in each", (k3_reward, loss)),
    ):
        by_regime = certificates(setting, terms)
        outcomes = [outcome(by_regime[regime]) for regime in REGIMES]
        rows.append(
            (setting, " + ".join(f"`{t.label()}`" for t in terms), *outcomes, f"{by_regime['on_policy'].strength:.2f}")
        )
    return table(("flags", "terms", "on-policy", "off-policy", "strength"), rows)


def inside_advantages() -> str:
    """Effect of group normalization on a KL cost, on-policy, groups of 3."""
    rows = []
    shapes: dict[str, Callable[[float], KLTerm]] = {
        "in reward, `baseline: before`": lambda beta: KLTerm("k1", credit="total", baseline="before", beta=beta),
        "in reward, `baseline: after`": lambda beta: KLTerm("k1", credit="total", beta=beta),
        "k2 in loss": lambda beta: KLTerm("k2", placement="loss", beta=beta),
    }
    for setting, shape in shapes.items():
        cells_of_row = []
        for advantage, beta in (("rloo", 0.01), ("dr_grpo", 0.01), ("grpo", 0.1), ("grpo", 0.01)):
            context = AlgorithmContext(advantage=advantage, group_size=3)
            (effect,) = effects(setting, [shape(beta)], context, regimes=("on_policy",))
            cells_of_row.append(f"{effect.strength:.2g} ({effect.cosine:.2f})")
        rows.append((setting, *cells_of_row))
    head = ("the KL term is", "`rloo`", "`dr_grpo`", "`grpo`, beta 0.1", "`grpo`, beta 0.01")
    return table(head, rows)


# --- a page per estimator -------------------------------------------------------------------------------------
MEANINGS = {
    "value:reverse": "its mean at a prefix is `KL(pi || ref)` there",
    "value:forward": "its mean at a prefix is `KL(ref || pi)` there",
    "pathwise:zero": "its own gradient has mean zero",
    "pathwise:token_reverse": "its own gradient has the mean of the gradient of the reverse KL at the prefix",
    "pathwise:token_forward": "its own gradient has the mean of the gradient of the forward KL at the prefix",
    "value:mixture": "it is `b KL(ref || m) + (1 - b) KL(pi || m)` at the prefix, `m = b ref + (1 - b) pi`",
    "pathwise:token_mixture": "its own gradient is that of this divergence at the prefix",
    "nonnegative": "it is never negative",
}


def estimator_page(name: str) -> str:
    entry = ESTIMATORS.get(name)
    file = Path(inspect.getsourcefile(entry.fn) or "").relative_to(ROOT)
    claims = "\n".join(f"- `{claim}`: {MEANINGS[claim]}." for claim in entry.claims) or "- none"
    claims += "".join(
        f"\n\n{regime.replace('_', '-').capitalize()} they hold with {_needed(needed)} only."
        for regime, needed in entry.facts.get("claims_need", {}).items()
    )
    bare = [term for term in matrix() if term.estimator == name and term.correction == "none"]
    corrected = [term for term in matrix() if term.estimator == name and term.correction != "none"]
    forms = entry.facts.get("options", {}).get("form", {}).get("choices", ())
    bare += [KLTerm(name, placement="loss", options={"form": form}) for form in forms]
    return f"""# {name}

<!-- This page is made by research/scripts/generate_docs.py. -->

{_prose(entry)}

Source: {entry.source}. Code: [{file}](../../{file}).{_options(entry)}

## Claims

{claims}

{_checked(entry)}, over draws of the options, by
`tests/exact/test_false_plugins.py::test_built_in_parts_keep_what_they_declare_for_any_seed`.

## Without a correction

{_certified(bare)}

## With a correction

{_certified(corrected)}

A target is named where the enumerated gradient equals it; otherwise the distance from the sequence-level reverse KL
and the cosine with it. Noise is the variance over that of the least noisy term for the same target (for
`sequence_reverse` where none is hit). The test is
`{MATRIX_TEST}`. [All estimators](README.md) · [which one to use](../decision.md)
"""


def _needed(options: Mapping[str, Sequence[str]]) -> str:
    return ", ".join(f"`{name}`: {' or '.join(f'`{v}`' for v in values)}" for name, values in options.items())


def _checked(entry: Entry[Callable[..., object]]) -> str:
    if entry.facts["needs"] == "top_k":
        return "Checked on random distributions, in float64"
    return "Checked at log-ratios of up to 100 nats, in float64 and float32"


def _prose(entry: Entry[Callable[..., object]]) -> str:
    """The docstring, with its examples as a code block."""
    text = inspect.getdoc(entry.fn) or ""
    prose, _, example = text.partition(">>>")
    code = f"\n\n```python\n>>>{example.rstrip()}\n```" if example else ""
    return prose.strip().replace("``", "`") + code


def _options(entry: Entry[Callable[..., object]]) -> str:
    named = [p for p in inspect.signature(entry.fn).parameters.values() if p.default is not inspect.Parameter.empty]
    return "".join(f" Option `{p.name}`, default {p.default}." for p in named)


def _certified(terms: Sequence[KLTerm]) -> str:
    rows = []
    for term in terms:
        by_regime = certificates_of(term)
        outcomes = [f"{outcome(by_regime[regime])} ({noise(by_regime[regime])})" for regime in REGIMES]
        rows.append((f"`{term.label()}`", *outcomes))
    return table(("term", "on-policy (noise)", "off-policy (noise)"), rows)


def estimator_index() -> str:
    rows = []
    for name in ESTIMATOR_NAMES:
        entry = ESTIMATORS.get(name)
        outcomes = [
            outcome(certificates_of(KLTerm(name, placement=placement))["on_policy"]) for placement in ("reward", "loss")
        ]
        rows.append((f"[{name}]({name}.md)", entry.summary.replace("``", "`"), *outcomes))
    head = ("estimator", "what it is", "in reward, to go, on-policy", "in loss, on-policy")
    introduction = """
    Every estimator of the per-token log-ratio `l = log pi - log ref` to nats, with what it optimizes in each placement.
    An unbiased estimate can have a biased gradient: compare the two columns. The figures are for small random policies,
    enumerated in float64: trust the order, not the size.
    """
    comment = "<!-- This page is made by research/scripts/generate_docs.py. -->"
    return f"# Estimators\n\n{comment}\n{textwrap.dedent(introduction)}\n{table(head, rows)}\n"


WHOLE: dict[str, Callable[[], str]] = {
    "estimators/README.md": estimator_index,
    **{f"estimators/{name}.md": (lambda name=name: estimator_page(name)) for name in ESTIMATOR_NAMES},
}
"""Pages that are generated as a whole."""

PARTS: dict[str, Callable[[], str]] = {
    "decision": decision,
    "never": never,
    "placements": placements,
    "inside advantages": inside_advantages,
}
"""Generated parts of decision.md."""
