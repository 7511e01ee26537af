"""A place in which sweeps run, side by side with nothing: a directory, an app, and nobody left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra_plugins.hydra_gpu_pool_launcher import _family, _process

NOTHING = """
import hydra, torch

@hydra.main(version_base="1.3", config_path=None)
def app(cfg):
    torch.is_grad_enabled()  # nothing; but whoever sends this function to another process has to import torch there

if __name__ == "__main__":
    app()
"""
"""The app of most questions: it imports torch, and its jobs do nothing."""

GPU_POOL = ("hydra/launcher=gpu_pool", "hydra.launcher.gpus=[]", "hydra.launcher.start_method=fork")

LAUNCHERS = {
    "gpu_pool": (*GPU_POOL, "hydra.launcher.cpu_slots=2"),
    "joblib": ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2"),
    "ray": ("hydra/launcher=ray", "++hydra.launcher.ray.init.num_cpus=2"),
    "submitit_local": ("hydra/launcher=submitit_local",),
    "basic": ("hydra/launcher=basic",),
}
"""By the name by which tables call them: two jobs at once, where that can be said, and otherwise as they come."""


@dataclass
class Place:
    """A directory with an app, and what starts Python there."""

    directory: Path
    environ: dict[str, str] = field(default_factory=dict)

    def command(self, launcher: Sequence[str], jobs: int, into: str) -> list[str]:
        """Of a sweep of so many jobs, whose files go ``into`` a directory of this one."""
        values = ",".join(map(str, range(jobs)))
        return [sys.executable, "app.py", "-m", *launcher, f"hydra.sweep.dir={into}", f"+x={values}"]

    def popen(self, command: Sequence[str], **popen: Any) -> subprocess.Popen[str]:
        """The command, in this place."""
        environ = {**os.environ, **self.environ}
        return subprocess.Popen(command, cwd=self.directory, env=environ, text=True, **popen)

    def timed(self, command: Sequence[str]) -> float:
        """The seconds that the command takes. Raises RuntimeError where it fails. Whatever it leaves is ended after."""
        with tempfile.TemporaryFile("w+") as said:  # not a pipe: daemons would hold it open
            start = time.perf_counter()
            process = self.popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
            process.wait()
            seconds = time.perf_counter() - start
            end_what_is_left()
            said.seek(0)
            succeeded(process, said.read())
        return seconds

    def sweep(self, launcher: Sequence[str], jobs: int) -> float:
        """The seconds that a sweep takes, from the command to its end. Raises RuntimeError where a job is missing."""
        with tempfile.TemporaryDirectory(dir=self.directory) as into:
            seconds = self.timed(self.command(launcher, jobs, into))
            run = len(list(Path(into).glob("*/.hydra/config.yaml")))
        if run != jobs:
            raise RuntimeError(f"{run} of {jobs} jobs were run by {launcher[0]}")
        return seconds


def succeeded(process: subprocess.Popen[str], said: str) -> None:
    """Raises RuntimeError with what the process has said, where it has not."""
    if process.returncode != 0:
        command = " ".join(map(str, process.args)) if isinstance(process.args, list) else str(process.args)
        raise RuntimeError(f"{command[:300]} ended with {process.returncode}:\n{said[-5000:]}")


@contextlib.contextmanager
def place(source: str = NOTHING) -> Iterator[Place]:
    """Until it is left: then the directory is gone, and so is every process that was started in it."""
    _process.become_subreaper()  # daemons, ray's say, become children of this process when their parents end
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, lambda signum, _: sys.exit(f"ended by {signal.Signals(signum).name}"))
    # In /tmp, since ray makes sockets there, whose paths must be short.
    with tempfile.TemporaryDirectory(prefix="bench-", dir="/tmp", ignore_cleanup_errors=True) as name:
        directory = Path(name)
        (directory / "app.py").write_text(source, encoding="utf-8")
        environ = {
            "GPU_POOL_LEASES": str(directory / "leases"),
            "TMPDIR": name,
            "RAY_TMPDIR": name,
            "RAY_USAGE_STATS_ENABLED": "0",
            "PYTHONWARNINGS": "ignore",
        }
        try:
            yield Place(directory, environ)
        finally:
            end_what_is_left()


def end_what_is_left() -> None:
    """Block until this process has no child any more."""
    while left := _family.children():
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in left:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
