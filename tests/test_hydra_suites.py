"""Hydra's own test suites for launchers, as they stand: on GPU slots without a driver, and on CPU slots."""

from __future__ import annotations

import pytest
from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from hydra.test_utils.launcher_common_tests import (
    BatchedSweeperTestSuite,
    IntegrationTestSuite,
    LauncherTestSuite,
)

from hydra_plugins.hydra_gpu_pool_launcher.gpu_pool_launcher import GpuPoolLauncher

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*Future Hydra versions:UserWarning"
)  # what the suites themselves cause


def test_hydra_finds_the_launcher() -> None:
    names = [plugin.__name__ for plugin in Plugins.instance().discover(Launcher)]
    assert names.count(GpuPoolLauncher.__name__) == 1


@pytest.mark.parametrize(
    ("launcher_name", "overrides"), [("gpu_pool", []), ("gpu_pool", ["hydra.launcher.gpus=[0,1]"])]
)
class TestLauncher(LauncherTestSuite):
    pass


@pytest.mark.parametrize(("launcher_name", "overrides"), [("gpu_pool", ["hydra.sweeper.max_batch_size=2"])])
class TestBatchedSweeper(BatchedSweeperTestSuite):
    pass


@pytest.mark.parametrize(
    ("task_launcher_cfg", "extra_flags"), [({}, ["-m", "hydra/launcher=gpu_pool", "hydra.launcher.cpu_slots=2"])]
)
class TestIntegration(IntegrationTestSuite):
    pass
