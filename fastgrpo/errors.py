"""Errors whose message is written for the person at the terminal, and printed alone, without a traceback.

    UserError    the input is at fault: the message names the values and the remedy        exit status 2
    RunError     the run cannot go on, or is not complete, for what it met: a full disk, a
                 folder that went away, an engine with other weights                       exit status 1

Everything else is a bug of ours or of a library and keeps its traceback.
"""


class Told(Exception):
    """`speaks_alone`: the ranks have agreed that this one's is the message to print."""

    speaks_alone = False


class UserError(Told):
    """A mistake in configuration, data, reward or environment that the user can mend. The message says how."""


class ConfigError(UserError):
    """A mistake that the configuration alone shows, found before anything is loaded."""


class RunError(Told, RuntimeError):
    """What ended a run that was configured well, or keeps it from being complete. The message says what is kept."""
