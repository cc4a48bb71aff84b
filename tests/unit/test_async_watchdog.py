"""How long a silent sampler is waited for, on a clock of the test's own; messages to a reader that does not read."""

import os
import signal
import socket
import subprocess
import sys
import time
from multiprocessing.connection import Connection

import pytest

from kl_comedy.training.asynchronous.sampler import LONGEST_LOOK_S, STARTUP_S, MessageSender, Watchdog


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def looks(watchdog, clock, *, seconds, beats, asked=True, step=0.25):
    """Look every ``step`` seconds; the first complaint and when it came. ``beats``: the count at each second."""
    for n in range(int(seconds / step)):
        clock.now += step
        if said := watchdog.look(beats(n * step), asked=asked):
            return said, (n + 1) * step
    return None, seconds


def test_signs_of_life_keep_it_and_their_absence_does_not(clock):
    watchdog = Watchdog(silence_s=5, answer_s=1000, now=clock)
    assert looks(watchdog, clock, seconds=60, beats=int) == (None, 60)
    said, when = looks(watchdog, clock, seconds=60, beats=lambda at: 60)
    assert said == "gave no sign of life for 5 s (lag.silence_limit_s)" and 5 < when <= 6


def test_before_its_first_sign_of_life_it_has_time_to_start(clock):
    watchdog = Watchdog(silence_s=5, answer_s=10_000, now=clock)
    said, when = looks(watchdog, clock, seconds=2 * STARTUP_S, beats=lambda at: 7)
    assert "no sign of life for 600 s" in said and STARTUP_S < when <= STARTUP_S + 1
    looks(watchdog, clock, seconds=2, beats=lambda at: 8 + int(at))
    watchdog.restarted()
    assert looks(watchdog, clock, seconds=STARTUP_S - 1, beats=lambda at: 9)[0] is None


def test_one_that_lives_and_answers_nothing_is_given_up_only_while_it_owes_an_answer(clock):
    watchdog = Watchdog(silence_s=5, answer_s=30, now=clock)
    assert looks(watchdog, clock, seconds=100, beats=int, asked=False)[0] is None
    assert looks(watchdog, clock, seconds=29, beats=int)[0] is None
    watchdog.answered()
    assert looks(watchdog, clock, seconds=29, beats=int)[0] is None
    said, _ = looks(watchdog, clock, seconds=3, beats=int)
    assert said == "lived and finished nothing for 30 s (lag.answer_limit_s)"


def test_time_in_which_nobody_waited_or_this_process_slept_is_not_held_against_it(clock):
    watchdog = Watchdog(silence_s=5, answer_s=50, now=clock)
    looks(watchdog, clock, seconds=2, beats=int)
    clock.now += 10_000  # the learner learns
    watchdog.begin()
    assert watchdog.look(2, asked=True) is None
    clock.now += 10_000  # both were stopped, in the middle of a wait
    assert watchdog.look(2, asked=True) is None
    assert looks(watchdog, clock, seconds=5 - LONGEST_LOOK_S - 1, beats=lambda at: 2)[0] is None


def test_posting_to_a_stopped_reader_does_not_wait_and_ends_with_it():
    ours, theirs = socket.socketpair()
    with theirs:
        reader = subprocess.Popen(
            [sys.executable, "-c", "import sys; sys.stdin.buffer.read()"],
            stdin=theirs.fileno(),
            stdout=subprocess.DEVNULL,
        )
    os.kill(reader.pid, signal.SIGSTOP)
    pipe = Connection(ours.detach())
    sender = MessageSender(pipe)
    start = time.monotonic()
    for _ in range(20):
        sender.post(bytes(10**6))  # far more than a socket holds
    assert time.monotonic() - start < 5
    assert sender._thread.is_alive()
    reader.kill()
    reader.wait()
    sender.close()
    assert not sender._thread.is_alive()
    pipe.close()
    with pytest.raises(Exception, match="pickle"):
        sender.post(lambda: None)
