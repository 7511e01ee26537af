"""What main asks of the supervisor: as values, and as the lines of JSON in which they travel."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ._events import Stop
from ._files import SweepFiles
from ._model import Job


@dataclass(frozen=True)
class Request:
    """What main asks for in one launch. The app itself is not in it: the supervisor was forked with it."""

    jobs: tuple[Job, ...]
    files: SweepFiles
    environ: Mapping[str, str]
    cwd: str
    fresh: bool  # the first launch of a sweep: what an earlier sweep left in the directory is moved aside
    resume: bool = False  # what completed in an earlier sweep is not run again
    command: tuple[str, ...] = ()  # that started main
    given: tuple[str, ...] | None = None  # the overrides in it; None where no command goes on with the sweep


@dataclass(frozen=True)
class Close:
    """No request will come any more."""


def from_line(line: bytes) -> list[Request | Close | Stop]:
    """What a line from main asks for."""
    try:
        message = json.loads(line)
    except ValueError:  # main was torn out of a line, by a signal handler of the app that raised
        return [Stop("the main process cannot be understood", signal.SIGTERM), Close()]
    if "request" in message:
        return [_request_from_json(message["request"])]
    if "close" in message:
        return [Stop("the launcher was closed", signal.SIGTERM), Close()]
    return [Stop(message["why"], message["stop"])]


def request_to_json(request: Request) -> dict[str, Any]:
    """The request as one JSON object, for the supervisor at the other end of the channel."""
    return {
        "jobs": [[job.num, *job.overrides] for job in request.jobs],
        "sweep_dir": request.files.sweep_dir,
        "environ": dict(request.environ),
        "cwd": request.cwd,
        "command": request.command,
        "given": request.given,
        "fresh": request.fresh,
        "resume": request.resume,
    }


def _request_from_json(message: dict[str, Any]) -> Request:
    return Request(
        jobs=tuple(Job(num, tuple(overrides)) for num, *overrides in message["jobs"]),
        files=SweepFiles(message["sweep_dir"]),
        environ=message["environ"],
        cwd=message["cwd"],
        command=tuple(message["command"]),
        given=None if message["given"] is None else tuple(message["given"]),
        fresh=message["fresh"],
        resume=message["resume"],
    )
