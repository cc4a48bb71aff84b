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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kl_comedy.errors import UserError
from kl_comedy.kl import REGIMES, KLTerm
from kl_comedy.kl.estimators import TOP_K_FORMS, TopRequest
from kl_comedy.kl.oracle.certificate import certify
from kl_comedy.models.head import HeadSettings, head_columns
from kl_comedy.models.introspection import decoder_body
from kl_comedy.models.types import Wanted
from kl_comedy.results.figures import legend_below, plain_ticks
from kl_comedy.results.looks import family_look
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
TIMED_ROWS = 128
REPEATS = 3


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
    # Certificates of a top-k term are made on trees of their own. A term of weight 0 beside the others puts them there.
    silent_top_k = KLTerm("top_k", placement="loss", beta=0.0)
    exact_variance: dict[str, float] = {}
    rows = []
    for (form, tokens), term in terms.items():
        certified = (term,) if term.top else (term, silent_top_k)
        for certificate in certify(form, certified):
            # `exact` is the first term.
            exact_variance.setdefault(certificate.regime, certificate.variance)
            rows.append(
                {
                    "form": form,
                    "tokens": tokens,
                    "regime": certificate.regime,
                    "target": certificate.target or "-",
                    "bias": certificate.relative_bias["token_reverse"],
                    "cosine": certificate.cosine["token_reverse"],
                    "variance": certificate.variance / exact_variance[certificate.regime],
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
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    ids = tokenizer(TEXT.read_text(), return_tensors="pt").input_ids[:, :positions]

    logps = {}
    with torch.no_grad():
        logps["policy"] = _next_logps(policy, ids)
        hidden_NH = decoder_body(policy)(ids).last_hidden_state[0]
        # Seed 0 would be the policy's, which has no noise.
        for seed, (name, noise) in enumerate(FROM_POLICY.items(), start=1):
            model = copy.deepcopy(policy)
            generator = torch.Generator().manual_seed(seed)
            for weight in model.parameters():
                weight.mul_(1 + noise * torch.randn(weight.shape, generator=generator))
            logps[name] = _next_logps(model, ids)
    return logps, hidden_NH


def _next_logps(model: Any, ids: Tensor) -> Tensor:
    """Log-probs ``[N, V]`` in float64."""
    logps: Tensor = model(ids).logits[0].double().log_softmax(-1)
    return logps


def head_gradient_figures(
    logps: dict[str, Tensor], size_N: Tensor, sampler: str, tokens: str, k: int
) -> dict[str, float]:
    """Means over positions for ``sampled_tail``: mass outside S; variance and, without the tail, bias.

    Both are of the gradient of the head's weights, whose square at a position is that of the logits' gradient times
    ``size_N``, the square of the hidden state; over that of the exact KL. ``sampler`` names who draws the token,
    ``tokens`` whose top ``k`` are S.
    """
    logp_NV = logps["policy"]
    ref_NV = logps["reference"]
    p_NV = logp_NV.exp()
    outside_NV = torch.ones_like(p_NV)
    if k:
        chosen_by_NV = logp_NV if tokens == "policy" else ref_NV
        outside_NV.scatter_(1, chosen_by_NV.topk(k).indices, 0.0)

    # sum_v mu_v (rho_v l_v)^2 |s_v|^2 over the tail, with mu rho^2 = p^2 / mu and |s_v|^2 = 1 - 2 p_v + |p|^2
    weight_NV = outside_NV * p_NV * (logp_NV - ref_NV)
    score_square_NV = 1 - 2 * p_NV + p_NV.square().sum(1, keepdim=True)
    second_N = (weight_NV.square() / logps[sampler].exp() * score_square_NV).sum(1)
    # |sum_v p_v l_v s_v|^2, with s_v = 1_v - p
    tail_N = (weight_NV - p_NV * weight_NV.sum(1, keepdim=True)).square().sum(1)
    exact_square = float((kl_gradient(logps).square().sum(1) * size_N).mean())
    return {
        "tail_mass": float((outside_NV * p_NV).sum(1).mean()),
        "variance": float(((second_N - tail_N) * size_N).mean()) / exact_square,
        "bias_without_tail": (float((tail_N * size_N).mean()) / exact_square) ** 0.5,
    }


def kl_gradient(logps: dict[str, Tensor]) -> Tensor:
    """The gradient of the exact KL with respect to the logits, ``[N, V]``."""
    p_NV = logps["policy"].exp()
    log_ratio_NV = logps["policy"] - logps["reference"]
    # p (log p - log q - KL)
    kl_N1 = (p_NV * log_ratio_NV).sum(1, keepdim=True)
    return p_NV * (log_ratio_NV - kl_N1)


def variance_of_exact(logps: dict[str, Tensor], hidden_NH: Tensor) -> float:
    """The variance between positions of the gradient of the head's weights, over its mean square."""
    gradient_NV = kl_gradient(logps)
    hidden_NH = hidden_NH.double()
    # A position's gradient is the outer product of both, whose square is the product of their squares.
    second = float((gradient_NV.square().sum(1) * hidden_NH.square().sum(1)).mean())
    mean_VH = gradient_NV.t() @ hidden_NH / len(hidden_NH)
    return (second - float(mean_VH.square().sum())) / second


def scaling_study(done: Callable[[], None] = lambda: None) -> pd.DataFrame:
    """One row per sampler, choice of tokens and k (0: the sampled token alone)."""
    import pandas as pd

    logps, hidden_NH = distributions()
    size_N = hidden_NH.double().square().sum(1)
    between_positions = variance_of_exact(logps, hidden_NH)
    kl = float((logps["policy"].exp() * (logps["policy"] - logps["reference"])).sum(1).mean())
    rows = []
    for sampler, samples in (("policy", "on-policy"), ("sampler", "off-policy")):
        for tokens in ("policy", "reference"):
            for k in (0, *KS):
                figures = head_gradient_figures(logps, size_N, sampler, tokens, k)
                rows.append(
                    {
                        "samples": samples,
                        "tokens": tokens,
                        "k": k,
                        "kl": kl,
                        **figures,
                        "over_exact": 1 + figures["variance"] / between_positions,
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
    for k in ks:
        requests[f"k = {k}"] = Wanted(top=(TopRequest(k, "policy"),))
    seconds = _least_seconds(requests, done)
    # A new process per request: what an earlier one allocated would hide in the resident memory.
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        peaks = dict(zip(requests, pool.map(_peak, requests.values(), chunksize=1), strict=True))

    rows = []
    for name in requests:
        rows.append(
            {
                "request": name,
                "cpu_seconds": seconds[name],
                "time_over_exact": seconds[name] / seconds["exact"],
                "peak_mib": peaks[name],
                "memory_over_exact": peaks[name] / peaks["exact"],
            }
        )
    return pd.DataFrame(rows)


def _least_seconds(requests: Mapping[str, Wanted], done: Callable[[], None]) -> dict[str, float]:
    """The least CPU time of each request over :data:`REPEATS` turns, in which a busy machine slows all alike."""
    inputs = _head_inputs()
    seconds = dict.fromkeys(requests, float("inf"))
    for _ in range(REPEATS):
        for name, request in requests.items():
            started = time.process_time()
            _head_step(inputs, request)
            seconds[name] = min(seconds[name], time.process_time() - started)
        done()
    return seconds


def _head_inputs() -> tuple[Tensor, ...]:
    """Hidden states, weights of policy and reference, token ids."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = 49_152
    width = 576
    weight_VH = torch.randn(vocabulary, width, generator=generator) * 0.05
    ref_weight_VH = torch.randn(vocabulary, width, generator=generator) * 0.05
    hidden_NH = torch.randn(TIMED_ROWS, width, generator=generator)
    ids_N = torch.randint(vocabulary, (TIMED_ROWS,), generator=generator)
    return hidden_NH, weight_VH, ref_weight_VH, ids_N


def _head_step(inputs: tuple[Tensor, ...], wanted: Wanted) -> None:
    hidden_NH, weight_VH, ref_weight_VH, ids_N = inputs
    """One forward and backward pass."""
    hidden_NH = hidden_NH.clone().requires_grad_(True)
    reference = None
    if wanted != Wanted():
        reference = (hidden_NH.detach(), (ref_weight_VH, None))
    # Two chunks, as a longer batch would have several.
    settings = HeadSettings(temperature=1.0, chunk_elements=TIMED_ROWS // 2 * weight_VH.shape[0])
    columns = head_columns(hidden_NH, (weight_VH, None), ids_N, settings, wanted, reference=reference)
    loss = columns["logp"].sum()
    for name in ("kl", "top0_logp"):
        if name in columns:
            loss = loss + columns[name].sum()
    loss.backward()


def _peak(request: Wanted) -> float:
    """Peak of the resident memory in a step beyond that before it, in MiB (Linux)."""
    torch.set_num_threads(1)
    inputs = _head_inputs()
    # Sets the peak back to what is resident now (proc(5)).
    Path("/proc/self/clear_refs").write_text("5")
    before = _peak_kib()
    _head_step(inputs, request)
    return (_peak_kib() - before) / 1024


def _peak_kib() -> int:
    """The peak of the resident memory of this process."""
    status = Path("/proc/self/status").read_text()
    for line in status.splitlines():
        name, _, value = line.partition(":")
        if name == "VmHWM":
            return int(value.split()[0])
    raise UserError("/proc/self/status has no VmHWM: peaks of memory are measured on Linux only")


# --- the page --------------------------------------------------------------------------------------------------------
def draw(out: Path) -> None:
    """The figure, from the data in ``out``."""
    import pandas as pd

    scaling = pd.read_csv(out / "scaling.csv")
    cost = pd.read_csv(out / "cost.csv")
    # k = 0 has no place on a logarithmic axis.
    curves = scaling[scaling.k > 0].groupby(["samples", "tokens"])
    timed = cost[cost.request.str.startswith("k = ")]
    k = timed.request.str.removeprefix("k = ").astype(int)
    style = family_look("top_k_reverse_token in loss").of_line()
    with figure(out / "topk.svg", 1, 2, 2.6) as (drawing, ((left, right),)):
        # One KL family: its lines differ in line style, and in the shape and fill of their marks.
        for (samples, tokens), rows in curves:
            on_policy = {"marker": "s", "fillstyle": "full"}
            off_policy = {"marker": "o", "fillstyle": "none"}
            marks = on_policy if samples == "on-policy" else off_policy
            dash = "-" if tokens == "policy" else "--"
            label = f"left: {samples}, top-k of the {tokens}"
            left.plot(rows.k, rows.variance, label=label, **style | marks | {"linestyle": dash})
        left.set(xscale="log", yscale="log", xlabel="k (log axis)")
        left.set_ylabel("variance of a token's gradient\nover |grad KL|² (log axis)")
        right.plot(k, timed.time_over_exact, label="right: time", **style | {"marker": "v", "linestyle": "-"})
        memory = {"marker": "^", "linestyle": "-."}
        right.plot(k, timed.memory_over_exact, label="right: peak memory", **style | memory)
        right.set(xscale="log", xlabel="k (log axis)", ylabel="head, over that of exact KL", ylim=(0, None))
        for axes in (left, right):
            plain_ticks(axes.xaxis)
        plain_ticks(left.yaxis)
        legend_below(drawing, "top-k KL in loss; one policy (n=1)")


def write_report(forms: pd.DataFrame, scaling: pd.DataFrame, cost: pd.DataFrame, out: Path, *, command: str) -> None:
    """Write CSV files, figure and README into ``out``; ``command`` is what regenerates them."""
    save_csv(forms, out / "forms.csv")
    save_csv(scaling, out / "scaling.csv")
    save_csv(cost, out / "cost.csv")
    draw(out)
    write_page(out, parts(forms, scaling, cost, command=command))


def parts(forms: pd.DataFrame, scaling: pd.DataFrame, cost: pd.DataFrame, *, command: str) -> list[Any]:
    """The page, from the study's figures."""
    variance = _variance_table(scaling)
    over_exact = variance["over exact (on-policy)"]
    exact_over_64 = 1 / cost.set_index("request").time_over_exact["k = 64"]
    return [
        "# Top-k KL terms",
        "<!-- python research/scripts/stored_tables.py topk -->",
        f"Regenerated by `{command}`. Formulas and proof: [estimators/top_k](../../docs/estimators/top_k.md).",
        f"Where the reference runs beside the policy, `exact` costs {exact_over_64:.2f} times a top-k of 64 and has no "
        "noise at a prefix: use it. `top_k` is for a teacher that sends the log-probs of few tokens. With the sampled "
        f"tail it is unbiased, at {over_exact[64]:.2g} times the variance of `exact` for k = 64, {over_exact[0]:.2g} "
        f"times without top tokens. Without a tail it is {variance['bias without a tail'][64]:.0%} off.",
        "## Bias of every form",
        "In loss, two of five tokens in S, on the trees of `kl-comedy certify` (float64, every completion enumerated). "
        "Target: what is hit on-policy, off-policy and with mixed versions. Bias: relative distance from the gradient "
        "of the KL of each visited prefix (`token_reverse`). Variance: of one completion's gradient, over that of "
        "`exact`. On a vocabulary of five the tail is large; trust the order, not the size.",
        _bias_table(forms),
        "## Variance at V = 49,152",
        f"SmolLM2-135M-Instruct at the first {POSITIONS} tokens of `{TEXT}`; reference and sampler are the policy "
        f"with relative noise of {FROM_POLICY['reference']:g} and {FROM_POLICY['sampler']:g} on each weight; the "
        f"reference is {scaling.kl.iloc[0]:.3g} nats per token away. Variance of a token's gradient of the head's "
        "weights with `sampled_tail`, over the mean square of the exact KL's, summed over the vocabulary in float64 "
        "(columns: samples, whose top-k); k = 0 is k2 in loss with the token's ratio. Over exact: the variance of a "
        "token's gradient over that of `exact`, which varies between positions only. Bias without a tail: root mean "
        "square of what the generalized top-k leaves out, over that of the gradient.",
        variance.reset_index(),
        "![Variance and cost against k](topk.svg)",
        "## Cost",
        f"Forward and backward of a head of SmolLM2's shape (V = 49,152, H = 576, random weights, frozen as in LoRA), "
        f"{TIMED_ROWS} positions in two chunks, float32, CPU time of one thread; the least of {REPEATS} turns, all in "
        "one run. Memory: peak beyond inputs. `log-prob` reads no reference. `exact` takes the reference's log-probs "
        "again in the backward pass, a top-k does not. Outside the head a top-k holds k log-probs of each model and k "
        "ids per token; a teacher has to send k log-probs instead of 49,152.",
        cost,
    ]


def _bias_table(forms: pd.DataFrame) -> pd.DataFrame:
    """A row per form and choice of tokens: bias and variance by regime, and the targets."""
    wide = forms.pivot_table(index=["form", "tokens"], columns="regime", values=["bias", "variance"], sort=False)
    # pandas orders the columns by the alphabet; the page by value, and then by regime.
    ordered = [(value, regime) for value in ("bias", "variance") for regime in REGIMES]
    wide = wide[ordered]
    wide.columns = [f"{value} {regime.replace('_', '-')}" for value, regime in ordered]
    targets = forms.groupby(["form", "tokens"], sort=False).target.agg(", ".join)
    return wide.join(targets.rename("target")).reset_index()


def _variance_table(scaling: pd.DataFrame) -> pd.DataFrame:
    """A row per k: variance by sampler and choice of tokens, and what is measured of the policy's own top-k."""
    table = scaling.pivot_table(index="k", columns=["samples", "tokens"], values="variance")
    table.columns = [f"{samples}, {tokens}" for samples, tokens in table.columns]
    of_policy = scaling[(scaling.samples == "on-policy") & (scaling.tokens == "policy")].set_index("k")
    titles = {
        "tail_mass": "mass outside S",
        "over_exact": "over exact (on-policy)",
        "bias_without_tail": "bias without a tail",
    }
    return table.join(of_policy[list(titles)]).rename(columns=titles)
