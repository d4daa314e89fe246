"""What a machine does to a run, in one line: a full disk, a directory that cannot be written, too little memory."""

import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from system.errors import UserError
from system.memory import is_out_of_memory
from training.config import RunConfig

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def explain_write_errors(run_dir: Path, how_to_go_on: str, kept: Callable[[], Any]) -> Iterator[None]:
    """Raises UserError where the run's files cannot be written.

    Args:
        how_to_go_on: the command that resumes the run.
        kept: whether the directory stays after an error, so that there is something to resume.
    """
    hook = threading.excepthook
    threading.excepthook = _silent_about_writing  # TensorBoard's thread: the main one hears of it at the next event
    try:
        yield
    except BrokenPipeError:  # of the screen
        raise
    except OSError as error:
        raise UserError(cannot_write(error, run_dir, how_to_go_on if kept() else None)) from error
    finally:
        threading.excepthook = hook


@contextmanager
def explain_out_of_memory(config: RunConfig) -> Iterator[None]:
    """Raises UserError where the memory is used up."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # torch.OutOfMemoryError is a RuntimeError
        if not is_out_of_memory(error):
            raise
        raise UserError(out_of_memory(config)) from error


def cannot_write(error: OSError, run_dir: Path, how_to_go_on: str | None) -> str:
    """What could not be written, why, and what to do.

    Args:
        how_to_go_on: the command that resumes the run; None: nothing of it is kept.
    """
    if not run_dir.is_dir():
        return f"{run_dir} is gone: it was deleted or moved while the run trained. Start the run again."
    failed = f"cannot write {os.fsdecode(error.filename or run_dir)}: {error.strerror or error}."
    fix = "Make room" if error.errno in _FULL else "Make it writable"
    if how_to_go_on is None:
        return f"{failed} Nothing was trained yet. {fix}, or choose another runs_dir, and start again."
    return f"{failed} Checkpoints written before are whole. {fix}, then resume with: {how_to_go_on}"


def out_of_memory(config: RunConfig) -> str:
    """What takes the memory, and what to lower."""
    return (
        f"out of memory with data.batch_size={config.data.batch_size} and model.context_length="
        f"{config.model.context_length}. Lower data.batch_size (trainer.accumulate_grad_batches=2 with half of it "
        "learns the same), model.context_length, or the network: model.num_layers, model.d_model."
    )


def _silent_about_writing(failure: threading.ExceptHookArgs) -> None:
    if not issubclass(failure.exc_type, OSError):
        threading.__excepthook__(failure)
