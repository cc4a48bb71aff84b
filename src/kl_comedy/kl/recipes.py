"""Named lists of terms for what papers and libraries do, each with its source.

A recipe fixes the shape; ``beta`` is the source's default and can be overridden where it is used.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from kl_comedy.config.validate import option, parse_record
from kl_comedy.errors import UserError, bad_value, meant, nearest, shown
from kl_comedy.kl.beta import NEGATIVE, Beta, first_value, parse_beta
from kl_comedy.kl.term import KLTerm
from kl_comedy.registry import ESTIMATORS, RECIPES


def _recipe(name: str, summary: str, source: str, *terms: KLTerm) -> None:
    """Register a list of terms under ``name``; what is registered is a function without arguments that returns it."""
    labels = "no KL"
    if terms:
        labels = " + ".join(term.label() for term in terms)
    RECIPES.register(name, source=source, summary=summary, terms=labels)(lambda: terms)


# Beginnings that several recipes share.
_reward = partial(KLTerm, placement="reward")
_loss = partial(KLTerm, placement="loss")
# A cost of the whole completion, inside the reward: the advantage's baseline is taken of reward and cost together.
_before = partial(KLTerm, placement="reward", credit="total", baseline="before")
_rao_blackwell = partial(KLTerm, "exact", placement="reward", correction="prefix_previous", beta=0.01)
_teacher = partial(KLTerm, reference="teacher", beta=1.0)

_recipe("none", "no KL term", "beta = 0 in TRL, prime-rl, verl defaults")
# --- the placements that 2512.21852 compares -------------------------------------------------------------------------

_recipe(
    "comedy/k1_in_reward",
    "k1 as a cost of the whole completion, before the baseline",
    "2512.21852 Table 1",
    _before("k1", beta=0.05),
)
_recipe("comedy/k1_in_loss", "k1 differentiated", "2512.21852 Table 1", _loss("k1", beta=0.05))
_recipe(
    "comedy/k3_in_reward",
    "k3 as a cost of the whole completion, before the baseline",
    "2512.21852 Table 1",
    _before("k3", beta=0.05),
)
_recipe("comedy/k3_in_loss", "k3 differentiated", "2512.21852 Table 1", _loss("k3", beta=0.05))
_recipe(
    "comedy/k3_both",
    "k3 in reward and in loss, the same beta in each",
    "2512.21852 Sec. 4.3",
    _before("k3", beta=0.1),
    _loss("k3", beta=0.1),
)
# --- what libraries do, and the papers they follow -------------------------------------------------------------------

_recipe("grpo", "k3 differentiated", "2402.03300 Eq. 4", _loss("k3", beta=0.04))
_recipe(
    "trl/default",
    "k3 times the differentiable token ratio",
    "TRL 1.16 GRPO, use_bias_correction_kl=True",
    _loss("k3", correction="token", beta=0.04),
)
_recipe("trl/rloo", "k1 of the whole completion inside the reward", "TRL 1.16 RLOO", _before("k1", beta=0.05))
# verl and SkyRL clamp the log-ratio to 20 nats and the estimate to 10.
_recipe(
    "verl/low_var_kl",
    "k3 differentiated, without gradient beyond its clamps",
    "verl 0.9.1 use_kl_loss, kl_loss_type=low_var_kl",
    _loss("k3", input_clamp=20.0, output_clamp=10.0, beta=0.001),
)
_recipe(
    "verl/k3+", "value of k3, gradient of k2", "verl 0.9.1 kl_loss_type=k3+", _loss("k3", gradient="k2", beta=0.001)
)
_recipe(
    "openrlhf/default", "k1 to go, after the group baseline", "OpenRLHF 0.11.2 reward path", _reward("k1", beta=0.01)
)
_recipe(
    "openrlhf/unbiased",
    "value of k3, gradient of k2, times the detached token ratio up to 10",
    "OpenRLHF 0.11.2 unbiased_gradient",
    _loss("k3", gradient="k2", correction="token_detached", cap=10.0, beta=0.01),
)
_recipe(
    "openrlhf/k3_loss",
    "k3 differentiated, without gradient beyond its clamp",
    "OpenRLHF 0.11.2 algo.kl.use_loss, algo.kl.estimator=k3",
    _loss("k3", output_clamp=10.0, beta=0.01),
)
_recipe(
    "nemo_rl/default",
    "value of k3, gradient of k2 (NeMo-RL gives no gradient beyond k3 = 10, this term does)",
    "NeMo-RL 7ea279a ClippedPGLossFn",
    _loss("k3", gradient="k2", beta=0.01),
)
_recipe(
    "skyrl/default",
    "k3 differentiated, without gradient beyond its clamps",
    "SkyRL 0.3.0 use_kl_loss",
    _loss("k3", input_clamp=20.0, output_clamp=10.0, beta=0.001),
)
_recipe(
    "open_instruct/default",
    "k3 differentiated",
    "open-instruct e6c3044 kl_estimator=2",
    _loss("k3", input_clamp=40.0, beta=0.05),
)
# --- methods of papers
# --------------------------------------------------------------------------------------------------

_recipe(
    "deepseek_v3_2", "k3 times the differentiable token ratio", "2512.02556", _loss("k3", correction="token", beta=0.01)
)
_recipe("liu/k2_loss", "k2 differentiated", "2510.01555", _loss("k2", beta=0.01))
_recipe(
    "liu/corrected",
    "k2 differentiated, times the detached token ratio",
    "2510.01555 (off-policy correction)",
    _loss("k2", correction="token_detached", beta=0.01),
)
# k1 as a cost of its own token weights the score by l, which is the gradient of k2 in loss; a clip needs a cost.
_recipe(
    "liu/clipped",
    "liu/corrected as a cost of its own token, with PPO's clip at 0.2",
    "2510.01555 (a clipped KL head)",
    _reward("k1", credit="own", correction="token", cap=1.2, cap_mode="clip", beta=0.01),
)
# The same term as openrlhf/default, by the name of another source.
_recipe(
    "frpo",
    "k1 to go, added to the advantage after normalization",
    "FRPO: reverse cumulative log-ratios",
    _reward("k1", beta=0.01),
)
_recipe("rb/token", "exact per-prefix KL differentiated", "2506.09477", _loss("exact", beta=0.01))
_recipe("rb/full", "exact per-prefix KL with future credit", "2506.09477", _reward("exact", beta=0.01))
_recipe(
    "rb/per_decision",
    "exact KL times the ratio of the tokens before: unbiased on- and off-policy",
    "per-decision importance sampling (Precup et al. 2000) of the Rao-Blackwellized KL (2504.10637)",
    _loss("exact", correction="prefix_previous", beta=0.01),
)
# --- rb/per_decision with less noise: the results of results/open_problem -------------------------------------------

_recipe(
    "rb/baselined",
    "rb/per_decision with the leave-one-out mean of its own returns: unbiased, less noise",
    "results/open_problem",
    _rao_blackwell(baseline="own"),
)
_recipe(
    "rb/robust",
    "rb/baselined with the prefix ratio truncated at 8: least error on stale batches",
    "results/open_problem",
    _rao_blackwell(cap=8.0, baseline="own"),
)
_recipe(
    "rb/windowed",
    "rb/per_decision with the product of the last 4 ratios",
    "results/open_problem (a negative result)",
    _rao_blackwell(window=4),
)
_recipe(
    "rb/masked",
    "rb/per_decision without the costs whose prefix ratio is above 4",
    "results/open_problem",
    _rao_blackwell(cap=4.0, cap_mode="mask"),
)
# --- importance sampling of sampled estimates ------------------------------------------------------------------------

_recipe(
    "is/sequence_total",
    "k1 of the whole completion times its ratio",
    "2512.21852 Sec. 3",
    _reward("k1", credit="total", correction="sequence", beta=0.01),
)
_recipe(
    "is/k3_sequence",
    "k3 times the differentiated ratio of the completion",
    "Amini et al., kl-rb code",
    _loss("k3", correction="sequence", beta=0.01),
)
_recipe(
    "is/k3_per_decision",
    "k3 times the differentiated ratio of the prefix",
    "per-decision importance sampling",
    _loss("k3", correction="prefix", beta=0.01),
)
_recipe(
    "is/sequence",
    "k1 in reward times the ratio of the completion",
    "2512.21852 Sec. 3",
    _reward("k1", correction="sequence", beta=0.01),
)
_recipe(
    "is/per_decision",
    "k1 in reward times the ratio of the prefix",
    "per-decision importance sampling",
    _reward("k1", correction="prefix", beta=0.01),
)
# --- distillation: the reference is a teacher ------------------------------------------------------------------------

_recipe(
    "opd/sampled",
    "on-policy distillation: k1 to the teacher, each token its own",
    "Thinking Machines, On-Policy Distillation (2025); tinker-cookbook",
    _teacher("k1", placement="reward", credit="own"),
)
_recipe(
    "opd/reverse",
    "on-policy distillation: exact reverse KL to the teacher, differentiated",
    "MiniLLM 2306.08543 without future credit; GKD 2306.13649",
    _teacher("exact", placement="loss"),
)
_recipe(
    "opd/forward",
    "exact forward KL to the teacher on the policy's completions",
    "GKD 2306.13649, lambda 1, forward KL",
    _teacher("exact_forward", placement="loss"),
)
_recipe(
    "opd/jsd",
    "exact Jensen-Shannon divergence to the teacher on the policy's completions",
    "GKD 2306.13649, lambda 1, JSD(0.5); TRL 1.16 DistillationTrainer, beta 0.5",
    _teacher("exact_jsd", placement="loss"),
)
# -E[1.25 (log teacher - log initial) - (log pi - log initial)], as two terms: the weights of log pi add up to 1, so the
# objective has an optimum although a beta is below 0.
_recipe(
    "g_opd",
    "max E[1.25 log(teacher / initial)] - KL(pi || initial), each token its own",
    "G-OPD 2602.12125: beta lambda to the teacher and 1 - lambda to the initial policy, lambda 1.25",
    _teacher("k1", placement="reward", credit="own", beta=1.25),
    _reward("k1", credit="own", beta=-0.25),
)


def _optional_beta(value: Any, key: str) -> Beta | None:
    if value is None:
        return None
    return parse_beta(value, key)


def meant_estimator(name: str) -> str | None:
    """The estimator that a name is, or is nearest to where it is no recipe's and near none; else None.

    >>> meant_estimator("k3"), meant_estimator("k4"), meant_estimator("gpro")
    ('k3', 'k3', None)
    """
    if name in RECIPES:
        return None
    if name in ESTIMATORS:
        return name
    if nearest(name, RECIPES.names()) is not None:
        return None
    return meant(name, ESTIMATORS.names())


def recipe(name: str, *, beta: Any = None, key: str = "kl") -> tuple[KLTerm, ...]:
    """The terms of a recipe, all with ``beta`` where it is given.

    ``key`` is the config key that messages begin with. Raises :class:`UserError` for an unknown name, with the nearest
    one, for the name of an estimator, and for a ``beta`` beside terms whose betas differ.
    """
    estimator = meant_estimator(name)
    if estimator is not None:
        kind = "an estimator, and"
        if name != estimator:
            kind = f"neither a recipe nor an estimator; did you mean {estimator!r}? It is an estimator, and"
        raise UserError(
            f"{key}: got {shown(name)}, {kind} what it optimizes depends on where it stands: kl-comedy certify "
            f"--term '{{estimator: {estimator}, placement: loss}}', or in Python "
            f"KLTerm({estimator!r}, placement='loss')"
        )
    terms: tuple[KLTerm, ...] = RECIPES.get(name, key=key).fn()
    if beta is None:
        return terms
    if len({term.beta for term in terms}) > 1:
        # The ratio of the betas is what such a recipe is about: one number for all of them would be another method.
        betas = ", ".join(f"{term.beta:g}" for term in terms)
        reason = f"its terms have betas of their own ({betas}); write the terms out to change them"
        raise bad_value(f"{key}.beta", beta, "none with this recipe", reason)
    return tuple(dataclasses.replace(term, beta=parse_beta(beta, f"{key}.beta")) for term in terms)


@dataclass(frozen=True, kw_only=True)
class RecipeUse:
    """A recipe in a config: ``{recipe: NAME, beta: ...}``."""

    recipe: str = option(..., "Name of the recipe.", registry="recipes")
    beta: Beta | None = option(None, "Replaces the beta of each of its terms.", parse=_optional_beta)


@RECIPES.checked_by
def resolve_terms(value: Any, key: str = "kl") -> tuple[KLTerm, ...]:
    """Config data to terms: a list of mappings, a recipe's name, or ``{recipe: NAME, beta: ...}``; none for None.

    Raises :class:`UserError` that names the full key (``kl.0.estimator``).
    """
    terms = _parse_terms(value, key)
    betas = [first_value(term.beta) for term in terms]
    # The betas' sum is the weight of pi log pi in the objective: while it is above 0, the objective has an optimum, and
    # a single beta may be below 0 (as in G-OPD).
    if sum(betas) <= 0:
        for position, beta in enumerate(betas):
            if beta < 0:
                allowed = "at least 0, or less than the betas of the other terms in size"
                raise bad_value(f"{key}.{position}.beta", beta, allowed, NEGATIVE)
    return terms


def _parse_terms(value: Any, key: str) -> tuple[KLTerm, ...]:
    """The terms of config data, whatever the signs of their betas."""
    if value is None:
        return ()
    if _names_a_recipe(value):
        return _parse_recipe(value, key)
    if isinstance(value, Mapping) or not isinstance(value, Sequence):
        raise bad_value(key, value, "a list of terms, the name of a recipe, or {recipe: NAME, beta: ...}")
    terms: list[KLTerm] = []
    for position, item in enumerate(value):
        item_key = f"{key}.{position}"
        if _names_a_recipe(item):
            terms += _parse_recipe(item, item_key)
        else:
            terms.append(parse_record(KLTerm, item, key=item_key))
    return tuple(terms)


def _names_a_recipe(value: Any) -> bool:
    """Whether config data is a recipe's name or ``{recipe: NAME, ...}``, and not a term or a list."""
    if isinstance(value, str):
        return True
    return isinstance(value, Mapping) and "recipe" in value


def _parse_recipe(value: Any, key: str) -> tuple[KLTerm, ...]:
    if isinstance(value, str):
        estimator = meant_estimator(value)
        if estimator is not None:
            kind = "an estimator" if value == estimator else "neither a recipe nor an estimator"
            instead = f"{key}=[{{estimator: {estimator}, placement: loss}}]"
            raise UserError(
                f"{key}: got {shown(value)}, {kind}; did you mean '{instead}'? "
                "(or the name of a recipe: kl-comedy list recipes)"
            )
        return recipe(value, key=key)
    use = parse_record(RecipeUse, value, key=key)
    return recipe(use.recipe, beta=use.beta)
