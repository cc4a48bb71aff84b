"""The explicit list of rooms whose built-in parts a run may name. Importing this fills the registries."""

import kl_comedy.data
import kl_comedy.evaluation
import kl_comedy.kl
import kl_comedy.objective
import kl_comedy.rewards
import kl_comedy.rollouts

ROOMS = (
    kl_comedy.data, kl_comedy.evaluation, kl_comedy.kl, kl_comedy.objective, kl_comedy.rewards, kl_comedy.rollouts,
)  # fmt: skip
