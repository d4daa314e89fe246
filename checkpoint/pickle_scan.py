"""Scans a checkpoint for anything unsafe before torch.load reads it. Does not use PyTorch.

torch.load(weights_only=True) runs no code by design, but has had vulnerabilities (CVE-2025-32434, CVE-2026-24747).
So this scan accepts only what torch.save writes for plain values and tensors:

    a zip archive with torch.save's entry names, uncompressed, with valid checksums
    a pickle that builds only dicts, lists, tuples, numbers, strings and tensors
    tensors that are no larger than their data
    content that takes little more memory than the file: values that are referenced repeatedly count repeatedly
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
from system.process import script_command

_ENTRY = re.compile(
    r"([^/\\]+)/(data\.pkl|data/(\d+)|byteorder|version|\.format_version|\.storage_alignment|\.data/serialization_id)",
    re.ASCII,
)
_ITEM_SIZES = {
    **{"DoubleStorage": 8, "FloatStorage": 4, "HalfStorage": 2, "BFloat16Storage": 2, "BoolStorage": 1},
    **{"LongStorage": 8, "IntStorage": 4, "ShortStorage": 2, "CharStorage": 1, "ByteStorage": 1},
}
MAX_DEPTH = 32  # of nested containers; our checkpoints have 9 levels
MAX_DIMENSIONS = 8
# Limit on (size in memory) / (size of the file), where repeated references count repeatedly. Tied weights, in the
# embedding and in the output layer, count twice.
MAX_EXPANSION = 4
_CONTAINER_BYTES, _TENSOR_BYTES, _VALUE_BYTES = 64, 512, 8  # approximate size in memory, without the content


class UnsafeCheckpoint(Exception):
    """The file has something that torch.save does not write for plain values. The message says what."""


def check_safe(path: Path, file: BinaryIO) -> None:
    """Raises UserError if a file is damaged or contains more than plain values and tensors.

    Args:
        path: name of the file, for the error message.
        file: its content, exactly as PyTorch is going to read it.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            _check_container(file)
            sizes = _checked_sizes(archive)
            content = archive.read(next(name for name in archive.namelist() if name.endswith("/data.pkl")))
        check_expansion(_interpret_pickle(content, sizes), MAX_EXPANSION * file.seek(0, 2))
    except (UnsafeCheckpoint, zipfile.BadZipFile) as error:
        reason = str(error)
    except OSError as error:
        reason = error.strerror or "it cannot be read"
    except Exception as error:  # noqa: BLE001 -- a hostile file may make zipfile and pickle raise anything
        reason = f"{type(error).__name__} while reading its values"
    else:
        return
    raise UserError(
        f"{path} is damaged, or not a checkpoint written by train.py: {' '.join(reason.split())}. "
        f"Use another, or train one: {script_command('train.py')}"
    )


def _check_container(file: BinaryIO) -> None:
    """Requires exactly one end-of-central-directory record, at the end, so that all zip readers find the same entries.

    https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT, 4.3.14 to 4.3.16: a record of 22 bytes, preceded in
    zip64 by a record of 56 bytes and its locator of 20 bytes.
    """
    file_size = file.seek(0, 2)
    file.seek(max(0, file_size - 98))
    tail = file.read().rjust(98, b"\0")
    signature, _, _, size, offset, comment = struct.unpack("<4s4s4s2LH", tail[76:])
    directory_end = file_size - 22
    if tail[56:60] == b"PK\6\7":
        directory_end -= 76
        if struct.unpack("<Q", tail[64:72])[0] != directory_end or tail[:4] != b"PK\6\6":
            raise UnsafeCheckpoint("its zip archive has two end records")
        size, offset = struct.unpack("<2Q", tail[40:56])
    if signature != b"PK\5\6" or comment or offset + size != directory_end:
        raise UnsafeCheckpoint("there is data before or after its zip archive")


def _checked_sizes(archive: zipfile.ZipFile) -> dict[str, int]:
    """Checks the entries of the archive; returns the size of each tensor's data in bytes, by its key."""
    entries, sizes, folders = archive.infolist(), {}, set()
    for entry in entries:
        match = _ENTRY.fullmatch(entry.filename)
        if not match:
            raise UnsafeCheckpoint(f"it holds {short_repr(entry.filename)}")
        if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size or entry.flag_bits & 1:
            raise UnsafeCheckpoint(f"its entry {short_repr(entry.filename)} is compressed or encrypted")
        folders.add(match[1])
        if match[3]:
            sizes[match[3]] = entry.file_size
    if len(folders) != 1 or len({entry.filename for entry in entries}) != len(entries):
        raise UnsafeCheckpoint("it has duplicate entries")
    if sum(entry.file_size for entry in entries) > archive.fp.seek(0, 2):
        raise UnsafeCheckpoint("its entries overlap")
    if (damaged := archive.testzip()) is not None:  # reads the whole file
        raise UnsafeCheckpoint(f"the checksum of its entry {short_repr(damaged)} does not match")
    return sizes


def _interpret_pickle(content: bytes, sizes: dict[str, int]) -> Any:
    """Interprets a pickle and returns what it builds, with stubs instead of tensors.

    Python's unpickler is not safe for this: it would hash any key, which takes forever for nested tuples with shared
    elements, and copy dictionaries as often as the file demands.
    """
    stack: list[Any] = []
    below: list[list[Any]] = []  # the stack at each mark
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
                stack.append(_find_global(*argument.split(" ")))
            case "BINPERSID":
                stack.append(_measure_data(*_of_type(stack.pop(), tuple), sizes))
            case "REDUCE":
                arguments = _of_type(stack.pop(), tuple)
                stack.append(_of_type(stack.pop(), _StubFunction).call(*arguments))
            case "BUILD":  # attributes: torch.save writes those of a state_dict; they are ignored
                state = stack.pop()
                if type(stack[-1]) is not OrderedDict:
                    raise UnsafeCheckpoint("its pickle sets attributes of a tensor")
                _of_type(state, dict)
            case "STOP":
                (value,) = stack
                return value
            case _:
                raise UnsafeCheckpoint(f"its pickle uses {opcode.name}")
    raise UnsafeCheckpoint("its pickle has no end")


def _of_type(value: Any, *types: type) -> Any:
    if type(value) not in types:
        raise UnsafeCheckpoint(f"its pickle has an unexpected {type(value).__name__}")
    return value


def check_expansion(root: Any, max_bytes: int) -> None:
    """Raises UnsafeCheckpoint if values are nested too deeply, or take more memory than `max_bytes`."""
    pending, num_bytes = [(root, 1)], 0
    while pending:
        value, depth = pending.pop()
        items = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
        if items and depth > MAX_DEPTH:
            raise UnsafeCheckpoint(f"its values are nested more than {MAX_DEPTH} levels deep")
        num_bytes += _bytes_of(value) + (sum(map(_bytes_of, value)) if isinstance(value, dict) else 0)
        if num_bytes + _VALUE_BYTES * (len(pending) + len(items)) > max_bytes:
            raise UnsafeCheckpoint("its values would take much more memory than the size of the file")
        pending += [(item, depth + 1) for item in items]


def _bytes_of(value: Any) -> int:
    """Approximate size in memory, without the items of a container."""
    if isinstance(value, _StubTensor):
        return _TENSOR_BYTES + value.num_bytes
    if isinstance(value, dict | list | tuple):
        return _CONTAINER_BYTES
    return _VALUE_BYTES + (len(value) if isinstance(value, str) else 0)


def _measure_data(kind: str, item_size: int, key: str, device: str, count: int, sizes: dict[str, int]) -> "_StubTensor":
    """Returns a stub of a tensor's storage, after checking that the file has as much data as the pickle says."""
    if kind != "storage" or type(item_size) is not int or type(count) is not int or type(key) is not str:
        raise UnsafeCheckpoint("its tensors have an unknown storage type")
    if key not in sizes:
        raise UnsafeCheckpoint("a tensor has no data in it")
    if count < 0 or count * item_size != sizes[key]:
        raise UnsafeCheckpoint(f"a tensor claims {short_repr(count)} numbers, but has {sizes[key]:,} bytes of data")
    return _StubTensor(count, item_size)


@dataclass(frozen=True)
class _StubTensor:
    """Stands for a tensor or its storage."""

    count: int
    item_size: int

    @property
    def num_bytes(self) -> int:
        return self.count * self.item_size


def _measure_tensor(
    data: _StubTensor, offset: int, shape: tuple, strides: tuple, grad: bool, hooks: dict
) -> _StubTensor:
    """Returns a stub of a tensor, after checking that it is no larger than its storage."""
    if type(data) is not _StubTensor or hooks or type(shape) is not tuple or type(strides) is not tuple:
        raise UnsafeCheckpoint("it has a tensor of an unknown type")
    if len(shape) > MAX_DIMENSIONS or not all(type(n) is int and 0 <= n < 1 << 63 for n in (offset, *shape, *strides)):
        raise UnsafeCheckpoint("it has a tensor of an unknown type")
    last = offset + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    if math.prod(shape) > data.count or (math.prod(shape) and last >= data.count):
        raise UnsafeCheckpoint(f"a tensor of shape {shape} is larger than its data")
    return _StubTensor(math.prod(shape), data.item_size)


def _measure_parameter(tensor: _StubTensor, grad: bool, hooks: dict) -> _StubTensor:
    if type(tensor) is not _StubTensor or hooks:
        raise UnsafeCheckpoint("it has a parameter of an unknown type")
    return tensor


@dataclass(frozen=True)
class _StubFunction:
    """Stands for a function that the pickle may call."""

    call: Callable[..., Any]


_ALLOWED_GLOBALS = {
    "collections.OrderedDict": _StubFunction(lambda: OrderedDict()),  # without arguments: its items follow
    "torch._utils._rebuild_tensor_v2": _StubFunction(_measure_tensor),
    "torch._utils._rebuild_parameter": _StubFunction(_measure_parameter),
    **{f"torch.{name}": number for name, number in _ITEM_SIZES.items()},
}


def _find_global(module: str, name: str) -> Any:
    """Returns the stub of an allowed global."""
    if f"{module}.{name}" not in _ALLOWED_GLOBALS:
        raise UnsafeCheckpoint(f"it refers to {short_repr(f'{module}.{name}')}, which is not a plain value")
    return _ALLOWED_GLOBALS[f"{module}.{name}"]
