"""The values and errors that all rooms share: frozen dataclasses, enums, exceptions. No I/O, no clock.

The words are those of the field: a *job* is one point of the sweep, a *try* one process that runs it, a *slot* room for
one job at a time on one *device*, an *outcome* how a job ended.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from hydra.errors import CompactHydraException


class GpuPoolError(Exception):
    """Whatever gpu_pool itself has to say, as opposed to an exception of the user's task."""


class ConfigurationError(GpuPoolError, CompactHydraException):
    """What was asked for cannot be kept; nothing was started.

    Hydra shows a CompactHydraException as its sentence alone, without a stack of its own frames.
    """


class JobError(GpuPoolError):
    """A job ended without a result of its own: the common ground of the four kinds below.

    Attributes: ``job`` (its number), ``overrides`` (what it was started with), ``why`` (one sentence). They are also
    ``args``, in this order, so that the error pickles.
    """

    def __init__(self, job: int, overrides: tuple[str, ...], why: str) -> None:
        super().__init__(job, overrides, why)
        self.job = job
        self.overrides = overrides
        self.why = why

    def __str__(self) -> str:
        return f"{Job(self.job, self.overrides)} {self.why}"


class JobCrashedError(JobError):
    """The job's process was ended by a signal that nobody sent on purpose, or by an exit code of its own."""


class JobTimeoutError(JobError):
    """The job was stopped because one of its tries took longer than ``timeout_min``."""


class JobCancelledError(JobError):
    """The job was stopped, or never started, because somebody or something asked for it."""


class JobLostError(JobError):
    """What became of the job cannot be known: its process cannot be started, reaped or asked any more."""


JOB_ERRORS: dict[str, type[JobError]] = {
    error.__name__: error for error in (JobError, JobCrashedError, JobTimeoutError, JobCancelledError, JobLostError)
}
"""By the name that the journal has for them."""


class RemoteTraceback(Exception):
    """The traceback of an exception from a job's process, as text: the ``__cause__`` of that exception in main."""

    def __str__(self) -> str:
        where = self.args[1] if len(self.args) > 1 else "the job's process"
        return f"in {where}:\n\n{self.args[0]}"


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


@dataclass(frozen=True)
class Device:
    """One GPU or MIG instance, as CUDA_VISIBLE_DEVICES names it ("3", "GPU-…", "MIG-…"), or the CPU ("").

    ``total_bytes``: of its memory; None: nobody knows.
    """

    entry: str
    total_bytes: int | None = None

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

    CPU slots are slots on one device whose entry is "": to the schedule, room is room.
    """

    devices: tuple[Device, ...]
    slots_per_device: int
    devices_per_job: int = 1

    @property
    def on_cpu(self) -> bool:
        """True where no job sees a GPU."""
        return all(not device.entry for device in self.devices)

    @property
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
    """How a job ended, decided once. ``error_type`` names a class of this module unless the task raised it itself."""

    status: Status
    cause: Cause
    error_type: str | None = None
    error_text: str | None = None
    value: Any = None
    by_itself: bool = False  # return.pickle holds what it returned or raised


# --- events: what the world tells the schedule ---


@dataclass(frozen=True)
class Submitted:
    """New jobs, in the order in which they are to start."""

    jobs: tuple[Job, ...]


@dataclass(frozen=True)
class StartRefused:
    """The job could not be started; ``for_now``: it may be later (too many processes, too little memory)."""

    num: int
    why: str
    for_now: bool


@dataclass(frozen=True)
class Ending:
    """The job's own process is gone; what it left behind is being ended."""

    num: int


@dataclass(frozen=True)
class Gone:
    """The job's whole tree is gone and reaped."""

    num: int
    exit: Exit
    report: Report | None


@dataclass(frozen=True)
class Returned:
    """The answer to Interrupt or Kill where the job's own outcome was on disk before it: that outcome counts."""

    num: int


@dataclass(frozen=True)
class Saving:
    """The answer to Interrupt where the job has finished, and waits for a disk that does not take its result."""

    num: int


@dataclass(frozen=True)
class Abandoned:
    """The answer to Abandon, with what the job had to say before it got stuck."""

    num: int
    report: Report | None


@dataclass(frozen=True)
class Stop:
    """Everything is to end: politely with ``signum`` first, or at once where ``signum`` is SIGKILL."""

    why: str
    signum: int


CANCELLED_BY_HAND = "somebody cancelled it by hand"
"""Why, of a job that is stopped alone because somebody has asked for it."""


@dataclass(frozen=True)
class Cancel:
    """One job is to end, whether it runs or waits; the others go on."""

    num: int
    why: str


@dataclass(frozen=True)
class Held:
    """Nothing may start for now: it could not be recorded."""


@dataclass(frozen=True)
class Released:
    """Jobs may start again."""


@dataclass(frozen=True)
class Measured:
    """The answer to Look: the devices' free memory, in bytes, by their positions in ``Layout.devices``.

    A device without an entry, or with None: nobody can say. ``used``: what the processes of a job hold of a device, by
    the job's number and the device, as far as that is known.
    """

    free: Mapping[int, int | None]
    used: Mapping[tuple[int, int], int] = field(default_factory=dict)


Event = (
    Submitted
    | StartRefused
    | Returned
    | Saving
    | Ending
    | Gone
    | Abandoned
    | Stop
    | Cancel
    | Held
    | Released
    | Measured
)


# --- commands: what the schedule wants done, in this order ---


@dataclass(frozen=True)
class Start:
    """Fork try number ``attempt`` (from 1) of the job onto these slots: one of each of its devices, or all of them."""

    job: Job
    attempt: int
    slots: tuple[Slot, ...]


@dataclass(frozen=True)
class Interrupt:
    """Journal why, then send the signal to the job's process. Answered by Returned where it had ended by itself."""

    num: int
    why: str
    signum: int
    cause: Cause = Cause.CANCELLED


@dataclass(frozen=True)
class Kill:
    """SIGKILL to all that the job started, journalled like Interrupt where that did not come before."""

    num: int
    why: str


@dataclass(frozen=True)
class Abandon:
    """Wait no longer for this job's processes: they cannot be killed. Answered by Abandoned."""

    num: int


@dataclass(frozen=True)
class End:
    """The job is over: journal it."""

    job: Job
    attempt: int
    outcome: Outcome


@dataclass(frozen=True)
class Retry:
    """The try is over, and the job will have another one: journal how this one ended."""

    job: Job
    attempt: int
    outcome: Outcome


@dataclass(frozen=True)
class Look:
    """Ask the driver for the devices' memory. Answered by Measured, always, and in a bounded time."""


@dataclass(frozen=True)
class Scarce:
    """Tell that a device, with so many bytes free, has too little for a job to start; None: nobody can say how many."""

    device: int
    free: int | None


Command = Start | Interrupt | Kill | Abandon | End | Retry | Look | Scarce
