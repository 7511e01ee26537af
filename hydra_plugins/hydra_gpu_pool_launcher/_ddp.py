"""A task function as a group of ranks: started, watched and ended by the process of its job, as jobs are by the pool.

    job           composes, runs Hydra's callbacks; holds torch's store for its ranks, and waits for them
      ├ rank 0    a fork of it (with spawn: a fresh interpreter): its own session, its own log
      └ rank 1

torch elastic is not used: its agent waits for ever for a rank that exits without a result, sees a death only when the
rank's own children are gone, and names the wrong rank. What is used is its store, and what a rank of it finds in its
environment, so that ``init_process_group`` and all that is built on it take themselves to be under torchrun.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import os
import pickle
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from . import _carry, _descriptors, _exit_hooks, _interpreter, _process, _signals, _streams
from ._carry import Carried, CarriedBody
from ._errors import ConfigurationError, JobError, RemoteTraceback
from ._exceptions import described
from ._failure import Failure, describe
from ._forward import Signals
from ._group import Meeting, Ranks
from ._launch import Launch
from ._leader import Assignment
from ._model import Group, Job
from ._nodes import NodeError, Nodes
from ._stores import Stores

_OLDEST_TORCH = (2, 5)


def require_torch(prefix: str) -> None:
    """Raise ConfigurationError where there is no torch, or one that is too old. Runs in main; torch is not imported."""
    needs = f"{prefix}mode=ddp: it needs torch {'.'.join(map(str, _OLDEST_TORCH))} or newer"
    install = "pip install 'hydra-gpu-pool-launcher[ddp]'"
    try:
        found = importlib.util.find_spec("torch") is not None
    except ValueError:  # it is in sys.modules already, in some odd way
        return
    if not found:
        raise ConfigurationError(f"{needs}, and there is none here: {install}.")
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:  # from a source tree, say
        return
    numbers = version.split(".")[:2]
    if all(map(str.isdigit, numbers)) and tuple(map(int, numbers)) < _OLDEST_TORCH:
        raise ConfigurationError(f"{needs}, and this is {version}: {install}.")


class CallInRanks:
    """A ``Call``: the function is called in each rank of a group; the value is that of the group's rank 0.

    ``failure``: what the last call has raised. Used in the job's process, by its main thread. ``carried``: where the
    ranks are to be fresh interpreters, as the job is.
    """

    def __init__(
        self,
        assignment: Assignment,
        group: Group,
        received: _signals.Received,
        of_the_app: _exit_hooks.OfTheApp,
        body: CarriedBody,
        carried: Carried | None,
    ) -> None:
        self.failure: Failure | None = None
        self._assignment = assignment
        self._job = assignment.job
        self._group = group
        self._received = received
        self._of_the_app = of_the_app
        self._body = body
        self._carried = carried

    def __call__(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        self._body.settle(*args)
        with Signals() as signals, self._packed(args, kwargs) as carried:
            stores = Stores(self._group, self._job.num, signals)
            launch = Launch(
                assignment=self._assignment,
                group=self._group,
                function=functools.partial(function, *args, **kwargs),
                carried=carried,
                signals=signals,
                close=lambda: {signals.fd, *self._received.descriptors(), *stores.descriptors()},
                of_the_app=self._of_the_app,
            )
            payload, self.failure = self._run(launch, stores)
        if self.failure is None:
            assert payload is not None
            return self._loaded(payload)
        text, place = self.failure.elsewhere.traceback, self.failure.elsewhere.place
        raise self.failure.error from (None if text is None else RemoteTraceback(text, f"the process of {place}"))

    def _loaded(self, payload: bytes) -> Any:
        try:
            return pickle.loads(payload)
        except Exception as error:
            why = f"returned what only its rank 0 can load ({described(error)}); define it where an import finds it"
            raise JobError(self._job.num, self._job.overrides, why) from error

    @contextlib.contextmanager
    def _packed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[int | None]:
        if self._carried is None:
            self._require_forkable()
            yield None
            return
        with _process.files_of_any_size():
            fd = _descriptors.unnamed_file(_carry.packed(_carry.carried_on(self._carried, self._body, (args, kwargs))))
        try:
            yield fd
        finally:
            os.close(fd)

    def _require_forkable(self) -> None:
        on_cpu = not self._assignment.environ.get("GPU_POOL_GPUS")
        why = _interpreter.unsafe_to_fork(on_cpu=on_cpu)
        if why is None and not on_cpu and _process.answer_of_fork(_interpreter.torch_refuses_fork):
            why = _interpreter.TORCH_REFUSES
        if why is not None:
            why = f"could not fork its ranks from its own process, where callbacks run: {why}"
            remedy = "move what initialises it into the task function, or use start_method: spawn"
            raise JobError(self._job.num, self._job.overrides, f"{why}; {remedy}")

    def _run(self, launch: Launch, stores: Stores) -> tuple[bytes | None, Failure | None]:
        """The value, pickled, or why there is none: the group is started, and again as often as max_restarts says."""
        ddp = self._group.ddp
        rendezvous = _Rendezvous(self._job, self._group, stores)
        for start in range(ddp.max_restarts + 1):
            payload, failure = Ranks(launch, start, rendezvous).run()
            if failure is None:
                return payload, None
            again = start < ddp.max_restarts and not failure.final
            _tell(failure, f"starting the group again, {start + 1} of {ddp.max_restarts}" if again else None)
            if not again:
                break
            stores.forget()
        return None, failure


@dataclass
class _Rendezvous:
    """See ``_group.Rendezvous``."""

    job: Job
    group: Group
    stores: Stores
    nodes: Nodes | None = None

    def meet(self, start: int) -> Meeting:
        host, port = self.stores.open(start)
        run_id = f"gpu_pool-{self.job.num}-{os.getpid()}-{start}"
        self.nodes = self.nodes or self.stores.nodes()
        if self.nodes is None:
            return Meeting((host, port), run_id)
        ddp = self.group.ddp
        same = {
            "the same command": str(self.job),
            "the same ddp.nnodes": ddp.nnodes,
            "the same ddp.nproc_per_node": self.group.ranks,
            "the same ddp.max_restarts": ddp.max_restarts,
        }
        mine = {"same": same, "port": port, "run_id": run_id, "pid": os.getpid(), "host": socket.gethostname()}
        said = self.nodes.meet(start, mine)
        for node, other in said.items():
            for all_the_same, fact in same.items():
                if other["same"][all_the_same] != fact:
                    here_and_there = f"has {fact!r} here and {other['same'][all_the_same]!r} on node {node}"
                    why = f"{here_and_there}: give each machine {all_the_same}"
                    self.give_up(start, f"it {why}")
                    raise NodeError(why, final=True)
        return Meeting((host, said[0]["port"]), said[0]["run_id"])

    def give_up(self, start: int, why: str) -> None:
        if self.nodes is not None:
            self.nodes.give_up(start, why)


def _tell(failure: Failure, then: str | None) -> None:
    """In the job's log, where otherwise only rank 0 is heard."""
    _streams.note(f"gpu_pool: {describe(failure)}" + (f"; {then}" if then else ""))
    if failure.elsewhere.traceback and failure.rank != 0:
        _streams.note(failure.elsewhere.traceback.rstrip())
