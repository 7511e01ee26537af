"""The sweep's files: where they are, how they are written so that a cut at any point is seen, and how they are read.

Two kinds of writers: the supervisor appends to the journal; a job writes its own return and outcome. Readers (main,
reports) only read. Loading a pickle runs code, so ``load_return`` takes only what the user owns, under directories that
nobody else can write.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import pickle
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from ._model import ConfigurationError, GpuPoolError, Report, Status


class DamagedReturnError(GpuPoolError):
    """A job's return.pickle is not the file that its outcome.json speaks of, or not one to be trusted."""


@dataclass(frozen=True)
class SweepFiles:
    """Every path of the sweep in one place. ``sweep_dir`` is absolute; nothing is made or read by asking for a path."""

    sweep_dir: str

    @property
    def root(self) -> str:
        """The directory of all that is gpu_pool's own."""
        return os.path.join(self.sweep_dir, ".gpu_pool")

    @property
    def journal(self) -> str:
        """One JSON object per line, one line per event."""
        return os.path.join(self.root, "journal.jsonl")

    @property
    def supervisor_log(self) -> str:
        """The supervisor's own faults."""
        return os.path.join(self.root, "supervisor.log")

    @property
    def lock(self) -> str:
        """Held by the live supervisor; its content is the pid of that sweep's main process."""
        return os.path.join(self.root, "lock")

    def job_dir(self, num: int | str) -> str:
        """The directory of one job's files."""
        return os.path.join(self.root, "jobs", str(num))

    def output(self, num: int | str) -> str:
        """The job's stdout and stderr."""
        return os.path.join(self.job_dir(num), "output.log")

    def returned(self, num: int) -> str:
        """The job's return, pickled."""
        return os.path.join(self.job_dir(num), "return.pickle")

    def outcome(self, num: int) -> str:
        """What the job says of itself; written last."""
        return os.path.join(self.job_dir(num), "outcome.json")

    def late(self, num: int) -> str:
        """What a job returned after it was told to stop."""
        return os.path.join(self.job_dir(num), "late.pickle")


def make_private_dir(path: str) -> None:
    """Make the directory without write permission for group and others, whatever the umask; those above it, with it.

    Raises OSError, also where it is there already and is another's, or others can write in it.
    """
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o755)
    _require_private(path, os.lstat(path))  # of a new one too: there are file systems that have modes of their own


def make_job_dir(files: SweepFiles, num: int) -> None:
    """Make the directory of one job's files, and those above it, each of them private. Raises OSError."""
    for path in (files.root, os.path.dirname(files.job_dir(num)), files.job_dir(num)):
        make_private_dir(path)


def open_to_append(path: str) -> int:
    """A descriptor that appends, to a file that group and others cannot write; a symbolic link is not followed."""
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)


def claim(files: SweepFiles, main_pid: int, fresh: bool) -> int:
    """Take the sweep directory for this process: the descriptor of its lock, held until it is closed.

    Runs in the supervisor, since a lock is shared with every fork made while it is held. ``fresh``: an earlier sweep's
    files are moved aside, never overwritten. Raises ConfigurationError where another live sweep has the directory, or
    nothing can be written there.
    """
    try:
        return _claim(files, main_pid, fresh)
    except OSError as error:
        raise cannot_be_written(files, error) from error


def cannot_be_written(files: SweepFiles, error: OSError) -> ConfigurationError:
    """What is said of a sweep directory that cannot hold the sweep's files."""
    what = f"The sweep's files cannot be written to {files.sweep_dir} ({error.filename}: {error.strerror})"
    if error.errno in {errno.EMFILE, errno.ENFILE}:
        return ConfigurationError(f"{what}; raise the limit of open files (ulimit -n).")
    return ConfigurationError(f"{what}; choose another directory (hydra.sweep.dir, or GpuPool's dir).")


def _claim(files: SweepFiles, main_pid: int, fresh: bool) -> int:
    fd = _lock(files, main_pid)
    jobs = os.path.join(files.root, "jobs")
    if fresh and (os.path.lexists(files.journal) or os.path.lexists(jobs)):
        move_aside(files.root)
        os.close(fd)
        fd = _lock(files, main_pid)  # of the new directory: whoever was faster has it
    make_private_dir(jobs)
    return fd


def move_aside(path: str, suffix: str = "") -> str:
    """Rename it to the first free of ``path.1``, ``path.2``, …, where nothing is; the new path. Raises OSError.

    A ``suffix`` of the path stays at its end: ``output.log`` with ".log" becomes ``output.1.log``.
    """
    k = 1
    while os.path.lexists(aside := f"{path.removesuffix(suffix)}.{k}{suffix}"):
        k += 1
    os.rename(path, aside)
    return aside


def _lock(files: SweepFiles, main_pid: int) -> int:
    while True:
        fd = _lock_what_is_there(files)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(fd), os.lstat(files.lock)):
                break
        os.close(fd)  # another sweep has moved this file aside, before it let go of it: what is there now is its own
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{main_pid}\n".encode(), 0)
    return fd


def _lock_what_is_there(files: SweepFiles) -> int:
    make_private_dir(files.root)
    fd = os.open(files.lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(fd, 20).decode(errors="replace").strip()
        os.close(fd)
        raise ConfigurationError(
            f"Another sweep (process {holder}) is running in {files.sweep_dir}; give this one a directory of its own "
            "(hydra.sweep.dir, or GpuPool's dir), or wait for the other to end."
        ) from None
    except OSError as error:
        if error.errno not in {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}:
            raise  # those say that this file system has no locks: then there is none to respect
    return fd


@dataclass
class Journal:
    """The supervisor's end of the journal: ``append`` writes one whole line, seen by readers at once.

    What the disk does not take is owed, and written before all that comes later.
    """

    fd: int
    _owed: bytes = b""

    def append(self, event: str, **facts: Any) -> None:
        """One event: its name, the time (seconds since the epoch), and what there is to say of it, in JSON."""
        self._owed += json.dumps({"event": event, "time": round(time.time(), 6), **facts}).encode() + b"\n"
        with contextlib.suppress(OSError):  # ``pay`` will tell
            self.pay()

    def pay(self) -> None:
        """Write what is owed. Raises OSError where that cannot be done yet."""
        while self._owed:
            self._owed = self._owed[os.write(self.fd, self._owed) :]

    @property
    def removed(self) -> bool:
        """True where the file has no name any more: nobody will ever find what is written to it."""
        return os.fstat(self.fd).st_nlink == 0


_LEAST_ROOM = 1 << 20


def require_room(files: SweepFiles) -> None:
    """Raise OSError where the disk is full, but for a megabyte: a job that starts now could not leave its result.

    Or where the sweep's directory is not the one that it was.
    """
    found = os.statvfs(files.root)
    free = found.f_bavail if os.geteuid() else found.f_bfree  # what is reserved is for root
    if free * found.f_frsize < _LEAST_ROOM or (found.f_files and not found.f_ffree):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), files.root)


def begin(files: SweepFiles) -> Journal:
    """The journal, to append to; whatever a supervisor that was killed left as its last line ends there."""
    journal = Journal(open_to_append(files.journal))
    with open(files.journal, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        if size and file.seek(size - 1) and file.read(1) != b"\n":
            os.write(journal.fd, b"\n")
    return journal


@dataclass
class JournalReader:
    """A reader's end: ``new`` gives the events since the last call, and never half of one.

    The file is opened once: whatever becomes of the directory, the events still come. Raises OSError where it is not
    there. ``offset``: where to begin, in bytes.
    """

    path: str
    offset: int = 0

    def __post_init__(self) -> None:
        self._file: BinaryIO = open(self.path, "rb")  # noqa: SIM115

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()

    def new(self) -> Iterator[dict[str, Any]]:
        """The events that were appended since. A line that is not whole yet is left for the next call.

        One that never became whole is passed over: its writer was killed.
        """
        # Where the directory was removed, the supervisor makes it anew; all that it wrote before is in the old file.
        made_anew = os.fstat(self._file.fileno()).st_nlink == 0 and os.path.exists(self.path)
        yield from self._lines()
        if made_anew:
            with contextlib.suppress(FileNotFoundError):  # removed again
                file = open(self.path, "rb")  # noqa: SIM115
                self._file.close()
                self._file, self.offset = file, 0
            yield from self._lines()

    def _lines(self) -> Iterator[dict[str, Any]]:
        self._file.seek(self.offset)
        for line in self._file:
            if not line.endswith(b"\n"):
                return
            self.offset += len(line)
            try:
                event = json.loads(line)
            except (ValueError, RecursionError):
                continue
            yield event


def save_return(files: SweepFiles, num: int, payload: bytes, report: Report) -> None:
    """Return, then outcome, each written aside, synced and renamed: a job has ended by itself once the second is there.

    The return of a job that was told to stop is kept under a name that nothing takes for its result. Runs in the job's
    process. Raises OSError, also where the directory was removed and cannot be made anew.
    """
    make_job_dir(files, num)
    _replace(files.late(num) if report.status is Status.CANCELLED else files.returned(num), payload)
    outcome = {
        "status": report.status.value,
        "error_type": report.error_type,
        "error_text": report.error_text,
        "value": report.value,
        "sha256": report.sha256,
        "traceback": report.traceback,
        "out_of_memory": report.out_of_memory,
        "overrides": report.overrides,
        "directory": report.directory,
    }
    _replace(files.outcome(num), json.dumps(outcome).encode())


def load_report(files: SweepFiles, num: int) -> Report | None:
    """What the job says of itself; None where it did not come to say it, said only half, or it is no outcome."""
    try:
        with open(files.outcome(num), encoding="utf-8") as file:
            return _report(json.load(file))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _report(outcome: dict[str, Any]) -> Report:
    directory = outcome.get("directory")
    return Report(
        Status(outcome["status"]),
        outcome["error_type"],
        outcome["error_text"],
        outcome["value"],
        outcome["sha256"],
        outcome["traceback"],
        out_of_memory=outcome["out_of_memory"],
        overrides=overrides_from_json(outcome.get("overrides")),
        directory=directory if isinstance(directory, str) else None,
    )


def overrides_from_json(value: Any) -> tuple[str, ...] | None:
    """A job's overrides, as an outcome or the journal has them; None where that is no list of texts."""
    if isinstance(value, list) and all(isinstance(override, str) for override in value):
        return tuple(value)
    return None


def load_return(files: SweepFiles, num: int) -> Any:
    """What the job returned. Runs in main, and runs the code that unpickling runs.

    Raises DamagedReturnError where a file is missing, another's, open to others, or not what outcome.json says.
    """
    return pickle.loads(read_return(files, num, trusted_report(files, num)))


def trusted_report(files: SweepFiles, num: int) -> Report:
    """What the job says of itself, from a file that only the user can have written. Raises DamagedReturnError."""
    content = _read_private(files, num, files.outcome(num))
    try:
        return _report(json.loads(content))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise DamagedReturnError(f"{files.outcome(num)} is damaged") from None


def read_return(files: SweepFiles, num: int, report: Report) -> bytes:
    """The pickle that the report speaks of, not loaded. Raises DamagedReturnError where it is not to be had."""
    payload = _read_private(files, num, files.returned(num))
    if digest(payload) != report.sha256:
        raise DamagedReturnError(f"{files.returned(num)} is not the file that its outcome.json speaks of")
    return payload


def _read_private(files: SweepFiles, num: int, path: str) -> bytes:
    try:
        for directory in (files.root, os.path.dirname(files.job_dir(num)), files.job_dir(num)):
            _require_private(directory, os.lstat(directory))
        # Without O_NONBLOCK, to open a named pipe would wait for its other end.
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            _require_private(path, os.fstat(file.fileno()))
            return file.read()
    except OSError as error:
        raise DamagedReturnError(f"{error.filename or path}: {error.strerror}") from None


def set_aside_log(files: SweepFiles, num: int) -> None:
    """Before a try: what an earlier one printed stays readable, as output.1.log, output.2.log, … in their order."""
    with contextlib.suppress(FileNotFoundError):
        if os.lstat(files.output(num)).st_size:  # of a start that the system refused, there is an empty one
            move_aside(files.output(num), ".log")


def clear_result(files: SweepFiles, num: int) -> None:
    """Before a try: what an earlier job of this number left is no result of the new one."""
    for path in (files.outcome(num), files.returned(num)):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def set_aside_late(files: SweepFiles, num: int) -> None:
    """What a job saved after it was told to stop is kept, under a name that nothing takes for its result."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(files.outcome(num))
    with contextlib.suppress(FileNotFoundError):
        os.rename(files.returned(num), files.late(num))


def digest(payload: bytes) -> str:
    """The SHA-256 of the bytes, in hexadecimal."""
    return hashlib.sha256(payload).hexdigest()


def _require_private(path: str, found: os.stat_result) -> None:
    """Raise PermissionError where somebody else could have put a pickle there: loading one runs what it says."""
    if found.st_uid != os.getuid():
        raise PermissionError(errno.EPERM, f"belongs to user {found.st_uid}", path)
    if stat.S_ISLNK(found.st_mode) or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(errno.EPERM, "is a link, or others can write it", path)


def _replace(path: str, content: bytes) -> None:
    aside = f"{path}.new"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(aside)
    fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    with open(fd, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(fd)
    os.rename(aside, path)
