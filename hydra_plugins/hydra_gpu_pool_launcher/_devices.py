"""Which devices the user's ids mean, the slots that they make, and the environment that shows a job its own.

Ids are opaque strings from end to end: "3", "GPU-…", "MIG-…". Only ``layout`` asks the machine; the rest is pure.
"""

from __future__ import annotations

from collections.abc import Mapping

from ._errors import ConfigurationError
from ._machine import Gpu, cores, discover
from ._model import Device, Group, Layout, Settings, Slot
from ._settings import shown

_OTHER_FILTERS = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")

#: What would silently beat the slot if a job's environment set it after us. NVIDIA_VISIBLE_DEVICES is not among them:
#: the container's runtime reads it, no process does.
VISIBILITY_VARIABLES = frozenset({"CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", *_OTHER_FILTERS})


def layout(settings: Settings, environ: Mapping[str, str]) -> tuple[Layout, list[str]]:
    """``choose`` for this machine, asking the driver only where the answer matters. Runs in main, blocks for seconds.

    Raises ConfigurationError, also where ``auto`` rests on a driver that is there and does not answer: a night on the
    CPU instead would be worse.
    """
    found, lines = None, []
    if settings.gpus != () and inherited(environ) != ():
        try:
            found = discover(environ)
        except ConfigurationError as error:
            if settings.gpus == "auto" and inherited(environ) is None:
                raise ConfigurationError(
                    f"{settings.prefix}gpus=auto: {error}; repair it, name the GPUs, or set gpus: [] for CPU slots."
                ) from None
            lines = [f"ids are taken at their word: {error}"]
    chosen, more = choose(settings, environ, found, cores())
    if found is None and not lines and not chosen.on_cpu:
        lines = [
            f"GPU {', '.join(d.label for d in chosen.devices)}: taken at your word, no NVIDIA driver was found here"
        ]
    return chosen, lines + more


def inherited(environ: Mapping[str, str]) -> tuple[str, ...] | None:
    """The devices that CUDA_VISIBLE_DEVICES leaves us, or None where it is not set (set to "": none, which is ()).

    As CUDA reads it: the first entry that is no device ends the list.
    """
    value = environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return None
    entries: list[str] = []
    for entry in map(str.strip, value.split(",")):
        if not (_is_number(entry) or entry.startswith(("GPU-", "MIG-"))):
            break
        entries.append(entry)
    return tuple(entries)


def choose(
    settings: Settings, environ: Mapping[str, str], found: tuple[Gpu, ...] | None, cores: int
) -> tuple[Layout, list[str]]:
    """The slots that the settings mean on this machine, and what a person should know of it, a fact a line.

    ``found``: what ``discover`` says; None: nobody can say, so ids are taken at their word. ``cores``: the CPU slots
    where there are no GPUs and nobody set ``cpu_slots``. Pure. Raises ConfigurationError where the settings cannot be
    kept.
    """
    lines: list[str] = []
    value = environ.get("CUDA_VISIBLE_DEVICES", "")
    listed = _usable(environ, found) if settings.gpus else ()  # gpus: [] is a remedy: it works whatever was inherited
    if listed and len(listed) < value.count(",") + 1:
        lines.append(f"CUDA_VISIBLE_DEVICES={shown(value)} counts as far as {listed[-1]}: what follows is no GPU here")

    if settings.gpus == "auto":
        entries = listed if listed is not None else tuple(str(gpu.index) for gpu in found or ())
    else:
        once: dict[str, str] = {}
        for wanted in settings.gpus:
            entry = _entry(wanted, settings, environ, listed, found)
            once.setdefault(_identity(entry, environ, found), entry)
        entries = tuple(once.values())

    if not entries:
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
            why = "no GPU was found" if listed is None else f"CUDA_VISIBLE_DEVICES={shown(value)} shows none"
            lines.append(f"CPU only, {slots} at once: {why}")
        plan = Layout((Device(""),), slots)
        return plan, lines + _lines_of_ranks(settings, plan)

    _refuse(settings, environ, entries, found)
    plan = Layout(tuple(map(Device, entries)), settings.per_gpu, settings.gpus_per_job)
    if settings.ddp.nnodes > 1:  # job by job: each machine would choose its own order among several
        plan = Layout(plan.devices[: settings.gpus_per_job], 1, settings.gpus_per_job)
    if settings.one_gpu:
        lines.append(f"GPU {entries[0]} only (gpus={_listing(settings)} is an id, not a count)")
    if idle := len(plan.slots) % plan.devices_per_job:
        lines.append(
            f"{idle} of {len(plan.slots)} slots can never be used: a job takes {plan.devices_per_job} (gpus_per_job)"
        )
    return plan, lines + _lines_of_ranks(settings, plan)


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


def _refuse(
    settings: Settings, environ: Mapping[str, str], entries: tuple[str, ...], found: tuple[Gpu, ...] | None
) -> None:
    """Raise ConfigurationError where jobs could not use these GPUs as the settings say."""
    per_gpu, per_job, here = settings.per_gpu, settings.gpus_per_job, ", ".join(entries)
    prefix = settings.prefix
    for variable in _OTHER_FILTERS:
        if variable in environ:
            raise ConfigurationError(
                f"{variable}={shown(environ[variable])}: not supported yet, since two filters together can hide every "
                "GPU; unset it, or set gpus: [] for CPU slots."
            )
    if per_job > len(entries):
        raise ConfigurationError(
            f"{prefix}gpus_per_job={per_job}: expected at most {len(entries)}, the GPUs in use ({here})."
        )
    if per_job > 1 and any(entry.startswith("MIG-") for entry in entries):
        raise ConfigurationError(
            f"{prefix}gpus_per_job={per_job}: a process sees only one MIG instance of {here}; set it to 1, or use "
            "whole GPUs."
        )
    if per_job > 1 and len(set(map(_is_number, entries))) > 1:
        raise ConfigurationError(
            f"{prefix}gpus={_listing(settings)}: CUDA reads no list of numbers and names ({here}); with "
            f"gpus_per_job={per_job} give all by number, or all by name."
        )
    used = {_identity(entry, environ, found) for entry in entries}
    for gpu in found or ():
        if per_gpu > 1 and gpu.exclusive and gpu.uuid in used:
            raise ConfigurationError(
                f"{prefix}per_gpu={per_gpu}: GPU {gpu.index} ({gpu.name}) is in compute mode Exclusive_Process and "
                f"lets only one process in; set per_gpu: 1, or have 'nvidia-smi -i {gpu.index} -c DEFAULT' run."
            )


def visibility(layout: Layout, slots: tuple[Slot, ...], environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that show a job on these slots its own devices, and tell it which they are. Pure.

    To be set before any code of the user runs: CUDA reads them once.
    """
    entries = ",".join(dict.fromkeys(layout.devices[slot.device].entry for slot in slots))
    variables = {
        "CUDA_VISIBLE_DEVICES": entries,
        "GPU_POOL_GPUS": entries,
        "GPU_POOL_SLOT": ",".join(map(layout.label, slots)),
    }
    if "CUDA_DEVICE_ORDER" not in environ:
        variables["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # nvidia-smi's numbers; CUDA's own default is fastest first
    return variables


def gpu_of(entry: str, environ: Mapping[str, str], found: tuple[Gpu, ...] | None) -> Gpu | None:
    """The GPU that an entry of CUDA_VISIBLE_DEVICES shows, where that can be told. Pure."""
    uuid = _identity(entry, environ, found)
    return next((gpu for gpu in found or () if gpu.uuid == uuid), None)


def _is_number(entry: str) -> bool:
    return entry.isascii() and entry.isdigit() and len(entry) < 10


def _listing(settings: Settings) -> str:
    return settings.gpus if isinstance(settings.gpus, str) else f"[{', '.join(settings.gpus)}]"


def _identity(entry: str, environ: Mapping[str, str], found: tuple[Gpu, ...] | None) -> str:
    """The UUID behind an entry where it is known, else the entry (a number without its leading zeros)."""
    if not _is_number(entry):
        return _named(entry, found or ()) or entry
    if environ.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID") == "PCI_BUS_ID":  # in any other order, the numbers are not ours
        for gpu in found or ():
            if gpu.index == int(entry):
                return gpu.uuid
    return str(int(entry))


def _usable(environ: Mapping[str, str], found: tuple[Gpu, ...] | None) -> tuple[str, ...] | None:
    """The inherited list up to the first entry that the machine does not have. Refused where CUDA would see none."""
    listed = inherited(environ)
    if listed is None:
        return None
    if found is not None:
        for position, entry in enumerate(listed):
            here = int(entry) < len(found) if _is_number(entry) else entry.startswith("MIG-") or _named(entry, found)
            if not here:
                listed = listed[:position]
                break
    value = f"CUDA_VISIBLE_DEVICES={shown(environ['CUDA_VISIBLE_DEVICES'])}"
    if len(set(map(_is_number, listed))) > 1:
        raise ConfigurationError(f"{value}: CUDA reads no list of numbers and names; give all of one kind.")
    if len({_identity(entry, environ, found) for entry in listed}) < len(listed):
        raise ConfigurationError(f"{value}: with a device twice in it, CUDA would see none; name each once.")
    return listed


def _named(prefix: str, found: tuple[Gpu, ...]) -> str | None:
    """The only UUID that begins like this, if there is one."""
    uuids = [gpu.uuid for gpu in found if gpu.uuid.startswith(prefix)]
    return uuids[0] if len(uuids) == 1 else None


def _entry(
    wanted: str,
    settings: Settings,
    environ: Mapping[str, str],
    listed: tuple[str, ...] | None,
    found: tuple[Gpu, ...] | None,
) -> str:
    """What CUDA_VISIBLE_DEVICES has to say to show the device that the user calls ``wanted``."""
    given = f"{settings.prefix}gpus={_listing(settings)}"
    if listed is not None:
        value = f"CUDA_VISIBLE_DEVICES={shown(environ['CUDA_VISIBLE_DEVICES'])}"
        if not listed:
            raise ConfigurationError(f"{given}: {value} shows no device; unset it, or set gpus: [] for CPU slots.")
        if _is_number(wanted):
            if int(wanted) < len(listed):
                return listed[int(wanted)]
            indices = "0" if len(listed) == 1 else f"0 to {len(listed) - 1}"
            raise ConfigurationError(f"{given}: {wanted} is no index into {value}; expected {indices}.")
        if wanted in listed:
            return wanted
        like = [e for e in listed if e.startswith(wanted) or _identity(e, environ, found).startswith(wanted)]
        if len(like) == 1:
            return like[0]
        why = "fits several entries" if like else "is no entry"
        raise ConfigurationError(f"{given}: {wanted} {why} of {value}; expected one of {', '.join(listed)}.")
    if found is None or wanted.startswith("MIG-"):
        return wanted
    if wanted in [str(gpu.index) for gpu in found]:
        return wanted
    if uuid := _named(wanted, found):  # a number begins no UUID
        return uuid
    why = "fits several GPUs" if any(gpu.uuid.startswith(wanted) for gpu in found) else "is no GPU"
    here = ", ".join(f"{gpu.index} ({gpu.uuid})" for gpu in found) or "no GPU at all"
    raise ConfigurationError(f"{given}: {wanted} {why} of this machine, which has {here}.")
