"""The gradient of KL terms on SmolLM2-135M at 256 tokens, from samples 0, 1, 4 and 10 updates old, by position.

    short training run, drawing completions at four versions of its policy
    -> passes of the last policy and the reference -> per token: log-probs, exact KL, sketched derivatives of the logits
    -> coefficients of every term per token -> gradient of the output matrix by block and position -> tables

The audited parameters are the output matrix ``[V, H]`` (its use as embeddings held fixed): there the gradient of a
completion is ``sum_t (a_t u_t + b_t v_t) h_t^T`` with ``u = d log pi(y) / d logits = 1_y - p``,
``v = d KL / d logits = p (log p - log q - KL)``, ``h`` the hidden state, and ``a``, ``b`` the derivatives of the term's
surrogate in the token's log-prob and exact KL. So every term and every range of positions comes from one pass. ``u``
and ``v`` are count sketches of :data:`SKETCH` numbers over the vocabulary.

Every stage writes its files before the next one starts, and is skipped where they exist: a stopped run resumes.

Legend: ``B`` completions of a group, ``T`` tokens, ``K`` groups (blocks of the statistics), ``S`` sketch, ``H`` width.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from kl_comedy.audit.grams import (
    delivered,
    difference_gram,
    estimate,
    mean_product,
    noise,
    p_of_zero_mean,
    squared_bias,
)
from kl_comedy.config import Config, load_config
from kl_comedy.errors import UserError, bad_value
from kl_comedy.kl import KLTerm, kl_parts, kl_surrogate
from kl_comedy.kl.surrogate import own_baseline
from kl_comedy.models import load_model
from kl_comedy.models.introspection import head_weights
from kl_comedy.models.logprobs import completion_hidden
from kl_comedy.records import Rollout
from kl_comedy.results.figures import legend_below
from kl_comedy.rollouts import sampling_from
from research.studies.pages import figure, looks_of, save_csv, write_page

if TYPE_CHECKING:
    import pandas as pd

    from kl_comedy.training.module import PolicyModule

CONFIG = Path("research/studies/long_audit.yaml")
UPDATES = 12
AGES = (0, 1, 4, 10)
"""How many updates before the audited policy the completions were drawn."""
TOKENS = 256
BIN = 32
"""Tokens per range of positions."""
GROUP = 4
"""Completions per prompt."""
SKETCH = 1024
CAP = 8.0
"""Largest prefix ratio of the term that bounds it (`rb/robust`)."""

REFERENCE = KLTerm("exact", placement="loss")
"""On-policy, the gradient that the others are measured against: that of the exact KL of each visited prefix.

The gradient of the KL of whole completions contains the future credit too, whose noise hides it at any number of
completions that a CPU can draw at this length.
"""

TERMS: dict[str, KLTerm] = {
    "k1 in reward, total": KLTerm("k1", credit="total", baseline="own"),
    "k1 in reward, to go": KLTerm("k1", credit="to_go", baseline="own"),
    "k1 in loss": KLTerm("k1", placement="loss"),
    "k3 in loss": KLTerm("k3", placement="loss"),
    "k3 x token ratio": KLTerm("k3", placement="loss", correction="token"),
    "exact, own token": KLTerm("exact", placement="loss"),
    "exact to go, no ratio": KLTerm("exact", credit="to_go", baseline="own"),
    "k1 x sequence ratio": KLTerm("k1", credit="to_go", correction="sequence"),
    "k1 x prefix": KLTerm("k1", credit="to_go", correction="prefix"),
    "k3 x prefix": KLTerm("k3", placement="loss", correction="prefix"),
    "exact x prefix (rb/per_decision)": KLTerm("exact", placement="loss", correction="prefix_previous"),
    "the same, own baseline (rb/baselined)": KLTerm(
        "exact", credit="to_go", correction="prefix_previous", baseline="own"
    ),
    "the same, ratio up to 8 (rb/robust)": KLTerm(
        "exact", credit="to_go", correction="prefix_previous", baseline="own", cap=CAP
    ),
}
SHOWN = (
    "k1 in reward, total",
    "k3 in loss",
    "k3 x prefix",
    "exact, own token",
    "exact x prefix (rb/per_decision)",
    "the same, ratio up to 8 (rb/robust)",
)
"""The terms of the figure."""


# --- completions of four versions of the policy ------------------------------------------------------------------
class _DrawAtVersions(Callback):
    """Writes ``groups`` groups drawn at each version of :data:`AGES`, and the weights after the last update."""

    def __init__(self, folder: Path, groups: int) -> None:
        self._folder = folder
        self._groups = groups

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._at_version(trainer, pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self._at_version(trainer, pl_module)

    def _at_version(self, trainer: Any, module: PolicyModule) -> None:
        data = trainer.datamodule
        age = UPDATES - module.version
        if age in AGES:
            sampling = dataclasses.replace(sampling_from(data.config.rollout), max_new_tokens=TOKENS)
            prompts = data.prompts.train[-self._groups :]
            # A seed per age: completions of two ages are independent.
            rollouts = data.backend.generate(prompts, group_size=GROUP, sampling=sampling, seed=1000 + age)
            _write(rollouts, self._folder / f"rollouts-{age}.pt")
        if age == 0:
            # Written last: where this file exists, the stage is complete.
            _write(module.policy.state_dict(), self._folder / "policy.pt")
            trainer.should_stop = True


def _write(value: Any, path: Path) -> None:
    """Save atomically: a file that exists is complete, also after a run was killed."""
    part = path.with_suffix(".part")
    torch.save(value, part)
    part.rename(path)


def draw_completions(config: Config, folder: Path, groups: int) -> None:
    """Train for :data:`UPDATES` updates and write completions of every age, and the weights, to ``folder``."""
    from kl_comedy.training.experience_module import ExperienceModule
    from kl_comedy.training.fit import make_trainer
    from kl_comedy.training.module import PolicyModule

    if (folder / "policy.pt").is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    module = PolicyModule(config)
    data = ExperienceModule(config)
    try:
        make_trainer(config, [_DrawAtVersions(folder, groups)]).fit(module, datamodule=data)
    finally:
        data.close()


# --- passes -------------------------------------------------------------------------------------------------------
def pass_groups(config: Config, folder: Path, groups: int, done: Callable[[], None]) -> None:
    """Compute the passes of policy and reference over every group of every age, and write a file for each.

    Raises :class:`UserError` where fewer groups were drawn.
    """
    files = [_group_file(folder, age, group) for age in AGES for group in range(groups)]
    if all(file.is_file() for file in files):
        return
    policy = load_model(config.model).model
    policy.load_state_dict(torch.load(folder / "policy.pt"))
    reference = load_model(config.model).model
    rollouts_of_age = {age: torch.load(folder / f"rollouts-{age}.pt", weights_only=False) for age in AGES}
    drawn_groups = 1 + max(rollout.group_id for rollout in rollouts_of_age[0])
    if drawn_groups < groups:
        allowed = f"at most {drawn_groups}, as many as {folder} has; or another --folder"
        raise bad_value("--groups", groups, allowed)

    # All ages of a group before the next group: a run that is stopped early has complete groups.
    for group in range(groups):
        for age in AGES:
            file = _group_file(folder, age, group)
            if not file.is_file():
                rollouts = [rollout for rollout in rollouts_of_age[age] if rollout.group_id == group]
                _write(group_pass(policy, reference, rollouts, config.rollout.temperature), file)
            done()


def _group_file(folder: Path, age: int, group: int) -> Path:
    return folder / f"group-{age}-{group}.pt"


@torch.no_grad()
def group_pass(policy: Any, reference: Any, rollouts: Sequence[Rollout], temperature: float) -> dict[str, Tensor]:
    """One pass of policy and reference over a group; float32.

    Columns ``[B, T]``: ``logp``, ``ref_logp``, ``behaviour_logp`` (of policy, reference and sampler), ``exact_kl`` and
    ``mask``. By token inside the mask: sketches ``u`` and ``v`` ``[N, S]`` and hidden states ``h`` ``[N, H]``.
    """
    prompt_BP = torch.tensor([rollout.prompt.token_ids for rollout in rollouts])
    ids_BT = torch.zeros(len(rollouts), TOKENS, dtype=torch.long)
    behaviour_BT = torch.zeros(ids_BT.shape)
    mask_BT = torch.zeros(ids_BT.shape, dtype=torch.bool)
    for row, rollout in enumerate(rollouts):
        length = len(rollout.completion_ids)
        ids_BT[row, :length] = torch.tensor(rollout.completion_ids)
        behaviour_BT[row, :length] = torch.tensor(rollout.logps)
        mask_BT[row, :length] = True

    # The completions of a group have one prompt, so that no prompt is padded.
    inputs = (prompt_BP, torch.ones_like(prompt_BP), ids_BT, mask_BT)
    hidden_NH = completion_hidden(policy, *inputs)
    ref_hidden_NH = completion_hidden(reference, *inputs)
    weight_VH, _ = head_weights(policy)
    ref_weight_VH, _ = head_weights(reference)
    ids_N = ids_BT[mask_BT]
    columns: dict[str, list[Tensor]] = {"logp": [], "ref_logp": [], "exact_kl": [], "u": [], "v": []}
    # By chunks: one matrix [N, V] of a whole group would not fit the memory of a small machine.
    for chunk in torch.arange(len(hidden_NH)).split(TOKENS):
        logp_nV = (hidden_NH[chunk] @ weight_VH.T / temperature).log_softmax(-1)
        logq_nV = (ref_hidden_NH[chunk] @ ref_weight_VH.T / temperature).log_softmax(-1)
        ids_n1 = ids_N[chunk, None]
        columns["logp"].append(logp_nV.gather(-1, ids_n1)[:, 0])
        columns["ref_logp"].append(logq_nV.gather(-1, ids_n1)[:, 0])

        # KL = sum_k p_k (log p_k - log q_k)
        p_nV = logp_nV.exp()
        log_ratio_nV = logp_nV.sub_(logq_nV)
        kl_n = (p_nV * log_ratio_nV).sum(-1)
        columns["exact_kl"].append(kl_n)
        # v = d KL / d logits = p (log p - log q - KL)
        v_nV = log_ratio_nV.sub_(kl_n[:, None]).mul_(p_nV)
        # u = d log pi(y) / d logits = 1_y - p; in the place of p, which v has read already
        u_nV = p_nV.neg_().scatter_add_(-1, ids_n1, torch.ones(ids_n1.shape))
        # The logits were divided by the temperature after the head.
        columns["u"].append(sketch(u_nV) / temperature)
        columns["v"].append(sketch(v_nV) / temperature)

    def over_tokens(name: str) -> Tensor:
        return torch.zeros(mask_BT.shape).masked_scatter(mask_BT, torch.cat(columns[name]))

    return {
        "logp": over_tokens("logp"),
        "ref_logp": over_tokens("ref_logp"),
        "exact_kl": over_tokens("exact_kl"),
        "behaviour_logp": behaviour_BT,
        "mask": mask_BT,
        "u": torch.cat(columns["u"]),
        "v": torch.cat(columns["v"]),
        "h": hidden_NH,
    }


def sketch(values_nV: Tensor) -> Tensor:
    """A count sketch ``[n, S]`` with fixed random signs: inner products are preserved, without bias over the signs."""
    vocabulary = values_nV.shape[1]
    # The same signs in every call: products of sketches from different groups must refer to the same sketch.
    generator = torch.Generator().manual_seed(0)
    signs_V = torch.randint(0, 2, (vocabulary,), generator=generator) * 2.0 - 1
    padding = -vocabulary % SKETCH
    padded = torch.nn.functional.pad(values_nV * signs_V, (0, padding))
    return padded.reshape(len(values_nV), -1, SKETCH).sum(1)


# --- gradients ----------------------------------------------------------------------------------------------------
def coefficients(term: KLTerm, rows: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """``a_BT``, ``b_BT``: derivatives of a term's surrogate (beta = 1) in log-prob and exact KL of each token."""
    logp_BT = rows["logp"].clone().requires_grad_()
    kl_BT = rows["exact_kl"].clone().requires_grad_()
    arguments: dict[str, Any] = {
        "logp_BT": logp_BT,
        "ref_logp_BT": rows["ref_logp"],
        "behaviour_logp_BT": rows["behaviour_logp"],
        "mask_BT": rows["mask"],
        "exact_kl_BT": kl_BT,
    }
    baseline_BT = None
    if term.baseline == "own":
        group_B = torch.zeros(len(logp_BT), dtype=torch.long)
        baseline_BT = own_baseline(kl_parts(term, **arguments), rows["mask"], group_B)
    loss = kl_surrogate(term, **arguments, baseline_BT=baseline_BT).sum()
    # A sampled term does not read the exact KL, and an exact one may not read the log-prob: the gradient is zero there.
    a_BT, b_BT = torch.autograd.grad(loss, [logp_BT, kl_BT], allow_unused=True, materialize_grads=True)
    return a_BT.detach(), b_BT.detach()


def gradient(coefficients_BT: tuple[Tensor, Tensor], rows: Mapping[str, Tensor], bin_BT: Tensor) -> Tensor:
    """The mean over the group of the gradient through the tokens in ``bin_BT``, flat ``[S * H]``."""
    a_BT, b_BT = coefficients_BT
    mask_BT = rows["mask"]
    inside_N = bin_BT[mask_BT]
    a_n1 = a_BT[mask_BT][inside_N, None]
    b_n1 = b_BT[mask_BT][inside_N, None]
    # sum_t (a_t u_t + b_t v_t) h_t^T
    logits_nS = a_n1 * rows["u"][inside_N] + b_n1 * rows["v"][inside_N]
    return (logits_nS.T @ rows["h"][inside_N]).flatten() / len(mask_BT)


def grams(folder: Path, age: int, groups: int) -> tuple[Tensor, Tensor]:
    """Inner products of the reference (first) and every term between groups.

    Returns those of whole completions ``[C, C, K, K]`` and those of each range of positions ``[ranges, C, C, K, K]``.
    The reference gradient is of the completions of age 0, the terms' are of ``age``.
    """
    position_T = torch.arange(TOKENS)
    losses_of_group = [_losses(folder, age, group) for group in range(groups)]
    total_KCD: Tensor | None = None
    products_of_bin = []
    for start in range(0, TOKENS, BIN):
        inside_T = (position_T >= start) & (position_T < start + BIN)
        inside_BT = inside_T.expand(GROUP, TOKENS)
        gradients_KCD = torch.stack([_gradients(losses, inside_BT) for losses in losses_of_group])
        products_of_bin.append(_gram(gradients_KCD))
        # A gradient is a sum over tokens: that of a whole completion is the sum of its bins'.
        total_KCD = gradients_KCD if total_KCD is None else total_KCD.add_(gradients_KCD)
    assert total_KCD is not None
    return _gram(total_KCD), torch.stack(products_of_bin)


Loss = tuple[tuple[Tensor, Tensor], Mapping[str, Tensor]]
"""Coefficients of one loss on one group, and the columns of that group."""


def _losses(folder: Path, age: int, group: int) -> list[Loss]:
    """The reference on the fresh completions of a group, then every term on those of ``age``."""
    fresh = torch.load(_group_file(folder, 0, group))
    stale = torch.load(_group_file(folder, age, group))
    losses: list[Loss] = [(coefficients(REFERENCE, fresh), fresh)]
    for term in TERMS.values():
        losses.append((coefficients(term, stale), stale))
    return losses


def _gradients(losses: Sequence[Loss], inside_BT: Tensor) -> Tensor:
    """The gradients ``[C, S * H]`` of all losses of a group through the tokens in ``inside_BT``."""
    return torch.stack([gradient(coefficients_BT, rows, inside_BT) for coefficients_BT, rows in losses])


def _gram(gradients_KCD: Tensor) -> Tensor:
    """Inner products ``[C, C, K, K]``."""
    k, c, _ = gradients_KCD.shape
    flat = gradients_KCD.transpose(0, 1).reshape(c * k, -1)
    return (flat @ flat.T).double().reshape(c, k, c, k).permute(0, 2, 1, 3)


# --- tables -------------------------------------------------------------------------------------------------------
FIGURES_OF_BIN = ("strength", "strength_low", "strength_high", "completions", "reference_error")


def tables_of(folder: Path, groups: int, done: Callable[[], None]) -> dict[str, pd.DataFrame]:
    """``terms`` (whole gradient), ``positions`` (by bin) and ``ratios`` (by token), one row per age and item."""
    import pandas as pd

    terms: list[dict[str, Any]] = []
    positions: list[dict[str, Any]] = []
    ratios: list[dict[str, Any]] = []
    for age in AGES:
        whole, by_bin = grams(folder, age, groups)
        # Number 0 is the reference.
        for number, name in enumerate(TERMS, start=1):
            terms.append({"age": age, "term": name, **compare(whole, number)})
            for bin_number, products in enumerate(by_bin):
                figures = compare(products, number)
                shown = {figure: figures[figure] for figure in FIGURES_OF_BIN}
                positions.append({"age": age, "term": name, "from": bin_number * BIN, **shown})
        ratios += ratio_rows(folder, age, groups)
        done()
    return {"terms": pd.DataFrame(terms), "positions": pd.DataFrame(positions), "ratios": pd.DataFrame(ratios)}


def compare(gram: Tensor, number: int) -> dict[str, float]:
    """Figures of term ``number`` against the reference (0); intervals by leaving out one prompt at a time."""
    term_KK = gram[number, number]
    with_reference_KK = gram[number, 0]
    reference_KK = gram[0, 0]
    difference_KK = difference_gram(term_KK, with_reference_KK, reference_KK)
    strength = estimate(delivered, with_reference_KK, reference_KK)
    square = estimate(squared_bias, difference_KK, reference_KK)
    # An estimate of |E r|^2 at or below zero: noise hides the reference, and nothing can be compared with it.
    signal = float(mean_product(reference_KK))
    if signal <= 0:
        signal = math.nan
    reference_variance = float(noise(reference_KK)) / len(reference_KK)
    return {
        "strength": strength.value,
        "strength_low": strength.low,
        "strength_high": strength.high,
        "distance": _root(square.value),
        "distance_low": _root(square.low),
        "distance_high": _root(square.high),
        "p_equal": p_of_zero_mean(difference_KK, torch.Generator().manual_seed(0)),
        "completions": GROUP * float(noise(term_KK)) / signal,
        "reference_error": (reference_variance / signal) ** 0.5,
    }


def _root(square: float) -> float:
    """The root of an unbiased estimate of a square, which may come out below zero."""
    return float(max(square, 0.0) ** 0.5)


def ratio_rows(folder: Path, age: int, groups: int) -> list[dict[str, Any]]:
    """A row for each token.

    Completions that reach it; effective share of the ratio of the tokens before it, and its mean, plain and capped; the
    KL of the sampler from the policy (nats per token, k3) and of the policy from the initial model (exact).
    """
    files = [torch.load(_group_file(folder, age, group)) for group in range(groups)]
    mask_BT = torch.cat([columns["mask"] for columns in files])
    log_ratio_BT = torch.cat([columns["logp"] - columns["behaviour_logp"] for columns in files]).double() * mask_BT
    # The sum up to a token, less its own: the ratio of the tokens before it.
    weight_BT = (log_ratio_BT.cumsum(-1) - log_ratio_BT).exp()
    exact_BT = torch.cat([columns["exact_kl"] for columns in files])
    rows = []
    for token in range(TOKENS):
        reached = mask_BT[:, token]
        weight = weight_BT[reached, token]
        log_ratio = log_ratio_BT[reached, token]
        rows.append(
            {
                "age": age,
                "token": token,
                "completions": int(reached.sum()),
                "ess": float(weight.sum() ** 2 / weight.square().sum() / len(weight)),
                "mean": float(weight.mean()),
                "mean_capped": float(weight.clamp(max=CAP).mean()),
                "kl_sampler": float((log_ratio.exp() - 1 - log_ratio).mean()),
                "kl_initial": float(exact_BT[reached, token].mean()),
            }
        )
    return rows


# --- page ---------------------------------------------------------------------------------------------------------
def draw(out: Path) -> None:
    """The figure, from the data in ``out``."""
    import pandas as pd

    positions = pd.read_csv(out / "positions.csv")
    ratios = pd.read_csv(out / "ratios.csv")
    ages = sorted(positions.age.unique())
    completions_of_age = int(ratios.completions.max())
    with figure(out / "positions.svg", 3, len(ages), 2.1, sharex=True, sharey="row") as (drawing, panels):
        for age, (strength, completions, share) in zip(ages, panels.T, strict=True):
            for name, style in looks_of(SHOWN).items():
                bins = positions[(positions.age == age) & (positions.term == name)]
                middle = bins["from"] + BIN / 2
                strength.plot(middle, bins.strength, label=name, **style)
                completions.plot(middle, bins.completions, **style)
            tokens = ratios[ratios.age == age]
            share.plot(tokens.token, tokens.ess, color="black", linewidth=0.9)
            strength.set(title=f"{age} updates old", ylim=(-1, 3))
            completions.set(yscale="log")
            share.set(ylim=(0, 1.05), xlabel="position (tokens)")
        panels[0][0].set_ylabel("strength: share of the\nper-prefix gradient")
        panels[1][0].set_ylabel("completions until noise equals\nthat gradient (log axis)")
        panels[2][0].set_ylabel("effective share of\nthe prefix ratio")
        legend_below(drawing, f"one policy, {completions_of_age} completions of each age; bins of {BIN} tokens")


def ratio_summary(ratios: pd.DataFrame) -> pd.DataFrame:
    """Per age: KL per token, and the prefix ratio at some tokens."""
    import pandas as pd

    rows = []
    for age, tokens in ratios.groupby("age"):
        # A token's row is a mean over the completions that reach it: weighted, every drawn token counts once.
        count = tokens.completions
        kl_sampler = float((tokens.kl_sampler * count).sum() / count.sum())
        row = {
            "age": age,
            "KL(sampler, policy) per token": kl_sampler,
            "KL(policy, initial) per token": float((tokens.kl_initial * count).sum() / count.sum()),
            "mean length": float(count.sum() / count.max()),
            # The effective share of a log-normal ratio with the same KL per token.
            "exp(-2 k 256)": math.exp(-2 * TOKENS * kl_sampler),
        }
        for token in (31, 63, 127, 255):
            at_token = tokens[tokens.token == token].iloc[0]
            row[f"ESS at {token + 1}"] = at_token.ess
            row[f"mean up to {CAP:g} at {token + 1}"] = at_token.mean_capped
        rows.append(row)
    return pd.DataFrame(rows)


def summary(terms: pd.DataFrame) -> pd.DataFrame:
    """Strength with its interval, and completions, by term and age."""
    strengths = [f"{row.strength:.2f} [{row.strength_low:.2f}, {row.strength_high:.2f}]" for row in terms.itertuples()]
    completions = [_count(value) for value in terms.completions]
    shown = terms.assign(strength=strengths, completions=completions)
    table = shown.pivot(index="term", columns="age", values=["strength", "completions"]).reindex(list(TERMS))
    table.columns = [f"{name}, age {age}" for name, age in table.columns]
    return table.reset_index()


def _count(value: float) -> str:
    """A number of completions, with a decimal where it is small."""
    return f"{value:,.0f}" if value >= 10 else f"{value:,.1f}"


def write_report(out: Path, *, command: str) -> None:
    """Figure and README from the data in ``out``; ``command`` is what regenerates them."""
    draw(out)
    write_page(out, parts(out, command=command))


def parts(out: Path, *, command: str) -> list[Any]:
    """The page, from the data in ``out``."""
    import pandas as pd

    terms = pd.read_csv(out / "terms.csv")
    positions = pd.read_csv(out / "positions.csv")
    ratios = pd.read_csv(out / "ratios.csv")
    facts = json.loads((out / "facts.json").read_text())
    page: list[Any] = [
        "# Gradients of KL terms on SmolLM2-135M at 256 tokens, by position and age of the samples",
        "<!-- python research/scripts/stored_tables.py long_audit -->",
        f"Regenerated by `{command}`: {facts['completions']} completions of up to {TOKENS} tokens for each age, groups "
        f"of {GROUP} on {facts['groups']} prompts; float32, CPU. The audited policy is update {UPDATES} of "
        f"[long_audit.yaml](../../{CONFIG}); its reference is the initial model; the samples are of the policy 0, 1, 4 "
        "and 10 updates before. Gradients are those of the output matrix (its use as embeddings held fixed), "
        f"count-sketched over the vocabulary to {SKETCH} numbers.",
        "**Strength** is `<E g, E r> / |E r|^2` and **distance** `|E g - E r| / |E r|`. The reference gradient `r` is "
        "that of the exact KL of each visited prefix (`rb/token`) on the completions of age 0, known to "
        f"{float(terms.reference_error.iloc[0]):.0%} of its norm (standard error). For terms of a token's own KL the "
        "distance is their bias; terms for the KL of whole completions differ from it by the future credit too. "
        "Products are of different prompts, so that noise does not count as signal; 95% intervals leave out one prompt "
        "at a time; `p_equal` tests a distance of 0 by flipping signs of whole prompts. **Completions** is how many "
        f"bring the term's standard error down to `|E r|`. With {facts['groups']} prompts a large distance can go "
        "unnoticed.",
        "![strength, noise and effective share by position](positions.svg)",
        "## Summary by age (updates between drawing and audit)",
        summary(terms),
        "## The prefix ratio",
        ratio_summary(ratios),
        f"The plain ratio has mean 1 in expectation; columns `mean up to {CAP:g}`: the mean of the capped one.",
    ]
    for age, terms_of_age in terms.groupby("age"):
        page += [f"## Age {age}: whole completions", terms_of_age.drop(columns=["age", "reference_error"])]
    for column, title in (("strength", "Strength"), ("completions", "Completions")):
        table = positions.pivot_table(index=["age", "term"], columns="from", values=column, sort=False).reset_index()
        table.columns = [str(name) for name in table.columns]
        page += [f"## {title} by position (columns: first token of {BIN})", table]
    errors = positions.groupby("from").reference_error.first()
    shown_errors = [f"{error:.0%} from {start}" for start, error in errors.items()]
    page.append(f"The reference gradient of a bin is known to: {', '.join(shown_errors)}.")
    return page


def run(folder: Path, out: Path, *, model: str, groups: int, command: str, done: Callable[[], None]) -> None:
    """Run all stages; what ``folder`` has already is not computed again.

    ``done`` is called after each group and age, and after the tables of each age. Raises :class:`UserError` for too few
    groups.
    """
    if groups < 3:
        raise UserError(f"--groups: got {groups}; intervals need at least 3 prompts")
    config = load_config(CONFIG, [f"model.source={model}"])
    # On one thread sums have one order, so that the tables do not depend on the machine's cores.
    torch.set_num_threads(1)
    draw_completions(config, folder, groups)
    pass_groups(config, folder, groups, done)
    for name, frame in tables_of(folder, groups, done).items():
        save_csv(frame, out / f"{name}.csv")
    (out / "facts.json").write_text(json.dumps({"groups": groups, "completions": groups * GROUP}) + "\n")
    write_report(out, command=command)
