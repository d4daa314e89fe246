"""The exception for mistakes that the user can fix."""


class UserError(Exception):
    """An error that the user can fix. The message is one line: the value, what was expected, and how to fix it."""
