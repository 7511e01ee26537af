"""A terminal, or a reader of main's output, that takes nothing for long: the sweep and its files do not wait for it."""

from __future__ import annotations

import contextlib
import copy
import csv
import io
import logging
import os
import signal
import socket
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from running import App, StartApp
from support import LIMIT_S
from terminal import terminal

from hydra_plugins.hydra_gpu_pool_launcher import _descriptors, _inotify, _outlet, _printing
from hydra_plugins.hydra_gpu_pool_launcher._outlet import Outlet
from hydra_plugins.hydra_gpu_pool_launcher._printing import Streams, put
from hydra_plugins.hydra_gpu_pool_launcher._ways import beneath

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
        app.assert_nothing_is_left()  # who was killed while it waited for its reader leaves guard and supervisor to end


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


def test_what_threads_of_the_app_log_waits_too_and_comes_whole(start_app: StartApp) -> None:
    talk = """
import logging
logging.basicConfig(stream=sys.stdout, format="%(message)s")
def talk(x):
    report(x)
    signal.sigwait([signal.SIGUSR1])
def speak():
    told.wait()
    for i in range(3000):
        logging.warning("logged %d %s", i, "y" * 50)
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
        assert [line for line in lines if line.startswith("logged")] == [f"logged {i} {'y' * 50}" for i in range(3000)]


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


def test_of_what_is_too_much_to_wait_a_line_says_how_much_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_outlet, "MOST", 1000, raising=False)
    read, write = os.pipe()
    filled = fill(write)
    outlet = Outlet(write)
    for _ in range(30):
        outlet.write(b"y" * 99 + b"\n")
    os.close(write)
    got = b""
    while not outlet.push():
        got += os.read(read, 1 << 16)
    outlet.close()
    while more := os.read(read, 1 << 16):
        got += more
    os.close(read)
    kept, _, told = got[filled:].decode().rpartition("\n…")
    assert kept == "\n".join(["y" * 99] * 11)[: len(kept)]
    assert 1000 <= len(kept) + 1 <= 1100
    assert told == f" {3000 - len(kept) - 1:,} bytes are left out here: too much was waiting for a reader\n"


def test_a_terminal_that_is_asked_takes_no_more_than_it_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.openpty()
    own = os.open(f"/proc/self/fd/{write}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    for size in (4096, 256, 16, 1):
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(own, b"x" * size)
    while not _outlet.writable([write], 0):
        os.read(read, 1)
    sizes: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refused)
        outlet = Outlet(write)
    os_write = os.write

    def noted(fd: int, content: bytes) -> int:
        sizes.append(len(content))
        return os_write(fd, content)

    monkeypatch.setattr(os, "write", noted)
    writer = threading.Thread(target=lambda: outlet.write(b"y" * 50_000), daemon=True)
    writer.start()
    writer.join(LIMIT_S)
    assert not writer.is_alive()
    assert not outlet.push()
    monkeypatch.undo()
    assert set(sizes) == {1}
    outlet.close()
    for fd in (own, read, write):
        os.close(fd)


# --- sys.stdout and sys.stderr ---


@contextlib.contextmanager
def as_stdout(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, Any]]:
    """The read end of a pipe, and sys.stdout, which writes to it; logging's root writes to it, and to nothing else."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    with os.fdopen(write, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        handler = logging.StreamHandler(stream)
        monkeypatch.setattr(logging.root, "handlers", [handler])
        yield read, stream
        assert handler.stream is stream
        monkeypatch.undo()
    os.close(read)


def is_it(stream: Any) -> bool:
    return beneath(stream) is beneath(sys.stdout)


class Copies:
    """Keeps a copy of what is printed, say."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class CopiesBytes(io.BufferedWriter):
    """The same, further down."""


def test_without_a_table_what_the_app_prints_is_the_apps(monkeypatch: pytest.MonkeyPatch) -> None:
    with as_stdout(monkeypatch) as (read, stream):
        streams = Streams()
        streams.begin()
        assert sys.stdout is stream
        fill(stream.fileno())
        logging.warning("one")
        put(sys.stdout, "two\n")
        assert streams.stuck
        os.read(read, 1 << 20)
        assert streams.wait(None)
        assert os.read(read, 100) == b"one\ntwo\n"
        streams.release()
        logging.warning("three")
        assert os.read(read, 100) == b"three\n"


def test_what_is_more_than_a_descriptor_or_never_stalls_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with as_stdout(monkeypatch) as (_, stream), (tmp_path / "file").open("w") as file:
        further_down = io.TextIOWrapper(CopiesBytes(io.FileIO(os.dup(stream.fileno()), "w")))
        patched = io.TextIOWrapper(io.BufferedWriter(io.FileIO(os.dup(stream.fileno()), "w")))
        patched.write = print  # type: ignore[assignment, method-assign]
        for one in (Copies(stream), further_down, patched, file, None, object()):
            with monkeypatch.context() as patch:
                patch.setattr(sys, "stdout", one)
                handler: Any = logging.StreamHandler()
                handler.stream = one
                patch.setattr(logging.root, "handlers", [handler])
                streams = Streams()
                streams.begin()
                assert streams.lead(lambda stream: stream is not file, lambda _: None)
                assert sys.stdout is one
                assert handler.stream is one
                streams.release()
        for stream_of_a_copy in (further_down, patched):
            stream_of_a_copy.close()


def test_an_unbuffered_stdout_is_led_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    with as_stdout(monkeypatch) as (read, stream):
        unbuffered = io.TextIOWrapper(io.FileIO(os.dup(stream.fileno()), "w"), write_through=True)
        monkeypatch.setattr(sys, "stdout", unbuffered)
        streams = Streams()
        streams.begin()
        fill(stream.fileno())
        put(sys.stdout, "told\n")
        assert streams.stuck
        assert os.read(read, 1 << 20)
        streams.release()
        unbuffered.close()
        monkeypatch.setattr(sys, "stdout", stream)


def test_a_print_that_is_under_way_when_the_table_goes_does_not_crash() -> None:
    code = """if True:
        import gc
        from hydra_plugins.hydra_gpu_pool_launcher._printing import Streams
        streams = Streams()
        streams.begin()
        streams.lead(lambda stream: stream.fileno() == 1, lambda text: None)
        class Ends:
            def __str__(self):
                streams.release()
                gc.collect()
                self.others = [bytearray(n) for n in range(1000)]
                return "the end"
        print(Ends())
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "the end\n", "")


def test_two_launches_at_once_share_one_table_and_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    with as_stdout(monkeypatch) as (read, stream):
        above: list[str] = []
        first, second = Streams(), Streams()
        first.begin()
        assert first.lead(is_it, above.append)
        second.begin()
        assert not second.lead(is_it, lambda _: None)
        print("printed")
        logging.warning("logged")
        put(sys.stdout, "told\n")
        assert above == ["printed", "logged", "told"]
        first.release()
        assert sys.stdout is stream
        logging.warning("of the second")
        put(sys.stdout, "alone\n")
        fill(stream.fileno())
        logging.warning("waits")
        assert second.stuck
        assert not first.stuck
        assert os.read(read, 1 << 20).startswith(b"of the second\nalone\n")
        second.release()
        assert os.read(read, 100) == b"waits\n"


@pytest.mark.parametrize("table", [False, True])
def test_a_handler_that_cannot_be_led_keeps_no_other_thing_from_being_given_back(
    monkeypatch: pytest.MonkeyPatch, table: bool
) -> None:
    class Raises(logging.Handler):
        @property
        def stream(self) -> Any:
            raise RuntimeError

    with as_stdout(monkeypatch) as (_, stream):
        kind: Any = type(logging.lastResort)
        (led,) = logging.root.handlers
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setattr(logging.root, "handlers", [kind(), Raises(), led])
        streams = Streams()
        streams.begin()
        assert led.stream is not stream  # type: ignore[attr-defined]
        assert not table or streams.lead(is_it, lambda _: None)
        streams.release()
        assert sys.stderr is stream
        assert sys.stdout is stream


def test_a_long_line_goes_above_the_table_with_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    with as_stdout(monkeypatch) as (_, _stream):
        above: list[str] = []
        streams = Streams()
        streams.lead(is_it, above.append)
        print("a" * 200_000 + "b")
        print("the next")
        streams.release()
        assert "".join(above).replace("\n", "") == "a" * 200_000 + "b" + "the next"


def test_each_line_comes_once_and_in_order_while_launches_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    with as_stdout(monkeypatch) as (read, stream):

        def talk() -> None:
            for i in range(2000):  # all of it fits into the pipe
                print(f"printed {i}", flush=True)
                logging.warning("logged %d", i)

        talker = threading.Thread(target=talk)
        talker.start()
        while talker.is_alive():
            streams = Streams()
            streams.begin()
            outlet = streams.outlet(stream)
            streams.lead(is_it, lambda text, outlet=outlet: outlet.write(f"{text}\n".encode()))  # type: ignore[misc]
            streams.lead_back()
            streams.release()
        talker.join()
        lines = os.read(read, 1 << 20).decode().splitlines()
        assert [line for line in lines if line.startswith("p")] == [f"printed {i}" for i in range(2000)]
        assert [line for line in lines if not line.startswith("p")] == [f"logged {i}" for i in range(2000)]


def test_what_is_being_written_while_the_launch_ends_goes_to_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    with as_stdout(monkeypatch) as (read, _):
        streams = Streams()
        streams.begin()
        streams.lead(is_it, lambda _: None)
        streams.lead_back()
        way: Any = vars(sys.stdout)["way"]

        class EndsFirst:
            """In place of the lock of who writes: the launch was a little earlier there."""

            def __enter__(self) -> None:
                monkeypatch.setattr(way, "_lock", contextlib.nullcontext())
                streams.release()

            def __exit__(self, *_: object) -> None:
                pass

        monkeypatch.setattr(way, "_lock", EndsFirst())
        print("written", flush=True)
        way._lock = threading.RLock()
        assert os.read(read, 100) == b"written\n"


def test_under_a_table_a_flush_is_one_of_the_bytes_too_and_a_copy_is_no_trap(monkeypatch: pytest.MonkeyPatch) -> None:
    with as_stdout(monkeypatch) as (read, _):
        streams = Streams()
        streams.lead(is_it, lambda _: None)
        sys.stdout.buffer.write(b"bytes")
        sys.stdout.flush()
        assert os.read(read, 100) == b"bytes"
        assert copy.copy(sys.stdout) is not sys.stdout
        streams.release()


def test_a_stdout_that_was_put_back_after_the_launch_is_known_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    with as_stdout(monkeypatch) as (read, stream):
        streams = Streams()
        streams.lead(is_it, lambda _: None)
        captured = sys.stdout
        with contextlib.redirect_stdout(io.StringIO()):
            streams.release()
        assert sys.stdout is captured
        print("passed on", flush=True)
        assert os.read(read, 100) == b"passed on\n"
        streams = Streams()
        streams.begin()
        fill(stream.fileno())
        put(sys.stdout, "waits\n")
        assert streams.stuck
        os.read(read, 1 << 20)
        above: list[str] = []
        streams.lead(is_it, above.append)
        print("above")
        assert above == ["above"]
        streams.release()
        assert sys.stdout is stream


def test_whoever_logs_for_a_reader_that_is_gone_is_told_of_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    told = io.StringIO()
    monkeypatch.setattr(sys, "stderr", told)
    read, write = os.pipe()
    with os.fdopen(write, "w") as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        patch.setattr(logging.root, "handlers", [logging.StreamHandler(stream)])
        os.close(read)
        streams = Streams()
        streams.begin()
        for _ in range(3):
            logging.warning("nobody reads this")
        put(sys.stdout, "nor this\n")
        streams.release()
    assert told.getvalue() == ""


def test_what_a_signal_handler_raises_ends_the_wait_for_a_reader_and_gives_all_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[Any] = []

    def interrupted(*arguments: Any) -> bool:
        waits.append(arguments)
        raise KeyboardInterrupt

    with as_stdout(monkeypatch) as (read, stream):
        streams = Streams()
        streams.begin()
        fill(stream.fileno())
        put(sys.stdout, "nobody reads this\n")
        monkeypatch.setattr(_printing, "writable", interrupted)
        with pytest.raises(KeyboardInterrupt):
            streams.release(None)
        assert len(waits) == 1
        assert not streams.stuck
        os.read(read, 1 << 20)


def test_a_fork_prints_and_logs_as_if_there_were_no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    with as_stdout(monkeypatch) as (read, stream):
        streams = Streams()
        streams.begin()
        streams.lead(is_it, lambda _: None)
        print("held", end="")
        pid = os.fork()
        if pid == 0:
            fine = sys.stdout is stream and logging.root.handlers[0].stream is stream  # type: ignore[attr-defined]
            print("of the fork", flush=True)
            os._exit(0 if fine else 1)
        assert os.waitpid(pid, 0)[1] == 0
        assert os.read(read, 100) == b"of the fork\n"
        streams.release()
        assert os.read(read, 100) == b"held"
