"""What a job gives back: made fit to be sent to main, described for those who read JSON alone, and saved.

All of this runs in the job's process, on objects of the user's that may do anything when they are looked at.
"""

from __future__ import annotations

import contextlib
import copyreg
import errno
import io
import json
import os
import pickle
import sys
import traceback
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Protocol

from hydra.core.utils import JobReturn

from ._body import NOTHING_MORE, Body, Payloads, Result
from ._errors import JOB_ERRORS, JobCancelledError, JobError
from ._exceptions import described, error_text, ran_out_of_memory, traceback_text, type_name
from ._files import SweepFiles, is_of_the_disk
from ._interpreter import loaded_torch
from ._model import Job, Report, Status
from ._returns import digest, save_return

_LONGEST_VALUE = 10_000
"""Characters of JSON, and items: a longer value is in the pickle alone, and does not swell the journal."""

_DEEPEST_VALUE = 50
"""Lists in lists: the other processes have Python's own limit of recursion, whatever the job has set."""

_LONGEST_INT = 2000
"""Bits; likewise, for the digits of an integer."""

_LONGEST_TEXT = 100_000
"""Characters of an error's text, and of its traceback, that are kept beside the pickle."""


class Circumstances(Protocol):
    """What else happens to the job's process while its result is saved."""

    def stopped(self) -> str | None:
        """Whose signal came before the result was there: then it is none, but kept, and the job was cancelled."""

    def make_room(self) -> bool:
        """The job has used up its descriptors: True where there is one now."""

    def wait(self, first: bool) -> None:
        """The disk cannot be written: some time, or until the process is ended. ``first``: not said so far."""


def save(files: SweepFiles, job: Job, body: Body, result: Result, circumstances: Circumstances) -> Result:
    """Write the result to disk; gives what was written, which may have less in it than the job had to give.

    Whatever the user's exception or value does when it is looked at, something is written. A disk that is full is
    waited for. Raises OSError where nothing at all can be written, for another reason.
    """
    result, payload, report = stated(files, job, body, result)
    try:
        _persist(files, job, payload, report, circumstances)
    except OSError as error:
        traceback.print_exc()
        why = f"ended with a result that cannot be saved ({error.strerror})"
        result, payload, report = stated(files, job, body, body.failure(job, JobError(job.num, job.overrides, why)))
        _persist(files, job, payload, report, circumstances)
    return result


def stated(files: SweepFiles, job: Job, body: Payloads, result: Result) -> tuple[Result, bytes, Report]:
    """What of the result can be sent, in bytes, and what is said of it, whatever it does when it is looked at."""
    try:
        return _described(files, job, body, result)
    except BaseException as error:
        traceback.print_exc()
        what = "value" if result.error is None else f"exception of type {type(result.error).__name__}"
        why = f"ended with a {what} that cannot even be looked at ({type(error).__name__})"
        return _described(files, job, body, body.failure(job, JobError(job.num, job.overrides, why)))


def _described(files: SweepFiles, job: Job, body: Payloads, result: Result) -> tuple[Result, bytes, Report]:
    elsewhere = result.elsewhere or NOTHING_MORE
    text = traceback_text(result.error) if elsewhere.traceback is None else elsewhere.traceback
    directory = None if result.directory is None else os.path.relpath(result.directory, files.sweep_dir)
    result, payload = _sendable(job, body, result)
    place = f" ({elsewhere.place})" if elsewhere.place else ""
    report = Report(
        status=_status(result.error),
        error_type=None if result.error is None else type_name(result.error),
        error_text=None if result.error is None else error_text(result.error)[:_LONGEST_TEXT] + place,
        value=_json_value(result.value),
        sha256=digest(payload),
        traceback=(text or traceback_text(result.error) or "")[-_LONGEST_TEXT:] or None,
        out_of_memory=elsewhere.out_of_memory or (result.error is not None and ran_out_of_memory(result.error)),
        crashed=elsewhere.crashed,
        overrides=job.overrides,
        directory=directory,
    )
    return result, payload, report


def _status(error: Exception | None) -> Status:
    if error is None:
        return Status.COMPLETED
    return Status.CANCELLED if isinstance(error, JobCancelledError) else Status.FAILED


def _persist(files: SweepFiles, job: Job, payload: bytes, report: Report, circumstances: Circumstances) -> None:
    """Write, however long it takes until the disk can be written: what took a night is not thrown away for it."""
    stopped = circumstances.stopped()
    if stopped is not None and report.status is not Status.CANCELLED:
        then = "returned" if report.error_type is None else f"raised {report.error_type}: {report.error_text}"
        if report.error_type in JOB_ERRORS:
            then = report.error_text or ""
        why = f"was cancelled: {stopped}; it then {then}"
        report = replace(report, status=Status.CANCELLED, error_type=JobCancelledError.__name__, error_text=why)
    first = True
    while True:
        try:
            return save_return(files, job.num, payload, report)
        except OSError as error:
            if error.errno == errno.EMFILE and circumstances.make_room():
                continue
            if not is_of_the_disk(error):
                raise
            if first:
                with contextlib.suppress(OSError, ValueError):  # the log is on that disk, too
                    print(f"gpu_pool: the result cannot be saved ({error}); trying again until it can", file=sys.stderr)
        circumstances.wait(first)
        first = False


def _sendable(job: Job, body: Payloads, result: Result) -> tuple[Result, bytes]:
    """The result, or the most of it that main can load, and its bytes."""
    try:
        return result, _pickled(result)
    except Exception as error:
        failure = body.failure(job, _unpicklable(job, result, error), result)
    for poorer in (body.without_config(result), failure):
        try:
            return poorer, _pickled(poorer)
        except Exception:
            continue
    failure = body.without_config(failure)
    return failure, _pickled(failure)


def _unpicklable(job: Job, result: Result, error: Exception) -> JobError:
    """What is said of a result that cannot travel. The error that it replaces goes along as its cause."""
    if result.error is not None:
        wrapped = JobError(job.num, job.overrides, f"raised {described(result.error)}")
        wrapped.__cause__ = result.error
        return wrapped
    return JobError(
        job.num,
        job.overrides,
        f"returned a value of type {type_name(result.value)} that cannot be sent to the main process "
        f"({described(error)}); return numbers, strings, lists, dicts or arrays, and save the rest to a file",
    )


class _Pickler(pickle.Pickler):
    """Plain pickle, with two exceptions.

    A tensor on a GPU is sent as one on the CPU: to load it, main would have to initialise CUDA. A JobReturn is taken
    apart here, since Hydra 1.4's own way pickles exceptions of ``__main__`` by value, as other classes than the app's.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        # Made now, since the task may have registered more with copyreg.
        self.dispatch_table = {**copyreg.dispatch_table, JobReturn: lambda ret: (_job_return, (vars(ret),))}

    def reducer_override(self, obj: Any) -> Any:
        torch = loaded_torch()
        if torch is not None and isinstance(obj, torch.Tensor) and obj.device.type != "cpu":
            return obj.detach().cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented


def _job_return(attributes: dict[str, Any]) -> JobReturn:
    ret = JobReturn()
    vars(ret).update(attributes)
    return ret


def _pickled(result: Result) -> bytes:
    """The bytes of its payload, loaded once to see that they can be: exceptions with a constructor of their own often
    cannot; and one may come back as something else, which cannot be raised."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump(result.payload)
    loaded = pickle.loads(buffer.getvalue())
    error = loaded._return_value if isinstance(loaded, JobReturn) else loaded
    if result.error is not None and not isinstance(error, Exception):
        raise TypeError(f"it comes back as {type_name(error)}, which is no exception")
    return buffer.getvalue()


def _json_value(value: Any) -> Any:
    """The value where JSON can say it, else None: what else there is is in the pickle."""
    try:
        plain = _as_json(value, iter(range(_LONGEST_VALUE)), _DEEPEST_VALUE)
        return plain if len(json.dumps(plain)) <= _LONGEST_VALUE else None
    except Exception:  # a list in itself, an integer of 5000 digits, an object whose methods raise
        return None


def _as_json(value: Any, items: Iterator[int], levels: int) -> Any:
    """numpy's and torch's scalars as numbers, tuples as lists. Raises OverflowError when ``items`` or levels run out.

    And for an integer that only an interpreter with the job's own settings could read again.
    """
    if next(items, None) is None or levels == 0 or (isinstance(value, int) and value.bit_length() > _LONGEST_INT):
        raise OverflowError
    if value is None:
        return None
    for kind in (bool, int, float, str):  # plain ones: an Enum of the user's, say, would go along as itself
        if isinstance(value, kind):
            return kind.__str__(value) if kind is str else kind(value)
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        return _as_json(value.item(), items, levels - 1)
    if isinstance(value, (list, tuple)):
        return [_as_json(item, items, levels - 1) for item in value]
    if isinstance(value, dict):
        return {str(key): _as_json(item, items, levels - 1) for key, item in value.items()}
    return None
