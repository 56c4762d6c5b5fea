"""Several GPUs, one capture: `torchrun --standalone --nproc-per-node 2 -m benchmarks.two_gpus FOLDER [SHAPE]`.

Every process builds the same model on its own GPU. In turn, all of them capture their blocks, and rank 0 captures all
blocks alone. Rank 0 prints the throughput against one GPU, and then whether the captures are the same, as JSON.
"""

import filecmp
import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from benchmarks.harness import over
from benchmarks.subject import Subject, build, create
from kimicap import store
from kimicap.cluster import Rank, find_rank, wait_for
from kimicap.prepare import Prepared
from kimicap.session import Session
from kimicap.slots import Slots

REPEATS = 3
VALUES = ["residuals", "router_logits", "expert_indices", "state_output"]


def main() -> None:
    """Measures, prints, and leaves the captures in the folder given."""
    folder, rank = Path(sys.argv[1]), find_rank()
    shape = sys.argv[2] if len(sys.argv) > 2 else "small"
    mine = folder / f"rank-{rank.rank}"
    mine.mkdir(parents=True, exist_ok=True)
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(rank.local)
    device = f"cuda:{rank.local}" if on_gpu else "cpu"
    subject = build(shape, mine, batch_rows=8, row_tokens=2048 if on_gpu else 64, device=device)
    measure(subject, folder, rank)


def measure(subject: Subject, folder: Path, rank: Rank) -> None:
    """The captures of one model, by all processes and by one."""
    prepared = subject.prepared(VALUES, batches=16, block_sequences=8)
    slots = subject.slots(prepared)
    subject.capture(prepared, slots)  # tunes the kernels and pins the slots
    together, alone = folder / "together.zarr", folder / "alone.zarr"
    taken: dict[str, list[float]] = {"together": [], "alone": []}
    for repeat in range(REPEATS + 1):  # the first is not counted: the machine's memory is new
        for name, path, who in (("together", together, rank), ("alone", alone, Rank())):
            if rank.rank == 0:
                create(prepared, path)
            meet(folder, rank, f"{name}-{repeat}-created")
            start = time.perf_counter()
            if rank.rank == 0 or name == "together":
                _capture(subject, prepared, slots, path, who)
            meet(folder, rank, f"{name}-{repeat}-done")
            taken[name].append(time.perf_counter() - start)
    slots.close()
    if rank.rank == 0:
        report(together, alone, {name: seconds[1:] for name, seconds in taken.items()}, rank.world)


def meet(folder: Path, rank: Rank, name: str) -> None:
    """Waits until every process has come here."""
    (folder / f"{name}-{rank.rank}").touch()
    there: Callable[[], bool] = lambda: len(list(folder.glob(f"{name}-*"))) == rank.world  # noqa: E731
    wait_for(there, what="the other processes")


def report(together: Path, alone: Path, taken: dict[str, list[float]], world: int) -> None:
    """Prints what was measured, and then how many of the shard files are the same, byte for byte."""
    ratio, spread = over(taken["alone"], taken["together"])
    print(json.dumps({"processes": world, **taken, "throughput": ratio, "spread": spread}), flush=True)
    names = sorted(str(file.relative_to(alone)) for file in alone.rglob("c.*"))
    assert names == sorted(str(file.relative_to(together)) for file in together.rglob("c.*"))
    with ThreadPoolExecutor() as pool:
        same = list(pool.map(lambda name: filecmp.cmp(alone / name, together / name, shallow=False), names))
    differing = [name for name, equal in zip(names, same, strict=True) if not equal]
    print(json.dumps({"shards": len(names), "equal": sum(same), "differing": differing[:5]}), flush=True)


def _capture(subject: Subject, prepared: Prepared, slots: Slots, path: Path, rank: Rank) -> None:
    opened = store.resume(path)
    blocks = rank.blocks(prepared.plan.blocks, {})
    for _ in Session(prepared, subject.model, slots).capture(opened, blocks, rank=rank, checked=False):
        pass
    if len(opened.committed()) == prepared.plan.blocks:
        opened.seal(prepared.plan.blocks, {})


if __name__ == "__main__":
    main()
