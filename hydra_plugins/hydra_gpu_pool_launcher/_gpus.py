"""What ``gpu-pool gpus`` says: which GPUs this machine has, and what an id means here, in this environment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from . import _devices, _ids, _leases
from ._cards import Gpu, Instance
from ._line import Holder
from ._machine import cores, discover
from ._model import Device
from ._settings import checked
from ._table import cells, pad
from ._tail import one_line

_GAP = "  "
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
    """``visible``: CUDA_VISIBLE_DEVICES. ``driver``: there is one. ``cpu_slots``: where ``gpus=auto`` takes no GPUs."""

    visible: str | None
    driver: bool
    rows: tuple[Row, ...]
    cpu_slots: int | None
    notes: tuple[str, ...]


def ask(environ: Mapping[str, str]) -> Gpus:
    """What there is. Blocks while the driver answers. Raises ConfigurationError where it does not, or not well."""
    directory = _leases.place(environ)
    held: dict[str, Holder] = {}
    notes: tuple[str, ...] = ()
    try:
        held = _leases.holders(directory)
    except OSError as error:
        notes = (f"who leases what cannot be read in {directory}: {error.strerror}",)
    gpus = told(environ, discover(environ), cores(), held)
    return replace(gpus, notes=gpus.notes + notes)


def told(
    environ: Mapping[str, str], found: tuple[Gpu, ...] | None, cores: int, held: Mapping[str, Holder] = NOBODY
) -> Gpus:
    """The same of what the driver has said, and of ``_leases.holders``. Pure.

    Raises ConfigurationError where no sweep could use these GPUs.
    """
    layout, notes = _devices.choose(checked({}, prefix=""), environ, found, cores)
    rows = [
        Row(
            _id(device, environ, found),
            device.entry,
            _ids.gpu_of(device.entry, environ, found),
            _ids.instance_of(device.entry, found),
            _leases_of(device.key, held),
        )
        for device in layout.devices
        if device.entry
    ]
    seen = {row.told for row in rows}
    for row in _all(found or ()):
        if row.told not in seen:
            rows.append(replace(row, leases=_leases_of(row.told.uuid, held)) if row.told else row)
    slots = layout.slots_per_device if layout.on_cpu else None
    return Gpus(environ.get("CUDA_VISIBLE_DEVICES"), found is not None, tuple(rows), slots, tuple(notes))


def _leases_of(key: str, held: Mapping[str, Holder]) -> dict[int, Holder]:
    slots = ((name.rpartition("."), holder) for name, holder in held.items())
    return {int(number): holder for (device, _, number), holder in slots if device == _leases.file_name(key)}


def _id(device: Device, environ: Mapping[str, str], found: tuple[Gpu, ...] | None) -> str:
    gpu = _ids.gpu_of(device.entry, environ, found)
    listed = _ids.usable(environ, found)
    if listed is not None:  # an instance may be there by its GPU
        same = [entry == device.entry for entry in listed]
        return str(same.index(True) if any(same) else [_ids.gpu_of(e, environ, found) for e in listed].index(gpu))
    if gpu is None or _ids.instance_of(device.entry, found) or _ids.gpu_of(str(gpu.index), environ, found) is None:
        return device.entry
    return str(gpu.index)


def _all(found: tuple[Gpu, ...]) -> Iterator[Row]:
    for gpu in found:
        yield from (Row(None, None, gpu, part) for part in (gpu.instances if gpu.mig and gpu.instances else (None,)))


def lines(gpus: Gpus) -> list[str]:
    """For a person."""
    text = []
    if gpus.visible is not None:
        text.append(f"CUDA_VISIBLE_DEVICES={one_line(gpus.visible)}: an id is an index into it")
    elif any(row.id and _ids.is_number(row.id) for row in gpus.rows):
        text.append("CUDA_VISIBLE_DEVICES is not set: an id is nvidia-smi's number")
    if not gpus.driver:
        text.append("no NVIDIA driver was found here" + (": ids are taken at your word" if gpus.rows else ""))
    if gpus.rows:
        text += ["", *_table(gpus), ""]
    for row in gpus.rows:
        name = row.entry or (row.told.uuid if row.told else "")
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
        number = "" if gpu is None else str(gpu.index)
        shown = row.entry or f"({_why_not(row)})"
        table.append([row.id or "-", number, name, _memory(it), _processes(it), uuid, shown])
    told = [i for i in range(len(table[0])) if any(row[i] for row in table[1:])]  # without a driver: the ids, no more
    table = [[row[i] for i in told] for row in table]
    widths = [max(map(cells, column)) for column in zip(*table, strict=True)]
    return [(_GAP + _GAP.join(map(pad, row, widths))).rstrip() for row in table]


def _why_not(row: Row) -> str:
    if row.gpu and row.gpu.fault is not None:
        return f"refused by the driver: {one_line(row.gpu.fault)}"
    if row.gpu and row.gpu.mig and row.instance is None:
        return "in MIG mode, without an instance"
    return "hidden by CUDA_VISIBLE_DEVICES"


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
        "cuda_visible_devices": gpus.visible,
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
