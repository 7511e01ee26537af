"""The program that asks NVIDIA's driver: which GPUs there are, what is free on them, who is on them.

    python -I -S _driver.py FOLDER

It prints a line of JSON at once, and another for each line that it reads; it ends with its input. It is a process of
its own since what NVML sets up is broken in every fork of a process that has loaded it. Isolated and without site, no
.pth file, sitecustomize or json.py of the user's runs in it: it imports nothing of this package, and ``FOLDER``, "" for
none, is where pynvml (nvidia-ml-py) is. A line says

    {"gpus": [...], "from": "NVML"}    or "nvidia-smi", which is asked where NVML cannot be
    {"fault": "why neither has answered"}

``_cards`` reads it, and says what is known of a GPU. What cannot be had is null, memory is in bytes, a process is
[pid, bytes]. A GPU that the driver refuses has a "fault", in the driver's words, and its index. Where all of a query
fails, after a reset of the driver say, NVML is initialised again for the next line.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from typing import Any, TextIO

_COLUMNS = "index,uuid,name,compute_mode,memory.total,memory.free,mig.mode.current"
_FORM = "--format=csv,noheader,nounits"
_GPU = re.compile(r"GPU (\d+): ")
_INSTANCE = re.compile(r"\s+MIG (\S+)\s+Device\s+\d+: \(UUID: (MIG-[^)]+)\)")
_PROHIBITED = "its compute mode is Prohibited"


class NoAnswer(Exception):
    """Why one way to ask gave none: its own words where it had some."""


def serve(folder: str, questions: Iterable[str], answers: TextIO) -> None:
    """Answer once, and once more for each question, until there are no more."""
    nvml = Nvml(folder) if folder else None
    smi = shutil.which("nvidia-smi")
    answers.write(f"{json.dumps(answer(nvml, smi))}\n")
    answers.flush()
    for _ in questions:
        answers.write(f"{json.dumps(answer(nvml, smi))}\n")
        answers.flush()


def answer(nvml: Nvml | None, smi: str | None) -> dict[str, Any]:
    """One line, as an object. Blocks for as long as the driver does."""
    faults = []
    if nvml is not None:
        try:
            return {"gpus": nvml.gpus(), "from": "NVML"}
        except NoAnswer as error:
            faults.append(f"NVML: {error}")
    if smi is not None:
        try:
            return {"gpus": from_smi(smi), "from": "nvidia-smi"}
        except NoAnswer as error:
            faults.append(f"nvidia-smi: {error}")
    return {"fault": "; ".join(faults) or "neither nvidia-ml-py nor nvidia-smi is installed"}


class Nvml:
    """NVML by nvidia-ml-py, any version of it: what one lacks is null. Initialised once, as long as it works."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._module: Any = None
        self._works = False

    def gpus(self) -> list[dict[str, Any]]:
        """All GPUs. Raises NoAnswer."""
        try:
            if self._module is None:
                sys.path.append(self._folder)
                self._module = importlib.import_module("pynvml")
            if not self._works:
                self._have("nvmlShutdown")  # else NVML counts the next call, and stays as it is
                self._module.nvmlInit()
            self._works = False
            gpus = [self._gpu(index) for index in range(self._module.nvmlDeviceGetCount())]
        except (Exception, SystemExit) as error:  # whatever somebody's own module named pynvml does
            raise NoAnswer(str(error) or type(error).__name__) from None
        self._works = not gpus or any(gpu["fault"] is None for gpu in gpus)
        return gpus

    def _gpu(self, index: int) -> dict[str, Any]:
        nvml = self._module
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            uuid = nvml.nvmlDeviceGetUUID(handle)
        except nvml.NVMLError as error:
            return {"index": index, "fault": str(error)}
        mode = self._have("nvmlDeviceGetComputeMode", handle)
        mig = (self._have("nvmlDeviceGetMigMode", handle) or (0,))[0] == 1
        return {
            "index": index,
            "exclusive": mode is not None and mode == getattr(nvml, "NVML_COMPUTEMODE_EXCLUSIVE_PROCESS", 3),
            "mig": mig,
            **self._known(handle, uuid),
            "instances": self._instances(handle) if mig else [],
            "fault": _PROHIBITED if mode == getattr(nvml, "NVML_COMPUTEMODE_PROHIBITED", 2) else None,
        }

    def _instances(self, handle: Any) -> list[dict[str, Any]]:
        """Those that can be used: their numbers have gaps, and one may be somebody else's."""
        most = self._have("nvmlDeviceGetMaxMigDeviceCount", handle) or 0
        handles = [self._have("nvmlDeviceGetMigDeviceHandleByIndex", handle, index) for index in range(most)]
        known = [(found, self._have("nvmlDeviceGetUUID", found)) for found in handles if found is not None]
        return [self._known(found, uuid) for found, uuid in known if uuid is not None]

    def _known(self, handle: Any, uuid: str | bytes) -> dict[str, Any]:
        memory = self._have("nvmlDeviceGetMemoryInfo", handle)
        processes = self._have("nvmlDeviceGetComputeRunningProcesses", handle)
        return {
            "uuid": _text(uuid),
            "name": _text(self._have("nvmlDeviceGetName", handle)),
            "total": None if memory is None else int(memory.total),
            "free": None if memory is None else int(memory.free),
            "processes": None if processes is None else [[p.pid, p.usedGpuMemory] for p in processes],
        }

    def _have(self, call: str, *arguments: Any) -> Any:
        """What the call says, None where it cannot be had: not on this card, not by this user, not in this version."""
        try:
            return getattr(self._module, call)(*arguments)
        except Exception:
            return None


def _text(value: str | bytes | None) -> str | None:
    return value.decode(errors="replace") if isinstance(value, bytes) else value  # older versions give bytes


def from_smi(smi: str) -> list[dict[str, Any]]:
    """All GPUs by nvidia-smi, which is started up to three times. Raises NoAnswer."""
    try:
        said = _run(smi, f"--query-gpu={_COLUMNS}", _FORM)
    except NoAnswer as error:
        if "No devices were found" in str(error):  # an answer, although it ends with 6
            return []
        raise
    try:
        processes: str | None = _run(smi, "--query-compute-apps=gpu_uuid,pid,used_memory", _FORM)
    except NoAnswer:
        processes = None
    gpus = gpus_of_smi(said, processes)
    if any(gpu.get("mig") for gpu in gpus):
        instances = instances_of_smi(_run(smi, "-L"))
        for gpu in gpus:
            for profile, uuid in instances.get(gpu["index"], ()) if gpu.get("mig") else ():
                name = f"{gpu['name']} MIG {profile}"
                rest = {"total": None, "free": None, "processes": None}  # nvidia-smi has them in words only
                gpu["instances"].append({"uuid": uuid, "name": name, **rest})
    return gpus


def gpus_of_smi(said: str, processes: str | None) -> list[dict[str, Any]]:
    """The GPUs in what nvidia-smi has printed, without their instances. Pure. Raises NoAnswer where it is nonsense."""
    gpus: list[dict[str, Any]] = []
    for line in said.splitlines():
        try:
            index, uuid, *names, mode, total, free, mig = map(str.strip, line.split(","))
            number = int(index)
        except ValueError:
            raise NoAnswer(f"unexpected answer {' '.join(repr(said).split())[:200]}") from None
        if not uuid.startswith("GPU-"):  # "[Unknown Error]"
            gpus.append({"index": number, "fault": uuid.strip("[]") or "no UUID"})
            continue
        gpu = {"index": number, "uuid": uuid, "name": ", ".join(names), "total": _bytes(total), "free": _bytes(free)}
        state = {"exclusive": mode == "Exclusive_Process", "mig": mig == "Enabled", "instances": []}
        fault = _PROHIBITED if mode == "Prohibited" else None
        gpus.append({**gpu, **state, "processes": _processes(processes, uuid), "fault": fault})
    return gpus


def _processes(said: str | None, uuid: str) -> list[list[int | None]] | None:
    try:
        rows = [list(map(str.strip, line.split(","))) for line in (said or "").splitlines()]
        return None if said is None else [[int(pid), _bytes(used)] for on, pid, used in rows if on == uuid]
    except ValueError:
        return None


def instances_of_smi(listing: str) -> dict[int, list[tuple[str, str]]]:
    """Per GPU's number, the profile and the UUID of each of its MIG instances, as ``nvidia-smi -L`` has them. Pure."""
    found: dict[int, list[tuple[str, str]]] = {}
    for line in listing.splitlines():
        if gpu := _GPU.match(line):
            found[int(gpu[1])] = []
        elif (instance := _INSTANCE.match(line)) and found:
            found[max(found)].append((instance[1], instance[2]))
    return found


def _bytes(mib: str) -> int | None:
    return int(mib) * 2**20 if mib.isascii() and mib.isdigit() else None  # "[N/A]", "[Insufficient Permissions]"


def _run(smi: str, *arguments: str) -> str:
    """What nvidia-smi prints. Raises NoAnswer."""
    try:
        done = subprocess.run(
            [smi, *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False
        )
    except OSError as error:
        raise NoAnswer(str(error)) from None
    if done.returncode != 0:
        words = " ".join(f"{done.stderr} {done.stdout}".split())[:300].rstrip(".")
        raise NoAnswer(words or f"it ended with {done.returncode}")
    return done.stdout


if __name__ == "__main__":
    with open(os.dup(1), "w", encoding="utf-8") as to_us:
        os.dup2(2, 1)  # what a library prints is no answer
        serve(sys.argv[1], sys.stdin, to_us)
