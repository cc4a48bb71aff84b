"""Bugs that the checks must find, each planted by replacing one function of the product."""

PLANTS = {}
