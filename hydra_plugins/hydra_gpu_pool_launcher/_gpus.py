"""What ``gpu-pool gpus`` says: which GPUs this machine has, and what an id means here, in this environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from . import _devices
from ._machine import Gpu, cores, discover
from ._settings import checked
from ._table import cells, pad
from ._tail import one_line

_GAP = "  "


@dataclass(frozen=True)
class Row:
    """A device. ``id``: what the key ``gpus`` calls it, None: it is hidden; ``entry``: as a job will be shown it.

    ``gpu``: what the driver says of it, None where it cannot be told which one it is, as of a MIG instance.
    """

    id: str | None
    entry: str | None
    gpu: Gpu | None


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
    return told(environ, discover(environ), cores())


def told(environ: Mapping[str, str], found: tuple[Gpu, ...] | None, cores: int) -> Gpus:
    """The same of what the driver has said. Pure. Raises ConfigurationError where no sweep could use these GPUs."""
    layout, notes = _devices.choose(checked({}, prefix=""), environ, found, cores)
    inherited = _devices.inherited(environ) is not None
    rows = [
        Row(str(i) if inherited else device.entry, device.entry, _devices.gpu_of(device.entry, environ, found))
        for i, device in enumerate(layout.devices)
        if device.entry
    ]
    seen = {row.gpu for row in rows}
    rows += [Row(None, None, gpu) for gpu in found or () if gpu not in seen]
    slots = layout.slots_per_device if layout.on_cpu else None
    return Gpus(environ.get("CUDA_VISIBLE_DEVICES"), found is not None, tuple(rows), slots, tuple(notes))


def lines(gpus: Gpus) -> list[str]:
    """For a person."""
    text = []
    if gpus.visible is not None:
        text.append(f"CUDA_VISIBLE_DEVICES={one_line(gpus.visible)}: an id is an index into it")
    elif gpus.rows:
        text.append("CUDA_VISIBLE_DEVICES is not set: an id is nvidia-smi's number")
    if not gpus.driver:
        text.append("no NVIDIA driver was found here" + (": ids are taken at your word" if gpus.rows else ""))
    if gpus.rows:
        text += ["", *_table(gpus), ""]
    return [*text, *map(one_line, gpus.notes)]


def _table(gpus: Gpus) -> list[str]:
    table = [["id", "nvidia-smi", "name", "uuid", "shown to a job as"]]
    for row in gpus.rows:
        gpu = row.gpu
        name = ("" if gpu is None else one_line(gpu.name)) + (
            " (exclusive: one process)" if gpu and gpu.exclusive else ""
        )
        number, uuid = ("", "") if gpu is None else (str(gpu.index), one_line(gpu.uuid))
        table.append([row.id or "-", number, name, uuid, row.entry or "(hidden by CUDA_VISIBLE_DEVICES)"])
    told = [i for i in range(5) if any(row[i] for row in table[1:])]  # without a driver: the ids, and no more
    table = [[row[i] for i in told] for row in table]
    widths = [max(map(cells, column)) for column in zip(*table, strict=True)]
    return [(_GAP + _GAP.join(map(pad, row, widths))).rstrip() for row in table]


def as_json(gpus: Gpus) -> dict[str, Any]:
    """For a script, as README describes it."""
    return {
        "cuda_visible_devices": gpus.visible,
        "driver": gpus.driver,
        "gpus": [
            {
                "id": row.id,
                "entry": row.entry,
                "number": row.gpu.index if row.gpu else None,
                "uuid": row.gpu.uuid if row.gpu else None,
                "name": row.gpu.name if row.gpu else None,
                "exclusive": row.gpu.exclusive if row.gpu else None,
            }
            for row in gpus.rows
        ],
        "cpu_slots": gpus.cpu_slots,
        "notes": list(gpus.notes),
    }
