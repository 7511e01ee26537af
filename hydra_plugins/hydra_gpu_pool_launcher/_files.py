"""The sweep's files: where they are, that they are nobody else's, and the lock of their directory.

Loading a pickle runs code, so all that is gpu_pool's is in directories that the user owns, and that nobody else can
write.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass

from ._errors import ConfigurationError


@dataclass(frozen=True)
class SweepFiles:
    """Every path of the sweep in one place. ``sweep_dir`` is absolute; nothing is made or read by asking for a path.

    ``name``: of gpu_pool's own directory in it; another one where the files are those of a sweep that was moved aside.
    """

    sweep_dir: str
    name: str = ".gpu_pool"

    @property
    def root(self) -> str:
        """The directory of all that is gpu_pool's own."""
        return os.path.join(self.sweep_dir, self.name)

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

    @property
    def results(self) -> str:
        """A row per job, for a person's tools; beside what the jobs write."""
        return os.path.join(self.sweep_dir, "results.csv")

    @property
    def page(self) -> str:
        """The sweep as a page, for a browser; beside what the jobs write."""
        return os.path.join(self.sweep_dir, "sweep.html")

    def job_dir(self, num: int | str) -> str:
        """The directory of one job's files."""
        return os.path.join(self.root, "jobs", str(num))

    def output(self, num: int | str) -> str:
        """The job's stdout and stderr."""
        return os.path.join(self.job_dir(num), "output.log")

    def rank_log(self, num: int | str, rank: int) -> str:
        """The stdout and stderr of one rank of the job."""
        return os.path.join(self.job_dir(num), f"rank_{rank}.log")

    def returned(self, num: int | str) -> str:
        """The job's return, pickled."""
        return os.path.join(self.job_dir(num), "return.pickle")

    def outcome(self, num: int | str) -> str:
        """What the job says of itself; written last."""
        return os.path.join(self.job_dir(num), "outcome.json")

    def late(self, num: int) -> str:
        """What a job returned after it was told to stop."""
        return os.path.join(self.job_dir(num), "late.pickle")

    @property
    def cancellations(self) -> str:
        """The directory of the requests to cancel a job, each a file that has its number as its name."""
        return os.path.join(self.root, "cancel")

    def aside(self, num: int | str) -> str:
        """Of a completed job that was moved aside: where the rest of it went. It lives as long as the result does."""
        return os.path.join(self.job_dir(num), "aside.json")


def make_private_dir(path: str) -> None:
    """Make the directory without write permission for group and others, whatever the umask; those above it, with it.

    Raises OSError, also where it is there already and is another's, or others can write in it.
    """
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o755)
    require_private(path, os.lstat(path))  # of a new one too: there are file systems that have modes of their own


def make_job_dir(files: SweepFiles, num: int) -> None:
    """Make the directory of one job's files, and those above it, each of them private. Raises OSError."""
    for path in (files.root, os.path.dirname(files.job_dir(num)), files.job_dir(num)):
        make_private_dir(path)


def ask_to_cancel(files: SweepFiles, num: int) -> None:
    """Leave the request for the supervisor, which looks for it when it is signalled. Raises OSError."""
    make_private_dir(files.cancellations)
    os.close(open_to_append(os.path.join(files.cancellations, str(num))))


def take_cancellations(files: SweepFiles) -> list[int]:
    """The numbers of the jobs that somebody has asked to cancel; the requests are gone then."""
    try:
        names = os.listdir(files.cancellations)
    except OSError:  # nobody has asked
        return []
    asked = []
    for name in names:
        path = os.path.join(files.cancellations, name)
        with contextlib.suppress(OSError):
            if stat.S_ISREG(os.lstat(path).st_mode):  # a directory stays there, and would count each time
                if name.isascii() and name.isdigit() and len(name) < 10:
                    asked.append(int(name))
                os.unlink(path)
    return sorted(asked)


def require_private(path: str, found: os.stat_result) -> None:
    """Raise PermissionError where somebody else could have put a pickle there: loading one runs what it says."""
    if found.st_uid != os.getuid():
        raise PermissionError(errno.EPERM, f"belongs to user {found.st_uid}", path)
    if stat.S_ISLNK(found.st_mode) or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(errno.EPERM, "is a link, or others can write it", path)


def open_to_append(path: str) -> int:
    """A descriptor that appends, to a file that group and others cannot write: no link is followed, no pipe waited for.

    Raises OSError, also where it is no file.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = _only_a_file(os.open(path, flags | os.O_NONBLOCK, 0o644), path)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        raise OSError(errno.EINVAL, "is no file", path) from None  # but a pipe that nobody reads
    os.set_blocking(fd, True)  # it becomes the stdout of jobs
    return fd


def open_file(path: str) -> int:
    """A descriptor to read a file that somebody else may have put there: no link is followed, no pipe waited for.

    Raises OSError, also where it is no file.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise OSError(error.errno, "is a link", path) from None
    return _only_a_file(fd, path)


def _only_a_file(fd: int, path: str) -> int:
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "is no file", path)
    return fd


def write_whole(path: str, content: bytes) -> None:
    aside = f"{path}.new"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(aside)
    fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    with open(fd, "wb") as file:
        with contextlib.suppress(OSError):  # a file system without modes
            os.fchmod(fd, 0o644)  # whatever umask the job has set: main reads it
        file.write(content)
        file.flush()
        os.fsync(fd)
    os.rename(aside, path)


def move_aside(path: str, suffix: str = "") -> str:
    """Rename it to the first free of ``path.1``, ``path.2``, …, where nothing is; the new path. Raises OSError.

    A ``suffix`` of the path stays at its end: ``output.log`` with ".log" becomes ``output.1.log``.
    """
    aside = free_name(path, suffix)
    os.rename(path, aside)
    return aside


def free_name(path: str, suffix: str = "") -> str:
    """Where ``move_aside`` would move it."""
    k = 1
    while os.path.lexists(aside := f"{path.removesuffix(suffix)}.{k}{suffix}"):
        k += 1
    return aside


def claim(files: SweepFiles, main_pid: int, fresh: bool, moved: Callable[[str], object] = lambda _: None) -> int:
    """Take the sweep directory for this process: the descriptor of its lock, held until it is closed.

    Runs in the supervisor, since a lock is shared with every fork made while it is held. ``fresh``: an earlier sweep's
    files are moved aside, never overwritten, and ``moved`` is told where to. Raises ConfigurationError where another
    live sweep has the directory, or nothing can be written there.
    """
    try:
        return _claim(files, main_pid, fresh, moved)
    except OSError as error:
        raise cannot_be_written(files, error) from error


def cannot_be_written(files: SweepFiles, error: OSError) -> ConfigurationError:
    """What is said of a sweep directory that cannot hold the sweep's files."""
    what = (
        f"The sweep's files cannot be written to {files.sweep_dir} ({error.filename or files.root}: {error.strerror})"
    )
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return ConfigurationError(f"{what}; free some space there.")
    if error.errno in {errno.EMFILE, errno.ENFILE}:
        return ConfigurationError(f"{what}; raise the limit of open files (ulimit -n).")
    return ConfigurationError(f"{what}; choose another directory (hydra.sweep.dir, or GpuPool's dir).")


def _claim(files: SweepFiles, main_pid: int, fresh: bool, moved: Callable[[str], object]) -> int:
    fd = _lock(files, main_pid)
    jobs = os.path.join(files.root, "jobs")
    if fresh and (os.path.lexists(files.journal) or os.path.lexists(jobs)):
        aside = move_aside(files.root)
        for path in (files.results, files.page):  # the new sweep writes its own
            with contextlib.suppress(OSError):
                os.rename(path, os.path.join(aside, os.path.basename(path)))
        moved(aside)
        os.close(fd)
        fd = _lock(files, main_pid)  # of the new directory: whoever was faster has it
    make_private_dir(jobs)
    return fd


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


_LEAST_ROOM = 1 << 20


_OF_THE_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ESTALE}


def is_of_the_disk(error: OSError) -> bool:
    """True where a file cannot be written for a reason that a person may take away: full, read-only, not there."""
    return error.errno in _OF_THE_DISK


def require_room(files: SweepFiles) -> None:
    """Raise OSError where the disk is full, but for a megabyte: a job that starts now could not leave its result.

    Or where the sweep's directory is not the one that it was.
    """
    found = os.statvfs(files.root)
    free = found.f_bavail if os.geteuid() else found.f_bfree  # what is reserved is for root
    if free * found.f_frsize < _LEAST_ROOM or (found.f_files and not found.f_ffree):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), files.root)
