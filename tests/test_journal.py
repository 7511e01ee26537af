"""The sweep's files: cut, changed, or laid as a trap, they are never taken for what they are not."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hydra_plugins.hydra_gpu_pool_launcher import _files, _process
from hydra_plugins.hydra_gpu_pool_launcher._errors import ConfigurationError
from hydra_plugins.hydra_gpu_pool_launcher._files import SweepFiles, claim, make_private_dir, open_to_append
from hydra_plugins.hydra_gpu_pool_launcher._journal import Journal, JournalReader, begin
from hydra_plugins.hydra_gpu_pool_launcher._model import Report, Status
from hydra_plugins.hydra_gpu_pool_launcher._returns import (
    DamagedReturnError,
    digest,
    load_report,
    load_return,
    save_return,
    set_aside_late,
)

VALUE = {"loss": 0.25, "steps": [1, 2, 3]}
PAYLOAD = pickle.dumps(VALUE)
DONE = Report(Status.COMPLETED, None, None, VALUE, digest(PAYLOAD))
OTHERS_MAY_WRITE = 0o022


@pytest.fixture
def files(tmp_path: Path) -> SweepFiles:
    return SweepFiles(str(tmp_path))


@pytest.fixture
def job(files: SweepFiles) -> SweepFiles:
    """A sweep whose lock is taken, with a directory for job 0."""
    os.close(claim(files, os.getpid(), fresh=True))
    make_private_dir(files.job_dir(0))
    return files


@pytest.fixture
def saved(job: SweepFiles) -> SweepFiles:
    """The same, with a return of job 0."""
    save_return(job, 0, PAYLOAD, DONE)
    return job


@contextmanager
def umask(mask: int) -> Iterator[None]:
    old = os.umask(mask)
    try:
        yield
    finally:
        os.umask(old)


@contextmanager
def claimed_by_another_process(files: SweepFiles, main_pid: int, fresh: bool = True) -> Iterator[None]:
    """Another process holds the sweep directory while this context is entered."""
    has_it, tell = os.pipe()
    let_go, keep = os.pipe()

    def hold(_mask: frozenset[int]) -> int:
        os.close(keep)
        claim(files, main_pid, fresh)
        os.write(tell, b"!")
        os.read(let_go, 1)  # until the other end is closed
        return 0

    pid = _process.fork(hold)
    os.close(tell)
    os.close(let_go)
    try:
        assert os.read(has_it, 1) == b"!"
        yield
    finally:
        os.close(keep)
        os.close(has_it)
        assert os.waitpid(pid, 0)[1] == 0


# --- where they are ---


def test_all_of_a_sweeps_files_are_under_its_own_directory_by_the_number_of_the_job() -> None:
    files = SweepFiles("/sweep")
    assert files.root == "/sweep/.gpu_pool"
    assert files.journal == "/sweep/.gpu_pool/journal.jsonl"
    assert files.supervisor_log == "/sweep/.gpu_pool/supervisor.log"
    assert files.lock == "/sweep/.gpu_pool/lock"
    assert files.job_dir(12) == "/sweep/.gpu_pool/jobs/12"
    assert files.output(12) == "/sweep/.gpu_pool/jobs/12/output.log"
    assert files.returned(12) == "/sweep/.gpu_pool/jobs/12/return.pickle"
    assert files.outcome(12) == "/sweep/.gpu_pool/jobs/12/outcome.json"
    assert files.late(12) == "/sweep/.gpu_pool/jobs/12/late.pickle"


def test_to_ask_for_a_path_makes_nothing(tmp_path: Path) -> None:
    SweepFiles(str(tmp_path / "sweep")).returned(0)
    assert not list(tmp_path.iterdir())


# --- returns and outcomes ---


def test_what_a_job_saves_is_what_main_loads(saved: SweepFiles) -> None:
    assert load_report(saved, 0) == DONE
    assert load_return(saved, 0) == VALUE


def test_a_failure_is_saved_with_type_text_and_traceback(job: SweepFiles) -> None:
    report = Report(Status.FAILED, "ValueError", "no – \udc80 ✗", None, digest(PAYLOAD), "Traceback\n  …")
    save_return(job, 0, PAYLOAD, report)
    assert load_report(job, 0) == report


def test_a_second_save_replaces_the_first_and_leaves_nothing_else(saved: SweepFiles) -> None:
    payload = pickle.dumps(1)
    save_return(saved, 0, payload, Report(Status.COMPLETED, None, None, 1, digest(payload)))
    assert load_return(saved, 0) == 1
    assert sorted(os.listdir(saved.job_dir(0))) == ["outcome.json", "return.pickle"]


def test_a_save_that_was_cut_before_leaves_no_trap_for_the_next(job: SweepFiles) -> None:
    for path in (job.returned(0), job.outcome(0)):
        Path(f"{path}.new").write_bytes(b"half")
    save_return(job, 0, PAYLOAD, DONE)
    assert load_return(job, 0) == VALUE


def test_the_outcome_comes_after_the_return_so_that_it_never_speaks_of_one_that_is_not_there(
    job: SweepFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    rename, fsync = os.rename, os.fsync

    def watched_rename(source: str, target: str) -> None:
        steps.append(os.path.basename(target))
        rename(source, target)

    def watched_fsync(fd: int) -> None:
        steps.append("fsync")
        fsync(fd)

    monkeypatch.setattr(os, "rename", watched_rename)
    monkeypatch.setattr(os, "fsync", watched_fsync)
    save_return(job, 0, PAYLOAD, DONE)
    assert steps == ["fsync", "return.pickle", "fsync", "outcome.json"]


def test_a_job_without_an_outcome_has_not_ended_by_itself_though_its_return_is_there(saved: SweepFiles) -> None:
    os.unlink(saved.outcome(0))
    assert load_report(saved, 0) is None
    with pytest.raises(DamagedReturnError, match="outcome"):
        load_return(saved, 0)


def test_an_outcome_cut_at_any_byte_is_none(saved: SweepFiles) -> None:
    path = Path(saved.outcome(0))
    whole = path.read_bytes()
    for end in range(len(whole)):
        path.write_bytes(whole[:end])
        assert load_report(saved, 0) is None


@pytest.mark.parametrize(
    "content",
    [b"[]", b"null", b"{}", b"3", b"\xff\xfe", b'{"status": "GREAT"}', b"[" * 100_000],
    ids=["list", "null", "empty", "number", "not utf-8", "unknown status", "deep"],
)
def test_an_outcome_that_is_something_else_is_none(saved: SweepFiles, content: bytes) -> None:
    Path(saved.outcome(0)).write_bytes(content)
    assert load_report(saved, 0) is None


def test_an_outcome_that_is_no_file_is_none(saved: SweepFiles) -> None:
    os.unlink(saved.outcome(0))
    os.mkdir(saved.outcome(0))
    assert load_report(saved, 0) is None


def test_a_return_cut_at_any_byte_is_not_loaded(saved: SweepFiles) -> None:
    for end in range(len(PAYLOAD)):
        Path(saved.returned(0)).write_bytes(PAYLOAD[:end])
        with pytest.raises(DamagedReturnError, match="is not the file"):
            load_return(saved, 0)


_sprung: list[str] = []


class _Trap:
    """Its pickle leaves a mark when it is loaded."""

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return _spring, ("sprung",)


def _spring(mark: str) -> None:
    _sprung.append(mark)


def test_a_return_that_was_exchanged_is_not_loaded(saved: SweepFiles) -> None:
    Path(saved.returned(0)).write_bytes(pickle.dumps(_Trap()))
    with pytest.raises(DamagedReturnError, match="is not the file"):
        load_return(saved, 0)
    assert not _sprung


def test_a_missing_return_is_a_damaged_one(saved: SweepFiles) -> None:
    os.unlink(saved.returned(0))
    with pytest.raises(DamagedReturnError, match=r"return\.pickle: No such file"):
        load_return(saved, 0)


@pytest.mark.parametrize("mode", [0o020, 0o002])
@pytest.mark.parametrize("which", ["root", "jobs", "job", "file"])
def test_a_return_that_others_could_have_written_is_not_loaded(saved: SweepFiles, which: str, mode: int) -> None:
    path = {
        "root": saved.root,
        "jobs": os.path.dirname(saved.job_dir(0)),
        "job": saved.job_dir(0),
        "file": saved.returned(0),
    }[which]
    os.chmod(path, os.stat(path).st_mode | mode)
    with pytest.raises(DamagedReturnError, match="is a link, or others can write it"):
        load_return(saved, 0)


@pytest.mark.parametrize("which", ["root", "jobs", "job", "file"])
def test_a_return_of_another_user_is_not_loaded(saved: SweepFiles, which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = {
        "root": saved.root,
        "jobs": os.path.dirname(saved.job_dir(0)),
        "job": saved.job_dir(0),
        "file": saved.returned(0),
    }[which]
    found, lstat, fstat = os.lstat(path), os.lstat, os.fstat

    def anothers(result: os.stat_result) -> os.stat_result:
        if (result.st_dev, result.st_ino) != (found.st_dev, found.st_ino):
            return result
        return os.stat_result((*result[:4], result.st_uid + 1, *result[5:]))

    monkeypatch.setattr(os, "lstat", lambda path: anothers(lstat(path)))
    monkeypatch.setattr(os, "fstat", lambda fd: anothers(fstat(fd)))
    with pytest.raises(DamagedReturnError, match=f"{path}: belongs to user {found.st_uid + 1}"):
        load_return(saved, 0)


@pytest.mark.parametrize("which", ["job", "file"])
def test_a_return_behind_a_symbolic_link_is_not_loaded(saved: SweepFiles, which: str, tmp_path: Path) -> None:
    path = saved.job_dir(0) if which == "job" else saved.returned(0)
    os.rename(path, tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", path)
    with pytest.raises(DamagedReturnError):
        load_return(saved, 0)


def test_a_link_laid_where_a_return_is_written_aside_is_not_followed(job: SweepFiles, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    os.symlink(tmp_path / "precious", f"{job.returned(0)}.new")
    save_return(job, 0, PAYLOAD, DONE)
    assert (tmp_path / "precious").read_text() == "mine"
    assert load_return(job, 0) == VALUE


def test_a_late_return_is_kept_where_nothing_takes_it_for_a_result(saved: SweepFiles) -> None:
    set_aside_late(saved, 0)
    assert load_report(saved, 0) is None
    assert os.listdir(saved.job_dir(0)) == ["late.pickle"]
    assert Path(saved.late(0)).read_bytes() == PAYLOAD


def test_to_set_aside_what_is_not_there_changes_nothing(job: SweepFiles) -> None:
    set_aside_late(job, 0)
    assert os.listdir(job.job_dir(0)) == []


# --- the journal ---


@pytest.fixture
def journal(job: SweepFiles) -> Iterator[Journal]:
    journal = Journal(open_to_append(job.journal))
    yield journal
    os.close(journal.fd)


Reading = Callable[[SweepFiles], JournalReader]


@pytest.fixture
def reading() -> Iterator[Reading]:
    """Readers of journals, closed when the test is over."""
    readers: list[JournalReader] = []

    def read(files: SweepFiles) -> JournalReader:
        readers.append(JournalReader(files.journal))
        return readers[-1]

    yield read
    for reader in readers:
        reader.close()


def test_what_is_appended_is_seen_at_once_and_once(reading: Reading, job: SweepFiles, journal: Journal) -> None:
    reader = reading(job)
    journal.append("start", job=0, slots=["0.0"])
    journal.append("end", job=0, value={"ü": [1.5, None]})
    first, second = reader.new()
    assert (first["event"], first["job"], first["slots"]) == ("start", 0, ["0.0"])
    assert second["value"] == {"ü": [1.5, None]}
    assert list(reader.new()) == []
    journal.append("done")
    assert [event["event"] for event in reader.new()] == ["done"]


def test_a_line_is_not_seen_before_it_is_whole_wherever_it_is_cut(
    reading: Reading, job: SweepFiles, journal: Journal
) -> None:
    reader = reading(job)
    line = json.dumps({"event": "start", "text": "ü"}, ensure_ascii=False).encode() + b"\n"
    for end in range(1, len(line)):
        os.write(journal.fd, line[:end])
        assert list(reader.new()) == []
        os.write(journal.fd, line[end:])
        assert list(reader.new()) == [{"event": "start", "text": "ü"}]


def test_a_reader_that_stops_in_the_middle_goes_on_with_the_next_event(
    reading: Reading, job: SweepFiles, journal: Journal
) -> None:
    for num in range(3):
        journal.append("end", job=num)
    reader = reading(job)
    assert next(reader.new())["job"] == 0
    assert [event["job"] for event in reader.new()] == [1, 2]


def test_events_still_come_when_the_directory_is_removed(reading: Reading, job: SweepFiles, journal: Journal) -> None:
    journal.append("end", job=0)
    reader = reading(job)
    assert [event["job"] for event in reader.new()] == [0]
    shutil.rmtree(job.root)
    journal.append("end", job=1)
    os.close(claim(job, os.getpid(), fresh=False))
    again = begin(job)
    again.owed = journal.owed
    again.append("end", job=2)
    os.close(again.fd)
    assert [event["job"] for event in reader.new()] == [1, 2], "what could not be written is not lost either"


def test_a_reader_begins_where_it_is_told_to(job: SweepFiles, journal: Journal) -> None:
    journal.append("end", job=0)
    with contextlib.closing(JournalReader(job.journal, os.fstat(journal.fd).st_size)) as reader:
        journal.append("end", job=1)
        assert [event["job"] for event in reader.new()] == [1]


def test_a_journal_that_is_not_there_is_an_error_at_once(job: SweepFiles) -> None:
    with pytest.raises(FileNotFoundError):
        JournalReader(job.journal)


def test_a_line_that_the_system_takes_in_pieces_is_written_whole(
    reading: Reading, job: SweepFiles, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:7]))
    journal.append("end", job=0, error_text="x" * 100)
    (event,) = reading(job).new()
    assert event["error_text"] == "x" * 100


# --- the lock ---


def test_a_second_live_sweep_is_refused_by_the_first_ones_pid(files: SweepFiles) -> None:
    with (
        claimed_by_another_process(files, main_pid=4242),
        pytest.raises(
            ConfigurationError, match=rf"process 4242\) is running in {files.sweep_dir}; .*hydra\.sweep\.dir"
        ),
    ):
        claim(files, os.getpid(), fresh=True)


def test_a_refused_sweep_changes_nothing_of_the_first_one(files: SweepFiles) -> None:
    with claimed_by_another_process(files, main_pid=4242):
        Path(files.journal).write_text("the first one's\n")
        for fresh in (True, False):
            with pytest.raises(ConfigurationError):
                claim(files, os.getpid(), fresh)
        assert Path(files.journal).read_text() == "the first one's\n"
        assert Path(files.lock).read_text() == "4242\n"
        assert os.listdir(files.sweep_dir) == [".gpu_pool"]


def test_a_directory_is_free_again_when_its_holder_has_ended(files: SweepFiles) -> None:
    with claimed_by_another_process(files, main_pid=123456789):
        pass
    os.close(claim(files, 7, fresh=False))
    assert Path(files.lock).read_text() == "7\n"


def test_a_fresh_sweep_moves_the_earlier_ones_aside_and_overwrites_none(files: SweepFiles) -> None:
    for text in ("first", "second", "third"):
        fd = claim(files, os.getpid(), fresh=True)
        assert os.listdir(os.path.join(files.root, "jobs")) == []
        assert not os.path.exists(files.journal)
        Path(files.journal).write_text(text)
        os.close(fd)
    assert sorted(os.listdir(files.sweep_dir)) == [".gpu_pool", ".gpu_pool.1", ".gpu_pool.2"]
    assert Path(f"{files.root}.1/journal.jsonl").read_text() == "first"
    assert Path(f"{files.root}.2/journal.jsonl").read_text() == "second"
    assert Path(files.journal).read_text() == "third"


def test_the_table_and_the_page_of_an_earlier_sweep_go_aside_with_it(files: SweepFiles) -> None:
    os.close(claim(files, os.getpid(), fresh=True))
    for path in (files.journal, files.results, files.page):
        Path(path).write_text("first")
    os.close(claim(files, os.getpid(), fresh=True))
    assert sorted(os.listdir(files.sweep_dir)) == [".gpu_pool", ".gpu_pool.1"]
    assert {Path(f"{files.root}.1", name).read_text() for name in ("results.csv", "sweep.html")} == {"first"}


def test_a_later_launch_of_the_same_sweep_moves_nothing(files: SweepFiles) -> None:
    os.close(claim(files, os.getpid(), fresh=True))
    Path(files.journal).write_text("first")
    os.close(claim(files, os.getpid(), fresh=False))
    assert os.listdir(files.sweep_dir) == [".gpu_pool"]
    assert Path(files.journal).read_text() == "first"


def test_the_new_directory_of_a_fresh_sweep_is_held_too(files: SweepFiles) -> None:
    os.close(claim(files, os.getpid(), fresh=True))
    Path(files.journal).write_text("earlier")
    with claimed_by_another_process(files, main_pid=4242), pytest.raises(ConfigurationError, match="4242"):
        claim(files, os.getpid(), fresh=False)


def test_a_directory_moved_aside_between_opening_and_locking_its_lock_is_not_taken_for_the_one_that_is_there(
    files: SweepFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sweeps start at once in a used directory.

    1. This one opens the lock of the old directory. 2. The other one holds it, moves the old directory aside, and
    lets go of that lock: it holds the new one. 3. This one gets the lock that it opened: of what is history by now.
    """
    os.close(claim(files, os.getpid(), fresh=True))
    Path(files.journal).write_text("earlier")
    flock = fcntl.flock
    others: list[int] = []

    def raced(fd: int, how: int) -> None:
        if not others:
            others.append(-1)
            others[0] = claim(files, 4242, fresh=True)
            Path(files.journal).write_text("the other one's")
        flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", raced)
    with pytest.raises(ConfigurationError, match="4242"):
        claim(files, os.getpid(), fresh=True)
    assert Path(files.journal).read_text() == "the other one's"
    os.close(others[0])


def test_a_sweep_directory_that_cannot_be_made_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ConfigurationError, match=rf"cannot be written to {tmp_path}/file/sweep .*Not a directory.*hydra\.sweep\.dir"
    ):
        claim(SweepFiles(str(tmp_path / "file" / "sweep")), os.getpid(), fresh=True)


def test_a_link_laid_at_the_lock_is_not_followed(files: SweepFiles, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    make_private_dir(files.root)
    os.symlink(tmp_path / "precious", files.lock)
    with pytest.raises(ConfigurationError, match="symbolic links"):
        claim(files, os.getpid(), fresh=True)
    assert (tmp_path / "precious").read_text() == "mine"


# --- what others may do with them ---


@pytest.mark.parametrize("mask", [0o002, 0o000])
def test_neither_group_nor_others_can_write_whatever_the_umask(tmp_path: Path, mask: int) -> None:
    with umask(mask):
        files = SweepFiles(str(tmp_path / "sweep"))
        os.close(claim(files, os.getpid(), fresh=True))
        make_private_dir(files.job_dir(0))
        for path in (files.journal, files.supervisor_log, files.output(0)):
            os.close(open_to_append(path))
        save_return(files, 0, PAYLOAD, DONE)
    found = [files.root, *(os.path.join(at, name) for at, dirs, names in os.walk(files.root) for name in dirs + names)]
    assert len(found) == 9
    assert [path for path in found if os.stat(path).st_mode & OTHERS_MAY_WRITE] == []
    assert load_return(files, 0) == VALUE


def test_a_link_laid_at_a_log_is_not_followed(job: SweepFiles, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    os.symlink(tmp_path / "precious", job.output(0))
    with pytest.raises(OSError, match="symbolic links"):
        open_to_append(job.output(0))
    assert (tmp_path / "precious").read_text() == "mine"


def test_what_is_appended_to_a_log_comes_after_what_others_have_written_meanwhile(job: SweepFiles) -> None:
    fds = [open_to_append(job.output(0)) for _ in range(2)]
    for fd, text in zip([*fds, *fds], (b"a", b"b", b"c", b"d"), strict=True):
        os.write(fd, text)
    assert Path(job.output(0)).read_bytes() == b"abcd"
    for fd in fds:
        assert not os.get_inheritable(fd)
        os.close(fd)


def test_a_half_written_line_of_the_journal_does_not_spoil_the_next(files: SweepFiles, reading: Reading) -> None:
    make_private_dir(files.root)
    Path(files.journal).write_text('{"event": "queued"}\n{"event": "st')
    begin(files).append("done")
    assert [event["event"] for event in reading(files).new()] == ["queued", "done"]


def test_only_a_file_is_a_request_to_cancel_and_it_counts_once(job: SweepFiles) -> None:
    """A directory of a job's number cannot be taken away as a file can: it would cancel that job again and again."""
    _files.ask_to_cancel(job, 3)
    os.mkdir(os.path.join(job.cancellations, "4"))
    os.mkfifo(os.path.join(job.cancellations, "5"))
    os.symlink("3", os.path.join(job.cancellations, "6"))
    assert _files.take_cancellations(job) == [3]
    assert _files.take_cancellations(job) == []
