"""What NVIDIA's driver is asked, and what is made of its answers: with nvidia-ml-py on a stand-in for its library."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from standin import Cards
from support import LIMIT_S

from hydra_plugins.hydra_gpu_pool_launcher import GpuPool, _cards, _cli, _driver, _machine
from hydra_plugins.hydra_gpu_pool_launcher._cards import Gpu, Instance
from hydra_plugins.hydra_gpu_pool_launcher._errors import ConfigurationError
from hydra_plugins.hydra_gpu_pool_launcher._machine import discover

GB = 10**9
MIB = 2**20

CARDS = (
    "gpu uuid=GPU-aa total=80e9 mode=3 mig=0 name=NVIDIA H200",
    "process on=GPU-aa pid=4242 used=1e9 elsewhere=1",
    "process on=GPU-aa pid=4243 elsewhere=1",
    "gpu uuid=GPU-bb total=80e9 free=79e9 mig=1 name=NVIDIA H200",
    "mig uuid=MIG-b1 total=10e9 name=NVIDIA H200 MIG 1g.10gb",
    "process on=MIG-b1 pid=77 used=4e9 elsewhere=1",
    "mig fault=6",
    "mig uuid=MIG-b3 total=20e9 memory_fault=4 processes_fault=4 name=NVIDIA H200 MIG 2g.20gb",
    "gpu fault=15",
    "gpu uuid=GPU-dd uuid_fault=4 name=NVIDIA H200",
    "gpu uuid=GPU-ee mode=2 name_fault=999 memory_fault=3 mode_fault=0 name=NVIDIA H200",
)
TOLD = (
    Gpu(
        0, "GPU-aa", "NVIDIA H200", exclusive=True, total_bytes=80 * GB, free_bytes=79 * GB,
        processes=((4242, GB), (4243, None)),
    ),
    Gpu(
        1, "GPU-bb", "NVIDIA H200", mig=True, total_bytes=80 * GB, free_bytes=79 * GB, processes=((77, 4 * GB),),
        instances=(
            Instance("MIG-b1", "NVIDIA H200 MIG 1g.10gb", 10 * GB, 6 * GB, ((77, 4 * GB),)),
            Instance("MIG-b3", "NVIDIA H200 MIG 2g.20gb"),
        ),
    ),
    Gpu(2, "", "", fault="GPU is lost"),
    Gpu(3, "", "", fault="Insufficient Permissions"),
    Gpu(4, "GPU-ee", "", processes=(), fault="its compute mode is Prohibited"),
)  # fmt: skip


def test_nvml_tells_memory_instances_processes_and_what_it_refuses(cards: Cards) -> None:
    cards.are(*CARDS)
    assert discover(os.environ) == TOLD


def test_nvidia_smi_tells_the_same_as_far_as_it_can(cards_by_smi: Cards) -> None:
    cards_by_smi.are(
        "gpu uuid=GPU-aa total=80e9 mode=3 name=NVIDIA H200, odd",
        "process on=GPU-aa pid=4242 used=1e9 elsewhere=1",
        "process on=GPU-aa pid=4243 elsewhere=1",
        "gpu uuid=GPU-bb total=80e9 memory_fault=4 mig=1 name=NVIDIA H200",
        "mig uuid=MIG-b1 total=10e9 name=NVIDIA H200 MIG 1g.10gb",
        "mig uuid=MIG-b2 total=10e9 name=NVIDIA H200 MIG 1g.10gb",
        "gpu uuid=GPU-cc uuid_fault=15 name=NVIDIA H200",
        "gpu uuid=GPU-dd mode=2 mig=1 name=NVIDIA H200",
    )
    assert discover(os.environ) == (
        Gpu(
            0, "GPU-aa", "NVIDIA H200, odd", exclusive=True,
            total_bytes=80 * GB // MIB * MIB, free_bytes=79 * GB // MIB * MIB,
            processes=((4242, GB // MIB * MIB), (4243, None)),
        ),
        Gpu(
            1, "GPU-bb", "NVIDIA H200", mig=True, processes=(),
            instances=tuple(Instance(f"MIG-b{i}", "NVIDIA H200 MIG 1g.10gb") for i in (1, 2)),
        ),
        Gpu(2, "", "", fault="GPU is lost"),
        Gpu(3, "GPU-dd", "NVIDIA H200", mig=True, processes=(), fault="its compute mode is Prohibited"),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("GPU-aa, 1, 2\nGPU-bb, 3, [N/A]\n\n", None),
        ("GPU-aa, 1, 2\nGPU-bb, 3, [N/A]\nGPU-aa, 4, [N/A]", [[1, 2 * MIB], [4, None]]),
        ("", []),
        ("GPU-aa, one, 2", None),
        (None, None),
    ],
)
def test_processes_that_nvidia_smi_lists_belong_to_their_gpu_or_are_not_known(words: str | None, expected: Any) -> None:
    (gpu,) = _driver.gpus_of_smi("0, GPU-aa, A, Default, 1, 1, Disabled", words)
    assert gpu["processes"] == expected


def test_the_instances_that_nvidia_smi_lists_are_those_of_the_gpu_above_them() -> None:
    listing = (
        "GPU 0: A100 (UUID: GPU-a)\n"
        "  MIG 1g.5gb      Device  0: (UUID: MIG-GPU-a/7/0)\n"
        "  MIG 1g.5gb+me   Device 12: (UUID: MIG-x)\n"
        "GPU 1: A100 (UUID: GPU-b)\n"
        "GPU 10: A100 (UUID: GPU-c)\n"
        "  MIG 3g.20gb     Device  0: (UUID: MIG-y)\n"
    )
    assert _driver.instances_of_smi(listing) == {
        0: [("1g.5gb", "MIG-GPU-a/7/0"), ("1g.5gb+me", "MIG-x")],
        1: [],
        10: [("3g.20gb", "MIG-y")],
    }


@pytest.mark.parametrize("line", ["", "{}", "[1]", '{"gpus": [[0]]}', '{"gpus": [{"index": 0}]}', "null", "\u00e9"])
def test_a_line_that_is_no_answer_is_said_to_be_none(line: str) -> None:
    with pytest.raises(_cards.NoAnswer, match="unexpected answer"):
        _cards.read(line)


# --- the program, which stays and is asked again ---


class Asked:
    """The driver's program at work."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def again(self) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self.line())
        return answer


@contextlib.contextmanager
def asking() -> Iterator[Asked]:
    command = _cards.command(_cards.folder_of_pynvml())
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Asked(process)
            assert process.stdin is not None
            process.stdin.close()
            assert process.wait(LIMIT_S) == 0
        finally:
            process.kill()


@pytest.mark.parametrize("source", ["cards", "cards_by_smi"])
def test_each_line_says_what_is_so_by_then_and_the_program_ends_with_its_input(
    source: str, request: pytest.FixtureRequest
) -> None:
    cards: Cards = request.getfixturevalue(source)
    with asking() as asked:
        assert json.loads(asked.line())["gpus"] == []
        for free in (2, 0):
            cards.are(f"gpu uuid=GPU-a total=10e6 free={free * MIB} name=A")
            (gpu,) = asked.again()["gpus"]
            assert (gpu["uuid"], gpu["free"]) == ("GPU-a", free * MIB)


def test_a_process_holds_memory_until_it_has_ended(cards: Cards) -> None:
    cards.are("gpu uuid=GPU-a total=10e9 name=A")
    with asking() as asked:
        asked.line()
        with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as neighbour:
            cards.get(f"process on=GPU-a pid={neighbour.pid} used=7e9")
            (gpu,) = asked.again()["gpus"]
            assert (gpu["free"], gpu["processes"]) == (3 * GB, [[neighbour.pid, 7 * GB]])
            assert neighbour.stdin is not None
            neighbour.stdin.close()
            os.waitid(os.P_PID, neighbour.pid, os.WEXITED | os.WNOWAIT)  # a zombie holds none
            (gpu,) = asked.again()["gpus"]
            assert (gpu["free"], gpu["processes"]) == (10 * GB, [])


@pytest.mark.parametrize("fault", ["count_fault=15", "init_fault=9 epoch=1", "epoch=1"])
def test_after_a_reset_of_the_driver_the_program_finds_its_way_back(cards: Cards, fault: str) -> None:
    gpu = "gpu uuid=GPU-a name=A"
    cards.are(gpu)
    with asking() as asked:
        assert "gpus" in json.loads(asked.line())
        cards.are(f"driver {fault}", gpu)
        words = {"count_fault=15": "GPU is lost"}.get(fault, "Uninitialized")
        assert asked.again()["fault"] == f"NVML: {words}"
        cards.are("driver epoch=1", gpu)
        assert [gpu["uuid"] for gpu in asked.again()["gpus"]] == ["GPU-a"]


def test_where_every_gpu_is_refused_nvml_is_initialised_again_for_the_next_line(cards: Cards) -> None:
    cards.are("gpu uuid=GPU-a name=A")
    with asking() as asked:
        asked.line()
        cards.are("gpu fault=15")
        assert asked.again()["gpus"] == [{"index": 0, "fault": "GPU is lost"}]
        cards.are("driver epoch=1", "gpu uuid=GPU-a name=A")
        assert [gpu["uuid"] for gpu in asked.again()["gpus"]] == ["GPU-a"]


# --- a driver in trouble ---


def test_a_driver_that_hangs_is_not_waited_for_without_end(cards: Cards, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_machine, "ASK_S", 0.5)
    monkeypatch.setattr(_machine, "NVIDIACTL", os.devnull)
    cards.are("driver hang=1")
    with pytest.raises(ConfigurationError, match=r"^the NVIDIA driver cannot be asked \(no answer within 0\.5 s\)$"):
        discover(os.environ)


NOISY = "import os\nos.write(1, b'noise')\nprint('noise')\nfrom pynvml_itself import *\nprint('noise', flush=True)\n"
DYING = "import os, signal\nprint('noise', flush=True)\nos.kill(os.getpid(), signal.SIGSEGV)\n"


@pytest.fixture
def own_pynvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file pynvml.py in the place of the real one, which is pynvml_itself."""
    real = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed").__file__
    (tmp_path / "site").mkdir()
    (tmp_path / "site/pynvml_itself.py").symlink_to(real)
    monkeypatch.setattr(_cards, "folder_of_pynvml", lambda: str(tmp_path / "site"))
    return tmp_path / "site/pynvml.py"


def test_what_a_library_prints_is_no_part_of_the_answer(cards: Cards, own_pynvml: Path) -> None:
    cards.are(*CARDS)
    own_pynvml.write_text(NOISY)
    assert discover(os.environ) == TOLD


def test_nvidia_smi_is_asked_where_nvml_takes_its_process_along(cards_by_smi: Cards, own_pynvml: Path) -> None:
    own_pynvml.write_text(DYING)
    cards_by_smi.are("gpu uuid=GPU-a name=A")
    assert [gpu.uuid for gpu in discover(os.environ) or ()] == ["GPU-a"]
    cards_by_smi.are("driver init_fault=9")
    with pytest.raises(ConfigurationError, match=r"\(NVML: noise; nvidia-smi: NVIDIA-SMI has failed because it"):
        discover(os.environ)


def test_a_python_that_does_not_know_its_interpreter_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "")
    monkeypatch.setattr(_machine, "NVIDIACTL", os.devnull)
    with pytest.raises(ConfigurationError, match="does not know its own interpreter"):
        discover({})


# --- what becomes of it ---


def test_a_sweep_uses_the_instances_of_a_gpu_in_mig_mode_and_leaves_out_what_is_lost(
    cards: Cards, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cards.are(
        "gpu uuid=GPU-aa total=80e9 mig=1 name=H200",
        "mig uuid=MIG-1 total=10e9 name=H200 MIG",
        "mig uuid=MIG-2 total=10e9 name=H200 MIG",
        "gpu fault=15",
        "gpu uuid=GPU-cc total=80e9 name=H200",
    )

    def seen(x: int) -> str:  # noqa: ARG001
        return os.environ["CUDA_VISIBLE_DEVICES"]

    caplog.set_level(logging.INFO)
    pool = GpuPool(dir=tmp_path / "sweep", progress="log")
    assert {outcome.value for outcome in pool.map(seen, [{"x": x} for x in range(3)])} == {"MIG-1", "MIG-2", "GPU-cc"}
    for line in (
        "GPU 0 is in MIG mode: its 2 instances are used",
        "GPU 1 is left out: the driver refuses it (GPU is lost)",
    ):
        assert caplog.text.count(line) == 1


def gpus(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert _cli.run(["gpus", *arguments]) == 0
    return capsys.readouterr().out


def test_the_command_gpus_says_what_is_free_who_is_there_and_what_is_refused(
    cards: Cards, capsys: pytest.CaptureFixture[str]
) -> None:
    many = [f"process on=GPU-ff pid={pid} elsewhere=1" for pid in range(1, 8)]
    cards.are(*CARDS, "gpu uuid=GPU-ff mig=1 name=E", "gpu uuid=GPU-gg total=24e9 name=G", *many)
    text = gpus(capsys)
    table = [re.split(r"  +", line.strip()) for line in text.splitlines()[2:11]]
    assert table == [
        ["id", "nvidia-smi", "name", "memory free", "processes", "uuid", "shown to a job as"],
        [*"00", "NVIDIA H200 (exclusive: one process)", "79.0 of 80.0 GB", "4242 (1.0 GB), 4243", "GPU-aa", "GPU-aa"],
        ["MIG-b1", "1", "NVIDIA H200 MIG 1g.10gb", "6.0 of 10.0 GB", "77 (4.0 GB)", "MIG-b1"],
        ["MIG-b3", "1", "NVIDIA H200 MIG 2g.20gb", "MIG-b3"],
        [*"66", "G", "24.0 of 24.0 GB", "GPU-gg", "GPU-gg"],
        [*"-2", "(refused by the driver: GPU is lost)"],
        [*"-3", "(refused by the driver: Insufficient Permissions)"],
        [*"-4", "GPU-ee", "(refused by the driver: its compute mode is Prohibited)"],
        [*"-5", "E", "1, 2, 3, 4, 3 more", "GPU-ff", "(in MIG mode, without an instance)"],
    ]
    assert "GPU 5 is left out: it is in MIG mode, and no instance of it is there" in text


def test_the_command_gpus_has_all_of_it_for_scripts(
    cards: Cards, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cards.are(*CARDS)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-b3,MIG-b1")
    rows = json.loads(gpus(capsys, "--json"))["gpus"]
    assert [(row["id"], row["entry"], row["number"], row["uuid"], row["mig_instance"]) for row in rows] == [
        ("0", "MIG-b3", 1, "MIG-b3", True),
        ("1", "MIG-b1", 1, "MIG-b1", True),
        (None, None, 0, "GPU-aa", False),
        (None, None, 2, None, False),
        (None, None, 3, None, False),
        (None, None, 4, "GPU-ee", False),
    ]
    readme = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    described = readme.split("The object of `gpus --json` has: ")[1].split("\n\n")[0]
    assert set(rows[1]) <= set(re.findall(r"`(\w+)`", described))
    assert rows[1] == {
        "id": "1",
        "entry": "MIG-b1",
        "number": 1,
        "uuid": "MIG-b1",
        "name": "NVIDIA H200 MIG 1g.10gb",
        "mig_instance": True,
        "exclusive": False,
        "total_bytes": 10 * GB,
        "free_bytes": 6 * GB,
        "processes": [{"pid": 77, "bytes": 4 * GB}],
        "leases": [],
        "fault": None,
    }
    assert (rows[0]["total_bytes"], rows[0]["processes"], rows[3]["fault"]) == (None, None, "GPU is lost")


@pytest.mark.parametrize(("listed", "ids"), [("1", ["0", "0", None]), ("0,1", ["0", "1", "1"])])
def test_an_instance_of_a_gpu_that_was_inherited_by_its_number_has_the_id_of_that_gpu(
    cards: Cards, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, listed: str, ids: list[str]
) -> None:
    cards.are("gpu uuid=GPU-a name=A", "gpu uuid=GPU-b mig=1 name=B", "mig uuid=MIG-1 name=B", "mig uuid=MIG-2 name=B")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    assert [row["id"] for row in json.loads(gpus(capsys, "--json"))["gpus"]] == ids


def test_where_the_user_ordered_devices_otherwise_an_id_is_a_name_and_no_number_is_claimed(
    cards: Cards, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cards.are("gpu uuid=GPU-a name=A", "gpu uuid=GPU-b name=B")
    assert gpus(capsys).startswith("CUDA_VISIBLE_DEVICES is not set: an id is nvidia-smi's number\n")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    assert [row["id"] for row in json.loads(gpus(capsys, "--json"))["gpus"]] == ["GPU-a", "GPU-b"]
    assert "number" not in gpus(capsys)
