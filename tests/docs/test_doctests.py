"""The examples in docstrings run."""

import doctest
import importlib
import pkgutil

import pytest

import kl_comedy
from kl_comedy.registry import ESTIMATORS

# Their import needs vLLM, and TRL.
IN_OTHERS = ("kl_comedy.rollouts.engines.vllm_worker", "kl_comedy.integrations.trl")
MODULES = [name for _, name, _ in pkgutil.walk_packages(kl_comedy.__path__, "kl_comedy.") if name not in IN_OTHERS]
PACKAGES = sorted({".".join(name.split(".")[:2]) for name in MODULES})
WITH_EXAMPLES = ("kl_comedy.api", "kl_comedy.kl", "kl_comedy.objective", "kl_comedy.config")
"""Packages whose examples must not get lost."""


@pytest.mark.parametrize("package", PACKAGES)
def test_doctests(package, monkeypatch):
    ESTIMATORS.load()
    monkeypatch.setattr(ESTIMATORS, "_entries", dict(ESTIMATORS._entries))  # an example registers one
    attempted = 0
    failed = {}
    for name in MODULES:
        if name == package or name.startswith(f"{package}."):
            result = doctest.testmod(importlib.import_module(name))
            attempted += result.attempted
            if result.failed:
                failed[name] = result.failed
    assert failed == {}
    if package in WITH_EXAMPLES:
        assert attempted > 0
