"""The world of an app, as its jobs find it: what it opened, set and made at import, and what of it is not for them."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from support import RunApp, outcome, outcomes, value

from hydra_plugins.hydra_gpu_pool_launcher import JobCancelledError

OPENED = """
import json, logging, os, socket, tempfile
from multiprocessing.shared_memory import SharedMemory
import hydra

log = logging.FileHandler("app.log")
logging.getLogger("of.the.app").addHandler(log)
memory = SharedMemory(create=True, size=10)
ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
of_the_app = tempfile.TemporaryDirectory()
kept = []

@hydra.main(version_base=None, config_path=None)
def main(cfg):
    own = {f"own.{cfg.x}.{i}": open(f"own.{cfg.x}.{i}", "w+") for i in range(20)}
    memory.buf[cfg.x] = 7
    theirs.send(f"job {cfg.x}".encode())
    for i in range(100):
        for name, file in own.items():
            file.write(f"{name} {i}\\n")
        logging.getLogger("of.the.app").warning(f"job {cfg.x} line {i}")
    for file in own.values():
        file.flush()
    kept.append(tempfile.TemporaryDirectory())
    return kept[-1].name

if __name__ == "__main__":
    main()
    received = sorted(ours.recv(100).decode() for _ in range(4))
    print(json.dumps([received, bytes(memory.buf[:4]).hex(), os.path.isdir(of_the_app.name)]))
    memory.close()
    memory.unlink()
"""

HYDRA = ("-m", "hydra/launcher=gpu_pool", "hydra.sweep.dir=sweep", "hydra.launcher.gpus=[]")


def ends(directory: Path) -> list[Any]:
    lines = map(json.loads, (directory / "sweep/.gpu_pool/journal.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == "end"]


def test_what_the_app_opened_at_import_works_in_its_jobs_and_does_no_harm_to_their_own_files(
    run_app: RunApp, tmp_path: Path
) -> None:
    done = run_app(OPENED, *HYDRA, "hydra.launcher.cpu_slots=2", "+x=0,1,2,3")
    assert done.returncode == 0, done.stderr
    received, memory, app_has_its_directory = json.loads(done.stdout.splitlines()[-1])
    assert received == [f"job {x}" for x in range(4)]
    assert memory == "07" * 4
    assert app_has_its_directory
    of_the_jobs = {end["value"] for end in ends(tmp_path)}
    assert [Path(directory).exists() for directory in of_the_jobs] == [False] * 4
    for x in range(4):
        for i in range(20):
            name = f"own.{x}.{i}"
            assert (tmp_path / name).read_text() == "".join(f"{name} {line}\n" for line in range(100))
    logged = (tmp_path / "app.log").read_text().splitlines()
    assert sorted(logged) == sorted(f"job {x} line {i}" for x in range(4) for i in range(100))


def test_an_apps_handler_for_sigterm_is_for_main_and_a_job_can_still_be_ended_by_hand(tmp_path: Path) -> None:
    old = signal.signal(signal.SIGTERM, lambda *_: (tmp_path / "handled").touch())
    try:
        result = outcome(tmp_path, lambda: os.kill(os.getpid(), signal.SIGTERM))
    finally:
        signal.signal(signal.SIGTERM, old)
    assert type(result.error) is JobCancelledError
    assert not (tmp_path / "handled").exists()


@pytest.mark.parametrize("method", multiprocessing.get_all_start_methods())
def test_a_start_method_that_the_app_has_set_holds_in_its_jobs(run_app: RunApp, method: str) -> None:
    source = f"""
import multiprocessing
from hydra_plugins.hydra_gpu_pool_launcher import GpuPool

def job():
    child = multiprocessing.Process(target=abs, args=(-1,))
    child.start()
    child.join()
    queue = multiprocessing.SimpleQueue()
    queue.put(1)
    return multiprocessing.get_start_method(), child.exitcode, queue.get()

if __name__ == "__main__":
    multiprocessing.set_start_method({method!r})
    print([o.value for o in GpuPool(gpus=[], cpu_slots=2, progress="none").map(job, [{{}}, {{}}])])
    print(multiprocessing.get_start_method())
"""
    done = run_app(source)
    assert done.stdout == f"{[(method, 0, 1)] * 2}\n{method}\n", done.stderr


def test_a_job_may_open_as_many_files_as_the_hard_limit_allows(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, soft), hard))
    try:
        seen = value(tmp_path, lambda: resource.getrlimit(resource.RLIMIT_NOFILE))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert seen == (hard, hard)


@pytest.mark.parametrize(("by_user", "as_in_main"), [(None, False), ("OPENBLAS_NUM_THREADS", True)])
def test_libraries_that_are_loaded_already_are_told_of_the_threads_of_a_job_unless_the_user_has_told_them(
    run_app: RunApp, by_user: str | None, as_in_main: bool
) -> None:
    pytest.importorskip("numpy")
    source = """
import numpy, threadpoolctl
from hydra_plugins.hydra_gpu_pool_launcher import GpuPool

def threads():
    return [pool["num_threads"] for pool in threadpoolctl.threadpool_info()]

numpy.ones((3, 3)) @ numpy.ones((3, 3))
job = GpuPool(gpus=[], cpu_slots=1, progress="none", threads_per_job=1).map(threads, [{}])[0].value
print(job == threads(), set(job) == {1})
"""
    done = run_app(source, env={by_user: "2"} if by_user else {})
    assert done.stdout.split()[0 if as_in_main else 1] == "True", done.stderr


def test_no_library_starts_a_thread_in_a_job_for_being_told_how_many_it_may_have(run_app: RunApp) -> None:
    """OpenBLAS does, and the thread spins for a tenth of a second, in every job."""
    pytest.importorskip("numpy")
    source = """
import os, numpy
from hydra_plugins.hydra_gpu_pool_launcher import GpuPool

def threads():
    return len(os.listdir("/proc/self/task"))

for threads_per_job in (1, 2, "auto"):
    pool = GpuPool(gpus=[], cpu_slots=1, progress="none", threads_per_job=threads_per_job)
    print(*(outcome.value for outcome in pool.map(threads, [{}, {}])))
"""
    assert run_app(source).stdout == "1 1\n" * 3


def test_libraries_have_their_own_number_of_threads_again_where_the_user_has_told_them_since(run_app: RunApp) -> None:
    pytest.importorskip("numpy")
    source = """
import numpy
from hydra_plugins.hydra_gpu_pool_launcher import _threads

own = [before for _, before in _threads._libraries()]
for threads in (1, None, 3, None):
    _threads.apply_before(threads)
    now = [library.num_threads for library, _ in _threads._libraries()]
    print(now == own if threads is None else set(now) == {threads})
"""
    assert run_app(source).stdout == "True\n" * 4


# --- what is said once, before anything starts ---


@pytest.mark.parametrize(("cores", "warnings"), [(8, 1), (1, 0)])
def test_an_app_that_is_bound_to_one_core_of_several_is_told_once(run_app: RunApp, cores: int, warnings: int) -> None:
    source = f"""
import os
os.sched_setaffinity(0, {{min(os.sched_getaffinity(0))}})
os.cpu_count = lambda: {cores}
from hydra_plugins.hydra_gpu_pool_launcher import GpuPool
GpuPool(gpus=[], cpu_slots=2).map(print, [{{}}, {{}}])
"""
    done = run_app(source)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("the main process may use one CPU core of 8, and all jobs will share it") == warnings
    assert done.stderr.count("taskset") == warnings


WANDB = """
import os, sys, types
import hydra
from hydra_plugins.hydra_gpu_pool_launcher import GpuPool

def init():  # as wandb.init() leaves the process
    sys.modules["wandb"] = types.SimpleNamespace(run=object())
    os.environ.update(WANDB_SERVICE="3-service", WANDB_RUN_ID="of main", WANDB_PROJECT="mine")

def seen():
    return [os.environ.get(name) for name in ("WANDB_SERVICE", "WANDB_RUN_ID", "WANDB_PROJECT")]

@hydra.main(version_base=None, config_path=None)
def main(cfg):
    return seen()

if __name__ == "__main__":
    init()
    if len(sys.argv) > 1:
        main()
    else:
        GpuPool(gpus=[], cpu_slots=1, dir="sweep").map(seen, [{}])
    assert seen() == ["3-service", "of main", "mine"]
"""


@pytest.mark.parametrize("arguments", [(), (*HYDRA, "+x=1")])
@pytest.mark.parametrize(("env", "run_id"), [({}, None), ({"WANDB_RUN_ID": "of the user"}, "of the user")])
def test_a_wandb_run_of_main_is_warned_of_once_and_is_not_the_run_of_its_jobs(
    run_app: RunApp, tmp_path: Path, arguments: tuple[str, ...], env: dict[str, str], run_id: str | None
) -> None:
    done = run_app(WANDB, *arguments, env=env)
    assert done.returncode == 0, done.stderr
    assert (done.stdout + done.stderr).count("a wandb run is active in the main process") == 1
    assert [end["value"] for end in ends(tmp_path)] == [[None, run_id, "mine"]]


def test_a_module_of_wandb_without_a_run_is_nothing_to_warn_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", type("wandb", (), {"run": None}))
    outcomes(tmp_path, print, {})
    assert "wandb" not in capfd.readouterr().err
