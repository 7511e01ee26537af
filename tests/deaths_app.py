"""The app of test_deaths: one task function, and in ``DEATHS`` all the ways in which a job of it may end.

It is a script with a guard, and its task function is found by its name, so that every start method can run it.
"""

import atexit
import errno
import faulthandler
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig

from hydra_plugins.hydra_gpu_pool_launcher import _family, _schedule, _verdict

LEFT = Path("left.jsonl")
"""What jobs leave behind, a line each: a process, or a mark that is made when it ends by itself."""

DEATHS: dict[str, Callable[[], Any]] = {}

INJECTED = "DEATHS_APP_INJECTED"
"""The variable with the numbers of the jobs that the system will not start, and not give back: "1,3"."""

_kept: list[object] = []  # until the interpreter's exit


def death(function: Callable[[], Any]) -> Callable[[], Any]:
    DEATHS[function.__name__] = function
    return function


def start_time(pid: int) -> str | None:
    """When a process was started, in the kernel's ticks; None: it is gone, or all but reaped."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state in "ZX" else rest[18]


def leave(pid: int) -> None:
    """Put a process that runs on record."""
    with LEFT.open("a") as file:
        file.write(json.dumps({"pid": pid, "started": start_time(pid)}) + "\n")


def leave_mark(path: str) -> None:
    """Put on record that this file will be there when what was left has ended."""
    with LEFT.open("a") as file:
        file.write(json.dumps({"mark": path}) + "\n")


def alive() -> list[dict[str, Any]]:
    """What of all that is on record has not ended."""
    left = [json.loads(line) for line in LEFT.read_text().splitlines()] if LEFT.exists() else []
    return [
        entry
        for entry in left
        if (not Path(entry["mark"]).exists() if "mark" in entry else start_time(entry["pid"]) == entry["started"])
    ]


# --- raises ---


class OtherArgumentsError(Exception):
    """Pickles, and cannot be unpickled."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


@death
def raises() -> NoReturn:
    raise KeyError("missing")


@death
def raises_what_cannot_be_pickled() -> NoReturn:
    raise ValueError(threading.Lock())


@death
def raises_what_cannot_be_unpickled() -> NoReturn:
    raise OtherArgumentsError(1, 2)


@death
def raises_keyboard_interrupt() -> NoReturn:
    raise KeyboardInterrupt


# --- returns ---


class Unloadable:
    """Refuses to be loaded anywhere but in the process that made it, as a tensor on a GPU would in main."""

    def __init__(self) -> None:
        self.maker = os.getpid()

    def __setstate__(self, state: dict[str, int]) -> None:
        if state["maker"] != os.getpid():
            raise RuntimeError("not in this process")


class NeverLoadable:
    def __reduce__(self) -> Any:
        return os.strerror, ("no number",)


@death
def returns_a_lambda() -> Any:
    return lambda: 1


@death
def returns_what_cannot_be_unpickled() -> Any:
    return NeverLoadable()


@death
def returns_what_main_refuses_to_load() -> Any:
    return Unloadable()


@death
def returns_50_mb() -> bytes:
    return os.urandom(1) * 50_000_000


# --- exits ---


@death
def sys_exit_0() -> NoReturn:
    sys.exit(0)


@death
def sys_exit_3() -> NoReturn:
    sys.exit(3)


@death
def sys_exit_text() -> NoReturn:
    sys.exit("no data")


@death
def os_exit_0() -> NoReturn:
    os._exit(0)


@death
def os_exit_4() -> NoReturn:
    os._exit(4)


# --- is killed ---


def kills_itself(signum: int) -> None:
    os.kill(os.getpid(), signum)


@death
def sigkill() -> None:
    kills_itself(signal.SIGKILL)


@death
def segmentation_fault() -> None:
    faulthandler._sigsegv()  # type: ignore[attr-defined]


@death
def sigbus() -> None:
    kills_itself(signal.SIGBUS)


@death
def sigabrt() -> None:
    os.abort()


@death
def sigterm_to_itself() -> None:
    kills_itself(signal.SIGTERM)


@death
def sigkill_to_its_group() -> None:
    os.killpg(0, signal.SIGKILL)


def dies_at_the_rename_of(name: str) -> None:
    """SIGKILL when this file of the job's is written aside, and about to be put in its place."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "os.rename" and Path(str(arguments[1])).name == name:
            kills_itself(signal.SIGKILL)

    sys.addaudithook(hook)


@death
def dies_while_it_writes_its_return() -> int:
    dies_at_the_rename_of("return.pickle")
    return 1


@death
def dies_between_return_and_outcome() -> int:
    dies_at_the_rename_of("outcome.json")
    return 1


@death
def dies_after_its_outcome() -> int:
    atexit.register(kills_itself, signal.SIGKILL)
    return 1


# --- leaves something behind ---


@death
def leaves_a_child() -> int:
    child = subprocess.Popen(["sh", "-c", "trap '' TERM; echo; sleep 1000"], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    leave(child.pid)
    _kept.append(child)
    return 1


@death
def leaves_a_daemon() -> int:
    read, write = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.write(write, str(os.getpid()).encode())
            threading.Event().wait()
        os._exit(0)
    leave(int(os.read(read, 20)))
    return 1


@death
def leaves_workers_of_a_data_loader() -> int:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    numbers = TensorDataset(torch.arange(4.0))
    batches = iter(DataLoader(numbers, batch_size=1, num_workers=1, persistent_workers=True))
    next(batches)
    _kept.append(batches)
    for worker in multiprocessing.active_children():
        assert worker.pid is not None
        leave(worker.pid)
    return 1


@death
def leaves_a_child_of_multiprocessing() -> int:
    child = multiprocessing.get_context("fork").Process(target=threading.Event().wait, daemon=True)
    child.start()
    assert child.pid is not None
    leave(child.pid)
    return 1


def ends_after_the_task(mark: str) -> Callable[[], None]:
    """What waits until this interpreter shuts down, and then makes its mark."""
    shutting_down = threading.Event()
    threading._register_atexit(shutting_down.set)  # type: ignore[attr-defined]
    leave_mark(mark)
    leave(os.getpid())

    def run() -> None:
        shutting_down.wait()
        Path(mark).touch()

    return run


@death
def leaves_a_thread() -> int:
    threading.Thread(target=ends_after_the_task("thread ended")).start()
    return 1


@death
def leaves_a_running_executor() -> int:
    executor = ThreadPoolExecutor()
    executor.submit(ends_after_the_task("executor ended"))
    _kept.append(executor)
    return 1


# --- is stopped, and what the system does to it ---


@death
def ignores_sigterm_and_is_stopped() -> NoReturn:
    """By the way that ends this sweep and leaves main its returns: a signal to the supervisor."""
    leave(os.getpid())
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.kill(os.getppid(), signal.SIGTERM)
    while True:
        signal.pause()


@death
def cannot_be_forked() -> int:
    return 1


@death
def cannot_be_reaped() -> None:
    kills_itself(signal.SIGKILL)


def inject(unforkable: int, unreapable: int) -> None:
    """The system refuses to start one job, EAGAIN, and never tells of the end of another one."""
    start, reap = _family.Family.start, _family._reap_leader
    held = set()

    def injected_start(self: _family.Family, key: int, *how: Any, **else_: Any) -> int:
        if key == unforkable:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        pid = start(self, key, *how, **else_)
        if key == unreapable:
            held.add(pid)
        return pid

    _family.Family.start = injected_start  # type: ignore[method-assign]
    _family._reap_leader = lambda pid: None if pid in held else reap(pid)
    for room in (_schedule, _verdict):
        vars(room)["LOST_AFTER_S"] = 0.5


if INJECTED in os.environ:
    inject(*map(int, os.environ[INJECTED].split(",")))


def task(cfg: Any) -> Any:
    if cfg.kind != "good":
        return DEATHS[cfg.kind]()
    still = alive()
    if still:
        raise AssertionError(f"of the jobs before, this has not ended: {still}")
    return HydraConfig.get().job.num * 10


if __name__ == "__main__":
    hydra.main(version_base=None, config_path=None)(task)()  # not above: it sets the defaults of whoever imports this
