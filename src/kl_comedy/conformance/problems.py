"""What is wrong with a loss whatever it claims: values that are not finite, dtypes, masked tokens that enter it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from kl_comedy.conformance.batches import Batch, Loss, hole_columns, slope_of
from kl_comedy.conformance.results import TOLERANCE32, Result
from kl_comedy.conformance.smallest import batch_lines, small_policy
from kl_comedy.errors import UserError
from kl_comedy.kl.oracle.certificate import BatteryInstance

DTYPES = (torch.float32, torch.bfloat16)
"""What log-probs are in training."""
LARGEST_RATIO = 500.0
"""Log-ratios (nats) up to which values must be finite; those of impossible tokens are beyond."""


def problems_of(
    loss: Loss, results: Sequence[Result], seed: int, *, has_problems: bool, is_first: bool
) -> dict[str, None]:
    """What is wrong in a regime whatever the loss claims. ``has_problems``: an earlier regime had some.

    ``is_first``: the regime is the first; dtypes are tried in that one alone.
    """
    problems = dict[str, None]()
    if not has_problems:
        for result in results:
            problems |= dict.fromkeys(_not_finite(loss, result.batch))
            # One place is enough: where one value is not finite, many are.
            if problems:
                break
    # One policy is enough for the others: they are mistakes of the loss's code, and show on any log-probs.
    first = results[0]
    if is_first and not problems:
        problems |= dict.fromkeys(_dtype_problems(loss, first.batch))
    problems |= dict.fromkeys(_leaks(loss, first.batch, first.policy, seed))
    return problems


def example_of_problems(loss: Loss, holes_seed: int | None) -> str:
    """The completions of two tokens, as a loss with a problem saw them."""
    policy = small_policy("on_policy", 2, 2)
    batch = Batch.of(policy, holes_seed)
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


def _leaks(loss: Loss, batch: Batch, policy: BatteryInstance, seed: int) -> list[str]:
    """Masked tokens within completions that enter the loss: other log-probs there change value or gradient.

    At most one problem, which names all of these tokens; none for a batch without holes.
    """
    columns = hole_columns(batch.step_T)
    if not columns:
        return []
    loss_B, _ = loss(batch)
    slope_BTV = slope_of(loss_B, batch)
    mask_BT = batch.tensors["mask"]
    # A loss that does not read the hole gives the same value up to the rounding of its own precision.
    tolerance = 1e-4
    if loss_B.dtype == torch.float64:
        tolerance = 1e-9
    leaking = []
    # Tokens inside the mask whose gradient changes with a masked one.
    affected = set[int]()
    for column in columns:
        redrawn = Batch.of(policy, seed, redrawn=column)
        redrawn_B, _ = loss(redrawn)
        change_BT = (slope_of(redrawn_B, redrawn) - slope_BTV).abs().amax(-1) * mask_BT
        is_affected_T = (change_BT > tolerance).any(0)
        has_gradient = bool((slope_BTV[:, column].abs() > 0).any())
        changes_value = bool(((redrawn_B - loss_B).abs() > tolerance).any())
        if has_gradient or changes_value or bool(is_affected_T.any()):
            # Tokens are counted from 1 in the report.
            leaking.append(column + 1)
            affected |= {token + 1 for token in is_affected_T.nonzero()[:, 0].tolist()}
    if not leaking:
        return []
    longest = mask_BT[int(mask_BT.sum(-1).argmax())]
    effect = "change the loss"
    if affected:
        effect += f", and the gradient of {_tokens(sorted(affected))}"
    return [
        f"mask: {_tokens(leaking)}, masked as a tool's reply is (mask {_mask_text(longest)}), {effect}: multiply "
        "by the mask before every sum over tokens (take an argument mask if there is none)"
    ]


def _mask_text(mask_T: Tensor) -> str:
    return " ".join(str(int(inside)) for inside in mask_T)


def _tokens(columns: Sequence[int]) -> str:
    numbers = ", ".join(str(column) for column in columns)
    if len(columns) > 1:
        return f"tokens {numbers}"
    return f"token {numbers}"
