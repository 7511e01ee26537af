"""Jobs that do odd things to their own process: their results are kept, and nobody else is harmed."""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
import types
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from running import StartApp
from support import LIMIT_S, RunApp, outcome, outcomes, write_sweeper

from hydra_plugins.hydra_gpu_pool_launcher import JobTimeoutError, Status

kept: list[Any] = []


# --- descriptors ---


def test_a_job_that_has_used_up_its_descriptors_gives_its_value_or_its_own_error(tmp_path: Path) -> None:
    def job(fails: bool) -> int:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
        while True:
            try:
                kept.append(open(os.devnull))  # noqa: SIM115
            except OSError:
                if fails:
                    raise
                return 42

    results = outcomes(tmp_path, job, {"fails": False}, {"fails": True})
    assert results[0].value == 42
    assert type(results[1].error) is OSError


@pytest.mark.parametrize("most", [256, 5000])
def test_a_job_may_close_descriptors_that_are_not_its_own_and_its_files_get_their_numbers(
    tmp_path: Path, most: int
) -> None:
    """One end of a pipe of ours there would be read in its end: for ever, or as an order to stop."""

    def job() -> str:
        os.closerange(3, most)
        for _ in range(20):
            kept.append(os.pipe())
            os.write(kept[-1][1], bytes([signal.SIGTERM]))
        signal.signal(signal.SIGUSR1, lambda *_: None)
        os.kill(os.getpid(), signal.SIGUSR1)
        return "".join(str(len(os.read(read, 10))) for read, _ in kept)

    result = outcome(tmp_path, job)
    assert (result.status, result.value) == (Status.COMPLETED, "1" * 20)


def test_no_signal_writes_to_a_file_that_has_the_number_of_what_the_job_has_closed(tmp_path: Path) -> None:
    def job() -> list[int]:
        os.closerange(3, 256)
        for i in range(100):
            kept.append(os.open(tmp_path / f"file{i}", os.O_RDWR | os.O_CREAT))
        signal.signal(signal.SIGUSR1, lambda *_: None)
        os.kill(os.getpid(), signal.SIGUSR1)
        return [os.fstat(fd).st_size for fd in kept]

    assert outcome(tmp_path, job).value == [0] * 100


# --- limits, modes ---


def test_the_umask_of_a_job_does_not_hide_its_result(tmp_path: Path) -> None:
    def job() -> int:
        os.umask(0o777)
        return 5

    assert outcome(tmp_path, job).value == 5
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / ".gpu_pool/jobs/0").glob("*.*")}
    assert modes["return.pickle"] == modes["outcome.json"] == 0o644


@pytest.mark.parametrize("hard", [False, True])
def test_a_result_that_is_larger_than_the_jobs_limit_is_saved_or_the_reason_is_told(tmp_path: Path, hard: bool) -> None:
    def job() -> bytes:
        most = 100_000 if hard else resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, most))
        return bytes(200_000)

    result = outcome(tmp_path, job)
    if hard:
        assert str(result.error) == "job 0 ended with a result that cannot be saved (File too large)"
    else:
        assert result.value == bytes(200_000)


# --- values that only the job's own interpreter could read again ---


def nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize("levels", [45, 300, 900, 990])
def test_deep_lists_are_values_whatever_the_recursion_limit_is_elsewhere(tmp_path: Path, levels: int) -> None:
    def job() -> list[Any]:
        sys.setrecursionlimit(100_000)
        return nested(levels)

    results = outcomes(tmp_path, lambda x: job() if x else 3, {"x": 1}, {"x": 0})
    assert results[1].value == 3
    if results[0].status is not Status.COMPLETED:  # pickle has a limit of its own, which differs by Python's version
        assert levels > 500
        assert "RecursionError: maximum recursion depth exceeded" in str(results[0].error)


def test_long_integers_are_values_however_many_digits_an_interpreter_prints(tmp_path: Path) -> None:
    def job() -> int:
        if hasattr(sys, "set_int_max_str_digits"):
            sys.set_int_max_str_digits(0)
        return 10**9000

    assert outcome(tmp_path, job).value == 10**9000


# --- signals in the middle of the saving ---

SLOW = """
class Slow:
    def __reduce__(self):
        report()
        signal.sigwait([signal.SIGUSR2])
        return int, ("5",)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
def job():
    return Slow()
def run(**more):
    print([(o.status.value, str(o.error)) for o in GpuPool(dir='sweep', gpus=[], cpu_slots=1, **more).map(job, [{}])])
"""


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_job_that_is_told_to_stop_while_its_result_is_pickled_is_cancelled_and_the_result_is_kept(
    start_app: StartApp, signum: signal.Signals
) -> None:
    app = start_app("run(max_retries=1, retry_on=['error', 'crash'])", before=SLOW)
    (pid,) = app.wait_for_jobs(1)
    os.kill(pid, signum)
    os.kill(pid, signal.SIGUSR2)
    out, err = app.process.communicate(timeout=LIMIT_S)
    why = f"job 0 was cancelled: {signum.name} was sent to its process; it then returned"
    assert out == f"{[('CANCELLED', why)]}\n", err
    assert (app.directory / "sweep/.gpu_pool/jobs/0/late.pickle").exists()


# --- processes that make others without end ---


def test_a_chain_of_forks_without_end_is_ended_with_its_job(tmp_path: Path) -> None:
    read, write = os.pipe()

    def comet() -> None:
        os.setsid()
        end = time.monotonic() + LIMIT_S  # should this test fail
        while time.monotonic() < end:
            if os.fork():
                os._exit(0)

    def job(x: int) -> int:
        if x == 0 and os.fork() == 0:
            if os.fork() == 0:
                comet()
            os._exit(0)
        return x

    results = outcomes(tmp_path, job, *({"x": x} for x in range(4)), cpu_slots=1)
    assert [o.value for o in results] == [0, 1, 2, 3]
    os.close(write)
    assert os.read(read, 1) == b"", "it lives on"
    os.close(read)


# --- suspended processes ---


@pytest.mark.parametrize("who", ["guard", "supervisor"])
def test_a_suspended_guard_or_supervisor_keeps_nobody_from_ending_the_sweep(start_app: StartApp, who: str) -> None:
    app = start_app("GpuPool(cpu_slots=2, kill_grace_s=0.2, dir='sweep').map(sleeping, [{'x': 0}, {'x': 1}])")
    app.wait_for_jobs(2)
    os.kill(app.relatives()[who], signal.SIGSTOP)
    app.process.send_signal(signal.SIGINT)
    assert app.process.wait(LIMIT_S) == -signal.SIGINT
    app.assert_nothing_is_left()


def test_a_suspended_guard_does_not_hold_up_a_sweep_that_ends_by_itself(start_app: StartApp) -> None:
    app = start_app(
        "print([o.value for o in GpuPool(cpu_slots=1, gpus=[], dir='sweep').map(job, [{'x': 7}])])",
        before="def job(x):\n    report()\n    signal.sigwait([signal.SIGUSR2])\n    return x\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])",
    )
    (pid,) = app.wait_for_jobs(1)
    os.kill(app.relatives()["guard"], signal.SIGSTOP)
    os.kill(pid, signal.SIGUSR2)
    assert app.process.communicate(timeout=LIMIT_S)[0] == "[7]\n"
    app.assert_nothing_is_left()


def test_a_suspended_job_hears_that_it_is_to_stop(start_app: StartApp) -> None:
    app = start_app(
        "def job(x):\n"
        "    signal.signal(signal.SIGTERM, lambda *_: (open('heard', 'w').close(), sys.exit(0)))\n"
        "    sleeping(x)\n"
        "GpuPool(cpu_slots=1, kill_grace_s=60, dir='sweep').map(job, [{'x': 0}])"
    )
    (pid,) = app.wait_for_jobs(1)
    os.kill(pid, signal.SIGSTOP)
    app.process.terminate()
    assert app.process.wait(LIMIT_S) == -signal.SIGTERM
    assert (app.directory / "heard").exists()


# --- files of the sweep that cannot be had ---


def test_a_late_result_that_cannot_be_set_aside_ends_nobody_else(tmp_path: Path) -> None:
    def job(x: int) -> int:
        if x == 0:
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
            signal.sigwait([signal.SIGTERM])  # its time is over
            (tmp_path / ".gpu_pool/jobs/0/late.pickle/in the way").mkdir(parents=True)
        return x

    results = outcomes(tmp_path, job, *({"x": x} for x in range(3)), cpu_slots=1, timeout_min=0.04)
    assert type(results[0].error) is JobTimeoutError
    assert [o.value for o in results][1:] == [1, 2]


def test_a_directory_that_cannot_be_made_anew_ends_no_job(start_app: StartApp) -> None:
    app = start_app(
        "pool = GpuPool(cpu_slots=2, dir='sweep', gpus=[])\n"
        "print([o.value for o in pool.map(job, [{'x': x} for x in range(3)])])",
        before="""
import shutil
def job(x):
    report(x)
    if x < 2: signal.sigwait([signal.SIGUSR2])
    if x == 0:
        shutil.rmtree("sweep/.gpu_pool")
        open("sweep/.gpu_pool", "w").close()
    return x
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
""",
    )
    pids = {x: int(pid) for pid, x in (app.report().split() for _ in range(2))}
    os.kill(pids["0"], signal.SIGUSR2)
    assert app.process.stderr is not None
    line = next(line for line in app.process.stderr if "cannot be written" in line)
    assert "no job is started until that is mended" in line
    (app.directory / "sweep/.gpu_pool").unlink()
    os.kill(pids["1"], signal.SIGUSR2)
    out, _ = app.process.communicate(timeout=LIMIT_S)
    assert out == "[None, 1, 2]\n", "of job 0, its own result was in what it removed"


# --- fail_fast ---


def test_a_supervisor_that_is_killed_after_a_failure_starts_no_later_launch(run_app: RunApp, tmp_path: Path) -> None:
    write_sweeper(
        tmp_path,
        """
        import signal
        from hydra_plugins.hydra_gpu_pool_launcher import _descriptors
        self.launcher.launch([["+x=1"], ["+x=2"]], 0)
        link = self.launcher._sweep._supervisor._link
        os.kill(link.ready["pid"], signal.SIGKILL)
        _descriptors.wait_readable([link.lifeline])
        print("LATER", self.launcher.launch([["+x=3"]], 2)[0]._return_value)
        """,
    )
    done = run_app(
        "import hydra\n@hydra.main(version_base=None, config_path=None)\ndef main(cfg):\n"
        "    print('RAN', cfg.x)\n    raise ValueError(cfg.x)\nif __name__ == '__main__':\n    main()\n",
        "-m",
        "hydra/launcher=gpu_pool",
        "hydra/sweeper=own",
        "hydra.launcher.cpu_slots=1",
        "hydra.launcher.fail_fast=true",
        "hydra.sweep.dir=sweep",
    )
    later = [line for line in done.stdout.splitlines() if line.startswith("LATER")]
    why = "fail_fast, since job 0 (+x=1) raised ValueError: 1; it was not started"
    assert later == [f"LATER job 2 (+x=3) was cancelled: {why}"], done.stderr
    assert not (tmp_path / "sweep/.gpu_pool/jobs/2").exists()


def test_an_error_that_is_told_by_hand_names_no_class_of_ours(start_app: StartApp) -> None:
    app = start_app(
        "def job(x):\n    sleeping(x)\nprint(GpuPool(cpu_slots=1, dir='sweep', gpus=[]).map(job, [{'x': 0}])[0].error)"
    )
    (pid,) = app.wait_for_jobs(1)
    os.kill(pid, signal.SIGINT)
    out, _ = app.process.communicate(timeout=LIMIT_S)
    assert out == "job 0 (x=0) was cancelled: SIGINT was sent to its process; it then raised KeyboardInterrupt\n"


# --- what only has torch's name ---


@pytest.mark.parametrize("torch", [MagicMock(), types.ModuleType("torch"), types.SimpleNamespace(initial_seed=len)])
def test_what_only_has_the_name_of_torch_is_let_alone(
    tmp_path: Path, torch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("torch", "torch.cuda"):
        monkeypatch.setitem(sys.modules, name, torch)
    assert outcomes(tmp_path, lambda: [1], {}, gpus=[0])[0].value == [1]


# --- an interrupt where the job is not in its task function ---


def test_an_interrupt_by_hand_at_any_moment_is_none_of_the_jobs_failures(start_app: StartApp) -> None:
    """Outside of its task function, nobody is there to catch it."""
    app = start_app(
        "print([(o.status.value, str(o.error)) for o in GpuPool(dir='sweep', gpus=[], cpu_slots=1, max_retries=1)"
        ".map(job, [{}, {}])])",
        before="""
from {package} import _interpreter
settle_random = _interpreter.settle_random
def interrupted(before_fork):
    if os.environ["GPU_POOL_JOB_NUM"] == "0":
        os.kill(os.getpid(), signal.SIGINT)
    settle_random(before_fork)
_interpreter.settle_random = interrupted
def job():
    return 1
""".format(package="hydra_plugins.hydra_gpu_pool_launcher"),
    )
    out, err = app.process.communicate(timeout=LIMIT_S)
    why = "job 0 was cancelled: SIGINT was sent to its process"
    assert out == f"{[('CANCELLED', why), ('COMPLETED', 'None')]}\n", err


# --- files that somebody has meddled with ---


@pytest.mark.parametrize("who", [0, 2])
@pytest.mark.parametrize(
    "meddle",
    [
        "os.truncate(journal, 0)",
        "open(journal, 'a').write('[1, 2]\\n')",
        "open(journal, 'a').write('half a line')",
        "os.mkfifo(os.path.dirname(journal) + '/jobs/{who}/outcome.json')",
    ],
)
def test_meddling_with_the_sweeps_files_hangs_nobody_and_harms_no_other_job(
    start_app: StartApp, meddle: str, who: int
) -> None:
    app = start_app(
        "outcomes = GpuPool(dir='sweep', gpus=[], cpu_slots=1).map(job, [{'x': x} for x in range(3)])\n"
        f"print([o.value for o in outcomes if o.value != {who}])",
        before=f"""
journal = os.path.abspath("sweep/.gpu_pool/journal.jsonl")
def job(x):
    if x == {who}:
        {meddle.format(who=who)}
        os._exit(0)
    return x
""",
    )
    out, err = app.process.communicate(timeout=LIMIT_S)
    others = [x for x in range(3) if x != who]
    assert [x for x in eval(out) if x is not None] == others, err


def test_an_interrupt_in_the_wait_for_the_end_leaves_no_zombie_and_no_descriptor_for_long(start_app: StartApp) -> None:
    app = start_app(
        """
from {package} import _descriptors, _link, _pidfd
wait_readable = _descriptors.wait_readable
def interrupted(fds, timeout=None, writable=()):
    if sys._getframe(1).f_code is _link.close.__code__ and state.pop("interrupt", None):
        raise KeyboardInterrupt
    return wait_readable(fds, timeout, writable)
state = {{}}
pool = GpuPool(dir="sweep", gpus=[], cpu_slots=1, progress="none")
pool.map(abs_, [dict(x=-1)])
before = len(os.listdir("/proc/self/fd"))
state["interrupt"], _descriptors.wait_readable = True, interrupted
try:
    pool.map(abs_, [dict(x=-1)])
except KeyboardInterrupt:
    print("interrupted")
children = open(f"/proc/self/task/{{os.getpid()}}/children").read().split()
wait_readable([_pidfd.pidfd_open(int(pid)) for pid in children])
before += len(children)  # this descriptor
pool.map(abs_, [dict(x=-1)])
print(len(os.listdir("/proc/self/fd")) - before, open(f"/proc/self/task/{{os.getpid()}}/children").read())
""".format(package="hydra_plugins.hydra_gpu_pool_launcher"),
        before="def abs_(x): return abs(x)",
    )
    out, err = app.process.communicate(timeout=LIMIT_S)
    assert out == "interrupted\n0 \n", err


class NoException(Exception):
    def __reduce__(self) -> Any:
        return str, ("no exception",)


def test_an_exception_that_comes_back_as_something_else_is_told_of_and_harms_no_other(tmp_path: Path) -> None:
    def job(x: int) -> int:
        if x == 1:
            raise NoException("the cause")
        return x

    results = outcomes(tmp_path, job, {"x": 0}, {"x": 1}, {"x": 2})
    assert [result.value for result in results] == [0, None, 2]
    assert "NoException: the cause" in str(results[1].error)
