"""Does a number of a KL gradient predict training? Gradients at a common policy, against outcomes of finished runs.

    train without KL -> completions of a policy as old as the lag -> gradients of all forms, by blocks of an update
    finished runs    -> mean over seeds of the reward gained over no KL, collapses, KL at the end
    both             -> rank correlations and one-variable fits over configurations, tested on forms left out of the fit

A setting is an algorithm, an update's size, a lag and a learning rate; a configuration is a setting and a KL (form and
beta). In a setting all forms are measured on the same completions, of a run without KL: what a term would do to the
gradient there, before it has changed the policy.

Legend: ``C`` losses (policy loss, reference, forms), ``K`` blocks of completions, each of an update's size.
"""

from __future__ import annotations

import dataclasses
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from kl_comedy.audit.gradients import (
    AuditedTerm,
    GradientSketch,
    block_gradients,
    layer_groups,
    reference_term,
)
from kl_comedy.audit.grams import kl_projection, mean_product, noise
from kl_comedy.audit.measure import equal_blocks
from kl_comedy.audit.run import draw_completions
from kl_comedy.config import load_config
from kl_comedy.config.combinations import is_off_policy
from kl_comedy.errors import UserError
from kl_comedy.kl import KLTerm
from kl_comedy.records import Scored
from kl_comedy.registry import RECIPES
from kl_comedy.results.figures import legend_below
from kl_comedy.results.looks import looks_of_families
from kl_comedy.results.plots import in_words
from kl_comedy.results.runs import NO_KL
from kl_comedy.training.experience_module import ExperienceModule
from kl_comedy.training.fit import make_trainer
from kl_comedy.training.metrics import MetricAccumulator
from kl_comedy.training.module import PolicyModule
from research.studies.pages import figure, markdown, save_csv, update_page

if TYPE_CHECKING:
    import pandas as pd

UPDATES = (15, 30)
"""Updates after which gradients are measured; figures are means over them."""

BLOCKS = 16
SKETCH = 65536
"""Numbers of a gradient that are kept: its count sketch, which preserves inner products in expectation."""


def _term(recipe: str) -> KLTerm:
    """The one term of a recipe, at beta 1."""
    term: KLTerm
    (term,) = RECIPES.get(recipe).fn()
    return dataclasses.replace(term, beta=1.0)


# Labels of terms at beta 1 are the forms of gradients.csv: a run is found by the label of its own terms.
COMMON = (
    _term("comedy/k1_in_reward"),
    _term("comedy/k1_in_loss"),
    _term("comedy/k3_in_reward"),
    _term("comedy/k3_in_loss"),
)
ON_POLICY = (
    *COMMON,
    _term("openrlhf/default"),
    _term("liu/k2_loss"),
    _term("rb/full"),
    _term("rb/token"),
    KLTerm("k2", placement="loss", level="sequence"),
)
PARTS = (
    KLTerm("k1", placement="reward", baseline="before"),
    KLTerm("k1", placement="reward", credit="total", correction="none"),
    KLTerm("k1", placement="reward", credit="total", correction="token"),
    KLTerm("k1", placement="reward", credit="total", correction="prefix"),
    KLTerm("k1", placement="reward", correction="token"),
)
"""k1 in reward of the block ``lags_parts``, less those that are recipes."""
STALE = (
    *COMMON,
    _term("openrlhf/default"),
    # With a ratio.
    _term("deepseek_v3_2"),
    _term("is/k3_per_decision"),
    _term("is/per_decision"),
    _term("is/sequence"),
    _term("rb/per_decision"),
    _term("rb/robust"),
    # Exact, without a ratio.
    _term("rb/full"),
    _term("rb/token"),
    KLTerm("exact", placement="reward", baseline="own"),
    *PARTS,
)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A point of a grid of configs/evidence: its config without KL, and the forms measured there."""

    name: str
    config: str
    overrides: tuple[str, ...]
    forms: Sequence[KLTerm]
    betas: Sequence[float]


ROOT = Path(__file__).resolve().parents[2]


def settings() -> list[Setting]:
    """The settings of the first study, and of the blocks of docs/protocol.md on-policy and on stale batches.

    Not core's highest rate: without KL all rewards are 0 there by update 15, and the policy loss has no gradient.
    """
    first_study = "configs/study/base/pocket.yaml"
    protocol = "configs/evidence/base.yaml"
    on_policy = [
        _on_policy_setting(64, first_study, rate=1e-4, betas=(0.05, 0.1, 0.3, 1.0)),
        _on_policy_setting(64, first_study, rate=4e-4, betas=(0.05, 0.1, 0.3, 1.0)),
        _on_policy_setting(192, protocol, rate=1e-4, betas=(0.03, 0.1, 0.3)),
        _on_policy_setting(192, protocol, rate=3e-4, betas=(0.03, 0.1, 0.3)),
    ]
    lags = [_lag_setting(lag, rate) for lag in (0, 1, 4, 10) for rate in (5e-5, 1e-4, 2e-4)]
    return on_policy + lags


def _on_policy_setting(size: int, config: str, rate: float, betas: Sequence[float]) -> Setting:
    return Setting(
        name=f"{size} completions, rate {rate:g}",
        config=config,
        overrides=(f"optimizer.lr={rate}",),
        forms=ON_POLICY,
        betas=betas,
    )


def _lag_setting(lag: int, rate: float) -> Setting:
    # Other betas were trained at this one setting only.
    betas = (0.05, 0.1, 0.2) if (lag, rate) == (10, 2e-4) else (0.05,)
    mode = "replayed" if lag else "on_policy"
    return Setting(
        name=f"lag {lag}, rate {rate:g}",
        config="configs/offpolicy/pocket.yaml",
        overrides=(
            "kl=none",
            "rollout.prompts_per_batch=12",
            "train.microbatch_tokens=32768",
            "train.threads=1",
            f"lag.mode={mode}",
            f"lag.steps={lag}",
            f"optimizer.lr={rate}",
        ),
        forms=STALE,
        betas=betas,
    )


# --- gradients ------------------------------------------------------------------------------------------------------
POLICY = "policy"
REFERENCE = "reference"
"""Names of the first two losses: the policy loss, and the KL that the forms are measured against."""


class MeasureGradients(Callback):
    """At each of ``updates``: inner products of all gradients, on completions drawn ``lag`` updates before."""

    def __init__(self, forms: Sequence[KLTerm], updates: Sequence[int], lag: int, blocks: int) -> None:
        self._forms = forms
        self._updates = updates
        self._lag = lag
        self._blocks = blocks
        self._rows: dict[int, list[Scored]] = {}
        """Completions by the update at which they are used."""
        self.grams: dict[int, Tensor] = {}
        self.values: dict[int, dict[str, float]] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._at_version(trainer, pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self._at_version(trainer, pl_module)

    def _at_version(self, trainer: Any, module: PolicyModule) -> None:
        """Draw, measure and stop as the version of the policy asks for."""
        version = module.version
        rollout = module.config.rollout
        update_size = rollout.prompts_per_batch * rollout.group_size
        # Without a lag, completions are drawn and used at the same version.
        if version + self._lag in self._updates:
            self._rows[version + self._lag] = draw_completions(trainer.datamodule, self._blocks * update_size)
        if version in self._rows:
            self._measure(module, version, self._rows.pop(version))
        if version >= max(self._updates):
            trainer.should_stop = True

    def _measure(self, module: PolicyModule, version: int, rows: list[Scored]) -> None:
        on_policy = not is_off_policy(module.config)
        reference = reference_term("initial", on_policy=on_policy, group_size=module.config.rollout.group_size)
        losses = [AuditedTerm(key=POLICY, term=None), AuditedTerm(key=REFERENCE, term=reference)]
        for term in self._forms:
            losses.append(AuditedTerm(key=term.label(), term=term))

        sketch = GradientSketch(layer_groups(module.policy), SKETCH)
        metrics = MetricAccumulator()
        gradients = []
        # Each block is one update of the run: its norm is the one that clipping bounds.
        for block in equal_blocks(rows, self._blocks):
            by_layer, weight = block_gradients(module, block, losses, sketch, metrics)
            gradients.append(torch.cat(by_layer, -1).double() * weight)
        gradients_KCW = torch.stack(gradients)
        self.grams[version] = torch.einsum("jcw,kdw->cdjk", gradients_KCW, gradients_KCW)
        exact_kl = metrics.values()["exact_kl_sequence"]
        self.values[version] = {"exact_kl": exact_kl, "ess": _ess(module, rows)}


@torch.no_grad()
def _ess(module: PolicyModule, rows: Sequence[Scored]) -> float:
    """Effective share of the completions under the ratio of whole completions (Kish)."""
    from kl_comedy.training.packing import model_inputs

    ratios = []
    for packed in module.plan.packer.micro_batches(rows):
        logp_BT = module.policy_pass(model_inputs(packed), None, ()).logp_BT
        # `where` and not a product: padding may be infinite, and 0 times infinity is NaN.
        gap_BT = torch.where(packed.mask_BT, logp_BT - packed.behaviour_logp_BT, 0.0)
        ratios.append(gap_BT.double().sum(-1).exp())
    weight_B = torch.cat(ratios)
    # Kish: (sum w)^2 / (B sum w^2).
    return float(weight_B.sum() ** 2 / (len(weight_B) * weight_B.square().sum()))


def measure(setting: Setting, *, updates: Sequence[int] = UPDATES, blocks: int = BLOCKS) -> dict[int, dict[str, Any]]:
    """Train without KL and return by update: names of the losses, their inner products ``[C, C, K, K]``, and values."""
    overrides = [
        *setting.overrides,
        f"train.steps={max(updates)}",
        "train.eval_every=0",
        "eval.at_start=false",
        "train.checkpoint_every=0",
    ]
    config = load_config(ROOT / setting.config, overrides)
    module = PolicyModule(config)
    data = ExperienceModule(config)
    probe = MeasureGradients(setting.forms, updates, config.lag.steps, blocks)
    try:
        make_trainer(config, [probe]).fit(module, datamodule=data)
    finally:
        # Also after an error: a sampler's processes would outlive this one.
        data.close()
    names = [POLICY, REFERENCE, *(term.label() for term in setting.forms)]
    return {update: {"names": names, "gram": probe.grams[update], **probe.values[update]} for update in updates}


def _products(gram: Tensor, left: Mapping[int, float], right: Mapping[int, float]) -> Tensor:
    """Products ``[K, K]`` of two weighted sums of losses, the left in block j and the right in block k.

    ``left`` and ``right`` map the number of a loss in ``gram`` ``[C, C, K, K]`` to its weight.
    """
    total_KK = torch.zeros(gram.shape[-2:], dtype=torch.float64)
    for left_loss, left_weight in left.items():
        for right_loss, right_weight in right.items():
            total_KK += left_weight * right_weight * gram[left_loss, right_loss]
    return total_KK


def _rms_norm(gram_KK: Tensor) -> float:
    """The root mean square norm of a block's gradient, from its products with itself."""
    mean_square = float(gram_KK.diagonal().mean())
    return float(mean_square**0.5)


def gradient_figures(gram: Tensor, form: Mapping[int, float], beta: float, clip: float) -> dict[str, float]:
    """Figures of ``g``, the sum of the losses of ``form``, and of the update ``u = p + beta g``, from ``[C, C, K, K]``.

    ``p``: policy loss (loss 0); ``r``: reference gradient of the KL (loss 1), ``R`` its expectation. Each block has the
    size of an update, so a block's noise is an update's. ``clip``: largest norm of an update's gradient. The formulas
    of :data:`CANDIDATES`. Raises :class:`UserError` where ``R`` or ``p`` cannot be told from zero.
    """
    policy = {0: 1.0}
    reference = {1: 1.0}
    exact_update = {0: 1.0, 1: beta}
    update = {0: 1.0} | {loss: beta * weight for loss, weight in form.items()}
    g_KK = _products(gram, form, form)
    gr_KK = _products(gram, form, reference)
    r_KK = _products(gram, reference, reference)
    p_KK = _products(gram, policy, policy)
    u_KK = _products(gram, update, update)
    ur_KK = _products(gram, update, reference)
    pr_KK = _products(gram, policy, reference)

    of_form = _form_figures(g_KK, gr_KK, r_KK)
    policy_norm = _rms_norm(p_KK)
    if policy_norm == 0:
        raise UserError("predictor: the policy loss has no gradient at this update; measure at an earlier one")
    reference_norm = math.sqrt(float(mean_product(r_KK)))
    update_norm = _rms_norm(u_KK)
    along = float(mean_product(gr_KK))

    exact_square = float(mean_product(_products(gram, exact_update, exact_update)))
    update_along_exact = float(mean_product(_products(gram, update, exact_update)))
    update_cosine = math.nan
    if exact_square > 0:
        # Below 1e-12 the norm is noise, and the cosine would be as large as one likes.
        update_cosine = update_along_exact / (max(exact_square, 1e-12) ** 0.5 * update_norm)

    squared_error = _squared_distance(g_KK, gr_KK, r_KK) + _covariance(g_KK)
    return {
        **of_form,
        "kl_to_policy": beta * _rms_norm(g_KK) / policy_norm,
        "update_error": beta * math.sqrt(squared_error) / policy_norm,
        "update_cosine": update_cosine,
        "projection": beta * along / (reference_norm * policy_norm),
        "projection_after_clip": float(kl_projection(u_KK, p_KK, ur_KK, pr_KK, r_KK, scale=1.0, bound=clip)),
        "descent": float(mean_product(ur_KK)) / (reference_norm * update_norm),
    }


def _form_figures(g_KK: Tensor, gr_KK: Tensor, r_KK: Tensor) -> dict[str, float]:
    """The figures of a form by itself, against the reference: products ``<g, g>``, ``<g, r>`` and ``<r, r>``."""
    reference_square = float(mean_product(r_KK))
    if reference_square <= 0:
        raise UserError("predictor: noise hides the reference gradient; more blocks, or a later update")
    reference_norm = math.sqrt(reference_square)
    covariance = _covariance(g_KK)
    squared_distance = _squared_distance(g_KK, gr_KK, r_KK)
    mean_square = float(mean_product(g_KK))
    along = float(mean_product(gr_KK))  # <E g, R>
    cosine = 0.0
    if mean_square > 0:
        cosine = along / (reference_norm * math.sqrt(mean_square))
    return {
        "bias": math.sqrt(squared_distance) / reference_norm,
        "noise": math.sqrt(covariance) / reference_norm,
        "error": math.sqrt(squared_distance + covariance) / reference_norm,
        "strength": along / reference_square,
        "cosine": cosine,
        "sample_cosine": along / (reference_norm * _rms_norm(g_KK)),
    }


# Both are unbiased estimates of squares, which may come out below zero.
def _squared_distance(g_KK: Tensor, gr_KK: Tensor, r_KK: Tensor) -> float:
    """``|E g - R|^2``."""
    return max(float(mean_product(g_KK - gr_KK - gr_KK.T + r_KK)), 0.0)


def _covariance(g_KK: Tensor) -> float:
    """The trace of the covariance of one update's gradient."""
    return max(float(noise(g_KK)), 0.0)


def gradient_table(setting: Setting, measured: Mapping[int, Mapping[str, Any]]) -> pd.DataFrame:
    """One row per form, beta and update of a setting."""
    import pandas as pd

    # A config without a norm does not clip.
    clip = load_config(ROOT / setting.config, list(setting.overrides)).optimizer.clip_norm or math.inf
    rows: list[dict[str, Any]] = []
    for update, state in measured.items():
        for form, weights in _forms_of(setting, list(state["names"])).items():
            for beta in setting.betas:
                figures = gradient_figures(state["gram"], weights, beta, clip)
                facts = {"setting": setting.name, "form": form, "beta": beta, "update": update}
                rows.append({**facts, "exact_kl": state["exact_kl"], "ess": state["ess"], **figures})
    return pd.DataFrame(rows)


def _forms_of(setting: Setting, losses: Sequence[str]) -> dict[str, dict[int, float]]:
    """The measured forms as weights of losses, by number; on-policy also k1, and k3, in reward and loss together."""
    # The first two losses are no forms: the policy loss and the reference.
    forms = {name: {losses.index(name): 1.0} for name in losses[2:]}
    if setting.forms is ON_POLICY:
        k1_reward, k1_loss, k3_reward, k3_loss = [term.label() for term in COMMON]
        for in_reward, in_loss in ((k1_reward, k1_loss), (k3_reward, k3_loss)):
            forms[f"{in_reward} + {in_loss}"] = {**forms[in_reward], **forms[in_loss]}
    return forms


# --- outcomes -------------------------------------------------------------------------------------------------------
LAG_COMPLETIONS = 96
"""Completions per update in the settings with a lag, whose names do not say it."""

START = 0.40
"""Held-out reward of the warm start; a run whose held-out reward ends below half of it counts as collapsed."""


def outcomes(source: str, experiment: str | None = None) -> pd.DataFrame:
    """Finished runs of ``source`` in our settings: ``setting``, ``form``, ``beta``, ``seed``, ``reward``, ``kl``.

    ``source`` is the CSV of the first lag study, an MLflow store or an export. Runs with several betas, of adapters or
    of another algorithm are left out.
    """
    if source.endswith(".csv"):
        table = _first_lags(source)
    else:
        table = _store_runs(source, experiment)
    parsed = [_parse_label(label) for label in table.label]
    table = table.assign(form=[form for form, _ in parsed], beta=[beta for _, beta in parsed], source=Path(source).stem)
    known_settings = {setting.name for setting in settings()}
    has_one_beta = table.form != ""
    return table[table.setting.isin(known_settings) & has_one_beta].drop(columns="label")


def _first_lags(source: str) -> pd.DataFrame:
    """The CSV of the first lag study, which had one learning rate."""
    import pandas as pd

    runs = pd.read_csv(ROOT / source)
    return pd.DataFrame(
        {
            "setting": "lag " + runs.lag.astype(str) + ", rate 0.0002",
            "label": runs.kl,
            "seed": runs.seed,
            "reward": runs.heldout_reward,
            "kl": runs.heldout_exact_kl,
        }
    )


def _store_runs(source: str, experiment: str | None) -> pd.DataFrame:
    """The finished runs of an MLflow store or an export; an export's path is relative to the project."""
    import pandas as pd

    from kl_comedy.results.runs import runs_frame

    path = str(ROOT / source) if source.endswith(".parquet") else source
    runs = runs_frame(path, experiment)
    runs = runs[runs.status == "FINISHED"]
    return pd.DataFrame(
        {
            "setting": [_setting_of(run) for run in runs.to_dict("records")],
            "label": runs["tags.kl.label"],
            "seed": runs["params.seed"].astype(int),
            "reward": runs["metrics.eval/heldout/reward"],
            "kl": runs["metrics.eval/heldout/kl/exact_reverse_sequence"],
        }
    )


def _setting_of(run: Mapping[Any, Any]) -> str:
    """The name of the setting of a run of a store; empty for one that is none of ours."""
    updates_per_batch = str(run.get("params.algorithm.updates_per_batch", 1))
    # A parameter that a run does not have is NaN in the table of all runs, and "None" where it has no adapter.
    lora_rank = run.get("params.model.lora.rank")
    has_adapter = isinstance(lora_rank, str) and lora_rank.isdigit()
    if updates_per_batch != "1" or has_adapter:
        return ""

    size = int(run["params.rollout.prompts_per_batch"]) * int(run["params.rollout.group_size"])
    rate = float(run["params.optimizer.lr"])
    algorithm = (run["params.algorithm.advantage"], run["params.algorithm.policy_loss"])
    if algorithm == ("rloo", "reinforce"):
        return f"{size} completions, rate {rate:g}"
    if algorithm == ("dr_grpo", "aipo") and size == LAG_COMPLETIONS:
        return f"lag {run.get('params.lag.steps', '0')}, rate {rate:g}"
    return ""


def _parse_label(label: str) -> tuple[str, float]:
    """The form and the beta of a run's label; an empty form where its betas differ.

    >>> _parse_label("0.1 k1_reverse_token in loss + 0.1 k2_reverse_token in loss")
    ('k1_reverse_token in loss + k2_reverse_token in loss', 0.1)
    """
    if label == NO_KL:
        return NO_KL, 0.0
    pairs = [part.split(" ", 1) for part in label.split(" + ")]
    forms = [form for _, form in pairs]
    betas = {beta for beta, _ in pairs}
    if len(betas) > 1 or "scheduled" in betas:
        return "", 0.0
    (beta,) = betas
    return " + ".join(forms), float(beta)


def per_configuration(runs: pd.DataFrame) -> pd.DataFrame:
    """Means over seeds, per setting, form and beta: gain over no KL of the same source, collapses, log10 of the KL."""
    import numpy as np

    configuration = ["setting", "form", "beta"]
    keys = ["source", *configuration]
    # Below 1e-3 nats the logarithm would tell policies apart that are the same.
    log_kl = np.log10(runs.kl.clip(lower=1e-3))
    collapsed = (runs.reward < START / 2).astype(float)
    runs = runs.assign(collapsed=collapsed, log_kl=log_kl)
    means = runs.groupby(keys)[["reward", "collapsed", "log_kl"]].mean()
    means["seeds"] = runs.groupby(keys).seed.nunique()
    means = means.reset_index()

    # A run is compared with those of its own source: another source may be of another version of the trainer.
    no_kl = means[means.form == NO_KL].set_index(["source", "setting"])[["reward", "log_kl"]].add_suffix("_none")
    table = means[means.form != NO_KL].join(no_kl, on=["source", "setting"], how="inner")
    table["gain"] = table.reward - table.reward_none
    table["log_kl_change"] = table.log_kl - table.log_kl_none

    # The mean over sources, weighted by their seeds.
    values = ["gain", "collapsed", "log_kl_change", "reward", "log_kl", "reward_none"]
    weighted = table.assign(**{name: table[name] * table.seeds for name in values})
    sums = weighted.groupby(configuration)[[*values, "seeds"]].sum()
    return sums.assign(**{name: sums[name] / sums.seeds for name in values}).reset_index()


# --- what predicts what ---------------------------------------------------------------------------------------------
# g: the form's gradient, R: the expected reference gradient, p: the policy loss's, u = p + beta g (`gradient_figures`).
CANDIDATES = {
    "beta": "the coefficient alone",
    "ess": "effective share of the completions: the setting's, the same for every form",
    "certified bias": "relative bias, enumerated (`kl-comedy certify`)",
    "certified noise": "root of the enumerated variance over an update's completions",
    "certified error": "root of squared bias and variance over completions, both enumerated",
    "certified strength": "enumerated strength",
    "certified cosine": "enumerated cosine",
    "bias": "abs(E g - R) / abs(R)",
    "noise": "root of the trace of an update's covariance, over abs(R)",
    "error": "root of the expected squared error of an update's g, over abs(R)",
    "strength": "<E g, R> / abs(R)^2",
    "cosine": "of E g and R",
    "sample_cosine": "of one update's g and R: <E g, R> / (abs(R) rms abs(g))",
    "kl_to_policy": "beta rms abs(g) / rms abs(p)",
    "update_error": "beta rms abs(g - R) / rms abs(p)",
    "update_cosine": "of one update p + beta g and E p + beta R",
    "projection": "beta <E g, R> / (abs(R) rms abs(p)): what the term adds along R",
    "projection_after_clip": "the same of updates after gradient clipping (`audit/kl_projection`)",
    "descent": "<E u, R> / (abs(R) rms abs(u)): share of an update that lowers the KL",
}
OUTCOMES = {"gain": "reward gained over no KL", "log_kl_change": "log10 of KL at the end over that without KL"}


def with_certificates(table: pd.DataFrame, forms: Mapping[str, tuple[KLTerm, ...]]) -> pd.DataFrame:
    """``table`` with the enumerated figures of each form in its regime, at the number of completions of an update."""
    import pandas as pd

    from kl_comedy.kl.oracle.certificate import Certificate, certify

    rows: list[dict[str, float]] = []
    certificates: dict[tuple[str, str], Certificate] = {}
    for setting, form in zip(table.setting, table.form, strict=True):
        regime, completions = _regime_and_size(setting)
        if (form, regime) not in certificates:
            (certificates[form, regime],) = certify(form, forms[form], regimes=(regime,))
        certificate = certificates[form, regime]

        bias = certificate.relative_bias["sequence_reverse"]
        cosine = certificate.cosine["sequence_reverse"]
        variance = certificate.variance / completions
        rows.append(
            {
                "certified bias": bias,
                "certified noise": math.sqrt(variance),
                "certified error": math.sqrt(bias**2 + variance),
                "certified strength": certificate.strength,
                # A gradient of zero has no direction, and points nowhere near the reference's.
                "certified cosine": 0.0 if math.isnan(cosine) else cosine,
            }
        )
    # Rounded, because values that are 0 up to rounding must share one rank.
    return table.join(pd.DataFrame(rows, index=table.index).round(9))


def _regime_and_size(setting: str) -> tuple[str, int]:
    """The regime of a setting and the completions per update, from its name (:func:`settings`)."""
    if "completions" in setting:
        return "on_policy", int(setting.split()[0])
    if setting.startswith("lag 0"):
        return "on_policy", LAG_COMPLETIONS
    return "off_policy", LAG_COMPLETIONS


def rank_correlation(x: Any, y: Any) -> float:
    """Spearman's; NaN where either is constant."""
    import numpy as np
    from scipy.stats import rankdata

    x_ranks = rankdata(x)
    y_ranks = rankdata(y)
    if np.std(x_ranks) == 0 or np.std(y_ranks) == 0:
        return math.nan
    return float(np.corrcoef(x_ranks, y_ranks)[0, 1])


def explained(table: pd.DataFrame, columns: Sequence[str], outcome: str, *, leave_out: str | None) -> float:
    """Share of the variance of ``outcome`` that a linear fit in the ranks of ``columns`` explains.

    ``leave_out``: a column; each of its values is predicted by a fit to the rows of the others, and the share is below
    0 where that is worse than their mean. None: one fit, to all rows. NaN where the column has a single value.
    """
    import numpy as np
    from scipy.stats import rankdata

    y = table[outcome].to_numpy(float)
    ranks = [rankdata(table[name]) / len(y) for name in columns]
    # Ranks, because the candidates span decades and some are 0 or negative.
    x = np.column_stack([np.ones(len(y)), *ranks])
    everything = np.ones(len(y), bool)
    if leave_out is None:
        splits = [(everything, everything)]
    else:
        labels = table[leave_out].to_numpy()
        splits = [(labels == label, labels != label) for label in np.unique(labels)]

    residual = 0.0
    total = 0.0
    for predicted, fitted in splits:
        if not fitted.any():
            return math.nan
        weights, *_ = np.linalg.lstsq(x[fitted], y[fitted], rcond=None)
        residual += float(((y[predicted] - x[predicted] @ weights) ** 2).sum())
        total += float(((y[predicted] - y[fitted].mean()) ** 2).sum())
    return 1.0 - residual / total


def separation(score: Any, happened: Any) -> float:
    """Area under the ROC curve: how often a configuration that collapses has a higher score than one that does not.

    NaN where all or none collapse.
    """
    from scipy.stats import rankdata

    positive = happened > 0.5
    ranks = rankdata(score)
    positives = int(positive.sum())
    negatives = int((~positive).sum())
    if positives == 0 or negatives == 0:
        return math.nan
    # Mann-Whitney: the sum of ranks, less what it is if every positive is below every negative.
    pairs_in_order = ranks[positive].sum() - positives * (positives + 1) / 2
    return float(pairs_in_order / (positives * negatives))


def bootstrap(table: pd.DataFrame, name: str, outcome: str, draws: int = 300) -> tuple[float, float]:
    """95% interval of the rank correlation, forms drawn with replacement, each with all of its configurations.

    Forms and not configurations: those of one form are no independent evidence.
    """
    import numpy as np

    generator = np.random.default_rng(0)
    groups = [group.index.to_numpy() for _, group in table.groupby("form")]
    values = []
    for _ in range(draws):
        drawn = generator.integers(len(groups), size=len(groups))
        index = np.concatenate([groups[number] for number in drawn])
        values.append(rank_correlation(table[name].loc[index], table[outcome].loc[index]))
    # NaN: a draw in which the candidate is constant.
    low, high = np.nanquantile(values, (0.025, 0.975))
    return float(low), float(high)


def within_settings(table: pd.DataFrame, name: str, outcome: str) -> float:
    """Mean over settings of the rank correlation within one, weighted by its configurations less one."""
    weighted = 0.0
    weights = 0
    for _, configurations in table.groupby("setting"):
        # Two points always have a correlation of 1 or -1.
        if len(configurations) <= 2:
            continue
        correlation = rank_correlation(configurations[name], configurations[outcome])
        if math.isfinite(correlation):
            weight = len(configurations) - 1
            weighted += correlation * weight
            weights += weight
    return weighted / weights if weights else math.nan


def merged(gradients: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """One row per configuration that was both trained and measured: outcomes, and figures as means over updates."""
    keys = ["setting", "form", "beta"]
    figures = [name for name in CANDIDATES if name in gradients and name not in keys]
    measured = gradients.groupby(keys)[[*figures, "exact_kl"]].mean()
    table = per_configuration(runs).join(measured, on=keys, how="inner").reset_index(drop=True)

    terms_of_form: dict[str, tuple[KLTerm, ...]] = {}
    for setting in settings():
        for term in setting.forms:
            terms_of_form[term.label()] = (term,)
    # Forms of two terms are trained together, and certified together.
    for name in table.form:
        if " + " in name:
            terms_of_form[name] = tuple(terms_of_form[part][0] for part in name.split(" + "))
    return with_certificates(table, terms_of_form)


def scores(table: pd.DataFrame) -> pd.DataFrame:
    """One row per candidate: how it ranks and explains both outcomes, and separates what collapsed."""
    import pandas as pd

    rows = []
    for name in CANDIDATES:
        row: dict[str, Any] = {"candidate": name}
        for outcome in OUTCOMES:
            low, high = bootstrap(table, name, outcome)
            row |= {
                f"{outcome}_rank": rank_correlation(table[name], table[outcome]),
                f"{outcome}_low": low,
                f"{outcome}_high": high,
                f"{outcome}_within": within_settings(table, name, outcome),
                f"{outcome}_fit": explained(table, [name], outcome, leave_out=None),
                f"{outcome}_new_form": explained(table, [name], outcome, leave_out="form"),
                f"{outcome}_new_setting": explained(table, [name], outcome, leave_out="setting"),
            }
        row["collapse_auc"] = separation(table[name], table.collapsed)
        rows.append(row)
    return pd.DataFrame(rows)


SUBSETS = {
    "all": "",
    "stale samples": "lag [1-9]",
    "on-policy": "lag 0|completions",
    "settings not used for choosing": r"^(?!64 |lag 10, rate 0\.0002)",
}
"""The projection after clipping was put forward on 64 completions and lag 10; the last rows are those not seen then."""
TOGETHER = {
    "certified bias, noise, strength, cosine": [
        "certified bias",
        "certified noise",
        "certified strength",
        "certified cosine",
    ],
    "measured bias, noise, strength, cosine": ["bias", "noise", "strength", "cosine"],
}
DRAWN = ("certified bias", "error", "update_error", "projection_after_clip")


SIGNED = ("projection", "projection_after_clip", "descent", "strength")
"""Candidates that can be negative, and still span decades."""


def _scale(name: str) -> str:
    """The scale of a candidate's axis."""
    if name in SIGNED:
        return "symlog"
    return "linear" if name.startswith("certified") else "log"


def _axis_label(name: str) -> str:
    words = name.replace("_", " ")
    if _scale(name) == "linear":
        return words
    return f"{words}\n(log axis)"


def draw(table: pd.DataFrame, path: Path) -> None:
    """Outcomes against candidates, a point per configuration, coloured by form."""
    looks = looks_of_families(table.form)
    names = {form: in_words(form) for form in dict.fromkeys(table.form)}
    least = table.seeds.min()
    most = table.seeds.max()
    with figure(path, len(OUTCOMES), len(DRAWN), 2.2, sharey="row", sharex="col") as (drawing, panels):
        for row, (outcome, label) in zip(panels, OUTCOMES.items(), strict=True):
            for axes, name in zip(row, DRAWN, strict=True):
                for form, name_of_form in names.items():
                    configurations = table[table.form == form]
                    style = looks[form].of_mark() | {"markersize": 4}
                    axes.plot(configurations[name], configurations[outcome], label=name_of_form, **style)
                axes.set(xscale=_scale(name))
                axes.axhline(0, color="black", linewidth=0.5)
            row[0].set_ylabel(textwrap.fill(label, 26))
        for axes, name in zip(panels[-1], DRAWN, strict=True):
            axes.set_xlabel(_axis_label(name))
        legend_below(drawing, f"KL form; a mark is the mean of {least} to {most} seeds")


def report(gradients: pd.DataFrame, runs: pd.DataFrame, out: Path, *, command: str) -> None:
    """Write configurations.csv, scores.csv, the figure, and the generated block of README.md."""
    import pandas as pd

    save_csv(merged(gradients, runs), out / "configurations.csv")
    # Read back, because values that are equal in the six digits of the file must share one rank.
    table = pd.read_csv(out / "configurations.csv")
    scores_of_subset = [scores(part).assign(subset=name) for name, part in _subsets(table).items()]
    scored = pd.concat(scores_of_subset)
    save_csv(scored, out / "scores.csv")
    draw(table, out / "predictor.svg")
    update_page(out / "README.md", "tables", tables(table, scored, command=command))


def _subsets(table: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """The rows of each subset that has enough configurations for a correlation to mean anything."""
    parts = {}
    for name, pattern in SUBSETS.items():
        part = table[table.setting.str.contains(pattern)]
        if len(part) > 5:
            parts[name] = part
    return parts


def tables(table: pd.DataFrame, scored: pd.DataFrame, *, command: str) -> str:
    """The generated block of the page, from configurations.csv and scores.csv."""
    text = ["<!-- python research/scripts/stored_tables.py predictor -->", f"Regenerated by `{command}`."]
    for name, part in _subsets(table).items():
        collapsed = int((part.collapsed > 0.5).sum())
        text += [
            f"### {name[0].upper()}{name[1:]}: {len(part)} configurations of {part.form.nunique()} forms, "
            f"{part.seeds.sum()} runs, {collapsed} configurations collapsed in most seeds",
            markdown(_score_table(scored[scored.subset == name])),
            markdown(_joint_fits(part)),
        ]
    return "\n\n".join(text)


def _score_table(scored: pd.DataFrame) -> pd.DataFrame:
    """The scores of one subset as texts."""
    import pandas as pd

    rows = []
    for score in scored.to_dict("records"):
        cells = {"candidate": score["candidate"]}
        for outcome, title in (("gain", "gain"), ("log_kl_change", "KL")):
            fit = f"{score[f'{outcome}_fit']:.0%}"
            new_form = f"{score[f'{outcome}_new_form']:.0%}"
            cells[f"{title}: rank correlation"] = _correlation_cell(score, outcome)
            cells[f"within settings ({title})"] = _or_dash(score[f"{outcome}_within"])
            cells[f"explained, of a new form ({title})"] = f"{fit}, {new_form}"
        cells["collapse: AUC"] = f"{score['collapse_auc']:.2f}"
        rows.append(cells)
    return pd.DataFrame(rows)


def _correlation_cell(score: Mapping[Any, Any], outcome: str) -> str:
    value = score[f"{outcome}_rank"]
    # A candidate that is constant in the subset has no rank.
    if math.isnan(value):
        return "–"
    return f"{value:.2f} [{score[f'{outcome}_low']:.2f}, {score[f'{outcome}_high']:.2f}]"


def _or_dash(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.2f}"


def _joint_fits(table: pd.DataFrame) -> pd.DataFrame:
    """What several candidates together explain."""
    import pandas as pd

    rows = []
    for name, columns in TOGETHER.items():
        row = {"fit of": name}
        for outcome, label in OUTCOMES.items():
            shares = [explained(table, columns, outcome, leave_out=column) for column in (None, "form", "setting")]
            row[f"{label}: explained, of a new form, of a new setting"] = ", ".join(f"{share:.0%}" for share in shares)
        rows.append(row)
    return pd.DataFrame(rows)
