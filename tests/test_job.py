"""The world that a job finds, and what becomes of what it makes: its process, from the fork to the exit."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import json
import logging
import multiprocessing
import multiprocessing.util
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import pytest
from support import RunApp, outcome, outcomes, value

from hydra_plugins.hydra_gpu_pool_launcher import Status, _threads

# --- what it sees ---


def test_a_job_sees_its_own_gpu_and_knows_the_physical_one(tmp_path: Path) -> None:
    def job() -> list[str]:
        return [os.environ[name] for name in ("CUDA_VISIBLE_DEVICES", "GPU_POOL_GPUS", "GPU_POOL_SLOT")]

    seen = [o.value for o in outcomes(tmp_path, job, {}, {}, gpus=[3, 5])]
    assert seen == [["3", "3", "3.0"], ["5", "5", "5.0"]]


def test_a_job_on_several_gpus_sees_all_of_them_and_no_gpu_twice(tmp_path: Path) -> None:
    def job() -> tuple[str, str]:
        return os.environ["CUDA_VISIBLE_DEVICES"], os.environ["GPU_POOL_SLOT"]

    seen = [o.value for o in outcomes(tmp_path, job, {}, {}, gpus=[0, 1, 2, 3], gpus_per_job=2)]
    assert seen == [("0,1", "0.0,1.0"), ("2,3", "2.0,3.0")]


def test_a_job_on_a_cpu_slot_sees_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    result = outcomes(tmp_path, lambda: (os.environ["CUDA_VISIBLE_DEVICES"], os.environ["GPU_POOL_SLOT"]), {}, gpus=[])
    assert result[0].value == ("", "cpu.0")


def test_never_more_jobs_at_once_than_slots_and_every_slot_is_used(tmp_path: Path) -> None:
    def job(x: int) -> tuple[str, float, float]:
        started = time.monotonic()
        os.sched_yield()
        sum(range(200_000 + x))
        return os.environ["GPU_POOL_SLOT"], started, time.monotonic()

    spans = [o.value for o in outcomes(tmp_path, job, *({"x": x} for x in range(40)), gpus=[0, 1], per_gpu=2)]
    assert {slot for slot, _, _ in spans} == {"0.0", "0.1", "1.0", "1.1"}
    for slot, started, ended in spans:
        others = [span for span in spans if span[0] == slot and span[1:] != (started, ended)]
        assert all(other[2] <= started or ended <= other[1] for other in others)


def test_a_job_finds_the_environment_and_directory_of_the_call_not_of_the_fork(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SET", "yes")
    monkeypatch.delenv("HOME")
    monkeypatch.chdir(tmp_path)
    found = value(tmp_path, lambda: (os.environ["SET"], os.getenv("HOME"), os.getcwd(), os.environ["GPU_POOL_JOB_NUM"]))
    assert found == ("yes", None, str(tmp_path), "0")


def test_bytes_in_the_environment_that_are_no_text_survive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environb, b"ODD", b"\xff\xfe")
    assert value(tmp_path, lambda: os.environb[b"ODD"]) == b"\xff\xfe"


def test_a_job_leads_a_session_of_its_own_without_a_terminal(tmp_path: Path) -> None:
    pid, session, group, stdin = value(
        tmp_path, lambda: (os.getpid(), os.getsid(0), os.getpgid(0), os.readlink("/proc/self/fd/0"))
    )
    assert (session, group, stdin) == (pid, pid, "/dev/null")


def test_a_job_has_the_signal_handlers_of_a_new_process(tmp_path: Path) -> None:
    old = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        handlers = value(
            tmp_path,
            lambda: (
                signal.getsignal(signal.SIGINT) is signal.default_int_handler,
                signal.getsignal(signal.SIGTERM) is signal.SIG_DFL,
                signal.getsignal(signal.SIGHUP) is signal.SIG_DFL,
                os.readlink(f"/proc/self/fd/{signal.set_wakeup_fd(-1)}").startswith("pipe:"),
                signal.pthread_sigmask(signal.SIG_BLOCK, []),
            ),
        )
    finally:
        signal.signal(signal.SIGTERM, old)
    assert handlers == (True, True, True, True, set())


@pytest.mark.parametrize("action", [signal.SIG_DFL, signal.SIG_IGN])
def test_the_signal_that_the_supervisor_hears_means_to_a_job_what_it_means_to_the_app(
    tmp_path: Path, action: signal.Handlers
) -> None:
    old = signal.signal(signal.SIGUSR1, action)
    try:
        assert value(tmp_path, lambda: signal.getsignal(signal.SIGUSR1)) == action
    finally:
        signal.signal(signal.SIGUSR1, old)


def test_signals_that_the_app_has_blocked_are_blocked_in_jobs_but_for_those_that_stop_them(tmp_path: Path) -> None:
    old = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2})
    try:
        blocked = value(tmp_path, lambda: signal.pthread_sigmask(signal.SIG_BLOCK, []))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old)
    assert blocked == {signal.SIGUSR1, signal.SIGUSR2}


def test_an_apps_handler_for_another_signal_works_in_jobs_and_only_there(tmp_path: Path) -> None:
    def handler(*_: object) -> None:
        seen.append(os.getpid())

    def job() -> tuple[bool, list[int]]:
        os.kill(os.getppid(), signal.SIGUSR1)  # the supervisor
        os.kill(os.getpid(), signal.SIGUSR1)
        return seen == [os.getpid()], seen

    seen: list[int] = []
    old = signal.signal(signal.SIGUSR1, handler)
    try:
        assert [o.value[0] for o in outcomes(tmp_path, job, {}, {}, cpu_slots=1)] == [True, True]
    finally:
        signal.signal(signal.SIGUSR1, old)


def test_the_user_code_of_one_job_does_not_show_in_the_next(tmp_path: Path) -> None:
    def job() -> int:
        seen = len(leak)
        leak.append(1)
        os.environ["LEAK"] = "1"
        return seen + ("LEAK" in os.environ and seen)

    leak: list[int] = []
    assert [o.value for o in outcomes(tmp_path, job, {}, {}, {}, cpu_slots=1)] == [0, 0, 0]
    assert leak == []


def test_warning_filters_are_those_of_the_app(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        assert value(tmp_path, lambda: list(warnings.filters)) == list(warnings.filters)


def test_apps_without_numpy_draw_different_random_numbers_in_each_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("numpy.random.mtrand", "torch"):  # which other tests of this process may have seeded
        monkeypatch.delitem(sys.modules, name, raising=False)
    draws = [o.value for o in outcomes(tmp_path, random.random, *({} for _ in range(4)))]
    assert len(set(draws)) == 4


SEEDING = """
import random, sys
import {module}
{seed}
from hydra_plugins.hydra_gpu_pool_launcher import GpuPool

def draw():
    return random.random(), float({draw})

pairs = [o.value for o in GpuPool(gpus=[], cpu_slots=2, progress="none").map(draw, [{{}}] * 4)]
print(len({{a for a, _ in pairs}}), len({{b for _, b in pairs}}), pairs[0] == draw())
"""


@pytest.mark.parametrize(
    ("module", "draw", "seed"),
    [
        ("numpy", "numpy.random.rand()", "numpy.random.seed(1)"),
        ("torch", "torch.rand(1)", "torch.manual_seed(1)"),
    ],
)
@pytest.mark.parametrize("seeded", [True, False])
def test_jobs_draw_the_same_numbers_exactly_where_the_app_has_seeded_them(
    run_app: RunApp, module: str, draw: str, seed: str, seeded: bool
) -> None:
    pytest.importorskip(module)
    seeds = f"random.seed(1); {seed}" if seeded else ""
    done = run_app(SEEDING.format(module=module, draw=draw, seed=seeds))
    assert done.stderr == ""
    assert done.stdout.split() == (["1", "1", "True"] if seeded else ["4", "4", "False"])


def test_what_each_job_needs_is_looked_for_once_in_the_process_that_forks_them(tmp_path: Path) -> None:
    def job() -> tuple[int, bool]:
        return _threads._libraries.cache_info().misses, "threadpoolctl" in sys.modules

    _threads._libraries.cache_clear()
    seen = [o.value for o in outcomes(tmp_path, job, {}, {}, gpus=[])]
    assert seen == [(1, True)] * 2, "once for both"
    assert _threads._libraries.cache_info().misses == 0, "and not in main"


class _Registered:
    """Tells when it is taken apart, in whichever process that is."""

    def __del__(self) -> None:
        print("taken apart", flush=True)


def test_what_the_app_has_registered_for_its_exit_is_not_even_taken_apart_in_a_job(tmp_path: Path) -> None:
    class Owner:
        pass

    owner = Owner()
    finalizer = weakref.finalize(owner, print, _Registered())
    outcomes(tmp_path, lambda: None, {}, gpus=[])
    assert (tmp_path / ".gpu_pool/jobs/0/output.log").read_text() == ""
    finalizer.detach()


@pytest.mark.parametrize(("given", "own"), [("auto", None), (3, None), ("auto", "7")])
def test_threads_are_shared_out_unless_the_user_has_set_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: Any, own: str | None
) -> None:
    if own is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", own)
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    seen = outcomes(tmp_path, lambda: [os.environ.get(name) for name in names], {}, cpu_slots=1, threads_per_job=given)[
        0
    ].value
    cores = str(len(os.sched_getaffinity(0)))
    assert seen == ([own, None] if own is not None else [cores, cores] if given == "auto" else ["3", "3"])


def test_the_threads_of_a_job_are_not_the_users_choice_for_the_pool_within_it(tmp_path: Path) -> None:
    def threads() -> list[str | None]:
        return [os.environ.get(name) for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "GPU_POOL_THREADS")]

    def within(given: Any) -> Any:
        seen = outcomes(tmp_path / f"within.{given}", threads, {}, gpus=[], cpu_slots=99, threads_per_job=given)
        return seen[0].value

    def chosen() -> Any:
        os.environ["OPENBLAS_NUM_THREADS"] = "5"
        return within(3)

    seen = outcomes(tmp_path / "a", within, {"given": 3}, {"given": "auto"}, gpus=[], threads_per_job=2)
    cores = str(len(os.sched_getaffinity(0)))
    assert [each.value for each in seen] == [["3"] * 3, [cores] * 3]
    (own,) = outcomes(tmp_path / "b", chosen, {}, gpus=[], threads_per_job=2)
    assert own.value == [None, "5", None]


# --- what it prints ---


def test_a_log_is_whole_whatever_is_printed_and_however_the_job_dies(tmp_path: Path) -> None:
    def job(x: int) -> None:
        libc = ctypes.CDLL(None)
        for i in range(300):
            print(f"p{i}", end=" ")
            os.write(1, b"w")
            libc.printf(b"c%d ", i)
            sys.stderr.write("e")
        subprocess.run(["echo", "child"], check=True)
        if x == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if x == 2:
            os._exit(1)

    libc = ctypes.CDLL(None)
    stdout, fully, not_at_all = ctypes.c_void_p.in_dll(libc, "stdout"), 0, 2
    libc.setvbuf(stdout, None, fully, ctypes.c_size_t(1 << 16))  # as it is where nobody has set PYTHONUNBUFFERED
    results = outcomes(tmp_path, job, *({"x": x} for x in range(3)))
    libc.setvbuf(stdout, None, not_at_all, ctypes.c_size_t(0))
    for result in results:
        log = Path(result.log).read_text()
        for i in range(300):
            assert f"p{i} " in log
            assert f"c{i} " in log
        assert log.count("w") == 300
        assert log.count("e") == 300
        assert log.endswith("child\n")


def test_what_the_app_has_printed_before_is_not_printed_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    print("before", end="")
    ctypes.CDLL(None).printf(b"in C")
    log = Path(outcome(tmp_path, print, sep="").log).read_text()
    assert log == "\n"
    out = capfd.readouterr().out
    assert out.count("before") == out.count("in C") == 1


def test_text_that_the_locale_cannot_say_does_not_end_a_job(tmp_path: Path) -> None:
    result = outcome(tmp_path, lambda: print("é\udcff"))
    assert result.status is Status.COMPLETED
    assert Path(result.log).read_text() == "é\\udcff\n"


def test_a_failed_job_leaves_its_traceback_in_its_log_by_the_hook_that_trackers_use(tmp_path: Path) -> None:
    def job() -> None:
        hook = sys.excepthook
        sys.excepthook = lambda kind, error, tb: (print(f"tracker saw {kind.__name__}"), hook(kind, error, tb))[1]
        raise ValueError("gone wrong")

    log = Path(outcome(tmp_path, job).log).read_text()
    assert log.startswith("tracker saw ValueError\nTraceback (most recent call last):\n")
    assert log.endswith("ValueError: gone wrong\n")


def test_a_traceback_begins_a_line_after_a_bar_that_has_ended_none(tmp_path: Path) -> None:
    def job(bar: str) -> None:
        sys.stderr.write(bar)
        raise ValueError("gone wrong")

    for bar, before in (("\r 50%|# |", "\r 50%|# |\n"), ("whole\n", "whole\n"), ("", "")):
        log = Path(outcome(tmp_path, job, bar=bar).log).read_bytes().decode()
        assert log.startswith(f"{before}Traceback (most recent call last):\n")


def test_an_excepthook_that_fails_changes_no_outcome(tmp_path: Path) -> None:
    def job() -> None:
        sys.excepthook = lambda *_: 1 / 0
        atexit.register(print, "exit hooks ran")
        raise ValueError("gone wrong")

    result = outcome(tmp_path, job)
    assert type(result.error) is ValueError
    assert "ZeroDivisionError" in Path(result.log).read_text()
    assert "exit hooks ran" in Path(result.log).read_text()


def test_a_segmentation_fault_leaves_the_place_in_the_log(tmp_path: Path) -> None:
    was_enabled = faulthandler.is_enabled()
    faulthandler.disable()
    try:
        log = Path(outcome(tmp_path, faulthandler._sigsegv).log).read_text()  # type: ignore[attr-defined]
    finally:
        if was_enabled:
            faulthandler.enable()
    assert log.startswith("Fatal Python error: Segmentation fault\n")


def test_breakpoint_ends_a_job_rather_than_hang_it(run_app: RunApp) -> None:
    package = "hydra_plugins.hydra_gpu_pool_launcher"
    done = run_app(f"from {package} import GpuPool\nprint(GpuPool(cpu_slots=1).map(breakpoint, [{{}}])[0].status)")
    assert done.stdout == "FAILED\n", done.stderr


# --- descriptors ---


def test_a_job_has_all_descriptors_of_the_app_and_none_of_the_pool(tmp_path: Path) -> None:
    def fds() -> dict[int, str]:
        found = {}
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # the one that lists
                found[int(fd)] = os.readlink(f"/proc/self/fd/{fd}")
        return found

    before = fds()
    seen = value(tmp_path, fds)
    log = str(tmp_path / ".gpu_pool/jobs/0/output.log")
    (pipe,) = {where for where in seen.values() if where not in {*before.values(), log, "/dev/null"}}
    ours = [fd for fd, where in seen.items() if where == pipe]
    assert len(ours) == 2, "the two ends of the pipe in which the job's own process finds the signals that it got"
    assert {fd: where for fd, where in seen.items() if fd > 2 and fd not in ours} == {
        fd: where for fd, where in before.items() if fd > 2
    }
    assert (seen[0], seen[1], seen[2]) == ("/dev/null", log, log)


def test_files_and_sockets_of_the_app_work_in_the_job(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    with open(tmp_path / "app.log", "a") as file:

        def job() -> None:
            file.write("from the job\n")
            file.flush()
            theirs.sendall(b"hello")
            (tmp_path / "own").write_text("mine")

        value(tmp_path, job)
    assert (tmp_path / "app.log").read_text() == "from the job\n"
    assert (tmp_path / "own").read_text() == "mine"
    assert ours.recv(10) == b"hello"
    ours.close()
    theirs.close()


# --- what it may start, and what becomes of it ---


def test_a_job_may_have_children_pools_and_threads(tmp_path: Path) -> None:
    def job() -> list[int]:
        with multiprocessing.get_context("fork").Pool(2) as pool, ThreadPoolExecutor() as threads:
            return [*pool.map(abs, [-1, -2]), *threads.map(abs, [-3])]

    assert value(tmp_path, job) == [1, 2, 3]


def test_the_start_method_of_multiprocessing_is_the_apps_own(tmp_path: Path) -> None:
    def job() -> Any:
        return multiprocessing.get_start_method(allow_none=True), multiprocessing.current_process().daemon

    assert value(tmp_path, job) == (multiprocessing.get_start_method(allow_none=True), False)


def daemonize(job: Any) -> None:
    """Run the job in a process that has left our session, group and parent."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            job()
        os._exit(0)


def sleeper() -> None:
    threading.Event().wait()


def deaf_sleeper() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sleeper()


def fork_sleeper() -> int:
    if os.fork() == 0:
        deaf_sleeper()
    return 0


def mp_sleeper() -> None:
    multiprocessing.get_context("fork").Process(target=sleeper, daemon=True).start()


@pytest.mark.parametrize("crash", [False, True])
@pytest.mark.parametrize(
    "leave",
    [fork_sleeper, lambda: daemonize(deaf_sleeper), lambda: daemonize(lambda: daemonize(sleeper)), mp_sleeper],
)
def test_what_a_job_leaves_behind_is_gone_before_its_slot_is_used_again(
    tmp_path: Path, leave: Any, crash: bool
) -> None:
    read, write = os.pipe()
    mark = os.stat(f"/proc/self/fd/{write}").st_ino

    def holders() -> int:
        """How many processes have our end of the pipe: all forks of this one."""
        count = 0
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                count += os.stat(f"/proc/{pid}/fd/{write}").st_ino == mark
        return count

    def job(x: int) -> int:
        if x == 1:
            return holders()
        leave()
        if crash:
            os._exit(9)
        return 0

    results = outcomes(tmp_path, job, {"x": 0}, {"x": 1}, cpu_slots=1)
    assert results[0].status is (Status.FAILED if crash else Status.COMPLETED)
    assert results[1].value == 4, "main, guard, supervisor and the second job itself"
    os.close(read)
    os.close(write)


def test_a_daemon_of_a_running_job_is_left_alone_when_another_job_ends(tmp_path: Path) -> None:
    up, ended = os.pipe(), os.pipe()

    def job(x: int) -> bool:
        if x == 1:  # ends while the daemon runs, and is followed by job 2
            os.read(up[0], 1)
            return True
        if x == 2:
            os.write(ended[1], b"x")
            return True
        told = os.pipe()

        def daemon_process() -> None:
            os.write(told[1], str(os.getpid()).encode())
            sleeper()

        daemonize(daemon_process)
        daemon = int(os.read(told[0], 20))
        os.write(up[1], b"x")
        os.read(ended[0], 1)
        os.kill(daemon, 0)  # raises where there is no such process
        return "State:\tZ" not in Path(f"/proc/{daemon}/status").read_text()

    results = outcomes(tmp_path, job, *({"x": x} for x in range(3)), cpu_slots=2)
    for fd in (*up, *ended):
        os.close(fd)
    assert [o.value for o in results] == [True, True, True], results[0].error


def test_a_slot_is_free_at_once_although_a_grandchild_holds_the_jobs_pipes(tmp_path: Path) -> None:
    assert [o.value for o in outcomes(tmp_path, lambda x: fork_sleeper() + x, {"x": 0}, {"x": 1}, cpu_slots=1)] == [
        0,
        1,
    ]


def test_processes_that_the_app_started_before_are_left_alone(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as sleep:
        outcome(tmp_path, lambda: daemonize(deaf_sleeper))
        assert sleep.poll() is None
        sleep.kill()


def test_what_a_job_registers_for_its_exit_runs_after_its_threads(tmp_path: Path) -> None:
    def job() -> str:
        def late() -> None:
            shutting_down.wait()
            sys.stdout.write("thread\n")  # in one: print would write its newline apart

        def later() -> None:
            shutting_down.wait()
            sys.stdout.write("executor\n")

        shutting_down = threading.Event()
        threading._register_atexit(shutting_down.set)  # type: ignore[attr-defined]
        threading.Thread(target=late).start()
        atexit.register(print, "atexit")
        holder = type("Holder", (), {})()
        weakref.finalize(holder, print, "finalize")
        multiprocessing.util.Finalize(None, print, args=("multiprocessing",), exitpriority=1)
        executor = ThreadPoolExecutor()
        executor.submit(later)
        keep.append((holder, executor))
        print("returned")
        return "value"

    keep: list[Any] = []
    result = outcome(tmp_path, job)
    lines = Path(result.log).read_text().splitlines()
    assert result.value == "value"
    assert lines[0] == "returned"
    assert set(lines[1:3]) == {"executor", "thread"}
    assert set(lines[3:]) == {"atexit", "finalize", "multiprocessing"}


def test_what_the_app_registered_for_its_exit_does_not_run_in_a_job(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    with tempfile.TemporaryDirectory() as of_the_app:
        holder = type("Holder", (), {})()
        weakref.finalize(holder, marker.touch)
        atexit.register(marker.touch)
        try:
            made = value(tmp_path, lambda: tempfile.TemporaryDirectory().name)
            assert Path(of_the_app).exists()
        finally:
            atexit.unregister(marker.touch)
        assert not marker.exists()
        assert not Path(made).exists()
    holder.finalizer = None


def test_a_jobs_log_handlers_are_flushed_and_the_apps_are_not(tmp_path: Path) -> None:
    class Handler(logging.Handler):
        def flush(self) -> None:
            print(self.name)

    app = Handler()
    app.name = "of the app"

    def job() -> None:
        mine = Handler()
        mine.name = "of the job"
        keep.append(mine)

    keep: list[Handler] = []
    log = Path(outcome(tmp_path, job).log).read_text()
    assert log == "of the job\n"


def test_an_exit_hook_that_fails_changes_no_outcome(tmp_path: Path) -> None:
    def job() -> int:
        atexit.register(lambda: 1 / 0)
        return 1

    assert value(tmp_path, job) == 1


def test_shared_memory_that_a_job_forgets_is_removed_at_its_end(tmp_path: Path) -> None:
    def job() -> str:
        memory = SharedMemory(create=True, size=1000)
        keep.append(memory)
        return memory.name

    keep: list[SharedMemory] = []
    name = value(tmp_path, job)
    assert not Path("/dev/shm", name).exists()


def test_shared_memory_of_the_app_outlives_the_jobs_that_use_it(run_app: RunApp) -> None:
    source = """
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from hydra_plugins.hydra_gpu_pool_launcher import GpuPool

memory = SharedMemory(create=True, size=10)

def write():
    memory.buf[0] = 7

GpuPool(gpus=[], cpu_slots=1, progress="none").map(write, [{}])
print(memory.buf[0], Path("/dev/shm", memory.name).exists())
memory.close()
memory.unlink()
"""
    done = run_app(source)
    assert done.stdout == "7 True\n", done.stderr


def test_exit_hooks_run_although_the_wait_for_threads_before_them_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    def job() -> int:
        atexit.register(print, "last hook")
        return 1

    monkeypatch.setattr(threading, "_shutdown", interrupted)
    result = outcome(tmp_path, job)
    assert result.value == 1
    assert "last hook" in Path(result.log).read_text()


@pytest.mark.parametrize("method", multiprocessing.get_all_start_methods())
def test_a_job_may_use_any_start_method_although_the_app_has_used_it_too(run_app: RunApp, method: str) -> None:
    source = f"""
import multiprocessing
from hydra_plugins.hydra_gpu_pool_launcher import GpuPool

def use():
    with multiprocessing.get_context({method!r}).Pool(1) as pool:
        return pool.map(abs, [-1])

if __name__ == "__main__":
    use()
    print([o.value for o in GpuPool(gpus=[], cpu_slots=2, progress="none").map(use, [{{}}, {{}}])])
"""
    done = run_app(source)
    assert done.stdout == "[[1], [1]]\n", done.stderr


def test_a_job_that_dies_after_its_outcome_keeps_it(tmp_path: Path) -> None:
    def job() -> int:
        atexit.register(os.kill, os.getpid(), signal.SIGKILL)
        return 1

    assert value(tmp_path, job) == 1


def test_a_job_that_dies_before_its_outcome_is_written_has_crashed(tmp_path: Path) -> None:
    class Deadly:
        def __reduce__(self) -> Any:
            os.kill(os.getpid(), signal.SIGKILL)

    assert "ended by SIGKILL" in str(outcome(tmp_path, Deadly).error)


def test_a_working_directory_that_is_gone_fails_the_job_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    monkeypatch.setattr(os, "getcwd", lambda: str(tmp_path / "gone"))
    assert isinstance(outcome(tmp_path, print).error, FileNotFoundError)


def test_a_job_is_a_likelier_victim_of_the_oom_killer_than_the_sweep(tmp_path: Path) -> None:
    score = Path("/proc/self/oom_score_adj")
    assert int(value(tmp_path, score.read_text)) == min(int(score.read_text()) + 300, 1000)


# --- debuggers ---

DEBUGGED = """
from hydra_plugins.hydra_gpu_pool_launcher import GpuPool

def stops():
    {stops}
    return "went on"

print(GpuPool(cpu_slots=1, dir=".", progress="none").map(stops, [{{}}])[0])
"""


@pytest.mark.parametrize("stops", ["breakpoint()", "import pdb; pdb.set_trace()"])
def test_a_breakpoint_ends_the_job_at_once_and_says_where_to_debug(run_app: RunApp, tmp_path: Path, stops: str) -> None:
    assert "FAILED" in run_app(DEBUGGED.format(stops=stops), env={"PYTHONBREAKPOINT": ""}).stdout
    told = json.loads((tmp_path / ".gpu_pool/jobs/0/outcome.json").read_text())["error_text"]
    assert told == "a job has no terminal to debug in: run it in the foreground, with hydra/launcher=basic"


def test_a_debugger_of_the_users_own_is_left_to_it(run_app: RunApp) -> None:
    done = run_app(DEBUGGED.format(stops="breakpoint()"), env={"PYTHONBREAKPOINT": "builtins.print"})
    assert "went on" in done.stdout


# --- its name ---


def title() -> str:
    return Path("/proc/self/cmdline").read_bytes().rstrip(b"\0").decode()


def test_a_job_is_known_by_its_number_and_overrides_where_the_library_for_it_is_there(tmp_path: Path) -> None:
    pytest.importorskip("setproctitle")
    assert value(tmp_path, title) == "gpu_pool 0"
    assert outcomes(tmp_path / "more", lambda **_: title(), {"lr": 0.1, "name": "a\nb"})[0].value == (
        "gpu_pool 0 lr=0.1 name='a\\nb'"
    )


def test_without_the_library_a_job_runs_under_the_apps_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "setproctitle", None)
    assert value(tmp_path, title) == title()
