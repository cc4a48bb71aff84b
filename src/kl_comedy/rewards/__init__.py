"""Rewards: text and gold answer in, verdict out.

    completions, answers -> cheap checks -> registered reward function (in a worker process where isolated) -> Reward

Functions that hostile text can make slow or large run in worker processes that are killed on overrun; learned rewards
judge whole batches in this process. Status:
``ok`` the verifier reached a verdict (true or false), ``unparseable`` the completion holds no answer, ``timeout`` the
verifier was killed, ``refused`` a check refused the text or it broke the verifier; all but ``ok`` have value 0 in the
built-in rewards.
"""

from kl_comedy.rewards import environments, gym, learned, mathematics, text  # register the built-in parts
from kl_comedy.rewards.base import BadGold, RewardFunction, check_options
from kl_comedy.rewards.pool import Job, RewardPool, shared_pool
from kl_comedy.rewards.score import RewardSum, Scorer, score

__all__ = ["BadGold", "Job", "RewardFunction", "RewardPool", "RewardSum", "Scorer", "check_options", "score"]
__all__ += ["environments", "gym", "learned", "mathematics", "shared_pool", "text"]
