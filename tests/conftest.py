"""What all tests share: no test hangs, and none leaves a process behind."""

from __future__ import annotations

import gc
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from running import StartApp, starting
from standin import Cards, build_library, install_smi
from support import RunApp

from hydra_plugins.hydra_gpu_pool_launcher import _family, _process, _sysfs

LONG_FILES = {
    "test_ddp_clients",
    "test_example_app",
    "test_hydra_suites",
    "test_libraries",
    "test_lightning",
    "test_long_sweeps",
}
"""They train with torch and its clients, play Hydra's own tests, or run thousands of jobs."""

TABLES = {"test_ddp", "test_ddp_deaths", "test_ddp_nodes", "test_deaths", "test_start_methods"}
"""What they prove of a fork they prove again of fresh interpreters, each of which imports everything anew."""

LONG_TESTS = (
    "test_a_resumed_sweep_that_is_killed_again_and_again_",
    "test_a_sweep_killed_while_it_",
    "test_a_used_directory_is_not_mistaken_",
    "test_forty_groups_",
)


@pytest.hookimpl(tryfirst=True)  # before those of one mark are chosen
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """``make test`` is to take less than ten minutes on two cores: what takes long is in ``make test-long``."""
    for item in items:
        module, _, name = item.nodeid.rpartition("/")[2].partition(".py::")
        fresh = "spawn" in name or "fresh_interpreter" in name
        if module in LONG_FILES or (module in TABLES and fresh) or name.rpartition("::")[2].startswith(LONG_TESTS):
            item.add_marker(pytest.mark.long)


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
    names = {pid: command for pid in left if (command := _command(pid))}
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
        "CUDA_MPS_PIPE_DIRECTORY",
        "XLA_CLIENT_MEM_FRACTION",
        "XLA_PYTHON_CLIENT_MEM_FRACTION",
        "XLA_PYTHON_CLIENT_PREALLOCATE",
        "XLA_PYTHON_CLIENT_ALLOCATOR",
        "TF_FORCE_GPU_ALLOW_GROWTH",
        "TF_GPU_ALLOCATOR",
        "OMP_NUM_THREADS",
        "MKL_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "NUMEXPR_NUM_THREADS",
        "GPU_POOL_GPUS",
    ):
        monkeypatch.delenv(name, raising=False)
    for root in ("KFD", "DRM"):
        monkeypatch.setattr(_sysfs, root, os.devnull)


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


@pytest.fixture(scope="session")
def _nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cc = shutil.which("cc")
    if cc is None:
        pytest.skip("there is no C compiler to build the stand-in for NVML with")
    directory = tmp_path_factory.mktemp("nvml")
    build_library(directory, cc)
    return directory


@pytest.fixture
def cards(_nvml_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cards:
    """GPUs that NVML tells of, here and in every process that the test starts; none until the test says which."""
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    return _told(tmp_path, monkeypatch, LD_LIBRARY_PATH=_before("LD_LIBRARY_PATH", _nvml_library))


@pytest.fixture
def cards_by_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cards:
    """The same, of which nvidia-smi alone can tell: where NVML is installed, it lacks the driver's library."""
    (tmp_path / "smi").mkdir()
    install_smi(tmp_path / "smi")
    return _told(tmp_path, monkeypatch, PATH=_before("PATH", tmp_path / "smi"))


def _before(variable: str, directory: Path) -> str:
    return os.pathsep.join(filter(None, [str(directory), os.environ.get(variable)]))


def _told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **environ: str) -> Cards:
    cards = Cards(tmp_path / "cards", {**environ, "STANDIN_CARDS": str(tmp_path / "cards")})
    for name, value in cards.environ.items():
        monkeypatch.setenv(name, value)
    cards.are()
    return cards


def _command(pid: int) -> str:
    """Of a process that lives; "" of one that is dying, and has no memory any more, or is dead."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _process_end(pids: set[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass
