"""The one kind of error whose message is written for the user of the command.

`UserError` means: the input is at fault, the message names the values and the remedy, and no traceback is worth
printing. Everything else is a bug of ours or of a library and keeps its traceback.
"""


class UserError(Exception):
    """A mistake in configuration, data, reward or environment that the user can mend. The message says how.
    `speaks_alone`: the ranks have agreed that this one's is the message to print."""

    speaks_alone = False


class ConfigError(UserError):
    """A mistake that the configuration alone shows, found before anything is loaded."""
