"""What tells a model in a folder from another that comes to lie there later."""

import hashlib
import json
import os
from fnmatch import fnmatch
from pathlib import Path

SAMPLES, SAMPLE_BYTES = 64, 4096
"""Of each file of weights: all of them would take minutes to read, and every process of a run reads them."""

_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
_SAYS_NOTHING = ("_name_or_path", "transformers_version")
"""Keys of a config that change without the model."""


def folder_digest(folder: Path, *, weights: bool, code: bool, generates: bool) -> str:
    """sha256, in hex, of what in a model's folder decides its values.

    Args:
        folder: Holds a config, and perhaps weights and code.
        weights: Whether its weights are used. Of each file of them count its name, its size, and 4 KiB at each of
            64 places spread over it, first and last among them.
        code: Whether its own code is used.
        generates: Whether tokens are decoded, so that its generation config says where sequences end.

    Raises:
        OSError: The folder or a file cannot be read.
    """
    digest = hashlib.sha256()
    for name in sorted(os.listdir(folder)):
        file = folder / name
        if name == "config.json" or (generates and name == "generation_config.json"):
            config = {key: value for key, value in json.loads(file.read_bytes()).items() if key not in _SAYS_NOTHING}
            content = json.dumps(config, sort_keys=True).encode()
        elif code and name.endswith(".py"):
            content = file.read_bytes()
        elif weights and any(fnmatch(name, pattern) for pattern in _WEIGHTS):
            content = _samples(file)
        else:
            continue
        digest.update(f"{name} {len(content)} ".encode())
        digest.update(content)
    return digest.hexdigest()


def _samples(file: Path) -> bytes:
    """A file's size, and parts of it."""
    with file.open("rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        places = (max(0, size - SAMPLE_BYTES) * sample // (SAMPLES - 1) for sample in range(SAMPLES))
        return b"".join((f"{size} ".encode(), *(os.pread(opened.fileno(), SAMPLE_BYTES, at) for at in places)))
