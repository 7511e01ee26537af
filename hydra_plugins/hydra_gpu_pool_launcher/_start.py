"""By which method a supervisor is started: fork, forkserver, spawn, or the first of them that is safe.

Runs in main. A method is refused, before anything of the sweep is started, where its jobs could not use what they are
given: after CUDA was initialised in a process, no fork of it can use a GPU.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from . import _carry, _descriptors, _interpreter, _link
from ._carry import Carried
from ._errors import ConfigurationError
from ._guard import Fresh
from ._link import Link, SupervisorGoneError
from ._say import say
from ._world import App

StartMethod = Literal["auto", "fork", "forkserver", "spawn"]


def start(app: App, asked: StartMethod) -> tuple[Link, StartMethod]:
    """The link to a new supervisor, and the method in use, of which one line tells where auto does not come to fork.

    Blocks while the app is imported again, where it is. Raises ConfigurationError, with the reason.
    """
    why = None
    if asked in {"auto", "fork"}:
        threads = _interpreter.other_threads()
        if threads and _interpreter.unsafe_to_fork(on_cpu=app.layout.on_cpu) is None:
            _warn_of_threads(threads, "the main process")
        link, why = _forked(app)
        if link is not None:
            return link, "fork"
        if asked == "fork":
            raise ConfigurationError(
                f"gpu_pool cannot fork jobs from this process: {why}; leave start_method at auto, or move what "
                "initialises it (torch.cuda.is_available() is enough) from the top of the script into the task "
                "function."
            )
    try:
        return _from_import(app, asked, why)
    except ConfigurationError as error:
        if why is None:
            raise
        sentence, *more = str(error).partition("\n")  # and perhaps a traceback
        raise ConfigurationError(f"{sentence[:-1]}; fork is not safe here, since {why}.{''.join(more)}") from error


def again(app: App, method: StartMethod) -> Link | None:
    """A supervisor by the same method, with the state that main has now; None where there is none that is newer.

    Raises ConfigurationError, SupervisorGoneError.
    """
    if method == "fork":
        return _forked(app)[0]
    if method == "spawn":
        return _spawning(app, _carry.carried(app, app.body))
    return None


def _forked(app: App) -> tuple[Link | None, str | None]:
    """A fork of this process, to fork the jobs from; or a clause that says why that is not safe."""
    on_cpu = app.layout.on_cpu
    state = _interpreter.unsafe_to_fork(on_cpu=on_cpu)
    if state is not None:
        return None, state
    link = _link.start(app)
    if link.ready["torch_refuses_fork"] and not on_cpu:
        _link.close(link, os.getpid())
        return None, _interpreter.TORCH_REFUSES
    return link, None


def _from_import(app: App, asked: StartMethod, why: str | None) -> tuple[Link, StartMethod]:
    """forkserver, or, where the app's import does not allow it, spawn. ``why`` not fork."""
    carried = _carry.carried(app, app.body)
    name = carried.preparation.app
    # With spawn too: a missing guard, say, is told once and now, and not by each job.
    link, answer = _importing(app, carried, trial=asked == "spawn")
    if link is not None:
        if why is not None:
            costs = f"jobs are forked from an interpreter that has imported {name} once more"
            _say_why("forkserver", f"in the main process, {why}", costs)
        return link, "forkserver"
    unsafe, module = answer["unsafe"], answer["module"] or name
    if asked == "forkserver":
        raise ConfigurationError(
            f"start_method: forkserver cannot fork jobs from an interpreter that has imported {name}: after the import "
            f"of {module}, {unsafe}; move that import into the task function, or use start_method: spawn."
        )
    if answer["sets"] is not None:
        raise ConfigurationError(
            f"{name} sets {answer['sets']} when it is imported, over what start_method: spawn has set for each job; "
            "set it outside of the app, or use the key gpus."
        )
    link = _spawning(app, carried)
    if asked != "spawn":
        costs = f"each job imports {name} once more, in an interpreter of its own"
        _say_why("spawn", f"after the import of {module}, {unsafe}", costs)
    return link, "spawn"


def _importing(app: App, carried: Carried, *, trial: bool) -> tuple[Link | None, dict[str, Any]]:
    """Have a fresh interpreter import the app, and be the supervisor where that is safe and no ``trial``.

    Its link, if it is, and what it says. Raises ConfigurationError where the import is refused.
    """
    with _files(_carry.packed(carried)) as (content, output):
        try:
            link = _link.start(app, Fresh("forkserver", content, output, trial))
        except SupervisorGoneError:
            last = os.pread(output, 1 << 24, 0).decode(errors="replace").rstrip().rpartition("\n")[2]
            raise ConfigurationError(
                f"The interpreter that imported {carried.preparation.app} again, as start_method: forkserver and spawn "
                f"must do, ended before it was done (the last that it printed: {last!r}); see to it that the app can "
                "be imported, or use start_method: fork."
            ) from None
    if "pid" in link.ready:
        if link.ready["threads"]:
            _warn_of_threads(link.ready["threads"], "the interpreter that has imported the app")
        return link, link.ready
    _link.close(link, os.getpid())
    return None, link.ready


def _spawning(app: App, carried: Carried) -> Link:
    with _files(_carry.packed(carried)) as (content, output):
        return _link.start(app, Fresh("spawn", content, output))


@contextlib.contextmanager
def _files(content: bytes) -> Iterator[tuple[int, int]]:
    """The descriptors of two files for a fresh interpreter: one with this content, one for what it prints."""
    fds: list[int] = []
    try:
        try:
            fds.append(_descriptors.unnamed_file(content))
            fds.append(_descriptors.unnamed_file())
        except OSError as error:
            raise ConfigurationError(f"gpu_pool cannot start: {error.strerror} (see ulimit -n).") from error
        yield fds[0], fds[1]
    finally:
        for fd in fds:
            os.close(fd)


def _say_why(method: str, why: str, costs: str) -> None:
    say(
        f"start_method: {method}, since {why}: {costs}; to have fork again, move what initialises it "
        "(torch.cuda.is_available() is enough) into the task function",
        logging.WARNING,
    )


def _warn_of_threads(names: Sequence[str], where: str) -> None:
    what = "another thread runs" if len(names) == 1 else f"{len(names)} other threads run"
    say(
        f"{what} in {where} ({', '.join(names)}): a lock that is held there while a job is forked stays locked in the "
        "job",
        logging.WARNING,
    )
