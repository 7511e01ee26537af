"""The command ``gpu-pool``: on journals that are written by hand, on real sweeps, and on a terminal."""

from __future__ import annotations

import contextlib
import fcntl
import html
import io
import json
import os
import pickle
import pty
import re
import shlex
import signal
import stat
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyte
import pytest
from running import App, StartApp
from support import LIMIT_S, sleeper
from test_view import end, launch, queued, seen, start, stop

from hydra_plugins.hydra_gpu_pool_launcher import (
    _cancel,
    _cli,
    _descriptors,
    _gpus,
    _logs,
    _machine,
    _pidfd,
    _status,
)
from hydra_plugins.hydra_gpu_pool_launcher._again import resume_command
from hydra_plugins.hydra_gpu_pool_launcher._cards import Gpu
from hydra_plugins.hydra_gpu_pool_launcher._errors import ConfigurationError
from hydra_plugins.hydra_gpu_pool_launcher._events import CANCELLED_BY_HAND
from hydra_plugins.hydra_gpu_pool_launcher._files import SweepFiles
from hydra_plugins.hydra_gpu_pool_launcher._lease_files import Holder
from hydra_plugins.hydra_gpu_pool_launcher._outside import Standing, WatchedSweep, find, standing
from hydra_plugins.hydra_gpu_pool_launcher._seen import Launch
from hydra_plugins.hydra_gpu_pool_launcher._table import Line

ROOT = Path(__file__).parent.parent
COMMAND = [sys.executable, "-m", "hydra_plugins.hydra_gpu_pool_launcher"]
DONE = {"event": "done", "time": 30.0}
FAILED = {"status": "FAILED", "error_type": "ValueError", "error_text": "no such\nfile"}


def launched(pid: int | None = None, **facts: Any) -> dict[str, Any]:
    """A launch by a supervisor of this machine: this process, or another one that lives."""
    pid = os.getpid() if pid is None else pid
    here = {"host": os.uname().nodename, "boot": _pidfd.boot_id(), "started": _pidfd.start_time(pid)}
    return launch(supervisor=pid, **{**here, **facts})


def write(directory: Path, *events: dict[str, Any]) -> SweepFiles:
    """The events, appended to the journal of a sweep in this directory."""
    files = SweepFiles(str(directory))
    os.makedirs(files.root, exist_ok=True)
    with open(files.journal, "a") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)
    return files


@contextlib.contextmanager
def watched(files: SweepFiles) -> Iterator[WatchedSweep]:
    with contextlib.closing(WatchedSweep(files)) as sweep:
        yield sweep


def standing_of(files: SweepFiles) -> Standing:
    with watched(files) as sweep:
        return sweep.standing


def printed(files: SweepFiles, num: int, content: bytes) -> Path:
    path = Path(files.output(num))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(content)
    return path


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """The command, in this process, in a directory: its exit code and what it said, on stdout and on stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")

    def in_this_process(*arguments: str) -> tuple[int, str, str]:
        try:
            code = _cli.run(arguments)
        except SystemExit as exit_:  # argparse's
            code = int(str(exit_.code))
        return code, *capsys.readouterr()

    return in_this_process


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts the command as a process of its own; it is ended with the test."""
    started: list[subprocess.Popen[bytes]] = []

    def begin(*arguments: str, **popen: Any) -> subprocess.Popen[bytes]:
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        started.append(subprocess.Popen([*COMMAND, *arguments], **{"cwd": tmp_path, "env": env, **streams, **popen}))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate(timeout=LIMIT_S)


def said(process: subprocess.Popen[bytes]) -> tuple[int, bytes, bytes]:
    out, err = process.communicate(timeout=LIMIT_S)
    return process.returncode, out, err


# --- whether it runs ---


@pytest.mark.parametrize(
    ("events", "alive", "expected"),
    [
        ([launch()], True, Standing.RUNNING),
        ([launch(), DONE], True, Standing.IDLE),
        ([launch(), DONE], False, Standing.FINISHED),
        ([launch()], False, Standing.KILLED),
        ([launch(boot="an earlier life")], True, Standing.KILLED),
        ([launch(boot="an earlier life"), DONE], True, Standing.FINISHED),
        ([launch(host="another")], True, Standing.UNKNOWN),
        ([launch(host="another"), DONE], True, Standing.FINISHED),
        ([queued(0)], False, Standing.UNKNOWN),
        ([queued(0), DONE], False, Standing.FINISHED),
        ([launch(), DONE, launch()], True, Standing.RUNNING),
    ],
)
def test_whether_a_sweep_runs_is_told_by_its_last_launch_and_only_where_that_was_here(
    events: list[dict[str, Any]], alive: bool, expected: Standing
) -> None:
    assert standing(seen(*events), "box", "b", alive) is expected


def test_a_process_that_has_the_supervisors_pid_by_now_is_not_the_supervisor(tmp_path: Path) -> None:
    files = write(tmp_path, launched(started=1), queued(0))
    assert standing_of(files) is Standing.KILLED


def test_a_supervisor_that_nobody_has_reaped_yet_is_gone(tmp_path: Path) -> None:
    with sleeper() as child:
        files = write(tmp_path, launched(child.pid), queued(0))
        with watched(files) as sweep:
            before = sweep.standing
            child.kill()
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
            sweep.look()
            after = sweep.standing
        assert (before, after, standing_of(files)) == (Standing.RUNNING, Standing.KILLED, Standing.KILLED)


def test_the_end_of_a_sweep_between_two_looks_is_no_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor writes that all is done, and goes, after the journal was read and before it is looked for."""
    files = write(tmp_path, launched(), queued(0), start(0, 1.0, "cpu.0"))

    def meanwhile(_: int, __: int) -> None:
        write(tmp_path, end(0, 2.0), DONE)

    monkeypatch.setattr(_pidfd, "find", meanwhile)
    assert standing_of(files) is Standing.FINISHED


def test_a_new_sweep_in_the_same_directory_is_seen_from_its_beginning(tmp_path: Path) -> None:
    with watched(write(tmp_path, launched(), queued(0), queued(1), DONE)) as sweep:
        os.rename(tmp_path / ".gpu_pool", tmp_path / ".gpu_pool.1")
        sweep.look()
        assert len(sweep.view.jobs) == 2
        write(tmp_path, launched(), queued(0))
        sweep.look()
        assert (len(sweep.view.jobs), sweep.standing) == (1, Standing.RUNNING)


@pytest.mark.parametrize(
    "directory", ["sweep", "sweep/", "./sweep/.gpu_pool", "{here}/sweep", "{here}/sweep/.gpu_pool/"]
)
def test_a_sweep_is_found_by_its_directory_however_that_is_said(
    directory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert find(directory.format(here=tmp_path)) == SweepFiles(str(tmp_path / "sweep"))
    assert find("sweep/.gpu_pool.2").journal == f"{tmp_path}/sweep/.gpu_pool.2/journal.jsonl"


# --- status ---


def at_work(directory: Path) -> SweepFiles:
    """Job 0 has a value, 1 has failed, 2 runs and prints, 3 waits."""
    jobs = [queued(num, f"lr={num}", "seed=7") for num in range(4)]
    ends = [end(0, 10.0, value={"loss": 0.25, "acc": 1}), end(1, 20.0, **FAILED)]
    files = write(directory, launched(main=41), *jobs, start(0, 1.0, "0.0"), start(1, 2.0, "1.0"), *ends)
    write(directory, start(2, time.time() - 72, "0.0"))
    printed(files, 2, b"loading\n\x1b[32m10%\x1b[0m\r\x1b[32m75%\x1b[0m")
    return files


def test_status_shows_what_runs_with_its_last_line_what_failed_and_why_and_what_else_has_ended(
    run: Run, tmp_path: Path
) -> None:
    at_work(tmp_path)
    code, out, err = run("status", ".")
    assert (code, err) == (0, "")
    table = [line.split() for line in out.splitlines()]
    assert out.splitlines()[0].startswith(".    1 done  1 running  1 failed  1 queued")
    assert out.splitlines()[1].startswith(f"running: process 41 on {os.uname().nodename}; last event ")
    assert table[3:] == [
        ["#", "gpu", "pid", "for", "lr", "last", "line"],
        ["2", "0.0", "102", "1:12", "2", "75%"],
        ["1", "1.0", "101", "0:18", "1", "FAILED:", "ValueError:", "no", "such", "file"],
        [],
        ["#", "gpu", "took", "lr", "status", "value"],
        ["0", "0.0", "0:09", "0", "COMPLETED", "loss", "0.25", "acc", "1"],
    ]


def test_status_says_what_the_queued_jobs_wait_for_until_one_of_them_has_it(run: Run, tmp_path: Path) -> None:
    at_work(tmp_path)
    write(tmp_path, {"event": "waiting", "time": 30.0, "device": "1", "why": "a job waits for a slot on GPU 1"})
    assert run("status", ".")[1].splitlines()[2] == "a job waits for a slot on GPU 1"
    assert json.loads(run("status", ".", "--json")[1])["waiting"] == ["a job waits for a slot on GPU 1"]
    write(tmp_path, queued(4), start(4, 31.0, "0.1"))
    assert "waits" in run("status", ".")[1]
    write(tmp_path, queued(5), start(3, 32.0, "1.0"))
    assert "waits" not in run("status", ".")[1]


def test_what_jobs_hold_of_their_gpus_is_shown_where_it_is_known(run: Run, tmp_path: Path) -> None:
    at_work(tmp_path)
    write(tmp_path, {"event": "memory", "time": 30.0, "job": 2, "gpu_mb": 12_345.6}, start(3, 31.0, "1.0"))
    write(tmp_path, end(3, 41.0, gpu_mb=900.0))
    code, out, _ = run("status", ".")
    assert code == 0
    table = [line.split()[:5] for line in out.splitlines()[3:]]
    assert table[0] == ["#", "gpu", "pid", "for", "gpu"]
    assert table[1] == ["2", "0.0", "102", "1:12", "12.3"]
    assert table[-3:] == [
        ["#", "gpu", "took", "gpu", "GB"],
        ["0", "0.0", "0:09", "0", "COMPLETED"],
        ["3", "1.0", "0:10", "0.9", "3"],
    ]
    held = {job["job"]: job["gpu_mb"] for job in json.loads(run("status", "--json", ".")[1])["jobs"]}
    assert held == {0: None, 1: None, 2: 12_345.6, 3: 900.0}


def test_of_a_sweep_that_was_stopped_it_says_why(run: Run, tmp_path: Path) -> None:
    write(tmp_path, launched(started=1), queued(0), end(0, 1.0, attempt=0), {**DONE, "stopped": "Ctrl-C\x1b[2J"})
    line = run("status", ".")[1].splitlines()[1]
    assert line.startswith("stopped ")
    assert line.endswith(": Ctrl-C")
    assert json.loads(run("status", "--json", ".")[1])["stopped"] == "Ctrl-C\x1b[2J"


def test_the_jobs_of_a_sweep_that_is_over_are_shown_by_their_numbers(run: Run, tmp_path: Path) -> None:
    jobs = [queued(num, f"lr={num}") for num in range(3)]
    kept = end(1, 1.0, attempt=0, cause="resumed", value=0.5, seconds=9.0)
    by_hand = {"status": "CANCELLED", "error_type": "JobCancelledError", "error_text": "was cancelled: by hand"}
    write(tmp_path, launched(started=1), *jobs, kept, start(0, 1.0, "0.0"), start(2, 1.0, "1.0"))
    write(tmp_path, end(2, 2.0, **by_hand), end(0, 4.0, **FAILED), DONE)
    code, out, _ = run("status", ".")
    assert (code, out.splitlines()[1].split()[0]) == (0, "finished")
    assert [line.split()[:5] for line in out.splitlines()[4:]] == [
        ["0", "0.0", "0:03", "0", "FAILED"],
        ["1", "0:09", "1", "COMPLETED", "0.5"],
        ["2", "1.0", "0:01", "2", "CANCELLED"],
    ]


def test_a_job_that_a_resume_has_taken_over_is_shown_where_it_ran(run: Run, tmp_path: Path) -> None:
    write(
        tmp_path, launched(started=1), queued(0, "x=1"), start(0, 1.0, "1.0"), end(0, 4.0, value=7, seconds=3.0), DONE
    )
    kept = end(0, 50.0, attempt=0, cause="resumed", value=7, seconds=3.0)
    write(tmp_path, launched(started=1, main=9, time=50.0), queued(0, "x=1"), kept, {**DONE, "time": 50.0})
    assert run("status", ".")[1].splitlines()[-1].split()[:3] == ["0", "1.0", "0:03"]
    (job,) = json.loads(run("status", ".", "--json")[1])["jobs"]
    assert [job[name] for name in ("cause", "tries", "slots", "started", "ended", "seconds")] == [
        *("resumed", 1, ["1.0"], 1.0, 4.0, 3.0)
    ]
    run("report", ".")
    header, row = ([*line.split(",")] for line in (tmp_path / "results.csv").read_text().splitlines())
    assert {"gpu": "1", "slot": "0", "tries": "1"}.items() <= dict(zip(header, row, strict=True)).items()


def test_a_figure_and_the_words_for_an_end_are_the_same_wherever_they_are_told(run: Run, tmp_path: Path) -> None:
    why = f"was cancelled: {CANCELLED_BY_HAND}"
    by_hand: dict[str, Any] = {"error_type": "JobCancelledError", "error_text": why, "seconds": 2.95}
    write(tmp_path, launched(started=1), queued(0), start(0, 1.0, "0.0"), end(0, 4.0, "CANCELLED", **by_hand), DONE)
    run("report", ".")
    header, row = ([*line.split(",")] for line in (tmp_path / "results.csv").read_text().splitlines())
    written = dict(zip(header, row, strict=True))
    (job,) = json.loads(run("status", ".", "--json")[1])["jobs"]
    assert (job["seconds"], written["seconds"]) == (2.95, "2.95")
    assert job["error_text"] == written["error"] == CANCELLED_BY_HAND
    assert run("status", ".")[1].splitlines()[-1].endswith(f"CANCELLED  {CANCELLED_BY_HAND}")
    assert f"<td>{CANCELLED_BY_HAND}<" in (tmp_path / "sweep.html").read_text()


def test_of_a_sweep_that_was_killed_what_had_ended_by_itself_counts_and_the_rest_is_lost(
    run: Run, tmp_path: Path
) -> None:
    command = ["python", "train.py", "-m", "lr=1,2", "hydra/launcher=gpu_pool", "hydra.sweep.dir=old"]
    files = write(tmp_path, launched(started=1, command=command, cwd="/app dir"))
    write(tmp_path, *[queued(num, f"lr={num}") for num in range(3)], *[start(num, 5.0, "0.0") for num in range(3)])
    outcome = {
        "status": "COMPLETED",
        "error_type": None,
        "error_text": None,
        "value": 3,
        "sha256": "",
        "traceback": None,
    }
    for num, overrides in ((0, ["lr=0"]), (1, ["another job's"])):
        Path(files.job_dir(num)).mkdir(parents=True)
        told = {**outcome, "out_of_memory": False, "overrides": overrides}
        Path(files.outcome(num)).write_text(json.dumps(told))
    code, out, _ = run("status", ".")
    assert code == 0
    assert "1 done  0 running  2 failed" in out
    assert "killed: its supervisor" in out
    assert out.count("was lost: the sweep was killed") == 2
    again = f"python train.py -m lr=1,2 hydra/launcher=gpu_pool hydra.launcher.resume=true hydra.sweep.dir={tmp_path}"
    assert out.splitlines()[-1] == f"cd '/app dir' && {again}"
    jobs = json.loads(run("status", ".", "--json")[1])["jobs"]
    assert [(job["state"], job["cause"], job["value"]) for job in jobs] == [
        ("COMPLETED", "returned", 3),
        ("FAILED", "lost", None),
        ("FAILED", "lost", None),
    ]


def over(directory: Path) -> SweepFiles:
    """Job 0 has completed, 1 has failed, 2 was cancelled."""
    command = ["python", "train.py", "-m", "lr=range(0,3)"]
    jobs = [queued(num, f"lr={num}") for num in range(3)]
    starts = [start(num, 1.0, "0.0") for num in range(3)]
    files = write(directory, launched(started=1, command=command, given=command[3:], cwd="/app"), *jobs, *starts)
    write(directory, end(0, 2.0, value=0.5), end(1, 3.0, **FAILED), end(2, 4.0, "CANCELLED"), DONE)
    log = 'Traceback (most recent call last):\n  File "/a/data.py", line 7, in _decode\nValueError: no such\nfile\n'
    printed(files, 1, log.encode())
    return files


def test_of_a_sweep_that_has_finished_it_says_where_each_job_failed_and_how_to_go_on(run: Run, tmp_path: Path) -> None:
    over(tmp_path)
    again = f"cd /app && python train.py -m 'lr=range(0,3)' hydra.launcher.resume=true hydra.sweep.dir={tmp_path}"
    _, out, _ = run("status", ".")
    assert out.splitlines()[5].endswith("FAILED     ValueError: no such file (data.py:7 in _decode)")
    assert out.splitlines()[-2:] == ["What completed is kept. To go on with the rest:", again]
    assert json.loads(run("status", ".", "--json")[1])["resume"] == again
    run("report", ".")
    page = html.unescape((tmp_path / "sweep.html").read_text())
    assert "<pre>python train.py -m 'lr=range(0,3)'</pre>" in page
    assert f"<pre>{again}</pre>" in page


def test_where_all_has_completed_or_the_sweep_still_runs_there_is_nothing_to_go_on_with(
    run: Run, tmp_path: Path
) -> None:
    given: dict[str, Any] = {"command": ["python", "train.py", "-m", "x=1"], "given": ["x=1"]}
    write(tmp_path / "done", launched(started=1, **given), queued(0), start(0, 1.0, "0.0"), end(0, 2.0), DONE)
    write(tmp_path / "runs", launched(**given), queued(0), start(0, 1.0, "0.0"), end(0, 2.0, **FAILED), queued(1))
    for directory in ("done", "runs"):
        assert "resume=true" not in run("status", directory)[1]
        assert json.loads(run("status", directory, "--json")[1])["resume"] is None
        run("report", directory)
        assert "resume=true" not in (tmp_path / directory / "sweep.html").read_text()


@pytest.mark.parametrize("height", [8, 12, 200])
def test_once_it_is_over_a_terminal_has_one_table_by_number_and_what_did_not_complete_is_in_it(height: int) -> None:
    view = seen(launch(), *[queued(num, f"x={num}") for num in range(20)])
    for num in range(20):
        view.take([start(num, num, "0.0"), end(num, num + 1.0, **(FAILED if num in (3, 14) else {}))])
    view.take([DONE])
    lines = _status.report(SweepFiles("/s"), view, Standing.FINISHED, 60.0, lambda _: "", 80, height).lines()
    rows = [line.text.split() for line in lines[lines.index(Line("")) + 1 :]]
    assert rows[0][:3] == ["#", "gpu", "took"]
    shown = [int(row[0]) for row in rows[1:] if row[0].isdigit()]
    assert len(lines) <= height
    assert shown == sorted(shown)
    assert {3, 14} <= set(shown)
    assert (len(shown) == 20) is (height == 200)
    assert (" ".join(rows[-1][:4]) == f"and {20 - len(shown)} completed more;") is (height < 200)


def as_launched(*command: str, cwd: str = "/") -> Launch:
    found = seen(launch(command=command, cwd=cwd)).launch
    assert found is not None
    return found


def test_the_command_that_resumes_is_mains_own_and_only_where_hydra_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    odd = SweepFiles("/a b/it's (1)")
    at_home = as_launched("python", "app.py", "hydra.mode=MULTIRUN", cwd=str(tmp_path))
    again = resume_command(at_home, odd, str(tmp_path))
    assert again is not None
    assert shlex.split(again) == [
        *("python", "app.py", "hydra.mode=MULTIRUN", "hydra.launcher.resume=true", r"hydra.sweep.dir='/a b/it\'s (1)'")
    ]
    plain = as_launched("python", "app.py")
    assert resume_command(plain, SweepFiles(str(tmp_path))) is None
    (tmp_path / "multirun.yaml").touch()
    assert resume_command(plain, SweepFiles(str(tmp_path))) is not None


@pytest.mark.parametrize(
    ("command", "given", "known"),
    [
        (["python", "app.py", "-m", "x=1"], ["x=1"], True),  # whose config chooses the launcher
        (["python", "app.py", "-m", "hydra/sweeper=optuna"], None, False),  # that draws other points the next time
        (["python", "map.py", "hydra.x=1"], None, False),
        (["python", "app.py", "-m", "x='a\tb'"], ["x='a\tb'"], False),  # a terminal would not show the same
        (["python", "app.py", "-m", "x='a  b'"], ["x='a  b'"], True),
    ],
)
def test_the_journal_says_whether_a_command_goes_on_with_the_sweep(
    command: list[str], given: list[str] | None, known: bool
) -> None:
    found = seen(launch(command=command, given=given, cwd=os.getcwd())).launch
    assert found is not None
    again = resume_command(found, SweepFiles("/sweep"), os.getcwd())
    assert resume_command(found, SweepFiles("/sweep", ".gpu_pool.1")) is None  # it would go on with another one
    added = ["hydra.launcher.resume=true", "hydra.sweep.dir=/sweep"]
    assert (None if again is None else shlex.split(again)) == ([*command, *added] if known else None)


@pytest.mark.parametrize(("host", "says"), [("another", "on another machine, another: whether"), (None, "restarted")])
def test_of_another_machine_nothing_is_claimed_and_a_restart_of_this_one_is_told(
    host: str | None, says: str, run: Run, tmp_path: Path
) -> None:
    write(tmp_path, launched(host=host or os.uname().nodename, boot="an earlier life"), queued(0))
    assert says in run("status", ".")[1]


@pytest.mark.parametrize("height", [8, 10, 12, 15, 200])
def test_on_a_terminal_it_takes_no_more_lines_than_there_are_and_counts_the_rest(height: int) -> None:
    view = seen(launch(), *[queued(num, f"x={num}") for num in range(40)])
    for num in range(20):
        view.take([start(num, num, "0.0"), end(num, num + 1.0, **(FAILED if num in (3, 4) else {}))])
    view.take([start(num, 50.0, "1.0") for num in (20, 21)])
    lines = _status.report(SweepFiles("/s"), view, Standing.RUNNING, 60.0, lambda _: "", 80, height).lines()
    assert len(lines) <= height
    assert [line.text == "" for line in lines].index(True) == 3
    text = "\n".join(line.text for line in lines)
    assert ("completed more; gpu-pool status --all" in text) == (height == 15)
    assert ("--all shows every job" in text) == (height < 200)


def test_json_has_the_keys_that_the_readme_tells_and_is_json(run: Run, tmp_path: Path) -> None:
    files = at_work(tmp_path)
    write(tmp_path, queued(4), start(4, 1.0, "1.0"), end(4, 2.0, value={"loss": float("nan"), "l": [float("inf"), 1]}))
    code, out, _ = run("status", ".", "--json")

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    status = json.loads(out, parse_constant=refuse)
    assert (code, out.count("\n"), status["standing"], status["directory"]) == (0, 1, "RUNNING", files.sweep_dir)
    assert status["counts"] == {"QUEUED": 1, "RUNNING": 1, "STOPPING": 0, "COMPLETED": 2, "FAILED": 1, "CANCELLED": 0}
    assert status["jobs"][4]["value"] == {"loss": None, "l": [None, 1]}
    assert (status["busy"], status["jobs"][2]["pid"], status["jobs"][0]["pid"]) == (1, 102, None)
    section = readme_section()
    for keys, where in ((status, "The object has"), (status["jobs"][0], "Each of `jobs`")):
        paragraph = section[section.index(where) :].split(":", 1)[1].split(".\n", 1)[0]
        assert set(re.findall(r"`(\w+)`", paragraph)) == set(keys)


EVIL = "\x1b]0;title\x07\x1b[2J\x9b31m\u202e<b>[red]x[/red]\r\nsecond"


def test_nothing_of_the_apps_text_reaches_a_terminal_as_anything_but_text(run: Run, tmp_path: Path) -> None:
    write(
        tmp_path,
        launched(started=1, host=os.uname().nodename, command=["python", EVIL, "hydra/x"]),
        queued(0, f"x={EVIL}"),
    )
    write(tmp_path, queued(1, EVIL), start(0, 1.0, EVIL), end(0, 2.0, value={EVIL: EVIL}), start(1, 1.0, "1.0"))
    files = write(tmp_path, end(1, 2.0, status="FAILED", error_type=EVIL, error_text=EVIL), queued(2, EVIL))
    printed(files, 0, EVIL.encode())
    for arguments in (["status", "."], ["status", ".", "--json"], ["cancel", ".", "2"], ["logs", ".", "2"], [EVIL]):
        _, out, err = run(*arguments)
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", out + err)


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, ("loaded",))


def test_what_only_looks_writes_nothing_and_loads_no_pickle(run: Run, tmp_path: Path) -> None:
    files = at_work(tmp_path)
    for num in range(4):
        printed(files, num, b"text\n")
        Path(files.returned(num)).write_bytes(pickle.dumps(Bomb()))
        Path(files.late(num)).write_bytes(pickle.dumps(Bomb()))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    for arguments in ("status .", "status . --json", "logs . 1", "gpus", "cancel . 0", "cancel . 9"):
        run(*arguments.split())
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


# --- what cannot be told ---


def wrong(run: Run, *arguments: str) -> str:
    """The one sentence that is said, with exit code 2 and nothing else."""
    code, out, err = run(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    return err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("", "COMMAND"),
        ("frob .", "frob"),
        ("status", "DIR"),
        ("status nowhere", "there is no sweep in nowhere"),
        ("status journal", "there is no sweep in journal"),
        ("logs . x", "'x' is no number"),
        ("logs . -1", "NUM"),
        ("logs . 9", "there is no job 9 in .: it has jobs 0 to 3"),
        ("logs . 3", "job 3 (lr=3 seed=7) has no log: it is queued"),
        ("logs . 0", "output.log is not there"),
        ("logs . 2 --rank 1", "no group"),
        ("cancel . 9", "there is no job 9"),
        ("cancel . 0", "job 0 (lr=0 seed=7) is over already: COMPLETED"),
        ("report nowhere", "there is no sweep in nowhere"),
    ],
)
def test_what_cannot_be_answered_is_one_sentence_and_exit_code_2(
    arguments: str, says: str, run: Run, tmp_path: Path
) -> None:
    at_work(tmp_path)
    (tmp_path / "journal").touch()
    assert says in wrong(run, *arguments.split())


def test_a_journal_that_is_not_one_is_said_to_be_so(run: Run, tmp_path: Path) -> None:
    write(tmp_path, {"event": "start", "time": 1.0, "job": 0})
    assert "is damaged, or another version's" in wrong(run, "status", ".")
    (tmp_path / ".gpu_pool/journal.jsonl").unlink()
    os.mkfifo(tmp_path / ".gpu_pool/journal.jsonl")
    assert "is no file" in wrong(run, "status", ".")


def test_an_empty_sweep_has_no_job_yet(run: Run, tmp_path: Path) -> None:
    write(tmp_path)
    assert "there is no job 0 in .: it has none yet" in wrong(run, "logs", ".", "0")
    assert run("status", ".")[0] == 0


# --- logs ---


def test_a_log_goes_into_a_pipe_byte_for_byte(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    files = write(tmp_path, launched(), queued(0), start(0, 1.0, "0.0"))
    content = bytes(range(256)) * 1000 + b"\r\n\x1b[31m no end"
    printed(files, 0, content)
    assert _cli.run(["logs", str(tmp_path), "0"]) == 0
    assert capfdbinary.readouterr().out == content


def plain(*chunks: bytes, pauses: bool = False) -> bytes:
    out = io.BytesIO()
    sink = _logs.Plain(out, 40)
    for chunk in chunks:
        sink.write(chunk)
        if pauses:
            sink.pause()
    sink.end()
    return out.getvalue()


@pytest.mark.parametrize(
    ("log", "shown"),
    [
        (b"one\n\n  two", b"one\n\n  two\n"),
        (b"\x1b[31mred\x1b[0m\x1b]0;title\x07\n", b"red\n"),
        (b"10%\r50%\r100%\ndone\n", b"100%\ndone\n"),
        (b"10%\r100%\r", b"100%\n"),
        (b"windows\r\n", b"windows\n"),
        ("é\u202e\n".encode(), "é\n".encode()),
        (b"\xff\n", "\ufffd\n".encode()),
        (b"", b""),
    ],
)
def test_on_a_terminal_a_log_is_what_one_would_have_seen_and_plain_text(log: bytes, shown: bytes) -> None:
    assert plain(log) == shown
    assert plain(*[bytes([byte]) for byte in log]) == shown


def screen_of(content: bytes, columns: int = 40, lines: int = 24) -> list[str]:
    screen = pyte.Screen(columns, lines)
    screen.set_mode(pyte.modes.LNM)  # as a terminal's driver does with a line end
    pyte.ByteStream(screen).feed(content)
    return [line.rstrip() for line in screen.display if line.strip()]


def test_a_progress_bar_moves_in_one_line_of_the_terminal_however_wide_it_is() -> None:
    bar = [f"\r\x1b[32m{n}%\x1b[0m {'#' * n}".encode() for n in (5, 30, 60, 90)]
    out = plain(b"begin\n", *bar, b"\nend\n", pauses=True)
    assert screen_of(out) == ["begin", f"90% {'#' * 36}", "#" * 40, "#" * 14, "end"]
    moving = plain(b"begin\n", *bar[:3], pauses=True)
    assert b"30% ####" in moving
    assert screen_of(moving[: moving.rindex(b"\r")]) == ["begin", f"60% {'#' * 34}…"]


def test_a_bar_that_moves_for_days_takes_no_memory_and_no_time() -> None:
    sink = _logs.Plain(io.BytesIO(), 80)
    for n in range(2000):
        sink.write(f"\r{n}% {'#' * 200}".encode())
    assert len(sink._line) < 1000


def test_a_log_that_is_a_pipe_is_refused_and_not_waited_for(run: Run, tmp_path: Path) -> None:
    files = at_work(tmp_path)
    os.makedirs(files.job_dir(0))
    os.mkfifo(files.output(0))
    assert "is no file" in wrong(run, "logs", ".", "0")


def test_a_log_that_is_a_link_is_refused_and_nothing_shows_what_it_leads_to(run: Run, tmp_path: Path) -> None:
    files = at_work(tmp_path)
    (tmp_path / "secret").write_text("another file's last line\n")
    os.unlink(files.output(2))
    os.symlink(tmp_path / "secret", files.output(2))
    os.symlink(tmp_path / "secret", files.rank_log(2, 0))
    assert "output.log cannot be read: is a link" in wrong(run, "logs", ".", "2")
    assert "rank_0.log cannot be read: is a link" in wrong(run, "logs", ".", "2", "--rank", "0")
    code, out, _ = run("status", ".")
    assert (code, "another file" in out) == (0, False)


def test_the_log_of_a_rank_is_shown_and_of_one_that_is_not_there_which_ones_are(run: Run, tmp_path: Path) -> None:
    files = at_work(tmp_path)
    for rank in (0, 1, 10):
        Path(files.rank_log(2, rank)).write_text(f"rank {rank}\n")
    assert run("logs", ".", "2", "--rank", "10") == (0, "rank 10\n", "")
    assert "its ranks here are 0, 1, 10" in wrong(run, "logs", ".", "2", "--rank", "7")


def line_of(process: subprocess.Popen[bytes], fd: int | None = None) -> str:
    """The next line that the process says; fails when none comes."""
    assert process.stdout is not None
    fd = process.stdout.fileno() if fd is None else fd
    line = b""
    while not line.endswith(b"\n"):
        assert _descriptors.wait_readable([fd], LIMIT_S), f"only {line!r} has come"
        got = os.read(fd, 1)
        assert got, f"it ended with {line!r}"
        line += got
    return line.decode()[:-1]


def test_a_log_is_followed_from_before_its_job_starts_through_its_tries_until_it_is_over(
    tmp_path: Path, command: Callable[..., subprocess.Popen[bytes]]
) -> None:
    files = write(tmp_path, launched(), queued(0))
    process = command("logs", ".", "0", "-f")
    assert process.stderr is not None
    log = printed(files, 0, b"first\n")
    write(tmp_path, start(0, 1.0, "0.0"))
    assert line_of(process) == "first"
    printed(files, 0, b"second\nlast of try 1")
    assert line_of(process) == "second"
    write(tmp_path, end(0, 2.0, "FAILED", event="retry"))
    os.rename(log, log.with_name("output.1.log"))
    printed(files, 0, b"\nagain\n")
    write(tmp_path, start(0, 3.0, "0.0", attempt=2))
    assert line_of(process) == "last of try 1"
    assert line_of(process) == "again"
    assert "begins anew" in line_of(process, process.stderr.fileno())
    printed(files, 0, b"the end")
    write(tmp_path, end(0, 4.0))
    assert said(process) == (0, b"the end", b"")


def test_following_ends_with_the_sweep_that_is_killed_and_says_so(
    tmp_path: Path, command: Callable[..., subprocess.Popen[bytes]]
) -> None:
    with sleeper() as supervisor:
        files = write(tmp_path, launched(supervisor.pid), queued(0), start(0, 1.0, "0.0"))
        printed(files, 0, b"text\n")
        process = command("logs", ".", "0", "-f")
        assert line_of(process) == "text"
    code, out, err = said(process)
    assert (code, out) == (2, b"")
    assert b"job 0 was not over when the sweep was killed" in err


# --- pipes and closed streams ---


@pytest.mark.parametrize("arguments", ["logs . 2", "logs . 2 -f", "status . --watch", "status . --watch --json"])
def test_where_nobody_reads_any_more_it_ends_and_says_nothing(
    arguments: str, tmp_path: Path, command: Callable[..., subprocess.Popen[bytes]]
) -> None:
    files = at_work(tmp_path)
    printed(files, 2, b"x" * 100_000 if arguments == "logs . 2" else b"")
    process = command(*arguments.split())
    assert process.stdout is not None
    assert process.stdout.read(1)
    process.stdout.close()
    assert process.wait(LIMIT_S) in {-signal.SIGPIPE, 128 + signal.SIGPIPE}
    assert process.stderr is not None
    assert process.stderr.read() == b""


def test_nobody_need_be_there_to_read_from_the_beginning(
    tmp_path: Path, command: Callable[..., subprocess.Popen[bytes]]
) -> None:
    at_work(tmp_path)
    read, write_ = os.pipe()
    os.close(read)
    for arguments in (["status", "."], ["logs", ".", "2"], ["gpus"]):
        assert said(command(*arguments, stdout=write_))[::2] == (-signal.SIGPIPE, b"")
    os.close(write_)


def test_what_cannot_be_written_is_said_once(tmp_path: Path, command: Callable[..., subprocess.Popen[bytes]]) -> None:
    at_work(tmp_path)
    with open("/dev/full", "wb") as full:
        for arguments in (["status", "."], ["logs", ".", "2"], ["status", ".", "--json"], ["gpus"]):
            code, _, err = said(command(*arguments, stdout=full))
            assert (code, err.count(b"\n")) == (2, 1)
            assert b"No space left" in err
    process = command("status", ".", stdout=None, preexec_fn=lambda: os.close(1))
    assert said(process)[::2] == (2, b"gpu-pool: there is no stdout to write to\n")


def test_it_starts_without_a_heavy_library(tmp_path: Path) -> None:
    at_work(tmp_path)
    code = "import sys; from hydra_plugins.hydra_gpu_pool_launcher import _cli; _cli.run(sys.argv[1:]); "
    code += "print([*sys.modules], file=sys.stderr)"
    arguments = ["status", str(tmp_path)]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=LIMIT_S)
    loaded = {name.split(".")[0] for name in eval(done.stderr)}
    assert "1 done" in done.stdout
    assert not loaded & {"torch", "numpy", "cloudpickle", "threadpoolctl", "pynvml", "multiprocessing"}
    assert "rich.console" not in eval(done.stderr)


# --- on a terminal ---


class Terminal:
    """A command on a terminal of 80 columns and 24 lines, and what is on its screen."""

    def __init__(self, directory: Path, *arguments: str, **environ: str) -> None:
        self.fd, its = pty.openpty()
        self.resize(80, 24)
        self.screen = pyte.HistoryScreen(80, 24)
        self._stream = pyte.ByteStream(self.screen)
        self.bytes = b""
        env = {name: value for name, value in os.environ.items() if name not in {"NO_COLOR", "COLUMNS", "LINES"}}
        self.process = subprocess.Popen(
            [*COMMAND, *arguments],
            stdin=its,
            stdout=its,
            stderr=its,
            cwd=directory,
            start_new_session=True,
            env={**env, "TERM": "xterm-256color", **environ},
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        os.close(its)

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.screen.display)

    def until(self, shown: str) -> None:
        while shown not in self.text():
            assert self._read(), f"it is over, and does not show {shown!r}:\n{self.text()}"

    def end(self) -> int:
        while self._read():
            pass
        return self.process.wait(LIMIT_S)

    def _read(self) -> bool:
        assert _descriptors.wait_readable([self.fd], LIMIT_S), f"nothing comes any more:\n{self.text()}"
        try:
            got = os.read(self.fd, 1 << 16)
        except OSError:  # EIO: nobody has the other end
            return False
        self.bytes += got
        self._stream.feed(got)
        return bool(got)

    def close(self) -> None:
        os.close(self.fd)
        self.process.kill()
        self.process.wait(LIMIT_S)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def begin(*arguments: str, **environ: str) -> Terminal:
        opened.append(Terminal(tmp_path, *arguments, **environ))
        return opened[-1]

    yield begin
    for each in opened:
        each.close()


def test_the_table_moves_on_a_terminal_from_before_the_sweep_until_it_is_over(
    tmp_path: Path, terminal: Callable[..., Terminal]
) -> None:
    screen = terminal("status", "sweep", "--watch")
    screen.until("waiting for a sweep in sweep")
    directory = tmp_path / "sweep"
    with sleeper() as supervisor:
        jobs = [queued(num, f"lr={num}") for num in range(100)]
        files = write(directory, launched(supervisor.pid), *jobs, start(0, 1.0, "0.0"))
        screen.until("1 running  99 queued")
        printed(files, 0, b"epoch 1\repoch 2")
        screen.until("epoch 2")
        write(
            directory, *[event for num in range(1, 90) for event in (start(num, 2.0, "1.0"), end(num, 3.0, **FAILED))]
        )
        screen.until("and 72 failed more")  # before that, it may have seen half of them
        assert screen.text().startswith("sweep")
        screen.resize(80, 12)
        screen.until("and 84 failed more")
        write(directory, *[end(num, 4.0) for num in (0, *range(90, 100))], DONE)
        screen.until("all jobs so far have ended")
        assert b"\x1b[?1049l" not in screen.bytes
    assert screen.end() == 0
    left = screen_of(screen.bytes.partition(b"\x1b[?1049l")[2], 80)
    assert left[0].startswith("sweep    11 done  0 running  89 failed")
    assert re.fullmatch(r"  and 11 completed and \d+ failed more; gpu-pool status --all shows every job", left[-1])
    assert screen.bytes.count(b"\x1b[?1049h") == screen.bytes.count(b"\x1b[?1049l") == 1
    assert screen.bytes.rindex(b"\x1b[?25h") > screen.bytes.rindex(b"\x1b[?25l")


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_ends_the_watch_and_leaves_the_terminal_as_it_was(
    signum: int, code: int, tmp_path: Path, terminal: Callable[..., Terminal]
) -> None:
    at_work(tmp_path)
    screen = terminal("status", ".", "--watch")
    screen.until("75%")
    screen.process.send_signal(signum)
    assert screen.end() == code
    assert screen.bytes.endswith((b"\x1b[?25h", b"\x1b[?1049l\x1b[?25h", b"\x1b[?25h\x1b[?1049l"))
    assert b"Traceback" not in screen.bytes


def test_colour_is_for_terminals_alone_and_for_those_who_want_it(
    tmp_path: Path, terminal: Callable[..., Terminal]
) -> None:
    write(tmp_path, launched(started=1), queued(0), start(0, 1.0, "0.0"), end(0, 2.0, **FAILED), DONE)
    coloured, plain_one = terminal("status", "."), terminal("status", ".", NO_COLOR="1")
    assert (coloured.end(), plain_one.end()) == (0, 0)
    assert coloured.text() == plain_one.text()
    assert b"\x1b[31m" in coloured.bytes
    assert not re.search(rb"\x1b\[[0-9;]*3[0-9]", plain_one.bytes)


def test_a_log_on_a_terminal_is_plain(tmp_path: Path, terminal: Callable[..., Terminal]) -> None:
    files = at_work(tmp_path)
    printed(files, 2, f"{EVIL}\n".encode())
    log = terminal("logs", ".", "2")
    assert log.end() == 0
    assert b"\x1b" not in log.bytes
    assert "loading\n" in log.text()


def test_where_there_is_no_terminal_a_watch_is_a_line_for_each_change(
    tmp_path: Path, command: Callable[..., subprocess.Popen[bytes]]
) -> None:
    process = command("status", "sweep", "--watch")
    assert line_of(process) == "waiting for a sweep in sweep"
    with sleeper() as supervisor:
        write(tmp_path / "sweep", launched(supervisor.pid), queued(0), start(0, 1.0, "0.0"))
        while not (line := line_of(process)).startswith("0 done  1 running"):
            assert line.startswith("0 done  0 running")  # it has seen half of that
        write(tmp_path / "sweep", end(0, 2.0))
        assert line_of(process).startswith("1 done  0 running")
        write(tmp_path / "sweep", DONE)
        assert line_of(process).startswith("1 done  0 running")
    code, out, err = said(process)
    assert (code, err) == (0, b"")
    assert out.splitlines()[-1].split()[:2] == [b"0", b"0.0"]
    process = command("status", "sweep", "--watch", "--json")
    assert json.loads(said(process)[1])["standing"] == "FINISHED"


# --- cancel ---

WAITING = """
def waiting(x):
    report(x)
    while not os.path.exists(f"go{x}"):
        time.sleep(0.02)
    return x

def hears_nothing(x):
    hear_nothing(lambda: report(x))

def fast(x):
    return x
"""


def sweep(start_app: StartApp, calls: str, **settings: Any) -> App:
    """A sweep of calls like "waiting(0)", on two slots; the app prints how each ended."""
    given = ", ".join(f"{name}={value}" for name, value in {"cpu_slots": 2, "kill_grace_s": 0.3, **settings}.items())
    source = WAITING + (
        f"calls = {[tuple(call[:-1].split('(')) for call in calls.split()]}\n"
        "def call(name, x):\n    return globals()[name](x)\n"
        f"ends = GpuPool({given}, dir='sweep').map(call, [dict(name=name, x=int(x)) for name, x in calls])\n"
        "print([(end.status.value, end.value) for end in ends])"
    )
    return start_app(source)


def ended(app: App) -> list[tuple[str, Any]]:
    """How each job ended, once the app has."""
    out, err = app.process.communicate(timeout=LIMIT_S)
    app.assert_nothing_is_left()
    assert app.process.returncode == 0, err
    result: list[tuple[str, Any]] = eval(out.splitlines()[-1])
    return result


def test_one_running_job_and_one_that_waits_are_cancelled_and_the_sweep_goes_on(
    start_app: StartApp, run: Run, tmp_path: Path
) -> None:
    app = sweep(start_app, "fast(0) waiting(1) waiting(2) waiting(3) waiting(4)")
    for _ in range(2):
        app.report()
    code, out, err = run("cancel", "sweep", "1")
    assert (code, err) == (0, "")
    assert re.fullmatch(r"job 1 \(name='waiting' x=1\) CANCELLED: somebody cancelled it by hand\n", out)
    app.report()  # job 3 has its slot
    code, out, _ = run("cancel", str(tmp_path / "sweep/.gpu_pool"), "4")
    assert code == 0
    assert out.endswith("CANCELLED: somebody cancelled it by hand; it was not started\n")
    assert "is over already: CANCELLED" in wrong(run, "cancel", "sweep", "1")
    assert "is over already: COMPLETED" in wrong(run, "cancel", "sweep", "0")
    assert "1 done  2 running  2 cancelled" in run("status", "sweep")[1]
    for num in (2, 3):
        (tmp_path / f"go{num}").touch()
    none = ("CANCELLED", None)
    assert ended(app) == [("COMPLETED", 0), none, ("COMPLETED", 2), ("COMPLETED", 3), none]
    assert os.listdir(tmp_path / "sweep/.gpu_pool/cancel") == []
    assert " 3 done  0 running  2 cancelled" in run("status", "sweep")[1]


def test_a_job_that_is_deaf_is_killed_when_its_grace_is_over(start_app: StartApp, run: Run) -> None:
    app = sweep(start_app, "hears_nothing(0)")
    app.report()
    code, out, _ = run("cancel", "sweep", "0")
    assert (code, out.count("CANCELLED: somebody cancelled it by hand")) == (0, 1)
    assert ended(app) == [("CANCELLED", None)]


def patience_ends_with_a_stop(files: SweepFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time to wait is over as soon as the journal's "stop" event has been read, however long that takes."""
    asked_since: list[None] = []

    def now() -> float:
        if '"event": "stop"' in Path(files.journal).read_text():
            asked_since.append(None)
        return LIMIT_S if len(asked_since) > 1 else 0.0  # at the first time, it may have been written just now

    monkeypatch.setattr(_cancel, "time", SimpleNamespace(monotonic=now))


def test_a_job_that_takes_its_grace_is_being_stopped_and_a_second_request_is_not_sent(
    start_app: StartApp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = sweep(start_app, "hears_nothing(0)", kill_grace_s=600)
    pid = int(app.report().split()[0])
    files = SweepFiles(str(tmp_path / "sweep"))
    patience_ends_with_a_stop(files, monkeypatch)
    assert _cancel.cancel(files, 0, wait_s=LIMIT_S).text.startswith("job 0 (name='hears_nothing' x=0) is being")
    monkeypatch.delattr(_cancel, "ask_to_cancel")
    assert _cancel.cancel(files, 0, wait_s=0).cancelled
    os.kill(pid, signal.SIGKILL)
    assert ended(app) == [("CANCELLED", None)]


def test_a_sweep_that_was_killed_has_nothing_to_cancel(start_app: StartApp, run: Run, tmp_path: Path) -> None:
    app = sweep(start_app, "waiting(0) waiting(1) waiting(2)")
    app.report()
    everybody = [*app.relatives().values(), app.process.pid]
    for signum in (signal.SIGSTOP, signal.SIGKILL):  # stopped first: whoever outlives another still ends the jobs
        for pid in everybody:
            os.kill(pid, signum)
    app.assert_nothing_is_left()
    assert "does not run any more" in wrong(run, "cancel", "sweep", "0")
    assert "killed: its supervisor" in run("status", "sweep")[1]
    assert not (tmp_path / "sweep/.gpu_pool/cancel").exists()


def test_nothing_is_sent_to_another_process_that_has_the_supervisors_pid(run: Run, tmp_path: Path) -> None:
    with sleeper() as other:
        write(tmp_path, launched(other.pid, started=1), queued(0), start(0, 1.0, "0.0"))
        assert "does not run any more" in wrong(run, "cancel", ".", "0")
        assert other.poll() is None


def test_only_the_owner_on_the_same_machine_can_cancel(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "far", launched(host="another"), queued(0))
    assert "runs on another machine, another: cancel the job there" in wrong(run, "cancel", "far", "0")
    write(tmp_path, launched(), queued(0))
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert "is another user's" in wrong(run, "cancel", ".", "0")
    assert os.listdir(tmp_path / ".gpu_pool") == os.listdir(tmp_path / "far/.gpu_pool") == ["journal.jsonl"]


SUPERVISOR = """
import signal, sys
def answer(*_):
    with open(sys.argv[1], "a") as journal:
        journal.write(sys.argv[2])
signal.signal(signal.SIGUSR2, answer)
print(flush=True)
while True:
    signal.pause()
"""


@pytest.mark.parametrize(
    ("answer", "says", "cancelled"),
    [
        ([end(0, 2.0)], "job 0 was over before it could be stopped: COMPLETED", False),
        ([end(0, 2.0, **FAILED)], "stopped: FAILED: ValueError: no such file", False),
        ([stop(0, 2.0)], "job 0 is being stopped (took longer)", True),
        ([], "has not answered for 0.1 s; the request stays", False),
    ],
)
def test_what_came_of_a_request_is_what_the_journal_says(
    answer: list[dict[str, Any]], says: str, cancelled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = write(tmp_path)
    lines = "".join(json.dumps(event) + "\n" for event in answer)
    arguments = [sys.executable, "-c", SUPERVISOR, files.journal, lines]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE) as supervisor:
        assert supervisor.stdout is not None
        supervisor.stdout.readline()
        write(tmp_path, launched(supervisor.pid), queued(0), start(0, 1.0, "0.0"))
        if answer:
            patience_ends_with_a_stop(files, monkeypatch)
        try:
            told = _cancel.cancel(files, 0, wait_s=LIMIT_S if answer else 0.1)
        finally:
            supervisor.kill()
    assert says in told.text
    assert told.cancelled is cancelled
    assert os.listdir(files.cancellations) == ["0"]
    assert not stat.S_IMODE(os.stat(files.cancellations).st_mode) & 0o022


@pytest.mark.parametrize("read", [False, True])
def test_a_pipe_in_the_place_of_the_request_is_refused_and_not_waited_for(read: bool, run: Run, tmp_path: Path) -> None:
    files = write(tmp_path, launched(), queued(0))
    os.mkdir(files.cancellations)
    pipe = os.path.join(files.cancellations, "0")
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK) if read else None
    try:
        assert "cannot be cancelled (.gpu_pool/cancel/0: is no file)" in wrong(run, "cancel", ".", "0")
    finally:
        if reader is not None:
            os.close(reader)


# --- report, gpus ---


def test_report_is_written_again_from_the_journal(run: Run, tmp_path: Path) -> None:
    at_work(tmp_path / "s")
    assert run("report", "s") == (0, "written: s/results.csv and s/sweep.html\n", "")
    assert (tmp_path / "s/results.csv").read_text().startswith("number,lr,status,")
    assert (tmp_path / "s/sweep.html").read_text().startswith("<!DOCTYPE html>")


def test_what_was_moved_aside_does_not_take_the_reports_of_the_sweep_after_it(run: Run, tmp_path: Path) -> None:
    at_work(tmp_path / "s")
    (tmp_path / "s/.gpu_pool").rename(tmp_path / "s/.gpu_pool.1")
    code, _, err = run("report", "s/.gpu_pool.1")
    assert code == 2
    assert "was moved aside" in err
    assert not (tmp_path / "s/results.csv").exists()


H200 = tuple(Gpu(index, f"GPU-{index}abc", "NVIDIA H200", exclusive=index == 2) for index in range(3))


def test_gpus_says_what_an_id_means_here() -> None:
    def ids(environ: dict[str, str]) -> list[tuple[str | None, str | None, int | None]]:
        rows = _gpus.told(environ, H200, 4).rows
        return [(row.id, row.entry, row.gpu.index if row.gpu else None) for row in rows]

    assert ids({}) == [("0", "0", 0), ("1", "1", 1), ("2", "2", 2)]
    assert ids({"CUDA_VISIBLE_DEVICES": "2,0"}) == [("0", "2", 2), ("1", "0", 0), (None, None, 1)]
    assert ids({"CUDA_VISIBLE_DEVICES": "GPU-1"})[0] == ("0", "GPU-1", 1)
    assert ids({"CUDA_VISIBLE_DEVICES": ""}) == [(None, None, 0), (None, None, 1), (None, None, 2)]
    assert _gpus.lines(_gpus.told({"CUDA_VISIBLE_DEVICES": "2,0"}, H200, 4)) == [
        "CUDA_VISIBLE_DEVICES=2,0: an id is an index into it",
        "",
        "  id  nvidia-smi  name                                  uuid      shown to a job as",
        "  0   2           NVIDIA H200 (exclusive: one process)  GPU-2abc  2",
        "  1   0           NVIDIA H200                           GPU-0abc  0",
        "  -   1           NVIDIA H200                           GPU-1abc  (hidden by CUDA_VISIBLE_DEVICES)",
        "",
    ]


def test_gpus_of_a_machine_without_any_are_cpu_slots_and_what_no_driver_confirms_is_taken_at_its_word() -> None:
    none = _gpus.told({}, None, 4)
    assert (_gpus.as_json(none)["gpus"], none.cpu_slots, none.driver) == ([], 4, False)
    assert _gpus.lines(none) == ["no NVIDIA driver was found here", "CPU only, 4 at once: no GPU was found"]
    lines = _gpus.lines(_gpus.told({"CUDA_VISIBLE_DEVICES": "1,3"}, None, 4))
    assert "no NVIDIA driver was found here: ids are taken at your word" in lines
    assert [line.split() for line in lines[3:6]] == [["id", "shown", "to", "a", "job", "as"], ["0", "1"], ["1", "3"]]


def test_gpus_says_which_slots_are_leased_by_whom_whatever_they_are_called_here() -> None:
    held = {"GPU-0abc.1": Holder(7, "/there"), "GPU-1abc.0": Holder(8, "/here"), "5.0": Holder(9, "/elsewhere")}
    told = _gpus.told({"CUDA_VISIBLE_DEVICES": "2,0"}, H200, 4, held)
    assert _gpus.lines(told)[-2:] == [
        "slot 0.1 is leased by the sweep in /there (process 7)",
        "slot GPU-1abc.0 is leased by the sweep in /here (process 8)",
    ]
    leases = [gpu["leases"] for gpu in _gpus.as_json(told)["gpus"]]
    assert leases == [
        [],
        [{"slot": 1, "pid": 7, "directory": "/there"}],
        [{"slot": 0, "pid": 8, "directory": "/here"}],
    ]
    without = _gpus.told({"CUDA_VISIBLE_DEVICES": "5"}, None, 4, held)
    assert "slot 5.0 is leased by the sweep in /elsewhere (process 9)" in _gpus.lines(without)
    assert _gpus.lines(without)[-2:] == [
        "slot GPU-0abc.1 is leased by the sweep in /there (process 7)",
        "slot GPU-1abc.0 is leased by the sweep in /here (process 8)",
    ]


def test_gpus_says_what_is_leased_although_no_gpu_can_be_listed() -> None:
    told = _gpus.told({}, None, 4, {"0.1": Holder(7, "/there")})
    assert told.rows == ()
    assert _gpus.lines(told)[-1] == "slot 0.1 is leased by the sweep in /there (process 7)"


def test_gpus_says_so_where_what_is_leased_cannot_be_read(
    run: Run, leases: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_machine, "discover", lambda _: None)
    leases.chmod(0o755)
    code, out, _ = run("gpus")
    assert code == 0
    assert f"who leases what cannot be read in {leases}: others can use it" in out


def test_a_driver_that_does_not_answer_is_said_to_be_so(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(_: object) -> None:
        raise ConfigurationError("the NVIDIA driver cannot be asked (it is in trouble)")

    monkeypatch.setattr(_machine, "discover", silent)
    assert "it is in trouble" in wrong(run, "gpus")


# --- README ---


def readme_section() -> str:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return text.split("## Look at a sweep from outside\n")[1].split("\n## ")[0]


def test_the_status_in_the_readme_is_a_real_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    begin = 36755.0
    starts = {0: ("0.0", 0), 1: ("1.0", 0), 2: ("0.0", 115), 3: ("0.0", 120), 4: ("1.0", 161)}
    events = [{**start(num, begin + at, slot), "pid": 4164 + num * 13} for num, (slot, at) in starts.items()]
    events += [end(0, begin + 114, value={"loss": 0.231}), end(1, begin + 160, value={"loss": 0.287})]
    events += [end(2, begin + 120, **{**FAILED, "error_text": "no such file"})]
    at_first = [launch(main=4121), *[queued(num, f"lr=0.{num + 1}") for num in range(8)]]
    events += [{**event, "time": begin - 1} for event in at_first]
    by_time = sorted(events, key=lambda event: (event["time"], event["event"] != "launch", event["event"] == "start"))
    last = {3: "75% 152/203 [00:31<00:10]", 4: "epoch 2/10  loss 1.902"}
    files, view = SweepFiles("/multirun/first"), seen(*by_time)
    real = _status.report(files, view, Standing.RUNNING, begin + 192, lambda job: last[job.job.num], 120).lines()
    (block,) = re.findall(r"What `status` says:\n\n((?:    .*\n|\n)+)", readme_section())
    in_readme = [line.removeprefix("    ") for line in block.rstrip("\n").split("\n")]
    clock = re.compile(r"\(\d\d:\d\d:\d\d\)")  # of the time zone
    assert [clock.sub("", line.text) for line in real] == [clock.sub("", line) for line in in_readme]


def test_the_commands_of_the_readme_do_what_it_says(
    start_app: StartApp, run: Run, tmp_path: Path, command: Callable[..., Any]
) -> None:
    lines = re.findall(r"^    gpu-pool (.*?)(?:  +.*)?$", readme_section(), re.MULTILINE)
    commands = [line.replace("multirun/first", "sweep") for line in lines]
    assert {line.split()[0] for line in commands} == {"status", "logs", "cancel", "report", "gpus"}
    app = sweep(start_app, "waiting(0) waiting(1) waiting(2) waiting(3)", cpu_slots=4)
    for _ in range(4):
        app.report()
    blocking = [command(*line.split()) for line in commands if "-f" in line.split() or "--watch" in line]
    for line in commands:
        if "-f" not in line.split() and "--watch" not in line and "--rank" not in line:
            code, _, err = run(*line.split())
            assert (line, code, err) == (line, 0, "")
    for num in range(4):
        (tmp_path / f"go{num}").touch()
    assert [status for status, _ in ended(app)].count("CANCELLED") == 1
    assert [said(process)[0] for process in blocking] == [0] * len(blocking)
