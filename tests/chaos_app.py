"""The app of chaos: jobs of several kinds, which keep a record of their own of when they ran and what they completed.

``+n`` is the job; what it does, how long it takes and what it returns follow from that and CHAOS_SEED.
"""

import hashlib
import os
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import hydra

if os.environ.get("CHAOS_RANKS", "0") != "0":
    pass  # once, and not in each job

KINDS = ("quick", "quick", "slow", "slow", "failing", "with_child", "with_daemon", "deaf", "big")
SEED = os.environ.get("CHAOS_SEED", "0")
RAN = Path(os.environ.get("CHAOS_RAN", "ran"))


def kind(seed: str, n: int) -> str:
    """What job ``n`` of this seed is like."""
    return random.Random(f"kind {seed} {n}").choice(KINDS)


def value(seed: str, n: int) -> dict[str, Any]:
    """What job ``n`` of this seed returns."""
    bulk = random.Random(f"bulk {seed} {n}").randbytes(1_000) * (3_000 if kind(seed, n) == "big" else 1)
    return {"n": n, "bulk": bulk}


def digest(found: dict[str, Any]) -> str:
    """A value in short."""
    return f"{found['n']} {hashlib.sha256(found['bulk']).hexdigest()}"


def record(n: int, text: str) -> None:
    """A line in the job's own file, whole or not at all; of a group, rank 0 has it."""
    if os.environ.get("RANK", "0") != "0":
        return
    fd = os.open(RAN / str(n), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(fd, f"{text}\n".encode())
    os.close(fd)


def daemonize(seconds: float) -> None:
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(seconds)
        os._exit(0)


@hydra.main(version_base=None, config_path=None)
def main(cfg: Any) -> Any:
    n: int = cfg.n
    what = kind(SEED, n)
    record(n, f"run {os.getpid()}")
    if what == "with_child":
        subprocess.Popen(["sh", "-c", "trap '' TERM; sleep 600"])
    elif what == "with_daemon":
        daemonize(600)
    elif what == "deaf":
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, signal.SIG_IGN)
    time.sleep(random.Random(f"time {SEED} {n}").uniform(0, 0.02 if what in {"quick", "big"} else 0.7))
    if what == "failing":
        raise ValueError(f"job {n} fails")
    record(n, "done")
    return value(SEED, n)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it
    main()
