"""What the gradient of each KL term is on a real model: against a reference gradient, and whether beta matters at all.

    rows in K blocks -> gradient of every loss, by layer group, sketched -> inner products of blocks -> report

The command audits fresh completions of a policy that has left its reference; the callback audits an update's own rows
during a run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kl_comedy.registry import CALLBACKS

if TYPE_CHECKING:
    from kl_comedy.audit.run import AuditCallback


@CALLBACKS.register("audit", source="docs/audit.md")
def audit(every: int, terms: tuple[str, ...] = ("own",), samples: int | None = None, blocks: int = 8) -> AuditCallback:
    """Gradient audit of the KL terms every so many updates; `audit.every` adds it."""
    # Imported here, because a lookup in the registry must not import Lightning.
    from kl_comedy.audit.run import AuditCallback
    from kl_comedy.config import AuditConfig

    settings = AuditConfig(every=every, terms=list(terms), samples=samples)
    return AuditCallback(settings, blocks=blocks)
