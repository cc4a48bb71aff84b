"""The command line."""

from __future__ import annotations

import sys

INTERRUPTED_EXIT_CODE = 130
"""As a shell reports a process that Ctrl-C ended."""


def run() -> None:
    """The console script: :func:`kl_comedy.cli.main.run`, which handles Ctrl-C as soon as it is imported."""
    try:
        # Not above: importing takes a part of a second, and Ctrl-C in it would print a traceback.
        from kl_comedy.cli import main

        main.run()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED_EXIT_CODE)
