"""ddp on several machines: real sweeps that meet on loopback, each with a directory and a set of processes of its own.

A machine is a fork of the test's own process, where torch is imported already, that maps a function with a GpuPool.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support import LIMIT_S

from hydra_plugins.hydra_gpu_pool_launcher import GpuPool, _descriptors, _group, _nodes, _pidfd, _process, _stores

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

PORTS = 8
"""That one test may use, from its base on."""


@pytest.fixture(autouse=True)
def _impatient_resolver(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch asks for the name of each address that it is connected to, and that of ::1 is often asked of a server.

    One that does not answer, for which a resolver waits five seconds, makes a test slow, and fails none.
    """
    monkeypatch.setenv("RES_OPTIONS", "timeout:1 attempts:1")


@pytest.fixture
def base() -> Iterator[int]:
    """A port with some more above it, which nobody else has.

    Below those that the kernel gives to connections, any of which could have one of ours by chance. A UDP socket of the
    same number is held for as long as the test runs, so that two runs of these tests do not choose the same; another
    program may still take one after it was found to be free: then a test fails with "could not open its store".
    """
    lowest_of_the_kernel = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    choices = list(range(10_000, max(lowest_of_the_kernel, 20_000) - PORTS, PORTS))
    random.Random(os.getpid() + time.monotonic_ns()).shuffle(choices)
    for port in choices:
        with socket.socket(type=socket.SOCK_DGRAM) as claim:
            try:
                claim.bind(("", port))
                for number in range(port, port + PORTS):
                    with socket.socket() as probe:
                        probe.bind(("", number))
            except OSError:
                continue
            yield port
            return
    pytest.fail("there is no free port")


@dataclass
class Outcome:
    """Of a job, as the main process of its machine has seen it."""

    status: str
    value: Any
    error: str
    log: str


@dataclass
class Machine:
    """The main process of one machine's sweep. ``result``: the file for what becomes of its jobs."""

    pid: int
    pidfd: int
    result: Path
    code: int | None = None

    def wait(self) -> int:
        """How its main process ended: the exit code, or the negative number of a signal."""
        if self.code is None:
            assert _descriptors.wait_readable([self.pidfd], LIMIT_S), "the sweep does not end"
            self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.code

    def outcomes(self) -> list[Outcome]:
        assert self.wait() == 0, (self.result.parent / "terminal").read_text()
        found: list[Outcome] = pickle.loads(self.result.read_bytes())
        return found

    def outcome(self) -> Outcome:
        (found,) = self.outcomes()
        return found

    def error(self) -> str:
        found = self.outcome()
        assert found.status == "FAILED", found
        return found.error


@dataclass
class Machines:
    """Starts machines. Their ranks, and whatever else calls ``report``, are heard, until the last one is gone."""

    directory: Path
    base: int
    read: int
    write: int
    started: list[Machine] = field(default_factory=list)
    _unread: bytes = b""

    def start(
        self, function: Callable[..., Any], *calls: dict[str, Any], node: int, name: str = "", **config: Any
    ) -> Machine:
        place = self.directory / f"machine_{name or node}"
        place.mkdir()
        nodes = {"nnodes": 2, "node_rank": node, "rdzv_endpoint": f"localhost:{self.base}", **config.pop("ddp", {})}
        quiet = {"gpus": [], "start_method": "fork", "progress": "none", "threads_per_job": 1}

        def main(mask: frozenset[int]) -> int:
            os.close(self.read)
            signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            terminal = os.open(place / "terminal", os.O_WRONLY | os.O_CREAT)
            os.dup2(terminal, 1)
            os.dup2(terminal, 2)
            os.environ["MACHINE"] = place.name
            pool = GpuPool(dir=place / "sweep", mode="ddp", ddp=nodes, **{**quiet, **config})
            outcomes = [
                Outcome(
                    o.status.value, o.value, "" if o.error is None else f"{type(o.error).__name__}: {o.error}", o.log
                )
                for o in pool.map(function, calls or [{}])
            ]
            (place / "result").write_bytes(pickle.dumps(outcomes))
            return 0

        pid = _process.fork(main)
        self.started.append(Machine(pid, _pidfd.pidfd_open(pid), place / "result"))
        return self.started[-1]

    def pair(self, function: Callable[..., Any], *calls: dict[str, Any], **config: Any) -> tuple[Machine, Machine]:
        """Two that run the same."""
        return self.start(function, *calls, node=0, **config), self.start(function, *calls, node=1, **config)

    def report(self, text: object) -> None:
        """In whatever process: tell the test."""
        os.write(self.write, f"{text}\n".encode())

    def heard(self) -> str:
        """Block until the next line."""
        while b"\n" not in self._unread:
            assert _descriptors.wait_readable([self.read], LIMIT_S), "nothing is reported"
            got = os.read(self.read, 4096)
            assert got, "everybody is gone"
            self._unread += got
        line, _, self._unread = self._unread.partition(b"\n")
        return line.decode()

    def assert_nothing_is_left(self) -> None:
        """Block until nobody has the write end of the pipe any more, as whoever was forked since has it."""
        os.close(self.write)
        self.write = -1
        while True:
            assert _descriptors.wait_readable([self.read], LIMIT_S), "a process of the sweeps is still there"
            if not os.read(self.read, 4096):
                return

    def events(self, machine: Machine, event: str) -> list[dict[str, Any]]:
        path = machine.result.parent / "sweep/.gpu_pool/journal.jsonl"
        return [fields for line in path.read_text().splitlines() if (fields := json.loads(line))["event"] == event]


@pytest.fixture
def machines(tmp_path: Path, base: int) -> Iterator[Machines]:
    read, write = os.pipe()
    machines = Machines(tmp_path, base, read, write)
    yield machines
    for machine in machines.started:
        if machine.code is None:
            os.kill(machine.pid, signal.SIGKILL)
            os.waitpid(machine.pid, 0)
        os.close(machine.pidfd)
    for fd in (machines.read, machines.write):
        if fd >= 0:
            os.close(fd)


def rank() -> int:
    return int(os.environ["RANK"])


def join() -> None:
    """The group of all ranks of all machines."""
    dist.init_process_group("gloo")


def total(number: float) -> float:
    """Over all ranks."""
    tensor = torch.tensor([float(number)])
    dist.all_reduce(tensor)
    return float(tensor)


def in_a_collective() -> None:
    """Until another rank ends: what a rank does while the others have failed."""
    total(1)
    total(1)


# --- what works ---


def test_job_by_job_the_ranks_of_two_machines_are_one_group_each_on_a_port_of_its_own(machines: Machines) -> None:
    def job(x: int) -> dict[str, Any]:
        join()
        facts: dict[str, Any] = {
            name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "MACHINE", "MASTER_PORT", "GROUP_RANK")
        }
        facts["total"] = total(10 ** int(os.environ["RANK"]) * x)
        return facts

    calls = [{"x": x} for x in (1, 2, 3)]
    first = machines.start(job, *calls, node=0, ddp={"nproc_per_node": 2})
    second = machines.start(job, *calls, node=1, ddp={"nproc_per_node": 2}, cpu_slots=3)
    values = [outcome.value for outcome in first.outcomes()]
    assert [value["total"] for value in values] == [1111.0, 2222.0, 3333.0]
    assert [value["MASTER_PORT"] for value in values] == [str(machines.base + num) for num in range(3)]
    assert {value["WORLD_SIZE"] for value in values} == {"4"}
    assert {(value["RANK"], value["GROUP_RANK"], value["MACHINE"]) for value in values} == {("0", "0", "machine_0")}
    assert [outcome.value for outcome in second.outcomes()] == values
    for machine in (first, second):
        order = [(e["event"], e["job"]) for e in machines.events(machine, "start") + machines.events(machine, "end")]
        assert order == [("start", 0), ("start", 1), ("start", 2), ("end", 0), ("end", 1), ("end", 2)]
    machines.assert_nothing_is_left()


def test_each_machine_keeps_the_logs_of_its_own_ranks(machines: Machines) -> None:
    def job() -> None:
        print("printed by", rank())

    first, second = machines.pair(job, ddp={"nproc_per_node": 2})
    logs = [
        sorted(path.name for path in Path(machine.outcome().log).parent.glob("*.log")) for machine in (first, second)
    ]
    assert logs == [["output.log", "rank_0.log", "rank_1.log"], ["output.log", "rank_2.log", "rank_3.log"]]


def test_a_large_value_comes_to_both_machines(machines: Machines) -> None:
    def job() -> bytes | None:
        return bytes(range(200)) * 100_000 if rank() == 0 else b"not the value"

    values = [machine.outcome().value for machine in machines.pair(job)]
    assert [value == bytes(range(200)) * 100_000 for value in values] == [True, True]


def test_a_rank_that_ends_long_before_the_others_does_not_end_them(machines: Machines) -> None:
    def job() -> str:
        if rank() == 1:
            sys.exit(0)
        machines.report("waits")
        return os.read(go, 1).decode()

    go, gone = os.pipe()
    first, second = machines.pair(job, ddp={"nproc_per_node": 1})
    assert machines.heard() == "waits"
    ended = machines.directory / "machine_1/sweep/.gpu_pool/jobs/0/rank_1.log"
    while not ended.exists():
        os.sched_yield()
    os.write(gone, b"!")
    assert [first.outcome().value, second.outcome().value] == ["!", "!"]
    os.close(go)
    os.close(gone)


def test_an_endpoint_may_be_an_address_of_ipv6(machines: Machines) -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("this machine has no IPv6")

    def job() -> float:
        join()
        return total(1)

    pair = machines.pair(job, ddp={"rdzv_endpoint": f"[::1]:{machines.base}"})
    assert [machine.outcome().value for machine in pair] == [2.0, 2.0]


APP = """
import os, hydra, torch
import torch.distributed as dist

@hydra.main(version_base="1.3", config_path=None)
def app(cfg):
    dist.init_process_group("gloo")
    total = torch.tensor([float(cfg.x * 10 ** dist.get_rank())])
    dist.all_reduce(total)
    print("in rank", dist.get_rank())
    return f"{total.item():g} from {os.environ['MACHINE']}"

if __name__ == "__main__":
    app()
"""


@pytest.mark.parametrize(("method", "xs", "ranks"), [("fork", "1,2", 2), ("spawn", "3", 1)])
def test_two_sweeps_of_the_same_command_are_one(tmp_path: Path, base: int, method: str, xs: str, ranks: int) -> None:
    (tmp_path / "app.py").write_text(APP)
    launcher = {
        "mode": "ddp",
        "gpus": "[]",
        "start_method": method,
        "ddp.nnodes": 2,
        "ddp.nproc_per_node": ranks,
        "ddp.rdzv_endpoint": f"localhost:{base}",
    }
    command = [sys.executable, "app.py", "-m", "hydra/launcher=gpu_pool", f"+x={xs}"]
    command += [f"hydra.launcher.{key}={value}" for key, value in launcher.items()]
    sweeps = [
        subprocess.Popen(
            [*command, f"hydra.sweep.dir=sweep_{node}", f"hydra.launcher.ddp.node_rank={node}"],
            cwd=tmp_path,
            env={**os.environ, "MACHINE": str(node)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in range(2)
    ]
    said = [sweep.communicate(timeout=2 * LIMIT_S) for sweep in sweeps]
    assert [sweep.returncode for sweep in sweeps] == [0, 0], said
    for node in range(2):
        jobs = tmp_path / f"sweep_{node}/.gpu_pool/jobs"
        factor = int("1" * 2 * ranks)
        for num, x in enumerate(map(int, xs.split(","))):
            assert json.loads((jobs / f"{num}/outcome.json").read_text())["value"] == f"{x * factor} from 0"
            for number in range(node * ranks, (node + 1) * ranks):
                assert f"in rank {number}\n" in (jobs / f"{num}/rank_{number}.log").read_text()
        words = f"ddp: each job is a group of {ranks} rank{'s' * (ranks > 1)} on each of 2 machines, one job at a time"
        assert words in said[node][0] + said[node][1]


# --- a rank's end ---

DEATHS: dict[str, tuple[Callable[[], Any], str]] = {
    "raises": (lambda: 1 // 0, "raised ZeroDivisionError: integer division or modulo by zero"),
    "exits": (lambda: sys.exit(3), "called sys.exit(3)"),
    "killed": (lambda: os.kill(os.getpid(), signal.SIGKILL), "lost its rank {rank}, which was ended by SIGKILL"),
    "gone": (lambda: os._exit(0), "lost its rank {rank}, which ended with exit code 0"),
    "cancelled": (lambda: os.kill(os.getpid(), signal.SIGTERM), "cancelled: SIGTERM was sent to its rank {rank}"),
}


@pytest.mark.parametrize("where", [0, 1])
@pytest.mark.parametrize("death", DEATHS)
def test_a_rank_that_ends_on_one_machine_ends_the_job_on_both_and_both_name_it(
    machines: Machines, death: str, where: int
) -> None:
    die, words = DEATHS[death]

    def job() -> None:
        join()
        total(1)
        if rank() == where:
            die()
        in_a_collective()

    pair = machines.pair(job, kill_grace_s=1e6)
    there, here = pair[where].outcome(), pair[1 - where].outcome()
    words = words.format(rank=where)
    assert words.removeprefix("raised ") in there.error
    assert here.status == "FAILED"
    assert here.error.startswith(f"JobCrashedError: job 0 was ended by node {where}, where ")
    assert words in here.error
    assert there.status == ("CANCELLED" if death == "cancelled" else "FAILED")
    machines.assert_nothing_is_left()


def test_ranks_that_notice_nothing_of_a_failure_on_the_other_machine_are_ended_too(machines: Machines) -> None:
    def job() -> None:
        join()
        total(1)
        if rank() == 1:
            raise ValueError("only here")
        while True:
            signal.pause()

    first, second = machines.pair(job, kill_grace_s=1e6)
    assert first.error() == "JobCrashedError: job 0 was ended by node 1, where rank 1 raised ValueError: only here"
    assert second.error() == "ValueError: only here"


def test_a_failed_job_is_followed_by_the_next_one_on_both_machines(machines: Machines) -> None:
    def job(x: int) -> float:
        join()
        if x == 0 and rank() == 1:
            raise ValueError("only here")
        return total(x)

    pair = machines.pair(job, {"x": 0}, {"x": 1})
    assert [[outcome.status for outcome in machine.outcomes()] for machine in pair] == [["FAILED", "COMPLETED"]] * 2
    assert pair[1].outcomes()[1].value == 2.0


# --- restarts ---


def test_a_restart_is_one_on_both_machines_with_a_new_store(machines: Machines) -> None:
    def job() -> dict[str, Any]:
        join()
        restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        if restarts == 0 and rank() == 2:
            raise ValueError("once")
        return {"restarts": total(restarts), "port": os.environ["MASTER_PORT"]}

    first, second = machines.pair(job, ddp={"max_restarts": 2, "nproc_per_node": 2})
    assert first.outcome().value == second.outcome().value
    assert first.outcome().value["restarts"] == 4.0
    assert first.outcome().value["port"] != str(machines.base)
    said = "gpu_pool: the group was ended by node 1, where rank 2 raised ValueError: once"
    assert f"{said}; starting the group again, 1 of 2" in Path(first.outcome().log).read_text().splitlines()


def test_when_all_restarts_are_used_up_the_last_failure_is_the_one(machines: Machines) -> None:
    def job() -> None:
        join()
        if rank() == 1:
            raise ValueError(f"in start {os.environ['TORCHELASTIC_RESTART_COUNT']}")
        in_a_collective()

    first, second = machines.pair(job, ddp={"max_restarts": 1})
    assert first.error() == "JobCrashedError: job 0 was ended by node 1, where rank 1 raised ValueError: in start 1"
    assert second.error() == "ValueError: in start 1"


def test_what_was_cancelled_on_one_machine_is_not_started_again_on_any(machines: Machines) -> None:
    def job() -> None:
        join()
        if rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        in_a_collective()

    first, second = machines.pair(job, ddp={"max_restarts": 5})
    assert first.error().endswith("was ended by node 1, where the group was cancelled: SIGTERM was sent to its rank 1")
    assert second.outcome().status == "CANCELLED"
    for machine in (first, second):
        assert "starting the group again" not in Path(machine.outcome().log).read_text()


# --- the other half is not there ---


def never() -> None:
    raise AssertionError("no rank is to be started")


def test_node_0_waits_for_the_other_one_for_so_long_and_no_longer(machines: Machines) -> None:
    error = machines.start(never, node=0, ddp={"rdzv_timeout_s": 0.5}).error()
    assert error == "JobCrashedError: job 0 waited 0.5 s for node 1 to join, in vain"


def test_another_node_waits_for_node_0_for_so_long_and_no_longer(machines: Machines) -> None:
    error = machines.start(never, node=1, ddp={"rdzv_timeout_s": 0.5}).error()
    start = f"JobCrashedError: job 0 waited 0.5 s for node 0 at localhost:{machines.base}, in vain"
    assert error.startswith(start), error
    assert "Connection refused" in error


@pytest.mark.parametrize("node", [0, 1])
def test_a_host_that_is_none_is_said_when_the_time_is_up(machines: Machines, node: int) -> None:
    endpoint = f"no.such.host.invalid:{machines.base}"
    error = machines.start(never, node=node, ddp={"rdzv_timeout_s": 0.5, "rdzv_endpoint": endpoint}).error()
    expected = [
        "could not reach its own store as no.such.host.invalid within 0.5 s",
        f"waited 0.5 s for node 0 at {endpoint}",
    ]
    assert expected[node] in error


def test_node_0_at_an_endpoint_that_is_not_its_own_says_so_when_the_time_is_up(machines: Machines) -> None:
    endpoint = f"192.0.2.1:{machines.base}"  # of no machine: for documentation
    error = machines.start(never, node=0, ddp={"rdzv_timeout_s": 0.5, "rdzv_endpoint": endpoint}).error()
    assert "could not reach its own store as 192.0.2.1 within 0.5 s: give ddp.rdzv_endpoint a host that this" in error


def test_a_port_that_is_in_use_on_node_0_is_said_at_once(machines: Machines) -> None:
    with socket.socket() as somebody:
        somebody.bind(("", machines.base))
        somebody.listen()
        error = machines.start(never, node=0, ddp={"rdzv_timeout_s": 1e6}).error()
    assert f"could not open its store at localhost:{machines.base} (" in error
    assert error.endswith("give ddp.rdzv_endpoint a host that this machine has, and a port that is free on it")


def test_something_else_that_listens_at_the_endpoint_is_not_waited_for_for_ever(machines: Machines) -> None:
    with socket.socket() as somebody:
        somebody.bind(("", machines.base))
        somebody.listen()
        error = machines.start(never, node=1, ddp={"rdzv_timeout_s": 1}).error()
    assert error.endswith("in vain (what listens there is no store of torch's, or hangs)")


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("node", [0, 1])
def test_a_signal_while_the_other_half_is_waited_for_ends_the_sweep_at_once(
    machines: Machines, monkeypatch: pytest.MonkeyPatch, node: int, signum: signal.Signals
) -> None:
    _report_meetings(machines, monkeypatch)
    machine = machines.start(never, node=node, kill_grace_s=1e6, ddp={"rdzv_timeout_s": 1e300})
    assert machines.heard() == f"node {node} waits"
    os.kill(machine.pid, signum)
    assert machine.wait() == -signum
    machines.assert_nothing_is_left()
    (end,) = machines.events(machine, "end")
    assert end["status"] == "CANCELLED"


def test_a_signal_while_something_else_listens_at_the_endpoint_ends_the_sweep_at_once(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    _report_meetings(machines, monkeypatch)
    with socket.socket() as somebody:
        somebody.bind(("", machines.base))
        somebody.listen()
        machine = machines.start(never, node=1, kill_grace_s=1e6, ddp={"rdzv_timeout_s": 1e6})
        assert machines.heard() == "node 1 waits"
        for _ in range(2):  # the second one is torch's own
            somebody.accept()[0].close()
        os.kill(machine.pid, signal.SIGINT)
        assert machine.wait() == -signal.SIGINT


def _report_meetings(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Node 0 waits when its store is open, another one as soon as it knocks."""
    meet, made = _nodes.Nodes.meet, _stores.Stores._made

    def reported_meet(nodes: _nodes.Nodes, start: int, mine: Any) -> Any:
        machines.report(f"node {nodes.node} waits")
        return meet(nodes, start, mine)

    def reported_made(stores: Any, make: Any) -> Any:
        if stores._ddp.node_rank != 0:
            machines.report(f"node {stores._ddp.node_rank} waits")
        return made(stores, make)

    monkeypatch.setattr(_nodes.Nodes, "meet", reported_meet)
    monkeypatch.setattr(_stores.Stores, "_made", reported_made)


def test_a_signal_while_a_third_machine_is_waited_for_ends_the_job_on_the_one_that_is_there(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    _report_meetings(machines, monkeypatch)
    first, second = machines.pair(never, ddp={"nnodes": 3, "rdzv_timeout_s": 1e6})
    assert sorted(machines.heard() for _ in range(3)) == ["node 0 waits", "node 1 waits", "node 1 waits"]
    os.kill(second.pid, signal.SIGINT)
    assert first.error() == "JobCrashedError: job 0 was ended by node 1, where it was cancelled"
    assert second.wait() == -signal.SIGINT


# --- the other half goes ---


def waiting(machines: Machines, *, deaf: bool = False) -> Callable[[], None]:
    """The function of ranks that tell the pid of their job once they are one group; then they wait.

    ``deaf``: that of node 0 for the other one, in a collective.
    """

    def job() -> None:
        join()
        total(1)
        machines.report(f"{os.environ['MACHINE'][-1]} {os.getppid()}")
        if deaf and rank() == 0:
            in_a_collective()
        while True:
            signal.pause()

    return job


def pids_of_jobs(machines: Machines) -> dict[int, int]:
    return dict(tuple(map(int, machines.heard().split())) for _ in range(2))  # type: ignore[misc]


@pytest.mark.parametrize("gone", [0, 1])
def test_a_job_whose_other_half_is_killed_fails_with_a_sentence(
    machines: Machines, monkeypatch: pytest.MonkeyPatch, gone: int
) -> None:
    monkeypatch.setattr(_nodes, "SILENT_AFTER_FAILURE_S", 1.0)  # only the one that is killed is waited for
    pair = machines.pair(waiting(machines, deaf=True))
    os.kill(pids_of_jobs(machines)[gone], signal.SIGKILL)
    error = pair[1 - gone].error()
    assert (
        error
        == "JobCrashedError: job 0 lost " + ["node 0, which holds the store", "node 1, not heard of for 1 s"][gone]
    )
    assert "was ended by SIGKILL" in pair[gone].error()
    machines.assert_nothing_is_left()


def test_a_rank_that_dies_while_the_other_half_is_gone_is_the_reason_and_the_group_is_not_started_again(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_nodes, "SILENT_AFTER_FAILURE_S", 1.0)

    def job() -> None:
        join()
        total(1)
        machines.report(f"{rank()} {os.getpid() if rank() == 0 else os.getppid()}")
        while True:
            signal.pause()

    first, second = machines.pair(job, ddp={"max_restarts": 3})
    pids = pids_of_jobs(machines)
    for number in (1, 0):
        os.kill(pids[number], signal.SIGKILL)
    assert first.error().startswith("JobCrashedError: job 0 lost its rank 0, which was ended by SIGKILL")
    assert "starting the group again" not in Path(first.outcome().log).read_text()
    assert second.outcome().status == "FAILED"


def test_a_node_0_that_hangs_is_lost_too(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_stores, "SILENT_S", 3.0)  # of its store alone
    pair = machines.pair(waiting(machines), kill_grace_s=0.2)
    stopped = pids_of_jobs(machines)[0]
    os.kill(stopped, signal.SIGSTOP)
    assert pair[1].error() == "JobCrashedError: job 0 lost node 0, which holds the store"
    os.kill(stopped, signal.SIGKILL)
    pair[0].wait()
    machines.assert_nothing_is_left()


@pytest.mark.parametrize("gone", [0, 1])
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_job_whose_other_half_belongs_to_a_sweep_that_is_ended_fails_with_a_sentence(
    machines: Machines, gone: int, signum: signal.Signals
) -> None:
    pair = machines.pair(waiting(machines))
    pids_of_jobs(machines)
    os.kill(pair[gone].pid, signum)
    assert pair[gone].wait() == -signum
    how = "SIGINT" if signum == signal.SIGINT else "SIGTERM"
    why = f"was ended by node {gone}, where the group was cancelled: {how} was sent to its process"
    assert pair[1 - gone].error() == f"JobCrashedError: job 0 {why}"
    machines.assert_nothing_is_left()


# --- machines that were told different things ---


def test_different_commands_are_told_apart_on_both_machines(machines: Machines) -> None:
    def job(x: int) -> None:
        raise AssertionError(f"no rank is to be started for {x}")

    first = machines.start(job, {"x": 1}, node=0)
    second = machines.start(job, {"x": 2}, node=1)
    assert first.error() == (
        "JobCrashedError: job 0 (x=1) has 'job 0 (x=1)' here and 'job 0 (x=2)' on node 1: "
        "give each machine the same command"
    )
    assert "has 'job 0 (x=2)' here and 'job 0 (x=1)' on node 0" in second.error()


@pytest.mark.parametrize(("key", "here", "there"), [("nproc_per_node", 1, 2), ("max_restarts", 0, 1), ("nnodes", 2, 3)])
def test_different_settings_that_must_be_the_same_are_named_on_both_machines(
    machines: Machines, key: str, here: int, there: int
) -> None:
    first = machines.start(never, node=0, ddp={key: here})
    second = machines.start(never, node=1, ddp={key: there})
    words = f"has {here} here and {there} on node 1: give each machine the same ddp.{key}"
    assert first.error() == f"JobCrashedError: job 0 {words}"
    other = f"has {there} here and {here} on node 0: give each machine the same ddp.{key}"
    if key == "nnodes":  # it would have waited for a third one
        other = f"was ended by node 0, where it {words}"
    assert second.error() == f"JobCrashedError: job 0 {other}"


def test_of_two_machines_with_one_node_rank_the_second_one_fails_and_the_first_goes_on(machines: Machines) -> None:
    pair = machines.pair(waiting_for(machines, "go"))
    for _ in range(2):
        machines.heard()
    third = machines.start(never, node=1, name="third")
    assert third.error() == "JobCrashedError: job 0 met another machine with ddp.node_rank=1: give each its own"
    (machines.directory / "go").touch()
    assert [machine.outcome().value for machine in pair] == [2.0, 2.0]


def waiting_for(machines: Machines, name: str) -> Callable[[], float]:
    def job() -> float:
        join()
        machines.report("runs")
        while not (machines.directory / name).exists():
            os.sched_yield()
        return total(1)

    return job


# --- the store ---


def test_a_connection_that_torch_closes_meanwhile_costs_no_rank_the_descriptor_that_has_its_number(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that knocks is such a connection; the next number to be given away is that of the rank's log, say."""
    forget, fork_all = _stores.Stores.forget, _group.Ranks._fork_all
    knocks: list[int] = []

    def knocked(stores: Any) -> None:
        knocks.append(socket.socket().detach())
        knock = _descriptors.Descriptor.of(knocks[0])
        stores._opened[knock.fd] = knock.file
        forget(stores)

    def closed(ranks: Any) -> None:
        if knocks:
            os.close(knocks.pop())
        fork_all(ranks)

    monkeypatch.setattr(_stores.Stores, "forget", knocked)
    monkeypatch.setattr(_group.Ranks, "_fork_all", closed)
    pair = machines.pair(fails_at_first, ddp={"max_restarts": 1})
    assert [machine.outcome().value for machine in pair] == [0, 0]


def fails_at_first() -> int:
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise ValueError("at first")
    return rank()
