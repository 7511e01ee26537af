"""What is said of an exception for those who cannot load it: its type, text and traceback, and what it stands for.

All of this runs in the job's process, on objects of the user's that may do anything when they are looked at.
"""

from __future__ import annotations

import bdb
import os
import re
import sys
import traceback
from types import TracebackType

from ._errors import JobError
from ._interpreter import NO_TERMINAL

_OUT_OF_MEMORY = re.compile(
    r"(CUDA|HIP|XPU)( error:)? out of memory|(CUBLAS|CUDNN|CUSPARSE)_STATUS_ALLOC_FAILED|cudaErrorMemoryAllocation"
    r"|hipErrorOutOfMemory|RESOURCE_EXHAUSTED"
)
"""What torch, cuBLAS, cuDNN, CuPy, JAX and TensorFlow say when a GPU's memory is full."""


def ran_out_of_memory(error: BaseException) -> bool:
    """True where the exception, or one that led to it, says that a GPU's memory was full: by its type, or by its text.

    By the name of the type, since there is one in each library, and none of them is to be imported.
    """
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        names = {cls.__name__ for cls in type(link).__mro__}
        if names & {"OutOfMemoryError", "ResourceExhaustedError"} or _OUT_OF_MEMORY.search(safe_text(link)):
            return True
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return False


def traceback_text(error: BaseException | None) -> str | None:
    """The traceback from the user's first frame on; that frame is also what sys.excepthook will begin with."""
    if error is None:
        return None
    link: BaseException | None = error
    seen: set[int] = set()  # a chain of causes may be a ring
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        BaseException.with_traceback(link, _from_user_code(link))  # not by assignment, which its class may refuse
        link = link.__cause__
    return "".join(traceback.format_exception(type(error), error, error.__traceback__))


def _from_user_code(error: BaseException) -> TracebackType | None:
    """Its traceback without the frames of Hydra and gpu_pool that come first; what has no others keeps them.

    Except an error of gpu_pool's own: it says all there is to say, and its frames are nobody's business.
    """
    ours = tuple(os.path.dirname(sys.modules[name].__file__ or "") + os.sep for name in ("hydra", __package__ or ""))
    tb = error.__traceback__
    while tb is not None and tb.tb_frame.f_code.co_filename.startswith(ours):
        tb = tb.tb_next
    return tb if tb is not None or isinstance(error, JobError) else error.__traceback__


def type_name(value: object) -> str:
    cls = type(value)
    if cls.__module__ == "builtins" or issubclass(cls, JobError):
        return cls.__qualname__
    module = "__main__" if cls.__module__ == "__mp_main__" else cls.__module__  # the app's, in a fresh interpreter
    return f"{module}.{cls.__qualname__}"


def error_text(error: BaseException) -> str:
    if isinstance(error, bdb.BdbQuit):  # of pdb.set_trace(), which reads the end of /dev/null
        return NO_TERMINAL
    return error.why if isinstance(error, JobError) else safe_text(error)


def safe_text(error: BaseException) -> str:
    """Its text, whatever its class does when it is asked for it."""
    try:
        return str(error)
    except BaseException as broken:
        return f"(its text cannot be had: {type(broken).__name__})"


def described(error: BaseException) -> str:
    """The exception's type and text, in one line."""
    text = safe_text(error)
    return f"{type_name(error)}: {text}" if text else type_name(error)
