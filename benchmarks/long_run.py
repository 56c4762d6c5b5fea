"""Many short sequences through a very small model: memory, time a sequence and open files must stay flat.

``python benchmarks/long_run.py --sequences 100000`` prints a JSON line every few seconds and a verdict at the end,
and exits with 1 where something grew. The first part of the run, in which pools fill, is left out of the verdict.
"""

import argparse
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import KimiLinearConfig

from kimicap.config import load_settings
from kimicap.events import Committed
from kimicap.prepare import prepare
from kimicap.run import run

WARM = 0.25
"""Part of the run in which pools and caches may still fill."""


def main() -> int:
    """Runs the capture and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=100_000)
    parser.add_argument("--tokens", type=int, default=16, help="mean length of a sequence")
    parser.add_argument("--block-sequences", type=int, default=256)
    parser.add_argument("--every-s", type=float, default=5.0)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    with tempfile.TemporaryDirectory() as folder:
        samples = list(_samples(Path(folder), given))
    verdict = _verdict(samples)
    print(json.dumps(verdict))
    return 0 if verdict["flat"] else 1


def _samples(folder: Path, given: argparse.Namespace) -> Any:
    draw = random.Random(0)
    with open(folder / "rows.jsonl", "w") as rows:
        for _ in range(given.sequences):
            rows.write(json.dumps({"text": "x" * draw.randint(1, 2 * given.tokens - 1)}) + "\n")
    _config().save_pretrained(folder / "model")
    settings = {
        "model": str(folder / "model"),
        "random_weights": True,
        "dataset": str(folder / "rows.jsonl"),
        "tokenizer": "bytes",
        "values": ["residuals,router_logits,states@every:16"],
        "block_sequences": given.block_sequences,
        "memory": "256MiB",
        "out": str(folder / "capture.zarr"),
    }
    prepared = prepare(load_settings(None, settings))
    start = last = time.perf_counter()
    last_cpu = time.process_time()
    done = committed = 0
    for event in run(prepared):
        if isinstance(event, Committed):
            committed += 1
            continue
        now = time.perf_counter()
        if now - last >= given.every_s:
            sample = {
                "s": round(now - start, 1),
                "sequences": event.sequences,
                "blocks": committed,
                "ms_a_sequence": round(1e3 * (now - last) / (event.sequences - done), 3),
                "cpu_ms_a_sequence": round(1e3 * (time.process_time() - last_cpu) / (event.sequences - done), 3),
                "rss_mib": round(_rss_mib(), 1),
                "open_files": len(os.listdir("/proc/self/fd")),
                "seconds": {stage: round(seconds, 2) for stage, seconds in event.seconds.items()},
            }
            print(json.dumps(sample), flush=True)
            yield sample
            last, last_cpu, done = now, time.process_time(), event.sequences


def _config() -> KimiLinearConfig:
    return KimiLinearConfig(
        vocab_size=384,
        hidden_size=32,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        mlp_layer_types=["dense", "sparse"],
        linear_num_heads=2,
        linear_head_dim=16,
        linear_conv_kernel_dim=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        kv_lora_rank=32,
        num_local_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        moe_intermediate_size=32,
        intermediate_size=64,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
    )


def _verdict(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Compares the halves of the run once it is warm: medians, and the slope of memory.

    Speed is judged by processor time, which other users of the machine disturb less; wall time is told beside it.
    """
    warm = samples[int(len(samples) * WARM) :]
    if len(warm) < 4:
        return {"flat": False, "why": "too few samples; run longer or sample more often"}
    first, second = warm[: len(warm) // 2], warm[len(warm) // 2 :]

    def median(part: list[dict[str, Any]], name: str) -> float:
        return float(np.median([sample[name] for sample in part]))

    slope = np.polyfit([sample["sequences"] for sample in warm], [sample["rss_mib"] for sample in warm], 1)[0]
    verdict = {
        "rss_mib_a_100000_sequences": round(float(slope) * 1e5, 1),
        "rss_mib": [median(first, "rss_mib"), median(second, "rss_mib")],
        "ms_a_sequence": [round(median(first, "ms_a_sequence"), 3), round(median(second, "ms_a_sequence"), 3)],
        "cpu_ms_a_sequence": [round(median(part, "cpu_ms_a_sequence"), 3) for part in (first, second)],
        "open_files": [median(first, "open_files"), median(second, "open_files")],
    }
    memory = verdict["rss_mib"][1] <= 1.05 * verdict["rss_mib"][0]
    speed = verdict["cpu_ms_a_sequence"][1] <= 1.1 * verdict["cpu_ms_a_sequence"][0]
    files = verdict["open_files"][1] <= verdict["open_files"][0] + 8
    return {"flat": memory and speed and files, "memory": memory, "speed": speed, "files": files, **verdict}


def _rss_mib() -> float:
    """Anonymous memory: pages of the mapped token table, which the kernel may drop, are left out."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) / 2**10


if __name__ == "__main__":
    sys.exit(main())
