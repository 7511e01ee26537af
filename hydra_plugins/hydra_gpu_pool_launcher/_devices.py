"""Which devices the settings mean, the slots that they make, and the environment that shows a job its own.

Only ``layout`` asks the machine; the rest is pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ._caps import limits
from ._cards import Gpu, Instance
from ._errors import ConfigurationError
from ._ids import entry_of, gpu_of, identity, instance_of, listing, usable
from ._machine import Found, cores, look, mps
from ._model import Device, Group, Layout, Settings, Slot, Vendor
from ._sysfs import amd
from ._vendors import NAMES, READERS, Inherited, hiding, inherited, is_number, known_as, none_shown, showing


def layout(settings: Settings, environ: Mapping[str, str]) -> tuple[Layout, list[str]]:
    """``choose`` for this machine, asking the driver only where the answer matters. Runs in main, blocks for seconds.

    Raises ConfigurationError, also where ``auto`` rests on a driver that is there and does not answer: a night on the
    CPU instead would be worse.
    """
    found, lines = Found(), list[str]()
    if settings.gpus != () and not (settings.vendor in {"auto", "nvidia"} and none_shown(environ)):
        try:
            found = look(settings.vendor, environ)
        except ConfigurationError as error:
            if settings.gpus == "auto" and inherited(environ).value is None:
                raise ConfigurationError(
                    f"{settings.prefix}gpus=auto: {error}; repair it, name the GPUs, or set gpus: [] for CPU slots."
                ) from None
            lines = [f"ids are taken at their word: {error}"]
    vendor, gpus = found.vendor, found.gpus
    if vendor == "intel" and settings.gpus != "auto":
        gpus = None  # Level Zero may count tiles, which nobody here can see
    chosen, more = choose(settings, environ, gpus, cores(), mps=mps(environ), vendor=vendor)
    of_memory = _lines_of_memory(settings, chosen)
    if chosen.on_cpu:
        hidden = replace(chosen, vendor="amd") if settings.vendor == "amd" or amd() else chosen
        return hidden, lines + more + of_memory
    if found.why is not None:
        lines = [f"vendor: {vendor}, since {found.why}"]
    if gpus is None and not any(line.startswith("ids are") for line in lines):
        why = f"no {NAMES[vendor]} driver was found here" if vendor != "intel" else "Intel's driver is not asked"
        lines.append(f"GPU {', '.join(d.label for d in chosen.devices)}: taken at your word, {why}")
    return chosen, lines + more + of_memory


def least_free(settings: Settings, layout: Layout) -> int | None:
    """Bytes of a GPU's memory, below which no job starts there; None: any amount will do. Pure."""
    return None if layout.on_cpu else round((settings.min_free_gpu_mem_gb or 0) * 1e9) or None


def _lines_of_memory(settings: Settings, layout: Layout) -> list[str]:
    """Refused where so much can never be free, or where nobody could tell."""
    key, least = f"{settings.prefix}min_free_gpu_mem_gb={settings.min_free_gpu_mem_gb}", least_free(settings, layout)
    if settings.min_free_gpu_mem_gb and layout.on_cpu:
        return [f"{key} is ignored: CPU slots have no GPU memory"]
    if least is not None and layout.vendor != "nvidia":
        raise ConfigurationError(
            f"{key}: the memory of {NAMES[layout.vendor]}'s GPUs is not asked for, so nobody could say when so much of "
            "it is free; leave it at null."
        )
    for device in layout.devices if least is not None else ():
        name = f"GPU {device.label}" if device.label.isdigit() else device.label
        if device.total_bytes is None:
            raise ConfigurationError(
                f"{key}: no NVIDIA driver says how much memory {name} has, so nobody could say when so much of it is "
                "free; leave it at null."
            )
        if least is not None and least > device.total_bytes:
            raise ConfigurationError(f"{key}: expected at most {device.total_bytes / 1e9:g}, all that {name} has.")
    return []


def choose(
    settings: Settings,
    environ: Mapping[str, str],
    found: tuple[Gpu, ...] | None,
    cores: int,
    *,
    mps: bool = False,
    vendor: Vendor = "nvidia",
) -> tuple[Layout, list[str]]:
    """The slots that the settings mean on this machine, and what a person should know of it, a fact a line.

    ``found``: what ``look`` says; None: nobody can say, so ids are taken at their word. ``cores``: the CPU slots where
    there are no GPUs and nobody set ``cpu_slots``. ``mps``: a server lets several processes onto an exclusive GPU.
    ``vendor``: whose GPUs they are. Pure. Raises ConfigurationError where the settings cannot be kept.
    """
    lines: list[str] = []
    given = inherited(environ, vendor)
    listed = usable(given, found) if settings.gpus else ()  # gpus: [] is a remedy: it works whatever was inherited
    if listed and len(listed) < (given.value or "").count(",") + 1:
        lines.append(f"{given} counts as far as {listed[-1]}: what follows is no GPU here")

    asked: list[tuple[str, Gpu | None]]
    if settings.gpus != "auto":
        entries = tuple(entry_of(wanted, settings, given, listed, found) for wanted in settings.gpus)
        asked = [(entry, gpu_of(entry, given, found)) for entry in entries]
    elif listed is not None:
        asked = [(entry, gpu_of(entry, given, found)) for entry in listed]
    else:
        asked = [(str(gpu.index), gpu) for gpu in found or ()]
    devices, more = _offered(settings, given, asked, found or ())
    lines += more

    if not devices:
        if settings.gpus_per_job > 1:
            remedy = "leave it at 1"
            if settings.mode == "ddp":
                remedy += f", and set {settings.prefix}ddp.nproc_per_node to the number of ranks"
            raise ConfigurationError(
                f"{settings.prefix}gpus_per_job={settings.gpus_per_job}: there are only CPU slots; {remedy}."
            )
        slots = settings.cpu_slots or max(1, cores // (settings.ddp.nproc_per_node or 1))
        if settings.ddp.nnodes > 1:
            slots = 1
        if settings.gpus == "auto":
            whose = "" if vendor == "nvidia" else f"{NAMES[vendor]} "
            why = f"no {whose}GPU was found" if listed is None else f"{given} shows none"
            lines.append(f"CPU only, {slots} at once: {why}")
        plan = Layout((Device(""),), slots, vendor=vendor)
        return plan, lines + _lines_of_ranks(settings, plan)

    _refuse(settings, READERS.get(vendor), devices)
    lines += _lines_of_exclusive(settings, devices, found or (), mps=mps)
    plan = Layout(devices, settings.per_gpu, settings.gpus_per_job, vendor)
    if settings.ddp.nnodes > 1:  # job by job: each machine would choose its own order among several
        plan = replace(plan, devices=plan.devices[: settings.gpus_per_job], slots_per_device=1)
    if settings.one_gpu:
        lines.append(f"GPU {asked[0][0]} only (gpus={listing(settings)} is an id, not a count)")
    if idle := len(plan.slots) % plan.devices_per_job:
        lines.append(
            f"{idle} of {len(plan.slots)} slots can never be used: a job takes {plan.devices_per_job} (gpus_per_job)"
        )
    return plan, lines + _lines_of_ranks(settings, plan)


def _offered(
    settings: Settings,
    inherited: Inherited,
    asked: Iterable[tuple[str, Gpu | None]],
    found: tuple[Gpu, ...],
) -> tuple[tuple[Device, ...], list[str]]:
    """The devices behind these entries, each once: a GPU in MIG mode is its instances.

    What cannot be used is left out by ``auto``, with a line. Raises ConfigurationError where it was asked for by its
    id, and where ``auto`` is left with nothing: a night on the CPU instead would be worse.
    """
    # CUDA may count otherwise than nvidia-smi: in another order, or past what it cannot open or show.
    by_number = inherited.in_order and not any(gpu.mig or gpu.fault is not None for gpu in found)
    devices: dict[str, Device] = {}
    lines, faults = [], []
    for entry, gpu in asked:
        if gpu is None:
            name = known_as(inherited.vendor, entry)
            devices.setdefault(identity(entry, inherited, found), Device(entry, known_as=name))
        elif why := _why_unusable(gpu):
            if settings.gpus != "auto":
                raise ConfigurationError(
                    f"{settings.prefix}gpus={listing(settings)}: GPU {gpu.index} cannot be used: {why}; repair "
                    "that, or name other GPUs."
                )
            faults.append(f"GPU {gpu.index}: {why}")
            lines.append(f"GPU {gpu.index} is left out: {why}")
        elif entry.startswith("MIG-"):
            instance = instance_of(entry, found) or Instance(entry)
            devices.setdefault(instance.uuid, Device(entry, instance.uuid, instance.total_bytes))
        elif gpu.mig:
            count = len(gpu.instances)
            what = "its instance is" if count == 1 else f"its {count} instances are"
            lines.append(f"GPU {gpu.index} is in MIG mode: {what} used")
            for instance in gpu.instances:
                devices.setdefault(instance.uuid, Device(instance.uuid, instance.uuid, instance.total_bytes))
        else:
            shown_as = entry if by_number or not is_number(entry) else gpu.uuid
            device = Device(shown_as, gpu.uuid or None, gpu.total_bytes, gpu.known_as)
            devices.setdefault(device.key, device)
    if faults and not devices:
        raise ConfigurationError(
            f"{settings.prefix}gpus=auto: no GPU can be used ({'; '.join(faults)}); repair that, or set gpus: [] for "
            "CPU slots."
        )
    return tuple(devices.values()), list(dict.fromkeys(lines))  # a GPU may have been named twice


def _why_unusable(gpu: Gpu) -> str | None:
    if gpu.fault is not None:
        return f"the driver refuses it ({gpu.fault.rstrip('.')})"
    if gpu.mig and not gpu.instances:
        return "it is in MIG mode, and no instance of it is there"
    return None


def group(settings: Settings, layout: Layout) -> Group | None:
    """The ranks that each job is made of; None: it is a process like any other."""
    if settings.mode == "single":
        return None
    ranks = settings.ddp.nproc_per_node or (1 if layout.on_cpu else layout.devices_per_job)
    return Group(ranks, settings.ddp, settings.kill_grace_s)


def _lines_of_ranks(settings: Settings, layout: Layout) -> list[str]:
    wanted = group(settings, layout)
    if wanted is None:
        return []
    ranks, gpus = wanted.ranks, layout.devices_per_job
    lines = [f"ddp: each job is a group of {ranks} rank{'' if ranks == 1 else 's'}"]
    if ranks > gpus and not layout.on_cpu:
        lines[0] += f" on {gpus} GPU{'' if gpus == 1 else 's'}, where NCCL lets no two share one; gloo does"
    if wanted.ddp.nnodes > 1:
        lines[0] += f" on each of {wanted.ddp.nnodes} machines, one job at a time"
    return lines


def _refuse(settings: Settings, reader: str | None, devices: tuple[Device, ...]) -> None:
    """Raise ConfigurationError where jobs could not use these GPUs as the settings say."""
    entries = [device.entry for device in devices]
    per_job, here = settings.gpus_per_job, ", ".join(entries)
    prefix = settings.prefix
    if per_job > 1 and any(entry.startswith("MIG-") for entry in entries):
        raise ConfigurationError(
            f"{prefix}gpus_per_job={per_job}: a process sees only one MIG instance of {here}; set it to 1, or use "
            "whole GPUs."
        )
    if per_job > len(entries):
        raise ConfigurationError(
            f"{prefix}gpus_per_job={per_job}: expected at most {len(entries)}, the GPUs in use ({here})."
        )
    if per_job > 1 and reader is not None and len(set(map(is_number, entries))) > 1:
        raise ConfigurationError(
            f"{prefix}gpus={listing(settings)}: {reader} reads no list of numbers and names ({here}); with "
            f"gpus_per_job={per_job} give all by number, or all by name."
        )


def _lines_of_exclusive(
    settings: Settings, devices: tuple[Device, ...], found: tuple[Gpu, ...], *, mps: bool
) -> list[str]:
    """What to know where several processes shall share a GPU that lets one in; refused where nothing lets them."""
    used = {device.key for device in devices}
    exclusive = [
        gpu for gpu in found if gpu.exclusive and used & {gpu.uuid, *(instance.uuid for instance in gpu.instances)}
    ]
    ranks = settings.ddp.nproc_per_node or 1
    if settings.per_gpu > 1:
        key, value, remedy = "per_gpu", settings.per_gpu, "per_gpu: 1"
    elif ranks > settings.gpus_per_job:
        key, value, remedy = "ddp.nproc_per_node", ranks, "it to null, a rank for each GPU"
    else:
        return []
    if exclusive and mps:
        which = ", ".join(str(gpu.index) for gpu in exclusive)
        return [f"GPU {which} in compute mode Exclusive_Process: shared by way of the MPS server that is here"]
    if exclusive:
        gpu = exclusive[0]
        raise ConfigurationError(
            f"{settings.prefix}{key}={value}: GPU {gpu.index} ({gpu.name}) is in compute mode Exclusive_Process and "
            f"lets only one process in; set {remedy}, or have 'nvidia-smi -i {gpu.index} -c DEFAULT' run."
        )
    return []


def environment(
    layout: Layout,
    mem_caps: bool,
    set_later: frozenset[str],
    slots: Sequence[Slot],
    environ: Mapping[str, str],
) -> dict[str, str]:
    """What is set for a job on these slots because of its devices: ``visibility``, and with ``mem_caps`` its limits.

    ``environ``: what it gets besides, from the user; ``set_later``: the names of what the user has set in its process.
    """
    users = {*environ, *set_later}
    return {**visibility(layout, slots, environ), **(limits(layout, slots, users) if mem_caps else {})}


def visibility(layout: Layout, slots: Sequence[Slot], environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that show a job on these slots its own devices, and tell it which they are. Pure.

    To be set before any code of the user runs: CUDA reads them once.
    """
    entries = list(dict.fromkeys(layout.devices[slot.device].entry for slot in slots))
    seen = hiding(layout.vendor, environ) if layout.on_cpu else showing(layout.vendor, entries, environ)
    return {**seen, "GPU_POOL_GPUS": ",".join(entries), "GPU_POOL_SLOT": ",".join(map(layout.label, slots))}
