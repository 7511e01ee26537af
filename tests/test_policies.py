"""Timeouts, retries, fail_fast, stagger_s and kills by hand, with real processes. The decisions are test_schedule's."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from running import StartApp
from support import LIMIT_S, RunApp, outcomes, write_sweeper

from hydra_plugins.hydra_gpu_pool_launcher import JobError, JobTimeoutError, Status, _descriptors

SOON_MIN = 0.04
NEVER_S = 1e6


def tries(directory: Path, x: int) -> int:
    """Count this try of the job, and give how many there were."""
    with open(directory / f"tries{x}", "a") as file:
        file.write(".")
        return file.tell()


# --- timeout_min ---


def hang(where: str) -> None:
    print(where, flush=True)
    threading.Event().wait()


def test_a_job_that_takes_too_long_says_where_it_was(tmp_path: Path) -> None:
    (result,) = outcomes(tmp_path, hang, {"where": "here"}, timeout_min=SOON_MIN)
    assert isinstance(result.error, JobTimeoutError)
    log = Path(result.log).read_text()
    assert log.startswith("here\n")
    stack = log.partition("\nCurrent thread ")[2].splitlines()[1:]
    assert [line for line in stack if line.endswith(" in hang") and "test_policies.py" in line]


def test_a_process_that_a_job_has_forked_is_terminated_without_a_word_or_as_the_user_has_it(tmp_path: Path) -> None:
    def terminated() -> int:
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.write(write, b"x")
            while True:  # not in signal.pause(): what comes right before it would not be heard
                time.sleep(0.02)
        os.read(read, 1)
        os.kill(pid, signal.SIGTERM)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def job() -> list[int]:
        code = terminated()
        signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
        return [code, terminated()]

    (result,) = outcomes(tmp_path, job, {})
    assert (result.value, Path(result.log).read_text()) == ([-signal.SIGTERM, 7], "")


def test_a_job_that_takes_too_long_is_stopped_and_named_and_the_others_keep_their_results(tmp_path: Path) -> None:
    def job(x: int) -> int:
        if x == 1:
            signal.pause()
        return x

    results = outcomes(tmp_path, job, *({"x": x} for x in range(3)), timeout_min=SOON_MIN)
    assert [o.value for o in results] == [0, None, 2]
    assert type(results[1].error) is JobTimeoutError
    assert str(results[1].error) == "job 1 (x=1) was stopped: it took longer than timeout_min=0.04"
    assert results[1].status is Status.FAILED


def test_a_deaf_job_that_takes_too_long_is_killed_with_what_it_started(start_app: StartApp) -> None:
    app = start_app(
        "print([type(o.error).__name__ for o in GpuPool(cpu_slots=2, kill_grace_s=0.2, timeout_min=0.04, dir='sweep')"
        ".map(with_daemon, [{'x': 0}, {'x': 1}])])"
    )
    app.wait_for_jobs(2)
    out, err = app.process.communicate(timeout=LIMIT_S)
    assert out == "['JobTimeoutError', 'JobTimeoutError']\n"
    late = "job 0 (x=0) took longer than timeout_min=0.04: SIGTERM is sent, SIGKILL 0.2 s later to what is left of it; "
    assert late in err
    assert "Ctrl-C" not in err
    app.assert_nothing_is_left()


def test_what_a_job_returns_after_its_time_is_kept_and_is_not_its_result(tmp_path: Path) -> None:
    def job() -> str:
        def handler(*_: object) -> None:
            raise InterruptedError

        signal.signal(signal.SIGTERM, handler)
        try:
            signal.pause()
        except InterruptedError:
            return "half"
        return "whole"

    (result,) = outcomes(tmp_path, job, {}, timeout_min=SOON_MIN)
    assert type(result.error) is JobTimeoutError
    names = sorted(path.name for path in (tmp_path / ".gpu_pool/jobs/0").iterdir())
    assert names == ["late.pickle", "output.log"]


def test_time_goes_on_while_main_is_suspended(start_app: StartApp) -> None:
    app = start_app(
        "print([type(o.error).__name__ for o in GpuPool(cpu_slots=1, timeout_min=0.04, dir='sweep')"
        ".map(sleeping, [{'x': 0}])])"
    )
    app.wait_for_jobs(1)
    app.process.send_signal(signal.SIGSTOP)
    assert _descriptors.wait_readable(app.pidfds, LIMIT_S), "the job outlives its time"
    app.process.send_signal(signal.SIGCONT)
    assert app.process.communicate(timeout=LIMIT_S)[0] == "['JobTimeoutError']\n"
    app.assert_nothing_is_left()


def test_the_exit_of_a_job_counts_towards_its_time_and_changes_no_outcome(tmp_path: Path) -> None:
    def job() -> int:
        import atexit

        atexit.register(signal.pause)
        return 7

    (result,) = outcomes(tmp_path, job, {}, timeout_min=SOON_MIN, kill_grace_s=0.2)
    assert (result.status, result.value) == (Status.COMPLETED, 7)


# --- max_retries, retry_on ---


def test_a_job_that_crashed_is_tried_again_under_its_number_and_completes(tmp_path: Path) -> None:
    def job(x: int) -> tuple[int, str]:
        print("try", tries(tmp_path, x))
        if x == 1 and (tmp_path / "tries1").stat().st_size < 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return x, os.environ["GPU_POOL_JOB_NUM"]

    results = outcomes(tmp_path, job, *({"x": x} for x in range(3)), max_retries=2)
    assert [o.value for o in results] == [(0, "0"), (1, "1"), (2, "2")]
    assert [(tmp_path / f"tries{x}").stat().st_size for x in range(3)] == [1, 3, 1]
    logs = [Path(results[1].log).with_name(name) for name in ("output.1.log", "output.2.log", "output.log")]
    assert [log.read_text() for log in logs] == ["try 1\n", "try 2\n", "try 3\n"]


def test_a_retried_job_finds_in_its_directory_what_its_earlier_try_has_left(run_app: RunApp, tmp_path: Path) -> None:
    source = """
import hydra, os
from hydra.core.hydra_config import HydraConfig

@hydra.main(version_base=None, config_path=None)
def main(cfg):
    checkpoint = os.path.join(HydraConfig.get().runtime.output_dir, "checkpoint")
    if not os.path.exists(checkpoint):
        open(checkpoint, "w").write("half")
        os._exit(3)
    return cfg.x, open(checkpoint).read()

if __name__ == "__main__":
    main()
"""
    launcher = ["-m", "hydra/launcher=gpu_pool", "hydra.launcher.cpu_slots=1", "hydra.launcher.max_retries=1"]
    done = run_app(source, *launcher, "hydra.sweep.dir=sweep", "+x=1,2")
    assert done.returncode == 0, done.stderr
    journal = [json.loads(line) for line in (tmp_path / "sweep/.gpu_pool/journal.jsonl").read_text().splitlines()]
    ends = [(e["job"], e["attempt"], e["value"]) for e in journal if e["event"] == "end"]
    assert ends == [(0, 2, [1, "half"]), (1, 2, [2, "half"])]


def test_when_the_last_try_fails_its_error_is_the_jobs(tmp_path: Path) -> None:
    def job() -> None:
        raise ValueError(f"try {tries(tmp_path, 0)}")

    (result,) = outcomes(tmp_path, job, {}, max_retries=1, retry_on=["error"])
    assert str(result.error) == "try 2"


def test_no_exception_is_retried_unless_that_is_asked_for(tmp_path: Path) -> None:
    def job() -> None:
        raise ValueError(f"try {tries(tmp_path, 0)}")

    assert str(outcomes(tmp_path, job, {}, max_retries=5)[0].error) == "try 1"


def test_each_try_is_told_to_a_person(run_app: RunApp) -> None:
    done = run_app(
        "import os\nfrom hydra_plugins.hydra_gpu_pool_launcher import GpuPool\n"
        "def job():\n    open('tries', 'a').write('.')\n"
        "    if os.path.getsize('tries') == 1: os._exit(3)\n"
        "GpuPool(cpu_slots=1, gpus=[], max_retries=1, dir='.').map(job, [{}])"
    )
    lines = done.stderr.splitlines()
    assert lines[3] == "job 0 FAILED, try 1, and has another: ended with exit code 3 and without a result"
    assert lines[4].startswith("job 0 started in slot cpu.0, pid ")
    assert lines[4].endswith(", try 2")
    assert lines[-2].split() == ["#", "status", "value", "seconds", "gpu.slot", "tries"]
    assert lines[-1].split()[-1] == "2"


class OutOfMemoryError(RuntimeError):
    """As torch's own: known by its name, since each library has one."""


class CustomError(Exception):
    pass


def raise_(error: BaseException, cause: BaseException | None = None) -> None:
    raise error from cause


def while_handling(first: BaseException, second: BaseException) -> None:
    try:
        raise_(first)
    except BaseException:
        raise second  # noqa: B904


@pytest.mark.parametrize(
    ("fail", "retried"),
    [
        (lambda: raise_(OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")), True),
        (lambda: raise_(OutOfMemoryError()), True),
        (lambda: raise_(RuntimeError("CUDA error: out of memory")), True),
        (lambda: raise_(RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED")), True),
        (lambda: raise_(RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate")), True),
        (lambda: raise_(CustomError("training failed"), OutOfMemoryError()), True),
        (lambda: while_handling(OutOfMemoryError(), CustomError("no checkpoint")), True),
        (lambda: raise_(CustomError("training failed")), False),
        (lambda: raise_(MemoryError()), False),
        (lambda: raise_(RuntimeError("the job ran out of memory budget")), False),
    ],
)
def test_what_ran_out_of_gpu_memory_is_known_by_type_text_or_origin(tmp_path: Path, fail: Any, retried: bool) -> None:
    def job() -> None:
        if tries(tmp_path, 0) == 1:
            fail()

    (result,) = outcomes(tmp_path, job, {}, max_retries=1, retry_on=["oom"])
    assert (result.status is Status.COMPLETED) == retried


def test_what_ran_out_of_memory_has_the_whole_gpu_in_its_next_try(tmp_path: Path) -> None:
    def job(x: int) -> tuple[str, str, list[str]]:
        mark = tmp_path / f"running{x}"
        mark.touch()
        others = sorted(path.name for path in tmp_path.glob("running*") if path != mark)
        first = tries(tmp_path, x) == 1
        if x == 1 and first:
            mark.unlink()
            raise OutOfMemoryError
        mark.unlink()
        return os.environ["CUDA_VISIBLE_DEVICES"], os.environ["GPU_POOL_SLOT"], others

    results = outcomes(tmp_path, job, *({"x": x} for x in range(6)), gpus=[4], per_gpu=3, max_retries=1)
    assert results[1].value == ("4", "4.0,4.1,4.2", [])
    assert {o.value[1] for o in results} <= {"4.0", "4.1", "4.2", "4.0,4.1,4.2"}


# --- fail_fast ---


def test_the_first_failure_ends_the_sweep_and_every_cancelled_job_names_it(start_app: StartApp) -> None:
    app = start_app(
        "def job(x):\n    if x == 1: raise ValueError('boom')\n    sleeping(x)\n"
        "pool = GpuPool(cpu_slots=2, fail_fast=True, dir='sweep')\n"
        "print([str(o.error) for o in pool.map(job, [{'x': x} for x in range(4)])])"
    )
    out, err = app.process.communicate(timeout=LIMIT_S)
    app.assert_nothing_is_left()
    why = "fail_fast, since job 1 (x=1) raised ValueError: boom"
    assert eval(out) == [
        f"job 0 (x=0) was cancelled: {why}",
        "boom",
        f"job 2 (x=2) was cancelled: {why}; it was not started",
        f"job 3 (x=3) was cancelled: {why}; it was not started",
    ]
    assert f"{why}: stopping 1 job, killed in 10 s\n" in err


def test_the_later_launches_of_a_sweep_are_cancelled_too(run_app: RunApp, tmp_path: Path) -> None:
    write_sweeper(
        tmp_path,
        """
        for batch in range(2):
            for ret in self.launcher.launch([["+x=1"], ["+x=2"]], 2 * batch):
                print("RETURN", type(ret._return_value).__name__, ret._return_value)
        """,
    )
    done = run_app(
        "import hydra\n@hydra.main(version_base=None, config_path=None)\ndef main(cfg):\n"
        "    raise ValueError(cfg.x)\nif __name__ == '__main__':\n    main()\n",
        "-m",
        "hydra/launcher=gpu_pool",
        "hydra/sweeper=own",
        "hydra.launcher.cpu_slots=1",
        "hydra.launcher.fail_fast=true",
    )
    returns = [line for line in done.stdout.splitlines() if line.startswith("RETURN")]
    why = "fail_fast, since job 0 (+x=1) raised ValueError: 1; it was not started"
    assert returns == [
        "RETURN ValueError 1",
        *(f"RETURN JobCancelledError job {n} (+x={1 + n % 2}) was cancelled: {why}" for n in (1, 2, 3)),
    ]


# --- stagger_s ---


def test_a_start_waits_until_it_is_due_although_a_slot_is_free(tmp_path: Path) -> None:
    read, write = os.pipe()

    def job(x: int) -> int:
        if x == 0:
            os.read(read, 1)  # ends when job 1, on the other slot, has begun
        os.write(write, b"x")
        return x

    results = outcomes(tmp_path, job, *({"x": x} for x in range(3)), stagger_s=0.2)
    assert [o.value for o in results] == [0, 1, 2]
    os.close(read)
    os.close(write)


# --- by hand ---

HANDLED = """
def job(x):
    {handle}
    try:
        sleeping(x)
    except BaseException as error:
        caught = error
    {then}

for o in GpuPool(cpu_slots=1, dir='sweep', progress='none', max_retries=1, retry_on=['crash', 'error'])\\
        .map(job, [{{'x': 0}}]):
    print(o.status.value, type(o.error).__name__, o.error)
"""
RAISE = "signal.signal(signal.SIGTERM, lambda *_: (_ for _ in ()).throw(InterruptedError('told')))"


@pytest.mark.parametrize(
    ("signum", "handle", "then", "text"),
    [
        (signal.SIGTERM, RAISE, "return 'half'", "it then returned"),
        (signal.SIGTERM, RAISE, "sys.exit(0)", "it then returned"),
        (signal.SIGTERM, RAISE, "raise caught", "it then raised InterruptedError: told"),
        (signal.SIGTERM, RAISE, "sys.exit(143)", "it then called sys.exit(143)"),
        (signal.SIGINT, "pass", "return 'half'", "it then returned"),
        (signal.SIGINT, "pass", "raise caught", "it then raised KeyboardInterrupt"),
    ],
)
def test_what_somebody_ended_by_hand_is_cancelled_whatever_it_does_then_and_is_not_tried_again(
    start_app: StartApp, signum: signal.Signals, handle: str, then: str, text: str
) -> None:
    app = start_app(HANDLED.format(handle=handle, then=then))
    (pid,) = app.wait_for_jobs(1)
    os.kill(pid, signum)
    out, err = app.process.communicate(timeout=LIMIT_S)
    why = f"job 0 (x=0) was cancelled: {signum.name} was sent to its process; {text}"
    assert out == f"CANCELLED JobCancelledError {why}\n", err
    names = sorted(path.name for path in (app.directory / "sweep/.gpu_pool/jobs/0").iterdir())
    assert names == ["late.pickle", "outcome.json", "output.log"]
    assert app.ends()[0] == ("CANCELLED", why.removeprefix("job 0 (x=0) "))


def test_a_signal_to_a_child_of_the_job_that_has_its_handlers_is_none_to_the_job(tmp_path: Path) -> None:
    """A data loader's workers are ended so, and have whatever handler the job had set when they were forked."""

    def job() -> int:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.write(write, b"x")
            while True:
                signal.pause()
        os.read(read, 1)
        while True:  # one that comes right before its pause would not be heard
            os.kill(pid, signal.SIGTERM)
            gone, status = os.waitpid(pid, os.WNOHANG)
            if gone:
                return status

    (result,) = outcomes(tmp_path, job, {})
    assert (result.status, result.value) == (Status.COMPLETED, 0)


def test_an_interrupt_that_code_raises_is_the_jobs_own_failure(tmp_path: Path) -> None:
    (result,) = outcomes(tmp_path, lambda: raise_(KeyboardInterrupt()), {})
    assert result.status is Status.FAILED
    assert type(result.error) is JobError


def test_a_handled_signal_that_is_no_order_to_stop_changes_nothing(tmp_path: Path) -> None:
    def job() -> str:
        seen = []
        for signum in (signal.SIGUSR1, signal.SIGHUP, signal.SIGWINCH):
            signal.signal(signum, lambda *args: seen.append(args[0]))
            os.kill(os.getpid(), signum)
        return f"{len(seen)} seen"

    assert outcomes(tmp_path, job, {})[0].value == "3 seen"


def test_sigterm_by_hand_under_fail_fast_ends_that_job_only(start_app: StartApp) -> None:
    app = start_app(
        "def job(x):\n    if x == 0: sleeping(x)\n    return x\n"
        "pool = GpuPool(cpu_slots=1, fail_fast=True, dir='sweep', progress='none')\n"
        "print([o.value for o in pool.map(job, [{'x': x} for x in range(3)])])"
    )
    (pid,) = app.wait_for_jobs(1)
    os.kill(pid, signal.SIGTERM)
    assert app.process.communicate(timeout=LIMIT_S)[0] == "[None, 1, 2]\n"


# --- what the job's own code hears of it ---

CALLBACK = """
import hydra
from hydra.core.config_store import ConfigStore
from hydra.experimental.callback import Callback

class Told(Callback):
    def on_job_end(self, config, job_return, **kwargs):
        open(f"end{config.x}", "w").write(job_return.status.name)

@hydra.main(version_base=None, config_path=None)
def main(cfg):
    sleeping(cfg.x)

def run(*more):
    callback = "+hydra.callbacks.told._target_=__main__.Told"
    launcher = ["hydra/launcher=gpu_pool", "hydra.launcher.cpu_slots=2", "hydra.launcher.kill_grace_s=60"]
    sys.argv = ["app.py", "-m", *launcher, callback, "hydra.sweep.dir=sweep", "+x=0,1", *more]
    main()
"""


def test_callbacks_of_the_jobs_run_when_the_sweep_is_interrupted(start_app: StartApp) -> None:
    app = start_app("if __name__ == '__main__':\n    run()", before=CALLBACK)
    app.wait_for_jobs(2)
    app.process.send_signal(signal.SIGINT)
    app.process.communicate(timeout=LIMIT_S)
    assert [(app.directory / f"end{x}").read_text() for x in (0, 1)] == ["FAILED", "FAILED"]
    assert {status for status, _ in app.ends().values()} == {"CANCELLED"}
