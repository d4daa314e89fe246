"""What a machine does to a run, in one line: a full disk, a directory that cannot be written, too little memory."""

import errno
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from omegaconf import DictConfig

from system.errors import UserError

_NO_MEMORY = re.compile(r"can't allocate memory|not enough memory|out of memory|bad allocation|bad_alloc", re.I)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def writing_explained(run_dir: Path, how_to_go_on: str) -> Iterator[None]:
    """Raises UserError where the run's files cannot be written.

    Args:
        how_to_go_on: the command that resumes the run.
    """
    hook = threading.excepthook
    threading.excepthook = _silent_about_writing  # TensorBoard's thread: the main one hears of it at the next event
    try:
        yield
    except BrokenPipeError:  # of the screen
        raise
    except OSError as error:
        raise UserError(cannot_write(error, run_dir, how_to_go_on)) from error
    finally:
        threading.excepthook = hook


@contextmanager
def memory_explained(config: DictConfig) -> Iterator[None]:
    """Raises UserError where the memory is used up."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # torch.OutOfMemoryError is a RuntimeError
        if not is_out_of_memory(error):
            raise
        raise UserError(out_of_memory(config)) from error


def cannot_write(error: OSError, run_dir: Path, how_to_go_on: str) -> str:
    """What could not be written, why, and what to do."""
    mend = "Make room" if error.errno in _FULL else "Make it writable"
    return (
        f"cannot write {error.filename or run_dir}: {error.strerror or error}. Checkpoints written before are whole. "
        f"{mend}, then go on with: {how_to_go_on}"
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device or the system had no memory left."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or bool(_NO_MEMORY.search(str(error)))


def out_of_memory(config: DictConfig) -> str:
    """What takes the memory, and what to lower."""
    return (
        f"out of memory with data.batch_size={config.data.batch_size} and model.context_length="
        f"{config.model.context_length}. Lower data.batch_size (trainer.accumulate_grad_batches=2 with half of it "
        "learns the same), model.context_length, or the network: model.num_layers, model.d_model."
    )


def _silent_about_writing(failure: threading.ExceptHookArgs) -> None:
    if not issubclass(failure.exc_type, OSError):
        threading.__excepthook__(failure)
