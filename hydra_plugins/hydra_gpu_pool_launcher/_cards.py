"""The GPUs as NVIDIA's driver tells of them: how ``_driver``, which asks it, is started, and what its lines say."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from dataclasses import dataclass
from typing import Any

from ._settings import shown

Processes = tuple[tuple[int, int | None], ...]
"""A pid and the bytes that it holds, None where that cannot be told. In a container the pids are the host's."""


class NoAnswer(Exception):
    """Why the driver was not heard, without a full stop."""


@dataclass(frozen=True)
class Instance:
    """A MIG instance: a part of a GPU, and a device by itself. None: it cannot be told."""

    uuid: str
    name: str = ""
    total_bytes: int | None = None
    free_bytes: int | None = None
    processes: Processes | None = None


@dataclass(frozen=True)
class Gpu:
    """One GPU. ``index``: nvidia-smi's number. ``exclusive``: only one process may use it.

    ``mig``: it is in MIG mode, and only its ``instances`` can be used. ``fault``: why the driver refuses it, in its own
    words; then ``uuid`` may be "". Memory and processes are None where they cannot be told.

    AMD's and Intel's are told of in the same words: ``index`` is then HIP's number, or Level Zero's, ``uuid`` "" where
    it is not known, and ``known_as`` as in ``Device``.
    """

    index: int
    uuid: str
    name: str
    exclusive: bool = False
    mig: bool = False
    total_bytes: int | None = None
    free_bytes: int | None = None
    processes: Processes | None = None
    instances: tuple[Instance, ...] = ()
    fault: str | None = None
    known_as: str | None = None


def read(line: str) -> tuple[Gpu, ...]:
    """Every GPU in a line of ``_driver``, in the driver's order. Pure. Raises NoAnswer where it has none."""
    try:
        said = json.loads(line)
        if "fault" in said:
            raise NoAnswer(str(said["fault"]))
        return tuple(map(_gpu, said["gpus"]))
    except (ValueError, TypeError, KeyError, AttributeError):
        raise NoAnswer(f"unexpected answer {shown(line)}") from None


def _gpu(said: dict[str, Any]) -> Gpu:
    if "uuid" not in said:
        return Gpu(said["index"], "", "", fault=said["fault"])
    one = _instance(said)
    return Gpu(
        index=said["index"],
        uuid=one.uuid,
        name=one.name,
        exclusive=said["exclusive"],
        mig=said["mig"],
        total_bytes=one.total_bytes,
        free_bytes=one.free_bytes,
        processes=one.processes,
        instances=tuple(map(_instance, said["instances"])),
        fault=said["fault"],
    )


def _instance(said: dict[str, Any]) -> Instance:
    processes = said["processes"]
    return Instance(
        uuid=said["uuid"],
        name=said["name"] or "",
        total_bytes=said["total"],
        free_bytes=said["free"],
        processes=None if processes is None else tuple((pid, used) for pid, used in processes),
    )


def command(folder: str | None) -> list[str]:
    """How ``_driver`` is started. ``folder``: where pynvml is; None: nvidia-smi alone is asked. Raises NoAnswer."""
    if not sys.executable:
        raise NoAnswer("this Python does not know its own interpreter, sys.executable")
    program = os.path.join(os.path.dirname(os.path.abspath(__file__)), "_driver.py")
    return [sys.executable, "-I", "-S", program, folder or ""]


def folder_of_pynvml() -> str | None:
    """Where nvidia-ml-py is, None: not installed. Imports nothing of it."""
    try:
        spec = importlib.util.find_spec("pynvml")
    except ValueError:  # somebody put a module without a spec into sys.modules
        return None
    if spec is None or spec.origin is None:
        return None
    folder = os.path.dirname(os.path.abspath(spec.origin))
    return os.path.dirname(folder) if spec.submodule_search_locations else folder
