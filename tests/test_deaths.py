"""The table of deaths: whatever becomes of a job, the others have their results, and everybody is told the cause.

The rows run in one sweep for each start method, one after another on one slot, with a good job between each two. The
good one also looks whether all that the row before it has left behind is gone when it starts.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from deaths import CANCELLED, COMPLETED, CRASHED, FAILED, Said
from deaths import sweep as sweep_of_deaths

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Hydra 1.3 warns of a main without version_base, and Hydra 1.4 of one with it
    import deaths_app

START_METHODS = ["fork", "forkserver", "spawn"]


@dataclass(frozen=True)
class Row:
    """A kind of end, and what is said of it.

    ``status``: the journal's and the terminal's; ``error``: the type of the JobReturn's exception; ``why``: part of its
    text, of the journal's and of the line in the terminal. ``told_by_main``: only main could meet the error,
    so that the journal does not know of it, and the terminal has two lines.
    """

    kind: str
    status: str
    error: str | None = None
    why: str = ""
    value: Any = None
    told_by_main: bool = False


CUT = "was ended by SIGKILL; perhaps the machine ran out of memory (see dmesg), or somebody sent it"

ROWS = [
    Row("raises", FAILED, "KeyError", "'missing'"),
    Row("raises_what_cannot_be_pickled", FAILED, "JobError", "raised ValueError: <unlocked _thread.lock object"),
    Row("raises_what_cannot_be_unpickled", FAILED, "JobError", "OtherArgumentsError: 1 and 2"),
    Row("raises_keyboard_interrupt", FAILED, "JobError", "raised KeyboardInterrupt"),
    Row("returns_a_lambda", FAILED, "JobError", "returned a value of type function that cannot be sent to the main"),
    Row(
        "returns_what_cannot_be_unpickled", FAILED, "JobError", "NeverLoadable that cannot be sent to the main process"
    ),
    Row(
        "returns_what_main_refuses_to_load",
        COMPLETED,  # it is, for all that its own process can know
        "JobError",
        "returned what the main process cannot load (RuntimeError: not in this process)",
        told_by_main=True,
    ),
    Row("returns_50_mb", COMPLETED, value="50000000 bytes"),
    Row("sys_exit_0", COMPLETED),
    Row("sys_exit_3", FAILED, CRASHED, "called sys.exit(3)"),
    Row("sys_exit_text", FAILED, CRASHED, "called sys.exit('no data')"),
    Row("os_exit_0", FAILED, CRASHED, "ended with exit code 0 and without a result"),
    Row("os_exit_4", FAILED, CRASHED, "ended with exit code 4 and without a result"),
    Row("sigkill", FAILED, CRASHED, CUT),
    Row("segmentation_fault", FAILED, CRASHED, "was ended by SIGSEGV"),
    Row("sigbus", FAILED, CRASHED, "was ended by SIGBUS; perhaps the shared memory is full (see df -h /dev/shm)"),
    Row("sigabrt", FAILED, CRASHED, "was ended by SIGABRT"),
    Row("sigterm_to_itself", CANCELLED, "JobCancelledError", "SIGTERM was sent to its process"),
    Row("sigkill_to_its_group", FAILED, CRASHED, CUT),
    Row("dies_while_it_writes_its_return", FAILED, CRASHED, CUT),
    Row("dies_between_return_and_outcome", FAILED, CRASHED, CUT),
    Row("dies_after_its_outcome", COMPLETED, value=1),
    Row("leaves_a_child", COMPLETED, value=1),
    Row("leaves_a_daemon", COMPLETED, value=1),
    Row("leaves_workers_of_a_data_loader", COMPLETED, value=1),
    Row("leaves_a_child_of_multiprocessing", COMPLETED, value=1),
    Row("leaves_a_thread", COMPLETED, value=1),
    Row("leaves_a_running_executor", COMPLETED, value=1),
    Row("ignores_sigterm_and_is_stopped", CANCELLED, "JobCancelledError", "SIGTERM to the supervisor"),
]
"""The last one ends its sweep: the good job after it is not started."""

REFUSED = [
    Row(
        "cannot_be_forked", FAILED, "JobLostError", "could not be started: [Errno 11] Resource temporarily unavailable"
    ),
    Row("cannot_be_reaped", FAILED, "JobLostError", "left a process that did not die within 0.5 s of SIGKILL"),
]
"""What the system does is injected, in a sweep of their own, on two slots: one of them is lost with the second row."""


@dataclass(frozen=True)
class Told(Said):
    """``numbers``: those of the jobs that are rows, by kind."""

    numbers: dict[str, int]


def sweep(directory: Path, method: str, rows: Sequence[Row], slots: int, **env: str) -> Told:
    kinds = ["good"]
    for row in rows:
        kinds += [row.kind, "good"]
    shutil.copy(deaths_app.__file__, directory / "app.py")
    launcher = {"cpu_slots": slots, "start_method": method, "kill_grace_s": 0.2}
    said = sweep_of_deaths(directory, [[f"+kind={kind}"] for kind in kinds], launcher, env)
    return Told(**vars(said), numbers={kind: num for num, kind in enumerate(kinds) if kind != "good"})


@pytest.fixture(scope="module", params=START_METHODS)
def deaths(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Told:
    rows = [row for row in ROWS if find_spec("torch") or row.kind != "leaves_workers_of_a_data_loader"]
    return sweep(tmp_path_factory.mktemp("deaths"), request.param, rows, 1)


@pytest.fixture(scope="module", params=START_METHODS)
def refused(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Told:
    return sweep(tmp_path_factory.mktemp("refused"), request.param, REFUSED, 2, **{deaths_app.INJECTED: "1,3"})


def assert_told(told: Told, row: Row) -> None:
    num = told.numbers[row.kind]
    ret, end = told.returns[num], told.end(num)
    assert ret["overrides"] == [f"+kind={row.kind}"]
    assert (ret["status"], ret["error"]) == (FAILED if row.error else COMPLETED, row.error)
    assert ret["value"] == row.value
    assert row.why in (ret["text"] or "")
    assert end["status"] == row.status
    lines = [line for line in told.terminal if f"job {num} (+kind={row.kind}) " in line and " started " not in line]
    if row.told_by_main:
        assert [row.why in line for line in lines] == [False, True]
    else:
        assert end["error_type"] == row.error
        assert row.why in (end["error_text"] or "")
        (line,) = lines
        assert f"(+kind={row.kind}) {row.status}" in line
        assert row.why in line


def assert_good(told: Told, num: int) -> None:
    ret, end = told.returns[num], told.end(num)
    assert ret["overrides"] == ["+kind=good"]
    assert (ret["status"], ret["value"]) == (COMPLETED, num * 10), ret["text"]
    assert (end["status"], end["value"], end["error_text"]) == (COMPLETED, num * 10, None)
    assert any(line.endswith(f"job {num} (+kind=good) COMPLETED: {num * 10}") for line in told.terminal)


@pytest.mark.parametrize("row", ROWS[:-1], ids=lambda row: row.kind)
def test_whatever_becomes_of_a_job_is_named_everywhere_and_harms_no_other(deaths: Told, row: Row) -> None:
    if row.kind not in deaths.numbers:
        pytest.skip("torch is not installed")
    assert_told(deaths, row)
    assert_good(deaths, deaths.numbers[row.kind] - 1)
    assert_good(deaths, deaths.numbers[row.kind] + 1)


def test_a_job_that_ignores_sigterm_and_is_stopped_is_cancelled_and_loses_no_result(deaths: Told) -> None:
    assert_told(deaths, ROWS[-1])
    num = deaths.numbers[ROWS[-1].kind]
    assert_good(deaths, num - 1)
    assert deaths.returns[num + 1]["error"] == "JobCancelledError"
    assert "it was not started" in deaths.returns[num + 1]["text"]


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row.kind)
def test_a_job_that_the_system_does_not_start_or_give_back_is_lost_and_harms_no_other(refused: Told, row: Row) -> None:
    assert_told(refused, row)
    assert_good(refused, refused.numbers[row.kind] - 1)
    assert_good(refused, refused.numbers[row.kind] + 1)


def test_an_exception_arrives_with_the_traceback_from_its_job(deaths: Told) -> None:
    assert "in raises\n" in deaths.returns[deaths.numbers["raises"]]["cause"]


@pytest.mark.parametrize(
    ("kind", "files"),
    [
        ("dies_while_it_writes_its_return", {"output.log", "return.pickle.new"}),
        ("dies_between_return_and_outcome", {"output.log", "return.pickle", "outcome.json.new"}),
        ("dies_after_its_outcome", {"output.log", "return.pickle", "outcome.json"}),
    ],
)
def test_the_jobs_that_die_with_their_result_do_so_where_their_rows_say(
    deaths: Told, kind: str, files: set[str]
) -> None:
    job = deaths.directory / f"sweep/.gpu_pool/jobs/{deaths.numbers[kind]}"
    assert {path.name for path in job.iterdir()} == files


def test_every_death_has_its_row() -> None:
    assert [row.kind for row in ROWS + REFUSED] == list(deaths_app.DEATHS)
