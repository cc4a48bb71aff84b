"""The gradient of KL terms on SmolLM2-135M at 256 tokens, from samples 0, 1, 4 and 10 updates old, by position.

    short training run, drawing completions at four versions of its policy
    -> passes of the last policy and the reference -> per token: log-probs, exact KL, sketched derivatives of the logits
    -> coefficients of every term per token -> gradient of the output matrix by block and position -> tables

The audited parameters are the output matrix ``[V, H]`` (its use as embeddings held fixed): there the gradient of a
completion is ``sum_t (a_t u_t + b_t v_t) h_t^T`` with ``u = d log pi(y) / d logits = 1_y - p``,
``v = d KL / d logits = p (log p - log q - KL)``, ``h`` the hidden state, and ``a``, ``b`` the derivatives of the term's
surrogate in the token's log-prob and exact KL. So every term and every range of positions comes from one pass. ``u``
and ``v`` are count sketches of :data:`SKETCH` numbers over the vocabulary.

Every stage writes its files before the next and is skipped where they exist: a run that was stopped resumes.

Legend: ``B`` completions of a group, ``T`` tokens, ``K`` groups (blocks of the statistics), ``S`` sketch, ``H`` width.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from kl_comedy.config import Config, load_config
from kl_comedy.errors import UserError, bad_value
from kl_comedy.kl import KLTerm, kl_parts, kl_surrogate
from kl_comedy.kl.surrogate import own_baseline
from kl_comedy.lab.audit.grams import (
    delivered,
    difference_gram,
    estimate,
    mean_product,
    noise,
    p_of_zero_mean,
    squared_bias,
)
from kl_comedy.models import load_model
from kl_comedy.models.introspection import head_weights
from kl_comedy.models.logprobs import completion_hidden
from kl_comedy.rollouts import sampling_from
from kl_comedy.tracking.figures import legend_below, look
from research.studies.pages import figure, save_csv, write_page

if TYPE_CHECKING:
    import pandas as pd

CONFIG = Path("research/studies/long_audit.yaml")
UPDATES = 12
AGES = (0, 1, 4, 10)
"""How many updates before the audited policy the completions were drawn."""
TOKENS = 256
BIN = 32
GROUP = 4
SKETCH = 1024
CAP = 8.0

REFERENCE = KLTerm("exact", placement="loss")
"""On-policy, the gradient that the others are measured against: that of the exact KL of each visited prefix.

The gradient of the KL of whole completions has the future credit besides, whose noise hides it at any number of
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
"""What the figure shows."""


# --- completions of four versions of the policy ------------------------------------------------------------------
class _DrawAtVersions(Callback):
    """Draws ``groups`` groups at each version that is wanted, writes them, and the weights after the last update."""

    def __init__(self, folder: Path, groups: int) -> None:
        self._folder, self._groups = folder, groups

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        age, data = UPDATES - pl_module.version, trainer.datamodule
        if age in AGES:
            sampling = dataclasses.replace(sampling_from(data.config.rollout), max_new_tokens=TOKENS)
            prompts = data.prompts.train[-self._groups :]
            rollouts = data.backend.generate(prompts, group_size=GROUP, sampling=sampling, seed=1000 + age)
            _write(rollouts, self._folder / f"rollouts-{age}.pt")
        if age == 0:
            _write(pl_module.policy.state_dict(), self._folder / "policy.pt")
            trainer.should_stop = True

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
        self.on_train_start(trainer, pl_module)


def _write(value: Any, path: Path) -> None:
    torch.save(value, path.with_suffix(".part"))
    path.with_suffix(".part").rename(path)


def draw_completions(config: Config, folder: Path, groups: int) -> None:
    """Train for :data:`UPDATES` updates; completions of every age and the weights go to ``folder``."""
    from kl_comedy.training.experience_module import ExperienceModule
    from kl_comedy.training.module import PolicyModule
    from kl_comedy.training.run import make_trainer

    if (folder / "policy.pt").is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    module, data = PolicyModule(config), ExperienceModule(config)
    try:
        make_trainer(config, [_DrawAtVersions(folder, groups)]).fit(module, datamodule=data)
    finally:
        data.close()


# --- passes -------------------------------------------------------------------------------------------------------
def pass_groups(config: Config, folder: Path, groups: int, done: Callable[[], None]) -> None:
    """The passes of policy and reference over every group, a file each; all ages of a group together.

    Raises :class:`UserError` where fewer groups were drawn.
    """
    if all(_group_file(folder, age, group).is_file() for age in AGES for group in range(groups)):
        return
    policy, reference = load_model(config.model).model, load_model(config.model).model
    policy.load_state_dict(torch.load(folder / "policy.pt"))
    drawn = {age: torch.load(folder / f"rollouts-{age}.pt", weights_only=False) for age in AGES}
    if (most := 1 + max(rollout.group_id for rollout in drawn[0])) < groups:
        raise bad_value("--groups", groups, f"at most {most}, as many as {folder} has; or another --folder")
    for group in range(groups):
        for age in AGES:
            path = _group_file(folder, age, group)
            if not path.is_file():
                rollouts = [rollout for rollout in drawn[age] if rollout.group_id == group]
                _write(group_pass(policy, reference, rollouts, config.rollout.temperature), path)
            done()


def _group_file(folder: Path, age: int, group: int) -> Path:
    return folder / f"group-{age}-{group}.pt"


@torch.no_grad()
def group_pass(policy: Any, reference: Any, rollouts: list[Any], temperature: float) -> dict[str, Tensor]:
    """Columns ``[B, T]`` (log-probs of policy, reference and sampler, exact KL, mask) and, by token inside the mask,
    sketches ``u`` and ``v`` ``[N, S]`` and hidden states ``h`` ``[N, H]``; float32."""
    prompt_BP = torch.tensor([rollout.prompt.token_ids for rollout in rollouts])
    ids_BT = torch.zeros(len(rollouts), TOKENS, dtype=torch.long)
    behaviour_BT, mask_BT = torch.zeros(ids_BT.shape), torch.zeros(ids_BT.shape, dtype=torch.bool)
    for row, rollout in enumerate(rollouts):
        length = len(rollout.completion_ids)
        ids_BT[row, :length] = torch.tensor(rollout.completion_ids)
        behaviour_BT[row, :length] = torch.tensor(rollout.logps)
        mask_BT[row, :length] = True
    inputs = (prompt_BP, torch.ones_like(prompt_BP), ids_BT, mask_BT)
    hidden_NH, other_NH = (completion_hidden(model, *inputs) for model in (policy, reference))
    (weight_VH, _), (other_VH, _) = head_weights(policy), head_weights(reference)
    parts = []
    for chunk in torch.arange(len(hidden_NH)).split(TOKENS):
        logp_nV = (hidden_NH[chunk] @ weight_VH.T / temperature).log_softmax(-1)
        logq_nV = (other_NH[chunk] @ other_VH.T / temperature).log_softmax(-1)
        ids_n = ids_BT[mask_BT][chunk, None]
        columns = [logp_nV.gather(-1, ids_n)[:, 0], logq_nV.gather(-1, ids_n)[:, 0]]
        p_nV = logp_nV.exp()
        ratio_nV = logp_nV.sub_(logq_nV)
        kl_n = (p_nV * ratio_nV).sum(-1)
        v_nV = ratio_nV.sub_(kl_n[:, None]).mul_(p_nV)
        u_nV = p_nV.neg_().scatter_add_(-1, ids_n, torch.ones(ids_n.shape))
        parts.append((*columns, kl_n, sketch(u_nV) / temperature, sketch(v_nV) / temperature))
    logp_N, logq_N, kl_N, u_NS, v_NS = (torch.cat(column) for column in zip(*parts, strict=True))
    columns_BT = {
        name: torch.zeros(mask_BT.shape).masked_scatter(mask_BT, column)
        for name, column in (("logp", logp_N), ("ref_logp", logq_N), ("exact_kl", kl_N))
    }
    return {**columns_BT, "behaviour_logp": behaviour_BT, "mask": mask_BT, "u": u_NS, "v": v_NS, "h": hidden_NH}


def sketch(values_nV: Tensor) -> Tensor:
    """A count sketch ``[n, S]`` with fixed random signs: inner products are kept, without bias over the signs."""
    vocabulary = values_nV.shape[1]
    signs_V = torch.randint(0, 2, (vocabulary,), generator=torch.Generator().manual_seed(0)) * 2.0 - 1
    padded = torch.nn.functional.pad(values_nV * signs_V, (0, -vocabulary % SKETCH))
    return padded.reshape(len(values_nV), -1, SKETCH).sum(1)


# --- gradients ----------------------------------------------------------------------------------------------------
def coefficients(term: KLTerm, rows: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """``a_BT``, ``b_BT``: derivatives of a term's surrogate (beta = 1) in log-prob and exact KL of each token."""
    logp_BT, kl_BT = (rows[name].clone().requires_grad_() for name in ("logp", "exact_kl"))
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
    by_leaf = torch.autograd.grad(loss, [logp_BT, kl_BT], allow_unused=True)
    a_BT, b_BT = (torch.zeros_like(kl_BT) if each is None else each for each in by_leaf)
    return a_BT.detach(), b_BT.detach()


def gradient(coefficients_BT: tuple[Tensor, Tensor], rows: Mapping[str, Tensor], bin_BT: Tensor) -> Tensor:
    """The mean over the group of the gradient through the tokens in ``bin_BT``, flat ``[S * H]``."""
    a_BT, b_BT = coefficients_BT
    mask_BT = rows["mask"]
    inside_N = bin_BT[mask_BT]
    a_n, b_n = (each[mask_BT][inside_N, None] for each in (a_BT, b_BT))
    logits_nS = a_n * rows["u"][inside_N] + b_n * rows["v"][inside_N]
    return (logits_nS.T @ rows["h"][inside_N]).flatten() / len(mask_BT)


def grams(folder: Path, age: int, groups: int) -> tuple[Tensor, Tensor]:
    """Inner products of the reference (first) and every term between groups: ``[C, C, K, K]``, whole and by bin."""
    stale, fresh = ([torch.load(_group_file(folder, each, k)) for k in range(groups)] for each in (age, 0))
    weights = [
        [coefficients(REFERENCE, fresh[k]), *(coefficients(term, stale[k]) for term in TERMS.values())]
        for k in range(groups)
    ]
    position_T = torch.arange(TOKENS)
    total, by_bin = None, []
    for start in range(0, TOKENS, BIN):
        inside_BT = ((position_T >= start) & (position_T < start + BIN)).expand(GROUP, TOKENS)
        stacked = torch.stack(
            [
                torch.stack([gradient(c, fresh[k] if n == 0 else stale[k], inside_BT) for n, c in enumerate(of_group)])
                for k, of_group in enumerate(weights)
            ]
        )
        by_bin.append(_gram(stacked))
        total = stacked if total is None else total.add_(stacked)
    assert total is not None
    return _gram(total), torch.stack(by_bin)


def _gram(gradients_KCD: Tensor) -> Tensor:
    k, c, _ = gradients_KCD.shape
    flat = gradients_KCD.transpose(0, 1).reshape(c * k, -1)
    return (flat @ flat.T).double().reshape(c, k, c, k).permute(0, 2, 1, 3)


# --- tables -------------------------------------------------------------------------------------------------------
def tables_of(folder: Path, groups: int, done: Callable[[], None]) -> dict[str, pd.DataFrame]:
    """``terms`` (whole gradient), ``positions`` (by bin) and ``ratios`` (by token): one row per age and each."""
    import pandas as pd

    terms: list[dict[str, Any]] = []
    positions: list[dict[str, Any]] = []
    ratios: list[dict[str, Any]] = []
    for age in AGES:
        whole, by_bin = grams(folder, age, groups)
        for n, name in enumerate(TERMS, start=1):
            terms.append({"age": age, "term": name, **compare(whole, n)})
            for at, of_bin in enumerate(by_bin):
                figures = compare(of_bin, n)
                names = ("strength", "strength_low", "strength_high", "completions", "reference_error")
                positions.append({"age": age, "term": name, "from": at * BIN} | {key: figures[key] for key in names})
        ratios += ratio_rows(folder, age, groups)
        done()
    return {"terms": pd.DataFrame(terms), "positions": pd.DataFrame(positions), "ratios": pd.DataFrame(ratios)}


def compare(gram: Tensor, n: int) -> dict[str, float]:
    """Term ``n`` against the reference (0); intervals by leaving out one prompt at a time."""
    term_KK, with_KK, ref_KK = gram[n, n], gram[n, 0], gram[0, 0]
    difference_KK = difference_gram(term_KK, with_KK, ref_KK)
    strength = estimate(delivered, with_KK, ref_KK)
    square = estimate(squared_bias, difference_KK, ref_KK)
    root = {end: max(value, 0.0) ** 0.5 for end, value in vars(square).items()}
    signal = float(mean_product(ref_KK))
    signal = signal if signal > 0 else math.nan
    return {
        "strength": strength.value,
        "strength_low": strength.low,
        "strength_high": strength.high,
        "distance": root["value"],
        "distance_low": root["low"],
        "distance_high": root["high"],
        "p_equal": p_of_zero_mean(difference_KK, torch.Generator().manual_seed(0)),
        "completions": GROUP * float(noise(term_KK)) / signal,
        "reference_error": (float(noise(ref_KK)) / len(ref_KK) / signal) ** 0.5,
    }


def ratio_rows(folder: Path, age: int, groups: int) -> list[dict[str, Any]]:
    """By token: completions that reach it, effective share of the ratio of the tokens before it, its mean, plain and
    capped, and the KL of the sampler from the policy (nats a token, k3)."""
    files = [torch.load(_group_file(folder, age, k)) for k in range(groups)]
    mask_BT = torch.cat([each["mask"] for each in files])
    delta_BT = torch.cat([each["logp"] - each["behaviour_logp"] for each in files]).double() * mask_BT
    weight_BT = (delta_BT.cumsum(-1) - delta_BT).exp()
    exact_BT = torch.cat([each["exact_kl"] for each in files])
    rows = []
    for t in range(TOKENS):
        reached = mask_BT[:, t]
        weight, delta = weight_BT[reached, t], delta_BT[reached, t]
        rows.append(
            {
                "age": age,
                "token": t,
                "completions": int(reached.sum()),
                "ess": float(weight.sum() ** 2 / weight.square().sum() / len(weight)),
                "mean": float(weight.mean()),
                "mean_capped": float(weight.clamp(max=CAP).mean()),
                "kl_sampler": float((delta.exp() - 1 - delta).mean()),
                "kl_initial": float(exact_BT[reached, t].mean()),
            }
        )
    return rows


# --- page ---------------------------------------------------------------------------------------------------------
def draw(out: Path) -> None:
    """The figure, from the data in ``out``."""
    import pandas as pd

    positions, ratios = pd.read_csv(out / "positions.csv"), pd.read_csv(out / "ratios.csv")
    ages = sorted(positions.age.unique())
    with figure(out / "positions.svg", 3, len(ages), 2.1, sharex=True, sharey="row") as (drawing, panels):
        for column, age in enumerate(ages):
            for at, name in enumerate(SHOWN):
                here = positions[(positions.age == age) & (positions.term == name)]
                middle = here["from"] + BIN / 2
                panels[0][column].plot(middle, here.strength, label=name, **look(at))
                panels[1][column].plot(middle, here.completions, **look(at))
            tokens = ratios[ratios.age == age]
            panels[2][column].plot(tokens.token, tokens.ess, color="black", linewidth=0.9)
            panels[0][column].set(title=f"age {age}", ylim=(-1, 3))
            panels[1][column].set(yscale="log")
            panels[2][column].set(ylim=(0, 1.05), xlabel="token")
        panels[0][0].set_ylabel("strength: share of the\nper-prefix gradient")
        panels[1][0].set_ylabel("completions until noise\nequals that gradient")
        panels[2][0].set_ylabel("effective share of\nthe prefix ratio")
        legend_below(drawing, f"bins of {BIN} tokens")


def ratio_summary(ratios: pd.DataFrame) -> pd.DataFrame:
    """Per age: KL a token, and the prefix ratio at some tokens."""
    import pandas as pd

    rows = []
    for age, here in ratios.groupby("age"):
        count = here.completions
        row = {
            "age": age,
            "KL(sampler, policy) a token": float((here.kl_sampler * count).sum() / count.sum()),
            "KL(policy, initial) a token": float((here.kl_initial * count).sum() / count.sum()),
            "mean length": float(count.sum() / count.max()),
            "exp(-2 k 256)": math.exp(-2 * TOKENS * float((here.kl_sampler * count).sum() / count.sum())),
        }
        for token in (31, 63, 127, 255):
            at = here[here.token == token].iloc[0]
            row[f"ESS at {token + 1}"] = at.ess
            row[f"mean up to {CAP:g} at {token + 1}"] = at.mean_capped
        rows.append(row)
    return pd.DataFrame(rows)


def summary(terms: pd.DataFrame) -> pd.DataFrame:
    """Strength with its interval, and completions, by term and age."""
    shown = terms.assign(
        strength=[
            f"{row.strength:.2f} [{row.strength_low:.2f}, {row.strength_high:.2f}]" for row in terms.itertuples()
        ],
        completions=[f"{value:,.{0 if value >= 10 else 1}f}" for value in terms.completions],
    )
    table = shown.pivot(index="term", columns="age", values=["strength", "completions"]).reindex(list(TERMS))
    table.columns = [f"{name}, age {age}" for name, age in table.columns]
    return table.reset_index()


def write_report(out: Path, *, command: str) -> None:
    """Figure and README from the data in ``out``; ``command`` is what regenerates them."""
    draw(out)
    write_page(out, parts(out, command=command))


def parts(out: Path, *, command: str) -> list[Any]:
    """The page, of the data in ``out``."""
    import pandas as pd

    terms, positions, ratios = (pd.read_csv(out / f"{name}.csv") for name in ("terms", "positions", "ratios"))
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
    for age, here in terms.groupby("age"):
        shown = here.drop(columns=["age", "reference_error"])
        page += [f"## Age {age}: whole completions", shown]
    error = positions.groupby("from").reference_error.first().map("{:.0%}".format)
    known = ", ".join(f"{value} from {start}" for start, value in error.items())
    for value, title in (("strength", "Strength"), ("completions", "Completions")):
        table = positions.pivot_table(index=["age", "term"], columns="from", values=value, sort=False).reset_index()
        table.columns = [str(name) for name in table.columns]
        page += [f"## {title} by position (columns: first token of {BIN})", table]
    return [*page, f"The reference gradient of a bin is known to: {known}."]


def run(folder: Path, out: Path, *, model: str, groups: int, command: str, done: Callable[[], None]) -> None:
    """All stages; what ``folder`` has already is not computed again. Raises :class:`UserError` for too few groups."""
    if groups < 3:
        raise UserError(f"--groups: got {groups}; intervals need at least 3 prompts")
    config = load_config(CONFIG, [f"model.source={model}"])
    torch.set_num_threads(1)
    draw_completions(config, folder, groups)
    pass_groups(config, folder, groups, done)
    for name, frame in tables_of(folder, groups, done).items():
        save_csv(frame, out / f"{name}.csv")
    (out / "facts.json").write_text(json.dumps({"groups": groups, "completions": groups * GROUP}) + "\n")
    write_report(out, command=command)
