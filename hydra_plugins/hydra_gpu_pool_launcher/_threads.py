"""How many CPU threads the numeric libraries of a job may use: by their variables, or told, where they are loaded."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Mapping
from typing import Any

from . import _interpreter

VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
"""What the numeric libraries read when they are loaded; the first is the one that all of them honour."""


OURS = "GPU_POOL_THREADS"
"""How many threads gpu_pool has set for a job, in the job's environment."""


def are_chosen(environ: Mapping[str, str], set_later: Collection[str] = ()) -> bool:
    """Whether the user has set one of the variables, or will have, by these names: then none is added.

    Half of a choice would beat the other half.
    """
    return any(environ.get(name) or name in set_later for name in VARIABLES)


def variables(threads: int | None, environ: Mapping[str, str]) -> dict[str, str]:
    """What is set for a job that may use so many threads; nothing where the user chose. None: the user did."""
    if threads is None or are_chosen(environ):
        return {}
    return dict.fromkeys((*VARIABLES, OURS), str(threads))


def without_ours(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that is a job itself, without what is no choice of the user's."""
    ours = environ.get(OURS)
    of_ours = {OURS, *(name for name in VARIABLES if environ.get(name) == ours)} if ours is not None else set()
    return {name: value for name, value in environ.items() if name not in of_ours}


@functools.cache
def _libraries() -> list[tuple[Any, int]]:
    """The numeric libraries that are loaded when this is first called, and how many threads each uses then.

    Those that come later in the same process read their variables. To find them, and what finds them, takes longer than
    all else that a job does before its task.
    """
    from threadpoolctl import ThreadpoolController

    return [(library, library.num_threads) for library in ThreadpoolController().lib_controllers]


def look_for_libraries() -> None:
    """Find what each job, or rank, would have to find by itself. Runs in the process that forks them, before that."""
    _libraries.cache_clear()  # what its own parent has found is not all that is loaded here
    with contextlib.suppress(BaseException):  # an import of the user's that fails, or exits: the jobs say so
        _libraries()


def apply(threads: int) -> None:
    """Tell the numeric libraries that are loaded already, and do not read their variables again.

    Runs in the job, after ``pause_openmp`` in the process that forked it.
    """
    _tell_libraries(threads)
    torch = _interpreter.loaded_torch()
    if torch is not None and hasattr(torch, "set_num_threads"):
        torch.set_num_threads(threads)


def apply_before(threads: int | None) -> None:
    """The same as far as a job inherits it. Runs in the process that forks jobs, before those of a launch.

    OpenBLAS, told in a fork, starts the threads that it had in the parent, and each of them spins for a tenth of a
    second, whoever needs the core; told in the parent, it starts none. None: as they were.
    """
    with contextlib.suppress(Exception):  # see ``look_for_libraries``
        _tell_libraries(threads)


def _tell_libraries(threads: int | None) -> None:
    for library, before in _libraries():
        wanted = before if threads is None else threads
        if library.num_threads != wanted:
            library.set_num_threads(wanted)
