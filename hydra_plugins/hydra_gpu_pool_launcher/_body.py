"""What a job runs, and what it gives back: the values and interfaces that its process and its clients agree on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from ._model import Job


@dataclass(frozen=True)
class Elsewhere:
    """Of an error that was raised in another process, where alone this could be known of it.

    ``place``: which process that was, in words; None where the error's text has them. ``crashed``: that process ended
    by a signal, or without a result.
    """

    place: str | None = None
    traceback: str | None = None
    out_of_memory: bool = False
    crashed: bool = False


NOTHING_MORE = Elsewhere()
"""All that is to be known is in the error."""


@dataclass(frozen=True)
class Result:
    """What became of a job: ``payload`` is what main gets back, ``value`` or ``error`` what the task made of it.

    ``directory``: that of the job's own files, absolute; None where there is none. ``elsewhere``: of an error that was
    not raised in this process.
    """

    payload: object
    value: object = None
    error: Exception | None = None
    directory: str | None = None
    elsewhere: Elsewhere | None = None


class Call(Protocol):
    """How the user's function is called. Raises an Exception, and nothing that would end the process."""

    def __call__(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Its value."""


class Payloads(Protocol):
    """How errors and values are put into the payload of a Result."""

    @staticmethod
    def failure(job: Job, error: Exception, instead_of: Result | None = None) -> Result:
        """The Result of a job that has this error to give, in place of one that cannot be sent to main."""

    @staticmethod
    def without_config(result: Result) -> Result:
        """The same value or error, in a payload that has nothing else in it that might not pickle."""


class Body(Payloads, Protocol):
    """What a job runs, inherited by the fork. Its methods run in the job's process."""

    def run(self, job: Job, call: Call) -> Result:
        """Run it, the user's function by ``call``. An exception is as good as a Result that has it as its error."""


class PlainBody:
    """The part of a body whose payload is the value, or the error, itself."""

    @staticmethod
    def failure(job: Job, error: Exception, instead_of: Result | None = None) -> Result:  # noqa: ARG004
        """See ``Payloads``."""
        return Result(payload=error, error=error)

    @staticmethod
    def without_config(result: Result) -> Result:
        """See ``Payloads``."""
        return result
