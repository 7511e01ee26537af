"""What all tests share: no test hangs, and none leaves a process behind."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hydra_plugins.hydra_gpu_pool_launcher import _process

LIMIT_S = 60
"""Fails a hang; nothing waits for it in a good run."""


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    """Orphans below a subreaper become its children: whatever a test forgets shows up here, and is ended."""
    _process.become_subreaper()
    before = _process.children()
    yield
    gc.collect()  # a launcher whose sweep failed hangs on the frames of that failure, and its supervisor on it
    left = _process.children() - before
    names = {pid: _command(pid) for pid in left if not _is_zombie(pid)}
    _process_end(left)
    assert not names, f"the test left processes behind: {names}"


@pytest.fixture(autouse=True)
def _no_devices_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that runs on a machine with GPUs, or as a job of a scheduler, sees none unless it asks for it."""
    for name in (
        "CUDA_VISIBLE_DEVICES",
        "CUDA_DEVICE_ORDER",
        "HIP_VISIBLE_DEVICES",
        "ROCR_VISIBLE_DEVICES",
        "ZE_AFFINITY_MASK",
        "OMP_NUM_THREADS",
        "MKL_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "NUMEXPR_NUM_THREADS",
    ):
        monkeypatch.delenv(name, raising=False)


RunApp = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run_app(tmp_path: Path) -> RunApp:
    """Write an app to a file, and run it as a user would: ``run_app(source, *arguments, env={}, **Popen's)``."""

    def run(source: str, *arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        (tmp_path / "app.py").write_text(source)
        return subprocess.run(
            [sys.executable, "app.py", *arguments],
            cwd=tmp_path,
            env={**os.environ, **(env or {})},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            stdin=subprocess.DEVNULL,
            check=False,
        )

    return run


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except (FileNotFoundError, ProcessLookupError):
        return "(gone)"


def _process_end(pids: set[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass
