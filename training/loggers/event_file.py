"""Rewinds the TensorBoard events of a resumed run to the step of its checkpoint, so that no point is there twice.

A TensorBoard that is already open shows the result, too. It reads event files in the order of their names, and when it
reads a second START event, it discards what it has read of the run. Therefore the remaining events go into a new file
that starts with two START events, and the file that TensorBoard has open is kept, empty, until the next rewind.
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
LOGGED_ONCE = ("_hparams_/", "final/")  # the resumed run logs them again
HEADER_BYTES, FOOTER_BYTES = 12, 4  # length and its checksum; checksum of the data
MAX_RECORD_BYTES = 1 << 31  # limit of protocol buffers


def rewind_events(run_dir: Path, step: int) -> None:
    """Removes events after `step`, and those that a run logs only once.

    It may be interrupted: events that are there twice are dropped the next time. Of a damaged file, all readable events
    are kept, before and after the damage; the file itself is renamed so that TensorBoard ignores it.
    """
    files = sorted(run_dir.glob(f"{PREFIX}*"))
    if not files:
        return
    damaged: dict[Path, int] = {}  # file -> number of damaged places
    new = run_dir / _name_after(files[-1].name)
    with atomic_write(new, run_dir / "events.tmp") as file:  # a name that TensorBoard ignores
        writer = RecordWriter(file)
        for record in _rewound(files, step, damaged):
            writer.write(record)
    for old in files:
        if old in damaged:
            keep = run_dir / f"damaged.{old.name.replace('tfevents', 'events')}"
            os.replace(old, keep)
            places = "one place" if damaged[old] == 1 else f"{damaged[old]} places"
            logger.info("%s is damaged in %s: readable events are kept; it is now %s", old, places, keep.name)
        if old == files[-1] and old.name < new.name:
            old.write_bytes(b"")
        elif old != new:
            old.unlink(missing_ok=True)


def _name_after(newest: str) -> str:
    """A name that sorts after the newest file and before files created from now on, as their names have the time.

    If the clock was set back, it sorts only before those.
    """
    if newest.startswith(f"{PREFIX}{int(time.time()):010d}"):
        time.sleep(1)  # names of the same second do not sort by age
    return f"{PREFIX}{int(time.time()):010d}.-resumed"  # "-" sorts before the host's name, which follows in others


def _rewound(files: list[Path], step: int, damaged: dict[Path, int]) -> Iterator[bytes]:
    """Yields the records of the new file: version, two START events, and events up to `step`, growing steps per tag.

    Args:
        damaged: receives the number of damaged places of each damaged file.
    """
    latest: dict[str, int] = {}
    started = False
    for file in files:
        for record in _records(file):
            try:
                event = Event.FromString(record) if record is not None else None
            except DecodeError:
                event = None
            if event is None:
                damaged[file] = damaged.get(file, 0) + 1
                continue
            if not started:
                yield from _start(event.wall_time)
                started = True
            tags = [value.tag for value in event.summary.value]
            once = any(tag.startswith(LOGGED_ONCE) for tag in tags)
            if not tags or once or event.step > step or any(event.step <= latest.get(tag, -1) for tag in tags):
                continue
            latest.update(dict.fromkeys(tags, event.step))
            yield record
    if not started:
        yield from _start(time.time())


def _start(wall_time: float) -> Iterator[bytes]:
    yield Event(wall_time=wall_time, file_version="brain.Event:2").SerializeToString()
    start = Event(wall_time=wall_time, step=0, session_log=SessionLog(status=SessionLog.START))
    yield from [start.SerializeToString()] * 2


def _records(file: Path) -> Iterator[bytes | None]:
    """Yields the records of a file, and None for each damaged place. An incomplete last record is ignored."""
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
    """Length of the data of the record at this offset; None if no record starts there."""
    header = content[at : at + HEADER_BYTES]
    if len(header) < HEADER_BYTES:
        return None
    size, checksum = struct.unpack("<QI", header)
    return size if size < MAX_RECORD_BYTES and checksum == masked_crc32c(header[:8]) else None


def _next_header(content: mmap.mmap, start: int) -> int | None:
    """Offset of the next record at or after `start`. It is found by the upper half of its length, which is zero."""
    while (zeros := content.find(b"\0\0\0\0", start + 4)) >= 0:
        at = zeros - 4
        if _size_at(content, at) is not None:
            return at
        start = at + 1
        if content[at : at + HEADER_BYTES] == bytes(HEADER_BYTES):  # a block of zeros that was never written
            something = re.compile(rb"[^\0]").search(content, at)
            start = max(start, something.start() - HEADER_BYTES) if something else len(content)
    return None
