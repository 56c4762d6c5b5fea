"""The errors a person can cause. Each carries one or two sentences: what is wrong, and what to do.

The command line prints the message and exits with the class's ``exit_code``; nothing else
in kimicap decides an exit code.
"""

import re

# As glibc's loader, the system, torch and CPython tell it, in errors of any class.
_NO_MEMORY = re.compile(r"allocate memory|bad_alloc|failed to map segment|can't start new thread")


class KimicapError(Exception):
    """Base of every error that a person can cause and mend; itself a failure that has no class of its own."""

    exit_code = 1


class UsageError(KimicapError):
    """Wrong flags, settings, schema file, model, dataset or selection."""

    exit_code = 2


class MismatchError(KimicapError):
    """The capture on disk and the settings (or the capture's own records) disagree."""

    exit_code = 3


class RoomError(KimicapError):
    """Not enough disk or memory."""

    exit_code = 4


class CheckError(KimicapError):
    """The loaded model gives values that cannot be right."""

    exit_code = 1


class Stopped(KimicapError):
    """A signal stopped the run; all committed blocks are kept and ``--resume`` goes on."""

    exit_code = 75


def lack_of_memory(error: BaseException) -> RoomError | None:
    """The sentence for an error that a lack of memory is behind, whatever other errors it became on its way."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, RoomError):
            return found
        if isinstance(found, MemoryError) or (not isinstance(found, KimicapError) and _NO_MEMORY.search(str(found))):
            return RoomError(
                f"The system gives this process no more memory or threads ({str(found) or type(found).__name__}). Free "
                "some, raise its limits (ulimit -v and -u, or those of its job), or give a smaller --memory or "
                "--batch-tokens."
            )
        found = found.__cause__ or found.__context__
    return None
