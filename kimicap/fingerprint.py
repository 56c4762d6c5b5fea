"""What tells a model in a folder from another that comes to lie there later."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

SAMPLES, SAMPLE_BYTES = 64, 4096
"""Of each file of weights: all of them would take minutes to read, and every process of a run reads them."""


def folder_digest(folder: Path, *, weights: bool, code: bool) -> str:
    """sha256, in hex, of the files of a model's folder that decide its values.

    Args:
        folder: Holds a config, and perhaps weights and code.
        weights: Whether its weights are used. Of each file of them count its name, its size, and 4 KiB at each of
            64 places spread over it, first and last among them.
        code: Whether its own code is used.

    Raises:
        OSError: A file cannot be read.
    """
    digest = hashlib.sha256()
    patterns = ("config.json", "generation_config.json", *(("*.py",) if code else ()))
    for file in _files(folder, *patterns):
        content = file.read_bytes()
        digest.update(f"{file.name} {len(content)} ".encode())
        digest.update(content)
    for file in _files(folder, "*.safetensors", "*.bin") if weights else ():
        size = file.stat().st_size
        digest.update(f"{file.name} {size} ".encode())
        with file.open("rb") as opened:
            for sample in range(SAMPLES):
                at = max(0, size - SAMPLE_BYTES) * sample // (SAMPLES - 1)
                digest.update(os.pread(opened.fileno(), SAMPLE_BYTES, at))
    return digest.hexdigest()


def _files(folder: Path, *patterns: str) -> Iterator[Path]:
    """The files of a folder whose names fit, by name."""
    return iter(sorted(file for pattern in patterns for file in folder.glob(pattern) if file.is_file()))
