"""Fixtures of the tests of inference servers."""

from faulty_servers import connect, policy, serve, short_polls  # noqa: F401
