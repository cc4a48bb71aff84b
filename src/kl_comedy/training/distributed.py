"""The processes of one run (started by Lightning's Trainer, srun or torchrun), and exchanges between them.

What may fail on one rank alone goes through :meth:`Ranks.raise_on_all_ranks`, so that no rank waits for another that
has stopped.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from kl_comedy.config import Config
from kl_comedy.errors import RunFailed, UserError, bad_value

T = TypeVar("T")

TIMEOUT = timedelta(hours=2)
"""How long a process waits for the others in one exchange: longer than the longest evaluation of a slow rank."""

LAUNCHED = "KL_COMEDY_LAUNCHED"
"""Set in processes that a run started: rank 0 reports the outcome, and they exit with code 0."""

_ENVIRONMENT = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE", LAUNCHED, "OMP_NUM_THREADS")


class RankFailed(RuntimeError):
    """An error other than :class:`UserError` and :class:`RunFailed` on one rank; raised on all."""


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """``size`` processes, this one being ``rank``. ``sharded``: the policy is split over them (FSDP).

    With one process every exchange is the identity. All ranks must call the exchanging methods, in the same order.
    """

    rank: int = 0
    size: int = 1
    sharded: bool = False

    @property
    def is_rank_zero(self) -> bool:
        """Rank 0 prints, logs and writes."""
        return self.rank == 0

    def split(self, items: Sequence[T]) -> list[T | None]:
        """Every ``size``-th item from this rank on, padded with None to the same length on all ranks.

        >>> Ranks(rank=1, size=2).split("abc")
        ['b', None]
        """
        mine: list[T | None] = list(items[self.rank :: self.size])
        return mine + [None] * (-(-len(items) // self.size) - len(mine))

    def bounds(self, count: int) -> tuple[int, int]:
        """This rank's contiguous part of ``count`` items, as even as possible.

        >>> [Ranks(rank=rank, size=2).bounds(5) for rank in range(2)]
        [(0, 2), (2, 5)]
        """
        return count * self.rank // self.size, count * (self.rank + 1) // self.size

    def gather(self, item: T) -> list[T]:
        """The items of all ranks, in the order of ranks, on every rank."""
        if self.size == 1:
            return [item]
        items: list[Any] = [None] * self.size
        dist.all_gather_object(items, item)
        return items

    def broadcast(self, item: T) -> T:
        """The item of rank 0."""
        if self.size == 1:
            return item
        box = [item]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def raise_on_all_ranks(self, action: Callable[[], T]) -> T:
        """Call ``action`` on every rank; where it fails on one, raise on all.

        :class:`UserError` and :class:`RunFailed` keep their type, any other exception becomes :class:`RankFailed`.
        """
        if self.size == 1:
            return action()
        from torch.distributed.checkpoint.api import CheckpointException  # slow to import

        result: Any = None
        failure: BaseException | None = None
        report: tuple[type[Exception], str] | None = None
        try:
            result = action()
        except (Exception, CheckpointException) as error:
            failure = error
            report = next((cls for cls in (UserError, RunFailed) if isinstance(error, cls)), RankFailed), str(error)
        for rank, reported in enumerate(self.gather(report)):
            if reported is not None:
                kind, text = reported
                raise kind(text if rank == 0 else f"{text} (on rank {rank})") from failure
        done: T = result
        return done

    def on_rank_zero(self, action: Callable[[], T]) -> T | None:
        """Call ``action`` on rank 0 only, and raise on all ranks where it fails. None on the other ranks."""
        return self.raise_on_all_ranks(lambda: action() if self.is_rank_zero else None)


SINGLE_PROCESS = Ranks()

POLL_S = 1.0
INTERRUPT_AFTER_S = 5.0
"""A process that waits for a lost one in a gloo exchange gets an error at once; one that computes is interrupted."""
END_AFTER_S = 30.0
"""One that waits where no interrupt arrives, as in an exchange between GPUs, is ended. Both count from the loss."""
BROKEN_EXCHANGE = re.compile(r"gloo/transport|ProcessGroup|NCCL error|remote process exited")
"""In errors of torch's exchanges between ranks; not in those of connections to servers."""


class RankWatch(threading.Thread):
    """Sees that another process of the run was lost, and lets this one end with a line that says so.

    Lightning's observer of the processes that it started kills this one too, and the user reads ``Killed``. ``advice``
    (how far the run was, and how to resume it) ends the line.
    """

    def __init__(self, advice: Callable[[], str]) -> None:
        super().__init__(daemon=True, name="ranks")
        self._advice = advice
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._pids: dict[int, int] = {}
        self._leader: int | None = None
        self._is_reported = False
        self._has_interrupted = False
        self._ended = threading.Event()

    def watch_children(self, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        """Watch the ranks that this one has started."""
        self._children = dict(enumerate(processes, start=1))
        self.start()

    def watch_others(self, ranks: Ranks) -> None:
        """Know the ranks of this host by their numbers; watch rank 0 where it started this one. All ranks call."""
        places = ranks.gather((socket.gethostname(), os.getpid(), os.getppid()))
        host, _, parent = places[ranks.rank]
        self._pids = {rank: pid for rank, (name, pid, _) in enumerate(places) if name == host and rank != ranks.rank}
        if self._pids.get(0) == parent:
            self._leader = parent
            self.start()

    def lost(self, error: BaseException) -> str | None:
        """Which ranks are gone, and how, as a sentence; None where ``error`` has another cause.

        After an error of an exchange between ranks the cause is waited for: an exchange may fail before the process at
        its other end is gone. Of a :class:`UserError` or :class:`RunFailed` only such an error, quoted in it, counts.
        """
        self._is_reported = True  # this process ends by itself from now on
        if isinstance(error, KeyboardInterrupt | SystemExit) and not self._has_interrupted:
            return None  # a user's: Lightning has killed the ranks that it started
        has_own_words = isinstance(error, UserError | RunFailed)
        broken = isinstance(error, dist.DistError) or BROKEN_EXCHANGE.search(str(error)) is not None
        if has_own_words and not broken:
            return None
        deadline = time.monotonic() + INTERRUPT_AFTER_S
        gone = self._gone(killed_only=not broken)
        while broken and not gone and time.monotonic() < deadline:
            time.sleep(0.1)
            gone = self._gone()
        if gone:
            return "; ".join(gone)
        return None if has_own_words or not broken else "the exchange with another rank broke; its own message says why"

    def _gone(self, *, killed_only: bool = False) -> list[str]:
        gone = []
        for rank, child in self._children.items():
            code = child.poll()
            if code is not None and (code < 0 or not killed_only):
                gone.append(f"rank {rank} (process {child.pid}) {_how_it_ended(code)}")
        for rank, pid in self._pids.items():
            if rank not in self._children and not _is_running(pid) and not killed_only:
                gone.append(f"rank {rank} (process {pid}) has ended")
        return gone

    def end(self) -> None:
        """Stop watching: the run is over."""
        self._ended.set()

    def run(self) -> None:
        lost_at = None
        while not self._ended.wait(POLL_S):
            codes = [child.poll() for child in self._children.values()]
            failed = any(codes) or (self._leader is not None and os.getppid() != self._leader)
            if not failed:
                if codes and None not in codes:
                    return
                continue
            now = time.monotonic()
            lost_at = now if lost_at is None else lost_at
            if now - lost_at > END_AFTER_S:
                self._end_process()
            is_late = now - lost_at > INTERRUPT_AFTER_S
            if is_late and self._children and not self._has_interrupted and not self._is_reported:
                self._has_interrupted = True
                main = threading.main_thread().ident
                assert main is not None
                signal.pthread_kill(main, signal.SIGINT)  # a real signal, which ends a call to sleep or read too

    def _end_process(self) -> None:
        for child in self._children.values():
            child.kill()
        if not self._is_reported:
            print(f"failed: {'; '.join(self._gone())}{self._advice()}", file=sys.stderr, flush=True)
        os._exit(1)


def _how_it_ended(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return "has ended" if code == 0 else f"ended with code {code}"


def _is_running(pid: int) -> bool:
    """Whether a process is there and not only waiting to be reaped."""
    import psutil

    with contextlib.suppress(psutil.Error):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


@contextlib.contextmanager
def process_state_restored(threads: int | None = None) -> Iterator[None]:
    """Compute with ``threads`` threads inside; afterwards threads, environment and process group are as before."""
    before = {name: os.environ.get(name) for name in _ENVIRONMENT}
    threads_before = torch.get_num_threads()  # Lightning's launcher divides the cores by the processes
    try:
        torch.set_num_threads(threads or threads_before)
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        torch.set_num_threads(threads_before)
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def cluster_environment(config: Config) -> Any:
    """Who starts the processes: SLURM, torchrun, or Lightning's launcher. SLURM's own signal handlers stay off.

    Raises :class:`UserError` where several nodes are asked for and nothing starts processes on the others, and where
    srun, torchrun or another launcher started another number of processes than the config says.
    """
    from lightning.pytorch.plugins.environments import LightningEnvironment, SLURMEnvironment, TorchElasticEnvironment

    devices, nodes = config.train.devices, config.train.nodes
    variable = "WORLD_SIZE"
    try:
        if TorchElasticEnvironment.detect():
            environment: Any = TorchElasticEnvironment()
        elif SLURMEnvironment.detect():
            environment, variable = SLURMEnvironment(auto_requeue=False), "SLURM_NTASKS"
        else:
            environment = LightningEnvironment()
        started = os.environ.get(variable)
        if environment.creates_processes_externally and started not in (None, str(devices * nodes)):
            allowed = f"train.devices x train.nodes = {started}"
            raise bad_value("train.devices", devices, allowed, f"{variable}: so many processes were started")
        environment.validate_settings(num_devices=devices, num_nodes=nodes)
    except (RuntimeError, ValueError) as error:  # of srun's variables
        if isinstance(error, UserError):
            raise
        raise UserError(f"train.devices, train.nodes: {error}") from error
    if nodes > 1 and isinstance(environment, LightningEnvironment) and "NODE_RANK" not in os.environ:
        why = "start it by srun, by torchrun on each node, or as a sweep's cell"
        raise bad_value("train.nodes", nodes, "1 where nothing starts processes on other nodes", why)
    return environment
