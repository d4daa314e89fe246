"""Checkpoint files: whole or not there, and any damage is noticed.

A file is what torch.save writes, and behind it a seal of 40 bytes: a mark and the SHA-256 of all before it. torch.load
takes no notice of it. A file without a seal is read too: cut off anywhere else, it is no archive any more.
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

MARK = b"tinyGPT1"
SEAL_BYTES = len(MARK) + hashlib.sha256().digest_size


def write_checkpoint(content: dict[str, Any], path: Path, previous: Path | None = None) -> None:
    """Puts the content at `path`; at every moment the old file or the new one is there, whole.

    Args:
        previous: where the old file goes; None: it is replaced.

    Raises:
        OSError: it cannot be written; the file before is as it was.
    """
    buffer = io.BytesIO()
    torch.save(content, buffer)
    path.parent.mkdir(exist_ok=True)  # not its parents: a run directory that was deleted stays so
    with atomic_write(path, path.with_suffix(".tmp"), previous) as file:
        file.write(buffer.getbuffer())
        file.write(MARK + hashlib.sha256(buffer.getbuffer()).digest())


def read_checkpoint(path: Path) -> dict[str, Any]:
    """The content of a checkpoint, on the CPU. checkpoint/pickle_scan.py looks at it first, and PyTorch then
    loads plain values and tensors alone, so no file can run code.

    Raises UserError: there is no such file, or it is damaged, or it is no checkpoint.
    """
    if not path.is_file():
        raise UserError(f"There is no checkpoint {path}. Train one with: python train.py")
    try:
        data = path.read_bytes()
        seal, body = data[-SEAL_BYTES:], memoryview(data)[:-SEAL_BYTES]
        if seal.startswith(MARK) and seal != MARK + hashlib.sha256(body).digest():
            raise UserError(f"{path} is damaged: its checksum is not that of its content. Use another checkpoint.")
        archive = body if seal.startswith(MARK) else data
        check_safe(path, io.BytesIO(archive))
        content = _plain(torch.load(io.BytesIO(archive), map_location="cpu", weights_only=True))
        check(content, {"gpt": dict, "state_dict": {str: torch.Tensor}}, "it")
    except (UserError, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001 -- a hostile file may make PyTorch raise anything
        raise UserError(
            f"{path} is no checkpoint written by train.py, or it is damaged. Use another, or train one: python train.py"
        ) from error
    return content


def _plain(value: Any) -> Any:
    """The same values in containers of Python's own, and each tensor in one piece.

    A file's OrderedDict may have attributes in place of its methods, its tensors places that overlap.
    """
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in dict.items(value)}
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    if isinstance(value, torch.Tensor):
        return value.detach().contiguous()
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise TypeError(f"a {type(value).__name__}")
