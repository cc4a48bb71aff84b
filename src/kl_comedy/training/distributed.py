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
from kl_comedy.processes import LOOPBACK

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
    """A group of ``size`` processes; this process is ``rank``. ``sharded``: the policy is split over them (FSDP).

    With one process every exchange is the identity. All ranks must call the exchanging methods, in the same order: one
    that skips an exchange leaves the others waiting in it for :data:`TIMEOUT`.
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
        part: list[T | None] = list(items[self.rank :: self.size])
        # The same length everywhere, because ranks exchange something at each of their items.
        length = -(-len(items) // self.size)
        padding = [None] * (length - len(part))
        return part + padding

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
            report = _kind_of(error), str(error)
        # Kept until here: a rank that raised at once would leave the others waiting in their next exchange.
        for rank, reported in enumerate(self.gather(report)):
            if reported is not None:
                kind, text = reported
                if rank != 0:
                    text = f"{text} (on rank {rank})"
                raise kind(text) from failure
        done: T = result
        return done

    def on_rank_zero(self, action: Callable[[], T]) -> T | None:
        """Call ``action`` on rank 0 only, and raise on all ranks where it fails. None on the other ranks."""

        def act() -> T | None:
            if self.is_rank_zero:
                return action()
            return None

        return self.raise_on_all_ranks(act)


def _kind_of(error: BaseException) -> type[Exception]:
    """What an error of one rank is raised as on all. An error of a plugin may not survive the exchange itself."""
    if isinstance(error, UserError):
        return UserError
    if isinstance(error, RunFailed):
        return RunFailed
    return RankFailed


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
        # Numbers of processes mean something on their own host only.
        processes = ranks.gather((socket.gethostname(), os.getpid(), os.getppid()))
        host, _, parent = processes[ranks.rank]
        self._pids = {}
        for rank, (other_host, pid, _) in enumerate(processes):
            if other_host == host and rank != ranks.rank:
                self._pids[rank] = pid
        if self._pids.get(0) == parent:
            self._leader = parent
            self.start()

    def lost(self, error: BaseException) -> str | None:
        """Which ranks are gone, and how, as a sentence; None where ``error`` has another cause.

        After an error of an exchange between ranks the cause is waited for: an exchange may fail before the process at
        its other end is gone. A :class:`UserError` or :class:`RunFailed` counts only where it quotes such an error.
        """
        self._is_reported = True  # this process ends by itself from now on
        is_interrupt = isinstance(error, KeyboardInterrupt | SystemExit)
        if is_interrupt and not self._has_interrupted:
            # The user's. The ranks that this process started are gone because Lightning has killed them.
            return None
        says_its_cause = isinstance(error, UserError | RunFailed)
        is_broken_exchange = isinstance(error, dist.DistError) or BROKEN_EXCHANGE.search(str(error)) is not None
        if says_its_cause and not is_broken_exchange:
            return None
        deadline = time.monotonic() + INTERRUPT_AFTER_S
        gone = self._gone(killed_only=not is_broken_exchange)
        while is_broken_exchange and not gone and time.monotonic() < deadline:
            time.sleep(0.1)
            gone = self._gone()
        if gone:
            return "; ".join(gone)
        if says_its_cause or not is_broken_exchange:
            return None
        return "the exchange with another rank broke; its own message says why"

    def _gone(self, *, killed_only: bool = False) -> list[str]:
        """A clause for each rank that has ended; ``killed_only``: that this one started and a signal ended."""
        gone = []
        for rank, child in self._children.items():
            code = child.poll()
            if code is None:
                continue
            was_killed = code < 0
            if was_killed or not killed_only:
                gone.append(f"rank {rank} (process {child.pid}) {_how_it_ended(code)}")
        if killed_only:
            return gone  # how a process ended is known of one's own children only
        for rank, pid in self._pids.items():
            if rank not in self._children and not _is_running(pid):
                gone.append(f"rank {rank} (process {pid}) has ended")
        return gone

    def end(self) -> None:
        """Stop watching: the run is over."""
        self._ended.set()

    def run(self) -> None:
        """Look every :data:`POLL_S` seconds; interrupt, then end this process when it goes on long after a loss."""
        lost_at = None
        while not self._ended.wait(POLL_S):
            if not self._has_lost_a_rank():
                if self._children_have_finished():
                    return
                continue
            now = time.monotonic()
            if lost_at is None:
                lost_at = now
            if now - lost_at > END_AFTER_S:
                self._end_process()
            is_late = now - lost_at > INTERRUPT_AFTER_S
            if is_late and self._children and not self._has_interrupted and not self._is_reported:
                self._interrupt_main_thread()

    def _has_lost_a_rank(self) -> bool:
        if any(child.poll() for child in self._children.values()):
            return True
        # A process whose parent ends gets another parent.
        return self._leader is not None and os.getppid() != self._leader

    def _children_have_finished(self) -> bool:
        codes = [child.poll() for child in self._children.values()]
        return bool(codes) and None not in codes

    def _interrupt_main_thread(self) -> None:
        self._has_interrupted = True
        main = threading.main_thread().ident
        assert main is not None
        # A real signal, which ends a call to sleep or read too; an exception set from here would wait for its return.
        signal.pthread_kill(main, signal.SIGINT)

    def _end_process(self) -> None:
        """End the run's processes of this host at once: the main thread waits where no signal reaches it."""
        for child in self._children.values():
            child.kill()
        if not self._is_reported:
            print(f"failed: {'; '.join(self._gone())}{self._advice()}", file=sys.stderr, flush=True)
        os._exit(1)


def _how_it_ended(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    if code == 0:
        return "has ended"
    return f"ended with code {code}"


def _is_running(pid: int) -> bool:
    """Whether a process is there and not only waiting to be reaped."""
    import psutil

    # A process that ends between the two questions is not running either.
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
        # A second run in this process must not take itself for a rank of the first.
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def cluster_environment(config: Config) -> Any:
    """What starts the processes: SLURM, torchrun, or Lightning's launcher. SLURM's own signal handlers stay off.

    Raises :class:`UserError` where several nodes are asked for and nothing starts processes on the others, and where
    srun, torchrun or another launcher started another number of processes than the config says.
    """
    from lightning.fabric.plugins.environments.lightning import LightningEnvironment
    from lightning.fabric.plugins.environments.slurm import SLURMEnvironment

    devices = config.train.devices
    nodes = config.train.nodes
    try:
        environment, variable = _detected_environment()
        started = os.environ.get(variable)
        is_counted = environment.creates_processes_externally and started is not None
        if is_counted and started != str(devices * nodes):
            allowed = f"train.devices x train.nodes = {started}"
            raise bad_value("train.devices", devices, allowed, f"{variable}: so many processes were started")
        environment.validate_settings(num_devices=devices, num_nodes=nodes)
        if isinstance(environment, SLURMEnvironment):
            _set_main_address(nodes)
    except UserError:
        raise
    except (RuntimeError, ValueError) as error:  # what Lightning raises for srun's variables
        raise UserError(f"train.devices, train.nodes: {error}") from error
    starts_on_other_nodes = not isinstance(environment, LightningEnvironment) or "NODE_RANK" in os.environ
    if nodes > 1 and not starts_on_other_nodes:
        reason = "start it by srun, by torchrun on each node, or as a sweep's cell"
        raise bad_value("train.nodes", nodes, "1 where nothing starts processes on other nodes", reason)
    return environment


def _detected_environment() -> tuple[Any, str]:
    """What starts the processes, and the variable in which it says how many there are."""
    from lightning.fabric.plugins.environments.lightning import LightningEnvironment
    from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
    from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment

    # torchrun first: it may itself be started by srun, once per node.
    if TorchElasticEnvironment.detect():
        return TorchElasticEnvironment(), "WORLD_SIZE"
    if SLURMEnvironment.detect():
        # Lightning's requeueing would save in the middle of an update; stop_signals.py saves after it.
        return SLURMEnvironment(auto_requeue=False), "SLURM_NTASKS"
    return LightningEnvironment(), "WORLD_SIZE"


def _set_main_address(nodes: int) -> None:
    """Choose the address at which the ranks of a SLURM step meet; Lightning would take the first node's name.

    That name need not be one of the network (NodeName and NodeAddr of slurm.conf), and torch would ask for it until
    :data:`TIMEOUT`. Raises :class:`UserError` where several nodes need it and it cannot be resolved.
    """
    from lightning.fabric.plugins.environments.slurm import SLURMEnvironment

    if "MASTER_ADDR" in os.environ:
        return
    if nodes == 1:
        os.environ["MASTER_ADDR"] = LOOPBACK
        return
    name = SLURMEnvironment.resolve_root_node_address(os.environ.get("SLURM_NODELIST", LOOPBACK))
    try:
        socket.getaddrinfo(name, None)
    except OSError as error:
        allowed = "an address of the first node that all nodes reach, exported (in a profile: under environment)"
        raise bad_value("MASTER_ADDR", name, allowed, f"SLURM's name of the node: {error.strerror}") from None
