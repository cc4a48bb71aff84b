"""Imported by the ranks of a test: the teacher's server answers rank 1 no more after five completions."""

import os

from kl_comedy.rollouts.engines import teacher
from kl_comedy.rollouts.engines.client import ServerTrouble

ANSWERS = 5
counts = {"asked": 0}


def prompt_logps(self, *arguments, original=teacher.Client.prompt_logps):
    counts["asked"] += 1
    if counts["asked"] > ANSWERS:
        raise ServerTrouble("connection refused")
    return original(self, *arguments)


if os.environ["RANK"] == "1":
    teacher.Client.prompt_logps = prompt_logps
