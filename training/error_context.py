"""One-line errors for a full disk, a directory that cannot be written, and too little memory."""

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
def explain_write_errors(run_dir: Path, resume_command: str, can_resume: Callable[[], Any]) -> Iterator[None]:
    """Raises UserError if the files of a run cannot be written.

    Args:
        can_resume: whether the run has something that can be resumed.
    """
    hook = threading.excepthook
    threading.excepthook = _ignore_write_errors  # of TensorBoard's thread: the next event raises them in the main one
    try:
        yield
    except BrokenPipeError:  # of standard output
        raise
    except OSError as error:
        raise UserError(cannot_write(error, run_dir, resume_command if can_resume() else None)) from error
    finally:
        threading.excepthook = hook


@contextmanager
def explain_out_of_memory(config: RunConfig) -> Iterator[None]:
    """Raises UserError if memory runs out."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # torch.OutOfMemoryError is a RuntimeError
        if not is_out_of_memory(error):
            raise
        raise UserError(out_of_memory(config)) from error


def cannot_write(error: OSError, run_dir: Path, resume_command: str | None) -> str:
    """Message: what could not be written, why, and how to fix it.

    Args:
        resume_command: None if there is nothing to resume.
    """
    if not run_dir.is_dir():
        return f"{run_dir} was deleted or moved during training. Start the run again."
    failed = f"cannot write {os.fsdecode(error.filename or run_dir)}: {error.strerror or error}."
    fix = "Make room" if error.errno in _FULL else "Make it writable"
    if resume_command is None:
        return f"{failed} Nothing was trained yet. {fix} or choose another runs_dir, then start again."
    return f"{failed} Earlier checkpoints are complete. {fix}, then resume with: {resume_command}"


def out_of_memory(config: RunConfig) -> str:
    """Message: what needs the memory, and what to lower."""
    return (
        f"out of memory with data.batch_size={config.data.batch_size} and model.context_length="
        f"{config.model.context_length}. Lower data.batch_size (trainer.accumulate_grad_batches=2 with half of it "
        "learns the same), model.context_length, or the network: model.num_layers, model.d_model."
    )


def _ignore_write_errors(failure: threading.ExceptHookArgs) -> None:
    if not issubclass(failure.exc_type, OSError):
        threading.__excepthook__(failure)
