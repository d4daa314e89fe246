"""Reads and writes checkpoint files: atomic writes, a checksum, and no code execution.

A file is the output of torch.save followed by a footer of 40 bytes: 8 magic bytes and the SHA-256 of everything before
it. torch.load ignores the footer. Files without a footer can be read too; a truncated one is not a valid archive.
"""

import hashlib
import io
from pathlib import Path
from typing import Any

import torch

from checkpoint.pickle_scan import check_safe
from system.checks import check
from system.errors import UserError
from system.files import atomic_write
from system.process import script_command

MAGIC = b"tinyGPT1"
FOOTER_BYTES = len(MAGIC) + hashlib.sha256().digest_size


def write_checkpoint(content: dict[str, Any], path: Path, previous: Path | None = None) -> None:
    """Writes a checkpoint atomically: at any moment either the old or the new file is complete.

    Args:
        previous: where to move an existing file. None: it is replaced.

    Raises:
        OSError: the file cannot be written. An existing file is unchanged.
    """
    buffer = io.BytesIO()
    torch.save(content, buffer)
    path.parent.mkdir(exist_ok=True)  # without parents, so that a deleted run directory is not created again
    with atomic_write(path, path.with_suffix(".tmp"), previous) as file:
        file.write(buffer.getbuffer())
        file.write(MAGIC + hashlib.sha256(buffer.getbuffer()).digest())


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Returns the content of a checkpoint, with tensors on the CPU. No file can run code: checkpoint/pickle_scan.py
    scans it first, and torch.load then uses weights_only=True.

    Raises UserError if the file is missing, damaged, or not a checkpoint.
    """
    if not path.is_file():
        raise UserError(f"There is no checkpoint {path}. Train one with: {script_command('train.py')}")
    try:
        data = path.read_bytes()
        footer, body = data[-FOOTER_BYTES:], memoryview(data)[:-FOOTER_BYTES]
        if footer.startswith(MAGIC) and footer != MAGIC + hashlib.sha256(body).digest():
            raise UserError(f"{path} is damaged: its checksum does not match. Use another checkpoint.")
        archive = body if footer.startswith(MAGIC) else data
        check_safe(path, io.BytesIO(archive))
        content = _to_plain(torch.load(io.BytesIO(archive), map_location="cpu", weights_only=True))
        check(content, {"gpt": dict, "state_dict": {str: torch.Tensor}}, "it")
    except (UserError, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001 -- a hostile file may make PyTorch raise anything
        raise UserError(
            f"{path} is damaged, or not a checkpoint written by train.py. Use another, or train one: "
            f"{script_command('train.py')}"
        ) from error
    return content


def _to_plain(value: Any) -> Any:
    """Copies values into plain Python containers, and makes tensors contiguous.

    An OrderedDict in a file may shadow its methods with attributes, and tensors may have overlapping strides.
    """
    if isinstance(value, dict):
        return {key: _to_plain(item) for key, item in dict.items(value)}
    if type(value) in (list, tuple):
        return type(value)(map(_to_plain, value))
    if isinstance(value, torch.Tensor):
        return value.detach().contiguous()
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise TypeError(f"a {type(value).__name__}")
