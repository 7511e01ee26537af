"""The environment by which a process knows that it is a rank: torchrun's variables, and those of others like it.

Pure, but for ``is_main_rank`` and ``refuse_rank``, which ask this process's own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from ._errors import ConfigurationError

_OF_TORCHRUN = (
    "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE NODE_RANK MASTER_ADDR MASTER_PORT "
    "GROUP_RANK GROUP_WORLD_SIZE ROLE_NAME ROLE_RANK ROLE_WORLD_SIZE"
)
_OF_SRUN = (  # those that count its tasks; the others, SLURM_JOB_ID or SLURM_TMPDIR say, tell of the allocation
    "SLURM_PROCID SLURM_LOCALID SLURM_NODEID SLURM_GTIDS SLURM_NTASKS SLURM_NPROCS SLURM_NTASKS_PER_NODE "
    "SLURM_NTASKS_PER_GPU SLURM_TASKS_PER_NODE SLURM_STEP_NUM_TASKS SLURM_STEP_TASKS_PER_NODE"
)
_OF_MPI = (
    "PMI_RANK PMI_SIZE PMIX_RANK MPI_LOCALRANKID MPI_LOCALNRANKS PALS_RANKID PALS_LOCAL_RANKID FLUX_TASK_RANK "
    "JSM_NAMESPACE_RANK JSM_NAMESPACE_LOCAL_RANK JSM_NAMESPACE_SIZE"
)
_OF_A_RANK = frozenset(f"{_OF_TORCHRUN} {_OF_SRUN} {_OF_MPI}".split())
_PREFIXES = ("TORCHELASTIC_", "OMPI_COMM_WORLD_", "MV2_COMM_WORLD_")

_RUN_ID = "TORCHELASTIC_RUN_ID"


def without_ranks(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without what would make its process take itself for a rank, of whatever group."""
    return {name: value for name, value in environ.items() if name not in _OF_A_RANK and not name.startswith(_PREFIXES)}


def rank_environ(
    *,
    local_rank: int,
    ranks: int,
    node_rank: int,
    nodes: int,
    restart: int,
    max_restarts: int,
) -> dict[str, str]:
    """What torchrun sets for a rank, but for ``master_environ``. ``ranks``: on each node.

    And but for TORCHELASTIC_ERROR_FILE, since a rank's exception comes back by itself, and what is for its agent alone.
    """
    rank, world = node_rank * ranks + local_rank, nodes * ranks
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": str(node_rank),
        "GROUP_WORLD_SIZE": str(nodes),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(world),
        "TORCHELASTIC_RESTART_COUNT": str(restart),
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def master_environ(master: tuple[str, int], run_id: str) -> dict[str, str]:
    """What torchrun sets besides, of the store that the ranks join: host and port, and which group it is."""
    return {"MASTER_ADDR": master[0], "MASTER_PORT": str(master[1]), _RUN_ID: run_id}


def is_main_rank() -> bool:
    """True in rank 0 of a group, and wherever there is no group: where a file is to be written once, say."""
    return os.environ.get("RANK", "0") == "0"


def refuse_rank() -> None:
    """To be called where a sweep begins. Raises ConfigurationError where this process is a rank of a group already."""
    if _RUN_ID in os.environ:
        which = f"rank {os.environ.get('RANK', '?')} of {os.environ.get('WORLD_SIZE', '?')}"
        raise ConfigurationError(
            f"{_RUN_ID}={os.environ[_RUN_ID]!r}: this process is {which} of a group that torchrun, or gpu_pool, has "
            "started, and each of them would run the whole sweep; start it with python instead, and have gpu_pool "
            "start the ranks of each job (mode: ddp)."
        )
