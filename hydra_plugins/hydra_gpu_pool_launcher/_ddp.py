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
import dataclasses
import datetime
import functools
import importlib.metadata
import importlib.util
import math
import os
import pickle
import socket
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from . import _carry, _interpreter, _process
from ._carry import Carried, CarriedBody
from ._failure import Failure, describe
from ._forward import Signals, ToldError
from ._group import Launch, Meeting, Ranks
from ._leader import Assignment
from ._model import ConfigurationError, Group, JobCancelledError, JobCrashedError, JobError, RemoteTraceback
from ._nodes import NodeError, Nodes
from ._result import Elsewhere
from ._settings import PORTS
from ._verdict import signal_name

_OLDEST_TORCH = (2, 5)

_LONGEST_S = 1e8
"""Some three years: the most that is asked of torch."""


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
        received: _process.Received,
        of_the_app: _interpreter.OfTheApp,
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
            try:
                stores = _Stores(self._group, self._job.num, signals)
                launch = Launch(
                    assignment=self._assignment,
                    group=self._group,
                    function=functools.partial(function, *args, **kwargs),
                    carried=carried,
                    signals=signals,
                    close=frozenset({signals.fd, *self._received.descriptors()}),
                    of_the_app=self._of_the_app,
                )
                payload, self.failure = self._run(launch, stores)
            except NodeError as error:
                crash = JobCrashedError(self._job.num, self._job.overrides, error.why)
                self.failure = Failure(None, crash, Elsewhere(crashed=True))
            except ToldError as error:
                why = f"was cancelled: {signal_name(error.signum)} was sent to its process"
                self.failure = Failure(None, JobCancelledError(self._job.num, self._job.overrides, why))
        if self.failure is None:
            assert payload is not None
            return pickle.loads(payload)
        text, place = self.failure.elsewhere.traceback, self.failure.elsewhere.place
        raise self.failure.error from (None if text is None else RemoteTraceback(text, f"the process of {place}"))

    @contextlib.contextmanager
    def _packed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[int | None]:
        if self._carried is None:
            self._require_forkable()
            yield None
            return
        fd = _process.unnamed_file(_carry.packed(_carry.carried_on(self._carried, self._body, (args, kwargs))))
        try:
            yield fd
        finally:
            os.close(fd)

    def _require_forkable(self) -> None:
        on_cpu = not self._assignment.environ.get("CUDA_VISIBLE_DEVICES")
        why = _interpreter.unsafe_to_fork(on_cpu=on_cpu)
        if why is not None:
            why = f"could not fork its ranks from its own process, where callbacks run: {why}"
            remedy = "move what initialises it into the task function, or use start_method: spawn"
            raise JobError(self._job.num, self._job.overrides, f"{why}; {remedy}")

    def _run(self, launch: Launch, stores: _Stores) -> tuple[bytes | None, Failure | None]:
        """The value, pickled, or why there is none: the group is started, and again as often as max_restarts says."""
        ddp = self._group.ddp
        nodes = stores.nodes()
        for start in range(ddp.max_restarts + 1):
            try:
                meeting = self._meet(start, stores, nodes)
                close = launch.close.union(stores.descriptors())
                payload, failure = Ranks(dataclasses.replace(launch, close=close), meeting, nodes).run()
            except ToldError:
                if nodes is not None:
                    with contextlib.suppress(NodeError):
                        nodes.give_up(start, "it was cancelled")
                raise
            if failure is None:
                return payload, None
            again = start < ddp.max_restarts and not failure.final
            _tell(failure, f"starting the group again, {start + 1} of {ddp.max_restarts}" if again else None)
            if not again:
                break
        return None, failure

    def _meet(self, start: int, stores: _Stores, nodes: Nodes | None) -> Meeting:
        host, port = stores.master(start)
        run_id = f"gpu_pool-{self._job.num}-{os.getpid()}-{start}"
        if nodes is None:
            return Meeting(start, (host, port), run_id)
        mine = {"job": str(self._job), "ranks": self._group.ranks, "port": port, "run_id": run_id, "pid": os.getpid()}
        said = nodes.meet(start, {"host": socket.gethostname(), **mine})
        for node, other in said.items():
            for fact, all_the_same in (("job", "the same command"), ("ranks", "the same ddp.nproc_per_node")):
                if other[fact] != mine[fact]:
                    here_and_there = f"has {mine[fact]!r} here and {other[fact]!r} on node {node}"
                    raise NodeError(f"{here_and_there}: give each machine {all_the_same}", final=True)
        return Meeting(start, (host, said[0]["port"]), said[0]["run_id"])


def _tell(failure: Failure, then: str | None) -> None:
    """In the job's log, where otherwise only rank 0 is heard."""
    print(f"gpu_pool: {describe(failure)}" + (f"; {then}" if then else ""), file=sys.stderr)
    if failure.elsewhere.traceback and failure.rank != 0:
        print(failure.elsewhere.traceback.rstrip(), file=sys.stderr)


class _Stores:
    """torch's stores, one for each start of a group: what an earlier one has left there would confuse the next.

    The first one is at the endpoint, where the nodes meet, or at any port where none is given. The process of the job
    on node 0 holds them. Raises NodeError where it cannot be had, ToldError.
    """

    def __init__(self, group: Group, num: int, signals: Signals) -> None:
        import torch.distributed as distributed

        self._distributed: Any = distributed
        self._ddp = group.ddp
        self._signals = signals
        self._timeout = datetime.timedelta(seconds=math.ceil(min(group.ddp.rdzv_timeout_s, _LONGEST_S)))
        host, _, port = group.ddp.rdzv_endpoint.rpartition(":")
        self._host = host.strip("[]")
        self._port = int(port) and int(port) + num % PORTS
        self._opened: dict[int, tuple[int, int]] = {}
        with self._noting_descriptors():
            self._last = self._first = self._here(self._port) if group.ddp.node_rank == 0 else self._there()

    @contextlib.contextmanager
    def _noting_descriptors(self) -> Iterator[None]:
        """Those that are opened meanwhile. What another thread has opened cannot be told from them: then none is."""
        before = _process.descriptors()
        yield
        if not _interpreter.other_threads():
            after = _process.descriptors()
            self._opened |= {fd: file for fd, file in after.items() if before.get(fd) != file}

    def descriptors(self) -> set[int]:
        """Those of all that are there now, for ranks to close."""
        return {fd for fd, file in self._opened.items() if _process.identity(fd) == file}

    def nodes(self) -> Nodes | None:
        """What the machines of the job have to tell each other; None: there is one."""
        if self._ddp.nnodes == 1:
            return None
        return Nodes(self._first, self._ddp.node_rank, self._ddp.nnodes, self._ddp.rdzv_timeout_s, self._signals.pause)

    def master(self, start: int) -> tuple[str, int]:
        """Where the ranks find the store for this start of the group; only node 0 knows, where it is not the first."""
        if start > 0 and self._ddp.node_rank == 0:
            with self._noting_descriptors():
                self._last = self._here(0)
        return self._host, self._last.port

    def _here(self, port: int) -> Any:
        try:
            return self._distributed.TCPStore(
                self._host, port, is_master=True, timeout=self._timeout, wait_for_workers=False
            )
        except RuntimeError as error:
            why = f"could not open its store at {self._host}:{port} ({_first_line(error)})"
            remedy = "give ddp.rdzv_endpoint a host that this machine has, and a port that is free on it"
            raise NodeError(f"{why}: {remedy}", final=True) from error

    def _there(self) -> Any:
        """Node 0 may come later: knock until it is there. torch's own waiting would not hear of a signal."""
        within_s = self._ddp.rdzv_timeout_s
        deadline = time.monotonic() + within_s
        while True:
            try:
                socket.create_connection((self._host, self._port), timeout=within_s).close()
                return self._distributed.TCPStore(
                    self._host, self._port, is_master=False, timeout=self._timeout, wait_for_workers=False
                )
            except (OSError, RuntimeError) as error:
                if time.monotonic() >= deadline:
                    waited = f"waited {within_s:g} s for node 0 at {self._host}:{self._port}, in vain"
                    raise NodeError(f"{waited} ({_first_line(error)})", final=True) from error
            self._signals.pause(0.1)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
