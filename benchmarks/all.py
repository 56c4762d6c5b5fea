"""Every row of the table: `python -m benchmarks.all [--shape 48b|small|tiny] [--only NAME …] [--json FILE]`."""

import argparse
import json
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from benchmarks import capture, disk, peers, process
from benchmarks.harness import Result, machine
from benchmarks.subject import build
from kimicap.errors import Stopped


def main() -> None:
    """Runs the rows that this machine can run, and prints and stores them."""
    gpu = torch.cuda.is_available()
    names = list(rows(gpu=gpu))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=("48b", "small", "tiny"))
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=f"rows to run: {', '.join(names)}")
    parser.add_argument("--json", type=Path, default=Path("bench.json"))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--batches", type=int, default=2 if gpu else 1)
    given = parser.parse_args()
    shape = given.shape or ("48b" if gpu else "tiny")
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        subject = build(
            shape,
            Path(folder),
            batch_rows=8 if gpu else 2,
            row_tokens=2048 if gpu else 512,
            device="cuda" if gpu else "cpu",
        )
        subject.forwards(2)
        print(json.dumps({"shape": shape, "build_s": round(time.perf_counter() - start, 1), **machine()}), flush=True)
        with given.json.open("w") as file:
            for name, row in rows(gpu=gpu).items():
                if given.only and name not in given.only:
                    continue
                began = time.perf_counter()
                try:
                    for result in row(subject, batches=given.batches, repeats=given.repeats):
                        print(result.line(), flush=True)
                        file.write(result.json() + "\n")
                        file.flush()
                except Stopped:
                    raise
                except Exception:  # one row that fails must not lose the others
                    print(f"{name}: FAILED\n{traceback.format_exc()}", flush=True)
                print(f"# {name} took {time.perf_counter() - began:.0f} s", flush=True)


def rows(*, gpu: bool) -> dict[str, Callable[..., Iterator[Result]]]:
    """The rows by name, in the order in which they run; each is called with a subject, ``batches`` and ``repeats``."""
    found: dict[str, Callable[..., Iterator[Result]]] = {}
    for name, case in capture.INTO_NOTHING.items():
        if gpu or name != "fast":  # the kernel's own states need the kernel
            found[name] = partial(capture.into_nothing, case=case)
    for name, case in capture.TO_DISK.items():
        found[name] = partial(capture.to_disk, case=case)
    found["files"] = lambda subject, batches, repeats: disk.files(subject.folder)
    found["reading"] = lambda subject, batches, repeats: disk.reading(subject.folder, repeats=repeats)
    if gpu:
        found["peers"] = peers.against_peers
        found["encoding"] = capture.encoding
    else:
        found["writing"] = disk.writing
        found["memory"] = lambda subject, batches, repeats: process.memory(subject)
        found["first"] = lambda subject, batches, repeats: process.first_array(subject, repeats=repeats)
    return found


if __name__ == "__main__":
    main()
