"""What each event of the journal has to say, and of which types: asked once, where events come in. Pure.

The supervisor writes them, and does not ask. Who reads asks, since the file may be damaged, or another version's; and
takes for granted from then on what is said here. Events and fields that are not named here are those of a later
version, and no fault: it may add some, as long as it leaves these as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from ._errors import GpuPoolError
from ._model import Cause, Status

_LATEST = 250e9
"""Seconds since the epoch, some year before 10,000: what the calendar has, and so the longest duration, too."""

_LARGEST_COUNT = 2**63
_LARGEST_PID = 2**31
_DEEPEST = 100
"""Levels of a value: well above what a job gives, and below what would exhaust the stack of who walks through it."""

Facts = dict[str, Any]
"""One event: its name is at ``event``."""


class DamagedEventError(GpuPoolError):
    """What is in the journal is no event of ours; the text is a clause that says which, and why."""


def sound(events: Iterable[Facts]) -> Iterator[Facts]:
    """The events, as they come. Raises DamagedEventError in the place of the first one that has a fault."""
    for event in events:
        why = fault(event)
        if why is not None:
            raise DamagedEventError(why)
        yield event


def fault(event: Mapping[str, Any]) -> str | None:
    """What is wrong with an event, as a clause; None: nothing, or it is of a kind that is not known."""
    for name, (types, is_right, may_be_missing) in _EVENTS.get(event["event"], ()):
        try:
            value = event[name]
        except KeyError:
            if may_be_missing:
                continue
            return f"{name} of {event['event']} is missing"
        if type(value) not in types or not (is_right is None or is_right(value)):
            return f"{name} of {event['event']} is not what it should be"
    return None


def is_amount(value: object) -> bool:
    """A number of seconds, since the epoch too, or of megabytes: finite, not negative, and not beyond all reason."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and _is_in_reason(value)


def is_shallow(value: object) -> bool:
    """True where whoever walks through what JSON has said comes to an end before the stack does."""
    if type(value) not in _CONTAINERS or _CONTAINERS.isdisjoint(map(type, _parts(value))):  # as most are
        return True
    level = [value]
    for _ in range(_DEEPEST):
        level = [part for one in level if type(one) in _CONTAINERS for part in _parts(one)]
        if not level:
            return True
    return False


def _parts(value: Any) -> Iterable[Any]:
    return value.values() if type(value) is dict else value


class _Field(NamedTuple):
    """What a field may be: of one of these types, of which JSON has but few, and such that ``is_right`` says so."""

    types: frozenset[type]
    is_right: Callable[[Any], bool] | None = None
    may_be_missing: bool = False


def _is_in_reason(value: float) -> bool:
    return 0 <= value < _LATEST  # which NaN is not


def _is_count(value: int) -> bool:
    return 0 <= value < _LARGEST_COUNT


def _is_pid(value: int) -> bool:
    return 0 < value < _LARGEST_PID


def _are_texts(value: list[object] | None) -> bool:
    return value is None or _STR.issuperset(map(type, value))


def _are_some_texts(value: list[object]) -> bool:
    return bool(value) and _STR.issuperset(map(type, value))


_STR = frozenset({str})
_NONE = frozenset({type(None)})
_CONTAINERS = frozenset({dict, list})
_AMOUNT = _Field(frozenset({int, float}), _is_in_reason)
_FIGURE = _Field(_AMOUNT.types | _NONE, lambda value: value is None or 0 <= value < _LATEST, may_be_missing=True)
_COUNT = _Field(frozenset({int}), _is_count)
_PID = _Field(frozenset({int}), _is_pid)
_TEXT = _Field(_STR)
_TEXT_OR_NONE = _Field(_STR | _NONE)
_TEXTS = _Field(frozenset({list}), _are_texts)
_BOOL = _Field(frozenset({bool}))
_STATUS = _Field(_STR, frozenset(status.value for status in Status).__contains__)
_CAUSE = _Field(_STR, frozenset(cause.value for cause in Cause).__contains__)

_END = {
    "job": _COUNT,
    "attempt": _COUNT,
    "status": _STATUS,
    "cause": _CAUSE,
    "error_type": _TEXT_OR_NONE,
    "error_text": _TEXT_OR_NONE,
    "value": _Field(_CONTAINERS | _NONE | {bool, int, float, str}, is_shallow),
    "by_itself": _BOOL,
    "seconds": _FIGURE,
    "cpu_s": _FIGURE,
    "peak_mb": _FIGURE,
    "gpu_mb": _FIGURE,
}

_EVENTS = {
    name: tuple({"time": _AMOUNT, **fields}.items())
    for name, fields in {
        "launch": {
            "main": _PID,
            "supervisor": _PID,
            "started": _Field(_COUNT.types | _NONE, lambda value: value is None or _is_count(value)),
            "host": _TEXT,
            "boot": _TEXT,
            "command": _TEXTS,
            "given": _Field(_TEXTS.types | _NONE, _are_texts, may_be_missing=True),
            "cwd": _TEXT,
            "slots": _TEXTS,
        },
        "moved_aside": {"to": _TEXT, "jobs": _COUNT, "completed": _COUNT},
        "resumed": {
            "kept": _COUNT,
            "moved": _TEXTS,
            "left": _TEXTS,
            "known": _COUNT,
            "empty": _BOOL,
            "back": _COUNT,
            "elsewhere": _Field(
                _TEXTS.types | _NONE, lambda value: value is None or [type(each) for each in value] == [int, str]
            ),
        },
        "queued": {"job": _COUNT, "overrides": _TEXTS},
        "start": {"job": _COUNT, "attempt": _COUNT, "pid": _PID, "slots": _Field(_TEXTS.types, _are_some_texts)},
        "waiting": {"device": _TEXT, "why": _TEXT},
        "memory": {"job": _COUNT, "gpu_mb": _AMOUNT},
        "stop": {"job": _COUNT, "cause": _CAUSE, "why": _TEXT},
        "retry": _END,
        "end": _END,
        "done": {"stopped": _Field(_STR | _NONE, may_be_missing=True)},
    }.items()
}
