"""Is a value, which may come from another person's file, what is expected? And how a message shows it, in a few words.

A shape says what is expected:

    int, float, bool, str, float | None    a value of that type; a whole number is a number too
    Number(int, 0, 100)                    the same within bounds; NaN only with or_nan
    Is("a color", test)                    what the test is true of
    (shape, NoneType)                      one of several shapes
    [shape]                                a list of such values
    {"name": shape, "more?": shape}        a dictionary with the key "name", and perhaps the key "more"
    {str: shape}                           a dictionary of such values, with texts or whole numbers (int) as keys
    object                                 anything
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, NamedTuple, get_args

from system.errors import UserError

_NAMES = {
    **{int: "a whole number", float: "a number", bool: "true or false", str: "a text", NoneType: "null"},
    **{list: "a list", dict: "a dictionary"},
}
_SHOWN_CHARS = 80
_SHOWN_BITS = 256  # Python refuses to write very long numbers


class Number(NamedTuple):
    """A number between two others, which are included."""

    kind: type
    least: float
    most: float = math.inf
    or_nan: bool = False


class Is(NamedTuple):
    """A value of which `test` is true, in a few words."""

    words: str
    test: Callable[[Any], Any]


COUNT = Number(int, 0, 1 << 53)
SECONDS = Number(float, 0, 1e10)


def short(value: Any) -> str:
    """The value, or what kind of value it is: at most some 80 characters, however large it is."""
    if isinstance(value, str):
        return repr(value) if len(value) <= _SHOWN_CHARS else f"{value[:_SHOWN_CHARS]!r}…"
    if isinstance(value, int) and value.bit_length() > _SHOWN_BITS:
        return f"a number of {value.bit_length():,} bits"
    if value is None or isinstance(value, int | float):
        return repr(value)
    kind = "dictionary" if isinstance(value, Mapping) else type(value).__name__.lower()
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        kind = "list"
    return f"a {kind} of {len(value)}" if isinstance(value, Mapping | Sequence) else f"a {kind}"


def check(value: Any, shape: Any, name: str) -> None:
    """Raises ValueError, with the value's name, unless it is of this shape."""
    match shape:
        case Number(kind, least, most, or_nan):
            check(value, kind, name)
            if not (least <= value <= most or (or_nan and value != value)):
                bounds = f"at least {least}" if most == math.inf else f"from {least} to {most:,}"
                raise ValueError(f"{name} is {short(value)}, but must be {bounds}")
        case Is(words, test):
            if not test(value):
                raise ValueError(f"{name} is {short(value)}, but must be {words}")
        case tuple():
            _check_any(value, shape, name)
        case [inner]:
            check(value, list, name)
            for index, item in enumerate(value):
                check(item, inner, f"{name}.{index}")
        case dict():
            check(value, dict, name)
            _check_items(value, shape, name)
        case UnionType():
            if not any(_is(value, kind) for kind in get_args(shape)):
                wanted = " or ".join(_NAMES[kind] for kind in get_args(shape))
                raise ValueError(f"{name} is {short(value)}, but must be {wanted}")
        case _:
            if not _is(value, shape):
                wanted = _NAMES.get(shape, f"a {shape.__name__.lower()}")
                raise ValueError(f"{name} is {short(value)}, but must be {wanted}")


def _is(value: Any, kind: type) -> bool:
    return kind is object or type(value) is kind or (kind is float and type(value) is int)


def _check_any(value: Any, shapes: tuple, name: str) -> None:
    """Raises the first shape's ValueError where all have one."""
    errors = []
    for shape in shapes:
        try:
            return check(value, shape, name)
        except ValueError as error:
            errors.append(error)
    raise errors[0]


def _check_items(value: dict, shape: dict, name: str) -> None:
    for key, inner in shape.items():
        if isinstance(key, type):
            for found, item in value.items():
                check(found, key, f"a key of {name}")
                check(item, inner, f"{name}.{found if isinstance(found, int) else found[:_SHOWN_CHARS]}")
        elif (plain := key.removesuffix("?") if isinstance(key, str) else key) in value:
            check(value[plain], inner, f"{name}.{plain}")
        elif plain == key:
            raise ValueError(f"{name} has no {key}")


def check_fields(config: Any, group: str) -> None:
    """Raises UserError unless each field of a dataclass has the type it is declared with."""
    for field in dataclasses.fields(config):
        try:
            check(getattr(config, field.name), field.type, f"{group}.{field.name}")
        except ValueError as error:
            raise UserError(f"{error}.") from None
