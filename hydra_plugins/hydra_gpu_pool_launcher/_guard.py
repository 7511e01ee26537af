"""The guard's and the supervisor's own processes, from their forks to their ends.

    main              forks the guard
      └ guard         outlives the supervisor, to end what it leaves behind
          └ supervisor    a clean copy of the app; runs the loop of ``_pool`` in the world as it is

No code of the app runs in either, but for what it has registered with os.register_at_fork. With ``start_method:
forkserver`` the supervisor is a fresh interpreter, see ``_fresh``, in which the app's import has run.
"""

from __future__ import annotations

import errno
import json
import os
import signal
from dataclasses import dataclass
from typing import Literal, NoReturn

from . import _carry, _descriptors, _interpreter, _job, _pidfd, _process, _signals, _streams, _threads
from ._family import end_all_children
from ._lease_directory import Opened, open_files
from ._leases import Leases
from ._pool import Pool
from ._schedule import Schedule
from ._verdict import LOST_AFTER_S
from ._world import CANCEL, App, Origin, SystemWorld


@dataclass(frozen=True)
class Fresh:
    """Who becomes a fresh interpreter: the supervisor (``forkserver``) or each job (``spawn``).

    ``carried``: descriptor of the file for ``_carry.become_fresh``; ``output``: of the one for what is printed in a
    supervisor while it imports the app. ``trial``: such a supervisor says how the import went, and ends.
    """

    method: Literal["forkserver", "spawn"]
    carried: int
    output: int
    trial: bool = False


@dataclass(frozen=True)
class FreshSupervisor:
    """What the fresh interpreter is told that is to be the supervisor. ``imported``: descriptor on which it tells the
    guard that the app's import is over; ``mask``: the signals that main blocks."""

    origin: Origin
    guard_pidfd: int
    imported: int
    output: int
    mask: frozenset[int]
    trial: bool
    leases: Opened | None


def be_guard(app: App, origin: Origin, mask: frozenset[int], fresh: Fresh | None = None) -> int:
    """Fork the supervisor, wait for its end or main's, then end whatever of it is left. Runs in the guard's process.

    All signals stay blocked: a scheduler that signals every process of the sweep must find somebody to clean up.
    """
    _interpreter.freeze_garbage()
    for fd in origin.inherited:
        os.close(fd)
    _streams.fill_standard()
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where the app ignores it, the kernel keeps no exit status
    _process.become_subreaper()
    _process.raise_descriptor_limit()
    _streams.redirect(os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC), 0, 1)
    guard_pidfd = _pidfd.pidfd_open(os.getpid())
    try:
        # Here, so that they are held until both are gone: a supervisor that is killed leaves jobs to be ended.
        leases = None if app.leases is None else open_files(app.leases, app.layout)
    except OSError as error:
        remedy = "raise the limit of open files (ulimit -n)" if error.errno == errno.EMFILE else "see to that"
        why = (
            f"gpu_pool cannot lease slots in {app.leases} ({error.filename or app.leases}: {error.strerror}); "
            f"{remedy}, or set share: false, and other sweeps may use the same slots."
        )
        _descriptors.send(origin.channel, json.dumps({"refused": why}).encode() + b"\n")
        return 0
    imported = os.pipe2(os.O_CLOEXEC) if fresh is not None and fresh.method == "forkserver" else None
    if fresh is not None and imported is not None:
        become = FreshSupervisor(origin, guard_pidfd, imported[1], fresh.output, mask, fresh.trial, leases)
        carried = fresh.carried
        guard = os.getpid()
        supervisor = _process.fork(lambda _: _become_fresh(become, carried, guard))
    else:
        spawn = None if fresh is None else fresh.carried
        supervisor = _process.fork(lambda _: be_supervisor(app, origin, guard_pidfd, mask, leases, spawn=spawn))
    _streams.redirect(os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC), 2)  # faults until here are for the user to see
    supervisor_pidfd = _pidfd.pidfd_open(supervisor)
    if imported is not None:
        os.close(imported[1])
        # Until the import is over, nobody over there listens: that main is gone, or asks for the end (which is all
        # that it can ask now), ends the import, however long it would take.
        if imported[0] not in _descriptors.wait_readable(
            [supervisor_pidfd, origin.main_pidfd, origin.channel, imported[0]]
        ):
            end_all_children(LOST_AFTER_S)
            return 0
    os.close(origin.channel)
    if supervisor_pidfd not in _descriptors.wait_readable([supervisor_pidfd, origin.main_pidfd]):
        # Main is gone; the supervisor knows it too, and is given the time that it may take.
        _descriptors.wait_readable([supervisor_pidfd], app.policy.kill_grace_s + 2 * LOST_AFTER_S)
    end_all_children(LOST_AFTER_S)
    return 0


# --- the supervisor ---


def _become_fresh(become: FreshSupervisor, carried: int, guard: int) -> NoReturn:
    _process.die_with_parent(guard)  # until the import is over: it has no time to look after the guard
    keep = {become.origin.channel, become.origin.main_pidfd, become.guard_pidfd, become.imported, become.output}
    if become.leases is not None:
        keep |= become.leases.descriptors()
    _streams.redirect(os.dup(become.output), 1, 2)
    _carry.become_fresh(carried, become, keep, os.environ)


def be_supervisor(
    app: App,
    origin: Origin,
    guard_pidfd: int,
    mask: frozenset[int],
    opened: Opened | None,
    *,
    spawn: int | None = None,
    imported: str | None = None,
) -> int:
    """Serve requests. Runs in the supervisor's process, where no code of the app runs, ever.

    ``opened``: the leases, which the guard has opened. ``spawn``: what each job carries into an interpreter of its own,
    see ``Fresh``. ``imported``: where this process has imported the app by itself, what was printed meanwhile.
    """
    stopping = {signal.SIGTERM, signal.SIGHUP, signal.SIGINT}
    ours = {_job.UNSAVED, CANCEL}
    handled = {*stopping, *ours}
    of_the_app = _signals.silence_handlers(ours)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where it is ignored, the kernel keeps no exit status
    wakeup = _signals.wakeup_pipe()
    for signum in handled:
        signal.signal(signum, lambda *_: None)  # seen through the pipe
    signal.pthread_sigmask(signal.SIG_SETMASK, mask - handled)
    _process.become_subreaper()
    _interpreter.titles()
    _threads.look_for_libraries()
    leases = None if opened is None else Leases(opened, app.layout)
    world = SystemWorld(app, origin, wakeup, guard_pidfd, of_the_app, mask - stopping, spawn, imported, leases)
    _streams.redirect(os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC), 1, 2)  # until it has a log, and never a terminal
    threads = [] if imported is None else _interpreter.other_threads()
    torch_refuses = spawn is None and imported is None and _interpreter.torch_refuses_fork()
    world.tell({"pid": os.getpid(), "torch_refuses_fork": torch_refuses, "threads": threads})
    Pool(Schedule(app.layout, app.policy), world).serve()
    return 0
