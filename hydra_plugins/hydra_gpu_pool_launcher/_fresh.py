"""The main function of a fresh interpreter: it imports the app again, and is the supervisor, or one job, or one rank.

    main              as ever
      └ guard         as ever
          └ supervisor    forkserver: this interpreter, once; jobs are forked from it as ever
              └ job       spawn: this interpreter, for each job
                  └ rank      and each of its ranks

``_carry.become_fresh`` starts it. The app's import is the only code of the app that ever runs in a supervisor.
"""

from __future__ import annotations

import functools
import json
import os
import pickle
import random
import signal
from dataclasses import replace
from typing import Any, BinaryIO

from . import _descriptors, _exit_hooks, _interpreter, _job, _process, _rank, _reimport, _streams
from ._caps import LIMITS
from ._carry import ARGUMENTS, Carried, CarriedBody, Parts
from ._errors import ConfigurationError
from ._guard import FreshSupervisor, be_supervisor
from ._model import Slot
from ._rank import Function, Rank
from ._world import App


def main(file: BinaryIO, fd: int) -> None:
    """Does not return. ``file``: what ``_carry.packed`` has left to read, then the role; ``fd``: another of its."""
    _process.run_and_exit(functools.partial(_main, file, fd))


def _main(file: BinaryIO, fd: int) -> int:
    os.close(fd)
    with file:
        carried: Carried = pickle.load(file)
        role: Any = pickle.load(file)
    if isinstance(role, FreshSupervisor):
        return _serve(carried, role)
    if isinstance(role, Rank):
        return _rank.main_of_fresh(role, functools.partial(_function, carried, role.rank))
    return _job.main_of_fresh(role, carried, functools.partial(_body, carried))


def _body(carried: Carried) -> CarriedBody:
    with _reimport.watched(carried.preparation, lambda: None, frozenset()):
        return carried.body_class.from_parts(Parts(carried.parts))


def _function(carried: Carried, rank: int) -> Function:
    body = _body(carried)
    body.begin_rank(rank)
    args, kwargs = Parts(carried.parts)[ARGUMENTS]
    return functools.partial(body.function, *args, **kwargs)


_LONGEST_OUTPUT = 1 << 24
"""Bytes of what is printed while the app is imported that are kept for the supervisor's log."""

_EXIT_HOOKS_S = 5
"""Seconds that an app's exit hooks may take in a supervisor that has imported it."""


def _serve(carried: Carried, role: FreshSupervisor) -> int:
    origin = role.origin
    leases = set() if role.leases is None else role.leases.descriptors()
    for fd in {origin.channel, origin.main_pidfd, role.guard_pidfd, role.imported, role.output, *leases}:
        os.set_inheritable(fd, False)
    # Until the import is over, there is nothing to lose here: whoever signals this process ends it, as any other.
    signal.pthread_sigmask(signal.SIG_SETMASK, role.mask)
    # torch.cuda.is_available() then leaves CUDA alone.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    app: App = pickle.loads(carried.app)
    body, answer = _imported(carried, app)
    _process.outlive_parent()
    os.write(role.imported, b"!")
    os.close(role.imported)
    if body is None or role.trial or answer["unsafe"] is not None:
        _descriptors.send(origin.channel, json.dumps(answer).encode() + b"\n")
    else:
        _streams.flush_streams()
        printed = os.pread(role.output, _LONGEST_OUTPUT, 0).decode(errors="replace")
        os.close(role.output)
        _interpreter.pause_openmp()
        _interpreter.freeze_garbage()
        origin = replace(origin, random_state=random.getstate())
        be_supervisor(replace(app, body=body), origin, role.guard_pidfd, role.mask, role.leases, imported=printed)
    _exit_hooks.run_exit_hooks_of_import(_EXIT_HOOKS_S)
    return 0


def _imported(carried: Carried, app: App) -> tuple[CarriedBody | None, dict[str, Any]]:
    """The body, where the app could be imported, and what main is told.

    ``refused``: why it could not; or ``unsafe``: a clause that says why jobs cannot be forked from here, and
    ``module``: whose import it was; ``sets``: a variable of the environment that jobs of ``spawn`` need for themselves.
    """
    on_cpu = app.layout.on_cpu
    unsafe = functools.partial(_interpreter.unsafe_to_fork, on_cpu=on_cpu)
    some_slots = [Slot(device, 0) for device in range(app.layout.devices_per_job)]
    sensitive = {name: v for name, v in app.devices(some_slots, os.environ).items() if name not in LIMITS}
    try:
        with _reimport.watched(carried.preparation, unsafe, frozenset(sensitive)) as watch:
            parts = Parts(carried.parts)
            list(parts.values())  # what cannot be loaded is told now, and not by each job
            body = carried.body_class.from_parts(parts)
    except ConfigurationError as error:
        return None, {"refused": str(error)}
    why = unsafe()
    if why is None and not on_cpu and _process.answer_of_fork(_interpreter.torch_refuses_fork):
        why = _interpreter.TORCH_REFUSES
    sets = watch.sets
    if len(app.layout.devices) == app.layout.devices_per_job and sets is not None:
        sets = None if os.environ.get(sets) == sensitive[sets] else sets  # there is one right value, and this is it
    return body, {"unsafe": why, "module": watch.culprit, "sets": sets}
