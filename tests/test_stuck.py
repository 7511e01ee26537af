"""A terminal, or a reader of main's output, that takes nothing for long: the sweep and its files do not wait for it."""

from __future__ import annotations

import contextlib
import csv
import os
import signal
import socket
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from running import App, StartApp
from support import LIMIT_S
from terminal import terminal

from hydra_plugins.hydra_gpu_pool_launcher import _descriptors, _inotify
from hydra_plugins.hydra_gpu_pool_launcher._outlet import Outlet, Streams

BEFORE = """
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])

def job(x):
    print(f"job {x} says hello")
    report(x)
    signal.sigwait([signal.SIGUSR1])
    if x == 1:
        raise ValueError("boo")
    return x
"""

MAP = "GpuPool(cpu_slots=2, gpus=[], dir='sweep', {more}).map({job}, [dict(x=x) for x in range({jobs})])"


def mapped(jobs: int = 2, job: str = "job", more: str = "") -> str:
    return MAP.format(jobs=jobs, job=job, more=more)


def fill(fd: int) -> int:
    """The number of bytes, of x, that are in the pipe from now on; it takes no more."""
    own = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK)
    filled = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            filled += os.write(own, b"x" * 4096)
    os.close(own)
    return filled


@contextlib.contextmanager
def full_pipe() -> Iterator[tuple[int, int]]:
    """Its read end, its write end; it is full."""
    read, write = os.pipe()
    fill(write)
    yield read, write
    for fd in (read, write):
        with contextlib.suppress(OSError):
            os.close(fd)


def read_to_the_end(fd: int) -> str:
    """What was printed, without what has filled the pipe."""
    got = b""
    while more := os.read(fd, 1 << 16):
        got += more
    return got.lstrip(b"x").decode()


def statuses(app: App) -> dict[str, str]:
    try:
        with (app.directory / "sweep/results.csv").open() as file:
            return {next(iter(row.values())): row["status"] for row in csv.DictReader(file)}
    except FileNotFoundError:
        return {}


def wait_for_results(app: App, wanted: dict[str, str]) -> None:
    with _inotify.Changes() as changes:
        changes.watch(str(app.directory / "sweep"))
        while not wanted.items() <= statuses(app).items():
            assert _descriptors.wait_readable([changes.fd], LIMIT_S), f"results.csv stays as it is: {statuses(app)}"
            os.read(changes.fd, 1 << 16)


def jobs_of(app: App, count: int) -> dict[int, int]:
    """Block until so many jobs have reported: their pids, by number."""
    reports = [tuple(map(int, app.report().split())) for _ in range(count)]
    return {num: pid for pid, num in reports}


@pytest.mark.parametrize(
    ("stuck", "more", "signum"),
    [
        ("stdout", "output='tee'", signal.SIGINT),
        ("stdout", "output='tee', progress='none'", signal.SIGHUP),
        ("stderr", "", signal.SIGTERM),
    ],
)
def test_a_signal_ends_a_sweep_whose_output_nobody_takes(
    start_app: StartApp, stuck: str, more: str, signum: int
) -> None:
    with full_pipe() as (_, write):
        streams: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, stuck: write}
        job = "def says(x):\n    print('hello')\n    sleeping(x)\n"
        app = start_app(job + mapped(job="says", more=more), **streams)
        app.wait_for_jobs(2)
        app.process.send_signal(signum)
        assert app.process.wait(LIMIT_S) == -signum
        assert os.get_blocking(write)
        app.assert_nothing_is_left()
        assert statuses(app) == {"0": "CANCELLED", "1": "CANCELLED"}


def test_a_signal_ends_a_sweep_on_a_terminal_that_is_stopped(start_app: StartApp) -> None:
    with terminal() as tty:
        app = start_app(mapped(job="sleeping"), **tty.popen())
        app.wait_for_jobs(2)
        tty.until_drawn(lambda: tty.has("2 running"))
        termios.tcflow(tty.slave, termios.TCOOFF)  # as Ctrl-S
        app.process.send_signal(signal.SIGTERM)
        assert app.process.wait(LIMIT_S) == -signal.SIGTERM
        app.assert_nothing_is_left()
        assert statuses(app) == {"0": "CANCELLED", "1": "CANCELLED"}


def test_results_go_on_being_written_and_nothing_is_lost_for_a_reader_that_comes_back(start_app: StartApp) -> None:
    with full_pipe() as (read, write):
        more = "output='tee', max_retries=1, retry_on=['error']"
        app = start_app(mapped(3, more=more), before=BEFORE, stdout=write, stderr=write)
        pids = jobs_of(app, 2)
        os.kill(pids[0], signal.SIGUSR1)
        pids |= jobs_of(app, 1)
        wait_for_results(app, {"0": "COMPLETED"})
        os.kill(pids[1], signal.SIGUSR1)
        os.kill(jobs_of(app, 1)[1], signal.SIGUSR1)
        wait_for_results(app, {"0": "COMPLETED", "1": "FAILED"})
        os.kill(pids[2], signal.SIGUSR1)
        wait_for_results(app, {"0": "COMPLETED", "1": "FAILED", "2": "COMPLETED"})
        assert (app.directory / "sweep/sweep.html").exists()
        os.close(write)
        lines = read_to_the_end(read).splitlines()
        assert app.process.wait(LIMIT_S) == 0
        assert lines[0] == "gpu_pool: 3 jobs, 2 at once, on CPU slots"
        hellos = [line for line in lines if line.startswith("[") and line.endswith("hello")]
        assert hellos == [f"[{num}] job {num} says hello" for num in (0, 1, 1, 2)]
        told = [line.split(":")[0] for line in lines if line.startswith("job ")]
        assert [line for line in told if line.endswith(("COMPLETED", "FAILED", "another"))] == [
            "job 0 (x=0) COMPLETED",
            "job 1 (x=1) FAILED, try 1, and has another",
            "job 1 (x=1) FAILED",
            "job 2 (x=2) COMPLETED",
        ]
        assert sum(line.startswith("2 COMPLETED, 1 FAILED") for line in lines) == 1


@pytest.mark.parametrize("reader", ["comes back", "never does", "goes away"])
def test_the_end_of_a_sweep_waits_to_be_read_but_not_longer_than_a_signal(start_app: StartApp, reader: str) -> None:
    with full_pipe() as (read, write):
        app = start_app(mapped(1, more="output='tee'"), before=BEFORE, stdout=write, stderr=write)
        os.kill(jobs_of(app, 1)[0], signal.SIGUSR1)
        wait_for_results(app, {"0": "COMPLETED"})
        os.close(write)
        if reader == "comes back":
            assert "1 COMPLETED" in read_to_the_end(read)
        elif reader == "goes away":
            os.close(read)
        else:
            app.process.terminate()
        assert app.process.wait(LIMIT_S) == {"never does": -signal.SIGTERM, "goes away": 0}.get(reader, 0)


def test_a_terminal_that_goes_on_shows_the_newest_and_each_failure_once(start_app: StartApp) -> None:
    with terminal() as tty:
        app = start_app(mapped(3), before=BEFORE, **tty.popen())
        pids = jobs_of(app, 2)
        tty.until_drawn(lambda: tty.has("2 running"))
        termios.tcflow(tty.slave, termios.TCOOFF)
        tty.until_quiet()
        seen = len(tty.raw)
        for num in (1, 0):
            os.kill(pids[num], signal.SIGUSR1)
        pids |= jobs_of(app, 1)
        wait_for_results(app, {"0": "COMPLETED", "1": "FAILED"})
        termios.tcflow(tty.slave, termios.TCOON)
        tty.until_drawn(lambda: tty.has("1 done  1 running  1 failed") and tty.has("job 1 (x=1) FAILED"))
        assert tty.raw[seen:].count(b"#  gpu") <= 4
        os.kill(pids[2], signal.SIGUSR1)
        assert app.process.wait(LIMIT_S) == 0
        tty.until_quiet()
        assert sum("job 1 (x=1) FAILED" in line for line in tty.all_lines) == 1


def test_what_threads_of_the_app_print_and_log_waits_too_and_comes_whole(start_app: StartApp) -> None:
    talk = """
import logging
logging.basicConfig(stream=sys.stdout, format="%(message)s")
def talk(x):
    report(x)
    signal.sigwait([signal.SIGUSR1])
def speak():
    told.wait()
    for i in range(3000):
        print(f"printed {i} " + "y" * 50)
        logging.warning("logged %d", i)
    print("no end", end="")
    os.kill(PID[0], signal.SIGUSR1)
PID, told = [], threading.Event()
def told_pid(*_):
    PID.append(int(open("pid").read())); told.set()
signal.signal(signal.SIGUSR2, told_pid)
threading.Thread(target=speak).start()
"""
    with full_pipe() as (read, write):
        unfilled = os.read(read, 1 << 20)  # before the launch, main writes as any program does
        app = start_app(mapped(1, job="talk"), before=BEFORE + talk, stdout=write, stderr=subprocess.DEVNULL)
        (pid,) = jobs_of(app, 1).values()
        assert fill(write) < len(unfilled)
        (app.directory / "pid").write_text(str(pid))
        app.process.send_signal(signal.SIGUSR2)
        wait_for_results(app, {"0": "COMPLETED"})
        os.close(write)
        lines = read_to_the_end(read).replace("x" * 4096, "").splitlines()
        assert app.process.wait(LIMIT_S) == 0
        assert [line for line in lines if line.startswith("printed")] == [
            f"printed {i} {'y' * 50}" for i in range(3000)
        ]
        assert [line for line in lines if line.startswith("logged")] == [f"logged {i}" for i in range(3000)]
        assert any(line.endswith("no end") for line in lines)


# --- the outlet alone ---


@pytest.mark.parametrize("kind", ["pipe", "socket", "terminal", "a terminal that cannot be opened anew"])
def test_all_arrives_in_order_and_nobody_waits_for_it(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "pipe":
        read, write = os.pipe()
    elif kind == "socket":
        ends = socket.socketpair()
        read, write = ends[0].detach(), ends[1].detach()
    else:
        read, write = os.openpty()
        attributes = termios.tcgetattr(write)
        attributes[1] &= ~termios.OPOST
        termios.tcsetattr(write, termios.TCSANOW, attributes)
    if kind.endswith("anew"):
        monkeypatch.setattr(os, "open", refused)
    outlet = Outlet(write)
    monkeypatch.undo()
    assert os.get_blocking(write)
    said = b"".join(b"line %d\n" % i for i in range(100_000))
    for start in range(0, len(said), 1000):
        outlet.write(said[start : start + 1000])
    assert not outlet.push()
    got = b""
    while len(got) < len(said):
        assert _descriptors.wait_readable([read], LIMIT_S)
        got += os.read(read, 1 << 16)
        outlet.push()
    assert got == said
    assert outlet.push()
    outlet.close()
    os.close(read)
    os.close(write)


def refused(*_: object) -> int:
    raise PermissionError


def test_a_reader_that_is_gone_is_told_to_who_writes_and_nothing_waits_for_it() -> None:
    read, write = os.pipe()
    fill(write)
    outlet = Outlet(write)
    outlet.write(b"one")
    os.close(read)
    with pytest.raises(BrokenPipeError):
        outlet.write(b"two")
    assert outlet.push()
    outlet.close()
    os.close(write)


def test_what_is_more_than_a_descriptor_or_never_stalls_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Copies:
        def __init__(self, stream: Any) -> None:
            self.stream = stream

        def __getattr__(self, name: str) -> Any:
            return getattr(self.stream, name)

    read, write = os.pipe()
    with os.fdopen(write, "w") as stream, (tmp_path / "file").open("w") as file:
        copies = Copies(stream)
        for one in (copies, file, None, object()):
            monkeypatch.setattr(sys, "stdout", one)
            streams = Streams()
            streams.capture()
            assert sys.stdout is one
            streams.release()
        monkeypatch.setattr(sys, "stdout", stream)
        streams.capture()
        assert sys.stdout is not stream
        assert sys.stdout.encoding == stream.encoding
        print("one\ntwo", end="")
        assert os.read(read, 100) == b"one\n"
        streams.release()
        assert os.read(read, 100) == b"two"
        assert sys.stdout is stream
        monkeypatch.undo()
    os.close(read)
