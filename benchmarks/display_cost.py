"""What the table on the terminal costs: CPU time of main, with 16 jobs running that print all the time.

Main runs on a pseudoterminal, which is read all the time, once with the table (progress=live) and once without any
(progress=none). Its CPU time is asked of the kernel, by its process's clock, at both ends of a while in which the 16
jobs do nothing but print a line each hundredth of a second; in per cent of the time that has passed, on one core.
"""

from __future__ import annotations

import fcntl
import os
import struct
import tempfile
import termios
import time
from dataclasses import dataclass
from functools import partial

from _gate import gate
from _measure import Goal, Table, main, take_turns
from _place import GPU_POOL, Place, end_what_is_left, place, succeeded

JOBS = 16

APP = """
import os, select, time
import hydra, torch

@hydra.main(version_base="1.3", config_path=None)
def app(cfg):
    here = os.open(os.environ["BENCH_HERE"], os.O_WRONLY)
    go = os.open(os.environ["BENCH_GO"], os.O_RDONLY | os.O_NONBLOCK)
    os.write(here, b".")
    lines = 0
    while not select.select([go], [], [], 0.01)[0]:
        lines += 1
        print(f"epoch {lines // 100}, step {lines}: loss {1 / lines:.6f}", flush=True)

if __name__ == "__main__":
    app()
"""

SETTLED_S = 1.0
"""From the last job's start on, for the lines that tell of it."""


@dataclass(frozen=True)
class Sizes:
    rounds: int
    seconds: int


def measure(sizes: Sizes) -> list[Table]:
    with place(APP) as at:
        series = take_turns(
            {progress: partial(share, at, progress, sizes.seconds) for progress in ("live", "none")},
            sizes.rounds,
        )
    question = f"the display, live, {JOBS} running jobs that print all the time"
    return [Table(question, "% of a core", series, (Goal(question, "live", 1, "none", difference=True),))]


def share(at: Place, progress: str, seconds: float) -> float:
    """Of one core, what main takes for so long, in per cent. Raises TimeoutError where the jobs do not run."""
    launcher = (*GPU_POOL, f"hydra.launcher.cpu_slots={JOBS}", f"hydra.launcher.progress={progress}")
    terminal, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    environ = Place(at.directory, {**at.environ, "TERM": "xterm-256color"})
    try:
        with gate(environ, terminal) as jobs, tempfile.TemporaryDirectory(dir=at.directory) as into:
            streams = dict.fromkeys(("stdin", "stdout", "stderr"), slave)
            process = environ.popen(at.command(launcher, JOBS, into), **streams)
            jobs.wait(JOBS)
            jobs.rest(SETTLED_S)
            before, start = cpu_s(process.pid), time.monotonic()
            jobs.rest(seconds)
            used, passed = cpu_s(process.pid) - before, time.monotonic() - start
            with jobs.open():
                while process.poll() is None:
                    jobs.rest(0.1)
            end_what_is_left()
            succeeded(process, jobs.said.decode(errors="replace"))
    finally:
        for fd in (terminal, slave):
            os.close(fd)
    if (b"\x1b[" in jobs.said) != (progress == "live"):
        raise RuntimeError(f"this is not the display that was asked for: {jobs.said[-2000:]!r}")
    return 100 * used / passed


def cpu_s(pid: int) -> float:
    """The CPU time of all threads of this process so far, in seconds, by its clock: see clock_getcpuclockid(3)."""
    return time.clock_gettime((~pid << 3) | 2)


if __name__ == "__main__":
    main(__doc__, measure, Sizes(rounds=3, seconds=8), Sizes(rounds=1, seconds=2))
