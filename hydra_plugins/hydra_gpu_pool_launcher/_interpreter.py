"""What of this interpreter's state a fork breaks or copies: CUDA, OpenMP, locks, random numbers, threads.

Asked in main before a fork, mended in the job after it. No function here imports a library that is not imported yet:
whatever is not in sys.modules has no state.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import gc
import logging
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

from ._torchrun import without_ranks

_CUDA_ERROR_NOT_INITIALIZED = 3
_OMP_PAUSE_HARD = 2

_OF_ONE_WANDB_RUN = {"WANDB_SERVICE", "WANDB_RUN_ID"}
"""What wandb.init() sets in the environment, for the processes that belong to its run."""

_GPUS_OF_TORCH = ("torch.cuda", "torch.xpu")
"""CUDA or, under the same name, HIP; Level Zero."""

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
"""What the numeric libraries read when they are loaded; the first is the one that all of them honour."""


def other_threads() -> list[str]:
    """The names of the Python threads of this process beside the calling one."""
    return [thread.name for thread in threading.enumerate() if thread is not threading.current_thread()]


def wandb_run() -> bool:
    """True where a run of Weights & Biases is active here: every fork would log to it, through one connection."""
    return getattr(sys.modules.get("wandb"), "run", None) is not None


def environ_for_jobs() -> dict[str, str]:
    """This process's environment as jobs may have it: without what would make ranks of them.

    And without what wandb has set for the run of this process alone. Of those variables, jobs get what was there when
    this program was started: a run that the user names for all of them is the user's business.
    """
    environ = without_ranks(os.environ)
    try:
        with open("/proc/self/environ", "rb") as file:
            at_start = dict(entry.partition(b"=")[::2] for entry in file.read().split(b"\0"))
    except OSError:
        return environ
    for name in environ.keys() & _OF_ONE_WANDB_RUN:
        before = at_start.get(os.fsencode(name))
        if before is None:
            del environ[name]
        else:
            environ[name] = os.fsdecode(before)
    return environ


def cuda_state() -> str | None:
    """A clause that says that CUDA is initialised here, after which no fork can use a GPU; None: it is not.

    Runs in main. The driver is asked only where it is mapped already (RTLD_NOLOAD), and cuDeviceGetCount does not
    initialise it; no torch.cuda function is called, since some of them do.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD)
    except OSError:
        return None
    initialised = driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != _CUDA_ERROR_NOT_INITIALIZED
    return "the CUDA driver is initialised in it, and no fork of it can use a GPU" if initialised else None


def jax_state() -> str | None:
    """A clause that says that JAX has started its threads here, without which its fork would hang; None: it has not."""
    bridge = sys.modules.get("jax._src.xla_bridge")
    if bridge is not None and bridge.backends_are_initialized():
        return "a JAX backend is initialised in it, and no fork of it has that backend's threads"
    return None


def unsafe_to_fork(*, on_cpu: bool) -> str | None:
    """A clause that says why jobs cannot be forked from this process; ``on_cpu``: where none of them sees a GPU."""
    return jax_state() or (None if on_cpu else cuda_state())


def loaded_torch() -> Any | None:
    """torch, where it is loaded; None also for what only has its name: a mock, a stub, a lazy importer."""
    torch = sys.modules.get("torch")
    real = isinstance(getattr(torch, "Tensor", None), type) and isinstance(getattr(torch, "__version__", None), str)
    return torch if real else None


def torch_refuses_fork() -> bool:
    """True where torch will use no GPU in this process, because it was forked from one that had touched one.

    Asked in the supervisor, right after the fork: the driver itself answers "not initialised" there. Of HIP and of
    Level Zero, torch alone can tell.
    """
    loaded = filter(None, map(sys.modules.get, _GPUS_OF_TORCH))
    return any(getattr(module, "_is_in_bad_fork", bool)() is True for module in loaded)


TORCH_REFUSES = (
    "something in it has called a torch.cuda or torch.xpu function, after which torch refuses the GPU to every fork "
    "of it"
)
"""The clause for where ``torch_refuses_fork`` is true in a fork."""


def pause_openmp() -> None:
    """End the thread pools of every GNU libgomp here, in the thread that is about to fork.

    A forked child has no copy of the pool's threads, and waits for them for ever in its first parallel region;
    omp_pause_resource_all(omp_pause_hard) makes parent and child build new ones on demand. LLVM's and Intel's OpenMP
    see to it themselves, and the latter hangs when it is paused twice: only libgomp is touched.
    """
    for path in _mapped("libgomp"):
        with contextlib.suppress(OSError, AttributeError):  # AttributeError: older than GCC 9
            ctypes.CDLL(path, mode=os.RTLD_NOLOAD).omp_pause_resource_all(_OMP_PAUSE_HARD)


def _mapped(name: str) -> set[str]:
    """The paths of the shared libraries in this process whose file name starts with ``name``."""
    with open("/proc/self/maps", encoding=sys.getfilesystemencoding(), errors="surrogateescape") as maps:
        paths = {line.split(maxsplit=5)[5].rstrip("\n") for line in maps if line.count("/") > 0}
    return {path for path in paths if os.path.basename(path).startswith(name)}


@contextlib.contextmanager
def quiet_logging() -> Iterator[None]:
    """No other thread is in the middle of a log line while this lasts: to be held around a fork.

    logging gives the child new locks, but a stream's own lock, in C, stays locked there for ever if a thread was
    writing to it. Locks that are not to be had within a second are passed over: deadlocks are not ours to make.
    """
    locks = [logging._lock, *(getattr(ref(), "lock", None) for ref in logging._handlerList)]  # type: ignore[attr-defined]
    deadline = time.monotonic() + 1
    held: list[Any] = []
    try:
        for lock in locks:
            with contextlib.suppress(AttributeError, TypeError):  # none, or one of the app's own kind
                if lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
                    held.append(lock)
        yield
    finally:
        for lock in reversed(held):
            with contextlib.suppress(RuntimeError):  # in the child, logging has made it anew
                lock.release()


def random_state() -> Any:
    """The state of Python's own generator, for ``settle_random`` in a later fork: CPython reseeds it in every one."""
    return random.getstate()


def settle_random(before_fork: Any) -> None:
    """Generators that nobody seeded get a seed of their own in each job; what the app seeded goes on from there.

    Runs in the job, and in each rank. ``before_fork`` is ``random_state()`` of the process that it was forked from.
    numpy tells of a seed by having no seed sequence left, torch by one that fits 32 bits, which the ones it draws
    itself do not. Python's ``random`` tells nothing: it is given back its state where one of the others was seeded,
    since apps seed all of them or none.
    """
    seeded = False
    numpy = sys.modules.get("numpy.random.mtrand")
    if numpy is not None:
        if getattr(numpy._rand._bit_generator, "_seed_seq", None) is None:
            seeded = True
        else:
            # Not by seed(), after which a fork of this process could not tell any more that nobody has seeded it.
            numpy._rand.set_state(type(numpy._rand._bit_generator)().state)
    torch = loaded_torch()
    if torch is not None and hasattr(torch, "initial_seed"):
        if torch.initial_seed() < 2**32:
            seeded = True
        else:
            torch.default_generator.seed()
    if seeded:
        random.setstate(before_fork)


def limit_threads(threads: int, environ: Mapping[str, str]) -> dict[str, str]:
    """The thread variables for a job that may use so many threads; what ``environ`` sets already is left out.

    Where the user set one of them, none is added: half of a choice would beat the other half.
    """
    if any(environ.get(name) for name in THREAD_VARIABLES):
        return {}
    return dict.fromkeys(THREAD_VARIABLES, str(threads))


@functools.cache
def _libraries() -> list[tuple[Any, int]]:
    """The numeric libraries that are loaded when this is first called, and how many threads each uses then.

    Those that come later in the same process read their variables. To find them, and what finds them, takes longer than
    all else that a job does before its task.
    """
    from threadpoolctl import ThreadpoolController

    return [(library, library.num_threads) for library in ThreadpoolController().lib_controllers]


@functools.cache
def _setproctitle() -> Callable[[str], None] | None:
    """None where that library is not installed: to find out takes milliseconds, too."""
    try:
        from setproctitle import setproctitle
    except ImportError:
        return None
    titled: Callable[[str], None] = setproctitle
    return titled


def prepare() -> None:
    """Find what each job, or rank, would have to find by itself. Runs in the process that forks them, before that."""
    _libraries.cache_clear()  # what its own parent has found is not all that is loaded here
    with contextlib.suppress(BaseException):  # an import of the user's that fails, or exits: the jobs say so
        _setproctitle()
        _libraries()


def apply_threads(threads: int) -> None:
    """Tell the numeric libraries that are loaded already, and do not read their variables again.

    Runs in the job, after ``pause_openmp`` in the process that forked it.
    """
    _tell_libraries(threads)
    torch = loaded_torch()
    if torch is not None and hasattr(torch, "set_num_threads"):
        torch.set_num_threads(threads)


def apply_threads_before(threads: int | None) -> None:
    """The same as far as a job inherits it. Runs in the process that forks jobs, before those of a launch.

    OpenBLAS, told in a fork, starts the threads that it had in the parent, and each of them spins for a tenth of a
    second, whoever needs the core; told in the parent, it starts none. None: as they were.
    """
    with contextlib.suppress(Exception):  # see ``prepare``
        _tell_libraries(threads)


def _tell_libraries(threads: int | None) -> None:
    for library, before in _libraries():
        wanted = before if threads is None else threads
        if library.num_threads != wanted:
            library.set_num_threads(wanted)


def enable_faulthandler() -> None:
    """A segmentation fault leaves its traceback on stderr, unless the app has arranged its own."""
    if not faulthandler.is_enabled():
        faulthandler.enable(file=2)


NO_TERMINAL = "a job has no terminal to debug in: run it in the foreground, with hydra/launcher=basic"


def refuse_breakpoint() -> None:
    """``breakpoint()`` raises, and says what to do instead: pdb would read the end of /dev/null, and quit.

    A debugger of the user's own, PYTHONBREAKPOINT or a hook, may find its terminal elsewhere.
    """
    if sys.breakpointhook is sys.__breakpointhook__ and os.environ.get("PYTHONBREAKPOINT") in {
        None,
        "",
        "pdb.set_trace",
    }:
        sys.breakpointhook = _refuse


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise RuntimeError(NO_TERMINAL)


def set_title(title: str) -> None:
    """What nvidia-smi, htop and ps show of this process, where the library for it is installed."""
    setproctitle = _setproctitle()
    if setproctitle is not None:
        setproctitle(title)


def freeze_garbage() -> None:
    """Never collect what the app made: its finalizers are user code, and the collector's marks would copy the pages."""
    gc.freeze()
