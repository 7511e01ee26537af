"""Apps that a test watches while they run, and ends: real ones, in interpreters of their own.

Each inherits the write end of a pipe, its *lifeline*: every fork of it has it too, so that the pipe ends exactly when
the last of them is gone. Jobs report on it when they run.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support import LIMIT_S

from hydra_plugins.hydra_gpu_pool_launcher import _descriptors, _pidfd
from hydra_plugins.hydra_gpu_pool_launcher._inotify import GROWN, Changes

APP = """
import atexit, ctypes, os, signal, subprocess, sys, threading, time
import {package}
from {package} import GpuPool

signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it
if "KEEP_HUP" not in os.environ:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # and under nohup, this

def report(text=""):
    os.write(LIFELINE, f"{{os.getpid()}} {{text}}\\n".encode())

def rest():  # not in signal.pause(): what comes right before it would not be heard
    while True:
        time.sleep(0.02)

def sleeping(x):
    report()
    rest()

def hear_nothing(then):
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    then()
    while True:
        signal.pause()

def deaf(x):
    hear_nothing(report)

def with_child(x):
    child = subprocess.Popen(["sh", "-c", "trap '' TERM; echo; sleep 1000"], stdout=subprocess.PIPE)
    child.stdout.readline()
    report(child.pid)
    rest()

def with_daemon(x):
    read, write = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            hear_nothing(lambda: os.write(write, str(os.getpid()).encode()))
        os._exit(0)
    report(os.read(read, 20).decode())
    rest()

def held(x):  # answers Ctrl-C, and goes on
    try:
        {{"sleeping": sleeping, "deaf": deaf, "with_child": with_child, "with_daemon": with_daemon}}[KIND](x)
    except KeyboardInterrupt:
        rest()

{source}
"""

RUN = "GpuPool(cpu_slots=2, kill_grace_s={grace}, dir='sweep').map({job}, [dict(x=x) for x in range(3)])"


@dataclass
class App:
    """A running app: its process, its lifeline, and what has been reported on it."""

    process: subprocess.Popen[str]
    lifeline: int
    directory: Path
    _unread: bytes = b""
    pidfds: list[int] = field(default_factory=list)
    children: list[int] = field(default_factory=list)  # of the jobs, as far as they have reported them

    def report(self) -> str:
        """Block until the next line; "" when everybody is gone."""
        while b"\n" not in self._unread:
            assert _descriptors.wait_readable([self.lifeline], LIMIT_S), "nothing is reported, nobody is gone"
            got = os.read(self.lifeline, 4096)
            if not got:
                return ""
            self._unread += got
        line, _, self._unread = self._unread.partition(b"\n")
        return line.decode()

    def wait_for_jobs(self, count: int) -> list[int]:
        """The pids of so many jobs; children that they report besides are watched too."""
        pids = []
        for _ in range(count):
            pid, *children = map(int, self.report().split())
            pids.append(pid)
            self.children += children
            self.pidfds += [_pidfd.pidfd_open(child) for child in (pid, *children)]
        return pids

    def relatives(self) -> dict[str, int]:
        """The pids of guard and supervisor, which are watched from then on. The guard is main's youngest child."""
        by_thread = (task.read_text().split() for task in Path(f"/proc/{self.process.pid}/task").glob("*/children"))
        guard = int([pid for pids in by_thread for pid in pids][-1])
        supervisor = int(Path(f"/proc/{guard}/task/{guard}/children").read_text().split()[0])
        # A process that has let go of the lifeline has not ended yet: it closes its files first.
        self.pidfds += [_pidfd.pidfd_open(pid) for pid in (guard, supervisor)]
        return {"guard": guard, "supervisor": supervisor}

    def assert_nothing_is_left(self) -> None:
        """Blocks until all that were forked are gone, and then those that were reported must be."""
        while self.report():
            pass
        for pidfd in self.pidfds:
            assert _descriptors.wait_readable([pidfd], LIMIT_S), "a process of the sweep is still there"

    def wait_for_start_on_record(self, num: int) -> None:
        """Block until the journal has the start of this job, which may run by then for a moment."""
        started = {"event": "start", "job": num}.items()
        wait_until(
            lambda: any(started <= event.items() for event in self.journal()), self.directory / "sweep/.gpu_pool"
        )

    def journal(self) -> list[dict[str, Any]]:
        path = self.directory / "sweep/.gpu_pool/journal.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]

    def ends(self) -> dict[int, tuple[str, str]]:
        return {e["job"]: (e["status"], e["error_text"]) for e in self.journal() if e["event"] == "end"}


StartApp = Callable[..., App]


def wait_until(holds: Callable[[], bool], *directories: Path) -> None:
    """Block until something holds that only changes with files of these directories."""
    with Changes(GROWN) as changes:
        for directory in directories:
            changes.watch(str(directory))
        for _ in range(10 * LIMIT_S):
            if holds():
                return
            changes.wait(0.1)
    raise AssertionError("it does not come to that")


@contextlib.contextmanager
def starting(directory: Path) -> Iterator[StartApp]:
    """What starts apps in this directory, and ends them when this context is left."""
    apps: list[App] = []

    def start(source: str, *, before: str = "", prefix: tuple[str, ...] = (), **popen: Any) -> App:
        text = APP.format(package="hydra_plugins.hydra_gpu_pool_launcher", source=f"{before}\n{source}")
        read, write = os.pipe()
        (directory / "app.py").write_text(f"LIFELINE = {write}\n{text}")
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        command = [*prefix, sys.executable, "app.py"]
        process = subprocess.Popen(command, cwd=directory, pass_fds=[write], text=True, **{**streams, **popen})
        os.close(write)
        apps.append(App(process, read, directory))
        return apps[-1]

    yield start
    for app in apps:
        with contextlib.suppress(ProcessLookupError):
            app.process.kill()
        app.process.communicate(timeout=LIMIT_S)
        os.close(app.lifeline)
        for pidfd in app.pidfds:
            os.close(pidfd)
