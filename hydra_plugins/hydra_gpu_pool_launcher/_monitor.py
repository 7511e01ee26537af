"""The process that asks the driver, as the supervisor keeps it running: asked, heard, ended where it is silent.

NVML is broken in every fork of a process that has loaded it, and a driver in trouble lets nobody go: so it is a program
of its own, ``_driver``, and nothing here waits for it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from . import _cards, _descriptors, _process, _streams
from ._cards import Gpu
from ._family import Family

FIRST_S = 30.0
"""To the first answer: where no other process uses a GPU, the driver makes each of them ready for it."""

ANSWER_S = 10.0
"""To any other."""

_AGAIN_S, _LONGEST_AGAIN_S = 10.0, 600.0
"""From one start to the next, twice as long after each that came to nothing."""


@dataclass(frozen=True)
class Answer:
    """What came of the questions asked up to ``asked``: the GPUs, or why there are none."""

    asked: float
    gpus: tuple[Gpu, ...]
    fault: str | None = None


@dataclass(eq=False)
class Monitor:
    """The process is started when it is first asked, and again, at most so often, after it has ended or was silent.

    It is a child that the family spares: it is of no job's tree. It ends with this process, and when its input does.
    """

    command: Sequence[str]
    family: Family
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    _pid: int | None = None
    _channel: int = -1
    _unread: bytes = b""
    _asked: deque[float] = field(default_factory=deque)  # when, of the questions that are not answered
    _heard: bool = False  # of this process
    _not_before: float = float("-inf")
    _failures: int = 0
    _fault: str = ""
    _left: set[int] = field(default_factory=set)  # those that were killed, and could not be reaped yet

    def descriptors(self) -> list[int]:
        """What is readable when there is something to hear, and is to be closed in a job."""
        return [] if self._pid is None else [self._channel]

    @property
    def deadline(self) -> float | None:
        """When ``hear`` is due at the latest; None: nothing was asked."""
        return self._asked[0] + (ANSWER_S if self._heard else FIRST_S) if self._asked else None

    def ask(self, now: float) -> Answer | None:
        """Ask, and do not wait; the answer where it is known already: that there will be none."""
        if self._pid is None:
            if now < self._not_before:
                return Answer(now, (), self._fault)
            try:
                self._start()  # it answers once without being asked
            except OSError as error:
                return self._failed(f"the process that asks it cannot be started ({error.strerror})", now)
            self._not_before = now + min(_AGAIN_S * 2**self._failures, _LONGEST_AGAIN_S)
        else:
            with contextlib.suppress(OSError):  # it has ended, which is heard
                _descriptors.send(self._channel, b"\n")
        self._asked.append(now)
        return None

    def hear(self, now: float) -> Answer | None:
        """What has come since, the newest; None: nothing. Whoever is silent for too long is ended. Does not block."""
        if self._pid is None:
            return None
        answer = None
        try:
            got = os.read(self._channel, 1 << 20)
            *lines, self._unread = (self._unread + got).split(b"\n")
        except BlockingIOError:
            lines, got = [], b"-"
        except OSError:
            lines, got = [], b""
        for line in lines:
            self._heard, self._failures = True, 0
            answer = _read(self._asked.popleft() if self._asked else now, line)
        if not got:
            return self._failed("the process that asks it has ended", now)
        if self.deadline is not None and now >= self.deadline:
            return self._failed(f"no answer within {ANSWER_S if self._heard else FIRST_S:g} s", now)
        return answer

    def _start(self) -> None:
        self._bury()
        ours, theirs = (_streams.beyond_standard(end.detach()) for end in socket.socketpair())
        parent = os.getpid()
        try:
            self._pid = _process.fork(lambda _: _become(self.command, theirs, parent, self.environ))
        except OSError:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        self.family.spare({self._pid})
        os.set_blocking(ours, False)
        self._channel, self._unread, self._heard = ours, b"", False

    def _failed(self, why: str, now: float) -> Answer:
        asked = self._asked[-1] if self._asked else now
        self._asked.clear()
        self._fault = why
        self._failures += 1
        if self._pid is not None:
            os.close(self._channel)
            self._left.add(self._pid)
            self._pid = None
        self._bury()
        return Answer(asked, (), why)

    def _bury(self) -> None:
        """Those that are to end, as far as they have: in the D state nobody dies."""
        self._left = {pid for pid in self._left if not self.family.end_spared(pid)}


def _read(asked: float, line: bytes) -> Answer:
    try:
        return Answer(asked, _cards.read(line.decode(errors="replace")))
    except _cards.NoAnswer as error:
        return Answer(asked, (), str(error))


def _become(command: Sequence[str], channel: int, parent: int, environ: Mapping[str, str]) -> int:
    os.setsid()  # a Ctrl-C is not meant for it
    _process.die_with_parent(parent)
    _streams.redirect(channel, 0, 1)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    _process.execute(command, (), environ)
