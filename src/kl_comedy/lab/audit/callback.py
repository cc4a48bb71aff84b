"""The audit during a run: before an update, on its own completions; it changes nothing of the run."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Sequence
from typing import Any

from lightning.pytorch.callbacks import Callback

from kl_comedy.config import AuditConfig, Config
from kl_comedy.errors import UserError, bad_value
from kl_comedy.kl import BetaState, resolve_terms
from kl_comedy.lab.audit.measure import audit_blocks, equal_blocks, select_terms
from kl_comedy.lab.audit.report import AuditReport
from kl_comedy.lab.audit.statistics import MINIMUM_BLOCKS
from kl_comedy.records import Scored
from kl_comedy.training.build import is_off_policy
from kl_comedy.training.module import PolicyModule

log = logging.getLogger("kl_comedy")


def audited_groups(config: Config) -> int:
    """Groups of an update that are audited: those of ``audit.samples`` completions, or half of the update's.

    An audit of a whole update costs about two updates, and is half as noisy as that of half of it.
    """
    groups = config.rollout.prompts_per_batch // config.algorithm.updates_per_batch
    if config.audit.samples is not None:
        return min(groups, config.audit.samples // config.rollout.group_size)
    return min(groups, max(groups // 2, MINIMUM_BLOCKS))


class AuditCallback(Callback):
    """Audits the gradient of the KL terms every ``audit.every`` updates. The registry of callbacks calls it ``audit``.

    Never before the first update, where the KL is zero. The check of beta is made at the first audit of the process; a
    term that fails it is warned about.
    """

    def __init__(self, config: AuditConfig) -> None:
        self._config = config
        self._metrics: dict[str, float] = {}
        self._checked_beta = False

    def check_config(self, config: Config) -> None:
        """Raise :class:`UserError` for an audit that could not run, before anything is trained."""
        config = dataclasses.replace(config, audit=self._config)
        terms = resolve_terms(config.kl)
        betas = [BetaState(term.beta).value for term in terms]
        select_terms(config.audit.terms, terms, betas, on_policy=not is_off_policy(config), key="audit.terms")
        self._groups = audited_groups(config)
        if self._groups < MINIMUM_BLOCKS:
            raise bad_value(
                "audit.every",
                config.audit.every,
                f"0 where an audit has fewer than {MINIMUM_BLOCKS} groups",
                f"rollout.prompts_per_batch, algorithm.updates_per_batch and audit.samples leave {self._groups}",
            )

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        version = pl_module.version
        self._metrics = {}
        if version == 0 or version % self._config.every:
            return
        try:
            with trainer.precision_plugin.forward_context():
                report = self._audit(pl_module, batch.rows)
        except UserError as error:
            log.warning(f"audit at update {version + 1}: {error}")
            return
        for line in report.failures:
            log.warning(f"audit at update {version + 1}: {line}")
        self._checked_beta = True
        self._metrics = audit_metrics(report)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
        if self._metrics:
            trainer.logger.log_metrics(self._metrics, step=pl_module.version)

    def _audit(self, module: PolicyModule, rows: Sequence[Scored]) -> AuditReport:
        on_policy = not is_off_policy(module.config)
        betas = [beta.value for beta in module.betas]
        terms = select_terms(self._config.terms, module.terms, betas, on_policy=on_policy, key="audit.terms")
        return audit_blocks(
            module,
            equal_blocks(rows[: self._groups * module.config.rollout.group_size], self._config.blocks),
            terms,
            on_policy=on_policy,
            sketch=self._config.sketch,
            seed=module.version,
            check=not self._checked_beta,
        )


def audit_metrics(report: AuditReport) -> dict[str, float]:
    """The report as metrics; what is undefined is left out."""
    metrics = {
        "audit/reference_noise": report.reference_noise,
        "audit/kl_to_policy_norm": report.total_kl_to_policy,
        "time/audit": report.seconds,
    }
    for term in report.terms:
        metrics |= {
            f"audit/{term.key}/cosine": math.nan if term.cosine is None else term.cosine.value,
            f"audit/{term.key}/delivered": term.delivered.value,
            f"audit/{term.key}/bias": term.bias.value,
            f"audit/{term.key}/variance": term.variance,
            f"audit/{term.key}/kl_to_policy_norm": term.kl_to_policy,
            f"audit/{term.key}/silent_share": term.silent_share,
        }
    return {name: value for name, value in metrics.items() if math.isfinite(value)}
