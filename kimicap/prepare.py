"""Everything about a run that is known before weights are loaded: schema, architecture, sequences, plan."""

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kimicap import batches
from kimicap.architecture import Architecture, Want, resolve
from kimicap.config import Settings, size_text
from kimicap.errors import RoomError, UsageError
from kimicap.layout import ArrayLayout
from kimicap.models import architecture_of, load_tokenizer
from kimicap.plan import CapturePlan, forward_group, plan_capture, slot_memory
from kimicap.records import local
from kimicap.schema import Schema, load_schema
from kimicap.selection import parse_values


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """All that is known before the model's weights are loaded."""

    settings: Settings
    schema: Schema
    architecture: Architecture
    wants: Sequence[Want]
    sequences: batches.Sequences
    plan: CapturePlan
    group: int
    may_split: bool

    @property
    def needs_head(self) -> bool:
        """Whether a value wants the language-model head, which is left out otherwise."""
        return any(self.architecture.family.needs_head(want.value) for want in self.wants)


def prepare(settings: Settings) -> Prepared:
    """Reads schema, config and dataset, and plans the capture; loads no weights.

    Raises:
        KimicapError: Something about the settings is wrong.
    """
    local(settings.out)
    schema = load_schema(settings.schema_file)
    requests = parse_values(settings.values, schema)
    architecture = architecture_of(settings, schema)
    requests = [request for request in requests if meant(request, requests, architecture)]
    wants = resolve(architecture, requests, layers=settings.layers, heads=settings.heads)
    _check(settings, wants)
    _check_cache(settings, architecture)
    sequences = batches.read_sequences(
        _data_settings(settings), load_tokenizer(settings), vocab_size=architecture.size("model", "vocab")
    )
    if settings.forced and int(sequences.lengths.min()) <= settings.generate:
        short = int(np.argmin(sequences.lengths))
        raise UsageError(
            f"Row {sequences.rows[short]} has {sequences.lengths[short]} tokens, but --forced decodes the last "
            f"{settings.generate} of each row and needs a prompt before them; give longer rows or a smaller --generate."
        )
    plan, (group, may_split) = _fitting_plan(settings, architecture, wants, sequences.lengths)
    return Prepared(
        settings=settings,
        schema=schema,
        architecture=architecture,
        wants=wants,
        sequences=sequences,
        plan=plan,
        group=group,
        may_split=may_split,
    )


def _fitting_plan(
    settings: Settings, architecture: Architecture, wants: Sequence[Want], lengths: np.ndarray
) -> tuple[CapturePlan, tuple[int, bool]]:
    """The plan whose shards take as many sequences as a forward does, or fewer until they fit in memory.

    Raises:
        RoomError: Not even those of one sequence fit.
    """
    generate = 0 if settings.forced else settings.generate
    together = max(1, settings.batch_tokens // (int(lengths.max()) + generate))
    if settings.batch_size is not None:
        together = min(together, settings.batch_size)
    while True:
        plan = plan_capture(
            architecture,
            wants,
            lengths,
            generate=generate,
            decodes=settings.generate > 0,
            packed=settings.pack,
            block_sequences=settings.block_sequences,
            together=together,
            store_dtype=settings.store_dtype,
            model_dtype=_model_dtype(settings, architecture),
            codec=settings.codec,
        )
        try:
            return plan, _group(settings, plan)
        except RoomError:
            if together == 1:
                raise
        together //= 2


def _group(settings: Settings, plan: CapturePlan) -> tuple[int, bool]:
    return forward_group(
        plan,
        batch_tokens=settings.batch_tokens,
        batch_size=settings.batch_size,
        memory=slot_memory(settings),
        whole=settings.generate > 0 or settings.split_long == "continue",
    )


def on_existing(prepared: Prepared, layouts: Mapping[str, ArrayLayout]) -> Prepared:
    """What was prepared, on the arrays of a capture that exists: their shards stay as they were first cut.

    Raises:
        RoomError: They do not fit in memory.
    """
    plan = prepared.plan.with_layouts(layouts)
    group, may_split = _group(prepared.settings, plan)
    return replace(prepared, plan=plan, group=group, may_split=may_split)


def check_room(prepared: Prepared, *, blocks_done: int = 0, freed_bytes: int = 0) -> None:
    """Refuses a capture that the disk does not hold.

    Args:
        prepared: The run.
        blocks_done: Blocks that are there already.
        freed_bytes: What is deleted before anything is written.

    Raises:
        RoomError: It does not fit.
    """
    plan = prepared.plan
    needed = int(plan.disk_bytes * (1 - blocks_done / plan.blocks))
    free = free_bytes(prepared.settings.out) + freed_bytes
    if needed > free:
        raise RoomError(
            f"The capture needs about {size_text(needed)}, but {size_text(free)} are free where "
            f"{prepared.settings.out} would lie; choose another --out, or fewer values, layers, positions or sequences."
        )


def free_bytes(out: str) -> int:
    """Free bytes of the disk on which ``out`` lies or would lie."""
    folder = local(out)
    while not os.path.exists(folder):  # false, where Path.exists raises: for a name that is too long
        folder = folder.parent
    return shutil.disk_usage(folder).free


def meant(request: Any, requests: Sequence[Any], architecture: Architecture) -> bool:
    """Whether a request stays: a bare name means those of its hosts that the model has, if any."""
    if architecture.why_missing(request.value) is None:
        return True
    return not any(
        other.value.name == request.value.name and architecture.why_missing(other.value) is None
        for other in requests
        if not request.dotted
    )


def _check(settings: Settings, wants: Sequence[Want]) -> None:
    """Settings that exclude each other.

    Raises:
        UsageError: Some do.
    """
    if settings.forced and not settings.generate:
        raise UsageError("--forced decodes given tokens; say how many with --generate.")
    if settings.generate and settings.split_long == "continue":
        raise UsageError("--generate does not go with --split-long continue; decode from whole rows.")
    if settings.states == "fast":
        _check_fast(settings, wants)
    scored = [want.value.key for want in wants if "key" in want.value.layout]
    if settings.split_long == "continue" and scored:
        raise UsageError(
            f"{scored[0]} reaches back over the cut of --split-long continue; use --split-long fresh, or leave it out."
        )


def _check_cache(settings: Settings, architecture: Architecture) -> None:
    """The caches of transformers and of the checkpoints' own code count their tokens in an attention block.

    Raises:
        UsageError: The model has none, and a cache is needed.
    """
    continued = settings.split_long == "continue"
    if not (settings.generate or continued):
        return
    if not any(
        architecture.blocks[part.name] for part in architecture.family.parts.values() if part.host == "self_attn"
    ):
        flag, remedy = (
            ("--split-long continue", "use --split-long fresh") if continued else ("--generate", "leave it out")
        )
        raise UsageError(
            f"{flag} needs the model's cache, which does not work in a model without attention blocks; {remedy}."
        )


def _check_fast(settings: Settings, wants: Sequence[Want]) -> None:
    """The kernel has states only at the ends of its chunks, and chunks begin where the forward does."""
    for want in wants:
        positions = want.request.positions
        if want.value.name != "states" or (positions.kind == "every" and positions.step % 64 == 0):
            continue
        raise UsageError(
            f"--states fast has states only after every 64th token, not for {want.value.name}@{positions}; ask for "
            "@every:64 (or a multiple), or leave it out."
        )
    if settings.generate:
        raise UsageError(
            "--states fast does not go with --generate; leave it out to have the states of decoded tokens."
        )


def _data_settings(settings: Settings) -> batches.DataSettings:
    return batches.DataSettings(
        dataset=settings.dataset,
        split=settings.split,
        subset=settings.subset,
        streaming=settings.streaming,
        text_column=settings.text_column,
        messages_column=settings.messages_column,
        input_ids_column=settings.input_ids_column,
        seq_len=settings.seq_len,
        split_long=settings.split_long is not None,
        pack=settings.pack,
        limit=settings.limit,
    )


def _model_dtype(settings: Settings, architecture: Architecture) -> str:
    if settings.dtype != "auto":
        return settings.dtype
    named = architecture.config.get("dtype") or architecture.config.get("torch_dtype") or "float32"
    return str(named).removeprefix("torch.")
