"""KL terms in TRL 1.16: ``KLGRPOTrainer(..., kl=[{estimator: k1, placement: reward, beta: 0.05}])``, and RLOO's.

The trainers are TRL's, which the mixin only extends: TRL's own KL is switched off (its ``beta`` only makes it load the
reference), log-probs are taken from TRL's passes, and the terms are added per token with TRL's reduction. A term with
``baseline: before`` becomes a reward function ``kl_cost`` of weight 1.

Legend: ``B`` completions, ``T`` completion tokens.
"""

from __future__ import annotations

import copy
from importlib import metadata
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from trl import GRPOTrainer, RLOOTrainer

from kl_comedy.errors import bad_value
from kl_comedy.integrations.terms import HostTerms

SUPPORTED = "1.16."
LOSS_TYPES = ("grpo", "sapo", "bnpo", "dr_grpo", "luspo", "cispo", "dapo", "vespo")

if TYPE_CHECKING:
    # Both trainers have what the mixin uses. It cannot derive from either: RLOOTrainer is no GRPOTrainer.
    from trl import GRPOTrainer as _Trainer
else:
    _Trainer = object


class _Pass(NamedTuple):
    """A pass of TRL over completions: how its method was called, and the log-probs that it returned."""

    arguments: tuple[Any, ...]
    options: dict[str, Any]
    logp_BT: Tensor


class KLTermsMixin(_Trainer):
    """Takes ``kl``: a recipe's name or a list of terms. Put it before a TRL trainer in the bases.

    Off-policy, a term has the ratio of its ``correction`` to the sampler's log-probs (vLLM's where recorded), not the
    ratio and clip of the policy loss. Logs ``kl/k1`` (nats per token) and ``kl/loss``.

    Raises :class:`UserError` for another version of TRL, ``beta=0`` where a term needs the reference, and options that
    would change a cost in the reward (``reward_clip_range``, ``normalize_then_sum``, tools).
    """

    kl_scale = 1.0
    """Multiplies the terms in the loss; :class:`~kl_comedy.integrations.gradient_check.KLGradientCheck` varies it."""

    beta: float
    """TRL's own coefficient."""

    def __init__(self, model: Any, reward_funcs: Any, args: Any = None, *rest: Any, kl: Any, **options: Any) -> None:
        version = metadata.version("trl")
        if not version.startswith(SUPPORTED):
            raise bad_value("trl", version, f"version {SUPPORTED}*", "other versions have other methods")
        self.terms = HostTerms.parse(kl, host="TRL", steps=True)
        # The passes of the step in progress; None between steps, whose passes are not recorded.
        self._passes: list[_Pass] | None = None
        if self.terms.reward:
            if not isinstance(reward_funcs, list):
                reward_funcs = [reward_funcs]
            reward_funcs = [*reward_funcs, self.kl_cost]
            # Copies: the caller may build a second trainer from the same arguments.
            if args is not None and args.reward_weights is not None:
                args = copy.copy(args)
                args.reward_weights = [*args.reward_weights, 1.0]
            if isinstance(options.get("reward_processing_classes"), list):
                options["reward_processing_classes"] = [*options["reward_processing_classes"], None]
        super().__init__(model, reward_funcs, args, *rest, **options)
        self._check_settings()

    def _check_settings(self) -> None:
        """Raise :class:`UserError` for settings of TRL under which a term would be left out or changed."""
        needs_reference = self.terms.needs_reference or self.terms.reward
        if self.beta == 0.0 and needs_reference:
            why = "it makes TRL load the reference; the coefficients are those of kl"
            raise bad_value("beta", 0.0, "any other number", why)
        if isinstance(self, GRPOTrainer) and self.loss_type not in LOSS_TYPES:
            raise bad_value("loss_type", self.loss_type, LOSS_TYPES)
        if not self.terms.reward:
            return
        plain = {"reward_clip_range": None, "multi_objective_aggregation": "sum_then_normalize", "tools": None}
        for name, allowed in plain.items():
            value = getattr(self, name, None)
            if value and value != allowed:
                raise bad_value(name, value, str(allowed), "a term with baseline: before is part of the reward")

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **options: Any) -> Any:
        result = super()._get_per_token_logps_and_entropies(model, *args, **options)
        if self._passes is not None:
            self._passes.append(_Pass(args, options, result[0]))
        return result

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        beta = self.beta
        self._passes = []
        try:
            output = super()._generate_and_score_completions(inputs)
            policy_BT, ref_BT = self._policy_and_reference(beta)
        finally:
            # _calculate_rewards has set it to 0.
            self.beta = beta
            self._passes = None
        logps = {}
        if policy_BT is not None:
            logps["old_per_token_logps"] = policy_BT
        if ref_BT is not None:
            logps["ref_per_token_logps"] = ref_BT
        # What TRL puts out itself comes last, and wins.
        return logps | output

    def _policy_and_reference(self, beta: float) -> tuple[Tensor | None, Tensor | None]:
        """Log-probs of TRL's passes over the new completions: the reference is the last, where beta is not 0."""
        assert self._passes is not None, "called within a step"
        logps = [one_pass.logp_BT for one_pass in self._passes]
        ref_BT = None
        if beta != 0.0:
            ref_BT = logps.pop()
        policy_BT = None
        if logps:
            policy_BT = logps[-1]
        return policy_BT, ref_BT

    def _calculate_rewards(self, *args: Any) -> Tensor:
        rewards: Tensor = super()._calculate_rewards(*args)
        if self.terms.reward:
            # Completions without any reward stay out of the baseline, as in TRL.
            has_no_reward = torch.isnan(rewards[:, :-1]).all(1)
            rewards[has_no_reward, -1] = torch.nan
        # RLOO's own penalty would follow. _generate_and_score_completions restores the coefficient.
        self.beta = 0.0
        return rewards

    def kl_cost(self, prompts: Any, completions: Any, **_: Any) -> list[float]:
        """The reward function of the terms with ``baseline: before``: minus beta times the completion's cost."""
        policy_BT, ref_BT = self._policy_and_reference(self.beta)
        assert self._passes is not None, "TRL asks for rewards within a step"
        last_pass = self._passes[-1]
        options = last_pass.options
        ids, attention_mask, width = last_pass.arguments[:3]
        if policy_BT is None:
            # TRL needs no pass of the policy here.
            with torch.no_grad():
                passed = super()._get_per_token_logps_and_entropies(self.model, ids, attention_mask, width, **options)
            policy_BT = passed[0]
        logps = {"logp_BT": policy_BT, "ref_logp_BT": ref_BT, "behaviour_logp_BT": policy_BT}
        cost_B = self.terms.cost_B(step=self.state.global_step, **logps, mask_BT=attention_mask[:, -width:])
        rewards: list[float] = (-cost_B).tolist()
        return rewards

    def _compute_loss(self, model: Any, inputs: Any) -> Tensor:
        beta = self.beta
        # Without TRL's own KL.
        self.beta = 0.0
        self._passes = []
        try:
            loss: Tensor = super()._compute_loss(model, inputs)
            logp_BT = self._passes[-1].logp_BT
        finally:
            self.beta = beta
            self._passes = None
        mask_BT = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        ref_BT = inputs.get("ref_per_token_logps")
        old_BT = inputs.get("old_per_token_logps", logp_BT.detach())
        # NaN where vLLM recorded none.
        sampler_BT = inputs.get("sampling_per_token_logps", old_BT)
        behaviour_BT = torch.where(torch.isnan(sampler_BT), old_BT, sampler_BT)
        logps = {"logp_BT": logp_BT, "ref_logp_BT": ref_BT, "behaviour_logp_BT": behaviour_BT}
        kl_BT = self.terms.loss_BT(step=self.state.global_step, **logps, mask_BT=mask_BT)
        kl_loss = self.kl_scale * self._reduce(kl_BT, mask_BT, inputs)
        mode = "train" if self.model.training else "eval"
        metrics = self._metrics[mode]
        metrics["kl/loss"].append(self.accelerator.gather(kl_loss.detach()).mean().item())
        if ref_BT is not None:
            sums = torch.stack([((logp_BT.detach() - ref_BT) * mask_BT).sum(), mask_BT.sum().float()])
            total, count = self.accelerator.reduce(sums, reduction="sum").tolist()
            metrics["kl/k1"].append(total / max(count, 1.0))
        return loss + kl_loss

    def _reduce(self, values_BT: Tensor, mask_BT: Tensor, inputs: Any) -> Tensor:
        """TRL's mean of a loss per token, by ``loss_type``; for RLOO the mean over completions of sums over tokens."""
        sum_B = (values_BT * mask_BT).sum(-1)
        count_B = mask_BT.sum(-1).clamp(min=1)
        if not isinstance(self, GRPOTrainer):
            return sum_B.mean()
        # TRL divides a loss by the micro-batches that an update accumulates; an evaluation accumulates none.
        steps: int = 1
        if self.model.training:
            steps = self.current_gradient_accumulation_steps
        if self.loss_type in ("cispo", "dapo", "vespo"):
            items: Tensor = inputs["num_items_in_batch"].clamp(min=1) / self.accelerator.num_processes
            if self.model.training:
                items = items * steps / self.args.steps_per_generation
            return sum_B.sum() / items
        if self.loss_type == "bnpo":
            return sum_B.sum() / mask_BT.sum().clamp(min=1) / steps
        if self.loss_type == "dr_grpo":
            length: int = self.max_completion_length
            return (sum_B / length).mean() / steps
        if self.loss_type == "luspo":
            return sum_B.mean() / steps
        # grpo and sapo.
        return (sum_B / count_B).mean() / steps


class KLGRPOTrainer(KLTermsMixin, GRPOTrainer):
    """TRL's GRPOTrainer with ``kl``."""


class KLRLOOTrainer(KLTermsMixin, RLOOTrainer):
    """TRL's RLOOTrainer with ``kl``."""
