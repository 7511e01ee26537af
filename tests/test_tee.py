"""``output: tee``: what jobs print is seen with their numbers, whole lines, and before their ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
from running import StartApp
from support import LIMIT_S, RunApp
from terminal import terminal

from hydra_plugins.hydra_gpu_pool_launcher import _tee
from hydra_plugins.hydra_gpu_pool_launcher._files import SweepFiles
from hydra_plugins.hydra_gpu_pool_launcher._model import Job
from hydra_plugins.hydra_gpu_pool_launcher._tee import Tee

APP = """
import os, signal, sys
from hydra_plugins.hydra_gpu_pool_launcher import GpuPool

os.dup2(1, 2)

def job(x):
{body}

GpuPool(cpu_slots={slots}, gpus=[], dir="sweep", output="tee", {more}).map(job, [dict(x=x) for x in range({jobs})])
"""


def teed(run_app: RunApp, body: str, *, jobs: int = 1, slots: int = 2, more: str = "") -> list[str]:
    """All lines of a sweep whose jobs run this."""
    source = APP.format(body="\n".join(f"    {line}" for line in body.splitlines()), jobs=jobs, slots=slots, more=more)
    done = run_app(source)
    assert done.returncode == 0, done.stdout
    assert done.stderr == ""
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", done.stdout)
    return done.stdout.splitlines()


def of_job(lines: list[str], num: int) -> list[str]:
    return [line.removeprefix(f"[{num}]").removeprefix(" ") for line in lines if line.startswith(f"[{num}]")]


def test_each_line_has_its_jobs_number_and_stands_before_the_jobs_end(run_app: RunApp) -> None:
    lines = teed(run_app, "for i in range(50): print(f'line {i} of {x}')\nos.system('echo a child')", jobs=4)
    for num in range(4):
        assert of_job(lines, num) == ["a child", *(f"line {i} of {num}" for i in range(50))] or of_job(lines, num) == [
            *(f"line {i} of {num}" for i in range(50)),
            "a child",
        ]
        end = next(i for i, line in enumerate(lines) if line.startswith(f"job {num} (x={num}) COMPLETED"))
        start = next(i for i, line in enumerate(lines) if line.startswith(f"job {num} (x={num}) started"))
        mine = [i for i, line in enumerate(lines) if line.startswith(f"[{num}]")]
        assert start < mine[0]
        assert mine[-1] < end


def test_a_line_is_what_a_terminal_shows_of_it_and_the_last_needs_no_end(run_app: RunApp) -> None:
    body = (
        "sys.stdout.write('10%\\r 20%\\r 30%\\n\\n\\x1b[31mred\\x1b[0m\\x1b[2J\\x07\\ttab\\n')\n"
        "sys.stdout.buffer.write(b'\\xff\\xe2\\x80')\nsys.stdout.flush()\n"
        "sys.stdout.write('\\nhalf a line')"
    )
    assert of_job(teed(run_app, body), 0) == ["30%".rjust(4), "", "red    tab", "\ufffd\ufffd", "half a line"]


def test_a_line_is_shown_when_it_is_whole_while_the_job_goes_on(start_app: StartApp) -> None:
    source = (
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])\n"
        "def job(x):\n"
        "    sys.stdout.write('one\\nhalf'); sys.stdout.flush(); report()\n"
        "    signal.sigwait([signal.SIGUSR1])\n"
        "    print(' and half')\n"
        "GpuPool(cpu_slots=1, gpus=[], dir='sweep', output='tee').map(job, [dict(x=0)])"
    )
    app = start_app(source, stderr=subprocess.DEVNULL)
    (pid,) = app.wait_for_jobs(1)
    assert app.process.stdout is not None
    assert app.process.stdout.readline() == "[0] one\n"
    os.kill(pid, signal.SIGUSR1)
    assert app.process.communicate(timeout=LIMIT_S)[0] == "[0] half and half\n"


def test_each_try_is_shown_before_the_line_that_tells_of_its_end(run_app: RunApp) -> None:
    body = "n = len(os.listdir('sweep/.gpu_pool/jobs/0'))\nprint('try', n, flush=True)\nif n < 3: os._exit(3)"
    lines = teed(run_app, body, more="max_retries=2")
    assert of_job(lines, 0) == ["try 1", "try 2", "try 3"]
    for num in (1, 2):
        ended = next(i for i, line in enumerate(lines) if line.startswith(f"job 0 (x=0) FAILED, try {num}, "))
        assert lines.index(f"[0] try {num}") < ended


def test_a_try_that_printed_nothing_leaves_its_log_to_the_next(run_app: RunApp) -> None:
    body = "if not os.path.exists('tried'): open('tried', 'w').close(); os._exit(3)\nprint('the second')"
    assert of_job(teed(run_app, body, more="max_retries=1"), 0) == ["the second"]


def test_of_a_flood_the_newest_is_shown_and_how_much_is_left_out(run_app: RunApp) -> None:
    lines = teed(run_app, "sys.stdout.write(('x' * 98 + '\\n') * 200_000 + 'the last\\n')")
    mine = of_job(lines, 0)
    assert mine[-1] == "the last"
    left_out = sum(
        int(m[1].replace(",", "")) for line in mine if (m := re.match(r"… ([\d,]+) bytes are left out", line))
    )
    assert left_out + sum(len(line) + 1 for line in mine if not line.startswith("…")) == 200_000 * 99 + 9
    assert len(mine) < 100_000
    assert all(line in {"x" * 98, "the last"} or line.startswith("…") for line in mine)


def test_with_progress_none_the_jobs_alone_are_heard(run_app: RunApp) -> None:
    assert teed(run_app, "print('hello')", more="progress='none'") == ["[0] hello"]


def test_what_stdouts_encoding_lacks_is_replaced(run_app: RunApp) -> None:
    source = APP.format(body="    os.write(1, 'caf\\xe9'.encode())", jobs=1, slots=1, more="progress='none'")
    assert run_app(source, env={"PYTHONIOENCODING": "ascii"}).stdout == "[0] caf?\n"


@pytest.mark.parametrize(
    ("encoding", "seen"),
    [("None", "café"), ("'no such'", "café"), ("3", "café"), ("'rot13'", "café"), ("'ascii'", "caf?")],
)
def test_a_stream_of_the_app_that_names_no_encoding_gets_all_the_same(
    run_app: RunApp, encoding: str, seen: str
) -> None:
    before = (
        "import sys\nclass Own:\n"
        f"    encoding = {encoding}\n"
        "    def write(self, text): sys.__stdout__.write(text)\n    def flush(self): sys.__stdout__.flush()\n"
        "sys.stdout = Own()\n"
    )
    source = before + APP.format(body="    os.write(1, 'caf\\xe9'.encode())", jobs=1, slots=1, more="progress='none'")
    done = run_app(source, env={"PYTHONIOENCODING": "utf-8"})
    assert done.stdout == f"[0] {seen}\n"


def test_a_log_that_is_something_else_holds_nobody_up(run_app: RunApp) -> None:
    body = "path = 'sweep/.gpu_pool/jobs/0/output.log'\nos.unlink(path)\nos.mkfifo(path)\nprint('unseen, or not')"
    assert any("job 0 (x=0) COMPLETED" in line for line in teed(run_app, body))


def test_a_closed_pipe_ends_the_display_and_not_the_sweep(start_app: StartApp) -> None:
    source = (
        "def job(x):\n    report()\n    print('hello')\n    return x\n"
        "print([o.value for o in GpuPool(cpu_slots=1, gpus=[], dir='sweep', output='tee')"
        ".map(job, [dict(x=x) for x in range(3)])], file=sys.__stderr__)"
    )
    app = start_app(source)
    assert app.process.stdout is not None
    app.process.stdout.close()
    app.wait_for_jobs(3)
    assert app.process.stderr is not None
    assert "[0, 1, 2]" in app.process.stderr.read()
    app.process.wait(LIMIT_S)
    app.process.stdout = None


def test_it_goes_by_above_the_table(start_app: StartApp) -> None:
    with terminal() as tty:
        source = (
            "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])\n"
            "def job(x):\n"
            "    print('\\n'.join(f'line {i}' for i in range(40)), flush=True); report()\n"
            "    signal.sigwait([signal.SIGUSR1])\n"
            "GpuPool(cpu_slots=1, gpus=[], dir='sweep', output='tee').map(job, [dict(x=0)])"
        )
        app = start_app(source, **tty.popen())
        (pid,) = app.wait_for_jobs(1)
        tty.until_drawn(lambda: tty.has("[0] line 39") and tty.has("cpu.0"))
        assert [line for line in tty.all_lines if line.startswith("[0]")] == [f"[0] line {i}" for i in range(40)]
        assert tty.lines.index("[0] line 39") < next(i for i, line in enumerate(tty.lines) if "cpu.0" in line)
        os.kill(pid, signal.SIGUSR1)
        tty.until(lambda: tty.has("1 COMPLETED"))
        assert app.process.wait(LIMIT_S) == 0


# --- the logs of several tries, as main finds them when it was held up ---


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(_tee, "_print", lambda num, new: lines.extend(f"[{num}] {line}" for line in new))
    return lines


def logs(tmp_path: Path) -> tuple[SweepFiles, Path]:
    files = SweepFiles(str(tmp_path))
    directory = Path(files.job_dir(0))
    directory.mkdir(parents=True)
    return files, directory


def test_tries_that_ended_unseen_are_shown_in_their_order(tmp_path: Path, printed: list[str]) -> None:
    files, directory = logs(tmp_path)
    (directory / "output.1.log").write_text("of an earlier sweep\n")
    (directory / "rank_0.log").write_text("no log of the job\n")
    tee = Tee([Job(0, ())], files)
    for name, text in (("output.2", "first"), ("output.10", "second"), ("output", "third")):
        (directory / f"{name}.log").write_text(f"{text}\n")
    tee.started(0)
    tee.ended(0)
    assert printed == ["[0] first", "[0] second", "[0] third"]


def test_a_log_that_is_renamed_is_read_to_its_end(tmp_path: Path, printed: list[str]) -> None:
    files, directory = logs(tmp_path)
    tee = Tee([Job(0, ())], files)
    log = directory / "output.log"
    with log.open("w") as file:
        tee.started(0)
        print("before", file=file, flush=True)
        tee.poll()
        log.rename(directory / "output.1.log")
        print("after", file=file, flush=True)
        log.write_text("the next try\n")
        tee.ended(0)
    assert printed == ["[0] before", "[0] after", "[0] the next try"]
    tee.close()
    assert len(printed) == 3


def test_a_log_that_somebody_has_cut_off_begins_anew(tmp_path: Path, printed: list[str]) -> None:
    files, directory = logs(tmp_path)
    tee = Tee([Job(0, ())], files)
    log = directory / "output.log"
    log.write_text("a long line that was there\nhalf")
    tee.started(0)
    tee.poll()
    log.write_text("new\n")
    tee.poll()
    tee.close()
    assert printed == ["[0] a long line that was there", "[0] new"]


def test_a_progress_bar_that_ends_no_line_does_not_grow_in_memory(tmp_path: Path, printed: list[str]) -> None:
    files, directory = logs(tmp_path)
    tee = Tee([Job(0, ())], files)
    log = directory / "output.log"
    tee_log = log.open("w")
    tee.started(0)
    for i in range(20):
        tee_log.write("".join(f"\r{i}.{j}%" for j in range(10_000)))
        tee_log.flush()
        tee.poll()
    assert len(tee._logs[0][0].begun) <= 1 << 16
    tee_log.close()
    tee.ended(0)
    assert printed == ["[0] 19.9999%"]
