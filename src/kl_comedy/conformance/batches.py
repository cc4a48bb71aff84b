"""What a loss is given and what it returns: every completion of a policy as one batch, and the checked call.

Legend: ``B`` completions, ``T`` tokens, ``V`` vocabulary; log-probs in nats.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kl_comedy.conformance.arguments import Call, described_error
from kl_comedy.conformance.reductions import OTHER_MEAN, SUM, Reduction, reductions_of
from kl_comedy.errors import UserError, bad_value
from kl_comedy.kl.oracle.certificate import BatteryInstance
from kl_comedy.kl.oracle.enumeration import Completions

HOLES = ({1: 2, 2: 1}, {2: 1, 3: 2})
"""After how many tokens of a completion, how many masked ones stand, where the completion continues.

For the first policies; later ones get other turns by the seed, so that the first token of a completion is told from
its first turn, and a mask from one that has as many tokens.
"""
PROMPT = {0: 1}
"""The same for a completion behind its prompt."""
CHANGES = "loss_fn: the loss changes from call to call (dropout, noise, a running mean); switch it off"
MIXED = (
    "loss_fn: the loss of several completions is neither the sum nor a mean of those of each alone: completions are "
    "mixed; give the loss before that step"
)
REPEATS = 50
"""Calls before another explanation is given for two values that differ."""
MASKED_TOKENS = ("zero", "left_out", "absent")
"""What :func:`check` is told of the masked tokens within completions."""
IGNORED_LABEL = -100
"""The label of masked tokens, torch's ``ignore_index``."""
REDRAWN_SEED = 500
"""Added to a column's seed for other log-probs in the same hole; larger than any number of columns."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The tensors for a loss: every completion that the sampler can draw, with its probability ``weight_B``.

    ``T`` counts the masked tokens within a completion too: those of an environment, which are tokens of the completion,
    and those of holes, whose log-probs are drawn. ``step_T``: which token of the completion a column holds,
    -1 in a hole. ``full_BTV`` is the leaf that gradients are taken by: the policy's log-probs.
    """

    rows: Completions
    weight_B: Tensor
    step_T: list[int]
    full_BTV: Tensor
    tensors: dict[str, Tensor]

    @classmethod
    def of(
        cls,
        policy: BatteryInstance,
        holes_seed: int | None,
        *,
        number: int = 0,
        redrawn: int | None = None,
        has_prompt: bool = False,
    ) -> Batch:
        """Every completion. ``holes_seed``: of the log-probs in the holes; None for a batch without holes.

        ``number``: of the policy, by which the holes have other places. ``redrawn``: a column in a hole that gets other
        log-probs than the seed alone would give. ``has_prompt``: the holes are one masked token before the completion,
        and none within it.
        """
        instance = policy.instance
        tree = instance.tree
        weight_B = instance.probability(tree.all)
        # What the sampler never draws has no weight in an expectation, and may have log-probs of -inf.
        can_be_drawn_B = weight_B > 0
        rows = tree.all.select(can_be_drawn_B)
        weight_B = weight_B[can_be_drawn_B]

        holes: Mapping[int, int] = {}
        if holes_seed is not None:
            holes = PROMPT
            if not has_prompt:
                holes = _holes(number, holes_seed, tree.length)
        step_T = _steps_with_holes(tree.length, holes)
        columns = token_columns(step_T)

        shape = (len(weight_B), len(step_T))
        has_logp_BT = torch.zeros(shape, dtype=torch.bool)
        has_logp_BT[:, columns] = rows.mask_BT
        inside_BT = has_logp_BT.clone()
        if instance.environment is not None:
            inside_BT[:, columns] &= ~instance.environment.writes_N[rows.prefix_BT]
        token_BT = torch.zeros(shape, dtype=torch.long)
        token_BT[:, columns] = rows.token_BT
        # What torch's and transformers' losses leave out.
        label_BT = torch.where(inside_BT, token_BT, IGNORED_LABEL)
        # Policy, reference and what the sampler recorded.
        logp_3BTV = torch.zeros(3, *shape, tree.vocabulary, dtype=torch.float64)
        tables = (instance.policy_logp(), instance.ref_logp_NV, instance.recorded_logp_NV)
        for number, table_NV in enumerate(tables):
            logp_3BTV[number][:, columns] = table_NV[rows.prefix_BT]

        if holes_seed is not None:
            for column in hole_columns(step_T):
                # A hole stands within a completion; behind the end of a completion is padding.
                continues_B = has_logp_BT[:, column:].any(-1)
                column_seed = holes_seed * 1000 + column
                if column == redrawn:
                    column_seed += REDRAWN_SEED
                drawn_3BV = _drawn_logp(column_seed, completions=len(rows.mask_BT), vocabulary=tree.vocabulary)
                logp_3BTV[:, continues_B, column] = drawn_3BV[:, continues_B]
                has_logp_BT[:, column] = continues_B

        def of_tokens(logp_BTV: Tensor) -> Tensor:
            token_logp_BT = logp_BTV.gather(-1, token_BT[..., None])[..., 0]
            return torch.where(has_logp_BT, token_logp_BT, 0.0)

        full_BTV = logp_3BTV[0].clone().requires_grad_(True)
        # Not the leaf, as in a trainer: torch refuses to change a leaf in place, and would hide that the loss tries to.
        # None of these depends on another one, or `slope_of` would count that part of the derivative twice.
        tensors = {
            "logp": of_tokens(full_BTV),
            "ref_logp": of_tokens(logp_3BTV[1]),
            "behaviour_logp": of_tokens(logp_3BTV[2]),
            "mask": inside_BT,
            "tokens": token_BT,
            "logp_full": full_BTV * 1.0,
            "ref_logp_full": logp_3BTV[1],
            "attention_mask": has_logp_BT,
            "labels": label_BT,
            "logits": full_BTV + _offsets(shape, 0),
            "ref_logits": logp_3BTV[1] + _offsets(shape, 1),
        }
        return cls(rows=rows, weight_B=weight_B, step_T=step_T, full_BTV=full_BTV, tensors=tensors)

    @property
    def trained_BT(self) -> Tensor:
        """The policy's tokens among those of ``rows``: all but those of an environment, ``[B, steps]``."""
        return self.tensors["mask"][:, token_columns(self.step_T)]

    def with_mask(self, mask_BT: Tensor) -> Batch:
        """The batch with another mask, which its labels follow."""
        label_BT = torch.where(mask_BT, self.tensors["tokens"], IGNORED_LABEL)
        return dataclasses.replace(self, tensors={**self.tensors, "mask": mask_BT, "labels": label_BT})


def _holes(number: int, seed: int, length: int) -> Mapping[int, int]:
    """Where the masked tokens of a policy's completions stand: fixed for the first policies, drawn for the others."""
    if number < len(HOLES):
        return HOLES[number]
    generator = torch.Generator().manual_seed(1000 * seed + number)
    places = 1 + torch.randperm(length - 1, generator=generator)[: min(3, length - 1)]
    # One of three places at least: without a masked token a batch would show nothing.
    count = 1 + int(torch.randint(len(places), (1,), generator=generator))
    widths = torch.randint(1, 4, (count,), generator=generator)
    return dict(zip(places[:count].tolist(), widths.tolist(), strict=True))


def _steps_with_holes(length: int, holes: Mapping[int, int]) -> list[int]:
    """Which token of a completion each column holds, -1 for the columns of a hole."""
    step_T: list[int] = []
    for step in range(length):
        step_T += [-1] * holes.get(step, 0)
        step_T.append(step)
    return step_T


def _offsets(shape: tuple[int, int], number: int) -> Tensor:
    """What a token's logits are larger than its log-probs ``[B, T, 1]``: any number, as in a model."""
    generator = torch.Generator().manual_seed(number)
    return torch.randn(*shape, 1, generator=generator, dtype=torch.float64)


def _drawn_logp(seed: int, *, completions: int, vocabulary: int) -> Tensor:
    """Log-probs ``[3, B, V]`` of policy, reference and sampler that are as far apart as policies in training."""
    generator = torch.Generator().manual_seed(seed)
    logits_3BV = torch.randn(3, completions, vocabulary, generator=generator, dtype=torch.float64)
    return (1.5 * logits_3BV).log_softmax(-1)


def token_columns(step_T: Sequence[int]) -> list[int]:
    """The columns that hold tokens of completions, in the order of the tokens."""
    return [column for column, step in enumerate(step_T) if step >= 0]


def hole_columns(step_T: Sequence[int]) -> list[int]:
    """The columns of masked tokens within completions."""
    return [column for column, step in enumerate(step_T) if step < 0]


class Loss:
    """The loss of each completion of a batch, with checks that it is deterministic and of that completion alone.

    ``leaves_masked_out``: whether whoever sums a loss ``[B, T]`` does it over the mask; otherwise over all tokens.
    ``reduction``: how a scalar is made of the losses of completions, None before the first scalar.
    """

    def __init__(self, call: Call, *, leaves_masked_out: bool = False) -> None:
        self.call = call
        self.leaves_masked_out = leaves_masked_out
        self.reduction: Reduction | None = None

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Losses ``[B]``, and what was returned, unreduced. Raises :class:`UserError`; see :func:`check`."""
        first = self._value(batch, slice(0, 1))
        again = self._value(batch, slice(0, 1))
        # nan_to_num, because NaN differs from itself; a NaN is reported as a problem, not as a random loss.
        if not torch.equal(first.nan_to_num(), again.nan_to_num()):
            raise UserError(CHANGES)
        if self._returns_scalar(batch):
            reduction = self._reduction_of(batch)
            # A mean over a wrong mask may depend on the padding too; the report names the mask.
            if not reduction.problem:
                self._check_padding(batch)
            loss_B = self._one_by_one(batch, reduction)
            return loss_B, loss_B
        returned = self._value(batch, slice(None))
        loss_B = self._summed(returned, batch.tensors["mask"])
        for row in (0, len(loss_B) - 1):
            self._check_alone(row, loss_B, batch)
        self._check_padding(batch)
        return loss_B, returned

    def _check_repeats(self, batch: Batch) -> None:
        """Raise :class:`UserError` where one of several calls gives another value: a loss that rarely changes."""
        first = self._value(batch, slice(0, 1)).nan_to_num()
        for _ in range(REPEATS):
            if not torch.equal(self._value(batch, slice(0, 1)).nan_to_num(), first):
                raise UserError(CHANGES)

    def _one_by_one(self, batch: Batch, reduction: Reduction) -> Tensor:
        """Losses ``[B]`` of a function that returns a scalar: that of each completion alone, its mean undone."""
        count_B = reduction.counts(batch.tensors["mask"], batch.tensors["attention_mask"])
        losses = []
        for row, count in enumerate(count_B.tolist()):
            if count == 0:
                # No token is counted, so that alone it is 0 / 0; among others it adds nothing.
                losses.append(torch.zeros((), dtype=torch.float64))
            else:
                losses.append(self._scalar_of([row], batch) * count)
        return torch.stack([loss.to(losses[-1].dtype) for loss in losses])

    def _scalar_of(self, rows: list[int], batch: Batch) -> Tensor:
        """The scalar that the loss returns for some completions, perhaps in the shape (1,)."""
        return self._value(batch, rows).reshape(())

    def _returns_scalar(self, batch: Batch) -> bool:
        # Two completions tell as well: of one, a scalar in the shape (1,) looks like the losses of a batch.
        return self._value(batch, slice(0, 1)).dim() == 0 or self.value(batch).dim() == 0

    def measure_reduction(self, batches: Sequence[Batch]) -> None:
        """Read off how a scalar of several completions is made of that of each, in batches near the reference.

        Farther away gradients lose their digits. Several batches, because in one the turns of completions may be as
        many as the tokens of some mask. Raises :class:`UserError` where the scalar is neither a sum nor a mean.
        """
        if not self._returns_scalar(batches[0]):
            return
        fitting: list[Reduction] | None = None
        for batch in batches:

            def measure(rows: list[int], batch: Batch = batch) -> Tensor:
                return slope_of(self._scalar_of(rows, batch).reshape(1), batch)

            here = reductions_of(measure, batch.tensors["mask"], batch.tensors["attention_mask"])
            if here is None:
                # Without a gradient nothing is optimized, however it is summed.
                continue
            if not here:
                self._check_repeats(batch)
                raise UserError(MIXED)
            if fitting is not None:
                here = [reduction for reduction in fitting if reduction in here]
            fitting = here
        if fitting is not None and not fitting:
            raise UserError(OTHER_MEAN)
        if fitting:
            self.reduction = fitting[0]

    def _reduction_of(self, batch: Batch) -> Reduction:
        """The reduction, of which the batch must be one more example."""
        if self.reduction is None:
            self.measure_reduction([batch])
        else:
            self._check_pair(batch, self.reduction)
        return self.reduction or SUM

    def _check_pair(self, batch: Batch, reduction: Reduction) -> None:
        """Raise :class:`UserError` where the value for two completions is not made of theirs as in the first batch."""
        if reduction.problem:
            return
        mask_BT = batch.tensors["mask"]
        tokens_B = mask_BT.sum(-1)
        pair = [int(tokens_B.argmin()), int(tokens_B.argmax())]
        if len(set(pair)) < 2:
            return
        alone_2 = torch.stack([self._scalar_of([row], batch).detach() for row in pair]).double()
        together = self._scalar_of(pair, batch).detach().double()
        if not bool(torch.cat([alone_2, together[None]]).isfinite().all()):
            return
        count_2 = reduction.counts(mask_BT, batch.tensors["attention_mask"])[pair].double()
        total = 1.0
        if not reduction.is_sum:
            total = float(count_2.sum())
        parts_2 = alone_2 * count_2 / total
        relative, absolute = rounding_in(batch, self._scalar_of(pair, batch))
        # Relative to the parts, which may cancel in the sum.
        largest = absolute + relative * float(parts_2.abs().sum())
        if float((together - parts_2.sum()).abs()) > largest:
            self._check_repeats(batch)
            raise UserError(MIXED)

    def _check_alone(self, row: int, loss_B: Tensor, batch: Batch) -> None:
        """Raise :class:`UserError` where a completion alone has another loss than among the others."""
        rows = slice(row, row + 1)
        alone_B = self._summed(self._value(batch, rows), batch.tensors["mask"][rows])
        relative, absolute = rounding_in(batch, loss_B)
        if not torch.allclose(alone_B, loss_B[rows], rtol=relative, atol=absolute, equal_nan=True):
            self._check_repeats(batch)
            raise UserError(
                "loss_fn: the loss of a completion changes with the others in its batch; return it unreduced"
            )

    def value(self, batch: Batch) -> Tensor:
        """What the loss returns for the first two completions, unchecked but for its shape."""
        return self._value(batch, slice(0, 2))

    def with_all_masked(self, batch: Batch) -> Tensor:
        """The value for two completions, of which the first has no token in the mask."""
        mask_BT = batch.tensors["mask"].clone()
        mask_BT[0] = False
        return self._value(batch.with_mask(mask_BT), slice(0, 2)).detach()

    def value_of_tokens(self, batch: Batch, returned: Tensor) -> Tensor | None:
        """The value of each token ``[B, T]``; None where the loss of a completion is not a sum over its tokens.

        A loss that does not return it is called with a mask of one token at a time.
        """
        if returned.dim() == 2:
            return returned
        mask_BT = batch.tensors["mask"]
        value_BT = torch.zeros(mask_BT.shape, dtype=torch.float64)
        for column in token_columns(batch.step_T):
            alone_BT = torch.zeros_like(mask_BT)
            alone_BT[:, column] = mask_BT[:, column]
            one_token = batch.with_mask(alone_BT)
            # 1 for a loss that returns no scalar.
            count_B = (self.reduction or SUM).counts(alone_BT, batch.tensors["attention_mask"])
            for row in alone_BT[:, column].nonzero()[:, 0].tolist():
                value = self._value(one_token, slice(row, row + 1))
                value_BT[row, column] = float(value.detach().sum() * count_B[row])
        if not torch.allclose(value_BT.sum(-1), returned.double(), rtol=1e-4, atol=1e-6):
            return None
        return value_BT

    def with_swapped_arguments(self, batch: Batch) -> Tensor | None:
        """The losses ``[B]`` with policy and reference exchanged; None where the loss cannot be called so."""
        tensors = dict(batch.tensors)
        for policy_name, ref_name in (("logp", "ref_logp"), ("logp_full", "ref_logp_full"), ("logits", "ref_logits")):
            tensors[policy_name] = batch.tensors[ref_name]
            tensors[ref_name] = batch.tensors[policy_name]
        return self._with_tensors(batch, tensors)

    def with_other_reference(self, batch: Batch) -> Tensor | None:
        """The losses ``[B]`` with log-probs of a reference that is not theirs; None where it cannot be called so."""
        tensors = dict(batch.tensors)
        for name in ("ref_logp", "ref_logp_full", "ref_logits"):
            tensors[name] = 1.5 * batch.tensors[name]
        return self._with_tensors(batch, tensors)

    def _with_tensors(self, batch: Batch, tensors: dict[str, Tensor]) -> Tensor | None:
        try:
            loss_B, _ = self(dataclasses.replace(batch, tensors=tensors))
        except UserError:
            return None
        return loss_B

    def _value(self, batch: Batch, rows: slice | list[int], columns: slice = slice(None)) -> Tensor:
        """What the loss returns for some completions: ``[B, T]``, ``[B]`` or a scalar, also one in the shape (1,).

        Raises :class:`UserError` for any other result, and for a loss that changes its arguments.
        """
        given = {name: batch.tensors[name][rows, columns] for name in self.call.names}
        # A loss that writes into its arguments would change what the later calls of this check are given.
        before = {name: tensor.detach().clone() for name, tensor in given.items()}
        value = self.call(given)
        for name, tensor in given.items():
            if not torch.equal(tensor.detach(), before[name]):
                raise UserError(f"loss_fn: it changes its argument {name} in place; work on a copy")
        allowed = "a tensor [B, T], [B], or a scalar"
        if not isinstance(value, Tensor):
            raise bad_value("loss_fn", type(value).__name__, allowed, "what it returns")
        if value.is_meta or value.is_complex():
            raise bad_value("loss_fn", f"a tensor of {value.dtype} on {value.device}", allowed, "what it returns")
        # A loss may compute on a device of its own.
        value = value.cpu()
        shape_BT = batch.tensors["mask"][rows, columns].shape
        # One number for several completions is a scalar in any shape, as torch's backward takes it.
        if shape_BT[0] > 1 and value.numel() == 1:
            value = value.reshape(())
        if value.shape not in ((), shape_BT[:1], shape_BT):
            raise bad_value("loss_fn", tuple(value.shape), allowed, "what it returns")
        return value

    def _summed(self, value: Tensor, mask_BT: Tensor) -> Tensor:
        """A value ``[B, T]`` as its caller sums it over tokens; others as they are."""
        if self.leaves_masked_out:
            return _summed_over(mask_BT, value)
        return _summed_over(torch.ones_like(mask_BT), value)

    def _check_padding(self, batch: Batch) -> None:
        """Raise :class:`UserError` where the padding behind a completion changes its loss."""
        mask_BT = batch.tensors["mask"]
        # What is attended to, and not the mask: a reply of an environment may be the last of a completion.
        length_B = batch.tensors["attention_mask"].sum(-1)
        row = int(length_B.argmin())
        length = int(length_B[row])
        rows = slice(row, row + 1)
        columns = slice(0, length)
        with_padding = self._value(batch, rows)
        # What a loss [B, T] has in the padding itself is a problem of the report, which says whose sum it spoils.
        padded = _summed_over(mask_BT[rows], with_padding).detach().reshape(-1)
        without_padding = self._value(batch, rows, columns)
        cut_off = _summed_over(mask_BT[rows, columns], without_padding).detach().reshape(-1)
        relative, absolute = rounding_in(batch, padded)
        agree = torch.allclose(cut_off, padded, rtol=relative, atol=absolute, equal_nan=True)
        # A value that is not finite is a problem of its own, which the report names.
        if not agree and bool(padded.isfinite().all()):
            self._check_repeats(batch)
            raise UserError(
                f"loss_fn: the loss depends on the padding: with {length} tokens it is {float(cut_off):.4g} in "
                f"{length} columns and {float(padded):.4g} in {mask_BT.shape[1]}; multiply by the mask, and divide by "
                "its tokens"
            )


def _summed_over(mask_BT: Tensor, value: Tensor) -> Tensor:
    """A value ``[B, T]`` summed over some tokens; others as they are."""
    if value.dim() != 2:
        return value
    # Not a product with the mask: inf * 0 would be NaN.
    return torch.where(mask_BT, value, 0.0).sum(-1)


def rounding_in(batch: Batch, value: Tensor) -> tuple[float, float]:
    """The rounding of a value, or of the log-probs that it was computed from where theirs is larger."""
    return max(rounding_of(value), rounding_of(batch.tensors["logp"]))


def rounding_of(value: Tensor) -> tuple[float, float]:
    """The relative and the absolute difference that sums in another order may have, by the dtype."""
    if value.dtype in (torch.bfloat16, torch.float16):
        return 0.1, 0.05
    return 1e-4, 1e-6


def slope_of(loss_B: Tensor, batch: Batch) -> Tensor:
    """The derivative of the losses by all log-probs, ``[B, T, V]``."""
    if not loss_B.requires_grad:
        return torch.zeros_like(batch.full_BTV)
    # A completion's loss reads its own log-probs alone, so the gradient of the sum holds that of each.
    total = loss_B.double().sum()
    differentiable = [tensor for tensor in batch.tensors.values() if tensor.requires_grad]
    try:
        # Without retain_graph, which compiled losses refuse.
        gradients = torch.autograd.grad(total, differentiable, allow_unused=True, materialize_grads=True)
    except Exception as error:
        raise UserError(f"loss_fn: its backward raised {described_error(error)}") from error
    # By the chain rule, as one sum: given gradients of several tensors, torch would import sympy, half a second.
    pairs = zip(differentiable, gradients, strict=True)
    chained = torch.stack([(tensor * gradient).sum() for tensor, gradient in pairs]).sum()
    # The graph from the leaf to the batch is kept: the next call of the loss gets the same tensors.
    (slope_BTV,) = torch.autograd.grad(chained, batch.full_BTV, retain_graph=True)
    return slope_BTV
