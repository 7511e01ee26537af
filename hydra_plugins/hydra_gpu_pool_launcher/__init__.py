"""gpu_pool: a Hydra launcher that runs a sweep's jobs side by side on a machine's GPUs.

With Hydra, ``hydra/launcher=gpu_pool`` is all there is to it. For plain Python, this package has ``GpuPool`` and the
errors, imported when they are first asked for: Hydra imports this module in every app of the environment.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._errors import ConfigurationError as ConfigurationError
    from ._errors import GpuPoolError as GpuPoolError
    from ._errors import JobCancelledError as JobCancelledError
    from ._errors import JobCrashedError as JobCrashedError
    from ._errors import JobError as JobError
    from ._errors import JobLostError as JobLostError
    from ._errors import JobTimeoutError as JobTimeoutError
    from ._map import GpuPool as GpuPool
    from ._map import JobOutcome as JobOutcome
    from ._model import Status as Status
    from ._torchrun import is_main_rank as is_main_rank

__version__ = "0.1.0.dev0"

__all__ = [
    "ConfigurationError",
    "GpuPool",
    "GpuPoolError",
    "JobCancelledError",
    "JobCrashedError",
    "JobError",
    "JobLostError",
    "JobOutcome",
    "JobTimeoutError",
    "Status",
    "is_main_rank",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in {"GpuPool", "JobOutcome"}:
        from . import _map

        return getattr(_map, name)
    from . import _errors, _model, _torchrun

    return getattr({"is_main_rank": _torchrun, "Status": _model}.get(name, _errors), name)
