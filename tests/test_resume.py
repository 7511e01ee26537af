"""What an earlier sweep left in the directory: what completed is taken over, whatever else is there, and nothing more.

The first part lays out files and reads them. The second runs real sweeps, in which a process of the sweep kills all of
them, itself last, at a chosen point: first it suspends them, so that nobody sees anybody else go.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support import RunApp, write_sweeper

from hydra_plugins.hydra_gpu_pool_launcher import GpuPool
from hydra_plugins.hydra_gpu_pool_launcher._errors import ConfigurationError
from hydra_plugins.hydra_gpu_pool_launcher._files import SweepFiles, claim, make_private_dir
from hydra_plugins.hydra_gpu_pool_launcher._journal import Journal, begin
from hydra_plugins.hydra_gpu_pool_launcher._model import Cause, Job, Report, Status
from hydra_plugins.hydra_gpu_pool_launcher._resume import Earlier, take_up
from hydra_plugins.hydra_gpu_pool_launcher._returns import (
    clear_result,
    digest,
    load_report,
    save_return,
    set_aside_logs,
)
from hydra_plugins.hydra_gpu_pool_launcher._settled import settle

# --- what is done: files laid out by hand ---


@dataclass
class Laid:
    """A sweep directory with what an earlier sweep left in it, laid out by hand."""

    files: SweepFiles
    journal: Journal

    @property
    def top(self) -> Path:
        return Path(self.files.sweep_dir)

    def queued(self, num: int, *overrides: str) -> None:
        self.journal.append("queued", job=num, overrides=overrides)

    def ran(self, num: int, *overrides: str, status: Status = Status.COMPLETED, directory: str | None = None) -> None:
        """A job that ended by itself, in the directory of its number unless told otherwise."""
        self.queued(num, *overrides)
        self.journal.append("start", job=num, attempt=1, pid=1, slots=["cpu.0"])
        self.saved(num, *overrides, status=status, directory=str(num) if directory is None else directory)
        self.journal.append("end", job=num, attempt=1, status=status.value, seconds=2.5, cpu_s=1.5, peak_mb=100.0)

    def saved(self, num: int, *overrides: str, status: Status = Status.COMPLETED, directory: str) -> None:
        """The files of such a job alone: no line in the journal tells of them."""
        payload = pickle.dumps({"num": num})
        make_private_dir(self.files.job_dir(num))
        report = Report(status, None, None, num * 10, digest(payload), None, overrides, directory)
        save_return(self.files, num, payload, report)
        self.wrote(directory, f"by {num}")

    def wrote(self, directory: str, text: str) -> None:
        (self.top / directory).mkdir(parents=True, exist_ok=True)
        (self.top / directory / "checkpoint").write_text(text)

    def was_stopped(self, num: int, *overrides: str) -> None:
        """All that the journal tells of a job that was told to stop."""
        self.queued(num, *overrides)
        self.journal.append("start", job=num, attempt=1, pid=1, slots=["cpu.0"])
        self.journal.append("stop", job=num, why="Ctrl-C")

    def resume(self, *overrides: str) -> Earlier:
        """What a launch of these jobs, one override each, finds."""
        return take_up(self.files, [Job(num, (override,)) for num, override in enumerate(overrides)])

    def kept(self, *overrides: str) -> list[int]:
        return sorted(self.resume(*overrides).kept)

    def checkpoint(self, directory: str) -> str:
        return (self.top / directory / "checkpoint").read_text()

    def directories(self) -> list[str]:
        return sorted(path.name for path in self.top.iterdir() if path.name != ".gpu_pool")

    def numbers(self) -> list[str]:
        return sorted(path.name for path in Path(self.files.root, "jobs").iterdir())


@pytest.fixture
def laid(tmp_path: Path) -> Iterator[Laid]:
    files = SweepFiles(str(tmp_path / "sweep"))
    lock = claim(files, os.getpid(), fresh=False)
    journal = begin(files)
    yield Laid(files, journal)
    os.close(journal.fd)
    os.close(lock)


def test_a_job_that_completed_with_the_same_overrides_is_kept_with_its_value_and_figures(laid: Laid) -> None:
    laid.ran(0, "x=1")
    laid.ran(1, "x=2")
    earlier = laid.resume("x=1", "x=2", "x=3")
    assert (sorted(earlier.kept), earlier.moved, earlier.left, earlier.known) == ([0, 1], (), (), 2)
    outcome = earlier.kept[1].outcome
    assert (outcome.status, outcome.cause, outcome.value, outcome.by_itself) == (
        Status.COMPLETED,
        Cause.RESUMED,
        10,
        True,
    )
    assert earlier.kept[1].facts == {"seconds": 2.5, "cpu_s": 1.5, "peak_mb": 100.0}
    assert laid.directories() == ["0", "1"]


def test_a_directory_without_an_earlier_sweep_is_told_from_one_with(laid: Laid) -> None:
    assert laid.resume("x=1") == Earlier({}, (), (), 0, empty=True)
    laid.ran(7, "x=1")
    assert laid.resume("x=1") == Earlier({}, (), (), 0, empty=False)


def test_the_outcome_alone_is_enough_where_the_journal_is_lost(laid: Laid) -> None:
    laid.ran(0, "x=1")
    os.truncate(laid.files.journal, 0)
    assert laid.kept("x=1") == [0]


def test_overrides_are_compared_in_their_order_and_whole(laid: Laid) -> None:
    laid.ran(0, "x=1", "y=2")
    assert take_up(laid.files, [Job(0, ("x=1", "y=2"))]).kept
    assert not take_up(laid.files, [Job(0, ("y=2", "x=1"))]).kept


@pytest.mark.parametrize("status", [Status.FAILED, Status.CANCELLED])
def test_what_did_not_complete_runs_again_in_its_directory_and_its_result_is_gone(laid: Laid, status: Status) -> None:
    laid.ran(0, "x=1", status=status)
    earlier = laid.resume("x=1")
    assert (earlier.kept, earlier.moved, earlier.left, earlier.known) == ({}, (), (), 1)
    assert laid.checkpoint("0") == "by 0"
    assert load_report(laid.files, 0) is None
    assert not os.path.exists(laid.files.returned(0))


def test_an_outcome_cut_at_any_byte_is_not_done(laid: Laid) -> None:
    laid.ran(0, "x=1")
    outcome, returned = Path(laid.files.outcome(0)), Path(laid.files.returned(0))
    whole, payload = outcome.read_bytes(), returned.read_bytes()
    for end in range(0, len(whole), 7):
        outcome.write_bytes(whole[:end])
        returned.write_bytes(payload)
        assert laid.kept("x=1") == []
    assert laid.directories() == ["0"]


def test_a_return_cut_at_any_byte_is_not_done(laid: Laid) -> None:
    laid.ran(0, "x=1")
    outcome, returned = Path(laid.files.outcome(0)), Path(laid.files.returned(0))
    whole, payload = outcome.read_bytes(), returned.read_bytes()
    for end in range(len(payload)):
        outcome.write_bytes(whole)
        returned.write_bytes(payload[:end])
        assert laid.kept("x=1") == []


_WHOLE = {"status": "COMPLETED", "error_type": None, "error_text": None, "value": 1, "traceback": None}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"null",
        b"3",
        b"{}",
        b"\xff\xfe",
        b"[" * 100_000,
        json.dumps({**_WHOLE, "overrides": ["x=1"], "directory": "0"}).encode(),
        json.dumps({**_WHOLE, "sha256": 3, "overrides": ["x=1"], "directory": "0"}).encode(),
        json.dumps({**_WHOLE, "sha256": "", "overrides": "x=1", "directory": ["0"]}).encode(),
        json.dumps({**_WHOLE, "sha256": "", "overrides": [["x=1"]], "directory": 7}).encode(),
        json.dumps({**_WHOLE, "status": "GREAT", "sha256": "", "overrides": ["x=1"]}).encode(),
        json.dumps({**_WHOLE, "status": [], "sha256": "", "overrides": ["x=1"]}).encode(),
    ],
)
def test_an_outcome_that_is_something_else_is_not_done_and_the_journal_says_whose_it_was(
    laid: Laid, content: bytes
) -> None:
    laid.ran(0, "x=1")
    Path(laid.files.outcome(0)).write_bytes(content)
    assert laid.resume("x=1").moved == ()
    Path(laid.files.outcome(0)).write_bytes(content)
    assert laid.resume("x=2").moved == ("0.1",)


def test_an_outcome_of_a_pool_that_did_not_name_overrides_is_not_done(laid: Laid) -> None:
    laid.ran(0, "x=1")
    path = Path(laid.files.outcome(0))
    outcome = json.loads(path.read_bytes())
    del outcome["overrides"], outcome["directory"]
    path.write_text(json.dumps(outcome))
    assert load_report(laid.files, 0) is not None
    assert laid.kept("x=1") == []


@pytest.mark.parametrize("kind", ["directory", "pipe", "link"])
@pytest.mark.parametrize("which", ["outcome", "returned"])
def test_what_is_no_file_is_no_result_and_hangs_nobody(laid: Laid, tmp_path: Path, which: str, kind: str) -> None:
    laid.ran(0, "x=1")
    path = laid.files.outcome(0) if which == "outcome" else laid.files.returned(0)
    os.rename(path, tmp_path / "elsewhere")
    {"directory": os.mkdir, "pipe": os.mkfifo, "link": lambda path: os.symlink(tmp_path / "elsewhere", path)}[kind](
        path
    )
    assert laid.kept("x=1") == []
    assert not os.path.lexists(path)
    assert laid.directories() == ["0"]


@pytest.mark.parametrize("which", ["job", "outcome", "returned"])
def test_what_others_could_have_written_is_not_done(laid: Laid, which: str) -> None:
    laid.ran(0, "x=1")
    path = {"job": laid.files.job_dir, "outcome": laid.files.outcome, "returned": laid.files.returned}[which](0)
    os.chmod(path, os.stat(path).st_mode | 0o020)
    assert laid.kept("x=1") == []
    assert laid.numbers() == ["0.1" if which == "job" else "0"]
    assert laid.directories() == ["0"]
    make_private_dir(laid.files.job_dir(0))  # as the next try does


def test_a_file_of_another_user_is_not_done(laid: Laid, monkeypatch: pytest.MonkeyPatch) -> None:
    laid.ran(0, "x=1")
    found, fstat = os.lstat(laid.files.outcome(0)), os.fstat

    def anothers(fd: int) -> os.stat_result:
        result = fstat(fd)
        if result.st_ino != found.st_ino:
            return result
        return os.stat_result((*result[:4], result.st_uid + 1, *result[5:]))

    monkeypatch.setattr(os, "fstat", anothers)
    assert laid.kept("x=1") == []


def test_a_directory_behind_a_link_is_not_done_and_the_job_gets_one_of_its_own(laid: Laid, tmp_path: Path) -> None:
    laid.ran(0, "x=1")
    os.rename(laid.files.job_dir(0), tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", laid.files.job_dir(0))
    assert laid.kept("x=1") == []
    make_private_dir(laid.files.job_dir(0))
    assert sorted(os.listdir(tmp_path / "elsewhere")) == ["outcome.json", "return.pickle"]


_sprung: list[str] = []


class _Trap:
    """Its pickle leaves a mark when it is loaded."""

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return _sprung.append, ("sprung",)


def test_a_return_is_not_loaded_to_see_whether_it_is_whole(laid: Laid) -> None:
    laid.ran(0, "x=1")
    payload = pickle.dumps(_Trap())
    save_return(laid.files, 0, payload, Report(Status.COMPLETED, None, None, 1, digest(payload), None, ("x=1",), "0"))
    assert laid.kept("x=1") == [0]
    assert not _sprung


# --- what was told to stop ---


def test_what_a_job_returned_after_it_was_told_to_stop_is_not_done_though_nobody_set_it_aside(laid: Laid) -> None:
    laid.ran(0, "x=1")
    laid.journal.append("stop", job=0, why="Ctrl-C")
    assert laid.kept("x=1") == []
    assert os.listdir(laid.files.job_dir(0)) == ["late.pickle"]


def test_a_stop_before_the_last_start_was_of_an_earlier_try(laid: Laid) -> None:
    laid.queued(0, "x=1")
    laid.journal.append("start", job=0)
    laid.journal.append("stop", job=0, why="took too long")
    laid.journal.append("start", job=0)
    laid.saved(0, "x=1", directory="0")
    assert laid.kept("x=1") == [0]


def test_a_stop_of_another_job_is_none_of_this_one(laid: Laid) -> None:
    laid.ran(0, "x=1")
    laid.journal.append("stop", job=1, why="Ctrl-C")
    assert laid.kept("x=1") == [0]


def test_a_late_return_is_not_done_however_often_the_sweep_is_resumed_before_the_job_starts(laid: Laid) -> None:
    """A resumed sweep journals its jobs, and is killed before it starts any."""
    laid.ran(0, "x=1")
    laid.journal.append("stop", job=0, why="Ctrl-C")
    for _ in range(3):
        assert laid.kept("x=1") == []
        laid.queued(0, "x=1")


def test_a_job_that_completed_before_the_line_of_its_start_was_written_is_done(laid: Laid) -> None:
    """It was stopped in one sweep, and ran in the next, whose supervisor was killed right after it forked the job."""
    laid.ran(0, "x=1")
    laid.journal.append("stop", job=0, why="Ctrl-C")
    assert laid.kept("x=1") == []
    laid.queued(0, "x=1")
    laid.saved(0, "x=1", directory="0")
    assert laid.kept("x=1") == [0]


# --- a damaged journal ---

_LINES = [
    b"[]",
    b"3",
    b"null",
    b'"end"',
    b"{}",
    b"[" * 100_000,
    b"\xff\x00",
    b'{"event": "queued", "job": [0], "overrides": ["x=9"]}',
    b'{"event": "queued", "job": "0", "overrides": ["x=9"]}',
    b'{"event": "queued", "job": false, "overrides": ["x=9"]}',
    b'{"event": ["stop"], "job": 0}',
    b'{"event": {"stop": 1}, "job": 0}',
    b'{"event": "end", "job": 0, "seconds": "long", "cpu_s": [1], "peak_mb": true}',
    b'{"event": "queued", "job": 0, "overrides": 3}',
    b'{"event": "queued", "job": 0}',
    b'{"job": 0}',
    b'{"event": "stop", "jo',
]


@pytest.mark.parametrize("line", _LINES, ids=lambda line: line[:24].decode(errors="replace"))
def test_a_line_that_is_none_of_ours_changes_nothing(laid: Laid, line: bytes) -> None:
    laid.ran(0, "x=1")
    os.write(laid.journal.fd, line + b"\n")
    kept = laid.resume("x=1").kept
    assert sorted(kept) == [0]
    assert {type(figure) for figure in kept[0].facts.values()} <= {float}


def test_a_journal_cut_at_any_byte_loses_no_job_that_completed(laid: Laid) -> None:
    laid.ran(0, "x=1")
    whole = Path(laid.files.journal).read_bytes()
    for end in range(0, len(whole), 5):
        Path(laid.files.journal).write_bytes(whole[:end])
        os.close(begin(laid.files).fd)
        assert laid.kept("x=1") == [0]


# --- what does not match ---


def test_a_job_with_other_overrides_is_moved_aside_whole(laid: Laid) -> None:
    laid.ran(0, "x=1")
    laid.ran(1, "x=2")
    earlier = laid.resume("x=0", "x=2")
    assert (sorted(earlier.kept), earlier.moved, earlier.left) == ([1], ("0.1",), ())
    assert laid.directories() == ["0.1", "1"]
    assert laid.checkpoint("0.1") == "by 0"
    assert laid.numbers() == ["0.1", "1"]
    assert sorted(os.listdir(laid.files.job_dir("0.1"))) == ["aside.json", "outcome.json", "return.pickle"]


def test_what_was_moved_aside_before_is_not_overwritten(laid: Laid) -> None:
    for x in range(3):
        laid.ran(0, f"x={x}")
        laid.wrote("0", f"x={x}")
        laid.resume(f"x={x + 1}")
    assert [laid.checkpoint(f"0.{k}") for k in (1, 2, 3)] == ["x=0", "x=1", "x=2"]
    assert laid.numbers() == ["0.1", "0.2", "0.3"]


def test_not_even_an_empty_directory_of_that_name_is_overwritten(laid: Laid) -> None:
    laid.ran(0, "x=1")
    (laid.top / "0.1").mkdir()
    assert laid.resume("x=0").moved == ("0.2",)


def test_a_job_whose_overrides_nothing_tells_is_another_job(laid: Laid) -> None:
    laid.ran(0, "x=1")
    os.truncate(laid.files.journal, 0)
    Path(laid.files.outcome(0)).write_text("{")
    assert laid.resume("x=1").moved == ("0.1",)


def test_a_job_that_was_killed_with_other_overrides_leaves_no_checkpoint_to_the_new_one(laid: Laid) -> None:
    laid.queued(0, "x=1")
    laid.journal.append("start", job=0)
    make_private_dir(laid.files.job_dir(0))
    laid.wrote("0", "half")
    assert laid.resume("x=2").moved == ("0.1",)
    assert laid.checkpoint("0.1") == "half"


def test_a_job_that_was_only_queued_with_other_overrides_has_nothing_to_move(laid: Laid) -> None:
    laid.queued(0, "x=1")
    laid.wrote("0", "somebody else's")
    assert laid.resume("x=2") == Earlier({}, (), (), 1, empty=False)
    assert laid.checkpoint("0") == "somebody else's"


def test_files_are_their_outcomes_where_another_job_of_that_number_was_only_queued(laid: Laid) -> None:
    laid.ran(0, "x=1")
    laid.queued(0, "x=2")
    assert laid.kept("x=1") == [0]
    assert laid.resume("x=2").moved == ("0.1",)


def test_a_start_in_the_journal_is_enough_where_the_pools_own_files_were_removed(laid: Laid) -> None:
    laid.ran(0, "x=1")
    shutil.rmtree(laid.files.job_dir(0))
    assert laid.resume("x=2").moved == ("0.1",)


def test_neither_the_start_nor_the_figures_of_one_job_are_those_of_the_next_that_has_its_number(laid: Laid) -> None:
    """The second job was queued, and never started, as far as the journal tells."""
    laid.ran(0, "x=1")
    shutil.rmtree(laid.files.job_dir(0))
    shutil.rmtree(laid.top / "0")
    laid.queued(0, "x=2")
    laid.wrote("0", "somebody else's")
    assert laid.resume("x=3") == Earlier({}, (), (), 1, empty=False)
    laid.saved(0, "x=2", directory="0")
    assert laid.resume("x=2").kept[0].facts == {}


def test_numbers_that_this_launch_has_not_are_left_alone(laid: Laid) -> None:
    laid.ran(0, "x=1")
    laid.ran(5, "x=5")
    laid.resume("x=1", "x=2")
    assert laid.directories() == ["0", "5"]
    assert laid.numbers() == ["0", "5"]


def test_a_job_that_made_no_directory_is_still_moved_aside(laid: Laid) -> None:
    laid.ran(0, "x=1", directory="gone")
    (laid.top / "gone/checkpoint").unlink()
    (laid.top / "gone").rmdir()
    assert laid.resume("x=2").moved == (".gpu_pool/jobs/0.1",)


def test_the_directory_is_the_one_that_hydra_made(laid: Laid) -> None:
    laid.ran(0, "x=1", directory="runs/x=1")
    laid.wrote("0", "somebody else's")
    assert laid.resume("x=2").moved == ("runs/x=1.1",)
    assert laid.checkpoint("0") == "somebody else's"
    assert laid.checkpoint("runs/x=1.1") == "by 0"


def test_a_directory_that_is_also_that_of_a_job_that_stays_stays_with_it(laid: Laid) -> None:
    laid.ran(0, "x=1", directory="all")
    laid.ran(1, "x=2", directory="all")
    earlier = laid.resume("x=0", "x=2")
    assert (sorted(earlier.kept), earlier.moved, earlier.left) == ([1], (".gpu_pool/jobs/0.1",), ("all",))
    assert laid.directories() == ["all"]


@pytest.mark.parametrize("theirs", ["all", "all/1"])
def test_a_later_batch_finds_the_directories_of_its_jobs_where_they_were(laid: Laid, theirs: str) -> None:
    laid.ran(0, "x=1", directory="all")
    laid.ran(5, "x=2", directory=theirs)
    assert laid.resume("x=0").left == ("all",)
    assert laid.directories() == ["all"]


def test_a_directory_that_only_jobs_of_other_overrides_share_is_moved_once(laid: Laid) -> None:
    laid.ran(0, "x=1", directory="all")
    laid.ran(1, "x=2", directory="all")
    assert laid.resume("x=2", "x=1").moved == ("all.1", ".gpu_pool/jobs/1.1")
    assert laid.directories() == ["all.1"]


@pytest.mark.parametrize(
    "directory",
    ["..", ".", "../other", "/", "0/../..", ".gpu_pool", ".gpu_pool/jobs", ".gpu_pool.1", "x/../.gpu_pool/jobs/5"],
)
def test_nothing_is_moved_but_what_is_in_the_sweeps_directory_and_not_the_pools(laid: Laid, directory: str) -> None:
    laid.ran(0, "x=1")
    laid.ran(5, "x=5")
    (laid.top / ".gpu_pool.1").mkdir()
    (laid.top.parent / "other").mkdir()
    path = Path(laid.files.outcome(0))
    path.write_text(json.dumps({**json.loads(path.read_bytes()), "directory": directory}))
    assert laid.resume("x=2").moved == (".gpu_pool/jobs/0.1",)
    assert laid.directories() == [".gpu_pool.1", "0", "5"]
    assert sorted(os.listdir(laid.top.parent)) == ["other", "sweep"]
    assert laid.numbers() == ["0.1", "5"]


@pytest.mark.parametrize("directory", ["a\0b", "\ud800", "x" * 5000, "/".join("x" * 3000)])
def test_a_name_that_no_directory_can_have_moves_nothing_and_does_not_raise(laid: Laid, directory: str) -> None:
    laid.ran(0, "x=1")
    path = Path(laid.files.outcome(0))
    path.write_text(json.dumps({**json.loads(path.read_bytes()), "directory": directory}))
    assert laid.resume("x=2").moved == (".gpu_pool/jobs/0.1",)


@pytest.mark.parametrize("directory", ["link", "link/inside"])
def test_no_link_is_followed_to_what_is_moved(laid: Laid, tmp_path: Path, directory: str) -> None:
    (tmp_path / "precious/inside").mkdir(parents=True)
    os.symlink(tmp_path / "precious", laid.top / "link")
    laid.ran(0, "x=1", directory=directory)
    assert laid.resume("x=2").left == (directory,)
    assert (tmp_path / "precious/inside").is_dir()
    assert (laid.top / directory / "checkpoint").read_text() == "by 0"


def test_what_cannot_be_moved_stops_the_sweep_in_one_sentence(laid: Laid, monkeypatch: pytest.MonkeyPatch) -> None:
    laid.ran(0, "x=1")

    rename = os.rename

    def refused(source: str, to: str) -> None:
        if os.path.isdir(source):
            raise PermissionError(13, "Permission denied", source)
        rename(source, to)

    monkeypatch.setattr(os, "rename", refused)
    with pytest.raises(ConfigurationError, match=r"/0: Permission denied"):
        laid.resume("x=2")


# --- what was moved aside, and is wanted again ---


def test_what_another_job_displaced_comes_back_whole_with_its_value_and_figures(laid: Laid) -> None:
    laid.ran(0, "x=1")
    laid.ran(1, "x=2")
    laid.resume("x=1 t=9", "x=2 t=9")
    laid.was_stopped(0, "x=1 t=9")
    laid.wrote("0", "by the slip")
    earlier = laid.resume("x=1", "x=2")
    assert (sorted(earlier.kept), earlier.back, earlier.moved, earlier.left) == ([0, 1], 2, ("0.2",), ())
    assert [earlier.kept[num].outcome.value for num in (0, 1)] == [0, 10]
    assert earlier.kept[0].facts == {"seconds": 2.5, "cpu_s": 1.5, "peak_mb": 100.0}
    assert {name: laid.checkpoint(name) for name in laid.directories()} == {
        "0": "by 0",
        "0.2": "by the slip",
        "1": "by 1",
    }
    assert laid.numbers() == ["0", "1"]


def test_what_came_back_stays_though_the_journal_ends_with_a_stop_of_that_number(laid: Laid) -> None:
    """The same job ran in between; and the sweep that brought this result back was killed before it wrote a line."""
    laid.ran(0, "x=1")
    laid.resume("x=2")
    laid.was_stopped(0, "x=1")
    for _ in range(3):
        assert laid.kept("x=1") == [0]


def test_what_was_moved_aside_after_it_was_told_to_stop_does_not_come_back_as_done(laid: Laid) -> None:
    laid.ran(0, "x=1")
    laid.journal.append("stop", job=0, why="Ctrl-C")
    laid.resume("x=2")
    laid.queued(0, "x=2")
    assert laid.kept("x=1") == []


def test_what_ran_again_where_a_job_had_come_back_is_judged_by_its_own_stop(laid: Laid) -> None:
    laid.ran(0, "x=1")
    laid.resume("x=2")
    assert laid.kept("x=1") == [0]
    clear_result(laid.files, 0)  # as at each start
    laid.was_stopped(0, "x=1")
    laid.saved(0, "x=1", directory="0")
    assert laid.kept("x=1") == []


def test_two_jobs_of_one_number_change_places_as_often_as_they_are_asked_for(laid: Laid) -> None:
    laid.ran(0, "x=1")
    laid.resume("x=2")
    laid.ran(0, "x=2")
    laid.wrote("0", "by the other")
    for _ in range(3):
        assert laid.resume("x=1").back == 1
        assert laid.checkpoint("0") == "by 0"
        assert laid.resume("x=2").back == 1
        assert laid.checkpoint("0") == "by the other"
    assert len(laid.directories()) == len(laid.numbers()) == 2


def test_of_several_that_were_moved_aside_the_newest_that_is_done_comes_back(laid: Laid) -> None:
    for k in range(1, 12):
        laid.ran(0, "x=1")
        laid.wrote("0", f"time {k}")
        laid.resume("x=2")
    Path(laid.files.returned("0.11")).write_bytes(b"damaged")
    assert laid.kept("x=1") == [0]
    assert laid.checkpoint("0") == "time 10"


def test_what_was_moved_aside_is_judged_as_strictly_as_what_was_not(laid: Laid) -> None:
    for num in range(4):
        laid.ran(num, f"x={num}")
    laid.resume(*["y"] * 4)
    Path(laid.files.outcome("0.1")).unlink()
    os.chmod(laid.files.job_dir("1.1"), 0o777)
    os.chmod(laid.files.aside("2.1"), 0o666)
    assert laid.kept(*(f"x={num}" for num in range(4))) == [3]
    assert laid.directories() == ["0.1", "1.1", "2.1", "3"]


@pytest.mark.parametrize("content", ["", "[]", "{}", "3", '{"directory": "0.1", "figures": 3}', "[" * 100_000])
def test_a_record_that_is_none_brings_nothing_back(laid: Laid, content: str) -> None:
    laid.ran(0, "x=1")
    laid.resume("x=2")
    Path(laid.files.aside("0.1")).write_text(content)
    assert laid.kept("x=1") == []
    assert laid.numbers() == ["0.1"]


@pytest.mark.parametrize("directory", ["5", "0.x", "0.1/..", "../other", "..", ".gpu_pool", "0.\0", "0.9"])
def test_a_record_moves_no_directory_that_is_not_the_jobs(laid: Laid, directory: str) -> None:
    laid.ran(0, "x=1")
    laid.ran(5, "x=5")
    (laid.top.parent / "other").mkdir()
    laid.resume("x=2")
    Path(laid.files.aside("0.1")).write_text(json.dumps({"directory": directory, "figures": {}}))
    assert laid.kept("x=1") == [0]
    assert laid.directories() == ["0.1", "5"]
    assert sorted(os.listdir(laid.top.parent)) == ["other", "sweep"]


def test_a_directory_that_has_taken_the_name_in_the_meantime_is_not_overwritten_and_both_are_told_apart(
    laid: Laid,
) -> None:
    laid.ran(0, "x=1", directory="run")
    laid.resume("x=2")
    laid.wrote("run", "somebody else's")
    for _ in range(2):
        assert laid.kept("x=1") == [0]
        assert (laid.checkpoint("run"), laid.checkpoint("run.1")) == ("somebody else's", "by 0")
        laid.resume("x=2")


def test_a_directory_that_several_jobs_shared_comes_back_with_them(laid: Laid) -> None:
    laid.ran(0, "x=1", directory="all")
    laid.ran(1, "x=2", directory="all")
    laid.resume("y", "y")
    assert laid.kept("x=1", "x=2") == [0, 1]
    assert laid.directories() == ["all"]


class Killed(BaseException):
    """In place of SIGKILL: nothing is done about it."""


@pytest.mark.parametrize("done", [True, False], ids=["after", "before"])
@pytest.mark.parametrize("wanted", ["x=1", "x=2", "x=3"])
@pytest.mark.parametrize("killed", ["x=1", "x=2"])
def test_a_resume_that_is_killed_at_any_step_changes_nothing_for_the_next(
    laid: Laid, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: str, wanted: str, done: bool
) -> None:
    """Job x=1 is done, and moved aside; x=2, in its place, is done or was stopped. Then one is asked for."""
    laid.ran(0, "x=1")
    laid.wrote("0", "x=1")
    laid.resume("x=2")
    laid.ran(0, "x=2")
    laid.wrote("0", "x=2")
    laid.journal.append("stop", job=0, why="Ctrl-C") if killed == "x=1" else None
    if killed == "x=2":
        laid.resume("x=1")
    shutil.copytree(laid.top, tmp_path / "before")

    def outcome() -> tuple[list[int], dict[str, str]]:
        kept = laid.kept(wanted)
        return kept, {name: laid.checkpoint(name) for name in laid.directories()}

    steps = 0
    expected = outcome()
    while True:
        shutil.rmtree(laid.top)
        shutil.copytree(tmp_path / "before", laid.top)
        left = [steps]

        def step(original: Callable[..., Any], left: list[int] = left) -> Callable[..., Any]:
            def killing(*args: Any, **kwargs: Any) -> Any:
                left[0] -= 1
                if left[0] < 0 and not done:
                    raise Killed
                answer = original(*args, **kwargs)
                if left[0] < 0:
                    raise Killed
                return answer

            return killing

        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", step(os.rename))
            patch.setattr(os, "unlink", step(os.unlink))
            try:
                laid.kept(killed)
            except Killed:
                steps += 1
            else:
                break
        kept, checkpoints = outcome()
        assert kept == expected[0], steps
        assert not kept or checkpoints["0"] == expected[1]["0"], steps
        assert sorted(checkpoints.values()) == sorted(expected[1].values()), steps
        assert (laid.kept("x=1"), laid.checkpoint("0")) == ([0], "x=1"), steps
    assert steps > 4


# --- a sweep that a new one has moved aside ---


def test_what_completed_in_a_sweep_that_was_moved_aside_is_told_and_left_there(laid: Laid) -> None:
    for num in range(3):
        laid.ran(num, f"x={num}")
    laid.journal.append("stop", job=2, why="Ctrl-C")
    os.rename(laid.files.root, f"{laid.files.root}.1")
    make_private_dir(os.path.dirname(laid.files.job_dir(0)))
    os.close(begin(laid.files).fd)
    earlier = laid.resume("x=0", "x=1", "x=2")
    assert (earlier.kept, earlier.elsewhere) == ({}, (2, ".gpu_pool.1"))
    assert laid.resume("x=0", "x=5", "x=2").elsewhere == (1, ".gpu_pool.1")
    assert laid.resume("x=5").elsewhere is None
    (laid.top / ".gpu_pool.2").mkdir()
    (laid.top / ".gpu_pool.x").mkdir()
    assert laid.resume("x=0").elsewhere == (1, ".gpu_pool.1")


# --- what else goes with it ---


def test_each_try_has_a_log_of_its_own_and_the_earlier_ones_keep_their_order(laid: Laid) -> None:
    make_private_dir(laid.files.job_dir(0))
    set_aside_logs(laid.files, 0)
    for text in ("first", "second", "third"):
        set_aside_logs(laid.files, 0)
        Path(laid.files.output(0)).write_text(text)
    logs = {path.name: path.read_text() for path in Path(laid.files.job_dir(0)).iterdir()}
    assert logs == {"output.1.log": "first", "output.2.log": "second", "output.log": "third"}


def test_a_start_that_the_system_refused_leaves_no_empty_log_behind(laid: Laid) -> None:
    make_private_dir(laid.files.job_dir(0))
    Path(laid.files.output(0)).write_text("")
    set_aside_logs(laid.files, 0)
    assert os.listdir(laid.files.job_dir(0)) == ["output.log"]


def test_a_result_of_another_job_of_that_number_is_not_given_where_the_supervisor_is_gone(laid: Laid) -> None:
    laid.saved(0, "x=1", directory="0")
    assert settle(Job(0, ("x=1",)), laid.files, None).payload == {"num": 0}
    assert "was lost" in str(settle(Job(0, ("x=2",)), laid.files, None).error)


def test_calls_of_plain_python_are_not_resumed() -> None:
    with pytest.raises(ConfigurationError, match=r"^resume=true: only with Hydra, .*; leave it at false\.$"):
        GpuPool(resume=True)


# --- whole sweeps ---

APP = """
import json, os, signal, sys
import hydra
from hydra.core.hydra_config import HydraConfig
from hydra_plugins.hydra_gpu_pool_launcher import _journal, _records, _result, _returns

signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it
MAIN, KILL, STOP = os.getpid(), os.environ.get("KILL"), os.environ.get("STOP")

def family(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        children = file.read().split()
    return [pid, *(each for child in children for each in family(int(child)))]

def kill_all():
    others = [pid for pid in family(MAIN) if pid != os.getpid()]
    for signum in (signal.SIGSTOP, signal.SIGKILL):
        for pid in others:
            os.kill(pid, signum)
    os.kill(os.getpid(), signal.SIGKILL)

def kill_at(owner, name, point, after=False):
    original = getattr(owner, name)

    def killing(*args, **kwargs):
        here = point(*args, **kwargs) == KILL
        if here and not after:
            kill_all()
        answer = original(*args, **kwargs)
        if here and after:
            kill_all()
        return answer

    setattr(owner, name, killing)

kill_at(_returns, "write_whole", lambda path, _: "before " + "/".join(path.split("/")[-2:]))
kill_at(_result, "save_return", lambda files, num, *_: f"saved {num}", after=True)
kill_at(_journal.Journal, "append", lambda self, event, **facts: f"line {event} {facts.get('job', '')}".strip())
kill_at(os, "rename", lambda path, _: "move " + "/".join(path.split("/")[-2:]))
if KILL == "supervisor":
    _records.take_up = lambda *_: os.kill(os.getpid(), signal.SIGKILL)

class Stopped(Exception):
    pass

def stop(*_):
    raise Stopped

@hydra.main(version_base=None, config_path=None)
def main(cfg):
    num = HydraConfig.get().job.num
    with open("runs", "a") as file:
        file.write(f"{num}:{cfg.x} ")
    with open(os.path.join(HydraConfig.get().runtime.output_dir, "checkpoint"), "a") as file:
        file.write(f"{cfg.x} ")
    print("here", cfg.x)
    if KILL == f"in {num}":
        kill_all()
    if STOP and num == 1:
        signum = getattr(signal, STOP)
        signal.signal(signum, stop)
        try:
            os.kill(MAIN, signum)
            while True:
                signal.pause()
        except Stopped:
            return "late"
    if str(cfg.x) in os.environ.get("FAIL", "").split():
        raise ValueError(f"no {cfg.x}")
    if cfg.x == 7:
        sys.exit(0)
    return {"x": cfg.x, "more": (1, 2.5, {cfg.x})}

main()
"""

SWEEP = """
import json
next_number = 0
for xs in json.loads(os.environ["BATCHES"]):
    batch = [[*arguments, f"+x={x}"] for x in xs]
    for ret in self.launcher.launch(batch, initial_job_idx=next_number):
        print("RETURN", ret.status.name, repr(ret._return_value), flush=True)
        print("WHOLE", repr(ret), flush=True)
    if "AGAIN" not in os.environ:
        next_number += len(xs)
"""


@dataclass
class Ran:
    """One sweep that has ended: what it printed, which jobs it executed ("number:x"), and how it ended."""

    process: subprocess.CompletedProcess[str]
    executed: list[str]

    def _printed(self, word: str) -> list[str]:
        assert self.process.returncode == 0, self.process.stdout + self.process.stderr
        return [line[len(word) + 1 :] for line in self.process.stdout.splitlines() if line.startswith(f"{word} ")]

    @property
    def returns(self) -> list[str]:
        return self._printed("RETURN")

    @property
    def whole(self) -> list[str]:
        return self._printed("WHOLE")

    @property
    def lines(self) -> list[str]:
        """What a person is told of the resuming."""
        return self.said("resume: ")

    def said(self, words: str) -> list[str]:
        """What comes after these words, of each line that has them."""
        return [line.partition(words)[2] for line in self.process.stdout.splitlines() if words in line]

    def was_killed(self) -> Ran:
        assert self.process.returncode == -signal.SIGKILL, self.process.stdout + self.process.stderr
        return self


@dataclass
class Sweeps:
    """Runs sweeps over x in one directory, each with ``resume``, on one slot: the jobs run in their order.

    With ``slip``, each job has one more override.
    """

    run_app: RunApp
    _read: int = field(default=0)

    def __call__(
        self, *batches: list[int], before: str = "", slip: bool = False, arguments: tuple[str, ...] = (), **env: str
    ) -> Ran:
        write_sweeper(self.run_app.directory, SWEEP)
        process = self.run_app(
            before + APP,
            *("-m", "hydra/launcher=gpu_pool", "hydra/sweeper=own", "hydra.sweep.dir=sweep"),
            *("hydra.launcher.cpu_slots=1", "hydra.launcher.resume=true", *arguments, *(["+t=100"] if slip else [])),
            env={"BATCHES": json.dumps(batches), **env},
        )
        runs = self.run_app.directory / "runs"
        text = runs.read_text() if runs.exists() else ""
        executed, self._read = text[self._read :].split(), len(text)
        return Ran(process, executed)

    @property
    def top(self) -> Path:
        return self.run_app.directory / "sweep"

    def checkpoints(self) -> dict[str, str]:
        """Which values of x were at work in which directory."""
        found = self.top.rglob("checkpoint")
        return {str(path.parent.relative_to(self.top)): path.read_text().strip() for path in sorted(found)}

    def journal(self, event: str) -> list[dict[str, Any]]:
        lines = (self.top / ".gpu_pool/journal.jsonl").read_bytes().splitlines()
        return [entry for entry in map(json.loads, lines) if entry["event"] == event]


@pytest.fixture
def sweeps(run_app: RunApp) -> Sweeps:
    return Sweeps(run_app)


def good(*xs: int) -> list[str]:
    return [f"COMPLETED { ({'x': x, 'more': (1, 2.5, {x})})!r}" if x != 7 else "COMPLETED None" for x in xs]


@pytest.mark.parametrize(
    ("kill", "executed"),
    [
        ("line resumed", ["0:1", "1:7", "2:3"]),
        ("line queued 1", ["0:1", "1:7", "2:3"]),
        ("in 0", ["0:1", "1:7", "2:3"]),
        ("in 1", ["1:7", "2:3"]),
        ("before 1/return.pickle", ["1:7", "2:3"]),
        ("before 1/outcome.json", ["1:7", "2:3"]),
        ("saved 1", ["2:3"]),
        ("line end 1", ["2:3"]),
        ("line done", []),
    ],
)
def test_a_sweep_whose_every_process_was_killed_goes_on_with_exactly_what_had_not_completed(
    sweeps: Sweeps, kill: str, executed: list[str]
) -> None:
    sweeps([1, 7, 3], KILL=kill).was_killed()
    second = sweeps([1, 7, 3])
    assert second.returns == good(1, 7, 3)
    assert second.executed == executed


def test_what_a_resumed_sweep_gives_back_is_all_that_the_first_one_gave_back(sweeps: Sweeps) -> None:
    first = sweeps([1, 7, 3])
    assert first.lines == ["no earlier sweep was found in sweep (hydra.sweep.dir), so every job is run"]
    second = sweeps([1, 7, 3], arguments=("hydra.launcher.cpu_slots=2",))
    assert second.lines == ["3 of 3 jobs had completed and are not run again"]
    assert (second.executed, second.whole) == ([], first.whole)
    third = sweeps([1, 7, 3])
    assert (third.executed, third.whole) == ([], first.whole)
    ends = sweeps.journal("end")
    assert [end["cause"] for end in ends] == ["returned"] * 3 + ["resumed"] * 6
    for figure in ("value", "seconds", "cpu_s", "peak_mb", "status", "by_itself"):
        assert [end[figure] for end in ends] == [end[figure] for end in ends[:3]] * 3


def test_a_resumed_sweep_that_is_killed_again_and_again_runs_nothing_twice(sweeps: Sweeps) -> None:
    points = ["in 1", "line queued 2", "line end 0", "saved 1", "line end 1", "before 2/outcome.json", "saved 2"]
    executed = [sweeps([1, 2, 3], KILL=point).was_killed().executed for point in points]
    assert executed == [["0:1", "1:2"], [], [], ["1:2"], [], ["2:3"], ["2:3"]]
    last = sweeps([1, 2, 3])
    assert (last.executed, last.returns) == ([], good(1, 2, 3))
    assert "not started" not in last.process.stdout


@pytest.mark.parametrize("signum", ["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("kill", ["", "saved 1"])
def test_what_a_stopped_job_returned_is_never_taken_for_its_result(sweeps: Sweeps, signum: str, kill: str) -> None:
    """With ``kill``, everybody is killed in the middle of the stop: nobody is left to set the late return aside."""
    stopped = sweeps([1, 2, 3], STOP=signum, KILL=kill)
    assert stopped.process.returncode != 0
    assert stopped.executed == ["0:1", "1:2"]
    again = sweeps([1, 2, 3])
    assert (again.executed, again.returns) == (["1:2", "2:3"], good(1, 2, 3))
    assert (sweeps.top / ".gpu_pool/jobs/1/late.pickle").exists()


def test_failed_jobs_run_again_and_the_first_trys_log_stays(sweeps: Sweeps) -> None:
    first = sweeps([1, 2, 3], FAIL="2")
    assert first.returns[1] == "FAILED ValueError('no 2')"
    second = sweeps([1, 2, 3])
    assert (second.executed, second.returns) == (["1:2"], good(1, 2, 3))
    assert second.lines == ["2 of 3 jobs had completed and are not run again"]
    logs = sweeps.top / ".gpu_pool/jobs/1"
    assert "ValueError: no 2" in (logs / "output.1.log").read_text()
    assert (logs / "output.log").read_text() == "here 2\n"
    assert sweeps.checkpoints()["1"] == "2 2"


def test_a_value_put_in_front_of_the_others_overwrites_nothing_that_was_finished(sweeps: Sweeps) -> None:
    sweeps([1, 2, 3])
    second = sweeps([0, 1, 2, 3])
    assert second.lines == [
        "0 of 4 jobs had completed and are not run again; 3 earlier jobs had other overrides, "
        "now in sweep/0.1, sweep/1.1, sweep/2.1"
    ]
    assert (second.executed, second.returns) == (["0:0", "1:1", "2:2", "3:3"], good(0, 1, 2, 3))
    assert sweeps.checkpoints() == {"0": "0", "0.1": "1", "1": "1", "1.1": "2", "2": "2", "2.1": "3", "3": "3"}
    assert sweeps([0, 1, 2, 3]).executed == []


@pytest.mark.parametrize("kill", ["move sweep/0", "move jobs/0", "move sweep/1", "line resumed", "line queued 0"])
def test_a_sweep_killed_while_it_moves_things_aside_goes_on_with_it(sweeps: Sweeps, kill: str) -> None:
    sweeps([1, 2])
    sweeps([0, 1], KILL=kill).was_killed()
    last = sweeps([0, 1])
    assert (last.executed, last.returns) == (["0:0", "1:1"], good(0, 1))
    assert sweeps.checkpoints() == {"0": "0", "0.1": "1", "1": "1", "1.1": "2"}


def test_directories_named_for_their_overrides_are_moved_by_that_name(sweeps: Sweeps) -> None:
    by_name = ("hydra.sweep.subdir=${hydra.job.override_dirname}",)
    sweeps([1, 2], arguments=by_name)
    second = sweeps([0, 2], arguments=by_name)
    assert second.lines == [
        "1 of 2 jobs had completed and is not run again; 1 earlier job had other overrides, now in sweep/+x=1.1"
    ]
    assert (second.executed, second.returns) == (["0:0"], good(0, 2))
    assert sweeps.checkpoints() == {"+x=0": "0", "+x=1.1": "1", "+x=2": "2"}


def test_a_directory_that_all_jobs_share_stays_with_those_that_are_kept(sweeps: Sweeps) -> None:
    shared = ("hydra.sweep.subdir=all",)
    sweeps([1, 2], arguments=shared)
    second = sweeps([0, 2], arguments=shared)
    assert second.lines == [
        "1 of 2 jobs had completed and is not run again; 1 earlier job had other overrides, "
        "now in sweep/.gpu_pool/jobs/0.1; not moved, since it is not such a job's alone: sweep/all"
    ]
    assert (second.executed, second.returns) == (["0:0"], good(0, 2))
    assert sweeps.checkpoints() == {"all": "1 2 0"}


def test_a_sweep_resumed_with_a_slip_and_interrupted_costs_no_result(sweeps: Sweeps) -> None:
    first = sweeps([1, 2, 3])
    slip = sweeps([1, 2, 3], slip=True, STOP="SIGINT")
    assert slip.executed == ["0:1", "1:2"]
    again = sweeps([1, 2, 3])
    assert again.lines == [
        "3 of 3 jobs had completed and are not run again, 3 of them brought back from where an earlier resume had "
        "moved them; 2 earlier jobs had other overrides, now in sweep/0.2, sweep/1.2"
    ]
    assert (again.executed, again.whole) == ([], first.whole)
    assert sweeps.checkpoints() == {"0": "1", "0.2": "1", "1": "2", "1.2": "2", "2": "3"}
    assert [end["seconds"] for end in sweeps.journal("end")[-3:]] == [
        end["seconds"] for end in sweeps.journal("end")[:3]
    ]


@pytest.mark.parametrize("kill", ["move jobs/0.1", "move sweep/0.1", "move jobs/1.1", "line resumed", "line end 0"])
def test_a_sweep_killed_while_it_brings_things_back_goes_on_with_it(sweeps: Sweeps, kill: str) -> None:
    first = sweeps([1, 2])
    sweeps([1, 2], slip=True, KILL="in 0").was_killed()
    sweeps([1, 2], KILL=kill).was_killed()
    again = sweeps([1, 2])
    assert (again.executed, again.whole) == ([], first.whole)
    assert sweeps.checkpoints() == {"0": "1", "0.2": "1", "1": "2"}


def test_a_forgotten_resume_is_told_with_what_to_do_and_that_brings_all_of_it_back(sweeps: Sweeps) -> None:
    first = sweeps([1, 2, 3])
    anew = sweeps([1, 2, 3], arguments=("hydra.launcher.resume=false",), STOP="SIGINT")
    do = (
        "to go on with that one, end this one, rename sweep/.gpu_pool to sweep/.gpu_pool.new, "
        "sweep/.gpu_pool.1 to sweep/.gpu_pool, and resume"
    )
    assert anew.said("this is a new sweep; ") == [
        "of the earlier one in this directory, 3 of 3 jobs had completed, and its files are now in sweep/.gpu_pool.1 "
        f"(resume=true keeps what had completed: {do})"
    ]
    resumed = sweeps([1, 2, 3])
    assert resumed.executed == ["1:2", "2:3"]
    assert resumed.lines[0] == f"2 of 3 jobs had completed in an earlier sweep that was moved aside: {do}"
    (sweeps.top / ".gpu_pool").rename(sweeps.top / ".gpu_pool.new")
    (sweeps.top / ".gpu_pool.1").rename(sweeps.top / ".gpu_pool")
    again = sweeps([1, 2, 3])
    assert (again.executed, again.whole) == ([], first.whole)


def test_each_batch_of_a_sweeper_takes_up_its_own_numbers(sweeps: Sweeps) -> None:
    sweeps([1, 2], [3, 4], [5], KILL="in 3").was_killed()
    second = sweeps([1, 2], [3, 4], [5])
    assert (second.executed, second.returns) == (["3:4", "4:5"], good(1, 2, 3, 4, 5))
    assert second.lines == [
        "2 of 2 jobs had completed and are not run again",
        "1 of 2 jobs had completed and is not run again",
    ]
    third = sweeps([1, 2, 9], [4, 5])
    assert (third.executed, third.returns) == (["2:9"], good(1, 2, 9, 4, 5))
    assert sweeps.checkpoints()["2.1"] == "3"


def test_a_sweeper_that_gives_the_same_numbers_again_overwrites_nothing(sweeps: Sweeps) -> None:
    first = sweeps([1, 2], [3, 2], AGAIN="yes")
    assert (first.executed, first.returns) == (["0:1", "1:2", "0:3"], good(1, 2, 3, 2))
    assert sweeps.checkpoints() == {"0": "3", "0.1": "1", "1": "2"}


def test_where_the_supervisor_is_killed_before_it_has_looked_nothing_old_is_taken_for_a_result(sweeps: Sweeps) -> None:
    sweeps([1, 2], FAIL="2")
    second = sweeps([1, 2], KILL="supervisor")
    assert second.executed == []
    assert [line.split("(")[0] for line in second.returns] == ["FAILED JobLostError"] * 2
    assert "before it could begin" in second.returns[0]
    assert sweeps([1, 2]).returns == good(1, 2)


def test_a_resumed_job_whose_return_cannot_be_loaded_any_more_says_how_to_run_it_again(sweeps: Sweeps) -> None:
    sweeps([1])
    broken = sweeps([1], before="import pickle; pickle.loads = lambda _: 1 / 0\n")
    outcome = sweeps.top / ".gpu_pool/jobs/0/outcome.json"
    assert f"it completed in an earlier sweep: to have it run again, remove {outcome}" in broken.returns[0]
    outcome.unlink()
    assert sweeps([1]).returns == good(1)


def test_the_key_on_the_command_line_is_no_override_of_the_jobs(run_app: RunApp) -> None:
    arguments = ("-m", "hydra/launcher=gpu_pool", "hydra.sweep.dir=sweep", "hydra.launcher.cpu_slots=1")
    assert run_app(APP, *arguments, "+x=1,2").returncode == 0
    assert run_app(APP, *arguments, "+x=1,2", "hydra.launcher.resume=true").returncode == 0
    sweeps = Sweeps(run_app)
    assert [line["overrides"] for line in sweeps.journal("queued")] == [["+x=1"], ["+x=2"]] * 2
    assert [line["cause"] for line in sweeps.journal("end")] == ["returned"] * 2 + ["resumed"] * 2
    assert (run_app.directory / "runs").read_text() == "0:1 1:2 "
