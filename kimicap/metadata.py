"""The metadata of a capture's arrays: compared with the copy in its run record, and written again from it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kimicap import records
from kimicap.records import read_json, storage_error

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
    root = read_json(path / ROOT)
    parts = {"attributes", "consolidated_metadata"}
    if (
        root is None
        or not isinstance(_attributes(root).get("complete"), bool)
        or any(root.get(key) != made[key] for key in {*made} - parts)
    ):
        return [("", ROOT, "the root's metadata are missing or broken")]
    problems = [
        ("", ROOT, f"the attribute {name} was changed")
        for name, value in made["attributes"].items()
        if name != "complete" and root["attributes"].get(name) != value
    ]
    found = _consolidated(root)
    if any(found.get(key) != value for key, value in made["consolidated_metadata"].items() if key != "metadata"):
        problems.append(("", ROOT, "the members' metadata are missing or broken"))
    for name, expected in _members(made).items():
        if not _is_made(_members(root).get(name), expected):
            problems.append((name, ROOT, "its metadata in the root are not as they were made"))
        own = read_json(path / name / ROOT)
        if not _is_made(own, _own(expected)):
            what = "missing or broken" if own is None else "not as they were made"
            problems.append((name, f"{name}/{ROOT}", f"its metadata are {what}"))
    return problems


def restore_metadata(path: Path, made: Mapping[str, Any]) -> list[str]:
    """Writes again what `metadata_problems` finds, and names the files; a root that was lost is not complete then.

    Raises:
        KimicapError: A file may not be read or written.
    """
    problems = metadata_problems(path, made)
    files = sorted({file for _, file, _ in problems})
    try:
        for name in sorted({name for name, file, _ in problems if file != ROOT}):
            (path / name).mkdir(exist_ok=True)
            mended = _merged(read_json(path / name / ROOT), _own(_members(made)[name]))
            records.write_json(path / name / ROOT, mended, scratch=path / records.FOLDER)
        if ROOT in files:
            records.write_json(path / ROOT, _merged_root(path, made), scratch=path / records.FOLDER)
    except OSError as error:
        raise storage_error(error, path) from error
    return files


def _merged_root(path: Path, made: Mapping[str, Any]) -> dict[str, Any]:
    """The root as it was made, with what was added to it since, and whether it is complete."""
    found = read_json(path / ROOT)
    root = _merged(found, made)
    complete = _attributes(found).get("complete")
    root["attributes"]["complete"] = complete if isinstance(complete, bool) else False
    there = _members(found)
    members = {name: member for name, member in there.items() if read_json(path / name / ROOT) is not None}
    members |= {name: _merged(there.get(name), member) for name, member in _members(made).items()}
    # In zarr's own order; it finds no member of a group in any other.
    ordered = dict(sorted(members.items(), key=lambda item: (item[0].count("/"), item[0].casefold())))
    root["consolidated_metadata"] = {**made["consolidated_metadata"], "metadata": ordered}
    return root


def _is_made(found: Any, expected: Mapping[str, Any]) -> bool:
    """Whether metadata are as they were made, but for attributes that were added."""
    same = isinstance(found, dict) and all(found.get(key) == expected[key] for key in {*expected} - {"attributes"})
    return same and _attributes(found).items() >= expected["attributes"].items()


def _merged(found: Any, made: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata as they were made, with attributes that were added."""
    return {**made, "attributes": {**_attributes(found), **made["attributes"]}}


def _attributes(found: Any) -> dict[str, Any]:
    attributes = found.get("attributes") if isinstance(found, dict) else None
    return attributes if isinstance(attributes, dict) else {}


def _consolidated(root: Any) -> dict[str, Any]:
    consolidated = root.get("consolidated_metadata") if isinstance(root, dict) else None
    return consolidated if isinstance(consolidated, dict) else {}


def _members(root: Any) -> dict[str, Any]:
    """The metadata of every array and group under the root, by path."""
    members = _consolidated(root).get("metadata")
    return members if isinstance(members, dict) else {}


def _own(member: Mapping[str, Any]) -> dict[str, Any]:
    """A member's own ``zarr.json``; in the root, groups have an empty list of members consolidated with them."""
    return {key: value for key, value in member.items() if key != "consolidated_metadata"}
