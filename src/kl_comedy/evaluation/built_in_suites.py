"""Registers the built-in suites, the YAML files of ``definitions/``; imported at the first lookup of a suite."""

from kl_comedy.evaluation.suites import DEFINITIONS, register_suite

for _file in sorted(DEFINITIONS.glob("*.yaml")):
    register_suite(_file)
