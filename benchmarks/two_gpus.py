"""Several GPUs, one capture: `torchrun --standalone --nproc-per-node 2 -m benchmarks.two_gpus FOLDER`.

Every process builds the same model on its own GPU and captures its blocks; then rank 0 captures all of them alone.
Rank 0 prints the throughput against one GPU and whether the arrays agree, as JSON.
"""

import filecmp
import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from benchmarks.subject import Subject, build, create
from kimicap import records, store
from kimicap.cluster import Rank, find_rank, wait_for
from kimicap.prepare import Prepared
from kimicap.session import Session
from kimicap.slots import Slots

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
    prepared = subject.prepared(VALUES, batches=16, block_sequences=8)
    slots = Slots(prepared.settings.memory, pinned=on_gpu)
    subject.capture(prepared, slots)  # tunes the kernels and pins the slots
    together, alone = folder / "together.zarr", folder / "alone.zarr"
    if rank.rank == 0:
        create(prepared, together)
    wait_for(lambda: records.is_capture(together), what="rank 0")
    meet(folder, rank, "ready")
    start = time.time()
    _capture(subject, prepared, slots, together, rank)
    meet(folder, rank, "done")
    seconds = time.time() - start
    if rank.rank == 0:
        create(prepared, alone)
        start = time.time()
        _capture(subject, prepared, slots, alone, Rank())
        report(together, alone, seconds, time.time() - start, rank.world)
    slots.close()


def meet(folder: Path, rank: Rank, name: str) -> None:
    """Waits until every process has come here."""
    (folder / f"{name}-{rank.rank}").touch()
    there: Callable[[], bool] = lambda: len(list(folder.glob(f"{name}-*"))) == rank.world  # noqa: E731
    wait_for(there, what="the other processes")


def report(together: Path, alone: Path, many_s: float, one_s: float, world: int) -> None:
    """Prints what was measured, and then how many of the shard files are the same, byte for byte."""
    found = {"processes": world, "together_s": many_s, "alone_s": one_s, "throughput": one_s / many_s}
    print(json.dumps(found), flush=True)
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
