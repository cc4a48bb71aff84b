"""Top-k KL gradients: bias of each form by enumeration; variance and cost of the unbiased one at a real vocabulary.

At one prefix the gradient of the form ``sampled_tail`` is ``sum_S p l s``, plus ``rho_y l_y s_y`` where the sampled
token y is outside S (``s_v`` the score of token v, in logits). Its trace variance under a sampler mu is over the tail
``sum_v mu_v (rho_v l_v)^2 |s_v|^2 - |sum_v p_v l_v s_v|^2``, which is summed here over the whole vocabulary: no
token is drawn. ``k = 0`` is k2 in loss with the token's ratio, ``exact`` has no variance at a prefix.

Legend: ``N`` positions, ``V`` vocabulary, ``H`` hidden width.
"""

from __future__ import annotations

import copy
import multiprocessing
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kl_comedy.errors import UserError
from kl_comedy.kl import REGIMES, KLTerm
from kl_comedy.kl.estimators import TOP_K_FORMS
from kl_comedy.kl.oracle.certificate import certify
from kl_comedy.models.head import HeadSettings, head_columns
from kl_comedy.models.introspection import decoder_body
from kl_comedy.models.types import Wanted
from kl_comedy.tracking.figures import look, plain_ticks
from research.studies.pages import figure, save_csv, write_page

if TYPE_CHECKING:
    import pandas as pd

KS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
MODEL = Path("models/SmolLM2-135M-Instruct")
TEXT = Path("docs/architecture.md")
POSITIONS = 128
FROM_POLICY = {"reference": 0.02, "sampler": 0.01}
"""Relative noise on each weight of the policy that makes the other two models."""
COST_KS = (1, 16, 64, 256)
TIMED_ROWS, REPEATS = 128, 3


# --- bias of every form ----------------------------------------------------------------------------------------------
def form_study() -> pd.DataFrame:
    """One row per form, choice of tokens and regime, from the certificates' trees (5 tokens, k = 2); in loss."""
    import pandas as pd

    terms = {
        ("exact", ""): KLTerm("exact", placement="loss"),
        ("k2 in loss", ""): KLTerm("k2", placement="loss"),
        ("k2 in loss x token ratio", ""): KLTerm("k2", placement="loss", correction="token_detached"),
    }
    for form in TOP_K_FORMS:
        for tokens in ("policy", "reference"):
            terms[form, tokens] = KLTerm("top_k", placement="loss", options={"k": 2, "form": form, "tokens": tokens})
    rows, exact = [], {}
    for (form, tokens), term in terms.items():
        # beside a top-k term of weight 0, every term is certified on the same trees
        beside = KLTerm("top_k", placement="loss", beta=0.0)
        for certificate in certify(form, (term,) if term.top else (term, beside)):
            exact.setdefault(certificate.regime, certificate.variance)
            rows.append(
                {
                    "form": form,
                    "tokens": tokens,
                    "regime": certificate.regime,
                    "target": certificate.target or "-",
                    "bias": certificate.relative_bias["token_reverse"],
                    "cosine": certificate.cosine["token_reverse"],
                    "variance": certificate.variance / exact[certificate.regime],
                }
            )
    return pd.DataFrame(rows)


# --- variance at a real vocabulary -----------------------------------------------------------------------------------
def distributions(positions: int = POSITIONS) -> tuple[dict[str, Tensor], Tensor]:
    """Next-token log-probs ``[N, V]`` (float64) of policy, reference and sampler, and the policy's hidden states.

    Raises :class:`UserError` without the model's files.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not MODEL.is_dir():
        raise UserError(f"{MODEL} is missing: research/scripts/fetch_smollm2.py downloads it")
    policy = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    ids = AutoTokenizer.from_pretrained(MODEL)(TEXT.read_text(), return_tensors="pt").input_ids[:, :positions]
    logps, hidden_NH = {}, torch.empty(0)
    with torch.no_grad():
        for seed, (name, noise) in enumerate({"policy": 0.0, **FROM_POLICY}.items()):
            model = copy.deepcopy(policy)
            generator = torch.Generator().manual_seed(seed)
            for weight in model.parameters():
                weight.mul_(1 + noise * torch.randn(weight.shape, generator=generator))
            logps[name] = model(ids).logits[0].double().log_softmax(-1)
            if name == "policy":
                hidden_NH = decoder_body(model)(ids).last_hidden_state[0]
    return logps, hidden_NH


def head_gradient_figures(
    logps: dict[str, Tensor], size_N: Tensor, sampler: str, tokens: str, k: int
) -> dict[str, float]:
    """Of ``sampled_tail``, means over positions: mass outside S; variance and, without the tail, bias.

    Both are of the gradient of the head's weights, whose square at a position is that of the logits' gradient times
    ``size_N``, the square of the hidden state; over that of the exact KL.
    """
    logp_NV, ref_NV, drawn_NV = logps["policy"], logps["reference"], logps[sampler]
    p_NV, log_ratio_NV = logp_NV.exp(), logp_NV - ref_NV
    outside_NV = torch.ones_like(p_NV)
    if k:
        ids_NK = (logp_NV if tokens == "policy" else ref_NV).topk(k).indices
        outside_NV.scatter_(1, ids_NK, 0.0)
    weight_NV = outside_NV * p_NV * log_ratio_NV
    score_square_NV = 1 - 2 * p_NV + p_NV.square().sum(1, keepdim=True)
    second_N = (weight_NV.square() / drawn_NV.exp() * score_square_NV).sum(1)
    tail_N = (weight_NV - p_NV * weight_NV.sum(1, keepdim=True)).square().sum(1)
    square = float((kl_gradient(logps).square().sum(1) * size_N).mean())
    return {
        "tail_mass": float((outside_NV * p_NV).sum(1).mean()),
        "variance": float(((second_N - tail_N) * size_N).mean()) / square,
        "bias_without_tail": (float((tail_N * size_N).mean()) / square) ** 0.5,
    }


def kl_gradient(logps: dict[str, Tensor]) -> Tensor:
    """The gradient of the exact KL with respect to the logits, ``[N, V]``."""
    p_NV, log_ratio_NV = logps["policy"].exp(), logps["policy"] - logps["reference"]
    return p_NV * (log_ratio_NV - (p_NV * log_ratio_NV).sum(1, keepdim=True))


def variance_of_exact(logps: dict[str, Tensor], hidden_NH: Tensor) -> float:
    """The variance between positions of the gradient of the head's weights, over its mean square."""
    gradient_NV, hidden_NH = kl_gradient(logps), hidden_NH.double()
    second = float((gradient_NV.square().sum(1) * hidden_NH.square().sum(1)).mean())
    mean_VH = gradient_NV.t() @ hidden_NH / len(hidden_NH)
    return (second - float(mean_VH.square().sum())) / second


def scaling_study(done: Callable[[], None] = lambda: None) -> pd.DataFrame:
    """One row per sampler, choice of tokens and k (0: nothing but the sampled token)."""
    import pandas as pd

    logps, hidden_NH = distributions()
    size_N, between = hidden_NH.double().square().sum(1), variance_of_exact(logps, hidden_NH)
    kl = float((logps["policy"].exp() * (logps["policy"] - logps["reference"])).sum(1).mean())
    rows = []
    for sampler in ("policy", "sampler"):
        for tokens in ("policy", "reference"):
            for k in (0, *KS):
                figures = head_gradient_figures(logps, size_N, sampler, tokens, k)
                rows.append(
                    {
                        "samples": "on-policy" if sampler == "policy" else "off-policy",
                        "tokens": tokens,
                        "k": k,
                        "kl": kl,
                        **figures,
                        "over_exact": 1 + figures["variance"] / between,
                    }
                )
        done()
    return pd.DataFrame(rows)


# --- cost ------------------------------------------------------------------------------------------------------------
def cost_study(ks: Sequence[int] = COST_KS, done: Callable[[], None] = lambda: None) -> pd.DataFrame:
    """Forward and backward of the head for each request: CPU seconds (the least of some) and peak memory, over exact's.

    The shape is SmolLM2's head (V = 49,152, H = 576). Requests take turns; memory is the peak of a
    process of its own beyond what it had before.
    """
    import pandas as pd

    torch.set_num_threads(1)
    requests = {"log-prob": Wanted(), "exact": Wanted(kl=True)}
    requests |= {f"k = {k}": Wanted(top=((k, "policy"),)) for k in ks}
    inputs, seconds = _head_inputs(), dict.fromkeys(requests, float("inf"))
    for _ in range(REPEATS):
        for name, request in requests.items():
            start = time.process_time()
            _head_step(inputs, request)
            seconds[name] = min(seconds[name], time.process_time() - start)
        done()
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        peaks = dict(zip(requests, pool.map(_peak, requests.values(), chunksize=1), strict=True))
    rows = [
        {
            "request": name,
            "cpu_seconds": seconds[name],
            "time_over_exact": seconds[name] / seconds["exact"],
            "peak_mib": peaks[name],
            "memory_over_exact": peaks[name] / peaks["exact"],
        }
        for name in requests
    ]
    return pd.DataFrame(rows)


def _head_inputs() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    vocabulary, width = 49_152, 576
    weight_VH, ref_weight_VH = (torch.randn(vocabulary, width, generator=generator) * 0.05 for _ in range(2))
    hidden_NH = torch.randn(TIMED_ROWS, width, generator=generator)
    return hidden_NH, weight_VH, ref_weight_VH, torch.randint(vocabulary, (TIMED_ROWS,), generator=generator)


def _head_step(inputs: tuple[Tensor, ...], wanted: Wanted) -> None:
    hidden_NH, weight_VH, ref_weight_VH, ids_N = inputs
    hidden_NH = hidden_NH.clone().requires_grad_(True)
    reference = None
    if wanted != Wanted():
        reference = (hidden_NH.detach(), (ref_weight_VH, None))
    columns = head_columns(
        hidden_NH,
        (weight_VH, None),
        ids_N,
        HeadSettings(temperature=1.0, chunk_elements=TIMED_ROWS // 2 * weight_VH.shape[0]),
        wanted,
        reference=reference,
    )
    sum(columns[name].sum() for name in ("logp", "kl", "top0_logp") if name in columns).backward()


def _peak(request: Wanted) -> float:
    """Peak of the resident memory in a step beyond that before it, in MiB (Linux)."""
    torch.set_num_threads(1)
    inputs = _head_inputs()
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    before = _peak_kib()
    _head_step(inputs, request)
    return (_peak_kib() - before) / 1024


def _peak_kib() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmHWM:")))


# --- the page --------------------------------------------------------------------------------------------------------
def draw(out: Path) -> None:
    """The figure, from the data in ``out``."""
    import pandas as pd

    scaling, cost = pd.read_csv(out / "scaling.csv"), pd.read_csv(out / "cost.csv")
    with figure(out / "topk.svg", 1, 2, 2.6) as (_, ((left, right),)):
        for at, ((samples, tokens), here) in enumerate(scaling[scaling.k > 0].groupby(["samples", "tokens"])):
            left.plot(here.k, here.variance, label=f"{samples}, top-k of the {tokens}", **look(at))
        left.set(xscale="log", yscale="log", xlabel="k", ylabel="variance of a token's\ngradient over |grad KL|²")
        left.legend(fontsize="small")
        timed = cost[cost.request.str.startswith("k = ")]
        k = timed.request.str.removeprefix("k = ").astype(int)
        for at, (column, label) in enumerate((("time_over_exact", "time"), ("memory_over_exact", "peak memory"))):
            right.plot(k, timed[column], label=label, **look(at))
        right.set(xscale="log", xlabel="k", ylabel="head, over exact", ylim=(0, None))
        right.legend(fontsize="small")
        for axes in (left, right):
            plain_ticks(axes.xaxis)


def write_report(forms: pd.DataFrame, scaling: pd.DataFrame, cost: pd.DataFrame, out: Path, *, command: str) -> None:
    """CSV files, figure and README into ``out``; ``command`` is what regenerates them."""
    for name, frame in (("forms", forms), ("scaling", scaling), ("cost", cost)):
        save_csv(frame, out / f"{name}.csv")
    draw(out)
    write_page(out, parts(forms, scaling, cost, command=command))


def parts(forms: pd.DataFrame, scaling: pd.DataFrame, cost: pd.DataFrame, *, command: str) -> list[Any]:
    """The page, of the study's figures."""
    wide = forms.pivot_table(index=["form", "tokens"], columns="regime", values=["bias", "variance"], sort=False)
    wide.columns = [f"{value} {regime.replace('_', '-')}" for value, regime in wide.columns]
    wide = wide[[f"{value} {regime.replace('_', '-')}" for value in ("bias", "variance") for regime in REGIMES]]
    targets = forms.groupby(["form", "tokens"], sort=False).target.agg(", ".join)
    shown = scaling.pivot_table(index="k", columns=["samples", "tokens"], values="variance")
    shown.columns = [f"{samples}, {tokens}" for samples, tokens in shown.columns]
    mass = scaling[(scaling.samples == "on-policy") & (scaling.tokens == "policy")].set_index("k")
    shown = shown.join(mass[["tail_mass", "over_exact", "bias_without_tail"]])
    names = {"tail_mass": "mass outside S", "over_exact": "over exact (on-policy)"}
    names["bias_without_tail"] = "bias without a tail"
    shown = shown.rename(columns=names)
    of_64, over_exact = cost.set_index("request").time_over_exact["k = 64"], shown["over exact (on-policy)"]
    return [
        "# Top-k KL terms",
        "<!-- python research/scripts/stored_tables.py topk -->",
        f"Regenerated by `{command}`. Formulas and proof: [estimators/top_k](../../docs/estimators/top_k.md).",
        f"Where the reference runs beside the policy, `exact` costs {1 / of_64:.2f} times a top-k of 64 and has no "
        "noise at a prefix: use it. `top_k` is for a teacher that sends the log-probs of few tokens. With the sampled "
        f"tail it is unbiased, at {over_exact[64]:.2g} times the variance of `exact` for k = 64, {over_exact[0]:.2g} "
        f"times without top tokens. Without a tail it is {shown['bias without a tail'][64]:.0%} off.",
        "## Bias of every form",
        "In loss, two of five tokens in S, on the trees of `kl-comedy certify` (float64, every completion enumerated). "
        "Target: what is hit on-policy, off-policy and with mixed versions. Bias: relative distance from the gradient "
        "of the KL of each visited prefix (`token_reverse`). Variance: of one completion's gradient, over that of "
        "`exact`. On a vocabulary of five the tail is large; trust the order, not the size.",
        wide.join(targets.rename("target")).reset_index(),
        "## Variance at V = 49,152",
        f"SmolLM2-135M-Instruct at the first {POSITIONS} tokens of `{TEXT}`; reference and sampler are the policy "
        f"with relative noise of {FROM_POLICY['reference']:g} and {FROM_POLICY['sampler']:g} on each weight; the "
        f"reference is {scaling.kl.iloc[0]:.3g} nats a token away. Variance of a token's gradient of the head's "
        "weights with `sampled_tail`, over the mean square of the exact KL's, summed over the vocabulary in float64 "
        "(columns: samples, whose top-k); k = 0 is k2 in loss with the token's ratio. Over exact: the variance of a "
        "token's gradient over that of `exact`, which varies between positions only. Bias without a tail: root mean "
        "square of what the generalized top-k leaves out, over that of the gradient.",
        shown.reset_index(),
        "![Variance and cost against k](topk.svg)",
        "## Cost",
        f"Forward and backward of a head of SmolLM2's shape (V = 49,152, H = 576, random weights, frozen as in LoRA), "
        f"{TIMED_ROWS} positions in two chunks, float32, CPU time of one thread; the least of {REPEATS} turns, all in "
        "one run. Memory: peak beyond inputs. `log-prob` reads no reference. `exact` takes the reference's log-probs "
        "again in the backward pass, a top-k does not. Outside the head a top-k holds k log-probs of each model and k "
        "ids a token; a teacher has to send k log-probs instead of 49,152.",
        cost,
    ]
