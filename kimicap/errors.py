"""The errors a person can cause. Each carries one or two sentences: what is wrong, and what to do.

The command line prints the message and exits with the class's ``exit_code``; nothing else
in kimicap decides an exit code.
"""


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
