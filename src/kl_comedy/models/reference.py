"""Reference policies that KL is measured against. Each has a hash, so that a run can check its identity.

| class | what it is | moves |
|---|---|---|
| :class:`FrozenReference` | a copy of the policy where the run began | no |
| :class:`AdapterOffReference` | the policy's own base weights, LoRA switched off: no second model in memory | no |
| :class:`EmaReference` | exponential moving average of the policy | every update |
| :class:`PeriodicReference` | the policy as it was at the last multiple of the period | every period |

A copy shares the parameters the policy does not train (the base under LoRA). Shape legend as in ``logprobs``.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from kl_comedy.errors import UserError, bad_value
from kl_comedy.models.introspection import Head, head_weights, is_peft, is_sharded
from kl_comedy.models.logprobs import token_pass
from kl_comedy.models.sharding import clone_sharded
from kl_comedy.models.weights import weights_hash

if TYPE_CHECKING:
    from kl_comedy.config.schema import ReferenceConfig
    from kl_comedy.models.load import LoadedModel


@dataclass(frozen=True, kw_only=True)
class ReferencePass:
    """A reference over one batch: log-probs, and what exact KL needs to rebuild its distributions; no gradient.

    ``hidden_NH`` is None unless ``keep_hidden``. ``head`` (weight ``[V, H]``, bias) is not copied: it is valid until
    the reference moves.
    """

    logp_BT: Tensor
    hidden_NH: Tensor | None
    head: Head
    temperature: float


class Reference(Protocol):
    """What a KL term is measured against."""

    moving: bool

    @property
    def hash(self) -> str:
        """Identity of the current weights."""
        ...

    def forward_pass(
        self, *, prompt_ids_BP: Tensor, prompt_mask_BP: Tensor, ids_BT: Tensor, mask_BT: Tensor
    ) -> ReferencePass:
        """Pass the reference over a batch, without gradient."""
        ...


class MovingReference(Reference, Protocol):
    """A reference that follows the policy; ``update`` is called once after every optimizer update."""

    def update(self, model: nn.Module, step: int) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True, kw_only=True)
class PassOptions:
    """Settings of every pass of a reference. They must equal the policy's, or KL compares different things."""

    temperature: float
    chunk_elements: int
    keep_hidden: bool = True
    share_prompt: bool = True


def build_reference(
    kind: str,
    loaded: LoadedModel,
    config: ReferenceConfig,
    *,
    temperature: float,
    chunk_elements: int,
    keep_hidden: bool = True,
    share_prompt: bool = True,
) -> Reference:
    """The reference ``kind`` (``initial | ema | periodic``) for a policy that has not been trained yet.

    ``initial`` is the base model under LoRA (adapter off), else a frozen copy. Raises :class:`UserError` for
    another name.
    """
    options = PassOptions(
        temperature=temperature, chunk_elements=chunk_elements, keep_hidden=keep_hidden, share_prompt=share_prompt
    )
    if kind == "initial":
        return (AdapterOffReference if is_peft(loaded.model) else FrozenReference)(loaded.model, options)
    if kind == "ema":
        return EmaReference(loaded.model, options, decay=config.ema_decay)
    if kind == "periodic":
        return PeriodicReference(loaded.model, options, period=config.period)
    raise bad_value("kl.reference", kind, ("initial", "ema", "periodic"))


def _frozen_copy(model: nn.Module) -> nn.Module:
    """A copy that never trains. Parameters that ``model`` does not train are shared; a sharded copy shares none."""
    if is_sharded(model):
        return clone_sharded(model).requires_grad_(False).eval()
    shared = {id(p): p for p in model.parameters() if not p.requires_grad}
    return copy.deepcopy(model, memo=shared).requires_grad_(False).eval()


@torch.no_grad()
def _reference_pass(model: nn.Module, options: PassOptions, batch: Mapping[str, Tensor]) -> ReferencePass:
    result = token_pass(
        model,
        **batch,
        temperature=options.temperature,
        chunk_elements=options.chunk_elements,
        keep_hidden=options.keep_hidden,
        share_prompt=options.share_prompt,
    )
    weight, bias = head_weights(model)
    head = (weight.detach(), None if bias is None else bias.detach())
    return ReferencePass(logp_BT=result.logp_BT, hidden_NH=result.hidden_NH, head=head, temperature=options.temperature)


class FrozenReference:
    """The policy as it was when this object was made."""

    moving = False

    def __init__(self, model: nn.Module, options: PassOptions) -> None:
        self.model = _frozen_copy(model)
        self._options = options
        self._hash: str | None = None

    @property
    def hash(self) -> str:
        if self._hash is None:
            self._hash = weights_hash(self.model)
        return self._hash

    def forward_pass(self, **batch: Tensor) -> ReferencePass:
        return _reference_pass(self.model, self._options, batch)


class AdapterOffReference:
    """The base model of a LoRA policy: the same module, its adapter disabled for the pass.

    The hash is of the base weights alone, under the names they had before the adapter was put on.
    """

    moving = False

    def __init__(self, model: nn.Module, options: PassOptions) -> None:
        if not is_peft(model):
            raise UserError("reference: the adapter can only be switched off on a model with model.lora")
        self.model: Any = model
        self._options = options
        self._hash: str | None = None

    @property
    def hash(self) -> str:
        if self._hash is None:
            self._hash = weights_hash(self.model, base_only=True)
        return self._hash

    def forward_pass(self, **batch: Tensor) -> ReferencePass:
        with self.model.disable_adapter():
            return _reference_pass(self.model, self._options, batch)


class _UpdatableReference(FrozenReference):
    """A copy of the policy whose trained parameters can be overwritten."""

    moving = True

    def __init__(self, model: nn.Module, options: PassOptions) -> None:
        super().__init__(model, options)
        self._trained_names = [name for name, p in model.named_parameters() if p.requires_grad]

    def _trained_weights(self, model: nn.Module) -> dict[str, Tensor]:
        """The parameters of ``model`` that the policy trains."""
        parameters = dict(model.named_parameters())
        return {name: parameters[name].detach() for name in self._trained_names}

    @torch.no_grad()
    def _overwrite(self, values: Mapping[str, Tensor]) -> None:
        weights = self._trained_weights(self.model)
        if set(values) != set(weights):
            differing = sorted(set(values) ^ set(weights))[:3]
            raise UserError(
                f"reference: the saved weights are of another model (they differ in {', '.join(differing)})"
            )
        for name, weight in weights.items():
            weight.copy_(values[name])
        self._hash = None

    def state_dict(self) -> dict[str, Any]:
        """``{"weights": name -> tensor}`` of the trained parameters."""
        return {"weights": {name: weight.clone() for name, weight in self._trained_weights(self.model).items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a :meth:`state_dict`. Raises :class:`UserError` when it is of another model."""
        self._overwrite(state["weights"])


class EmaReference(_UpdatableReference):
    """``average <- decay * average + (1 - decay) * policy`` after every update; starts at the policy.

    The average is kept in float32 at least and rounded to the model's dtype for the pass: bfloat16 would lose
    increments below 2^-8 of the weight, float32 loses those below 2^-24 (decays beyond about 0.99999). With LoRA
    the factors A and B are averaged, which is not the average of their product.
    """

    def __init__(self, model: nn.Module, options: PassOptions, *, decay: float) -> None:
        if not 0.0 <= decay <= 1.0:
            raise bad_value("reference.ema_decay", decay, "a number from 0 to 1")
        super().__init__(model, options)
        self.decay = decay
        self._average = {
            name: weight.to(torch.promote_types(weight.dtype, torch.float32), copy=True)
            for name, weight in self._trained_weights(self.model).items()
        }

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        """Move toward ``model`` after update number ``step``."""
        for name, weight in self._trained_weights(model).items():
            average = self._average[name]
            average.lerp_(weight.to(average.dtype), 1.0 - self.decay)
        self._overwrite(self._average)

    def state_dict(self) -> dict[str, Any]:
        return {"weights": {name: average.clone() for name, average in self._average.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        for name, average in self._average.items():
            average.copy_(state["weights"][name])


class PeriodicReference(_UpdatableReference):
    """The policy as it was after the last update whose number is a multiple of ``period``."""

    def __init__(self, model: nn.Module, options: PassOptions, *, period: int) -> None:
        if period < 1:
            raise bad_value("reference.period", period, "1 or more")
        super().__init__(model, options)
        self.period = period

    def update(self, model: nn.Module, step: int) -> None:
        """Take over the weights of ``model`` if update number ``step`` completes a period."""
        if step % self.period == 0:
            self._overwrite(self._trained_weights(model))
