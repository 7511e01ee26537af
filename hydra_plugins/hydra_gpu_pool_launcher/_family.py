"""Families: leaders, which are child processes, each with its whole tree, started, found again and ended.

A ``Family`` is used by one single-threaded process, which is a child subreaper. So is each leader: while it runs, what
daemonizes below it hangs on the leader, and when the leader dies, on us. So everything is found again, whatever session
or process group it went to. Nothing here knows of jobs, GPUs or files.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ._descriptors import wait_readable
from ._model import Exit
from ._pidfd import pidfd_open
from ._process import fork


def children() -> set[int]:
    """The pids of the children of this single-threaded process, zombies included.

    The kernel may leave some out when one of them ends during the reading (proc(5)): read until two readings agree, or
    it becomes clear that somebody forks without end.
    """
    before = _children()
    for _ in range(_ROUNDS):
        now = _children()
        if now == before:
            break
        before = now
    return before


def _children() -> set[int]:
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
            return {int(pid) for pid in file.read().split()}
    except FileNotFoundError:  # a kernel without CONFIG_PROC_CHILDREN
        return {pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if parent(pid) == os.getpid()}


def parent(pid: int) -> int | None:
    """The pid of the process that it hangs on; None: it is gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return int(file.read().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return None


@dataclass
class _Leader:
    pid: int
    pidfd: int


@dataclass
class _Ended:
    """A leader that is gone. ``exit``: None until it could be reaped; ``remnants``: what of its tree is left to end."""

    pid: int
    exit: Exit | None
    remnants: set[int] = field(default_factory=set)


_ROUNDS = 100
"""Of looking again, where each look may have missed somebody: enough for any tree, and a bound for what has no end."""

_WATCHED_AT_ONCE = 16
"""Remnants with a pidfd. There may be more of them than there are descriptors, and one that ends is enough to go on."""


@dataclass
class Family:
    """The leaders that this process started, by key, and whatever of their trees fell to this process.

    ``wait`` is the one place that blocks. Every child of this process that is not a running leader is taken for a
    remnant of an ended one, and killed: nothing else here may start processes.
    """

    _leaders: dict[int, _Leader] = field(default_factory=dict)
    _ended: dict[int, _Ended] = field(default_factory=dict)
    _watched: dict[int, int] = field(default_factory=dict)  # some of the remnants: pidfd by pid
    _abandoned: set[int] = field(default_factory=set)
    _spared: set[int] = field(default_factory=set)

    def descriptors(self) -> list[int]:
        """The descriptors that are ours and that a child must close."""
        return [*(leader.pidfd for leader in self._leaders.values()), *self._watched.values()]

    def spare(self, pids: Iterable[int]) -> None:
        """These children are not of any leader's tree: they are neither ended nor reaped here."""
        self._spared.update(pids)

    def end_spared(self, pid: int) -> bool:
        """SIGKILL to a child that is spared, and to its process group; True: it is reaped. To be called until it is."""
        _kill(pid)
        if not _reaped(pid):
            return False
        self._spared.discard(pid)  # the next process of this pid is another one
        return True

    def start(
        self,
        key: int,
        main: Callable[[frozenset[int]], int],
        around: contextlib.AbstractContextManager[None] | None = None,
    ) -> int:
        """Fork a leader, see ``fork``; its pid. The child must make itself a session leader and a subreaper."""
        os.close(os.open(os.devnull, os.O_RDONLY))  # raises, before the fork, where none is left for the pidfd
        pid = fork(main, around or contextlib.nullcontext())
        self._leaders[key] = _Leader(pid, pidfd_open(pid))
        return pid

    def signal(self, key: int, signum: int) -> None:
        """To the leader alone: what it started is its own to end, politely."""
        if key in self._leaders:
            with contextlib.suppress(PermissionError):  # it has become another user, as sudo does
                os.kill(self._leaders[key].pid, signum)  # it is our child and not reaped: the pid is its own
                os.kill(self._leaders[key].pid, signal.SIGCONT)  # one that is suspended could not hear it

    def leaders(self) -> dict[int, int]:
        """The pids of those that run, by key."""
        return {key: leader.pid for key, leader in self._leaders.items()}

    def leader(self, key: int) -> int | None:
        """Its pid, while it runs."""
        return self._leaders[key].pid if key in self._leaders else None

    def kill(self, key: int) -> None:
        """SIGKILL to the leader and its process group. What left the group falls to us when the leader is gone."""
        if key in self._leaders:
            _kill(self._leaders[key].pid)

    def abandon(self, key: int) -> None:
        """Wait no longer for this leader, nor for what is left of it."""
        if key in self._leaders:
            leader = self._leaders.pop(key)
            os.close(leader.pidfd)
            self._abandoned.add(leader.pid)
        elif key in self._ended:
            ended = self._ended.pop(key)
            self._abandoned |= ended.remnants if ended.exit is not None else ended.remnants | {ended.pid}
            for pid in ended.remnants & self._watched.keys():
                os.close(self._watched.pop(pid))

    def wait(self, timeout: float | None, watch: Iterable[int] = ()) -> tuple[dict[int, Exit | None], list[int]]:
        """Block until something ends, a watched descriptor is readable, or ``timeout`` seconds have passed.

        Gives the keys that made a step (None: the leader is gone, something of it is left; an Exit: all of its tree is
        gone) and the watched descriptors that are readable.
        """
        leaders = {leader.pidfd: key for key, leader in self._leaders.items()}
        remnants = {pidfd: pid for pid, pidfd in self._watched.items()}
        if (
            self._ended and not remnants
        ):  # what is left cannot be reaped yet, or there is no descriptor for it: look again
            timeout = 0.1 if timeout is None else min(timeout, 0.1)
        ready = wait_readable([*leaders, *remnants, *watch], timeout)
        steps: dict[int, Exit | None] = {}
        for key in (leaders[fd] for fd in ready if fd in leaders):
            leader = self._leaders.pop(key)
            os.close(leader.pidfd)
            self._ended[key] = _Ended(leader.pid, None)
            steps[key] = None
        gone = {remnants[fd] for fd in ready if fd in remnants}
        for pid in gone:  # where it cannot be reaped yet, its pidfd would wake us without end
            os.close(self._watched.pop(pid))
        if self._ended:
            self._clear(steps.keys() | {key for key, ended in self._ended.items() if ended.remnants & gone})
            for key, ended in list(self._ended.items()):
                if ended.exit is not None and not ended.remnants:
                    steps[key] = ended.exit
                    del self._ended[key]
        return steps, [fd for fd in ready if fd not in leaders and fd in watch]

    def _remnants(self) -> set[int]:
        return set().union(*(ended.remnants for ended in self._ended.values()))

    def _adopt(self, heirs: set[int]) -> None:
        """Kill whoever has become our child, as a remnant of the heirs."""
        known = {leader.pid for leader in self._leaders.values()} | self._remnants() | self._abandoned | self._spared
        known |= {ended.pid for ended in self._ended.values() if ended.exit is None}
        for pid in children() - known:
            _kill(pid)
            for key in heirs or self._ended:
                self._ended[key].remnants.add(pid)

    def _clear(self, heirs: set[int]) -> None:
        """End what ended leaders left behind, and reap what of it is gone.

        ``heirs``: the keys to which a child that is new to us belongs: those whose leader, or whose remnant, is gone
        just now.
        """
        for ended in self._ended.values():
            if ended.exit is None:
                ended.exit = _reap_leader(ended.pid)
        for _ in range(_ROUNDS):
            self._adopt(heirs)
            reaped = {pid for pid in self._remnants() | self._abandoned if _reaped(pid)}
            self._abandoned -= reaped
            heirs = {key for key, ended in self._ended.items() if ended.remnants & reaped}
            for ended in self._ended.values():
                ended.remnants -= reaped
            for pid in reaped & self._watched.keys():
                os.close(self._watched.pop(pid))
            if not reaped:  # whoever is reaped may have left children of its own, to us
                break
        else:
            self._adopt(heirs)  # it is not over, and must not look so
        for pid in sorted(self._remnants() - self._watched.keys())[: _WATCHED_AT_ONCE - len(self._watched)]:
            with contextlib.suppress(OSError):  # no descriptor is left: then without
                spare = os.open(os.devnull, os.O_RDONLY)  # the last one is for other work
                try:
                    pidfd = pidfd_open(pid)
                finally:
                    os.close(spare)
                if wait_readable([pidfd], 0):  # gone, and cannot be reaped yet
                    os.close(pidfd)
                else:
                    self._watched[pid] = pidfd


def _kill(pid: int) -> None:
    """SIGKILL to a child that is not reaped, and to its process group, if that is not ours.

    The group belongs to a session of the same job. A signal to it misses nobody who is just being forked, as one to a
    process does: a chain of forks, each of which exits when it has forked the next, ends only so.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):  # no such group, or one of another user by now
        group = os.getpgid(pid)
        if group != os.getpgrp():
            os.killpg(group, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def _reaped(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


def _reap_leader(pid: int) -> Exit | None:
    """How a leader that is gone ended. Its group is killed first: while the zombie holds the pid, the number is its.

    None where it cannot be reaped: a debugger that traces it has to do so first.
    """
    try:
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
            return None
        _kill(pid)
        _, status, usage = os.wait4(pid, 0)
    except ChildProcessError:  # a thread of the user's has taken it, and what there was to know
        return Exit(code=0, signal=None, cpu_s=0.0, peak_mb=0.0)
    code = os.waitstatus_to_exitcode(status)
    return Exit(
        code=code if code >= 0 else None,
        signal=-code if code < 0 else None,
        cpu_s=usage.ru_utime + usage.ru_stime,
        peak_mb=usage.ru_maxrss * 1024 / 1e6,
    )


def kill_children(spare: int) -> None:
    """SIGKILL to the children of this process but one, and to what they lead."""
    for pid in children() - {spare}:
        _kill(pid)


def end_all_children(within_s: float) -> None:
    """SIGKILL and reap every child of this process, and what falls to it meanwhile, for so many seconds at most.

    Never raises: nobody is left to do it.
    """
    deadline = time.monotonic() + within_s
    while pids := children():
        for pid in pids:
            _kill(pid)
        with contextlib.suppress(OSError):
            pidfd = pidfd_open(min(pids))
            wait_readable([pidfd], min(0.1, deadline - time.monotonic()))  # it may be one that does not die
            os.close(pidfd)
        if not {pid for pid in pids if _reaped(pid)} and time.monotonic() >= deadline:
            return
