"""Is a checkpoint harmless? Looked at before PyTorch reads it, and without PyTorch.

torch.load(weights_only=True) runs no code by design, but its reader has had holes (CVE-2025-32434; CVE-2026-24747).
So a file gets there only if it is what torch.save writes for plain values and tensors, and nothing else:

    a zip, its entries stored as they are, with torch.save's names, each with the checksum it says
    a pickle in it that makes dicts, lists, numbers, texts and tensors
    tensors no larger than the bytes there are for them
"""

import math
import pickle
import pickletools
import re
import struct
import zipfile
from collections import OrderedDict
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

from system.errors import UserError

_ENTRY = re.compile(
    r"([^/\\]+)/(data\.pkl|data/(\d+)|byteorder|version|\.format_version|\.storage_alignment|\.data/serialization_id)",
    re.ASCII,
)
_OPCODES = frozenset(
    (
        *("PROTO", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
        *("BINUNICODE", "EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "APPEND", "APPENDS", "SETITEM", "SETITEMS"),
        *("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET"),
        *("GLOBAL", "REDUCE", "BUILD", "BINPERSID"),
    )
)
_BYTES_A_NUMBER = {
    **{"DoubleStorage": 8, "FloatStorage": 4, "HalfStorage": 2, "BFloat16Storage": 2, "BoolStorage": 1},
    **{"LongStorage": 8, "IntStorage": 4, "ShortStorage": 2, "CharStorage": 1, "ByteStorage": 1},
}


class Refused(Exception):
    """Not what torch.save writes for plain values; args[0] says why."""


def refuse_unsafe(path: Path, file: BinaryIO) -> None:
    """Raises UserError for a file that is damaged, or that holds more than plain values and tensors.

    Args:
        path: its name, for the message.
        file: what PyTorch is going to read, from its start to its end.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            _refuse_other_ends(file)
            sizes = _checked_sizes(archive)
            content = archive.read(next(name for name in archive.namelist() if name.endswith("/data.pkl")))
        _refuse_other_opcodes(content)
        _Dry(content, sizes).load()
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


def _refuse_other_ends(file: BinaryIO) -> None:
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
            raise Refused(f"it holds {entry.filename[:80]!r}")
        if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size or entry.flag_bits & 1:
            raise Refused(f"{entry.filename!r} in it is packed")
        folders.add(match[1])
        if match[3]:
            sizes[match[3]] = entry.file_size
    if len(folders) != 1 or len({entry.filename for entry in entries}) != len(entries):
        raise Refused("an entry occurs twice")
    if sum(entry.file_size for entry in entries) > archive.fp.seek(0, 2):
        raise Refused("its entries overlap")
    if (damaged := archive.testzip()) is not None:  # reads all of it
        raise Refused(f"the checksum of {damaged!r} in it is another")
    return sizes


def _refuse_other_opcodes(content: bytes) -> None:
    """Looks at each instruction without following it."""
    for opcode, argument, _ in pickletools.genops(content):
        if opcode.name not in _OPCODES:
            raise Refused(f"its pickle uses {opcode.name}")
        if opcode.name == "LONG_BINPUT" and argument > len(content):  # would reserve memory for as many
            raise Refused("its pickle counts beyond its own length")


class _Dry(pickle.Unpickler):
    """Follows the pickle with nothing real: tensors and their data are only measured."""

    def __init__(self, content: bytes, sizes: dict[str, int]):
        super().__init__(BytesIO(content))
        self.sizes = sizes

    def find_class(self, module: str, name: str) -> Any:
        """What stands for the few names that may occur."""
        known = {
            "collections.OrderedDict": OrderedDict,
            "torch._utils._rebuild_tensor_v2": _measure_tensor,
            "torch._utils._rebuild_parameter": _measure_parameter,
        }
        if module == "torch" and name in _BYTES_A_NUMBER:
            return _BYTES_A_NUMBER[name]
        if f"{module}.{name}" not in known:
            raise Refused(f"it asks for {f'{module}.{name}'[:80]!r}, which is no plain value")
        return known[f"{module}.{name}"]

    def persistent_load(self, pid: Any) -> "_Inert":
        """A tensor's data: as many numbers as the pickle says, if that is what the file has."""
        kind, bytes_a_number, key, _, count = pid
        if kind != "storage" or type(bytes_a_number) is not int or type(count) is not int:
            raise Refused("its tensors have data of an unknown kind")
        if key not in self.sizes:
            raise Refused("a tensor's data are not in it")
        if count < 0 or count * bytes_a_number != self.sizes[key]:
            raise Refused(f"a tensor claims {count:,} numbers, the file has {self.sizes[key]:,} bytes of them")
        return _Inert(count)


class _Inert:
    """Stands for a tensor or its data. Nothing can be put into it."""

    __slots__ = ("count",)

    def __init__(self, count: int):
        self.count = count

    def __setstate__(self, state: Any) -> None:
        raise Refused("its pickle changes a tensor")


def _measure_tensor(data: _Inert, offset: int, shape: tuple, strides: tuple, grad: bool, hooks: dict) -> _Inert:
    if type(data) is not _Inert or hooks or not all(type(n) is int and n >= 0 for n in (offset, *shape, *strides)):
        raise Refused("it has a tensor of an unknown kind")
    last = offset + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    if math.prod(shape) > data.count or (math.prod(shape) and last >= data.count):
        raise Refused(f"a tensor of shape {shape} is larger than its data")
    return _Inert(math.prod(shape))


def _measure_parameter(tensor: _Inert, grad: bool, hooks: dict) -> _Inert:
    if type(tensor) is not _Inert or hooks:
        raise Refused("it has a parameter of an unknown kind")
    return tensor
