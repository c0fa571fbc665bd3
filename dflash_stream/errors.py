"""The exception that a user is meant to read: what happened, where, and what to do about it."""


class UserError(Exception):
    """A problem the user can mend. The entry points print it as one message, without a traceback, and exit 1."""


class ToldElsewhere(UserError):  # noqa: N818
    """A UserError that another process of the same launch has too, and prints: once is enough."""
