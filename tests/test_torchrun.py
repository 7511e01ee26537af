"""The environment of ranks: what is set for them, and what is kept from everybody else."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import LIMIT_S, RunApp

from hydra_plugins.hydra_gpu_pool_launcher import ConfigurationError, GpuPool, _ddp, is_main_rank
from hydra_plugins.hydra_gpu_pool_launcher._torchrun import master_environ, rank_environ, without_ranks

SECOND_OF_THE_SECOND = {
    **rank_environ(local_rank=1, ranks=2, node_rank=1, nodes=2, restart=1, max_restarts=2),
    **master_environ(("node0", 29503), "gpu_pool-3-17"),
}

SHOW = "import json, os; json.dump(dict(os.environ), open(f\"rank_{os.environ['RANK']}.json\", 'w'))"

OF_ITS_AGENT = {"TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE"}


def test_a_rank_knows_its_place_in_the_group_and_on_its_machine() -> None:
    environ = SECOND_OF_THE_SECOND
    assert (environ["RANK"], environ["LOCAL_RANK"], environ["ROLE_RANK"], environ["GROUP_RANK"]) == ("3", "1", "3", "1")
    assert (environ["WORLD_SIZE"], environ["LOCAL_WORLD_SIZE"], environ["GROUP_WORLD_SIZE"]) == ("4", "2", "2")
    assert (environ["MASTER_ADDR"], environ["MASTER_PORT"]) == ("node0", "29503")
    assert (environ["TORCHELASTIC_RESTART_COUNT"], environ["TORCHELASTIC_MAX_RESTARTS"]) == ("1", "2")
    assert environ["TORCHELASTIC_USE_AGENT_STORE"] == "True"


def test_a_rank_finds_all_that_torchrun_sets(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "show.py").write_text(SHOW)
    before = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", "show.py"]
    subprocess.run(command, cwd=tmp_path, env=before, check=True, timeout=LIMIT_S, capture_output=True)

    found = json.loads((tmp_path / "rank_0.json").read_text())
    of_torchrun = found.keys() - before.keys() - {"LC_CTYPE"}
    assert of_torchrun - OF_ITS_AGENT <= SECOND_OF_THE_SECOND.keys() | {"TORCH_NCCL_ASYNC_ERROR_HANDLING"}


def test_nothing_of_a_group_outside_is_passed_on_and_the_rest_is() -> None:
    leaked = {*SECOND_OF_THE_SECOND, "NODE_RANK", "SLURM_PROCID", "SLURM_NTASKS", "OMPI_COMM_WORLD_RANK", "PMI_RANK"}
    kept = {"SLURM_JOB_ID": "7", "SLURM_TMPDIR": "/tmp", "RANKS": "2", "HOME": "/root"}
    assert without_ranks({**dict.fromkeys(leaked, "1"), **kept}) == kept


APP = """
import json, os, hydra

@hydra.main(version_base="1.3", config_path=None)
def app(cfg):
    return sorted(os.environ)

if __name__ == "__main__":
    app()
"""


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_a_job_in_single_mode_does_not_take_itself_for_a_rank_that_was_left_over(
    run_app: RunApp, tmp_path: Path, method: str
) -> None:
    left_over = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_PORT": "29500", "SLURM_PROCID": "3", "SLURM_JOB_ID": "7"}
    arguments = ("-m", "hydra/launcher=gpu_pool", "hydra.sweep.dir=sweep", "+x=1", "hydra.launcher.gpus=[]")
    done = run_app(APP, *arguments, f"hydra.launcher.start_method={method}", env=left_over)
    assert done.returncode == 0, done.stderr
    names = json.loads((tmp_path / "sweep/.gpu_pool/jobs/0/outcome.json").read_text())["value"]
    assert set(names) & left_over.keys() == {"SLURM_JOB_ID"}


def test_a_sweep_that_torchrun_has_started_is_refused_in_one_sentence(run_app: RunApp, tmp_path: Path) -> None:
    under_torchrun = {"TORCHELASTIC_RUN_ID": "none", "RANK": "1", "WORLD_SIZE": "2"}
    done = run_app(APP, "-m", "hydra/launcher=gpu_pool", "hydra.sweep.dir=sweep", "+x=1,2", env=under_torchrun)
    assert done.returncode == 1
    assert "this process is rank 1 of 2 of a group that torchrun, or gpu_pool, has started" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "sweep/.gpu_pool").exists()


def test_a_pool_in_a_rank_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    with pytest.raises(ConfigurationError, match="each of them would run the whole sweep"):
        GpuPool(dir=tmp_path, cpu_slots=1).map(print, [{}])


WITHOUT_TORCH = f"import sys\nsys.modules['torch'] = None\n{APP}"


def test_without_torch_ddp_is_refused_before_anything_starts_and_the_extra_is_named(
    run_app: RunApp, tmp_path: Path
) -> None:
    arguments = ("-m", "hydra/launcher=gpu_pool", "hydra.sweep.dir=sweep", "+x=1", "hydra.launcher.mode=ddp")
    done = run_app(WITHOUT_TORCH, *arguments)
    assert done.returncode == 1
    sentence = "hydra.launcher.mode=ddp: it needs torch 2.5 or newer, and there is none here: "
    assert f"{sentence}pip install 'hydra-gpu-pool-launcher[ddp]'.\n" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "sweep/.gpu_pool").exists()


@pytest.mark.parametrize(
    ("version", "accepted"), [("2.4.1+cu121", False), ("1.13.1", False), ("2.5.0", True), ("2.13.0+cpu", True)]
)
def test_torch_is_to_be_2_5_or_newer(monkeypatch: pytest.MonkeyPatch, version: str, accepted: bool) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", str)
    monkeypatch.setattr(importlib.metadata, "version", {"torch": version}.__getitem__)
    if accepted:
        _ddp.require_torch("")
    else:
        with pytest.raises(
            ConfigurationError, match=rf"^mode=ddp: it needs torch 2.5 or newer, and this is {version[:5]}"
        ):
            _ddp.require_torch("")


@pytest.mark.parametrize(("rank", "is_main"), [(None, True), ("0", True), ("1", False)])
def test_the_main_rank_is_rank_0_or_who_is_none(
    monkeypatch: pytest.MonkeyPatch, rank: str | None, is_main: bool
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    assert is_main_rank() is is_main
