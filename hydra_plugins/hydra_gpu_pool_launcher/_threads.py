"""How many CPU threads the numeric libraries of a job may use: by their variables, or told, where they are loaded."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from typing import Any

from . import _interpreter

VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
"""What the numeric libraries read when they are loaded; the first is the one that all of them honour."""


def variables(threads: int, environ: Mapping[str, str]) -> dict[str, str]:
    """The thread variables for a job that may use so many threads; what ``environ`` sets already is left out.

    Where the user set one of them, none is added: half of a choice would beat the other half.
    """
    if any(environ.get(name) for name in VARIABLES):
        return {}
    return dict.fromkeys(VARIABLES, str(threads))


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
