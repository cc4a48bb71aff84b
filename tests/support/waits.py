"""A plugin that gives a test time for what it does to a run: before an update the run waits for a file, or a signal.

KL_TEST_WAITS_AT: how many updates are made before. KL_TEST_WAITS_FOR: the file; ``{cell}`` in it is that of a sweep.
"""

import os
import time
from pathlib import Path

from kl_comedy.training import stop_signals
from kl_comedy.training.module import PolicyModule


def training_step(self, *arguments, original=PolicyModule.training_step):
    if self.version >= int(os.environ.get("KL_TEST_WAITS_AT", 10**9)):
        file = Path(os.environ["KL_TEST_WAITS_FOR"].format(cell=self.config.tracking.tags.get("cell")))
        while not file.exists() and getattr(stop_signals._listening, "signal", None) is None:
            time.sleep(0.01)
    return original(self, *arguments)


PolicyModule.training_step = training_step
