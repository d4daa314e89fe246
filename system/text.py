"""How many of what, in the words of a line of output."""


def counted(number: int, noun: str) -> str:
    """For example "1 layer", "2 layers"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
