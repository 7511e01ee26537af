"""A sweep in lines of text."""

from __future__ import annotations

from typing import Any

import pytest
from test_view import end, launch, queued, seen, start, stop

from hydra_plugins.hydra_gpu_pool_launcher._seen import State
from hydra_plugins.hydra_gpu_pool_launcher._table import cells, clock, cut_left, overview, rows, short
from hydra_plugins.hydra_gpu_pool_launcher._view import View

WHERE = "multirun/2026-11-30/10-12-25"


def at_work() -> View:
    """Four slots; jobs 0 to 3 have ended, 1 of them badly; 8 to 11 run; the rest is queued."""
    jobs = [queued(n, f"lr={10.0 ** -(n % 3)}", f"model={'cnn' if n % 2 else 'mlp'}") for n in range(16)]
    events: list[dict[str, Any]] = [launch(slots=["0.0", "0.1", "1.0", "1.1"]), *jobs]
    for n in range(8):
        bad = {"status": "FAILED", "error_type": "ValueError", "error_text": "no such\nfile"} if n == 3 else {}
        events += [start(n, 10.0 * n, f"{n % 2}.0"), end(n, 10.0 * n + 60.0, **bad)]
    events += [start(n, 100.0 + 20 * (n - 8), f"{n % 2}.{n // 10}") for n in range(8, 12)]
    return seen(*events)


def lines(view: View, now: float = 192.0, width: int = 80, height: int | None = None) -> list[str]:
    return [line.text for line in rows(view, now, lambda job: f"epoch {job.job.num}/20", width, height)]


def test_the_overview_says_where_the_sweep_is_and_how_far() -> None:
    (line,) = overview(at_work(), 192.0, WHERE, 160)
    assert line.text == (
        f"{WHERE}    7 done  4 running  1 failed  4 queued    4 of 4 slots busy    0:03:12, ends in about 0:01:09"
    )


def test_where_it_does_not_fit_it_has_two_lines_and_the_end_of_the_path() -> None:
    narrow = [line.text for line in overview(at_work(), 192.0, f"/a/long/way/to/{'x' * 60}/{WHERE}", 80)]
    assert len(narrow) == 2
    assert narrow[0].startswith("…")
    assert narrow[0].endswith(f"{WHERE}    0:03:12, ends in about 0:01:09")
    assert narrow[1] == "7 done  4 running  1 failed  4 queued    4 of 4 slots busy"
    assert all(cells(line) <= 80 for line in narrow)


def test_there_is_a_row_for_each_job_that_runs_the_longest_first_and_then_for_the_failed_ones() -> None:
    assert lines(at_work()) == [
        "   #  gpu  pid   for  lr    model  last line",
        "   8  0.0  108  1:32  0.01  mlp    epoch 8/20",
        "   9  1.0  109  1:12  1.0   cnn    epoch 9/20",
        "  10  0.1  110  0:52  0.1   mlp    epoch 10/20",
        "  11  1.1  111  0:32  0.01  cnn    epoch 11/20",
        "   3  1.0  103  1:00  1.0   cnn    FAILED: ValueError: no such file",
    ]


def test_where_it_is_known_what_a_job_holds_of_its_gpus_it_has_a_column() -> None:
    view = at_work()
    view.take([{"event": "memory", "time": 190.0, "job": 9, "gpu_mb": 12_345.0}])
    assert lines(view)[:3] == [
        "   #  gpu  pid   for  gpu GB  lr    model  last line",
        "   8  0.0  108  1:32          0.01  mlp    epoch 8/20",
        "   9  1.0  109  1:12    12.3  1.0   cnn    epoch 9/20",
    ]


def test_a_row_knows_the_state_of_its_job() -> None:
    states = [line.state for line in rows(at_work(), 192.0, lambda _: "", 80)]
    assert states == [None, *[State.RUNNING] * 4, State.FAILED]


def test_a_job_that_is_stopped_says_why() -> None:
    view = seen(launch(), queued(0), start(0, 0.0, "0.0"), stop(0, 1.0))
    assert lines(view)[1].endswith("stopping: took longer")


@pytest.mark.parametrize("height", [2, 3, 4, 5])
def test_where_there_are_more_jobs_than_lines_the_last_line_counts_the_rest(height: int) -> None:
    shown = lines(at_work(), height=height)
    assert len(shown) <= max(height, 3)
    assert "more" in shown[-1]
    assert lines(at_work(), height=4)[-1] == "  and 2 running and 1 failed more"


@pytest.mark.parametrize("width", [20, 40, 60, 80, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    view = seen(launch(), queued(0, "text=" + "日本" * 40, "x=1"), queued(1, "x=2"), start(0, 0.0, "0.0"))
    for line in [*overview(view, 9.0, WHERE, width), *rows(view, 9.0, lambda _: "語" * 100, width)]:
        assert cells(line.text) <= width


def test_overrides_make_way_for_the_last_line() -> None:
    many = [queued(n, *(f"key{i}={'v' * 10}{n}" for i in range(12))) for n in range(2)]
    header = lines(seen(launch(), *many, start(0, 0.0, "0.0")))[0].split()
    assert header[4] == "key0"
    assert "key11" not in header
    assert header[-2:] == ["last", "line"]


def test_text_of_the_app_cannot_leave_its_cell() -> None:
    evil = queued(0, "x=\x1b[2J\x1b]0;title\x07a\nb\tc")
    assert lines(seen(launch(), evil, queued(1), start(0, 0.0, "0.0")))[1].split()[4:7] == ["a", "b", "c"]


def test_a_sweep_of_no_job_that_runs_has_no_rows() -> None:
    assert lines(seen(launch(), queued(0))) == []


def test_times_are_as_short_as_they_can_be() -> None:
    assert [clock(0), clock(3723.4), short(5), short(72), short(3600), short(600)] == [
        "0:00:00",
        "1:02:03",
        "0:05",
        "1:12",
        "1:00:00",
        "10:00",
    ]
    assert cut_left("abcdef", 4) == "…def"
