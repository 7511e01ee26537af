"""Limits for libraries that take a whole GPU when they start."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from support import RunApp, outcomes

from hydra_plugins.hydra_gpu_pool_launcher._caps import LIMITS, limits
from hydra_plugins.hydra_gpu_pool_launcher._model import Device, Layout, Slot

XLA, TF = "XLA_PYTHON_CLIENT_MEM_FRACTION", "TF_FORCE_GPU_ALLOW_GROWTH"
BOTH = {XLA: "0.45", TF: "true"}


def of(per_gpu: int, *slots: tuple[int, int], users: tuple[str, ...] = ()) -> dict[str, str]:
    plan = Layout((Device("0"), Device("1")), per_gpu, len({device for device, _ in slots}))
    return limits(plan, [Slot(*slot) for slot in slots], users)


@pytest.mark.parametrize(
    ("per_gpu", "slots", "fraction"),
    [
        (2, [(0, 0)], "0.45"),
        (3, [(0, 2)], "0.3"),
        (4, [(1, 0)], "0.225"),
        (7, [(0, 0)], "0.128"),
        (1000, [(0, 0)], "0.001"),
        (4, [(0, 0), (0, 1), (0, 3)], "0.675"),
        (2, [(0, 0), (1, 1)], "0.45"),
        (1, [(0, 0)], None),
        (2, [(0, 0), (0, 1)], None),
        (2, [(0, 0), (0, 1), (1, 0), (1, 1)], None),
    ],
)
def test_a_job_may_take_its_part_of_a_gpu_rounded_down_and_needs_no_limit_on_one_of_its_own(
    per_gpu: int, slots: list[tuple[int, int]], fraction: str | None
) -> None:
    assert of(per_gpu, *slots) == ({} if fraction is None else {XLA: fraction, TF: "true"})


def test_on_cpu_slots_there_is_nothing_to_limit() -> None:
    assert limits(Layout((Device(""),), 4), [Slot(0, 0)], ()) == {}


@pytest.mark.parametrize(
    ("name", "left"),
    [
        (XLA, TF),
        ("XLA_CLIENT_MEM_FRACTION", TF),
        ("XLA_PYTHON_CLIENT_PREALLOCATE", TF),
        ("XLA_PYTHON_CLIENT_ALLOCATOR", TF),
        (TF, XLA),
        ("TF_GPU_ALLOCATOR", XLA),
    ],
)
def test_what_the_user_has_set_or_its_kin_is_not_set(name: str, left: str) -> None:
    assert of(2, (0, 0), users=(name, "PATH")) == {left: BOTH[left]}


def seen() -> dict[str, str]:
    return {name: os.environ[name] for name in sorted(LIMITS) if name in os.environ}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"per_gpu": 2}, BOTH),
        ({"per_gpu": 2, "mem_caps": False}, {}),
        ({}, {}),
    ],
)
def test_jobs_that_share_a_gpu_find_their_limits_unless_they_are_unwanted(
    tmp_path: Path, config: dict[str, object], expected: dict[str, str]
) -> None:
    assert outcomes(tmp_path, seen, {}, gpus=[3], **config)[0].value == expected


def test_what_the_user_has_set_is_what_the_job_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", ".2")
    monkeypatch.setenv(TF, "false")
    assert outcomes(tmp_path, seen, {}, gpus=[3], per_gpu=2)[0].value == {TF: "false"}


APP = """
import json, os
import hydra

@hydra.main(version_base=None, config_path=None)
def main(cfg):
    names = ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION", "TF_FORCE_GPU_ALLOW_GROWTH")
    print("SEEN", json.dumps({name: os.environ[name] for name in names if name in os.environ}))

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("XLA_PYTHON_CLIENT_MEM_FRACTION", {XLA: "0.1", TF: "true"}),
        ("XLA_CLIENT_MEM_FRACTION", {"XLA_CLIENT_MEM_FRACTION": "0.1", TF: "true"}),
    ],
)
def test_what_hydras_env_set_says_is_the_users_word_too(
    run_app: RunApp, tmp_path: Path, given: str, expected: dict[str, str]
) -> None:
    launcher = ["hydra/launcher=gpu_pool", "hydra.launcher.gpus=[3]", "hydra.launcher.per_gpu=2"]
    done = run_app(APP, "-m", *launcher, "hydra.sweep.dir=sweep", "+x=1", f"+hydra.job.env_set.{given}='0.1'")
    assert done.returncode == 0, done.stderr
    log = (tmp_path / "sweep/.gpu_pool/jobs/0/output.log").read_text()
    assert json.loads(log.partition("SEEN ")[2].partition("\n")[0]) == expected


def test_an_app_that_sets_a_limit_itself_in_a_fresh_interpreter_is_not_refused(run_app: RunApp) -> None:
    """As a visibility variable would be."""
    source = """
import os
if __name__ != "__main__": os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = ".2"
from hydra_plugins.hydra_gpu_pool_launcher import GpuPool
def job(x):
    return os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"]
if __name__ == "__main__":
    pool = GpuPool(gpus=[0], per_gpu=2, dir="sweep", progress="none", start_method="spawn")
    print([o.value or o.error for o in pool.map(job, [{"x": 1}])])
"""
    done = run_app(source)
    assert done.stdout == "['.2']\n", done.stderr
