"""The stand-ins for a driver, by themselves: nvidia-ml-py and a shell take them for real."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from standin import Cards

ASK = """
import json, sys
import pynvml as nvml
def told(call, *arguments):
    try:
        return call(*arguments)
    except nvml.NVMLError as error:
        return str(error)
def card(handle):
    memory = told(nvml.nvmlDeviceGetMemoryInfo, handle)
    processes = told(nvml.nvmlDeviceGetComputeRunningProcesses, handle)
    return {
        "uuid": told(nvml.nvmlDeviceGetUUID, handle),
        "name": told(nvml.nvmlDeviceGetName, handle),
        "memory": memory if isinstance(memory, str) else [memory.total, memory.free, memory.used],
        "mode": told(nvml.nvmlDeviceGetComputeMode, handle),
        "mig": told(nvml.nvmlDeviceGetMigMode, handle),
        "processes": [[p.pid, p.usedGpuMemory] for p in processes],
    }
for _ in sys.stdin:
    answer = told(nvml.nvmlDeviceGetCount)
    if answer == "Uninitialized":
        told(nvml.nvmlShutdown)
        answer = told(nvml.nvmlInit) or told(nvml.nvmlDeviceGetCount)
    if isinstance(answer, int):
        handles = [told(nvml.nvmlDeviceGetHandleByIndex, i) for i in range(answer)]
        answer = []
        for handle in handles:
            answer.append(handle if isinstance(handle, str) else card(handle))
            for i in range(0 if isinstance(handle, str) else nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
                instance = told(nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, i)
                answer += [] if isinstance(instance, str) else [card(instance)]
    print(json.dumps(answer), flush=True)
"""


def test_nvidia_ml_py_is_told_what_stands_in_the_file_at_that_time(cards: Cards) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", ASK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:

        def said(*lines: str) -> Any:
            assert process.stdin is not None
            assert process.stdout is not None
            cards.are(*lines)
            process.stdin.write("\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        assert said("driver init_fault=9") == "Driver Not Loaded"
        assert said() == []
        (plain,) = said("gpu uuid=GPU-a total=80e9 name=NVIDIA H200", f"process on=GPU-a pid={os.getpid()} used=1e9")
        assert plain == {
            "uuid": "GPU-a",
            "name": "NVIDIA H200",
            "memory": [80_000_000_000, 79_000_000_000, 1_000_000_000],
            "mode": 0,
            "mig": "Not Supported",
            "processes": [[os.getpid(), 1_000_000_000]],
        }
        lines = [
            "gpu uuid=GPU-a total=80e9 free=7e9 mode=3 mig=1 name=A",
            "mig uuid=MIG-a total=10e9 name=A MIG",
            "mig uuid=MIG-b memory_fault=4 name=A MIG",
            "gpu fault=15",
            "process on=MIG-a pid=1 elsewhere=1",
            f"process on=MIG-a pid={2**22 + 1} used=5",
        ]
        whole, first, second, lost = said(*lines)
        assert (whole["mode"], whole["mig"], whole["memory"][1]) == (3, [1, 1], 7_000_000_000)
        assert (first["uuid"], first["processes"]) == ("MIG-a", [[1, None]])
        assert whole["processes"] == first["processes"]
        assert (second["memory"], second["processes"]) == ("Insufficient Permissions", [])
        assert lost == "GPU is lost"
        assert said("driver count_fault=999") == "Unknown Error"
        assert said("driver epoch=2", "gpu uuid=GPU-b name=B")[0]["uuid"] == "GPU-b"  # initialised once more


def test_nvidia_smi_is_told_the_same(cards_by_smi: Cards) -> None:
    def said(*arguments: str, code: int = 0) -> list[str]:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == code, done.stderr
        return done.stdout.splitlines()

    cards_by_smi.are(
        "gpu uuid=GPU-a total=80e9 mode=3 mig=1 name=A",
        "mig uuid=MIG-a total=10e9 name=A MIG 1g.10gb",
        "gpu uuid=GPU-b memory_fault=4 name=B",
        f"process on=MIG-a pid={os.getpid()} used=1e9",
    )
    query, form = (
        "--query-gpu=index,uuid,name,compute_mode,memory.free,mig.mode.current",
        "--format=csv,noheader,nounits",
    )
    assert said(query, form) == [
        "0, GPU-a, A, Exclusive_Process, 75340, Enabled",
        "1, GPU-b, B, Default, [Insufficient Permissions], [N/A]",
    ]
    assert said("-L") == [
        "GPU 0: A (UUID: GPU-a)",
        "  MIG 1g.10gb      Device  0: (UUID: MIG-a)",
        "GPU 1: B (UUID: GPU-b)",
    ]
    assert said("--query-compute-apps=gpu_uuid,pid,used_memory", form) == [f"GPU-a, {os.getpid()}, 953"]
    cards_by_smi.are()
    assert said("-L", code=6) == ["No devices were found"]
