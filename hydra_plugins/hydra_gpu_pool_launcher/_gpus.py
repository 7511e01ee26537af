"""What ``gpu-pool gpus`` says: which GPUs this machine has, and what an id means here, in this environment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from . import _devices, _ids, _lease_directory
from ._cards import Gpu, Instance
from ._lease_files import Holder
from ._machine import cores, look
from ._model import Device, Vendor
from ._settings import checked
from ._sysfs import intel
from ._table import cells, pad
from ._tail import one_line
from ._vendors import NAMES, Inherited, inherited, is_number

_GAP = "  "
_WHOSE_NUMBERS: Mapping[Vendor, str] = {
    "nvidia": "nvidia-smi's number",
    "amd": "HIP's number, which counts within ROCR_VISIBLE_DEVICES where that is set",
    "intel": "Level Zero's number",
}
NOBODY: Mapping[str, Holder] = MappingProxyType({})
_SHOWN = 4
"""Processes of a device in its line; there may be hundreds."""


@dataclass(frozen=True)
class Row:
    """A device. ``id``: what the key ``gpus`` calls it, None: no job can get it; ``entry``: as a job will be shown it.

    ``gpu``: what the driver says of it, None where it cannot be told which one it is; ``instance``: of which MIG
    instance of it. ``leases``: who has which of its slots, by its number.
    """

    id: str | None
    entry: str | None
    gpu: Gpu | None
    instance: Instance | None = None
    leases: Mapping[int, Holder] = field(default_factory=dict)

    @property
    def told(self) -> Gpu | Instance | None:
        """What the driver says of the device itself: its name, UUID, memory, processes."""
        return self.instance or self.gpu


@dataclass(frozen=True)
class Gpus:
    """``visible``: CUDA_VISIBLE_DEVICES, or its like of the vendor. ``driver``: there is one.

    ``cpu_slots``: where ``gpus=auto`` takes no GPUs.
    """

    visible: Inherited
    driver: bool
    rows: tuple[Row, ...]
    cpu_slots: int | None
    notes: tuple[str, ...]


def ask(environ: Mapping[str, str]) -> Gpus:
    """What there is. Blocks while the driver answers. Raises ConfigurationError where it does not, or not well."""
    directory = _lease_directory.place(environ)
    held: dict[str, Holder] = {}
    unread: tuple[str, ...] = ()
    try:
        held = _lease_directory.holders(directory)
    except OSError as error:
        unread = (f"who leases what cannot be read in {directory}: {error.strerror}",)
    found = look("auto", environ)
    gpus = told(environ, found.gpus, cores(), held, found.vendor)
    notes = [] if found.why is None else [f"vendor: {found.vendor}, since {found.why}"]
    if not gpus.rows and (of_intel := len(intel())):
        what = "is 1 GPU of Intel's, which is" if of_intel == 1 else f"are {of_intel} GPUs of Intel's, which are"
        notes.append(f"there {what} used only with vendor: intel")
    return replace(gpus, notes=(*notes, *gpus.notes, *unread))


def told(
    environ: Mapping[str, str],
    found: tuple[Gpu, ...] | None,
    cores: int,
    held: Mapping[str, Holder] = NOBODY,
    vendor: Vendor = "nvidia",
) -> Gpus:
    """The same of what the driver has said, and of ``_lease_directory.holders``. Pure.

    Raises ConfigurationError where no sweep could use these GPUs.
    """
    layout, notes = _devices.choose(checked({}, prefix=""), environ, found, cores, vendor=vendor)
    visible = inherited(environ, vendor)
    rows = [
        Row(
            _id(device, visible, found),
            device.entry,
            _ids.gpu_of(device.entry, visible, found),
            _ids.instance_of(device.entry, found),
            _leases_of(device.key, held),
        )
        for device in layout.devices
        if device.entry
    ]
    seen = {row.told for row in rows}
    for row in _all(found or ()):
        if row.told not in seen:
            rows.append(replace(row, leases=_leases_of(_name(row.told), held)) if row.told else row)
    slots = layout.slots_per_device if layout.on_cpu else None
    if found is None:  # sweeps name GPUs that nobody here can list
        listed = {_lease_directory.file_name(device.key) for device in layout.devices}
        others = {name: holder for name, holder in held.items() if name.rpartition(".")[0] not in listed}
        notes += [f"slot {name} is leased by {others[name]}" for name in sorted(others)]
    return Gpus(visible, found is not None, tuple(rows), slots, tuple(notes))


def _leases_of(key: str, held: Mapping[str, Holder]) -> dict[int, Holder]:
    slots = ((name.rpartition("."), holder) for name, holder in held.items())
    return {int(number): holder for (device, _, number), holder in slots if device == _lease_directory.file_name(key)}


def _name(device: Gpu | Instance) -> str:
    """What it is known by, whatever is inherited: the key of its ``Device``, which a hidden one has none of."""
    known_as = device.known_as if isinstance(device, Gpu) else None
    return device.uuid or known_as or ""


def _id(device: Device, visible: Inherited, found: tuple[Gpu, ...] | None) -> str:
    gpu = _ids.gpu_of(device.entry, visible, found)
    listed = _ids.usable(visible, found)
    if listed is not None:  # an instance may be there by its GPU
        same = [entry == device.entry for entry in listed]
        return str(same.index(True) if any(same) else [_ids.gpu_of(e, visible, found) for e in listed].index(gpu))
    if gpu is None or _ids.instance_of(device.entry, found) or _ids.gpu_of(str(gpu.index), visible, found) is None:
        return device.entry
    return str(gpu.index)


def _all(found: tuple[Gpu, ...]) -> Iterator[Row]:
    for gpu in found:
        yield from (Row(None, None, gpu, part) for part in (gpu.instances if gpu.mig and gpu.instances else (None,)))


def lines(gpus: Gpus) -> list[str]:
    """For a person."""
    text = []
    visible = gpus.visible
    if visible.value is not None:
        text.append(f"{visible.variable}={one_line(visible.value)}: an id is an index into it")
    elif any(row.id and is_number(row.id) for row in gpus.rows):
        text.append(f"{visible.variable} is not set: an id is {_WHOSE_NUMBERS[visible.vendor]}")
    if not gpus.driver:
        word = ": ids are taken at your word" if gpus.rows else ""
        text.append(f"no {NAMES[visible.vendor]} driver was found here{word}")
    if gpus.rows:
        text += ["", *_table(gpus), ""]
    for row in gpus.rows:
        name = row.entry or (_name(row.told) if row.told else "")
        text += [f"slot {name}.{k} is leased by {one_line(str(row.leases[k]))}" for k in sorted(row.leases)]
    return [*text, *map(one_line, gpus.notes)]


def _table(gpus: Gpus) -> list[str]:
    table = [["id", "nvidia-smi", "name", "memory free", "processes", "uuid", "shown to a job as"]]
    for row in gpus.rows:
        gpu, it = row.gpu, row.told
        name = "" if it is None else one_line(it.name)
        if gpu and gpu.exclusive:
            name += " (exclusive: one process)"
        uuid = "" if it is None or it.uuid == row.id else one_line(it.uuid)
        number = "" if gpu is None or gpus.visible.vendor != "nvidia" else str(gpu.index)
        shown = row.entry or f"({_why_not(row, gpus.visible.variable)})"
        table.append([row.id or "-", number, name, _memory(it), _processes(it), uuid, shown])
    told = [i for i in range(len(table[0])) if any(row[i] for row in table[1:])]  # without a driver: the ids, no more
    table = [[row[i] for i in told] for row in table]
    widths = [max(map(cells, column)) for column in zip(*table, strict=True)]
    return [(_GAP + _GAP.join(map(pad, row, widths))).rstrip() for row in table]


def _why_not(row: Row, variable: str) -> str:
    if row.gpu and row.gpu.fault is not None:
        return f"refused by the driver: {one_line(row.gpu.fault)}"
    if row.gpu and row.gpu.mig and row.instance is None:
        return "in MIG mode, without an instance"
    return f"hidden by {variable}"


def _memory(device: Gpu | Instance | None) -> str:
    if device is None or device.total_bytes is None:
        return ""
    free = "?" if device.free_bytes is None else f"{device.free_bytes / 1e9:.1f}"
    return f"{free} of {device.total_bytes / 1e9:.1f} GB"


def _processes(device: Gpu | Instance | None) -> str:
    processes = device.processes or () if device else ()
    each = [f"{pid}" if used is None else f"{pid} ({used / 1e9:.1f} GB)" for pid, used in processes]
    more = [f"{len(each) - _SHOWN} more"] if len(each) > _SHOWN else []
    return ", ".join(each[:_SHOWN] + more)


def as_json(gpus: Gpus) -> dict[str, Any]:
    """For a script, as README describes it."""
    return {
        "cuda_visible_devices": gpus.visible.value if gpus.visible.variable == "CUDA_VISIBLE_DEVICES" else None,
        "vendor": gpus.visible.vendor,
        "variable": gpus.visible.variable,
        "visible": gpus.visible.value,
        "driver": gpus.driver,
        "gpus": [_row_as_json(row) for row in gpus.rows],
        "cpu_slots": gpus.cpu_slots,
        "notes": list(gpus.notes),
    }


def _row_as_json(row: Row) -> dict[str, Any]:
    gpu, it = row.gpu, row.told
    return {
        "id": row.id,
        "entry": row.entry,
        "number": gpu.index if gpu else None,
        "uuid": (it.uuid or None) if it else None,
        "name": (it.name or None) if it else None,
        "mig_instance": row.instance is not None if gpu else None,
        "exclusive": gpu.exclusive if gpu else None,
        "total_bytes": it.total_bytes if it else None,
        "free_bytes": it.free_bytes if it else None,
        "processes": None
        if it is None or it.processes is None
        else [{"pid": pid, "bytes": used} for pid, used in it.processes],
        "leases": [
            {"slot": number, "pid": holder.pid, "directory": holder.sweep_dir}
            for number, holder in sorted(row.leases.items())
        ],
        "fault": gpu.fault if gpu else None,
    }
