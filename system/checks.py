"""Runtime type checks for values that may come from another person's file, and short representations for messages.

A spec says what is expected:

    int, float, bool, str, float | None    a value of that type; an int is also accepted as a float
    Bounded(int, 0, 100)                   a number within inclusive bounds; NaN only with allow_nan=True
    Predicate("a color", test)             a value for which `test` returns true
    (spec, NoneType)                       any of several specs
    [spec]                                 a list of these values
    {"name": spec, "more?": spec}          a dictionary with the key "name" and optionally the key "more"
    {str: spec}                            a dictionary with any str (or int) keys and these values
    object                                 anything
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, NamedTuple, get_args

from system.errors import UserError

_TYPE_NAMES = {
    **{int: "a whole number", float: "a number", bool: "true or false", str: "a text", NoneType: "null"},
    **{list: "a list", dict: "a dictionary"},
}
_MAX_CHARS = 80
_MAX_BITS = 256  # Python refuses to print very long integers


class Bounded(NamedTuple):
    """A number within inclusive bounds."""

    type: type
    minimum: float
    maximum: float = math.inf
    allow_nan: bool = False


class Predicate(NamedTuple):
    """A value for which `test` returns true; `description` says what that is."""

    description: str
    test: Callable[[Any], Any]


COUNT = Bounded(int, 0, 1 << 53)
SECONDS = Bounded(float, 0, 1e10)


def short_repr(value: Any) -> str:
    """The value, or only its type and size if it is large: about 80 characters at most."""
    if isinstance(value, str):
        return repr(value) if len(value) <= _MAX_CHARS else f"{value[:_MAX_CHARS]!r}…"
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        return f"a number of {value.bit_length():,} bits"
    if value is None or isinstance(value, int | float):
        return repr(value)
    kind = "dictionary" if isinstance(value, Mapping) else type(value).__name__.lower()
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        kind = "list"
    return f"a {kind} of {len(value)}" if isinstance(value, Mapping | Sequence) else f"a {kind}"


def check(value: Any, spec: Any, name: str) -> None:
    """Raises ValueError, with the value's name, if the value does not match the spec."""
    match spec:
        case Bounded(number_type, minimum, maximum, allow_nan):
            check(value, number_type, name)
            if not (minimum <= value <= maximum or (allow_nan and value != value)):
                bounds = f"at least {minimum}" if maximum == math.inf else f"from {minimum} to {maximum:,}"
                raise ValueError(f"{name} is {short_repr(value)}, but must be {bounds}")
        case Predicate(description, test):
            if not test(value):
                raise ValueError(f"{name} is {short_repr(value)}, but must be {description}")
        case tuple():
            _check_any(value, spec, name)
        case [inner]:
            check(value, list, name)
            for index, item in enumerate(value):
                check(item, inner, f"{name}.{index}")
        case dict():
            check(value, dict, name)
            _check_items(value, spec, name)
        case UnionType():
            if not any(_has_type(value, expected) for expected in get_args(spec)):
                wanted = " or ".join(_TYPE_NAMES[expected] for expected in get_args(spec))
                raise ValueError(f"{name} is {short_repr(value)}, but must be {wanted}")
        case _:
            if not _has_type(value, spec):
                wanted = _TYPE_NAMES.get(spec, f"a {spec.__name__.lower()}")
                raise ValueError(f"{name} is {short_repr(value)}, but must be {wanted}")


def _has_type(value: Any, expected: type) -> bool:
    return expected is object or type(value) is expected or (expected is float and type(value) is int)


def _check_any(value: Any, specs: tuple, name: str) -> None:
    """Raises the first spec's ValueError if none of them matches."""
    errors = []
    for spec in specs:
        try:
            return check(value, spec, name)
        except ValueError as error:
            errors.append(error)
    raise errors[0]


def _check_items(value: dict, spec: dict, name: str) -> None:
    for key, inner in spec.items():
        if isinstance(key, type):
            for found, item in value.items():
                check(found, key, f"a key of {name}")
                check(item, inner, f"{name}.{found if isinstance(found, int) else found[:_MAX_CHARS]}")
        elif (required := key.removesuffix("?") if isinstance(key, str) else key) in value:
            check(value[required], inner, f"{name}.{required}")
        elif required == key:
            raise ValueError(f"{name} has no {key}")


def check_fields(config: Any, group: str) -> None:
    """Raises UserError if a field of a dataclass does not have its declared type."""
    for field in dataclasses.fields(config):
        try:
            check(getattr(config, field.name), field.type, f"{group}.{field.name}")
        except ValueError as error:
            raise UserError(f"{error}.") from None
