"""What several tests use: pools on small slots, and apps in files of their own."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hydra_plugins.hydra_gpu_pool_launcher import GpuPool, JobOutcome

LIMIT_S = 60
"""Fails a hang; nothing waits for it in a good run."""


def outcomes(directory: Path, function: Any, *calls: dict[str, Any], **config: Any) -> list[JobOutcome]:
    """One outcome per call, on two CPU slots unless told otherwise."""
    return GpuPool(dir=directory, **{"cpu_slots": 2, **config}).map(function, calls)


def outcome(directory: Path, function: Any, **kwargs: Any) -> JobOutcome:
    """The outcome of one call."""
    return outcomes(directory, function, kwargs)[0]


def value(directory: Path, function: Any, **kwargs: Any) -> Any:
    """What one call returned; raises what it raised."""
    result = outcome(directory, function, **kwargs)
    if result.error is not None:
        raise result.error
    return result.value


@contextlib.contextmanager
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process that does nothing, and is ended with this context."""
    with subprocess.Popen(["sleep", "1000"]) as process:
        try:
            yield process
        finally:
            process.kill()


SWEEPER = """
import os, threading
from dataclasses import dataclass
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from omegaconf import OmegaConf

@dataclass
class Config:
    _target_: str = "hydra_plugins.own_sweeper.OwnSweeper"

ConfigStore.instance().store(group="hydra/sweeper", name="own", node=Config)

class OwnSweeper(Sweeper):
    def setup(self, **kwargs):
        self.launcher = Plugins.instance().instantiate_launcher(**kwargs)

    def sweep(self, arguments):
"""


def write_sweeper(directory: Path, sweep: str) -> None:
    """A sweeper plugin for the apps of this directory, ``hydra/sweeper=own``, whose method ``sweep`` has this body."""
    plugins = directory / "hydra_plugins"
    plugins.mkdir(exist_ok=True)
    (plugins / "own_sweeper.py").write_text(SWEEPER + textwrap.indent(textwrap.dedent(sweep), "        "))


DRIVER = """
static int initialised;
int cuInit(unsigned flags) { initialised = 1; return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return initialised ? 0 : 3; }
"""

LOAD_DRIVER = "import ctypes\ndriver = ctypes.CDLL('./libcuda.so.1')\n"


def build_driver(directory: Path) -> None:
    """A stand-in for the driver's library, libcuda.so.1, in this directory: it answers as the real one does."""
    cc = shutil.which("cc")
    if cc is None:
        pytest.skip("there is no C compiler to build the stand-in driver with")
    (directory / "cuda.c").write_text(DRIVER)
    command = [cc, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", "libcuda.so.1", "cuda.c"]
    subprocess.run(command, cwd=directory, check=True)


@dataclass(frozen=True)
class RunApp:
    """Writes an app to a file of a directory, and runs it there as a user would."""

    directory: Path

    def __call__(
        self, source: str, *arguments: str, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """What the app said, and its exit code; fails when it hangs."""
        (self.directory / "app.py").write_text(source)
        return self.python("app.py", *arguments, env=env)

    def python(
        self, *arguments: str, env: dict[str, str] | None = None, stdin: str | None = None, timeout_s: float = LIMIT_S
    ) -> subprocess.CompletedProcess[str]:
        """The same of whatever Python is told to run in the directory."""
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=self.directory,
            env={**os.environ, **(env or {})},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            input=stdin or "",
            check=False,
        )


def sweep_well(directory: Path, *arguments: str, env: dict[str, str] | None = None) -> str:
    """What the sweep of this directory's app has printed; fails when it hangs, or does not end well.

    It has more time than other apps: several jobs of it may import torch.
    """
    done = RunApp(directory).python("app.py", "-m", *arguments, env=env, timeout_s=3 * LIMIT_S)
    assert done.returncode == 0, done.stderr
    return done.stdout
