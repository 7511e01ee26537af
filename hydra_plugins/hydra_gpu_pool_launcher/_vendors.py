"""What shows a process the GPUs of each vendor: which variables, how an inherited one is read, what a job gets. Pure.

nvidia  CUDA_VISIBLE_DEVICES
amd     HIP_VISIBLE_DEVICES, which counts within ROCR_VISIBLE_DEVICES. HIP reads CUDA_VISIBLE_DEVICES, too, where
        the first is not set or empty, and libraries refuse two that differ: so both are set, or one
intel   ZE_AFFINITY_MASK: "0" is a device, "0.1" a tile of it. No documented value hides all: on CPU slots, jobs
        see what this process does
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from ._cards import Gpu
from ._model import Vendor
from ._settings import shown

NAMES: Mapping[Vendor, str] = {"nvidia": "NVIDIA", "amd": "AMD", "intel": "Intel"}

READERS: Mapping[Vendor, str] = {"nvidia": "CUDA", "amd": "torch"}
"""Who takes no list with a device twice in it, and none of numbers and names. Level Zero takes all of them."""

_CUDA, _HIP, _ROCR, _ZE = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"
_ORDER = "CUDA_DEVICE_ORDER"

#: What would silently beat the slot if a job's environment set it after us. NVIDIA_VISIBLE_DEVICES is not among them:
#: the container's runtime reads it, no process does.
VISIBILITY_VARIABLES = frozenset({_CUDA, _ORDER, _HIP, _ROCR, _ZE})

_NONE_OF_AMD = "-1"  # to HIP, an empty value hides nothing

_ENTRIES: Mapping[Vendor, re.Pattern[str]] = {
    "nvidia": re.compile(r"[0-9]{1,9}|(GPU|MIG)-.*", re.DOTALL),
    "amd": re.compile(r"[0-9]{1,9}|GPU-.*", re.DOTALL),
    "intel": re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})*"),
}


@dataclass(frozen=True)
class Inherited:
    """The list of devices with which this process was started. ``value``: as it is there; None: there is no such list.

    ``in_order``: its numbers are the driver's.
    """

    vendor: Vendor
    variable: str
    value: str | None
    in_order: bool = True

    def __str__(self) -> str:
        return f"{self.variable}={shown(self.value)}"

    @property
    def entries(self) -> tuple[str, ...] | None:
        """The devices in it (set to "": none, which is ()), None where there is no list.

        As its reader does: the first entry that is no device ends the list.
        """
        return None if self.value is None else _listed(self.vendor, self.value)


def inherited(environ: Mapping[str, str], vendor: Vendor = "nvidia") -> Inherited:
    """The list for this vendor's devices.

    Of AMD's, an empty HIP_VISIBLE_DEVICES is none, and one that says what ROCR_VISIBLE_DEVICES says, as schedulers set
    them, is the same list said twice: what is left to count in is ROCR_VISIBLE_DEVICES.
    """
    if vendor == "nvidia":
        return Inherited(vendor, _CUDA, environ.get(_CUDA), environ.get(_ORDER, "PCI_BUS_ID") == "PCI_BUS_ID")
    if vendor == "intel":
        return Inherited(vendor, _ZE, environ.get(_ZE) or None)
    for variable in (_HIP, _CUDA):
        value = environ.get(variable)
        if value is not None and (value or variable == _CUDA) and (not value or value != environ.get(_ROCR)):
            return Inherited(vendor, variable, value)
    if environ.get(_ROCR) == "":
        return Inherited(vendor, _ROCR, "")
    return Inherited(vendor, _HIP, None)


def is_number(entry: str) -> bool:
    """Whether the entry is a number, and no name."""
    return entry.isascii() and entry.isdigit() and len(entry) < 10


def _listed(vendor: Vendor, value: str) -> tuple[str, ...]:
    entries: list[str] = []
    for entry in map(str.strip, value.split(",")):
        if not _ENTRIES[vendor].fullmatch(entry):
            break
        # HIP takes "01" for no number.
        entries.append(str(int(entry)) if vendor == "amd" and is_number(entry) else entry)
    return tuple(entries)


def without_nvidia(environ: Mapping[str, str], *, amd: bool) -> tuple[Vendor, str | None]:
    """Whose GPUs are meant where NVIDIA's driver shows none, and a clause that says why, None where nothing tells.

    ``amd``: there are some of AMD's. Of Intel's, a laptop's own would be taken for one: they must be asked for.
    """
    signs: tuple[tuple[str, Vendor], ...] = ((_HIP, "amd"), (_ROCR, "amd"), (_ZE, "intel"))
    told = [(vendor, variable) for variable, vendor in signs if environ.get(variable)]
    if len({vendor for vendor, _ in told}) == 1:
        return told[0][0], f"{told[0][1]} is set, and no NVIDIA GPU was found"
    return ("amd", "AMD GPUs were found, and none of NVIDIA's") if amd else ("nvidia", None)


def none_shown(environ: Mapping[str, str]) -> bool:
    """True where nothing needs to be asked: CUDA_VISIBLE_DEVICES shows no device, and no other vendor's is named."""
    return inherited(environ).entries == () and not any(environ.get(variable) for variable in (_HIP, _ROCR, _ZE))


def within_rocr(found: tuple[Gpu, ...] | None, environ: Mapping[str, str]) -> tuple[Gpu, ...] | None:
    """AMD's GPUs as HIP numbers them: those in an inherited ROCR_VISIBLE_DEVICES, from 0; else all, as they are.

    A name that nobody here knows is taken at its word: how they are made has changed between versions of ROCm.
    """
    if _ROCR not in environ:
        return found
    gpus: list[Gpu] = []
    for entry in _listed("amd", environ[_ROCR]):
        here = [gpu for gpu in found or () if entry in (str(gpu.index), gpu.uuid)]
        if is_number(entry) and not here and found is not None:
            break
        gpu = here[0] if here else Gpu(0, "" if is_number(entry) else entry, "", known_as=known_as("amd", entry))
        gpus.append(replace(gpu, index=len(gpus)))
    return tuple(gpus)


def known_as(vendor: Vendor, entry: str) -> str | None:
    """What a device without a UUID is known by on this machine; None: by its entry."""
    return None if vendor == "nvidia" or entry.startswith("GPU-") else f"{vendor}-{entry}"


def showing(vendor: Vendor, entries: Iterable[str], environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that show a job these devices, and no others of this vendor's; ``environ``: what it gets besides.

    What is inherited for another vendor's devices stays as it is.
    """
    value = ",".join(entries)
    if vendor == "intel":
        return {_ZE: value}
    if vendor == "amd":
        return {_HIP: value, **({_CUDA: value} if _CUDA in environ else {})}
    return {_CUDA: value, **_order(environ)}


def hiding(vendor: Vendor, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that hide all devices, as far as any do: NVIDIA's always, AMD's where there may be some.

    ``vendor``: whose GPUs are here.
    """
    if vendor == "amd" or _HIP in environ or _ROCR in environ:
        return {_HIP: _NONE_OF_AMD, _CUDA: _NONE_OF_AMD}  # to CUDA, it is no device either
    return {_CUDA: "", **_order(environ)}


def _order(environ: Mapping[str, str]) -> dict[str, str]:
    """Nvidia-smi's numbers; CUDA's own default is fastest first."""
    return {} if _ORDER in environ else {_ORDER: "PCI_BUS_ID"}
