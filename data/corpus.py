"""Text files -> one text -> a contiguous training and validation split, in bounded memory at any size.

Nothing here ever holds the corpus: a split is a list of byte ranges in files, read chunk by chunk.

    find_files("texts/")  ->  Corpus(files, val_fraction=0.1)  ->  .train, .val  ->  .read()
"""

import codecs
import glob
import hashlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from data.text_files import BINARY, LeftOut, files_below, files_of_glob
from system.errors import UserError

logger = logging.getLogger(__name__)

SHAKESPEARE = Path(__file__).parent / "shakespeare.txt"


def find_files(corpus: str | None = None) -> list[Path]:
    """Files that `data.corpus` names: None or "shakespeare" (the embedded text), a file, a folder or a glob.

    A folder stands for every text file below it, in sorted order. Hidden files are left out, and with a warning binary
    ones, further names of one file, and what runs wrote. Raises UserError when that leaves nothing, or when a file
    cannot be read.
    """
    if corpus is None or corpus == "shakespeare":
        return [SHAKESPEARE]
    try:
        path = Path(corpus).expanduser()
    except RuntimeError as error:  # ~name of nobody here
        raise UserError(f"data.corpus {corpus!r}: {error} Give the whole path.") from None
    try:
        if path.is_file():
            return [_text_file(path)]
        left_out = LeftOut()
        found = _candidates(path, left_out)
        binary = [file for file in found if _is_binary(file)]
    except OSError as error:
        raise _unreadable(error.filename or path, error) from None
    left_out.add(BINARY, *binary)
    if left_out:
        _warn(f"data.corpus {corpus!r}: left out {left_out}")
    text = sorted(set(found) - set(binary))
    if not text:
        raise UserError(f"data.corpus {corpus!r} holds no text file. Give a text file, a folder or a glob.")
    return text


@cache  # once, however often the files are looked for
def _warn(message: str) -> None:
    logger.warning("%s", message)


def _text_file(file: Path) -> Path:
    if _is_binary(file):
        raise UserError(f"{file} is no UTF-8 text: it has NUL bytes. Convert it, e.g. with iconv, or give another.")
    return file


def _candidates(path: Path, left_out: LeftOut) -> list[Path]:
    if path.is_dir():
        return files_below(path, left_out)
    if glob.has_magic(str(path)):
        return files_of_glob(path, left_out)
    wrong = "is no regular file" if path.exists() else "does not exist"  # a device or a pipe can be read once only
    raise UserError(f"data.corpus {str(path)!r} {wrong}. Give a text file, a folder or a glob.")


def _is_binary(file: Path) -> bool:
    """Whether the first 8 KiB hold a NUL byte, which text never does."""
    return b"\0" in _start_of(file)


def _start_of(file: Path) -> bytes:
    with file.open("rb") as f:
        return f.read(8192)


@dataclass(frozen=True)
class FileSpan:
    """Bytes `start:end` of a file, then one newline if `newline`: so that two files never share a line."""

    file: Path
    start: int
    end: int
    newline: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes of text, the newline included."""
        return self.end - self.start + self.newline

    def cut(self, at: int) -> tuple["FileSpan", "FileSpan"]:
        """The first `at` bytes, 0 <= at <= num_bytes, and the rest."""
        middle = min(self.start + at, self.end)
        newline_left = self.newline and at == self.num_bytes
        return (
            FileSpan(self.file, self.start, middle, newline_left),
            FileSpan(self.file, middle, self.end, self.newline and not newline_left),
        )


class Split:
    """One side of the corpus: `num_bytes` of UTF-8 text, readable again and again."""

    def __init__(self, name: str, parts: list[FileSpan]):
        self.name = name  # "training" or "validation", for messages
        self.parts = [part for part in parts if part.num_bytes]
        self.num_bytes = sum(part.num_bytes for part in self.parts)

    def read(self, chunk_bytes: int = 1 << 20) -> Iterator[str]:
        """The text in order, at most `chunk_bytes` bytes (and a character's rest) at a time.

        Raises UserError naming file and byte offset where the text is not UTF-8.
        """
        for part in self.parts:
            yield from _read_part(part, chunk_bytes)

    @cached_property
    def sha256(self) -> str:
        """Hash of the text: what caches are named after. The first use reads the whole split."""
        digest = hashlib.sha256()
        for text in self.read():
            digest.update(text.encode())
        return digest.hexdigest()


class Corpus:
    """Files joined into one text and cut in two: the first `1 - val_fraction` of the bytes trains.

    The cut moves on to the next character. Raises UserError for a fraction outside (0, 1), a file that cannot
    be read, and a text too short to give both splits something.
    """

    def __init__(self, files: list[Path], val_fraction: float):
        if not 0 < val_fraction < 1:
            raise UserError(f"data.val_fraction is {val_fraction}; it must lie between 0 and 1, e.g. 0.1.")
        self.files = files
        parts = _join(files)
        self.num_empty = len(files) - len(parts)
        self.num_bytes = sum(part.num_bytes for part in parts)
        where = str(files[0]) if len(files) == 1 else f"{files[0]} and {len(files) - 1} more"
        if self.num_bytes == 0:
            raise UserError(f"No text in {where}: the file is empty. Point data.corpus at a text.")
        train, val = _cut(parts, round(self.num_bytes * (1 - val_fraction)))
        self.train = Split("training", train)
        self.val = Split("validation", val)
        for split in (self.train, self.val):
            if split.num_bytes == 0:
                raise UserError(
                    f"The {self.num_bytes} bytes of {where} leave none for the {split.name} split at "
                    f"data.val_fraction={val_fraction}. Use a longer text or another fraction."
                )

    def describe_files(self) -> str:
        """Name or number of the files; how many are empty; in how many a line ends as on Windows, by their start."""
        try:
            crlf = sum(b"\r\n" in _start_of(file) for file in self.files)
        except OSError as error:
            raise _unreadable(error.filename or self.files[0], error) from None
        if len(self.files) == 1:
            return self.files[0].name + (" (CRLF line ends, kept)" if crlf else "")
        notes = [f"{self.num_empty:,} empty"] if self.num_empty else []
        notes += [f"{crlf:,} with CRLF line ends, kept"] if crlf else []
        return f"{len(self.files):,} files" + (f" ({', '.join(notes)})" if notes else "")


def _join(files: list[Path]) -> list[FileSpan]:
    """One part a file: without its byte-order mark, ended by a newline unless it is the last."""
    parts = []
    for file in files:
        try:
            with file.open("rb") as f:
                start = len(codecs.BOM_UTF8) if f.read(3) == codecs.BOM_UTF8 else 0
                end = f.seek(0, 2)
                f.seek(max(start, end - 1))
                newline = end > start and f.read(1) != b"\n"
        except OSError as error:
            raise _unreadable(file, error) from None
        parts.append(FileSpan(file, start, end, newline))
    nonempty = [part for part in parts if part.num_bytes]
    if nonempty:
        last = nonempty[-1]
        nonempty[-1] = FileSpan(last.file, last.start, last.end)
    return nonempty


def _cut(parts: list[FileSpan], at: int) -> tuple[list[FileSpan], list[FileSpan]]:
    """Parts before and after byte `at`, or after the end of the character that `at` falls into."""
    before = 0
    for i, part in enumerate(parts):
        if at < before + part.num_bytes:
            inside = at - before
            try:
                with part.file.open("rb") as f:
                    f.seek(part.start + inside)
                    following = f.read(min(3, max(0, part.end - part.start - inside)))
            except OSError as error:
                raise _unreadable(part.file, error) from None
            # Bytes 10xxxxxx go on with a character; UTF-8 has at most three of them in a row.
            inside += len(following) - len(following.lstrip(bytes(range(0x80, 0xC0))))
            left, right = part.cut(inside)
            return [*parts[:i], left], [right, *parts[i + 1 :]]
        before += part.num_bytes
    return parts, []


def _read_part(part: FileSpan, chunk_bytes: int) -> Iterator[str]:
    position, pending = part.start, b""  # `pending`: the first bytes of a character the last chunk cut
    try:
        with part.file.open("rb") as f:
            f.seek(part.start)
            while position < part.end:
                block = pending + f.read(min(chunk_bytes, part.end - position - len(pending)))
                complete = position + len(block) == part.end
                if len(block) == len(pending):
                    raise UserError(f"{part.file} became shorter while it was read. Start again.")
                text, used = codecs.utf_8_decode(block, "strict", complete)
                position, pending = position + used, block[used:]
                if text:
                    yield text
    except UnicodeDecodeError as error:
        raise UserError(
            f"{part.file} is not UTF-8 text: byte 0x{error.object[error.start]:02x} at offset "
            f"{position + error.start}. Convert it, e.g. with iconv, or leave it out of data.corpus."
        ) from None
    except OSError as error:
        raise _unreadable(part.file, error) from None
    if part.newline:
        yield "\n"


def _unreadable(file: Path | str, error: OSError) -> UserError:
    return UserError(
        f"Cannot read {file}: {error.strerror or error}. Check that the file is there and its permissions, "
        "or leave it out of data.corpus."
    )
