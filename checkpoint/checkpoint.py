"""What a checkpoint holds, and how a network comes back out of one.

A checkpoint is a dictionary of plain values and tensors: Lightning's own entries, and under the key
`gpt` all it takes to write text: {"format", "model": GPTConfig's fields, "tokenizer": the merges, "step",
"validation": {"nats_per_token", "bits_per_byte", "tokens"}}. How it lies on the disk, and why reading it runs no code,
is in checkpoint/io.py; the other way to keep a network in checkpoint/safetensors_io.py.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tiktoken
import torch

from checkpoint.io import read_checkpoint, write_checkpoint
from checkpoint.safetensors_io import SUFFIX, read_safetensors, write_safetensors
from data.tokenizer import from_plain, to_plain
from model.config import GPTConfig
from model.flops import least_weights
from model.gpt import GPT
from system.errors import UserError

MAX_ROPE_NUMBERS = 1 << 25  # a million positions of 32: the one part that no weights bound
FORMAT = 1  # of the `gpt` entry; raised when an older version of the project could not read it
NETWORK_PREFIX = "network."  # GPTLightning keeps the GPT under this name
# What building a network may raise from values that this version of the project did not write.
_UNFIT = (UserError, AttributeError, KeyError, TypeError, ValueError, RuntimeError, OverflowError)
NOT_IN_WEIGHTS = ("dropout", "bigram_dropout", "init")  # fields of GPTConfig that may differ for the same weights


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
    return {
        "format": FORMAT,
        "model": asdict(config),
        "tokenizer": to_plain(tokenizer),
        "step": step,
        "validation": validation,
    }


def record_validation(path: Path, validation: dict[str, float]) -> None:
    """Replaces the validation figures in a checkpoint by those of the last one, unless that saw fewer tokens."""
    content = read_checkpoint(path)
    if validation["tokens"] < content["gpt"]["validation"].get("tokens", 0):
        return
    content["gpt"]["validation"] = validation
    write_checkpoint(content, path)


def load_checkpoint(path: Path, device: str | torch.device = "cpu") -> Checkpoint:
    """Builds the network and the tokenizer a checkpoint describes, and fills in its weights, strictly.

    Raises:
        UserError: no such file, not a checkpoint of this project or of this version, or weights that do not fit.
    """
    if path.suffix == SUFFIX:
        entry, weights = read_safetensors(path)
    else:
        content = read_checkpoint(path)
        entry, weights = content["gpt"], network_weights(content)
    refuse_other_format(entry, path)
    config = saved_config(entry, path)
    try:
        _refuse_larger(config, weights)
        network = GPT(config)
        network.load_state_dict(weights)
        tokenizer, validation = from_plain(entry["tokenizer"]), {k: float(v) for k, v in entry["validation"].items()}
        if tokenizer.n_vocab != network.config.vocab_size:
            raise ValueError(f"{tokenizer.n_vocab} tokens, but a network for {network.config.vocab_size}")
        checkpoint = Checkpoint(path, network.to(device).eval(), tokenizer, int(entry["step"]), validation)
        checkpoint.describe()  # which needs all of it
    except _UNFIT as error:
        raise _does_not_fit(path, error) from error
    return checkpoint


def _does_not_fit(path: Path, error: Exception) -> UserError:
    reason = " ".join(str(error).split())[:200]
    return UserError(f"{path} does not fit this version of the project ({reason}). Train again, or use another.")


def _refuse_larger(config: GPTConfig, weights: dict[str, torch.Tensor]) -> None:
    """Before a network takes memory: raises ValueError where its config asks for more than the weights there are."""
    there = sum(tensor.numel() for tensor in weights.values())
    if least_weights(config) > there or config.context_length * config.head_dim > MAX_ROPE_NUMBERS:
        raise ValueError(f"it describes a network of {least_weights(config):,} weights, but has {there:,}")


def saved_config(entry: dict[str, Any], path: Path) -> GPTConfig:
    """The network that a checkpoint describes: plain values, whatever its file holds. Raises UserError."""
    try:
        return GPTConfig(**entry["model"])
    except _UNFIT as error:
        raise _does_not_fit(path, error) from error


def network_weights(content: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The weights of the GPT in a checkpoint, by their names there."""
    return {
        name.removeprefix(NETWORK_PREFIX): tensor
        for name, tensor in content["state_dict"].items()
        if name.startswith(NETWORK_PREFIX)
    }


def refuse_other_format(entry: dict[str, Any], path: Path) -> None:
    """Raises UserError for a checkpoint that a later version of the project wrote."""
    if entry.get("format", 1) != FORMAT:
        raise UserError(
            f"{path} has format {entry['format']!r}, but this version of the project reads format {FORMAT}. Use the "
            "version that wrote it, or another checkpoint."
        )


def refuse_other_network(entry: dict[str, Any], config: GPTConfig, tokenizer: tiktoken.Encoding, path: Path) -> None:
    """Raises UserError where the weights of a checkpoint are not for this network, or not for these tokens."""
    refuse_other_format(entry, path)
    saved, ours = asdict(saved_config(entry, path)), asdict(config)
    differ = [
        f"model.{name} is {ours.get(name)!r}, in the checkpoint {saved.get(name)!r}"
        for name in {**ours, **saved}
        if name not in NOT_IN_WEIGHTS and ours.get(name) != saved.get(name)
    ]
    if not differ and to_plain(tokenizer) != entry["tokenizer"]:
        differ = [f"tokenizer {tokenizer.name} has other tokens than the checkpoint's"]
    if differ:
        raise UserError(f"{path} is of another network: {'; '.join(differ)}. Give the same, or another checkpoint.")


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
