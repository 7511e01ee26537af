"""The end of a launch, in lines of text."""

from __future__ import annotations

import io
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from support import RunApp
from test_view import end, launch, queued, seen, start, stop

from hydra_plugins.hydra_gpu_pool_launcher import _display, _event_lines, _say
from hydra_plugins.hydra_gpu_pool_launcher._events import CANCELLED_BY_HAND
from hydra_plugins.hydra_gpu_pool_launcher._files import SweepFiles
from hydra_plugins.hydra_gpu_pool_launcher._model import Device, Job, Layout
from hydra_plugins.hydra_gpu_pool_launcher._say import say
from hydra_plugins.hydra_gpu_pool_launcher._screen import is_terminal
from hydra_plugins.hydra_gpu_pool_launcher._settings import checked
from hydra_plugins.hydra_gpu_pool_launcher._summary import MOST_ROWS, closing, failures, headline, result_table
from hydra_plugins.hydra_gpu_pool_launcher._table import cells
from hydra_plugins.hydra_gpu_pool_launcher._view import View

OVERRIDES = (("lr=0.1", "model=cnn", "seed=1"), ("lr=0.01", "model=a-very-long-name-of-a-model", "seed=1"))


def two_jobs(**facts: Any) -> tuple[View, list[Job]]:
    jobs = [Job(n, overrides) for n, overrides in enumerate(OVERRIDES)]
    events = [launch(), *(queued(job.num, *job.overrides) for job in jobs)]
    events += [
        start(0, 0.0, "0.0"),
        start(1, 0.0, "1.0"),
        end(0, 30.0, value={"acc": 1 / 3, "n": [0.1 + 0.2]}, seconds=30.0),
    ]
    failed = {"error_type": "ValueError", "error_text": "no such\nfile", "seconds": 60.0, **facts}
    return seen(*events, end(1, 60.0, "FAILED", **failed)), jobs


def test_the_headline_counts_and_says_how_long_it_took_and_how_busy_the_slots_were() -> None:
    assert headline(*two_jobs()) == "1 COMPLETED, 1 FAILED in 0:01:00, slots 75% busy"


def test_where_there_is_room_nothing_is_cut_and_overrides_that_differ_are_columns() -> None:
    assert result_table(*two_jobs(), 200) == [
        "  #  lr    model                        status     value                     seconds  gpu.slot",
        "  0  0.1   cnn                          COMPLETED  acc 0.333333  n 0.3       30.0     0.0",
        "  1  0.01  a-very-long-name-of-a-model  FAILED     ValueError: no such file  60.0     1.0",
    ]


def test_the_tries_have_a_column_where_there_was_more_than_one() -> None:
    jobs = [Job(0, ())]
    failed = end(0, 1.0, "FAILED", event="retry", error_type="E")
    view = seen(launch(), queued(0), start(0, 0.0, "0.0"), failed, start(0, 1.0, "1.0", attempt=2), end(0, 2.0))
    assert result_table(view, jobs, 80)[0].split()[-1] == "tries"
    assert result_table(view, jobs, 80)[1].split()[-2:] == ["1.0", "2"]


def test_of_a_job_that_was_taken_over_the_table_says_where_it_ran(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said: list[str] = []
    monkeypatch.setattr(_event_lines, "say", lambda text, level=0: said.append(text))  # noqa: ARG005
    files = SweepFiles(str(tmp_path))
    Path(files.root).mkdir()
    earlier = [launch(), queued(0, "x=0"), start(0, 1.0, "1.0"), end(0, 3.0, seconds=2.0)]
    Path(files.journal).write_text("".join(json.dumps(event) + "\n" for event in earlier))
    lines = _event_lines.Lines([Job(0, ("x=0",))], files, checked({"resume": True}), None, brief=False)
    lines.begin(Layout((Device("0"),), 1))
    for event in [queued(0, "x=0"), end(0, 9.0, attempt=0, cause="resumed", seconds=2.0)]:
        lines.show(event)
    lines.summary()
    assert said[-1].splitlines()[-1].split() == ["0", "0", "COMPLETED", "2.0", "1.0"]


@pytest.mark.parametrize("width", [40, 60, 80, 100])
def test_it_is_no_wider_than_the_terminal_and_values_and_long_names_are_cut_first(width: int) -> None:
    view, jobs = two_jobs(error_text="日本" * 200)
    table = result_table(view, jobs, width)
    assert max(map(cells, table)) <= width
    assert all("FAILED" in line or "COMPLETED" in line for line in table[1:])
    if width >= 60:
        assert [line.split()[-2:] for line in table] == [["seconds", "gpu.slot"], ["30.0", "0.0"], ["60.0", "1.0"]]


def test_overrides_that_find_no_room_are_left_out_and_that_is_seen() -> None:
    jobs = [Job(n, tuple(f"key{i}=value{i}{n}" for i in range(20))) for n in range(2)]
    header = result_table(seen(launch(), *(queued(job.num, *job.overrides) for job in jobs)), jobs, 80)[0].split()
    assert header[1] == "key0"
    assert "…" in header
    assert header[-4:] == ["status", "value", "seconds", "gpu.slot"]


def test_a_sweep_of_thousands_has_no_table_of_thousands() -> None:
    jobs = [Job(n, (f"x={n}",)) for n in range(MOST_ROWS + 50)]
    table = result_table(seen(launch(), *(queued(job.num, *job.overrides) for job in jobs)), jobs, 80)
    assert len(table) == MOST_ROWS + 2
    assert table[-1] == "  and 50 more, each a row of results.csv"


def test_what_became_of_a_job_that_nobody_was_left_to_tell_of_is_what_it_was_stopped_for() -> None:
    jobs = [Job(0, ("x=0",)), Job(1, ("x=1",)), Job(2, ("x=2",))]
    late = {**stop(0, 1.0), "why": "took longer"}
    interrupted = {**stop(1, 1.0), "cause": "cancelled", "why": "Ctrl-C"}
    events = [launch(), *(queued(n) for n in range(3)), *(start(n, 0.0, "0.0") for n in range(3)), late, interrupted]
    rows = [line.split(maxsplit=3)[1:] for line in result_table(seen(*events), jobs, 80)[1:]]
    assert [row[1] for row in rows] == ["FAILED", "CANCELLED", "LOST"]
    assert [row[2].split("  ")[0] for row in rows] == ["took longer", "Ctrl-C", "the supervisor was killed"]


def test_a_failed_job_is_told_with_its_cause_its_log_and_the_last_lines_of_that(tmp_path: Path) -> None:
    view, jobs = two_jobs()
    files = SweepFiles(str(tmp_path))
    Path(files.job_dir(1)).mkdir(parents=True)
    printed = "".join(f"line {i}\n\n" for i in range(20)) + "\x1b[31m" + "x" * 200 + "\x1b[0m\x07\n"
    Path(files.output(1)).write_text(printed)
    assert failures(view, jobs, files, lambda path: Path(path).name, 40) == [
        "  job 1 (lr=0.01",
        "        model=a-very-long-name-of-a-model",
        "        seed=1): ValueError: no such",
        "        file",
        "    output.log",
        *(f"      line {i}" for i in range(16, 20)),
        "      " + "x" * 33 + "…",
    ]


def failed(num: int, text: str = "", **facts: Any) -> dict[str, Any]:
    return end(num, 1.0, "FAILED", **{"error_type": "E", "error_text": text, **facts})


def test_jobs_that_failed_alike_are_told_together_and_none_hides_another(tmp_path: Path) -> None:
    jobs = [Job(n, (f"x={n}",)) for n in range(13)]
    late = failed(4, "was stopped: it took longer", error_type="JobTimeoutError", cause="timeout")
    events = [late if n == 4 else failed(n, f"nan at step {n}, 1{n}.5 GiB") for n in range(13)]
    view = seen(launch(), *(queued(job.num, *job.overrides) for job in jobs), *events)
    assert failures(view, jobs, SweepFiles(str(tmp_path)), lambda path: "LOG" if "jobs/0/" in path else path, 80) == [
        "  jobs 0 to 3, 5 to 12 (x=0 …): E: nan at step 0, 10.5 GiB",
        "    LOG",
        "  job 4 (x=4): was stopped: it took longer",
        f"    {tmp_path}/.gpu_pool/jobs/4/output.log",
    ]


def test_of_many_ways_to_fail_each_has_its_line_and_what_is_left_out_is_to_be_found(tmp_path: Path) -> None:
    jobs = [Job(n, ()) for n in range(25)]
    view = seen(launch(), *(failed(n, "x" * (n + 1)) for n in range(25)))
    lines = failures(view, jobs, SweepFiles(str(tmp_path)), lambda path: Path(path).name, 80)
    assert [line for line in lines if line.startswith("  job ")] == [
        f"  job {n}: E: {'x' * (n + 1)}" for n in range(25)
    ]
    assert lines.count("    output.log") == 10
    assert lines[-2:] == ["  the ends of their logs, and what else there is:", "    sweep.html"]


def test_of_hundreds_of_ways_to_fail_there_are_not_hundreds_of_lines_more_than_can_be_read(tmp_path: Path) -> None:
    jobs = [Job(n, ()) for n in range(300)]
    view = seen(launch(), *(failed(n, chr(ord("a") + n // 26) + chr(ord("a") + n % 26)) for n in range(300)))
    lines = failures(view, jobs, SweepFiles(str(tmp_path)), lambda path: Path(path).name, 80)
    assert lines[-3] == "  and 90 jobs more, each in a way of its own"
    assert max(map(cells, lines)) <= 80


def test_a_long_text_of_an_error_is_broken_between_words_and_ends(tmp_path: Path) -> None:
    path = "/data/" + "long-name/" * 12
    view = seen(launch(), failed(0, f"cannot read {path}, " + "word " * 100))
    lines = failures(view, [Job(0, ())], SweepFiles(str(tmp_path)), str, 80)
    assert [path in line for line in lines].count(True) == 1
    assert len(lines) == 5
    assert lines[3].endswith(" …")
    view = seen(launch(), failed(0, "x" * 5000))
    assert len(failures(view, [Job(0, ())], SweepFiles(str(tmp_path)), str, 80)[0]) < 1100


def test_the_closing_words_are_a_line_for_each_way_with_its_place_and_what_was_cancelled(tmp_path: Path) -> None:
    jobs = [Job(n, (f"x={n}",)) for n in range(4)]
    view = seen(launch(), failed(0, "y" * 100), failed(1, "y" * 100), end(2, 1.0, "CANCELLED", error_text="by hand"))
    files = SweepFiles(str(tmp_path))
    Path(files.job_dir(0)).mkdir(parents=True)
    Path(files.output(0)).write_text(
        f'Traceback (most recent call last):\n  File "/a/b.py", line 3, in f\nE: {"y" * 100}'
    )
    assert closing(view, jobs, files, 60) == [
        f"  jobs 0, 1: E: {'y' * 22}… (job 0: b.py:3 in f)",
        "  job 3 (x=3): the supervisor was killed",
        "  job 2: by hand",
    ]


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_no_frame_of_a_traceback_loses_its_files_name_its_line_and_its_function(width: int, tmp_path: Path) -> None:
    files = SweepFiles(str(tmp_path))
    Path(files.job_dir(0)).mkdir(parents=True)
    path = f"/home/me/{'a_long_path/' * 8}src/data.py"
    log = f'Traceback (most recent call last):\n  File "{path}", line 731, in _decode\n    {"x" * 300}\nE: y\n'
    Path(files.output(0)).write_text(log)
    view, jobs = seen(launch(), failed(0, "y")), [Job(0, ())]
    lines = failures(view, jobs, files, str, 80, width)
    (frame,) = [line for line in lines if "File" in line]
    assert frame.endswith('/data.py", line 731, in _decode')
    assert ("…" in frame) is (width < 200)
    assert cells(frame) == {40: 46, 60: 60, 80: 80, 200: 153}[width]
    assert [cells(line) for line in lines if "xxx" in line] == [width]


def test_in_the_closing_words_neither_overrides_nor_a_place_take_the_room_of_the_reason(tmp_path: Path) -> None:
    files = SweepFiles(str(tmp_path))
    Path(files.job_dir(0)).mkdir(parents=True)
    frame = f'  File "/{"long_name_" * 9}data.py", line 731, in _decode'
    Path(files.output(0)).write_text(f"Traceback (most recent call last):\n{frame}\nE: yy")
    overrides = tuple(f"key{i}=value{i}" for i in range(20))
    view = seen(launch(), queued(0, *overrides), failed(0, "y" * 100))
    (line,) = closing(view, [Job(0, overrides)], files, 80)
    assert line == "  job 0 (key0=value0 key1…: E: yyyyyyyyyyyyyyyyyyyy… (…e_data.py:731 in _decode)"
    assert cells(line) == 80
    assert "y" * 100 in "".join(failures(view, [Job(0, overrides)], files, str, 80)[:4])
    view = seen(launch(), *(queued(n, f"x={n}", *overrides) for n in range(2)), failed(0, "y"), failed(1, "y"))
    jobs = [Job(n, (f"x={n}", *overrides)) for n in range(2)]
    assert closing(view, jobs, files, 200)[0].startswith("  jobs 0, 1 (x=0 key0=value0 key1=value1 key2=value2 …): E")


@pytest.mark.parametrize(
    ("brief", "ends"), [(True, []), (False, ["job 0 (x=0) FAILED: was stopped: it took longer"])], ids=["live", "log"]
)
def test_a_job_that_takes_too_long_is_told_in_one_line_and_its_next_try_in_another(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, brief: bool, ends: list[str]
) -> None:
    said: list[str] = []
    monkeypatch.setattr(_event_lines, "say", lambda text, level=0: said.append(text))  # noqa: ARG005
    monkeypatch.chdir(tmp_path)
    lines = _event_lines.Lines([Job(0, ("x=0",))], SweepFiles(str(tmp_path)), checked({}), None, brief=brief)
    late = {"cause": "timeout", "error_type": "JobTimeoutError", "error_text": "was stopped: it took longer"}
    for event in [
        *(queued(0, "x=0"), start(0, 1.0, "0.0"), stop(0, 2.0), end(0, 3.0, "FAILED", event="retry", **late)),
        *(start(0, 3.0, "0.0", attempt=2), stop(0, 4.0), end(0, 5.0, "FAILED", attempt=2, **late)),
    ]:
        lines.show({**event, "why": "took longer"})
    one = (
        "job 0 (x=0) took longer: SIGTERM is sent, SIGKILL 10 s later to what is left of it; "
        "see .gpu_pool/jobs/0/output.log"
    )
    again = "job 0 (x=0) FAILED, try 1, and has another: was stopped: it took longer"
    assert [line for line in said if "started" not in line] == [one, again, one, *ends]


def test_of_a_job_that_ran_out_of_memory_it_is_said_what_its_next_try_waits_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said: list[str] = []
    monkeypatch.setattr(_event_lines, "say", lambda text, level=0: said.append(text))  # noqa: ARG005
    lines = _event_lines.Lines([Job(0, ("x=0",))], SweepFiles(str(tmp_path)), checked({}), None, brief=True)
    full = {"cause": "oom", "error_type": "OutOfMemoryError", "error_text": "CUDA out of memory"}
    for event in [queued(0, "x=0"), start(0, 1.0, "0.0"), end(0, 3.0, "FAILED", event="retry", **full)]:
        lines.show(event)
    assert said == [
        "job 0 (x=0) FAILED, try 1, and has another, with its GPU for itself, whose free slots stay empty until then: "
        "OutOfMemoryError: CUDA out of memory"
    ]


# --- what is said, byte for byte ---

HOSTILE = r"\x1b[2J\x1b]0;title\x07\x9b31m\u202e\ud800\r\nsecond line\t<b>[red]x[/red]"

APP = f"""
import os
from hydra_plugins.hydra_gpu_pool_launcher import GpuPool

class Strange:
    def __repr__(self):
        return "x\\nsecond line" + "{HOSTILE}"

class Odd(Exception):
    pass
Odd.__name__ = Odd.__qualname__ = "Odd{HOSTILE}".replace("\\ud800", "")

def job(x, kind):
    print("{HOSTILE}".encode(errors="replace"))
    os.write(1, b"\\x1b[2Jraw\\r\\x07\\n")
    if kind == 0:
        return "{HOSTILE}"
    if kind == 1:
        raise Odd("{HOSTILE}")
    if kind == 2 and not os.path.exists("tried"):
        open("tried", "w").close()
        raise ValueError("{HOSTILE}")

pool = GpuPool(cpu_slots=1, gpus=[], dir="sweep\\x1b[2J\\n2", max_retries=1, retry_on=["error"], output="OUTPUT")
pool.map(job, [dict(x=Strange(), kind=kind) for kind in range(3)])
"""


@pytest.mark.parametrize("output", ["file", "tee"])
def test_there_is_no_control_character_in_a_pipe_whatever_the_app_is_made_of(run_app: RunApp, output: str) -> None:
    done = run_app(APP.replace("OUTPUT", output))
    assert done.returncode == 0, done.stderr
    for text in (done.stdout, done.stderr):
        assert not [c for c in text if (ord(c) < 32 and c != "\n") or 127 <= ord(c) < 160 or c in "\u202e\ufeff"]
    lines = done.stderr.splitlines()
    assert [line for line in lines if line.startswith("second line")] == []
    assert sum("FAILED, try 1, and has another" in line for line in lines) == 2
    assert sum("COMPLETED: " in line and "second line" in line for line in lines) == 1


def test_what_no_encoding_has_is_replaced_and_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), "utf-8")
    handler = logging.StreamHandler(stream)
    monkeypatch.setattr(logging.getLogger("gpu_pool"), "handlers", [handler])
    say("a\ud800b\x1b[2J", logging.ERROR)
    stream.seek(0)
    assert stream.read() == "a?b\n"


def test_progress_none_says_nothing_about_devices_neither(run_app: RunApp) -> None:
    done = run_app(
        "from hydra_plugins.hydra_gpu_pool_launcher import GpuPool\n"
        "GpuPool(cpu_slots=1, progress='none').map(abs, [{}])"
    )
    assert (done.stdout, done.stderr) == ("", "")


def test_a_job_that_is_cancelled_by_hand_is_named_alone_and_a_later_ctrl_c_is_told_of(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said: list[str] = []
    monkeypatch.setattr(_event_lines, "say", lambda text, level=0: said.append(text))  # noqa: ARG005
    jobs = [Job(0, ("x=0",)), Job(1, ("x=1",))]
    lines = _event_lines.Lines(jobs, SweepFiles(str(tmp_path)), checked({}), None, brief=True)
    started = [start(num, 1.0, f"{num}.0") for num in range(2)]
    by_hand = {"event": "stop", "time": 2.0, "cause": "cancelled", "job": 1, "why": CANCELLED_BY_HAND}
    ctrl_c = {**by_hand, "job": 0, "why": "Ctrl-C (SIGINT to the main process)"}
    for event in [queued(0, "x=0"), queued(1, "x=1"), *started, by_hand, end(1, 3.0, "CANCELLED"), ctrl_c]:
        lines.show(event)
    assert said[0] == (
        "job 1 (x=1): somebody cancelled it by hand: SIGTERM is sent, SIGKILL 10 s later to what is left of it"
    )
    assert said[1].startswith("job 1 (x=1) CANCELLED")
    assert said[2:] == [
        "Ctrl-C (SIGINT to the main process): stopping 1 job, killed in 10 s",
        "a second Ctrl-C, or any further such signal, kills now",
    ]


class Broken:
    """A display, and a stream, that can do nothing."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


def test_a_line_that_stderr_does_not_take_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("gpu_pool"), "propagate", False)
    closed = io.StringIO()
    closed.close()
    for stream in (Broken(), closed, object(), None):
        monkeypatch.setattr("sys.stderr", stream)
        say("before a launch, nobody else guards it")


def test_of_a_handler_that_always_fails_one_traceback_is_seen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Fails(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise ArithmeticError(record.getMessage())

    monkeypatch.setattr(_say, "_told", set())
    monkeypatch.setattr(logging.getLogger("gpu_pool"), "handlers", [Fails()])
    for i in range(3):
        say(f"line {i}", logging.ERROR)
    assert capsys.readouterr().err.count("Traceback") == 1


def test_a_queued_job_that_is_cancelled_by_hand_is_told_when_it_happens_and_not_with_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said: list[str] = []
    monkeypatch.setattr(_event_lines, "say", lambda text, level=0: said.append(text))  # noqa: ARG005
    jobs = [Job(num, (f"x={num}",)) for num in range(3)]
    lines = _event_lines.Lines(jobs, SweepFiles(str(tmp_path)), checked({}), None, brief=True)
    by_hand = {
        "error_type": "JobCancelledError",
        "error_text": f"was cancelled: {CANCELLED_BY_HAND}; it was not started",
    }
    cancelled = {**end(0, 2.0, "CANCELLED"), "attempt": 0, **by_hand}
    other = {
        **end(2, 2.0, "CANCELLED"),
        "attempt": 0,
        **by_hand,
        "error_text": "was cancelled: boo; it was not started",
    }
    for event in [*(queued(num, f"x={num}") for num in range(3)), start(1, 1.0, "1.0"), cancelled]:
        lines.show(event)
    assert said == [f"job 0 (x=0) CANCELLED: {CANCELLED_BY_HAND}; it was not started"]
    lines.show(other)
    lines.summary()
    assert said[1] == "not started: 1 queued job: boo"


def test_while_all_are_stopped_a_job_that_somebody_else_has_cancelled_has_its_own_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said: list[str] = []
    monkeypatch.setattr(_event_lines, "say", lambda text, level=0: said.append(text))  # noqa: ARG005
    jobs = [Job(num, (f"x={num}",)) for num in range(2)]
    lines = _event_lines.Lines(jobs, SweepFiles(str(tmp_path)), checked({}), None, brief=True)
    stop = {"event": "stop", "time": 2.0, "cause": "cancelled", "job": 0, "why": "fail_fast, since job 7 failed"}
    ends = [
        {**end(0, 3.0, "CANCELLED"), "error_type": "JobCancelledError", "error_text": f"was cancelled: {why}"}
        for why in ("fail_fast, since job 7 failed", "SIGTERM that nobody here sent")
    ]
    ends[1]["job"] = 1
    for event in [*(queued(num, f"x={num}") for num in range(2)), start(0, 1.0, "0.0"), start(1, 1.0, "1.0")]:
        lines.show(event)
    for event in (stop, *ends):
        lines.show(event)
    assert [line.split("\n")[0] for line in said] == [
        "fail_fast, since job 7 failed: stopping 2 jobs, killed in 10 s",
        "job 1 (x=1) CANCELLED: SIGTERM that nobody here sent",
    ]


def test_a_display_that_fails_together_with_stderr_ends_itself_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stderr", Broken())
    guarded = _display.Guarded(Broken())
    assert guarded.tick() is None
    guarded.summary()
    assert not is_terminal(Broken())
