"""Several sweeps at once on the same GPUs, which need not be there: ids are taken at their word without a driver.

The jobs themselves find out when there is one too many on a GPU: each takes one of its seats.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from running import App, starting, wait_until
from standin import Cards
from support import LIMIT_S

from hydra_plugins.hydra_gpu_pool_launcher import GpuPool, _descriptors, _lease_directory
from hydra_plugins.hydra_gpu_pool_launcher._errors import ConfigurationError

SEATS = """
import fcntl, os, sys, time

SEATS, PER_GPU, NAME = {seats!r}, {per_gpu}, {name!r}

def sit():
    for fd in os.listdir("/proc/self/fd"):
        if os.path.exists(f"/proc/self/fd/{{fd}}"):
            path = os.readlink(f"/proc/self/fd/{{fd}}")
            assert not path.startswith(os.environ["GPU_POOL_LEASES"]), "a job has a descriptor of the leases"
    for gpu in os.environ["GPU_POOL_GPUS"].split(","):
        for seat in range(PER_GPU):
            fd = os.open(f"{{SEATS}}/{{gpu}}.{{seat}}", os.O_RDWR | os.O_CREAT)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                os.close(fd)
        else:
            raise RuntimeError(f"one job too many on GPU {{gpu}}")
    with open(f"{{SEATS}}/order", "a") as file:
        file.write(f"{{NAME}} {{os.environ['GPU_POOL_JOB_NUM']}}\\n")

def work(x):
    sit()
    time.sleep(0.02)  # what would overlap, overlaps

def gated(x):  # works until it is let through
    sit()
    with open(f"{{SEATS}}/{{NAME}}.{{x}}") as gate:
        gate.read()

def rests(x):
    sit()
    report()
    rest()

def needs_the_gpu(x):  # and finds no memory on it, at first
    if not os.path.exists(f"{{SEATS}}/{{NAME}}.tried"):
        open(f"{{SEATS}}/{{NAME}}.tried", "x").close()
        raise RuntimeError("CUDA out of memory")
    for _ in range(PER_GPU):
        sit()
    open(f"{{SEATS}}/done", "x").close()
    time.sleep(0.02)

def works_until_that_is_done(x):
    if not os.path.exists(f"{{SEATS}}/done"):
        work(x)

def fills(x):  # the memory of GPU 0
    with open(os.environ["STANDIN_CARDS"], "a") as file:
        file.write(f"process on=GPU-aa pid={{os.getpid()}} used=70e9\\n")
    gated(x)

def leaves_a_daemon(x):  # which sits there, too
    sit()
    read, write = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            hear_nothing(lambda: os.write(write, b"!"))
        os._exit(0)
    os.read(read, 1)
"""


class Sweeps:
    """Starts sweeps, each in a directory and with a name of its own, which say in which order their jobs started."""

    def __init__(self, directory: Path, stack: contextlib.ExitStack) -> None:
        self.directory = directory
        self._stack = stack
        (directory / "seats").mkdir()

    def start(self, name: str, job: str, jobs: int, seats: int = 1, **config: Any) -> App:
        directory = self.directory / name
        directory.mkdir()
        source = SEATS.format(seats=str(self.directory / "seats"), per_gpu=seats, name=name)
        arguments = ", ".join(f"{key}={value!r}" for key, value in {"gpus": [0], "kill_grace_s": 0.3, **config}.items())
        run = f"outcomes = GpuPool(dir='sweep', {arguments}).map({job}, [dict(x=x) for x in range({jobs})])"
        end = "sys.exit(' '.join(str(o.error) for o in outcomes if o.error) or 0)"
        main = "".join(f"    {line}\n" for line in (run, end))
        start = self._stack.enter_context(starting(directory))
        return start(f"if __name__ == '__main__':\n{main}", before=source)

    def gate(self, name: str, x: int) -> Callable[[], None]:
        """Makes a job of ``gated`` wait; what lets it through."""
        path = self.directory / f"seats/{name}.{x}"
        os.mkfifo(path)

        def open_it() -> None:
            os.close(os.open(path, os.O_WRONLY))

        return open_it

    def order(self) -> list[str]:
        """The jobs that have started so far."""
        path = self.directory / "seats/order"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def sweeps(tmp_path: Path) -> Iterator[Sweeps]:
    with contextlib.ExitStack() as stack:
        yield Sweeps(tmp_path, stack)


def wait_in_line(leases: Path, sweeps: int) -> None:
    """Block until so many sweeps wait for others."""
    wait_until(lambda: len([*leases.glob("wait.*")]) >= sweeps, leases)


def assert_ends_well(*apps: App) -> list[str]:
    """What each has said."""
    said = [app.process.communicate(timeout=LIMIT_S)[1] for app in apps]
    assert [app.process.returncode for app in apps] == [0] * len(apps), "\n".join(said)
    return said


@pytest.mark.parametrize("count", [2, 3])
def test_sweeps_at_once_have_no_more_jobs_on_a_gpu_than_each_of_them_allows(sweeps: Sweeps, count: int) -> None:
    apps = [sweeps.start(f"s{i}", "work", 8, seats=2, gpus=[0, 1], per_gpu=2) for i in range(count)]
    assert_ends_well(*apps)
    assert len(sweeps.order()) == 8 * count


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_jobs_of_fresh_interpreters_lease_their_slots_too(sweeps: Sweeps, leases: Path, method: str) -> None:
    let_through = sweeps.gate("first", 0)
    first = sweeps.start("first", "gated", 1, start_method=method)
    wait_until(lambda: sweeps.order() == ["first 0"], sweeps.directory / "seats")
    second = sweeps.start("second", "work", 1, start_method=method)
    wait_in_line(leases, 1)
    let_through()
    assert_ends_well(first, second)
    assert sweeps.order() == ["first 0", "second 0"]


def test_a_short_sweep_that_comes_later_does_not_wait_for_the_end_of_a_long_one_and_says_once_whom_it_waits_for(
    sweeps: Sweeps, leases: Path
) -> None:
    let_through = sweeps.gate("long", 0)
    for x in range(1, 4):
        (sweeps.directory / f"seats/long.{x}").touch()
    long = sweeps.start("long", "gated", 4)
    wait_until(lambda: sweeps.order() == ["long 0"], sweeps.directory / "seats")
    short = sweeps.start("short", "work", 2)
    wait_in_line(leases, 1)
    wait_until(
        lambda: any(event["event"] == "waiting" for event in short.journal()), short.directory / "sweep/.gpu_pool"
    )
    let_through()
    said = assert_ends_well(short, long)
    assert sweeps.order() == ["long 0", "short 0", "long 1", "short 1", "long 2", "long 3"]
    holder = f"the sweep in {long.directory}/sweep (process {long.process.pid})"
    assert said[0].count("waits for a slot") == 1
    assert f"a job waits for a slot on GPU 0, which is held by {holder}" in said[0]
    assert not [*leases.glob("wait.*")]


def test_sweeps_whose_jobs_need_two_gpus_each_do_not_block_each_other_for_ever(sweeps: Sweeps) -> None:
    apps = [
        sweeps.start("forth", "work", 4, gpus=[0, 1], gpus_per_job=2),
        sweeps.start("back", "work", 4, gpus=[1, 0], gpus_per_job=2),
    ]
    assert_ends_well(*apps)
    assert len(sweeps.order()) == 8


def test_a_job_that_needs_two_gpus_gets_them_while_others_that_need_one_go_on(sweeps: Sweeps, leases: Path) -> None:
    gates = [sweeps.gate("one", x) for x in range(2)]
    for x in range(2, 6):
        (sweeps.directory / f"seats/one.{x}").touch()
    one = sweeps.start("one", "gated", 6, gpus=[0, 1])
    wait_until(lambda: len(sweeps.order()) == 2, sweeps.directory / "seats")
    two = sweeps.start("two", "work", 1, gpus=[0, 1], gpus_per_job=2)
    wait_in_line(leases, 1)
    gates[0]()
    wait_in_line(leases, 2)  # the next job of the other one has room, but for whom that is kept
    gates[1]()
    assert_ends_well(one, two)
    assert sweeps.order()[2] == "two 0"


def test_a_job_that_ran_out_of_memory_has_the_gpu_alone_soon_although_others_with_more_slots_go_on(
    sweeps: Sweeps,
) -> None:
    others = [sweeps.start(name, "works_until_that_is_done", 200, seats=3, per_gpu=3) for name in ("one", "two")]
    wait_until(lambda: len(sweeps.order()) > 3, sweeps.directory / "seats")
    big = sweeps.start("big", "needs_the_gpu", 1, seats=3, max_retries=1)
    assert_ends_well(big, *others)
    assert sweeps.order().count("big 0") == 3
    assert len(sweeps.order()) < 400, "it waited for the others' ends"


def test_a_sweep_whose_memory_anothers_jobs_hold_has_its_turn_before_all_of_them_are_over(
    sweeps: Sweeps, leases: Path, cards: Cards
) -> None:
    cards.are("gpu uuid=GPU-aa total=80e9 name=A")
    gates = [sweeps.gate("fills", x) for x in range(2)]
    for x in range(2, 6):
        (sweeps.directory / f"seats/fills.{x}").touch()
    fills = sweeps.start("fills", "fills", 6, seats=3, per_gpu=2)
    wait_until(lambda: len(sweeps.order()) == 2, sweeps.directory / "seats")
    needs = sweeps.start("needs", "work", 1, seats=3, min_free_gpu_mem_gb=20)
    wait_in_line(leases, 1)
    gates[0]()
    wait_in_line(leases, 2)  # the other one's next job has room, but for whom that is kept
    gates[1]()
    assert_ends_well(fills, needs)
    assert sweeps.order()[2] == "needs 0"


@pytest.mark.parametrize(
    ("killed", "method"),
    [
        (["main"], "fork"),
        (["supervisor"], "fork"),
        (["supervisor"], "forkserver"),
        (["guard"], "fork"),
        (["main", "guard", "supervisor"], "fork"),
    ],
    ids=["main", "supervisor", "supervisor of forkserver", "guard", "all"],
)
def test_what_a_killed_sweep_has_leased_is_free_when_its_jobs_are_gone(
    sweeps: Sweeps, leases: Path, killed: list[str], method: str
) -> None:
    first = sweeps.start("first", "rests", 1, start_method=method)
    first.wait_for_jobs(1)
    pids = {"main": first.process.pid, **first.relatives()}
    # Where all are killed, nobody is left who could wait until the job has died with them.
    second = sweeps.start("second", "work", 2, seats=1 if len(killed) == 1 else 2)
    wait_in_line(leases, 1)
    if killed == ["supervisor"]:  # its guard has what it had, until it has ended the jobs
        held_up = (pids["main"], pids["guard"])  # main as well, which would have the guard go on
        for pid in held_up:
            os.kill(pid, signal.SIGSTOP)
        os.kill(pids["supervisor"], signal.SIGKILL)
        assert _descriptors.wait_readable([first.pidfds[-1]], LIMIT_S)
        assert [*_lease_directory.holders(str(leases))] == ["0.0"]
        for pid in held_up:
            os.kill(pid, signal.SIGCONT)
    for name in killed:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pids[name], signal.SIGKILL)
    assert_ends_well(second)
    assert [name for name in sweeps.order() if "second" in name] == ["second 0", "second 1"]
    first.assert_nothing_is_left()


def test_a_slot_is_leased_until_what_its_job_has_left_behind_is_gone(sweeps: Sweeps) -> None:
    assert_ends_well(*(sweeps.start(name, "leaves_a_daemon", 4) for name in ("first", "second")))
    assert len(sweeps.order()) == 8


def test_a_sweep_that_shares_nothing_takes_what_others_have(sweeps: Sweeps, leases: Path) -> None:
    let_through = sweeps.gate("first", 0)
    first = sweeps.start("first", "gated", 1)
    wait_until(lambda: sweeps.order() == ["first 0"], sweeps.directory / "seats")
    assert [*_lease_directory.holders(str(leases))] == ["0.0"]
    assert_ends_well(sweeps.start("second", "work", 1, seats=2, share=False))
    assert sweeps.order() == ["first 0", "second 0"]
    let_through()
    assert_ends_well(first)


def test_a_sweep_in_a_job_of_another_one_uses_the_slot_that_this_has_leased(tmp_path: Path) -> None:
    def inner() -> Any:
        return GpuPool(gpus=[0], dir=tmp_path / "inner", progress="none").map(abs_of, [{"x": -1}])[0].value

    outcome = GpuPool(gpus=[0], dir=tmp_path / "outer", timeout_min=LIMIT_S / 60).map(inner, [{}])[0]
    assert (outcome.error, outcome.value) == (None, 1)


def abs_of(x: int) -> int:
    return abs(x)


def test_a_directory_that_others_can_use_is_refused_before_anything_starts(tmp_path: Path, leases: Path) -> None:
    leases.chmod(0o755)
    with pytest.raises(ConfigurationError, match=r"^share=true: .*others can use it.*share=false"):
        GpuPool(gpus=[0], dir=tmp_path).map(abs_of, [{"x": 1}])
    assert GpuPool(gpus=[0], dir=tmp_path, share=False).map(abs_of, [{"x": 1}])[0].value == 1
    assert GpuPool(gpus=[], dir=tmp_path).map(abs_of, [{"x": 1}])[0].value == 1


def test_what_the_guard_cannot_open_is_refused_in_a_sentence(tmp_path: Path, leases: Path) -> None:
    (leases / "0.0").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigurationError, match=rf"^gpu_pool cannot lease slots in {leases} \(0\.0: "):
        GpuPool(gpus=[0], dir=tmp_path).map(abs_of, [{"x": 1}])


def test_without_locks_one_warning_is_given_and_the_sweep_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    outcomes = GpuPool(gpus=[0], dir=tmp_path).map(abs_of, [{"x": 1}, {"x": 2}])
    assert [outcome.value for outcome in outcomes] == [1, 2]
    assert caplog.text.count("slots are not leased") == 1
    assert not [line for line in _journal(tmp_path) if line["event"] == "waiting"]


def _journal(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / ".gpu_pool/journal.jsonl").read_text().splitlines()]
