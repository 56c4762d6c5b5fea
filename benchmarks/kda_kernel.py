"""Check the CUDA kernel of the delta rule against the plain recurrence, then time it; JSON lines on stdout.

Run on a CUDA machine: ``python benchmarks/kda_kernel.py [--rows 8 --tokens 2048 --heads 32 --channels 128]``.
A check line has the worst relative error, a time line the median of its runs in milliseconds.
"""

import argparse
import itertools
import json
import statistics

import torch

from kimicap import kda
from kimicap.kda_triton import Tile, states_on_cuda

Factors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def factors(rows: int, tokens: int, heads: int, channels: int) -> Factors:
    """Draw keys, values and betas in bfloat16 and log decays in float32, as a Kimi-Linear model has them."""
    shape = (rows, tokens, heads, channels)
    keys = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    values = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    decays = -0.4 * torch.rand(shape, device="cuda")
    return keys, values, decays, torch.rand(shape[:3], device="cuda", dtype=torch.bfloat16)


def check(tile: Tile, channels: int) -> dict[str, object]:
    """Compare all states of a small case, with an initial state and rows of different lengths."""
    given = factors(3, 70, 2, channels)
    initial = torch.randn(3, 2, channels, channels, device="cuda")
    expected, _ = kda.replay(*given, initial=initial)
    lengths = torch.tensor([70, 33, 1])
    states, final = states_on_cuda(*given, list(range(70)), initial, lengths, tile)
    worst = 0.0
    for row, length in enumerate(lengths.tolist()):
        pairs = ((states[row, :length], expected[row, :length]), (final[row], expected[row, length - 1]))
        off = [float((found - right).norm() / right.norm()) for found, right in pairs]
        missing = bool(states[row, length:].isnan().all())
        worst = max(worst, *(x if x == x and missing else float("inf") for x in off))
    return {"error": worst, "right": worst < 1e-5}


def time_ms(given: Factors, at: list[int], tile: Tile, runs: int) -> dict[str, object]:
    """Time the kernel by CUDA events."""
    times = []
    for run in range(runs + 2):
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record()
        states_on_cuda(*given, at, None, None, tile)
        end.record()
        end.synchronize()
        if run >= 2:  # the first ones compile and fill the allocator's cache
            times.append(begin.elapsed_time(end))
    return {
        "median_ms": statistics.median(times),
        "least_ms": min(times),
        "most_ms": max(times),
        "runs": runs,
    }


def main() -> None:
    """Print one line for each check and each timing."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("rows", 8), ("tokens", 2048), ("heads", 32), ("channels", 128), ("every", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--runs", type=int, default=7)
    flags = parser.parse_args()
    torch.manual_seed(0)
    given = factors(flags.rows, flags.tokens, flags.heads, flags.channels)
    at = list(range(flags.every - 1, flags.tokens, flags.every))
    size = {"rows": flags.rows, "tokens": flags.tokens, "heads": flags.heads, "channels": flags.channels}
    for block_v, warps, stages, registers in itertools.product((8, 16, 32, 64), (1, 2, 4), (1, 3), (None, 128)):
        if block_v // warps > 32:
            continue  # the state alone would fill the register file; the compiler spills it
        tile = Tile(block_v=block_v, num_warps=warps, num_stages=stages, max_registers=registers)
        line: dict[str, object] = {
            "block_v": block_v,
            "num_warps": warps,
            "num_stages": stages,
            "max_registers": registers,
        }
        for channels in (64, 128):
            print(json.dumps({"what": "check", "channels": channels} | line | check(tile, channels)), flush=True)
        timing = time_ms(given, at, tile, flags.runs)
        print(json.dumps({"what": "time", "states": len(at)} | size | line | timing), flush=True)


if __name__ == "__main__":
    main()
