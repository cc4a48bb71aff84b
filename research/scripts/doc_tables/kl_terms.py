"""Certificates in docs/decision.md and docs/loss_or_reward.md, and the pages of docs/estimators/."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path

from doc_tables.common import ROOT, built_in, code_span, defaults_of, table

from kl_comedy.kl import KLTerm
from kl_comedy.kl.claims import all_terms
from kl_comedy.kl.oracle import AlgorithmContext
from kl_comedy.kl.oracle.algorithm_context import effects
from kl_comedy.kl.oracle.certificate import Certificate, certify
from kl_comedy.peers.advice import REGIME_OF_SAMPLES, advice
from kl_comedy.registry import CORRECTIONS, ESTIMATORS, Entry

MATRIX_TEST = "tests/exact/test_claims.py::test_every_term_hits_exactly_the_target_it_claims"
REGIMES = ("on_policy", "off_policy")
EstimatorEntry = Entry[Callable[..., object]]
ESTIMATOR_NAMES = tuple(entry.name for entry in built_in(ESTIMATORS))
CORRECTION_NAMES = tuple(entry.name for entry in built_in(CORRECTIONS))


@cache
def certificates(label: str, terms: tuple[KLTerm, ...]) -> dict[str, Certificate]:
    """Certificates by regime. Asserts that claims hold, also off-policy claims for mixed policy versions."""
    by_regime = {certificate.regime: certificate for certificate in certify(label, terms)}
    # The pages have no column for batches of several policy versions: there, each claim must be that of off-policy.
    assert by_regime["mixed"].target == by_regime["off_policy"].target, label
    assert all(certificate.claim_holds for certificate in by_regime.values()), label
    return by_regime


# Cached: every page of an estimator asks for it, and certificates of the same term are shared between pages.
@cache
def matrix() -> tuple[KLTerm, ...]:
    """Every built-in term whose log-ratio uses the current weights."""
    terms = all_terms(ESTIMATOR_NAMES, CORRECTION_NAMES)
    return tuple(term for term in terms if term.anchor == "current")


def certificates_of(term: KLTerm) -> dict[str, Certificate]:
    return certificates(term.label(), (term,))


def labels_of(terms: Sequence[KLTerm]) -> str:
    return " + ".join(code_span(term.label()) for term in terms)


def outcome(certificate: Certificate) -> str:
    """The target, or the relative bias and cosine against the sequence-level reverse KL."""
    if certificate.target is not None:
        return code_span(certificate.target)
    bias = percent(certificate.relative_bias[certificate.stated])
    text = f"{bias} off, cosine {certificate.cosine[certificate.stated]:.2f}"
    if certificate.near_target:
        # Hit close to the reference, where no bound acts, and missed elsewhere.
        return f"{code_span(certificate.near_target)} near the reference; {text}"
    return text


def percent(share: float) -> str:
    return f"{100 * share:.0f}%" if share < 10 else f"{share:.0f}x"


def noise(certificate: Certificate) -> str:
    """The variance relative to the least noisy term for the same target."""
    if certificate.target == "zero":
        # Its expected gradient is zero, so that all of it is noise, and a ratio would have no base.
        return "nothing else"
    if certificate.variance_ratio is None:
        return "-"
    return f"{certificate.variance_ratio:.2g}x"


# --- the decision page ----------------------------------------------------------------------------------------
def proof() -> str:
    """What enumeration finds of each advised term on samples of this age, and its noise."""
    rows = []
    for situation in advice().situations.values():
        for candidate in advice().candidates_of(situation):
            certificate = certificates(candidate.words, candidate.terms)[REGIME_OF_SAMPLES[situation.samples]]
            rows.append((situation.samples, f"{candidate.words} (open)", outcome(certificate), noise(certificate)))
        # The advice for a KL to the sampler is a policy loss.
        if not situation.terms:
            continue
        certificate = certificates(situation.use, situation.terms)[REGIME_OF_SAMPLES[situation.samples]]
        assert certificate.target == situation.target, situation.name
        rows.append((situation.samples, code_span(situation.use), outcome(certificate), noise(certificate)))
    return table(("samples", "recipe", "optimizes", "noise"), rows)


def placements() -> str:
    """use_kl_in_reward, use_kl_loss and both, at the same beta."""
    k1_reward = KLTerm("k1", placement="reward", credit="total", baseline="before")
    k3_reward = KLTerm("k3", placement="reward", credit="total")
    k3_loss = KLTerm("k3", placement="loss")
    k3_with_k2_gradient = KLTerm("k3", placement="loss", gradient="k2")
    settings: tuple[tuple[str, tuple[KLTerm, ...]], ...] = (
        ("`use_kl_in_reward` (`kl`)", (k1_reward,)),
        ("`use_kl_loss` (`low_var_kl`)", (k3_loss,)),
        ("`use_kl_loss` (`k3+`)", (k3_with_k2_gradient,)),
        ("both (`kl` and `low_var_kl`)", (k1_reward, k3_loss)),
        ("both, k3 in each", (k3_reward, k3_loss)),
    )
    rows = []
    for flags, terms in settings:
        by_regime = certificates(flags, terms)
        outcomes = [outcome(by_regime[regime]) for regime in REGIMES]
        strength = f"{by_regime['on_policy'].strength:.2f}"
        rows.append((flags, labels_of(terms), *outcomes, strength))
    return table(("flags", "terms", "on-policy", "off-policy", "strength"), rows)


def inside_advantages() -> str:
    """Effect of group normalization on a KL cost, on-policy, groups of 3."""
    terms = {
        "in reward, `baseline: before`": KLTerm("k1", credit="total", baseline="before"),
        "in reward, `baseline: after`": KLTerm("k1", credit="total"),
        "k2 in loss": KLTerm("k2", placement="loss"),
    }
    # Two betas of grpo: it divides by the deviation of reward and cost together, so that its effect is not linear.
    columns = (("rloo", 0.01), ("dr_grpo", 0.01), ("grpo", 0.1), ("grpo", 0.01))
    rows = []
    for setting, term in terms.items():
        cells = []
        for advantage, beta in columns:
            context = AlgorithmContext(advantage=advantage, group_size=3)
            term_at_beta = dataclasses.replace(term, beta=beta)
            (effect,) = effects(setting, [term_at_beta], context, regimes=("on_policy",))
            cells.append(f"{effect.strength:.2g} ({effect.cosine:.2f})")
        rows.append((setting, *cells))
    head = ("the KL term is", "`rloo`", "`dr_grpo`", "`grpo`, beta 0.1", "`grpo`, beta 0.01")
    return table(head, rows)


# --- a page per estimator -------------------------------------------------------------------------------------
# By the claims that the decorators of estimators declare; a new claim without a meaning raises a KeyError here.
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


MADE_BY = "<!-- This page is made by research/scripts/generate_docs.py. -->"


def estimator_page(name: str) -> str:
    """The page of one estimator: its formula, its claims, and the certificate of every term that uses it."""
    entry = ESTIMATORS.get(name)
    file = Path(inspect.getsourcefile(entry.fn) or "").relative_to(ROOT)
    uncorrected = []
    corrected = []
    for term in matrix():
        if term.estimator == name and term.correction == "none":
            uncorrected.append(term)
        elif term.estimator == name:
            corrected.append(term)
    # The matrix has the default options. What a top-k estimator optimizes is decided by its option `form`.
    for form in entry.facts.get("options", {}).get("form", {}).get("choices", ()):
        uncorrected.append(KLTerm(name, placement="loss", options={"form": form}))
    return f"""# {name}

{MADE_BY}

{_prose(entry)}

Source: {entry.source}. Code: [{file}](../../{file}).{_options(entry)}

## Claims

{_claims(entry)}

{_checked(entry)}, over draws of the options, by
`tests/exact/test_false_plugins.py::test_built_in_parts_keep_what_they_declare_for_any_seed`.

## Without a correction

{_certified(uncorrected)}

## With a correction

{_certified(corrected)}

A target is named where the enumerated gradient equals it; otherwise the distance from the sequence-level reverse KL
and the cosine with it. Noise is the variance over that of the least noisy term for the same target (for
`sequence_reverse` where none is hit). Both are means over random policies of 3 tokens, 0.02 to 0.06 nats of KL per
prefix from the reference. The test is
`{MATRIX_TEST}`. [All estimators](README.md) · [which one to use](../decision.md)
"""


def _claims(entry: EstimatorEntry) -> str:
    """The claims as a list, then the options that they need in each regime."""
    lines = [f"- `{claim}`: {MEANINGS[claim]}." for claim in entry.claims]
    text = "\n".join(lines) or "- none"
    # A claim may hold in a regime with some values of an option only.
    for regime, options in entry.facts.get("claims_need", {}).items():
        text += f"\n\n{regime.replace('_', '-').capitalize()} they hold with {_needed(options)} only."
    return text


def _needed(options: Mapping[str, Sequence[str]]) -> str:
    conditions = []
    for name, values in options.items():
        conditions.append(f"{code_span(name)}: {' or '.join(map(code_span, values))}")
    return ", ".join(conditions)


def _checked(entry: EstimatorEntry) -> str:
    if entry.facts["needs"] == "top_k":
        return "Checked on random distributions, in float64"
    return "Checked at log-ratios of up to 100 nats, in float64 and float32"


def _prose(entry: EstimatorEntry) -> str:
    """The docstring, with its examples as a code block."""
    docstring = inspect.getdoc(entry.fn) or ""
    prose, _, example = docstring.partition(">>>")
    text = prose.strip().replace("``", "`")
    if example:
        text += f"\n\n```python\n>>>{example.rstrip()}\n```"
    return text


def _options(entry: EstimatorEntry) -> str:
    return "".join(f" Option `{name}`, default {default}." for name, default in defaults_of(entry.fn).items())


def _certified(terms: Sequence[KLTerm]) -> str:
    rows = []
    for term in terms:
        by_regime = certificates_of(term)
        outcomes = [f"{outcome(by_regime[regime])} ({noise(by_regime[regime])})" for regime in REGIMES]
        rows.append((code_span(term.label()), *outcomes))
    return table(("term", "on-policy (noise)", "off-policy (noise)"), rows)


INTRODUCTION = """
Every estimator of the per-token log-ratio `l = log pi - log ref` to nats, with what it optimizes in each placement.
An unbiased estimate can have a biased gradient: compare the two columns. The figures are means over random policies
of 3 tokens, 0.02 to 0.06 nats of KL per prefix from the reference, enumerated in float64: trust the order, not the
size.
"""


def estimator_index() -> str:
    rows = []
    for name in ESTIMATOR_NAMES:
        summary = ESTIMATORS.get(name).summary.replace("``", "`")
        in_reward = certificates_of(KLTerm(name, placement="reward"))["on_policy"]
        in_loss = certificates_of(KLTerm(name, placement="loss"))["on_policy"]
        rows.append((f"[{name}]({name}.md)", summary, outcome(in_reward), outcome(in_loss)))
    head = ("estimator", "what it is", "in reward, to go, on-policy", "in loss, on-policy")
    return f"# Estimators\n\n{MADE_BY}\n{INTRODUCTION}\n{table(head, rows)}\n"


WHOLE: dict[str, Callable[[], str]] = {
    "estimators/README.md": estimator_index,
    **{f"estimators/{name}.md": partial(estimator_page, name) for name in ESTIMATOR_NAMES},
}
"""Pages that are generated as a whole."""

PARTS: dict[str, Callable[[], str]] = {"proof": proof}
"""The generated part of decision.md that needs certificates."""

TO_SAMPLER = {
    "exact in the loss": KLTerm("exact", placement="loss"),
    "exact in the reward × ratio before": KLTerm("exact", correction="prefix_previous"),
    "exact_forward in the loss": KLTerm("exact_forward", placement="loss"),
    "exact_jsd in the loss": KLTerm("exact_jsd", placement="loss"),
    "k1 in the reward × prefix ratio": KLTerm("k1", correction="prefix"),
    "k3 in the loss × token ratio": KLTerm("k3", placement="loss", correction="token"),
    "k3 in the loss × detached token ratio": KLTerm("k3", placement="loss", correction="token_detached"),
    "k2 in the loss × detached token ratio": KLTerm("k2", placement="loss", correction="token_detached"),
    "k2 in the loss (prime-rl's `kl_tau`, at twice the beta)": KLTerm("k2", placement="loss"),
    "k3 in the loss": KLTerm("k3", placement="loss"),
    "k1 in the reward, to go": KLTerm("k1"),
    "k1 in the loss": KLTerm("k1", placement="loss"),
}
"""The rows of docs/references.md; each is taken with the sampler as its reference."""


def to_the_sampler() -> str:
    """What terms whose reference is the sampler optimize on stale samples, and the largest error of a target."""
    rows = []
    for name, to_reference in TO_SAMPLER.items():
        term = dataclasses.replace(to_reference, reference="sampler")
        (certificate,) = certify(name, (term,), regimes=("off_policy",), seed=0)
        assert certificate.claim_holds, name
        error = ""
        optimizes = certificate.untargeted
        if certificate.target is not None:
            optimizes = code_span(certificate.target)
            error = f"{certificate.worst_error:.0e}"
        bias = percent(certificate.relative_bias[certificate.stated])
        rows.append((name, optimizes, error, f"{bias}, {noise(certificate)}"))
    return table(("term", "optimizes", "largest error", "off `sequence_sampler_reverse`, noise"), rows)


PLACEMENTS: dict[str, Callable[[], str]] = {"placements": placements, "inside advantages": inside_advantages}
"""Generated parts of loss_or_reward.md."""
