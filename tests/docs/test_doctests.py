"""The examples in docstrings run."""

import doctest
import importlib
import pkgutil

import pytest

import kl_comedy
from kl_comedy.registry import ESTIMATORS

IN_OTHERS = ("kl_comedy.rollouts.engines.vllm_worker", "kl_comedy.integrations.trl")  # import vLLM, and TRL
MODULES = [name for _, name, _ in pkgutil.walk_packages(kl_comedy.__path__, "kl_comedy.") if name not in IN_OTHERS]
PACKAGES = sorted({".".join(name.split(".")[:2]) for name in MODULES})


@pytest.mark.parametrize("package", PACKAGES)
def test_doctests(package, monkeypatch):
    ESTIMATORS.load()
    monkeypatch.setattr(ESTIMATORS, "_entries", dict(ESTIMATORS._entries))  # an example registers one
    results = {}
    for name in MODULES:
        if name == package or name.startswith(f"{package}."):
            results[name] = doctest.testmod(importlib.import_module(name))
    assert {name: result.failed for name, result in results.items() if result.failed} == {}
    if package in ("kl_comedy.api", "kl_comedy.kl", "kl_comedy.objective", "kl_comedy.config"):
        assert sum(result.attempted for result in results.values()) > 0
