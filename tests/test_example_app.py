"""The example app without its launcher, as a group of ranks, and the two ways in which it keeps a launcher in YAML."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

EXAMPLE = Path(__file__).parent.parent / "example_app"

needs_torch = pytest.mark.skipif(
    find_spec("torch") is None or find_spec("sklearn") is None, reason="the example needs torch and scikit-learn"
)

APP = f"""
import hydra

@hydra.main(version_base="1.3", config_path={str(EXAMPLE / "conf")!r}, config_name="config")
def app(cfg):
    pass

app()
"""


def run(app: Path, cwd: Path, *arguments: str, by: tuple[str, ...] = ()) -> str:
    """What an app prints when it is run in ``cwd``, where its outputs go too. ``by``: by a module, with arguments."""
    command = [sys.executable, *by, str(app), *arguments]
    done = subprocess.run(command, cwd=cwd, text=True, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def last_epochs(said: str) -> list[tuple[float, float]]:
    """Training loss and validation accuracy in the last epoch of each run."""
    found = re.findall(r"epoch (\d+)/\1: loss ([\d.]+), validation accuracy ([\d.]+)", said)
    return [(float(loss), float(accuracy)) for _, loss, accuracy in found]


def about(expected: tuple[float, float]) -> Any:
    """What two ranks, which leave out one of the 1437 images in each epoch, come to instead."""
    return pytest.approx(expected, abs=0.03)


@needs_torch
def test_each_model_learns_the_digits_with_each_optimizer(tmp_path: Path) -> None:
    said = run(EXAMPLE / "train.py", tmp_path, "-m", "model=mlp,cnn", "optimizer=adam,sgd", "lr=1e-2", "epochs=10")

    accuracies = [accuracy for _, accuracy in last_epochs(said)]
    assert len(accuracies) == 4
    assert min(accuracies) > 0.9


@needs_torch
def test_the_same_seed_gives_the_same_run_and_another_seed_another(tmp_path: Path) -> None:
    said = run(EXAMPLE / "train.py", tmp_path, "-m", "seed=1,2,1", "epochs=1")

    first, other, again = re.findall(r"epoch 1/1: .*", said)
    assert first == again
    assert first != other


RATES = ("lr=1e-2,1e-3", "epochs=3")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[float, float]]:
    """What one process comes to, per learning rate."""
    return last_epochs(run(EXAMPLE / "train.py", tmp_path_factory.mktemp("alone"), "-m", *RATES))


@needs_torch
def test_a_group_of_ranks_comes_to_what_one_process_does(alone: list[tuple[float, float]], tmp_path: Path) -> None:
    said = run(EXAMPLE / "train.py", tmp_path, "-m", "hydra/launcher=ddp", "hydra.sweep.dir=sweep", *RATES)

    assert "ddp: each job is a group of 2 ranks" in said
    for num, expected in enumerate(alone):
        (last,) = last_epochs((tmp_path / f"sweep/{num}/train.log").read_text())
        assert last == about(expected)
        (value,) = re.findall(rf"job {num} \(.*\) COMPLETED: ([\d.]+)", said)
        assert float(value) == pytest.approx(last[1], abs=0.001)
        assert "epoch" not in (tmp_path / f"sweep/.gpu_pool/jobs/{num}/rank_1.log").read_text()


@needs_torch
def test_torchrun_starts_the_same_file(alone: list[tuple[float, float]], tmp_path: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    said = run(EXAMPLE / "train.py", tmp_path, "lr=1e-2", "epochs=3", by=torchrun)

    assert last_epochs(said) == [about(alone[0])]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        pytest.param(["hydra/launcher=box"], {"gpus": [0, 1], "per_gpu": 2}, id="box"),
        pytest.param(["hydra/launcher=box", "hydra.launcher.gpus=[1]"], {"gpus": [1], "per_gpu": 2}, id="box, changed"),
        pytest.param(["hydra/launcher=ddp"], {"mode": "ddp", "gpus": "auto"}, id="ddp"),
        pytest.param(["--config-name", "sweep"], {"gpus": "auto", "per_gpu": 2}, id="sweep"),
        pytest.param(["--config-name", "sweep", "hydra.launcher.per_gpu=3"], {"per_gpu": 3}, id="sweep, changed"),
        pytest.param(["--config-name", "sweep", "hydra/launcher=box"], {"gpus": [0, 1]}, id="sweep on box"),
    ],
)
def test_the_launcher_is_kept_in_yaml_and_changed_on_the_command_line(
    arguments: list[str], expected: dict[str, object], tmp_path: Path
) -> None:
    app = tmp_path / "app.py"
    app.write_text(APP)

    launcher = yaml.safe_load(run(app, tmp_path, *arguments, "--cfg", "hydra", "--package", "hydra.launcher"))

    assert launcher["_target_"].endswith(".GpuPoolLauncher")
    assert launcher.items() >= expected.items()
