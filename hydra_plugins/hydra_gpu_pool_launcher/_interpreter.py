"""What of this interpreter's state a fork breaks or copies: CUDA, OpenMP, locks, random numbers, threads.

Asked in main before a fork, mended in the job after it. No function here, but for ``titles``, imports a library that is
not imported yet: whatever is not in sys.modules has no state.
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
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

_CUDA_ERROR_NOT_INITIALIZED = 3
_OMP_PAUSE_HARD = 2

_GPUS_OF_TORCH = ("torch.cuda", "torch.xpu")
"""CUDA or, under the same name, HIP; Level Zero."""


def other_threads() -> list[str]:
    """The names of the Python threads of this process beside the calling one."""
    return [thread.name for thread in threading.enumerate() if thread is not threading.current_thread()]


def wandb_run() -> bool:
    """True where a run of Weights & Biases is active here: every fork would log to it, through one connection."""
    return getattr(sys.modules.get("wandb"), "run", None) is not None


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


@functools.cache
def titles() -> Callable[[str], None] | None:
    """What sets a title; None where the library for it is not installed, or fails: a title is worth no job.

    To find out takes milliseconds: whoever forks jobs asks first, and they know.
    """
    try:
        from setproctitle import setproctitle
    except BaseException:  # an import of the user's may raise anything, and exit
        return None
    found: Callable[[str], None] = setproctitle
    return found


def set_title(title: str) -> None:
    """What nvidia-smi, htop and ps show of this process, where the library for it is installed."""
    set_it = titles()
    if set_it is not None:
        set_it(title)


def freeze_garbage() -> None:
    """Never collect what the app made: its finalizers are user code, and the collector's marks would copy the pages."""
    gc.freeze()
