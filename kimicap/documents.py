"""What the commands tell, as JSON values: ``--json`` prints them, and report.py draws the same for people."""

from collections.abc import Sequence
from dataclasses import asdict
from math import prod
from typing import Any

from kimicap.architecture import Architecture
from kimicap.config import size_text
from kimicap.layout import ArrayLayout
from kimicap.prepare import Prepared, free_bytes
from kimicap.schema import Schema, Value
from kimicap.value_plan import ValuePlan
from kimicap.verify import Damage

_ITEM_BYTES = {"index": 2, "int32": 4, "bool": 1}
_COUNTED = ("position", "query", "key")


def values_document(schema: Schema, architecture: Architecture | None, model: str | None) -> dict[str, Any]:
    """Every value of the schema, and what of it a model has.

    Args:
        schema: The values.
        architecture: The model's, or None to list the schema alone.
        model: Its name, for people.

    Returns:
        ``model``, ``family``, ``layers`` (all None without a model) and ``values``. Each of these has ``host``,
        ``name``, ``short_name``, ``layout``, ``dtype``, ``about`` and, of a model: ``blocks`` that have it,
        ``bytes`` of one ``unit`` of one block as stored before compression, ``all_bytes`` of all its blocks,
        and ``missing``, the reason why the model lacks it.
    """
    short = {full: name for name, full in schema.short_names.items()}
    return {
        "model": model,
        "family": None if architecture is None else architecture.family.name,
        "layers": None if architecture is None else architecture.layers,
        "values": [
            {
                "host": value.host,
                "name": value.name,
                "short_name": short.get(value.key),
                "layout": list(value.layout),
                "dtype": value.dtype,
                "about": value.about,
                **({} if architecture is None else _in_model(value, architecture)),
            }
            for value in schema.values.values()
        ],
    }


def _in_model(value: Value, architecture: Architecture) -> dict[str, Any]:
    missing = architecture.why_missing(value)
    if missing is not None:
        return {"blocks": [], "bytes": None, "unit": None, "all_bytes": None, "missing": missing}
    blocks = architecture.blocks_of(value)
    sizes = [architecture.size(value.host, dim) for dim in value.layout if dim not in _COUNTED]
    each = prod(sizes) * _ITEM_BYTES.get(value.dtype, 4)
    return {
        "blocks": list(blocks),
        "bytes": each,
        "unit": _unit(value),
        "all_bytes": each * max(1, len(blocks)),
        "missing": None,
    }


def _unit(value: Value) -> str:
    """What ``bytes`` of a value are counted by."""
    if value.name == "states":
        return "state"
    if "key" in value.layout:
        return "query and key"
    return "token" if "position" in value.layout else "sequence"


def plan_document(prepared: Prepared) -> dict[str, Any]:
    """What a run will write.

    Returns:
        ``arrays``, each with ``path``, ``dims``, ``shape``, ``dtype``, ``bytes`` (uncompressed), ``chunk``, ``shard``
        and ``files``; the totals ``bytes``, ``disk_bytes`` (expected), ``free_bytes`` (of the disk of ``out``),
        ``memory_bytes`` (bound of host memory for shards), ``files``, ``blocks``, ``block_sequences``,
        ``sequences``, ``tokens`` and ``decoded_tokens``, those of them that --generate adds unless a sequence ends
        early; ``model``, ``family``, ``out``, ``fits``, and ``notes`` for people.
    """
    plan, settings = prepared.plan, prepared.settings
    free = free_bytes(settings.out)
    return {
        "model": settings.model,
        "family": prepared.architecture.family.name,
        "dataset": settings.dataset,
        "out": settings.out,
        "arrays": [
            *(_array(array, array.shards) for array in plan.frame),
            *(_array(value.array, value.files) for value in plan.values),
        ],
        "sequences": len(plan.lengths),
        "tokens": int(plan.lengths.sum()),
        "decoded_tokens": 0 if settings.forced else settings.generate * len(plan.lengths),
        "blocks": plan.blocks,
        "block_sequences": plan.block_sequences,
        "files": plan.files,
        "bytes": plan.nbytes,
        "disk_bytes": plan.disk_bytes,
        "free_bytes": free,
        "memory_bytes": settings.memory,
        "fits": plan.disk_bytes <= free,
        "notes": [*_row_notes(prepared), *(note for value in plan.values for note in _notes(value, prepared))],
    }


def _array(array: ArrayLayout, files: int) -> dict[str, Any]:
    return {
        "path": array.path,
        "dims": list(array.dims),
        "shape": list(array.shape),
        "dtype": array.dtype,
        "bytes": array.nbytes,
        "chunk": list(array.chunk),
        "shard": list(array.shard),
        "files": files,
    }


def _row_notes(prepared: Prepared) -> list[str]:
    """Rows of the dataset that are not captured whole, which nobody should learn from the arrays alone."""
    sequences, notes = prepared.sequences, []
    if sequences.empty_rows:
        notes.append(f"Rows without tokens, passed over: {sequences.empty_rows}.")
    if sequences.cut_rows:
        notes.append(f"Rows cut to {prepared.settings.seq_len} tokens: {sequences.cut_rows}.")
    return notes


def _notes(value: ValuePlan, prepared: Prepared) -> list[str]:
    """What a state at every token would cost, where fewer are kept."""
    positions = value.want.request.positions
    if value.want.value.name != "states" or positions.kind == "all":
        return []
    array = value.array
    state_bytes = array.nbytes // array.shape[next(i for i, dim in enumerate(array.dims) if dim.endswith("_position"))]
    whole = state_bytes * int(prepared.plan.lengths.max())
    return [f"states@all would take {size_text(whole)}; states@{positions} takes {size_text(array.nbytes)}."]


def verify_document(
    path: str,
    damages: Sequence[Damage],
    missing: Sequence[int],
    *,
    complete: bool,
    taken: Sequence[int],
    rewritten: Sequence[str],
) -> Any:
    """What ``verify`` found: ``damages``, blocks ``missing``, and whether the capture is ``complete`` and ``whole``.

    And what --repair did: blocks ``taken_back``, and files of metadata ``rewritten``.
    """
    return {
        "path": path,
        "whole": not damages and not missing,
        "damages": [asdict(damage) for damage in damages],
        "missing": list(missing),
        "complete": complete,
        "taken_back": list(taken),
        "rewritten": list(rewritten),
    }
