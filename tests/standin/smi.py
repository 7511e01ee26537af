"""A stand-in for nvidia-smi, as far as it is asked: see ``__init__`` for what its answers come from."""

import os
import signal
import sys

WORDS = {3: "[N/A]", 4: "[Insufficient Permissions]", 15: "[GPU is lost]"}
"""By NVML's code; nvidia-smi has them in the place of a figure."""


def fields(line: str) -> "dict[str, str]":
    """The keys of one line, and its kind."""
    before, _, name = line.partition(" name=")
    kind, *rest = before.split()
    return {"kind": kind, "name": name, **dict(pair.split("=", 1) for pair in rest)}


def lives(process: "dict[str, str]") -> bool:
    if process.get("elsewhere"):
        return True
    try:
        with open(f"/proc/{process['pid']}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def mib(text: "str | None") -> str:
    return "[N/A]" if text is None else str(int(float(text) / 2**20))


def column(gpu: "dict[str, str]", of: str) -> str:
    """What --query-gpu says of this GPU there."""
    short = {"memory.total": "memory", "memory.free": "memory", "compute_mode": "mode", "mig.mode.current": "mig"}
    if fault := gpu.get(f"{short.get(of, of)}_fault"):
        return WORDS.get(int(fault), "[Unknown Error]")
    if of == "compute_mode":
        return ["Default", "Exclusive_Thread", "Prohibited", "Exclusive_Process"][int(gpu.get("mode", "0"))]
    if of == "mig.mode.current":
        return {"0": "Disabled", "1": "Enabled"}.get(gpu.get("mig", ""), "[N/A]")
    if of == "memory.total":
        return mib(gpu.get("total"))
    if of == "memory.free":
        used = [float(p.get("used", "0")) for p in processes if p["on"] in (gpu["uuid"], *gpu["instances"].split())]
        return mib(gpu.get("free", str(float(gpu["total"]) - sum(used)) if "total" in gpu else None))
    return gpu[of]


with open(os.environ["STANDIN_CARDS"]) as file:
    lines = [fields(line) for line in file.read().splitlines()]
driver = {key: value for line in lines if line["kind"] == "driver" for key, value in line.items()}
processes = [line for line in lines if line["kind"] == "process" and lives(line)]
gpus: "list[dict[str, str]]" = []
for line in lines:
    if line["kind"] == "gpu":
        gpus.append({**line, "index": str(len(gpus)), "instances": ""})
    elif line["kind"] == "mig":
        gpus[-1]["instances"] += f" {line['uuid']}"

while driver.get("hang"):
    signal.pause()
if driver.get("init_fault"):
    print("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.")
    sys.exit(9)
for gpu in gpus:
    if gpu.get("fault"):
        print(f"Unable to determine the device handle for GPU{gpu['index']}: {WORDS.get(int(gpu['fault']), '')}")
        sys.exit(int(gpu["fault"]))
if not gpus:
    print("No devices were found")
    sys.exit(6)

asked = sys.argv[1]
if asked == "-L":
    names = {line["uuid"]: line["name"] for line in lines if "uuid" in line}
    for gpu in gpus:
        print(f"GPU {gpu['index']}: {gpu['name']} (UUID: {gpu['uuid']})")
        for i, uuid in enumerate(gpu["instances"].split()):
            print(f"  MIG {names[uuid].rpartition(' ')[2]:<12} Device {i:>2}: (UUID: {uuid})")
elif sys.argv[2:] != ["--format=csv,noheader,nounits"]:
    sys.exit(f"not known here: {sys.argv[1:]}")
elif asked.startswith("--query-gpu="):
    for gpu in gpus:
        print(", ".join(column(gpu, of) for of in asked.partition("=")[2].split(",")))
elif asked == "--query-compute-apps=gpu_uuid,pid,used_memory":
    owner = {uuid: gpu["uuid"] for gpu in gpus for uuid in (gpu["uuid"], *gpu["instances"].split())}
    for process in processes:
        print(f"{owner[process['on']]}, {process['pid']}, {mib(process.get('used'))}")
else:
    sys.exit(f"not known here: {sys.argv[1:]}")
