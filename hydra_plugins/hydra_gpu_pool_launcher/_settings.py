"""From what the user wrote to ``Settings``: every value is judged here, once, before anything is forked.

Pure. A value that cannot be kept is a ConfigurationError of one sentence: the key, the value as given, what would be
right. Nothing is guessed: True is no number, "2" is no 2, and 2.0 is no count.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from ._errors import ConfigurationError
from ._model import DdpSettings, Settings

# What a rule is: a function from the raw value to the checked one, which raises ValueError, TypeError or OverflowError
# for a value it does not take; and the words for what it takes.
_Rule = tuple[Callable[[Any], Any], str]

_NAME = re.compile(r"(GPU|MIG)-[\w/-]+", re.ASCII)  # no comma, blank or NUL: it goes into an environment variable
_ENDPOINT = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):([0-9]{1,5})")


def shown(value: object) -> str:
    """The value as a sentence can hold it: in YAML's words, on one line, and not for pages."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    try:
        text = " ".join(repr(value).split())
    except Exception:  # a __repr__ of the user's, or an int of more digits than Python prints
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 200 else f"{text[:199]}…"


def _need(ok: bool) -> None:
    """End a rule's check: this value is not taken."""
    if not ok:
        raise ValueError


def _whole(least: int, most: float = math.inf) -> _Rule:
    def check(value: Any) -> int:
        _need(isinstance(value, int) and not isinstance(value, bool) and least <= value <= most)
        return int(value)

    return check, f"a whole number, at least {least}" if most == math.inf else f"a whole number from {least} to {most}"


def _number(least: float = 0.0, *, above: bool = False) -> _Rule:
    def check(value: Any) -> float:
        _need(isinstance(value, (int, float)) and not isinstance(value, bool))
        number = float(value)  # OverflowError: an int beyond every float
        _need(math.isfinite(number) and (number > least if above else number >= least))
        return number

    return check, f"a finite number, {'above' if above else 'at least'} {least:g}"


def _or_null(rule: _Rule) -> _Rule:
    check, words = rule
    return (lambda value: None if value is None else check(value)), f"null or {words}"


def _or_auto(rule: _Rule) -> _Rule:
    check, words = rule
    return (lambda value: None if isinstance(value, str) and value == "auto" else check(value)), f"auto or {words}"


def _word(*words: str) -> _Rule:
    def check(value: Any) -> str:
        _need(isinstance(value, str) and value in words)
        return str(value)

    return check, f"one of {', '.join(words)}"


def _words(*words: str) -> _Rule:
    def check(value: Any) -> frozenset[str]:
        _need(isinstance(value, (list, tuple)) and all(isinstance(word, str) and word in words for word in value))
        return frozenset(value)

    return check, f"a list of {', '.join(words)}"


def _yes_or_no(value: Any) -> bool:
    _need(isinstance(value, bool))
    return bool(value)


def _endpoint(value: Any) -> str:
    match = _ENDPOINT.fullmatch(value)
    _need(match is not None and int(match[1]) <= 65535)
    return str(value)


def _id(value: Any) -> str:
    if isinstance(value, str):
        value = value.strip()
        if _NAME.fullmatch(value):
            return str(value)
        _need(value.isascii() and value.isdigit())
        value = int(value)  # "01" is 1: one device must have one name, or it would be used twice
    _need(isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**9)
    return str(int(value))


def _ids(value: Any) -> str | tuple[str, ...]:
    if isinstance(value, str):
        if value.strip() == "auto":
            return "auto"
        value = value.split(",")  # an empty string, a shell variable that nobody set say, has no id in it
    elif isinstance(value, int):
        value = (value,)
    _need(isinstance(value, (list, tuple, range)))
    return tuple(dict.fromkeys(map(_id, value)))


_GPUS = "auto, a GPU's id, a list of ids such as [0,1] or '0,1', or [] (an id: a number, or a name GPU-… or MIG-…)"
_BOOL: _Rule = (_yes_or_no, "true or false")

# Per key: its default, its rule.
_KEYS: Mapping[str, tuple[Any, _Rule]] = {
    "gpus": ("auto", (_ids, _GPUS)),
    "vendor": ("auto", _word("auto", "nvidia", "amd", "intel")),
    "per_gpu": (1, _whole(1, 1000)),
    "gpus_per_job": (1, _whole(1)),
    "cpu_slots": (None, _or_null(_whole(1, 1000))),
    "mode": ("single", _word("single", "ddp")),
    "start_method": ("auto", _word("auto", "fork", "forkserver", "spawn")),
    "threads_per_job": ("auto", _or_auto(_whole(1))),
    "stagger_s": (0, _number()),
    "timeout_min": (None, _or_null(_number(above=True))),
    "kill_grace_s": (10, _number()),
    "max_retries": (0, _whole(0)),
    "retry_on": (["crash", "oom"], _words("crash", "oom", "timeout", "error")),
    "fail_fast": (False, _BOOL),
    "resume": (False, _BOOL),
    "min_free_gpu_mem_gb": (None, _or_null(_number())),
    "mem_caps": (True, _BOOL),
    "share": (True, _BOOL),
    "output": ("file", _word("file", "tee")),
    "progress": ("auto", _word("auto", "live", "log", "none")),
}
PORTS = 1000
"""That the jobs of a sweep meet on, one after the other: those of two successive jobs must differ."""

_HIGHEST_PORT = 65535 - (PORTS - 1)

_DDP_KEYS: Mapping[str, tuple[Any, _Rule]] = {
    "nproc_per_node": (None, _or_null(_whole(1, 1000))),
    "nnodes": (1, _whole(1)),
    "node_rank": (0, _whole(0)),
    "rdzv_endpoint": ("localhost:0", (_endpoint, "host:port, the port at most 65535")),
    "rdzv_timeout_s": (300, _number(above=True)),
    "max_restarts": (0, _whole(0)),
}

#: Every key and its default, as a user would write it.
DEFAULTS: Mapping[str, Any] = {
    **{key: default for key, (default, _) in _KEYS.items()},
    "ddp": {key: default for key, (default, _) in _DDP_KEYS.items()},
}


def checked(raw: Mapping[str, Any], prefix: str = "hydra.launcher.") -> Settings:
    """The settings that these plain values (no OmegaConf containers; a dict under ``ddp``) ask for.

    A missing key takes its default. ``prefix`` stands before a key where a message names it. Runs in main, touches
    nothing. Raises ConfigurationError for an unknown key, a value that its key does not take, two that do not go
    together.
    """
    given = {**DEFAULTS, **raw}
    nested = given.pop("ddp")
    if not isinstance(nested, Mapping):
        raise _refused(f"{prefix}ddp", nested, f"expected a mapping with the keys {', '.join(_DDP_KEYS)}")
    values = _each(_KEYS, given, prefix, "ddp")
    given_ddp = {**DEFAULTS["ddp"], **nested}
    ddp = DdpSettings(**_each(_DDP_KEYS, given_ddp, f"{prefix}ddp."))
    one_gpu = str(given["gpus"]).strip().isdigit()  # of all that passed, 2 and "2" alone
    settings = Settings(**values, prefix=prefix, one_gpu=one_gpu, ddp=ddp)

    if settings.mode == "single":
        for key, (default, _) in _DDP_KEYS.items():
            if getattr(ddp, key) != default:
                raise _refused(f"{prefix}ddp.{key}", given_ddp[key], f"only with {prefix}mode: ddp")
    if ddp.node_rank >= ddp.nnodes:
        raise _refused(f"{prefix}ddp.node_rank", ddp.node_rank, f"expected less than ddp.nnodes={ddp.nnodes}")
    if int(ddp.rdzv_endpoint.rpartition(":")[2]) > _HIGHEST_PORT:
        why = f"expected a port of at most {_HIGHEST_PORT}, since job i meets on the port + i % {PORTS}"
        raise _refused(f"{prefix}ddp.rdzv_endpoint", ddp.rdzv_endpoint, why)
    if ddp.nnodes > 1:
        for key in ("max_retries", "fail_fast", "resume", "timeout_min", "min_free_gpu_mem_gb"):
            if values[key] != DEFAULTS[key]:
                why = f"not with {prefix}ddp.nnodes above 1, since it would put the machines out of step; leave it at"
                raise _refused(f"{prefix}{key}", given[key], f"{why} {shown(DEFAULTS[key])}")
        if int(ddp.rdzv_endpoint.rpartition(":")[2]) == 0:
            why = "with ddp.nnodes above 1, expected a host and a port, not 0, that every machine can reach"
            raise _refused(f"{prefix}ddp.rdzv_endpoint", ddp.rdzv_endpoint, why)
    return settings


def _each(
    rules: Mapping[str, tuple[Any, _Rule]], given: Mapping[str, Any], prefix: str, *more_keys: str
) -> dict[str, Any]:
    for key, value in given.items():
        if key not in rules:
            keys = [*rules, *more_keys]
            nearest = difflib.get_close_matches(str(key), keys, n=1)
            known = f"the nearest is {prefix}{nearest[0]}" if nearest else f"there are {', '.join(keys)}"
            raise _refused(f"{prefix}{key}", value, f"there is no such key, {known}")
    values = {}
    for key, (_, (check, words)) in rules.items():
        try:
            values[key] = check(given[key])
        except (ValueError, TypeError, OverflowError):
            raise _refused(f"{prefix}{key}", given[key], f"expected {words}") from None
    return values


def _refused(key: str, value: object, why: str) -> ConfigurationError:
    return ConfigurationError(f"{key}={shown(value)}: {why}.")
