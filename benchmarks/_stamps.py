"""When a sweep's processes began, reached the task function and were gone, as seen from outside of the launcher.

The app tells the first two itself: a hook that Python runs in each forked child, and the task function, write the time
to a pipe. That a process is gone, the kernel tells: its pidfd becomes readable, when a poll of this process wakes up,
which is given the CPU before all others where that is allowed. The launcher's own words are not asked.

All times are of CLOCK_MONOTONIC, which is one clock for all processes, in seconds.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from _measure import turns
from _place import LAUNCHERS, Place, end_what_is_left, place, succeeded

from hydra_plugins.hydra_gpu_pool_launcher import _pidfd

APP = """
import os, time

class Stamp:
    fd = os.open(os.environ["BENCH_STAMPS"], os.O_WRONLY)
    def now(self):
        return time.clock_gettime(time.CLOCK_MONOTONIC)
    def __call__(self, event, at=None, slot="-"):
        os.write(self.fd, f"{os.getpid()} {event} {at or self.now()!r} {slot}\\n".encode())

stamp = Stamp()

def before():  # in the forking process; before all others, and so the last of them: right before the fork
    stamp.forking = stamp.now()

def in_child():  # before all others, and so the first of them
    stamp("begun")
    stamp("forking", stamp.forking)

os.register_at_fork(before=before, after_in_child=in_child)

import atexit
import hydra, torch
from hydra.core.plugins import Plugins

instantiate = Plugins.instantiate_launcher

def instantiate_stamped(*args, **kwargs):
    launcher = instantiate(*args, **kwargs)
    stamp("instantiated")
    launch = launcher.launch
    def launch_stamped(*args, **kwargs):
        stamp("launch")
        return launch(*args, **kwargs)
    launcher.launch = launch_stamped
    return launcher

Plugins.instantiate_launcher = instantiate_stamped

@hydra.main(version_base="1.3", config_path=None)
def app(cfg):
    stamp("task", slot=os.environ.get("GPU_POOL_SLOT", "-"))
    atexit.register(stamp, "last")

if __name__ == "__main__":
    app()
"""

BARE = ("hydra/launcher=bare",)
"""The floor, in ``_bare``: two jobs at once, each forked, composed and run, and nothing else."""

LIMIT_S = 300
"""Fails a hang."""


@dataclass
class Job:
    """What is known of one process that ran a task. ``times``: by event."""

    slot: str
    times: dict[str, float]


@dataclass
class Stamps:
    """What was written so far, and seen: by the pid of the process, and of the task functions the slots."""

    times: dict[int, dict[str, float]] = field(default_factory=lambda: defaultdict(dict))
    slots: dict[int, str] = field(default_factory=dict)

    def take(self, line: str) -> tuple[int, str]:
        """One line of the pipe; the pid of its process, and the event."""
        pid, event, at, slot = line.split()
        self.times[int(pid)][event] = float(at)
        if event == "task":
            self.slots[int(pid)] = slot
        return int(pid), event

    def successions(self) -> list[tuple[Job, Job]]:
        """Of each slot, each job and the next: in the order in which their processes began."""
        by_slot: dict[str, list[Job]] = defaultdict(list)
        for pid, slot in self.slots.items():
            by_slot[slot].append(Job(slot, self.times[pid]))
        return [
            pair for jobs in by_slot.values() for pair in pairwise(sorted(jobs, key=lambda job: job.times["begun"]))
        ]


def seen_in_turns(rounds: int, jobs: int) -> dict[str, list[Stamps]]:
    """Of gpu_pool and of ``bare``, each in its turn, a sweep of so many jobs per round."""
    ways = {"gpu_pool": LAUNCHERS["gpu_pool"], "bare": BARE}
    seen: dict[str, list[Stamps]] = {name: [] for name in ways}
    with place(APP) as at:
        for name in turns([*ways], rounds):
            seen[name].append(watched(at, ways[name], jobs))
    return seen


def gaps(seen: Sequence[Stamps], before: str, after: str) -> tuple[float, ...]:
    """Of all jobs that follow another on its slot, in milliseconds."""
    pairs = [pair for stamps in seen for pair in stamps.successions()]
    return tuple(1000 * (b.times[after] - a.times[before]) for a, b in pairs)


def watched(at: Place, launcher: Sequence[str], jobs: int, until: Callable[[Stamps], bool] | None = None) -> Stamps:
    """The stamps of a whole sweep; or until that is so, and then main is sent a SIGTERM.

    Raises RuntimeError where the sweep fails by itself, or hangs.
    """
    pipe = at.directory / "stamps"
    os.mkfifo(pipe)
    read = os.open(pipe, os.O_RDWR)  # so that it has a writer to the end
    at.environ["BENCH_STAMPS"] = str(pipe)
    at.environ["PYTHONPATH"] = str(Path(__file__).with_name("_bare"))
    try:
        with tempfile.TemporaryDirectory(dir=at.directory) as into, tempfile.TemporaryFile("w+") as said:
            command = at.command(launcher, jobs, into)
            process = at.popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
            stamps = Stamps()
            with _first_on_the_cpu():
                ended_by_us = _watch(process, read, stamps, until)
            process.wait()
            end_what_is_left()
            if not ended_by_us:
                said.seek(0)
                succeeded(process, said.read())
    finally:
        os.close(read)
        pipe.unlink()
    return stamps


def _watch(process: subprocess.Popen[str], read: int, stamps: Stamps, until: Callable[[Stamps], bool] | None) -> bool:
    """Block until main is gone; True where it was sent a SIGTERM."""
    poll = select.epoll()
    pids: dict[int, int] = {}
    main = _pidfd.pidfd_open(process.pid)
    poll.register(main, select.EPOLLIN)
    poll.register(read, select.EPOLLIN)
    unread, asked = "", False
    while True:
        ready = [fd for fd, _ in poll.poll(LIMIT_S)]
        now = time.clock_gettime(time.CLOCK_MONOTONIC)
        if not ready:
            process.kill()
            raise RuntimeError(f"nothing has happened for {LIMIT_S} s")
        for fd in ready:
            if fd in pids:
                stamps.times[pids.pop(fd)]["gone"] = now
                os.close(fd)
        if read in ready:
            *lines, unread = (unread + os.read(read, 1 << 16).decode()).split("\n")
            for pid, event in map(stamps.take, lines):
                if event == "begun":
                    with contextlib.suppress(ProcessLookupError):
                        pids[fd := _pidfd.pidfd_open(pid)] = pid
                        poll.register(fd, select.EPOLLIN)
            if until is not None and not asked and until(stamps):
                asked = True
                process.terminate()
        if main in ready:
            for fd in (main, *pids):
                os.close(fd)
            poll.close()
            return asked


@contextlib.contextmanager
def _first_on_the_cpu() -> Iterator[None]:
    """This process does not wait for others, where it may have that: what it sees, it sees when it happens."""
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    except PermissionError:
        print("not allowed to have the CPU first: some of what is seen is seen late", file=sys.stderr)
        yield
        return
    try:
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
