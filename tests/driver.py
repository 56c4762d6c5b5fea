"""Captures in processes of their own, killed where a test says.

`Driver` starts this file once; that process imports, plans and builds the model once, and forks a child for each
capture, so that one more kill costs a fraction of a second.
"""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import zarr

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one process did.

    Attributes:
        status: ``done``, ``killed``, or the class of the error that ended it.
        message: The error's text.
        loaded: Whether it loaded the model.
        batches: Sequences of each of its forwards.
        committed: Blocks it committed, as far as it lived to tell.
    """

    status: str
    message: str = ""
    loaded: bool = False
    batches: list[list[int]] = field(default_factory=list)
    committed: list[int] = field(default_factory=list)


class Driver:
    """A process that forks captures of the model of `tests.small`.

    Attributes:
        folder: Holds the model's config and the dataset.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self.folder = folder
        self._log = folder / "log"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.driver", json.dumps(settings), str(self._log)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, out: Path, **request: Any) -> Outcome:
        """One capture; see `_serve` for what may be asked."""
        return self.run_all({"out": str(out), **request})[0]

    def run_all(self, *requests: dict[str, Any]) -> list[Outcome]:
        """Captures begun at the same time, each in a process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(requests) + "\n")
        self._process.stdin.flush()
        return [Outcome(**outcome) for outcome in json.loads(self._process.stdout.readline())]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)
        assert self._process.stdout is not None
        self._process.stdout.close()


def contents(path: Path) -> dict[str, Any]:
    """Every array's decoded bytes, and the names of all files that hold data."""
    group = zarr.open_group(path, mode="r")
    arrays = {name: array for name, array in group.members(max_depth=None) if isinstance(array, zarr.Array)}
    found: dict[str, Any] = {name: np.asarray(array[...]).tobytes() for name, array in arrays.items()}
    files = (file.relative_to(path) for file in path.rglob("*") if file.is_file() and ".kimicap" not in file.parts)
    return {**found, "files": sorted(map(str, files)), "complete": group.attrs["complete"]}


def _serve(settings: dict[str, Any], log: str) -> None:
    """Answers lines of requests: lists of tables with the keys of `_capture`, and ``kill_after_s``."""
    import torch

    from kimicap import run
    from kimicap.config import load_settings
    from kimicap.prepare import prepare
    from tests import small

    torch.set_num_threads(1)  # a child has no threads of its parent's
    model = small.model()
    prepared = {}
    importlib.import_module("kimicap.session")
    for line in sys.stdin:
        requests = json.loads(line)
        children = []
        for number, request in enumerate(requests):
            changed = request.get("settings", {})
            key = json.dumps(changed)
            if key not in prepared:
                prepared[key] = prepare(load_settings(None, {**settings, **changed, "out": "unset"}))
            file = f"{log}.{number}"
            Path(file).write_text("")
            child = os.fork()
            if not child:
                with open(file, "a", buffering=1) as lines:
                    run.load_model = lambda *_, lines=lines: lines.write('{"loaded": true}\n') and model
                    _capture(prepared[key], request, lines)
                os._exit(0)
            children.append((child, file, request))
        print(json.dumps([_outcome(*child) for child in children]), flush=True)  # noqa: T201


def _outcome(child: int, file: str, request: dict[str, Any]) -> dict[str, Any]:
    """Waits for a child, or kills it in time."""
    if "kill_after_s" in request:
        end = time.monotonic() + request["kill_after_s"]
        while time.monotonic() < end and os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            time.sleep(0.001)
        os.kill(child, signal.SIGKILL)
    _, code = os.waitpid(child, 0)
    told: dict[str, Any] = {
        "status": "killed" if os.WIFSIGNALED(code) else f"exit {code}",
        "batches": [],
        "committed": [],
    }
    for line in Path(file).read_text().splitlines():
        for key, value in json.loads(line).items():
            told[key] = [*told[key], value] if isinstance(told.get(key), list) else value
    return told


def _capture(prepared: Any, request: dict[str, Any], lines: Any) -> None:
    """One capture in a child: ``out``, ``resume``, ``rank``, ``world``, ``break``."""
    from dataclasses import replace

    from kimicap import pipeline, run
    from kimicap.cluster import Rank
    from kimicap.errors import KimicapError

    run_batch = pipeline.Loop._run_batch

    def logged(self: Any, runner: Any, recorder: Any, batch: Any) -> None:
        lines.write(json.dumps({"batches": list(batch)}) + "\n")
        run_batch(self, runner, recorder, batch)

    pipeline.Loop._run_batch = logged  # type: ignore[method-assign]
    if "break" in request:
        _break(**request["break"])
    prepared = replace(prepared, settings=prepared.settings.model_copy(update={"out": request["out"]}))
    rank = Rank(rank=request.get("rank", 0), world=request.get("world", 1))
    try:
        for event in run.run(prepared, resume=request.get("resume", False), rank=rank):
            if isinstance(event, pipeline.Committed):
                lines.write(json.dumps({"committed": event.block}) + "\n")
        lines.write('{"status": "done"}\n')
    except KimicapError as error:
        lines.write(json.dumps({"status": type(error).__name__, "message": str(error)}) + "\n")


def _break(*, at: str, nth: int = 1, when: str = "before", number: int = signal.SIGKILL, match: str = "") -> None:
    """Sends itself a signal before or after the nth call of the function ``at``, ``match`` in its arguments."""
    owner, _, name = at.rpartition(".")
    module, _, member = owner.rpartition(".")
    holder = getattr(importlib.import_module(module), member) if module else importlib.import_module(owner)
    original, calls = getattr(holder, name), 0

    def breaking(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += match in str(args)
        hit = calls == nth and match in str(args)
        if hit and when == "before":
            os.kill(os.getpid(), number)
        result = original(*args, **kwargs)
        if hit and when == "after":
            if hasattr(result, "result"):
                result.result()
            os.kill(os.getpid(), number)
        return result

    setattr(holder, name, breaking)


if __name__ == "__main__":
    _serve(json.loads(sys.argv[1]), sys.argv[2])
