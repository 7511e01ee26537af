"""How groups of ranks end: of one rank's failure, of a signal, with their sweep; and how they are started again."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
from running import App, StartApp
from support import LIMIT_S, RunApp, build_driver, outcomes

from hydra_plugins.hydra_gpu_pool_launcher import (
    JobCancelledError,
    JobError,
    JobOutcome,
    JobTimeoutError,
    Status,
    _ddp,
    _family,
    _group,
    _stores,
)

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")


def groups(directory: Path, job: Callable[..., Any], *calls: dict[str, Any], **config: Any) -> list[JobOutcome]:
    """One outcome per call, of groups of two ranks. Keys of ``ddp`` are given among the others."""
    ddp = {key: config.pop(key) for key in ("nproc_per_node", "max_restarts") if key in config}
    config = {"gpus": [], "mode": "ddp", "ddp": {"nproc_per_node": 2, **ddp}, "progress": "none", **config}
    return outcomes(directory, job, *(calls or ({},)), **config)


def rank() -> int:
    return int(os.environ["RANK"])


def restart() -> int:
    return int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def rest() -> NoReturn:  # not in signal.pause(): what comes right before it would not be heard
    while True:
        time.sleep(0.02)


def log(directory: Path, name: str, num: int = 0) -> str:
    return (directory / f".gpu_pool/jobs/{num}/{name}").read_text()


class Meeting:
    """Where the ranks of one job wait for each other, without torch."""

    def __init__(self) -> None:
        self._pipes = [os.pipe(), os.pipe()]

    def arrive(self) -> None:
        os.write(self._pipes[rank()][1], b"x")

    def wait(self) -> None:
        """Until the other one has arrived."""
        os.read(self._pipes[1 - rank()][0], 1)

    def close(self) -> None:
        for fd in (fd for pipe in self._pipes for fd in pipe):
            os.close(fd)


@pytest.fixture
def meeting() -> Any:
    with contextlib.closing(Meeting()) as found:
        yield found


LOST = "[pair.cc:553] Connection closed by peer [127.0.0.1]:4"
"""As gloo says it."""


# --- of one rank's failure ---


def test_a_rank_that_waits_for_one_that_failed_is_ended_at_once_however_long_the_grace(tmp_path: Path) -> None:
    def job() -> None:
        if rank() == 1:
            raise ValueError("the cause")
        rest()

    (result,) = groups(tmp_path, job, kill_grace_s=1e6)
    assert repr(result.error) == "ValueError('the cause')"


def test_a_rank_has_its_grace_to_save_something_when_another_fails(tmp_path: Path, meeting: Meeting) -> None:
    def job() -> None:
        def save(*_: object) -> NoReturn:
            (tmp_path / "saved").touch()
            sys.exit(0)

        if rank() == 1:
            meeting.wait()
            raise ValueError("the cause")
        signal.signal(signal.SIGTERM, save)
        meeting.arrive()
        rest()

    (result,) = groups(tmp_path, job, kill_grace_s=1e6)
    assert repr(result.error) == "ValueError('the cause')"
    assert (tmp_path / "saved").exists()


@pytest.mark.parametrize("how", ["raises", "is killed"])
def test_a_rank_that_is_deaf_to_sigterm_is_killed_when_the_grace_is_over(
    tmp_path: Path, meeting: Meeting, how: str
) -> None:
    def job() -> None:
        if rank() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            meeting.arrive()
            rest()
        meeting.wait()
        if how == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("the cause")

    (result,) = groups(tmp_path, job, kill_grace_s=0.1)
    assert "the cause" in str(result.error) or "lost its rank 1, which was ended by SIGKILL" in str(result.error)


def test_what_a_rank_raises_when_it_is_told_to_end_is_in_its_own_log_alone(tmp_path: Path, meeting: Meeting) -> None:
    def job() -> None:
        def told(*_: object) -> NoReturn:
            raise KeyError("told to end")

        if rank() == 0:
            meeting.wait()
            raise ValueError("the cause")
        signal.signal(signal.SIGTERM, told)
        meeting.arrive()
        rest()

    (result,) = groups(tmp_path, job, kill_grace_s=1e6)
    assert repr(result.error) == "ValueError('the cause')"
    assert "told to end" in log(tmp_path, "rank_1.log")
    assert "told to end" not in log(tmp_path, "output.log")
    assert "the cause" not in log(tmp_path, "rank_1.log")


def test_a_rank_may_say_of_what_it_left_its_group_after_another_one_has_missed_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_group, "SEEN_LATE_S", 1e6)
    read, write = os.pipe()

    def job() -> None:
        if rank() == 0:
            os.write(write, str(os.getpid()).encode())
            raise RuntimeError(LOST)
        gone = f"/proc/{int(os.read(read, 20))}"
        while os.path.exists(gone):
            os.sched_yield()
        raise ValueError("the cause")

    (result,) = groups(tmp_path, job)
    os.close(read)
    os.close(write)
    assert repr(result.error) == "ValueError('the cause')"


def test_a_rank_that_has_nothing_to_say_then_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_group, "SEEN_LATE_S", 0.05)

    def job() -> None:
        if rank() == 0:
            raise RuntimeError(LOST)
        rest()

    (result,) = groups(tmp_path, job, kill_grace_s=1e6)
    assert str(result.error) == LOST


def test_a_rank_that_has_ended_well_lets_the_others_take_their_time(tmp_path: Path) -> None:
    read, write = os.pipe()

    def job() -> int:
        if rank() == 1:
            os.write(write, str(os.getpid()).encode())
            return 1
        gone = f"/proc/{int(os.read(read, 20))}"
        while os.path.exists(gone):
            os.sched_yield()
        return 2

    (result,) = groups(tmp_path, job)
    os.close(read)
    os.close(write)
    assert result.value == 2, result.error


def test_no_rank_begins_before_all_are_there_since_the_store_is_at_work_from_then_on(tmp_path: Path) -> None:
    read, write = os.pipe()

    def job() -> int:
        if rank() != 0:
            os.read(read, 1)
            return 0
        job_process = os.getppid()
        there = len(Path(f"/proc/{job_process}/task/{job_process}/children").read_text().split())
        os.write(write, b"x" * 7)
        return there

    results = groups(tmp_path, job, {}, {}, {}, cpu_slots=1, nproc_per_node=8)
    os.close(read)
    os.close(write)
    assert [result.value for result in results] == [8, 8, 8]


# --- with their sweep ---

RANKS = """
def ranks(x):
    [sleeping, deaf, with_child, with_daemon][int(os.environ["RANK"])](x)

def held_ranks(x):
    try:
        ranks(x)
    except KeyboardInterrupt:
        rest()

def run(job, grace, calls=1):
    return GpuPool(
        gpus=[], cpu_slots=1, kill_grace_s=grace, dir="sweep", mode="ddp", ddp=dict(nproc_per_node=4)
    ).map(job, [dict(x=x) for x in range(calls)])
"""


def job_of(app: App) -> int:
    supervisor = app.relatives()["supervisor"]
    return int(Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()[-1])


ENDS: dict[str, tuple[Callable[[App], None], str]] = {
    "Ctrl-C": (lambda app: app.process.send_signal(signal.SIGINT), "was cancelled: Ctrl-C"),
    "SIGTERM": (lambda app: app.process.terminate(), "was cancelled: SIGTERM to the main process"),
    "SIGHUP": (lambda app: app.process.send_signal(signal.SIGHUP), "was cancelled: SIGHUP to the main process"),
    "SIGKILL": (lambda app: app.process.kill(), "was cancelled: the main process is gone"),
    "SIGKILL to the guard": (
        lambda app: os.kill(app.relatives()["guard"], signal.SIGKILL),
        "was cancelled: the guard process is gone",
    ),
    "SIGKILL to the supervisor": (lambda app: os.kill(app.relatives()["supervisor"], signal.SIGKILL), ""),
    "SIGKILL to the job": (lambda app: os.kill(job_of(app), signal.SIGKILL), "was ended by SIGKILL"),
}


@pytest.mark.parametrize("end", ENDS)
def test_no_rank_and_nothing_that_a_rank_has_started_outlives_the_sweep(start_app: StartApp, end: str) -> None:
    app = start_app("run(ranks, 0.2)", before=RANKS)
    app.wait_for_jobs(4)
    act, why = ENDS[end]
    act(app)
    app.assert_nothing_is_left()
    app.process.wait(LIMIT_S)
    if why:
        assert app.ends()[0][1].startswith(why)


def test_a_second_ctrl_c_kills_ranks_without_waiting_for_the_grace_to_end(start_app: StartApp) -> None:
    app = start_app("run(held_ranks, 1e6)", before=RANKS, start_new_session=True)
    app.wait_for_jobs(4)
    os.killpg(app.process.pid, signal.SIGINT)
    while [e["event"] for e in app.journal()].count("stop") < 1:
        os.sched_yield()
    os.killpg(app.process.pid, signal.SIGINT)
    assert app.process.wait(LIMIT_S) == -signal.SIGINT
    app.assert_nothing_is_left()


def test_ranks_hear_of_ctrl_c_and_may_save_and_return_and_are_not_completed(start_app: StartApp) -> None:
    app = start_app(
        "def job(x):\n"
        "    try:\n        sleeping(x)\n"
        "    except KeyboardInterrupt:\n"
        "        open(f\"saved{os.environ['RANK']}\", 'x').close()\n        return 'half'\n"
        "GpuPool(gpus=[], cpu_slots=1, dir='sweep', mode='ddp', ddp=dict(nproc_per_node=2)).map(job, [dict(x=0)])"
    )
    app.wait_for_jobs(2)
    app.process.send_signal(signal.SIGINT)
    app.assert_nothing_is_left()
    assert sorted(path.name for path in app.directory.glob("saved*")) == ["saved0", "saved1"]
    assert app.ends()[0] == ("CANCELLED", "was cancelled: Ctrl-C (SIGINT to the main process)")


# --- of the pool, and of signals to the job ---


def test_ranks_that_the_pool_stops_may_save_and_return_and_are_not_completed(tmp_path: Path) -> None:
    read, write = os.pipe()

    def job(x: int) -> str:
        if x == 0:
            if rank() == 0:
                os.read(read, 1), os.read(read, 1)
                raise ValueError("the first")
            rest()
        told: list[int] = []
        signal.signal(signal.SIGTERM, lambda signum, _: told.append(signum))
        os.write(write, b"x")
        while not told:
            time.sleep(0.02)
        (tmp_path / f"saved{rank()}").touch()
        return "half"

    first, second = groups(tmp_path, job, {"x": 0}, {"x": 1}, fail_fast=True)
    os.close(read)
    os.close(write)
    assert repr(first.error) == "ValueError('the first')"
    assert (second.status, second.value) == (Status.CANCELLED, None)
    assert "fail_fast, since job 0 (x=0) raised ValueError: the first" in str(second.error)
    assert sorted(path.name for path in tmp_path.glob("saved*")) == ["saved0", "saved1"]


def test_ranks_that_take_longer_than_timeout_min_have_failed_whatever_they_return(tmp_path: Path) -> None:
    def job() -> str:
        told: list[int] = []
        signal.signal(signal.SIGTERM, lambda signum, _: told.append(signum))
        while not told:
            time.sleep(0.02)
        return "half"

    (result,) = groups(tmp_path, job, timeout_min=0.01)
    assert isinstance(result.error, JobTimeoutError)


@pytest.mark.parametrize(
    ("signum", "returns"),
    [(signal.SIGTERM, True), (signal.SIGINT, True)]  # one that catches SIGHUP goes on, as a job does
    + [(signum, False) for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)],
)
def test_a_signal_to_the_jobs_process_goes_to_its_ranks_and_cancels_it(
    tmp_path: Path, meeting: Meeting, signum: signal.Signals, returns: bool
) -> None:
    def job() -> str:
        told: list[int] = []
        if returns:
            signal.signal(signum, lambda signum, _: told.append(signum))
        meeting.arrive()
        meeting.wait()
        if rank() == 0:
            os.kill(os.getppid(), signum)
        while not told:
            time.sleep(0.02)
        (tmp_path / f"saved{rank()}").touch()
        return "half"

    (result,) = groups(tmp_path, job, kill_grace_s=1e6)
    assert isinstance(result.error, JobCancelledError)
    assert f"was cancelled: {signum.name} was sent to its process" in str(result.error)
    assert len(list(tmp_path.glob("saved*"))) == (2 if returns else 0)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_ranks_that_do_not_end_of_it_are_killed_after_the_grace_and_the_log_says_who_was_running(
    tmp_path: Path, meeting: Meeting, signum: signal.Signals
) -> None:
    def job() -> None:
        signal.signal(signum, signal.SIG_IGN)
        meeting.arrive()
        meeting.wait()
        if rank() == 0:
            os.kill(os.getppid(), signum)
        rest()

    (result,) = groups(tmp_path, job, kill_grace_s=0.3)
    assert isinstance(result.error, JobCancelledError)
    assert f"was cancelled: {signum.name} was sent to its process" in str(result.error)
    assert f"gpu_pool: {signum.name}, passed on to the ranks that run: 0, 1\n" in log(tmp_path, "output.log")


@pytest.mark.parametrize("signum", [signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT, signal.SIGHUP])
def test_a_signal_that_asks_for_a_checkpoint_goes_to_every_rank_and_cancels_nothing(
    tmp_path: Path, meeting: Meeting, signum: signal.Signals
) -> None:
    def job() -> int:
        told: list[int] = []
        signal.signal(signum, lambda *_: told.append(rank()))
        meeting.arrive()
        meeting.wait()
        if rank() == 0:
            os.kill(os.getppid(), signum)
        while not told:
            time.sleep(0.02)
        (tmp_path / f"saved{rank()}").touch()
        return 5

    (result,) = groups(tmp_path, job)
    assert result.value == 5, result.error
    assert sorted(path.name for path in tmp_path.glob("saved*")) == ["saved0", "saved1"]


def test_a_rank_whose_end_the_kernel_does_not_tell_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reap = _family._reap_leader
    in_a_job = "GPU_POOL_JOB_NUM"
    monkeypatch.setattr(_family, "_reap_leader", lambda pid: None if in_a_job in os.environ else reap(pid))
    monkeypatch.setattr(_group, "LOST_AFTER_S", 0.2)

    def job() -> None:
        if rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        rest()

    (result,) = groups(tmp_path, job)
    assert "lost its rank 1, which did not die within 10 s of SIGKILL" in str(result.error)


def test_a_rank_has_the_signal_handlers_of_a_new_process(tmp_path: Path) -> None:
    def job() -> list[bool]:
        others = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
        default = [signal.getsignal(signum) is signal.SIG_DFL for signum in others]
        return [signal.getsignal(signal.SIGINT) is signal.default_int_handler, *default]

    (result,) = groups(tmp_path, job)
    assert result.value == [True] * 6


# --- started again ---


def test_a_group_that_fails_is_started_again_as_often_as_max_restarts_says(tmp_path: Path) -> None:
    def job() -> tuple[int, int, str]:
        dist.init_process_group("gloo")
        store: Any = dist.distributed_c10d._get_default_store()
        print(f"start {restart()}")
        with (tmp_path / f"of_{rank()}").open("a") as file:
            print(os.environ["MASTER_PORT"], os.environ["TORCHELASTIC_RUN_ID"], store.check(["stale"]), file=file)
        dist.barrier()
        store.set("stale", "x")
        if restart() == 0 and rank() == 1:
            raise ValueError("the first time")
        if restart() == 1 and rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()
        return restart(), int(os.environ["TORCHELASTIC_MAX_RESTARTS"]), "value"

    (result,) = groups(tmp_path, job, max_restarts=2)
    assert result.value == (2, 2, "value"), result.error
    found = [(tmp_path / f"of_{r}").read_text().splitlines() for r in range(2)]
    assert found[0] == found[1]
    _, run_ids, stale = zip(*(line.split() for line in found[0]), strict=True)
    assert len(set(run_ids)) == 3
    assert stale == ("False", "False", "False")
    for name in ("rank_0.log", "rank_1.log"):
        assert [line for line in log(tmp_path, name).splitlines() if line.startswith("start ")] == [
            "start 0",
            "start 1",
            "start 2",
        ]
    lines = [line for line in log(tmp_path, "output.log").splitlines() if line.startswith("gpu_pool: ")]
    assert lines[0] == "gpu_pool: rank 1 raised ValueError: the first time; starting the group again, 1 of 2"
    assert lines[1].startswith("gpu_pool: the group lost its rank 1, which was ended by SIGKILL")
    assert lines[1].endswith("; starting the group again, 2 of 2")
    assert len(lines) == 2


def test_a_group_that_fails_each_time_has_failed_as_it_did_last(tmp_path: Path) -> None:
    def job() -> None:
        if rank() == 1:
            raise ValueError(f"start {restart()}")
        rest()

    (result,) = groups(tmp_path, job, max_restarts=2)
    assert repr(result.error) == "ValueError('start 2')"
    assert log(tmp_path, "output.log").count("starting the group again") == 2


@pytest.mark.parametrize("whom", ["rank", "job"])
def test_a_group_that_was_cancelled_is_not_started_again(tmp_path: Path, whom: str) -> None:
    def job() -> None:
        if rank() == 1:
            os.kill(os.getpid() if whom == "rank" else os.getppid(), signal.SIGTERM)
        rest()

    (result,) = groups(tmp_path, job, max_restarts=2)
    assert isinstance(result.error, JobCancelledError)
    assert "starting the group again" not in log(tmp_path, "output.log")


def test_nothing_of_a_start_is_alive_when_the_next_one_begins(tmp_path: Path) -> None:
    read, write = os.pipe()
    mark = os.stat(f"/proc/self/fd/{write}").st_ino

    def holders() -> int:
        """How many processes have our end of the pipe: all forks of this one."""
        count = 0
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                count += os.stat(f"/proc/{pid}/fd/{write}").st_ino == mark
        return count

    def job() -> int:
        if restart() == 1:
            return holders()
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                rest()
            os._exit(0)
        raise ValueError("the first time")

    (result,) = groups(tmp_path, job, nproc_per_node=1, max_restarts=1)
    os.close(read)
    os.close(write)
    assert result.value == 5, "main, guard, supervisor, the job and the rank itself"


def test_a_job_is_tried_again_where_a_rank_crashed_and_not_where_it_raised(tmp_path: Path) -> None:
    def job(x: int) -> int:
        print("printed by", rank())
        if rank() == 1:
            try:
                (tmp_path / f"tried{x}").open("x").close()
            except FileExistsError:
                return 1
            if x == 0:
                faulthandler.disable()  # pytest's, which writes to the terminal
                os.kill(os.getpid(), signal.SIGSEGV)
            raise ValueError("the cause")
        return 1 if (tmp_path / f"tried{x}").exists() and os.path.exists(path(x, "rank_1.1.log")) else rest()

    def path(num: int, name: str) -> Path:
        return tmp_path / f".gpu_pool/jobs/{num}/{name}"

    crashed, raised = groups(tmp_path, job, {"x": 0}, {"x": 1}, max_retries=1, retry_on=["crash"])
    assert crashed.value == 1, crashed.error
    assert repr(raised.error) == "ValueError('the cause')"
    of_tries = {"output.log", "rank_0.log", "rank_1.log"}
    logs = [{file.name for file in path(num, "").iterdir() if file.suffix == ".log"} for num in range(2)]
    assert logs == [of_tries | {"output.1.log", "rank_0.1.log", "rank_1.1.log"}, of_tries]
    assert log(tmp_path, "rank_1.1.log") == log(tmp_path, "rank_1.log") == "printed by 1\n"


# --- side by side ---

BUSY = """
import os, sys, time
import torch
import torch.distributed as dist
from hydra_plugins.hydra_gpu_pool_launcher import GpuPool

def job(x):
    begun = time.monotonic()
    dist.init_process_group("gloo")
    total = torch.tensor([float(dist.get_rank() + 1 + x)])
    dist.all_reduce(total)
    if dist.get_rank() == 0:  # a group waits for its neighbour: so two of each sweep are there at once
        os.close(os.open(f"{sys.argv[1]}.{x // 2}", os.O_WRONLY if x % 2 else os.O_RDONLY))
    dist.barrier()
    port = int(os.environ["MASTER_PORT"])
    return float(total), port, begun, time.monotonic()

calls = [dict(x=x) for x in range(20)]
pool = GpuPool(gpus=[], cpu_slots=2, mode="ddp", ddp=dict(nproc_per_node=2), progress="none")
print([o.value or str(o.error) for o in pool.map(job, calls)])
"""


def test_forty_groups_of_two_sweeps_side_by_side_do_not_meet_each_others_ranks(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(BUSY)
    for pair in range(10):
        os.mkfifo(tmp_path / f"one.{pair}")
        os.mkfifo(tmp_path / f"other.{pair}")
    with contextlib.ExitStack() as stack:
        commands = ([sys.executable, "app.py", name] for name in ("one", "other"))
        apps = [subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) for command in commands]
        for app in apps:
            stack.enter_context(app)
            stack.callback(app.kill)
        found = [app.communicate(timeout=LIMIT_S)[0] for app in apps]
    sweeps = [eval(text, {"__builtins__": {}}) for text in found]  # of our own app
    assert [[value[0] for value in values] for values in sweeps] == [[float(3 + 2 * x) for x in range(20)]] * 2
    groups_ = [value[1:] for values in sweeps for value in values]
    at_once = [
        (one, other)
        for i, one in enumerate(groups_)
        for other in groups_[:i]
        if one[1] < other[2] and other[1] < one[2]
    ]
    assert len(at_once) >= 20
    assert all(one[0] != other[0] for one, other in at_once)


# --- what the job's own process does beside ---

CALLBACK = """
import os, subprocess, sys
from hydra.experimental.callback import Callback
import torch

class Own(Callback):
    def on_job_start(self, config, **kwargs):
        self.child = subprocess.Popen([sys.executable, "-c", "input(); exit(7)"], stdin=subprocess.PIPE)
        torch.set_num_threads(2)
        torch.ones(400, 400) @ torch.ones(400, 400)

    def on_job_end(self, config, job_return, **kwargs):
        with open("child", "w") as file:
            print(self.child.poll(), file=file)
            self.child.communicate(b"go on\\n")
            print(self.child.returncode, file=file)
"""

APP = """
import os
import hydra, torch

@hydra.main(version_base="1.3", config_path=".", config_name="conf")
def app(cfg):
    if os.fork() == 0:  # a child that the rank leaves behind, for the job to end
        while True: os.read(0, 1) or __import__("time").sleep(1)
    torch.set_num_threads(2)
    return float((torch.ones(400, 400) @ torch.ones(400, 400)).sum())

if __name__ == "__main__":
    app()
"""

DDP = ("-m", "hydra/launcher=gpu_pool", "hydra.sweep.dir=sweep", "hydra.launcher.mode=ddp", "+x=1")


def conf(directory: Path) -> None:
    (directory / "conf.yaml").write_text("hydra:\n  callbacks:\n    own:\n      _target_: callback.Own\n")


def test_what_callbacks_start_is_theirs_and_what_they_compute_does_not_hang_the_ranks(
    run_app: RunApp, tmp_path: Path
) -> None:
    conf(tmp_path)
    (tmp_path / "callback.py").write_text(CALLBACK)
    two = ("hydra.launcher.threads_per_job=4", "hydra.launcher.ddp.nproc_per_node=2", "hydra.launcher.gpus=[]")
    done = run_app(APP, *DDP, *two)
    assert done.returncode == 0, done.stderr
    assert "COMPLETED: 64000000.0" in done.stdout.replace("6.4e+07", "64000000.0")
    assert (tmp_path / "child").read_text().split() == ["None", "7"]


DRIVER = """
import ctypes
from hydra.experimental.callback import Callback

class Own(Callback):
    def on_job_start(self, config, **kwargs):
        ctypes.CDLL("./libcuda.so.1").cuInit(0)
"""


def test_ranks_are_not_forked_from_a_job_whose_callback_has_initialised_cuda(run_app: RunApp, tmp_path: Path) -> None:
    build_driver(tmp_path)
    conf(tmp_path)
    (tmp_path / "callback.py").write_text(DRIVER)
    app = APP.replace("import hydra, torch", "import hydra").replace("torch.set_num_threads(2)", "return 1")
    done = run_app(app, *DDP, "hydra.launcher.gpus=[0]", "hydra.launcher.start_method=fork")
    assert done.returncode == 1, done.stdout
    assert (
        "could not fork its ranks from its own process, where callbacks run: the CUDA driver is initialised in it, and "
        "no fork of it can use a GPU; move what initialises it into the task function, or use start_method: spawn"
    ) in done.stdout


REFUSING = """
import os, sys, types
from hydra.experimental.callback import Callback

class Own(Callback):
    def on_job_start(self, config, **kwargs):
        at, module = os.getpid(), types.ModuleType("torch.xpu")
        module._is_in_bad_fork = lambda: os.getpid() != at
        sys.modules["torch.xpu"] = module
"""


def test_nor_from_one_whose_callback_has_touched_a_gpu_of_which_torch_alone_can_tell(
    run_app: RunApp, tmp_path: Path
) -> None:
    """A stand-in under the name of one of its modules."""
    conf(tmp_path)
    (tmp_path / "callback.py").write_text(REFUSING)
    app = APP.replace("import hydra, torch", "import hydra").replace("torch.set_num_threads(2)", "return 1")
    on_gpu = ["hydra.launcher.vendor=intel", "hydra.launcher.gpus=[0]"]
    done = run_app(app, *DDP, *on_gpu, "hydra.launcher.start_method=fork")
    assert done.returncode == 1, done.stdout
    assert "callbacks run: something in it has called a torch.cuda or torch.xpu function" in done.stdout


# --- descriptors ---


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_rank_has_all_descriptors_of_the_app_and_of_the_pool_only_what_it_needs(
    tmp_path: Path, restarts: int
) -> None:
    def fds() -> dict[int, str]:
        found = {}
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # the one that lists
                found[int(fd)] = os.readlink(f"/proc/self/fd/{fd}")
        return found

    def job() -> None:
        if restart() < restarts:
            raise ValueError("the first time")
        (tmp_path / f"of_{rank()}").write_text(repr(fds()))

    before = fds()
    (result,) = groups(tmp_path, job, max_restarts=restarts)
    assert result.error is None
    for number in range(2):
        seen = eval((tmp_path / f"of_{number}").read_text(), {"__builtins__": {}})  # our own
        where = str(tmp_path / f".gpu_pool/jobs/0/{'output' if number == 0 else 'rank_1'}.log")
        assert (seen[0], seen[1], seen[2]) == ("/dev/null", where, where)
        more = sorted(file.partition(":")[0] for fd, file in seen.items() if fd > 2 and before.get(fd) != file)
        own = ["/memfd", "pipe", "pipe", "pipe"]  # its report, the bell, the two ends of the pipe of signals
        # libuv, which torch's store has used before, gives itself a pipe in every fork.
        assert more == own + ["pipe"] * 2 * restarts
        assert {fd for fd in before if fd > 2} <= seen.keys()


# --- before the ranks begin ---


def before_there_is_a_store(monkeypatch: pytest.MonkeyPatch, happens: Callable[[], object]) -> None:
    """Let something happen in the job's process when its ranks wait at the gate."""
    opened = _stores.Stores.open

    def open_(stores: Any, start: int) -> Any:
        happens()
        stores._signals.pause(0.01 if happens is harmless else LIMIT_S)
        return opened(stores, start)

    monkeypatch.setattr(_stores.Stores, "open", open_)


def harmless() -> None:
    os.kill(os.getpid(), signal.SIGUSR1)


def test_a_signal_that_asks_for_no_end_is_passed_on_once_the_ranks_have_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before_there_is_a_store(monkeypatch, harmless)
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        assert groups(tmp_path, rank)[0].value == 0
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_ranks_that_have_not_begun_end_at_once_of_a_signal_to_their_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signum: signal.Signals
) -> None:
    before_there_is_a_store(monkeypatch, lambda: os.kill(os.getpid(), signum))
    (result,) = groups(tmp_path, rank, kill_grace_s=1e6)
    assert isinstance(result.error, JobCancelledError)
    assert f"{signum.name} was sent to its process" in str(result.error)


def test_a_rank_that_is_killed_before_it_begins_is_missed_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before_there_is_a_store(monkeypatch, lambda: os.kill(min(_family.children()), signal.SIGKILL))
    (result,) = groups(tmp_path, rank, kill_grace_s=1e6)
    assert "lost its rank 0, which was ended by SIGKILL" in str(result.error)


# --- what is done to their job's process, and to themselves ---


def test_ranks_whose_ends_a_callback_does_not_want_to_hear_of_are_waited_for_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = _ddp.CallInRanks.__call__

    def deaf(ranks: Any, *args: Any, **kwargs: Any) -> Any:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        return call(ranks, *args, **kwargs)

    monkeypatch.setattr(_ddp.CallInRanks, "__call__", deaf)
    assert groups(tmp_path, rank)[0].value == 0


def test_a_rank_that_may_write_no_file_has_a_result(tmp_path: Path) -> None:
    def job() -> str:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        return "here"

    assert groups(tmp_path, job)[0].value == "here"


class NoException(Exception):
    def __reduce__(self) -> Any:
        return str, ("no exception",)


def test_an_exception_that_comes_back_as_something_else_is_told_of(tmp_path: Path) -> None:
    def job() -> None:
        raise NoException("the cause")

    (result,) = groups(tmp_path, job)
    assert isinstance(result.error, JobError)
    assert "NoException: the cause" in str(result.error)


def test_a_value_that_only_its_rank_can_load_is_said_to_be_so(tmp_path: Path) -> None:
    (tmp_path / "of_the_rank.py").write_text("class Own:\n    pass\n")

    def job() -> Any:
        sys.path.insert(0, str(tmp_path))
        return __import__("of_the_rank").Own()

    (result,) = groups(tmp_path / "sweep", job)
    assert "returned what only its rank 0 can load (ModuleNotFoundError: No module named 'of_the_rank')" in str(
        result.error
    )
