"""Is a checkpoint harmless? Looked at before PyTorch reads it, and without PyTorch.

torch.load(weights_only=True) runs no code by design, but its reader has had holes (CVE-2025-32434; CVE-2026-24747).
So a file gets there only if it is what torch.save writes for plain values and tensors, and nothing else:

    a zip, its entries stored as they are, with torch.save's names, each with the checksum it says
    a pickle in it that makes dicts, lists, numbers, texts and tensors
    tensors no larger than the bytes there are for them
    nothing small in the file and large in memory: a value that is reached in a thousand ways counts a thousand times
"""

import math
import pickletools
import re
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from system.checks import short_repr
from system.errors import UserError

_ENTRY = re.compile(
    r"([^/\\]+)/(data\.pkl|data/(\d+)|byteorder|version|\.format_version|\.storage_alignment|\.data/serialization_id)",
    re.ASCII,
)
_BYTES_A_NUMBER = {
    **{"DoubleStorage": 8, "FloatStorage": 4, "HalfStorage": 2, "BFloat16Storage": 2, "BoolStorage": 1},
    **{"LongStorage": 8, "IntStorage": 4, "ShortStorage": 2, "CharStorage": 1, "ByteStorage": 1},
}
MAX_DEPTH = 32  # containers in containers; ours have 9
MAX_DIMENSIONS = 8
# What the file makes, counted as often as it is reached, is at most so many times the file's own size. Weights that
# are used twice, in the embedding and in the output layer, are reached twice.
MAX_EXPANSION = 4
_CONTAINER_BYTES, _TENSOR_BYTES, _VALUE_BYTES = 64, 512, 8  # about what they take in memory, without their content


class Refused(Exception):
    """Not what torch.save writes for plain values; args[0] says why."""


def check_safe(path: Path, file: BinaryIO) -> None:
    """Raises UserError for a file that is damaged, or that holds more than plain values and tensors.

    Args:
        path: its name, for the message.
        file: what PyTorch is going to read, from its start to its end.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            _check_container(file)
            sizes = _checked_sizes(archive)
            content = archive.read(next(name for name in archive.namelist() if name.endswith("/data.pkl")))
        check_expansion(_follow(content, sizes), MAX_EXPANSION * file.seek(0, 2))
    except (Refused, zipfile.BadZipFile) as error:
        reason = str(error)
    except OSError as error:
        reason = error.strerror or "it cannot be read"
    except Exception as error:  # noqa: BLE001 -- a hostile file may make zipfile and pickle raise anything
        reason = f"{type(error).__name__} while reading its values"
    else:
        return
    raise UserError(
        f"{path} is no checkpoint written by train.py, or it is damaged: {' '.join(reason.split())}. "
        "Use another, or train one: python train.py"
    )


def _check_container(file: BinaryIO) -> None:
    """One end, at the end: readers that search for it, each in its way, then all find the same entries.

    https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT, 4.3.14 to 4.3.16: a record of 22 bytes, and before it
    those of zip64, 56 bytes and the 20 that say where these are.
    """
    file_size = file.seek(0, 2)
    file.seek(max(0, file_size - 98))
    tail = file.read().rjust(98, b"\0")
    signature, _, _, size, offset, comment = struct.unpack("<4s4s4s2LH", tail[76:])
    directory_end = file_size - 22
    if tail[56:60] == b"PK\6\7":
        directory_end -= 76
        if struct.unpack("<Q", tail[64:72])[0] != directory_end or tail[:4] != b"PK\6\6":
            raise Refused("its zip has two ends")
        size, offset = struct.unpack("<2Q", tail[40:56])
    if signature != b"PK\5\6" or comment or offset + size != directory_end:
        raise Refused("its zip has something before or after it")


def _checked_sizes(archive: zipfile.ZipFile) -> dict[str, int]:
    """Bytes of each tensor's data, by its key."""
    entries, sizes, folders = archive.infolist(), {}, set()
    for entry in entries:
        match = _ENTRY.fullmatch(entry.filename)
        if not match:
            raise Refused(f"it holds {short_repr(entry.filename)}")
        if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size or entry.flag_bits & 1:
            raise Refused(f"{short_repr(entry.filename)} in it is packed")
        folders.add(match[1])
        if match[3]:
            sizes[match[3]] = entry.file_size
    if len(folders) != 1 or len({entry.filename for entry in entries}) != len(entries):
        raise Refused("an entry occurs twice")
    if sum(entry.file_size for entry in entries) > archive.fp.seek(0, 2):
        raise Refused("its entries overlap")
    if (damaged := archive.testzip()) is not None:  # reads all of it
        raise Refused(f"the checksum of {short_repr(damaged)} in it is another")
    return sizes


def _follow(content: bytes, sizes: dict[str, int]) -> Any:
    """What a pickle makes, with nothing real: tensors and their data are only measured.

    The instructions are followed here, not by Python's unpickler: that would hash any key, and a tuple of tuples that
    share their elements takes for ever to hash; and copy any dictionary, as often as the file says.
    """
    stack: list[Any] = []
    below: list[list[Any]] = []  # stacks as they were at each mark
    memo: dict[int, Any] = {}
    for opcode, argument, _ in pickletools.genops(content):
        match opcode.name:
            case "PROTO":
                pass
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[opcode.name])
            case "BININT" | "BININT1" | "BININT2" | "LONG1" | "BINFLOAT" | "BINUNICODE":
                stack.append(argument)
            case "EMPTY_DICT" | "EMPTY_LIST" | "EMPTY_TUPLE":
                stack.append({"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}[opcode.name]())
            case "MARK":
                below.append(stack)
                stack = []
            case "TUPLE":
                items, stack = stack, below.pop()
                stack.append(tuple(items))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                items = [stack.pop() for _ in range(int(opcode.name[-1]))]
                stack.append(tuple(reversed(items)))
            case "APPEND":
                item = stack.pop()
                _of_type(stack[-1], list).append(item)
            case "APPENDS":
                items, stack = stack, below.pop()
                _of_type(stack[-1], list).extend(items)
            case "SETITEM":
                value, key = stack.pop(), stack.pop()
                _of_type(stack[-1], dict, OrderedDict)[_of_type(key, str, int)] = value
            case "SETITEMS":
                items, stack = stack, below.pop()
                for key, value in zip(items[::2], items[1::2], strict=True):
                    _of_type(stack[-1], dict, OrderedDict)[_of_type(key, str, int)] = value
            case "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "GLOBAL":
                stack.append(_known(*argument.split(" ")))
            case "BINPERSID":
                stack.append(_measure_data(*_of_type(stack.pop(), tuple), sizes))
            case "REDUCE":
                arguments = _of_type(stack.pop(), tuple)
                stack.append(_of_type(stack.pop(), _Makes).make(*arguments))
            case "BUILD":  # attributes, which nobody looks at: torch.save keeps those of a network's state
                state = stack.pop()
                if type(stack[-1]) is not OrderedDict:
                    raise Refused("its pickle changes a tensor")
                _of_type(state, dict)
            case "STOP":
                (made,) = stack
                return made
            case _:
                raise Refused(f"its pickle uses {opcode.name}")
    raise Refused("its pickle has no end")


def _of_type(value: Any, *types: type) -> Any:
    if type(value) not in types:
        raise Refused(f"its pickle has a {type(value).__name__} in the wrong place")
    return value


def check_expansion(made: Any, most_bytes: int) -> None:
    """Raises Refused where values lie too deep in each other, or are larger in memory than the file accounts for."""
    waiting, taken = [(made, 1)], 0
    while waiting:
        value, depth = waiting.pop()
        inside = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
        if inside and depth > MAX_DEPTH:
            raise Refused(f"its values lie in each other more than {MAX_DEPTH} deep")
        taken += _bytes_of(value) + (sum(map(_bytes_of, value)) if isinstance(value, dict) else 0)
        if taken + _VALUE_BYTES * (len(waiting) + len(inside)) > most_bytes:
            raise Refused("its values would take much more memory than the file is large")
        waiting += [(item, depth + 1) for item in inside]


def _bytes_of(value: Any) -> int:
    """About what it takes in memory, without what is in it."""
    if isinstance(value, _StubTensor):
        return _TENSOR_BYTES + value.num_bytes
    if isinstance(value, dict | list | tuple):
        return _CONTAINER_BYTES
    return _VALUE_BYTES + (len(value) if isinstance(value, str) else 0)


def _measure_data(
    kind: str, bytes_a_number: int, key: str, device: str, count: int, sizes: dict[str, int]
) -> "_StubTensor":
    """A tensor's data: as many numbers as the pickle says, if that is what the file has."""
    if kind != "storage" or type(bytes_a_number) is not int or type(count) is not int or type(key) is not str:
        raise Refused("its tensors have data of an unknown kind")
    if key not in sizes:
        raise Refused("a tensor's data are not in it")
    if count < 0 or count * bytes_a_number != sizes[key]:
        raise Refused(f"a tensor claims {short_repr(count)} numbers, the file has {sizes[key]:,} bytes of them")
    return _StubTensor(count, bytes_a_number)


@dataclass(frozen=True)
class _StubTensor:
    """Stands for a tensor or its data."""

    count: int
    bytes_a_number: int

    @property
    def num_bytes(self) -> int:
        return self.count * self.bytes_a_number


def _measure_tensor(
    data: _StubTensor, offset: int, shape: tuple, strides: tuple, grad: bool, hooks: dict
) -> _StubTensor:
    if type(data) is not _StubTensor or hooks or type(shape) is not tuple or type(strides) is not tuple:
        raise Refused("it has a tensor of an unknown kind")
    if len(shape) > MAX_DIMENSIONS or not all(type(n) is int and 0 <= n < 1 << 63 for n in (offset, *shape, *strides)):
        raise Refused("it has a tensor of an unknown kind")
    last = offset + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    if math.prod(shape) > data.count or (math.prod(shape) and last >= data.count):
        raise Refused(f"a tensor of shape {shape} is larger than its data")
    return _StubTensor(math.prod(shape), data.bytes_a_number)


def _measure_parameter(tensor: _StubTensor, grad: bool, hooks: dict) -> _StubTensor:
    if type(tensor) is not _StubTensor or hooks:
        raise Refused("it has a parameter of an unknown kind")
    return tensor


@dataclass(frozen=True)
class _Makes:
    """Stands for a function that the pickle may call."""

    make: Callable[..., Any]


_KNOWN = {
    "collections.OrderedDict": _Makes(lambda: OrderedDict()),  # an empty one: whose items come after it
    "torch._utils._rebuild_tensor_v2": _Makes(_measure_tensor),
    "torch._utils._rebuild_parameter": _Makes(_measure_parameter),
    **{f"torch.{name}": number for name, number in _BYTES_A_NUMBER.items()},
}


def _known(module: str, name: str) -> Any:
    """What stands for the few names that may occur."""
    if f"{module}.{name}" not in _KNOWN:
        raise Refused(f"it asks for {short_repr(f'{module}.{name}')}, which is no plain value")
    return _KNOWN[f"{module}.{name}"]
