"""Main's handle on the supervisor; the main functions of the guard and of the supervisor.

    main              forks the guard, sends requests, reads the journal
      └ guard         outlives the supervisor, to end what it leaves behind
          └ supervisor    a clean copy of the app; runs the loop of ``_pool``

Main and supervisor share one socket pair. Main writes requests on it, one JSON line each; the supervisor writes
``ready`` once, ``refused`` in answer to a request, and else single newlines, the doorbell: there is something new in
the journal. It never blocks on main, which may be suspended for hours. That the other side is gone is told by a pidfd:
any fork of main may hold the socket open.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from . import _interpreter, _job, _journal, _process
from ._display import Display
from ._journal import DamagedReturnError, Journal, JournalReader, SweepFiles
from ._model import (
    JOB_ERRORS,
    ConfigurationError,
    Ending,
    GpuPoolError,
    Job,
    JobCancelledError,
    JobError,
    JobLostError,
    Layout,
    RemoteTraceback,
    Report,
    Slot,
    Start,
    Status,
    Stop,
)
from ._pool import Close, Died, Pool, Request
from ._schedule import LOST_AFTER_S, Schedule

log = logging.getLogger("gpu_pool")

_STOPPED_BY = {
    signal.SIGINT: "Ctrl-C (SIGINT to the main process)",
    signal.SIGTERM: "SIGTERM to the main process",
    signal.SIGHUP: "SIGHUP to the main process, whose terminal was closed",
}


@dataclass(frozen=True)
class App:
    """What the supervisor inherits by the fork: the app as it is, and how its jobs are to be run.

    ``devices``: the variables that show a job the devices of its slots, given the environment of the request.
    """

    body: _job.Body
    layout: Layout
    kill_grace_s: float
    threads_per_job: int | None  # None: cores / jobs at once
    cores: int
    devices: Callable[[Sequence[Slot], Mapping[str, str]], dict[str, str]]


class SupervisorGoneError(GpuPoolError):
    """The supervisor ended before the work was done: somebody killed it, or it has a fault (see its log)."""


class Supervisor:
    """Main's handle. It forks the supervisor, and ends it when it is closed, collected, or main exits.

    Used by one thread at a time. ``start`` and ``run`` raise ConfigurationError with the reason where the app or the
    directory does not allow a sweep.
    """

    def __init__(self, app: App) -> None:
        self.app = app
        self.busy = False
        self._processes: _Processes | None = None
        self._close: Callable[[], object] = lambda: None

    def start(self) -> None:
        """Fork a supervisor from this process as it is now."""
        state = _interpreter.gpu_state()
        if state is not None:
            raise ConfigurationError(
                f"gpu_pool cannot fork jobs from this process: {state} in it, and a forked process cannot use the GPU "
                "then; move what touches the GPU (torch.cuda.is_available() does) from the top of the script into the "
                "task function."
            )
        processes = _start_processes(self.app)
        if processes.ready["torch_refuses_fork"]:
            _close(processes, os.getpid())
            raise ConfigurationError(
                "gpu_pool cannot fork jobs from this process: something in it has called a torch.cuda function, and "
                "torch refuses the GPU to a process forked after that; move that call from the top of the script into "
                "the task function."
            )
        self.close()
        self._close = weakref.finalize(self, _close, processes, os.getpid())
        self._processes = processes

    def renew(self) -> None:
        """Fork again, so that jobs see the newest state of the app; where that is not safe any more, keep what is."""
        if self._processes is None or self._processes.gone():
            self.start()
        elif not _interpreter.other_threads():
            with contextlib.suppress(ConfigurationError):
                self.start()

    def run(self, request: Request, display: Display) -> dict[int, dict[str, Any]]:
        """Have the jobs run, and block until each has ended; the journal's "end" event of each, by job number.

        The display is shown the journal's events here, in main. Where the supervisor was killed before it could write
        a job's end, the job has its "stop" event instead, if there is one, or no entry. In main's main thread, SIGINT,
        SIGTERM and SIGHUP are handled where nobody else does, see ``_Signals``; after one of them this does not return.
        """
        assert self._processes is not None, "start() comes first"
        processes, journal = self._processes, JournalReader(request.files.journal)
        if not request.fresh:
            journal.skip()
        ends: dict[int, dict[str, Any]] = {}
        self.busy = True
        with _Signals(processes) as signals:
            display.begin(self.app.layout)
            try:
                processes.send({"request": _request_to_json(request)})
                for event in _follow(processes, journal):
                    if event["event"] in {"stop", "end"}:
                        ends[event["job"]] = event
                    display.show(event)
            except BaseException:
                self.close()  # whoever raised it (an app's signal handler, say) does not wait for the jobs
                raise
            finally:
                journal.close()
                self.busy = False
            if signals.received or processes.gone():
                self.close()
            display.summary()
        return ends

    def close(self) -> None:
        """End the supervisor and all of its jobs, and wait until they are gone. Without one, nothing happens."""
        self._close()
        self._processes = None


_mains_descriptors: set[int] = set()
"""What this process holds of its supervisors, for a guard to close: those of another one are not its business."""


@dataclass
class _Processes:
    """The guard and the supervisor as main knows them: pids, pidfds, and main's end of the socket pair."""

    guard: int
    guard_pidfd: int
    channel: int
    supervisor_pidfd: int | None = None
    ready: dict[str, Any] = field(default_factory=dict)
    _unsent: deque[bytes] = field(default_factory=deque)
    _sending: bool = False
    _unread: bytes = b""

    @property
    def lifeline(self) -> int:
        """Readable when the supervisor is gone."""
        return self.guard_pidfd if self.supervisor_pidfd is None else self.supervisor_pidfd

    def gone(self) -> bool:
        """True when the supervisor is."""
        return bool(_process.wait_readable([self.lifeline], 0))

    def send(self, message: dict[str, Any]) -> None:
        """One line to the supervisor; nothing happens where it is gone.

        A signal handler may call this in the middle of another call, whose line must not be torn: its own then waits.
        """
        self._unsent.append(json.dumps(message).encode() + b"\n")
        if self._sending:
            return
        self._sending = True
        try:
            while self._unsent:
                self._send_some()
        except (BrokenPipeError, ConnectionResetError):
            self._unsent.clear()
        finally:
            self._sending = False

    def _send_some(self) -> None:
        line = self._unsent[0]
        try:
            sent = os.write(self.channel, line)
        except BlockingIOError:
            if not _process.wait_writable(self.channel, unless_readable=self.lifeline):
                raise BrokenPipeError from None
            return
        if sent < len(line):
            self._unsent[0] = line[sent:]
        else:
            self._unsent.popleft()

    def receive(self) -> list[bytes]:
        """The lines that have come, doorbells (empty lines) included; blocks until there is one. []: it is gone."""
        while True:
            ready = _process.wait_readable([self.channel, self.lifeline])
            if self.channel in ready:
                try:
                    got = os.read(self.channel, 1 << 16)
                except ConnectionResetError:
                    got = b""
                *lines, self._unread = (self._unread + got).split(b"\n")
                if lines:
                    return lines
                if not got:
                    _process.wait_readable([self.lifeline])
            if self.lifeline in ready:
                return []


def _start_processes(app: App) -> _Processes:
    """Fork the guard, which forks the supervisor; returns when the latter serves."""
    ours, theirs = (_process.beyond_standard(end.detach()) for end in socket.socketpair())
    # Taken here: the guard could only hope that the pid is still main's.
    main_pidfd = _process.beyond_standard(_process.pidfd_open(os.getpid()))
    for end in (ours, theirs):
        os.set_blocking(end, False)
    origin = _Origin(os.getpid(), main_pidfd, theirs, _interpreter.random_state())
    _process.flush_streams()
    _interpreter.pause_openmp()
    _mains_descriptors.add(ours)
    try:
        guard = _process.fork(lambda mask: _guard(app, origin, mask))
    except OSError as error:
        _mains_descriptors.discard(ours)
        os.close(ours)
        raise ConfigurationError(
            f"gpu_pool cannot start: the system refuses a new process ({error.strerror})."
        ) from error
    finally:
        os.close(theirs)
        os.close(main_pidfd)
    processes = _Processes(guard, _process.pidfd_open(guard), ours)
    _mains_descriptors.add(processes.guard_pidfd)
    lines = processes.receive()
    if not lines:
        _close(processes, os.getpid())
        raise SupervisorGoneError(
            "The supervisor ended while it started: killed by somebody, or by a fault of gpu_pool."
        )
    processes.ready = json.loads(lines[0])
    with contextlib.suppress(ProcessLookupError):  # gone again already: the guard's end will tell
        processes.supervisor_pidfd = _process.pidfd_open(processes.ready["pid"])
    _mains_descriptors.add(processes.lifeline)
    return processes


def _close(processes: _Processes, owner: int) -> None:
    """Ask the supervisor to end its jobs and itself, and wait for both. Only the process that forked it may."""
    if os.getpid() != owner:
        return
    processes.send({"close": True})
    _process.wait_readable([processes.guard_pidfd])
    _process.wait_readable([processes.lifeline])  # where the guard was killed, the supervisor ends later
    _process.reap(processes.guard)
    for fd in {processes.guard_pidfd, processes.lifeline, processes.channel}:
        _mains_descriptors.discard(fd)
        os.close(fd)


def _follow(processes: _Processes, journal: JournalReader) -> Iterator[dict[str, Any]]:
    """The journal's events until this launch is done, or the supervisor gone; raises ConfigurationError if refused."""
    while lines := processes.receive():
        for line in filter(None, lines):
            raise ConfigurationError(json.loads(line)["refused"])
        for event in journal.new():
            if event["event"] == "done":
                return
            yield event
    yield from journal.new()


def _request_to_json(request: Request) -> dict[str, Any]:
    return {
        "jobs": [[job.num, *job.overrides] for job in request.jobs],
        "sweep_dir": request.files.sweep_dir,
        "environ": dict(request.environ),
        "cwd": request.cwd,
        "fresh": request.fresh,
    }


def _request_from_json(message: dict[str, Any]) -> Request:
    return Request(
        jobs=tuple(Job(num, tuple(overrides)) for num, *overrides in message["jobs"]),
        files=SweepFiles(message["sweep_dir"]),
        environ=message["environ"],
        cwd=message["cwd"],
        fresh=message["fresh"],
    )


class _Signals:
    """While jobs run: what Ctrl-C, SIGTERM and SIGHUP do in main, where they are at their default.

    The first one stops the jobs politely (SIGINT with SIGINT, the others with SIGTERM), a further one kills them. When
    the last is gone and this context is left, main dies as it would have: KeyboardInterrupt for SIGINT, else by the
    same signal. Ignored signals stay ignored (nohup), and an app's handlers stay. Elsewhere than in the main thread,
    Python has no handlers to set: this does nothing there.
    """

    def __init__(self, processes: _Processes) -> None:
        self.received: list[int] = []
        self._processes = processes
        self._old: dict[int, Any] = {}

    def __enter__(self) -> _Signals:
        if threading.current_thread() is threading.main_thread():
            for signum in _STOPPED_BY:
                if signal.getsignal(signum) in (signal.SIG_DFL, signal.default_int_handler):
                    self._old[signum] = signal.signal(signum, self._handle)
        return self

    def _handle(self, signum: int, _frame: object) -> None:
        self.received.append(signum)
        polite = signal.SIGINT if signum == signal.SIGINT else signal.SIGTERM
        self._processes.send(
            {
                "stop": polite if len(self.received) == 1 else signal.SIGKILL,
                "why": _STOPPED_BY[signal.Signals(signum)],
            }
        )

    def __exit__(self, *exc: object) -> None:
        for signum, handler in self._old.items():
            signal.signal(signum, handler)
        if self.received:
            _die_of(self.received[0])


def _die_of(signum: int) -> NoReturn:
    if signum == signal.SIGINT:
        raise KeyboardInterrupt
    logging.shutdown()
    _process.flush_streams()
    if os.getpid() != 1:  # the kernel does not let a default action end PID 1
        _process.signal_self(signum)
    raise SystemExit(128 + signum)


@dataclass(frozen=True)
class _Origin:
    """What guard and supervisor need to know of the main process that forked them."""

    main: int
    main_pidfd: int
    channel: int
    random_state: Any


# --- the guard ---


def _guard(app: App, origin: _Origin, mask: frozenset[int]) -> int:
    """Fork the supervisor, wait for its end or main's, then end whatever of it is left. Runs in the guard's process.

    All signals stay blocked: a scheduler that signals every process of the sweep must find somebody to clean up.
    """
    _interpreter.freeze_garbage()
    for fd in _mains_descriptors:
        os.close(fd)
    _mains_descriptors.clear()
    _process.fill_standard()
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where the app ignores it, the kernel keeps no exit status
    _process.become_subreaper()
    _process.redirect(os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC), 0, 1)
    guard_pidfd = _process.pidfd_open(os.getpid())
    supervisor = _process.fork(lambda _: _supervise(app, origin, guard_pidfd, mask))
    _process.redirect(os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC), 2)  # faults until here are for the user to see
    supervisor_pidfd = _process.pidfd_open(supervisor)
    os.close(origin.channel)
    if supervisor_pidfd not in _process.wait_readable([supervisor_pidfd, origin.main_pidfd]):
        # Main is gone; the supervisor knows it too, and is given the time that it may take.
        _process.wait_readable([supervisor_pidfd], app.kill_grace_s + 2 * LOST_AFTER_S)
    _process.end_all_children(LOST_AFTER_S)
    return 0


# --- the supervisor ---


def _supervise(app: App, origin: _Origin, guard_pidfd: int, mask: frozenset[int]) -> int:
    """Serve requests. Runs in the supervisor's process, where no code of the app runs, ever."""
    handled = {signal.SIGTERM, signal.SIGHUP, signal.SIGINT}
    wakeup = _process.wakeup_pipe()
    for signum in handled:
        signal.signal(signum, lambda *_: None)  # seen through the pipe
    signal.pthread_sigmask(signal.SIG_SETMASK, mask - handled)
    _process.become_subreaper()
    world = _SystemWorld(app, origin, wakeup, guard_pidfd)
    _process.redirect(os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC), 2)  # until it has a log, and never a terminal
    world.tell({"pid": os.getpid(), "torch_refuses_fork": _interpreter.torch_refuses_fork()})
    Pool(Schedule(app.layout, app.kill_grace_s), world).serve()
    return 0


class _SystemWorld:
    """The world as it is, for the loop of ``_pool``: processes, the journal, main at the other end of the channel."""

    def __init__(self, app: App, origin: _Origin, wakeup: tuple[int, int], guard_pidfd: int) -> None:
        self._app = app
        self._origin = origin
        self._wakeup = wakeup
        self._lifelines = {
            origin.main_pidfd: "the main process is gone",
            guard_pidfd: "the guard process is gone",
        }
        self._family = _process.Family()
        self._unread = b""
        self._request: Request | None = None
        self._journal: Journal | None = None
        self._lock: int | None = None
        self._over: set[int] = set()  # of the channel and the lifelines: those that have told all they can

    def now(self) -> float:
        return time.monotonic()

    def wait(self, deadline: float | None) -> Sequence[Request | Close | Stop | Ending | Died]:
        timeout = None if deadline is None else deadline - time.monotonic()
        watch = {self._origin.channel, self._wakeup[0], *self._lifelines} - self._over
        steps, ready = self._family.wait(timeout, watch)
        events: list[Request | Close | Stop | Ending | Died] = [
            Ending(num) if exit_ is None else Died(num, exit_) for num, exit_ in steps.items()
        ]
        for fd in ready:
            if fd == self._origin.channel:
                events += self._from_main()
            elif fd == self._wakeup[0]:
                names = sorted({signal.Signals(number).name for number in os.read(fd, 64)})
                events += [Stop(f"{' and '.join(names)} to the supervisor", signal.SIGTERM), Close()]
            else:
                self._over.add(fd)
                events += [Stop(self._lifelines[fd], signal.SIGTERM), Close()]
        return events

    def _from_main(self) -> list[Request | Close | Stop | Ending | Died]:
        try:
            got = os.read(self._origin.channel, 1 << 16)
        except ConnectionResetError:
            got = b""
        if not got:
            self._over.add(self._origin.channel)
            return [Stop("the main process is gone, or has become another program", signal.SIGTERM), Close()]
        *lines, self._unread = (self._unread + got).split(b"\n")
        return [event for line in lines for event in _from_line(json.loads(line))]

    def open(self, request: Request) -> None:
        if self._request is None or self._request.files != request.files:
            self._close_files()
            self._lock = _journal.claim(request.files, self._origin.main, request.fresh)
            _process.redirect(_journal.open_to_append(request.files.supervisor_log), 1, 2)
            self._journal = _journal.begin(request.files)
        self._request = request

    def _close_files(self) -> None:
        if self._journal is not None:
            os.close(self._journal.fd)
        if self._lock is not None:
            os.close(self._lock)
        self._lock = self._journal = self._request = None

    def refuse(self, why: str) -> None:
        self.tell({"refused": why})

    def tell(self, message: dict[str, Any]) -> None:
        """A line to main. It fits into the socket's buffer: main reads it before it asks for anything else."""
        self._to_main(json.dumps(message).encode() + b"\n")

    def ring(self) -> None:
        self._to_main(b"\n")

    def _to_main(self, line: bytes) -> None:
        """Where the buffer is full, main has enough to wake up for; where it is closed, nobody is there to."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            os.write(self._origin.channel, line)

    def record(self, event: str, **facts: Any) -> None:
        assert self._journal is not None
        self._journal.append(event, **facts)

    def start(self, start: Start) -> int:
        assert self._request is not None
        request, app = self._request, self._app
        files, num = request.files, start.job.num
        _journal.make_private_dir(files.job_dir(num))
        _journal.clear_result(files, num)
        output = _journal.open_to_append(files.output(num))
        at_once = max(1, min(app.layout.jobs_at_once, len(request.jobs)))
        assignment = _job.Assignment(
            job=start.job,
            files=files,
            environ={
                **request.environ,
                **app.devices(start.slots, request.environ),
                "GPU_POOL_JOB_NUM": str(num),
            },
            cwd=request.cwd,
            threads=app.threads_per_job or max(1, app.cores // at_once),
            random_before_fork=self._origin.random_state,
        )
        supervisor, close = os.getpid(), self._descriptors()
        try:
            return self._family.start(
                num,
                lambda mask: _job.main(assignment, app.body, supervisor=supervisor, log=output, close=close, mask=mask),
            )
        finally:
            os.close(output)

    def _descriptors(self) -> set[int]:
        """All that is ours, for a job to close."""
        assert self._journal is not None
        assert self._lock is not None
        pool = {self._origin.channel, *self._wakeup, *self._lifelines, self._journal.fd, self._lock}
        return pool.union(self._family.descriptors())

    def signal(self, num: int, signum: int) -> None:
        self._family.signal(num, signum)

    def kill(self, num: int) -> None:
        self._family.kill(num)

    def abandon(self, num: int) -> None:
        self._family.abandon(num)

    def report(self, num: int) -> Report | None:
        assert self._request is not None
        return _journal.load_report(self._request.files, num)

    def set_aside(self, num: int) -> None:
        assert self._request is not None
        _journal.set_aside_late(self._request.files, num)


def _from_line(message: dict[str, Any]) -> list[Request | Close | Stop]:
    if "request" in message:
        return [_request_from_json(message["request"])]
    if "close" in message:
        return [Stop("the launcher was closed", signal.SIGTERM), Close()]
    return [Stop(message["why"], message["stop"])]


# --- what main makes of a job's end ---


@dataclass(frozen=True)
class Settled:
    """What a job left to main: the payload of its Result, or the error that stands in for one.

    ``failed``: the payload is, or has, an exception of the task; ``traceback``: that exception's, as text.
    """

    payload: Any = None
    error: JobError | None = None
    failed: bool = False
    traceback: str | None = None


def settle(job: Job, files: SweepFiles, end: dict[str, Any] | None) -> Settled:
    """What became of a job, from ``Supervisor.run``'s event, or from its files where there is none.

    Runs in main, and loads the job's pickle: the code that this runs may raise, which is the job's error then.
    """
    report = _journal.load_report(files, job.num)
    if end is not None and end["event"] == "stop":
        return Settled(error=JobCancelledError(job.num, job.overrides, f"was cancelled: {end['why']}"))
    if end is not None and not end["by_itself"]:
        return Settled(error=JOB_ERRORS[end["error_type"]](job.num, job.overrides, end["error_text"]))
    if report is None:
        why = f"was lost: the supervisor was killed, or failed (see {files.supervisor_log})"
        return Settled(error=JobLostError(job.num, job.overrides, why))
    try:
        payload = _journal.load_return(files, job.num)
        return Settled(payload, failed=report.status is Status.FAILED, traceback=report.traceback)
    except DamagedReturnError as error:
        return Settled(error=JobLostError(job.num, job.overrides, f"was lost: {error}"))
    except Exception as error:
        why = f"returned what the main process cannot load ({type(error).__name__}: {error})"
        return Settled(error=JobError(job.num, job.overrides, why))


def with_remote_traceback(error: BaseException, text: str | None) -> BaseException:
    """The error, with the traceback from the job's process as its cause: pickle drops the one it had."""
    if text is not None and error.__cause__ is None:
        error.__cause__ = RemoteTraceback(text)
    return error
