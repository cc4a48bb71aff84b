"""The loss of an update: :func:`prepare` looks at all its rows, :func:`micro_loss` at one micro-batch.

Whatever needs the whole update (baselines, normalization, denominators) is prepared, without gradient. The losses of
the micro-batches then add up to that of the update.

    rows of all ranks --> packs of this rank --> reference passes --> costs of KL terms --> returns
                                                       |                    |                 |
                                                       v                    v                 v
                                                   MicroBatch  <--   own baselines     LearningSignal

Legend: ``B`` rows, ``T`` completion tokens. ``B`` is all rows of the update in :class:`UpdateTensors` and
:class:`LearningSignal`, and the rows of one micro-batch in :class:`MicroBatch`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kl_comedy.config import AlgorithmConfig
from kl_comedy.kl import KLTerm, TermParts, batch_baseline, kl_parts, kl_surrogate, kl_value, own_baseline
from kl_comedy.kl.surrogate import NotFinite
from kl_comedy.objective import PolicyTerm, policy_term, returns_with_costs, sequence_weights
from kl_comedy.objective.advantages import by_turn, whiten
from kl_comedy.objective.policy_term import PolicyLossParts
from kl_comedy.objective.preferences import preferences
from kl_comedy.records import Experience, Scored, groups_without_signal
from kl_comedy.registry import ADVANTAGES
from kl_comedy.training.packing import Packed, Packer, model_inputs, policy_inputs

if TYPE_CHECKING:
    from kl_comedy.models.reference import PastPolicies, Reference
    from kl_comedy.models.types import ReferencePass, TokenPass

WITHOUT_VERDICT = ("timeout", "refused")
"""Statuses of completions that were not judged; these enter no pair of DPO."""

PolicyPass = Callable[..., "TokenPass"]
"""``policy_pass(inputs, reference, terms)``: the policy's log-probs, and the exact KLs that the terms need."""

OldPolicyRow = dict[str, Any]
"""The policy before the first update from a row's batch, in float32 on the CPU: ``logp`` (nats) and ``value`` of its
tokens, ``[T]``, and ``last``, the value after the last."""


def named_terms(terms: Sequence[KLTerm]) -> dict[str, KLTerm]:
    """The KL terms by name: ``kl_0``, ``kl_1``, ... in the order of the config.

    A term's coefficient, baseline, estimate and share of the loss are stored under this name. The names are part of
    the metrics of stored runs (``train/loss_kl_0``), so they do not change.
    """
    return {f"kl_{position}": term for position, term in enumerate(terms)}


def uses_critic(algorithm: AlgorithmConfig) -> bool:
    """Whether the advantage needs a value function."""
    return bool(ADVANTAGES.get(algorithm.advantage, key="algorithm.advantage").facts.get("critic"))


# --- records --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """The settings of :func:`prepare`, constant over a run. ``terms``: by name, see :func:`named_terms`.

    ``turn_weights``: the weights of the environment's parts, where each counts from the turn that earned it; None where
    all of the reward is that of the whole dialogue.
    """

    terms: Mapping[str, KLTerm]
    algorithm: AlgorithmConfig
    packer: Packer
    turn_weights: Mapping[str, float] | None = None


@dataclass(frozen=True, kw_only=True)
class UpdateTensors:
    """What the rows of one update say, for all ranks: ``[B]``, and ``[B, T]`` up to the longest completion."""

    mask_BT: Tensor
    """The tokens that the policy drew."""
    reward_B: Tensor
    """In float64: baselines subtract numbers of similar size."""
    group_B: Tensor
    turn_BT: Tensor
    """The number of each token's turn: what the environment writes is of the turn after it."""
    paid_BT: Tensor | None
    """What the environment paid for a turn, at its last token; None where the reward is that of the whole dialogue."""

    @classmethod
    def of(
        cls, rows: Sequence[Scored], device: torch.device, turn_weights: Mapping[str, float] | None = None
    ) -> UpdateTensors:
        masks = [torch.tensor(row.rollout.trained_mask, dtype=torch.bool) for row in rows]
        mask_BT = pad_sequence(masks, batch_first=True)
        width = mask_BT.shape[1]
        paid_BT = None
        if turn_weights is not None:
            paid_BT = paid_for_turns(rows, width, turn_weights).to(device)
        return cls(
            mask_BT=mask_BT.to(device),
            reward_B=torch.tensor([row.reward.value for row in rows], dtype=torch.float64, device=device),
            group_B=torch.tensor([row.rollout.group_id for row in rows], device=device),
            turn_BT=turn_numbers(rows, width).to(device),
            paid_BT=paid_BT,
        )

    @property
    def length(self) -> int:
        """Tokens of the longest completion."""
        return self.mask_BT.shape[1]


def turn_numbers(rows: Sequence[Scored], width: int) -> Tensor:
    """The number of each token's turn, from 0, ``[B, width]``: what the environment writes is of the turn after it."""
    ends_before_BT = torch.zeros(len(rows), width + 1, dtype=torch.long)
    for index, row in enumerate(rows):
        ends_before_BT[index, list(row.rollout.turn_ends)] = 1
    return ends_before_BT[:, :width].cumsum(-1)


def paid_for_turns(rows: Sequence[Scored], width: int, weights: Mapping[str, float]) -> Tensor:
    """The weighted parts that the environment gave for each turn, at the turn's last token, ``[B, width]``, float64."""
    paid_BT = torch.zeros(len(rows), width, dtype=torch.float64)
    for index, row in enumerate(rows):
        last_tokens = [end - 1 for end in row.rollout.turn_ends]
        for name, values in row.rollout.turn_parts.items():
            # A part without a weight is a metric.
            paid_BT[index, last_tokens] += weights.get(name, 0.0) * torch.tensor(values, dtype=torch.float64)
    return paid_BT


@dataclass(frozen=True, kw_only=True)
class ReferencedPack:
    """Rows of one micro-batch, and the pass of each reference over them, by the reference's name."""

    packed: Packed
    references: Mapping[str, ReferencePass]


@dataclass(frozen=True, kw_only=True)
class LearningSignal:
    """What the policy term learns from, for all rows of the update.

    ``advantage_BT`` weights the score of each token, ``weight_B`` is each sequence's share of the loss.
    ``old_value_BT`` and ``value_target_BT`` are None without a critic. ``notes``: metrics of the whole update.
    """

    advantage_BT: Tensor
    weight_B: Tensor
    old_value_BT: Tensor | None = None
    value_target_BT: Tensor | None = None
    notes: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Rows of one forward and backward: their experience, and the pass of each reference over them.

    ``baselines``: ``[B, T]`` by the name of each term with ``baseline: own`` or ``batch``. ``proximal_logp_BT`` and
    ``old_value_BT``: log-probs and values of the policy at the batch's first use, ``value_target_BT`` the lambda
    returns; None where the policy loss uses the sampler's log-probs, or there is no critic. ``empty``: its weight is
    zero; it keeps the collectives of this rank in step with ranks that have more rows. ``notes``: metrics of the
    whole update, the same on each of its micro-batches. ``positions``: those of the rows among all of the update.
    """

    experience: Experience
    references: Mapping[str, ReferencePass]
    baselines: Mapping[str, Tensor]
    proximal_logp_BT: Tensor | None = None
    old_value_BT: Tensor | None = None
    value_target_BT: Tensor | None = None
    empty: bool = False
    notes: Mapping[str, float] = field(default_factory=dict)
    positions: Sequence[int] = ()

    def reference_of(self, term: KLTerm) -> ReferencePass:
        """The reference pass of a term (:func:`reference_pass`)."""
        return reference_pass(self.references, term.reference)


def reference_pass(references: Mapping[str, ReferencePass], name: str) -> ReferencePass:
    """The pass of a term's reference. Without past policies a term against the sampler gets the initial one.

    Such a term reads the log-probs that the sampler recorded, and nothing of the pass.
    """
    if name == "sampler":
        return references.get("sampler", references["initial"])
    return references[name]


# --- the whole update -----------------------------------------------------------------------------------------------


def prepare(
    rows: Sequence[Scored],
    plan: Preparation,
    *,
    betas: Mapping[str, float],
    references: Mapping[str, Reference | PastPolicies],
    policy_pass: PolicyPass,
    old_policy: Sequence[OldPolicyRow] | None = None,
) -> list[MicroBatch]:
    """Turn the rows of one update (whole groups) into this rank's micro-batches, as many as on every other rank.

    ``rows`` are those of all ranks: baselines and denominators are of the whole update, and every rank computes the
    same split into micro-batches. ``betas`` are the current coefficients by the term's name. ``old_policy``, row by
    row, is needed with a recomputed proximal policy or a critic.

    ``policy_pass(inputs, reference, terms)`` returns log-probs and the exact KLs that the terms need. It is called
    only for terms with ``baseline: before``, ``own`` or ``batch``, and for DPO.
    """
    update = UpdateTensors.of(rows, plan.packer.device, plan.turn_weights)
    # The costs are constants of the loss; a graph of the whole update would also not fit in memory.
    with torch.no_grad():
        packs = [_with_references(packed, references) for packed in plan.packer.micro_batches(rows)]
        costs = update_costs(packs, plan, betas, policy_pass, update.mask_BT)
    baselines = _own_baselines(costs, plan.terms, update)
    if plan.algorithm.dpo is not None:
        signal = dpo_signal(rows, update, packs, plan, policy_pass)
    else:
        returns_BT = update_returns(costs, plan, betas, update)
        signal = advantage_signal(rows, update, returns_BT, plan.algorithm, old_policy)
    proximal_logp_BT = None
    if plan.algorithm.proximal == "recomputed":
        proximal_logp_BT = _old_policy_BT(old_policy, "logp", plan.packer.device)
    return [_micro_batch(pack, update, signal, baselines, proximal_logp_BT) for pack in packs]


def _with_references(packed: Packed, references: Mapping[str, Reference | PastPolicies]) -> ReferencedPack:
    passes = {}
    for name, reference in references.items():
        inputs = model_inputs(packed)
        if name == "sampler":
            # The only reference that is another one from batch to batch: the weights that drew it.
            inputs["policy_version_BT"] = packed.policy_version_BT
        passes[name] = reference.forward_pass(**inputs)
    return ReferencedPack(packed=packed, references=passes)


COST_PARTS = ("cost_BT", "weight_BT", "baseline_weight_BT")
"""The fields of :class:`TermParts` that are needed of the whole update; the others are of one micro-batch."""


def update_costs(
    packs: Sequence[ReferencedPack],
    plan: Preparation,
    betas: Mapping[str, float],
    policy_pass: PolicyPass,
    mask_BT: Tensor,
) -> dict[str, TermParts]:
    """The parts of each term with :attr:`KLTerm.needs_update`, by its name, for all rows of the update, in float64.

    Past the end of a completion the cost is what the credit gives there: the total, or zero. ``pathwise_BT`` is zero.
    """
    early_terms: dict[str, KLTerm] = {}
    for name, term in plan.terms.items():
        if term.needs_update and betas[name] != 0:
            early_terms[name] = term
    costs = {name: _zero_parts(mask_BT) for name in early_terms}
    for pack in packs:
        # One pass of the policy serves all terms against the same reference. The order of the references is the same
        # on every rank: a sharded policy exchanges weights in each pass, and ranks in different passes would deadlock.
        for reference_name in sorted({term.reference for term in early_terms.values()}):
            alike = {name: term for name, term in early_terms.items() if term.reference == reference_name}
            reference = reference_pass(pack.references, reference_name)
            policy = policy_pass(policy_inputs(pack.packed), reference, list(alike.values()))
            if pack.packed.empty:
                continue
            for name, term in alike.items():
                arguments = kl_arguments(term, pack.packed, policy.logp_BT, reference.logp_BT, policy)
                # micro_loss meets the same token and names it; a rank that raised here would leave the others waiting.
                with contextlib.suppress(NotFinite):
                    _write_rows(costs[name], kl_parts(term, **arguments), pack.packed)
    # Each rank wrote the rows of its own packs and has zeros elsewhere, so that the sum is a gather.
    for parts in costs.values():
        for field_name in COST_PARTS:
            plan.packer.ranks.sum(getattr(parts, field_name))
    return costs


def _zero_parts(mask_BT: Tensor) -> TermParts:
    # float64: a baseline is a sum over other rows, and what is left after its subtraction is small.
    zeros_BT = torch.zeros_like(mask_BT, dtype=torch.float64)
    return TermParts(
        cost_BT=zeros_BT.clone(),
        weight_BT=zeros_BT.clone(),
        baseline_weight_BT=zeros_BT.clone(),
        pathwise_BT=zeros_BT,
        cost_after_B=zeros_BT.new_zeros(len(zeros_BT)),
    )


def _write_rows(update: TermParts, parts: TermParts, packed: Packed) -> None:
    """Copy the parts of a micro-batch to the places of its rows in those of the update."""
    width = packed.ids_BT.shape[1]
    for field_name in COST_PARTS:
        getattr(update, field_name)[packed.positions, :width] = getattr(parts, field_name).double()
    update.cost_BT[packed.positions, width:] = parts.cost_after_B[:, None].double()


def _own_baselines(
    costs: Mapping[str, TermParts], terms: Mapping[str, KLTerm], update: UpdateTensors
) -> dict[str, Tensor]:
    """The baseline ``[B, T]`` of each term that has one of its own, over its group or over the batch."""
    # These leave the sampler's ratio in the baseline, so that a term stays unbiased off-policy; see own_baseline.
    baselines = {}
    for name, parts in costs.items():
        if terms[name].baseline == "own":
            baselines[name] = own_baseline(parts, update.mask_BT, update.group_B)
        elif terms[name].baseline == "batch":
            baselines[name] = batch_baseline(parts, update.mask_BT)
    return baselines


def update_returns(
    costs: Mapping[str, TermParts], plan: Preparation, betas: Mapping[str, float], update: UpdateTensors
) -> Tensor:
    """The weighted reward minus the KL costs that are subtracted before the baseline, as returns to go ``[B, T]``."""
    # The cost's coefficient enters here; micro_loss, which multiplies the path-wise part by it, leaves the cost out.
    weighted_costs = []
    for name, parts in costs.items():
        if plan.terms[name].baseline == "before":
            weighted_costs.append(betas[name] * parts.cost_BT)
    total_cost_BT = None
    if weighted_costs:
        total_cost_BT = torch.stack(weighted_costs).sum(0)
    reward_weight = plan.algorithm.reward_weight
    paid_BT = None
    if update.paid_BT is not None:
        paid_BT = reward_weight * update.paid_BT
    return returns_with_costs(reward_weight * update.reward_B, total_cost_BT, update.length, paid_BT=paid_BT)


def _is_learned(row: Scored, algorithm: AlgorithmConfig) -> bool:
    """Whether a completion is in the loss and its denominator."""
    # A dialogue whose environment failed says nothing about the policy.
    if row.rollout.stop_reason == "failed":
        return False
    # A completion that was cut has no verdict on its whole.
    return not (algorithm.mask_truncated and row.rollout.stop_reason == "length")


def advantage_signal(
    rows: Sequence[Scored],
    update: UpdateTensors,
    returns_BT: Tensor,
    algorithm: AlgorithmConfig,
    old_policy: Sequence[OldPolicyRow] | None,
) -> LearningSignal:
    """The advantage estimator of the config; ``old_policy`` has the values where it needs a critic."""
    left_out: set[int] = set()
    if algorithm.groups_without_signal == "shrink":
        left_out = groups_without_signal(rows)
    is_learned = [_is_learned(row, algorithm) and row.rollout.group_id not in left_out for row in rows]
    keep_B = torch.tensor(is_learned, device=update.mask_BT.device)
    weight_B = sequence_weights(
        algorithm.reduction, update.mask_BT, constant=algorithm.reduction_constant, keep_B=keep_B
    )
    entry = ADVANTAGES.get(algorithm.advantage)
    estimator = entry.fn
    if not uses_critic(algorithm):
        if update.paid_BT is not None and entry.facts["group"]:
            advantage_BT = by_turn(estimator, returns_BT, update.mask_BT, update.group_B, update.turn_BT)
        else:
            advantage_BT = estimator(returns_BT, update.mask_BT, update.group_B)
        return LearningSignal(advantage_BT=advantage_BT.float(), weight_B=weight_B)

    settings = algorithm.value
    device = update.mask_BT.device
    assert old_policy is not None
    old_value_BT = _old_policy_BT(old_policy, "value", device)
    advantage_BT = estimator(
        returns_BT,
        update.mask_BT,
        update.group_B,
        values_BT=old_value_BT,
        last_value_B=torch.tensor([row["last"] for row in old_policy], device=device),
        gamma=settings.gamma,
        lam=settings.lam,
        turn_BT=update.turn_BT if settings.discount == "turn" else None,
    ).float()
    # The critic learns the lambda return itself, so the target is taken before the advantages are whitened.
    value_target_BT = advantage_BT + old_value_BT
    if settings.normalize:
        advantage_BT = whiten(advantage_BT, update.mask_BT)
    return LearningSignal(
        advantage_BT=advantage_BT, weight_B=weight_B, old_value_BT=old_value_BT, value_target_BT=value_target_BT
    )


def dpo_signal(
    rows: Sequence[Scored],
    update: UpdateTensors,
    packs: Sequence[ReferencedPack],
    plan: Preparation,
    policy_pass: PolicyPass,
) -> LearningSignal:
    """The coefficients of DPO's pairs in the place of advantages (Rafailov et al. 2305.18290)."""
    algorithm = plan.algorithm
    assert algorithm.dpo is not None
    is_judged = []
    for row in rows:
        has_verdict = row.reward.status not in WITHOUT_VERDICT
        is_judged.append(has_verdict and _is_learned(row, algorithm))
    pairs = preferences(
        _log_ratios(packs, plan, policy_pass, len(rows)),
        update.reward_B,
        update.group_B,
        torch.tensor(is_judged, device=update.mask_BT.device),
        beta=algorithm.dpo.beta,
    )
    notes = {"dpo/pairs": float(pairs.pairs), "dpo/prompts": float(pairs.prompts)}
    if pairs.pairs:  # without a pair these have no value
        notes |= {"dpo/loss": pairs.loss, "dpo/accuracy": pairs.accuracy, "dpo/margin": pairs.margin}
    return LearningSignal(
        # All tokens of a completion have its coefficient, which contains the mean over prompts: the weights are 1.
        advantage_BT=pairs.coefficient_B.float()[:, None].expand(-1, update.length),
        weight_B=torch.ones_like(update.group_B),
        notes=notes,
    )


@torch.no_grad()
def _log_ratios(packs: Sequence[ReferencedPack], plan: Preparation, policy_pass: PolicyPass, row_count: int) -> Tensor:
    """The log-ratio (nats) of the current policy to the initial one for each completion, ``[B]``, in float64."""
    # float64: a sum over thousands of tokens decides which completion of a pair is preferred, and by how much.
    log_ratio_B = torch.zeros(row_count, dtype=torch.float64, device=plan.packer.device)
    for pack in packs:
        packed = pack.packed
        logp_BT = policy_pass(model_inputs(packed), None, ()).logp_BT
        if not packed.empty:
            log_ratio_BT = torch.where(packed.mask_BT, logp_BT - pack.references["initial"].logp_BT, 0.0)
            log_ratio_B[packed.positions] = log_ratio_BT.double().sum(-1)
    return plan.packer.ranks.sum(log_ratio_B)


def _old_policy_BT(old_policy: Sequence[OldPolicyRow] | None, key: str, device: torch.device) -> Tensor:
    """The recorded log-probs or values of all rows, ``[B, T]``, zero past the end of each completion."""
    assert old_policy is not None
    return pad_sequence([row[key] for row in old_policy], batch_first=True).to(device)


def _micro_batch(
    pack: ReferencedPack,
    update: UpdateTensors,
    signal: LearningSignal,
    baselines: Mapping[str, Tensor],
    proximal_logp_BT: Tensor | None,
) -> MicroBatch:
    """The part of the update's tensors that belongs to the rows of one pack."""
    packed = pack.packed
    width = packed.ids_BT.shape[1]

    def rows_of(values_BT: Tensor) -> Tensor:
        return values_BT[packed.positions, :width]

    def optional_rows_of(values_BT: Tensor | None) -> Tensor | None:
        return None if values_BT is None else rows_of(values_BT)

    # Another rank has the rows of an empty pack. Its backward runs nevertheless, because a sharded policy exchanges
    # weights in it, and must add nothing.
    weight_B = signal.weight_B[packed.positions].float() * (not packed.empty)
    experience = Experience(
        **model_inputs(packed),
        behaviour_logp_BT=packed.behaviour_logp_BT,
        policy_version_BT=packed.policy_version_BT,
        ref_logp_BT=pack.references["initial"].logp_BT,
        advantage_BT=torch.where(packed.mask_BT, rows_of(signal.advantage_BT), 0.0),
        reward_B=update.reward_B[packed.positions].float(),
        weight_B=weight_B,
        group_B=update.group_B[packed.positions],
        sampler_top=packed.sampler_top,
        kept=packed.kept,
    )
    return MicroBatch(
        experience=experience,
        references=pack.references,
        baselines={name: rows_of(baseline_BT) for name, baseline_BT in baselines.items()},
        proximal_logp_BT=optional_rows_of(proximal_logp_BT),
        old_value_BT=optional_rows_of(signal.old_value_BT),
        value_target_BT=optional_rows_of(signal.value_target_BT),
        empty=packed.empty,
        notes=signal.notes,
        positions=packed.positions,
    )


# --- one micro-batch ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class MicroLoss:
    """A micro-batch's share of the update's loss.

    ``parts``: the detached share of the policy term (``policy``) and of each KL term, by its name. ``policy``: the
    policy term per token. ``values``: each KL term's estimate per token ``[B, T]`` (nats), by its name, detached.
    """

    loss: Tensor
    parts: dict[str, Tensor]
    policy: PolicyLossParts
    values: dict[str, Tensor]


def micro_loss(
    micro: MicroBatch,
    passes: Mapping[str, TokenPass],
    *,
    terms: Mapping[str, KLTerm],
    betas: Mapping[str, float],
    algorithm: AlgorithmConfig,
) -> MicroLoss:
    """The policy loss and every KL term of a micro-batch.

    ``passes`` holds the policy pass per reference name (the log-probs are the same in each); ``terms`` and ``betas``
    go by the term's name. A term ``before`` the baseline is already part of the advantage; only its path-wise part is
    added here.
    """
    logp_BT = passes["initial"].logp_BT
    policy = policy_parts(micro, logp_BT, algorithm)
    parts = {"policy": weighted_sum(policy.loss_BT, micro.experience)}
    values: dict[str, Tensor] = {}
    for name, term in terms.items():
        # A reference has a policy pass of its own only where a term needs an exact KL to it.
        # The log-probs of the policy are the same in each, and the first is used for all terms.
        policy_pass = passes.get(term.reference, passes["initial"])
        arguments = kl_arguments(term, micro.experience, logp_BT, micro.reference_of(term).logp_BT, policy_pass)
        values[name] = kl_value(term, **arguments)
        beta = betas[name]
        if beta == 0:
            # Measured, not differentiated: the estimate may be infinite, and 0 x inf would be NaN.
            parts[name] = parts["policy"].new_zeros(())
            continue
        if term.baseline == "before":
            surrogate_BT = kl_parts(term, **arguments).pathwise_BT
        else:
            surrogate_BT = kl_surrogate(term, **arguments, baseline_BT=micro.baselines.get(name))
        parts[name] = beta * weighted_sum(surrogate_BT, micro.experience)
    # Stacked and summed at once: adding up in a loop rounds differently, and stored runs are compared bit for bit.
    loss = torch.stack(list(parts.values())).sum()
    detached = {name: part.detach() for name, part in parts.items()}
    return MicroLoss(loss=loss, parts=detached, policy=policy, values=values)


def policy_parts(micro: MicroBatch, logp_BT: Tensor, algorithm: AlgorithmConfig) -> PolicyLossParts:
    """The policy term of a micro-batch, unreduced, with where its bounds and corrections acted."""
    return policy_term(
        PolicyTerm.of(algorithm),
        logp_BT=logp_BT,
        behaviour_logp_BT=micro.experience.behaviour_logp_BT,
        advantage_BT=micro.experience.advantage_BT,
        mask_BT=micro.experience.mask_BT,
        proximal_logp_BT=micro.proximal_logp_BT,
    )


def kl_arguments(
    term: KLTerm, batch: Packed | Experience, logp_BT: Tensor, ref_logp_BT: Tensor, policy: TokenPass
) -> dict[str, Any]:
    """The tensors that a term is computed from; ``policy`` holds the exact KLs to its reference."""
    arguments: dict[str, Any] = {
        "logp_BT": logp_BT,
        "ref_logp_BT": ref_logp_BT,
        "behaviour_logp_BT": batch.behaviour_logp_BT,
        "mask_BT": batch.mask_BT,
        "exact_kl_BT": exact_divergence(term, policy),
    }
    if term.top is not None:
        arguments["top"] = policy.top[term.top]
    if term.weight != "none":
        arguments["certainty_BT"] = certainty_of(term, policy)
    if term.sampler_top is not None:
        arguments["sampler_top"] = policy.top[term.sampler_top]
    return arguments


def certainty_of(term: KLTerm, policy: TokenPass) -> Tensor | None:
    """The certainty that weights each token, ``[B, T]``."""
    if term.weight == "policy":
        return policy.certainty_BT
    return policy.reference_certainty_BT


def exact_divergence(term: KLTerm, policy: TokenPass) -> Tensor | None:
    """The exact divergence (nats) per prefix that a term reads, ``[B, T]``."""
    if term.mixture is not None:
        return policy.mixture[term.mixture]
    if term.needs == "exact_forward":
        return policy.forward_kl_BT
    return policy.kl_BT


def weighted_sum(loss_BT: Tensor, experience: Experience) -> Tensor:
    """The sum over tokens, weighted by each sequence's share."""
    return (experience.weight_B * torch.where(experience.mask_BT, loss_BT, 0.0).sum(-1)).sum()
