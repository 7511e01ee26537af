"""What ``gpu-pool cancel`` does: one job of a sweep that runs is stopped, and what came of that is waited for.

A file is left in the sweep's directory, and the supervisor is woken by a signal: to the process that the journal names,
and to no other that may have its pid by now.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass

from . import _inotify, _pidfd
from ._files import SweepFiles, ask_to_cancel
from ._outside import Refused, Standing, WatchedSweep, named, over, shown
from ._seen import State
from ._table import error
from ._tail import one_line
from ._world import CANCEL

WAIT_S = 15.0
"""That the supervisor, and then the job, have. It is longer than the default of kill_grace_s."""

_LOOK_S = 1.0  # a network's file system tells of no change


@dataclass(frozen=True)
class Answer:
    """What came of it, in one sentence. ``cancelled``: the job is, or will be."""

    text: str
    cancelled: bool


def cancel(files: SweepFiles, num: int, wait_s: float = WAIT_S) -> Answer:
    """Have one job stopped, and block until it has ended, or for so many seconds.

    Raises Refused, and has touched nothing then, where there is nothing to stop, or it is not for us to.
    """
    with contextlib.closing(WatchedSweep(files)) as sweep:
        stopping = sweep.job(num).state is State.STOPPING
        _require(sweep, num)
        if not stopping:
            _ask(sweep, num)
        return _answer(sweep, num, wait_s)


def _require(sweep: WatchedSweep, num: int) -> None:
    """Raise Refused where the job cannot be cancelled from here."""
    job, launch, where = sweep.job(num), sweep.view.launch, shown(sweep.files.sweep_dir)
    if job.state.over:
        raise Refused(f"{named(job)} is over already: {job.state}")
    if over(sweep.standing):
        raise Refused(f"the sweep in {where} does not run any more: {named(job)} cannot be cancelled")
    if launch is None or sweep.standing is Standing.UNKNOWN:
        host = "one that its journal does not name" if launch is None else one_line(launch.host)
        raise Refused(f"the sweep in {where} runs on another machine, {host}: cancel the job there")
    owner = os.stat(sweep.files.root).st_uid
    if owner != os.geteuid():  # root as well: what it leaves there the supervisor could not take away
        raise Refused(f"the sweep in {where} is another user's: only that one (uid {owner}) can cancel its jobs")


def _ask(sweep: WatchedSweep, num: int) -> None:
    supervisor = sweep.supervisor
    try:
        ask_to_cancel(sweep.files, num)
        if supervisor is not None:
            _pidfd.send_to(supervisor, CANCEL)
    except ProcessLookupError:
        pass  # it has ended in between, as the journal will tell
    except OSError as error:
        what = error.filename or "its supervisor"
        raise Refused(f"{named(sweep.job(num))} cannot be cancelled ({shown(what)}: {error.strerror})") from None


def _answer(sweep: WatchedSweep, num: int, wait_s: float) -> Answer:
    """As the journal tells it: the end of the job, or in good time that it is being stopped."""
    deadline = time.monotonic() + wait_s
    with _inotify.Changes() as changes:
        changes.watch(sweep.files.root)
        while True:
            sweep.look()
            job = sweep.job(num)
            left = deadline - time.monotonic()
            if job.state is State.CANCELLED:
                return Answer(f"{named(job)} CANCELLED: {error(job)}", True)
            if job.state.over:
                cause = f": {error(job)}" if job.state is State.FAILED else ""
                return Answer(f"{named(job)} was over before it could be stopped: {job.state}{cause}", False)
            if sweep.standing is not Standing.RUNNING:
                return Answer(f"{named(job)} was not cancelled: the sweep was killed meanwhile", False)
            if left <= 0:
                break
            changes.wait(min(left, _LOOK_S), *[fd for fd in (sweep.supervisor,) if fd is not None])
    if job.state is State.STOPPING:
        why = one_line(job.stopping or "")
        return Answer(
            f"{named(job)} is being stopped ({why}): it has until kill_grace_s is over, then it is killed", True
        )
    asked = f"its supervisor, process {sweep.view.launch.supervisor if sweep.view.launch else 0}, has not answered"
    return Answer(f"{named(job)} is not stopped yet: {asked} for {wait_s:g} s; the request stays", False)
