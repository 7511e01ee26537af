"""Groups of ranks on a real GPU. Each test is run on the CPU as well, so that what it is made of is known to work."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
from support import RunApp

pytest.importorskip("torch")

APP = """
import json, os, sys
import torch
import torch.distributed as dist
from hydra_plugins.hydra_gpu_pool_launcher import GpuPool

def place():
    if PLACE == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device

def total_of_ranks(device):
    total = torch.full((4,), float(dist.get_rank() + 1), device=device)
    dist.all_reduce(total)
    return total.tolist()

def reduce(backend):
    device = place()
    dist.init_process_group(backend)
    total = total_of_ranks(device)
    where = [None] * dist.get_world_size()
    dist.all_gather_object(where, [str(device), torch.cuda.device_count()])
    dist.destroy_process_group()
    return dict(total=total, where=where)

def reduce_with_the_other_job(backend, mine, others):
    device = place()
    dist.init_process_group(backend)
    before = total_of_ranks(device)
    fds = [os.open(path, os.O_RDWR) for path in (mine, others)]
    os.write(fds[0], b"x")
    os.read(fds[1], 1)  # so the other one has opened both, and nothing is lost
    after = total_of_ranks(device)
    dist.destroy_process_group()
    return [before, after, os.environ["GPU_POOL_SLOT"]]

def pool(ranks, at_once=1):
    slots = dict(gpus=[], cpu_slots=at_once) if PLACE == "cpu" else dict(gpus=[0], per_gpu=at_once)
    return GpuPool(mode="ddp", ddp=dict(nproc_per_node=ranks), progress="none", **slots)

def tell(outcomes):
    print(json.dumps([[o.status, o.value, o.error and str(o.error)] for o in outcomes]))

PLACE, RANKS, BACKEND = sys.argv[1], int(sys.argv[2]), sys.argv[3]
if PLACE == "gpu" and torch.version.cuda is None:
    print(json.dumps("torch is built without CUDA"))
    sys.exit()
"""

ONE_JOB = f"{APP}tell(pool(RANKS).map(reduce, [dict(backend=BACKEND)]))"

TWO_JOBS = f"""{APP}
for name in "ab":
    os.mkfifo(name)
a, b = map(os.path.abspath, "ab")
both = [dict(backend=BACKEND, mine=a, others=b), dict(backend=BACKEND, mine=b, others=a)]
tell(pool(RANKS, at_once=2).map(reduce_with_the_other_job, both))
"""

ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not os.path.exists("/dev/nvidiactl"), reason="has no driver")]

PLACES_AND_BACKENDS = [
    pytest.param("cpu", "gloo", id="cpu"),
    pytest.param("gpu", "nccl", id="gpu", marks=ON_GPU),
]


def outcomes(run_app: RunApp, source: str, place: str, ranks: int, backend: str) -> list[list[Any]]:
    """Per job: its status, its value, and the text of its error."""
    done = run_app(source, place, str(ranks), backend)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    if isinstance(told, str):
        pytest.skip(told)
    assert isinstance(told, list)
    return told


@pytest.mark.parametrize(
    ("place", "where"),
    [
        pytest.param("cpu", ["cpu", 0], id="cpu"),
        pytest.param("gpu", ["cuda:0", 1], id="gpu", marks=ON_GPU),
    ],
)
def test_two_ranks_share_a_gpu_with_gloo(run_app: RunApp, place: str, where: list[Any]) -> None:
    value = {"total": [3.0] * 4, "where": [where, where]}
    assert outcomes(run_app, ONE_JOB, place, 2, "gloo") == [["COMPLETED", value, None]]


@pytest.mark.parametrize(("place", "backend"), PLACES_AND_BACKENDS)
def test_one_rank_is_a_group_with_the_backend_of_its_place(run_app: RunApp, place: str, backend: str) -> None:
    ((status, value, error),) = outcomes(run_app, ONE_JOB, place, 1, backend)
    assert (status, error) == ("COMPLETED", None)
    assert value["total"] == [1.0] * 4


@pytest.mark.parametrize(("place", "backend"), PLACES_AND_BACKENDS)
def test_two_groups_of_one_rank_run_side_by_side_on_one_gpu(run_app: RunApp, place: str, backend: str) -> None:
    """Each waits for the other, with its group open: one after the other, they would never end."""
    device = "cpu" if place == "cpu" else "0"
    values = [[[1.0] * 4, [1.0] * 4, f"{device}.{slot}"] for slot in range(2)]
    assert outcomes(run_app, TWO_JOBS, place, 1, backend) == [["COMPLETED", value, None] for value in values]


@pytest.mark.parametrize(
    ("place", "words"),
    [
        pytest.param("cpu", "NCCL", id="cpu"),  # it is not built in, or it finds no GPU
        pytest.param("gpu", "Duplicate GPU detected", id="gpu", marks=ON_GPU),
    ],
)
def test_what_nccl_says_when_it_refuses_is_the_error_of_the_job(run_app: RunApp, place: str, words: str) -> None:
    ((status, value, error),) = outcomes(run_app, ONE_JOB, place, 2, "nccl")
    assert (status, value) == ("FAILED", None)
    assert words in error
