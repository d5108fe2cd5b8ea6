"""What ends a command without a result: one line for people, and an exit status."""

from __future__ import annotations


class CommandError(Exception):
    """A problem of the cluster or of what was found there: exit status 1."""

    exit_code = 1


class UsageError(CommandError):
    """A call, a file or a value that cannot be used as it is: exit status 2."""

    exit_code = 2
