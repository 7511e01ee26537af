"""What an id means: beside the list of devices that was inherited, and the GPUs that the driver tells of. Pure.

Ids are opaque strings: "3", "GPU-…", "MIG-…". An *entry* is what CUDA_VISIBLE_DEVICES, or its like of another vendor,
says to show one device. ``found`` is what ``discover`` says; None: nobody can say.
"""

from __future__ import annotations

from ._cards import Gpu, Instance
from ._errors import ConfigurationError
from ._model import Settings
from ._vendors import NAMES, READERS, Inherited, is_number


def usable(inherited: Inherited, found: tuple[Gpu, ...] | None) -> tuple[str, ...] | None:
    """The inherited list up to the first entry that the machine does not have. Refused where its reader sees none."""
    listed = inherited.entries
    if listed is None:
        return None
    if found is not None:
        for position, entry in enumerate(listed):
            here = int(entry) < len(found) if is_number(entry) else _may_be(entry, inherited, found)
            if not here:
                listed = listed[:position]
                break
    reader = READERS.get(inherited.vendor)
    if reader is None:
        return tuple(dict.fromkeys(listed))
    if len(set(map(is_number, listed))) > 1:
        raise ConfigurationError(f"{inherited}: {reader} reads no list of numbers and names; give all of one kind.")
    if len({identity(entry, inherited, found) for entry in listed}) < len(listed):
        raise ConfigurationError(f"{inherited}: with a device twice in it, {reader} would see none; name each once.")
    return listed


def entry_of(
    wanted: str,
    settings: Settings,
    inherited: Inherited,
    listed: tuple[str, ...] | None,
    found: tuple[Gpu, ...] | None,
) -> str:
    """The entry for the device that the user calls ``wanted``; ``listed``: what ``usable`` says.

    Raises ConfigurationError where there is no such device, with those that there are.
    """
    given = f"{settings.prefix}gpus={listing(settings)}"
    vendor = inherited.vendor
    if listed is not None:
        if not listed:
            raise ConfigurationError(f"{given}: {inherited} shows no device; unset it, or set gpus: [] for CPU slots.")
        if is_number(wanted):
            if int(wanted) < len(listed):
                return listed[int(wanted)]
            indices = "0" if len(listed) == 1 else f"0 to {len(listed) - 1}"
            raise ConfigurationError(f"{given}: {wanted} is no index into {inherited}; expected {indices}.")
        if wanted in listed:
            return wanted
        like = [e for e in listed if e.startswith(wanted) or identity(e, inherited, found).startswith(wanted)]
        if len(like) == 1:
            return like[0]
        why = "fits several entries" if like else "is no entry"
        raise ConfigurationError(f"{given}: {wanted} {why} of {inherited}; expected one of {', '.join(listed)}.")
    if wanted.startswith({"nvidia": (), "amd": ("MIG-",), "intel": ("GPU-", "MIG-")}[vendor]):
        raise ConfigurationError(f"{given}: {wanted} is no name of a GPU of {NAMES[vendor]}'s; give its number.")
    if found is None or wanted in [str(gpu.index) for gpu in found]:
        return wanted
    if uuid := _named(wanted, found):  # a number begins no UUID
        return uuid
    several = any(uuid.startswith(wanted) for uuid in _uuids(found))
    if not several and _may_be(wanted, inherited, found):
        return wanted
    if wanted.startswith("MIG-"):
        why = "fits several MIG instances" if several else "is no MIG instance"
        have = [f"{instance.uuid} (GPU {gpu.index})" for gpu in found for instance in gpu.instances]
        here = ", ".join(have) or "no MIG instance at all"
    else:
        why = "fits several GPUs" if several else "is no GPU"
        here = ", ".join(f"{gpu.index} ({gpu.uuid or gpu.fault or gpu.name})" for gpu in found) or "no GPU at all"
    raise ConfigurationError(f"{given}: {wanted} {why} of this machine, which has {here}.")


def gpu_of(entry: str, inherited: Inherited, found: tuple[Gpu, ...] | None) -> Gpu | None:
    """The GPU that an entry shows, all of it or an instance, where that can be told."""
    if is_number(entry):
        if not inherited.in_order:
            return None
        return next((gpu for gpu in found or () if gpu.index == int(entry)), None)
    name = _named(entry, found or ())
    if name is None:
        return None
    return next((gpu for gpu in found or () if name in _uuids((gpu,)) or _is_old_name(name, gpu)), None)


def instance_of(entry: str, found: tuple[Gpu, ...] | None) -> Instance | None:
    """The MIG instance that an entry shows, where that can be told."""
    name = _named(entry, found or ())
    return next((instance for gpu in found or () for instance in gpu.instances if instance.uuid == name), None)


def identity(entry: str, inherited: Inherited, found: tuple[Gpu, ...] | None) -> str:
    """The UUID behind an entry where it is known, else the entry (a number without its leading zeros)."""
    if not is_number(entry):
        return _named(entry, found or ()) or entry
    gpu = gpu_of(entry, inherited, found)
    return gpu.uuid if gpu and gpu.uuid else str(int(entry))


def listing(settings: Settings) -> str:
    """The key ``gpus`` as it was given."""
    return settings.gpus if isinstance(settings.gpus, str) else f"[{', '.join(settings.gpus)}]"


def _may_be(name: str, inherited: Inherited, found: tuple[Gpu, ...]) -> bool:
    """Whether the name is that of a device here, as far as it can be told."""
    if _named(name, found):
        return True
    # How AMD's are named has changed between versions of ROCm, and some have no name that the kernel tells.
    return inherited.vendor == "amd" and name.startswith("GPU-")


def _named(prefix: str, found: tuple[Gpu, ...]) -> str | None:
    """The only UUID that is this, or begins like this, if there is one; an old name of a MIG instance as it is."""
    uuids = _uuids(found)
    if prefix in uuids or any(_is_old_name(prefix, gpu) for gpu in found):
        return prefix
    like = [uuid for uuid in uuids if uuid.startswith(prefix)]
    return like[0] if len(like) == 1 else None


def _is_old_name(name: str, gpu: Gpu) -> bool:
    """Whether this is an instance of the GPU as CUDA has called it once, and still takes it: MIG-GPU-…/1/0."""
    return gpu.mig and bool(gpu.uuid) and name.startswith(f"MIG-{gpu.uuid}/")


def _uuids(found: tuple[Gpu, ...]) -> list[str]:
    known = [uuid for gpu in found for uuid in (gpu.uuid, *(instance.uuid for instance in gpu.instances))]
    return [uuid for uuid in known if uuid]
