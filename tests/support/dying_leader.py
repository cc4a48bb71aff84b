"""Imported by the ranks of a test: rank 0 waits before, or is killed outright in, a transfer of weights.

KL_TEST_DIES, in the fourth transfer: ``gathering``: some weights were gathered from all ranks; ``sending``: one of two
servers has them. KL_TEST_WAITS: the file for which the sixth transfer waits, so that a test has time for what it does.
"""

import os
import signal
import time

from kl_comedy.models import weights
from kl_comedy.rollouts.engines import servers, transports

EARLIER = 3
"""Transfers that are complete before the one in which rank 0 dies."""
BUCKETS = 5
"""Buckets gathered before it dies while gathering."""
BUCKET_BYTES = 2**10
"""On all ranks: the whole policy of the test would be one bucket."""
SERVERS = 2
WAITS_AT = 6
DIES = os.environ.get("KL_TEST_DIES")
WAITS = os.environ.get("KL_TEST_WAITS")
counts = {"publish": 0, "buckets": 0, "sent": 0}


def publish(self, version, original=servers.EngineRollouts.publish):
    counts["publish"] += 1
    counts["buckets"] = 0
    if WAITS and counts["publish"] == WAITS_AT:
        while not os.path.exists(WAITS):
            time.sleep(0.01)
    return original(self, version)


def gathered(bucket, original=weights.gathered):
    counts["buckets"] += 1
    if counts["publish"] == EARLIER + 1 and counts["buckets"] > BUCKETS:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(bucket)


def send(self, *arguments, original=transports.FolderTransport.send):
    original(self, *arguments)
    counts["sent"] += 1
    if counts["sent"] == EARLIER * SERVERS + 1:
        os.kill(os.getpid(), signal.SIGKILL)


weights.BUCKET_BYTES = BUCKET_BYTES
if os.environ["RANK"] == "0":
    servers.EngineRollouts.publish = publish
    if DIES == "gathering":
        weights.gathered = gathered
    if DIES == "sending":
        transports.FolderTransport.send = send
