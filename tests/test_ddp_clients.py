"""ddp with those who use it: plain torch, Lightning, accelerate, each as it would be written for torchrun.

Importing them takes seconds, so there is one sweep for each, and one more for Lightning in fresh interpreters.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from support import sweep_well

pytest.importorskip("torch")

APP = """
import json, os
import hydra, torch
from hydra.core.hydra_config import HydraConfig
from torch.utils.data import DataLoader, TensorDataset

with open("imports", "a") as file:
    print(os.getpid(), file=file)

def data():
    x = torch.arange(8.0).view(8, 1)
    return TensorDataset(x, 2 * x + 1)

def loss(model, batch):
    x, y = batch
    return torch.nn.functional.mse_loss(model(x), y)

def tell(rank, **facts):
    with open(f"{{HydraConfig.get().runtime.output_dir}}/rank_{{rank}}.json", "w") as file:
        json.dump({{"pid": os.getpid(), **facts}}, file)

{source}

@hydra.main(version_base="1.3", config_path=None)
def app(cfg):
    with open("calls", "a") as file:
        print(os.getpid(), file=file)
    return train(cfg.lr)

if __name__ == "__main__":
    app()
"""


@dataclass(frozen=True)
class Swept:
    """A sweep over learning rates, each a job of two ranks, as it has left its directory."""

    directory: Path
    method: str
    jobs: int

    def facts(self, name: str) -> list[list[Any]]:
        """What the ranks have told, per job and rank."""
        told = self.directory / "sweep"
        return [
            [json.loads((told / f"{num}/rank_{rank}.json").read_text())[name] for rank in range(2)]
            for num in range(self.jobs)
        ]

    def values(self) -> list[Any]:
        """What the jobs have given back."""
        jobs = self.directory / "sweep/.gpu_pool/jobs"
        return [json.loads((jobs / f"{num}/outcome.json").read_text())["value"] for num in range(self.jobs)]

    def lines(self, name: str) -> list[str]:
        return (self.directory / name).read_text().splitlines()

    def assert_ran_once_in_each_rank(self) -> None:
        """Each rank has called the task function, in a process of its own, and nobody else has, nor run the script."""
        pids = [str(pid) for ranks in self.facts("pid") for pid in ranks]
        assert len(set(pids)) == 2 * self.jobs
        assert sorted(self.lines("calls")) == sorted(pids)
        # With spawn: by main, by the supervisor to see how that goes, by each job, and by each of its ranks.
        assert len(self.lines("imports")) == (1 if self.method == "fork" else 2 + 3 * self.jobs)

    def assert_directories(self, *of_the_app: str) -> None:
        """Each job has one, with what its app has written there, and the sweep has no other."""
        names = {path.name for path in (self.directory / "sweep").iterdir()}
        assert names == {".gpu_pool", "multirun.yaml", "results.csv", "sweep.html", *map(str, range(self.jobs))}
        for num in range(self.jobs):
            names = {path.name for path in (self.directory / f"sweep/{num}").iterdir()}
            assert names == {".hydra", "app.log", "rank_0.json", "rank_1.json", *of_the_app}


def sweep(directory: Path, source: str, method: str = "fork", rates: str = "1e-2,1e-3,1e-4") -> Swept:
    """What is left of a sweep of this app, on CPU ranks, two groups side by side."""
    (directory / "app.py").write_text(APP.format(source=source))
    launcher = {"mode": "ddp", "ddp.nproc_per_node": 2, "gpus": "[]", "cpu_slots": 2, "start_method": method}
    settings = [f"hydra.launcher.{key}={value}" for key, value in launcher.items()]
    sweep_well(directory, "hydra/launcher=gpu_pool", "hydra.sweep.dir=sweep", *settings, f"+lr={rates}")
    return Swept(directory, method, len(rates.split(",")))


TORCH = """
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

def train(lr):
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    sampler = DistributedSampler(data())
    begun_with, seen = [p.item() for p in model.parameters()], []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for batch in DataLoader(data(), batch_size=2, sampler=sampler):
            optimizer.zero_grad()
            loss(model, batch).backward()
            optimizer.step()
            seen += [epoch * 8 + x for x in batch[0].flatten().tolist()]
    parameters = [p.item() for p in model.parameters()]
    tell(dist.get_rank(), begun_with=begun_with, parameters=parameters, seen=seen)
    dist.destroy_process_group()
    return parameters
"""


@pytest.fixture(scope="module")
def with_torch(tmp_path_factory: pytest.TempPathFactory) -> Swept:
    return sweep(tmp_path_factory.mktemp("torch"), TORCH)


def test_ranks_of_plain_torch_end_with_the_same_parameters_and_each_job_with_its_own(with_torch: Swept) -> None:
    parameters = with_torch.facts("parameters")
    assert [ranks[0] == ranks[1] for ranks in parameters] == [True] * 3
    assert all(begun != ended for begun, ended in zip(with_torch.facts("begun_with"), parameters, strict=True))
    assert with_torch.values() == [ranks[0] for ranks in parameters]
    assert len({tuple(value) for value in with_torch.values()}) == 3


def test_ranks_of_plain_torch_share_each_epoch_among_them(with_torch: Swept) -> None:
    for first, second in with_torch.facts("seen"):
        assert len(first) == len(second) == 8
        assert sorted(first + second) == list(range(16)), "with the epoch's number in it: each once in each epoch"


def test_plain_torch_runs_once_in_each_rank_of_a_sweep(with_torch: Swept) -> None:
    with_torch.assert_ran_once_in_each_rank()
    with_torch.assert_directories()


LIGHTNING = """
import lightning

class Model(lightning.LightningModule):
    def __init__(self, lr):
        super().__init__()
        self.lr = lr
        self.layer = torch.nn.Linear(1, 1)
        self.seen = []

    def training_step(self, batch, _):
        self.seen += batch[0].flatten().tolist()
        return loss(self.layer, batch)

    def test_step(self, batch, _):
        self.log("test_loss", loss(self.layer, batch), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)

def train(lr):
    lightning.seed_everything(1)
    trainer = lightning.Trainer(
        strategy="ddp", devices=2, accelerator="cpu", max_epochs=1, log_every_n_steps=1, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=HydraConfig.get().runtime.output_dir,
    )
    model = Model(lr)
    trainer.fit(model, DataLoader(data(), batch_size=1))
    trained = [p.item() for p in model.parameters()]
    for p in model.parameters():
        p.data.zero_()  # so that only the checkpoint still has them
    trainer.test(model, DataLoader(data(), batch_size=1), ckpt_path="best")
    test_loss = float(trainer.callback_metrics["test_loss"])
    tell(
        trainer.global_rank, world_size=trainer.world_size, seen=model.seen, trained=trained, test_loss=test_loss,
        tested=[p.item() for p in model.parameters()], checkpoint=trainer.checkpoint_callback.best_model_path,
    )
    return test_loss
"""

needs_lightning = pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed")


@pytest.fixture(scope="module", params=[("fork", "1e-2,1e-3,1e-4"), ("spawn", "1e-2")], ids=["fork", "spawn"])
def with_lightning(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Swept:
    return sweep(tmp_path_factory.mktemp("lightning"), LIGHTNING, *request.param)  # each import of it takes seconds


@needs_lightning
def test_lightnings_trainer_takes_the_ranks_for_its_own_and_starts_no_others(with_lightning: Swept) -> None:
    with_lightning.assert_ran_once_in_each_rank()
    assert with_lightning.facts("world_size") == [[2, 2]] * with_lightning.jobs


@needs_lightning
def test_lightnings_trainer_shares_the_data_and_ends_with_the_same_parameters(with_lightning: Swept) -> None:
    for first, second in with_lightning.facts("seen"):
        assert len(first) == len(second) == 4
        assert sorted(first + second) == list(range(8))
    assert all(ranks[0] == ranks[1] for ranks in with_lightning.facts("trained"))


@needs_lightning
def test_lightning_writes_into_the_directory_of_the_job_and_into_no_other(with_lightning: Swept) -> None:
    with_lightning.assert_directories("lightning_logs")
    for num in range(with_lightning.jobs):
        logs = with_lightning.directory / f"sweep/{num}/lightning_logs"
        assert [path.name for path in logs.iterdir()] == ["version_0"]


@needs_lightning
def test_lightnings_test_finds_the_checkpoint_that_its_fit_has_left(with_lightning: Swept) -> None:
    for num, (first, second) in enumerate(with_lightning.facts("checkpoint")):
        assert first == second
        assert Path(first).is_relative_to(with_lightning.directory / f"sweep/{num}/lightning_logs/version_0")
        assert Path(first).exists()
    assert with_lightning.facts("tested") == with_lightning.facts("trained")


@needs_lightning
def test_the_value_of_a_job_is_what_lightning_has_measured_over_all_ranks(with_lightning: Swept) -> None:
    values = with_lightning.values()
    assert with_lightning.facts("test_loss") == [[value, value] for value in values]
    assert values == sorted(values), "the same start for all: the smaller the steps, the greater the loss"
    assert len(set(values)) == with_lightning.jobs


ACCELERATE = """
from accelerate import Accelerator

def train(lr):
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data(), batch_size=1))
    seen = []
    for batch in loader:
        optimizer.zero_grad()
        accelerator.backward(loss(model, batch))
        optimizer.step()
        seen += batch[0].flatten().tolist()
    rank = accelerator.process_index
    gathered = accelerator.gather(torch.tensor([10.0 + rank])).tolist()
    parameters = [p.item() for p in model.parameters()]
    tell(rank, processes=accelerator.num_processes, gathered=gathered, parameters=parameters, seen=seen)
    accelerator.end_training()
    return gathered
"""


@pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed")
def test_accelerate_takes_the_ranks_for_its_processes_and_gathers_from_them(tmp_path: Path) -> None:
    swept = sweep(tmp_path, ACCELERATE)
    swept.assert_ran_once_in_each_rank()
    swept.assert_directories()
    assert swept.facts("processes") == [[2, 2]] * 3
    assert swept.facts("gathered") == [[[10.0, 11.0]] * 2] * 3
    assert swept.values() == [[10.0, 11.0]] * 3
    assert [sorted(first + second) for first, second in swept.facts("seen")] == [list(range(8))] * 3
    assert [ranks[0] == ranks[1] for ranks in swept.facts("parameters")] == [True] * 3
