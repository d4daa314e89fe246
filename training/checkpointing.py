"""The checkpoint files of a run: how they are written and read, and which of them stay.

best.ckpt        weights of the lowest validation loss
last.ckpt        everything a resumed run needs to end with the same weights; written between two optimizer steps
previous.ckpt    the last.ckpt before it, until the run is finished
"""

import logging
from pathlib import Path
from typing import Any

import tiktoken
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import __version__

from checkpoint.checkpoint import check_same_weights
from checkpoint.io import read_checkpoint, write_checkpoint
from model.gpt import GPT
from system.errors import UserError

logger = logging.getLogger(__name__)


class AtomicCheckpointIO(TorchCheckpointIO):
    """Reads and writes checkpoints for the Trainer. `storage_options`: where to keep the file that is replaced."""

    def __init__(self):
        super().__init__()
        self.restorable: tuple[Path, dict[str, Any]] | None = None
        """Path and content of a checkpoint that was read and checked before (training/run_state.py)."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str, storage_options: Path | None = None) -> None:
        """Writes the whole file or nothing."""
        write_checkpoint(checkpoint, Path(path), previous=storage_options)

    def load_checkpoint(self, path: str, *args, **kwargs) -> dict[str, Any]:
        """Returns the whole state for the checkpoint that the run resumes from, and only the weights for any other."""
        if self.restorable and self.restorable[0] == Path(path):
            (_, state), self.restorable = self.restorable, None
            return state
        return {"state_dict": read_checkpoint(Path(path))["state_dict"], "pytorch-lightning_version": __version__}


def remove_stale_checkpoints(
    directory: Path, resumed_from: Path | None, network: GPT, tokenizer: tiktoken.Encoding
) -> None:
    """Removes unfinished files of a killed run, and a last.ckpt that the run does not resume from.

    Args:
        network, tokenizer: of the run. A best.ckpt of another network or tokenizer is renamed.
    """
    for path in directory.glob("*.tmp"):
        path.unlink()
    last, best = directory / "last.ckpt", directory / "best.ckpt"
    if resumed_from != last:  # it is damaged, and would replace the previous.ckpt that is not
        last.unlink(missing_ok=True)
    try:
        if best.exists():
            check_same_weights(best, network, tokenizer)
    except UserError as error:
        aside = best.replace(best.with_suffix(".unusable"))
        logger.info(f"{error} It was renamed to {aside.name}; the best from here on is saved.")


def best_or_last(directory: Path) -> Path:
    """The best checkpoint; a copy of the last one if the best was damaged and no later one was better."""
    best = directory / "best.ckpt"
    if not best.exists():
        write_checkpoint(read_checkpoint(directory / "last.ckpt"), best)
    return best
