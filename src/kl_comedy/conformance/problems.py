"""What is wrong with a loss whatever it claims: values that are not finite, dtypes, masked tokens that enter it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from kl_comedy.conformance.batches import Batch, Loss, hole_columns, rounding_of, slope_of
from kl_comedy.conformance.masks import OF_WHOLE_BATCH
from kl_comedy.conformance.results import TOLERANCE32, Result
from kl_comedy.conformance.smallest import batch_lines, small_policy
from kl_comedy.errors import UserError
from kl_comedy.kl.oracle.certificate import BatteryInstance

DTYPES = (torch.float32, torch.bfloat16)
"""What log-probs are in training."""
LARGEST_RATIO_32 = 80.0
"""Log-ratios (nats) up to which values must be finite in float32, which holds numbers up to exp(88)."""
LARGEST_RATIO = 500.0
"""Log-ratios (nats) up to which values must be finite; those of impossible tokens are beyond."""

YOUR_SUM = (
    'right only if YOUR sum over tokens uses the mask: multiply by the mask, or say so with masked_tokens="left_out" '
    "(--masked-tokens left_out)"
)
REPAIRS = {
    "the mask shifted by one token to the left": "the mask is shifted by one token to the left (log-probs and mask "
    "start at different tokens)",
    "the mask shifted by one token to the right": "the mask is shifted by one token to the right (log-probs and mask "
    "start at different tokens)",
    "the mask inverted": "the mask is inverted",
}


def problems_of(
    loss: Loss, results: Sequence[Result], seed: int, *, has_problems: bool, is_first: bool, near_only: bool
) -> dict[str, bool]:
    """What is wrong in a regime whatever the loss claims, and whether only a batch with a prompt shows it.

    ``has_problems``: an earlier regime had some.

    ``is_first``: the regime is the first; dtypes and logits are tried in that one alone. ``near_only``: large
    log-ratios are not shown.
    """
    problems = dict[str, bool]()
    if not has_problems:
        for result in results:
            problems |= dict.fromkeys(_not_finite(loss, result.batch), False)
            # One place is enough: where one value is not finite, many are.
            if problems:
                break
    # One policy is enough for the others: they are mistakes of the loss's code, and show on any log-probs.
    first = results[0]
    if is_first:
        if not problems:
            problems |= dict.fromkeys(_dtype_problems(loss, first.batch), False)
        if not problems and not near_only:
            problems |= dict.fromkeys(_overflows(loss, first.batch), False)
        problems |= dict.fromkeys(_low_precision(loss, first.batch), False)
        problems |= dict.fromkeys(_logit_problems(loss, first.batch), False)
        problems |= dict.fromkeys(_reduction_problems(loss), False)
        problems |= dict.fromkeys(_not_zero_in_padding(loss, first), False)
    if hole_columns(first.batch.step_T):
        within = _leaks(loss, first.batch, first.policy, seed, has_prompt=False)
        problems |= dict.fromkeys(within, False)
        if not within:
            with_prompt = Batch.of(first.policy, seed, has_prompt=True)
            problems |= dict.fromkeys(_leaks(loss, with_prompt, first.policy, seed, has_prompt=True), True)
    return problems


def example_of_problems(loss: Loss, holes_seed: int | None, *, has_prompt: bool) -> str:
    """The completions of two tokens, as a loss with a problem saw them."""
    policy = small_policy("on_policy", 2, 2)
    batch = Batch.of(policy, holes_seed, has_prompt=has_prompt)
    try:
        _, returned = loss(batch)
    except UserError:
        # The loss takes no vocabulary of two tokens; the problem itself is in the report.
        return ""
    title = "smallest batch"
    if holes_seed is not None:
        title += " with masked tokens"
    lines = [f"{title} (on_policy, completions of at most 2 tokens):"]
    lines += batch_lines(batch.tensors, returned.detach())
    return "\n".join(lines)


def _dtype_problems(loss: Loss, batch: Batch) -> list[str]:
    """What a loss does in the dtypes of training that it does not do in float64, near the reference."""
    loss_B, _ = loss(batch)
    slope_BTV = slope_of(loss_B, batch)
    problems = []
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        try:
            rounded_B, _ = loss(_in_dtype(batch, dtype))
            rounded_slope_BTV = slope_of(rounded_B, batch)
        except UserError as error:
            problems.append(f"dtype: in {name}: {error}")
            continue
        is_finite = bool(rounded_B.isfinite().all()) and bool(rounded_slope_BTV.isfinite().all())
        if not is_finite:
            problems.append(f"dtype: in {name} the value or the gradient is not finite, though it is in float64")
            continue
        difference = float((rounded_slope_BTV - slope_BTV).norm())
        # bfloat16 has three digits, and a difference of nearly equal numbers has none: only float32 is compared.
        if dtype == torch.float32 and difference > TOLERANCE32 * float(slope_BTV.norm()):
            problems.append(f"dtype: in {name} the gradient differs from that in float64 by {difference:.2g}")
    return problems


def _overflows(loss: Loss, batch: Batch) -> list[str]:
    """Whether value or gradient are not finite in float32 for log-ratios that float32 can hold."""
    rounded = _in_dtype(batch, torch.float32)
    # The padding keeps its zeros.
    less_BT = (LARGEST_RATIO_32 * batch.tensors["attention_mask"]).to(torch.float32)
    # Log-ratios of both signs. Policy and sampler agree on them.
    for less_likely, sign in ((("ref_logp",), ""), (("logp", "behaviour_logp"), "-")):
        tensors = dict(rounded.tensors)
        for name in less_likely:
            tensors[name] = tensors[name] - less_BT
        extreme = dataclasses.replace(rounded, tensors=tensors)
        extreme_B, _ = loss(extreme)
        slope_BTV = slope_of(extreme_B, extreme)
        if not bool(extreme_B.isfinite().all()) or not bool(slope_BTV.isfinite().all()):
            return [
                f"finite: in float32 the value or the gradient is not finite where logp - ref_logp is about "
                f"{sign}{LARGEST_RATIO_32:g} (exp overflows at 88 nats: compute with log-ratios, or clamp them)"
            ]
    return []


def _low_precision(loss: Loss, batch: Batch) -> list[str]:
    """Whether the loss computes in 16 bits, though its arguments have 64."""
    # Whatever a mode of torch does to a compiled loss is no mistake of that loss.
    with SixteenBits() as mode, contextlib.suppress(UserError):
        loss.value(batch)
    if not mode.dtypes:
        return []
    names = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in mode.dtypes))
    return [f"dtype: it computes in {names}, which has 3 digits, though its arguments are float64 (cast to float32)"]


class SixteenBits(TorchFunctionMode):
    """Notes the 16-bit dtypes of the results of torch's functions."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes = set[torch.dtype]()

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.dtype in (torch.float16, torch.bfloat16):
            self.dtypes.add(result.dtype)
        return result


def _logit_problems(loss: Loss, batch: Batch) -> list[str]:
    """Whether the loss changes with a constant that is added to all logits of a token, which softmax takes away."""
    loss_B, _ = loss(batch)
    for name in ("logits", "ref_logits"):
        shifted = {**batch.tensors, name: batch.tensors[name] + 1.0}
        shifted_B, _ = loss(dataclasses.replace(batch, tensors=shifted))
        relative, absolute = rounding_of(loss_B)
        if not torch.allclose(shifted_B, loss_B, rtol=relative, atol=absolute, equal_nan=True):
            return [
                f"logits: a constant that is added to all {name} of a token changes the loss: log_softmax is missing"
            ]
    return []


def _reduction_problems(loss: Loss) -> list[str]:
    """Whether a scalar is a mean over the tokens of a wrong mask."""
    if loss.reduction is None or not loss.reduction.problem:
        return []
    return [loss.reduction.problem]


def _not_zero_in_padding(loss: Loss, result: Result) -> list[str]:
    """Whether a loss ``[B, T]`` has a value in the padding, which its sum over tokens would hold."""
    value = result.returned.detach()
    if value.dim() != 2 or loss.leaves_masked_out:
        return []
    is_padding_BT = ~result.batch.tensors["attention_mask"]
    in_padding = value[is_padding_BT]
    # What is not finite is a problem of its own.
    if bool((in_padding[in_padding.isfinite()] == 0).all()):
        return []
    return [f"mask: the loss is not zero in the padding: {YOUR_SUM}"]


def _in_dtype(batch: Batch, dtype: torch.dtype) -> Batch:
    """The batch with its log-probs in ``dtype``; they still depend on the leaf in float64."""
    tensors = {}
    for name, tensor in batch.tensors.items():
        if tensor.is_floating_point():
            tensor = tensor.to(dtype)
        tensors[name] = tensor
    return dataclasses.replace(batch, tensors=tensors)


def _not_finite(loss: Loss, batch: Batch) -> list[str]:
    """Where value or gradient are not finite, padding and masked tokens included."""
    mask_BT = batch.tensors["mask"]
    ratio_BT = (batch.tensors["logp"] - batch.tensors["ref_logp"]).detach().abs()
    usual_B = (ratio_BT <= LARGEST_RATIO).all(-1)
    # Where every completion has an impossible token, nothing need be finite.
    if not bool(usual_B.any()):
        return []
    loss_B, returned = loss(batch)
    # Summed over the vocabulary: one number that is not finite makes its token's sum so.
    slope_BT = slope_of(loss_B, batch).sum(-1)
    for name, tensor in (("value", returned.detach()), ("gradient", slope_BT)):
        problem = _describe_not_finite(name, tensor, usual_B, mask_BT)
        if problem is not None:
            return [problem]
    # A mean over the mask of one completion that has no token is 0 / 0 by right; a second completion gives it tokens.
    if len(mask_BT) > 1 and not bool(loss.with_all_masked(batch).isfinite().all()):
        return ["finite: the value is not finite where every token of a completion is masked"]
    return []


def _describe_not_finite(name: str, tensor: Tensor, usual_B: Tensor, mask_BT: Tensor) -> str | None:
    """The first completion in which ``tensor`` (``[B]`` or ``[B, T]``) is not finite; None where it is everywhere."""
    bad = ~torch.isfinite(tensor)
    if bad.dim() == 1:
        bad &= usual_B
    else:
        bad &= usual_B[:, None]
    if not bool(bad.any()):
        return None
    row = int(bad.nonzero()[0][0])
    place = ""
    if bad.dim() == 2:
        columns = [int(column) + 1 for column in bad[row].nonzero()[:, 0]]
        place = f" at {_tokens(columns)}"
        if not bool((bad & mask_BT).any()):
            place += ", which the mask leaves out (inf * 0 is nan: use where)"
    return f"finite: the {name} is not finite{place}, with the mask {_mask_text(mask_BT[row])}"


def _leaks(loss: Loss, batch: Batch, policy: BatteryInstance, seed: int, *, has_prompt: bool) -> list[str]:
    """Masked tokens of a batch that enter the loss: other log-probs there change value or gradient.

    At most one problem, which names all of these tokens. ``has_prompt``: the batch begins with a masked token.
    """
    loss_B, returned = loss(batch)
    slope_BTV = slope_of(loss_B, batch)
    mask_BT = batch.tensors["mask"]
    # A loss that does not read the hole gives the same value up to the rounding of its own precision.
    tolerance = 1e-4
    if loss_B.dtype == torch.float64:
        tolerance = 1e-9
    leaking = []
    # Tokens inside the mask whose gradient changes with a masked one.
    affected = set[int]()
    for column in hole_columns(batch.step_T):
        redrawn = Batch.of(policy, seed, redrawn=column, has_prompt=has_prompt)
        redrawn_B, _ = loss(redrawn)
        change_BT = (slope_of(redrawn_B, redrawn) - slope_BTV).abs().amax(-1) * mask_BT
        is_affected_T = (change_BT > tolerance).any(0)
        has_gradient = bool((slope_BTV[:, column].abs() > 0).any())
        changes_value = bool(((redrawn_B - loss_B).abs() > tolerance).any())
        # A constant at masked tokens changes with nothing, and is summed all the same.
        has_value = returned.dim() == 2 and not loss.leaves_masked_out and bool((returned[:, column] != 0).any())
        if has_gradient or changes_value or has_value or bool(is_affected_T.any()):
            # Tokens are counted from 1 in the report.
            leaking.append(column + 1)
            affected |= {token + 1 for token in is_affected_T.nonzero()[:, 0].tolist()}
    if not leaking:
        return []
    longest = mask_BT[int(mask_BT.sum(-1).argmax())]
    whose = "a tool's reply"
    if has_prompt:
        whose = "a prompt"
    where = f"{_tokens(leaking)}, masked as {whose} is (mask {_mask_text(longest)})"
    if affected:
        effect = f"change the loss, and the gradient of {_tokens(sorted(affected))}"
        return [f"mask: {where}, {effect}: multiply by the mask before every sum over tokens"]
    repair = "multiply by the mask before every sum over tokens"
    if returned.dim() == 2:
        repair = YOUR_SUM
    if not has_prompt:
        repair = _wrong_mask(loss, slope_BTV, batch, repair)
    if returned.dim() == 2:
        return [f"mask: the loss is not zero at {where}: {repair}"]
    return [f"mask: {where}, change the loss: {repair}"]


def _wrong_mask(loss: Loss, slope_BTV: Tensor, batch: Batch, repair: str) -> str:
    """Which mask stands where the mask is meant, from the tokens that have a gradient; ``repair`` where none fits."""
    has_gradient_BT = (slope_BTV != 0).any(-1)
    mask_BT = batch.tensors["mask"]
    attention_BT = batch.tensors["attention_mask"]
    # In the padding, where policy and reference agree, a token has no gradient with or without a mask.
    for words, part in OF_WHOLE_BATCH.items():
        if torch.equal(has_gradient_BT & attention_BT, part(mask_BT, attention_BT) & attention_BT):
            if words in REPAIRS:
                return REPAIRS[words]
            applied = "no mask is applied (take an argument mask)"
            if "attention_mask" in loss.call.names:
                applied = "the attention mask stands where the mask is meant"
            elif {"mask", "labels"} & set(loss.call.names):
                applied = "the mask is not applied"
            return f"{applied}, so that a tool's replies count; {repair}"
    return repair


def _mask_text(mask_T: Tensor) -> str:
    return " ".join(str(int(inside)) for inside in mask_T)


def _tokens(columns: Sequence[int]) -> str:
    numbers = ", ".join(str(column) for column in columns)
    if len(columns) > 1:
        return f"tokens {numbers}"
    return f"token {numbers}"
