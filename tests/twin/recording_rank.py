"""Imported first by a process of a run over several: it trains in float64 and records its updates.

KL_TEST_TWIN_FILE: where; KL_TEST_TWIN_KILL_AT: the update before which it ends.
"""

import contextlib
import os

from tests.twin.engine import Recorder, in_float64

_UNTIL_THE_END = contextlib.ExitStack()

if "KL_TEST_TWIN_FILE" in os.environ:
    kill_at = os.environ.get("KL_TEST_TWIN_KILL_AT")
    _UNTIL_THE_END.enter_context(in_float64())
    recorder = Recorder(None if kill_at is None else int(kill_at), os.environ["KL_TEST_TWIN_FILE"])
    _UNTIL_THE_END.enter_context(recorder.attached())
