"""A sweep as a whole set of processes: how it ends when somebody ends it, and that nothing of it is left."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import signal
import socket
import subprocess
import termios
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from running import RUN, App, StartApp, wait_until
from support import LIMIT_S

from hydra_plugins.hydra_gpu_pool_launcher import _descriptors, _pidfd
from hydra_plugins.hydra_gpu_pool_launcher._link import Link

KINDS = ["sleeping", "deaf", "with_child", "with_daemon"]


@pytest.mark.parametrize("job", KINDS)
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_nothing_is_left_of_a_sweep_whose_main_process_is_signalled(
    start_app: StartApp, signum: signal.Signals, job: str
) -> None:
    app = start_app(RUN.format(grace=0.2, job=job))
    app.wait_for_jobs(2)
    app.process.send_signal(signum)
    assert app.process.wait(LIMIT_S) == -signum
    app.assert_nothing_is_left()
    ends = app.ends()
    assert {status for status, _ in ends.values()} == {"CANCELLED"}
    assert set(ends) == {0, 1, 2}


def test_main_ends_only_when_everything_else_has(start_app: StartApp) -> None:
    app = start_app(RUN.format(grace=0.2, job="with_daemon"))
    app.wait_for_jobs(2)
    app.process.terminate()
    app.process.wait(LIMIT_S)
    assert _descriptors.wait_readable(app.pidfds, 0) == app.pidfds
    assert app.report() == ""


@pytest.mark.parametrize("who", ["supervisor", "guard"])
@pytest.mark.parametrize("job", KINDS)
def test_nothing_is_left_of_a_sweep_whose_supervisor_or_guard_is_killed(
    start_app: StartApp, who: str, job: str
) -> None:
    app = start_app("print([type(o.error).__name__ for o in " + RUN.format(grace=0.2, job=job) + "])")
    app.wait_for_jobs(2)
    os.kill(app.relatives()[who], signal.SIGKILL)
    app.assert_nothing_is_left()
    out, err = app.process.communicate(timeout=LIMIT_S)
    assert app.process.returncode == 0, err
    expected = "JobLostError" if who == "supervisor" else "JobCancelledError"
    assert out.count(expected) == 3


def test_a_supervisor_that_is_killed_before_it_has_begun_is_replaced(start_app: StartApp) -> None:
    app = start_app(
        "print([o.value for o in GpuPool(cpu_slots=1, gpus=[], dir='sweep').map(abs_, [{'x': -1}, {'x': -2}])])",
        before="""
from {package} import _files, _world
claim = _files.claim
def killed(*args):
    try:
        open("killed", "x").close()
    except FileExistsError:
        return claim(*args)
    os.kill(os.getpid(), signal.SIGKILL)
_files.claim = killed
def abs_(x): return abs(x)
""".format(package="hydra_plugins.hydra_gpu_pool_launcher"),
    )
    out, err = app.process.communicate(timeout=LIMIT_S)
    assert out == "[1, 2]\n", err
    assert (app.directory / "killed").exists()
    assert err.count("gpu_pool: 2 jobs") == 1
    app.assert_nothing_is_left()


def test_results_survive_the_supervisor(start_app: StartApp) -> None:
    app = start_app(
        "def job(x):\n    if x: sleeping(x)\n    return 42\n"
        "print([o.value for o in GpuPool(cpu_slots=1, dir='sweep').map(job, [{'x': 0}, {'x': 1}])])"
    )
    app.wait_for_jobs(1)
    os.kill(app.relatives()["supervisor"], signal.SIGKILL)
    app.assert_nothing_is_left()
    assert app.process.communicate(timeout=LIMIT_S)[0] == "[42, None]\n"


@pytest.mark.parametrize("job", KINDS)
@pytest.mark.parametrize("first", ["main", "jobs"])
def test_a_sweep_that_is_signalled_process_by_process_ends_as_a_whole(
    start_app: StartApp, first: str, job: str
) -> None:
    app = start_app(RUN.format(grace=0.2, job=job))
    jobs = app.wait_for_jobs(2)
    everybody = [app.process.pid, *app.relatives().values(), *jobs, *app.children]
    for pid in everybody if first == "main" else reversed(everybody):
        with contextlib.suppress(ProcessLookupError):  # gone already, of the signals before
            os.kill(pid, signal.SIGTERM)
    app.assert_nothing_is_left()
    assert app.process.wait(LIMIT_S) == -signal.SIGTERM


def test_a_signal_to_the_supervisor_stops_the_sweep_and_main_is_told(start_app: StartApp) -> None:
    app = start_app("print([str(o.error) for o in " + RUN.format(grace=5, job="sleeping") + "])")
    app.wait_for_jobs(2)
    os.kill(app.relatives()["supervisor"], signal.SIGTERM)
    out, _ = app.process.communicate(timeout=LIMIT_S)
    app.assert_nothing_is_left()
    assert "job 0 (x=0) was cancelled: SIGTERM to the supervisor" in out
    assert "job 2 (x=2) was cancelled: SIGTERM to the supervisor; it was not started" in out


def test_ctrl_c_reaches_the_jobs_as_an_interrupt_and_main_as_one(start_app: StartApp) -> None:
    app = start_app(RUN.format(grace=60, job="sleeping"), start_new_session=True)
    app.wait_for_jobs(2)
    os.killpg(app.process.pid, signal.SIGINT)  # as a terminal does: the whole foreground group
    _, err = app.process.communicate(timeout=LIMIT_S)
    assert err.endswith("KeyboardInterrupt\n")
    assert app.process.returncode == -signal.SIGINT
    for num in (0, 1):
        assert "KeyboardInterrupt" in (app.directory / f"sweep/.gpu_pool/jobs/{num}/output.log").read_text()
    assert app.ends()[0] == ("CANCELLED", "was cancelled: Ctrl-C (SIGINT to the main process)")
    app.assert_nothing_is_left()


def test_a_person_is_told_what_ctrl_c_does_and_what_was_not_started(start_app: StartApp) -> None:
    app = start_app(RUN.format(grace=60, job="sleeping"))
    app.wait_for_jobs(2)
    app.process.send_signal(signal.SIGINT)
    _, err = app.process.communicate(timeout=LIMIT_S)
    assert err.count("Ctrl-C (SIGINT to the main process): stopping 2 jobs, killed in 60 s\n") == 1
    assert err.count("not started: 1 queued job: Ctrl-C (SIGINT to the main process)\n") == 1
    assert err.count("job 2 ") == 0
    assert re.search(r"^3 CANCELLED in \S+, slots \d+% busy; cancelled: 0, 1, 2$", err, re.MULTILINE)


@pytest.mark.parametrize("job", KINDS)
def test_a_second_ctrl_c_kills_without_waiting_for_the_grace_to_end(start_app: StartApp, job: str) -> None:
    app = start_app(RUN.format(grace=1e6, job="held"), before=f"KIND = {job!r}", start_new_session=True)
    app.wait_for_jobs(2)
    os.killpg(app.process.pid, signal.SIGINT)
    while [e["event"] for e in app.journal()].count("stop") < 2:
        os.sched_yield()
    os.killpg(app.process.pid, signal.SIGINT)
    assert app.process.wait(LIMIT_S) == -signal.SIGINT
    app.assert_nothing_is_left()


def test_the_reason_is_on_record_before_the_job_can_know(start_app: StartApp) -> None:
    app = start_app(
        "def job(x):\n"
        "    def told(*_):\n"
        "        report('stop' if '\"stop\"' in open('sweep/.gpu_pool/journal.jsonl').read() else 'nothing')\n"
        "        sys.exit(0)\n"
        "    signal.signal(signal.SIGTERM, told)\n"
        "    sleeping(x)\n" + RUN.format(grace=60, job="job")
    )
    app.wait_for_jobs(2)
    app.process.terminate()
    assert {app.report().split()[1] for _ in range(2)} == {"stop"}
    app.assert_nothing_is_left()
    assert app.ends()[0] == ("CANCELLED", "was cancelled: SIGTERM to the main process")


def test_what_a_stopped_job_returns_is_kept_but_not_as_its_result(start_app: StartApp) -> None:
    app = start_app(
        "def job(x):\n"
        "    try:\n        sleeping(x)\n"
        "    except KeyboardInterrupt:\n        return 'half'\n" + RUN.format(grace=60, job="job")
    )
    app.wait_for_jobs(2)
    app.process.send_signal(signal.SIGINT)
    app.assert_nothing_is_left()
    directory = app.directory / "sweep/.gpu_pool/jobs/0"
    assert sorted(path.name for path in directory.iterdir()) == ["late.pickle", "output.log"]
    assert app.ends()[0][0] == "CANCELLED"


@dataclass
class Terminal:
    """A terminal with which an app is started, as its controlling one; ``close`` is what closing its window does."""

    master: int
    slave: int

    def popen(self) -> dict[str, Any]:
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), self.slave)
        return {
            **streams,
            "start_new_session": True,
            "preexec_fn": lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        }

    def close(self) -> None:
        for fd in (self.slave, self.master):
            if fd >= 0:
                os.close(fd)
        self.master = self.slave = -1


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    terminal = Terminal(*os.openpty())
    yield terminal
    terminal.close()


@pytest.mark.parametrize("job", KINDS)
def test_nothing_is_left_of_a_sweep_whose_terminal_is_closed(start_app: StartApp, terminal: Terminal, job: str) -> None:
    app = start_app(RUN.format(grace=0.2, job=job), **terminal.popen())
    app.wait_for_jobs(2)
    terminal.close()
    assert app.process.wait(LIMIT_S) == -signal.SIGHUP
    app.assert_nothing_is_left()
    assert app.ends()[0] == ("CANCELLED", "was cancelled: SIGHUP to the main process, whose terminal was closed")


def test_a_sweep_under_nohup_outlives_its_terminal(start_app: StartApp, terminal: Terminal) -> None:
    app = start_app(
        "def job(x):\n    report()\n    return signal.sigwait([signal.SIGUSR1])\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])\n"
        "outcomes = GpuPool(cpu_slots=2, dir='sweep').map(job, [dict(x=x) for x in range(3)])\n"
        "report(str([o.status == 'COMPLETED' for o in outcomes]))",
        prefix=("nohup",),
        env={**os.environ, "KEEP_HUP": "1"},
        **terminal.popen(),
    )
    jobs = app.wait_for_jobs(2)
    terminal.close()
    for pid in jobs:
        os.kill(pid, signal.SIGUSR1)
    os.kill(app.wait_for_jobs(1)[0], signal.SIGUSR1)
    assert app.report().split(maxsplit=1)[1] == "[True, True, True]"
    assert app.process.wait(LIMIT_S) == 0
    app.assert_nothing_is_left()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_suspended_main_keeps_no_job_alive(start_app: StartApp, signum: signal.Signals) -> None:
    """What it is sent besides SIGKILL waits until it goes on; the grace of its jobs does not wait for it."""
    app = start_app(RUN.format(grace=0.2, job="deaf"))
    app.wait_for_jobs(2)
    app.process.send_signal(signal.SIGSTOP)
    if signum == signal.SIGKILL:
        app.process.kill()
    else:
        os.kill(app.relatives()["supervisor"], signum)
    for pidfd in app.pidfds:
        assert _descriptors.wait_readable([pidfd], LIMIT_S), "a job is alive while main is suspended"
    app.process.send_signal(signal.SIGCONT)
    assert app.process.wait(LIMIT_S) == (-signal.SIGKILL if signum == signal.SIGKILL else 0)
    app.assert_nothing_is_left()


ENDS: dict[str, Callable[[App], None]] = {
    "SIGINT": lambda app: app.process.send_signal(signal.SIGINT),
    "SIGTERM": lambda app: app.process.terminate(),
    "SIGKILL": lambda app: app.process.kill(),
    "SIGKILL to the supervisor": lambda app: os.kill(app.relatives()["supervisor"], signal.SIGKILL),
    "SIGKILL to the guard": lambda app: os.kill(app.relatives()["guard"], signal.SIGKILL),
}


OWN = """
def start(is_daemon):
    if os.fork() == 0:
        if is_daemon:
            os.setsid()
        if not is_daemon or os.fork() == 0:
            report()
            os.close(LIFELINE)
            while True:
                signal.pause()
        os._exit(0)

start(is_daemon=False)
start(is_daemon=True)
report(subprocess.Popen(["sleep", "1000"]).pid)
"""


@pytest.mark.parametrize("end", ENDS)
def test_what_the_app_had_started_and_what_others_run_beside_it_is_never_touched(start_app: StartApp, end: str) -> None:
    with subprocess.Popen(["sleep", "1000"]) as other:
        app = start_app(RUN.format(grace=0.2, job="with_daemon"), before=OWN)
        of_the_app = {int(app.report().split()[-1]) for _ in range(3)}
        untouched = [_pidfd.pidfd_open(pid) for pid in (other.pid, *of_the_app)]
        app.wait_for_jobs(2)
        ENDS[end](app)
        app.assert_nothing_is_left()
        app.process.wait(LIMIT_S)
        assert _descriptors.wait_readable(untouched, 0) == []
        for pid in of_the_app:  # orphans, which have fallen to us
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        other.kill()
    for pidfd in untouched:
        os.close(pidfd)


def test_what_is_ignored_stays_ignored_as_under_nohup(start_app: StartApp) -> None:
    app = start_app("signal.signal(signal.SIGHUP, signal.SIG_IGN)\n" + RUN.format(grace=60, job="sleeping"))
    app.wait_for_jobs(2)
    app.process.send_signal(signal.SIGHUP)
    app.process.send_signal(signal.SIGTERM)
    assert app.process.wait(LIMIT_S) == -signal.SIGTERM
    app.assert_nothing_is_left()
    assert app.ends()[0][1] == "was cancelled: SIGTERM to the main process"


def test_an_apps_own_handler_stays_and_may_end_the_sweep_by_raising(start_app: StartApp) -> None:
    app = start_app(
        "def handler(*_): raise SystemExit(7)\nsignal.signal(signal.SIGTERM, handler)\n"
        + RUN.format(grace=60, job="sleeping")
    )
    app.wait_for_jobs(2)
    app.process.terminate()
    assert app.process.wait(LIMIT_S) == 7
    app.assert_nothing_is_left()
    assert app.ends()[0] == ("CANCELLED", "was cancelled: the launcher was closed")


def test_handlers_are_the_apps_again_after_the_sweep(start_app: StartApp) -> None:
    app = start_app(
        "before = [signal.getsignal(s) for s in (2, 15, 1)]\n"
        "GpuPool(cpu_slots=1, progress='none', gpus=[]).map(print, [{}])\n"
        "assert [signal.getsignal(s) for s in (2, 15, 1)] == before\nprint('same')"
    )
    assert app.process.communicate(timeout=LIMIT_S) == ("same\n", "")


def test_a_job_killed_by_hand_ends_alone(start_app: StartApp) -> None:
    app = start_app(
        "def job(x):\n    if x == 0: sleeping(x)\n    return x\n"
        "calls = [dict(x=x) for x in range(4)]\n"
        "print([(o.value, str(o.error)) for o in GpuPool(cpu_slots=2, dir='sweep').map(job, calls)])"
    )
    (pid,) = app.wait_for_jobs(1)
    os.kill(pid, signal.SIGTERM)
    out, _ = app.process.communicate(timeout=LIMIT_S)
    cancelled = "job 0 (x=0) was cancelled: SIGTERM was sent to its process"
    assert out == f"{[(None, cancelled), (1, 'None'), (2, 'None'), (3, 'None')]}\n"


def test_jobs_go_on_while_main_is_suspended(start_app: StartApp) -> None:
    app = start_app(
        "def job(x):\n    report(x)\n    return x\n"
        "def first(x):\n"
        "    if x == 0:\n        report('up'); signal.sigwait([signal.SIGUSR1])\n"
        "    return job(x)\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])\n"
        "pool = GpuPool(cpu_slots=1, gpus=[], dir='sweep', progress='none')\n"
        "print([o.value for o in pool.map(first, [{'x': x} for x in range(300)])] "
        "== list(range(300)))"
    )
    pid = int(app.report().split()[0])
    app.process.send_signal(signal.SIGSTOP)
    os.kill(pid, signal.SIGUSR1)
    assert [app.report().split()[1] for _ in range(300)] == [str(x) for x in range(300)]
    app.process.send_signal(signal.SIGCONT)
    assert app.process.communicate(timeout=LIMIT_S) == ("True\n", "")
    app.assert_nothing_is_left()


def test_a_sweep_in_a_thread_that_ends_with_it_works(start_app: StartApp) -> None:
    app = start_app(
        "found = []\n"
        "def sweep(): found.extend(o.value for o in GpuPool(cpu_slots=2).map(abs_, [{'x': -1}, {'x': -2}]))\n"
        "def abs_(x): return abs(x)\n"
        "thread = threading.Thread(target=sweep); thread.start(); thread.join(); print(found)"
    )
    out, err = app.process.communicate(timeout=LIMIT_S)
    assert out == "[1, 2]\n"
    assert "in the main process (" not in err or "MainThread" in err


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("job", ["deaf", "with_daemon"])
def test_nothing_is_left_of_a_sweep_whose_main_thread_ends_while_another_runs_it(
    start_app: StartApp, end: str, job: str
) -> None:
    app = start_app(
        f"thread = threading.Thread(target=lambda: {RUN.format(grace=0.2, job=job)})\n"
        "threading.Thread(target=thread.start).start()"
    )
    app.wait_for_jobs(2)
    ENDS[end](app)
    app.assert_nothing_is_left()
    app.process.wait(LIMIT_S)


@pytest.mark.parametrize(
    ("signum", "job"),
    [*((signal.SIGTERM, kind) for kind in KINDS), (signal.SIGINT, "with_daemon"), (signal.SIGHUP, "with_daemon")],
)
def test_as_the_first_process_of_a_container_main_exits_with_the_shells_code(
    start_app: StartApp, signum: signal.Signals, job: str
) -> None:
    unshare = shutil.which("unshare")
    prefix = (unshare or "", "--pid", "--fork", "--kill-child", "--mount-proc")
    if unshare is None or subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no PID namespace can be made here")
    app = start_app(RUN.format(grace=0.2, job=job), prefix=prefix)
    for _ in range(2):
        app.report()  # in the numbers of its namespace
    main = Path(f"/proc/{app.process.pid}/task/{app.process.pid}/children").read_text()
    os.kill(int(main), signum)
    assert app.process.wait(LIMIT_S) == 128 + signum
    app.assert_nothing_is_left()
    assert {status for status, _ in app.ends().values()} == {"CANCELLED"}


def test_a_second_sweep_in_the_directory_of_a_live_one_is_refused_by_its_pid(start_app: StartApp) -> None:
    first = start_app(RUN.format(grace=0.2, job="sleeping"))
    first.wait_for_jobs(2)
    second = start_app(RUN.format(grace=0.2, job="sleeping"))
    _, err = second.process.communicate(timeout=LIMIT_S)
    assert f"Another sweep (process {first.process.pid}) is running in" in err.splitlines()[-1]
    assert {e["event"] for e in first.journal()} == {"launch", "queued", "start"}
    first.process.terminate()
    first.assert_nothing_is_left()


def test_no_supervisor_is_left_after_four_sweeps_in_one_process(start_app: StartApp) -> None:
    app = start_app(
        "for _ in range(4): GpuPool(cpu_slots=2).map(print, [{}, {}])\n"
        "print(open(f'/proc/self/task/{os.getpid()}/children').read(), len(os.listdir('/proc/self/fd')), end='')\n"
        "GpuPool(cpu_slots=2).map(print, [{}])\n"
        "print('', len(os.listdir('/proc/self/fd')))"
    )
    out, _ = app.process.communicate(timeout=LIMIT_S)
    children, before, after = out.split(" ")
    assert children == ""
    assert int(before) == int(after)


def test_a_main_process_without_standard_streams_runs_its_sweep(start_app: StartApp) -> None:
    app = start_app(
        "values = [o.value for o in GpuPool(cpu_slots=2, dir='sweep').map(abs_, [{'x': -1}, {'x': -2}])]\n"
        "report(str(values))",
        before="for fd in (0, 1, 2): os.close(fd)\ndef abs_(x): return abs(x)",
    )
    assert app.report().split(maxsplit=1)[1] == "[1, 2]"
    app.assert_nothing_is_left()


@pytest.mark.parametrize("action", ["signal.SIG_IGN", "lambda *_: os.waitpid(-1, os.WNOHANG)"])
def test_an_app_that_does_not_care_for_its_children_runs_its_sweep(start_app: StartApp, action: str) -> None:
    app = start_app(
        "outcomes = GpuPool(cpu_slots=2, dir='sweep').map(job, [{'x': x} for x in range(4)])\n"
        "print([o.value for o in outcomes], outcomes[3].error)",
        before=f"signal.signal(signal.SIGCHLD, {action})\ndef job(x): return os._exit(3) if x == 3 else x",
    )
    out, err = app.process.communicate(timeout=LIMIT_S)
    assert out == "[0, 1, 2, None] job 3 (x=3) ended with exit code 3 and without a result\n", err
    app.assert_nothing_is_left()


def test_a_sweep_whose_directory_is_removed_ends_all_the_same(start_app: StartApp) -> None:
    app = start_app(
        "outcomes = GpuPool(cpu_slots=1, dir='sweep').map(job, [{'x': x} for x in range(3)])\n"
        "print(outcomes[0].error)\n"
        "print([type(o.error).__name__ for o in outcomes])",
        before="import shutil\n"
        "def job(x):\n    if x != 1: return x\n"
        "    os.rename('sweep', 'gone')  # at once: others write into it meanwhile\n    shutil.rmtree('gone')",
    )
    out, err = app.process.communicate(timeout=LIMIT_S)
    assert out.endswith("['JobLostError', 'NoneType', 'NoneType']\n"), (out, err)
    assert out.startswith("job 0 (x=0) was lost: it had ended, and ")
    assert (
        err.count("sweep/.gpu_pool was removed: it is made anew, and the sweep goes on without what was in it\n") == 1
    )
    assert set(app.ends()) == {1, 2}
    app.assert_nothing_is_left()


def test_what_a_person_is_to_know_is_said_although_main_was_suspended_until_all_was_over(start_app: StartApp) -> None:
    app = start_app(
        "GpuPool(cpu_slots=1, dir='sweep').map(job, [{'x': x} for x in range(2)])",
        before="import shutil\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])\n"
        "def job(x):\n    if x: return\n    report()\n    signal.sigwait([signal.SIGUSR2])\n"
        "    os.rename('sweep', 'gone')\n    shutil.rmtree('gone')",
    )
    (pid,) = app.wait_for_jobs(1)
    app.process.send_signal(signal.SIGSTOP)
    os.kill(pid, signal.SIGUSR2)

    def is_over() -> bool:
        with contextlib.suppress(FileNotFoundError, IndexError):  # it is just being removed, or made anew
            return bool(app.journal()[-1]["event"] == "done")
        return False

    wait_until(is_over, app.directory)
    app.process.send_signal(signal.SIGCONT)
    assert app.process.communicate(timeout=LIMIT_S)[1].count("sweep/.gpu_pool was removed: it is made anew") == 1


def test_a_deadly_sigpipe_in_the_app_is_not_deadly_for_the_sweep(start_app: StartApp) -> None:
    app = start_app(
        "def job(x):\n    if x: sleeping(x)\n    return 42\n"
        "pool = GpuPool(cpu_slots=1, dir='sweep', progress='none')\n"
        "print([(o.value, type(o.error).__name__) for o in pool.map(job, [{'x': x} for x in range(3)])])",
        before="signal.signal(signal.SIGPIPE, signal.SIG_DFL)",
    )
    app.wait_for_jobs(1)
    os.kill(app.relatives()["supervisor"], signal.SIGKILL)
    out, err = app.process.communicate(timeout=LIMIT_S)
    assert out == "[(42, 'NoneType'), (None, 'JobLostError'), (None, 'JobLostError')]\n", err
    app.assert_nothing_is_left()


def test_a_fork_of_main_that_outlives_it_does_not_keep_the_sweep_alive(start_app: StartApp) -> None:
    """It holds main's end of everything: only a pidfd tells that main itself is gone."""
    app = start_app(
        RUN.format(grace=0.2, job="sleeping"),
        before="def fork(*_):\n    if os.fork() == 0:\n        report('fork')\n        signal.pause()\n"
        "signal.signal(signal.SIGUSR1, fork)",
    )
    app.wait_for_jobs(2)
    jobs = list(app.pidfds)
    app.process.send_signal(signal.SIGUSR1)
    fork = int(app.report().split()[0])
    app.process.kill()
    for pidfd in jobs:
        assert _descriptors.wait_readable([pidfd], LIMIT_S), "a job outlived main"
    os.kill(fork, signal.SIGKILL)
    app.assert_nothing_is_left()
    assert app.ends()[0] == ("CANCELLED", "was cancelled: the main process is gone")


@pytest.mark.parametrize("how", ["is gone", "has become another program"])
def test_why_a_sweep_was_stopped_without_a_word_of_main_is_on_record(start_app: StartApp, how: str) -> None:
    app = start_app(
        RUN.format(grace=0.2, job="sleeping"),
        before="signal.signal(signal.SIGUSR1, lambda *_: os.execvp('sleep', ['sleep', '1000']))",
    )
    app.wait_for_jobs(2)
    relatives = app.relatives()
    app.process.send_signal(signal.SIGKILL if how == "is gone" else signal.SIGUSR1)
    for pidfd in app.pidfds[-len(relatives) :]:
        assert _descriptors.wait_readable([pidfd], LIMIT_S), "guard or supervisor outlived main"
    app.process.kill()
    app.assert_nothing_is_left()
    assert app.journal()[-1]["stopped"] == f"the main process {how}"


def test_jobs_may_end_politely_although_sigpipe_is_deadly_and_main_was_killed(start_app: StartApp) -> None:
    app = start_app(
        "def job(x):\n"
        "    signal.signal(signal.SIGTERM, lambda *_: (open(f'saved{x}', 'w').close(), os._exit(0)))\n"
        "    sleeping(x)\n" + RUN.format(grace=60, job="job"),
        before="signal.signal(signal.SIGPIPE, signal.SIG_DFL)",
    )
    app.wait_for_jobs(2)
    app.process.kill()
    app.assert_nothing_is_left()
    assert sorted(path.name for path in app.directory.glob("saved*")) == ["saved0", "saved1"]


def test_a_closed_pipe_behind_a_handler_of_the_app_does_not_end_the_sweep(start_app: StartApp) -> None:
    app = start_app(
        "logging.getLogger().addHandler(Exits())\nlogging.getLogger().setLevel('INFO')\n"
        "report(str([o.value for o in GpuPool(cpu_slots=1, dir='sweep').map(abs_, [{'x': -1}, {'x': -2}])]))",
        before="import logging\ndef abs_(x): return abs(x)\n"
        "class Exits(logging.Handler):\n    def emit(self, record):\n"
        "        if 'started' in record.getMessage(): sys.exit(1)",
    )
    assert app.report().split(maxsplit=1)[1] == "[1, 2]"


def test_a_pool_in_a_job_of_a_second_pool_leaves_the_jobs_files_alone(start_app: StartApp) -> None:
    """Numbers of descriptors that the first pool had in main are in use again by then, for the job's own files."""
    app = start_app(
        "thread = threading.Thread(target=lambda: GpuPool(cpu_slots=1, dir='first').map(first, [{}]))\n"
        "thread.start()\n"
        "report(app_is_up.recv(1))\n"
        "print([(o.value, o.error) for o in GpuPool(cpu_slots=1, dir='second', progress='none').map(second, [{}])])\n"
        "goes_on.send(b'x')\nthread.join()",
        before="""
import socket
app_is_up, job_is_up = socket.socketpair()
goes_on, waits = socket.socketpair()
def first():
    job_is_up.send(b'x')
    waits.recv(1)
files = []
def inner(x):
    for file in files:
        file.write('whole')
        file.flush()
    return x
def second():
    files.extend(open(f'file{i}', 'w') for i in range(10))
    values = [o.value for o in GpuPool(cpu_slots=1, dir='inner', progress='none').map(inner, [{'x': 1}])]
    return values, [open(f'file{i}').read() for i in range(10)] == ['whole'] * 10
""",
    )
    out, err = app.process.communicate(timeout=LIMIT_S)
    assert out == "[(([1], True), None)]\n", err


def test_an_answer_finds_room_however_many_doorbells_nobody_heard() -> None:
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    ours.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            theirs.send(b"\n" * 4096)
    link = Link(os.getpid(), -1, ours.fileno())
    link.drain()
    assert theirs.send(b"an answer\n") == 10
    ours.close()
    theirs.close()
