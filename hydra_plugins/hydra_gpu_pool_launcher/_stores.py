"""torch's stores, in the process of a job: node 0 opens and holds them, the other nodes knock until it has."""

from __future__ import annotations

import contextlib
import datetime
import math
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from . import _descriptors, _interpreter
from ._forward import LOOK, Signals
from ._model import Group
from ._nodes import SILENT_S, NodeError, Nodes
from ._settings import PORTS

_LONGEST_S = 1e8
"""Some three years: the most that is asked of torch."""

_KNOCK_S = 5.0
"""After which one knock is given up for the next: the kernel repeats one that is not answered ever more rarely."""


class Stores:
    """torch's stores, one for each start of a group: what an earlier one has left there would confuse the next.

    The first one is at the endpoint, where the nodes meet, or at any port where none is given. The process of the job
    on node 0 holds them. Raises NodeError where it cannot be had, ToldError.
    """

    def __init__(self, group: Group, num: int, signals: Signals) -> None:
        import torch.distributed as distributed

        self._distributed: Any = distributed
        self._ddp = group.ddp
        self._signals = signals
        self._timeout = datetime.timedelta(seconds=math.ceil(min(group.ddp.rdzv_timeout_s, _LONGEST_S)))
        host, _, port = group.ddp.rdzv_endpoint.rpartition(":")
        self._host = host.strip("[]")
        self._port = int(port) and int(port) + num % PORTS
        self._first: Any = None
        self._last: Any = None
        self._opened: dict[int, tuple[int, int]] = {}

    def open(self, start: int) -> tuple[str, int]:
        """Open the one of this start; host and port of it. Only node 0 knows the port, where it is not the first."""
        before = _descriptors.descriptors()
        if start == 0:
            self._last = self._first = self._here(self._port) if self._ddp.node_rank == 0 else self._there()
        elif self._ddp.node_rank == 0:
            self._last = self._here(0)
        opened = {fd: file for fd, file in _descriptors.descriptors().items() if before.get(fd) != file}
        if start == 0 and self._ddp.nnodes > 1:
            self._bound_answers(opened)
        # What another thread has opened meanwhile cannot be told from it: then nothing is closed.
        self._opened |= {} if _interpreter.other_threads() else opened
        return self._host, self._last.port

    def forget(self) -> None:
        """Before ranks are forked again: the last one's thread ends with it. What the nodes have is kept for them."""
        self._first = self._first if self._ddp.nnodes > 1 else None
        self._last = self._first

    def descriptors(self) -> set[int]:
        """Those that are still open, for ranks to close.

        To be asked in a rank's own process: here, torch's thread could close one meanwhile, that of a node that knocks
        say, and its number would be that of the rank's log.
        """
        return {fd for fd, file in self._opened.items() if _descriptors.identity(fd) == file}

    def nodes(self) -> Nodes | None:
        """What the machines of the job have to tell each other; None: there is one."""
        if self._ddp.nnodes == 1:
            return None
        return Nodes(self._first, self._ddp.node_rank, self._ddp.nnodes, self._ddp.rdzv_timeout_s, self._signals.pause)

    def _here(self, port: int) -> Any:
        remedy = "give ddp.rdzv_endpoint a host that this machine has, and a port that is free on it"
        try:
            store, why = self._made(lambda _: self._store(port, is_master=True))
        except RuntimeError as error:
            why = f"could not open its store at {self._host}:{port} ({_first_line(error)})"
            raise NodeError(f"{why}: {remedy}", final=True) from error
        if store is None:
            why = f"could not reach its own store as {self._host} within {self._ddp.rdzv_timeout_s:g} s"
            raise NodeError(f"{why}: {remedy}", final=True)
        return store

    def _there(self) -> Any:
        store, why = self._made(self._knock)
        if store is None:
            waited = f"waited {self._ddp.rdzv_timeout_s:g} s for node 0 at {self._host}:{self._port}, in vain"
            raise NodeError(f"{waited} ({why})", final=True)
        return store

    def _made(self, make: Callable[[_Attempt], Any]) -> tuple[Any, str]:
        """What ``make`` gives, within ``rdzv_timeout_s``, or None, and why there is none. Raises what it raises.

        It runs in a thread of its own. Here, it would be deaf to signals; and torch waits for ever where something else
        listens at the endpoint: then the thread is left there, and the job ends with it.
        """
        attempt, bell = _Attempt(), self._signals.bell

        def run() -> None:
            try:
                attempt.store = make(attempt)
            except Exception as error:
                attempt.error = error
            attempt.over = True
            if not attempt.left.is_set():
                with contextlib.suppress(BlockingIOError):  # the pipe is full: nobody sleeps
                    bell.write(bytes([LOOK]))

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        deadline = time.monotonic() + self._ddp.rdzv_timeout_s
        try:
            while not attempt.over and time.monotonic() < deadline:
                self._signals.pause(deadline - time.monotonic())
        finally:
            attempt.left.set()
        if not attempt.over:
            return None, attempt.why
        thread.join()  # the ranks are forks: of a process with one thread
        if attempt.error is not None:
            raise attempt.error
        return attempt.store, ""

    def _knock(self, attempt: _Attempt) -> Any:
        """Node 0 may come later: knock until it is there. torch's own attempts are a second apart."""
        attempt.why = "nobody answers"
        while not attempt.left.is_set():
            try:
                socket.create_connection((self._host, self._port), timeout=_KNOCK_S).close()
                attempt.why = "what listens there is no store of torch's, or hangs"
                return self._store(self._port, is_master=False)
            except (OSError, RuntimeError, UnicodeError) as error:
                attempt.why = _first_line(error)
            attempt.left.wait(0.1)
        return None

    def _store(self, port: int, *, is_master: bool) -> Any:
        return self._distributed.TCPStore(
            self._host, port, is_master=is_master, timeout=self._timeout, wait_for_workers=False
        )

    def _bound_answers(self, opened: Iterable[int]) -> None:
        """A question to a store that hangs, or whose machine is gone, is to fail, as ``Nodes`` expects it."""
        limit = struct.pack("ll", math.ceil(SILENT_S), 0)
        for fd in opened:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:  # it may be no socket
                if connection.family != socket.AF_UNIX and connection.getpeername()[1] == self._first.port:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        self._first.set_timeout(datetime.timedelta(seconds=SILENT_S))


@dataclass
class _Attempt:
    """To make a store. ``why``: it has not come about so far; ``left``: nobody waits for it any more."""

    store: Any = None
    error: Exception | None = None
    over: bool = False
    why: str = ""
    left: threading.Event = field(default_factory=threading.Event)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
