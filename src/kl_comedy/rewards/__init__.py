"""Rewards: text and gold answer in, verdict out.

    completions, answers -> cheap checks -> registered reward function (in a worker process where isolated) -> Reward

``score`` judges texts by one registered reward; :class:`RewardSum` computes the weighted sum of a run's config.
Functions that hostile text can make slow or large run in worker processes that are killed on overrun. Status:
``ok`` the verifier reached a verdict (true or false), ``unparseable`` the completion holds no answer, ``timeout`` the
verifier was killed, ``refused`` a check refused the text or it broke the verifier; all but ``ok`` have value 0 in the
built-in rewards.
"""

from kl_comedy.rewards import gym, mathematics, text
from kl_comedy.rewards.base import BadGold, RewardFunction, check_options
from kl_comedy.rewards.pool import Job, RewardPool, shared_pool
from kl_comedy.rewards.score import RewardSum, score

BUILT_IN = (text, gym, mathematics)
"""The modules whose import registers the built-in rewards."""

__all__ = [
    "BUILT_IN",
    "BadGold",
    "Job",
    "RewardFunction",
    "RewardPool",
    "RewardSum",
    "check_options",
    "score",
    "shared_pool",
]
