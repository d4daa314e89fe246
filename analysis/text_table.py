"""Tables in plain text: columns aligned by what a terminal shows, and bars."""

import unicodedata
from collections.abc import Collection, Sequence

BAR_WIDTH = 20  # characters for a value of 1


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[int] = ()) -> str:
    """Formats rows of cells under a header.

    Args:
        left: indices of the columns that are aligned on the left. The others are aligned on the right.
    """
    widths = [max(map(display_width, column)) for column in zip(header, *rows, strict=True)]
    lines = []
    for row in (header, *rows):
        cells = [
            padded(cell, width) if index in left else " " * (width - display_width(cell)) + cell
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def two_decimals(value: float) -> str:
    """For example 0.25; small negative values are 0.00, not -0.00."""
    return f"{round(value, 2) + 0.0:.2f}"


def bar(value: float) -> str:
    """A bar of BAR_WIDTH characters for a value from 0 to 1."""
    eighths = round(float(value) * BAR_WIDTH * 8)
    return ("█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8]).ljust(BAR_WIDTH)[:BAR_WIDTH]


def signed_bar(value: float) -> str:
    """A bar for a value from -1 to 1: to the left of the middle if it is negative."""
    length = round(abs(value) * BAR_WIDTH / 2)
    negative, positive = ("█" * length, "") if value < 0 else ("", "█" * length)
    return f"{negative:>{BAR_WIDTH // 2}}│{positive:<{BAR_WIDTH // 2}}"


def display_width(text: str) -> int:
    """Columns in a terminal: wide characters such as Chinese ones take two, combining accents none."""
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text
    )


def padded(text: str, width: int) -> str:
    """The text, with spaces up to a width in a terminal."""
    return text + " " * (width - display_width(text))
