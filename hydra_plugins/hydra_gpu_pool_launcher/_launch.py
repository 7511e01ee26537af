"""How a rank is forked into its group: what it is told, the environment that makes it a rank, its log."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from . import _exit_hooks, _files, _interpreter, _leader, _rank, _threads
from ._descriptors import Descriptor, Unnamed
from ._family import Family
from ._forward import Signals
from ._leader import Assignment, Origin
from ._model import Group
from ._rank import Function, Rank
from ._torchrun import rank_environ


@dataclass(frozen=True)
class Launch:
    """What every start of a group has in common. ``assignment``: the job's, in whose process all of this happens.

    ``carried``: descriptor of what ranks need that are fresh interpreters; None where they are forks. ``close``: gives
    the job's own descriptors, for ranks to close; asked by each of them, since a thread of torch's opens and closes
    some at any time. ``of_the_app``: see ``_rank.main``.
    """

    assignment: Assignment
    group: Group
    function: Function
    carried: int | None
    signals: Signals
    close: Callable[[], set[int]]
    of_the_app: _exit_hooks.OfTheApp

    def rank(self, local: int) -> int:
        """In the whole group, of the one that has this number on this machine."""
        return self.group.ddp.node_rank * self.group.ranks + local


def start_rank(
    launch: Launch,
    start: int,
    local: int,
    family: Family,
    gate: tuple[int, int],
    orders: Unnamed,
    others: Iterable[int],
) -> Unnamed:
    """Fork the rank of this local number into the family; the file in which it will leave what it has to say.

    ``start``: of the group, from 0. ``gate``: a pipe that it waits at, and then finds its ``orders``. ``others``: the
    descriptors of what the ranks before it leave, for it to close. Raises OSError.
    """
    assignment, rank = launch.assignment, launch.rank(local)
    report = Unnamed.made()
    try:
        log = _log(assignment, rank)
        try:
            told = Rank(
                job=assignment.job,
                files=assignment.files,
                environ=_environ(launch, start, local),
                cwd=os.getcwd(),
                threads=None if assignment.threads is None else max(1, assignment.threads // launch.group.ranks),
                random_before_fork=_interpreter.random_state(),
                visibility=assignment.visibility,
                rank=rank,
                report=report,
                bell=launch.signals.bell,
                gate=Descriptor.of(gate[0]),
                orders=orders,
            )
            origin = Origin(
                parent=os.getpid(),
                log=log,
                close={*family.descriptors(), *others, gate[1]},
                mask=frozenset(),
                handlers=launch.signals.before(),
            )
            if local == 0:
                _threads.look_for_libraries()  # the job may have loaded some since, torch say
            with _interpreter.quiet_logging():
                family.start(rank, lambda mask: _begin(launch, told, replace(origin, mask=mask)))
        finally:
            os.close(log)
    except OSError:
        os.close(report.fd)
        raise
    return report


def _begin(launch: Launch, rank: Rank, origin: Origin) -> int:
    """In the rank's process, right after the fork."""
    origin = replace(origin, close={*origin.close, *launch.close()})
    if launch.carried is not None:
        _leader.become_fresh(rank, origin, launch.carried, rank.descriptors())
    return _rank.main(rank, launch.function, origin, launch.of_the_app)


def _environ(launch: Launch, start: int, local: int) -> dict[str, str]:
    """The job's own as it is now, with what Hydra's env_set has set, and with this rank's place in the group."""
    assignment, ddp = launch.assignment, launch.group.ddp
    environ = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", **os.environ}
    for name, value in _threads.variables(assignment.threads, assignment.environ).items():
        if environ.get(name) == value:
            del environ[name]  # ours, for the whole job: a rank has its share
    return environ | rank_environ(
        local_rank=local,
        ranks=launch.group.ranks,
        node_rank=ddp.node_rank,
        nodes=ddp.nnodes,
        restart=start,
        max_restarts=ddp.max_restarts,
    )


def _log(assignment: Assignment, rank: int) -> int:
    """The descriptor of its log, to append to. That of rank 0 is the job's own, under a second name."""
    files, num = assignment.files, assignment.job.num
    if rank == 0:
        with contextlib.suppress(OSError):  # it is there already; or this file system has no second names
            os.link(files.output(num), files.rank_log(num, rank))
        return os.dup(1)
    _files.make_job_dir(files, num)  # somebody may have removed it
    return _files.open_to_append(files.rank_log(num, rank))
