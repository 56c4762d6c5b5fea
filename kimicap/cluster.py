"""Several processes, one capture: who this process is, and which blocks are its own.

Processes never talk to each other. A block belongs to the rank that its number names modulo the world, so two
processes never write the same shard, and a killed rank's blocks are left for a later resume.
"""

import os
import time
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass

from kimicap.errors import MismatchError, UsageError

WAIT_S = 600.0
"""Longest wait for rank 0 to create the capture."""


@dataclass(frozen=True, kw_only=True)
class Rank:
    """This process among those of the run."""

    rank: int = 0
    world: int = 1
    local: int = 0

    def blocks(self, blocks: int, committed: Container[int]) -> list[int]:
        """Numbers of the blocks that are this rank's and not committed yet."""
        return [block for block in range(self.rank, blocks, self.world) if block not in committed]


_NAMES = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
)


def find_rank(environment: Mapping[str, str] = os.environ) -> Rank:
    """Rank and world as torchrun or SLURM's srun have set them; one process where neither has.

    Raises:
        UsageError: They are set, but make no sense.
    """
    # A batch job's script has PROCID 0 and the job's NTASKS, but is no step of so many: srun alone starts one.
    outside = "SLURM_JOB_ID" in environment and "SLURM_STEP_NUM_TASKS" not in environment
    for names in _NAMES[:1] if outside else _NAMES:
        if names[0] in environment and names[1] in environment:
            try:
                rank, world, local = (int(environment.get(name, "0")) for name in names)
            except ValueError:
                rank, world, local = -1, 0, 0
            if not 0 <= rank < world:
                raise UsageError(
                    f"{names[0]}={environment[names[0]]} and {names[1]}={environment[names[1]]} name no process of a "
                    "run; start it with torchrun or srun, or unset them."
                )
            return Rank(rank=rank, world=world, local=local)
    return Rank()


def wait_for(ready: Callable[[], bool], *, what: str, limit_s: float = WAIT_S) -> None:
    """Waits until ``ready``, looking five times a second.

    Raises:
        MismatchError: It took longer than ``limit_s``.
    """
    start = time.monotonic()
    while not ready():
        if time.monotonic() - start > limit_s:
            raise MismatchError(f"Waited {limit_s:.0f} s for {what}; look at the output of rank 0.")
        time.sleep(0.2)
