"""What this machine has: its GPUs, as the driver tells, and its cores.

Main never loads NVML, let alone CUDA: a short-lived process asks the driver, since what NVML and CUDA set up in main
would be broken in every fork of it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ._errors import ConfigurationError
from ._settings import shown

ASK_S = 30.0  # a driver in trouble makes nvidia-smi hang, for ever if need be
NVIDIACTL = "/dev/nvidiactl"  # there as soon as the driver is
OWN_CGROUP = "/proc/self/cgroup"
CGROUP_ROOT = "/sys/fs/cgroup"

_ASK_NVML = """
import json, sys
sys.path.append(sys.argv[1])
def text(value):
    return value.decode() if isinstance(value, bytes) else value
def exclusive(gpu):
    try:
        return nvml.nvmlDeviceGetComputeMode(gpu) == nvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS
    except nvml.NVMLError:
        return False
try:
    import pynvml as nvml
    nvml.nvmlInit()
    gpus = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    print(json.dumps([[i, text(nvml.nvmlDeviceGetUUID(g)), text(nvml.nvmlDeviceGetName(g)), exclusive(g)]
                      for i, g in enumerate(gpus)]))
except Exception as error:
    sys.exit(str(error) or type(error).__name__)
"""


@dataclass(frozen=True)
class Gpu:
    """One GPU as the driver reports it. ``index``: nvidia-smi's number. ``exclusive``: only one process may use it."""

    index: int
    uuid: str
    name: str
    exclusive: bool


def discover(environ: Mapping[str, str]) -> tuple[Gpu, ...] | None:
    """Every GPU of this machine in the driver's order, whatever CUDA_VISIBLE_DEVICES says; None: no driver here.

    Runs in main; asks NVML (nvidia-ml-py) in a short-lived process, then nvidia-smi, and waits up to ``ASK_S`` seconds
    for each. Raises ConfigurationError, without a full stop, where a driver is there and neither got an answer.
    """
    faults: list[str] = []
    try:
        if (gpus := _from_nvml(environ)) is not None:
            return gpus
    except _NoAnswer as error:
        faults.append(f"NVML: {error}")  # its library is missing, mostly: then there is no driver, unless:
    there = os.path.exists(NVIDIACTL)
    try:
        if (gpus := _from_smi(environ)) is not None:
            return gpus
    except _NoAnswer as error:
        faults.append(f"nvidia-smi: {error}")
        there = True
    if not there:
        return None
    why = "; ".join(faults) or "neither nvidia-ml-py nor nvidia-smi is installed"
    raise ConfigurationError(f"the NVIDIA driver cannot be asked ({why})")


class _NoAnswer(Exception):
    """Why a command gave none: its own words where it had some."""


def _from_nvml(environ: Mapping[str, str]) -> tuple[Gpu, ...] | None:
    """The GPUs, or None where nvidia-ml-py is not installed. Raises _NoAnswer."""
    if not (sys.executable and (folder := _folder_of_pynvml())):
        return None
    # Isolated and without site: no .pth file, sitecustomize or json.py of the user's runs; the one folder is named.
    answer = _ask([sys.executable, "-I", "-S", "-c", _ASK_NVML, folder], environ)
    try:
        return tuple(Gpu(*gpu) for gpu in json.loads(answer))
    except (ValueError, TypeError):
        raise _NoAnswer(f"unexpected answer {shown(answer)}") from None


def _from_smi(environ: Mapping[str, str]) -> tuple[Gpu, ...] | None:
    """The GPUs, or None where there is no nvidia-smi. Raises _NoAnswer."""
    smi = shutil.which("nvidia-smi", path=environ.get("PATH"))
    if smi is None:
        return None
    try:
        answer = _ask([smi, "--query-gpu=index,uuid,name,compute_mode", "--format=csv,noheader"], environ)
    except _NoAnswer as error:
        if "No devices were found" in str(error):  # an answer, although it ends with 6
            return ()
        raise
    try:
        return tuple(map(_gpu, answer.splitlines()))
    except ValueError:
        raise _NoAnswer(f"unexpected answer {shown(answer)}") from None


def _folder_of_pynvml() -> str | None:
    try:
        spec = importlib.util.find_spec("pynvml")
    except ValueError:  # somebody put a module without a spec into sys.modules
        return None
    if spec is None or spec.origin is None:
        return None
    folder = os.path.dirname(os.path.abspath(spec.origin))
    return os.path.dirname(folder) if spec.submodule_search_locations else folder


def _gpu(line: str) -> Gpu:
    """One line of nvidia-smi. Raises ValueError where it is none, such as "0, [Unknown Error], …"."""
    index, uuid, *name, mode = map(str.strip, line.split(","))
    if not uuid.startswith("GPU-"):
        raise ValueError(line)
    return Gpu(int(index), uuid, ", ".join(name), mode == "Exclusive_Process")


def _ask(command: Sequence[str], environ: Mapping[str, str]) -> str:
    """What the command prints. Blocks up to ``ASK_S`` seconds. Raises _NoAnswer."""
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
        raise _NoAnswer(str(error)) from None
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
            raise _NoAnswer(f"no answer within {ASK_S:g} s") from None
        raise
    if process.returncode != 0:
        words = " ".join(f"{err} {out}".split())[:300].rstrip(".")
        raise _NoAnswer(words or f"it ended with {process.returncode}")
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
