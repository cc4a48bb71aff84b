"""KL terms in verl 0.9: a plugin that replaces the KL of the actor's loss and of the reward.

    export KL_COMEDY_VERL_KL='[{"estimator": "k1", "placement": "reward", "beta": 0.001}]'
    python -m verl.trainer.main_ppo actor_rollout_ref.actor.use_kl_loss=true ...

verl loads it through the entry point ``verl.plugins`` in each of its processes, or by
``VERL_USE_EXTERNAL_MODULES=kl_comedy.integrations.verl``; without the variable it does nothing. Ray's workers need the
variable too (``ray_kwargs.ray_init.runtime_env.env_vars``). verl's switches stay on, because they make it compute the
reference's log-probs: ``use_kl_loss`` for terms in the loss, ``use_kl_in_reward`` for terms with ``baseline: before``.
Its own coefficients and estimators are not used.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable
from functools import lru_cache, wraps
from importlib.metadata import version
from typing import Any

import torch

from kl_comedy.errors import UserError, bad_value
from kl_comedy.integrations.terms import HostTerms

VARIABLE = "KL_COMEDY_VERL_KL"
SUPPORTED = "0.9."


def terms() -> HostTerms:
    """The terms of the environment variable. Raises :class:`UserError` for one that verl cannot compute."""
    return _parsed(os.environ[VARIABLE])


@lru_cache(maxsize=1)
def _parsed(text: str) -> HostTerms:
    import yaml

    return HostTerms.parse(yaml.safe_load(text), host="verl")


def install() -> None:
    """Replace verl's functions wherever they were imported. Raises :class:`UserError` for another version of verl."""
    installed = version("verl")
    if not installed.startswith(SUPPORTED):
        raise bad_value("verl", installed, f"version {SUPPORTED}*", "the plugin replaces functions of its modules")
    # A mistake in the variable ends the process here, and not at the first update.
    terms()
    from verl.trainer.ppo import ray_trainer, utils
    from verl.workers.utils import losses

    _replace(losses.ppo_loss, actor_loss)
    _replace(ray_trainer.apply_kl_penalty, reward_penalty)
    _replace(utils.need_reference_policy, checked_switches)


def _replace(function: Any, build: Callable[[Any], Any]) -> None:
    """Put ``build(function)`` in the place of ``function`` in every module of verl that has it."""
    replacement = wraps(function)(build(function))
    # `from module import name` has copied the function into other modules. A copy of the list, because looking at a
    # lazy module may import more.
    function_name = function.__name__
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("verl.") and getattr(module, function_name, None) is function:
            setattr(module, function_name, replacement)


def actor_loss(original: Any) -> Any:
    """verl's ``ppo_loss`` without its KL, plus the terms in the loss, aggregated by ``loss_agg_mode``.

    Adds the metric ``actor/kl_comedy_loss``.
    """

    def ppo_loss(config: Any, model_output: Any, data: Any, dp_group: Any = None) -> Any:
        from verl.trainer.ppo.core_algos import agg_loss
        from verl.utils.metric import AggregationType, Metric
        from verl.workers.utils.padding import no_padding_2_padding

        without_kl = copy.copy(config)
        # verl's config refuses plain assignments.
        object.__setattr__(without_kl, "use_kl_loss", False)
        loss, metrics = original(without_kl, model_output, data, dp_group)
        if not terms().loss:
            return loss, metrics
        logp_BT = no_padding_2_padding(model_output["log_probs"], data)
        names = [name for name in ("response_mask", "old_log_probs", "ref_log_prob") if name in data]
        padded = data.select(*names).to_padded_tensor()
        mask_BT = padded["response_mask"].to(bool)
        ref_logp_BT = None
        if "ref_log_prob" in names:
            ref_logp_BT = padded["ref_log_prob"]
        kl_BT = terms().loss_BT(
            logp_BT=logp_BT,
            ref_logp_BT=ref_logp_BT,
            behaviour_logp_BT=padded["old_log_probs"],
            mask_BT=mask_BT,
        )
        batch = config.global_batch_info
        kl_loss = agg_loss(kl_BT, mask_BT, config.loss_agg_mode, **batch)
        # The choice that verl makes for its own losses: with sizes of the global batch a micro-batch's loss is one part
        # of a sum, without them it is a mean.
        batch_sizes = [value for name, value in batch.items() if name != "dp_size"]
        has_global_sizes = any(value is not None for value in batch_sizes)
        aggregation = AggregationType.MEAN
        if batch["dp_size"] > 1 or has_global_sizes:
            aggregation = AggregationType.SUM
        metrics["actor/kl_comedy_loss"] = Metric(value=kl_loss, aggregation=aggregation)
        return loss + kl_loss, metrics

    return ppo_loss


def reward_penalty(original: Any) -> Any:
    """verl's ``apply_kl_penalty``: each completion's score minus beta times its cost, spread evenly over its tokens.

    For advantages of the whole completion (``grpo``, ``rloo``), which sum the rewards of its tokens. The controller of
    verl's coefficient is not advanced.
    """

    def apply_kl_penalty(data: Any, kl_ctrl: Any, kl_penalty: str = "kl") -> Any:
        batch = data.batch
        mask_BT = batch["response_mask"].bool()
        old_BT = batch["old_log_probs"]
        cost_B = terms().cost_B(
            logp_BT=old_BT, ref_logp_BT=batch["ref_log_prob"], behaviour_logp_BT=old_BT, mask_BT=mask_BT
        )
        share_BT = mask_BT / mask_BT.sum(-1, keepdim=True).clamp(min=1)
        batch["token_level_rewards"] = batch["token_level_scores"] - cost_B[:, None] * share_BT
        return data, {"actor/kl_comedy_cost": torch.mean(cost_B).item()}

    return apply_kl_penalty


def checked_switches(original: Any) -> Any:
    """verl's ``need_reference_policy``, which reads the config first. Raises where a term would be left out."""

    def need_reference_policy(config: Any) -> bool:
        if terms().reward and not config.algorithm.get("use_kl_in_reward", False):
            raise bad_value("algorithm.use_kl_in_reward", False, "true", f"{VARIABLE} has a term in the reward")
        needs_reference = any(term.reference == "initial" for term in terms().loss)
        if needs_reference and not original(config):
            key = "actor_rollout_ref.actor.use_kl_loss"
            raise bad_value(key, False, "true", f"{VARIABLE} has a term that needs the reference")
        return bool(original(config))

    return need_reference_policy


if os.environ.get(VARIABLE):
    try:
        install()
    except UserError as error:
        # verl ignores a plugin's exceptions, and would train without the terms.
        raise SystemExit(f"kl_comedy.integrations.verl: {error}") from error
