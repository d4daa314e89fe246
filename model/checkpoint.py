"""What a checkpoint holds, and how a network comes back out of one.

A checkpoint is a dictionary of plain values and tensors: Lightning's own entries, and under the key
`gpt` all it takes to write text: {"model": GPTConfig's fields, "tokenizer": the merges, "step",
"validation": {"nats_per_token", "bits_per_byte"}}. model/checkpoint_check.py looks at it first, and then it loads
with weights_only=True, so no file can run code. model/safe_weights.py has the other way to keep a network.
"""

import pickle
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tiktoken
import torch

from configs.errors import UserError
from data.tokenizer import from_plain, to_plain
from model.checkpoint_check import refuse_unsafe
from model.config import GPTConfig
from model.gpt import GPT
from model.memory import least_weights
from model.safe_weights import SUFFIX, read_safetensors, write_safetensors

MAX_ROPE_NUMBERS = 1 << 25  # a million positions of 32: the one part that no weights bound
NETWORK_PREFIX = "network."  # GPTLightning keeps the GPT under this name


@dataclass(frozen=True)
class Checkpoint:
    """A trained network, ready to write."""

    path: Path
    network: GPT
    tokenizer: tiktoken.Encoding
    step: int
    validation: dict[str, float]

    def describe(self) -> str:
        """One line: what was loaded."""
        loss = self.validation
        return (
            f"{self.path}: step {self.step:,}, {self.network.num_parameters():,} parameters, "
            f"context {self.network.config.context_length}, tokenizer {self.tokenizer.name} "
            f"({self.tokenizer.n_vocab:,} tokens), validation {loss['nats_per_token']:.3f} nats per token, "
            f"{loss['bits_per_byte']:.3f} bits per byte"
        )

    def export(self, path: Path) -> None:
        """Writes the network and what it takes to sample from it as safetensors. Raises UserError."""
        entry = gpt_entry(self.network.config, self.tokenizer, self.step, self.validation)
        write_safetensors(path, entry, self.network.state_dict())


def gpt_entry(config: GPTConfig, tokenizer: tiktoken.Encoding, step: int, validation: dict[str, float]) -> dict:
    """The `gpt` entry of a checkpoint."""
    return {"model": asdict(config), "tokenizer": to_plain(tokenizer), "step": step, "validation": validation}


def record_validation(path: Path, validation: dict[str, float]) -> None:
    """Replaces the validation figures in a checkpoint, by those over the whole split."""
    content = torch.load(path, map_location="cpu", weights_only=True)
    content["gpt"]["validation"] = validation
    temporary = path.with_suffix(".tmp")
    torch.save(content, temporary)
    temporary.replace(path)


def load_checkpoint(path: Path, device: str | torch.device = "cpu") -> Checkpoint:
    """Builds the network and the tokenizer a checkpoint describes, and fills in its weights, strictly.

    Raises:
        UserError: no such file, not a checkpoint of this project, or weights that do not fit.
    """
    entry, weights = read_safetensors(path) if path.suffix == SUFFIX else _read(path)
    try:
        config = GPTConfig(**entry["model"])
        _refuse_larger(config, weights)
        network = GPT(config)
        network.load_state_dict(weights)
        tokenizer, validation = from_plain(entry["tokenizer"]), {k: float(v) for k, v in entry["validation"].items()}
        if tokenizer.n_vocab != network.config.vocab_size:
            raise ValueError(f"{tokenizer.n_vocab} tokens, but a network for {network.config.vocab_size}")
        checkpoint = Checkpoint(path, network.to(device).eval(), tokenizer, int(entry["step"]), validation)
        checkpoint.describe()  # which needs all of it
    except (UserError, AttributeError, KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"{path} does not fit this version of the project ({reason}). Train again, or use another."
        ) from error
    return checkpoint


def _refuse_larger(config: GPTConfig, weights: dict[str, torch.Tensor]) -> None:
    """Before a network takes memory: raises ValueError where its config asks for more than the weights there are."""
    there = sum(tensor.numel() for tensor in weights.values())
    if least_weights(config) > there or config.context_length * config.head_dim > MAX_ROPE_NUMBERS:
        raise ValueError(f"it describes a network of {least_weights(config):,} weights, but has {there:,}")


def _read(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    if not path.is_file():
        raise UserError(f"There is no checkpoint {path}. Train one with: python train.py")
    try:
        with path.open("rb") as file:
            refuse_unsafe(path, file)
            file.seek(0)
            content = torch.load(file, map_location="cpu", weights_only=True)
        if not isinstance(content, dict):
            raise TypeError("no dictionary")
        entry = content["gpt"]
        weights = {
            name.removeprefix(NETWORK_PREFIX): tensor
            for name, tensor in content["state_dict"].items()
            if name.startswith(NETWORK_PREFIX)
        }
    except (pickle.UnpicklingError, RuntimeError, OSError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"{path} is no checkpoint written by train.py, or it is damaged. Use another, or train one: python train.py"
        ) from error
    return entry, weights


def find_checkpoint(choice: str | None, runs_dir: str) -> Path:
    """The checkpoint to use: a .ckpt or .safetensors file, a run directory's best, or the newest run's best.

    Raises UserError where there is none.
    """
    if choice is not None:
        path = Path(choice)
        return path / "checkpoints" / "best.ckpt" if path.is_dir() else path
    found = sorted(Path(runs_dir).glob("**/checkpoints/best.ckpt"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise UserError(f"There is no trained run below {runs_dir!r} yet. Train one with: python train.py")
    return found[-1]
