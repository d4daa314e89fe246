"""Text for the terminal: control characters escaped, nouns in the plural."""

import re

# C0 except tab and line feed, DEL, C1, and overrides of the writing direction. A terminal would move the cursor,
# clear the screen, change its title, or show a name backwards.
_CONTROL_CHARS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def escape_control_chars(text: str) -> str:
    """Replaces control characters except tab and line feed with visible symbols: ␛ for ESC, � if there is no symbol."""
    return _CONTROL_CHARS.sub(lambda match: _symbol(ord(match[0])), text)


def escape_line(text: str) -> str:
    """Replaces line feeds and tabs as well, so that the result is one line."""
    return escape_control_chars(text).replace("\n", "␊").replace("\t", "␉")


def escape_json(text: str) -> str:
    """Equivalent JSON in which every control character is written as a JSON escape sequence."""
    return _CONTROL_CHARS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _symbol(code: int) -> str:
    return chr(0x2400 + code) if code < 0x20 else "␡" if code == 0x7F else "\ufffd"


def pluralize(number: int, noun: str) -> str:
    """For example "1 layer", "2 layers"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
