"""Reference policies that KL is measured against. Each has a hash, so that a run can check its identity.

A reference is a frozen copy of the policy, the policy with its adapter off, a moving average, a periodic copy, the past
policies that drew the samples, or a teacher. A copy shares the parameters that the policy does not train (the base
under LoRA). Shape legend as in :mod:`kl_comedy.models.logprobs`.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kl_comedy.config.combinations import updates_from_a_batch, versions_of_samples
from kl_comedy.errors import UserError, bad_value
from kl_comedy.models.introspection import head_chunk, head_weights, is_peft, is_sharded
from kl_comedy.models.logprobs import token_pass
from kl_comedy.models.sharding import clone_sharded
from kl_comedy.models.sources import first_line
from kl_comedy.models.types import LoadedModel, PassOptions, ReferencePass, Wanted
from kl_comedy.models.weights import weights_hash
from kl_comedy.records import ModelRows

if TYPE_CHECKING:
    from kl_comedy.config.schema import Config


def build_reference(kind: str, loaded: LoadedModel, config: Config, *, teacher: LoadedModel | None = None) -> Reference:
    """The reference ``kind`` (``initial | ema | periodic | old | teacher``) for a policy that has not been trained yet.

    ``initial`` is the base model under LoRA (adapter off), else a frozen copy; ``teacher`` is the given model itself.
    Raises :class:`UserError` for another name, and for ``teacher`` without one.
    """
    # The policy's own settings: with others, KL would compare distributions that were computed differently.
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
        max_kl = config.reference.max_kl or math.inf
        return MovingReference(loaded.model, options, period=config.reference.period, max_kl=max_kl)
    if kind == "old":
        # The learner's weights before a batch's first update: a batch makes the same number of updates each time.
        return MovingReference(loaded.model, options, period=updates_from_a_batch(config))
    if kind == "teacher" and teacher is not None:
        # Not copied: nothing trains a teacher, and a second copy would cost its whole memory again.
        return Reference(teacher.model, options, copied=False)
    raise bad_value("kl.reference", kind, ("initial", "ema", "periodic", "old", "teacher"))


class Reference:
    """The policy as it was when this object was made: a copy that never trains (``copied=False``: the model itself).

    With ``adapter_off`` it is the base of a LoRA policy: the same module with its adapter disabled during the pass, so
    that no second model is in memory. Its hash is of the base weights alone, under the names that they had before the
    adapter was added.
    """

    moving = False
    """Whether :meth:`MovingReference.update` follows the policy."""

    def __init__(
        self, model: nn.Module, options: PassOptions, *, adapter_off: bool = False, copied: bool = True
    ) -> None:
        self.model: Any = model
        if copied and not adapter_off:
            self.model = _frozen_copy(model)
        self._options = options
        self._adapter_off = adapter_off
        # Computed when it is asked for: a hash reads all weights.
        self._hash: str | None = None

    @property
    def hash(self) -> str:
        """SHA-256 of the current weights (:func:`~kl_comedy.models.weights.weights_hash`)."""
        if self._hash is None:
            self._hash = weights_hash(self.model, base_only=self._adapter_off)
        return self._hash

    @torch.no_grad()
    def forward_pass(
        self,
        *,
        prompt_ids_BP: Tensor,
        prompt_mask_BP: Tensor,
        ids_BT: Tensor,
        mask_BT: Tensor,
        real_BT: Tensor | None = None,
        rows: ModelRows | None = None,
    ) -> ReferencePass:
        """Pass over prompts and completions, without gradient; see :func:`~kl_comedy.models.logprobs.token_pass`."""
        adapter: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if self._adapter_off:
            # For the pass only: the policy trains the same module with its adapter on.
            adapter = self.model.disable_adapter()
        with adapter:
            result = token_pass(
                self.model,
                self._options,
                Wanted(hidden=True),
                prompt_ids_BP=prompt_ids_BP,
                prompt_mask_BP=prompt_mask_BP,
                ids_BT=ids_BT,
                mask_BT=mask_BT,
                real_BT=real_BT,
                rows=rows,
            )
        # Exact KL computes the logits again, chunk by chunk, from hidden states and head.
        weight_VH, bias_V = head_weights(self.model)
        if bias_V is not None:
            bias_V = bias_V.detach()
        return ReferencePass(
            logp_BT=result.logp_BT,
            hidden_NH=result.hidden_NH,
            head=(weight_VH.detach(), bias_V),
            temperature=self._options.temperature,
        )


def check_tokens(other: LoadedModel, policy: LoadedModel, key: str, value: str) -> None:
    """Raise :class:`UserError` where the two models have different tokens, or the same tokens under other ids."""
    theirs: dict[str, int] = other.tokenizer.get_vocab()
    ours: dict[str, int] = policy.tokenizer.get_vocab()
    if theirs == ours:
        return
    # The message names the differing token with the lowest id: it is the likeliest to mean something to a reader.
    differing = {text for text, _ in theirs.items() ^ ours.items()}
    text = min(differing, key=lambda text: (ours.get(text, math.inf), text))
    our_id = _describe_token(text, ours)
    their_id = _describe_token(text, theirs)
    why = f"{text!r} is {our_id} there and {their_id} here, and log-probs of different tokens cannot be compared"
    raise bad_value(key, value, f"a model with the {len(ours)} tokens of {policy.source}", why)


def _describe_token(text: str, vocabulary: Mapping[str, int]) -> str:
    if text not in vocabulary:
        return "none"
    return f"token {vocabulary[text]}"


def match_teacher(teacher: LoadedModel, policy: LoadedModel, adapter: str | None = None) -> Any:
    """The teacher's model over the policy's vocabulary, frozen, with its ``adapter`` (a folder) on.

    A larger padded vocabulary is cut to the policy's: the ids beyond belong to no token. Raises :class:`UserError` for
    other tokens, a smaller vocabulary, and an adapter that cannot be loaded.
    """
    check_tokens(teacher, policy, "model.source", teacher.source)
    model = teacher.model
    teacher_rows = head_weights(model)[0].shape[0]
    policy_rows = head_weights(policy.model)[0].shape[0]
    allowed = f"a head of {policy_rows} rows, not {teacher_rows}"
    if teacher_rows < policy_rows:
        why = "the policy could draw an id that the teacher has no log-prob of"
        raise bad_value("model.source", teacher.source, allowed, why)
    if teacher_rows > policy_rows:
        if is_sharded(model):
            why = "a teacher in shards cannot be cut to the policy's vocabulary; save it so"
            raise bad_value("model.source", teacher.source, allowed, why)
        # Smaller only: rows that are added would have to be invented.
        model.resize_token_embeddings(policy_rows, mean_resizing=False)
    if adapter is not None:
        from peft import PeftModel

        try:
            model = PeftModel.from_pretrained(model, adapter)
        except Exception as error:  # PEFT asks the hub for a missing folder; damaged files raise errors of many types
            raise bad_value(
                "model.adapter", adapter, "a folder with a LoRA adapter on source", first_line(error)
            ) from error
    # Frozen here, so that no optimizer and no backward pass reaches a teacher.
    return model.requires_grad_(False).eval()


def _frozen_copy(model: nn.Module) -> nn.Module:
    """A copy that shares what ``model`` does not train (a sharded copy shares nothing)."""
    if is_sharded(model):
        return clone_sharded(model).requires_grad_(False).eval()
    # deepcopy takes what the memo has by id for copied already, and puts the original in its place.
    shared: dict[int, Any] = {id(p): p for p in model.parameters() if not p.requires_grad}
    return copy.deepcopy(model, memo=shared).requires_grad_(False).eval()


class MovingReference(Reference):
    """A copy that follows the policy: ``copy <- decay * copy + (1 - decay) * policy`` after every ``period``-th update.

    It also follows after an update that measured a KL of more than ``max_kl`` (nats per token) to it, as in RPG
    (2505.17508); with ``period`` None, only then.

    An average (``decay`` above 0) is stored in float32 or wider and rounded to the model's dtype for the pass: bfloat16
    would lose increments below 2^-8 of the weight, float32 loses those below 2^-24 (decays above about 0.99999). With
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
        self._decay = decay
        self._period = period
        self._max_kl = max_kl
        # What the policy does not train is shared with it and never moves.
        copied = dict(self.model.named_parameters())
        self._weights = {name: copied[name] for name, p in model.named_parameters() if p.requires_grad}
        # Without decay the copy itself is what is stored.
        self._average: Mapping[str, Tensor] = self._weights
        if decay:
            self._average = {
                name: weight.to(torch.promote_types(weight.dtype, torch.float32), copy=True)
                for name, weight in self._weights.items()
            }

    @torch.no_grad()
    def update(self, model: nn.Module, step: int, measured_kl: float = 0.0) -> bool:
        """Follow ``model``; returns whether the reference moved.

        Called once after every optimizer update, with its number ``step`` and the KL to this reference that it measured
        (nats per token).
        """
        is_due = self._period is not None and step % self._period == 0
        is_far = measured_kl > self._max_kl
        must_follow = is_due or is_far
        if not must_follow:
            return False
        policy = dict(model.named_parameters())
        for name, average in self._average.items():
            # The policy's weight is widened, and the average never rounded: see the class.
            weight = policy[name].to(average.dtype)
            if self._decay:
                average.lerp_(weight, 1.0 - self._decay)
            else:
                average.copy_(weight)
        self._take_over_average()
        return True

    def _take_over_average(self) -> None:
        """Round the average into the weights of the pass; the identity changes with them."""
        for name, weight in self._weights.items():
            weight.copy_(self._average[name])
        self._hash = None

    def state_dict(self) -> dict[str, Any]:
        """``{"weights": name -> tensor}`` of the parameters that the policy trains."""
        # The average and not the rounded copy: a resumed run must continue from the same numbers.
        return {"weights": {name: average.detach().clone() for name, average in self._average.items()}}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a :meth:`state_dict`. Raises :class:`UserError` when it is of another model."""
        weights = state["weights"]
        differing = sorted(set(weights) ^ set(self._average))[:3]
        if differing:
            raise UserError(f"reference: the saved weights are of another model; they differ in {', '.join(differing)}")
        for name, average in self._average.items():
            average.copy_(weights[name])
        self._take_over_average()


def check_past_policies(config: Config, version_bytes: float) -> None:
    """Raise :class:`UserError` where the versions that samples may be of, each of so many bytes, exceed the limit."""
    versions = versions_of_samples(config)
    needed_gib = versions * version_bytes / 2**30
    limit_gib = config.reference.past_gib
    if needed_gib > limit_gib:
        reason = f"samples are of up to {versions} versions of the weights, {version_bytes / 2**30:.3g} GiB each"
        raise bad_value("reference.past_gib", limit_gib, f"at least {needed_gib:.3g}, or a smaller lag", reason)


class PastPolicies:
    """The last ``versions`` versions of the policy, of which each token names the one that drew it.

    Version ``v`` is in slot ``v`` modulo ``versions``, a copy of what the policy trains. So the memory is the same from
    the beginning, and a checkpoint has the same names at every update.
    """

    moving = True

    def __init__(self, model: nn.Module, options: PassOptions, *, versions: int) -> None:
        self._slots = [MovingReference(model, options) for _ in range(versions)]
        self._newest = 0

    def forward_pass(self, *, policy_version_BT: Tensor, mask_BT: Tensor, **inputs: Any) -> ReferencePass:
        """The pass of the version that drew the tokens of ``mask_BT``; see :meth:`Reference.forward_pass`.

        Raises :class:`UserError` where they are of several versions, and for a version that is no longer there.
        """
        versions = sorted(set(policy_version_BT[mask_BT].tolist()))
        if len(versions) > 1:
            # One pass has one head: exact KLs to several would need a pass of the policy for each.
            raise UserError(f"a micro-batch has tokens of the versions {versions}, and a past policy is one of them")
        version = versions[0]
        oldest = max(0, self._newest + 1 - len(self._slots))
        if not oldest <= version <= self._newest:
            raise UserError(
                f"a token was drawn by version {version} of the weights, and the past policies are those of the "
                f"versions {oldest} to {self._newest}"
            )
        slot = self._slots[version % len(self._slots)]
        reference_pass: ReferencePass = slot.forward_pass(mask_BT=mask_BT, **inputs)
        return reference_pass

    def update(self, model: nn.Module, step: int, measured_kl: float = 0.0) -> bool:
        """Take ``model`` in as version ``step``, in the place of the oldest one; always moves."""
        self._newest = step
        return self._slots[step % len(self._slots)].update(model, step)

    def state_dict(self) -> dict[str, Any]:
        """``{"weights": slot.name -> tensor, "newest": version}``."""
        weights = {}
        for number, slot in enumerate(self._slots):
            for name, weight in slot.state_dict()["weights"].items():
                weights[f"{number}.{name}"] = weight
        return {"weights": weights, "newest": self._newest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a :meth:`state_dict`. Raises :class:`UserError` when it is of another model."""
        self._newest = int(state["newest"])
        for number, slot in enumerate(self._slots):
            prefix = f"{number}."
            weights = {}
            for name, weight in state["weights"].items():
                if name.startswith(prefix):
                    weights[name.removeprefix(prefix)] = weight
            slot.load_state_dict({"weights": weights})
