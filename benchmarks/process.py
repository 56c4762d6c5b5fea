"""Rows about whole processes: peak memory, and the time until the first array can be read."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.harness import Result
from benchmarks.subject import Subject, scratch
from kimicap.config import Settings
from kimicap.slots import Slots

_PEAK = """
import json, sys
from benchmarks.process import peak_bytes, tell_peak
from benchmarks.subject import create
from pathlib import Path
from kimicap.config import load_settings
from kimicap.prepare import prepare
from kimicap.plan import slot_memory
from kimicap.session import Session
from kimicap.slots import Slots
from kimicap.models import load_model
from kimicap.cluster import Rank
given = json.loads(sys.argv[1])
prepared = prepare(load_settings(None, given))
model = load_model(prepared.settings, prepared.architecture)
slots = Slots(slot_memory(prepared.settings), pinned=False)
session = Session(prepared, model, slots)
session.probe()
import torch
ids = torch.randint(3, 4000, (max(1, given["batch_tokens"] // 512), 512))
with torch.inference_mode():
    model.model(input_ids=ids, use_cache=False)
before = peak_bytes()
store = create(prepared, Path(given["out"]))
for _ in session.capture(store, range(prepared.plan.blocks), rank=Rank()):
    pass
tell_peak(before, slots, prepared.settings)
"""

_FILLED = """
import json, sys
from pathlib import Path
from benchmarks.disk import assemble, rows_of
from benchmarks.process import peak_bytes, tell_peak
from kimicap.config import load_settings
from kimicap.plan import slot_memory
from kimicap.prepare import prepare
from kimicap.slots import Slots
given = json.loads(sys.argv[1])
prepared = prepare(load_settings(None, given))
rows, slots = rows_of(prepared), Slots(slot_memory(prepared.settings), pinned=False)
before = peak_bytes()
assemble(prepared, Path(given["out"]), rows, slots)
tell_peak(before, slots, prepared.settings)
"""

_FIRST = """
import json, sys, time
start = time.perf_counter()
from kimicap.config import load_settings
from kimicap.prepare import prepare
from kimicap.run import run
from kimicap.models import load_model
import torch, transformers, datasets, zarr, tensorstore
given = json.loads(sys.argv[1])
settings = load_settings(None, given)
if sys.argv[2] == "load":
    from kimicap.models import architecture_of
    from kimicap.schema import load_schema
    load_model(settings, architecture_of(settings, load_schema()))
else:
    from kimicap.events import Committed
    for event in run(prepare(settings)):
        if isinstance(event, Committed):
            break
print(time.perf_counter() - start)
"""


def peak_bytes() -> int:
    """Most memory that this process has had; getrusage would also count the one that started it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024


def tell_peak(before: int, slots: Slots, settings: Settings) -> None:
    """Prints what `memory` reads: the peak before a capture and now, and what it may be."""
    found = {"before": before, "after": peak_bytes(), "budget": settings.memory}
    print(json.dumps({**found, "slots": slots.budget_bytes, "slots_peak": slots.peak_bytes}))


def memory(subject: Subject) -> Iterator[Result]:
    """Peak host memory as a part of --memory: of a run over the model's own; of rows that come faster than any disk."""
    full = {"values": ["residuals"], "batches": 512, "block_sequences": 512, "memory": 2**30}
    for name, script, codec, more in (
        ("of a run, over the model's own", _PEAK, "lz4", {"values": ["residuals", "states@every:64"], "batches": 32}),
        ("of full slots, lz4", _FILLED, "lz4", full),
        ("of full slots, no codec", _FILLED, "none", full),
    ):
        with scratch() as folder:
            found = json.loads(
                _run(script, json.dumps(_given(subject, folder, codec=codec, **{"memory": 2**29, **more})))
            )
        ratio = (found["after"] - found["before"]) / found["budget"]
        yield Result(
            name=f"peak host memory {name}, in --memory",
            target="<= 1.1",
            measured=ratio,
            spread=(ratio, ratio),
            detail=found,
        )


def first_array(subject: Subject, *, repeats: int) -> Iterator[Result]:
    """Seconds until the first block can be read, over those of the imports and the model's loading."""
    loads, firsts = [], []
    for _ in range(repeats):
        with scratch() as folder:
            given = json.dumps(_given(subject, folder, values=["residuals"], batches=1, memory=2**30))
            loads.append(float(_run(_FIRST, given, "load")))
            firsts.append(float(_run(_FIRST, given, "first")))
    pairs = sorted(first / load for first, load in zip(firsts, loads, strict=True))
    yield Result(
        name="first block readable after start, over imports and model load",
        target="<= 1.5",
        measured=pairs[len(pairs) // 2],
        spread=(pairs[0], pairs[-1]),
        detail={"load": loads, "first": firsts},
    )


def _given(subject: Subject, folder: Path, *, values: list[str], batches: int, **settings: object) -> dict[str, object]:
    prepared = subject.prepared(values, batches=batches)
    data = prepared.settings.model_dump(mode="json", by_alias=True)
    data |= {"out": str(folder / "out.zarr"), "device": "cpu", "block_sequences": 8, **settings}
    return {key: value for key, value in data.items() if value is not None}


def _run(script: str, *arguments: str) -> str:
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return done.stdout.splitlines()[-1]
