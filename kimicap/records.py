"""The files of a capture's ``.kimicap`` folder: one run record, and one record a committed block.

A block counts only if its record is there and whole, which a digest in it tells. Records are written so
that a crash, or a power cut, leaves either the old file or the new one: temp file, fsync, rename, fsync
of the folder.
"""

import errno
import hashlib
import json
import os
import re
import stat
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kimicap.errors import KimicapError, MismatchError, RoomError, UsageError, lack_of_memory

FORMAT = 1
"""Version of the on-disk format that this code writes, and the newest that it reads."""

FOLDER = ".kimicap"
RUN = "run.json"
BLOCKS = "blocks"

# Also as pathlib writes URLs, with one slash.
_URL = re.compile(r"(s3|gs|gcs|az|abfs|hf|https?|file):/")
_BLOCK_FILE = re.compile(r"\d{8,}\.json")
_OS_ERROR = re.compile(r"os_error_code='(\d+)'")


def local(path: Path | str) -> Path:
    """``path`` as an absolute local path.

    Raises:
        UsageError: It is the URL of an object store, or no path.
    """
    if "://" in str(path) or _URL.match(str(path)):
        raise UsageError(f"{path} is a URL, and object stores are not supported yet. Give a local folder.")
    try:
        found = Path(path).resolve()
        str(found).encode()
        found.exists()
    except UnicodeEncodeError:
        raise UsageError(
            f"{str(path)!r} cannot be the path of a capture: its bytes are not UTF-8 (or LANG says that names here are "
            "not). Give another, or set PYTHONUTF8=1."
        ) from None
    except (OSError, RuntimeError, ValueError) as error:
        # A name that is too long, a loop of links, a zero byte.
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(f"{str(path)!r} cannot be the path of a capture ({reason}). Give another.") from None
    return found


def write_json(target: Path, body: Mapping[str, Any], *, scratch: Path) -> None:
    """Replace ``target`` by ``body`` as JSON, durably and at once.

    Args:
        target: The file.
        body: JSON values; NaN and infinities are refused, since other readers choke on them.
        scratch: Folder of the same filesystem for the temp file, where a stray one disturbs nobody.

    Raises:
        OSError: From the filesystem; ``target`` is then as it was.
    """
    text = json.dumps(body, allow_nan=False, indent=1)
    temp = scratch / f"{target.name}.{uuid.uuid4().hex}.tmp"
    try:
        with open(temp, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temp, target)
    except BaseException:
        temp.unlink(missing_ok=True)
        raise
    sync_folder(target.parent)


def read_json(file: Path) -> dict[str, Any] | None:
    """A JSON table; None where there is no file, or something else in it.

    Raises:
        KimicapError: It cannot be read, whatever is in it.
    """
    try:
        found = json.loads(file.read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    except OSError as error:
        raise storage_error(error, file) from error
    return found if isinstance(found, dict) else None


def sync_folder(folder: Path) -> None:
    """Make the names in ``folder`` durable: a rename alone may be lost with the power."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(root: Path) -> None:
    """Make every file and folder under ``root`` durable."""
    for folder, _, names in os.walk(root):
        for name in names:
            descriptor = os.open(os.path.join(folder, name), os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        sync_folder(Path(folder))


def is_capture(path: Path) -> bool:
    """Whether ``path`` is a folder that kimicap created.

    Raises:
        UsageError: It may not be looked into.
    """
    file = path / FOLDER / RUN
    try:
        return stat.S_ISREG(file.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise storage_error(error, file) from error


def write_run(path: Path, record: Mapping[str, Any], root: Mapping[str, Any]) -> None:
    """Write the run record of a capture under construction.

    Args:
        path: Its folder.
        record: ``blocks`` is the number of blocks planned; the rest is the caller's.
        root: Its ``zarr.json``, so that `kimicap.metadata` knows how it was made.
    """
    assert isinstance(record.get("blocks"), int), "the run record holds the number of planned blocks"
    (path / FOLDER / BLOCKS).mkdir(parents=True)
    body = {"format": FORMAT, "record": dict(record), "root": dict(root)}
    write_json(path / FOLDER / RUN, _with_digest(body), scratch=path / FOLDER)


def run_identity(path: Path) -> tuple[int, int, int] | None:
    """What tells the run record at ``path`` from that of a capture put in its place; None where there is none."""
    try:
        found = os.stat(path / FOLDER / RUN)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns


def check_format(path: Path) -> dict[str, Any] | None:
    """Checks that this kimicap can read the capture at ``path``; a broken record does not keep it from that.

    Returns:
        What is in the file of the run record, whole or not; None where it is no JSON table.

    Raises:
        UsageError: There is nothing at ``path``, or something that is not a capture.
        MismatchError: It has a newer format.
    """
    if not path.exists():
        raise UsageError(f"There is no capture at {path}. Check the path.")
    if not is_capture(path):
        raise UsageError(f"{path} is not a capture: it has no {FOLDER}/{RUN}. Check the path.")
    body = read_json(path / FOLDER / RUN)
    version = (body or {}).get("format")
    if isinstance(version, int) and version > FORMAT:
        raise MismatchError(
            f"{path} has format {version}, and this kimicap knows formats up to {FORMAT}. Update kimicap."
        )
    return body


def read_run(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The run record of the capture at ``path``, and the root's ``zarr.json`` as it was made.

    Raises:
        UsageError: There is nothing at ``path``, or something that is not a capture.
        MismatchError: The record is broken, or of a newer format.
    """
    body = check_format(path)
    if body is None or not _is_whole(body):
        raise MismatchError(
            f"The run record {path / FOLDER / RUN} is broken, or was not written by this version of kimicap, so its"
            " settings are unknown. Start again with --overwrite, or in another folder; what is there can be read with"
            " kimicap.open."
        )
    return body["record"], body["root"]


def block_file(path: Path, block: int) -> Path:
    """Where the record of ``block`` lies."""
    return path / FOLDER / BLOCKS / f"{block:08d}.json"


def write_block(path: Path, block: int, body: Mapping[str, Any]) -> None:
    """Commit ``block``: from the return on it counts, whatever happens."""
    file = block_file(path, block)
    file.parent.mkdir(exist_ok=True)
    write_json(file, _with_digest({"block": block, **body}), scratch=path / FOLDER)


def read_blocks(path: Path) -> tuple[dict[int, dict[str, Any]], list[int]]:
    """Every block record, by block, and the numbers of those that are damaged.

    Raises:
        KimicapError: A file, or their folder, cannot be read, whatever is in it.
    """
    records: dict[int, dict[str, Any]] = {}
    damaged = []
    folder = path / FOLDER / BLOCKS
    try:
        for name in sorted(os.listdir(folder)) if folder.exists() else ():
            if not _BLOCK_FILE.fullmatch(name):
                continue
            block = int(name.removesuffix(".json"))
            record = read_json(folder / name)
            if record is not None and record.get("block") == block and _is_whole(record):
                records[block] = record
            elif (folder / name).exists():  # nobody took it back meanwhile
                damaged.append(block)
    except OSError as error:
        raise storage_error(error, folder) from error
    return records, damaged


def drop_blocks(path: Path, blocks: Sequence[int]) -> None:
    """Remove the records of ``blocks``, so that they count as never computed."""
    folder = path / FOLDER / BLOCKS
    folder.mkdir(exist_ok=True)  # lost, perhaps
    for block in blocks:
        block_file(path, block).unlink(missing_ok=True)
    sync_folder(folder)


def _with_digest(body: Mapping[str, Any]) -> dict[str, Any]:
    """A record with the sha256, in hex, of all else in it."""
    return {**body, "sha256": _digest(body)}


def _is_whole(record: Mapping[str, Any]) -> bool:
    """Whether a record is as it was written."""
    return record.get("sha256") == _digest({key: value for key, value in record.items() if key != "sha256"})


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def os_code(exc: BaseException) -> int | None:
    """The errno of an error of the filesystem; None where the error is another.

    tensorstore raises ``ValueError`` whatever happened, and tells the errno in its text only.
    """
    found = _OS_ERROR.search(str(exc))
    return exc.errno if isinstance(exc, OSError) else int(found[1]) if found else None


def storage_error(exc: BaseException, path: Path | str) -> KimicapError:
    """The sentence for an error of the filesystem or of tensorstore while reading or writing ``path``."""
    if isinstance(exc, KimicapError):
        return exc
    if (room := lack_of_memory(exc)) is not None:
        return room
    code = os_code(exc)
    if code == errno.ENOSPC:
        return RoomError(f"The disk holding {path} is full; free some and go on with --resume.")
    if code == errno.EDQUOT:
        return RoomError(f"The disk quota for {path} is used up; free some and go on with --resume.")
    if code in (errno.EACCES, errno.EPERM, errno.EROFS):
        return UsageError(
            f"{path} cannot be accessed: {os.strerror(code)}. Mend its permissions and go on with --resume,"
            " or choose another --out."
        )
    return KimicapError(f"Reading or writing {path} failed: {exc}. Every committed block is kept; go on with --resume.")
