"""The table that moves, on a terminal: what a person sees of it, and that nothing tears it or is left of it."""

from __future__ import annotations

import os
import re
import signal
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest
from running import App, StartApp
from support import LIMIT_S
from terminal import Terminal, terminal

from hydra_plugins.hydra_gpu_pool_launcher import _screen
from hydra_plugins.hydra_gpu_pool_launcher._display import Guarded, Shown
from hydra_plugins.hydra_gpu_pool_launcher._files import SweepFiles
from hydra_plugins.hydra_gpu_pool_launcher._live import Live
from hydra_plugins.hydra_gpu_pool_launcher._printing import Streams
from hydra_plugins.hydra_gpu_pool_launcher._screen import Screen
from hydra_plugins.hydra_gpu_pool_launcher._view import View

# Jobs that say something, report, and end when they are told to by SIGUSR1.
BEFORE = """
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])

def job(x, **more):
    sys.stderr.write(f"loading\\n\\r 10%|#    | \\x1b[32m1/10\\x1b[0m\\r 50%|###  | {x}/10")
    sys.stderr.flush()
    report(x)
    signal.sigwait([signal.SIGUSR1])
    if x == 1:
        raise ValueError("no such\\nfile \\x1b[2J")
    return x / 3

def after_an_interrupt(x):
    try:
        report()
        rest()
    finally:
        report()
        signal.sigwait([signal.SIGUSR1])
"""

MAP = "GpuPool(cpu_slots={slots}, gpus=[], dir='sweep', {more}).map({job}, [dict(x=x) for x in range({jobs})])"


def mapped(jobs: int = 3, slots: int = 2, job: str = "job", more: str = "") -> str:
    return MAP.format(jobs=jobs, slots=slots, job=job, more=more)


@pytest.fixture
def tty() -> Iterator[Terminal]:
    with terminal() as it:
        yield it


def header(tty: Terminal) -> list[int]:
    """The lines on which a table's header stands."""
    return [i for i, line in enumerate(tty.lines) if re.match(r" +# +gpu +pid +for ", line)]


def running(app: App, count: int) -> list[int]:
    """Block until so many jobs have reported; their pids, in the order of their numbers."""
    reports = [tuple(map(int, app.report().split())) for _ in range(count)]
    return [pid for pid, *_ in sorted(reports, key=lambda report: report[1:])]


def go_on(*pids: int) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGUSR1)


def ended(app: App, tty: Terminal) -> int:
    """The exit code, when all that the app sent has arrived."""
    code: list[int] = []

    def is_over() -> bool:
        found = app.process.poll()
        code.extend([] if found is None else [found])
        return found is not None

    while not is_over():
        tty.until_quiet()
        os.sched_yield()
    tty.until_quiet()
    return code[0]


def assert_left_as_it_was(tty: Terminal) -> None:
    assert not header(tty)
    assert not re.search(rb"\x1b\[\?(25|47|1047|1049)[hl]", tty.raw), "cursor or screen were switched"
    assert tty.cursor[1] == 0
    assert tty.colour(tty.lines[-1].strip()[:1] or " ") == "default"


def test_the_table_has_a_row_per_running_job_with_its_last_line_and_fits_80_columns(
    start_app: StartApp, tty: Terminal
) -> None:
    app = start_app(mapped(), before=BEFORE, **tty.popen())
    pids = running(app, 2)
    tty.until_drawn(lambda: tty.has("1/10"))
    (at,) = header(tty)
    assert tty.lines[0] == "gpu_pool: 3 jobs, 2 at once, on CPU slots"
    assert re.fullmatch(r"sweep    0 done  2 running  1 queued    2 of 2 slots busy    0:00:\d\d", tty.lines[at - 1])
    for num, pid in enumerate(pids):
        row = rf" +{num}  cpu\.{num} +{pid}  0:\d\d  {num}   50%\|###  \| {num}/10"
        assert re.fullmatch(row, tty.lines[at + 1 + num])
    assert tty.cursor == (at + 3, 0)
    drawn = tty.raw.count(b"#  gpu")
    tty.until_drawn(lambda: tty.raw.count(b"#  gpu") >= drawn + 3)
    assert header(tty) == [at]
    assert tty.cursor == (at + 3, 0)
    go_on(*pids)
    (last,) = running(app, 1)
    tty.until_drawn(lambda: tty.has("2/10"))
    go_on(last)
    assert ended(app, tty) == 0


def test_a_failure_is_told_above_the_table_and_is_red_in_it(start_app: StartApp, tty: Terminal) -> None:
    app = start_app(mapped(), before=BEFORE, **tty.popen())
    first, second = running(app, 2)
    go_on(second)
    (third,) = running(app, 1)
    tty.until_drawn(lambda: tty.has("1 failed") and tty.has("2/10"))
    (at,) = header(tty)
    above = "\n".join(tty.lines[:at])
    assert "job 1 (x=1) FAILED: ValueError: no such file\n  see sweep/.gpu_pool/jobs/1/output.log" in above
    assert "started" not in above
    assert tty.lines[at + 3].endswith("FAILED: ValueError: no such file")
    assert tty.colour("1  cpu.1") == "red"
    assert tty.colour("0  cpu.0") == "default"
    go_on(first, third)
    assert ended(app, tty) == 0
    assert "COMPLETED" not in above


def test_it_is_gone_in_the_end_and_the_results_stand_in_its_place(start_app: StartApp, tty: Terminal) -> None:
    app = start_app(mapped(jobs=2) + "\nprint('and on it goes')", before=BEFORE, **tty.popen())
    go_on(*running(app, 2))
    assert ended(app, tty) == 0
    assert_left_as_it_was(tty)
    assert tty.lines[-1] == "and on it goes"
    text = "\n".join(tty.all_lines)
    assert re.search(r"^1 COMPLETED, 1 FAILED in 0:00:\d\d, slots \d+% busy:$", text, re.MULTILINE)
    assert re.search(r"^  0  0  COMPLETED  0 +\d+\.\d +cpu\.0$", text, re.MULTILINE)
    assert text.count("job 1 (x=1)") == 2  # when it failed, and in the end


def test_after_a_resize_there_is_one_table_that_fits_and_what_was_told_above_it(
    start_app: StartApp, tty: Terminal
) -> None:
    app = start_app(mapped(), before=BEFORE, **tty.popen())
    pids = running(app, 2)
    go_on(pids[1])
    (third,) = running(app, 1)
    tty.until_drawn(lambda: tty.has("2/10") and tty.has("1 failed"))
    cleared: list[int] = []
    for columns, lines in ((50, 16), (120, 30), (60, 12)):
        tty.until_quiet()
        cleared.append(tty.raw.count(b"\x1b[2J"))
        tty.resize(columns, lines)
        tty.until_drawn(lambda: tty.raw.count(b"\x1b[2J") > cleared[-1] and bool(header(tty)))
        (at,) = header(tty)
        assert max(map(len, tty.lines)) <= columns
        assert tty.cursor == (at + 4, 0)
        assert tty.lines[0].startswith("gpu_pool: 3 jobs") or lines < 20
        assert "".join(tty.lines[:at]).count("job 1 (x=1) FAILED") == 1
    go_on(pids[0], third)
    assert ended(app, tty) == 0
    assert not header(tty)


def test_ctrl_c_shows_what_is_being_stopped_and_ends_as_ever(start_app: StartApp, tty: Terminal) -> None:
    app = start_app(mapped(job="after_an_interrupt", more="kill_grace_s=1000"), before=BEFORE, **tty.popen())
    running(app, 2)
    tty.until_drawn(lambda: bool(header(tty)))
    tty.type(b"\x03")
    tty.until_drawn(lambda: sum("stopping: Ctrl-C" in line for line in tty.lines) == 2)
    assert tty.colour("0  cpu.0") == "brown"  # pyte's name of what is yellow
    assert tty.has("Ctrl-C (SIGINT to the main process): stopping 2 jobs, killed in 1000 s")
    go_on(*running(app, 2))
    assert ended(app, tty) == -signal.SIGINT
    text = "\n".join(tty.all_lines)
    assert re.search(r"^3 CANCELLED in \S+, slots \d+% busy; cancelled: 0, 1, 2$", text, re.MULTILINE)
    assert text.count("CANCELLED") == 1
    assert_left_as_it_was(tty)


@pytest.mark.parametrize("end", ["SIGTERM", "SIGHUP", "an exception", "the supervisor's death"])
def test_however_the_sweep_ends_the_terminal_is_left_as_it_was(start_app: StartApp, tty: Terminal, end: str) -> None:
    raising = "def handler(*_): raise RuntimeError('boo')\nsignal.signal(signal.SIGUSR2, handler)\n"
    app = start_app(raising + mapped(job="sleeping"), before=BEFORE, **tty.popen())
    running(app, 2)
    tty.until_drawn(lambda: bool(header(tty)))
    if end == "the supervisor's death":
        os.kill(app.relatives()["supervisor"], signal.SIGKILL)
    else:
        app.process.send_signal(signal.SIGUSR2 if end == "an exception" else getattr(signal, end))
    code = ended(app, tty)
    assert code == {"an exception": 1, "the supervisor's death": 0}.get(end) or code == -getattr(signal, end)
    assert_left_as_it_was(tty)


def test_it_is_drawn_anew_below_what_a_shell_has_written_meanwhile(start_app: StartApp, tty: Terminal) -> None:
    app = start_app(mapped(), before=BEFORE, **tty.popen())
    pids = running(app, 2)
    tty.until_drawn(lambda: tty.has("1/10"))
    os.kill(app.process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, app.process.pid, os.WSTOPPED | os.WNOWAIT)
    os.write(tty.slave, b"^Z\n[1]+  Stopped   app.py\n$ fg\napp.py\n")
    app.process.send_signal(signal.SIGCONT)
    tty.until_drawn(lambda: len(header(tty)) == 2)
    stopped = tty.lines.index("[1]+  Stopped   app.py")
    assert header(tty)[0] < stopped < header(tty)[1]
    assert tty.lines[stopped + 1 : stopped + 3] == ["$ fg", "app.py"]
    go_on(*pids)
    go_on(*running(app, 1))
    assert ended(app, tty) == 0
    assert "[1]+  Stopped   app.py" in tty.all_lines


def test_the_last_line_is_the_newest(start_app: StartApp, tty: Terminal) -> None:
    job = "def twice(x):\n    job(x)\n    print('\\nand now this', flush=True)\n    job(x)\n"
    app = start_app(job + mapped(jobs=1, job="twice"), before=BEFORE, **tty.popen())
    (pid,) = running(app, 1)
    tty.until_drawn(lambda: tty.has("0/10"))
    go_on(pid)
    running(app, 1)
    log = app.directory / "sweep/.gpu_pool/jobs/0/output.log"
    with log.open("a") as file:
        file.write("\nthe newest")
    tty.until_drawn(lambda: tty.has("the newest"))
    go_on(pid)
    assert ended(app, tty) == 0


def test_nothing_is_drawn_on_a_terminal_that_is_another_programs_for_now(start_app: StartApp, tty: Terminal) -> None:
    background = "if os.fork():\n    os._exit(os.waitstatus_to_exitcode(os.wait()[1]))\nos.setpgid(0, 0)\n"
    job = (
        "def counting(x):\n    report(x)\n    n = 0\n"
        "    while not signal.sigtimedwait([signal.SIGUSR1], 0.02):\n        print(n := n + 1, flush=True)\n"
        "    raise ValueError('boo')\n"
    )
    source = job + mapped(jobs=1, job="counting", more="output='tee'")
    app = start_app(source, before=background + BEFORE, **tty.popen())
    (pid,) = running(app, 1)
    tty.until(lambda: tty.has("[0] 50"))  # the table would have been drawn several times meanwhile
    go_on(pid)
    assert ended(app, tty) == 0
    assert "job 0 (x=0) FAILED" in "".join(tty.all_lines)
    assert b"\x1b" not in tty.raw


def test_what_the_terminals_encoding_lacks_is_replaced(start_app: StartApp, tty: Terminal) -> None:
    job = "def french(x):\n    os.write(1, 'caf\\xe9'.encode())\n    job(x)\n".replace("job(x)", "report(x); rest()")
    app = start_app(job + mapped(jobs=1, job="french"), before=BEFORE, **tty.popen(PYTHONIOENCODING="ascii"))
    running(app, 1)
    tty.until_drawn(lambda: tty.has("caf?"))
    app.process.terminate()
    assert ended(app, tty) == -signal.SIGTERM


TALKING = """
import logging, threading
logging.basicConfig(format="%(threadName)s %(message)s")
log = logging.getLogger("app")
go = threading.Event()
signal.signal(signal.SIGUSR2, lambda *_: go.set())

def talk():
    go.wait()
    print("half a line, ", end="", flush=True)
    for i in range(300):
        print(f"printed {i} " + "x" * 50)
        log.warning("logged %d %s", i, "y" * 50)
        sys.stderr.write(f"bar {i}\\r")
    print("the last")
    print("no end", end="")
"""


def test_what_threads_of_the_app_print_and_log_goes_above_it_whole(start_app: StartApp, tty: Terminal) -> None:
    source = "threading.Thread(target=talk).start()\n" + mapped(jobs=2)
    app = start_app(source, before=BEFORE + TALKING, **tty.popen())
    pids = running(app, 2)
    tty.until_drawn(lambda: bool(header(tty)))
    app.process.send_signal(signal.SIGUSR2)
    tty.until_drawn(lambda: tty.has("the last") and bool(header(tty)))
    (at,) = header(tty)
    assert tty.lines.index("the last") < at
    go_on(*pids)
    assert ended(app, tty) == 0
    lines = tty.all_lines
    assert any("no end" in line for line in lines)
    assert f"half a line, printed 0 {'x' * 50}" in lines
    for i in range(1, 300):
        assert f"printed {i} {'x' * 50}" in lines
        assert any(line.endswith(f"logged {i} {'y' * 50}") for line in lines)


HYDRA = """
import hydra, signal, sys, os
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])

@hydra.main(version_base="1.3", config_path=None)
def main(cfg):
    print("epoch 1", flush=True)
    report(cfg.x)
    signal.sigwait([signal.SIGUSR1])
    if cfg.x == 2:
        raise ValueError("boo")
main()
"""


def test_hydras_log_lines_go_above_it_too(start_app: StartApp, tty: Terminal) -> None:
    arguments = ["-m", "+x=1,2,3", "hydra/launcher=gpu_pool", "hydra.launcher.cpu_slots=2", "hydra.sweep.dir=sweep"]
    before = f"sys.argv += {arguments}\nsys.orig_argv += {arguments}"
    app = start_app(HYDRA.replace("'", '"'), before=before, **tty.popen())
    first, second = running(app, 2)
    go_on(second)
    (third,) = running(app, 1)
    tty.until_drawn(lambda: tty.has("1 failed") and tty.has("epoch 1"))
    (at,) = header(tty)
    above = "\n".join(tty.lines[:at])
    assert "[HYDRA] job 1 (+x=2) FAILED: ValueError: boo\n  see sweep/.gpu_pool/jobs/1/output.log" in above
    go_on(first, third)
    assert ended(app, tty) == 1
    assert not header(tty)


def test_between_two_launches_it_is_gone_and_comes_again(start_app: StartApp, tty: Terminal) -> None:
    between = "print('between', flush=True)\nreport()\nsignal.sigwait([signal.SIGUSR1])\n"
    app = start_app(f"{mapped(jobs=1)}\n{between}{mapped(jobs=1)}", before=BEFORE, **tty.popen())
    go_on(*running(app, 1))
    (main,) = running(app, 1)
    tty.until(lambda: tty.has("between") and tty.cursor[1] == 0)
    assert tty.lines[-1] == "between"
    assert not header(tty)
    go_on(main)
    (pid,) = running(app, 1)
    tty.until_drawn(lambda: bool(header(tty)) and tty.has(str(pid)))
    go_on(pid)
    assert ended(app, tty) == 0


@pytest.mark.parametrize("environ", [{"TERM": "dumb"}, {"TERM": ""}, {"CI": "true"}])
def test_a_terminal_that_can_do_less_gets_lines(start_app: StartApp, tty: Terminal, environ: dict[str, str]) -> None:
    app = start_app(mapped(jobs=1), before=BEFORE, **tty.popen(**environ))
    go_on(*running(app, 1))
    assert ended(app, tty) == 0
    assert b"\x1b" not in tty.raw
    assert any(line.startswith("job 0 (x=0) started") for line in tty.lines)


def test_no_color_means_none(start_app: StartApp, tty: Terminal) -> None:
    app = start_app(mapped(), before=BEFORE, **tty.popen(NO_COLOR="1"))
    pids = running(app, 2)
    go_on(pids[1])
    (third,) = running(app, 1)
    tty.until_drawn(lambda: tty.has("1 failed") and tty.has("2/10"))
    go_on(pids[0], third)
    assert ended(app, tty) == 0
    assert not re.search(rb"\x1b\[[0-9;]*m", tty.raw)


def test_it_waits_for_a_terminal_in_vain_and_says_so(start_app: StartApp) -> None:
    app = start_app(mapped(jobs=1, more="progress='live'"), before=BEFORE)
    go_on(*running(app, 1))
    _, err = app.process.communicate(timeout=LIMIT_S)
    assert err.count("progress=live: neither stdout nor stderr is a terminal") == 1
    assert "job 0 (x=0) started" in err


@pytest.mark.parametrize("height", [1, 2, 3, 5, 9, 12, 24])
@pytest.mark.parametrize("width", [10, 40, 80])
def test_a_picture_is_never_larger_than_the_terminal(tmp_path: Path, width: int, height: int) -> None:
    view = View()
    for n in range(30):
        view.take([{"event": "queued", "time": 0.0, "job": n, "overrides": [f"x={n}"]}])
        view.take([{"event": "start", "time": 1.0, "job": n, "attempt": 1, "pid": n, "slots": [f"{n}.0"]}])
        if n % 2:
            why = {"cause": "error", "error_type": "E", "error_text": "no", "value": None}
            view.take([{"event": "end", "time": 2.0, "job": n, "attempt": 1, "status": "FAILED", **why}])
    picture = Live(None, SweepFiles(str(tmp_path)), "sweep", view).picture(3.0, width, height)  # type: ignore[arg-type]
    assert len(picture) <= height
    assert all(len(re.sub(r"\x1b\[\d+m", "", line)) <= width for line in picture)
    assert height < 12 or width < 40 or picture[-1].endswith(" more")


def test_however_many_have_failed_there_is_room_above(tmp_path: Path) -> None:
    view = View()
    for n in range(30):
        view.take([{"event": "queued", "time": 0.0, "job": n, "overrides": [f"x={n}"]}])
        view.take([{"event": "start", "time": 1.0, "job": n, "attempt": 1, "pid": n, "slots": [f"{n}.0"]}])
        if n >= 2:
            why = {"cause": "error", "error_type": "E", "error_text": "no", "value": None}
            view.take([{"event": "end", "time": 2.0, "job": n, "attempt": 1, "status": "FAILED", **why}])
    picture = Live(None, SweepFiles(str(tmp_path)), "sweep", view).picture(3.0, 80, 49)  # type: ignore[arg-type]
    assert len(picture) <= 12
    assert picture[-1] == "  and 23 failed more"


def test_what_has_not_changed_is_not_sent_again(tty: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "tcgetpgrp", lambda _: os.getpgrp())
    with os.fdopen(os.dup(tty.slave), "w") as stream:
        streams = Streams()
        screen = Screen(stream, streams)
        for _ in range(3):
            screen.draw(["a table"])
        tty.until(lambda: tty.has("a table"))
        screen.draw(["another"])
        tty.until(lambda: tty.has("another"))
        tty.until_quiet()
        assert tty.raw.count(b"a table") == 1
        screen.release()
        streams.release()
        tty.until(lambda: not tty.has("another"))


def test_what_is_too_much_to_wait_for_a_stopped_terminal_is_left_out(
    tty: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "tcgetpgrp", lambda _: os.getpgrp())
    monkeypatch.setattr(_screen, "MOST", 1000)
    with os.fdopen(os.dup(tty.slave), "w") as stream:
        streams = Streams()
        screen = Screen(stream, streams)
        termios.tcflow(tty.slave, termios.TCOOFF)
        screen.draw(["a table"])
        for i in range(30):
            screen.above(f"line {i} " + "y" * 60)
        termios.tcflow(tty.slave, termios.TCOON)
        streams.wait(None)
        screen.draw(["a table"])
        tty.until(lambda: tty.has("bytes are left out here"))
        tty.until_drawn(lambda: tty.has("a table"))
        screen.release()
        streams.release()
        assert tty.has("line 10 y")
        assert not tty.has("line 20 y")


def test_of_two_launches_at_once_one_has_a_table_and_the_other_tells_its_lines_above_it(
    start_app: StartApp, tty: Terminal
) -> None:
    source = (
        "def run(d):\n    GpuPool(cpu_slots=1, gpus=[], dir=d).map(job, [dict(x=0)])\n"
        "threads = [threading.Thread(target=run, args=[d]) for d in ('one', 'two')]\n"
        "for thread in threads: thread.start()\n"
        "signal.sigwait([signal.SIGUSR1])\nprint('said by main')\nfor thread in threads: thread.join()\n"
    )
    app = start_app(source, before=BEFORE, **tty.popen())
    pids = running(app, 2)
    tty.until_drawn(lambda: tty.has("1 running") and tty.has("started in slot"))
    go_on(app.process.pid)
    tty.until_drawn(lambda: tty.has("said by main"))
    (at,) = header(tty)
    assert tty.lines.index("said by main") < at
    assert sum("started in slot" in line for line in tty.lines[:at]) == 1
    go_on(*pids)
    assert ended(app, tty) == 0
    assert sum("1 COMPLETED" in line for line in tty.all_lines) == 2
    assert not any("Traceback" in line for line in tty.all_lines)
    assert_left_as_it_was(tty)


class Signalled(Shown):
    """Is sent a signal in the middle of its work."""

    def tick(self) -> float | None:
        signal.raise_signal(signal.SIGUSR1)
        raise ValueError("a fault of the display")


def test_what_a_signal_handler_of_the_app_raises_is_not_taken_for_a_fault_of_the_display(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def handler(*_: object) -> None:
        raise RuntimeError("meant for the app")

    display = Guarded(Signalled(None, None, None))
    monkeypatch.setattr("traceback.print_exc", lambda: None)
    for old in (handler, signal.SIG_IGN):
        before = signal.signal(signal.SIGUSR1, old)
        try:
            if old is handler:
                with pytest.raises(RuntimeError, match="meant for the app"):
                    display.tick()
            else:
                assert display.tick() is None
        finally:
            signal.signal(signal.SIGUSR1, before)
    assert not isinstance(display.display, Signalled)
