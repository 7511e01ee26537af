"""What this machine has: its GPUs, as the driver tells, and its cores.

Main never loads NVML, let alone CUDA: a short-lived process asks the driver, since what NVML and CUDA set up in main
would be broken in every fork of it.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from . import _cards, _sysfs, _vendors
from ._cards import Gpu
from ._errors import ConfigurationError
from ._model import Layout, Vendor

ASK_S = 30.0  # a driver in trouble makes nvidia-smi hang, for ever if need be
NVIDIACTL = "/dev/nvidiactl"  # there as soon as the driver is
MPS_PIPES = "/tmp/nvidia-mps"
FIRST_PID_NAMESPACE = 0xEFFFFFFC  # PROC_PID_INIT_INO, the same on every Linux
OWN_CGROUP = "/proc/self/cgroup"
CGROUP_ROOT = "/sys/fs/cgroup"


@dataclass(frozen=True)
class Found:
    """Whose GPUs are used, and all that there are of them; None: nobody can say.

    ``why``: a clause that says why they are not NVIDIA's, where that was not asked for.
    """

    vendor: Vendor = "nvidia"
    gpus: tuple[Gpu, ...] | None = None
    why: str | None = None


def look(vendor: Literal["auto"] | Vendor, environ: Mapping[str, str]) -> Found:
    """The GPUs of the vendor, numbered as its variable does; ``auto``: NVIDIA's, where there are any.

    Blocks and raises as ``discover``, unless another vendor's are asked for.
    """
    nvidia, why = None, None
    if vendor in {"auto", "nvidia"}:
        nvidia = discover(environ)
    if vendor == "auto":
        vendor, why = ("nvidia", None) if nvidia else _vendors.without_nvidia(environ, amd=bool(_sysfs.amd()))
    if vendor == "nvidia":
        return Found(vendor, nvidia)
    if vendor == "amd":
        return Found(vendor, _vendors.within_rocr(_sysfs.amd(), environ), why)
    # Depending on how it is set up, Level Zero counts tiles: whatever numbers are given may be right.
    asked = _vendors.inherited(environ, vendor).value is not None
    return Found(vendor, None if asked else _sysfs.intel(), why)


def discover(environ: Mapping[str, str]) -> tuple[Gpu, ...] | None:
    """Every GPU of NVIDIA's in the driver's order, whatever CUDA_VISIBLE_DEVICES says; None: no driver here.

    Runs in main; has ``_driver`` ask, in a short-lived process, and waits up to ``ASK_S`` seconds for it. Raises
    ConfigurationError, without a full stop, where a driver is there and does not answer.
    """
    try:
        return _asked(environ)
    except _cards.NoAnswer as error:
        if os.path.exists(NVIDIACTL) or _smi(environ):
            raise ConfigurationError(f"the NVIDIA driver cannot be asked ({error})") from None
        return None  # NVML's library is missing, mostly


def _asked(environ: Mapping[str, str]) -> tuple[Gpu, ...]:
    folder = _cards.folder_of_pynvml()
    try:
        return _cards.read(_ask(_cards.command(folder), environ))
    except _Died as error:
        if folder is None or not _smi(environ):
            raise
        try:  # NVML has taken the process along
            return _cards.read(_ask(_cards.command(None), environ))
        except _cards.NoAnswer as more:
            raise _cards.NoAnswer(f"NVML: {error}; {more}") from None


def _smi(environ: Mapping[str, str]) -> str | None:
    return shutil.which("nvidia-smi", path=environ.get("PATH"))


def driver(layout: Layout) -> tuple[str, ...] | None:
    """The command that asks the driver for these devices' memory; None: it does not know them, or there is none."""
    if layout.vendor != "nvidia" or not any(device.uuid for device in layout.devices):
        return None
    try:
        return tuple(_cards.command(_cards.folder_of_pynvml()))
    except _cards.NoAnswer:
        return None


def in_first_pid_namespace() -> bool:
    """Whether the pids that the driver tells are those by which this process knows others: not in most containers."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino == FIRST_PID_NAMESPACE
    except OSError:
        return False


def mps(environ: Mapping[str, str]) -> bool:
    """Whether CUDA finds an MPS server here, through which several processes share an exclusive GPU."""
    return os.path.exists(os.path.join(environ.get("CUDA_MPS_PIPE_DIRECTORY") or MPS_PIPES, "control"))


class _Died(_cards.NoAnswer):
    """The process that asks ended without an answer."""


def _ask(command: Sequence[str], environ: Mapping[str, str]) -> str:
    """What the command prints. Blocks up to ``ASK_S`` seconds. Raises NoAnswer; _Died where it ends with an error."""
    try:
        process = subprocess.Popen(
            command,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        raise _cards.NoAnswer(str(error)) from None
    try:
        out, err = process.communicate(timeout=ASK_S)
    except BaseException as error:
        # subprocess.run would now wait without end for a process that a broken driver keeps in the D state.
        if process.poll() is None:  # else it is reaped, and its number may be somebody else's by now
            os.killpg(process.pid, signal.SIGKILL)
        for pipe in (process.stdout, process.stderr):
            if pipe:
                pipe.close()
        try:
            process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            pass  # left behind: nobody can end it
        if isinstance(error, subprocess.TimeoutExpired):
            raise _cards.NoAnswer(f"no answer within {ASK_S:g} s") from None
        raise
    if process.returncode != 0:
        words = " ".join(f"{err} {out}".split())[:300].rstrip(".")
        raise _Died(words or f"it ended with {process.returncode}")
    return out


def cores() -> int:
    """The CPUs that this process may use: its affinity, cut by the quota of its cgroup (v2) and of those above."""
    most = float(len(os.sched_getaffinity(0)))
    try:
        with open(OWN_CGROUP) as file:
            own = next(line[3:].strip() for line in file if line.startswith("0::"))
    except (OSError, StopIteration):
        return int(most)
    parts = [part for part in own.split("/") if part]
    for depth in range(len(parts) + 1):
        try:
            with open(os.path.join(CGROUP_ROOT, *parts[:depth], "cpu.max")) as file:
                quota, period = file.read().split()
            most = min(most, int(quota) / int(period))
        except (OSError, ValueError):
            pass  # no such file in the root, or "max": no quota here
    return max(1, int(most))


def bound_to_one_core() -> bool:
    """True where the affinity of this process leaves it one of several cores, and so every job of it."""
    return len(os.sched_getaffinity(0)) == 1 and (os.cpu_count() or 1) > 1
