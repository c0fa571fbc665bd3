"""How a command ends early: by an error that a user is meant to read, or because it was asked to stop."""

import signal


class UserError(Exception):
    """A problem the user can mend. The entry points print it as one message, without a traceback, and exit 1."""


class ToldElsewhere(UserError):  # noqa: N818
    """A UserError that another process of the same launch has too, and prints: once is enough."""


class Interrupted(BaseException):
    """The process was asked to stop. `exit_code` is 128 plus the signal's number."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.exit_code = 128 + number
