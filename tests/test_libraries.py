"""With the libraries that users have beside it: torch in main and in jobs, Optuna's sweeper.

Importing torch takes seconds, so there is one app per promise that needs it, and no more.
"""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from support import LIMIT_S, RunApp, write_sweeper

needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
needs_optuna = pytest.mark.skipif(
    find_spec("hydra_plugins.hydra_optuna_sweeper") is None, reason="hydra-optuna-sweeper is not installed"
)

WARM = """
import torch

def warm():
    torch.set_num_threads(4)  # enough for a pool of threads, on machines with one core too
    return float((torch.ones(2_000_000) * 2).sum())

assert warm() == 4_000_000
"""


@needs_torch
def test_jobs_compute_in_parallel_although_main_has_done_so_before_each_fork(run_app: RunApp) -> None:
    """GNU OpenMP's threads do not survive a fork: without omp_pause_resource_all, every job here waits for ever."""
    source = f"""{WARM}
from hydra_plugins.hydra_gpu_pool_launcher import GpuPool
for _ in range(3):
    assert [o.value for o in GpuPool(cpu_slots=2).map(warm, [{{}}] * 4)] == [4_000_000] * 4
    assert warm() == 4_000_000
print("done", torch.get_num_threads())
"""
    done = run_app(source)
    assert done.stdout == "done 4\n", done.stderr


INTEL = Path(sys.prefix, "lib", "libiomp5.so")


@needs_torch
@pytest.mark.skipif(not INTEL.exists(), reason="intel-openmp is not installed")
def test_jobs_compute_in_parallel_under_intels_openmp_too(run_app: RunApp) -> None:
    """It survives a fork by itself, and hangs main when it is paused a second time: it has to be left alone."""
    source = f"""{WARM}
import threadpoolctl
from hydra_plugins.hydra_gpu_pool_launcher import GpuPool
for _ in range(5):
    assert [o.value for o in GpuPool(cpu_slots=2).map(warm, [{{}}] * 2)] == [4_000_000] * 2
    assert warm() == 4_000_000
print([pool["prefix"] for pool in threadpoolctl.threadpool_info() if pool["user_api"] == "openmp"])
"""
    done = run_app(source, env={"LD_PRELOAD": str(INTEL)})
    assert "libiomp" in done.stdout, done.stderr


COMPUTING = """
import __main__
values = []
for batch in range(3):
    __main__.warm()
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    os.environ["BATCH"] = str(batch)
    values += [ret.return_value for ret in self.launcher.launch([["+x=1"], ["+x=2"]], 2 * batch)]
print("VALUES", values)
"""


@needs_torch
def test_a_sweeper_may_compute_in_main_between_batches(run_app: RunApp, tmp_path: Path) -> None:
    write_sweeper(tmp_path, COMPUTING)
    source = f"""{WARM}
import os, hydra

@hydra.main(version_base=None, config_path=None)
def main(cfg):
    return int(warm()), torch.get_num_threads(), os.environ["BATCH"]

if __name__ == "__main__":
    main()
"""
    done = run_app(source, "-m", "hydra/launcher=gpu_pool", "hydra/sweeper=own", "hydra.launcher.cpu_slots=2")
    expected = [(4_000_000, 4, str(batch)) for batch in range(3) for _ in range(2)]
    assert f"VALUES {expected}" in done.stdout, done.stderr


@needs_torch
def test_a_job_may_use_a_loader_with_workers_and_return_tensors(run_app: RunApp) -> None:
    source = """
import os, sys, torch
from torch.utils.data import DataLoader, TensorDataset
from hydra_plugins.hydra_gpu_pool_launcher import GpuPool

def job(x):
    batches = DataLoader(TensorDataset(torch.arange(8.0) + x), batch_size=4, num_workers=2)
    return sum(batch.sum() for batch, in batches), torch.get_num_threads()

def abandon(x):
    loader = iter(DataLoader(TensorDataset(torch.arange(8.0)), batch_size=1, num_workers=2, persistent_workers=True))
    next(loader)
    os._exit(1)

outcomes = GpuPool(cpu_slots=2, threads_per_job=1).map(job, [dict(x=x) for x in range(3)])
assert all(o.error is None for o in outcomes), [open(o.log).read() for o in outcomes]
print([(float(o.value[0]), o.value[1]) for o in outcomes])
print([str(o.error)[:40] for o in GpuPool(cpu_slots=1).map(abandon, [dict(x=1), dict(x=2)])])
"""
    done = run_app(source)
    assert done.stdout.splitlines() == [
        "[(28.0, 1), (36.0, 1), (44.0, 1)]",
        "['job 0 (x=1) ended with exit code 1 and w', 'job 1 (x=2) ended with exit code 1 and w']",
    ], done.stderr


@needs_torch
def test_each_job_may_have_a_process_group_of_its_own(run_app: RunApp) -> None:
    """Jobs that shared a process would meet the group of the job before."""
    source = """
import torch.distributed as dist
from hydra_plugins.hydra_gpu_pool_launcher import GpuPool

def job(x):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return dist.get_world_size()

print([o.value for o in GpuPool(cpu_slots=1).map(job, [dict(x=x) for x in range(3)])])
"""
    done = run_app(source)
    assert done.stdout == "[1, 1, 1]\n", done.stderr


PARABOLA = """
import hydra

@hydra.main(version_base=None, config_path=None)
def main(cfg):
    return (cfg.x - 3) ** 2

if __name__ == "__main__":
    main()
"""


@needs_optuna
def test_optuna_finds_the_minimum_of_a_parabola_with_several_jobs_at_once(run_app: RunApp, tmp_path: Path) -> None:
    done = run_app(
        PARABOLA,
        "-m",
        "hydra/launcher=gpu_pool",
        "hydra/sweeper=optuna",
        "hydra.launcher.cpu_slots=2",
        "hydra.sweeper.n_jobs=2",
        "hydra.sweeper.n_trials=30",
        "hydra.sweeper.sampler.seed=0",
        "hydra.sweep.dir=sweep",
        "+x=interval(0.0, 10.0)",
    )
    assert done.returncode == 0, done.stderr
    results = yaml.safe_load((tmp_path / "sweep/optimization_results.yaml").read_text())
    assert results["best_value"] < 1
    assert abs(results["best_params"].get("x", results["best_params"].get("+x")) - 3) < 1
    assert sorted(path.name for path in (tmp_path / "sweep").iterdir() if path.name.isdigit()) == sorted(
        str(num) for num in range(30)
    )


EXAMPLE = Path(__file__).parent.parent / "example_app" / "train.py"


@needs_torch
@pytest.mark.skipif(find_spec("sklearn") is None, reason="scikit-learn is not installed")
@pytest.mark.parametrize(
    ("arguments", "slots"),
    [
        (["hydra/launcher=box", "lr=1e-3,1e-4"], {"0.0", "1.0"}),
        (["--config-name", "sweep", "hydra.launcher.gpus=[5]", "model=mlp", "lr=1e-2"], {"5.0", "5.1"}),
    ],
)
def test_the_example_trains_side_by_side(tmp_path: Path, arguments: list[str], slots: set[str]) -> None:
    command = [sys.executable, str(EXAMPLE), "-m", *arguments, "epochs=1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^ +\d+ .*COMPLETED +(0\.\d+) +[\d.]+ +(\S+)$", done.stdout, re.MULTILINE)
    assert {slot for _, slot in rows} == slots
    assert all(float(accuracy) > 0.05 for accuracy, _ in rows)
