"""Lets the configs of the folder in which a command runs take the place of those that come with the package.

The names of ``kl-comedy list configs`` then stand for what a test has made small.
"""

from pathlib import Path

from kl_comedy.config import shipped


def folder_here(kind):
    return Path(kind).resolve()


shipped.folder_of = folder_here
