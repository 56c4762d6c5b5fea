"""The metadata of a capture's arrays: compared with the copy in its run record, and written again from it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kimicap import records
from kimicap.records import storage_error

ROOT = "zarr.json"


def metadata_problems(path: Path, made: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """What is not as it was made; attributes and arrays that somebody added are left out.

    Args:
        path: The capture's folder.
        made: The root's ``zarr.json`` as it was made.

    Returns:
        Of each: the path of the array or group (empty for the root), the file, and what is wrong, in words.

    Raises:
        KimicapError: A file may not be read.
    """
    root = _read(path / ROOT)
    if root is None or not isinstance(root.get("attributes"), dict) or not isinstance(_members(root), dict):
        return [("", ROOT, "the root's metadata are missing or broken")]
    problems = [
        ("", ROOT, f"the attribute {name} was changed")
        for name, value in made["attributes"].items()
        if name != "complete" and root["attributes"].get(name) != value
    ]
    for name, expected in _members(made).items():
        if _members(root).get(name) != expected:
            problems.append((name, ROOT, "its metadata in the root are not as they were made"))
        own = _read(path / name / ROOT)
        if own is None:
            problems.append((name, f"{name}/{ROOT}", "its metadata are missing or broken"))
        elif any(own.get(key) != value for key, value in _own(expected).items()):
            problems.append((name, f"{name}/{ROOT}", "its metadata are not as they were made"))
    return problems


def restore_metadata(path: Path, made: Mapping[str, Any]) -> list[str]:
    """Writes again what `metadata_problems` finds, and names the files; a root that was lost is not complete then.

    Raises:
        KimicapError: A file may not be read or written.
    """
    problems = metadata_problems(path, made)
    files = sorted({file for _, file, _ in problems})
    try:
        for name in {name for name, file, _ in problems if file != ROOT}:
            (path / name).mkdir(exist_ok=True)
            records.write_json(path / name / ROOT, _own(_members(made)[name]), scratch=path / records.FOLDER)
        if ROOT in files:
            records.write_json(path / ROOT, _merged(_read(path / ROOT), made), scratch=path / records.FOLDER)
    except OSError as error:
        raise storage_error(error, path) from error
    return files


def _merged(root: Mapping[str, Any] | None, made: Mapping[str, Any]) -> dict[str, Any]:
    """The root as it was made, with what was added to it since, and whether it is complete."""
    found: Mapping[str, Any] = root or {}
    attributes, members = found.get("attributes"), _members(found)
    kept = dict(attributes) if isinstance(attributes, dict) else {}
    complete = {"complete": kept["complete"]} if isinstance(kept.get("complete"), bool) else {}
    added = members if isinstance(members, dict) else {}
    consolidated = {**made["consolidated_metadata"], "metadata": {**added, **_members(made)}}
    return {**made, "attributes": {**kept, **made["attributes"], **complete}, "consolidated_metadata": consolidated}


def _members(root: Mapping[str, Any]) -> Any:
    """The metadata of every array and group under the root, by path."""
    consolidated = root.get("consolidated_metadata")
    return consolidated.get("metadata") if isinstance(consolidated, dict) else None


def _own(member: Mapping[str, Any]) -> dict[str, Any]:
    """A member's own ``zarr.json``; in the root, groups have an empty list of members consolidated with them."""
    return {key: value for key, value in member.items() if key != "consolidated_metadata"}


def _read(file: Path) -> dict[str, Any] | None:
    """A JSON table; None where there is none."""
    try:
        found = json.loads(file.read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    except OSError as error:
        raise storage_error(error, file) from error
    return found if isinstance(found, dict) else None
