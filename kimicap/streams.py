"""stdout and stderr of the program: results must arrive, and talk may go unheard."""

import io
import os
import select
import signal
import sys
from typing import Any

from kimicap.errors import KimicapError


class _Results(io.FileIO):
    """What is written must arrive; where the reader has gone, as in `kimicap values | head`, the program ends."""

    def write(self, data: Any) -> int:
        try:
            while (written := super().write(data)) is None:  # it would block
                select.select([], [self.fileno()], [])
            return written
        except OSError as error:
            # What is buffered would fail once more when the program ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            if isinstance(error, BrokenPipeError):
                sys.exit(128 + signal.SIGPIPE)
            raise KimicapError(
                f"The results could not be written to stdout ({error.strerror}), which harms no capture; send them "
                "elsewhere."
            ) from error


class _Talk(io.FileIO):
    """What cannot be written is dropped: no run ends because nobody hears of it."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or len(data)  # none where it would block
        except OSError:
            return len(data)


def open_streams() -> None:
    """Gives the program its stdout and stderr; one that is closed takes everything, and it goes nowhere."""
    for name, kind in (("stdout", _Results), ("stderr", _Talk)):
        given = getattr(sys, name)
        descriptor = os.open(os.devnull, os.O_WRONLY) if given is None else given.fileno()
        stream = io.TextIOWrapper(
            io.BufferedWriter(kind(descriptor, "w", closefd=False)),
            encoding=getattr(given, "encoding", "utf-8"),
            errors="backslashreplace",
            line_buffering=True,
        )
        setattr(sys, name, stream)
