"""Every example in a docstring runs."""

import doctest
import importlib
import pkgutil

import pytest

import kl_comedy

MODULES = [module.name for module in pkgutil.walk_packages(kl_comedy.__path__, "kl_comedy.")]


@pytest.mark.parametrize("name", MODULES)
def test_doctests(name):
    found = doctest.testmod(importlib.import_module(name))
    assert found.failed == 0


def test_there_are_examples_to_run():
    finder = doctest.DocTestFinder(exclude_empty=True)
    with_examples = [n for n in MODULES if any(t.examples for t in finder.find(importlib.import_module(n)))]
    assert len(with_examples) > 20
