"""The app of test_ddp_deaths: in each job, one rank ends in one of the ways of ``KINDS`` while the other waits for it.

Where torch is wanted, the other sits in a collective; where it is not, since each rank would have to import it, it only
rests.
"""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

import deaths_app
import hydra
from deaths_app import DEATHS, kills_itself
from hydra.core.hydra_config import HydraConfig

TORCH = "DDP_DEATHS_APP_TORCH"
"""The variable that says, where it is set, that ranks are to make a process group."""

if TORCH in os.environ:
    import torch
    import torch.distributed as dist

KINDS = dict(DEATHS)
"""What one rank does. A function that returns goes on to the collective, and what it returned is the rank's value."""


class Done(Exception):
    """Return this now, whoever waits."""


def kind(function: Any) -> Any:
    KINDS[function.__name__] = function
    return function


@kind
def is_sent_sigterm() -> None:
    kills_itself(signal.SIGTERM)


@kind
def is_sent_sighup() -> None:
    kills_itself(signal.SIGHUP)


@kind
def is_sent_sigint() -> None:
    kills_itself(signal.SIGINT)
    rest()


@kind
def catches_sigterm_and_returns() -> None:
    signal.signal(signal.SIGTERM, lambda *_: None)
    kills_itself(signal.SIGTERM)
    raise Done("what it has")


@kind
def raises_on_its_way_out_of_the_group() -> None:
    try:
        raise ValueError("the cause")
    finally:
        if TORCH in os.environ:
            dist.destroy_process_group()  # the other's error, for want of this rank, is earlier than ours


@kind
def raises_and_never_ends() -> None:
    """Its interpreter waits for a thread; the others are not to wait for that."""
    threading.Thread(target=threading.Event().wait).start()
    raise ValueError("the cause")


@kind
def ends_with_its_task_in_a_fork_too() -> None:
    fork = os.fork()
    if fork == 0:
        raise Done("from a fork")
    os.waitpid(fork, 0)  # what it has to say would be there first


@kind
def closes_all_descriptors() -> NoReturn:
    os.closerange(3, 5000)
    raise Done("without descriptors")


@kind
def closes_all_descriptors_and_raises() -> NoReturn:
    os.closerange(3, 5000)
    raise ValueError("the cause")


AT_ITS_END = {"sys_exit_0_at_its_end": DEATHS["sys_exit_0"]}
"""What one rank does when the collective is over."""

WITHOUT_GROUP = {"closes_all_descriptors", "closes_all_descriptors_and_raises"}
"""The ways in which a process group, which has descriptors too, would end first."""


def rest() -> NoReturn:  # not in signal.pause(): what comes right before it would not be heard
    while True:
        time.sleep(0.02)


def left_behind(slot: str, num: int) -> Path:
    return Path(f"left_{slot}_{num}.jsonl")


def require_nothing_alive(slot: str, num: int) -> None:
    """Raise AssertionError where something of another job of this slot has not ended."""
    for path in set(Path().glob(f"left_{slot}_*.jsonl")) - {left_behind(slot, num)}:
        deaths_app.LEFT = path
        still = deaths_app.alive()
        if still:
            raise AssertionError(f"of a job before, this has not ended: {still}")
    deaths_app.LEFT = left_behind(slot, num)


def task(cfg: Any) -> Any:
    num, rank = HydraConfig.get().job.num, int(os.environ["RANK"])
    require_nothing_alive(os.environ["GPU_POOL_SLOT"], num)
    for pid in (os.getpid(), os.getppid()):
        deaths_app.leave(pid)
    grouped = TORCH in os.environ and cfg.kind not in WITHOUT_GROUP
    if grouped:
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))
    value: Any = num * 10
    try:
        if rank == cfg.who and cfg.kind in KINDS:
            value = KINDS[cfg.kind]() or value
        elif not grouped and cfg.waits:
            rest()
    except Done as done:
        return done.args[0]
    if grouped:
        dist.all_reduce(torch.ones(1))
    if rank == cfg.who and cfg.kind in AT_ITS_END:
        AT_ITS_END[cfg.kind]()
    return value


if __name__ == "__main__":
    hydra.main(version_base=None, config_path=None)(task)()
