"""The same values by other means, tokens a second to host memory: plain hooks with .cpu(), and nnsight."""

import importlib.util
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.capture import USUAL
from benchmarks.harness import Result, alternate, over
from benchmarks.subject import Subject

TIMES = 2
"""Forwards of a run, in units of ``--batches``: start and end weigh little, and the peers are slow."""


def against_peers(subject: Subject, *, batches: int, repeats: int) -> Iterator[Result]:
    """Kimicap up to the whole shards in host memory, which are then discarded, against peers that copy there."""
    batches *= TIMES
    prepared = subject.prepared(USUAL, batches=batches)
    slots = subject.slots(prepared)
    runs: dict[str, Any] = {
        "kimicap": lambda: subject.capture(prepared, slots),
        "hooks": lambda: _plain_hooks(subject, batches),
    }
    if importlib.util.find_spec("nnsight"):
        runs["nnsight"] = _nnsight(subject, batches)
    taken = alternate(runs, repeats=repeats)
    slots.close()
    for peer, target in (("hooks", ">= 1"), ("nnsight", ">= 4")):
        if peer in taken:
            ratio, spread = over(taken[peer], taken["kimicap"])
            yield Result(
                name=f"tokens/s against {peer} with .cpu(), same values to host memory",
                target=target,
                measured=ratio,
                spread=spread,
                detail=taken,
            )


def _plain_hooks(subject: Subject, batches: int) -> None:
    kept: list[torch.Tensor] = []
    handles = []
    for block in subject.model.model.layers:
        handles.append(block.register_forward_hook(lambda m, a, out: kept.append(out.cpu())))
        if hasattr(block.mlp, "gate"):
            handles.append(
                block.mlp.gate.register_forward_hook(lambda m, a, out: kept.extend((out[0].cpu(), out[2].cpu())))
            )
    try:
        for _ in range(batches):
            kept.clear()
            subject.forwards(1)
    finally:
        for handle in handles:
            handle.remove()


def _nnsight(subject: Subject, batches: int) -> Any:
    from nnsight import NNsight

    wrapped = NNsight(subject.model.model)
    device = next(subject.model.parameters()).device
    ids = torch.randint(3, subject.vocab, (subject.batch_rows, subject.row_tokens), device=device)

    def run() -> None:
        for _ in range(batches):
            kept: list[torch.Tensor] = []  # a forward's values at once, as for plain hooks
            with torch.inference_mode(), wrapped.trace(input_ids=ids, use_cache=False):
                for block in wrapped.layers:
                    if hasattr(block.mlp, "gate"):
                        kept.append(block.mlp.gate.output[0].cpu().save())
                        kept.append(block.mlp.gate.output[2].cpu().save())
                    kept.append(block.output.cpu().save())

    return run
