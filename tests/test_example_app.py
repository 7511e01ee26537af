"""The example app without its launcher, and the two ways in which it keeps one in YAML."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

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


def run(app: Path, cwd: Path, *arguments: str) -> str:
    """What an app prints when it is run in ``cwd``, where its outputs go too."""
    done = subprocess.run((sys.executable, app, *arguments), cwd=cwd, text=True, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_torch
def test_each_model_learns_the_digits_with_each_optimizer(tmp_path: Path) -> None:
    said = run(EXAMPLE / "train.py", tmp_path, "-m", "model=mlp,cnn", "optimizer=adam,sgd", "lr=1e-2", "epochs=10")

    accuracies = [float(text) for text in re.findall(r"epoch 10/10: .* validation accuracy ([\d.]+)", said)]
    assert len(accuracies) == 4
    assert min(accuracies) > 0.9


@needs_torch
def test_the_same_seed_gives_the_same_run_and_another_seed_another(tmp_path: Path) -> None:
    said = run(EXAMPLE / "train.py", tmp_path, "-m", "seed=1,2,1", "epochs=1")

    first, other, again = re.findall(r"epoch 1/1: .*", said)
    assert first == again
    assert first != other


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        pytest.param(["hydra/launcher=box"], {"gpus": [0, 1], "per_gpu": 2}, id="box"),
        pytest.param(["hydra/launcher=box", "hydra.launcher.gpus=[1]"], {"gpus": [1], "per_gpu": 2}, id="box, changed"),
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
