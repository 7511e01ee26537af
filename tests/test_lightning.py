"""Stopped is not completed: Lightning's Trainer catches what should end it, and leaves ``fit`` as if all were well.

Importing it takes seconds, so there is one app for all ways to stop a job. Each has a main process of its own, which
the app forks.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from support import LIMIT_S

pytestmark = pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed")

APP = """
import os, signal, traceback
import lightning, torch
from torch.utils.data import DataLoader
from hydra_plugins.hydra_gpu_pool_launcher import GpuPool

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, _):
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-6)

class Stop(lightning.Callback):
    def __init__(self, how):
        self.how = how

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 3:
            print("training", flush=True)
            STOP[self.how](main)

def train(how):
    trainer = lightning.Trainer(
        max_epochs=-1, accelerator="cpu", logger=False, callbacks=[Stop(how)],
        enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False,
    )
    try:
        trainer.fit(Model(), DataLoader(torch.ones(8, 1)))
    finally:
        print("out of fit", flush=True)
    return "half"

STOP = {
    "SIGTERM to main": lambda main: os.kill(main, signal.SIGTERM),
    "SIGINT to main": lambda main: os.kill(main, signal.SIGINT),
    "SIGTERM by hand": lambda _: os.kill(os.getpid(), signal.SIGTERM),
    "timeout": lambda _: None,
}
CONFIG = {"timeout": {"timeout_min": 0.15}}

for how in STOP:
    pid = os.fork()
    if pid == 0:
        main = os.getpid()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it
        try:
            GpuPool(cpu_slots=1, gpus=[], dir=how, kill_grace_s=30, **CONFIG.get(how, {})).map(train, [dict(how=how)])
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    os.waitpid(pid, 0)
"""


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a sweep's directory for each way to stop its one job."""
    directory = tmp_path_factory.mktemp("lightning")
    (directory / "app.py").write_text(APP)
    with (directory / "app.log").open("w") as log:
        command = [sys.executable, "app.py"]
        done = subprocess.run(command, cwd=directory, stdout=log, stderr=log, timeout=2 * LIMIT_S, check=False)
    assert done.returncode == 0, (directory / "app.log").read_text()
    return directory


@pytest.mark.parametrize(
    ("how", "status", "error"),
    [
        ("SIGTERM to main", "CANCELLED", "was cancelled: SIGTERM to the main process"),
        ("SIGINT to main", "CANCELLED", "was cancelled: Ctrl-C (SIGINT to the main process)"),
        ("SIGTERM by hand", "CANCELLED", "was cancelled: SIGTERM was sent to its process; it then returned"),
        ("timeout", "FAILED", "was stopped: it took longer than timeout_min=0.15"),
    ],
)
def test_a_trainer_that_was_stopped_has_not_completed_although_it_leaves_fit_in_peace(
    stopped: Path, how: str, status: str, error: str
) -> None:
    sweep = stopped / how / ".gpu_pool"
    lines = (sweep / "jobs/0/output.log").read_text().splitlines()
    assert [line for line in lines if line in {"training", "out of fit"}] == ["training", "out of fit"]
    journal: list[dict[str, Any]] = [json.loads(line) for line in (sweep / "journal.jsonl").read_text().splitlines()]
    (end,) = (line for line in journal if line["event"] == "end")
    assert end["status"] == status
    assert end["error_text"] == error
    assert end["error_type"] == ("JobTimeoutError" if how == "timeout" else "JobCancelledError")
    names = {path.name for path in (sweep / "jobs/0").iterdir()} - {"outcome.json"}
    assert names == {"late.pickle", "output.log"}, "what it returned is not taken for a result later on either"
