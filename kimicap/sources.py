"""What the name of a dataset means, and the sentence for each way in which reading it fails."""

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kimicap.errors import UsageError

LOADERS = {
    ".jsonl": "json",
    ".json": "json",
    ".csv": "csv",
    ".txt": "text",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
# Written by Dataset.save_to_disk and DatasetDict.save_to_disk.
SAVED_MARKS = ("state.json", "dataset_dict.json")


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where a dataset lies.

    Attributes:
        name: As the person gave it.
        kind: A local file, a local folder of files, a folder written by ``save_to_disk``, or a hub id.
        files: The local files with data, sorted; none for ``saved`` and ``hub``.
        loader: The ``datasets`` loader of ``files``.
    """

    name: str
    kind: Literal["file", "folder", "saved", "hub"]
    files: tuple[Path, ...] = ()
    loader: str = ""

    @property
    def path(self) -> Path:
        """The local file or folder."""
        return Path(self.name).expanduser()


def find_source(name: str) -> Source:
    """Tell a local dataset from one of the hub by what exists on disk, and its format by its extension.

    Raises:
        UsageError: A local path that does not exist, or that holds no format or several.
    """
    if not name:
        raise UsageError("--dataset is empty. Name a file, a folder or a hub id.")
    try:
        return _find(name, Path(name).expanduser())
    except OSError as error:
        raise UsageError(f"The path {name!r} could not be looked at: {error.strerror}.") from error


_KNOWN = "the extension must be one of " + ", ".join(LOADERS)


def _find(name: str, path: Path) -> Source:
    if path.is_dir():
        if any((path / mark).is_file() for mark in SAVED_MARKS):
            return Source(name=name, kind="saved")
        return _folder(name, path)
    if path.exists():
        if path.suffix not in LOADERS:
            raise UsageError(f"The file {name!r} is of no known format; {_KNOWN}.")
        if path.stat().st_size == 0:
            raise UsageError(f"The file {name!r} is empty; name one with rows.")
        return Source(name=name, kind="file", files=(path,), loader=LOADERS[path.suffix])
    if path.suffix in LOADERS or name.startswith(("/", "./", "../", "~")) or name.count("/") > 1:
        raise UsageError(f"There is no file or folder {name!r}. Check the path, or name a hub id like 'owner/name'.")
    return Source(name=name, kind="hub")


def _folder(name: str, path: Path) -> Source:
    if set("*?[") & set(os.fspath(path.absolute())):
        raise UsageError(f"The folder {name!r} has one of *?[ in its path, a pattern to datasets. Rename it.")
    files = sorted(
        file
        for file in path.rglob("*")
        if file.suffix in LOADERS
        and file.is_file()
        and not any(part.startswith(".") for part in file.relative_to(path).parts)
    )
    loaders = {LOADERS[file.suffix] for file in files}
    if not files:
        raise UsageError(f"The folder {name!r} holds no data files; {_KNOWN}.")
    if len(loaders) > 1:
        found = ", ".join(sorted({file.suffix for file in files}))
        raise UsageError(
            f"The folder {name!r} holds files of several kinds ({found}). "
            "Name one of its files, or a folder of one kind."
        )
    return Source(name=name, kind="folder", files=tuple(files), loader=loaders.pop())


def explain(source: Source, error: Exception) -> UsageError:
    """The sentence for an exception that ``datasets`` raised.

    Of a hub's failure only known texts are passed on: others may hold signed addresses.
    """
    if source.kind == "hub":
        return UsageError(_hub_sentence(source.name, error))
    if source.loader == "json" and (found := _bad_json_line(source.files)):
        return UsageError(f"{found} Mend or leave out that line.")
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    text = str(cause).strip().partition("\n")[0].rstrip(".") or type(cause).__name__
    if text.startswith("Couldn't cast"):
        text = "its files, or parts of them, do not all have the same columns and types"
    what = "file" if source.kind == "file" else "folder"
    return UsageError(f"The {what} {source.name!r} could not be read as a dataset: {text}.")


def _hub_sentence(name: str, error: Exception) -> str:
    text = str(error)
    if "gated" in text:
        return f"The dataset {name!r} is gated. Ask for access on its page of the hub, and log in with `hf auth login`."
    if isinstance(error, FileNotFoundError):
        return (
            f"No dataset {name!r} was found, neither as a local path nor on the hub. "
            "Check the spelling, and log in with `hf auth login` if it is private."
        )
    if isinstance(error, ConnectionError):
        return (
            f"The hub could not be reached for the dataset {name!r}. Go online, or download it before "
            "and name the local copy."
        )
    if "Config name is missing" in text or text.startswith("BuilderConfig"):
        names = re.search(r"\[[^\]]*\]", text)
        return f"The dataset {name!r} has several subsets; name one with --subset: {names[0] if names else ''}."
    if text.startswith(("Unknown split", "Bad split")):
        return f"The dataset {name!r} has no such split: {text.partition(chr(10))[0].rstrip('.')}."
    if "scripts are no longer supported" in text:
        return f"The dataset {name!r} is a script, which is never run. Name a copy of it in parquet or jsonl."
    return f"The dataset {name!r} could not be read from the hub ({type(error).__name__})."


def _bad_json_line(files: tuple[Path, ...]) -> str | None:
    """Where the first line lies that is no JSON object; asked only after reading has failed already."""
    for path in files:
        if path.suffix != ".jsonl":
            continue
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    if line.strip() and not isinstance(json.loads(line), dict):
                        return f"Line {number} of {os.fspath(path)!r} is not a JSON object."
                except ValueError as error:
                    return f"Line {number} of {os.fspath(path)!r} is not JSON: {error}."
    return None
