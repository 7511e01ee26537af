"""results.csv, and the Display that keeps it and sweep.html up to date."""

from __future__ import annotations

import csv
import errno
import io
import json
import math
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from support import outcomes
from test_view import end, launch, queued, seen, start

from hydra_plugins.hydra_gpu_pool_launcher import _report
from hydra_plugins.hydra_gpu_pool_launcher._display import Display
from hydra_plugins.hydra_gpu_pool_launcher._files import SweepFiles
from hydra_plugins.hydra_gpu_pool_launcher._journal import JournalReader
from hydra_plugins.hydra_gpu_pool_launcher._model import Device, Layout
from hydra_plugins.hydra_gpu_pool_launcher._report import Reports, Turn, as_csv, read_tail, write_page, write_results
from hydra_plugins.hydra_gpu_pool_launcher._results import Kind, Table, results
from hydra_plugins.hydra_gpu_pool_launcher._view import View

SWEEP = (
    launch(slots=["0.0", "1.0"]),
    queued(0, "lr=1e-3", "seed=1", "model=mlp"),
    queued(1, "lr=1e-4", "seed=1", "model=cnn"),
    queued(2, "lr=1e-5", "seed=1", "model=mlp"),
    start(0, 1.0, "0.0"),
    start(1, 1.0, "0.0", "1.0"),
    end(0, 3.5, value={"loss": 0.25, "best": True}, seconds=2.5, cpu_s=2.125, peak_mb=512.5, gpu_mb=20480.0),
    end(1, 2.0, "FAILED", event="retry", error_type="JobCrashedError", error_text="was killed by SIGSEGV"),
    start(1, 3.0, "1.0", attempt=2),
    end(1, 4.0, "FAILED", attempt=2, error_type="ValueError", error_text='no "x",\nsee above', seconds=1.0),
)


@pytest.fixture
def files(tmp_path: Path) -> SweepFiles:
    """Of a sweep that has its directory, and an empty journal."""
    files = SweepFiles(str(tmp_path))
    os.mkdir(files.root)
    Path(files.journal).touch()
    return files


def read(files: SweepFiles) -> list[dict[str, str]]:
    with open(files.results, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, strict=True))


def of_values(*values: Any) -> Table:
    """The results of jobs that have returned these."""
    return results(seen(*(end(num, 1.0, value=value) for num, value in enumerate(values))))


def value_cells(*values: Any) -> list[dict[str, Any]]:
    """The cells of these values that say something, by column."""
    table = of_values(*values)
    names = [column.name for column in table.columns]
    rows = (dict(zip(names, row, strict=True)) for row in table.rows)
    return [{name: row[name] for name in table.of(Kind.VALUE) if row[name] is not None} for row in rows]


# --- the table ---


def test_a_sweep_is_a_row_per_job_in_these_bytes(files: SweepFiles) -> None:
    write_results(files, seen(*SWEEP))
    assert Path(files.results).read_bytes() == (
        b"number,lr,model,status,value.loss,value.best,seconds,gpu,slot,tries,peak_mb,gpu_mb,cpu_seconds,cause,error,log\r\n"
        b"0,1e-3,mlp,COMPLETED,0.25,True,2.5,0,0,1,512.5,20480.0,2.125,returned,,.gpu_pool/jobs/0/output.log\r\n"
        b'1,1e-4,cnn,FAILED,,,1.0,1,0,2,,,,error,"ValueError: no ""x"", see above",.gpu_pool/jobs/1/output.log\r\n'
        b"2,1e-5,mlp,QUEUED,,,,,,0,,,,,,\r\n"
    )


def test_a_job_on_several_gpus_names_them_all() -> None:
    table = results(seen(start(0, 1.0, "0.3", "MIG-a.b.1")))
    assert (table.column("gpu"), table.column("slot")) == (["0,MIG-a.b"], ["3,1"])


def test_a_job_that_a_resume_has_taken_over_has_its_log_and_no_try() -> None:
    table = results(seen(queued(0), end(0, 0.0, attempt=0, cause="resumed", value=1, seconds=9.0)))
    assert (table.column("tries"), table.column("log")) == ([0], [".gpu_pool/jobs/0/output.log"])


def test_what_became_of_a_job_is_lost_where_all_is_over_and_nobody_has_said() -> None:
    view = seen(*SWEEP, start(2, 5.0, "0.0"))
    assert results(view).column("status") == ["COMPLETED", "FAILED", "RUNNING"]
    assert results(view, over=True).column("status") == ["COMPLETED", "FAILED", "LOST"]


def test_an_error_of_gpu_pools_own_is_a_sentence_and_another_one_has_its_type() -> None:
    view = seen(
        end(0, 1.0, "FAILED", error_type="JobCrashedError", error_text="was killed by SIGKILL"),
        end(1, 1.0, "FAILED", error_type="KeyError", error_text="'x'"),
        end(2, 1.0, "FAILED", error_type="AssertionError", error_text=""),
        end(3, 1.0, "FAILED", error_type="E", error_text="x" * 5000),
    )
    *errors, long = results(view).column("error")
    assert errors == ["was killed by SIGKILL", "KeyError: 'x'", "AssertionError"]
    assert long == "E: " + "x" * 996 + "…"


VALUES = {
    "a number": (0.5, {"value": 0.5}),
    "nothing": (None, {}),
    "true": (True, {"value": True}),
    "a text": ("good", {"value": "good"}),
    "a dict": ({"loss": 1, "name": "x"}, {"value.loss": 1, "value.name": "x"}),
    "a dict in a dict": ({"val": {"loss": 1}}, {"value.val.loss": 1}),
    "numbers": ([1, 2.5, None], {"value.0": 1, "value.1": 2.5}),
    "a single number in a list": ([7], {"value.0": 7}),
    "texts": (["a", "ü"], {"value": '["a", "ü"]'}),
    "lists": ([[1, 2], [3]], {"value": "[[1, 2], [3]]"}),
    "many numbers": (list(range(17)), {"value": str(list(range(17)))}),
    "many keys": ({str(k): k for k in range(65)}, {"value": json.dumps({str(k): k for k in range(65)})}),
    "nothing in a dict": ({}, {"value": "{}"}),
    "nothing in a list": ([], {"value": "[]"}),
    "two keys of one name": ({"a.b": 1, "a": {"b": 2}}, {"value": '{"a.b": 1, "a": {"b": 2}}'}),
}


@pytest.mark.parametrize(("value", "cells"), VALUES.values(), ids=VALUES)
def test_a_value_has_a_column_for_each_of_its_parts_where_these_are_few(value: Any, cells: dict[str, Any]) -> None:
    assert value_cells(value) == [cells]


def test_values_of_different_shapes_stand_side_by_side() -> None:
    assert value_cells(1, {"loss": 2}, None, [3]) == [{"value": 1}, {"value.loss": 2}, {}, {"value.0": 3}]


def test_a_value_deep_in_itself_ends_in_one_cell() -> None:
    deep: Any = 1
    for _ in range(50):
        deep = {"x": deep}
    (cells,) = value_cells(deep)
    assert list(cells) == ["value" + ".x" * 8]


def test_keys_that_are_other_ones_in_each_job_make_no_columns() -> None:
    assert value_cells(*({f"k{num}": num} for num in range(300)))[7] == {"value": '{"k7": 7}'}


def test_there_is_a_column_for_values_before_there_are_any() -> None:
    assert of_values(None).of(Kind.VALUE) == ["value"]


def test_an_override_that_is_called_like_one_of_our_columns_is_found_beside_it() -> None:
    view = seen(
        queued(0, "status=a", "value.loss=1", "override.status=x", "lr=1"),
        queued(1, "status=b", "value.loss=2", "override.status=y", "lr=2"),
        end(0, 1.0, value={"loss": 0.5}),
    )
    table = results(view)
    assert table.of(Kind.OVERRIDE) == ["override.override.status", "override.value.loss", "override.status", "lr"]
    assert table.column("override.override.status") == ["a", "b"]
    assert table.column("override.status") == ["x", "y"]
    assert (table.column("status"), table.column("value.loss")) == (["COMPLETED", "QUEUED"], [0.5, None])


# --- the cells ---

CELLS = {
    "nothing": (None, ""),
    "true": (True, "True"),
    "false": (False, "False"),
    "a float, in full": (0.1 + 0.2, "0.30000000000000004"),
    "not a number": (math.nan, "nan"),
    "infinity": (-math.inf, "-inf"),
    "the largest integer of 64 bits": (2**63 - 1, "9223372036854775807"),
    "the least": (-(2**63), "-9223372036854775808"),
    "one more": (2**63, "9.2233720368547758e+18"),
    "an integer beyond all floats": (10**400, "1.0000000000000000e+400"),
    "a number, as it was written": ("-1e-3", "-1e-3"),
    "a signed one": ("+5.", "+5."),
    "infinity, as it was written": ("-inf", "-inf"),
    "a formula": ("=1+1", "'=1+1"),
    "a formula of another program": ("@SUM(A1)", "'@SUM(A1)"),
    "a formula with a sign": ("-2+3", "'-2+3"),
    "a command": ("+cmd|' /C calc'!A0", "'+cmd|' /C calc'!A0"),
    "a formula after a tab": ("\t=1", "'\t=1"),
    "an option": ("--flag", "'--flag"),
    "colours": ("\x1b[31mred\x9b0m", "\\x1b[31mred\\x9b0m"),
    "a null": ("a\0b", "a\\x00b"),
    "quotes": ('say "a"', '"say ""a"""'),
    "a comma": ("[1,2]", '"[1,2]"'),
    "a line feed": ("a\nb", '"a\nb"'),
    "a carriage return": ("\rb", "\\x0db"),
    "a turn of the direction of writing": ("a\u202eb", "a\\u202eb"),
    "letters of many alphabets": ("größe=大きい🐍", "größe=大きい🐍"),
    "half a character": ("\ud800", "\\ud800"),
    "a long text": ("x" * 10_000, "x" * 10_000),
}


@pytest.mark.parametrize(("cell", "text"), CELLS.values(), ids=CELLS)
def test_a_cell_is_written_so(cell: Any, text: str) -> None:
    assert as_csv([["a", cell, "b"]]) == f"a,{text},b\r\n".encode()


def test_an_override_that_is_a_quoted_text_is_in_its_cell_as_the_job_has_it() -> None:
    texts = {
        "'t0'": "t0",
        '"a,b"': "a,b",
        r"'it\'s'": "it's",
        r"'a\\b'": r"a\b",
        "''": "",
        "'a' 'b'": "'a' 'b'",
        "['a']": "['a']",
        "'": "'",
        "'a\"": "'a\"",
        "0.1": "0.1",
    }
    table = results(seen(*(queued(num, f"x={text}") for num, text in enumerate(texts))))
    assert dict(zip(texts, table.column("x"), strict=True)) == texts


NA = {"", "#N/A", "N/A", "NA", "NULL", "NaN", "None", "nan", "null"}


def type_of(cells: Sequence[str]) -> str:
    """The dtype that pandas.read_csv gives to a column: what all of its cells are, those of NA aside.

    NA are some words (of which those above are what can come up here) and make a column of integers one of floats.
    """
    there = [cell for cell in cells if cell not in NA]
    if there and all(re.fullmatch(r"[+-]?\d+", cell) and -(2**63) <= int(cell) < 2**63 for cell in there):
        return "int64" if len(there) == len(cells) else "float64"
    number = re.compile(r"[+-]?((\d+\.?\d*|\.\d+)(e[+-]?\d+)?|inf|infinity)", re.IGNORECASE)
    if all(number.fullmatch(cell) for cell in there):
        return "float64"
    if len(there) == len(cells) and all(cell.lower() in {"true", "false"} for cell in there):
        return "bool"
    return "object"


TYPES = {
    "integers": ([1, -2], "int64"),
    "integers and nothing": ([1, None], "float64"),
    "floats of all kinds": ([1e-300, math.nan, math.inf, None, 3], "float64"),
    "an integer that no column of integers holds": ([1, 2**70, -1], "float64"),
    "an integer beyond all floats": ([0.5, 10**400], "float64"),
    "truths": ([True, False], "bool"),
    "numbers of the command line": (["1e-3", "-5", "+2", "null"], "float64"),
    "truths of the command line": (["true", "false"], "bool"),
    "words": (["cnn", "mlp"], "object"),
    "formulas": (["=1", "-x"], "object"),
}


@pytest.mark.parametrize(("column", "dtype"), TYPES.values(), ids=TYPES)
def test_a_column_is_read_back_as_what_it_is(column: list[Any], dtype: str) -> None:
    written = as_csv([["x", cell] for cell in column]).decode()
    assert type_of([row[1] for row in csv.reader(io.StringIO(written, newline=""))]) == dtype


# --- the file ---


def test_a_real_sweep_can_be_read_from_its_directory_alone(tmp_path: Path) -> None:
    def task(x: int) -> dict[str, float]:
        if x == 2:
            raise ValueError(x)
        return {"half": x / 2}

    outcomes(tmp_path, task, {"x": 1}, {"x": 2})
    files, view = SweepFiles(str(tmp_path)), View()
    reader = JournalReader(files.journal)
    view.take(reader.new())
    reader.close()
    write_results(files, view)
    write_page(files, view)
    rows = read(files)
    assert [(row["x"], row["status"], row["value.half"]) for row in rows] == [
        ("1", "COMPLETED", "0.5"),
        ("2", "FAILED", ""),
    ]
    assert all(Path(tmp_path, row["log"]).is_file() and float(row["peak_mb"]) > 0 for row in rows)
    text = Path(files.page).read_text(encoding="utf-8")
    assert "ValueError: 2" in text
    assert "Traceback (most recent call last)" in text
    assert not list(Path(files.root).glob("*.new"))


def test_a_link_in_the_place_of_the_file_is_replaced_and_not_followed(files: SweepFiles, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    aside = Path(files.root, f"results.csv.{os.getpid()}.new")
    for link in (Path(files.results), aside):
        link.symlink_to(tmp_path / "precious")
    write_results(files, seen(*SWEEP))
    assert (tmp_path / "precious").read_text() == "mine"
    assert not Path(files.results).is_symlink()
    assert len(read(files)) == 3


def test_where_it_cannot_be_put_in_its_place_what_was_there_stays_and_nothing_else(files: SweepFiles) -> None:
    Path(files.results, "below").mkdir(parents=True)
    with pytest.raises(OSError, match="results"):
        write_results(files, seen(*SWEEP))
    assert Path(files.results, "below").is_dir()
    assert os.listdir(files.root) == ["journal.jsonl"]


def test_whoever_keeps_files_to_himself_keeps_these_too(files: SweepFiles) -> None:
    before = os.umask(0o077)
    try:
        write_page(files, seen(*SWEEP))
    finally:
        os.umask(before)
    assert os.stat(files.page).st_mode & 0o777 == 0o600


def test_the_page_shows_the_top_of_a_crash_however_many_threads_there_were(files: SweepFiles) -> None:
    os.makedirs(files.job_dir(1))
    dump = "Fatal Python error: Aborted\n\nCurrent thread 0x01 (most recent call first):\n"
    dump += '  File "/home/me/train.py", line 7 in step\n\n'
    dump += 'Thread 0x02 (most recent call first):\n  File "/usr/lib/python3.11/queue.py", line 1 in get\n\n' * 400
    Path(files.output(1)).write_text(dump)
    crash = {"error_type": "JobCrashedError", "error_text": "was ended by SIGABRT", "cause": "crash"}
    write_page(files, seen(*SWEEP[:-1], end(1, 4.0, "FAILED", attempt=2, **crash)))
    assert "Fatal Python error: Aborted" in Path(files.page).read_text()


def test_of_a_long_log_whole_lines_of_its_end_are_read(tmp_path: Path) -> None:
    log = tmp_path / "output.log"
    log.write_bytes(b"".join(b"line %d \xff\n" % k for k in range(10_000)))
    tail = read_tail(str(log))
    assert tail is not None
    assert len(tail) <= 16 << 10
    assert tail.startswith("line 8")
    assert tail.endswith("line 9999 \ufffd\n")
    log.write_bytes(b"one line\n")
    assert read_tail(str(log)) == "one line\n"


def test_what_is_not_a_log_is_not_waited_for_and_not_followed(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "link").symlink_to("secret")
    names = ("pipe", "link", "missing", ".")
    assert [read_tail(str(tmp_path / name)) for name in names] == [None] * 4


# --- when ---


def test_news_is_written_at_once_and_then_not_for_a_while() -> None:
    turn = Turn(every_s=1.0)
    assert turn.wait_s(now=5.0) is None
    turn.news()
    assert turn.wait_s(now=5.0) == 0.0
    turn.taken(now=5.0)
    assert turn.wait_s(now=5.5) is None
    turn.news()
    turn.news()
    assert turn.wait_s(now=5.25) == 0.75
    assert turn.wait_s(now=9.0) == 0.0


LAYOUT = Layout((Device("0"),), 1)


class Desk:
    """Reports with a clock that stands, and what they have said and written."""

    def __init__(self, files: SweepFiles, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.written: list[str] = []
        self.said: list[str] = []
        self.fault: Exception | None = None
        monkeypatch.setattr(_report, "write_results", self._writer("results.csv"))
        monkeypatch.setattr(_report, "write_page", self._writer("sweep.html"))
        self.reports = Reports(files, lambda text, _: self.said.append(text), clock=lambda: self.now)

    def _writer(self, name: str) -> Callable[..., None]:
        def write(_: SweepFiles, view: View, over: bool) -> None:
            if self.fault is not None:
                raise self.fault
            self.written.append(f"{name}: {len(view.jobs)}{' over' if over else ''}")

        return write

    def show(self, *events: dict[str, Any]) -> list[str]:
        """What was written because of them."""
        before = len(self.written)
        for event in events:
            self.reports.show(event)
        return self.written[before:]


@pytest.fixture
def desk(files: SweepFiles, monkeypatch: pytest.MonkeyPatch) -> Desk:
    return Desk(files, monkeypatch)


def test_results_are_written_at_most_once_a_second_and_the_page_each_half_minute(desk: Desk) -> None:
    desk.reports.begin(LAYOUT)
    assert desk.show(queued(0)) == []
    assert desk.show(start(0, 1.0, "0.0")) == ["sweep.html: 1"]
    assert desk.show(end(0, 2.0)) == ["results.csv: 1"]
    assert desk.show(queued(1), end(1, 2.0)) == []
    desk.now += 1.0
    assert desk.show(queued(2), end(2, 3.0)) == ["results.csv: 3"]
    desk.now += 29.0
    assert desk.show(end(2, 3.0)) == ["results.csv: 3", "sweep.html: 3"]
    desk.reports.summary()
    assert desk.written[-2:] == ["results.csv: 3 over", "sweep.html: 3 over"]


def test_the_jobs_of_earlier_launches_are_in_them_too(files: SweepFiles) -> None:
    first, second = (launch(), queued(0, "x=1"), end(0, 1.0)), (launch(), queued(1, "x=2"), end(1, 2.0, value=3))
    lines = "".join(json.dumps(event) + "\n" for event in (*first, *second[:2]))  # it may be ahead of what is shown
    Path(files.journal).write_text(lines)
    reports: Display = Reports(files, lambda text, _: pytest.fail(text))
    reports.begin(LAYOUT)
    for event in second:
        reports.show(event)
    reports.summary()
    assert [(row["x"], row["status"], row["value"]) for row in read(files)] == [
        ("1", "COMPLETED", ""),
        ("2", "COMPLETED", "3"),
    ]
    assert Path(files.page).exists()


def test_what_came_too_soon_is_written_without_another_event(desk: Desk) -> None:
    desk.reports.begin(LAYOUT)
    assert desk.show(end(0, 1.0)) == ["results.csv: 1", "sweep.html: 1"]
    assert desk.show(end(1, 1.0)) == []
    assert desk.reports.tick() == 1.0  # the results, which do not wait for the page
    desk.now += 1.0
    assert desk.reports.tick() == 29.0
    assert desk.written[-1] == "results.csv: 2"
    desk.now += 29.0
    assert desk.reports.tick() is None
    assert desk.written[-1] == "sweep.html: 2"


def test_a_disk_that_was_full_for_a_while_is_not_worth_a_word(desk: Desk) -> None:
    desk.reports.begin(LAYOUT)
    desk.fault = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert desk.show(end(0, 1.0)) == []
    desk.now += 60.0
    desk.fault = None
    desk.reports.tick()
    assert desk.written == ["results.csv: 1", "sweep.html: 1"]
    desk.reports.summary()
    assert desk.said == []


@pytest.mark.parametrize(
    ("fault", "why"),
    [(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "No space left on device"), (KeyError("x"), "KeyError: 'x'")],
)
def test_what_could_not_be_written_in_the_end_is_said_once_for_each_file_and_ends_nothing(
    desk: Desk, fault: Exception, why: str
) -> None:
    desk.reports.begin(LAYOUT)
    desk.fault = fault
    desk.show(end(0, 1.0), end(1, 1.0))
    desk.reports.summary()
    assert [re.sub("^.*/", "", text) for text in desk.said] == [
        f"{name} could not be written ({why}); `gpu-pool report` writes it again"
        for name in ("results.csv", "sweep.html")
    ]
