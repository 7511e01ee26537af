"""What the user's ids mean, beside what was inherited and what the driver says."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydra_plugins.hydra_gpu_pool_launcher import _cards, _devices, _machine
from hydra_plugins.hydra_gpu_pool_launcher._cards import Gpu, Instance
from hydra_plugins.hydra_gpu_pool_launcher._devices import choose, layout, visibility
from hydra_plugins.hydra_gpu_pool_launcher._errors import ConfigurationError
from hydra_plugins.hydra_gpu_pool_launcher._machine import discover
from hydra_plugins.hydra_gpu_pool_launcher._model import Device, Layout, Slot
from hydra_plugins.hydra_gpu_pool_launcher._settings import checked
from hydra_plugins.hydra_gpu_pool_launcher._vendors import inherited

FOUR = tuple(Gpu(i, f"GPU-{letter}{i}00-1111", "Fake", False) for i, letter in enumerate("abcd"))
SHY = (FOUR[0], Gpu(1, "GPU-b100-1111", "Fake", True))


def chosen(
    inherited_: str | None = None,
    found: tuple[Gpu, ...] | None = None,
    environ: dict[str, str] | None = None,
    **raw: Any,
) -> tuple[Layout, list[str]]:
    env = dict(environ or {})
    if inherited_ is not None:
        env["CUDA_VISIBLE_DEVICES"] = inherited_
    return choose(checked(raw, prefix=""), env, found, cores=6)


def entries(*args: Any, **raw: Any) -> list[str]:
    return [device.entry for device in chosen(*args, **raw)[0].devices]


def refusal(*args: Any, **raw: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        chosen(*args, **raw)
    message = str(caught.value)
    assert message.endswith(".")
    assert "\n" not in message
    return message


# --- what was inherited ---


@pytest.mark.parametrize(
    ("value", "devices"),
    [
        (None, None),
        ("", ()),
        ("0", ("0",)),
        ("5,7", ("5", "7")),
        (" 5 , 7 ", ("5", "7")),
        ("GPU-ab,GPU-cd", ("GPU-ab", "GPU-cd")),
        ("MIG-ab", ("MIG-ab",)),
        ("-1", ()),
        ("NoDevFiles", ()),
        ("0,-1,1", ("0",)),
        ("0,,1", ("0",)),
        ("0,1,", ("0", "1")),
        ("0,none", ("0",)),
    ],
)
def test_the_inherited_list_is_read_as_cuda_reads_it(value: str | None, devices: Any) -> None:
    assert inherited({} if value is None else {"CUDA_VISIBLE_DEVICES": value}).entries == devices


@pytest.mark.parametrize("found", [None, FOUR, ()])
@pytest.mark.parametrize("value", ["", "-1", "NoDevFiles"])
def test_set_to_no_device_is_not_unset(value: str, found: tuple[Gpu, ...] | None) -> None:
    assert chosen(value, found) == (
        Layout((Device(""),), 6),
        [f"CPU only, 6 at once: CUDA_VISIBLE_DEVICES={value!r} shows none"],
    )


@pytest.mark.parametrize("value", ["0,0", "1,01", "GPU-ab,GPU-ab"])
def test_an_inherited_list_with_a_device_twice_is_refused(value: str) -> None:
    assert refusal(value).startswith(f"CUDA_VISIBLE_DEVICES='{value}': with a device twice in it")


def test_two_prefixes_of_one_gpu_are_that_gpu_twice() -> None:
    assert "twice" in refusal("GPU-a,GPU-a0", FOUR)


@pytest.mark.parametrize("value", ["0,GPU-ab", "MIG-ab,1"])
def test_an_inherited_list_of_numbers_and_names_is_refused(value: str) -> None:
    assert "no list of numbers and names" in refusal(value)


@pytest.mark.parametrize("value", ["1,4,0", "1,GPU-x,0", f"1,{'9' * 5000},0"])
def test_an_entry_the_machine_does_not_have_ends_the_inherited_list_and_a_line_says_so(value: str) -> None:
    plan, lines = chosen(value, FOUR)
    assert plan.devices == (Device("1", "GPU-b100-1111"),)
    assert [line[-48:] for line in lines] == [" counts as far as 1: what follows is no GPU here"]


# --- which devices: auto ---


def test_auto_takes_every_inherited_entry_as_it_stands() -> None:
    assert entries("GPU-b1, GPU-a0", FOUR) == ["GPU-b1", "GPU-a0"]
    assert entries("5,7") == ["5", "7"]


def test_auto_takes_every_gpu_that_was_found() -> None:
    assert chosen(found=FOUR) == (Layout(tuple(Device(str(gpu.index), gpu.uuid) for gpu in FOUR), 1), [])


@pytest.mark.parametrize("found", [None, ()])
def test_auto_without_a_gpu_is_cpu_slots_and_one_line_says_so(found: Any) -> None:
    assert chosen(found=found) == (Layout((Device(""),), 6), ["CPU only, 6 at once: no GPU was found"])


@pytest.mark.parametrize("inherited_", [None, "0,1", "", "0,0", "0,GPU-a"])
def test_no_gpus_asked_for_is_cpu_slots_without_a_word(inherited_: str | None) -> None:
    assert chosen(inherited_, FOUR, gpus=[], per_gpu=3) == (Layout((Device(""),), 6), [])


def test_the_user_may_say_how_many_cpu_slots() -> None:
    plan, _ = chosen(gpus=[], cpu_slots=2)
    assert (plan.on_cpu, plan.jobs_at_once) == (True, 2)


# --- which devices: ids ---


@pytest.mark.parametrize("found", [None, tuple(Gpu(i, f"GPU-{i}", "Fake", False) for i in range(8))])
def test_an_index_counts_into_the_inherited_list(found: Any) -> None:
    assert entries("1,3,5,7", found, gpus=[1, 2]) == ["3", "5"]
    assert entries("5,7", found, gpus="1,0") == ["7", "5"]


def test_an_index_beyond_the_inherited_list_is_refused() -> None:
    message = refusal("5,7", gpus=[0, 1, 2])
    assert message == "gpus=[0, 1, 2]: 2 is no index into CUDA_VISIBLE_DEVICES='5,7'; expected 0 to 1."


def test_an_id_is_refused_where_no_device_is_visible() -> None:
    assert "CUDA_VISIBLE_DEVICES='' shows no device; unset it" in refusal("", gpus=[0])


@pytest.mark.parametrize(
    ("listed", "wanted", "entry"),
    [
        ("GPU-ab1,GPU-cd2", "GPU-cd2", "GPU-cd2"),
        ("GPU-ab1,GPU-cd2", "GPU-c", "GPU-cd2"),
        ("GPU-ab,GPU-abc", "GPU-ab", "GPU-ab"),
        ("MIG-ab1,MIG-cd2", "MIG-cd", "MIG-cd2"),
    ],
)
def test_a_name_is_passed_on_as_the_inherited_entry_that_it_begins(listed: str, wanted: str, entry: str) -> None:
    assert entries(listed, gpus=wanted) == [entry]


@pytest.mark.parametrize("wanted", ["GPU-d", "GPU-d300-1111"])
def test_a_name_finds_the_inherited_entry_of_the_same_gpu(wanted: str) -> None:
    assert entries("1,3", FOUR, gpus=wanted) == ["3"]
    assert entries("GPU-b1,GPU-d3", FOUR, gpus=wanted) == ["GPU-d3"]


@pytest.mark.parametrize(
    ("listed", "found", "wanted", "why"),
    [
        ("GPU-ab1,GPU-ab2", None, "GPU-ab", "fits several entries of"),
        ("GPU-ab1,GPU-cd2", None, "GPU-x", "is no entry of"),
        ("0,2", FOUR, "GPU-b1", "is no entry of"),
        ("0,2", None, "GPU-a", "is no entry of"),
        ("GPU-ab1", None, "MIG-ab1", "is no entry of"),
    ],
)
def test_a_name_outside_the_inherited_list_is_refused(listed: str, found: Any, wanted: str, why: str) -> None:
    message = refusal(listed, found, gpus=wanted)
    assert f"{wanted} {why} CUDA_VISIBLE_DEVICES='{listed}'; expected one of " in message


def test_ids_are_taken_at_their_word_where_nobody_can_be_asked() -> None:
    assert entries(gpus=[7, "GPU-ab", "MIG-cd"]) == ["7", "GPU-ab", "MIG-cd"]


def test_a_unique_prefix_becomes_the_whole_uuid() -> None:
    assert entries(found=FOUR, gpus="GPU-c") == ["GPU-c200-1111"]


@pytest.mark.parametrize(
    ("found", "wanted", "why"),
    [
        (FOUR, "4", "4 is no GPU of this machine, which has 0 (GPU-a000-1111), 1 "),
        (FOUR, "GPU-x", "GPU-x is no GPU of this machine"),
        ((FOUR[0], Gpu(1, "GPU-a9", "Fake", False)), "GPU-a", "GPU-a fits several GPUs of this machine"),
        ((), "0", "0 is no GPU of this machine, which has no GPU at all."),
    ],
)
def test_an_id_the_machine_does_not_have_is_refused_with_what_there_is(found: Any, wanted: str, why: str) -> None:
    assert f"gpus=[{wanted}]: {why}" in refusal(found=found, gpus=wanted)


@pytest.mark.parametrize("ids", [[1, "GPU-b1"], ["GPU-b1", 1], ["GPU-b", "GPU-b100-1111"], [1, "GPU-b", "GPU-b1"]])
@pytest.mark.parametrize("listed", [None, "0,1", "GPU-a,GPU-b1"])
def test_two_ids_of_one_device_count_once(ids: Any, listed: str | None) -> None:
    assert len(entries(listed, FOUR, gpus=ids)) == 1


def test_a_number_is_no_uuid_where_the_user_ordered_devices_otherwise() -> None:
    environ = {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}
    assert entries(found=FOUR, environ=environ, gpus=[1, "GPU-b1"]) == ["1", "GPU-b100-1111"]


@settings(deadline=None)
@given(st.lists(st.sampled_from("0123"), unique=True, min_size=1), st.lists(st.integers(0, 5), min_size=1))
def test_no_job_ever_sees_a_device_that_was_not_inherited(listed: list[str], ids: list[int]) -> None:
    try:
        got = entries(",".join(listed), FOUR, gpus=ids)
    except ConfigurationError:
        assert max(ids) >= len(listed)
    else:
        assert got == [listed[i] for i in dict.fromkeys(ids)]


# --- GPUs in MIG mode, GPUs that the driver refuses ---

PARTS = (Instance("MIG-c1", "Fake MIG", 10), Instance("MIG-d2", "Fake MIG", 20))
SPLIT = (Gpu(0, "GPU-a0", "Fake", mig=True, instances=PARTS), Gpu(1, "GPU-b1", "Fake", total_bytes=80))
EMPTY = Gpu(1, "GPU-b1", "Fake", mig=True)
LOST = Gpu(2, "", "", fault="GPU is lost")


def test_a_gpu_in_mig_mode_is_its_instances_and_a_line_says_so() -> None:
    plan, lines = chosen(found=SPLIT)
    assert plan.devices == (
        Device("MIG-c1", "MIG-c1", 10),
        Device("MIG-d2", "MIG-d2", 20),
        Device("GPU-b1", "GPU-b1", 80),
    )
    assert lines == ["GPU 0 is in MIG mode: its 2 instances are used"]


@pytest.mark.parametrize(
    ("listed", "ids"),
    [(None, 0), (None, "GPU-a"), (None, [0, "MIG-c", "GPU-a"]), ("0,1", 0), ("0", "auto"), ("GPU-a0", 0)],
)
def test_a_gpu_in_mig_mode_by_its_number_or_name_is_each_of_its_instances_once(listed: str | None, ids: Any) -> None:
    plan, lines = chosen(listed, SPLIT, gpus=ids)
    assert [device.entry for device in plan.devices] == ["MIG-c1", "MIG-d2"]
    assert lines.count("GPU 0 is in MIG mode: its 2 instances are used") == 1


@pytest.mark.parametrize(
    ("listed", "expected"), [(None, ["MIG-d2"]), ("MIG-d2,MIG-c1", ["MIG-d2"]), ("MIG-d", ["MIG-d"])]
)
def test_a_unique_prefix_of_an_instance_is_that_instance(listed: str | None, expected: list[str]) -> None:
    assert entries(listed, SPLIT, gpus="MIG-d") == expected
    assert [device.key for device in chosen(listed, SPLIT, gpus="MIG-d")[0].devices] == ["MIG-d2"]


def test_an_instance_that_is_not_there_is_refused_with_those_that_are() -> None:
    assert refusal(found=SPLIT, gpus="MIG-x") == (
        "gpus=[MIG-x]: MIG-x is no MIG instance of this machine, which has MIG-c1 (GPU 0), MIG-d2 (GPU 0)."
    )
    alike = Gpu(0, "GPU-a0", "Fake", mig=True, instances=(Instance("MIG-c1"), Instance("MIG-c2")))
    assert "MIG-c fits several MIG instances of this machine" in refusal(found=(alike,), gpus="MIG-c")
    assert "which has no MIG instance at all" in refusal(found=FOUR, gpus="MIG-x")


def test_an_instance_that_is_not_there_ends_the_inherited_list() -> None:
    plan, lines = chosen("MIG-d2,MIG-x,MIG-c1", SPLIT)
    assert [device.entry for device in plan.devices] == ["MIG-d2"]
    assert lines == ["CUDA_VISIBLE_DEVICES='MIG-d2,MIG-x,MIG-c1' counts as far as MIG-d2: what follows is no GPU here"]


@pytest.mark.parametrize("listed", [None, "MIG-GPU-a0/7/0"])
def test_an_instance_by_its_old_name_is_taken_at_its_word_where_its_gpu_is_in_mig_mode(listed: str | None) -> None:
    assert entries(listed, SPLIT, gpus="MIG-GPU-a0/7/0") == ["MIG-GPU-a0/7/0"]
    assert "is no MIG instance" in refusal(found=SPLIT, gpus="MIG-GPU-b1/7/0")


@pytest.mark.parametrize("raw", [{}, {"mode": "ddp"}, {"gpus": 0}, {"gpus": ["MIG-c", "MIG-d"]}, {"gpus": "MIG-c"}])
def test_no_job_and_no_group_of_ranks_gets_two_instances(raw: dict[str, Any]) -> None:
    assert "a process sees only one MIG instance of MIG-c1" in refusal(found=SPLIT, gpus_per_job=2, **raw)


@pytest.mark.parametrize(
    ("gpu", "why"),
    [
        (LOST, "the driver refuses it (GPU is lost)"),
        (Gpu(2, "GPU-c2", "Fake", mig=True), "it is in MIG mode, and no instance of it is there"),
    ],
)
@pytest.mark.parametrize("listed", [None, "0,1,2"])
def test_a_gpu_that_cannot_be_used_is_left_out_with_a_line_and_refused_by_its_id(
    gpu: Gpu, why: str, listed: str | None
) -> None:
    found = (*FOUR[:2], gpu, Gpu(3, "GPU-d3", "Fake"))
    plan, lines = chosen(listed, found)
    keys = ["GPU-a000-1111", "GPU-b100-1111", "GPU-d3"]
    assert [device.key for device in plan.devices] == keys[: 3 if listed is None else 2]
    assert [line for line in lines if "GPU 2" in line] == [f"GPU 2 is left out: {why}"]
    assert refusal(listed, found, gpus=[0, 2]) == (
        f"gpus=[0, 2]: GPU 2 cannot be used: {why}; repair that, or name other GPUs."
    )


def test_auto_is_refused_where_no_gpu_can_be_used() -> None:
    assert refusal(found=(Gpu(0, "GPU-a0", "Fake", mig=True), EMPTY)) == (
        "gpus=auto: no GPU can be used (GPU 0: it is in MIG mode, and no instance of it is there; GPU 1: it is in MIG "
        "mode, and no instance of it is there); repair that, or set gpus: [] for CPU slots."
    )
    assert entries(found=(EMPTY,), gpus=[]) == [""]


@pytest.mark.parametrize("odd", [LOST, EMPTY, SPLIT[0]])
@pytest.mark.parametrize(("listed", "ids"), [(None, "auto"), ("3", "auto"), (None, 3), ("3", 0)])
def test_a_gpu_is_shown_by_its_uuid_where_cuda_may_count_otherwise(odd: Gpu, listed: str | None, ids: Any) -> None:
    assert entries(listed, (*FOUR[:3], Gpu(3, "GPU-e3", "Fake")), gpus=ids)[-1] == "3"
    found = (dataclasses.replace(odd, index=0), FOUR[1], FOUR[2], Gpu(3, "GPU-e3", "Fake"))
    assert entries(listed, found, gpus=ids)[-1] == "GPU-e3"


def test_auto_shows_uuids_where_the_user_ordered_devices_otherwise() -> None:
    assert entries(found=FOUR[:2], environ={"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}) == ["GPU-a000-1111", "GPU-b100-1111"]


def test_a_device_is_known_by_its_uuid_and_else_by_its_entry() -> None:
    assert [device.key for device in chosen("1,0", FOUR)[0].devices] == ["GPU-b100-1111", "GPU-a000-1111"]
    assert [device.key for device in chosen("1,0")[0].devices] == ["1", "0"]
    assert [device.total_bytes for device in chosen("1", SPLIT)[0].devices] == [80]


# --- how many at once ---


def test_a_single_number_is_said_to_be_one_gpu() -> None:
    assert chosen("5,7", gpus=1)[1] == ["GPU 7 only (gpus=[1] is an id, not a count)"]
    assert chosen("5,7", gpus=[1])[1] == []


def test_a_job_cannot_have_more_gpus_than_there_are() -> None:
    assert refusal(gpus=[0, 1], gpus_per_job=3) == "gpus_per_job=3: expected at most 2, the GPUs in use (0, 1)."


@pytest.mark.parametrize(("per_gpu", "per_job", "idle"), [(1, 2, 1), (3, 2, 1), (2, 2, 0), (1, 3, 0), (2, 1, 0)])
def test_slots_that_can_never_be_used_get_one_line(per_gpu: int, per_job: int, idle: int) -> None:
    plan, lines = chosen(gpus=[0, 1, 2], per_gpu=per_gpu, gpus_per_job=per_job)
    assert (plan.slots_per_device, plan.devices_per_job) == (per_gpu, per_job)
    assert [line.split(" slots")[0] for line in lines] == ([f"{idle} of {3 * per_gpu}"] if idle else [])


@pytest.mark.parametrize("ids", [["MIG-a", "MIG-b"], ["GPU-a", "MIG-b"]])
def test_a_job_cannot_have_two_mig_instances(ids: Any) -> None:
    assert "a process sees only one MIG instance" in refusal(gpus=ids, gpus_per_job=2)
    assert entries(gpus=ids) == ids


def test_a_job_cannot_have_gpus_by_number_and_by_name() -> None:
    assert "give all by number, or all by name" in refusal(found=FOUR, gpus=[0, "GPU-b"], gpus_per_job=2)


@pytest.mark.parametrize("raw", [{"gpus": []}, {}])
def test_several_gpus_per_job_are_refused_on_cpu_slots(raw: Any) -> None:
    assert "there are only CPU slots" in refusal(gpus_per_job=2, **raw)


@pytest.mark.parametrize("ids", ["auto", [1], "GPU-b"])
def test_two_jobs_on_a_gpu_that_lets_one_process_in_are_refused(ids: Any) -> None:
    message = refusal(found=SHY, gpus=ids, per_gpu=2)
    assert message.startswith("per_gpu=2: GPU 1 (Fake) is in compute mode Exclusive_Process")


@pytest.mark.parametrize("ids", ["auto", 1, "MIG-c"])
def test_instances_of_a_gpu_that_lets_one_process_in_let_one_in(ids: Any) -> None:
    found = (FOUR[0], Gpu(1, "GPU-b1", "Fake", exclusive=True, mig=True, instances=PARTS))
    assert "per_gpu=2: GPU 1 (Fake) is in compute mode" in refusal(found=found, gpus=ids, per_gpu=2)


def test_two_ranks_on_a_gpu_that_lets_one_process_in_are_refused() -> None:
    raw = {"mode": "ddp", "ddp": {"nproc_per_node": 2}}
    assert refusal(found=SHY, **raw) == (
        "ddp.nproc_per_node=2: GPU 1 (Fake) is in compute mode Exclusive_Process and lets only one process in; "
        "set it to null, a rank for each GPU, or have 'nvidia-smi -i 1 -c DEFAULT' run."
    )
    assert len(entries(found=SHY, gpus_per_job=2, **raw)) == 2


@pytest.mark.parametrize("raw", [{"per_gpu": 2}, {"mode": "ddp", "ddp": {"nproc_per_node": 2}}])
def test_an_mps_server_lets_several_processes_in_and_one_line_says_so(raw: dict[str, Any]) -> None:
    _, lines = choose(checked(raw, prefix=""), {}, SHY, 6, mps=True)
    assert [line for line in lines if "MPS" in line] == [
        "GPU 1 in compute mode Exclusive_Process: shared by way of the MPS server that is here"
    ]
    assert not choose(checked({}, prefix=""), {}, SHY, 6, mps=True)[1]


def test_an_mps_server_is_there_where_its_pipe_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_machine, "MPS_PIPES", str(tmp_path / "default"))
    elsewhere = {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path / "mine")}
    for environ, directory in (({}, "default"), (elsewhere, "mine")):
        (tmp_path / directory).mkdir()
        assert not _machine.mps(environ)
        os.mkfifo(tmp_path / directory / "control")
        assert _machine.mps(environ)


def test_an_exclusive_gpu_is_fine_where_it_is_not_shared() -> None:
    assert entries(found=SHY) == ["0", "1"]
    assert entries(found=SHY, gpus=[0], per_gpu=2) == ["0"]


@pytest.mark.parametrize("variable", ["HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"])
def test_a_filter_of_another_vendors_is_no_matter_and_is_left_alone(variable: str) -> None:
    environ = {variable: "0"}
    plan, lines = chosen("2,3", FOUR, environ=environ, gpus=[1])
    assert ([device.entry for device in plan.devices], lines) == (["3"], [])
    assert variable not in visibility(plan, plan.slots, environ)


# --- what a job gets ---


def test_a_job_sees_its_gpus_and_is_told_which_they_are() -> None:
    plan = Layout((Device("3"), Device("5")), 2, 2)
    assert visibility(plan, (Slot(0, 1), Slot(1, 0)), {}) == {
        "CUDA_VISIBLE_DEVICES": "3,5",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "GPU_POOL_GPUS": "3,5",
        "GPU_POOL_SLOT": "3.1,5.0",
    }


def test_a_job_on_the_cpu_sees_no_gpu() -> None:
    variables = visibility(Layout((Device(""),), 2), (Slot(0, 1),), {"CUDA_VISIBLE_DEVICES": "0"})
    assert variables["CUDA_VISIBLE_DEVICES"] == variables["GPU_POOL_GPUS"] == ""
    assert variables["GPU_POOL_SLOT"] == "cpu.1"


def test_an_order_that_the_user_set_stays() -> None:
    environ = {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}
    assert {**environ, **visibility(Layout((Device("0"),), 1), (Slot(0, 0),), environ)}["CUDA_DEVICE_ORDER"] == (
        "FASTEST_FIRST"
    )


# --- asking the driver ---

Tools = Callable[..., dict[str, str]]


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tools:
    """A machine whose nvidia-smi runs this shell code and whose pynvml is this Python code; None: not installed.

    Gives the environment to ask in.
    """

    def install(smi: str | None = None, nvml: str | None = None, nvidiactl: bool = False) -> dict[str, str]:
        path, site = tmp_path / "bin", tmp_path / "site"
        path.mkdir()
        site.mkdir()
        if smi is not None:
            (path / "nvidia-smi").write_text(f"#!/bin/sh\n{smi}\n")
            (path / "nvidia-smi").chmod(0o755)
        if nvml is not None:
            (site / "pynvml.py").write_text(nvml)
            monkeypatch.syspath_prepend(str(site))
            monkeypatch.delitem(sys.modules, "pynvml", raising=False)
        else:
            monkeypatch.setattr(_cards, "folder_of_pynvml", lambda: None)
        control = tmp_path / "nvidiactl"
        if nvidiactl:
            control.touch()
        monkeypatch.setattr(_machine, "NVIDIACTL", str(control))
        return {"PATH": str(path)}

    return install


SMI = """[ "$2" = --format=csv,noheader,nounits ] || exit 9
[ "$1" = --query-gpu=index,uuid,name,compute_mode,memory.total,memory.free,mig.mode.current ] || exit 9
echo "0, GPU-aa, NVIDIA H200, Default, [N/A], [N/A], Disabled"
echo "1, GPU-bb, Odd, Name, Exclusive_Process, [N/A], [N/A], [N/A]" """
TWO = (Gpu(0, "GPU-aa", "NVIDIA H200", False), Gpu(1, "GPU-bb", "Odd, Name", True))
BROKEN_SMI = "echo 'NVIDIA-SMI has failed because of\n a driver mismatch.'; exit 9"

NVML = """
class NVMLError(Exception): pass
NVML_COMPUTEMODE_EXCLUSIVE_PROCESS = 3
def nvmlInit(): pass
def nvmlDeviceGetCount(): return 2
def nvmlDeviceGetHandleByIndex(i): return i
def nvmlDeviceGetUUID(g): return ["GPU-aa", b"GPU-bb"][g]
def nvmlDeviceGetName(g): return [b"NVIDIA H200", "Odd, Name"][g]
def nvmlDeviceGetComputeMode(g):
    if g == 0:
        raise NVMLError("Not Supported")
    return 3
"""
NVML_WITHOUT_LIBRARY = NVML + "def nvmlInit(): raise NVMLError('NVML Shared Library Not Found')\n"


def test_nvidia_smi_is_asked_where_there_is_no_nvml(tools: Tools) -> None:
    assert discover(tools(SMI)) == TWO


def test_nvml_is_asked_first(tools: Tools) -> None:
    assert discover(tools(BROKEN_SMI, NVML)) == TWO


def test_nvidia_smi_is_asked_where_nvml_has_no_library(tools: Tools) -> None:
    assert discover(tools(SMI, NVML_WITHOUT_LIBRARY)) == TWO


@pytest.mark.parametrize(
    "nvml", ["print('noise')", NVML + "print('noise')", "import no_such_module", "raise SystemExit"]
)
def test_nvidia_smi_is_asked_where_nvml_talks_nonsense(tools: Tools, nvml: str) -> None:
    assert discover(tools(SMI, nvml)) == TWO


@pytest.mark.parametrize("nvml", [None, NVML_WITHOUT_LIBRARY])
def test_no_tool_and_no_driver_is_no_driver(tools: Tools, nvml: str | None) -> None:
    assert discover(tools(None, nvml)) is None


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="has a driver")
def test_the_real_nvml_says_that_there_is_no_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert discover({"PATH": str(tmp_path)}) is None
    monkeypatch.setattr(_machine, "NVIDIACTL", os.devnull)
    with pytest.raises(ConfigurationError, match=r"cannot be asked \(NVML: NVML Shared Library Not Found\)$"):
        discover({"PATH": str(tmp_path)})


@pytest.mark.gpu
@pytest.mark.skipif(not os.path.exists("/dev/nvidiactl"), reason="has no driver")
def test_nvml_and_nvidia_smi_agree_on_a_real_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def known() -> list[object]:
        gpus = discover(os.environ) or ()
        return [(gpu.index, gpu.uuid, gpu.name, gpu.exclusive, gpu.mig, gpu.instances, gpu.fault) for gpu in gpus]

    by_nvml = known()
    monkeypatch.setattr(_cards, "folder_of_pynvml", lambda: None)
    assert by_nvml == known()
    assert by_nvml


@pytest.mark.parametrize("ending", ["exit 6", ""])
def test_a_driver_without_devices_has_answered(tools: Tools, ending: str) -> None:
    smi = f"echo 'No devices were found'; {ending}" if ending else ":"
    assert discover(tools(smi, nvidiactl=True)) == ()


@pytest.mark.parametrize(
    ("smi", "nvml", "words"),
    [
        (BROKEN_SMI, None, "nvidia-smi: NVIDIA-SMI has failed because of a driver mismatch)"),
        (BROKEN_SMI, NVML_WITHOUT_LIBRARY, "NVML: NVML Shared Library Not Found; nvidia-smi: NVIDIA-SMI has failed"),
        ("echo oops >&2; exit 1", None, "nvidia-smi: oops)"),
        ("exit 14", None, "nvidia-smi: it ended with 14)"),
        ("echo '0, [Unknown Error], H200, Default'", None, "nvidia-smi: unexpected answer '0, [Unknown Error]"),
        ("echo 'what?'", None, "nvidia-smi: unexpected answer 'what?"),
        (None, NVML_WITHOUT_LIBRARY, "NVML: NVML Shared Library Not Found)"),
        (None, None, "neither nvidia-ml-py nor nvidia-smi is installed)"),
    ],
)
def test_a_driver_that_is_there_and_cannot_be_asked_is_an_error_in_its_own_words(
    tools: Tools, smi: str | None, nvml: str | None, words: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        discover(tools(smi, nvml, nvidiactl=True))
    assert f"the NVIDIA driver cannot be asked ({words}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_nvidia_smi_that_hangs_is_ended_with_all_it_started(
    tools: Tools, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fifo = tmp_path / "alive"
    os.mkfifo(fifo)
    end = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(end, True)

    def out_of_time(process: subprocess.Popen[str], timeout: float) -> None:
        with open(fifo, "rb") as alive:
            assert alive.readline() == b"x\n"  # its child runs
        raise subprocess.TimeoutExpired(process.args, timeout)

    monkeypatch.setattr(subprocess.Popen, "communicate", out_of_time)
    signal.alarm(60)  # only to fail a hang
    try:
        with pytest.raises(ConfigurationError, match=r"\(no answer within 30 s\)$"):
            discover(tools(f"exec 3>'{fifo}'; (echo x >&3; while :; do :; done) & wait"))
        assert os.read(end, 10) == b""  # end of file: nobody holds the other end any more
    finally:
        signal.alarm(0)
        os.close(end)


# --- this machine ---


def test_auto_is_refused_where_the_driver_cannot_be_asked(tools: Tools) -> None:
    with pytest.raises(ConfigurationError) as caught:
        layout(checked({}), tools(BROKEN_SMI))
    assert str(caught.value) == (
        "hydra.launcher.gpus=auto: the NVIDIA driver cannot be asked "
        "(nvidia-smi: NVIDIA-SMI has failed because of a driver mismatch); "
        "repair it, name the GPUs, or set gpus: [] for CPU slots."
    )


@pytest.mark.parametrize(("listed", "ids"), [({}, [3]), ({"CUDA_VISIBLE_DEVICES": "3"}, "auto")])
def test_ids_are_taken_at_their_word_where_the_driver_cannot_be_asked_and_a_line_says_so(
    tools: Tools, listed: dict[str, str], ids: Any
) -> None:
    plan, lines = layout(checked({"gpus": ids}), {**tools(BROKEN_SMI), **listed})
    assert plan.devices == (Device("3"),)
    assert len(lines) == 1
    assert "taken at their word: the NVIDIA driver cannot be asked" in lines[0]


@pytest.mark.parametrize(("ids", "listed"), [([], "0"), ("auto", ""), ("auto", "-1")])
def test_nobody_is_asked_where_no_gpu_will_be_used(monkeypatch: pytest.MonkeyPatch, ids: Any, listed: str) -> None:
    monkeypatch.setattr(_machine, "discover", lambda _: pytest.fail("asked"))
    assert layout(checked({"gpus": ids}), {"CUDA_VISIBLE_DEVICES": listed})[0].on_cpu


def test_what_the_driver_says_is_used(tools: Tools) -> None:
    environ = tools(SMI)
    assert layout(checked({}), environ) == (Layout((Device("0", "GPU-aa"), Device("1", "GPU-bb")), 1), [])
    with pytest.raises(ConfigurationError, match="Exclusive_Process"):
        layout(checked({"per_gpu": 2}), environ)
    with pytest.raises(ConfigurationError, match="2 is no GPU of this machine"):
        layout(checked({"gpus": 2}), environ)


def test_main_loads_neither_nvml_nor_torch() -> None:
    code = (
        "import sys, os\n"
        "from hydra_plugins.hydra_gpu_pool_launcher import _devices, _settings\n"
        "try:\n    _devices.layout(_settings.checked({}), os.environ)\n"
        "except Exception as error:\n    assert type(error).__name__ == 'ConfigurationError', error\n"
        "assert not {'torch', 'pynvml'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize(
    ("quotas", "expected"),
    [
        ({}, 8),
        ({"": "max 100000"}, 8),
        ({"a/b": "250000 100000"}, 2),
        ({"a/b": "max 100000", "a": "350000 100000"}, 3),
        ({"a/b": "400000 100000", "a": "600000 100000", "": "700000 100000"}, 4),
        ({"": "500000 100000"}, 5),
        ({"a/b": "50000 100000"}, 1),
        ({"a/b": "6400000 100000"}, 8),
        ({"other": "100000 100000"}, 8),
    ],
)
def test_cores_are_what_affinity_and_every_cgroup_above_allow(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quotas: dict[str, str], expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    own = tmp_path / "own"
    own.write_text("1:cpu:/v1\n0::/a/b\n")
    for group, quota in quotas.items():
        (tmp_path / group).mkdir(parents=True, exist_ok=True)
        (tmp_path / group / "cpu.max").write_text(f"{quota}\n")
    monkeypatch.setattr(_machine, "OWN_CGROUP", str(own))
    monkeypatch.setattr(_machine, "CGROUP_ROOT", str(tmp_path))
    assert _machine.cores() == expected


@pytest.mark.parametrize("own", [None, "3:cpu:/v1\n"])
def test_cores_without_cgroup_v2_are_those_of_the_affinity(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, own: str | None
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 4, 5})
    if own is not None:
        (tmp_path / "own").write_text(own)
    monkeypatch.setattr(_machine, "OWN_CGROUP", str(tmp_path / "own"))
    assert _machine.cores() == 3


# --- ranks ---


def ranks(plan: Layout, **raw: Any) -> int | None:
    wanted = _devices.group(checked(raw, prefix=""), plan)
    return None if wanted is None else wanted.ranks


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ({"gpus": [0, 1]}, None),
        ({"gpus": [0, 1], "mode": "ddp"}, 1),
        ({"gpus": [0, 1], "mode": "ddp", "gpus_per_job": 2}, 2),
        ({"gpus": [0, 1], "mode": "ddp", "ddp": {"nproc_per_node": 4}}, 4),
        ({"gpus": [], "mode": "ddp"}, 1),
        ({"gpus": [], "mode": "ddp", "ddp": {"nproc_per_node": 3}}, 3),
    ],
)
def test_a_job_has_a_rank_for_each_of_its_gpus_or_as_many_as_are_asked_for(
    raw: dict[str, Any], expected: int | None
) -> None:
    assert ranks(chosen(**raw)[0], **raw) == expected


@pytest.mark.parametrize(("per_job", "slots"), [(1, 6), (2, 3), (4, 1), (7, 1)])
def test_the_cores_are_divided_by_the_ranks_of_a_job(per_job: int, slots: int) -> None:
    assert chosen(gpus=[], mode="ddp", ddp={"nproc_per_node": per_job})[0].jobs_at_once == slots


def test_more_ranks_than_gpus_are_allowed_with_one_line() -> None:
    _, lines = chosen(gpus=[0, 1], mode="ddp", ddp={"nproc_per_node": 2})
    assert lines == ["ddp: each job is a group of 2 ranks on 1 GPU, where NCCL lets no two share one; gloo does"]


@pytest.mark.parametrize(
    ("raw", "devices"), [({"gpus": [0, 1, 2], "gpus_per_job": 2, "per_gpu": 3}, 2), ({"gpus": [], "cpu_slots": 4}, 1)]
)
def test_over_several_machines_the_sweep_goes_job_by_job(raw: dict[str, Any], devices: int) -> None:
    ddp = {"nnodes": 2, "rdzv_endpoint": "node0:29500"}
    plan, lines = chosen(mode="ddp", ddp=ddp, **raw)
    assert plan.jobs_at_once == 1
    assert len(plan.devices) == devices
    assert lines[-1].endswith(" on each of 2 machines, one job at a time")


def test_ranks_on_cpu_slots_are_asked_for_by_their_number() -> None:
    assert refusal(gpus=[], mode="ddp", gpus_per_job=2) == (
        "gpus_per_job=2: there are only CPU slots; leave it at 1, and set ddp.nproc_per_node to the number of ranks."
    )
