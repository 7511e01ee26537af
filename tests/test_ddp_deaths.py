"""The table of deaths of ranks: whatever becomes of one of them, its group ends with it, and everybody is told of what.

The rows run in one sweep for each start method, two groups at once. Each job looks first whether all that the jobs
before it in its slot have started is gone. Under fork and forkserver, the other rank sits in a collective meanwhile;
under spawn, where each rank would have to import torch for that, it only rests, and the rows are those in which the
start of a rank matters.
"""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from deaths import CANCELLED, COMPLETED, CRASHED, FAILED, Said, sweep

pytest.importorskip("torch")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Hydra 1.3 warns of a main without version_base, and Hydra 1.4 of one with it
    import ddp_deaths_app
    import deaths_app


@dataclass(frozen=True)
class Row:
    """A kind of end of one rank, and what is said of its job.

    ``who``: the rank; ``status``: the journal's and the terminal's; ``error``: the type of the JobReturn's exception;
    ``why``: part of its text, of the journal's and of the line in the terminal; ``place``: the rank in whose process
    the exception was raised; None: its text has that. ``spawn``: the row is played under spawn, too.
    """

    kind: str
    status: str
    error: str | None = None
    why: str = ""
    value: Any = None
    who: int = 1
    place: int | None = None
    spawn: bool = False

    def __str__(self) -> str:
        return f"{self.kind}-{self.who}"


def raises(kind: str, error: str, why: str, *, who: int = 1, place: int | None = None, spawn: bool = False) -> Row:
    return Row(kind, FAILED, error, why, who=who, place=who if place is None else place, spawn=spawn)


def dies(kind: str, how: str, *, who: int = 1, spawn: bool = False) -> Row:
    return Row(kind, FAILED, CRASHED, f"lost its rank {who}, which {how}", who=who, spawn=spawn)


def cancels(kind: str, signum: str, *, who: int = 1, spawn: bool = False) -> Row:
    why = f"{signum} was sent to its rank {who}"
    return Row(kind, CANCELLED, "JobCancelledError", why, who=who, spawn=spawn)


NO_VALUE = "returned a value of type function that cannot be sent to the main process"

ROWS = [
    Row("nobody_dies", COMPLETED),
    raises("raises", "KeyError", "'missing'", spawn=True),
    raises("raises", "KeyError", "'missing'", who=0),
    raises("raises_what_cannot_be_pickled", "JobError", "raised ValueError: <unlocked _thread.lock object"),
    raises("raises_what_cannot_be_unpickled", "JobError", "OtherArgumentsError: 1 and 2"),
    raises("raises_keyboard_interrupt", "JobError", "raised KeyboardInterrupt"),
    raises("raises_keyboard_interrupt", "JobError", "raised KeyboardInterrupt", who=0),
    raises("raises_on_its_way_out_of_the_group", "ValueError", "the cause"),
    raises("raises_on_its_way_out_of_the_group", "ValueError", "the cause", who=0),
    raises("raises_and_never_ends", "ValueError", "the cause", spawn=True),
    raises("raises_and_never_ends", "ValueError", "the cause", who=0),
    raises("returns_a_lambda", "JobError", NO_VALUE, who=0),
    Row("returns_a_lambda", COMPLETED),
    raises("returns_what_cannot_be_unpickled", "JobError", "NeverLoadable that cannot be sent to the main", who=0),
    Row("returns_50_mb", COMPLETED, value="50000000 bytes", who=0, spawn=True),
    Row("returns_50_mb", COMPLETED),
    raises("sys_exit_0", "RuntimeError", "by peer", place=0),
    raises("sys_exit_0", "RuntimeError", "by peer", who=0, place=1),
    Row("sys_exit_0_at_its_end", COMPLETED),
    Row("sys_exit_0_at_its_end", COMPLETED, value=None, who=0),
    raises("sys_exit_3", CRASHED, "called sys.exit(3)"),
    raises("sys_exit_3", CRASHED, "called sys.exit(3)", who=0),
    dies("os_exit_0", "ended with exit code 0 and without a result", spawn=True),
    dies("os_exit_0", "ended with exit code 0 and without a result", who=0),
    dies("os_exit_4", "ended with exit code 4 and without a result"),
    dies("sigkill", "was ended by SIGKILL; perhaps the machine ran out of memory"),
    dies("sigkill", "was ended by SIGKILL; perhaps the machine ran out of memory", who=0),
    dies("segmentation_fault", "was ended by SIGSEGV"),
    dies("segmentation_fault", "was ended by SIGSEGV", who=0),
    dies("sigabrt", "was ended by SIGABRT"),
    Row("dies_after_its_outcome", COMPLETED),
    cancels("is_sent_sigterm", "SIGTERM", spawn=True),
    cancels("is_sent_sigterm", "SIGTERM", who=0),
    cancels("is_sent_sigint", "SIGINT", spawn=True),
    cancels("is_sent_sighup", "SIGHUP"),
    cancels("catches_sigterm_and_returns", "SIGTERM"),
    cancels("catches_sigterm_and_returns", "SIGTERM", who=0),
    Row("leaves_a_child", COMPLETED, spawn=True),
    Row("leaves_a_daemon", COMPLETED),
    Row("leaves_a_daemon", COMPLETED, value=1, who=0),
    Row("leaves_workers_of_a_data_loader", COMPLETED),
    Row("ends_with_its_task_in_a_fork_too", COMPLETED, spawn=True),
    Row("ends_with_its_task_in_a_fork_too", COMPLETED, who=0),
    Row("closes_all_descriptors", COMPLETED),
    Row("closes_all_descriptors", COMPLETED, value="without descriptors", who=0),
    raises("closes_all_descriptors_and_raises", "ValueError", "the cause", spawn=True),
    Row("nobody_dies", COMPLETED, spawn=True),
]
"""Where a COMPLETED row has no value of its own, it is ten times the job's number, from rank 0."""


@dataclass(frozen=True)
class Told(Said):
    """``rows``: those that were played, each by the job of its place."""

    rows: list[Row]

    def log(self, row: Row, name: str) -> str:
        return (self.directory / f"sweep/.gpu_pool/jobs/{self.rows.index(row)}/{name}").read_text()


def play(directory: Path, method: str, rows: list[Row]) -> Told:
    shutil.copy(ddp_deaths_app.__file__, directory / "app.py")
    shutil.copy(deaths_app.__file__, directory)
    overrides = [[f"+kind={row.kind}", f"+who={row.who}", f"+waits={row.status != COMPLETED}"] for row in rows]
    launcher = {"cpu_slots": 2, "start_method": method, "kill_grace_s": 0.5, "mode": "ddp", "ddp.nproc_per_node": 2}
    env = {} if method == "spawn" else {ddp_deaths_app.TORCH: "1"}
    return Told(**vars(sweep(directory, overrides, launcher, env)), rows=rows)


def under(method: str, rows: list[Row]) -> Callable[[pytest.TempPathFactory], Told]:
    @pytest.fixture(scope="module", name=method)
    def played(tmp_path_factory: pytest.TempPathFactory) -> Told:
        return play(tmp_path_factory.mktemp(method), method, rows)

    return played


SPAWNED = [row for row in ROWS if row.spawn]

under_fork, under_forkserver, under_spawn = under("fork", ROWS), under("forkserver", ROWS), under("spawn", SPAWNED)


def assert_told(told: Told, row: Row) -> None:
    num = told.rows.index(row)
    ret, end = told.returns[num], told.end(num)
    assert (ret["status"], ret["error"]) == (FAILED if row.error else COMPLETED, row.error), ret["text"]
    assert end["status"] == row.status
    assert end["error_type"] == row.error
    (line,) = (line for line in told.terminal if re.search(rf"job {num} \(.*\) (COMPLETED|FAILED|CANCELLED)", line))
    assert f" {row.status}" in line
    for text in (ret["text"] or "", end["error_text"] or "", line):
        assert row.why in text
    if row.place is not None:
        assert end["error_text"].endswith(f" (rank {row.place})")
        assert f"\n\nIn rank {row.place}:\n\n" in ret["cause"]
    if row.error is None:
        expected = num * 10 if row.value is None and row.kind != "sys_exit_0_at_its_end" else row.value
        assert ret["value"] == (num * 10 if row.who == 1 else expected)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_whatever_becomes_of_a_rank_its_group_ends_and_the_cause_is_named_everywhere(fork: Told, row: Row) -> None:
    assert_told(fork, row)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_so_it_does_where_the_ranks_are_forked_from_a_fresh_interpreter(forkserver: Told, row: Row) -> None:
    assert_told(forkserver, row)


@pytest.mark.parametrize("row", SPAWNED, ids=str)
def test_so_it_does_where_each_rank_is_a_fresh_interpreter(spawn: Told, row: Row) -> None:
    assert_told(spawn, row)


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_no_process_of_any_group_is_alive_after_the_sweep(request: pytest.FixtureRequest, method: str) -> None:
    told: Told = request.getfixturevalue(method)
    records = list(told.directory.glob("left_cpu.*.jsonl"))
    assert len(records) == len(told.rows)
    for record in records:
        for left in map(json.loads, record.read_text().splitlines()):
            assert deaths_app.start_time(left["pid"]) != left["started"], record


def row_of(told: Told, kind: str, who: int) -> Row:
    return next(row for row in told.rows if (row.kind, row.who) == (kind, who))


def test_an_exception_arrives_with_the_traceback_from_its_rank(fork: Told) -> None:
    for kind, frame in {"raises": "in raises\n", "raises_on_its_way_out_of_the_group": "in raises_on_its_way"}.items():
        assert frame in fork.returns[fork.rows.index(row_of(fork, kind, 1))]["cause"]


def test_the_failure_of_another_rank_than_0_is_in_the_log_of_the_job_as_well(fork: Told) -> None:
    row = row_of(fork, "raises", 1)
    assert "KeyError: 'missing'" in fork.log(row, "rank_1.log")
    lines = fork.log(row, "output.log").splitlines()
    assert "gpu_pool: rank 1 raised KeyError: 'missing'" in lines
    assert lines.count("Traceback (most recent call last):") >= 1
