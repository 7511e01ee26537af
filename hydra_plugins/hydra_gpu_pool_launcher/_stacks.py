"""Where a job was when SIGTERM ended it: the stacks of its threads, in its log.

By ``faulthandler.register``, whose handler is one of C: a job that hangs in a lock of the interpreter tells as well. It
then lets the signal do what it does. Whoever sets a handler for SIGTERM has it for himself, as ever.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal


def tell_at_sigterm() -> None:
    """Have this process write its stacks to descriptor 2 when SIGTERM ends it; none of its forks does."""
    with contextlib.suppress(OSError, RuntimeError):  # a kernel without memory for it: then nothing is told
        faulthandler.register(signal.SIGTERM, file=2, all_threads=True, chain=True)
        os.register_at_fork(after_in_child=_be_silent)


def _be_silent() -> None:
    # A data loader's workers are ended by SIGTERM, as a matter of course. A handler of the user's is not taken away.
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        faulthandler.unregister(signal.SIGTERM)
