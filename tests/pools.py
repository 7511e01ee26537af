"""What several tests do with a pool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydra_plugins.hydra_gpu_pool_launcher import GpuPool, JobOutcome


def outcomes(directory: Path, function: Any, *calls: dict[str, Any], **config: Any) -> list[JobOutcome]:
    """One outcome per call, on two CPU slots unless told otherwise."""
    return GpuPool(dir=directory, **{"cpu_slots": 2, **config}).map(function, calls)


def outcome(directory: Path, function: Any, **kwargs: Any) -> JobOutcome:
    """The outcome of one call."""
    return outcomes(directory, function, kwargs)[0]


def value(directory: Path, function: Any, **kwargs: Any) -> Any:
    """What one call returned; raises what it raised."""
    result = outcome(directory, function, **kwargs)
    if result.error is not None:
        raise result.error
    return result.value
