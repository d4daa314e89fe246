"""Text files -> one corpus -> contiguous training and validation splits, in bounded memory.

The corpus is never held in memory: a split is a list of byte ranges in files, which are read in chunks.

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

from data.text_files import BINARY, SkippedFiles, files_below, files_of_glob
from system.errors import UserError

logger = logging.getLogger(__name__)

SHAKESPEARE = Path(__file__).parent / "shakespeare.txt"


def find_files(corpus: str | None = None) -> list[Path]:
    """Returns the files of `data.corpus`: None or "shakespeare" (the embedded text), a file, a folder or a glob.

    A folder stands for all text files below it, sorted. Hidden files are skipped silently; binary files, duplicates,
    run directories and cache files are skipped with a warning. Raises UserError if no file is left, or if one cannot be
    read.
    """
    if corpus is None or corpus == "shakespeare":
        return [SHAKESPEARE]
    try:
        path = Path(corpus).expanduser()
    except RuntimeError as error:  # ~name without a user of that name
        raise UserError(f"data.corpus {corpus!r}: {error} Give the full path.") from None
    try:
        if path.is_file():
            return [_text_file(path)]
        skipped = SkippedFiles()
        found = _candidates(path, skipped)
        binary = [file for file in found if _is_binary(file)]
    except OSError as error:
        raise _unreadable(error.filename or path, error) from None
    skipped.add(BINARY, *binary)
    if skipped:
        _warn_once(f"data.corpus {corpus!r}: skipped {skipped}")
    text = sorted(set(found) - set(binary))
    if not text:
        raise UserError(f"data.corpus {corpus!r} has no text file. Give a text file, a folder or a glob.")
    return text


@cache
def _warn_once(message: str) -> None:
    logger.warning("%s", message)


def _text_file(file: Path) -> Path:
    if _is_binary(file):
        raise UserError(f"{file} is not UTF-8 text: it has NUL bytes. Convert it, e.g. with iconv, or give another.")
    return file


def _candidates(path: Path, skipped: SkippedFiles) -> list[Path]:
    if path.is_dir():
        return files_below(path, skipped)
    if glob.has_magic(str(path)):
        return files_of_glob(path, skipped)
    reason = "is not a regular file" if path.exists() else "does not exist"  # a device or pipe can be read only once
    raise UserError(f"data.corpus {str(path)!r} {reason}. Give a text file, a folder or a glob.")


def _is_binary(file: Path) -> bool:
    """Whether the first 8 KiB contain a NUL byte, which text never does."""
    return b"\0" in _start_of(file)


def _start_of(file: Path) -> bytes:
    with file.open("rb") as f:
        return f.read(8192)


@dataclass(frozen=True)
class FileSpan:
    """Bytes `start:end` of a file, followed by a newline if `newline`, so that two files never share a line."""

    file: Path
    start: int
    end: int
    newline: bool = False

    @property
    def num_bytes(self) -> int:
        """Length in bytes, including the newline."""
        return self.end - self.start + self.newline

    def split_at(self, position: int) -> tuple["FileSpan", "FileSpan"]:
        """Returns the first `position` bytes and the rest, for 0 <= position <= num_bytes."""
        middle = min(self.start + position, self.end)
        newline_in_first = self.newline and position == self.num_bytes
        return (
            FileSpan(self.file, self.start, middle, newline_in_first),
            FileSpan(self.file, middle, self.end, self.newline and not newline_in_first),
        )


class Split:
    """The training or the validation part of a corpus: `num_bytes` of UTF-8 text."""

    def __init__(self, name: str, spans: list[FileSpan]):
        self.name = name  # "training" or "validation", for messages
        self.spans = [span for span in spans if span.num_bytes]
        self.num_bytes = sum(span.num_bytes for span in self.spans)

    def read(self, chunk_bytes: int = 1 << 20) -> Iterator[str]:
        """Yields the text in chunks of about `chunk_bytes`, split at characters.

        Raises UserError with the file and the byte offset if the text is not UTF-8.
        """
        for span in self.spans:
            yield from _read_span(span, chunk_bytes)

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of the text, for the names of cache files. The first use reads the whole split."""
        digest = hashlib.sha256()
        for text in self.read():
            digest.update(text.encode())
        return digest.hexdigest()


class Corpus:
    """Files joined into one text, of which the first `1 - val_fraction` is the training split.

    The boundary is moved to the end of a character. Raises UserError for a fraction outside (0, 1), a file that cannot
    be read, or a text too short for two splits.
    """

    def __init__(self, files: list[Path], val_fraction: float):
        if not 0 < val_fraction < 1:
            raise UserError(f"data.val_fraction is {val_fraction}; it must be between 0 and 1, such as 0.1.")
        self.files = files
        spans = _file_spans(files)
        self.num_empty = len(files) - len(spans)
        self.num_bytes = sum(span.num_bytes for span in spans)
        where = str(files[0]) if len(files) == 1 else f"{files[0]} and {len(files) - 1} more"
        if self.num_bytes == 0:
            raise UserError(f"No text in {where}: the file is empty. Point data.corpus at a text.")
        train, val = _split_at(spans, round(self.num_bytes * (1 - val_fraction)))
        self.train = Split("training", train)
        self.val = Split("validation", val)
        for split in (self.train, self.val):
            if split.num_bytes == 0:
                raise UserError(
                    f"The {self.num_bytes} bytes of {where} leave none for the {split.name} split at "
                    f"data.val_fraction={val_fraction}. Use a longer text or another fraction."
                )

    def describe_files(self) -> str:
        """Returns name or number of the files, and how many are empty or have CRLF line ends in their first 8 KiB."""
        try:
            crlf = sum(b"\r\n" in _start_of(file) for file in self.files)
        except OSError as error:
            raise _unreadable(error.filename or self.files[0], error) from None
        if len(self.files) == 1:
            return self.files[0].name + (" (CRLF line ends, kept)" if crlf else "")
        notes = [f"{self.num_empty:,} empty"] if self.num_empty else []
        notes += [f"{crlf:,} with CRLF line ends, kept"] if crlf else []
        return f"{len(self.files):,} files" + (f" ({', '.join(notes)})" if notes else "")


def _file_spans(files: list[Path]) -> list[FileSpan]:
    """Returns a span for each nonempty file, without its byte-order mark; all but the last end with a newline."""
    spans = []
    for file in files:
        try:
            with file.open("rb") as f:
                start = len(codecs.BOM_UTF8) if f.read(3) == codecs.BOM_UTF8 else 0
                end = f.seek(0, 2)
                f.seek(max(start, end - 1))
                newline = end > start and f.read(1) != b"\n"
        except OSError as error:
            raise _unreadable(file, error) from None
        spans.append(FileSpan(file, start, end, newline))
    nonempty = [span for span in spans if span.num_bytes]
    if nonempty:
        last = nonempty[-1]
        nonempty[-1] = FileSpan(last.file, last.start, last.end)
    return nonempty


def _split_at(spans: list[FileSpan], position: int) -> tuple[list[FileSpan], list[FileSpan]]:
    """Splits spans at a byte position, which is moved to the end of a character."""
    for i, span in enumerate(spans):
        if position < span.num_bytes:
            try:
                with span.file.open("rb") as f:
                    f.seek(span.start + position)
                    following = f.read(min(3, max(0, span.end - span.start - position)))
            except OSError as error:
                raise _unreadable(span.file, error) from None
            # Continuation bytes are 10xxxxxx; a UTF-8 character has at most three of them.
            position += len(following) - len(following.lstrip(bytes(range(0x80, 0xC0))))
            left, right = span.split_at(position)
            return [*spans[:i], left], [right, *spans[i + 1 :]]
        position -= span.num_bytes
    return spans, []


def _read_span(span: FileSpan, chunk_bytes: int) -> Iterator[str]:
    position, pending = span.start, b""  # `pending`: the start of a character that continues in the next chunk
    try:
        with span.file.open("rb") as f:
            f.seek(span.start)
            while position < span.end:
                block = pending + f.read(min(chunk_bytes, span.end - position - len(pending)))
                complete = position + len(block) == span.end
                if len(block) == len(pending):
                    raise UserError(f"{span.file} became shorter while it was read. Start again.")
                text, used = codecs.utf_8_decode(block, "strict", complete)
                position, pending = position + used, block[used:]
                if text:
                    yield text
    except UnicodeDecodeError as error:
        raise UserError(
            f"{span.file} is not UTF-8 text: byte 0x{error.object[error.start]:02x} at offset "
            f"{position + error.start}. Convert it, e.g. with iconv, or remove it from data.corpus."
        ) from None
    except OSError as error:
        raise _unreadable(span.file, error) from None
    if span.newline:
        yield "\n"


def _unreadable(file: Path | str, error: OSError) -> UserError:
    return UserError(
        f"Cannot read {file}: {error.strerror or error}. Check that it exists and its permissions, "
        "or remove it from data.corpus."
    )
