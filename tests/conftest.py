"""What all tests share: no test hangs, and none leaves a process behind."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from running import StartApp, starting
from support import RunApp

from hydra_plugins.hydra_gpu_pool_launcher import _family, _process


def pytest_collection_finish() -> None:
    """Garbage is looked for after each test: among what tests have made, and not in all of torch, say."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    """Orphans below a subreaper become its children: whatever a test forgets shows up here, and is ended."""
    _process.become_subreaper()
    before = _family.children()
    yield
    gc.collect()  # a launcher whose sweep failed hangs on the frames of that failure, and its supervisor on it
    left = _family.children() - before
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
        "GPU_POOL_GPUS",
    ):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def leases(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory in which the sweeps of this test, and of its apps, lease their slots: no other sweep does."""
    directory = tmp_path_factory.mktemp("leases")
    monkeypatch.setenv("GPU_POOL_LEASES", str(directory))
    return directory


@pytest.fixture
def start_app(tmp_path: Path) -> Iterator[StartApp]:
    with starting(tmp_path) as start:
        yield start


@pytest.fixture
def run_app(tmp_path: Path) -> RunApp:
    return RunApp(tmp_path)


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
