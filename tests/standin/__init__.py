"""Stand-ins for an NVIDIA driver: libnvidia-ml.so.1, which nvidia-ml-py loads for real, and nvidia-smi.

Both answer from a file of lines, which a test may change at any time, and read it anew each time they are asked:

    driver init_fault=9 count_fault=15 epoch=1 hang=1
    gpu uuid=GPU-aa total=80e9 free=79e9 mode=3 mig=1 fault=15 name=NVIDIA H200
    mig uuid=MIG-ab total=10e9 name=NVIDIA H200 MIG 1g.10gb
    process on=GPU-aa pid=4242 used=1e9 elsewhere=1

GPUs are numbered as they stand there; instances belong to the GPU above them. All keys but ``uuid``, ``on``, ``pid``
may be missing; ``name`` is the last one. Bytes. ``free``: else what the processes leave of ``total``. A process counts
while it lives, as on a real card, so that a job may add a line for itself and be done with it; with ``elsewhere``,
whatever this machine knows of it. ``…fault``: NVML's code for what a call answers: ``fault`` of the handle, ``uuid_``,
``name_``, ``memory_``, ``mode_``, ``mig_`` and ``processes_fault`` of these calls. ``epoch``: where it has changed, the
driver was reset, and wants to be initialised again. ``hang``: no call comes back.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Cards:
    """The GPUs of a machine that has none: the file that says which, and the environment in which it is asked."""

    file: Path
    environ: dict[str, str]

    def are(self, *lines: str) -> None:
        """The machine has these, and nothing else, from now on. No one sees half of it."""
        aside = self.file.with_name(f"{self.file.name}.{os.getpid()}")
        aside.write_text("".join(f"{line}\n" for line in lines))
        aside.replace(self.file)

    def get(self, line: str) -> None:
        """One more line, at the end."""
        with open(self.file, "a") as file:
            file.write(f"{line}\n")


def build_library(directory: Path, cc: str) -> None:
    """libnvidia-ml.so.1 in this directory. Raises CalledProcessError."""
    source, library = str(HERE / "nvml.c"), str(directory / "libnvidia-ml.so.1")
    command = [cc, "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1"]
    subprocess.run([*command, "-o", library, source], check=True)


def install_smi(directory: Path) -> None:
    """The command nvidia-smi in this directory."""
    script = directory / "nvidia-smi"
    script.write_text(f"#!{sys.executable} -IS\n{(HERE / 'smi.py').read_text()}")
    script.chmod(0o755)
