"""A rank's own process: what it runs, once it is one of its own, and what it leaves for the process of its job."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pickle
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import _descriptors, _exit_hooks, _leader, _process, _signals
from ._body import PlainBody, Result
from ._descriptors import Descriptor, Unnamed
from ._errors import JobError
from ._failure import Said
from ._forward import LOOK
from ._leader import Assignment, Origin
from ._result import stated

Function = Callable[[], Any]
"""The user's function, with its arguments."""


@dataclass(frozen=True, kw_only=True)
class Rank(Assignment):
    """What the process of a rank is told. ``rank``: in the whole group; ``report``: the file for what it has to say.

    ``bell``: what ``LOOK`` is written to when that is there. ``gate``: is readable, and not to be read from, once all
    ranks are there and may begin; in ``orders`` there is then the rest of the environment, as JSON.
    """

    rank: int
    report: Unnamed
    bell: Descriptor
    gate: Descriptor
    orders: Unnamed

    def descriptors(self) -> set[int]:
        """Those that it needs."""
        return {self.report.fd, self.bell.fd, self.gate.fd, self.orders.fd}

    @property
    def name(self) -> str:
        """Of the process: the job's number, and the rank."""
        return f"{self.job.num} rank {self.rank}"


def main(rank: Rank, function: Function, origin: Origin, of_the_app: _exit_hooks.OfTheApp) -> int:
    """Run the function, in a fork of the job's process; the exit code.

    ``of_the_app``: what the job's own process found when it began. Hydra's log file of the job, which was opened after
    that, is rank 0's alone.
    """
    received, of_the_job = _leader.enter(rank, origin)
    if rank.rank != 0:
        _exit_hooks.leave_log_files(of_the_app)
    _wait_for_the_others(rank)
    return _run_to_the_end(rank, function, received, of_the_job)


def main_of_fresh(rank: Rank, load: Callable[[], Function]) -> int:
    """The same, in the fresh interpreter that ``_leader.become_fresh`` has started. ``load`` imports the app."""
    for fd in rank.descriptors():
        os.set_inheritable(fd, False)
    _wait_for_the_others(rank)
    received, function = _leader.enter_fresh(rank, load)
    if isinstance(function, JobError):
        return _end(rank, PlainBody.failure(rank.job, function), time.monotonic(), received, _NOTHING_OF_THE_APP)
    return _run_to_the_end(rank, function, received, _NOTHING_OF_THE_APP)


def _wait_for_the_others(rank: Rank) -> None:
    _descriptors.wait_readable([rank.gate.fd])
    os.environ.update(json.loads(rank.orders.read()))
    for fd in (rank.gate.fd, rank.orders.fd):
        os.close(fd)


_NOTHING_OF_THE_APP = _exit_hooks.OfTheApp([], None)


def _run_to_the_end(
    rank: Rank, function: Function, received: _signals.Received, of_the_app: _exit_hooks.OfTheApp
) -> int:
    process = os.getpid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        os.chdir(rank.cwd)
        value = _leader.call(rank.job, function)
        result = Result(value, value) if rank.rank == 0 else Result(None)
    except Exception as error:
        result = PlainBody.failure(rank.job, error)
    at = time.monotonic()
    if os.getpid() != process:  # a fork of the function's own that came back from it: it is not the rank
        return _leader.end(result.error, of_the_app)
    return _end(rank, result, at, received, of_the_app)


def _end(rank: Rank, result: Result, at: float, received: _signals.Received, of_the_app: _exit_hooks.OfTheApp) -> int:
    _process.raise_file_size_limit()  # whatever the function has set for itself
    with _leader.undisturbed(received) as told:
        told_before = tuple(told)
        result, payload, report = stated(rank.files, rank.job, PlainBody(), result)
        if not rank.report.write(pickle.dumps(Said(at, report, payload, told_before))):
            raise OSError(errno.EBADF, "the function has closed the descriptor for its result")
        with contextlib.suppress(OSError):  # the pipe is full; or the function has closed it
            rank.bell.write(bytes([LOOK]))
    return _leader.end(result.error, of_the_app)
