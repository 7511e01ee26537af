"""The environment that jobs get of the main process, before what each of them has for itself."""

from __future__ import annotations

import os

from ._threads import without_ours
from ._torchrun import without_ranks

_OF_ONE_WANDB_RUN = {"WANDB_SERVICE", "WANDB_RUN_ID"}
"""What wandb.init() sets in the environment, for the processes that belong to its run."""


def environ_for_jobs() -> dict[str, str]:
    """This process's environment as jobs may have it: without what would make ranks of them.

    Without what gpu_pool has set of threads, where this process is a job itself: its own jobs are others. And without
    what wandb has set for the run of this process alone. Of those variables, jobs get what was there when this program
    was started: a run that the user names for all of them is the user's business.
    """
    environ = without_ours(without_ranks(os.environ))
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
