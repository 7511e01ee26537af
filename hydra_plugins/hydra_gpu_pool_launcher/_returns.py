"""What a job leaves of itself: return.pickle, and outcome.json, which speaks of it. Written by the job, read by others.

A cut at any point is seen: what is there and matches is whole. The supervisor and the reports read JSON alone; main
loads pickles, and only those that nobody else can have put there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
import re
from typing import Any

from ._errors import GpuPoolError
from ._facts import is_shallow
from ._files import SweepFiles, make_job_dir, move_aside, open_file, require_private, write_whole
from ._model import Report, Status

_RANK_LOG = re.compile(r"rank_\d+\.log")


class DamagedReturnError(GpuPoolError):
    """A job's return.pickle is not the file that its outcome.json speaks of, or not one to be trusted."""


def save_return(files: SweepFiles, num: int, payload: bytes, report: Report) -> None:
    """Return, then outcome, each written aside, synced and renamed: a job has ended by itself once the second is there.

    The return of a job that was told to stop is kept under a name that nothing takes for its result. Runs in the job's
    process. Raises OSError, also where the directory was removed and cannot be made anew.
    """
    make_job_dir(files, num)
    write_whole(files.late(num) if report.status is Status.CANCELLED else files.returned(num), payload)
    outcome = {
        "status": report.status.value,
        "error_type": report.error_type,
        "error_text": report.error_text,
        "value": report.value,
        "sha256": report.sha256,
        "traceback": report.traceback,
        "out_of_memory": report.out_of_memory,
        "crashed": report.crashed,
        "overrides": report.overrides,
        "directory": report.directory,
    }
    write_whole(files.outcome(num), json.dumps(outcome).encode())


def load_report(files: SweepFiles, num: int) -> Report | None:
    """What the job says of itself; None where it did not come to say it, said only half, or it is no outcome."""
    try:
        with open(open_file(files.outcome(num)), encoding="utf-8") as file:  # a pipe would hold the supervisor
            return _report(json.load(file))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _report(outcome: dict[str, Any]) -> Report:
    directory = outcome.get("directory")
    texts = outcome["sha256"], *(outcome[name] or "" for name in ("error_type", "error_text", "traceback"))
    if not all(isinstance(text, str) for text in texts) or not is_shallow(outcome["value"]):
        raise TypeError("an outcome of other types")
    return Report(
        Status(outcome["status"]),
        outcome["error_type"],
        outcome["error_text"],
        outcome["value"],
        outcome["sha256"],
        outcome["traceback"],
        out_of_memory=bool(outcome["out_of_memory"]),
        crashed=bool(outcome.get("crashed")),  # older outcomes do not say
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


def trusted_report(files: SweepFiles, num: int | str) -> Report:
    """What the job says of itself, from a file that only the user can have written. Raises DamagedReturnError."""
    content = read_private(files, num, files.outcome(num))
    try:
        return _report(json.loads(content))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise DamagedReturnError(f"{files.outcome(num)} is damaged") from None


def read_return(files: SweepFiles, num: int | str, report: Report) -> bytes:
    """The pickle that the report speaks of, not loaded. Raises DamagedReturnError where it is not to be had."""
    payload = read_private(files, num, files.returned(num))
    if digest(payload) != report.sha256:
        raise DamagedReturnError(f"{files.returned(num)} is not the file that its outcome.json speaks of")
    return payload


def read_private(files: SweepFiles, num: int | str, path: str) -> bytes:
    """A file of the job's directory that only the user can have written. Raises DamagedReturnError."""
    try:
        for directory in (files.root, os.path.dirname(files.job_dir(num)), files.job_dir(num)):
            require_private(directory, os.lstat(directory))
        # Without O_NONBLOCK, to open a named pipe would wait for its other end.
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            require_private(path, os.fstat(file.fileno()))
            return file.read()
    except OSError as error:
        raise DamagedReturnError(f"{error.filename or path}: {error.strerror}") from None


def set_aside_logs(files: SweepFiles, num: int) -> None:
    """Before a try: what an earlier one printed stays readable, as output.1.log, output.2.log, … in their order.

    And with it what its ranks printed, as rank_0.1.log, ….
    """
    with contextlib.suppress(FileNotFoundError):
        ranks = [name for name in os.listdir(files.job_dir(num)) if _RANK_LOG.fullmatch(name)]
        if ranks or os.lstat(files.output(num)).st_size:  # of a start that the system refused, there is an empty one
            aside = move_aside(files.output(num), ".log")
            suffix = aside.removeprefix(files.output(num).removesuffix("log"))
            for name in ranks:
                path = os.path.join(files.job_dir(num), name)
                os.rename(path, path.removesuffix("log") + suffix)


def clear_result(files: SweepFiles, num: int) -> None:
    """Before a try: what an earlier job of this number left is no result of the new one."""
    for path in (files.outcome(num), files.returned(num), files.aside(num)):
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
