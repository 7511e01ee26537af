"""The errors that gpu_pool itself has to tell; all of them pickle."""

from __future__ import annotations

from hydra.errors import CompactHydraException

from ._model import Job


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
