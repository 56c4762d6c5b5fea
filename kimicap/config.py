"""One run's settings: from a YAML file, overridden by flags; frozen, checked whole, with a digest.

This is the one place where a setting is declared: its name (the flag's, in snake case), its default, and
the sentence that ``--help`` shows.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from difflib import get_close_matches
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from kimicap.errors import UsageError
from kimicap.selection import split_values

MOST = 2**31 - 1
"""Largest number of anything that is counted; token numbers are int32."""
MOST_DECODED = 2**20
"""Most tokens to decode after a prompt; the forwards run one token at a time, so more could only be a slip."""
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_bytes(text: Any) -> Any:
    """Bytes of ``4GiB``, ``500MB`` or a plain number.

    Raises:
        ValueError: Not of that form.
    """
    if not isinstance(text, str):
        return text
    found = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,9})?)\s*([KMGT]i?B)?\s*", text, re.IGNORECASE)
    if not found:
        raise ValueError("write a size like 4GiB or 500MB")
    return int(Fraction(found[1]) * _UNITS[(found[2] or "").upper()])


def size_text(size_bytes: float) -> str:
    """Bytes for people, in powers of a thousand: ``1.2 GB``."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size_bytes < 999.5 or unit == "TB":
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.3g} {unit}"
        size_bytes /= 1000
    raise AssertionError("unreachable")


def _at_home(path: Any) -> Any:
    """``~/models`` as the shell would have it; in a config file no shell looks at it."""
    return os.path.expanduser(path) if isinstance(path, str) and path.startswith("~") else path


def _without_nul(text: str) -> str:
    """Text that a file system takes.

    Raises:
        ValueError: It holds a NUL, or half a surrogate pair (bytes of the command line that are not UTF-8).
    """
    if "\0" in text or (not text.isprintable() and any("\ud800" <= one <= "\udfff" for one in text)):
        raise ValueError("it must be text without zero bytes, in UTF-8")
    return text


def _one_a_value(value: Any) -> Any:
    """A list with one entry a value, so that every way to write the same values has the same digest."""
    many = [value] if isinstance(value, str) else value
    return split_values(many) if isinstance(many, list) and all(isinstance(item, str) for item in many) else many


def _numbers(value: Any) -> Any:
    """Text of ``3`` or ``[0, 3]``, as YAML reads them."""
    many = value if isinstance(value, list) else [value]
    whole = many and all(isinstance(item, int) and not isinstance(item, bool) for item in many)
    return ",".join(map(str, many)) if whole else value


def _split_long(value: Any) -> Any:
    """YAML's ``true`` and ``false``."""
    return {True: "fresh", False: None}[value] if isinstance(value, bool) else value


Text = Annotated[str, Field(min_length=1), AfterValidator(_without_nul)]
Place = Annotated[Text, BeforeValidator(_at_home)]
Count = Annotated[int, Field(ge=1, le=MOST)]
Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(ge=2**20)]
Numbers = Annotated[Text, BeforeValidator(_numbers)]


class Settings(BaseModel):
    """The settings of a run. Fields marked ``data`` decide what the arrays hold; a resume may not change them."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), strict=True)

    model: Place = Field(description="Hub id or local folder of the model.", json_schema_extra={"data": True})
    random_weights: bool = Field(
        False,
        description="Build the model from its config with seeded random weights.",
        json_schema_extra={"data": True},
    )
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = Field(
        0, description="Seed of --random-weights and of sampling.", json_schema_extra={"data": True}
    )
    trust_remote_code: bool = Field(
        False, description="Run the modelling code that the checkpoint carries.", json_schema_extra={"data": True}
    )
    revision: Text | None = Field(
        None, description="Revision of the model on the hub.", json_schema_extra={"data": True}
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="Dtype of the weights: auto (the checkpoint's), float32, bfloat16 or float16.",
        json_schema_extra={"data": True},
    )
    device: Text | None = Field(None, description="Where the model runs; a GPU if there is one.")
    device_map: Text | None = Field(
        None,
        description="Spread a checkpoint with accelerate: auto, balanced, sequential; not random weights.",
    )
    attention: Text | None = Field(
        None,
        description="Attention implementation: eager, sdpa, flash_attention_2, ….",
        json_schema_extra={"data": True},
    )
    experts: Text | None = Field(
        None, description="Experts implementation: eager, batched_mm, grouped_mm.", json_schema_extra={"data": True}
    )

    dataset: Text = Field(
        description="Hub id, or a local jsonl, json, csv, txt, parquet or arrow file or folder.",
        json_schema_extra={"data": True},
    )
    subset: Text | None = Field(None, description="Configuration of a hub dataset.", json_schema_extra={"data": True})
    split: Text | None = Field(
        None, description="Split of the dataset; train by default.", json_schema_extra={"data": True}
    )
    streaming: bool = Field(False, description="Stream the dataset instead of downloading it whole.")
    text_column: Text | None = Field(
        None, description="Column of text; `text` by default.", json_schema_extra={"data": True}
    )
    messages_column: Text | None = Field(
        None,
        description="Column of chat messages, put through the tokenizer's template.",
        json_schema_extra={"data": True},
    )
    input_ids_column: Text | None = Field(None, description="Column of token ids.", json_schema_extra={"data": True})
    tokenizer: Place | None = Field(
        None,
        description="Another tokenizer than the model's; `bytes` is one token a byte.",
        json_schema_extra={"data": True},
    )
    seq_len: Count | None = Field(
        None, description="Longest sequence kept, in tokens; longer rows are cut.", json_schema_extra={"data": True}
    )
    split_long: Annotated[Literal["fresh", "continue"] | None, BeforeValidator(_split_long)] = Field(
        None,
        description="Longer rows go on in the next sequence: with a fresh state, or continue with the state so far.",
        json_schema_extra={"data": True},
    )
    pack: bool = Field(
        False,
        description="Concatenate rows into windows of --seq-len tokens; the last may be shorter.",
        json_schema_extra={"data": True},
    )
    limit: Count | None = Field(None, description="Number of sequences.", json_schema_extra={"data": True})

    values: Annotated[list[Text], BeforeValidator(_one_a_value)] = Field(
        description="Values to capture, each optionally @ its selection; `kimicap values` lists them.",
        json_schema_extra={"data": True},
    )
    layers: Numbers | None = Field(
        None, description="Blocks, e.g. 0-3,8,-1; all by default.", json_schema_extra={"data": True}
    )
    heads: Numbers | None = Field(
        None, description="Heads, for values that have them; all by default.", json_schema_extra={"data": True}
    )
    states: Literal["exact", "fast"] = Field(
        "exact",
        description="`states` from a float32 recurrence (exact), or the kernel's own bfloat16 ones (fast).",
        json_schema_extra={"data": True},
    )
    generate: Annotated[int, Field(ge=0, le=MOST_DECODED)] = Field(
        0, description="Tokens to decode after each prompt, captured too.", json_schema_extra={"data": True}
    )
    forced: bool = Field(
        False,
        description="With --generate: the last N given tokens are decoded one by one instead of sampled.",
        json_schema_extra={"data": True},
    )
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        0.0, description="Temperature of --generate; 0 takes the likeliest token.", json_schema_extra={"data": True}
    )

    batch_tokens: Count = Field(16384, description="Tokens that go through the model at once.")
    batch_size: Count | None = Field(None, description="Sequences that go through the model at once, at most.")
    block_sequences: Count | None = Field(
        None, description="Sequences of a block, the unit of commit and resume.", json_schema_extra={"data": True}
    )
    store_dtype: Literal["lossless", "float16", "float32"] = Field(
        "lossless", description="Dtype of stored floats.", json_schema_extra={"data": True}
    )
    codec: Literal["lz4", "zstd", "none"] = Field("lz4", description="Compression.", json_schema_extra={"data": True})
    memory: Bytes = Field(8 * 2**30, description="Host memory for shards that are filled and written, e.g. 4GiB.")
    out: Place = Field(description="Folder of the capture.")
    schema_file: Annotated[Path, BeforeValidator(_at_home)] | None = Field(
        None,
        alias="schema",
        description="Schema file whose rows are laid over the built-in ones.",
        strict=False,
        json_schema_extra={"data": True},
    )

    def data(self) -> dict[str, Any]:
        """The settings that decide what the arrays hold, as JSON values."""
        dumped = self.model_dump(mode="json", by_alias=True)
        marked = {
            field.alias or name
            for name, field in type(self).model_fields.items()
            if isinstance(field.json_schema_extra, dict) and field.json_schema_extra.get("data")
        }
        return {name: value for name, value in dumped.items() if name in marked}


def digest(settings: Mapping[str, Any]) -> str:
    """SHA-256, in hex, of settings given as JSON values."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def load_settings(
    file: Path | None, flags: Mapping[str, Any], *, defaults: Mapping[str, Any] | None = None
) -> Settings:
    """The file's settings, overridden by the flags that were given.

    Args:
        file: YAML, or None.
        flags: By name; None means not given.
        defaults: What holds where neither says.

    Raises:
        UsageError: The file cannot be read, or some settings are unknown, missing or wrong; all are listed.
    """
    tree = {} if file is None else _read(file)
    given = {name: value for name, value in flags.items() if value is not None}
    try:
        return Settings.model_validate({**(defaults or {}), **tree, **given})
    except ValidationError as error:
        problems = [_sentence(dict(problem), file, given) for problem in error.errors()]
    raise UsageError("\n".join(dict.fromkeys(problems)))


def _read(file: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(file.expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"The config file {file} cannot be read ({error.strerror}); check the path.") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"The config file {file} is not valid YAML; mend it: {error}") from None
    if not isinstance(tree, dict):
        raise UsageError(f"The config file {file} holds no settings; write lines like `seq_len: 2048`.")
    return tree


_EXPECTED = {
    "string_type": "it must be text",
    "string_too_short": "it must not be empty",
    "int_type": "it must be a whole number",
    "float_type": "it must be a number",
    "finite_number": "it must be a finite number",
    "bool_type": "it must be true or false",
    "list_type": "it must be a list, or text with commas",
    "path_type": "it must be a path",
    "literal_error": "it must be {expected}",
    "greater_than_equal": "it must be at least {ge}",
    "less_than_equal": "it must be at most {le}",
    "value_error": "{error}",
}
"""What is expected, by pydantic's type of problem."""


def _sentence(problem: dict[str, Any], file: Path | None, flags: Mapping[str, Any]) -> str:
    name = str(problem["loc"][0])
    flag = "--" + name.replace("_", "-")
    if problem["type"] == "missing":
        return f"{flag} is missing; give it as a flag or in a config file."
    where = flag if file is None or name in flags else f"{file}: {name}"
    if problem["type"] in ("extra_forbidden", "invalid_key"):
        names = [field.alias or key for key, field in Settings.model_fields.items()]
        close = get_close_matches(name, names, n=3)
        hint = f" Did you mean {' or '.join(close)}?" if close else " `kimicap run --help` lists the settings."
        return f"{where} is not a setting.{hint}"
    expected = _EXPECTED[problem["type"]].format(**problem.get("ctx", {}))
    if name == "memory" and problem["type"] != "value_error":
        expected = "write a size like 4GiB or 500MB, at least 1MiB"
    if name in ("layers", "heads"):
        expected = "write numbers and ranges like 0-3,8,-1"
    found = "empty" if problem["input"] in (None, "") else repr(problem["input"])
    return f"{where} is {found}; {expected}."
