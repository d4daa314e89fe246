"""Words of a line of output, and text from elsewhere made safe to show."""

import re

# C0 but tab and line feed, DEL, C1, and what overrides the direction of writing. A terminal obeys these: they move its
# cursor, clear it, change its title, or show a name backwards.
_CONTROL_CHARS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def escape_control_chars(text: str) -> str:
    """The text with a picture in place of each control character but tab and line feed: ␛ for ESC, � where none is."""
    return _CONTROL_CHARS.sub(lambda match: _picture(ord(match[0])), text)


def escape_line(text: str) -> str:
    """The same in one line: line feeds and tabs become pictures too."""
    return escape_control_chars(text).replace("\n", "␊").replace("\t", "␉")


def escape_json(text: str) -> str:
    """JSON that means the same, with every control character written as JSON's own escape."""
    return _CONTROL_CHARS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _picture(code: int) -> str:
    return chr(0x2400 + code) if code < 0x20 else "␡" if code == 0x7F else "\ufffd"


def pluralize(number: int, noun: str) -> str:
    """For example "1 layer", "2 layers"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
