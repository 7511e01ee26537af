"""The values that all rooms share: frozen dataclasses and enums. No I/O, no clock.

The words are those of the field: a *job* is one point of the sweep, a *try* one process that runs it, a *slot* room for
one job at a time on one *device*, an *outcome* how a job ended.
"""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass
from typing import Any, Literal


class Status(str, enum.Enum):
    """How a job ended; equal to its name as text.

    Hydra knows the first two; to it a CANCELLED job is a FAILED one with a JobCancelledError.
    """

    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    __str__ = str.__str__


class Cause(enum.Enum):
    """Why a job ended as it did."""

    RETURNED = "returned"
    ERROR = "error"
    OOM = "oom"
    CRASH = "crash"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    LOST = "lost"
    RESUMED = "resumed"  # it completed in an earlier sweep, and was not run again


@dataclass(frozen=True)
class Job:
    """One point of the sweep: its number in the whole sweep (``hydra.job.num``) and its overrides."""

    num: int
    overrides: tuple[str, ...]

    def __str__(self) -> str:
        return f"job {self.num} ({' '.join(self.overrides)})" if self.overrides else f"job {self.num}"


Vendor = Literal["nvidia", "amd", "intel"]
"""Whose GPUs the jobs of a sweep use."""


@dataclass(frozen=True)
class Device:
    """One GPU or MIG instance, as CUDA_VISIBLE_DEVICES names it ("3", "GPU-…", "MIG-…"), or the CPU ("").

    Those of other vendors, as their variable does.

    ``uuid`` and ``total_bytes``, its memory, are None where nobody can tell them.
    """

    entry: str
    uuid: str | None = None
    total_bytes: int | None = None
    known_as: str | None = None  # where its entry does not tell it from all other devices of this machine: "amd-2"

    @property
    def key(self) -> str:
        """What it is known by, on this machine and whatever CUDA_VISIBLE_DEVICES says: its UUID, else the entry.

        Of vendors other than NVIDIA, the vendor and the number: "amd-2", "intel-0".
        """
        entry = f"{int(self.entry)}" if self.entry.isdecimal() else self.entry  # CUDA takes "01" as well
        return self.uuid or self.known_as or entry

    @property
    def label(self) -> str:
        """What a person is shown."""
        return self.entry or "cpu"


@dataclass(frozen=True, order=True)
class Slot:
    """Room for one job at a time: the device's position in ``Layout.devices``, and the slot's number on it from 0."""

    device: int
    number: int


@dataclass(frozen=True)
class Layout:
    """Which slots there are, and how many a job takes, each on another device.

    CPU slots are slots on one device whose entry is "": to the schedule, room is room. ``vendor``: whose GPUs they are
    on; with CPU slots, whose are here and must be hidden.
    """

    devices: tuple[Device, ...]
    slots_per_device: int
    devices_per_job: int = 1
    vendor: Vendor = "nvidia"

    @property
    def on_cpu(self) -> bool:
        """True where no job sees a GPU."""
        return all(not device.entry for device in self.devices)

    @functools.cached_property
    def slots(self) -> tuple[Slot, ...]:
        """Every slot, device by device."""
        return tuple(Slot(d, k) for d in range(len(self.devices)) for k in range(self.slots_per_device))

    @property
    def jobs_at_once(self) -> int:
        """The most jobs that can ever run side by side."""
        return len(self.devices) * self.slots_per_device // self.devices_per_job

    def label(self, slot: Slot) -> str:
        """ "gpu.slot", as in the environment variable GPU_POOL_SLOT: the device as the driver knows it, "0.1"."""
        return f"{self.devices[slot.device].label}.{slot.number}"


@dataclass(frozen=True)
class DdpSettings:
    """The keys under ``ddp``, checked. None means that nobody set one: the default of that key holds."""

    nproc_per_node: int | None
    nnodes: int
    node_rank: int
    rdzv_endpoint: str
    rdzv_timeout_s: float
    max_restarts: int


@dataclass(frozen=True)
class Group:
    """The ranks that a job is made of. ``ranks``: on each machine."""

    ranks: int
    ddp: DdpSettings
    kill_grace_s: float


@dataclass(frozen=True)
class Settings:
    """Every key of ``hydra/launcher=gpu_pool``, checked, in the units of its name.

    ``prefix``: what stands before a key in a message, as the user knows it.
    """

    prefix: str

    gpus: Literal["auto"] | tuple[str, ...]
    vendor: Literal["auto"] | Vendor
    one_gpu: bool  # gpus was a single number: the log then says "GPU 2 only", since a count may have been meant
    per_gpu: int
    gpus_per_job: int
    cpu_slots: int | None
    mode: Literal["single", "ddp"]
    ddp: DdpSettings
    start_method: Literal["auto", "fork", "forkserver", "spawn"]
    threads_per_job: int | None  # None: auto
    stagger_s: float
    timeout_min: float | None
    kill_grace_s: float
    max_retries: int
    retry_on: frozenset[str]
    fail_fast: bool
    resume: bool
    min_free_gpu_mem_gb: float | None
    mem_caps: bool
    share: bool
    output: Literal["file", "tee"]
    progress: Literal["auto", "live", "log", "none"]


@dataclass(frozen=True)
class Policy:
    """How jobs are treated, whatever they are: the keys of these names that the schedule decides by, in seconds.

    ``retry_on``: the values of the Causes after which a job has one of its ``max_retries`` further tries.
    ``min_free``: bytes of a GPU's memory, below which no job starts there. ``settle_s``: how long the memory of an
    ended job is given to come back; 0 where no driver can be asked for it.
    """

    kill_grace_s: float
    timeout_s: float | None = None
    stagger_s: float = 0.0
    max_retries: int = 0
    retry_on: frozenset[str] = frozenset()
    fail_fast: bool = False
    min_free: int | None = None
    settle_s: float = 0.0


@dataclass(frozen=True)
class Exit:
    """How the process of one try ended, as the kernel tells it.

    ``code`` and ``signal``: exactly one of them is not None. ``cpu_s``: CPU seconds of the process and of its reaped
    children. ``peak_mb``: peak resident memory of the largest single process of them, in MB (1e6 bytes), counting what
    the app had at the fork.
    """

    code: int | None
    signal: int | None
    cpu_s: float
    peak_mb: float


@dataclass(frozen=True)
class Report:
    """What a job says of itself (outcome.json): it is there exactly when the job ended by itself."""

    status: Status
    error_type: str | None  # qualified name of the exception
    error_text: str | None
    value: Any  # the return value where JSON can say it, else None
    sha256: str  # of return.pickle; of late.pickle where the status is CANCELLED
    traceback: str | None = None
    overrides: tuple[str, ...] | None = None  # what it was started with; None where the file does not tell
    directory: str | None = None  # what Hydra made for it, relative to the sweep dir; None: nothing that is known
    out_of_memory: bool = False  # the exception, or one that led to it, says that a GPU's memory was full
    crashed: bool = False  # the error stands for a process of the job's that ended without saying why


@dataclass(frozen=True)
class Outcome:
    """How a job ended, decided once. ``error_type`` names a class of ``_errors`` unless the task raised it itself."""

    status: Status
    cause: Cause
    error_type: str | None = None
    error_text: str | None = None
    value: Any = None
    by_itself: bool = False  # return.pickle holds what it returned or raised
