"""The values of a dataset's column as token ids, each row checked; and the tokenizer that needs no files."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from kimicap.errors import UsageError

Ids = np.ndarray[Any, np.dtype[np.integer[Any]]]


class Tokenizer(Protocol):
    """What is asked of a tokenizer; those of transformers have it."""

    @property
    def all_special_ids(self) -> Sequence[int]:
        """Ids of the special tokens."""

    def __call__(self, text: list[str], /, *, truncation: bool, max_length: int | None) -> Mapping[str, Any]:
        """Under ``input_ids``, one list of token ids a text."""

    def apply_chat_template(self, conversation: list[dict[str, Any]], /, *, tokenize: bool, return_dict: bool) -> Any:
        """The token ids of one conversation."""


class ByteTokenizer:
    """One token a byte of UTF-8, numbered as ByT5 does: 0 pad, 1 end, 2 unknown, then byte + 3.

    Adds no special tokens and has no chat template.
    """

    name = "bytes"
    pad_token_id = 0
    eos_token_id = 1
    chat_template = None

    @property
    def all_special_ids(self) -> list[int]:
        """Pad, end and unknown."""
        return [0, 1, 2]

    def __call__(
        self, text: list[str], /, *, truncation: bool = False, max_length: int | None = None
    ) -> dict[str, list[list[int]]]:
        """Under ``input_ids``, one list of token ids a text."""
        keep = max_length if truncation else None
        return {"input_ids": [[byte + 3 for byte in one.encode()[:keep]] for one in text]}

    def apply_chat_template(
        self, conversation: list[dict[str, Any]], /, *, tokenize: bool = True, return_dict: bool = False
    ) -> list[int]:
        """Always fails: bytes have no chat template."""
        raise ValueError("the bytes tokenizer has no chat template")

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids; special ones are left out, broken UTF-8 is marked as such."""
        return bytes(int(i) - 3 for i in ids if 3 <= i < 259).decode(errors="replace")


@dataclass(frozen=True, kw_only=True)
class Column:
    """The column that a dataset is read from, and what its values are."""

    name: str
    kind: Literal["text", "messages", "input_ids"]

    def value(self, row: Mapping[str, Any], number: int) -> Any:
        """The column's value in row ``number``, which may come from another file than the first row."""
        if self.name not in row:
            raise UsageError(f"Row {number} has no column {self.name!r}, which earlier rows have. Mend its file.")
        return row[self.name]


def choose_column(names: list[str], *, text: str | None, messages: str | None, input_ids: str | None) -> Column:
    """The column that was asked for, or ``text``.

    Args:
        names: The dataset's columns; none if it has no rows, which is for others to tell.
        text: Asked for as texts. At most one of the three is given.
        messages: Asked for as chat messages.
        input_ids: Asked for as token ids.

    Raises:
        UsageError: The dataset does not have it.
    """
    if messages is not None:
        column = Column(name=messages, kind="messages")
    elif input_ids is not None:
        column = Column(name=input_ids, kind="input_ids")
    else:
        column = Column(name="text" if text is None else text, kind="text")
    if column.name in names or not names:
        return column
    near = difflib.get_close_matches(column.name, names, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise UsageError(
        f"The dataset has no column {column.name!r}; it has {', '.join(names)}.{hint} Name the one to read "
        "with --text-column, --messages-column or --input-ids-column."
    )


def encode(
    values: list[Any], *, first_row: int, column: Column, tokenizer: Tokenizer, vocab_size: int | None
) -> list[Ids]:
    """Token ids of consecutive rows.

    Args:
        values: The rows' values of ``column``.
        first_row: The first one's number in the dataset.
        column: Where the values come from.
        tokenizer: Not asked for ``input_ids``.
        vocab_size: Ids the model knows; None skips the check against it.

    Returns:
        int32 [tokens], one array a row. None, an empty text, an empty conversation and an empty list
        give no tokens, whatever the tokenizer would add to them.

    Raises:
        UsageError: A value is not of the column's kind, or an id is out of the vocabulary.
    """
    full = [offset for offset, value in enumerate(values) if value is not None and not _is_empty(value)]
    for offset in full:
        _CHECKS[column.kind](values[offset], f"Row {first_row + offset} of column {column.name!r}")
    chosen = [values[offset] for offset in full]
    if column.kind == "text":
        lists = tokenizer(chosen, truncation=False, max_length=None)["input_ids"] if chosen else []
    elif column.kind == "messages":
        lists = [_chat(value, first_row + offset, tokenizer) for value, offset in zip(chosen, full, strict=True)]
    else:
        lists = chosen
    encoded: list[Ids] = [np.empty(0, dtype=np.int32)] * len(values)
    for offset, ids in zip(full, lists, strict=True):
        _check_range(ids, first_row + offset, vocab_size)
        encoded[offset] = np.asarray(ids, dtype=np.int32)
    return encoded


def _is_empty(value: Any) -> bool:
    return isinstance(value, str | list) and not value


def _check_text(value: Any, where: str) -> None:
    if not isinstance(value, str):
        raise UsageError(
            f"{where} holds {_kind(value)} where a text was expected. Name a column of texts with "
            "--text-column, or use --messages-column or --input-ids-column."
        )


def _check_messages(value: Any, where: str) -> None:
    good = isinstance(value, list) and all(
        isinstance(message, dict) and isinstance(message.get("role"), str) and "content" in message for message in value
    )
    if not good:
        raise UsageError(
            f"{where} is not a list of chat messages, each with 'role' and 'content'. "
            "Name a column of such lists with --messages-column."
        )


def _check_input_ids(value: Any, where: str) -> None:
    # bool is a kind of int in Python; type() tells them apart.
    if not isinstance(value, list) or any(type(item) is not int for item in value):
        found = _kind(value)
        if isinstance(value, list):
            found = f"a list with {_kind(next(item for item in value if type(item) is not int))}"
        raise UsageError(
            f"{where} holds {found} where a list of integers was expected. "
            "Name a column of token ids with --input-ids-column."
        )


_CHECKS = {"text": _check_text, "messages": _check_messages, "input_ids": _check_input_ids}


def _check_range(ids: Sequence[int], row: int, vocab_size: int | None) -> None:
    if not len(ids):
        return
    if min(ids) < 0:
        raise UsageError(
            f"Row {row} holds token id {min(ids)}, and ids are never negative. "
            "Take padding and ignored positions out of the column."
        )
    known = 2**31 if vocab_size is None else vocab_size
    if max(ids) >= known:
        raise UsageError(
            f"Row {row} holds token id {max(ids)}, but the vocabulary has {known} ids, 0 to {known - 1}. "
            "Use the model's own tokenizer, or token ids made with it."
        )


def _chat(messages: list[dict[str, Any]], row: int, tokenizer: Tokenizer) -> Any:
    # Arrow gives every message the keys of all; templates ask whether a key is there, so None goes again.
    conversation = [
        {key: item for key, item in message.items() if item is not None or key == "content"} for message in messages
    ]
    try:
        return tokenizer.apply_chat_template(conversation, tokenize=True, return_dict=False)
    except Exception as error:  # a template raises whatever it likes
        if getattr(tokenizer, "chat_template", None) is None:
            raise UsageError(
                "The tokenizer has no chat template, which --messages-column needs. "
                "Name a tokenizer that has one with --tokenizer, or read texts with --text-column."
            ) from error
        raise UsageError(
            f"The tokenizer's chat template refuses the messages of row {row}: {error}. Mend or leave out that row."
        ) from error


def _kind(value: Any) -> str:
    names = {list: "a list", dict: "a record", str: "a text", bool: "a boolean", type(None): "nothing"}
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"the number {value}"
    return names.get(type(value), f"a {type(value).__name__}")
