"""GPU memory: the process that asks a driver, what is made of its answers, and sweeps that wait for memory.

The driver is a stand-in, which nvidia-ml-py takes for real: see ``standin``.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from running import StartApp
from standin import Cards
from support import LIMIT_S, outcomes, sleeper

from hydra_plugins.hydra_gpu_pool_launcher import _cards, _descriptors, _devices, _machine, _pidfd, _process
from hydra_plugins.hydra_gpu_pool_launcher._cards import Gpu, Instance
from hydra_plugins.hydra_gpu_pool_launcher._errors import ConfigurationError
from hydra_plugins.hydra_gpu_pool_launcher._family import Family, children
from hydra_plugins.hydra_gpu_pool_launcher._gauge import RETURN_LOOK_S
from hydra_plugins.hydra_gpu_pool_launcher._inotify import Changes
from hydra_plugins.hydra_gpu_pool_launcher._memory import SAMPLE_S, Memory, by_device, scarcity, used_by
from hydra_plugins.hydra_gpu_pool_launcher._model import Device, Settings, Status
from hydra_plugins.hydra_gpu_pool_launcher._monitor import ANSWER_S, FIRST_S, Answer, Monitor
from hydra_plugins.hydra_gpu_pool_launcher._settings import checked

GB = 10**9
TWO = ("gpu uuid=GPU-aa total=80e9 name=A", "gpu uuid=GPU-bb total=80e9 name=B")


# --- the process that asks ---


@pytest.fixture
def monitor() -> Iterator[Monitor]:
    """That asks the driver of the environment."""
    monitor = asking(*_cards.command(_cards.folder_of_pynvml()))
    yield monitor
    end(monitor)


def asking(*command: str) -> Monitor:
    return Monitor(command, Family())


def end(monitor: Monitor) -> None:
    for fd in monitor.descriptors():
        os.close(fd)
        os.kill(the_child(), signal.SIGKILL)
        os.waitpid(the_child(), 0)


def bury_all() -> None:
    """What was killed may take a while to die."""
    for pid in children():
        os.waitpid(pid, 0)


def heard(monitor: Monitor, now: float) -> Answer:
    """Block until there is something to hear."""
    while True:
        assert _descriptors.wait_readable(monitor.descriptors(), LIMIT_S), "nothing is said"
        if (answer := monitor.hear(now)) is not None:
            return answer


def the_child() -> int:
    (pid,) = children()
    return pid


def test_each_question_has_an_answer_as_the_driver_is_then(cards: Cards, monitor: Monitor) -> None:
    cards.are("gpu uuid=GPU-aa total=80e9 free=70e9 name=A")
    assert monitor.ask(0) is None
    (gpu,) = heard(monitor, 1).gpus
    assert (gpu.uuid, gpu.free_bytes) == ("GPU-aa", 70 * GB)
    cards.are("gpu uuid=GPU-aa total=80e9 free=60e9 name=A")
    monitor.ask(2)
    answer = heard(monitor, 3)
    assert (answer.asked, answer.gpus[0].free_bytes) == (2, 60 * GB)
    assert monitor.deadline is None


def test_a_driver_that_cannot_be_asked_says_why(
    monitor: Monitor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monitor.ask(0)
    assert "NVML: " in (heard(monitor, 1).fault or "")


@pytest.mark.parametrize("heard_before", [False, True])
def test_whoever_is_silent_for_too_long_is_ended_and_started_again_later(heard_before: bool) -> None:
    says = "print('{}', flush=True); " if heard_before else ""
    monitor = asking(sys.executable, "-c", f"import signal; {says}signal.pause()")
    asked = 0.0
    monitor.ask(asked)
    if heard_before:
        heard(monitor, 0)
        asked = 2.0
        monitor.ask(asked)
    pidfd = _pidfd.pidfd_open(the_child())
    limit = asked + (ANSWER_S if heard_before else FIRST_S)
    assert monitor.deadline == limit
    assert monitor.hear(limit - 0.01) is None
    fault = f"no answer within {limit - asked:g} s"
    assert monitor.hear(limit) == Answer(asked, (), fault)
    assert _descriptors.wait_readable([pidfd], LIMIT_S), "it was not ended"
    os.close(pidfd)
    bury_all()
    if not heard_before:
        assert monitor.ask(limit) is None, "it had its time"
        end(monitor)
    else:
        assert monitor.ask(limit - 4) == Answer(limit - 4, (), fault), "not so soon"


def test_a_process_that_ends_is_started_again_less_and_less_often() -> None:
    monitor = asking("/bin/true")
    starts: list[float] = []
    now = 0.0
    while len(starts) < 5:
        if monitor.ask(now) is None:
            starts.append(now)
            assert heard(monitor, now).fault == "the process that asks it has ended"
        now += 1
    assert starts == [0, 10, 30, 70, 150]
    bury_all()


def test_a_process_that_cannot_be_started_is_a_reason_and_no_exception() -> None:
    monitor = asking("/no/such/program")
    monitor.ask(0)
    assert heard(monitor, 0).fault == "the process that asks it has ended"
    bury_all()


def test_the_process_ends_with_the_one_that_keeps_it_although_it_does_not_listen() -> None:
    read, write = os.pipe()

    def keep(_: frozenset[int]) -> int:
        monitor = asking(sys.executable, "-c", "import signal; print('{}', flush=True); signal.pause()")
        monitor.ask(0)
        heard(monitor, 0)
        return int(os.write(write, str(the_child()).encode()) == 0)

    keeper = _process.fork(keep)
    pid = int(os.read(read, 20))
    os.waitpid(keeper, 0)
    pidfd = _pidfd.pidfd_open(pid)
    assert _descriptors.wait_readable([pidfd], LIMIT_S), "it is still there"
    for fd in (read, write, pidfd):
        os.close(fd)


def test_a_family_ends_what_a_job_leaves_behind_and_not_the_monitor() -> None:
    monitor = asking(sys.executable, "-c", "import sys\nfor line in sys.stdin: print('{}', flush=True)")
    monitor.ask(0)
    pid = the_child()
    monitor.family.start(0, lambda _: 0)
    steps: dict[int, Any] = {}
    while not any(steps.values()):
        steps, _ = monitor.family.wait(LIMIT_S)
    assert the_child() == pid
    end(monitor)


# --- what is made of the answers ---


def told(free: int | None = None, *processes: tuple[int, int | None], total: int | None = 80 * GB) -> Gpu:
    return Gpu(0, "GPU-aa", "A", total_bytes=total, free_bytes=free, processes=processes)


def test_a_device_is_known_by_its_uuid_and_an_instance_by_its_own() -> None:
    instance = Instance("MIG-ab")
    gpus = [Gpu(0, "GPU-aa", "A"), Gpu(1, "GPU-bb", "B", mig=True, instances=(instance,)), Gpu(2, "", "", fault="lost")]
    devices = [Device("MIG-ab", "MIG-ab"), Device("0", "GPU-aa"), Device("7"), Device("5", "GPU-gone")]
    assert by_device(devices, gpus) == {0: instance, 1: gpus[0]}


def test_a_job_holds_what_the_processes_of_its_tree_hold_on_its_devices() -> None:
    on = {0: told(0, (10, 3), (11, 4), (20, 5), (99, 7)), 1: told(0, (10, 1))}
    owner = {10: 0, 11: 0, 20: 1}.get
    assert used_by({0: [0, 1], 1: [0], 2: [1]}, on, owner) == {(0, 0): 7, (0, 1): 1, (1, 0): 5, (2, 1): 0}


def test_what_a_driver_does_not_tell_of_a_job_is_not_taken_for_nothing() -> None:
    hidden = Gpu(1, "GPU-bb", "B", processes=None)
    assert used_by({0: [0, 1, 2], 1: [0]}, {0: told(0, (10, None), (20, 5)), 1: hidden}, {10: 0, 20: 1}.get) == {
        (1, 0): 5
    }


@pytest.mark.parametrize(
    ("free", "holders", "fault", "line"),
    [
        (
            2_100_000_000,
            ["process 4242 (python train.py, bob) 60.1 GB"],
            None,
            "GPU 0 has 2.1 GB free of 80.0, and gets no job until it is min_free_gpu_mem_gb=20; held by process 4242 "
            "(python train.py, bob) 60.1 GB",
        ),
        (0, [], None, "GPU 0 has 0.0 GB free of 80.0, and gets no job until it is min_free_gpu_mem_gb=20"),
        (
            None,
            [],
            "no answer within 10 s",
            "GPU 0 gets no job, since nobody can say what is free on it (no answer within 10 s), and "
            "min_free_gpu_mem_gb=20 asks for that",
        ),
    ],
)
def test_scarcity_is_told_with_its_figures_and_its_reason(
    free: int | None, holders: list[str], fault: str | None, line: str
) -> None:
    assert scarcity(Device("0"), 20 * GB, told(free), holders, fault) == line


def test_of_many_who_hold_memory_those_with_most_are_named_and_the_rest_counted() -> None:
    line = scarcity(Device("GPU-aa"), 20 * GB, told(0), [f"process {pid}" for pid in range(7)], None)
    assert line.startswith("GPU-aa has ")
    assert line.endswith("held by process 0, process 1, process 2, process 3, 3 more")


@dataclass
class FakeMonitor:
    """A driver whose answers are written down; a question is answered when ``hear`` is called with ``answers`` set."""

    gpu: Gpu
    asked: list[float] = field(default_factory=list)
    answers: bool = True

    def ask(self, now: float) -> Answer | None:
        self.asked.append(now)
        return None

    def hear(self, _: float) -> Answer | None:
        return Answer(self.asked[-1], (self.gpu,)) if self.answers and self.asked else None

    def descriptors(self) -> list[int]:
        return []

    @property
    def deadline(self) -> float | None:
        return None


@dataclass
class FakeFamily:
    pids: Mapping[int, int]

    def leaders(self) -> Mapping[int, int]:
        return self.pids


@dataclass
class Watched:
    """A memory whose driver and whose jobs are written down; ``lines``: what it has told."""

    gpu: Gpu
    pids: bool = True
    jobs: dict[int, int] = field(default_factory=lambda: {0: os.getpid()})
    lines: list[tuple[int, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.monitor = FakeMonitor(self.gpu)
        fakes: tuple[Any, Any] = (FakeFamily(self.jobs), self.monitor)
        devices = [Device("0", "GPU-aa")]
        self.memory = Memory(devices, *fakes, self.pids, 20 * GB, lambda num, mb: self.lines.append((num, mb)))
        self.memory.started(0, [0])

    def holds(self, gb: float, at: float) -> None:
        self.monitor.gpu = told(0, (os.getpid(), round(gb * GB)))
        self.memory.step(at)


def test_the_jobs_are_looked_at_once_a_second_while_there_are_any() -> None:
    watched = Watched(told(0))
    watched.memory.step(5)
    assert watched.monitor.asked == [5]
    assert watched.memory.deadline == 5 + SAMPLE_S
    watched.memory.step(5.9)
    watched.memory.step(6)
    assert watched.monitor.asked == [5, 6]
    watched.jobs.clear()
    watched.memory.step(100)
    assert watched.monitor.asked == [5, 6]
    assert watched.memory.deadline is None


def test_the_peak_is_kept_and_what_changes_much_is_told_and_what_changes_little_is_not() -> None:
    watched = Watched(told(0))
    watched.memory.step(0)
    for at, gb in enumerate([1.0, 1.05, 1.11, 10, 10.4, 10.6, 0.2, 0.11], 1):
        watched.holds(gb, at)
    assert watched.memory.gpu_mb(0) == 10_600
    assert watched.lines == [(0, 1000), (0, 1110), (0, 10_000), (0, 10_600), (0, 200)]
    watched.memory.started(0, [0])
    assert watched.memory.gpu_mb(0) is None, "this is another try"


def test_a_change_is_told_at_most_once_a_second() -> None:
    watched = Watched(told(0))
    watched.memory.step(0)
    watched.holds(1, 1)
    watched.memory.look(1.1)
    watched.holds(2, 1.2)
    watched.holds(3, 2)
    assert watched.lines == [(0, 1000), (0, 3000)]


def test_in_a_container_the_pids_are_the_hosts_and_no_job_is_known_to_hold_anything() -> None:
    watched = Watched(told(5, (os.getpid(), 60 * GB)), pids=False)
    watched.memory.step(0)
    watched.memory.look(0)
    (measured,) = watched.memory.step(0)
    assert (measured.free, measured.used) == ({0: 5}, {})
    assert watched.memory.gpu_mb(0) is None
    assert watched.memory.scarcity(0).endswith(f"held by process {os.getpid()} of the host 60.0 GB")


def test_an_answer_to_an_earlier_question_is_none_to_a_look() -> None:
    watched = Watched(told(5))
    watched.memory.step(1)
    watched.monitor.answers = False
    watched.memory.look(2)
    watched.monitor.asked.pop()
    watched.monitor.answers = True
    assert watched.memory.step(2) == []
    watched.monitor.asked.append(2)
    (measured,) = watched.memory.step(2.1)
    assert measured.free == {0: 5}


def test_a_holder_is_named_with_its_job_its_command_and_its_user() -> None:
    with subprocess.Popen(["cat", "-"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as neighbour:
        assert neighbour.stdin is not None
        assert neighbour.stdout is not None
        neighbour.stdin.write(b".")
        neighbour.stdout.read(1)  # it runs: the kernel has its arguments
        watched = Watched(told(5, (os.getpid(), 1 * GB), (neighbour.pid, 60 * GB)), jobs={3: neighbour.pid})
        watched.memory.step(0)
        watched.memory.step(1)
        line = watched.memory.scarcity(0)
    first, second = line.partition("; held by ")[2].split(" GB, ")
    assert first.startswith(f"process {neighbour.pid} (job 3, cat -, ")
    assert first.endswith(") 60.0")
    assert second.startswith(f"process {os.getpid()} (")


# --- what is refused before anything starts ---


def settings(gb: float, **more: Any) -> Settings:
    return checked({"min_free_gpu_mem_gb": gb, **more})


def test_more_than_a_card_has_is_refused_with_its_name(cards: Cards) -> None:
    cards.are("gpu uuid=GPU-aa total=80e9 name=A", "gpu uuid=GPU-bb total=24e9 name=B")
    layout, _ = _devices.layout(settings(24), os.environ)
    assert _devices.least_free(settings(24), layout) == 24 * GB
    with pytest.raises(ConfigurationError) as refused:
        _devices.layout(settings(25), os.environ)
    assert str(refused.value) == "hydra.launcher.min_free_gpu_mem_gb=25.0: expected at most 24, all that GPU 1 has."


def test_where_nobody_can_say_what_is_free_it_is_refused() -> None:
    with pytest.raises(
        ConfigurationError, match=r"min_free_gpu_mem_gb=4.0: no NVIDIA driver says how much memory GPU 0"
    ):
        _devices.layout(settings(4, gpus=[0]), os.environ)


def test_with_cpu_slots_it_is_ignored_with_one_line() -> None:
    layout, lines = _devices.layout(settings(4, gpus=[]), os.environ)
    assert [line for line in lines if "min_free" in line] == [
        "hydra.launcher.min_free_gpu_mem_gb=4.0 is ignored: CPU slots have no GPU memory"
    ]
    assert _devices.least_free(settings(4, gpus=[]), layout) is None


def test_nothing_is_as_good_as_none(cards: Cards) -> None:
    cards.are(*TWO)
    layout, _ = _devices.layout(settings(0), os.environ)
    assert _devices.least_free(settings(0), layout) is None


# --- sweeps ---


@dataclass(frozen=True)
class Sweep:
    """A sweep's journal, as its own jobs see it."""

    directory: Path

    def events(self, event: str) -> list[dict[str, Any]]:
        lines = (self.directory / ".gpu_pool/journal.jsonl").read_text().splitlines()
        return [line for line in map(json.loads, lines) if line["event"] == event]

    def wait_for(self, event: str, **facts: Any) -> dict[str, Any]:
        """Block until there is such a line."""
        with Changes() as changes:
            changes.watch(str(self.directory / ".gpu_pool"))
            while True:
                for line in self.events(event):
                    if facts.items() <= line.items():
                        return line
                changes.wait(LIMIT_S)


@pytest.fixture(autouse=True)
def _pids_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in tells the pids that it is told, whatever namespace the tests run in."""
    monkeypatch.setattr(_machine, "in_first_pid_namespace", lambda: True)


def test_what_a_job_and_its_children_hold_is_in_the_journal_while_it_runs_and_its_peak_at_its_end(
    cards: Cards, tmp_path: Path
) -> None:
    cards.are(*TWO)
    sweep = Sweep(tmp_path)

    def job(x: int) -> list[str]:
        links = (Path(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd"))
        sockets = [name for link in links if link.is_symlink() and (name := str(link.readlink())).startswith("socket:")]
        with sleeper() as child:
            uuid = ("GPU-aa", "GPU-bb")[int(os.environ["CUDA_VISIBLE_DEVICES"])]
            cards.get(f"process on={uuid} pid={os.getpid()} used={x + 1}e9")
            cards.get(f"process on={uuid} pid={child.pid} used=500e6")
            sweep.wait_for("memory", job=x, gpu_mb=1000.0 * (x + 1) + 500)
        return sockets

    results = outcomes(tmp_path, job, *({"x": x} for x in range(3)), gpus="auto")  # the last one: when somebody asks
    assert [result.error for result in results] == [None] * 3
    assert [result.value for result in results] == [[]] * 3, "a job has an end of the driver's channel"
    assert {line["job"]: line["gpu_mb"] for line in sweep.events("end")} == {0: 1500.0, 1: 2500.0, 2: 3500.0}


def test_while_a_neighbour_fills_a_gpu_its_slots_wait_and_the_others_go_on_and_one_line_says_who(
    cards: Cards, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sweep = Sweep(tmp_path)
    caplog.set_level("INFO", "gpu_pool")

    def job(x: int) -> str:
        if x == 1:
            sweep.wait_for("waiting")
            cards.are(*TWO)
            sweep.wait_for("start", job=2)
        return os.environ["CUDA_VISIBLE_DEVICES"]

    with sleeper() as neighbour:
        cards.are(*TWO, f"process on=GPU-aa pid={neighbour.pid} used=70e9")
        results = outcomes(tmp_path, job, *({"x": x} for x in range(3)), gpus="auto", min_free_gpu_mem_gb=20)
    assert [result.value for result in results] == ["1", "1", "0"], results
    (waiting,) = sweep.events("waiting")
    assert waiting["device"] == "0"
    assert waiting["why"].startswith("GPU 0 has 10.0 GB free of 80.0")
    assert f"held by process {neighbour.pid} (sleep 1000, " in waiting["why"]
    assert [record.getMessage() for record in caplog.records].count(waiting["why"]) == 1


def test_a_slot_is_given_on_when_two_looks_have_found_that_its_memory_rises_no_more(
    cards: Cards, tmp_path: Path
) -> None:
    cards.are("gpu uuid=GPU-aa total=80e9 free=10e9 name=A")
    outcomes(tmp_path, lambda: None, {}, {}, gpus="auto")
    (_, start), (end, _) = Sweep(tmp_path).events("start"), Sweep(tmp_path).events("end")
    assert start["time"] - end["time"] >= RETURN_LOOK_S


def test_a_driver_that_hangs_holds_nothing_up_where_no_memory_is_asked_for(cards: Cards, tmp_path: Path) -> None:
    cards.are(*TWO)

    def job(x: int) -> int:
        cards.are("driver hang=1", *TWO)
        return x

    results = outcomes(tmp_path, job, *({"x": x} for x in range(4)), gpus="auto")
    assert [result.status for result in results] == [Status.COMPLETED] * 4


def test_where_the_supervisor_is_killed_the_process_that_asks_ends_too(cards: Cards, start_app: StartApp) -> None:
    cards.are(*TWO)
    app = start_app("GpuPool(gpus=[0], dir='sweep').map(sleeping, [dict(x=0)])")
    app.wait_for_jobs(1)
    supervisor = app.relatives()["supervisor"]
    os.kill(supervisor, signal.SIGKILL)
    app.assert_nothing_is_left()
