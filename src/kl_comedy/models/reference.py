"""Reference policies that KL is measured against. Each has a hash, so that a run can check its identity.

Frozen copy, adapter off, moving average, periodic copy, teacher. A copy shares the parameters the policy does not train
(the base under LoRA). Shape legend as in ``logprobs``.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kl_comedy.errors import UserError, bad_value
from kl_comedy.models.introspection import head_chunk, head_weights, is_peft, is_sharded
from kl_comedy.models.logprobs import token_pass
from kl_comedy.models.sharding import clone_sharded
from kl_comedy.models.types import LoadedModel, PassOptions, ReferencePass, Wanted
from kl_comedy.models.weights import weights_hash

if TYPE_CHECKING:
    from kl_comedy.config.schema import Config


def build_reference(kind: str, loaded: LoadedModel, config: Config, *, teacher: LoadedModel | None = None) -> Reference:
    """The reference ``kind`` (``initial | ema | periodic | teacher``) for a policy that has not been trained yet.

    ``initial`` is the base model under LoRA (adapter off), else a frozen copy; ``teacher`` is the given model itself.
    Raises :class:`UserError` for another name.
    """
    options = PassOptions(
        temperature=config.rollout.temperature,
        chunk_elements=head_chunk(config.model.head_chunk_elements, loaded.device),
        share_prompt=config.model.share_prompt,
    )
    if kind == "initial":
        return Reference(loaded.model, options, adapter_off=is_peft(loaded.model))
    if kind == "ema":
        return MovingReference(loaded.model, options, decay=config.reference.ema_decay)
    if kind == "periodic":
        return MovingReference(
            loaded.model, options, period=config.reference.period, max_kl=config.reference.max_kl or math.inf
        )
    if kind == "teacher" and teacher is not None:
        return Reference(teacher.model, options, copied=False)
    raise bad_value("kl.reference", kind, ("initial", "ema", "periodic", "teacher"))


class Reference:
    """The policy as it was when this object was made: a copy that never trains (``copied=False``: the model itself).

    With ``adapter_off`` it is the base of a LoRA policy: the same module, its adapter disabled for the pass, no second
    model in memory. The hash is of the base weights alone, under the names they had before the adapter was put on.
    """

    moving = False

    def __init__(
        self, model: nn.Module, options: PassOptions, *, adapter_off: bool = False, copied: bool = True
    ) -> None:
        self.model: Any = model if adapter_off or not copied else _frozen_copy(model)
        self._options, self._adapter_off = options, adapter_off
        self._hash: str | None = None

    @property
    def hash(self) -> str:
        """Identity of the current weights."""
        if self._hash is None:
            self._hash = weights_hash(self.model, base_only=self._adapter_off)
        return self._hash

    @torch.no_grad()
    def forward_pass(self, **batch: Tensor) -> ReferencePass:
        """Pass over ``prompt_ids_BP``, ``prompt_mask_BP``, ``ids_BT`` and ``mask_BT``, without gradient."""
        with self.model.disable_adapter() if self._adapter_off else contextlib.nullcontext():
            result = token_pass(self.model, self._options, Wanted(hidden=True), **batch)
        assert result.hidden_NH is not None
        weight, bias = head_weights(self.model)
        head = weight.detach(), None if bias is None else bias.detach()
        temperature = self._options.temperature
        return ReferencePass(logp_BT=result.logp_BT, hidden_NH=result.hidden_NH, head=head, temperature=temperature)


def check_tokens(other: LoadedModel, policy: LoadedModel, key: str, value: str) -> None:
    """Raise :class:`UserError` where a token of one model is not that of the other under the same id."""
    theirs, ours = other.tokenizer.get_vocab(), policy.tokenizer.get_vocab()
    if theirs == ours:
        return
    text = min(dict(theirs.items() ^ ours.items()), key=lambda text: (ours.get(text, math.inf), text))
    ids = [f"token {each[text]}" if text in each else "none" for each in (ours, theirs)]
    why = f"{text!r} is {ids[0]} there and {ids[1]} here, and log-probs of different tokens cannot be compared"
    raise bad_value(key, value, f"a model with the {len(ours)} tokens of {policy.source}", why)


def match_teacher(teacher: LoadedModel, policy: LoadedModel, adapter: str | None = None) -> Any:
    """The teacher's model over the policy's vocabulary, frozen, with its ``adapter`` (a folder) on.

    A larger padded vocabulary is cut to the policy's: ids beyond belong to no token. Raises :class:`UserError` for
    other tokens, a smaller vocabulary, and an adapter that cannot be loaded.
    """
    check_tokens(teacher, policy, "model.source", teacher.source)
    rows, wanted = (head_weights(each.model)[0].shape[0] for each in (teacher, policy))
    if rows < wanted or (rows > wanted and is_sharded(teacher.model)):
        why = "the policy could draw an id that the teacher has no log-prob of" if rows < wanted else ""
        why = why or "a teacher in shards cannot be cut to the policy's vocabulary; save it so"
        raise bad_value("model.source", teacher.source, f"a head of {wanted} rows, not {rows}", why)
    model = teacher.model
    if rows > wanted:
        model.resize_token_embeddings(wanted, mean_resizing=False)
    if adapter is not None:
        from peft import PeftModel

        try:
            model = PeftModel.from_pretrained(model, adapter)
        except Exception as error:  # a missing folder is asked for at the hub; damaged files raise what they trip over
            text = str(error).strip().split("\n")[0] or type(error).__name__
            raise bad_value("model.adapter", adapter, "a folder with a LoRA adapter on source", text) from error
    return model.requires_grad_(False).eval()


def _frozen_copy(model: nn.Module) -> nn.Module:
    """A copy that shares what ``model`` does not train (a sharded copy shares nothing)."""
    if is_sharded(model):
        return clone_sharded(model).requires_grad_(False).eval()
    shared = {id(p): p for p in model.parameters() if not p.requires_grad}
    return copy.deepcopy(model, memo=shared).requires_grad_(False).eval()


class MovingReference(Reference):
    """A copy that follows the policy: ``copy <- decay * copy + (1 - decay) * policy`` after every ``period``-th update.

    Also after an update that measured more than ``max_kl`` (nats a token) to it, as in RPG (2505.17508); with
    ``period`` None only then.

    An average (``decay`` above 0) is stored in float32 at least and rounded to the model's dtype for the pass: bfloat16
    would lose increments below 2^-8 of the weight, float32 loses those below 2^-24 (decays beyond about 0.99999). With
    LoRA the factors A and B are averaged, which is not the average of their product.
    """

    moving = True

    def __init__(
        self,
        model: nn.Module,
        options: PassOptions,
        *,
        decay: float = 0.0,
        period: int | None = 1,
        max_kl: float = math.inf,
    ) -> None:
        super().__init__(model, options)
        self._decay, self._period, self._max_kl = decay, period, max_kl
        copied = dict(self.model.named_parameters())
        self._weights = {name: copied[name] for name, p in model.named_parameters() if p.requires_grad}
        self._average: Mapping[str, Tensor] = self._weights
        if decay:
            self._average = {
                name: weight.to(torch.promote_types(weight.dtype, torch.float32), copy=True)
                for name, weight in self._weights.items()
            }

    @torch.no_grad()
    def update(self, model: nn.Module, step: int, measured_kl: float = 0.0) -> bool:
        """Follow ``model``; called once after every optimizer update, with its number and the KL (nats a token) to this
        reference that it measured. Returns whether the reference moved."""
        if (self._period is None or step % self._period) and not measured_kl > self._max_kl:
            return False
        policy = dict(model.named_parameters())
        for name, average in self._average.items():
            weight = policy[name].to(average.dtype)
            average.lerp_(weight, 1.0 - self._decay) if self._decay else average.copy_(weight)
        self._take_over_average()
        return True

    def _take_over_average(self) -> None:
        for name, weight in self._weights.items():
            weight.copy_(self._average[name])
        self._hash = None

    def state_dict(self) -> dict[str, Any]:
        """``{"weights": name -> tensor}`` of the parameters that the policy trains."""
        return {"weights": {name: average.detach().clone() for name, average in self._average.items()}}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a :meth:`state_dict`. Raises :class:`UserError` when it is of another model."""
        weights = state["weights"]
        differing = sorted(set(weights) ^ set(self._average))[:3]
        if differing:
            raise UserError(f"reference: the saved weights are of another model; they differ in {', '.join(differing)}")
        for name, average in self._average.items():
            average.copy_(weights[name])
        self._take_over_average()
