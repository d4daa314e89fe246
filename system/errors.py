"""The one exception of the project."""


class UserError(Exception):
    """Something the user can mend: one line with the value, what was expected and how to mend it."""
