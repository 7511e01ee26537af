"""GPUs of AMD and Intel: whose are used, which they are, and what shows them to a job."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest
from support import outcomes

from hydra_plugins.hydra_gpu_pool_launcher import _cards, _cli, _devices, _gpus, _lease_directory, _machine, _sysfs
from hydra_plugins.hydra_gpu_pool_launcher._cards import Gpu
from hydra_plugins.hydra_gpu_pool_launcher._errors import ConfigurationError
from hydra_plugins.hydra_gpu_pool_launcher._lease_files import Holder
from hydra_plugins.hydra_gpu_pool_launcher._model import Device, Layout
from hydra_plugins.hydra_gpu_pool_launcher._settings import checked
from hydra_plugins.hydra_gpu_pool_launcher._vendors import inherited, within_rocr

CUDA, HIP, ROCR, ZE = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"
NVIDIA = tuple(Gpu(i, f"GPU-{letter}{i}00-1111", "Fake") for i, letter in enumerate("ab"))


class Machine:
    """Which GPUs there are. Each ``unique`` is an AMD GPU of that unique_id; None: that node may not be read."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._kfd, self._drm = directory / "kfd", directory / "drm"
        monkeypatch.setattr(_sysfs, "KFD", str(self._kfd))
        monkeypatch.setattr(_sysfs, "DRM", str(self._drm))
        self._patch = monkeypatch
        self.has()

    def has(
        self, nvidia: tuple[Gpu, ...] | None = None, amd: tuple[int | None, ...] | None = None, intel: int = 0
    ) -> None:
        self._patch.setattr(_machine, "discover", lambda _: nvidia)
        if amd is not None:
            self._node(0, 0, "simd_count 0\nunique_id 0\n")
            for i, unique in enumerate(amd, start=9):  # as text, "10" comes before "9"
                self._node(
                    i, 4242 + i, f"cpu_cores_count 0\nsimd_count 256\nunique_id {unique}\ndrm_render_minor {i}\n"
                )
                self._card(i, f"0000:{i:02x}:00.0", "0x1002", f"Instinct {i}")
                if unique is None:
                    (self._kfd / f"{i}/gpu_id").unlink()
        for i in range(intel):
            self._card(200 - i, f"0000:a{i}:00.0", "0x8086", f"Arc {i}")

    def _node(self, number: int, gpu_id: int, properties: str) -> None:
        node = self._kfd / str(number)
        node.mkdir(parents=True)
        (node / "gpu_id").write_text(f"{gpu_id}\n")
        (node / "properties").write_text(properties)

    def _card(self, minor: int, place: str, vendor: str, name: str) -> None:
        device = self._drm / "places" / place
        device.mkdir(parents=True)
        (device / "vendor").write_text(f"{vendor}\n")
        (device / "product_name").write_text(f"{name}\n")
        (self._drm / f"renderD{minor}").mkdir()
        (self._drm / f"renderD{minor}/device").symlink_to(device)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def laid_out(environ: dict[str, str] | None = None, **raw: Any) -> tuple[Layout, list[str]]:
    return _devices.layout(checked(raw, prefix=""), environ or {})


def entries(environ: dict[str, str] | None = None, **raw: Any) -> list[str]:
    return [device.entry for device in laid_out(environ, **raw)[0].devices]


def refusal(environ: dict[str, str] | None = None, **raw: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        laid_out(environ, **raw)
    message = str(caught.value)
    assert message.endswith(".")
    assert "\n" not in message
    return message


# --- whose GPUs ---


@pytest.mark.parametrize(
    ("nvidia", "amd", "environ", "vendor"),
    [
        (NVIDIA, (7,), {}, "nvidia"),
        (NVIDIA, (7,), {HIP: "0"}, "nvidia"),
        (NVIDIA, None, {ZE: "0"}, "nvidia"),
        (None, (7,), {}, "amd"),
        ((), (7,), {}, "amd"),
        (None, (7,), {CUDA: "0"}, "amd"),
        (None, None, {HIP: "0"}, "amd"),
        (None, None, {ROCR: "0"}, "amd"),
        (None, None, {ROCR: "0", CUDA: "0"}, "amd"),
        (None, (7,), {ZE: "0"}, "intel"),
        (None, (7,), {ZE: "0", ROCR: "0"}, "amd"),
        (None, None, {ZE: "0", HIP: "0", CUDA: "0"}, "nvidia"),
        (None, None, {CUDA: "0"}, "nvidia"),
    ],
)
def test_auto_is_nvidia_else_what_one_vendors_variables_say_else_what_amd_has(
    machine: Machine, nvidia: Any, amd: Any, environ: dict[str, str], vendor: str
) -> None:
    machine.has(nvidia, amd)
    plan, lines = laid_out(environ)
    assert not plan.on_cpu
    assert plan.vendor == vendor
    assert [line.startswith(f"vendor: {vendor}, since ") for line in lines].count(True) == (vendor != "nvidia")


def test_a_driver_of_nvidias_that_does_not_answer_is_no_reason_for_another_vendor(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent(_: object) -> None:
        raise ConfigurationError("the NVIDIA driver cannot be asked (it is in trouble)")

    machine.has(amd=(7,))
    monkeypatch.setattr(_machine, "discover", silent)
    assert "gpus=auto: the NVIDIA driver cannot be asked" in refusal({HIP: "0"})
    assert entries({HIP: "0"}, vendor="amd") == ["0"]


@pytest.mark.parametrize("vendor", ["amd", "intel"])
def test_nvidias_driver_is_not_asked_where_another_vendor_is(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, vendor: str
) -> None:
    machine.has(amd=(7,), intel=1)
    monkeypatch.setattr(_machine, "discover", lambda _: pytest.fail("asked"))
    assert entries(vendor=vendor) == ["0"]


def test_an_intel_gpu_is_used_only_where_it_is_asked_for(machine: Machine) -> None:
    machine.has(intel=2)
    assert laid_out()[0].on_cpu
    assert entries(vendor="intel") == ["0", "1"]
    assert entries({ZE: "1"}) == ["1"]


@pytest.mark.parametrize(("vendor", "name"), [("amd", "AMD "), ("intel", "Intel "), ("nvidia", ""), ("auto", "")])
def test_without_a_gpu_of_the_vendor_there_are_cpu_slots_and_one_line_says_so(
    machine: Machine, vendor: str, name: str
) -> None:
    plan, lines = laid_out(vendor=vendor, cpu_slots=3)
    assert (plan.on_cpu, lines) == (True, [f"CPU only, 3 at once: no {name}GPU was found"])
    machine.has(amd=())
    assert laid_out(vendor=vendor, cpu_slots=3)[1] == lines


# --- what there is ---


def test_amds_gpus_are_counted_as_hip_does_and_what_may_not_be_read_is_not_there(machine: Machine) -> None:
    machine.has(amd=(0xABC, None, 0, 0xDEF))
    assert _sysfs.amd() == (
        Gpu(0, "GPU-0000000000000abc", "Instinct 9", known_as="amd-0"),
        Gpu(1, "", "Instinct 11", known_as="amd-1"),
        Gpu(2, "GPU-0000000000000def", "Instinct 12", known_as="amd-2"),
    )


def test_intels_gpus_are_counted_by_their_places_on_the_bus(machine: Machine) -> None:
    machine.has(amd=(1,), intel=2)
    assert [(gpu.index, gpu.name) for gpu in _sysfs.intel()] == [(0, "Arc 0"), (1, "Arc 1")]


def test_a_machine_with_neither_has_neither() -> None:
    assert (_sysfs.amd(), _sysfs.intel()) == (None, ())


@pytest.mark.parametrize(
    ("environ", "keys"),
    [
        ({}, ["GPU-0000000000000abc", "amd-1"]),
        ({HIP: "1,0"}, ["amd-1", "GPU-0000000000000abc"]),
        ({ROCR: "1"}, ["amd-1"]),
        ({ROCR: "GPU-0000000000000abc"}, ["GPU-0000000000000abc"]),
        ({ROCR: "1,0", HIP: "1"}, ["GPU-0000000000000abc"]),
    ],
)
def test_a_device_has_one_key_whatever_the_variables_call_it(
    machine: Machine, environ: dict[str, str], keys: list[str]
) -> None:
    machine.has(amd=(0xABC, 0))
    assert [device.key for device in laid_out(environ)[0].devices] == keys


def test_where_nothing_tells_of_a_device_its_key_has_the_vendor_in_it(machine: Machine) -> None:
    assert [device.key for device in laid_out({ROCR: "2,3"})[0].devices] == ["amd-2", "amd-3"]
    assert [device.key for device in laid_out(vendor="amd", gpus=[1, "GPU-f"])[0].devices] == ["amd-1", "GPU-f"]
    machine.has(intel=1)
    assert [device.key for device in laid_out(vendor="intel")[0].devices] == ["intel-0"]
    assert [device.key for device in laid_out({ZE: "0.1,1"})[0].devices] == ["intel-0.1", "intel-1"]


# --- what was inherited, and ids ---


@pytest.mark.parametrize(
    ("environ", "variable", "listed"),
    [
        ({}, HIP, None),
        ({HIP: "1,GPU-ab"}, HIP, ("1", "GPU-ab")),
        ({HIP: "01, 2"}, HIP, ("1", "2")),
        ({HIP: "0,-1,1"}, HIP, ("0",)),
        ({HIP: "-1"}, HIP, ()),
        ({HIP: "0,MIG-x"}, HIP, ("0",)),
        ({HIP: "1", CUDA: "0"}, HIP, ("1",)),
        ({HIP: ""}, HIP, None),
        ({HIP: "", CUDA: "2"}, CUDA, ("2",)),
        ({CUDA: "2,3"}, CUDA, ("2", "3")),
        ({CUDA: ""}, CUDA, ()),
        ({ROCR: "2,3"}, HIP, None),
        ({ROCR: ""}, ROCR, ()),
        ({ROCR: "2,3", CUDA: "2,3"}, HIP, None),
        ({ROCR: "2,3", HIP: "2,3", CUDA: "2,3"}, HIP, None),
        ({ROCR: "2,3", HIP: "1"}, HIP, ("1",)),
        ({ROCR: "2,3", CUDA: "1"}, CUDA, ("1",)),
    ],
)
def test_amds_list_is_read_as_hip_reads_it(environ: dict[str, str], variable: str, listed: Any) -> None:
    given = inherited(environ, "amd")
    assert (given.variable, given.entries) == (variable, listed)


@pytest.mark.parametrize(
    ("value", "listed"),
    [(None, None), ("", None), ("0,1", ("0", "1")), ("0.0,0.1,1", ("0.0", "0.1", "1")), ("0,GPU-a", ("0",))],
)
def test_intels_list_is_of_devices_and_tiles(value: str | None, listed: Any) -> None:
    assert inherited({} if value is None else {ZE: value}, "intel").entries == listed


@pytest.mark.parametrize(
    ("value", "keys"),
    [
        ("2,0", ["amd-2", "amd-0"]),
        ("1,9,0", ["amd-1"]),
        ("", []),
        ("GPU-0000000000000004,GPU-new", ["GPU-0000000000000004", "GPU-new"]),
    ],
)
@pytest.mark.parametrize("known", [True, False])
def test_within_an_inherited_rocr_list_gpus_count_from_0(value: str, keys: list[str], known: bool) -> None:
    found = tuple(Gpu(i, "GPU-0000000000000004" if i == 3 else "", "Fake", known_as=f"amd-{i}") for i in range(4))
    gpus = within_rocr(found if known else None, {ROCR: value}) or ()
    assert [gpu.index for gpu in gpus] == list(range(len(gpus)))
    expected = keys if known or "9" not in value else ["amd-1", "amd-9", "amd-0"]  # nobody can say that it is not there
    assert [gpu.uuid or gpu.known_as for gpu in gpus] == expected


def test_ids_count_within_what_was_inherited(machine: Machine) -> None:
    machine.has(amd=(1, 2, 3, 4))
    assert entries({ROCR: "2,3"}) == ["0", "1"]
    assert entries({ROCR: "2,3"}, gpus=[1]) == ["1"]
    assert entries({HIP: "3,1"}, gpus=[1]) == ["1"]
    assert entries({CUDA: "3,1"}, gpus=[0]) == ["3"]
    assert entries(gpus=[3, 0]) == ["3", "0"]
    assert entries(gpus="GPU-0000000000000004") == ["GPU-0000000000000004"]
    assert entries({ZE: "0.0,0.1"}, vendor="intel", gpus=[1]) == ["0.1"]
    assert entries(vendor="intel", gpus=[5]) == ["5"]


@pytest.mark.parametrize(
    ("environ", "raw", "says"),
    [
        ({HIP: "3,1"}, {"gpus": [2]}, "gpus=[2]: 2 is no index into HIP_VISIBLE_DEVICES='3,1'; expected 0 to 1."),
        ({CUDA: "3,1"}, {"gpus": [2]}, "gpus=[2]: 2 is no index into CUDA_VISIBLE_DEVICES='3,1'; expected 0 to 1."),
        ({HIP: "-1"}, {"gpus": [0]}, "HIP_VISIBLE_DEVICES='-1' shows no device; unset it"),
        ({ROCR: "1"}, {"gpus": [1]}, "gpus=[1]: 1 is no GPU of this machine, which has 0 (GPU-0000000000000002)."),
        ({}, {"gpus": [4]}, "gpus=[4]: 4 is no GPU of this machine, which has 0 (GPU-0000000000000001), 1 "),
        ({}, {"gpus": "MIG-a"}, "gpus=[MIG-a]: MIG-a is no name of a GPU of AMD's; give its number."),
        ({}, {"gpus": "GPU-a", "vendor": "intel"}, "GPU-a is no name of a GPU of Intel's; give its number."),
        ({ZE: "0.1"}, {"gpus": [1], "vendor": "intel"}, "1 is no index into ZE_AFFINITY_MASK='0.1'; expected 0."),
        ({HIP: "0,0"}, {}, "HIP_VISIBLE_DEVICES='0,0': with a device twice in it, torch would see none"),
        ({HIP: "0,GPU-0000000000000002"}, {}, "torch reads no list of numbers and names"),
        ({}, {"gpus": [0, 1], "gpus_per_job": 3}, "gpus_per_job=3: expected at most 2"),
    ],
)
def test_what_cannot_be_shown_is_refused_in_the_words_of_the_vendor(
    machine: Machine, environ: dict[str, str], raw: dict[str, Any], says: str
) -> None:
    machine.has(amd=(1, 2, 3, 4))
    assert says in refusal(environ, **raw)


def test_ids_are_taken_at_their_word_where_nothing_tells_and_a_line_says_so() -> None:
    assert laid_out(vendor="amd", gpus=[1])[1] == ["GPU 1: taken at your word, no AMD driver was found here"]
    assert laid_out(vendor="intel", gpus=[1])[1] == ["GPU 1: taken at your word, Intel's driver is not asked"]


# --- what is asked of NVIDIA's driver alone ---


@pytest.mark.parametrize(("vendor", "name"), [("amd", "AMD"), ("intel", "Intel")])
@pytest.mark.parametrize("ids", ["auto", [0]])
def test_so_much_free_memory_is_refused_where_nobody_can_be_asked_for_it(
    machine: Machine, vendor: str, name: str, ids: Any
) -> None:
    machine.has(amd=(1,), intel=1)
    assert refusal(vendor=vendor, gpus=ids, min_free_gpu_mem_gb=4) == (
        f"min_free_gpu_mem_gb=4.0: the memory of {name}'s GPUs is not asked for, so nobody could say when so much of "
        "it is free; leave it at null."
    )
    assert entries(vendor=vendor, gpus=ids, min_free_gpu_mem_gb=0) == ["0"]


def test_on_cpu_slots_of_a_machine_with_amds_gpus_it_is_ignored_as_on_any(machine: Machine) -> None:
    machine.has(amd=(1,))
    ignored = ["min_free_gpu_mem_gb=4.0 is ignored: CPU slots have no GPU memory"]
    assert laid_out(gpus=[], min_free_gpu_mem_gb=4)[1] == ignored


@pytest.mark.parametrize(
    ("raw", "asked"),
    [({}, True), ({"vendor": "amd"}, False), ({"vendor": "intel"}, False), ({"gpus": []}, False)],
)
def test_nvidias_driver_is_asked_for_the_memory_of_its_own_gpus_only(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, raw: dict[str, Any], asked: bool
) -> None:
    """AMD's have UUIDs, too."""
    monkeypatch.setattr(_cards, "command", lambda _: ["ask"])
    machine.has(NVIDIA, (1,), intel=1)
    assert _machine.driver(laid_out(**raw)[0]) == (("ask",) if asked else None)


@pytest.mark.parametrize(("vendor", "name"), [("amd", "amd-0"), ("intel", "intel-0")])
def test_slots_are_leased_under_a_name_with_the_vendor_in_it(
    machine: Machine, leases: Path, vendor: str, name: str
) -> None:
    """So that the GPU 0 of another vendor's is another one."""
    machine.has(NVIDIA, (0,), intel=1)
    layout = laid_out(vendor=vendor, per_gpu=2)[0]
    assert _lease_directory.place_for(layout, os.environ) == str(leases)
    opened = _lease_directory.open_files(str(leases), layout)
    for fd in opened.descriptors():
        os.close(fd)
    assert sorted(opened.files) == [f"{name}.0", f"{name}.1"]


# --- what a job gets ---

INHERITED = [
    {name: value for name, value in zip((CUDA, HIP, ROCR, ZE), values, strict=True) if value is not None}
    for values in itertools.product(
        (None, "", "1", "0,1"), (None, "", "-1", "1"), (None, "", "1,0", "1"), (None, "0.0,1")
    )
]


@pytest.mark.parametrize("nvidia", [None, NVIDIA])
@pytest.mark.parametrize("amd", [None, (1, 2)])
def test_no_job_ever_gets_two_variables_that_contradict_each_other(machine: Machine, nvidia: Any, amd: Any) -> None:
    """Of each set of inherited variables, each vendor, CPU slots and GPUs, one per job and two."""
    machine.has(nvidia, amd, intel=2)
    seen = set()
    for environ, vendor, ids, per_job in itertools.product(
        INHERITED, ("auto", "nvidia", "amd", "intel"), ("auto", [], [0]), (1, 2)
    ):
        try:
            plan, _ = laid_out(environ, vendor=vendor, gpus=ids, gpus_per_job=per_job)
        except ConfigurationError:
            continue
        slots = plan.slots[:per_job]
        shown = ",".join(plan.devices[slot.device].entry for slot in slots)
        job = {**environ, **_devices.visibility(plan, slots, environ)}
        seen.add((plan.vendor, plan.on_cpu, per_job))
        assert job["GPU_POOL_GPUS"] == shown
        assert job.get(ROCR) == environ.get(ROCR)
        if plan.on_cpu:
            hip = bool(amd) or vendor == "amd" or HIP in environ or ROCR in environ
            assert (job[CUDA], job.get(HIP)) == (("-1", "-1") if hip else ("", None))
            assert job.get(ZE) == environ.get(ZE)
        elif plan.vendor == "nvidia":
            assert job[CUDA] == shown
            assert (job.get(HIP), job.get(ZE)) == (environ.get(HIP), environ.get(ZE))
        elif plan.vendor == "amd":
            assert job[HIP] == shown
            assert job.get(CUDA) in {None, shown}
            assert (CUDA in job) == (CUDA in environ)
            assert job.get(ZE) == environ.get(ZE)
            rocr = environ.get(ROCR)
            assert rocr is None or max(map(int, shown.split(","))) <= rocr.count(",")
        else:
            assert job[ZE] == shown
            assert (job.get(CUDA), job.get(HIP)) == (environ.get(CUDA), environ.get(HIP))
        assert ("CUDA_DEVICE_ORDER" in job) == (job.get(HIP) != "-1" if plan.on_cpu else plan.vendor == "nvidia")
    some = {("intel", False, 1), ("intel", False, 2), ("amd", False, 1), ("amd", False, 2), ("nvidia", False, 1)}
    assert seen > some


def test_a_job_of_a_sweep_sees_its_own_amd_gpu_and_on_a_cpu_slot_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def job() -> list[str | None]:
        return [os.environ.get(name) for name in (HIP, CUDA, ROCR, "GPU_POOL_GPUS", "CUDA_DEVICE_ORDER")]

    monkeypatch.setenv(ROCR, "4,5,6")
    seen = [o.value for o in outcomes(tmp_path, job, {}, {}, vendor="amd", gpus=[2, 0])]
    assert seen == [["2", None, "4,5,6", "2", None], ["0", None, "4,5,6", "0", None]]
    assert outcomes(tmp_path, job, {}, gpus=[])[0].value == ["-1", "-1", "4,5,6", "", None]


# --- gpu-pool gpus ---


def gpus(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert _cli.run(["gpus", *arguments]) == 0
    return capsys.readouterr().out


def test_the_command_gpus_tells_of_amds(
    machine: Machine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.has(amd=(0xABC, 0))
    assert gpus(capsys).splitlines() == [
        "HIP_VISIBLE_DEVICES is not set: an id is HIP's number, which counts within ROCR_VISIBLE_DEVICES where that is "
        "set",
        "",
        "  id  name         uuid                  shown to a job as",
        "  0   Instinct 9   GPU-0000000000000abc  0",
        "  1   Instinct 10                        1",
        "",
        "vendor: amd, since AMD GPUs were found, and none of NVIDIA's",
    ]
    monkeypatch.setenv(HIP, "1")
    said = json.loads(gpus(capsys, "--json"))
    assert (said["vendor"], said["variable"], said["visible"], said["driver"]) == ("amd", HIP, "1", True)
    assert said["cuda_visible_devices"] is None
    assert [(row["id"], row["entry"], row["name"]) for row in said["gpus"]] == [
        ("0", "1", "Instinct 10"),
        (None, None, "Instinct 9"),
    ]
    assert f"(hidden by {HIP})" in gpus(capsys)


def test_the_command_gpus_tells_who_leases_amds_hidden_ones_too(machine: Machine) -> None:
    machine.has(amd=(0xABC, 0, 0))
    found, me = _sysfs.amd(), Holder(42, "/x/y")
    told = _gpus.told({HIP: "1"}, found, 4, {"GPU-0000000000000abc.1": me, "amd-1.0": me, "amd-2.3": me}, "amd")
    assert [(row.entry, row.leases) for row in told.rows] == [("1", {0: me}), (None, {1: me}), (None, {3: me})]
    assert _gpus.lines(told)[-3:] == [
        "slot 1.0 is leased by the sweep in /x/y (process 42)",
        "slot GPU-0000000000000abc.1 is leased by the sweep in /x/y (process 42)",
        "slot amd-2.3 is leased by the sweep in /x/y (process 42)",
    ]
    assert [row["leases"] for row in _gpus.as_json(told)["gpus"]] == [
        [{"slot": number, "pid": 42, "directory": "/x/y"}] for number in (0, 1, 3)
    ]


def test_the_command_gpus_tells_of_intels_where_they_are_asked_for_and_else_that_they_are_there(
    machine: Machine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.has(intel=2)
    assert "there are 2 GPUs of Intel's, which are used only with vendor: intel" in gpus(capsys)
    monkeypatch.setenv(ZE, "0.0,0.1")
    rows = json.loads(gpus(capsys, "--json"))["gpus"]
    assert [(row["id"], row["entry"]) for row in rows] == [("0", "0.0"), ("1", "0.1")]
    assert "ZE_AFFINITY_MASK=0.0,0.1: an id is an index into it" in gpus(capsys)


def test_a_device_without_a_list_and_without_a_driver_is_as_ever() -> None:
    assert laid_out({CUDA: "5"})[0] == Layout((Device("5"),), 1)
    assert _gpus.told({}, None, 4).visible == inherited({})
