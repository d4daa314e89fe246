"""TensorBoard's events of a run that is resumed: back to the step of its checkpoint, so that no curve doubles.

A TensorBoard that is open meanwhile follows. It reads one file after the other in the order of their names, and at the
second event that says START it forgets what it has read of the run. So what is kept goes into a new file behind two of
those, and the file that TensorBoard has open stays until the next time, empty.
"""

import logging
import mmap
import os
import re
import struct
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from google.protobuf.message import DecodeError
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c
from tensorboard.summary.writer.record_writer import RecordWriter

from system.files import atomic_write

logger = logging.getLogger(__name__)

PREFIX = "events.out.tfevents."
LOGGED_ONCE = ("_hparams_/", "final/", "by_context_length/")  # written anew by the run that is resumed
HEADER_BYTES, FOOTER_BYTES = 12, 4  # length and its checksum; the data's checksum
MAX_RECORD_BYTES = 1 << 31  # of a protocol buffer


def rewind_events(run_dir: Path, step: int) -> None:
    """Takes out what was logged after `step`, and what a run logs once.

    A kill in the middle costs nothing: events that are there twice are dropped the next time. Of a damaged file, what
    can be read is kept, before and after the damage; the file itself stays too, under a name that TensorBoard ignores.
    """
    files = sorted(run_dir.glob(f"{PREFIX}*"))
    if not files:
        return
    damaged: dict[Path, int] = {}  # places
    new = run_dir / _name_after(files[-1].name)
    with atomic_write(new, run_dir / "events.tmp") as file:  # a name that TensorBoard does not look for
        writer = RecordWriter(file)
        for record in _rewound(files, step, damaged):
            writer.write(record)
    for old in files:
        if old in damaged:
            keep = run_dir / f"damaged.{old.name.replace('tfevents', 'events')}"
            os.replace(old, keep)
            places = "one place" if damaged[old] == 1 else f"{damaged[old]} places"
            logger.info("%s is damaged in %s: what can be read is kept; the old file is %s", old, places, keep.name)
        if old == files[-1] and old.name < new.name:
            old.write_bytes(b"")
        elif old != new:
            old.unlink(missing_ok=True)


def _name_after(newest: str) -> str:
    """A name that sorts after the newest file and before what a writer makes from now on: they have the time in it.

    Where the clock went backwards, it only sorts before what comes.
    """
    if newest.startswith(f"{PREFIX}{int(time.time()):010d}"):
        time.sleep(1)  # within a second, names do not sort by age
    return f"{PREFIX}{int(time.time()):010d}.-resumed"  # "-" sorts before the host's name, which follows in others


def _rewound(files: list[Path], step: int, damaged: dict[Path, int]) -> Iterator[bytes]:
    """The records of the new file: its version, two starts, and of the events those up to `step`, each tag's growing.

    Args:
        damaged: gets the number of damaged places of each file that has any.
    """
    latest: dict[str, int] = {}
    began = False
    for file in files:
        for record in _records(file):
            try:
                event = Event.FromString(record) if record is not None else None
            except DecodeError:
                event = None
            if event is None:
                damaged[file] = damaged.get(file, 0) + 1
                continue
            if not began:
                yield from _start(event.wall_time)
                began = True
            tags = [value.tag for value in event.summary.value]
            once = any(tag.startswith(LOGGED_ONCE) for tag in tags)
            if not tags or once or event.step > step or any(event.step <= latest.get(tag, -1) for tag in tags):
                continue
            latest.update(dict.fromkeys(tags, event.step))
            yield record
    if not began:
        yield from _start(time.time())


def _start(wall_time: float) -> Iterator[bytes]:
    yield Event(wall_time=wall_time, file_version="brain.Event:2").SerializeToString()
    start = Event(wall_time=wall_time, step=0, session_log=SessionLog(status=SessionLog.START))
    yield from [start.SerializeToString()] * 2


def _records(file: Path) -> Iterator[bytes | None]:
    """The records of a file in their order, None for each damaged place. One that a kill cut off ends the file."""
    with file.open("rb") as opened:
        if not os.fstat(opened.fileno()).st_size:
            return
        with closing(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)) as content:
            at = 0
            while at < len(content):
                size = _size_at(content, at)
                end = at + HEADER_BYTES + (size or 0) + FOOTER_BYTES
                if size is not None and end <= len(content):
                    data = content[at + HEADER_BYTES : end - FOOTER_BYTES]
                    (checksum,) = struct.unpack("<I", content[end - FOOTER_BYTES : end])
                    yield data if checksum == masked_crc32c(data) else None
                    at = end
                    continue
                following = _next_header(content, at + 1)
                cut_off = size is not None or len(content) - at < HEADER_BYTES
                if following is not None or not cut_off:
                    yield None
                if following is None:
                    return
                at = following


def _size_at(content: mmap.mmap, at: int) -> int | None:
    """Bytes of data in the record that begins there; None: none does."""
    header = content[at : at + HEADER_BYTES]
    if len(header) < HEADER_BYTES:
        return None
    size, checksum = struct.unpack("<QI", header)
    return size if size < MAX_RECORD_BYTES and checksum == masked_crc32c(header[:8]) else None


def _next_header(content: mmap.mmap, start: int) -> int | None:
    """Where the next record begins, at `start` or after it. The upper half of its length is four zeros."""
    while (zeros := content.find(b"\0\0\0\0", start + 4)) >= 0:
        at = zeros - 4
        if _size_at(content, at) is not None:
            return at
        start = at + 1
        if content[at : at + HEADER_BYTES] == bytes(HEADER_BYTES):  # nothing but zeros: a block that was never written
            something = re.compile(rb"[^\0]").search(content, at)
            start = max(start, something.start() - HEADER_BYTES) if something else len(content)
    return None
