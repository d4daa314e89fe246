"""TensorBoard's events of a run that goes on: back to the step of its checkpoint, so that no curve doubles."""

from collections.abc import Iterator
from pathlib import Path

from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.summary.writer.record_writer import RecordWriter

from system.files import written_whole

# Sorts before every file that a writer names after the time, even if the clock went backwards.
EARLIER = "events.out.tfevents.0000000000.earlier"
LOGGED_ONCE = ("_hparams_/", "final/", "by_context_length/")  # written anew by the run that goes on


def rewind_events(run_dir: Path, step: int) -> None:
    """Takes out what was logged after `step`, and what a run logs once; the rest is then in one file.

    A kill in the middle costs nothing: events that are there twice are dropped the next time.
    """
    files = sorted(run_dir.glob("events.out.tfevents.*"))
    if not files:
        return
    with written_whole(run_dir / EARLIER, run_dir / "events.tmp") as file:  # a name that TensorBoard does not look for
        writer = RecordWriter(file)
        for event in _kept(files, step):
            writer.write(event.SerializeToString())
    for old in files:
        if old.name != EARLIER:
            old.unlink()


def _kept(files: list[Path], step: int) -> Iterator[Event]:
    """The first event says which format follows; of the others those up to `step`, each tag's steps growing."""
    latest: dict[str, int] = {}
    first = True
    for file in files:
        for record in RawEventFileLoader(str(file)).Load():  # a record that a kill cut off ends the file
            event = Event.FromString(record)
            if event.HasField("file_version"):
                if first:
                    yield event
                first = False
                continue
            tags = [value.tag for value in event.summary.value]
            once = any(tag.startswith(LOGGED_ONCE) for tag in tags)
            if not tags or once or event.step > step or any(event.step <= latest.get(tag, -1) for tag in tags):
                continue
            latest.update(dict.fromkeys(tags, event.step))
            yield event
