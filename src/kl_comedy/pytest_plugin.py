"""The pytest plugin: a fixture that fails a test with the report of ``kl_comedy.conformance.check``.

pytest imports this module in every run of every environment that has this package, so torch is imported by the first
test that uses the fixture.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from kl_comedy.conformance import Report


@pytest.fixture
def kl_conformance() -> Callable[..., Report]:
    """A function with the arguments of ``kl_comedy.conformance.check`` that fails the test unless the report is ok.

    It returns the report. A mistake in the call, as an unknown target, is an error and not a failure.
    """

    def assert_conforms(loss_fn: Callable[..., Any], **options: Any) -> Report:
        __tracebackhide__ = True
        from kl_comedy.conformance import check

        report = check(loss_fn, **options)
        if not report.ok:
            # The report says what is wrong, so that the lines of this module would only hide it.
            pytest.fail(f"the KL loss does not optimize what it claims\n{report}", pytrace=False)
        return report

    return assert_conforms
