"""The GPUs of AMD and Intel, as the kernel tells of them in files: no library is loaded, no driver asked."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from ._cards import Gpu
from ._vendors import known_as

KFD = "/sys/class/kfd/kfd/topology/nodes"  # AMD's compute driver: CPUs and GPUs, in the order in which HIP counts
DRM = "/sys/class/drm"
_INTEL = "0x8086"


def amd() -> tuple[Gpu, ...] | None:
    """AMD's GPUs in HIP's order, whatever is set; None: their driver is not there.

    In a container, those that it may not use are left out, as HIP does: they cannot be read.
    """
    try:
        nodes = sorted(filter(str.isdigit, os.listdir(KFD)), key=int)
    except OSError:
        return None
    gpus: list[Gpu] = []
    for node in nodes:
        lines = (_read(KFD, node, "properties") or "").splitlines()
        properties = {name: value for name, _, value in (line.partition(" ") for line in lines)}
        if _number(_read(KFD, node, "gpu_id")) and _number(properties.get("simd_count")):  # else it is a CPU
            unique = _number(properties.get("unique_id"))
            minor = _number(properties.get("drm_render_minor"))
            gpus.append(
                Gpu(
                    index=len(gpus),
                    uuid=f"GPU-{unique:016x}" if unique else "",  # as HIP names it
                    name=_read(DRM, f"renderD{minor}", "device", "product_name") or "",
                    known_as=known_as("amd", str(len(gpus))),
                )
            )
    return tuple(gpus)


def intel() -> tuple[Gpu, ...]:
    """Intel's GPUs, numbered in the order of their places on the bus."""
    places = sorted(
        os.path.realpath(os.path.join(DRM, name, "device"))
        for name in _listed(DRM)
        if re.fullmatch(r"renderD\d+", name) and _read(DRM, name, "device", "vendor") == _INTEL
    )
    return tuple(
        Gpu(index, "", _read(place, "product_name") or "", known_as=known_as("intel", str(index)))
        for index, place in enumerate(places)
    )


def _listed(directory: str) -> Iterator[str]:
    try:
        yield from os.listdir(directory)
    except OSError:
        pass


def _read(*path: str) -> str | None:
    """The text of a file, stripped; None where there is none, or it may not be read."""
    try:
        with open(os.path.join(*path), encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return None


def _number(text: str | None) -> int:
    return int(text) if text and text.isascii() and text.isdigit() else 0
