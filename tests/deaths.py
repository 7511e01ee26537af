"""A sweep of deaths, for the tables of them: it runs in an interpreter of its own, and is asked what it has said."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support import sweep_well, write_sweeper

FAILED, COMPLETED, CANCELLED = "FAILED", "COMPLETED", "CANCELLED"

CRASHED = "JobCrashedError"

SWEEP = """
import json

def told(ret):
    value = ret._return_value
    error = isinstance(value, BaseException)
    return {{
        "overrides": list(ret.overrides),
        "status": ret.status.name,
        "error": type(value).__name__ if error else None,
        "text": str(value) if error else None,
        "cause": str(value.__cause__) if error else None,
        "value": None if error else f"{{len(value)}} bytes" if isinstance(value, bytes) else value,
    }}

returns = self.launcher.launch({overrides!r}, initial_job_idx=0)
with open("returns.json", "w") as file:
    json.dump([told(ret) for ret in returns], file)
"""


@dataclass(frozen=True)
class Said:
    """What a sweep of deaths said, and to whom: to the sweeper, in the terminal, in the journal."""

    directory: Path
    returns: list[dict[str, Any]]
    terminal: list[str]
    journal: list[dict[str, Any]]

    def end(self, num: int) -> dict[str, Any]:
        (end,) = (entry for entry in self.journal if entry["event"] == "end" and entry["job"] == num)
        return end


def sweep(
    directory: Path, overrides: Sequence[Sequence[str]], launcher: Mapping[str, object], env: dict[str, str]
) -> Said:
    """Of the app that is in the directory: a job for each of the overrides, with these keys of the launcher."""
    write_sweeper(directory, SWEEP.format(overrides=overrides))
    arguments = [f"hydra.launcher.{key}={value}" for key, value in {"gpus": "[]", **launcher}.items()]
    own = ("hydra/launcher=gpu_pool", "hydra/sweeper=own", "hydra.sweep.dir=sweep")
    terminal = sweep_well(directory, *own, *arguments, env=env)
    return Said(
        directory=directory,
        returns=json.loads((directory / "returns.json").read_text()),
        terminal=terminal.splitlines(),
        journal=[json.loads(line) for line in (directory / "sweep/.gpu_pool/journal.jsonl").read_text().splitlines()],
    )
