"""Does a number of a KL gradient predict training? Gradients at a common policy, against outcomes of finished runs.

    train without KL -> completions of a policy as old as the lag -> gradients of all forms, by blocks of an update
    finished runs    -> mean over seeds of the reward gained over no KL, collapses, KL at the end
    both             -> rank correlations and one-variable fits over configurations, whole forms left out

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

from kl_comedy.config import load_config
from kl_comedy.errors import UserError
from kl_comedy.kl import KLTerm
from kl_comedy.lab.audit.gradients import (
    AuditedTerm,
    GradientSketch,
    block_gradients,
    layer_groups,
    reference_term,
)
from kl_comedy.lab.audit.grams import kl_projection, mean_product, noise
from kl_comedy.lab.audit.measure import equal_blocks
from kl_comedy.lab.audit.run import draw_completions
from kl_comedy.registry import RECIPES
from kl_comedy.tracking.figures import legend_below, look
from kl_comedy.tracking.runs import NO_KL
from kl_comedy.training.build import is_off_policy
from kl_comedy.training.experience_module import ExperienceModule
from kl_comedy.training.metrics import MetricAccumulator
from kl_comedy.training.module import PolicyModule
from kl_comedy.training.run import make_trainer
from research.studies.pages import figure, markdown, save_csv, update_page

if TYPE_CHECKING:
    import pandas as pd

UPDATES = (15, 30)
"""Updates after which gradients are measured; figures are geometric means over them."""

BLOCKS = 16
SKETCH = 65536


def _term(recipe: str) -> KLTerm:
    """The one term of a recipe, at beta 1."""
    (term,) = RECIPES.get(recipe).fn()
    return dataclasses.replace(term, beta=1.0)


COMMON = tuple(_term(f"comedy/{name}") for name in ("k1_in_reward", "k1_in_loss", "k3_in_reward", "k3_in_loss"))
ON_POLICY = (
    *COMMON,
    _term("openrlhf/default"),
    _term("liu/k2_loss"),
    _term("rb/full"),
    _term("rb/token"),
    KLTerm("k2", placement="loss", level="sequence"),
)
RATIOS = ("deepseek_v3_2", "is/k3_per_decision", "is/per_decision", "is/sequence", "rb/per_decision", "rb/robust")
EXACT_WITHOUT_RATIO = (_term("rb/full"), _term("rb/token"), KLTerm("exact", placement="reward", baseline="own"))
PARTS = (
    KLTerm("k1", placement="reward", baseline="before"),
    *(KLTerm("k1", placement="reward", credit="total", correction=name) for name in ("none", "token", "prefix")),
    KLTerm("k1", placement="reward", correction="token"),
)
"""k1 in reward of the block ``lags_parts``, less those that are recipes."""
STALE = (*COMMON, _term("openrlhf/default"), *(_term(name) for name in RATIOS), *EXACT_WITHOUT_RATIO, *PARTS)


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
    on_policy = [
        Setting(
            name=f"{size} completions, rate {rate:g}",
            config=config,
            overrides=(f"optimizer.lr={rate}",),
            forms=ON_POLICY,
            betas=betas,
        )
        for size, config, rates, betas in (
            (64, "configs/study/base/pocket.yaml", (1e-4, 4e-4), (0.05, 0.1, 0.3, 1.0)),
            (192, "configs/evidence/base.yaml", (1e-4, 3e-4), (0.03, 0.1, 0.3)),
        )
        for rate in rates
    ]
    lags = [
        Setting(
            name=f"lag {lag}, rate {rate:g}",
            config="configs/offpolicy/pocket.yaml",
            overrides=(
                "kl=none",
                "rollout.prompts_per_batch=12",
                "train.microbatch_tokens=32768",
                "train.threads=1",
                f"lag.mode={'replayed' if lag else 'on_policy'}",
                f"lag.steps={lag}",
                f"optimizer.lr={rate}",
            ),
            forms=STALE,
            betas=(0.05, 0.1, 0.2) if (lag, rate) == (10, 2e-4) else (0.05,),
        )
        for lag in (0, 1, 4, 10)
        for rate in (5e-5, 1e-4, 2e-4)
    ]
    return on_policy + lags


# --- gradients ------------------------------------------------------------------------------------------------------
POLICY, REFERENCE = "policy", "reference"


class MeasureGradients(Callback):
    """At each of ``updates``: inner products of all gradients, on completions drawn ``lag`` updates before."""

    def __init__(self, forms: Sequence[KLTerm], updates: Sequence[int], lag: int, blocks: int) -> None:
        self._forms, self._updates, self._lag, self._blocks = forms, updates, lag, blocks
        self._rows: dict[int, Any] = {}
        self.grams: dict[int, Tensor] = {}
        self.values: dict[int, dict[str, float]] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        version, config = pl_module.version, pl_module.config
        size = config.rollout.prompts_per_batch * config.rollout.group_size
        if version + self._lag in self._updates:
            self._rows[version + self._lag] = draw_completions(trainer.datamodule, self._blocks * size)
        if version in self._rows:
            self._measure(pl_module, version, self._rows.pop(version))
        if version >= max(self._updates):
            trainer.should_stop = True

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
        self.on_train_start(trainer, pl_module)

    def _measure(self, module: PolicyModule, version: int, rows: Any) -> None:
        on_policy, group_size = not is_off_policy(module.config), module.config.rollout.group_size
        reference = reference_term("initial", on_policy=on_policy, group_size=group_size)
        losses = [AuditedTerm(key=POLICY, term=None), AuditedTerm(key=REFERENCE, term=reference)]
        losses += [AuditedTerm(key=term.label(), term=term) for term in self._forms]
        sketch, metrics = GradientSketch(layer_groups(module.policy), SKETCH), MetricAccumulator()
        gradients = []
        # each block as one update of the run: the norm is that which is clipped
        for block in equal_blocks(rows, self._blocks):
            of_layers, weight = block_gradients(module, block, losses, sketch, metrics)
            gradients.append(torch.cat(of_layers, -1).double() * weight)
        stacked = torch.stack(gradients)
        self.grams[version] = torch.einsum("jcw,kdw->cdjk", stacked, stacked)
        values = metrics.values()
        self.values[version] = {"exact_kl": values["exact_kl_sequence"], "ess": _ess(module, rows)}


@torch.no_grad()
def _ess(module: PolicyModule, rows: Any) -> float:
    """Effective share of the completions under the ratio of whole completions (Kish)."""
    from kl_comedy.training.packing import model_inputs

    ratios = []
    for packed in module.plan.packer.micro_batches(rows):
        logp_BT = module.policy_pass(model_inputs(packed), None, ()).logp_BT
        gap_BT = torch.where(packed.mask_BT, logp_BT - packed.behaviour_logp_BT, 0.0)
        ratios.append(gap_BT.double().sum(-1).exp())
    weight_B = torch.cat(ratios)
    return float(weight_B.sum() ** 2 / (len(weight_B) * weight_B.square().sum()))


def measure(setting: Setting, *, updates: Sequence[int] = UPDATES, blocks: int = BLOCKS) -> dict[int, dict[str, Any]]:
    """Train without KL; per update the names of the losses, their inner products ``[C, C, K, K]``, and values."""
    overrides = [
        *setting.overrides,
        f"train.steps={max(updates)}",
        "train.eval_every=0",
        "eval.at_start=false",
        "train.checkpoint_every=0",
    ]
    config = load_config(ROOT / setting.config, overrides)
    module, data = PolicyModule(config), ExperienceModule(config)
    probe = MeasureGradients(setting.forms, updates, config.lag.steps, blocks)
    try:
        make_trainer(config, [probe]).fit(module, datamodule=data)
    finally:
        data.close()
    names = [POLICY, REFERENCE, *(term.label() for term in setting.forms)]
    return {n: {"names": names, "gram": probe.grams[n], **probe.values[n]} for n in updates}


def _joined(gram: Tensor, left: Mapping[int, float], right: Mapping[int, float]) -> Tensor:
    """``[K, K]``: products of two weighted sums of losses: the left in block j, the right in block k."""
    total = torch.zeros(gram.shape[-2:], dtype=torch.float64)
    for i, a in left.items():
        for j, b in right.items():
            total += a * b * gram[i, j]
    return total


def gradient_figures(gram: Tensor, form: Mapping[int, float], beta: float, clip: float) -> dict[str, float]:
    """Figures of ``g``, the sum of the losses of ``form``, and of the update ``u = p + beta g``, from ``[C, C, K, K]``.

    ``p``: policy loss (loss 0); ``r``: reference gradient of the KL (loss 1), ``R`` its expectation. Each block has the
    size of an update, so a block's noise is an update's. ``clip``: largest norm of an update's gradient.
    """
    policy, reference, update = {0: 1.0}, {1: 1.0}, {0: 1.0} | {n: beta * weight for n, weight in form.items()}
    exact = {0: 1.0, 1: beta}
    g_KK, with_KK, r_KK = (_joined(gram, *pair) for pair in ((form, form), (form, reference), (reference, reference)))
    square = float(mean_product(r_KK))
    if square <= 0:
        raise UserError("predictor: noise hides the reference gradient; more blocks, or a later update")
    size = math.sqrt(square)
    mean_square, along = float(mean_product(g_KK)), float(mean_product(with_KK))
    spread = max(float(noise(g_KK)), 0.0)
    difference = float(mean_product(g_KK - with_KK - with_KK.T + r_KK))
    p_KK, u_KK = (_joined(gram, each, each) for each in (policy, update))
    policy_size, update_size = (float(each.diagonal().mean()) ** 0.5 for each in (p_KK, u_KK))
    if policy_size == 0:
        raise UserError("predictor: the policy loss has no gradient at this update; measure at an earlier one")
    exact_square = float(mean_product(_joined(gram, exact, exact)))
    update_along_exact = float(mean_product(_joined(gram, update, exact)))

    grams = (u_KK, p_KK, _joined(gram, update, reference), _joined(gram, policy, reference), r_KK)
    return {
        "bias": math.sqrt(max(difference, 0.0)) / size,
        "noise": math.sqrt(spread) / size,
        "error": math.sqrt(max(difference, 0.0) + spread) / size,
        "strength": along / square,
        "cosine": along / (size * math.sqrt(mean_square)) if mean_square > 0 else 0.0,
        "sample_cosine": along / (size * float(g_KK.diagonal().mean()) ** 0.5),
        "kl_to_policy": beta * float(g_KK.diagonal().mean()) ** 0.5 / policy_size,
        "update_error": beta * math.sqrt(max(difference, 0.0) + spread) / policy_size,
        "update_cosine": update_along_exact / (max(exact_square, 1e-12) ** 0.5 * update_size)
        if exact_square > 0
        else math.nan,
        "projection": beta * along / (size * policy_size),
        "projection_after_clip": float(kl_projection(*grams, scale=1.0, bound=clip)),
        "descent": float(mean_product(_joined(gram, update, reference))) / (size * update_size),
    }


def gradient_table(setting: Setting, measured: Mapping[int, Mapping[str, Any]]) -> pd.DataFrame:
    """One row per form, beta and update of a setting."""
    import pandas as pd

    clip = load_config(ROOT / setting.config, list(setting.overrides)).optimizer.clip_norm or math.inf
    rows: list[dict[str, Any]] = []
    for update, state in measured.items():
        names = list(state["names"])
        forms = {name: {names.index(name): 1.0} for name in names[2:]}
        labels = [term.label() for term in COMMON]
        if setting.forms is ON_POLICY:
            forms |= {f"{a} + {b}": {**forms[a], **forms[b]} for a, b in (labels[:2], labels[2:])}
        for form, weights in forms.items():
            for beta in setting.betas:
                figures = gradient_figures(state["gram"], weights, beta, clip)
                facts = {"setting": setting.name, "form": form, "beta": beta, "update": update}
                rows.append({**facts, "exact_kl": state["exact_kl"], "ess": state["ess"], **figures})
    return pd.DataFrame(rows)


# --- outcomes -------------------------------------------------------------------------------------------------------
START = 0.40
"""Held-out reward of the warm start; a run whose held-out reward ends below half of it counts as collapsed."""


def outcomes(source: str, experiment: str | None = None) -> pd.DataFrame:
    """Finished runs of ``source`` in our settings: ``setting``, ``form``, ``beta``, ``seed``, ``reward``, ``kl``.

    ``source`` is the CSV of the first lag study, an MLflow store or an export. Runs with several betas, of adapters or
    of another algorithm are left out.
    """
    import pandas as pd

    if source.endswith(".csv"):
        runs = pd.read_csv(ROOT / source)
        setting = "lag " + runs.lag.astype(str) + ", rate 0.0002"
        frame = {"setting": setting, "label": runs.kl, "seed": runs.seed}
        table = pd.DataFrame({**frame, "reward": runs.heldout_reward, "kl": runs.heldout_exact_kl})
    else:
        from kl_comedy.tracking.runs import runs_frame

        path = str(ROOT / source) if source.endswith(".parquet") else source
        runs = runs_frame(path, experiment)
        runs = runs[runs.status == "FINISHED"]
        table = pd.DataFrame(
            {
                "setting": [_setting_of(run) for run in runs.to_dict("records")],
                "label": runs["tags.kl.label"],
                "seed": runs["params.seed"].astype(int),
                "reward": runs["metrics.eval/heldout/reward"],
                "kl": runs["metrics.eval/heldout/kl/exact_reverse_sequence"],
            }
        )
    parts = [_parse_label(label) for label in table.label]
    table = table.assign(form=[form for form, _ in parts], beta=[beta for _, beta in parts], source=Path(source).stem)
    names = {setting.name for setting in settings()}
    return table[table.setting.isin(names) & (table.form != "")].drop(columns="label")


def _setting_of(run: Mapping[str, Any]) -> str:
    """The name of the setting of a run of a store; empty for one that is none of ours."""
    size = int(run["params.rollout.prompts_per_batch"]) * int(run["params.rollout.group_size"])
    rate, algorithm = float(run["params.optimizer.lr"]), "params.algorithm"
    lora = run.get("params.model.lora.rank")
    if str(run.get(f"{algorithm}.updates_per_batch", 1)) != "1" or (isinstance(lora, str) and lora.isdigit()):
        return ""
    kind = run[f"{algorithm}.advantage"], run[f"{algorithm}.policy_loss"]
    if kind == ("rloo", "reinforce"):
        return f"{size} completions, rate {rate:g}"
    lag = run.get("params.lag.steps", "0")
    return f"lag {lag}, rate {rate:g}" if kind == ("dr_grpo", "aipo") and size == 96 else ""


def _parse_label(label: str) -> tuple[str, float]:
    """The form and the beta of a run's label; an empty form where its betas differ.

    >>> _parse_label("0.1 k1_reverse_token in loss + 0.1 k2_reverse_token in loss")
    ('k1_reverse_token in loss + k2_reverse_token in loss', 0.1)
    """
    if label == NO_KL:
        return NO_KL, 0.0
    pairs = [part.split(" ", 1) for part in label.split(" + ")]
    betas = {beta for beta, _ in pairs}
    if len(betas) > 1 or "scheduled" in betas:
        return "", 0.0
    return " + ".join(form for _, form in pairs), float(betas.pop())


def per_configuration(runs: pd.DataFrame) -> pd.DataFrame:
    """Means over seeds, per setting, form and beta: gain over no KL of the same source, collapses, log10 of the KL."""
    import numpy as np

    keys = ["source", "setting", "form", "beta"]
    runs = runs.assign(collapsed=(runs.reward < START / 2).astype(float), log_kl=np.log10(runs.kl.clip(lower=1e-3)))
    means = runs.groupby(keys)[["reward", "collapsed", "log_kl"]].mean()
    means["seeds"] = runs.groupby(keys).seed.nunique()
    means = means.reset_index()
    none = means[means.form == NO_KL].set_index(["source", "setting"])[["reward", "log_kl"]].add_suffix("_none")
    table = means[means.form != NO_KL].join(none, on=["source", "setting"], how="inner")
    table["gain"] = table.reward - table.reward_none
    table["log_kl_change"] = table.log_kl - table.log_kl_none
    values = ["gain", "collapsed", "log_kl_change", "reward", "log_kl", "reward_none"]
    weighted = table.assign(**{name: table[name] * table.seeds for name in values})
    sums = weighted.groupby(keys[1:])[[*values, "seeds"]].sum()
    return sums.assign(**{name: sums[name] / sums.seeds for name in values}).reset_index()


# --- what predicts what ---------------------------------------------------------------------------------------------
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
    """``table`` with the enumerated figures of each form in its regime; ``completions`` an update has."""
    from kl_comedy.kl.oracle.certificate import certify

    rows: list[dict[str, float]] = []
    known: dict[tuple[str, str], Any] = {}
    for setting, form in zip(table.setting, table.form, strict=True):
        regime = "on_policy" if "completions" in setting or setting.startswith("lag 0") else "off_policy"
        if (form, regime) not in known:
            (known[form, regime],) = certify(form, forms[form], regimes=(regime,))
        certificate = known[form, regime]
        size = int(setting.split()[0]) if "completions" in setting else 96
        bias = certificate.relative_bias["sequence_reverse"]
        cosine = certificate.cosine["sequence_reverse"]
        rows.append(
            {
                "certified bias": bias,
                "certified noise": math.sqrt(certificate.variance / size),
                "certified error": math.sqrt(bias**2 + certificate.variance / size),
                "certified strength": certificate.strength,
                "certified cosine": 0.0 if math.isnan(cosine) else cosine,
            }
        )
    import pandas as pd

    return table.join(pd.DataFrame(rows, index=table.index).round(9))  # what is 0 up to rounding has one rank


def rank_correlation(x: Any, y: Any) -> float:
    """Spearman's; NaN where either is constant."""
    import numpy as np
    from scipy.stats import rankdata

    ranks = rankdata(x), rankdata(y)
    return float(np.corrcoef(*ranks)[0, 1]) if min(np.std(each) for each in ranks) > 0 else math.nan


def explained(table: pd.DataFrame, columns: Sequence[str], outcome: str, *, leave_out: str | None) -> float:
    """Share of the variance of ``outcome`` that a linear fit in the ranks of ``columns`` explains.

    ``leave_out``: every value of that column is predicted by a fit to the others; below 0, worse than their mean.
    """
    import numpy as np
    from scipy.stats import rankdata

    y = table[outcome].to_numpy(float)
    x = np.column_stack([np.ones(len(y)), *(rankdata(table[name]) / len(y) for name in columns)])
    parts = table[leave_out].to_numpy() if leave_out else np.zeros(len(y))
    residual, total = 0.0, 0.0
    for part in np.unique(parts):
        inside = parts == part if leave_out else np.ones(len(y), bool)
        rest = ~inside if leave_out else inside
        weights, *_ = np.linalg.lstsq(x[rest], y[rest], rcond=None)
        if not rest.any():
            return math.nan
        residual += float(((y[inside] - x[inside] @ weights) ** 2).sum())
        total += float(((y[inside] - y[rest].mean()) ** 2).sum())
    return 1.0 - residual / total


def separation(score: Any, happened: Any) -> float:
    """Area under the ROC curve: how often a configuration that collapses has a higher score than one that does not."""
    from scipy.stats import rankdata

    positive, ranks = happened > 0.5, rankdata(score)
    n, m = int(positive.sum()), int((~positive).sum())
    return float((ranks[positive].sum() - n * (n + 1) / 2) / (n * m)) if n and m else math.nan


def bootstrap(table: pd.DataFrame, name: str, outcome: str, draws: int = 300) -> tuple[float, float]:
    """95% interval of the rank correlation, forms drawn with replacement, each with all of its configurations."""
    import numpy as np

    generator = np.random.default_rng(0)
    groups = [group.index.to_numpy() for _, group in table.groupby("form")]
    values = []
    for _ in range(draws):
        index = np.concatenate([groups[n] for n in generator.integers(len(groups), size=len(groups))])
        values.append(rank_correlation(table[name].loc[index], table[outcome].loc[index]))
    low, high = np.nanquantile(values, (0.025, 0.975))
    return float(low), float(high)


def within_settings(table: pd.DataFrame, name: str, outcome: str) -> float:
    """Mean over settings of the rank correlation within one, weighted by its configurations less one."""
    values = [
        (rank_correlation(here[name], here[outcome]), len(here) - 1)
        for _, here in table.groupby("setting")
        if len(here) > 2
    ]
    known = [(value, weight) for value, weight in values if math.isfinite(value)]
    total = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / total if total else math.nan


def merged(gradients: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """One row per configuration that was both trained and measured: outcomes, and figures as means over updates."""
    keys = ["setting", "form", "beta"]
    measured = gradients.groupby(keys)[
        [*(name for name in CANDIDATES if name in gradients and name not in keys), "exact_kl"]
    ].mean()
    table = per_configuration(runs).join(measured, on=keys, how="inner").reset_index(drop=True)
    forms = {term.label(): (term,) for setting in settings() for term in setting.forms}
    forms |= {name: tuple(forms[part][0] for part in name.split(" + ")) for name in table.form if " + " in name}
    return with_certificates(table, forms)


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


def draw(table: pd.DataFrame, path: Path) -> None:
    """Outcomes against candidates, a point per configuration, coloured by form."""
    forms = list(dict.fromkeys(table.form))
    with figure(path, len(OUTCOMES), len(DRAWN), 2.2, sharey="row", sharex="col") as (drawing, panels):
        for line, (outcome, words) in zip(panels, OUTCOMES.items(), strict=True):
            for axes, name in zip(line, DRAWN, strict=True):
                for at, form in enumerate(forms):
                    here = table[table.form == form]
                    style = {key: value for key, value in look(at).items() if key != "linestyle"}
                    axes.plot(here[name], here[outcome], label=form, linestyle="none", markersize=3, **style)
                signed = name in ("projection", "projection_after_clip", "descent", "strength")
                axes.set(xscale="symlog" if signed else "linear" if name.startswith("certified") else "log")
                axes.axhline(0, color="0.6", linewidth=0.5)
            line[0].set_ylabel(textwrap.fill(words, 26))
        for axes, name in zip(panels[-1], DRAWN, strict=True):
            axes.set_xlabel(name.replace("_", " "))
        legend_below(drawing, "form")


def report(gradients: pd.DataFrame, runs: pd.DataFrame, out: Path, *, command: str) -> None:
    """configurations.csv, scores.csv, the figure, and the generated block of README.md."""
    import pandas as pd

    save_csv(merged(gradients, runs), out / "configurations.csv")
    table = pd.read_csv(out / "configurations.csv")  # what is equal in six digits has one rank
    parts = {name: table[table.setting.str.contains(pattern)] for name, pattern in SUBSETS.items()}
    scored = pd.concat([scores(part).assign(subset=name) for name, part in parts.items() if len(part) > 5])
    save_csv(scored, out / "scores.csv")
    draw(table, out / "predictor.svg")
    update_page(out / "README.md", "tables", tables(table, scored, command=command))


def tables(table: pd.DataFrame, scored: pd.DataFrame, *, command: str) -> str:
    """The generated block of the page, of configurations.csv and scores.csv."""
    text = ["<!-- python research/scripts/stored_tables.py predictor -->", f"Regenerated by `{command}`."]
    for name, pattern in SUBSETS.items():
        part = table[table.setting.str.contains(pattern)]
        if len(part) <= 5:
            continue
        here = scored[scored.subset == name]
        collapsed = int((part.collapsed > 0.5).sum())
        text += [
            f"### {name[0].upper()}{name[1:]}: {len(part)} configurations of {part.form.nunique()} forms, "
            f"{part.seeds.sum()} runs, {collapsed} configurations collapsed in most seeds",
            markdown(_shown(here)),
            markdown(_together(part)),
        ]
    return "\n\n".join(text)


def _shown(scored: pd.DataFrame) -> pd.DataFrame:
    import pandas as pd

    def interval(row: Any, outcome: str) -> str:
        value, low, high = (row[f"{outcome}_{name}"] for name in ("rank", "low", "high"))
        return "–" if math.isnan(value) else f"{value:.2f} [{low:.2f}, {high:.2f}]"

    rows = []
    for row in scored.to_dict("records"):
        cells = {"candidate": row["candidate"]}
        for outcome, title in (("gain", "gain"), ("log_kl_change", "KL")):
            cells |= {
                f"{title}: rank correlation": interval(row, outcome),
                f"within settings ({title})": f"{row[f'{outcome}_within']:.2f}".replace("nan", "–"),
                f"explained, of a new form ({title})": f"{row[f'{outcome}_fit']:.0%}, {row[f'{outcome}_new_form']:.0%}",
            }
        rows.append(cells | {"collapse: AUC": f"{row['collapse_auc']:.2f}"})
    return pd.DataFrame(rows)


def _together(table: pd.DataFrame) -> pd.DataFrame:
    import pandas as pd

    rows = []
    for name, columns in TOGETHER.items():
        row = {"fit of": name}
        for outcome, words in OUTCOMES.items():
            values = [explained(table, columns, outcome, leave_out=out) for out in (None, "form", "setting")]
            row[f"{words}: explained, of a new form, of a new setting"] = ", ".join(f"{value:.0%}" for value in values)
        rows.append(row)
    return pd.DataFrame(rows)
