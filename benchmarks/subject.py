"""The model and the rows that the benchmarks run on, and captures of them into a disk, a tmpfs or nothing."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import KimiLinearConfig, KimiLinearForCausalLM

from kimicap import store
from kimicap.cluster import Rank
from kimicap.config import load_settings
from kimicap.plan import slot_memory
from kimicap.prepare import Prepared, prepare
from kimicap.session import Session
from kimicap.slots import Slots

Shards = list[tuple[str, tuple[int, ...], np.ndarray]]
"""Path of the array, origin and data of each."""

SHAPES: dict[str, dict[str, Any]] = {
    # Kimi-Linear-48B-A3B: 49.1 billion parameters.
    "48b": {
        "layer_types": [
            "full_attention" if layer in (3, 7, 11, 15, 19, 23, 26) else "linear_attention" for layer in range(27)
        ],
        "dtype": "bfloat16",
    },
    "small": {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 8,
        "layer_types": ["full_attention" if layer % 4 == 3 else "linear_attention" for layer in range(8)],
        "num_local_experts": 64,
        "linear_num_heads": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "moe_intermediate_size": 512,
        "vocab_size": 32768,
        "pad_token_id": 0,
        "dtype": "bfloat16",
    },
    "tiny": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 6,
        "layer_types": ["full_attention" if layer % 4 == 3 else "linear_attention" for layer in range(6)],
        "num_local_experts": 16,
        "num_experts_per_tok": 4,
        "linear_num_heads": 4,
        "linear_head_dim": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "kv_lora_rank": 128,
        "moe_intermediate_size": 128,
        "vocab_size": 4096,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "float32",
    },
}


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model, and a dataset of rows of random tokens, all of one length."""

    model: torch.nn.Module
    folder: Path
    vocab: int
    row_tokens: int
    batch_rows: int

    def prepared(self, values: Sequence[str], *, batches: int, out: Path | None = None, **settings: Any) -> Prepared:
        """A plan for ``batches`` batches of rows."""
        count = batches * self.batch_rows
        file = self.folder / f"rows-{count}-{self.row_tokens}.jsonl"
        if not file.exists():
            ids = np.random.default_rng(0).integers(3, self.vocab, (count, self.row_tokens))
            file.write_text("\n".join(json.dumps({"input_ids": row.tolist()}) for row in ids))
        given = {"batch_tokens": self.batch_rows * self.row_tokens, "memory": "40GiB", **settings}
        return planned(self.folder, file, values, out or self.folder / "none.zarr", **given)

    def forwards(self, batches: int) -> None:
        """The bare forward of as many batches, without the head."""
        device = next(self.model.parameters()).device
        ids = torch.randint(3, self.vocab, (self.batch_rows, self.row_tokens), device=device)
        with torch.inference_mode():
            for _ in range(batches):
                self.model.model(input_ids=ids, use_cache=False)

    def slots(self, prepared: Prepared) -> Slots:
        """Host memory for captures, to be used again: pinning it is for the start of a run, not for each batch."""
        on_gpu = next(self.model.parameters()).device.type == "cuda"
        return Slots(slot_memory(prepared.settings), pinned=on_gpu)

    def capture(self, prepared: Prepared, slots: Slots, target: Any = None) -> None:
        """Captures all blocks into ``target``, or into nothing, and seals it."""
        plan = prepared.plan
        opened = target or Discard(plan.arrays)
        session = Session(prepared, self.model, slots)
        for _ in session.capture(opened, range(plan.blocks), rank=Rank(), checked=False):
            pass
        opened.seal(plan.blocks, {})

    def shards(self, prepared: Prepared, slots: Slots) -> Shards:
        """What a capture writes, to be written by other means: it packs to as many bytes."""
        kept = Keep(prepared.plan.arrays)
        self.capture(prepared, slots, kept)
        return kept.shards


class Discard:
    """A store that takes whole shards and forgets them at once."""

    path = Path("nothing")

    def __init__(self, arrays: Sequence[Any]) -> None:
        self.layouts = {array.path: array for array in arrays}

    def write(self, array: str, origin: Sequence[int], data: np.ndarray) -> "Discard":
        """Forgets a shard."""
        return self

    def done(self) -> bool:
        """Always."""
        return True

    def result(self) -> None:
        """Nothing was written."""

    def add_done_callback(self, call: Any) -> None:
        """Calls back at once."""
        call(self)

    def commit(self, block: int, body: Any) -> None:
        """Forgets a block."""

    def seal(self, blocks: int, attributes: Any) -> None:
        """Does nothing."""


class Keep(Discard):
    """A store that keeps whole shards in memory; of many of one shape, the first stand for the others.

    Attributes:
        shards: Each of them.
    """

    MOST_ALIKE = 32

    def __init__(self, arrays: Sequence[Any]) -> None:
        super().__init__(arrays)
        self.shards: Shards = []
        self._alike: dict[tuple[str, tuple[int, ...]], list[np.ndarray]] = {}

    def write(self, array: str, origin: Sequence[int], data: np.ndarray) -> "Keep":
        """Keeps a shard, as its slot will be used again."""
        alike = self._alike.setdefault((array, data.shape), [])
        if len(alike) < self.MOST_ALIKE:
            alike.append(data.copy())
            self.shards.append((array, tuple(origin), alike[-1]))
        else:
            self.shards.append((array, tuple(origin), alike[len(self.shards) % len(alike)]))
        return self


def planned(model: Path, rows: Path, values: Sequence[str], out: Path, **settings: Any) -> Prepared:
    """A plan for a model's folder, of which the config will do, and a file of rows of token ids."""
    given = {
        "model": str(model),
        "random_weights": True,
        "dataset": str(rows),
        "input_ids_column": "input_ids",
        "tokenizer": "bytes",
        "values": list(values),
        "out": str(out),
        **settings,
    }
    return prepare(load_settings(None, given))


def create(prepared: Prepared, path: Path) -> store.Store:
    """A fresh capture at ``path``."""
    shutil.rmtree(path, ignore_errors=True)
    plan = prepared.plan
    record = {"blocks": plan.blocks}
    return store.create(path, plan.arrays, plan.coordinates, attributes={}, record=record)


def noise_shards(prepared: Prepared) -> Shards:
    """Shards of a plan without a model, of noise: bfloat16 widened to float32, as a bfloat16 model's values are."""
    shards: Shards = []
    noise: dict[tuple[int, ...], np.ndarray] = {}
    for layout in prepared.plan.arrays:
        grid = [range(0, size, extent) for size, extent in zip(layout.shape, layout.shard, strict=True)]
        for origin in np.array(np.meshgrid(*grid, indexing="ij")).reshape(len(grid), -1).T.tolist():
            shape = tuple(min(e, s - o) for e, s, o in zip(layout.shard, layout.shape, origin, strict=True))
            if layout.dtype == "float32":
                if shape not in noise:
                    noise[shape] = torch.randn(shape).bfloat16().float().numpy()
                data = noise[shape]
            else:
                data = np.random.default_rng(0).integers(0, 200, shape).astype(layout.dtype)
            shards.append((layout.path, tuple(origin), data))
    return shards


def write_directly(opened: store.Store, shards: Shards) -> None:
    """The same shards by tensorstore alone: all handed over, all waited for."""
    writes = [opened.write(path, origin, data) for path, origin, data in shards]
    for write in writes:
        write.result()


def config_of(shape: str) -> KimiLinearConfig:
    """The config of one of SHAPES."""
    return KimiLinearConfig(**{key: value for key, value in SHAPES[shape].items() if key != "dtype"})


def build(shape: str, folder: Path, *, batch_rows: int, row_tokens: int, device: str) -> Subject:
    """A model of one of SHAPES with seeded random weights, filled in place on its device."""
    config = config_of(shape)
    dtype = getattr(torch, SHAPES[shape]["dtype"])
    config.dtype = SHAPES[shape]["dtype"]
    config.save_pretrained(folder)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            model = KimiLinearForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    model = model.to_empty(device=device)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith(("layernorm.weight", "norm.weight")):
                tensor.fill_(1)
            elif name.endswith("A_log"):
                tensor.copy_(torch.empty(tensor.shape, device=device).uniform_(1, 16).log())
            elif name.endswith("dt_bias"):
                tensor.uniform_(-7, -2)
            elif name.endswith("e_score_correction_bias"):
                tensor.zero_()
            else:
                tensor.normal_(0, 0.02)
    model = model.requires_grad_(False).eval()
    return Subject(model=model, folder=folder, vocab=config.vocab_size, row_tokens=row_tokens, batch_rows=batch_rows)


def clear(folder: Path) -> None:
    """Deletes what is in a folder, on the disk too, so that no later run pays for it."""
    for entry in folder.iterdir():
        shutil.rmtree(entry)
    os.sync()


@contextmanager
def scratch(parent: str | None = None) -> Iterator[Path]:
    """A folder that is gone afterwards; on the disk, or under ``parent``."""
    folder = Path(tempfile.mkdtemp(prefix="kimicap-bench-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
