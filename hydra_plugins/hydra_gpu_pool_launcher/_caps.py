"""Limits for libraries that take a whole GPU when they start, for jobs that share one. Pure.

JAX takes three quarters of the card or more, TensorFlow all of it. torch takes what it needs: nothing is set for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from ._model import Layout, Slot

_XLA, _TF = "XLA_PYTHON_CLIENT_MEM_FRACTION", "TF_FORCE_GPU_ALLOW_GROWTH"

_KIN: Mapping[str, frozenset[str]] = {
    # JAX refuses to start where both of the first two are set.
    _XLA: frozenset({_XLA, "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_ALLOCATOR"}),
    _TF: frozenset({_TF, "TF_GPU_ALLOCATOR"}),
}
"""Per variable, those by which a user has decided the same thing."""

LIMITS = frozenset(_KIN)
"""What ``limits`` may set."""

_THOUSANDTHS = 900
"""Of a GPU's memory, for all its jobs together: the rest is for what each process needs beside it."""


def limits(layout: Layout, slots: Sequence[Slot], users: Collection[str]) -> dict[str, str]:
    """The variables for a job on these slots; none where it has its devices for itself, or sees none.

    ``users``: the names of the variables that the user has set.
    """
    mine = min(Counter(slot.device for slot in slots).values())
    if layout.on_cpu or mine == layout.slots_per_device:
        return {}
    fraction = max(1, _THOUSANDTHS * mine // layout.slots_per_device) / 1000
    values = {_XLA: f"{fraction:g}", _TF: "true"}
    return {name: value for name, value in values.items() if not _KIN[name] & set(users)}
