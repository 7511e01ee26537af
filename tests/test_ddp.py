"""ddp: a job is a group of ranks. What happens once in it, what in each rank, and what they find there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support import LIMIT_S, RunApp

pytest.importorskip("torch")

DDP = ("-m", "hydra/launcher=gpu_pool", "hydra.sweep.dir=sweep", "hydra.launcher.mode=ddp")

CALLBACK = """
import os
from hydra.experimental.callback import Callback

class Marks(Callback):
    def on_job_start(self, config, **kwargs):
        mark("start", config)

    def on_job_end(self, config, job_return, **kwargs):
        mark("end", config, job_return._return_value)

def mark(what, config, *more):
    with open("marks", "a") as file:
        print(what, config.hydra.job.num, os.environ.get("RANK"), *more, file=file)
"""

APP = """
import json, logging, os, sys
import hydra, torch
import torch.distributed as dist
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

log = logging.getLogger("app")

OmegaConf.register_new_resolver("twice", lambda x: 2 * x, replace=True)

@hydra.main(version_base="1.3", config_path=".", config_name="conf")
def app(cfg):
    dist.init_process_group("gloo")
    total = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(total)
    log.info("in the log of rank %d", dist.get_rank())
    print("printed by rank", dist.get_rank(), flush=True)
    os.write(2, f"written by rank {dist.get_rank()}\\n".encode())
    name = f"rank_{dist.get_rank()}.json"
    facts = dict(
        environ=dict(os.environ),
        cfg=OmegaConf.to_container(cfg, resolve=True),
        num=HydraConfig.get().job.num,
        output_dir=HydraConfig.get().runtime.output_dir,
        threads=torch.get_num_threads(),
        pid=os.getpid(),
        parent=os.getppid(),
        session=os.getsid(0),
        stdin=os.readlink("/proc/self/fd/0"),
    )
    with open(os.path.join(HydraConfig.get().runtime.output_dir, name), "w") as file:
        json.dump(facts, file)
    dist.destroy_process_group()
    return float(total) if os.environ["RANK"] == "0" else "not the value"

if __name__ == "__main__":
    app()
"""

CONF = """
x: 0
y: ${twice:${x}}
at: ${now:%H-%M-%S-%f}

hydra:
  callbacks:
    marks:
      _target_: callback.Marks
  job:
    env_set:
      OWN: ${oc.env:HOME}/${hydra.job.num}
"""


@dataclass(frozen=True)
class Swept:
    """A sweep of three jobs of two ranks each, as it has left its directory."""

    directory: Path
    terminal: str

    def fact(self, name: str) -> list[list[Any]]:
        """Per job and rank."""
        return [
            [json.loads((self.directory / f"sweep/{num}/rank_{rank}.json").read_text())[name] for rank in range(2)]
            for num in range(3)
        ]

    def environ(self, name: str) -> list[list[str | None]]:
        return [[environ.get(name) for environ in ranks] for ranks in self.fact("environ")]

    def log(self, num: int, name: str) -> list[str]:
        return (self.directory / f"sweep/.gpu_pool/jobs/{num}/{name}").read_text().splitlines()


LEAKED = {"RANK": "7", "WORLD_SIZE": "9", "MASTER_PORT": "29500", "NODE_RANK": "3", "SLURM_PROCID": "5"}


@pytest.fixture(scope="module", params=["fork", "forkserver", "spawn"])
def swept(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Swept:
    directory = tmp_path_factory.mktemp("ddp")
    (directory / "callback.py").write_text(CALLBACK)
    (directory / "conf.yaml").write_text(CONF)
    (directory / "app.py").write_text(APP)
    launcher = {"gpus": "[3,4,5,6]", "gpus_per_job": 2, "threads_per_job": 6, "start_method": request.param}
    arguments = [*DDP, "x=1,2,3", *(f"hydra.launcher.{key}={value}" for key, value in launcher.items())]
    done = subprocess.run(
        [sys.executable, "app.py", *arguments],
        cwd=directory,
        env={**_clean_environ(), **LEAKED},
        capture_output=True,
        text=True,
        timeout=2 * LIMIT_S,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return Swept(directory, done.stdout)


def _clean_environ() -> dict[str, str]:
    visible = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
    return {name: value for name, value in os.environ.items() if name not in visible}


# --- once, not per rank ---


def test_three_jobs_of_two_ranks_are_three_directories_and_six_processes(swept: Swept) -> None:
    directories = {path.name for path in (swept.directory / "sweep").iterdir()}
    assert directories == {".gpu_pool", "multirun.yaml", "results.csv", "sweep.html", "0", "1", "2"}
    assert len({pid for ranks in swept.fact("pid") for pid in ranks}) == 6
    assert [len(set(parents)) for parents in swept.fact("parent")] == [1, 1, 1]
    assert sorted(path.name for path in (swept.directory / "sweep/0").iterdir()) == [
        ".hydra",
        "app.log",
        "rank_0.json",
        "rank_1.json",
    ]


def test_callbacks_run_once_for_each_job_in_the_process_of_the_job(swept: Swept) -> None:
    marks = (swept.directory / "marks").read_text().splitlines()
    expected = [f"start {num} None" for num in range(3)] + [f"end {num} None 3.0" for num in range(3)]
    assert sorted(marks) == sorted(expected)


def test_the_value_of_a_job_is_that_of_rank_0(swept: Swept) -> None:
    outcomes = [
        json.loads((swept.directory / f"sweep/.gpu_pool/jobs/{num}/outcome.json").read_text()) for num in range(3)
    ]
    assert [outcome["value"] for outcome in outcomes] == [3.0, 3.0, 3.0]


def test_every_rank_of_a_job_has_the_same_config_whatever_its_resolvers_say_of_the_time(swept: Swept) -> None:
    configs = swept.fact("cfg")
    assert [ranks[0] == ranks[1] for ranks in configs] == [True, True, True]
    assert [(ranks[0]["x"], ranks[0]["y"]) for ranks in configs] == [(1, 2), (2, 4), (3, 6)]


def test_hydras_own_state_is_that_of_the_job_in_every_rank(swept: Swept) -> None:
    assert swept.fact("num") == [[0, 0], [1, 1], [2, 2]]
    assert [[Path(path).name for path in ranks] for ranks in swept.fact("output_dir")] == [
        ["0", "0"],
        ["1", "1"],
        ["2", "2"],
    ]


# --- what a rank finds ---


def test_every_rank_knows_its_place_in_the_group(swept: Swept) -> None:
    for name, expected in {
        "RANK": ["0", "1"],
        "LOCAL_RANK": ["0", "1"],
        "WORLD_SIZE": ["2", "2"],
        "GROUP_RANK": ["0", "0"],
        "TORCHELASTIC_RESTART_COUNT": ["0", "0"],
    }.items():
        assert swept.environ(name) == [expected] * 3


def test_every_rank_sees_all_gpus_of_its_job_so_that_local_rank_counts_within_them(swept: Swept) -> None:
    visible = swept.environ("CUDA_VISIBLE_DEVICES")
    assert [ranks[0] == ranks[1] for ranks in visible] == [True] * 3
    seen = [set((ranks[0] or "").split(",")) for ranks in visible]
    assert [len(gpus) for gpus in seen] == [2, 2, 2]
    assert seen[0] | seen[1] == {"3", "4", "5", "6"}  # these two have run at once


def test_nothing_that_leaked_in_from_outside_is_left_in_a_rank(swept: Swept) -> None:
    assert swept.environ("NODE_RANK") == swept.environ("SLURM_PROCID") == [[None, None]] * 3
    assert all(port != "29500" for ranks in swept.environ("MASTER_PORT") for port in ranks)


def test_what_env_set_asks_for_is_there_in_every_rank(swept: Swept) -> None:
    own = swept.environ("OWN")
    assert [[(value or "").rpartition("/")[2] for value in ranks] for ranks in own] == [
        ["0", "0"],
        ["1", "1"],
        ["2", "2"],
    ]


def test_the_threads_of_a_job_are_divided_by_its_ranks(swept: Swept) -> None:
    assert swept.environ("OMP_NUM_THREADS") == [["3", "3"]] * 3
    assert swept.fact("threads") == [[3, 3]] * 3


def test_a_rank_has_a_session_of_its_own_and_no_terminal(swept: Swept) -> None:
    assert swept.fact("session") == swept.fact("pid")
    assert swept.fact("stdin") == [["/dev/null"] * 2] * 3


# --- logs ---


def test_each_rank_has_a_log_of_all_that_it_writes_and_that_of_rank_0_is_the_jobs(swept: Swept) -> None:
    for num in range(3):
        ours, other = swept.log(num, "rank_0.log"), swept.log(num, "rank_1.log")
        assert swept.log(num, "output.log") == ours
        for rank, lines in enumerate((ours, other)):
            assert f"printed by rank {rank}" in lines
            assert f"written by rank {rank}" in lines
            assert sum(f"in the log of rank {rank}" in line for line in lines) == 1
            assert not any(f"rank {1 - rank}" in line for line in lines)


def test_only_rank_0_writes_hydras_log_file_of_the_job(swept: Swept) -> None:
    for num in range(3):
        lines = (swept.directory / f"sweep/{num}/app.log").read_text().splitlines()
        assert [line.rpartition(" - ")[2] for line in lines] == ["in the log of rank 0"]


def test_a_line_says_how_many_ranks_a_job_has(swept: Swept) -> None:
    assert "ddp: each job is a group of 2 ranks\n" in swept.terminal


# --- random numbers ---

RANDOM = """
import random
import hydra, numpy, torch

{seeds}

@hydra.main(version_base=None, config_path=None)
def app(cfg):
    import os
    with open(f"drawn_{{cfg.x}}_{{os.environ['RANK']}}", "w") as file:
        print(random.random(), numpy.random.rand(), float(torch.rand(1)), file=file)

if __name__ == "__main__":
    app()
"""


def drawn(run_app: RunApp, tmp_path: Path, seeds: str) -> list[list[str]]:
    done = run_app(RANDOM.format(seeds=seeds), *DDP, "+x=0,1", "hydra.launcher.ddp.nproc_per_node=2")
    assert done.returncode == 0, done.stderr
    return [(tmp_path / f"drawn_{x}_{rank}").read_text().split() for x in range(2) for rank in range(2)]


def test_unseeded_ranks_draw_different_numbers(run_app: RunApp, tmp_path: Path) -> None:
    for numbers in zip(*drawn(run_app, tmp_path, ""), strict=True):
        assert len(set(numbers)) == 4


def test_seeded_ranks_draw_the_same_numbers(run_app: RunApp, tmp_path: Path) -> None:
    seeds = "random.seed(1); numpy.random.seed(1); torch.manual_seed(1)"
    for numbers in zip(*drawn(run_app, tmp_path, seeds), strict=True):
        assert len(set(numbers)) == 1
